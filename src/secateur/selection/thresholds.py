"""What a search for the k-th score finds, and exact comparisons with it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["COMPLETE", "Found", "above_and_equal", "rounded"]


@dataclass(frozen=True)
class Found:
    """Keep what is above the threshold, and the first ``ties`` entries that equal it."""

    threshold: float
    ties: int


COMPLETE = Found(0.0, 0)  # nothing is left to do: masks and counts are written


def above_and_equal(piece: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Exact comparisons of a float32 or float64 piece with a float64 threshold."""
    dtype = np.dtype(np.float32 if piece.dtype == torch.float32 else np.float64)
    floor = float(rounded(threshold, dtype, up=False))
    is_above = piece > floor
    return is_above, (piece == floor) if floor == threshold else torch.zeros_like(is_above)


@functools.lru_cache(maxsize=64)
def rounded(value: float, dtype: np.dtype[Any], *, up: bool) -> Any:
    """The nearest number of the dtype on one side of a float64, so that comparing in the narrow type stays exact."""
    with np.errstate(over="ignore"):
        near = dtype.type(value)
    if up and float(near) < value:
        return np.nextafter(near, dtype.type(np.inf))
    if not up and float(near) > value:
        return np.nextafter(near, dtype.type(-np.inf))
    return near
