"""Dynamic programming over levels: the best there is on whole numbers, and never over the budget."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.search.space import least_errors

whole = st.integers(0, 30)
LEVELS = st.lists(st.tuples(whole, whole), min_size=1, max_size=4)
SIZES = st.floats(0, 1e6, allow_subnormal=False)
ROUNDED = st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=4)


def split(groups):
    return [[error for error, _ in each] for each in groups], [[cost for _, cost in each] for each in groups]


def best_of(errors, costs, budget):
    """By trying all; None where nothing fits."""
    every = itertools.product(*(range(len(each)) for each in errors))
    fitting = [c for c in every if sum(costs[g][at] for g, at in enumerate(c)) <= budget]
    return min((sum(errors[g][at] for g, at in enumerate(c)) for c in fitting), default=None)


@given(st.lists(LEVELS, min_size=1, max_size=4), st.integers(0, 120))
def test_of_whole_numbers_it_is_the_best_there_is(groups, budget):
    errors, costs = split(groups)
    choice = least_errors(errors, costs, budget)
    best = best_of(errors, costs, budget)
    if best is None:
        assert choice is None
    else:
        assert sum(costs[g][at] for g, at in enumerate(choice)) <= budget
        assert sum(errors[g][at] for g, at in enumerate(choice)) == best


@given(st.lists(ROUNDED, min_size=1, max_size=5), st.floats(0, 4e6), st.integers(1, 50))
def test_however_coarse_the_table_the_budget_holds(groups, budget, buckets):
    errors, costs = split(groups)
    choice = least_errors(errors, costs, budget, buckets=buckets)
    least = math.fsum(min(each) for each in costs)
    if choice is None:
        assert least > budget
    else:
        assert math.fsum(costs[g][at] for g, at in enumerate(choice)) <= budget


@given(st.lists(ROUNDED, min_size=1, max_size=4), st.floats(0, 4e6))
def test_a_fine_table_is_nearly_the_best_there_is(groups, budget):
    """As good as the best for what so many buckets less the groups come to."""
    errors, costs = split(groups)
    choice = least_errors(errors, costs, budget, buckets=4096)
    if choice is not None:
        least = math.fsum(min(each) for each in costs)
        tight = best_of(errors, costs, least + (budget - least) * (1 - 2 * (len(groups) + 1) / 4096))
        if tight is not None:
            assert sum(errors[g][at] for g, at in enumerate(choice)) <= tight * (1 + 1e-9) + 1e-9


def test_it_takes_what_saves_most_for_what_it_costs():
    assert least_errors([[0, 1], [0, 10]], [[4, 0], [4, 0]], 4) == [1, 0]
    assert least_errors([[0, 1], [0, 10]], [[4, 0], [4, 0]], 100) == [0, 0]


def test_of_equal_errors_the_first_level_is_taken():
    assert least_errors([[0, 0, 0]], [[3, 2, 1]], 3) == [0]


def test_a_level_of_infinite_error_is_taken_only_where_there_is_no_other():
    assert least_errors([[math.inf, 5], [0, 7]], [[1, 2], [2, 1]], 3) == [1, 1]
    assert least_errors([[math.inf]], [[1]], 3) == [0]


def test_no_group_costs_nothing():
    assert least_errors([], [], 0) == []
    assert least_errors([], [], -1) is None


def test_large_whole_numbers_share_a_divisor():
    """1000 times as much is the same problem, and as exact."""
    errors = [[0, 3, 9], [0, 2, 11], [0, 4, 6]]
    costs = [[9, 5, 1], [9, 4, 2], [9, 7, 3]]
    small = [least_errors(errors, costs, budget) for budget in range(6, 28)]
    large = [
        least_errors(errors, [[10**9 * c for c in each] for each in costs], 10**9 * budget) for budget in range(6, 28)
    ]
    assert small == large


def test_a_group_has_an_error_for_each_cost():
    with pytest.raises(ValueError, match="group 1 has 1 errors and 2 costs; a level has one of each"):
        least_errors([[0], [0]], [[0], [0, 1]], 1)
    with pytest.raises(ValueError, match="group 0 has 0 errors and 0 costs"):
        least_errors([[]], [[]], 1)


def test_numbers_are_numbers():
    with pytest.raises(ValueError, match="group 0: an error is NaN, or a cost is not finite"):
        least_errors([[math.nan]], [[0]], 1)
    with pytest.raises(ValueError, match="group 0: an error is NaN, or a cost is not finite"):
        least_errors([[0]], [[math.inf]], 1)
