"""AdamW with a warm-up, a cosine decay and clipped gradients, which can be resumed after any step.

Law: what a step does follows from the state before it and its number alone; a step that is not finite is an error, and
changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.recovery.moving import Mover

__all__ = ["Descent", "order_of", "rate_at"]

WARMUP = 0.1  # of the steps
FUSED = ("cpu", "cuda")  # where AdamW takes one pass over memory, in place of one for each of its operations


def rate_at(step: int, steps: int, rate: float) -> float:
    """The learning rate of a step from 0: linearly up over a tenth of the steps, then down by half a cosine.

    >>> [round(rate_at(step, 10, 1.0), 3) for step in range(10)]
    [1.0, 0.976, 0.905, 0.794, 0.655, 0.5, 0.345, 0.206, 0.095, 0.024]
    """
    warm = max(1, round(WARMUP * steps))
    if step < warm:
        return rate * (step + 1) / warm
    return rate * 0.5 * (1 + math.cos(math.pi * (step - warm + 1) / (steps - warm + 1)))


def order_of(seed: int, round_: int, count: int) -> list[int]:
    """The order of so many batches in one round, which follows from the seed and the number of the round.

    >>> sorted(order_of(0, 3, 5)), order_of(0, 3, 5) == order_of(0, 3, 5)
    ([0, 1, 2, 3, 4], True)
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + round_) % (1 << 63))
    return [int(each) for each in torch.randperm(count, generator=generator)]


CLIP = 1.0  # the largest norm of a step's gradients; they are scaled down to it


class Descent:
    """The optimizer of some movers (`secateur.recovery.moving`).

    Args:
        movers: what moves.
        steps: how many there will be.
        rate: the highest learning rate.
    """

    def __init__(self, movers: Sequence[Mover], steps: int, *, rate: float) -> None:
        self.movers, self.steps, self.rate = movers, steps, rate
        self.leaves = [leaf for mover in movers for leaf in mover.leaves]
        # fused looks at no strides
        fused = all(leaf.device.type in FUSED and leaf.is_contiguous() for leaf in self.leaves)
        self.optimizer = torch.optim.AdamW(self.leaves, lr=rate, weight_decay=0.0, fused=fused)
        self.done = 0

    def step(self, loss: Tensor) -> float:
        """One step down a loss, which is returned as a number.

        Raises:
            ValueError: the loss or its gradients are NaN or infinite, or it depends on nothing that moves.
        """
        number, step = float(loss.detach()), self.done + 1
        if not math.isfinite(number):
            raise ValueError(f"the loss of step {step} is {number}; look at the batches, or lower rate=.")
        if not loss.requires_grad:
            raise ValueError("the loss depends on no parameter that is trained; was the model run under no_grad?")
        loss.backward()  # type: ignore[no-untyped-call]
        for mover in self.movers:
            mover.gather()
        norm = torch.nn.utils.clip_grad_norm_(self.leaves, CLIP)
        if not bool(norm.isfinite()):
            raise ValueError(f"the gradients of step {step} are not finite; look at the batches, or lower rate=.")
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.done, self.steps, self.rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for mover in self.movers:
            mover.place()
        self.done += 1
        return number

    def state(self) -> dict[str, Tensor]:
        """What is to be kept for a run that goes on: the leaves, and what the optimizer remembers of each."""
        found: dict[str, Tensor] = {}
        for at, leaf in enumerate(self.leaves):
            found[f"{at}.value"] = leaf.detach()
            for key, value in self.optimizer.state.get(leaf, {}).items():
                found[f"{at}.{key}"] = value.detach()
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], done: int) -> None:
        """Goes on after so many steps.

        Raises:
            ValueError: the state is of other leaves, or holds what is no number.
        """
        remembered: list[dict[str, Any]] = [{} for _ in self.leaves]
        values: list[Tensor | None] = [None] * len(self.leaves)
        for name, value in state.items():
            at, _, key = name.partition(".")
            if (
                not at.isdecimal()
                or int(at) >= len(self.leaves)
                or key not in ("value", "step", "exp_avg", "exp_avg_sq")
            ):
                raise ValueError(f"holds {name}, which is nothing of these parameters")
            leaf = self.leaves[int(at)]
            shape = torch.Size() if key == "step" else leaf.shape
            if value.shape != shape or (key != "step" and value.dtype != leaf.dtype):
                raise ValueError(f"{name} has shape {tuple(value.shape)} of {value.dtype}")
            if not bool(value.isfinite().all()):
                raise ValueError(f"{name} is not finite")
            if key == "value":
                values[int(at)] = value
            else:
                there = key != "step" or self.optimizer.defaults["fused"]
                remembered[int(at)][key] = value.to(leaf.device if there else value.device, copy=True)
        if any(value is None for value in values) or any(len(each) not in (0, 3) for each in remembered):
            raise ValueError("has no full state of the optimizer")
        for leaf, held, own in zip(self.leaves, values, remembered, strict=True):
            assert held is not None
            leaf.copy_(held)
            if own:
                self.optimizer.state[leaf] = own
        for mover in self.movers:
            mover.place()
        self.done = done
