"""Selection and repair by calibration data, in memory: one walk measures, the units are chosen, a second walk repairs.
Selection and repair by calibration data, in a directory: block by block, otherwise as `calibrated` does.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.checkpoints import Run
from secateur.coupling import Group
from secateur.models import (
    DirectoryWalk,
    InputStats,
    Job,
    Pruned,
    Solved,
    WeightView,
    full_name,
    parts_of,
    slopes,
    walk_model,
)
from secateur.shrinking.grading import GroupAblation
from secateur.shrinking.measure import (
    OVERFLOWING,
    Curve,
    Measured,
    Measuring,
    check_finite,
    for_slopes,
    not_finite,
    recalled,
    remember,
)
from secateur.shrinking.plan import plan_of
from secateur.shrinking.repair import Repairing, free_in, rescale, rescaled_in_directory
from secateur.shrinking.request import PruningTarget, Request
from secateur.shrinking.select import Choice, check_globs, choose, groups_in_scope, names_of
from secateur.support import Between, Forward, Undo, broadcast, on_rank_zero, rank_and_world

# Selection and repair by calibration data, in memory: one walk measures, the units are chosen, a second walk repairs.
#
# Law: the structure is proved before any weight changes; what changed is taken back by the caller's `Undo`.


def chosen_by_data(
    subject: PruningTarget,
    asked: Request,
    known: Collection[str],
    batches: Sequence[Any],
    *,
    repair: bool,
    forward: Forward | None,
    undo: Undo,
) -> tuple[Choice, dict[str, Tensor]]:
    """The units that stay of a model in memory, and the values before the repair, ``{name: copy}``, for the undo. The
    consumers are repaired already; the plan is not carried out yet.

    Raises:
        ValueError: a glob matches nothing, a weight is not finite, there are no batches, or they measure nothing that
            may leave.

    Warns:
        RuntimeWarning: gradients overflow where the model itself does not, so that losses are shares of variances.
    """
    model, coupling = subject.model, subject.coupling
    check_globs(names_of(coupling) | set(known), asked.globs)
    groups = groups_in_scope(subject.scope, asked)
    free = free_in(model, parts_of(model))
    tries = repair and asked.allocate is None and asked.sparsity is not None  # else no losses are asked for
    way = ("tried", asked.round_to) if tries else None
    measured = recalled(model, groups, batches, way)
    if measured is None:
        measured = _measured(subject, groups, asked, batches, forward, free if tries else None)
        remember(model, groups, batches, measured, way)
        if measured.slopes:  # then nothing is tried
            remember(model, groups, batches, measured)
    choice = choose(subject, asked, known, measured)
    left = [group for group in coupling.groups if group.name in choice.kept and not choice.kept[group.name].all()]
    if not left:
        return choice, {}
    job = Repairing(coupling, left, choice.kept, measured, free, repair=repair)
    changes = {name: each for name, each in model.named_parameters() if name in job.targets or each.dim() == 1}
    before = dict(zip(changes, undo.values(*changes.values()), strict=True))  # biases are among them
    walked = walk_model(model, batches, job, forward=forward)
    in_blocks = {name: note for pruned in walked for name, note in pruned.in_blocks.items()}
    plan = plan_of(model, coupling, job.kept)
    if repair:
        rescale(model, plan, batches, forward=forward)
    return replace(choice, kept=job.kept, plan=plan, in_blocks=in_blocks), before


def _measured(
    subject: PruningTarget,
    groups: Sequence[Group],
    asked: Request,
    batches: Sequence[Any],
    forward: Forward | None,
    free: frozenset[str] | None,
) -> Measured:
    """What a walk over the dense model says; where no slopes are known and parameters that may move are given, with
    losses that were tried."""
    model, coupling = subject.model, subject.coupling
    measuring = Measuring(coupling, groups, shared=_shared(model))
    found = slopes(model, for_slopes(batches), measuring.targets, forward=forward, unless_pooled=True)
    wrong = not_finite(found)
    if wrong is None:
        measuring.slopes.update(found)
    else:
        check_finite(model)

    def walked(measuring: Measuring) -> GroupAblation | None:
        trying = GroupAblation(measuring, free, asked.round_to) if free is not None and not measuring.slopes else None
        walk_model(model, batches, trying or measuring, forward=forward)  # of what is not finite it says where
        return trying

    trying = walked(measuring)
    if wrong is not None:
        warnings.warn(OVERFLOWING.format(name=wrong), RuntimeWarning, stacklevel=4)
    if measuring.slopes and measuring.unsloped:
        measuring = Measuring(coupling, groups, shared=measuring.shared)
        trying = walked(measuring)
    measured = measuring.measured
    if not measured.scores:
        raise ValueError(
            f"data says nothing of what may leave {type(model).__name__}: the batches ran none of its blocks, or no "
            "product of a unit with a matrix in them. Pass other batches, or none: then magnitude ranks the units."
        )
    if trying is not None:
        return trying.tried(model, measured, batches, forward)
    return measured


def _shared(model: nn.Module) -> frozenset[str]:
    """The parameters that several blocks hold: what is right for one is wrong for the others, so they stay."""
    blocks = parts_of(model)
    names: dict[int, list[str]] = {}
    for block, module in blocks.items():
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), []).append(full_name(block, name))
    return frozenset(name for each in names.values() if len(each) > 1 for name in each)


# ---- Selection and repair by calibration data, in a directory: block by block, otherwise as `calibrated` does.
#
# Law: of the weights one block is in memory, and once more while it is repaired. What was measured, what was chosen
# and which blocks are repaired is in the journal, so that a run that was killed goes on to the same bytes; of several
# processes the first one decides.

_Named = Mapping[str, Group]


@dataclass(frozen=True)
class Streamed:
    """The choice and the errors of a directory whose units were selected and repaired.

    Attributes:
        choice: what stays; the copy that was walked over holds the repaired weights, of the shapes that they had.
        errors: ``{name: error}`` of each repaired matrix, as in `Repairing`.
        biases: which moved with them.
        normalizations: the weights and biases of normalizations that moved, since their width lost entries.
        tokens: how many were measured.
    """

    choice: Choice
    errors: Mapping[str, float]
    biases: Collection[str]
    normalizations: Collection[str]
    tokens: int


def chosen_in_directory(
    subject: PruningTarget, asked: Request, place: DirectoryWalk, run: Run | None, *, repair: bool
) -> Streamed:
    """What stays of a model whose weights lie in files; its consumers are repaired in the copy of a run that has begun.
    Without one only what would stay is said."""
    named = {group.name: group for group in subject.coupling.groups}

    def measure() -> _Walked:
        return _measured_by_walk(subject, asked, place, named, stacklevel=8 + (run is not None))

    walked = measure() if run is None else run.stage("measured", _Walked, measure, lambda its: its.misfit(named))
    measured, tokens = walked.measured(), walked.tokens
    place.in_blocks |= walked.in_blocks
    choice = _choice(subject, asked, measured)
    left = [group for group in named.values() if group.name in choice.kept and not choice.kept[group.name].all()]
    choice = replace(choice, in_blocks=place.in_blocks)
    if run is None:
        return Streamed(choice, {}, (), (), tokens)
    counts = {name: int(choice.kept[name].sum()) for name in named if name in choice.kept}
    other = "has other counts than the measurements give"
    run.stage("chosen", dict[str, int], lambda: counts, lambda found: None if found == counts else other)
    if not left:
        return Streamed(choice, {}, (), (), tokens)
    free = free_in(place.model, place.blocks)
    job = Repairing(subject.coupling, left, choice.kept, measured, free, repair=repair)
    place.form(job, run)  # whose notes are of the result, also where all blocks are repaired
    already = _restored(run, place, job)

    def repair_blocks() -> bool:
        noted = _Noted(job, named, {name for name, group in named.items() if _is_anew(job, group)})
        for _ in place.walk(_OfTheFirst(job), run, noted, already):
            pass
        return True

    run.stage("repaired", bool, repair_blocks)
    kept, errors, biases = on_rank_zero(
        lambda: (
            {name: job.kept[name] for name in named if name in job.kept},
            job.errors,
            job.biases,
        )
    )
    job.kept.update(kept)
    plan = plan_of(subject.model, subject.coupling, job.kept)
    choice = replace(choice, kept=job.kept, plan=plan, in_blocks=place.in_blocks)
    if not repair:
        return Streamed(choice, {}, (), (), tokens)

    def rescale_copy() -> list[str]:
        new = rescaled_in_directory(place, choice.plan)
        on_rank_zero(lambda: place.files.put(new))
        return sorted(new)

    def misnamed(found: list[str]) -> str | None:
        wrong = [name for name in found if name not in choice.plan.tensors]
        return f"names {wrong[0]}, of which nothing leaves" if wrong else None

    rescaled = run.stage("rescaled", list[str], rescale_copy, misnamed)
    return Streamed(choice, errors, biases, rescaled, tokens)


# ---- measured and chosen --------------------------------------------------------------------------------------------


class _Slopes(NamedTuple):
    """The slopes along the outputs of a matrix."""

    piece: WeightView
    squares: npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Units:
    """What was measured of a group."""

    scores: npt.NDArray[np.float64]
    counts: npt.NDArray[Any]  # whole numbers
    losses: npt.NDArray[np.float64]
    consumers: frozenset[str]


@dataclass(frozen=True)
class _Walked:
    """What a walk measured, by the names of groups: of slopes, what is still needed."""

    tokens: Annotated[int, Between(1)]
    slopes: tuple[_Slopes, ...]
    groups: Mapping[str, _Units]
    in_blocks: Mapping[str, str]

    @staticmethod
    def of(measured: Measured, named: _Named, tokens: int, in_blocks: Mapping[str, str]) -> _Walked:
        consumers = {name for names in measured.consumers.values() for name in names}
        slopes = {piece: squares for piece, squares in measured.slopes.items() if piece.name in consumers}
        return _Walked(
            tokens,
            tuple(_Slopes(piece, squares.numpy(force=True)) for piece, squares in slopes.items()),
            {
                name: _Units(
                    measured.scores[name].numpy(force=True),
                    measured.curves[name].counts,
                    measured.curves[name].losses,
                    measured.consumers.get(name, frozenset()),
                )
                for name in named
                if name in measured.scores
            },
            in_blocks,
        )

    def misfit(self, named: _Named) -> str | None:
        """Why it is not of this model."""
        for name, its in self.groups.items():
            if name not in named:
                return f"names {name}, which is no group of units of the model"
            size, steps = named[name].size, np.diff(its.counts)
            if len(its.scores) != size or len(its.counts) != len(its.losses) or not (steps > 0).all():
                return f"has of {name} what is not measured of {size} units"
        wrong = [piece.name for piece, squares in self.slopes if len(squares) != piece.shape[0]]
        return f"has of the slopes of {wrong[0]} not as many as it has outputs" if wrong else None

    def measured(self) -> Measured:
        return Measured(
            {name: torch.as_tensor(each.scores, dtype=torch.float64) for name, each in self.groups.items()},
            {name: Curve(each.counts.astype(np.int64), each.losses) for name, each in self.groups.items()},
            {name: each.consumers for name, each in self.groups.items()},
            {piece: torch.as_tensor(squares, dtype=torch.float64) for piece, squares in self.slopes},
        )


def _measured_by_walk(
    subject: PruningTarget, asked: Request, place: DirectoryWalk, named: _Named, stacklevel: int
) -> _Walked:
    groups = groups_in_scope(subject.scope, asked)
    measuring = Measuring(subject.coupling, groups, _slopes(subject, place, groups, stacklevel))
    job = _OfTheFirst(measuring)
    for _ in place.walk(job):
        pass
    if on_rank_zero(lambda: bool(measuring.slopes) and measuring.unsloped):
        measuring = Measuring(subject.coupling, groups)
        job = _OfTheFirst(measuring)
        for _ in place.walk(job):
            pass
    if not job.tokens:
        raise ValueError("nothing was measured: the batches ran none of the blocks, or no product with their weights.")
    return on_rank_zero(lambda: _Walked.of(measuring.measured, named, job.tokens, place.in_blocks))


def _slopes(
    subject: PruningTarget, place: DirectoryWalk, groups: Sequence[Group], stacklevel: int
) -> dict[WeightView, Tensor]:
    """Those of the first process, on its first batches; none where they are not finite."""
    names = Measuring(subject.coupling, groups).targets
    found = on_rank_zero(lambda: place.slopes(names, for_slopes(place.batches)))
    if (wrong := not_finite(found)) is None:
        return found
    warnings.warn(OVERFLOWING.format(name=wrong), RuntimeWarning, stacklevel=stacklevel)
    return {}


def _choice(subject: PruningTarget, asked: Request, measured: Measured) -> Choice:
    """What the first process chooses; there is one proof of it."""
    mine: list[Choice] = []

    def chosen() -> tuple[Any, ...]:
        mine.append(choose(subject, asked, (), measured))
        choice = mine[0]
        return choice.kept, choice.fields, choice.left, choice.beside, choice.scope.reasons

    kept, fields, left, beside, reasons = on_rank_zero(chosen)
    if mine:
        return mine[0]
    scope = replace(
        subject.scope, groups=[each for each in subject.scope.groups if each.name not in reasons], reasons=reasons
    )
    return Choice(kept, scope, plan_of(subject.model, subject.coupling, kept), fields, left, beside)


# ---- repaired -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _OfTheFirst:
    """A job that the first process does for all: sums that were rounded in another order, or a processor of another
    kind, would choose other units."""

    job: Job
    tokens: int = 0

    @property
    def targets(self) -> Collection[str]:
        return self.job.targets

    @property
    def words(self) -> Collection[str]:
        return self.job.words

    @property
    def in_stages(self) -> bool:
        return self.job.in_stages

    @property
    def beside_dense(self) -> bool:
        return self.job.beside_dense

    @property
    def around(self) -> bool:
        return self.job.around

    @property
    def changes(self) -> bool:
        return self.job.changes

    def solve_stage(
        self, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[WeightView, InputStats]
    ) -> tuple[Mapping[str, Solved], Pruned]:
        self.tokens = max([self.tokens, *(met.tokens for met in found.values())])
        rank, world = rank_and_world()
        if world == 1:
            return self.job.solve_stage(block, module, stage, found)
        solved: dict[str, Solved] = {}

        def names() -> list[str]:
            solved.update(self.job.solve_stage(block, module, stage, found)[0])
            return list(solved)

        for name in on_rank_zero(names):
            like = module.get_parameter(name)
            new = solved[name] if not rank else Solved(torch.empty_like(like), torch.ones_like(like, dtype=torch.bool))
            solved[name] = Solved(*(each.contiguous() for each in new))
            broadcast(None, solved[name], 0)
        return solved, Pruned(block)


@dataclass(frozen=True)
class _Block:
    """What a run's journal says of a repaired block: units that were chosen again, and the errors."""

    name: str
    kept: Mapping[str, tuple[Annotated[int, Between(0)], ...]]
    errors: Mapping[str, Annotated[float, Between(0)]]
    biases: tuple[str, ...]


@dataclass(eq=False)
class _Noted:
    """Makes the journal's entry for a block."""

    job: Repairing
    named: _Named
    known: set[str] = field(default_factory=set)

    def __call__(self, pruned: Pruned, *_: object) -> _Block:
        fresh = [name for name, group in self.named.items() if name not in self.known and _is_anew(self.job, group)]
        self.known.update(fresh)
        return _Block(
            pruned.block,
            {name: tuple(np.flatnonzero(self.job.kept[name]).tolist()) for name in fresh},
            {name: loss for name, loss in self.job.errors.items() if name.startswith(f"{pruned.block}.")},
            tuple(sorted(name for name in self.job.biases if name.startswith(f"{pruned.block}."))),
        )


def _is_anew(job: Repairing, group: Group) -> bool:
    name = group.name
    return name in job.chosen and not np.array_equal(job.kept[name], job.chosen[name])


def _restored(run: Run, place: DirectoryWalk, job: Repairing) -> list[str]:
    """The blocks that an earlier run repaired: units that were chosen again, and the errors, go back to the job."""
    done = run.done(_Block, place.blocks)
    for at, block in enumerate(done):
        for name, units in block.kept.items():
            chosen = job.chosen.get(name)
            if chosen is None:
                raise run.wrong(f"blocks[{at}].kept.{name}", "is no group of which units leave")
            mask = np.isin(np.arange(len(chosen)), units)
            if not len(units) == mask.sum() == chosen.sum():
                raise run.wrong(f"blocks[{at}].kept.{name}", f"is not so many units as were chosen of {len(chosen)}")
            job.kept[name] = mask
        for field_, names, allowed in (("errors", block.errors, job.targets), ("biases", block.biases, job.free)):
            if wrong := [each for each in names if each not in allowed or not each.startswith(f"{block.name}.")]:
                raise run.wrong(f"blocks[{at}].{field_}", f"names {wrong[0]}, which is not repaired in {block.name}")
        job.errors.update(block.errors)
        job.biases.update(block.biases)
    return [block.name for block in done]
