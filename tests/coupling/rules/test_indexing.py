"""Indexing: what is taken by its number stays, what is sliced by a size follows the size."""

import pytest
import torch
import torch.nn.functional as F

from support.traced import assert_a_call_on_slices_gives_the_slices_of_its_result

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "slice by number": (lambda a: a[:, :4], "a,6", 2),
    "slice by shape": (lambda a, b: a[:, : b.shape[0]], "a,b+c b", 4),
    "slice of the rest": (lambda a, b: a[:, b.shape[0] :], "a,b+c b", 4),
    "slice from the end": (lambda a, b: a[:, -b.shape[0] :], "a,b+c b", 4),
    "every second": (lambda a: a[:, 1::2], "a,2b", 2),
    "one by number": (lambda a: a[:, 2], "a,B", 1),
    "dots and none": (lambda a: a[..., None, :], "a,b", 2),
    "chosen by a tensor": (lambda a: a[:, torch.tensor([0, 2])], "a,B", 1),
    "index_select": (lambda a: a.index_select(1, torch.tensor([0, 2])), "a,B", 1),
    "assigned": (lambda a, b: _assigned(a, b), "a,b a,b", 2),
    "index_add": (lambda a, b: a.index_add(0, torch.tensor([1, 0]), b), "a,b 2,b", 1),
    "scatter": (lambda a, b: a.scatter(1, torch.tensor([[1, 0]] * 3), b), "3,b 3,2", 0),
    "masked_scatter": (
        lambda a, b: a.masked_scatter(torch.tensor([True, False, True])[:, None].expand_as(a), b),
        "3,b 4,b",
        1,
    ),
    "embedding": (lambda w: F.embedding(torch.tensor([[0, 1], [1, 0]]), w), "a,b", 1),
    "gather": (lambda a: a.gather(1, torch.tensor([[0], [1]])), "2,b", 0),
}


def _assigned(a, b):
    out = torch.zeros_like(a)
    out[:, : a.shape[1]] = b * a
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)
