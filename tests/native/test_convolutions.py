"""The operator for convolutions against float64, at every level of this processor, and what it refuses."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from secateur.inference import BlockConv2d, SparseConv2d
from secateur.native import (
    RECTIFIERS,
    available,
    convolutions,
    dense_convolution,
    operators,
    sparse_convolution,
    together_for,
    windows,
)
from support.kernels import at_level, libraries, with_threads


def expected(x, weight, bias, addend, stride, padding, dilation, groups, rectified):
    above, below, left, right = padding
    around = functional.pad(x.double(), (left, right, above, below))
    bias = None if bias is None else bias.double()
    y = functional.conv2d(around, weight.double(), bias, stride, 0, dilation, groups)
    y = y if addend is None else y + addend.double()
    return y.relu() if rectified else y


@pytest.mark.parametrize("form", [SparseConv2d, BlockConv2d])
@settings(max_examples=50)
@given(data=st.data(), threads=st.integers(1, 5), own=st.booleans())
@pytest.mark.long
def test_it_is_the_convolution_at_every_level(data, threads, own, form):
    """Any shape, stride, padding and dilation; the same bits whatever the threads and the width of vectors."""
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    pair = lambda low, high: [number(low, high), number(low, high)]  # noqa: E731
    groups, channels, outputs = number(1, 3), number(1, 9), number(1, 6) * form.OUTPUTS
    kernel, stride, dilation = pair(1, 5), pair(1, 3), pair(1, 3)
    padding = [*pair(0, 4), *pair(0, 4)]
    height, width, images = number(1, 40), number(1, 40), number(0, 3)
    for size, before, after, at in ((height, *padding[:2], 0), (width, *padding[2:], 1)):
        assume(size + before + after > (kernel[at] - 1) * dilation[at])
    generator = torch.Generator().manual_seed(number(0, 999))
    weight = torch.randn(groups * outputs, channels, *kernel, generator=generator)
    weight *= torch.rand(weight.shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    weight = weight.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    bias = torch.randn(groups * outputs, generator=generator) if data.draw(st.booleans()) else None
    x = torch.randn(images, groups * channels, height, width, generator=generator)
    layout = data.draw(st.sampled_from(["plain", "channels_last", "strided"]))
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "strided":
        x = torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    y = expected(x, weight, bias, None, rectified=False, **geometry)
    addend = torch.randn(y.shape, generator=generator) if data.draw(st.booleans()) else None
    rectified, together = data.draw(st.booleans()), number(1, channels)
    layer = form.from_dense(weight, bias, together=together, rectified=rectified, **geometry)
    assert torch.equal(layer.weight, weight)
    y = expected(x, weight, bias, addend, rectified=rectified, **geometry)
    for name in libraries():
        results = []

        def compute(results=results):
            for convolutions._WIDE in (8, 16, 0):
                results.append(layer(x, addend))

        with at_level(name):
            compute()
            with_threads(threads, own, compute)
        for result in results:
            torch.testing.assert_close(result.double(), y, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        if name is not None:
            assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("channels", "height", "width", "kernel"),
    [
        (3, 1, 3000, [1, 9]), (3, 3000, 1, [9, 1]), (2, 9, 700, [5, 3]), (70, 28, 28, [3, 3]), (40, 16, 16, [1, 1]),
        (9, 14, 14, [1, 1]), (9, 8, 13, [1, 1]),
    ],
)  # fmt: skip
def test_long_wide_and_deep_images(library, channels, height, width, kernel):
    """Tiles that are a small part of a row, and blocks whose sums are put away."""
    weight = torch.randn(8, channels, *kernel) * (torch.rand(8, channels, *kernel) < 0.3)
    x, padding = torch.randn(2, channels, height, width), [kernel[0] // 2] * 2 + [kernel[1] // 2] * 2
    for together in (1, 16, channels):
        wanted = expected(x, weight, None, None, (1, 1), padding, (1, 1), 1, False)
        for form in (SparseConv2d, BlockConv2d):
            y = form.from_dense(weight, padding=padding, together=together)(x)
            torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_inputs_of_other_dtypes(library, dtype):
    weight = torch.randn(8, 5, 3, 3) * (torch.rand(8, 5, 3, 3) < 0.3)
    x = torch.randn(2, 5, 9, 9).to(dtype)
    wanted = expected(x, weight, None, torch.ones(2, 8, 9, 9), (1, 1), [1] * 4, (1, 1), 1, False)
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-12}[dtype]
    for form in (SparseConv2d, BlockConv2d):
        y = form.from_dense(weight, padding=[1] * 4)(x, torch.ones(2, 8, 9, 9).to(dtype))
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_what_is_removed_is_not_multiplied(library, odd):
    """Where the dense convolution gives nan from 0 · inf, this one gives what the kept weights give."""
    weight = torch.zeros(2, 2, 3, 3)
    weight[0, 0, 1, 1] = weight[1, 1, 1, 1] = 1.0
    x = torch.ones(1, 2, 4, 4)
    x[0, 1, 2, 2] = odd
    if library is not None:
        y = SparseConv2d.from_dense(weight, padding=[1] * 4)(x)
        torch.testing.assert_close(y, x, equal_nan=True)
        y = SparseConv2d.from_dense(weight, padding=[1] * 4, rectified=True)(x)
        torch.testing.assert_close(y, x.relu(), equal_nan=True)


@pytest.mark.parametrize("form", [SparseConv2d, BlockConv2d])
def test_gradients_reach_the_input_and_the_addend(form):
    weight = torch.randn(4, 3, 3, 2) * (torch.rand(4, 3, 3, 2) < 0.4)
    geometry = {"stride": [2, 1], "padding": [1, 0, 2, 1], "dilation": [1, 2], "groups": 2}
    weight = torch.cat([weight, weight])
    layer = form.from_dense(weight, rectified=True, **geometry)
    x = torch.randn(2, 6, 7, 6, requires_grad=True)
    addend = torch.randn(expected(x, weight, None, None, rectified=False, **geometry).shape, requires_grad=True)
    layer(x, addend).square().sum().backward()
    found = x.grad, addend.grad
    x.grad = addend.grad = None
    expected(x, weight, None, addend, rectified=True, **geometry).square().sum().backward()
    for own, dense in zip(found, (x.grad, addend.grad), strict=True):
        torch.testing.assert_close(own, dense, rtol=1e-4, atol=1e-4)


def test_gradients_reach_an_addend_beside_an_input_that_needs_none():
    addend = torch.randn(2, 2, 2, 2, requires_grad=True)
    call(addend=addend).sum().backward()
    torch.testing.assert_close(addend.grad, torch.ones(2, 2, 2, 2))


def call(**changes):
    """A call that is right, but for the changes."""
    right = {
        "x": torch.randn(2, 2, 4, 4),
        "indices": torch.tensor([0, 8, 9, 17]).to(torch.uint16),
        "pointers": torch.tensor([0, 2, 2, 3, 4], dtype=torch.int32),
        "values": torch.randn(4),
        "bias": None,
        "addend": None,
        "kernel": [3, 3],
        "stride": [1, 1],
        "padding": [0, 0, 0, 0],
        "dilation": [1, 1],
        "groups": 1,
        "together": 1,
        "rectified": False,
    }
    return sparse_convolution(**{**right, **changes})


def test_the_operator_obeys_torch():
    """Schema, fake kernel and autograd registration agree with what it does."""
    operator = torch.ops.secateur.sparse_convolution
    arguments = (
        torch.randn(2, 2, 4, 4, requires_grad=True),
        torch.tensor([0, 8, 9, 17]).to(torch.uint16),
        torch.tensor([0, 2, 2, 3, 4], dtype=torch.int32),
        torch.randn(4),
        torch.randn(2),
        torch.randn(2, 2, 3, 3, requires_grad=True),
        *([3, 3], [2, 1], [2, 1, 0, 1], [1, 1], 1, 1, True),
    )
    torch.library.opcheck(
        operator.default, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.randn(2, 4, 4)}, r"the input is \(images, channels, height, width\) of floats, not torch.float32"),
        ({"x": torch.ones(2, 2, 4, 4, dtype=torch.int32)}, "of floats, not torch.int32"),
        ({"indices": torch.tensor([0, 8, 9, 18]).to(torch.uint16)}, "an index is 18, but there are 18 inputs"),
        ({"indices": torch.tensor([0, 9, 9, 17]).to(torch.uint16)}, "an index lies in another block of channels"),
        ({"indices": torch.tensor([0, 8, 9, 17])}, "indices are a vector of uint16"),
        ({"pointers": torch.tensor([0, 2, 2, 3, 5], dtype=torch.int32)}, "do not rise from 0 to 4"),
        ({"pointers": torch.tensor([0, 3, 2, 3, 4], dtype=torch.int32)}, "do not rise from 0 to 4"),
        ({"values": torch.randn(3)}, r"4 indices for values of shape \(3,\)"),
        ({"values": torch.randn(4).double()}, "values are float32 or bfloat16"),
        (
            {"values": torch.randn(4, 16), "shared": 16},
            "16 outputs share the places of their weights; the kernel has 4",
        ),
        ({"values": torch.randn(4, 0), "shared": 0}, "0 outputs share the places of their weights; the kernel has 4"),
        ({"values": torch.randn(4), "shared": 4}, r"4 indices for values of shape \(4,\)"),
        (
            {"values": torch.randn(4, 4), "bias": torch.randn(2), "shared": 4},
            r"the bias is float32 of shape \(8,\)",
        ),
        ({"values": torch.randn(3, 4), "shared": 4}, r"4 indices for values of shape \(3, 4\)"),
        ({"values": torch.randn(4, 4, 1), "shared": 4}, r"4 indices for values of shape \(4, 4, 1\)"),
        ({"bias": torch.randn(3)}, r"the bias is float32 of shape \(2,\)"),
        ({"addend": torch.randn(2, 2, 2, 3)}, r"what is added is of shape \(2, 2, 2, 2\) on cpu, not \(2, 2, 2, 3\)"),
        ({"kernel": [3]}, "kernel, stride and dilation are two numbers from 1 on"),
        ({"stride": [0, 1]}, "two numbers from 1 on"),
        ({"together": 0}, "groups and together one"),
        ({"padding": [0, 0]}, "padding is four numbers from 0 on"),
        ({"padding": [0, 0, 0, -1]}, "padding is four numbers from 0 on"),
        ({"dilation": [1, 2]}, r"a kernel of \(3, 3\), dilated by \(1, 2\), is larger than the padded image"),
        ({"groups": 3}, "2 channels and .* outputs are not 3 groups"),
        ({"x": torch.randn(2, 3, 4, 4)}, "pointers where|outputs|index"),
    ],
)
def test_what_is_refused(changes, message):
    assert call().shape == (2, 2, 2, 2)
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_tensors_are_checked_again_after_a_change():
    indices = torch.tensor([0, 8, 9, 17]).to(torch.uint16)
    call(indices=indices)
    indices[1] = 60000
    with pytest.raises(ValueError, match="an index is 60000"):
        call(indices=indices)
    # the same entries as another kernel would have them in one block
    right = torch.tensor([0, 8, 9, 17]).to(torch.uint16)
    pointers = torch.tensor([0, 2, 2, 3, 4], dtype=torch.int32)
    call(indices=right, pointers=pointers)
    with pytest.raises(ValueError, match="an index lies in another block of channels"):
        call(indices=right, pointers=pointers, x=torch.randn(2, 6, 4, 4), kernel=[3, 1], together=4)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda given: given["indices"].__setitem__(1, 60000), "an index is 60000"),
        (lambda given: given["pointers"].__setitem__(1, 9), "do not rise from 0 to 4"),
        (lambda given: setattr(given["values"], "data", torch.randn(3)), "4 indices for values of shape"),
        (lambda given: setattr(given["values"], "data", torch.randn(4).double()), "values are float32"),
        (lambda given: setattr(given["bias"], "data", torch.randn(1)), "the bias is float32 of shape"),
        (lambda given: given.update(bias=torch.randn(3)), "the bias is float32 of shape"),
        (lambda given: given.update(x=torch.randn(2, 3, 4, 4)), "pointers where|outputs|index"),
        (lambda given: given.update(x=torch.randn(2, 2, 2, 2)), "is larger than the padded image"),
        (lambda given: given["kernel"].append(3), "kernel, stride and dilation are two numbers"),
    ],
)
def test_a_call_that_was_right_is_looked_at_again_when_anything_changed(spoil, message):
    given = {
        "x": torch.randn(2, 2, 4, 4),
        "indices": torch.tensor([0, 8, 9, 17]).to(torch.uint16),
        "pointers": torch.tensor([0, 2, 2, 3, 4], dtype=torch.int32),
        "values": torch.randn(4),
        "bias": torch.randn(2),
        "kernel": [3, 3],
    }
    assert torch.equal(call(**given), call(**given))
    spoil(given)
    with pytest.raises(ValueError, match=message):
        call(**given)


def test_one_layer_on_images_of_two_sizes_and_moved_weights():
    weight = torch.randn(3, 2, 3, 3) * (torch.rand(3, 2, 3, 3) < 0.4)
    layer = SparseConv2d.from_dense(weight)
    for size in (5, 7, 5, 7):
        x = torch.randn(1, 2, size, size)
        torch.testing.assert_close(layer(x), torch.nn.functional.conv2d(x, weight))
    layer.values.data = 2 * layer.values
    torch.testing.assert_close(layer(x), torch.nn.functional.conv2d(x, 2 * weight))


@pytest.mark.parametrize("size", [7, 14, 16, 28])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("rectified", [False, True])
def test_the_result_may_take_the_addend_s_memory(library, size, kernel, rectified):
    weight = torch.randn(9, 5, kernel, kernel) * (torch.rand(9, 5, kernel, kernel) < 0.4)
    layer = SparseConv2d.from_dense(weight, torch.randn(9), padding=[kernel // 2] * 4, rectified=rectified)
    x, addend = torch.randn(2, 5, size, size), torch.randn(2, 9, size, size)
    expected = layer(x, addend)
    made = layer(x, addend, addend)
    assert (made is addend) is (library is not None)
    torch.testing.assert_close(made, expected, rtol=0, atol=0)
    other = torch.empty_like(addend)
    assert (layer(x, None, other) is other) is (library is not None)


@pytest.mark.parametrize("size", [7, 13, 14, 16])
@pytest.mark.parametrize("kernel", [1, 3])
def test_forms_that_compute_places_twice_add_once(library, size, kernel):
    module = torch.nn.Conv2d(5, 8, kernel, padding=kernel // 2).requires_grad_(False)
    module.weight.mul_(torch.rand_like(module.weight) < 0.4)
    rounding = SparseConv2d.from_module(module, values="int8", inputs="int8")
    for layer in (BlockConv2d.from_module(module), rounding):
        x, addend = torch.randn(2, 5, size, size), torch.randn(2, 8, size, size)
        expected, before = layer(x, addend), addend.clone()
        assert torch.equal(layer(x, addend, addend), expected)
        assert torch.equal(addend, before)
        assert (layer(x, None, other := torch.empty_like(addend)) is other) is (library is not None)
        assert torch.equal(layer(x, None, other), layer(x))


@pytest.mark.parametrize(
    "into",
    [
        torch.zeros(2, 2, 2, 3), torch.zeros(2, 2, 2, 2).double(), torch.zeros(2, 2, 2, 2).transpose(2, 3),
        torch.zeros(2, 2, 2, 2, device="meta"),
    ],
)  # fmt: skip
def test_memory_that_does_not_fit_is_left_alone(into):
    x = torch.randn(2, 2, 4, 4)
    given = {"x": x, "values": torch.randn(4)}
    made = call(**given, into=into)
    assert made is not into
    assert torch.equal(made, call(**given))
    assert into.is_meta or not into.any()


def test_memory_is_left_alone_where_gradients_flow():
    into = torch.zeros(2, 2, 2, 2)
    made = call(x=torch.randn(2, 2, 4, 4, requires_grad=True), into=into)
    assert made.requires_grad
    assert not into.any()


@pytest.mark.parametrize("size", [7, 14, 5, 16])
@pytest.mark.parametrize("rectifier", [*RECTIFIERS])
def test_activations_in_the_store(library, rectifier, size):
    module = torch.nn.Conv2d(5, 8, 3, padding=1).requires_grad_(False)
    module.weight.mul_(4 * (torch.rand_like(module.weight) < 0.4))
    x, addend = torch.randn(2, 5, size, size), torch.randn(2, 8, size, size)
    x[1] *= 20  # where exponentials are 0 and infinite
    plain, activation = [SparseConv2d.from_module(module), BlockConv2d.from_module(module)], RECTIFIERS[rectifier]
    for layer in [*plain, SparseConv2d.from_module(module, values="int8", inputs="int8")]:
        for added in (None, addend):
            sums = layer(x, added)
            layer.rectified, layer.rectifier = True, rectifier
            torch.testing.assert_close(layer(x, added), activation(sums), rtol=1e-5, atol=1e-5)
            with torch.enable_grad():  # the activation is torch's own then
                watched = x.clone().requires_grad_()
                torch.testing.assert_close(layer(watched, added), activation(sums), rtol=1e-4, atol=1e-4)
            layer.rectified = False


def test_an_activation_keeps_what_is_no_number(library):
    weight = torch.ones(1, 1, 1, 1)
    for rectifier in RECTIFIERS:
        layer = SparseConv2d.from_dense(weight, rectified=True)
        layer.rectifier = rectifier
        x = torch.tensor([torch.nan, -50.0, 0.0, 100.0]).view(4, 1, 1, 1).expand(4, 1, 3, 3)
        torch.testing.assert_close(layer(x), RECTIFIERS[rectifier](x), equal_nan=True)
    with pytest.raises(ValueError, match="the rectifier is one of relu, relu6, hardswish, silu, not 'gelu'"):
        call(rectifier="gelu")


@pytest.mark.parametrize("size", [7, 10, 14, 15])
@pytest.mark.parametrize("form", [SparseConv2d, BlockConv2d])
def test_planes_that_lie_apart_hold_the_same(library, form, size):
    """From one convolution to the next, and as what is added, read and written over; whatever the kernel."""
    images, layers = 2, []
    for kernel in (1, 3, 1):
        weight = torch.randn(8, 8, kernel, kernel) * (torch.rand(8, 8, kernel, kernel) < 0.4)
        layers.append(form.from_dense(weight, torch.randn(8), padding=[kernel // 2] * 4, rectified=True, together=3))
    x = torch.randn(images, 8, size, size)
    one, two, three = layers
    expected = three(two(one(x)), one(x))
    first = one(x, apart=True)
    assert first.is_contiguous() is (library is None)
    assert torch.equal(first, one(x))
    second = two(first, apart=True)
    assert torch.equal(second, two(one(x)))
    assert torch.equal(three(second, first), expected)
    assert three(second, first).is_contiguous()
    assert torch.equal(three(second.contiguous(), first, apart=True), expected)
    kept = first.clone()
    made = three(second, first, first, apart=True)  # over what is added
    assert torch.equal(made, expected)
    assert (made is first) is (library is not None and form is SparseConv2d)
    assert made is first or torch.equal(first, kept)
    other = one(x, apart=True)
    made = three(second, None, other)  # its planes lie apart, and those of the result may not
    assert made.is_contiguous()
    assert (made is other) is (library is None and other is made)


def test_memory_of_others_between_planes_is_left_alone(library):
    weight = torch.randn(8, 8, 1, 1)
    layer, x = SparseConv2d.from_dense(weight), torch.randn(1, 8, 7, 7)
    whole = torch.zeros(2, 8, 64)
    part = whole.as_strided((1, 8, 7, 7), (512, 64, 7, 1))
    made = layer(x, None, part, apart=True)
    assert made is not part
    assert not whole.any()
    torch.testing.assert_close(layer(part.copy_(x)), layer(x), rtol=0, atol=0)


def test_blocks_stay_in_the_cache():
    for channels in (1, 3, 64, 2048):
        for places in (1, 49, 3136):
            together = together_for(channels, [3, 3], places, 100, 0.1)
            assert 1 <= together <= channels
    assert operators.MOST_COLUMNS == 1 << 16
    weight = torch.randn(3, 4, 3, 3)
    layer = SparseConv2d.from_dense(weight, together=3)
    stored = layer.indices, layer.pointers, layer.values
    assert torch.equal(dense_convolution(*stored, 3, 4, [3, 3], 3), weight)


# The layout of windows holds the matrix, bit for bit.


@settings(max_examples=30)
@given(data=st.data())
def test_windows_hold_the_matrix(data):
    """Wide ones too, whose lanes are far apart, and rows of very different lengths."""
    rows, columns = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 900))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    shares = torch.rand(rows, 1, generator=generator) ** data.draw(st.integers(1, 9))
    weight = torch.randn(rows, columns, generator=generator) * (torch.rand(rows, columns, generator=generator) < shares)
    weight = weight.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    layout = windows.to_windows(weight)
    windows.check(**layout, rows=rows, columns=columns)
    assert torch.equal(windows.from_windows(**layout, rows=rows, columns=columns).to(weight.dtype), weight)
    taken = layout["values"].ne(0).sum()
    assert taken == weight.ne(0).sum()


def test_a_layout_by_hand():
    """Three rows of 40 columns: columns 0 and 39 are more than a window apart; 31 is the last in the first one."""
    weight = torch.zeros(3, 40)
    weight[0, 0], weight[0, 39], weight[1, 31], weight[2, 1:4] = 1.0, 2.0, 3.0, torch.tensor([4.0, 5.0, 6.0])
    layout = windows.to_windows(weight)
    assert layout["order"].tolist() == [-1] * 13 + [1, 0, 2]
    # from 0 the rows take 31, 0 and 1; from 2 and 3 row 2 takes its others, while 39 is out of sight; the last step
    # begins at 8, for it must not look beyond column 39
    assert layout["moves"].tolist() == [[0, 2, 1, 5, 0, 0]]
    numbers = [[word >> 5 * step & 31 for word in layout["words"][0, 13:].tolist()] for step in range(6)]
    assert numbers == [[31, 0, 1], [0, 0, 0], [0, 0, 0], [0, 31, 0], [0, 0, 0], [0, 0, 0]]
    values = [[3.0, 1.0, 4.0], [0.0, 0.0, 5.0], [0.0, 0.0, 6.0], [0.0, 2.0, 0.0]]
    assert layout["values"][0, :, 13:].tolist() == [*values, [0.0] * 3, [0.0] * 3]
    assert layout["pointers"].tolist() == [0, 1]


LIVES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 99)), max_size=12)


@given(LIVES)
def test_what_is_needed_at_one_time_lies_apart(drawn):
    first, lives = 0, []
    for later, longer, size in drawn:
        first += later
        lives.append([first, first + longer, size])
    lies, numbers = convolutions._laid_out(lives, {0: convolutions._GIVEN} if lives else {})
    spans = [(begin // 4, begin // 4 + life[2], *life[:2]) for (_, begin), life in zip(lies, lives, strict=True)][1:]
    assert all(begin >= 0 and end <= numbers and begin % 16 == 0 for begin, end, *_ in spans)
    for (a, b, first, last), (c, d, begins, ends) in itertools.combinations(spans, 2):
        assert b <= c or d <= a or last < begins or ends < first
    assert not spans or numbers <= sum(-(-size // 16) * 16 for _, _, size in lives[1:])


@pytest.mark.skipif(not available(), reason="there are no compiled kernels here")
def test_only_what_kernels_alone_computed_is_a_chain(monkeypatch):
    one, two = (SparseConv2d.from_module(nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False)) for _ in range(2))
    x = torch.randn(1, 4, 6, 6)
    for make in (
        lambda: one(x.clone()),
        lambda: one(x) + 1,
        lambda: two(one(x) + 1),
        lambda: one(x, x, x),
        lambda: two(one(x).to(memory_format=torch.channels_last)),
        lambda: (one(x), x)[1],
        lambda: (two(x), one(x))[0],
    ):
        made, chain = convolutions.Chain.watched(x, make)
        assert chain is None
        assert isinstance(made, torch.Tensor)
    made, chain = convolutions.Chain.watched(x, lambda: two(y := one(x), x, y))
    assert chain is None  # a result over what it reads
    made, chain = convolutions.Chain.watched(x, lambda: two(one(x), x))
    assert chain.holds([one.looked_at(), two.looked_at()])
    assert not chain.holds([two.looked_at(), one.looked_at()])
    assert not chain.holds([one.looked_at()])
    assert torch.equal(chain.made(x), made)
    into, other = torch.empty_like(made), torch.empty(4)
    assert chain.made(x, into) is into
    assert torch.equal(into, made)
    assert chain.made(x, other) is not other
    monkeypatch.setattr(convolutions, "_WATCHED_BYTES", made.nbytes)
    assert convolutions.Chain.watched(x, lambda: two(one(x), x))[1] is None
    chain.memory.spare.clear()
    monkeypatch.setattr(convolutions, "_HELD_BYTES", 0)
    assert torch.equal(chain.made(x), made)
    assert not chain.memory.spare
    with pytest.raises(ZeroDivisionError):
        convolutions.Chain.watched(x, lambda: 1 / 0)
    assert convolutions._WATCHED.steps is None


@pytest.mark.skipif(not available(), reason="there are no compiled kernels here")
def test_a_chain_of_layers_that_round_is_the_layers():
    how = {"values": "int8", "inputs": "int8"}
    one, two = (SparseConv2d.from_module(nn.Conv2d(4, 4, 3, padding=1), **how) for _ in range(2))
    x = torch.randn(2, 4, 7, 7)
    made, chain = convolutions.Chain.watched(x, lambda: two(one(x), x))
    assert torch.equal(chain.made(x), made)
