"""Networks that are trained here, and how."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur import demo


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        q, k, v = (
            each(x).view(count, length, self.heads, -1).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        y: Tensor = self.project(mixed.reshape(count, length, -1))
        return y


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.widen, self.narrow = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return y


class ViT(nn.Module):
    """A vision transformer for 8x8 images, in 16 patches of 2x2."""

    def __init__(self, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.places = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.layers = nn.Sequential(*(Layer(width, heads, 2 * width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.norm(self.layers(x)).mean(dim=1))
        return logits


TUNING = 10  # epochs after


def train(
    model: nn.Module,
    data: demo.Digits,
    kind: str,
    epochs: int,
    seed: int,
    before_step: Callable[[], object] = lambda: None,
) -> None:
    """One cycle of the learning rate; images moved by up to a pixel; all randomness from the seed."""
    draw = torch.Generator().manual_seed(seed)
    batch = 128 if kind == "sgd" else 32
    steps = len(data.train_images) // batch
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        top = 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=top, momentum=0.9, weight_decay=5e-4, nesterov=True)
    else:
        top = 4e-3
        optimizer = torch.optim.AdamW(model.parameters(), lr=top, weight_decay=0.05)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, top, total_steps=max(epochs * steps, 2), pct_start=0.2)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(data.train_images), generator=draw)
        for rows in order[: steps * batch].reshape(steps, batch):
            moved = torch.randint(-1, 2, (2,), generator=draw).tolist()
            images = torch.roll(data.train_images[rows], moved, (2, 3))
            optimizer.zero_grad()
            functional.cross_entropy(model(images), data.train_labels[rows]).backward()
            before_step()
            optimizer.step()
            cycle.step()
    model.eval()


def right_share(model: nn.Module, data: demo.Digits) -> float:
    with torch.no_grad():
        return float((model(data.test_images).argmax(1) == data.test_labels).double().mean())
