"""The tables of `oneshot` on a page: a row and a mark for every weight.

Law: what is drawn is what the result holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from secateur.report import Cells, Chart, Sheet
from secateur.support import percent, printable

if TYPE_CHECKING:
    from secateur.blockwise.outcome import OneShot

__all__ = ["pruned_blocks_sheets"]


def pruned_blocks_sheets(done: OneShot) -> list[Sheet]:
    """The sheets of a `oneshot` result: a table with a row for each weight, in the order of the walk."""
    layers = done.layers
    names = [printable(each.name, 1000) for each in layers]
    removed = [each.sparsity for each in layers]
    errors = [each.error for each in layers]
    experts = [", ".join(map(str, each.without_tokens)) for each in layers]
    cells = [
        Cells("weight", names),
        Cells("shape", ["x".join(map(str, each.shape)) for each in layers]),
        Cells("removed", removed, [percent(each) for each in removed], removed),
        Cells("error", errors, ["-" if each is None else f"{each:.4f}" for each in errors]),
        Cells("tokens", [each.tokens for each in layers], [f"{each.tokens:,}" for each in layers]),
        Cells("seconds", [each.seconds for each in layers], [f"{each.seconds:.1f}" for each in layers]),
        *([Cells("experts without tokens", experts)] if any(experts) else []),
    ]
    order = "in the order of the walk; a line joins what differs in numbers alone."
    of_error = Chart(
        "Each weight's output error", f"The squared relative error of the outputs, {order}", names, errors, "error"
    )
    of_removed = Chart(
        "How much was removed of each",
        f"The share of entries that are zero, {order}",
        names,
        removed,
        "removed",
        share=True,
    )
    return [Sheet("Weight by weight", cells, [of_error, of_removed])]
