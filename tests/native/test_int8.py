"""Values in int8 and rounded inputs, against float64, at every level of processor that this machine has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from secateur.inference import BlockConv2d, BlockLinear, SparseConv2d, SparseLinear, WindowLinear, to_int8
from secateur.native import operators, rounded_inputs, windows
from support.kernels import at_level, libraries, with_threads

DRAWN = {"data": st.data(), "threads": st.integers(1, 5), "own": st.booleans()}


def drawn(data, most_rows=70, most_columns=90):
    """A weight with zeros, some rows of nothing else; as numbers and scales, and what they stand for."""
    rows, columns = data.draw(st.integers(0, most_rows)), data.draw(st.integers(1, most_columns))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.rand(rows, columns, generator=generator) < data.draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    weight *= torch.rand(rows, 1, generator=generator) < 0.9
    numbers, scales = to_int8(weight)
    bias = torch.randn(rows, generator=generator) if data.draw(st.booleans()) else None
    batch = data.draw(st.sampled_from([0, 1, 2, 15, 16, 17, 33, 64, 130]))
    x = torch.randn(batch, columns, generator=generator) + data.draw(st.sampled_from([0.0, 3.0, -5.0]))
    return numbers, scales, numbers * scales[:, None], bias, x


def at_every_level(threads, own, check):
    for name in libraries():
        with at_level(name):
            try:
                with_threads(threads, own, check)
            except BaseException as error:
                error.add_note(f"with {name or 'torch alone'}")
                raise


@settings(max_examples=20)
@given(**DRAWN)
def test_int8_is_the_product_with_the_rounded_weight(data, threads, own):
    numbers, scales, weight, bias, x = drawn(data)
    together = data.draw(st.sampled_from([1, 7, 1000])), data.draw(st.sampled_from([1, 5, 1000]))
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    for layer in (
        SparseLinear._laid_out(numbers, bias, *together, scales),
        BlockLinear.from_dense(numbers, bias, scales=scales),
        WindowLinear.from_dense(numbers, bias, scales=scales),
    ):
        assert layer.values.dtype == torch.int8
        assert torch.equal(layer.weight, weight)

        def check(layer=layer):
            torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-4)

        at_every_level(threads, own, check)


@settings(max_examples=20)
@given(**DRAWN)
def test_rounded_inputs_make_exact_sums(data, threads, own):
    """The product of the rounded weight and the rounded inputs; a tie may fall to the next code."""
    numbers, scales, weight, bias, x = drawn(data)
    forms = [each.from_dense(numbers, bias, scales=scales, round_inputs=True) for each in (BlockLinear, WindowLinear)]
    forms.append(SparseLinear._laid_out(numbers, bias, data.draw(st.sampled_from([1, 7, 1000])), 5, scales, True))
    assert all(layer.rounds_inputs and torch.equal(layer.weight, weight) for layer in forms)
    rounded = rounded_inputs(x) if len(x) else x
    expected = rounded.double() @ weight.double().t() + (0 if bias is None else bias.double())
    step = (x.amax(1).clamp_min(0) - x.amin(1).clamp_max(0)) / 255 if len(x) else x[:, 0]
    near = 1e-4 + 1e-5 * expected.abs() + 1.01 * step[:, None] * (weight.abs().amax(1) if weight.numel() else 0)
    assert bool(((x - rounded).abs() <= 0.51 * step[:, None]).all())

    def check():
        for layer in forms:
            assert bool(((layer(x).double() - expected).abs() <= near).all()), type(layer).__name__

    at_every_level(threads, own, check)


@pytest.mark.parametrize("form", [BlockLinear, WindowLinear, SparseLinear])
def test_codes_that_are_no_tie_are_the_same_everywhere(form):
    """Whole numbers times a step, which every way to multiply rounds to themselves: so results are equal."""
    numbers = torch.randint(-127, 128, (40, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    layer = form.from_dense(numbers, scales=torch.ones(40), round_inputs=True)
    x = torch.randint(0, 256, (20, 64), generator=torch.Generator().manual_seed(1)).float()
    x[:, 0], x[:, 1] = 0.0, 255.0
    for given_x in (x, x - 100):
        expected = given_x @ numbers.float().t()
        at_every_level(1, False, lambda given_x=given_x, expected=expected: same(layer(given_x), expected))
        at_every_level(1, False, lambda given_x=given_x, expected=expected: same(layer(given_x[0]), expected[0]))


def same(made, expected):
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("form", [BlockLinear, WindowLinear, SparseLinear])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_that_is_not_finite_has_outputs_that_are_none(library, odd, form):
    numbers, scales = to_int8(torch.eye(20))
    layer = form.from_dense(numbers, scales=scales, round_inputs=True)
    x = torch.ones(3, 20)
    x[1, 5] = odd
    y = layer(x)
    assert bool(y[1].isnan().all())
    torch.testing.assert_close(y[::2], x[::2], rtol=1e-5, atol=0)
    assert bool(layer(x[1]).isnan().all())
    assert not layer(torch.zeros(2, 20)).any()


@pytest.mark.parametrize("extreme", [1e-44, 3e38])
def test_vectors_of_extreme_numbers(library, extreme):
    """Scales that would have no inverse, and extremes whose distance is no float32."""
    numbers, scales = to_int8(torch.eye(16))
    y = BlockLinear.from_dense(numbers, scales=scales, round_inputs=True)(extreme * torch.linspace(-1, 1, 16))
    torch.testing.assert_close(y, extreme * torch.linspace(-1, 1, 16), rtol=0, atol=extreme / 100 + 1e-35)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_inputs_of_other_dtypes(library, dtype):
    numbers, scales = to_int8(torch.randn(20, 30) * (torch.rand(20, 30) < 0.3))
    weight, x = numbers * scales[:, None], torch.randn(4, 30).to(dtype)
    for form in (SparseLinear, BlockLinear, WindowLinear):
        y = form.from_dense(numbers, scales=scales)(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), x.double() @ weight.double().t(), rtol=5e-2, atol=5e-2)
    for form in (BlockLinear, WindowLinear, SparseLinear):
        assert form.from_dense(numbers, scales=scales, round_inputs=True)(x).dtype == dtype


@pytest.mark.parametrize("form", [SparseConv2d, BlockConv2d])
@settings(max_examples=25)
@given(data=st.data())
def test_convolutions_in_int8(data, form):
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    groups, channels, kernel, stride = number(1, 2), number(1, 9), number(1, 3), number(1, 2)
    generator = torch.Generator().manual_seed(number(0, 999))
    weight = torch.randn(groups * number(1, 6) * form.OUTPUTS, channels, kernel, kernel, generator=generator)
    weight *= torch.rand(weight.shape, generator=generator) < 0.4
    numbers, scales = to_int8(weight)
    bias = torch.randn(len(weight), generator=generator) if data.draw(st.booleans()) else None
    x = torch.randn(2, groups * channels, number(3, 20), number(3, 20), generator=generator)
    geometry = {"stride": [stride] * 2, "padding": [1] * 4, "groups": groups, "rectified": data.draw(st.booleans())}
    layer = form.from_dense(numbers, bias, together=number(1, channels), scales=scales, **geometry)
    rounded = numbers * scales.view(-1, 1, 1, 1)
    assert torch.equal(layer.weight, rounded)
    wide = None if bias is None else bias.double()
    expected = functional.conv2d(x.double(), rounded.double(), wide, stride, 1, groups=groups)
    addend = torch.randn(expected.shape, generator=generator) if data.draw(st.booleans()) else None
    expected = expected if addend is None else expected + addend.double()
    expected = expected.relu() if layer.rectified else expected

    def check():
        torch.testing.assert_close(layer(x, addend).double(), expected, rtol=1e-5, atol=1e-4)

    at_every_level(number(1, 3), False, check)


def test_gradients_reach_the_input():
    numbers, scales = to_int8(torch.randn(10, 12) * (torch.rand(10, 12) < 0.4))
    weight = numbers * scales[:, None]
    for layer in (
        SparseLinear._laid_out(numbers, None, 5, 4, scales),
        BlockLinear.from_dense(numbers, scales=scales),
        BlockLinear.from_dense(numbers, scales=scales, round_inputs=True),
        WindowLinear.from_dense(numbers, scales=scales),
        WindowLinear.from_dense(numbers, scales=scales, round_inputs=True),
        SparseLinear.from_dense(numbers, scales=scales, round_inputs=True),
    ):
        x = torch.randn(3, 12, requires_grad=True)
        layer(x).sum().backward()
        torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 12), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["csr_linear", "block_linear", "rounding", "window_linear", "rounding windows", "sparse_convolution"]
)
def test_operators_obey_torch(name):
    numbers, scales = to_int8(torch.randn(20, 12) * (torch.rand(20, 12) < 0.4))
    x, bias = torch.randn(3, 12, requires_grad=True), torch.randn(20)
    if name == "csr_linear":
        layer = SparseLinear.from_dense(numbers, scales=scales)
        arguments = layer.indices, layer.pointers, layer.values, bias, layer.columns_together, layer.rows_together
    elif name.endswith(("window_linear", "windows")):
        arguments = *windows.to_windows(numbers, in_fours=name != "window_linear").values(), bias, 20
        name = "window_linear"
    elif name == "sparse_convolution":
        layer = SparseConv2d.from_dense(numbers.view(20, 12, 1, 1), scales=scales)
        stored = layer.indices, layer.pointers, layer.values, bias, None
        arguments = *stored, [1, 1], [1, 1], [0] * 4, [1, 1], 1, layer.together, False
        x = torch.randn(3, 12, 2, 2, requires_grad=True)
    else:
        layer = BlockLinear.from_dense(numbers, scales=scales, round_inputs=name == "rounding")
        arguments = layer.indices, layer.pointers, layer.values, bias, 20
        name = "block_linear"
    torch.library.opcheck(
        getattr(torch.ops.secateur, name).default,
        (x, *arguments, scales),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


# ------------------------------------------------------------------------------------------------- what is refused


def block(**changes):
    """A call of a right layer that rounds its inputs, but for the changes."""
    right = {
        "x": torch.randn(2, 5),
        "indices": torch.tensor([0, 4, 0, 0]).to(torch.uint16),
        "pointers": torch.tensor([0, 4], dtype=torch.int32),
        "values": torch.ones(1, 16, 4, dtype=torch.int8),
        "bias": None,
        "rows": 3,
        "scales": torch.ones(3),
    }
    return operators.block_linear(**{**right, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": None}, r"the scales of int8 values are float32 of shape \(3,\), not none"),
        ({"scales": torch.ones(4)}, r"are float32 of shape \(3,\), not torch.float32 of shape \(4,\)"),
        ({"scales": torch.ones(3).double()}, r"of shape \(3,\), not torch.float64 of shape"),
        ({"scales": torch.tensor([1.0, torch.nan, 1.0])}, "a scale is NaN or infinite"),
        ({"scales": torch.tensor([1.0, torch.inf, 1.0])}, "a scale is NaN or infinite"),
        ({"values": torch.ones(4, 16)}, "scales belong to values of int8, not torch.float32"),
        ({"values": torch.ones(1, 16, 4)}, "values of four blocks side by side are int8, not torch.float32"),
        ({"values": torch.ones(4, 16, dtype=torch.uint8)}, "float32 or bfloat16, or int8 with scales, not torch.uint8"),
        ({"values": torch.ones(2, 16, 4, dtype=torch.int8)}, r"4 indices for values of shape \(2, 16, 4\)"),
        ({"indices": torch.tensor([0, 4, 0, 5]).to(torch.uint16)}, "an index is 5, but there are 5 inputs"),
        (
            {"pointers": torch.tensor([0, 2, 4], dtype=torch.int32), "rows": 20, "scales": torch.ones(20)},
            "a pointer is no multiple of 4",
        ),
        (
            {"indices": torch.zeros(3).to(torch.uint16), "values": torch.ones(0, 16, 4, dtype=torch.int8)},
            r"3 indices for values of shape \(0, 16, 4\)",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "changed",
)
def test_messages(changes, message):
    assert block().shape == (2, 3)
    with pytest.raises(ValueError, match=message):
        block(**changes)


def test_layers_refuse_what_does_not_belong_together():
    numbers, scales = to_int8(torch.eye(20))
    for form in (SparseLinear, BlockLinear, WindowLinear):
        with pytest.raises(ValueError, match=r"scales of shape \(20,\) for a weight of torch.float32"):
            form.from_dense(torch.eye(20), scales=scales)
        with pytest.raises(ValueError, match=r"scales of shape \(3,\) for a weight of torch.int8"):
            form.from_dense(numbers, scales=scales[:3])
    with pytest.raises(ValueError, match="inputs are rounded for a weight in int8 only"):
        BlockLinear.from_dense(torch.eye(20), round_inputs=True)
    for form in (WindowLinear, SparseLinear):
        with pytest.raises(ValueError, match="inputs are rounded for a weight in int8 only"):
            form.from_dense(torch.eye(20), round_inputs=True)
    layer = SparseLinear.from_dense(numbers, scales=scales, round_inputs=True)
    layer.pointers = layer.pointers - 1
    with pytest.raises(ValueError, match="the pointers do not rise from 0"):
        layer(torch.ones(1, 20))
    layer.pointers, layer.values = layer.pointers + 1, layer.values[1:].contiguous()
    with pytest.raises(ValueError, match=r"80 indices for values of shape \(19, 4\)"):
        layer(torch.ones(1, 20))
    layer = WindowLinear.from_dense(numbers, scales=scales, round_inputs=True)
    layer.values = layer.values[:, :95].contiguous()
    with pytest.raises(
        ValueError, match=r"are float32 or bfloat16 or int8 of shape \(\d, 96\), not torch.int8 of shape"
    ):
        layer(torch.ones(1, 20))


def test_changed_scales_are_checked_again():
    numbers, scales = to_int8(torch.eye(20))
    layer = WindowLinear.from_dense(numbers, scales=scales)
    layer.scales = torch.full((20,), torch.nan)
    with pytest.raises(ValueError, match="a scale is NaN"):
        layer(torch.ones(1, 20))
