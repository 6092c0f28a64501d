"""Compressed safetensors files: which encoding a tensor gets, and what is checked before one is believed.

Law: a tensor comes back with exactly its bits. A file is held to its own sizes before anything is allocated, and no
tensor takes more than 64 KiB + 1024 bytes for each byte that the file spends on it. docs/format.md has every byte.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from secateur.checkpoints import MAX_HEADER, CheckpointError, TensorEntry, parse_header, parse_json, printable
from secateur.encodings import (
    BITMASK,
    CSR8,
    CSR16,
    GROUPS,
    Array,
    Bools,
    Encoding,
    EncodingError,
    Grouped,
    from_planes,
    fullest_group,
    pack_bits,
    parse_encoding,
    select,
    spread,
    spread_mask,
    spread_signs,
    to_planes,
)

__all__ = [
    "FORMAT_VERSION",
    "EncodedTensor",
    "StoredTensor",
    "Written",
    "bits_of",
    "encode",
    "header_of",
    "stored_tensors",
    "write_compressed",
]

FORMAT_VERSION = 1
KIND = "compressed"
KEY, HEADER_KEY = "secateur", "secateur.header"
FREE, JUSTIFIED = 1 << 16, 1024  # bytes that a tensor may take in any case, and for each byte of its parts
ENTRY = 128  # bytes that a part costs in the header, about
ZSTD_LEVEL = 3  # higher ones gain under 1 % on weights, whose mantissas are noise
SEGMENT = 1 << 20  # entries looked at a time, where looking can end early
SPOOL = 1 << 24  # bytes of a part's kind that wait in memory before they go to a temporary file

_BITS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
_WORDS = {1: "U8", 2: "U16", 4: "U32"}
# Whose highest bit alone is -0.0. An FNUZ float has no -0.0, an E8M0 none at all, a complex number three.
_SIGNED_ZERO = frozenset({"F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64"})
# Those that take whole bytes; the others are stored as they are.
_WIDTHS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 1),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 2),
    **dict.fromkeys(["I32", "U32", "F32"], 4),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 8),
}

Read = Callable[[TensorEntry], Array]  # the bytes of an entry, as flat uint8
Zip = Callable[[Array], Array | None]


def bits_of(raw: Array, word: str) -> Array:
    """Bytes as unsigned integers of the dtype's width; as bytes for a dtype that does not take whole bytes.

    >>> bits_of(np.zeros(8, np.uint8), "BF16").dtype
    dtype('uint16')
    """
    return raw.view(_BITS[_WIDTHS.get(word, 1)])


# ------------------------------------------------------------------------------------------------------- encoding


@dataclass(frozen=True)
class EncodedTensor:
    """A tensor as it goes into a file: its record, and ``{part: (dtype's word, shape, bytes)}``."""

    record: dict[str, Any]
    parts: dict[str, tuple[str, tuple[int, ...], Array]]

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for _, _, data in self.parts.values())

    @property
    def cost(self) -> int:
        """Bytes, with those of the header."""
        return self.nbytes + ENTRY * len(self.parts)


def encode(entry: TensorEntry, raw: Array, mask: Bools | None = None, *, zstd: bool = False) -> EncodedTensor:
    """The smallest of dense, bitmask, CSR with 8 or 16-bit columns and n:m; with ``zstd`` of these compressed, too.

    Args:
        entry: name, dtype and shape.
        raw: the tensor's bytes, flat uint8.
        mask: flat, True = kept, whatever it holds; None to keep what is not zero.

    Raises:
        ValueError: the mask removes an entry that is neither 0.0 nor -0.0.
        ImportError: ``zstd`` without the package zstandard.

    >>> entry = TensorEntry("fc.weight", "F32", (1000,), Path(), 0, 4000)
    >>> encode(entry, np.zeros(4000, np.uint8)).record
    {'encoding': 'csr16', 'kept': 0}
    """
    zip_ = _compressor() if zstd else None
    record: dict[str, Any] = {"encoding": "dense", **({} if mask is None else {"mask": True})}
    candidates = [EncodedTensor(record, {"": (entry.dtype, entry.shape, raw)})]
    if entry.dtype in _WIDTHS and raw.size:
        bits = raw.view(_BITS[_WIDTHS[entry.dtype]])
        nonzero = bits != 0
        kept = _kept(entry, bits, nonzero, mask)
        count = int(np.count_nonzero(kept))
        if zip_ is not None and 4 * count >= bits.size and (zipped := zip_(bits)) is not None:
            candidates.append(EncodedTensor(record | {"zstd": ["values"]}, {"values": _part("U8", zipped)}))
        if mask is not None and count < bits.size:
            candidates.clear()  # dense keeps everything
        candidates += _sparse(entry, bits, nonzero, kept, count, mask is not None, zip_)
    return min((each for each in candidates if _is_justified(raw.size, each.nbytes)), key=lambda each: each.cost)


def _kept(entry: TensorEntry, bits: Array, nonzero: Bools, mask: Bools | None) -> Bools:
    """The entries whose values are stored; all others are 0.0 or -0.0."""
    zero = _negative_zero(entry)
    negative = None if zero is None else bits == zero
    if mask is not None:
        wrong = nonzero & ~mask
        if negative is not None:
            wrong &= ~negative
        if wrong.any():
            where = tuple(int(at) for at in np.unravel_index(int(wrong.argmax()), entry.shape))
            raise ValueError(
                f"{printable(entry.name)} {where} is not zero, but its mask removes it; "
                "apply the mask first, as apply_ does."
            )
        return mask
    # A -0.0 costs its width as a value; as a sign, a bit for itself and for every other removed entry.
    negatives = 0 if negative is None else int(np.count_nonzero(negative))
    if negative is None or not negatives:
        return nonzero
    removed = bits.size - int(np.count_nonzero(nonzero)) + negatives
    return nonzero & ~negative if 8 * bits.itemsize * negatives > removed else nonzero


def _negative_zero(entry: TensorEntry) -> int | None:
    return 1 << (8 * _WIDTHS[entry.dtype] - 1) if entry.dtype in _SIGNED_ZERO else None


def _sparse(
    entry: TensorEntry, bits: Array, nonzero: Bools, kept: Bools, count: int, explicit: bool, zip_: Zip | None
) -> Iterator[EncodedTensor]:
    """The smallest encoding with places; with zstd all that might be, compressed, after it."""
    constant = count > 1 and _is_constant(bits, kept)
    # No places take less than a 64th of a byte each, compressed or not, in what can be smaller than dense.
    if not explicit and not constant and 64 * bits.itemsize * (bits.size - count) <= bits.size:
        return
    options: list[tuple[int, int, Encoding]] = []
    encodings: list[Encoding] = [BITMASK, CSR8, CSR16, *_groups(kept, count, exact=explicit or constant)]
    for encoding in encodings:
        total = bits.size // encoding.m * encoding.n if isinstance(encoding, Grouped) else count
        needed = encoding.parts(bits.size, total).values()
        size = sum(dtype.itemsize * length for dtype, length in needed) + bits.itemsize * (1 if constant else total)
        if _is_justified(bits.nbytes, size):
            options.append((size, total, encoding))
    options.sort(key=lambda option: option[0])
    contents: dict[str, tuple[dict[str, Array], dict[str, Array]]] = {}  # values and signs of a mask, plain and zipped
    for size, total, encoding in options:
        if size > 2 * options[0][0]:
            break
        filled = encoding.name if isinstance(encoding, Grouped) and total > count else ""
        mask = encoding.pad(kept) if isinstance(encoding, Grouped) and filled else kept
        if filled not in contents:
            values, signs = select(bits, mask), select(nonzero, ~mask)  # what is removed and not 0.0 is -0.0
            plain = {"values": values[:1] if constant else values}
            if signs.any():
                plain["signs"] = pack_bits(signs)
            contents[filled] = plain, _zipped(plain, zip_)
        places = encoding.encode(mask)
        plain = {**places, **contents[filled][0]}
        flags = {"mask": explicit, "constant": constant, "signs": "signs" in plain}
        record = {"encoding": encoding.name, "kept": total, **{word: True for word in flags if flags[word]}}
        parts = {
            part: _part(entry.dtype if part == "values" else _WORDS[data.itemsize], data)
            for part, data in plain.items()
        }
        if size == options[0][0]:
            yield EncodedTensor(record, parts)
        if zip_ is None:
            break
        if zipped := {**_zipped(places, zip_), **contents[filled][1]}:
            packed = {part: _part("U8", data) for part, data in zipped.items()}
            yield EncodedTensor(record | {"zstd": list(zipped)}, parts | packed)


def _zipped(parts: Mapping[str, Array], zip_: Zip | None) -> dict[str, Array]:
    """Those parts that zstd makes smaller, compressed."""
    if zip_ is None:
        return {}
    return {part: found for part, data in parts.items() if (found := zip_(data)) is not None}


def _part(word: str, data: Array) -> tuple[str, tuple[int, ...], Array]:
    return word, data.shape, data.view(np.uint8)


def _is_constant(bits: Array, kept: Bools) -> bool:
    """Whether all kept entries, one at least, have the same bits."""
    first = bits[int(kept.argmax())]
    # nearly always decided by the first few
    return all(
        bool(((bits[at : at + SEGMENT] == first) | ~kept[at : at + SEGMENT]).all())
        for at in range(0, bits.size, SEGMENT)
    )


def _groups(kept: Bools, count: int, *, exact: bool) -> Iterator[Grouped]:
    """The n:m that the kept entries fit, or fit exactly."""
    for m in GROUPS:
        if kept.size % m or fullest_group(kept[:SEGMENT], m) == m:
            continue
        n = fullest_group(kept, m)
        if 0 < n < m and (not exact or count * m == kept.size * n):
            yield Grouped(n, m)


def _is_justified(dense: int, stored: int) -> bool:
    return dense <= FREE + JUSTIFIED * stored


def _compressor() -> Zip:
    """What compresses an array by planes of bytes; None where that does not make it smaller."""
    compressor = _zstandard().ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True, write_checksum=True)

    def zip_(data: Array) -> Array | None:
        packed = compressor.compress(to_planes(data).data)
        return np.frombuffer(packed, dtype=np.uint8) if len(packed) < data.nbytes else None

    return zip_


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ImportError("zstd needs the package zstandard; install it with: pip install 'secateur[zstd]'.") from None
    return zstandard


# -------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Written:
    """What became of one tensor: its encoding's name, with ``+zstd`` where that was used, and bytes in all parts."""

    name: str
    encoding: str
    dense: int
    stored: int


def write_compressed(
    file: BinaryIO,
    header: bytes,
    tensors: Iterable[tuple[TensorEntry, Array, Bools | None]],
    *,
    zstd: bool,
    folder: Path,
    tied: Mapping[str, str],
) -> list[Written]:
    """Writes one compressed file: the tensors of a safetensors file whose header, after its length, is ``header``.

    Each tensor is asked for, encoded and let go before the next; parts wait in temporary files in ``folder``, which
    have no name, because the header that comes before them needs all their sizes.

    Raises what `encode` does, and CheckpointError where a part's name is taken or the new header is too long.
    """
    written, records = [], {}
    fields: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        # Widest first, as the reference implementation has it: every tensor is then aligned to its entries.
        spools = {
            width: stack.enter_context(tempfile.SpooledTemporaryFile(SPOOL, dir=str(folder))) for width in (8, 4, 2, 1)
        }
        places: dict[str, tuple[int, int]] = {}
        for entry, raw, mask in tensors:
            encoded = encode(entry, raw, mask, zstd=zstd)
            for part, (word, shape, data) in encoded.parts.items():
                name = f"{entry.name}::{part}" if part else entry.name
                if name in fields:
                    raise CheckpointError(f"{printable(name)}: two tensors need this name; rename one.")
                spool = spools[_WIDTHS.get(word, 1)]
                places[name] = _WIDTHS.get(word, 1), spool.tell()
                fields[name] = {"dtype": word, "shape": list(shape), "data_offsets": [0, data.nbytes]}
                spool.write(data.data)
            if encoded.record != {"encoding": "dense"}:
                records[entry.name] = encoded.record
            word = encoded.record["encoding"] + ("+zstd" if "zstd" in encoded.record else "")
            written.append(Written(entry.name, word, raw.nbytes, encoded.nbytes))
            del raw, mask, encoded
        starts, start = {}, 0
        for width, spool in spools.items():
            starts[width] = start
            start += spool.tell()
        for name, (width, at) in places.items():
            fields[name]["data_offsets"] = [starts[width] + at, starts[width] + at + fields[name]["data_offsets"][1]]
        about = {"kind": KIND, "version": FORMAT_VERSION, "tensors": records} | ({"tied": dict(tied)} if tied else {})
        text = header_of(fields, {KEY: _to_json(about), HEADER_KEY: header.decode()})
        if len(text) > MAX_HEADER:
            raise CheckpointError(f"the header would have {len(text)} bytes; {MAX_HEADER} are allowed.")
        file.write(len(text).to_bytes(8, "little") + text)
        for spool in spools.values():
            spool.seek(0)
            shutil.copyfileobj(spool, file, SPOOL)
    return written


def header_of(fields: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file, filled up with spaces to whole eights of bytes.

    >>> header_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, {})
    b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   '
    """
    about = {"__metadata__": dict(metadata)} if metadata else {}
    text = _to_json({**about, **fields}).encode()
    return text + b" " * (-len(text) % 8)


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# -------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a compressed file holds it, its sizes checked: ``entry`` is what it was before.

    ``encoding`` is None for dense; ``parts`` says where in the file each part lies.
    """

    entry: TensorEntry
    parts: Mapping[str, TensorEntry]
    encoding: Encoding | None = None
    kept: int = 0
    explicit: bool = False
    constant: bool = False
    zstd: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def word(self) -> str:
        """The encoding's name, with ``+zstd`` where that was used."""
        return ("dense" if self.encoding is None else self.encoding.name) + ("+zstd" if self.zstd else "")

    def bits(self, read: Read) -> Array:
        """The entries, flat, as unsigned integers; as bytes where the dtype does not take whole ones."""
        with self._blamed():
            if self.encoding is None:
                return (
                    self._read(read, "values", self.entry.numel)
                    if self.zstd
                    else bits_of(read(self.parts[""]), self.entry.dtype)
                )
            values = self._read(read, "values", min(self.kept, 1) if self.constant else self.kept)
            places = self._places(read, self.encoding)
            bits = spread(self.encoding, places, values, self.entry.numel, self.kept)
            if "signs" in self.parts:
                mask = spread_mask(self.encoding, places, self.entry.numel, self.kept)
                spread_signs(bits, mask, self._read(read, "signs", -(-(self.entry.numel - self.kept) // 8)))
            return bits

    def mask(self, read: Read) -> Bools | None:
        """The mask that was given, flat, or None where none was."""
        if not self.explicit:
            return None
        if self.encoding is None:
            return np.ones(self.entry.numel, np.bool_)
        with self._blamed():
            return spread_mask(self.encoding, self._places(read, self.encoding), self.entry.numel, self.kept)

    def _places(self, read: Read, encoding: Encoding) -> dict[str, Array]:
        return {
            part: self._read(read, part, length)
            for part, (_, length) in encoding.parts(self.entry.numel, self.kept).items()
        }

    def _read(self, read: Read, part: str, length: int) -> Array:
        raw, dtype = read(self.parts[part]), self._dtype(part)
        if part not in self.zstd:
            return raw.view(dtype)
        return from_planes(_unzipped(raw, length * dtype.itemsize), dtype)

    def _dtype(self, part: str) -> np.dtype[Any]:
        if part == "values":
            return _BITS[_WIDTHS[self.entry.dtype]]
        places = {} if self.encoding is None else self.encoding.parts(self.entry.numel, self.kept)
        return places[part][0] if part in places else np.dtype(np.uint8)

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except EncodingError as error:
            raise CheckpointError(f"{self.entry.path}: damaged: {printable(self.entry.name)}: {error}") from None


def _unzipped(raw: Array, size: int) -> Array:
    """The frame's content; its size is compared with what is expected before anything is allocated for it."""
    zstandard = _zstandard()
    try:
        if zstandard.frame_content_size(raw.data) != size:
            raise EncodingError(f"a part does not unpack to {size} bytes.")
        content = zstandard.ZstdDecompressor().decompress(raw.data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise EncodingError(f"a part does not unpack ({printable(str(error), 120)}).") from None
    return np.frombuffer(content, dtype=np.uint8)


def stored_tensors(
    path: Path, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]
) -> tuple[dict[str, StoredTensor], bytes | None]:
    """Every tensor that a file holds, and the header that it had before; None for a file that is not compressed.

    ``entries`` and ``metadata`` are what `parse_header` gave. Nothing but them is looked at.

    Raises:
        CheckpointError: a record that is not of this format, parts that are missing, left over, of other sizes than
            the record needs, or too few bytes for the tensor that they promise.
    """
    about = _about(path, metadata)
    if about is None:
        return {name: StoredTensor(entry, {"": entry}) for name, entry in entries.items()}, None
    header = metadata.get(HEADER_KEY, "").encode()
    before, _ = parse_header(header, path)
    records = about["tensors"]
    found: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for entry in sorted(before.values(), key=lambda entry: (entry.start, entry.stop)):
        stored = _stored(entry, records.get(entry.name, {"encoding": "dense"}), entries)
        used.update(part.name for part in stored.parts.values())
        found[entry.name] = stored
    for name, same in about.get("tied", {}).items():
        if name in found or same not in before:
            raise CheckpointError(f"{path}: damaged: {printable(name)} is tied to nothing, or is there twice.")
        found[name] = found[same]
    for name in [*(entries.keys() - used), *(records.keys() - before.keys())]:
        raise CheckpointError(f"{path}: damaged: {printable(name)} belongs to no tensor.")
    return found, header


def _about(path: Path, metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """What the metadata say, or None where they say that the file is none of ours."""
    if KEY not in metadata:
        return None
    about = parse_json(metadata[KEY].encode(), path)
    if about.get("kind") != KIND:
        return None  # a file of masks
    if about.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: compressed in version {printable(repr(about.get('version')))} of the format; "
            f"this Secateur reads version {FORMAT_VERSION}. Use a newer one."
        )
    tied = about.get("tied", {})
    if not isinstance(tied, dict) or not all(isinstance(same, str) for same in tied.values()):
        raise CheckpointError(f"{path}: damaged: its tied names are none.")
    if not isinstance(about.get("tensors"), dict) or HEADER_KEY not in metadata:
        raise CheckpointError(f"{path}: damaged: it lacks its records, or the header that it had before.")
    return about


def _stored(entry: TensorEntry, record: object, entries: Mapping[str, TensorEntry]) -> StoredTensor:
    where = f"{entry.path}: damaged: {printable(entry.name)}"
    if not isinstance(record, dict) or not isinstance(record.get("encoding"), str):
        raise CheckpointError(f"{where} has no valid record.")
    if unknown := record.keys() - {"encoding", "kept", "mask", "constant", "signs", "zstd"}:
        raise CheckpointError(f"{where}: its record has a word of no meaning, {printable(repr(min(unknown)))}.")
    flags = {word: record.get(word, False) for word in ("mask", "constant", "signs")}
    kept, zstd = record.get("kept", entry.numel), record.get("zstd", [])
    if type(kept) is not int or not 0 <= kept <= entry.numel or any(type(each) is not bool for each in flags.values()):
        raise CheckpointError(f"{where} has no valid record.")
    try:
        encoding = None if record["encoding"] == "dense" else parse_encoding(record["encoding"])
        needed = {} if encoding is None else encoding.parts(entry.numel, kept)
    except EncodingError as error:
        raise CheckpointError(f"{where}: {error}") from None
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        part: (_WORDS[dtype.itemsize], (length,)) for part, (dtype, length) in needed.items()
    }
    if encoding is None and not zstd:
        shapes[""] = entry.dtype, entry.shape
    else:
        shapes["values"] = entry.dtype, (min(kept, 1) if flags["constant"] else kept,)
    if flags["signs"]:
        shapes["signs"] = "U8", (-(-(entry.numel - kept) // 8),)
    wrong = (
        (encoding is None and (kept != entry.numel or flags["constant"]))
        or (entry.dtype not in _WIDTHS and "" not in shapes)
        or (flags["signs"] and (encoding is None or entry.dtype not in _SIGNED_ZERO))
        or not isinstance(zstd, list)
        or not all(isinstance(part, str) and part in shapes for part in zstd)
        or len(set(zstd)) < len(zstd)
    )
    if wrong:
        raise CheckpointError(f"{where}: its record contradicts itself.")
    parts = {}
    for part, (word, shape) in shapes.items():
        name = f"{entry.name}::{part}" if part else entry.name
        if name not in entries:
            raise CheckpointError(f"{where} lacks {printable(name)}.")
        parts[part] = entries[name]
        fits = (
            (parts[part].dtype, len(parts[part].shape)) == ("U8", 1)
            if part in zstd
            else (parts[part].dtype, parts[part].shape) == (word, shape)
        )
        if not fits:
            raise CheckpointError(f"{where}: {printable(name)} is not of dtype {word} and shape {list(shape)}.")
    stored = StoredTensor(entry, parts, encoding, kept, flags["mask"], flags["constant"], frozenset(zstd))
    if not _is_justified(entry.nbytes, stored.nbytes):
        raise CheckpointError(
            f"{where}: {stored.nbytes} bytes promise a tensor of {entry.nbytes}; refused as too many."
        )
    return stored
