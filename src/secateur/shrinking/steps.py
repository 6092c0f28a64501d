"""The steps in which ties lose parts, and the counts nearest to what was asked that are reached by them.

Law: from the end no single step leads nearer, so that what is missing or too much is at most half of the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from secateur.shrinking.amounts import Amount, Amounts
from secateur.shrinking.losses import Loss
from secateur.shrinking.ties import Tied

__all__ = ["Integers", "Path", "Steps", "path_by_loss", "path_by_share"]

Integers = npt.NDArray[np.int64]
_TRIES = 64  # steps to each side that a configuration may forbid


@dataclass(frozen=True)
class Path:
    """Where to begin, and which tie goes how far down next: the cheapest steps first."""

    start: Integers
    ties: Integers
    parts: Integers

    def after(self, count: int) -> Integers:
        """How many parts each tie keeps after so many steps."""
        found = self.start.copy()
        np.minimum.at(found, self.ties[:count], self.parts[:count])
        return found

    def rest(self, count: int, without: npt.NDArray[np.bool_] | None = None) -> Path:
        """What comes after so many steps, but for some of the ties."""
        ties, parts = self.ties[count:], self.parts[count:]
        chosen = slice(None) if without is None else ~without[ties]
        return Path(self.after(count), ties[chosen], parts[chosen])


def path_by_loss(loss: Loss, tied: Sequence[Tied], amount: Amount) -> Path:
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
    return _in_order(whole, slopes, ties, parts)


def path_by_share(ideal: Sequence[float], tied: Sequence[Tied]) -> Path:
    """Down from counts that an allocation would have, were they no integers: first those that are furthest below."""
    start, distances, ties, parts = [], [], [], []
    for at, (each, count) in enumerate(zip(tied, ideal, strict=True)):
        choices = each.choices()
        first = int(np.flatnonzero(choices >= count - 1e-9).max(initial=0))
        start.append(choices[first])
        distances.append((count - (choices[first:-1] + choices[first + 1 :]) / 2) / each.step)
        distances[-1] = -distances[-1]
        ties.append(np.full(len(choices) - first - 1, at))
        parts.append(choices[first + 1 :])
    return _in_order(np.array(start, dtype=np.int64), distances, ties, parts)


def _in_order(start: Integers, keys: Sequence[Amounts], ties: Sequence[Integers], parts: Sequence[Integers]) -> Path:
    order = np.argsort(np.concatenate(keys), kind="stable")
    return Path(start, np.concatenate(ties)[order], np.concatenate(parts)[order])


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


class Steps:
    """What ties may keep, and a goal.

    Args:
        tied: the ties, and by `Tied.choices` how many parts each may keep.
        amount: what they come to.
        goal: what shall be left of that.
        possible: whether there is a model in which the ties keep so many parts.
    """

    def __init__(self, tied: Sequence[Tied], amount: Amount, goal: float, possible: Callable[[Integers], bool]) -> None:
        self.amount, self.goal, self.possible = amount, goal, possible
        self._choices = [each.choices() for each in tied]
        self.whole = np.array([each[0] for each in self._choices])
        self.least = np.array([each[-1] for each in self._choices])
        self._all = amount(self.whole)

    def missing(self, parts: Integers) -> float:
        """How much more would have to leave; less than 0 where it is too much."""
        found = self.amount(parts) - self.goal
        return 0.0 if abs(found) < 1e-9 * self._all else found  # the goal is no exact number

    def smallest(self, parts: Integers) -> float:
        """What the smallest step from there changes; 0 where there is none."""
        return min((abs(each) for each, *_ in self._around(parts, range(len(parts)))), default=0.0)

    def walked(self, path: Path) -> Integers:
        """As far down the path as the goal allows, without the steps that are too large for what is missing.

        Of a tie that is whole nothing leaves for less than a step of one that is not.
        """
        smallest: float | None = None
        while len(path.ties):
            count = self._affordable(path)
            if count:
                path = path.rest(count)
                continue
            without = np.zeros(len(self.whole), dtype=bool)
            without[path.ties[0]] = True
            opened = np.flatnonzero(path.start < self.whole)
            if smallest is None and len(opened):
                smallest = min((abs(each) for each, *_ in self._around(path.start, opened)), default=0.0)
            if smallest is not None and self.missing(path.start) < smallest:
                without |= path.start == self.whole
            path = path.rest(0, without)
        return path.start

    def nearest(self, parts: Integers) -> Integers:
        """From there by single steps to where no other leads nearer; in ties that have lost something if that will do.

        Of two that are equally near it is the smaller model.
        """
        parts = self.near(parts)
        for every in (False, True):
            following: Integers | None = parts
            while following is not None:
                parts = following
                following = self._nearer(parts, range(len(parts)) if every else np.flatnonzero(parts < self.whole))
        return parts

    def _nearer(self, parts: Integers, ties: Sequence[int] | Integers) -> Integers | None:
        """After the step of one of the ties that leads nearest; a longer one only where others are impossible."""
        missing = self.missing(parts)
        for steps in range(1, _TRIES):
            left = ((missing + change, at, count) for change, at, count in self._around(parts, ties, steps))
            better = [each for each in left if (abs(each[0]), each[0]) < (abs(missing), missing)]
            for _, at, count in sorted(better, key=lambda each: (abs(each[0]), each[0])):
                following = self._with(parts, at, count)
                if self.possible(following):
                    return following
            if not better:
                break
        return None

    def beside(self, parts: Integers) -> tuple[Integers, Integers]:
        """The nearest of which less leaves than is asked, and of which more; one of the two is this."""
        missing = self.missing(parts)
        if not missing:
            return parts, parts
        changes = sorted(self._around(parts, range(len(parts))), key=lambda each: abs(each[0]))
        others = (self._with(parts, at, count) for change, at, count in changes if (missing + change) * missing <= 0)
        other = next((each for each in others if self.possible(each)), parts)
        return (parts, other) if missing > 0 else (other, parts)

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

    def _around(self, parts: Integers, ties: Iterable[int], steps: int = 1) -> list[tuple[float, int, int]]:
        """``(change of the amount, tie, parts)`` of so many steps of one tie up and down."""
        found = []
        for at in map(int, ties):
            choices = self._choices[at]
            here = int(np.flatnonzero(choices == parts[at])[0])
            beside = [int(choices[to]) for to in (here - steps, here + steps) if 0 <= to < len(choices)]
            changes = self.amount.changes(parts, at, beside)
            found += [(float(change), at, count) for change, count in zip(changes, beside, strict=True) if change]
        return found

    def near(self, parts: Integers) -> Integers:
        """The same, or with another count of one tie if a configuration can only say that; nearest to the goal."""
        if self.possible(parts):
            return parts
        missing = self.missing(parts)
        for steps in range(1, _TRIES):
            found = sorted(self._around(parts, range(len(parts)), steps), key=lambda each: abs(missing + each[0]))
            for _, at, count in found:
                other = self._with(parts, at, count)
                if self.possible(other):
                    return other
        return parts

    @staticmethod
    def _with(parts: Integers, at: int, count: int) -> Integers:
        found = parts.copy()
        found[at] = count
        return found
