"""Pointwise functions: what is broadcast together is one axis."""

import pytest
import torch
import torch.nn.functional as F

from support.traced import assert_a_call_on_slices_gives_the_slices_of_its_result

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "add, broadcast": (lambda a, b: a + b, "a,b,c b,1", 3),
    "gelu": (F.gelu, "a,b", 2),
    "prelu": (F.prelu, "a,b b", 2),
    "where": (lambda a, b: torch.where(a > 0, a, b), "a,b a,b", 2),
    "masked_fill": (lambda a: a.masked_fill(a < 0, 0.0), "a,b", 2),
    "in place": (lambda a, b: a.clone().mul_(b), "a,b b", 2),
    "complex numbers": (lambda a, b: torch.view_as_real(torch.polar(a.abs(), b) * 2), "a,b a,b", 2),
    "pairs as complex": (lambda a: torch.view_as_complex(a).abs(), "a,b,2", 2),
    "type_as": (lambda a, b: a.type_as(b), "a,b c,d,e", 5),
    "three, broadcast": (torch.addcmul, "a,b b a,1", 2),
    "subtracted twice": (lambda a, b: a - b - b, "a,b a,b", 2),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)
