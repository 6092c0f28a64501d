"""SparseGPT (arXiv:2301.00774): column after column, and what comes after a removed weight makes up for it.

Law: what is kept is chosen by the cost that the paper says, exactly as many as pattern and sparsity say; columns are
swept in blocks, so that all but corners is products of matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.patterns import NM, Block, Pattern, Rows, Unstructured
from secateur.selection import keep_largest
from secateur.solvers.gram import BLOCK, DEAD, checked, factor, inverse_of_triangle, once_for
from secateur.solvers.least_squares import best_mask, check_pattern, finished, kept_of, spread_best, untouched
from secateur.support import MOST_IN_INT8, rounding_scales

LARGEST_TOURNAMENT = 32  # groups of n:m that are ranked pair by pair; the pairs of larger ones are too many
STEP = 16  # columns of a block that are brought up to date together
FEW = 4  # columns that are brought up to date one by one


def sparsegpt(
    weight: Tensor,
    sparsity: float | None,
    pattern: Pattern,
    *,
    gram: Tensor,
    damping: float = 0.01,
    values: str | None = None,
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

    With ``values="int8"`` what is kept of a column is rounded when the sweep reaches it, to 8 bits with a scale for
    each output, and later columns make up for that, too: pruning and GPTQ (Frantar et al. 2022, arXiv:2210.17323) in
    one sweep, as the paper's section on joint sparsification and quantization has it. Scales are those of
    `secateur.inference.to_int8` for the dense weight, as GPTQ fixes its own before it starts. What rounds to 0 is
    zero, too; the mask, which is the pattern's, calls it kept.

    The cost is one Cholesky factorization of the Gram matrix, shared by successive calls with the same tensor, and
    products of inputs² · outputs; nothing is inverted but triangles of 128 by 128.

    Args:
        weight: (outputs, inputs), any real floating dtype.
        sparsity: fraction of units to remove; None for patterns that say it themselves.
        pattern: who competes with whom.
        gram: ``XᵀX`` over tokens, (inputs, inputs).
        damping: fraction of the mean diagonal entry, in [0, 1].
        values: "int8" to round what is kept; None.

    Returns:
        The new weight, in the weight's dtype, and its mask. A weight in a half keeps what its dtype has of the rounded
        numbers.

    Raises:
        ValueError: values is another word, a shape does not fit, an entry is NaN or infinite, or the matrix is no Gram
            matrix.

    Warns:
        SolverWarning: the damping was raised.

    >>> gram = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> sparsegpt(torch.tensor([[1.0, 3.0]]), 0.5, Rows(), gram=gram, damping=0.0)
    (tensor([[0.0000, 3.5000]]), tensor([[False,  True]]))
    """
    if values not in (None, "int8"):
        raise ValueError(f"values is 'int8' or None, not {values!r}.")
    dense = checked(weight, gram)
    check_pattern(pattern, sparsity, dense.shape)
    if not dense.numel():
        return untouched(weight)
    scales = None if values is None else rounding_scales(dense).to(dense.dtype)
    new, kept = _swept(dense, gram, damping, _Choice(pattern, sparsity), None, scales)
    return finished(new, None, weight), kept


def round_kept(weight: Tensor, mask: Tensor, *, gram: Tensor, damping: float = 0.01) -> Tensor:
    """Kept weights rounded to int8, column after column, where those after it make up for what rounding changes: GPTQ
    (Frantar et al. 2022, arXiv:2210.17323) with a mask.

    A scale for each output, fixed before as `secateur.inference.to_int8` has it; columns in their order.

    Args:
        weight: (outputs, inputs), any real floating dtype; what the mask removes is 0.
        mask: bool, of the same shape, True = kept.
        gram: ``XᵀX`` over tokens, (inputs, inputs).
        damping: fraction of the mean diagonal entry, in [0, 1].

    Returns:
        Whole numbers within ±127 times the scales, in the weight's dtype; exactly 0 where the mask is False.

    Raises:
        ValueError: a shape does not fit, an entry is NaN or infinite, or the matrix is no Gram matrix.

    >>> gram = torch.tensor([[2.0, 1.9], [1.9, 2.0]])
    >>> weight = torch.tensor([[0.5, 127.0]])
    >>> round_kept(weight, torch.tensor([[True, True]]), gram=gram)
    tensor([[  0., 127.]])
    """
    dense = checked(weight, gram)
    if mask.shape != weight.shape or mask.dtype != torch.bool:
        raise ValueError(f"the mask is bool of shape {tuple(weight.shape)}, not {mask.dtype} of {tuple(mask.shape)}.")
    if not dense.numel():
        return weight.detach().clone()
    dense = torch.where(mask, dense, 0)
    new, _ = _swept(dense, gram, damping, None, mask, rounding_scales(dense).to(dense.dtype))
    return finished(new, mask, weight)


# ---- helpers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """How a mask is chosen on the way."""

    pattern: Pattern
    sparsity: float | None


def _swept(
    dense: Tensor, gram: Tensor, damping: float, choice: _Choice | None, mask: Tensor | None, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The weight after the sweep, and its mask: the one that is given, or as the choice says; in whole numbers times
    scales (outputs), if there are any."""
    R, dead = once_for(gram, ("factor", damping), lambda: factor(gram, damping))
    R = R.to(dense.dtype)
    root = R.diagonal()  # 1 / √[H⁻¹]_jj of the columns not yet seen; the score is (w root)²
    root = torch.where(dead, root * DEAD, root)[:, None]

    W = dense.T.clone(memory_format=torch.contiguous_format)  # (inputs, outputs): a column is contiguous
    inputs = W.shape[0]
    change = torch.zeros_like(W)  # W - W' of columns that the sweep has passed; of later ones, what they are owed
    kept = torch.empty(W.shape, dtype=torch.bool, device=W.device)
    group, width, kept_in_group = None, None, 0
    if mask is not None or choice is None:
        kept.copy_(torch.ones_like(kept) if mask is None else mask.T)
    else:
        pattern, sparsity = choice.pattern, choice.sparsity
        group = pattern.m if isinstance(pattern, NM) and pattern.axis % 2 else None
        width = _columns_at_once(pattern)
        kept_in_group = kept_of(pattern, sparsity, group or 0)
        if width is None:
            kept.copy_(best_mask((W * root).square_().T, sparsity, pattern).T)
    for start in range(0, inputs, width or BLOCK):
        block = slice(start, min(start + (width or BLOCK), inputs))
        U = inverse_of_triangle(R[block, block])
        # for the errors E of the sweep E R⁻¹ = W - W': so what earlier columns owe to these needs R alone
        now = torch.addmm(W[block], U.T, change[block])
        if width is not None and group is None and choice is not None:
            scores = torch.mul(now, root[block]).square_().T
            units = _kept_in_columns(choice.pattern, choice.sparsity, dense.shape, block)
            kept[block] = spread_best(scores, choice.pattern, units).T
        _sweep(now, kept[block], U, root[block], group, kept_in_group, scales)
        torch.sub(W[block], now, out=change[block])
        W[block] = now
        change[block.stop :].addmm_(R[block, block.stop :].T, change[block])
    return W.T, kept.T.contiguous()


def _sweep(
    now: Tensor,
    kept: Tensor,
    inverse: Tensor,
    root: Tensor,
    group: int | None,
    kept_in_group: int,
    scales: Tensor | None,
) -> None:
    """Columns of one block, in place: what is removed becomes 0, and later columns make up for it.

    Of what a column owes to later ones, those of its group (or of the next few columns) are paid at once, and the rest
    by products as the sweep reaches them.

    Args:
        now: (columns, outputs).
        kept: bool, of the same shape; where ``group`` is given it is chosen on the way, and written.
        inverse: (columns, columns), the inverse of the block's triangle.
        root: (columns, 1), times which a weight's magnitude is its score.
        group: m of n:m along the inputs, or None.
        kept_in_group: n.
        scales: (outputs), of what is kept of a column in whole numbers; or None.
    """
    ratios = inverse / inverse.diagonal()[:, None]
    errors = torch.empty_like(now)
    removed = torch.empty_like(now) if group else kept.logical_not().to(now.dtype)  # products with bool are slower
    choose = _tournament(group, kept_in_group, now) if group else None
    rows, errors_of, removed_of = now.unbind(), errors.unbind(), removed.unbind()
    columns, few = len(rows), group or FEW
    step = few * max(1, STEP // few)
    for start in range(0, columns, step):
        end = min(start + step, columns)
        if start:
            now[start:end].addmm_(ratios[:start, start:end].T, errors[:start], alpha=-1)
        for first in range(start, end, few):
            last = min(first + few, end)
            if first > start:
                now[first:last].addmm_(ratios[start:first, first:last].T, errors[start:first], alpha=-1)
            if choose is not None:
                choose(now[first:last], root[first:last], removed[first:last])
            for column in range(first, last):
                error = torch.mul(rows[column], removed_of[column], out=errors_of[column])
                if scales is not None:
                    stays = rows[column] - error
                    error += stays - _rounded(stays, scales)
                if column + 1 < last:
                    now[column + 1 : last].addcmul_(ratios[column, column + 1 : last, None], error, value=-1)
    now -= errors
    if scales is not None:  # as near as the sums were; now exactly
        now.copy_(_rounded(now, scales))
    if group:
        torch.eq(removed, 0, out=kept)


def _rounded(weights: Tensor, scales: Tensor) -> Tensor:
    return (weights / scales).round_().clamp_(-MOST_IN_INT8, MOST_IN_INT8).mul_(scales).add_(0.0)  # no -0.0


def _tournament(m: int, kept: int, like: Tensor) -> Callable[[Tensor, Tensor, Tensor], None]:
    """A function of weights (m, outputs) and the roots of their costs (m, 1) that writes 1 to what of each column is
    not among the ``kept`` largest, else 0; of equal ones the first are kept.

    Each two of a column play once, and the earlier wins a tie: who wins less than m - kept times is removed.
    """
    scores = torch.empty_like(like[:m])
    if m > LARGEST_TOURNAMENT:

        def rank(weights: Tensor, root: Tensor, removed: Tensor) -> None:
            torch.mul(weights, root, out=scores).abs_()
            removed.copy_(keep_largest(scores.T, kept).T.logical_not())

        return rank

    earlier = torch.cat([torch.arange(m - apart, device=like.device) for apart in range(m)])[m:]
    later = torch.cat([torch.arange(apart, m, device=like.device) for apart in range(m)])[m:]
    games = torch.empty(len(earlier), like.shape[1], dtype=like.dtype, device=like.device)  # 1 where the earlier wins
    won = torch.zeros(m, len(earlier), dtype=like.dtype, device=like.device)
    won.scatter_(0, earlier[None], 1).scatter_(0, later[None], -1)  # plus those that the later wins unless they do
    fewest = m - kept - torch.arange(m, dtype=like.dtype, device=like.device)[:, None]
    rounds, played = [], 0
    for apart in range(1, m):
        rounds.append(games[played : played + m - apart])
        played += m - apart

    def play(weights: Tensor, root: Tensor, removed: Tensor) -> None:
        torch.mul(weights, root, out=scores).abs_()
        for apart, results in enumerate(rounds, 1):  # those of all pairs so far apart
            torch.ge(scores[:-apart], scores[apart:], out=results)
        torch.lt(torch.mm(won, games, out=removed), fewest, out=removed)

    return play


def _columns_at_once(pattern: Pattern) -> int | None:
    """How many columns have their mask chosen at once; None: the pattern's groups do not lie in blocks of columns."""
    if type(pattern) in (Unstructured, Rows):
        return BLOCK
    if type(pattern) is NM:
        return pattern.m * max(1, BLOCK // pattern.m) if pattern.axis % 2 else BLOCK
    if type(pattern) is Block:
        return pattern.width * max(1, BLOCK // pattern.width)
    return None


def _kept_in_columns(pattern: Pattern, sparsity: float | None, shape: torch.Size, block: slice) -> int:
    """How many units of a group of these columns stay, so that all blocks together keep what the whole group does."""
    if isinstance(pattern, NM):
        return kept_of(pattern, sparsity, pattern.m)

    def until(column: int) -> int:
        units = pattern.pool(torch.empty(shape[0], column, device="meta")).shape[1] if column else 0
        return kept_of(pattern, sparsity, units)

    return until(block.stop) - until(block.start)
