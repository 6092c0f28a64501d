"""What recover says: zeros before and after, what was left out; on a page the curve, parts and zeros."""

from pathlib import Path

from secateur.cli.printing import recovered_parts
from secateur.recovery import LocalPart, Recovered, recovered_sheets

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
    lines = list(recovered_parts(DONE))
    assert "Zeros in 1 weights: 12 before, 12 after." in lines
    assert "Left out: the rest, since it is hard." in lines
    assert lines[-1] == "Wrote out; secateur.json in it says what was done."
    assert sum("out" in line for line in lines if line.startswith(("In ", "Wrote"))) == 1


def test_the_sheets():
    curve, blocks, zeros = recovered_sheets(DONE)
    assert len(curve.rows) == 20
    assert curve.cells[0].texts[:2] == ["1-20", "21-40"]
    [chart] = curve.charts
    assert len(chart.values) == 200
    assert chart.values[0] == 0.75
    assert (chart.names[0], chart.places[0], chart.along) == ("steps 1-2", 1.5, "step")
    assert blocks.cells[3].values == [0.25, 0.125]
    assert zeros.cells[1].values == zeros.cells[2].values == [12]
    assert blocks.charts[0].values == [0.5, 0.5, 0.25, 0.125]
    short = recovered_sheets(Recovered((0.5, 0.25), "cosine", (), {}, 4, 0.0))[0]
    assert (short.cells[0].texts, short.charts[0].names) == (["1", "2"], ["step 1", "step 2"])
    assert recovered_sheets(Recovered((), None, (), {}, 0, 0.0)) == []
