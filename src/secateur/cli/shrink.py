"""``secateur shrink``: channels and heads leave a model that a function makes, or a directory of shards.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

import contextlib
import enum
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from torch import nn

from secateur.checkpoints import new_directory
from secateur.cli.factories import blamed, inputs_of, load_weights, model_of
from secateur.cli.terminal import clear_errors, printing, terminable, waiting
from secateur.coupling import Group
from secateur.shrinking import KEPT, CheckpointShrinking, Shrunk, save_shrunken, shrink_checkpoint
from secateur.shrinking import shrink as shrink_model
from secateur.support import bytes_text, in_mode, percent, printable, run_example, table_of, tensors_of

__all__ = ["Target", "shrink"]


class Target(enum.StrEnum):
    params = "params"
    macs = "macs"
    memory = "memory"
    latency = "latency"
    units = "units"


def shrink(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="What makes the model, called without arguments: the module is imported, and its code is run. Or a "
            "Hugging Face directory, of which no code is run.",
        ),
    ],
    sparsity: Annotated[float, typer.Option("--sparsity", "-s", help="Fraction of the target that leaves, in [0, 1).")],
    example: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:INPUTS",
            help="A tensor, a tuple of arguments or a dict of keyword arguments, or a function that makes one. "
            "Its module is imported and run, too. A directory needs none.",
            show_default=False,
        ),
    ] = None,
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
    uniform: Annotated[
        bool,
        typer.Option(
            "--uniform",
            help="Keep what the model's config can say, so that from_pretrained loads it. Directories: always.",
        ),
    ] = False,
) -> None:
    """Take whole channels, heads and hidden units out of a model, and write the smaller one.

    What leaves together is found by watching the model run on the example; units are ranked by the magnitude of their
    weights, whole branches by what they do to the example, which has to be a real one then. Modules are looked for in
    this directory first, and importing one runs its code: name only what you trust. DIR appears complete or not at all,
    with plan.json and model.safetensors; load_shrunken reads it into a model that the factory made.

    Of a Hugging Face directory, of any size, the shards are sliced one tensor at a time, and from_pretrained loads DIR.
    """
    with clear_errors(), terminable():
        if Path(factory).is_dir():
            if weights is not None or branches:
                raise ValueError(f"{factory} is a directory: leave out {'--weights' if weights else '--branches'}.")
            _shrink_directory(
                Path(factory),
                out,
                sparsity,
                example=example,
                include=include,
                keep=keep,
                round_to=round_to,
                target=target,
                no_verify=no_verify,
                dry_run=dry_run,
                verbose=verbose,
            )
            return
        if example is None:
            raise ValueError("give --example MODULE:INPUTS, what the model is run on; only a directory needs none.")
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
                run_example(model, inputs)
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
                    uniform=uniform,
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


def _shrink_directory(
    directory: Path,
    out: Path | None,
    sparsity: float,
    *,
    example: str | None,
    include: list[str] | None,
    keep: list[str] | None,
    round_to: int | None,
    target: Target,
    no_verify: bool,
    dry_run: bool,
    verbose: bool,
) -> None:
    if out is None and not dry_run:
        raise ValueError("give --out DIR, the directory to write, or --dry-run.")
    options = {"include": include, "keep": keep, "round-to": round_to, "example": example, "target": str(target)}
    words = ["shrink", str(directory), "--sparsity", str(sparsity), "--out", str(out)]
    for name, value in options.items():
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            words += [f"--{name}", str(one)]
    words += ["--no-verify"] * no_verify
    done = shrink_checkpoint(
        directory,
        None if dry_run else out,
        sparsity,
        example_inputs=None if example is None else inputs_of(example),
        include=include,
        keep=keep,
        round_to=round_to,
        target=str(target),
        verify=not no_verify,
        arguments={"command": shlex.join(["secateur", *words]), "sparsity": sparsity, **options},
    )
    with printing() as console:
        _print_checkpoint(console, done, verbose=verbose)
    sys.stdout.flush()


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


# ---- printing --------------------------------------------------------------------------------------------------------

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
    parameters, nbytes = zip(done.dense, done.totals, strict=True)
    numbers = "{:,}".format
    multiply_adds = "multiply-adds", *done.told.multiply_adds, numbers
    _print_totals(console, (("parameters", *parameters, numbers), multiply_adds, ("bytes", *nbytes, bytes_text)))


def _print_totals(console: Console, rows: Iterable[tuple[str, int, int, Callable[[int], str]]]) -> None:
    totals = table_of("Total", ">before", ">after", ">left")
    for what, before, after, show in rows:
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


def _print_checkpoint(console: Console, done: CheckpointShrinking, *, verbose: bool) -> None:
    rows: dict[tuple[str, int, int], list[str]] = {}  # groups that differ only in layers' numbers share one
    for name, (size, kept) in done.counts.items():
        rows.setdefault((name if verbose else _any_layer(name), size, kept), []).append(name)
    table = table_of("~Group", ">Units")
    for (_, size, kept), names in rows.items():
        table.add_row(
            Text(printable(_merged(names)) + (f" (x{len(names)})" if len(names) > 1 else "")), f"{size} -> {kept}"
        )
    console.print(table)
    if done.frozen:
        _print_whole(console, done.frozen, verbose=verbose)
    fields = table_of("config.json", ">before", ">after")
    for name, (before, after) in done.fields.items():
        fields.add_row(Text(printable(name)), "not set" if before is None else str(before), str(after))
    console.print()
    console.print(fields)
    _print_totals(console, (("parameters", *done.parameters, "{:,}".format), ("bytes", *done.nbytes, bytes_text)))
    proof = done.proof[0].upper() + done.proof[1:] if done.proof.startswith("not") else f"Proved {done.proof}"
    console.print(f"\n{escape(proof)} ({done.seconds:.1f} s).", soft_wrap=not console.is_terminal)
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        console.print(f"Left out, as they hold the weights in other forms: {escape(files)}.", soft_wrap=True)
    console.print(
        "Nothing was written."
        if done.out is None
        else f"Wrote {escape(printable(str(done.out)))}; from_pretrained loads it.",
        soft_wrap=True,
    )
