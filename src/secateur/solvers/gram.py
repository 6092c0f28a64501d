"""The Gram matrix of a layer's inputs: checks at the door, damping, its factors, and what layers with one input share.

Law: a Gram matrix is never replaced by another silently. What is not finite or not a Gram matrix is an error, and
damping beyond the request gives a `SolverWarning`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from secateur.support import private, warn

_Result = TypeVar("_Result")
BLOCK = 128  # columns of a block: its triangle is factored and inverted, everything else is products
PANEL = 2 * BLOCK  # columns that are brought up to date together before they are factored
DEAD = 1e-6  # the scale of a dead input, beside those of live ones: its weights rank behind all others
MOST_DAMPING = 1.0  # of the mean diagonal entry; a true Gram matrix in float32 never needs as much


class SolverWarning(UserWarning):
    """A solver succeeded, but had to deviate from the request, such as by more damping."""


def checked(weight: Tensor, gram: Tensor | None = None) -> Tensor:
    """The weight as float32 or wider and contiguous, after the checks that every solver makes at the door.

    Args:
        weight: (outputs, inputs), a real floating dtype, finite.
        gram: ``XᵀX``, (inputs, inputs), on the weight's device, finite, with no negative diagonal entry.

    Raises:
        TypeError: a dtype is not a floating one.
        ValueError: a shape, a device or an entry is wrong; the message says which.

    >>> checked(torch.ones(1, 2, dtype=torch.bfloat16), torch.eye(2)).dtype
    torch.float32
    """
    if not weight.dtype.is_floating_point:
        raise TypeError(f"a solver changes weights of floating dtypes; this one is {weight.dtype}.")
    if weight.dim() != 2:
        raise ValueError(
            f"a solver takes a weight of shape (outputs, inputs), not {tuple(weight.shape)}; flatten a convolution's "
            "to (outputs, inputs * kernel), and hand over the experts of a fused weight one by one."
        )
    if weight.is_meta or (gram is not None and gram.is_meta):
        raise ValueError("a solver needs values, and a tensor on the meta device has none; load the weight first.")
    if weight.numel() and not is_finite(weight):
        raise ValueError(f"the weight of shape {tuple(weight.shape)} has entries that are NaN or infinite.")
    if gram is not None:
        _check_gram(weight, gram)
    return _laid_out(weight, torch.promote_types(weight.dtype, torch.float32))


def _laid_out(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In one order of memory, whatever strides it came with: a BLAS sums in another order for other strides."""
    return tensor.detach().to(dtype).contiguous()


def over_scale(gram: Tensor, dtype: torch.dtype) -> Tensor:
    """A new tensor of ``gram / scale_of(gram)``; divided first, as one of float64 may be too large for the dtype."""
    wide = _laid_out(gram, torch.promote_types(gram.dtype, dtype))
    return (wide / scale_of(wide)).to(dtype)


def scale_of(gram: Tensor) -> Tensor:
    """The mean of the Gram matrix' diagonal, to which damping is relative: a scalar tensor; 1 where all inputs were 0.

    >>> scale_of(torch.diag(torch.tensor([1.0, 3.0])))
    tensor(2.)
    """
    diagonal = gram.diagonal()
    # the largest first, since a sum of float32 may overflow where each entry does not
    largest = diagonal.amax() if diagonal.numel() else diagonal.new_zeros(())
    largest = torch.where(largest > 0, largest, 1.0)
    mean = (diagonal / largest).mean() * largest if diagonal.numel() else largest
    return torch.where(mean > 0, mean, 1.0)


def factor(gram: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Upper triangular R with ``R Rᵀ = G / s + damping · I``, where s is the mean diagonal entry; and the dead inputs.

    The inverse of R is the factor of the inverse that SparseGPT (arXiv:2301.00774) works with: ``R⁻ᵀ R⁻¹`` is the
    inverse of the damped matrix. So one factorization, from the last column to the first, replaces two and an
    inversion. The row and column of an input that never was other than 0 (a dead one) are those of the
    identity matrix.

    Returns:
        R of shape (inputs, inputs), float32 or wider, and a bool tensor (inputs,), True where dead.

    Raises:
        ValueError: no damping up to the mean of the diagonal makes the matrix positive definite.

    Warns:
        SolverWarning: more damping was needed than was asked for.

    >>> R, dead = factor(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), 0.0)
    >>> R @ R.T
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]])
    """
    _check_damping(damping)
    wide = _laid_out(gram, torch.promote_types(gram.dtype, torch.float32))
    diagonal = wide.diagonal() / scale_of(wide)
    dead = diagonal == 0
    asked = damping
    while (R := _upper_factor(wide, torch.where(dead, 1.0, diagonal + damping))) is None:
        damping = max(damping * 10, 1e-4)
        if damping > MOST_DAMPING:
            raise not_a_gram(gram)
    if damping != asked:
        warn(
            f"damping of the Gram matrix of shape {tuple(gram.shape)} was raised from {asked:g} to {damping:g} of its "
            "mean diagonal entry, since the matrix is singular to rounding.",
            SolverWarning,
        )
    return R, dead


def _upper_factor(gram: Tensor, diagonal: Tensor) -> Tensor | None:
    """R of `factor`, for the Gram matrix over its scale with that diagonal; None where it is not positive definite.

    Panels of columns from the last to the first, so that all but the corners is products of matrices: 2 to 3 times as
    fast as LAPACK's factorization of the matrix turned round, and nothing of the matrix's size but the result is held.
    """
    n = gram.shape[0]
    scale = scale_of(gram)
    R = torch.zeros_like(gram)
    for right in range(n, 0, -PANEL):
        left = max(0, right - PANEL)
        panel = gram[:right, left:right] / scale
        panel[left:].diagonal().copy_(diagonal[left:right])
        if right < n:
            panel.addmm_(R[:right, right:], R[left:right, right:].T, alpha=-1)
        for end in range(right, left, -BLOCK):
            start = max(left, end - BLOCK)
            part = panel[:end, start - left : end - left]
            if end < right:
                part.addmm_(R[:end, end:right], R[start:end, end:right].T, alpha=-1)
            lower, failed = torch.linalg.cholesky_ex(part[start:].flip(0, 1))
            if bool(failed):
                return None
            corner = lower.flip(0, 1)
            R[start:end, start:end] = corner
            if start:
                R[:start, start:end] = part[:start] @ inverse_of_triangle(corner).T
    return R


def cholesky_in_place(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.cholesky_ex` in the memory of a matrix that nobody needs any more: half of what it takes otherwise.

    >>> matrix = torch.tensor([[4.0, 2.0], [2.0, 2.0]])
    >>> cholesky_in_place(matrix)[0], matrix
    (tensor([[2., 0.],
            [1., 1.]]), tensor([[2., 1.],
            [0., 1.]]))
    """
    lower = symmetric.mT  # in the order of LAPACK, which would have it copied else
    failed = torch.empty((), dtype=torch.int32, device=symmetric.device)
    torch.linalg.cholesky_ex(lower, out=(lower, failed))
    return lower, failed


def inverse_of_triangle(upper: Tensor) -> Tensor:
    """The inverse of a small upper triangular matrix.

    >>> inverse_of_triangle(torch.tensor([[2.0, 1.0], [0.0, 1.0]]))
    tensor([[ 0.5000, -0.5000],
            [ 0.0000,  1.0000]])
    """
    identity = torch.eye(upper.shape[0], dtype=upper.dtype, device=upper.device)
    inverse: Tensor = torch.linalg.solve_triangular(upper, identity, upper=True)
    return inverse


def correlation(gram: Tensor, damping: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """``S⁻¹ (G / s + damping · I) S⁻¹`` with ones on its diagonal, and the scales S of the inputs; s as in `factor`.

    A dead input is uncorrelated with all others, and its scale is `DEAD` times the least that damping leaves to a live
    one, so that its weights count for nothing, and rank among themselves by magnitude.

    >>> H, scale = correlation(torch.tensor([[4.0, 1.0], [1.0, 4.0]]), 0.0)
    >>> H, scale
    (tensor([[1.0000, 0.2500],
            [0.2500, 1.0000]]), tensor([1., 1.]))
    """
    _check_damping(damping)
    H = over_scale(gram, dtype)
    dead = H.diagonal() == 0
    H.diagonal().add_(damping)
    scale = torch.where(dead, 1.0, H.diagonal()).sqrt()
    H /= scale
    H /= scale[:, None]
    H.masked_fill_(dead[:, None] | dead, 0)
    H.fill_diagonal_(1)
    return H, torch.where(dead, DEAD * scale.amin(), scale)


def not_a_gram(matrix: Tensor) -> ValueError:
    """The error for a matrix that no damping makes positive definite."""
    return ValueError(
        f"the Gram matrix of shape {tuple(matrix.shape)} is not positive semidefinite: however much is added to its "
        "diagonal, it has no Cholesky factor. It has to be X'X, symmetric, summed in float32 or wider."
    )


_shared: tuple[weakref.ref[Tensor], int, dict[Hashable, Any]] | None = None


def once_for(gram: Tensor, what: Hashable, compute: Callable[[], _Result]) -> _Result:
    """``compute()``, or what it gave for this very tensor before: layers that share an input share its factorization.

    Recognised is the live tensor object, unchanged since (by its version counter), never its address, which another
    tensor may take over. Only the last such tensor is remembered, and only while it lives. A tensor made in inference
    mode counts no versions, so nothing is remembered of it.
    """
    global _shared
    if gram.is_inference():
        return compute()
    known = _shared
    if known is None or known[0]() is not gram or known[1] != private.version_of(gram):
        known = (weakref.ref(gram, _forget), private.version_of(gram), {})
        _shared = known
    results = known[2]
    if what not in results:
        results[what] = compute()
    found: _Result = results[what]
    return found


def _forget(dead: weakref.ref[Tensor]) -> None:
    global _shared
    if _shared is not None and _shared[0] is dead:
        _shared = None


def _check_damping(damping: float) -> None:
    if not 0 <= damping <= MOST_DAMPING:
        raise ValueError(f"damping is a fraction of the mean diagonal entry, in [0, {MOST_DAMPING:g}]; got {damping}.")


def _check_gram(weight: Tensor, gram: Tensor) -> None:
    inputs = weight.shape[1]
    if not gram.dtype.is_floating_point:
        raise TypeError(f"a Gram matrix is of a floating dtype, summed in float32 or wider; this one is {gram.dtype}.")
    if gram.shape != (inputs, inputs):
        raise ValueError(
            f"the Gram matrix has shape {tuple(gram.shape)}; a weight of shape {tuple(weight.shape)} needs "
            f"({inputs}, {inputs}): X'X of its inputs."
        )
    if gram.device != weight.device:
        raise ValueError(f"the weight is on {weight.device} and the Gram matrix on {gram.device}; move one of them.")
    if not inputs:
        return
    if not is_finite(gram):
        raise ValueError(f"the Gram matrix of shape {tuple(gram.shape)} has entries that are NaN or infinite.")
    if bool((gram.diagonal() < 0).any()):
        raise ValueError(
            f"the Gram matrix of shape {tuple(gram.shape)} has a negative diagonal entry; it has to be X'X."
        )


def is_finite(tensor: Tensor) -> bool:
    smallest, largest = torch.aminmax(tensor.detach())  # one pass, no temporary; NaN goes through both
    return bool((smallest > -torch.inf) & (largest < torch.inf))
