"""Where a tensor's kept entries lie, as bytes: bitmask, n:m and CSR, and the splitting of numbers into planes of bytes.

Law: what is decoded is what was encoded, bit for bit; what is decoded from anything else is an `EncodingError`, never
a write out of bounds. Everything here is a flat numpy array; a tensor is its entries in memory order, as unsigned bits.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = [
    "BITMASK",
    "CSR8",
    "CSR16",
    "Bitmask",
    "Csr",
    "Encoding",
    "EncodingError",
    "GROUPS",
    "Grouped",
    "from_planes",
    "fullest_group",
    "pack_bits",
    "parse_encoding",
    "select",
    "spread",
    "spread_mask",
    "spread_signs",
    "to_planes",
    "unpack_bits",
]

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Indices = NDArray[np.intp]
Parts = Mapping[str, Array]

PIECE = 1 << 16  # entries decoded at a time: in cache, and a whole number of every encoding's rows
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
GROUPS = (2, 4, 8, 16)  # the m of n:m; an m-bit number names a group's kept entries


class EncodingError(ValueError):
    """Parts that no mask encodes to."""


class Encoding(Protocol):
    """How the places of the kept entries become arrays, its parts, and come back."""

    @property
    def name(self) -> str: ...

    def parts(self, numel: int, kept: int) -> dict[str, tuple[np.dtype[Any], int]]:
        """Each part's dtype and length; what they have to be, before one is read."""
        ...

    def encode(self, mask: Bools) -> dict[str, Array]: ...

    def places(self, parts: Parts, numel: int) -> Iterator[tuple[int, Indices]]:
        """Pieces of the tensor: where each starts, and where from there its kept entries lie, ascending."""
        ...


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


def to_planes(values: Array) -> Array:
    """All lowest bytes, then all second ones, ...: bytes of one meaning beside each other compress better.

    The grouping of bytes of Hershcovitch et al. 2024 (arXiv:2411.05239). Flat uint8.

    >>> to_planes(np.array([0x0102, 0x0304], dtype=np.uint16))
    array([2, 4, 1, 3], dtype=uint8)
    """
    width = values.dtype.itemsize
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, width).T).reshape(-1)


def from_planes(planes: Array, dtype: np.dtype[Any]) -> Array:
    """The inverse of `to_planes`.

    >>> from_planes(np.array([2, 4, 1, 3], dtype=np.uint8), np.dtype(np.uint16)).tolist() == [0x0102, 0x0304]
    True
    """
    width = dtype.itemsize
    if width == 1:
        return planes.view(dtype).copy()
    count = planes.size // width
    values = np.empty(count, dtype)
    columns, rows = values.view(np.uint8).reshape(count, width), planes.reshape(width, count)
    for at in range(0, count, PIECE):
        for byte in range(width):
            columns[at : at + PIECE, byte] = rows[byte, at : at + PIECE]
    return values


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

    def places(self, parts: Parts, numel: int) -> Iterator[tuple[int, Indices]]:
        counts, columns = parts["counts"], parts["columns"]
        if int(counts.sum(dtype=np.uint64)) != columns.size:
            raise EncodingError(f"its counts make {int(counts.sum(dtype=np.uint64))}, its columns are {columns.size}.")
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
                raise EncodingError(f"the columns of the rows from entry {start} on do not ascend.")
            if index.size and index[-1] >= numel - start:
                raise EncodingError(f"a column leads to entry {start + int(index[-1])} of {numel}.")
            yield start, index
            at = stop


@dataclass(frozen=True)
class Grouped:
    """n:m: exactly n of every m consecutive entries are kept; which, is one number for each group.

    The number of a group is its rank among the ``C(m, n)`` possible ones, ordered as m-bit numbers whose bit i is
    entry i, and has as few bits as ``C(m, n)`` needs: 3 for 2:4. ``m`` is 2, 4, 8 or 16 and divides the entries.

    >>> Grouped(2, 4).encode(np.array([True, True, False, False, False, True, False, True]))  # ranks 0 and 4
    {'ranks': array([32], dtype=uint8)}
    """

    n: int
    m: int

    @property
    def name(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def bits(self) -> int:
        return (math.comb(self.m, self.n) - 1).bit_length()

    def parts(self, numel: int, kept: int) -> dict[str, tuple[np.dtype[Any], int]]:
        if numel % self.m or kept != numel // self.m * self.n:
            raise EncodingError(f"{self.name} does not keep {kept} of {numel} entries.")
        return {"ranks": (np.dtype(np.uint8), -(-numel // self.m * self.bits // 8))}

    def encode(self, mask: Bools) -> dict[str, Array]:
        ranks, bits = _ranks(self.n, self.m), self.bits
        packed = []
        for at in range(0, mask.size, PIECE):
            rank = ranks[_codes(mask[at : at + PIECE], self.m)]
            if bool((rank < 0).any()):
                raise EncodingError(f"the mask does not keep {self.n} of every {self.m} entries.")
            packed.append(_pack_numbers(rank, bits))
        return {"ranks": np.concatenate(packed or [np.zeros(0, np.uint8)])}

    def pad(self, mask: Bools) -> Bools:
        """The mask with the first removed entries of each group kept too, until n are.

        >>> Grouped(2, 4).pad(np.array([False, False, True, False]))
        array([ True, False,  True, False])
        """
        out = np.empty_like(mask)
        table = _padded(self.n, self.m)
        for at in range(0, mask.size, PIECE):
            piece = mask[at : at + PIECE]
            packed = _pack_numbers(table[_codes(piece, self.m)], self.m)
            out[at : at + PIECE] = unpack_bits(packed, piece.size)
        return out

    def places(self, parts: Parts, numel: int) -> Iterator[tuple[int, Indices]]:
        packed, members = parts["ranks"], _members(self.n, self.m)
        firsts = np.arange(0, PIECE, self.m, dtype=np.intp).repeat(self.n)
        step = PIECE // self.m * self.bits // 8  # bytes of a piece: PIECE / m is a multiple of 8
        for start in range(0, numel, PIECE):
            groups = min(PIECE, numel - start) // self.m
            at = start // PIECE * step
            ranks = _unpack_numbers(packed[at : at + step], self.bits, groups)
            if int(ranks.max()) >= len(members):
                raise EncodingError(f"a group has rank {int(ranks.max())}; there are {len(members)} of {self.name}.")
            found = members.take(ranks, axis=0).reshape(-1)
            found += firsts[: found.size]
            yield start, found


BITMASK = Bitmask()
CSR8, CSR16 = Csr(8), Csr(16)


def parse_encoding(name: str) -> Encoding:
    """The encoding of this name.

    Raises:
        EncodingError: there is none.

    >>> parse_encoding("2:4")
    Grouped(n=2, m=4)
    """
    for encoding in (BITMASK, CSR8, CSR16):
        if name == encoding.name:
            return encoding
    found = re.fullmatch("([1-9][0-9]?):(2|4|8|16)", name)
    if found and int(found[1]) < int(found[2]):
        return Grouped(int(found[1]), int(found[2]))
    raise EncodingError(f"there is no encoding {name!r}.")


def _pack_numbers(numbers: NDArray[np.integer[Any]], bits: int) -> Array:
    """Numbers of this many bits, at most 16, one after another; bit ``i * bits`` of the result is number i's lowest."""
    count = numbers.size
    words = np.zeros((-(-count // 8), 8), np.uint32)  # eight numbers fill whole bytes
    words.reshape(-1)[:count] = numbers
    packed = np.zeros((len(words), bits + 2), np.uint8)
    for number in range(8):
        byte, shift = divmod(number * bits, 8)
        word = words[:, number] << shift
        for each in range(-(-(shift + bits) // 8)):
            packed[:, byte + each] |= (word >> (8 * each)).astype(np.uint8)
    return packed[:, :bits].reshape(-1)[: -(-count * bits // 8)]


def _unpack_numbers(packed: Array, bits: int, count: int) -> NDArray[np.uint16]:
    """The inverse of `_pack_numbers`."""
    if count * bits % 8 and int(packed[-1]) >> (count * bits % 8):
        raise EncodingError("bits are set after the last group.")
    rows = np.zeros((-(-count // 8), bits + 2), np.uint8)
    whole = np.zeros(len(rows) * bits, np.uint8)
    whole[: packed.size] = packed
    rows[:, :bits] = whole.reshape(-1, bits)
    numbers = np.empty((len(rows), 8), np.uint16)
    for number in range(8):
        byte, shift = divmod(number * bits, 8)
        word = rows[:, byte].astype(np.uint32)
        for each in range(1, -(-(shift + bits) // 8)):
            word |= rows[:, byte + each].astype(np.uint32) << np.uint32(8 * each)
        numbers[:, number] = (word >> np.uint32(shift)) & np.uint32(2**bits - 1)
    return numbers.reshape(-1)[:count]


def _codes(mask: Bools, m: int) -> NDArray[np.uint16]:
    """Each group of m entries as an m-bit number."""
    return _unpack_numbers(pack_bits(mask), m, mask.size // m)


@functools.cache
def _codes_of_ranks(n: int, m: int) -> NDArray[np.uint16]:
    """All m-bit numbers with n bits, ascending."""
    return np.array([code for code in range(2**m) if code.bit_count() == n], dtype=np.uint16)


@functools.cache
def _members(n: int, m: int) -> Indices:
    """(C(m, n), n): the places of each rank's kept entries."""
    codes = _codes_of_ranks(n, m).tolist()
    return np.array([[at for at in range(m) if code >> at & 1] for code in codes], dtype=np.intp)


@functools.cache
def _ranks(n: int, m: int) -> NDArray[np.int32]:
    """The rank of each m-bit number, -1 for those without n bits."""
    table = np.full(2**m, -1, dtype=np.int32)
    codes = _codes_of_ranks(n, m)
    table[codes] = np.arange(codes.size)
    return table


@functools.cache
def _padded(n: int, m: int) -> NDArray[np.uint16]:
    """Each m-bit number with its lowest zeros made ones until it has n."""
    codes = np.arange(2**m, dtype=np.uint32)
    for _ in range(n):
        short = _counts(m)[codes] < n
        codes = np.where(short, codes | (codes + 1), codes)
    return codes.astype(np.uint16)


def fullest_group(mask: Bools, m: int) -> int:
    """The most entries that are kept in any m consecutive ones, of groups that begin at multiples of m.

    >>> fullest_group(np.array([True, True, False, False, False, True, False, False]), 4)
    2
    """
    return int(_counts(m)[_codes(mask, m)].max(initial=0))


@functools.cache
def _counts(m: int) -> NDArray[np.uint8]:
    return np.array([code.bit_count() for code in range(2**m)], dtype=np.uint8)


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


def spread(encoding: Encoding, parts: Parts, values: Array, numel: int, kept: int) -> Array:
    """Zeros, with ``values`` at the kept places; a single value of several kept places goes to each.

    Raises:
        EncodingError: the parts are no mask of ``kept`` entries.

    >>> spread(BITMASK, {"bitmask": np.array([9], dtype=np.uint8)}, np.array([7, 5], dtype=np.uint8), 4, 2)
    array([7, 0, 0, 5], dtype=uint8)
    """
    out = np.zeros(numel, values.dtype)
    # torch scatters twice as fast as numpy, but no unsigned integers
    target, source = (torch.from_numpy(each.view(_SIGNED[each.itemsize])) for each in (out, values))
    at = 0
    for start, index in encoding.places(parts, numel):
        stop = at + index.size
        if stop > kept:
            raise EncodingError(f"its places are those of more than {kept} entries.")
        # a single value stands for all
        piece = source[at:stop] if values.size == kept else source.expand(index.size)
        target[start : start + PIECE].scatter_(0, torch.from_numpy(index), piece)
        at = stop
    if at < kept:
        raise EncodingError(f"its places are those of {at} entries, not {kept}.")
    return out


def spread_mask(encoding: Encoding, parts: Parts, numel: int, kept: int) -> Bools:
    """The mask itself, True at the kept places.

    >>> spread_mask(BITMASK, {"bitmask": np.array([9], dtype=np.uint8)}, 4, 2)
    array([ True, False, False,  True])
    """
    return spread(encoding, parts, np.ones(kept, np.bool_)[: min(kept, 1)], numel, kept)


def spread_signs(bits: Array, mask: Bools, packed: Array) -> None:
    """Sets, in place, the highest bit of those removed entries whose bit in ``packed`` is set: they are -0.0.

    >>> bits = np.array([3, 0, 0], dtype=np.uint8)
    >>> spread_signs(bits, np.array([True, False, False]), np.array([2], dtype=np.uint8))
    >>> bits
    array([  3,   0, 128], dtype=uint8)
    """
    removed = np.flatnonzero(~mask)
    bits[removed[unpack_bits(packed, removed.size)]] = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
