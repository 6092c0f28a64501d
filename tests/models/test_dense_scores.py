"""How allocations share the sparsity out over a walk, and what they are asked about."""

import contextlib
import functools

import pytest
import torch

from secateur import Unstructured, allocation
from secateur.allocation import by_name, owl, progression, uniform
from secateur.models import oneshot
from secateur.models.in_directory import DenseScores
from support.families import batches, make
from support.stacks import MAGNITUDE, data, stack


def test_allocations_share_out_the_same_total():
    total = sum(p.numel() for name, p in stack().named_parameters() if "layers" in name and p.dim() == 2)
    for allocate in (owl, allocation.erk, allocation.everywhere, functools.partial(progression, spread=0.2)):
        model = stack()
        oneshot(model, data(), 0.5, allocate=allocate)
        zeros = sum(int(p.eq(0).sum()) for name, p in model.named_parameters() if "layers" in name and p.dim() == 2)
        assert zeros == round(0.5 * total)


def test_owl_is_asked_about_the_dense_model():
    model, dense = stack(), stack()
    seen = {}

    def allocate(scores, sparsity, pattern):
        seen.update({name: scores[name].clone() for name in scores})
        return uniform(scores, sparsity, pattern)

    oneshot(model, data(), 0.5, allocate=allocate)
    x = dense.enter(torch.cat(data())).detach()
    for number, layer in enumerate(dense.layers):
        expected = layer.up.weight.detach().abs() * x.norm(dim=0)
        torch.testing.assert_close(seen[f"layers.{number}.up.weight"], expected, rtol=1e-4, atol=1e-5)
        x = layer(x).detach()
    plain = stack()
    oneshot(plain, data(), 0.5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_scores_of_experts_and_of_conv1d_are_outputs_first():
    shapes = {}

    def allocate(scores, sparsity, pattern):
        shapes.update({name: scores[name].shape for name in scores})
        assert all(scores[name].shape == scores.shape(name) for name in scores)
        return uniform(scores, sparsity, pattern)

    oneshot(make("gpt2"), batches("gpt2", count=1), 0.5, allocate=allocate, solver=MAGNITUDE)
    oneshot(make("mixtral"), batches("mixtral", count=1), 0.5, allocate=allocate, solver=MAGNITUDE)
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (48, 16)
    assert shapes["model.layers.0.mlp.experts.down_proj"] == (4 * 16, 24)


def test_by_name():
    model = stack()
    done = oneshot(model, data(), 0.5, allocate=by_name({"*.down.weight": 0.25}, otherwise=uniform))
    assert {layer.name.split(".")[2]: layer.sparsity for layer in done.layers} == {"up": 0.5, "down": 0.25}


def test_a_progression_of_three_blocks_by_hand():
    scores = {f"layers.{n}.weight": torch.rand(10, 10) for n in (2, 0, 1)} | {"other": torch.rand(10, 10)}
    counts = progression(scores, 0.6, Unstructured(), spread=0.2)
    assert counts == {"layers.0.weight": 60, "layers.1.weight": 40, "layers.2.weight": 20, "other": 40}
    assert progression(scores, 0.6, Unstructured(), spread=0.0) == dict.fromkeys(scores, 40)
    stacks = {f"{part}.{n}.weight": torch.rand(10, 10) for part in ("encoder", "decoder") for n in (0, 1)}
    counts = progression(stacks, 0.5, Unstructured(), spread=0.1)
    assert [counts[name] for name in stacks] == [60, 40, 60, 40]
    with pytest.raises(ValueError, match="spread is a difference of sparsities"):
        progression(scores, 0.6, Unstructured(), spread=2.0)


def test_the_dense_model_runs_only_for_an_allocation_that_reads_a_score():
    def runs(allocate):
        model, calls = stack(), []
        model.register_forward_pre_hook(lambda *_: calls.append(1))
        oneshot(model, data(), 0.5, allocate=allocate)
        return len(calls)

    assert runs(progression) == runs(allocation.erk) == runs(uniform) < runs(owl)


def test_the_last_block_that_was_read_for_its_scores_is_put_away():
    class Weights:
        loaded = ()

        def load(self, block, *, finished):
            assert not finished
            self.loaded = (*self.loaded, block)

        def unload(self, block):
            assert block in self.loaded
            self.loaded = tuple(each for each in self.loaded if each != block)

    model, weights = stack(), Weights()
    names = ["layers.0.up.weight", "layers.0.down.weight", "layers.2.up.weight"]
    shapes = {name: model.get_parameter(name).shape for name in names}
    blocks = {f"layers.{number}": layer for number, layer in enumerate(model.layers)}
    with contextlib.closing(DenseScores(shapes, {}, blocks, weights)) as scores:
        for name in names:
            assert torch.equal(scores[name], model.get_parameter(name).abs())  # no token: magnitude
            assert weights.loaded == (name[:8],)
    assert weights.loaded == ()
