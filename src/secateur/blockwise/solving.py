"""Solves a stage of a block: new values and masks of its matrices, and a `Layer` for each.

Law: nothing is written here; a matrix that no token met is pruned by magnitude, and named.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secateur.blockwise.finding import is_expert
from secateur.blockwise.jobs import Layer, Pruned, Solved
from secateur.blockwise.processes import handed_out, rank_and_world
from secateur.blockwise.products import Met, Piece
from secateur.blockwise.targets import full_name
from secateur.criteria import magnitude
from secateur.patterns import Pattern, Rows, Unstructured
from secateur.solvers import aimed, best_mask, from_criterion

__all__ = ["DOES_NOT_FIT", "MatrixJob", "Solve", "complete"]

Solve = Callable[..., tuple[Tensor, Tensor]]


NOT_A_PRODUCT = "not a matrix that inputs are multiplied with"
DOES_NOT_FIT = "of a shape that does not fit the pattern"


@dataclass(frozen=True)
class MatrixJob:
    """The `Job` of pruning each matrix by a solver.

    Where the solver names the Gram matrix, and ``aim`` is not 0, a weight is first moved that far towards restoring the
    dense
    model: see `secateur.solvers.aimed`.
    """

    solver: Solve
    pattern: Pattern
    sparsities: Mapping[str, float | None]  # of the targets, by full name
    words: tuple[str, ...]  # the evidence that the solver names
    on_layer: Callable[[Layer], None] | None = None
    in_stages: bool = False
    aim: float = 0.0
    around: bool = False
    changes: bool = True

    @property
    def targets(self) -> Collection[str]:
        return self.sparsities.keys()

    @property
    def beside_dense(self) -> bool:
        return self.aim > 0

    def solve_stage(
        self, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[Piece, Met]
    ) -> tuple[dict[str, Solved], Pruned]:
        return _solve_stage(self, block, module, stage, found)


def _solve_stage(
    job: MatrixJob, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[Piece, Met]
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
            pieces = [Piece(local, 0, (parameter.shape[0], parameter.shape[1]), strides)]  # an expert without tokens
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
        layer: Layer = handed_out(said, solved, owner)
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


def _pattern_for(parameter: Tensor, piece: Piece, pattern: Pattern) -> Pattern:
    """The pattern; of a convolution such that it sees the shape of a group's weight, or of a block of its channels."""
    if parameter.dim() <= 2 or isinstance(pattern, Unstructured | Rows):
        return pattern
    (outputs, inputs), kernel = piece.shape, parameter.shape[2:]
    if piece.strides != (math.prod(parameter.shape[1:]), 1) and inputs != math.prod(parameter.shape[1:]):
        return pattern  # experts
    return _Unflattened(pattern, (outputs, inputs // math.prod(kernel), *kernel))


def _sparsities(
    parameter: Tensor, pieces: Sequence[Piece], found: Mapping[Piece, Met], job: MatrixJob, full: str
) -> list[float | None]:
    """Of each piece. Blocks of one matrix' inputs keep together, exactly, what the matrix would: where all weights
    compete, each block what Wanda's scores say of all, else its share of the columns."""
    asked = job.sparsities[full]
    shares: list[float | None] = [asked] * len(pieces)
    wholes: dict[Piece, list[int]] = {}
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


def _units(pattern: Pattern, piece: Piece) -> int:
    """Of each group."""
    return int(pattern.pool(torch.empty(piece.shape, device="meta")).shape[1])


def _why_not(pieces: Sequence[Piece], pattern: Pattern) -> str | None:
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
    pieces: Sequence[Piece],
    found: Mapping[Piece, Met],
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
                    if job.aim and met.lacking is not None:
                        matrix = aimed(matrix, met.lacking, gram=evidence["gram"], aim=job.aim)
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


def complete(pieces: Sequence[Piece], parameter: Tensor) -> list[Piece]:
    """All matrices of a parameter in the order of memory, given those that were seen; none where they do not tile it.

    Experts that no token was sent to were not seen: they lie where the others' distance says.
    """
    if not pieces or sum(math.prod(piece.shape) for piece in pieces) == parameter.numel():
        return list(pieces)
    first = pieces[0]
    places = range(0, parameter.numel(), math.prod(first.shape))
    whole = [Piece(first.name, at, first.shape, first.strides) for at in places]
    return whole if set(pieces) <= set(whole) and parameter.is_contiguous() else []
