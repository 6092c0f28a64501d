"""A chart draws every number that there is, once, in a series of what differs in numbers alone."""

import re

import pytest

from secateur.report import charts
from secateur.report.account import Chart
from secateur.report.charts import chart_of


def drawn(names, values, **form):
    found = chart_of(Chart("Zeros", "of each", names, values, "zeros", **form), "here")
    assert found is not None
    return found


def markers(svg):
    return len(re.findall(r"<use ", str(svg)))


def test_names_that_differ_in_numbers_alone_are_one_series():
    names = [f"layers.{layer}.{part}.weight" for layer in (0, 1, 10) for part in ("up", "down")]
    plot, keys = drawn([*names, "head2.weight"], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], share=True)
    assert [key.name for key in keys] == ["layers.*.up.weight", "layers.*.down.weight", "head2.weight"]
    assert len({(key.color, key.sign) for key in keys}) == 3
    assert plot.title == "Zeros"
    assert "zeros (%)" in str(plot.svg)


def test_what_is_no_number_is_left_out():
    plain, _ = drawn(["a", "b", "c"], [1.0, 2.0, 3.0])
    holes, keys = drawn(["a", "b", "c", "d", "e"], [1.0, None, 2.0, float("nan"), 3.0])
    assert [key.name for key in keys] == ["a", "c", "e"]
    assert markers(plain.svg) == markers(holes.svg)


@pytest.mark.parametrize(
    ("names", "values"),
    [
        ([], []),
        (["a"], [0.5]),
        (["a", "b"], [0.5, None]),
        (["a", "b", "c"], [0.5, 0.5, 0.5]),  # the same everywhere
        ([f"a{n}b" for n in range(25)], [n / 25 for n in range(25)]),  # too many kinds
    ],
)
def test_where_there_is_nothing_to_see_there_is_no_chart(names, values):
    assert chart_of(Chart("Zeros", "", names, values, "zeros"), "here") is None


def test_more_kinds_than_colours_have_other_signs():
    names = [f"kind{n}.weight" for n in range(20)]
    _, keys = drawn(names, [n / 20 for n in range(20)])
    assert len({(key.color, key.sign) for key in keys}) == 20


def test_a_name_is_text():
    plot, keys = drawn(["$\\frac{1}{0}$", "<b>"], [0.1, 0.2])
    assert [key.name for key in keys] == ["$\\frac{1}{0}$", "<b>"]
    assert "<b>" not in str(plot.svg)


def test_two_charts_of_a_page_share_no_id():
    chart = Chart("Zeros", "", ["a", "b"], [0.1, 0.2], "zeros")
    ids = [{*re.findall(r'\bid="([^"]+)"', str(chart_of(chart, prefix)[0].svg))} for prefix in ("one", "two")]
    assert not ids[0] & ids[1]


def test_the_legend_shows_the_markers_that_are_drawn():
    assert [charts._SIGNS[marker] for marker in "osD^v"] == ["●", "■", "◆", "▲", "▼"]
