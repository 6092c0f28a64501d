"""Levels that are there already: only this model's, and what was measured is not measured again."""

import pytest
import torch

from secateur.search import choosing, fit, fitting, sensitivity
from secateur.search.sensitivity import curves_of, given
from secateur.search.space import Class
from support.fitting import blocks, inputs, parameters

SHARES = (0.25, 0.5, 0.75)


@pytest.fixture
def found(tmp_path):
    model = blocks(3)
    return model, sensitivity(model, inputs(), shares=SHARES, store=tmp_path / "levels"), tmp_path / "levels"


def test_a_fit_begins_with_what_sensitivity_wrote(found, monkeypatch):
    model, measured, folder = found
    monkeypatch.setattr(fitting, "make_levels", None)
    monkeypatch.setattr(choosing.LevelSearch, "_alone", None)  # what was measured is not measured again
    done = fit(model, inputs(), budget={"params": 0.7}, levels=folder, finals=2)
    assert parameters(model) <= 0.7 * done.dense["params"]
    assert dict(done.levels) == dict(measured.levels)
    assert "Searched on 1 of 4 batches, which the levels that were given may know, in" in str(done)


def test_levels_alone_will_do_and_so_will_what_was_returned(found):
    model, measured, folder = found
    one = given(measured, model)
    two = given(folder, model)
    assert one.scores == two.scores == measured.scores
    assert one.score == two.score == "change"
    assert given(measured.levels, model).scores == {}
    assert dict(given(str(folder), model).levels) == dict(measured.levels)


def test_what_was_measured_by_another_score_is_measured_by_this_one(found, monkeypatch):
    model, measured, _ = found
    asked = []
    monkeypatch.setattr(fitting, "PASSES", 12.0)
    alone = choosing.LevelSearch._alone
    monkeypatch.setattr(choosing.LevelSearch, "_alone", lambda *given: asked.append(given) or alone(*given))
    fit(model, inputs(), budget={"params": 0.7}, levels=measured, score="cosine", finals=1)
    assert asked


def test_levels_of_another_model_are_refused(found):
    model, measured, folder = found
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


def test_what_is_no_levels_is_refused(found, tmp_path):
    model, measured, _ = found
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
