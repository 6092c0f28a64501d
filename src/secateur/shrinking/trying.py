"""Ablation: the loss of the model's outputs when one group loses units and the rest is repaired, a group at a time.

Law: the model is left as it was; where so many units were tried, a loss is what was measured there. Between them the
curve that data gave keeps its form.

Where no slopes say what an error within a model is worth to its outputs, shares of variances of different groups do not
compare: of a small vision transformer an equal share costs forty times as much in one group as in another.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.blockwise import Met, Piece, Pruned, Solved, walk_model
from secateur.coupling import Axis, Coupling, Group
from secateur.selection import keep_largest
from secateur.shrinking.execution import carry_out, zero
from secateur.shrinking.grading import Grade, Grading, counts_at
from secateur.shrinking.measuring import Curve, Measured, Measuring, for_slopes
from secateur.shrinking.output_costs import OutputCosts
from secateur.shrinking.plan import plan_of
from secateur.shrinking.repairing import Repairing
from secateur.shrinking.rescaling import rescale
from secateur.shrinking.ties import Tied, by_tie
from secateur.support import Forward, Undo, track

__all__ = ["Trying"]

SHARES = (0.25, 0.5, 0.75)  # of a group's units that leave
_ROWS = 256  # of outputs that are compared
_LEAST = 1e-9  # a divergence of outputs: less is rounding


@dataclass(eq=False)
class Trying:
    """The `Job` that measures units and keeps the repaired consumers of each group without some of its units;
    `tried` then runs the model with these.

    Args:
        measuring: the job that measures.
        free: the matrices and biases that may move: `free_in`.
        round_to: counts are multiples of it, as in `Tied`.
    """

    measuring: Measuring
    free: Collection[str]
    round_to: int | None = None
    in_stages: bool = False
    beside_dense: bool = False
    around: bool = True
    changes: bool = False
    ties: dict[Tied, list[int]] = field(default_factory=dict)  # and of how many parts each is tried
    _grades: dict[Axis, Sequence[Grade]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for its in by_tie(self.measuring.groups):
            if not any(name in self.measuring.shared for group in its for name, _ in group.members):
                tied = Tied(its, self.round_to, {})
                self.ties[tied] = [parts for _, parts in counts_at(tied, SHARES)]
        counts = {
            axis: [each.counts(parts)[axis] for parts in tried]
            for each, tried in self.ties.items()
            if tried
            for axis in each.counts(each.parts)
        }
        groups = [group for group in self.measuring.groups if group.axis in counts]
        self._grading = Grading(self.coupling, groups, counts, {}, self.free, self._keep)

    def _keep(self, group: Group, grades: Sequence[Grade]) -> None:
        self._grades[group.axis] = grades

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
        self, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[Piece, Met]
    ) -> tuple[Mapping[str, Solved], Pruned]:
        self._grading.solve_stage(block, module, stage, found)
        return self.measuring.solve_stage(block, module, stage, found)

    def tried(
        self, model: nn.Module, measured: Measured, batches: Sequence[Any], forward: Forward | None = None
    ) -> Measured:
        """The measurements, with curves that are divergences of the model's outputs: a run of a few batches for each
        count. Units that several blocks hold, as of a residual stream, leave in a walk over these batches.

        A tie that can't be tried counts as the median of the others; where no outputs move, all is as it was.
        """
        costs = OutputCosts(model, batches, forward, enough=_ROWS, at_most=_ROWS)
        few = for_slopes(batches)
        ratios: dict[Tied, list[tuple[int, float]]] = {}
        moved = False
        for each, counts in track(list(self.ties.items()), "trying groups"):
            axes = [group.axis for group in each.groups if group.axis in measured.curves]
            for at, parts in enumerate(counts):
                said = sum(measured.curves[axis](each.counts(parts)[axis]) for axis in axes)
                if said <= 0:
                    continue
                if all(axis in self._grades for axis in axes):
                    found = self._in_place(model, costs, axes, at)
                else:
                    found = self._walked(model, costs, each, parts, measured, few, forward)
                moved = moved or _LEAST < found < math.inf
                if math.isfinite(found):
                    ratios.setdefault(each, []).append((parts, max(found, _LEAST) / said))
        every = [math.log(ratio) for its in ratios.values() for _, ratio in its]
        if not moved:
            return measured
        middle = float(np.median(every))
        curves: dict[Axis, Curve] = {}
        for its in by_tie(self.measuring.groups):
            known = next((found for each, found in ratios.items() if each.groups[0].tied == its[0].tied), None)
            for group in its:
                if group.axis in measured.curves:
                    shares = [(0.0, middle)] if known is None else _shares(known, its)
                    curves[group.axis] = _scaled(measured.curves[group.axis], group.size, shares)
        return replace(measured, curves={**measured.curves, **curves}, tried=True)

    def _in_place(self, model: nn.Module, costs: OutputCosts, axes: Sequence[Axis], at: int) -> float:
        """With the values that the grades of these groups hold."""
        grades = {axis: self._grades[axis][at] for axis in axes}
        own = dict(model.named_parameters())
        with Undo() as undo, torch.no_grad():
            changes: dict[str, Tensor] = {}
            for grade in grades.values():
                for name, values in grade.values.items():
                    dense = own[name].detach()
                    changes[name] = values if name not in changes else changes[name] + (values - dense)
            undo.values(*(own[name] for name in changes))
            for name, values in changes.items():
                own[name].copy_(values)
            for group in self.measuring.groups:
                if group.axis in grades and not grades[group.axis].values:  # nothing multiplies it: it is just not made
                    undo.values(*(own[name] for name, _ in group.members if name in own))
                    self._silence(group, own, grades[group.axis])
            found = costs.unexplained()
            undo.roll_back()
        return found

    def _silence(self, group: Group, own: Mapping[str, Tensor], grade: Grade) -> None:
        for name, at in group.members:
            if name in own:
                index = self.coupling.indices(group, name, at)
                gone = (index >= 0) & ~grade.kept[np.maximum(index, 0)]
                zero(own[name], at, torch.from_numpy(gone))

    def _walked(
        self,
        model: nn.Module,
        costs: OutputCosts,
        tied: Tied,
        parts: int,
        measured: Measured,
        batches: Sequence[Any],
        forward: Forward | None,
    ) -> float:
        """With so many parts of units that lie in several blocks, which a walk repairs one after the other; infinite
        where the model does not run so."""
        counts = tied.counts(parts)
        groups = [group for group in tied.groups if group.axis in measured.scores]
        kept = {
            group.axis: keep_largest(measured.scores[group.axis].reshape(1, -1), counts[group.axis])[0].numpy()
            for group in groups
        }
        job = Repairing(self.coupling, groups, kept, measured, self.free)
        with Undo() as undo:
            undo.values(*model.parameters())
            try:
                walk_model(model, batches, job, forward=forward)
                plan = plan_of(model, self.coupling, job.kept)
                rescale(model, plan, batches, forward=forward)
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
