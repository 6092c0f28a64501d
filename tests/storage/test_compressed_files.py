"""The smallest encoding is taken, every bit comes back, and a file that lies is refused."""

import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from benchmarks.storage import fuzz
from secateur import make_masks
from secateur.checkpoints import CheckpointError, TensorEntry, dtype_word, open_checkpoint
from secateur.storage import FREE, JUSTIFIED, load_compressed, save_compressed
from secateur.storage.compressed_files import encode, header_of, stored_tensors
from secateur.storage.encodings import BITMASK, CSR8, CSR16
from secateur.support import to_int8
from support.stored import DTYPES, bits, drawn, entry_of, rewritten, same, sparse


@given(st.sampled_from(DTYPES), st.floats(0, 1), st.integers(0, 300), st.integers(0, 99), st.booleans(), st.booleans())
def test_whatever_is_encoded_decodes(dtype, density, numel, seed, zstd, masked):
    tensor = drawn(dtype, (numel,), density, seed)
    nonzero = bits(tensor).reshape(numel, tensor.element_size()).ne(0).any(1)
    mask = (nonzero | (torch.arange(numel) % 3 == 0)).numpy() if masked else None
    encoded = encode(entry_of(tensor), bits(tensor).numpy(), mask, scratch=io.BytesIO() if zstd else None)
    named = {f"weight::{key}" if key else "weight": part for key, part in encoded.parts.items()}
    data = {name: b"".join(piece.tobytes() for piece in part.pieces()) for name, part in named.items()}
    entries = {
        name: TensorEntry(name, part.word, part.shape, Path("file"), 0, part.nbytes) for name, part in named.items()
    }
    assert all(len(data[name]) == part.nbytes for name, part in named.items())
    fields = {"dtype": dtype_word(dtype), "shape": [numel], "data_offsets": [0, tensor.nbytes]}
    header = header_of({"weight": fields}, {})
    about = {"kind": "compressed", "version": 1, "tensors": {"weight": encoded.record}}
    metadata = {"secateur": json.dumps(about), "secateur.header": header.decode()}
    stored = stored_tensors(Path("file"), entries, metadata)[0]["weight"]

    def read(entry, start, out):
        out[:] = np.frombuffer(data[entry.name], np.uint8)[start : start + out.size]

    assert b"".join(piece.tobytes() for piece in stored.pieces(read)) == bits(tensor).numpy().tobytes()
    assert np.array_equal(stored.bits(read).view(np.uint8), bits(tensor).numpy())
    if masked:
        assert np.array_equal(stored.mask(read), mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("density", [0.0005, 0.01, 0.1, 0.2, 0.5, 0.9, 0.999])
def test_no_other_encoding_is_smaller(dtype, density):
    tensor = drawn(dtype, (300, 256), density)
    raw = bits(tensor).numpy()
    width = tensor.element_size()
    mask = raw.reshape(-1, width).any(1)
    kept, values = int(mask.sum()), 1 if dtype == torch.bool else int(mask.sum())
    sizes = [raw.size] + [
        sum(dtype.itemsize * count for dtype, count in encoding.parts(mask.size, kept).values()) + values * width
        for encoding in (BITMASK, CSR8, CSR16)
    ]
    chosen = encode(entry_of(tensor), raw)
    assert chosen.nbytes <= min(size for size in sizes if raw.size <= FREE + JUSTIFIED * size) + 128 * 2
    assert encode(entry_of(tensor), raw, scratch=io.BytesIO()).nbytes <= chosen.nbytes + 128 * 2


def test_negative_zeros_cost_a_bit(tmp_path):
    weight = torch.randn(100, 100)
    pruned = weight * make_masks({"weight": weight}, 0.9)["weight"]  # as torch's own pruning leaves them
    assert int(torch.signbit(pruned[pruned == 0]).sum()) > 4000
    done = save_compressed({"weight": pruned}, tmp_path / "file")
    assert done.tensors[0].stored < 4 * 1000 + 10_000 // 8 + 10_000 // 8
    assert same(load_compressed(tmp_path / "file")["weight"], pruned)


def test_what_would_promise_too_much_is_stored_at_length(tmp_path):
    zeros = torch.zeros(1 << 20, dtype=torch.float64)
    for zstd in (False, True):
        done = save_compressed({"zeros": zeros}, tmp_path / "file", zstd=zstd)
        assert zeros.nbytes <= FREE + JUSTIFIED * done.tensors[0].stored
        assert same(load_compressed(tmp_path / "file")["zeros"], zeros)


def test_tensors_too_small_to_gain_stay_as_they_are(tmp_path):
    assert save_compressed({"bias": torch.zeros(32)}, tmp_path / "file").tensors[0].encoding == "dense"


def test_zstd_makes_it_smaller(tmp_path):
    weight = sparse(256, 256)
    sizes = [
        save_compressed({"weight": weight}, tmp_path / "file", zstd=zstd).tensors[0].stored for zstd in (False, True)
    ]
    assert sizes[1] < 0.85 * sizes[0]


def set_record(**words):
    return lambda about: about["tensors"]["weight"].update(words)


def rounded(rows, columns, density, seed=0, negative_zeros=0.0):
    """A float32 weight of whole numbers times scales, and -0.0 in the place of some zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight = weight * (torch.rand(rows, columns, generator=generator) < density)
    numbers, scales = to_int8(weight)
    found = numbers * scales[:, None]
    return torch.where((found == 0) & (torch.rand(rows, columns, generator=generator) < negative_zeros), -0.0, found)


@settings(max_examples=25)
@given(data=st.data())
def test_rounded_weights_come_back_bit_for_bit(data):
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    weight = rounded(
        number(1, 40), number(1, 300), data.draw(st.floats(0, 1)), number(0, 99), data.draw(st.floats(0, 1))
    )
    shaped = weight.view(len(weight), -1, 1) if data.draw(st.booleans()) else weight
    mask = {"weight": weight.view_as(shaped) != 0} if data.draw(st.booleans()) else None
    with tempfile.TemporaryDirectory() as folder:
        save_compressed({"weight": shaped}, Path(folder, "file"), masks=mask, zstd=data.draw(st.booleans()))
        loaded = load_compressed(Path(folder, "file"))
        assert same(loaded["weight"], shaped)
        if mask:
            assert torch.equal(loaded.masks["weight"], mask["weight"])


def test_rounded_weights_take_a_byte_a_number(tmp_path):
    weight = rounded(256, 512, 0.2, negative_zeros=0.5)
    plain = torch.randn(256, 512) * (weight != 0)
    done = save_compressed({"weight": weight, "plain": plain}, tmp_path / "file")
    stored = {tensor.name: tensor for tensor in done.tensors}
    assert stored["weight"].encoding == "bitmask+int8"
    assert stored["plain"].encoding == "bitmask"
    kept = int(torch.count_nonzero(weight))
    assert stored["weight"].stored == 256 * 512 // 8 + kept + -(-(256 * 512 - kept) // 8) + 4 * 256


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (set_record(int8=False), "is not of dtype F32"),
        (set_record(encoding="dense"), "contradicts itself"),
        (set_record(zstd=["scales"]), "weight::scales is not of dtype"),
    ],
)
def test_records_of_rounded_weights_that_lie(tmp_path, change, match):
    path = tmp_path / "file"
    save_compressed({"weight": rounded(64, 128, 0.1)}, path)
    rewritten(path, change)
    with pytest.raises(CheckpointError, match=match):
        load_compressed(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (set_record(encoding="csr32"), "no encoding 'csr32'"),
        (set_record(encoding=3), "damaged: tensors.weight.encoding must be a string, not 3"),
        (set_record(kept=-1), "weight.kept must be a whole number of at least 0 and at most 4096, not -1"),
        (set_record(kept=10**12), "weight.kept must be a whole number of .* at most 4096, not 10{12}"),
        (set_record(kept=True), "weight.kept must be a whole number .* not true"),
        (set_record(mask=1), "weight.mask must be true or false, not 1"),
        (set_record(colour="red"), "damaged: tensors.weight.colour is not known"),
        (set_record(kept=409), "weight::columns is not of dtype U8 and shape"),
        (set_record(encoding="bitmask"), "has no weight::bitmask"),
        (set_record(encoding="dense"), "its record contradicts itself"),
        (set_record(encoding="2:4"), "no encoding '2:4'"),
        (set_record(signs=True), "has no weight::signs"),
        (set_record(constant=True), "weight::values is not of dtype F32 and shape"),
        (set_record(zstd=["values"]), "weight::values is not of dtype"),
        (set_record(int8=1), "weight.int8 must be true or false, not 1"),
        (set_record(int8=True), "lacks weight::scales|weight::values is not of dtype I8"),
        (set_record(zstd=["signs"]), "its record contradicts itself"),
        (set_record(zstd=["columns", "columns"]), "its record contradicts itself"),
        (set_record(zstd="columns"), 'weight.zstd must be a list, not "columns"'),
        (lambda about: about["tensors"].pop("weight") and None, "has no weight."),
        (lambda about: about["tensors"].update(other={"encoding": "dense"}), "other belongs to no tensor"),
        (lambda about: about["tensors"].update(weight=None), "tensors.weight must be an object, not null"),
        (lambda about: {**about, "version": 2}, "version 2 of the format; this Secateur reads version 1. Use a newer"),
        (lambda about: {**about, "tensors": []}, "tensors must be an object, not a list of 0"),
        (lambda about: {**about, "tied": []}, "tied must be an object, not a list of 0"),
        (lambda about: {**about, "tied": {"bias": "weight"}}, "bias is tied to nothing, or is there twice"),
        (lambda about: {**about, "tied": {"x": "y"}}, "x is tied to nothing"),
    ],
)
def test_records_that_lie(compressed, change, match):
    with pytest.raises(CheckpointError, match=match):
        load_compressed(rewritten(compressed, change))


@pytest.mark.parametrize(
    ("part", "change", "match"),
    [
        ("wide::bitmask", lambda part: part ^ 1, "its places are those of"),
        ("weight::columns", lambda part: part.flip(0), "do not ascend"),
        ("weight::counts", lambda part: part + 1, "its counts make more entries than there are columns"),
    ],
)
def test_places_that_lie(compressed, part, change, match):
    tensors = open_checkpoint(compressed)
    changed = change(tensors[part].int()).to(tensors[part].dtype)
    with pytest.raises(CheckpointError, match=f"damaged: {part.split(':')[0]}: .*{match}"):
        dict(load_compressed(rewritten(compressed, parts={part: changed})))


def test_a_part_that_nobody_needs(compressed):
    with pytest.raises(CheckpointError, match="weight::more belongs to no tensor"):
        load_compressed(rewritten(compressed, parts={"weight::more": torch.zeros(1)}))


def test_billions_of_entries_are_refused_before_any_is_made(tmp_path):
    count = 2**40
    header = header_of({"weight": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}, {})
    about = {
        "kind": "compressed",
        "version": 1,
        "tensors": {"weight": {"encoding": "csr16", "kept": 0, "zstd": ["counts"]}},
    }
    import zstandard

    bomb = np.frombuffer(zstandard.compress(bytes(2**20)), np.uint8)
    parts = {"weight::counts": torch.from_numpy(bomb.copy()), "weight::columns": torch.zeros(0, dtype=torch.uint16)}
    parts["weight::values"] = torch.zeros(0)
    metadata = {"secateur": json.dumps(about), "secateur.header": header.decode()}
    save_file(parts, tmp_path / "file", metadata=metadata)
    with pytest.raises(CheckpointError, match=f"bytes promise a tensor of {4 * count}; refused as too many"):
        load_compressed(tmp_path / "file")


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (lambda zstandard, size: zstandard.compress(bytes(size + 1)), "does not unpack to"),
        (
            lambda zstandard, size: zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size)),
            "does not unpack",
        ),
        (lambda zstandard, size: zstandard.compress(bytes(size))[:-1], r"does not unpack \("),
        (lambda zstandard, size: zstandard.compress(bytes(size)) + b"more", r"does not unpack \("),
        (lambda zstandard, size: bytes(40), r"does not unpack \("),
    ],
)
def test_a_frame_that_unpacks_to_something_else(tmp_path, frame, match):
    import zstandard

    save_compressed({"weight": sparse(64, 64)}, tmp_path / "file.safetensors", zstd=True)
    checkpoint = load_compressed(tmp_path / "file.safetensors")
    changed = torch.frombuffer(bytearray(frame(zstandard, checkpoint.tensors["weight"].kept * 4)), dtype=torch.uint8)
    path = rewritten(tmp_path / "file.safetensors", parts={"weight::values": changed})
    with pytest.raises(CheckpointError, match=match):
        load_compressed(path)["weight"]


def test_damaged_files_are_read_or_refused():
    assert sum(fuzz.fuzz(1500, seed=3).values()) == 1500
