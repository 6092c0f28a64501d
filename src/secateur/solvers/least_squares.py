"""What solvers share when they search: the protocol, and the mask that keeps the best. A layer's output error as a
quadratic form of its Gram matrix, and the weights that make it least for a mask.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from secateur.allocation import check_sparsity
from secateur.patterns import Pattern
from secateur.selection import keep_largest
from secateur.solvers.gram import checked, correlation, is_finite, once_for, over_scale

# ---- What solvers share when they search: the protocol, and the mask that keeps the best.
#
# Law: exactly as many units are kept as the pattern and the sparsity say.


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


# ---- A layer's output error as a quadratic form of its Gram matrix, and the weights that make it least for a mask.
#
# Law: each iteration lowers the error of each row or leaves it; what the mask removes is exactly +0.


def output_error(weight: Tensor, new_weight: Tensor, gram: Tensor) -> Tensor:
    """``tr(Δ G Δᵀ) / tr(W G Wᵀ)`` with Δ = W - W': the relative squared error of the outputs; a scalar tensor.

    0 where the outputs agree. Where the dense outputs are all 0, it is 0 if the new ones are too, else infinite.

    Args:
        weight: (outputs, inputs).
        new_weight: of the same shape.
        gram: ``XᵀX``, (inputs, inputs).

    >>> output_error(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0]]), torch.eye(2))
    tensor(0.5000)
    """
    old = checked(weight, gram)
    change = old - checked(new_weight)
    wide = over_scale(gram, old.dtype)
    return (change @ wide).mul_(change).sum().clamp_(min=0) / (old @ wide).mul_(old).sum().clamp_(min=0)


def refit(
    weight: Tensor,
    mask: Tensor,
    *,
    gram: Tensor,
    start: Tensor | None = None,
    iterations: int = 20,
    tolerance: float = 1e-3,
) -> Tensor:
    """``argmin tr((W - W') G (W - W')ᵀ)`` over the W' that are 0 outside the mask: least squares for any mask.

    Conjugate gradients on the kept weights, all rows at once, with the diagonal as preconditioner (as ALPS does,
    Meng et al. 2024, arXiv:2406.07831): one product with the Gram matrix an iteration. Each iteration lowers the error
    of each row or leaves it, and no matrix is factored or inverted, so that a singular Gram matrix is no trouble:
    directions that no token has are left as they start. What an input that is always 0 carries stays as it is.

    Args:
        weight: the dense weight, (outputs, inputs), any real floating dtype; the outputs to come near to.
        mask: bool, of the same shape, True = kept.
        gram: ``XᵀX``, (inputs, inputs).
        start: where to begin, such as what SparseGPT left; by default the dense weight under the mask.
        iterations: at most this many.
        tolerance: end when an iteration lowers the error by less than this fraction of what is left.

    Returns:
        The new weight, in the dense one's dtype, exactly 0 where the mask is False.

    Raises:
        TypeError: the mask is not bool.
        ValueError: a shape does not fit, or an entry is NaN or infinite.

    >>> gram = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> refit(torch.tensor([[1.0, 3.0]]), torch.tensor([[False, True]]), gram=gram)
    tensor([[0.0000, 3.5000]])
    """
    dense = checked(weight, gram)
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask is bool, True = kept; this one is {mask.dtype}.")
    if mask.shape != weight.shape:
        raise ValueError(f"the mask has shape {tuple(mask.shape)}, and the weight {tuple(weight.shape)}.")
    if start is not None and start.shape != weight.shape:
        raise ValueError(f"the start has shape {tuple(start.shape)}, and the weight {tuple(weight.shape)}.")
    if iterations < 0:
        raise ValueError(f"iterations is how many steps to take at most, 0 or more; got {iterations}.")
    if not dense.numel():
        return weight.detach().clone()
    H = over_scale(gram, dense.dtype)
    scale = H.diagonal().sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    H /= scale
    H /= scale[:, None]
    begin = dense if start is None else checked(start).to(dense.dtype)
    new = conjugate_gradients(H, dense * scale, begin * mask * scale, mask, iterations, tolerance)
    return finished(new / scale, mask, weight)


def conjugate_gradients(
    matrix: Tensor, target: Tensor, start: Tensor, mask: Tensor, iterations: int, tolerance: float
) -> Tensor:
    """``argmin tr((X - target) M (X - target)ᵀ)`` over X that are 0 outside the mask, row by row, all rows at once.

    Args:
        matrix: M, symmetric, with ones on the diagonal, so that the diagonal needs no division.
        target: (rows, n).
        start: (rows, n), 0 outside the mask.
        mask: bool, (rows, n).
        iterations: at most this many.
        tolerance: end when an iteration lowers the sum of the rows' errors by less than this fraction of it.
    """
    kept = mask.to(matrix.dtype)
    X = start.clone()
    missing = target - X
    residual = missing @ matrix
    error = (residual * missing).sum()
    residual *= kept
    direction = residual.clone()
    square = torch.linalg.vector_norm(residual, dim=1, keepdim=True).square_()
    tiny = torch.finfo(matrix.dtype).tiny
    for _ in range(iterations):
        product = direction @ matrix
        curvature = (product * direction).sum(1, keepdim=True)
        length = torch.where(curvature > 0, square / curvature.clamp(min=tiny), 0.0)
        X.addcmul_(direction, length)
        residual.addcmul_(product.mul_(kept), length, value=-1)
        lowered = (length * square).sum()
        error -= lowered
        if bool(lowered <= tolerance * error):
            break
        before, square = square, torch.linalg.vector_norm(residual, dim=1, keepdim=True).square_()
        direction.mul_(square / before.clamp(min=tiny)).add_(residual)
    return X


def finished(values: Tensor, mask: Tensor | None, weight: Tensor) -> Tensor:
    """The values where the mask is True and +0 elsewhere, in the dtype and memory order of the weight.

    Args:
        values: of the weight's shape.
        mask: bool, of the same shape; None where what is removed is +0 already.
        weight: the dense weight.

    Raises:
        ValueError: a value is beyond what the weight's dtype holds.

    >>> finished(torch.tensor([[1.5, -2.0]]), torch.tensor([[True, False]]), torch.zeros(1, 2))
    tensor([[1.5000, 0.0000]])
    """
    new = torch.empty_like(weight, requires_grad=False).copy_(values)
    if mask is not None:
        new.masked_fill_(~mask, 0)
    if new.numel() and not is_finite(new):
        raise ValueError(
            f"the repaired weight of shape {tuple(weight.shape)} does not fit {weight.dtype}; use more damping, or a "
            "wider dtype."
        )
    return new
