"""Directories appear whole or not at all, and only a tensor's own bytes are written."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from secateur.checkpoints import (
    CheckpointError,
    copy_others,
    copy_tree,
    new_directory,
    open_checkpoint,
    other_weights,
    read_header,
    write_tensor,
)


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


def test_others_are_all_but_the_weights_in_whatever_form(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "0/.git").mkdir(parents=True)
    target.mkdir()
    save_file({"a": torch.ones(2)}, source / "0/model.safetensors", metadata={"format": "pt"})
    for name in ("0/pytorch_model.bin", "0/training_args.bin", "0/config.json", "README.md", "other.onnx"):
        (source / name).write_text("{}")
    checkpoint = open_checkpoint(source / "0")
    assert [path.name for path in other_weights(checkpoint)] == ["pytorch_model.bin"]
    gone = other_weights(checkpoint, source)
    assert [path.as_posix() for path in gone] == ["0/pytorch_model.bin", "other.onnx"]
    copy_others(checkpoint, target, gone, root=source)
    found = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
    assert found == ["0/config.json", "0/training_args.bin", "README.md"]
