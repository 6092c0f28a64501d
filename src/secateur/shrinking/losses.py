"""What it costs a model that a tie keeps fewer of its parts, where no data says it.

Law: by it all groups lose the same share of their units; those around others, as heads, only when these have nothing
left to give, and the width of a residual stream last of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from secateur.coupling import Axis, Coupling, Expression, Group, Product, resolved
from secateur.shrinking.amounts import Amount
from secateur.shrinking.ties import Tied

__all__ = ["Loss", "even", "late"]

Loss = Callable[[Tied, int], float]  # when so many of its parts stay: 0 of all, and never less of fewer

AROUND, STREAM = 0.5, 1.0  # when all others have lost half, and all


def even(amount: Amount, tied: Sequence[Tied], behind: Mapping[int, float] = {}) -> Loss:
    """``∫ (behind + share that left) d(what that saves)``: what a group saves by its next unit costs its share.

    So the groups that are behind by 0 lose equal shares, whatever a unit of them costs, and one that is behind by b
    loses what the others do less b.
    """
    curves = {}
    whole = [each.parts for each in tied]
    for at, each in enumerate(tied):
        choices = each.choices()
        saved = -amount.changes(whole, at, choices)
        left = behind.get(each.groups[0].tied, 0.0) + 1 - choices / each.parts
        losses = np.concatenate([[0.0], np.cumsum((left[1:] + left[:-1]) / 2 * np.diff(saved))])
        curves[each] = choices[::-1], losses[::-1]
    return lambda each, parts: float(np.interp(parts, *curves[each]))


def late(coupling: Coupling, groups: Sequence[Group]) -> dict[int, float]:
    """By how much ties are behind: ``{number of the tie: by how much}``."""
    return dict.fromkeys(_around(coupling, groups), AROUND) | dict.fromkeys(_streams(coupling, groups), STREAM)


def _around(coupling: Coupling, groups: Sequence[Group]) -> set[int]:
    """Which groups have, wherever they are rows, others within them: heads around the widths of heads.

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
    """Which groups are the width of a residual stream: in what a branch holds, and in what others hold, too."""
    insides = [{*branch.parameters} for branch in coupling.branches]
    found = set()
    for group in groups:
        names = {name for name, _ in group.members}
        if any(names & inside and names - inside for inside in insides):
            found.add(group.tied)
    return found
