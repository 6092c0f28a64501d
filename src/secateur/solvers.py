"""Solvers: prune one weight and repair what is left, ``(weight, sparsity, pattern, *, gram, …) -> (new_weight, mask)``.

Law: exactly as many units are kept as the pattern and the sparsity say; a new weight is of the old one's dtype and
exactly 0 where its mask is False; what is passed in is never written to. Sums are taken in float32 or wider.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from secateur.allocation import check_sparsity
from secateur.least_squares import checked, factor, once_for
from secateur.patterns import NM, Block, Pattern, Rows, Unstructured
from secateur.selection import keep_largest

__all__ = ["Solver", "best_mask", "finished", "from_criterion", "sparsegpt"]

BLOCK = 128  # columns whose mask is chosen at once
STEP = 16  # columns between two products inside a block
DEAD = 1e-12  # the factor of a dead input's scores: behind every live one's, and ranked by magnitude among themselves


class Solver(Protocol):
    """What a solver of one's own provides: a function. What it needs beside the weight it names without a default."""

    def __call__(
        self, weight: Tensor, sparsity: float | None, pattern: Pattern, /, **evidence: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(outputs, inputs) -> the new weight, and the mask, True = kept."""


def from_criterion(criterion: Callable[..., Tensor]) -> Solver:
    """The solver that keeps what scores best and changes no kept weight: magnitude, Wanda, RIA, or one's own.

    It names the evidence that the criterion names, so that `secateur.evidence.needs` and `oneshot` see it.

    Args:
        criterion: ``(weight, *, <evidence>) -> scores``, higher = keep.

    >>> from secateur.criteria import wanda
    >>> solve = from_criterion(wanda)
    >>> solve(torch.tensor([[3.0, -2.0]]), 0.5, Rows(), input_norm=torch.tensor([[1.0, 5.0]]))
    (tensor([[ 0., -2.]]), tensor([[False,  True]]))
    """

    def solve(weight: Tensor, sparsity: float | None, pattern: Pattern, /, **evidence: Tensor) -> tuple[Tensor, Tensor]:
        checked(weight)
        mask = best_mask(criterion(weight.detach(), **evidence), sparsity, pattern)
        return finished(weight.detach(), mask, weight), mask

    named: Any = solve
    own = [inspect.Parameter(word, inspect.Parameter.POSITIONAL_ONLY) for word in ("weight", "sparsity", "pattern")]
    asked = [p for p in _parameters(criterion) if p.kind is p.KEYWORD_ONLY]
    named.__signature__ = inspect.Signature([*own, *asked])
    named.__name__ = named.__qualname__ = f"from_criterion({getattr(criterion, '__name__', repr(criterion))})"
    return solve


def sparsegpt(
    weight: Tensor, sparsity: float | None, pattern: Pattern, *, gram: Tensor, damping: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Column after column: remove by ``w² / [H⁻¹]_jj``, and let the columns after it make up for the error: SparseGPT
    (Frantar & Alistarh 2023, arXiv:2301.00774).

    H is the Gram matrix with ``damping`` times its mean diagonal entry added, and the inverse is that of the columns
    not yet seen. As in the authors' code the mask of 128 columns is chosen at once, when the sweep reaches them, and
    n:m chooses each group when the sweep reaches it. Different from that code: counts are exact (it removes one more
    in each block, and all of equal scores); an input that is always 0 loses its weights first, but the weights of it
    that are kept stay as they are instead of becoming 0; damping that is not enough is raised, with a warning.

    Of a pattern whose groups do not lie in blocks of columns (channels, one's own), the whole mask is chosen before
    the sweep, by the same score.

    The cost is one Cholesky factorization of the Gram matrix, shared by successive calls with the same tensor, and
    products of inputs² · outputs; nothing is inverted but triangles of 128 by 128.

    Args:
        weight: (outputs, inputs), any real floating dtype.
        sparsity: fraction of units to remove; None for patterns that say it themselves.
        pattern: who competes with whom.
        gram: ``XᵀX`` over tokens, (inputs, inputs).
        damping: fraction of the mean diagonal entry, in [0, 1].

    Returns:
        The new weight, in the weight's dtype, and its mask.

    Raises:
        ValueError: a shape does not fit, an entry is NaN or infinite, or the matrix is no Gram matrix.

    Warns:
        SolverWarning: the damping was raised.

    >>> gram = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> sparsegpt(torch.tensor([[1.0, 3.0]]), 0.5, Rows(), gram=gram, damping=0.0)
    (tensor([[0.0000, 3.5000]]), tensor([[False,  True]]))
    """
    dense = checked(weight, gram)
    _kept_of(pattern, sparsity, 0)  # an error of the arguments comes before the work
    pattern.pool(torch.empty(dense.shape, device="meta"))
    if not dense.numel():
        return weight.detach().clone(), torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
    R, dead = once_for(gram, ("factor", damping), lambda: factor(gram, damping))
    R = R.to(dense.dtype)
    importance = R.diagonal().square()  # 1 / [H⁻¹]_jj of the columns not yet seen
    importance = torch.where(dead, importance * DEAD, importance)[:, None]

    W = dense.T.contiguous()  # (inputs, outputs): a column is contiguous
    inputs = W.shape[0]
    change = torch.empty_like(W)  # W - W', as far as the sweep has come
    removed = torch.empty(W.shape, dtype=torch.bool, device=W.device)
    groups = pattern.m if isinstance(pattern, NM) and pattern.axis % 2 else None
    width = _columns_at_once(pattern)
    if width is None:
        removed.copy_(best_mask((W.square() * importance).T, sparsity, pattern).T.logical_not())
    for start in range(0, inputs, width or BLOCK):
        block = slice(start, min(start + (width or BLOCK), inputs))
        corner = R[block, block]
        U = torch.linalg.solve_triangular(corner, torch.eye(*corner.shape, out=torch.empty_like(corner)), upper=True)
        now = W[block].clone()
        if start:
            # for the errors E of the sweep E R⁻¹ = W - W': so what earlier columns owe to these needs R alone
            now.addmm_(U.T, R[:start, block].T @ change[:start])
        if width is not None and groups is None:
            scores = (now.square() * importance[block]).T
            kept = _kept_in_columns(pattern, sparsity, dense.shape, block)
            removed[block] = _spread_best(scores, pattern, kept).T.logical_not()
        _sweep(
            now, removed[block], U, importance[block], groups, kept_in_group=_kept_of(pattern, sparsity, groups or 0)
        )
        torch.sub(W[block], now, out=change[block])
    W -= change
    mask = removed.T.logical_not().contiguous()
    return finished(W.T, mask, weight), mask


def best_mask(scores: Tensor, sparsity: float | None, pattern: Pattern) -> Tensor:
    """The mask that keeps the best units of each group: as many as the pattern or the sparsity says, exactly.

    >>> best_mask(torch.tensor([[1.0, 3.0, 2.0, 4.0]]), None, NM(2, 4))
    tensor([[False,  True, False,  True]])
    """
    units = pattern.pool(torch.empty(scores.shape, device="meta")).shape[1]
    return _spread_best(scores, pattern, _kept_of(pattern, sparsity, units))


def finished(values: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    """The values where the mask is True and +0 elsewhere, in the dtype and memory order of the weight.

    Raises:
        ValueError: a value is beyond what the weight's dtype holds.

    >>> finished(torch.tensor([[1.5, -2.0]]), torch.tensor([[True, False]]), torch.zeros(1, 2))
    tensor([[1.5000, 0.0000]])
    """
    new = torch.empty_like(weight).copy_(values).masked_fill_(~mask, 0)
    if new.numel() and not bool(new.abs().amax() < torch.inf):
        raise ValueError(
            f"the repaired weight of shape {tuple(weight.shape)} does not fit {weight.dtype}; use more damping, or a "
            "wider dtype."
        )
    return new


# ---- helpers -------------------------------------------------------------------------------------------------------


def _sweep(now: Tensor, removed: Tensor, inverse: Tensor, importance: Tensor, groups: int | None, kept_in_group: int) -> None:
    """Columns of one block, in place: what is removed becomes 0, and later columns make up for it.

    Args:
        now: (columns, outputs).
        removed: of the same shape; where ``groups`` is given it is chosen on the way, and written.
        inverse: (columns, columns), the inverse of the block's triangle.
        importance: (columns, 1).
        groups: m of n:m along the inputs, or None.
        kept_in_group: n.
    """
    ratios = inverse / inverse.diagonal()[:, None]
    errors = torch.empty_like(now)
    columns = now.shape[0]
    step = STEP if groups is None else groups * max(1, STEP // groups)
    for start in range(0, columns, step):
        end = min(start + step, columns)
        if start:
            now[start:end].addmm_(ratios[:start, start:end].T, errors[:start], alpha=-1)
        for column in range(start, end):
            if groups is not None and column % groups == 0:
                group = slice(column, column + groups)
                removed[group] = _best_along_first(now[group].square() * importance[group], kept_in_group).logical_not()
            error = torch.mul(now[column], removed[column], out=errors[column])
            now[column] -= error
            if column + 1 < end:
                now[column + 1 : end].addr_(ratios[column, column + 1 : end], error, alpha=-1)


def _best_along_first(scores: Tensor, kept: int) -> Tensor:
    """True for the ``kept`` largest of each column of (m, outputs), of equal ones the first."""
    m = scores.shape[0]
    if m > 8:
        return keep_largest(scores.T, kept).T
    ahead = (scores[None] > scores[:, None]).sum(1, dtype=torch.uint8)  # how many are larger
    for later in range(1, m):
        ahead[later] += (scores[:later] == scores[later]).sum(0, dtype=torch.uint8)
    return ahead < kept


def _columns_at_once(pattern: Pattern) -> int | None:
    """How many columns have their mask chosen at once; None: the pattern's groups do not lie in blocks of columns."""
    if type(pattern) in (Unstructured, Rows):
        return BLOCK
    if type(pattern) is NM:
        return pattern.m * max(1, BLOCK // pattern.m) if pattern.axis % 2 else BLOCK
    if type(pattern) is Block:
        return pattern.width * max(1, BLOCK // pattern.width)
    return None


def _kept_of(pattern: Pattern, sparsity: float | None, units: int) -> int:
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


def _kept_in_columns(pattern: Pattern, sparsity: float | None, shape: torch.Size, block: slice) -> int:
    """How many units of a group of these columns stay, so that all blocks together keep what the whole group does."""
    if isinstance(pattern, NM):
        return _kept_of(pattern, sparsity, pattern.m)

    def until(column: int) -> int:
        units = pattern.pool(torch.empty(shape[0], column, device="meta")).shape[1] if column else 0
        return _kept_of(pattern, sparsity, units)

    return until(block.stop) - until(block.start)


def _spread_best(scores: Tensor, pattern: Pattern, kept: int) -> Tensor:
    mask: Any = pattern.spread(keep_largest(pattern.pool(scores), kept), scores.shape)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != scores.shape:
        what = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{pattern}.spread returned {what}, not a bool mask of shape {tuple(scores.shape)}.")
    return mask


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # built-in functions such as torch.abs show no signature
        return []
