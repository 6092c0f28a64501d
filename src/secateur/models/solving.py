"""Solves a stage of a block: new values and masks of its matrices, and a `Layer` for each. The checked arguments of
`oneshot`, and the batches of each process.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from secateur.allocation import Allocation
from secateur.criteria import magnitude
from secateur.models.blocks import full_name
from secateur.models.jobs import Job, Layer, Pruned, Solved
from secateur.models.products import InputStats, WeightView
from secateur.patterns import Pattern, Rows, Unstructured
from secateur.solvers import aimed, best_mask, from_criterion
from secateur.support import Forward, all_gather, broadcast, check_batches, check_data, rank_and_world
from secateur.targets import is_expert

_T = TypeVar("_T")

# ---- Solves a stage of a block: new values and masks of its matrices, and a `Layer` for each.
#
# Law: nothing is written here; a matrix that no token met is pruned by magnitude, and named.

Solve = Callable[..., tuple[Tensor, Tensor]]


NOT_A_PRODUCT = "not a matrix that inputs are multiplied with"
DOES_NOT_FIT = "of a shape that does not fit the pattern"


@dataclass(frozen=True)
class MatrixJob(Job):
    """The `Job` of pruning each matrix by a solver.

    Where the solver names the Gram matrix, and ``aim`` is not 0, a weight is first moved that far towards restoring the
    dense
    model: see `secateur.solvers.aimed`.
    """

    solver: Solve
    pattern: Pattern
    sparsities: Mapping[str, float | None]  # of the targets, by full name
    words: tuple[str, ...] = ()  # the evidence that the solver names
    on_layer: Callable[[Layer], None] | None = None
    in_stages: bool = False
    aim: float = 0.0

    @property
    def targets(self) -> Collection[str]:
        return self.sparsities.keys()

    @property
    def beside_dense(self) -> bool:
        return self.aim > 0

    def solve_stage(
        self, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[WeightView, InputStats]
    ) -> tuple[dict[str, Solved], Pruned]:
        return _solve_stage(self, block, module, stage, found)


def _solve_stage(
    job: MatrixJob, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[WeightView, InputStats]
) -> tuple[dict[str, Solved], Pruned]:
    new: dict[str, Solved] = {}
    layers: list[Layer] = []
    left_alone: dict[str, tuple[str, ...]] = {}
    rank, world = rank_and_world()
    for local, parameter in stage.items():
        full = full_name(block, local)
        pieces = complete(sorted(piece for piece in found if piece.name == local), parameter)
        if not pieces and is_expert(local) and isinstance(module.get_submodule(local.rpartition(".")[0]), nn.Linear):
            strides = parameter.stride(0), parameter.stride(1)
            pieces = [
                WeightView(local, 0, (parameter.shape[0], parameter.shape[1]), strides)
            ]  # an expert without tokens
        pattern = _pattern_for(parameter, pieces[0], job.pattern) if pieces else job.pattern
        if (reason := _why_not(pieces, pattern)) is not None:
            left_alone[reason] = (*left_alone.get(reason, ()), full)
            continue
        solved = Solved(parameter.detach().clone(), torch.ones_like(parameter, dtype=torch.bool))
        owner = len(layers) % world  # each process solves its share
        said: Layer | Exception | None = None
        if owner == rank:
            try:
                said = _solve_pieces(full, block, parameter, solved, pieces, found, job)
            except (ValueError, TypeError, RuntimeError) as error:
                if world == 1:
                    raise
                said = error
        layer: Layer = broadcast(said, solved, owner)
        layers.append(layer)
        new[local] = solved
        if job.on_layer is not None:
            job.on_layer(layer)
    return new, Pruned(block, tuple(layers), left_alone)


@dataclass(frozen=True)
class _Unflattened:
    """A pattern as it pools a convolution, for the (outputs, inputs · kernel) that a solver sees."""

    pattern: Pattern
    shape: tuple[int, ...]

    @property
    def density(self) -> float | None:
        return self.pattern.density

    def pool(self, scores: Tensor) -> Tensor:
        return self.pattern.pool(scores.reshape(self.shape))

    def spread(self, keep: Tensor, shape: torch.Size) -> Tensor:
        return self.pattern.spread(keep, torch.Size(self.shape)).reshape(shape)


def _pattern_for(parameter: Tensor, piece: WeightView, pattern: Pattern) -> Pattern:
    """The pattern; of a convolution such that it sees the shape of a group's weight, or of a block of its channels."""
    if parameter.dim() <= 2 or isinstance(pattern, Unstructured | Rows):
        return pattern
    (outputs, inputs), kernel = piece.shape, parameter.shape[2:]
    if piece.strides != (math.prod(parameter.shape[1:]), 1) and inputs != math.prod(parameter.shape[1:]):
        return pattern  # experts
    return _Unflattened(pattern, (outputs, inputs // math.prod(kernel), *kernel))


def _sparsities(
    parameter: Tensor, pieces: Sequence[WeightView], found: Mapping[WeightView, InputStats], job: MatrixJob, full: str
) -> list[float | None]:
    """Of each piece. Blocks of one matrix' inputs keep together, exactly, what the matrix would: where all weights
    compete, each block what Wanda's scores say of all, else its share of the columns."""
    asked = job.sparsities[full]
    shares: list[float | None] = [asked] * len(pieces)
    wholes: dict[WeightView, list[int]] = {}
    for at, piece in enumerate(pieces):
        if piece in found and (whole := found[piece].whole) is not None:
            wholes.setdefault(whole, []).append(at)
    if asked is None or job.pattern.density is not None:
        return shares
    for whole, its in wholes.items():
        pattern = _pattern_for(parameter, whole, job.pattern)
        sizes = [_units(_pattern_for(parameter, pieces[at], job.pattern), pieces[at]) for at in its]
        if isinstance(pattern, Unstructured):
            grams = [found[pieces[at]].sums.gram for at in its]
            scores = [
                pieces[at].of(parameter).float().abs() * (1 if gram is None else gram.diagonal().sqrt())
                for at, gram in zip(its, grams, strict=True)
            ]
            mask = best_mask(torch.cat(scores, 1), asked, pattern)
            kept = [int(part.sum()) for part in torch.split(mask, [pieces[at].shape[1] for at in its], 1)]
        else:
            ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
            until = [end - round(asked * end) for end in ends]
            kept = [end - start for start, end in zip([0, *until[:-1]], until, strict=True)]
        for at, size, count in zip(its, sizes, kept, strict=True):
            shares[at] = 1 - count / size
    return shares


def _units(pattern: Pattern, piece: WeightView) -> int:
    """Of each group."""
    return int(pattern.pool(torch.empty(piece.shape, device="meta")).shape[1])


def _why_not(pieces: Sequence[WeightView], pattern: Pattern) -> str | None:
    """Why a weight with these matrices cannot be pruned; None where it can."""
    if not pieces:
        return NOT_A_PRODUCT
    try:
        pattern.pool(torch.empty(pieces[0].shape, device="meta"))
    except ValueError:
        return DOES_NOT_FIT
    return None


def _solve_pieces(
    full: str,
    block: str,
    parameter: Tensor,
    solved: Solved,
    pieces: Sequence[WeightView],
    found: Mapping[WeightView, InputStats],
    job: MatrixJob,
) -> Layer:
    started = time.monotonic()
    zeros = lost = whole = 0.0
    tokens, unseen, said = 0, [], []
    sparsities = _sparsities(parameter, pieces, found, job, full)
    for number, (piece, sparsity) in enumerate(zip(pieces, sparsities, strict=True)):
        pattern = _pattern_for(parameter, piece, job.pattern)
        # a copy: outputs first in memory, whatever the layout, and a solver of somebody's own may write into it
        matrix = piece.of(parameter).clone(memory_format=torch.contiguous_format)
        met = found.get(piece)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if met is None or not met.tokens:
                    unseen.append(number)
                    new, mask = from_criterion(magnitude)(matrix, sparsity, pattern)
                else:
                    tokens += met.tokens if met.whole is None or met.whole.offset == piece.offset else 0
                    evidence = met.evidence(job.words)
                    if job.aim and met.residual_cross is not None:
                        matrix = aimed(matrix, met.residual_cross, gram=evidence["gram"], aim=job.aim)
                    new, mask = job.solver(matrix, sparsity, pattern, **evidence)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{full}: {error}") from error
        if not bool(new.isfinite().all()):
            raise ValueError(f"{full}: the solver's new weight of shape {tuple(new.shape)} holds NaN or infinity.")
        said += [str(warning.message) for warning in caught]
        if met is not None:
            parts = met.error(matrix, new)
            lost, whole = lost + parts[0], whole + parts[1]
        stored = piece.of(solved.values).copy_(new)
        if not bool(stored.isfinite().all()):
            raise ValueError(f"{full}: the new weight of shape {tuple(new.shape)} does not fit {parameter.dtype}.")
        zeros += stored.numel() - int(stored.count_nonzero())
        piece.of(solved.mask).copy_(mask)
    relative = lost / whole if whole > 0 else 0.0 if tokens and not lost > 0 else None
    if tokens and relative is None:
        said.append("its outputs were all 0 and no longer are; no error relates to that.")
    return Layer(
        full,
        block,
        tuple(parameter.shape),
        zeros / parameter.numel(),
        relative,
        tokens,
        time.monotonic() - started,
        tuple(unseen) if len(pieces) > 1 else (),
        tuple(dict.fromkeys(said)),
    )


def complete(pieces: Sequence[WeightView], parameter: Tensor) -> list[WeightView]:
    """All matrices of a parameter in the order of memory, given those that were seen; none where they do not tile it.

    Experts that no token was sent to were not seen: they lie where the others' distance says.
    """
    if not pieces or sum(math.prod(piece.shape) for piece in pieces) == parameter.numel():
        return list(pieces)
    first = pieces[0]
    places = range(0, parameter.numel(), math.prod(first.shape))
    whole = [WeightView(first.name, at, first.shape, first.strides) for at in places]
    return whole if set(pieces) <= set(whole) and parameter.is_contiguous() else []


# ---- The checked arguments of `oneshot`, and the batches of each process.
#
# Law: what the bytes of a result depend on can be said as JSON, so that a run that goes on can be told from another.


@dataclass(frozen=True)
class OneShotRequest:
    """The checked arguments of `oneshot`, after words became values."""

    sparsity: float | None
    solver: Solve
    pattern: Pattern
    allocate: Allocation
    words: tuple[str, ...]  # the evidence that the solver names
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    forward: Forward | None = field(default=None, compare=False)  # on these the bytes of the result do not depend
    activations: Path | None = field(default=None, compare=False)
    on_layer: Callable[[Layer], None] | None = field(default=None, compare=False)
    stages: bool = False
    aim: float = 0.0

    def job(self, sparsities: Mapping[str, float | None]) -> MatrixJob:
        """What is asked of every block, given the sparsity of each weight."""
        return MatrixJob(
            self.solver, self.pattern, sparsities, self.words, self.on_layer, in_stages=self.stages, aim=self.aim
        )


class RunAlong(tuple[Any, ...]):
    """The batches of a process without a share of its own: it runs them to stay in step with the others, but sums
    nothing.

    >>> len(RunAlong(["a batch"]))
    1
    """


def held_batches(batches: Iterable[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """All batches, as a list if they are an iterator, and this process's share of them.

    Where there are fewer than processes, those without one run along on the first, with a warning of one line.
    """
    check_batches(batches)
    every = batches if isinstance(batches, Sequence) else list(batches)
    check_data(every, "since pruning needs the inputs of each layer")
    world = rank_and_world()[1]
    if len(every) < world:
        warnings.warn(
            f"there are fewer batches than processes: {len(every)} of {world} processes sum what they see, and the "
            "others help to solve.",
            stacklevel=4,  # where oneshot was called
        )
    return every, own_share(every)


def own_share(every: Sequence[Any]) -> Sequence[Any]:
    """This process's batches; one without a share of its own runs along on the first."""
    rank, world = rank_and_world()
    return every[rank::world] if rank < len(every) else RunAlong(every[:1])


def in_turn(share: Sequence[_T]) -> Sequence[_T]:
    """What all processes have, in the order of which `own_share` gave each its part; nothing of one that runs along.

    >>> in_turn(["first", "second"])  # of one process
    ['first', 'second']
    """
    if rank_and_world()[1] == 1:
        return share
    every = all_gather([] if isinstance(share, RunAlong) else list(share))
    return [its[at] for at in range(len(every[0])) for its in every if at < len(its)]


def digest(batches: Iterable[Any]) -> str:
    """The SHA-256 of all tensors in the batches: names, dtypes, shapes and values.

    >>> digest([torch.tensor([1, 2])]) == digest([torch.tensor([1, 3])])
    False
    """
    total = hashlib.sha256()

    def add(batch: Any) -> None:
        if isinstance(batch, Tensor):
            whole = batch.detach().cpu().contiguous()
            total.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
            total.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
        elif isinstance(batch, Mapping):
            for key in sorted(batch):
                total.update(str(key).encode())
                add(batch[key])
        elif isinstance(batch, tuple | list):
            total.update(b"(")
            for part in batch:
                add(part)
        else:
            total.update(repr(batch).encode())

    for batch in batches:
        add(batch)
        total.update(b";")
    return total.hexdigest()
