"""Compressed safetensors files: which encoding a tensor gets, and what is checked before one is believed.

Law: a tensor comes back with exactly its bits. A file is held to its own sizes before anything is allocated, and no
tensor takes more than 64 KiB + 1024 bytes for each byte that the file spends on it. Beside a tensor itself nothing that
grows with it is in memory: parts are made, and read, in pieces, but for the numbers of one that was rounded to int8.
docs/guides/format.md has every byte.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import torch

from secateur.checkpoints import HEADER_KEY, MAX_HEADER, CheckpointError, TensorEntry, parse_header, parse_json
from secateur.storage.encodings import (
    ENCODINGS,
    PIECE,
    Array,
    Bools,
    Constant,
    Encoding,
    EncodingError,
    Entries,
    Stream,
    pack_bits,
    parse_encoding,
    pieces,
    plane,
    put_plane,
    select,
)
from secateur.support import Fields, printable, to_int8

FORMAT_VERSION = 1
KIND = "compressed"
KEY = "secateur"
FREE, JUSTIFIED = 1 << 16, 1024  # bytes that a tensor may take in any case, and for each byte of its parts
ENTRY = 128  # bytes that a part costs in the header, about
ZSTD_LEVEL = 3  # higher ones gain under 1 % on weights, whose mantissas are noise
SPOOL = 1 << 22  # bytes of a part's kind that wait in memory before they go to a temporary file
AHEAD = 1 << 18  # bytes of a part that are read at a time

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

Read = Callable[[TensorEntry, int, Array], None]  # fills flat uint8 with the bytes of an entry from a place on


def bits_of(raw: Array, word: str) -> Array:
    """Bytes as unsigned integers of the dtype's width; as bytes for a dtype that does not take whole bytes.

    >>> bits_of(np.zeros(8, np.uint8), "BF16").dtype
    dtype('uint16')
    """
    return raw.view(_BITS[_WIDTHS.get(word, 1)])


# ------------------------------------------------------------------------------------------------------- encoding


@dataclass(frozen=True)
class Section:
    """A tensor of the file: its dtype's word, its shape, its bytes, and the way to make those, a piece at a time."""

    word: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterator[Array]]


@dataclass(frozen=True)
class EncodedTensor:
    """A tensor as it goes into a file: its record, and its parts by name."""

    record: dict[str, Any]
    parts: dict[str, Section]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def cost(self) -> int:
        """Bytes, with those of the header."""
        return self.nbytes + ENTRY * len(self.parts)


def encode(
    entry: TensorEntry, raw: Array, mask: Bools | None = None, *, scratch: IO[bytes] | None = None
) -> EncodedTensor:
    """The smallest of dense, bitmask and CSR with 8 or 16-bit columns; with ``scratch`` of these in zstd, too.

    A float32 tensor whose entries are whole numbers of 8 bits times a scale for each row, bit for bit, has those
    numbers for values.

    Args:
        entry: name, dtype and shape.
        raw: the tensor's bytes, flat uint8; the parts are made of them when they are asked for.
        mask: flat, True = kept, whatever it holds; None to keep what is not zero.
        scratch: a file for what has to be compressed to know its size; None to leave zstd out.

    Raises:
        ValueError: the mask removes an entry that is neither 0.0 nor -0.0.
        ImportError: ``scratch`` without the package zstandard.

    >>> entry = TensorEntry("fc.weight", "F32", (1000,), Path(), 0, 4000)
    >>> encode(entry, np.zeros(4000, np.uint8)).record
    {'encoding': 'csr16', 'kept': 0}
    """
    record: dict[str, Any] = {"encoding": "dense", **({} if mask is None else {"mask": True})}
    bits = bits_of(raw, entry.dtype)
    dense = Section(entry.dtype, entry.shape, raw.size, lambda: _cut(bits))
    candidates = [EncodedTensor(record, {"": dense})]
    if entry.dtype in _WIDTHS and raw.size:
        kept = _kept(entry, bits, mask)
        if 4 * kept.count >= bits.size and (zipped := _zipped({"values": dense}, scratch)):
            candidates.append(EncodedTensor(record | {"zstd": ["values"]}, zipped))
        if mask is not None and kept.count < bits.size:
            candidates.clear()  # dense keeps everything
        candidates += _sparse(entry, kept, scratch)
        if (numbers := _numbers(entry, bits)) is not None:
            candidates += _rounded(entry, numbers, mask, scratch)
    return min((each for each in candidates if _is_justified(raw.size, each.nbytes)), key=lambda each: each.cost)


@dataclass(frozen=True)
class _Numbers:
    """A tensor in whole numbers, ``bits`` as unsigned bytes, with a scale (float32) for each row."""

    bits: Array
    scales: Array


def _numbers(entry: TensorEntry, bits: Array) -> _Numbers | None:
    """The numbers and scales of a tensor that was rounded to int8; None for any other. -128 is -0.0.

    A tensor that was not is known by its first rows.
    """
    if entry.dtype != "F32" or len(entry.shape) < 2:
        return None
    floats = bits.view(np.float32).reshape(entry.shape[0], -1)
    rows, width = floats.shape
    numbers, scales = np.empty(floats.shape, np.uint8), np.empty(rows, np.float32)
    step, top = max(1, PIECE // width), 0
    while top < rows:
        stop = min(top + (step if top else min(step, 8)), rows)
        some = torch.from_numpy(floats[top:stop].copy())  # a file's bytes may be read only
        if not bool(some.isfinite().all()):
            return None
        found, own = to_int8(some)
        minus = some.eq(0) & some.signbit()
        again = torch.where(minus, -0.0, found * own[:, None])
        if not torch.equal(again.view(torch.int32), some.view(torch.int32)):
            return None
        numbers[top:stop] = found.masked_fill_(minus, -128).numpy().view(np.uint8)
        scales[top:stop] = own.numpy()
        top = stop
    return _Numbers(numbers.reshape(-1), scales)


def _rounded(
    entry: TensorEntry, numbers: _Numbers, mask: Bools | None, scratch: IO[bytes] | None
) -> Iterator[EncodedTensor]:
    """The encodings of the numbers, and the scales beside."""
    scales = Section("F32", numbers.scales.shape, numbers.scales.nbytes, lambda: iter([numbers.scales]))
    inner = dataclasses.replace(entry, dtype="I8", start=0, stop=numbers.bits.size)
    for each in _sparse(inner, _kept(inner, numbers.bits, mask, signed=True), scratch):
        yield EncodedTensor(each.record | {"int8": True}, each.parts | {"scales": scales})


def _cut(array: Array) -> Iterator[Array]:
    return (array[at : at + PIECE] for at in range(0, array.size, PIECE))


@dataclass(frozen=True)
class _Kept:
    """The entries whose values are stored, ``count`` of them; all others are 0.0 or, ``signs`` of them, -0.0.

    A mask is made where it is needed, of `PIECE` entries: it is ``given``, or what is neither 0.0 nor ``dropped``.
    """

    bits: Array
    given: Bools | None
    dropped: int | None
    count: int
    signs: int

    def pieces(self) -> Iterator[tuple[Array, Bools]]:
        """The entries, and which of them are kept."""
        for at in range(0, self.bits.size, PIECE):
            bits = self.bits[at : at + PIECE]
            if self.given is not None:
                mask = self.given[at : at + PIECE]
            else:
                mask = bits != 0
                if self.dropped is not None:
                    mask &= bits != self.dropped
            yield bits, mask

    def values(self) -> Iterator[Array]:
        return (select(bits, mask) for bits, mask in self.pieces())

    def first(self) -> Iterator[Array]:
        """The first value alone."""
        return (each[:1] for each in itertools.islice((each for each in self.values() if each.size), 1))

    def packed_signs(self) -> Iterator[Array]:
        left = np.zeros(0, np.bool_)
        for bits, mask in self.pieces():
            left = np.concatenate([left, select(bits, ~mask) != 0])
            whole = left.size // 8 * 8
            yield pack_bits(left[:whole])
            left = left[whole:]
        yield pack_bits(left)


def _kept(entry: TensorEntry, bits: Array, mask: Bools | None, *, signed: bool = False) -> _Kept:
    zero = 1 << (8 * bits.itemsize - 1) if signed or entry.dtype in _SIGNED_ZERO else None
    nonzeros = negatives = signs = 0
    for at in range(0, bits.size, PIECE):
        piece = bits[at : at + PIECE]
        nonzero = piece != 0
        if mask is not None:
            removed = nonzero & ~mask[at : at + PIECE]
            wrong = removed if zero is None else removed & (piece != zero)
            if wrong.any():
                where = tuple(int(axis) for axis in np.unravel_index(at + int(wrong.argmax()), entry.shape))
                raise ValueError(
                    f"{printable(entry.name)} {where} is not zero, but its mask removes it; "
                    "apply the mask first, as apply_ does."
                )
            signs += int(np.count_nonzero(removed))
        else:
            nonzeros += int(np.count_nonzero(nonzero))
            negatives += 0 if zero is None else int(np.count_nonzero(piece == zero))
    if mask is not None:
        return _Kept(bits, mask, None, int(np.count_nonzero(mask)), signs)
    # A -0.0 costs its width as a value; as a sign, a bit for itself and for every other removed entry.
    if 8 * bits.itemsize * negatives > bits.size - nonzeros + negatives:
        return _Kept(bits, None, zero, nonzeros - negatives, negatives)
    return _Kept(bits, None, None, nonzeros, 0)


def _sparse(entry: TensorEntry, kept: _Kept, scratch: IO[bytes] | None) -> Iterator[EncodedTensor]:
    """The smallest encoding with places; with zstd all that might be, compressed, after it."""
    numel, width, constant = kept.bits.size, kept.bits.itemsize, _is_constant(kept)
    # No places take less than a 64th of a byte each, compressed or not, in what can be smaller than dense.
    if kept.given is None and not constant and 64 * width * (numel - kept.count) <= numel:
        return
    count = 1 if constant else kept.count
    options: list[tuple[int, Encoding]] = []
    for encoding in ENCODINGS:
        needed = encoding.parts(numel, kept.count).values()
        size = sum(dtype.itemsize * length for dtype, length in needed) + width * count
        if _is_justified(kept.bits.nbytes, size):
            options.append((size, encoding))
    if not options:
        return
    options.sort(key=lambda option: option[0])
    plain = {"values": Section(entry.dtype, (count,), width * count, kept.first if constant else kept.values)}
    if kept.signs:
        length = -(-(numel - kept.count) // 8)
        plain["signs"] = Section("U8", (length,), length, kept.packed_signs)
    flags = {"mask": kept.given is not None, "constant": constant, "signs": "signs" in plain}
    zipped = _zipped(plain, scratch)
    for size, encoding in options:
        if size > 2 * options[0][0]:
            break
        places = {
            part: Section(_WORDS[dtype.itemsize], (length,), dtype.itemsize * length, _maker(kept, encoding, part))
            for part, (dtype, length) in encoding.parts(numel, kept.count).items()
        }
        parts = {**places, **plain}
        record = {"encoding": encoding.name, "kept": kept.count, **{word: True for word in flags if flags[word]}}
        if size == options[0][0]:
            yield EncodedTensor(record, parts)
        if scratch is None:
            break
        if smaller := {**_zipped(places, scratch), **zipped}:
            yield EncodedTensor(record | {"zstd": list(smaller)}, parts | smaller)


def _maker(kept: _Kept, encoding: Encoding, part: str) -> Callable[[], Iterator[Array]]:
    """Makes a part of an encoding, whose pieces are those of the pieces of the mask."""
    return lambda: (encoding.encode(mask)[part] for _, mask in kept.pieces())


def _is_constant(kept: _Kept) -> bool:
    """Whether all kept entries, two at least, have the same bits; nearly always the first piece decides."""
    first = next(kept.first(), None) if kept.count > 1 else None
    return first is not None and all(bool(((bits == first) | ~mask).all()) for bits, mask in kept.pieces())


def _is_justified(dense: int, stored: int) -> bool:
    return dense <= FREE + JUSTIFIED * stored


def _zipped(parts: Mapping[str, Section], scratch: IO[bytes] | None) -> dict[str, Section]:
    """Those parts that zstd makes smaller, compressed by planes of bytes into the scratch file; none without one."""
    if scratch is None:
        return {}
    compressor = _zstandard().ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True, write_checksum=True)
    found = {}
    for name, part in parts.items():
        scratch.seek(0, 2)
        start = scratch.tell()
        frame = compressor.compressobj(size=part.nbytes)
        for byte in range(_WIDTHS[part.word]):
            for piece in part.pieces():
                scratch.write(frame.compress(plane(piece, byte).data))
        scratch.write(frame.flush())
        size = scratch.tell() - start
        if size < part.nbytes:
            found[name] = Section("U8", (size,), size, functools.partial(_read_back, scratch, start, size))
        else:
            scratch.seek(start)
            scratch.truncate()
    return found


def _read_back(scratch: IO[bytes], start: int, size: int) -> Iterator[Array]:
    for at in range(0, size, AHEAD):
        scratch.seek(start + at)
        yield np.frombuffer(scratch.read(min(AHEAD, size - at)), dtype=np.uint8)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ImportError("zstd needs the package zstandard; install it with: pip install 'secateur[zstd]'.") from None
    return zstandard


# -------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Written:
    """What became of one tensor: its encoding's name, with ``+int8`` and ``+zstd`` where those were used, and bytes in
    all parts."""

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

    Each tensor is asked for, encoded piece by piece and let go before the next; parts wait in temporary files in
    ``folder``, which have no name, because the header that comes before them needs all their sizes.

    Raises what `encode` does, and CheckpointError where a part's name is taken or the new header is too long.
    """
    written, records = [], {}
    fields: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        # Widest first, as the reference implementation has it: every tensor is then aligned to its entries.
        def spool() -> IO[bytes]:
            return stack.enter_context(tempfile.SpooledTemporaryFile(SPOOL, dir=str(folder)))

        spools = {width: spool() for width in (8, 4, 2, 1)}
        scratch = spool() if zstd else None
        places: dict[str, tuple[int, int]] = {}
        for entry, raw, mask in tensors:
            encoded = encode(entry, raw, mask, scratch=scratch)
            for key, part in encoded.parts.items():
                name = f"{entry.name}::{key}" if key else entry.name
                if name in fields:
                    raise CheckpointError(f"{printable(name)}: two tensors need this name; rename one.")
                width = _WIDTHS.get(part.word, 1)
                at = places[name] = width, spools[width].tell()
                fields[name] = {"dtype": part.word, "shape": list(part.shape), "data_offsets": [0, part.nbytes]}
                for piece in part.pieces():
                    spools[width].write(piece.data)
                assert spools[width].tell() == at[1] + part.nbytes
            if encoded.record != {"encoding": "dense"}:
                records[entry.name] = encoded.record
            word = encoded.record["encoding"] + ("+int8" if "int8" in encoded.record else "")
            word += "+zstd" if "zstd" in encoded.record else ""
            written.append(Written(entry.name, word, raw.nbytes, encoded.nbytes))
            del raw, mask, encoded, part  # the next is made while this one is held
            if scratch is not None:
                scratch.seek(0)
                scratch.truncate()
        starts, start = {}, 0
        for width, waiting in spools.items():
            starts[width] = start
            start += waiting.tell()
        for name, (width, begin) in places.items():
            begin += starts[width]
            fields[name]["data_offsets"] = [begin, begin + fields[name]["data_offsets"][1]]
        about = {"kind": KIND, "version": FORMAT_VERSION, "tensors": records} | ({"tied": dict(tied)} if tied else {})
        text = header_of(fields, {KEY: _to_json(about), HEADER_KEY: header.decode()})
        if len(text) > MAX_HEADER:
            raise CheckpointError(f"the header would have {len(text)} bytes; {MAX_HEADER} are allowed.")
        file.write(len(text).to_bytes(8, "little") + text)
        for waiting in spools.values():
            waiting.seek(0)
            shutil.copyfileobj(waiting, file, SPOOL)
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


def read_whole(read: Read, entry: TensorEntry) -> Array:
    """All bytes of an entry."""
    out = np.empty(entry.nbytes, np.uint8)
    read(entry, 0, out)
    return out


class _Ahead:
    """A part's entries from its bytes, which ``fill`` gives in order, some of them ahead."""

    def __init__(self, fill: Callable[[Array], None], count: int, dtype: np.dtype[Any]) -> None:
        self._fill, self._dtype = fill, dtype
        self._left = count * dtype.itemsize  # bytes to be filled in yet
        self._buffer = np.empty(0, np.uint8)
        self._at = self._stop = 0

    def take(self, count: int) -> Array:
        size = count * self._dtype.itemsize
        there = self._stop - self._at
        if size > there:
            if size - there > self._left:
                raise EncodingError("a part has too few entries.")
            target = max(size, min(AHEAD, there + self._left))
            left = self._buffer[self._at : self._stop].copy()
            if self._buffer.size < target:
                self._buffer = np.empty(target, np.uint8)
            self._buffer[:there] = left
            self._fill(self._buffer[there:target])
            self._left -= target - there
            self._at, self._stop = 0, target
        self._at += size
        return self._buffer[self._at - size : self._at].view(self._dtype)


class _Plain:
    """An entry's bytes in order."""

    def __init__(self, read: Read, entry: TensorEntry) -> None:
        self._read, self._entry, self.at = read, entry, 0

    def fill(self, out: Array) -> None:
        self._read(self._entry, self.at, out)
        self.at += out.size

    def read(self, count: int) -> bytes:
        """The next bytes, but for the last one of all, which comes alone: whoever asks for it needs them all."""
        left = self._entry.nbytes - self.at
        out = np.empty(min(count, max(left - 1, 1), left), np.uint8)
        self.fill(out)
        return out.tobytes()


class _Frame:
    """The content of a frame of zstd, ``size`` bytes, in order; what it says of its size is checked beforehand."""

    def __init__(self, read: Read, entry: TensorEntry, size: int) -> None:
        self._source, self._entry, self._left = _Plain(read, entry), entry, size
        zstandard = _zstandard()
        head = np.empty(min(18, entry.nbytes), np.uint8)  # no header of a frame is longer
        read(entry, 0, head)
        with _unpacking():
            if zstandard.frame_content_size(head.data) != size:
                raise EncodingError(f"a part does not unpack to {size} bytes.")
        self._reader = zstandard.ZstdDecompressor().stream_reader(self._source, read_size=AHEAD)
        if not size:
            self._finish()

    def fill(self, out: Array) -> None:
        view = out.data
        with _unpacking():
            while view:
                count = self._reader.readinto(view)
                if not count:
                    raise EncodingError("a part does not unpack (it ends too early).")
                view = view[count:]
        self._left -= out.size
        if out.size and not self._left:
            self._finish()

    def _finish(self) -> None:
        with _unpacking():  # the checksum is still to come
            more = self._reader.read(1)
        if more or self._source.at != self._entry.nbytes:
            raise EncodingError("a part does not unpack (it has bytes after its end).")


@contextlib.contextmanager
def _unpacking() -> Iterator[None]:
    try:
        yield
    except _zstandard().ZstdError as error:
        raise EncodingError(f"a part does not unpack ({printable(str(error), 120)}).") from None


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
    int8: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def word(self) -> str:
        """The encoding's name, with ``+int8`` and ``+zstd`` where those were used."""
        name = "dense" if self.encoding is None else self.encoding.name
        return name + ("+int8" if self.int8 else "") + ("+zstd" if self.zstd else "")

    def bits(self, read: Read) -> Array:
        """The entries, flat, as unsigned integers; as bytes where the dtype does not take whole ones."""
        with self._blamed():
            if self.encoding is None and not self.zstd:
                return bits_of(read_whole(read, self.parts[""]), self.entry.dtype)
            out = np.zeros(self.entry.numel, _BITS[_WIDTHS[self.entry.dtype]])
            if self.encoding is None:
                self._unzip(read, "values", out)
            else:
                collections.deque(self._expanded(self.encoding, read, out), maxlen=0)
            return out

    def pieces(self, read: Read) -> Iterator[Array]:
        """`bits` in pieces, each of use until the next; but for a dense one in zstd they take little memory."""
        if self.encoding is not None:
            with self._blamed():
                yield from self._expanded(self.encoding, read, None)
        elif self.zstd:
            yield self.bits(read)
        else:
            source, left = _Plain(read, self.parts[""]), self.entry.nbytes
            buffer = np.empty(min(SPOOL, left), np.uint8)
            for at in range(0, left, SPOOL):
                source.fill(buffer[: left - at])
                yield buffer[: left - at]

    def mask(self, read: Read) -> Bools | None:
        """The mask that was given, flat, or None where none was."""
        if not self.explicit:
            return None
        if self.encoding is None:
            return np.ones(self.entry.numel, np.bool_)
        out = np.zeros(self.entry.numel, np.bool_)
        ones = Constant(np.ones(1, np.bool_))
        with self._blamed():
            every = pieces(
                self.encoding,
                self._places(read, self.encoding),
                ones,
                out.size,
                self.kept,
                dtype=out.dtype,
                out=out,
                clean=out.size,
            )
            collections.deque(every, maxlen=0)
        return out

    def _expanded(self, encoding: Encoding, read: Read, out: Array | None) -> Iterator[Array]:
        if self.int8:
            yield from self._multiplied(encoding, read, out)
        else:
            yield from self._placed(encoding, read, out)

    def _multiplied(self, encoding: Encoding, read: Read, out: Array | None) -> Iterator[Array]:
        """The numbers of a rounded tensor times the scales of their rows."""
        scales = self._stream(read, "scales", self.entry.shape[0]).take(self.entry.shape[0]).view(np.float32).copy()
        width, at = self.entry.numel // self.entry.shape[0], 0
        for numbers in self._placed(encoding, read, None):
            row = np.arange(at, at + numbers.size) // width
            with np.errstate(all="ignore"):
                found = numbers.view(np.int8) * scales[row]
            found[numbers == 128] = -0.0
            bits = found.view(np.uint32)
            if out is not None:
                out[at : at + numbers.size] = bits
                bits = out[at : at + numbers.size]
            at += numbers.size
            yield bits

    def _placed(self, encoding: Encoding, read: Read, out: Array | None) -> Iterator[Array]:
        numel, dtype = self.entry.numel, self._dtype("values")
        values: Stream
        clean = numel
        if self.constant:
            values = Constant(self._stream(read, "values", min(self.kept, 1)).take(min(self.kept, 1)).copy())
        elif "values" in self.zstd and out is not None and dtype.itemsize > 1:
            clean = numel - self.kept  # its planes are put together where there is room already
            self._unzip(read, "values", out[clean:])
            values = Entries(out[clean:])
        else:
            values = self._stream(read, "values", self.kept)
        signs = self._stream(read, "signs", -(-(numel - self.kept) // 8)) if "signs" in self.parts else None
        places = self._places(read, encoding)
        return pieces(encoding, places, values, numel, self.kept, dtype=dtype, signs=signs, out=out, clean=clean)

    def _places(self, read: Read, encoding: Encoding) -> dict[str, Stream]:
        return {
            part: self._stream(read, part, length)
            for part, (_, length) in encoding.parts(self.entry.numel, self.kept).items()
        }

    def _stream(self, read: Read, part: str, length: int) -> Stream:
        dtype = self._dtype(part)
        if part not in self.zstd:
            entry = self.parts[part]
            return _Ahead(_Plain(read, entry).fill, entry.nbytes // dtype.itemsize, dtype)
        if dtype.itemsize == 1:
            return _Ahead(_Frame(read, self.parts[part], length).fill, length, dtype)
        out = np.empty(length, dtype)
        self._unzip(read, part, out)
        return Entries(out)

    def _unzip(self, read: Read, part: str, out: Array) -> None:
        """A part's content, put together of its planes."""
        frame = _Frame(read, self.parts[part], out.nbytes)
        chunk = np.empty(min(AHEAD, out.size), np.uint8)
        for byte in range(out.itemsize):
            for at in range(0, out.size, AHEAD):
                piece = chunk[: out.size - at]
                frame.fill(piece)
                put_plane(out[at : at + AHEAD], byte, piece)

    def _dtype(self, part: str) -> np.dtype[Any]:
        if part == "values":
            return _BITS[1 if self.int8 else _WIDTHS[self.entry.dtype]]
        if part == "scales":
            return _BITS[4]
        places = {} if self.encoding is None else self.encoding.parts(self.entry.numel, self.kept)
        return places[part][0] if part in places else np.dtype(np.uint8)

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except EncodingError as error:
            raise CheckpointError(f"{self.entry.path}: damaged: {printable(self.entry.name)}: {error}") from None


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
    records = about.inner("tensors")
    found: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for entry in sorted(before.values(), key=lambda entry: (entry.start, entry.stop)):
        stored = _stored(entry, records.inner(entry.name) if entry.name in records.values else None, entries)
        used.update(part.name for part in stored.parts.values())
        found[entry.name] = stored
    for name, same in about.each_named("tied", str).items() if "tied" in about.values else ():
        if name in found or same not in before:
            raise CheckpointError(f"{path}: damaged: {printable(name)} is tied to nothing, or is there twice.")
        found[name] = found[same]
    for name in [*(entries.keys() - used), *(records.values.keys() - before.keys())]:
        raise CheckpointError(f"{path}: damaged: {printable(name)} belongs to no tensor.")
    return found, header


def _about(path: Path, metadata: Mapping[str, str]) -> Fields | None:
    """What the metadata say, or None where they say that the file is none of ours."""
    if KEY not in metadata:
        return None
    about = Fields(parse_json(metadata[KEY].encode(), path), path, error=CheckpointError)
    if about.values.get("kind") != KIND:
        return None  # a file of masks
    if about.values.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: compressed in version {printable(repr(about.values.get('version')))} of the format; "
            f"this Secateur reads version {FORMAT_VERSION}. Use a newer one."
        )
    if HEADER_KEY not in metadata:
        raise about.wrong(HEADER_KEY, "is missing: the header that the file had before")
    return about


def _stored(entry: TensorEntry, record: Fields | None, entries: Mapping[str, TensorEntry]) -> StoredTensor:
    where = f"{entry.path}: damaged: {printable(entry.name)}"
    record = record or Fields({"encoding": "dense"}, entry.path, error=CheckpointError)
    record.only("encoding", "kept", "mask", "constant", "signs", "int8", "zstd")
    word = record.take("encoding", str)
    flags = {flag: flag in record.values and record.take(flag, bool) for flag in ("mask", "constant", "signs", "int8")}
    kept = record.take("kept", int, least=0, most=entry.numel) if "kept" in record.values else entry.numel
    zstd = record.each("zstd", str) if "zstd" in record.values else []
    try:
        encoding = None if word == "dense" else parse_encoding(word)
        needed = {} if encoding is None else encoding.parts(entry.numel, kept)
    except EncodingError as error:
        raise CheckpointError(f"{where}: {error}") from None
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        part: (_WORDS[dtype.itemsize], (length,)) for part, (dtype, length) in needed.items()
    }
    if encoding is None and not zstd:
        shapes[""] = entry.dtype, entry.shape
    else:
        shapes["values"] = "I8" if flags["int8"] else entry.dtype, (min(kept, 1) if flags["constant"] else kept,)
    if flags["int8"]:
        shapes["scales"] = "F32", entry.shape[:1]
    if flags["signs"]:
        shapes["signs"] = "U8", (-(-(entry.numel - kept) // 8),)
    wrong = (
        (encoding is None and (kept != entry.numel or flags["constant"]))
        or (entry.dtype not in _WIDTHS and "" not in shapes)
        or (flags["signs"] and (encoding is None or entry.dtype not in _SIGNED_ZERO))
        or (flags["int8"] and (encoding is None or entry.dtype != "F32" or len(entry.shape) < 2 or not entry.numel))
        or not all(part in shapes for part in zstd)
        or len(set(zstd)) < len(zstd)
    )
    if wrong:
        raise CheckpointError(f"{where}: its record contradicts itself.")
    parts = {}
    for part, (dtype, shape) in shapes.items():
        name = f"{entry.name}::{part}" if part else entry.name
        if name not in entries:
            raise CheckpointError(f"{where} has no {printable(name)}.")
        parts[part] = entries[name]
        fits = (
            (parts[part].dtype, len(parts[part].shape)) == ("U8", 1)
            if part in zstd
            else (parts[part].dtype, parts[part].shape) == (dtype, shape)
        )
        if not fits:
            raise CheckpointError(f"{where}: {printable(name)} is not of dtype {dtype} and shape {list(shape)}.")
    stored = StoredTensor(
        entry, parts, encoding, kept, flags["mask"], flags["constant"], frozenset(zstd), flags["int8"]
    )
    if not _is_justified(entry.nbytes, stored.nbytes):
        raise CheckpointError(
            f"{where}: {stored.nbytes} bytes promise a tensor of {entry.nbytes}; refused as too many."
        )
    return stored
