"""A model of blocks that its configuration describes, as transformers' are."""

import torch
from torch import nn


class Config:
    """The least that is needed; ``other`` equals ``hidden`` and says nothing of it."""

    def __init__(self, **values):
        vars(self).update({"width": 12, "hidden": 20, "other": 20, "layers": 2, "heads": 4, "inner": None}, **values)

    def to_dict(self):
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values):
        return cls(**values)


class Blocks(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.first = nn.Linear(3, config.width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(config.width, config.hidden), nn.GELU(), nn.Linear(config.hidden, config.width, bias=False)
            )
            for _ in range(config.layers)
        )
        self.last = nn.Linear(config.width, 2)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def random_of(kind, **values):
    torch.manual_seed(0)
    return kind(Config(**values))
