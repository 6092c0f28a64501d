"""Finding the files of a checkpoint, and reading it one tensor at a time."""

import json
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from secateur.checkpoints import CheckpointError, open_checkpoint


def write_index(folder, weight_map, name="model.safetensors.index.json", **more):
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map, **more}))
    return folder / name


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


def test_a_file_that_shrinks_while_read(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(100)}, path)
    checkpoint = open_checkpoint(path)
    os.truncate(path, 200)
    with pytest.raises(CheckpointError, match="became shorter"):
        checkpoint["w"]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.one_of(
        st.binary(max_size=60), st.text(max_size=60).map(lambda text: json.dumps({"weight_map": {"w": text}}).encode())
    )
)
def test_fuzzed_indexes_open_or_raise_our_error(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "model-00002-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write_index(tmp_path, shards)
    return tmp_path


def test_several_files_without_an_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert list(open_checkpoint(str(sharded))) == ["a", "b"]


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
