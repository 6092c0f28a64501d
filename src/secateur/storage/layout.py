"""What saving, loading and expanding share: names of files, headers, indexes, and the bytes of tensors. Reads the
sparse layouts of compressed-tensors 0.14, ``sparse-bitmask`` and ``sparse-24-bitmask``; writes none.
"""

from __future__ import annotations

import collections
import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.checkpoints import Checkpoint, CheckpointError, TensorEntry, open_checkpoint
from secateur.storage.compressed_files import Read, StoredTensor, bits_of, file_stream, read_whole
from secateur.storage.encodings import BITMASK, PIECE, Array, Bools, EncodingError, pack_bits, pieces
from secateur.support import printable, whole

# ---- What saving, loading and expanding share: names of files, headers, indexes, and the bytes of tensors.
#
# Law: what is written as a name, a header or an index is what safetensors and transformers write and read.

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


# Reads the sparse layouts of compressed-tensors 0.14, ``sparse-bitmask`` and ``sparse-24-bitmask``; writes none.
#
# Law: the tensors that stand for a weight agree with each other, down to the last bit of the mask, or are refused. A
# weight's shape is a tensor of the file, so that finding a weight reads a few bytes of each.

_PARTS = ("compressed", "bitmask", "shape")
_FORMATS = ("sparse-bitmask", "sparse-24-bitmask")


@dataclass(frozen=True)
class BitmaskTensor:
    """A weight of that layout: ``compressed``, ``bitmask``, ``shape`` and, but for 2:4, ``row_offsets``."""

    entry: TensorEntry
    parts: Mapping[str, TensorEntry]

    word = "bitmask of compressed-tensors"

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def bits(self, read: Read) -> Array:
        """The entries, flat, as unsigned integers."""
        out = bits_of(np.zeros(self.entry.nbytes, np.uint8), self.entry.dtype)
        collections.deque(self._expanded(read, out), maxlen=0)
        return out

    def pieces(self, read: Read) -> Iterator[Array]:
        """`bits` in pieces, each of use until the next."""
        return self._expanded(read, None)

    def _expanded(self, read: Read, out: Array | None) -> Iterator[Array]:
        if not self.entry.numel:
            return
        rows = _Rows(self, read)
        dtype = bits_of(np.zeros(0, np.uint8), self.entry.dtype).dtype
        kept = self.parts["compressed"].numel
        values = file_stream(read, self.parts["compressed"], dtype)
        try:
            yield from pieces(
                BITMASK, {"bitmask": rows}, values, self.entry.numel, kept, dtype=dtype, out=out, clean=self.entry.numel
            )
        except EncodingError as error:
            raise self.damaged(str(error)) from None

    def mask(self, read: Read) -> Bools | None:
        """None: the layout keeps what is not zero, not what somebody chose to keep."""
        del read
        return None

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.entry.path}: damaged: {printable(self.entry.name)}: {what}")


class _Rows:
    """The bitmask without the bits that fill up each row to whole bytes, as a stream; holds it to the row offsets."""

    def __init__(self, tensor: BitmaskTensor, read: Read) -> None:
        self._tensor, self._columns = tensor, tensor.entry.shape[-1]
        self._stream = file_stream(read, tensor.parts["bitmask"], np.dtype(np.uint8))
        offsets = tensor.parts.get("row_offsets")
        self._offsets = None if offsets is None else file_stream(read, offsets, np.dtype(np.int64))
        self._left = np.zeros(0, np.bool_)  # bits of rows that were read, and not taken yet
        self._rows = tensor.entry.numel // self._columns
        # offsets run along the first dimension, those of each place in the middle ones for itself
        self._together = math.prod(tensor.entry.shape[1:-1])
        self._kept = np.zeros(self._together, np.int64)

    def take(self, count: int) -> Array:
        at_once = self._together * max(1, PIECE // (self._columns * self._together))
        pieces = [self._left]
        there = self._left.size
        while there < 8 * count and self._rows:
            bits = self._read(min(at_once, self._rows))
            pieces.append(bits)
            there += bits.size
        bits = np.concatenate(pieces)
        self._left = bits[8 * count :].copy()
        return pack_bits(bits[: 8 * count])

    def _read(self, rows: int) -> Bools:
        packed = self._stream.take(rows * -(-self._columns // 8)).reshape(rows, -1)
        if self._columns % 8 and bool((packed[:, -1] >> (self._columns % 8)).any()):
            raise self._tensor.damaged("its bitmask has bits after the end of a row.")
        bits = np.unpackbits(packed, axis=1, count=self._columns, bitorder="little").view(np.bool_)
        if self._offsets is not None:
            counts = bits.sum(-1, dtype=np.int64).reshape(-1, self._together)
            ends = counts.cumsum(0) + self._kept
            if not np.array_equal((ends - counts).reshape(-1), self._offsets.take(rows)):
                raise self._tensor.damaged("its row_offsets are not those of its bitmask.")
            self._kept = ends[-1]
        self._rows -= rows
        return bits.reshape(-1)


def bitmask_tensors(entries: Mapping[str, TensorEntry], read: Read) -> dict[str, StoredTensor | BitmaskTensor] | None:
    """Every tensor of a checkpoint in this layout, in the order of the files; None for one that is not in it.

    A module ``fc`` has ``fc.compressed``, ``fc.bitmask`` and ``fc.shape`` for ``fc.weight``, its predecessor in
    sparseml ``fc.weight.compressed`` and so on. The parts may lie in different shards.

    Raises:
        CheckpointError: parts that do not fit each other, or a name that is there twice.
    """
    modules = [
        name.removesuffix(".bitmask")
        for name in entries
        if name.endswith(".bitmask") and all(f"{name.removesuffix('.bitmask')}.{part}" in entries for part in _PARTS)
    ]
    if not modules:
        return None
    weights = {f"{module}.compressed": _weight(module, entries, read) for module in modules}
    others = {f"{module}.{part}" for module in modules for part in (*_PARTS, "row_offsets")} - weights.keys()
    found: dict[str, StoredTensor | BitmaskTensor] = {}
    for name, entry in entries.items():
        if name in others:
            continue
        tensor = weights.get(name) or StoredTensor(entry, {"": entry})
        if tensor.entry.name in found or (tensor.entry.name != name and tensor.entry.name in entries):
            raise CheckpointError(f"{entry.path}: damaged: {printable(tensor.entry.name)} is there twice.")
        found[tensor.entry.name] = tensor
    return found


def _weight(module: str, entries: Mapping[str, TensorEntry], read: Read) -> BitmaskTensor:
    parts = {part: entries[f"{module}.{part}"] for part in _PARTS}
    if f"{module}.row_offsets" in entries:
        parts["row_offsets"] = entries[f"{module}.row_offsets"]
    values, bitmask, shape = (parts[part] for part in _PARTS)
    name = module if module.endswith(".weight") else f"{module}.weight"
    wrong = CheckpointError(f"{values.path}: damaged: the parts of {printable(name)} do not fit each other.")
    # a vector, in the 2:4 layout a column
    if shape.dtype != "I64" or shape.shape not in ((shape.numel,), (shape.numel, 1)) or not 1 <= shape.numel <= 64:
        raise wrong
    sizes = tuple(int(size) for size in read_whole(read, shape).view(np.int64))
    # the mask in the file is what a shape is held to, before anything of that size is made
    if min(sizes) < 0 or (bitmask.dtype, bitmask.shape) != ("U8", (*sizes[:-1], -(-sizes[-1] // 8))):
        raise wrong
    offsets = parts.get("row_offsets")
    if offsets is not None and (offsets.dtype, offsets.shape) != ("I64", sizes[:-1]):
        raise wrong
    if values.torch_dtype is None or values.numel > 8 * bitmask.numel:
        raise wrong
    entry = TensorEntry(name, values.dtype, sizes, values.path, 0, values.torch_dtype.itemsize * math.prod(sizes))
    return BitmaskTensor(entry, parts)


def without_sparsity(config: Mapping[str, object]) -> dict[str, object] | None:
    """A model's ``config.json`` once its weights are dense, or None where it speaks of no such layout.

    What is left of ``quantization_config`` stays where it quantizes.

    >>> without_sparsity({"a": 1, "quantization_config": {"sparsity_config": {"format": "sparse-bitmask"}}})
    {'a': 1}
    """
    left = dict(config)
    changed = False
    for key in ("quantization_config", "compression_config"):
        inner = left.get(key)
        if isinstance(inner, Mapping) and _is_sparse(inner.get("sparsity_config")):
            rest = {word: value for word, value in inner.items() if word != "sparsity_config"}
            if rest.get("config_groups"):
                left[key] = rest
            else:
                del left[key]
            changed = True
    if _is_sparse(left.get("sparsity_config")):
        del left["sparsity_config"]
        changed = True
    return left if changed else None


def _is_sparse(config: object) -> bool:
    return isinstance(config, Mapping) and config.get("format") in _FORMATS
