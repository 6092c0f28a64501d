"""The time of what is compared, as the library measures it (`secateur.support.alternating`), and what a peer asks for.

Law: a ratio is the median of the rounds' ratios, so that what slows the machine for a while slows both of its sides.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from secateur.support import in_turns, ratio, ratios, seconds_of

__all__ = ["alternating", "ratio", "ratios", "timed"]

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
    mean = functools.partial(seconds_of, clock=CLOCKS[clock])

    def turn(name: Name) -> float:
        call, count = calls[name], repeats if isinstance(repeats, int) else repeats[name]
        if settle:
            time.sleep(0.02)
            mean(call, at_least=settle)
        if middle:
            return statistics.median(mean(call) for _ in range(count))
        return mean(call, repeats=count, at_least=at_least)

    turns = {name: functools.partial(turn, name) for name in calls}
    return in_turns(turns, rounds, warm_up=warm_up, rotate=rotate, told=told)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and what it returned."""
    started = time.perf_counter()
    returned = call()
    return time.perf_counter() - started, returned
