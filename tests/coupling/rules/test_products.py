"""Products: what is multiplied along is one axis of both, and leaves the result."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secateur import shrink
from secateur.coupling import find_coupling
from support.traced import assert_a_call_on_slices_gives_the_slices_of_its_result

SOLVE = functools.partial(torch.linalg.solve_triangular, upper=False, unitriangular=True)

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
    "solve_triangular": (SOLVE, "a,b,i,i a,b,i,o", 3),
    "solve_triangular, one system": (SOLVE, "i,i a,i,o", 2),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)


class Grouped(nn.Module):
    """Rows go to one of two matrices."""

    def __init__(self, inputs=8, hidden=12, outputs=8):
        super().__init__()
        self.inp, self.out = nn.Linear(3, inputs), nn.Linear(outputs, 2)
        self.up = nn.Parameter(torch.randn(2, inputs, hidden))
        self.down = nn.Parameter(torch.randn(2, outputs, hidden))

    def forward(self, x):
        ends = torch.tensor([3, 7], dtype=torch.int32, device=x.device)
        inside = F.grouped_mm(self.inp(x), self.up, offs=ends).relu()
        return self.out(F.grouped_mm(inside, self.down.transpose(1, 2), offs=ends))


def test_grouped_products_lose_rows_that_kernels_can_load():
    coupling = find_coupling(Grouped(), torch.randn(7, 3))
    found = {group.members: group.multiple for group in coupling.groups}
    assert found == {
        (("up", 1), ("inp.weight", 0), ("inp.bias", 0)): 4,  # of four bytes
        (("up", 2), ("down", 2)): 4,
        (("down", 1), ("out.weight", 1)): 4,
    }
    for sparsity, dead in ((0.5, ()), (None, (1, 4, 6, 7, 9))):
        model = Grouped()
        with torch.no_grad():
            model.up[:, :, list(dead)] = 0
            model.down[:, :, list(dead)] = 0
        before = model(torch.ones(7, 3))
        shrink(model, torch.randn(7, 3), sparsity)
        assert {size % 4 for each in (model.up, model.down) for size in each.shape[1:]} == {0}
        after = model(torch.ones(7, 3))  # the kernel takes it
        if sparsity is None:
            assert model.up.shape[2] == 8
            torch.testing.assert_close(after, before)
