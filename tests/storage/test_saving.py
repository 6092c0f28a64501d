"""Compressed checkpoints: every bit comes back, whatever is saved, and what cannot be is refused."""

import builtins
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from secateur.checkpoints import CheckpointError, open_checkpoint
from secateur.cli.commands import app
from secateur.storage import load_compressed, save_compressed
from secateur.storage.loading import COMPRESSED, WEIGHTS, bytes_of, check_outside, header_of_file, open_either, renamed
from support.stored import DTYPES, drawn, same, sparse, tree


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype, zstd):
    shapes = [(), (0,), (3, 0, 2), (1,), (1000,), (40, 64), (2, 300, 3)]
    tensors = {
        f"{shape} {density} {negative}": drawn(dtype, shape, density, negative_zeros=negative)
        for shape in shapes
        for density in (0.0, 0.02, 0.5, 1.0)
        for negative in ((0.0, 0.01, 0.5) if dtype.is_floating_point and "fnuz" not in str(dtype) else (0.0,))
    }
    save_compressed(tensors, tmp_path / "file", zstd=zstd)
    loaded = load_compressed(tmp_path / "file")
    assert set(loaded) == set(tensors)
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())
    assert not loaded.masks


def test_what_was_written_prints_as_a_table(tmp_path):
    done = save_compressed({"zeros": torch.zeros(1000), "dense": torch.rand(250) + 1}, tmp_path / "file")
    header, *rows, _, total = str(done).splitlines()
    assert header.split() == ["Encoding", "Tensors", "Dense", "Stored", "Ratio"]
    assert [row.split()[:4] for row in rows] == [["csr16", "1", "4", "kB"], ["dense", "1", "1", "kB"]]
    assert total.startswith(f"Wrote {tmp_path / 'file'}: ")
    assert ", with headers (" in total


def test_layouts_in_memory_do_not_matter(tmp_path):
    base = sparse(40, 60)
    tensors = {
        "transposed": base.T,
        "strided": torch.stack([base, base + 1], -1)[..., 0],
        "channels_last": base.reshape(4, 10, 6, 10).contiguous(memory_format=torch.channels_last),
        "expanded": base[:1].expand(30, 60),
        "conjugate": torch.complex(base, base).conj(),
        "grad": nn.Parameter(base),
    }
    save_compressed(tensors, tmp_path / "file")
    loaded = load_compressed(tmp_path / "file")
    assert all(same(loaded[name], tensor.resolve_conj()) for name, tensor in tensors.items())


def test_parts_are_tensors_for_any_reader_of_safetensors(tmp_path):
    tensors = {
        "a": sparse(50, 51),
        "odd": torch.arange(3, dtype=torch.uint8),
        "b": sparse(64, 64, sparsity=0.3).double(),
    }
    save_compressed(tensors, tmp_path / "file.safetensors")
    with safe_open(tmp_path / "file.safetensors", "pt") as file:
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert same(parts["odd"], tensors["odd"])
    assert same(parts["b::values"], tensors["b"][tensors["b"] != 0])
    for entry in open_checkpoint(tmp_path / "file.safetensors").entries.values():
        assert entry.start % torch.empty(0, dtype=entry.torch_dtype).element_size() == 0


@pytest.mark.parametrize("zstd", [False, True])
def test_kept_zeros_stay_kept(tmp_path, zstd):
    weight, mask = torch.randn(50, 50), torch.rand(50, 50) < 0.3
    weight = weight.masked_fill(~mask, 0)
    weight[mask.nonzero()[0].unbind()] = 0
    everything = torch.ones(7, dtype=torch.bool)
    given = {"weight": mask, "bias": everything, "zero": torch.zeros(300, 300, dtype=torch.bool)}
    tensors = {"weight": weight, "bias": torch.zeros(7), "zero": torch.zeros(300, 300), "other": torch.zeros(900)}
    save_compressed(tensors, tmp_path / "file", masks=given, zstd=zstd)
    loaded = load_compressed(tmp_path / "file")
    assert set(loaded.masks) == set(given)
    assert all(torch.equal(loaded.masks[name], given[name]) for name in given)
    assert all(same(loaded[name], tensors[name]) for name in tensors)
    with pytest.raises(KeyError):
        loaded.masks["other"]


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"weigth": torch.ones(3, 4, dtype=torch.bool)}, KeyError, "no tensor weigth"),
        ({"weight": torch.ones(4, 3, dtype=torch.bool)}, ValueError, r"shape \(4, 3\) for a weight of shape \(3, 4\)"),
        ({"weight": torch.ones(3, 4)}, TypeError, "a bool tensor, not torch.float32"),
        (
            {"weight": torch.arange(12).reshape(3, 4) != 6},
            ValueError,
            r"weight \(1, 2\) is not zero, but its mask removes",
        ),
    ],
)
def test_masks_that_do_not_fit(tmp_path, given, error, match):
    with pytest.raises(error, match=match):
        save_compressed({"weight": torch.ones(3, 4)}, tmp_path / "file", masks=given)
    assert not list(tmp_path.iterdir())


class WithState(nn.Module):
    def get_extra_state(self):
        return {"steps": 3}


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        ({"weight": [1.0]}, TypeError, "weight is of type list, and only tensors"),
        (WithState(), TypeError, "_extra_state is of type dict"),
        ({"weight": torch.zeros(2, device="meta")}, ValueError, "weight is on the meta device"),
        (nn.LazyLinear(3), ValueError, "weight is not initialized yet; run the model once"),
        ({"weight": torch.eye(3).to_sparse()}, TypeError, "weight is a tensor of torch.float32, torch.sparse_coo"),
        ({"weight": torch.zeros(2, dtype=torch.complex128)}, TypeError, "weight is a tensor of torch.complex128"),
        ({"a": torch.eye(99), "a::values": torch.zeros(1)}, CheckpointError, "a::values: two tensors need this name"),
    ],
)
def test_what_cannot_be_stored(tmp_path, source, error, match):
    (tmp_path / "file").write_text("before")
    with pytest.raises(error, match=match):
        save_compressed(source, tmp_path / "file")
    assert tree(tmp_path) == {"file": b"before"}


def test_nothing_at_all_can_be_stored(tmp_path):
    save_compressed({}, tmp_path / "file")
    assert dict(load_compressed(tmp_path / "file")) == {}
    load_compressed(tmp_path / "file", nn.ReLU())


def test_without_zstandard_the_error_says_what_to_install(tmp_path, monkeypatch):
    save_compressed({"weight": sparse(50, 50)}, tmp_path / "zipped", zstd=True)
    imports = builtins.__import__

    def lacking(name, *arguments, **more):
        if name == "zstandard":
            raise ModuleNotFoundError(name)
        return imports(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", lacking)
    save_compressed({"weight": sparse(50, 50)}, tmp_path / "plain")
    for work in (
        lambda: save_compressed({"weight": sparse(50, 50)}, tmp_path / "file", zstd=True),
        lambda: load_compressed(tmp_path / "zipped")["weight"],
    ):
        with pytest.raises(ImportError, match=r"pip install 'secateur\[zstd\]'"):
            work()
    assert not (tmp_path / "file").exists()


def test_the_commands(tmp_path, sharded):
    done = CliRunner().invoke(
        app,
        ["compress", str(sharded), "--out", str(tmp_path / "small"), "--zstd"],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0].split() == ["Encoding", "Tensors", "Dense", "Stored", "Ratio"]
    assert "bitmask+zstd" in done.stdout
    assert f"Wrote {tmp_path / 'small'}:" in done.stdout
    out = str(tmp_path / "other")
    for arguments, line in ((["expand", str(sharded), "--out", out], "is not compressed; there is nothing to expand"),):
        wrong = CliRunner().invoke(app, arguments)
        assert wrong.exit_code == 2
        assert line in wrong.stderr
        assert len(wrong.stderr.splitlines()) == 1
    arguments = ["expand", str(tmp_path / "small"), "--out", str(tmp_path / "again")]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert f"Wrote {tmp_path / 'again'}:" in done.stdout
    assert tree(tmp_path / "again") == tree(sharded)


# What saving, loading and expanding share: names that go both ways, and headers as they lie there.


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
