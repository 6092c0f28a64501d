"""The functions that are called, one tensor or many."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from secateur import prune
from support.pruned import assert_unchanged, linear, snapshot, tied, zeros


def test_state_of_a_pruned_module():
    layer = linear()
    weight = layer.weight
    assert prune.l1_unstructured(layer, "weight", 6) is layer
    assert list(layer.state_dict()) == ["bias", "weight_orig", "weight_mask"]
    assert layer.weight_orig is weight
    assert zeros(layer.weight_mask) == 6
    assert torch.equal(layer.weight, layer.weight_mask * weight)
    (hook,) = layer._forward_pre_hooks.values()
    assert type(hook) is prune.L1Unstructured
    prune.random_unstructured(layer, "weight", 6)
    (container,) = layer._forward_pre_hooks.values()
    assert type(container) is prune.PruningContainer
    assert container[0] is hook
    assert [type(method) for method in container] == [prune.L1Unstructured, prune.RandomUnstructured]
    assert zeros(layer.weight_mask) == 12
    values = layer.weight.detach()
    assert prune.remove(layer, "weight") is layer
    assert layer.weight is weight
    assert torch.equal(weight, values)
    assert list(layer.state_dict()) == ["bias", "weight"]
    assert type(layer) is nn.Linear
    with pytest.raises(
        ValueError, match=r"Parameter 'weight' of module Linear.* has to be pruned before pruning can be"
    ):
        prune.remove(layer, "weight")


def test_remove_does_not_recurse_and_is_pruned_does():
    net = nn.Sequential(prune.identity(linear(), "weight"))
    assert prune.is_pruned(net)
    with pytest.raises(ValueError, match="has to be pruned"):
        prune.remove(net, "0.weight")
    prune.remove(net[0], "weight")
    assert not prune.is_pruned(net)


def test_row_12_any_iterable_of_pairs():
    one, other = linear(), linear()
    prune.global_unstructured(((m, "weight") for m in (one, other)), prune.L1Unstructured, amount=4)
    prune.global_unstructured(zip((one, other), ("weight", "weight"), strict=True), prune.L1Unstructured, amount=4)
    assert zeros(one.weight_mask) + zeros(other.weight_mask) == 8
    with pytest.raises(
        TypeError, match=r"\(module, name\) pairs .* parameters\[0\] is a Parameter, as model.parameters"
    ):
        prune.global_unstructured(one.parameters(), prune.L1Unstructured, amount=1)
    with pytest.raises(TypeError, match=r"\(module, name\) pairs"):
        prune.global_unstructured([("weight", one)], prune.L1Unstructured, amount=1)
    with pytest.raises(TypeError, match="parameters is not an Iterable"):
        prune.global_unstructured(3, prune.L1Unstructured, amount=1)
    with pytest.raises(TypeError, match="importance_scores must be of type dict"):
        prune.global_unstructured([(one, "weight")], prune.L1Unstructured, [1], amount=1)
    with pytest.raises(ValueError, match="expected a non-empty list of Tensors"):
        prune.global_unstructured([], prune.L1Unstructured, amount=1)


def test_a_tensor_under_two_names_keeps_what_both_masks_keep():
    first, second = tied()
    masks = [torch.rand(first.weight.shape) > 0.5 for _ in range(2)]
    prune.custom_from_masks({(first, "weight"): masks[0], (second, "weight"): masks[1]})
    assert torch.equal(first.weight_mask, (masks[0] & masks[1]).float())
    assert first.weight_mask is second.weight_mask
    assert prune.remove_all([(first, "weight"), (second, "weight")]) == [(first, "weight"), (second, "weight")]
    assert first.weight is second.weight


@pytest.mark.parametrize(
    ("second", "error", "message"),
    [
        (torch.ones(3), ValueError, "must match"),
        (torch.full((4, 6), 2), ValueError, "values other than 0 and 1"),
        (None, TypeError, "not a tensor"),
    ],
)
def test_a_mask_that_does_not_fit_leaves_all_without_one(second, error, message):
    net = nn.Sequential(linear(), linear())
    before = snapshot(net)
    with pytest.raises(error, match=message):
        prune.custom_from_masks({(net[0], "weight"): torch.ones(4, 6), (net[1], "weight"): second})
    assert_unchanged(before, net)
    with pytest.raises(TypeError, match=r"custom_from_masks\(\) needs \(module, name\) pairs"):
        prune.custom_from_masks({"0.weight": torch.ones(4, 6)})


def test_several_are_removed_or_none():
    net = nn.Sequential(*(prune.l1_unstructured(linear(), "weight", 6) for _ in range(2)), linear())
    pairs = [(layer, "weight") for layer in net]
    before = snapshot(net)
    with pytest.raises(ValueError, match="has to be pruned before pruning can be removed"):
        prune.remove_all(pairs)
    assert_unchanged(before, net)
    expected = [layer.weight.detach() for layer in net]
    assert prune.remove_all(iter(pairs[:2])) == pairs[:2]
    assert not prune.is_pruned(net)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(net, expected, strict=True))
    assert prune.remove_all([]) == []


def test_what_follows_is_removed_with_what_it_follows():
    first, second = tied()
    prune.l1_unstructured(first, "weight", 3)
    assert prune.pruned_names(first) == prune.pruned_names(second) == ["weight"]
    assert prune.remove_all([(first, "weight"), (second, "weight")]) == [(first, "weight")]
    assert prune.pruned_names(first) == prune.pruned_names(second) == []


def test_pruned_names_are_those_of_the_module_itself():
    layer = torch_prune.l1_unstructured(prune.identity(linear(), "bias"), "weight", 2)
    layer.register_forward_pre_hook(lambda module, inputs: None)
    assert prune.pruned_names(layer) == ["bias", "weight"]
    assert prune.pruned_names(nn.Sequential(layer)) == []
