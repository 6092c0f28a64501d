"""`pack` takes what is faster, and leaves everything else as it was."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from secateur import Block, Unstructured, apply_, sparsify
from secateur.allocation import uniform
from secateur.inference import (
    Absorbed,
    BlockConv2d,
    BlockLinear,
    GroupedLinear,
    Pointwise,
    SparseConv2d,
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
from support.packed import model_of, three_layers


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


def test_a_layer_of_two_names_is_packed_under_both(clock, tmp_path):
    clock(2.0)

    def twins():
        model = model_of(GroupedColumns(16))
        return nn.Sequential(model, model[2], model)

    model, x = twins(), torch.randn(4, 48)
    packing = pack(model, x, kernels_too=False, forward=lambda model, x: model[0](x))
    assert [layer.name for layer in packing.packed] == ["0.0", "0.2", "0.4"][: len(packing.packed)]
    assert model[1] is model[0][2] is model[2][2]
    assert type(model[1]).__name__ == "GroupedLinear"
    save_packed(model, tmp_path / "packed.safetensors")
    again = twins()
    load_packed(again, tmp_path / "packed.safetensors")
    assert again[1] is again[0][2]
    assert torch.equal(again[0](x), model[0](x))


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
    assert why["conv"] == "" if available() else loading.describe()
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
def test_convolutions_of_one_place_are_packed_without_kernels_too(pattern, clock):
    clock(2.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 64, 1, stride=2), nn.ReLU(), nn.Conv2d(64, 32, 3, padding=1)).eval()
    apply_(model, make_masks(find_targets(model), 0.9, pattern=pattern, allocate=uniform))
    x = torch.randn(2, 32, 6, 6)
    expected = model(x)
    packing = pack(model, x, kernels_too=False)
    assert (type(model[0]) is Pointwise) == (bool(packing.packed)) == (pattern != Unstructured())
    assert type(model[2]) is nn.Conv2d
    assert packing.layers[1].why == "only kernels of one place have a form in plain operations"
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    pack(model, x)
    form = SparseConv2d if pattern == Unstructured() else BlockConv2d
    assert (type(model[2]) is form) == available()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()],
        *[nn.Conv2d(16, 16, 3, padding="same", groups=2), nn.ReLU(inplace=True)],
        *[nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 8, 3, padding=1, padding_mode="reflect")],
        *[nn.Flatten(2), nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 1)],
    ).eval()
    with torch.no_grad():
        for each in model:
            if isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d):
                each.running_mean.normal_()
                each.running_var.uniform_(0.5, 2.0)
    return model


@pytest.mark.skipif(not available(), reason="there are no compiled kernels here")
@pytest.mark.parametrize("fuse", [True, False])
def test_convolutions_are_packed_with_what_follows(fuse, clock, tmp_path):
    clock(2.0)
    model, x = convolutions(), torch.randn(2, 3, 12, 12)
    sparsify(model, 0.9, allocate=uniform)
    expected = model(x)
    packing = pack(model, x, fuse=fuse, include=["?", "8"])
    kinds = {layer.name: layer.kind for layer in packing.layers}
    assert kinds == {"0": "SparseConv2d", "3": "SparseConv2d", "5": "dense", "6": "dense", "8": "SparseConv1d"}
    fused = {layer.name: layer.fused for layer in packing.packed}
    assert fused == ({"0": ("1", "2"), "3": ("4",), "8": ("9",)} if fuse else {"0": (), "3": (), "8": ()})
    assert [name for name, each in model.named_modules() if isinstance(each, Absorbed)] == [*sum(fused.values(), ())]
    assert ("SparseConv2d, with 1 and 2" in str(packing)) == fuse
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert not any(module.training for module in model.modules())
    told = save_packed(model, tmp_path / "packed.safetensors")
    again = convolutions()
    assert load_packed(again, tmp_path / "packed.safetensors") == told
    assert torch.equal(again(x), model(x))
    why = {layer.name: layer.why for layer in packing.layers}
    assert why["5"] == "each output reads one channel, and there is nothing to skip"
    assert why["6"] == "it pads with reflect, and only zeros are skipped"


@pytest.mark.skipif(not available(), reason="there are no compiled kernels here")
@pytest.mark.parametrize("values", [None, "int8"])
@pytest.mark.parametrize("height", [4, 16])
def test_blocks_of_outputs_are_packed_as_blocks(height, values, clock, tmp_path):
    clock(2.0)
    model, x = convolutions(), torch.randn(2, 3, 12, 12)
    sparsify(model, 0.9, allocate=uniform, pattern=Block(height, 1))
    dense = copy.deepcopy(model)
    packing = pack(model, x, include=["?", "8"], values=values)
    kinds = {layer.name: layer.kind for layer in packing.packed}
    assert kinds == {"0": "BlockConv2d", "3": "BlockConv2d", "8": "BlockConv1d"}
    assert {layer.name: layer.fused for layer in packing.packed} == {"0": ("1", "2"), "3": ("4",), "8": ("9",)}
    torch.testing.assert_close(model(x), dense(x), **({"rtol": 0.1, "atol": 0.1} if values else {}))
    save_packed(model, tmp_path / "packed.safetensors")
    again = convolutions()
    load_packed(again, tmp_path / "packed.safetensors")
    assert torch.equal(again(x), model(x))


@pytest.mark.skipif(not available(), reason="there are no compiled kernels here")
def test_convolutions_that_stay_dense_keep_what_follows(clock):
    clock(0.5)
    model, x = convolutions(), torch.randn(2, 3, 12, 12)
    sparsify(model, 0.9, allocate=uniform)
    assert not pack(model, x).packed
    assert isinstance(model[1], nn.BatchNorm2d)
    assert pack(model, x, include="0").layers[0].fused == ()
    clock(2.0)
    few = convolutions()
    sparsify(few, 0.4, allocate=uniform)
    assert pack(few, x, include="0").layers[0].why == "40% zeros; a convolution is faster from about 70 % on"
    training = convolutions().train()
    sparsify(training, 0.9, allocate=uniform)
    (layer,) = pack(training, x, include="0").layers
    assert layer.fused == ()  # nor would it learn its statistics any more
    assert layer.kind == "SparseConv2d"


def test_convolutions_without_kernels_say_so(clock, monkeypatch):
    clock(2.0)
    monkeypatch.setattr(loading, "_library", lambda: (None, "none, for the test"))
    model = convolutions()
    sparsify(model, 0.9, allocate=uniform)
    packing = pack(model, torch.randn(2, 3, 12, 12), include="0")
    assert packing.layers[0].why == "kernels: none, for the test"
    assert isinstance(model[1], nn.BatchNorm2d)


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
    with pytest.raises(ValueError, match=r"no layer matches 'head'; the closest names are"):
        pack(model, torch.randn(4, 48), include="head")
    with pytest.raises(ValueError, match="how many times faster, so it is positive; got 0"):
        pack(model, torch.randn(4, 48), at_least=0)
    for without, x in (
        (model, torch.zeros(4, 48, device="meta")),
        (nn.Sequential(nn.Linear(48, 4)).to("meta"), torch.zeros(4, 48)),
    ):
        with pytest.raises(ValueError, match="the meta device"):
            pack(without, x)
    with pytest.raises(ValueError, match="no linear layer or convolution"):
        pack(nn.ReLU(), torch.randn(4, 48))
    with pytest.raises(ValueError, match=r"put it in nn\.Sequential"):
        pack(nn.Linear(48, 4), torch.randn(4, 48))
    assert all(a is b for a, b in zip(before, model.modules(), strict=True))


@pytest.mark.parametrize("trained", [(), ("weight",), ("bias",), ("weight", "bias")])
def test_what_is_frozen_stays_frozen(trained, clock, tmp_path):
    """Weights and biases each by themselves, also when read from a file."""
    clock(2.0)

    def frozen(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.rpartition(".")[2] in trained)
        return model

    model, again = frozen(model_of(GroupedColumns(16))), frozen(three_layers())
    pack(model, torch.randn(4, 48), kernels_too=False)
    assert isinstance(model[0], GroupedLinear)
    save_packed(model, tmp_path / "packed.safetensors")
    load_packed(again, tmp_path / "packed.safetensors")
    for packed in (model, again):
        for name, parameter in packed.named_parameters():
            assert parameter.requires_grad == ({"values": "weight"}.get(key := name.rpartition(".")[2], key) in trained)


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
    assert "times faster" in text
    assert "4.00" in text
    assert "layers packed; their" in text


def test_times_are_measured():
    calls = []
    times = inference._timed([lambda x: calls.append(1), lambda x: calls.append(2)], torch.zeros(1))
    assert len(times) == 2
    assert min(times) > 0
    assert calls.count(1) == calls.count(2)


def test_a_report_is_a_value():
    layer = inference.PackedLayer("a", "dense", (2, 3), 0.5)
    assert layer.speedup is None
    assert dataclasses.replace(layer, packed_ms=2.0, best_dense_ms=3.0).speedup == 1.5


def in_rows(x):
    """The same numbers, in which the channels of a place lie side by side."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def network_of(dimensions, formats):
    """Convolutions with and without zeros, with weights in a memory format of torch."""
    torch.manual_seed(0)
    layer, pooling = getattr(nn, f"Conv{dimensions}d"), getattr(nn, f"MaxPool{dimensions}d")
    model = nn.Sequential(
        *(layer(3, 16, 3, padding=1), nn.GELU(), layer(16, 32, 1), nn.ReLU(), pooling(2)),
        *(layer(32, 32, 3, padding=1), nn.GELU(), layer(32, 16, 3, padding=1), nn.GELU(), layer(16, 8, 1)),
    ).eval()
    sparsify(model, 0.8, include=["2.weight", "5.weight", "9.weight"], allocate=uniform)
    return model.to(memory_format=formats) if formats else model


@pytest.mark.parametrize(
    ("dimensions", "formats"), [(1, None), (2, torch.channels_last), (3, torch.channels_last_3d)], ids=str
)
def test_every_memory_format_is_packed_alike(dimensions, formats, clock, monkeypatch, tmp_path):
    """The same forms of the same bytes, tried on what packed layers write; and either model takes either input."""
    clock(2.0)
    x = torch.randn(2, 3, *[10] * dimensions)
    dense, expected = network_of(dimensions, None), network_of(dimensions, None)(x)
    tried = []
    convolved = SparseConv2d._convolved

    def spy(self, image, *args):
        tried.append(image.is_contiguous())
        return convolved(self, image, *args)

    monkeypatch.setattr(SparseConv2d, "_convolved", spy)
    made = []
    for model, example in ((dense, x), (network_of(dimensions, formats), in_rows(x))):
        made.append((model, pack(model, example)))
    assert all(tried)
    if tried and dimensions == 2:
        middle = made[1][0][7].weight  # of a layer without zeros, which goes on as the packed ones write
        assert middle.stride() == made[0][0][7].weight.stride()
    (first, found), (second, again) = made
    assert [(each.name, each.kind, each.bytes) for each in found.layers] == [
        (each.name, each.kind, each.bytes) for each in again.layers
    ]
    assert (found.blocks, found.poolings) == (again.blocks, again.poolings)
    assert [type(each) for each in first.modules()] == [type(each) for each in second.modules()]
    for ours, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(ours, other)
    for model in (first, second):
        for given in (x, in_rows(x)):
            torch.testing.assert_close(model(given), expected, rtol=1e-4, atol=1e-5)
    if not found.packed:  # without kernels none of them is, in either format
        with pytest.raises(ValueError, match="no layer of Sequential is packed"):
            save_packed(first, tmp_path / "packed.safetensors")
        return
    save_packed(first, tmp_path / "packed.safetensors")
    read = network_of(dimensions, formats)
    load_packed(read, tmp_path / "packed.safetensors")
    if any(isinstance(each, SparseConv2d) for each in read.modules()):
        assert all(each.is_contiguous() for each in read.parameters())
    torch.testing.assert_close(read(in_rows(x)), expected, rtol=1e-4, atol=1e-5)
