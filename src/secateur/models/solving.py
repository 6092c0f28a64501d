"""Solves a stage of a block: new values and masks of its matrices, and a `Layer` for each. Masks that learn on the loss
of the whole model. The checked arguments of `oneshot`, and the batches of each process.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from secateur.allocation import Allocation
from secateur.criteria import magnitude
from secateur.models.blocks import full_name
from secateur.models.distance import DenseOutputs, Descended, recomputed, running
from secateur.models.jobs import Job, Layer, Pruned, RunAlong, Solved
from secateur.models.products import InputStats, WeightView
from secateur.patterns import Pattern, Rows, Unstructured, word_of
from secateur.selection import keep_largest
from secateur.solvers import aimed, best_mask, from_criterion
from secateur.support import (
    Between,
    Forward,
    Undo,
    all_gather,
    broadcast,
    check_batches,
    check_data,
    name_of,
    rank_and_world,
    track,
    warn,
)
from secateur.targets import is_expert

_T = TypeVar("_T")

# ---- Solves a stage of a block: new values and masks of its matrices, and a `Layer` for each.
#
# Law: nothing is written here; a matrix that no token met is pruned by magnitude, and named.

Solve = Callable[..., tuple[Tensor, Tensor]]
Competing = Sequence[tuple[WeightView, Pattern]]  # the matrices of a parameter, and who competes with whom in each


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
    masks: Mapping[str, Tensor] = field(default_factory=dict)  # by full name: those that are chosen already
    on_matrices: Callable[[str, Competing], object] | None = None  # called with those of each parameter to be solved

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
        if job.on_matrices is not None:
            job.on_matrices(full, [(piece, _pattern_for(parameter, piece, job.pattern)) for piece in pieces])
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
    chosen = torch.empty_like(parameter, dtype=torch.bool).copy_(job.masks[full]) if full in job.masks else None
    sparsities = _sparsities(parameter, pieces, found, job, full) if chosen is None else [None] * len(pieces)
    for number, (piece, sparsity) in enumerate(zip(pieces, sparsities, strict=True)):
        pattern = _pattern_for(parameter, piece, job.pattern) if chosen is None else Chosen(piece.of(chosen))
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
        if chosen is not None and not torch.equal(mask, piece.of(chosen)):
            raise ValueError(f"{full}: {name_of(job.solver)} gave another mask than the one that was chosen.")
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


# ---- Masks that learn on the loss of the whole model, while the weights stay.
#
# Law: a group keeps as many units as it began with, at each step; the same batches give the same masks; the model is
# left as it was.

STEPS = 200  # a few passes through some dozens of batches: what more of them find is of these batches alone
RATE, MOMENTA = 0.03, (0.9, 0.95)  # of Adam, with one second moment a matrix, so that noise moves little
HOT, COLD = 1.0, 0.1  # the temperatures of the noise and of the gates at the start and in the end
APART = 3.0  # how far from the level of its group a unit begins at most
NEAR = 0.6  # how far at least: at 0 the first noise moves all of which magnitude says other than the mask
_FEW = 64  # units of a group that are sorted to find its level


@dataclass(frozen=True, eq=False)
class Chosen:
    """A mask as a pattern: nothing is left to choose, and a solver keeps what it keeps.

    >>> mask = torch.tensor([[True, False]])
    >>> best_mask(torch.tensor([[1.0, 3.0]]), None, Chosen(mask))
    tensor([[ True, False]])
    """

    mask: Tensor
    density = 1.0

    def pool(self, scores: Tensor) -> Tensor:
        return scores.new_empty(0, 1)

    def spread(self, keep: Tensor, shape: torch.Size) -> Tensor:
        assert not keep.numel()
        return self.mask.reshape(shape).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class LearntMasks(Descended):
    """What masks came to that learnt: those of the walk are where they began, and what is taken where they gain
    nothing. Losses are those on the batches that were held back.

    Attributes:
        solved_before, solved_after: how far the outputs are from the dense ones once the solver has repaired what the
            walk's masks keep, and what the learnt ones keep; None where these lose no less before.
    """

    solved_before: Annotated[float, Between(0)] = field(kw_only=True)
    solved_after: Annotated[float, Between(0)] | None = field(kw_only=True)

    @property
    def taken(self) -> bool:
        """Whether the learnt masks are those of the result."""
        return self.solved_after is not None and self.solved_after < self.solved_before

    def in_words(self) -> str:
        """Which masks were taken, and why."""
        if self.solved_after is None:
            return "The masks are those of the walk: on batches held back the learnt ones lose no less, before repair."
        return (
            f"The masks are those {'that were learnt' if self.taken else 'of the walk'}: in the end the outputs lose "
            f"{self.solved_after:.4g} on batches held back with the learnt ones, and {self.solved_before:.4g} with "
            "the walk's."
        )


def holding(solve: Solve) -> Solve:
    """A solver that is also asked, of the first matrix, to keep the mask that it chose, since later it will have to.

    Raises:
        ValueError: it can't.
    """
    has_held: list[bool] = []

    def solved(weight: Tensor, sparsity: float | None, pattern: Pattern, **evidence: Tensor) -> tuple[Tensor, Tensor]:
        same = weight.clone()
        new, mask = solve(weight, sparsity, pattern, **evidence)
        if not has_held:
            why = "it changes it"
            try:
                has_held.append(torch.equal(solve(same, None, Chosen(mask), **evidence)[1], mask))
            except (ValueError, TypeError) as error:
                has_held.append(False)
                why = str(error)
            if not has_held[0]:
                raise ValueError(
                    f'{name_of(solve)} does not keep a mask that it is given, as choose="gates" needs ({why}): take '
                    "another solver, such as admm, or leave choose out."
                )
        return new, mask

    return solved


class Gates(Protocol):
    """What learns the mask of a weight."""

    def sampled(self, progress: float) -> Tensor:
        """The mask of a step, when so much of the steps is done."""

    def step(self, slope: Tensor) -> None:
        """Moves them, by the slope along the mask that was sampled."""

    def mask(self) -> Tensor:
        """What they say by now."""


class BestGates:
    """Gates of one weight: a number for each unit of its matrices, of which the best of each group stay.

    Forwards Gumbel noise is added to the numbers; backwards the gates are soft (straight through, arXiv:1308.3432).

    Args:
        start: the mask to begin with, laid out as the weight.
        weight: as it stays.
        matrices: of it.
        draw: of its device.

    Raises:
        ValueError: the units of a pattern can't learn.

    >>> view, mask = WeightView("weight", 0, (1, 2), (2, 1)), torch.tensor([[False, True]])
    >>> gates = BestGates(mask, torch.tensor([[1.0, 1.0]]), [(view, Unstructured())], torch.Generator())
    >>> before, _ = gates.mask(), gates.sampled(0.0)
    >>> for _ in range(99):
    ...     gates.step(torch.tensor([[-1.0, 1.0]]))  # with more of the first the loss falls
    >>> before, gates.mask()
    (tensor([[False,  True]]), tensor([[ True, False]]))
    """

    def __init__(self, start: Tensor, weight: Tensor, matrices: Competing, draw: torch.Generator) -> None:
        self.like = start
        self.parts = [(view, _Numbers(view.of(start), view.of(weight), pattern, draw)) for view, pattern in matrices]

    def sampled(self, progress: float) -> Tensor:
        return self._spread(lambda its: its.sampled(progress))

    def step(self, slope: Tensor) -> None:
        slope = torch.empty_like(self.like, dtype=torch.float32).copy_(slope)
        for view, its in self.parts:
            its.step(view.of(slope))

    def mask(self) -> Tensor:
        return self._spread(_Numbers.mask)

    def _spread(self, mask_of: Callable[[_Numbers], Tensor]) -> Tensor:
        mask = torch.ones_like(self.like)
        for view, its in self.parts:
            view.of(mask).copy_(mask_of(its))
        return mask


class _Numbers:
    """A number for each unit of a matrix, (groups, units), higher = keep."""

    def __init__(self, start: Tensor, weight: Tensor, pattern: Pattern, draw: torch.Generator) -> None:
        self.start, self.pattern, self.draw = start.clone(), pattern, draw
        sizes = pattern.pool(weight.float().abs())
        kept = pattern.pool(start.float()) > 0
        self.keep = kept.sum(1)  # of each group
        units = kept.shape[1]
        self.is_free = bool(((self.keep > 0) & (self.keep < units)).any())
        if not torch.equal(pattern.spread(kept, start.shape), start):
            raise ValueError(f"the mask is not of whole units of {word_of(pattern)}, which gates learn.")
        if not torch.equal(pattern.pool(-weight.float()), -pattern.pool(weight.float())):
            raise ValueError(f"gates learn what a unit is worth by its sum; {word_of(pattern)} adds up something else.")
        logs = sizes.clamp_min_(1e-12).log_()
        self.worths = (logs - self._level(logs)).clamp_(-APART, APART) if self.is_free else logs
        self.worths = torch.where(kept, self.worths.clamp_min(NEAR), self.worths.clamp_max(-NEAR))
        self.mean, self.square, self.at, self.heat = torch.zeros_like(self.worths), 0.0, 0, HOT

    def sampled(self, progress: float) -> Tensor:
        if not self.is_free:
            return self.start
        self.heat = HOT * (COLD / HOT) ** progress
        noise = torch.rand(self.worths.shape, generator=self.draw, device=self.worths.device, dtype=torch.float32)
        noise.clamp_(1e-9, 1 - 1e-7).log_().neg_().log_().mul_(-self.heat)
        return self._best(noise.add_(self.worths))

    def step(self, slope: Tensor) -> None:
        """Along which a group keeps as many."""
        if not self.is_free:
            return
        gates = torch.sigmoid((self.worths - self._level(self.worths)) / self.heat)
        each, slopes, (first, second) = gates * (1 - gates), self.pattern.pool(slope), MOMENTA
        slopes = slopes - (each * slopes).sum(1, keepdim=True) / each.sum(1, keepdim=True).clamp_min(1e-20)
        slopes = each * slopes / self.heat
        self.at += 1
        self.mean.mul_(first).add_(slopes, alpha=1 - first)
        self.square = second * self.square + (1 - second) * float(slopes.square().mean())
        root = (self.square / (1 - second**self.at)) ** 0.5 + 1e-12
        self.worths.sub_(self.mean, alpha=RATE / (1 - first**self.at) / root)

    def mask(self) -> Tensor:
        return self._best(self.worths) if self.is_free else self.start

    def _best(self, worths: Tensor) -> Tensor:
        return self.pattern.spread(keep_largest(worths, self.keep), self.start.shape)

    def _level(self, worths: Tensor) -> Tensor:
        """(groups, 1): between what stays and what does not."""
        units = worths.shape[1]
        keep = self.keep.clamp(1, units - 1)
        if units > _FEW and bool((keep == keep[0]).all()):
            return worths.kthvalue(units - int(keep[0]), 1).values[:, None]
        ranked = worths.sort(1, descending=True).values
        return (ranked.gather(1, keep[:, None] - 1) + ranked.gather(1, keep[:, None])) / 2


def held_back(dense: DenseOutputs) -> list[int]:
    """The numbers of the batches that masks do not learn from, and are judged on: a quarter, or at least one; where
    there is but one, that one. Of few batches masks are learnt by heart, and lose more elsewhere."""
    count = len(dense.held)
    return [*range(3, count, 4)] if count > 3 else [count - 1]


def best_gates(start: Mapping[str, Tensor], matrices: Mapping[str, Competing]) -> Callable[[str, Tensor], BestGates]:
    """``(name, weight) -> its gates``, which begin with these masks; see `learnt`."""
    draws: dict[torch.device, torch.Generator] = {}

    def made(name: str, weight: Tensor) -> BestGates:
        draw = draws.setdefault(weight.device, torch.Generator(weight.device).manual_seed(1))
        laid_out = torch.empty_like(weight, dtype=torch.bool).copy_(start[name])
        try:
            return BestGates(laid_out, weight, matrices[name], draw)
        except ValueError as error:
            raise ValueError(f"{name}: {error} Take another pattern, or leave choose out.") from None

    return made


@torch.inference_mode(False)  # whatever mode the caller is in
def learnt(
    dense: DenseOutputs,
    names: Iterable[str],
    gates_of: Callable[[str, Tensor], Gates],
    blocks: Sequence[nn.Module] = (),
    steps: int | None = None,
) -> tuple[Descended, dict[str, Tensor]]:
    """What the gates of these weights came to on the batches that are `held_back`, and their masks, after so many steps
    (`STEPS`) of a batch each of the others, on how far the outputs are from the dense ones.

    Args:
        dense: whose model has the weights that stay.
        names: of parameters.
        gates_of: ``(name, weight) -> gates``, whose mask is what they begin with.
        blocks: those that a backward pass may compute again; see `DenseOutputs.to_compute_again`.

    Raises:
        ValueError: no gradient of the outputs reaches a weight, or something is not finite.
    """
    steps = STEPS if steps is None else steps
    judged, losses = held_back(dense), list[float]()
    order = dense.in_order(steps, torch.Generator().manual_seed(0), without=judged if len(dense.held) > 1 else ())
    weights = {name: dense.model.get_parameter(name) for name in names}
    with running(dense.model), torch.enable_grad(), Undo() as undo:
        own = dict(zip(weights, undo.values(*weights.values()), strict=True))
        gates = {name: gates_of(name, weight) for name, weight in own.items()}

        def put(mask_of: Callable[[Gates], Tensor]) -> None:
            for name, weight in weights.items():
                masked = own[name] * mask_of(gates[name])
                with torch.no_grad():
                    weight.copy_(masked)

        def lost(mask_of: Callable[[Gates], Tensor]) -> float:
            put(mask_of)
            return dense(judged)

        before = lost(lambda its: its.mask())
        dense.model.requires_grad_(False)
        for weight in weights.values():
            weight.requires_grad_()
        again = dense.to_compute_again(blocks, lambda: dense.rows_lost(0))
        for step, at in enumerate(track(order, "learning masks")):
            put(lambda its: its.sampled(step / steps))  # noqa: B023  # called at once
            with recomputed(again):
                loss = dense.to_descend(at, "mask")
                slopes: Sequence[Tensor | None] = torch.autograd.grad(loss, [*weights.values()], allow_unused=True)
            for (name, its), slope in zip(gates.items(), slopes, strict=True):
                if slope is None:  # an expert that no token of the batch was sent to
                    continue
                if not bool(slope.isfinite().all()):
                    raise dense.unfit(f"has slopes along {name} that are not finite")
                its.step(slope.float() * own[name])
            losses.append(max(0.0, float(loss.detach())))
        found = Descended(steps, before, lost(lambda its: its.mask()), tuple(losses))
        masks = {name: its.mask() for name, its in gates.items()}
        undo.roll_back()
    return found, masks


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
    choose: str | None = None

    def job(self, sparsities: Mapping[str, float | None]) -> MatrixJob:
        """What is asked of every block, given the sparsity of each weight."""
        return MatrixJob(
            self.solver, self.pattern, sparsities, self.words, self.on_layer, in_stages=self.stages, aim=self.aim
        )


def held_batches(batches: Iterable[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """All batches, as a list if they are an iterator, and this process's share of them.

    Where there are fewer than processes, those without one run along on the first, with a warning of one line.
    """
    check_batches(batches)
    every = batches if isinstance(batches, Sequence) else list(batches)
    check_data(every, "since pruning needs the inputs of each layer")
    world = rank_and_world()[1]
    if len(every) < world:
        warn(
            f"there are fewer batches than processes: {len(every)} of {world} processes sum what they see, and the "
            "others help to solve.",
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
