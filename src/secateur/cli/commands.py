"""The ``secateur`` command: checkpoints inspected, pruned and verified, the demo; and the commands of other files.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from secateur import allocation, criteria, native
from secateur.checkpoints import (
    RECORD,
    CheckpointSparsification,
    Inspection,
    TensorInspection,
    Verification,
    inspect_checkpoint,
    sparsify_checkpoint,
    verify_checkpoint,
)
from secateur.cli.bench import bench
from secateur.cli.oneshot import oneshot
from secateur.cli.shrink import shrink
from secateur.cli.storage import compress, expand
from secateur.cli.terminal import clear_errors, printing, table_of, terminable
from secateur.evidence import needs
from secateur.patterns import word_of
from secateur.support import bytes_text, percent, percents, printable
from secateur.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="secateur",
    help="Prune PyTorch models and checkpoints, and see what is in them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: paragraphs fill the line, and a pipe gets no boxes
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 for success, 2 for wrong usage or data, 130 when interrupted."""
    app(args=None if arguments is None else list(arguments), prog_name="secateur")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"secateur {__version__}\n{native.describe()}")
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
    with clear_errors():
        inspection = inspect_checkpoint(path)
        if as_json:
            sys.stdout.write(json.dumps(inspection.as_json(), indent=2) + "\n")
        else:
            with printing() as console:
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
        str | None,
        typer.Option(
            "--pattern",
            "-p",
            help="unstructured (default), rows, 2:4 or any n:m, 16x1 or any block, columns:64, channels.",
        ),
    ] = None,
    allocate: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="One threshold everywhere (default), uniform, the same share of each tensor, erk, by the tensors' "
            "shapes, owl, by outliers, or progression, more with depth.",
        ),
    ] = None,
    criterion: Annotated[
        str, typer.Option(metavar="NAME", help="What ranks the weights: magnitude, lamp, ln_norm or random.")
    ] = "magnitude",
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
    with clear_errors(), terminable():
        if asked := needs(criteria.parse(criterion)):
            raise ValueError(
                f"{criterion} asks for {', '.join(asked)}, which files of weights don't show; take magnitude, lamp, "
                "ln_norm or random, or secateur oneshot, which runs the model."
            )
        scores, chosen, shared = allocation.settled(criterion, pattern, allocate)
        if chosen.density is not None and allocate is not None:
            raise ValueError(f"{pattern} keeps the same share of every tensor; leave --allocate out.")
        arguments = {
            "directory": str(directory),
            "out": str(out),
            "sparsity": sparsity,
            "pattern": word_of(chosen) if pattern is None else pattern,
            "allocate": None if chosen.density is not None else allocate or getattr(shared, "__name__", None),
            "criterion": criterion,
            "seed": seed,
            "include": include or [],
            "exclude": exclude or [],
        }
        done = sparsify_checkpoint(
            directory,
            out,
            sparsity,
            pattern=chosen,
            criterion=scores,
            allocate=shared,
            include=include or (),
            exclude=exclude or (),
            seed=seed,
            arguments={"command": shlex.join(["secateur", *_words(arguments)]), **arguments},
        )
        with printing() as console:
            _print_done(console, done)
        sys.stdout.flush()


@app.command(short_help="Prove what a pruned directory claims of itself.")
def verify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with secateur.json beside the weights.")
    ],
    source: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What it was pruned from: then all else has to be unchanged.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Count on the stored bytes what DIR's secateur.json says: sparsity, pattern, and what was left alone.

    Exit code 0: all that was checked holds. 1: something does not, and is named. 2: there is nothing to check.
    """
    with clear_errors():
        found = verify_checkpoint(directory, source)
        if as_json:
            sys.stdout.write(json.dumps(found.as_json(), indent=2) + "\n")
        else:
            with printing() as console:
                _print_verification(console, found)
        sys.stdout.flush()
    if not found.ok:
        raise typer.Exit(1)


app.command(short_help="Take channels and heads out of a model, which gets smaller.")(shrink)
app.command(short_help="Prune a transformer block by block, with calibration text.")(oneshot)
app.command(short_help="Write a copy of a checkpoint in which zeros take little room.")(compress)
app.command(short_help="Write the dense checkpoint that a compressed one was made of.")(expand)
app.command(short_help="What zeros would be worth to your model, measured here.")(bench)


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
    with clear_errors():
        from secateur.demo import DEFAULT_METHODS, METHODS, run_demo

        if method and any("list" in name.split(",") for name in method):
            for name, each in METHODS.items():
                typer.echo(f"{name:<10} {'*' if name in DEFAULT_METHODS else ' '} {each.line}")
            typer.echo("\n* without --method")
            return
        run_demo(out, methods=method or None, training=train)


def _print_inspection(console: Console, inspection: Inspection, group: bool) -> None:
    columns = ("Tensor", "Shape", "Dtype", "Size", "Zeros", "Patterns")
    table = table_of("~Tensor", "Shape", "Dtype", ">Size", ">Zeros", "~Patterns")
    rows = [_row(name, members) for name, members in _grouped(inspection.tensors, group)]
    others = sum(max(map(len, cells)) + 2 for cells in list(zip(columns, *rows, strict=True))[1:])
    for name, *cells in rows:
        table.add_row(Text(_folded(name, console.width - others)), *cells)
    console.print(table)
    console.print()
    totals = table_of("Total", ">Tensors", ">Parameters", ">Size", ">Zeros")
    dtypes = list(inspection.by_dtype.items())
    for dtype, total in [*dtypes, ("all", inspection.total())] if len(dtypes) != 1 else dtypes:
        totals.add_row(
            dtype,
            f"{total.tensors:,}",
            f"{total.parameters:,}",
            bytes_text(total.nbytes),
            percent(total.sparsity) if total.counted or not total.parameters else "?",
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
        bytes_text(sum(tensor.nbytes for tensor in members)),
        percents([tensor.sparsity for tensor in members], opaque=first.zeros is None),
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
    table = table_of("", ">Tensors", ">Parameters", ">Zeros")
    table.add_row("pruned", f"{len(done.targets):,}", f"{count:,}", percent(done.target_sparsity))
    table.add_row("whole model", f"{total.tensors:,}", f"{total.parameters:,}", percent(total.sparsity))
    console.print(table)
    pruned = sorted((tensor for tensor in done.inspection.tensors if tensor.name in chosen), key=_sparsity)
    least, most = pruned[0], pruned[-1]
    if percent(least.sparsity) != percent(most.sparsity):
        console.print(
            f"\nFrom {percent(least.sparsity)} ({escape(printable(least.name))}) to {percent(most.sparsity)} "
            f"({escape(printable(most.name))}).",
            soft_wrap=not console.is_terminal,
        )
    sizes = {tensor.name: tensor.numel for tensor in done.inspection.tensors}
    if done.left_alone:
        console.print("\n[bold]Left alone[/bold]")
        left = table_of("", ">Tensors", ">Parameters", "~such as")
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
        f"\nWrote {escape(printable(str(done.out)))} ({bytes_text(total.nbytes)} of weights, {done.seconds:.1f} s); "
        f"{RECORD} in it says what was done. The zeros are stored like other numbers: by themselves they make the "
        "files no smaller and the model no faster.",
        soft_wrap=not console.is_terminal,
    )


def _print_verification(console: Console, found: Verification) -> None:
    pruned = [tensor for tensor in found.tensors if tensor.claimed is not None]
    for problem in found.problems:
        console.print(f"[bold]wrong[/bold]      {escape(printable(problem, 1000))}", soft_wrap=True)
    for what in found.unchecked:
        console.print(f"unchecked  {escape(printable(what, 1000))}", soft_wrap=True)
    if found.problems or found.unchecked:
        console.print()
    table = table_of("", ">Tensors", ">Zeros")
    table.add_row("pruned", f"{len(pruned):,}", percent(found.target_sparsity))
    table.add_row("left alone", f"{len(found.tensors) - len(pruned):,}", "")
    console.print(table)
    pattern = f", pattern {found.pattern}" if found.pattern else ""
    compared = f", {found.files} other files compared" if found.source else ""
    verdict = "holds" if found.ok else f"does not hold: {len(found.problems)} problems"
    console.print(
        f"\n{escape(printable(str(found.path)))}: what {RECORD} claims {verdict}{pattern}{compared}.", soft_wrap=True
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
