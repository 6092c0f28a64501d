"""What stays of a tensor is what index_select leaves, whatever the dtype and the piece, and bytes tell."""

import errno
import io
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from secateur.checkpoints import (
    Compared,
    nbytes_of_cut,
    open_checkpoint,
    pieces_of_cut,
    sha256_of,
    shape_of_cut,
    slicing,
    write_sliced,
)
from secateur.checkpoints import slicing as direct
from secateur.checkpoints import write_bytes as write


@settings(max_examples=25)
@given(st.data(), st.integers(1, 40))
def test_pieces_are_those_of_index_select(tmp_path_factory, data, piece):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float64, torch.int8]))
    folder = tmp_path_factory.mktemp("slices")
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    save_file({"it": tensor}, folder / "model.safetensors")
    cuts = {}
    for at, size in enumerate(shape):
        if data.draw(st.booleans()):
            cuts[at] = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))))
            tensor = tensor.index_select(at, torch.from_numpy(cuts[at]))
    checkpoint = open_checkpoint(folder)
    entry = checkpoint.entries["it"]
    assert shape_of_cut(entry, cuts) == tuple(tensor.shape)
    assert nbytes_of_cut(entry, tuple(tensor.shape)) == tensor.nbytes
    expected = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slicing, "PIECE", piece)
        file = io.BytesIO()
        for each in pieces_of_cut(checkpoint, entry, cuts):
            write(file, each)
        assert file.getvalue() == expected
        save_file({"it": tensor.contiguous()}, folder / "model.safetensors")
        again = open_checkpoint(folder)
        for wrong in (False, True):
            compared = Compared(again, "it")
            changed = bytes([expected[0] ^ 1]) + expected[1:] if wrong else expected
            write(compared, torch.frombuffer(bytearray(changed), dtype=torch.uint8))
            assert compared.all_of_it is not wrong
        shorter = Compared(again, "it")
        write(shorter, torch.frombuffer(bytearray(expected), dtype=torch.uint8)[:-1])
        assert shorter.same
        assert not shorter.all_of_it


def test_files_are_those_of_the_source_with_what_stays(tmp_path):
    (tmp_path / "in/part").mkdir(parents=True)
    tensors = {"one": torch.arange(12.0).reshape(4, 3), "two": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "in/model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path / "in")
    written = {"one": ("one", {0: np.array([1, 3])}), "two": ("two", {})}
    digests = write_sliced(checkpoint, tmp_path / "out", written, nbytes=0, parameters=0)
    made = open_checkpoint(tmp_path / "out")
    assert digests == {name: sha256_of(made, name) for name in ("one", "two")}
    assert list(made) == list(checkpoint)
    assert made.metadata[made.files[0]] == {"format": "pt"}
    assert torch.equal(made["one"], tensors["one"][[1, 3]])
    assert torch.equal(made["two"], tensors["two"])


# What is written past the cache has the bytes of an ordinary file, and fails as one does.


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(direct, "_LEAST", 0)
    monkeypatch.setattr(direct, "_BUFFER", 4096)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 9000), max_size=8), st.integers(0, 8))
def test_the_bytes_are_those_that_were_written(tmp_path_factory, sizes, synced):
    path = tmp_path_factory.mktemp("files") / "file"
    pieces = [os.urandom(size) for size in sizes]
    path.write_bytes(b"what was there before" * 3000)
    with direct.new_file(path, 0) as file:
        for number, piece in enumerate(pieces):
            assert file.write(memoryview(piece)) == len(piece)
            if number == synced:
                file.flush()
                os.fsync(file.fileno())
                assert path.read_bytes() == b"".join(pieces[: number + 1])
    assert path.read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("wrong", ["all", "second", "short"])
def test_what_a_disk_does_not_take_so_is_written_as_it_is(tmp_path, monkeypatch, wrong):
    """Blocks of another size; or a part of a block is written, and the rest begins where none does."""
    write, seen, ordinary = os.write, [], []
    be_ordinary = direct._Direct._be_ordinary

    def some(descriptor, view):
        seen.append(len(view))
        if not ordinary and (wrong == "all" or (wrong == "second" and len(seen) == 2)):
            raise OSError(errno.EINVAL, "not so")
        return write(descriptor, view[:1000] if wrong == "short" and len(seen) == 1 else view)

    def became(file):
        ordinary.append(True)
        be_ordinary(file)
        return len(ordinary) == 1

    monkeypatch.setattr(direct.os, "write", some)
    monkeypatch.setattr(direct._Direct, "_be_ordinary", became)
    data = os.urandom(20_000)
    with direct.new_file(tmp_path / "file", 0) as file:
        file.write(memoryview(data))
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == data


def test_where_there_is_no_such_file_it_is_an_ordinary_one(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(errno.EINVAL, "not here")

    with monkeypatch.context() as patched:
        patched.setattr(direct.os, "open", refuses)
        with direct.new_file(tmp_path / "file", 0) as file:
            file.write(memoryview(b"it"))
            file.flush()
    assert (tmp_path / "file").read_bytes() == b"it"
    monkeypatch.setattr(direct, "_LEAST", 1 << 30)
    with direct.new_file(tmp_path / "small", 100) as file:
        assert not isinstance(file, direct._Direct)


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"), direct.new_file(tmp_path / "file", 0) as file:
        if not isinstance(file, direct._Direct):
            full()
        monkeypatch.setattr(direct.os, "write", full)
        for _ in range(9):
            file.write(memoryview(bytes(4096)))


def test_what_fails_while_it_is_written_is_raised_and_the_file_is_closed(tmp_path):
    with pytest.raises(RuntimeError, match="something else"), direct.new_file(tmp_path / "file", 0) as file:
        file.write(memoryview(bytes(10_000)))
        raise RuntimeError("something else")
    with pytest.raises(OSError):
        os.fstat(file.fileno())


@pytest.mark.parametrize("ordinary", [True, False])
def test_a_file_that_may_not_grow_is_named(tmp_path, monkeypatch, ordinary):
    """As `ulimit -f`, a quota or a full disk has it: the error of the system itself names no file."""
    import resource

    if ordinary:
        monkeypatch.setattr(direct, "_DIRECT", 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught, direct.new_file(tmp_path / "file", 0) as file:
            for _ in range(4):
                file.write(memoryview(bytes(4096)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "file")
