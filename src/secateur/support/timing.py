"""The time of what is compared: in one process, taking turns, round after round.

Law: a ratio is the median of the rounds' ratios, so that what slows the machine for a while slows both of its sides.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

from secateur.support.progress import track

__all__ = ["alternating", "in_turns", "ratio", "ratios", "seconds_of"]

Name = TypeVar("Name", bound=Hashable)
Clock = Callable[[], float]

MOST_ROUNDS = 200  # of what is so fast that its seconds would be thousands of rounds


def alternating(
    calls: Mapping[Name, Callable[[], object]],
    rounds: int,
    *,
    repeats: int = 1,
    at_least: float = 0.0,
    seconds: float = 0.0,
    finish: Callable[[], object] | None = None,
    clock: Clock = time.perf_counter,
    told: str | None = None,
) -> dict[Name, list[float]]:
    """Seconds of one call of each, in each of the rounds; one round before them warms up and does not count.

    Args:
        repeats: calls of a turn, which counts as their mean.
        at_least: seconds of a turn, which are filled with more calls.
        seconds: of all rounds together, which are filled with more rounds, up to 200.
        finish: waits for a device whose calls return before it is done.
        told: what a line of progress says is going on; without it there is none.

    >>> times = alternating({"sum": lambda: sum(range(100)), "max": lambda: max(range(100))}, 3)
    >>> {name: len(rounds) for name, rounds in times.items()}
    {'sum': 3, 'max': 3}
    """
    of_each = {"repeats": repeats, "at_least": at_least, "finish": finish, "clock": clock}
    turns = {name: functools.partial(seconds_of, call, **of_each) for name, call in calls.items()}  # type: ignore[arg-type]
    return in_turns(turns, rounds, seconds=seconds, clock=clock, told=told)


def in_turns(
    turns: Mapping[Name, Callable[[], float]],
    rounds: int,
    *,
    warm_up: int = 1,
    seconds: float = 0.0,
    rotate: bool = False,
    clock: Clock = time.perf_counter,
    told: str | None = None,
) -> dict[Name, list[float]]:
    """The values that calls in turns return, for each of the rounds, as in `alternating`.

    Args:
        warm_up: rounds before those that count.
        rotate: Each round begins with another.
    """
    names = list(turns)
    times: dict[Name, list[float]] = {name: [] for name in names}
    numbers = _numbers(warm_up, rounds, seconds, clock)
    for number in numbers if told is None else track(numbers, told, None if seconds else warm_up + rounds):
        first = number % len(names) if rotate else 0
        for name in names[first:] + names[:first]:
            own = turns[name]()
            if number >= 0:
                times[name].append(own)
    return times


def _numbers(warm_up: int, rounds: int, seconds: float, clock: Clock) -> Iterator[int]:
    """Of the rounds; those that do not count are below 0."""
    yield from range(-warm_up, 0)
    started, number = clock(), 0
    while number < rounds or (number < MOST_ROUNDS and clock() - started < seconds):
        yield number
        number += 1


def seconds_of(
    call: Callable[[], object],
    *,
    repeats: int = 1,
    at_least: float = 0.0,
    finish: Callable[[], object] | None = None,
    clock: Clock = time.perf_counter,
) -> float:
    """Seconds of one call: the mean of one turn, as in `alternating`."""
    if finish is not None:
        finish()
    started, calls = clock(), 0
    while calls < repeats or (at_least and clock() - started < at_least):
        call()
        calls += 1
    if finish is not None:
        finish()
    return (clock() - started) / calls


def ratios(ours: list[float], rival: list[float]) -> list[float]:
    """The speedup of ours over theirs in each round."""
    return [theirs / own for own, theirs in zip(ours, rival, strict=True)]


def ratio(ours: list[float], rival: list[float]) -> float:
    """The median speedup of ours over theirs.

    >>> ratio([1.0, 1.0, 9.0], [2.0, 2.0, 18.0])  # the machine was busy in the third round
    2.0
    """
    return statistics.median(ratios(ours, rival))
