"""The machine: its name, its free memory, and the time of what is compared, in turns."""

from __future__ import annotations

import functools
import platform
import re
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from secateur.support.progress import track

# ---- The machine that something was measured on.
#
# Law: neither host name nor path.


def processor() -> str:
    """The name of the processor, or "unknown".

    >>> bool(processor())
    True
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or "unknown"


# ---- How much memory is free to this process.
#
# Law: the least of what the machine, the container and the process's own limit leave; None where none of them says
# it.


def free_memory(device: torch.device | None = None) -> int | None:
    """Bytes that are free: on a CUDA device its own; else the least of MemAvailable, of what the control group's limit
    leaves, and of what RLIMIT_AS (``ulimit -v``) leaves.

    >>> (free_memory() or 1) > 0
    True
    """
    if device is not None and device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    known = [each for each in (_of_machine(), _of_group(), _of_process()) if each is not None]
    return max(0, min(known)) if known else None


def devices_in_use() -> tuple[str, list[int]]:
    """The kind of device beside the CPU, and the numbers of those there are; none until one of them has been used: to
    set up a GPU takes memory on each of them, and processes cannot be forked any more."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return "cuda", []
    of_kind = torch.get_device_module(found)
    in_use = getattr(of_kind, "is_initialized", torch.accelerator.is_available)()
    return found.type, [*range(torch.accelerator.device_count())] if in_use else []


def accelerator() -> str:
    """What the device beside the CPU is called: its name where it is a GPU, else its kind; or "none"."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    found = torch.accelerator.current_accelerator()  # which one torch was built for
    return found.type if found is not None and torch.accelerator.is_available() else "none"


def _wait_for_devices() -> None:
    """Calls of a device return before it is done."""
    for number in devices_in_use()[1]:
        torch.accelerator.synchronize(number)


def _of_machine() -> int | None:
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _of_group() -> int | None:
    """Of the control group, version 2 or 1; file pages that are not in use count as free."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = _text(limit).strip(), _text(used).strip()
        if most.isdigit() and now.isdigit():
            stat = _text(str(Path(limit).with_name("memory.stat")))
            idle = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
            return int(most) - int(now) + (int(idle[1]) if idle else 0)
    return None


def _of_process() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = _text("/proc/self/statm").split()
    if limit == resource.RLIM_INFINITY or not pages:
        return None
    return limit - int(pages[0]) * resource.getpagesize()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---- The time of what is compared: in one process, taking turns, round after round.
#
# Law: a ratio is the median of the rounds' ratios, so that what slows the machine for a while slows both of its
# sides.

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
    clock: Clock = time.perf_counter,
    told: str | None = None,
) -> dict[Name, list[float]]:
    """Seconds of one call of each, in each of the rounds; one round before them warms up and does not count. Devices
    whose calls return before they are done are waited for.

    Args:
        repeats: calls of a turn, which counts as their mean.
        at_least: seconds of a turn, which are filled with more calls.
        seconds: of all rounds together, which are filled with more rounds, up to 200.
        told: what a line of progress says is going on; without it there is none.

    >>> times = alternating({"sum": lambda: sum(range(100)), "max": lambda: max(range(100))}, 3)
    >>> {name: len(rounds) for name, rounds in times.items()}
    {'sum': 3, 'max': 3}
    """
    of_each = {"repeats": repeats, "at_least": at_least, "finish": _wait_for_devices, "clock": clock}
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
    """The speedup of ours over theirs in each round; what a clock did not see took a nanosecond.

    >>> ratios([1.0, 0.0], [2.0, 0.0])
    [2.0, 1.0]
    """
    return [max(theirs, 1e-9) / max(own, 1e-9) for own, theirs in zip(ours, rival, strict=True)]


def ratio(ours: list[float], rival: list[float]) -> float:
    """The median speedup of ours over theirs.

    >>> ratio([1.0, 1.0, 9.0], [2.0, 2.0, 18.0])  # the machine was busy in the third round
    2.0
    """
    return statistics.median(ratios(ours, rival))
