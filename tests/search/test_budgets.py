"""Budgets: shares and amounts, what is kept, and what is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.search.costs import COSTS, Budget, budget_in_words, parse_budget

DENSE = {"params": 1000.0, "macs": 5000.0, "bytes": 4000.0, "latency": 8.0}


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
        ({"flops": 0.5}, None, ValueError, "no cost is called 'flops'.*There are bytes, latency, macs and params"),
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
