"""Laws of plans as values: of plain values they are what they were made of, and they say what does not fit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur import shrink
from secateur.coupling import find_coupling
from secateur.shrinking.plan import Plan, factors_of, multiplied, plan_in, plan_of, plan_without, plans_of
from secateur.support import Fields
from support.planned import X, made, plans_for

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


def test_plans_of_a_model_are_those_that_made_it_in_order():
    model = made()
    both = plans_for(model)
    assert plans_of(model) == both
    assert [bool(each.modules) for each in both] == [True, False]
    assert plans_of(made()) == []


def test_a_plan_holds_what_is_kept_and_nothing_of_what_is_whole():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    coupling = find_coupling(model, torch.zeros(1, 4))
    (group,) = coupling.groups
    plan = plan_of(model, coupling, {group.axis: np.array([True, False, True, True, False, True])})
    found = {
        name: (shape, {at: kept.tolist() for at, kept in its.items()}) for name, (shape, its) in plan.tensors.items()
    }
    stay = [0, 2, 3, 5]
    assert found == {"0.weight": ((6, 4), {0: stay}), "0.bias": ((6,), {0: stay}), "2.weight": ((3, 6), {1: stay})}
    whole = plan_of(model, coupling, {group.axis: np.ones(6, dtype=bool)})
    assert (whole.tensors, whole.numbers, whole.scales) == ({}, [], [])


def test_of_branches_within_others_only_the_outer_leave():
    model = made()
    branches = find_coupling(model, X).branches
    plan = plan_without(branches)
    assert all(plan.takes(branch) for branch in branches)
    assert not any(one.startswith(f"{other}.") for one in plan.modules for other in plan.modules)
    assert not plan_without([]).takes(branches[0])


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


def test_the_plan_of_a_result_is_that_of_its_model():
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    done = shrink(model, torch.zeros(1, 4), 0.5)
    assert done.model is model
    assert plans_of(model) == list(done.plans)
