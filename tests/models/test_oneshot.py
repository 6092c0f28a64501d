"""`oneshot`: a block is pruned by what reaches it from the pruned blocks before it, all its matrices at once."""

import contextlib
import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from secateur import NM, Block, Channels, Rows, Unstructured, allocation, criteria
from secateur.allocation import by_name, owl, progression, uniform
from secateur.checkpoints import request_of
from secateur.models import OneShot, oneshot
from secateur.models.in_directory import DenseScores
from secateur.models.jobs import Layer
from secateur.models.solving import OneShotRequest, digest, held_batches
from secateur.solvers import admm, alps, dsnot, from_criterion, sparsegpt, with_refit
from secateur.support import to_int8
from support.families import batches, make
from support.stacks import MAGNITUDE, WANDA, data, stack
from support.told import lines_of, tables_of


def test_how_samples_are_batched_changes_no_mask():
    one, other = stack(), stack()
    oneshot(one, data(), 0.5, solver=WANDA)
    oneshot(other, [torch.cat(data()[:3]), data()[3]], 0.5, solver=WANDA)
    for name, weight in one.state_dict().items():
        torch.testing.assert_close(weight, other.state_dict()[name])
        assert torch.equal(weight == 0, other.state_dict()[name] == 0)


@pytest.mark.parametrize("solver", ["sparsegpt", "magnitude"])
def test_what_is_kept_is_rounded_and_made_up_for(solver):
    model = stack(width=8)
    done = oneshot(model, data(), 0.5, solver=solver, values="int8")
    assert all(0.5 <= layer.sparsity < 0.6 for layer in done.layers)
    for layer in model.layers:
        for weight in (layer.up.weight, layer.down.weight):
            numbers, scales = to_int8(weight)
            assert torch.equal(numbers * scales[:, None], weight)


def test_scores_that_compare_within_an_output_compete_there_unless_told_otherwise():
    model = stack()
    oneshot(model, data(), 0.5, solver=WANDA)
    for layer in model.layers:
        assert (layer.up.weight.eq(0).sum(1) == 4).all()
        assert (layer.down.weight.eq(0).sum(1) == 6).all()
    model = stack()
    oneshot(model, data(), 0.5, solver=MAGNITUDE)
    assert any((layer.up.weight.eq(0).sum(1) != 4).any() for layer in model.layers)
    one, other = stack(), stack()
    oneshot(one, data(), 0.5, solver=MAGNITUDE, pattern="rows")
    oneshot(other, data(), 0.5, solver=MAGNITUDE, pattern=Rows())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_each_layer_is_told_when_it_is_solved_in_the_order_of_the_model():
    told = []
    done = oneshot(stack(), data(), 0.5, on_layer=told.append)
    assert [layer.name for layer in told] == [
        f"layers.{at}.{name}.weight" for at in range(3) for name in ("up", "down")
    ]
    assert list(done.layers) == told


@pytest.mark.parametrize(
    ("keywords", "kind", "message"),
    [
        ({"solver": from_criterion(criteria.snip)}, TypeError, "asks for grad; a walk over blocks gathers gram"),
        ({"solver": "magnet"}, ValueError, "no solver is called 'magnet'"),
        ({"values": "int4"}, ValueError, "values is 'int8' or None, not 'int4'"),
        ({"pattern": "diagonal"}, ValueError, "no pattern is called 'diagonal'"),
        ({"allocate": "fair"}, ValueError, "no allocation is called 'fair'"),
        ({"model": "nowhere"}, ValueError, r"nowhere is a directory, which is not changed; .* out="),
    ],
)
def test_what_is_wrong_at_the_door_changes_nothing(keywords, kind, message):
    model = keywords.pop("model", None) or stack()
    before = copy.deepcopy(model)
    with pytest.raises(kind, match=message):
        oneshot(model, data(), 0.5, **keywords)
    if isinstance(model, nn.Module):
        assert all(torch.equal(a, b) for a, b in zip(before.parameters(), model.parameters(), strict=True))


# ---- What a walk is asked for, and the batches it goes through. ----


@pytest.mark.parametrize("form", ["pairs", "lists", "loader", "generator", "named"])
def test_batches_are_what_a_dataloader_yields(form):
    """Of ``(inputs, target)`` the inputs are run; whatever holds them, the weights become the same."""
    x = torch.cat(data())
    loader = DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=6)
    forms = {
        "pairs": [(each, torch.zeros(6)) for each in data()],
        "lists": [[each, torch.zeros(6), "another target"] for each in data()],
        "loader": loader,
        "generator": (batch for batch in loader),
        "named": [{"x": each} for each in data()],
    }
    plain, model = stack(), stack()
    oneshot(plain, data(), 0.5)
    oneshot(model, forms[form], 0.5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True))


def test_batches_are_held_once_and_must_be_some():
    every, share = held_batches(iter([1, 2, 3]))
    assert list(every) == list(share) == [1, 2, 3]
    with pytest.raises(ValueError, match="there are no batches"):
        held_batches([])
    masked = {"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.zeros(1, 4).long()}
    for nothing in ([torch.zeros(0, 8)], [(torch.zeros(0, 8), torch.zeros(0))] * 2, [masked]):
        with pytest.raises(ValueError, match="the batches hold no token and no sample, or all is padding"):
            held_batches(nothing)
    one_of_them = [torch.zeros(0, 8), torch.ones(1, 8)]
    assert held_batches(one_of_them) == (one_of_them, one_of_them)
    for single in (torch.ones(2, 5), {"x": torch.ones(2, 5)}, "text"):
        with pytest.raises(TypeError, match=r"an iterable of batches, not a .*; pass \[batch\]"):
            held_batches(single)


def test_a_run_that_goes_on_must_have_the_same_settings():
    def said(iterations, share):
        solver, allocate = with_refit(admm, iterations=iterations), by_name({"*.down_proj.weight": share})
        return request_of("oneshot", OneShotRequest(0.5, solver, Unstructured(), allocate, ("gram",)))

    assert said(3, 0.1) == said(3, 0.1)
    assert said(3, 0.1) != said(4, 0.1) != said(4, 0.2)
    assert said(3, 0.1)["solver"] == "with_refit(admm, iterations=3, tolerance=0.001)"
    assert said(3, 0.1)["allocate"] == "by_name(shares={'*.down_proj.weight': 0.1}, otherwise=None)"


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


# ---- What oneshot says: sums as the result holds them, every reason, every warning, every expert without tokens. ----


def layer(number, shape, sparsity, error, **more):
    return Layer(
        f"blocks.{number}.up.weight", f"blocks.{number}", shape, sparsity, error, more.pop("tokens", 64), 0.25, **more
    )


DONE = OneShot(
    (
        layer(0, (4, 8), 0.5, 0.125),
        layer(1, (16, 8), 0.75, 0.25, warnings=("damped \x1b[2J twice",)),
        layer(2, (2, 2), 0.0, None, tokens=0, without_tokens=(3, 5)),
    ),
    {"routers": ("a.gate", "b.gate"), "outside the blocks": ("head.weight",)},
    12.34,
    Path("out[red]"),
)


def test_every_reason_warning_and_idle_expert_is_said():
    lines = lines_of(DONE.content())
    assert "Left alone, routers: 2, such as a.gate." in lines
    assert "Left alone, outside the blocks: 1, such as head.weight." in lines
    assert r"Warning: blocks.1.up.weight: damped \x1b[2J twice" in lines
    assert [line for line in lines if "no token was sent to" in line] == [
        "1 weights have experts that no token was sent to, and were pruned by magnitude there, such as "
        "blocks.2.up.weight; more calibration text may reach them."
    ]
    assert any(line.startswith("Pruned 3 weights, 68.3% of their entries;") for line in lines)
    assert lines[-1] == "Wrote out[red] (12.3 s); secateur.json in it says what was done."


def test_a_row_a_weight_in_their_order():
    table = tables_of(DONE.content())["layers"]
    assert [row[:5] for row in table.texts()] == [
        ["blocks.0.up.weight", "4×8", "50.0%", "0.1250", "64"],
        ["blocks.1.up.weight", "16×8", "75.0%", "0.2500", "64"],
        ["blocks.2.up.weight", "2×2", "0%", "no tokens", "0"],
    ]
    assert [row["experts_without_tokens"] for row in table.json()] == [[], [], [3, 5]]
    assert [chart.values for chart in table.charts] == [[0.125, 0.25, None], [0.5, 0.75, 0.0]]
    plain = tables_of(OneShot(DONE.layers[:2], {}, 1.0).content())["layers"]
    assert "experts_without_tokens" not in plain.json()[0]


# ---- How allocations share the sparsity out over a walk, and what they are asked about. ----


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


# ---- A block solved: errors are those of the layer's outputs, and what does not fit is named. ----


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
