"""The tables of `recover` on a page: the learning curve, parts of blocks, zeros before and after.

Law: the zeros before and after are said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from secateur.report import Cells, Chart, Sheet
from secateur.support import printable

if TYPE_CHECKING:
    from secateur.recovery.outcome import Recovered

__all__ = ["recovered_sheets"]

POINTS = 200  # of the learning curve on a page
ROWS = 20  # of its table


def recovered_sheets(done: Recovered) -> list[Sheet]:
    """The sheets of a `recover` result: the learning curve, the parts of blocks, and the weights with zeros."""
    sheets = []
    if done.losses:
        curve, rows = done.curve(POINTS), done.curve(ROWS)
        loss = f"loss ({done.loss})"
        chart = Chart(
            "The learning curve",
            "How far the model's outputs are from the teacher's, before each step; a point is the mean of its steps.",
            [_span(first, last, "step") for first, last, _ in curve],
            [value for *_, value in curve],
            loss,
            series=[loss] * len(curve),
            places=[(first + last) / 2 for first, last, _ in curve],
            along="step",
        )
        values = [value for *_, value in rows]
        cells = [
            Cells("steps", [first for first, *_ in rows], [_span(first, last) for first, last, _ in rows]),
            Cells(loss, values, [f"{each:.5f}" for each in values]),
        ]
        sheets.append(Sheet("By the outputs", cells, [chart]))
    if done.parts:
        names = [printable(each.block, 1000) for each in done.parts]
        ends = [printable(each.part, 1000) for each in done.parts]
        before, after = [each.before for each in done.parts], [each.after for each in done.parts]
        cells = [
            Cells("block", names),
            Cells("up to", ends),
            Cells("lost before", before, [f"{each:.5f}" for each in before]),
            Cells("after", after, [f"{each:.5f}" for each in after]),
        ]
        places = list(range(1, 1 + len(names)))
        chart = Chart(
            "Each part's relative error to the teacher",
            "The share of the squared activations that is missing, in the order of the walk.",
            [f"{name}, up to {end}" for name, end in zip(names, ends, strict=True)] * 2,
            [*before, *after],
            "lost",
            series=["before"] * len(names) + ["after"] * len(names),
            places=places * 2,
            along="part",
        )
        sheets.append(Sheet("Block by block", cells, [chart]))
    if done.zeros:
        before_after = [[pair[at] for pair in done.zeros.values()] for at in (0, 1)]
        cells = [
            Cells("weight", [printable(name, 1000) for name in done.zeros]),
            *(
                Cells(f"zeros {word}", counts, [f"{each:,}" for each in counts])
                for word, counts in zip(("before", "after"), before_after, strict=True)
            ),
        ]
        sheets.append(Sheet("Zeros", cells))
    return sheets


def _span(first: int, last: int, word: str = "") -> str:
    """Steps in words, from one to another.

    >>> _span(3, 3), _span(3, 5, "step")
    ('3', 'steps 3-5')
    """
    if first == last:
        return f"{word} {first}".strip()
    return f"{word}s {first}-{last}" if word else f"{first}-{last}"
