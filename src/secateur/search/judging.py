"""Compares finished models by their loss, row by row, and picks one.

Law: what is taken loses no more than any fixed allocation that was finished beside it; and what is no fixed allocation
is taken only where it loses less than the best of them by more than the noise of what both are judged by.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Judged", "taken_of"]


@dataclass(frozen=True, eq=False)
class Judged:
    """The loss of a finished model.

    Attributes:
        loss: where there are rows the mean over the sets of their means.
        sets: for each set of batches, such as those held back, the loss of each row of each batch. Empty with a custom
            score, which is one number.
    """

    loss: float
    sets: Sequence[Sequence[Tensor]] = ()

    @staticmethod
    def by(*sets: Sequence[Tensor]) -> Judged:
        """Of sets that count alike, however many rows they have.

        >>> Judged.by([torch.tensor([1.0, 3.0])], [torch.tensor([4.0])]).loss
        3.0
        """
        means = [float(torch.cat([*rows]).double().mean()) for rows in sets]
        loss = sum(means) / len(means)
        return Judged(math.inf if math.isnan(loss) else max(0.0, loss), sets)

    def beats(self, other: Judged) -> bool:
        """Whether it loses less by more than the standard error of the difference, which is taken row by row: what both
        lose of a hard example says nothing of which is the better one. It is as of independent rows, or as of
        independent batches, whichever is more. Without rows of both there is no error that is known, and less is less.

        >>> one, other = (torch.tensor(each) for each in ([1.0, 2.0, 9.0, 4.0], [1.1, 2.1, 9.1, 4.1]))
        >>> Judged.by([one]).beats(Judged.by([other])), Judged.by([one]).beats(Judged.by([other.flip(0)]))
        (True, False)
        """
        return other.loss - self.loss > self._noise(other)

    def _noise(self, other: Judged) -> float:
        if not (self.sets and other.sets and math.isfinite(self.loss) and math.isfinite(other.loss)):
            return 0.0
        by_rows, parts = 0.0, []
        mean = self.loss - other.loss
        for mine, its in zip(self.sets, other.sets, strict=True):
            apart = [one.double() - another.double() for one, another in zip(mine, its, strict=True)]
            every = torch.cat(apart)
            weight = 1 / (len(self.sets) * len(every))
            by_rows += float((every - every.mean()).square().sum()) * weight**2 * _bessel(len(every))
            parts += [weight * float((each - mean).sum()) for each in apart]
        by_batches = sum(each**2 for each in parts) * _bessel(len(parts))
        return math.sqrt(max(by_rows, by_batches))


def _bessel(count: int) -> float:
    return count / (count - 1) if count > 1 else 1.0


def taken_of(judged: Mapping[str, Judged], fixed: Collection[str]) -> str:
    """Which of the finished models is taken: the one that loses least, unless the best of the fixed allocations is as
    good but for noise. The least of many looks better than it is, and most of these were made to look good; so the one
    that was not is believed within a standard error, as smaller trees are by Breiman et al. 1984 (*Classification and
    Regression Trees*, 3.4.3).

    >>> taken_of({"uniform": Judged(0.2), "searched": Judged(0.1)}, {"uniform"})
    'searched'
    """
    best = min(judged, key=lambda name: judged[name].loss)
    safe = min((name for name in judged if name in fixed), key=lambda name: judged[name].loss, default=best)
    return best if best in fixed or judged[best].beats(judged[safe]) else safe
