"""The compiled kernels: loading them, the operators that call them, and the layouts they read."""

from secateur.native.kernels import (
    MOST_COLUMNS,
    available,
    block_linear,
    csr_linear,
    dense_block,
    dense_csr,
    describe,
    library,
    window_linear,
)
from secateur.native.windows import LANES, from_windows, laid_out, to_windows

__all__ = [
    "LANES",
    "MOST_COLUMNS",
    "available",
    "block_linear",
    "csr_linear",
    "dense_block",
    "dense_csr",
    "describe",
    "from_windows",
    "laid_out",
    "library",
    "to_windows",
    "window_linear",
]
