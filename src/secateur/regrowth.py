"""How removed weights come back while training: rules that a Pruner follows beside its schedule.

Law: a rule decides which weights return and with what value, never how many are kept: that is the schedule's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from secateur.criteria import magnitude, random
from secateur.schedules import Moment

__all__ = ["DropAndGrow", "Held", "Regrowth", "held", "rigl", "sparse_evolutionary_training", "sr_ste"]


@dataclass(frozen=True)
class DropAndGrow:
    """At each update the lowest ``fraction`` of what is kept is dropped, and as much of what was removed grows at zero.

    Args:
        grow: criterion over the removed weights; the highest return.
        drop: criterion over the kept weights; the lowest go. A weight that is dropped may grow again and keeps its
            value then.
        fraction: of each tensor's kept units, at the start of the run.
        until: the moment after which nothing is dropped or grown.
        decay: True lets the fraction fall to 0 at ``until`` along half a cosine.
    """

    grow: Callable[..., Tensor]
    drop: Callable[..., Tensor] = magnitude
    fraction: float = 0.3
    until: Moment = 0.75
    decay: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ValueError(f"the fraction dropped and grown at an update lies between 0 and 1; got {self.fraction}.")

    def share(self, step: int, until: int) -> float:
        """The fraction at a step: ``fraction/2 · (1 + cos(π · step/until))`` where it decays.

        >>> rule = DropAndGrow(grow=random, fraction=0.4)
        >>> rule.share(0, 100), round(rule.share(50, 100), 3), rule.share(100, 100)
        (0.4, 0.2, 0.0)
        """
        if step >= until:
            return 0.0
        return self.fraction / 2 * (1 + math.cos(math.pi * step / until)) if self.decay else self.fraction


@dataclass(frozen=True)
class Held:
    """Removed weights keep their values beside the model and come back with them when their scores rise.

    Args:
        straight_through: removed weights are trained too, by the gradients at the masked model.
        decay: SR-STE's λ: removed weights are drawn to zero by ``λ·w`` in the gradient.
        penalty: soft movement's λ: each step lowers the accumulated movement S by ``λ·σ'(S)``.

    >>> sr_ste(decay=0.01)
    Held(straight_through=True, decay=0.01, penalty=0.0)
    """

    straight_through: bool = False
    decay: float = 0.0
    penalty: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.decay < math.inf and 0 <= self.penalty < math.inf):
            raise ValueError(f"decay and penalty are finite and not negative; got {self.decay} and {self.penalty}.")
        if self.decay and not self.straight_through:
            raise ValueError("decay acts on removed weights that are trained: it needs straight_through=True.")


Regrowth = DropAndGrow | Held


def rigl(*, fraction: float = 0.3, until: Moment = 0.75) -> DropAndGrow:
    """Smallest ``|w|`` out, largest ``|∂L/∂w|`` in: RigL (Evci et al. 2020, arXiv:1911.11134).

    The fraction falls to 0 at ``until`` along half a cosine. The gradient is that of the step at which the update
    falls, of all weights: a masked forward pass has dense gradients as it is. Published with `erk` and a constant
    schedule, updated every 100 steps.

    >>> rigl().share(step=0, until=750)
    0.3
    """
    return DropAndGrow(_gradient, fraction=fraction, until=until)


def sparse_evolutionary_training(*, fraction: float = 0.3, until: Moment = 1.0) -> DropAndGrow:
    """Smallest ``|w|`` out, random ones in: SET (Mocanu et al. 2018, arXiv:1707.04780).

    The fraction stays the same. Published with `erk` and a constant schedule, updated at every epoch.

    >>> sparse_evolutionary_training().share(step=500, until=750)
    0.3
    """
    return DropAndGrow(random, fraction=fraction, until=until, decay=False)


def sr_ste(*, decay: float = 2e-4) -> Held:
    """``w ← w - lr·(g(w̃) + λ·(1 - mask)·w)`` where w̃ is the masked weight: SR-STE (Zhou et al. 2021, arXiv:2102.04010).

    All weights are trained by the gradient at the masked ones, and what is removed is drawn to zero by λ, so that the
    n:m masks settle. Costs a copy of the pruned weights and, with a new mask at each step (``every=1``, the default
    with this rule), a ranking a step.

    >>> sr_ste().decay
    0.0002
    """
    return Held(straight_through=True, decay=decay)


def held(*, penalty: float = 0.0) -> Held:
    """Removed weights keep their values, untrained, until their scores rise: what movement pruning needs.

    The default of a Pruner whose criterion names ``movement``. Costs a copy of the pruned weights.

    >>> held().straight_through
    False
    """
    return Held(penalty=penalty)


def _gradient(_weight: Tensor, *, grad: Tensor) -> Tensor:
    return grad.abs()
