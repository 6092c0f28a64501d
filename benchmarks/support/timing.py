"""The time of what is compared: in one process, taking turns, round after round.

Law: a ratio is the median of the rounds' ratios, so that what slows the machine for a while slows both of its sides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from secateur.support import track

Name = TypeVar("Name", bound=Hashable)
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def alternating(
    calls: Mapping[Name, Callable[[], object]],
    rounds: int,
    *,
    clock: str = "wall",
    warm_up: int = 1,
    repeats: int | Mapping[Name, int] = 1,
    at_least: float = 0.0,
    settle: float = 0.0,
    middle: bool = False,
    rotate: bool = False,
    told: str | None = None,
) -> dict[Name, list[float]]:
    """Seconds of one call of each, in each of the rounds.

    Args:
        clock: "wall", or "cpu" for the processor time of this process, steadier on a busy machine.
        warm_up: rounds before those that count.
        repeats: calls of a turn; one number for all, or one for each.
        at_least: seconds of a turn, which are filled with more calls.
        settle: Threads of the runtime before go on looking for work for a while after their call, and those of this one
            may wake on one core and be parted only later. So each is waited for, and calls count after so many seconds
            of others.
        middle: A turn counts as the median of its calls; else as their mean.
        rotate: Each round begins with another.
        told: what a line of progress says is going on; without it there is none.
    """
    now = CLOCKS[clock]
    names = list(calls)
    times: dict[Name, list[float]] = {name: [] for name in names}
    every = range(warm_up + rounds)
    for number in every if told is None else track(every, told):
        turn = (number - warm_up) % len(names) if rotate else 0
        for name in names[turn:] + names[:turn]:
            count = repeats if isinstance(repeats, int) else repeats[name]
            if settle:
                time.sleep(0.02)
                _mean(calls[name], now, 1, settle)
            if middle:
                seconds = statistics.median(_mean(calls[name], now, 1, 0.0) for _ in range(count))
            else:
                seconds = _mean(calls[name], now, count, at_least)
            if number >= warm_up:
                times[name].append(seconds)
    return times


def _mean(call: Callable[[], object], now: Callable[[], float], count: int, at_least: float) -> float:
    started, calls = now(), 0
    while calls < count or (at_least and now() - started < at_least):
        call()
        calls += 1
    return (now() - started) / calls


def ratios(ours: list[float], rival: list[float]) -> list[float]:
    """How many times faster ours is, in each round."""
    return [theirs / own for own, theirs in zip(ours, rival, strict=True)]


def ratio(ours: list[float], rival: list[float]) -> float:
    """How many times faster ours is."""
    return statistics.median(ratios(ours, rival))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and what it returned."""
    started = time.perf_counter()
    returned = call()
    return time.perf_counter() - started, returned
