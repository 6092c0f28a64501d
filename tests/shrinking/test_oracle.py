"""The law of experts: a model without one is the original whose router's logit for it is minus infinity."""

import copy
import math

import numpy as np
import pytest
import torch

import zoo
from secateur.coupling import find_coupling
from secateur.shrinking import verify_shrunken
from secateur.shrinking.apply import carry_out
from secateur.shrinking.oracle import oracles
from secateur.shrinking.plan import plan_of
from secateur.shrinking.proof import differs, outputs, wrong_groups

MIXTURES = [
    "mixture_in_turn", "mixture_of_copies", "mixture_of_all", "mixture_in_groups", "mixture_by_place",
    "mixture_by_count", "mixture_of_pairs",
]  # fmt: skip


def found(name, *, gone=(0,)):
    model, inputs = zoo.ZOO[name]()
    coupling = find_coupling(model, inputs)
    (experts,) = [group for group in coupling.groups if group.chosen]
    mask = np.ones(experts.size, dtype=bool)
    mask[list(gone)] = False
    return model.double(), inputs.double(), coupling, experts, {experts.name: mask}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_without_an_expert_it_is_the_original_whose_logit_for_it_is_minus_infinity(name, training):
    """Said by hand here: a hook on the router, and the same for what is added to the choice."""
    model, inputs, coupling, _, kept = found(name)
    smaller = copy.deepcopy(model).train(training)
    carry_out(smaller, plan_of(model, coupling, kept), None)
    gone = torch.from_numpy(~coupling.kept("router.weight", kept)[0])
    model.router.register_forward_hook(lambda *given: given[-1].masked_fill(gone, -math.inf))
    for bias in ("bias", "correction"):
        if hasattr(model, bias):
            getattr(model, bias).data[gone] = -math.inf
    torch.testing.assert_close(smaller(inputs), model.train(training)(inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_oracle_says_the_same(name):
    model, inputs, coupling, experts, kept = found(name)
    assert differs(model, coupling, [experts], kept, [inputs]) is None
    without, after = oracles(coupling, kept)
    assert len(without) == len(after) > 2
    before = [outputs(model, inputs, oracle=each)[0] for each in without]
    carry_out(model, plan_of(model, coupling, kept), None)
    for one, each in zip(before, after, strict=True):
        torch.testing.assert_close(outputs(model, inputs, oracle=each)[0], one, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(before[0], before[1])  # others were chosen


@pytest.mark.parametrize("name", ["mixture_in_turn", "mixture_of_copies", "mixture_of_all", "mixture_by_count"])
def test_a_wrong_slice_of_any_of_their_tensors_is_found(name, monkeypatch):
    model, inputs, coupling, experts, kept = found(name, gone=(1, 4))
    right = plan_of(model, coupling, kept)
    for member, at in experts.members:
        wrong = copy.deepcopy(right)
        wrong.tensors[member][1][at] = np.array([0, 1, 3, 5])  # 2 was meant, not 1
        monkeypatch.setattr("secateur.shrinking.proof.plan_of", lambda *given, wrong=wrong: _among(wrong, *given))
        assert differs(model, coupling, [experts], kept, [inputs]) is not None, member
        monkeypatch.undo()
    assert wrong_groups(model, coupling, [experts], kept, [inputs]) == []


def _among(plan, model, coupling, kept):
    return plan if kept else plan_of(model, coupling, kept)


@pytest.mark.parametrize("name", MIXTURES)
def test_verify_shrunken_knows_the_law(name):
    model, inputs, coupling, _, kept = found(name)
    model, inputs = model.float(), inputs.float()
    smaller = copy.deepcopy(model)
    carry_out(smaller, plan_of(model, coupling, kept), None)
    verify_shrunken(model, smaller, inputs)
    with torch.no_grad():
        smaller.router.weight.copy_(smaller.router.weight.flip(0))
    verify_shrunken(model, smaller, inputs)  # on random weights: it is about what left
