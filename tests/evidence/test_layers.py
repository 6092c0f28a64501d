"""How each kind of layer meets its weight: as a product of matrices, by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from secateur.evidence import collect
from support.evidence_models import close


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
    words = ["input_norm", "input_mean", "input_var"] + (["gram"] if groups == 1 else [])
    entry = collect(layer, [x[:2], x[:0], x[2]], words)["weight"]
    rows = unfolded(layer, x)
    of_channel = torch.arange(8) // (8 // groups)  # the group of each output

    def expected(values):
        return values[of_channel].reshape(layer.weight.shape)

    close(entry["input_norm"].expand_as(layer.weight), expected(rows.norm(dim=0)))
    close(entry["input_mean"].expand_as(layer.weight), expected(rows.mean(0)))
    close(entry["input_var"].expand_as(layer.weight), expected(rows.var(0, correction=0)))
    assert entry["input_norm"].shape[0] == (1 if groups == 1 else 8)
    if groups == 1:
        close(entry["gram"], rows[:, 0].T @ rows[:, 0])


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions_of_any_dimension_are_matrix_products(dimensions):
    torch.manual_seed(0)
    layer = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dimensions - 1](3, 5, 3, stride=2, padding=1, bias=False).double()
    x = torch.randn(2, 3, *[5] * dimensions, dtype=torch.float64)
    entry = collect(layer, [x], ["gram", "input_norm"])["weight"]
    W = layer.weight.detach().flatten(1)
    close((W @ entry["gram"] @ W.T).diagonal(), layer(x).detach().movedim(1, 0).flatten(1).square().sum(1))
    close(entry["gram"].diagonal().sqrt(), entry["input_norm"].flatten())


class PadsAsTensorFlow(nn.Conv2d):
    """As `Conv2dSame` of timm and `Conv2dStaticSamePadding` of EfficientNets."""

    def forward(self, x):
        x = functional.pad(x, (1, 2, 2, 2))
        return functional.conv2d(x, self.weight, bias=self.bias, stride=self.stride, groups=self.groups)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_class_that_pads_by_itself_sees_what_it_convolves(groups):
    """Also on an input that is smaller than its kernel."""
    layer = PadsAsTensorFlow(4, 6, 5, stride=2, groups=groups).double()
    words = ["input_norm", "input_mean"] + ["gram"] * (groups == 1)
    for size in (3, 8):
        x = torch.randn(2, 4, size, size, dtype=torch.float64)
        entry = collect(nn.Sequential(layer), [x], words)["0.weight"]
        plain = nn.Conv2d(4, 6, 5, stride=2, groups=groups).double()
        wanted = collect(plain, [functional.pad(x, (1, 2, 2, 2))], words)["weight"]
        assert all(torch.equal(entry[word], wanted[word]) for word in words)


def test_a_class_that_convolves_by_no_function_of_torch_is_refused():
    class Folded(nn.Conv2d):
        def forward(self, x):
            return torch.einsum("bchw,oc->bohw", x, self.weight[..., 0, 0])

    with pytest.raises(ValueError, match="a Folded convolves by no function of torch, so its inputs are not known"):
        collect(Folded(2, 3, 1), [torch.randn(1, 2, 4, 4)], "input_norm")


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_see_channels(groups):
    layer = nn.ConvTranspose2d(4, 6, 3, groups=groups)
    x = torch.randn(2, 4, 5, 5)
    entry = collect(layer, [x], ["input_norm", "input_mean"])["weight"]
    close(entry["input_norm"], x.movedim(1, 0).flatten(1).norm(dim=1).reshape(4, 1, 1, 1))
    close(entry["input_mean"], x.mean((0, 2, 3)).reshape(4, 1, 1, 1))
    close(collect(layer, [x[0]], "input_norm")["weight"]["input_norm"].flatten(), x[0].flatten(1).norm(dim=1))


def test_embeddings_count_tokens():
    layer = nn.Embedding(4, 3)
    ids = torch.tensor([[0, 2, 2], [2, 0, 1]])
    words = ["input_norm", "input_mean", "input_var"]
    entry = collect(layer, [ids], words, weights={"weight": layer.weight})["weight"]
    hot = functional.one_hot(ids.flatten(), 4).float()
    close(entry["input_norm"][:, 0], hot.norm(dim=0))
    close(entry["input_mean"][:, 0], hot.mean(0))
    close(entry["input_var"][:, 0], hot.var(0, correction=0))


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
    entry = collect(layer, [x], ["input_norm", "gram"])["weight"]
    close(entry["input_norm"], x.flatten(0, 1).norm(dim=0)[:, None])
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
