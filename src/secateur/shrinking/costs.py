"""The cost of a model when so many units stay: parameters, multiply-adds, or time relative to the whole model's.

Law: the model is not changed; a cost follows from counts alone, and only for the time a model is cut.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.allocation import Counts, everywhere
from secateur.coupling import Axis, Coupling
from secateur.patterns import Pattern
from secateur.shrinking.amounts import Amount
from secateur.shrinking.execution import carry_out
from secateur.shrinking.plan import plan_of
from secateur.shrinking.ties import Tied
from secateur.support import alternating, ratio, run_example

__all__ = ["TARGETS", "amount_of", "by_cost", "cost_of", "prices_of", "ratio_of_times"]

TARGETS = ("params", "macs", "latency", "units")


def by_cost(scores: Mapping[str, Tensor], sparsity: float, pattern: Pattern) -> Counts:
    """`everywhere`, of scores per cost: what leaves first gains most of the target for the score that it loses.

    An allocation for `secateur.shrink`, which divides each group's scores by what one of its units costs of the target
    before (parameters, multiply-adds); of "latency" and "units" all cost the same.

    >>> from secateur import shrink
    >>> layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=4), nn.ReLU(), nn.Conv2d(8, 2, 1)
    >>> model = nn.Sequential(*layers)
    >>> _ = shrink(model, torch.zeros(1, 1, 16, 16), 0.4, target="macs", allocate=by_cost)
    >>> model[0].out_channels < model[2].out_channels  # eight times the positions
    True
    """
    return everywhere(scores, sparsity, pattern)


def prices_of(amount: Amount, tied: Sequence[Tied]) -> dict[Axis, float]:
    """The cost of one unit of each group while all others are there; the mean over tied groups, which leave
    together.
    """
    found: dict[Axis, float] = {}
    whole = [each.parts for each in tied]
    for at, each in enumerate(tied):
        fewer = each.counts(each.parts - each.step)
        units = sum(group.size - fewer[group.axis] for group in each.groups)
        price = -float(amount.changes(whole, at, [each.mean(fewer)])[0]) / units if units else 0.0
        found |= {group.axis: price or 1.0 for group in each.groups}
    return found


def amount_of(model: nn.Module, coupling: Coupling, target: str, tied: Sequence[Tied]) -> Amount:
    """The value of the target when ties keep so many of their parts.

    Of "latency", which has to be measured, what stands for it: multiply-adds, or parameters where there are none.
    """
    if target == "units":
        return Amount([([group.axis], 1) for each in tied for group in each.groups], tied)
    if target == "params" or (target == "latency" and not coupling.contractions()):
        return Amount([(coupling.dims(name), 1) for name, _ in model.named_parameters()], tied)
    return Amount(coupling.contractions(), tied)


def cost_of(
    model: nn.Module, coupling: Coupling, example_inputs: Any, target: str
) -> Callable[[Mapping[Axis, int]], float]:
    """The value of the target when so many units stay of each axis."""
    if target == "params":
        names = [name for name, _ in model.named_parameters()]
        return lambda counts: sum(coupling.size(name, counts) for name in names)
    return coupling.multiply_adds if target == "macs" else _latency(model, coupling, example_inputs)


def _latency(model: nn.Module, coupling: Coupling, example_inputs: Any) -> Callable[[Mapping[Axis, int]], float]:
    """The time of a forward pass over the model's own, in turn: the median of the ratios."""
    dense = copy.deepcopy(model).eval()

    def ratio(counts: Mapping[Axis, int]) -> float:
        smaller = copy.deepcopy(dense)
        kept = {axis: np.arange(axis.size) < count for axis, count in counts.items()}
        carry_out(smaller, plan_of(smaller, coupling, kept), None)
        return ratio_of_times(smaller, dense, example_inputs)

    return ratio


@torch.no_grad()
def ratio_of_times(smaller: nn.Module, dense: nn.Module, example_inputs: Any) -> float:
    """The time of a forward pass over another's, in turn: the median of the ratios."""
    finish = torch.cuda.synchronize if torch.cuda.is_available() else None
    calls = [functools.partial(run_example, module, example_inputs) for module in (smaller, dense)]
    times = alternating(dict(enumerate(calls)), 9, seconds=0.3, finish=finish)
    return ratio(times[1], times[0])
