"""Scores in which each of the units that are chosen between has its turn.

Law: in as many turns as there are units for each row, every unit is the best of some row; what is the same for two
models stays the same, and what was different stays so.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["in_turn"]

_PREFERRED = 2.5  # more than two scores are apart that are scaled to [-1, 1]


def in_turn(scores: Tensor, at: int, places: Tensor, turn: int) -> Tensor:
    """Scores along a dimension, scaled to [-1, 1], with a bonus for one of ``places`` in each row, so that each is
    chosen in turn.

    >>> import torch
    >>> in_turn(torch.tensor([[1.0, 4.0, 2.0]]), 1, torch.arange(3), 2)
    tensor([[0.2500, 1.0000, 3.0000]])
    """
    moved = scores.movedim(at, -1)
    largest = moved.detach()[..., places].abs().nan_to_num(0.0, 0.0, 0.0).max().clamp_min(1e-12)
    rows = moved.shape[:-1].numel()
    numbers = torch.arange(rows, device=scores.device)
    bonus = torch.zeros(rows, moved.shape[-1], dtype=scores.dtype, device=scores.device)
    bonus[numbers, places[(numbers + turn * rows) % len(places)]] = _PREFERRED
    return (moved / largest + bonus.reshape(moved.shape)).movedim(-1, at)
