"""2:4 on CUDA: what is stored gives the weight back, every condition says what is wrong, `pack` takes it if faster.

No GPU is needed but for the last test: on other devices the layer computes the same with the dense weight, and `pack`
meets stand-ins for the device and for the clock.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur import NM, sparsify
from secateur.inference import GroupedLinear, load_packed, pack, save_packed
from secateur.inference import packing as inference
from secateur.inference.linear import SemiStructuredLinear, why_no_semi_structured_device, why_not_semi_structured


def two_of_four(rows=64, columns=128, dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    layer = nn.Linear(columns, rows).to(dtype)
    sparsify(nn.Sequential(layer), pattern=NM(2, 4))
    return layer.requires_grad_(False)


@settings(max_examples=10)
@given(data=st.data())
def test_the_weight_comes_back(data):
    rows, columns = 32 * data.draw(st.integers(1, 3)), 64 * data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16]))
    layer = two_of_four(rows, columns, dtype, seed=rows + columns)
    gone = torch.rand(rows, columns) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))  # fewer than two of four do as well
    layer.weight[gone] = 0
    packed = SemiStructuredLinear.from_dense(layer.weight, layer.bias)
    assert torch.equal(packed.weight, layer.weight)
    assert packed.values.numel() * 2 == layer.weight.numel()
    x = torch.randn(*data.draw(st.sampled_from([(5,), (0,), (2, 3), ()])), columns, dtype=dtype)
    torch.testing.assert_close(packed(x), layer(x), rtol=2e-2, atol=2e-2)


def test_weights_that_are_not_contiguous():
    layer = two_of_four(64, 64)
    turned = layer.weight.t().contiguous().t()
    assert torch.equal(SemiStructuredLinear.from_dense(turned).weight, layer.weight)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(32, 64), "takes float16 and bfloat16, and its weight is torch.float32"),
        (torch.zeros(48, 64).half(), "multiples of 32 outputs and 64 inputs, and it has 48 and 64"),
        (torch.zeros(32, 96).half(), "multiples of 32 outputs and 64 inputs, and it has 32 and 96"),
        (torch.zeros(0, 64).half(), "multiples of 32 outputs and 64 inputs, and it has 0 and 64"),
        (torch.ones(32, 64).half(), "its zeros are not 2:4"),
    ],
)
def test_what_does_not_fit_is_said(weight, message):
    assert message in why_not_semi_structured(weight)
    with pytest.raises(ValueError, match=message):
        SemiStructuredLinear.from_dense(weight)


def test_one_group_of_three_is_one_too_many():
    layer = two_of_four(32, 64)
    layer.weight[5, 4:7] = 1.0
    assert why_not_semi_structured(layer.weight) == "its zeros are not 2:4"


@pytest.mark.parametrize(
    ("device", "capability", "message"),
    [
        ("cpu", None, "runs on CUDA devices, and the model is on cpu"),
        ("meta", None, "runs on CUDA devices, and the model is on meta"),
        ("cuda:0", (7, 5), "needs a GPU of compute capability 8.0 or later, and cuda:0 has 7.5"),
        ("cuda:0", (8, 0), ""),
        ("cuda:0", (9, 0), ""),
    ],
)
def test_devices(monkeypatch, device, capability, message):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = why_no_semi_structured_device(torch.device(device))
    assert message in found
    assert bool(found) == bool(message)


@pytest.mark.parametrize(
    ("values", "places", "bias", "message"),
    [
        (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.uint8), None, r"places \(2, 3\) for values \(2, 4\)"),
        (torch.zeros(2, 3), torch.full((2, 1), 4, dtype=torch.uint8), None, r"for values \(2, 3\)"),
        (torch.zeros(2, 4), torch.full((2, 2), 4, dtype=torch.uint8), torch.zeros(3), r"\(3,\) for 2 outputs"),
        (torch.zeros(2, 4), torch.full((2, 2), 5, dtype=torch.uint8), None, "a place is none"),  # the same twice
        (torch.zeros(2, 4), torch.full((2, 2), 16, dtype=torch.uint8), None, "a place is none"),
        (torch.zeros(2, 4), torch.full((2, 2), 4, dtype=torch.int32), None, "a place is none"),
    ],
)
def test_stored_tensors_are_checked(values, places, bias, message):
    with pytest.raises(ValueError, match=message):
        SemiStructuredLinear(values, places, bias)


def test_inputs_of_another_size_are_refused():
    layer = two_of_four()
    packed = SemiStructuredLinear.from_dense(layer.weight)
    for x in (torch.randn(2, 64), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="its last dimension must be 128"):
            packed(x)


def test_what_is_saved_stays_in_main_memory_and_in_halves():
    packed = SemiStructuredLinear.from_dense(two_of_four().weight, torch.randn(64))
    x = torch.randn(3, 128)
    expected = packed(x)
    moved = copy.deepcopy(packed).to("meta")
    assert (moved.values.device.type, moved.bias.device.type) == ("cpu", "meta")
    assert copy.deepcopy(packed).double().values.dtype == torch.bfloat16
    assert copy.deepcopy(packed).half().values.dtype == torch.float16
    assert packed.double()(x.double()).dtype == torch.float64
    torch.testing.assert_close(packed(x.double()).float(), expected)


def test_the_operand_is_made_once_and_again_after_a_change(monkeypatch):
    made = []
    monkeypatch.setattr(
        torch.sparse, "to_sparse_semi_structured", lambda weight: made.append(weight.clone()) or made[-1]
    )
    packed = SemiStructuredLinear.from_dense(two_of_four().weight)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)  # there is no such device here
    device = torch.device("cuda:0")
    assert packed._on(device) is packed._on(device)
    assert len(made) == 1
    packed.values.mul_(2)
    assert torch.equal(packed._on(device), packed.weight)
    assert len(made) == 2
    assert copy.deepcopy(packed)._operand is None


# ---------------------------------------------------------------------------------------------------------- in pack


@pytest.fixture
def stand_in(monkeypatch):
    """The processor passes for a GPU, and 2:4 for this many times faster than dense, grouped columns for twice."""

    def set_to(speedup):
        def timed(functions, x):
            del x
            known = {SemiStructuredLinear: 1 / speedup, GroupedLinear: 0.5}
            return [known.get(type(function), 1.0) for function in functions]

        monkeypatch.setattr(inference, "_timed", timed)
        monkeypatch.setattr(inference, "why_no_semi_structured_device", lambda device: "")

    return set_to


def small():
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 10)).bfloat16().eval()


def test_pack_takes_it_where_it_is_faster(stand_in, tmp_path):
    stand_in(1.5)
    torch.manual_seed(0)
    model, x = small(), torch.randn(4, 128).bfloat16()
    sparsify(model, pattern=NM(2, 4))
    expected = model(x)
    packing = pack(model, x, kernels_too=False, semi_structured=True)
    assert [layer.kind for layer in packing.layers] == ["SemiStructuredLinear", "SemiStructuredLinear", "dense"]
    assert packing.layers[0].speedup == 1.5
    assert packing.layers[2].why == "2:4 on CUDA takes multiples of 32 outputs and 64 inputs, and it has 10 and 32"
    torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)
    save_packed(model, tmp_path / "packed.safetensors")
    again = small()
    load_packed(again, tmp_path / "packed.safetensors")
    assert torch.equal(again(x), model(x))


def test_pack_keeps_dense_unless_it_is_faster(stand_in):
    stand_in(1.05)
    model, x = small(), torch.randn(4, 128).bfloat16()
    sparsify(model, pattern=NM(2, 4))
    packing = pack(model, x, kernels_too=False, semi_structured=True)
    assert not packing.packed
    assert packing.layers[0].why == "dense is nearly as fast"


def test_pack_takes_the_faster_of_two_forms(stand_in):
    stand_in(1.5)
    torch.manual_seed(0)
    model, x = small(), torch.randn(4, 128).bfloat16()
    with torch.no_grad():
        model[0].weight[:, 1::2] = 0  # 2:4 and columns at once
    assert pack(model, x, kernels_too=False, semi_structured=True).layers[0].kind == "GroupedLinear"


def test_pack_says_where_it_cannot(stand_in):
    model, x = small(), torch.randn(4, 128).bfloat16()
    sparsify(model, 0.5)
    with pytest.raises(ValueError, match="2:4 runs on CUDA devices, and the model is on cpu; leave semi_structured"):
        pack(model, x, semi_structured=True)
    stand_in(1.5)
    packing = pack(model, x, kernels_too=False, semi_structured=True)
    assert packing.layers[0].why == "its zeros are not 2:4"
    packing = pack(model.float(), x.float(), kernels_too=False, semi_structured=True)
    assert packing.layers[0].why == "2:4 on CUDA takes float16 and bfloat16, and its weight is torch.float32"


def test_it_is_not_tried_unless_asked(stand_in):
    stand_in(1.5)
    model, x = small(), torch.randn(4, 128).bfloat16()
    sparsify(model, pattern=NM(2, 4))
    assert not pack(model, x, kernels_too=False).packed


# ------------------------------------------------------------------------------------------------------- on a GPU


GPU = torch.device("cuda:0")


@pytest.mark.skipif(
    not torch.cuda.is_available() or why_no_semi_structured_device(GPU) != "",
    reason="there is no CUDA device of compute capability 8.0",
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype, tmp_path):
    torch.manual_seed(0)
    model, x = small().to(GPU, dtype), torch.randn(64, 128, device=GPU, dtype=dtype)
    sparsify(model, pattern=NM(2, 4))
    expected = model(x)
    packing = pack(model, x, semi_structured=True, at_least=1e-6)
    assert [layer.kind for layer in packing.layers[:2]] == ["SemiStructuredLinear"] * 2
    torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)
    save_packed(model, tmp_path / "packed.safetensors")
    again = small().to(GPU, dtype)
    load_packed(again, tmp_path / "packed.safetensors")
    torch.testing.assert_close(again(x), expected, rtol=2e-2, atol=2e-2)
