"""The ways to prune, containers of them, and methods of a user's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from secateur import prune
from support.pruned import PUBLIC, linear, zeros


def test_no_class_is_torchs_and_isinstance_holds_in_both_directions():
    for name in PUBLIC[:8]:
        assert getattr(torch_prune, name) not in getattr(prune, name).__mro__
    ours, theirs = prune.L1Unstructured(1), torch_prune.L1Unstructured(1)
    assert isinstance(ours, torch_prune.BasePruningMethod)
    assert isinstance(theirs, prune.BasePruningMethod)
    assert issubclass(prune.LnStructured, torch_prune.BasePruningMethod)
    assert isinstance(prune.PruningContainer(), torch_prune.PruningContainer)
    assert isinstance(torch_prune.PruningContainer(), prune.PruningContainer)
    assert not isinstance(ours, torch_prune.PruningContainer)
    assert not isinstance(theirs, prune.PruningContainer)
    assert isinstance(ours, torch_prune.L1Unstructured)
    assert isinstance(theirs, prune.L1Unstructured)
    assert not isinstance(theirs, prune.Identity)
    assert not isinstance(ours, torch_prune.Identity)
    assert not isinstance(object(), prune.BasePruningMethod)


def test_the_method_of_that_name_leaves_the_hook():
    layer = linear()
    method = prune.L1Unstructured.apply(layer, "weight", 6)
    method.remove(layer)
    assert list(layer._forward_pre_hooks.values()) == [method]
    assert list(layer._parameters) == ["bias", "weight"]
    assert type(layer) is nn.Linear


def test_a_method_with_its_own_mask_application_is_honoured_at_every_read():
    class Doubled(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t, default_mask):
            return default_mask * (t > 0)

        def apply_mask(self, module):
            return 2 * super().apply_mask(module)

    layer = linear()
    Doubled.apply(layer, "weight")
    assert torch.equal(layer.weight, 2 * layer.weight_mask * layer.weight_orig)
    layer.weight_orig.data += 1
    assert torch.equal(layer.weight, 2 * layer.weight_mask * layer.weight_orig)
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)
    expected = layer.weight.detach()
    assert torch.equal(prune.remove(layer, "weight").weight, expected)


def test_a_method_with_its_own_hook_has_the_attribute_to_itself():
    class Negated(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t, default_mask):
            return default_mask

        def __call__(self, module, inputs):
            setattr(module, self._tensor_name, -self.apply_mask(module))

    layer = linear()
    Negated.apply(layer, "weight")
    x = torch.randn(2, 6)
    assert torch.equal(layer(x), nn.functional.linear(x, -layer.weight_orig, layer.bias))
    prune.remove(layer, "weight")
    assert type(layer) is nn.Linear


def test_row_13_containers_from_several_methods_or_one_iterable():
    first, second = prune.L1Unstructured(2), prune.RandomUnstructured(2)
    for container in (prune.PruningContainer(first, second), prune.PruningContainer([first, second])):
        assert list(container) == [first, second]
        assert len(container) == 2
        assert container[-1] is second
        mask = container.compute_mask(torch.randn(3, 4), torch.ones(3, 4))
        assert zeros(mask) == 2
    first._tensor_name = "weight"
    second._tensor_name = "bias"
    assert prune.PruningContainer(first)._tensor_name == "weight"
    with pytest.raises(ValueError, match=r"parameter named 'weight'.*Found 'bias'"):
        prune.PruningContainer(first, second)
    with pytest.raises(TypeError, match="<class 'int'> is not a BasePruningMethod subclass"):
        prune.PruningContainer(first, 3)
    assert len(prune.PruningContainer()) == 0
    nested = prune.PruningContainer(prune.PruningContainer(first))
    assert isinstance(nested[0], prune.PruningContainer)


def test_a_container_on_its_own_computes_masks_as_torchs_does():
    t, default = torch.arange(1.0, 9).view(2, 4), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]])
    for make in (
        lambda p: p.L1Unstructured(2),
        lambda p: p.LnStructured(1, 2, 0),
        lambda p: p.LnStructured(1, 2, 1),
        lambda p: p.CustomFromMask(torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1]])),
        lambda p: p.Identity(),
    ):
        masks = []
        for library in (torch_prune, prune):
            container = library.PruningContainer()
            container._tensor_name = "test"
            method = make(library)
            method._tensor_name = "test"
            container.add_pruning_method(method)
            masks.append(container.compute_mask(t, default))
            masks.append(method.prune(t, default))
        assert torch.equal(masks[0], masks[2])
        assert torch.equal(masks[1], masks[3])
        assert masks[0].dtype == masks[2].dtype == torch.float32
