"""Selection and repair by calibration data, in memory: one walk measures, the units are chosen, a second walk repairs.

Law: the structure is proved before any weight changes; what changed is taken back by the caller's `Undo`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from secateur.blockwise import full_name, parts_of, slopes, walk_model
from secateur.coupling import Group
from secateur.shrinking.counts import Choice, choose
from secateur.shrinking.measuring import OVERFLOWING, Measured, Measuring, check_finite, for_slopes, not_finite
from secateur.shrinking.plan import plan_of
from secateur.shrinking.remembered import recalled, remember
from secateur.shrinking.repairing import Repairing, free_in
from secateur.shrinking.request import Request
from secateur.shrinking.rescaling import rescale
from secateur.shrinking.scope import check_globs, groups_in_scope, names_of
from secateur.shrinking.subject import Subject
from secateur.shrinking.trying import Trying
from secateur.support import Forward, Undo

__all__ = ["chosen_by_data"]


def chosen_by_data(
    subject: Subject,
    asked: Request,
    known: Collection[str],
    batches: Sequence[Any],
    *,
    repair: bool,
    forward: Forward | None,
    undo: Undo,
) -> tuple[Choice, dict[str, Tensor]]:
    """The units that stay of a model in memory, and the values before the repair, ``{name: copy}``, for the undo. The
    consumers are repaired already; the plan is not carried out yet.

    Raises:
        ValueError: a glob matches nothing, a weight is not finite, there are no batches, or they measure nothing that
            may leave.

    Warns:
        RuntimeWarning: gradients overflow where the model itself does not, so that losses are shares of variances.
    """
    model, coupling = subject.model, subject.coupling
    check_globs(names_of(coupling) | set(known), asked.globs)
    groups = groups_in_scope(coupling, asked)
    free = free_in(model, parts_of(model))
    tries = repair and asked.allocate is None and asked.sparsity is not None  # else no losses are asked for
    way = ("tried", asked.round_to) if tries else None
    measured = recalled(model, groups, batches, way)
    if measured is None:
        measured = _measured(subject, groups, asked, batches, forward, free if tries else None)
        remember(model, groups, batches, measured, way)
        if measured.slopes:  # then nothing is tried
            remember(model, groups, batches, measured)
    choice = choose(subject, asked, known, measured)
    left = [group for group in coupling.groups if group.axis in choice.kept and not choice.kept[group.axis].all()]
    if not left:
        return choice, {}
    job = Repairing(coupling, left, choice.kept, measured, free, repair=repair)
    changes = {name: each for name, each in model.named_parameters() if name in job.targets or each.dim() == 1}
    before = dict(zip(changes, undo.values(*changes.values()), strict=True))  # biases are among them
    walk_model(model, batches, job, forward=forward)
    plan = plan_of(model, coupling, job.kept)
    if repair:
        rescale(model, plan, batches, forward=forward)
    return replace(choice, kept=job.kept, plan=plan), before


def _measured(
    subject: Subject,
    groups: Sequence[Group],
    asked: Request,
    batches: Sequence[Any],
    forward: Forward | None,
    free: frozenset[str] | None,
) -> Measured:
    """What a walk over the dense model says; where no slopes are known and parameters that may move are given, with
    losses that were tried."""
    model, coupling = subject.model, subject.coupling
    measuring = Measuring(coupling, groups, shared=_shared(model))
    found = slopes(model, for_slopes(batches), measuring.targets, forward=forward, unless_pooled=True)
    wrong = not_finite(found)
    if wrong is None:
        measuring.slopes.update(found)
    else:
        check_finite(model)

    def walked(measuring: Measuring) -> Trying | None:
        trying = Trying(measuring, free, asked.round_to) if free is not None and not measuring.slopes else None
        walk_model(model, batches, trying or measuring, forward=forward)  # of what is not finite it says where
        return trying

    trying = walked(measuring)
    if wrong is not None:
        warnings.warn(OVERFLOWING.format(name=wrong), RuntimeWarning, stacklevel=4)
    if measuring.slopes and measuring.unsloped:
        measuring = Measuring(coupling, groups, shared=measuring.shared)
        trying = walked(measuring)
    measured = measuring.measured
    if not measured.scores:
        raise ValueError(
            f"data says nothing of what may leave {type(model).__name__}: the batches ran none of its blocks, or no "
            "product of a unit with a matrix in them. Pass other batches, or none: then magnitude ranks the units."
        )
    if trying is not None:
        return trying.tried(model, measured, batches, forward)
    return measured


def _shared(model: nn.Module) -> frozenset[str]:
    """The parameters that several blocks hold: what is right for one is wrong for the others, so they stay."""
    blocks = parts_of(model)
    names: dict[int, list[str]] = {}
    for block, module in blocks.items():
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), []).append(full_name(block, name))
    return frozenset(name for each in names.values() if len(each) > 1 for name in each)
