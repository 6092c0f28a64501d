"""A layer's output error as a quadratic form of its Gram matrix: checks at the door, damping, what layers share.

Law: a Gram matrix is never replaced by another silently. What is not finite or not a Gram matrix is an error, and
damping beyond what was asked for is told as a `SolverWarning`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["SolverWarning", "checked", "factor", "once_for", "output_error", "scale_of"]

_Result = TypeVar("_Result")

MOST_DAMPING = 1.0  # of the mean diagonal entry; a true Gram matrix in float32 never needs as much


class SolverWarning(UserWarning):
    """A solver did what was asked, but in a way that belongs in a report: such as more damping than was asked for."""


def checked(weight: Tensor, gram: Tensor | None = None) -> Tensor:
    """The weight as float32 or wider, after the checks that every solver makes at the door.

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
    if weight.numel() and not _is_finite(weight):
        raise ValueError(f"the weight of shape {tuple(weight.shape)} has entries that are NaN or infinite.")
    if gram is not None:
        _check_gram(weight, gram)
    wide = weight.detach()
    return wide if wide.dtype in (torch.float32, torch.float64) else wide.float()


def scale_of(gram: Tensor) -> Tensor:
    """The mean of the diagonal, which damping is relative to: a scalar tensor; 1 where no input ever was other than 0.

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
    inverse of the damped matrix. So one Cholesky factorization, of the matrix with its order turned round, replaces
    two and an inversion. The row and column of an input that never was other than 0 (a dead one) are those of the
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
    if not 0 <= damping <= MOST_DAMPING:
        raise ValueError(f"damping is a fraction of the mean diagonal entry, in [0, {MOST_DAMPING:g}]; got {damping}.")
    wide = gram.detach() if gram.dtype in (torch.float32, torch.float64) else gram.detach().float()
    dead = wide.diagonal() == 0
    turned = wide.flip(0, 1).div_(scale_of(wide))
    turned_dead = dead.flip(0)
    turned.masked_fill_(turned_dead[:, None] | turned_dead, 0)
    diagonal = turned.diagonal().clone()
    asked = damping
    while True:
        turned.diagonal().copy_(torch.where(turned_dead, 1.0, diagonal + damping))
        lower, failed = torch.linalg.cholesky_ex(turned)
        if not bool(failed):
            break
        damping = max(damping * 10, 1e-4)
        if damping > MOST_DAMPING:
            raise ValueError(
                f"the Gram matrix of shape {tuple(gram.shape)} is not positive semidefinite: even with the mean of its "
                "diagonal added to the diagonal it has no Cholesky factor. It has to be X'X, symmetric, summed in "
                "float32 or wider."
            )
    if damping != asked:
        warnings.warn(
            f"damping of the Gram matrix of shape {tuple(gram.shape)} was raised from {asked:g} to {damping:g} of its "
            "mean diagonal entry, since the matrix is singular to rounding.",
            SolverWarning,
            stacklevel=3,
        )
    return lower.flip(0, 1), dead


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
    wide = gram.to(old.dtype) / scale_of(gram).to(old.dtype)
    return (change @ wide).mul_(change).sum().clamp_(min=0) / (old @ wide).mul_(old).sum().clamp_(min=0)


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
    if known is None or known[0]() is not gram or known[1] != gram._version:
        known = (weakref.ref(gram, _forget), gram._version, {})
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
    if not _is_finite(gram):
        raise ValueError(f"the Gram matrix of shape {tuple(gram.shape)} has entries that are NaN or infinite.")
    if bool((gram.diagonal() < 0).any()):
        raise ValueError(
            f"the Gram matrix of shape {tuple(gram.shape)} has a negative diagonal entry; it has to be X'X."
        )


def _is_finite(tensor: Tensor) -> bool:
    smallest, largest = torch.aminmax(tensor.detach())  # one pass, no temporary; NaN goes through both
    return bool((smallest > -torch.inf) & (largest < torch.inf))
