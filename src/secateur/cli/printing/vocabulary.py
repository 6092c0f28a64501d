"""What vocabulary says: what its result says of itself, and where it is.

Law: tokens are printed as text that holds no control character.
"""

from collections.abc import Iterator

from secateur.support import Part, printable
from secateur.vocabulary import ShrunkVocabulary, vocabulary_parts

__all__ = [
    "shrunken_parts",
]


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
        loads = "; from_pretrained loads it" if done.fields else ""  # of a table of tokens there is no configuration
        yield f"Wrote {printable(str(done.out))}{loads} ({took})."
