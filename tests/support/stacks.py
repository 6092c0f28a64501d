"""Small stacks of blocks, batches for them, and folders of pruned ones."""

import torch
from torch import nn

from secateur import criteria
from secateur.solvers import from_criterion

WANDA = from_criterion(criteria.wanda)
MAGNITUDE = from_criterion(criteria.magnitude)


class Block2(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    """A stack of one's own, under an embedding of another kind and a head."""

    def __init__(self, layers=3, width=8):
        super().__init__()
        self.enter = nn.Linear(5, width)
        self.layers = nn.ModuleList(Block2(width) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def stack(seed=0, **settings):
    torch.manual_seed(seed)
    return Stack(**settings)


def data(count=4, size=6):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(size, 5, generator=generator) for _ in range(count)]


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
