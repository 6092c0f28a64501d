"""Masks on top of masks, from scores of any kind, over one tensor or several."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from secateur import prune
from support.pruned import Returns, assert_unchanged, linear, snapshot, zeros


def change_by_step(layer):
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer.weight_orig.grad = torch.arange(24.0).view(4, 6) - 11
    optimizer.step()


def change_by_loading(layer):
    state = layer.state_dict()
    layer.load_state_dict({**state, "weight_orig": -state["weight_orig"].flip(0).roll(1, 1)})


@pytest.mark.parametrize(
    "change", [change_by_step, change_by_loading, lambda m: m.half(), lambda m: m.to(torch.float64)],
    ids=["step", "load", "half", "to"],
)  # fmt: skip
def test_row_02_pruning_again_ranks_the_current_weight(change):
    layer = prune.l1_unstructured(linear(), "weight", 8)
    layer(torch.randn(1, 6))
    change(layer)
    current = layer.weight_orig.detach() * layer.weight_mask
    survivors = current[layer.weight_mask == 1].abs()
    prune.l1_unstructured(layer, "weight", 8)
    assert layer.weight_mask.dtype == layer.weight_orig.dtype
    assert zeros(layer.weight_mask) == 16
    kept = layer.weight[layer.weight_mask == 1].abs()
    assert torch.equal(kept.sort().values, survivors.sort().values[8:])


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (lambda a, b: {(a, "weight"): torch.full((4, 6), torch.nan)}, r"importance_scores of Linear\.weight .*NaN"),
        (lambda a, b: {(b, "weight"): torch.ones(6, 4)}, r"importance_scores of Linear\.weight .*\(6, 4\)"),
        (lambda a, b: {(a, "bias"): torch.ones(4)}, r"Linear\.bias, which is not among"),
        (lambda a, b: {(linear(), "weight"): torch.ones(4, 6)}, r"Linear\.weight, which is not among"),
    ],
    ids=["NaN", "shape", "unknown name", "unknown module"],
)
def test_row_06_wrong_scores_are_refused(scores, message):
    one, other = linear(), linear()
    net = nn.ModuleList([one, other])
    before = snapshot(net)
    with pytest.raises(ValueError, match=message):
        prune.global_unstructured(
            [(one, "weight"), (other, "weight")], prune.L1Unstructured, scores(one, other), amount=0.5
        )
    assert_unchanged(before, net)


def test_row_06_right_scores_are_ranked_by_their_absolute_value():
    one, other = linear(), linear()
    scores = {(other, "weight"): -torch.arange(1.0, 25).view(4, 6) * 100}
    prune.global_unstructured([(one, "weight"), (other, "weight")], prune.L1Unstructured, scores, amount=23)
    assert zeros(one.weight_mask) == 23
    assert zeros(other.weight_mask) == 0


@pytest.mark.parametrize("mask", [torch.full((4, 6), 2), torch.full((4, 6), 0.5), torch.full((4, 6), torch.nan)])
def test_row_06_masks_of_other_values_are_refused(mask):
    with pytest.raises(ValueError, match=r"mask for Linear\.weight holds values other than 0 and 1"):
        prune.custom_from_mask(linear(), "weight", mask)


@pytest.mark.parametrize("shape", [(1,), (6,), (1, 6), (4, 1), (4, 6, 1)])
def test_row_06_masks_that_only_broadcast_are_refused(shape):
    for error in (ValueError, AssertionError):  # the latter is what torch raises
        with pytest.raises(error, match=r"default_mask shape .* must match self.mask shape"):
            prune.custom_from_mask(linear(), "weight", torch.ones(shape))
    with pytest.raises(ValueError, match=r"mask for Linear\.weight has shape"):
        Returns.apply(linear(), "weight", torch.ones(shape))


def test_row_07_weights_of_nan_rank_above_all_as_with_torch():
    layer = linear()
    layer.weight.data[0, :3] = torch.nan
    other = linear()
    for call in (
        lambda: prune.l1_unstructured(layer, "weight", 20),
        lambda: prune.global_unstructured([(layer, "weight"), (other, "weight")], prune.L1Unstructured, amount=20),
    ):
        call()
        assert layer.weight_mask[0, :3].all()


@pytest.mark.parametrize("method", [prune.L1Unstructured, prune.RandomUnstructured])
@pytest.mark.parametrize("how", ["local", "global", "again"])
def test_row_11_channels_last_gets_the_mask_of_the_contiguous_weight_in_its_own_layout(method, how):
    def masks(module):
        torch.manual_seed(3)
        for _ in range(2 if how == "again" else 1):
            if how == "global":
                prune.global_unstructured([(module, "weight")], method, amount=0.3)
            else:
                method.apply(module, "weight", 0.3)
        return module.weight_mask

    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, 3)
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    transposed = copy.deepcopy(plain)
    transposed.weight.data = plain.weight.data.transpose(0, 1).contiguous().transpose(0, 1)
    expected = masks(plain)
    for module in (last, transposed):
        stride = module.weight.stride()
        mask = masks(module)
        assert torch.equal(mask, expected)
        assert mask.stride() == stride
        prune.remove(module, "weight")
        assert module.weight.stride() == stride


def test_row_19_global_magnitude_pruning_joins_nothing(monkeypatch):
    net = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 30), nn.Linear(30, 20)).double()
    reference = copy.deepcopy(net)
    names = [(0, "weight"), (1, "weight"), (2, "weight"), (0, "bias")]
    for amount in (0.3, 100):
        torch_prune.global_unstructured(
            [(reference[i], n) for i, n in names], torch_prune.L1Unstructured, amount=amount
        )

    def refuse(tensors, *args, **kwargs):
        assert sum(each.numel() for each in tensors) < 2000
        return joined(tensors, *args, **kwargs)

    joined = torch.cat
    monkeypatch.setattr(torch, "cat", refuse)
    for amount in (0.3, 100):
        prune.global_unstructured([(net[i], n) for i, n in names], prune.L1Unstructured, amount=amount)
    for index, name in names:
        assert torch.equal(getattr(net[index], name + "_mask"), getattr(reference[index], name + "_mask"))


def test_row_20_a_soft_mask_is_not_squared_by_global_rounds():
    layer = prune.identity(linear(), "weight")
    layer.weight_mask[0] = 0.5
    for method in (prune.L1Unstructured, prune.RandomUnstructured):
        prune.global_unstructured([(layer, "weight")], method, amount=2)
        assert (layer.weight_mask[0] == 0.5).all()


def test_modules_without_values_take_masks_without_values():
    for call in (
        lambda p, m: p.identity(m, "weight"),
        lambda p, m: p.l1_unstructured(m, "weight", 3),
        lambda p, m: p.random_unstructured(m, "weight", 0.5),
        lambda p, m: p.ln_structured(m, "weight", 1, 2, 0),
        lambda p, m: p.custom_from_mask(m, "weight", torch.ones(3, 3, device="meta")),
    ):
        for library in (torch_prune, prune):
            layer = nn.Linear(3, 3, device="meta")
            call(library, layer)
            assert layer.weight_mask.is_meta
            assert layer.weight.shape == (3, 3)
    layer = prune.identity(nn.Linear(3, 3, device="meta"), "weight")
    state = prune.l1_unstructured(nn.Linear(3, 3), "weight", 3).state_dict()
    layer.load_state_dict(state, assign=True)
    assert zeros(prune.remove(layer, "weight").weight) == 3


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("how", ["l1_unstructured", "random_unstructured", "identity", "global"])
def test_a_scalar_parameter_is_pruned_as_with_torch(how, times):
    states = []
    for library in (torch_prune, prune):
        module = nn.Module()
        module.scale = nn.Parameter(torch.tensor(3.0))
        for _ in range(times):
            # of one tensor it is the same; torch 2.7's global one fails the second time
            if how == "global" and library is torch_prune:
                library.l1_unstructured(module, "scale", amount=0.3)
            elif how == "global":
                library.global_unstructured([(module, "scale")], library.L1Unstructured, amount=0.3)
            else:
                getattr(library, how)(module, "scale", *([] if how == "identity" else [0.3]))
        states.append(module.state_dict())
    assert states[0] == states[1]
    with pytest.warns(UserWarning, match="Nothing is left of Module.scale"):
        prune.l1_unstructured(module, "scale", amount=1)


def test_complex_weights_compete_by_their_absolute_value():
    masks = []
    for library in (torch_prune, prune):
        torch.manual_seed(0)
        layer = nn.Linear(4, 6, dtype=torch.complex64)
        library.global_unstructured([(layer, "weight"), (layer, "bias")], library.L1Unstructured, amount=9)
        layer(torch.ones(1, 4, dtype=torch.complex64)).abs().sum().backward()
        masks.append([layer.weight_mask, layer.bias_mask])
    assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(*masks, strict=True))
