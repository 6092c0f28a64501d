"""What oneshot says when all blocks are done: parts for stdout, sheets for a page.

Law: what was left alone, what was warned of and what no token reached is said.
"""

from collections.abc import Iterator

from secateur.blockwise import OneShot
from secateur.report import Cells, Chart, Sheet
from secateur.support import Part, percent, printable

__all__ = ["pruned_blocks_parts", "pruned_blocks_sheets"]


def pruned_blocks_parts(done: OneShot) -> Iterator[Part]:
    """Sums over all weights; reasons, warnings, experts without tokens; where it is."""
    yield (
        f"Pruned {len(done.layers)} weights, {percent(done.sparsity)} of their entries; the mean squared relative "
        f"error of their outputs is {done.error:.4f}."
    )
    for reason, names in done.left_alone.items():
        yield f"Left alone, {reason}: {len(names)}, such as {printable(names[0])}."
    for warning in done.warnings:
        yield f"Warning: {printable(warning, 400)}"
    idle = [layer.name for layer in done.layers if layer.without_tokens or not layer.tokens]
    if idle:
        yield (
            f"{len(idle)} weights have experts that no token was sent to, and were pruned by magnitude there, such as "
            f"{printable(idle[0])}; more calibration text may reach them."
        )
    yield ""
    yield f"Wrote {printable(str(done.out))} ({done.seconds:.1f} s); secateur.json in it says what was done."


def pruned_blocks_sheets(done: OneShot) -> list[Sheet]:
    """A row a weight, in the order of the walk."""
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
        "What each weight's outputs lost", f"The squared relative error of the outputs, {order}", names, errors, "error"
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
