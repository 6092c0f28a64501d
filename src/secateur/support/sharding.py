"""Sharded tensors (DTensor): what each rank holds, what all hold together.

Law: plain tensors go through every function here unchanged, and torch.distributed is imported for DTensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["count_nonzero", "is_sharded", "laid_out", "local", "whole"]


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor.

    >>> import torch
    >>> is_sharded(torch.zeros(1))
    False
    """
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    sharded: Any = tensor
    part: Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return part


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of all ranks' parts, on each rank."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that is whole and the same on all ranks, on the device of another and sharded as that is."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor.to(like.device)
    from torch.distributed.tensor import DTensor, Replicate

    sharded: Any = like
    mesh = sharded.device_mesh
    everywhere = DTensor.from_local(tensor.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    part: Tensor = everywhere.redistribute(placements=sharded.placements)
    return part


def count_nonzero(tensor: Tensor) -> int:
    """The number of nonzero entries of a tensor, over all ranks.

    >>> import torch
    >>> count_nonzero(torch.tensor([0.0, 2.0]))
    1
    """
    return int(whole(tensor.ne(0).sum()))
