"""What saving, loading and expanding share: names that go both ways, and headers as they lie there."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from secateur.checkpoints import CheckpointError
from secateur.storage.layout import COMPRESSED, WEIGHTS, bytes_of, check_outside, header_of_file, open_either, renamed


@pytest.mark.parametrize("name", ["model.safetensors", "a-00001-of-2.safetensors", "model.safetensors.index.json"])
def test_names_go_both_ways(name):
    there = renamed(Path("folder") / name, WEIGHTS, COMPRESSED)
    assert there.name == name.replace(".safetensors", ".compressed.safetensors")
    assert renamed(there, COMPRESSED, WEIGHTS) == Path("folder") / name
    assert renamed(Path("config.json"), WEIGHTS, COMPRESSED) == Path("config.json")


def test_of_two_checkpoints_the_compressed_one_is_opened(tmp_path):
    save_file({"dense": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(open_either(tmp_path)) == ["dense"]
    save_file({"compressed": torch.ones(1)}, tmp_path / "model.compressed.safetensors")
    assert list(open_either(tmp_path)) == ["compressed"]
    text = (tmp_path / "model.safetensors").read_bytes()
    assert text[8:].startswith(header_of_file(tmp_path / "model.safetensors"))


def test_a_result_lies_outside_its_source(tmp_path):
    check_outside(tmp_path / "in", tmp_path / "out")
    for out in (tmp_path / "in", tmp_path / "in" / "out", tmp_path / "x" / ".." / "in" / "out"):
        with pytest.raises(CheckpointError, match="is, or lies inside, the input"):
            check_outside(tmp_path / "in", out)


def test_the_bytes_of_a_tensor_are_those_of_its_values_in_order():
    tensor = torch.arange(4.0)
    assert bytes_of(tensor[::2]).tobytes() == torch.tensor([0.0, 2.0]).numpy().tobytes()
