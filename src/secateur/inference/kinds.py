"""The forms of packed layers by their names, as files and pickles say them.

Law: a pickle names ``secateur.inference``, wherever a layer is defined.
"""

from __future__ import annotations

from typing import Any

from secateur.inference.block_convolution import BlockConv1d, BlockConv2d
from secateur.inference.block_linear import BlockLinear
from secateur.inference.blocks import FusedBlock
from secateur.inference.dense import ChannelsLastMaxPool2d, FoldedConv2d
from secateur.inference.followers import Absorbed
from secateur.inference.grouped_linear import GroupedLinear
from secateur.inference.pointwise import Pointwise
from secateur.inference.semi_structured import SemiStructuredLinear
from secateur.inference.sparse_convolution import SparseConv1d, SparseConv2d
from secateur.inference.sparse_linear import SparseLinear
from secateur.inference.window_linear import WindowLinear

__all__ = ["KINDS"]

KINDS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        GroupedLinear,
        SparseLinear,
        BlockLinear,
        WindowLinear,
        SemiStructuredLinear,
        SparseConv1d,
        SparseConv2d,
        BlockConv1d,
        BlockConv2d,
    )
}

for _layer in (*KINDS.values(), Pointwise, Absorbed, FusedBlock, FoldedConv2d, ChannelsLastMaxPool2d):
    _layer.__module__ = "secateur.inference"
