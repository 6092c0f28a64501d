"""Compressed checkpoints read: into models, tensor by tensor, and refused where a model does not fit."""

import pickle
import tracemalloc

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from secateur import attach, prune
from secateur.checkpoints import CheckpointError, open_checkpoint
from secateur.pipeline import masks
from secateur.storage import CompressedCheckpoint, expand_checkpoint, load_compressed, save_compressed
from support.stored import drawn, rewritten, same, sparse


def test_masks_of_a_file_are_read_one_by_one(tmp_path):
    weight = sparse(30, 40)
    masks.save({"weight": weight != 0}, tmp_path / "masks.safetensors")
    save_compressed({"weight": weight}, tmp_path / "file", masks=open_checkpoint(tmp_path / "masks.safetensors"))
    assert torch.equal(load_compressed(tmp_path / "file").masks["weight"], weight != 0)


def test_a_pickle_of_it_reads_the_same_files(compressed, sharded, tmp_path):
    save_compressed(sharded, tmp_path / "small")
    weight = sparse(30, 40)
    save_compressed({"weight": weight}, tmp_path / "masked", masks={"weight": weight != 0})
    for path in (compressed, tmp_path / "small", tmp_path / "masked"):
        loaded = load_compressed(path)
        again = pickle.loads(pickle.dumps(loaded))
        assert list(again) == list(loaded)
        assert (again.encodings, again.is_compressed, again.tied) == (loaded.encodings, True, loaded.tied)
        assert all(same(again[name], tensor) for name, tensor in loaded.items())
        assert {name: mask.sum() for name, mask in again.masks.items()} == {n: m.sum() for n, m in loaded.masks.items()}


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


def test_bools_that_are_neither(tmp_path):
    save_compressed({"flags": drawn(torch.bool, (3000,), 0.5)}, tmp_path / "file.safetensors")
    path = rewritten(tmp_path / "file.safetensors")
    content = bytearray(path.read_bytes())
    content[open_checkpoint(path).entries["flags::values"].start] = 7
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="flags holds bools that are neither 0 nor 1"):
        load_compressed(path)["flags"]


def test_one_name_in_two_files(tmp_path):
    for name in ("a", "b"):
        save_compressed({"weight": sparse(64, 64), name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="is there twice"):
        load_compressed(tmp_path)


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
    assert not checkpoint.is_compressed
    assert torch.equal(checkpoint["weight"], torch.eye(3))
    masks.save({"weight": torch.ones(3, dtype=torch.bool)}, tmp_path / "masks")
    assert not load_compressed(tmp_path / "masks").is_compressed


# Compressing, loading and expanding take the memory of one tensor at most: what numpy allocates, at its peak.


TENSOR = 2048 * 4096 * 4
LITTLE = 24e6  # pieces, and what waits in memory before it goes to a temporary file


def peak(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.long
def test_the_memory_of_one_tensor(tmp_path, zstd):
    weight = torch.empty(2048, 4096).uniform_(1, 2)
    weight[:, ::2] = 0
    weight[:, 1::64] *= -0.0
    save_file({"weight": weight}, tmp_path / "dense")
    model = {"weight": weight}
    assert peak(lambda: save_compressed(model, tmp_path / "small", zstd=zstd)) < LITTLE
    assert peak(lambda: save_compressed(tmp_path / "dense", tmp_path / "small", zstd=zstd)) < TENSOR + LITTLE
    assert peak(lambda: load_compressed(tmp_path / "small")["weight"]) < TENSOR + LITTLE
    # values in zstd come by planes of bytes, so that all of them have to be there; half of them are kept
    spared = peak(lambda: expand_checkpoint(tmp_path / "small", tmp_path / "expanded"))
    assert spared < (TENSOR / 2 if zstd else 0) + LITTLE
    assert (tmp_path / "expanded").read_bytes() == (tmp_path / "dense").read_bytes()
