"""Which columns the units of a group are: by where a matrix lies in its parameter, however the code stores it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from secateur.coupling import find_coupling
from secateur.models import WeightView
from secateur.shrinking.measure import columns_of


def piece_of(parameter, name, view=None):
    """The matrix (outputs, inputs) that a view of a parameter is."""
    view = parameter if view is None else view
    return WeightView(
        name,
        view.storage_offset() - parameter.storage_offset(),
        tuple(view.shape),
        tuple(view.stride()),
    )


def found(model, inputs, name, view=None):
    """``{size of the group: its columns}``."""
    coupling = find_coupling(model, inputs)
    parameter = model.get_parameter(name)
    piece = piece_of(parameter, name, None if view is None else view(parameter))
    columns = columns_of(coupling, coupling.groups, name, piece, parameter)
    sizes = {group.name: group.size for group in coupling.groups}
    return {sizes[axis]: units for axis, units in columns.items()}


def each(count):
    return [[at] for at in range(count)]


class Transposed(nn.Module):
    """transformers' Conv1D: the weight is (inputs, outputs)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Queries, keys and values out of one matrix; three heads of width five, in a stream of width eight."""

    def __init__(self):
        super().__init__()
        self.heads, self.each = 3, 5
        self.enter = nn.Linear(4, 8)
        self.qkv, self.out = nn.Linear(8, 45, bias=False), nn.Linear(15, 8, bias=False)
        self.leave = nn.Linear(8, 2)

    def forward(self, x):
        x = self.enter(x)
        q, k, v = (part.unflatten(-1, (self.heads, self.each)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.leave(x + self.out(y))


class Experts(nn.Module):
    """Fused in one tensor of three dimensions, each (inputs, outputs) or (outputs, inputs)."""

    def __init__(self, turned):
        super().__init__()
        self.turned = turned
        self.up = nn.Parameter(torch.randn(3, 7, 4) if turned else torch.randn(3, 4, 7))
        self.down = nn.Parameter(torch.randn(3, 4, 7) if turned else torch.randn(3, 7, 4))

    def forward(self, x):
        up, down = (self.up.mT, self.down.mT) if self.turned else (self.up, self.down)
        x = x.expand(3, -1, -1)
        return torch.bmm(torch.bmm(x, up).relu(), down).sum(0)


def test_a_matrix_that_lies_turned():
    model = nn.Sequential(Transposed(4, 7), nn.GELU(), Transposed(7, 3))
    inputs = torch.zeros(2, 5, 4)
    assert found(model, inputs, "2.weight", lambda weight: weight.T) == {7: each(7)}
    assert found(model, inputs, "0.weight", lambda weight: weight.T) == {}
    strided = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3))
    strided[2].weight = nn.Parameter(torch.randn(7, 3).T)
    assert not strided[2].weight.is_contiguous()
    assert found(strided, torch.zeros(2, 4), "2.weight") == {7: each(7)}


def test_heads_and_what_is_within_them():
    """Unit h of the heads has five columns side by side, and unit w of their width one in each head."""
    columns = found(Attention(), torch.randn(2, 6, 4), "out.weight")
    assert columns[3] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    assert columns[5] == [[at, at + 5, at + 10] for at in range(5)]
    assert set(columns) == {3, 5}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("number", range(3))
def test_experts_in_one_tensor(turned, number):
    """Each expert is a matrix of its own, and the hidden units of all are one group."""
    model, inputs = nn.Sequential(nn.Linear(5, 4), Experts(turned), nn.Linear(4, 2)), torch.randn(6, 5)
    columns = found(model, inputs, "1.down", lambda down: down[number] if turned else down[number].T)
    assert columns == {7: each(7)}
    columns = found(model, inputs, "1.up", lambda up: up[number] if turned else up[number].T)
    assert columns == {4: each(4)}


def test_inputs_that_were_joined():
    """Columns that belong to no unit of the group are nobody's."""

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.out = nn.Linear(4, 3), nn.Linear(4, 5), nn.Linear(12, 2)

        def forward(self, x):
            return self.out(torch.cat([self.one(x), x, self.two(x).relu()], -1))

    assert found(Joined(), torch.zeros(2, 4), "out.weight") == {3: [[0], [1], [2]], 5: [[at] for at in range(7, 12)]}
