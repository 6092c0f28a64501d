"""What oneshot says when all blocks are done, on stdout.

Law: what was left alone, what was warned of and what no token reached is said.
"""

from collections.abc import Iterator

from secateur.blockwise import OneShot
from secateur.support import Part, percent, printable

__all__ = [
    "pruned_blocks_parts",
]


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
