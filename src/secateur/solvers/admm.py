"""The default solver: ADMM over four penalties, in the metric of what removing a weight costs, then least squares.

Law: the outcome keeps exactly what pattern and sparsity say, and its kept weights are refitted by least squares.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from secateur.patterns import Pattern, Unstructured
from secateur.solvers.gram import not_a_gram, once_for
from secateur.solvers.least_squares import admm_step, best_mask, conjugate_gradients, finished, scaled, untouched

RELAXATION = 1.3
TOLERANCE = 1e-3
CORNER = 192  # LAPACK inverts up to this size
SAMPLE = 1 << 15  # weights that a threshold is estimated from


def admm(
    weight: Tensor,
    sparsity: float | None,
    pattern: Pattern,
    *,
    gram: Tensor,
    damping: float = 0.01,
    penalties: tuple[float, ...] = (0.08, 0.4, 0.8, 1.7),
    steps: tuple[int, ...] = (2, 3, 3, 7),
    iterations: int = 8,
) -> tuple[Tensor, Tensor]:
    """ADMM over four penalties, in the metric of each weight's removal cost, then least squares.

    As ALPS (Meng et al. 2024, arXiv:2406.07831) it splits the problem in two that are easy, weights without a mask and
    the nearest masked weights, and makes them agree. What differs: after the first penalty ``ρ₁``, "nearest" is no
    longer measured by the diagonal of H (which is 1, as inputs are scaled) but by

    ``p_j = r c_j / (1 + (r - 1) c_j)`` with ``c_j = 1 / ((1 + ρ₁) [(H + ρ₁)⁻¹]_jj)``

    for growing ratios r. ``c_j`` is the cost of removing a weight whose neighbours make up for it, and 1 for an input
    that is uncorrelated with all others; there ``p_j`` is 1 too, at which ADMM keeps the largest and is done. The
    penalties are fixed, so that four Cholesky factorizations replace the eigenvalue decomposition; steps are relaxed
    by 1.3; and the last penalty has most of them. Layers that share an input (the same Gram tensor) share the
    factorizations. What helped and what did not is in docs/guides/solvers.md, with figures.

    Args:
        weight: (outputs, inputs), any real floating dtype.
        sparsity: fraction of units to remove; None for patterns that say it themselves.
        pattern: who competes with whom; `Unstructured` competes over the whole weight.
        gram: ``XᵀX`` over tokens, (inputs, inputs).
        damping: fraction of the mean diagonal entry, in [0, 1].
        penalties: ``ρ₁``, and then the ratios r; positive.
        steps: how many for each penalty.
        iterations: of least squares at the end, at most.

    Returns:
        The new weight, in the weight's dtype, and its mask.

    Raises:
        ValueError: a shape does not fit, an entry is NaN or infinite, the matrix is no Gram matrix, or the penalties
            and steps do not pair.

    >>> gram = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> admm(torch.tensor([[1.0, 3.0]]), 0.5, Unstructured(), gram=gram, damping=0.0)
    (tensor([[0.0000, 3.5000]]), tensor([[False,  True]]))
    """
    if not penalties or len(penalties) != len(steps):
        raise ValueError(f"each penalty needs its number of steps; got {len(penalties)} penalties, {len(steps)} steps.")
    if not all(penalty > 0 for penalty in penalties) or not all(step >= 1 for step in steps):
        raise ValueError(f"penalties are positive and steps at least 1; got {penalties} and {steps}.")
    H, scale, target = scaled(weight, sparsity, pattern, gram, damping)
    if not target.numel():
        return untouched(weight)
    cost = torch.ones_like(scale)
    kept = _near_mask(target.abs(), sparsity, pattern)
    split = target * kept
    pull = penalties[0] * cost
    for number, (penalty, count) in enumerate(zip(penalties, steps, strict=True)):
        if number:
            before, pull = pull, penalty * cost / (1 + (penalty - 1) * cost)
            shrunk = before / pull  # U is the dual, which stays, over the penalty; D stays too
            split *= torch.addcmul(shrunk, kept, 1 - shrunk)
        spread = once_for(
            gram, ("spread", damping, H.dtype, penalties[: number + 1]), functools.partial(_spread, H, pull)
        )
        root = pull.sqrt()
        for _ in range(count):
            admm_step(split, kept, target, spread, RELAXATION)
            scores = torch.mul(split, root).abs_()
            kept = _near_mask(scores, sparsity, pattern)
        if number == 0:
            cost = pull / (spread.diagonal() * (1 + penalty))
    mask = best_mask(scores, sparsity, pattern)
    new = conjugate_gradients(H, target, split * mask, mask, iterations, TOLERANCE)
    return finished(new / scale, mask, weight), mask


def _near_mask(scores: Tensor, sparsity: float | None, pattern: Pattern) -> Tensor:
    """`best_mask` as 1 and 0, but where all weights compete the threshold is that of a sample: counts are only near."""
    if type(pattern) is not Unstructured or scores.numel() < 2 * SAMPLE:
        return best_mask(scores, sparsity, pattern).to(scores.dtype)
    assert sparsity is not None
    stride = scores.numel() // SAMPLE
    while math.gcd(stride, scores.shape[1]) > 1:  # else some inputs would never be in the sample
        stride += 1
    sample = scores.reshape(-1)[::stride]
    removed = round(sparsity * sample.numel())
    if not removed:
        return torch.ones_like(scores)
    return torch.gt(scores, sample.kthvalue(removed).values, out=torch.empty_like(scores))


def _spread(matrix: Tensor, pull: Tensor) -> Tensor:
    """``P (matrix + P)⁻¹`` for the diagonal matrix P of the pull."""
    moved = matrix.clone()
    moved.diagonal().add_(pull)
    inverse = _inverse(moved)
    if inverse is None:
        raise not_a_gram(matrix)
    return inverse.mul_(pull[:, None])


def _inverse(matrix: Tensor) -> Tensor | None:
    """The inverse of a positive definite matrix, None of another; the matrix is written over.

    By halves, ``[[A, B], [Bᵀ, C]]`` with the Schur complement ``C - Bᵀ A⁻¹ B``, so that all but small corners is
    products: measured 0.7 of the time of LAPACK's factorization and inverse for 1536 inputs. A corner that is not
    positive definite is met if and only if the matrix is not.
    """
    n = matrix.shape[0]
    if n <= CORNER:
        lower, failed = torch.linalg.cholesky_ex(matrix)
        return None if bool(failed) else torch.cholesky_inverse(lower)
    half = n // 2
    across = matrix[:half, half:]
    first = _inverse(matrix[:half, :half])
    if first is None:
        return None
    ratios = first @ across
    second = _inverse(matrix[half:, half:].addmm_(across.T, ratios, alpha=-1))
    if second is None:
        return None
    inverse = matrix
    torch.mm(ratios, second, out=inverse[:half, half:]).neg_()
    inverse[half:, :half] = inverse[:half, half:].T
    inverse[half:, half:] = second
    inverse[:half, :half] = first.addmm_(inverse[:half, half:], ratios.T, alpha=-1)
    return inverse
