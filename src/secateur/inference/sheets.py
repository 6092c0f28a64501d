"""What pack says on a page: a row a layer.

Law: a layer that stays dense says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from secateur.report import Cells, Chart, Sheet
from secateur.support import bytes_text, percent, printable

if TYPE_CHECKING:
    from secateur.inference.packing import PackedLayer, Packing

__all__ = ["layers_sheet"]


def layers_sheet(title: str, packing: Packing) -> Sheet:
    """The sheets of a `pack` result: a table with a row for each layer."""
    layers = packing.layers
    names = [printable(each.name, 1000) for each in layers]
    zeros = [each.sparsity for each in layers]
    faster = [each.speedup for each in layers]
    cells = [
        Cells("layer", names),
        Cells("shape", ["x".join(map(str, each.shape)) for each in layers]),
        Cells("zeros", zeros, [percent(each) for each in zeros], zeros),
        Cells("now", [each.kind for each in layers]),
        *_rounded(layers),
        _milliseconds("ms dense", [each.best_dense_ms for each in layers]),
        _milliseconds("ms packed", [each.packed_ms for each in layers]),
        Cells("times faster", faster, ["" if each is None else f"{each:.2f}" for each in faster]),
        Cells("size before", [e.dense_bytes for e in layers], [bytes_text(e.dense_bytes) for e in layers]),
        Cells("size", [each.bytes for each in layers], [bytes_text(each.bytes) for each in layers]),
        Cells("stays dense, because", [each.why for each in layers]),
    ]
    told = "The fastest dense form in times of the fastest other one, of each layer where that was timed."
    return Sheet(title, cells, [Chart("What skipping zeros gains", told, names, faster, "times faster")])


def _rounded(layers: tuple[PackedLayer, ...]) -> list[Cells]:
    """Columns of what is in int8, where anything was asked to be."""
    errors = [each.error for each in layers]
    if not any(each is not None for each in errors):
        return []
    said = ["" if each is None else percent(each) for each in errors]
    return [Cells("in int8", [" and ".join(each.int8) for each in layers]), Cells("error of rounding", errors, said)]


def _milliseconds(head: str, values: list[float | None]) -> Cells:
    return Cells(head, values, ["" if each is None else f"{each:.3g}" for each in values])
