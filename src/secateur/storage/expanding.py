"""Compressed checkpoints undone: the files as they were before, byte for byte."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from secateur.checkpoints import CheckpointError, copy_tree, new_directory, parse_json
from secateur.storage.compressed_files import StoredTensor, Written
from secateur.storage.loading import (
    COMPRESSED,
    INDEX_KEY,
    WEIGHTS,
    CompressedCheckpoint,
    check_outside,
    header_of_file,
    index_of,
    open_either,
    renamed,
)
from secateur.storage.saving import Compression
from secateur.support import naming, track, whole_file


def expand_checkpoint(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> Compression:
    """Undo `save_compressed`: the file, or the directory, that it was given, byte for byte.

    Raises:
        CheckpointError: a damaged checkpoint, one that is not compressed, or a place that cannot be.
        OSError: a full disk. Nothing is left under ``path``.

    >>> import tempfile
    >>> import torch
    >>> from secateur.storage import save_compressed
    >>> from safetensors.torch import load_file, save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "dense").mkdir()
    >>> save_file({"fc.weight": torch.eye(100)}, folder / "dense/model.safetensors")
    >>> done = save_compressed(folder / "dense", folder / "small")
    >>> done = expand_checkpoint(folder / "small", folder / "again")
    >>> (folder / "again/model.safetensors").read_bytes() == (folder / "dense/model.safetensors").read_bytes()
    True
    """
    started, source, path = time.monotonic(), Path(source), Path(path)
    checkpoint = CompressedCheckpoint(open_either(source))
    if not checkpoint.is_compressed:
        raise CheckpointError(f"{source}: is not compressed; there is nothing to expand.")
    files = _expanded_files(checkpoint)
    dense = sum(8 + len(header) + sum(tensor.entry.nbytes for tensor in tensors) for header, tensors in files.values())
    stored = sum(file.stat().st_size for file in files)
    if source.is_dir():
        _expand_directory(checkpoint, files, path)
    elif len(files) != 1:
        raise CheckpointError(f"{source}: an index; give its directory.")
    elif path.is_dir():
        raise CheckpointError(f"{path}: a directory; name the file to write.")
    else:
        with whole_file(path) as file:
            _expand_file(file, checkpoint, files[source][0], track(files[source][1], "expanding"))
    written = [
        Written(tensor.entry.name, tensor.word, tensor.entry.nbytes, tensor.nbytes)
        for _, tensors in files.values()
        for tensor in tensors
    ]
    return Compression(path, tuple(written), dense, stored, time.monotonic() - started)


_Files = dict[Path, tuple[bytes, list[StoredTensor]]]


def _expanded_files(checkpoint: CompressedCheckpoint) -> _Files:
    """For each file its header once it is expanded, and its tensors in the order of their bytes."""
    files: _Files = {}
    for file in checkpoint.checkpoint.files:
        tensors = [
            each for name, each in checkpoint.tensors.items() if each.entry.path == file and each.entry.name == name
        ]
        header = checkpoint.headers[file]
        files[file] = header_of_file(file) if header is None else header, tensors
    return files


def _expand_file(
    file: BinaryIO, checkpoint: CompressedCheckpoint, header: bytes, tensors: Iterable[StoredTensor]
) -> None:
    file.write(len(header).to_bytes(8, "little") + header)
    for tensor in tensors:
        file.writelines(piece.data for piece in tensor.pieces(checkpoint.read))


def _expand_directory(checkpoint: CompressedCheckpoint, files: _Files, out: Path) -> None:
    root, index = checkpoint.checkpoint.root, checkpoint.checkpoint.index
    check_outside(root, out)
    skipped = {file.relative_to(root) for file in files}
    names = {file: renamed(file.relative_to(root), COMPRESSED, WEIGHTS) for file in files}
    if index is not None:
        skipped.add(Path(index.name))
    with new_directory(out) as temporary:
        collections.deque(track(copy_tree(root, temporary, skipped), "copying"), maxlen=0)
        work = [tensor for _, tensors in files.values() for tensor in tensors]
        with contextlib.closing(track(work, "expanding")) as each:
            for file, (header, tensors) in files.items():
                with naming(temporary / names[file]), open(temporary / names[file], "xb") as opened:
                    _expand_file(opened, checkpoint, header, itertools.islice(each, len(tensors)))
        if index is not None:
            weight_map = {tensor.entry.name: names[tensor.entry.path].as_posix() for tensor in work}
            text = _expanded_index(index, weight_map, sum(tensor.entry.nbytes for tensor in work))
            with open(temporary / renamed(Path(index.name), COMPRESSED, WEIGHTS), "x", encoding="utf-8") as opened_text:
                opened_text.write(text)


def _expanded_index(index: Path, weight_map: dict[str, str], total: int) -> str:
    parsed = parse_json(index.read_bytes(), index)
    text = parsed.get(INDEX_KEY)
    if isinstance(text, str):
        if parse_json(text.encode(), index).get("weight_map") != weight_map:
            raise CheckpointError(f"{index}: damaged: the index that it keeps is not one of these files.")
        return text
    metadata = parsed.get("metadata")
    return index_of(weight_map, {**(metadata if isinstance(metadata, dict) else {}), "total_size": total}, {})
