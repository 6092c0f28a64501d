"""What solvers share when they search: the protocol, and the mask that keeps the best.

Law: exactly as many units are kept as the pattern and the sparsity say.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from secateur.allocation import check_sparsity
from secateur.patterns import Pattern
from secateur.selection import keep_largest
from secateur.solvers.gram import checked, correlation, once_for

__all__ = ["Solver", "admm_step", "best_mask", "check_pattern", "kept_of", "scaled", "spread_best", "untouched"]


class Solver(Protocol):
    """The interface of a solver: a function that names the evidence it needs as parameters without a default."""

    def __call__(
        self, weight: Tensor, sparsity: float | None, pattern: Pattern, /, **evidence: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(outputs, inputs) -> the new weight, and the mask, True = kept."""


def best_mask(scores: Tensor, sparsity: float | None, pattern: Pattern) -> Tensor:
    """The mask of the best units of each group, exactly as many as the pattern or the sparsity says.

    >>> from secateur.patterns import NM
    >>> best_mask(torch.tensor([[1.0, 3.0, 2.0, 4.0]]), None, NM(2, 4))
    tensor([[False,  True, False,  True]])
    """
    units = pattern.pool(torch.empty(scores.shape, device="meta")).shape[1]
    return spread_best(scores, pattern, kept_of(pattern, sparsity, units))


def check_pattern(pattern: Pattern, sparsity: float | None, shape: torch.Size) -> None:
    """Raises ``ValueError`` where the pattern does not fit the shape or the sparsity; computes nothing.

    >>> from secateur.patterns import NM
    >>> check_pattern(NM(2, 4), None, torch.Size([2, 8]))
    """
    kept_of(pattern, sparsity, 0)
    pattern.pool(torch.empty(shape, device="meta"))


def kept_of(pattern: Pattern, sparsity: float | None, units: int) -> int:
    """How many units of a group stay; ``ValueError`` where pattern and sparsity do not say it, or contradict."""
    if pattern.density is not None:
        if sparsity is not None and abs(sparsity - (1 - pattern.density)) > 1e-9:
            raise ValueError(
                f"{pattern} removes {1 - pattern.density:g} of the weights, not {sparsity}; pass None as the sparsity."
            )
        return round(pattern.density * units)
    if sparsity is None:
        raise ValueError(f"{pattern} needs a sparsity: the fraction to remove, in [0, 1].")
    check_sparsity(sparsity)
    return units - round(sparsity * units)


def spread_best(scores: Tensor, pattern: Pattern, kept: int) -> Tensor:
    mask: Any = pattern.spread(keep_largest(pattern.pool(scores), kept), scores.shape)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != scores.shape:
        what = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{pattern}.spread returned {what}, not a bool mask of shape {tuple(scores.shape)}.")
    return mask


def untouched(weight: Tensor) -> tuple[Tensor, Tensor]:
    """What every solver returns of a weight without entries."""
    return weight.detach().clone(), torch.ones(weight.shape, dtype=torch.bool, device=weight.device)


def scaled(
    weight: Tensor, sparsity: float | None, pattern: Pattern, gram: Tensor, damping: float
) -> tuple[Tensor, Tensor, Tensor]:
    """After the checks at the door: the inputs' correlations, their scales, and the weight in units of these.

    All in float32 or wider; the correlations are shared by layers with one Gram matrix. Of a weight without entries
    nothing is computed.
    """
    dense = checked(weight, gram)
    check_pattern(pattern, sparsity, dense.shape)
    if not dense.numel():
        return dense.new_zeros(0, 0), dense.new_ones(dense.shape[1]), dense
    H, scale = once_for(gram, ("correlation", damping, dense.dtype), lambda: correlation(gram, damping, dense.dtype))
    return H, scale, (dense * scale).contiguous()


def admm_step(split: Tensor, kept: Tensor, target: Tensor, spread: Tensor, relaxation: float) -> None:
    """One step of ADMM in one tensor, in place: D + U, of which D (the masked weights) is what is kept, U the rest.

    The weights without a mask are ``B = (target H + (D - U) P) (H + P)⁻¹ = target + (D - U - target) P (H + P)⁻¹`` for
    the diagonal matrix P of the penalty, and ``spread`` is ``P (H + P)⁻¹``. The next D + U is r B + (1 - r) D + U for
    the relaxation r. ``kept`` is 1 or 0: products with bool are slower.
    """
    masked = split * kept
    away = masked - target
    source = masked.sub_(split).add_(away)
    split.sub_(away, alpha=relaxation).addmm_(source, spread, alpha=relaxation)
