"""SparseGPT against a slow, plain reading of its paper, and by hand."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur import NM, Rows, Unstructured
from secateur.selection import keep_largest
from secateur.solvers import output_error, round_kept, sparsegpt, with_rounding
from secateur.solvers.gram import SolverWarning
from secateur.solvers.sparsegpt import _tournament
from secateur.support import rounding_scales, to_int8
from support.solving import layer


def plain_sparsegpt(weight, gram, *, sparsity=None, n=None, m=None, block=128, damping=0.01, scales=None):
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
            kept = torch.ones(scores.numel(), dtype=torch.bool)
            kept[scores.flatten().argsort(stable=True)[:gone]] = False
            mask[:, j:end] = kept.view(scores.shape)
        if n is not None and j % m == 0:
            scores = W[:, j : j + m] ** 2 / d[j : j + m] ** 2
            mask[:, j : j + m] = torch.zeros(rows, m).bool().scatter_(1, scores.topk(n, dim=1).indices, True)
        stays = torch.where(mask[:, j], W[:, j], 0.0)
        if scales is not None:
            stays = (stays / scales).round().clamp(-127, 127) * scales
        error = (W[:, j] - stays) / d[j]
        W[:, j:] -= error[:, None] * upper[j, j:]
    if scales is not None:  # to the last bit
        W = (W / scales[:, None]).round() * scales[:, None]
    return W.masked_fill_(~mask, 0), mask


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("pattern", "sparsity", "inputs", "plain"),
    [
        (Unstructured(), 0.5, 400, {"sparsity": 0.5}),
        (Unstructured(), 0.7, 400, {"sparsity": 0.7}),
        (NM(2, 4), None, 400, {"n": 2, "m": 4}),
        (NM(4, 8), None, 400, {"n": 4, "m": 8}),
        (NM(1, 16), None, 384, {"n": 1, "m": 16}),
        (NM(3, 5), None, 385, {"n": 3, "m": 5}),  # its groups would cross the ends of blocks of 128
    ],
    ids=str,
)
def test_sparsegpt_is_the_papers(pattern, sparsity, inputs, plain, seed):
    weight, gram = layer(96, inputs, seed=seed)
    new, mask = sparsegpt(weight, sparsity, pattern, gram=gram)
    expected, expected_mask = plain_sparsegpt(weight, gram, **plain)
    assert (mask == expected_mask).double().mean() >= 0.999
    ours, theirs = (output_error(weight.double(), w.double(), gram.double()) for w in (new, expected))
    assert abs(ours / theirs - 1) < 1e-3


def test_sparsegpt_by_hand():
    """The error of a removed weight goes to the columns after it: w₁ += w₀ H₀₁ / H₁₁."""
    gram = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    new, _ = sparsegpt(torch.tensor([[1.0, 3.0], [3.0, 1.0]]), 0.5, Rows(), gram=gram, damping=0.0)
    torch.testing.assert_close(new, torch.tensor([[0.0, 3.5], [3.0, 0.0]]))


def test_damping_is_raised_aloud():
    weight, gram = layer(4, 60, tokens=3)
    with pytest.warns(SolverWarning, match=r"\(60, 60\) was raised from 0 to 0.0001 of its mean diagonal"):
        new, _ = sparsegpt(weight, 0.5, Rows(), gram=gram, damping=0.0)
    assert bool(new.isfinite().all())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsegpt(weight, 0.5, Rows(), gram=gram)


def test_a_repair_that_does_not_fit_the_dtype_is_an_error():
    weight = torch.full((1, 2), 6e4, dtype=torch.float16)
    gram = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
    with pytest.raises(ValueError, match=r"\(1, 2\) does not fit torch.float16"):
        sparsegpt(weight, 0.5, Rows(), gram=gram)


@given(m=st.integers(1, 40), outputs=st.integers(1, 5), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=30)
def test_a_tournament_removes_what_keep_largest_does(m, outputs, seed, data):
    """With ties: of equal scores the first are kept, in small groups and in those too large for a tournament."""
    weights = torch.randint(-3, 4, (m, outputs), generator=torch.Generator().manual_seed(seed)).float()
    kept = data.draw(st.integers(0, m))
    removed = torch.full_like(weights, 7.0)
    _tournament(m, kept, weights)(weights, torch.ones(m, 1), removed)
    assert torch.equal(removed, keep_largest(weights.abs().T, kept).T.logical_not().float())


# ---- pruned and rounded in one sweep -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "sparsity", "inputs", "plain"),
    [
        (Unstructured(), 0.5, 300, {"sparsity": 0.5}),
        (NM(2, 4), None, 256, {"n": 2, "m": 4}),
        (Unstructured(), 0.0, 100, {"sparsity": 0.0}),  # GPTQ itself
    ],
    ids=str,
)
def test_the_joint_sweep_is_the_papers(pattern, sparsity, inputs, plain):
    """Of numbers that a tie or float32 tips over, there are few, and what follows them is another sweep's."""
    weight, gram = layer(64, inputs, seed=3)
    scales = rounding_scales(weight)
    new, mask = sparsegpt(weight.double(), sparsity, pattern, gram=gram.double(), values="int8")
    expected, kept = plain_sparsegpt(weight, gram, scales=scales.double(), **plain)
    assert (mask == kept).double().mean() > 0.99
    assert (new - expected).abs().gt(1e-9).double().mean() < 0.01
    solved, same = with_rounding(sparsegpt)(weight.double(), sparsity, pattern, gram=gram.double())
    assert torch.equal(solved, new)
    assert torch.equal(same, mask)


@settings(max_examples=15)
@given(data=st.data())
def test_what_is_rounded_lies_on_its_grid(data):
    """Whatever the solver: to_int8 finds the numbers; the mask is the pattern's: rows say how many go."""
    rows, inputs, seed = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 150)), data.draw(st.integers(0, 99))
    solver = data.draw(st.sampled_from(["sparsegpt", "magnitude", "wanda", "admm"]))
    weight, gram = layer(rows, inputs, seed=seed)
    norm = {"input_norm": gram.diagonal().sqrt()[None]} if solver == "wanda" else {}
    new, mask = with_rounding(solver)(weight, 0.5, Rows(), gram=gram, **norm)
    numbers, scales = to_int8(new)
    assert torch.equal(numbers * scales[:, None], new)
    assert not new[~mask].any()
    assert (mask.sum(1) == inputs - round(inputs * 0.5)).all()


def test_what_follows_makes_up_for_rounding():
    weight, gram = layer(96, 256, seed=5)
    whole = torch.ones_like(weight, dtype=torch.bool)
    nearest = scaled_of(weight)
    assert output_error(weight, round_kept(weight, whole, gram=gram), gram) < output_error(weight, nearest, gram)
    pruned, mask = sparsegpt(weight, 0.5, Rows(), gram=gram)
    after, joint = scaled_of(pruned), sparsegpt(weight, 0.5, Rows(), gram=gram, values="int8")[0]
    assert output_error(pruned, round_kept(pruned, mask, gram=gram), gram) < output_error(pruned, after, gram)
    # of 8 bits the pruning is nearly all of the error, and its mask another one
    assert output_error(weight, joint, gram) < 1.02 * output_error(weight, after, gram)


def scaled_of(weight):
    numbers, scales = to_int8(weight)
    return numbers * scales[:, None]


def test_rounding_refuses():
    weight, gram = layer(4, 8, seed=0)
    with pytest.raises(ValueError, match="values is 'int8' or None, not 'int4'"):
        sparsegpt(weight, 0.5, Rows(), gram=gram, values="int4")
    with pytest.raises(ValueError, match=r"the mask is bool of shape \(4, 8\), not torch.float32 of \(4, 8\)"):
        round_kept(weight, weight, gram=gram)
    assert round_kept(weight[:0], weight[:0] > 0, gram=gram).shape == (0, 8)
