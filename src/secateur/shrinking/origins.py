"""Origins: from which tensor of the source each tensor of a directory was copied, and which rows; written and read.

Law: tensors have the source's bytes; the record names every tensor that has another name or fewer entries, and those of
the source that left.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from secateur.checkpoints import (
    HINT,
    Checkpoint,
    CheckpointError,
    Cuts,
    Hashed,
    nbytes_of_cut,
    new_file,
    read_json,
    shape_of_cut,
    write_header,
)
from secateur.shrinking.directory import write_cut
from secateur.support import Fields, track

__all__ = [
    "Origin",
    "files_of",
    "origins_in",
    "origins_text",
    "write_file",
    "write_index",
    "write_origins",
]

Origin = tuple[str, Cuts]
"""A tensor of the source, and which indices stay of its dimensions that become smaller."""


def write_origins(
    checkpoint: Checkpoint, target: Path, written: Mapping[str, Origin], *, nbytes: int, parameters: int
) -> dict[str, str]:
    """Writes ``{name: what it is}`` into the files that the source's tensors are in, and the index, if there is one;
    the SHA-256 of the bytes of each."""
    places: dict[str, str] = {}
    digests: dict[str, str] = {}
    for place, names in track(files_of(checkpoint, written), "slicing"):
        digests |= write_file(checkpoint, target, place, names, written)
        places.update(dict.fromkeys(names, place.as_posix()))
    write_index(checkpoint, target, places, nbytes=nbytes, parameters=parameters)
    return digests


def files_of(checkpoint: Checkpoint, written: Mapping[str, Origin]) -> list[tuple[Path, list[str]]]:
    """The files of which something is left, within the directory, and the tensors that each will hold."""
    by_source: dict[str, list[str]] = {}
    for name, (old, _) in written.items():
        by_source.setdefault(old, []).append(name)
    found = []
    for file in checkpoint.files:
        here = [entry.name for entry in checkpoint.entries.values() if entry.path == file]
        names = [name for old in here for name in by_source.get(old, ())]
        if names:
            found.append((file.relative_to(checkpoint.root), names))
    return found


def write_file(
    checkpoint: Checkpoint, target: Path, place: Path, names: Sequence[str], written: Mapping[str, Origin]
) -> dict[str, str]:
    """Writes one file, which is on the disk then; the SHA-256 of the bytes of each tensor."""
    tensors = {}
    for name in names:
        entry = checkpoint.entries[written[name][0]]
        shape = shape_of_cut(entry, written[name][1])
        tensors[name] = (entry.dtype, shape, nbytes_of_cut(entry, shape))
    digests = {}
    (target / place).parent.mkdir(parents=True, exist_ok=True)
    with new_file(target / place, sum(nbytes for _, _, nbytes in tensors.values())) as opened:
        write_header(opened, tensors, checkpoint.metadata[checkpoint.root / place])
        for name in names:
            old, cuts = written[name]
            hashed = Hashed(opened)
            write_cut(cast(BinaryIO, hashed), checkpoint, checkpoint.entries[old], cuts, [])
            digests[name] = hashed.hexdigest()
        opened.flush()
        os.fsync(opened.fileno())
    return digests


def write_index(
    checkpoint: Checkpoint, target: Path, places: Mapping[str, str], *, nbytes: int, parameters: int
) -> None:
    """The index, where the source has one: ``{name: file}``."""
    if checkpoint.index is None:
        return
    index = read_json(checkpoint.index)
    metadata = index.get("metadata")
    totals = {"total_size": nbytes, "total_parameters": parameters}
    if isinstance(metadata, dict):
        metadata.update({key: value for key, value in totals.items() if key in metadata})
    index["weight_map"] = dict(sorted(places.items()))
    path = target / checkpoint.index.relative_to(checkpoint.root)
    path.write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", "utf-8")


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
    """The origin of each tensor that was renamed or sliced, and the source's tensors that left."""
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
