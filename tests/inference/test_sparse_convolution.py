"""Packed convolutions are the dense ones with their zeros, alone and with what was fused into them."""

import copy
import pickle
import pickletools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur.inference import BlockConv1d, BlockConv2d, SparseConv1d, SparseConv2d
from secateur.inference.convolution import why_no_sparse_convolution
from support.unchanged import DEFAULTS


def sparse(module, share=0.2):
    with torch.no_grad():
        module.weight.mul_(torch.rand_like(module.weight) < share)
    return module.requires_grad_(False).eval()


def close(a, b, tolerance=1e-4):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=60)
@given(data=st.data())
def test_it_is_the_module(data):
    """Of one and two dimensions, with padding in numbers and in words, batched and not."""
    dimensions, groups = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    kind, form = [(nn.Conv1d, SparseConv1d), (nn.Conv2d, SparseConv2d)][dimensions - 1]
    several = lambda low, high: tuple(data.draw(st.integers(low, high)) for _ in range(dimensions))  # noqa: E731
    kernel, dilation = several(1, 4), several(1, 2)
    padding = data.draw(st.sampled_from(["same", "valid", 0, 1, several(0, 3)]))
    stride = (1,) * dimensions if padding == "same" else several(1, 3)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    inputs, outputs = groups * data.draw(st.integers(2, 5)), groups * data.draw(st.integers(1, 5))
    bias = data.draw(st.booleans())
    module = kind(inputs, outputs, kernel, stride, padding, dilation, groups, bias)
    layer = form.from_module(sparse(module))
    assert torch.equal(layer.weight, module.weight)
    sizes = tuple(data.draw(st.integers(8, 14)) for _ in range(dimensions))
    x = torch.randn(*data.draw(st.sampled_from([(), (1,), (3,), (0,)])), inputs, *sizes)
    if not x.numel():  # torch has no convolution of nothing
        assert layer(x).shape == (0, *module(torch.randn(inputs, *sizes)).shape)
        return
    close(layer(x), module(x))
    if data.draw(st.booleans()) and x.dim() == 4:
        close(layer(x.contiguous(memory_format=torch.channels_last)), module(x))


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("form", [SparseConv1d, SparseConv2d, BlockConv1d, BlockConv2d])
def test_dtypes_and_devices_that_are_torchs_defaults_do_not_matter(form, default):
    dimensions = 1 if form in (SparseConv1d, BlockConv1d) else 2
    module = sparse([nn.Conv1d, nn.Conv2d][dimensions - 1](16, 32, 3, padding=1))
    layer, x = form.from_module(module), torch.randn(2, 16, *[12] * dimensions)
    close(layer(x), module(x))
    expected = layer(x)
    with DEFAULTS[default]():
        assert torch.equal(layer(x), expected)
        assert torch.equal(form.from_module(module)(x), expected)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_a_batch_normalization_is_folded_in(dimensions, affine):
    kind, form = [(nn.Conv1d, SparseConv1d), (nn.Conv2d, SparseConv2d)][dimensions - 1]
    norm = [nn.BatchNorm1d, nn.BatchNorm2d][dimensions - 1](6, affine=affine)
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2.0)
    x = torch.randn(2, 4, *[9] * dimensions)
    for bias in (True, False):
        module = sparse(kind(4, 6, 3, bias=bias))
        close(form.from_module(module, norm.eval())(x), norm(module(x)))


def test_a_channel_that_is_scaled_by_zero_keeps_its_shift():
    module, norm = sparse(nn.Conv2d(4, 2, 3)), nn.BatchNorm2d(2).eval().requires_grad_(False)
    norm.weight.zero_()
    norm.bias.fill_(3.0)
    assert torch.equal(SparseConv2d.from_module(module, norm)(torch.randn(1, 4, 5, 5)), torch.full((1, 2, 3, 3), 3.0))


def forms():
    torch.manual_seed(0)
    yield SparseConv2d.from_module(sparse(nn.Conv2d(6, 8, 3, 2, (1, 2), groups=2))), torch.randn(2, 6, 9, 9)
    yield SparseConv1d.from_module(sparse(nn.Conv1d(6, 8, 3, dilation=2, bias=False))), torch.randn(2, 6, 9)
    yield BlockConv2d.from_module(sparse(nn.Conv2d(6, 8, 3, 2, (1, 2), groups=2))), torch.randn(2, 6, 9, 9)
    yield BlockConv1d.from_module(sparse(nn.Conv1d(6, 8, 3, dilation=2, bias=False))), torch.randn(2, 6, 9)


@pytest.mark.parametrize(("layer", "x"), list(forms()), ids=["2d", "1d", "2d fours", "1d fours"])
def test_journeys(layer, x):
    """Copies, states, dtypes, pickles, and what torch compiles and exports."""
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    other = copy.deepcopy(layer)
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), expected)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.values.dtype == torch.bfloat16
    torch.testing.assert_close(half(x.bfloat16()).float(), expected, rtol=5e-2, atol=5e-2)
    close(copy.deepcopy(layer).half()(x.half()).float(), expected, 2e-2)
    close(copy.deepcopy(layer).double()(x.double()).float(), expected)
    text = pickle.dumps(layer)
    named = {word for _, word, _ in pickletools.genops(text) if isinstance(word, str)}
    assert "secateur.inference" in named
    assert not any(word.startswith("secateur.inference.") for word in named)
    assert torch.equal(pickle.loads(text)(x), expected)
    assert f"kept={layer.values.numel()}" in repr(layer)


@pytest.mark.parametrize(("layer", "x"), list(forms()), ids=["2d", "1d", "2d fours", "1d fours"])
def test_compile_and_export_see_one_operator(layer, x):
    close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert called.count("secateur.sparse_convolution.default") == 1
    assert not any("convolution" in name for name in called if "secateur" not in name)
    more = torch.cat([x, x, x])
    close(exported.module()(more), layer(more))


def test_what_it_adds_and_rectifies():
    module = sparse(nn.Conv2d(4, 6, 3, padding=1))
    layer, x = SparseConv2d.from_module(module), torch.randn(2, 4, 5, 5)
    layer.rectified = True
    addend = torch.randn(2, 6, 5, 5)
    close(layer(x, addend), (module(x) + addend).relu())
    close(layer(x[0], addend[0]), (module(x[0]) + addend[0]).relu())
    assert "rectified" in repr(layer)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ConvTranspose2d(4, 4, 3), "it is transposed"),
        (nn.Conv3d(4, 4, 3), "it has three dimensions"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), "it pads with circular, and only zeros are skipped"),
        (nn.Conv2d(4, 8, 3, groups=4), "each output reads one channel, and there is nothing to skip"),
        (nn.Conv2d(8000, 1, 3), "72000 inputs; an index of 16 bits counts up to 65536"),
    ],
)
def test_what_has_no_such_form(module, message):
    assert why_no_sparse_convolution(module) == message.replace("counts up to 65536", "counts up to 65536.")
    with pytest.raises(ValueError, match=message):
        SparseConv2d.from_module(module)


def test_inputs_of_another_shape_are_refused():
    layer = SparseConv2d.from_module(sparse(nn.Conv2d(4, 6, 3)))
    for x in (torch.randn(2, 5, 6, 6), torch.randn(4, 6), torch.randn(1, 2, 4, 6, 6)):
        with pytest.raises(ValueError, match=r"the input has shape \(.*\); it must be \(images, 4, \.\.\.\)"):
            layer(x)
    with pytest.raises(ValueError, match="is larger than the padded image"):
        layer(torch.randn(1, 4, 2, 6))
    layer = SparseConv1d.from_module(sparse(nn.Conv1d(4, 6, 3)))
    with pytest.raises(ValueError, match="it must be"):
        layer(torch.randn(2, 5, 6))


def test_a_file_s_activation_is_one_that_is_known():
    layer = SparseConv2d.from_module(sparse(nn.Conv2d(3, 4, 3)))
    layer.rectified, layer.rectifier = True, "silu"
    tensors, x = layer.state_dict(), torch.randn(1, 3, 7, 7)
    again = SparseConv2d._from_tensors(tensors, layer._layout())
    assert torch.equal(again(x), layer(x))
    assert "silu" in str(again)
    assert pickle.loads(pickle.dumps(layer)).rectifier == "silu"
    assert "rectifier" not in SparseConv2d.from_module(sparse(nn.Conv2d(3, 4, 3)))._layout()
    with pytest.raises(ValueError, match="rectifier 9 of a convolution is none that this secateur knows"):
        SparseConv2d._from_tensors(tensors, {**layer._layout(), "rectifier": 9})
