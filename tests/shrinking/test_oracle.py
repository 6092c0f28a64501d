"""The law of experts: a model without one is the original whose router's logit for it is minus infinity."""

import copy
import gc
import math
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import zoo
from secateur import shrink
from secateur.coupling import find_coupling
from secateur.shrinking import configuration, proof, verify_shrunken
from secateur.shrinking import oracle as lending
from secateur.shrinking.apply import carry_out
from secateur.shrinking.configuration import Configured
from secateur.shrinking.oracle import lending_of, oracles
from secateur.shrinking.plan import plan_of
from secateur.shrinking.proof import all_of, difference, differs, outputs, right_branches, wrong_groups
from secateur.support import tensors_of
from support.deep import WIDTH, Block
from support.families import batches, make

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


# Laws of probes whose blocks borrow weights: they find right what a whole probe finds right, and nothing else.


class Wrong(Block):
    def forward(self, x):
        hidden = self.up(self.norm(x)).relu()
        return x + self.down(hidden * (1.0 / hidden.shape[-1]))


def blocks(*, wrong=None):
    torch.manual_seed(0)
    stack = nn.Sequential(*(Wrong() if at == wrong else Block() for at in range(3)))
    return nn.Sequential(nn.Linear(4, WIDTH), stack, nn.Linear(WIDTH, 2)), torch.randn(5, 4)


def of_family(family, **sizes):
    return make(family, **sizes), batches(family, count=1, padding=False)[0] | {"use_cache": False}


def llama():
    return of_family("llama", num_hidden_layers=3, tie_word_embeddings=True)


MODELS = {"blocks": blocks, "llama": llama, "t5": lambda: of_family("t5")}


@pytest.fixture
def large(monkeypatch):
    """Every model counts as large; the value is how often a whole probe was made after all."""
    monkeypatch.setattr(lending, "LARGE", 1)
    whole = []
    made = proof.on_calm_probes
    monkeypatch.setattr(proof, "on_calm_probes", lambda *args: whole.append(args) or made(*args))
    return whole


def half(coupling):
    return {group.name: np.arange(group.size) % 2 == 0 for group in coupling.groups}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_right_is_found_right_without_a_whole_probe(name, large):
    model, inputs = MODELS[name]()
    before = copy.deepcopy(model.state_dict())
    coupling = find_coupling(model, inputs)
    assert wrong_groups(model, coupling, coupling.groups, half(coupling), [inputs]) == []
    assert right_branches(model, coupling, coupling.branches[:1], [inputs])[1] == {}
    assert large == []
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_what_is_wrong_in_one_block_is_found_wrong_by_a_whole_probe(large):
    model, x = blocks(wrong=1)
    coupling = find_coupling(model, x)
    inside = [group for group in coupling.groups if group.name.endswith("up.weight")]
    wrong = wrong_groups(model, coupling, inside, half(coupling), [x])
    assert [group.name for group in wrong] == ["1.1.up.weight"]
    assert large


@pytest.mark.parametrize("name", MODELS)
def test_any_wrong_slice_shows(name, large):
    model, inputs = MODELS[name]()
    coupling = find_coupling(model, inputs)
    kept = half(coupling)
    statistics = coupling.statistics(coupling.groups)
    runs = [
        lambda probe, at=at: outputs(probe, inputs, training=at[1], statistics=statistics[at]) for at in coupling.passes
    ]
    probe = lending_of(model)
    plan = plan_of(probe.module, coupling, kept)
    probe.zero(plan)
    expected = all_of([lambda run=run: run(probe.module) for run in runs])
    probe.cut(plan)
    assert difference(expected, all_of([lambda run=run: run(probe.module) for run in runs])) is None
    lent = set(probe.names.values())
    silent = []
    right = probe.values.cuts
    for tensor, (shape, cuts) in plan.tensors.items():
        for at, places in cuts.items():
            other = places.copy()
            other[0] += 1  # the neighbour that left
            if tensor not in lent:
                continue
            wrong = {**plan.tensors, tensor: (shape, {**cuts, at: other})}
            probe.values.cut(type(plan)(wrong, plan.numbers, plan.scales))
            found = all_of([lambda run=run: run(probe.module) for run in runs])
            silent += [tensor] if difference(expected, found) is None else []
            probe.values.cut(right)
    assert silent == []


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_what_leaves_is_what_leaves_otherwise(name, uniform, large, monkeypatch):
    model, inputs = MODELS[name]()
    other = copy.deepcopy(model)
    said = []
    monkeypatch.setattr(
        Configured, "_other_outputs", lambda *_: said.append(True)
    )  # a whole probe beside a model built from the configuration
    shrink(model, inputs, 0.3, uniform=uniform)
    assert large == []
    assert said == []
    monkeypatch.undo()
    shrink(other, inputs, 0.3, uniform=uniform)
    mine, theirs = tensors_of(model), tensors_of(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[each], theirs[each]) for each in mine)


def test_one_block_has_its_weights_at_a_time_and_gradients_pass(large):
    model, x = blocks()
    probe = lending_of(model)
    there = []

    def look(*_):
        there.append([not block.up.weight.is_meta for block in probe.module[1]])

    for block in probe.module[1]:
        block.up.register_forward_pre_hook(look)
    outputs(probe.module, x, backward=True)
    assert [each.count(True) for each in there] == [1] * 6  # forwards and backwards
    assert [each.index(True) for each in there] == [0, 1, 2, 2, 1, 0]
    assert all(each.is_meta for each in probe.module[1].parameters())
    assert probe.module[0].weight.grad is None  # it came, and was forgotten


def test_a_probe_is_what_a_copy_with_its_weights_computes(large):
    model, inputs = llama()
    probe = lending_of(model)
    whole = copy.deepcopy(model).double()
    with torch.no_grad():
        for name, each in whole.named_parameters():
            each.copy_(probe.values(name))
            assert not torch.equal(each.float(), model.get_parameter(name))
    assert difference(outputs(whole, inputs), outputs(probe.module, inputs)) is None


def test_a_probe_is_let_go_of_at_once(large, monkeypatch):
    """Not when circles of references are looked for: of a large model it is large."""
    model, inputs = llama()
    seen = []
    for module in (proof, configuration):
        monkeypatch.setattr(module, "lending_of", lambda model: seen.append(made := lending_of(model)) or made)
    shrink(model, inputs, 0.3, uniform=True)
    held = [weakref.ref(each.module) for each in seen]
    gc.disable()
    try:
        seen.clear()
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def test_weights_in_another_layout_are_lent_with_the_same_values(large):
    model, example = blocks()
    probe = lending_of(model)
    values = {name: probe.values(name) for name in probe.names.values()}
    for block in model[1]:
        block.up.weight = nn.Parameter(block.up.weight.detach().T.contiguous().T)
    again = lending_of(model)
    assert all(torch.equal(again.values(name), value) for name, value in values.items())
    assert shrink(model, example, 0.3).got > 0.25
    assert large == []


def test_small_models_and_such_without_blocks_are_copied_whole():
    model, _ = blocks()
    assert lending_of(model) is None
    assert lending_of(nn.Linear(3, 3)) is None


def test_recurrent_blocks_are_copied_whole(large):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.rnn = nn.Linear(4, 4), nn.GRU(4, 4)

        def forward(self, x):
            return x + self.rnn(self.linear(x))[0]

    assert lending_of(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Recurrent(), Recurrent()))) is None


def test_what_is_tied_to_a_part_outside_stays_there(large):
    model, _x = blocks()
    model[0] = nn.Linear(WIDTH, 10)
    model[1][1].up.weight = model[0].weight
    probe = lending_of(model)
    assert probe.module[1][1].up.weight is probe.module[0].weight
    assert not probe.module[0].weight.is_meta
    assert probe.module[1][1].up.bias.is_meta
