"""How sparse at which step: functions ``step -> sparsity``, made by functions of the target.

Law: a schedule starts at ``initial``, never decreases towards a higher target, and **is** the target from ``end`` on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["Schedule", "constant", "cosine", "cubic", "exponential", "linear"]

Schedule = Callable[[int], float]


def constant(final: float) -> Schedule:
    """``final`` at every step.

    >>> constant(0.9)(17)
    0.9
    """
    _check(final, 0.0, 0, 1)
    return lambda _step: final


def linear(final: float, *, initial: float = 0.0, begin: int = 0, end: int) -> Schedule:
    """``initial + (final - initial) · t`` with t going from 0 at ``begin`` to 1 at ``end``.

    >>> linear(0.8, end=4)(1)
    0.2
    """
    return _ramp(lambda t: t, final, initial, begin, end)


def cubic(final: float, *, initial: float = 0.0, begin: int = 0, end: int) -> Schedule:
    """``final + (initial - final)(1 - t)³``: fast at first (Zhu & Gupta 2017, arXiv:1710.01878).

    >>> cubic(0.5, end=2)(1)
    0.4375
    """
    return _ramp(lambda t: 1 - (1 - t) ** 3, final, initial, begin, end)


def cosine(final: float, *, initial: float = 0.0, begin: int = 0, end: int) -> Schedule:
    """``initial + (final - initial)(1 - cos πt)/2``: slow at both ends.

    >>> round(cosine(0.8, end=4)(2), 3)
    0.4
    """
    return _ramp(lambda t: (1 - math.cos(math.pi * t)) / 2, final, initial, begin, end)


def exponential(final: float, *, initial: float = 0.0, begin: int = 0, end: int) -> Schedule:
    """``density(t) = density(0)^(1-t) · density(1)^t``: each step removes the same share of what is left.

    A target of 1 has no such share; ``ValueError``.

    >>> round(exponential(0.75, end=2)(1), 3)
    0.5
    """
    if final == 1:
        raise ValueError(
            "an exponential schedule never reaches sparsity 1: every step leaves a share; use cubic or linear."
        )
    _check(final, initial, begin, end)
    if final == initial:
        return constant(final)

    def progress(t: float) -> float:
        density: float = (1 - initial) ** (1 - t) * (1 - final) ** t
        return (1 - density - initial) / (final - initial)

    return _ramp(progress, final, initial, begin, end)


def _ramp(progress: Callable[[float], float], final: float, initial: float, begin: int, end: int) -> Schedule:
    _check(final, initial, begin, end)

    def schedule(step: int) -> float:
        if step >= end:
            return final
        if step <= begin:
            return initial
        return initial + (final - initial) * progress((step - begin) / (end - begin))

    return schedule


def _check(final: float, initial: float, begin: int, end: int) -> None:
    for name, value in (("final", final), ("initial", initial)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is a sparsity, a fraction removed in [0, 1]; got {value}.")
    if begin < 0 or end < begin:
        raise ValueError(f"a schedule runs from begin to end, 0 <= begin <= end; got {begin} and {end}.")
