"""What shrink prints: groups and their units, what stays whole, totals before and after."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from secateur.coupling import Group
from secateur.shrinking import KEPT, CheckpointShrinking, Shrunk
from secateur.support import bytes_text, percent, printable, table_of, tensors_of

__all__ = ["Told", "print_checkpoint", "print_shrunken", "print_written", "totals_of"]

_SHOWN = 10  # rows of what stays whole, unless all are asked for


@dataclass(frozen=True)
class Told:
    """What left a model, and its totals before and after."""

    told: Shrunk
    dense: tuple[int, int]
    totals: tuple[int, int]

    def kept(self, group: Group) -> int:
        """How many units of a group stayed."""
        return int(self.told.kept[group.axis].sum()) if group.axis in self.told.kept else group.size


def totals_of(model: nn.Module) -> tuple[int, int]:
    """Parameters, and bytes of all tensors."""
    tensors = tensors_of(model).values()
    return sum(each.numel() for each in model.parameters()), sum(each.nbytes for each in tensors)


def print_shrunken(console: Console, done: Told, *, verbose: bool) -> None:
    if done.told.plans[0].modules:
        _print_branches(console, done.told)
    alike_groups: dict[Any, list[Group]] = {}  # groups that differ only in layers' numbers share a row
    for group in done.told.coupling.groups:
        own, *others = _spelled(group) if verbose else dict.fromkeys(map(_any_layer, _spelled(group)))
        alike_groups.setdefault((own, tuple(others), group.size, done.kept(group), group.notes), []).append(group)
    rows = []
    for (_, _, size, kept, notes), groups in alike_groups.items():
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
        rows.append((printable(name), units, ", ".join(members) + said))
    console.print(table_of(("~Group", ">Units", "~Leaves with"), rows))
    if done.told.coupling.frozen:
        _print_whole(console, done.told.coupling.frozen, verbose=verbose)
    parameters, nbytes = zip(done.dense, done.totals, strict=True)
    numbers = "{:,}".format
    multiply_adds = "multiply-adds", *done.told.multiply_adds, numbers
    _print_totals(console, (("parameters", *parameters, numbers), multiply_adds, ("bytes", *nbytes, bytes_text)))


def _print_totals(console: Console, rows: Iterable[tuple[str, int, int, Callable[[int], str]]]) -> None:
    shown = [
        (what, show(before), show(after), percent(after / before if before else None))
        for what, before, after, show in rows
    ]
    console.print()
    console.print(table_of(("Total", ">before", ">after", ">left"), shown))


def _spelled(group: Group) -> list[str]:
    """``name[dimension]`` of all members, the one that gave the group its name first."""
    names = [name for name, _ in group.members]
    # The second group of a name has a number
    own = group.name if group.name in names else group.name.rpartition(":")[0]
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
    rows = [
        (printable(each.name), ", ".join(path for path in each.modules if path != each.name), f"{each.entries:,}")
        for each in left
    ]
    console.print(table_of(("~Branch", "~Leaves with", ">Parameters"), rows))
    console.print(f"{len(left)} of {len(told.branches)} residual branches leave.")
    for name, why in list(told.stayed.items())[:_SHOWN]:
        if why != KEPT:
            console.print(f"{printable(name)} stays: {printable(why, 300)}.")
    console.print()


def _print_whole(console: Console, frozen: Mapping[tuple[str, int], str], *, verbose: bool) -> None:
    console.print()
    if verbose:
        every = [(printable(f"{name}[{at}]"), printable(reason, 1000)) for (name, at), reason in frozen.items()]
        console.print(table_of(("~Stays whole", "~because"), every))
        return
    by_reason: dict[str, list[str]] = {}
    for (name, at), reason in frozen.items():
        by_reason.setdefault(reason, []).append(f"{name}[{at}]")
    rows = [
        (printable(reason, 300), f"{len(names):,}", printable(names[0]))
        for reason, names in list(by_reason.items())[:_SHOWN]
    ]
    console.print(table_of(("~Stays whole, because", ">Dimensions", "~such as"), rows))
    if len(by_reason) > _SHOWN:
        more = len(by_reason) - _SHOWN
        console.print(f"and for {more} more reason{'s' * (more > 1)}: --verbose shows all.")


def print_written(console: Console, out: Path | None, factory: str, expression: str) -> None:
    if out is None:
        console.print("Nothing was written.")
        return
    module, _, name = factory.partition(":")
    base = name.partition(".")[0]
    console.print(f"Wrote plan.json and model.safetensors to {printable(str(out))}. To load it:\n")
    for line in (
        "from secateur import load_shrunken",
        f"from {module} import {base}",
        f"model = load_shrunken({expression}, {str(out)!r})",
    ):
        console.print(f"    {printable(line)}", soft_wrap=True)


def print_checkpoint(console: Console, done: CheckpointShrinking, *, verbose: bool) -> None:
    alike: dict[tuple[str, int, int], list[str]] = {}  # groups that differ only in layers' numbers share a row
    for name, (size, kept) in done.counts.items():
        alike.setdefault((name if verbose else _any_layer(name), size, kept), []).append(name)
    rows = [
        (printable(_merged(names)) + (f" (x{len(names)})" if len(names) > 1 else ""), f"{size} -> {kept}")
        for (_, size, kept), names in alike.items()
    ]
    console.print(table_of(("~Group", ">Units"), rows))
    if done.frozen:
        _print_whole(console, done.frozen, verbose=verbose)
    fields = [
        (printable(name), "not set" if before is None else before, after)
        for name, (before, after) in done.fields.items()
    ]
    console.print()
    console.print(table_of(("config.json", ">before", ">after"), fields))
    _print_totals(console, (("parameters", *done.parameters, "{:,}".format), ("bytes", *done.nbytes, bytes_text)))
    proof = done.proof[0].upper() + done.proof[1:] if done.proof.startswith("not") else f"Proved {done.proof}"
    console.print(f"\n{proof} ({done.seconds:.1f} s).", soft_wrap=not console.is_terminal)
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        console.print(f"Left out, as they hold the weights in other forms: {files}.", soft_wrap=True)
    console.print(
        "Nothing was written." if done.out is None else f"Wrote {printable(str(done.out))}; from_pretrained loads it.",
        soft_wrap=True,
    )
