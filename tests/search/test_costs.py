"""Laws of the bill: what a choice costs is what one counts, and what was written is read again or refused."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur.coupling import find_coupling
from secateur.search.costs import COSTS, TARGETS, Budget, CostTerms, bill_of, budget_in_words, parse_budget
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


# ---- Budgets: shares and amounts, what is kept, and what is refused. ----


DENSE = {
    "params": 1000.0, "active_params": 600.0, "macs": 5000.0, "bytes": 4000.0, "kv_bytes": 512.0, "latency": 8.0,
}  # fmt: skip


@given(st.sampled_from(sorted(COSTS)), st.floats(0, 1, exclude_min=True))
def test_up_to_one_it_is_a_share_of_the_dense_models(word, share):
    assert parse_budget({word: share}).of(DENSE) == {word: share * DENSE[word]}


@given(st.sampled_from(sorted(COSTS)), st.floats(1, 1e12, exclude_min=True))
def test_above_one_it_is_the_amount(word, amount):
    assert parse_budget({word: amount}).of(DENSE) == {word: amount}


@given(st.floats(0, 1, exclude_min=True))
def test_what_is_typed_is_what_is_given(share):
    assert budget_in_words([f"latency={share!r}", "bytes=300e6"]) == {"latency": share, "bytes": 3e8}


def test_a_score_is_kept_at_the_least_of_a_cost():
    budget = parse_budget(None, 0.99, target="latency")
    assert budget == Budget({}, 0.99, "latency")
    assert budget.words == ("latency",)


@pytest.mark.parametrize(
    ("given", "keep", "error", "message"),
    [
        (None, None, ValueError, "got neither"),
        ({"params": 0.5}, 0.9, ValueError, "got both"),
        ({}, None, ValueError, "the budget is empty; name a cost and its limit"),
        (0.5, None, TypeError, 'a budget is a mapping such as {"latency": 0.6}, not a float'),
        (
            {"flops": 0.5},
            None,
            ValueError,
            "no cost is called 'flops'.*There are active_params, bytes, kv_bytes, latency",
        ),
        ({"params": 0}, None, ValueError, r"params: a limit is a share in \(0, 1\] or an amount above 1, not 0"),
        ({"params": -0.5}, None, ValueError, "params: a limit is a share"),
        ({"params": math.nan}, None, ValueError, "params: a limit is a finite number, not nan"),
        ({"params": math.inf}, None, ValueError, "params: a limit is a finite number, not inf"),
        ({"params": "half"}, None, TypeError, "params: a limit is a number, not 'half'"),
        ({"params": True}, None, TypeError, "params: a limit is a number, not True"),
        (None, 1.5, ValueError, r"keep is the share of the dense model's score that has to stay, in \(0, 1\], not 1.5"),
        (None, 0, ValueError, "keep is the share"),
        (None, math.nan, ValueError, "keep: a limit is a finite number"),
    ],
)
def test_what_is_no_budget_is_refused(given, keep, error, message):
    with pytest.raises(error, match=message):
        parse_budget(given, keep)


def test_a_target_is_a_cost():
    with pytest.raises(ValueError, match="no cost is called 'joules'"):
        parse_budget(None, 0.9, target="joules")


@pytest.mark.parametrize("word", ["latency", "latency=", "latency=fast", "latency=nan", "=", ""])
def test_what_is_typed_is_a_name_and_a_number(word):
    with pytest.raises(ValueError, match=r"--budget is NAME=NUMBER, such as latency=0\.6"):
        budget_in_words([word])


def test_a_cost_is_limited_once():
    with pytest.raises(ValueError, match="--budget names macs twice"):
        budget_in_words(["macs=0.5", "macs=0.6"])
