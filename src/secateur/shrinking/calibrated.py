"""Selection and repair by calibration data, in memory: one walk measures, the units are chosen, a second walk repairs.
Selection and repair by calibration data, in a directory: block by block, otherwise as `calibrated` does.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.checkpoints import Unfinished
from secateur.coupling import Group
from secateur.models import (
    DirectoryWalk,
    InputStats,
    Job,
    Pruned,
    Solved,
    WeightView,
    barrier,
    broadcast,
    full_name,
    on_rank_zero,
    parts_of,
    rank_and_world,
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
from secateur.support import Fields, Forward, Undo

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
    subject: PruningTarget, asked: Request, place: DirectoryWalk, begun: Unfinished | None, *, repair: bool
) -> Streamed:
    """What stays of a model whose weights lie in files; its consumers are repaired in the copy of a run that has begun.
    Without one only what would stay is said."""
    named = {group.name: group for group in subject.coupling.groups}
    found = begun and begun.found().inner("facts")
    if found:
        found.only("measured", "tokens", "chosen", "repaired", "rescaled", "in_blocks")
        place.in_blocks |= found.each_named("in_blocks", str) if "in_blocks" in found.values else {}
    if found and "measured" in found.values:
        measured, tokens = _measured_in(found.inner("measured"), named), found.take("tokens", int, least=1)
    else:
        measured, tokens = _measured_by_walk(subject, asked, place, named)
        _learn(begun, measured=_plain(measured, named), tokens=tokens, in_blocks=place.in_blocks)
    choice = _choice(subject, asked, measured)
    counts = {name: int(choice.kept[group.name].sum()) for name, group in named.items() if group.name in choice.kept}
    if found and "chosen" in found.values:
        if found.each_named("chosen", int, least=0) != counts:
            raise found.wrong("chosen", "has other counts than the measurements give")
    else:
        _learn(begun, chosen=counts)
    left = [group for group in named.values() if group.name in choice.kept and not choice.kept[group.name].all()]
    if begun is None or not left:
        return Streamed(replace(choice, in_blocks=place.in_blocks), {}, (), (), tokens)
    free = free_in(place.model, place.blocks)
    job = Repairing(subject.coupling, left, choice.kept, measured, free, repair=repair)
    already = _gone_on_with(begun, place, job, named)
    if not (found and found.optional("repaired", bool)):
        noted = _Noted(job, named, {name for name, group in named.items() if _is_anew(job, group)})
        for _ in place.walk(_OfTheFirst(job), begun, noted, already):
            pass
        _learn(begun, repaired=True, in_blocks=place.in_blocks)
    kept, errors, biases = on_rank_zero(
        lambda: (
            {name: job.kept[group.name] for name, group in named.items() if group.name in job.kept},
            job.errors,
            job.biases,
        )
    )
    job.kept.update(kept)
    plan = plan_of(subject.model, subject.coupling, job.kept)
    choice = replace(choice, kept=job.kept, plan=plan, in_blocks=place.in_blocks)
    if not repair:
        return Streamed(choice, {}, (), (), tokens)
    if found and "rescaled" in found.values:
        rescaled = found.each("rescaled", str)
        if wrong := [name for name in rescaled if name not in choice.plan.tensors]:
            raise found.wrong("rescaled", f"names {wrong[0]}, of which nothing leaves")
    else:
        new = rescaled_in_directory(place, choice.plan)
        rescaled = sorted(new)
        if not rank_and_world()[0]:
            place.files.put(new)
        barrier()
        _learn(begun, rescaled=rescaled)
    return Streamed(choice, errors, biases, rescaled, tokens)


def _learn(begun: Unfinished | None, **facts: Any) -> None:
    if begun is not None and not rank_and_world()[0]:
        begun.learn(**facts)


# ---- measured and chosen --------------------------------------------------------------------------------------------


def _measured_by_walk(
    subject: PruningTarget, asked: Request, place: DirectoryWalk, named: _Named
) -> tuple[Measured, int]:
    groups = groups_in_scope(subject.scope, asked)
    measuring = Measuring(subject.coupling, groups, _slopes(subject, place, groups))
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
    plain = on_rank_zero(lambda: _plain(measuring.measured, named))
    return _measured_in(Fields(plain, place.source.root), named), job.tokens


def _slopes(subject: PruningTarget, place: DirectoryWalk, groups: Sequence[Group]) -> dict[WeightView, Tensor]:
    """Those of the first process, on its first batches; none where they are not finite."""
    names = Measuring(subject.coupling, groups).targets
    found = on_rank_zero(lambda: place.slopes(names, for_slopes(place.batches)))
    if (wrong := not_finite(found)) is None:
        return found
    warnings.warn(OVERFLOWING.format(name=wrong), RuntimeWarning, stacklevel=5)
    return {}


def _plain(measured: Measured, named: _Named) -> dict[str, Any]:
    """As JSON: slopes, of what is still needed of them, and the rest by the names of groups."""
    consumers = {name for names in measured.consumers.values() for name in names}
    slopes = [
        {
            "name": piece.name,
            "offset": piece.offset,
            "shape": list(piece.shape),
            "strides": list(piece.strides),
            "squares": squares.tolist(),
        }
        for piece, squares in measured.slopes.items()
        if piece.name in consumers
    ]
    return {"slopes": slopes, "groups": _plain_groups(measured, named)}


def _plain_groups(measured: Measured, named: _Named) -> dict[str, Any]:
    return {
        name: {
            "scores": measured.scores[group.name].tolist(),
            "counts": measured.curves[group.name].counts.tolist(),
            "losses": measured.curves[group.name].losses.tolist(),
            "consumers": sorted(measured.consumers.get(group.name, ())),
        }
        for name, group in named.items()
        if group.name in measured.scores
    }


def _measured_in(found: Fields, named: _Named) -> Measured:
    """What `_plain` said; a journal is a file like others."""
    found.only("slopes", "groups")
    slopes = dict(map(_slopes_in, found.inners("slopes")))
    found = found.inner("groups")
    scores: dict[str, Tensor] = {}
    curves: dict[str, Curve] = {}
    consumers: dict[str, frozenset[str]] = {}
    for name in found.values:
        if name not in named:
            raise found.wrong(name, "is no group of units of the model")
        one, group = found.inner(name), named[name]
        one.only("scores", "counts", "losses", "consumers")
        scores[group.name] = torch.tensor(one.each("scores", float), dtype=torch.float64)
        counts, losses = np.array(one.each("counts", int, least=0, most=group.size)), one.each("losses", float)
        if len(scores[group.name]) != group.size or len(counts) != len(losses) or not (np.diff(counts) > 0).all():
            raise one.wrong("", f"is not what is measured of {group.size} units")
        curves[group.name] = Curve(counts, np.array(losses, dtype=np.float64))
        consumers[group.name] = frozenset(one.each("consumers", str))
    return Measured(scores, curves, consumers, slopes)


def _slopes_in(found: Fields) -> tuple[WeightView, Tensor]:
    found.only("name", "offset", "shape", "strides", "squares")
    shape, strides = (found.each(name, int, least=0, most=2**62) for name in ("shape", "strides"))
    squares = found.each("squares", float, least=0)
    if len(shape) != 2 or len(strides) != 2 or len(squares) != shape[0]:
        raise found.wrong("", "is not what is measured of the outputs of a matrix")
    name, offset = found.take("name", str), found.take("offset", int, least=0)
    piece = WeightView(name, offset, (shape[0], shape[1]), (strides[0], strides[1]))
    return piece, torch.tensor(squares, dtype=torch.float64)


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


@dataclass(eq=False)
class _Noted:
    """The journal's entry for a repaired block: units that were chosen again, and the errors."""

    job: Repairing
    named: _Named
    known: set[str] = field(default_factory=set)

    def __call__(self, pruned: Pruned, *_: object) -> dict[str, Any]:
        fresh = [name for name, group in self.named.items() if name not in self.known and _is_anew(self.job, group)]
        self.known.update(fresh)
        return {
            "name": pruned.block,
            "kept": {name: np.flatnonzero(self.job.kept[name]).tolist() for name in fresh},
            "errors": {name: loss for name, loss in self.job.errors.items() if name.startswith(f"{pruned.block}.")},
            "biases": sorted(name for name in self.job.biases if name.startswith(f"{pruned.block}.")),
        }


def _is_anew(job: Repairing, group: Group) -> bool:
    name = group.name
    return name in job.chosen and not np.array_equal(job.kept[name], job.chosen[name])


def _gone_on_with(begun: Unfinished, place: DirectoryWalk, job: Repairing, named: _Named) -> Sequence[str]:
    """Restores the blocks that an earlier run repaired: units that were chosen again, and the errors, go back to the
    job.
    """
    done: list[str] = []
    for block in begun.found().inners("blocks"):
        block.only("name", "kept", "errors", "biases")
        name = block.take("name", str)
        if name not in place.blocks or name in done:
            raise block.wrong("name", f"is {name}, which is no block of the model, or is there twice")
        done.append(name)
        kept = block.inner("kept")
        for group, units in _kept_in(kept, named, job):
            mask = np.zeros(group.size, dtype=bool)
            mask[units] = True
            if mask.sum() != job.chosen[group.name].sum():
                raise kept.wrong(group.name, f"is not so many units as were chosen of {group.size}")
            job.kept[group.name] = mask
        errors = block.each_named("errors", float, least=0)
        if wrong := [each for each in errors if each not in job.targets or not each.startswith(f"{name}.")]:
            raise block.wrong(f"errors.{wrong[0]}", f"is no weight that is repaired in {name}")
        job.errors.update(errors)
        biases = block.each("biases", str)
        if wrong := [each for each in biases if each not in job.free or not each.startswith(f"{name}.")]:
            raise block.wrong("biases", f"names {wrong[0]}, which is no bias that moves in {name}")
        job.biases.update(biases)
    return done


def _kept_in(kept: Fields, named: _Named, job: Repairing) -> Iterator[tuple[Group, list[int]]]:
    for name in kept.values:
        if name not in named or name not in job.chosen:
            raise kept.wrong(name, "is no group of which units leave")
        yield named[name], kept.each(name, int, least=0, most=named[name].size - 1)
