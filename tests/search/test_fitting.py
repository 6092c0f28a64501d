"""`fit`: no budget is exceeded, a call that fails changes nothing, and what comes of it is what the verbs make."""

import copy
import math
import pickle
import re
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur import oneshot, shrink
from secateur.patterns import Block
from secateur.search import fit, fitting, making
from secateur.search.costs import Judged
from secateur.search.fitting import Entries, Units
from secateur.search.result import KINDS, Point, knee_of
from secateur.shrinking import active_params
from support.families import batches as family_batches
from support.families import make
from support.fitting import blocks, inputs, parameters, widths
from support.measured import text, words
from support.unchanged import is_unchanged, state_of

SHARES = (0.2, 0.4, 0.6, 0.8)


def zeros(model):
    return sum(int(each.numel() - each.count_nonzero()) for each in model.parameters())


def fours(each):
    """How many of each four entries along a row are there."""
    return {*(each.detach() != 0).reshape(-1, 4).sum(1).tolist()}


def test_of_a_pattern_that_fixes_the_share_it_is_chosen_which_matrices_get_it():
    model = blocks(3, width=8)
    done = fit(model, inputs(width=8), budget={"params": 0.7}, over="oneshot", pattern="2:4", finals=3)
    halves = {name.removesuffix(":layer") for name in done.choice}
    assert 0 < len(halves) < 6
    assert {name: fours(each) for name, each in model.named_parameters() if each.dim() > 1} == {
        name: {2} if name in halves else {4} for name, each in model.named_parameters() if each.dim() > 1
    }
    assert {layer.name for layer in done.pruned.layers} == halves
    assert parameters(model) - zeros(model) <= 0.7 * done.dense["params"]


def test_the_model_inside_another_one_is_fitted():
    alone, inside = blocks(2), blocks(2)
    wrapped = nn.DataParallel(inside)
    done = [fit(each, inputs(), budget={"params": 0.7}, shares=(0.5,), finals=1) for each in (alone, wrapped)]
    assert done[1].model is wrapped
    assert widths(inside) == widths(alone)
    assert done[1].choice == done[0].choice


class Perceptron(nn.Module):
    """Plain layers in a list, each of another width."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((8, 24), (24, 16), (16, 4)))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


@pytest.mark.parametrize("listed", [True, False])
def test_of_plain_layers_hidden_units_leave(listed):
    torch.manual_seed(0)
    model = Perceptron()
    if not listed:
        model = nn.Sequential(model.layers[0], nn.ReLU(), model.layers[1], nn.ReLU(), model.layers[2])
    given = [torch.randn(32, 8) for _ in range(4)]
    before = sum(each.numel() for each in model.parameters())
    fit(model, given, budget={"params": 0.7}, example_inputs=given[0], finals=1)
    assert sum(each.numel() for each in model.parameters()) <= 0.7 * before
    assert model(given[0]).shape == (32, 4)


class Attends(nn.Module):
    """`nn.MultiheadAttention`, whose code asks whether its number of heads is odd."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.up, self.down = nn.Linear(12, 32), nn.Linear(32, 12)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.down(self.up(x).relu())


def test_a_remainder_of_what_stays_stands_in_nobodys_way():
    torch.manual_seed(0)
    model, given = Attends().eval(), [torch.randn(4, 5, 12) for _ in range(4)]
    fit(model, given, budget={"params": 0.8}, example_inputs=given[0], finals=1)
    assert model.up.out_features < 32


def test_what_came_of_it_can_be_pickled():
    done = fit(blocks(2), inputs(), budget={"params": 0.7}, over=("shrink", "oneshot"), shares=(0.5,), finals=1)
    again = pickle.loads(pickle.dumps(done))
    assert str(again) == str(done)
    assert again.json() == done.json()
    assert widths(again.model) == widths(done.model)
    assert torch.equal(again.model(inputs()[0]), done.model(inputs()[0]))


@pytest.mark.long
def test_entries_leave_together_where_a_pattern_says_so():
    model = blocks(3)
    how = {"over": "oneshot", "shares": SHARES, "finals": 2}
    done = fit(model, inputs(), budget={"params": 0.6}, pattern="2x1", **how)
    for name in done.choice:
        gone = model.get_parameter(name.removesuffix(":layer")).detach() == 0
        assert torch.equal(gone[::2], gone[1::2])
    assert parameters(model) - zeros(model) <= 0.6 * done.dense["params"]


@pytest.mark.parametrize("finals", [1, 3])
def test_a_matrix_that_the_pattern_fits_no_more_is_an_error_that_changes_nothing(finals):
    model = blocks(3, width=8)
    before = state_of(model)
    asked = {"budget": {"params": 0.3}, "over": ("shrink", "oneshot"), "pattern": "2:4", "shares": (0.25, 0.5, 0.7)}
    with pytest.raises(ValueError, match=r"down.weight does not fit the pattern 2:4 any more once units left it: pass"):
        fit(model, inputs(width=8), finals=finals, **asked)
    assert is_unchanged(model, before)


def test_uniform_keeps_equal_widths():
    model = blocks(3)
    fit(model, inputs(), budget={"params": 0.6}, uniform=True, shares=SHARES, finals=1)
    assert len(set(widths(model))) == 1


@pytest.mark.long
def test_a_uniform_fit_loads_by_from_pretrained(tmp_path):
    model, batches = make("llama").eval(), family_batches("llama")
    dense = parameters(model)
    fit(model, batches, budget={"params": 0.8}, uniform=True, shares=(0.25, 0.5), finals=1)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert parameters(loaded) == parameters(model) <= 0.8 * dense
    with torch.no_grad():
        assert torch.equal(loaded(**batches[0]).logits, model(**batches[0]).logits)


@pytest.mark.long
def test_one_seed_is_one_result():
    one, two = blocks(3), blocks(3)
    for model in (one, two):
        fit(model, inputs(), budget={"params": 0.5}, shares=SHARES, finals=1, seed=3)
    assert all(map(torch.equal, one.parameters(), two.parameters()))


def test_of_the_finals_the_best_is_taken(monkeypatch):
    """Whatever the search says of them."""
    asked = []

    def judged(self, choice):
        asked.append(choice)
        return Judged(float(-len(asked)))

    monkeypatch.setattr(fitting.Executor, "judged", judged)
    done = fit(blocks(4), inputs(), budget={"params": 0.6}, shares=SHARES, finals=5)
    assert len(asked) == 4  # and what shrink does by itself
    assert len({tuple(sorted(each.items())) for each in asked}) == 4  # none is finished twice
    assert [*done.finals][:2] == ["shrink, by itself", "searched"]
    assert [*done.finals][-1].startswith("step")
    assert done.choice == asked[-1]
    assert done.got["params"] <= 0.6 * done.dense["params"]
    assert "Finished" in str(done)


@pytest.mark.long
def test_what_shrink_does_by_itself_is_taken_where_it_loses_least(monkeypatch):
    monkeypatch.setattr(fitting.Executor, "judged", lambda *_: Judged(1e9))
    model = blocks(4)
    done = fit(model, inputs(), budget={"params": 0.6}, shares=SHARES, finals=3)
    assert min(done.finals, key=done.finals.get) == done.taken == "shrink, by itself"
    assert dict(zip((f"{at}.up.weight" for at in range(4)), widths(model), strict=True)) == {
        f"{at}.up.weight": done.units.get(f"{at}.up.weight", 20) for at in range(4)
    }
    assert done.got["params"] == done.predicted["params"] == parameters(model) <= 0.6 * done.dense["params"]


def test_what_shrink_does_by_itself_is_what_it_does_of_all_batches(monkeypatch):
    """And is taken where the others are no better but for noise."""
    lucky, even = torch.zeros(32).index_fill(0, torch.tensor([0]), 24.0), torch.ones(32)

    def judged(self, choice):
        fixed = [self.choosing.space.named(each) for each in self.choosing.starts.values()]
        return Judged.by([2 * even if choice in fixed else lucky])

    monkeypatch.setattr(fitting.Executor, "judged", judged)
    monkeypatch.setattr(fitting.Executor, "_lost", lambda *_: Judged.by([even]))
    model, alone = blocks(4), blocks(4)
    done = fit(model, inputs(), budget={"params": 0.6}, shares=SHARES, finals=6)
    assert min(done.finals.values()) < done.finals["shrink, by itself"]
    assert done.taken == "shrink, by itself"
    assert re.search(r"^shrink, by itself +\S+ +taken$", str(done), re.MULTILINE)
    shrink(alone, inputs()[0], 0.4, target="params", batches=inputs())
    assert widths(alone) == widths(model)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("budget", [{"params": 809}, {"bytes": 0.31, "macs": 0.5}], ids=["params", "bytes and macs"])
@pytest.mark.long
def test_what_shrink_reaches_is_reached(budget):
    """A stream's width has no levels, and no choice of others comes to so little."""
    model, alone = words(), words()
    done = fit(model, text(), budget=budget, shares=(0.2,), finals=1)
    assert all(done.got[word] <= done.limits[word] for word in budget)
    assert done.taken == "shrink, by itself"
    assert parameters(model) - zeros(model) == done.got["params"]
    without = {name for name in done.units if name not in {one for its in done.levels.groups.values() for one in its}}
    assert without
    assert re.search(r"what has no levels units leave, 1 in all, such as .*, of whose units \d+ stay", str(done))
    if len(budget) == 1:
        shrink(alone, text()[0][:2], 1 - 809 / parameters(alone), batches=text())
        assert [each.shape for each in alone.parameters()] == [each.shape for each in model.parameters()]
        assert all(map(torch.allclose, model.parameters(), alone.parameters()))


def test_what_shrink_does_by_itself_is_proved_where_it_does_not_run_unproved(monkeypatch):
    """As where a weight is normalized over its inputs, of which one would be left."""
    proved = []

    def unproved(model, *args, verify, **options):
        done = shrink(model, *args, verify=verify, **options)
        proved.append(verify)
        if not verify:
            model.register_forward_pre_hook(broken)
        return done

    def broken(*_):
        raise ValueError("Expected more than 1 value per channel when training")

    monkeypatch.setattr(fitting, "shrink", unproved)
    model = words()
    done = fit(model, text(), budget={"params": 809}, shares=(0.2,), finals=1)
    assert proved[:2] == [False, True]
    assert done.taken == "shrink, by itself"
    assert parameters(model) <= 809
    with pytest.raises(ValueError, match="Expected more than 1 value"):
        fit(words(), text(), budget={"params": 809}, shares=(0.2,), finals=1, verify=False)


def test_what_shrink_does_not_reach_is_an_error_that_changes_nothing():
    model = words()
    before = state_of(model)
    with pytest.raises(ValueError, match="the params cannot come to"):
        fit(model, text(), budget={"params": 0.01}, shares=(0.2,), finals=1)
    assert is_unchanged(model, before)


@pytest.mark.long
def test_of_two_finals_one_is_what_shrink_does():
    done = fit(blocks(4), inputs(), budget={"params": 0.6}, shares=SHARES, finals=2)
    assert {*done.finals} == {"shrink, by itself", "searched"}


@pytest.mark.long
def test_a_latency_is_measured_in_the_end():
    model = blocks(2, width=16, hidden=256)
    done = fit(
        model, inputs(width=16, rows=256), budget={"latency": 0.9, "params": 0.5}, shares=SHARES,
        finals=1,
    )  # fmt: skip
    assert done.got["latency"] > 0
    assert done.measured is not None
    assert parameters(model) <= 0.5 * done.dense["params"]


def close(dense):
    def score(model):
        with torch.no_grad():
            return 1 - ((model(inputs()[3]) - dense).square().mean() / dense.square().mean()).item()

    return score


@pytest.mark.parametrize(
    ("family", "budget"),
    [
        ("llama", {"kv_bytes": 0.5}),
        ("llama", {"kv_bytes": 0.75, "params": 0.9}),
        ("mixtral", {"active_params": 0.8, "kv_bytes": 0.5}),
    ],
)
@pytest.mark.long
def test_what_is_kept_of_a_token_and_what_it_passes_through_are_within_the_budget(family, budget):
    torch.manual_seed(0)
    model, tokens = make(family), torch.arange(3, 9)[None]
    dense = {"kv_bytes": cached(model, tokens), "active_params": active_params(model), "params": parameters(model)}
    done = fit(model, family_batches(family, 4), budget=budget, shares=(0.25, 0.5), finals=2)
    got = {"kv_bytes": cached(model, tokens), "active_params": active_params(model), "params": parameters(model)}
    for word, share in budget.items():
        assert done.dense[word] == pytest.approx(dense[word])
        assert done.got[word] == pytest.approx(got[word])
        assert got[word] <= share * dense[word] * (1 + 1e-9)
    assert "kv_bytes" in str(done)


def cached(model, tokens):
    """Bytes in a model's own cache, of each token."""
    with torch.no_grad():
        kept = model.eval()(input_ids=tokens, use_cache=True).past_key_values
    return sum(each.keys.nbytes + each.values.nbytes for each in kept.layers) / tokens.numel()


@pytest.mark.long
def test_of_entries_that_became_zero_no_token_passes_through():
    torch.manual_seed(0)
    model = make("mixtral")
    dense = active_params(model)
    fit(model, family_batches("mixtral", 4), budget={"active_params": 0.7}, over="oneshot", shares=(0.3, 0.6), finals=1)
    assert active_params(model) <= 0.7 * dense


def test_a_budget_of_what_a_model_does_not_keep_is_an_error_that_changes_nothing():
    model = blocks(2)
    before = state_of(model)
    with pytest.raises(ValueError, match="kv_bytes is of models that keep keys and values"):
        fit(model, inputs(), budget={"kv_bytes": 0.5}, shares=(0.5,), finals=1)
    assert is_unchanged(model, before)


@pytest.mark.long
def test_the_finished_model_keeps_its_score():
    model = blocks(3)
    with torch.no_grad():
        score = close(model(inputs()[3]))
    done = fit(model, inputs(), keep=0.97, score=score, shares=SHARES)
    assert score(model) >= 0.97
    assert done.finished_score == pytest.approx(score(model))
    assert parameters(model) < done.dense["params"]


@pytest.mark.parametrize(("score", "loss_at"), [("change", 0.015), ("cosine", 0.03), ("kl", -math.log(0.97))])
@pytest.mark.long
def test_a_share_of_the_outputs_is_kept_where_there_is_no_score(score, loss_at):
    model = blocks(3)
    done = fit(model, inputs(), keep=0.97, score=score, shares=SHARES)
    assert 0 < done.finished <= loss_at
    assert parameters(model) < done.dense["params"]
    assert "% of the dense model is kept, as " in str(done)


@pytest.mark.long
def test_each_text_keeps_its_own_share():
    every = inputs()
    texts = {"mine": every[:2], "theirs": [each * torch.tensor([5.0] + [0.2] * 5) for each in every[2:]]}
    found = {}
    for theirs in (0.97, 0.3):
        model = blocks(3)
        done = fit(model, texts, keep={"mine": 0.97, "theirs": theirs}, score="change", shares=SHARES)
        assert done.kept["mine"] >= 0.97 - 1e-9
        assert done.kept["theirs"] >= theirs - 1e-9
        assert f"Asked: 97.0% on mine and {theirs:.1%} on theirs of the score" in str(done)
        assert f"Of the dense model {done.kept['mine']:.1%} on mine and" in str(done)
        found[theirs] = parameters(model)
    assert found[0.3] <= found[0.97] < done.dense["params"]


@pytest.mark.long
def test_a_score_that_the_finished_model_does_not_keep_is_an_error_that_changes_nothing(monkeypatch):
    model = blocks(3)
    with torch.no_grad():
        score = close(model(inputs()[3]))
    before = state_of(model)
    monkeypatch.setattr(fitting.ModelLoss, "finished", lambda _: (1.0, 0.5))
    with pytest.raises(ValueError, match=r"no model was found that is smaller and keeps 97\.0% of the score"):
        fit(model, inputs(), keep=0.97, score=score, shares=SHARES)
    assert is_unchanged(model, before)


@pytest.mark.parametrize("over", ["shrink", "oneshot", ("shrink", "oneshot")])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.long
def test_a_call_that_fails_at_the_very_end_changes_nothing(monkeypatch, over, error):
    def fails(_):
        raise error

    model = blocks(3)
    before = state_of(model)
    monkeypatch.setattr(fitting.ModelLoss, "finished", fails)
    with pytest.raises(error):
        fit(model, inputs(), budget={"params": 0.5}, over=over, shares=SHARES, finals=1)
    assert is_unchanged(model, before)
    assert widths(model) == [20, 20, 20]


def test_less_that_left_than_was_chosen_is_an_error_that_changes_nothing(monkeypatch):
    model = blocks(3)
    before = state_of(model)
    monkeypatch.setattr(fitting, "told_of", lambda levels, *_: fitting.Told({next(iter(levels)): 19}))
    with pytest.raises(ValueError, match=r"of the params are left, where .* were asked for and .* chosen"):
        fit(model, inputs(), budget={"params": 0.5}, shares=SHARES, finals=1)
    assert is_unchanged(model, before)


def test_what_costs_no_more_as_it_is_stays_with_a_warning():
    model = blocks(3)
    before = state_of(model)
    with pytest.warns(UserWarning, match="the model costs no more than the budget as it is: nothing leaves") as said:
        done = fit(model, inputs(), budget={"params": 1.0}, shares=SHARES)
    assert [each.filename for each in said] == [__file__]
    assert is_unchanged(model, before)
    assert done.got["params"] == done.dense["params"]
    assert "100%" in str(done)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_dtype_is_fitted(dtype):
    model = blocks(3).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = fit(model, [each.to(dtype) for each in inputs()], budget={"bytes": 0.6}, shares=SHARES, finals=1)
    assert done.got["bytes"] == sum(each.nbytes for each in model.parameters()) <= 0.6 * done.dense["bytes"]
    assert next(model.parameters()).dtype == dtype


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({}, ValueError, "got neither"),
        ({"budget": {"params": 0.5}, "over": ()}, ValueError, "over says which kinds of levels"),
        ({"budget": {"params": 0.5}, "over": "sparsify"}, ValueError, "over says which kinds of levels"),
        ({"budget": {"latency": 0.5}, "over": "oneshot"}, ValueError, "zeros make nothing faster by themselves"),
        ({"budget": {"params": 0.5}, "finals": 0}, ValueError, "finals must be at least 1"),
        ({"budget": {"params": 0.5}, "score": 3}, TypeError, r"score is a function \(model\) -> float"),
        ({"keep": {}}, ValueError, "keep= names no text"),
        ({"keep": {"mine": 2.0}}, ValueError, "mine is the share of the dense model's score"),
        ({"keep": {"mine": 0.9}}, ValueError, "keep= names the text 'mine'; those of the batches are none"),
        ({"keep": 1.1}, ValueError, "keep is the share of the dense model's score"),
        ({"budget": {"params": 0.5}, "forward": lambda m, b: m(b)}, ValueError, "pass example_inputs="),
        ({"budget": {"params": 0.01}, "shares": SHARES}, ValueError, "the params cannot come to"),
        ({"budget": {"params": 0.5}, "include": "nothing.*"}, ValueError, "nothing"),
        ({"budget": {"params": 0.5}, "shares": (1.5,)}, ValueError, "shares must be fractions"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_and_changes_nothing(asked, error, message):
    model = blocks(3)
    before = state_of(model)
    with pytest.raises(error, match=message):
        fit(model, inputs(), **asked)
    assert is_unchanged(model, before)


def test_tied_weights_stay_tied():
    model = blocks(3)
    model[2].up.weight, model[2].down.weight = model[1].up.weight, model[1].down.weight
    before = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(model, inputs(), budget={"params": 0.8}, over="shrink", shares=SHARES, finals=1)
    assert model[2].up.weight is model[1].up.weight
    assert parameters(model) <= 0.8 * parameters(before)


# ---- no budget is exceeded by what is counted -----------------------------------------------------------------------
BLOCKS, ROWS = inputs(width=8), {"unstructured": 1, "rows": 1, "2:4": 4}


@pytest.fixture(scope="module")
def levels_of():
    found = {}
    for pattern, round_to in ROWS.items():
        found[pattern] = making.make_levels(
            blocks(2, 8, 20), BLOCKS, over=("shrink", "oneshot"), shares=(0.2, 0.45, 0.7), pattern=pattern,
            round_to=round_to, verify=False,
        )  # fmt: skip
    return found


def least_of(levels, over, word):
    """The share that is left at the last level of each group."""
    kinds = {kind for each in ([over] if isinstance(over, str) else over) for kind in KINDS[each]}
    last = {name: len(levels[name]) - 1 for name in levels if levels.kind[name] in kinds}
    return levels.cost(last, word) / levels.cost({}, word)


@settings(max_examples=15)
@given(
    pattern=st.sampled_from([*ROWS]),
    over=st.sampled_from(["shrink", "oneshot", ("shrink", "oneshot")]),
    word=st.sampled_from(["params", "bytes", "macs"]),
    share=st.floats(0.3, 0.95),
)
@pytest.mark.long
def test_a_budget_is_never_exceeded_counted_on_the_result(levels_of, pattern, over, word, share):
    model, levels = blocks(2, 8, 20), levels_of[pattern]
    before = state_of(model)
    asked = {"levels": levels, "over": over, "finals": 1, "verify": False}
    unmet = share < least_of(levels, over, word)
    try:
        done = fit(model, BLOCKS, budget={word: share}, **asked)
    except ValueError:  # neither levels nor `shrink` come to so little
        assert unmet
        assert is_unchanged(model, before)
        return
    assert not unmet or done.taken == "shrink, by itself"
    left = {
        "params": sum(int(each.count_nonzero()) for each in model.parameters()),
        "macs": sum(2 * int(each.count_nonzero()) for each in model.parameters() if each.dim() > 1),  # two rows
        "bytes": sum(
            min(4 * each.numel(), 4 * int(each.count_nonzero()) + each.numel() / 8) for each in model.parameters()
        ),
    }
    assert done.got == pytest.approx(left)
    assert left[word] <= share * done.dense[word] * (1 + 1e-9)
    assert done.got[word] <= done.predicted[word] * (1 + 1e-9)


@pytest.mark.parametrize("word", ["params", "bytes"])
def test_entries_of_narrowed_rows_are_no_more_than_was_predicted(word):
    """Shares of matrices are rounded on the rows that are left."""
    model = blocks(2, 7, 19)
    how = {"over": ("shrink", "oneshot"), "pattern": "rows", "shares": (0.2, 0.4, 0.7), "round_to": 1}
    limit = {"params": 204, "bytes": 840}[word]
    done = fit(model, inputs(width=7), budget={word: limit}, finals=1, **how)
    assert done.got["params"] == parameters(model) - zeros(model)
    assert done.shrunk is not None
    assert done.pruned is not None
    assert done.got[word] <= done.predicted[word] <= limit


def test_other_units_that_leave_than_were_chosen_are_an_error_that_changes_nothing(monkeypatch):
    """Though as many leave."""
    real = fitting.shrink

    def swapped(*args, **given):
        (name, count), *rest = given["allocate"].counts.items()
        assert not rest
        other = "1.up.weight" if name == "0.up.weight" else "0.up.weight"
        return real(*args, **given | {"allocate": Units({other: count})})

    model = blocks(2)
    before = state_of(model)
    monkeypatch.setattr(fitting, "shrink", swapped)
    with pytest.raises(
        ValueError, match=r"up.weight: the search chose 20 of its 20 units to stay, but shrink can keep only \d+"
    ):
        fit(model, inputs(), budget={"params": 0.95}, shares=(0.2,), round_to=1, finals=1)
    assert is_unchanged(model, before)


def test_tiles_at_an_edge_count_as_whole_ones():
    """Three rows in tiles of two: which of them stay is not known before."""
    scores = {"a": torch.ones(3, 5)}
    for share in (0.2, 0.5, 0.8):
        count = Entries({"a": share})(scores, share, Block(2, 1))["a"]
        assert 2 * min(count, 5) + max(0, count - 5) <= (1 - share) * 15 < 2 * min(count + 1, 5) + max(0, count - 4)


# ---- what was there before ------------------------------------------------------------------------------------------
def half_empty():
    model = blocks(3)
    oneshot(model, inputs(), sparsity=0.5)
    return model, parameters(model) - zeros(model)


def test_a_model_with_zeros_that_is_within_the_budget_stays():
    model, there = half_empty()
    before = state_of(model)
    with pytest.warns(UserWarning, match="the model costs no more than the budget as it is: nothing leaves"):
        done = fit(model, inputs(), budget={"params": there}, shares=SHARES, finals=1)
    assert is_unchanged(model, before)
    assert done.got["params"] == done.predicted["params"] == there


@pytest.mark.parametrize("over", ["shrink", "oneshot"])
def test_of_a_model_with_zeros_what_is_left_is_counted(over):
    model, there = half_empty()
    done = fit(model, inputs(), budget={"params": there - 20}, over=over, shares=SHARES, finals=1)
    assert done.got["params"] == parameters(model) - zeros(model) <= there - 20


# ---- levels that are given ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("over", ["shrink", "oneshot", ("shrink", "oneshot")])
@pytest.mark.long
def test_of_levels_that_are_given_only_what_is_in_scope_leaves(over):
    scope = {"exclude": "0.*"} if over == "shrink" else {"include": ["1.*", "2.*"]}
    model, dense = blocks(3), blocks(3)
    made = making.make_levels(model, inputs(), over=("shrink", "oneshot"), shares=SHARES, verify=False)
    done = fit(model, inputs(), budget={"params": 0.8}, over=over, levels=made, finals=2, **scope)
    assert done.choice
    assert not [name for name in done.choice if name.startswith("0.")]
    assert all(map(torch.equal, model[0].parameters(), dense[0].parameters()))
    assert done.got["params"] <= 0.8 * done.dense["params"]
    assert "stay whole, such as 0." in str(done)


def test_globs_of_matrices_are_of_their_own_names():
    """And not of all that the units of their rows go with."""
    made = making.make_levels(blocks(3), inputs(), over=("shrink", "oneshot"), shares=SHARES, verify=False)
    asked = {"over": "oneshot", "levels": made, "finals": 1}
    done = fit(blocks(3), inputs(), budget={"params": 0.9}, exclude="*.down.weight", **asked)
    assert {name for name in done.levels if ".up." in name and name.endswith(":layer")}.isdisjoint(done.stays)
    assert {*done.stays} == {name for name in made if name.endswith("down.weight:layer")}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"over": ("shrink", "oneshot")}, "levels= were made over 'shrink': make them over 'oneshot', too"),
        ({"over": "oneshot"}, "levels= were made over 'shrink': make them over 'oneshot', too"),
        ({"over": "experts"}, r"over says which kinds of levels, of 'shrink', 'oneshot'; got \('experts',\)"),
        (
            {"exclude": "*"},
            r"nothing that has levels can leave. 0.up.weight and 2 others: include and exclude",
        ),
        ({"exclude": "nothing*"}, "matches 'nothing"),
    ],
)
def test_levels_that_are_given_are_of_what_is_asked_for(asked, message):
    made = making.make_levels(blocks(3), inputs(), shares=SHARES, verify=False)
    with pytest.raises(ValueError, match=message):
        fit(blocks(3), inputs(), budget={"params": 0.8}, levels=made, **asked)


@pytest.mark.parametrize("asked", [{"solver": "sparsegpt"}, {"pattern": "rows"}])
def test_levels_of_entries_are_of_one_solver_and_pattern(asked):
    made = making.make_levels(blocks(3), inputs(), over="oneshot", shares=SHARES, verify=False)
    with pytest.raises(ValueError, match=f"levels= are of the {next(iter(asked))}"):
        fit(blocks(3), inputs(), budget={"params": 0.8}, over="oneshot", levels=made, **asked)


# ---- what a configuration says --------------------------------------------------------------------------------------
@pytest.mark.long
def test_of_what_a_configuration_says_at_once_all_or_nothing_leaves(tmp_path):
    """Of one layer's units alone no configuration says that they left."""
    model = make("llama").eval()
    scope = {"include": ["model.layers.0.mlp.*", "model.layers.*.self_attn.*"]}
    asked = {"uniform": True, "shares": (0.5,), "finals": 1, **scope}
    done = fit(model, family_batches("llama"), budget={"params": 0.95}, **asked)
    assert not [name for name in done.choice if ".mlp." in name]
    assert "of it and of model.layers.1.mlp" in done.stays["model.layers.0.mlp.gate_proj.weight"]
    counts = {name: int(mask.sum()) for name, mask in done.levels.kept(done.choice).items()}
    kept = {group.name: done.shrunk.kept.get(group.name) for group in done.shrunk.scope.groups}
    assert counts == {name: int(mask.sum()) for name, mask in kept.items() if mask is not None and not mask.all()}
    alone = make("llama").eval()
    before = state_of(alone)
    with pytest.raises(ValueError, match=r"nothing that has levels can leave. .*: one number says"):
        fit(alone, family_batches("llama"), budget={"params": 0.95}, **asked | {"include": "model.layers.0.mlp.*"})
    assert is_unchanged(alone, before)


@pytest.mark.long
def test_what_is_left_in_a_directory_is_counted(tmp_path):
    model = make("llama").eval()
    model.save_pretrained(tmp_path / "dense")
    batches = family_batches("llama", padding=False)
    asked = {"shares": (0.3, 0.5), "finals": 1, "over": ("shrink", "oneshot"), "round_to": 1}
    done = fit(tmp_path / "dense", batches, out=tmp_path / "out", budget={"params": 0.7}, **asked)
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert done.got["params"] == pytest.approx(parameters(loaded) - zeros(loaded), abs=1e-6)
    assert done.got["params"] <= done.predicted["params"] <= 0.7 * parameters(model)
    assert not done.stays


# ---- What a fit says of itself: tables, the knee, and fields of the choice. ----


BENT = [Point(1.0, 0.0), Point(0.8, 0.1), Point(0.6, 0.3), Point(0.4, 4.0)]


@given(st.floats(0.01, 100), st.floats(-10, 10))
def test_the_knee_does_not_depend_on_the_scale_of_the_loss(factor, more):
    assert knee_of([Point(each.share, factor * each.loss + more) for each in BENT]) == 0.6


def test_a_straight_line_has_no_knee():
    assert knee_of([Point(1.0, 0.0), Point(0.5, 0.5), Point(0.0, 1.0)]) is None
    assert knee_of([]) is None
    assert knee_of([Point(1.0, 1.0), Point(0.8, 0.5), Point(0.5, 0.4)]) is None  # it gets better


def test_it_prints_what_was_asked_and_what_came_of_it():
    model = blocks(3)
    done = fit(model, inputs(), budget={"params": 0.7}, shares=(0.3, 0.6))
    text = str(done)
    assert text.startswith("Asked: params 70.0%.")
    for word in ("chosen", "errors", "uniform", "Params left", "0.up.weight", "1 of 4 batches, held back"):
        assert word in text
    assert "<table>" in done._repr_html_()
    assert done.loss == done.chosen.loss
    with pytest.raises(AttributeError, match="Fitted has no 'nothing'"):
        _ = done.nothing


@pytest.mark.long
def test_of_a_score_the_score_is_shown():
    model = blocks(3)
    done = fit(model, inputs(), budget={"params": 0.7}, score=lambda _: 2.5, shares=(0.3, 0.6))
    assert "The score of the dense model is 2.5." in str(done)
    assert "Score" in str(done)
    assert done.finished_score == 2.5


def test_no_batches_are_an_error_that_changes_nothing():
    model = blocks(2)
    before = state_of(model)
    with pytest.raises(ValueError, match="since losses are measured by running the model"):
        fit(model, [], budget={"params": 0.8})
    assert is_unchanged(model, before)
