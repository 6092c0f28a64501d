"""Laws of costs: each target is what one counts by hand."""

import copy
import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur import shrink
from secateur.checkpoints import open_checkpoint
from secateur.coupling import Axis, Group, concatenated, find_coupling, multiplied
from secateur.kinds import Experts
from secateur.models import InFiles, Tokens, divergence
from secateur.shrinking.costs import (
    AROUND,
    STREAM,
    CostPolynomial,
    TiedGroups,
    active_params,
    amount_of,
    by_cost,
    by_tie,
    cost_of,
    even,
    kv_bytes,
    late,
    shares_of_a_token,
)
from secateur.shrinking.counting import path_by_loss
from secateur.shrinking.kinds.blocks import DepthCosts, few_batches, passing
from secateur.shrinking.select import least
from support.families import FAMILIES, batches, make, saved_deep
from support.measured import text, words
from support.stacks import contents


def test_the_time_of_the_example_decides():
    model = nn.Sequential(nn.Linear(64, 3000), nn.ReLU(), nn.Linear(3000, 10))
    shrink(model, torch.ones(64, 64), 0.3, target="latency", verify=False)
    assert model[0].out_features < 3000


def test_multiply_adds_are_those_of_the_contractions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8 * 36, 5)
    )
    model.append(nn.Unflatten(1, (5, 1))).append(nn.ConvTranspose1d(5, 4, 3))
    by_hand = 8 * 64 * 27 + 8 * 36 * 9 + 8 * 36 * 5 + 5 * 1 * 4 * 3
    assert find_coupling(model, torch.ones(1, 3, 8, 8)).multiply_adds({}) == by_hand


def test_by_cost_takes_first_what_costs_most():
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=4), nn.ReLU(), nn.Conv2d(8, 2, 1)
    model, x = nn.Sequential(*layers), torch.zeros(1, 1, 16, 16)
    for parameter in model.parameters():
        nn.init.ones_(parameter)  # all score the same
    by_work = shrink(copy.deepcopy(model), x, 0.375, target="macs", allocate=by_cost).model
    # a unit of the first costs 9 * 14² + 72 * 3² = 2412 multiply-adds, one of the second 72 * 3² + 2 * 3² = 666
    assert (by_work[0].out_channels, by_work[2].out_channels) == (5, 8)
    by_weights = shrink(copy.deepcopy(model), x, 0.36, allocate=by_cost).model
    # of the first 9 + 1 + 72 = 82 parameters, of the second 72 + 1 + 2 = 75
    assert (by_weights[0].out_channels, by_weights[2].out_channels) == (5, 8)
    by_number = shrink(copy.deepcopy(model), x, 0.3, target="units", allocate=by_cost).model
    assert by_number[0].out_channels + by_number[2].out_channels == 11


# ---- Laws of amounts: they are what the coupling counts, changes are differences, and more never costs less. ----
class Forked(nn.Module):
    """Two branches side by side, one of whose convolutions has groups, and positions that are flattened."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 5, 3), nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1, groups=6)
        self.norm, self.last = nn.BatchNorm2d(11), nn.Linear(11 * 9, 4)

    def forward(self, x):
        both = torch.cat([self.one(x), self.three(self.two(x))], 1)
        return self.last(self.norm(both).relu().flatten(1))


def known(model, inputs):
    coupling = find_coupling(model, inputs)
    return model, coupling, [TiedGroups(each, 1, {}) for each in by_tie(coupling.groups)]


MODELS = {
    "forked": known(Forked().eval(), torch.ones(2, 3, 5, 5)),
    "words": known(words(), text()[0]),
    "tied words": known(words(tied=True), text()[0]),
}


@pytest.mark.parametrize("target", ["params", "macs"])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=20)
@given(st.data())
def test_an_amount_is_what_the_coupling_counts(name, target, data):
    model, coupling, tied = MODELS[name]
    amount, cost = amount_of(model, coupling, None, target, tied), cost_of(model, coupling, None, target)
    parts = [data.draw(st.integers(1, each.parts)) for each in tied]
    counts = {axis: count for each, its in zip(tied, parts, strict=True) for axis, count in each.counts(its).items()}
    assert amount(parts) == cost(counts)
    assert amount([each.parts for each in tied]) == cost({})


@pytest.mark.parametrize("target", ["params", "macs", "units"])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=20)
@given(st.data())
def test_changes_are_differences_and_more_never_costs_less(name, target, data):
    model, coupling, tied = MODELS[name]
    amount = amount_of(model, coupling, None, target, tied)
    parts = [data.draw(st.integers(1, each.parts)) for each in tied]
    at = data.draw(st.integers(0, len(tied) - 1))
    values = np.arange(tied[at].parts + 1)
    changes = amount.changes(parts, at, values)
    assert changes.tolist() == [amount([*parts[:at], int(each), *parts[at + 1 :]]) - amount(parts) for each in values]
    assert (np.diff(changes) > 0).all()  # each of these ties costs something
    assert changes[parts[at]] == 0


def alone(*axes):
    return [TiedGroups([Group("", axis, axis.size, (), at, ())], 1, {}) for at, axis in enumerate(axes)]


@given(st.lists(st.integers(0, 9), min_size=3, max_size=3), st.integers(1, 5), st.integers(1, 5))
def test_sums_and_products_of_dimensions_are_counted_by_hand(parts, fixed, times):
    a, b, c, stays = Axis(9), Axis(9), Axis(9), Axis(fixed)
    both = concatenated([multiplied([a, b]), c, stays])
    terms = [((both, both), times), ((a, stays), 1), ((stays, a), 2), ((stays,), 1), ((), 7)]
    x, y, z = parts
    by_hand = times * (x * y + z + fixed) ** 2 + 3 * fixed * x + fixed + 7
    assert CostPolynomial(terms, alone(a, b, c))(parts) == by_hand


def test_of_groups_that_are_tied_each_keeps_its_own_number_and_shares_may_be_fractions():
    one, other = Axis(12), Axis(8)
    tied = TiedGroups([Group("", one, 12, (), 0, ()), Group("", other, 8, (), 0, ())], 1, {})
    amount = CostPolynomial([((one, other), 5)], [tied])
    assert tied.parts == 4
    assert [amount([each]) for each in range(5)] == [5 * 3 * each * 2 * each for each in range(5)]
    assert amount([1.5]) == 5 * 4.5 * 3


def test_an_amount_is_its_terms():
    """As they are written to a file and read again."""
    rows, columns = Axis(6), Axis(4)
    tied = [TiedGroups([Group("", axis, axis.size, (), 0, ())], 1, {}) for axis in (rows, columns)]
    amount = CostPolynomial([((rows, columns), 1), ((rows, columns), 2), ((rows,), 1)], tied)
    again = CostPolynomial.of(amount.terms, 2)
    for parts in ([6, 4], [3, 4], [1.5, 0]):
        assert again(parts) == amount(parts) == 3 * parts[0] * parts[1] + parts[0]
    assert again.changes([6, 4], 1, [1, 2]).tolist() == amount.changes([6, 4], 1, [1, 2]).tolist()


# ---- Laws of ties: groups that are tied keep the same share, in whole steps and never less than they may. ----
NUMBERS = itertools.count()


@dataclass(eq=False)
class Sized:
    """As much of a group as its counts need."""

    size: int
    tied: int = 0
    name: str = field(default_factory=lambda: f"group {next(NUMBERS)}")
    multiple: int = 1


group_sizes = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@given(group_sizes, st.integers(1, 70), st.none() | st.integers(1, 9), st.data())
def test_counts_are_one_share(group_sizes, parts, round_to, data):
    groups = [Sized(size) for size in group_sizes]
    least = {each.name: data.draw(st.integers(1, each.size)) for each in groups}
    tied = TiedGroups(groups, round_to, least)
    counts = tied.counts(parts)
    shares = {counts[each.name] * tied.parts / each.size for each in groups}
    assert len(shares) == 1
    assert all(least[each.name] <= counts[each.name] <= each.size for each in groups)
    assert math.isclose(tied.mean(counts), shares.pop())
    if round_to is not None:
        stepped = tied.counts(tied.least + tied.step - tied.least % tied.step)
        assert all(stepped[each.name] % round_to == 0 or stepped[each.name] == each.size for each in groups)


@given(group_sizes)
def test_all_is_all_and_nothing_is_one_step(group_sizes):
    groups = [Sized(size) for size in group_sizes]
    tied = TiedGroups(groups, 1, {})
    assert tied.counts(tied.parts) == {each.name: each.size for each in groups}
    assert all(count >= 1 for count in tied.counts(0).values())


def test_large_groups_go_by_sixteen():
    small, large = Sized(63), Sized(64)
    assert (TiedGroups([small], None, {}).step, TiedGroups([large], None, {}).step) == (1, 16)


def test_groups_of_one_tie_come_together():
    one, two, other = Sized(4, 0), Sized(6, 0), Sized(8, 1)
    assert by_tie([one, other, two]) == [[one, two], [other]]


# Laws of losses: what is whole loses nothing, less never costs less, and equal shares leave but for what is late.
many_sizes = st.lists(st.integers(2, 60), min_size=2, max_size=5)


def chain_of(many_sizes, round_to=1):
    """The matrices of a network, from each width to the next, and the ties of its widths."""
    axes = [Axis(size) for size in many_sizes]
    tied = [TiedGroups([Group("", axis, axis.size, (), at, ())], round_to, {}) for at, axis in enumerate(axes)]
    pairs = zip([Axis(3), *axes], [*axes, Axis(2)], strict=True)
    return CostPolynomial([(pair, 1) for pair in pairs], tied), tied


@given(many_sizes, st.integers(1, 7), st.sampled_from([0.0, 0.5, 1.0]))
def test_of_all_nothing_is_lost_and_of_fewer_no_less(many_sizes, round_to, behind):
    amount, tied = chain_of(many_sizes, round_to)
    loss = even(amount, tied, {0: behind})
    for each in tied:
        losses = [loss(each, int(count)) for count in each.choices()]
        assert losses[0] == 0
        assert (np.diff(losses) > 0).all()


@given(many_sizes, st.integers(1, 100))
def test_all_lose_the_same_share_whatever_a_unit_of_them_costs(many_sizes, percent):
    amount, tied = chain_of(many_sizes)
    path = path_by_loss(even(amount, tied), tied, amount)
    parts = path.after(round(len(path.ties) * percent / 100))
    left = 1 - parts / path.start
    steps = 1 / np.array(many_sizes)
    apart, near = np.abs(np.subtract.outer(left, left)), np.maximum.outer(steps, steps)
    assert (apart <= near + 1e-9).all()  # no further than a step of the coarser


@given(st.integers(1, 100))
def test_what_is_behind_loses_what_the_others_do_less_that(percent):
    amount, tied = chain_of([200, 200, 200])
    path = path_by_loss(even(amount, tied, {1: 0.5}), tied, amount)
    first, later, last = 1 - path.after(round(len(path.ties) * percent / 100)) / 200
    assert first == pytest.approx(last, abs=1 / 200 + 1e-9)
    if first < 199 / 200:  # as long as the others have something to lose
        assert later == pytest.approx(max(0.0, first - 0.5), abs=1 / 200 + 1e-9)


def test_hidden_widths_come_first_then_streams_then_what_is_around_others():
    coupling = find_coupling(words(), text()[0])
    behind = late(coupling, coupling.groups)
    assert 0 < STREAM < AROUND
    found = {group.name: behind.get(group.tied, 0.0) for group in coupling.groups}
    stream, heads = {"blocks.0.o.weight": STREAM}, {f"blocks.{at}.q.weight": AROUND for at in range(2)}
    inside = ("q.weight:2", "v.weight", "up.weight")  # widths of heads, and of what is hidden
    assert found == stream | heads | {f"blocks.{at}.{name}": 0.0 for at in range(2) for name in inside}


def test_of_groups_that_are_not_asked_nothing_is_said():
    coupling = find_coupling(words(), text()[0])
    behind = late(coupling, coupling.groups)
    for each in by_tie(coupling.groups):
        number = each[0].tied
        assert late(coupling, each) == {at: by for at, by in behind.items() if at == number}
    assert late(coupling, []) == {}


# ---- What outputs lose without blocks is what they do in memory, in one pass over the weights. ----


def place_of(folder, held):
    return InFiles(open_checkpoint(folder), folder, held)


def in_memory(model, held, gone):
    total, rows = 0.0, 0
    with torch.no_grad():
        for batch in held:
            dense = model(**batch)
            with passing(model, gone):
                lost, count = divergence(dense, model(**batch), Tokens.of(batch).own)
            total, rows = total + lost, rows + count
    return total / rows


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_costs_are_those_of_the_model_in_memory(tmp_path, family):
    """T5's decoder is given what its encoder gave, in each run its own."""
    model = saved_deep(family, tmp_path / "dense", 3)
    before = contents(tmp_path / "dense")
    place = place_of(tmp_path / "dense", batches(family))
    costs = DepthCosts(place, place.batches)
    blocks = list(place.blocks)
    for gone in ((), blocks[1:2]):
        more = [each for each in blocks if each not in gone]
        found = costs(gone, more)
        assert next(iter(found)) is None
        assert found.keys() == {None, *more}
        for each in found:
            wanted = in_memory(model, batches(family), [*gone, *([each] if each else [])])
            assert found[each] == pytest.approx(wanted, rel=1e-3, abs=1e-7), each
    assert all(each.is_meta for block in place.blocks.values() for each in block.parameters())
    assert contents(tmp_path / "dense") == before


def test_a_pass_reads_each_block_once_whatever_is_tried(tmp_path, monkeypatch):
    saved_deep("llama", tmp_path / "dense")
    place = place_of(tmp_path / "dense", batches("llama"))
    costs = DepthCosts(place, place.batches)
    read = []
    load = place.files.load
    monkeypatch.setattr(place.files, "load", lambda name, **how: read.append(name) or load(name, **how))
    costs((), list(place.blocks))
    assert read == list(place.blocks)


def test_a_weight_that_is_not_finite_is_found(tmp_path):
    model = saved_deep("llama", tmp_path / "dense")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.fill_(torch.inf)
    model.save_pretrained(tmp_path / "broken")
    place = place_of(tmp_path / "broken", batches("llama"))
    with pytest.raises(ValueError, match=r"what model\.layers\.3 receives in batch 0 holds NaN"):
        DepthCosts(place, place.batches)


def test_the_first_thousand_tokens_are_enough():
    assert [each.shape for each in few_batches([torch.zeros(1, 512, dtype=torch.long)] * 9)] == [(1, 512)] * 2
    assert [each.shape for each in few_batches([torch.zeros(4, 512, dtype=torch.long)] * 9)] == [(2, 512)]
    assert len(few_batches([torch.zeros(3, 5)] * 9)) == 4
    assert few_batches(["words"]) == ["words"]


def test_blocks_leave_one_by_one_each_the_one_that_adds_least():
    """Against trying all: what one costs grows with what is gone."""
    torch.manual_seed(0)
    own, pairs = torch.rand(7).tolist(), torch.rand(7, 7).tolist()

    def price(gone):
        return sum(own[each] for each in gone) + sum(pairs[min(p)][max(p)] for p in itertools.combinations(gone, 2))

    passes = []

    def costs(gone, more):
        passes.append(len(more))
        return {None: price(gone)} | {each: price([*gone, each]) for each in more}

    gone, lost = least(costs, lambda gone: {each: 1 for each in range(7) if each not in gone}, 4, at_once=4)
    expected = []
    for _ in range(4):
        expected.append(
            min((each for each in range(7) if each not in expected), key=lambda each: price([*expected, each]))
        )
    assert gone == expected
    assert lost == pytest.approx(price(gone))
    assert passes[0] == 7
    assert max(passes[1:]) <= 4


# ---- What one token passes through, and what is kept of it. ----

CACHED = ("llama", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "mixtral", "deepseek_v3")


def cached(model, tokens):
    """Bytes in a model's own cache, of each token."""
    with torch.no_grad():
        kept = model.eval()(input_ids=tokens, use_cache=True).past_key_values
    return sum(each.keys.nbytes + each.values.nbytes for each in kept.layers) / tokens.numel()


@pytest.mark.parametrize("family", [each for each in CACHED if each in FAMILIES])
def test_bytes_of_keys_and_values_are_those_of_the_models_own_cache(family):
    torch.manual_seed(0)
    model, tokens = make(family), torch.arange(3, 6).repeat(2, 1)
    dense = cached(model, tokens)
    assert kv_bytes(model, {"input_ids": tokens}) == dense > 0
    coupling = find_coupling(model, {"input_ids": tokens, "use_cache": False})
    cost = cost_of(model, coupling, {"input_ids": tokens, "use_cache": False}, "kv_bytes")
    assert cost({}) == dense
    free = [group.name for group in coupling.groups if cost({group.name: group.size // 2}) < dense]
    if family != "bloom":  # whose heads a bias of positions counts
        assert free
        done = shrink(model, {"input_ids": tokens}, 0.5, target="kv_bytes", round_to=1, verify=False)
        left = cached(model, tokens)
        assert left == kv_bytes(model, tokens) == pytest.approx((1 - done.got) * dense)
        assert left <= 0.5 * dense


class Narrowed(nn.Module):
    def forward(self, x):
        return x.bfloat16()


def test_bytes_are_those_of_the_tensors_whatever_their_dtypes():
    torch.manual_seed(0)
    narrow = [nn.Linear(40, 30, dtype=torch.bfloat16), nn.ReLU(), nn.Linear(30, 6, dtype=torch.bfloat16)]
    model = nn.Sequential(nn.Linear(8, 40), nn.BatchNorm1d(40), nn.ReLU(), Narrowed(), *narrow)
    dense = sum(each.nbytes for each in model.state_dict().values())
    done = shrink(model, torch.randn(3, 8), 0.3, target="bytes", round_to=1, include="0.*", exclude="6.*")
    left = sum(each.nbytes for each in model.state_dict().values())
    assert done.nbytes == (dense, left)
    assert done.got == pytest.approx(1 - left / dense) == pytest.approx(0.3, abs=0.02)
    assert abs(done.got - (1 - done.parameters[1] / done.parameters[0])) > 0.005


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_what_one_token_passes_through_is_counted_by_hand_after_experts_and_units_left(share):
    torch.manual_seed(0)
    model = make("mixtral")
    done = shrink(model, torch.arange(3, 9)[None], 0.3, target="active_params", leave=Experts(share), round_to=1)
    experts, shared = 0.0, 0
    for name, each in model.named_parameters():
        if ".experts." in name:
            assert each.shape[0] == 4 * (1 - share)
            experts += each.numel() / each.shape[0] * min(2, each.shape[0])
        else:
            shared += each.numel()
    assert active_params(model) == pytest.approx(experts + shared)
    torch.manual_seed(0)
    assert active_params(model) == pytest.approx((1 - done.got) * active_params(make("mixtral")), rel=1e-6)
    assert done.got == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(
    ("kind", "sizes", "total", "active"),
    [
        ("Mixtral", {}, 46.7, 12.9),
        (
            "Qwen3Moe",
            {
                "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
                "vocab_size": 151936,
            },
            30.5, 3.35,
        ),
    ],
)  # fmt: skip
def test_it_is_what_models_say_of_themselves(kind, sizes, total, active):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    shares = shares_of_a_token(model)
    counts = {name: each.numel() / 1e9 for name, each in model.named_parameters()}
    assert sum(counts.values()) == pytest.approx(total, abs=0.05)
    assert sum(count * shares.get(name, 1) for name, count in counts.items()) == pytest.approx(active, abs=0.05)


class Mixture(nn.Module):
    """Experts that are modules of their own."""

    def __init__(self, experts=4, **says):
        super().__init__()
        self.router = nn.Linear(6, experts)
        self.experts = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(experts))
        for name, value in says.items():
            setattr(self, name, value)


@pytest.mark.parametrize(("says", "k"), [({"top_k": 2}, 2), ({"top_k": 9}, 4), ({"num_experts_per_tok": 1}, 1)])
def test_experts_that_are_modules_are_counted_alike(says, k):
    model = Mixture(**says)
    assert active_params(model) == 6 * 4 + 4 + 36 * k


def test_a_mixture_that_does_not_say_how_many_is_an_error():
    with pytest.raises(ValueError, match=r"^experts: neither its router nor the configuration says .*ask for params"):
        active_params(nn.Sequential(Mixture())[0])


def test_what_keeps_nothing_of_what_it_read_is_an_error_that_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"kv_bytes is of models that keep keys and values .* no past_key_values"):
        shrink(model, torch.ones(1, 4), 0.5, target="kv_bytes")
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_a_model_that_is_given_a_cache_and_keeps_nothing_is_an_error():
    class Forgets(nn.Linear):
        def forward(self, input_ids, past_key_values=None, use_cache=False):
            return super().forward(input_ids)

    with pytest.raises(ValueError, match="Forgets keeps no keys and values of heads on the example"):
        kv_bytes(Forgets(4, 4), torch.ones(1, 4))
