"""Selection and repair by calibration data: one walk measures, the units are chosen, a second walk repairs.

Law: the structure is proved before any weight changes. In memory what changed is taken back by the caller's `Undo`. Of
a directory one block's weights are in memory, and once more while it is repaired; what was measured, what was chosen
and which blocks are repaired is in the journal, so that a run that was killed goes on to the same bytes. Of several
processes the first one decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.checkpoints import Run
from secateur.coupling import Axis, Coupling, Group, counts_kept, find_coupling
from secateur.models import (
    Host,
    InFiles,
    InMemory,
    InputStats,
    Job,
    Pruned,
    Solved,
    WeightView,
    check_finite,
    convolutions_in_files,
    full_name,
    in_turn,
)
from secateur.shrinking.configuration import PROVED
from secateur.shrinking.gates import GateBudget, Gated, by_gates, learnt
from secateur.shrinking.grading import GroupAblation
from secateur.shrinking.measure import (
    OVERFLOWING,
    WORDS,
    Curve,
    Measured,
    Measuring,
    counts_of,
    for_slopes,
    not_finite,
    positions_in,
    recalled,
    remember,
    slopes_of,
)
from secateur.shrinking.proof import Change, IncomparableError, wrong_changes
from secateur.shrinking.repair import Repairing, free_in, rescaled
from secateur.shrinking.request import PruningTarget, Request
from secateur.shrinking.select import Choice, check_globs, choose, groups_in_scope, layer_signature, names_of
from secateur.support import Between, Undo, alone, on_rank_zero, rank_and_world, run_example, warn
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
        rotated: the groups that lost dimensions which were rotated before.
    """

    choice: Choice
    errors: Mapping[str, float] = field(default_factory=dict)
    biases: Collection[str] = ()
    normalizations: Collection[str] = ()
    tokens: int = 0
    before: Mapping[str, Tensor] = field(default_factory=dict)
    gates: Gated | None = None
    rotated: Sequence[str] = ()


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

    rotated = rotate_heads(subject, asked, host, undo, run) if asked.rotate and repair else None

    def measure() -> _Walked:
        measured, tokens = _measured(subject, asked, host, None, named)
        return _Walked.of(measured, named, tokens, host.in_blocks)

    if isinstance(host, InMemory):
        measured, tokens = _measured(subject, asked, host, free if repair else None, named)
    else:
        walked = measure() if run is None else run.stage("measured", _Walked, measure, lambda its: its.misfit(named))
        measured, tokens = walked.measured(), walked.tokens
        host.in_blocks |= walked.in_blocks
    gates: Gated | None = None
    if asked.gates:
        groups = groups_in_scope(subject.scope, asked)
        budget = GateBudget.of(subject, groups, asked)
        if asked.target == "latency":  # times of groups add up only nearly: as much leaves as where the whole is met
            budget = budget.meeting(counts_kept(_choice(subject, asked, known, measured).kept))

        def learn() -> Gated:
            model = host.loaded() if isinstance(host, InFiles) else host.model
            blocks = {name: model.get_submodule(name) for name in host.blocks}
            its = subject, budget, groups, measured, model, blocks, in_turn(host.batches), host.forward
            return on_rank_zero(lambda: learnt(*its))

        gates = _stage(run, "gates", Gated, learn, lambda its: its.misfit(named))
        measured = by_gates(budget, measured, gates)
    choice = replace(_choice(subject, asked, known, measured), in_blocks=host.in_blocks)
    left = [group for name, group in named.items() if name in choice.kept and not choice.kept[name].all()]
    turned: Sequence[str] = ()
    if rotated is not None and rotated.rotations:  # what loses nothing stays as it was
        names = {group.name for group in left}
        turned = tuple(dict.fromkeys(each.group for each in rotated.rotations if each.group in names))
        rotated.put(host, turned)
        if run is not None and isinstance(host, InFiles):
            run.stage("rewritten", list[str], host.rewritten)
    if run is not None:
        counts = {name: int(choice.kept[name].sum()) for name in named if name in choice.kept}
        other = "has other counts than the measurements give"
        run.stage("chosen", dict[str, int], lambda: counts, lambda found: None if found == counts else other)
    if not left or (run is None and undo is None):
        return Calibrated(choice, tokens=tokens, gates=gates, rotated=turned)
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
    plan, fields = subject.plan(job.kept), subject.fields(job.kept)
    choice = replace(choice, kept=job.kept, plan=plan, fields=fields, in_blocks=host.in_blocks)
    if not repair:
        return Calibrated(choice, {}, (), (), tokens, before, gates)

    def rescale() -> list[str]:
        new = rescaled(host, choice.plan)
        host.change(new)
        return sorted(new)

    def misnamed(found: list[str]) -> str | None:
        wrong = [name for name in found if name not in choice.plan.tensors]
        return f"names {wrong[0]}, of which nothing leaves" if wrong else None

    shifted = _stage(run, "rescaled", list[str], rescale, misnamed)
    return Calibrated(choice, errors, biases, shifted, tokens, before, gates, turned)


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
            {
                name: torch.as_tensor(each.scores, dtype=torch.float64, device="cpu")
                for name, each in self.groups.items()
            },
            {name: Curve(each.counts.astype(np.int64), each.losses) for name, each in self.groups.items()},
            {name: each.consumers for name, each in self.groups.items()},
            {piece: torch.as_tensor(squares, dtype=torch.float64, device="cpu") for piece, squares in self.slopes},
        )


def _measured(
    subject: PruningTarget,
    asked: Request,
    host: Host,
    free: frozenset[str] | None,
    named: _Named,
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
    found, wrong = _slopes_in(host, measuring.targets)
    measuring.slopes.update(found)

    def walked(measuring: Measuring) -> GroupAblation | None:
        untold = tries and free is not None and not measuring.slopes
        trying = GroupAblation(measuring, free or (), asked.round_to) if untold else None
        host.walk(trying or measuring)  # of what is not finite it says where
        return trying

    trying = walked(measuring)
    if wrong is not None:
        warn(OVERFLOWING.format(name=wrong), RuntimeWarning)
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


def _slopes_in(host: Host, names: Collection[str]) -> tuple[dict[WeightView, Tensor], str | None]:
    """The slopes along what these parameters multiply; none, and the first of which they are not finite, where that is
    so by nothing but a narrow dtype."""
    for_all = for_slopes(in_turn(for_slopes(host.batches)))  # not of the first process's share alone
    found = on_rank_zero(lambda: host.slopes(names, for_all))
    if (wrong := not_finite(found)) is None:
        return found, None
    if isinstance(host, InMemory):
        check_finite(host.model)
    return {}, wrong


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
    return Choice(kept, scope, subject.plan(kept), fields, left, beside)


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


# ---- Dimensions inside heads, rotated so that those of the least worth can leave.
#
# Law: rotated weights compute the same function. Where that is so is not read off names: a rotation at random must not
# show on random weights in float64. Rotations are solved in float64, and weights are rounded once.
#
# Of a head, x has the second moment C, and what multiplies it the second moment M. T goes on x, and its inverse
# transposed on the other: ``T = s Λ^(1/4) Uᵀ C^(-1/2)`` for ``U Λ Uᵀ = C^(1/2) M C^(1/2)``. Then dimensions are
# independent, and no k of any others lose less than all but the first k (MoDeGPT, arXiv:2408.09632). Such x are values,
# with the columns of the matrix behind them, weighted by the slopes of its outputs; and queries, with keys.
#
# What comes out is bounded. By Λ^(1/4) both sides of a dimension are alike, so that T is a geometric mean of both
# moments; as these are regularized, its condition number is at most ``sqrt(width / _SMALL + 1)``. By s the x are in all
# as large as they were, and then the others are no larger. Whitened x, or an orthogonal T of the same spaces, which a
# repair could do with, came to the same: MiniLM without half of its multiply-adds .926 and .927, and .927 by this.

_SMALL = 1e-4  # of the mean diagonal, which C and M get


@dataclass(frozen=True)
class HeadEntries:
    """What one map for each head moves: where a dimension of a parameter has entries of (heads, copies, width)."""

    name: str
    at: int
    places: npt.NDArray[np.int64]

    def within(self, piece: WeightView, parameter: Tensor, *, outputs: bool) -> npt.NDArray[np.int64] | None:
        """Which outputs, or inputs, of a matrix they are; None where they are none."""
        along = positions_in(piece, parameter, outputs=outputs).get(self.at)
        if along is None or not np.isin(self.places, along).all():
            return None
        order = np.argsort(along)
        return order[np.searchsorted(along, self.places, sorter=order)]

    def moved(self, values: Tensor, maps: Tensor) -> Tensor:
        """The parameter with its entries multiplied by ``maps``, (heads, width, width), in float64."""
        new = values.detach().double().movedim(self.at, 0).clone()
        places = torch.from_numpy(self.places).to(new.device)
        new[places] = torch.einsum("hij,hcj...->hci...", maps.to(new), new[places])
        return new.movedim(0, self.at)


@dataclass(frozen=True)
class Rotation:
    """A place for rotations: what they move, and what their transposed inverses move.

    Attributes:
        group: the name of the group of dimensions.
        first, second: the entries, those of a matrix before those of its bias.
        reads: whether the second are inputs of a matrix, as behind values; else they are outputs, as of keys.
    """

    group: str
    first: tuple[HeadEntries, ...]
    second: tuple[HeadEntries, ...]
    reads: bool

    def moved(self, tensors: Mapping[str, Tensor], first: Tensor, second: Tensor | None) -> dict[str, Tensor]:
        """New values, in float64; without the ``second`` maps of one side alone."""
        new: dict[str, Tensor] = {}
        for entries in self.first:
            new[entries.name] = entries.moved(new.get(entries.name, tensors[entries.name]), first)
        for entries in self.second if second is not None else ():
            assert second is not None
            new[entries.name] = entries.moved(new.get(entries.name, tensors[entries.name]), second)
        return new

    def at_random(self) -> tuple[Change, Change]:
        """A rotation by which a model would compute something else if it may not be there, and a half of it."""
        heads, _, width = self.first[0].places.shape
        draw = torch.Generator().manual_seed(width)
        first = torch.linalg.qr(torch.randn(heads, width, width, generator=draw, dtype=torch.float64, device="cpu")).Q
        first = first * (0.5 + torch.rand(heads, 1, width, generator=draw, dtype=torch.float64, device="cpu"))
        second = torch.linalg.inv(first).mT
        return partial(self.moved, first=first, second=second), partial(self.moved, first=first, second=None)


@dataclass(frozen=True)
class _Part:
    """A term of a dimension of a matrix: the entries, with a dimension of places for each axis, and of its bias."""

    axes: tuple[Axis, ...]
    entries: tuple[HeadEntries, ...]
    outputs: bool

    def slots(self, axes: Collection[Axis]) -> list[_Part]:
        """What lies side by side along other axes, as queries, keys and values of one matrix may, each by itself."""
        other = next((at for at, axis in enumerate(self.axes) if axis not in axes), None)
        if other is None:
            return [self]
        less = (*self.axes[:other], *self.axes[other + 1 :])
        return [
            slot
            for number in range(self.axes[other].size)
            for slot in _Part(
                less,
                tuple(replace(each, places=np.take(each.places, number, axis=other)) for each in self.entries),
                self.outputs,
            ).slots(axes)
        ]

    def ordered(self, *axes: Sequence[Axis]) -> tuple[HeadEntries, ...]:
        """With three dimensions of places: heads, copies, and what is rotated."""
        order = [self.axes.index(axis) for each in axes for axis in each]
        shape = [math.prod(axis.size for axis in each) for each in axes]
        return tuple(replace(each, places=each.places.transpose(order).reshape(shape)) for each in self.entries)


@dataclass(eq=False)
class _Pieces(Job):
    """The job of a walk that asks where matrices lie in parameters, and where their biases begin; nothing is summed."""

    names: Collection[str]
    words = ()
    changes = False
    found: dict[str, list[tuple[WeightView, tuple[str, int] | None]]] = field(default_factory=dict)

    @property
    def targets(self) -> Collection[str]:
        return self.names

    def solve_stage(
        self, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[WeightView, InputStats]
    ) -> tuple[Mapping[str, Solved], Pruned]:
        del module, stage
        for piece, met in found.items():
            bias = None if met.bias is None else (full_name(block, met.bias.name), met.bias.offset)
            self.found.setdefault(full_name(block, piece.name), []).append((piece, bias))
        return {}, Pruned(block)


_Ways = list[tuple[Rotation, ...]]  # of a group, what may be rotated together; what is likely, and much, comes first
_Role = tuple[Any, ...]  # of a group and its ways, in a model of any size


def _ways_in(coupling: Coupling, groups: Iterable[Group], host: Host) -> dict[str, tuple[_Role, _Ways]]:
    """How dimensions of these groups might be rotated: values, or queries and keys; by the names of groups. Of weights
    that several layers share there is nothing."""
    free = set(free_in(host.model, host.blocks))
    if isinstance(host, InFiles):
        free = {name for name in free if (known := host.files.group_of.get(name)) is not None and known.alone}
    terms = {
        group: [
            (name, at, *term)
            for name, at in group.members
            if len(coupling.dims(name)) == 2
            for term in coupling.terms(name, at)
            if group.axis in term[0]
        ]
        for group in groups
        if not (group.chosen or group.returned)
    }
    terms = {
        group: its
        for group, its in terms.items()
        if len(its) <= _MOST_PARTS and all(each[0] in free and len({*each[2]}) == len(each[2]) for each in its)
    }
    job = _Pieces({name for its in terms.values() for name, *_ in its})
    if job.targets:
        host.over(host.batches[:1]).walk(job)

    def part(name: str, at: int, axes: tuple[Axis, ...], places: npt.NDArray[np.int64]) -> _Part | None:
        own = HeadEntries(name, at, places)
        for piece, bias in job.found.get(name, ()):
            for outputs in (True, False):
                if (rows := own.within(piece, host.model.get_parameter(name), outputs=outputs)) is not None:
                    its = () if bias is None or not outputs else (HeadEntries(bias[0], 0, bias[1] + rows),)
                    return _Part(axes, (own, *its), outputs) if all(each.name in free for each in its) else None
        return None

    inner, found = {group.axis for group in coupling.groups}, {}
    for group, its in terms.items():
        parts = [each for each in itertools.starmap(part, its) if each is not None]
        if len(parts) == len(its) and (ways := _ways(group, parts, inner)):
            kinds = [
                [(each.reads, *(size > 1 for size in each.second[0].places.shape)) for each in way] for way in ways
            ]
            shapes = [(each.outputs, len(each.entries), len(each.axes)) for each in parts]
            found[group.name] = (layer_signature(coupling, group), str((kinds, shapes))), ways
    return found


def _right_ways(
    model: nn.Module, coupling: Coupling, ways: Mapping[str, _Ways], inputs: Sequence[Any]
) -> dict[str, int]:
    """Which way it is, of the groups that can be rotated: the first by which the model computes the same.

    Raises:
        IncomparableError: rounding alone changes what the model computes, so that nothing can be found.
    """
    right: dict[str, int] = {}
    left = [(name, 0) for name in ways]
    while left := [(name, at) for name, at in left if at < len(ways[name])]:
        changes = [tuple(zip(*(each.at_random() for each in ways[name][at]), strict=True)) for name, at in left]
        wrong = wrong_changes(model, coupling, changes, inputs)
        right |= dict(each for number, each in enumerate(left) if number not in wrong)
        left = [(name, at + 1) for name, at in map(left.__getitem__, wrong)]
    return right


def rotations_of(subject: PruningTarget, groups: Sequence[Group], host: Host) -> list[Rotation]:
    """Where dimensions of these groups can be rotated: not where something between is of each dimension by itself, as
    rotary positions are. Of a model in files a small one of its class says so, role by role.

    Raises:
        IncomparableError: nothing can be compared, or no model was small enough.
    """
    found = _ways_in(subject.coupling, groups, host)
    if isinstance(host, InMemory):
        its = {name: ways for name, (_, ways) in found.items()}
        right = on_rank_zero(lambda: _right_ways(host.model, subject.coupling, its, subject.inputs))
    elif found:
        roles = on_rank_zero(lambda: _right_roles(subject))
        right = {name: at for name, (role, _) in found.items() if (at := roles.get(role)) is not None}
    else:
        right = {}
    return [each for name, at in right.items() for each in found[name][1][at]]


def _right_roles(subject: PruningTarget) -> dict[_Role, int | None]:
    """Which way is right of each role in a small model of the class; None where that is not one for all its layers."""
    assert subject.configured is not None
    small = subject.configured.reduced(PROVED)
    if small is None:
        raise IncomparableError("no model of this class was small enough to look at it")
    model, inputs = subject.configured.build(small, "cpu"), subject.inputs[:1]
    coupling = find_coupling(model, inputs[0])
    with alone():
        found = _ways_in(coupling, coupling.groups, InMemory(model, inputs, forward=run_example))
    right = _right_ways(model, coupling, {name: ways for name, (_, ways) in found.items()}, inputs)
    roles: dict[_Role, int | None] = {}
    for name, (role, _) in found.items():
        roles[role] = right.get(name) if roles.setdefault(role, right.get(name)) == right.get(name) else None
    return roles


_MOST_PARTS = 4  # queries, keys, values and what reads them


def _ways(group: Group, parts: Sequence[_Part], free: Collection[Axis]) -> list[tuple[Rotation, ...]]:
    """Which rotations a group may have, by the axes of its parts; what is likely, and much, comes first."""
    (*reads,) = (each for each in parts if not each.outputs)
    (*makes,) = (each for each in parts if each.outputs)
    if len(reads) == 1:
        makes = [slot for each in makes for slot in each.slots(reads[0].axes)]
    pairs: list[list[tuple[_Part, _Part]]] = []
    if not reads and len(makes) == 2:
        pairs = [[(makes[0], makes[1])]]
    elif len(reads) == 1 and len(makes) == 1:
        pairs = [[(makes[0], reads[0])]]
    elif len(reads) == 1 and len(makes) == 3:  # one matrix may make all three, mostly values last
        for values in (2, 0, 1):
            queries, keys = (each for number, each in enumerate(makes) if number != values)
            pairs += [[(makes[values], reads[0]), (queries, keys)], [(makes[values], reads[0])]]
    return [way for each in pairs for way in itertools.product(*(_rotations(group, *pair, free) for pair in each))]


def _rotations(group: Group, first: _Part, second: _Part, free: Collection[Axis]) -> list[Rotation]:
    """The widest first: with the units may be rotated what of their heads stays, such as both entries of a pair."""
    if second.outputs and len(second.axes) < len(first.axes):
        first, second = second, first
    if not {*first.axes} <= {*second.axes}:
        return []
    copies = [axis for axis in second.axes if axis not in first.axes]
    unit = start = first.axes.index(group.axis)
    while start and first.axes[start - 1] not in free:
        start -= 1
    found = []
    for at in range(start if copies else max(start, 1), unit + 1):  # a single head is none: it may be any layer's width
        heads, rest = first.axes[:at], [axis for axis in first.axes[at:] if axis is not group.axis]
        sides = (heads, copies[:0], [group.axis, *rest]), (heads, copies, [group.axis, *rest])
        found.append(Rotation(group.name, first.ordered(*sides[0]), second.ordered(*sides[1]), not second.outputs))
    return found


@dataclass(eq=False)
class Rotating(Job):
    """The job of a walk over the dense model that solves rotations; ``maps`` has both sides' of each, by its number."""

    rotations: Sequence[Rotation]
    slopes: Mapping[WeightView, Tensor] = field(default_factory=dict)
    around = True
    changes = False
    by_the_first = True
    words = WORDS
    maps: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def targets(self) -> Collection[str]:
        return {side[0].name for each in self.rotations for side in (each.first, each.second)[each.reads :]}

    def solve_stage(
        self, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[WeightView, InputStats]
    ) -> tuple[Mapping[str, Solved], Pruned]:
        for number, each in enumerate(self.rotations):
            moments = [
                self._moments(block, module, stage, found, side[0], reads=each.reads)
                for side in ((each.second,) if each.reads else (each.first, each.second))
            ]
            known = [one for one in moments if one is not None]
            if len(known) < len(moments):
                continue
            pair = known[0]
            if not each.reads:  # a mean of keys moves all logits of a query alike; they have fewer heads, if one has
                keys = 0 if each.second[0].places.shape[1] > 1 else 1
                pair = known[0][keys == 0], known[1][keys == 1]
            self.maps[number] = maps_of(*pair)
        return {}, Pruned(block)

    def _moments(
        self,
        block: str,
        module: nn.Module,
        stage: Mapping[str, Tensor],
        found: Mapping[WeightView, InputStats],
        entries: HeadEntries,
        *,
        reads: bool,
    ) -> tuple[Tensor, Tensor] | None:
        """What data says of the entries of a matrix: of its inputs their second moments, and those of its columns; of
        its outputs their second moments, and the same around their means. None where nothing does."""
        for piece, met in found.items():
            if full_name(block, piece.name) != entries.name or met.whole is not None or not met.tokens:
                continue
            parameter = stage[piece.name]
            index = entries.within(piece, parameter, outputs=not reads)
            if index is None:
                continue
            matrix, at = piece.of(parameter).double(), torch.from_numpy(index).to(parameter.device)
            assert met.sums.gram is not None
            assert met.sums.totals is not None
            gram, mean = met.sums.gram.double() / met.tokens, met.sums.totals.double() / met.tokens
            if reads:
                columns = (
                    matrix * counts_of(matrix, met, slopes_of(self.slopes, piece, met, entries.name)).sqrt()[:, None]
                )
                return _among(gram, at), _among(self._finite(columns.mT @ columns, entries), at)
            bias = 0 if met.bias is None else met.bias.of(module.get_parameter(met.bias.name)).double()
            centered = self._finite(matrix @ (gram - mean.outer(mean)) @ matrix.mT, entries)
            given = matrix @ mean + bias
            return _among(centered + given.outer(given), at), _among(centered, at)
        return None

    def _finite(self, moment: Tensor, entries: HeadEntries) -> Tensor:
        if not bool(moment.isfinite().all()):
            raise ValueError(f"{entries.name}: the weight has entries that are NaN or infinite; correct it first.")
        return moment


def _among(moment: Tensor, at: Tensor) -> Tensor:
    """Of each head the moments of its entries, summed over its copies."""
    return moment[at[..., :, None], at[..., None, :]].sum(1)


def maps_of(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """``T`` and its inverse transposed of two second moments, of heads at once: (heads, width, width), float64.

    >>> x = torch.diag(torch.tensor([1.0, 9.0])).double()[None]
    >>> first, second = maps_of(x, torch.eye(2).double()[None])
    >>> first[0].abs().round(decimals=2).tolist(), bool(((first @ second.mT)[0] - torch.eye(2)).abs().max() < 1e-9)
    ([[0.0, 0.91], [1.58, 0.0]], True)
    """

    def regular(moment: Tensor) -> Tensor:
        mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        eye = torch.eye(moment.shape[-1], dtype=torch.float32, device="cpu").to(moment)
        return moment / torch.where(mean > 0, mean, 1) + _SMALL * eye

    size = first.diagonal(dim1=-2, dim2=-1).sum(-1)
    first, second = regular(first), regular(second)
    values, vectors = torch.linalg.eigh(first)
    values = values.clamp_min(_SMALL)[:, None]  # which rounding may have missed
    half, other = (vectors * values**power @ vectors.mT for power in (0.5, -0.5))
    found, along = torch.linalg.eigh(half @ second @ half)
    quarter, along = found.clamp_min(_SMALL**2).flip(-1)[:, :, None] ** 0.25, along.flip(-1).mT
    one, two = quarter * along @ other, along @ half / quarter
    left = (one @ first @ one.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
    by = torch.where(size > 0, first.diagonal(dim1=-2, dim2=-1).sum(-1) / left, 1).sqrt()[:, None, None]
    return one * by, two / by


class _Maps(NamedTuple):
    """Of a rotation both sides' maps, one entry after the other."""

    number: Annotated[int, Between(0)]
    first: npt.NDArray[np.float64]
    second: npt.NDArray[np.float64]

    def misfit(self, rotations: Sequence[Rotation]) -> str | None:
        """Why it is not of this model."""
        if self.number >= len(rotations):
            return f"names rotation {self.number} of {len(rotations)}"
        heads, _, width = rotations[self.number].first[0].places.shape
        fits = self.first.size == self.second.size == heads * width**2
        return None if fits else f"has of rotation {self.number} not {heads} maps of {width} dimensions"


@dataclass(frozen=True)
class Rotated:
    """What was rotated.

    Attributes:
        rotations, maps: each with both sides' maps.
        before: in memory the values of all that moved.
    """

    rotations: Sequence[Rotation]
    maps: Sequence[tuple[Tensor, Tensor]]
    before: Mapping[str, Tensor] = field(default_factory=dict)

    def names(self, groups: Collection[str]) -> list[str]:
        """The parameters that move if these groups are rotated."""
        its = [(*each.first, *each.second) for each in self.rotations if each.group in groups]
        return [*dict.fromkeys(entries.name for each in its for entries in each)]

    def moved(self, name: str, groups: Collection[str], values: Tensor) -> Tensor:
        """A parameter if these groups are rotated, and no others; rounded once."""
        new = values
        for each, maps in zip(self.rotations, self.maps, strict=True):
            for side, its in zip((each.first, each.second), maps, strict=True):
                for entries in side if each.group in groups else ():
                    new = entries.moved(new, its) if entries.name == name else new
        return new.to(values.dtype)

    def put(self, host: Host, groups: Collection[str]) -> None:
        """These groups are rotated, and no others: of a model in files when its weights are read."""
        if isinstance(host, InFiles):
            host.read_as({name: partial(self.moved, name, groups) for name in self.names(groups)})
            return
        values = on_rank_zero(lambda: {name: self.moved(name, groups, each) for name, each in self.before.items()})
        with host.prepared():
            host.change(values)


def rotate_heads(
    subject: PruningTarget, asked: Request, host: Host, undo: Undo | None = None, run: Run | None = None
) -> Rotated:
    """Rotates dimensions that may leave.

    Args:
        undo: takes it back, of a model in memory.
        run: notes the maps, of a model in files.

    Warns:
        RuntimeWarning: there is nothing to rotate.
    """
    groups, why = groups_in_scope(subject.scope, asked), "no dimensions inside heads may leave that can be rotated"
    rotations: list[Rotation] = []
    try:
        rotations = rotations_of(subject, groups, host)
    except IncomparableError as error:
        why = str(error)
    if not rotations:
        warn(f"nothing is rotated: {why}", RuntimeWarning)
        return Rotated([], [])

    def solve() -> list[_Maps]:
        slopes, _ = _slopes_in(host, {each.second[0].name for each in rotations if each.reads})
        job = Rotating(rotations, slopes)
        host.walk(job)
        found = on_rank_zero(lambda: job.maps)
        return [_Maps(at, *(each.flatten().numpy(force=True) for each in maps)) for at, maps in found.items()]

    def misfit(found: Sequence[_Maps]) -> str | None:
        return next(filter(None, (each.misfit(rotations) for each in found)), None)

    known = _stage(run, "rotated", list[_Maps], solve, misfit)
    its = [rotations[each.number] for each in known]
    shapes = [(heads, width, width) for heads, _, width in (each.first[0].places.shape for each in its)]
    maps = [
        (torch.from_numpy(each.first).reshape(shape), torch.from_numpy(each.second).reshape(shape))
        for each, shape in zip(known, shapes, strict=True)
    ]
    rotated = Rotated(its, maps)
    every = {each.group for each in its}
    if undo is not None:
        tensors = {name: host.model.get_parameter(name) for name in rotated.names(every)}
        rotated = replace(rotated, before=dict(zip(tensors, undo.values(*tensors.values()), strict=True)))
    rotated.put(host, every)
    return rotated
