"""Laws of carrying out: all of a plan is carried out or nothing, and it can be taken back."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secateur import shrink
from secateur.shrinking import apply as execution
from secateur.shrinking.apply import carry_out
from support.planned import Failure, every_step, everything, made, plans_for, trained
from support.unchanged import is_unchanged, state_of


def small(width=16):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def test_a_failure_half_way_is_taken_back(monkeypatch):
    model, x = small(), torch.randn(2, 4)
    state = state_of(model)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(execution, "_set", fail)

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.width, self.inner = 16, model

        def forward(self, x):
            return self.inner[2](F.relu(self.inner[0](x)).view(-1, self.width))

    outer = Half()
    with pytest.raises(KeyboardInterrupt):
        shrink(outer, x, 0.5, verify=False)
    assert is_unchanged(model, state)
    assert model[0].out_features == 16
    assert not hasattr(outer, "shrink_plans")


def test_a_plan_that_fails_at_any_step_is_taken_back():
    both = plans_for(made())
    assert both[0].modules
    assert both[1].numbers

    def make():
        model = made()
        return model, trained(model)

    def call(model, optimizer):
        first = carry_out(model, both[0], optimizer)
        try:
            carry_out(model, both[1], optimizer)
        except Failure:
            first()
            raise

    names = "carry_out", "_let_go", "_set_data", "_set", "_with", "_inside", "<lambda>"
    assert every_step(make, call, *names) > 100


def test_taking_back_leaves_even_lists_and_the_order_of_states():
    model = made()
    optimizer = trained(model)
    before = everything(model, optimizer)
    undone = [carry_out(model, plan, optimizer) for plan in plans_for(made())]
    assert everything(model, optimizer) != before
    for each in reversed(undone):
        each()
    assert everything(model, optimizer) == before
