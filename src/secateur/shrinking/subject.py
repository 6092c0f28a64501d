"""The model that is shrunken: a module with its weights, or one on the meta device whose weights lie in files.

Law: the selection reads this value alone, so that modules and directories are treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from secateur.coupling import Axis, Coupling, Group, Kept
from secateur.shrinking.configuration import Configured
from secateur.shrinking.proof import wrong_groups

__all__ = ["Subject", "subject_of"]


@dataclass(frozen=True)
class Subject:
    """A model to be shrunken, with its coupling, its configuration and access to its weights.

    Attributes:
        model: the module; its weights are not asked of it.
        coupling: of the model; what turns out to be wrong is frozen in it.
        inputs: the examples that were watched.
        weights: ``{name: parameter}``, of which one at a time is looked at.
        blocks: the rows of a parameter by its name, some at a time: all but the last a multiple of `rows_at_once`.
        configured: what is to say what is left; None where nothing does.
        proved_on: a model with values on which the proof is made, this one or one like it; None: there is no proof.
    """

    model: nn.Module
    coupling: Coupling
    inputs: Sequence[Any]
    weights: Mapping[str, Tensor]
    blocks: Callable[[str], Iterable[Tensor]]
    configured: Configured | None = None
    proved_on: nn.Module | None = None

    def objections(self, groups: Sequence[Group], kept: Kept) -> tuple[list[Group], str]:
        """The groups of which this cannot be all that is kept, and why not."""
        if self.proved_on is not None:
            wrong = wrong_groups(self.proved_on, self.coupling, groups, kept, self.inputs)
            if wrong:
                return wrong, "the smaller model computed something else"
        if self.configured is None:
            return [], ""
        wrong = self.configured.unsaid(self.proved_on, self.coupling, groups, kept, self.inputs)
        return wrong, "a model built from the configuration is not the smaller one"

    def is_possible(self, counts: Mapping[Axis, int]) -> bool:
        """Whether there is a model of which so many units are left."""
        return self.configured is None or self.configured.is_possible(counts)


def subject_of(
    model: nn.Module,
    coupling: Coupling,
    inputs: Sequence[Any],
    *,
    configured: Configured | None = None,
    proved_on: nn.Module | None = None,
) -> Subject:
    """The `Subject` of a module in memory."""
    weights = dict(model.named_parameters())
    return Subject(model, coupling, inputs, weights, lambda name: [weights[name].detach()], configured, proved_on)
