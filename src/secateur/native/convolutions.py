"""The operator that calls the kernel for convolutions with a sparse weight.

Law: as for the products in operators.py: every index that the C code follows has been compared with its bounds, and the
result is the same, within rounding, with and without compiled kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input

from secateur.native import operators
from secateur.native.loading import library
from secateur.native.operators import (
    KINDS,
    check_entries,
    check_fours,
    define,
    dense_csr,
    is_plain,
    rounded_inputs,
    scaled,
)
from secateur.support import private

_WIDE = 0  # numbers in a vector: 0 for what suits the processor; 8 or 16 where AVX-512 has both
_TILE = 208  # places of the output that a tile has, more or less
_NEAR = 8192  # numbers of a block's inputs that stay in the first cache beside the rest
_NEAR_BYTES = 24576  # the same where inputs are bytes
_BETWEEN = 16  # numbers that are left empty after a channel's
_WEIGHTS = 10  # of an output in a block
_SHARED_NEAR, _SHARED_WEIGHTS = 16384, 48  # the same where outputs share places
_APART = 16  # numbers: planes that lie apart begin at multiples of so many, a line of the cache
_WATCHED_BYTES = 1 << 28  # of all that a chain's kernels make while it is watched
_HELD_BYTES = 1 << 26  # of memory that chains hold between two calls
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

RECTIFIERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "relu6": functional.relu6,
    "hardswish": functional.hardswish,
    "silu": functional.silu,
}
"""The activations that the kernels have in their store, and what torch has for them."""
_NUMBERS = {"": 0, **{name: number for number, name in enumerate(RECTIFIERS, start=1)}}  # as activations.h has them


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
    shared: int = 1,
    into: Tensor | None = None,
    rectifier: str = "relu",
    apart: bool = False,
) -> Tensor:
    """A convolution in two dimensions with an unstructured sparse weight; a removed weight is not multiplied.

    So where x is infinite or NaN, an output that does not depend on it stays finite, other than in a dense one.
    Gradients reach x and the addend, through dense products, and nothing else. Kept entries are ordered as in
    `csr_linear`, of the flattened weight (outputs, channels of a group · kernel's places): all rows are together, and a
    panel's columns are those of ``together`` channels.

    Args:
        x: (images, channels, height, width), any floating dtype and memory format; computed in float32, or in float64
            without kernels if it is float64.
        indices, pointers, values: as in `csr_linear`. Where outputs share places, values are (kept, shared), and
            pointers count so many rows as one. Else int8 values of (kept / 4, 4) have each image rounded to 8 bits, and
            a row's entries in a panel are filled up to a multiple of 4 by zeros.
        bias: float32 (outputs), or None.
        addend: of the result's shape, added to it; or None.
        kernel, stride, dilation: of height and width.
        padding: with zeros, above, below, left and right.
        groups: of channels and outputs.
        rectified: whether an activation follows.
        scales: of int8 values, as in `csr_linear`.
        shared: how many consecutive outputs share the places of their kept weights: 1 or 4.
        into: memory that the result may take, which is then what is returned: the addend, if nobody else needs it, or
            any other that does not overlap what is read. It is left alone where a kernel does not write float32 there:
            without kernels, with gradients, when compiled, and where shape, dtype or memory format do not fit. Planes
            of its own memory may lie apart; what is between them is then written, too.
        rectifier: which activation, a word of `RECTIFIERS`.
        apart: whether planes of the result may lie apart, each from a multiple of 16 numbers on, where the kernel is
            faster so: for what goes on to another convolution of these, and nowhere else.

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
    if rectifier not in RECTIFIERS:
        raise ValueError(f"the rectifier is one of {', '.join(RECTIFIERS)}, not {rectifier!r}.")
    weight, geometry = (indices, pointers, values), (kernel, stride, padding, dilation, groups, together)
    if is_plain(x) and (addend is None or is_plain(addend)):
        given = (*geometry, rectifier if rectified else "", shared)
        return _computed(x, (*weight, scales, bias), addend, given, into, apart)
    in_store = rectified and rectifier == "relu"
    operator = torch.ops.secateur.sparse_convolution
    made: Tensor = operator(x, *weight, bias, addend, *geometry, in_store, scales, shared)
    return RECTIFIERS[rectifier](made) if rectified and not in_store else made


def together_for(
    channels: int,
    kernel: Sequence[int],
    places: int,
    below: int,
    share: float,
    shared: int = 1,
    *,
    of_bytes: bool = False,
) -> int:
    """How many of a group's channels make a block: those whose copied inputs stay in the first cache, but enough that
    an output keeps some weights of them, for its sums are put away and fetched once for each block.

    Args:
        channels: of a group.
        places: of an output.
        below: how many numbers of a tile's inputs lie below it, in rows that the kernel reaches.
        share: of the weights that are kept.
        of_bytes: whether inputs are copied as bytes; sums are put away by fours of weights, too.
        shared: outputs that share the places of their weights.

    >>> together_for(64, [3, 3], 56 * 56, 2 * 56, 0.1), together_for(512, [1, 1], 7 * 7, 0, 0.05)
    (13, 171)
    """
    of_channel = kernel[1] * (min(places, _TILE) + below + _BETWEEN)
    if shared > 1:
        near, weights = _SHARED_NEAR, _SHARED_WEIGHTS
    else:
        near, weights = (_NEAR_BYTES, 4 * _WEIGHTS) if of_bytes else (_NEAR, _WEIGHTS)
    enough = weights / max(share * kernel[0] * kernel[1], 1e-9)
    most = max(near // of_channel, min(math.ceil(enough), channels), 1)
    return max(1, -(-channels // max(round(channels / most), 1)))


def dense_convolution(
    indices: Tensor,
    pointers: Tensor,
    values: Tensor,
    rows: int,
    channels: int,
    kernel: Sequence[int],
    together: int,
    shared: int = 1,
) -> Tensor:
    """The weight (rows, channels of a group, *kernel) of `sparse_convolution`, float32, before scales."""
    columns = channels * kernel[0] * kernel[1]
    panels = max(1, -(-channels // together))
    units = max(rows // shared, 1)
    # four inputs lie side by side where these are rounded, and four outputs where these share places
    each = values.unbind(1) if shared > 1 else [values]
    parts = [dense_csr(indices, pointers, own, rows // shared, columns, panels, units) for own in each]
    return torch.stack(parts, 1).view(rows, channels, *kernel)


def _rows_of(channels: int, pointers: Tensor, groups: int, together: int, shared: int) -> int:
    return int((pointers.shape[0] - 1) // max(1, -(-(channels // groups) // together))) * shared


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
# kernel, stride, padding, dilation; groups, channels together, the activation, outputs that share places
_Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], int, int, str, int]
# a tensor, and what it was like
_Seen = tuple["weakref.ref[Tensor]", int, torch.Size, torch.dtype, bool]


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
    addresses: tuple[int | None, ...] | None  # of the layer's tensors; None where the C code cannot read all of them
    rounds: bool
    kind: int  # of values
    work: int
    planes: (
        tuple[tuple[int, int, int], tuple[int, int, int, int]] | None
    )  # shape of memory and strides where they lie apart

    def is_of(self, x: Tensor, stored: _Stored, geometry: tuple[Any, ...]) -> bool:
        return self.shape == x.shape and self.device == x.device and self.holds(stored, geometry)

    def holds(self, stored: _Stored, geometry: tuple[Any, ...]) -> bool:
        """Whether the layer is still what was looked at."""
        if self.versions is None or self.geometry != geometry:
            return False
        for seen, tensor in zip(self.tensors, stored, strict=True):
            if seen is None or tensor is None:
                if seen is not None or tensor is not None:
                    return False
                continue
            reference, address, shape, dtype, is_contiguous = seen
            if reference() is not tensor or tensor.data_ptr() != address or tensor.shape != shape:
                return False
            if tensor.dtype != dtype or tensor.is_contiguous() != is_contiguous:
                return False
        return self.versions == (private.changes_of(stored[0]), private.changes_of(stored[1]))


_CALLS: dict[int, _Call] = {}  # by the id of the indices: the last of each layer


def as_looked_at(given: _Geometry) -> tuple[Any, ...]:
    """What a call is known by beside the layer's tensors: kernel, stride, padding, dilation, groups, channels together,
    the activation or "", outputs that share places.

    >>> as_looked_at(([3, 3], [1, 1], [0] * 4, [1, 1], 1, 4, "relu", 1))[:2]
    ((3, 3), (1, 1))
    """
    kernel, stride, padding, dilation, *others = given
    return (tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), *others, _WIDE)


def _like(tensor: Tensor) -> tuple[int, torch.Size, torch.dtype, bool]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.is_contiguous()


def _looked_at(x: Tensor, stored: _Stored, geometry: tuple[Any, ...]) -> _Call:
    """A call whose tensors and numbers fit; or ValueError."""
    indices, pointers, values, scales, bias = stored
    kernel, stride, padding, dilation, groups, together, activation, shared, wide = geometry
    if x.dim() != 4 or x.dtype not in _FLOATS:
        raise ValueError(f"the input is (images, channels, height, width) of floats, not {x.dtype} {tuple(x.shape)}.")
    if any(len(each) != 2 or min(each) < 1 for each in (kernel, stride, dilation)) or min(groups, together) < 1:
        raise ValueError("kernel, stride and dilation are two numbers from 1 on, groups and together one.")
    if len(padding) != 4 or min(padding) < 0:
        raise ValueError("padding is four numbers from 0 on: above, below, left and right.")
    images, channels, height, width = x.shape
    of_group = channels // groups
    together = min(together, max(of_group, 1))
    if shared not in (1, 4):
        raise ValueError(f"{shared} outputs share the places of their weights; the kernel has 4.")
    rows = _rows_of(channels, pointers, groups, together, shared)
    panels = max(1, -(-of_group // together))
    if channels % groups or rows // shared % groups:
        raise ValueError(f"{channels} channels and {rows} outputs are not {groups} groups.")
    rounds = check_fours(indices, values, shared)
    area = kernel[0] * kernel[1]
    segments, block = panels * (rows // shared), together * area
    entries = indices, pointers, values, scales, bias
    check_entries(x, of_group * area, *entries, segments, rows, block, fours=rounds, shared=shared)
    out_height, out_width = size_after((height, width), kernel, stride, padding, dilation)
    if out_height < 1 or out_width < 1:
        raise ValueError(f"a kernel of {tuple(kernel)}, dilated by {tuple(dilation)}, is larger than the padded image.")
    sizes = (ctypes.c_size_t * 20)(
        images, channels, height, width, rows, out_height, out_width, *kernel, *stride, *dilation,
        padding[0], padding[2], groups, together, _NUMBERS[activation], wide, shared,
    )  # fmt: skip
    key = id(indices)
    refs: list[weakref.ref[Tensor] | None] = [weakref.ref(indices, lambda _: _CALLS.pop(key, None))]
    refs += [None if tensor is None else weakref.ref(tensor) for tensor in stored[1:]]
    counted = not (indices.is_inference() or pointers.is_inference())
    return _Call(
        shape=x.shape,
        device=x.device,
        geometry=geometry,
        tensors=tuple(
            None if ref is None or tensor is None else (ref, *_like(tensor))
            for ref, tensor in zip(refs, stored, strict=True)
        ),
        versions=(private.changes_of(indices), private.changes_of(pointers)) if counted else None,
        made=(images, rows, out_height, out_width),
        of_group=of_group,
        sizes=sizes,
        addresses=_addresses_of(stored) if all(each is None or each.is_contiguous() for each in stored) else None,
        rounds=rounds,
        kind=KINDS[values.dtype],
        work=images * out_height * out_width * (values.numel() + channels),
        planes=_planes_of(images, rows, out_height, out_width),
    )


def _addresses_of(tensors: Iterable[Tensor | None]) -> tuple[int | None, ...]:
    return tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)


def _planes_of(
    images: int, rows: int, height: int, width: int
) -> tuple[tuple[int, int, int], tuple[int, int, int, int]] | None:
    """The shape of memory and the strides of planes that lie apart; None where they need not, or are too small.

    >>> _planes_of(1, 8, 7, 7), _planes_of(1, 8, 4, 8), _planes_of(1, 8, 2, 2)
    (((1, 8, 64), (512, 64, 7, 1)), None, None)
    """
    places = height * width
    plane = -(-places // _APART) * _APART
    if plane == places or 3 * (plane - places) > places:
        return None
    return (images, rows, plane), (rows * plane, plane, width, 1)


def _plane_of(tensor: Tensor) -> int:
    """How many numbers a tensor that is all of its memory has from one plane to the next; 0 where they are no planes of
    that kind."""
    images, channels, height, width = tensor.shape
    strides = tensor.stride()
    plane = strides[1]
    if strides != (channels * plane, plane, width, 1) or plane < height * width or tensor.storage_offset():
        return 0
    return plane if tensor.untyped_storage().nbytes() == 4 * images * channels * plane else 0


def _computed(
    x: Tensor,
    stored: _Stored,
    addend: Tensor | None,
    given: _Geometry,
    into: Tensor | None = None,
    apart: bool = False,
) -> Tensor:
    kernel, stride, padding, dilation, groups, together, activation, shared = given
    indices, _, _, scales, bias = stored
    geometry = as_looked_at(given)
    call = _CALLS.get(id(indices))
    if call is None or not call.is_of(x, stored, geometry) or x.dtype not in _FLOATS:
        call = _looked_at(x, stored, geometry)
        if call.versions is not None:
            _CALLS[id(indices)] = call
    if addend is not None and (addend.shape != call.made or addend.device != x.device):
        raise ValueError(f"what is added is of shape {call.made} on {x.device}, not {tuple(addend.shape)}.")
    compiled = library()
    if compiled is None or not x.is_cpu or x.dtype == torch.float64:
        weight = dense_convolution(*stored[:3], call.made[1], call.of_group, kernel, together, shared)
        weight, seen = scaled(weight, scales), _rounded_images(x) if call.rounds else x
        return _dense(seen, weight, bias, addend, stride, padding, dilation, groups, activation).to(x.dtype)
    may_be_apart = apart and call.planes is not None and not call.rounds
    image, x_plane = _as_read(x, call.rounds)
    beside, addend_plane = (None, 0) if addend is None else _as_read(addend, call.rounds)
    y_plane = 0
    if into is not None and (fit := _fits(into, call, x, addend, shared, may_be_apart)) is not None:
        y, y_plane = into, fit
    elif may_be_apart and call.planes is not None:
        held, strides = call.planes
        y, y_plane = torch.empty(held, dtype=torch.float32, device="cpu").as_strided(call.made, strides), strides[1]
    else:
        y = torch.empty(call.made, dtype=torch.float32, device="cpu")
    if not y.numel():
        return y.to(x.dtype)
    copied = () if call.addresses is not None else [each if each is None else each.contiguous() for each in stored]
    places = None if beside is None else beside.data_ptr(), image.data_ptr(), y.data_ptr()
    planes = x_plane, y_plane, addend_plane
    _run(compiled, call, call.addresses or _addresses_of(copied), places, planes, torch.get_num_threads())
    if _WATCHED.steps is not None:
        is_whole = image is x and beside is addend and None not in (call.addresses, call.versions)
        _WATCHED.note(_Step(call, addend, x, y, planes, is_whole))
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def _run(
    compiled: Any,
    call: _Call,
    stored: tuple[int | None, ...],
    places: tuple[int | None, int, int],
    planes: tuple[int, int, int],
    threads: int,
) -> None:
    """The kernel's work. ``places``: the addresses of the addend, of x and of the result."""
    function = compiled.secateur_convolution_int8 if call.rounds else compiled.secateur_convolution
    threads = min(threads, 1 + call.work // operators._WORK_FOR_A_THREAD)
    if function(*stored, *places, call.sizes, *planes, call.kind, threads):
        raise MemoryError(f"no memory for the copied inputs of an image of {call.shape[2]}×{call.shape[3]}.")


def _as_read(tensor: Tensor, side_by_side: bool) -> tuple[Tensor, int]:
    """A tensor as the C code reads it, and how many numbers its planes lie apart, or 0."""
    if tensor.dtype != torch.float32:
        return tensor.float().contiguous(), 0
    if tensor.is_contiguous():
        return tensor, 0
    plane = 0 if side_by_side else _plane_of(tensor)
    return tensor if plane else tensor.contiguous(), plane


# Convolutions one after the other, computed again by their kernels' calls alone: what looks at tensors, and makes and
# gives back memory, took a sixth of the time of ResNet-50 with 95 % zeros.
#
# Law: the result is that of the calls that were watched, to the bit; what any of them looked at is looked at again.


@dataclass(frozen=True, slots=True)
class _Step:
    """A kernel's call: of which layer, what it read and made, and how many numbers their planes lie apart."""

    call: _Call
    addend: Tensor | None
    x: Tensor
    y: Tensor
    planes: tuple[int, int, int]
    is_whole: bool  # whether it read these tensors, and no copies, of a layer that can be looked at again


class _Watched(threading.local):
    """What kernels compute in this thread while somebody looks; held, so that no two tensors have one address."""

    steps: list[_Step] | None = None  # None: nobody looks
    left = 0  # bytes
    is_whole = True

    def note(self, step: _Step) -> None:
        self.left -= step.y.nbytes
        self.is_whole &= step.is_whole and self.left >= 0
        self.steps = [*(self.steps or []), step] if self.is_whole else []


_WATCHED = _Watched()


class _Memory:
    """What chains compute in: taken for a call and kept for the next, of whatever chain, while there is one."""

    one: ClassVar[weakref.WeakValueDictionary[str, _Memory]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self.spare: list[Tensor] = []

    @contextlib.contextmanager
    def of(self, numbers: int) -> Iterator[Tensor]:
        try:
            memory = self.spare.pop()
        except IndexError:  # the first call, or others compute now
            memory = torch.empty(0, dtype=torch.float32, device="cpu")
        if memory.numel() < numbers:
            memory = torch.empty(numbers, dtype=torch.float32, device="cpu")
        yield memory
        if memory.nbytes <= _HELD_BYTES:
            self.spare.append(memory)


_GIVEN, _MADE, _LENT = range(3)  # whose memory a tensor lies in
_Place = tuple[int, int]  # that, and how many bytes from where it begins


@dataclass(frozen=True, slots=True)
class Chain:
    """Packed convolutions that were called one after the other, each with the input or with what others had made.

    Args:
        shape: of what the last made.
        steps: each layer's call; where what is added, its input and its result lie; how their planes lie.
        numbers: of the memory for all that is made between.

    >>> from secateur.inference import SparseConv2d
    >>> one, two = (SparseConv2d.from_module(torch.nn.Conv2d(4, 4, 3)) for _ in range(2))
    >>> x = torch.randn(1, 4, 8, 8)
    >>> made, chain = Chain.watched(x, lambda: two(one(x)))
    >>> chain is None or torch.equal(chain.made(x), made)  # None without kernels
    True
    """

    shape: torch.Size
    steps: list[tuple[_Call, tuple[_Place | None, _Place, _Place], tuple[int, int, int]]]
    numbers: int
    memory: _Memory
    compiled: Any

    @classmethod
    def watched(cls, x: Tensor, make: Callable[[], Tensor]) -> tuple[Tensor, Self | None]:
        """What is made of x, and the chain that did it; None where not all of it was kernels' work, or very much."""
        _WATCHED.steps, _WATCHED.left, _WATCHED.is_whole = [], _WATCHED_BYTES, True
        try:
            made = make()
            return made, cls._of(x, made, _WATCHED.steps)
        finally:
            _WATCHED.steps = None

    @classmethod
    def _of(cls, x: Tensor, made: Tensor, steps: Sequence[_Step]) -> Self | None:
        lives: list[list[int]] = [[0, len(steps), 0]]  # of x and of all that is made: first and last step, numbers
        at = {x.data_ptr(): 0}  # which of them an address is
        used: list[tuple[int | None, int, int]] = []
        for n, step in enumerate(steps):
            added = None if step.addend is None else at.get(step.addend.data_ptr(), -1)
            read, address = at.get(step.x.data_ptr(), -1), step.y.data_ptr()
            if address not in at:
                at[address] = len(lives)
                lives.append([n, n, math.prod(step.y.shape[:2]) * step.planes[1] or step.y.numel()])
            elif at[address] != added or added == 0:  # into what somebody else gave
                return None
            used.append((added, read, at[address]))
            if -1 in used[-1]:  # something else came between
                return None
            for which in used[-1]:
                if which is not None:
                    lives[which][1] = n
        if not steps or steps[-1].y is not made or not made.is_contiguous():
            return None
        lies, numbers = _laid_out(lives, {0: _GIVEN, used[-1][2]: _MADE})
        places = [(None if a is None else lies[a], lies[b], lies[c]) for a, b, c in used]
        memory = _Memory.one.setdefault("", _Memory())
        calls = [(step.call, place, step.planes) for step, place in zip(steps, places, strict=True)]
        return cls(made.shape, calls, numbers, memory, library())

    def holds(self, layers: Sequence[tuple[_Stored, tuple[Any, ...]]]) -> bool:
        """Whether these are the layers that were called, as they were."""
        if len(layers) != len(self.steps) or library() is not self.compiled:
            return False
        return all(step[0].holds(*layer) for step, layer in zip(self.steps, layers, strict=True))

    def made(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """The result of what is like the x that was watched, for whoever holds the layers; in memory that it may take
        if that is contiguous and of its shape."""
        y = into
        if y is None or y.shape != self.shape or y.dtype != x.dtype or not y.is_contiguous():
            y = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        threads = torch.get_num_threads()
        with self.memory.of(self.numbers) as memory:
            begins = x.data_ptr(), y.data_ptr(), memory.data_ptr()
            for call, (addend, image, made), planes in self.steps:
                added = None if addend is None else begins[addend[0]] + addend[1]
                places = added, begins[image[0]] + image[1], begins[made[0]] + made[1]
                _run(self.compiled, call, call.addresses or (), places, planes, threads)
        return y


def _laid_out(lives: Sequence[Sequence[int]], own: Mapping[int, int]) -> tuple[list[_Place], int]:
    """Where each tensor lies such that none lies where another does that is needed at the time; and for how many
    numbers there is to be memory.

    Args:
        lives: of each the first and the last step that need it, and how many numbers it has; by their firsts.
        own: those that lie in other memory, and in whose.

    >>> _laid_out([[0, 3, 0], [0, 1, 20], [1, 3, 4], [2, 3, 16]], {0: _GIVEN})
    ([(0, 0), (2, 0), (2, 128), (2, 0)], 48)
    """
    lies: list[_Place] = []
    numbers = 0
    for n, (first, _, size) in enumerate(lives):
        if n in own:
            lies.append((own[n], 0))
            continue
        near = [
            (lies[i][1] // 4, lies[i][1] // 4 + lives[i][2]) for i in range(n) if i not in own and lives[i][1] >= first
        ]
        starts = [0, *(-(-end // _APART) * _APART for _, end in near)]
        where = min(at for at in starts if all(at + size <= begin or end <= at for begin, end in near))
        lies.append((_LENT, 4 * where))
        numbers = max(numbers, -(-(where + size) // _APART) * _APART)
    return lies, numbers


def _fits(into: Tensor, call: _Call, x: Tensor, addend: Tensor | None, shared: int, may_be_apart: bool) -> int | None:
    """How many numbers planes lie apart in memory that a kernel may write to, 0 if they do not; None if it may not."""
    if into is addend and (call.rounds or shared > 1):  # which compute some places twice, so that they would add twice
        return None
    if into.shape != call.made or not into.dtype == x.dtype == torch.float32 or into.device != x.device:
        return None
    if into.is_contiguous():
        return 0
    return _plane_of(into) or None if may_be_apart else None


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
    shared: int = 1,
) -> Tensor:
    geometry = kernel, stride, padding, dilation, groups, together, "relu" if rectified else "", shared
    return _computed(x, (indices, pointers, values, scales, bias), addend, geometry)


def _rounded_images(x: Tensor) -> Tensor:
    """Images as the kernel rounds them, float64."""
    images = x.detach().float().flatten(1)
    return (rounded_inputs(images) if images.numel() else images).double().view(x.shape)


def _dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    around = functional.pad(x.detach().to(wide), _around(padding)).contiguous()
    y = functional.conv2d(
        around, weight.to(wide), None if bias is None else bias.to(wide), tuple(stride), 0, tuple(dilation), groups
    )
    if addend is not None:
        y = y + addend.to(wide)
    return (RECTIFIERS[activation](y) if activation else y).to(x.dtype).contiguous()


def _around(padding: Sequence[int]) -> list[int]:
    """What `torch.nn.functional.pad` is given: from the last dimension on."""
    return [*padding[2:], *padding[:2]]


def _fake(x: Tensor, _indices: Tensor, pointers: Tensor, *others: Any) -> Tensor:
    *geometry, groups, together = others[3:9]
    shared = others[11] if len(others) > 11 else 1  # a compiler leaves out what is the default
    rows = _rows_of(x.shape[1], pointers, groups, together, shared)
    return x.new_empty(x.shape[0], rows, *size_after(x.shape[2:], *geometry))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, indices, pointers, values, _, addend, *geometry, rectified, scales, shared = inputs
    ctx.save_for_backward(indices, pointers, values, scales, output if rectified else None)
    ctx.shape, ctx.rectified, ctx.has_addend, ctx.geometry = x.shape, rectified, addend is not None, geometry
    ctx.shared = shared


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indices, pointers, values, scales, output = ctx.saved_tensors
    kernel, stride, padding, dilation, groups, together = ctx.geometry
    if ctx.rectified:
        grad = grad * (output > 0)
    images, channels, height, width = ctx.shape
    stored, own = (indices, pointers, values), channels // groups
    weight = scaled(dense_convolution(*stored, grad.shape[1], own, kernel, together, ctx.shared), scales)
    above, below, left, right = padding
    padded = (images, channels, height + above + below, width + left + right)
    wide = torch.promote_types(grad.dtype, torch.float32)
    geometry = tuple(stride), 0, tuple(dilation), groups
    to_padded = conv2d_input(padded, weight.to(wide), grad.to(wide), *geometry)  # type: ignore[no-untyped-call]
    to_x = to_padded[:, :, above : above + height, left : left + width].to(grad.dtype)
    return to_x, None, None, None, None, grad if ctx.has_addend else None, *[None] * 9


define("sparse_convolution", _convolution, _fake, _backward, _keep)
