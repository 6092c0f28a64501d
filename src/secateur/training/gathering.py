"""The evidence of one update: what training steps showed, and what batches are run for.

Law: what a rule names it gets of every weight, laid out as (outputs, inputs); a weight that took no part has zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.evidence import collect
from secateur.support import Forward, Loss
from secateur.targets import turned_evidence
from secateur.training.rules import Rules
from secateur.training.state import Memory

__all__ = ["Source", "gathered", "gradients_of"]


@dataclass(frozen=True)
class Source:
    """What is run where training steps don't show the evidence."""

    model: nn.Module  # as it was given: DistributedDataParallel tells collect to average over the ranks
    batches: Iterable[Any]  # none where training steps show all
    loss: Loss | None
    forward: Forward | None


def gathered(
    words: Iterable[str], weights: Mapping[str, Tensor], rules: Rules, memory: Memory, source: Source
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
