"""Which entries are the k largest: of a row, of a tensor, of many tensors that are never joined.

Law: exactly k are kept, and among equal scores the first in row-major order of the shape, tensor after tensor. The
scores are seen in pieces that stay in cache, may be computed on access, and may be shards of a larger tensor.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from secateur.selection import sizes
from secateur.support import is_sharded, laid_out, whole

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "LazyScores",
    "comparable",
    "counts_kept_overall",
    "in_threads",
    "keep_largest",
    "keep_largest_overall",
    "removed_lowest",
]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class LazyScores(Mapping[str, Tensor]):
    """Scores ``{name: function(weight)}`` that are computed on access and never all held.

    An *elementwise* function (``function.elementwise`` is true, or said here) is also computed piece by piece, so
    that ranking a model takes no memory of the model's size. A function that draws random numbers gives the same
    scores at every access: the state of torch's generator at the first one is kept.

    Args:
        weights: ``{name: Tensor}``, any shapes and dtypes; may itself be lazy, such as a checkpoint on disk.
        function: called with a weight, returns scores of the same shape.
        elementwise: whether each score depends on its own weight alone. ``None`` asks the function's attribute.
        evidence: ``{name: {keyword: Tensor}}``, passed on to the function.
        among: ``{name: mask}`` of an earlier pruning: what it removed has the score -inf.

    >>> scores = LazyScores({"weight": torch.tensor([3.0, -5.0])}, torch.abs)
    >>> scores["weight"]
    tensor([3., 5.])
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        function: Callable[..., Tensor],
        *,
        elementwise: bool | None = None,
        evidence: Mapping[str, Mapping[str, Tensor]] | None = None,
        among: Mapping[str, Tensor] | None = None,
    ) -> None:
        innermost: Any = function
        while isinstance(innermost, functools.partial):
            innermost = innermost.func
        self.weights = weights
        self.function = function
        self.evidence = evidence
        self.among = among
        said = bool(getattr(innermost, "elementwise", False)) if elementwise is None else elementwise
        self.elementwise = said and evidence is None
        self._in_shards = said
        self.on_arrays = self.elementwise and bool(getattr(innermost, "on_arrays", False))
        self._generator_states: dict[str, Tensor] = {}

    def only(self, names: Iterable[str]) -> LazyScores:
        """The same scores, of some of the tensors."""
        weights = {name: self.weights[name] for name in names} if isinstance(self.weights, dict) else None
        part = LazyScores(
            _Part(self.weights, tuple(names)) if weights is None else weights,
            self.function,
            evidence=self.evidence,
            among=self.among,
        )
        part.elementwise, part.on_arrays = self.elementwise, self.on_arrays
        part._generator_states, part._in_shards = self._generator_states, self._in_shards
        return part

    def shape(self, name: str) -> torch.Size:
        """The shape of one weight; asks the container's ``shapes`` first, so that nothing is read from disk."""
        shapes: Mapping[str, torch.Size] | None = getattr(self.weights, "shapes", None)
        return self.weights[name].shape if shapes is None else torch.Size(shapes[name])

    def __getitem__(self, name: str) -> Tensor:
        scores = self.before_masking(name)
        if self.among is None or name not in self.among:
            return scores
        return removed_lowest(comparable(scores), self.among[name].ne(0))

    def before_masking(self, name: str) -> Tensor:
        """The scores of one tensor, of removed weights too."""
        given = weight = self.weights[name].detach()
        evidence = {} if self.evidence is None else self.evidence.get(name, {})
        if is_sharded(weight) and not self._in_shards:  # sums and orders run over the whole tensor: one at a time
            weight, evidence = whole(weight), {word: whole(value) for word, value in evidence.items()}
        if self.elementwise:
            scores = self.function(weight)
        elif name in self._generator_states:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._generator_states[name])
                scores = self.function(weight, **evidence)
        else:
            self._generator_states[name] = torch.get_rng_state()
            scores = self.function(weight, **evidence)
        _refuse_scores(name, scores, weight)
        return laid_out(scores, given) if is_sharded(given) else scores

    def __contains__(self, name: object) -> bool:
        return name in self.weights  # the mapping's own would compute the scores

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


@dataclass(frozen=True)
class _Part(Mapping[str, Tensor]):
    """Some of the entries of a mapping that loads on access."""

    whole: Mapping[str, Tensor]
    names: tuple[str, ...]

    def __getitem__(self, name: str) -> Tensor:
        return self.whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def keep_largest(table: Tensor, kept: int | Tensor) -> Tensor:
    """In each row of a table, True for the ``kept`` largest entries.

    Args:
        table: scores of shape (groups, units), any real dtype, any strides; also a DTensor if it has one row.
        kept: how many stay in each row: one integer, or an integer tensor of shape (groups,).

    Returns:
        bool tensor of the table's shape. Among equal scores the first are kept.

    Raises:
        ValueError: a score is NaN, or a count does not lie in 0 … units.
        TypeError: a count is no integer.

    >>> keep_largest(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 2)
    tensor([[False,  True,  True, False]])
    """
    if table.dim() != 2:
        raise ValueError(f"a table of scores has shape (groups, units), not {tuple(table.shape)}.")
    groups, units = table.shape
    if isinstance(kept, Tensor):
        if kept.dtype.is_floating_point or kept.shape != (groups,):
            raise ValueError(f"counts for {groups} groups must be integers of shape ({groups},), not {kept!r}.")
        if groups > 0 and bool(kept.eq(kept[0]).all()):
            kept = int(kept[0])
    lowest, highest = (int(kept.min()), int(kept.max())) if isinstance(kept, Tensor) and groups else (0, 0)
    if not isinstance(kept, Tensor):
        try:
            lowest = highest = kept = operator.index(kept)
        except TypeError:
            raise TypeError(
                f"a count is an integer, or an integer tensor of shape ({groups},), not {kept!r}."
            ) from None
    if not 0 <= lowest <= highest <= units:
        raise ValueError(f"can't keep {lowest if lowest < 0 else highest} of {units} units.")
    if groups == 1 and isinstance(kept, int):
        return keep_largest_overall({"": table}, kept)[""]
    if isinstance(kept, int) and 0 < units <= 8:
        return _keep_by_rank(table, kept)
    rows = max(1, (1 << 22) // max(units, 1))
    counts = kept if isinstance(kept, Tensor) else torch.full((groups,), kept, device="cpu")
    mask = _empty_mask(groups * units, table.device).view(groups, units)
    for start in range(0, groups, rows):
        part = slice(start, start + rows)
        mask[part] = _keep_in_rows(comparable(table[part].detach()), counts[part].to(table.device))
    return mask


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
    sources, total = _sources(scores, kept, among)
    for source in sources:
        source.mask = _empty_mask(source.numel, source.device)
    found = _search(sources, min(kept, total), watch)
    if found is not _COMPLETE:
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
    sources, total = _sources(scores, kept, among)
    kept = min(kept, total)
    found = _search(sources, kept, watch)
    if found is not _COMPLETE:
        for source, taken, _ in _shares_of_ties(sources, found):
            source.kept += taken
    return {source.name: source.kept for source in sources}


# ---- rows ----------------------------------------------------------------------------------------------------------


def _keep_by_rank(table: Tensor, kept: int) -> Tensor:
    """Few units a row (n:m): an entry's rank is the number of entries that beat it; m(m-1)/2 comparisons of columns."""
    groups, units = table.shape
    mask = _empty_mask(groups * units, table.device).view(groups, units)
    on_host = table.device.type == "cpu"
    # on a host long pieces, for threads meet at Python's lock at each of the many short operations
    step = max(1, (8 * sizes.PIECE if on_host else sizes.DEVICE_SEGMENT) // max(units, 1))
    segment = 8 * step

    def work(start: int) -> None:
        with torch.no_grad():
            for first in range(start, min(start + segment, groups), step):
                rows = comparable(table[first : first + step].detach())
                if on_host:
                    _first_of_ranks(rows.numpy(), kept, mask[first : first + step].numpy())
                else:
                    _refuse_nan("", rows)
                    mask[first : first + step] = _first_of_ranks_on_device(rows, kept)

    threads = torch.get_num_threads() if on_host and groups > segment else 1
    for _ in in_threads(work, range(0, groups, segment), threads):
        pass
    return mask


def _first_of_ranks(rows: npt.NDArray[Any], kept: int, mask: npt.NDArray[np.bool_]) -> None:
    """Write which entries of (groups, units) have fewer than ``kept`` entries before them; earlier wins a tie."""
    groups, units = rows.shape
    columns = np.empty((units, groups), dtype=rows.dtype)
    np.copyto(columns, rows.T)  # from here on every operation is contiguous
    if columns.size and np.isnan(columns.max()):
        raise _nan("")
    beaten = np.empty((units, groups), dtype=np.uint8)
    beaten[:] = np.arange(units - 1, -1, -1, dtype=np.uint8)[:, None]  # as if beaten by all that follow
    wins = np.empty(groups, dtype=np.bool_)
    for first in range(units):
        for second in range(first + 1, units):
            np.greater_equal(columns[first], columns[second], out=wins)
            beaten[first] -= wins.view(np.uint8)
            beaten[second] += wins.view(np.uint8)
    np.stack(list(beaten < kept), axis=-1, out=mask)


def _first_of_ranks_on_device(rows: Tensor, kept: int) -> Tensor:
    columns = rows.t().contiguous()
    units = columns.shape[0]
    beaten = torch.zeros(columns.shape, dtype=torch.uint8, device=columns.device)
    for first in range(units):
        for second in range(first + 1, units):
            wins = columns[first] >= columns[second]
            beaten[second] += wins
            beaten[first] += ~wins
    return (beaten < kept).t()


def _keep_in_rows(table: Tensor, kept: Tensor) -> Tensor:
    """Many units a row: each row's k-th score, then ties by position."""
    _refuse_nan("", table)
    units = table.shape[1]
    lowest, highest = int(kept.min()), int(kept.max())
    if highest == 0:
        return torch.zeros(table.shape, dtype=torch.bool, device=table.device)
    if lowest == highest:
        threshold = torch.kthvalue(table, units - lowest + 1, dim=1, keepdim=True).values
    else:
        ordered = table.sort(dim=1, descending=True).values
        threshold = ordered.gather(1, (kept - 1).clamp(min=0).unsqueeze(1))
    mask = table > threshold
    ties = table == threshold
    missing = kept.unsqueeze(1) - mask.sum(1, keepdim=True)
    if not bool((ties.sum(1, keepdim=True) == missing).all()):
        ties &= ties.cumsum(1, dtype=torch.int32) <= missing
    return mask | ties


# ---- many tensors --------------------------------------------------------------------------------------------------


@dataclass
class _Source:
    """One tensor of the competition: where its scores come from, and what was found out about them."""

    name: str
    load: Callable[[], Tensor]  # the local weights or scores; cheap if in memory, computed or read if not
    function: Callable[[Tensor], Tensor] | None  # elementwise, from a piece of what was loaded to its scores
    among: Tensor | None  # flat local bool mask of the entries that take part
    shape: torch.Size  # local
    device: torch.device
    sharded: DTensor | None
    on_arrays: bool = False  # the function takes numpy arrays too
    mask: Tensor | None = None  # flat, local, written by the search
    kept: int = 0  # over all shards

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def whole(self, flat: Tensor) -> Tensor:
        """A flat local mask in the tensor's shape; for a shard, the DTensor that it is a part of."""
        local = flat.reshape(self.shape)
        if self.sharded is None:
            return local
        from torch.distributed.tensor import DTensor

        like = self.sharded
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


@dataclass(frozen=True)
class _Found:
    """Keep what is above the threshold, and the first ``ties`` entries that equal it."""

    threshold: float
    ties: int


_COMPLETE = _Found(0.0, 0)  # nothing is left to do: masks and counts are written


def _sources(scores: Mapping[str, Tensor], kept: int, among: Mapping[str, Tensor] | None) -> tuple[list[_Source], int]:
    """The tensors of a competition, checked, and the number of entries that take part in it."""
    sources = []
    lazy = scores if isinstance(scores, LazyScores) else None
    among = lazy.among if lazy is not None and among is None else among
    container = lazy.weights if lazy is not None and lazy.elementwise else scores
    for name in scores:
        given = (scores if lazy is None else lazy.weights)[name].detach()
        local = _local(given)
        if local.is_complex():
            raise ValueError(f"{_prefix(name)}complex scores have no order.")
        if local.device.type == "meta":
            raise ValueError(f"{_prefix(name)}on the meta device there are no values to rank; load the weights first.")
        load = functools.partial(_identity, local) if isinstance(container, dict) else _loader(container, name)
        part = None
        if among is not None and name in among:
            part = _local(among[name].detach())
            if part.shape != local.shape:
                raise ValueError(f"{name}: a mask of shape {tuple(part.shape)} for shape {tuple(local.shape)}.")
            part = part.ne(0).reshape(-1).to(local.device)
        function = lazy.function if lazy is not None and lazy.elementwise else None
        on_arrays = function is not None and lazy is not None and lazy.on_arrays
        sources.append(_Source(name, load, function, part, local.shape, local.device, _as_dtensor(given), on_arrays))
    entries = sum(_totals(sources, [source.numel for source in sources]))
    if not 0 <= kept <= entries:
        raise ValueError(f"can't keep {kept} of {entries} entries.")
    if among is None:
        return sources, entries
    alive = [source.numel if source.among is None else int(source.among.sum()) for source in sources]
    return sources, sum(_totals(sources, alive))


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _loader(container: Mapping[str, Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: _local(container[name].detach())


def _segments(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(position, entries) of consecutive stretches in row-major order, flat and contiguous."""
    size = sizes.SEGMENT if tensor.device.type == "cpu" else sizes.DEVICE_SEGMENT
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        yield from ((at, flat[at : at + size]) for at in range(0, flat.shape[0], size))
        return
    at = 0
    for part in _flat_parts(tensor, size):
        yield at, part
        at += part.shape[0]


def _scored(source: _Source, at: int, segment: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(position, scores) of the pieces of a segment; float32 or float64."""
    size = sizes.PIECE if segment.device.type == "cpu" else sizes.DEVICE_SEGMENT
    for start in range(0, segment.shape[0], size):
        piece = segment[start : start + size]
        alive = None if source.among is None else source.among[at + start : at + start + piece.shape[0]]
        yield at + start, _score(source, piece, alive)


def _score(source: _Source, entries: Tensor, alive: Tensor | None) -> Tensor:
    scores = entries
    if source.function is not None:
        scores = source.function(entries)
        _refuse_scores(source.name, scores, entries)
    scores = comparable(scores.detach())
    return scores if alive is None else removed_lowest(scores, alive)


def removed_lowest(scores: Tensor, alive: Tensor) -> Tensor:
    """-inf for what an earlier mask removed, whatever it was, and for nothing else."""
    raised = scores.clamp(min=torch.finfo(scores.dtype).min)  # clamp keeps NaN
    return raised.masked_fill(~alive.to(scores.device), -torch.inf)


def _refuse_scores(name: str, scores: Any, weight: Tensor) -> None:
    if not isinstance(scores, Tensor):
        raise TypeError(
            f"{name}: the criterion returned a {type(scores).__name__}, not a tensor; return one score for each weight."
        )
    if scores.shape != weight.shape:
        raise ValueError(
            f"{name}: the criterion returned scores of shape {tuple(scores.shape)} for a weight of shape "
            f"{tuple(weight.shape)}; return one score for each weight."
        )
    if scores.is_complex():
        raise ValueError(f"{_prefix(name)}complex scores have no order.")


def _pieces(source: _Source) -> Iterator[tuple[int, Tensor]]:
    """(position, scores) of all entries, piece by piece."""
    for at, segment in _segments(source.load()):
        yield from _scored(source, at, segment)


def _flat_parts(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Row-major pieces of a tensor of any strides; only a piece is ever copied."""
    if tensor.numel() == 0:
        return
    if tensor.dim() <= 1:
        flat = tensor.reshape(1) if tensor.dim() == 0 else tensor
        for at in range(0, flat.shape[0], size):
            yield flat[at : at + size].contiguous()
        return
    inner = tensor.numel() // tensor.shape[0]
    if inner > size:
        for row in range(tensor.shape[0]):
            yield from _flat_parts(tensor[row], size)
        return
    rows = size // inner
    for row in range(0, tensor.shape[0], rows):
        yield tensor[row : row + rows].reshape(-1)


def comparable(scores: Tensor) -> Tensor:
    """float32 or float64 without loss of order: halves widen exactly; integers go to float64."""
    if scores.dtype in (torch.float32, torch.float64):
        return scores
    return scores.float() if scores.dtype.is_floating_point else scores.double()


def _search(sources: list[_Source], kept: int, watch: Callable[[list[Any]], Iterable[Any]]) -> _Found:
    """Find the threshold and each source's count of entries above it."""
    if kept == 0:
        for source in sources:
            for _, piece in _pieces(source):
                _refuse_nan(source.name, piece)  # a NaN never passes, though nothing needs ranking here
            if source.mask is not None:
                source.mask.fill_(False)
        return _COMPLETE
    if _mesh(sources) is not None:
        return _search_by_digits(sources, kept)
    entries = sum(source.numel for source in sources)
    if entries <= sizes.AT_ONCE:
        _search_at_once(sources, kept)
        return _COMPLETE
    sample = _sample(sources)
    below, above = _bracket(sample, kept / entries)
    for _ in range(sizes.ROUNDS):
        found = _search_in_bracket(sources, kept, below, above, watch)
        if found is not None:
            return found
        # too much lies inside: most likely one score has a great share, so rank against the commonest one
        inside = sample[np.searchsorted(sample, below) : np.searchsorted(sample, above, side="right")]
        if inside.size == 0:
            break
        values, counts = np.unique(inside, return_counts=True)
        pivot = float(values[counts.argmax()])
        found = _search_in_bracket(sources, kept, pivot, pivot, watch)
        if found is not None:
            return found
        if sum(source.kept for source in sources) >= kept:
            below = float(np.nextafter(pivot, np.inf))
        else:
            above = float(np.nextafter(pivot, -np.inf))
        if below > above:
            break
    return _search_by_digits(sources, kept)


def _search_at_once(sources: list[_Source], kept: int) -> None:
    """All scores side by side: for a small model what the passes cost matters, not what they read."""
    scores: list[npt.NDArray[Any]] = []
    for source in sources:
        for _, piece in _pieces(source):
            _refuse_nan(source.name, piece)
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


def _sample(sources: list[_Source]) -> npt.NDArray[np.float64]:
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
        sampled.append(_score(source, picked, alive).cpu().numpy())
    sample: npt.NDArray[np.float64] = np.concatenate(sampled)
    sample.sort()
    return sample


def _bracket(sample: npt.NDArray[np.float64], share: float) -> tuple[float, float]:
    """Two scores between which that share of the largest ends, almost surely."""
    middle = sample.size * (1 - share)
    half_width = sizes.STANDARD_DEVIATIONS * ((sample.size * share * (1 - share)) ** 0.5 + 1)
    first, last = int(middle - half_width), int(middle + half_width) + 1
    below = float(sample[first]) if first >= 0 else -np.inf
    above = float(sample[last]) if last < sample.size else np.inf
    if np.isnan(below) or np.isnan(above):
        return -np.inf, np.inf  # the pass meets the NaN and names it
    return below, above


def _search_in_bracket(
    sources: list[_Source], kept: int, below: float, above: float, watch: Callable[[list[Any]], Iterable[Any]]
) -> _Found | None:
    """One pass: count what is above the bracket, collect what is inside, finish there. None: it is not in there, or
    too much is.
    """
    collected: list[tuple[_Source, int, npt.NDArray[np.int32], npt.NDArray[Any]]] = []
    inside_total = 0
    collect = below < above
    scratch = threading.local()

    def work(item: tuple[_Source, int, Tensor]) -> _Classified:
        return _classify(*item, below, above, collect=collect, scratch=scratch)

    def segments() -> Iterator[tuple[_Source, int, Tensor]]:
        for source in watch(sources):
            source.kept = 0
            for at, segment in _segments(source.load()):
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
        return _Found(below, missing)
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
    return _COMPLETE


@dataclass(frozen=True)
class _Classified:
    """A segment: how many scores are above the bracket, how many inside, and where and which those are."""

    source: _Source
    start: int
    above: int
    inside: int
    offsets: npt.NDArray[np.int32]
    values: npt.NDArray[Any]


def _classify(
    source: _Source,
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
                for _, piece in _scored(source, at, segment):
                    _refuse_nan(source.name, piece)
            return _Classified(source, at, above_count, inside_count, _NOWHERE, _NOWHERE)
        offsets = np.flatnonzero(inside)
        if offsets.size > sizes.COLLECTED:
            return _Classified(source, at, above_count, offsets.size, _NOWHERE, _NOWHERE)
        where = torch.from_numpy(offsets).to(segment.device)
        alive = None if source.among is None else source.among[at + where]
        values = _score(source, segment[where], alive).cpu().numpy()
        if np.isnan(values).any():
            raise _nan(source.name)
        return _Classified(source, at, above_count, offsets.size, offsets.astype(np.int32), values)


_NOWHERE = np.empty(0, dtype=np.int32)


def _compare_on_host(
    source: _Source,
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
        np.less(scores, _rounded(below, scores.dtype, up=True), out=is_below[part])
        np.greater(scores, _rounded(above, scores.dtype, up=False), out=is_above[part])
    above_count = int(np.count_nonzero(is_above))
    inside = np.equal(is_below, is_above, out=is_above)
    if mask is not None:
        np.logical_not(is_below, out=is_below)
    return above_count, inside


def _scores_on_host(source: _Source, at: int, segment: Tensor) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """(offset, scores) of the pieces of a segment, as arrays."""
    if source.on_arrays and source.among is None and segment.dtype in (torch.float32, torch.float64):
        assert source.function is not None
        array: Any = segment.numpy()
        for start in range(0, array.size, 4 * sizes.PIECE):  # numpy has no barriers, and fewer calls meet at Python's lock
            piece = array[start : start + 4 * sizes.PIECE]
            scores: Any = np.asarray(source.function(piece))
            if scores.shape != piece.shape:
                _refuse_scores(source.name, torch.from_numpy(scores), segment[start : start + 4 * sizes.PIECE])
            yield start, scores if scores.dtype in (np.float32, np.float64) else scores.astype(np.float64)
        return
    for position, piece in _scored(source, at, segment):
        yield position - at, piece.numpy()


def _compare_on_device(
    source: _Source, at: int, segment: Tensor, below: float, above: float, mask: Tensor | None
) -> tuple[int, npt.NDArray[np.bool_]]:
    ((_, scores),) = _scored(source, at, segment)
    dtype = np.dtype(np.float32 if scores.dtype == torch.float32 else np.float64)
    is_below = scores < float(_rounded(below, dtype, up=True))
    is_above = scores > float(_rounded(above, dtype, up=False))
    if mask is not None:
        torch.logical_not(is_below, out=mask)
    return int(is_above.sum()), (is_below == is_above).cpu().numpy()


def _above_and_equal(piece: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Exact comparisons of a float32 or float64 piece with a float64 threshold."""
    dtype = np.dtype(np.float32 if piece.dtype == torch.float32 else np.float64)
    floor = float(_rounded(threshold, dtype, up=False))
    is_above = piece > floor
    return is_above, (piece == floor) if floor == threshold else torch.zeros_like(is_above)


@functools.lru_cache(maxsize=64)
def _rounded(value: float, dtype: np.dtype[Any], *, up: bool) -> Any:
    """The nearest number of the dtype on one side of a float64, so that comparing in the narrow type stays exact."""
    with np.errstate(over="ignore"):
        near = dtype.type(value)
    if up and float(near) < value:
        return np.nextafter(near, dtype.type(np.inf))
    if not up and float(near) > value:
        return np.nextafter(near, dtype.type(-np.inf))
    return near


def _write_masks(sources: list[_Source], found: _Found) -> None:
    """Masks from a threshold; the ties that stay are the first in order."""
    for source, taken, ties in _shares_of_ties(sources, found):
        assert source.mask is not None
        gather = source.sharded is not None and 0 < taken < ties
        equal_mask = torch.zeros_like(source.mask) if gather else None
        left = (source.numel if taken == ties else 0) if source.sharded is not None else taken
        with torch.no_grad():
            for at, piece in _pieces(source):
                mask = source.mask[at : at + piece.numel()]
                is_above, equal = _above_and_equal(piece, found.threshold)
                mask.copy_(is_above)
                if equal_mask is not None:
                    equal_mask[at : at + piece.numel()] = equal
                elif left > 0:
                    count = int(equal.sum())
                    mask |= equal if count <= left else equal & (equal.cumsum(0) <= left)
                    left -= count
        if equal_mask is not None:
            source.mask |= _first_of_shards(source, equal_mask, taken)


def _shares_of_ties(sources: list[_Source], found: _Found) -> list[tuple[_Source, int, int]]:
    """(source, how many of its ties stay, how many it has), over all shards; those of the first sources stay."""
    with torch.no_grad():
        local = [
            sum(int(_above_and_equal(piece, found.threshold)[1].sum()) for _, piece in _pieces(source))
            for source in sources
        ]
    shares = []
    rest = found.ties
    for source, ties in zip(sources, _totals(sources, local), strict=True):
        shares.append((source, min(rest, ties), ties))
        rest -= min(rest, ties)
    return shares


# ---- digits: exact on anything, and the only numbers that cross ranks are counts -----------------------------------


def _search_by_digits(sources: list[_Source], kept: int) -> _Found:
    """The k-th largest score from histograms of 16 bits of its order-preserving key at a time."""
    wide = any(next((piece.dtype for _, piece in _pieces(source)), None) == torch.float64 for source in sources)
    bits = 64 if bool(_sum_over_ranks(sources, _integers([int(wide)]))[0]) else 32
    prefix, missing = 0, kept
    for shift in range(bits - 16, -1, -16):
        histogram = torch.zeros(1 << 16, dtype=torch.int64, device="cpu")
        for source in sources:
            share = torch.zeros(1 << 16, dtype=torch.int64, device="cpu")
            for _, piece in _pieces(source):
                if shift == bits - 16:
                    _refuse_nan(source.name, piece)
                keys = _keys(piece, bits)
                digits = (keys >> np.uint64(shift)) & np.uint64(0xFFFF)
                if shift < bits - 16:
                    digits = digits[(keys >> np.uint64(shift + 16)) == np.uint64(prefix)]
                share += torch.from_numpy(np.bincount(digits.astype(np.int64), minlength=1 << 16))
            histogram += share * _counts_here(source, _mesh(sources))
        histogram = _sum_over_ranks(sources, histogram)
        from_top = histogram.flip(0).cumsum(0)
        rank = int(torch.searchsorted(from_top, missing))
        digit = (1 << 16) - 1 - rank
        missing -= int(from_top[rank] - histogram[digit])
        prefix = (prefix << 16) | digit
    threshold = _value(prefix, bits)
    above = [sum(int(_above_and_equal(piece, threshold)[0].sum()) for _, piece in _pieces(s)) for s in sources]
    for source, total in zip(sources, _totals(sources, above), strict=True):
        source.kept = total
    return _Found(threshold, missing)


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


# ---- shards --------------------------------------------------------------------------------------------------------


def _as_dtensor(tensor: Tensor) -> DTensor | None:
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def _local(tensor: Tensor) -> Tensor:
    sharded = _as_dtensor(tensor)
    if sharded is None:
        return tensor
    if any(placement.is_partial() for placement in sharded.placements):
        raise ValueError("a DTensor with partial sums has no values to rank; redistribute it first.")
    local: Tensor = sharded.to_local()
    return local.wait() if hasattr(local, "wait") else local


def _mesh(sources: list[_Source]) -> DeviceMesh | None:
    return next((source.sharded.device_mesh for source in sources if source.sharded is not None), None)


def _counts_here(source: _Source, mesh: DeviceMesh | None) -> int:
    """1 on the ranks whose entries count: of replicas (a plain tensor beside shards is one) the first."""
    if mesh is None:
        return 1
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return 0
    placements = [None] * mesh.ndim if source.sharded is None else source.sharded.placements
    pairs = zip(coordinate, placements, strict=True)
    return int(all(at == 0 or (placement is not None and placement.is_shard()) for at, placement in pairs))


def _sum_over_ranks(sources: list[_Source], counts: Tensor) -> Tensor:
    """Sum counts over the mesh that the shards lie on."""
    mesh = _mesh(sources)
    if mesh is None:
        return counts
    import torch.distributed as distributed

    counts = counts.to(mesh.device_type)
    for dimension in range(mesh.ndim):
        distributed.all_reduce(counts, group=mesh.get_group(dimension))
    return counts.cpu()


def _totals(sources: list[_Source], counts: list[int]) -> list[int]:
    """Each source's count over all its shards."""
    mesh = _mesh(sources)
    here = [count * _counts_here(source, mesh) for source, count in zip(sources, counts, strict=True)]
    return [int(count) for count in _sum_over_ranks(sources, _integers(here))]


def _integers(values: list[int]) -> Tensor:
    """On the host, whatever torch's default device is."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _first_of_shards(source: _Source, equal: Tensor, taken: int) -> Tensor:
    """Of the ties in a sharded tensor, the first in row-major order of the whole tensor; gathers one bool tensor."""
    from torch.distributed.tensor import DTensor, Replicate

    assert source.sharded is not None
    mesh = source.sharded.device_mesh
    whole = source.whole(equal)
    assert isinstance(whole, DTensor)
    flat = whole.full_tensor().reshape(-1)
    first = (flat & (flat.cumsum(0) <= taken)).reshape(whole.shape)
    everywhere = DTensor.from_local(first, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=source.sharded.placements).to_local().reshape(-1)


# ---- helpers -------------------------------------------------------------------------------------------------------


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


def _empty_mask(entries: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(np.empty(entries, dtype=np.bool_))  # numpy asks for huge pages: 3 times fewer faults
    return torch.empty(entries, dtype=torch.bool, device=device)


def _refuse_nan(name: str, scores: Tensor) -> None:
    if bool(scores.isnan().any()):
        raise _nan(name)


def _nan(name: str) -> ValueError:
    return ValueError(
        f"{_prefix(name)}a score is NaN and can't be ranked; find where the weights or the evidence became NaN."
    )


def _prefix(name: str) -> str:
    """Where it happened; a table has no name, and whoever made it says."""
    return f"{name}: " if name else ""
