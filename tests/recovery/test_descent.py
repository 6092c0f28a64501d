"""Steps that follow from the state before them and their number alone."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur import attach
from secateur.recovery.descent import (
    Descent,
    Factors,
    Whole,
    count_zeros,
    groups_of,
    movers_for,
    moving,
    order_of,
    rate_at,
    removed_of,
    settled,
)
from secateur.support import widened


@given(st.integers(1, 300))
def test_the_rate_goes_up_to_its_highest_and_down_again(steps):
    rates = [rate_at(step, steps, 2.0) for step in range(steps)]
    top = rates.index(max(rates))
    assert max(rates) == 2.0
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert min(rates) > 0


@given(st.integers(0, 2**40), st.integers(0, 50), st.integers(1, 30))
def test_each_round_has_each_batch_once(seed, round_, count):
    assert sorted(order_of(seed, round_, count)) == list(range(count))


def fresh(steps=6):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight[0] = 0
    return layer, Descent([Whole(layer.weight, layer.weight.data.ne(0)), Whole(layer.bias)], steps, rate=0.1)


def test_a_run_that_goes_on_is_the_one_that_was_not_stopped():
    batches = torch.randn(6, 5, 4)
    layer, descent = fresh()
    for batch in batches:
        descent.step(layer(batch).square().mean())
    first, before = fresh()
    for batch in batches[:3]:
        before.step(first(batch).square().mean())
    state = {name: value.clone() for name, value in before.state().items()}
    second, after = fresh()
    after.load(state, 3)
    for batch in batches[3:]:
        after.step(second(batch).square().mean())
    assert torch.equal(second.weight, layer.weight)
    assert torch.equal(second.bias, layer.bias)
    assert bool(layer.weight[0].eq(0).all())


def test_what_is_wrong_is_said():
    layer, descent = fresh()
    with pytest.raises(ValueError, match="the loss of step 1 is nan; look at the batches, or lower rate="):
        descent.step(layer(torch.full((1, 4), torch.nan)).sum())
    with pytest.raises(ValueError, match="the loss depends on no parameter that is trained"):
        descent.step(torch.ones(()))
    with pytest.raises(ValueError, match="the gradients of step 1 are not finite"):
        descent.step(layer(torch.zeros(1, 4)).sub(layer.bias.detach()).square().sum().sqrt())
    layer, descent = fresh()
    good = descent.state()
    for wrong, message in (
        ({"9.value": good["0.value"]}, "holds 9.value, which is nothing of these parameters"),
        ({"0.other": good["0.value"]}, "holds 0.other"),
        ({"0.value": torch.ones(3)}, r"0.value has shape \(3,\)"),
        ({**good, "0.value": torch.full((4, 4), torch.inf)}, "0.value is not finite"),
        ({"0.value": good["0.value"]}, "has no full state of the optimizer"),
        ({**good, "0.step": torch.ones(())}, "has no full state of the optimizer"),
    ):
        with pytest.raises(ValueError, match=message):
            descent.load(wrong, 1)


@pytest.mark.parametrize("make", [lambda: torch.randn(5, 3), lambda: torch.randn(3, 5).T], ids=["rows", "columns"])
def test_steps_are_those_of_adamw_written_down_plainly(make):
    leaf, rate = nn.Parameter(make()), 0.1
    gradients, mask = torch.randn(4, 5, 3).double(), torch.rand(5, 3) > 0.3
    expected, first, second = leaf.detach().double(), torch.zeros(5, 3).double(), torch.zeros(5, 3).double()
    descent = Descent([Whole(leaf, mask)], 4, rate=rate)
    for step, gradient in enumerate(gradients):
        descent.step((leaf * gradient.float()).sum())
        gradient = gradient * mask
        gradient = gradient * min(1.0, 1 / (float(gradient.norm()) + 1e-6))
        now = rate_at(step, 4, rate)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        sizes = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
        expected = expected - now * (first / (1 - 0.9 ** (step + 1))) / sizes
    assert torch.allclose(leaf.detach().double(), expected, atol=1e-5)


# Copies that are trained in the place of parameters, and low-rank updates that are the merged weight at every step.


def test_a_model_has_its_own_tensors_back_whatever_happens():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(torch.bfloat16)
    before = {name: (each, each.data_ptr(), each.clone()) for name, each in model.state_dict(keep_vars=True).items()}
    with pytest.raises(KeyboardInterrupt), moving(model, ["0.weight"], {}) as held:
        assert all(each.dtype == torch.float32 for each in (*model.parameters(), model[1].running_mean))
        held.parameters["0.weight"].data.fill_(7)
        raise KeyboardInterrupt
    for name, each in model.state_dict(keep_vars=True).items():
        same, place, value = before[name]
        assert each is same
        assert each.data_ptr() == place
        assert torch.equal(each, value)


@pytest.mark.parametrize("shape", [(6, 5), (3, 6, 5)])
def test_factors_follow_the_gradient_of_the_merged_weight(shape):
    start = torch.randn(shape, dtype=torch.float64)
    mask = torch.rand(shape) > 0.4
    start *= mask
    parameter = nn.Parameter(start.clone())
    factors = Factors(parameter, mask, 2, torch.Generator().manual_seed(0))
    with torch.no_grad():
        factors.up.normal_()
    factors.place()
    target = torch.randn(shape, dtype=torch.float64)
    (parameter - target).square().sum().backward()
    factors.gather()
    down, up = (each.detach().clone().requires_grad_() for each in (factors.down, factors.up))
    (start + mask * (up @ down) - target).square().sum().backward()
    assert torch.allclose(factors.down.grad, down.grad)
    assert torch.allclose(factors.up.grad, up.grad)
    assert torch.equal(parameter.detach(), start + mask * (up @ down).detach())
    assert parameter.grad is None


def test_a_convolution_has_one_pair_of_factors_and_what_is_tied_moves_once():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = nn.Parameter(model[1].weight.data)  # another parameter of the same memory
    named = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    movers = movers_for(model, named, {}, rank=2, adapted={"0.weight"}, generator=generator)
    factors = movers[0]
    assert isinstance(factors, Factors)
    assert factors.down.shape == (2, 18)
    assert len(movers) == len(named) - 1
    tied = next(each for each in movers if isinstance(each, Whole) and each.others)
    before = model[1].weight.detach().clone()
    descent = Descent([tied], 1, rate=0.1)
    descent.step((model[1].weight * 2 + model[2].weight).sum())
    assert torch.allclose(model[1].weight, before - 0.1)
    assert model[2].weight.data_ptr() == model[1].weight.data_ptr()


def test_what_cannot_be_trained_is_refused():
    with (
        pytest.raises(ValueError, match="weight is on the meta device and has no values"),
        moving(nn.Linear(2, 2, device="meta"), ["weight"], {}),
    ):
        pass
    with torch.inference_mode():
        made = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"weight was made under torch\.inference_mode"), moving(made, ["weight"], {}):
        pass
    assert widened(torch.ones(1).half()).dtype == torch.float32
    assert widened(torch.ones(1).double()).dtype == torch.float64


# ---- Which entries are removed, and that they stay, to the bit. ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(st.integers(0, 1000), st.floats(1e-9, 1e3))
def test_zeros_afterwards_are_those_before(dtype, seed, size):
    torch.manual_seed(seed)
    old = torch.randn(30).mul(torch.rand(30) > 0.5).to(dtype)
    old[0] = -0.0
    new = torch.randn(30) * size
    new[3] = 0.0
    found = settled(old, new, old.ne(0))
    assert found.dtype == dtype
    assert torch.equal(found.eq(0), old.eq(0))
    assert torch.equal(found[old.eq(0)].signbit(), old[old.eq(0)].signbit())


def test_what_removes_is_a_zero_a_mask_that_is_given_or_one_that_is_attached():
    model = nn.Sequential(nn.Embedding(4, 4, padding_idx=0), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[0] = 0
        model[3].weight[:, 1] = 0
    attach(model[2], {"weight": torch.tensor([True, False] * 8).view(4, 4)})
    found = removed_of(model, {"3.weight": torch.ones(4, 4, dtype=torch.bool)})
    assert list(found) == ["3.weight", "2.weight_orig", "1.weight"]
    assert {name: int((~mask).sum()) for name, mask in found.items()} == {
        "3.weight": 4,
        "2.weight_orig": 8,
        "1.weight": 4,
    }
    weights = {name: each for name, each in model.named_parameters() if name in found}
    assert count_zeros(weights, found) == {"1.weight": 4, "2.weight_orig": 8, "3.weight": 4}
    assert "0.weight" in removed_of(model, also=["0.weight"]), "an embedding, where it is asked for"


def test_a_pruner_has_masks_and_a_tied_weight_is_one():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight[0] = 0

    pruner = SimpleNamespace(masks={"1.weight": torch.tensor([[False] * 3, [True] * 3, [True] * 3])})
    assert list(removed_of(model, pruner)) == ["0.weight"]
    assert groups_of(dict(model.named_parameters(remove_duplicate=False)))[0] == ["0.weight", "1.weight"]
    assert removed_of(nn.Embedding(3, 3)) == {}


def test_what_is_wrong_of_zeros_is_said():
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="there is a mask for 'other', but the model has no such parameter"):
        removed_of(layer, {"other": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="weight: a mask of shape"):
        removed_of(layer, {"weight": torch.ones(2, 3, dtype=torch.bool)})
    with pytest.raises(ValueError, match="weight: the mask removes entries that are not zero; write the zeros first"):
        removed_of(layer, {"weight": torch.zeros(2, 2, dtype=torch.bool)})
    with pytest.raises(TypeError, match=r"masks= is \{name: mask\} or a Pruner, not a int"):
        removed_of(layer, 3)
    with pytest.raises(ValueError, match=r"a weight of shape \(1,\) grew beyond what torch.float16 holds; lower rate="):
        settled(torch.ones(1, dtype=torch.float16), torch.tensor([1e9]), None)
