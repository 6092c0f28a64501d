"""What the ``secateur.json`` of a directory claims of which blocks left, seen again on the stored bytes.

Law: every tensor is the source's that ``blocks.json`` names, byte for byte, but for those that the record says were
patched: of these the shape is, they hold numbers, and have the bytes that were written.
"""

from __future__ import annotations

from pathlib import Path

from secateur.checkpoints import (
    Verification,
    about_config,
    about_parameters,
    claims_of,
    is_made_by,
    open_checkpoint,
)
from secateur.shrinking.depth_directory import BLOCKS, FORMAT
from secateur.shrinking.verification import verify_origins

__all__ = ["has_fewer_blocks", "verify_depth_checkpoint"]


def has_fewer_blocks(directory: Path | str) -> bool:
    """Whether there is a record that `shrink_depth_checkpoint` wrote."""
    return is_made_by(directory, "shrink") and "blocks" in claims_of(Path(directory)).values


def verify_depth_checkpoint(directory: Path | str, source: Path | str | None = None) -> Verification:
    """Whether a directory is what its ``secateur.json`` and ``blocks.json`` say; compares with ``source`` if given.

    The files hold as many parameters as the record says, each tensor the bytes that were written, and ``config.json``
    the numbers. With the source: each tensor is the source's that ``blocks.json`` names, byte for byte, but for the
    patched ones; and other files are the source's.

    Args:
        directory: what `shrink_depth_checkpoint` wrote.
        source: what it was made from, if it is there still.

    Raises:
        CheckpointError: a damaged or missing directory or record. What does not hold is no error, but one of the
            result's ``problems``.
    """
    directory = Path(directory)
    checkpoint, read = open_checkpoint(directory), claims_of(directory)
    patched = read.inner("calibration").each_named("patched", float)
    problems = [*about_parameters(checkpoint, read), *about_config(checkpoint, read)]
    origins = (BLOCKS, FORMAT, "which blocks stayed")
    return verify_origins(checkpoint, read, source, origins, ("patched", patched), problems)
