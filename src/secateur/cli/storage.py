"""``secateur compress`` and ``secateur expand``: compressed checkpoints from the command line.

Law: results on stdout, everything else on stderr; whatever is wrong with the input is one line and exit code 2.
"""

from pathlib import Path
from typing import Annotated

import typer

from secateur.cli.options import NewCopy, Report
from secateur.cli.terminal import clear_errors, page_at, show, terminable


def compress(
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with .safetensors files, or one .safetensors file.")
    ],
    out: NewCopy,
    masks: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep these masks, a safetensors file of bools, beside the weights."),
    ] = None,
    zstd: Annotated[bool, typer.Option("--zstd", help="Smaller, and slower to load. Needs zstandard.")] = False,
    report: Report = None,
) -> None:
    """Write a copy of a checkpoint in which zeros take almost no room. secateur expand gives it back, byte for byte.

    Each tensor is stored in the smallest of several ways; shards and all other files stay as they are. Only
    load_compressed reads the copy: the weight files are named *.compressed.safetensors so that nothing takes them for
    dense ones. OUT appears complete or not at all.
    """
    with clear_errors(), terminable():
        from secateur.checkpoints import open_checkpoint
        from secateur.cli.printing import compressed_parts
        from secateur.storage import compressed_sheets, save_compressed
        from secateur.support import bytes_text, percent

        page = page_at(report)
        try:
            done = save_compressed(path, out, masks=None if masks is None else open_checkpoint(masks), zstd=zstd)
        except (KeyError, TypeError) as error:  # masks of other tensors, or no masks
            raise ValueError(error.args[0]) from None
        sizes = f"{bytes_text(done.stored)} of {bytes_text(done.dense)} dense, {percent(done.ratio)}"
        parts = compressed_parts(done, f"Wrote {out}: {sizes}")
        show(parts)
        asked = {"out": out, "masks": masks, "zstd": zstd}
        page.write(f"{path}, compressed", "compress", [path], asked, parts, lambda: compressed_sheets(done))


def expand(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A compressed directory, or one compressed file.")],
    out: NewCopy,
    report: Report = None,
) -> None:
    """Write the dense checkpoint that a compressed one was made of, byte for byte.

    Checkpoints in the sparse layouts of compressed-tensors (sparse-bitmask, sparse-24-bitmask) become dense, too. OUT
    appears complete or not at all.
    """
    with clear_errors(), terminable():
        from secateur.cli.printing import compressed_parts
        from secateur.storage import compressed_sheets, expand_checkpoint
        from secateur.support import bytes_text

        page = page_at(report)
        done = expand_checkpoint(path, out)
        parts = compressed_parts(done, f"Wrote {out}: {bytes_text(done.dense)} from {bytes_text(done.stored)}")
        show(parts)
        page.write(f"{path}, expanded", "expand", [path], {"out": out}, parts, lambda: compressed_sheets(done))
