"""A progress bar that appears only when the wait is long enough to ask what is going on.

Law: it writes to stderr, only when stderr is a terminal, and only after two seconds of work.
"""

import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Sized
from typing import TypeVar

__all__ = ["track"]

T = TypeVar("T")

PATIENCE = 2.0  # seconds of silence

_showing = threading.Lock()  # one bar at a time: an inner loop stays silent while an outer one is shown


def track(iterable: Iterable[T], description: str, total: float | None = None) -> Generator[T, None, None]:
    """The same items, with a bar on stderr once the work on them has lasted 2 seconds.

    Silent where stderr is no terminal, where the environment has ``SECATEUR_PROGRESS=0``, and inside a loop whose own
    bar is already shown. ``total`` is the number of items; ``len(iterable)`` where it is not given. Closing the
    iterator, or an exception in the loop's body, removes the bar.

    >>> [n * n for n in track(range(4), "squaring")]
    [0, 1, 4, 9]
    """
    if os.environ.get("SECATEUR_PROGRESS") == "0" or not _is_terminal():
        yield from iterable
        return
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    bar: Progress | None = None
    task = TaskID(0)
    started = time.monotonic()
    try:
        for done, item in enumerate(iterable):
            if bar is not None:
                bar.update(task, completed=done)
            elif time.monotonic() - started >= PATIENCE and _showing.acquire(blocking=False):
                columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
                bar = Progress(*columns, console=Console(stderr=True), transient=True)
                task = bar.add_task(description, total=total, completed=done)
                bar.start()
            yield item
    finally:
        if bar is not None:
            bar.stop()
            _showing.release()


def _is_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
