"""Choosing: nothing changes, it fits, one seed is one result, and latencies are corrected by what was measured."""

import itertools
import math

import pytest
import torch

from secateur.coupling import Scope
from secateur.models import example_of
from secateur.search import choosing, make_levels
from secateur.search.choosing import LevelSearch
from secateur.search.costs import holds, parse_budget
from secateur.search.score import ModelLoss
from support.families import batches as family_batches
from support.families import make
from support.fitting import blocks, inputs
from support.measured import text, words
from support.unchanged import is_unchanged, state_of


def task(model, budget=None, over=("shrink",), **given):
    batches = inputs()
    levels = make_levels(model, batches[:3], shares=(0.2, 0.4, 0.6, 0.8), over=over, verify=False)
    score = given.pop("score", None)
    asked = parse_budget(budget, given.pop("keep", None))
    measured = ModelLoss(model, batches[3:], score=score)
    return LevelSearch(model, asked, levels, batches[:3], measured, batches[0][:2], batches[0], **given)


@pytest.mark.parametrize("over", [("shrink",), ("oneshot",), ("shrink", "oneshot")])
def test_it_fits_and_is_no_worse_than_any_candidate_and_nothing_changes(over):
    model = blocks(3)
    before = state_of(model)
    each = task(model, {"params": 0.6, "bytes": 0.7}, over, passes=12)
    found = each.within()
    assert holds(found.limits, found.predicted)
    assert found.loss <= min(found.candidates.values())
    assert found.passes <= 12 + 8  # what has begun ends: candidates, and a generation of four children
    assert is_unchanged(model, before)
    with each.levels.assembled(model, found.choice):
        assert each.measured(range(1)) == pytest.approx(found.loss)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.85])
@pytest.mark.parametrize("over", ["shrink", "oneshot"])
def test_it_is_within_two_percent_of_the_best_of_all_choices(share, over):
    """Four layers and three levels: each of the 81 choices is run."""
    model, batches = blocks(4 if over == "shrink" else 2), inputs()
    levels = make_levels(model, batches[:3], shares=(0.4, 0.75), over=over, verify=False)
    asked, measured = parse_budget({"params": share}), ModelLoss(model, batches[3:])
    each = LevelSearch(model, asked, levels, batches[:3], measured, batches[0][:2], batches[0], over=(over,))
    found = each.within()
    every = itertools.product(*map(range, each.space.sizes))
    assert math.prod(each.space.sizes) == 3**4
    fitting = [choice for choice in every if each.space.fits(choice, found.limits)]
    best = min(each._all(choice) for choice in fitting)
    assert found.loss <= 1.02 * best


def test_what_cannot_be_met_is_said_with_what_can():
    with pytest.raises(ValueError, match=r"the params cannot come to 8 of 798: at the last level of each group it is"):
        task(blocks(3), {"params": 0.01}).within()
    model, batches = words(), text()  # whose stream `shrink` would make narrower, and no level does
    levels = make_levels(model, batches[:3], shares=(0.5,), over="shrink", verify=False)
    measured, asked = ModelLoss(model, batches[3:]), parse_budget({"params": 0.01})
    search = LevelSearch(model, asked, levels, batches[:3], measured, batches[0][:2], batches[0], over=("shrink",))
    with pytest.raises(ValueError, match=r"--share.* 1 stay whole, such as .*: its units are in several"):
        search.within()


def clock(monkeypatch, factor):
    """A table by which a unit saves one, and whole models that save so many times that."""

    def saved(model, _example, plans, _times, **_):
        return {
            key: float(sum(len(shape) for shape, _ in plan.tensors.values())) * key[1] for key, plan in plans.items()
        }

    class Clock:
        def __init__(self, dense, _example, _runtime):
            self.dense = dense

        def __call__(self, smaller, _runtime=None):
            gone = sum(a.up.out_features - b.up.out_features for a, b in zip(self.dense, smaller, strict=True))
            return 100.0, 100.0 - factor * gone

    monkeypatch.setattr(choosing, "saved_by", saved)
    monkeypatch.setattr(choosing, "Timer", Clock)


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.4])
def test_latencies_that_are_off_are_corrected(monkeypatch, factor):
    clock(monkeypatch, factor)
    model = blocks(3)
    before = state_of(model)
    each = task(model, {"latency": 1 - 0.5 * factor * 0.6}, passes=10)  # half of the 60 units
    found = each.within()
    assert found.measured <= found.limits["latency"] * 1.03
    assert found.measured >= found.limits["latency"] * (1 - 0.07 * factor)  # a level is four units of sixty
    assert found.predicted["latency"] == pytest.approx(found.measured, rel=0.03)
    assert is_unchanged(model, before)


def test_what_makes_nothing_faster_is_said(monkeypatch):
    clock(monkeypatch, 0.0)
    with pytest.raises(ValueError, match="the latency cannot come to 50 ms of 100 ms"):
        task(blocks(3), {"latency": 0.5}).within()


def close(model, dense):
    """A score of one's own: how close the outputs are."""
    x = inputs(1)[0]
    with torch.no_grad():
        return 1 - ((model(x) - dense).square().mean() / dense.square().mean()).item()


def test_what_keeps_its_score_is_as_small_as_it_gets():
    model = blocks(3)
    with torch.no_grad():
        dense = model(inputs(1)[0])
    each = task(model, keep=0.98, score=lambda model: close(model, dense))
    found = each.kept()
    assert found
    for one in found:
        assert one.loss <= 0.02 * (1 + 1e-9)
    costs = [one.predicted["params"] for one in found]
    assert costs == sorted(costs)
    assert costs[0] < one.dense["params"]


class Finishes:
    """What loses a share of what it does as levels, and counts how often it is asked."""

    def __init__(self, each, share):
        self.each, self.share, self.asked = each, share, []

    def held(self, choice):
        self.asked.append(choice)
        with self.each.levels.assembled(self.each.model, choice):
            return self.share * self.each.measured(range(1))


@pytest.mark.parametrize("share", [0.1, 100.0])
def test_what_is_finished_says_how_far_down_it_goes(share):
    each = task(blocks(3), keep=0.97)
    most = each.measured.most(0.97)
    as_levels = each.kept()[0]
    finishing = Finishes(each, share)
    found = each.kept(15, finishing)
    assert 0 < len(finishing.asked) <= 5
    if share > 1:
        assert found[0].predicted == as_levels.predicted
    else:
        assert found[0].predicted["params"] < as_levels.predicted["params"]
        assert found[0].loss > most >= share * found[0].loss
        assert min(found[0].finals.values()) <= most
    costs = [one.predicted["params"] for one in found]
    assert costs == sorted(costs)


def test_a_score_that_nothing_smaller_keeps_is_named():
    model = blocks(3)
    with torch.no_grad():
        dense = model(inputs(1)[0])
    with pytest.raises(ValueError, match=r"no model was found that is smaller and keeps 100\.0% of the score of 1"):
        task(model, keep=1.0, score=lambda model: close(model, dense)).kept()


def of_llama(batches, **given):
    model, asked = make("llama"), parse_budget({"params": 0.8})
    levels = make_levels(model, batches, shares=(0.5,), over=given["over"], verify=False)
    measured, example = ModelLoss(model, batches[2:]), example_of(model, batches[0])
    return LevelSearch(model, asked, levels, batches[:2], measured, example, example, **given)


def test_what_shrink_would_refuse_is_not_searched():
    """The code compares with one how many queries share a key, or repeats keys by that number: of two none leaves."""
    batches = family_batches("llama", padding=False)
    name = "model.layers.0.self_attn.q_proj.weight:2"
    for where in ({}, {"in_directory": True}):
        found = of_llama(batches, over=("shrink",), uniform=True, **where)
        assert found.space.classes
        assert not any(name in its.names for its in found.space.classes)


def test_of_a_comparison_that_several_groups_turn_together_no_choice_is_made(monkeypatch):
    each = task(blocks(3), {"params": 0.6})
    both = {"1.up.weight", "2.up.weight"}
    monkeypatch.setattr(Scope, "contradicted", lambda _, counts: [*both] if both <= {*counts} else [])
    found = each.within()
    assert not both <= {*found.choice}
    assert holds(found.limits, found.predicted)


def test_a_budget_that_only_what_is_refused_would_meet_is_told(monkeypatch):
    each = task(blocks(2), {"params": 0.25})
    monkeypatch.setattr(Scope, "contradicted", lambda _, counts: [*counts][1:])
    with pytest.raises(ValueError, match=r"the params cannot come to .*: what would is refused, .*: a comparison in"):
        each.within()


def test_entries_alone_need_no_configuration():
    each = of_llama(family_batches("llama", padding=False), over=("oneshot",), uniform=True, in_directory=True)
    assert {name for its in each.space.classes for name in its.names} == {*each.levels}
    assert not each.stays


@pytest.mark.parametrize(("limit", "hint"), [(1.5, "1.5 is above 1, and so an amount"), (0.01, r"\(--over\)\.$")])
def test_an_amount_that_was_meant_as_a_share_is_told(limit, hint):
    with pytest.raises(ValueError, match=hint):
        task(blocks(3), {"params": limit}).within()
