"""Tensors into files, files into directories: a directory appears under its name complete or not at all."""

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from secateur.checkpoints.reading import Checkpoint, CheckpointError, TensorEntry
from secateur.checkpoints.record import check_new
from secateur.support import naming, open_regular, track

OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz")
_PIECE = 1 << 24  # bytes that are compared at once
NO_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt")


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, as they lie in a file."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_tensor(path: Path, entry: TensorEntry, tensor: Tensor) -> None:
    """Overwrites the bytes of ``entry`` in ``path``, a copy of the file that the entry was read from."""
    view = bytes_of(tensor)
    assert len(view) == entry.nbytes
    with open(path, "r+b", buffering=0) as file:
        file.seek(entry.start)
        while view:
            view = view[file.write(view) :]


def restore_file(source: Path, target: Path, kept: Iterable[tuple[int, int]]) -> None:
    """Bytes of a copy are those of its source again, but for the ranges that are kept: where they differ they are
    written, else only read."""
    with open(source, "rb") as theirs, open(target, "r+b") as ours:
        at = 0
        for start, stop in (*kept, (os.fstat(theirs.fileno()).st_size, 0)):
            for begin in range(at, start, _PIECE):
                size = min(_PIECE, start - begin)
                theirs.seek(begin)
                ours.seek(begin)
                if ours.read(size) != (wanted := theirs.read(size)):
                    ours.seek(begin)
                    ours.write(wanted)
            at = stop


def copy_tree(source: Path, target: Path, skip: Collection[Path] = ()) -> Iterator[Path]:
    """Copies every file below ``source`` byte for byte into the directory ``target``; yields each one's relative path.

    The files whose relative paths are in ``skip`` are left out.

    Links to files become files. Links to directories, pipes and devices are a `CheckpointError`. The top ``.git`` is
    left out: with Git LFS it holds a second copy of the weights.
    """
    for relative, folders, files in _walked(source):
        for name in folders:
            (target / relative / name).mkdir(exist_ok=True)
        for name in files:
            if relative / name in skip:
                continue
            here = source / relative
            with open_regular(here / name, error=CheckpointError):
                pass
            shutil.copyfile(here / name, target / relative / name)
            shutil.copymode(here / name, target / relative / name)
            os.chmod(target / relative / name, os.stat(target / relative / name).st_mode | stat.S_IWUSR)
            yield relative / name


def copy_others(checkpoint: Checkpoint, target: Path, skip: Collection[Path] = (), *, root: Path | None = None) -> None:
    """Copies what a directory holds beside the weights of a checkpoint, but for the relative paths in ``skip``; the
    directory is ``root``, below which the checkpoint may lie."""
    root = checkpoint.root if root is None else root
    weights = {file.relative_to(root) for file in checkpoint.files}
    for _ in track(copy_tree(root, target, skip={*weights, *skip}), "copying"):
        pass


def other_weights(checkpoint: Checkpoint, root: Path | None = None) -> tuple[Path, ...]:
    """The relative paths of the files of a directory that hold the weights in other forms."""
    root = checkpoint.root if root is None else root
    weights = {file.relative_to(root) for file in checkpoint.files}
    found = (path for path in files_below(root) if path.suffix in OTHER_WEIGHTS and path.name not in NO_WEIGHTS)
    return tuple(sorted(path for path in found if path not in weights))


def files_below(source: Path) -> Iterator[Path]:
    """The relative paths of the files that `copy_tree` copies."""
    for relative, _, files in _walked(source):
        yield from (relative / name for name in files)


def digests_of_files(root: Path, paths: Iterable[Path] | None = None) -> dict[str, str]:
    """The SHA-256 of each file, by its relative path: of these ``paths``, or of all that `copy_tree` copies."""
    found = {}
    for path in track(sorted(files_below(root) if paths is None else paths), "reading the files"):
        with open_regular(root / path, error=CheckpointError) as file:
            found[path.as_posix()] = hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()
    return found


def _walked(source: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    for directory, folders, files in os.walk(source, onerror=_reraise):
        here = Path(directory)
        if here == source:
            folders[:] = [name for name in folders if name != ".git"]
            files = [name for name in files if name != ".git"]
        for name in folders:
            if (here / name).is_symlink():
                raise CheckpointError(f"{here / name}: a link to a directory; replace it by a copy, or remove it.")
        yield here.relative_to(source), folders, sorted(files)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary directory beside ``path`` that becomes ``path`` if the body succeeds and vanishes if it does not.

    The rename is the last step: under the final name there is all or nothing. A process that is killed outright
    leaves only ``<name>.unfinished-<random>``. ``path`` must not exist, not even as an empty directory; the directory
    above it must.
    """
    check_new(path)
    temporary = path.with_name(f"{path.name}.unfinished-{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        with naming(path):
            yield temporary
            _synchronise(temporary)  # some file systems say only now that the disk is full
        if os.path.lexists(path):
            raise CheckpointError(f"{path}: was created by somebody else in the meantime; nothing is overwritten.")
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _synchronise(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for name in files:
            with open(Path(directory) / name, "rb") as file:
                os.fsync(file.fileno())


def _reraise(error: OSError) -> None:
    raise error
