"""Repaired weights and losses of each group at several counts, from one calibration run of the dense model. Ablation:
the loss of the model's outputs when one group loses units and the rest is repaired, a group at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.coupling import Coupling, Group, Scope
from secateur.models import InMemory, InputStats, Job, Pruned, Recall, Solved, WeightView, full_name, in_place
from secateur.shrinking.apply import carry_out, zero
from secateur.shrinking.costs import TiedGroups, by_tie
from secateur.shrinking.kinds.branches import OutputCosts
from secateur.shrinking.measure import (
    WORDS,
    Columns,
    Curve,
    Measured,
    Measuring,
    chunk_of,
    columns_of,
    counts_of,
    elimination_of,
    for_slopes,
    output_squares,
    rows_of_groups,
    slopes_of,
    whole_squares,
)
from secateur.shrinking.plan import plan_of
from secateur.shrinking.repair import DAMPING, Repairing, repaired, rescaled
from secateur.shrinking.request import PruningTarget, Request
from secateur.shrinking.select import FreeUnits, largest, select
from secateur.solvers import Elimination, eliminated
from secateur.support import Forward, Undo, track

# ---- Repaired weights and losses of each group at several counts, from one calibration run of the dense model.
#
# Law: nothing changes; of each group the units leave in one order, so that what left at a smaller share left at a
# larger one, and each count has the result of `shrink` with data where this group alone leaves.

SCATTERED = "its units are in several blocks, such as the width of a residual stream"


@dataclass(frozen=True)
class RepairedLevel:
    """A group with so many units left: which units stay, the repaired weights and the loss.

    Attributes:
        kept: which units stay.
        values: of the parameters that were repaired, whole: ``{name: tensor}``; columns that left are zeros.
        lost, whole: the squared error of the outputs of the group's consumers, and their squares before, without
            biases.
        loss: the model's loss to second order, a divergence per token; None where no slopes are known.
    """

    kept: npt.NDArray[np.bool_]
    values: Mapping[str, Tensor]
    lost: float
    whole: float
    loss: float | None


def counts_at(tied: TiedGroups, shares: Sequence[float]) -> list[tuple[float, int]]:
    """``[(share, parts that stay)]``: the nearest possible count to each share that leaves. A share that would remove
    nothing, or no more than a smaller one, is left out.

    >>> from secateur.coupling import Axis
    >>> axis = Axis(8)
    >>> counts_at(TiedGroups([Group("", axis, 8, (), 0, ())], None, {}), [0.01, 0.25, 0.5, 0.99])
    [(0.25, 6), (0.5, 4), (0.99, 1)]
    """
    choices = tied.choices()
    found: dict[int, float] = {}
    for share in sorted(shares):
        parts = int(choices[np.abs(choices - tied.parts * (1 - share)).argmin()])
        if parts < tied.parts:
            found.setdefault(parts, share)
    return [(share, parts) for parts, share in found.items()]


def gradable(
    subject: PruningTarget, asked: Request, parts: Mapping[str, nn.Module], shares: Sequence[float]
) -> tuple[list[TiedGroups], dict[str, str], Scope]:
    """The tied groups that may lose units, proved at the largest share; ``{group: why}`` of those that stay whole; and
    the scope, in which groups that fail a check are frozen."""
    homes = _homes(subject.model, parts)
    stays: dict[str, str] = {}

    def propose(free: FreeUnits) -> tuple[list[TiedGroups], dict[str, npt.NDArray[np.bool_]]]:
        tied: list[TiedGroups] = []
        for its in by_tie(free.scope.within(asked.include, asked.exclude).groups):
            those = [set[str | None]().union(*(homes[name] for name, _ in group.members)) for group in its]
            if any(len(home) > 1 or None in home for home in those):
                stays.update({group.name: SCATTERED for group in its})
            else:
                tied.append(TiedGroups(its, asked.round_to, free.minimum))
        found = {each: counts_at(each, shares) for each in tied}
        for few in [each for each in tied if not found[each]]:
            stays.update({group.name: "it has too few units for any of the shares" for group in few.groups})
            tied.remove(few)
        counts = {name: count for each in tied for name, count in each.counts(found[each][-1][1]).items()}
        return tied, {group.name: np.arange(group.size) < counts[group.name] for each in tied for group in each.groups}

    free, (tied, _) = select(
        FreeUnits(subject.scope),
        propose,
        lambda free, made: free.without_wrong(subject, [group for each in made[0] for group in each.groups], made[1]),
    )
    mine = {group.name for group in subject.scope.within(asked.include, asked.exclude).groups}
    return tied, {name: why for name, why in free.scope.reasons.items() if name in mine} | stays, free.scope


def _homes(model: nn.Module, parts: Mapping[str, nn.Module]) -> dict[str, set[str | None]]:
    """Of each tensor of a model the parts that hold it, also under other names; None for what lies outside."""
    part_of = {full_name(part, name): part for part, module in parts.items() for name in _tensors(module, twice=True)}
    found: dict[int, set[str | None]] = {}
    every = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for name, tensor in every.items():
        found.setdefault(id(tensor), set()).add(part_of.get(name))
    return {name: found[id(tensor)] for name, tensor in every.items()}


def _tensors(module: nn.Module, *, twice: bool = False) -> Collection[str]:
    named = (module.named_parameters(remove_duplicate=not twice), module.named_buffers(remove_duplicate=not twice))
    return {name for each in named for name, _ in each}


@dataclass(eq=False)
class _Consumer:
    """A matrix that multiplies a group's units, and what is known of it."""

    name: str
    parameter: Tensor
    piece: WeightView
    bias: tuple[str, Tensor] | None  # its name in the model, and what is added to this product's outputs
    met: InputStats
    layer: Elimination
    units: Columns
    slopes: Tensor | None
    moves: bool
    whole: float  # the squares of what its outputs were, but for biases


@dataclass(eq=False)
class Grading(Job):
    """The `Job` that grades groups in a walk over the dense model; see `secateur.models`.

    Attributes:
        groups: those that are graded.
        counts: how many units of each stay, descending.
        slopes: of the model's outputs along those of the consumers, as `slopes` gives them; where they are not known,
            ranks are by shares of variances.
        free: the matrices and biases that may move: `free_in`.
        on_group: called with each group once its block is done, and its grades.
        ungraded: ``{group: why}``.
        scores: of groups whose units are in order already, as `Measuring` ranks them; the others are put in order here.
    """

    coupling: Coupling
    groups: Sequence[Group]
    counts: Mapping[str, Sequence[int]]
    slopes: Mapping[WeightView, Tensor]
    free: Collection[str]
    on_group: Callable[[Group, Sequence[RepairedLevel]], None]
    damping: float = DAMPING
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    around = True
    changes = False
    words = WORDS
    ungraded: dict[str, str] = field(default_factory=dict)

    @property
    def targets(self) -> Collection[str]:
        return {name for group in self.groups for name, _ in group.members if len(self.coupling.dims(name)) > 1}

    def solve_stage(
        self, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[WeightView, InputStats]
    ) -> tuple[Mapping[str, Solved], Pruned]:
        inside = {full_name(block, name) for name in _tensors(module)}
        groups = [group for group in self.groups if all(name in inside for name, _ in group.members)]
        consumers: dict[str, list[_Consumer]] = {}
        producers: dict[str, list[tuple[Columns, Tensor, Tensor | None, int]]] = {}
        for piece, each in found.items():
            name = full_name(block, piece.name)
            if name not in self.targets or not each.tokens:
                continue
            parameter, slopes = stage[piece.name], slopes_of(self.slopes, piece, each, name)
            met = each
            if met.bias is not None and full_name(block, met.bias.name) not in self.free:
                met = replace(met, bias=None)  # something else holds it
            matrix = piece.of(parameter)
            for key, rows in rows_of_groups(self.coupling, groups, name, piece, parameter).items():
                if (energy := whole_squares(piece, parameter, found)) is not None:
                    producers.setdefault(key, []).append((rows, energy, slopes, met.tokens))
            columns = columns_of(self.coupling, groups, name, piece, parameter)
            if not columns:
                continue
            layer = elimination_of(name, matrix, met, slopes, damping=self.damping)
            whole = float(output_squares(matrix, met).sum())
            bias = None
            if met.bias is not None:
                bias = full_name(block, met.bias.name), module.get_parameter(met.bias.name)
            for key, units in columns.items():
                consumers.setdefault(key, []).append(
                    _Consumer(name, parameter, piece, bias, met, layer, units, slopes, name in self.free, whole)
                )
        for group in groups:
            if group.name in consumers:
                self.on_group(group, self._grades(group, consumers[group.name]))
            elif group.name in producers:
                self.on_group(group, self._by_producers(group, producers[group.name]))
            else:
                self.ungraded[group.name] = "no token met a product of its units"
        return {}, Pruned(block)

    def _grades(self, group: Group, consumers: Sequence[_Consumer]) -> list[RepairedLevel]:
        """Units leave in their order, and at each count what stays is repaired; a copy says which order that is."""
        counts = self.counts[group.name]
        if group.name in self.scores:
            order = self.scores[group.name].argsort().tolist()
        else:
            copies = [(each.layer.copy(), each.units) for each in consumers]
            order, _ = eliminated(copies, counts[-1], chunk_of(group.size))
        layers = [each.layer.copy() for each in consumers]
        kept = np.ones(group.size, dtype=bool)
        found: list[RepairedLevel] = []
        for count in counts:
            leaving = [unit for unit in order[: group.size - count] if kept[unit]]
            kept[leaving] = False
            values: dict[str, Tensor] = {}
            lost, whole, loss = 0.0, 0.0, 0.0
            for each, layer in zip(consumers, layers, strict=True):
                layer.leave([column for unit in leaving for column in each.units[unit]])
                more = _repair(each, layer, kept, values)
                lost, whole, loss = lost + more[0], whole + each.whole, loss + more[1]
            known = all(each.slopes is not None for each in consumers)
            found.append(RepairedLevel(kept.copy(), values, lost, whole, loss if known else None))
        return found

    def _by_producers(
        self, group: Group, producers: Sequence[tuple[Columns, Tensor, Tensor | None, int]]
    ) -> list[RepairedLevel]:
        """Grades units that no matrix multiplies, such as the width of queries and keys. There is no repair; the units
        whose outputs have the least loss leave first, or without slopes those whose product is least."""
        units, losses, product, whole = np.zeros(group.size), np.zeros(group.size), np.ones(group.size), 0.0
        known = all(slopes is not None for _, _, slopes, _ in producers)
        for rows, energy, slopes, tokens in producers:
            counts = slopes.double() / (2 * tokens) if slopes is not None else torch.ones_like(energy)
            weighed = (energy * counts.to(energy)).cpu().numpy()
            own = np.array([float(energy[its].sum()) for its in rows])
            units, product = units + own, product * own / max(float(energy.sum()), 1e-300)
            losses += [weighed[its].sum() for its in rows]
            whole += float(energy.sum())
        order = np.argsort(losses if known else product, kind="stable")
        found = []
        for count in self.counts[group.name]:
            gone = order[: group.size - count]
            kept = np.ones(group.size, dtype=bool)
            kept[gone] = False
            loss = float(losses[gone].sum()) if known else None
            found.append(RepairedLevel(kept, {}, float(units[gone].sum()), whole, loss))
        return found


def _repair(
    each: _Consumer, layer: Elimination, kept: npt.NDArray[np.bool_], values: dict[str, Tensor]
) -> tuple[float, float]:
    """Puts new values of a consumer and its bias into ``values``; returns its outputs' squared error and the loss."""
    matrix, met = each.piece.of(each.parameter), each.met
    gone = np.zeros(each.piece.shape[1], dtype=bool)
    gone[[column for unit in np.flatnonzero(~kept) for column in each.units[unit]]] = True
    mask = torch.from_numpy(~gone).to(matrix.device)
    bias = None  # as blocks of inputs before this one have moved it
    if each.bias is not None and met.bias is not None:
        bias = met.bias.of(values.get(*each.bias))
    found, moved, lost = repaired(matrix, bias, layer, met, mask, moves=each.moves)
    new = values.setdefault(each.name, each.parameter.detach().clone())
    each.piece.of(new).copy_(found[:, : each.piece.shape[1]])
    if moved is not None and each.bias is not None and met.bias is not None:
        met.bias.of(values.setdefault(each.bias[0], each.bias[1].detach().clone())).copy_(moved)
    counts = None if each.slopes is None else counts_of(matrix, met, each.slopes).to(lost)
    return float(lost.sum()), 0.0 if counts is None else float((lost * counts).sum())


# Ablation: the loss of the model's outputs when one group loses units and the rest is repaired, a group at a time.
#
# Law: the model is left as it was; where so many units were tried, a loss is what was measured there. Between them
# the curve that data gave keeps its form.
#
# Where no slopes say what an error within a model is worth to its outputs, shares of variances of different groups do
# not compare: of a small vision transformer an equal share costs forty times as much in one group as in another.

SHARES = (0.25, 0.5, 0.75)  # of a group's units that leave
_ROWS = 256  # of outputs that are compared
_LEAST = 1e-9  # a divergence of outputs: less is rounding


@dataclass(eq=False)
class GroupAblation(Job):
    """The `Job` that measures units and keeps the repaired consumers of each group without some of its units;
    `tried` then runs the model with these.

    Args:
        measuring: the job that measures.
        free: the matrices and biases that may move: `free_in`.
        round_to: counts are multiples of it, as in `TiedGroups`.
    """

    measuring: Measuring
    free: Collection[str]
    round_to: int | None = None
    around = True
    changes = False
    ties: dict[TiedGroups, list[int]] = field(default_factory=dict)  # and of how many parts each is tried
    _grades: dict[str, Sequence[RepairedLevel]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for its in by_tie(self.measuring.groups):
            if not any(name in self.measuring.shared for group in its for name, _ in group.members):
                tied = TiedGroups(its, self.round_to, {})
                self.ties[tied] = [parts for _, parts in counts_at(tied, SHARES)]
        counts = {
            key: [each.counts(parts)[key] for parts in tried]
            for each, tried in self.ties.items()
            if tried
            for key in each.counts(each.parts)
        }
        groups = [group for group in self.measuring.groups if group.name in counts]
        ranked = self.measuring.ranked
        self._grading = Grading(self.coupling, groups, counts, {}, self.free, self._keep, scores=ranked)

    def _keep(self, group: Group, grades: Sequence[RepairedLevel]) -> None:
        self._grades[group.name] = grades

    @property
    def coupling(self) -> Coupling:
        return self.measuring.coupling

    @property
    def targets(self) -> Collection[str]:
        return self.measuring.targets

    @property
    def words(self) -> Collection[str]:
        return {*self.measuring.words, *self._grading.words}

    def solve_stage(
        self, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[WeightView, InputStats]
    ) -> tuple[Mapping[str, Solved], Pruned]:
        done = self.measuring.solve_stage(block, module, stage, found)
        self._grading.solve_stage(block, module, stage, found)  # in the order that is measured now
        return done

    def tried(
        self, model: nn.Module, measured: Measured, batches: Sequence[Any], forward: Forward | None = None
    ) -> Measured:
        """The measurements, with curves that are divergences of the model's outputs: a run of a few batches for each
        count. Units that several blocks hold, as of a residual stream, leave in a walk over these batches.

        A tie that can't be tried counts as the median of the others; where no outputs move, all is as it was.
        """
        costs = OutputCosts(model, batches, forward, enough=_ROWS, at_most=_ROWS)
        few = for_slopes(batches)
        recall = Recall(costs.model)
        with recall.opening(coarse=True):
            costs.unexplained(lambda batch: recall.passing(id(batch), batch))  # as the dense model runs
        ratios: dict[TiedGroups, list[tuple[int, float]]] = {}
        moved = False
        for each, counts in track(list(self.ties.items()), "trying groups"):
            names = [group.name for group in each.groups if group.name in measured.curves]
            for at, parts in enumerate(counts):
                said = sum(measured.curves[name](each.counts(parts)[name]) for name in names)
                if said <= 0:
                    continue
                if all(name in self._grades for name in names):
                    found = self._in_place(costs.model, costs, recall, names, at)
                else:
                    found = self._walked(model, costs, each, parts, measured, few, forward)
                moved = moved or _LEAST < found < math.inf
                if math.isfinite(found):
                    ratios.setdefault(each, []).append((parts, max(found, _LEAST) / said))
        every = [math.log(ratio) for its in ratios.values() for _, ratio in its]
        if not moved:
            return measured
        middle = float(np.median(every))
        curves: dict[str, Curve] = {}
        for its in by_tie(self.measuring.groups):
            known = next((found for each, found in ratios.items() if each.groups[0].tied == its[0].tied), None)
            for group in its:
                if group.name in measured.curves:
                    shares = [(0.0, middle)] if known is None else _shares(known, its)
                    curves[group.name] = _scaled(measured.curves[group.name], group.size, shares)
        return replace(measured, curves={**measured.curves, **curves}, tried=True)

    def _in_place(self, model: nn.Module, costs: OutputCosts, recall: Recall, names: Sequence[str], at: int) -> float:
        """With the values that the grades of these groups hold; what lies before them is not computed again."""
        grades = {name: self._grades[name][at] for name in names}
        own = dict(model.named_parameters())
        changes: dict[str, Tensor] = {}
        with torch.no_grad():
            for grade in grades.values():
                for name, values in grade.values.items():
                    dense = own[name].detach()
                    changes[name] = values if name not in changes else changes[name] + (values - dense)
            for group in self.measuring.groups:
                if group.name in grades and not grades[group.name].values:  # nothing multiplies it: it is just not made
                    self._silence(group, own, grades[group.name], changes)
        opened = [own[name] for name in changes]
        with recall.opening(opened, keeps=False), in_place(model, changes):
            return costs.unexplained(lambda batch: recall.passing(id(batch), batch))

    def _silence(
        self, group: Group, own: Mapping[str, Tensor], grade: RepairedLevel, changes: dict[str, Tensor]
    ) -> None:
        for name, at in group.members:
            if name in own:
                index = self.coupling.indices(group, name, at)
                gone = (index >= 0) & ~grade.kept[np.maximum(index, 0)]
                values = changes[name].clone() if name in changes else own[name].detach().clone()
                zero(values, at, torch.from_numpy(gone))
                changes[name] = values

    def _walked(
        self,
        model: nn.Module,
        costs: OutputCosts,
        tied: TiedGroups,
        parts: int,
        measured: Measured,
        batches: Sequence[Any],
        forward: Forward | None,
    ) -> float:
        """With so many parts of units that lie in several blocks, which a walk repairs one after the other; infinite
        where the model does not run so."""
        counts = tied.counts(parts)
        groups = [group for group in tied.groups if group.name in measured.scores]
        kept = largest(measured.scores, {group.name: counts[group.name] for group in groups})
        job = Repairing(self.coupling, groups, kept, measured, self.free)
        with Undo() as undo:
            undo.values(*model.parameters())
            try:
                host = InMemory(model, batches, forward=forward)
                host.walk(job)
                plan = plan_of(model, self.coupling, job.kept)
                host.change(rescaled(host, plan))
                undo.call(carry_out(model, plan, None))
                found = costs.unexplained()
            except (ValueError, RuntimeError, TypeError, IndexError):  # the proof says why, if they are to leave
                found = math.inf
            undo.roll_back()
        return found


def _shares(known: Sequence[tuple[int, float]], its: Sequence[Group]) -> list[tuple[float, float]]:
    """``(share that stays, logarithm of the ratio)``, ascending."""
    whole = math.gcd(*(group.size for group in its))
    return sorted((parts / whole, math.log(ratio)) for parts, ratio in known)


def _scaled(curve: Curve, size: int, ratios: Sequence[tuple[float, float]]) -> Curve:
    """The curve times the measured ratio at each share, interpolated in the logarithm; fewer units never lose less."""
    at, logs = zip(*ratios, strict=True)
    counts = np.union1d(curve.counts, np.round(np.array(at) * size).astype(np.int64))
    losses = np.interp(counts, curve.counts, curve.losses) * np.exp(np.interp(counts / size, at, logs))
    return Curve(counts, np.maximum.accumulate(losses[::-1])[::-1])
