"""How much is pruned: amounts and axes checked, entries and channels counted, norms, the largest of one tensor.

Law: the private names are those of ``torch.nn.utils.prune``, with its errors; torch's own tests call them.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from secateur.selection import keep_largest

Amount = int | float | numbers.Real


def _validate_pruning_amount_init(amount: Any) -> None:
    """An amount is an integer that is not negative, or another real number in [0, 1].

    Raises:
        TypeError: it is no real number.
        ValueError: it is out of range.
    """
    if not isinstance(amount, numbers.Real):
        raise TypeError(f"Invalid type for amount: {amount}. Must be int or float.")
    # NaN passes here, as with torch, and is found out where it is counted.
    if amount < 0 or (not isinstance(amount, numbers.Integral) and float(amount) > 1):
        raise ValueError(f"amount={amount} should either be a float in the range [0, 1] or a non-negative integer")


def _validate_pruning_amount(amount: Any, tensor_size: int) -> None:
    """An integer amount is at most `tensor_size`; else a ValueError."""
    if isinstance(amount, numbers.Integral) and int(amount) > tensor_size:
        raise ValueError(f"amount={amount} should be smaller than the number of parameters to prune={tensor_size}")


def _validate_structured_pruning(t: Tensor) -> None:
    """A tensor with channels has at least two axes; else a ValueError."""
    shape = t.shape
    if len(shape) <= 1:
        raise ValueError(
            "Structured pruning can only be applied to multidimensional tensors. "
            f"Found tensor of shape {shape} with {len(shape)} dims"
        )


def _compute_nparams_toprune(amount: Any, tensor_size: int) -> Any:
    """An integer amount itself; another one times `tensor_size`, rounded half to even.

    >>> _compute_nparams_toprune(7, 10), _compute_nparams_toprune(0.25, 10)
    (7, 2)
    """
    return amount if isinstance(amount, numbers.Integral) else round(amount * tensor_size)


def _validate_pruning_dim(t: Tensor, dim: int) -> None:
    """`dim` is less than the number of axes; else an IndexError."""
    if dim >= t.dim():
        raise IndexError(f"Invalid index {dim} for tensor of size {t.shape}")


def _compute_norm(t: Tensor, n: Any, dim: int) -> Tensor:
    """The L`n` norm over all axes but `dim`, of shape ``(t.shape[dim],)``; of half precision in float32.

    >>> _compute_norm(torch.tensor([[3.0, 4.0], [0.0, 5.0]]), 2, dim=0)
    tensor([5., 5.])
    """
    dims = list(range(t.dim()))
    dims.remove(dims[dim] if dim < 0 else dim)
    if t.dtype in (torch.float16, torch.bfloat16):
        t = t.float()  # in half precision the squares overflow, and the strongest channel ranks as the weakest
    norm: Tensor
    if isinstance(n, str) and n != "fro":
        norm = torch.norm(t, p=n, dim=dims)
    else:
        norm = torch.linalg.vector_norm(t, 2 if n is None or n == "fro" else n, dim=dims)
    return norm


# What follows is the life cycle: find the tensor and everything around it, compute the mask, change the modules.


def count_of(amount: Amount, size: int) -> int:
    count = _compute_nparams_toprune(amount, size)
    _validate_pruning_amount(count, size)
    return int(count)


def channels_of(t: Tensor, dim: int, amount: Amount) -> tuple[int, int]:
    """How many channels there are, and how many of them go."""
    _validate_structured_pruning(t)
    _validate_pruning_dim(t, dim)
    channels = t.shape[dim]
    return channels, count_of(amount, channels)


def largest(scores: Tensor, kept: int) -> Tensor:
    """Bool mask of the `kept` largest entries, the first of equal ones; NaN is above all, as in ``torch.topk``."""
    if scores.is_meta:
        return torch.empty_like(scores, dtype=torch.bool)
    table = scores.reshape(1, -1)
    if table.isnan().any():
        table = nan_above_all(table)
    return keep_largest(table, kept).view(scores.shape)


def nan_above_all(scores: Tensor) -> Tensor:
    return scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)


def in_dtype_of(t: Tensor, mask: Tensor) -> Tensor:
    """Methods on their own return masks as torch's do; whole scores would round what a user wrote into a mask."""
    return mask.to(dtype=t.dtype) if t.is_floating_point() else mask


def along(kept: Tensor, t: Tensor, dim: int) -> Tensor:
    """A mask of channels, shaped so that it broadcasts over `t`."""
    shape = [1] * t.dim()
    shape[dim] = -1
    return kept.to(t.device).view(shape)
