"""Dynamic programming: one level of each group, such that the errors sum to the least and the costs fit the budget.

Law: the costs of what is chosen never sum to more than the budget; on whole numbers that fit the table the choice is
the best there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["least_errors"]

BUCKETS = 1 << 14  # of the budget, in which costs are counted; SPDY has 10,000


def least_errors(
    errors: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float, *, buckets: int = BUCKETS
) -> list[int] | None:
    """``argmin sum(errors[g][choice[g]])  with  sum(costs[g][choice[g]]) <= budget``, by dynamic programming over what
    is spent, as SPDY (Frantar & Alistarh 2022, arXiv:2201.13096) and ZipLM (Kurtić et al. 2023, arXiv:2302.04089) do.

    What a group costs at least is spent in any case. The rest of the budget is cut into ``buckets``, and costs are
    rounded up to whole ones; where costs are whole numbers and there are not more of them than buckets, nothing is
    rounded. What rounding left over is spent in the end, level by level, where it saves the most error. Of equal
    errors the first level of a group is taken.

    Args:
        errors, costs: of each group its levels'; an infinite error is a level that is not to be chosen.
        budget: the most that may be spent.
        buckets: more are finer, and take longer in proportion.

    Returns:
        The number of the level of each group; None where not even the cheapest levels are cheap enough.

    Raises:
        ValueError: a group without levels, not as many errors as costs, or a number that is NaN.

    >>> least_errors([[0, 1, 5], [0, 2, 3]], [[10, 6, 2], [10, 6, 2]], 12)
    [1, 1]
    >>> least_errors([[0, 9]], [[10, 6]], 5) is None
    True
    """
    tables = [(_array(each), _array(its)) for each, its in zip(errors, costs, strict=True)]
    for at, (error, cost) in enumerate(tables):
        if error.shape != cost.shape or error.ndim != 1 or not len(error):
            raise ValueError(f"group {at} has {error.size} errors and {cost.size} costs; a level has one of each.")
        if np.isnan(error).any() or not np.isfinite(cost).all():
            raise ValueError(f"group {at}: an error is NaN, or a cost is not finite.")
    cheapest = [int(np.lexsort((np.arange(len(error)), error, cost))[0]) for error, cost in tables]
    spent = math.fsum(cost[at] for (_, cost), at in zip(tables, cheapest, strict=True))
    room = budget - spent
    if room < 0 or math.isnan(room):
        return None
    extra = [cost - cost[at] for (_, cost), at in zip(tables, cheapest, strict=True)]
    wanted = math.fsum(each.max() for each in extra)
    if not wanted:
        room = 0.0
    unit = _unit(extra, min(room, wanted), buckets)
    size = min(buckets, math.floor(min(room, wanted) / unit)) if unit else 0
    best = np.zeros(size + 1)  # the least error for so many buckets
    taken: list[npt.NDArray[np.int32]] = []
    steps = [np.ceil(each / unit) if unit else np.where(each > 0, size + 1, 0) for each in extra]
    for (error, _), step in zip(tables, steps, strict=True):
        found, which = np.full(size + 1, math.inf), np.full(size + 1, -1, dtype=np.int32)
        for level, buckets_of in enumerate(step):
            if buckets_of > size:
                continue
            at = int(buckets_of)
            sums = best[: size + 1 - at] + error[level]
            better = sums < found[at:]
            found[at:][better], which[at:][better] = sums[better], level
        best = found
        taken.append(which)
    choice, left = [], size
    for which, step, first in zip(reversed(taken), reversed(steps), reversed(cheapest), strict=True):
        level = int(which[left])
        level = first if level < 0 else level  # no error is finite
        choice.append(level)
        left -= int(step[level])
    return _spend(choice[::-1], tables, budget)


def _array(values: Sequence[float]) -> npt.NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


def _unit(extra: Sequence[npt.NDArray[np.float64]], room: float, buckets: int) -> float:
    """What a bucket holds: of whole numbers their divisor, if that makes few enough."""
    every = np.concatenate(extra) if extra else np.zeros(0)
    if len(every) and (every == np.floor(every)).all() and every.max() < 2**53:
        divisor = float(np.gcd.reduce(every.astype(np.int64)))
        if divisor and room / divisor <= buckets:
            return divisor
    return room / buckets * (1 + 1e-12)  # sums of rounded numbers stay below


def _spend(
    choice: list[int], tables: Sequence[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]], budget: float
) -> list[int]:
    """What is left over goes where it saves the most error, one level after the other."""
    while True:
        spent = math.fsum(cost[at] for (_, cost), at in zip(tables, choice, strict=True))
        best: tuple[float, int, int] | None = None
        for group, ((error, cost), at) in enumerate(zip(tables, choice, strict=True)):
            for level in np.flatnonzero(error < error[at]):
                if spent - cost[at] + cost[level] <= budget:
                    saved = (float(error[level] - error[at]), group, int(level))
                    best = saved if best is None or saved < best else best
        if best is None:
            return choice
        choice[best[1]] = best[2]
