"""Routers of mixtures whose experts left, moved too: their scale, a bias, their rows, before or behind a repair.

Law: a move is aimed at the stream that the repair is aimed at, fitted on the tokens that the repair does not hold
out, and taken only where it does more on those that it does. All rows of a model see the same text and the same
choice of experts.

A bias is tried on a router that has none: its code is told one. So what it gains is more than a checkpoint of this
class could say.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear

from benchmarks.experts.choosing import mixtures_of
from benchmarks.experts.training import CHOOSE, KINDS, Data, data, trained
from benchmarks.support.rows import add_row, read_rows
from benchmarks.support.tables import head, row
from secateur import Experts, shrink
from secateur.coupling import Group, find_coupling
from secateur.models import InMemory
from secateur.shrinking.kinds.expert_repair import MendedMixtures, mend
from secateur.shrinking.kinds.routing import PairedBlocks

REPAIR, LOSS = "repair", "by the loss"
# Steps in turn, with a sign between: what moves of the router, or the repair.
METHODS = (
    REPAIR,
    "repair > scale",
    "repair > bias",
    "repair > scales and bias > repair",
    "scales and bias > repair",
    f"repair > {LOSS}",
)
MORE = ("repair > scales", "repair > rows", "nothing", "scales and bias")
_UNSEEN = 4  # every fourth batch, as for the repair
_SHARES = (1.0, 0.5, 0.25, 0.1)  # of a move
_STEPS = (0.2,)  # of one number after the other
_EPOCHS = 8


@dataclass(frozen=True)
class Tries:
    """What the command was told."""

    scratch: Path
    name: str
    steps: int
    seeds: Sequence[int]
    methods: Sequence[str]
    shares: Sequence[float]
    cache: Path | None
    choose: int = CHOOSE


# ---- one router -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Router:
    """One router, and what its mixture would add for each choice.

    Attributes:
        gate: the router.
        rows: what it is given, (tokens, width).
        outputs: of each expert, (experts, tokens, width).
        lack: what the stream lacks behind the mixture as it is, (tokens, width).
        unseen: which tokens are held out.
    """

    gate: Any
    rows: Tensor
    outputs: Tensor
    lack: Tensor
    unseen: Tensor

    def added(self, scores: Tensor) -> Tensor:
        weights, which = scores.topk(self.gate.top_k, -1)
        chosen = self.outputs[which, torch.arange(len(which))[:, None]]
        return (weights.softmax(-1)[..., None] * chosen).sum(1)


@dataclass(frozen=True, eq=False)
class Move:
    """Of the logarithms of scales (one, or one an expert), of a bias, of rows; those that are there."""

    scales: Tensor | None = None
    bias: Tensor | None = None
    rows: Tensor | None = None

    @classmethod
    def named(cls, name: str, gate: Any) -> Move:
        experts, width = gate.weight.shape
        sizes: dict[str, tuple[int, ...]] = {}
        for part in name.split(" and "):
            field = {"scale": "scales", "scales": "scales", "bias": "bias", "rows": "rows"}[part]
            sizes[field] = {"scale": (1,), "rows": (experts, width)}.get(part, (experts,))
        return cls(**{field: torch.zeros(size) for field, size in sizes.items()})

    @property
    def parts(self) -> list[Tensor]:
        return [each for each in (self.scales, self.bias, self.rows) if each is not None]

    def times(self, share: float) -> Move:
        return Move(*(None if each is None else each.detach() * share for each in (self.scales, self.bias, self.rows)))

    def scores(self, router: Router) -> Tensor:
        weight = router.gate.weight.detach()
        found = linear(router.rows, weight if self.rows is None else weight + self.rows)
        found = found if self.scales is None else found * self.scales.exp()
        return found + bias_of(router.gate) + (0 if self.bias is None else self.bias)

    def carry_out(self, gate: Any) -> None:
        if self.rows is not None:
            gate.weight.data += self.rows
        if self.scales is not None:
            gate.weight.data *= self.scales.exp()[:, None]
        if self.bias is not None:
            give_bias(gate, bias_of(gate) + self.bias)


def bias_of(gate: Any) -> Tensor:
    given = gate.__dict__.get("forward")
    return given.args[1] if given is not None else torch.zeros(gate.num_experts)


def give_bias(gate: Any, bias: Tensor) -> None:
    gate.forward = functools.partial(_biased, gate, bias)


def _biased(gate: Any, bias: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The router's own forward, with a bias."""
    logits = linear(hidden.reshape(-1, gate.hidden_dim), gate.weight) + bias
    values, places = logits.softmax(-1).topk(gate.top_k, -1)
    return logits, values / values.sum(-1, keepdim=True), places


@torch.no_grad()
def router_of(beside: PairedBlocks, model: Any, block: str, group: Group) -> Router:
    """The router of this mixture as the smaller model runs now."""
    mixture = model.get_submodule(group.name.removesuffix(".gate.weight"))
    rows, lacks, unseen = [], [], []
    for number, each in enumerate(beside.passes(block, group)):
        (hidden, *_), _ = each.given
        rows.append(hidden.reshape(-1, hidden.shape[-1]))
        lacks.append(each.residual)
        unseen.append(torch.full((len(each.residual),), number % _UNSEEN == _UNSEEN - 1))
    every, experts, outputs = torch.cat(rows), mixture.experts, []
    for up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
        gate, values = linear(every, up).chunk(2, -1)
        outputs.append(linear(experts.act_fn(gate) * values, down))
    return Router(mixture.gate, every, torch.stack(outputs), torch.cat(lacks), torch.cat(unseen))


def moved(router: Router, name: str) -> float:
    """Moves a router; the share of what the stream lacked that this makes up for on tokens that were held out, of the
    squares, 0 where it stays as it is."""
    start = Move.named(name, router.gate)
    with torch.no_grad():
        wanted = router.lack + router.added(start.scores(router))

    def lost(move: Move, these: Tensor) -> Tensor:
        part = Router(router.gate, router.rows[these], router.outputs[:, these], wanted[these], these)
        return (wanted[these] - part.added(move.scores(part))).square().sum()

    unseen, seen = router.unseen, ~router.unseen
    before = float(lost(start, unseen))
    found = _fitted(start, functools.partial(lost, these=seen))
    with torch.no_grad():
        errors = {share: float(lost(found.times(share), unseen)) for share in _SHARES}
    best = min(errors, key=lambda share: errors[share])
    if not errors[best] < before:
        return 0.0
    found.times(best).carry_out(router.gate)
    return 1 - errors[best] / before


def _fitted(start: Move, lost: Callable[[Move], Tensor]) -> Move:
    """By L-BFGS, whose slopes know of no other choice of experts; then, but for rows, one number after the other."""
    move = start.times(0.0)
    size = max(float(lost(move)), 1e-12)
    for each in move.parts:
        each.requires_grad_()
    optimizer = torch.optim.LBFGS(move.parts, max_iter=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = lost(move) / size
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    move = move.times(1.0)
    with torch.no_grad():
        if float(lost(move)) > size:
            move = start.times(0.0)
        best = float(lost(move))
        for step in _STEPS if move.rows is None else ():
            for part in move.parts:
                for at in range(len(part)):
                    for way in (step, -step):
                        part[at] += way
                        now = float(lost(move))
                        if now < best:
                            best = now
                            break
                        part[at] -= way
    return move


# ---- a model --------------------------------------------------------------------------------------------------------


def change(model: Any, dense: Any, groups: Sequence[Group], batches: Sequence[Any], method: str) -> dict[str, float]:
    """Repairs and moves, block after block; what each router's move made up for."""
    gains: dict[str, float] = {}
    steps = method.split(" > ")
    before, after = (InMemory(each, batches) for each in (dense, model))
    with before.replaying() as whole, after.replaying() as small, torch.no_grad():
        beside = PairedBlocks(whole, small, groups)

        def visit(name: str, its: Sequence[Group]) -> None:
            for step in steps:
                if step == REPAIR:
                    mend(beside, small, name, its, MendedMixtures())
                elif step not in ("nothing", LOSS):
                    for group in its:
                        router = router_of(beside, model, name, group)
                        with torch.enable_grad():
                            gains[group.name] = moved(router, step)

        for _ in beside.run(visit):
            pass
    if LOSS in steps:
        by_the_loss(model, dense, batches)
    return gains


def by_the_loss(model: Any, dense: Any, batches: Sequence[Any]) -> None:
    """Scales and biases of all routers at once, by Adam on all batches, towards the dense model's outputs. No least
    squares, and nothing held out: what there is to be had of scales and biases."""
    gates = [each.gate for each in mixtures_of(model)]
    weights = [gate.weight.detach().clone() for gate in gates]
    scales = [torch.zeros(len(weight), requires_grad=True) for weight in weights]
    biases = [torch.zeros(len(weight), requires_grad=True) for weight in weights]
    with torch.no_grad():
        wanted = [dense(**batch).logits.log_softmax(-1).flatten(0, 1) for batch in batches]
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    def lost(number: int) -> Tensor:
        for gate, weight, scale, bias in zip(gates, weights, scales, biases, strict=True):
            gate.forward = functools.partial(_scaled, gate, weight, scale, bias)
        found = model(**batches[number]).logits.log_softmax(-1).flatten(0, 1)
        return kl_div(found, wanted[number], log_target=True, reduction="batchmean")

    optimizer = torch.optim.Adam([*scales, *biases], 0.004)
    for _ in range(_EPOCHS):
        for number in range(len(batches)):
            optimizer.zero_grad()
            lost(number).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    kept = [each.detach() for each in (*scales, *biases)]
    for gate, weight, scale, bias in zip(gates, weights, kept[: len(gates)], kept[len(gates) :], strict=True):
        gate.weight.data = weight * scale.exp()[:, None]
        give_bias(gate, bias)


def _scaled(gate: Any, weight: Tensor, scale: Tensor, bias: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = linear(hidden.reshape(-1, gate.hidden_dim), weight) * scale.exp() + bias
    values, places = logits.softmax(-1).topk(gate.top_k, -1)
    return logits, values / values.sum(-1, keepdim=True), places


@torch.no_grad()
def losses(model: Any, texts: Data) -> list[float]:
    """Of each sequence that judges, kind after kind, a token."""
    found = []
    for kind in KINDS:
        for part in texts.judge[kind].split(8):
            told = model(input_ids=part).logits[:, :-1].log_softmax(-1).gather(-1, part[:, 1:, None])
            found += (-told.squeeze(-1).mean(1)).tolist()
    return found


def rows(tries: Tries) -> Iterator[dict[str, Any]]:
    known = {_key(found): found for found in read_rows(tries.cache)}
    texts, _ = data(tries.scratch)
    texts = replace(texts, choose={kind: each[: tries.choose] for kind, each in texts.choose.items()})
    batches = [{"input_ids": part} for kind in KINDS for part in texts.choose[kind].split(8)]
    for seed in tries.seeds:
        dense = trained(tries.scratch, tries.name, tries.steps, seed)
        for share in tries.shares:
            small, groups = None, []
            for method in tries.methods:
                about = {"model": tries.name, "steps": tries.steps, "seed": seed, "gone": share, "method": method}
                if _key(about) not in known:
                    torch.manual_seed(seed)
                    if small is None:
                        small = copy.deepcopy(dense)
                        how = {"uniform": True, "verify": False, "repair": False}
                        shrink(small, batches[0], batches=batches, leave=Experts(share, rank="reap"), **how)
                        small.eval()
                        groups = [each for each in find_coupling(small, batches[0]).groups if each.chosen]
                    model = copy.deepcopy(small)
                    gains = change(model, dense, groups, batches, method)
                    known[_key(about)] = {**about, "losses": losses(model, texts), "gains": [*gains.values()]}
                    add_row(tries.cache, known[_key(about)])
                yield known[_key(about)]


def _key(found: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(found[name] for name in ("model", "steps", "seed", "gone", "method"))


def routers(tries: Tries) -> list[dict[str, Any]]:
    """Perplexity on held-out text with routers that moved, beside repaired experts alone: a row a way to move them."""
    found = []
    for each in rows(tries):
        found.append(each)
        perplexity = math.exp(statistics.mean(each["losses"]))
        gains = [round(gain, 4) for gain in each["gains"]]
        print({**{key: each[key] for key in ("seed", "gone", "method")}, "all": perplexity, "gains": gains}, flush=True)
    print(f"\n{table(found)}")
    return found


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the perplexity of each seed, and by how much a token's loss is more than behind the repair alone, with
    its standard error over sequences."""
    seeds = list(dict.fromkeys(each["seed"] for each in found))
    lines = [head(["experts gone", "what is moved", *(f"seed {seed}" for seed in seeds)])]
    at = {(each["seed"], each["gone"], each["method"]): each["losses"] for each in found}
    for share, method in dict.fromkeys((each["gone"], each["method"]) for each in found):
        cells = [f"{share:.0%}", method]
        for seed in seeds:
            mine, repaired = at.get((seed, share, method)), at.get((seed, share, REPAIR))
            if mine is None:
                cells.append("")
                continue
            cell = f"{math.exp(statistics.mean(mine)):.3f}"
            if repaired is not None and method != REPAIR:
                differences = [one - other for one, other in zip(mine, repaired, strict=True)]
                error = statistics.stdev(differences) / len(differences) ** 0.5
                cell += f" ({statistics.mean(differences):+.5f} ± {error:.5f})"
            cells.append(cell)
        lines.append(row(cells))
    return "\n".join(lines)
