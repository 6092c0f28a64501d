"""Which tensor of a source each tensor of a directory is, or which rows of one: written, written down, and read again.

Law: what is written has the source's bytes; what is written down names every tensor that has another name or fewer
entries, and those of the source that left.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from secateur.checkpoints import (
    HINT,
    Checkpoint,
    CheckpointError,
    Compared,
    Cuts,
    Hashed,
    VerifiedTensor,
    nbytes_of_cut,
    read_json,
    shape_of_cut,
    write_header,
)
from secateur.shrinking.directory import write_cut
from secateur.shrinking.plan import fits
from secateur.support import Fields, printable, track

__all__ = ["Origin", "about_origins", "origins_in", "origins_text", "unnamed", "write_origins"]

Origin = tuple[str, Cuts]
"""A tensor of the source, and which indices stay of its dimensions that become smaller."""


def write_origins(
    checkpoint: Checkpoint, target: Path, written: Mapping[str, Origin], *, nbytes: int, parameters: int
) -> dict[str, str]:
    """Writes ``{name: what it is}`` into the files that the source's tensors are in, and the index, if there is one;
    the SHA-256 of the bytes of each."""
    places: dict[str, str] = {}
    digests: dict[str, str] = {}
    for name, place, digest in track(_sliced(checkpoint, target, written), "slicing", total=len(written)):
        places[name], digests[name] = place, digest
    if checkpoint.index is not None:
        index = read_json(checkpoint.index)
        metadata = index.get("metadata")
        totals = {"total_size": nbytes, "total_parameters": parameters}
        if isinstance(metadata, dict):
            metadata.update({key: value for key, value in totals.items() if key in metadata})
        index["weight_map"] = dict(sorted(places.items()))
        path = target / checkpoint.index.relative_to(checkpoint.root)
        path.write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return digests


def _sliced(checkpoint: Checkpoint, target: Path, written: Mapping[str, Origin]) -> Iterator[tuple[str, str, str]]:
    """Writes each tensor into the file that its source is in; gives its name, the file's, and the digest."""
    by_source: dict[str, list[str]] = {}
    for name, (old, _) in written.items():
        by_source.setdefault(old, []).append(name)
    for file in checkpoint.files:
        names = [
            name
            for entry in checkpoint.entries.values()
            if entry.path == file
            for name in by_source.get(entry.name, ())
        ]
        if not names:
            continue  # all that it held has left
        shapes = {name: shape_of_cut(checkpoint.entries[written[name][0]], written[name][1]) for name in names}
        tensors = {}
        for name in names:
            entry = checkpoint.entries[written[name][0]]
            tensors[name] = (entry.dtype, shapes[name], nbytes_of_cut(entry, shapes[name]))
        place = file.relative_to(checkpoint.root)
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        with open(target / place, "wb", buffering=0) as opened:
            write_header(opened, tensors, checkpoint.metadata[file])
            for name in names:
                old, cuts = written[name]
                hashed = Hashed(opened)
                write_cut(cast(BinaryIO, hashed), checkpoint, checkpoint.entries[old], cuts, [])
                yield name, place.as_posix(), hashed.hexdigest()


def origins_text(checkpoint: Checkpoint, written: Mapping[str, Origin], kind: str) -> str:
    """As JSON, a file of this kind."""
    changed = {
        name: {"from": old, "kept": {str(at): each.tolist() for at, each in cuts.items()}}
        for name, (old, cuts) in written.items()
        if name != old or cuts
    }
    gone = sorted({*checkpoint} - {old for old, _ in written.values()})
    return json.dumps({"format": kind, "version": 1, "tensors": changed, "gone": gone})


def origins_in(path: Path, kind: str, what: str) -> tuple[Mapping[str, Origin], set[str]]:
    """What each tensor was that is another now, and which of the source's are nowhere."""
    try:
        read = Fields.read(path, error=CheckpointError, hint=HINT)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; it says {what}.") from None
    if read.take("format", str) != kind or read.take("version", int) != 1:
        raise read.wrong("format", f"is not {kind!r}, version 1")
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


def about_origins(
    checkpoint: Checkpoint, dense: Checkpoint, made_of: Mapping[str, Origin], file: str, moved: Collection[str] = ()
) -> Iterator[tuple[VerifiedTensor | None, str | None]]:
    """Whether each tensor is what a ``file`` says it is of the source's; of those that ``moved`` the shape."""
    for name in made_of:
        if name not in checkpoint:
            yield None, f"{printable(name)}: {file} says what it was; it is not here."
    for name, its in track(checkpoint.entries.items(), "verifying", total=len(checkpoint)):
        old, cuts = made_of.get(name, (name, {}))
        if old not in dense:
            yield None, f"{printable(name)}: was {printable(old)}, which is not in the source."
            continue
        entry = dense.entries[old]
        if not all(at < len(entry.shape) and fits(each, entry.shape[at]) for at, each in cuts.items()):
            yield None, f"{printable(name)}: {file} does not fit the source's shape {entry.shape}."
            continue
        wanted = shape_of_cut(entry, cuts)
        if (its.dtype, its.shape) != (entry.dtype, wanted):
            problem = f"{printable(name)}: {its.dtype} of shape {its.shape}; of the source stay {entry.dtype} {wanted}."
            yield VerifiedTensor(name, its.shape, its.dtype, None), problem
            continue
        if name in moved:
            yield VerifiedTensor(name, its.shape, its.dtype, None), None
            continue
        compared = Compared(checkpoint, name)
        write_cut(cast(BinaryIO, compared), dense, entry, cuts, [])
        same = compared.all_of_it
        problem = f"{printable(name)}: is not what stays of the source's {printable(old)}."
        yield VerifiedTensor(name, its.shape, its.dtype, None, unchanged=same), None if same else problem


def unnamed(
    checkpoint: Checkpoint, dense: Checkpoint, made_of: Mapping[str, Origin], gone: Collection[str], file: str
) -> Iterator[str]:
    """What of the source is nowhere and is not said to have left, or the other way round."""
    used = {made_of.get(name, (name, {}))[0] for name in checkpoint}
    for name in dense:
        if name not in used and name not in gone:
            yield f"{printable(name)}: in the source, but not here, and {file} does not say that it left."
    for name in sorted(used & {*gone}):
        yield f"{printable(name)}: left, {file} says; it is here."
