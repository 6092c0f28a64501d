"""Scores that are computed when they are wanted, a tensor at a time. Tensors that are shards of larger ones: what is
here, and what all ranks count together. The tensors of a competition, and their scores in pieces that stay in cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from secateur.selection import sizes
from secateur.support import is_sharded, laid_out, whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


# ---- Scores that are computed when they are wanted, a tensor at a time.
#
# Law: what is no score of its weight (of another shape, complex, NaN where it is ranked) is refused by the tensor's
# name.


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
        part = LazyScores(
            part_of(self.weights, names),
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
        refuse_scores(name, scores, weight)
        return laid_out(scores, given) if is_sharded(given) else scores

    def __contains__(self, name: object) -> bool:
        return name in self.weights  # the mapping's own would compute the scores

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def part_of(mapping: Mapping[str, Tensor], names: Iterable[str]) -> Mapping[str, Tensor]:
    """Some of the entries of a mapping; what loads its tensors on access still does.

    >>> part_of({"a": torch.zeros(1), "b": torch.ones(1)}, ["b"])
    {'b': tensor([1.])}
    """
    return {name: mapping[name] for name in names} if isinstance(mapping, dict) else _Part(mapping, tuple(names))


@dataclass(frozen=True)
class _Part(Mapping[str, Tensor]):
    """Some of the entries of a mapping that loads on access."""

    whole: Mapping[str, Tensor]
    names: tuple[str, ...]

    @property
    def shapes(self) -> Any:
        """The container's, if it knows them without reading; see `LazyScores.shape`."""
        return self.whole.shapes  # type: ignore[attr-defined]

    def __getitem__(self, name: str) -> Tensor:
        return self.whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def removed_lowest(scores: Tensor, alive: Tensor) -> Tensor:
    """-inf for what an earlier mask removed, whatever it was, and for nothing else."""
    raised = scores.clamp(min=torch.finfo(scores.dtype).min)  # clamp keeps NaN
    return raised.masked_fill(~alive.to(scores.device), -torch.inf)


def refuse_scores(name: str, scores: Any, weight: Tensor) -> None:
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
        raise ValueError(f"{named(name)}complex scores have no order.")


def comparable(scores: Tensor) -> Tensor:
    """float32 or float64 without loss of order: halves widen exactly; integers go to float64."""
    if scores.dtype in (torch.float32, torch.float64):
        return scores
    return scores.float() if scores.dtype.is_floating_point else scores.double()


def refuse_nan(name: str, scores: Tensor) -> None:
    if bool(scores.isnan().any()):
        raise nan_error(name)


def refuse_meta(name: str, scores: Tensor) -> None:
    if scores.is_meta:
        raise ValueError(f"{named(name)}on the meta device there are no values to rank; load the weights first.")


def nan_error(name: str) -> ValueError:
    return ValueError(
        f"{named(name)}a score is NaN and can't be ranked; find where the weights or the evidence became NaN."
    )


def named(name: str) -> str:
    """Where it happened; a table has no name, and whoever made it says."""
    return f"{name}: " if name else ""


# ---- Tensors that are shards of larger ones: what is here, and what all ranks count together.
#
# Law: but for the ties of one tensor, only counts cross ranks.


def as_dtensor(tensor: Tensor) -> DTensor | None:
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def local_of(tensor: Tensor) -> Tensor:
    sharded = as_dtensor(tensor)
    if sharded is None:
        return tensor
    if any(placement.is_partial() for placement in sharded.placements):
        raise ValueError("a DTensor with partial sums has no values to rank; redistribute it first.")
    local: Tensor = sharded.to_local()
    return local.wait() if hasattr(local, "wait") else local


def mesh_of(sources: list[Source]) -> DeviceMesh | None:
    return next((source.sharded.device_mesh for source in sources if source.sharded is not None), None)


def counts_here(source: Source, mesh: DeviceMesh | None) -> int:
    """1 on the ranks whose entries count: of replicas (a plain tensor beside shards is one) the first."""
    if mesh is None:
        return 1
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return 0
    placements = [None] * mesh.ndim if source.sharded is None else source.sharded.placements
    pairs = zip(coordinate, placements, strict=True)
    return int(all(at == 0 or (placement is not None and placement.is_shard()) for at, placement in pairs))


def sum_over_ranks(sources: list[Source], counts: Tensor) -> Tensor:
    """Sum counts over the mesh that the shards lie on."""
    mesh = mesh_of(sources)
    if mesh is None:
        return counts
    import torch.distributed as distributed

    counts = counts.to(mesh.device_type)
    for dimension in range(mesh.ndim):
        distributed.all_reduce(counts, group=mesh.get_group(dimension))
    return counts.cpu()


def totals(sources: list[Source], counts: list[int]) -> list[int]:
    """Each source's count over all its shards."""
    mesh = mesh_of(sources)
    here = [count * counts_here(source, mesh) for source, count in zip(sources, counts, strict=True)]
    return [int(count) for count in sum_over_ranks(sources, integers(here))]


def integers(values: list[int]) -> Tensor:
    """On the host, whatever torch's default device is."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def first_of_shards(source: Source, equal: Tensor, taken: int) -> Tensor:
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


# ---- The tensors of a competition, and their scores in pieces that stay in cache.
#
# Law: entries come in row-major order, whatever the strides, and only a piece is ever copied.


@dataclass
class Source:
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


def competitors(
    scores: Mapping[str, Tensor], kept: int, among: Mapping[str, Tensor] | None
) -> tuple[list[Source], int]:
    """The tensors of a competition, checked, and the number of entries that take part in it."""
    sources = []
    lazy = scores if isinstance(scores, LazyScores) else None
    among = lazy.among if lazy is not None and among is None else among
    container = lazy.weights if lazy is not None and lazy.elementwise else scores
    for name in scores:
        given = (scores if lazy is None else lazy.weights)[name].detach()
        local = local_of(given)
        if local.is_complex():
            raise ValueError(f"{named(name)}complex scores have no order.")
        refuse_meta(name, local)
        load = functools.partial(_identity, local) if isinstance(container, dict) else _loader(container, name)
        part = None
        if among is not None and name in among:
            part = local_of(among[name].detach())
            if part.shape != local.shape:
                raise ValueError(f"{name}: a mask of shape {tuple(part.shape)} for shape {tuple(local.shape)}.")
            part = part.ne(0).reshape(-1).to(local.device)
        function = lazy.function if lazy is not None and lazy.elementwise else None
        on_arrays = function is not None and lazy is not None and lazy.on_arrays
        sources.append(Source(name, load, function, part, local.shape, local.device, as_dtensor(given), on_arrays))
    entries = sum(totals(sources, [source.numel for source in sources]))
    if not 0 <= kept <= entries:
        raise ValueError(f"can't keep {kept} of {entries} entries.")
    if among is None:
        return sources, entries
    alive = [source.numel if source.among is None else int(source.among.sum()) for source in sources]
    return sources, sum(totals(sources, alive))


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _loader(container: Mapping[str, Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: local_of(container[name].detach())


def segments_of(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
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


def scored_pieces(source: Source, at: int, segment: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(position, scores) of the pieces of a segment; float32 or float64."""
    size = sizes.PIECE if segment.device.type == "cpu" else sizes.DEVICE_SEGMENT
    for start in range(0, segment.shape[0], size):
        piece = segment[start : start + size]
        alive = None if source.among is None else source.among[at + start : at + start + piece.shape[0]]
        yield at + start, scores_of(source, piece, alive)


def scores_of(source: Source, entries: Tensor, alive: Tensor | None) -> Tensor:
    scores = entries
    if source.function is not None:
        scores = source.function(entries)
        refuse_scores(source.name, scores, entries)
    scores = comparable(scores.detach())
    return scores if alive is None else removed_lowest(scores, alive)


def pieces_of(source: Source) -> Iterator[tuple[int, Tensor]]:
    """(position, scores) of all entries, piece by piece."""
    for at, segment in segments_of(source.load()):
        yield from scored_pieces(source, at, segment)


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


def empty_mask(entries: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(np.empty(entries, dtype=np.bool_))  # numpy asks for huge pages: 3 times fewer faults
    return torch.empty(entries, dtype=torch.bool, device=device)
