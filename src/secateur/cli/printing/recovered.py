"""What recover says when it is done, on stdout.

Law: the zeros before and after are said, and what was left out.
"""

from collections.abc import Iterator

from secateur.recovery import Recovered
from secateur.support import Part, printable

__all__ = [
    "recovered_parts",
]


def recovered_parts(done: Recovered) -> Iterator[Part]:
    """All but the tables; where it is."""
    yield from (line for line in done.lines() if not line.startswith("In "))
    yield ""
    yield f"Wrote {printable(str(done.out))}; secateur.json in it says what was done."
