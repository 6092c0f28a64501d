"""Reading what is right, refusing what is not, and writing all or nothing."""

import json
import os
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from secateur.checkpoints import (
    CheckpointError,
    copy_tree,
    inspect_checkpoint,
    new_directory,
    open_checkpoint,
    read_header,
    write_tensor,
)
from secateur.support import printable

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


def write_index(folder, weight_map, name="model.safetensors.index.json", **more):
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map, **more}))
    return folder / name


# ---- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", DTYPES)
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


def test_a_checkpoint_is_a_lazy_mapping(tmp_path, monkeypatch):
    save_file({"a": torch.ones(2), "b": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)

    def forbidden(*_):
        raise AssertionError("read a tensor")

    with monkeypatch.context() as patch:
        patch.setattr(type(checkpoint), "raw", forbidden)
        assert len(checkpoint) == 2
        assert "a" in checkpoint
        assert "c" not in checkpoint
        assert checkpoint == checkpoint
        assert checkpoint != open_checkpoint(tmp_path)
        assert hash(checkpoint)
        assert checkpoint.nbytes == 44
        assert "2 tensors in 1 files" in repr(checkpoint)
    with pytest.raises(KeyError):
        checkpoint["c"]
    assert {name: tensor.sum().item() for name, tensor in checkpoint.items()} == {"a": 2.0, "b": 0.0}


def test_trailing_spaces_and_no_tensors_are_allowed(tmp_path):
    assert read_header(write_raw(tmp_path / "x", {}, pad=5)) == ({}, {})
    assert list(read_header(write_raw(tmp_path / "x", {"w": entry()}, bytes(8), pad=9))[0]) == ["w"]


def test_shapes_with_zeros_and_many_dimensions(tmp_path):
    header = {"a": entry(shape=(0, 2**61), offsets=(0, 0)), "b": entry(shape=[1] * 64, offsets=(0, 4))}
    checkpoint = open_checkpoint(write_raw(tmp_path / "x.safetensors", header, bytes(4)))
    assert checkpoint["a"].shape == (0, 2**61)
    assert checkpoint["b"].dim() == 64


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


def test_good_header_is_accepted(tmp_path):
    assert list(read_header(write_raw(tmp_path / "x", GOOD, bytes(12)))[0]) == ["w", "v"]


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


def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait for ever
    for path in (tmp_path, tmp_path / "model.safetensors", "/dev/zero"):
        with pytest.raises(CheckpointError, match=r"not a regular file"):
            open_checkpoint(path)


def test_a_file_that_shrinks_while_read(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(100)}, path)
    checkpoint = open_checkpoint(path)
    os.truncate(path, 200)
    with pytest.raises(CheckpointError, match="became shorter"):
        checkpoint["w"]


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


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.one_of(
        st.binary(max_size=60), st.text(max_size=60).map(lambda text: json.dumps({"weight_map": {"w": text}}).encode())
    )
)
def test_fuzzed_indexes_open_or_raise_our_error(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


# ---- finding -----------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "model-00002-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write_index(tmp_path, shards)
    return tmp_path


def test_sharded_directory_index_and_shard(sharded):
    assert list(open_checkpoint(sharded)) == ["a", "b"]
    assert list(open_checkpoint(sharded / "model.safetensors.index.json")) == ["a", "b"]
    assert list(open_checkpoint(sharded / "model-00002-of-00002.safetensors")) == ["b"]


def test_several_files_without_an_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert list(open_checkpoint(str(sharded))) == ["a", "b"]


def test_model_safetensors_comes_first_as_in_transformers(sharded):
    save_file({"c": torch.ones(1)}, sharded / "model.safetensors")
    assert list(open_checkpoint(sharded)) == ["c"]


def test_other_index_names(sharded):
    (sharded / "model.safetensors.index.json").rename(sharded / "diffusion.safetensors.index.json")
    assert open_checkpoint(sharded).index.name == "diffusion.safetensors.index.json"
    write_index(sharded, {"a": "model-00001-of-00002.safetensors"}, name="other.safetensors.index.json")
    with pytest.raises(CheckpointError, match="several indexes"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "shard",
    ["../../etc/passwd", "/etc/passwd", "..", "a/../../b", "..\\x", "C:\\x", "", ".", "a\0b", 3, None, "x" * 300],
)
def test_an_index_cannot_lead_out_of_its_directory(sharded, shard):
    write_index(sharded, {"a": shard})
    with pytest.raises(CheckpointError, match=r"leads out|no valid file name"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "model-00003-of-00002.safetensors"}, "model-00003-of-00002.safetensors is named here and is not"),
        ({"b": "model-00001-of-00002.safetensors"}, "b should be in model-00001-of-00002.safetensors and is not"),
        ({"zz": "model-00001-of-00002.safetensors"}, "zz should be in"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_wrong_indexes(sharded, weight_map, message):
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(sharded)


def test_names_that_are_there_twice(sharded):
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, sharded / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"b is there twice, in model-00001-of-00002\S* and model-00002"):
        open_checkpoint(sharded)
    (sharded / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'
    )
    with pytest.raises(CheckpointError, match="a is there twice"):
        open_checkpoint(sharded)


def test_nothing_to_open_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file here\.$"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: convert to safetensors first; .* never unpickles"):
        open_checkpoint(tmp_path)
    (tmp_path / "unet").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "unet/diffusion_pytorch_model.safetensors")
    with pytest.raises(CheckpointError, match=r"There are some in .*unet"):
        open_checkpoint(tmp_path)


def test_config(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).config == {}
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "eps": NaN}')
    assert open_checkpoint(tmp_path / "model.safetensors").config["model_type"] == "gpt2"
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "model.safetensors").config == {}


def test_broken_link_is_one_error(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(OSError, match="No such file"):
        open_checkpoint(tmp_path)


# ---- writing -----------------------------------------------------------------------------------------------------


def test_write_tensor_changes_only_its_bytes(tmp_path):
    path = tmp_path / "x.safetensors"
    before = {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.ones(3)}
    save_file(before, path, metadata={"k": "v"})
    old = path.read_bytes()
    found = read_header(path)[0]["b"]
    write_tensor(path, found, torch.tensor([[1.0, 0.0], [2.0, 3.0]], dtype=torch.bfloat16))
    new = path.read_bytes()
    assert (new[: found.start], new[found.stop :]) == (old[: found.start], old[found.stop :])
    assert load_file(path)["b"].tolist() == [[1.0, 0.0], [2.0, 3.0]]


def test_copy_tree(tmp_path):
    source, target = tmp_path / "snapshot", tmp_path / "copy"
    (source / "a/b").mkdir(parents=True)
    target.mkdir()
    (tmp_path / "blob").write_bytes(b"blob")
    (tmp_path / "blob").chmod(0o444)
    (source / "model.safetensors").symlink_to("../blob")  # as in Hugging Face's cache
    (source / "a/b/c.txt").write_bytes(b"\0\xff")
    (source / ".hidden").write_text("kept")
    (source / ".git").mkdir()
    (source / ".git/config").write_text("left out")
    copied = {str(path) for path in copy_tree(source, target)}
    assert copied == {"model.safetensors", "a/b/c.txt", ".hidden"}
    assert not (target / "model.safetensors").is_symlink()
    (target / "model.safetensors").write_bytes(b"may be written")
    assert (tmp_path / "blob").read_bytes() == b"blob"
    assert (target / "a/b/c.txt").read_bytes() == b"\0\xff"
    assert not (target / ".git").exists()


def test_copy_tree_refuses_what_it_cannot_copy(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "loop").symlink_to(source)
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match="link to a directory"):
        list(copy_tree(source, tmp_path / "a"))
    (source / "loop").unlink()
    os.mkfifo(source / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        list(copy_tree(source, tmp_path / "a"))


def test_new_directory_is_all_or_nothing(tmp_path):
    with new_directory(tmp_path / "out") as temporary:
        assert temporary.name.startswith("out.unfinished-")
        (temporary / "x").write_text("x")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out/x").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt(), SystemExit(143)])
def test_new_directory_leaves_nothing_after_a_failure(tmp_path, failure):
    with pytest.raises(type(failure)) as caught, new_directory(tmp_path / "out") as temporary:
        (temporary / "deep").mkdir()
        raise failure
    assert list(tmp_path.iterdir()) == []
    assert getattr(caught.value, "filename", str(tmp_path / "out")) == str(tmp_path / "out")


def test_new_directory_overwrites_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("empty", "file", "dangling"):
        with pytest.raises(CheckpointError, match="already exists"), new_directory(tmp_path / name):
            pass
    with pytest.raises(CheckpointError, match="no such directory"), new_directory(tmp_path / "no/out"):
        pass
    with pytest.raises(CheckpointError, match="in the meantime"), new_directory(tmp_path / "raced"):
        (tmp_path / "raced").mkdir()
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "file", "dangling", "raced"}


def test_printable_shows_control_characters_and_cuts():
    assert printable("a\x1b[31m\n\u202e") == "a\\x1b[31m\\n\\u202e"
    assert len(printable("x" * 1000)) == 203
