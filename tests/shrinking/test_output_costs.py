"""Laws of what outputs cost: nothing for nothing, what leaves first costs least, and the model stays as it is."""

import math

import pytest
import torch
from torch import nn

from secateur.coupling import find_coupling
from secateur.models import divergence
from secateur.shrinking.kinds.branches import OutputCosts
from support.deep import batches, deep
from support.unchanged import is_unchanged, state_of


def costs_of(model, held=None, **given):
    held = batches() if held is None else held
    coupling = find_coupling(model, held[0])
    return coupling.branches, OutputCosts(model, held, **given)


def test_nothing_costs_nothing_and_the_model_stays_as_it_is():
    model = deep()
    branches, costs = costs_of(model)
    state = state_of(model)
    assert costs.without([]) == costs.now() == 0.0
    assert all(costs.without([branch]) > 0 for branch in branches)
    assert is_unchanged(model, state)


def test_a_cost_is_the_divergence_of_the_model_without():
    model, held = deep(), batches(1)
    branches, costs = costs_of(model, held)
    found = costs.without([branches[1]])
    with torch.no_grad():
        wanted = model(held[0])
        model[2].forward = lambda x: x
        total, rows = divergence(wanted, model(held[0]))
    assert found == pytest.approx(total / rows, rel=1e-4)


def test_the_first_to_leave_costs_least_and_the_next_beside_it():
    model = deep()
    branches, costs = costs_of(model)
    one, two = costs.least(branches, branches, 2)
    assert one == min(branches, key=lambda each: costs.without([each]))
    others = [each for each in branches if each is not one]
    assert two == min(others, key=lambda each: costs.without([one, each]))
    assert [each.name for each in costs.least(branches, branches, 2)] == [one.name, two.name]


def test_what_does_nothing_leaves_first():
    model = deep()
    nn.init.zeros_(model[4].down.weight)
    nn.init.zeros_(model[4].down.bias)
    branches, costs = costs_of(model)
    (first,) = costs.least(branches, branches, 1)
    assert set(first.parameters) <= {f"4.{name}" for name, _ in model[4].named_parameters()}
    assert costs.without([first]) == 0.0


def test_what_does_not_run_without_a_branch_leaves_last(monkeypatch):
    model = deep()
    branches, costs = costs_of(model)
    run = costs._run

    def fails(*given):
        if type(model[1].down).__name__ == "Removed":
            raise RuntimeError("no")
        return run(*given)

    monkeypatch.setattr(costs, "_run", fails)
    broken = next(each for each in branches if "1.down.weight" in each.parameters)
    assert costs.without([broken]) == math.inf
    assert broken not in costs.least(branches, branches, len(branches) - 1)


def test_a_divergence_of_logits_is_kullback_and_leiblers():
    class Logits:
        def __init__(self, logits):
            self.logits = logits

    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(2, 3, 5, generator=generator) for _ in range(2))
    p, q = one.softmax(-1), other.softmax(-1)
    each = (p * (p / q).log()).sum(-1)
    assert divergence(Logits(one), Logits(other)) == (pytest.approx(float(each.sum()), rel=1e-5), 6)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert divergence(Logits(one), Logits(other), mask)[0] == pytest.approx(float(each[mask].sum()), rel=1e-5)


def test_a_weight_that_is_not_finite_is_named():
    """What such a model gives says nothing of any branch."""
    model = deep()
    name, parameter = next((name, each) for name, each in model.named_parameters() if each.dim() > 1)
    parameter.data[0, 0] = math.inf
    with pytest.raises(ValueError, match=rf"{name}: the weight of shape .* has entries that are NaN or infinite"):
        OutputCosts(model, batches())
