"""Reads the sparse layouts of compressed-tensors 0.14, ``sparse-bitmask`` and ``sparse-24-bitmask``; writes none.

Law: the tensors that stand for a weight agree with each other, down to the last bit of the mask, or are refused. A
weight's shape is a tensor of the file, so that finding a weight reads a few bytes of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from secateur.checkpoints import CheckpointError, TensorEntry, printable
from secateur.compressed_files import Read, StoredTensor, bits_of
from secateur.encodings import Array, Bools

__all__ = ["BitmaskTensor", "bitmask_tensors", "without_sparsity"]

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
        if not self.entry.numel:
            return bits_of(np.zeros(0, np.uint8), self.entry.dtype)
        mask = self._mask(read)
        values = bits_of(read(self.parts["compressed"]), self.entry.dtype)
        if int(np.count_nonzero(mask)) != values.size:
            raise self._damaged(
                f"its bitmask keeps {int(np.count_nonzero(mask))} entries, its values are {values.size}."
            )
        if "row_offsets" in self.parts:
            counts = mask.reshape(self.entry.shape).sum(-1, dtype=np.int64)
            offsets = np.cumsum(counts, axis=0) - counts if counts.ndim else counts * 0
            if not np.array_equal(offsets.reshape(-1), read(self.parts["row_offsets"]).view(np.int64)):
                raise self._damaged("its row_offsets are not those of its bitmask.")
        bits = np.zeros(mask.size, values.dtype)
        bits[np.flatnonzero(mask)] = values
        return bits

    def mask(self, read: Read) -> Bools | None:
        """None: the layout keeps what is not zero, not what somebody chose to keep."""
        del read
        return None

    def _mask(self, read: Read) -> Bools:
        columns = self.entry.shape[-1]
        packed = read(self.parts["bitmask"]).reshape(-1, -(-columns // 8))
        if columns % 8 and bool((packed[:, -1] >> (columns % 8)).any()):
            raise self._damaged("its bitmask has bits after the end of a row.")
        return np.unpackbits(packed, axis=1, count=columns, bitorder="little").reshape(-1).view(np.bool_)

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.entry.path}: damaged: {printable(self.entry.name)}: {what}")


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
    sizes = tuple(int(size) for size in read(shape).view(np.int64))
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
