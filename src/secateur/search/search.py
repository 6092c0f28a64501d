"""Gates: each class of groups stands between two of its levels, and moves along the slope of the whole model's loss.
Evolutionary search: levels are switched at random, and children are compared by that loss. What each class loses alone
in the whole model: its curve.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from secateur.support import side_by_side, track

Choice = tuple[int, ...]  # the number of the level of each group

# ---- Gates: each class of groups stands between two of its levels, and moves along the slope of the model's loss.
#
# Law: what is saved in all stays what it was; one seed, one result.

STEPS, RATE, MOMENTA = 80, 0.06, (0.8, 0.95)  # of Adam, in shares of what a class can save
_FALLS = 0.5  # of the steps, from which on they get smaller
_MEAN = 0.2  # of the steps, the last ones: their mean is where gates end
_HALVINGS = 60


class Gate(NamedTuple):
    """Where a class of groups stands: so far from one level to another one, which saves more."""

    low: int
    high: int
    share: float


def descended(
    saved: Sequence[Sequence[float]],
    start: Choice,
    slopes: Callable[[Sequence[Gate], int], Sequence[float]],
    *,
    steps: int = STEPS,
) -> list[float]:
    """Where gates end that descend on a loss while all of them together save what they saved at the start.

    A gate stands between two levels, each of which is repaired: so what repair gives back counts, as it does not where
    units are weighed by gates of their own (arXiv:2410.11988). Where it does not matter which of them saves the next
    bit, they stay; Adam's steps lead there, and the mean of the last ones is taken.

    Args:
        saved: of each class what each of its levels saves; of the first nothing.
        start: where they begin.
        slopes: ``(gates, number of the step)`` -> how the loss changes with the share of each.
        steps: how many.

    Returns:
        What each class saves in the end.

    >>> dear, cheap = descended([[0, 1, 2], [0, 1, 2]], (1, 1), lambda gates, _: [2.0, 1.0])
    >>> round(dear, 3), round(cheap, 3)
    (0.0, 2.0)
    """
    ladders = [_ladder(its) for its in saved]
    amounts = [np.asarray([its[at] for at in ladder], np.float64) for its, ladder in zip(saved, ladders, strict=True)]
    whole = np.array([its[-1] for its in amounts])
    shares = np.array(
        [min(1.0, its[at] / most) if most else 0.0 for its, at, most in zip(saved, start, whole, strict=True)]
    )
    much = float(shares @ whole)
    mean, square, total = (np.zeros(len(saved)) for _ in range(3))
    last = max(1, round(_MEAN * steps))
    for step in track(range(steps), "moving gates"):
        places = [_gate(*each) for each in zip(ladders, amounts, shares * whole, strict=True)]
        widths = [its[gate.high] - its[gate.low] for its, gate in zip(saved, places, strict=True)]
        found = zip(slopes(places, step), widths, whole, strict=True)
        slope = np.array([each * most / width if width else 0.0 for each, width, most in found])
        slope = _along(slope, whole, shares)
        mean = MOMENTA[0] * mean + (1 - MOMENTA[0]) * slope
        square = MOMENTA[1] * square + (1 - MOMENTA[1]) * slope**2
        size = np.sqrt(square / (1 - MOMENTA[1] ** (step + 1)))
        move = np.divide(mean / (1 - MOMENTA[0] ** (step + 1)), size, out=np.zeros(len(saved)), where=size > 0)
        rate = RATE * min(1.0, (1 - step / steps) / (1 - _FALLS))
        shares = _saving(shares - rate * move, whole, much)
        total += shares if step >= steps - last else 0.0
    return [float(each) for each in _saving(total / last, whole, much) * whole]


def _ladder(saved: Sequence[float]) -> list[int]:
    """The levels that save more than all before them; the first is one."""
    return [at for at, each in enumerate(saved) if not at or each > max(saved[:at])]


def _gate(ladder: Sequence[int], amounts: npt.NDArray[np.float64], amount: float) -> Gate:
    """Where a class stands that saves so much."""
    if len(ladder) == 1:
        return Gate(0, 0, 0.0)
    at = min(int(np.searchsorted(amounts, amount, side="right")), len(ladder) - 1) - 1
    share = (amount - amounts[at]) / (amounts[at + 1] - amounts[at])
    return Gate(ladder[at], ladder[at + 1], min(1.0, max(0.0, float(share))))


def _along(
    slope: npt.NDArray[np.float64], whole: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The slope along which what is saved stays, of those that can go down it."""
    free = whole > 0
    for _ in range(3):
        price = float(slope[free] @ whole[free]) / max(float(whole[free] @ whole[free]), 1e-300)
        along = slope - price * whole
        free = (whole > 0) & ~((shares <= 0) & (along > 0)) & ~((shares >= 1) & (along < 0))
    return np.where(free, along, 0.0)


def _saving(shares: npt.NDArray[np.float64], whole: npt.NDArray[np.float64], much: float) -> npt.NDArray[np.float64]:
    """The shares, in [0, 1] and moved by one number, that save so much."""
    low, high = -1 - float(shares.max(initial=0.0)), 1 - float(shares.min(initial=0.0))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(shares + middle, 0, 1) @ whole < much else (low, middle)
    return np.clip(shares + high, 0, 1)


# ---- Evolutionary search: levels are switched at random, and children are compared by the loss of the whole model.
#
# Law: one seed, one result; whatever is returned fits, and loses no more on all data than any candidate that it began
# with; no more passes over the data are made than were granted, but for those of the candidates.

_OFFSPRING = 16, 4  # at most and at least; twice the number of batches, so that a generation stays cheap
_SHARES = (1 / 16, 1 / 4)  # of the data, before all of it
_SURVIVORS = (4, 1)  # after each of these
_SWITCHES = 3  # at most, of which the fewer are the more likely
_IDLE = 40  # generations of which nothing had to be computed, until no more are looked for


@dataclass(frozen=True)
class Evolved:
    """The result of an evolutionary search.

    Attributes:
        choice: the best, and ``loss`` what it loses on all data.
        losses: of the candidates that it began with.
        passes: over all data that were made, as a sum of shares.
        generations: how often the parent had children.
        known: of all choices that all data was asked of.
    """

    choice: Choice
    loss: float
    losses: Mapping[str, float]
    passes: float
    generations: int
    known: Mapping[Choice, float] = field(default_factory=dict)


def evolved(
    sizes: Sequence[int],
    starts: Mapping[str, Choice],
    loss: Callable[[Choice, Sequence[int]], float],
    fits: Callable[[Choice], bool],
    *,
    batches: int,
    passes: float = 30.0,
    seed: int = 0,
) -> Evolved:
    """The best choice that evolution finds: EvoPress (Sieberling et al. 2024, arXiv:2410.14649).

    One parent has children, in each of which some groups go down by some levels and others up, such that the budget
    holds. Children are compared on a little data, those that survive on more; the last one left becomes the parent if
    it loses less than the parent does on all of it. Steps are of several levels first, then of fewer, down to one: from
    coarse to fine, as in Týr-the-Pruner (Li et al. 2025, arXiv:2503.09657). A child that leaves some of the budget
    takes it up again, level by level, in groups drawn by chance.

    Args:
        sizes: how many levels each group has; 0 is the dense one, and a later one costs no more.
        starts: ``{name: choice}`` of candidates that fit, one at least.
        loss: ``(choice, numbers of batches) -> loss``, less is better; a mean, so that shares of the data compare.
        fits: whether a choice costs no more than it may.
        batches: how many there are.
        passes: over all data, as a sum of shares, that may be made.
        seed: of the draws.

    Raises:
        ValueError: no candidate, one that is no choice of these levels or does not fit, or no batches.

    >>> found = evolved([3, 3], {"even": (1, 1)}, lambda c, _: 5 * c[0] + c[1], lambda c: sum(c) >= 2, batches=4)
    >>> found.choice, found.loss, found.losses
    ((0, 2), 2.0, {'even': 6.0})
    """
    _check(sizes, starts, fits, batches)
    draw = random.Random(seed)
    every = range(batches)
    counted = _Counted(loss, batches)
    counted.all([*starts.values()], every)
    losses = {name: counted(choice, every) for name, choice in starts.items()}
    parent = starts[min(losses, key=lambda name: losses[name])]
    generations = idle = 0
    most = min(_OFFSPRING[0], max(_OFFSPRING[1], 2 * batches))
    for generation in track(itertools.count(), "switching levels"):
        if counted.passes >= passes or idle >= _IDLE:
            break
        largest = _largest_step(sizes, counted.passes / passes)
        children = list(_children(parent, sizes, fits, draw, largest, counted.known, most))
        generations, before = generation + 1, counted.passes
        for share, survivors in zip(_SHARES, _SURVIVORS, strict=True):
            some = _some(batches, share, draw)
            if len(some) == batches:
                continue
            if not children:
                break
            counted.all(children, some)
            scored = sorted((counted(each, some), at) for at, each in enumerate(children))
            children = [children[at] for _, at in scored[:survivors]]
            if survivors == 1 and scored[0][0] >= counted(parent, some):
                children = []
        if children and counted.passes < passes:
            best = min(children, key=lambda each: (counted(each, every), each))
            parent = best if counted(best, every) < counted(parent, every) else parent
        idle = idle + 1 if counted.passes == before else 0
    known = {choice: counted(choice, every) for choice in sorted(counted.known)}
    return Evolved(parent, counted(parent, every), losses, counted.passes, generations, known)


def _check(sizes: Sequence[int], starts: Mapping[str, Choice], fits: Callable[[Choice], bool], batches: int) -> None:
    if not starts:
        raise ValueError("there is no candidate to begin with; pass one choice that fits, at least.")
    if batches < 1:
        raise ValueError(f"there are {batches} batches; choices are compared on one at least.")
    for name, choice in starts.items():
        if len(choice) != len(sizes) or not all(0 <= at < size for at, size in zip(choice, sizes, strict=True)):
            raise ValueError(f"{name}: {choice} is no choice of one level of each of {len(sizes)} groups.")
        if not fits(choice):
            raise ValueError(f"{name}: {choice} costs more than it may.")


class _Counted:
    """The loss, each asked for once, and what that took; several processes compute some each."""

    def __init__(self, loss: Callable[[Choice, Sequence[int]], float], batches: int) -> None:
        self._loss, self._batches = loss, batches
        self._found: dict[tuple[Choice, tuple[int, ...]], float] = {}
        self.known: set[Choice] = set()  # on all data; a little may have said too much of the others
        self.passes = 0.0

    def all(self, choices: Sequence[Choice], some: Sequence[int]) -> None:
        """Computes what is not known of these yet."""
        new = [each for each in dict.fromkeys(choices) if (each, tuple(some)) not in self._found]
        for choice, found in zip(new, side_by_side(lambda each: float(self._loss(each, some)), new), strict=True):
            self._found[choice, tuple(some)] = math.inf if math.isnan(found) else found
            self.passes += len(some) / self._batches
            if len(some) == self._batches:
                self.known.add(choice)

    def __call__(self, choice: Choice, some: Sequence[int]) -> float:
        self.all([choice], some)
        return self._found[choice, tuple(some)]


def _some(batches: int, share: float, draw: random.Random) -> list[int]:
    return sorted(draw.sample(range(batches), max(1, round(batches * share))))


def _largest_step(sizes: Sequence[int], spent: float) -> int:
    """From a quarter of the levels down to one, at the half of the passes."""
    coarse = max(1, (max(sizes, default=1) - 1) // 4)
    return max(1, round(coarse * (1 - 2 * spent)))


def _children(
    parent: Choice,
    sizes: Sequence[int],
    fits: Callable[[Choice], bool],
    draw: random.Random,
    largest: int,
    known: set[Choice],
    most: int,
) -> Iterator[Choice]:
    """Those that all data has not been asked of; fewer where chance finds no more."""
    seen = {parent}
    for _ in range(4 * most):
        child = _child(parent, sizes, fits, draw, largest)
        if child in seen or child in known or not fits(child):  # a level may be slower than the one before it
            continue
        seen.add(child)
        yield child
        if len(seen) > most:
            return


def _child(
    parent: Choice, sizes: Sequence[int], fits: Callable[[Choice], bool], draw: random.Random, largest: int
) -> Choice:
    """The parent with some switches: one group up by some levels, so that it costs less, others down as far as fits."""
    child = list(parent)
    for _ in range(min(draw.randint(1, _SWITCHES), draw.randint(1, _SWITCHES))):
        step = draw.randint(1, largest)
        up = [at for at, size in enumerate(sizes) if child[at] + 1 < size]
        if not up:
            break
        giver = draw.choice(up)
        child[giver] = min(child[giver] + step, sizes[giver] - 1)
        down = [at for at in range(len(sizes)) if child[at] and at != giver]
        draw.shuffle(down)
        for taker in down:
            if _lowered(child, taker, step, fits):
                break
    rest = list(range(len(sizes)))
    draw.shuffle(rest)
    for taker in rest:
        while _lowered(child, taker, 1, fits):
            pass
    return tuple(child)


def _lowered(child: list[int], at: int, step: int, fits: Callable[[Choice], bool]) -> bool:
    """Whether a group could go down, by so many levels or fewer."""
    before = child[at]
    for to in range(max(0, before - step), before):
        child[at] = to
        if fits(tuple(child)):
            return True
    child[at] = before
    return False


# ---- What each class of groups loses alone in the whole model: its curve.
#
# Law: a curve begins at 0 and never falls, and is what was measured where something was.


def looked_at(size: int) -> tuple[int, ...]:
    """The levels of a class that are measured alone: a third and two thirds of the way.

    >>> looked_at(2), looked_at(4), looked_at(19)
    ((1,), (1, 2), (6, 12))
    """
    last = size - 1
    return tuple(sorted({max(1, last // 3), max(1, 2 * last // 3)})) if last else ()


def measured_curve(predicted: Sequence[float], measured: Mapping[int, float], ratio: float = 1.0) -> list[float]:
    """The predicted losses of a class, as many times as large as what was measured at some levels; between these the
    logarithm of how many times goes straight.

    Args:
        predicted: of each level; 0 is dense.
        measured: ``{level: what the model loses}``; what is not finite counts as not measured.
        ratio: how many times where nothing was measured.

    >>> [round(each, 3) for each in measured_curve([0, 1, 2, 4], {1: 2.0, 3: 32.0})]
    [0.0, 2.0, 8.0, 32.0]
    """
    tiny = 1e-12 * max(predicted, default=0.0)
    known = {at: lost for at, lost in measured.items() if 0 < lost < math.inf and predicted[at] > tiny}
    if not known:
        return [float(each) * ratio for each in predicted]
    places = sorted(known)
    logs = np.interp(range(len(predicted)), places, [math.log(known[at] / predicted[at]) for at in places])
    found = np.asarray(predicted, dtype=np.float64) * np.exp(logs)
    return [float(each) for each in np.maximum.accumulate(found)]
