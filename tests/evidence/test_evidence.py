"""What is collected is what the formulas say, from any batch and any layer, and the model is as it was."""

import contextlib
import copy
import itertools
import random
from collections import OrderedDict, UserDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import secateur.prune as prune
from secateur import attach, criteria, sparsify
from secateur.evidence import VOCABULARY, collect
from secateur.support import loss_of, moved, repeatable, run_batch, unchanged, unwrapped
from secateur.targets import find_targets
from support.forks import on_ranks

cross_entropy = functional.cross_entropy


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def pairs(count=3, size=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def close(found, expected, **tolerances):
    torch.testing.assert_close(found, expected, check_dtype=False, **tolerances)


# gradients


def by_hand(model, batches, power=1):
    total = {name: torch.zeros_like(weight) for name, weight in find_targets(model).items()}
    for x, y in batches:
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        for name, weight in find_targets(model).items():
            total[name] += weight.grad**power / len(batches)
    model.zero_grad()
    return total


def test_gradients_are_means_over_batches():
    model, batches = network(), pairs()
    found = collect(model, batches, ["grad", "grad_sq"], loss=cross_entropy)
    first, second = by_hand(model, batches), by_hand(model, batches, power=2)
    assert list(found) == list(find_targets(model))
    for name, entry in found.items():
        assert list(entry) == ["grad", "grad_sq"]
        close(entry["grad"], first[name])
        close(entry["grad_sq"], second[name])


def test_batches_of_one_example_give_the_fisher_diagonal():
    model, ((x, y),) = network(), pairs(1)
    found = collect(model, zip(x.split(1), y.split(1), strict=True), "grad_sq", loss=cross_entropy)

    def nll(values, one, target):
        return cross_entropy(torch.func.functional_call(model, values, one[None]), target[None])

    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    each = torch.func.vmap(torch.func.grad(nll), (None, 0, 0))(values, x, y)
    for name, entry in found.items():
        close(entry["grad_sq"], each[name].square().mean(0))


def test_hessian_product_is_that_of_the_explicit_hessian():
    model, batches = network(), pairs(2)
    found = collect(model, iter(batches), "hessian_grad", loss=cross_entropy)
    weights = {name: weight.detach() for name, weight in find_targets(model).items()}
    sizes = [weight.numel() for weight in weights.values()]

    def mean_loss(flat):
        parts = flat.split(sizes)
        values = {name: part.view_as(weights[name]) for name, part in zip(weights, parts, strict=True)}
        losses = [cross_entropy(torch.func.functional_call(model, values, x), y) for x, y in batches]
        return torch.stack(losses).mean()

    flat = torch.cat([weight.reshape(-1) for weight in weights.values()])
    gradient = torch.func.grad(mean_loss)(flat)
    expected = torch.autograd.functional.hessian(mean_loss, flat) @ gradient
    close(torch.cat([entry["hessian_grad"].reshape(-1) for entry in found.values()]), expected)


def test_hessian_product_by_hand():
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
    # loss = (w·x)²: g = 2(w·x)x, H = 2xx', Hg = 4(w·x)|x|²x; w·x = 5, |x|² = 10
    found = collect(layer, [torch.tensor([[-1.0, 3.0]])], "hessian_grad", loss=lambda y: y.square().sum())
    close(found["weight"]["hessian_grad"], 4 * 5 * 10 * torch.tensor([[-1.0, 3.0]]))
    found = collect(layer, [torch.ones(1, 2)], "hessian_grad", loss=torch.sum)
    assert found["weight"]["hessian_grad"].tolist() == [[0, 0]]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(functional.scaled_dot_product_attention(q, k, v))


def test_hessian_product_passes_fused_attention():
    torch.manual_seed(0)
    found = collect(Attention(), [torch.randn(2, 4, 8)], "hessian_grad", loss=lambda y: y.square().mean())
    assert all(entry["hessian_grad"].any() for entry in found.values())


class Checkpointed(nn.Module):
    """One tied layer, run twice in checkpoints and once outside."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.layer, self.head = how, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        for _ in range(2):
            step = lambda x: torch.tanh(self.layer(x))  # noqa: E731
            x = step(x) if self.how is None else checkpoint(step, x, use_reentrant=self.how)
        return self.head(torch.tanh(self.layer(x)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(reentrant):
    batches = [(x.requires_grad_(), y) for x, y in pairs()]
    words = ["grad", "grad_sq", "input_norm"]
    found = collect(Checkpointed(reentrant), batches, words, loss=cross_entropy)
    expected = collect(Checkpointed(None), batches, words, loss=cross_entropy)
    for name, word in itertools.product(expected, words):
        close(found[name][word], expected[name][word])


def test_gradients_of_other_weights_are_never_held():
    model, batches = network(), pairs(2)
    held = []

    def forward(module, batch):
        out = module(batch[0])
        out.register_hook(lambda grad: held.append([p.grad is not None for p in module.parameters()]))
        module[0].weight.register_hook(lambda grad: held.append([p.grad is not None for p in module.parameters()]))
        return out

    weights = {"0.weight": model[0].weight}
    found = collect(model, batches, ["grad"], weights=weights, loss=cross_entropy, forward=forward)
    assert list(found) == ["0.weight"]
    assert held
    assert not any(map(any, held))
    close(found["0.weight"]["grad"], by_hand(model, batches)["0.weight"])


def test_frozen_weights_can_be_asked_for():
    model, batches = network(), pairs()
    expected = by_hand(model, batches)
    model.requires_grad_(False)
    found = collect(model, batches, ["grad"], loss=cross_entropy)
    close(found["2.weight"]["grad"], expected["2.weight"])
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_sparse_gradients_arrive_dense():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    weights = {"0.weight": model[0].weight}
    found = collect(model, [torch.tensor([1, 1, 3])], "grad", weights=weights, loss=lambda y: y.square().sum())
    assert found["0.weight"]["grad"].any(1).tolist() == [False, True, False, True, False]


def test_an_optimizer_that_steps_in_the_backward_pass_does_not():
    model, batches = network(), pairs()
    fired = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    collect(model, batches, "grad", loss=cross_entropy)
    assert not fired
    cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    assert len(fired) == 6


# statistics of inputs and outputs


def test_input_statistics_of_a_linear_layer():
    layer = nn.Linear(4, 3)
    batches = [torch.randn(5, 4) + 100, torch.randn(2, 7, 4)]
    x = torch.cat([batch.reshape(-1, 4) for batch in batches]).double()
    words = ["input_norm", "input_mean", "input_var", "output_norm", "gram"]
    entry = collect(layer, batches, words)["weight"]
    assert [tuple(entry[word].shape) for word in words] == [(1, 4), (1, 4), (1, 4), (3, 1), (4, 4)]
    assert all(tensor.dtype == torch.float32 for tensor in entry.values())
    close(entry["input_norm"][0], x.norm(dim=0).float())
    close(entry["input_mean"][0], x.mean(0).float())
    close(entry["input_var"][0], x.var(0, correction=0).float(), rtol=1e-5, atol=0)
    close(entry["gram"], (x.T @ x).float())
    empty = collect(layer, [*batches, torch.zeros(0, 4)], words)["weight"]
    assert all(torch.equal(empty[word], entry[word]) for word in words)
    close(entry["output_norm"][:, 0], layer.double()(x).detach().norm(dim=0).float())


def unfolded(layer, x):
    """(examples and places, inputs / groups and kernel) of each group of a 2-D convolution, by torch's own unfold."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    columns = functional.unfold(x, layer.kernel_size, dilation=layer.dilation, stride=layer.stride)
    rows = columns.movedim(1, -1).flatten(0, 1)
    return rows.reshape(len(rows), layer.groups, -1)


@settings(max_examples=40)
@given(st.data())
def test_convolutions_see_their_patches(data):
    draw = data.draw
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    kernel, stride = (draw(st.tuples(st.integers(1, 3), st.integers(1, 3))) for _ in range(2))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    same = draw(st.booleans()) and stride == (1, 1)
    padding = "same" if same else draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    layer = nn.Conv2d(4, 8, kernel, stride, padding, dilation, groups, padding_mode=mode).double()
    x = torch.randn(3, 4, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    words = ["input_norm", "input_mean", "input_var", "output_norm"] + (["gram"] if groups == 1 else [])
    entry = collect(layer, [x[:2], x[:0], x[2]], words)["weight"]
    rows = unfolded(layer, x)
    of_channel = torch.arange(8) // (8 // groups)  # the group of each output

    def expected(values):
        return values[of_channel].reshape(layer.weight.shape)

    close(entry["input_norm"].expand_as(layer.weight), expected(rows.norm(dim=0)))
    close(entry["input_mean"].expand_as(layer.weight), expected(rows.mean(0)))
    close(entry["input_var"].expand_as(layer.weight), expected(rows.var(0, correction=0)))
    close(entry["output_norm"].reshape(-1), layer(x).detach().movedim(1, 0).flatten(1).norm(dim=1))
    assert entry["input_norm"].shape[0] == (1 if groups == 1 else 8)
    if groups == 1:
        close(entry["gram"], rows[:, 0].T @ rows[:, 0])


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions_of_any_dimension_are_matrix_products(dimensions):
    torch.manual_seed(0)
    layer = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dimensions - 1](3, 5, 3, stride=2, padding=1, bias=False).double()
    x = torch.randn(2, 3, *[5] * dimensions, dtype=torch.float64)
    entry = collect(layer, [x], ["gram", "output_norm", "input_norm"])["weight"]
    W = layer.weight.detach().flatten(1)
    close((W @ entry["gram"] @ W.T).diagonal().sqrt(), entry["output_norm"].flatten())
    close(entry["gram"].diagonal().sqrt(), entry["input_norm"].flatten())


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_see_channels(groups):
    layer = nn.ConvTranspose2d(4, 6, 3, groups=groups)
    x = torch.randn(2, 4, 5, 5)
    entry = collect(layer, [x], ["input_norm", "input_mean", "output_norm"])["weight"]
    close(entry["input_norm"], x.movedim(1, 0).flatten(1).norm(dim=1).reshape(4, 1, 1, 1))
    close(entry["input_mean"], x.mean((0, 2, 3)).reshape(4, 1, 1, 1))
    outputs = layer(x).detach().movedim(1, 0).flatten(1).norm(dim=1).reshape(groups, 6 // groups)
    rows = entry["output_norm"].expand(4, -1, 1, 1)[..., 0, 0]
    close(rows, outputs.repeat_interleave(4 // groups, 0))
    close(collect(layer, [x[0]], "input_norm")["weight"]["input_norm"].flatten(), x[0].flatten(1).norm(dim=1))


def test_embeddings_count_tokens():
    layer = nn.Embedding(4, 3)
    ids = torch.tensor([[0, 2, 2], [2, 0, 1]])
    words = ["input_norm", "input_mean", "input_var", "output_norm"]
    entry = collect(layer, [ids], words, weights={"weight": layer.weight})["weight"]
    hot = functional.one_hot(ids.flatten(), 4).float()
    close(entry["input_norm"][:, 0], hot.norm(dim=0))
    close(entry["input_mean"][:, 0], hot.mean(0))
    close(entry["input_var"][:, 0], hot.var(0, correction=0))
    close(entry["output_norm"][0], layer(ids).detach().flatten(0, 1).norm(dim=0))


class Conv1D(nn.Module):
    """As transformers has it: x · W, with W (inputs, outputs)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))

    def forward(self, x):
        return x @ self.weight


def test_transformers_conv1d_has_its_inputs_first():
    layer, x = Conv1D(3, 4), torch.randn(2, 5, 4)
    entry = collect(layer, [x], ["input_norm", "output_norm", "gram"])["weight"]
    close(entry["input_norm"], x.flatten(0, 1).norm(dim=0)[:, None])
    close(entry["output_norm"], layer(x).detach().flatten(0, 1).norm(dim=0)[None])
    close(entry["gram"], x.flatten(0, 1).T @ x.flatten(0, 1))


@pytest.mark.parametrize("apart", [False, True])
def test_multihead_attention(apart):
    torch.manual_seed(0)
    sizes = {"kdim": 4, "vdim": 2} if apart else {}
    layer = nn.MultiheadAttention(6, 2, batch_first=True, **sizes)
    q, k, v = torch.randn(2, 5, 6), torch.randn(2, 3, sizes.get("kdim", 6)), torch.randn(2, 3, sizes.get("vdim", 6))
    found = collect(layer, [(q, k, v)], ["input_norm", "input_mean"], forward=lambda m, b: m(b[0], b[1], value=b[2]))
    norms = [each.flatten(0, 1).norm(dim=0) for each in (q, k, v)]
    means = [each.flatten(0, 1).mean(0) for each in (q, k, v)]
    if apart:
        for letter, norm in zip("qkv", norms, strict=True):
            close(found[f"{letter}_proj_weight"]["input_norm"], norm[None])
    else:
        for word, expected in (("input_norm", norms), ("input_mean", means)):
            close(found["in_proj_weight"][word], torch.stack(expected).repeat_interleave(6, 0))
    # what goes into out_proj is solved for from what comes out of it
    entry = collect(layer, [(q, k, v)], "gram", weights={"out_proj.weight": layer.out_proj.weight},
                    forward=lambda m, b: m(*b))["out_proj.weight"]  # fmt: skip
    out = layer(q, k, v)[0].detach().flatten(0, 1)
    x = torch.linalg.solve(layer.out_proj.weight.detach(), (out - layer.out_proj.bias.detach()).T).T
    close(entry["gram"], x.T @ x, rtol=1e-3, atol=1e-4)
    assert isinstance(layer.out_proj, nn.Linear)


def test_every_weight_of_a_transformer_layer_is_reached():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = collect(layer, [torch.randn(2, 5, 8)], "input_norm")
    assert set(found) == {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"}


class Language(nn.Module):
    """Token ids and a mask in, as transformers' models; tokens are flattened in the middle."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.flat, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.flat(self.embed(input_ids).reshape(-1, 4)).reshape(*input_ids.shape, 4)
        logits = self.head(hidden)
        loss = None if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def test_padded_tokens_are_left_out():
    model = Language()
    weights = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    padded = {"input_ids": torch.tensor([[1, 2, 3], [4, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    shorter = [{"input_ids": torch.tensor([[1, 2, 3]])}, {"input_ids": torch.tensor([[4]])}]
    words = ["input_norm", "input_mean", "output_norm"]
    found = collect(model, [padded], words, weights=weights)
    expected = collect(model, shorter, words, weights=weights)
    for name, word in itertools.product(weights, words):
        close(found[name][word], expected[name][word])


def test_calls_and_tied_layers_add_up():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(self.a(x)))

    model, x = Twice(), torch.randn(3, 4)
    a = model.a(x).detach()
    inputs = torch.cat([x, a, model.a(a).detach()])
    found = collect(model, [x], ["input_norm", "grad"], loss=lambda y: y.square().sum())
    assert list(found) == ["a.weight"]
    close(found["a.weight"]["input_norm"][0], inputs.norm(dim=0))
    model(x).square().sum().backward()
    close(found["a.weight"]["grad"], model.a.weight.grad)


def test_two_parameters_over_one_memory_are_one_weight():
    model, batches = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)), pairs()
    tied = copy.deepcopy(model)
    tied[1].weight = tied[0].weight
    model.load_state_dict(tied.state_dict())
    model[1].weight = nn.Parameter(model[0].weight.data)
    words = ["grad", "grad_sq", "hessian_grad", "flow", "input_norm"]
    found, expected = (collect(each, batches, words, loss=cross_entropy) for each in (model, tied))
    assert list(found) == ["0.weight"]
    for word in words:
        close(found["0.weight"][word], expected["0.weight"][word])
    both = collect(model, batches, words, loss=cross_entropy, weights=dict(model.named_parameters()))
    assert all(both["1.weight"][word] is both["0.weight"][word] for word in words)


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


# flow


def deep(layers=40, width=100):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, 10))


def test_flow_is_the_gradient_of_the_absolute_network():
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    model[0].weight.data = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]])
    model[2].weight.data = torch.tensor([[-7.0, 8.0]])
    found = collect(model, [(torch.randn(9, 3), "never looked at")], "flow")
    assert found["0.weight"]["flow"].tolist() == [[7.0] * 3, [8.0] * 3]
    assert found["2.weight"]["flow"].tolist() == [[6.0, 15.0]]
    assert found["0.weight"]["flow"].dtype == torch.float64


def test_flow_through_forty_layers_needs_float64():
    model = deep()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data *= 4
    state = copy.deepcopy(model.state_dict())
    found = collect(model, [torch.randn(4, 100)], "flow")
    for entry in found.values():
        assert entry["flow"].isfinite().all()
        assert (entry["flow"] > 0).all()
    assert max(entry["flow"].max() for entry in found.values()) > torch.finfo(torch.float32).max
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    # the same in float32
    x = {name: tensor.abs() for name, tensor in state.items()}
    out = torch.func.functional_call(model.eval(), x, torch.ones(1, 100)).sum()
    assert not out.isfinite()


def test_flow_takes_token_ids_mappings_and_forwards_as_they_are():
    model = Language()
    batch = UserDict(input_ids=torch.tensor([[1, 2, 3], [4, 0, 0]]), labels=torch.zeros(2, 3, dtype=torch.long))
    head = find_targets(model, include="head.weight")  # of a vocabulary, which is no target unless it is asked for
    found = collect(model, iter([batch]), "flow", weights=head)
    again = collect(model, [batch], "flow", weights=head, forward=lambda m, b: m(b["input_ids"])["logits"])
    close(found["head.weight"]["flow"], again["head.weight"]["flow"])
    hidden = functional.linear(model.embed.weight[[1, 2, 3]].abs(), model.flat.weight.abs(), model.flat.bias.abs())
    close(found["head.weight"]["flow"], hidden.sum(0).double().expand(9, 4))
    with pytest.raises(TypeError, match="flow sums the model's outputs, and there is no tensor in a str"):
        collect(model, [batch], "flow", forward=lambda m, b: "words")


def test_flow_respects_attached_masks():
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False))
    model[1].weight.data = torch.tensor([[2.0, 3.0]])
    attach(model, {"1.weight": torch.tensor([[True, False]])})
    found = collect(model, [torch.randn(1, 3)], ["flow", "input_norm", "grad"], loss=torch.sum)
    assert set(found) == {"0.weight", "1.weight_orig"}
    assert found["0.weight"]["flow"].tolist() == [[2.0] * 3, [0.0] * 3]
    assert found["1.weight_orig"]["flow"][0, 1] == 0
    assert found["1.weight_orig"]["grad"][0, 1] == 0
    assert prune.is_pruned(model)
    assert model[1].weight.dtype == torch.float32


def test_what_torchs_own_hooks_leave_behind_stays():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)
    weight = model[0].weight
    found = collect(model, pairs(), ["grad", "flow"], loss=cross_entropy)
    assert not found["0.weight_orig"]["flow"][model[0].weight_mask == 0].any()
    assert model[0].weight is weight


# the model is as it was


class Restless(nn.Module):
    """Everything that a forward pass can change."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("wide", torch.zeros(1).expand(4))

    def forward(self, x):
        self.seen = self.seen + 1
        random.random()
        np.random.random()  # noqa: NPY002
        return self.drop(self.norm(self.layer(x)))


def everything(model):
    return (
        [module.training for module in model.modules()],
        [(p.requires_grad, p.grad, None if p.grad is None else p.grad.clone(), p.clone()) for p in model.parameters()],
        [(id(b), b.clone()) for b in model.buffers()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()],
        torch.get_rng_state(),
        random.getstate(),
        str(np.random.get_state()),  # noqa: NPY002
    )


def assert_same(after, before):
    if isinstance(before, torch.Tensor):
        assert torch.equal(after, before)
    elif isinstance(before, list | tuple):
        for one, other in zip(after, before, strict=True):
            assert_same(one, other)
    else:
        assert after == before


def failing(*_):
    raise RuntimeError("stop here")


@pytest.mark.parametrize("size", [1e20, 1e30, 1e-25])
def test_numbers_whose_squares_float32_does_not_hold(size):
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 2, bias=False), torch.randn(33, 5)
    words = ["gram", "input_norm", "input_var", "output_norm"]
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


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("loss", [cross_entropy, failing])
@pytest.mark.parametrize("words", [["grad", "input_norm"], ["hessian_grad", "flow"], ["grad_sq", "gram"]])
def test_the_model_is_as_it_was(train, loss, words):
    model = Restless()
    model.norm.eval()
    model.layer.bias.requires_grad_(False)
    model.layer.weight.grad = torch.ones(3, 6)
    before = everything(model)
    with contextlib.nullcontext() if loss is cross_entropy else pytest.raises(RuntimeError, match="stop here"):
        collect(model, pairs(), words, loss=loss, train=train)
    assert_same(everything(model), before)


def test_training_mode_is_training_mode():
    model, modes = nn.Sequential(nn.Linear(6, 3), nn.Dropout()), []
    for train in (True, False):
        collect(model, pairs(1), "input_norm", train=train, forward=lambda m, b: modes.append(m.training) or m(b[0]))
    assert modes == [True, False]
    assert model.training


def test_unchanged_puts_back_even_what_the_body_replaced():
    model = Restless()
    before = everything(model)
    with pytest.raises(KeyError), unchanged(model):
        model.norm.running_mean.fill_(3)
        model.norm.running_var = torch.full((3,), 7.0)
        model.eval().requires_grad_(False)
        model.layer.weight.grad = torch.zeros(3, 6)
        torch.rand(3)
        raise KeyError
    assert_same(everything(model), before)


def test_under_no_grad_and_inference_mode():
    model, batches = network(), pairs()
    expected = by_hand(model, batches)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            found = collect(model, batches, "grad", loss=cross_entropy)
        close(found["0.weight"]["grad"], expected["0.weight"])


# batches


def test_batches_of_every_kind():
    x = torch.ones(2, 3)
    model = nn.Linear(3, 1)
    for batch in (x, (x, "target"), [x], {"input": x}):
        assert torch.equal(run_batch(model, batch), model(x))
    assert torch.equal(run_batch(model, 5, lambda m, b: m(x) * b), model(x) * 5)
    for batch, what in ((3, "not a int"), ((), "not an empty tuple"), ("x", "not a str")):
        with pytest.raises(TypeError, match=f"a batch is a tensor.*{what}; pass forward="):
            run_batch(model, batch)


def test_losses_of_every_kind():
    weight = torch.ones(2, requires_grad=True)
    total = weight.sum()
    assert loss_of(total, None) is not None
    for outputs in ({"loss": total}, type("Output", (), {"loss": total}), total):
        assert loss_of(outputs, weight).item() == 2
    assert loss_of(weight, (0, 3, 4), lambda out, a, b: out.sum() * a * b).item() == 24
    assert loss_of(weight, {"labels": 5}, lambda out, batch: out.sum() * batch["labels"]).item() == 10
    assert loss_of(weight, weight, lambda out: out.sum().reshape(1, 1)).shape == ()


@pytest.mark.parametrize(
    ("outputs", "loss", "error", "message"),
    [
        (torch.ones(2, 3), None, TypeError, r"outputs \(Tensor\) hold no loss; pass loss="),
        ({"loss": None}, None, TypeError, r"outputs \(dict\) hold no loss"),
        (torch.ones(3), lambda out: out, TypeError, r"the loss is a tensor of shape \(3,\), not one number"),
        (torch.ones(3), lambda out: 2.0, TypeError, "the loss is a float, not one number"),
        (torch.ones(3), lambda out: out.sum() * torch.inf, ValueError, "the loss of batch 7 is inf"),
        (torch.ones(3), lambda out: out.sum() * torch.nan, ValueError, "the loss of batch 7 is nan"),
        (torch.ones(3), torch.sum, ValueError, "depends on no parameter"),
    ],
)
def test_messages_of_losses(outputs, loss, error, message):
    with pytest.raises(error, match=message):
        loss_of(outputs, torch.ones(1), loss, 7)


def test_batches_move_with_their_kind():
    class Pair(NamedTuple):
        x: torch.Tensor
        y: int

    x, meta = torch.ones(2), torch.device("meta")
    for batch in (Pair(x, 3), UserDict(x=x), OrderedDict(x=x), [x, (x, "s")], (x,)):
        assert moved(batch, torch.device("cpu")) is batch
        assert moved(batch, None) is batch
        assert type(moved(batch, meta)) is type(batch)
    assert moved(UserDict(x=x), meta)["x"].device == meta
    assert moved(Pair(x, 3), meta).y == 3
    assert x.device.type == "cpu"


def test_generators_are_kept_only_if_they_must_be():
    generator = (batch for batch in pairs())
    assert len(repeatable(generator)) == 3
    batches = pairs()
    assert repeatable(batches) is batches


def test_wrappers_are_looked_through():
    model, batches = network(), pairs()
    expected = collect(model, batches, ["grad", "input_norm"], loss=cross_entropy)
    wrapped = nn.DataParallel(model)
    assert unwrapped(wrapped) is model
    found = collect(wrapped, batches, ["grad", "input_norm"], loss=cross_entropy)
    close(found["module.0.weight"], expected["0.weight"])


def test_compiled_models_run_uncompiled():
    model, batches = network(), pairs()
    calls = []

    def backend(graph, _):
        calls.append(graph)
        return graph.forward

    expected = collect(model, batches, ["grad", "input_norm", "flow"], loss=cross_entropy)
    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    found = collect(compiled, batches, ["grad", "input_norm", "flow"], loss=cross_entropy)
    close(found["_orig_mod.4.weight"], expected["4.weight"])
    inplace = copy.deepcopy(model)
    inplace.compile(backend=backend)
    close(collect(inplace, batches, ["grad", "input_norm"], loss=cross_entropy)["4.weight"]["grad"],
          expected["4.weight"]["grad"])  # fmt: skip
    assert not calls


# what is asked for


def test_a_criterion_names_what_is_collected():
    def score(weight, *, grad, input_norm):
        return weight * grad * input_norm

    found = collect(network(), pairs(), score, loss=cross_entropy)
    assert {tuple(entry) for entry in found.values()} == {("grad", "input_norm")}
    assert collect(network(), [], ["grad"], weights={}) == {}
    assert collect(network(), [], torch.abs) == {"0.weight": {}, "2.weight": {}, "4.weight": {}}


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: collect(network(), pairs(), ["colour"]), TypeError, "this call asks for .* collects: colour"),
        (lambda: collect(network(), pairs(), "movement"), TypeError, "movement adds up over training steps.*a Pruner"),
        (lambda: collect(network(), [], "grad"), ValueError, "there are no batches"),
        (lambda: collect(network(), pairs(), "grad"), TypeError, "pass loss="),
        (lambda: collect(network(), [3], "flow"), TypeError, "pass forward="),
        (
            lambda: collect(network(), pairs(), "grad", weights={"w": torch.ones(2, 2)}),
            ValueError,
            r"w is no parameter of this Sequential; pass weights=find_targets\(model\)",
        ),
        (
            lambda: collect(Unused(), pairs(), "input_norm"),
            ValueError,
            r"unused.weight: .* never ran unused \(Linear\)",
        ),
        (
            lambda: collect(Unused(), pairs(), "grad", loss=cross_entropy),
            ValueError,
            "unused.weight: the loss of no batch depends on it",
        ),
        (lambda: collect(Unused(), pairs(), "flow"), ValueError, "unused.weight: the outputs do not depend on it"),
        (
            lambda: collect(nn.Sequential(nn.LSTM(6, 3)), pairs(), "input_norm"),
            TypeError,
            r"0.weight_ih_l0 belongs to 0 \(LSTM\), of which input_norm can't be gathered; leave it out with exclude=",
        ),
        (lambda: collect(Bare(), pairs(), "gram"), TypeError, r"weight belongs to \(Bare\), of which gram"),
        (
            lambda: collect(nn.Conv2d(4, 4, 1, groups=2), pairs(), ["gram", "input_norm"]),
            TypeError,
            r"weight belongs to \(Conv2d\), of which gram can't",
        ),
        (
            lambda: collect(nn.Linear(2, 2), [torch.full((1, 2), torch.inf)], "input_norm"),
            ValueError,
            "weight: input_norm has entries that are NaN or infinite",
        ),
        (
            lambda: collect(network(), pairs(), "flow", forward=lambda m, b: torch.no_grad()(m)(b[0])),
            ValueError,
            "the outputs depend on no weight",
        ),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_weight_that_is_two_kinds_of_layer_is_refused():
    model = Language(tied=True)
    batches = [{"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[2, 3]])}]
    weights = {"embed.weight": model.embed.weight}
    with pytest.raises(TypeError, match=r"embed.weight is shared by embed \(Embedding\) and head \(Linear\)"):
        collect(model, batches, "input_norm", weights=weights)
    assert collect(model, batches, "grad", weights=weights)["embed.weight"]["grad"].any()


def test_recurrent_weights_have_gradients():
    found = collect(nn.LSTM(3, 4, batch_first=True), [torch.randn(5, 2, 3)], ["grad", "hessian_grad", "flow"],
                    loss=lambda out: out[0].square().mean())  # fmt: skip
    assert all(tensor.any() for entry in found.values() for tensor in entry.values())


def test_every_word_has_a_meaning():
    assert all(len(meaning) > 20 and not meaning.endswith(".") for meaning in VOCABULARY.values())


# ranks


def on_each_rank(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    words = ["grad", "grad_sq", "input_norm", "input_var", "output_norm", "gram"]
    batches = pairs(4)
    expected = collect(network(), batches, [*words, "hessian_grad", "flow"], loss=cross_entropy)
    replicated = nn.parallel.DistributedDataParallel(network())
    # uneven: three batches here, one there
    mine = batches[:3] if rank == 0 else batches[3:]
    found = collect(replicated, mine, [*words, "hessian_grad", "flow"], loss=cross_entropy)
    for name, entry in expected.items():
        for word, tensor in entry.items():
            close(found[f"module.{name}"][word], tensor)
    close(collect(replicated.module, mine, "gram")["0.weight"]["gram"], expected["0.weight"]["gram"])
    x, y = batches[0]
    cross_entropy(replicated(x), y).backward()  # the wrapper works as before
    close(replicated.module[0].weight.grad, by_hand(network(), batches[:1])["0.weight"])

    mesh = init_device_mesh("cpu", (2,))
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mine = batches[2 * rank : 2 * rank + 2]
    found = collect(model, mine, [word for word in words if word != "grad_sq"], loss=cross_entropy)
    for name, entry in found.items():
        assert entry["grad"].placements == find_targets(model)[name].placements
        for word, tensor in entry.items():
            close(tensor.full_tensor(), expected[name][word])
        scores = find_targets(model)[name].detach().abs() * entry["input_norm"] + entry["grad"]
        assert scores.placements == entry["grad"].placements
    outermost, plain = network(), network()
    fully_shard(outermost, mesh=mesh)
    for each, own in ((outermost, mine), (plain, batches)):
        sparsify(each, 0.8, criterion=criteria.wanda, batches=own, rounds=3)
        sparsify(each, 0.9, criterion=criteria.snip, batches=own, loss=cross_entropy, rounds=2)
    for name, weight in find_targets(outermost).items():
        assert torch.equal(weight.full_tensor(), plain.get_parameter(name))
    close(outermost(x), plain(x))
    with pytest.raises(TypeError, match=r"0.weight is sharded, and flow can't be gathered on shards"):
        collect(model, mine, "flow")
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")
def test_ranks_agree(tmp_path):
    on_ranks(on_each_rank, str(tmp_path))
