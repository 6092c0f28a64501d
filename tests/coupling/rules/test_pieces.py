"""Joining and cutting: pieces are axes of their own where the code takes them by their sizes."""

import functools

import pytest
import torch
import torch.nn.functional as F

from support.traced import assert_a_call_on_slices_gives_the_slices_of_its_result

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "cat": (lambda a, b: torch.cat([a, b], 1), "a,b a,c", 3),
    "column_stack": (lambda a, b: torch.column_stack([a, b]), "a,b a,c", 3),
    "hstack": (lambda a, b: torch.hstack([a, b]), "a,b a,c", 3),
    "vstack": (lambda a, b: torch.vstack([a, b]), "a,b c,b", 3),
    "dstack": (lambda a, b: torch.dstack([a, b]), "a,b,c a,b,d", 4),
    "stack": (lambda a, b: torch.stack([a, b], 1), "a,b a,b", 2),
    "unbind": (lambda a: a.unbind(1), "a,2,b", 2),
    "chunk": (lambda a: a.chunk(2, 1), "a,2b", 3),
    "uneven chunks": (lambda a: a.chunk(2, 1), "a,5", 1),
    "split by number": (lambda a: a.split(2, 1), "a,2b", 1),
    "split by shape": (lambda a, b: a.split([b.shape[0], a.shape[1] - b.shape[0]], 1), "a,b+c b", 4),
    "pad": (functools.partial(F.pad, pad=(1, 2)), "a,b", 2),
    "pad, reflect": (functools.partial(F.pad, pad=(1, 2), mode="reflect"), "a,b,C", 2),
    "glu": (functools.partial(F.glu, dim=1), "a,2b", 2),
    "narrow by shape": (lambda a, b: a.narrow(1, 0, b.shape[0]), "a,b+c b", 4),
    "cat of three": (lambda *parts: torch.cat(parts), "a,b c,b d,b", 4),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)
