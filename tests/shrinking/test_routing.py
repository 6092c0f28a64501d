"""Laws of what data says of experts: the model's own weights, however it computes; padding counts not."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import zoo
from secateur import shrink
from secateur.coupling import find_coupling
from secateur.kinds import Experts
from secateur.models import InMemory, Routed, mixture_of, routed_by, scores_by
from support.unchanged import is_unchanged, state_of


def by_hand(model, inputs):
    """The sums for a mixture of the zoo: tokens, weight times norm, of each expert."""
    x = model.inp(inputs).reshape(-1, model.router.in_features)
    weights, chosen = model.route(x)
    found = np.zeros((2, model.held.experts))
    for token, row in enumerate(chosen.tolist()):
        for rank, expert in enumerate(row):
            norm = float(model.held.expert(x[token], expert).norm())
            found[:, expert] += 1, norm * float(weights[token, rank])
    return found


def watched(name):
    model, inputs = zoo.ZOO[name]()
    coupling = find_coupling(model, inputs)
    groups = [group for group in coupling.groups if group.chosen]
    return model, inputs, coupling, groups


class Inner(nn.Module):
    """The mixture alone, so that nothing is behind it."""

    def __init__(self, model):
        super().__init__()
        self.router, self.held, self.model = model.router, model.held, [model]

    def forward(self, x):
        return self.model[0].mixed(x, *self.model[0].route(x))


class Around(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inp, self.inner, self.out = model.inp, Inner(model), model.out

    def forward(self, x):
        x = self.inp(x)
        return self.out(x + self.inner(x.reshape(-1, x.shape[-1])).view_as(x))


@torch.no_grad()
def test_it_is_what_the_formula_says_by_hand():
    model, inputs = zoo.ZOO["mixture_in_turn"]()
    expected = by_hand(model, inputs)
    around = Around(model)
    coupling = find_coupling(around, inputs)
    (group,) = [each for each in coupling.groups if each.chosen]
    assert mixture_of(around, group)[0] == "inner"
    routed = routed_by(InMemory(around, [inputs[:1], inputs[1:]]), coupling, [group])[group.name]
    np.testing.assert_allclose([routed.tokens, routed.weighted], expected, rtol=1e-4)
    np.testing.assert_allclose(routed.scores("reap"), expected[1] / expected[0].clip(1), rtol=1e-4)
    assert routed.scores("frequency").tolist() == expected[0].tolist()


@torch.no_grad()
def test_what_is_behind_the_mixture_scales_all_alike():
    model, inputs, coupling, (group,) = watched("mixture_in_turn")
    expected = by_hand(model, inputs)
    routed = routed_by(InMemory(model, [inputs]), coupling, [group])[group.name]
    assert routed.tokens.tolist() == expected[0].tolist()
    factors = routed.weighted / expected[1]
    np.testing.assert_allclose(factors[expected[0] > 0], factors[expected[0] > 0][0], rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["mixtral", "mixture_gpt_oss", "mixture_llama4", "mixture_deepseek_v3", "mixture_dbrx"]
)
def test_mixtures_of_transformers_are_seen(name):
    """Without an expert's tensors a mixture gives less by what it adds: what is summed, seen from outside."""
    model, inputs, coupling, groups = watched(name)
    state = state_of(model)
    routed = routed_by(InMemory(model, [inputs]), coupling, groups)
    assert is_unchanged(model, state)
    for group in groups:
        assert routed[group.name].tokens.sum() > 0
        assert (routed[group.name].weighted[routed[group.name].tokens > 0] > 0).all()
    group = groups[-1]
    best = int(routed[group.name].weighted.argmax())
    found = routed[group.name].weighted[best]
    _, module = mixture_of(model, group)
    rows = [(name, at) for name, at in group.members if at == 0 and "experts" in name]
    given = []
    hook = module.register_forward_hook(
        lambda _m, args, kwargs, out: given.append((args, kwargs, out)), with_kwargs=True
    )
    with torch.no_grad():
        model.eval()(**inputs)
        hook.remove()
        args, kwargs, before = given[0]
        for member, at in rows:
            tensor = model.get_parameter(member)
            index = torch.from_numpy(coupling.indices(group, member, at) == best)
            tensor[index] = 0
        after = module(*args, **kwargs)
    first = [each[0] if isinstance(each, tuple) else each for each in (before, after)]
    width = first[0].shape[-1]
    gone = float((first[0] - first[1]).reshape(-1, width).norm(dim=-1).sum())
    assert found == pytest.approx(gone, rel=1e-3)


@torch.no_grad()
def test_padding_does_not_count():
    model, inputs, coupling, groups = watched("mixtral")
    ids = inputs["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    short = {"input_ids": ids[:, :-2], "attention_mask": mask[:, :-2]}
    whole = routed_by(InMemory(model, [{"input_ids": ids, "attention_mask": mask}]), coupling, groups)
    less = routed_by(InMemory(model, [short]), coupling, groups)
    for group in groups:
        assert whole[group.name].tokens.tolist() == less[group.name].tokens.tolist()
        np.testing.assert_allclose(whole[group.name].weighted, less[group.name].weighted, rtol=1e-4)


def test_what_nothing_is_seen_of_cannot_be_ranked_by_data():
    model, inputs, *_ = watched("mixture_of_copies")
    with pytest.raises(ValueError, match=r'say Experts\(\.\.\., rank="criterion"\)'):
        shrink(model, inputs, leave=Experts(1), batches=[inputs])
    shrink(model, inputs, leave=Experts(1, rank="criterion"), batches=[inputs])
    assert model.router.out_features == 5


def test_batches_say_who_leaves():
    model, inputs, *_ = watched("mixture_in_turn")
    with torch.no_grad():
        model.router.weight.mul_(5)
        model.held.down[4] *= 1e-3  # chosen, and adds next to nothing, though its other matrix is large
        model.held.up[4] *= 10
    kept = model.router.weight[[0, 1, 2, 3, 5]].clone()
    frequent = copy.deepcopy(model)
    done = shrink(model, inputs, leave=Experts(1), batches=[torch.randn(8, 7, 16) for _ in range(4)])
    assert torch.equal(model.router.weight, kept)
    assert not done.unreached
    shrink(frequent, inputs, leave=Experts(1, rank="criterion"), batches=[inputs])
    assert not torch.equal(frequent.router.weight, kept)


def test_experts_that_no_token_reaches_are_told_and_leave_only_if_that_is_said():
    model, inputs, *_ = watched("mixture_in_turn")
    batches = [torch.randn(8, 7, 16) for _ in range(4)]
    with torch.no_grad():
        model.inp.weight.zero_()
        model.inp.bias.copy_(torch.eye(20)[0])
        model.router.weight[:, 0] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
        model.held.down[5] *= 100
    rows = model.router.weight.clone()
    first = copy.deepcopy(model)
    done = shrink(model, inputs, leave=Experts(1), batches=batches)
    assert done.unreached == {"router.weight": (2, 3, 4, 5)}
    assert "No token of the batches reached 4 of the 6 experts" in str(done)
    assert "They are: router.weight 2, 3, 4, 5." in str(done)
    assert torch.equal(model.router.weight[-1], rows[5])  # the criterion has it before all others
    shrink(first, inputs, leave=Experts(4, unreached_first=True), batches=batches)
    assert torch.equal(first.router.weight, rows[:2])


def test_ties_are_in_the_order_of_the_criterion_and_places_of_the_unreached_are_its():
    routed = Routed(np.array([2.0, 2.0, 0.0]), np.array([4.0, 4.0, 0.0]))
    found = scores_by("reap", routed, np.array([2.0, 1.0, 0.5]), unreached_first=False)
    assert found.argsort().tolist() == [2, 1, 0]
    nobody = Routed.zeros(3)
    assert scores_by("reap", nobody, np.array([2.0, 3.0, 1.0]), unreached_first=False).argsort().tolist() == [2, 0, 1]


def test_words_and_batches_are_asked_for():
    model, inputs, *_ = watched("mixture_in_turn")
    with pytest.raises(ValueError, match="the rank of experts is one of"):
        shrink(model, inputs, leave=Experts(1, rank="luck"))
    with pytest.raises(ValueError, match="pass batches="):
        shrink(model, inputs, leave=Experts(1, rank="reap"))


def test_a_forward_of_ones_own_says_padding_too():
    model, inputs, coupling, groups = watched("mixtral")
    seen = []
    mask = torch.ones_like(inputs["input_ids"])
    mask[:, -1] = 0
    batch = {**inputs, "attention_mask": mask}
    host = InMemory(model, [batch], forward=lambda model, batch: seen.append(1) or model(**batch))
    hosts = host, InMemory(model, [batch]), InMemory(model, [inputs])
    own, plain, whole = (routed_by(each, coupling, groups) for each in hosts)
    assert seen == [1]
    for group in groups:
        assert own[group.name].tokens.tolist() == plain[group.name].tokens.tolist()
        assert 0 < own[group.name].tokens.sum() < whole[group.name].tokens.sum()


def test_a_router_that_is_not_finite_is_named():
    model, inputs, coupling, groups = watched("mixture_in_turn")
    model.router.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"router\.weight: the weight of shape .* has entries that are NaN"):
        routed_by(InMemory(model, [inputs]), coupling, groups)
