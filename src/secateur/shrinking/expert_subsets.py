"""The exhaustive choice of experts: the loss of a mixture's outputs without each set of so many experts.

Law: of all sets of experts that may leave together the one is found whose loss moves the mixture's outputs least on the
batches, everything else being as it was (Lu et al. 2024, arXiv:2402.14800); all else of the model stays dense.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.blockwise import gathered, prepared
from secateur.coupling import Axis, Coupling, Group
from secateur.shrinking.execution import carry_out
from secateur.shrinking.plan import Plan, plan_of
from secateur.shrinking.routing import Watching
from secateur.support import Forward, Undo, device_of, mapped, moved, tensors_in, track, unchanged

__all__ = [
    "Losses",
    "MOST",
    "everywhere",
    "losses_in_memory",
    "lost_without",
    "rows_of_output",
    "scores_of_the_least",
    "subset_plans",
    "watching_losses",
]

MOST = 1000  # sets of one mixture: of 8 experts all are fewer, of 16 no more than 3 can leave
_Key = TypeVar("_Key", bound=Hashable)
Units = tuple[int, ...]
Losses = dict[Axis, dict[Units, float]]


def subset_plans(
    model: nn.Module, coupling: Coupling, counts: Mapping[Axis, int], groups: Sequence[Group]
) -> dict[Axis, dict[Units, Plan]]:
    """Of each mixture the sets of ``counts`` units that may leave it, and how each does.

    Raises:
        ValueError: there are too many sets.
    """
    found: dict[Axis, dict[Units, Plan]] = {}
    for group in groups:
        if not counts.get(group.axis):
            continue
        every = math.comb(group.size, counts[group.axis])
        if every > MOST:
            raise ValueError(
                f"{group.name}: {counts[group.axis]} of {group.size} experts can leave in {every:,} ways, more than "
                f'the {MOST:,} that are tried; choose by rank_experts="reap", for instance.'
            )
        plans = {}
        for units in itertools.combinations(range(group.size), counts[group.axis]):
            mask = np.ones(group.size, dtype=bool)
            mask[list(units)] = False
            plans[units] = plan_of(model, coupling, {group.axis: mask})
        found[group.axis] = plans
    return found


def lost_without(
    model: nn.Module, module: nn.Module, given: tuple[Any, Any], whole: Tensor, plans: Mapping[_Key, Plan], own: Any
) -> dict[_Key, float]:
    """The squared differences of a mixture's outputs to ``whole`` ones, (tokens, width), as each plan has it."""
    lost = {}
    for key, plan in plans.items():
        args, kwargs = mapped(given, lambda tensor: tensor.detach().clone())
        with Undo() as undo:
            undo.call(carry_out(model, plan, None))
            without = rows_of_output(module.forward(*args, **kwargs), own)
            undo.roll_back()
        lost[key] = float((without - whole).square().sum())
    return lost


def rows_of_output(output: Any, own: Tensor | None) -> Tensor:
    """The outputs for tokens that are no padding, (tokens, width), in float64."""
    out = next(tensor for tensor in tensors_in(output) if tensor.is_floating_point())
    rows = out.detach().reshape(-1, out.shape[-1]).double()
    return rows if own is None or own.numel() != len(rows) else rows[own.reshape(-1).to(rows.device)]


def watching_losses(watching: Watching, plans: Mapping[Axis, Mapping[Units, Plan]]) -> tuple[Watching, Losses]:
    """What adds up the losses of all sets while the model runs."""
    found: Losses = {axis: dict.fromkeys(its, 0.0) for axis, its in plans.items()}

    def measure(group: Group, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        own = watched.tokens.own
        whole = rows_of_output(output, own)
        its = plans.get(group.axis, {})
        for units, lost in lost_without(watching.model, module, (args, kwargs), whole, its, own).items():
            found[group.axis][units] += lost

    watched = replace(watching, also=measure)
    return watched, found


def everywhere(losses: Losses) -> Losses:
    """The sums of all processes."""
    return {axis: {units: float(sum(gathered(lost))) for units, lost in its.items()} for axis, its in losses.items()}


def scores_of_the_least(losses: Mapping[Units, float], given: npt.NDArray[np.float64]) -> Tensor:
    """Scores, higher = keep: the set of least loss is below all other experts, whose order is that of ``given``.

    >>> scores_of_the_least({(0, 1): 5.0, (1, 2): 3.0}, np.array([7.0, 9.0, 8.0])).tolist()
    [3.0, 2.0, 1.0]
    """
    least = min(losses, key=lambda units: losses[units])
    places = np.empty(len(given))
    goes = np.isin(np.arange(len(given)), least)
    places[np.lexsort((given, ~goes))] = np.arange(1, len(given) + 1)
    return torch.from_numpy(places)


def losses_in_memory(
    model: nn.Module,
    coupling: Coupling,
    groups: Sequence[Group],
    counts: Mapping[Axis, int],
    batches: Iterable[Any],
    forward: Forward | None,
) -> Losses:
    """The loss of each mixture without each set of so many experts, from one run of the batches through a model in
    memory.
    """
    plans = subset_plans(model, coupling, counts, groups)
    watching, found = watching_losses(Watching(model, coupling, groups), plans)
    run = watching.forward(forward)
    with unchanged(model), prepared(model), torch.no_grad(), watching.watching():
        for batch in track(list(batches), "leaving experts out"):
            run(model, moved(batch, device_of(model)))
    return found
