"""All of a call happens or none of it; what a module looks like in between and after."""

from __future__ import annotations

import io
import linecache
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from secateur import prune
from secateur.prune import changes, masked_weight
from support.pruned import Returns, assert_unchanged, linear, snapshot, tied


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


# Whatever breaks a call, and wherever: every line of the files that change modules is a step.


def networks() -> nn.ModuleList:
    """A plain layer, one in a container of global rounds, one that torch pruned, a tie, an LSTM that is pruned."""
    torch.manual_seed(0)
    model = nn.ModuleList([linear(), linear(), linear(), *tied(), nn.LSTM(2, 2)])
    for _ in range(2):
        prune.global_unstructured([(model[1], "weight")], prune.L1Unstructured, amount=2)
    for _ in range(2):
        torch_prune.l1_unstructured(model[2], "weight", 2)
    prune.l1_unstructured(model[5], "weight_hh_l0", 2)
    return model


def two(model: nn.ModuleList) -> list[tuple[nn.Module, str]]:
    return [(model[1], "weight"), (model[5], "weight_hh_l0")]


def several_pruned() -> nn.ModuleList:
    model = networks()
    prune.global_unstructured([*two(model), (model[3], "weight")], prune.L1Unstructured, amount=8)
    return model


class LeavesItself(prune.L1Unstructured):
    def remove(self, module):
        super().remove(module)


def described(model: nn.Module) -> Any:
    """What can be compared between two models that were made alike."""
    return [
        (
            [type(module).__name__ for module in model.modules()],
            [getattr(type(module), "_secateur_reads", None) for module in model.modules()],
            [
                [
                    (type(each).__name__, getattr(each, "_tensor_name", None))
                    for each in module._forward_pre_hooks.values()
                ]
                for module in model.modules()
            ],
            list(model.state_dict()),
        ),
        list(model.state_dict().values()),
    ]


def same(left: Any, right: Any) -> bool:
    return left[0] == right[0] and all(torch.equal(one, two) for one, two in zip(left[1], right[1], strict=True))


def by_its_own_method() -> nn.ModuleList:
    torch.manual_seed(0)
    layer = linear()
    LeavesItself.apply(layer, "weight", 3)
    return nn.ModuleList([layer])


CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "one": (networks, lambda model: prune.l1_unstructured(model[0], "weight", 3)),
    "again": (networks, lambda model: prune.l1_unstructured(model[5], "weight_hh_l0", 3)),
    "into a container": (networks, lambda model: prune.l1_unstructured(model[1], "weight", 3)),
    "on torch's": (networks, lambda model: prune.l1_unstructured(model[2], "weight", 3)),
    "a tie": (networks, lambda model: prune.l1_unstructured(model[3], "weight", 3)),
    "overall": (networks, lambda model: prune.global_unstructured(two(model), prune.L1Unstructured, amount=12)),
    "from masks": (
        networks,
        lambda model: prune.custom_from_masks(
            {(module, name): getattr(module, name).detach() > 0 for module, name in two(model)}
        ),
    ),
    "remove": (several_pruned, lambda model: prune.remove(model[1], "weight")),
    "remove a tie": (several_pruned, lambda model: prune.remove(model[3], "weight")),
    "remove one of two": (several_pruned, lambda model: prune.remove(model[5], "weight_hh_l0")),
    "remove all": (several_pruned, lambda model: prune.remove_all(two(model))),
    "remove by a method of one's own": (
        by_its_own_method,
        lambda model: prune.remove(model[0], "weight"),
    ),
}


def broken_at(step: int, call: Callable[[], Any]) -> bool:
    """Whether a call has so many steps; Ctrl-C comes at that one."""
    left, files, tracing = step, {changes.__file__, masked_weight.__file__}, sys.gettrace()

    def trace(frame: Any, event: str, _argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        # a context is left at the line of its with, and Python protects nothing there
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(
            "with"
        ):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(tracing)
    return False


@pytest.mark.parametrize("label", CALLS)
def test_a_call_that_is_broken_into_at_any_step_has_done_all_or_nothing(label):
    make, call = CALLS[label]
    expected = make()
    call(expected)
    done, undone, step = described(expected), 0, 0
    model = make()
    before = snapshot(model)
    while True:
        step += 1
        if not broken_at(step, lambda model=model: call(model)):
            break
        if same(described(model), done):
            model = make()
            before = snapshot(model)
        else:  # what is unchanged can be broken into once more
            assert_unchanged(before, model)
            undone += 1
    assert same(described(model), done)
    assert undone >= 20
