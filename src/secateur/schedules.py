"""How sparse at which step: functions ``step -> sparsity``, made by functions of the target.

Law: a schedule starts at ``initial``, never decreases towards a higher target, and **is** the target from ``end`` on.

``begin`` and ``end`` are moments: an int is a step, a float the fraction of the run (``0.6``), ``"12ep"`` an epoch,
``"3000st"`` a step. What is no step yet is resolved when the length of the run is known, by `resolve` or a Pruner.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "Milestones",
    "Moment",
    "Ramp",
    "Schedule",
    "constant",
    "cosine",
    "cubic",
    "exponential",
    "linear",
    "milestones",
    "resolve",
    "step_of",
]

Schedule = Callable[[int], float]
Moment = int | float | str
_UNRESOLVED = "{} is not in steps yet: the length of the run resolves it; see secateur.schedules.resolve."


@dataclass(frozen=True)
class Ramp:
    """``initial + (final - initial) · shape(t)``, with t going from 0 at ``begin`` to 1 at ``end``.

    Made by `linear`, `cubic`, `cosine`, `exponential` and `constant`; a custom shape maps 0 to 0 and 1 to 1.

    >>> ramp = Ramp("square", lambda t: t * t, 0.8, 0.0, 0, 10)
    >>> [round(ramp(step), 3) for step in (0, 5, 10, 20)]
    [0.0, 0.2, 0.8, 0.8]
    """

    name: str
    shape: Callable[[float], float]
    final: float
    initial: float
    begin: Moment
    end: Moment

    def __call__(self, step: int) -> float:
        begin, end = self.begin, self.end
        if isinstance(begin, int) and isinstance(end, int):
            if step >= end:
                return self.final
            if step <= begin:
                return self.initial
            return self.initial + (self.final - self.initial) * self.shape((step - begin) / (end - begin))
        raise ValueError(_UNRESOLVED.format(self))

    def __str__(self) -> str:
        if self.end == 0:
            return f"{self.name} {self.final:g}"
        return f"{self.name} from {self.initial:g} to {self.final:g} between {self.begin} and {self.end}"

    @property
    def moments(self) -> tuple[int, ...]:
        """The steps at which the sparsity has to be brought about, whatever the interval of updates."""
        assert isinstance(self.begin, int)
        assert isinstance(self.end, int)
        return (self.begin, self.end) if self.initial else (self.end,)

    def resolved(self, total_steps: int | None, steps_per_epoch: float | None) -> Ramp:
        """The same ramp with ``begin`` and ``end`` in steps."""
        begin = step_of(self.begin, total_steps, steps_per_epoch)
        end = step_of(self.end, total_steps, steps_per_epoch)
        if end < begin:
            raise ValueError(f"{self}: begins at step {begin}, after its end at step {end}.")
        if end == 0 and self.end not in (0, "0st", "0ep"):
            end = 1  # a fraction of a short run: the target is reached by the first step and not before
        _refuse_beyond(str(self), end, total_steps)
        return replace(self, begin=begin, end=end)


@dataclass(frozen=True)
class Milestones:
    """The sparsity of the last milestone that is past; made by `milestones`.

    >>> steps = milestones({10: 0.5, 20: 0.8})
    >>> [steps(step) for step in (0, 10, 25)]
    [0.0, 0.5, 0.8]
    """

    points: tuple[tuple[Moment, float], ...]
    initial: float = 0.0

    def __call__(self, step: int) -> float:
        sparsity = self.initial
        for moment, value in self.points:
            if not isinstance(moment, int):
                raise ValueError(_UNRESOLVED.format(self))
            if step >= moment:
                sparsity = value
        return sparsity

    def __str__(self) -> str:
        return "milestones " + ", ".join(f"{sparsity:g} from {moment}" for moment, sparsity in self.points)

    @property
    def moments(self) -> tuple[int, ...]:
        """The steps at which the sparsity changes."""
        return tuple(moment for moment, _ in self.points if isinstance(moment, int))

    def resolved(self, total_steps: int | None, steps_per_epoch: float | None) -> Milestones:
        """The same milestones in steps; ``ValueError`` if they are then not in ascending order."""
        points = tuple((step_of(moment, total_steps, steps_per_epoch), value) for moment, value in self.points)
        if any(after[0] <= before[0] for before, after in itertools.pairwise(points)):
            raise ValueError(f"{self}: two milestones fall on one step, or are not in ascending order: {points}.")
        _refuse_beyond(str(self), points[-1][0], total_steps)
        return Milestones(points, self.initial)


def constant(final: float) -> Ramp:
    """``final`` at every step.

    >>> constant(0.9)(17)
    0.9
    """
    return _ramp("constant", _straight, final, final, 0, 0)


def linear(final: float, *, initial: float = 0.0, begin: Moment = 0, end: Moment) -> Ramp:
    """``initial + (final - initial) · t`` with t going from 0 at ``begin`` to 1 at ``end``.

    >>> linear(0.8, end=4)(1)
    0.2
    """
    return _ramp("linear", _straight, final, initial, begin, end)


def cubic(final: float, *, initial: float = 0.0, begin: Moment = 0, end: Moment) -> Ramp:
    """``final + (initial - final)(1 - t)³``: fast at first (Zhu & Gupta 2017, arXiv:1710.01878).

    >>> cubic(0.5, end=2)(1)
    0.4375
    >>> print(cubic(0.9, end=0.6))
    cubic from 0 to 0.9 between 0 and 0.6
    """
    return _ramp("cubic", _slowing, final, initial, begin, end)


def cosine(final: float, *, initial: float = 0.0, begin: Moment = 0, end: Moment) -> Ramp:
    """``initial + (final - initial)(1 - cos πt)/2``: slow at both ends.

    >>> round(cosine(0.8, end=4)(2), 3)
    0.4
    """
    return _ramp("cosine", _wave, final, initial, begin, end)


def exponential(final: float, *, initial: float = 0.0, begin: Moment = 0, end: Moment) -> Ramp:
    """``density(t) = density(0)^(1-t) · density(1)^t``: each step removes the same share of what is left.

    A target of 1 has no such share; ``ValueError``.

    >>> round(exponential(0.75, end=2)(1), 3)
    0.5
    """
    if final == 1:
        raise ValueError(
            "an exponential schedule never reaches sparsity 1: every step leaves a share; use cubic or linear."
        )

    return _ramp("exponential", _SameShare(final, initial), final, initial, begin, end)


def milestones(points: Mapping[Moment, float], *, initial: float = 0.0) -> Milestones:
    """``{moment: sparsity}``: the sparsity jumps at each moment and stays there until the next.

    >>> schedule = milestones({100: 0.5, 200: 0.8})
    >>> schedule(99), schedule(100), schedule(250)
    (0.0, 0.5, 0.8)
    """
    if not points:
        raise ValueError("milestones need at least one {moment: sparsity}.")
    for value in (initial, *points.values()):
        _check_sparsity("a milestone", value)
    made = Milestones(tuple((_moment(moment), value) for moment, value in points.items()), initial)
    return made.resolved(None, None) if all(isinstance(moment, int) for moment, _ in made.points) else made


def resolve(schedule: Schedule, *, total_steps: int | None = None, steps_per_epoch: float | None = None) -> Schedule:
    """The schedule in steps: fractions of ``total_steps``, epochs of ``steps_per_epoch``. Plain functions stay as is.

    Raises:
        ValueError: a length that is needed was not given, or the target would be reached after the end of the run.

    >>> resolve(cubic(0.9, end=0.6), total_steps=1000).end
    600
    """
    resolvable: Any = schedule
    return resolvable.resolved(total_steps, steps_per_epoch) if hasattr(schedule, "resolved") else schedule


def step_of(moment: Moment, total_steps: int | None, steps_per_epoch: float | None) -> int:
    """A moment in steps, rounded to the nearest.

    >>> step_of("2ep", None, 50), step_of(0.25, 1000, None), step_of("30st", None, None)
    (100, 250, 30)
    """
    _check_moment(moment)
    if isinstance(moment, str):
        steps, unit = float(moment[:-2]), moment[-2:]
        if unit == "ep":
            if steps_per_epoch is None:
                raise ValueError(f"{moment!r} is in epochs: pass steps_per_epoch=, such as len(loader).")
            steps *= steps_per_epoch
    elif not isinstance(moment, float):
        return int(moment)
    elif total_steps is None:
        raise ValueError(f"{moment} is a fraction of the run: pass total_steps=, the number of optimizer steps.")
    else:
        steps = moment * total_steps
    if not math.isfinite(steps):
        raise ValueError(
            f"{moment!r} of {total_steps=} and {steps_per_epoch=} is no number of steps; pass finite ones."
        )
    return round(steps)


def _straight(t: float) -> float:
    return t


def _slowing(t: float) -> float:
    return 1 - (1 - t) ** 3


def _wave(t: float) -> float:
    return (1 - math.cos(math.pi * t)) / 2


@dataclass(frozen=True)
class _SameShare:
    """The shape of `exponential`: a value, as every part of a schedule, so that it is compared and pickled."""

    final: float
    initial: float

    def __call__(self, t: float) -> float:
        if self.final == self.initial:
            return t
        density: float = (1 - self.initial) ** (1 - t) * (1 - self.final) ** t
        return (1 - density - self.initial) / (self.final - self.initial)


def _ramp(name: str, shape: Callable[[float], float], final: float, initial: float, begin: Moment, end: Moment) -> Ramp:
    _check_sparsity("final", final)
    _check_sparsity("initial", initial)
    begin, end = _moment(begin), _moment(end)
    if isinstance(begin, int) and isinstance(end, int) and end < begin:
        raise ValueError(f"a schedule runs from begin to end, 0 <= begin <= end; got {begin} and {end}.")
    return Ramp(name, shape, final, initial, begin, end)


def _check_sparsity(what: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{what} is a sparsity, a fraction removed in [0, 1]; got {value}.")


def _moment(moment: Moment) -> Moment:
    """Checked; integers of numpy and torch become Python's."""
    _check_moment(moment)
    return moment if isinstance(moment, float | str) else int(moment)


def _check_moment(moment: Any) -> None:
    if isinstance(moment, str):
        right = bool(re.fullmatch(r"\d+(\.\d+)?(ep|st)", moment))
    elif isinstance(moment, float):
        right = 0 <= moment <= 1
    else:
        right = hasattr(moment, "__index__") and not isinstance(moment, bool) and moment >= 0
    if not right:
        raise ValueError(
            f"a moment is a step >= 0 (an int), a fraction of the run (a float in [0, 1]), '12ep' or '3000st'; "
            f"got {moment!r}. A schedule runs from begin to end, 0 <= begin <= end."
        )


def _refuse_beyond(schedule: str, end: int, total_steps: int | None) -> None:
    if total_steps is not None and end > total_steps:
        raise ValueError(
            f"{schedule}: the target is reached at step {end}, but the run ends after {total_steps} optimizer steps; "
            "let the schedule end earlier."
        )
