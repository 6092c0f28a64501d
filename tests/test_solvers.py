"""Solvers: SparseGPT against a slow, plain reading of its paper, and the laws that every solver keeps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secateur import NM, Block, Channels, Rows, Unstructured, criteria
from secateur.evidence import needs
from secateur.least_squares import output_error
from secateur.solvers import from_criterion, sparsegpt


def layer(outputs, inputs, tokens=None, seed=0, dtype=torch.float32):
    """A weight, and the Gram matrix of inputs that are correlated and of very different sizes, as in transformers."""
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens or 4 * inputs
    mixing = torch.randn(inputs, inputs, generator=generator) / inputs**0.5 + torch.eye(inputs)
    x = torch.randn(tokens, inputs, generator=generator) @ mixing
    x *= torch.rand(inputs, generator=generator) * 3 + 0.05
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    return weight.to(dtype), (x.T @ x)


def plain_sparsegpt(weight, gram, *, sparsity=None, n=None, m=None, block=128, damping=0.01):
    """The paper's algorithm 1 as it is written: an inverse, its Cholesky factor, a column and its update at a time.

    In float64. Counts are rounded as the library says it does; of n:m, n are kept.
    """
    W = weight.double().clone()
    H = gram.double().clone()
    rows, columns = W.shape
    H += damping * H.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
    d = upper.diagonal()
    mask = torch.ones(rows, columns, dtype=torch.bool)
    for j in range(columns):
        if n is None and j % block == 0:
            end = min(j + block, columns)
            scores = W[:, j:end] ** 2 / d[j:end] ** 2
            gone = round(sparsity * rows * end) - round(sparsity * rows * j)
            order = scores.flatten().argsort(stable=True)[:gone]
            chosen = torch.ones(scores.numel(), dtype=torch.bool)
            chosen[order] = False
            mask[:, j:end] = chosen.view(scores.shape)
        if n is not None and j % m == 0:
            scores = W[:, j : j + m] ** 2 / d[j : j + m] ** 2
            keep = scores.topk(n, dim=1).indices
            mask[:, j : j + m] = torch.zeros(rows, m, dtype=torch.bool).scatter_(1, keep, True)
        error = torch.where(mask[:, j], 0.0, W[:, j]) / d[j]
        W[:, j:] -= error[:, None] * upper[j, j:]
    W[~mask] = 0
    return W, mask


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("pattern", "sparsity", "plain"),
    [
        (Unstructured(), 0.5, {"sparsity": 0.5}),
        (Unstructured(), 0.7, {"sparsity": 0.7}),
        (NM(2, 4), None, {"n": 2, "m": 4}),
        (NM(4, 8), None, {"n": 4, "m": 8}),
        (NM(1, 16), None, {"n": 1, "m": 16}),
    ],
    ids=str,
)
def test_sparsegpt_is_the_papers(pattern, sparsity, plain, seed):
    weight, gram = layer(96, 400 if pattern != NM(1, 16) else 384, seed=seed)
    new, mask = sparsegpt(weight, sparsity, pattern, gram=gram)
    expected, expected_mask = plain_sparsegpt(weight, gram, **plain)
    assert (mask == expected_mask).double().mean() >= 0.999
    ours, theirs = (output_error(weight.double(), w.double(), gram.double()) for w in (new, expected))
    assert abs(ours / theirs - 1) < 1e-3
    assert torch.equal(new == 0, ~mask)
