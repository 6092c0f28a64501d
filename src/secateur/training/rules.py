"""The checked arguments of a `Pruner`, fixed while it trains: how masks are chosen, and of which weights. The steps at
which masks are updated, from a schedule, and their text for printing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secateur.allocation import Allocation, Tables
from secateur.evidence import needs
from secateur.patterns import Pattern, Unstructured
from secateur.regrowth import DropAndGrow, Held, Regrowth
from secateur.schedules import Moment, Schedule, constant, cubic, resolve, step_of
from secateur.support import name_of
from secateur.targets import stored_inputs_first, turned

# ---- The checked arguments of a `Pruner`, fixed while it trains: how masks are chosen, and of which weights.
#
# Law: what cannot be gathered, or cannot go together, is refused here, before a weight is touched.


@dataclass(frozen=True)
class Rules:
    """How masks are chosen; the rest of a Pruner is what it remembers."""

    criterion: Callable[..., Tensor]
    pattern: Pattern
    allocate: Allocation
    regrow: Regrowth | None
    inputs_first: list[str]  # weights that transformers' Conv1D stores as (inputs, outputs)
    collects: bool  # from batches, all but movement

    @property
    def gathered(self) -> set[str]:
        """What training steps show by themselves."""
        return {"movement"} if self.collects else {"grad", "grad_sq", "movement"}

    @property
    def watched(self) -> set[str]:
        """What the criterion asks of training steps."""
        return set(needs(self.criterion)) & self.gathered

    @property
    def holds(self) -> bool:
        """Whether removed weights keep their values."""
        return isinstance(self.regrow, Held)

    @property
    def trains_removed(self) -> bool:
        return isinstance(self.regrow, Held) and self.regrow.straight_through

    @property
    def remembered(self) -> set[str]:
        """Which values of the weights, beside masks, go from step to step."""
        return ({"movement", "grad_sq"} & self.watched) | ({"held"} if self.holds else set())

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Whether all that is asked for can be gathered of these weights."""
        words = dict.fromkeys(needs(self.criterion))
        if isinstance(self.regrow, DropAndGrow):
            words |= dict.fromkeys(needs(self.regrow.drop)) | dict.fromkeys(needs(self.regrow.grow))
        if "movement" in words and not self.holds:
            raise ValueError("movement needs removed weights to be held: leave regrow out, or pass regrowth.held().")
        lacking = [word for word in words if word not in self.gathered]
        if lacking and not self.collects:
            raise TypeError(
                f"{name_of(self.criterion)} asks for {', '.join(lacking)}, which no training step shows: pass "
                "batches=, a list or loader of a few batches."
            )
        frozen = [name for name, weight in weights.items() if not weight.requires_grad]
        if frozen and set(words) & self.gathered:
            raise ValueError(f"{frozen[0]} is frozen and has no gradient to score it by: exclude it.")
        if isinstance(self.regrow, DropAndGrow) and self.pattern.density is not None:
            raise ValueError(f"{self.pattern} says how much each group keeps: use sr_ste() to let weights return.")


def rules_for(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    criterion: Callable[..., Tensor],
    pattern: Pattern,
    allocate: Allocation,
    regrow: Regrowth | None,
    *,
    collects: bool,
) -> Rules:
    """The rules that were asked for, for the weights of a model; where movement is scored, removed weights are held.

    Raises:
        TypeError: ``regrow`` is no rule, or evidence is asked for that no training step shows.
        ValueError: the rules don't go together, or not with the weights, such as a pattern that does not fit one.
    """
    if regrow is None and "movement" in needs(criterion):
        regrow = Held()
    if not isinstance(regrow, DropAndGrow | Held | None):
        raise TypeError(f"regrow is what a function of secateur.regrowth makes, such as rigl(), not {regrow!r}.")
    # an unstructured mask is the same either way, but for the order of ties
    inputs_first = [] if pattern == Unstructured() else stored_inputs_first(model, weights)
    rules = Rules(criterion, pattern, allocate, regrow, inputs_first, collects)
    rules.check(weights)
    shapes = {name: torch.empty(weight.shape, device="meta") for name, weight in weights.items()}
    tables = Tables(turned(shapes, inputs_first), pattern)
    for name in shapes:
        tables.shape(name)  # a pattern that does not fit is told before the first step
    return rules


# ---- The steps at which masks are updated, from a schedule, and their text for printing.
#
# Law: at every moment that the schedule names there is an update, whatever the interval.

_RAMP_END = 0.6  # of the run: the rest is recovery
_UPDATES = 100  # about as many over a ramp, where ``every`` is not given


@dataclass(frozen=True)
class Timetable:
    """The steps at which masks are updated."""

    schedule: Schedule
    until: int  # removed weights may return before it; 0 where they don't
    total_steps: int | None
    interval: int | None  # None: about a hundred updates

    @property
    def moments(self) -> tuple[int, ...]:
        """The steps at which the schedule turns; unknown for a custom function."""
        return tuple(getattr(self.schedule, "moments", ()))

    @property
    def target_at(self) -> int | None:
        """The step from which the sparsity stays, as far as is known."""
        return max(self.moments) if self.moments else self.total_steps

    @functools.cached_property
    def every(self) -> int:
        if self.interval is not None:
            return self.interval
        if self.until:
            return max(1, min(100, self.until // _UPDATES))
        if not self.moments:  # a custom function: when its value changes
            return max(1, self.total_steps // _UPDATES) if self.total_steps else 1
        begin = self.moments[0] if len(self.moments) > 1 else 0
        return max(1, (self.moments[-1] - begin) // _UPDATES)

    def regrows_at(self, step: int) -> bool:
        return step < self.until and step % self.every == 0

    def updates_at(self, step: int) -> bool:
        return step % self.every == 0 or step == self.total_steps or step in self.moments

    def lines(self) -> list[str]:
        last = max([*self.moments, self.until]) or self.total_steps or 0
        steps = sorted({*self.moments, *(round(last * part / 4) for part in range(5))})
        end = f"then recovery until step {self.total_steps:,}" if self.total_steps else "then it stays there"
        return [
            f"  schedule: {self.schedule if hasattr(self.schedule, 'moments') else name_of(self.schedule)}",
            *(f"  step {step:>8,}  sparsity {float(self.schedule(step)):.4f}" for step in steps[:12]),
            f"  an update every {self.every:,} step{'s' * (self.every > 1)}; {end}",
        ]


def schedule_of(schedule: Schedule | float | None, pattern: Pattern, *, regularized: bool) -> Schedule:
    """What was asked for as a schedule: a number is a ramp to it, None what the pattern says."""
    fixed = None if pattern.density is None else 1 - pattern.density
    if schedule is None:
        if fixed is None and regularized:
            return constant(0.0)
        if fixed is None:
            raise ValueError(f"{pattern} needs a sparsity or a schedule.")
        return cubic(fixed, end=_RAMP_END)
    if callable(schedule):
        return schedule
    if fixed is not None and abs(schedule - fixed) > 1e-9:
        raise ValueError(f"{pattern} removes {fixed:g} of the weights, not {schedule}; leave the sparsity out.")
    return cubic(schedule, end=_RAMP_END)


def timetable_for(
    schedule: Schedule,
    regrow: Regrowth | None,
    every: Moment | None,
    total_steps: int | None,
    steps_per_epoch: float | None,
) -> Timetable:
    """A schedule as a timetable in steps, with the updates that it and a regrowth rule ask for.

    Raises:
        ValueError: a moment can't be resolved, or the target lies beyond the end of the run.
    """
    resolved = resolve(schedule, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    until = step_of(regrow.until, total_steps, steps_per_epoch) if isinstance(regrow, DropAndGrow) else 0
    interval = None if every is None else max(1, step_of(every, total_steps, steps_per_epoch))
    if interval is None and isinstance(regrow, Held) and regrow.straight_through:
        interval = 1
    return Timetable(resolved, until, total_steps, interval)
