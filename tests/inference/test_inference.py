"""Packed layers are the dense ones with their zeros, in every form; `pack` takes what is faster."""

import copy
import dataclasses
import json
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from secateur import Block, Unstructured, apply_, sparsify
from secateur.allocation import uniform
from secateur.inference import (
    BlockLinear,
    GroupedLinear,
    Pointwise,
    SparseLinear,
    WindowLinear,
    load_packed,
    pack,
    save_packed,
)
from secateur.inference import packing as inference
from secateur.native import available, loading
from secateur.patterns import GroupedColumns
from secateur.pipeline import attach, make_masks
from secateur.targets import find_targets


def weight_of(rows, columns, pattern, sparsity=0.75, seed=0):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return weight * make_masks({"weight": weight}, sparsity, pattern=pattern)["weight"]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture
def clock(monkeypatch):
    """Times that say what the test wants: every packed form is this many times faster than the dense ones."""

    def set_to(speedup):
        def timed(functions, x):
            packed = [isinstance(function, nn.Module) for function in functions]
            return [1.0 / speedup if each else 1.0 for each in packed]

        monkeypatch.setattr(inference, "_timed", timed)

    return set_to


def model_of(pattern, sparsity=0.8):
    torch.manual_seed(0)
    model = three_layers()
    apply_(model, make_masks(find_targets(model), sparsity, pattern=pattern))
    return model


def three_layers():
    return nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 6)).eval()


# ------------------------------------------------------------------------------------------------- GroupedLinear


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


def test_grouped_has_the_gradients_of_the_dense_product():
    weight = weight_of(12, 10, GroupedColumns(4), 0.5)
    layer = GroupedLinear.from_dense(weight, outputs=4)
    x, dense = torch.randn(3, 10), weight.clone().requires_grad_()
    layer(x).square().sum().backward()
    (x @ dense.t()).square().sum().backward()
    (from_packed,) = torch.autograd.grad(layer.weight, layer.values, dense.grad * 0 + 1)
    assert from_packed.shape == layer.values.shape
    expected = GroupedLinear.from_dense(torch.where(weight.ne(0), dense.grad, 0.0), outputs=4)
    close(layer.values.grad, expected.values.detach())


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


# ------------------------------------------------------------------------------------------------------------ pack


@pytest.mark.parametrize("pattern", [GroupedColumns(16), Block(16, 1), Unstructured()], ids=str)
def test_a_packed_model_is_the_masked_one(pattern, clock, tmp_path):
    clock(2.0)
    model, x = model_of(pattern), torch.randn(4, 48)
    expected = model(x)
    packing = pack(model, x)
    assert packing.packed or not available()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    for layer in packing.packed:
        assert type(model.get_submodule(layer.name)).__name__ == layer.kind
        assert layer.speedup == 2.0
        assert layer.bytes < layer.dense_bytes
    if packing.packed:
        save_packed(model, tmp_path / "packed.safetensors")
        again = three_layers()
        load_packed(again, tmp_path / "packed.safetensors")
        assert torch.equal(again(x), model(x))


def test_attached_masks_count_as_zeros(clock):
    clock(2.0)
    torch.manual_seed(0)
    model, x = three_layers(), torch.randn(4, 48)
    attach(model, make_masks(find_targets(model), 0.8, pattern=GroupedColumns(16)))
    expected = model(x)
    assert pack(model, x, include="0").packed[0].sparsity > 0.5
    assert type(model[0]) in (GroupedLinear, BlockLinear, SparseLinear, WindowLinear)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert "2.weight_mask" in model.state_dict()


def test_slower_forms_are_not_taken(clock):
    clock(1.05)
    model, x = model_of(GroupedColumns(16)), torch.randn(4, 48)
    before = list(model.modules())
    packing = pack(model, x)
    assert not packing.packed
    assert packing.layers[0].why == "dense is nearly as fast"
    assert all(a is b for a, b in zip(before, model.modules(), strict=True))
    assert len(pack(model, x, at_least=1.01).packed) > 0
    clock(0.5)
    assert pack(model_of(GroupedColumns(16)), x).layers[0].why == "dense is faster"


def test_plain_operations_only(clock):
    clock(2.0)
    x = torch.randn(4, 48)
    model = model_of(GroupedColumns(16))
    packing = pack(model, x, kernels_too=False)
    assert {layer.kind for layer in packing.packed} == {"GroupedLinear"}
    model(x).sum().backward()
    assert model[0].values.grad is not None
    packing = pack(model_of(Unstructured()), x, kernels_too=False, include=["0", "2"])
    assert all(layer.why.endswith("% zeros in no pattern that can be skipped") for layer in packing.layers)


def test_without_kernels_it_says_so(clock, monkeypatch):
    clock(2.0)
    monkeypatch.setattr(loading, "_library", lambda: (None, "none, for the test"))
    packing = pack(model_of(Unstructured()), torch.randn(4, 48), include="0")
    assert packing.layers[0].why.endswith("no pattern that plain operations skip, and kernels: none, for the test")


def test_reasons_to_stay_dense(clock):
    clock(2.0)

    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd, self.dense, self.hooked = Odd(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
            self.one, self.two, self.idle = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
            self.normed = nn.utils.parametrizations.orthogonal(nn.Linear(32, 32))
            self.conv, self.two.weight = nn.Conv1d(32, 32, 3), self.one.weight
            self.hooked.register_forward_hook(lambda module, args, output: None)

        def forward(self, x):
            for layer in (self.odd, self.dense, self.hooked, self.one, self.two, self.normed):
                x = layer(x)
            return self.conv(x[..., None].expand(-1, -1, 5))

    model = Model()
    sparsify(model, 0.9, exclude=["dense.*", "normed.*"])
    with torch.no_grad():
        model.normed.parametrizations.weight.original.mul_(torch.eye(32))
    why = {layer.name: layer.why for layer in pack(model, torch.randn(4, 32)).layers}
    assert why["odd"] == "Odd computes in its own way"
    assert why["dense"] == "no zeros"
    assert why["hooked"] == "it has hooks, which would be lost"
    assert why["one"] == why["two"] == "its weight is shared with another module"
    assert why["idle"].startswith("not called on the example")
    assert why["conv"] == "only kernels of one place pay; shrink takes whole channels out"
    assert why["normed"] in ("parametrized; remove the parametrization first", "no zeros")


def test_attention_that_reads_a_weight_goes_on_working(clock):
    clock(2.0)
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    sparsify(model, 0.8, pattern=GroupedColumns(16))
    x = torch.randn(2, 5, 32)
    expected = model(x)
    pack(model, x)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_conv1d_of_transformers(clock):
    from transformers.pytorch_utils import Conv1D

    clock(2.0)
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(64, 32))
    sparsify(model, 0.8, pattern=GroupedColumns(16))
    x = torch.randn(2, 3, 32)
    expected = model(x)
    assert len(pack(model, x).packed) == 1
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", [GroupedColumns(16), Unstructured()], ids=str)
def test_convolutions_of_one_place_are_packed_and_larger_ones_are_not(pattern, clock):
    clock(2.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 64, 1, stride=2), nn.ReLU(), nn.Conv2d(64, 32, 3, padding=1)).eval()
    apply_(model, make_masks(find_targets(model), 0.9, pattern=pattern, allocate=uniform))
    x = torch.randn(2, 32, 6, 6)
    expected = model(x)
    packing = pack(model, x)
    assert (type(model[0]) is Pointwise) == (bool(packing.packed)) == (available() or pattern != Unstructured())
    assert type(model[2]) is nn.Conv2d
    assert packing.layers[1].why == "only kernels of one place pay; shrink takes whole channels out"
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_the_model_is_left_as_it_was_but_for_its_layers(clock):
    clock(2.0)
    model = nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.Dropout(0.5)).train()
    sparsify(model, 0.9, pattern=GroupedColumns(16))
    state = torch.get_rng_state()
    pack(model, torch.randn(4, 48, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(model[1].running_mean, torch.zeros(48))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())


def test_a_failing_pack_changes_nothing(clock):
    clock(2.0)
    model = model_of(GroupedColumns(16))
    before = list(model.modules())
    with pytest.raises(ValueError, match="is not finite"):
        pack(model, torch.full((4, 48), torch.nan))
    with pytest.raises(ValueError, match=r"no layer matches 'head'; there are 0, 2, 4"):
        pack(model, torch.randn(4, 48), include="head")
    with pytest.raises(ValueError, match="how many times faster, so it is positive; got 0"):
        pack(model, torch.randn(4, 48), at_least=0)
    with pytest.raises(ValueError, match="no linear layer or convolution"):
        pack(nn.ReLU(), torch.randn(4, 48))
    with pytest.raises(ValueError, match=r"put it in nn\.Sequential"):
        pack(nn.Linear(48, 4), torch.randn(4, 48))
    assert all(a is b for a, b in zip(before, model.modules(), strict=True))


def test_frozen_layers_stay_frozen(clock):
    clock(2.0)
    model = model_of(GroupedColumns(16)).requires_grad_(False)
    pack(model, torch.randn(4, 48))
    assert not any(parameter.requires_grad for parameter in model.parameters())


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(48, 64, bias=False), nn.Linear(40, 64, bias=False)

    def forward(self, x, y):
        return self.one(x) + self.other(y)


@pytest.mark.parametrize("form", ["tuple", "list", "mapping", "forward"])
def test_example_inputs_are_what_the_model_is_called_with(clock, form):
    """A tuple holds positional arguments, as in `torch.export`; no target is split off."""
    clock(4.0)
    model, x, y = Sum().eval(), torch.randn(4, 48), torch.randn(4, 40)
    sparsify(model, 0.8, pattern=GroupedColumns(16))
    expected = model(x, y)
    given = {"tuple": (x, y), "list": [x, y], "mapping": {"y": y, "x": x}, "forward": [y, x]}[form]
    how = {"forward": lambda module, inputs: module(inputs[1], inputs[0])} if form == "forward" else {}
    packing = pack(model, example_inputs=given, kernels_too=False, **how)
    assert [layer.name for layer in packing.packed] == ["one", "other"]
    torch.testing.assert_close(model(x, y), expected)


def test_the_table(clock):
    clock(4.0)
    text = str(pack(model_of(GroupedColumns(16)), torch.randn(4, 48)))
    assert "4.00×" in text
    assert "layers packed; their" in text


def test_times_are_measured():
    calls = []
    times = inference._timed([lambda x: calls.append(1), lambda x: calls.append(2)], torch.zeros(1))
    assert len(times) == 2
    assert min(times) > 0
    assert calls.count(1) == calls.count(2)


# ----------------------------------------------------------------------------------------------------------- files


def packed_file(clock, folder):
    clock(2.0)
    model = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 40), nn.BatchNorm1d(40)).eval()
    sparsify(model, 0.8, pattern=GroupedColumns(16))
    pack(model, torch.randn(4, 48), kernels_too=False)
    save_packed(model, folder / "packed.safetensors")
    return model, folder / "packed.safetensors"


def dense_model():
    return nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 40), nn.BatchNorm1d(40)).eval()


def test_saved_and_loaded(clock, tmp_path):
    model, path = packed_file(clock, tmp_path)
    other = dense_model()
    load_packed(other, path)
    x = torch.randn(4, 48)
    assert torch.equal(other(x), model(x))
    assert [type(m) for m in other] == [type(m) for m in model]


def rewritten(path, change_tensors=None, change_header=None):
    from safetensors import safe_open

    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["secateur"])
    if change_tensors:
        change_tensors(tensors)
    if change_header:
        change_header(header)
    save_file(tensors, path, metadata={"secateur": json.dumps(header)})


def drop(tensors):
    del tensors["0.indices"]


def lead_out(tensors):
    tensors["0.indices"][0, 0] = 48


def other_shape(tensors):
    tensors["2.weight"] = torch.ones(41)


def add(tensors):
    tensors["more"] = torch.ones(1)


@pytest.mark.parametrize(
    ("tensors", "header", "message"),
    [
        (drop, None, "does not fit Sequential: 'indices'"),
        (lead_out, None, "an index leads out of the 48 inputs"),
        (other_shape, None, r"2.weight has shape \(41,\), in Sequential \(40,\)"),
        (add, None, "more only on one side"),
        (None, lambda header: header.update(version=2), "is of version 2"),
        (None, lambda header: header.update(kind="masks"), "holds no packed model"),
        (
            None,
            lambda header: header["layers"]["0"].update(kind="Magic"),
            r"layers\.0\.kind is 'Magic', which this secateur does not know",
        ),
        (None, lambda header: header["layers"].update({"0": 3}), r"damaged: layers\.0 must be an object, not 3"),
        (None, lambda header: header["layers"]["0"].update(in_features="9"), r"in_features must be a whole number"),
        (None, lambda header: header.pop("layers"), "damaged: layers is missing"),
        (None, lambda header: header["layers"].update({"9": {"kind": "GroupedLinear"}}), "does not fit Sequential"),
        (
            None,
            lambda header: header["layers"]["0"].update(in_features=99),
            "is 64×99 in the file, but has a weight of",
        ),
        (None, lambda header: header["same"].update({"a": "b"}), r"same\.a is the same as a tensor that is not"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(clock, tmp_path, tensors, header, message):
    _, path = packed_file(clock, tmp_path)
    rewritten(path, tensors, header)
    model = dense_model()
    before = list(model.modules()), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_packed(model, path)
    assert all(a is b for a, b in zip(before[0], model.modules(), strict=True))
    assert all(torch.equal(tensor, before[1][name]) for name, tensor in model.state_dict().items())


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a file"):
        load_packed(dense_model(), tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="not a safetensors file of a packed model"):
        load_packed(dense_model(), tmp_path / "text")
    with pytest.raises(ValueError, match="no layer of Sequential is packed"):
        save_packed(dense_model(), tmp_path / "dense")


def test_hostile_kernels_are_refused(tmp_path):
    """A file whose 16-bit indices lead out of the inputs never reaches the C code."""
    model = nn.Sequential(SparseLinear.from_dense(weight_of(8, 9, Unstructured())))
    save_packed(model, tmp_path / "packed")
    rewritten(tmp_path / "packed", lambda tensors: tensors["0.indices"].copy_(tensors["0.indices"].new_tensor(9)))
    with pytest.raises(ValueError, match="an index is 9, but there are 9 inputs"):
        load_packed(nn.Sequential(nn.Linear(9, 8, bias=False)), tmp_path / "packed")


def test_a_report_is_a_value():
    layer = inference.PackedLayer("a", "dense", (2, 3), 0.5)
    assert layer.speedup is None
    assert dataclasses.replace(layer, packed_ms=2.0, best_dense_ms=3.0).speedup == 1.5
