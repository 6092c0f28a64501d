"""A progress bar that appears only when the wait is long enough to ask what is going on.

Law: it is shown on a terminal's stderr or below the cell of a notebook, nowhere else, and only after two seconds of
work.
"""

import builtins
import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Sized
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

T = TypeVar("T")

PATIENCE = 2.0  # seconds of silence
FRAME = 0.1  # seconds between two pictures of a bar in a notebook

_showing = threading.Lock()  # one bar at a time: an inner loop stays silent while an outer one is shown


def track(iterable: Iterable[T], description: str, total: float | None = None) -> Generator[T, None, None]:
    """Yields the items, with a progress bar once the work on them has lasted 2 seconds: on stderr, or below a
    notebook's cell.

    Silent where stderr is no terminal, where the environment has ``SECATEUR_PROGRESS=0``, in torchrun's processes but
    the first, and inside a loop whose own bar is already shown. ``total`` is the number of items; ``len(iterable)``
    where it is not given. Closing the
    iterator, or an exception in the loop's body, removes the bar.

    >>> [n * n for n in track(range(4), "squaring")]
    [0, 1, 4, 9]
    """
    in_notebook = _is_notebook()
    silent = os.environ.get("SECATEUR_PROGRESS") == "0" or os.environ.get("RANK", "0") != "0"
    if silent or not (in_notebook or _is_terminal()):
        yield from iterable
        return
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)

    bar: _Bar | None = None
    started = time.monotonic()
    try:
        for done, item in enumerate(iterable):
            if bar is not None:
                bar.show(done)
            elif time.monotonic() - started >= PATIENCE and _showing.acquire(blocking=False):
                try:
                    bar = _InNotebook(description, total) if in_notebook else _OnTerminal(description, total)
                except BaseException:
                    _showing.release()
                    raise
                bar.show(done)
            yield item
    finally:
        if bar is not None:
            bar.stop()
            _showing.release()


class _Bar(Protocol):
    def show(self, done: int) -> None: ...

    def stop(self) -> None: ...


class _OnTerminal:
    def __init__(self, description: str, total: float | None) -> None:
        from rich.console import Console

        self._progress, self._task = _progress(Console(stderr=True), description, total)

    def show(self, done: int) -> None:
        self._progress.update(self._task, completed=done)
        self._progress.start()  # does nothing where it has started

    def stop(self) -> None:
        self._progress.stop()


class _InNotebook:
    """Pictures of the bar in an output of the cell, each in place of the last: rich's own way asks for ipywidgets."""

    def __init__(self, description: str, total: float | None) -> None:
        import io

        from rich.console import Console

        form: dict[str, Any] = {"force_terminal": True, "force_jupyter": False, "color_system": "truecolor"}
        self._console = Console(file=io.StringIO(), record=True, width=100, legacy_windows=False, **form)
        self._progress, self._task = _progress(self._console, description, total)
        self._output: Any = None
        self._shown = 0.0

    def show(self, done: int) -> None:
        self._progress.update(self._task, completed=done)
        if self._output is None or time.monotonic() - self._shown >= FRAME:
            self._console.print(self._progress.get_renderable())
            text = self._console.export_text(clear=False).rstrip()
            form = '<pre style="line-height:normal">{code}</pre>'
            self._put(text, self._console.export_html(inline_styles=True, code_format=form))
            self._shown = time.monotonic()

    def stop(self) -> None:
        self._put("", "")  # an output that was shown cannot be taken away, only emptied

    def _put(self, text: str, html: str) -> None:
        from IPython.display import display  # type: ignore[import-not-found]

        picture = {"text/plain": text, "text/html": html}
        if self._output is None:
            self._output = display(picture, raw=True, display_id=True)
        else:
            self._output.update(picture, raw=True)


def _progress(console: "Console", description: str, total: float | None) -> "tuple[Progress, TaskID]":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True)
    return progress, progress.add_task(description, total=total)


def _is_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


def _is_notebook() -> bool:
    """Whether a kernel runs this, as Jupyter's and Colab's do; IPython in a terminal has none."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
