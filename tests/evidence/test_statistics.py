"""Running sums: those of the joined data, in float32 or wider, and Gram matrices symmetric to the last bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur.evidence import Sums, collect
from support.evidence_models import close


def test_input_statistics_of_a_linear_layer():
    layer = nn.Linear(4, 3)
    batches = [torch.randn(5, 4) + 100, torch.randn(2, 7, 4)]
    x = torch.cat([batch.reshape(-1, 4) for batch in batches]).double()
    words = ["input_norm", "input_mean", "input_var", "gram"]
    entry = collect(layer, batches, words)["weight"]
    assert [tuple(entry[word].shape) for word in words] == [(1, 4), (1, 4), (1, 4), (4, 4)]
    assert all(tensor.dtype == torch.float32 for tensor in entry.values())
    close(entry["input_norm"][0], x.norm(dim=0).float())
    close(entry["input_mean"][0], x.mean(0).float())
    close(entry["input_var"][0], x.var(0, correction=0).float(), rtol=1e-5, atol=0)
    close(entry["gram"], (x.T @ x).float())
    empty = collect(layer, [*batches, torch.zeros(0, 4)], words)["weight"]
    assert all(torch.equal(empty[word], entry[word]) for word in words)


def test_halves_and_autocast_are_summed_in_float32():
    layer = nn.Linear(4, 2).bfloat16()
    batches = [torch.full((300, 4), 3.0, dtype=torch.bfloat16)] * 3
    entry = collect(layer, batches, ["input_norm", "gram", "grad", "grad_sq"], loss=lambda y: y.float().mean())
    close(entry["weight"]["input_norm"], torch.full((1, 4), 8100.0).sqrt())
    assert all(tensor.dtype == torch.float32 for tensor in entry["weight"].values())
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(300, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = collect(model, [x], ["gram", "grad", "flow"], loss=lambda y: y.float().square().mean())
    hidden = torch.cat([model[0](x).bfloat16().float().detach()])
    close(found["1.weight"]["gram"], hidden.T @ hidden, rtol=2e-2, atol=2)
    close(found["0.weight"]["gram"], x.T @ x)
    assert found["0.weight"]["grad"].dtype == torch.float32


@pytest.mark.parametrize("size", [1e20, 1e30, 1e-25])
def test_numbers_whose_squares_float32_does_not_hold(size):
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 2, bias=False), torch.randn(33, 5)
    words = ["gram", "input_norm", "input_var"]
    usual, found = (collect(layer, [batch], words)["weight"] for batch in (x, x * size))
    for word in words:
        power = 2 if word in ("gram", "input_var") else 1
        assert found[word].dtype == (torch.float64 if power == 2 else torch.float32)
        close(found[word].double() / size**power, usual[word].double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inputs", [5, 67])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gram_matrix_is_symmetric_whatever_the_blas_does(inputs, dtype, monkeypatch):
    monkeypatch.setattr("secateur.evidence.statistics.PANEL", 30, raising=False)
    torch.manual_seed(0)
    layer, batches = nn.Linear(inputs, 2, dtype=dtype), [torch.randn(n, inputs, dtype=dtype) for n in (33, 130)]
    for forward in (None, lambda model, batch: torch.inference_mode()(model)(batch)):
        gram = collect(layer, batches, ["gram"], forward=forward)["weight"]["gram"]
        torch.testing.assert_close(gram, sum(x.T @ x for x in batches))
        assert torch.equal(gram, gram.T)


WORDS = frozenset(["input_norm", "input_mean", "input_var", "gram"])


def summed(parts, words=WORDS):
    sums = Sums(words)
    for part in parts:
        sums.add_inputs(part)
    sums.finish()
    return sums


@settings(max_examples=30)
@given(
    cuts=st.lists(st.integers(0, 40), max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    size=st.sampled_from([1e-25, 1.0, 1e25]),
)
def test_sums_over_any_split_are_those_of_the_joined_data(cuts, dtype, size):
    """As torch computes them, in float64, for numbers of any size."""
    generator = torch.Generator().manual_seed(7)
    x = ((torch.randn(40, 9, generator=generator) + 2) * size).to(dtype)
    sums = summed(x.tensor_split(sorted(cuts)))
    wide = x.double()
    expected = {
        "input_norm": wide.norm(dim=0), "input_mean": wide.mean(0),
        "input_var": wide.var(0, correction=0), "gram": wide.T @ wide,
    }  # fmt: skip
    assert sums.tokens == 40
    assert sums.is_finite()
    for word, value in expected.items():
        torch.testing.assert_close(
            sums.statistic(word).double(), value, rtol=1e-4, atol=1e-5 * float(value.abs().max())
        )
    assert torch.equal(sums.statistic("gram"), sums.statistic("gram").T)
    if size == 1.0:
        given_out = torch.float64 if dtype == torch.float64 else torch.float32
        assert {sums.statistic(word).dtype for word in WORDS} == {given_out}
