"""Steps that follow from the state before them and their number alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur.recovery.descent import Descent, Whole, order_of, rate_at


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
