"""Curves: what was measured is told, what was not has the usual ratio, and they never fall."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.search.search import looked_at, measured_curve

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
