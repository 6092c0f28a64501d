"""The benchmark of the drop-in's forwards: what it compares computes the same, and its ratios are right."""

import pytest
import torch
from torch.nn.utils import prune as torch_prune

from benchmarks.prune import run as prune_forward
from secateur import prune


@pytest.mark.parametrize("title", prune_forward.CASES)
def test_both_copies_of_each_case_are_pruned_alike_and_compute_the_same(title):
    make, shape, names = prune_forward.CASES[title]
    torch.manual_seed(0)
    dense, x = make(), torch.randn(shape)
    theirs, ours = (prune_forward.pruned(dense, names, library) for library in (torch_prune, prune))
    masks = dict(ours.named_buffers())
    assert len(masks) >= len(names)
    assert all(torch.equal(mask, masks[name]) for name, mask in theirs.named_buffers())
    assert all(2 * int(mask.sum()) == mask.numel() for mask in masks.values())
    with torch.no_grad():
        outputs = [model.eval()(x) for model in (theirs, ours)]
    torch.testing.assert_close(*outputs)


def test_a_line_by_hand():
    taken = {
        "dense": [1e-6, 2e-6, 4e-6], "dense again": [1e-6, 2e-6, 8e-6], "original": [2e-6, 4e-6, 8e-6],
        "ours": [1e-6, 4e-6, 16e-6],
    }  # fmt: skip
    other = {variant: [each[0]] for variant, each in taken.items()}
    row = prune_forward.summary([taken, other])
    assert row["ours/original"] == 0.75  # of 0.5, 1, 2 and 0.5
    assert (row["least"], row["most"]) == (0.5, 1.0)
    assert prune_forward.line("six", "training", row) == (
        "| six | training | 2 | 1.00 | 2.00 | 1.50 | **0.750** (0.500 … 1.000) |"
    )


@pytest.mark.parametrize("mode", prune_forward.MODES)
def test_a_child_times_every_variant_in_every_round(mode, monkeypatch):
    monkeypatch.setattr(prune_forward, "SLICE", 1e-6)
    taken = prune_forward.child("twenty linear layers of 16", mode, rounds=3)
    assert set(taken) == set(prune_forward.VARIANTS)
    assert all(len(each) == 3 for each in taken.values())
