"""Reductions: an axis that sums run over may lose zeros, one in which something is chosen may not."""

import functools

import pytest
import torch
import torch.nn.functional as F

from support.traced import assert_a_call_on_slices_gives_the_slices_of_its_result

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "sum": (lambda a: a.sum(1), "a,b,c", 3),
    "norm": (lambda a: a.norm(dim=-1), "a,b,c", 3),
    "normalize": (functools.partial(F.normalize, dim=1), "a,b,c", 3),
    "max": (lambda a: a.max(1).values, "a,b,c", 2),
    "argmax": (lambda a: a.argmax(1), "a,b,c", 2),
    "vector_norm": (functools.partial(torch.linalg.vector_norm, dim=1), "a,b,c", 3),
    "vector_norm of the largest": (functools.partial(torch.linalg.vector_norm, ord=torch.inf, dim=1), "a,b", 0),
    "cosine_similarity": (functools.partial(F.cosine_similarity, dim=1), "a,b a,b", 2),
    "sum of all": (lambda a: a.sum(), "a,b", 2),
    "sum, kept": (lambda a: a.sum((0, 2), keepdim=True), "a,b,c", 3),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)
