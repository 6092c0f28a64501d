"""The default loss curve of tied groups when there is no calibration data.

Law: all groups lose the same share of their units, but the width of a residual stream begins when the others have lost
half, and groups around others, such as heads, when those are used up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from secateur.coupling import Axis, Coupling, Expression, Group, Product, resolved
from secateur.shrinking.amounts import Amount
from secateur.shrinking.ties import Tied

__all__ = ["Loss", "even", "late", "ties_around"]

Loss = Callable[[Tied, int], float]  # when so many of the parts stay that it can keep: 0 of all, of fewer no less

# by how much of their share others are ahead; of 0, 0.5 and 2 for streams 0.5 was right most often over two networks
# (`benchmarks/shrinking/RESULTS.md`)
AROUND, STREAM = 1.0, 0.5


def even(amount: Amount, tied: Sequence[Tied], behind: Mapping[int, float] | None = None) -> Loss:
    """``∫ (behind + share that left) d(what that saves)``: what a group saves by its next unit costs its share.

    So the groups that are behind by 0 lose equal shares, whatever a unit of them costs, and one that is behind by b
    loses what the others do less b.
    """
    curves: dict[Tied, dict[int, float]] = {}
    whole = [each.parts for each in tied]
    for at, each in enumerate(tied):
        choices = each.choices()
        saved = -amount.changes(whole, at, choices)
        left = (behind or {}).get(each.groups[0].tied, 0.0) + 1 - choices / each.parts
        losses = np.concatenate([[0.0], np.cumsum((left[1:] + left[:-1]) / 2 * np.diff(saved))])
        curves[each] = dict(zip(choices.tolist(), losses.tolist(), strict=True))
    return lambda each, parts: curves[each][parts]


def late(coupling: Coupling, groups: Sequence[Group]) -> dict[int, float]:
    """The ties that lose units later than others: ``{number of the tie: by which share}``."""
    return dict.fromkeys(_streams(coupling, groups), STREAM) | dict.fromkeys(ties_around(coupling, groups), AROUND)


def ties_around(coupling: Coupling, groups: Sequence[Group]) -> set[int]:
    """Groups that contain other groups wherever they are rows, such as heads around the widths of heads.

    Both at one share would take its square; and of a small vision transformer at equal multiply-adds, what is left
    with all heads was right more often (`benchmarks/shrinking/RESULTS.md`).
    """
    alone: set[Axis] = set()
    around: set[Axis] = set()

    def look(expression: Expression, *, within: bool) -> None:
        dim = resolved(expression)
        if isinstance(dim, Axis):
            (around if within else alone).add(dim)
        elif isinstance(dim, Product):
            for at, factor in enumerate(dim.factors):
                look(factor, within=within or at + 1 < len(dim.factors))
        else:
            for segment in dim.segments:
                look(segment, within=within)

    for group in groups:
        for name, at in group.members:
            if at == 0 and len(coupling.dims(name)) > 1:
                look(coupling.dims(name)[at], within=False)
    return {group.tied for group in groups if group.axis in around} - {
        group.tied for group in groups if group.axis in alone
    }


def _streams(coupling: Coupling, groups: Sequence[Group]) -> set[int]:
    """Which groups are the width of a residual stream: a branch reads and writes it, and matrices of others have it."""
    insides = [{*branch.parameters} for branch in coupling.branches]
    found = set()
    for group in groups:
        matrices = [(name, at) for name, at in group.members if len(coupling.dims(name)) > 1]
        for inside in insides:
            sides = {at for name, at in matrices if name in inside}
            if len(sides) > 1 and any(name not in inside for name, _ in matrices):
                found.add(group.tied)
    return found
