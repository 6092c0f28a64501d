"""Laws of merged experts: copies become what they were, in whatever order of their units; the least sum of costs."""

import copy
import itertools

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import zoo
from secateur import shrink
from secateur.checkpoints import open_checkpoint, verify_checkpoint
from secateur.shrinking import expert_merging, shrink_experts_checkpoint
from secateur.shrinking.expert_merging import assigned, groups_around
from support.mixtures import SMALL, batches

SIZES = {**SMALL, "intermediate_size": 24}


def of_copies(order=None, chosen=1):
    """Experts 0 and 1 are one, 2 and 3 another, with hidden units in another order; so are their routers' rows."""
    config = transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=chosen, **SIZES)
    model = transformers.MixtralForCausalLM(config).eval()
    inner = SIZES["intermediate_size"]
    with torch.no_grad():
        for layer in model.model.layers:
            mixture = layer.mlp
            for one, other in ((0, 1), (2, 3)):
                units = torch.randperm(inner) if order is None else order
                mixture.gate.weight[other] = mixture.gate.weight[one]
                both = mixture.experts.gate_up_proj[one]
                mixture.experts.gate_up_proj[other] = torch.cat([both[:inner][units], both[inner:][units]])
                mixture.experts.down_proj[other] = mixture.experts.down_proj[one][:, units]
    return model


@pytest.mark.parametrize("order", [None, torch.arange(SIZES["intermediate_size"])], ids=["in another order", "copies"])
def test_merging_copies_changes_nothing(order):
    """Tokens choose one, whose weight is 1: with its copy there, which has the same row of the router, or not. Of a
    pair only one is ever chosen, so that these stay, and each takes in its own copy."""
    model = of_copies(order)
    with torch.no_grad():
        before = [model(**batch).logits for batch in batches()]
    left = {"experts": 2, "unreached_first": True, "batches": batches(), "uniform": True}
    done = shrink(model, batches()[0], how_experts="merge", repair=False, **left)
    assert {frozenset(its) for groups in done.merged.values() for its in groups} == {
        frozenset(its) for its in ((0, 1), (2, 3))
    }
    with torch.no_grad():
        after = [model(**batch).logits for batch in batches()]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def of_two(monkeypatch):
    monkeypatch.setattr(expert_merging, "_GROUP", 2)
    monkeypatch.setattr(groups_around, "__defaults__", (2,))


@pytest.mark.parametrize("name", ["mixtral", "mixture_gpt_oss", "mixture_deepseek_v3", "mixture_qwen3", "mixture_lfm2"])
def test_the_router_keeps_its_rows_and_only_experts_change(name):
    model, inputs = zoo.ZOO[name]()
    plain = copy.deepcopy(model)
    left = {"experts": 1, "batches": [inputs, inputs], "repair": False, "verify": False}
    try:
        shrink(plain, inputs, **left)
    except ValueError:
        left["experts"] = 2  # routers of groups lose as many of each
        shrink(plain, inputs, **left)
    done = shrink(model, inputs, how_experts="merge", **left)
    assert {*done.merged} | {*done.unmerged} == {*done.experts}
    changed = {key for key, each in plain.state_dict().items() if not torch.equal(each, model.state_dict()[key])}
    assert bool(changed) == bool(done.merged)
    assert all(".experts." in key for key in changed), changed
    if done.merged:
        assert "merged into" in str(done)


def test_of_a_merged_expert_all_is_the_mean_by_scores():
    """Of two that are nearly the same, so that their hidden units are paired as they stand."""
    model = of_copies(torch.arange(SIZES["intermediate_size"]), chosen=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_()
            for each in layer.mlp.experts.parameters():
                each.copy_(each[:1] + 1e-4 * torch.randn_like(each))
    dense = copy.deepcopy(model)
    done = shrink(model, batches()[0], experts=1, batches=batches(), uniform=True, how_experts="merge", repair=False)
    for at in range(2):
        ((stays, other),) = done.merged[f"model.layers.{at}.mlp.gate.weight"]
        kept = [each for each in range(4) if each != other]
        mine = model.model.layers[at].mlp.experts.down_proj[kept.index(stays)]
        one, two = (dense.model.layers[at].mlp.experts.down_proj[each] for each in (stays, other))
        share = ((mine - two) / (one - two)).detach().flatten()
        clear = ((one - two).abs() > 5e-5).flatten()  # else the difference is rounding
        torch.testing.assert_close(share[clear], share.median().expand_as(share)[clear], rtol=0.02, atol=0.02)
        assert 0.1 < float(share.median()) < 0.9


def test_a_directory_is_what_memory_is(tmp_path):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(num_local_experts=6, tie_word_embeddings=True, **SIZES)
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "dense")
    done = shrink_experts_checkpoint(tmp_path / "dense", tmp_path / "small", 2, batches=batches(), how="merge")
    mine = shrink(model, batches()[0], experts=2, batches=batches(), uniform=True, how_experts="merge")
    assert done.merged == mine.merged
    assert {*done.mended} == {*mine.mended}
    loaded = type(model).from_pretrained(tmp_path / "small")
    for name, each in loaded.state_dict().items():
        torch.testing.assert_close(each, model.state_dict()[name], rtol=1e-3, atol=1e-5)
    found = verify_checkpoint(tmp_path / "small", tmp_path / "dense")
    assert found.ok, found.problems
    assert {each.name for each in found.tensors if each.unchanged is None} == {*done.repaired}
    unrepaired = {"batches": batches(), "repair": False, "verify": False}
    plain = shrink_experts_checkpoint(tmp_path / "dense", tmp_path / "merged", 2, how="merge", **unrepaired)
    sliced = shrink_experts_checkpoint(tmp_path / "dense", tmp_path / "sliced", 2, **unrepaired)
    assert (plain.mended, sliced.merged) == ({}, {})
    one, two = open_checkpoint(tmp_path / "merged"), open_checkpoint(tmp_path / "sliced")
    assert {name for name in one if not torch.equal(one[name], two[name])} == {*plain.repaired}
    assert any(".w1." in name for name in plain.repaired)


def test_a_router_that_is_not_seen_is_told(monkeypatch):
    monkeypatch.setattr(expert_merging, "rows_of_experts", lambda *_: None)
    model, inputs = zoo.ZOO["mixtral"]()
    done = shrink(model, inputs, experts=1, batches=batches(), how_experts="merge", repair=False)
    assert done.merged == {}
    assert {*done.unmerged.values()} == {"what its experts give is not added up as it is"}
    assert "Not merged" in str(done)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"how_experts": "melt", "batches": batches()}, "how_experts must be one of 'remove', 'merge', not 'melt'"),
        ({"how_experts": "merge"}, "runs the model on real inputs"),
        ({"how_experts": "merge", "rank_experts": "criterion", "batches": batches()}, "averages by what data says"),
    ],
)
def test_what_cannot_be_merged(how, message):
    model, inputs = zoo.ZOO["mixtral"]()
    with pytest.raises(ValueError, match=message):
        shrink(model, inputs, experts=1, **how)


# ---- assignment and groups ------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_the_sum_of_costs_is_the_least(size, seed):
    costs = torch.randint(0, 6, (size, size), generator=torch.Generator().manual_seed(seed)).double()
    found = assigned(costs)
    assert sorted(found.tolist()) == list(range(size))
    orders = itertools.permutations(range(size))
    least = min(sum(float(costs[row, column]) for row, column in enumerate(order)) for order in orders)
    assert float(costs[torch.arange(size), found].sum()) == pytest.approx(least)


def test_an_order_is_found_again():
    rows, order = torch.randn(50, 8), torch.randperm(50)
    found = assigned(torch.cdist(rows, rows[order]))
    assert torch.equal(order[found], torch.arange(50))


def test_very_many_are_paired_greedily(monkeypatch):
    monkeypatch.setattr(expert_merging, "_MOST", 10)
    rows, order = torch.randn(50, 8), torch.randperm(50)
    found = assigned(torch.cdist(rows, rows[order]))
    assert torch.equal(order[found], torch.arange(50))


def test_the_highest_takes_in_the_nearest_first():
    near = np.array([[1, 0.1, 0.9, 0.8, 0.2], [0.1, 1, 0.9, 0.2, 0.3], *np.eye(5)[2:]])
    scores = np.array([1.0, 5.0, 0.0, 0.0, 0.0])
    assert groups_around([0, 1], scores, near, size=2) == [[0, 3], [1, 2, 4]]
    assert groups_around([0, 1], scores, near, size=3) == [[0, 3], [1, 2, 4]]
    assert groups_around([0, 1], scores, near, size=16) == [[0], [1, 2, 4, 3]]
