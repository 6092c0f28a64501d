"""Laws of the file of a group's levels: read as it was written, and one error for whatever else it is."""

import json
import struct

import pytest
import torch

from secateur.search.levels import Kept, Stored, file_of, read_entry, rising, write_entry

LEFT = {"params": 2.0, "macs": 2.0, "bytes": 2.0}


def entry():
    """A group of four units, of which two stay; the second member has a position without a unit."""
    tensors = {
        "units.0": torch.arange(4, dtype=torch.int32),
        "units.1": torch.tensor([0, 0, 1, 1, 2, 3, -1], dtype=torch.int32),
        "kept.1.0": torch.tensor([1, 0, 0, 1], dtype=torch.uint8),
        "value.1.down.weight": torch.randn(3, 7),
    }
    level = Kept(0.5, 2, 0.25, None, LEFT, ("down.weight",))
    return Stored(
        "digest",
        "up.weight",
        "width",
        4,
        ("up.weight",),
        (4,),
        (("up.weight", 0, 0), ("down.weight", 1, 0)),
        (level,),
        tensors,
    )


def test_it_is_read_as_it_was_written(tmp_path):
    write_entry(tmp_path, entry())
    read = read_entry(tmp_path, "up.weight", "digest")
    assert (read.name, read.kind, read.of, read.levels, read.members) == (
        "up.weight", "width", 4, entry().levels, entry().members,
    )  # fmt: skip
    gone = {(name, dim): places.tolist() for name, dim, places in read.gone(1)}
    assert gone["up.weight", 0] == [False, True, True, False]
    assert gone["down.weight", 1] == [False, False, True, True, True, False, False]


def test_a_name_may_be_longer_than_that_of_a_file(tmp_path):
    assert len(file_of(tmp_path, "x" * 5000).name) < 64


def test_of_other_levels_or_another_group(tmp_path):
    path = write_entry(tmp_path, entry())
    with pytest.raises(ValueError, match="of other levels"):
        read_entry(tmp_path, "up.weight", "another")
    path.rename(file_of(tmp_path, "down.weight"))
    with pytest.raises(ValueError, match="of other levels"):
        read_entry(tmp_path, "down.weight", "digest")
    with pytest.raises(FileNotFoundError):
        read_entry(tmp_path, "up.weight", "digest")


def rewritten(path, change):
    """The file with another record."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    said = json.loads(header["__metadata__"]["secateur"])
    change(said, header)
    if "__metadata__" in header:
        header["__metadata__"]["secateur"] = json.dumps(said)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


@pytest.mark.parametrize(
    "change",
    [
        lambda said, _: said.update(kind="another"),
        lambda said, _: said.update(more=1),
        lambda said, _: said.update(of="four"),
        lambda said, _: said.update(of=1),
        lambda said, _: said.update(sizes=[9]),
        lambda said, _: said.update(sizes=[2]),
        lambda said, _: said.update(sizes=[4, 4]),
        lambda said, _: said.update(members=[["up.weight", 0, 7], ["down.weight", 1, 0]]),
        lambda said, _: said.update(members=[["up.weight", -1, 0], ["down.weight", 1, 0]]),
        lambda said, _: said.update(members=[["up.weight", 0, 0]]),
        lambda said, _: said["levels"][0].update(values=["other"]),
        lambda said, _: said["levels"][0].update(error=-1.0),
        lambda said, _: said["levels"][0].update(share=2.0),
        lambda said, _: said["levels"][0].update(left={}),
        lambda said, _: said.update(levels=[]),
        lambda _, header: header.pop("__metadata__"),
        lambda _, header: header["kept.1.0"].update(dtype="I8"),
        lambda _, header: header["units.0"].update(dtype="F32"),
        lambda _, header: header["units.0"].update(shape=[2, 2]),
    ],
)
def test_a_hostile_file_gives_one_error(tmp_path, change):
    path = write_entry(tmp_path, entry())
    rewritten(path, change)
    with pytest.raises(ValueError, match="safetensors: "):
        read_entry(tmp_path, "up.weight", "digest")


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 64, b"{}"])
def test_a_damaged_file_gives_one_error(tmp_path, content):
    file_of(tmp_path, "up.weight").write_bytes(content)
    with pytest.raises(ValueError, match="damaged: no safetensors file"):
        read_entry(tmp_path, "up.weight", "digest")


def test_cut_short(tmp_path):
    path = write_entry(tmp_path, entry())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged: no safetensors file"):
        read_entry(tmp_path, "up.weight", "digest")


def test_errors_rise():
    assert rising([]) == []
    assert rising([0.5, 0.25, 0.75]) == [0.5, 0.5, 0.75]
