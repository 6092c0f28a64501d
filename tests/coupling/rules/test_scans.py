"""Functions that look along a dimension: it stays, and the others go on."""

import pytest
import torch

from support.traced import assert_a_call_on_slices_gives_the_slices_of_its_result

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "sort": (lambda a: a.sort(1).values, "a,b,c", 2),
    "roll": (lambda a: a.roll(1, 0), "a,b", 1),
    "flip": (lambda a: a.flip(0), "a,b", 1),
    "tril": (torch.tril, "a,b,c", 1),
    "fft": (lambda a: torch.fft.fft(a, dim=1).real, "a,b,c", 2),
    "rfft": (lambda a: torch.fft.rfft(a).abs(), "a,b,c", 2),
    "fftn": (lambda a: torch.fft.fftn(a, dim=(1, 2)).imag, "a,b,c", 1),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)
