"""What is said of a checkpoint on a page, tensor by tensor: what was seen, pruned, verified. What is in a checkpoint
and what was done to it, as columns and rows: for plain text, and for a terminal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from secateur.checkpoints.record import RECORD
from secateur.report import Cells, Chart, Sheet
from secateur.support import Part, Rows, bytes_text, percent, percents, printable

if TYPE_CHECKING:
    from secateur.checkpoints.inspect import Inspection, TensorInspection
    from secateur.checkpoints.sparsify_directory import CheckpointSparsification
    from secateur.checkpoints.verify import Verification


# ---- What is said of a checkpoint on a page, tensor by tensor: what was seen, pruned, verified.
#
# Law: what is said of a tensor on stdout is said of it here.


def inspected_sheets(inspection: Inspection) -> list[Sheet]:
    """The sheets of an `Inspection`: a table with a row for each tensor."""
    return [Sheet("Tensor by tensor", _cells(inspection), [_chart(inspection.tensors)])]


def _cells(inspection: Inspection) -> list[Cells]:
    tensors = inspection.tensors
    shapes = [shape_text(each) for each in tensors]
    zeros: list[float | None] = [each.sparsity for each in tensors]
    return [
        Cells("tensor", [printable(each.name, 1000) for each in tensors]),
        Cells("shape", [*shapes]),
        Cells("dtype", [each.dtype for each in tensors]),
        Cells("parameters", [each.numel for each in tensors], [f"{each.numel:,}" for each in tensors]),
        Cells("size", [each.nbytes for each in tensors], [bytes_text(each.nbytes) for each in tensors]),
        Cells("zeros", zeros, [percents([each.sparsity], opaque=each.zeros is None) for each in tensors], zeros),
        Cells("patterns", [patterns_text(each) for each in tensors]),
    ]


def _chart(tensors: Sequence[TensorInspection]) -> Chart:
    return Chart(
        "Where the zeros are",
        "The share of zeros in each tensor that has any, in their natural order; a line joins what differs in numbers "
        "alone.",
        [printable(each.name) for each in tensors],
        [each.sparsity or None for each in tensors],
        "zeros",
        share=True,
    )


def shape_text(tensor: TensorInspection) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def patterns_text(tensor: TensorInspection) -> str:
    return tensor.pattern + (" (stored inputs first)" if tensor.inputs_first and tensor.pattern else "")


def pruned_sheets(done: CheckpointSparsification) -> list[Sheet]:
    """The sheets of a `CheckpointSparsification`: a row for each tensor, with the reason where it was left alone."""
    why = {name: reason for reason, names in done.left_alone.items() for name in names}
    reasons = Cells("left alone", [why.get(each.name, "") for each in done.inspection.tensors])
    return [Sheet("Tensor by tensor", [*_cells(done.inspection), reasons], [_chart(done.pruned)])]


def verified_sheets(found: Verification) -> list[Sheet]:
    """The sheets of a `Verification`: a row for each tensor, with the counted and the claimed zeros."""
    tensors = found.tensors
    cells = [
        Cells("tensor", [printable(each.name, 1000) for each in tensors]),
        Cells("shape", ["x".join(map(str, each.shape)) or "scalar" for each in tensors]),
        Cells("dtype", [each.dtype for each in tensors]),
        _counts("zeros counted", [each.zeros for each in tensors]),
        _counts("zeros claimed", [each.claimed for each in tensors]),
        Cells("in the pattern", [_yes(each.pattern) for each in tensors]),
        Cells("all else as in the source", [_yes(each.unchanged) for each in tensors]),
    ]
    said = [cells for cells in cells if any(value not in (None, "") for value in cells.values)]
    return [Sheet("Tensor by tensor", said)] if tensors else []


def _counts(head: str, values: Sequence[int | None]) -> Cells:
    return Cells(head, values, ["" if value is None else f"{value:,}" for value in values])


def _yes(said: bool | None) -> str:
    return "" if said is None else "yes" if said else "no"


# ---- What is in a checkpoint and what was done to it, as columns and rows: for plain text, and for a terminal.
#
# Law: what ``print(result)`` shows and what the command shows are the same numbers in the same words.


def pruned_rows(done: CheckpointSparsification) -> Rows:
    """How much was pruned, and how much of the whole that is."""
    total, chosen = done.inspection.total(), set(done.targets)
    count = sum(tensor.numel for tensor in done.inspection.tensors if tensor.name in chosen)
    return Rows(
        ("", ">Tensors", ">Parameters", ">Zeros"),
        [
            ("pruned", f"{len(done.targets):,}", f"{count:,}", percent(done.target_sparsity)),
            ("whole model", f"{total.tensors:,}", f"{total.parameters:,}", percent(total.sparsity)),
        ],
    )


def left_alone_rows(done: CheckpointSparsification) -> Rows:
    """A table of the tensors left alone: a row for each reason, with its largest tensor."""
    sizes = {tensor.name: tensor.numel for tensor in done.inspection.tensors}
    return Rows(
        ("Left alone", ">Tensors", ">Parameters", "~such as"),
        [
            (why, f"{len(names):,}", f"{sum(sizes[name] for name in names):,}", max(names, key=sizes.__getitem__))
            for why, names in done.left_alone.items()
        ],
    )


def verified_parts(found: Verification) -> Iterator[Part]:
    """What is wrong, what could not be checked, and the verdict."""
    yield from (f"wrong: {printable(problem, 1000)}" for problem in found.problems)
    yield from (f"unchecked: {printable(what, 1000)}" for what in found.unchecked)
    if found.problems or found.unchecked:
        yield ""
    if any(tensor.zeros is not None for tensor in found.tensors):  # of a shrunken model no zeros are counted
        yield _verified_rows(found)
    yield ""
    pattern = f", pattern {found.pattern}" if found.pattern else ""
    compared = f", {found.files} other files compared" if found.source else ""
    verdict = "holds" if found.ok else f"does not hold: {len(found.problems)} problems"
    yield f"{printable(str(found.path))}: what {RECORD} claims {verdict}{pattern}{compared}."


def _verified_rows(found: Verification) -> Rows:
    """How many tensors the record calls pruned, and how sparse they are; and those left alone, where it says how many
    zeros they have."""
    alone = [tensor for tensor in found.tensors if tensor.alone or tensor.claimed is None]
    counted = [tensor for tensor in alone if tensor.claimed is not None]
    rows = [
        ("pruned", f"{len(found.tensors) - len(alone):,}", percent(found.target_sparsity)),
        ("left alone", f"{len(alone) - len(counted):,}", None),
    ]
    if counted:
        size = sum(math.prod(tensor.shape) for tensor in counted)
        zeros = sum(tensor.zeros or 0 for tensor in counted)
        rows.insert(1, ("left alone, zeros counted", f"{len(counted):,}", percent(zeros / size if size else None)))
    return Rows(("", ">Tensors", ">Zeros"), rows)


def inspected_parts(inspection: Inspection, *, group: bool = False) -> Iterator[Part]:
    """The printed tables of an `Inspection`: a row for each tensor, or kind of tensors, and the totals."""
    rows = [_row(name, members) for name, members in _grouped(inspection.tensors, group)]
    yield Rows(("~Tensor", "Shape", "Dtype", ">Size", ">Zeros", "~Patterns"), rows)
    yield ""
    yield from inspected_totals(inspection)


def inspected_totals(inspection: Inspection) -> Iterator[Part]:
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
