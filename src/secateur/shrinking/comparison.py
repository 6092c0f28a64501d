"""Whether two models compute the same function, up to rounding.

Law: a difference that rounding could explain is neither accepted nor rejected.

Where a model is chaotic on its random weights, as recurrent ones over many steps may be, rounding grows until it looks
like a difference. So of what differs it is asked how far the original moves by itself when its weights move by one unit
in the last place. Only what is far beyond that is a difference; anything else is looked at again with smaller weights,
on which the model is calmer. These count if a single wrong slice would still show.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from secateur.shrinking.plan import Plan
from secateur.support import seeded, tensors_of, track

__all__ = [
    "BLIND",
    "IncomparableError",
    "Runs",
    "Unsure",
    "all_of",
    "certain",
    "compared",
    "difference",
    "on_calm_probes",
    "probe_of",
    "would_show",
]

TOLERANCE = 1e-6  # of the largest number in an output
# Times what one unit in the last place of the weights does. On 62 models of the zoo and on LSTMs rounding did at
# most twice as much; what is above is surely none, and what is below is looked at on calmer weights.
_ROUNDINGS = 1000.0
_CALMER = tuple(2 ** (-step / 2) for step in range(7))  # what the weights of the probes are multiplied by, in turn

T = TypeVar("T")


class IncomparableError(ValueError):
    """The comparison is inconclusive: rounding alone may explain the difference, or a wrong slice would not show."""


class Unsure(str):
    """What differs, in words, if it is not rounding."""


BLIND = Unsure("a wrong slice would not show on smaller weights")
Runs = Sequence[Callable[[], list[Tensor]]]  # of each pass


def probe_of(model: nn.Module, calm: float = 1.0) -> nn.Module:
    """A copy in float64 with random weights, near in scale to the model's own; then all times ``calm``."""
    probe = copy.deepcopy(model).double()
    with seeded(), torch.no_grad():
        for parameter in probe.parameters():
            if parameter.is_floating_point() and parameter.numel():
                spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
                parameter.add_(torch.randn_like(parameter) * max(0.5 * spread, 0.02)).mul_(calm)
    return probe


def difference(
    expected: Sequence[Tensor], found: Sequence[Tensor], limits: Sequence[float] | None = None
) -> str | None:
    """What differs, in words; None where nothing does. ``limits`` are of each output's largest number."""
    if len(expected) != len(found):
        return f"{len(found)} tensors came out where {len(expected)} did before"
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.shape != other.shape:
            return f"output {number} has shape {tuple(other.shape)}, it was {tuple(one.shape)}"
        gap = _gap(one, other)
        if gap <= (TOLERANCE if limits is None else limits[number]):
            if one.is_floating_point() and one.numel() and not torch.isfinite(one).any():
                return f"output {number} has no finite number, so nothing can be compared"
            continue
        if gap < math.inf:
            return f"output {number} differs by {gap:.2g} of its largest number"
        return f"output {number} {'is not finite at other places' if one.is_floating_point() else 'differs'}"
    return None


def _gap(one: Tensor, other: Tensor) -> float:
    """How far two outputs of one shape are apart, of the largest number; where that has no measure, infinity."""
    if one.is_complex() and other.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else math.inf
    real = torch.isfinite(one)
    if not torch.equal(real, torch.isfinite(other)):
        return math.inf
    if not real.any():
        return 0.0
    return float((one[real] - other[real]).abs().max()) / max(float(one[real].abs().max()), 1e-12)


# ---- rounding -------------------------------------------------------------------------------------------------------


def compared(probe: nn.Module, expected: Sequence[Tensor], found: Sequence[Tensor], again: Runs) -> str | None:
    """What differs, in words; `Unsure` where rounding may be all that does. ``again`` makes what is expected."""
    words = difference(expected, found)
    if words is None:
        return None
    moves = _moves(probe, expected, again)
    if difference(expected, found, [max(TOLERANCE, _ROUNDINGS * each) for each in moves]) is not None:
        return words
    return Unsure(
        f"{words}, and the original's own move by {max(moves):.2g} when its weights do by one unit in the last place"
    )


def _moves(probe: nn.Module, expected: Sequence[Tensor], again: Runs) -> list[float]:
    """How far each output moves when all weights move by one unit in the last place, up or down."""
    moves = [0.0] * len(expected)
    draw = torch.Generator().manual_seed(0)
    weights = [each for each in probe.parameters() if each.is_floating_point()]
    saved = [each.data for each in weights]
    unit = torch.finfo(torch.float64).eps
    for _ in range(3):  # a single number may stay where it is by chance
        try:
            for weight, value in zip(weights, saved, strict=True):
                up = torch.randint(0, 2, value.shape, generator=draw).to(value)
                weight.data = value * (1 + (2 * up - 1) * unit)
            moved = all_of(again)
        finally:
            for weight, value in zip(weights, saved, strict=True):
                weight.data = value
        same = [one.shape == other.shape for one, other in zip(expected, moved, strict=True)]
        gaps = [_gap(*each) if is_same else math.inf for is_same, *each in zip(same, expected, moved, strict=True)]
        moves = [max(each) for each in zip(moves, gaps, strict=True)]
    return moves


def on_calm_probes(model: nn.Module, compare: Callable[[nn.Module, float], T]) -> T:
    """What a comparison says of the least calm probe of which it says something."""
    why = ""
    for calm in _CALMER:
        try:
            return compare(probe_of(model, calm), calm)
        except IncomparableError as error:
            why = why or str(error)
    raise IncomparableError(
        f"the smaller model could not be compared with the original, which is no proof that it is wrong: {why}; nor on "
        "smaller weights. Give an example of fewer steps, or leave out the proof (verify=False)."
    )


def certain(words: str | None) -> str | None:
    if isinstance(words, Unsure):
        raise IncomparableError(words)
    return words


def would_show(probe: nn.Module, plan: Plan, runs: Runs) -> bool:
    """Whether the smaller model would compute something else if a single slice of any tensor were its neighbour's."""
    tensors = tensors_of(probe)
    found = [run() for run in runs]
    draw = torch.Generator().manual_seed(0)
    for name, (_, cuts) in plan.tensors.items():
        if not isinstance(tensors[name], nn.Parameter):
            continue
        right = tensors[name].data
        for at in cuts:
            place = int(torch.randint(0, right.shape[at], (), generator=draw))
            wrong = right.clone()
            other = right.select(at, place - 1) if right.shape[at] > 1 else 1.5 * right.select(at, place)
            wrong.select(at, place).copy_(other)
            tensors[name].data = wrong
            try:
                if all(difference(before, run()) is None for before, run in zip(found, runs, strict=True)):
                    return False
            finally:
                tensors[name].data = right
    return True


def all_of(runs: Runs) -> list[Tensor]:
    return [each for run in track(runs, "comparing") for each in run()]
