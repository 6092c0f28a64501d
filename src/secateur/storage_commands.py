"""``secateur compress`` and ``secateur expand``: compressed checkpoints from the command line.

Law: as in `secateur.cli`, which registers these two: results on stdout, and what the user can mend is raised.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from secateur.checkpoints import open_checkpoint
from secateur.storage import Compression, expand_checkpoint, save_compressed

__all__ = ["compress", "expand"]


def compress(
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with .safetensors files, or one .safetensors file.")
    ],
    out: Annotated[Path, typer.Option(help="What to write: a directory for a directory, which must not exist.")],
    masks: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep these masks, a safetensors file of bools, beside the weights."),
    ] = None,
    zstd: Annotated[bool, typer.Option("--zstd", help="Smaller, and slower to load. Needs zstandard.")] = False,
) -> None:
    """Write a copy of a checkpoint in which zeros take almost no room. secateur expand gives it back, byte for byte.

    Each tensor is stored in the smallest of several ways; shards and all other files stay as they are. Only
    load_compressed reads the copy: the weight files are named *.compressed.safetensors so that nothing takes them for
    dense ones. OUT appears complete or not at all.
    """
    done = save_compressed(path, out, masks=None if masks is None else open_checkpoint(masks), zstd=zstd)
    _print(done, f"Wrote {out}: {_bytes(done.stored)} of {_bytes(done.dense)}, {done.ratio:.1%}")


def expand(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A compressed directory, or one compressed file.")],
    out: Annotated[Path, typer.Option(help="What to write: a directory for a directory, which must not exist.")],
) -> None:
    """Write the dense checkpoint that a compressed one was made of, byte for byte.

    Checkpoints in the sparse layouts of compressed-tensors (sparse-bitmask, sparse-24-bitmask) become dense, too. OUT
    appears complete or not at all.
    """
    done = expand_checkpoint(path, out)
    _print(done, f"Wrote {out}: {_bytes(done.dense)} from {_bytes(done.stored)}")


def _print(done: Compression, line: str) -> None:
    rows = [("Encoding", "Tensors", "Dense", "Stored")]
    for encoding in sorted({tensor.encoding for tensor in done.tensors}):
        tensors = [tensor for tensor in done.tensors if tensor.encoding == encoding]
        dense, stored = sum(tensor.dense for tensor in tensors), sum(tensor.stored for tensor in tensors)
        rows.append((encoding, f"{len(tensors):,}", _bytes(dense), _bytes(stored)))
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        typer.echo("  ".join(cells))
    typer.echo(f"\n{line} ({done.seconds:.1f} s).")


def _bytes(count: int) -> str:
    """As `secateur inspect` shows sizes.

    >>> _bytes(999), _bytes(1_500_000)
    ('999 B', '1.5 MB')
    """
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{size:.3g} {unit}"
    return f"{size / 1000:.3g} TB"
