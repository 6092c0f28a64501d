"""Convolutions whose inputs are rounded to int8 as they come, at every level of processor that this machine has."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from secateur.inference import SparseConv1d, SparseConv2d, to_int8
from secateur.native import convolutions, rounded_inputs, sparse_convolution, together_for
from support.kernels import at_level, libraries, with_threads


def images_rounded(x):
    return rounded_inputs(x.flatten(1)).view(x.shape)


def convolved(x, weight, bias, addend, stride, padding, dilation, groups, rectified):
    above, below, left, right = padding
    around = functional.pad(x.double(), (left, right, above, below))
    y = functional.conv2d(around, weight.double(), None if bias is None else bias.double(), stride, 0, dilation, groups)
    y = y if addend is None else y + addend.double()
    return y.relu() if rectified else y


def everywhere(layer, *arguments, threads=1, own=False):
    """What each level makes, in one thread and in several, with and without what only some processors have."""
    for name in libraries():
        made = []

        def compute(made=made):
            for convolutions._WIDE in (0, 8):
                made.append(layer(*arguments))

        try:
            with at_level(name):
                compute()
                with_threads(threads, own, compute)
        finally:
            convolutions._WIDE = 0
        yield name, made


@settings(max_examples=15)
@given(data=st.data(), threads=st.integers(1, 3), own=st.booleans())
def test_it_is_the_convolution_of_rounded_weight_and_rounded_inputs(data, threads, own):
    """Any shape, stride, padding, dilation and groups; inputs of one sign and of both.

    A tie may fall to the next code.
    """
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    pair = lambda low, high: [number(low, high), number(low, high)]  # noqa: E731
    groups, channels, outputs, images = number(1, 3), number(1, 9), number(1, 6), number(1, 4)
    kernel, stride, dilation = pair(1, 5), pair(1, 3), pair(1, 3)
    padding = [*pair(0, 4), *pair(0, 4)]
    height, width = number(1, 40), number(1, 40)
    for size, before, after, at in ((height, *padding[:2], 0), (width, *padding[2:], 1)):
        assume(size + before + after > (kernel[at] - 1) * dilation[at])
    generator = torch.Generator().manual_seed(number(0, 999))
    weight = torch.randn(groups * outputs, channels, *kernel, generator=generator)
    weight *= torch.rand(weight.shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    numbers, scales = to_int8(weight)
    weight = numbers * scales.view(-1, 1, 1, 1)
    bias = torch.randn(len(weight), generator=generator) if data.draw(st.booleans()) else None
    x = torch.randn(images, groups * channels, height, width, generator=generator)
    x = x.relu() if data.draw(st.booleans()) else x + data.draw(st.sampled_from([0.0, 3.0, -5.0]))
    if data.draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    shape = convolved(x, weight, None, None, rectified=False, **geometry).shape
    addend = torch.randn(shape, generator=generator) if data.draw(st.booleans()) else None
    rectified, together = data.draw(st.booleans()), number(1, channels)
    stored = {"scales": scales, "together": together, "rectified": rectified, "round_inputs": True, **geometry}
    layer = SparseConv2d.from_dense(numbers, bias, **stored)
    assert layer.rounds_inputs
    assert torch.equal(layer.weight, weight)
    assert layer.values.shape == (layer.indices.shape[0] // 4, 4)
    rounded = images_rounded(x)
    step = (x.flatten(1).amax(1).clamp_min(0) - x.flatten(1).amin(1).clamp_max(0)) / 255
    assert bool(((x - rounded).abs().flatten(1) <= 0.51 * step[:, None]).all())
    wanted = convolved(rounded, weight, bias, addend, rectified=rectified, **geometry)
    tie = 1.01 * step.view(-1, 1, 1, 1) * weight.abs().amax((1, 2, 3)).view(1, -1, 1, 1)
    for name, made in everywhere(layer, x, addend, threads=threads, own=own):
        for each in made:
            near = 1e-4 + 1e-5 * wanted.abs() + tie
            assert bool(((each.double() - wanted).abs() <= near).all()), name
            torch.testing.assert_close(each, made[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("channels", "height", "width", "kernel", "stride"),
    [
        (3, 1, 900, [1, 9], 1), (3, 900, 1, [9, 1], 1), (2, 9, 400, [5, 3], 1), (70, 28, 28, [3, 3], 1),
        (6, 57, 60, [3, 3], 2), (600, 16, 16, [1, 1], 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shift", [0, 100])
def test_sums_are_exact(channels, height, width, kernel, stride, shift):
    """Inputs that are whole numbers times their scale are rounded to themselves; so are the sums, of large tiles, of
    blocks whose sums are put away, and of padding, whose code is that of 0."""
    generator = torch.Generator().manual_seed(channels + shift)
    numbers = torch.randint(-127, 128, (5, channels, *kernel), generator=generator)
    numbers = (numbers * (torch.rand(numbers.shape, generator=generator) < 0.3)).to(torch.int8)
    x = torch.randint(0, 256, (2, channels, height, width), generator=generator).float()
    x[:, 0, 0, 0], x[:, -1, -1, -1] = 0, 255
    x, padding = x - shift, [kernel[0] // 2] * 2 + [kernel[1] // 2] * 2
    for together in {min(16, channels), channels}:
        layer = SparseConv2d.from_dense(
            numbers, padding=padding, stride=[stride] * 2, together=together, scales=torch.ones(5), round_inputs=True
        )
        wanted = convolved(x, numbers, None, None, stride, padding, (1, 1), 1, False)
        for _, made in everywhere(layer, x, threads=2):
            for each in made:
                torch.testing.assert_close(each.double(), wanted, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_an_image_that_is_not_finite_has_outputs_that_are_none(odd):
    numbers, scales = to_int8(torch.randn(4, 3, 3, 3))
    layer = SparseConv2d.from_dense(numbers, scales=scales, round_inputs=True)
    x = torch.ones(3, 3, 5, 5)
    x[1, 2, 4, 4] = odd
    for _, made in everywhere(layer, x, threads=2):
        for each in made:
            assert bool(each[1].isnan().all())
            assert bool(each[::2].isfinite().all())
    for _, made in everywhere(layer, torch.zeros(2, 3, 5, 5)):
        assert not any(each.any() for each in made)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_inputs_of_other_dtypes(dtype):
    numbers, scales = to_int8(torch.randn(6, 4, 3, 3))
    layer, x = SparseConv2d.from_dense(numbers, scales=scales, round_inputs=True), torch.randn(2, 4, 6, 6).to(dtype)
    wanted = functional.conv2d(images_rounded(x.float()), layer.weight)
    for _, made in everywhere(layer, x):
        assert all(each.dtype == dtype for each in made)
        torch.testing.assert_close(made[0].float(), wanted, rtol=5e-2, atol=5e-2)


def test_no_image_and_no_weight():
    layer = SparseConv2d.from_dense(
        torch.zeros(3, 4, 3, 3, dtype=torch.int8), torch.ones(3), scales=torch.ones(3), round_inputs=True
    )
    for _, made in everywhere(layer, torch.zeros(0, 4, 5, 5)):
        assert made[0].shape == (0, 3, 3, 3)
    for _, made in everywhere(layer, torch.randn(2, 4, 5, 5)):
        assert all(torch.equal(each, torch.ones(2, 3, 3, 3)) for each in made)


def test_gradients_pass_as_if_nothing_were_rounded():
    numbers, scales = to_int8(torch.randn(6, 4, 3, 3) * (torch.rand(6, 4, 3, 3) < 0.3))
    layer = SparseConv2d.from_dense(numbers, scales=scales, round_inputs=True)
    x, other = (torch.randn(2, 4, 6, 6, requires_grad=True) for _ in range(2))
    layer(x).sum().backward()
    functional.conv2d(other, layer.weight).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-4, atol=1e-4)


def layers():
    torch.manual_seed(0)
    for form, module, x in (
        (SparseConv2d, nn.Conv2d(6, 8, 3, 2, (1, 2), groups=2), torch.randn(2, 6, 9, 9)),
        (SparseConv1d, nn.Conv1d(6, 8, 3, dilation=2, bias=False), torch.randn(2, 6, 9)),
    ):
        yield form.from_module(module, values="int8", inputs="int8"), x


@pytest.mark.parametrize(("layer", "x"), list(layers()), ids=["2d", "1d"])
def test_compile_and_export_see_one_operator(layer, x):
    assert ", values=int8, inputs=int8" in repr(layer)
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert called.count("secateur.sparse_convolution.default") == 1
    more = torch.cat([x, x])
    torch.testing.assert_close(exported.module()(more), layer(more))


def test_the_operator_obeys_torch():
    layer, x = next(iter(layers()))
    stored = layer.indices, layer.pointers, layer.values, layer.bias, None
    geometry = layer.kernel, layer.stride, layer.padding, layer.dilation, layer.groups, layer.together, True
    torch.library.opcheck(
        torch.ops.secateur.sparse_convolution.default,
        (x.requires_grad_(), *stored, *geometry, layer.scales),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


# ------------------------------------------------------------------------------------------------- what is refused


def call(**changes):
    """A call of a right layer, but for the changes: one output keeps 2 weights of 5, in one four."""
    right = {
        "x": torch.randn(2, 5, 3, 3),
        "indices": torch.tensor([0, 4, 4, 4]).to(torch.uint16),
        "pointers": torch.tensor([0, 4], dtype=torch.int32),
        "values": torch.tensor([[1, 2, 0, 0]], dtype=torch.int8),
        "bias": None,
        "addend": None,
        "kernel": [1, 1],
        "stride": [1, 1],
        "padding": [0] * 4,
        "dilation": [1, 1],
        "groups": 1,
        "together": 5,
        "rectified": False,
        "scales": torch.ones(1),
    }
    return sparse_convolution(**{**right, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": None}, "the scales of int8 values are float32"),
        ({"values": torch.ones(1, 4)}, "side by side are int8, not torch.float32"),
        ({"values": torch.ones(2, 4, dtype=torch.int8)}, r"4 indices for values of shape \(2, 4\)"),
        ({"values": torch.ones(1, 3, dtype=torch.int8)}, r"4 indices for values of shape \(1, 3\)"),
        ({"indices": torch.tensor([0, 4, 4, 5]).to(torch.uint16)}, "an index is 5, but there are 5 inputs"),
        ({"indices": torch.zeros(3).to(torch.uint16)}, r"3 indices for values of shape \(1, 4\)"),
        ({"pointers": torch.tensor([0, 3], dtype=torch.int32)}, "the pointers do not rise from 0 to 4"),
        (
            {"pointers": torch.tensor([0, 2, 4], dtype=torch.int32), "scales": torch.ones(2)},
            "a pointer is no multiple of 4",
        ),
        (
            {"together": 4, "pointers": torch.tensor([0, 4, 4], dtype=torch.int32)},
            "an index lies in another block of channels",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "changed",
)
def test_messages(changes, message):
    assert call().shape == (2, 1, 3, 3)
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_inputs_are_not_rounded_without_values():
    with pytest.raises(ValueError, match="inputs are rounded for a weight in int8 only"):
        SparseConv2d.from_module(nn.Conv2d(4, 4, 3), inputs="int8")


def test_blocks_of_bytes_are_larger():
    assert together_for(64, [3, 3], 56 * 56, 2 * 56, 0.1, of_bytes=True) > together_for(64, [3, 3], 56 * 56, 112, 0.1)
