"""What recover says on a page: the learning curve, parts of blocks, zeros before and after.

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


def recovered_sheets(done: Recovered) -> list[Sheet]:
    """The learning curve; a row a part of a block; a row a weight that has zeros."""
    sheets = []
    if done.losses:
        curve = done.curve(POINTS)
        losses = [loss for *_, loss in curve]
        steps = [str(first) if first == last else f"{first}-{last}" for first, last, _ in curve]
        chart = Chart(
            "The learning curve",
            f"The {done.loss} loss between the two models' outputs before each step; a point is the mean of its steps.",
            ["step"] * len(curve),
            losses,
            f"{done.loss} loss",
        )
        cells = [Cells("steps", steps), Cells(f"{done.loss} loss", losses, [f"{loss:.5f}" for loss in losses])]
        sheets.append(Sheet("By the outputs", cells, [chart]))
    if done.parts:
        names = [printable(each.block, 1000) for each in done.parts]
        before, after = [each.before for each in done.parts], [each.after for each in done.parts]
        places = {block: at for at, block in enumerate(dict.fromkeys(each.block for each in done.parts))}
        cells = [
            Cells("block", names),
            Cells("up to", [printable(each.part, 1000) for each in done.parts]),
            Cells("lost before", before, [f"{each:.5f}" for each in before]),
            Cells("after", after, [f"{each:.5f}" for each in after]),
        ]
        chart = Chart(
            "What each part lacks of the teacher's activations",
            "The share of the squared activations that is missing after the local part, in the order of the walk.",
            [f"{name}, {each.part}" for name, each in zip(names, done.parts, strict=True)],
            after,
            "lost",
            series=[printable(each.part, 1000) for each in done.parts],
            grid=[(printable(each.part, 1000), places[each.block]) for each in done.parts],
        )
        sheets.append(Sheet("Block by block", cells, [chart]))
    if done.zeros:
        cells = [
            Cells("weight", [printable(name, 1000) for name in done.zeros]),
            Cells("zeros before", [pair[0] for pair in done.zeros.values()]),
            Cells("zeros after", [pair[1] for pair in done.zeros.values()]),
        ]
        sheets.append(Sheet("Zeros", cells))
    return sheets
