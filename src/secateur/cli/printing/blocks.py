"""What oneshot prints when all blocks are done."""

from rich.console import Console

from secateur.blockwise import OneShot
from secateur.support import printable

__all__ = ["print_pruned_blocks"]


def print_pruned_blocks(console: Console, done: OneShot) -> None:
    wide = not console.is_terminal
    console.print(
        f"Pruned {len(done.layers)} weights, {done.sparsity:.1%} of their entries; the mean squared relative error of "
        f"their outputs is {done.error:.4f}.",
        soft_wrap=wide,
    )
    for reason, names in done.left_alone.items():
        console.print(f"Left alone, {reason}: {len(names)}, such as {printable(names[0])}.", soft_wrap=wide)
    for warning in done.warnings:
        console.print(f"Warning: {printable(warning, 400)}", soft_wrap=wide)
    idle = [layer.name for layer in done.layers if layer.without_tokens or not layer.tokens]
    if idle:
        console.print(
            f"{len(idle)} weights have experts that no token was sent to, and were pruned by magnitude there, such as "
            f"{printable(idle[0])}; more calibration text may reach them.",
            soft_wrap=wide,
        )
    console.print(
        f"\nWrote {printable(str(done.out))} ({done.seconds:.1f} s); secateur.json in it says what was done.",
        soft_wrap=wide,
    )
