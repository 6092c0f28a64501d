"""Small networks of residual blocks that are fitted to budgets, and what they are run on."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def blocks(count=4, width=6, hidden=20):
    """Later blocks do less, so that the same share of each is not the best."""
    made = nn.Sequential(*(Block(width, hidden) for _ in range(count)))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for at, block in enumerate(made):
            for each in block.parameters():
                each.copy_(torch.randn(each.shape, generator=generator) * 0.4 / (1 + at))
    return made.eval()


def inputs(count=4, width=6, rows=32):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(rows, width, generator=generator) for _ in range(count)]


def parameters(model):
    return sum(each.numel() for each in model.parameters())


def widths(model):
    return [block.up.out_features for block in model]
