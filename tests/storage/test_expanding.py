"""Compressed checkpoints undone: directories and files come back byte for byte."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from secateur import sparsify
from secateur.checkpoints import CheckpointError, open_checkpoint, verify_checkpoint
from secateur.storage import expand_checkpoint, load_compressed, save_compressed
from secateur.storage.compressed_files import header_of
from support.stored import same, sparse, tree


@pytest.mark.parametrize("zstd", [False, True])
def test_a_directory_comes_back_byte_for_byte(tmp_path, sharded, zstd):
    done = save_compressed(sharded, tmp_path / "small", zstd=zstd)
    names = set(tree(tmp_path / "small"))
    assert names == {
        "model-00001-of-00002.compressed.safetensors", "model-00002-of-00002.compressed.safetensors",
        "model.compressed.safetensors.index.json", "config.json", "1_Pooling/config.json",
    }  # fmt: skip
    weights = [path for path in (tmp_path / "small").iterdir() if path.suffix == ".safetensors"]
    assert done.stored == sum(path.stat().st_size for path in weights)
    assert done.dense == sum(path.stat().st_size for path in sharded.glob("*.safetensors"))
    loaded, dense = load_compressed(tmp_path / "small"), open_checkpoint(sharded)
    assert all(same(loaded[name], dense[name]) for name in dense)
    back = expand_checkpoint(tmp_path / "small", tmp_path / "again")
    assert tree(tmp_path / "again") == tree(sharded)
    assert (back.dense, back.stored) == (done.dense, done.stored)
    assert sorted(map(repr, back.tensors)) == sorted(map(repr, done.tensors))


def test_a_compressed_directory_is_verified_once_it_is_expanded(tmp_path, sharded):
    sparsify(sharded, 0.5, out=tmp_path / "pruned")
    save_compressed(tmp_path / "pruned", tmp_path / "small")
    with pytest.raises(CheckpointError, match=r"small: compressed, .* secateur expand"):
        verify_checkpoint(tmp_path / "small")
    expand_checkpoint(tmp_path / "small", tmp_path / "again")
    assert verify_checkpoint(tmp_path / "again").ok


def test_masks_of_a_directory_are_kept(tmp_path, sharded):
    mask = open_checkpoint(sharded)["layers.0.weight"] != 0
    save_compressed(sharded, tmp_path / "small", masks={"layers.0.weight": mask})
    assert torch.equal(load_compressed(tmp_path / "small").masks["layers.0.weight"], mask)


def test_a_single_file_and_several_without_an_index_come_back(tmp_path):
    source = tmp_path / "dense"
    source.mkdir()
    save_file({"a": sparse(50, 50)}, source / "first.safetensors")
    save_file({"b": torch.randn(5)}, source / "second.safetensors")
    save_compressed(source, tmp_path / "small")
    expand_checkpoint(tmp_path / "small", tmp_path / "again")
    assert tree(tmp_path / "again") == tree(source)
    save_compressed(source / "first.safetensors", tmp_path / "one.safetensors")
    expand_checkpoint(tmp_path / "one.safetensors", tmp_path / "one-again.safetensors")
    assert (tmp_path / "one-again.safetensors").read_bytes() == (source / "first.safetensors").read_bytes()


def test_other_checkpoints_in_the_directory_are_files_like_any(tmp_path, sharded):
    source = tmp_path / "variants"
    source.mkdir()
    for name in ("model.safetensors", "model.fp16.safetensors"):
        save_file({"weight": sparse(50, 50)}, source / name)
    for number, folder in enumerate((source, sharded)):
        if folder is sharded:
            (folder / "other.safetensors.index.json").write_text("{}")
        save_compressed(folder, tmp_path / f"small{number}")
        assert set(load_compressed(tmp_path / f"small{number}")) == set(open_checkpoint(folder))
        expand_checkpoint(tmp_path / f"small{number}", tmp_path / f"again{number}")
        assert tree(tmp_path / f"again{number}") == tree(folder)
        with pytest.raises(CheckpointError, match="compressed already"):
            save_compressed(tmp_path / f"small{number}", tmp_path / "twice")


def test_a_header_of_another_writer_comes_back(tmp_path):
    fields = b'"dtype":"U8","data_offsets":[4000,4002]},"a":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}'
    header = b'{ "b" : {"shape":[2],' + fields + b"   "
    content = len(header).to_bytes(8, "little") + header + bytes(4000) + b"xy"
    (tmp_path / "odd.safetensors").write_bytes(content)
    save_compressed(tmp_path / "odd.safetensors", tmp_path / "small")
    expand_checkpoint(tmp_path / "small", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == content


def test_dtypes_that_torch_lacks_come_back(tmp_path):
    fields = {
        "four": {"dtype": "F4", "shape": [200], "data_offsets": [0, 100]},
        "scale": {"dtype": "F8_E8M0", "shape": [5000], "data_offsets": [100, 5100]},
        "future": {"dtype": "Q7", "shape": [3], "data_offsets": [5100, 5109]},
    }
    header = header_of(fields, {})
    (tmp_path / "odd").write_bytes(len(header).to_bytes(8, "little") + header + bytes(5100) + b"123456789")
    for zstd in (False, True):
        done = save_compressed(tmp_path / "odd", tmp_path / "small", zstd=zstd)
        assert [tensor.encoding for tensor in done.tensors] == ["dense", "csr16", "dense"]
        expand_checkpoint(tmp_path / "small", tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "odd").read_bytes()
    with pytest.raises(CheckpointError, match=r"future in .* is Q7, which this torch cannot read"):
        load_compressed(tmp_path / "small")["future"]


def test_transformers_does_not_take_it_for_a_dense_one(tmp_path, sharded):
    from transformers import AutoModel

    save_compressed(sharded, tmp_path / "small")
    with pytest.raises(OSError, match="no file named"):
        AutoModel.from_pretrained(tmp_path / "small")


def test_places_that_cannot_be(tmp_path, sharded):
    save_compressed(sharded, tmp_path / "small")
    for source, out, match in (
        (sharded, tmp_path / "small", "already exists"),
        (sharded, sharded, "is, or lies inside, the input"),
        (sharded, sharded / "inside", "is, or lies inside, the input"),
        (tmp_path / "small", tmp_path / "smaller", "compressed already; expand it first"),
        (sharded / "model.safetensors.index.json", tmp_path / "file", "an index; give its directory"),
        (sharded / "model-00001-of-00002.safetensors", tmp_path, "a directory; name the file"),
        (tmp_path / "nothing", tmp_path / "file", "no such file"),
    ):
        with pytest.raises(CheckpointError, match=match):
            save_compressed(source, out)
    for source, out, match in (
        (sharded, tmp_path / "again", "is not compressed; there is nothing to expand"),
        (tmp_path / "small", tmp_path / "small", "is, or lies inside, the input"),
        (tmp_path / "small", sharded, "already exists"),
        (tmp_path / "small/model-00001-of-00002.compressed.safetensors", tmp_path, "a directory; name the file"),
        (tmp_path / "small/model.compressed.safetensors.index.json", tmp_path / "file", "an index; give its directory"),
    ):
        with pytest.raises(CheckpointError, match=match):
            expand_checkpoint(source, out)
    with pytest.raises(CheckpointError, match="a directory; name the file"):
        save_compressed(nn.Linear(2, 2), tmp_path)
    (sharded / "model-00001-of-00002.compressed.safetensors").touch()
    with pytest.raises(CheckpointError, match="is in the way of the compressed"):
        save_compressed(sharded, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "small"]


@pytest.mark.parametrize("what", ["compress", "expand"])
def test_a_full_disk_leaves_nothing(tmp_path, sharded, monkeypatch, what):
    save_compressed(sharded, tmp_path / "small")
    save_compressed(sharded / "model-00001-of-00002.safetensors", tmp_path / "file")
    before = tree(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)  # some file systems say it only then
    work = save_compressed if what == "compress" else expand_checkpoint
    one = "dense/model-00001-of-00002.safetensors" if what == "compress" else "file"
    for source, out in (("dense" if what == "compress" else "small", "out"), (one, "file"), (one, "new")):
        with pytest.raises(OSError, match=f"No space left on device: '.*/{out}'"):
            work(tmp_path / source, tmp_path / out)
    assert tree(tmp_path) == before


def test_an_index_that_is_not_of_these_files(tmp_path, sharded):
    save_compressed(sharded, tmp_path / "small")
    index = tmp_path / "small/model.compressed.safetensors.index.json"
    parsed = json.loads(index.read_text())
    parsed["secateur"] = parsed["secateur"].replace("norm.weight", "norm.bias")
    index.write_text(json.dumps(parsed))
    with pytest.raises(CheckpointError, match="the index that it keeps is not one of these files"):
        expand_checkpoint(tmp_path / "small", tmp_path / "again")
    del parsed["secateur"]
    index.write_text(json.dumps(parsed))
    expand_checkpoint(tmp_path / "small", tmp_path / "again")
    assert set(open_checkpoint(tmp_path / "again")) == set(open_checkpoint(sharded))
