"""What recover says: the curve, parts of blocks, zeros before and after, what was left out, and where it is."""

from pathlib import Path

from secateur.recovery import LocalPart, Recovered
from support.told import lines_of, tables_of

DONE = Recovered(
    losses=tuple(1 / step for step in range(1, 401)),
    loss="kl",
    parts=(LocalPart("layers.0", "norm", 0.5, 0.25), LocalPart("layers.0", "output", 0.5, 0.125)),
    zeros={"layers.0.weight": (12, 12)},
    rows=1234,
    seconds=1.5,
    left_out=("the rest, since it is hard",),
    out=Path("out"),
)


def test_the_lines_and_where_it_is():
    lines = lines_of(DONE.summary())
    assert "Zeros in 1 weights: 12 before, 12 after." in lines
    assert "Left out: the rest, since it is hard." in lines
    assert lines[-1] == "Wrote out; secateur.json in it says what was done."


def test_few_points_of_the_curve_are_printed_and_more_drawn():
    printed, whole = (tables_of(parts)["curve"] for parts in (DONE.summary(), DONE.content()))
    assert [row[0] for row in printed.texts()][:2] == ["1-40", "41-80"]
    assert len(whole.rows) == 200
    [chart] = whole.charts
    assert (chart.values[0], chart.places[0], chart.along) == (0.75, 1.5, "step")
    short = tables_of(Recovered((0.5, 0.25), "cosine", (), {}, 4, 0.0).content())["curve"]
    assert [row[0] for row in short.texts()] == ["1", "2"]
    assert tables_of(Recovered((), None, (), {}, 0, 0.0).content()) == {}


def test_parts_of_blocks_and_zeros_are_tables():
    found = tables_of(DONE.content())
    assert [row["after"] for row in found["parts"].json()] == [0.25, 0.125]
    assert found["parts"].charts[0].values == [0.5, 0.5, 0.25, 0.125]
    assert found["zeros"].json() == [{"weight": "layers.0.weight", "before": 12, "after": 12}]
    assert "zeros" not in tables_of(DONE.summary())
