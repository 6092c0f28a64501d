"""The law of spots: where a call is in the model's own code says nothing of what ran before."""

import torch
from torch import nn

from secateur.coupling import Spot, Whereabouts


class Asks(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.where, self.found = where, []

    def forward(self, x):
        self.found.append(self.where[0].spot("relu"))
        return x


def test_a_spot_is_counted_in_each_call_of_its_module():
    where = []
    model = nn.Sequential(Asks(where), nn.Sequential(Asks(where)))
    where.append(Whereabouts(model))
    with where[0]:
        assert where[0].spot("relu") == Spot("", "relu", 1)
        for _ in range(2):
            model(torch.zeros(1))
        assert where[0].spot("relu") == Spot("", "relu", 2)
    assert model[0].found == 2 * [Spot("0", "relu", 1)]
    assert model[1][0].found == 2 * [Spot("1.0", "relu", 1)]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_module_that_raises_is_left():
    class Fails(nn.Module):
        def forward(self, x):
            raise ArithmeticError

    model = nn.Sequential(Fails())
    with Whereabouts(model) as where:
        for _ in range(2):
            try:
                model(torch.zeros(1))
            except ArithmeticError:
                assert where.spot("relu").path == ""
