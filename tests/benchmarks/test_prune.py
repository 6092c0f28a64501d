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


@pytest.mark.parametrize("mode", prune_forward.MODES)
def test_a_child_times_every_variant_in_every_round(mode, monkeypatch):
    monkeypatch.setattr(prune_forward, "SLICE", 1e-6)
    taken = prune_forward.child("twenty linear layers of 16", mode, rounds=3)
    assert set(taken) == set(prune_forward.VARIANTS)
    assert all(len(each) == 3 for each in taken.values())
