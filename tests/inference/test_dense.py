"""What stays dense beside packed convolutions computes what it did, with the batch normalization and ReLU after it."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur import sparsify
from secateur.inference import ChannelsLastMaxPool2d, FoldedConv2d, load_packed, pack, save_packed
from secateur.inference import packing as inference
from secateur.native import available
from support.packed import rewritten

with_kernels = pytest.mark.skipif(not available(), reason="there are no compiled kernels here")


def normalization(channels):
    norm = nn.BatchNorm2d(channels).eval()
    with torch.no_grad():
        for tensor in (norm.running_mean, norm.weight, norm.bias):
            tensor.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    return norm


@settings(max_examples=30)
@given(data=st.data())
def test_a_folded_convolution_is_the_two(data):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    groups, turned = data.draw(st.integers(1, 2)), data.draw(st.booleans())
    mode, bias = data.draw(st.sampled_from(["zeros", "reflect", "circular"])), data.draw(st.booleans())
    stride, padding = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 1))
    convolution = nn.Conv2d(2 * groups, 4 * groups, 3, stride, padding, 1, groups, bias, mode)
    norm, x = normalization(4 * groups), torch.randn(2, 2 * groups, 7, 6)
    made = FoldedConv2d.from_module(convolution, norm, channels_last=turned)
    torch.testing.assert_close(made(x), norm(convolution(x)), rtol=1e-4, atol=1e-4)
    assert made(x).is_contiguous(memory_format=torch.channels_last) == turned == made.channels_last


@settings(max_examples=30)
@given(data=st.data())
def test_a_turned_pooling_is_the_pooling(data):
    """Number for number, of one image and of several, with what is no number."""
    kernel, stride, dilation = (data.draw(st.integers(1, 3)) for _ in range(3))
    padding, ceil = data.draw(st.integers(0, kernel // 2)), data.draw(st.booleans())
    rectified = data.draw(st.booleans())
    pooling = nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(*data.draw(st.sampled_from([(), (1,), (3,)])), 2, 9, 8)
    x.view(-1)[:: data.draw(st.integers(3, 50))] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    expected = pooling(x.relu()) if rectified else pooling(x)
    found = ChannelsLastMaxPool2d(pooling, rectified)(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.is_contiguous()


class Network(nn.Module):
    """The beginning of a residual network, and a layer with zeros."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.relu = nn.Conv2d(3, 8, 3, bias=False), normalization(8), nn.ReLU()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.sparse, self.dense, self.after = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1), normalization(4)
        self.eval()

    def forward(self, x):
        return self.after(self.dense(self.sparse(self.pool(self.relu(self.norm(self.stem(x)))))))


def network():
    torch.manual_seed(0)
    model = Network()
    sparsify(model, 0.9, include="sparse.weight")
    return model, torch.randn(2, 3, 16, 16)


@with_kernels
def test_a_network_is_folded_and_turned(clock, tmp_path):
    clock(2.0)
    model, x = network()
    expected = model(x)
    packing = pack(model, x)
    assert {layer.name: layer.fused for layer in packing.layers} == {
        "stem": ("norm",),
        "sparse": (),
        "dense": ("after",),
    }
    assert packing.poolings == ("pool",)
    assert "dense, no zeros, with norm" in str(packing)
    assert "Max-poolings with channels side by side: 1." in str(packing)
    assert type(model.stem) is type(model.dense) is FoldedConv2d
    assert model.pool.rectified
    assert model.stem.channels_last  # whose output the pooling takes as it is
    assert not model.dense.channels_last
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    save_packed(model, tmp_path / "packed.safetensors")
    again, _ = network()
    load_packed(again, tmp_path / "packed.safetensors")
    assert torch.equal(again(x), model(x))
    assert again.stem.channels_last
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), torch.export.export(model, (x,)).module()):
        assert torch.equal(other(x), model(x))


@with_kernels
def test_nothing_is_where_no_convolution_is_packed(clock):
    clock(0.5)
    model, x = network()
    before = list(model.modules())
    assert not pack(model, x).poolings
    assert all(a is b for a, b in zip(before, model.modules(), strict=True))


@with_kernels
def test_a_pooling_that_is_no_faster_stays_and_the_relu_with_it(clock, monkeypatch):
    clock(2.0)
    timed = inference._timed
    slower = lambda functions, x: [1.0] * 2 if isinstance(functions[1], nn.MaxPool2d) else timed(functions, x)  # noqa: E731
    monkeypatch.setattr(inference, "_timed", slower)
    model, x = network()
    assert not pack(model, x).poolings
    assert (type(model.pool), type(model.relu)) == (nn.MaxPool2d, nn.ReLU)
    assert not model.stem.channels_last
    clock(2.0)
    model, x = network()
    assert not pack(model, x, fuse=False).poolings
    assert (type(model.pool), type(model.stem)) == (nn.MaxPool2d, nn.Conv2d)


@with_kernels
def test_a_weight_that_others_read_is_not_folded(clock):
    clock(2.0)
    model, x = network()
    model.twin = nn.Conv2d(3, 8, 3, bias=False)
    model.twin.weight = model.stem.weight
    pack(model, x)
    assert type(model.stem) is nn.Conv2d
    assert type(model.norm) is nn.BatchNorm2d
    assert model.pool.rectified


@with_kernels
def test_what_a_relu_gives_to_others_too_stays(clock):
    clock(2.0)
    model, x = network()
    model.forward = lambda x: (y := model.relu(model.stem(x)), model.sparse(model.pool(y)))
    expected = model(x)
    assert pack(model, x).poolings == ("pool",)
    assert type(model.relu) is nn.ReLU
    assert not model.pool.rectified
    for found, wanted in zip(model(x), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@with_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["folded"].update(pool=0), "folded names pool, a MaxPool2d here"),
        (lambda header: header["poolings"].update(stem=0), "poolings names stem, a Conv2d here"),
        (lambda header: header["poolings"].update(pool="yes"), "poolings.pool"),
        (lambda header: header["folded"].update(gone=1), "does not fit Network: .*gone"),
        (lambda header: header.update(folded={}), "stem.bias"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(clock, tmp_path, change, message):
    clock(2.0)
    model, x = network()
    pack(model, x)
    save_packed(model, tmp_path / "packed.safetensors")
    rewritten(tmp_path / "packed.safetensors", None, change)
    other, _ = network()
    before = list(other.modules())
    with torch.no_grad():
        for tensor in other.state_dict().values():  # what is in the file is told from what is here
            tensor.add_(1)
    held = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_packed(other, tmp_path / "packed.safetensors")
    assert all(a is b for a, b in zip(before, other.modules(), strict=True))
    assert all(torch.equal(tensor, held[name]) for name, tensor in other.state_dict().items())


@with_kernels
@pytest.mark.parametrize("bias", [True, False])
def test_what_is_folded_has_memory_and_a_bias_of_its_own(bias, clock, tmp_path):
    """A file that is read leaves the dense layer's tensors alone; and what was frozen stays frozen."""
    clock(2.0)
    model, x = network()
    model.dense.weight.requires_grad_(not bias)
    model.dense.bias.requires_grad_(bias)
    pack(model, x)
    assert (model.dense.weight.requires_grad, model.dense.bias.requires_grad) == (not bias, bias)
    save_packed(model, tmp_path / "packed.safetensors")
    again, _ = network()
    again.dense.weight.requires_grad_(not bias)
    held = again.dense.bias.requires_grad_(bias)
    with torch.no_grad():
        held.fill_(7)
    load_packed(again, tmp_path / "packed.safetensors")
    assert held.eq(7).all()
    assert torch.equal(again(x), model(x))
    assert (again.dense.weight.requires_grad, again.dense.bias.requires_grad) == (not bias, bias)
