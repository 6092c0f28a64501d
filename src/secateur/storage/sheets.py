"""What saving compressed says on a page: a row a tensor.

Law: bytes are those that were written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from secateur.report import Cells, Chart, Sheet
from secateur.support import bytes_text, percent, printable

if TYPE_CHECKING:
    from secateur.storage.saving import Compression

__all__ = ["compressed_sheets"]


def compressed_sheets(done: Compression) -> list[Sheet]:
    """The sheets of a `Compression`: a table with a row for each tensor."""
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
