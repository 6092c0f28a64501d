"""What the ``secateur.json`` of a directory claims of which experts left, seen again on the stored bytes.

Law: every tensor is the source's that ``experts.json`` names, or rows of it, byte for byte, but for those that the
record says were repaired, of which the shape is; and what is not used of the source is named there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from secateur.checkpoints import (
    HINT,
    RECORD,
    Checkpoint,
    CheckpointError,
    Compared,
    Verification,
    VerifiedTensor,
    about_config,
    about_parameters,
    claims_of,
    is_made_by,
    open_checkpoint,
    shape_of_cut,
)
from secateur.shrinking.directory import write_cut
from secateur.shrinking.expert_directory import EXPERTS, FORMAT
from secateur.shrinking.mixtures import Origin
from secateur.shrinking.plan import fits
from secateur.shrinking.verification import about_files
from secateur.support import Fields, printable, track

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
    made_of, gone = _made_of(directory / EXPERTS)
    problems = list(_about_sizes(checkpoint, read))
    repaired = {*read.each("repaired", str)} if "repaired" in read.values else set()
    problems += [
        f"{printable(name)}: was repaired, {RECORD} says; it is not here." for name in sorted(repaired - {*checkpoint})
    ]
    if source is None:
        tensors = [VerifiedTensor(name, each.shape, each.dtype, None) for name, each in checkpoint.entries.items()]
        unknown = "no source was given: what the tensors hold, and whether all else is unchanged"
        return Verification(directory, None, None, tuple(tensors), 0, tuple(problems), (unknown,))
    dense = open_checkpoint(source)
    found: list[VerifiedTensor] = []
    for tensor, problem in _about_tensors(checkpoint, dense, made_of, repaired):
        found += [tensor] if tensor else []
        problems += [problem] if problem else []
    used = {made_of.get(name, (name, {}))[0] for name in checkpoint}
    problems += [
        f"{printable(name)}: in the source, but not here, and {EXPERTS} does not say that it left."
        for name in dense
        if name not in used and name not in gone
    ]
    problems += [f"{printable(name)}: left, {EXPERTS} says; it is here." for name in sorted(gone & used)]
    same, others = about_files(checkpoint, dense, {Path(RECORD), Path(EXPERTS), Path("config.json")})
    unchecked = [f"{len(repaired)} tensors were repaired with data: what they hold"] if repaired else []
    return Verification(directory, dense.root, None, tuple(found), same, (*problems, *others), tuple(unchecked))


def _made_of(path: Path) -> tuple[Mapping[str, Origin], set[str]]:
    """What each tensor was that is another now, and which of the source's are nowhere."""
    try:
        read = Fields.read(path, error=CheckpointError, hint=HINT)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; it says which experts stayed.") from None
    if read.take("format", str) != FORMAT or read.take("version", int) != 1:
        raise read.wrong("format", f"is not {FORMAT!r}, version 1")
    found: dict[str, Origin] = {}
    for name, its in read.inners_named("tensors"):
        kept = its.inner("kept")
        cuts = {}
        for at in kept.values:
            if at not in map(str, range(8)):
                raise kept.wrong(at, "is no dimension")
            cuts[int(at)] = np.array(kept.each(at, int, least=0, most=2**62), dtype=np.int64)
        found[name] = (its.take("from", str), cuts)
    return found, set(read.each("gone", str))


def _about_sizes(checkpoint: Checkpoint, read: Fields) -> Iterator[str]:
    yield from about_parameters(checkpoint, read)
    yield from about_config(checkpoint, read)
    kept = read.inner("kept")
    for name, change in read.inners_named("experts"):
        left = change.take("to", int, least=1)
        stays = kept.each(name, int, least=0)
        if len(set(stays)) != left:
            yield f"{RECORD}: {printable(name)} keeps {len(set(stays))} experts, and says {left}."


def _about_tensors(
    checkpoint: Checkpoint, dense: Checkpoint, made_of: Mapping[str, Origin], repaired: Collection[str]
) -> Iterator[tuple[VerifiedTensor | None, str | None]]:
    for name in made_of:
        if name not in checkpoint:
            yield None, f"{printable(name)}: {EXPERTS} says what it was; it is not here."
    for name, its in track(checkpoint.entries.items(), "verifying", total=len(checkpoint)):
        old, cuts = made_of.get(name, (name, {}))
        if old not in dense:
            yield None, f"{printable(name)}: was {printable(old)}, which is not in the source."
            continue
        entry = dense.entries[old]
        if not all(at < len(entry.shape) and fits(each, entry.shape[at]) for at, each in cuts.items()):
            yield None, f"{printable(name)}: {EXPERTS} does not fit the source's shape {entry.shape}."
            continue
        wanted = shape_of_cut(entry, cuts)
        if (its.dtype, its.shape) != (entry.dtype, wanted):
            problem = f"{printable(name)}: {its.dtype} of shape {its.shape}; of the source stay {entry.dtype} {wanted}."
            yield VerifiedTensor(name, its.shape, its.dtype, None), problem
            continue
        if name in repaired:
            yield VerifiedTensor(name, its.shape, its.dtype, None), None
            continue
        compared = Compared(checkpoint, name)
        write_cut(cast(BinaryIO, compared), dense, entry, cuts, [])
        same = compared.all_of_it
        problem = f"{printable(name)}: is not what stays of the source's {printable(old)}."
        yield VerifiedTensor(name, its.shape, its.dtype, None, unchanged=same), None if same else problem
