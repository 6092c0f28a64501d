"""ALPS (arXiv:2406.07831): ADMM with a penalty that grows until no weight changes places, then least squares.

Law: the outcome keeps exactly what pattern and sparsity say, and its kept weights are refitted by least squares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secateur.patterns import Pattern
from secateur.solvers.gram import not_a_gram, once_for
from secateur.solvers.least_squares import admm_step, best_mask, conjugate_gradients, finished, scaled, untouched


def alps(
    weight: Tensor,
    sparsity: float | None,
    pattern: Pattern,
    *,
    gram: Tensor,
    damping: float = 0.01,
    penalty: float = 0.1,
    most_steps: int = 300,
    iterations: int = 10,
) -> tuple[Tensor, Tensor]:
    """``min tr((W - W') H (W - W')ᵀ)`` over masks and weights by ADMM, then least squares: ALPS (Meng et al. 2024,
    arXiv:2406.07831).

    Inputs are scaled so that H has ones on its diagonal. One eigenvalue decomposition serves every penalty, which
    grows every third step: by 1.3, 1.2 or 1.1 as more than a tenth, more than 0.5 %, or any of the kept weights have
    changed places. As in the authors' code a first penalty that is too large (nothing changes places) is divided by 5,
    and the search ends when no weight changes places, or after 30 steps when under 0.03 % do. `admm` finds masks as
    good in a fraction of the time.

    Args:
        weight: (outputs, inputs), any real floating dtype.
        sparsity: fraction of units to remove; None for patterns that say it themselves.
        pattern: who competes with whom; the paper has `Unstructured` and `NM`.
        gram: ``XᵀX`` over tokens, (inputs, inputs).
        damping: fraction of the mean diagonal entry, in [0, 1].
        penalty: the first one.
        most_steps: of ADMM.
        iterations: of least squares at the end, at most.

    Returns:
        The new weight, in the weight's dtype, and its mask.

    Raises:
        ValueError: a shape does not fit, an entry is NaN or infinite, or the matrix is no Gram matrix.

    >>> from secateur.patterns import Unstructured
    >>> gram = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> alps(torch.tensor([[1.0, 3.0]]), 0.5, Unstructured(), gram=gram, damping=0.0)
    (tensor([[0.0000, 3.5000]]), tensor([[False,  True]]))
    """
    if not penalty > 0:
        raise ValueError(f"a penalty is positive; got {penalty}.")
    H, scale, target = scaled(weight, sparsity, pattern, gram, damping)
    if not target.numel():
        return untouched(weight)
    values, vectors = once_for(gram, ("eigenvalues", damping, H.dtype), lambda: _eigenvalues(H))
    first = mask = before = best_mask(target.abs(), sparsity, pattern)
    kept = max(int(mask.sum()), 1)
    split = target * mask
    spread = (vectors * (penalty / (values + penalty))) @ vectors.T
    has_grown = False
    for step in range(1, most_steps + 1):
        admm_step(split, mask.to(split.dtype), target, spread, 1.0)
        mask = best_mask(split.abs(), sparsity, pattern)
        if step % 3:
            continue
        changed = int((mask != before).sum())
        before = mask
        if (not changed and has_grown) or (step >= 30 and changed < 3e-4 * kept):
            break
        if has_grown or changed > 0.005 * kept:
            growth = 1.3 if changed > 0.1 * kept else 1.2 if changed > 0.005 * kept else 1.1
            has_grown = True
            split = torch.where(mask, split, split / growth)
            penalty = min(penalty * growth, 1e6)
        else:
            penalty /= 5
            mask = before = first
            split = target * mask
        spread = (vectors * (penalty / (values + penalty))) @ vectors.T
    new = conjugate_gradients(H, target, split * mask, mask, iterations, 0.0)
    return finished(new / scale, mask, weight), mask


def _eigenvalues(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    if bool(values[0] < -1e-3 * values[-1]):
        raise not_a_gram(matrix)
    return values.clamp_(min=0), vectors
