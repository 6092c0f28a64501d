"""What a fit says of itself: tables, the knee, and fields of the choice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.search import fit
from secateur.search.result import Point, knee_of
from support.fitting import blocks, inputs

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


def test_of_a_score_the_score_is_shown():
    model = blocks(3)
    done = fit(model, inputs(), budget={"params": 0.7}, score=lambda _: 2.5, shares=(0.3, 0.6))
    assert "The score of the dense model is 2.5." in str(done)
    assert "Score" in str(done)
    assert done.finished_score == 2.5
