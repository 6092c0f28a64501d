"""What shrink says: what its result says of itself, and how to load what was written.

Law: what leaves and what stays is named as the library names it.
"""

from collections.abc import Iterator
from pathlib import Path

from secateur.cli.terminal import printing
from secateur.shrinking import (
    CheckpointShrinking,
    Shrunk,
    ShrunkDepth,
    checkpoint_parts,
    depth_parts,
    proof_words,
    shrunk_parts,
)
from secateur.support import Part, printable

__all__ = [
    "blocks_parts",
    "directory_parts",
    "model_parts",
    "print_loading",
]


def model_parts(done: Shrunk, out: Path | None, seconds: float, *, verbose: bool = False) -> Iterator[Part]:
    """What left a model, whether that was proved, and where it is."""
    yield from shrunk_parts(done, verbose=verbose)
    yield ""
    proof = "Proved on random weights that nothing else changed" if done.asked.verify else "Not proved, as asked"
    yield f"{proof} ({seconds:.1f} s)."
    if out is None:
        yield "Nothing was written."
    else:
        yield f"Wrote plan.json and model.safetensors to {printable(str(out))}."


def print_loading(out: Path, factory: str, expression: str) -> None:
    """The lines of Python that load it, each on one line, to be copied."""
    module, _, name = factory.partition(":")
    with printing() as console:
        console.print("To load it:\n")
        for line in (
            "from secateur import load_shrunken",
            f"from {module} import {name.partition('.')[0]}",
            f"model = load_shrunken({expression}, {str(out)!r})",
        ):
            console.print(f"    {printable(line, 1000)}", soft_wrap=True)


def directory_parts(done: CheckpointShrinking, *, verbose: bool = False) -> Iterator[Part]:
    """What left a directory, on what that was proved, and where it is."""
    yield from checkpoint_parts(done, verbose=verbose)
    yield ""
    yield f"{proof_words(done)} ({done.seconds:.1f} s)."
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        yield f"Left out, as they hold the weights in other forms: {files}."
    yield "Nothing was written." if done.out is None else f"Wrote {printable(str(done.out))}; from_pretrained loads it."


def blocks_parts(done: ShrunkDepth) -> Iterator[Part]:
    """Which blocks left a directory, on what that was proved, and where it is."""
    yield from depth_parts(done)
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        yield f"Left out, as they hold the weights in other forms: {files}."
    if done.out is None:
        yield f"Nothing was written ({done.seconds:.1f} s)."
    else:
        yield f"Wrote {printable(str(done.out))}; from_pretrained loads it ({done.seconds:.1f} s)."
