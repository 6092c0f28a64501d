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
    VerifiedTensor,
    about_config,
    about_parameters,
    claims_of,
    is_made_by,
    open_checkpoint,
)
from secateur.shrinking.expert_directory import EXPERTS, FORMAT
from secateur.shrinking.origins import about_origins, origins_in, unnamed
from secateur.shrinking.verification import about_bytes, about_files, digests_in
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
    made_of, gone = origins_in(directory / EXPERTS, FORMAT, "which experts stayed")
    problems = list(_about_sizes(checkpoint, read))
    repaired = {*read.each("repaired", str)} if "repaired" in read.values else set()
    problems += [
        f"{printable(name)}: was repaired, {RECORD} says; it is not here." for name in sorted(repaired - {*checkpoint})
    ]
    written = digests_in(read)
    stored = dict(about_bytes(checkpoint, written, repaired))
    if source is None:
        problems += stored.values()
        tensors = [VerifiedTensor(name, each.shape, each.dtype, None) for name, each in checkpoint.entries.items()]
        what = "whether the tensors are the source's" if written else "what the tensors hold"
        without = (f"no source was given: {what}, and whether all else is unchanged",)
        return Verification(directory, None, None, tuple(tensors), 0, tuple(problems), without)
    dense = open_checkpoint(source)
    found: list[VerifiedTensor] = []
    for tensor, problem in about_origins(checkpoint, dense, made_of, EXPERTS, repaired):
        found += [tensor] if tensor else []
        problems += [problem] if problem else []
        if problem and tensor:
            stored.pop(tensor.name, None)  # it is told already
    problems += stored.values()
    problems += unnamed(checkpoint, dense, made_of, gone, EXPERTS)
    same, others = about_files(checkpoint, dense, {Path(RECORD), Path(EXPERTS), Path("config.json")})
    what = "whether these are the best values" if written else "what they hold"
    unchecked = [f"{len(repaired)} tensors were repaired with data: {what}"] if repaired else []
    return Verification(directory, dense.root, None, tuple(found), same, (*problems, *others), tuple(unchecked))


def _about_sizes(checkpoint: Checkpoint, read: Fields) -> Iterator[str]:
    yield from about_parameters(checkpoint, read)
    yield from about_config(checkpoint, read)
    kept = read.inner("kept")
    for name, change in read.inners_named("experts"):
        left = change.take("to", int, least=1)
        stays = kept.each(name, int, least=0)
        if len(set(stays)) != left:
            yield f"{RECORD}: {printable(name)} keeps {len(set(stays))} experts, and says {left}."
