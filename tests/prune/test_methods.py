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


# How much is pruned: amounts, axes, norms, and which entries are the largest.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_row_08_norms_of_half_precision_do_not_overflow(dtype):
    layer = nn.Linear(64, 3).to(dtype)
    layer.weight.data = torch.tensor([[1.0], [300.0], [2.0]]).expand(3, 64).to(dtype).contiguous()
    prune.ln_structured(layer, "weight", 2, 2, 0)
    assert layer.weight_mask[:, 0].tolist() == [0, 1, 0]
    assert layer.weight_mask.dtype == dtype


@pytest.mark.parametrize("scores", [torch.float64, torch.float16, torch.int32])
def test_row_14_the_mask_has_the_dtype_of_the_parameter(scores):
    for call in (
        lambda m, s: prune.l1_unstructured(m, "weight", 3, s),
        lambda m, s: (
            prune.ln_structured(m, "weight", 1, 2, 0, s) if s.is_floating_point() else prune.identity(m, "weight")
        ),
        lambda m, s: prune.global_unstructured([(m, "weight")], prune.L1Unstructured, {(m, "weight"): s}, amount=2),
    ):
        layer = linear()
        for _ in range(2):
            call(layer, torch.arange(24).view(4, 6).to(scores))
            assert layer.weight_mask.dtype == torch.float32


@pytest.mark.parametrize("n", ["fro", torch.inf, -torch.inf, 1, 2, 0])
def test_row_14_norms_of_convolutions(n):
    conv = nn.Conv2d(3, 5, 2)
    flat = conv.weight.detach().transpose(0, 1).reshape(3, -1)
    norms = torch.linalg.vector_norm(flat, 2 if n == "fro" else n, dim=1)
    weakest = 2 if n == 0 else int(norms.argmin())  # all equal in number: the first are kept
    prune.ln_structured(conv, "weight", 1, n, 1)
    gone = (conv.weight_mask.sum(dim=(0, 2, 3)) == 0).nonzero().flatten().tolist()
    assert gone == [weakest]


def test_row_21_an_amount_of_true_counts_one():
    assert zeros(prune.l1_unstructured(linear(), "weight", True).weight_mask) == 1


def test_an_integer_beyond_floats_is_too_large_an_amount():
    for library in (torch_prune, prune):
        with pytest.raises(ValueError, match="should be smaller than the number of parameters"):
            library.l1_unstructured(nn.Linear(2, 2), "weight", amount=10**400)


def test_a_norm_of_order_none_is_the_euclidean_one():
    torch.manual_seed(0)
    layer = nn.Linear(4, 5)
    # of torch by its number: since 2.15 it takes no None
    expected = torch_prune.ln_structured(copy.deepcopy(layer), "weight", amount=2, n=2, dim=0).weight_mask
    assert torch.equal(prune.ln_structured(layer, "weight", amount=2, n=None, dim=0).weight_mask, expected)
