"""The ``secateur`` command: inspect a checkpoint, prune one, shrink a model, run the demo.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

import contextlib
import enum
import json
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from torch import nn

from secateur import allocation, criteria, patterns
from secateur.checkpoint_sparsification import RECORD, CheckpointSparsification, sparsify_checkpoint
from secateur.checkpoints import new_directory, printable
from secateur.coupling import Group, in_mode, run, tensors_of
from secateur.depth import KEPT
from secateur.factories import blamed, inputs_of, load_weights, model_of
from secateur.inspection import Inspection, TensorInspection, inspect_checkpoint
from secateur.plans import save_shrunken
from secateur.shrinking import Shrunk
from secateur.shrinking import shrink as shrink_model
from secateur.terminal import bytes_text, clear_errors, percent, percents, printing, table_of, terminable, waiting
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


class Allocate(enum.StrEnum):
    everywhere = "everywhere"
    uniform = "uniform"
    erk = "erk"


class Criterion(enum.StrEnum):
    magnitude = "magnitude"
    random = "random"
    lamp = "lamp"


class Target(enum.StrEnum):
    params = "params"
    macs = "macs"
    memory = "memory"
    latency = "latency"
    units = "units"


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
    with clear_errors(), terminable():
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
        with printing() as console:
            _print_done(console, done)
        sys.stdout.flush()


@app.command(short_help="Take channels and heads out of a model, which gets smaller.")
def shrink(
    factory: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="What makes the model, called without arguments.")
    ],
    example: Annotated[
        str,
        typer.Option(
            metavar="MODULE:INPUTS",
            help="A tensor, a tuple of arguments or a dict of keyword arguments, or a function that makes one.",
        ),
    ],
    sparsity: Annotated[float, typer.Option("--sparsity", "-s", help="Fraction of the target that leaves, in [0, 1).")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The directory to write. Must not exist.", show_default=False)
    ] = None,
    target: Annotated[
        Target,
        typer.Option(help="Of the example: multiply-adds, memory, measured time; units are channels, heads, ..."),
    ] = Target.params,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Shrink only what tensors of these names take part in. Repeatable."),
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave what these take part in whole. Repeatable.")
    ] = None,
    round_to: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Keep multiples of this many units; 16 of 64 or more if left out."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Load these first: a safetensors file, an index, or a directory with one."),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not prove that nothing else changed: faster, in less memory.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would leave, and write nothing.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every group with all its members, every dimension that stays.")
    ] = False,
    branches: Annotated[
        float,
        typer.Option(
            metavar="FRACTION",
            help="Residual branches that leave first: those that change their stream least on the example.",
        ),
    ] = 0.0,
) -> None:
    """Take whole channels, heads and hidden units out of a model, and write the smaller one.

    What leaves together is found by watching the model run on the example; units are ranked by the magnitude of their
    weights, whole branches by what they do to the example, which has to be a real one then. Modules are looked for in
    this directory first. DIR appears complete or not at all, with plan.json and model.safetensors; load_shrunken reads
    it into a model that the factory made.
    """
    with clear_errors(), terminable():
        if out is None and not dry_run:
            raise ValueError("give --out DIR, the directory to write, or --dry-run.")
        with contextlib.nullcontext() if out is None or dry_run else new_directory(out) as folder:
            with waiting("Building the model"):
                model, expression = model_of(factory)
                inputs = inputs_of(example)
                if weights is not None:
                    load_weights(model, weights)
            started = time.monotonic()
            ran = blamed(f"{factory}, run on {example},")
            with waiting("Watching the model run"), ran, torch.no_grad(), in_mode(model, training=False):
                run(model, inputs)
            dense = _totals(model)
            told: list[Shrunk] = []
            with waiting("Choosing what leaves" if no_verify else "Choosing what leaves, and proving it"):
                shrink_model(
                    model,
                    inputs,
                    sparsity,
                    include=include,
                    keep=keep,
                    round_to=round_to,
                    target=str(target),
                    branches=branches,
                    verify=not no_verify,
                    report=told.append,
                )
            done = _Shrunken(told[0], dense, _totals(model))
            if folder is not None:
                with waiting("Writing"):
                    save_shrunken(model, folder)
        with printing() as console:
            _print_shrunken(console, done, verbose=verbose)
            proof = "Not proved, as asked" if no_verify else "Proved on random weights that nothing else changed"
            console.print(f"\n{proof} ({time.monotonic() - started:.1f} s).")
            _print_written(console, None if dry_run else out, factory, expression)
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
    with clear_errors():
        from secateur.demo import DEFAULT_METHODS, METHODS, run_demo

        if method and any("list" in name.split(",") for name in method):
            for name, each in METHODS.items():
                typer.echo(f"{name:<10} {'*' if name in DEFAULT_METHODS else ' '} {each.line}")
            typer.echo("\n* without --method")
            return
        run_demo(out, methods=method or None, training=train)


def _totals(model: nn.Module) -> tuple[int, int]:
    """Parameters, and bytes of all tensors."""
    tensors = tensors_of(model).values()
    return sum(each.numel() for each in model.parameters()), sum(each.nbytes for each in tensors)


@dataclass(frozen=True)
class _Shrunken:
    """What left a model, and its totals before and after."""

    told: Shrunk
    dense: tuple[int, int]
    totals: tuple[int, int]

    def kept(self, group: Group) -> int:
        """How many units of a group stayed."""
        return int(self.told.kept[group.axis].sum()) if group.axis in self.told.kept else group.size


# ------------------------------------------------------------------------------------------------------- printing


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


_SHOWN = 10  # rows of what stays whole, unless all are asked for


def _print_shrunken(console: Console, done: _Shrunken, *, verbose: bool) -> None:
    if done.told.plans[0].modules:
        _print_branches(console, done.told)
    rows: dict[Any, list[Group]] = {}  # groups that differ only in layers' numbers share one
    for group in done.told.coupling.groups:
        own, *others = _spelled(group) if verbose else dict.fromkeys(map(_any_layer, _spelled(group)))
        rows.setdefault((own, tuple(others), group.size, done.kept(group), group.notes), []).append(group)
    table = table_of("~Group", ">Units", "~Leaves with")
    for (_, _, size, kept, notes), groups in rows.items():
        alike: dict[str, list[str]] = {}
        for group in groups:
            for each in _spelled(group)[1:]:
                alike.setdefault(each if verbose else _any_layer(each), []).append(each)
        members = [_merged(each) for each in alike.values()]
        if len(members) > 3 and not verbose:
            members = [*members[:2], f"{len(members) - 2} more"]
        name = _merged([group.name for group in groups]) + (f" (x{len(groups)})" if len(groups) > 1 else "")
        units = f"{size} -> {kept}" if kept < size else f"{size}"
        said = f" ({', '.join(notes)})" if notes else ""
        table.add_row(Text(printable(name)), units, Text(printable(", ".join(members), 10_000) + said))
    console.print(table)
    if done.told.coupling.frozen:
        _print_whole(console, done.told.coupling.frozen, verbose=verbose)
    totals = table_of("Total", ">before", ">after", ">left")
    for what, before, after, show in (
        ("parameters", done.dense[0], done.totals[0], "{:,}".format),
        ("multiply-adds", *done.told.multiply_adds, "{:,}".format),
        ("bytes", done.dense[1], done.totals[1], bytes_text),
    ):
        totals.add_row(what, show(before), show(after), percent(after / before if before else None))
    console.print()
    console.print(totals)


def _spelled(group: Group) -> list[str]:
    """``name[dimension]`` of all members, the one that gave the group its name first."""
    names = [name for name, _ in group.members]
    own = (
        group.name if group.name in names else group.name.rpartition(":")[0]
    )  # the second group of a name has a number
    first = names.index(own)
    members = [group.members[first], *group.members[:first], *group.members[first + 1 :]]
    return [f"{name}[{at}]" for name, at in members]


def _any_layer(name: str) -> str:
    return re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", name)


def _merged(names: Sequence[str]) -> str:
    """Names of the same parts as one, with stars for the parts that differ.

    >>> _merged(["layers.0.mlp.2.weight", "layers.1.mlp.2.weight"])
    'layers.*.mlp.2.weight'
    """
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _print_branches(console: Console, told: Shrunk) -> None:
    left = [branch for branch in told.branches if told.plans[0].takes(branch)]
    table = table_of("~Branch", "~Leaves with", ">Parameters")
    for branch in left:
        others = ", ".join(path for path in branch.modules if path != branch.name)
        table.add_row(Text(printable(branch.name)), Text(printable(others, 10_000)), f"{branch.entries:,}")
    console.print(table)
    console.print(f"{len(left)} of {len(told.branches)} residual branches leave.")
    for name, why in list(told.stayed.items())[:_SHOWN]:
        if why != KEPT:
            console.print(f"{escape(printable(name))} stays: {escape(printable(why, 300))}.")
    console.print()


def _print_whole(console: Console, frozen: Mapping[tuple[str, int], str], *, verbose: bool) -> None:
    console.print()
    if verbose:
        table = table_of("~Stays whole", "~because")
        for (name, at), reason in frozen.items():
            table.add_row(Text(printable(f"{name}[{at}]")), Text(printable(reason, 1000)))
        console.print(table)
        return
    by_reason: dict[str, list[str]] = {}
    for (name, at), reason in frozen.items():
        by_reason.setdefault(reason, []).append(f"{name}[{at}]")
    table = table_of("~Stays whole, because", ">Dimensions", "~such as")
    for reason, names in list(by_reason.items())[:_SHOWN]:
        table.add_row(Text(printable(reason, 300)), f"{len(names):,}", Text(printable(names[0])))
    console.print(table)
    if len(by_reason) > _SHOWN:
        more = len(by_reason) - _SHOWN
        console.print(f"and for {more} more reason{'s' * (more > 1)}: --verbose shows all.")


def _print_written(console: Console, out: Path | None, factory: str, expression: str) -> None:
    if out is None:
        console.print("Nothing was written.")
        return
    module, _, name = factory.partition(":")
    base = name.partition(".")[0]
    console.print(f"Wrote plan.json and model.safetensors to {escape(printable(str(out)))}. To load it:\n")
    for line in (
        "from secateur import load_shrunken",
        f"from {module} import {base}",
        f"model = load_shrunken({expression}, {str(out)!r})",
    ):
        console.print(f"    {escape(printable(line))}", soft_wrap=True)


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
