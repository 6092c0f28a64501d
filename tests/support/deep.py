"""Models of residual branches for the tests of depth: pre-norm, post-norm, parallel, tied."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 6


class Block(nn.Module):
    """x + f(norm(x)); ``linear`` leaves out what is not linear in x."""

    def __init__(self, *, linear: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.Identity() if linear else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10, bias=bias), nn.Linear(10, WIDTH, bias=bias)
        self.act = nn.Identity() if linear else nn.ReLU()

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class PostNorm(nn.Module):
    """norm(x + f(x)), as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.down(self.up(x).relu()))


class Parallel(nn.Module):
    """x + f(x) + g(x), as in GPT-J."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.f, self.g = (nn.Sequential(nn.Linear(WIDTH, 10), nn.ReLU(), nn.Linear(10, WIDTH)) for _ in range(2))

    def forward(self, x):
        h = self.norm(x)
        return self.f(h) + self.g(h) + x


def deep(make=Block, count=5, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, WIDTH), *(make() for _ in range(count)), nn.Linear(WIDTH, 3))


def batches(count=6, rows=64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 4, generator=generator) for _ in range(count)]
