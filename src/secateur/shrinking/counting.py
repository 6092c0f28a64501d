"""The search for counts: steps in which ties lose parts, and the counts nearest to the request. How many units of each
group stay, so that the requested share of the target leaves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from secateur.coupling import UNUSED, Group
from secateur.pipeline import make_masks
from secateur.shrinking.costs import (
    ROUNDED,
    Amounts,
    CostPolynomial,
    Loss,
    TiedGroups,
    amount_of,
    by_cost,
    by_tie,
    cost_of,
    even,
    late,
    prices_of,
)
from secateur.shrinking.request import PruningTarget, Request
from secateur.support import printable, track

# ---- The search for counts: steps in which ties lose parts, and the counts nearest to the request.
#
# Law: from the end no single step leads nearer, so that what is missing or too much is at most half of the smallest.

Integers = npt.NDArray[np.int64]
_TRIES = 64  # steps to each side that a configuration may forbid
_ODD = (1, 2, 5, 11)  # steps down: where all of these are possible alone, everything is
_ALTERNATIVES = 8  # steps that are tried with others given back
_PAIRED = 12  # ties that are tried two at a time
_PAIRINGS = 3  # one after the other


@dataclass(frozen=True)
class Path:
    """An order of removal: the counts at the start, and the steps down, cheapest first.

    Attributes:
        start: how many parts each tie keeps.
        ties, parts: of each step its tie, and how many parts that keeps then.
        cost: ``(tie, how many parts it keeps) -> loss``; that of all ties is the sum.
    """

    start: Integers
    ties: Integers
    parts: Integers
    cost: Callable[[int, float], float]

    def loss(self, parts: Integers) -> float:
        """The loss when the ties keep so many parts."""
        return sum(self.cost(at, count) for at, count in enumerate(parts))

    def after(self, count: int) -> Integers:
        """How many parts each tie keeps after so many steps."""
        found = self.start.copy()
        np.minimum.at(found, self.ties[:count], self.parts[:count])
        return found

    def rest(self, count: int) -> Path:
        """What comes after so many steps."""
        return replace(self, start=self.after(count), ties=self.ties[count:], parts=self.parts[count:])

    def without(self, ties: npt.NDArray[np.bool_]) -> Path:
        """The steps of all ties but these."""
        left = ~ties[self.ties]
        return replace(self, ties=self.ties[left], parts=self.parts[left])

    def through(self, at: int, count: int) -> Path:
        """The same, but first of all one tie goes so far down."""
        start = self.start.copy()
        start[at] = count
        left = self.parts < start[self.ties]
        return replace(self, start=start, ties=self.ties[left], parts=self.parts[left])


def path_by_loss(loss: Loss, tied: Sequence[TiedGroups], amount: CostPolynomial) -> Path:
    """By loss for what is saved, on the lower convex hull of each tie's curve.

    Both are those of one tie that loses parts while the others are whole. So a coarse step, or several that are only
    worth it together, come when all of it is worth it.
    """
    whole = np.array([each.parts for each in tied], dtype=np.int64)
    slopes, ties, parts = [], [], []
    for at, each in enumerate(tied):
        choices = each.choices()
        saved = -amount.changes(whole, at, choices)
        losses = np.array([loss(each, int(count)) for count in choices])
        corners = _hull(saved, losses)
        slopes.append(np.diff(losses[corners]) / np.diff(saved[corners]))
        ties.append(np.full(len(corners) - 1, at))
        parts.append(choices[corners[1:]])
    order = np.argsort(np.concatenate(slopes), kind="stable")
    return Path(
        whole,
        np.concatenate(ties)[order],
        np.concatenate(parts)[order],
        lambda at, count: loss(tied[at], int(count)),
    )


def path_by_share(ideal: Sequence[float], tied: Sequence[TiedGroups]) -> Path:
    """Down from counts that an allocation would have, were they no integers: first those that are furthest above."""
    start, above, ties, parts = [], [], [], []
    for at, (each, count) in enumerate(zip(tied, ideal, strict=True)):
        choices = each.choices()
        first = int(np.flatnonzero(choices >= count - 1e-9).max(initial=0))
        start.append(choices[first])
        above.append(((choices[first:-1] + choices[first + 1 :]) / 2 - count) / each.step)
        ties.append(np.full(len(choices) - first - 1, at))
        parts.append(choices[first + 1 :])
    order = np.argsort(-np.concatenate(above), kind="stable")
    return Path(
        np.array(start, dtype=np.int64),
        np.concatenate(ties)[order],
        np.concatenate(parts)[order],
        lambda at, count: (count - ideal[at]) ** 2 / tied[at].parts,
    )


def _hull(saved: Amounts, losses: Amounts) -> Integers:
    """The corners of the lower convex hull, from the first point on; where nothing more is saved there is none."""
    corners = [0]
    for at in range(1, len(saved)):
        if saved[at] <= saved[corners[-1]]:
            continue
        while len(corners) > 1:
            one, two = corners[-2:]
            if (losses[two] - losses[one]) * (saved[at] - saved[one]) <= (losses[at] - losses[one]) * (
                saved[two] - saved[one]
            ):
                break
            corners.pop()
        corners.append(at)
    return np.array(corners, dtype=np.int64)


class CountSearch:
    """The search for the counts nearest to a goal.

    Args:
        tied: the ties, and by `TiedGroups.choices` how many parts each may keep.
        amount: the cost of such counts.
        goal: the cost that shall be left.
        possible: whether there is a model in which the ties keep so many parts; None: there always is.
    """

    def __init__(
        self,
        tied: Sequence[TiedGroups],
        amount: CostPolynomial,
        goal: float,
        possible: Callable[[Integers], bool] | None = None,
    ) -> None:
        self.amount, self.goal = amount, goal
        self._possible = possible
        self._choices = [each.choices() for each in tied]
        self.whole = np.array([each[0] for each in self._choices])
        self._all = amount(self.whole)
        self._known: dict[tuple[int, ...], bool] = {}
        self._bound = np.array([not self._is_free(at) for at in range(len(tied))], dtype=bool)

    def missing(self, parts: Integers) -> float:
        """How much more would have to leave; less than 0 where it is too much."""
        found = self.amount(parts) - self.goal
        return 0.0 if abs(found) < 1e-9 * self._all else found  # the goal is no exact number

    def smallest(self, parts: Integers) -> float:
        """What the smallest step from there changes; 0 where there is none."""
        return min((abs(each) for each, *_ in self._around(parts, range(len(parts)))), default=0.0)

    def reached(self, path: Path) -> Integers:
        """The nearest that the path leads to; of several that are near enough the one of least loss.

        A step that is too large for what is missing can be left out, or taken with others given back: both are tried.
        """
        end, large = self._walked(path)
        ends = [end, *(self._walked(path.through(at, count))[0] for at, count in large[:_ALTERNATIVES])]
        near = [self.nearest(each, path) for each in ends]
        if all(map(self._excess, near)):
            near += [self.nearest(self._filled(each), path) for each in ends]
        for _ in range(_PAIRINGS):
            if all(map(self._excess, near)):
                near += [other for each in sorted(near, key=self._excess)[:2] for other in self._by_two(each, path)]
        found = min(near, key=lambda parts: (round(self._excess(parts) / self._all, 9), path.loss(parts)))
        return self.near(found)

    def _filled(self, parts: Integers) -> Integers:
        """Down by single steps of any tie, the largest that the goal allows, until it allows none."""
        while True:
            missing = self.missing(parts)
            fitting = [each for each in self._around(parts, range(len(parts))) if -missing <= each[0] < 0]
            if not fitting:
                return parts
            _, at, count = min(fitting)
            parts = self._with(parts, at, count)

    def _excess(self, parts: Integers) -> float:
        """By how much it is further off than half of the smallest step."""
        return max(0.0, abs(self.missing(parts)) - self.smallest(parts) / 2)

    def _walked(self, path: Path) -> tuple[Integers, list[tuple[int, int]]]:
        """As far down the path as the goal allows, and the steps that were left out with smaller ones still to come.

        Of a tie that is whole nothing leaves for less than a step of one that is not.
        """
        smallest: float | None = None
        large = []
        while len(path.ties) and self.missing(path.start) > 0:
            count = self._affordable(path)
            if count:
                path = path.rest(count)
                continue
            missing, without = self.missing(path.start), np.zeros(len(self.whole), dtype=bool)
            without[path.ties[0]] = True
            opened = np.flatnonzero(path.start < self.whole)
            if smallest is None and len(opened):
                smallest = min((abs(each) for each, *_ in self._around(path.start, opened)), default=0.0)
            if smallest is None or missing >= smallest:
                large.append((int(path.ties[0]), int(path.parts[0])))
            else:
                without |= path.start == self.whole
            path = path.without(without)
        return path.start, large

    def nearest(self, parts: Integers, path: Path) -> Integers:
        """From there by single steps to where no other leads nearer; in ties that have lost something if that will do.

        Of steps that lead as near as any has to it is the one of least loss, so that of ties of one size that loses a
        unit which others can replace; of two that cost the same the nearer, and the smaller model.
        """
        parts = self.near(parts)
        for every in (False, True):
            following: Integers | None = parts
            while following is not None:
                parts = following
                ties = [at for at, less in enumerate(parts < self.whole) if every or less]
                missing = self.missing(parts)
                around = self._around(parts, ties)
                left = [(missing + change, at, count) for change, at, count in around]
                better = [each for each in left if (abs(each[0]), each[0]) < (abs(missing), missing)]
                enough = min((abs(change) for change, *_ in around), default=0.0) / 2
                best = min(better, key=lambda each: self._rank(parts, path, enough, *each), default=None)
                following = None if best is None else self._with(parts, *best[1:])
        return parts

    @staticmethod
    def _rank(
        parts: Integers, path: Path, enough: float, missing: float, at: int, count: int
    ) -> tuple[float, float, float, float]:
        """Of a step of one tie, lower = take: how much further off than enough it leads, then what it costs."""
        cost = path.cost(at, count) - path.cost(at, parts[at])
        return max(0.0, abs(missing) - enough * (1 + 1e-9)), cost, abs(missing), missing

    def _by_two(self, parts: Integers, path: Path) -> Iterable[Integers]:
        """The nearest with some steps of one tie and any of another, of the ties with the smallest steps."""
        around = sorted(self._around(parts, range(len(parts))), key=lambda each: abs(each[0]))
        ties = list(dict.fromkeys(at for _, at, _ in around))[:_PAIRED]
        for at in ties:
            found = [(abs(self.missing(parts)), parts)]
            for count in self._within(parts, at):
                moved = self._with(parts, at, count)
                for other in ties:
                    if other == at:
                        continue
                    left = abs(self.missing(moved) + self.amount.changes(moved, other, self._choices[other]))
                    nearer = [to for to in np.argsort(left)[:_ALTERNATIVES] if left[to] < found[-1][0]]
                    ends = ((float(left[to]), self._with(moved, other, int(self._choices[other][to]))) for to in nearer)
                    found += [next((end for end in ends if self._fits(end[1])), found[-1])]
            yield self.nearest(found[-1][1], path)

    def _within(self, parts: Integers, at: int) -> list[int]:
        """The numbers of parts of a tie that are some steps up and down from there."""
        choices = self._choices[at]
        here = len(choices) - 1 - int(np.searchsorted(choices[::-1], parts[at]))
        near = choices[max(0, here - _ALTERNATIVES) : here + _ALTERNATIVES + 1]
        return [int(each) for each in near if each != parts[at]]

    def beside(self, parts: Integers) -> tuple[Integers, Integers]:
        """The nearest of which less leaves than is asked, and of which more; one of the two is this."""
        missing = self.missing(parts)
        if not missing:
            return parts, parts
        around = self._around(parts, range(len(parts)))
        across = sorted((abs(missing + each[0]), *each[1:]) for each in around if (missing + each[0]) * missing <= 0)
        ends = [self._with(parts, at, count) for _, at, count in across[:_ALTERNATIVES]]
        if across and across[0][0] > min(abs(change) for change, *_ in around):
            ends = [self._closer(end, abs(missing)) for end in ends]
        other = min(ends, key=lambda each: abs(self.missing(each)), default=parts)
        return (parts, other) if missing > 0 else (other, parts)

    def _closer(self, parts: Integers, least: float) -> Integers:
        """As near as steps of one tie after the other lead on this side of the goal, but not as near as ``least``:
        after one that was too large, others are given back."""
        side = math.copysign(1.0, self.missing(parts))
        while (off := side * self.missing(parts)) > least:
            ends = []
            for at in range(len(parts)):
                left = side * (self.missing(parts) + self.amount.changes(parts, at, self._choices[at]))
                fit = np.flatnonzero((left >= least) & (left < off * (1 - 1e-9)))
                for to in fit[left[fit].argsort()][:_ALTERNATIVES]:
                    end = self._with(parts, at, int(self._choices[at][to]))
                    if self._fits(end):
                        ends.append((float(left[to]), end))
                        break
            if not ends:
                break
            parts = min(ends, key=lambda each: each[0])[1]
        return parts

    def _affordable(self, path: Path) -> int:
        """How many steps there are until too much has left."""
        low, high = 0, 1
        while high <= len(path.ties) and self.missing(path.after(high)) >= 0:
            low, high = high, 2 * high
        high = min(high, len(path.ties) + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.missing(path.after(middle)) >= 0 else (low, middle)
        return low

    def _around(self, parts: Integers, ties: Iterable[int]) -> list[tuple[float, int, int]]:
        """``(change of the amount, tie, parts)`` of a step of one tie up and down, to what is possible."""
        found = []
        for at in map(int, ties):
            beside = [each for each in (self._beyond(parts, at, -1), self._beyond(parts, at, 1)) if each is not None]
            changes = self.amount.changes(parts, at, beside)
            found += [(float(change), at, count) for change, count in zip(changes, beside, strict=True) if change]
        return found

    def _beyond(self, parts: Integers, at: int, sign: int) -> int | None:
        """The next number of parts of a tie, more or less; there may be gaps that a configuration cannot say."""
        choices = self._choices[at]
        here = len(choices) - 1 - int(np.searchsorted(choices[::-1], parts[at]))  # from the largest down
        for steps in range(1, _TRIES):
            to = here - sign * steps
            if not 0 <= to < len(choices):
                break
            if self._fits(self._with(parts, at, int(choices[to]))):
                return int(choices[to])
        return None

    def near(self, parts: Integers) -> Integers:
        """The same, or with another count of one tie if a configuration can only say that; nearest to the goal."""
        if self._fits(parts):
            return parts
        missing = self.missing(parts)
        found = self._around(parts, np.flatnonzero(self._bound))
        if found:
            _, at, count = min(found, key=lambda each: abs(missing + each[0]))
            return self._with(parts, at, count)
        return np.where(self._bound, self.whole, parts)

    def _fits(self, parts: Integers) -> bool:
        """Whether there is such a model, asked once whatever the free ties keep."""
        key = tuple(map(int, parts[self._bound]))
        if self._possible is None or not key:
            return True
        if key not in self._known:
            self._known[key] = self._possible(np.where(self._bound, parts, self.whole))
        return self._known[key]

    def _is_free(self, at: int) -> bool:
        """Whether a configuration can say any count of a tie, as of a hidden width: odd ones, too."""
        few = self._choices[at][[each for each in _ODD if each < len(self._choices[at])]]
        return self._possible is None or (
            len(few) == len(_ODD) and all(self._possible(self._with(self.whole, at, int(each))) for each in few)
        )

    @staticmethod
    def _with(parts: Integers, at: int, count: int) -> Integers:
        found = parts.copy()
        found[at] = count
        return found


# ---- How many units of each group stay, so that the requested share of the target leaves.
#
# Law: no single step leads nearer to the request, so it is missed by at most half of the smallest step. Only where
# steps are coarse the smaller of the two nearest models is taken. Groups that are tied keep the same share.

_FINE = 0.01  # of the target: the smallest step of counts that are rounded unasked is worth no more
_COARSE = 0.05  # of the target: where the nearest is further off, the smaller model is taken
_REASONS, _NAMED = 2, 5  # of what stays whole, and of what takes no part, that an error says
_MEASURED = 8  # times a model is built to find out its time


@dataclass(frozen=True)
class Counted:
    """How many units stay of each group, ``{group: count}``.

    Attributes:
        counts: those that were chosen.
        less, more: the nearest of which less leaves than was asked, and more; one of the two was chosen.
    """

    counts: dict[str, int]
    less: dict[str, int]
    more: dict[str, int]


def solve_counts(
    subject: PruningTarget,
    groups: Sequence[Group],
    asked: Request,
    *,
    scores: Mapping[str, Tensor] | None = None,
    minimum: Mapping[str, int] | None = None,
    loss: Loss | None = None,
) -> Counted:
    """The counts of least loss among those nearest to the request, for the groups that may leave.

    ``scores`` are needed by an allocation alone; ``minimum`` is the least count of a group.

    Raises:
        ValueError: more than half of a step is missing when nothing more can leave.
    """
    assert asked.sparsity is not None  # otherwise what is zero leaves
    tied = rounded_ties(subject, groups, asked, minimum or {})
    amount = amount_of(subject.model, subject.coupling, subject.inputs[0], asked.target, tied)
    whole = amount([each.parts for each in tied])
    goal = (1 - asked.sparsity) * whole

    def counts(parts: Integers) -> dict[str, int]:
        return {
            name: count for each, its in zip(tied, parts, strict=True) for name, count in each.counts(int(its)).items()
        }

    possible = None if subject.configured is None else (lambda parts: subject.is_possible(counts(parts)))
    steps = CountSearch(tied, amount, goal, possible)
    if asked.allocate is None and asked.target != "latency" and possible is None:
        least = np.array([each.choices()[-1] for each in tied])  # looking for what is not there takes long
        if steps.missing(least) > steps.smallest(least) / 2:
            raise _unattainable(subject, asked, 1 - amount(least) / whole, chosen=all(each.chosen for each in groups))
    if asked.allocate is None:
        behind = late(subject.coupling, groups) if asked.target != "units" else {}
        path = path_by_loss(loss or even(amount, tied, behind), tied, amount)
        if asked.target == "latency":
            return _measured(
                subject, asked, lambda share: counts(steps.near(path.after(round(share * len(path.ties)))))
            )
    else:
        assert scores is not None
        parts_at = _allocation(groups, asked, scores, tied, amount)
        if asked.target == "latency":
            return _measured(
                subject, asked, lambda share: counts(steps.near(path_by_share(parts_at(share), tied).start))
            )
        if asked.target == "units":
            ideal = parts_at(asked.sparsity)
            steps.goal = amount(ideal)  # it has said how many: only what rounding adds is evened out
        else:
            ideal = _where_met(parts_at, subject, asked, amount, goal, steps)
        path = path_by_share(ideal, tied)
    found = steps.reached(path)
    less, more = steps.beside(found)
    missing = steps.missing(found)
    if missing > 0 and more is found and missing > steps.smallest(found) / 2:
        raise _unattainable(subject, asked, 1 - amount(found) / whole, chosen=all(group.chosen for group in groups))
    if found is less and missing > _COARSE * whole:
        found = more
    return Counted(counts(found), counts(less), counts(more))


def rounded_ties(
    subject: PruningTarget, groups: Sequence[Group], asked: Request, minimum: Mapping[str, int]
) -> list[TiedGroups]:
    """The ties. A multiple that nobody asked for is halved until the smallest step is hardly seen in what leaves."""
    rounded = ROUNDED
    while True:
        tied = [TiedGroups(each, asked.round_to, minimum, rounded) for each in by_tie(groups)]
        if asked.round_to is not None or rounded == 1:
            return tied
        amount = amount_of(subject.model, subject.coupling, subject.inputs[0], asked.target, tied)
        whole = [each.parts for each in tied]
        steps = (-amount.changes(whole, at, [max(0, each.parts - each.step)])[0] for at, each in enumerate(tied))
        if min((step for step in steps if step > 0), default=0.0) <= _FINE * amount(whole):
            return tied
        rounded //= 2


def _allocation(
    groups: Sequence[Group],
    asked: Request,
    scores: Mapping[str, Tensor],
    tied: Sequence[TiedGroups],
    amount: CostPolynomial,
) -> Callable[[float], list[float]]:
    """How many parts an allocation gives each tie when such a share leaves."""
    assert asked.allocate is not None
    allocate = asked.allocate
    ranked = {group.name: scores[group.name] for group in groups}
    if allocate is by_cost and asked.target not in ("latency", "units"):
        prices = prices_of(amount, tied)
        ranked = {group.name: scores[group.name] / prices[group.name] for group in groups}

    def parts_at(share: float) -> list[float]:
        masks = make_masks(ranked, share, criterion=lambda weight: weight, allocate=allocate)
        counts = {group.name: int(masks[group.name].sum()) for group in groups}
        return [max(each.mean(counts), int(each.choices()[-1])) for each in tied]

    return parts_at


def _where_met(
    parts_at: Callable[[float], list[float]],
    subject: PruningTarget,
    asked: Request,
    amount: CostPolynomial,
    goal: float,
    steps: CountSearch,
) -> list[float]:
    """How many parts the allocation gives each tie at the share at which the request is met."""
    most = parts_at(1.0)
    whole = steps.amount(steps.whole)
    if amount(most) - goal > max(steps.smallest(steps.whole) / 2, 1e-9 * whole):
        raise _unattainable(subject, asked, 1 - amount(most) / whole)
    low, high = 0.0, 1.0
    for _ in track(range(24), "looking for the counts"):
        middle = (low + high) / 2
        low, high = (middle, high) if amount(parts_at(middle)) > goal else (low, middle)
    return parts_at(high)


def _measured(subject: PruningTarget, asked: Request, counts_at: Callable[[float], dict[str, int]]) -> Counted:
    """The largest counts whose measured time is as short as requested."""
    assert asked.sparsity is not None
    time = cost_of(subject.model, subject.coupling, subject.inputs[0], asked.target, asked.runtime)
    whole, shortest = time({}), time(counts_at(1.0))
    if shortest > (1 - asked.sparsity) * whole:
        raise _unattainable(subject, asked, max(0.0, 1 - shortest / whole))
    low, high = 0.0, 1.0
    for _ in track(range(_MEASURED), "looking for the counts"):
        middle = (low + high) / 2
        low, high = (middle, high) if time(counts_at(middle)) > (1 - asked.sparsity) * whole else (low, middle)
    found = counts_at(high)
    return Counted(found, found, found)


def _unattainable(subject: PruningTarget, asked: Request, most: float, *, chosen: bool = False) -> ValueError:
    assert asked.sparsity is not None
    attainable = math.floor(1e4 * most + 1e-6) / 1e4  # rounded down: the share that the message names is possible
    what = f"at most {attainable:.2%} of the {'experts' if chosen else asked.target} can leave"
    why = f"{'as many stay as are chosen at a time, and ' if chosen else ''}the rest is frozen or kept"
    return ValueError(f"{what}, not {asked.sparsity:.1%}: {why}.{'' if chosen else _whole(subject)}")


def _whole(subject: PruningTarget) -> str:
    """Why most parameters stay whole: first what the example does not run, then the reasons that freeze most."""
    sizes = {name: parameter.numel() for name, parameter in subject.model.named_parameters()}
    entries, frozen = sum(sizes.values()), subject.scope.frozen
    idle = [name for name in sizes if frozen.get((name, 0)) == UNUSED]
    said = ""
    if share := sum(sizes[name] for name in idle) / entries:
        said = f" {share:.1%} of all parameters take no part in the forward pass: {_modules(idle, sizes)}."
    weights = Counter[str]()
    for (name, _), reason in frozen.items():
        if name not in idle:
            weights[reason] += sizes.get(name, 0)
    most = [reason for reason, count in weights.most_common(_REASONS) if count > _COARSE * entries]
    if most:
        first = {reason: next(name for (name, _), why in frozen.items() if why == reason) for reason in most}
        said += f" Most of what is frozen: {', '.join(f'{first[each]} ({printable(each)})' for each in most)}."
    return said


def _modules(names: Sequence[str], every: Collection[str]) -> str:
    """The outermost modules all of whose parameters are among the names; of many the first.

    >>> _modules(["a.0.weight", "a.1.weight", "b.weight"], ["a.0.weight", "a.1.weight", "b.weight", "b.bias"])
    'a, b.weight'
    """
    others = {path for name in {*every} - {*names} for path in _paths(name)}
    outer = list(dict.fromkeys(next(path for path in _paths(name) if path not in others) for name in names))
    return ", ".join(outer[:_NAMED]) + (f" and {len(outer) - _NAMED} more" if len(outer) > _NAMED else "")


def _paths(name: str) -> list[str]:
    """The modules that a parameter is in, the outermost first, and itself."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
