"""A result says its numbers."""

import math

import pytest
import torch

from secateur.recovery.local import LocalPart
from secateur.recovery.result import Judged, Recovered, memory_of


def test_a_result_prints_as_tables():
    done = Recovered(
        losses=tuple(1 / step for step in range(1, 41)),
        loss="kl",
        parts=(LocalPart("layers.0", "norm", 0.5, 0.25), LocalPart("layers.0", "output", 0.5, 0.125)),
        zeros={"layers.0.weight": (12, 12)},
        rows=1234,
        seconds=1.5,
        memory=2_000_000,
        left_out=("the rest, since it is hard",),
    )
    text = str(done)
    assert "layers.0 norm 0.50000 0.25000" in " ".join(text.split())
    assert "2 parts of blocks: mean relative error 0.18750 to the teacher, before 0.50000." in text
    assert "40 steps over 1,234 rows: the loss (kl) went from 0.52083 to" in text
    assert "Zeros in 1 weights: 12 before, 12 after." in text
    assert "Left out: the rest, since it is hard." in text
    assert "1.5 s, at most 2 MB of memory." in text
    assert len(done.curve()) == 10
    assert done.curve()[0][:2] == (1, 4)
    assert done.curve()[-1][1] == 40
    assert done.last < done.first
    assert done.steps == 40


def test_a_result_of_nothing_but_blocks():
    done = Recovered((), None, (LocalPart("0", "output", 1.0, 0.5),), {}, 0, 0.1)
    assert done.first is None
    assert done.last is None
    assert done.curve() == []
    assert "No weight has zeros to keep." in str(done)
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
