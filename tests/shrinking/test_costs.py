"""Laws of costs: each target is what one counts by hand."""

import copy

import torch
from torch import nn

from secateur import shrink
from secateur.coupling import find_coupling
from secateur.shrinking.costs import by_cost


def test_the_time_of_the_example_decides():
    model = nn.Sequential(nn.Linear(64, 3000), nn.ReLU(), nn.Linear(3000, 10))
    shrink(model, torch.ones(64, 64), 0.3, target="latency", verify=False)
    assert model[0].out_features < 3000


def test_multiply_adds_are_those_of_the_contractions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8 * 36, 5)
    )
    model.append(nn.Unflatten(1, (5, 1))).append(nn.ConvTranspose1d(5, 4, 3))
    by_hand = 8 * 64 * 27 + 8 * 36 * 9 + 8 * 36 * 5 + 5 * 1 * 4 * 3
    assert find_coupling(model, torch.ones(1, 3, 8, 8)).multiply_adds({}) == by_hand


def test_by_cost_takes_first_what_costs_most():
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=4), nn.ReLU(), nn.Conv2d(8, 2, 1)
    model, x = nn.Sequential(*layers), torch.zeros(1, 1, 16, 16)
    for parameter in model.parameters():
        nn.init.ones_(parameter)  # all score the same
    by_work = shrink(copy.deepcopy(model), x, 0.375, target="macs", allocate=by_cost).model
    # a unit of the first costs 9 * 14² + 72 * 3² = 2412 multiply-adds, one of the second 72 * 3² + 2 * 3² = 666
    assert (by_work[0].out_channels, by_work[2].out_channels) == (5, 8)
    by_weights = shrink(copy.deepcopy(model), x, 0.36, allocate=by_cost).model
    # of the first 9 + 1 + 72 = 82 parameters, of the second 72 + 1 + 2 = 75
    assert (by_weights[0].out_channels, by_weights[2].out_channels) == (5, 8)
    by_number = shrink(copy.deepcopy(model), x, 0.3, target="units", allocate=by_cost).model
    assert by_number[0].out_channels + by_number[2].out_channels == 11
