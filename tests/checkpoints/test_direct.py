"""What is written past the cache has the bytes of an ordinary file, and fails as one does."""

import errno
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.checkpoints import slicing as direct


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
