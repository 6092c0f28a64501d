"""Level switching: it fits, it never loses more than what it began with, and one seed is one result."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.search.search import evolved, looked_at, measured_curve

COSTS = st.lists(st.integers(0, 9), min_size=3, max_size=3)


def additive(costs):
    """Of each group what its levels cost: less of each later one."""
    return [list(itertools.accumulate(each, lambda cost, less: max(cost - less, 0), initial=20))[:3] for each in costs]


def problem(number, groups=4, levels=3):
    """A loss in which groups interact, so that errors do not add up, with some noise on each batch."""
    draw = random.Random(number)
    alone = [[0.0, *sorted(draw.uniform(0, 5) for _ in range(levels - 1))] for _ in range(groups)]
    pairs = {pair: draw.uniform(-0.6, 1.5) for pair in itertools.combinations(range(groups), 2)}
    noise = {}

    def loss(choice, some):
        total = 1 + sum(alone[at][level] for at, level in enumerate(choice))
        total += sum(weight * choice[a] * choice[b] for (a, b), weight in pairs.items())
        for number in some:
            total += noise.setdefault((choice, number), random.Random(repr((choice, number))).gauss(0, 0.05)) / len(
                some
            )
        return total

    def fits(choice):
        return sum(choice) >= groups

    return loss, fits, [levels] * groups


@pytest.mark.parametrize("number", range(5))
def test_of_four_layers_and_three_levels_it_is_within_two_percent_of_the_best_of_all(number):
    loss, fits, sizes = problem(number)
    every = [each for each in itertools.product(*map(range, sizes)) if fits(each)]
    best = min(loss(each, range(32)) for each in every)
    found = evolved(sizes, {"uniform": (1, 1, 1, 1)}, loss, fits, batches=32, seed=number)
    assert fits(found.choice)
    assert found.loss <= 1.02 * best


@given(st.integers(0, 1000), st.integers(0, 3), st.integers(1, 40))
def test_one_seed_is_one_result_and_nothing_is_worse_than_what_it_began_with(number, seed, batches):
    loss, fits, sizes = problem(number, groups=5, levels=4)
    starts = {"uniform": (1, 1, 1, 1, 1), "late": (0, 0, 0, 2, 3)}
    found = evolved(sizes, starts, loss, fits, batches=batches, seed=seed, passes=8)
    assert found == evolved(sizes, starts, loss, fits, batches=batches, seed=seed, passes=8)
    assert fits(found.choice)
    assert found.losses == {name: loss(choice, range(batches)) for name, choice in starts.items()}
    assert found.loss <= min(found.losses.values())
    assert found.loss == loss(found.choice, range(batches))


@given(st.lists(COSTS, min_size=2, max_size=5), st.floats(0.2, 1), st.integers(0, 5))
def test_every_choice_that_is_looked_at_fits(costs, share, seed):
    table = additive(costs)
    limit = share * sum(each[0] for each in table)
    last = tuple(len(each) - 1 for each in table)

    def cost(choice):
        return sum(each[at] for each, at in zip(table, choice, strict=True))

    if cost(last) > limit:
        return

    def loss(choice, _some):
        assert cost(choice) <= limit
        return sum((1 + at) * level**2 for at, level in enumerate(choice))

    found = evolved([3] * len(table), {"least": last}, loss, lambda c: cost(c) <= limit, batches=5, seed=seed, passes=5)
    for at, level in enumerate(found.choice):  # of what a search found nothing of the budget is left
        lower = (*found.choice[:at], level - 1, *found.choice[at + 1 :])
        assert found.choice == last or not level or cost(lower) > limit


@given(st.floats(1, 30), st.integers(1, 64))
def test_no_more_passes_are_made_than_were_granted(passes, batches):
    loss, fits, sizes = problem(3, groups=8, levels=9)
    asked = []

    def counted(choice, some):
        asked.append(len(some))
        return loss(choice, some)

    found = evolved(sizes, {"uniform": (1,) * 8}, counted, fits, batches=batches, passes=passes)
    assert found.passes == pytest.approx(sum(asked) / batches)
    assert found.passes <= max(passes, 1) + 3.5 + 22 / batches  # a generation that has begun ends


def test_a_loss_that_is_nan_is_no_progress():
    def loss(choice, _some):
        return math.nan if choice == (0, 2) else sum(choice)

    found = evolved([3, 3], {"a": (1, 1)}, loss, lambda choice: sum(choice) > 1, batches=1)
    assert found.choice != (0, 2)


def test_where_nothing_can_be_switched_it_ends():
    assert evolved([1, 1], {"all": (0, 0)}, lambda *_: 1.0, lambda _: True, batches=3).choice == (0, 0)
    assert evolved([], {"none": ()}, lambda *_: 1.0, lambda _: True, batches=3).passes == 1


@pytest.mark.parametrize(
    ("starts", "batches", "message"),
    [
        ({}, 1, "there is no candidate to begin with"),
        ({"a": (1, 1)}, 0, "there are 0 batches; choices are compared on one at least"),
        ({"a": (1,)}, 1, r"a: \(1,\) is no choice of one level of each of 2 groups"),
        ({"a": (1, 3)}, 1, r"a: \(1, 3\) is no choice"),
        ({"a": (0, 0)}, 1, r"a: \(0, 0\) costs more than it may"),
    ],
)
def test_what_is_no_beginning_is_refused(starts, batches, message):
    with pytest.raises(ValueError, match=message):
        evolved([3, 3], starts, lambda *_: 0.0, lambda choice: sum(choice) > 1, batches=batches)


def test_a_level_that_costs_more_than_the_one_before_it_does_not_break_the_budget():
    """As milliseconds do: fewer units may be slower."""
    cost = [5.0, 4.0, 6.0, 2.0]

    def fits(choice):
        return sum(cost[at] for at in choice) <= 8.0

    asked = []

    def loss(choice, _):
        asked.append(choice)
        return float(sum((at - 2) ** 2 for at in choice))

    found = evolved([4, 4], {"start": (1, 1)}, loss, fits, batches=2, passes=20)
    assert all(map(fits, asked))
    assert found.choice == (1, 1)


# ---- Curves: what was measured is told, what was not has the usual ratio, and they never fall. ----


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
