"""What inspect, prune, verify, compress and expand print."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from secateur.checkpoints import RECORD, CheckpointSparsification, Inspection, TensorInspection, Verification
from secateur.storage import Compression
from secateur.support import bytes_text, percent, percents, printable, table_of

__all__ = ["print_compression", "print_inspection", "print_pruned", "print_verification"]


def print_inspection(console: Console, inspection: Inspection, group: bool) -> None:
    columns = ("~Tensor", "Shape", "Dtype", ">Size", ">Zeros", "~Patterns")
    rows = [_row(name, members) for name, members in _grouped(inspection.tensors, group)]
    others = sum(max(map(len, cells)) + 2 for cells in list(zip(columns, *rows, strict=True))[1:])
    folded = [(Text(_folded(name, console.width - others)), *cells) for name, *cells in rows]
    console.print(table_of(columns, folded))
    console.print()
    dtypes = list(inspection.by_dtype.items())
    totals = [
        (
            dtype,
            f"{total.tensors:,}",
            f"{total.parameters:,}",
            bytes_text(total.nbytes),
            percent(total.sparsity) if total.counted or not total.parameters else "?",
        )
        for dtype, total in ([*dtypes, ("all", inspection.total())] if len(dtypes) != 1 else dtypes)
    ]
    console.print(table_of(("Total", ">Tensors", ">Parameters", ">Size", ">Zeros"), totals))
    files = len(inspection.files)
    where = inspection.files[0] if files == 1 else f"{files} files"
    console.print(f"\n{printable(str(inspection.path))}: {printable(where)}")


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


def print_pruned(console: Console, done: CheckpointSparsification) -> None:
    total = done.inspection.total()
    chosen = set(done.targets)
    count = sum(tensor.numel for tensor in done.inspection.tensors if tensor.name in chosen)
    rows = (
        ("pruned", f"{len(done.targets):,}", f"{count:,}", percent(done.target_sparsity)),
        ("whole model", f"{total.tensors:,}", f"{total.parameters:,}", percent(total.sparsity)),
    )
    console.print(table_of(("", ">Tensors", ">Parameters", ">Zeros"), rows))
    pruned = sorted((tensor for tensor in done.inspection.tensors if tensor.name in chosen), key=_sparsity)
    least, most = pruned[0], pruned[-1]
    if percent(least.sparsity) != percent(most.sparsity):
        console.print(
            f"\nFrom {percent(least.sparsity)} ({printable(least.name)}) to {percent(most.sparsity)} "
            f"({printable(most.name)}).",
            soft_wrap=not console.is_terminal,
        )
    sizes = {tensor.name: tensor.numel for tensor in done.inspection.tensors}
    if done.left_alone:
        left = [
            (reason, f"{len(names):,}", f"{sum(map(sizes.__getitem__, names)):,}", _largest(names, sizes))
            for reason, names in done.left_alone.items()
        ]
        console.print()
        console.print(table_of(("Left alone", ">Tensors", ">Parameters", "~such as"), left))
    if done.stale:
        files = ", ".join(printable(str(path)) for path in done.stale[:4])
        more = f" and {len(done.stale) - 4} more" if len(done.stale) > 4 else ""
        console.print(f"\nCopied as they were, not pruned: {files}{more}.", soft_wrap=not console.is_terminal)
    console.print(
        f"\nWrote {printable(str(done.out))} ({bytes_text(total.nbytes)} of weights, {done.seconds:.1f} s); "
        f"{RECORD} in it says what was done. The zeros are stored like other numbers: by themselves they make the "
        "files no smaller and the model no faster.",
        soft_wrap=not console.is_terminal,
    )


def print_verification(console: Console, found: Verification) -> None:
    pruned = [tensor for tensor in found.tensors if tensor.claimed is not None]
    for problem in found.problems:
        console.print(Text.assemble(("wrong", "bold"), f"      {printable(problem, 1000)}"), soft_wrap=True)
    for what in found.unchecked:
        console.print(f"unchecked  {printable(what, 1000)}", soft_wrap=True)
    if found.problems or found.unchecked:
        console.print()
    rows = (
        ("pruned", f"{len(pruned):,}", percent(found.target_sparsity)),
        ("left alone", f"{len(found.tensors) - len(pruned):,}", ""),
    )
    if any(tensor.zeros is not None for tensor in found.tensors):  # of a shrunken model no zeros are counted
        console.print(table_of(("", ">Tensors", ">Zeros"), rows))
    pattern = f", pattern {found.pattern}" if found.pattern else ""
    compared = f", {found.files} other files compared" if found.source else ""
    verdict = "holds" if found.ok else f"does not hold: {len(found.problems)} problems"
    console.print(f"\n{printable(str(found.path))}: what {RECORD} claims {verdict}{pattern}{compared}.", soft_wrap=True)


def _largest(names: Sequence[str], sizes: Mapping[str, int]) -> str:
    return printable(max(names, key=lambda name: sizes[name]))


def _sparsity(tensor: TensorInspection) -> float:
    return tensor.sparsity or 0.0


def print_compression(console: Console, done: Compression, line: str) -> None:
    rows = []
    for encoding in sorted({tensor.encoding for tensor in done.tensors}):
        tensors = [tensor for tensor in done.tensors if tensor.encoding == encoding]
        dense, stored = sum(tensor.dense for tensor in tensors), sum(tensor.stored for tensor in tensors)
        ratio = percent(stored / dense if dense else None)
        rows.append((encoding, f"{len(tensors):,}", bytes_text(dense), bytes_text(stored), ratio))
    console.print(table_of(("Encoding", ">Tensors", ">Dense", ">Stored", ">Ratio"), rows))
    console.print(f"\n{printable(line)} ({done.seconds:.1f} s).", soft_wrap=not console.is_terminal)
