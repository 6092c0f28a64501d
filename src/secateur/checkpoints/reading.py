"""Checkpoints on disk: safetensors files, sharded or not, read one tensor at a time.

Law: nothing that a file says is believed before it is checked, nothing larger than one tensor is held, nothing is ever
unpickled. Whatever is wrong with a file is a `CheckpointError` of one line that names the file.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Protocol

import torch
from torch import Tensor

from secateur.checkpoints.headers import CheckpointError, TensorEntry, read_header, read_json
from secateur.support import LazyTensors, printable

__all__ = ["Checkpoint", "open_checkpoint"]

SINGLE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True, eq=False)
class Checkpoint(LazyTensors):
    """The tensors of a checkpoint by name, each read from disk on every access and held by nobody.

    ``entries`` tells shape, dtype and place without reading a tensor. ``files`` are the safetensors files in order,
    ``metadata`` each one's ``__metadata__``, ``config`` the directory's ``config.json`` (``{}`` where there is none).

    >>> import pathlib, tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> save_file({"fc.weight": torch.eye(3)}, folder / "model.safetensors")
    >>> checkpoint = open_checkpoint(folder)
    >>> checkpoint.entries["fc.weight"].shape, checkpoint["fc.weight"].sum().item()
    ((3, 3), 3.0)
    """

    root: Path
    files: tuple[Path, ...]
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[Path, Mapping[str, str]]
    config: Mapping[str, object] = field(default_factory=dict)
    index: Path | None = None

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        dtype = entry.torch_dtype
        if dtype is None:
            raise CheckpointError(f"{printable(name)} in {entry.path} is {entry.dtype}, which this torch cannot read.")
        return self.raw(name).view(dtype).reshape(entry.shape)

    @property
    def known(self) -> Mapping[str, TensorEntry]:
        return self.entries

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.root)!r}: {len(self)} tensors in {len(self.files)} files)"

    def raw(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Bytes ``start`` to ``stop`` of a tensor, as uint8."""
        entry = self.entries[name]
        stop = entry.nbytes if stop is None else stop
        out = torch.empty(stop - start, dtype=torch.uint8)
        self.read_into(name, start, out.numpy().data)
        return out

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        """Fills ``view`` with the tensor's bytes from ``start`` on."""
        if view:
            entry = self.entries[name]
            # Not a memory map: pages of a mapped file count as this process's memory once touched.
            with open(entry.path, "rb", buffering=0) as file:
                file.seek(entry.start + start)
                _fill(view, file, entry.path)

    @cached_property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())


class _Readable(Protocol):
    def readinto(self, buffer: memoryview, /) -> int | None: ...


def _fill(view: memoryview, file: _Readable, path: Path) -> None:
    while view:
        count = file.readinto(view)
        if not count:
            raise CheckpointError(f"{path}: the file became shorter while it was read.")
        view = view[count:]


def open_checkpoint(path: Path | str) -> Checkpoint:
    """The checkpoint at ``path``: a ``.safetensors`` file, a ``.safetensors.index.json``, or a directory with either.

    Of a directory it takes what transformers would: ``model.safetensors``, else the index and its shards, else every
    ``*.safetensors`` file in it. Only headers are read. Tensors come file by file, in the order of their bytes.

    Raises `CheckpointError` for anything damaged, missing, or ambiguous, and for an index that leads out of its
    directory. Symbolic links to files are followed, as Hugging Face's cache needs.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory.")
    root = path if path.is_dir() else path.parent
    if not path.is_dir():
        index = path if path.name.endswith(".json") else None
        files = {} if index else {path.name: path}
    else:
        index, files = _choose(path)
    weight_map: dict[str, str] = {}
    if index is not None:
        weight_map = _read_index(index)
        files = {name: root / name for name in sorted(set(weight_map.values()))}
        missing = [name for name, file in files.items() if not file.exists()]
        if missing:
            raise CheckpointError(f"{index}: {_some(missing)} is named here and is not in the directory.")

    entries: dict[str, TensorEntry] = {}
    metadata: dict[Path, Mapping[str, str]] = {}
    for file in files.values():
        found, metadata[file] = read_header(file)
        for entry in sorted(found.values(), key=lambda entry: (entry.start, entry.stop)):
            if entry.name in entries:
                both = f"{entries[entry.name].path.name} and {file.name}"
                raise CheckpointError(f"{root}: {printable(entry.name)} is there twice, in {both}.")
            entries[entry.name] = entry
    for name, shard in weight_map.items():
        if name not in entries or entries[name].path != root / shard:
            raise CheckpointError(f"{index}: {printable(name)} should be in {printable(shard)} and is not.")
    return Checkpoint(root, tuple(files.values()), entries, metadata, _read_config(root, path.is_dir()), index)


def _choose(root: Path) -> tuple[Path | None, dict[str, Path]]:
    names = sorted(entry.name for entry in os.scandir(root) if not entry.is_dir())
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    weights = [name for name in names if name.endswith(".safetensors")]
    if SINGLE in weights:
        return None, {SINGLE: root / SINGLE}
    if f"model{INDEX_SUFFIX}" in indexes:
        indexes = [f"model{INDEX_SUFFIX}"]
    if len(indexes) == 1:
        return root / indexes[0], {}
    if indexes:
        raise CheckpointError(f"{root}: several indexes ({_some(indexes)}); name the one that you mean.")
    if weights:
        return None, {name: root / name for name in weights}
    below = sorted(
        {str(file.parent) for pattern in ("*/*.safetensors", "*/*/*.safetensors") for file in root.glob(pattern)}
    )
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".h5", ".gguf"))]
    hint = ""
    if below:
        hint = f" There are some in {_some(below)}."
    elif others:
        hint = f" {_some(others)}: convert to safetensors first; Secateur never unpickles a file."
    raise CheckpointError(f"{root}: no .safetensors file here.{hint}")


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: not an index: it has no weight_map.")
    found = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or "\\" in shard or "\0" in shard or ":" in shard:
            raise CheckpointError(f"{path}: {printable(name)} has no valid file name.")
        relative = PurePosixPath(shard)
        if any(len(os.fsencode(part)) > 255 for part in relative.parts):
            raise CheckpointError(f"{path}: {printable(name)} has no valid file name.")
        if relative.is_absolute() or ".." in relative.parts or relative.name == "":
            raise CheckpointError(f"{path}: {printable(name)} leads out of the directory: {printable(shard)}.")
        found[name] = str(relative)
    return found


def _read_config(root: Path, strict: bool) -> Mapping[str, object]:
    path = root / "config.json"
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except (CheckpointError, OSError):
        if strict:
            raise
        return {}  # beside a single file, any config.json may be somebody else's


def _some(names: list[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(printable(name) for name in names[:count]) + more
