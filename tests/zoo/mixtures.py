"""Mixtures of experts, written by hand: how tokens find their experts, and how these are held."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.registry import hand, sequence

WIDTH, HIDDEN = 20, 14


class Experts(nn.Module):
    """In one tensor each; a mixture around them says which of them a token goes to, and by how much."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts
        self.up = nn.Parameter(torch.randn(experts, 2 * HIDDEN, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) * 0.3)

    def expert(self, x, number):
        gate, up = F.linear(x, self.up[number]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[number])


class Mixture(nn.Module):
    """A stream, a router, experts, an output."""

    def __init__(self, experts=6, k=2, **about):
        super().__init__()
        self.k = k
        self.inp, self.out = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 5)
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.held = Experts(experts)
        self.prepare(experts, **about)

    def prepare(self, experts):
        pass

    def route(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.k, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x):
        x = self.inp(x)
        flat = x.reshape(-1, x.shape[-1])
        return self.out(x + self.mixed(flat, *self.route(flat)).view_as(x))


@hand(sequence(16))
class MixtureInTurn(Mixture):
    """Only experts that some token goes to run, each on its own tokens."""

    def mixed(self, x, weights, chosen):
        made = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=self.held.experts).permute(2, 1, 0)
        for number in mask.sum((-1, -2)).nonzero()[:, 0]:
            rank, token = torch.where(mask[number])
            made.index_add_(0, token, self.held.expert(x[token], number) * weights[token, rank, None])
        return made


@hand(sequence(16))
class MixtureByNumber(Mixture):
    """Every number in turn, whether a token goes there or not."""

    def mixed(self, x, weights, chosen):
        made = torch.zeros_like(x)
        for number in range(self.held.experts):
            token, rank = torch.where(chosen == number)
            made[token] += self.held.expert(x[token], number) * weights[token, rank, None]
        return made


@hand(sequence(16))
class MixtureOfCopies(Mixture):
    """Each token gets copies of its experts' weights."""

    def prepare(self, experts):
        self.bias = nn.Parameter(torch.randn(experts))

    def route(self, x):
        """Scores with a bias, of which the best are weighed among themselves."""
        best, chosen = (self.router(x) + self.bias).topk(self.k, -1)
        return best.softmax(-1), chosen

    def mixed(self, x, weights, chosen):
        gate, up = torch.einsum("tw,tkhw->tkh", x, self.held.up[chosen]).chunk(2, -1)
        made = torch.einsum("tkh,tkwh->tkw", F.gelu(gate) * up, self.held.down[chosen])
        return (made * weights.unsqueeze(-1)).sum(1)


@hand(sequence(16))
class MixtureOfAll(Mixture):
    """All experts run on all tokens; a scattered weight is zero where one was not chosen."""

    def mixed(self, x, weights, chosen):
        scattered = torch.zeros(x.shape[0], self.held.experts, dtype=x.dtype).scatter(1, chosen, weights)
        gate, up = torch.einsum("tw,ehw->teh", x, self.held.up).chunk(2, -1)
        return torch.einsum("teh,ewh,te->tw", F.silu(gate) * up, self.held.down, scattered)


@hand(sequence(16))
class MixtureInGroups(MixtureInTurn):
    """DeepSeek-V3: shares of each for itself, a bias for the choice alone, and the best groups first."""

    def prepare(self, experts, groups=2):
        self.groups = groups
        self.correction = nn.Buffer(torch.randn(experts) * 0.1)

    def route(self, x):
        shares = self.router(x).sigmoid()
        scores = shares + self.correction
        by_group = scores.view(x.shape[0], self.groups, -1)
        group_scores = by_group.topk(2, -1)[0].sum(-1)
        best = group_scores.topk(1, -1)[1]
        mask = torch.zeros_like(group_scores).scatter_(1, best, 1).unsqueeze(-1).expand_as(by_group)
        chosen = scores.masked_fill(mask.reshape_as(scores) == 0, -torch.inf).topk(self.k, -1)[1]
        weights = shares.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen


@hand(sequence(16))
class MixtureByPlace(Mixture):
    """LongCat: the place of an expert becomes a number of Python's; the last ones give back what they get."""

    def prepare(self, experts, idle=2):
        self.every = experts + idle
        self.router = nn.Linear(WIDTH, self.every, bias=False)

    def mixed(self, x, weights, chosen):
        made = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=self.every).permute(2, 1, 0)
        for each in mask.sum((-1, -2)).nonzero():
            number = int(each.item())
            rank, token = torch.where(mask[number])
            found = x[token] if number >= self.held.experts else self.held.expert(x[token], number)
            made.index_add_(0, token, found * weights[token, rank, None])
        return made


@hand(sequence(16))
class MixtureByCount(Mixture):
    """JetMoE: tokens in the order of their experts, split by a list of how many each has; every expert in turn."""

    def mixed(self, x, weights, chosen):
        sent = torch.zeros(x.shape[0], self.held.experts, dtype=torch.long).scatter(1, chosen, 1)
        _, order = chosen.flatten().sort(0)
        token = order.div(self.k, rounding_mode="trunc")
        parts = x[token].split(sent.sum(0).tolist(), dim=0)
        found = torch.cat([self.held.expert(parts[number], number) for number in range(self.held.experts)])
        return torch.zeros_like(x).index_add(0, token, found * weights.flatten()[order, None])


@hand(sequence(16))
class MixtureOfPairs(MixtureOfCopies):
    """Doge: an expert for each pair of two keys, whose scores are added; a key is one in both halves of the scores."""

    def prepare(self, experts, keys=4):
        self.keys = keys
        self.router = nn.Linear(WIDTH, 2 * keys, bias=False)
        self.held = Experts(keys * keys)

    def route(self, x):
        scores, places = self.router(x).view(x.shape[0], 2, -1).topk(self.keys, -1)
        pairs = (scores[:, 0].unsqueeze(-1) + scores[:, 1].unsqueeze(-2)).flatten(1)
        numbers = (places[:, 0].unsqueeze(-1) * self.keys + places[:, 1].unsqueeze(-2)).flatten(1)
        best, at = pairs.topk(self.k, -1)
        return best.softmax(-1), numbers.gather(-1, at)
