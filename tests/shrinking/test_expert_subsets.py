"""Laws of the exhaustive choice: of all sets that may leave, outputs lose least without the one that is chosen."""

import copy
import itertools

import pytest
import torch
import transformers

import zoo
from secateur import shrink
from secateur.shrinking import expert_subsets, shrink_experts_checkpoint
from support.mixtures import SMALL, batches
from support.unchanged import is_unchanged, state_of

SIZES = {**SMALL, "intermediate_size": 24}


def made(experts=5):
    config = transformers.MixtralConfig(num_local_experts=experts, **SIZES)
    return transformers.MixtralForCausalLM(config).eval()


def lost(model, layer, stays):
    """What a mixture's outputs lose when routers and experts have these rows alone."""
    given = []
    hook = model.model.layers[layer].mlp.register_forward_hook(lambda _, args, out: given.append((args[0], out)))
    with torch.no_grad():
        for batch in batches(2):
            model(**batch)
        hook.remove()
        small = copy.deepcopy(model.model.layers[layer].mlp)
        for each in (small.gate.weight, small.experts.gate_up_proj, small.experts.down_proj):
            each.data = each.data[list(stays)]
        small.experts.num_experts = len(stays)
        return sum(float((small(x) - out).double().square().sum()) for x, out in given)


def test_the_outputs_lose_least_of_all_sets():
    model = made()
    dense = copy.deepcopy(model)
    before = state_of(dense)
    shrink(model, batches(2)[0], experts=2, batches=batches(2), uniform=True, rank_experts="exhaustive", repair=False)
    for layer in range(2):
        losses = {stays: lost(dense, layer, stays) for stays in itertools.combinations(range(5), 3)}
        best = min(losses, key=losses.get)
        assert torch.equal(
            model.model.layers[layer].mlp.gate.weight, dense.model.layers[layer].mlp.gate.weight[[*best]]
        )
    assert is_unchanged(dense, before)


def test_a_directory_is_what_memory_is(tmp_path):
    model = made()
    model.save_pretrained(tmp_path / "dense")
    how = {"batches": batches(2), "repair": False}
    done = shrink_experts_checkpoint(tmp_path / "dense", tmp_path / "small", 2, rank="exhaustive", verify=False, **how)
    assert done.rank == "exhaustive"
    shrink(model, batches(2)[0], experts=2, uniform=True, rank_experts="exhaustive", **how)
    loaded = type(model).from_pretrained(tmp_path / "small")
    assert all(torch.equal(each, model.state_dict()[name]) for name, each in loaded.state_dict().items())
    for profile in ({"plan": "p.json", "batches": None}, {"profile": "p.json"}):
        with pytest.raises(ValueError, match="leave out profile= and plan="):
            shrink_experts_checkpoint(tmp_path / "dense", tmp_path / "no", 2, rank="exhaustive", **{**how, **profile})


def test_what_was_tried_is_known_to_a_run_that_goes_on(tmp_path, monkeypatch):
    made().save_pretrained(tmp_path / "dense")
    how = {"batches": batches(2), "rank": "exhaustive", "repair": False, "verify": False}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("secateur.shrinking.expert_directory.write_file", full)
    with pytest.raises(ValueError, match="the disk is full"):
        shrink_experts_checkpoint(tmp_path / "dense", tmp_path / "small", 2, **how)
    monkeypatch.undo()
    monkeypatch.setattr(expert_subsets, "lost_without", full)
    shrink_experts_checkpoint(tmp_path / "dense", tmp_path / "small", 2, **how)
    monkeypatch.undo()
    shrink_experts_checkpoint(tmp_path / "dense", tmp_path / "whole", 2, **how)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("small", "whole"))
    assert one == two


def test_too_many_sets_are_refused(monkeypatch):
    monkeypatch.setattr(expert_subsets, "MOST", 9)
    model = made()
    state = state_of(model)
    with pytest.raises(ValueError, match="2 of 5 experts can leave in 10 ways, more than the 9 that are tried"):
        shrink(model, batches(2)[0], experts=2, batches=batches(2), rank_experts="exhaustive")
    assert is_unchanged(model, state)


def test_it_needs_data():
    model, inputs = zoo.ZOO["mixtral"]()
    with pytest.raises(ValueError, match="runs the model on real inputs"):
        shrink(model, inputs, experts=1, rank_experts="exhaustive")
