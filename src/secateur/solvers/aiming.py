"""The target weight of a layer whose inputs are no longer those of the dense model.

Law: without a residual the target is the weight itself; the result is in float32 or wider, and no argument changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secateur.solvers.gram import checked, cholesky_in_place, not_a_gram, once_for, over_scale, scale_of

__all__ = ["aimed"]


def aimed(weight: Tensor, lacking: Tensor, *, gram: Tensor, aim: float = 1.0, damping: float = 0.01) -> Tensor:
    """The target weight ``W + a Z (X'ᵀX' + λ)⁻¹`` for the pruned model's inputs X': by least squares its outputs are a
    of the way from ``X' Wᵀ`` to the wanted outputs T; Z is ``(T - X' Wᵀ)ᵀ X'``.

    A solver that is given this weight, and the Gram matrix of X', prunes towards those outputs: as GPTAQ does for
    quantization (arXiv:2504.02692), where T are the dense layer's outputs ``X Wᵀ``.

    Args:
        weight: (outputs, inputs), any real floating dtype.
        lacking: Z, of the same shape.
        gram: ``X'ᵀX'``, (inputs, inputs). Weights that share it share its factorization.
        aim: a; 0 leaves the weight as it is.
        damping: λ as a fraction of the mean diagonal entry, in [0, 1]; at 0 the matrix must be positive definite.

    Raises:
        ValueError: a shape does not fit, an entry is NaN or infinite, or the matrix is no Gram matrix.

    >>> gram = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    >>> aimed(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 0.0]]), gram=gram, aim=0.5, damping=0.0)
    tensor([[1.5000, 1.0000]])
    """
    dense = checked(weight, gram)
    if lacking.shape != weight.shape:
        raise ValueError(f"lacking must have the weight's shape {tuple(weight.shape)}, not {tuple(lacking.shape)}.")
    if not aim or not dense.numel():
        return dense.clone()
    wide = torch.promote_types(dense.dtype, gram.dtype)
    lower = once_for(gram, ("damped", damping, wide), lambda: _damped_factor(gram, damping, wide))
    more = lacking.to(torch.promote_types(wide, lacking.dtype)) / scale_of(gram)
    moved: Tensor = torch.cholesky_solve(more.to(wide).T, lower).T
    target: Tensor = dense.add(moved.to(dense.dtype), alpha=aim)
    return target


def _damped_factor(gram: Tensor, damping: float, dtype: torch.dtype) -> Tensor:
    """The Cholesky factor of the Gram matrix over its scale, damped; more where rounding leaves it none."""
    while damping <= 1:
        moved = over_scale(gram, dtype)
        moved.diagonal().add_(damping)
        lower, failed = cholesky_in_place(moved)
        if not bool(failed):
            return lower
        damping = max(damping * 10, 1e-4)
    raise not_a_gram(gram)
