"""The tables of a smaller vocabulary on a page: tensors that became shorter, and tokens of the text that leave.

Law: tokens are shown as text that holds no control character.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from secateur.report import Cells, Chart, Sheet
from secateur.support import printable

if TYPE_CHECKING:
    from secateur.vocabulary.outcome import ShrunkVocabulary

__all__ = ["shrunken_sheets"]

_SHOWN = 1000  # rows of tokens


def shrunken_sheets(done: ShrunkVocabulary) -> list[Sheet]:
    """The sheets of a `ShrunkVocabulary`: the tensors that became shorter, and the most frequent tokens that leave."""
    tensors = [
        Cells("tensor", [printable(name, 1000) for name in done.tensors]),
        Cells("dimension", list(done.tensors.values())),
        Cells("before", [done.rows[0]] * len(done.tensors), [f"{done.rows[0]:,}"] * len(done.tensors)),
        Cells("after", [done.rows[1]] * len(done.tensors), [f"{done.rows[1]:,}"] * len(done.tensors)),
    ]
    sheets = [Sheet("Tensor by tensor", tensors)] if done.tensors else []
    gone = list(done.gone.items())[:_SHOWN]
    if gone:
        names, counts = [printable(repr(token), 100) for token, _ in gone], [count for _, count in gone]
        cells = [Cells("token", names), Cells("in the text", counts, [f"{count:,}" for count in counts])]
        told = "How often the text has each token that leaves, the most frequent first."
        chart = Chart("Tokens of the text that leave", told, [f"t.{at}" for at in range(len(gone))], counts, "times")
        sheets.append(Sheet("Tokens of the text that leave", cells, [chart]))
    return sheets
