"""Linear layers that skip zeros: any zeros, 16 outputs that share their inputs, groups, few vectors, 1×1 convolutions;
and 2:4 on CUDA.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.native import (
    LANES,
    MOST_COLUMNS,
    block_linear,
    csr_linear,
    dense_block,
    dense_csr,
    from_windows,
    laid_out,
    scaled,
    to_windows,
    window_linear,
)
from secateur.support import private

# ---- What the layers share that are computed by a kernel in C.
#
# Law: what a layer holds is checked when it is made, and a pickle of it can be read.


class KernelLayer(nn.Module):
    """What the layers with kernels have: buffers, named in ``STORED``, numbers, named in ``LAYOUT``, and a dense weight
    on request.

    Args:
        stored: the buffers, in their order.
        bias, scales: one for each output, or None.
        columns, rows: inputs and outputs of the dense layer.
        layout: the numbers.

    Raises:
        ValueError: an index or pointer leads out of its tensor, or the shapes do not fit.
    """

    STORED: ClassVar[tuple[str, ...]] = ("indices", "pointers", "values")
    LAYOUT: ClassVar[tuple[str, ...]] = ()

    indices: Tensor
    pointers: Tensor
    values: Tensor
    bias: Tensor | None
    scales: Tensor | None

    def __init__(
        self,
        stored: Sequence[Tensor],
        bias: Tensor | None,
        columns: int,
        rows: int,
        scales: Tensor | None = None,
        **layout: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = columns, rows
        for name in self.LAYOUT:
            setattr(self, name, layout.pop(name))
        if layout:
            raise TypeError(f"a {type(self).__name__} has no {', '.join(layout)}.")
        for name, tensor in zip(self.STORED, stored, strict=True):
            self.register_buffer(name, tensor)
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self.register_buffer("scales", scales)
        with torch.no_grad():  # the checks of the operator, at the door
            self(self._nothing())

    def _nothing(self) -> Tensor:
        """No input at all, of a shape that fits."""
        return torch.zeros(0, self.in_features, device=self.values.device, dtype=torch.float32)

    def __getstate__(self) -> dict[str, Any]:
        """Indices of 16 bits with a sign: torch's pickles of uint16 cannot be read."""
        buffers = {name: _turned(each, torch.uint16, torch.int16) for name, each in self._buffers.items()}
        return {**vars(self), "_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._buffers.update({n: _turned(each, torch.int16, torch.uint16) for n, each in self._buffers.items()})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves as any module does; the values stay float32, bfloat16 or int8, bias and scales float32, whatever
        ``.to(dtype)``."""
        values, others = self.values, {name: getattr(self, name) for name in ("bias", "scales")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.values.dtype not in (torch.float32, torch.bfloat16, torch.int8):
            self.values = values.to(self.values.device)
        for name, before in others.items():
            if before is not None and (now := getattr(self, name)).dtype != torch.float32:
                setattr(self, name, before.to(now.device))
        return self

    def _layout(self) -> dict[str, Any]:
        """What a file says of it beside its tensors."""
        numbers = {name: getattr(self, name) for name in self.LAYOUT}
        return {"in_features": self.in_features, "out_features": self.out_features, **numbers}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> Self:
        """The layer of a file's tensors and layout."""
        others = dict(layout)
        sizes = others.pop("in_features"), others.pop("out_features")
        stored = [tensors[name] for name in cls.STORED]
        return cls(stored, tensors.get("bias"), *sizes, tensors.get("scales"), **others)

    @property
    def weight(self) -> Tensor:
        """The dense weight (outputs, inputs), computed at each access; changing it has no effect."""
        raise NotImplementedError

    def _scaled(self, weight: Tensor) -> Tensor:
        """A weight as the kernels see it, in the dtype that the layer's values stand for."""
        return weight.to(self.values.dtype) if self.scales is None else scaled(weight.float(), self.scales)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, kept={self.values.numel()}{self._in_int8()}"

    def _in_int8(self) -> str:
        inputs = ", inputs=int8" if getattr(self, "rounds_inputs", False) else ""
        return "" if self.scales is None else f", values=int8{inputs}"


def as_stored(weight: Tensor, scales: Tensor | None) -> Tensor:
    """A weight in the dtype in which its values are kept: int8 where there are scales, bfloat16, else float32.

    Raises:
        ValueError: there are scales, and the weight is not int8, or not of so many outputs.
    """
    if scales is None:
        return weight.detach() if weight.dtype == torch.bfloat16 else weight.detach().float()
    if weight.dtype != torch.int8 or scales.shape != weight.shape[:1]:
        raise ValueError(
            f"scales of shape {tuple(scales.shape)} for a weight of {weight.dtype} and shape {tuple(weight.shape)}: "
            "they go with int8, one for each output, as to_int8 gives them."
        )
    return weight.detach()


def in_fours(column: Tensor, values: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entries of segments of so many, filled up to multiples of 4 by zeros in the column of the last; values (., 4).

    >>> in_fours(torch.tensor([3, 7]), torch.tensor([5, 6]), torch.tensor([0, 2]))
    (tensor([3, 7, 7, 7]), tensor([[5, 6, 0, 0]]), tensor([0, 4]))
    """
    padded = length + -length % 4
    segment = torch.arange(len(length), device=length.device).repeat_interleave(padded)
    within = torch.arange(len(segment), device=length.device) - (padded.cumsum(0) - padded)[segment]
    is_kept, first = within < length[segment], (length.cumsum(0) - length)[segment]
    at = first + torch.minimum(within, length[segment] - 1)
    return column[at], torch.where(is_kept, values[at], 0).view(-1, 4), padded


def numbered(column: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Column numbers in 16 bits, and where each segment of so many begins, and the last ends."""
    return column.to(torch.int32).to(torch.uint16), functional.pad(length.cumsum(0), (1, 0)).to(torch.int32)


def rounds_with(scales: Tensor | None, round_inputs: bool) -> None:
    """ValueError where inputs are to be rounded, and the weight is not."""
    if round_inputs and scales is None:
        raise ValueError("inputs are rounded for a weight in int8 only; give the scales of one.")


def _turned(tensor: Tensor | None, dtype: torch.dtype, other: torch.dtype) -> Tensor | None:
    return tensor.view(other) if tensor is not None and tensor.dtype == dtype else tensor


def expect(x: Tensor, columns: int) -> None:
    if x.shape[-1] != columns:
        raise ValueError(f"the input has shape {tuple(x.shape)}; its last dimension must be {columns}.")


def few_columns(columns: int) -> None:
    if columns > MOST_COLUMNS:
        raise ValueError(f"{columns} inputs; an index of 16 bits counts up to {MOST_COLUMNS}.")


# ---- A linear layer with any zeros, as its kept weights and their column numbers.
#
# Law: its output is that of the dense layer with its zeros, within rounding.

_ROUNDED = 1024, 128  # columns and rows together where inputs are rounded: codes and sums in the second cache


class SparseLinear(KernelLayer):
    """A linear layer with any zeros, as its kept weights and their 16-bit column numbers; computed by a kernel in C.

    For inference on CPUs: gradients pass to its input, but its weights do not train. Without compiled kernels
    (`secateur.native.available`) it computes the same, slowly. Made by ``SparseLinear.from_dense``.
    What it stores is as in `secateur.native.csr_linear`.

    >>> import torch
    >>> layer = SparseLinear.from_dense(torch.tensor([[1.0, 0.0, 2.0], [0.0, 5.0, 0.0]]))
    >>> layer(torch.tensor([[1.0, 10.0, 100.0]]))
    tensor([[201.,  50.]])
    """

    LAYOUT = ("columns_together", "rows_together")

    columns_together: int
    rows_together: int

    @classmethod
    def from_dense(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        batch: int = 1,
        scales: Tensor | None = None,
        round_inputs: bool = False,
    ) -> SparseLinear:
        """The layer of a weight (outputs, inputs) with zeros, laid out to be fastest for this many vectors at once.

        Up to 32 vectors, a row's entries lie in one piece. For more they lie in panels of 256 columns, or of 512 where
        fewer than 7 % are left, so that a panel's inputs stay in the first cache while 1024 rows meet it.

        Args:
            scales: of a weight in int8, as `to_int8` gives both.
            round_inputs: whether inputs are rounded to 8 bits, too, each vector as it comes; needs scales. Made for
                many vectors: 32 are computed at once.

        Raises:
            ValueError: scales do not fit the weight, or are missing where inputs are rounded.
        """
        rounds_with(scales, round_inputs)
        share = int(torch.count_nonzero(weight)) / max(weight.numel(), 1)
        columns_together = max(weight.shape[1], 1) if batch <= 32 else 256 if share >= 0.07 else 512
        if round_inputs:
            return cls._laid_out(weight, bias, *_ROUNDED, scales, round_inputs=True)
        return cls._laid_out(weight, bias, columns_together, 1024, scales)

    @classmethod
    def _laid_out(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        columns_together: int,
        rows_together: int,
        scales: Tensor | None = None,
        round_inputs: bool = False,
    ) -> SparseLinear:
        weight = as_stored(weight, scales)
        rows, columns = weight.shape
        few_columns(columns)
        kept = weight.ne(0)
        count = int(kept.sum())
        if count >= 2**31:
            raise ValueError(f"{count} kept weights; a pointer of 32 bits counts up to {2**31 - 1}.")
        none = torch.zeros(0, device=weight.device, dtype=torch.float32)
        columns_kept, values, lengths = [none.long()], [none.to(weight.dtype)], [none.long()]
        for top in range(0, rows, rows_together):
            for left in range(0, max(columns, 1), columns_together):
                piece = kept[top : top + rows_together, left : left + columns_together]
                row, column = piece.nonzero(as_tuple=True)
                columns_kept.append(column + left)
                values.append(weight[top + row, left + column])
                lengths.append(piece.sum(1))
        column, stored, length = map(torch.cat, (columns_kept, values, lengths))
        if round_inputs:
            column, stored, length = in_fours(column, stored, length)
        layout = {"columns_together": columns_together, "rows_together": rows_together}
        return cls((*numbered(column, length), stored), bias, columns, rows, scales, **layout)

    @property
    def weight(self) -> Tensor:
        panels = max(1, -(-self.in_features // self.columns_together))
        dense = dense_csr(
            self.indices, self.pointers, self.values, self.out_features, self.in_features, panels, self.rows_together
        )
        return self._scaled(dense)

    def forward(self, x: Tensor) -> Tensor:
        expect(x, self.in_features)
        return csr_linear(
            x,
            self.indices,
            self.pointers,
            self.values,
            self.bias,
            self.columns_together,
            self.rows_together,
            self.scales,
        )

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are rounded to 8 bits as they come."""
        return self.values.dim() == 2


# ---- A linear layer in which 16 consecutive outputs share their inputs.
#
# Law: its output is that of the dense layer with its zeros, within rounding.


class BlockLinear(KernelLayer):
    """A linear layer in which 16 consecutive outputs share their inputs, as the pattern ``Block(16, 1)`` leaves it.

    For inference on CPUs, as `SparseLinear`. Made by ``BlockLinear.from_dense``.
    What it stores is as in `secateur.native.block_linear`.

    >>> import torch
    >>> layer = BlockLinear.from_dense(torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]]))
    >>> layer(torch.tensor([[1.0, 10.0, 100.0]]))
    tensor([[201.,   3.]])
    """

    @classmethod
    def from_dense(
        cls, weight: Tensor, bias: Tensor | None = None, *, scales: Tensor | None = None, round_inputs: bool = False
    ) -> BlockLinear:
        """The layer of a weight (outputs, inputs) with zeros: what 16 outputs all have zero is left out.

        Args:
            scales: of a weight in int8, as `to_int8` gives both.
            round_inputs: whether inputs are rounded to 8 bits, too, each vector as it comes; needs scales.

        Raises:
            ValueError: scales do not fit the weight, or are missing where inputs are rounded.
        """
        rounds_with(scales, round_inputs)
        weight = as_stored(weight, scales)
        rows, columns = weight.shape
        few_columns(columns)
        blocks = -(-rows // LANES)
        tiles = functional.pad(weight, (0, 0, 0, blocks * LANES - rows))
        tiles = tiles.view(blocks, LANES, columns)
        kept = tiles.ne(0).any(1)
        block, column = kept.nonzero(as_tuple=True)
        values, counts = tiles.transpose(1, 2)[block, column].contiguous(), kept.sum(1)  # (kept blocks, 16)
        if round_inputs:  # as many as make a multiple of 4, of zeros
            padded = counts + -counts % 4
            at = torch.arange(len(block), device=block.device) + ((padded - counts).cumsum(0) - padded + counts)[block]
            filled = values.new_zeros(int(padded.sum()), LANES)
            filled[at], column, counts = values, column.new_zeros(len(filled)).index_put_((at,), column), padded
            values = filled.view(-1, 4, LANES).transpose(1, 2).contiguous()
        return cls((*numbered(column, counts), values), bias, columns, rows, scales)

    @property
    def weight(self) -> Tensor:
        dense = dense_block(self.indices, self.pointers, self.values, self.out_features, self.in_features)
        return self._scaled(dense)

    def forward(self, x: Tensor) -> Tensor:
        expect(x, self.in_features)
        return block_linear(x, self.indices, self.pointers, self.values, self.bias, self.out_features, self.scales)

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are rounded to 8 bits as they come."""
        return self.values.dim() == 3


# ---- A linear layer whose groups of outputs read inputs of their own.
#
# Law: its output is that of the dense layer with its zeros, within rounding.


class GroupedLinear(nn.Module):
    """A linear layer whose groups of consecutive outputs each read inputs of their own: a gather and a matrix product.

    What a weight with the pattern `GroupedColumns` becomes. Plain torch operations: it trains, compiles, exports, and
    runs in ONNX Runtime. Made by ``GroupedLinear.from_dense``.

    Args:
        indices: int (groups, kept), the inputs that each group reads.
        values: floating (groups, kept, outputs in a group), the weights that are left.
        bias: (out_features), or None.
        in_features, out_features: of the dense layer; the last group may have fewer outputs than the others.

    Raises:
        ValueError: the shapes do not fit, or an index leads out of the inputs.

    >>> import torch
    >>> weight = torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 4.0], [0.0, 5.0, 0.0]])
    >>> layer = GroupedLinear.from_dense(weight, outputs=2)
    >>> layer(torch.tensor([[1.0, 10.0, 100.0]]))
    tensor([[201., 403.,  50.]], grad_fn=<ViewBackward0>)
    """

    indices: Tensor
    used: Tensor | None

    def __init__(
        self,
        indices: Tensor,
        values: Tensor,
        bias: Tensor | None,
        in_features: int,
        out_features: int,
        *,
        used: Tensor | None = None,
    ) -> None:
        super().__init__()
        if values.dim() != 3 or indices.shape != values.shape[:2]:
            raise ValueError(f"indices {tuple(indices.shape)} for values {tuple(values.shape)}.")
        groups, _, outputs = values.shape
        if groups != -(-out_features // max(outputs, 1)):
            raise ValueError(f"{groups} groups of {outputs} outputs are not {out_features} outputs.")
        if bias is not None and bias.shape != (out_features,):
            raise ValueError(f"a bias of shape {tuple(bias.shape)} for {out_features} outputs.")
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < in_features:
            raise ValueError(f"an index leads out of the {in_features} inputs.")
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("indices", indices.to(torch.int32))
        # False where a group with fewer inputs is filled up: such a weight is 0 and stays it in training
        self.register_buffer("used", used)
        self.values = nn.Parameter(values)
        self.bias = None if bias is None else nn.Parameter(bias)

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None = None, *, outputs: int) -> GroupedLinear:
        """The layer of a weight (outputs, inputs) with zeros; a group keeps the inputs that any of its outputs uses."""
        rows, columns = weight.shape
        groups = -(-rows // outputs)
        weight = functional.pad(weight.detach(), (0, 0, 0, groups * outputs - rows)).view(groups, outputs, columns)
        kept = weight.ne(0).any(1)  # (groups, inputs)
        counts = kept.sum(1)
        most = int(counts.max()) if groups else 0
        indices = kept.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :most]
        used = torch.arange(most, device=weight.device) < counts[:, None]
        values = weight.gather(2, indices[:, None].expand(-1, outputs, -1)).transpose(1, 2).contiguous()
        indices = torch.where(used, indices, indices[:, :1] if most else indices)
        values = values * used[..., None]
        ragged = None if bool(used.all()) else used
        return cls(indices, values, None if bias is None else bias.detach().clone(), columns, rows, used=ragged)

    @property
    def weight(self) -> Tensor:
        """The dense weight (outputs, inputs), computed at each access; changing it has no effect."""
        groups, kept, outputs = self.values.shape
        at = self.indices.long()[..., None].expand(groups, kept, outputs)
        dense = self.values.new_zeros(groups, self.in_features, outputs).scatter_add(1, at, self._values())
        return dense.transpose(1, 2).reshape(groups * outputs, self.in_features)[: self.out_features]

    def _values(self) -> Tensor:
        return self.values if self.used is None or not self.training else self.values * self.used[..., None]

    def forward(self, x: Tensor) -> Tensor:
        expect(x, self.in_features)
        groups, kept, outputs = self.values.shape
        flat, indices = x.reshape(-1, self.in_features), self.indices.reshape(-1)
        if torch.onnx.is_in_onnx_export():  # ONNX Runtime gathers whole rows up to five times as fast as columns
            inputs = flat.t().index_select(0, indices).view(groups, kept, flat.shape[0]).transpose(1, 2)
        else:
            inputs = flat.index_select(1, indices).view(flat.shape[0], groups, kept).transpose(0, 1)
        y = torch.bmm(inputs, self._values())  # (groups, batch, outputs)
        y = y.transpose(0, 1).reshape(flat.shape[0], groups * outputs)
        if groups * outputs != self.out_features:
            y = y.narrow(1, 0, self.out_features)  # torch 2.7 exports no slice here
        if self.bias is not None:
            y = y + self.bias
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        groups, kept, outputs = self.values.shape
        size = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{size}, groups={groups}, inputs of each={kept}, outputs of each={outputs}"

    def _layout(self) -> dict[str, Any]:
        return {"in_features": self.in_features, "out_features": self.out_features}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> GroupedLinear:
        return cls(tensors["indices"], tensors["values"], tensors.get("bias"), used=tensors.get("used"), **layout)


# ---- A linear layer with any zeros, for few vectors at once.
#
# Law: its output is that of the dense layer with its zeros, within rounding.


class WindowLinear(KernelLayer):
    """A linear layer with any zeros for few vectors at once: 16 outputs walk through the inputs together.

    For inference on CPUs, as `SparseLinear`, which it beats where reading the weights is all the work: a kept weight
    takes 5 bits beside its value. Made by ``WindowLinear.from_dense``.
    What it stores is as in `secateur.native.window_linear`.

    >>> import torch
    >>> layer = WindowLinear.from_dense(torch.tensor([[1.0, 0.0, 2.0], [0.0, 5.0, 0.0]]))
    >>> layer(torch.tensor([[1.0, 10.0, 100.0]]))
    tensor([[201.,  50.]])
    """

    STORED = ("words", "moves", "values", "pointers", "order")

    words: Tensor
    moves: Tensor
    order: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.values = laid_out(self.values)
        return self

    @classmethod
    def from_dense(
        cls, weight: Tensor, bias: Tensor | None = None, *, scales: Tensor | None = None, round_inputs: bool = False
    ) -> WindowLinear:
        """The layer of a weight (outputs, inputs) with zeros; 16 million weights take a second or two.

        Args:
            scales: of a weight in int8, as `to_int8` gives both.
            round_inputs: whether inputs are rounded to 8 bits, too, each vector as it comes; needs scales.

        Raises:
            ValueError: scales do not fit the weight, or are missing where inputs are rounded.
        """
        rounds_with(scales, round_inputs)
        weight = as_stored(weight, scales)
        rows, columns = weight.shape
        made = to_windows(weight, in_fours=round_inputs)
        return cls([made[name] for name in cls.STORED], bias, columns, rows, scales)

    @property
    def weight(self) -> Tensor:
        return self._scaled(from_windows(**self._stored(), rows=self.out_features, columns=self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        expect(x, self.in_features)
        return window_linear(x, **self._stored(), bias=self.bias, rows=self.out_features, scales=self.scales)

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are rounded to 8 bits as they come."""
        return self.values.dim() == 2

    def extra_repr(self) -> str:
        kept = int(torch.count_nonzero(self.values))
        return f"in_features={self.in_features}, out_features={self.out_features}, kept={kept}{self._in_int8()}"

    def _stored(self) -> dict[str, Tensor]:
        tensors = self._buffers  # read directly: a getattr of a module takes a microsecond each
        return {name: cast("Tensor", tensors[name]) for name in self.STORED}


# ---- A convolution with a kernel of one place, as a linear layer at each place.
#
# Law: its output is that of the convolution, within rounding.


class Pointwise(nn.Module):
    """A convolution with a kernel of one place, as a linear layer at each place.

    Args:
        linear: any of this file's layers.
        stride: of each spatial dimension.

    >>> import torch
    >>> from torch import nn
    >>> convolution = nn.Conv2d(3, 4, 1)
    >>> layer = Pointwise(GroupedLinear.from_dense(convolution.weight[:, :, 0, 0], convolution.bias, outputs=4), (1, 1))
    >>> x = torch.randn(2, 3, 5, 5)
    >>> torch.allclose(layer(x), convolution(x), atol=1e-6)
    True
    """

    def __init__(self, linear: nn.Module, stride: tuple[int, ...]) -> None:
        super().__init__()
        self.linear, self.stride = linear, tuple(stride)

    @property
    def weight(self) -> Tensor:
        """The dense weight (outputs, inputs, 1, ...), computed at each access."""
        dense = cast("Tensor", self.linear.weight)
        return dense.reshape(*dense.shape, *[1] * len(self.stride))

    @property
    def bias(self) -> Tensor | None:
        return cast("Tensor | None", self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        channel = x.dim() - len(self.stride) - 1  # 0 without a batch
        for dim, step in enumerate(self.stride, start=channel + 1):
            if step > 1:
                x = x[(slice(None),) * dim + (slice(None, None, step),)]
        y = self.linear(x.movedim(channel, -1))
        return cast("Tensor", y.movedim(-1, channel))


# ---- 2:4 on CUDA: a linear layer with two of every four inputs, for the GPU's sparse tensor cores.
#
# Law: the output is that of the dense layer with its zeros, within rounding; a weight that is not 2:4, or not of a
# shape that the GPU takes, is refused with the reason.

_DTYPES = (torch.float16, torch.bfloat16)
_ROWS, _COLUMNS = 32, 64  # multiples that both of torch's back-ends take in halves; cuSPARSELt alone asks for 16 and 16
_CAPABILITY = (8, 0)  # Ampere, the first with sparse tensor cores


def why_no_semi_structured_device(device: torch.device) -> str:
    """Why 2:4 does not run on a device, or an empty string.

    >>> why_no_semi_structured_device(torch.device("cpu"))
    '2:4 runs on CUDA devices, and the model is on cpu'
    """
    if device.type != "cuda" or torch.version.cuda is None:  # ROCm calls its devices cuda, too
        return f"2:4 runs on CUDA devices, and the model is on {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY:
        return f"2:4 needs a GPU of compute capability 8.0 or later, and {device} has {found[0]}.{found[1]}"
    return ""


def why_not_semi_structured(weight: Tensor) -> str:
    """Why a weight (outputs, inputs) cannot be a `SemiStructuredLinear`, or an empty string.

    >>> why_not_semi_structured(torch.ones(32, 64, dtype=torch.float16))
    'its zeros are not 2:4'
    """
    if weight.dtype not in _DTYPES:
        return f"2:4 on CUDA takes float16 and bfloat16, and its weight is {weight.dtype}"
    rows, columns = weight.shape
    if not rows or not columns or rows % _ROWS or columns % _COLUMNS:
        return f"2:4 on CUDA takes multiples of {_ROWS} outputs and {_COLUMNS} inputs, and it has {rows} and {columns}"
    if int(weight.ne(0).reshape(rows, -1, 4).sum(2).max()) > 2:
        return "its zeros are not 2:4"
    return ""


class SemiStructuredLinear(nn.Module):
    """A linear layer that keeps at most two of every four consecutive inputs, computed by sparse tensor cores.

    For inference on CUDA devices, through `torch.sparse.to_sparse_semi_structured`, whose interface torch calls a
    prototype. What is saved is held in main memory; the GPU has only what it multiplies with, 9/16 of the dense weight,
    made at the first call. On other devices it computes the same, slowly; inputs of another dtype are computed in the
    weight's. Made by ``SemiStructuredLinear.from_dense``.

    Args:
        values: float16 or bfloat16 (outputs, inputs / 2), the two that are kept of each four; zero where fewer are.
        places: uint8 (outputs, inputs / 4), the first's place among the four plus 4 times the second's.
        bias: (outputs), or None.

    Raises:
        ValueError: the shapes do not fit, or a place is none.

    >>> import torch
    >>> weight = torch.zeros(32, 64, dtype=torch.bfloat16)
    >>> weight[:, 2::4] = 2.0
    >>> layer = SemiStructuredLinear.from_dense(weight)
    >>> layer(torch.ones(1, 64, dtype=torch.bfloat16))[0, :3]
    tensor([32., 32., 32.], dtype=torch.bfloat16)
    """

    values: Tensor
    places: Tensor
    bias: Tensor | None

    def __init__(self, values: Tensor, places: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        if values.dim() != 2 or places.shape != (values.shape[0], values.shape[1] // 2) or values.shape[1] % 2:
            raise ValueError(f"places {tuple(places.shape)} for values {tuple(values.shape)}.")
        if bias is not None and bias.shape != values.shape[:1]:
            raise ValueError(f"a bias of shape {tuple(bias.shape)} for {values.shape[0]} outputs.")
        if places.dtype != torch.uint8 or bool(((places >= 16) | (places % 4 >= places // 4)).any()):
            raise ValueError("a place is none of two different ones among four, in order.")
        self.out_features, self.in_features = values.shape[0], 2 * values.shape[1]
        self.register_buffer("values", values.cpu())
        self.register_buffer("places", places.cpu())
        self.register_buffer("bias", None if bias is None else bias.detach())
        self._operand: tuple[Any, Tensor] | None = None

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None = None) -> SemiStructuredLinear:
        """The layer of a 2:4 weight; ``ValueError`` says why another one is none."""
        if why := why_not_semi_structured(weight):
            raise ValueError(f"a weight of shape {tuple(weight.shape)} does not do: {why}.")
        fours = weight.detach().reshape(weight.shape[0], -1, 4)
        kept = fours.ne(0).to(torch.uint8).sort(dim=2, descending=True, stable=True).indices[..., :2].sort(dim=2).values
        places = kept[..., 0] + 4 * kept[..., 1]
        return cls(fours.gather(2, kept).flatten(1), places.to(torch.uint8), None if bias is None else bias.clone())

    @property
    def weight(self) -> Tensor:
        """The dense weight (outputs, inputs), in main memory, computed at each access."""
        places = torch.stack([self.places % 4, self.places // 4], 2).long()
        pairs = self.values.view(*places.shape)
        return pairs.new_zeros(*places.shape[:2], 4).scatter_(2, places, pairs).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"the input has shape {tuple(x.shape)}; its last dimension must be {self.in_features}.")
        flat = x.reshape(-1, self.in_features).to(self.values.dtype)
        bias = None if self.bias is None else self.bias.to(self.values.dtype)
        y = functional.linear(flat, self._on(x.device), bias)
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def _on(self, device: torch.device) -> Tensor:
        """What is multiplied with there; on a GPU kept, and made again where the tensors changed."""
        if device.type != "cuda":
            return self.weight.to(device)
        key = (device, self.values.data_ptr(), *map(private.version_of, (self.values, self.places)))
        if self._operand is None or self._operand[0] != key:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*prototype stage", UserWarning)  # which the docstring says, too
                self._operand = key, torch.sparse.to_sparse_semi_structured(self.weight.to(device))
        return self._operand[1]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """The bias moves as any module's does; what is only saved stays in main memory, and in halves."""
        values, places = self.values, self.places
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        changed = self.values.dtype in _DTYPES and self.values.dtype != values.dtype
        self.values, self.places = (self.values.cpu() if changed else values), places
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_operand": None}  # a copy makes its own

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def _layout(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> SemiStructuredLinear:
        return cls(tensors["values"], tensors["places"], tensors.get("bias"), **layout)
