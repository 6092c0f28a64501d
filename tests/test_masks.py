"""Masks on models: applied, attached, nested, saved; nothing changes when a call fails."""

import copy
import math
import os
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur import NM, Block, Channels, Rows, apply_, attach, criteria, detach, masks, prune, sparsify, sparsity_of
from secateur.allocation import erk, uniform
from secateur.masks import iterate_masks, load, make_masks, save
from secateur.targets import find_targets


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4, 16), nn.LayerNorm(16),
        nn.Linear(16, 8),
    ).to(dtype)  # fmt: skip


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model, before):
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_sparsify_is_exact_and_changes_nothing_else(dtype, sparsity):
    model = network(dtype)
    before = snapshot(model)
    parameters = dict(model.named_parameters())
    found = sparsify(model, sparsity)
    assert list(found) == ["0.weight", "4.weight", "6.weight"]
    total = sum(mask.numel() for mask in found.values())
    assert sum(int(mask.sum()) for mask in found.values()) == total - round(sparsity * total)
    for name, tensor in model.state_dict().items():
        expected = before[name] * found[name] if name in found else before[name]
        assert torch.equal(tensor, expected), name
    assert dict(model.named_parameters()) == parameters
    assert sparsity_of(found) == pytest.approx(sparsity, abs=1 / total)


def test_sparsify_agrees_with_torch():
    from torch.nn.utils import prune as theirs

    model, reference = network(), network()
    found = sparsify(model, 0.8)
    pairs = [(reference[0], "weight"), (reference[4], "weight"), (reference[6], "weight")]
    theirs.global_unstructured(pairs, theirs.L1Unstructured, amount=0.8)
    for (module, _), mask in zip(pairs, found.values(), strict=True):
        assert torch.equal(module.weight_mask.bool(), mask)


def test_sparsify_works_on_every_pattern_and_allocation():
    for pattern in (Rows(), Block(4, 4), Channels(), Channels(1)):
        for allocate in (uniform, erk):
            model = network()
            found = sparsify(model, 0.5, pattern=pattern, allocate=allocate)
            assert sparsity_of(model) == pytest.approx(sparsity_of(found))
            assert 0.4 < sparsity_of(found) < 0.6
    model = network()
    sparsify(model, pattern=NM(2, 4))
    assert sparsity_of(model) == 0.5


def test_non_contiguous_parameters():
    model = network().to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    found = sparsify(model, 0.7)
    plain = sparsify(network(), 0.7)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert sparsity_of(model) == pytest.approx(sparsity_of(found))


def test_a_removed_nan_becomes_zero():
    weights = {"w": torch.tensor([math.nan, math.inf, -math.inf, 3.0])}
    for layout in (lambda w: w, lambda w: torch.stack([w, w], 1)[:, 0]):
        copied = {"w": layout(weights["w"].clone())}
        apply_(copied, {"w": torch.tensor([False, False, False, True])})
        assert copied["w"].tolist() == [0.0, 0.0, 0.0, 3.0]
        assert not copied["w"].signbit().any()


def test_apply_tells_autograd():
    weight = torch.randn(4, requires_grad=True)
    squared = (weight * weight).sum()
    apply_({"w": weight}, {"w": torch.tensor([True, False, True, True])})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_a_failing_call_changes_nothing():
    model = network()
    before = snapshot(model)
    good = make_masks(dict(find_targets(model)), 0.5)
    wrong_shape = good | {"6.weight": torch.ones(3, 3, dtype=torch.bool)}
    wrong_dtype = good | {"6.weight": good["6.weight"].float()}
    for call in (apply_, attach):
        with pytest.raises(ValueError, match=r"6\.weight: a mask of shape \(3, 3\) for a weight of shape \(8, 16\)"):
            call(model, wrong_shape)
        with pytest.raises(TypeError, match=r"6\.weight: a mask is a bool tensor"):
            call(model, wrong_dtype)
        with pytest.raises(KeyError, match="'nowhere', but no such weight"):
            call(model, good | {"nowhere": torch.ones(1, dtype=torch.bool)})
        assert same(model, before)
    model[6].weight.data[0, 0] = math.nan
    before = snapshot(model)
    for options in ({}, {"allocate": erk}, {"pattern": Rows()}, {"criterion": criteria.lamp}):
        with pytest.raises(ValueError, match=r"6\.weight: a score is NaN"):
            sparsify(model, 0.5, **options)
    model[6].weight.data[0, 0] = 1
    with pytest.raises(ValueError, match=r"0\.weight: 2:3 needs an input dimension divisible by 3"):
        sparsify(model, pattern=NM(2, 3))
    before = snapshot(model)
    with pytest.raises(ValueError, match="For 50 percent"):
        sparsify(model, 50)
    assert same(model, before)


def test_attach_and_detach():
    model, zeroed = network(), network()
    original = snapshot(model)
    found = sparsify(zeroed, 0.6)
    attach(model, found)
    assert prune.is_pruned(model)
    assert sparsity_of(model) == pytest.approx(sparsity_of(found))
    batch = torch.randn(5, 4, 4, 4)
    assert torch.equal(model.eval()(batch), zeroed.eval()(batch))
    assert torch.equal(model[0].weight_orig, original["0.weight"])
    again = detach(model)
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], found[name]) for name in found)
    assert not prune.is_pruned(model)
    assert list(dict(model.named_parameters())) != []
    assert all(torch.equal(tensor, zeroed.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert detach(model) == {}


@settings(max_examples=40)
@given(first=st.floats(0, 1), second=st.floats(0, 1), seed=st.integers(0, 99))
def test_masks_nest_within_earlier_ones(first, second, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = {"a": torch.randn(12, 8, generator=generator), "b": torch.randn(6, 4, generator=generator)}
    low, high = min(first, second), max(first, second)
    torch.manual_seed(seed)
    earlier = make_masks(weights, low, criterion=criteria.random, allocate=uniform)
    for allocate in (uniform, erk, masks.everywhere):
        try:
            later = make_masks(weights, high, within=earlier, allocate=allocate)
        except ValueError as error:
            # an allocation that gives a tensor more than is left of it, or leaves too few for one each
            assert "earlier masks keep fewer" in str(error) or "too few" in str(error)  # noqa: PT017
            continue
        assert all(bool((earlier[name] | ~later[name]).all()) for name in weights)
        total = sum(mask.numel() for mask in later.values())
        if allocate is not uniform:
            assert sum(int(mask.sum()) for mask in later.values()) == total - round(high * total)
    structured = make_masks(weights, pattern=NM(2, 4), within=earlier)
    assert all(bool((earlier[name] | ~structured[name]).all()) for name in weights)
    assert all(int(mask.reshape(-1, 4).sum(1).max()) <= 2 for mask in structured.values())


def test_channels_within_unstructured_masks_rank_what_is_left():
    weight = torch.tensor([[9.0, 9.0], [1.0, 1.0], [2.0, 2.0]])
    earlier = {"w": torch.tensor([[False, False], [True, True], [False, True]])}
    mask = make_masks({"w": weight}, 2 / 3, pattern=Channels(), within=earlier)["w"]
    assert mask.tolist() == [[False, False], [True, True], [False, False]]
    with pytest.raises(ValueError, match="earlier masks keep fewer units"):
        make_masks({"w": weight}, 0.0, pattern=Channels(), within=earlier)
    with pytest.raises(ValueError, match="earlier masks keep fewer units"):
        make_masks({"w": weight}, 0.0, within=earlier)


def test_masks_one_at_a_time_from_a_lazy_mapping():
    class Lazy(Mapping):
        """Loads on access."""

        def __init__(self):
            self.shapes = {"a": (40, 30), "b": (10, 10), "c": (7,)}

        def __getitem__(self, name):
            return torch.randn(self.shapes[name], generator=torch.Generator().manual_seed(len(name) + ord(name[0])))

        def __iter__(self):
            return iter(self.shapes)

        def __len__(self):
            return 3

    lazy = Lazy()
    for options in (
        {},
        {"allocate": uniform},
        {"allocate": erk},
        {"pattern": Channels()},
        {"criterion": criteria.lamp},
    ):
        everything = make_masks({name: lazy[name] for name in lazy}, 0.5, **options)
        one_by_one = dict(iterate_masks(lazy, 0.5, **options))
        assert all(torch.equal(one_by_one[name], everything[name]) for name in lazy)
        assert all(torch.equal(mask, everything[name]) for name, mask in make_masks(lazy, 0.5, **options).items())


def test_random_masks_are_the_seeds():
    for pattern in (None, Rows(), Block(2, 2)):
        for allocate in (masks.everywhere, uniform):
            results = []
            for _ in range(2):
                torch.manual_seed(9)
                results.append(sparsify(network(), 0.5, criterion=criteria.random, pattern=pattern, allocate=allocate))
            assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_save_and_load(tmp_path):
    found = sparsify(network(), 0.5)
    path = tmp_path / "masks.safetensors"
    save(found, path, metadata={"sparsity": 0.5})
    again = load(path)
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], found[name]) for name in found)
    assert os.listdir(tmp_path) == ["masks.safetensors"]
    with pytest.raises(TypeError, match="0: a mask is a bool tensor"):
        save({"0": torch.ones(2)}, path)
    assert torch.equal(load(path)["0.weight"], found["0.weight"])
    (tmp_path / "junk").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="junk is not a safetensors file"):
        load(tmp_path / "junk")
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "weights")
    with pytest.raises(ValueError, match="is this a file of weights"):
        load(tmp_path / "weights")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "masks"
    save({"w": torch.tensor([True])}, path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space"):
        save({"w": torch.tensor([False])}, path)
    assert load(path)["w"].item() is True
    assert os.listdir(tmp_path) == ["masks"]


def test_targets():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.norm = nn.LayerNorm((4, 4))
            self.attention = nn.MultiheadAttention(4, 2)
            self.rnn = nn.LSTM(4, 4)
            self.bare = nn.Parameter(torch.randn(4, 4))
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.head = nn.Linear(4, 10)
            self.head.weight = self.embed.weight

    model = Model()
    assert list(find_targets(model)) == [
        "bare", "attention.in_proj_weight", "attention.out_proj.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0",
        "first.weight",
    ]  # fmt: skip
    assert list(find_targets(model, include="*.weight")) == [
        "embed.weight", "norm.weight", "attention.out_proj.weight", "first.weight",
    ]  # fmt: skip
    assert list(find_targets(model, include="head.weight")) == ["embed.weight"]
    assert list(find_targets(model, include=["first.*", "second.*"], exclude="*.bias")) == ["first.weight"]
    assert "first.weight" not in find_targets(model, exclude="second.weight")
    with pytest.raises(ValueError, match=r"no parameter matches 'frist\.weight'; the closest names are first\.weight"):
        find_targets(model, exclude="frist.weight")
    with pytest.raises(ValueError, match="has no weights to prune"):
        find_targets(nn.LayerNorm(3))
    with pytest.raises(ValueError, match=r"0\.weight is not initialized; run the model once"):
        find_targets(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ValueError, match="only floating-point weights"):
        odd = nn.Linear(2, 2)
        odd.codes = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
        find_targets(odd, include="codes")


def test_tied_weights_stay_tied_and_count_once():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    found = sparsify(model, 0.5)
    assert list(found) == ["0.weight"]
    assert int(found["0.weight"].sum()) == 18
    assert model[1].weight is model[0].weight
    assert copy.deepcopy(model)(torch.randn(1, 6)).isfinite().all()


def test_meta_and_empty():
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device"):
        sparsify(nn.Sequential(nn.Linear(3, 3, device="meta")), 0.5)
    assert make_masks({"w": torch.zeros(0, 4)}, 0.5)["w"].shape == (0, 4)
    assert sparsity_of({}) == 0.0
    assert np.isclose(sparsity_of({"w": torch.zeros(3)}), 1.0)
