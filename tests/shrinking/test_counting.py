"""Laws of counting: what is asked is what leaves, to half of the smallest step."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from secateur import shrink
from secateur.allocation import by_name, everywhere
from secateur.coupling import Axis, Group, Scope, find_coupling
from secateur.shrinking.configuration import Configured
from secateur.shrinking.costs import CostPolynomial, TiedGroups, by_tie, cost_of, even
from secateur.shrinking.counting import CountSearch, path_by_loss, path_by_share, solve_counts
from secateur.shrinking.request import Request, pruning_target
from support.published import PUBLISHED

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)


LAWS = [  # uniform (None: as in the one before), target, round_to, shares
    (False, "params", None, SHARES),
    (None, "params", 1, (0.1, 0.3)),
    (None, "macs", None, (0.1, 0.5)),
    (True, "params", None, SHARES),
    (None, "macs", 1, (0.1, 0.3)),
]


FEW = [(False, "params", None, (0.01, 0.3, 0.7)), (True, "params", None, (0.2,))]


# what `benchmarks/shrinking/run.py nearest` has all of: of some all is tested here, of the others a little
SOME = [
    "SmolLM2 135M", "Llama 3 8B", "Qwen2.5 0.5B", "Gemma 2 2B", "Phi-3 mini", "GPT-2", "BERT base", "ViT-B/16",
    "Whisper tiny",
]  # fmt: skip


LONG = ["ResNet-50", "ConvNeXt-T", "Whisper base"]  # seconds of coupling


def smallest_step(groups, counts, round_to, cost, is_possible):
    """What the smallest step from there changes: one choice of one tie up or down, if there is such a model."""
    here, found = cost(counts), []
    for each in by_tie(groups):
        tied = TiedGroups(each, round_to, {})
        parts, choices = round(tied.mean(counts)), tied.choices().tolist()
        fewer = max((choice for choice in choices if choice < parts), default=None)
        more = min((choice for choice in choices if choice > parts), default=None)
        for choice in (fewer, more):
            beside = {} if choice is None else counts | tied.counts(choice)
            if beside and is_possible(beside) and cost(beside) != here:
                found.append(abs(cost(beside) - here))
    return min(found, default=0.0)


def is_nearest_by_two(groups, counts, round_to, cost, goal, is_possible):
    """Whether no counts of two ties lead nearer: where one step is coarse and another tie too small to make up."""
    tied = [TiedGroups(each, round_to, {}) for each in by_tie(groups)]
    off = abs(cost(counts) - goal)
    for one, other in itertools.combinations(tied, 2):
        for many, few in itertools.product(one.choices().tolist(), other.choices().tolist()):
            beside = counts | one.counts(many) | other.counts(few)
            if abs(cost(beside) - goal) < off * (1 - 1e-9) and is_possible(beside):
                return False
    return True


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in LONG])
def test_what_is_asked_is_what_leaves_published_models(name):
    make, inputs = PUBLISHED[name]
    model = make()
    coupling = find_coupling(model, inputs)
    for uniform, target, round_to, shares in LAWS if name in SOME else FEW:
        if uniform is not None:
            configured = Configured(model, Scope.of(coupling)) if uniform else None
            scope = Scope.of(coupling) if configured is None else configured.scope
            subject, groups = pruning_target(model, scope, [inputs], configured=configured), scope.groups
        cost = cost_of(model, coupling, inputs, target)
        whole = cost({})
        for share in shares:
            asked = Request(sparsity=share, target=target, round_to=round_to)
            try:
                counts = solve_counts(subject, groups, asked).counts
            except ValueError as error:
                most = float(re.search(r"at most ([0-9.]+)% of the", str(error))[1]) / 100
                counts = solve_counts(subject, groups, replace(asked, sparsity=most)).counts
                assert share > 1 - cost(counts) / whole == pytest.approx(most, abs=1e-4)
                continue
            off = abs(1 - cost(counts) / whole - share)
            step = smallest_step(groups, counts, round_to, cost, subject.is_possible) / whole
            assert step < 0.1, "no coarse steps here"
            assert off <= step / 2 + 1e-9 or is_nearest_by_two(
                groups, counts, round_to, cost, (1 - share) * whole, subject.is_possible
            ), (uniform, target, round_to, share)


def attention(width, heads, shared):
    """A small Llama, of which 135 million times as much is published."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": shared, "head_dim": 4}
    config = LlamaConfig(vocab_size=11, intermediate_size=3 * width, num_hidden_layers=2, **sizes)
    return LlamaForCausalLM(config), {"input_ids": torch.tensor([[1, 2, 3]]), "use_cache": False}


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
def test_nine_heads_that_can_only_be_six_stay_and_others_make_it_up(share):
    model, inputs = attention(36, 9, 3)
    done = shrink(model, inputs, share, uniform=True, verify=False)
    assert done.got == pytest.approx(share, abs=0.01)
    assert model.config.num_attention_heads == 9
    assert model.config.hidden_size == 36
    assert model.config.intermediate_size < 108


def test_where_steps_are_coarse_the_two_nearest_are_named_and_the_smaller_taken():
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False))
    done = shrink(model, torch.ones(1, 4), 0.1)
    assert done.beside == (0, pytest.approx(1 / 3))
    assert done.got == done.beside[1]
    assert "Asked: 10.0% of the params. Gone: 33.3%. The nearest that exist are 0% and 33.3%." in str(done).splitlines()


def test_less_than_half_a_step_is_not_refused_and_what_can_leave_is_exact():
    layers = nn.Linear(4, 10, bias=False), nn.ReLU(), nn.Linear(10, 2, bias=False)
    assert shrink(nn.Sequential(*layers), torch.ones(1, 4), 0.949).model[0].out_features == 1  # 0.9 can, 0.1 is a step
    fresh = nn.Linear(4, 10, bias=False), nn.ReLU(), nn.Linear(10, 2, bias=False)
    with pytest.raises(ValueError, match=r"at most 90\.00% of the params can leave, not 96\.0%"):
        shrink(nn.Sequential(*fresh), torch.ones(1, 4), 0.96)


def a_model():
    layers = nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2)
    model, x = nn.Sequential(*layers), torch.ones(1, 4)
    return pruning_target(model, Scope.of(find_coupling(model, x)), [x])


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_a_loss_decides_which_steps_are_taken(share):
    subject = a_model()
    first, second = subject.coupling.groups
    for dear, cheap in ((first, second), (second, first)):

        def loss(tied, parts, dear=dear):
            return (1000.0 if tied.groups[0] is dear else 1.0) * (1 - parts / tied.parts) ** 2

        counts = solve_counts(subject, subject.coupling.groups, Request(sparsity=share), loss=loss).counts
        assert 1 - counts[dear.name] / dear.size < 1 - counts[cheap.name] / cheap.size


def test_a_coarse_step_is_taken_only_when_all_of_it_is_worth_it():
    """Ten units that together cost nothing, and any five of them much: none leaves before the others have."""
    subject = a_model()
    first, second = subject.coupling.groups

    def loss(tied, parts):
        gone = tied.parts - parts
        return float(gone) if tied.groups[0] is first else 200.0 * min(gone, 5) + 10.0 * max(gone - 5, 0)

    few = solve_counts(subject, subject.coupling.groups, Request(sparsity=0.3), loss=loss).counts
    assert few[second.name] == 30
    most = solve_counts(subject, subject.coupling.groups, Request(sparsity=0.97), loss=loss).counts
    assert most[second.name] < 25


def test_a_refusal_names_what_takes_no_part_and_what_freezes_most():
    class Cut(nn.Module):
        """Of its encoder only the first layer runs, and its output is ordered along its width."""

        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("first", "second", "third")})
            self.wide = nn.Linear(8, 24)
            self.head = nn.Linear(24, 2)

        def forward(self, x):
            return self.head(self.wide(self.encoder["first"](x)).cumsum(1))

    with pytest.raises(ValueError, match="the rest is frozen or kept") as found:
        shrink(Cut(), torch.randn(3, 8), 0.8)
    words = "29.9% of all parameters take no part in the forward pass: encoder.second, encoder.third."
    assert words in str(found.value)
    assert "(cumsum" in str(found.value)


# ---- Laws of counts: what was asked leaves, in steps that pay, and no comparison in the code turns. ----


def small(width=16):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


@pytest.mark.parametrize("target", ["params", "macs", "units"])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.7])
def test_the_asked_share_leaves_to_half_of_a_unit(target, sparsity):
    model, x = (
        nn.Sequential(nn.Linear(6, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 5)),
        torch.ones(1, 6),
    )

    def cost(model):
        linears = [model[0], model[2], model[4]]
        if target == "params":
            return sum(parameter.numel() for parameter in model.parameters())
        if target == "macs":
            return sum(linear.weight.numel() for linear in linears)
        return linears[0].out_features + linears[1].out_features

    before = cost(model)
    shrink(model, x, sparsity, target=target, round_to=1)
    unit = {"params": 6 + 1, "macs": 6, "units": 1}[target]  # of the first layer at least, and of the second, and more
    assert abs(1 - cost(model) / before - sparsity) <= (unit + model[2].out_features) / 2 / before + 1e-9


def test_include_exclude_and_allocations():
    def deep():
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))

    x = torch.ones(1, 4)
    assert [shrink(deep(), x, 0.5, target="units", include="0.weight").model[at].out_features for at in (0, 2)] == [
        8,
        12,
    ]
    assert [shrink(deep(), x, 0.5, target="units", exclude="0.*").model[at].out_features for at in (0, 2)] == [16, 6]
    uneven_model = shrink(deep(), x, 0.5, target="units", allocate=everywhere).model
    assert uneven_model[0].out_features + uneven_model[2].out_features == 14
    named = shrink(deep(), x, 0.5, target="units", allocate=by_name({"0.*": 0.25})).model
    assert [named[at].out_features for at in (0, 2)] == [12, 2]
    with pytest.raises(ValueError, match=r"no tensor or group matches '9\.\*'"):
        shrink(deep(), x, 0.5, exclude="9.*")


def test_units_that_are_zero_in_every_member_leave_and_outputs_stay():
    model, x = small(8), torch.randn(5, 4)
    with torch.no_grad():
        for tensor, at in ((model[0].weight, 0), (model[0].bias, 0), (model[2].weight, 1)):
            tensor.index_fill_(at, torch.tensor([1, 4, 6]), 0)
    expected = model(x)
    shrink(model, x)
    assert model[0].out_features == 5
    torch.testing.assert_close(model(x), expected)


def test_a_comparison_that_would_come_out_otherwise_stays():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 3)
            self.hidden, self.last = nn.Linear(3, 10), nn.Linear(10, 3)

        def forward(self, x):
            x = self.up(x)
            x = self.hidden(self.down(F.relu(x) if x.shape[-1] > 8 else x.sin()))
            return self.last(x if x.shape[1] == 1 else F.relu(x))

    model = shrink(Wide(), torch.randn(2, 4), 0.5, target="units", verify=False).model
    # half of 25 units were asked for, in the first layer 6: 9 is more than 8, and the others make it up
    assert model.up.out_features == 9
    assert 9 + model.down.out_features + model.hidden.out_features == 12
    model = shrink(Wide(), torch.randn(2, 4), 0.2, target="units", verify=False).model
    assert (model.up.out_features, model.hidden.out_features) == (10, 8)


# ---- Laws of steps: paths go down the convex hull, and from the end no single step leads nearer. ----


sizes = st.lists(st.integers(2, 40), min_size=2, max_size=4)


rounded = st.lists(st.sampled_from([1, 1, 2, 3, 8]), min_size=4, max_size=4)


shares = st.floats(0.01, 0.9)


def chain(sizes, round_to):
    """The matrices of a network, from each width to the next, and the ties of its widths."""
    axes = [Axis(size) for size in sizes]
    tied = [
        TiedGroups([Group("", axis, axis.size, (), at, ())], each, {})
        for at, (axis, each) in enumerate(zip(axes, round_to, strict=False))
    ]
    pairs = zip([Axis(3), *axes], [*axes, Axis(2)], strict=True)
    return CostPolynomial([(pair, 1) for pair in pairs], tied), tied


def lost(seed):
    """A loss that grows in leaps, differently for each tie."""

    def loss(tied, parts):
        leaps = np.random.default_rng([seed, tied.groups[0].tied]).exponential(size=tied.parts) ** 3
        return float(leaps[: tied.parts - parts].sum())

    return loss


def beside(tied, parts, is_possible=lambda parts: True):
    """All that is one step from there."""
    for at, each in enumerate(tied):
        choices = each.choices().tolist()
        for those in ([c for c in choices if c > parts[at]][::-1], [c for c in choices if c < parts[at]]):
            for count in those:
                found = parts.copy()
                found[at] = count
                if is_possible(found):
                    yield found
                    break


@given(sizes, rounded, st.integers(0, 99))
def test_a_path_goes_down_the_lower_convex_hull_of_each_tie(sizes, round_to, seed):
    amount, tied = chain(sizes, round_to)
    loss = lost(seed)
    path = path_by_loss(loss, tied, amount)
    whole = [each.parts for each in tied]
    assert path.start.tolist() == whole
    slopes = []
    for at, each in enumerate(tied):
        corners = [each.parts, *path.parts[path.ties == at].tolist()]
        assert corners == sorted(set(corners), reverse=True)
        assert corners[-1] == each.choices()[-1]  # with whole steps it leads to the end
        saved, losses = -amount.changes(whole, at, corners), np.array([loss(each, count) for count in corners])
        slopes.append(np.diff(losses) / np.diff(saved))
        assert (np.diff(slopes[-1]) >= -1e-9).all()
        choices = each.choices()
        under = np.interp(-amount.changes(whole, at, choices), saved, losses)
        assert (under <= [loss(each, int(count)) + 1e-9 for count in choices]).all()
    taken = np.array([slopes[at][(path.ties[:step] == at).sum()] for step, at in enumerate(path.ties)])
    assert (np.diff(taken) >= 0).all()  # the cheapest first


@given(sizes, rounded, st.data())
def test_what_is_left_of_a_path_leads_where_it_leads(sizes, round_to, data):
    amount, tied = chain(sizes, round_to)
    path = path_by_loss(even(amount, tied), tied, amount)
    one = data.draw(st.integers(0, len(path.ties)))
    two = data.draw(st.integers(one, len(path.ties)))
    assert path.after(0).tolist() == path.start.tolist()
    assert path.rest(one).after(two - one).tolist() == path.after(two).tolist()
    assert (path.after(two) <= path.after(one)).all()
    without = np.arange(len(tied)) == data.draw(st.integers(0, len(tied) - 1))
    rest = path.without(without)
    end = rest.after(len(rest.ties))
    assert (end == np.where(without, path.start, path.after(len(path.ties)))).all()
    at = int(np.flatnonzero(without)[0])
    count = int(data.draw(st.sampled_from(tied[at].choices().tolist())))
    through = path.through(at, count)
    assert through.start[at] == count
    assert (through.parts < through.start[through.ties]).all()


@given(sizes, rounded, shares, st.integers(0, 99))
@settings(max_examples=60)
def test_from_the_end_no_single_step_leads_nearer(sizes, round_to, share, seed):
    amount, tied = chain(sizes, round_to)
    goal = (1 - share) * amount([each.parts for each in tied])
    steps = CountSearch(tied, amount, goal)
    for path in (path_by_loss(lost(seed), tied, amount), path_by_share([each.parts * 0.7 for each in tied], tied)):
        for found in (
            steps.reached(path),
            *(steps.nearest(each, path) for each in (path.start, path.after(len(path.ties)))),
        ):
            assert all(count in each.choices() for each, count in zip(tied, found.tolist(), strict=True))
            missing = steps.missing(found)
            changes = [amount(each) - amount(found) for each in beside(tied, found)]
            toward = [abs(each) for each in changes if each * missing < 0]
            assert abs(missing) <= min(toward, default=np.inf) / 2 * (1 + 1e-9)
            assert steps.smallest(found) == min(map(abs, changes), default=0)


@given(st.integers(0, 99), st.integers(0, 40))
def test_of_steps_that_lead_equally_near_the_one_of_least_loss_is_taken(seed, count):
    """Ties of one size, so that the steps of the path are all alike: where what is asked lies in the midst of one, that
    is the one that is taken, as of a tie with units that are copies of others."""
    axes = [Axis(10) for _ in range(5)]
    tied = [TiedGroups([Group("", axis, 10, (), at, ())], 1, {}) for at, axis in enumerate(axes)]
    amount = CostPolynomial([((axis,), 1) for axis in axes], tied)
    slopes = np.sort(np.random.default_rng(seed).exponential(size=(5, 10)), axis=1)
    path = path_by_loss(lambda tie, parts: float(slopes[tie.groups[0].tied, : 10 - parts].sum()), tied, amount)
    assume(path.after(count).max() < 10)  # a tie that is whole stays so
    found = CountSearch(tied, amount, 50 - count - 0.7).reached(path)
    assert found.tolist() == path.after(count + 1).tolist()


@given(sizes, rounded, shares, st.integers(0, 99))
@settings(max_examples=60)
def test_the_two_beside_it_are_on_both_sides_of_the_goal(sizes, round_to, share, seed):
    amount, tied = chain(sizes, round_to)
    steps = CountSearch(tied, amount, (1 - share) * amount([each.parts for each in tied]))
    found = steps.reached(path_by_loss(lost(seed), tied, amount))
    less, more = steps.beside(found)
    assert found is less or found is more
    assert steps.missing(less) >= 0 or less is more
    assert steps.missing(more) <= 0 or less is more
    assert amount(less) >= amount(more)
    if less is more and steps.missing(found):  # there is nothing on the other side
        there = [steps.missing(each) for each in beside(tied, found)]
        assert all(each * steps.missing(found) > 0 for each in there)


@given(st.floats(0.1, 0.9))
def test_beside_it_is_what_a_large_step_leads_to_with_small_ones_given_back(share):
    """As of the heads of a small BERT, whose number is half of all there is, and the units of its MLPs."""
    axes = Axis(2), Axis(40)
    tied = [TiedGroups([Group("", axis, axis.size, (), at, ())], 1, {}) for at, axis in enumerate(axes)]
    amount = CostPolynomial([((axes[0],), 60), ((axes[1],), 1)], tied)
    goal = (1 - share) * amount([2, 40])
    steps = CountSearch(tied, amount, goal)
    found = steps.reached(path_by_loss(even(amount, tied), tied, amount))
    less, more = steps.beside(found)
    every = [60 * heads + units for heads in (1, 2) for units in range(1, 41)]
    assert amount(less) == min((each for each in every if each >= goal), default=amount(found))
    assert amount(more) == max((each for each in every if each <= goal), default=amount(found))


@given(st.integers(2, 5), shares, st.integers(0, 99))
@settings(max_examples=40)
def test_what_is_not_possible_is_not_reached_and_what_is_free_is_not_asked_for(multiple, share, seed):
    amount, tied = chain([30, 40], [1, 1])
    asked = []

    def is_possible(parts):
        asked.append(parts.tolist())
        return parts[0] % multiple == 30 % multiple

    steps = CountSearch(tied, amount, (1 - share) * amount([30, 40]), is_possible)
    del asked[:]
    found = steps.reached(path_by_loss(lost(seed), tied, amount))
    assert all(second == 40 for _, second in asked)
    assert is_possible(found)
    near = steps.near(np.array([29, 17]))
    assert is_possible(near)
    assert near[1] == 17
    missing = steps.missing(found)
    toward = [abs(amount(each) - amount(found)) for each in beside(tied, found, is_possible)]
    toward = [each for each in toward if each]
    assert abs(missing) <= min(toward) / 2 * (1 + 1e-9)


@given(sizes, rounded, st.floats(0, 1))
def test_a_path_by_share_begins_at_or_above_what_an_allocation_gives(sizes, round_to, share):
    _, tied = chain(sizes, round_to)
    ideal = [max(share * each.parts, int(each.choices()[-1])) for each in tied]
    path = path_by_share(ideal, tied)
    for each, start, count in zip(tied, path.start.tolist(), ideal, strict=True):
        assert start >= count - 1e-9
        assert not any(count <= choice < start for choice in each.choices())
    assert path.loss(np.array(ideal)) == 0
    assert path.after(len(path.ties)).tolist() == [each.choices()[-1] for each in tied]
