"""What experts says: what its result says of itself, and where it is.

Law: what is drawn is what is printed, of every mixture.
"""

from collections.abc import Iterator
from pathlib import Path

from secateur import shrinking
from secateur.shrinking import ShrunkExperts, proof_words
from secateur.support import Part, printable

__all__ = [
    "experts_parts",
]


def experts_parts(done: ShrunkExperts, profile: Path | None) -> Iterator[Part]:
    """What left, on what it was proved, and where it is."""
    yield from shrinking.experts_parts(done)
    yield f"{proof_words(done)}."
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        yield f"Left out, as they hold the weights in other forms: {files}."
    if profile is not None:
        yield f"The profile is in {printable(str(profile))}."
    if done.out is None:
        yield f"No model was written ({done.seconds:.1f} s)."
    else:
        yield f"Wrote {printable(str(done.out))}; from_pretrained loads it ({done.seconds:.1f} s)."
