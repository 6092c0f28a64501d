"""What vocabulary says: what its result says of itself, where it is, and sheets for a page.

Law: tokens are printed as text that holds no control character.
"""

from collections.abc import Iterator

from secateur.report import Cells, Chart, Sheet
from secateur.support import Part, printable
from secateur.vocabulary import ShrunkVocabulary, vocabulary_parts

__all__ = ["shrunken_parts", "shrunken_sheets"]

_SHOWN = 1000  # rows of tokens


def shrunken_parts(done: ShrunkVocabulary) -> Iterator[Part]:
    """What left, what that does to text, on what it was proved, and where it is."""
    yield from vocabulary_parts(done)
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        yield f"Left out, as they say the old numbers or hold the weights in other forms: {files}."
    if done.left_whole:
        names = ", ".join(printable(name) for name in done.left_whole[:4])
        yield f"Left whole, as long as the vocabulary and no part of the model: {names}."
    yield ""
    took = f"{done.seconds:.1f} s, {done.counting:.1f} of them for counting"
    if done.out is None:
        yield f"Nothing was written ({took})."
    else:
        yield f"Wrote {printable(str(done.out))}; from_pretrained loads it ({took})."


def shrunken_sheets(done: ShrunkVocabulary) -> list[Sheet]:
    """A row a tensor that became shorter; then a row for each of the most frequent tokens that leave."""
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
