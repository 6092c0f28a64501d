"""Selection and repair by calibration data: one walk measures, the units are chosen, a second walk repairs.

Law: the structure is proved before any weight changes. In memory what changed is taken back by the caller's `Undo`. Of
a directory one block's weights are in memory, and once more while it is repaired; what was measured, what was chosen
and which blocks are repaired is in the journal, so that a run that was killed goes on to the same bytes. Of several
processes the first one decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secateur.checkpoints import Run
from secateur.coupling import Group
from secateur.models import (
    Host,
    InFiles,
    InMemory,
    Pruned,
    WeightView,
    check_finite,
    convolutions_in_files,
    full_name,
    in_turn,
    loaded_model,
)
from secateur.shrinking.gates import GateBudget, Gated, by_gates, learnt
from secateur.shrinking.grading import GroupAblation
from secateur.shrinking.measure import (
    OVERFLOWING,
    Curve,
    Measured,
    Measuring,
    for_slopes,
    not_finite,
    recalled,
    remember,
)
from secateur.shrinking.plan import plan_of
from secateur.shrinking.repair import Repairing, free_in, rescaled
from secateur.shrinking.request import PruningTarget, Request
from secateur.shrinking.select import Choice, check_globs, choose, counts_of, groups_in_scope, names_of
from secateur.support import Between, Undo, on_rank_zero, rank_and_world
from secateur.targets import computed_weights

_Named = Mapping[str, Group]


@dataclass(frozen=True)
class Calibrated:
    """The choice and the errors of a model whose units were selected and repaired.

    Attributes:
        choice: what stays. The consumers are repaired already, with zeros where columns leave: in memory in place, of a
            directory in the copy. The plan is not carried out yet.
        errors: ``{name: error}`` of each repaired matrix, as in `Repairing`.
        biases: which moved with them.
        normalizations: the weights and biases of normalizations that moved, since their width lost entries.
        tokens: how many were measured.
        before: in memory the values before the repair, ``{name: copy}``, for the undo.
        gates: what gates came to, where they chose.
    """

    choice: Choice
    errors: Mapping[str, float] = field(default_factory=dict)
    biases: Collection[str] = ()
    normalizations: Collection[str] = ()
    tokens: int = 0
    before: Mapping[str, Tensor] = field(default_factory=dict)
    gates: Gated | None = None


def calibrated_selection(
    subject: PruningTarget,
    asked: Request,
    host: Host,
    *,
    repair: bool,
    known: Collection[str] = (),
    undo: Undo | None = None,
    run: Run | None = None,
) -> Calibrated:
    """What stays of a model, by data; its consumers are repaired, in memory or in the copy of a run that has begun.
    Without either it is only said what would stay.

    Args:
        known: names that globs may ask for, beside those of the coupling.
        undo: for a model in memory: what changes is taken back by it.
        run: for a model in files.

    Raises:
        ValueError: a glob matches nothing, a weight is not finite, there are no batches, or they measure nothing that
            may leave.

    Warns:
        RuntimeWarning: gradients overflow where the model itself does not, so that losses are shares of variances.
    """
    model, coupling = subject.model, subject.coupling
    check_globs(names_of(coupling) | set(known), asked.globs)
    named = {group.name: group for group in coupling.groups}
    free = free_in(host.model, host.blocks)

    def measure() -> _Walked:
        measured, tokens = _measured(subject, asked, host, None, named, stacklevel=7 + (run is not None))
        return _Walked.of(measured, named, tokens, host.in_blocks)

    if isinstance(host, InMemory):
        measured, tokens = _measured(subject, asked, host, free if repair else None, named, stacklevel=4)
    else:
        walked = measure() if run is None else run.stage("measured", _Walked, measure, lambda its: its.misfit(named))
        measured, tokens = walked.measured(), walked.tokens
        host.in_blocks |= walked.in_blocks
    gates: Gated | None = None
    if asked.gates:
        groups = groups_in_scope(subject.scope, asked)
        budget = GateBudget.of(subject, groups, asked)
        if asked.target == "latency":  # times of groups add up only nearly: as much leaves as where the whole is met
            budget = budget.meeting(counts_of(_choice(subject, asked, known, measured).kept))

        def learn() -> Gated:
            model = loaded_model(host.source.root, host.device) if isinstance(host, InFiles) else host.model
            blocks = {name: model.get_submodule(name) for name in host.blocks}
            its = subject, budget, groups, measured, model, blocks, in_turn(host.batches), host.forward
            return on_rank_zero(lambda: learnt(*its))

        gates = _stage(run, "gates", Gated, learn, lambda its: its.misfit(named))
        measured = by_gates(budget, measured, gates)
    choice = replace(_choice(subject, asked, known, measured), in_blocks=host.in_blocks)
    left = [group for name, group in named.items() if name in choice.kept and not choice.kept[name].all()]
    if run is not None:
        counts = {name: int(choice.kept[name].sum()) for name in named if name in choice.kept}
        other = "has other counts than the measurements give"
        run.stage("chosen", dict[str, int], lambda: counts, lambda found: None if found == counts else other)
    if not left or (run is None and undo is None):
        return Calibrated(choice, tokens=tokens, gates=gates)
    again = repair or gates is None
    job = Repairing(
        coupling, left, choice.kept, measured, free, repair=repair, again=again, swaps=asked.choose == "swaps"
    )
    before: dict[str, Tensor] = {}
    if undo is not None:  # biases are among them
        changes = {name: each for name, each in model.named_parameters() if name in job.targets or each.dim() == 1}
        before.update(zip(changes, undo.values(*changes.values()), strict=True))
    host.form(job, run)  # whose notes are of the result, also where all blocks are repaired
    already = [] if run is None else _restored(run, host, job)

    def repair_blocks() -> bool:
        noted = _Noted(job, named, {name for name, group in named.items() if _was_chosen_again(job, group)})
        host.walk(job, run, noted, already)
        return True

    _stage(run, "repaired", bool, repair_blocks)
    kept, errors, biases = on_rank_zero(lambda: (job.kept, job.errors, job.biases))
    job.kept.update(kept)
    choice = replace(choice, kept=job.kept, plan=plan_of(model, coupling, job.kept), in_blocks=host.in_blocks)
    if not repair:
        return Calibrated(choice, {}, (), (), tokens, before, gates)

    def rescale() -> list[str]:
        new = rescaled(host, choice.plan)
        host.change(new)
        return sorted(new)

    def misnamed(found: list[str]) -> str | None:
        wrong = [name for name in found if name not in choice.plan.tensors]
        return f"names {wrong[0]}, of which nothing leaves" if wrong else None

    moved = _stage(run, "rescaled", list[str], rescale, misnamed)
    return Calibrated(choice, errors, biases, moved, tokens, before, gates)


def _stage(run: Run | None, *stage: Any) -> Any:
    """What an earlier run noted, or is computed now; in memory it is always computed."""
    return stage[2]() if run is None else run.stage(*stage)


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


def _measured(
    subject: PruningTarget,
    asked: Request,
    host: Host,
    free: frozenset[str] | None,
    named: _Named,
    stacklevel: int,
) -> tuple[Measured, int]:
    """What a walk over the dense model says, and over how many tokens.

    In memory, where no slopes are known, a share of what is in the request is asked for, and parameters may move, the
    losses are tried; and what was measured of the same model before is not measured again.
    """
    coupling, groups = subject.coupling, groups_in_scope(subject.scope, asked)
    here = isinstance(host, InMemory)
    tries = here and free is not None and asked.allocate is None and asked.sparsity is not None
    way = ("tried", asked.round_to) if tries else None
    if here and (measured := recalled(host.model, groups, host.batches, way)) is not None:
        return measured, 1
    measuring = Measuring(coupling, groups, shared=_shared(host))
    for_all = for_slopes(in_turn(for_slopes(host.batches)))  # not of the first process's share alone
    found = on_rank_zero(lambda: host.slopes(measuring.targets, for_all))
    if (wrong := not_finite(found)) is None:
        measuring.slopes.update(found)
    elif here:
        check_finite(host.model)

    def walked(measuring: Measuring) -> GroupAblation | None:
        untold = tries and free is not None and not measuring.slopes
        trying = GroupAblation(measuring, free or (), asked.round_to) if untold else None
        host.walk(trying or measuring)  # of what is not finite it says where
        return trying

    trying = walked(measuring)
    if wrong is not None:
        warnings.warn(OVERFLOWING.format(name=wrong), RuntimeWarning, stacklevel=stacklevel)
    if on_rank_zero(lambda: bool(measuring.slopes) and measuring.unsloped):
        measuring = Measuring(coupling, groups, shared=measuring.shared)
        trying = walked(measuring)
    measured = measuring.measured
    if rank_and_world()[1] > 1:
        measured = on_rank_zero(lambda: _Walked.of(measuring.measured, named, 1, {})).measured()
    if not measured.scores:
        raise ValueError(
            f"data says nothing of what may leave {type(host.model).__name__}: the batches ran none of its blocks, or "
            "no product of a unit with a matrix in them. Pass other batches, or none: then magnitude ranks the units."
            f"{convolutions_in_files(host.model)}{computed_weights(host.model)}"
        )
    if trying is not None:
        measured = trying.tried(host.model, measured, in_turn(host.batches), host.forward)
    if here:
        remember(host.model, groups, host.batches, measured, way)
        if measured.slopes:  # then nothing is tried
            remember(host.model, groups, host.batches, measured)
    return measured, on_rank_zero(lambda: measuring.tokens)


def _shared(host: Host) -> frozenset[str]:
    """The parameters that several blocks hold: what is right for one is wrong for the others, so they stay."""
    names: dict[int, list[str]] = {}
    for block, module in host.blocks.items():
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), []).append(full_name(block, name))
    return frozenset(name for each in names.values() if len(each) > 1 for name in each)


def _choice(subject: PruningTarget, asked: Request, known: Collection[str], measured: Measured) -> Choice:
    """What the first process chooses; there is one proof of it."""
    mine: list[Choice] = []

    def chosen() -> tuple[Any, ...]:
        mine.append(choose(subject, asked, known, measured))
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
        fresh = [
            name for name, group in self.named.items() if name not in self.known and _was_chosen_again(self.job, group)
        ]
        self.known.update(fresh)
        return _Block(
            pruned.block,
            {name: tuple(np.flatnonzero(self.job.kept[name]).tolist()) for name in fresh},
            {name: loss for name, loss in self.job.errors.items() if name.startswith(f"{pruned.block}.")},
            tuple(sorted(name for name in self.job.biases if name.startswith(f"{pruned.block}."))),
        )


def _was_chosen_again(job: Repairing, group: Group) -> bool:
    name = group.name
    return name in job.chosen and not np.array_equal(job.kept[name], job.chosen[name])


def _restored(run: Run, host: Host, job: Repairing) -> list[str]:
    """The blocks that an earlier run repaired: units that were chosen again, and the errors, go back to the job."""
    done = run.done(_Block, host.blocks)
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
