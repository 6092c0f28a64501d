"""The three operators that call the kernels for products with a sparse weight.

Law: every index that the C code follows has been compared with its bounds since the tensor last changed, and an
operator gives the same result, within rounding, with and without compiled kernels.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from secateur.native import windows
from secateur.native.loading import library
from secateur.native.windows import LANES
from secateur.support import private

MOST_COLUMNS = 1 << 16  # an index has 16 bits
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # of values, as threads.h has them
P = ParamSpec("P")
_WORK_FOR_A_THREAD = 200_000  # products; below that, making the thread takes longer than it saves


def is_plain(x: Tensor) -> bool:
    """Nobody needs to see the operator: the call is made without the dispatcher, which takes 20 microseconds."""
    if torch.compiler.is_compiling() or private.is_tracing():
        return False
    return type(x) is Tensor and not x.is_meta and not (x.requires_grad and torch.is_grad_enabled())


def _rows_of(pointers: Tensor, columns: int, columns_together: int) -> int:
    panels = max(1, -(-columns // columns_together))
    return int((pointers.shape[0] - 1) // panels)


def _fake_csr(
    x: Tensor, _indices: Tensor, pointers: Tensor, _values: Tensor, _bias: Tensor | None, columns_together: int, *_: Any
) -> Tensor:
    return x.new_empty(*x.shape[:-1], _rows_of(pointers, x.shape[-1], columns_together))


def _fake_block(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], others[4])


def _fake_window(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], others[6])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, indices, pointers, values, _, *layout, scales = inputs
    ctx.save_for_backward(indices, pointers, values, scales)
    ctx.columns, ctx.layout = x.shape[-1], layout


def _csr_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    columns_together, rows_together = ctx.layout
    panels = max(1, -(-ctx.columns // columns_together))
    indices, pointers, values, scales = ctx.saved_tensors
    weight = dense_csr(indices, pointers, values, grad.shape[-1], ctx.columns, panels, rows_together)
    return _to_inputs(grad, scaled(weight, scales)), *[None] * 7


def _block_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indices, pointers, values, scales = ctx.saved_tensors
    weight = dense_block(indices, pointers, values, grad.shape[-1], ctx.columns)
    return _to_inputs(grad, scaled(weight, scales)), *[None] * 6


def _keep_windows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, *layout, _, _, scales = inputs
    ctx.save_for_backward(*layout, scales)
    ctx.columns = x.shape[-1]


def _window_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *layout, scales = ctx.saved_tensors
    weight = windows.from_windows(*layout, rows=grad.shape[-1], columns=ctx.columns)
    return _to_inputs(grad, scaled(weight, scales)), *[None] * 8


def _to_inputs(grad: Tensor, weight: Tensor) -> Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (grad.to(wide) @ weight.to(wide)).to(grad.dtype)


def define(
    name: str,
    function: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    backward: Callable[..., tuple[Tensor | None, ...]],
    keep: Callable[..., None] = _keep,
) -> None:
    # torch reads the schema from the annotations of the function, which therefore spells all that it takes
    operator = torch.library.custom_op(f"secateur::{name}", function, mutates_args=())
    operator.register_fake(fake)
    operator.register_autograd(backward, setup_context=keep)


def operator(
    fake: Callable[..., Tensor],
    backward: Callable[..., tuple[Tensor | None, ...]],
    keep: Callable[..., None] = _keep,
) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Makes an operator of torch's of a function, which is called as such where somebody needs to see the call."""

    def made(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
        define(function.__name__, function, fake, backward, keep)
        seen = getattr(torch.ops.secateur, function.__name__)

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            x: Any = args[0] if args else kwargs["x"]
            found: Tensor = (function if is_plain(x) else seen)(*args, **kwargs)
            return found

        return called

    return made


@operator(_fake_csr, _csr_backward)
def csr_linear(
    x: Tensor,
    indices: Tensor,
    pointers: Tensor,
    values: Tensor,
    bias: Tensor | None,
    columns_together: int,
    rows_together: int,
    scales: Tensor | None = None,
) -> Tensor:
    """``y = x W' + bias`` of an unstructured sparse W (rows, columns); a removed weight is not multiplied.

    So where x is infinite or NaN, an output that does not depend on it stays finite, other than in a dense product.
    Gradients reach x, through a dense product, and nothing else.

    Kept entries are ordered by blocks of ``rows_together`` rows, within them by panels of ``columns_together`` columns,
    within them by row and column. The number of rows is that of ``bias``, or follows from ``pointers`` where one panel
    holds all columns.

    Args:
        x: (..., columns), any floating dtype; computed in float32, or in float64 without kernels if it is float64.
        indices: uint16, the column of each entry.
        pointers: int32 (rows · panels + 1), where each row's entries of a panel begin.
        values: float32, bfloat16 or int8, one for each index. Of shape (kept / 4, 4), int8: inputs are rounded to 8
            bits, too, as in `block_linear`; a row's entries in a panel are then a multiple of 4, filled up by any of
            its columns with the value 0.
        bias: float32 (rows), or None.
        scales: of int8 values, by which each output's sum is multiplied: float32 (rows), finite; else None.

    Raises:
        ValueError: an index or pointer leads out of its tensor, or the shapes do not fit.

    >>> indices, pointers = torch.tensor([0, 2, 1]).to(torch.uint16), torch.tensor([0, 2, 3], dtype=torch.int32)
    >>> csr_linear(torch.tensor([[1.0, 10.0, 100.0]]), indices, pointers, torch.ones(3), None, 3, 2)
    tensor([[101.,  10.]])
    """
    columns = x.shape[-1]
    if columns_together < 1 or rows_together < 1:
        raise ValueError("rows_together and columns_together are at least 1.")
    panels = max(1, -(-columns // columns_together))
    rows = _rows_of(pointers, columns, columns_together)
    rows_together = min(rows_together, max(rows, 1))  # the C code takes memory for as many
    rounds = check_fours(indices, values)
    check_entries(x, columns, indices, pointers, values, scales, bias, rows * panels, rows, fours=rounds)
    compiled = library()
    if compiled is None or x.device.type != "cpu" or x.dtype == torch.float64:
        weight = scaled(dense_csr(indices, pointers, values, rows, columns, panels, rows_together), scales)
        return _rounded_linear(x, weight, bias) if rounds else _dense_linear(x, weight, bias)
    return _called(
        compiled.secateur_csr_int8 if rounds else compiled.secateur_csr,
        x,
        (indices, pointers, values, scales, bias),
        rows,
        rows_together,
        panels,
        work=indices.shape[0],
    )


@operator(_fake_block, _block_backward)
def block_linear(
    x: Tensor,
    indices: Tensor,
    pointers: Tensor,
    values: Tensor,
    bias: Tensor | None,
    rows: int,
    scales: Tensor | None = None,
) -> Tensor:
    """``y = x W' + bias`` of a W (rows, columns) in which 16 consecutive outputs share their inputs.

    Values of three dimensions also round the inputs, each vector as it comes, to 8 bits between its extremes (and 0);
    sums are then exact. A vector that is not finite has outputs that are NaN.

    Args:
        x: (..., columns), as in `csr_linear`.
        indices: uint16, the column of each kept block.
        pointers: int32 (blocks of rows + 1), where each block of 16 rows begins.
        values: float32, bfloat16 or int8 (kept blocks, 16); zeros where the last block has no row. Or, to round the
            inputs, int8 (kept blocks / 4, 16, 4), where four blocks lie side by side, and pointers are multiples of 4.
        bias: float32 (rows), or None.
        rows: how many outputs there are.
        scales: of int8 values, as in `csr_linear`.

    Raises:
        ValueError: an index or pointer leads out of its tensor, or the shapes do not fit.

    >>> indices, pointers = torch.tensor([2]).to(torch.uint16), torch.tensor([0, 1], dtype=torch.int32)
    >>> block_linear(torch.tensor([[1.0, 10.0, 100.0]]), indices, pointers, torch.ones(1, 16), None, 2)
    tensor([[100., 100.]])
    """
    columns = x.shape[-1]
    blocks = -(-rows // LANES)
    kept = indices.shape[0] if indices.dim() else 0
    rounds = values.dim() == 3
    if values.shape != ((kept // 4, LANES, 4) if rounds else (kept, LANES)) or (rounds and kept % 4):
        raise ValueError(f"{kept} indices for values of shape {tuple(values.shape)}.")
    check_entries(x, columns, indices, pointers, values, scales, bias, blocks, rows, fours=rounds)
    compiled = library()
    if compiled is None or x.device.type != "cpu" or x.dtype == torch.float64:
        weight = scaled(dense_block(indices, pointers, values, rows, columns), scales)
        return _rounded_linear(x, weight, bias) if rounds else _dense_linear(x, weight, bias)
    function = compiled.secateur_quads if rounds else compiled.secateur_block
    return _called(function, x, (indices, pointers, values, scales, bias), rows, work=kept * LANES)


@operator(_fake_window, _window_backward, _keep_windows)
def window_linear(
    x: Tensor,
    words: Tensor,
    moves: Tensor,
    values: Tensor,
    pointers: Tensor,
    order: Tensor,
    bias: Tensor | None,
    rows: int,
    scales: Tensor | None = None,
) -> Tensor:
    """``y = x W' + bias`` of an unstructured sparse W (rows, columns) as 16 rows that walk through it together.

    Made for few vectors at once, where reading W is all the work: it reads 2.9 bytes for a kept bfloat16 at 50 %
    sparsity, 3.3 at 80 %, where `csr_linear` reads 4. A removed weight is not multiplied.

    Args:
        x: (..., columns), as in `csr_linear`.
        words, moves, values, pointers, order: the layout that `secateur.native` describes.
        bias: float32 (rows), or None.
        rows: how many outputs there are.
        scales: of int8 values, as in `csr_linear`. Of values (groups, 96) inputs are rounded to 8 bits, too, as in
            `block_linear`.

    Raises:
        ValueError: a step leads out of the inputs, an output is not there once, or the shapes do not fit.

    >>> layout = windows.to_windows(torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))
    >>> window_linear(torch.tensor([[1.0, 10.0, 100.0]]), **layout, bias=None, rows=2)
    tensor([[101.,  10.]])
    """
    columns = x.shape[-1]
    layout = {"words": words, "moves": moves, "values": values, "pointers": pointers, "order": order}

    def verify() -> None:
        _check_bias(bias, rows)
        check_scales(values, scales, rows)
        _check_together(x, (*layout.values(), scales, bias))
        windows.check(**layout, rows=rows, columns=columns)

    stored = (words, pointers, values, scales, bias, moves, order)
    once(stored, (moves, pointers, order), (columns, x.device, rows), verify)
    compiled = library()
    if compiled is None or x.device.type != "cpu" or x.dtype == torch.float64:
        weight = scaled(windows.from_windows(**layout, rows=rows, columns=columns), scales)
        return _rounded_linear(x, weight, bias) if values.dim() == 2 else _dense_linear(x, weight, bias)
    if columns < windows.WINDOW:
        x = functional.pad(x, (0, windows.WINDOW - columns))
    function = compiled.secateur_picks if values.dim() == 2 else compiled.secateur_window
    return _called(function, x, stored, rows, len(pointers) - 1, work=values.numel())


def _called(function: Any, x: Tensor, stored: tuple[Tensor | None, ...], rows: int, *layout: int, work: int) -> Tensor:
    """The C function on a contiguous float32 copy of x, if it is not that already; the result in the dtype of x."""
    shape, dtype = x.shape, x.dtype
    columns = shape[-1]
    # each of these calls takes a microsecond, and many where the weights have just emptied the caches
    if x.requires_grad:
        x = x.detach()
    if dtype != torch.float32:
        x = x.float()
    if not x.is_contiguous():
        x = x.contiguous()
    batch = math.prod(shape[:-1])
    y = torch.empty(*shape[:-1], rows, dtype=torch.float32, device="cpu")
    held = [tensor if tensor is None or tensor.is_contiguous() else tensor.detach().contiguous() for tensor in stored]
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in held]
    threads = min(torch.get_num_threads(), 1 + work * batch // _WORK_FOR_A_THREAD)
    kind = KINDS[stored[2].dtype] if stored[2] is not None else 0
    if function(*addresses, x.data_ptr(), y.data_ptr(), rows, columns, batch, *layout, kind, threads):
        raise MemoryError(f"no memory for the transposed inputs of a product with {batch} vectors of {columns}.")
    return y if dtype == torch.float32 else y.to(dtype)


# {id of the first tensor that was checked: (all of them, what they were like then)}
_CHECKED: dict[int, tuple[tuple[weakref.ref[Tensor], ...], tuple[Any, ...]]] = {}


def once(
    stored: tuple[Tensor | None, ...], checked: tuple[Tensor, ...], facts: tuple[Any, ...], verify: Callable[[], None]
) -> None:
    """Calls verify unless it has passed before, for the same facts and for tensors that have stayed as they were.

    ``stored`` are all tensors that the C code reads, ``checked`` those of them whose entries it follows.
    """
    state: tuple[Any, ...] | None = None
    if not any(tensor.is_inference() for tensor in checked):  # those do not count their changes
        seen = [None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in stored]
        state = (facts, [private.version_of(tensor) for tensor in checked], seen)
        known = _CHECKED.get(id(checked[0]))
        if known is not None and known[1] == state and all(r() is t for r, t in zip(known[0], checked, strict=True)):
            return
    verify()
    if state is not None:
        key = id(checked[0])
        forget = weakref.ref(checked[0], lambda _: _CHECKED.pop(key, None))
        _CHECKED[key] = ((forget, *map(weakref.ref, checked[1:])), state)


def check_fours(indices: Tensor, values: Tensor, shared: int = 1) -> bool:
    """Whether values are (kept / 4, 4), as where inputs are rounded; ValueError if they do not fit the indices.

    ``shared``: how many rows share each entry; values are then (kept, shared).
    """
    rounds, kept = values.dim() == 2 and shared == 1, indices.shape[0] if indices.dim() else 0
    fitting = (kept, shared) if shared > 1 else (kept // 4, 4) if rounds else (kept,)
    if values.shape != fitting or (rounds and kept % 4):
        raise ValueError(f"{kept} indices for values of shape {tuple(values.shape)}.")
    return rounds


def check_entries(
    x: Tensor,
    columns: int,
    indices: Tensor,
    pointers: Tensor,
    values: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    segments: int,
    rows: int,
    block: int = 0,
    fours: bool = False,
    shared: int = 1,
) -> None:
    """Raises where the C code would read what is not there; once for tensors that stay as they are.

    ``block``: all rows' entries in the first so many columns come first, then those in the next so many, and so on.
    ``fours``: whether four entries lie side by side, of int8. ``shared``: how many rows share each segment.
    """

    def verify() -> None:
        if indices.dtype != torch.uint16 or pointers.dtype != torch.int32 or indices.dim() != 1 or pointers.dim() != 1:
            raise ValueError("indices are a vector of uint16, pointers one of int32.")
        if values.dtype not in KINDS:
            raise ValueError(f"values are float32 or bfloat16, or int8 with scales, not {values.dtype}.")
        if fours and values.dtype != torch.int8:
            raise ValueError(f"values of four blocks side by side are int8, not {values.dtype}.")
        if pointers.shape[0] != segments + 1:
            raise ValueError(f"{pointers.shape[0]} pointers where {segments + 1} are needed.")
        _check_bias(bias, rows)
        check_scales(values, scales, rows)
        if columns > MOST_COLUMNS:
            raise ValueError(f"{columns} inputs; an index of 16 bits counts up to {MOST_COLUMNS}.")
        _check_together(x, (indices, pointers, values, scales, bias))
        where = pointers.detach().cpu().numpy()
        if where[0] != 0 or where[-1] != indices.shape[0] or (where[1:] < where[:-1]).any():
            raise ValueError(f"the pointers do not rise from 0 to {indices.shape[0]}, the number of indices.")
        if fours and (where % 4).any():
            raise ValueError("a pointer is no multiple of 4, and four blocks lie side by side.")
        largest = int(indices.detach().cpu().numpy().max(initial=0))
        if indices.shape[0] and largest >= columns:
            raise ValueError(f"an index is {largest}, but there are {columns} inputs.")
        if block and rows:
            own = np.repeat(np.arange(segments * shared // rows), np.diff(where[:: rows // shared]))
            if (indices.detach().cpu().numpy() // block != own).any():
                raise ValueError("an index lies in another block of channels than the pointers say.")

    facts = (columns, x.device, segments, rows, block, fours, shared)
    once((indices, pointers, values, scales, bias), (indices, pointers), facts, verify)


def _check_bias(bias: Tensor | None, rows: int) -> None:
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (rows,)):
        raise ValueError(f"the bias is float32 of shape ({rows},), not {bias.dtype} of shape {tuple(bias.shape)}.")


def check_scales(values: Tensor, scales: Tensor | None, rows: int) -> None:
    """Raises ValueError unless there are scales exactly where they are needed."""
    if values.dtype != torch.int8:
        if scales is not None:
            raise ValueError(f"scales belong to values of int8, not {values.dtype}.")
        return
    if scales is None or scales.dtype != torch.float32 or scales.shape != (rows,):
        given = "none" if scales is None else f"{scales.dtype} of shape {tuple(scales.shape)}"
        raise ValueError(f"the scales of int8 values are float32 of shape ({rows},), not {given}.")
    if not bool(scales.isfinite().all()):
        raise ValueError("a scale is NaN or infinite.")


def _check_together(x: Tensor, stored: tuple[Tensor | None, ...]) -> None:
    if any(tensor is not None and tensor.device != x.device for tensor in stored):
        raise ValueError(f"the input is on {x.device}, the layer's tensors are not all there.")


def scaled(weight: Tensor, scales: Tensor | None) -> Tensor:
    """A weight (outputs, ...) of whole numbers times their scales; one without scales as it is."""
    return weight if scales is None else weight * scales.view(-1, *[1] * (weight.dim() - 1))


def rounded_inputs(x: Tensor) -> Tensor:
    """Vectors (..., columns) as `block_linear` rounds them: each to 256 numbers from its least to its largest entry, 0
    among them; NaN where the vector is not finite.

    >>> rounded_inputs(torch.tensor([[0.0, 2.55, 1.004, -0.0]]))
    tensor([[0.0000, 2.5500, 1.0000, 0.0000]])
    """
    low, high = (
        each.clamp(*at) for each, at in zip(x.aminmax(dim=-1, keepdim=True), ((None, 0), (0, None)), strict=True)
    )
    scale = high / 255 - low / 255
    odd = ~scale.isfinite()
    inverse = torch.where(scale > 1e-35, 1 / scale, 0)
    zero = (-low * inverse).round()
    codes = ((x * inverse).round() + zero).clamp(0, 255)
    return torch.where(odd, torch.nan, (codes - zero) * torch.where(scale > 1e-35, scale, 0))


def _rounded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not x.numel():
        return _dense_linear(x, weight, bias)
    codes = rounded_inputs(x.detach().float()).double()
    return _dense_linear(codes, weight, bias).to(x.dtype)


def _dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.nn.functional.linear(x.detach().to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    return y.to(x.dtype)


def dense_csr(
    indices: Tensor, pointers: Tensor, values: Tensor, rows: int, columns: int, panels: int, rows_together: int
) -> Tensor:
    """The W (rows, columns) of `csr_linear`, float32."""
    order = _row_order(rows, panels, rows_together).to(indices.device)
    at = order.repeat_interleave(pointers.diff().long())
    weight = torch.zeros(rows, columns, dtype=torch.float32, device=values.device)
    # what fills up a four is 0, beside an entry that is kept
    return weight.index_put_((at, indices.long()), values.reshape(-1).float(), accumulate=True)


def _row_order(rows: int, panels: int, rows_together: int) -> Tensor:
    """The row of each segment, in the order in which `csr_linear` stores them.

    >>> _row_order(3, 2, 2)
    tensor([0, 1, 0, 1, 2, 2])
    """
    blocks = [
        torch.arange(top, min(top + rows_together, rows), device="cpu").repeat(panels)
        for top in range(0, rows, rows_together)
    ]
    return torch.cat(blocks) if blocks else torch.zeros(0, dtype=torch.long, device="cpu")


def dense_block(indices: Tensor, pointers: Tensor, values: Tensor, rows: int, columns: int) -> Tensor:
    """The W (rows, columns) of `block_linear`, float32, before scales."""
    if values.dim() == 3:  # four blocks side by side
        values = values.transpose(1, 2).reshape(-1, LANES)
    blocks = -(-rows // LANES)
    at = torch.arange(blocks, device=indices.device).repeat_interleave(pointers.diff().long())
    weight = torch.zeros(blocks, columns, LANES, dtype=torch.float32, device=values.device)
    weight.index_put_((at, indices.long()), values.float(), accumulate=True)  # what fills up a four is 0
    return weight.transpose(1, 2).reshape(blocks * LANES, columns)[:rows]
