"""Which experts stay, by trying: every choice where mixtures are two, and each mixture's own by what it gives.

Law: a model without experts is made by leaving rows out, and nothing else of it changes.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

Kept = Sequence[Sequence[int]]  # of each mixture in turn


def mixtures_of(model: Any) -> list[Any]:
    """The blocks of experts, with their routers, in turn."""
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def without_others(model: Any, kept: Kept) -> Any:
    """A copy whose mixtures have only these experts, in this order."""
    small = copy.deepcopy(model)
    for mixture, stay in zip(mixtures_of(small), kept, strict=True):
        for part, names in ((mixture.gate, ["weight"]), (mixture.experts, ["gate_up_proj", "down_proj"])):
            part.num_experts = len(stay)
            for name in names:
                setattr(part, name, torch.nn.Parameter(getattr(part, name).detach()[list(stay)].clone()))
    sizes = {len(stay) for stay in kept}
    if len(sizes) == 1:
        small.config.num_experts = sizes.pop()
    return small


@dataclass(frozen=True)
class Given:
    """What reaches a mixture, and what each of its experts would make of it.

    Attributes:
        stream: what the mixture's output is added to, (tokens, width).
        scores: the router's products, (tokens, experts).
        outputs: (experts, tokens, width).
        chosen: experts of a token.
    """

    stream: Tensor
    scores: Tensor
    outputs: Tensor
    chosen: int

    def added(self, stay: Sequence[int]) -> Tensor:
        """What the mixture adds with only these experts."""
        scores = self.scores[:, list(stay)]
        weights, places = scores.softmax(-1).topk(self.chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        which = torch.tensor(list(stay))[places]
        return (weights[..., None] * self.outputs[which, torch.arange(len(scores))[:, None]]).sum(1)


@torch.no_grad()
def given_to(model: Any, at: int, ids: Tensor) -> Given:
    """To the mixture of this place; the sequences run at once."""
    mixture = mixtures_of(model)[at]
    layer = next(each for each in model.model.layers if each.mlp is mixture)
    seen: list[Tensor] = []
    hook = layer.post_attention_layernorm.register_forward_hook(lambda _, args, out: seen.extend((args[0], out)))
    try:
        model.model(input_ids=ids)
    finally:
        hook.remove()
    stream, rows = (each.flatten(0, 1) for each in seen)
    experts = mixture.experts
    outputs = []
    for up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
        gate, values = linear(rows, up).chunk(2, -1)
        outputs.append(linear(experts.act_fn(gate) * values, down))
    return Given(stream, linear(rows, mixture.gate.weight), torch.stack(outputs), mixture.gate.top_k)


def subsets(model: Any, left: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(mixtures_of(model)[0].gate.num_experts), left))


@torch.no_grad()
def by_outputs(model: Any, left: int, ids: Tensor) -> Kept:
    """Of each mixture by itself the choice that moves its output least (2402.14800), the model before it as it is."""
    found = []
    for at, mixture in enumerate(mixtures_of(model)):
        given = given_to(model, at, ids)
        whole = given.added(range(mixture.gate.num_experts))
        found.append(min(subsets(model, left), key=lambda stay: float((given.added(stay) - whole).square().sum())))
    return found


@torch.no_grad()
def enumerated(model: Any, left: int, ids: Tensor) -> tuple[Kept, float, int]:
    """Of all choices in two mixtures, of which the last block has one, that of the least loss on the sequences.

    Returns:
        What stays, its perplexity, and how many choices were tried.
    """
    if len(mixtures_of(model)) != 2 or not hasattr(model.model.layers[-1].mlp, "experts"):
        raise ValueError("All choices are tried of two mixtures, the second in the last block.")
    costs = dict(_costs(model, left, ids))
    best = min(costs, key=costs.__getitem__)
    return best, math.exp(costs[best]), len(costs)


def _costs(model: Any, left: int, ids: Tensor) -> Iterator[tuple[tuple[tuple[int, ...], ...], float]]:
    every = subsets(model, left)
    own = torch.ones_like(ids, dtype=torch.bool)
    own[:, -1] = False  # after it nothing is there to tell
    rows, told = own.flatten(), ids[:, 1:].flatten()
    for first in every:
        given = given_to(without_others(model, [first, range(mixtures_of(model)[1].gate.num_experts)]), 1, ids)
        given = Given(given.stream[rows], given.scores[rows], given.outputs[:, rows], given.chosen)
        losses, order = _by_places(model, given, told, left)
        ways = torch.full((1 << len(given.outputs),), -1)
        ways[[sum(1 << place for place in places) for places in losses]] = torch.arange(len(losses))
        each = torch.stack(list(losses.values()))
        for second in every:
            stays = torch.zeros(len(given.outputs), dtype=torch.bool)
            stays[list(second)] = True
            there = stays[order]
            first_ones = there & (there.cumsum(-1) <= given.chosen)
            way = ways[(first_ones * (1 << torch.arange(len(stays)))).sum(-1)]
            yield (first, second), float(each[way, torch.arange(len(way))].mean())


def _by_places(model: Any, given: Given, told: Tensor, left: int) -> tuple[dict[tuple[int, ...], Tensor], Tensor]:
    """The loss of each token by which of its experts it is left with, as places in their order by the router: of all
    choices there are only so many ways for one token. With that order."""
    order = given.scores.argsort(-1, descending=True)
    at = torch.arange(len(order))[:, None]
    losses = {}
    for places in itertools.combinations(range(len(given.outputs) - left + given.chosen), given.chosen):
        which = order[:, list(places)]
        weights = given.scores.gather(1, which).softmax(-1)
        added = (weights[..., None] * given.outputs[which, at]).sum(1)
        logits = model.lm_head(model.model.norm(given.stream + added))
        losses[places] = logits.logsumexp(-1) - logits.gather(1, told[:, None])[:, 0]
    return losses, order
