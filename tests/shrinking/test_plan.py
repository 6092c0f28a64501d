"""Laws of plans as values: of plain values they are what they were made of, and they say what does not fit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur import shrink
from secateur.shrinking import apply as execution
from secateur.shrinking.apply import carry_out
from secateur.shrinking.plan import Plan, factors_of, multiplied, plan_in
from secateur.support import Fields
from support.planned import Failure, every_step, everything, made, plans_for, trained
from support.unchanged import is_unchanged, state_of

indices = st.sets(st.integers(0, 50), min_size=1).map(lambda each: np.array(sorted(each)))


cuts = st.dictionaries(st.integers(0, 3), indices)


places = st.tuples(st.text(max_size=5), st.text(max_size=5)) | st.tuples(
    st.just(""), st.text(max_size=5), st.integers()
)


plans = st.builds(
    Plan,
    st.dictionaries(st.text(max_size=5), st.tuples(st.tuples(st.integers(1, 99), st.integers(1, 99)), cuts)),
    st.lists(st.tuples(places, st.integers(), st.integers())),
    st.lists(st.tuples(st.text(max_size=5), st.integers(0, 3), indices, st.floats(0.1, 9.0))),
)


@given(plans)
def test_a_plan_that_was_written_is_read(plan):
    values = json.loads(json.dumps(plan.to_json()))
    assert plan_in(Fields(values, Path("plan.json"))).to_json() == plan.to_json()


def test_factors_are_of_the_positions_that_stay():
    scales = [("weight", 0, np.array([1, 3]), 0.5)]
    plan = Plan({"weight": ((4, 2), {0: np.array([0, 1, 3])})}, [], scales)
    ((at, factors),) = factors_of(plan)["weight"]
    assert (at, factors.tolist()) == (0, [1.0, 0.5, 0.5])
    assert multiplied(torch.ones(3, 2), [(at, factors)])[:, 0].tolist() == [1.0, 0.5, 0.5]
    half = multiplied(torch.full((3, 2), 3.0, dtype=torch.bfloat16), [(at, factors)])
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "scale",
    [("other", 0, [1], 0.5), ("weight", 5, [1], 0.5), ("weight", 0, [4], 0.5), ("weight", 0, [2, 1], 0.5)],
)
def test_factors_of_what_is_not_there(scale):
    name, at, where, factor = scale
    plan = Plan({"weight": ((4, 2), {0: np.array([0, 1])})}, [], [(name, at, np.array(where), factor)])
    with pytest.raises(ValueError, match=f"scales entries of {name} that"):
        factors_of(plan)


# ---- Laws of carrying out: all of a plan is carried out or nothing, and it can be taken back. ----


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
