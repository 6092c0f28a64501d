"""The k-th score digit by digit, from histograms: exact on anything, also where one score has a great share.

Law: the only numbers that cross ranks are counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from secateur.selection.ranks import counts_here, integers, mesh_of, sum_over_ranks, totals
from secateur.selection.scores import refuse_nan
from secateur.selection.sources import Source, pieces_of
from secateur.selection.thresholds import Found, above_and_equal

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["search_by_digits"]


def search_by_digits(sources: list[Source], kept: int) -> Found:
    """The k-th largest score from histograms of 16 bits of its order-preserving key at a time."""
    wide = any(next((piece.dtype for _, piece in pieces_of(source)), None) == torch.float64 for source in sources)
    bits = 64 if bool(sum_over_ranks(sources, integers([int(wide)]))[0]) else 32
    prefix, missing = 0, kept
    for shift in range(bits - 16, -1, -16):
        histogram = torch.zeros(1 << 16, dtype=torch.int64, device="cpu")
        for source in sources:
            share = torch.zeros(1 << 16, dtype=torch.int64, device="cpu")
            for _, piece in pieces_of(source):
                if shift == bits - 16:
                    refuse_nan(source.name, piece)
                keys = _keys(piece, bits)
                digits = (keys >> np.uint64(shift)) & np.uint64(0xFFFF)
                if shift < bits - 16:
                    digits = digits[(keys >> np.uint64(shift + 16)) == np.uint64(prefix)]
                share += torch.from_numpy(np.bincount(digits.astype(np.int64), minlength=1 << 16))
            histogram += share * counts_here(source, mesh_of(sources))
        histogram = sum_over_ranks(sources, histogram)
        from_top = histogram.flip(0).cumsum(0)
        rank = int(torch.searchsorted(from_top, missing))
        digit = (1 << 16) - 1 - rank
        missing -= int(from_top[rank] - histogram[digit])
        prefix = (prefix << 16) | digit
    threshold = _value(prefix, bits)
    above = [sum(int(above_and_equal(piece, threshold)[0].sum()) for _, piece in pieces_of(s)) for s in sources]
    for source, total in zip(sources, totals(sources, above), strict=True):
        source.kept = total
    return Found(threshold, missing)


def _keys(piece: Tensor, bits: int) -> npt.NDArray[np.uint64]:
    """Unsigned integers in the order of the scores; −0.0 and 0.0 share one."""
    scores = piece.cpu().numpy()
    if bits == 64:
        raw = (scores.astype(np.float64) + 0.0).view(np.uint64)
        negative = (raw >> np.uint64(63)).astype(bool)
        return np.where(negative, ~raw, raw | np.uint64(1 << 63))
    short = (scores + np.float32(0.0)).view(np.uint32)
    negative = (short >> np.uint32(31)).astype(bool)
    return np.where(negative, ~short, short | np.uint32(1 << 31)).astype(np.uint64)


def _value(key: int, bits: int) -> float:
    top = 1 << (bits - 1)
    raw = key ^ top if key & top else key ^ ((1 << bits) - 1)
    return float(
        np.array(raw, dtype=np.uint64 if bits == 64 else np.uint32).view(np.float64 if bits == 64 else np.float32)
    )
