"""What the commands share: results as tables on stdout, one line on stderr for what the user can mend. A run over
calibration text, whatever it does to the model: its processes, its text, its warnings, its end.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from secateur.report import Timed
    from secateur.support import Part


# ---- What the commands share: results as tables on stdout, one line on stderr for what the user can mend.
#
# Law: in a pipe a line is a row and colours are gone; whatever is wrong with the input ends in exit code 2. Nothing
# of the library is imported before it is used, so that help is there at once.

_PATIENCE = 30.0  # seconds until a further process of torchrun says what is wrong


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
    from secateur.support import printable

    lines = " ".join(line.strip() for line in message.splitlines())
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0":
        time.sleep(_PATIENCE)  # if the first process fails, too, torchrun ends this one before it says so again
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
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from secateur.support import PATIENCE

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


class Asked:
    """What a command was asked: the values of its options, as attributes; ``--no-repair`` is ``repair``, False."""

    def __init__(self, command: str, subject: str, options: Mapping[str, Any]) -> None:
        self.command, self.subject = command, str(options[subject]) if subject else ""
        self._subject, self._options = subject, dict(options)

    def __getattr__(self, name: str) -> Any:
        if name in self._options:
            value = self._options[name]
            return value or None if isinstance(value, list) else value
        if f"no_{name}" in self._options:
            return not self._options[f"no_{name}"]
        raise AttributeError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._options[name] = value

    def only(self, *names: str) -> dict[str, Any]:
        """These of them, as a verb takes them."""
        return {name: getattr(self, name) for name in names}

    @property
    def said(self) -> dict[str, Any]:
        """``{option: value}`` as JSON has it, of all that was asked, or is meant if nothing else is said."""
        found: dict[str, Any] = {}
        for name in self._options:
            value = getattr(self, name)
            if name in (self._subject, "as_json", "report", "verbose") or value is None or value is False:
                continue
            if isinstance(value, list):
                value = [str(each) if isinstance(each, Path) else each for each in value]
            found[_WORDS.get(name, name.replace("_", "-"))] = str(value) if isinstance(value, Path) else value
        return found

    def line(self, **more: Any) -> str:
        """What a shell would have to be given to do it again."""
        return command_line(self.command, *[self.subject] * bool(self.subject), **self.said, **more)

    def recorded(self) -> contextlib.AbstractContextManager[None]:
        """In it, ``secateur.json`` says how the command was called."""
        from secateur.checkpoints import called_as

        return called_as({"command": self.line(), "directory": self.subject, **self.said})


_WORDS = {"shares": "share", "keep_share": "keep", "sparsities": "sparsity", "patterns": "pattern", "texts": "data"}


def command_line(verb: str, *arguments: object, **options: Any) -> str:
    """What a shell would have to be given to do it again; options that are None or False are left out.

    >>> command_line("prune", "my model", sparsity=0.5, pattern=None, round_to=8, exclude=["*.0", "*.1"], zstd=True)
    "secateur prune 'my model' --sparsity 0.5 --round-to 8 --exclude '*.0' --exclude '*.1' --zstd"
    """
    words = ["secateur", verb, *map(str, arguments)]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one is not False:
                words += [option] if one is True else [option, str(one)]
    return shlex.join(words)


def answering(body: Callable[[Asked], Iterator[Any]], asked: Asked) -> None:
    """Runs a command: what it yields is printed, or is the JSON on stdout, and stands on the page."""
    from secateur.checkpoints import logged_in_the_end

    with clear_errors(), terminable(), logged_in_the_end():
        started = time.monotonic()
        if asked.report is not None:
            if not asked.subject:
                raise ValueError(f"{asked.command} writes a page of its own; leave --report out.")
            from secateur.report import check_page

            page: Path = asked.report
            inside = asked.command == "deploy" and page.parent == asked.out  # what it writes may have its page
            check_page(asked.out.parent / page.name if inside else page)
        for found in body(asked):
            answer = found if isinstance(found, Answer) else Answer(found)
            if int(os.environ.get("RANK", "0")) == 0:  # of several processes one speaks
                _tell(answer, asked, started)


@dataclass(frozen=True)
class Answer:
    """What a command says: a result, and what it does not know.

    Attributes:
        done: the result.
        printed: in place of the result's own summary.
        more: lines behind it.
        title: of the page, behind what it is about.
        timed: measures for a page what the model took and takes; by default of directories.
    """

    done: Any
    printed: Iterable[Part] | None = None
    more: Sequence[str] = ()
    title: str = ""
    timed: Callable[[], Timed | str] | None = None


def _tell(answer: Answer, asked: Asked, started: float) -> None:
    from secateur.support import printable

    done = answer.done
    if asked.as_json:
        found = done.json()
        found["said"] += [line for line in answer.more if line]
        print(json.dumps(found, indent=1, allow_nan=False), flush=True)
    else:
        printed = done.summary() if answer.printed is None else answer.printed
        show([*(done.content() if asked.verbose else printed), *answer.more])
    if asked.report is None:
        return
    from secateur.report import Account, write_account

    seconds = time.monotonic() - started
    parts: list[Part] = [*done.content(), *answer.more]
    out, timed = getattr(done, "out", None), answer.timed
    if (
        timed is None
        and out is not None
        and Path(asked.subject).is_dir()
        and asked.command not in ("compress", "expand", "deploy")
    ):
        from secateur.cli.measuring import timed_directories

        timed = functools.partial(timed_directories, Path(asked.subject), out)
    if timed is not None:
        measured = timed()
        parts = [*parts, "", measured] if isinstance(measured, str) else [measured.table(), *parts, "", measured.line()]
    title = printable(f"{asked.subject}{answer.title}")
    write_account(Account(title, asked.line(report=asked.report), asked.said, parts, seconds), asked.report)
    print(f"The report is in {printable(str(asked.report))}.", file=sys.stderr)


def console() -> Console:
    from rich.console import Console

    # In a pipe a line is a tensor, for grep; on a terminal long names fold. What is printed may come from files.
    width = None if sys.stdout.isatty() else 10_000
    return Console(width=width, highlight=False, emoji=False, markup=False)


@contextlib.contextmanager
def printing() -> Iterator[Console]:
    """A console on which nothing is markup; in a pipe its lines end where their text ends."""
    where = console()
    if where.is_terminal:
        yield where
        return
    with where.capture() as captured:
        yield where
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    sys.stdout.flush()


def show(parts: Iterable[Part]) -> None:
    """Prints what a verb says that it did, all of it at once: lines and tables."""
    with printing() as console:
        for part in parts:
            if isinstance(part, str):
                console.print(part, soft_wrap=not console.is_terminal)
            else:
                console.print(part.rich())


def lines_of(done: Any) -> Iterator[Part]:
    """What a result says without its tables, whose rows were said one by one as they came."""
    lines = [part for part in done.summary() if isinstance(part, str)]
    yield from lines[next((at for at, line in enumerate(lines) if line), 0) :]


def memory() -> str:
    """The most memory that this process has had, where the system says so."""
    try:
        import resource
    except ImportError:  # Windows
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f", {peak * (1 if sys.platform == 'darwin' else 1024) / 1e9:.2f} GB"


# ---- A run over calibration text, whatever it does to the model: its processes, its text, its warnings, its end.
#
# Law: what is wrong is one line on stderr, and of several processes one speaks.


def read_data(asked: Asked, model: Any = None) -> list[Any]:
    """The batches of ``--data``, for the model if it is no directory; a directory without a model is reported before a
    missing tokenizer."""
    from secateur.checkpoints import family_of, open_checkpoint
    from secateur.cli.measuring import batches_of
    from secateur.models import read_calibration, read_pictures

    directory = Path(asked.subject)
    if model is None:
        family_of(open_checkpoint(directory))
    named = ":" in asked.data and "=" not in asked.data
    with warnings_as_lines():
        if not Path(asked.data).exists() and (named or model is not None):
            return batches_of(asked.data, asked.samples)
        if model is not None:
            if Path(asked.data).is_file():
                raise ValueError(
                    f"{asked.data}: a text needs a tokenizer, which only a directory has; give module:batches."
                )
            return read_pictures(asked.data, model, **asked.only("samples", "seed"))
        return read_calibration(
            asked.data, tokenizer_directory=directory, **asked.only("samples", "sequence_length", "seed")
        )


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """A warning is one line on stderr, at once, without the place in the code, which is not the reader's."""
    from secateur.support import printable

    def show(message: Warning | str, *_: object) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"Warning: {printable(str(message), 400)}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show  # type: ignore[assignment]
        yield


@contextlib.contextmanager
def resumable(goes_on: bool = True) -> Iterator[None]:
    """Says, where a run is interrupted, that the same command goes on, if it does."""
    try:
        yield
    except KeyboardInterrupt:
        if not goes_on:
            raise
        raise fail("interrupted; run the same command again to go on.", code=130) from None


def one_process(verb: str) -> None:
    """Under torchrun an error, of a verb that shares nothing out: each process would find the others at work."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise fail(f"{verb} runs in one process; start it without torchrun.")


def join_processes(device: str | None) -> None:
    """Under torchrun, every process joins the others, and waits for what one of them does as long as it takes."""
    import datetime

    import torch
    from torch import distributed

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and distributed.is_available() and not distributed.is_initialized():
        on_device = device is not None and torch.device(device).type == "cuda"
        if on_device:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            distributed.init_process_group("nccl")
        else:  # whose connections say at once that a process died
            distributed.init_process_group("gloo", timeout=datetime.timedelta(days=7))
