"""Laws of amounts: they are what the coupling counts, changes are differences, and more never costs less."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur.coupling import Axis, Group, concatenated, find_coupling, multiplied
from secateur.shrinking.costs import CostPolynomial, TiedGroups, amount_of, by_tie, cost_of
from support.measured import text, words


class Forked(nn.Module):
    """Two branches side by side, one of whose convolutions has groups, and positions that are flattened."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 5, 3), nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1, groups=6)
        self.norm, self.last = nn.BatchNorm2d(11), nn.Linear(11 * 9, 4)

    def forward(self, x):
        both = torch.cat([self.one(x), self.three(self.two(x))], 1)
        return self.last(self.norm(both).relu().flatten(1))


def known(model, inputs):
    coupling = find_coupling(model, inputs)
    return model, coupling, [TiedGroups(each, 1, {}) for each in by_tie(coupling.groups)]


MODELS = {
    "forked": known(Forked().eval(), torch.ones(2, 3, 5, 5)),
    "words": known(words(), text()[0]),
    "tied words": known(words(tied=True), text()[0]),
}


@pytest.mark.parametrize("target", ["params", "macs"])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=20)
@given(st.data())
def test_an_amount_is_what_the_coupling_counts(name, target, data):
    model, coupling, tied = MODELS[name]
    amount, cost = amount_of(model, coupling, target, tied), cost_of(model, coupling, None, target)
    parts = [data.draw(st.integers(1, each.parts)) for each in tied]
    counts = {axis: count for each, its in zip(tied, parts, strict=True) for axis, count in each.counts(its).items()}
    assert amount(parts) == cost(counts)
    assert amount([each.parts for each in tied]) == cost({})


@pytest.mark.parametrize("target", ["params", "macs", "units"])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=20)
@given(st.data())
def test_changes_are_differences_and_more_never_costs_less(name, target, data):
    model, coupling, tied = MODELS[name]
    amount = amount_of(model, coupling, target, tied)
    parts = [data.draw(st.integers(1, each.parts)) for each in tied]
    at = data.draw(st.integers(0, len(tied) - 1))
    values = np.arange(tied[at].parts + 1)
    changes = amount.changes(parts, at, values)
    assert changes.tolist() == [amount([*parts[:at], int(each), *parts[at + 1 :]]) - amount(parts) for each in values]
    assert (np.diff(changes) > 0).all()  # each of these ties costs something
    assert changes[parts[at]] == 0


def alone(*axes):
    return [TiedGroups([Group("", axis, axis.size, (), at, ())], 1, {}) for at, axis in enumerate(axes)]


@given(st.lists(st.integers(0, 9), min_size=3, max_size=3), st.integers(1, 5), st.integers(1, 5))
def test_sums_and_products_of_dimensions_are_counted_by_hand(parts, fixed, times):
    a, b, c, stays = Axis(9), Axis(9), Axis(9), Axis(fixed)
    both = concatenated([multiplied([a, b]), c, stays])
    terms = [((both, both), times), ((a, stays), 1), ((stays, a), 2), ((stays,), 1), ((), 7)]
    x, y, z = parts
    by_hand = times * (x * y + z + fixed) ** 2 + 3 * fixed * x + fixed + 7
    assert CostPolynomial(terms, alone(a, b, c))(parts) == by_hand


def test_of_groups_that_are_tied_each_keeps_its_own_number_and_shares_may_be_fractions():
    one, other = Axis(12), Axis(8)
    tied = TiedGroups([Group("", one, 12, (), 0, ()), Group("", other, 8, (), 0, ())], 1, {})
    amount = CostPolynomial([((one, other), 5)], [tied])
    assert tied.parts == 4
    assert [amount([each]) for each in range(5)] == [5 * 3 * each * 2 * each for each in range(5)]
    assert amount([1.5]) == 5 * 4.5 * 3


def test_an_amount_is_its_terms():
    """As they are written to a file and read again."""
    rows, columns = Axis(6), Axis(4)
    tied = [TiedGroups([Group("", axis, axis.size, (), 0, ())], 1, {}) for axis in (rows, columns)]
    amount = CostPolynomial([((rows, columns), 1), ((rows, columns), 2), ((rows,), 1)], tied)
    again = CostPolynomial.of(amount.terms, 2)
    for parts in ([6, 4], [3, 4], [1.5, 0]):
        assert again(parts) == amount(parts) == 3 * parts[0] * parts[1] + parts[0]
    assert again.changes([6, 4], 1, [1, 2]).tolist() == amount.changes([6, 4], 1, [1, 2]).tolist()
