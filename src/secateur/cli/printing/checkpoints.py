"""What inspect, prune, verify, compress and expand say, on stdout.

Law: what is said of a tensor on one is said on the other.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from secateur.checkpoints import (
    RECORD,
    CheckpointSparsification,
    Inspection,
    TensorInspection,
    Verification,
    left_alone_rows,
    patterns_text,
    pruned_rows,
    shape_text,
    verified_rows,
)
from secateur.storage import Compression, encoding_rows
from secateur.support import Part, Rows, bytes_text, percent, percents, printable, table_of

__all__ = [
    "compressed_parts",
    "inspected_parts",
    "print_inspection",
    "pruned_parts",
    "verified_parts",
]


def print_inspection(console: Console, inspection: Inspection, group: bool) -> None:
    columns = ("~Tensor", "Shape", "Dtype", ">Size", ">Zeros", "~Patterns")
    rows = [_row(name, members) for name, members in _grouped(inspection.tensors, group)]
    console.print(table_of(columns, rows))
    console.print()
    for part in inspected_parts(inspection):
        console.print(part if isinstance(part, str) else table_of(*part))


def inspected_parts(inspection: Inspection) -> Iterator[Part]:
    """The totals, and where they were found."""
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
    yield Rows(("Total", ">Tensors", ">Parameters", ">Size", ">Zeros"), totals)
    files = len(inspection.files)
    where = inspection.files[0] if files == 1 else f"{files} files"
    yield ""
    yield f"{printable(str(inspection.path))}: {printable(where)}"


def _row(name: str, members: Sequence[TensorInspection]) -> tuple[str, ...]:
    first = members[0]
    return (
        printable(name, 1000),
        shape_text(first),
        first.dtype,
        bytes_text(sum(tensor.nbytes for tensor in members)),
        percents([tensor.sparsity for tensor in members], opaque=first.zeros is None),
        patterns_text(first),
    )


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


def pruned_parts(done: CheckpointSparsification) -> Iterator[Part]:
    """How much was pruned, from where to where, and what was left alone."""
    total = done.inspection.total()
    pruned = done.pruned
    yield pruned_rows(done)
    least, *_, most = sorted([*pruned, *pruned], key=_sparsity)
    if percent(least.sparsity) != percent(most.sparsity):
        yield ""
        yield (
            f"From {percent(least.sparsity)} ({printable(least.name)}) to {percent(most.sparsity)} "
            f"({printable(most.name)})."
        )
    if done.left_alone:
        yield ""
        yield left_alone_rows(done)
    yield ""
    if done.stale:
        files = ", ".join(printable(str(path)) for path in done.stale[:4])
        more = f" and {len(done.stale) - 4} more" if len(done.stale) > 4 else ""
        yield f"Copied as they were, not pruned: {files}{more}."
        yield ""
    yield (
        f"Wrote {printable(str(done.out))} ({bytes_text(total.nbytes)} of weights, {done.seconds:.1f} s); "
        f"{RECORD} in it says what was done. The zeros are stored like other numbers: by themselves they make the "
        "files no smaller and the model no faster."
    )


def verified_parts(found: Verification) -> Iterator[Part]:
    """What is wrong, what could not be checked, and the verdict."""
    yield from (f"wrong      {printable(problem, 1000)}" for problem in found.problems)
    yield from (f"unchecked  {printable(what, 1000)}" for what in found.unchecked)
    if found.problems or found.unchecked:
        yield ""
    if any(tensor.zeros is not None for tensor in found.tensors):  # of a shrunken model no zeros are counted
        yield verified_rows(found)
    pattern = f", pattern {found.pattern}" if found.pattern else ""
    compared = f", {found.files} other files compared" if found.source else ""
    verdict = "holds" if found.ok else f"does not hold: {len(found.problems)} problems"
    yield ""
    yield f"{printable(str(found.path))}: what {RECORD} claims {verdict}{pattern}{compared}."


def _sparsity(tensor: TensorInspection) -> float:
    return tensor.sparsity or 0.0


def compressed_parts(done: Compression, line: str) -> list[Part]:
    """The encodings, and a line that says what was written."""
    shown = encoding_rows(done)
    return [shown, "", f"{printable(line, 1000)} ({done.seconds:.1f} s)."]
