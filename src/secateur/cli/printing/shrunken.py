"""What shrink prints: what its result says of itself, as tables, and how to load what was written."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from secateur.shrinking import CheckpointShrinking, Rows, checkpoint_parts, proof_words
from secateur.support import printable, table_of

__all__ = ["print_checkpoint", "print_parts", "print_written"]


def print_parts(console: Console, parts: Iterable[Rows | str]) -> None:
    for part in parts:
        console.print(part if isinstance(part, str) else table_of(part.columns, part.rows))


def print_written(console: Console, out: Path | None, factory: str, expression: str) -> None:
    if out is None:
        console.print("Nothing was written.")
        return
    module, _, name = factory.partition(":")
    base = name.partition(".")[0]
    console.print(f"Wrote plan.json and model.safetensors to {printable(str(out))}. To load it:\n")
    for line in (
        "from secateur import load_shrunken",
        f"from {module} import {base}",
        f"model = load_shrunken({expression}, {str(out)!r})",
    ):
        console.print(f"    {printable(line)}", soft_wrap=True)


def print_checkpoint(console: Console, done: CheckpointShrinking, *, verbose: bool) -> None:
    print_parts(console, checkpoint_parts(done, verbose=verbose))
    console.print(f"\n{proof_words(done)} ({done.seconds:.1f} s).", soft_wrap=not console.is_terminal)
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        console.print(f"Left out, as they hold the weights in other forms: {files}.", soft_wrap=True)
    console.print(
        "Nothing was written." if done.out is None else f"Wrote {printable(str(done.out))}; from_pretrained loads it.",
        soft_wrap=True,
    )
