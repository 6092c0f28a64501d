"""Laws of choices: units that are chosen between are a group of their own kind, and what only looks like it stays."""

import pytest
import torch
from torch import nn

import zoo
from secateur.coupling import find_coupling

MIXTURES = ["mixture_in_turn", "mixture_of_copies", "mixture_of_all", "mixture_in_groups", "mixture_by_count"]


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_a_group_of_their_own_kind(name):
    model, inputs = zoo.ZOO[name]()
    coupling = find_coupling(model, inputs)
    (experts,) = [group for group in coupling.groups if group.chosen]
    groups = 2 if name == "mixture_in_groups" else 1  # as many stay in each
    assert experts.size * groups == model.held.experts
    assert {("router.weight", 0), ("held.up", 0), ("held.down", 0)} <= set(experts.members)
    assert experts.name == "router.weight"
    (hidden,) = [group for group in coupling.groups if group.members == (("held.up", 1), ("held.down", 2))]
    assert not hidden.chosen


def test_experts_that_are_named_by_their_numbers_stay():
    coupling = find_coupling(*zoo.ZOO["mixture_by_number"]())
    assert "one of it is taken by its number" in coupling.frozen["router.weight", 0]
    assert not any(group.chosen for group in coupling.groups)


def test_what_is_compared_and_not_chosen_stays_whole():
    class Attends(nn.Module):
        """A softmax over learned keys: none of them is chosen."""

        def __init__(self):
            super().__init__()
            self.keys = nn.Linear(4, 6)
            self.values = nn.Linear(6, 3)

        def forward(self, x):
            return self.values(self.keys(x).softmax(-1))

    coupling = find_coupling(Attends(), torch.randn(2, 4))
    assert coupling.frozen["keys.weight", 0] == "softmax along it"
    assert not coupling.groups


def test_scores_that_are_an_output_are_not_chosen_between():
    class Tells(nn.Module):
        def __init__(self):
            super().__init__()
            self.score = nn.Linear(4, 6)
            self.table = nn.Parameter(torch.randn(6, 3))

        def forward(self, x):
            scores = self.score(x)
            return self.table[scores.argmax(-1)], scores

    coupling = find_coupling(Tells(), torch.randn(2, 4))
    assert "an output of the model" in coupling.frozen["score.weight", 0]
    assert not any(group.chosen for group in coupling.groups)


@pytest.mark.parametrize(
    "numbers",
    [
        lambda chosen: chosen.unique().tolist(),
        lambda chosen: ((chosen + 1).flatten() - 1).unique().tolist(),
        lambda chosen: sorted({int(each) for each in chosen.flatten()}),
        lambda chosen: [number for number in range(4) if (chosen == number).any()],
    ],
)
def test_experts_in_modules_of_their_own_stay(numbers):
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.out = nn.Linear(5, 4), nn.Linear(5, 2)
            self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

        def forward(self, x):
            shares = self.router(x).softmax(-1)
            chosen = shares.topk(2, -1).indices
            weights = torch.zeros_like(shares).scatter(1, chosen, shares.gather(1, chosen))
            made = sum(self.experts[number](x) * weights[:, number, None] for number in numbers(chosen))
            return self.out(made)

    coupling = find_coupling(Listed(), torch.randn(3, 5))
    assert not any(group.chosen for group in coupling.groups)
    assert ("router.weight", 0) in coupling.frozen
