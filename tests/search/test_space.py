"""All choices that there are: what fits is what the model costs, and the choices that are made fit."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.search import make_levels
from secateur.search.space import Class, Predicted, Space, candidates, classes_of, least_errors
from support.fitting import blocks, inputs
from support.unchanged import is_unchanged, state_of


@pytest.fixture(scope="module")
def levels():
    return make_levels(blocks(3), inputs(), shares=(0.3, 0.6), verify=False, over=("shrink", "oneshot"))


@pytest.fixture(scope="module")
def units():
    return make_levels(blocks(4), inputs(), shares=(0.3, 0.6), verify=False)


def space_of(levels):
    return Space(levels, classes_of(levels, [[name] for name in names_of(levels)]))


def names_of(levels):
    """Without branches."""
    return [name for name in levels if levels.kind[name] in ("width", "heads", "layer")]


SHARE = st.floats(0.2, 1.0)


@given(SHARE, st.sampled_from(["params", "macs", "bytes"]))
def test_what_is_chosen_costs_no_more_than_it_may(levels, share, word):
    space = space_of(levels)
    limits = {word: share * space.cost(space.dense, word)}
    for choice in (space.least(limits), space.by_slopes(limits)):
        if choice is None:
            assert not space.fits(space.last, limits)
        else:
            assert levels.cost(space.named(choice), word) <= limits[word] * (1 + 1e-9)


@given(SHARE)
def test_where_groups_share_nothing_the_least_errors_are_the_least_there_are(units, share):
    space = space_of(units)
    limits = {"params": share * space.cost(space.dense, "params")}
    errors = space.errors()

    def error(choice):
        return sum(errors[at][level] for at, level in enumerate(choice))

    fitting = [each for each in itertools.product(*map(range, space.sizes)) if space.fits(each, limits)]
    choice = space.least(limits)
    if fitting:
        assert error(choice) == pytest.approx(min(map(error, fitting)))
    else:
        assert choice is None


def test_a_choice_is_named_by_the_groups_that_are_not_dense(units):
    space = space_of(units)
    names = names_of(units)
    assert space.named((0, 2, 0, 1)) == {names[1]: 2, names[3]: 1}
    assert space.named(space.dense) == {}
    assert space.shares((0, 1, 2, 0)) == [0.0, pytest.approx(0.3), pytest.approx(0.6), 0.0]


def test_groups_of_a_class_go_to_the_levels_that_all_have(units):
    names = names_of(units)
    classes = classes_of(units, [[names[2], names[0]], [names[1]]])
    assert classes == [
        Class((names[0], names[2]), ((0, 0), (1, 1), (2, 2))),
        Class((names[1],), ((0,), (1,), (2,))),
    ]
    space = Space(units, classes)
    assert space.named((2, 0)) == {names[0]: 2, names[2]: 2}
    errors = space.errors()[0]
    assert errors[2] == pytest.approx(sum(units[name][2].loss for name in (names[0], names[2])))


def test_latencies_are_those_that_were_predicted(units):
    names = names_of(units)
    saved = {name: [0.0, 1.0, 2.0] for name in names[:2]}
    space = Space(units, classes_of(units, [[name] for name in names]), Predicted(10.0, saved))
    assert space.cost((1, 2, 2, 2), "latency") == 7.0
    space.predicted.factor = 0.5
    assert space.cost((1, 2, 2, 2), "latency") == 8.5
    choice = space.least({"latency": 9.0})
    assert space.cost(choice, "latency") <= 9.0
    assert choice[2:] == (0, 0)  # what saves nothing stays
    assert space.least({"latency": 7.9}) is None


def test_what_no_configuration_says_is_not_chosen(units):
    space = space_of(units)
    space.possible = lambda named: all(level != 1 for level in named.values())
    choice = space.least({"params": 0.8 * space.cost(space.dense, "params")})
    assert choice is not None
    assert 1 not in choice


def test_errors_that_are_given_are_those_that_count_and_an_infinite_one_is_not_looked_at(units):
    space = space_of(units)
    errors = [[*each] for each in space.errors()]
    limits = {"params": 0.6 * space.cost(space.dense, "params")}
    choice = space.least(limits)
    at = max(range(len(choice)), key=lambda here: choice[here])
    errors[at] = [math.inf if level >= choice[at] else each for level, each in enumerate(errors[at])]
    found = space.least(limits, errors)
    assert found is None or (found[at] < choice[at] and space.fits(found, limits))
    space.curves = [[float(level) for level in range(size)] for size in space.sizes]
    assert space.errors() == space.curves


# ---- Fixed allocations as choices of levels: each fits, and says what the allocation says. ----


def space_over(model, over, shares=(0.2, 0.4, 0.6, 0.8)):
    levels = make_levels(model, inputs(), shares=shares, verify=False, over=over)
    counted = [name for name in levels if levels.kind[name] in ("width", "heads", "layer")]
    return Space(levels, classes_of(levels, [[name] for name in counted]))


@pytest.mark.parametrize("over", [("shrink",), ("oneshot",), ("shrink", "oneshot")])
def test_each_fits_and_the_model_stays(over):
    model = blocks(3)
    space, before = space_over(model, over), state_of(model)
    limits = {"params": 0.6 * space.cost(space.dense, "params")}
    found = candidates(model, space, limits)
    entries = {"erk", "progression"} if "oneshot" in over else set()
    assert set(found) == {"uniform"} | entries | ({"shrink"} if "shrink" in over else set())
    assert all(space.fits(choice, limits) for choice in found.values())
    assert is_unchanged(model, before)


def test_uniform_is_the_same_share_of_each_to_a_level():
    model = blocks(3)
    space = space_over(model, ("oneshot",))
    found = candidates(model, space, {"params": 0.62 * space.cost(space.dense, "params")})
    assert max(found["uniform"]) - min(found["uniform"]) <= 1


def test_progression_removes_more_of_later_blocks():
    model = blocks(3)
    space = space_over(model, ("oneshot",), shares=tuple(at / 16 for at in range(1, 15)))
    found = candidates(model, space, {"params": 0.6 * space.cost(space.dense, "params")})["progression"]
    assert found[0] < found[-1]


# ---- Dynamic programming over levels: the best there is on whole numbers, and never over the budget. ----


whole = st.integers(0, 30)


LEVELS = st.lists(st.tuples(whole, whole), min_size=1, max_size=4)


SIZES = st.floats(0, 1e6, allow_subnormal=False)


ROUNDED = st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=4)


def parted(groups):
    return [[error for error, _ in each] for each in groups], [[cost for _, cost in each] for each in groups]


def best_of(errors, costs, budget):
    """By trying all; None where nothing fits."""
    every = itertools.product(*(range(len(each)) for each in errors))
    fitting = [c for c in every if sum(costs[g][at] for g, at in enumerate(c)) <= budget]
    return min((sum(errors[g][at] for g, at in enumerate(c)) for c in fitting), default=None)


@given(st.lists(LEVELS, min_size=1, max_size=4), st.integers(0, 120))
def test_of_whole_numbers_it_is_the_best_there_is(groups, budget):
    errors, costs = parted(groups)
    choice = least_errors(errors, costs, budget)
    best = best_of(errors, costs, budget)
    if best is None:
        assert choice is None
    else:
        assert sum(costs[g][at] for g, at in enumerate(choice)) <= budget
        assert sum(errors[g][at] for g, at in enumerate(choice)) == best


@given(st.lists(ROUNDED, min_size=1, max_size=5), st.floats(0, 4e6), st.integers(1, 50))
def test_however_coarse_the_table_the_budget_holds(groups, budget, buckets):
    errors, costs = parted(groups)
    choice = least_errors(errors, costs, budget, buckets=buckets)
    least = math.fsum(min(each) for each in costs)
    if choice is None:
        assert least > budget
    else:
        assert math.fsum(costs[g][at] for g, at in enumerate(choice)) <= budget


@given(st.lists(ROUNDED, min_size=1, max_size=4), st.floats(0, 4e6))
def test_a_fine_table_is_nearly_the_best_there_is(groups, budget):
    """As good as the best for what so many buckets less the groups come to."""
    errors, costs = parted(groups)
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
