"""What inspect, prune, verify, compress and expand say: parts for stdout, sheets for a page.

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
    pruned_rows,
    verified_rows,
)
from secateur.report import Cells, Chart, Sheet
from secateur.storage import Compression, encoding_rows
from secateur.support import Part, Rows, bytes_text, percent, percents, printable, table_of

__all__ = [
    "compressed_parts",
    "compressed_sheets",
    "inspected_parts",
    "inspected_sheets",
    "print_inspection",
    "pruned_parts",
    "pruned_sheets",
    "verified_parts",
    "verified_sheets",
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


def inspected_sheets(inspection: Inspection) -> list[Sheet]:
    """A row a tensor."""
    return [Sheet("Tensor by tensor", _cells(inspection), [_chart(inspection.tensors)])]


def _cells(inspection: Inspection) -> list[Cells]:
    tensors = inspection.tensors
    shapes = [_shape(each) for each in tensors]
    zeros: list[float | None] = [each.sparsity for each in tensors]
    return [
        Cells("tensor", [printable(each.name, 1000) for each in tensors]),
        Cells("shape", [*shapes]),
        Cells("dtype", [each.dtype for each in tensors]),
        Cells("parameters", [each.numel for each in tensors], [f"{each.numel:,}" for each in tensors]),
        Cells("size", [each.nbytes for each in tensors], [bytes_text(each.nbytes) for each in tensors]),
        Cells("zeros", zeros, [percents([each.sparsity], opaque=each.zeros is None) for each in tensors], zeros),
        Cells("patterns", [_patterns(each) for each in tensors]),
    ]


def _chart(tensors: Sequence[TensorInspection]) -> Chart:
    return Chart(
        "Where the zeros are",
        "The share of zeros in each tensor, in their natural order; a line joins what differs in numbers alone.",
        [printable(each.name) for each in tensors],
        [each.sparsity for each in tensors],
        "zeros",
        share=True,
    )


def _row(name: str, members: Sequence[TensorInspection]) -> tuple[str, ...]:
    first = members[0]
    return (
        printable(name, 1000),
        _shape(first),
        first.dtype,
        bytes_text(sum(tensor.nbytes for tensor in members)),
        percents([tensor.sparsity for tensor in members], opaque=first.zeros is None),
        _patterns(first),
    )


def _shape(tensor: TensorInspection) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _patterns(tensor: TensorInspection) -> str:
    return tensor.pattern + (" (stored inputs first)" if tensor.inputs_first and tensor.pattern else "")


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
    pruned = _pruned(done)
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


def pruned_sheets(done: CheckpointSparsification) -> list[Sheet]:
    """A row a tensor, with the reason of those that were left alone."""
    why = {name: reason for reason, names in done.left_alone.items() for name in names}
    reasons = Cells("left alone", [why.get(each.name, "") for each in done.inspection.tensors])
    return [Sheet("Tensor by tensor", [*_cells(done.inspection), reasons], [_chart(_pruned(done))])]


def _pruned(done: CheckpointSparsification) -> list[TensorInspection]:
    chosen = set(done.targets)
    return [tensor for tensor in done.inspection.tensors if tensor.name in chosen]


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


def verified_sheets(found: Verification) -> list[Sheet]:
    """A row a tensor: what was counted, and what is claimed of it."""
    tensors = found.tensors
    cells = [
        Cells("tensor", [printable(each.name, 1000) for each in tensors]),
        Cells("shape", ["x".join(map(str, each.shape)) or "scalar" for each in tensors]),
        Cells("dtype", [each.dtype for each in tensors]),
        _counts("zeros counted", [each.zeros for each in tensors]),
        _counts("zeros claimed", [each.claimed for each in tensors]),
        Cells("in the pattern", [_yes(each.pattern) for each in tensors]),
        Cells("else unchanged", [_yes(each.unchanged) for each in tensors]),
    ]
    return [Sheet("Tensor by tensor", cells)] if tensors else []


def _counts(head: str, values: Sequence[int | None]) -> Cells:
    return Cells(head, values, ["" if value is None else f"{value:,}" for value in values])


def _yes(said: bool | None) -> str:
    return "" if said is None else "yes" if said else "no"


def _sparsity(tensor: TensorInspection) -> float:
    return tensor.sparsity or 0.0


def compressed_parts(done: Compression, line: str) -> list[Part]:
    """The encodings, and a line that says what was written."""
    shown = encoding_rows(done)
    return [shown, "", f"{printable(line, 1000)} ({done.seconds:.1f} s)."]


def compressed_sheets(done: Compression) -> list[Sheet]:
    """A row a tensor."""
    tensors = done.tensors
    ratios = [each.stored / each.dense if each.dense else None for each in tensors]
    names = [printable(each.name, 1000) for each in tensors]
    cells = [
        Cells("tensor", names),
        Cells("encoding", [each.encoding for each in tensors]),
        Cells("dense", [each.dense for each in tensors], [bytes_text(each.dense) for each in tensors]),
        Cells("stored", [each.stored for each in tensors], [bytes_text(each.stored) for each in tensors]),
        Cells(
            "ratio", ratios, [percent(each) for each in ratios], [None if r is None else min(r, 1.0) for r in ratios]
        ),
    ]
    told = "Bytes stored, in dense ones, of each tensor; a line joins what differs in numbers alone."
    return [
        Sheet("Tensor by tensor", cells, [Chart("What is left of each", told, names, ratios, "stored", share=True)])
    ]
