"""Packing with weights, and inputs, in int8: what is chosen, what it says, and what a file of it may hold."""

import copy
import io
import json
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from secateur import Block, Unstructured, sparsify
from secateur.allocation import uniform
from secateur.inference import BlockLinear, SparseLinear, WindowLinear, load_packed, pack, save_packed, to_int8
from secateur.inference import packing as inference
from secateur.native import available, scaled
from secateur.patterns import GroupedColumns
from support.packed import close, model_of, three_layers, weight_of
from support.unchanged import DEFAULTS

needs_kernels = pytest.mark.skipif(not available(), reason="there is nothing in int8 without compiled kernels")


def rounded(model):
    """The same model with the weights that int8 makes of its own."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.weight.data = scaled(*to_int8(module.weight))
    return twin


@pytest.fixture
def fastest(monkeypatch):
    """Times that say what the test wants: these forms are twice as fast as all others."""

    def set_to(is_one=lambda form: getattr(form, "scales", None) is not None):
        monkeypatch.setattr(inference, "_timed", lambda forms, x: [2.0 - is_one(form) for form in forms])

    return set_to


def rounds(form):
    return getattr(form, "rounds_inputs", False)


def blocks_that_round(form):
    return isinstance(form, BlockLinear) and form.rounds_inputs


@needs_kernels
@pytest.mark.parametrize("pattern", [Block(16, 1), Unstructured()], ids=str)
def test_a_packed_model_is_the_one_of_rounded_weights(pattern, fastest, tmp_path):
    fastest()
    model, x = model_of(pattern), torch.randn(4, 48)
    dense, expected = copy.deepcopy(model), rounded(model)(x)
    packing = pack(model, x, values="int8")
    close(model(x), expected)
    assert [each.name for each in packing.packed][:2] == ["0", "2"]
    for each in packing.packed:
        layer = model.get_submodule(each.name)
        assert (layer.values.dtype, each.int8) == (torch.int8, ("values",))
        assert 0 < each.error < 0.02
        assert each.bytes < 0.7 * each.dense_bytes
    assert "values in int8" in str(packing)
    assert "Rounding changes a packed layer's output by 0." in str(packing)
    save_packed(model, tmp_path / "packed.safetensors")
    again = three_layers()
    load_packed(again, tmp_path / "packed.safetensors")
    assert torch.equal(again(x), model(x))
    assert repr(again) == repr(model)
    assert dense(x).dtype == again(x).dtype


@needs_kernels
def test_what_is_rounded_already_is_not_rounded_again(fastest):
    fastest()
    model, x = rounded(model_of(Unstructured())), torch.randn(4, 48)
    expected = model(x)
    packing = pack(model, x, values="int8")
    assert all(each.error < 1e-6 for each in packing.packed)
    close(model(x), expected)


@needs_kernels
@pytest.mark.parametrize(
    ("pattern", "form", "vectors"),
    [(Block(16, 1), BlockLinear, 4), (Unstructured(), WindowLinear, 4), (Unstructured(), SparseLinear, 40)],
    ids=str,
)
def test_inputs_are_rounded_with_and_without_a_pattern(pattern, form, vectors, fastest):
    fastest(lambda each: isinstance(each, form) and each.rounds_inputs)
    model, x = model_of(pattern), torch.randn(vectors, 48)
    expected = model(x)
    packing = pack(model, x, values="int8", inputs="int8")
    assert {each.int8 for each in packing.packed} == {("values", "inputs")}
    assert f"{form.__name__}, values and inputs in int8" in str(packing)
    assert all(rounds(model.get_submodule(each.name)) for each in packing.packed)
    assert "values=int8, inputs=int8" in repr(model)
    error = (model(x) - expected).norm() / expected.norm()
    assert 0 < error < 0.05


@needs_kernels
def test_what_rounding_would_make_wrong_stays(fastest, monkeypatch):
    """An input that the layer does not read is so large that those it reads have one code with 0."""
    fastest(rounds)
    x = torch.full((2, 32), 0.1)
    x[:, 31] = 100.0

    def build():
        model = nn.Sequential(nn.Linear(32, 32, bias=False)).eval()
        model[0].weight.data[:, 16:] = 0
        return model

    found = pack(build(), x, values="int8", inputs="int8").layers[0]
    assert found.int8 != ("values", "inputs")
    stored = BlockLinear.from_dense(*to_int8(build()[0].weight)[:1], scales=torch.ones(32), round_inputs=True)
    monkeypatch.setattr(inference, "_candidates", lambda *asked: iter([stored]))
    found = pack(model := build(), x, values="int8", inputs="int8").layers[0]
    assert (found.why, found.error) == ("rounding would change its output by 100%", 1.0)
    assert type(model[0]) is nn.Linear


@needs_kernels
def test_forms_in_plain_operations_are_tried_as_they_are(fastest):
    fastest(lambda form: type(form).__name__ == "GroupedLinear")
    model, x = model_of(GroupedColumns(16)), torch.randn(4, 48)
    expected = model(x)
    packing = pack(model, x, values="int8", include="0")
    assert (packing.packed[0].error, packing.packed[0].int8) == (None, ())
    assert "Rounding" not in str(packing)
    close(model(x), expected)


@needs_kernels
def test_the_dense_layer_in_int8_is_one_to_beat(monkeypatch):
    """It is the last of the dense forms."""

    def timed(functions, x):
        forms = [isinstance(each, nn.Module) for each in functions]
        return [2.0 if packed else 1.0 if n + 1 == forms.index(True) else 4.0 for n, packed in enumerate(forms)]

    monkeypatch.setattr(inference, "_timed", timed)
    monkeypatch.setattr(inference.private, "int8_linear", lambda matrix, bias: lambda x: x)
    model, x = model_of(Unstructured()), torch.randn(4, 48)
    found = pack(model, x, values="int8", include="0").layers[0]
    assert (found.kind, found.why) == ("dense", "torch's dense int8 is faster")
    assert (found.dense_int8_ms, found.best_dense_ms, found.speedup) == (1.0, 1.0, 0.5)
    assert pack(model, x, include="0").layers[0].dense_int8_ms is None  # without int8 nobody compares with it


@needs_kernels
def test_convolutions_and_what_follows_them(fastest, tmp_path):
    fastest()

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()

    model, x = build(), torch.randn(2, 4, 9, 9)
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    nn.init.normal_(model[1].weight)  # signs of both kinds go into the scales
    sparsify(model, 0.7, include="*.weight", allocate=uniform)
    expected = rounded(model)(x)
    packing = pack(model, x, values="int8")
    assert [each.int8 for each in packing.layers] == [("values",)] * 2
    assert "SparseConv2d, values in int8, with 1 and 2" in str(packing)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    save_packed(model, tmp_path / "packed.safetensors")
    again = build()
    load_packed(again, tmp_path / "packed.safetensors")
    assert torch.equal(again(x), model(x))


@needs_kernels
def test_convolutions_that_round_each_image(fastest, tmp_path):
    fastest(rounds)

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()

    model, x = build(), torch.randn(2, 4, 9, 9)
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    sparsify(model, 0.7, include="*.weight", allocate=uniform)
    expected = model(x)
    packing = pack(model, x, values="int8", inputs="int8")
    assert [each.int8 for each in packing.layers] == [("values", "inputs")] * 2
    assert all(0 < each.error < 0.02 for each in packing.layers)
    assert "SparseConv2d, values and inputs in int8, with 1 and 2" in str(packing)
    assert all(rounds(model[at]) for at in (0, 3))
    assert 0 < (model(x) - expected).norm() / expected.norm() < 0.02
    assert torch.equal(model(x[:1]), model(x)[:1])  # each image by itself
    save_packed(model, tmp_path / "packed.safetensors")
    again = build()
    load_packed(again, tmp_path / "packed.safetensors")
    assert torch.equal(again(x), model(x))
    assert repr(again) == repr(model)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("0.scales"), "the scales of int8 values are float32"),
        (lambda tensors: tensors["0.indices"].view(torch.int16).fill_(36), "an index is 36"),
        (lambda tensors: tensors["0.pointers"][1:-1].add_(1), "a pointer is no multiple of 4|do not rise"),
        (lambda tensors: tensors.update({"0.values": tensors["0.values"][:-1].clone()}), "indices for values of shape"),
        (lambda tensors: tensors.update({"0.values": tensors["0.values"].float()}), "side by side are int8"),
    ],
)
def test_a_hostile_file_of_a_convolution_is_refused(change, message, tmp_path, fastest):
    fastest(rounds)
    model = nn.Sequential(nn.Conv2d(4, 8, 3)).eval()
    sparsify(model, 0.7, include="*.weight")
    pack(model, torch.randn(1, 4, 9, 9), values="int8", inputs="int8")
    path = tmp_path / "packed.safetensors"
    save_packed(model, path)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        header = file.metadata()["secateur"]
    change(tensors)
    save_file(tensors, path, metadata={"secateur": header})
    fresh = nn.Sequential(nn.Conv2d(4, 8, 3))
    with pytest.raises(ValueError, match=message):
        load_packed(fresh, path)
    assert type(fresh[0]) is nn.Conv2d


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"values": "int4"}, "values is 'int8' or None, not 'int4'"),
        ({"values": "int8", "inputs": "fp8"}, "inputs is 'int8' or None, not 'fp8'"),
        ({"inputs": "int8"}, 'inputs="int8" goes with values="int8"'),
        ({"values": "int8", "kernels_too": False}, "leave kernels_too=False out"),
    ],
)
def test_what_is_asked_for_and_cannot_be(given, message):
    model = model_of(Unstructured())
    with pytest.raises(ValueError, match=message):
        pack(model, torch.randn(4, 48), **given)


def test_weights_that_have_no_number_change_nothing():
    model = model_of(Unstructured())
    model[2].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="2: its weight holds NaN or infinity, which has no place in int8"):
        pack(model, torch.randn(4, 48), values="int8")
    assert all(type(module) is nn.Linear for module in model[::2])


# ---------------------------------------------------------------------------------------------------- layers and files


def layers():
    numbers, scales = to_int8(weight_of(40, 24, Block(8, 1)))
    bias = torch.randn(40)
    return [
        SparseLinear.from_dense(numbers, bias, scales=scales),
        WindowLinear.from_dense(numbers, bias, scales=scales),
        BlockLinear.from_dense(numbers, bias, scales=scales),
        BlockLinear.from_dense(numbers, bias, scales=scales, round_inputs=True),
        WindowLinear.from_dense(numbers, bias, scales=scales, round_inputs=True),
        SparseLinear.from_dense(numbers, bias, scales=scales, round_inputs=True),
    ]


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("at", range(6))
def test_dtypes_and_devices_that_are_torchs_defaults_do_not_matter(at, default):
    layer, xs = layers()[at], [torch.randn(1, 24), torch.randn(70, 24)]
    expected = [layer(x) for x in xs]
    with DEFAULTS[default]():
        assert all(torch.equal(layer(x), its) for x, its in zip(xs, expected, strict=True))


@pytest.mark.parametrize("at", range(6))
def test_layers_are_copied_saved_and_moved(at):
    layer, x = layers()[at], torch.randn(3, 24)
    expected = layer(x)
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(stream, weights_only=False),
        copy.deepcopy(layer).to(torch.bfloat16).to(torch.float64),
        copy.deepcopy(layer).half(),
    ):
        assert (other.values.dtype, other.scales.dtype, other.bias.dtype) == (torch.int8, torch.float32, torch.float32)
        assert torch.equal(other(x), expected)
    fresh = layers()[at]
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), expected)


@pytest.mark.parametrize("at", range(6))
def test_layers_export(at):
    model = nn.Sequential(layers()[at])
    x = torch.randn(3, 24)
    program = torch.export.export(model, (x,), strict=False)  # as newer torches: 2.7 counts what was compiled before
    close(program.module()(x), model(x))


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("0.scales"), "the scales of int8 values are float32"),
        (lambda tensors: tensors.update({"0.scales": torch.ones(3)}), r"not torch.float32 of shape \(3,\)"),
        (lambda tensors: tensors["0.scales"].fill_(torch.inf), "a scale is NaN or infinite"),
        (
            lambda tensors: tensors.update({"0.values": tensors["0.values"].float()}),
            "values of four blocks side by side are int8",
        ),
        (lambda tensors: tensors["0.indices"].view(torch.int16).fill_(48), "an index is 48"),
        (lambda tensors: tensors["0.pointers"][1:-1].add_(1), "a pointer is no multiple of 4|do not rise"),
        (lambda tensors: tensors.update({"0.values": tensors["0.values"][:-1].clone()}), "indices for values of shape"),
    ],
)
def test_a_hostile_file_changes_nothing(change, message, tmp_path, fastest):
    fastest(blocks_that_round)
    model = model_of(Block(16, 1))
    pack(model, torch.randn(4, 48), values="int8", inputs="int8", include="0")
    path = tmp_path / "packed.safetensors"
    save_packed(model, path)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        header = file.metadata()["secateur"]
    assert json.loads(header)["layers"]["0"]["kind"] == "BlockLinear"
    change(tensors)
    save_file(tensors, path, metadata={"secateur": header})
    fresh = three_layers()
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_packed(fresh, path)
    assert type(fresh[0]) is nn.Linear
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())
