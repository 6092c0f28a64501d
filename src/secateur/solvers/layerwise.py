"""Solvers: prune one weight and repair what is left, ``(weight, sparsity, pattern, *, gram, …) -> (new_weight, mask)``.

Law: exactly as many units are kept as the pattern and the sparsity say; a new weight is of the old one's dtype and
exactly 0 where its mask is False; what is passed in is never written to, and its strides do not matter. Sums are taken
in float32 or wider.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from secateur.allocation import check_sparsity
from secateur.criteria import Scope, compares, scope_of
from secateur.patterns import NM, Block, Pattern, Rows, Unstructured
from secateur.selection import keep_largest
from secateur.solvers.least_squares import BLOCK, DEAD, checked, factor, finished, inverse_of_triangle, once_for, refit

__all__ = ["Solver", "best_mask", "check_pattern", "dsnot", "from_criterion", "sparsegpt", "with_refit"]

LARGEST_TOURNAMENT = 32  # groups of n:m that are ranked pair by pair; the pairs of larger ones are too many
STEP = 16  # columns of a block that are brought up to date together
FEW = 4  # columns that are brought up to date one by one


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
        laid_out = {word: value.contiguous() for word, value in evidence.items()}
        mask = best_mask(criterion(weight.detach().contiguous(), **laid_out), sparsity, pattern)
        return finished(weight.detach(), mask, weight), mask

    asked = [p for p in _parameters(criterion) if p.kind is p.KEYWORD_ONLY]
    return _named(solve, f"from_criterion({_name(criterion)})", asked, scope_of(criterion, "layer"))


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
    check_pattern(pattern, sparsity, dense.shape)
    if not dense.numel():
        return weight.detach().clone(), torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
    R, dead = once_for(gram, ("factor", damping), lambda: factor(gram, damping))
    R = R.to(dense.dtype)
    root = R.diagonal()  # 1 / √[H⁻¹]_jj of the columns not yet seen; the score is (w root)²
    root = torch.where(dead, root * DEAD, root)[:, None]

    W = dense.T.clone(memory_format=torch.contiguous_format)  # (inputs, outputs): a column is contiguous
    inputs = W.shape[0]
    change = torch.zeros_like(W)  # W - W' of columns that the sweep has passed; of later ones, what they are owed
    kept = torch.empty(W.shape, dtype=torch.bool, device=W.device)
    group = pattern.m if isinstance(pattern, NM) and pattern.axis % 2 else None
    width = _columns_at_once(pattern)
    if width is None:
        kept.copy_(best_mask((W * root).square_().T, sparsity, pattern).T)
    for start in range(0, inputs, width or BLOCK):
        block = slice(start, min(start + (width or BLOCK), inputs))
        U = inverse_of_triangle(R[block, block])
        # for the errors E of the sweep E R⁻¹ = W - W': so what earlier columns owe to these needs R alone
        now = torch.addmm(W[block], U.T, change[block])
        if width is not None and group is None:
            scores = torch.mul(now, root[block]).square_().T
            kept[block] = _spread_best(scores, pattern, _kept_in_columns(pattern, sparsity, dense.shape, block)).T
        _sweep(now, kept[block], U, root[block], group, _kept_of(pattern, sparsity, group or 0))
        torch.sub(W[block], now, out=change[block])
        W[block] = now
        change[block.stop :].addmm_(R[block, block.stop :].T, change[block])
    return finished(W.T, None, weight), kept.T.contiguous()


@compares("row")
def dsnot(
    weight: Tensor,
    sparsity: float | None,
    pattern: Pattern,
    *,
    input_norm: Tensor,
    input_mean: Tensor,
    input_var: Tensor,
    cycles: int = 50,
    threshold: float = 5e-5,
    power: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Wanda's mask, where weights change places until the mean output is the dense one's: DSnoT (Zhang et al. 2023,
    arXiv:2310.08915). Kept weights do not change.

    What a row has lost is ``e = Σ w_j E[x_j]`` over its removed weights. In each cycle the removed weight with the
    largest ``w_j E[x_j] / Var[x_j]^power`` of the sign of e comes back, and in its stead the kept weight goes that
    has the smallest Wanda score among those whose going moves e towards 0 (of n:m: the smallest of the same group).
    A weight changes places once. A row is done when ``|e|`` is at most the threshold, nothing of the right sign is
    left, or the next change would not lower ``|e|`` (the authors' code goes on, past 0 and back).

    Args:
        weight: (outputs, inputs), any real floating dtype.
        sparsity: fraction of units to remove; None for n:m.
        pattern: `Rows` (the paper's), `Unstructured`, or `NM` along the inputs: changes stay within a row.
        input_norm: (1, inputs), the L2 norm of each input over all tokens.
        input_mean: (1, inputs), its mean.
        input_var: (1, inputs), its variance.
        cycles: at most this many changes in a row.
        threshold: of the change of the mean output; the authors' 0.1 is of sums over 2048 tokens.
        power: of the variance; 0 leaves it out.

    Returns:
        The weight with what is removed set to 0, and its mask.

    Raises:
        ValueError: the pattern is another one, or a shape does not fit.

    >>> norms, one = torch.tensor([[1.0, 3.0, 9.0]]), torch.ones(1, 3)
    >>> dsnot(torch.tensor([[2.0, -1.0, -4.0]]), 0.3, Rows(), input_norm=norms, input_mean=one, input_var=one)
    (tensor([[ 2.,  0., -4.]]), tensor([[ True, False,  True]]))
    """
    dense = checked(weight)
    along_inputs = type(pattern) is NM and pattern.axis % 2 == 1
    if type(pattern) not in (Unstructured, Rows) and not along_inputs:
        raise ValueError(f"dsnot exchanges weights within a row: use Rows(), Unstructured() or n:m, not {pattern}.")
    for word, evidence in {"input_norm": input_norm, "input_mean": input_mean, "input_var": input_var}.items():
        if evidence.shape not in ((1, dense.shape[1]), (dense.shape[1],)):
            raise ValueError(
                f"{word} has shape {tuple(evidence.shape)}; a weight of shape {tuple(weight.shape)} needs "
                f"(1, {dense.shape[1]})."
            )
    for evidence in (input_norm, input_mean, input_var):  # float64 where float32 does not hold it
        dense = dense.to(torch.promote_types(dense.dtype, evidence.dtype))
    scores = dense.abs() * input_norm.to(dense.dtype)
    mask = best_mask(scores, sparsity, pattern)
    if dense.numel():
        means = dense * input_mean.to(dense.dtype)
        spread = input_var.to(dense.dtype).clamp(min=torch.finfo(dense.dtype).tiny) ** power
        group = pattern.m if isinstance(pattern, NM) else None
        _exchange(mask, scores, means, means / spread, cycles, threshold, group)
    return finished(weight.detach(), mask, weight), mask


def with_refit(solver: Solver, *, iterations: int = 20, tolerance: float = 1e-3) -> Solver:
    """The solver, and then least squares for its mask, from the weights that it left: `refit`.

    It names the evidence that the solver names, and the Gram matrix.

    >>> from secateur.criteria import magnitude
    >>> solve = with_refit(from_criterion(magnitude))
    >>> solve(torch.tensor([[1.0, 3.0]]), 0.5, Rows(), gram=torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    (tensor([[0.0000, 3.5000]]), tensor([[False,  True]]))
    """
    asked = [p for p in _parameters(solver) if p.kind is p.KEYWORD_ONLY]
    uses_gram = any(p.name == "gram" for p in asked)

    def solve(weight: Tensor, sparsity: float | None, pattern: Pattern, /, **evidence: Tensor) -> tuple[Tensor, Tensor]:
        gram = evidence["gram"]
        own = evidence if uses_gram else {word: value for word, value in evidence.items() if word != "gram"}
        new, mask = solver(weight, sparsity, pattern, **own)
        return refit(weight, mask, gram=gram, start=new, iterations=iterations, tolerance=tolerance), mask

    gram = [] if uses_gram else [inspect.Parameter("gram", inspect.Parameter.KEYWORD_ONLY, annotation=Tensor)]
    return _named(solve, f"with_refit({_name(solver)})", [*asked, *gram], scope_of(solver, "layer"))


def best_mask(scores: Tensor, sparsity: float | None, pattern: Pattern) -> Tensor:
    """The mask that keeps the best units of each group: as many as the pattern or the sparsity says, exactly.

    >>> best_mask(torch.tensor([[1.0, 3.0, 2.0, 4.0]]), None, NM(2, 4))
    tensor([[False,  True, False,  True]])
    """
    units = pattern.pool(torch.empty(scores.shape, device="meta")).shape[1]
    return _spread_best(scores, pattern, _kept_of(pattern, sparsity, units))


def check_pattern(pattern: Pattern, sparsity: float | None, shape: torch.Size) -> None:
    """``ValueError`` where the pattern does not fit the shape or the sparsity; before the work, and without any.

    >>> check_pattern(NM(2, 4), None, torch.Size([2, 8]))
    """
    _kept_of(pattern, sparsity, 0)
    pattern.pool(torch.empty(shape, device="meta"))


# ---- helpers -------------------------------------------------------------------------------------------------------


def _sweep(now: Tensor, kept: Tensor, inverse: Tensor, root: Tensor, group: int | None, kept_in_group: int) -> None:
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
                if column + 1 < last:
                    now[column + 1 : last].addcmul_(ratios[column, column + 1 : last, None], error, value=-1)
    now -= errors
    if group:
        torch.eq(removed, 0, out=kept)


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


def _exchange(
    mask: Tensor,
    scores: Tensor,
    means: Tensor,
    weighed: Tensor,
    cycles: int,
    threshold: float,
    group: int | None,
) -> None:
    """The cycles of `dsnot`, on all rows at once; writes to the mask."""
    fresh = torch.ones_like(mask)  # has not changed places
    error = torch.where(mask, 0.0, means).sum(1, keepdim=True)
    active = torch.ones_like(error, dtype=torch.bool)
    for _ in range(cycles):
        sign = error.sign()
        ahead = torch.where(~mask & fresh & (means * sign > 0), weighed * sign, -torch.inf)
        gain, back = ahead.max(1, keepdim=True)
        can_go = mask & fresh
        if group is None:
            can_go &= means * sign < 0
        else:
            places = torch.arange(mask.shape[1], device=mask.device)
            can_go &= places // group == back // group
        loss, gone = torch.where(can_go, scores, torch.inf).min(1, keepdim=True)
        after = error - means.gather(1, back) + means.gather(1, gone)
        active &= (error.abs() > threshold) & (gain > -torch.inf) & (loss < torch.inf) & (after.abs() < error.abs())
        if not bool(active.any()):
            break
        for place, value in ((back, True), (gone, False)):
            mask.scatter_(1, place, torch.where(active, value, mask.gather(1, place)))
            fresh.scatter_(1, place, fresh.gather(1, place) & ~active)
        error = torch.where(active, after, error)


def _named(
    solve: Callable[..., tuple[Tensor, Tensor]], name: str, asked: list[inspect.Parameter], scope: Scope
) -> Solver:
    """The function under a name, with a signature that shows which evidence it asks for, and its scope."""
    own = [inspect.Parameter(word, inspect.Parameter.POSITIONAL_ONLY) for word in ("weight", "sparsity", "pattern")]
    shown: Any = solve
    shown.__signature__ = inspect.Signature([*own, *asked])
    shown.__name__ = shown.__qualname__ = name
    shown.compares = scope
    named: Solver = shown
    return named


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", repr(function)))


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # built-in functions such as torch.abs show no signature
        return []
