"""Tensors that are made: of sizes that were asked for they lose what those lose."""

import pytest
import torch

from support.traced import assert_a_call_on_slices_gives_the_slices_of_its_result

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "zeros by shape": (lambda a: torch.zeros(a.shape[0], 2) + a.sum(1, keepdim=True), "a,b", 2),
    "counted": (lambda a: torch.arange(a.shape[1]) + a, "a,b", 1),
    "ones of a number": (lambda a: torch.ones(4) + a, "a,4", 1),
    "new_zeros": (lambda a: a.new_zeros(a.shape[1], a.shape[0]) + a.t(), "a,b", 2),
    "full": (lambda a: torch.full((a.shape[0], 1), 2.0) * a, "a,b", 2),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)
