"""Laws of sensitivity: each cell is what the model loses, measured; the model stays; a killed run goes on."""

import copy
import functools
import json
import pickle
import sys
import types

import pytest
import torch
from torch import nn

import secateur
from secateur.search import Levels, ModelLoss, Sensitivity, choosing, fit, fitting, sensitivity
from secateur.search.sensitivity import FILE, curves_of, given
from secateur.search.space import Class
from support.fitting import blocks, inputs, parameters
from support.forks import interrupted
from support.measured import Picking, TwoStage, text, words
from support.stacks import contents, data, stack
from support.unchanged import is_unchanged, state_of

MODULE = sys.modules["secateur.search.sensitivity"]  # the name is the function


OPTIONS = {"over": ("shrink", "oneshot"), "shares": (0.25, 0.75)}


@pytest.fixture(scope="module")
def found():
    model = words()
    return model, sensitivity(model, text(), score="kl", **OPTIONS)


def test_each_cell_is_what_a_whole_run_measures(found):
    model, said = found
    lost = ModelLoss(words(), text(), score="kl", rows=1024)
    for name, each in said.levels.items():
        assert said.scores[name][0] == 0
        for at in range(1, len(each)):
            with said.levels.assembled(model, {name: at}):
                assert said.scores[name][at] == pytest.approx(lost.of(model), rel=1e-5, abs=1e-9)


def test_rows_that_the_dense_model_selects_are_compared():
    torch.manual_seed(0)
    model, batches = TwoStage(), [{"x": torch.randn(9, 17, 6)} for _ in range(3)]
    given = [{**batch, "rows": model.select(**batch)[1]} for batch in batches]
    found, wanted = (ModelLoss(copy.deepcopy(model), its, score="change", rows=100) for its in (batches, given))
    with torch.no_grad():
        model.features.weight[:, ::2] = 0
    assert not torch.equal(model.select(**batches[0])[1], given[0]["rows"])
    assert found.of(model) == wanted.of(model) > 0


def test_rows_of_one_block_are_none_of_another():
    """A block that is remembered selects nothing."""
    torch.manual_seed(0)
    model, batches = nn.Sequential(*(Picking() for _ in range(3))), [torch.randn(4, 17, 6) for _ in range(2)]
    said = sensitivity(model, batches, score="change", over="shrink", shares=(0.5,), round_to=1)
    lost = ModelLoss(copy.deepcopy(model), batches, score="change", rows=1024)
    assert {name.split(".")[0] for name in said.levels} == {"0", "1", "2"}
    for name in said.levels:
        with said.levels.assembled(model, {name: 1}):
            assert said.scores[name][1] == pytest.approx(lost.of(model), rel=1e-5)


def test_it_can_be_pickled(found):
    model, said = found
    again = pickle.loads(pickle.dumps(said))
    assert str(again) == str(said)
    assert again.scores == said.scores
    name = next(iter(said.levels))
    outputs = []
    for each in (said, again):
        with torch.no_grad(), each.levels.assembled(model, {name: 1}):
            outputs.append(model(text()[0]))
    assert torch.equal(*outputs)


def test_the_model_stays_and_half_of_it_is_run_for_a_cell():
    model = words(layers=4).train()
    state = state_of(model)
    said = sensitivity(model, text(), shares=(0.5,))
    assert is_unchanged(model, state)
    cells = sum(len(each) - 1 for each in said.levels.values())
    assert said.passes == pytest.approx(cells * (4 + 1) / 8)
    assert (said.rows, said.share) == (216, 1.0)


def test_a_function_of_ones_own_is_measured_for_every_cell():
    model, batches = stack(), data()

    @torch.no_grad()
    def sharp(each):
        return float(each(batches[0]).std())

    said = sensitivity(model, batches, score=sharp, shares=(0.5,))
    assert said.score == "sharp"
    assert said.dense == sharp(model)
    for name, (_, value) in said.scores.items():
        with said.levels.assembled(model, {name: 1}):
            assert value == pytest.approx(said.dense - sharp(model))


def test_a_function_is_run_in_evaluation_mode_without_gradients():
    model, seen = stack().train(), set()

    def score(each):
        seen.add((each.training, torch.is_grad_enabled()))
        return float(each(data()[0]).std())

    sensitivity(model, data(), score=score, shares=(0.5,))
    assert seen == {(False, False)}
    assert model.training


@pytest.mark.parametrize("wrong", [None, "much", torch.ones(2)])
@pytest.mark.parametrize("verb", [sensitivity, secateur.fit])
def test_a_score_that_is_no_number_is_named(verb, wrong):
    budget = {"budget": {"params": 0.8}} if verb is secateur.fit else {}
    with pytest.raises(TypeError, match=rf"the score is a {type(wrong).__name__}; return one number, higher is better"):
        verb(stack(), data(), score=lambda _: wrong, shares=(0.5,), **budget)


@pytest.mark.parametrize("verb", [sensitivity, secateur.fit])
@pytest.mark.parametrize("over", ["shrink", "oneshot"])
def test_a_weight_that_is_not_finite_is_named(verb, over):
    model = stack()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    budget = {"budget": {"params": 0.8}} if verb is secateur.fit else {}
    with pytest.raises(ValueError, match=r"head\.weight: the weight of shape .* has entries that are NaN or infinite"):
        verb(model, data(), over=over, shares=(0.5,), **budget)


# ---- on disk --------------------------------------------------------------------------------------------------------
def test_it_is_the_levels_and_their_scores(found, tmp_path):
    said = found[1]
    said.save(tmp_path)
    assert dict(Levels.load(tmp_path)) == dict(said.levels)
    read = Sensitivity.load(tmp_path)
    assert (read.scores, read.score, read.rows, read.passes) == (said.scores, said.score, said.rows, said.passes)
    assert str(read) == str(said)


@pytest.mark.long
def test_the_same_call_gives_the_same_bytes_and_takes_what_is_there(tmp_path, monkeypatch):
    for name in ("one", "two"):
        sensitivity(words(), text(), store=tmp_path / name, **OPTIONS)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    monkeypatch.setattr(MODULE, "Replayed", None)
    again = sensitivity(words(), text(), store=tmp_path / "one", **OPTIONS)
    assert again.scores == Sensitivity.load(tmp_path / "two").scores


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_scores(tmp_path):
    with interrupted(MODULE, "_write", 5):
        sensitivity(words(), text(), store=tmp_path / "killed", **OPTIONS)
    with pytest.raises(ValueError, match="is not measured yet; run the same call again"):
        Sensitivity.load(tmp_path / "killed")
    on = sensitivity(words(), text(), store=tmp_path / "killed", **OPTIONS)
    whole = sensitivity(words(), text(), store=tmp_path / "whole", **OPTIONS)
    assert on.scores == whole.scores
    assert on.passes == pytest.approx(whole.passes)


def test_another_score_is_measured_anew(tmp_path):
    first = sensitivity(words(), text(), store=tmp_path, shares=(0.5,))
    other = sensitivity(words(), text(), score="cosine", store=tmp_path, shares=(0.5,))
    assert first.score != other.score
    assert Sensitivity.load(tmp_path).scores == other.scores


def as_size(model):
    return float(sum(int(each.count_nonzero()) for each in model.parameters()))


def constant(_):
    return 1000.0


def as_constant(model):
    return 1000.0 + as_size(model) - as_size(stack())


def renamed(function, name):
    """The same code under another name, or other code under the same."""
    made = types.FunctionType(function.__code__, function.__globals__, name)
    made.__qualname__ = name
    return made


class Scored:
    def __init__(self, times):
        self.times = times

    def score(self, model):
        return 1000.0 + self.times * (as_size(model) - as_size(stack()))

    __call__ = score


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda _: 1000.0, lambda model: 1000.0 + as_size(model) - as_size(stack())),
        (functools.partial(Scored.score, Scored(0)), functools.partial(Scored.score, Scored(1))),
        (Scored(0).score, Scored(1).score),
        (Scored(0), Scored(1)),
    ],
)  # fmt: skip
def test_of_a_function_without_a_name_of_its_own_no_scores_are_taken(one, other, tmp_path):
    first = sensitivity(stack(), data(), score=one, shares=(0.5,), store=tmp_path)
    again = sensitivity(stack(), data(), score=other, shares=(0.5,), store=tmp_path)
    assert first.dense == again.dense
    assert {*first.scores.values()} == {(0.0, 0.0)}
    assert all(lost > 0 for _, lost in again.scores.values())
    assert Sensitivity.load(tmp_path).scores == again.scores


def test_a_function_of_the_same_name_and_other_code_is_another(tmp_path):
    first = sensitivity(stack(), data(), score=renamed(constant, "score"), shares=(0.5,), store=tmp_path)
    again = sensitivity(stack(), data(), score=renamed(as_constant, "score"), shares=(0.5,), store=tmp_path)
    assert first.dense == again.dense
    assert first.scores != again.scores


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.update(format="another"),
        lambda said: said.update(version=7),
        lambda said: said.update(more=1),
        lambda said: said.update(of_levels="0"),
        lambda said: said.update(rows=-1),
        lambda said: said.update(scores={"nothing": [0.0]}),
        lambda said: said["scores"].update({"blocks.0.up.weight": [0.0]}),
        lambda said: said["scores"].update({"blocks.0.up.weight": [0.0, "much", 1.0]}),
        lambda said: said["scores"].update({next(iter(said["scores"])): [0.0, True, 1.0]}),
        lambda said: said["scores"].update({name: [-1.0] * len(each) for name, each in said["scores"].items()}),
        lambda said: said.update(function=3),
        lambda said: said["scores"].update({next(iter(said["scores"])): [0.0, 10**400, 1.0]}),
        lambda said: said.pop("passes"),
    ],
)
def test_a_hostile_file_gives_one_error(found, tmp_path, change):
    found[1].save(tmp_path)
    said = json.loads((tmp_path / FILE).read_text())
    change(said)
    (tmp_path / FILE).write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"scores\.json: damaged"):
        Sensitivity.load(tmp_path)


# ---- Levels that are there already: only this model's, and what was measured is not measured again. ----


THREE = (0.25, 0.5, 0.75)


@pytest.fixture
def stored(tmp_path):
    model = blocks(3)
    return model, sensitivity(model, inputs(), shares=THREE, store=tmp_path / "levels"), tmp_path / "levels"


def test_a_fit_begins_with_what_sensitivity_wrote(stored, monkeypatch):
    model, measured, folder = stored
    monkeypatch.setattr(fitting, "make_levels", None)
    monkeypatch.setattr(choosing.LevelSearch, "_alone", None)  # what was measured is not measured again
    done = fit(model, inputs(), budget={"params": 0.7}, levels=folder, finals=2)
    assert parameters(model) <= 0.7 * done.dense["params"]
    assert dict(done.levels) == dict(measured.levels)
    assert "Searched on 1 of 4 batches, which the levels that were given may know, in" in str(done)


def test_levels_alone_will_do_and_so_will_what_was_returned(stored):
    model, measured, folder = stored
    one = given(measured, model)
    two = given(folder, model)
    assert one.scores == two.scores == measured.scores
    assert one.score == two.score == "change"
    assert given(measured.levels, model).scores == {}
    assert dict(given(str(folder), model).levels) == dict(measured.levels)


def test_what_was_measured_by_another_score_is_measured_by_this_one(stored, monkeypatch):
    model, measured, _ = stored
    asked = []
    monkeypatch.setattr(fitting, "PASSES", 12.0)
    alone = choosing.LevelSearch._alone
    monkeypatch.setattr(choosing.LevelSearch, "_alone", lambda *given: asked.append(given) or alone(*given))
    fit(model, inputs(), budget={"params": 0.7}, levels=measured, score="cosine", finals=1)
    assert asked


def test_levels_of_another_model_are_refused(stored):
    model, measured, folder = stored
    with torch.no_grad():
        model[0].down.bias[0] += 1e-3
    for each in (measured, folder, measured.levels):
        with pytest.raises(ValueError, match="levels= are of another model, or of other weights of it"):
            fit(model, inputs(), budget={"params": 0.7}, levels=each)


def test_a_pattern_is_that_of_the_levels(tmp_path):
    model, batches = blocks(3, width=8), inputs(width=8)
    asked = {"budget": {"params": 0.7}, "over": "oneshot", "finals": 1}
    measured = sensitivity(model, batches, over="oneshot", pattern="2:4", store=tmp_path / "levels")
    assert {len(each) for each in measured.levels.values()} == {2}
    with pytest.raises(ValueError, match="levels= are of the pattern 2:4, and pattern= says 1:4; leave it out"):
        fit(model, batches, levels=tmp_path / "levels", pattern="1:4", **asked)
    done = fit(model, batches, levels=tmp_path / "levels", **asked)
    assert {layer.sparsity for layer in done.pruned.layers} == {0.5}


def test_what_is_no_levels_is_refused(stored, tmp_path):
    model, measured, _ = stored
    with pytest.raises(TypeError, match=r"levels= is what sensitivity or make_levels gave.*not a int"):
        fit(model, inputs(), budget={"params": 0.7}, levels=3)
    with pytest.raises(FileNotFoundError):
        fit(model, inputs(), budget={"params": 0.7}, levels=tmp_path / "nothing")
    for other in ({"shares": (0.5,)}, {"round_to": 4}):
        with pytest.raises(ValueError, match="levels= have their own shares and round_to"):
            fit(model, inputs(), budget={"params": 0.7}, levels=measured, **other)
    with pytest.raises(ValueError, match="levels= were made over 'shrink': make them over 'oneshot', too"):
        fit(model, inputs(), budget={"params": 0.7}, levels=measured, over="oneshot")


def test_a_curve_is_the_sum_of_what_goes_together_and_never_falls():
    classes = [Class(("a", "b"), ((0, 0), (1, 2))), Class(("c",), ((0,), (1,)))]
    scores = {"a": (0.0, 1.0), "b": (0.0, 5.0, 2.0), "c": (0.0, -1.0)}
    assert curves_of(scores, classes) == [[0.0, 3.0], [0.0, 0.0]]
    assert curves_of({"a": (0.0, 1.0)}, classes) is None
