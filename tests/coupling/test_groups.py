"""What was found: every dimension is in a group or frozen, and counts say what a smaller model is."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secateur.coupling import Scope, find_coupling


class Net(nn.Module):
    """A convolution with its normalization, a stream that two layers write to, and a width that the code fixes."""

    def __init__(self, channels, hidden):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels)
        self.up, self.down = nn.Linear(channels, hidden), nn.Linear(hidden, channels)
        self.fixed, self.head = nn.Linear(channels, 6), nn.Linear(6, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = self.norm(self.conv(x)).mean((2, 3))
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(self.fixed(x).view(-1, 2, 3).flatten(1))


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    channels, hidden = torch.randint(3, 9, (2,), generator=generator).tolist()
    model = Net(channels, hidden)
    return model, find_coupling(model, torch.randn(2, 3, 5, 5), modes=[False])


@pytest.mark.parametrize("seed", range(4))
def test_every_dimension_is_in_a_group_or_frozen_with_a_reason(seed):
    model, coupling = drawn(seed)
    grouped = [place for group in coupling.groups for place in group.members]
    for name, parameter in model.named_parameters():
        for at, size in enumerate(parameter.shape):
            frozen = coupling.frozen.get((name, at), "")
            assert ((name, at) in grouped) != bool(frozen) or size == 1, (name, at, frozen)
    assert set(coupling.names()) == set(model.state_dict())


@pytest.mark.parametrize("seed", range(4))
def test_units_are_slices_at_the_same_indices_of_all_members(seed):
    model, coupling = drawn(seed)
    state = model.state_dict()
    for group in coupling.groups:
        keep = np.arange(group.size) % 2 == 0
        for name, dim in group.members:
            assert np.array_equal(coupling.indices(group, name, dim), np.arange(group.size))
            stays = coupling.kept(name, {group.name: keep})
            assert [len(each) for each in stays] == list(state[name].shape)
            assert np.array_equal(stays[dim], keep)
            assert all(each.all() for at, each in enumerate(stays) if at != dim)


@pytest.mark.parametrize("seed", range(4))
def test_sizes_costs_and_numbers_are_those_of_the_smaller_model(seed):
    """A model that is made with the smaller widths has as many entries and multiply-adds, and the same numbers."""
    _, coupling = drawn(seed)
    stream, hidden = coupling.groups
    smaller = Net(stream.size - 1, hidden.size - 2)
    counts = {stream.name: stream.size - 1, hidden.name: hidden.size - 2}
    sizes = {name: coupling.size(name, counts) for name in coupling.names()}
    assert sizes == {name: tensor.numel() for name, tensor in smaller.state_dict().items()}
    again = find_coupling(smaller, torch.randn(2, 3, 5, 5), modes=[False])
    assert coupling.multiply_adds(counts) == again.multiply_adds({})
    assert coupling.multiply_adds({}) > coupling.multiply_adds(counts)
    assert coupling.attributes({}) == {}
    assert not coupling.contradicted(counts)


def test_what_is_frozen_afterwards_takes_along_what_is_tied_to_it():
    _, coupling = drawn(0)
    stream, hidden = coupling.groups
    scope = Scope.of(coupling).tied([[stream.name, hidden.name]])
    assert len({group.tied for group in scope.groups}) == 1
    whole = scope.without([stream.name], "because")
    assert whole.groups == []
    assert whole.frozen["up.weight", 0] == whole.frozen["conv.weight", 0] == "because"
    assert coupling.groups == (stream, hidden)
    assert ("up.weight", 0) not in coupling.frozen


def test_groups_are_named_after_the_weights_whose_outputs_they_are():
    """Or the first that has them, numbered where one tensor names several."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 4, 3))
            self.first, self.last = nn.Linear(2, 5), nn.Linear(3, 2)

        def forward(self, x):
            return self.last(torch.einsum("bi,ijk->bk", self.first(x), self.table))

    groups = find_coupling(Two(), torch.randn(1, 2)).groups
    assert [(group.name, group.size) for group in groups] == [("table", 5), ("table:2", 4), ("table:3", 3)]
    chain = find_coupling(nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(1, 2))
    assert [group.name for group in chain.groups] == ["0.weight"]
