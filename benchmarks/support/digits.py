"""Handwritten digits as vectors of 64 numbers, and a network trained on them in seconds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["digits", "trained"]


def digits() -> tuple[Tensor, Tensor]:
    """All images and their labels, in an order that is the same each time."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """The model itself, in evaluation mode."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()
