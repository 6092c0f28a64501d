"""Laws of losses: what is whole loses nothing, less never costs less, and equal shares leave but for what is late."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.coupling import Axis, Group, find_coupling
from secateur.shrinking.costs import AROUND, STREAM, CostPolynomial, TiedGroups, by_tie, even, late
from secateur.shrinking.counting import path_by_loss
from support.measured import text, words

sizes = st.lists(st.integers(2, 60), min_size=2, max_size=5)


def chain(sizes, round_to=1):
    """The matrices of a network, from each width to the next, and the ties of its widths."""
    axes = [Axis(size) for size in sizes]
    tied = [TiedGroups([Group("", axis, axis.size, (), at, ())], round_to, {}) for at, axis in enumerate(axes)]
    pairs = zip([Axis(3), *axes], [*axes, Axis(2)], strict=True)
    return CostPolynomial([(pair, 1) for pair in pairs], tied), tied


@given(sizes, st.integers(1, 7), st.sampled_from([0.0, 0.5, 1.0]))
def test_of_all_nothing_is_lost_and_of_fewer_no_less(sizes, round_to, behind):
    amount, tied = chain(sizes, round_to)
    loss = even(amount, tied, {0: behind})
    for each in tied:
        losses = [loss(each, int(count)) for count in each.choices()]
        assert losses[0] == 0
        assert (np.diff(losses) > 0).all()


@given(sizes, st.integers(1, 100))
def test_all_lose_the_same_share_whatever_a_unit_of_them_costs(sizes, percent):
    amount, tied = chain(sizes)
    path = path_by_loss(even(amount, tied), tied, amount)
    parts = path.after(round(len(path.ties) * percent / 100))
    left = 1 - parts / path.start
    steps = 1 / np.array(sizes)
    apart, near = np.abs(np.subtract.outer(left, left)), np.maximum.outer(steps, steps)
    assert (apart <= near + 1e-9).all()  # no further than a step of the coarser


@given(st.integers(1, 100))
def test_what_is_behind_loses_what_the_others_do_less_that(percent):
    amount, tied = chain([200, 200, 200])
    path = path_by_loss(even(amount, tied, {1: 0.5}), tied, amount)
    first, later, last = 1 - path.after(round(len(path.ties) * percent / 100)) / 200
    assert first == pytest.approx(last, abs=1 / 200 + 1e-9)
    if first < 199 / 200:  # as long as the others have something to lose
        assert later == pytest.approx(max(0.0, first - 0.5), abs=1 / 200 + 1e-9)


def test_hidden_widths_come_first_then_streams_then_what_is_around_others():
    coupling = find_coupling(words(), text()[0])
    behind = late(coupling, coupling.groups)
    assert 0 < STREAM < AROUND
    found = {group.name: behind.get(group.tied, 0.0) for group in coupling.groups}
    stream, heads = {"blocks.0.o.weight": STREAM}, {f"blocks.{at}.q.weight": AROUND for at in range(2)}
    inside = ("q.weight:2", "v.weight", "up.weight")  # widths of heads, and of what is hidden
    assert found == stream | heads | {f"blocks.{at}.{name}": 0.0 for at in range(2) for name in inside}


def test_of_groups_that_are_not_asked_nothing_is_said():
    coupling = find_coupling(words(), text()[0])
    behind = late(coupling, coupling.groups)
    for each in by_tie(coupling.groups):
        number = each[0].tied
        assert late(coupling, each) == {at: by for at, by in behind.items() if at == number}
    assert late(coupling, []) == {}
