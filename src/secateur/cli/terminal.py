"""What the commands share: results as tables on stdout, one line on stderr for what the user can mend.

Law: in a pipe a line is a row and colours are gone; whatever is wrong with the input ends in exit code 2.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from secateur.support import PATIENCE, printable

__all__ = ["clear_errors", "fail", "printing", "table_of", "terminable", "waiting"]


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """What the user can mend becomes one line on stderr and exit code 2; ``SECATEUR_DEBUG=1`` shows the traceback."""
    if os.environ.get("SECATEUR_DEBUG") == "1":
        yield
        return
    try:
        yield
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except OSError as error:
        file = error.filename2 or error.filename  # of a copy, the place that it was to go to
        where = f"{file}: " if file else ""
        raise fail(f"{where}{error.strerror or error}.") from None
    except (ValueError, ImportError) as error:
        raise fail(str(error)) from None
    except MemoryError:
        raise fail("not enough memory for the largest tensor and its scores.") from None
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise fail("not enough memory for the largest tensor and its scores.") from None
    except KeyboardInterrupt:
        raise fail("interrupted; nothing was written.", code=130) from None


def fail(message: str, code: int = 2) -> typer.Exit:
    lines = " ".join(line.strip() for line in message.splitlines())
    print(f"secateur: {printable(lines, 2000)}", file=sys.stderr)
    return typer.Exit(code)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP end the work as Ctrl-C does, so that temporary files are removed."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    names = ("SIGTERM", "SIGHUP")
    previous: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # not in the main thread
        for name in names:
            if hasattr(signal, name):
                number = getattr(signal, name)
                previous[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says on a terminal's stderr what the wait is for, and how long it has lasted, after two seconds."""
    before = os.environ.get("SECATEUR_PROGRESS")
    if before == "0" or not sys.stderr.isatty():
        yield
        return
    os.environ["SECATEUR_PROGRESS"] = "0"  # the bars of what is called would be drawn over this one
    bar = Progress(SpinnerColumn(), TextColumn(what), TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    bar.add_task(what, total=None)
    timer = threading.Timer(PATIENCE, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
        del os.environ["SECATEUR_PROGRESS"]
        if before is not None:
            os.environ["SECATEUR_PROGRESS"] = before


def console() -> Console:
    # In a pipe a line is a tensor, for grep; on a terminal long names fold.
    return Console(width=None if sys.stdout.isatty() else 10_000, highlight=False, emoji=False)


def table_of(*columns: str) -> Table:
    """A table without lines. A column of numbers is named ``">Size"``, one of words that may fold ``"~Group"``."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(
            column.lstrip(">~"),
            justify="right" if column.startswith(">") else "left",
            no_wrap=not column.startswith("~"),
            overflow="fold",
        )
    return table


@contextlib.contextmanager
def printing() -> Iterator[Console]:
    """A console; in a pipe its lines end where their text ends."""
    where = console()
    if where.is_terminal:
        yield where
        return
    with where.capture() as captured:
        yield where
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
