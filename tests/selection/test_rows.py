"""The k largest of each row, and what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.selection import LazyScores, keep_largest, keep_largest_overall, rows
from support.selecting import by_sorting


@settings(max_examples=60)
@given(
    groups=st.integers(0, 20),
    units=st.sampled_from([1, 2, 4, 7, 8, 9, 33]),
    seed=st.integers(0, 999),
    share=st.floats(0, 1),
    values=st.integers(1, 20),
    half=st.booleans(),
)
def test_rows(groups, units, seed, share, values, half):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(-values, values, (groups, units), generator=generator).float()
    table = table.bfloat16() if half else table
    kept = round(share * units)
    mask = keep_largest(table, kept)
    for row, keep in zip(table, mask, strict=True):
        assert torch.equal(keep, by_sorting({"row": row}, kept)["row"])
    counts = torch.randint(0, units + 1, (groups,), generator=generator)
    for row, keep, count in zip(table, keep_largest(table, counts), counts, strict=True):
        assert torch.equal(keep, by_sorting({"row": row}, int(count))["row"])
    assert torch.equal(keep_largest(table, torch.full((groups,), kept)), mask)


def test_rows_by_rank_on_a_device():
    table = torch.randint(0, 4, (500, 4)).float()
    ranked = rows._first_of_ranks_on_device(table, 2)
    assert torch.equal(ranked, keep_largest(table, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: keep_largest(torch.zeros(3), 1), r"shape \(groups, units\), not \(3,\)"),
        (lambda: keep_largest(torch.zeros(2, 3), 4), "can't keep 4 of 3 units"),
        (lambda: keep_largest(torch.zeros(2, 3), -1), "can't keep -1 of 3 units"),
        (lambda: keep_largest(torch.zeros(2, 3), torch.tensor([1, 9])), "can't keep 9 of 3 units"),
        (lambda: keep_largest(torch.zeros(2, 3), torch.tensor([1.0, 2.0])), "must be integers of shape"),
        (lambda: keep_largest(torch.full((2, 3), math.nan), 1), "NaN"),
        (lambda: keep_largest(torch.full((2, 30), math.nan), 1), "NaN"),
        (lambda: keep_largest(torch.full((1, 30), math.nan), 0), "NaN"),
        (lambda: keep_largest_overall({"a": torch.zeros(2)}, 3), "can't keep 3 of 2 entries"),
        (lambda: keep_largest_overall({"a": torch.zeros(2, dtype=torch.cfloat)}, 1), "a: complex scores"),
        (lambda: keep_largest_overall({"a": torch.zeros(2, device="meta")}, 1), "a: on the meta device"),
        (
            lambda: keep_largest_overall({"a": torch.zeros(2)}, 1, among={"a": torch.ones(3)}),
            r"a: a mask of shape \(3,\)",
        ),
        (lambda: LazyScores({"a": torch.zeros(2)}, lambda w: w[:1])["a"], r"returned scores of shape \(1,\)"),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_counts_are_integers_and_rows_may_be_empty():
    assert keep_largest(torch.zeros(5, 0), 0).shape == (5, 0)
    assert keep_largest(torch.randn(3, 9), np.int64(2)).sum(1).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="can't keep 99 of 9 units"):
        keep_largest(torch.zeros(1, 9), np.int64(99))
    with pytest.raises(TypeError, match="a count is an integer"):
        keep_largest(torch.zeros(3, 9), 1.5)
