"""Large files that are written past the system's cache of pages. What stays of stored tensors whose slices leave, read
and written a piece at a time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secateur.checkpoints.reading import Checkpoint, CheckpointError, TensorEntry, read_json, write_header
from secateur.support import naming, printable, track

# ---- Large files that are written past the system's cache of pages.
#
# Law: the bytes are those that an ordinary file would have; where a system or a file system does not take them so, it
# is an ordinary file.
#
# What is sliced is written once, and no one reads it at once. Copied into the cache it takes longer than the disk
# does, and drives out what other programs have there.

_LEAST = 1 << 26  # bytes of a file of which it is worth it
_BUFFER = 1 << 23  # a multiple of what disks take at a time
_DIRECT: int = getattr(os, "O_DIRECT", 0)


@contextlib.contextmanager
def new_file(path: Path, nbytes: int) -> Iterator[BinaryIO]:
    """A file to write about so many bytes to, one after the other; `flush` before it is synced."""
    descriptor = None
    if _DIRECT and nbytes >= _LEAST:
        with contextlib.suppress(OSError):  # not of this file system; what else is wrong an ordinary file says
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | _DIRECT, 0o666)
    if descriptor is None:
        with naming(path), open(path, "wb", buffering=0) as opened:
            yield opened
        return
    try:
        with naming(path), ThreadPoolExecutor(1, "secateur-write") as thread:
            file = _Direct(descriptor, thread)
            yield cast(BinaryIO, file)
            file.flush()
    finally:
        os.close(descriptor)


class _Direct:
    """Collects what is written, and writes a buffer while the other one is filled."""

    def __init__(self, descriptor: int, thread: ThreadPoolExecutor) -> None:
        self._descriptor, self._thread = descriptor, thread
        self._filling, self._other = mmap.mmap(-1, _BUFFER), mmap.mmap(-1, _BUFFER)  # begin where a page does
        self._filled = 0
        self._writing: Future[None] | None = None

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: memoryview) -> int:
        done = 0
        while done < len(data):
            count = min(len(data) - done, _BUFFER - self._filled)
            self._filling[self._filled : self._filled + count] = data[done : done + count]
            self._filled += count
            done += count
            if self._filled == _BUFFER:
                self._wait()
                self._writing = self._thread.submit(self._write, memoryview(self._filling))
                self._filling, self._other, self._filled = self._other, self._filling, 0
        return len(data)

    def flush(self) -> None:
        """All that was written is the system's; from here on it is an ordinary file, since its end is no page's."""
        self._wait()
        self._be_ordinary()
        self._write(memoryview(self._filling)[: self._filled])
        self._filled = 0

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, view: memoryview) -> None:
        while view:
            try:
                count = os.write(self._descriptor, view)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._be_ordinary():
                    raise
                continue  # it takes other sizes, or only some of it was written
            view = view[count:]

    def _be_ordinary(self) -> bool:
        """Whether it was none before."""
        import fcntl  # there is none where files are always ordinary

        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        return bool(flags & _DIRECT)


# ---- What stays of stored tensors whose slices leave, read and written a piece at a time.
#
# Law: what stays has the bytes that it had, whatever the dtype; no more than a piece of one tensor is in memory.

PIECE = 1 << 24  # bytes of a tensor that are read at a time
Cuts = Mapping[int, npt.NDArray[np.int64]]
"""Which indices stay, ascending, of each dimension that becomes smaller."""
Origin = tuple[str, Cuts]
"""A tensor of the source, and which indices stay of its dimensions that become smaller."""
Write = Callable[[BinaryIO, Checkpoint, TensorEntry, Cuts], None]


def shape_of_cut(entry: TensorEntry, cuts: Cuts) -> tuple[int, ...]:
    return tuple(len(cuts[at]) if at in cuts else size for at, size in enumerate(entry.shape))


def nbytes_of_cut(entry: TensorEntry, shape: tuple[int, ...]) -> int:
    return entry.nbytes if shape == entry.shape else entry.nbytes // entry.numel * math.prod(shape)


def pieces_of_cut(checkpoint: Checkpoint, entry: TensorEntry, cuts: Cuts, *, as_rows: bool = False) -> Iterator[Tensor]:
    """What stays of one tensor, some rows at a time; of one that stays whole its bytes, unless rows are asked for."""
    if not cuts and not as_rows:
        for start in range(0, entry.nbytes, PIECE):
            yield checkpoint.raw(entry.name, start, min(start + PIECE, entry.nbytes))
        return
    first = 0
    for piece in row_pieces(checkpoint, entry, max(1, PIECE // max(1, entry.nbytes // entry.shape[0]))):
        last = first + len(piece)
        for at, indices in cuts.items():
            if at == 0:
                low, high = np.searchsorted(indices, [first, last])
                indices = indices[low:high] - first
            piece = piece.index_select(at, torch.from_numpy(indices))
        yield piece
        first = last


def row_pieces(checkpoint: Checkpoint, entry: TensorEntry, count: int) -> Iterator[Tensor]:
    """A tensor in blocks of so many rows."""
    dtype = entry.torch_dtype
    if dtype is None:
        where = f"{printable(entry.name)} in {entry.path}"
        raise CheckpointError(f"{where} is {entry.dtype}, which this torch cannot read; save it in another.")
    row = entry.nbytes // entry.shape[0]
    for first in range(0, entry.shape[0], count):
        last = min(first + count, entry.shape[0])
        yield checkpoint.raw(entry.name, first * row, last * row).view(dtype).reshape(-1, *entry.shape[1:])


def write_bytes(written: BinaryIO, data: Tensor) -> None:
    """The bytes of a tensor."""
    view = data.contiguous().reshape(-1).view(torch.uint8).numpy().data
    while view:
        view = view[written.write(view) :]


def write_cut(written: BinaryIO, checkpoint: Checkpoint, entry: TensorEntry, cuts: Cuts) -> None:
    """What stays of a tensor, as it was."""
    for piece in pieces_of_cut(checkpoint, entry, cuts):
        write_bytes(written, piece)


def files_of(checkpoint: Checkpoint, written: Mapping[str, Origin]) -> list[tuple[Path, list[str]]]:
    """The files of which something is left, within the directory, and the tensors that each will hold."""
    by_source: dict[str, list[str]] = {}
    for name, (old, _) in written.items():
        by_source.setdefault(old, []).append(name)
    by_file: dict[Path, list[str]] = {file: [] for file in checkpoint.files}
    for entry in checkpoint.entries.values():
        by_file[entry.path] += by_source.get(entry.name, ())
    return [(file.relative_to(checkpoint.root), names) for file, names in by_file.items() if names]


def head_of(
    checkpoint: Checkpoint, place: Path, names: Sequence[str], written: Mapping[str, Origin]
) -> tuple[bytes, int]:
    """The header of a file that `write_file` writes, and how many bytes the file has."""
    tensors = {}
    for name in names:
        entry = checkpoint.entries[written[name][0]]
        shape = shape_of_cut(entry, written[name][1])
        tensors[name] = (entry.dtype, shape, nbytes_of_cut(entry, shape))
    head = io.BytesIO()
    write_header(head, tensors, checkpoint.metadata[checkpoint.root / place])
    return head.getvalue(), head.tell() + sum(nbytes for _, _, nbytes in tensors.values())


def write_file(
    checkpoint: Checkpoint,
    target: Path,
    place: Path,
    names: Sequence[str],
    written: Mapping[str, Origin],
    write: Write | None = None,
) -> dict[str, str]:
    """Writes one file, which is on the disk then; the SHA-256 of the bytes of each tensor."""
    head, size = head_of(checkpoint, place, names, written)
    digests = {}
    (target / place).parent.mkdir(parents=True, exist_ok=True)
    with new_file(target / place, size) as opened:
        opened.write(head)
        for name in track(names, "slicing"):
            old, cuts = written[name]
            hashed = Hashed(opened)
            (write or write_cut)(cast(BinaryIO, hashed), checkpoint, checkpoint.entries[old], cuts)
            digests[name] = hashed.hexdigest()
        opened.flush()
        os.fsync(opened.fileno())
    return digests


def write_index(
    checkpoint: Checkpoint, target: Path, written: Mapping[str, Origin], *, nbytes: int, parameters: int
) -> None:
    """The index of a sharded checkpoint, where it is one: ``{name: file}``, with new totals where it says any."""
    if checkpoint.index is None:
        return
    index = read_json(checkpoint.index)
    metadata = index.get("metadata")
    totals = {"total_size": nbytes, "total_parameters": parameters}
    if isinstance(metadata, dict):
        metadata.update({key: value for key, value in totals.items() if key in metadata})
    if written.keys() != checkpoint.entries.keys():
        places = {name: file.as_posix() for file, names in files_of(checkpoint, written) for name in names}
        index["weight_map"] = dict(sorted(places.items()))
    path = target / checkpoint.index.relative_to(checkpoint.root)
    path.write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", "utf-8")


def write_sliced(
    checkpoint: Checkpoint,
    target: Path,
    written: Mapping[str, Origin],
    write: Write | None = None,
    *,
    nbytes: int,
    parameters: int,
) -> dict[str, str]:
    """Writes ``{name: what it is}`` into the files that the source's tensors are in, and the index, if there is one;
    the SHA-256 of the bytes of each.

    Args:
        write: writes what stays of a tensor: by default its bytes.
        nbytes, parameters: of all together, for the index.
    """
    digests: dict[str, str] = {}
    for place, names in files_of(checkpoint, written):
        digests |= write_file(checkpoint, target, place, names, written, write)
    write_index(checkpoint, target, written, nbytes=nbytes, parameters=parameters)
    return digests


def sha256_of(checkpoint: Checkpoint, name: str) -> str:
    """The SHA-256 of a tensor's bytes in a file."""
    total = hashlib.sha256()
    for piece in pieces_of_cut(checkpoint, checkpoint.entries[name], {}):
        total.update(piece.numpy().data)
    return total.hexdigest()


class Hashed:
    """A file to write to, and the SHA-256 of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self._total = file, hashlib.sha256()

    def write(self, data: memoryview) -> int:
        count = self.file.write(data)
        self._total.update(data[:count])
        return count

    def hexdigest(self) -> str:
        return self._total.hexdigest()


class Compared:
    """A file to write to that compares what would be written with the bytes of a tensor that stands there."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self.checkpoint, self.name, self.at, self.same = checkpoint, name, 0, True

    def write(self, data: memoryview) -> int:
        end = min(self.at + len(data), self.checkpoint.entries[self.name].nbytes)
        there = self.checkpoint.raw(self.name, self.at, end).numpy().data
        self.same = self.same and there == data
        self.at += len(data)
        return len(data)

    @property
    def all_of_it(self) -> bool:
        """Whether all bytes were compared, and are the same."""
        return self.same and self.at == self.checkpoint.entries[self.name].nbytes
