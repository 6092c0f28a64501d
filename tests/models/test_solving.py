"""A block solved: errors are those of the layer's outputs, and what does not fit is named."""

import copy
import functools

import pytest
import torch
from torch import nn

from secateur import NM, Block, Channels, Rows, Unstructured
from secateur.models import oneshot
from secateur.solvers import admm, alps, dsnot, sparsegpt, with_refit
from support.stacks import WANDA, data, stack

DSNOT = functools.partial(dsnot, threshold=0.0)  # which is one of sizes


def test_the_error_is_that_of_the_layer_s_outputs():
    for solver in (sparsegpt, WANDA):
        model, dense = stack(), stack()
        done = oneshot(model, data(), 0.5, solver=solver)
        x = dense.enter(torch.cat(data())).detach()
        old, new = (m.layers[0].up.weight.detach() for m in (dense, model))
        expected = ((x @ (new - old).T).square().sum() / (x @ old.T).square().sum()).item()
        assert done.layers[0].error == pytest.approx(expected, rel=1e-4)
        assert done.error == pytest.approx(sum(layer.error for layer in done.layers) / 6)


class Plain(nn.Module):
    """Its outputs are as many times as large as its inputs are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("solver", [sparsegpt, admm, alps, DSNOT, WANDA, with_refit(WANDA)])
@pytest.mark.parametrize("scale", [1e18, 1e25, 1e-18, 1e-25])
def test_the_error_is_true_of_inputs_of_any_size(solver, scale):
    """Their squares are beyond what float32 holds."""
    torch.manual_seed(0)
    plain = Plain()
    scaled = copy.deepcopy(plain)
    batches = [torch.randn(64, 8) for _ in range(2)]
    usual = oneshot(plain, batches, 0.5, solver=solver, pattern=Rows())
    done = oneshot(scaled, [batch * scale for batch in batches], 0.5, solver=solver, pattern=Rows())
    assert [layer.error for layer in done.layers] == pytest.approx([layer.error for layer in usual.layers], rel=1e-3)
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_solver_that_returns_nan_is_an_error_that_names_the_weight():
    def careless(weight, sparsity, pattern):
        return weight / 0, torch.ones(weight.shape, dtype=torch.bool)

    model = stack()
    with pytest.raises(
        ValueError, match=r"layers\.0\.up\.weight: the solver's new weight of shape \(12, 8\) holds NaN"
    ):
        oneshot(model, data(), 0.5, solver=careless)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_outputs_that_were_all_0_have_no_relative_error():
    def ones(weight, sparsity, pattern, *, gram):
        return torch.ones_like(weight), torch.ones(weight.shape, dtype=torch.bool)

    model = stack()
    nn.init.zeros_(model.layers[1].up.weight)
    found = {layer.name: layer for layer in oneshot(model, data(), 0.5, solver=ones).layers}
    assert found["layers.1.up.weight"].error is None
    assert found["layers.1.up.weight"].warnings == (
        "its outputs were all 0 and no longer are; no error relates to that.",
    )
    assert found["layers.0.up.weight"].error > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", [Unstructured(), Rows(), NM(2, 4), Block(2, 2), Channels(0)], ids=str)
def test_patterns_and_dtypes(dtype, pattern):
    model = stack().to(dtype)
    inputs = [batch.to(dtype) for batch in data()]
    done = oneshot(model, inputs, None if pattern.density else 0.5, pattern=pattern)
    for layer in done.layers:
        weight = model.get_parameter(layer.name).detach()
        assert weight.dtype == dtype
        kept = pattern.pool(weight.ne(0).double())
        assert set(kept.unique().tolist()) == {0.0, 1.0}
        assert (kept.mean(1) == 0.5).all()
        assert layer.sparsity == 0.5


def test_a_weight_that_the_pattern_does_not_fit_is_named():
    model = stack(width=6)
    done = oneshot(model, data(), pattern=NM(2, 4))
    assert [layer.name for layer in done.layers] == [f"layers.{n}.down.weight" for n in range(3)]
    assert done.left_alone["of a shape that does not fit the pattern"] == tuple(
        f"layers.{n}.up.weight" for n in range(3)
    )
