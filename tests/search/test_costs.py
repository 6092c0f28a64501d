"""Laws of the bill: what a choice costs is what one counts, and what was written is read again or refused."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from secateur.coupling import find_coupling
from secateur.search.costs import TARGETS, CostTerms, bill_of
from secateur.shrinking import TiedGroups
from secateur.support import Fields, plain


@pytest.fixture(scope="module")
def bill():
    """Of two convolutions in a row: 3 channels in, 8 between, 6 out; half of the entries of the second may leave."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 6, 1, bias=False), nn.Conv2d(6, 2, 1))
    coupling = find_coupling(model, torch.zeros(1, 3, 6, 6), modes=[False])
    entries = [TiedGroups([group], 1, {}) for group in coupling.groups]
    return bill_of(model, coupling, [*entries, "2.weight"])


def test_it_is_what_one_counts_by_hand(bill):
    assert list(bill.dense) == [8, 6, 1]
    for one, two, share in itertools.product((8, 4, 1), (6, 3), (1, 0.5)):
        left = {0: one, 1: two, 2: share}
        first, second, last = 3 * one * 9, one * two * share, two * 2
        assert bill.of("params", left) == first + second + last + 2
        assert bill.of("bytes", left) == 4 * (first + second + last + 2)
        assert bill.of("macs", left) == 16 * (first + second + last)


def test_costs_of_their_own_and_what_is_fixed_are_the_whole_model(bill):
    for target in TARGETS:
        own = sum(bill.own(target, at, value) for at, value in enumerate(bill.dense))
        assert bill.fixed(target) + own == pytest.approx(bill.of(target, {}))
        assert bill.own(target, 0, 0.0) == 0


def test_it_is_read_as_it_was_written(bill):
    read = Fields(json.loads(json.dumps(plain(bill.terms()))), Path("levels.json")).whole(CostTerms).model()
    for target in TARGETS:
        assert read.of(target, {0: 3, 2: 0.25}) == bill.of(target, {0: 3, 2: 0.25})
