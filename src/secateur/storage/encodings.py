"""Where a tensor's kept entries lie, as bytes: bitmask and CSR, and the splitting of numbers into planes of bytes.

Law: what is decoded is what was encoded, bit for bit; what is decoded from anything else is an `EncodingError`, never
a write out of bounds. Everything here is a flat numpy array; a tensor is its entries in memory order, as unsigned bits.
Both ways go piece by piece: no array here is as long as the tensor. Where there are compiled functions (expand.c) they
decode, validating as they go; what they refuse is decoded once more in numpy, which says what is wrong with it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from secateur.native import library

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Indices = NDArray[np.intp]
Parts = Mapping[str, Array]

PIECE = 1 << 16  # entries at a time: in cache, and a whole number of every encoding's rows
STEP = 1 << 20  # entries decoded by one call of a compiled function, so that there are few calls
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class EncodingError(ValueError):
    """Parts that no mask encodes to."""


class Stream(Protocol):
    """The entries of a part of an encoding, from the first on."""

    def take(self, count: int) -> Array:
        """The next ones; of use until more are taken.

        Raises `EncodingError` where there are fewer.
        """
        ...


class Entries:
    """An array as a stream.

    >>> Entries(np.arange(5)).take(2)
    array([0, 1])
    """

    def __init__(self, array: Array) -> None:
        self._array, self._at = np.ascontiguousarray(array), 0

    def take(self, count: int) -> Array:
        found = self._array[self._at : self._at + count]
        if found.size < count:
            raise EncodingError(f"a part has only {self._array.size} entries.")
        self._at += count
        return found


class Constant:
    """One value again and again.

    >>> Constant(np.array([7])).take(3)
    array([7, 7, 7])
    """

    def __init__(self, value: Array) -> None:
        self._value = value

    def take(self, count: int) -> Array:
        return np.full(count, self._value[0]) if count else self._value[:0]


class Encoding(Protocol):
    """How the places of the kept entries become arrays, its parts, and come back."""

    @property
    def name(self) -> str: ...

    def parts(self, numel: int, kept: int) -> dict[str, tuple[np.dtype[Any], int]]:
        """Each part's dtype and length; what they have to be, before one is read."""
        ...

    def encode(self, mask: Bools) -> dict[str, Array]:
        """Each part; those of pieces of `PIECE` entries are pieces of those of the whole."""
        ...

    def cut(self, streams: Mapping[str, Stream], size: int, most: int) -> tuple[dict[str, Array], int]:
        """The parts of the next ``size`` entries, and how many of them are kept, if that is not more than ``most``."""
        ...

    def expand(self, compiled: Any, parts: Parts, values: Array, out: Array) -> bool:
        """Puts the values at their places in ``out`` by a compiled function; False where that refuses the parts."""
        ...

    def places(self, parts: Parts, numel: int) -> Iterator[tuple[int, Indices]]:
        """Pieces of the tensor: where each starts, and where from there its kept entries lie, ascending."""
        ...


# ------------------------------------------------------------------------------------------------------- compiled


def _compiled() -> Any:
    """The functions of expand.c, or None."""
    found = library()
    return found if found is not None and _declare(found) else None


@functools.cache
def _declare(found: Any) -> bool:
    """Tells ctypes what the functions take; False for an object that was compiled before there were any."""
    pointer, number = ctypes.c_void_p, ctypes.c_size_t
    for name, takes, gives in (
        ("bitmask", [pointer, number, pointer, number, pointer, number], ctypes.c_int),
        ("count", [pointer, number], number),
        ("plane", [pointer, number, pointer, number], None),
        ("rows", [pointer, pointer, number, number, pointer, number, pointer, number], ctypes.c_int),
        ("signs", [pointer, number, pointer, number, pointer, number], ctypes.c_int),
    ):
        function = getattr(found, f"secateur_expand_{name}", None)
        if function is None:
            return False
        function.argtypes, function.restype = takes, gives
    return True


def _at(array: Array) -> int:
    """The address of a contiguous array."""
    address: int = array.__array_interface__["data"][0]
    return address


# ----------------------------------------------------------------------------------------------------------- bits


def pack_bits(mask: Bools) -> Array:
    """Entry i is bit ``i % 8``, the lowest first, of byte ``i // 8``; the last byte is filled up with zeros.

    >>> pack_bits(np.array([True, False, False, True, False, False, False, False, True]))
    array([9, 1], dtype=uint8)
    """
    return np.packbits(mask, bitorder="little")


def unpack_bits(packed: Array, count: int) -> Bools:
    """The inverse of `pack_bits`.

    Raises:
        EncodingError: a bit after the last entry is set.

    >>> unpack_bits(np.array([9], dtype=np.uint8), 4)
    array([ True, False, False,  True])
    """
    if count % 8 and int(packed[-1]) >> (count % 8):
        raise EncodingError("bits are set after the last entry.")
    return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)


def plane(values: Array, byte: int) -> Array:
    """One byte of each value, the lowest is 0: bytes of one meaning beside each other compress better.

    The grouping of bytes of Hershcovitch et al. 2024 (arXiv:2411.05239). Flat uint8.

    >>> plane(np.array([0x0102, 0x0304], dtype=np.uint16), 0)
    array([2, 4], dtype=uint8)
    """
    return np.ascontiguousarray(values.view(np.uint8)[byte :: values.itemsize])


def put_plane(values: Array, byte: int, content: Array) -> None:
    """The inverse of `plane`, in place.

    >>> values = np.zeros(2, np.uint16)
    >>> put_plane(values, 1, np.array([1, 3], dtype=np.uint8))
    >>> values.tolist() == [0x0100, 0x0300]
    True
    """
    out, compiled = values.view(np.uint8), _compiled()
    if compiled is not None and content.size == values.size:
        compiled.secateur_expand_plane(_at(content), content.size, _at(out) + byte, values.itemsize)
    else:
        out[byte :: values.itemsize] = content


# ------------------------------------------------------------------------------------------------------ encodings


@dataclass(frozen=True)
class Bitmask:
    """One bit for each entry: ``numel / 8`` bytes.

    >>> BITMASK.encode(np.array([True, False, False, True]))
    {'bitmask': array([9], dtype=uint8)}
    """

    name: str = "bitmask"

    def parts(self, numel: int, kept: int) -> dict[str, tuple[np.dtype[Any], int]]:  # noqa: ARG002
        return {"bitmask": (np.dtype(np.uint8), -(-numel // 8))}

    def encode(self, mask: Bools) -> dict[str, Array]:
        return {"bitmask": pack_bits(mask)}

    def cut(self, streams: Mapping[str, Stream], size: int, most: int) -> tuple[dict[str, Array], int]:  # noqa: ARG002
        packed = streams["bitmask"].take(-(-size // 8))
        return {"bitmask": packed}, _count_bits(packed)

    def expand(self, compiled: Any, parts: Parts, values: Array, out: Array) -> bool:
        refused: int = compiled.secateur_expand_bitmask(
            _at(parts["bitmask"]), out.size, _at(values), values.size, _at(out), out.itemsize
        )
        return not refused

    def places(self, parts: Parts, numel: int) -> Iterator[tuple[int, Indices]]:
        packed = parts["bitmask"]
        for start in range(0, numel, PIECE):
            yield (
                start,
                np.flatnonzero(unpack_bits(packed[start // 8 : (start + PIECE) // 8], min(PIECE, numel - start))),
            )


@dataclass(frozen=True)
class Csr:
    """Compressed sparse rows: how many entries of each row are kept, and in which columns, ascending.

    The rows are the flat tensor in rows of ``2 ** bits`` entries, whatever its shape, so that a column always fits
    ``bits`` bits. ``counts`` are uint16 for 8 bits, uint32 for 16.

    >>> CSR8.encode(np.array([True, False, False, True]))
    {'counts': array([2], dtype=uint16), 'columns': array([0, 3], dtype=uint8)}
    """

    bits: int

    @property
    def name(self) -> str:
        return f"csr{self.bits}"

    @property
    def _dtypes(self) -> tuple[np.dtype[Any], np.dtype[Any]]:
        return (np.dtype(f"u{self.bits // 4}"), np.dtype(f"u{self.bits // 8}"))

    def parts(self, numel: int, kept: int) -> dict[str, tuple[np.dtype[Any], int]]:
        counts, columns = self._dtypes
        return {"counts": (counts, -(-numel // 2**self.bits)), "columns": (columns, kept)}

    def encode(self, mask: Bools) -> dict[str, Array]:
        counts, columns = self._dtypes
        rows = range(0, mask.size, 2**self.bits)
        starts = np.fromiter(rows, dtype=np.intp, count=len(rows))
        # reduceat takes an empty row's first entry for its sum; here none is empty
        per_row = np.add.reduceat(mask, starts, dtype=counts) if mask.size else np.zeros(0, counts)
        found = [
            (np.flatnonzero(mask[at : at + PIECE]) % 2**self.bits).astype(columns) for at in range(0, mask.size, PIECE)
        ]
        return {"counts": per_row, "columns": np.concatenate([np.zeros(0, columns), *found])}

    def cut(self, streams: Mapping[str, Stream], size: int, most: int) -> tuple[dict[str, Array], int]:
        counts = streams["counts"].take(-(-size // 2**self.bits))
        kept = int(counts.sum(dtype=np.uint64))
        if kept > most:
            raise EncodingError("its counts make more entries than there are columns.")
        return {"counts": counts, "columns": streams["columns"].take(kept)}, kept

    def expand(self, compiled: Any, parts: Parts, values: Array, out: Array) -> bool:
        counts, columns = _at(parts["counts"]), _at(parts["columns"])
        refused: int = compiled.secateur_expand_rows(
            counts, columns, self.bits, out.size, _at(values), values.size, _at(out), out.itemsize
        )
        return not refused

    def places(self, parts: Parts, numel: int) -> Iterator[tuple[int, Indices]]:
        counts, columns = parts["counts"], parts["columns"]
        rows, width = PIECE // 2**self.bits, 2**self.bits
        firsts = np.arange(0, PIECE, width, dtype=np.intp)
        at = 0
        for start in range(0, numel, PIECE):
            here = counts[start // width : start // width + rows]
            stop = at + int(here.sum(dtype=np.int64))
            index: Indices = columns[at:stop].astype(np.intp)
            if rows > 1:
                index += np.repeat(firsts[: here.size], here)
            if index.size > 1 and not bool((index[1:] > index[:-1]).all()):
                raise EncodingError("the columns of a row do not ascend.")
            if index.size and index[-1] >= numel - start:
                raise EncodingError("a column leads out of the tensor.")
            yield start, index
            at = stop


BITMASK = Bitmask()
CSR8, CSR16 = Csr(8), Csr(16)
ENCODINGS: tuple[Encoding, ...] = (BITMASK, CSR8, CSR16)


def parse_encoding(name: str) -> Encoding:
    """The encoding of this name.

    Raises:
        EncodingError: there is none.

    >>> parse_encoding("csr8") is CSR8
    True
    """
    for encoding in ENCODINGS:
        if name == encoding.name:
            return encoding
    raise EncodingError(f"there is no encoding {name!r}.")


def _count_bits(packed: Array) -> int:
    compiled = _compiled()
    if compiled is not None:
        return int(compiled.secateur_expand_count(_at(packed), packed.size))
    return int(np.count_nonzero(np.unpackbits(packed)))


# ---------------------------------------------------------------------------------------------- values to places


def select(bits: Array, mask: Bools) -> Array:
    """``bits[mask]``, in pieces: twice as fast, and no index as long as the tensor.

    >>> select(np.arange(4), np.array([False, True, True, False]))
    array([1, 2])
    """
    out = np.empty(int(np.count_nonzero(mask)), bits.dtype)
    at = 0
    for start in range(0, bits.size, PIECE):
        found = np.flatnonzero(mask[start : start + PIECE])
        np.take(bits[start : start + PIECE], found, out=out[at : at + found.size])
        at += found.size
    return out


def pieces(
    encoding: Encoding,
    parts: Mapping[str, Stream],
    values: Stream,
    numel: int,
    kept: int,
    *,
    dtype: np.dtype[Any],
    signs: Stream | None = None,
    out: Array | None = None,
    clean: int = 0,
) -> Iterator[Array]:
    """Zeros, with ``values`` at the kept places and -0.0 where ``signs`` says so, a piece after the other.

    The pieces are those of ``out``, whose entries before ``clean`` are zero and whose others nobody needs but
    ``values``, which may lie at its end: a kept entry never lies behind its value there. Without ``out`` a piece is of
    use until the next one.

    Raises:
        EncodingError: the parts are no mask of ``kept`` entries.

    >>> parts, values = {"bitmask": Entries(np.array([9], dtype=np.uint8))}, Entries(np.array([7, 5], dtype=np.uint8))
    >>> list(pieces(BITMASK, parts, values, 4, 2, dtype=np.dtype(np.uint8)))
    [array([7, 0, 0, 5], dtype=uint8)]
    """
    step = PIECE if _compiled() is None else STEP
    buffer = np.empty(min(step, numel), dtype) if out is None else out
    bits = None if signs is None else _Bits(signs)
    at = 0
    for start in range(0, numel, step):
        size = min(step, numel - start)
        here, count = encoding.cut(parts, size, kept - at)
        at += count
        if at > kept:
            raise EncodingError(f"its places are those of more than {kept} entries.")
        target = buffer[:size] if out is None else out[start : start + size]
        taken = values.take(count)
        if out is None:
            target.fill(0)
        elif start + size > clean:
            taken = taken.copy()
            target.fill(0)
        _put(encoding, here, taken, target)
        if bits is not None:
            mask = np.zeros(size, np.bool_)
            _put(encoding, here, np.ones(count, np.bool_), mask)
            spread_signs(target, mask, pack_bits(bits.take(size - count)))
        yield target
    if at < kept:
        raise EncodingError(f"its places are those of {at} entries, not {kept}.")
    if bits is not None:
        bits.close()


def _put(encoding: Encoding, parts: Parts, values: Array, out: Array) -> None:
    """The values to their places among the zeros of ``out``."""
    compiled = _compiled()
    if compiled is not None and encoding.expand(compiled, parts, values, out):
        return
    # torch scatters twice as fast as numpy, but no unsigned integers
    target, source = (torch.from_numpy(each.view(_SIGNED[each.itemsize])) for each in (out, _writeable(values)))
    at = 0
    for start, index in encoding.places(parts, out.size):
        target[start : start + PIECE].scatter_(0, torch.from_numpy(index), source[at : at + index.size])
        at += index.size


def _writeable(values: Array) -> Array:
    return values if values.flags.writeable else values.copy()  # torch takes no others


class _Bits:
    """The bits of a stream of bytes, any number at a time."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._left = np.zeros(0, np.bool_)

    def take(self, count: int) -> Bools:
        if count > self._left.size:
            more = self._stream.take(-(-(count - self._left.size) // 8))
            self._left = np.concatenate([self._left, np.unpackbits(more, bitorder="little").view(np.bool_)])
        found, self._left = self._left[:count], self._left[count:]
        return found

    def close(self) -> None:
        if self._left.any():
            raise EncodingError("bits are set after the last entry.")


def spread_signs(bits: Array, mask: Bools, packed: Array) -> None:
    """Sets, in place, the highest bit of those removed entries whose bit in ``packed`` is set: they are -0.0.

    >>> bits = np.array([3, 0, 0], dtype=np.uint8)
    >>> spread_signs(bits, np.array([True, False, False]), np.array([2], dtype=np.uint8))
    >>> bits
    array([  3,   0, 128], dtype=uint8)
    """
    count = mask.size - int(np.count_nonzero(mask))
    compiled = _compiled()
    if compiled is not None and packed.size == -(-count // 8):
        kept = pack_bits(mask)
        compiled.secateur_expand_signs(_at(kept), mask.size, _at(packed), count, _at(bits), bits.itemsize)
    else:
        signs = np.flatnonzero(~mask)[unpack_bits(packed, count)]
        bits[signs] = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
