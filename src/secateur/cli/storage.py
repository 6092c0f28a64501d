"""``secateur compress`` and ``secateur expand``: compressed checkpoints from the command line.

Law: as in `secateur.cli`, which registers these two: results on stdout, one line on stderr for what the user can mend.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from secateur.checkpoints import open_checkpoint
from secateur.cli.terminal import clear_errors, printing, table_of, terminable
from secateur.storage import Compression, expand_checkpoint, save_compressed
from secateur.support import bytes_text, percent, printable

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
    with clear_errors(), terminable():
        try:
            done = save_compressed(path, out, masks=None if masks is None else open_checkpoint(masks), zstd=zstd)
        except (KeyError, TypeError) as error:  # masks of other tensors, or no masks
            raise ValueError(error.args[0]) from None
        share = percent(done.ratio)
        _print(done, f"Wrote {out}: {bytes_text(done.stored)} of {bytes_text(done.dense)} dense, {share}")


def expand(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A compressed directory, or one compressed file.")],
    out: Annotated[Path, typer.Option(help="What to write: a directory for a directory, which must not exist.")],
) -> None:
    """Write the dense checkpoint that a compressed one was made of, byte for byte.

    Checkpoints in the sparse layouts of compressed-tensors (sparse-bitmask, sparse-24-bitmask) become dense, too. OUT
    appears complete or not at all.
    """
    with clear_errors(), terminable():
        done = expand_checkpoint(path, out)
        _print(done, f"Wrote {out}: {bytes_text(done.dense)} from {bytes_text(done.stored)}")


def _print(done: Compression, line: str) -> None:
    table = table_of("Encoding", ">Tensors", ">Dense", ">Stored", ">Ratio")
    for encoding in sorted({tensor.encoding for tensor in done.tensors}):
        tensors = [tensor for tensor in done.tensors if tensor.encoding == encoding]
        dense, stored = sum(tensor.dense for tensor in tensors), sum(tensor.stored for tensor in tensors)
        ratio = percent(stored / dense if dense else None)
        table.add_row(encoding, f"{len(tensors):,}", bytes_text(dense), bytes_text(stored), ratio)
    with printing() as console:
        console.print(table)
        console.print(f"\n{escape(printable(line))} ({done.seconds:.1f} s).", soft_wrap=not console.is_terminal)
    sys.stdout.flush()
