"""The operators against float64, at every level of processor that this machine has, and what they refuse."""

import signal
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.inference import BlockLinear, SparseLinear, WindowLinear
from secateur.native import available, operators, windows
from support.forks import forked
from support.kernels import at_level, libraries, with_threads


def drawn(data, most_rows=70, most_columns=90):
    rows, columns = data.draw(st.integers(0, most_rows)), data.draw(st.integers(1, most_columns))
    density = data.draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    weight = torch.randn(rows, columns, generator=generator)
    weight = weight * (torch.rand(rows, columns, generator=generator) < density)
    weight = weight.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    bias = torch.randn(rows, generator=generator) if data.draw(st.booleans()) else None
    batch = data.draw(st.sampled_from([0, 1, 2, 3, 15, 16, 17, 32, 33, 47, 64, 65, 130]))
    x = torch.randn(batch, columns, generator=generator)
    layout = data.draw(st.sampled_from(["plain", "transposed", "strided", "batched"]))
    if layout == "transposed":
        x = x.t().contiguous().t()
    elif layout == "strided":
        x = torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    elif layout == "batched" and batch % 2 == 0:
        x = x.reshape(2, batch // 2, columns)
    return weight, bias, x


def is_the_product(y, x, weight, bias):
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


def is_the_product_at_every_level(layer, threads, own, weight, bias, x):
    """What was drawn goes to all: to draw takes longer than to multiply."""
    assert torch.equal(layer.weight, weight)
    for name in libraries():
        with at_level(name):
            try:
                with_threads(threads, own, lambda: is_the_product(layer(x), x, weight, bias))
            except BaseException as error:
                error.add_note(f"with {name or 'torch alone'}")
                raise


DRAWN = {"data": st.data(), "threads": st.integers(1, 5), "own": st.booleans()}


@settings(max_examples=60)
@given(**DRAWN)
def test_csr_is_the_product(data, threads, own):
    weight, bias, x = drawn(data)
    together = data.draw(st.sampled_from([1, 7, 16, 1000])), data.draw(st.sampled_from([1, 5, 16, 1000]))
    layer = SparseLinear._laid_out(weight, bias, *together)
    is_the_product_at_every_level(layer, threads, own, weight, bias, x)


@settings(max_examples=60)
@given(**DRAWN)
@pytest.mark.parametrize("form", [BlockLinear, WindowLinear])
def test_blocks_and_windows_are_the_product(form, data, threads, own):
    weight, bias, x = drawn(data)
    is_the_product_at_every_level(form.from_dense(weight, bias), threads, own, weight, bias, x)


def test_a_chunk_of_many_blocks_and_vectors(library):
    """More vectors than a chunk, more values than the cache is taken to hold."""
    weight = torch.randn(150, 700)
    x = torch.randn(300, 700)
    is_the_product(BlockLinear.from_dense(weight)(x), x, weight, None)
    is_the_product(SparseLinear.from_dense(weight, batch=300)(x), x, weight, None)
    is_the_product(WindowLinear.from_dense(weight)(x), x, weight, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_inputs_of_other_dtypes(library, dtype):
    weight = torch.randn(20, 30) * (torch.rand(20, 30) < 0.3)
    x = torch.randn(4, 30).to(dtype)
    for layer in (SparseLinear.from_dense(weight), BlockLinear.from_dense(weight), WindowLinear.from_dense(weight)):
        y = layer(x)
        assert y.dtype == dtype
        expected = x.double() @ weight.double().t()
        tolerance = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", [SparseLinear, WindowLinear])
@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_what_is_removed_is_not_multiplied(library, form, odd):
    weight = torch.cat([torch.eye(2), torch.zeros(1, 2)])
    x = torch.tensor([[2.0, odd], [odd, 3.0]])
    if library is not None:
        y = form.from_dense(weight)(x)
        torch.testing.assert_close(y, torch.tensor([[2.0, odd, 0.0], [odd, 3.0, 0.0]]), equal_nan=True)


def test_weights_that_are_no_numbers_are_kept(library):
    weight = torch.tensor([[torch.nan, 0.0], [0.0, torch.inf], [0.0, 0.0]])
    layer = WindowLinear.from_dense(weight)
    assert torch.equal(layer.weight.isnan(), weight.isnan())
    if library is not None:
        y = layer(torch.tensor([1.0, -1.0]))
        torch.testing.assert_close(y, torch.tensor([torch.nan, -torch.inf, 0.0]), equal_nan=True)


def test_two_threads_call_one_layer(library):
    weight = torch.randn(64, 96) * (torch.rand(64, 96) < 0.2)
    inputs = [torch.randn(batch, 96) for batch in (1, 40)]
    layers = [form.from_dense(weight) for form in (SparseLinear, BlockLinear, WindowLinear)]
    wrong = []

    def call(x):
        for _ in range(50):
            wrong.extend(layer for layer in layers if not torch.allclose(layer(x), x @ weight.t(), atol=1e-4))

    workers = [threading.Thread(target=call, args=(x,)) for x in inputs * 2]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_forked_child_does_not_wait_for_torch_s_threads():
    weight = torch.randn(64, 96) * (torch.rand(64, 96) < 0.2)
    x = torch.randn(3, 96)
    layer, expected = SparseLinear.from_dense(weight), x @ weight.t()
    with_threads(2, False, lambda: layer(x))

    def child():
        signal.alarm(30)  # rather than wait for ever
        operators._WORK_FOR_A_THREAD = 1
        torch.set_num_threads(2 if available() else 1)  # torch's own products do wait
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)

    assert forked(child) == 0


def test_gradients_reach_the_input():
    weight = torch.randn(10, 12) * (torch.rand(10, 12) < 0.4)
    layers = SparseLinear._laid_out(weight, None, 5, 4), BlockLinear.from_dense(weight), WindowLinear.from_dense(weight)
    for layer in layers:
        x = torch.randn(3, 12, requires_grad=True)
        layer(x).square().sum().backward()
        with torch.no_grad():
            expected = 2 * (x @ weight.t()) @ weight
        torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["csr_linear", "block_linear", "window_linear"])
def test_operators_obey_torch(name):
    """Schema, fake kernel and autograd registration agree with what the operator does."""
    weight = torch.randn(20, 12) * (torch.rand(20, 12) < 0.4)
    x = torch.randn(3, 12, requires_grad=True)
    bias = torch.randn(20)
    if name == "csr_linear":
        layer = SparseLinear.from_dense(weight)
        layout = layer.columns_together, layer.rows_together
        arguments = layer.indices, layer.pointers, layer.values, bias, *layout
    elif name == "block_linear":
        layer = BlockLinear.from_dense(weight)
        arguments = layer.indices, layer.pointers, layer.values, bias, 20
    else:
        arguments = *windows.to_windows(weight).values(), bias, 20
    torch.library.opcheck(
        getattr(torch.ops.secateur, name).default,
        (x, *arguments),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


# ------------------------------------------------------------------------------------------------- what is refused


def csr(**changes):
    """A call of a right layer, but for the changes."""
    right = {
        "x": torch.randn(2, 5),
        "indices": torch.tensor([0, 4, 2]).to(torch.uint16),
        "pointers": torch.tensor([0, 2, 3], dtype=torch.int32),
        "values": torch.randn(3),
        "bias": None,
        "columns_together": 5,
        "rows_together": 2,
    }
    return operators.csr_linear(**{**right, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": torch.tensor([0, 5, 2]).to(torch.uint16)}, "an index is 5, but there are 5 inputs"),
        ({"indices": torch.tensor([0, 65535, 2]).to(torch.uint16)}, "an index is 65535"),
        ({"indices": torch.tensor([0, 1, 2])}, "indices are a vector of uint16"),
        ({"pointers": torch.tensor([0, 3, 2], dtype=torch.int32)}, "do not rise from 0 to 3"),
        ({"pointers": torch.tensor([1, 2, 3], dtype=torch.int32)}, "do not rise from 0 to 3"),
        ({"pointers": torch.tensor([0, -2, 3], dtype=torch.int32)}, "do not rise from 0 to 3"),
        ({"pointers": torch.tensor([0, 2, 4], dtype=torch.int32)}, "do not rise from 0 to 3"),
        ({"pointers": torch.tensor([0, 2, 3])}, "pointers one of int32"),
        ({"values": torch.randn(2)}, r"3 indices for values of shape \(2,\)"),
        ({"values": torch.randn(3).half()}, "values are float32 or bfloat16, or int8 with scales, not torch.float16"),
        ({"bias": torch.randn(3)}, r"the bias is float32 of shape \(2,\), not torch.float32 of shape \(3,\)"),
        ({"columns_together": 0}, "are at least 1"),
        ({"columns_together": 2}, "3 pointers where 1 are needed|3 pointers where 4 are needed"),
        ({"x": torch.randn(2, 70_000), "columns_together": 70_000}, "an index of 16 bits counts up to 65536"),
    ],
    ids=lambda each: each if isinstance(each, str) else "changed",  # values drawn anew name no test
)
def test_messages(changes, message):
    assert csr().shape == (2, 2)
    with pytest.raises(ValueError, match=message):
        csr(**changes)


def test_blocks_refuse_too():
    indices, pointers = torch.tensor([5]).to(torch.uint16), torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="an index is 5"):
        operators.block_linear(torch.randn(1, 5), indices, pointers, torch.randn(1, 16), None, 3)
    with pytest.raises(ValueError, match=r"1 indices for values of shape \(1, 8\)"):
        operators.block_linear(torch.randn(1, 9), indices, pointers, torch.randn(1, 8), None, 3)
    with pytest.raises(ValueError, match="2 pointers where 3 are needed"):
        operators.block_linear(torch.randn(1, 9), indices, pointers, torch.randn(1, 16), None, 30)


def window(**changes):
    """A call of a right layer of 20 rows and 40 inputs, but for the changes."""
    weight = torch.zeros(20, 40)
    weight[:, 0], weight[:, 39] = 1.0, 2.0
    right = {"x": torch.randn(2, 40), **windows.to_windows(weight), "bias": None, "rows": 20}
    return operators.window_linear(**{**right, **changes})


GROUPS = 2  # of the call above


def order(*first):
    return torch.tensor([*first, *range(len(first), 20), *[-1] * 12], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.randn(2, 39)}, "the moves lead to input 40, but there are 39"),
        ({"moves": torch.full((GROUPS, 6), 255, dtype=torch.uint8)}, "the moves lead to input 1562, but there are 40"),
        ({"moves": torch.tensor([[8, 0, 0, 0, 0, 1]] * 2, dtype=torch.uint8)}, "the moves lead to input 41"),
        (
            {"moves": torch.zeros(GROUPS, 5, dtype=torch.uint8)},
            r"moves of 2 groups and 20 rows are uint8 of shape \(2, 6",
        ),
        ({"moves": torch.zeros(GROUPS, 6, dtype=torch.int8)}, r"not torch.int8 of shape \(2, 6\)"),
        ({"words": torch.zeros(GROUPS, 15, dtype=torch.int32)}, r"words of 2 groups .* are int32 of shape \(2, 16\)"),
        ({"words": torch.tensor(0, dtype=torch.int32)}, "words of 0 groups"),
        (
            {"values": torch.zeros(GROUPS, 3, 16, 2)},
            r"values of .* are float32 or bfloat16 or int8 of shape \(2, 6, 16\)",
        ),
        (
            {"values": torch.zeros(GROUPS, 6, 16).bfloat16()},
            r"values of .* of shape \(2, 3, 16, 2\), not torch.bfloat16",
        ),
        ({"values": torch.zeros(GROUPS, 6, 16).half()}, "values of .*, not torch.float16"),
        ({"pointers": torch.tensor([0, 2], dtype=torch.int32)}, r"pointers of .* are int32 of shape \(3,\)"),
        ({"pointers": torch.tensor([0, 3, 2], dtype=torch.int32)}, "do not rise from 0 to 2, the number of groups"),
        ({"pointers": torch.tensor([0, 1, 3], dtype=torch.int32)}, "do not rise from 0 to 2, the number of groups"),
        ({"pointers": torch.tensor([0, -1, 2], dtype=torch.int32)}, "do not rise from 0 to 2, the number of groups"),
        ({"order": order(1)}, "the order does not name each of 20 rows once"),
        ({"order": order(20)}, "the order does not name each of 20 rows once"),
        ({"order": order(-1)}, "the order does not name each of 20 rows once"),
        ({"order": order()[:20]}, r"order of .* are int32 of shape \(32,\)"),
        ({"order": torch.where(order() < 0, -2, order())}, "the order does not name each of 20 rows once"),
        ({"rows": 33}, "33 rows are int32 of shape"),
        ({"rows": 19}, "the order does not name each of 19 rows once"),
        ({"bias": torch.randn(19)}, r"the bias is float32 of shape \(20,\)"),
    ],
    ids=lambda each: each if isinstance(each, str) else "changed",
)
def test_messages_of_windows(changes, message):
    assert window().shape == (2, 20)
    with pytest.raises(ValueError, match=message):
        window(**changes)


def test_changed_windows_are_checked_again():
    layer = WindowLinear.from_dense(torch.eye(40))
    x = torch.randn(2, 40)
    assert torch.equal(layer(x), x)
    layer.order[0] = 99
    with pytest.raises(ValueError, match="the order does not name"):
        layer(x)
    layer = WindowLinear.from_dense(torch.eye(40))
    layer(x)
    layer.moves += 9
    with pytest.raises(ValueError, match="the moves lead to input"):
        layer(x)


def test_changed_indices_are_checked_again():
    layer = SparseLinear.from_dense(torch.eye(4))
    x = torch.randn(2, 4)
    assert torch.equal(layer(x), x)
    layer.indices.copy_(torch.tensor([0, 1, 2, 9]).to(torch.uint16))
    with pytest.raises(ValueError, match="an index is 9"):
        layer(x)
    layer.load_state_dict({**layer.state_dict(), "indices": torch.tensor([0, 1, 2, 3]).to(torch.uint16)})
    assert torch.equal(layer(x), x)
    layer.pointers[1] = 100
    with pytest.raises(ValueError, match="do not rise"):
        layer(x)


def test_layouts_of_any_size_take_no_memory(library):
    """rows_together comes from a file: (2**56 + 1) rows of 64 sums of 4 bytes would be 256 bytes, in 64 bits."""
    layer = SparseLinear.from_dense(torch.eye(40))
    layer.rows_together, layer.columns_together = 2**56, 2**70
    x = torch.randn(50, 40)
    assert torch.equal(layer(x), x)


def test_inference_mode(library):
    with torch.inference_mode():
        layer = SparseLinear.from_dense(torch.eye(4))
        x = torch.randn(2, 4)
        assert torch.equal(layer(x), x)
        layer.indices.fill_(7)
        with pytest.raises(ValueError, match="an index is 7"):
            layer(x)


@pytest.mark.long
def test_operators_are_there_wherever_a_packed_layer_may_be():
    """An exported or compiled program names them, and imports none of this."""
    code = (
        "import torch, secateur.inference; ours = torch.ops.secateur\n"
        "print(ours.csr_linear, ours.window_linear, ours.sparse_convolution)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "secateur.csr_linear secateur.window_linear secateur.sparse_convolution\n"
