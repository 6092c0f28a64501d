"""All choices that there are: what fits is what the model costs, and the choices that are made fit."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.search import make_levels
from secateur.search.space import Class, Predicted, Space, classes_of
from support.fitting import blocks, inputs


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
