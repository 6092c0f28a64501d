"""What the ``secateur.json`` of a directory claims of which experts left, seen again on the stored bytes.

Law: every tensor is the source's that ``experts.json`` names, or rows of it, byte for byte, but for those that the
record says were repaired, of which the shape is; and what is not used of the source is named there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from secateur.checkpoints import (
    RECORD,
    Checkpoint,
    Verification,
    about_config,
    about_parameters,
    claims_of,
    is_made_by,
    open_checkpoint,
)
from secateur.shrinking.expert_directory import EXPERTS, FORMAT
from secateur.shrinking.verification import verify_origins
from secateur.support import Fields, printable

__all__ = ["has_fewer_experts", "verify_experts_checkpoint"]


def has_fewer_experts(directory: Path | str) -> bool:
    """Whether there is a record that `shrink_experts_checkpoint` wrote."""
    return is_made_by(directory, "experts")


def verify_experts_checkpoint(directory: Path | str, source: Path | str | None = None) -> Verification:
    """Whether a directory is what its ``secateur.json`` and ``experts.json`` say; compares with ``source`` if given.

    The files hold as many parameters as the record says, and ``config.json`` the numbers. With the source: each tensor
    is the source's that ``experts.json`` names, byte for byte, but for those that were repaired with data, which are
    counted; of each router the rows that the record names stayed; and other files are the source's.

    Args:
        directory: what `shrink_experts_checkpoint` wrote.
        source: what it was made from, if it is there still.

    Raises:
        CheckpointError: a damaged or missing directory or record. What does not hold is no error, but one of the
            result's ``problems``.
    """
    directory = Path(directory)
    checkpoint, read = open_checkpoint(directory), claims_of(directory)
    repaired = read.each("repaired", str) if "repaired" in read.values else []
    origins = (EXPERTS, FORMAT, "which experts stayed")
    return verify_origins(checkpoint, read, source, origins, ("repaired", repaired), _about_sizes(checkpoint, read))


def _about_sizes(checkpoint: Checkpoint, read: Fields) -> Iterator[str]:
    yield from about_parameters(checkpoint, read)
    yield from about_config(checkpoint, read)
    kept = read.inner("kept")
    for name, change in read.inners_named("experts"):
        left = change.take("to", int, least=1)
        stays = kept.each(name, int, least=0)
        if len(set(stays)) != left:
            yield f"{RECORD}: {printable(name)} keeps {len(set(stays))} experts, and says {left}."
