"""Weights as whole numbers of 8 bits times a scale for each output.

Law: 0 stays 0; a weight that lies on such a grid already is found again, number for number, and nothing is rounded
twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MOST_IN_INT8", "rounding_scales", "to_int8"]

MOST_IN_INT8 = 127  # numbers are -127 ... 127, as many below zero as above
_SPARE = 0xFF  # bits of a float32 that a scale leaves empty: times a number of 7 bits it is exact


def to_int8(weight: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A weight as ``numbers * scales[:, None]``, each the nearest; what is 0 stays 0.

    Args:
        weight: (outputs, ...), any real floating dtype.
        scales: float32 (outputs); by default those of `rounding_scales`.

    Returns:
        int8 in the weight's shape, within ±127, and the scales.

    Raises:
        ValueError: an entry is NaN or infinite.

    >>> numbers, scales = to_int8(torch.tensor([[1.27, 0.0, -0.5], [0.0, 0.0, 0.0]]))
    >>> numbers, scales
    (tensor([[127,   0, -50],
            [  0,   0,   0]], dtype=torch.int8), tensor([0.0100, 1.0000]))
    """
    weight = weight.detach().float()
    scales = rounding_scales(weight) if scales is None else scales
    each = scales.view(-1, *[1] * (weight.dim() - 1))
    return (weight / each).round_().clamp_(-MOST_IN_INT8, MOST_IN_INT8).to(torch.int8), scales


def rounding_scales(weight: Tensor) -> Tensor:
    """The scale of each output (outputs, ...): that of the grid on which its float32 weights lie, else the least with
    which the largest is within ±127; 1 where all are 0.

    Scales have 16 significant bits, so that a number times its scale is no further rounded, and the grid of a weight
    that was rounded can be seen from the weight alone.

    Raises:
        ValueError: an entry is NaN or infinite.

    >>> weight = torch.tensor([[0.25, -1.5, 0.75]])
    >>> rounding_scales(rounding_scales(weight)[:, None] * torch.tensor([[21, -127, 64]])) == rounding_scales(weight)
    tensor([True])
    """
    rows = weight.detach().float().flatten(1) if weight.dim() > 1 else weight.detach().float()[:, None]
    if not rows.numel():
        return torch.ones(len(rows), device=rows.device)
    largest = rows.abs().amax(1)
    if not bool(largest.isfinite().all()):
        raise ValueError(f"a weight of shape {tuple(weight.shape)} holds NaN or infinity, which has no place in int8.")
    least = torch.finfo(torch.float32).tiny * (_SPARE + 1)  # below it bits are missing
    upwards = (largest / MOST_IN_INT8).clamp_min(least).view(torch.int32) + _SPARE
    scales = torch.where(largest > 0, (upwards & ~_SPARE).view(torch.float32), 1.0)
    unknown = largest > least * MOST_IN_INT8
    for number in range(MOST_IN_INT8, 0, -1):
        scale = largest / number
        maybe = (unknown & ((scale.view(torch.int32) & _SPARE) == 0)).nonzero()[:, 0]
        if not len(maybe):
            continue
        near = rows[maybe, :64] / scale[maybe, None]
        maybe = maybe[near.eq(near.round()).all(1)]
        numbers = (rows[maybe] / scale[maybe, None]).round_()
        found = maybe[(numbers * scale[maybe, None] == rows[maybe]).all(1)]
        scales[found] = scale[found]
        unknown[found] = False
    return scales
