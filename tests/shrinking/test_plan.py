"""Laws of plans as values: of plain values they are what they were made of, and they say what does not fit."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secateur.shrinking.plan import Plan, factors_of, multiplied

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
    assert Plan.from_json(values).to_json() == plan.to_json()


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
