"""What is pruned: ties are one tensor, and what cannot be pruned is refused by name."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from secateur import prune
from support.pruned import assert_unchanged, linear, snapshot, through_file, tied, zeros


def test_row_01_several_hooks_for_one_tensor_are_refused():
    layer = prune.identity(linear(), "weight")
    second = prune.L1Unstructured(1)
    second._tensor_name = "weight"
    layer.register_forward_pre_hook(second)
    before = snapshot(layer)
    with pytest.raises(AssertionError, match="Avoid adding multiple pruning hooks"):
        prune.l1_unstructured(layer, "weight", 1)
    assert_unchanged(before, layer)


def test_row_04_the_other_side_of_a_tie_follows_and_is_released_with_it():
    one, other = tied()
    weight = one.weight
    prune.l1_unstructured(one, "weight", 6)
    assert other.weight_orig is one.weight_orig is weight
    assert other.weight_mask is one.weight_mask
    assert torch.equal(other.weight, one.weight)
    prune.l1_unstructured(one, "weight", 6)
    assert zeros(other.weight_mask) == 12
    assert len(list(other._forward_pre_hooks.values())) == 1
    prune.remove(one, "weight")
    assert other.weight is one.weight is weight
    assert not prune.is_pruned(other)
    assert type(other) is nn.Linear
    assert zeros(weight) == 12


def test_row_04_pruning_through_the_other_side_continues_the_one_mask():
    one, other = tied()
    prune.l1_unstructured(one, "weight", 6)
    prune.l1_unstructured(other, "weight", 6)
    assert zeros(one.weight_mask) == zeros(other.weight_mask) == 12
    assert torch.equal(one.weight, other.weight)
    prune.remove(one, "weight")
    prune.remove(other, "weight")
    assert one.weight is other.weight


def test_row_04_global_counts_a_tensor_once():
    one, other = tied()
    third = linear()
    net = nn.ModuleList([one, other, third, one])
    prune.global_unstructured([(m, "weight") for m in net], prune.L1Unstructured, amount=10)
    assert zeros(one.weight_mask) + zeros(third.weight_mask) == 10
    assert one.weight_mask is other.weight_mask
    for layer in (one, other, third):
        assert [type(hook) for hook in layer._forward_pre_hooks.values()] == [prune.CustomFromMask]
    for layer in (one, other, third):
        prune.remove(layer, "weight")
    assert one.weight is other.weight
    with pytest.raises(ValueError, match="has to be pruned"):
        prune.remove(one, "weight")


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(self.embedding(tokens))


def test_row_04_embedding_and_decoder_of_a_language_model():
    model = LanguageModel()
    prune.l1_unstructured(model.decoder, "weight", 14)
    duplicate = through_file(copy.deepcopy(model))
    for net in (model, duplicate, model.to(torch.float64)):
        assert sum(parameter.numel() for parameter in net.parameters()) == 28
        assert torch.equal(net.embedding.weight, net.decoder.weight)
        net.zero_grad()
        net(torch.tensor([1, 2])).square().sum().backward()
        grad = net.embedding.weight_orig.grad
        assert torch.equal(grad, grad * net.decoder.weight_mask)
        prune.l1_unstructured(net.embedding, "weight", 2)
        assert zeros(net.decoder.weight) == zeros(net.embedding.weight) > 14
    for name in ("decoder", "embedding"):
        prune.remove(getattr(duplicate, name), "weight")
    assert duplicate.decoder.weight is duplicate.embedding.weight
    assert not prune.is_pruned(duplicate)


def test_row_04_shallow_copies_are_no_second_owner():
    layer = linear()
    twin = copy.copy(layer)
    prune.l1_unstructured(layer, "weight", 6)
    x = torch.randn(2, 6)
    assert torch.equal(twin(x), layer(x))
    prune.remove(layer, "weight")
    assert zeros(layer.weight) == 6


def test_row_04_a_tie_made_after_pruning_is_named_at_remove():
    one = prune.l1_unstructured(linear(), "weight", 6)
    other = nn.Linear(6, 4)
    other.weight = one.weight_orig
    before = snapshot(one)
    with pytest.raises(ValueError, match=r"Linear\.weight and Linear\.weight are one tensor"):
        prune.remove(one, "weight")
    assert_unchanged(before, one)
    other.weight = nn.Parameter(other.weight.detach().clone())
    dense = other.weight.detach().clone()
    prune.remove(one, "weight")
    assert torch.equal(other.weight, dense)


def test_row_04_what_cannot_follow_is_named():
    one, other = tied()
    parametrize.register_parametrization(other, "weight", nn.Identity())
    before = snapshot(one)
    with pytest.raises(ValueError, match=r"parametrization, which cannot follow the pruning of Linear\.weight"):
        prune.l1_unstructured(one, "weight", 6)
    assert_unchanged(before, one)

    first, second = linear(), linear()
    second.weight.data = first.weight.data
    net = nn.ModuleList([first, second])
    before = snapshot(net)
    with pytest.raises(ValueError, match=r"Linear\.weight .* and Linear\.weight .* over the same memory"):
        prune.global_unstructured([(first, "weight"), (second, "weight")], prune.L1Unstructured, amount=3)
    assert_unchanged(before, net)


def test_row_04_neighbours_in_one_block_of_memory_are_no_tie():
    block = torch.randn(48)
    first, second = linear(), linear()
    first.weight.data, second.weight.data = block[:24].view(4, 6), block[24:].view(4, 6)
    prune.global_unstructured([(first, "weight"), (second, "weight")], prune.L1Unstructured, amount=3)
    assert zeros(first.weight_mask) + zeros(second.weight_mask) == 3
    prune.remove(first, "weight")


def test_row_04_an_optimizer_is_no_owner_and_no_reference_is_kept():
    layer = linear()
    optimizer = torch.optim.Adam(layer.parameters())
    prune.l1_unstructured(layer, "weight", 6)
    prune.remove(layer, "weight")
    del optimizer
    import weakref

    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None


def test_row_10_none_and_uninitialised_tensors():
    for module, name, error, message in (
        (nn.Linear(3, 3, bias=False), "bias", TypeError, r"Linear\.bias is None: there is nothing to prune"),
        (nn.LazyLinear(3), "weight", ValueError, r"weight is an uninitialized parameter: run one forward"),
    ):
        names = (list(module._parameters), list(module._buffers), list(module._forward_pre_hooks), type(module))
        for call in (
            lambda module=module, name=name: prune.l1_unstructured(module, name, 1),
            lambda module=module, name=name: prune.global_unstructured(
                [(module, name)], prune.L1Unstructured, amount=1
            ),
        ):
            with pytest.raises(error, match=message):
                call()
        assert names == (list(module._parameters), list(module._buffers), list(module._forward_pre_hooks), type(module))


def test_row_10_parametrized_and_weight_normed_tensors_say_what_to_do():
    layer = parametrizations.orthogonal(linear(4, 4))
    before = snapshot(layer)
    with pytest.raises(TypeError, match=r"remove_parametrizations"):
        prune.l1_unstructured(layer, "weight", 1)
    assert_unchanged(before, layer)
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(linear())
    before = snapshot(layer)
    with pytest.raises(TypeError, match=r"remove_weight_norm first, or prune 'weight_v'"):
        prune.l1_unstructured(layer, "weight", 1)
    assert_unchanged(before, layer)
    layer = nn.utils.spectral_norm(linear())
    with pytest.raises(TypeError, match=r"spectral_norm: remove that first"):
        prune.l1_unstructured(layer, "weight", 1)
    with pytest.raises(TypeError, match=r"cannot assign 'torch.FloatTensor' object to parameter 'running_mean_orig'"):
        prune.l1_unstructured(nn.BatchNorm1d(3), "running_mean", 1)


def test_row_10_weight_norm_uses_the_current_direction():
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(linear())
    prune.l1_unstructured(layer, "weight_v", 12)
    layer.weight_v_orig.data = torch.arange(1.0, 25).view(4, 6)
    x = torch.randn(2, 6)
    v = layer.weight_v_mask * layer.weight_v_orig
    expected = torch._weight_norm(v, layer.weight_g, 0)
    assert torch.allclose(layer(x), nn.functional.linear(x, expected, layer.bias))


def test_row_10_another_tensor_of_a_parametrized_module():
    layer = parametrizations.weight_norm(linear())
    prune.l1_unstructured(layer, "bias", 2)
    layer(torch.randn(2, 6)).sum().backward()
    parametrize.remove_parametrizations(layer, "weight")
    assert zeros(layer.bias) == 2
    prune.remove(layer, "bias")
    assert type(layer) is nn.Linear
    original = parametrizations.weight_norm(linear())
    prune.l1_unstructured(original.parametrizations.weight, "original1", 12)
    assert zeros(original.weight) == 12
