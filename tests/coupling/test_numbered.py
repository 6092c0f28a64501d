"""Laws of numbers of Python's: a place that became one is followed where it takes what it names, else it stays."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from secateur.coupling import find_coupling


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("mixture_by_place", {("held", "experts"): 4, ("", "every"): 6}),
        ("mixture_by_count", {("held", "experts"): 4}),
        ("mixture_of_pairs", {("", "keys"): 2}),
    ],
)
def test_the_numbers_that_modules_hold_follow(name, numbers):
    coupling = find_coupling(*zoo.ZOO[name]())
    (experts,) = [group for group in coupling.groups if group.chosen]
    found = coupling.attributes({experts.name: experts.size - 2})
    assert {each.place: value for each, value in found.items()} == numbers


class Places(nn.Module):
    """A mixture whose experts are taken as a function of it says."""

    def __init__(self, take):
        super().__init__()
        self.take, self.experts = take, 4
        self.router, self.out = nn.Linear(5, 4), nn.Linear(5, 2)
        self.up, self.down = (nn.Parameter(torch.randn(4, 5, 5)) for _ in range(2))

    def forward(self, x):
        shares, chosen = self.router(x).softmax(-1).topk(2, -1)
        mask = F.one_hot(chosen, num_classes=self.experts).permute(2, 1, 0)
        made = torch.zeros_like(x)
        for each in mask.sum((-1, -2)).nonzero()[:, 0]:
            rank, token = torch.where(mask[each])
            made.index_add_(0, token, self.take(self, x[token], each) * shares[token, rank, None])
        return self.out(made)


@pytest.mark.parametrize(
    "take",
    [
        lambda m, x, each: x @ m.up[each] * (0.1 * each.item()) @ m.down[each],  # the number is a value
        lambda m, x, each: x @ m.up[each.item() - 1] @ m.down[each],  # another's
        lambda m, x, each: x @ m.up[(0, 2, 1, 3)[each.item()]] @ m.down[(0, 2, 1, 3)[each.item()]],  # a table of it
        lambda m, x, each: x @ m.up[0] @ m.down[each.item()] @ m.up[each],  # one is always taken
    ],
)
def test_a_number_that_is_used_otherwise_keeps_its_dimension(take):
    coupling = find_coupling(Places(take), torch.randn(6, 5))
    assert not any(set(group.members) >= {("up", 0), ("down", 0)} for group in coupling.groups)
    assert ("up", 0) in coupling.frozen


class Counts(nn.Module):
    """Tokens in the order of their experts, split by how many each has."""

    def __init__(self, mixed):
        super().__init__()
        self.mixed, self.experts = mixed, 4
        self.router, self.out = nn.Linear(5, 4), nn.Linear(5, 2)
        self.up = nn.Parameter(torch.randn(4, 5, 5))

    def forward(self, x):
        shares, chosen = self.router(x).softmax(-1).topk(1, -1)
        sent = torch.zeros(x.shape[0], self.experts, dtype=torch.long).scatter(1, chosen, 1)
        order = chosen[:, 0].sort(0)[1]
        found = torch.cat(self.mixed(self, x[order], sent.sum(0).tolist()))
        return self.out(torch.zeros_like(x).index_add(0, order, found * shares[order]))


def in_turn(model, x, counts):
    parts = x.split(counts)
    return [parts[number] @ model.up[number] for number in range(model.experts)]


@pytest.mark.parametrize(
    "mixed",
    [
        lambda m, x, counts: [part @ m.up[3 - number] for number, part in enumerate(x.split(counts))],
        lambda m, x, counts: [x.split(counts)[number] @ m.up[number] for number in range(3)] + [x.split(counts)[3]],
        lambda m, x, counts: [part @ m.up[0] for part in x.split(counts)],
        lambda m, x, counts: [x[:count] @ m.up[number] for number, count in enumerate(counts)],
        lambda m, x, counts: in_turn(m, x, counts)[: len(counts)],
        lambda m, x, counts: [x.split(counts)[n] @ m.up[n] + m.up[n].sum() * counts[0] for n in range(4)],
    ],
)
def test_what_no_part_meets_or_python_looks_at_stays(mixed):
    model = Counts(mixed)
    coupling = find_coupling(model, torch.randn(1, 5).expand(4, 5).contiguous())
    assert not any(group.chosen for group in coupling.groups)
    assert ("up", 0) in coupling.frozen


@pytest.mark.parametrize("row", [5, 3])
def test_pairs_are_followed_where_a_row_is_as_long_as_there_are_keys(row):
    model, inputs = zoo.ZOO["mixture_of_pairs"]()
    model.route = lambda x: _pairs(model, x, row)
    coupling = find_coupling(model, inputs)
    assert not any(group.chosen for group in coupling.groups)


def _pairs(model, x, row):
    scores, places = model.router(x).view(x.shape[0], 2, -1).topk(model.keys, -1)
    pairs = (scores[:, 0].unsqueeze(-1) + scores[:, 1].unsqueeze(-2)).flatten(1)
    numbers = ((places[:, 0].unsqueeze(-1) * row + places[:, 1].unsqueeze(-2)) % 16).flatten(1)
    best, at = pairs.topk(model.k, -1)
    return best.softmax(-1), numbers.gather(-1, at)


# Laws of choices: units that are chosen between are a group of their own kind, and what only looks like it stays.


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
