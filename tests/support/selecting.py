"""Selection by sorting, to compare with."""

import torch

from secateur.selection import counts_kept_overall, keep_largest_overall


def by_sorting(tensors, kept):
    """The slow truth: a stable descending sort of everything joined, in float64."""
    joined = torch.cat([tensor.reshape(-1).double() + 0.0 for tensor in tensors.values()])
    keep = torch.zeros(joined.numel(), dtype=torch.bool)
    keep[torch.sort(joined, descending=True, stable=True).indices[:kept]] = True
    parts = keep.split([tensor.numel() for tensor in tensors.values()])
    return {name: part.reshape(t.shape) for (name, t), part in zip(tensors.items(), parts, strict=True)}


def check(tensors, kept, scores=None):
    expected = by_sorting(tensors, kept)
    scores = tensors if scores is None else scores
    found = keep_largest_overall(scores, kept)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    assert counts_kept_overall(scores, kept) == {name: int(mask.sum()) for name, mask in expected.items()}
