"""The k-th score from a sample: two scores that bracket it, and one pass over what lies between them. The k-th score
digit by digit, from histograms: exact on anything, also where one score has a great share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from secateur.selection import sizes
from secateur.selection.sizes import COMPLETE, Found, above_and_equal, in_threads, rounded
from secateur.selection.sources import (
    Source,
    counts_here,
    integers,
    mesh_of,
    nan_error,
    pieces_of,
    refuse_nan,
    refuse_scores,
    scored_pieces,
    scores_of,
    segments_of,
    sum_over_ranks,
    totals,
)

if TYPE_CHECKING:
    import numpy.typing as npt


# ---- The k-th score from a sample: two scores that bracket it, and one pass over what lies between them.
#
# Law: a bracket that misses costs another search, never a wrong answer.


def sample_of(sources: list[Source]) -> npt.NDArray[np.float64]:
    """A sorted sample of all scores, drawn without torch's generator; NaN last."""
    entries = sum(source.numel for source in sources)
    generator = np.random.default_rng(entries)
    sampled: list[npt.NDArray[Any]] = []
    for source in sources:
        size = -(-sizes.SAMPLE * source.numel // entries)
        if size == 0:
            continue
        where = generator.integers(0, source.numel, size)
        tensor = source.load()
        index = torch.from_numpy(where).to(tensor.device)
        if tensor.is_contiguous():
            picked = tensor.view(-1)[index]
        else:
            picked = tensor[tuple(torch.from_numpy(axis) for axis in np.unravel_index(where, tuple(source.shape)))]
        alive = None if source.among is None else source.among[index]
        sampled.append(scores_of(source, picked, alive).cpu().numpy())
    sample: npt.NDArray[np.float64] = np.concatenate(sampled)
    sample.sort()
    return sample


def bracket_of(sample: npt.NDArray[np.float64], share: float) -> tuple[float, float]:
    """Two scores between which that share of the largest ends, almost surely."""
    middle = sample.size * (1 - share)
    half_width = sizes.STANDARD_DEVIATIONS * ((sample.size * share * (1 - share)) ** 0.5 + 1)
    first, last = int(middle - half_width), int(middle + half_width) + 1
    below = float(sample[first]) if first >= 0 else -np.inf
    above = float(sample[last]) if last < sample.size else np.inf
    if np.isnan(below) or np.isnan(above):
        return -np.inf, np.inf  # the pass meets the NaN and names it
    return below, above


def search_in_bracket(
    sources: list[Source], kept: int, below: float, above: float, watch: Callable[[list[Any]], Iterable[Any]]
) -> Found | None:
    """One pass: count what is above the bracket, collect what is inside, finish there. None: it is not in there, or
    too much is.
    """
    collected: list[tuple[Source, int, npt.NDArray[np.int32], npt.NDArray[Any]]] = []
    inside_total = 0
    collect = below < above
    scratch = threading.local()

    def work(item: tuple[Source, int, Tensor]) -> _Classified:
        return _classify(*item, below, above, collect=collect, scratch=scratch)

    def segments() -> Iterator[tuple[Source, int, Tensor]]:
        for source in watch(sources):
            source.kept = 0
            for at, segment in segments_of(source.load()):
                yield source, at, segment

    on_host = all(source.device.type == "cpu" for source in sources)
    large = sum(source.numel for source in sources) > sizes.SEGMENT
    for found in in_threads(work, segments(), torch.get_num_threads() if on_host and large else 1):
        found.source.kept += found.above
        inside_total += found.inside
        if found.values.size:
            collected.append((found.source, found.start, found.offsets, found.values))
        if collect and inside_total > sizes.COLLECTED:
            return None
    missing = kept - sum(source.kept for source in sources)
    if not 0 < missing <= inside_total:
        return None
    if below == above:
        return Found(below, missing)
    joined = np.concatenate([values for *_, values in collected])
    joined.partition(joined.size - missing)
    threshold = float(joined[joined.size - missing])
    ties = missing - int(np.count_nonzero(joined > threshold))
    for source, at, positions, values in collected:
        values = values.astype(np.float64)  # compared exactly, whatever its type was
        chosen = values > threshold
        equal = np.flatnonzero(values == threshold)[:ties]
        ties -= equal.size
        chosen[equal] = True
        source.kept += int(np.count_nonzero(chosen))
        if source.mask is not None:
            where = torch.from_numpy(positions.astype(np.int64) + at).to(source.device)
            source.mask[where] = torch.from_numpy(chosen).to(source.device)
    return COMPLETE


@dataclass(frozen=True)
class _Classified:
    """A segment: how many scores are above the bracket, how many inside, and where and which those are."""

    source: Source
    start: int
    above: int
    inside: int
    offsets: npt.NDArray[np.int32]
    values: npt.NDArray[Any]


def _classify(
    source: Source,
    at: int,
    segment: Tensor,
    below: float,
    above: float,
    *,
    collect: bool,
    scratch: threading.local,
) -> _Classified:
    """The source's mask, if it has one, becomes "not below the bracket" on the way."""
    with torch.no_grad():
        mask = None if source.mask is None else source.mask[at : at + segment.shape[0]]
        if segment.device.type == "cpu":
            above_count, inside = _compare_on_host(source, at, segment, below, above, mask, scratch)
        else:
            above_count, inside = _compare_on_device(source, at, segment, below, above, mask)
        if not collect:
            inside_count = int(np.count_nonzero(inside))
            if inside_count:
                for _, piece in scored_pieces(source, at, segment):
                    refuse_nan(source.name, piece)
            return _Classified(source, at, above_count, inside_count, _NOWHERE, _NOWHERE)
        offsets = np.flatnonzero(inside)
        if offsets.size > sizes.COLLECTED:
            return _Classified(source, at, above_count, offsets.size, _NOWHERE, _NOWHERE)
        where = torch.from_numpy(offsets).to(segment.device)
        alive = None if source.among is None else source.among[at + where]
        values = scores_of(source, segment[where], alive).cpu().numpy()
        if np.isnan(values).any():
            raise nan_error(source.name)
        return _Classified(source, at, above_count, offsets.size, offsets.astype(np.int32), values)


_NOWHERE = np.empty(0, dtype=np.int32)


def _compare_on_host(
    source: Source,
    at: int,
    segment: Tensor,
    below: float,
    above: float,
    mask: Tensor | None,
    scratch: threading.local,
) -> tuple[int, npt.NDArray[np.bool_]]:
    """How many are above, and which are inside. A NaN is neither above nor below, so it is inside.

    numpy's comparisons write bools several times faster than ATen's, and into buffers that stay in cache.
    """
    if not hasattr(scratch, "flags"):
        scratch.flags = np.empty((1 if mask is not None else 2, sizes.SEGMENT), dtype=np.bool_)
    is_above = scratch.flags[0, : segment.shape[0]]
    is_below = scratch.flags[1, : segment.shape[0]] if mask is None else mask.numpy()
    for start, scores in _scores_on_host(source, at, segment):
        part = slice(start, start + scores.size)
        np.less(scores, rounded(below, scores.dtype, up=True), out=is_below[part])
        np.greater(scores, rounded(above, scores.dtype, up=False), out=is_above[part])
    above_count = int(np.count_nonzero(is_above))
    inside = np.equal(is_below, is_above, out=is_above)
    if mask is not None:
        np.logical_not(is_below, out=is_below)
    return above_count, inside


def _scores_on_host(source: Source, at: int, segment: Tensor) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """(offset, scores) of the pieces of a segment, as arrays."""
    if source.on_arrays and source.among is None and segment.dtype in (torch.float32, torch.float64):
        assert source.function is not None
        array: Any = segment.numpy()
        for start in range(
            0, array.size, 4 * sizes.PIECE
        ):  # numpy has no barriers, and fewer calls meet at Python's lock
            piece = array[start : start + 4 * sizes.PIECE]
            scores: Any = np.asarray(source.function(piece))
            if scores.shape != piece.shape:
                refuse_scores(source.name, torch.from_numpy(scores), segment[start : start + 4 * sizes.PIECE])
            yield start, scores if scores.dtype in (np.float32, np.float64) else scores.astype(np.float64)
        return
    for position, piece in scored_pieces(source, at, segment):
        yield position - at, piece.numpy()


def _compare_on_device(
    source: Source, at: int, segment: Tensor, below: float, above: float, mask: Tensor | None
) -> tuple[int, npt.NDArray[np.bool_]]:
    ((_, scores),) = scored_pieces(source, at, segment)
    dtype = np.dtype(np.float32 if scores.dtype == torch.float32 else np.float64)
    is_below = scores < float(rounded(below, dtype, up=True))
    is_above = scores > float(rounded(above, dtype, up=False))
    if mask is not None:
        torch.logical_not(is_below, out=mask)
    return int(is_above.sum()), (is_below == is_above).cpu().numpy()


# ---- The k-th score digit by digit, from histograms: exact on anything, also where one score has a great share.
#
# Law: the only numbers that cross ranks are counts.


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
