"""The masks of one update, from weights, earlier masks and evidence. The evidence of one update: what training steps
showed, and what batches are run for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.allocation import Tables, check_sparsity
from secateur.evidence import collect, needs
from secateur.patterns import NM, Pattern
from secateur.pipeline import choose_masks
from secateur.regrowth import DropAndGrow
from secateur.support import Forward, Loss
from secateur.targets import turned, turned_evidence
from secateur.training.rules import Rules
from secateur.training.state import Memory

# ---- The masks of one update, from weights, earlier masks and evidence.
#
# Law: these are functions of their arguments: the same seed, step and values give the same masks on every rank.

Evidence = Callable[[Iterable[str]], Mapping[str, Mapping[str, Tensor]]]


def chosen(
    rules: Rules,
    weights: Mapping[str, Tensor],
    old: Mapping[str, Tensor],
    target: float | None,
    *,
    evidence: Evidence,
    share: float = 0.0,
) -> dict[str, Tensor]:
    """The masks for a target, given those that there are.

    Args:
        old: bool masks, of some of the weights or none.
        target: the sparsity to bring about; None leaves it where it is.
        evidence: asked with the words that are needed, laid out as (outputs, inputs).
        share: of what is kept, so much is dropped and grown elsewhere.
    """
    masks = old = turned(old, rules.inputs_first)
    weights = turned(weights, rules.inputs_first)
    if target is not None:
        masks = _removing(rules, weights, target, None if rules.holds else old or None, evidence)
    if share and masks and isinstance(rules.regrow, DropAndGrow):
        masks = _dropped_and_grown(rules.regrow, rules.pattern, weights, masks, evidence, share)
    return turned(masks, rules.inputs_first)


def _removing(
    rules: Rules, weights: Mapping[str, Tensor], target: float, within: Mapping[str, Tensor] | None, evidence: Evidence
) -> dict[str, Tensor]:
    check_sparsity(target)
    pattern, sparsity = rules.pattern, target
    if isinstance(pattern, NM):  # n:m goes from m:m down to n:m
        kept = max(pattern.n, math.ceil((1 - target) * pattern.m - 1e-9))
        pattern, sparsity = replace(pattern, n=kept), 1 - kept / pattern.m
    elif pattern.density is not None:
        sparsity = 1 - pattern.density
    return choose_masks(
        weights,
        sparsity,
        pattern=pattern,
        criterion=rules.criterion,
        allocate=rules.allocate,
        within=within,
        evidence=evidence(needs(rules.criterion)),
    )


def _dropped_and_grown(
    rule: DropAndGrow,
    pattern: Pattern,
    weights: Mapping[str, Tensor],
    masks: dict[str, Tensor],
    evidence: Evidence,
    share: float,
) -> dict[str, Tensor]:
    counts = {name: _units_kept(mask, pattern) for name, mask in masks.items()}
    left = {name: count - (count * share).round().to(torch.int64) for name, count in counts.items()}
    if all(torch.equal(left[name], counts[name]) for name in masks):
        return masks
    choose = functools.partial(choose_masks, sparsity=0.5, pattern=pattern)  # the counts say how much
    remaining = choose(
        weights,
        criterion=rule.drop,
        allocate=lambda *_: {name: _count(count) for name, count in left.items()},
        within=masks,
        evidence=evidence(needs(rule.drop)),
    )
    scores = {}
    shown = evidence(needs(rule.grow))
    for name, weight in weights.items():
        score = rule.grow(weight, **shown[name])
        score = score if score.dtype in (torch.float32, torch.float64) else score.float()
        scores[name] = score.masked_fill(remaining[name], torch.inf)
    return choose(
        scores, criterion=_itself, allocate=lambda *_: {name: _count(count) for name, count in counts.items()}
    )


def share_removed(rules: Rules, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> float:
    """The fraction of all units that masks remove; 0 where the pattern alone says how many."""
    if not masks or rules.pattern.density is not None:
        return 0.0
    masks = turned(masks, rules.inputs_first)
    whole = {name: torch.empty(weight.shape, device="meta") for name, weight in weights.items()}
    shapes = turned(whole, rules.inputs_first)
    units = sum(rules.pattern.pool(shape).numel() for shape in shapes.values())
    kept = sum(rules.pattern.pool(shape).numel() for name, shape in shapes.items() if name not in masks)
    kept += sum(int(_units_kept(mask.ne(0), rules.pattern).sum()) for mask in masks.values())
    return 1 - kept / max(units, 1)


def movement_after(total: Tensor | None, weight: Tensor, grad: Tensor, penalty: float) -> Tensor:
    """``S - w·g``, of a step; with a penalty λ less ``λ·σ'(S)``. Written into S, if there is one."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    step = grad.to(wide) * weight.to(wide)
    total = step.neg_() if total is None else total.sub_(step)
    if penalty:
        risen = torch.sigmoid(total)
        total.sub_(penalty * risen * (1 - risen))
    return total


def squares_after(total: Tensor | None, grad: Tensor) -> Tensor:
    """``G + g²``, written into G, if there is one."""
    square = grad.float().square() if grad.dtype != torch.float64 else grad.square()
    return square if total is None else total.add_(square)


@contextmanager
def own_randomness(seed: int, step: int) -> Iterator[None]:
    """Random numbers that depend on the seed and the step alone: the same on all ranks and after a resume."""
    with torch.random.fork_rng(devices=[]):
        # the CPU's generator alone: torch.manual_seed would also reach those of devices. The first number keeps it
        # off the stream of manual_seed(0), which drew the weights of many a model
        torch.default_generator.manual_seed((0x5EC8 << 32) + (seed * 1_000_003 + step) % 2**32)
        yield


def _units_kept(mask: Tensor, pattern: Pattern) -> Tensor:
    """How many units of each group a mask keeps, (groups,)."""
    table = Tables({"": mask.to(torch.float32)}, pattern)[""]
    return (table > 0).sum(1).cpu()


def _count(kept: Tensor) -> int | Tensor:
    return int(kept) if kept.numel() == 1 else kept


def _itself(scores: Tensor) -> Tensor:
    return scores


# ---- The evidence of one update: what training steps showed, and what batches are run for.
#
# Law: what a rule names it gets of every weight, laid out as (outputs, inputs); a weight that took no part has zeros.


@dataclass(frozen=True)
class EvidenceSource:
    """What is run where training steps don't show the evidence."""

    model: nn.Module  # as it was given: DistributedDataParallel tells collect to average over the ranks
    batches: Iterable[Any]  # none where training steps show all
    loss: Loss | None
    forward: Forward | None


def gathered(
    words: Iterable[str], weights: Mapping[str, Tensor], rules: Rules, memory: Memory, source: EvidenceSource
) -> dict[str, dict[str, Tensor]]:
    """``{name: {word: tensor}}`` for the words that are asked for."""
    words, shown = set(words), rules.gathered
    evidence: dict[str, dict[str, Tensor]] = {name: {} for name in weights}
    if from_batches := words - shown:
        found = collect(
            source.model,
            source.batches,
            asked=sorted(from_batches),
            weights=weights,
            loss=source.loss,
            forward=source.forward,
        )
        for name, values in found.items():
            evidence[name].update(values)
    if "grad" in words & shown:
        if all(weight.grad is None for weight in weights.values()):
            raise ValueError("there are no gradients: prune after backward and before zero_grad, or pass batches=.")
        for name, grad in gradients_of(weights).items():
            evidence[name]["grad"] = grad
    for word, total in (("grad_sq", memory.grad_sq), ("movement", memory.movement)):
        if word in words & shown:
            for name in weights:
                evidence[name][word] = total.get(name, torch.zeros_like(weights[name]))
                if word == "grad_sq":
                    evidence[name][word] = evidence[name][word] / max(memory.grad_sq_steps, 1)
    return turned_evidence(evidence, rules.inputs_first)


def gradients_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of the step; zero for a weight that took no part in it."""
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.detach()
        for name, weight in weights.items()
    }
