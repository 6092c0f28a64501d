"""The drop-in's surface, what it mends (docs/drop-in.md, row by row) and what it must not break."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pathlib
import pickle
import re
import threading
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import prune as torch_prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from secateur import prune
from secateur.prune import masked_weight
from secateur.prune.masked_weight import masked


def linear(rows: int = 4, columns: int = 6) -> nn.Linear:
    layer = nn.Linear(columns, rows)
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0)) + 1
    layer.weight.data = (order / 8).view(rows, columns) * (1 - 2 * (order % 2)).view(rows, columns)
    return layer


def snapshot(module: nn.Module) -> Any:
    """Everything that a failing call could have touched, by identity."""
    state = []
    for name, child in module.named_modules():
        tables = {
            key: [(entry, id(value)) for entry, value in child.__dict__[key].items()]
            for key in ("_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks")
        }
        values = [(key, value.clone()) for key, value in child.state_dict(keep_vars=False).items()]
        hooks = [
            (id(hook), {key: id(value) for key, value in hook.__dict__.items()} if hasattr(hook, "__dict__") else None)
            for hook in child._forward_pre_hooks.values()
        ]
        plain = [(key, id(value)) for key, value in child.__dict__.items()]
        state.append((name, type(child), plain, tables, set(child._non_persistent_buffers_set), hooks, values))
    return state


def assert_unchanged(before: Any, module: nn.Module) -> None:
    after = snapshot(module)
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert old[:-1] == new[:-1]
        for (key, value), (other_key, other) in zip(old[-1], new[-1], strict=True):
            assert key == other_key
            assert torch.equal(value, other)


def zeros(mask: Tensor) -> int:
    return int((mask == 0).sum())


# The surface.


PUBLIC = [
    "BasePruningMethod", "PruningContainer", "Identity", "RandomUnstructured", "L1Unstructured", "RandomStructured",
    "LnStructured", "CustomFromMask", "identity", "random_unstructured", "l1_unstructured", "random_structured",
    "ln_structured", "global_unstructured", "custom_from_mask", "remove", "is_pruned",
]  # fmt: skip
HELPERS = [
    "_validate_pruning_amount_init", "_validate_pruning_amount", "_validate_structured_pruning",
    "_validate_pruning_dim", "_compute_nparams_toprune", "_compute_norm",
]  # fmt: skip


def shape_of(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", PUBLIC + HELPERS)
def test_names_and_signatures_are_those_of_torch(name):
    theirs, ours = getattr(torch_prune, name), getattr(prune, name)
    assert shape_of(theirs) == shape_of(ours)
    if not inspect.isclass(theirs):
        return
    assert getattr(theirs, "PRUNING_TYPE", None) == getattr(ours, "PRUNING_TYPE", None)
    public = {
        key for key, value in vars(theirs).items() if callable(getattr(theirs, key)) and not key.startswith("_abc")
    }
    for method in public | {"apply", "__call__", "compute_mask", "apply_mask", "prune", "remove", "__init__"}:
        assert shape_of(getattr(theirs, method)) == shape_of(getattr(ours, method)), method


def test_all_lists_the_public_names():
    assert sorted(PUBLIC) == prune.__all__


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


def test_the_mask_is_replaced_and_not_changed_by_another_pruning():
    layer = prune.l1_unstructured(linear(), "weight", 6)
    for call in (
        lambda: prune.l1_unstructured(layer, "weight", 3),
        lambda: prune.identity(layer, "weight"),
        lambda: prune.random_structured(layer, "weight", 1, 0),
        lambda: prune.custom_from_mask(layer, "weight", torch.ones(4, 6)),
        lambda: prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, amount=0),
        lambda: prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, amount=2),
    ):
        mask, values = layer.weight_mask, layer.weight_mask.clone()
        call()
        assert layer.weight_mask is not mask
        assert layer.weight_mask.data_ptr() != mask.data_ptr()
        assert torch.equal(mask, values)
        assert "weight_mask" not in layer._non_persistent_buffers_set


def test_the_method_of_that_name_leaves_the_hook():
    layer = linear()
    method = prune.L1Unstructured.apply(layer, "weight", 6)
    method.remove(layer)
    assert list(layer._forward_pre_hooks.values()) == [method]
    assert list(layer._parameters) == ["bias", "weight"]
    assert type(layer) is nn.Linear


def test_of_equal_scores_the_first_in_memory_order_are_kept():
    one, other = nn.Linear(4, 3), nn.Linear(4, 3)
    for layer in (one, other):
        nn.init.ones_(layer.weight)
    prune.global_unstructured([(one, "weight"), (other, "weight")], prune.L1Unstructured, amount=7)
    assert other.weight_mask.flatten().tolist() == [1] * 5 + [0] * 7
    assert one.weight_mask.all()
    prune.l1_unstructured(one, "weight", 7)
    assert one.weight_mask.flatten().tolist() == [1] * 5 + [0] * 7
    for dim in (0, 1):
        layer = nn.Linear(4, 3)
        nn.init.ones_(layer.weight)
        prune.ln_structured(layer, "weight", 2, 2, dim)
        size = layer.weight.shape[dim]
        assert layer.weight_mask.amax(1 - dim).tolist() == [1] * (size - 2) + [0] * 2


def test_remove_does_not_recurse_and_is_pruned_does():
    net = nn.Sequential(prune.identity(linear(), "weight"))
    assert prune.is_pruned(net)
    with pytest.raises(ValueError, match="has to be pruned"):
        prune.remove(net, "0.weight")
    prune.remove(net[0], "weight")
    assert not prune.is_pruned(net)


def test_the_class_looks_the_same_and_is_shared_and_restored():
    one, other = prune.identity(linear(), "weight"), prune.identity(linear(), "weight")
    assert type(one) is type(other) is not nn.Linear
    assert isinstance(one, nn.Linear)
    assert repr(one) == repr(linear())
    assert (type(one).__name__, type(one).__qualname__, type(one).__module__) == (
        "Linear", "Linear", nn.Linear.__module__,
    )  # fmt: skip
    prune.identity(one, "bias")
    prune.remove(one, "weight")
    assert one.bias.shape == (4,)
    prune.remove(one, "bias")
    assert type(one) is nn.Linear


def test_what_is_assigned_to_a_pruned_weight_is_not_kept():
    layer = prune.l1_unstructured(linear(), "weight", 3)
    expected = layer.weight.detach()
    layer.weight = torch.zeros(4, 6)
    assert torch.equal(layer.weight, expected)
    with pytest.raises(KeyError, match="attribute 'weight' already exists"):
        layer.weight = nn.Parameter(torch.zeros(4, 6))


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


# Working on what torch made, and torch on what we made.


def test_a_module_pruned_by_torch_can_be_worked_on():
    layer = linear()
    weight = layer.weight
    torch_prune.l1_unstructured(layer, "weight", 6)
    layer(torch.randn(2, 6)).sum().backward()
    layer = pickle.loads(pickle.dumps(layer)) if layer.weight.is_leaf else layer
    assert prune.is_pruned(layer)
    prune.l1_unstructured(layer, "weight", 6)
    (container,) = layer._forward_pre_hooks.values()
    assert [type(method) for method in container] == [torch_prune.L1Unstructured, prune.L1Unstructured]
    assert zeros(layer.weight_mask) == 12
    prune.remove(layer, "weight")
    assert layer.weight is weight
    assert type(layer) is nn.Linear


def test_a_model_unpickled_with_torchs_hooks_can_be_worked_on():
    with torch.no_grad():
        made = torch_prune.l1_unstructured(torch_prune.random_unstructured(linear(), "weight", 4), "weight", 4)
    layer = pickle.loads(pickle.dumps(made))
    prune.ln_structured(layer, "weight", 1, 2, 0)
    assert len(next(iter(layer._forward_pre_hooks.values()))) == 3
    assert not prune.remove(layer, "weight").weight.grad_fn
    layer = pickle.loads(pickle.dumps(made))
    assert zeros(prune.remove(layer, "weight").weight) == 8
    assert not prune.is_pruned(layer)


def test_torch_can_prune_and_remove_what_we_pruned():
    for rounds in (0, 1, 2):
        layer = linear()
        weight = layer.weight
        prune.l1_unstructured(layer, "weight", 6)
        for _ in range(rounds):
            torch_prune.l1_unstructured(layer, "weight", 6)
        assert zeros(layer.weight_mask) == zeros(layer.weight) == 6 + 6 * rounds
        layer(torch.randn(2, 6)).sum().backward()
        assert torch_prune.is_pruned(layer)
        torch_prune.remove(layer, "weight")
        assert layer.weight is weight
        assert zeros(weight) == 6 + 6 * rounds
        assert type(layer) is nn.Linear


def test_lightnings_way_to_make_pruning_permanent():
    net = nn.Sequential(linear(), nn.ReLU(), linear(3, 4))
    for layer in (net[0], net[2]):
        prune.l1_unstructured(layer, "weight", 0.5)
    prune.global_unstructured([(net[0], "weight"), (net[2], "weight")], prune.L1Unstructured, amount=4)
    for module in net.modules():
        for key in list(module._forward_pre_hooks):
            hook = module._forward_pre_hooks[key]
            if isinstance(hook, torch_prune.BasePruningMethod):
                hook.remove(module)
                del module._forward_pre_hooks[key]
    assert list(net.state_dict()) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert not prune.is_pruned(net)


# Row 1.


class NoType(prune.BasePruningMethod):
    def compute_mask(self, t, default_mask):
        return default_mask


class Broken(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        raise RuntimeError("broken")


class BrokenProduct(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        return default_mask

    def apply_mask(self, module):
        raise RuntimeError("broken")


class Returns(prune.BasePruningMethod):
    PRUNING_TYPE = "global"

    def __init__(self, mask):
        self.mask = mask

    def compute_mask(self, t, default_mask):
        return self.mask


FAILING: dict[str, tuple[Callable[[nn.Module], Any], type[Exception]]] = {
    "negative": (lambda m: prune.l1_unstructured(m, "weight", -1), ValueError),
    "fraction above 1": (lambda m: prune.random_unstructured(m, "weight", 1.5), ValueError),
    "not a number": (lambda m: prune.l1_unstructured(m, "weight", "much"), TypeError),
    "NaN": (lambda m: prune.l1_unstructured(m, "weight", float("nan")), ValueError),
    "too large": (lambda m: prune.l1_unstructured(m, "weight", 10_000), ValueError),
    "no such name": (lambda m: prune.l1_unstructured(m, "wait", 1), AttributeError),
    "shape of scores": (lambda m: prune.l1_unstructured(m, "weight", 1, torch.ones(3)), AssertionError),
    "NaN in scores": (lambda m: prune.l1_unstructured(m, "weight", 1, torch.full((4, 6), torch.nan)), ValueError),
    "dim": (lambda m: prune.ln_structured(m, "weight", 1, 2, 5), IndexError),
    "negative dim": (lambda m: prune.ln_structured(m, "weight", 1, 2, -5), IndexError),
    "one axis": (lambda m: prune.random_structured(m, "bias", 1, 0), ValueError),
    "mask of another shape": (lambda m: prune.custom_from_mask(m, "weight", torch.ones(1, 6)), ValueError),
    "mask of other values": (lambda m: prune.custom_from_mask(m, "weight", torch.full((4, 6), 0.5)), ValueError),
    "mask that is none": (lambda m: prune.custom_from_mask(m, "weight", None), TypeError),
    "broken method": (lambda m: Broken.apply(m, "weight"), RuntimeError),
    "method that broadcasts": (lambda m: Returns.apply(m, "weight", torch.ones(1)), ValueError),
    "method with soft mask": (lambda m: Returns.apply(m, "weight", torch.full((4, 6), 0.5)), ValueError),
    "global amount": (
        lambda m: prune.global_unstructured([(m, "weight"), (m, "bias")], prune.L1Unstructured, amount=99), ValueError,
    ),
    "global, second name wrong": (
        lambda m: prune.global_unstructured([(m, "weight"), (m, "wait")], prune.L1Unstructured, amount=1),
        AttributeError,
    ),
    "global structured": (
        lambda m: prune.global_unstructured([(m, "weight")], prune.LnStructured, amount=1, n=2), TypeError,
    ),
    "global, broken method": (lambda m: prune.global_unstructured([(m, "weight")], Broken), RuntimeError),
    "global without amount": (lambda m: prune.global_unstructured([(m, "weight")], prune.L1Unstructured), TypeError),
}  # fmt: skip


@pytest.mark.parametrize("label", FAILING)
@pytest.mark.parametrize("earlier", [0, 1, 2])
@pytest.mark.parametrize("by", [prune, torch_prune], ids=["ours", "torchs"])
def test_row_01_a_failing_call_changes_nothing(label, earlier, by):
    call, error = FAILING[label]
    layer = linear()
    layer.register_forward_pre_hook(lambda module, inputs: None)
    for _ in range(earlier):
        by.l1_unstructured(layer, "weight", 2)
    before = snapshot(layer)
    with pytest.raises(error):
        call(layer)
    assert_unchanged(before, layer)


@pytest.mark.parametrize("method", [NoType, BrokenProduct])
def test_row_01_a_failing_method_on_a_pruned_module_changes_nothing(method):
    layer = prune.identity(linear(), "weight") if method is NoType else linear()
    before = snapshot(layer)
    with pytest.raises((AttributeError, RuntimeError)):
        method.apply(layer, "weight")
    assert_unchanged(before, layer)


def test_row_01_global_is_all_or_nothing_even_if_a_module_refuses():
    class Stubborn(nn.Linear):
        def register_buffer(self, name, tensor, persistent=True):
            raise RuntimeError("no buffers here")

    net = nn.Sequential(linear(), prune.identity(linear(), "weight"), Stubborn(3, 3), nn.LSTM(2, 2))
    pairs = [(net[0], "weight"), (net[1], "weight"), (net[3], "weight_hh_l0"), (net[2], "weight")]
    before = snapshot(net)
    with pytest.raises(RuntimeError, match="no buffers"):
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.05)
    assert_unchanged(before, net)


def test_row_01_remove_changes_nothing_if_the_module_refuses():
    class Closed(nn.Linear):
        def __setattr__(self, name, value):
            if name == "weight" and "closed" in self.__dict__:
                raise RuntimeError("closed")
            super().__setattr__(name, value)

    layer = prune.l1_unstructured(Closed(3, 3), "weight", amount=4)
    layer.closed = True
    cls, hooks = type(layer), list(layer._forward_pre_hooks)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match="closed"):
        prune.remove(layer, "weight")
    assert type(layer) is cls
    assert list(layer._forward_pre_hooks) == hooks
    assert list(before) == list(layer.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_row_01_several_hooks_for_one_tensor_are_refused():
    layer = prune.identity(linear(), "weight")
    second = prune.L1Unstructured(1)
    second._tensor_name = "weight"
    layer.register_forward_pre_hook(second)
    before = snapshot(layer)
    with pytest.raises(AssertionError, match="Avoid adding multiple pruning hooks"):
        prune.l1_unstructured(layer, "weight", 1)
    assert_unchanged(before, layer)


# Row 2.


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


# Row 3.


def test_row_03_attention_trains_and_uses_what_was_loaded():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2)
    prune.l1_unstructured(attention.out_proj, "weight", 0.5)
    prune.l1_unstructured(attention, "in_proj_weight", 0.5)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    q = torch.randn(3, 1, 4)
    outputs = []
    for _ in range(3):
        out = attention(q, q, q)[0]
        outputs.append(out.detach())
        out.square().sum().backward()
        optimizer.step()
    assert not torch.equal(outputs[0], outputs[1])
    assert attention.out_proj.weight_orig.grad is not None
    state = {key: value.clone() for key, value in attention.state_dict().items()}
    other = nn.MultiheadAttention(4, 2)
    prune.identity(other.out_proj, "weight")
    prune.identity(other, "in_proj_weight")
    other.load_state_dict(state)
    assert torch.equal(other(q, q, q)[0], attention(q, q, q)[0])


def test_row_03_fused_encoder_layer_and_direct_forward():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    dense = copy.deepcopy(layer)
    for module, name in (
        (layer.linear1, "weight"),
        (layer.self_attn, "in_proj_weight"),
        (layer.self_attn.out_proj, "weight"),
    ):
        prune.l1_unstructured(module, name, 0.5)
    for source, target in ((layer.linear1, dense.linear1), (layer.self_attn.out_proj, dense.self_attn.out_proj)):
        target.weight.data = source.weight.detach()
    dense.self_attn.in_proj_weight.data = layer.self_attn.in_proj_weight.detach()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        assert torch.allclose(layer(x), dense(x), atol=1e-6)
    single = prune.l1_unstructured(linear(), "weight", 8)
    for _ in range(2):
        single.forward(torch.randn(2, 6)).sum().backward()
    single.weight_orig.data.fill_(2.0)
    assert torch.allclose(single.forward(torch.eye(6)) - single.bias, 2 * single.weight_mask.t(), atol=1e-5)


# Row 4.


def tied() -> tuple[nn.Linear, nn.Linear]:
    one, other = linear(), linear()
    other.weight = one.weight
    return one, other


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


# Row 5.


def test_row_05_rounds_of_global_pruning_leave_memory_and_file_flat():
    def size() -> int:
        buffer = io.BytesIO()
        torch.save(net, buffer)
        return buffer.getbuffer().nbytes

    net = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    pairs = [(net[0], "weight"), (net[1], "weight")]
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.1)
    first = size()
    for _ in range(19):
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.1)
    assert size() < 1.1 * first
    for layer in net:
        assert layer.weight_mask.untyped_storage().nbytes() == layer.weight_mask.nbytes
        (container,) = layer._forward_pre_hooks.values()
        assert len(container) == 20
        assert [method.mask is None for method in container] == [True] * 19 + [False]


# Row 6.


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


# Row 7.


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_row_07_what_is_masked_is_exactly_zero(value):
    layer = linear()
    mask = torch.ones(4, 6)
    mask[1, 2] = mask[0, 0] = 0
    layer.weight.data[1, 2] = value
    layer.weight.data[3, 3] = value
    prune.custom_from_mask(layer, "weight", mask)
    assert layer.weight[1, 2] == 0
    assert layer.weight[3, 3].equal(torch.tensor(value)) or value != value
    layer(torch.randn(2, 6)).sum().backward()
    assert layer.weight_orig.grad[1, 2] == 0
    prune.remove(layer, "weight")
    assert layer.weight[1, 2] == layer.weight[0, 0] == 0
    t = torch.tensor([value, 1.0])
    assert torch.equal(
        prune.L1Unstructured(1).prune(t, importance_scores=torch.tensor([0.0, 1.0])), torch.tensor([0.0, 1])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("values", [[torch.inf, 1.0], [torch.inf, -torch.inf], [torch.nan, 1.0], [60000.0, 60000.0]])
def test_row_07_zeros_are_exact_wherever_the_infinities_are(dtype, values):
    layer = nn.Linear(2, 4).to(dtype)
    layer.weight.data = torch.tensor(values).expand(4, 2).to(dtype).contiguous()
    mask = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    prune.custom_from_mask(layer, "weight", mask)
    assert torch.equal(layer.weight[mask == 0], torch.zeros(4, dtype=dtype))
    kept = layer.weight_orig[mask == 1]
    assert torch.equal(layer.weight[mask == 1].nan_to_num(7.0), kept.nan_to_num(7.0))


def test_row_07_a_mask_that_the_user_made_soft_is_still_a_factor():
    layer = prune.identity(linear(), "weight")
    layer.weight_mask[0] = 0.5
    layer.weight_mask[1] = 0
    assert torch.equal(layer.weight[0], layer.weight_orig[0] / 2)
    assert torch.equal(layer.weight[1], torch.zeros(6))


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


# Row 8.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_row_08_norms_of_half_precision_do_not_overflow(dtype):
    layer = nn.Linear(64, 3).to(dtype)
    layer.weight.data = torch.tensor([[1.0], [300.0], [2.0]]).expand(3, 64).to(dtype).contiguous()
    prune.ln_structured(layer, "weight", 2, 2, 0)
    assert layer.weight_mask[:, 0].tolist() == [0, 1, 0]
    assert layer.weight_mask.dtype == dtype


# Row 9.


def after_training(net: nn.Module, *inputs: Tensor) -> nn.Module:
    out = net(*inputs)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    return net


PRUNED = {
    "linear": lambda: after_training(prune.l1_unstructured(linear(), "weight", 0.5), torch.randn(2, 6)),
    "conv": lambda: after_training(prune.ln_structured(nn.Conv2d(2, 4, 3), "weight", 2, 2, 0), torch.randn(1, 2, 5, 5)),
    "lstm": lambda: after_training(prune.l1_unstructured(nn.LSTM(2, 3), "weight_hh_l0", 0.5), torch.randn(4, 1, 2)),
    "gru": lambda: after_training(prune.l1_unstructured(nn.GRU(2, 3), "weight_ih_l0", 0.5), torch.randn(4, 1, 2)),
}


def through_file(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "oldest pickle": lambda module: pickle.loads(pickle.dumps(module, protocol=0)),
    "torch.save": through_file,
    "averaged": lambda module: torch.optim.swa_utils.AveragedModel(module).module,
    "multiprocessing": lambda module: pickle.loads(bytes(ForkingPickler.dumps(module))),
}


@pytest.mark.parametrize("kind", PRUNED)
@pytest.mark.parametrize("how", COPIES)
def test_row_09_copies_of_a_pruned_module_work(kind, how):
    torch.manual_seed(0)
    module = PRUNED[kind]()
    duplicate = COPIES[how](module)
    assert type(duplicate) is type(module)
    (name,) = [hook._tensor_name for hook in duplicate._forward_pre_hooks.values()]
    assert torch.equal(getattr(duplicate, name), getattr(module, name))
    before = getattr(module, name).detach()
    prune.l1_unstructured(duplicate, name, 2)
    assert torch.equal(getattr(module, name), before)
    prune.remove(duplicate, name)
    assert type(duplicate) is type(module).__bases__[0]
    assert prune.is_pruned(module)


def test_row_09_transformer_encoder_clones_a_pruned_layer():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    prune.l1_unstructured(layer.linear1, "weight", 0.5)
    x = torch.randn(1, 2, 4)
    layer(x).sum().backward()
    encoder = nn.TransformerEncoder(layer, 2)
    encoder(x).sum().backward()
    assert encoder.layers[0].linear1.weight_orig is not encoder.layers[1].linear1.weight_orig
    encoder.layers[0].linear1.weight_orig.data.zero_()
    assert encoder.layers[1].linear1.weight.count_nonzero() > 0


# Row 10.


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


# Row 11.


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


# Row 12.


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


# Row 13.


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


# Row 14.


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


# Row 15.


def test_row_15_pruning_again_keeps_the_place_of_the_hook():
    layer = linear()
    prune.l1_unstructured(layer, "weight", 2)
    seen = []
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(int(module.weight.count_nonzero())))
    order = list(layer._forward_pre_hooks)
    prune.l1_unstructured(layer, "weight", 2)
    prune.l1_unstructured(layer, "weight", 2)
    assert list(layer._forward_pre_hooks) == order
    layer(torch.randn(1, 6))
    assert seen == [18]


# Row 16.


def test_row_16_functional_transforms_leave_an_ordinary_tensor():
    layer = prune.l1_unstructured(linear(), "weight", 8)
    parameters = {name: value.detach() for name, value in layer.named_parameters()}
    x = torch.randn(3, 6)

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    gradients = torch.func.grad(loss)(parameters)
    assert torch.equal(gradients["weight_orig"], gradients["weight_orig"] * layer.weight_mask)
    assert type(layer.weight) is Tensor
    assert torch.equal(layer.weight, layer.weight_mask * layer.weight_orig)
    layer(x).square().sum().backward()
    assert torch.allclose(layer.weight_orig.grad, gradients["weight_orig"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        tangents = {name: torch.ones_like(value) for name, value in parameters.items()}
        _, slope = torch.func.jvp(loss, (parameters,), (tangents,))
    assert torch.allclose(slope, sum(gradient.sum() for gradient in gradients.values()), rtol=1e-4)
    batched = torch.func.vmap(lambda w: torch.func.functional_call(layer, {"weight_orig": w}, (x,)))
    assert batched(torch.randn(5, 4, 6)).shape == (5, 3, 4)


def test_row_16_removing_under_inference_mode_leaves_a_trainable_parameter():
    layer = linear()
    with torch.inference_mode():
        prune.l1_unstructured(layer, "weight", 8)
        layer(torch.randn(1, 6))
        prune.remove(layer, "weight")
    assert not layer.weight.is_inference()
    layer(torch.randn(1, 6)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    layer = linear()
    with torch.inference_mode():
        prune.l1_unstructured(layer, "weight", 8)
    layer(torch.randn(1, 6)).sum().backward()
    assert layer.weight_orig.grad is not None


@pytest.mark.parametrize("inside", [True, False])
def test_row_16_a_module_made_under_inference_mode_computes_after_remove(inside):
    with torch.inference_mode():
        layer = nn.Linear(3, 2)
    with torch.inference_mode(inside), torch.no_grad():
        prune.l1_unstructured(layer, "weight", amount=2)
        expected = layer(torch.ones(1, 3))
        prune.remove(layer, "weight")
        assert torch.equal(layer(torch.ones(1, 3)), expected)


# Row 18.


def test_row_18_an_emptied_layer_is_named():
    with pytest.warns(UserWarning, match=r"Nothing is left of Linear\.weight") as record:
        prune.l1_unstructured(linear(), "weight", 1.0)
    assert record[0].filename == __file__
    weak, strong = nn.Linear(6, 4), linear()
    weak.weight.data.mul_(1e-6)
    with pytest.warns(UserWarning, match=r"Nothing is left of Linear\.weight \(parameters\[1\]\): every") as record:
        prune.global_unstructured([(strong, "weight"), (weak, "weight")], prune.L1Unstructured, amount=0.5)
    assert record[0].filename == __file__
    prune.global_unstructured([(strong, "weight"), (weak, "weight")], prune.L1Unstructured, amount=0.5)  # said once


def test_row_18_a_warning_made_an_error_changes_nothing():
    layer = linear()
    before = snapshot(layer)
    with pytest.raises(UserWarning, match="Nothing is left"):
        prune.random_unstructured(layer, "weight", 1.0)
    assert_unchanged(before, layer)


def test_row_18_ordinary_amounts_pass_without_a_word():
    for amount in (0, 0.5, 0.9, 23):
        prune.l1_unstructured(linear(), "weight", amount)
        prune.random_unstructured(linear(), "weight", amount)


# Row 19.


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


# What must not regress.


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    prune.l1_unstructured(net[0], "weight", 0.5)
    prune.ln_structured(net[2], "weight", 1, 2, 1)
    prune.l1_unstructured(net[2], "weight", 2)
    return net


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph(backend):
    net, x = two_layers(), torch.randn(2, 6)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    out = compiled(x)
    assert torch.equal(out, net(x))
    out.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    net(x).square().sum().backward()
    for gradient, parameter in zip(gradients, net.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)
    with torch.no_grad():
        net[0].weight_orig.mul_(2)
        net[0].weight_orig[0, 0] = torch.inf
        net[0].weight_mask[0, 0] = 0
    assert torch.equal(compiled(x), net(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_exports(strict):
    net, x = two_layers(), torch.randn(2, 6)
    program = torch.export.export(net, (x,), strict=strict)
    assert torch.equal(program.module()(x), net(x))
    assert set(program.state_dict) == set(net.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traces():
    net, x = two_layers(), torch.randn(2, 6)
    traced = torch.jit.trace(net, x)
    assert torch.equal(traced(x), net(x))
    assert set(traced.state_dict()) == set(net.state_dict())
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    assert torch.equal(torch.jit.load(buffer)(x), net(x))
    rnn, steps = prune.l1_unstructured(nn.LSTM(2, 3), "weight_hh_l0", 0.5), torch.randn(4, 1, 2)
    assert torch.equal(torch.jit.trace(rnn, steps)(steps)[0], rnn(steps)[0])


@pytest.mark.filterwarnings("ignore")
def test_exports_to_onnx():
    onnx_reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    net, x = two_layers().eval(), torch.randn(2, 6)
    program = torch.onnx.export(net, (x,), dynamo=True, verbose=False)
    (out,) = onnx_reference.ReferenceEvaluator(program.model_proto).run(
        None, {program.model_proto.graph.input[0].name: x.numpy()}
    )
    assert torch.allclose(torch.from_numpy(out), net(x).detach(), atol=1e-5)


@pytest.mark.parametrize("make", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0"])
def test_recurrent_networks_train(make, name):
    torch.manual_seed(0)
    rnn = make(2, 3)
    parameter = getattr(rnn, name)
    prune.random_unstructured(rnn, name, 0.5)
    optimizer = torch.optim.SGD(rnn.parameters(), lr=0.02)
    x = torch.randn(5, 2, 2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (rnn(x)[0] - 0.3).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    mask = getattr(rnn, name + "_mask")
    assert torch.equal(parameter.grad, parameter.grad * mask)
    out = rnn(x)[0]
    rnn.to(torch.float64).to(torch.float32)
    assert torch.allclose(rnn(x)[0], out)
    prune.remove(rnn, name)
    assert type(rnn) is make
    assert all(isinstance(weight, nn.Parameter) for weight in rnn._flat_weights)
    assert torch.allclose(rnn(x)[0], out)


def counted_products(monkeypatch) -> list[Tensor]:
    computed: list[Tensor] = []

    def counted(orig, mask):
        computed.append(masked(orig, mask))
        return computed[-1]

    monkeypatch.setattr(masked_weight, "masked", counted)
    return computed


def recurrent() -> tuple[nn.Module, tuple[Tensor, ...], list[str]]:
    return nn.LSTM(4, 4), (torch.randn(2, 1, 4),), ["weight_ih_l0", "weight_hh_l0"]


def attention() -> tuple[nn.Module, tuple[Tensor, ...], list[str]]:
    x = torch.randn(2, 3, 4)
    return nn.MultiheadAttention(4, 2, batch_first=True), (x, x, x), ["in_proj_weight", "in_proj_bias"]


@pytest.mark.parametrize("make", [recurrent, attention])
@pytest.mark.parametrize("train", [True, False])
def test_forwards_that_read_a_weight_repeatedly_compute_its_product_once(make, train, monkeypatch):
    torch.manual_seed(0)
    module, inputs, names = make()
    module.train(train)
    for name in names:
        prune.l1_unstructured(module, name, amount=0.5)
    computed = counted_products(monkeypatch)
    with torch.set_grad_enabled(train):
        for forwards in (1, 2):
            module(*inputs)
            assert len(computed) == forwards * len(names)
            assert len(masked_weight._forward.__dict__) == 0  # nothing outlives the call


@pytest.mark.parametrize("make", [recurrent, attention])
def test_a_forward_that_fails_leaves_nothing_behind_that_could_be_read(make):
    torch.manual_seed(0)
    module, inputs, names = make()
    prune.l1_unstructured(module, names[0], amount=0.5)
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        module(*(x.double() for x in inputs))
    getattr(module, names[0] + "_orig").data.fill_(3.0)
    assert torch.equal(getattr(module, names[0]), 3 * getattr(module, names[0] + "_mask"))
    with torch.no_grad():
        assert getattr(module, names[0]).grad_fn is None
    assert getattr(module, names[0]).grad_fn is not None


def test_what_a_forward_shares_is_seen_by_its_own_thread_and_module_only(monkeypatch):
    torch.manual_seed(0)
    module, inputs, (name, _) = attention()
    other, other_inputs, _ = attention()
    for each in (module, other):
        prune.l1_unstructured(each, name, amount=0.5)
    forward, seen = nn.functional.multi_head_attention_forward, {}

    def watched(*args, **kwargs):
        if not seen:
            seen["here"] = [module.in_proj_weight, module.in_proj_weight]
            thread = threading.Thread(target=lambda: seen.update(there=module.in_proj_weight))
            thread.start()
            thread.join()
            other(*other_inputs)
            seen["other"] = [other.in_proj_weight, other.in_proj_weight]
            seen["after"] = module.in_proj_weight
        return forward(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "multi_head_attention_forward", watched)
    module(*inputs)
    assert seen["here"][0] is seen["here"][1] is seen["after"]
    assert seen["there"] is not seen["here"][0]
    assert seen["other"][0] is not seen["other"][1]
    assert module.in_proj_weight is not module.in_proj_weight


def test_where_code_of_others_runs_in_a_forward_every_read_computes(monkeypatch):
    """A parametrization may write to what was read before it."""

    class Growing(nn.Module):
        def forward(self, bias):
            with torch.no_grad():
                module.in_proj_weight_orig.add_(1.0)
            return bias

    torch.manual_seed(0)
    module, inputs, (name, bias) = attention()
    prune.l1_unstructured(module, name, amount=0.5)
    parametrize.register_parametrization(module, bias, Growing(), unsafe=True)
    seen, forward = [], nn.functional.multi_head_attention_forward

    def watched(*args, **kwargs):
        seen.append(module.in_proj_weight)
        return forward(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "multi_head_attention_forward", watched)
    module(*inputs)
    assert torch.equal(seen[0], module.in_proj_weight_orig * module.in_proj_weight_mask)
    assert "_secateur_own" not in type(module).__dict__


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [True, False])
def test_a_read_costs_one_product_one_sum_and_no_lookup(grad, monkeypatch):
    """The original multiplies once, looks two names up and assigns a third; that is all there is to be as fast."""
    layer = prune.l1_unstructured(linear(), "weight", 8)
    looked_up, find = [], nn.Module.__getattr__

    def watched(module, name):
        looked_up.append(name)
        return find(module, name)

    monkeypatch.setattr(nn.Module, "__getattr__", watched)
    with torch.set_grad_enabled(grad), Operations() as operations:
        weight = layer.weight
    assert looked_up == []
    assert sorted(name for name in operations.names if name != "detach") == ["_local_scalar_dense", "mul", "sum"]
    assert weight.requires_grad == grad


def orig_of(module: nn.Module, name: str) -> Any:
    return getattr(module, name + "_orig")


def all_one_more(module: nn.Module) -> dict[str, Tensor]:
    return {key: value + 1 for key, value in module.state_dict().items()}


WRITES: dict[str, Callable[[nn.Module, str], object]] = {
    "data": lambda m, name: orig_of(m, name).data.mul_(2),
    "data replaced": lambda m, name: setattr(orig_of(m, name), "data", orig_of(m, name).data * 2),
    "numpy": lambda m, name: np.copyto(orig_of(m, name).detach().numpy(), 3.0),
    "mask through data": lambda m, name: getattr(m, name + "_mask").data.mul_(0.5),
    "mask replaced": lambda m, name: setattr(m, name + "_mask", torch.zeros_like(orig_of(m, name))),
    "parameter replaced": lambda m, name: setattr(m, name + "_orig", nn.Parameter(orig_of(m, name).detach() + 1)),
    "step": lambda m, name: torch.optim.SGD(m.parameters(), lr=1.0).step(),
    "load": lambda m, name: m.load_state_dict(all_one_more(m)),
    "load by assigning": lambda m, name: m.load_state_dict(all_one_more(m), assign=True),
    "to": lambda m, name: m.to(torch.float64),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", [lambda: (linear(), (torch.randn(2, 6),), ["weight"]), recurrent, attention])
def test_no_write_leaves_a_product_of_before(make, write):
    torch.manual_seed(0)
    module, inputs, names = make()
    name = names[0]
    prune.l1_unstructured(module, name, amount=0.5)
    out = module(*inputs)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    before = getattr(module, name).detach().clone()
    WRITES[write](module, name)
    now = getattr(module, name)
    assert torch.equal(now, orig_of(module, name) * getattr(module, name + "_mask"))
    assert now.dtype != before.dtype or not torch.equal(now, before)
    copied = copy.deepcopy(module)
    assert torch.equal(getattr(copied, name), now)
    inputs = tuple(x.to(now.dtype) for x in inputs) if write == "to" else inputs
    dense = copy.deepcopy(module)
    prune.remove(dense, name)
    results = [each(*inputs) for each in (module, copied, dense)]
    for result in results[:2]:
        pair = [r[0] if isinstance(r, tuple) else r for r in (result, results[2])]
        assert torch.allclose(*pair, atol=1e-6)


def test_functional_calls_and_vmap_see_what_they_are_given():
    torch.manual_seed(0)
    module, inputs, (name, _) = attention()
    prune.l1_unstructured(module, name, amount=0.5)
    state = {key: value.detach() for key, value in (*module.named_parameters(), *module.named_buffers())}
    with torch.no_grad():
        own = torch.func.functional_call(module, state, inputs)[0]
        doubled = {**state, name + "_orig": 2 * state[name + "_orig"]}
        both = {key: torch.stack([state[key], doubled[key]]) for key in state}
        other = torch.func.functional_call(module, doubled, inputs)[0]
        batched = torch.func.vmap(lambda each: torch.func.functional_call(module, each, inputs)[0])(both)
    assert torch.allclose(own, module(*inputs)[0], atol=1e-6)
    assert not torch.allclose(own, other, atol=1e-3)
    assert torch.allclose(batched, torch.stack([own, other]), atol=1e-6)


def test_a_parametrized_original_is_read_through_its_parametrization():
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    layer = prune.l1_unstructured(linear(), "weight", 8)
    before = layer.weight.detach()
    parametrize.register_parametrization(layer, "weight_orig", Doubled())
    assert torch.equal(layer.weight, 2 * before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["compile", "export", "trace"])
def test_pruned_attention_compiles_exports_and_traces(how):
    torch.manual_seed(0)
    module, inputs, names = attention()
    for name in names:
        prune.l1_unstructured(module, name, amount=0.5)
    torch._dynamo.reset()
    call: Any
    if how == "compile":
        call = torch.compile(module, fullgraph=True, backend="aot_eager")
    elif how == "export":
        call = torch.export.export(module, inputs).module()
    else:
        call = torch.jit.trace(module, inputs)
    assert torch.allclose(call(*inputs)[0], module(*inputs)[0], atol=1e-6)


def test_checkpointing_and_autocast():
    net, x = two_layers(), torch.randn(2, 6)
    for reentrant in (False, True):
        net.zero_grad()
        checkpoint(net, x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
        gradient = net[0].weight_orig.grad.clone()
        net.zero_grad()
        net(x).sum().backward()
        assert torch.equal(gradient, net[0].weight_orig.grad)
    with torch.autocast("cpu", torch.bfloat16):
        out = net(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert net[0].weight_orig.grad.dtype == torch.float32


def test_sparse_gradients_of_embeddings():
    table = nn.Embedding(9, 3, sparse=True)
    prune.random_unstructured(table, "weight", 0.5)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([1, 4])).sum().backward()
    gradient = table.weight_orig.grad
    assert gradient.is_sparse
    assert torch.equal(gradient.to_dense()[1], table.weight_mask[1])
    optimizer.step()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_made_before_pruning_go_on(make):
    layer = linear()
    optimizer = make(layer.parameters(), lr=0.1)
    x = torch.randn(8, 6)
    for action in (
        lambda: None,
        lambda: prune.l1_unstructured(layer, "weight", 0.5),
        lambda: prune.l1_unstructured(layer, "weight", 0.5),
        lambda: prune.remove(layer, "weight"),
    ):
        action()
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        assert not torch.equal(layer.weight, before)
        if prune.is_pruned(layer):
            assert torch.equal(layer.weight == 0, layer.weight_mask == 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_and_quantization_ask_to_remove_first():
    net = two_layers()
    with pytest.raises(RuntimeError, match=r"prune.remove on weight first, or use torch.jit.trace"):
        torch.jit.script(net)
    before = snapshot(net)
    with pytest.raises(RuntimeError, match=r"quantization: call prune.remove on weight first"):
        torch.ao.quantization.quantize_dynamic(net)
    assert_unchanged(before, net)
    for layer in (net[0], net[2]):
        prune.remove(layer, "weight")
    torch.jit.script(net)


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


def test_replicas_of_data_parallel():
    layer = prune.l1_unstructured(linear(), "weight", 0.5)
    replica = layer._replicate_for_data_parallel()
    replica.weight_orig = (layer.weight_orig * 2).detach()
    replica.weight_mask, replica.bias = layer.weight_mask, layer.bias
    assert torch.equal(replica.weight, 2 * layer.weight)


def test_random_programs_draw_as_torch_does():
    for call in (
        lambda p, m: p.random_unstructured(m, "weight", 0.4),
        lambda p, m: p.random_structured(m, "weight", 0.4, 1),
        lambda p, m: p.random_unstructured(m, "weight", 0.001),
        lambda p, m: p.global_unstructured([(m, "weight"), (m, "bias")], p.RandomUnstructured, amount=0.4),
    ):
        masks = []
        for library in (torch_prune, prune):
            layer = linear()
            torch.manual_seed(11)
            call(library, layer)
            call(library, layer)
            masks.append((layer.weight_mask, torch.rand(1)))
        for left, right in zip(*masks, strict=True):
            assert torch.equal(left, right)


def test_nothing_warns_when_pruning_in_a_loop():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = two_layers()
        for _ in range(3):
            prune.global_unstructured([(net[0], "weight"), (net[2], "weight")], prune.L1Unstructured, amount=0.2)
            net(torch.randn(2, 6)).sum().backward()


def test_row_21_an_amount_of_true_counts_one():
    assert zeros(prune.l1_unstructured(linear(), "weight", True).weight_mask) == 1


def test_row_24_each_read_is_a_new_tensor():
    layer = prune.l1_unstructured(linear(), "weight", 6)
    assert layer.weight is not layer.weight
    layer(torch.randn(2, 6)).sum().backward()
    assert layer.weight.grad_fn is not None
    assert layer.weight_orig.grad.count_nonzero() == 18


def test_the_code_in_the_document_runs():
    document = (pathlib.Path(__file__).parents[2] / "docs" / "drop-in.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(block, namespace)


def test_every_row_of_the_document_names_tests_that_exist():
    folder = pathlib.Path(__file__).parent
    document = (folder.parents[1] / "docs" / "drop-in.md").read_text(encoding="utf-8")
    tests = "".join((folder / name).read_text(encoding="utf-8") for name in ("test_drop_in.py", "test_distributed.py"))
    rows = re.findall(r"^\| (\d+) \|.*\| `(test_\w+)\*` \|$", document, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 25))
    for _, prefix in rows:
        assert f"def {prefix}" in tests, prefix


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("how", ["l1_unstructured", "random_unstructured", "identity", "global"])
def test_a_scalar_parameter_is_pruned_as_with_torch(how, times):
    states = []
    for library in (torch_prune, prune):
        module = nn.Module()
        module.scale = nn.Parameter(torch.tensor(3.0))
        for _ in range(times):
            if how == "global":
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


def test_an_integer_beyond_floats_is_too_large_an_amount():
    for library in (torch_prune, prune):
        with pytest.raises(ValueError, match="should be smaller than the number of parameters"):
            library.l1_unstructured(nn.Linear(2, 2), "weight", amount=10**400)


def test_a_norm_of_order_none_is_the_euclidean_one():
    torch.manual_seed(0)
    layer = nn.Linear(4, 5)
    expected = torch_prune.ln_structured(copy.deepcopy(layer), "weight", amount=2, n=None, dim=0).weight_mask
    assert torch.equal(prune.ln_structured(layer, "weight", amount=2, n=None, dim=0).weight_mask, expected)
