"""Compressed checkpoints: every bit comes back, the smallest encoding is taken, and what is damaged is refused."""

import base64
import builtins
import io
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from benchmarks.storage import fuzz
from secateur import attach, make_masks, prune
from secateur.checkpoints import CheckpointError, TensorEntry, dtype_word, open_checkpoint
from secateur.cli import storage as storage_commands
from secateur.patterns import NM
from secateur.pipeline import masks
from secateur.storage import FREE, JUSTIFIED, CompressedCheckpoint, expand_checkpoint, load_compressed, save_compressed
from secateur.storage.compressed_files import encode, header_of, stored_tensors
from secateur.storage.compressed_tensors_layout import without_sparsity
from secateur.storage.encodings import BITMASK, CSR8, CSR16

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(first, second):
    return (first.dtype, first.shape) == (second.dtype, second.shape) and torch.equal(bits(first), bits(second))


def drawn(dtype, shape, density, seed=0, negative_zeros=0.0):
    """Any bits at all, NaN among them, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count, width), dtype=torch.uint8, generator=generator)
    raw[torch.rand(count, generator=generator) >= density] = 0
    if negative_zeros:
        raw[(raw == 0).all(1) & (torch.rand(count, generator=generator) < negative_zeros), -1] = 128
    return raw.reshape(-1).view(dtype).reshape(shape)


def sparse(*shape, sparsity=0.9, seed=0):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return weight.where(make_masks({"weight": weight}, sparsity)["weight"], 0.0)  # a product would leave -0.0


def entry_of(tensor, name="weight"):
    return TensorEntry(name, dtype_word(tensor.dtype), tuple(tensor.shape), Path("file"), 0, tensor.nbytes)


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- every bit comes back ----------------------------------------------------------------------------------------


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


@given(st.sampled_from(DTYPES), st.floats(0, 1), st.integers(0, 300), st.integers(0, 99), st.booleans(), st.booleans())
def test_whatever_is_encoded_decodes(dtype, density, numel, seed, zstd, masked):
    tensor = drawn(dtype, (numel,), density, seed)
    nonzero = bits(tensor).reshape(numel, tensor.element_size()).ne(0).any(1)
    mask = (nonzero | (torch.arange(numel) % 3 == 0)).numpy() if masked else None
    encoded = encode(entry_of(tensor), bits(tensor).numpy(), mask, scratch=io.BytesIO() if zstd else None)
    named = {f"weight::{key}" if key else "weight": part for key, part in encoded.parts.items()}
    data = {name: b"".join(piece.tobytes() for piece in part.pieces()) for name, part in named.items()}
    entries = {
        name: TensorEntry(name, part.word, part.shape, Path("file"), 0, part.nbytes) for name, part in named.items()
    }
    assert all(len(data[name]) == part.nbytes for name, part in named.items())
    fields = {"dtype": dtype_word(dtype), "shape": [numel], "data_offsets": [0, tensor.nbytes]}
    header = header_of({"weight": fields}, {})
    about = {"kind": "compressed", "version": 1, "tensors": {"weight": encoded.record}}
    metadata = {"secateur": json.dumps(about), "secateur.header": header.decode()}
    stored = stored_tensors(Path("file"), entries, metadata)[0]["weight"]

    def read(entry, start, out):
        out[:] = np.frombuffer(data[entry.name], np.uint8)[start : start + out.size]

    assert b"".join(piece.tobytes() for piece in stored.pieces(read)) == bits(tensor).numpy().tobytes()
    assert np.array_equal(stored.bits(read).view(np.uint8), bits(tensor).numpy())
    if masked:
        assert np.array_equal(stored.mask(read), mask)


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


# ---- the smallest ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("density", [0.0005, 0.01, 0.1, 0.2, 0.5, 0.9, 0.999])
def test_no_other_encoding_is_smaller(dtype, density):
    tensor = drawn(dtype, (300, 256), density)
    raw = bits(tensor).numpy()
    width = tensor.element_size()
    mask = raw.reshape(-1, width).any(1)
    kept, values = int(mask.sum()), 1 if dtype == torch.bool else int(mask.sum())
    sizes = [raw.size] + [
        sum(dtype.itemsize * count for dtype, count in encoding.parts(mask.size, kept).values()) + values * width
        for encoding in (BITMASK, CSR8, CSR16)
    ]
    chosen = encode(entry_of(tensor), raw)
    assert chosen.nbytes <= min(size for size in sizes if raw.size <= FREE + JUSTIFIED * size) + 128 * 2
    assert encode(entry_of(tensor), raw, scratch=io.BytesIO()).nbytes <= chosen.nbytes + 128 * 2


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (1, 2), (4, 8), (8, 16)])
def test_patterns_are_found_and_are_smaller_than_a_bitmask(tmp_path, n, m):
    weight = torch.randn(64, 128)
    weight = weight.where(make_masks({"weight": weight}, pattern=NM(n, m))["weight"], 0.0)
    done = save_compressed({"weight": weight}, tmp_path / "file")
    assert done.tensors[0].encoding == f"{n}:{m}"
    assert done.tensors[0].stored < weight.nbytes * n // m + weight.numel() // 8
    assert same(load_compressed(tmp_path / "file")["weight"], weight)


def test_a_group_that_lacks_some_is_filled_up(tmp_path):
    weight = torch.randn(64, 128)
    weight = weight.where(make_masks({"weight": weight}, pattern=NM(2, 4))["weight"], 0.0)
    weight[5, weight[5].nonzero()[3]] = 0
    weight[7, weight[7].nonzero()[8]] = -0.0
    done = save_compressed({"weight": weight}, tmp_path / "file")
    assert done.tensors[0].encoding == "2:4"
    assert same(load_compressed(tmp_path / "file")["weight"], weight)


def test_one_value_is_stored_once(tmp_path):
    mask = torch.rand(100, 100) < 0.5
    done = save_compressed({"bool": mask, "ones": torch.ones(100, 100)}, tmp_path / "file")
    assert [tensor.stored for tensor in done.tensors] == [1250 + 4, 1250 + 1]  # the widest first
    assert same(load_compressed(tmp_path / "file")["bool"], mask)


def test_negative_zeros_cost_a_bit(tmp_path):
    weight = torch.randn(100, 100)
    pruned = weight * make_masks({"weight": weight}, 0.9)["weight"]  # as torch's own pruning leaves them
    assert int(torch.signbit(pruned[pruned == 0]).sum()) > 4000
    done = save_compressed({"weight": pruned}, tmp_path / "file")
    assert done.tensors[0].stored < 4 * 1000 + 10_000 // 8 + 10_000 // 8
    assert same(load_compressed(tmp_path / "file")["weight"], pruned)


def test_what_would_promise_too_much_is_stored_at_length(tmp_path):
    zeros = torch.zeros(1 << 20, dtype=torch.float64)
    for zstd in (False, True):
        done = save_compressed({"zeros": zeros}, tmp_path / "file", zstd=zstd)
        assert zeros.nbytes <= FREE + JUSTIFIED * done.tensors[0].stored
        assert same(load_compressed(tmp_path / "file")["zeros"], zeros)


def test_tensors_too_small_to_gain_stay_as_they_are(tmp_path):
    assert save_compressed({"bias": torch.zeros(32)}, tmp_path / "file").tensors[0].encoding == "dense"


def test_zstd_makes_it_smaller(tmp_path):
    weight = sparse(256, 256)
    sizes = [
        save_compressed({"weight": weight}, tmp_path / "file", zstd=zstd).tensors[0].stored for zstd in (False, True)
    ]
    assert sizes[1] < 0.85 * sizes[0]


# ---- masks -------------------------------------------------------------------------------------------------------


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


def test_masks_of_a_file_are_read_one_by_one(tmp_path):
    weight = sparse(30, 40)
    masks.save({"weight": weight != 0}, tmp_path / "masks.safetensors")
    save_compressed({"weight": weight}, tmp_path / "file", masks=open_checkpoint(tmp_path / "masks.safetensors"))
    assert torch.equal(load_compressed(tmp_path / "file").masks["weight"], weight != 0)


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


# ---- modules -----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def test_a_module_comes_back_and_tied_tensors_are_stored_once(tmp_path):
    model = Tied()
    with torch.no_grad():
        model.embed.weight.mul_(torch.rand(40, 16) < 0.1)
    model.norm.running_mean.fill_(3)
    done = save_compressed(model, tmp_path / "file")
    assert sorted(tensor.name for tensor in done.tensors) == sorted(model.state_dict().keys() - {"head.weight"})
    loaded = load_compressed(tmp_path / "file")
    assert loaded.tied == {"head.weight": "embed.weight"}
    assert set(loaded) == set(model.state_dict())
    assert all(same(loaded[name], tensor) for name, tensor in model.state_dict().items())
    fresh = Tied()
    before = fresh.embed.weight
    assert load_compressed(tmp_path / "file", fresh) is fresh
    assert fresh.head.weight is fresh.embed.weight is before
    assert all(same(tensor, model.state_dict()[name]) for name, tensor in fresh.state_dict().items())
    fresh.load_state_dict(dict(loaded))


def test_a_model_on_meta_becomes_real_and_stays_tied(tmp_path):
    model = Tied()
    save_compressed(model, tmp_path / "file")
    with torch.device("meta"):
        fresh = Tied()
    fresh.norm.weight.requires_grad_(False)
    load_compressed(tmp_path / "file", fresh)
    assert fresh.head.weight is fresh.embed.weight
    assert isinstance(fresh.head.weight, nn.Parameter)
    assert not fresh.norm.weight.requires_grad
    assert all(same(tensor, model.state_dict()[name]) for name, tensor in fresh.state_dict().items())


def test_a_file_without_ties_fits_a_tied_model_only_if_equal(tmp_path):
    weight = torch.randn(40, 16)
    state = {**Tied().state_dict(), "embed.weight": weight, "head.weight": weight.clone()}
    save_compressed(state, tmp_path / "file")
    assert torch.equal(load_compressed(tmp_path / "file", Tied()).head.weight, weight)
    save_compressed({**state, "head.weight": weight + 1}, tmp_path / "file")
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"ties embed.weight and head.weight, but in .* they differ"):
        load_compressed(tmp_path / "file", model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_dtypes_become_the_models(tmp_path):
    save_compressed(nn.Linear(3, 3), tmp_path / "file")
    assert load_compressed(tmp_path / "file", nn.Linear(3, 3).bfloat16()).weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (nn.Linear(4, 3), r"weight has shape \(3, 3\), in the model \(3, 4\)"),
        (nn.Linear(3, 3, bias=False), "holds what the model does not have: bias"),
        (nn.Bilinear(3, 3, 3), r"weight has shape"),
        (nn.Sequential(nn.Linear(3, 3)), "it lacks 0.weight, 0.bias"),
    ],
)
def test_models_that_do_not_fit(tmp_path, model, match):
    save_compressed(nn.Linear(3, 3), tmp_path / "file")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=match):
        load_compressed(tmp_path / "file", model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def masked_model(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 2))
    attach(model, {"0.weight": torch.rand(30, 30) < 0.1})
    return model


def test_attached_masks_are_stored_with_the_weight_that_they_make(tmp_path):
    model = masked_model(0)
    with torch.no_grad():
        model[0].weight_orig[~model[0].weight_mask.bool()] = float("nan")  # what is hidden stays out
    done = save_compressed(model, tmp_path / "file")
    assert done.ratio < 0.5
    loaded = load_compressed(tmp_path / "file")
    assert set(loaded) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    mask = model[0].weight_mask.bool()
    assert torch.equal(loaded.masks["0.weight"], mask)
    assert same(loaded["0.weight"], model[0].weight_orig.detach().masked_fill(~mask, 0))
    fresh = load_compressed(tmp_path / "file", masked_model(1))
    assert torch.equal(fresh[0].weight_mask.bool(), mask)
    plain = load_compressed(tmp_path / "file", nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 2)))
    x = torch.randn(5, 30)
    assert torch.equal(fresh(x), plain(x))
    prune.remove(fresh[0], "weight")
    assert torch.equal(fresh[0].weight, plain[0].weight)


def test_a_state_dict_keeps_what_a_mask_hides(tmp_path):
    model = masked_model(0)
    save_compressed(model.state_dict(), tmp_path / "file")
    fresh = load_compressed(tmp_path / "file", masked_model(1))
    assert all(same(tensor, model.state_dict()[name]) for name, tensor in fresh.state_dict().items())


def test_a_masked_model_needs_a_mask(tmp_path):
    save_compressed(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 2)), tmp_path / "file")
    with pytest.raises(ValueError, match=r"no mask for 0.weight, which the model masks: detach\(model\) first"):
        load_compressed(tmp_path / "file", masked_model(0))


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


# ---- directories -------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path):
    """As transformers writes one."""
    source = tmp_path / "dense"
    (source / "1_Pooling").mkdir(parents=True)
    shards = [
        {"embed.weight": torch.randn(40, 16), "layers.0.weight": sparse(64, 64), "norm.weight": torch.ones(16)},
        {"layers.1.weight": sparse(64, 64, sparsity=0.5).bfloat16(), "steps": torch.tensor(7)},
    ]
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file(shard, source / name, metadata={"format": "pt", "more": 'ä\n"x"'})
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": 1, "total_parameters": 2}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (source / "config.json").write_text('{"model_type": "bert"}')
    (source / "1_Pooling/config.json").write_text("{}")
    return source


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


# ---- the layouts of compressed-tensors 0.14, as that package wrote them ------------------------------------------

BITMASK_FILE = zlib.decompress(base64.b85decode(
    "c$|%qO=`n15QP<W*HeU955<ucA!k$5MW6@hDj1>0GA+fmu>_?ALynfC^eB}R;U=~7GuYM`&HMBoswvsm29zp|)46t9DOhZvsG3qcSU~NdMJUz"
    "}P4%U!qOiu<ZXkExwekDUf&+qm)7{@H&JgyHesUEd<Jkcbrp}4kP|P^;s8fG>Ket&JLU@E+_K+(kW+Qrua}grEzUz~-mod8>e=bnSAYNBx-56"
    "_4ejdSx2q97O-v2n{X*m;@Q%H{TFNG_${Wu1^$m1M1au-ry!g?Fm5F-u}hDn^Y?Q}{)(SPe*SntVc(Z1V0`cLW~|L(eecj&k2Pf90*Oep;YFV"
    ")R)"
))  # fmt: skip
GROUPED_FILE = zlib.decompress(base64.b85decode(
    "c$|B|00GrX@$tE-C5b7CC5iFzN><fMY57IDi6u%_N(CiKwK__r1$xC9i3O=3sg#mR5JSn+%tT2?2`U_Iq+=MXqXae}KP{~|wWJs*XrN<g77Njyo"
    "S$1zlv-Sznu2VGo1qzs877!!7@FxA8$k_8$}GuEEY3zYA=HA9BaDr7j7?%|YZVj}n4tdUfYJ;$3=RxV3@!|=3~mhW3?7*_0OI*g9s"
))  # fmt: skip
DENSE = {
    "fc.weight": torch.tensor([[0, 1.5, 0, 0, 0, 0, 0, 0, -2, 0], [0] * 10, [3] + [0] * 8 + [4]]),
    "fc.bias": torch.tensor([1.0, 2, 3]),
    "norm.weight": torch.tensor([0, 7], dtype=torch.bfloat16),
}


@pytest.fixture
def foreign(tmp_path):
    """A directory as save_pretrained left it, and its tensors by name."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(BITMASK_FILE)
    sparsity = {"format": "sparse-bitmask", "global_sparsity": 0.8, "ignore": []}
    config = {
        "model_type": "x",
        "quantization_config": {"quant_method": "compressed-tensors", "sparsity_config": sparsity},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_bitmasks_of_compressed_tensors_are_read_and_expanded(tmp_path, foreign):
    loaded = load_compressed(foreign)
    assert loaded.layout == "compressed-tensors"
    assert set(loaded) == set(DENSE)
    assert all(same(loaded[name], tensor) for name, tensor in DENSE.items())
    assert not loaded.masks
    done = expand_checkpoint(foreign, tmp_path / "dense")
    dense = load_file(tmp_path / "dense/model.safetensors")
    assert all(same(dense[name], tensor) for name, tensor in DENSE.items())
    assert json.loads((tmp_path / "dense/config.json").read_text()) == {"model_type": "x"}
    assert done.dense == (tmp_path / "dense/model.safetensors").stat().st_size
    with pytest.raises(CheckpointError, match="compressed already"):
        save_compressed(foreign, tmp_path / "other")


def test_two_of_four_of_compressed_tensors_is_read(tmp_path):
    (tmp_path / "file.safetensors").write_bytes(GROUPED_FILE)
    weight = load_compressed(tmp_path / "file.safetensors")["up.weight"]
    assert same(weight, torch.tensor([[1, 0, 0, 2, 0, 3, 4, 0], [0, 0, 5, 6, 7, 8, 0, 0]], dtype=torch.float16))


def test_parts_in_two_shards_and_three_dimensions(tmp_path):
    weight = torch.zeros(2, 3, 5)
    weight[0, 1, 2], weight[1, 2, 4], weight[1, 0, 0] = 1, 2, 3
    shards = {
        "a.safetensors": {
            "conv.weight.compressed": torch.tensor([1.0, 3, 2]),
            "conv.weight.shape": torch.tensor([2, 3, 5]),
        },
        "b.safetensors": {
            "conv.weight.bitmask": torch.tensor([[[0], [4], [0]], [[1], [0], [16]]], dtype=torch.uint8),
            "conv.weight.row_offsets": torch.tensor([[0, 0, 0], [0, 1, 0]]),
            "bias": torch.ones(2),
        },
    }
    (tmp_path / "in").mkdir()
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / "in" / name)
    index = {"weight_map": {part: name for name, tensors in shards.items() for part in tensors}}
    (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps(index))
    expand_checkpoint(tmp_path / "in", tmp_path / "out")
    dense = open_checkpoint(tmp_path / "out")
    assert set(dense) == {"conv.weight", "bias"}
    assert same(dense["conv.weight"], weight)


def test_a_quantization_stays_in_the_config():
    config = {"quantization_config": {"config_groups": {"g": 1}, "sparsity_config": {"format": "sparse-24-bitmask"}}}
    assert without_sparsity(config) == {"quantization_config": {"config_groups": {"g": 1}}}
    assert without_sparsity({"sparsity_config": {"format": "sparse-bitmask"}}) == {}
    assert without_sparsity({"quantization_config": {"sparsity_config": {"format": "dense"}}}) is None


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"fc.shape": torch.tensor([4, 10])}, "parts of fc.weight do not fit each other"),
        ({"fc.shape": torch.tensor([3, -10])}, "do not fit each other"),
        ({"fc.shape": torch.tensor([3.0, 10.0])}, "do not fit each other"),
        ({"fc.shape": torch.tensor([2**40, 2**40])}, "do not fit each other"),
        ({"fc.row_offsets": torch.tensor([0, 2])}, "do not fit each other"),
        ({"fc.compressed": torch.ones(200)}, "do not fit each other"),
        ({"fc.row_offsets": torch.tensor([0, 2, 3])}, "row_offsets are not those of its bitmask"),
        ({"fc.compressed": torch.ones(3)}, "places are those of more than 3 entries"),
        ({"fc.bitmask": torch.tensor([[2, 1], [0, 4], [1, 2]], dtype=torch.uint8)}, "bits after the end of a row"),
        ({"fc.weight": torch.ones(3, 10)}, "fc.weight is there twice"),
    ],
)
def test_damaged_bitmasks_of_compressed_tensors(tmp_path, foreign, changed, match):
    tensors = load_file(foreign / "model.safetensors")
    save_file({**tensors, **changed}, foreign / "model.safetensors")
    with pytest.raises(CheckpointError, match=match):
        dict(load_compressed(foreign))


# ---- damage ------------------------------------------------------------------------------------------------------


def rewritten(path, change=None, parts=None):
    """The file with its records, or its parts, changed."""
    checkpoint = open_checkpoint(path)
    metadata = dict(checkpoint.metadata[path])
    about = json.loads(metadata["secateur"])
    tensors = dict(checkpoint)
    about = change(about) or about if change else about
    save_file({**tensors, **(parts or {})}, path, metadata={**metadata, "secateur": json.dumps(about)})
    return path


@pytest.fixture
def compressed(tmp_path):
    tensors = {"weight": sparse(64, 64), "wide": sparse(64, 64, sparsity=0.5), "bias": torch.ones(5)}
    save_compressed(tensors, tmp_path / "file.safetensors")
    return tmp_path / "file.safetensors"


def set_record(**words):
    return lambda about: about["tensors"]["weight"].update(words)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (set_record(encoding="csr32"), "no encoding 'csr32'"),
        (set_record(encoding=3), "damaged: tensors.weight.encoding must be a string, not 3"),
        (set_record(kept=-1), "weight.kept must be a whole number of at least 0 and at most 4096, not -1"),
        (set_record(kept=10**12), "weight.kept must be a whole number of .* at most 4096, not 10{12}"),
        (set_record(kept=True), "weight.kept must be a whole number .* not true"),
        (set_record(mask=1), "weight.mask must be true or false, not 1"),
        (set_record(colour="red"), "damaged: tensors.weight.colour is not known"),
        (set_record(kept=409), "weight::columns is not of dtype U8 and shape"),
        (set_record(encoding="bitmask"), "lacks weight::bitmask"),
        (set_record(encoding="dense"), "its record contradicts itself"),
        (set_record(encoding="2:4"), "2:4 does not keep 410 of 4096"),
        (set_record(signs=True), "lacks weight::signs"),
        (set_record(constant=True), "weight::values is not of dtype F32 and shape"),
        (set_record(zstd=["values"]), "weight::values is not of dtype"),
        (set_record(zstd=["signs"]), "its record contradicts itself"),
        (set_record(zstd=["columns", "columns"]), "its record contradicts itself"),
        (set_record(zstd="columns"), 'weight.zstd must be a list, not "columns"'),
        (lambda about: about["tensors"].pop("weight") and None, "lacks weight."),
        (lambda about: about["tensors"].update(other={"encoding": "dense"}), "other belongs to no tensor"),
        (lambda about: about["tensors"].update(weight=None), "tensors.weight must be an object, not null"),
        (lambda about: {**about, "version": 2}, "version 2 of the format; this Secateur reads version 1. Use a newer"),
        (lambda about: {**about, "tensors": []}, "tensors must be an object, not a list of 0"),
        (lambda about: {**about, "tied": []}, "tied must be an object, not a list of 0"),
        (lambda about: {**about, "tied": {"bias": "weight"}}, "bias is tied to nothing, or is there twice"),
        (lambda about: {**about, "tied": {"x": "y"}}, "x is tied to nothing"),
    ],
)
def test_records_that_lie(compressed, change, match):
    with pytest.raises(CheckpointError, match=match):
        load_compressed(rewritten(compressed, change))


@pytest.mark.parametrize(
    ("part", "change", "match"),
    [
        ("wide::bitmask", lambda part: part ^ 1, "its places are those of"),
        ("weight::columns", lambda part: part.flip(0), "do not ascend"),
        ("weight::counts", lambda part: part + 1, "its counts make more entries than there are columns"),
    ],
)
def test_places_that_lie(compressed, part, change, match):
    tensors = open_checkpoint(compressed)
    changed = change(tensors[part].int()).to(tensors[part].dtype)
    with pytest.raises(CheckpointError, match=f"damaged: {part.split(':')[0]}: .*{match}"):
        dict(load_compressed(rewritten(compressed, parts={part: changed})))


def test_a_part_that_nobody_needs(compressed):
    with pytest.raises(CheckpointError, match="weight::more belongs to no tensor"):
        load_compressed(rewritten(compressed, parts={"weight::more": torch.zeros(1)}))


def test_bools_that_are_neither(tmp_path):
    save_compressed({"flags": drawn(torch.bool, (3000,), 0.5)}, tmp_path / "file.safetensors")
    path = rewritten(tmp_path / "file.safetensors")
    content = bytearray(path.read_bytes())
    content[open_checkpoint(path).entries["flags::values"].start] = 7
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="flags holds bools that are neither 0 nor 1"):
        load_compressed(path)["flags"]


def test_billions_of_entries_are_refused_before_any_is_made(tmp_path):
    count = 2**40
    header = header_of({"weight": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}, {})
    about = {
        "kind": "compressed",
        "version": 1,
        "tensors": {"weight": {"encoding": "csr16", "kept": 0, "zstd": ["counts"]}},
    }
    import zstandard

    bomb = np.frombuffer(zstandard.compress(bytes(2**20)), np.uint8)
    parts = {"weight::counts": torch.from_numpy(bomb.copy()), "weight::columns": torch.zeros(0, dtype=torch.uint16)}
    parts["weight::values"] = torch.zeros(0)
    metadata = {"secateur": json.dumps(about), "secateur.header": header.decode()}
    save_file(parts, tmp_path / "file", metadata=metadata)
    with pytest.raises(CheckpointError, match=f"bytes promise a tensor of {4 * count}; refused as too many"):
        load_compressed(tmp_path / "file")


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (lambda zstandard, size: zstandard.compress(bytes(size + 1)), "does not unpack to"),
        (
            lambda zstandard, size: zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size)),
            "does not unpack",
        ),
        (lambda zstandard, size: zstandard.compress(bytes(size))[:-1], r"does not unpack \("),
        (lambda zstandard, size: zstandard.compress(bytes(size)) + b"more", r"does not unpack \("),
        (lambda zstandard, size: bytes(40), r"does not unpack \("),
    ],
)
def test_a_frame_that_unpacks_to_something_else(tmp_path, frame, match):
    import zstandard

    save_compressed({"weight": sparse(64, 64)}, tmp_path / "file.safetensors", zstd=True)
    checkpoint = load_compressed(tmp_path / "file.safetensors")
    changed = torch.frombuffer(bytearray(frame(zstandard, checkpoint.tensors["weight"].kept * 4)), dtype=torch.uint8)
    path = rewritten(tmp_path / "file.safetensors", parts={"weight::values": changed})
    with pytest.raises(CheckpointError, match=match):
        load_compressed(path)["weight"]


def test_one_name_in_two_files(tmp_path):
    for name in ("a", "b"):
        save_compressed({"weight": sparse(64, 64), name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="is there twice"):
        load_compressed(tmp_path)


def test_damaged_files_are_read_or_refused():
    assert sum(fuzz.fuzz(1500, seed=3).values()) == 1500


# ---- the mapping and the commands --------------------------------------------------------------------------------


def test_the_mapping_reads_nothing_before_it_is_asked(compressed):
    checkpoint = load_compressed(compressed)
    compressed.write_bytes(compressed.read_bytes()[:-1])  # the last part is cut
    assert "weight" in checkpoint
    assert checkpoint.entries["weight"].shape == (64, 64)
    assert checkpoint.encodings == {"weight": "csr8", "wide": "bitmask", "bias": "dense"}
    assert len(checkpoint) == 3
    assert "3 tensors" in repr(checkpoint)
    assert checkpoint == checkpoint
    assert isinstance(hash(checkpoint), int)
    with pytest.raises(CheckpointError, match="became shorter"):
        dict(checkpoint)


def test_a_dense_checkpoint_is_read_too(tmp_path):
    save_file({"weight": torch.eye(3)}, tmp_path / "file")
    checkpoint = load_compressed(tmp_path / "file")
    assert isinstance(checkpoint, CompressedCheckpoint)
    assert checkpoint.layout is None
    assert torch.equal(checkpoint["weight"], torch.eye(3))
    masks.save({"weight": torch.ones(3, dtype=torch.bool)}, tmp_path / "masks")
    assert load_compressed(tmp_path / "masks").layout is None


def test_the_commands(tmp_path, sharded):
    app = typer.Typer()
    app.command()(storage_commands.compress)
    app.command()(storage_commands.expand)
    masks.save({"layers.0.weight": open_checkpoint(sharded)["layers.0.weight"] != 0}, tmp_path / "masks")
    done = CliRunner().invoke(
        app,
        ["compress", str(sharded), "--out", str(tmp_path / "small"), "--masks", str(tmp_path / "masks"), "--zstd"],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0].split() == ["Encoding", "Tensors", "Dense", "Stored", "Ratio"]
    assert "bitmask+zstd" in done.stdout
    assert f"Wrote {tmp_path / 'small'}:" in done.stdout
    assert set(load_compressed(tmp_path / "small").masks) == {"layers.0.weight"}
    out = str(tmp_path / "other")
    for arguments, line in (
        (
            ["compress", str(sharded), "--out", out, "--masks", str(sharded)],
            "a mask is a bool tensor, not torch.float32",
        ),
        (["expand", str(sharded), "--out", out], "is not compressed; there is nothing to expand"),
    ):
        wrong = CliRunner().invoke(app, arguments)
        assert wrong.exit_code == 2
        assert line in wrong.stderr
        assert len(wrong.stderr.splitlines()) == 1
    arguments = ["expand", str(tmp_path / "small"), "--out", str(tmp_path / "again")]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert f"Wrote {tmp_path / 'again'}:" in done.stdout
    assert tree(tmp_path / "again") == tree(sharded)
