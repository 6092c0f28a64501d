"""The checked arguments of a `Pruner`, fixed while it trains: how masks are chosen, and of which weights.

Law: what cannot be gathered, or cannot go together, is refused here, before a weight is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from secateur.allocation import Allocation
from secateur.evidence import needs
from secateur.patterns import Pattern, Unstructured
from secateur.regrowth import DropAndGrow, Held, Regrowth
from secateur.support import name_of
from secateur.targets import stored_inputs_first

__all__ = ["Rules", "rules_for"]


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
        ValueError: the rules don't go together, or not with the weights.
    """
    if regrow is None and "movement" in needs(criterion):
        regrow = Held()
    if not isinstance(regrow, DropAndGrow | Held | None):
        raise TypeError(f"regrow is what a function of secateur.regrowth makes, such as rigl(), not {regrow!r}.")
    # an unstructured mask is the same either way, but for the order of ties
    inputs_first = [] if pattern == Unstructured() else stored_inputs_first(model, weights)
    rules = Rules(criterion, pattern, allocate, regrow, inputs_first, collects)
    rules.check(weights)
    return rules
