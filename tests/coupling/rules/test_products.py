"""Products: what is multiplied along is one axis of both, and leaves the result."""

import functools

import pytest
import torch
import torch.nn.functional as F

from support.traced import assert_a_call_on_slices_gives_the_slices_of_its_result

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "linear": (F.linear, "b,i o,i o", 3),
    "linear without bias": (lambda x, w: F.linear(x, w), "a,b,i o,i", 4),
    "matmul": (torch.matmul, "a,b,i a,i,o", 4),
    "matmul, one matrix": (lambda a, b: a @ b, "a,b,i i,o", 4),
    "matmul, vector": (torch.matmul, "b,i i", 2),
    "mv": (torch.mv, "b,i i", 2),
    "bmm": (torch.bmm, "a,b,i a,i,o", 4),
    "addmm": (torch.addmm, "o b,i i,o", 3),
    "outer": (torch.outer, "a b", 2),
    "einsum": (functools.partial(torch.einsum, "bij,bjk->bki"), "b,i,j b,j,k", 4),
    "einsum with dots": (functools.partial(torch.einsum, "...ij,jk->...ki"), "a,b,i,j j,k", 5),
    "einsum without arrow": (functools.partial(torch.einsum, "ij,jk"), "i,j j,k", 3),
    "tensordot": (functools.partial(torch.tensordot, dims=2), "a,i,j i,j,b", 4),
    "bilinear": (F.bilinear, "b,i b,j o,i,j o", 4),
    "baddbmm": (torch.baddbmm, "a,b,o a,b,i a,i,o", 4),
    "vector, matmul": (torch.matmul, "i i,o", 2),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)
