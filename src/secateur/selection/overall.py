"""The k largest over many tensors that are never joined, as one competition.

Law: exactly k are kept, and among equal scores the first in row-major order, tensor after tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from secateur.selection import sizes
from secateur.selection.bracket import bracket_of, sample_of, search_by_digits, search_in_bracket
from secateur.selection.sizes import COMPLETE, Found, above_and_equal
from secateur.selection.sources import (
    Source,
    competitors,
    empty_mask,
    first_of_shards,
    mesh_of,
    pieces_of,
    refuse_nan,
    totals,
)

if TYPE_CHECKING:
    import numpy.typing as npt


def keep_largest_overall(
    scores: Mapping[str, Tensor],
    kept: int,
    *,
    among: Mapping[str, Tensor] | None = None,
    watch: Callable[[list[Any]], Iterable[Any]] = iter,
) -> dict[str, Tensor]:
    """True for the ``kept`` largest entries of all tensors together, as one competition.

    The threshold is bracketed from a sample, one pass counts what lies above and collects what lies inside, and the
    k-th score is found in there (after Floyd & Rivest's SELECT, CACM 18(3), 1975). Where the bracket fails or holds
    too many equal scores, and for shards, the threshold is found digit by digit from histograms: exact in any case.

    Args:
        scores: ``{name: Tensor}`` of any shapes, real dtypes, strides and devices; lazy, or DTensors.
        kept: how many entries stay, over all tensors.
        among: ``{name: mask}`` of the tensors' shapes; only entries that are true take part. If fewer than ``kept``
            take part, all of them stay.
        watch: goes round the loop over tensors; a progress bar, say.

    Returns:
        ``{name: bool mask}`` with exactly ``kept`` True. Among equal scores the first are kept, in the order of the
        mapping and then row-major. A DTensor's mask is a DTensor with the same placements.

    Raises:
        ValueError: a score is NaN (the message names the tensor), or ``kept`` is out of range.

    >>> keep_largest_overall({"a": torch.tensor([1.0, 4.0]), "b": torch.tensor([3.0, 2.0])}, 2)
    {'a': tensor([False,  True]), 'b': tensor([ True, False])}
    """
    sources, total = competitors(scores, kept, among)
    for source in sources:
        source.mask = empty_mask(source.numel, source.device)
    found = _search(sources, min(kept, total), watch)
    if found is not COMPLETE:
        _write_masks(sources, found)
    return {source.name: source.whole(source.mask) for source in sources if source.mask is not None}


def counts_kept_overall(
    scores: Mapping[str, Tensor],
    kept: int,
    *,
    among: Mapping[str, Tensor] | None = None,
    watch: Callable[[list[Any]], Iterable[Any]] = iter,
) -> dict[str, int]:
    """How many entries of each tensor are among the ``kept`` largest of all: the counts of `keep_largest_overall`.

    Holds no masks, so that it runs over a checkpoint that does not fit in memory.

    >>> counts_kept_overall({"a": torch.tensor([1.0, 4.0, 5.0]), "b": torch.tensor([3.0, 2.0])}, 3)
    {'a': 2, 'b': 1}
    """
    sources, total = competitors(scores, kept, among)
    kept = min(kept, total)
    found = _search(sources, kept, watch)
    if found is not COMPLETE:
        for source, taken, _ in _shares_of_ties(sources, found):
            source.kept += taken
    return {source.name: source.kept for source in sources}


def _search(sources: list[Source], kept: int, watch: Callable[[list[Any]], Iterable[Any]]) -> Found:
    """Find the threshold and each source's count of entries above it."""
    if kept == 0:
        for source in sources:
            for _, piece in pieces_of(source):
                refuse_nan(source.name, piece)  # a NaN never passes, though nothing needs ranking here
            if source.mask is not None:
                source.mask.fill_(False)
        return COMPLETE
    if mesh_of(sources) is not None:
        return search_by_digits(sources, kept)
    entries = sum(source.numel for source in sources)
    if entries <= sizes.AT_ONCE:
        _search_at_once(sources, kept)
        return COMPLETE
    sample = sample_of(sources)
    below, above = bracket_of(sample, kept / entries)
    for _ in range(sizes.ROUNDS):
        found = search_in_bracket(sources, kept, below, above, watch)
        if found is not None:
            return found
        # too much lies inside: most likely one score has a great share, so rank against the commonest one
        inside = sample[np.searchsorted(sample, below) : np.searchsorted(sample, above, side="right")]
        if inside.size == 0:
            break
        values, counts = np.unique(inside, return_counts=True)
        pivot = float(values[counts.argmax()])
        found = search_in_bracket(sources, kept, pivot, pivot, watch)
        if found is not None:
            return found
        if sum(source.kept for source in sources) >= kept:
            below = float(np.nextafter(pivot, np.inf))
        else:
            above = float(np.nextafter(pivot, -np.inf))
        if below > above:
            break
    return search_by_digits(sources, kept)


def _search_at_once(sources: list[Source], kept: int) -> None:
    """All scores side by side: for a small model what the passes cost matters, not what they read."""
    scores: list[npt.NDArray[Any]] = []
    for source in sources:
        for _, piece in pieces_of(source):
            refuse_nan(source.name, piece)
            scores.append(piece.cpu().numpy())
    joined = np.concatenate(scores)
    threshold = np.partition(joined, joined.size - kept)[joined.size - kept]
    keep = joined > threshold
    keep[np.flatnonzero(joined == threshold)[: kept - np.count_nonzero(keep)]] = True
    at = 0
    for source in sources:
        its = keep[at : at + source.numel]
        source.kept = int(np.count_nonzero(its))
        if source.mask is not None:
            source.mask.copy_(torch.from_numpy(its))
        at += source.numel


def _write_masks(sources: list[Source], found: Found) -> None:
    """Masks from a threshold; the ties that stay are the first in order."""
    for source, taken, ties in _shares_of_ties(sources, found):
        assert source.mask is not None
        gather = source.sharded is not None and 0 < taken < ties
        equal_mask = torch.zeros_like(source.mask) if gather else None
        left = (source.numel if taken == ties else 0) if source.sharded is not None else taken
        with torch.no_grad():
            for at, piece in pieces_of(source):
                mask = source.mask[at : at + piece.numel()]
                is_above, equal = above_and_equal(piece, found.threshold)
                mask.copy_(is_above)
                if equal_mask is not None:
                    equal_mask[at : at + piece.numel()] = equal
                elif left > 0:
                    count = int(equal.sum())
                    mask |= equal if count <= left else equal & (equal.cumsum(0) <= left)
                    left -= count
        if equal_mask is not None:
            source.mask |= first_of_shards(source, equal_mask, taken)


def _shares_of_ties(sources: list[Source], found: Found) -> list[tuple[Source, int, int]]:
    """(source, how many of its ties stay, how many it has), over all shards; those of the first sources stay."""
    with torch.no_grad():
        local = [
            sum(int(above_and_equal(piece, found.threshold)[1].sum()) for _, piece in pieces_of(source))
            for source in sources
        ]
    shares = []
    rest = found.ties
    for source, ties in zip(sources, totals(sources, local), strict=True):
        shares.append((source, min(rest, ties), ties))
        rest -= min(rest, ties)
    return shares
