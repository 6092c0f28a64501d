"""Weights of curves: what was measured is told, what was not stays near to the others, and curves never fall."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.search.search import looked_at, measured_curve, weighed, weights_of

LOSSES = st.lists(st.floats(0, 100), min_size=2, max_size=8).map(lambda each: [0.0, *sorted(each)])


@given(LOSSES, st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_a_curve_never_falls_and_is_what_was_measured(predicted, first, more):
    last = len(predicted) - 1
    measured = dict(zip(looked_at(len(predicted)), (first, first + more), strict=False))
    found = measured_curve(predicted, measured)
    assert found[0] == 0
    assert found == sorted(found)
    assert len(found) == last + 1
    known = [at for at in measured if predicted[at] > 1e-9 * predicted[last]]
    if known:
        assert found[known[0]] >= measured[known[0]] * (1 - 1e-9)


@pytest.mark.parametrize("lost", [{}, {1: math.inf}, {1: math.nan}, {1: -1.0}, {1: 0.0}])
def test_where_nothing_was_measured_the_usual_ratio_holds(lost):
    assert measured_curve([0.0, 1.0, 2.0], lost, 3.0) == [0.0, 3.0, 6.0]


def test_weights_are_found_from_enough_choices():
    truth = [1.0, 5.0, 0.5, 2.0]
    draw = np.random.default_rng(0)
    curves = [[0.0, 1.0, 3.0, 4.0] for _ in truth]
    choices = {tuple(int(each) for each in draw.integers(1, 4, 4)) for _ in range(40)}
    lost = {
        choice: sum(each[at] for each, at in zip(weighed(curves, truth), choice, strict=True)) for choice in choices
    }
    found = weights_of(curves, lost, spread=3.0, noise=0.001)
    assert found == pytest.approx(truth, rel=0.2)


def test_of_nothing_all_weigh_the_same_and_a_scale_is_found_from_one():
    curves = [[0.0, 1.0], [0.0, 1.0]]
    assert weights_of(curves, {}, spread=0.5, noise=0.1) == [1.0, 1.0]
    assert weights_of(curves, {(0, 0): 0.0, (1, 1): math.inf}, spread=0.5, noise=0.1) == [1.0, 1.0]
    assert weights_of(curves, {(1, 1): 6.0}, spread=0.5, noise=0.1) == pytest.approx([3.0, 3.0])


def test_what_loses_far_more_still_says_that_it_does():
    """Not so much that all others would be forgotten."""
    curves = [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    near = {(1, 1): 2.0, (0, 2): 2.0}
    before = weights_of(curves, near, spread=0.5, noise=0.1)
    after = weights_of(curves, near | {(2, 0): 1e4}, spread=0.5, noise=0.1)
    assert after[0] / after[1] > 1.05 * before[0] / before[1]


@given(st.integers(0, 99))
def test_weights_that_are_drawn_are_above_zero_and_of_the_seed(seed):
    curves, lost = [[0.0, 1.0], [0.0, 2.0], [0.0, 0.0]], {(1, 1, 0): 1.0, (0, 1, 1): 0.2}
    one, two = (weights_of(curves, lost, spread=2.0, noise=0.1, draw=np.random.default_rng(seed)) for _ in range(2))
    assert one == two
    assert all(each > 0 for each in one)
