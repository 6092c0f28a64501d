"""A chart draws every number that there is, once, in a series of what differs in numbers alone."""

import re

import pytest

from secateur.report import charts
from secateur.report.charts import chart_of, map_of
from secateur.support import Chart


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


def test_what_has_nothing_to_do_with_its_neighbour_is_not_joined():
    """A line is as wide as is said, and points are where they are said to be."""
    names, values = [f"layers.{at // 3}: {at % 3}" for at in range(6)], [0.1, 0.5, 0.3, 0.2, 0.9, 0.4]
    form = {"series": ["stays", "leaves"] * 3, "places": [0, 0, 0, 1, 1, 1], "along": "layers"}
    plot, keys = drawn(names, values, joined=False, **form)
    assert [key.name for key in keys] == ["stays", "leaves"]
    assert markers(plot.svg) >= 6
    assert "layers" in str(plot.svg)
    assert "in their order" not in str(plot.svg)
    joined, _ = drawn(names, values, **form)
    widths = [re.findall(r"stroke-width: ([0-9.]+)", str(each.svg)) for each in (joined, plot)]
    assert widths[0] != widths[1]
    chosen, keys = drawn(names, values, joined=False, chosen="leaves", most=0.5, **form)
    assert [key.sign for key in keys] == ["●", "★"]
    assert ["stroke-dasharray" in str(each.svg) for each in (plot, chosen)] == [False, True]  # the line


BLOCKS = [f"model.layers.{block}.{part}.weight" for block in (0, 1, 10) for part in ("up", "down")]


def mapped(names, values, **form):
    return map_of(Chart("Errors", "", names, values, "error", **form))


def test_a_map_has_a_row_a_kind_and_a_column_a_block():
    found = mapped([*BLOCKS, "head.weight"], [0.0, 1.0, 2.0, 3.0, 4.0, None, 100.0])
    assert [label for label, _ in found.rows] == ["up", "down"]
    assert found.columns == [0, 1, 10]
    assert [[None if each is None else each[0] for each in fields] for _, fields in found.rows] == [
        [0.0, 0.5, 1.0],
        [0.25, 0.75, None],
    ]
    assert found.rows[1][1][1][1] == "model.layers.1.down.weight: 3"
    assert (found.low, found.high) == ("0", "4")


def test_a_map_of_shares_begins_at_the_least():
    found = mapped(BLOCKS[:4], [0.5, 0.6, 0.7, 0.9], share=True)
    assert (found.low, found.high) == ("50 %", "90 %")
    assert [fields[0][0] for _, fields in found.rows] == pytest.approx([0.0, 0.25])


@pytest.mark.parametrize(
    ("names", "values"),
    [
        ([], []),
        (["a.weight", "b.weight"], [1.0, 2.0]),  # no blocks
        (["a.0.up", "a.0.down"], [1.0, 2.0]),  # one block
        (BLOCKS, [0.5] * 6),  # the same everywhere
        (BLOCKS, [-1.0, 1.0, 1.0, 1.0, 1.0, 2.0]),  # what is below nothing is no darkness
        ([f"{block}.kind{n}x" for n in range(41) for block in (0, 1)], [float(n) for n in range(82)]),
    ],
)
def test_where_there_is_no_depth_there_is_no_map(names, values):
    assert mapped(names, values) is None


def test_a_map_may_say_where_things_are():
    found = mapped(["x", "y", "z"], [1.0, 2.0, 4.0], grid=[("expert 0", 0), ("expert 1", 0), ("expert 0", 1)])
    assert found is None or [label for label, _ in found.rows] == ["expert 0"]  # a row of one field says nothing
    with pytest.raises(ValueError, match="3 values and 1 beside"):
        mapped(["x", "y", "z"], [1.0, 2.0, 4.0], grid=[("expert 0", 0)])
    assert mapped(["100%", "88.7%", "77.4%"], [0.0, 0.1, 0.4], places=[0, 11.3, 22.6]) is None  # budgets are no blocks
