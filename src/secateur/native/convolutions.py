"""The operator that calls the kernel for convolutions with a sparse weight.

Law: as for the products in operators.py: every index that the C code follows has been compared with its bounds, and the
result is the same, within rounding, with and without compiled kernels.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input

from secateur.native import operators
from secateur.native.loading import library
from secateur.native.operators import KINDS, check_entries, define, dense_csr, is_plain, scaled
from secateur.support import private

__all__ = ["dense_convolution", "size_after", "sparse_convolution", "together_for"]

_WIDE = 0  # numbers in a vector: 0 for what suits the processor; 8 or 16 where AVX-512 has both
_TILE = 208  # places of the output that a tile has, more or less
_NEAR = 8192  # numbers of a block's inputs that stay in the first cache beside the rest
_BETWEEN = 16  # numbers that are left empty after a channel's
_WEIGHTS = 10  # of an output in a block
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def sparse_convolution(
    x: Tensor,
    indices: Tensor,
    pointers: Tensor,
    values: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    together: int,
    rectified: bool,
    scales: Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """A convolution in two dimensions with an unstructured sparse weight; a removed weight is not multiplied.

    So where x is infinite or NaN, an output that does not depend on it stays finite, other than in a dense one.
    Gradients reach x and the addend, through dense products, and nothing else. Kept entries are ordered as in
    `csr_linear`, of the flattened weight (outputs, channels of a group · kernel's places): all rows are together, and a
    panel's columns are those of ``together`` channels.

    Args:
        x: (images, channels, height, width), any floating dtype and memory format; computed in float32, or in float64
            without kernels if it is float64.
        indices, pointers, values: as in `csr_linear`.
        bias: float32 (outputs), or None.
        addend: of the result's shape, added to it; or None.
        kernel, stride, dilation: of height and width.
        padding: with zeros, above, below, left and right.
        groups: of channels and outputs.
        rectified: whether what is below zero then becomes zero.
        scales: of int8 values, as in `csr_linear`.
        into: memory that the result may take, which is then what is returned: the addend, if nobody else needs it, or
            any other that does not overlap what is read. It is left alone where a kernel does not write float32 there:
            without kernels, with gradients, when compiled, and where shape, dtype or memory format do not fit.

    Returns:
        (images, outputs, height, width), contiguous, in the dtype of x.

    Raises:
        ValueError: an index or pointer leads out of its tensor, the shapes do not fit, or a kernel is larger than the
            padded image.

    >>> indices, pointers = torch.tensor([0, 8]).to(torch.uint16), torch.tensor([0, 2], dtype=torch.int32)
    >>> image = torch.arange(16.0).view(1, 1, 4, 4)
    >>> weight = indices, pointers, torch.ones(2)
    >>> sparse_convolution(image, *weight, None, None, [3, 3], [1, 1], [0] * 4, [1, 1], 1, 1, False)
    tensor([[[[10., 12.],
              [18., 20.]]]])
    """
    plain = is_plain(x) and (addend is None or is_plain(addend))
    if plain and into is not None:
        given = x, indices, pointers, values, bias, addend
        return _computed(*given, kernel, stride, padding, dilation, groups, together, rectified, scales, into)
    operator = _computed if plain else torch.ops.secateur.sparse_convolution
    result: Tensor = operator(
        x,
        indices,
        pointers,
        values,
        bias,
        addend,
        kernel,
        stride,
        padding,
        dilation,
        groups,
        together,
        rectified,
        scales,
    )
    return result


def together_for(channels: int, kernel: Sequence[int], places: int, below: int, share: float) -> int:
    """How many of a group's channels make a block: those whose copied inputs stay in the first cache, but enough that
    an output keeps some weights of them, for its sums are put away and fetched once for each block.

    Args:
        channels: of a group.
        places: of an output.
        below: how many numbers of a tile's inputs lie below it, in rows that the kernel reaches.
        share: of the weights that are kept.

    >>> together_for(64, [3, 3], 56 * 56, 2 * 56, 0.1), together_for(512, [1, 1], 7 * 7, 0, 0.05)
    (13, 171)
    """
    of_channel = kernel[1] * (min(places, _TILE) + below + _BETWEEN)
    enough = _WEIGHTS / max(share * kernel[0] * kernel[1], 1e-9)
    most = max(_NEAR // of_channel, min(math.ceil(enough), channels), 1)
    return max(1, -(-channels // max(round(channels / most), 1)))


def dense_convolution(
    indices: Tensor, pointers: Tensor, values: Tensor, rows: int, channels: int, kernel: Sequence[int], together: int
) -> Tensor:
    """The weight (rows, channels of a group, *kernel) of `sparse_convolution`, float32."""
    columns = channels * kernel[0] * kernel[1]
    panels = max(1, -(-channels // together))
    return dense_csr(indices, pointers, values, rows, columns, panels, max(rows, 1)).view(rows, channels, *kernel)


def _rows_of(channels: int, pointers: Tensor, groups: int, together: int) -> int:
    return int((pointers.shape[0] - 1) // max(1, -(-(channels // groups) // together)))


def size_after(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, int]:
    """The height and width of what a convolution makes of an image of such a size.

    >>> size_after((7, 8), [3, 3], [1, 2], [1, 1, 0, 1], [1, 1])
    (7, 4)
    """
    above, below, left, right = padding
    return (
        (size[0] + above + below - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1,
        (size[1] + left + right - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1,
    )


# indices, pointers, values, scales and bias
_Stored = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
_Seen = tuple["weakref.ref[Tensor]", int, torch.Size, torch.dtype, bool]  # a tensor, and what it was like


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that was found to be right, so that the next one like it need not be looked at: that took as long as a
    third of the kernel's work on an image of 7x7."""

    shape: torch.Size  # of the input
    device: torch.device
    geometry: tuple[Any, ...]
    tensors: tuple[_Seen | None, ...]  # of the layer
    versions: tuple[int, int] | None  # of indices and pointers; None where they do not count their changes
    made: tuple[int, int, int, int]
    of_group: int  # channels
    sizes: Any  # for the C code
    work: int

    def is_of(self, shape: torch.Size, device: torch.device, stored: _Stored, geometry: tuple[Any, ...]) -> bool:
        if self.shape != shape or self.geometry != geometry or self.device != device or self.versions is None:
            return False
        for seen, tensor in zip(self.tensors, stored, strict=True):
            if (seen is None) != (tensor is None):
                return False
            if seen is not None and tensor is not None and (seen[0]() is not tensor or seen[1:] != _like(tensor)):
                return False
        return self.versions == (private.version_of(stored[0]), private.version_of(stored[1]))


_CALLS: dict[int, _Call] = {}  # by the id of the indices: the last of each layer


def _like(tensor: Tensor) -> tuple[int, torch.Size, torch.dtype, bool]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.is_contiguous()


def _looked_at(x: Tensor, stored: _Stored, geometry: tuple[Any, ...]) -> _Call:
    """A call whose tensors and numbers fit; or ValueError."""
    indices, pointers, values, scales, bias = stored
    kernel, stride, padding, dilation, groups, together, rectified, wide = geometry
    if x.dim() != 4 or x.dtype not in _FLOATS:
        raise ValueError(f"the input is (images, channels, height, width) of floats, not {x.dtype} {tuple(x.shape)}.")
    if any(len(each) != 2 or min(each) < 1 for each in (kernel, stride, dilation)) or min(groups, together) < 1:
        raise ValueError("kernel, stride and dilation are two numbers from 1 on, groups and together one.")
    if len(padding) != 4 or min(padding) < 0:
        raise ValueError("padding is four numbers from 0 on: above, below, left and right.")
    images, channels, height, width = x.shape
    of_group = channels // groups
    together = min(together, max(of_group, 1))
    rows = _rows_of(channels, pointers, groups, together)
    panels = max(1, -(-of_group // together))
    if channels % groups or rows % groups:
        raise ValueError(f"{channels} channels and {rows} outputs are not {groups} groups.")
    if values.shape != indices.shape:
        raise ValueError(f"{indices.shape[0]} indices for values of shape {tuple(values.shape)}.")
    area = kernel[0] * kernel[1]
    check_entries(x, of_group * area, indices, pointers, values, scales, bias, panels * rows, rows, together * area)
    out_height, out_width = size_after((height, width), kernel, stride, padding, dilation)
    if out_height < 1 or out_width < 1:
        raise ValueError(f"a kernel of {tuple(kernel)}, dilated by {tuple(dilation)}, is larger than the padded image.")
    sizes = (ctypes.c_size_t * 19)(
        images, channels, height, width, rows, out_height, out_width, *kernel, *stride, *dilation,
        padding[0], padding[2], groups, together, rectified, wide,
    )  # fmt: skip
    key = id(indices)
    refs: list[weakref.ref[Tensor] | None] = [weakref.ref(indices, lambda _: _CALLS.pop(key, None))]
    refs += [None if tensor is None else weakref.ref(tensor) for tensor in stored[1:]]
    counted = not (indices.is_inference() or pointers.is_inference())
    return _Call(
        shape=x.shape,
        device=x.device,
        geometry=tuple(tuple(each) if isinstance(each, Sequence) else each for each in geometry),
        tensors=tuple(
            None if ref is None or tensor is None else (ref, *_like(tensor))
            for ref, tensor in zip(refs, stored, strict=True)
        ),
        versions=(private.version_of(indices), private.version_of(pointers)) if counted else None,
        made=(images, rows, out_height, out_width),
        of_group=of_group,
        sizes=sizes,
        work=images * out_height * out_width * (indices.shape[0] + channels),
    )


def _computed(
    x: Tensor,
    indices: Tensor,
    pointers: Tensor,
    values: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    together: int,
    rectified: bool,
    scales: Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor:
    stored = indices, pointers, values, scales, bias
    geometry = tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), groups, together, rectified, _WIDE
    call = _CALLS.get(id(indices))
    if call is None or not call.is_of(x.shape, x.device, stored, geometry) or x.dtype not in _FLOATS:
        call = _looked_at(x, stored, geometry)
        if call.versions is not None:
            _CALLS[id(indices)] = call
    if addend is not None and (addend.shape != call.made or addend.device != x.device):
        raise ValueError(f"what is added is of shape {call.made} on {x.device}, not {tuple(addend.shape)}.")
    compiled = library()
    if compiled is None or x.device.type != "cpu" or x.dtype == torch.float64:
        weight = dense_convolution(indices, pointers, values, call.made[1], call.of_group, kernel, together)
        return _dense(x, scaled(weight, scales), bias, addend, stride, padding, dilation, groups, rectified)
    fits = into is not None and into.shape == call.made and into is _plain(into) and into.device == x.device
    y = into if into is not None and fits and x.dtype == torch.float32 else torch.empty(call.made)
    if not y.numel():
        return y.to(x.dtype)
    held = [tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous() for tensor in stored]
    held += [_plain(addend), _plain(x), y]
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in held]
    threads = min(torch.get_num_threads(), 1 + call.work // operators._WORK_FOR_A_THREAD)
    if compiled.secateur_convolution(*addresses, call.sizes, KINDS[values.dtype], threads):
        raise MemoryError(f"no memory for the copied inputs of an image of {x.shape[2]}×{x.shape[3]}.")
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def _convolution(
    x: Tensor,
    indices: Tensor,
    pointers: Tensor,
    values: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    together: int,
    rectified: bool,
    scales: Tensor | None = None,
) -> Tensor:
    return _computed(
        x,
        indices,
        pointers,
        values,
        bias,
        addend,
        kernel,
        stride,
        padding,
        dilation,
        groups,
        together,
        rectified,
        scales,
    )


def _plain(tensor: Tensor | None) -> Tensor | None:
    """As the C code reads it."""
    if tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous()):
        return tensor
    return tensor.float().contiguous()


def _dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    rectified: bool,
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    around = functional.pad(x.detach().to(wide), _around(padding)).contiguous()
    y = functional.conv2d(
        around, weight.to(wide), None if bias is None else bias.to(wide), tuple(stride), 0, tuple(dilation), groups
    )
    if addend is not None:
        y = y + addend.to(wide)
    return (y.clamp_min(0) if rectified else y).to(x.dtype).contiguous()


def _around(padding: Sequence[int]) -> list[int]:
    """What `torch.nn.functional.pad` is given: from the last dimension on."""
    return [*padding[2:], *padding[:2]]


def _fake(x: Tensor, indices: Tensor, pointers: Tensor, values: Tensor, *rest: Any) -> Tensor:
    del indices, values
    kernel, stride, padding, dilation, groups, together = rest[2:8]
    rows = _rows_of(x.shape[1], pointers, groups, together)
    return x.new_empty(x.shape[0], rows, *size_after(x.shape[2:], kernel, stride, padding, dilation))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, indices, pointers, values, _, addend, *geometry, rectified, scales = inputs
    ctx.save_for_backward(indices, pointers, values, scales, output if rectified else None)
    ctx.shape, ctx.rectified, ctx.has_addend, ctx.geometry = x.shape, rectified, addend is not None, geometry


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indices, pointers, values, scales, output = ctx.saved_tensors
    kernel, stride, padding, dilation, groups, together = ctx.geometry
    if ctx.rectified:
        grad = grad * (output > 0)
    images, channels, height, width = ctx.shape
    weight = dense_convolution(indices, pointers, values, grad.shape[1], channels // groups, kernel, together)
    weight = scaled(weight, scales)
    above, below, left, right = padding
    padded = (images, channels, height + above + below, width + left + right)
    wide = torch.promote_types(grad.dtype, torch.float32)
    geometry = tuple(stride), 0, tuple(dilation), groups
    to_padded = conv2d_input(padded, weight.to(wide), grad.to(wide), *geometry)  # type: ignore[no-untyped-call]
    to_x = to_padded[:, :, above : above + height, left : left + width].to(grad.dtype)
    return to_x, None, None, None, None, grad if ctx.has_addend else None, *[None] * 8


define("sparse_convolution", _convolution, _fake, _backward, _keep)
