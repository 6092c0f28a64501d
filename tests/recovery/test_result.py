"""What recover says: the curve, parts of blocks, zeros before and after, what was left out, and where it is."""

import math
from pathlib import Path

import pytest
import torch

from secateur.recovery import LocalPart, Recovered
from secateur.recovery.result import Judged, memory_of
from support.told import lines_of, tables_of

DONE = Recovered(
    losses=tuple(1 / step for step in range(1, 401)),
    loss="kl",
    parts=(LocalPart("layers.0", "norm", 0.5, 0.25), LocalPart("layers.0", "output", 0.5, 0.125)),
    zeros={"layers.0.weight": (12, 12)},
    rows=1234,
    seconds=1.5,
    memory=2_000_000,
    left_out=("the rest, since it is hard",),
    out=Path("out"),
)
NOTHING = Recovered((), None, (), {}, 0, 0.0)


def test_the_lines_and_where_it_is():
    assert lines_of(DONE.summary())[-7:] == [
        "2 parts of blocks: mean relative error 0.18750 to the teacher, before 0.50000.",
        "400 steps over 1,234 rows: the loss (kl) went from 0.10696 to 0.00263, over the first and last tenth.",
        "Zeros in 1 weights: 12 before, 12 after.",
        "Left out: the rest, since it is hard.",
        "1.5 s, at most 2 MB of memory.",
        "",
        "Wrote out; secateur.json in it says what was done.",
    ]
    assert lines_of(NOTHING.summary()) == ["No weight has zeros to keep.", "0.0 s."]


def test_few_points_of_the_curve_are_printed_and_more_drawn():
    printed, whole = (tables_of(parts)["curve"] for parts in (DONE.summary(), DONE.content()))
    assert [row[0] for row in printed.texts()][:2] == ["1-40", "41-80"]
    assert len(whole.rows) == 200
    [chart] = whole.charts
    assert (chart.values[0], chart.places[0], chart.along) == (0.75, 1.5, "step")
    assert (DONE.steps, len(DONE.curve()), DONE.curve()[-1][1]) == (400, 10, 400)
    short = tables_of(Recovered((0.5, 0.25), "cosine", (), {}, 4, 0.0).content())["curve"]
    assert [row[0] for row in short.texts()] == ["1", "2"]
    assert tables_of(NOTHING.content()) == {}
    assert (NOTHING.first, NOTHING.last, NOTHING.curve()) == (None, None, [])


def test_parts_of_blocks_and_zeros_are_tables():
    found = tables_of(DONE.content())
    assert [row["after"] for row in found["parts"].json()] == [0.25, 0.125]
    assert found["parts"].charts[0].values == [0.5, 0.5, 0.25, 0.125]
    assert found["zeros"].json() == [{"weight": "layers.0.weight", "before": 12, "after": 12}]
    assert "zeros" not in tables_of(DONE.summary())


def test_the_memory_is_that_of_the_process():
    assert memory_of(torch.device("cpu")) is None or memory_of(None) > 1e6


def test_what_is_worse_is_not_kept_and_what_rounding_does_is_not_worse():
    assert Judged(1, 0.5, 0.5004, "kl").is_kept
    assert not Judged(1, 0.5, 0.501, "kl").is_kept
    assert not Judged(1, 0.0, 1e-9, "kl").is_kept
    assert not Judged(1, 0.5, math.nan, "kl").is_kept
    assert Judged(3, 0.5, math.inf, "kl").described() == {"batches": 3, "before": 0.5, "after": None, "loss": "kl"}
    with pytest.warns(
        UserWarning, match=r"^Over 2 batches .* them: they are not kept\. Lower rate= \(0.001; try 0.0003\)"
    ):
        Judged(2, 0.5, 0.6, "kl").warn(1e-3)
    Judged(2, 0.5, 0.4, "kl").warn(1e-3)
