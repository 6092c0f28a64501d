"""A module of the user's, with a model and its inputs, and ``secateur shrink`` on it."""

from support.commands import run

ZOO = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(11))
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, scale=1.0):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return scale * self.head(x)


def build():
    torch.manual_seed(0)
    return Tied()


def unfit():
    return Tied().blocks


class Nested:
    build = staticmethod(build)


built = build()
tokens = torch.arange(30).reshape(2, 15)
number = 3


def batches():
    return [(tokens + number) % 30 for number in range(16)]


def as_dict():
    return {"tokens": tokens, "scale": 2.0}


def as_tuple():
    return tokens, 2.0


def fails():
    raise RuntimeError("there is no such thing.")
"""


def shrunk(zoo, *more, factory="build", example="tokens", sparsity=0.5):
    return run("shrink", f"{zoo}:{factory}", "--example", f"{zoo}:{example}", "--sparsity", sparsity, *more)
