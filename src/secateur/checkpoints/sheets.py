"""What is said of a checkpoint on a page, tensor by tensor: what was seen, pruned, verified.

Law: what is said of a tensor on stdout is said of it here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from secateur.report import Cells, Chart, Sheet
from secateur.support import bytes_text, percents, printable

if TYPE_CHECKING:
    from secateur.checkpoints.inspection import Inspection, TensorInspection
    from secateur.checkpoints.pruning import CheckpointSparsification
    from secateur.checkpoints.verification import Verification

__all__ = ["inspected_sheets", "patterns_text", "pruned_sheets", "shape_text", "verified_sheets"]


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
