"""The header of a safetensors file: what it says of each tensor, read and written. Checkpoints on disk: safetensors
files, sharded or not, read one tensor at a time.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from secateur.support import LazyTensors, open_regular, printable, records

# ---- The header of a safetensors file: what it says of each tensor, read and written.
#
# Law: nothing that a file says is believed before it is checked. Whatever is wrong is a `CheckpointError` of one line
# that names the file.

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


# ---- Checkpoints on disk: safetensors files, sharded or not, read one tensor at a time.
#
# Law: nothing that a file says is believed before it is checked, nothing larger than one tensor is held, nothing is
# ever unpickled. Whatever is wrong with a file is a `CheckpointError` of one line that names the file.

SINGLE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True, eq=False)
class Checkpoint(LazyTensors):
    """The tensors of a checkpoint by name, each read from disk on every access and held by nobody.

    ``entries`` tells shape, dtype and place without reading a tensor. ``files`` are the safetensors files in order,
    ``metadata`` each one's ``__metadata__``, ``config`` the directory's ``config.json`` (``{}`` where there is none).
    ``moved`` are functions of tensors that are read otherwise than they are stored; bytes are read as they are.

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
    moved: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        dtype = entry.torch_dtype
        if dtype is None:
            raise CheckpointError(f"{printable(name)} in {entry.path} is {entry.dtype}, which this torch cannot read.")
        stored = self.raw(name).view(dtype).reshape(entry.shape)
        return self.moved[name](stored) if name in self.moved else stored

    @property
    def known(self) -> Mapping[str, TensorEntry]:
        return self.entries

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.root)!r}: {len(self)} tensors in {len(self.files)} files)"

    def raw(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Bytes ``start`` to ``stop`` of a tensor, as uint8."""
        entry = self.entries[name]
        stop = entry.nbytes if stop is None else stop
        out = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
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
