"""Layers, solvers and patterns that tests of solvers go through."""

from dataclasses import dataclass

import torch


def layer(outputs, inputs, tokens=None, seed=0, dtype=torch.float32):
    """A weight, and the Gram matrix of inputs that are correlated and of very different sizes, as in transformers."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=generator) / inputs**0.5 + torch.eye(inputs)
    x = torch.randn(tokens or 4 * inputs, inputs, generator=generator) @ mixing
    x *= torch.rand(inputs, generator=generator) * 3 + 0.05
    weight = torch.randn(outputs, inputs, generator=generator) / max(inputs, 1) ** 0.5
    return weight.to(dtype), x.T @ x


def evidence_of(gram, tokens=400):
    squares = gram.diagonal()[None]
    mean = torch.linspace(-1, 1, len(gram))[None] * (squares / tokens).sqrt() * 0.5
    return {"gram": gram, "input_norm": squares.sqrt(), "input_mean": mean, "input_var": squares / tokens - mean**2}


def name(solver):
    return solver.__name__.split(" at 0x")[0]


@dataclass(frozen=True)
class Diagonals:
    """A pattern of one's own, whose groups no block of columns holds; for square weights."""

    density = None

    def pool(self, scores):
        return torch.stack([scores[i].roll(-i) for i in range(scores.shape[0])]).mean(0, keepdim=True)

    def spread(self, keep, shape):
        return torch.stack([keep[0].roll(i) for i in range(shape[0])])
