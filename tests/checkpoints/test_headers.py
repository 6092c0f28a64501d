"""Headers: what is right is read as the library reads it, what is not is refused."""

import json
import os
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from secateur.checkpoints import CheckpointError, inspect_checkpoint, open_checkpoint, read_header
from support.stored import storable

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32,
    "U32": torch.uint32, "F32": torch.float32, "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip


def write_raw(path, header, data=b"", pad=0):
    """A safetensors file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.parametrize("word", [word for word, dtype in DTYPES.items() if storable(dtype)])
def test_every_dtype_and_shape_reads_as_the_library_does(tmp_path, word):
    dtype = DTYPES[word]
    width = torch.empty(0, dtype=dtype).element_size()

    def tensor(*shape):
        count = width * torch.Size(shape).numel()
        bits = torch.randint(0, 2 if word == "BOOL" else 256, (count,), dtype=torch.uint8)
        return bits.view(dtype).reshape(shape)

    tensors = {"matrix": tensor(3, 5), "scalar": tensor(), "empty": tensor(0, 4), "vector": tensor(7)}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "é": "ü"})
    checkpoint = open_checkpoint(path)
    assert checkpoint.metadata[path] == {"format": "pt", "é": "ü"}
    assert set(checkpoint) == set(tensors)
    for name, expected in tensors.items():
        found = checkpoint[name]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert checkpoint.entries[name].dtype == word
        assert found.reshape(-1).view(torch.uint8).tolist() == expected.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("F4", (4,), 2), ("F6_E2M3", (4,), 3), ("F8_E8M0", (2, 2), 4), ("F2_NEW", (8,), 2)]
)
def test_dtypes_that_torch_lacks_are_opaque(tmp_path, dtype, shape, size):
    path = write_raw(tmp_path / "x.safetensors", {"w": entry(dtype, shape, (0, size))}, bytes(size))
    checkpoint = open_checkpoint(path)
    assert checkpoint.entries["w"].torch_dtype is None
    assert checkpoint.raw("w").numel() == size
    with pytest.raises(CheckpointError, match=f"w in .* is {dtype}"):
        checkpoint["w"]


GOOD = {"w": entry(), "v": entry(shape=(1,), offsets=(8, 12))}


BAD_HEADERS = [
    (b"", "too few|does not begin"),
    (b"[]", "does not begin"),
    (b" {}", "does not begin"),
    (b"{", "not valid JSON"),
    (b"\xff{}", "does not begin"),
    (b'{"\xff": 1}', "not valid JSON"),
    (b'{"\\ud800": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "not valid JSON"),
    (b'{"a":' + b"[" * 100_000, "not valid JSON"),
    (b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', "not valid JSON|no valid shape"),
    (b'{"w": 1, "w": 2}', "w is there twice"),
    (b'{"w": {"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "dtype is there twice"),
    ({"w": 3}, "needs dtype"),
    ({"w": {"dtype": "F32"}}, "needs dtype"),
    ({"w": entry(dtype=3)}, "no valid dtype"),
    ({"w": entry(dtype="")}, "no valid dtype"),
    ({"w": entry(dtype="32")}, "no valid dtype"),
    ({"w": entry(dtype="\x1b[2J")}, "no valid dtype"),
    ({"w": entry(shape=[-2])}, "no valid shape"),
    ({"w": entry(shape=[True])}, "no valid shape"),
    ({"w": entry(shape=[2.0])}, "no valid shape"),
    ({"w": entry(shape=[1] * 65)}, "no valid shape"),
    ({"w": entry(shape=[2**40, 2**40])}, "too large"),
    ({"w": entry(shape=[0, 2**40, 2**40], offsets=(0, 0))}, "too large"),
    ({"w": entry(offsets=(0, 4))}, "does not have 4 bytes"),
    ({"w": entry(offsets=(8, 0))}, "no valid data_offsets"),
    ({"w": entry(offsets=(0, 8, 9))}, "no valid data_offsets"),
    ({"w": entry(offsets=(-8, 0))}, "no valid data_offsets"),
    ({"w": entry("F4", (3,), (0, 2))}, "does not have 2 bytes"),
    ({"w": entry(offsets=(4, 12))}, "leaves a hole"),
    ({"w": entry(), "v": entry(offsets=(4, 12))}, "overlaps"),
    ({"w": entry(), "v": entry(offsets=(0, 8))}, "overlaps"),
    ({"w": entry(offsets=(0, 8))}, "4 bytes after the last tensor"),
    ({**GOOD, "u": entry(offsets=(12, 20))}, "truncated"),
    ({"__metadata__": {"a": 1}, **GOOD}, "__metadata__ must map"),
    ({"__metadata__": [], **GOOD}, "__metadata__ must map"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "message"), BAD_HEADERS)
def test_damaged_headers_are_refused(tmp_path, header, message):
    path = write_raw(tmp_path / "x.safetensors", header, bytes(12))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("cut", [0, 3, 8, 20, -1])
def test_truncated_files_are_refused(tmp_path, cut):
    whole = save({"w": torch.ones(4, 4)})
    (tmp_path / "x.safetensors").write_bytes(whole[:cut])
    with pytest.raises(CheckpointError, match=r"truncated|too few"):
        open_checkpoint(tmp_path / "x.safetensors")


def test_a_huge_promised_header_is_not_read(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(CheckpointError, match="promise a header"):
        open_checkpoint(tmp_path / "x.safetensors")
    with open(tmp_path / "x.safetensors", "wb") as file:  # sparse: takes no room
        file.write(struct.pack("<Q", 100_000_001) + b"{}")
        file.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="promise a header"):
        open_checkpoint(tmp_path / "x.safetensors")


def test_what_torch_saved_is_told_from_damage(tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"torch\.save wrote: torch\.load it"):
        read_header(tmp_path / "x.safetensors")


def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait for ever
    for path in (tmp_path, tmp_path / "model.safetensors", "/dev/zero"):
        with pytest.raises(CheckpointError, match=r"not a regular file"):
            open_checkpoint(path)


SEEDS = [
    save({"fc.weight": torch.eye(4), "b": torch.ones(3, dtype=torch.bfloat16)}, metadata={"format": "pt"}),
    save({"x.experts.w": torch.zeros(2, 4, 4), "s": torch.tensor(1), "e": torch.zeros(0, 3)}),
]


@st.composite
def mutations(draw):
    data = bytearray(draw(st.sampled_from(SEEDS)))
    end = 8 + int.from_bytes(data[:8], "little")
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(end, len(data) - 1)))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            data[at] = draw(st.integers(0, 255))
        elif kind == 1:
            data[at:at] = draw(st.sampled_from([b"0", b"9", b"-", b'"', b"{", b"[", b"1e9", b"null", b"\\u0000", b","]))
        elif kind == 2:
            del data[at : at + draw(st.integers(1, 5))]
        elif kind == 3:
            del data[at:]
        else:
            data[:8] = draw(st.binary(min_size=8, max_size=8))
        if len(data) < 2:
            break
        if draw(st.booleans()) and kind in (1, 2):  # keep the length right, so that the JSON itself is reached
            grown = len(data) - len(SEEDS[0]) if data[8:20] == SEEDS[0][8:20] else len(data) - len(SEEDS[1])
            length = max(0, end - 8 + grown)
            data[:8] = struct.pack("<Q", length)
    return bytes(data)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=mutations())
def test_fuzzed_files_open_or_raise_our_error(tmp_path, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:
        return
    for name, found in checkpoint.entries.items():
        assert found.stop <= len(data)
        if found.torch_dtype is not None:
            assert checkpoint[name].shape == found.shape
    inspect_checkpoint(path)
