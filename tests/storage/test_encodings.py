"""Places of kept entries as bytes: inverse to the last bit, by hand on small masks, and refused when they are none."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.native import available, loading
from secateur.storage import encodings
from secateur.storage.encodings import (
    BITMASK,
    CSR8,
    CSR16,
    ENCODINGS,
    PIECE,
    STEP,
    Constant,
    EncodingError,
    Entries,
    pack_bits,
    parse_encoding,
    pieces,
    plane,
    put_plane,
    select,
    unpack_bits,
)

FOLDER = Path(loading.__file__).parent
# around the borders of a byte, of a row, and of a piece
SIZES = [0, 1, 7, 8, 9, 255, 256, 257, PIECE, PIECE + 1, 2 * PIECE - 1]


def libraries():
    """Every shared object that this processor can run, and None: numpy."""
    level = loading.library().secateur_level() if available() else -1
    return [None, *sorted({name for at, name in loading._FILES.items() if at <= level and (FOLDER / name).exists()})]


OPENED = {name: None if name is None else loading._opened(FOLDER / name) for name in libraries()}


@pytest.fixture(params=OPENED, ids=str)
def compiled(request):
    """Each way to decode."""
    before = encodings.library
    encodings.library = lambda: OPENED[request.param]
    yield
    encodings.library = before


def spread(encoding, parts, values, numel, kept, **more):
    streams = {part: Entries(array) for part, array in parts.items()}
    stream = Entries(values) if values.size == kept else Constant(values)
    found = pieces(encoding, streams, stream, numel, kept, dtype=values.dtype, **more)
    return np.concatenate([np.zeros(0, values.dtype), *(piece.copy() for piece in found)])


def spread_mask(encoding, parts, numel, kept):
    return spread(encoding, parts, np.ones(1, np.bool_), numel, kept)


def drawn(numel, density, seed):
    return np.random.default_rng(seed).random(numel) < density


def there_and_back(encoding, mask, dtype=np.uint32):
    values = np.random.default_rng(1).integers(1, 2**8, int(mask.sum())).astype(dtype)
    parts = encoding.encode(mask)
    assert {name: (part.dtype, part.size) for name, part in parts.items()} == encoding.parts(mask.size, values.size)
    bits = spread(encoding, parts, values, mask.size, values.size)
    expected = np.zeros(mask.size, dtype)
    expected[mask] = values
    assert bits.dtype == dtype
    assert np.array_equal(bits, expected)
    assert np.array_equal(spread_mask(encoding, parts, mask.size, values.size), mask)
    assert np.array_equal(select(bits, mask), values)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("density", [0, 0.02, 0.5, 1])
@pytest.mark.usefixtures("compiled")
def test_any_mask_comes_back(encoding, density):
    for numel in SIZES:
        there_and_back(encoding, drawn(numel, density, numel))


@pytest.mark.usefixtures("compiled")
@given(st.lists(st.booleans(), max_size=600), st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]))
def test_whatever_is_drawn_comes_back(mask, dtype):
    for encoding in ENCODINGS:
        there_and_back(encoding, np.array(mask, dtype=bool), dtype)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50), st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]))
def test_planes_are_inverse(compiled, numbers, dtype):
    values = np.array(numbers, dtype=np.uint64).astype(dtype)
    again = np.zeros_like(values)
    for byte in range(values.itemsize):
        assert plane(values, byte).tolist() == [int(value) >> 8 * byte & 255 for value in values]
        put_plane(again, byte, plane(values, byte))
    assert np.array_equal(again, values)


def test_by_hand():
    mask = np.array([1, 0, 0, 1, 1, 0, 0, 0, 0, 1], dtype=bool)
    assert BITMASK.encode(mask)["bitmask"].tolist() == [0b00011001, 0b10]
    assert {part: array.tolist() for part, array in CSR8.encode(mask).items()} == {
        "counts": [4],
        "columns": [0, 3, 4, 9],
    }
    far = np.zeros(600, dtype=bool)
    far[[2, 257, 258, 599]] = True
    assert {part: array.tolist() for part, array in CSR8.encode(far).items()} == {
        "counts": [1, 2, 1],
        "columns": [2, 1, 2, 599 - 512],
    }


@pytest.mark.parametrize("name", ["bitmask", "csr8", "csr16"])
def test_names_are_read(name):
    assert parse_encoding(name).name == name


@pytest.mark.parametrize("name", ["", "dense", "csr32", "2:4", "csr8 ", "bitmask+zstd"])
def test_other_names_are_none(name):
    with pytest.raises(EncodingError, match="no encoding"):
        parse_encoding(name)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)
def test_values_may_lie_at_the_end_of_what_they_become(encoding):
    for numel in (64, STEP + PIECE + 24):
        mask = drawn(numel, 0.4, 0)
        values = np.arange(1, int(mask.sum()) + 1, dtype=np.uint32)
        signs = drawn(numel - values.size, 0.5, 1)
        out = np.zeros(numel, np.uint32)
        out[numel - values.size :] = values
        stream = {part: Entries(array) for part, array in encoding.encode(mask).items()}
        more = {"out": out, "clean": numel - values.size, "signs": Entries(pack_bits(signs))}
        for _ in pieces(
            encoding, stream, Entries(out[numel - values.size :]), numel, values.size, dtype=out.dtype, **more
        ):
            pass
        expected = np.zeros(numel, np.uint32)
        expected[mask], expected[~mask] = values, signs * np.uint32(1 << 31)
        assert np.array_equal(out, expected)


@settings(max_examples=60)
@given(st.data())
def test_both_ways_agree_on_anything(data):
    """Bytes that mostly are none of an encoding: the same bits, or the same error."""
    encoding = data.draw(st.sampled_from(ENCODINGS))
    numel = data.draw(st.integers(0, 700))
    kept = data.draw(st.integers(0, numel))
    dice = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    mask = np.zeros(numel, bool)
    mask[dice.permutation(numel)[:kept]] = True
    parts = encoding.encode(mask)
    for part in parts.values():
        for _ in range(data.draw(st.integers(0, 2)) if part.size else 0):
            part[dice.integers(part.size)] = dice.integers(np.iinfo(part.dtype).max, endpoint=True)
    dtype = np.dtype(f"u{data.draw(st.sampled_from([1, 2, 4, 8]))}")
    values = dice.integers(0, np.iinfo(dtype).max, kept, dtype, endpoint=True)
    signs = dice.integers(0, 255, -(-(numel - kept) // 8), np.uint8, endpoint=True)
    found, before = [], encodings.library
    try:
        for name in OPENED:
            encodings.library = lambda name=name: OPENED[name]
            try:
                found.append(spread(encoding, parts, values, numel, kept, signs=Entries(signs)).tobytes())
            except EncodingError as error:
                found.append(str(error))
    finally:
        encodings.library = before
    assert len(set(found)) == 1


def test_an_object_of_before_there_were_any_is_left_alone(monkeypatch):
    monkeypatch.setattr(encodings, "library", lambda: object())
    assert spread(BITMASK, {"bitmask": np.array([9], np.uint8)}, np.array([7, 5], np.uint8), 4, 2).tolist() == [
        7, 0, 0, 5,
    ]  # fmt: skip


# ---- what no mask encodes to -------------------------------------------------------------------------------------


def refused(encoding, parts, numel, kept, match):
    with pytest.raises(EncodingError, match=match):
        spread_mask(encoding, parts, numel, kept)


@pytest.mark.usefixtures("compiled")
def test_a_bitmask_of_other_counts():
    refused(BITMASK, {"bitmask": np.array([7], np.uint8)}, 8, 2, "more than 2 entries")
    refused(BITMASK, {"bitmask": np.array([7], np.uint8)}, 8, 4, "3 entries, not 4")


@pytest.mark.usefixtures("compiled")
def test_bits_after_the_end():
    refused(BITMASK, {"bitmask": np.array([16], np.uint8)}, 4, 1, "after the last entry")
    with pytest.raises(EncodingError, match="after the last entry"):
        unpack_bits(np.array([8], np.uint8), 3)


@pytest.mark.parametrize("columns", [[3, 2], [2, 2]])
@pytest.mark.usefixtures("compiled")
def test_columns_that_do_not_ascend(columns):
    parts = {"counts": np.array([2], np.uint16), "columns": np.array(columns, np.uint8)}
    refused(CSR8, parts, 9, 2, "do not ascend")


@pytest.mark.parametrize("encoding", [CSR8, CSR16])
@pytest.mark.usefixtures("compiled")
def test_columns_out_of_range(encoding):
    (counts, _), (columns, _) = encoding.parts(5, 1).values()
    refused(encoding, {"counts": np.array([1], counts), "columns": np.array([5], columns)}, 5, 1, "out of the tensor")
    second = 2**encoding.bits
    parts = {"counts": np.array([0, 1], counts), "columns": np.array([1], columns)}
    refused(encoding, parts, second + 1, 1, "out of the tensor")


@pytest.mark.usefixtures("compiled")
def test_counts_that_are_not_those_of_the_columns():
    parts = {"counts": np.array([3], np.uint16), "columns": np.array([0, 1], np.uint8)}
    refused(CSR8, parts, 9, 2, "counts make more entries than there are columns")
    parts["counts"][0] = 1
    refused(CSR8, parts, 9, 2, "those of 1 entries, not 2")
    refused(CSR8, parts, 300, 2, "a part has only 1 entries")
