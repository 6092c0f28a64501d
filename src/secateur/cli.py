"""The ``secateur`` command: inspect a checkpoint, prune one, run the demo.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

import contextlib
import enum
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from secateur import allocation, criteria, patterns
from secateur.checkpoint_sparsification import RECORD, CheckpointSparsification, sparsify_checkpoint
from secateur.checkpoints import printable
from secateur.inspection import Inspection, TensorInspection, inspect_checkpoint
from secateur.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="secateur",
    help="Prune PyTorch checkpoints, and see what is in them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: paragraphs fill the line, and a pipe gets no boxes
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Allocate(enum.StrEnum):
    everywhere = "everywhere"
    uniform = "uniform"
    erk = "erk"


class Criterion(enum.StrEnum):
    magnitude = "magnitude"
    random = "random"
    lamp = "lamp"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 for success, 2 for wrong usage or data, 130 when interrupted."""
    app(args=None if arguments is None else list(arguments), prog_name="secateur")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"secateur {__version__}")
        raise typer.Exit


@app.callback()
def _secateur(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version


@app.command(short_help="Show the tensors of a checkpoint: sizes, zeros, patterns.")
def inspect(
    path: Annotated[
        Path, typer.Argument(help="A .safetensors file, a .safetensors.index.json, or a Hugging Face directory.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    group: Annotated[
        bool,
        typer.Option("--group", "-g", help="One line for tensors that differ only in numbers: layers.*.fc.weight."),
    ] = False,
) -> None:
    """Show each tensor's shape, dtype, size and zeros, and the n:m and block patterns that hold.

    Tensors are read in pieces: a file of any size takes little memory.
    """
    with _clear_errors():
        inspection = inspect_checkpoint(path)
        if as_json:
            sys.stdout.write(json.dumps(inspection.as_json(), indent=2) + "\n")
        else:
            with _printing() as console:
                _print_inspection(console, inspection, group)
        sys.stdout.flush()


@app.command(short_help="Write a pruned copy of a checkpoint directory.")
def prune(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with .safetensors files, such as Hugging Face's.")
    ],
    out: Annotated[Path, typer.Option(help="The directory to write. Must not exist.")],
    sparsity: Annotated[
        float | None, typer.Option("--sparsity", "-s", help="Fraction of the weights to remove, in [0, 1).")
    ] = None,
    pattern: Annotated[
        str,
        typer.Option("--pattern", "-p", help="unstructured, rows, 2:4 or any n:m, 16x1 or any block, channels."),
    ] = "unstructured",
    allocate: Annotated[
        Allocate | None,
        typer.Option(
            help="One threshold everywhere (default), the same share of each tensor, or erk, by the tensors' shapes."
        ),
    ] = None,
    criterion: Annotated[Criterion, typer.Option(help="What ranks the weights.")] = Criterion.magnitude,
    seed: Annotated[int, typer.Option(help="For the random criterion.")] = 0,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Prune the tensors of these names, and no others. Repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave these alone, whatever else is said. Repeatable.")
    ] = None,
) -> None:
    """Write a pruned copy of a checkpoint directory, without its model code.

    Embeddings, normalizations, output heads and routers are left alone unless you --include them. Everything but the
    removed weights is kept byte for byte. OUT appears complete or not at all.
    """
    with _clear_errors(), _terminable():
        chosen = patterns.parse(pattern)
        if chosen.density is not None and allocate is not None:
            raise ValueError(f"{pattern} keeps the same share of every tensor; leave --allocate out.")
        arguments = {
            "directory": str(directory),
            "out": str(out),
            "sparsity": sparsity,
            "pattern": pattern,
            "allocate": None if chosen.density is not None else str(allocate or Allocate.everywhere),
            "criterion": str(criterion),
            "seed": seed,
            "include": include or [],
            "exclude": exclude or [],
        }
        done = sparsify_checkpoint(
            directory,
            out,
            sparsity,
            pattern=chosen,
            criterion=getattr(criteria, criterion),
            allocate=getattr(allocation, allocate or Allocate.everywhere),
            include=include or (),
            exclude=exclude or (),
            seed=seed,
            arguments={"command": shlex.join(["secateur", *_words(arguments)]), **arguments},
        )
        with _printing() as console:
            _print_done(console, done)
        sys.stdout.flush()


@app.command(short_help="Train a small network, prune it, report what that cost.")
def demo(
    out: Annotated[Path | None, typer.Option(help="The directory for report.html.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Prune by this method; repeatable, or several with commas. list shows all."),
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Add what prunes while it trains: gradual and RigL.")] = False,
) -> None:
    """Train a small network on handwritten digits, prune it in many ways, and report what that cost and gained."""
    with _clear_errors():
        from secateur.demo import DEFAULT_METHODS, METHODS, run_demo

        if method and any("list" in name.split(",") for name in method):
            for name, each in METHODS.items():
                typer.echo(f"{name:<10} {'*' if name in DEFAULT_METHODS else ' '} {each.line}")
            typer.echo("\n* without --method")
            return
        run_demo(out, methods=method or None, training=train)


# -------------------------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
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
        raise _fail(f"{where}{error.strerror or error}.") from None
    except (ValueError, ImportError) as error:
        raise _fail(str(error)) from None
    except MemoryError:
        raise _fail("not enough memory for the largest tensor and its scores.") from None
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise _fail("not enough memory for the largest tensor and its scores.") from None
    except KeyboardInterrupt:
        raise _fail("interrupted; nothing was written.", code=130) from None


def _fail(message: str, code: int = 2) -> typer.Exit:
    lines = " ".join(line.strip() for line in message.splitlines())
    print(f"secateur: {printable(lines, 2000)}", file=sys.stderr)
    return typer.Exit(code)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
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


# ------------------------------------------------------------------------------------------------------- printing


def _console() -> Console:
    # In a pipe a line is a tensor, for grep; on a terminal long names fold.
    return Console(width=None if sys.stdout.isatty() else 10_000, highlight=False, emoji=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        right = column in ("Size", "Zeros", "Tensors", "Parameters", "Files")
        table.add_column(
            column,
            justify="right" if right else "left",
            no_wrap=column not in ("Tensor", "Patterns", "such as"),
            overflow="fold",
        )
    return table


@contextlib.contextmanager
def _printing() -> Iterator[Console]:
    console = _console()
    if console.is_terminal:
        yield console
        return
    with console.capture() as captured:
        yield console
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _print_inspection(console: Console, inspection: Inspection, group: bool) -> None:
    columns = ("Tensor", "Shape", "Dtype", "Size", "Zeros", "Patterns")
    table = _table(*columns)
    rows = [_row(name, members) for name, members in _grouped(inspection.tensors, group)]
    others = sum(max(map(len, cells)) + 2 for cells in list(zip(columns, *rows, strict=True))[1:])
    for name, *cells in rows:
        table.add_row(Text(_folded(name, console.width - others)), *cells)
    console.print(table)
    console.print()
    totals = _table("Total", "Tensors", "Parameters", "Size", "Zeros")
    dtypes = list(inspection.by_dtype.items())
    for dtype, total in [*dtypes, ("all", inspection.total())] if len(dtypes) != 1 else dtypes:
        totals.add_row(
            dtype,
            f"{total.tensors:,}",
            f"{total.parameters:,}",
            _bytes(total.nbytes),
            _percent(total.sparsity) if total.counted or not total.parameters else "?",
        )
    console.print(totals)
    files = len(inspection.files)
    where = inspection.files[0] if files == 1 else f"{files} files"
    console.print(f"\n[bold]{escape(printable(str(inspection.path)))}[/bold]: {escape(printable(where))}")


def _row(name: str, members: Sequence[TensorInspection]) -> tuple[str, ...]:
    first = members[0]
    return (
        printable(name, 1000),
        "x".join(map(str, first.shape)) or "scalar",
        first.dtype,
        _bytes(sum(tensor.nbytes for tensor in members)),
        _range([tensor.sparsity for tensor in members], opaque=first.zeros is None),
        first.pattern + (" (stored inputs first)" if first.inputs_first and first.pattern else ""),
    )


def _folded(name: str, width: int) -> str:
    """The name in lines of at most ``width``, or 20, characters, broken after dots; the later lines are indented.

    >>> print(_folded("encoder.layer.0.attention.self.query.weight", 30))
    encoder.layer.0.attention.
      self.query.weight
    """
    width = max(width, 20)
    lines = [""]
    for part in re.findall(r"[^.]*\.|[^.]+$", name):
        if lines[-1].strip() and len(lines[-1]) + len(part) > width:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def _grouped(tensors: Sequence[TensorInspection], group: bool) -> Iterator[tuple[str, list[TensorInspection]]]:
    if not group:
        yield from ((tensor.name, [tensor]) for tensor in tensors)
        return
    groups: dict[tuple[Any, ...], list[TensorInspection]] = {}
    for tensor in tensors:
        key = (re.sub("[0-9]+", "*", tensor.name), tensor.shape, tensor.dtype, tensor.pattern)
        groups.setdefault(key, []).append(tensor)
    for key, members in groups.items():
        yield (f"{key[0]} (x{len(members)})" if len(members) > 1 else members[0].name), members


def _print_done(console: Console, done: CheckpointSparsification) -> None:
    total = done.inspection.total()
    chosen = set(done.targets)
    count = sum(tensor.numel for tensor in done.inspection.tensors if tensor.name in chosen)
    table = _table("", "Tensors", "Parameters", "Zeros")
    table.add_row("pruned", f"{len(done.targets):,}", f"{count:,}", _percent(done.target_sparsity))
    table.add_row("whole model", f"{total.tensors:,}", f"{total.parameters:,}", _percent(total.sparsity))
    console.print(table)
    pruned = sorted((tensor for tensor in done.inspection.tensors if tensor.name in chosen), key=_sparsity)
    least, most = pruned[0], pruned[-1]
    if _percent(least.sparsity) != _percent(most.sparsity):
        console.print(
            f"\nFrom {_percent(least.sparsity)} ({escape(printable(least.name))}) to {_percent(most.sparsity)} "
            f"({escape(printable(most.name))}).",
            soft_wrap=not console.is_terminal,
        )
    sizes = {tensor.name: tensor.numel for tensor in done.inspection.tensors}
    if done.left_alone:
        console.print("\n[bold]Left alone[/bold]")
        left = _table("", "Tensors", "Parameters", "such as")
        for reason, names in done.left_alone.items():
            parameters = sum(sizes[name] for name in names)
            largest = max(names, key=lambda name: sizes[name])
            left.add_row(escape(reason), f"{len(names):,}", f"{parameters:,}", Text(printable(largest)))
        console.print(left)
    if done.stale:
        files = ", ".join(printable(str(path)) for path in done.stale[:4])
        more = f" and {len(done.stale) - 4} more" if len(done.stale) > 4 else ""
        console.print(f"\nCopied as they were, not pruned: {escape(files)}{more}.", soft_wrap=not console.is_terminal)
    console.print(
        f"\nWrote {escape(printable(str(done.out)))} ({_bytes(total.nbytes)} of weights, {done.seconds:.1f} s); "
        f"{RECORD} in it says what was done. The zeros are stored like other numbers: by themselves they make the "
        "files no smaller and the model no faster.",
        soft_wrap=not console.is_terminal,
    )


def _sparsity(tensor: TensorInspection) -> float:
    return tensor.sparsity or 0.0


def _words(arguments: dict[str, Any]) -> Iterator[str]:
    yield "prune"
    yield arguments["directory"]
    for name, value in arguments.items():
        if name == "directory" or value is None:
            continue
        for one in value if isinstance(value, list) else [value]:
            yield from (f"--{name}", str(one))


def _bytes(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{size:.3g} {unit}"
    return f"{size / 1000:.3g} TB"


def _percent(fraction: float | None) -> str:
    """A share that reads 0% or 100% only where it is.

    >>> [_percent(share) for share in (0.0, 1e-6, 0.5, 0.99999, 1.0, None)]
    ['0%', '<0.1%', '50.0%', '>99.9%', '100%', '-']
    """
    if fraction is None:
        return "-"
    if fraction in (0, 1):
        return f"{fraction:.0%}"
    if fraction < 0.001:
        return "<0.1%"
    return ">99.9%" if fraction > 0.999 else f"{fraction:.1%}"


def _range(fractions: list[float | None], *, opaque: bool) -> str:
    if opaque:
        return "?"
    known = [fraction for fraction in fractions if fraction is not None]
    if not known:
        return "-"
    low, high = _percent(min(known)), _percent(max(known))
    return low if low == high else f"{low} to {high}"
