"""The search digit by digit, on its own."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.selection import (
    digits,
    overall,
    sources,
)
from support.selecting import by_sorting


@settings(max_examples=60)
@given(data=st.data())
def test_any_floats_by_digits(data):
    """The fall-back that shards use, on its own."""
    values = data.draw(st.lists(st.floats(allow_nan=False), min_size=1, max_size=60))
    tensors = {"a": torch.tensor(values, dtype=torch.float64)}
    kept = data.draw(st.integers(1, len(values)))
    competing, _ = sources.competitors(tensors, kept, None)
    competing[0].mask = torch.empty(len(values), dtype=torch.bool)
    overall._write_masks(competing, digits.search_by_digits(competing, kept))
    assert torch.equal(competing[0].mask, by_sorting(tensors, kept)["a"])
