"""Dynamic programming: one level of each group, such that the errors sum to the least and the costs fit the budget. The
space of choices: classes of groups that share a level, the cost of each choice, and which fit the limits. The fixed
allocations as choices of levels: a search starts from them and is compared with them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur import allocation
from secateur.patterns import Unstructured
from secateur.search.costs import TARGETS, CostModel, holds
from secateur.search.levels import Levels
from secateur.search.search import Choice

# Dynamic programming: one level of each group, such that the errors sum to the least and the costs fit the budget.
#
# Law: the costs of what is chosen never sum to more than the budget; on whole numbers that fit the table the choice
# is the best there is.

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


# The space of choices: classes of groups that share a level, the cost of each choice, and which fit the limits.
#
# Law: a choice that fits costs no more than any limit, by the costs of the model that it comes to; latencies are
# those that were predicted.

_TIGHTER = 24  # times that the sum of what groups cost is held to less, until what the model costs fits
_BISECTIONS = 9


@dataclass(frozen=True)
class Class:
    """Groups that go to a level together: of each of the class' levels the level of each group."""

    names: tuple[str, ...]
    levels: tuple[tuple[int, ...], ...]


@dataclass
class Predicted:
    """Milliseconds of the model.

    Attributes:
        dense: of the dense one, measured.
        saved: ``{group: what each of its levels saves}``, by the table.
        factor: what a millisecond of the table saves in the whole model, as far as that was measured.
        sure: likewise, what fewer bits save; that is of the whole model already, and has no factor.
    """

    dense: float
    saved: Mapping[str, Sequence[float]]
    factor: float = 1.0
    sure: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def by_table(self, choice: Mapping[str, int]) -> float:
        """What a choice saves by the table."""
        return math.fsum(self.saved[name][at] for name, at in choice.items() if name in self.saved)

    def surely(self, choice: Mapping[str, int]) -> float:
        """What its bits save."""
        return math.fsum(self.sure[name][at] for name, at in choice.items() if name in self.sure)

    def own(self, name: str, at: int) -> float:
        """What a level of a group saves."""
        return self.factor * self.by_table({name: at}) + self.surely({name: at})

    def of(self, choice: Mapping[str, int]) -> float:
        """Of the model at a choice."""
        return self.dense - self.surely(choice) - self.factor * self.by_table(choice)


def _bent(share: float, amount: float) -> float:
    """Nothing at 0, the share at a half, all at 1; in between straight.

    >>> _bent(0.3, 0.0), _bent(0.3, 0.5), _bent(0.3, 1.0)
    (0.0, 0.3, 1.0)
    """
    return share * 2 * amount if amount <= 0.5 else share + (1 - share) * (2 * amount - 1)


def classes_of(levels: Levels, tied: Iterable[Iterable[str]]) -> list[Class]:
    """A class for each set of groups that keep the same share, in the order of the levels; of their levels those that
    all have. A group that is in no set stays dense.

    >>> classes_of({}, [])
    []
    """
    found = []
    order = {name: at for at, name in enumerate(levels)}
    for names in sorted((sorted(each, key=order.__getitem__) for each in tied), key=lambda each: order[each[0]]):
        ladders = [{_share(levels, name, at): at for at in range(len(levels[name]))} for name in names]
        shares = sorted(set.intersection(*map(set, ladders)))
        found.append(Class(tuple(names), tuple(tuple(ladder[share] for ladder in ladders) for share in shares)))
    return found


def _share(levels: Levels, name: str, at: int) -> float:
    level = levels[name][at]
    return round(1 - level.kept / level.of, 9) if level.of else 0.0


@dataclass
class Space:
    """The choices of a model's levels.

    A choice has a number for each class, of its level; 0 is dense.

    Attributes:
        levels, classes: what can be chosen.
        predicted: latencies, where they are asked for.
        beside: what levels say nothing of, where it is asked for; see `secateur.search.costs.BESIDE`.
        possible: whether there is a model of such a choice of groups.
        curves: of each class what the model loses at each level, where that was measured; it goes before what the
            levels say.
    """

    levels: Levels
    classes: Sequence[Class]
    predicted: Predicted | None = None
    possible: Callable[[Mapping[str, int]], bool] | None = None
    curves: Sequence[Sequence[float]] | None = None
    beside: CostModel | None = None
    _costs: dict[tuple[Choice, str], float] = field(default_factory=dict)
    _possible: dict[Choice, bool] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """How many levels each class has."""
        return [len(each.levels) for each in self.classes]

    @property
    def dense(self) -> Choice:
        return (0,) * len(self.classes)

    @property
    def last(self) -> Choice:
        """All that can leave."""
        return tuple(size - 1 for size in self.sizes)

    def named(self, choice: Choice) -> dict[str, int]:
        """``{group: its level}`` of those that are not dense."""
        return {
            name: level
            for each, at in zip(self.classes, choice, strict=True)
            for name, level in zip(each.names, each.levels[at], strict=True)
            if level
        }

    def shares(self, choice: Choice) -> list[float]:
        """What leaves of each class."""
        return [
            _share(self.levels, each.names[0], each.levels[at][0])
            for each, at in zip(self.classes, choice, strict=True)
        ]

    def cost(self, choice: Choice, word: str) -> float:
        """What the model costs at a choice."""
        if word == "latency":
            assert self.predicted is not None  # it was asked for
            return self.predicted.of(self.named(choice))
        key = choice, word
        if key not in self._costs:
            of = self.levels.cost if word in TARGETS else self._beside
            self._costs[key] = float(of(self.named(choice), word))
        return self._costs[key]

    def _beside(self, named: Mapping[str, int], word: str) -> float:
        assert self.beside is not None  # it was asked for
        return self.beside.of(word, {self._number[name]: self._left(name, at) for name, at in named.items()})

    def _left(self, name: str, at: int) -> float:
        """What a level leaves of its entry of the bill: parts, or the share of entries."""
        assert self.beside is not None
        level = self.levels[name][at]
        return self.beside.dense[self._number[name]] * level.kept / level.of

    @functools.cached_property
    def _number(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.levels)}

    def costs(self, choice: Choice, words: Iterable[str]) -> dict[str, float]:
        return {word: self.cost(choice, word) for word in words}

    def fits(self, choice: Choice, limits: Mapping[str, float]) -> bool:
        """Whether it costs no more than it may, and there is such a model."""
        return holds(limits, self.costs(choice, limits)) and self._is_there(choice)

    def _is_there(self, choice: Choice) -> bool:
        """Whether there is such a model."""
        if self.possible is None:
            return True
        if choice not in self._possible:
            self._possible[choice] = self.possible(self.named(choice))
        return self._possible[choice]

    def least(self, limits: Mapping[str, float], given: Sequence[Sequence[float]] | None = None) -> Choice | None:
        """The choice of the least sum of errors that fits, by dynamic programming; None where none was found. Of errors
        that are given an infinite one is a level that is not looked at.

        What groups cost by themselves is too little where they share a tensor, so the sum is held to less until what
        the model costs fits. Of several limits each counts by the share of it that is spent.
        """
        errors = self.errors() if given is None else given
        own = {word: self._own(word) for word in limits}
        fixed = {word: self.cost(self.dense, word) - sum(each[0] for each in own[word]) for word in limits}
        weight = dict.fromkeys(limits, 1.0)
        room = dict(limits)
        best = None
        for _ in range(_TIGHTER):
            table = self.spent(limits, weight)
            budget = math.fsum(weight[word] * (room[word] - fixed[word]) / limits[word] for word in limits)
            found = least_errors(errors, table, budget)
            if found is None:
                break
            choice = tuple(found)
            if self.fits(choice, limits):
                best = choice
                break
            costs = self.costs(choice, limits)
            over = {word: costs[word] - limit for word, limit in limits.items()}
            for word, more in over.items():
                if more > 0:
                    room[word] -= max(more, 1e-3 * limits[word])
                    weight[word] *= costs[word] / limits[word]
            if max(over.values()) <= 0:  # there is no such model: a little less may be one
                room = {word: limit * 0.995 - (limits[word] - limit) for word, limit in room.items()}
        if best is None and given is None:
            best = self.last if self.fits(self.last, limits) else self._climbed(limits)
        return None if best is None else self.filled(best, limits, errors)

    def _climbed(self, limits: Mapping[str, float]) -> Choice | None:
        """Greedy: next comes the least loss per cost saved, among possible models, until it fits; None where it
        never does."""
        if not holds(limits, self.costs(self.last, limits)):
            return None
        errors, spent, choice = self.errors(), self.spent(limits), self.dense
        while not self.fits(choice, limits):
            steps = [
                ((errors[at][up] - errors[at][level]) / (spent[at][level] - spent[at][up]), at, up)
                for at, level in enumerate(choice)
                for up in range(level + 1, self.sizes[at])
                if spent[at][up] < spent[at][level]
            ]
            others = ((*choice[:at], up, *choice[at + 1 :]) for _, at, up in sorted(steps))
            found = next((each for each in others if self._is_there(each)), None)
            if found is None:
                return None
            choice = found
        return choice

    def by_slopes(self, limits: Mapping[str, float]) -> Choice | None:
        """Greedy: next comes the least loss per cost saved, on the lower convex hull of each class' curve of the
        levels, until it fits; None where it never does."""
        steps = []
        for at, (losses, costs) in enumerate(zip(self._told(), self.spent(limits), strict=True)):
            corner = 0
            while corner + 1 < len(losses):
                slopes = {
                    level: (losses[level] - losses[corner]) / (costs[corner] - costs[level])
                    for level in range(corner + 1, len(losses))
                    if costs[level] < costs[corner]
                }
                if not slopes:
                    break
                corner = min(slopes, key=lambda level: (slopes[level], -level))
                steps.append((slopes[corner], at, corner))
        choice = self.dense
        for _, at, level in sorted(steps):
            choice = (*choice[:at], level, *choice[at + 1 :])
            if self.fits(choice, limits):
                return self.filled(choice, limits)
        return None

    def spent(self, limits: Mapping[str, float], weight: Mapping[str, float] | None = None) -> list[list[float]]:
        """Of each class what each level costs by itself, as a share of what may be spent; the limits may weigh."""
        weight = weight or dict.fromkeys(limits, 1.0)
        own = {word: self._own(word) for word in limits}
        return [
            [math.fsum(weight[word] * own[word][at][level] / limits[word] for word in limits) for level in range(size)]
            for at, size in enumerate(self.sizes)
        ]

    def _summed(self, of: Callable[[str, int], float]) -> list[list[float]]:
        """Of each class what each level is: the sum over its groups."""
        return [
            [math.fsum(of(name, at) for name, at in zip(each.names, levels, strict=True)) for levels in each.levels]
            for each in self.classes
        ]

    def filled(
        self, choice: Choice, limits: Mapping[str, float], given: Sequence[Sequence[float]] | None = None
    ) -> Choice:
        """What is left of the budget goes, a level at a time, to where it takes the most error away."""
        errors = self.errors() if given is None else given
        return self._lowered(choice, limits, lambda at, level: errors[at][level - 1] - errors[at][level])

    def _lowered(self, choice: Choice, limits: Mapping[str, float], change: Callable[[int, int], float]) -> Choice:
        """Down a level at a time while that fits, first where ``change`` says least of a class and its level; where
        that is no finite number, never."""
        while True:
            lower = sorted(
                (least, (*choice[:at], level - 1, *choice[at + 1 :]))
                for at, level in enumerate(choice)
                if level and math.isfinite(least := change(at, level))
            )
            fitting = next((each for _, each in lower if self.fits(each, limits)), None)
            if fitting is None:
                return choice
            choice = fitting

    def errors(self) -> list[list[float]]:
        """Of each class what each level loses: as far as it was measured that; else divergences of the model's outputs
        to second order; errors where not all are known."""
        return self._told() if self.curves is None else [[*each] for each in self.curves]

    def _told(self) -> list[list[float]]:
        """What levels say."""
        names = {name for each in self.classes for name in each.names}
        known = all(level.loss is not None for name in names for level in self.levels[name])

        def of(name: str, at: int) -> float:
            level = self.levels[name][at]
            return float(level.loss if known and level.loss is not None else level.error)

        return self._summed(of)

    def _own(self, word: str) -> list[list[float]]:
        """Of each class what each level costs while all others are whole."""

        def of(name: str, at: int) -> float:
            if word in TARGETS:
                return float(self.levels[name][at].costs[word])
            if word != "latency":
                assert self.beside is not None
                return self.beside.own(word, self._number[name], self._left(name, at))
            assert self.predicted is not None
            return -self.predicted.own(name, at)

        return self._summed(of)

    def snapped(self, shares_at: Callable[[float], Mapping[str, float]], limits: Mapping[str, float]) -> Choice | None:
        """The levels nearest to what an allocation gives each group, at the least amount of it that fits.

        Args:
            shares_at: ``amount in [0, 1] -> {group: share that leaves}``; a group without one stays dense.
            limits: what it may cost.
        """

        def at(amount: float) -> Choice:
            wanted = shares_at(amount)
            return tuple(self._nearest(each, wanted) for each in self.classes)

        low, high, best = 0.0, 1.0, None
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            choice = at(middle)
            if self.fits(choice, limits):
                best, high = choice, middle
            else:
                low = middle
        if best is None:
            end = at(1.0)
            best = end if self.fits(end, limits) else None
        if best is None:
            return None
        wanted = shares_at(high)
        return self._towards(best, wanted, limits)

    def nearest(self, kept: Mapping[str, int], limits: Mapping[str, float]) -> Choice | None:
        """The levels nearest to counts of units that stay, and less where that costs too much; groups of the coupling
        that are not named stay dense. None where it costs too much at the last level of each.
        """
        shares = self._leaving(kept)
        return self.snapped(lambda amount: {name: _bent(share, amount) for name, share in shares.items()}, limits)

    def near(self, kept: Mapping[str, int]) -> Choice:
        """The levels nearest to counts of units that stay, whatever that costs."""
        return tuple(self._nearest(each, self._leaving(kept)) for each in self.classes)

    def _leaving(self, kept: Mapping[str, int]) -> dict[str, float]:
        """``{group: the share that leaves}`` by counts of units that stay."""
        shares = {}
        for each in self.classes:
            for name in each.names:
                groups = [group for group in self.levels.groups[name] if group in kept]
                of = self.levels[name][0].of
                shares[name] = 1 - sum(kept[group] for group in groups) / of if groups and of else 0.0
        return shares

    def _nearest(self, each: Class, wanted: Mapping[str, float]) -> int:
        share = self._wanted(each, wanted)
        of = [_share(self.levels, each.names[0], levels[0]) for levels in each.levels]
        return min(range(len(of)), key=lambda at: (abs(of[at] - share), at))

    @staticmethod
    def _wanted(each: Class, wanted: Mapping[str, float]) -> float:
        """What is to leave of a class."""
        return math.fsum(wanted.get(name, 0.0) for name in each.names) / len(each.names)

    def _towards(self, choice: Choice, wanted: Mapping[str, float], limits: Mapping[str, float]) -> Choice:
        """What is left of the budget goes to where more left than was wanted."""

        def below(at: int, level: int) -> float:
            each = self.classes[at]
            less = self._wanted(each, wanted) - _share(self.levels, each.names[0], each.levels[level][0])
            return less if less < 0 else math.inf

        return self._lowered(choice, limits, below)


# ---- The fixed allocations as choices of levels: a search starts from them and is compared with them.
#
# Law: each fits the budget; the model is left as it is.

LAYER = ":layer"  # at the end of the name of a matrix' levels
_ALLOCATIONS = ("erk", "progression")  # of the entries of matrices, by their shapes and places alone

SharesAt = Callable[[float], Mapping[str, float]]


def candidates(model: nn.Module, space: Space, limits: Mapping[str, float]) -> dict[str, Choice]:
    """``{name: choice}`` that fit: the levels nearest to what each allocation gives at this budget.

    - ``"uniform"``: the same share of each group.
    - ``"erk"``, ``"progression"``: of the entries of matrices; see `secateur.allocation`. Units leave in equal shares.
      (OWL and ``"everywhere"`` were the best of them in no row of ``benchmarks/search/RESULTS.md``.)
    - ``"shrink"``: what `secateur.shrink` does by default: the least loss per cost saved comes next, on the lower
      convex hull of each group's curve.

    Args:
        space: what can be chosen.
        limits: what it may cost.
    """
    layers = [name for each in space.classes for name in each.names if name.endswith(LAYER)]
    units = [name for each in space.classes for name in each.names if not name.endswith(LAYER)]
    ways: dict[str, SharesAt] = {"uniform": functools.partial(_even, (*layers, *units))}
    if layers:
        weights = {name.removesuffix(LAYER): model.get_parameter(name.removesuffix(LAYER)) for name in layers}
        shapes = {name: torch.empty(each.shape, device="meta") for name, each in weights.items()}
        ways |= {word: functools.partial(_shares, allocation.parse(word), shapes, units) for word in _ALLOCATIONS}
    found = {name: space.snapped(shares_at, limits) for name, shares_at in ways.items()}
    if units:
        found["shrink"] = space.by_slopes(limits)
    return {name: choice for name, choice in found.items() if choice is not None}


def _even(names: Sequence[str], amount: float) -> dict[str, float]:
    return dict.fromkeys(names, amount)


def _shares(
    allocate: allocation.Allocation, scores: Mapping[str, Tensor], units: Sequence[str], amount: float
) -> dict[str, float]:
    counts = allocate(scores, min(amount, 0.999), Unstructured())
    kept = {name: int(count) if isinstance(count, int) else int(count.sum()) for name, count in counts.items()}
    found = {f"{name}{LAYER}": 1 - kept[name] / scores[name].numel() for name in scores}
    return found | dict.fromkeys(units, amount)
