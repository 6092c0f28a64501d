"""What leaves is chosen by data, and what stays is repaired: two walks over the model, with the choice between them.

Law: the structure is proved before any weight changes; what changed is taken back by the caller's `Undo`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise import find_blocks, slopes, walk_model
from secateur.shrinking.counts import Choice, choose
from secateur.shrinking.measuring import Measuring
from secateur.shrinking.plan import plan_of
from secateur.shrinking.repairing import Repairing
from secateur.shrinking.request import Request
from secateur.shrinking.scope import groups_in_scope
from secateur.shrinking.subject import Subject
from secateur.support import Forward, Undo

__all__ = ["chosen_by_data"]

_SLOPES = 4  # batches that slopes are measured on: means over their tokens


def chosen_by_data(
    subject: Subject,
    asked: Request,
    known: Collection[str],
    batches: Iterable[Any],
    *,
    repair: bool,
    forward: Forward | None,
    undo: Undo,
) -> Choice:
    """What stays of a model in memory, whose consumers are repaired already; the plan is not carried out yet.

    Raises:
        ValueError: the model has no repeated blocks, there are no batches, or they measure nothing that may leave.
    """
    model, coupling = subject.model, subject.coupling
    shared = _shared(model)
    batches = batches if isinstance(batches, list | tuple) else list(batches)
    measuring = Measuring(coupling, groups_in_scope(coupling, asked), shared=shared)
    measuring.slopes.update(slopes(model, batches[:_SLOPES], measuring.targets, forward=forward))
    walk_model(model, batches, measuring, forward=forward)
    measured = measuring.measured
    if not measured.scores:
        raise ValueError(
            f"data says nothing of what may leave {type(model).__name__}: the batches ran none of its blocks, or no "
            "product of a unit with a matrix in them (of convolutions nothing is measured). Pass other batches, or "
            "none: then magnitude ranks the units."
        )
    choice = choose(subject, asked, known, measured)
    left = [group for group in coupling.groups if group.axis in choice.kept and not choice.kept[group.axis].all()]
    if not left:
        return choice
    job = Repairing(coupling, left, choice.kept, measured, repair=repair)
    before = {name: model.get_parameter(name).detach().clone() for name in job.targets}

    def put_back() -> None:
        with torch.no_grad():
            for name, values in before.items():
                _parameter(model, name).copy_(values)

    undo.call(put_back)
    walk_model(model, batches, job, forward=forward)
    return replace(choice, kept=job.kept, plan=plan_of(model, coupling, job.kept))


def _shared(model: nn.Module) -> frozenset[str]:
    """The parameters that several blocks hold: what is right for one is wrong for the others, so they stay as they are.

    Raises:
        ValueError: the model has no blocks.
    """
    try:
        blocks = find_blocks(model)
    except ValueError:
        raise ValueError(
            f"{type(model).__name__} has no repeated blocks (no ModuleList or Sequential of modules that hold "
            "matrices), and data is measured block by block. Shrink it without batches, or put its blocks into a "
            "ModuleList."
        ) from None
    names: dict[int, list[str]] = {}
    for block, module in blocks.items():
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), []).append(f"{block}.{name}")
    return frozenset(name for each in names.values() if len(each) > 1 for name in each)


def _parameter(model: Any, name: str) -> Tensor:
    found: Tensor = model.get_parameter(name)
    return found
