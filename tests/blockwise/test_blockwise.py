"""The walk over blocks: what a block is pruned by, what a directory becomes, and that a killed run goes on."""

import copy
import functools
import json
import math
import os
import re
import shutil
import signal
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur import NM, Block, Channels, Rows, Unstructured, allocation, criteria, prune, shrink_checkpoint
from secateur.allocation import by_name, owl, progression, uniform
from secateur.blockwise import directory as block_files
from secateur.blockwise import in_directory as blockwise
from secateur.blockwise import journal as resumable
from secateur.blockwise import oneshot
from secateur.blockwise.finding import find_blocks, left_alone_within
from secateur.blockwise.journal import JOURNAL
from secateur.blockwise.products import Products, Tokens
from secateur.blockwise.record import digest
from secateur.blockwise.replay import Outputs
from secateur.checkpoints import CheckpointError, sparsify_checkpoint
from secateur.solvers import admm, alps, dsnot, from_criterion, sparsegpt, with_refit
from support.families import batches, make
from support.forks import forked

WANDA = from_criterion(criteria.wanda)
DSNOT = functools.partial(dsnot, threshold=0.0)  # which is one of sizes
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


# ---- laws of the walk --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [sparsegpt, WANDA], ids=["sparsegpt", "wanda"])
def test_each_block_is_pruned_by_what_the_pruned_blocks_before_it_pass_on(solver):
    model, by_hand = stack(), stack()
    oneshot(model, data(), 0.5, solver=solver, pattern=Rows())
    x = by_hand.enter(torch.cat(data())).detach()
    with torch.no_grad():
        for layer in by_hand.layers:
            hidden = layer.up(x).relu()  # both of a block's weights see its inputs in the dense block
            for module, inputs in ((layer.up, x), (layer.down, hidden)):
                words = {"gram": inputs.T @ inputs} if solver is sparsegpt else {"input_norm": inputs.norm(dim=0)[None]}
                module.weight.copy_(solver(module.weight, 0.5, Rows(), **words)[0])
            x = layer(x)
    for (name, one), other in zip(model.state_dict().items(), by_hand.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


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


@pytest.mark.parametrize("solver", [sparsegpt, WANDA, MAGNITUDE])
def test_inputs_that_are_infinite_are_an_error_that_names_the_weight(solver):
    batches = [*data(), torch.full((2, 5), torch.inf)]

    class Enters(Stack):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x.repeat(1, 2)[:, :8])
            return x

    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"layers\.0\.up\.weight: what it is multiplied with holds NaN or infinity"):
        oneshot(Enters(), batches, 0.5, solver=solver)


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


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(1, 23), max_size=5), words=st.sampled_from(["gram", "input_norm", "input_var"]))
def test_statistics_do_not_depend_on_how_tokens_are_batched(cuts, words):
    torch.manual_seed(0)
    layer, x = nn.Linear(7, 3), torch.randn(24, 7) + 2
    found = []
    for batched in ([x], x.tensor_split(sorted(set(cuts)))):
        products = Products({"weight": layer.weight}, frozenset([words]))
        for part in batched:
            with torch.no_grad(), products.watching(Tokens()):
                layer(part[None])
        (met,) = products.found().values()
        met.sums.finish()
        assert met.tokens == 24
        found.append(met.evidence([words])[words])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    expected = {"gram": x.T @ x, "input_norm": x.norm(dim=0)[None], "input_var": x.var(0, correction=0)[None]}
    torch.testing.assert_close(found[0], expected[words], rtol=1e-4, atol=1e-4)


def test_a_gram_matrix_wider_than_a_panel_is_whole_and_symmetric(monkeypatch):
    monkeypatch.setattr("secateur.evidence.statistics.PANEL", 5)
    layer, x = nn.Linear(13, 2), torch.randn(9, 13)
    products = Products({"weight": layer.weight}, frozenset(["gram"]))
    with torch.no_grad(), products.watching(Tokens()):
        layer(x)
    (met,) = products.found().values()
    met.sums.finish()
    torch.testing.assert_close(met.sums.gram, x.T @ x)
    assert torch.equal(met.sums.gram, met.sums.gram.T)


def test_weights_with_one_input_share_one_gram_matrix_and_others_do_not():
    q, k, v = (nn.Linear(4, 4) for _ in range(3))
    products = Products({"q": q.weight, "k": k.weight, "v": v.weight}, frozenset(["gram"]))
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(3, 4)
            with products.watching(Tokens()):
                q(x)
                k(x)
                x = x + 1  # may well take the place in memory of what is gone
                v(x)
    met = {piece.name: found for piece, found in products.found().items()}
    assert met["q"] is met["k"]
    assert met["q"] is not met["v"]
    assert met["q"].tokens == met["v"].tokens == 6


def test_an_input_that_is_changed_in_place_is_another_one():
    q, k = nn.Linear(4, 4), nn.Linear(4, 4)
    products = Products({"q": q.weight, "k": k.weight}, frozenset(["gram"]))
    x = torch.randn(3, 4)
    with torch.no_grad(), products.watching(Tokens()):
        q(x)
        k(x.mul_(2))
    sums = {piece.name: found.sums for piece, found in products.found().items()}
    sums["q"].finish()
    sums["k"].finish()
    torch.testing.assert_close(sums["k"].gram, 4 * sums["q"].gram)


def test_inputs_shared_in_one_batch_only_are_an_error():
    q, k = nn.Linear(4, 4), nn.Linear(4, 4)
    products = Products({"q": q.weight, "k": k.weight}, frozenset(["gram"]))
    x = torch.randn(3, 4)
    with torch.no_grad():
        with products.watching(Tokens()):
            q(x)
            k(x)
        message = "k and q had the same input in one batch and different ones"
        with pytest.raises(ValueError, match=message), products.watching(Tokens()):
            q(x)
            k(x + 1)


def test_the_model_is_left_as_it_was_but_for_its_weights():
    model = stack()
    model.train()
    model.layers[1].eval()
    state = torch.get_rng_state()
    oneshot(model, data(), 0.5)
    assert model.training
    assert not model.layers[1].training
    assert "forward" not in model.layers[0].__dict__
    assert not model.layers[0]._forward_pre_hooks
    assert not model.enter._forward_pre_hooks
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    llama = make("llama")
    llama.config.use_cache = True
    oneshot(llama, batches("llama", count=1), 0.5, solver=MAGNITUDE)
    assert llama.config.use_cache is True


def test_what_is_outside_the_blocks_does_not_change():
    model, dense = stack(), stack()
    done = oneshot(model, data(), 0.75)
    assert done.left_alone == {"outside the blocks": ("enter.weight", "head.weight")}
    for name in ("enter.weight", "enter.bias", "head.weight", "layers.0.up.bias"):
        assert torch.equal(model.state_dict()[name], dense.state_dict()[name])
    assert done.sparsity == 0.75


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


def test_activations_in_files_change_nothing(tmp_path):
    one, other = stack(), stack()
    oneshot(one, data(), 0.5)
    oneshot(other, data(), 0.5, activations=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not list(tmp_path.iterdir())


def test_outputs_in_files_are_those_that_were_saved(tmp_path):
    outputs = Outputs(tmp_path)
    tree = (torch.randn(3, 4).bfloat16().t(), {"bias": torch.arange(3), "none": None}, torch.zeros(0, 2))
    outputs.save("blocks.0", 0, tree)
    outputs.save("blocks.0", 1, (torch.ones(1),))
    found = outputs.load("blocks.0", 0)
    assert torch.equal(found[0], tree[0])
    assert torch.equal(found[1]["bias"], tree[1]["bias"])
    assert found[1]["none"] is None
    assert found[2].shape == (0, 2)
    assert len(list(tmp_path.iterdir())) == 3
    outputs.drop("blocks.0", 0)
    assert not outputs.has("blocks.0", 0)
    assert torch.equal(outputs.load("blocks.0", 1)[0], torch.ones(1))
    outputs.clear()
    assert not list(tmp_path.iterdir())


# ---- sparsity for each weight ------------------------------------------------------------------------------------


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


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_errors_of_a_model_in_memory():
    for keywords, kind, message in (
        ({"sparsity": None}, ValueError, "needs a sparsity"),
        ({"sparsity": 50}, ValueError, "For 50 percent write 0.5"),
        ({"pattern": NM(2, 4), "sparsity": 0.6}, ValueError, "removes 0.5 of the weights, not 0.6"),
        ({"batches": []}, ValueError, "no batches"),
        ({"batches": torch.zeros(2, 5)}, TypeError, r"pass \[batch\]"),
        ({"include": "layers.9*"}, ValueError, "no parameter matches"),
        ({"include": "head.weight"}, ValueError, "head.weight is outside the blocks"),
        ({"exclude": "layers*"}, ValueError, "no matrix is left to prune"),
        ({"out": "there"}, ValueError, "out= is for directories"),
        ({"solver": from_criterion(criteria.taylor)}, TypeError, "asks for grad_sq; a walk over blocks gathers"),
        ({"allocate": owl, "pattern": NM(2, 4), "sparsity": None}, ValueError, "leave allocate out"),
        ({"model": nn.Linear(2, 2)}, ValueError, "has no repeated blocks"),
        ({"batches": [torch.full((2, 5), torch.nan)]}, ValueError, r"layers\.0 receives in batch 0 holds NaN"),
    ):
        model = keywords.get("model") or stack()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        arguments = {"sparsity": 0.5, "batches": data(), **{key: v for key, v in keywords.items() if key != "model"}}
        with pytest.raises(kind, match=message):
            oneshot(model, **arguments)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), message


def test_models_that_are_not_ready():
    with pytest.raises(ValueError, match=r"enter\.weight is on the meta device"):
        oneshot(stack().to("meta"), data(), 0.5)
    model = stack()
    prune.l1_unstructured(model.layers[1].up, "weight", 0.5)
    with pytest.raises(ValueError, match=r"layers\.1\.up\.weight_orig: a mask is attached"):
        oneshot(model, data(), 0.5)
    model = stack()
    with torch.no_grad():
        model.layers[1].up.weight[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"layers\.1\.up\.weight: the weight of shape \(12, 8\) has entries that are NaN"
    ):
        oneshot(model, data(), 0.5)


def test_in_inference_mode():
    one, other = stack(), stack()
    oneshot(one, data(), 0.5)
    with torch.inference_mode():
        oneshot(other, data(), 0.5)
        born_there = stack()
        oneshot(born_there, data(), 0.5)
    assert torch.equal(born_there.layers[2].up.weight, one.layers[2].up.weight)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_weights_that_are_shared():
    model = stack(width=12)
    model.layers[1].down.weight = model.layers[1].up.weight  # one matrix with the inputs of both
    model.layers[2].up.weight = model.layers[0].up.weight
    done = oneshot(model, data(), 0.5)
    tokens = {layer.name: layer.tokens for layer in done.layers}
    assert tokens == {"layers.0.down.weight": 24, "layers.1.up.weight": 48, "layers.2.down.weight": 24}
    assert done.left_alone["shared with another block"] == ("layers.0.up.weight",)


def test_a_failure_in_a_later_block_says_which_are_pruned():
    model, calls = stack(), []

    def failing(weight, sparsity, pattern, *, gram):
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("no solution")
        return sparsegpt(weight, sparsity, pattern, gram=gram)

    dense = stack()
    with pytest.raises(ValueError, match=r"layers\.1\.down\.weight: no solution") as caught:
        oneshot(model, data(), 0.5, solver=failing)
    assert caught.value.__notes__ == ["Pruned already, and left so: layers.0 to layers.0 (1 blocks)."]
    assert model.layers[0].up.weight.eq(0).float().mean() == 0.5
    assert torch.equal(model.layers[1].up.weight, dense.layers[1].up.weight), "a block changes as a whole"
    assert "forward" not in model.layers[2].__dict__


def test_warnings_of_solvers_are_in_the_report():
    def warning(weight, sparsity, pattern, *, gram):
        warnings.warn("the damping was raised", stacklevel=1)
        return MAGNITUDE(weight, sparsity, pattern)

    done = oneshot(stack(), data(), 0.5, solver=warning)
    assert done.warnings[0] == "layers.0.up.weight: the damping was raised"
    assert len(done.warnings) == 6


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.layers[0](x)
        if x.shape[0] > 2:
            x = self.layers[1](x)
        return self.layers[2](x)


def test_a_block_that_some_batches_do_not_run():
    with pytest.raises(ValueError, match=r"batch 1 does not run layers\.1"):
        oneshot(Sometimes(), [torch.randn(3, 4), torch.randn(2, 4)], 0.5)
    done = oneshot(Sometimes(), [torch.randn(2, 4)], 0.5)
    assert done.left_alone["in a block that the batches never ran"] == ("layers.1.weight",)


def test_blocks_and_what_is_left_alone_within():
    assert list(find_blocks(stack())) == ["layers.0", "layers.1", "layers.2"]
    assert list(find_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))) == ["0", "2"]
    mixed = nn.ModuleList([Block2(), nn.Sequential(nn.Linear(8, 8))])
    assert list(find_blocks(nn.ModuleDict({"layers": mixed}))) == ["layers.0", "layers.1"]
    plain = nn.Sequential(nn.Embedding(9, 8), Block2(), Block2(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), Block2())
    assert list(find_blocks(plain)) == ["1", "2", "4"]
    assert list(find_blocks(nn.Sequential(plain, nn.Linear(8, 9)))) == ["0.1", "0.2", "0.4"]
    t5 = make("t5")
    assert list(find_blocks(t5)) == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    assert left_alone_within(find_blocks(t5)["encoder.block.0"]) == {
        "layer.0.SelfAttention.relative_attention_bias.weight": "embeddings"
    }


class Twice(Block2):
    """The last product is one that was there before, with another input."""

    def forward(self, x):
        return super().forward(super().forward(x))


@pytest.mark.parametrize("kind", [Block2, Twice])
def test_products_that_nothing_needs_are_not_computed(kind):
    torch.manual_seed(0)
    blocks, computed = nn.ModuleList(kind() for _ in range(2)), {}
    for name, module in blocks.named_modules():
        if isinstance(module, nn.Linear):
            computed[name] = 0
            module.register_forward_hook(lambda *_, name=name: computed.__setitem__(name, computed[name] + 1))
    model = nn.Sequential(*blocks)
    found = [torch.randn(3, 8) for _ in range(5)]
    inputs = [x.clone() for x in found]
    if kind is Twice:
        inputs += [blocks[0].down(blocks[0].up(x).relu()) + x for x in found]
    tokens = torch.cat(inputs)
    expected = tokens.T @ tokens
    computed |= dict.fromkeys(computed, 0)
    grams = []
    oneshot(model, found, 0.5, solver=lambda w, s, p, *, gram: grams.append(gram) or sparsegpt(w, s, p, gram=gram))
    torch.testing.assert_close(grams[0].cpu(), expected)
    if kind is Twice:
        assert computed == {"0.up": 22, "0.down": 22, "1.up": 12, "1.down": 12}
    else:  # one batch to see that no block runs twice; then each is seen and, before the last block, handed on
        assert computed == {"0.up": 11, "0.down": 7, "1.up": 6, "1.down": 2}


def test_a_pattern_that_no_weight_fits():
    model = nn.Sequential(Block2(), Block2())
    with pytest.raises(ValueError, match=r"no weight fits 2:5, such as 0\.up\.weight of shape \(12, 8\)"):
        oneshot(model, [torch.randn(3, 8)], pattern=NM(2, 5))


def test_a_plain_sequential_whose_blocks_stand_between_other_layers():
    model = nn.Sequential(nn.Embedding(9, 8), Block2(), Block2(), nn.Linear(8, 9))
    whole = copy.deepcopy(model)
    done = oneshot(model, [torch.randint(9, (4, 6)) for _ in range(3)], 0.5)
    assert done.left_alone == {"outside the blocks": ("0.weight", "3.weight")}
    assert {layer.name.split(".")[0] for layer in done.layers} == {"1", "2"}
    for layer in done.layers:
        assert (model.get_parameter(layer.name) == 0).double().mean() == 0.5
    for outside in (0, 3):
        assert torch.equal(model[outside].weight, whole[outside].weight)


# ---- directories -------------------------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path):
    make("llama").save_pretrained(tmp_path / "dense", max_shard_size="8KB")
    (tmp_path / "dense/tokenizer.json").write_text("{}")
    return tmp_path / "dense"


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_directory_keeps_everything_but_the_pruned_bytes(llama, tmp_path):
    before = contents(llama)
    done = oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out", arguments={"command": "secateur oneshot"})
    assert contents(llama) == before, "the source"
    after = contents(tmp_path / "out")
    assert after.keys() == before.keys() | {"secateur.json"}
    assert len([name for name in before if name.endswith(".safetensors")]) > 1
    for name, content in before.items():
        if name.endswith(".safetensors"):
            length = 8 + int.from_bytes(content[:8], "little")
            assert after[name][:length] == content[:length], "the header"
            assert len(after[name]) == len(content)
        else:
            assert after[name] == content, name
    record = json.loads(after["secateur.json"])
    assert record["method"] == "oneshot"
    assert record["arguments"] == {"command": "secateur oneshot"}
    assert record["solver"] == "admm"
    assert record["data"] == {"sha256": digest(batches("llama"))}
    assert record["sparsity"]["targets"] == done.sparsity == 0.5
    assert set(record["pruned"].values()) == {0.5}
    assert record["removed"]["model.layers.0.mlp.down_proj.weight"] == 16 * 24 // 2
    everything = [*record["pruned"], *(name for names in record["left_alone"].values() for name in names)]
    assert sorted(everything) == sorted(make("llama").state_dict())
    assert record["layers"]["model.layers.0.mlp.down_proj.weight"]["tokens"] == 60


def dying(moment, source, out):
    """`oneshot` in a process that is killed at the n-th call of a function; writes down how many tensors it wrote."""
    events = []

    def before(function, name):
        def call(*arguments, **keywords):
            events.append(name)
            if f"{name}:{events.count(name)}" == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return call

    block_files.write_tensor = before(block_files.write_tensor, "write")
    resumable.copy_tree = before(resumable.copy_tree, "copy")
    resumable.Unfinished._write = before(resumable.Unfinished._write, "journal")
    resumable.Unfinished.publish = before(resumable.Unfinished.publish, "publish")
    done = oneshot(source, batches("llama"), 0.5, out=out)
    out.with_name("counts.json").write_text(json.dumps([events.count("write"), len(done.layers)]))


def test_a_run_that_was_killed_at_any_moment_goes_on_to_the_same_bytes(llama, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert forked(lambda: dying("never", llama, whole)) == 0
    # while copying, before the journal says so; in the first block; written, but not yet in the journal; in the second
    # block; before the record; at the end
    for moment in ("copy:1", "journal:1", "write:3", "journal:2", "write:4", "publish:1"):
        assert os.WTERMSIG(forked(lambda: dying(moment, llama, out))) == signal.SIGKILL, moment  # noqa: B023
        assert not out.exists()
        assert (tmp_path / "out.unfinished" / JOURNAL).is_file()
    assert forked(lambda: dying("never", llama, out)) == 0
    assert json.loads((tmp_path / "counts.json").read_text()) == [0, 14], "what is finished is not written again"
    assert contents(out) == contents(whole)
    assert not (tmp_path / "out.unfinished").exists()


def test_a_run_goes_on_only_with_the_same_request(llama, tmp_path, monkeypatch):
    class Interruption(Exception):
        pass

    def interrupt(layer):
        if layer.block.endswith("1"):
            raise Interruption

    with pytest.raises(Interruption):
        oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out", on_layer=interrupt)
    unfinished = tmp_path / "out.unfinished"
    for keywords, difference in (
        ({"sparsity": 0.6}, "sparsity 0.5, not 0.6"),
        ({"solver": functools.partial(admm, damping=0.1)}, r'solver "admm", not "admm\(damping=0.1\)"'),
        ({"pattern": Rows()}, r"pattern "),
        ({"batches": batches("llama", count=2)}, "data "),
        ({"exclude": "*q_proj*"}, r'exclude null, not \["\*q_proj\*"\]'),
    ):
        with pytest.raises(CheckpointError, match=difference) as caught:
            oneshot(llama, **{"batches": batches("llama"), "sparsity": 0.5, "out": tmp_path / "out", **keywords})
        assert "Run the same command again to finish it, or remove it" in str(caught.value)
    seen = []
    done = oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out", on_layer=seen.append)
    assert {layer.block for layer in seen} == {"model.layers.1"}, "the first block is not solved again"
    assert len(done.layers) == 14
    assert not unfinished.exists()
    oneshot(llama, batches("llama"), 0.5, out=tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def interrupted(source, out):
    """`oneshot`, stopped when the first block is done."""

    class Interruption(Exception):
        pass

    def interrupt(layer):
        if layer.block.endswith("1"):
            raise Interruption

    with pytest.raises(Interruption):
        oneshot(source, batches("llama"), 0.5, out=out, on_layer=interrupt)
    return out.with_name(f"{out.name}.unfinished")


def test_a_run_does_not_go_on_with_other_weights_of_the_same_shapes(llama, tmp_path):
    from safetensors.torch import load_file, save_file

    interrupted(llama, tmp_path / "out")
    shard = max(llama.glob("*.safetensors"))
    before = shard.read_bytes()
    length = 8 + int.from_bytes(before[:8], "little")
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard, metadata={"format": "pt"})
    assert shard.read_bytes()[:length] == before[:length], "the header"
    assert len(shard.read_bytes()) == len(before)
    with pytest.raises(CheckpointError, match=rf"{re.escape(shard.name)}: changed since .* was begun"):
        oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_kill_while_the_record_is_written_leaves_nothing(llama, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    oneshot(llama, batches("llama"), 0.5, out=whole)
    steps = 0

    def body(step):
        def dying(function):
            def call(*arguments, **keywords):
                nonlocal steps
                steps += 1
                if steps == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **keywords)

            return call

        original = blockwise.write_record

        def write(*arguments):  # from here on each file that is closed, given a mode or renamed
            for name in ("fsync", "replace", "rename", "chmod"):
                setattr(os, name, dying(getattr(os, name)))
            original(*arguments)

        blockwise.write_record = write
        oneshot(llama, batches("llama"), 0.5, out=out)

    for step in range(1, 5):
        assert os.WTERMSIG(forked(lambda: body(step))) == signal.SIGKILL, step  # noqa: B023
        if not out.exists():
            oneshot(llama, batches("llama"), 0.5, out=out)
        assert contents(out) == contents(whole), step
        assert not (tmp_path / "out.unfinished").exists(), step
        shutil.rmtree(out)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda j: j["blocks"][0].update(name="model.layers.7"),
            r"blocks\[0\].name is model.layers.7, which is no block",
        ),
        (lambda j: j["blocks"].append(j["blocks"][0]), r"blocks\[1\].name is model.layers.0, .* or is there twice"),
        (
            lambda j: j["blocks"][0]["layers"][0].update(name="model.norm.weight"),
            r"layers\[0\].name is model.norm",
        ),
        (lambda j: j["blocks"][0]["layers"][1].update(shape=[2, -2]), r"layers\[1\].shape\[1\] must be a whole number"),
        (lambda j: j["blocks"][0]["layers"][0].update(error="none"), r"layers\[0\].error must be a number"),
        (lambda j: j["blocks"][0]["layers"][0].pop("tokens"), r"layers\[0\].tokens is missing"),
        (lambda j: j["blocks"][0].update(tensors=[]), r"blocks\[0\].tensors must be an object"),
        (
            lambda j: next(iter(j["blocks"][0]["tensors"].values())).update(removed=1.5),
            "removed must be a whole number",
        ),
        (lambda j: j["facts"].pop("sparsities"), "facts.sparsities is missing"),
        (lambda j: j["facts"]["sparsities"].popitem(), "facts.sparsities is of other weights"),
        (lambda j: j["facts"]["sparsities"].update({"model.layers.0.mlp.up_proj.weight": 2}), "at most 1, not 2"),
        (lambda j: j["facts"].update(left_alone={"excluded": "all"}), "facts.left_alone.excluded must be a list"),
    ],
)
def test_a_journal_of_what_the_model_has_not_is_refused(llama, tmp_path, damage, message):
    journal = interrupted(llama, tmp_path / "out") / JOURNAL
    found = json.loads(journal.read_text())
    damage(found)
    found["sha256"] = resumable._digest(found)
    journal.write_text(json.dumps(found))
    with pytest.raises(
        CheckpointError, match=rf"journal\.json: damaged: .*{message}.* Remove .* to begin anew"
    ) as caught:
        oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_files_and_configurations_that_promise_too_much_are_refused_at_once(llama, tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file
    from transformers import core_model_loading

    kept = json.loads((llama / "config.json").read_text())
    for config in ({"num_hidden_layers": 10**7}, {"num_hidden_layers": 2, "text_config": {"n_layers": 10**7}}):
        (llama / "config.json").write_text(json.dumps({**kept, **config}))
        with pytest.raises(CheckpointError, match="layers is 10000000, and the files hold 21 tensors"):
            oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    (llama / "config.json").write_text(json.dumps({**kept, "num_hidden_layers": 40}))
    with monkeypatch.context() as patched:
        patched.setattr(block_files, "most_parameters", lambda names: 50)
        with pytest.raises(CheckpointError, match="asks for more than 50 parameters, and the files hold 21 tensors"):
            oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    (llama / "config.json").write_text(json.dumps({**kept, "num_hidden_layers": 3}))
    shard = min(llama.glob("*.safetensors"))
    (llama / "model.safetensors.index.json").unlink()
    many = {f"model.layers.{number}.junk.weight": torch.zeros(0) for number in range(11_000)}
    save_file(load_file(shard) | many, shard, metadata={"format": "pt"})
    monkeypatch.setattr(core_model_loading, "rename_source_key", None)  # takes a second for so many
    with pytest.raises(CheckpointError, match="holds 11,000 tensors that LlamaForCausalLM has no place for"):
        oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")


def test_a_source_with_a_folder_of_our_own_name(llama, tmp_path):
    (llama / ".secateur").mkdir()
    (llama / ".secateur/journal.json").write_text("theirs")
    oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    assert (tmp_path / "out/.secateur/journal.json").read_text() == "theirs"


def test_the_record_of_a_source_is_carried_on_or_refused(llama, tmp_path):
    (llama / "secateur.json").write_text('{"method": "shrink"}')
    oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    assert json.loads((tmp_path / "out/secateur.json").read_text())["previous"]["method"] == "shrink"
    (llama / "secateur.json").write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    for call in (
        lambda out: oneshot(llama, batches("llama"), 0.5, out=out),
        lambda out: sparsify_checkpoint(llama, out, 0.5),
        lambda out: shrink_checkpoint(llama, out, 0.5),
    ):
        with pytest.raises(
            CheckpointError, match=r"secateur\.json: damaged: .*nested too deeply.*; remove it"
        ) as caught:
            call(tmp_path / "again")
        assert "\n" not in str(caught.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]


def test_errors_of_directories(llama, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def refused(message, source=llama, **keywords):
        with pytest.raises((CheckpointError, ValueError), match=message) as caught:
            oneshot(source, **{"batches": batches("llama"), "sparsity": 0.5, "out": out, **keywords})
        assert "\n" not in str(caught.value)
        assert not out.exists()
        assert not (tmp_path / "out.unfinished").exists()

    refused("name the one to write with out=", out=None)
    refused("no such directory", source=tmp_path / "nowhere")
    refused("lies inside the input", out=llama / "below")
    refused("no such directory; create it first", out=tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path)
    for name in (".", "..", "/", ""):
        refused("already exists; nothing is overwritten", out=name)
    (tmp_path / "taken").mkdir()
    refused("already exists", out=tmp_path / "taken")
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    config = json.loads((llama / "config.json").read_text())

    def configured(**changes):
        (broken / "config.json").write_text(json.dumps({**config, **changes}))

    configured(architectures=["NoSuchModel"])
    refused("names the architecture NoSuchModel", source=broken)
    configured(quantization_config={"quant_method": "gptq"})
    refused("is quantized; prune the original", source=broken)
    configured(intermediate_size=32)
    refused(r"mlp\.down_proj\.weight has shape \(16, 24\), and its config.json asks for \(16, 32\)", source=broken)
    configured(num_hidden_layers=3)
    refused(r"model\.layers\.2\.self_attn\.q_proj\.weight, of shape \(16, 16\), is in no shard", source=broken)
    (broken / "config.json").unlink()
    refused("has no config.json", source=broken)
    (broken / "adapter_config.json").write_text("{}")
    refused("holds an adapter and no model", source=broken)
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.unlink()
    refused(re.escape(shard.name), source=broken)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    refused("1e-09 GB are free")


def test_the_record_is_json(llama, tmp_path):
    def strict(word):
        raise AssertionError(f"{word} is no JSON")

    arguments = {"batches": batches("llama"), "sparsity": 0.5, "solver": MAGNITUDE, "out": tmp_path / "out"}
    for wrong in (math.nan, math.inf, object()):
        with pytest.raises(ValueError, match=r"arguments= is what secateur\.json shall say, as JSON"):
            oneshot(llama, **arguments, arguments={"seed": wrong})
        assert not (tmp_path / "out.unfinished").exists()
    source = shutil.copytree(llama, tmp_path / "source")
    (source / "secateur.json").write_text('{"method": "oneshot", "layers": {"error": NaN}}')
    oneshot(source, **arguments)
    record = json.loads((tmp_path / "out" / "secateur.json").read_text(), parse_constant=strict)
    assert record["previous"] == {"method": "oneshot", "layers": {"error": None}}


def test_a_full_disk_keeps_the_finished_blocks(llama, tmp_path, monkeypatch):
    original, writes = block_files.write_tensor, []

    def full(path, entry, tensor):
        writes.append(entry.name)
        if len(writes) == 9:
            raise OSError(28, "No space left on device")
        original(path, entry, tensor)

    monkeypatch.setattr(block_files, "write_tensor", full)
    with pytest.raises(CheckpointError, match="the disk is full; free space and run the same command again, the 1"):
        oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    oneshot(llama, batches("llama"), 0.5, out=tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_name_that_is_taken_in_the_meantime_costs_no_work(llama, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="was created by somebody else in the meantime; move it"):
        oneshot(llama, batches("llama"), 0.5, out=out, on_layer=lambda _: out.mkdir(exist_ok=True))
    out.rmdir()
    solved = []
    oneshot(llama, batches("llama"), 0.5, out=out, on_layer=solved.append)
    assert not solved
    assert (out / "secateur.json").exists()


def test_two_processes_do_not_work_on_one_directory(llama, tmp_path):
    def second(layer):
        with pytest.raises(CheckpointError, match="another process is at work here"):
            oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")

    oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out", on_layer=second)


def test_a_wider_dtype_in_the_file_keeps_what_is_not_pruned(tmp_path):
    from safetensors.torch import load_file, save_file

    make("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    tensors = load_file(tmp_path / "dense/model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = torch.randn(16, 24)  # float32 among bfloat16
    save_file(tensors, tmp_path / "dense/model.safetensors", metadata={"format": "pt"})
    oneshot(tmp_path / "dense", batches("llama"), 0.5, solver=WANDA, out=tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")[name]
    assert found.dtype == torch.float32
    kept = found.ne(0)
    assert int(kept.sum()) == 16 * 24 // 2
    assert torch.equal(found[kept], tensors[name][kept])


def test_the_digest_tells_batches_apart():
    one = [{"a": torch.tensor([1, 2]), "b": torch.tensor([3])}]
    assert digest(one) == digest([{"b": torch.tensor([3]), "a": torch.tensor([1, 2])}])
    others = [
        [{"a": torch.tensor([1, 2]), "b": torch.tensor([4])}],
        [{"a": torch.tensor([1, 2]).int(), "b": torch.tensor([3])}],
        [{"a": torch.tensor([[1, 2]]), "b": torch.tensor([3])}],
        [{"a": torch.tensor([1, 2])}, {"b": torch.tensor([3])}],
        [(torch.tensor([1, 2]), torch.tensor([3]))],
    ]
    assert len({digest(each) for each in [one, *others]}) == 6
