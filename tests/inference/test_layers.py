"""Packed layers are the dense ones with their zeros, in every form."""

import copy
import pickle
import pickletools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur import Unstructured
from secateur import inference as house
from secateur.inference import BlockLinear, GroupedLinear, Pointwise, SparseLinear, WindowLinear
from secateur.patterns import GroupedColumns
from support.packed import close, weight_of
from support.unchanged import DEFAULTS


@settings(max_examples=40)
@given(data=st.data())
def test_grouped_is_the_product(data):
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    outputs = data.draw(st.sampled_from([1, 3, 16, 64]))
    sparsity = data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    pattern = data.draw(st.sampled_from([GroupedColumns(outputs), Unstructured()]))
    weight = weight_of(rows, columns, pattern, sparsity, seed=rows * 41 + columns)
    bias = torch.randn(rows) if data.draw(st.booleans()) else None
    layer = GroupedLinear.from_dense(weight, bias, outputs=outputs)
    assert torch.equal(layer.weight, weight)
    x = torch.randn(*data.draw(st.sampled_from([(5,), (0,), (2, 3), ()])), columns)
    close(layer(x), nn.functional.linear(x, weight, bias))
    close(layer.eval()(x), nn.functional.linear(x, weight, bias))


def test_grouped_keeps_no_more_inputs_than_it_uses():
    weight = weight_of(64, 40, GroupedColumns(16), 0.75)
    layer = GroupedLinear.from_dense(weight, outputs=16)
    counts = weight.ne(0).view(4, 16, 40).any(1).sum(1)
    assert layer.values.shape == (4, int(counts.max()), 16)


def test_grouped_trains_and_zeros_stay():
    weight = torch.zeros(4, 6)
    weight[:2, :3] = 1.0
    weight[2:, 5] = 2.0  # fewer inputs than the other group: filled up
    layer = GroupedLinear.from_dense(weight, outputs=2).train()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
    assert torch.equal(layer.weight.ne(0), weight.ne(0))
    assert not torch.equal(layer.weight, weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_grouped_in_other_dtypes(dtype):
    weight = weight_of(32, 20, GroupedColumns(16)).to(dtype)
    layer = GroupedLinear.from_dense(weight, outputs=16)
    x = torch.randn(3, 20, dtype=dtype)
    torch.testing.assert_close(layer(x), x @ weight.t(), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(2, 4, 8), None, 5, 16), r"indices \(2, 3\) for values \(2, 4, 8\)"),
        ((torch.zeros(2, 4), torch.zeros(2, 4, 8), None, 5, 17), "2 groups of 8 outputs are not 17 outputs"),
        ((torch.zeros(2, 4), torch.zeros(2, 4, 8), torch.zeros(15), 5, 16), r"a bias of shape \(15,\) for 16 outputs"),
        ((torch.full((2, 4), 5), torch.zeros(2, 4, 8), None, 5, 16), "an index leads out of the 5 inputs"),
        ((torch.full((2, 4), -1), torch.zeros(2, 4, 8), None, 5, 16), "an index leads out of the 5 inputs"),
    ],
)
def test_grouped_messages(arguments, message):
    with pytest.raises(ValueError, match=message):
        GroupedLinear(arguments[0].int(), *arguments[1:])


# ------------------------------------------------------------------------------------------------- the four forms


def forms():
    weight = weight_of(40, 48, GroupedColumns(16))
    bias = torch.randn(40)
    yield GroupedLinear.from_dense(weight, bias, outputs=16)
    yield BlockLinear.from_dense(weight, bias)
    yield WindowLinear.from_dense(weight, bias)
    yield SparseLinear.from_dense(weight, bias)
    yield SparseLinear.from_dense(weight, bias, batch=64)


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("layer", list(forms()), ids=lambda layer: type(layer).__name__)
def test_dtypes_and_devices_that_are_torchs_defaults_do_not_matter(layer, default):
    layer.requires_grad_(False).eval()
    xs = [torch.randn(48), torch.randn(64, 48)]
    expected = [layer(x) for x in xs]
    with DEFAULTS[default]():
        assert all(torch.equal(layer(x), its) for x, its in zip(xs, expected, strict=True))


@pytest.mark.parametrize("layer", list(forms()), ids=lambda layer: type(layer).__name__)
def test_journeys(layer):
    layer.requires_grad_(False).eval()
    x = torch.randn(2, 5, 48)
    expected = layer(x)
    close(expected, nn.functional.linear(x, layer.weight, layer.bias))
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    other = copy.deepcopy(layer)
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), expected)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    torch.testing.assert_close(half(x.bfloat16()).float(), expected, rtol=5e-2, atol=5e-1)
    double = copy.deepcopy(layer).double()
    torch.testing.assert_close(double(x.double()).float(), expected, rtol=1e-5, atol=1e-5)
    assert "in_features=48, out_features=40" in repr(layer)


@pytest.mark.parametrize("layer", list(forms()), ids=lambda layer: type(layer).__name__)
def test_inputs_of_another_size_are_refused(layer):
    for x in (torch.randn(2, 96), torch.randn(47), torch.randn(3, 0)):
        with pytest.raises(ValueError, match=r"the input has shape \(.*\); its last dimension must be 48"):
            layer(x)


@pytest.mark.parametrize("layer", list(forms())[:4], ids=lambda layer: type(layer).__name__)
def test_compile_and_export_see_through(layer):
    layer.requires_grad_(False).eval()
    x = torch.randn(6, 48)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    close(compiled(x), layer(x))
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},))
    more = torch.randn(9, 48)
    close(exported.module()(more), layer(more))


def test_grouped_runs_in_onnxruntime(tmp_path):
    import onnxruntime

    model = nn.Sequential(GroupedLinear.from_dense(weight_of(40, 48, GroupedColumns(16)), torch.randn(40), outputs=16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model.eval(), (torch.randn(3, 48),), dynamo=True, verbose=False)
        program.save(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    x = torch.randn(3, 48)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    close(torch.from_numpy(y), model(x).detach())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kind", ["conv1d", "conv2d", "conv3d"])
def test_pointwise_is_the_convolution(kind, stride):
    spatial = int(kind[4])
    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[spatial](32, 16, 1, stride=stride)
    x = torch.randn(2, 32, *[7] * spatial)
    layer = Pointwise(SparseLinear.from_dense(convolution.weight.flatten(1), convolution.bias), convolution.stride)
    torch.testing.assert_close(layer(x), convolution(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x[0]), convolution(x[0]), rtol=1e-4, atol=1e-5)
    assert layer.weight.shape == convolution.weight.shape
    assert torch.equal(layer.bias, convolution.bias)


@pytest.mark.parametrize("layer", list(forms()), ids=lambda layer: type(layer).__name__)
def test_a_pickle_names_the_public_home(layer):
    """Files of the house move; what somebody has pickled is found all the same."""
    text = pickle.dumps(layer)
    named = {word for opcode, word, _ in pickletools.genops(text) if isinstance(word, str)}
    assert "secateur.inference" in named
    assert not any(word.startswith("secateur.inference.") for word in named)
    assert getattr(house, type(layer).__name__) is type(layer)
    again = pickle.loads(text)
    x = torch.randn(3, *layer.linear.weight.shape[1:], 5) if isinstance(layer, Pointwise) else None
    x = torch.randn(3, layer.in_features) if x is None else x
    assert torch.equal(again(x), layer(x))
