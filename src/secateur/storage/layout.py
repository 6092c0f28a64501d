"""What saving, loading and expanding share: names of files, headers, indexes, and the bytes of tensors.

Law: what is written as a name, a header or an index is what safetensors and transformers write and read.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.checkpoints import Checkpoint, CheckpointError, TensorEntry, open_checkpoint
from secateur.storage.compressed_files import Read
from secateur.storage.encodings import Array
from secateur.support import whole

WEIGHTS, COMPRESSED, INDEX = ".safetensors", ".compressed.safetensors", ".index.json"
INDEX_KEY = "secateur"  # of a compressed directory's index, whose value is the text of the index that it replaced


def bytes_of(tensor: Tensor) -> Array:
    tensor = whole(tensor.detach()).cpu().resolve_conj().resolve_neg().contiguous()
    raw: Array = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw


def check_outside(source: Path, out: Path) -> None:
    here = out.parent.resolve() / out.name
    if here.is_relative_to(source.resolve()):
        raise CheckpointError(f"{out}: is, or lies inside, the input {source}; choose a directory outside.")


def renamed(path: Path, old: str, new: str) -> Path:
    """``path`` with the ending ``old`` of its name, before a possible ``.index.json``, changed to ``new``."""
    ending = INDEX if path.name.endswith(INDEX) else ""
    stem = path.name.removesuffix(ending)
    return path.with_name(stem.removesuffix(old) + new + ending) if stem.endswith(old) else path


def header_of_file(path: Path) -> bytes:
    with open(path, "rb") as file:  # checked when the checkpoint was opened
        return file.read(int.from_bytes(file.read(8), "little"))


def index_of(weight_map: Mapping[str, str], metadata: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    """An index's text, as transformers writes it."""
    index = {"metadata": dict(metadata), "weight_map": dict(weight_map), **more}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def reader(checkpoint: Checkpoint) -> Read:
    return functools.partial(_read, checkpoint)  # not a function within: that could not be pickled


def _read(checkpoint: Checkpoint, entry: TensorEntry, start: int, out: Array) -> None:
    checkpoint.read_into(entry.name, start, out.data)


def open_either(path: Path) -> Checkpoint:
    """As `open_checkpoint`, but of several checkpoints in a directory the one that was compressed."""
    for name in (f"model{COMPRESSED}", f"model{COMPRESSED}{INDEX}"):
        if path.is_dir() and (path / name).is_file():
            return open_checkpoint(path / name)
    return open_checkpoint(path)
