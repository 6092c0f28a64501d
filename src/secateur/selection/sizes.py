"""How much is looked at at a time: read as ``sizes.PIECE`` wherever it is used, so that a test can change it for all.
Work on parts of tensors in threads. What a search for the k-th score finds, and exact comparisons with it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

# How much is looked at at a time: read as ``sizes.PIECE`` wherever it is used, so that a test can change it for all.
#
# Law: no result depends on these.

# A piece is just below ATen's grain of 32768 elements: its operations run without an OpenMP barrier (which costs
# milliseconds on a busy machine), its buffers stay in the L2 cache, and whole segments go to threads instead.
PIECE = (1 << 15) - 64
SEGMENT = PIECE * 64  # 2 M entries: what one thread works through at a time
DEVICE_SEGMENT = 1 << 24  # on an accelerator: few launches, bounded buffers
SAMPLE = 1 << 18  # entries sampled to bracket the threshold
AT_ONCE = 1 << 19  # entries of models that are ranked in one piece
COLLECTED = 1 << 22  # entries that may lie inside the bracket before the search turns to counting digits
ROUNDS = 4  # brackets that are tried before digits
STANDARD_DEVIATIONS = 3  # half width of the bracket; a miss costs a second search, never a wrong answer


# ---- Work on parts of tensors in threads.
#
# Law: results come in the order of the parts, and only a few parts are taken ahead.

_Item = TypeVar("_Item")


_Result = TypeVar("_Result")


def in_threads(work: Callable[[_Item], _Result], parts: Iterable[_Item], threads: int) -> Iterator[_Result]:
    """``work(part)`` for each part, in order; only a few parts are taken ahead, so they may be large.

    >>> list(in_threads(abs, range(-3, 0), threads=2))
    [3, 2, 1]
    """
    if threads <= 1:
        yield from map(work, parts)
        return
    ahead: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for part in parts:
                ahead.append(pool.submit(work, part))
                if len(ahead) > threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


# ---- What a search for the k-th score finds, and exact comparisons with it.


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
