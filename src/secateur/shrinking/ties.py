"""Tied groups: they keep the same share of their units.

Law: a count is the same whole number of parts of each of them, not below the least and a multiple of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from secateur.coupling import Axis, Group

__all__ = ["ROUNDED", "Tied", "by_tie"]

ROUNDED = 16  # kernels run other counts no faster


def by_tie(groups: Iterable[Group]) -> list[list[Group]]:
    tied: dict[int, list[Group]] = {}
    for group in groups:
        tied.setdefault(group.tied, []).append(group)
    return list(tied.values())


class Tied:
    """Tied groups, which keep the same share of their units: groups of 36 and 3 keep 12 and 1, or 24 and 2, or all.

    Args:
        groups: all that are tied to each other.
        round_to: counts are multiples of this; None: of ``rounded`` in groups of 64 or more.
        minimum: fewer may not stay.
    """

    def __init__(
        self, groups: Sequence[Group], round_to: int | None, minimum: Mapping[Axis, int], rounded: int = ROUNDED
    ) -> None:
        self.groups = groups
        self.parts = math.gcd(*(group.size for group in groups))
        self.step, self.least = 1, 1
        for group in groups:
            step = (rounded if group.size >= 64 else 1) if round_to is None else round_to
            step = math.lcm(step, group.multiple)
            self.step = math.lcm(self.step, step // math.gcd(step, group.size // self.parts))
            self.least = max(self.least, -(-minimum.get(group.axis, 1) * self.parts // group.size))

    def choices(self) -> npt.NDArray[np.int64]:
        """Of how many parts the groups can keep, all first; what is no multiple comes only as all."""
        least = -(-self.least // self.step) * self.step
        fewer = np.arange((self.parts - 1) // self.step * self.step, least - 1, -self.step)
        return np.concatenate([[self.parts], fewer])

    def mean(self, counts: Mapping[Axis, int]) -> float:
        """Of how many of the parts the groups keep."""
        return sum(counts[group.axis] * self.parts / group.size for group in self.groups) / len(self.groups)

    def counts(self, parts: int) -> dict[Axis, int]:
        """How many units each group keeps when the tie keeps so many parts."""
        parts = min(max(parts, self.step, self.least), self.parts)
        return {group.axis: group.size // self.parts * parts for group in self.groups}
