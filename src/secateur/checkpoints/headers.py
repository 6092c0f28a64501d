"""The header of a safetensors file: what it says of each tensor, read and written.

Law: nothing that a file says is believed before it is checked. Whatever is wrong is a `CheckpointError` of one
line that names the file.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from secateur.support import open_regular, printable, records

__all__ = [
    "CheckpointError",
    "TensorEntry",
    "dtype_word",
    "parse_header",
    "parse_json",
    "read_header",
    "read_json",
    "write_header",
]

MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation
HEADER_KEY = "secateur.header"  # in the metadata of a compressed file: the header that the file had before
MAX_DIMS = 64  # torch's own limit for most operations
# Every dtype of the format and its width in bits.
_BITS = {
    **dict.fromkeys(["F4"], 4),
    **dict.fromkeys(["F6_E2M3", "F6_E3M2"], 6),
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 64),
}


_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}


def dtype_word(dtype: torch.dtype) -> str | None:
    """The format's word for a torch dtype, or None where it has none.

    >>> dtype_word(torch.bfloat16)
    'BF16'
    """
    return next((word for word, name in _TORCH_NAMES.items() if getattr(torch, name, None) == dtype), None)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or a place where one cannot be written; one line, which says what to do."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The entry of one tensor in a safetensors header: ``dtype`` in the format's words, ``start`` and ``stop`` as bytes
    of a file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The torch dtype, or None where this torch has none: the bytes are then opaque."""
        found = getattr(torch, _TORCH_NAMES.get(self.dtype, ""), None)
        return found if isinstance(found, torch.dtype) else None

    @property
    def is_floating_point(self) -> bool:
        """True for 16, 32 and 64-bit floats. 8-bit floats carry a scale elsewhere: by themselves they rank nothing."""
        return self.dtype in ("F16", "BF16", "F32", "F64")


def read_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Every tensor's entry, in the order of the header, and the ``__metadata__`` of one safetensors file.

    Holds the file to the format's whole specification: a header of at most 100 MB that begins with ``{``, no key
    twice, every offset inside the file, no overlap and no hole, bytes that fit dtype and shape.

    Raises `CheckpointError` where it does not, `OSError` where the file cannot be opened.
    """
    with open_regular(path, error=CheckpointError) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: not a safetensors file: {size} bytes are too few for a header.")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER:
            if prefix.startswith(b"PK\x03\x04"):
                raise CheckpointError(
                    f"{path}: not a safetensors file but one that torch.save wrote: "
                    "torch.load it, and write its tensors by safetensors.torch.save_file."
                )
            raise CheckpointError(
                f"{path}: not a safetensors file: its first 8 bytes promise a header of {length} bytes."
            )
        if length > size - 8:
            raise CheckpointError(f"{path}: truncated: the header should have {length} bytes, the file has {size}.")
        text = file.read(length)
    return parse_header(text, path, size)


def parse_header(text: bytes, path: Path, size: int | None = None) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """`read_header` of a header's bytes, of a file of ``size`` bytes; of whatever size the tensors need if None.

    >>> text = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    >>> parse_header(text, Path("file"))[0]["a"].start - len(text)
    8
    """
    if not text.startswith(b"{"):
        raise CheckpointError(f"{path}: not a safetensors file: the header does not begin with '{{'.")
    header = parse_json(text.rstrip(b" "), path)

    raw_metadata = header.pop("__metadata__", None)
    metadata = {} if raw_metadata is None else raw_metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: damaged header: __metadata__ must map strings to strings.")
    data = 8 + len(text)
    entries = {name: _parse_entry(name, fields, path, data) for name, fields in header.items()}
    if size is None:
        size = max((entry.stop for entry in entries.values()), default=data)
    _check_contiguous(entries, path, data, size)
    return entries, metadata


def _parse_entry(name: str, fields: object, path: Path, data: int) -> TensorEntry:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: damaged header: {printable(name)}{what}")

    if not isinstance(fields, dict) or not fields.keys() >= {"dtype", "shape", "data_offsets"}:
        raise wrong(" needs dtype, shape and data_offsets.")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None  # a newer dtype cannot be held to a width
    if bits is None and not (isinstance(dtype, str) and re.fullmatch("[A-Z][A-Z0-9_]{0,31}", dtype)):
        raise wrong(" has no valid dtype.")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise wrong(" has no valid shape.")
    if math.prod(dim for dim in shape if dim) >= 2**63:
        raise wrong(" has a shape too large for any machine.")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(" has no valid data_offsets.")
    entry = TensorEntry(name, dtype, tuple(shape), path, data + offsets[0], data + offsets[1])
    if bits is not None and entry.numel * bits != 8 * entry.nbytes:
        raise wrong(f": {dtype} of shape {shape} does not have {entry.nbytes} bytes.")
    return entry


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_contiguous(entries: Mapping[str, TensorEntry], path: Path, data: int, size: int) -> None:
    end = data
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            fault = "overlaps the tensor before it" if entry.start < end else "leaves a hole before it"
            raise CheckpointError(f"{path}: damaged header: {printable(entry.name)} {fault}.")
        end = entry.stop
    if end > size:
        raise CheckpointError(f"{path}: truncated: the tensors need {end} bytes, the file has {size}.")
    if end < size:
        raise CheckpointError(f"{path}: damaged: {size - end} bytes after the last tensor belong to none.")


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in ``text``, no key twice; `CheckpointError` naming ``path`` for anything else."""
    return records.parse_json(text, path, error=CheckpointError, finite=False)  # configurations may hold Infinity


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of at most 100 MB, no key twice; `CheckpointError` for anything else."""
    return records.read_json(path, error=CheckpointError, finite=False)


def write_header(
    file: BinaryIO, tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> None:
    """The beginning of a safetensors file of ``{name: (dtype, shape, bytes)}``, which then follow in that order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as the reference implementation writes them
    file.write(len(text).to_bytes(8, "little") + text)
