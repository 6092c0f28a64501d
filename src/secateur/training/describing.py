"""What a Pruner says of itself, before it has changed anything.

Law: it is text; who prints it, and whether that works, is no matter of pruning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor, nn

from secateur.support import name_of
from secateur.targets import left_alone
from secateur.training.regularization import Penalty
from secateur.training.rules import Rules
from secateur.training.timetable import Timetable

__all__ = ["description", "is_first_rank"]


def description(
    model: nn.Module, weights: Mapping[str, Tensor], rules: Rules, timetable: Timetable, penalty: Penalty | None
) -> str:
    """What is pruned, when, by what, and what is left alone and why."""
    pruned = sum(weight.numel() for weight in weights.values())
    total = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        f"Pruner: {pruned:,} weights in {len(weights)} tensors of {total:,} parameters; "
        f"{name_of(rules.criterion)}, {rules.pattern}, {name_of(rules.allocate)}"
        + (f", {rules.regrow}" if rules.regrow else "")
    ]
    lines += timetable.lines()
    if penalty is not None:
        lines.append(f"  {penalty}")
    reasons = Counter(left_alone(model, weights).values())
    if reasons:
        alone = ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
        lines.append(f"  left alone: {alone}")
    return "\n".join(lines)


def is_first_rank() -> bool:
    """Whether this process is the one that speaks."""
    from torch import distributed

    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
