"""DSnoT (arXiv:2310.08915): weights change places with removed ones until the mean output is the dense one's.

Law: kept weights do not change, and a row keeps as many as before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secateur.criteria import compares
from secateur.patterns import NM, Pattern, Rows, Unstructured
from secateur.solvers.gram import checked
from secateur.solvers.least_squares import best_mask, finished


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
