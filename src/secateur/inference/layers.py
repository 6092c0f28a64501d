"""Layers that skip what was removed: grouped columns, CSR, blocks of 16 rows, windows, pointwise convolutions.

Law: a layer's output is that of the dense layer with its zeros, within rounding. Its pickle names
``secateur.inference``, wherever it is defined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.inference.semi_structured import SemiStructuredLinear
from secateur.native import (
    LANES,
    MOST_COLUMNS,
    block_linear,
    csr_linear,
    dense_block,
    dense_csr,
    from_windows,
    laid_out,
    to_windows,
    window_linear,
)

__all__ = ["BlockLinear", "GroupedLinear", "KINDS", "Pointwise", "SparseLinear", "WindowLinear"]


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
        """The dense weight (outputs, inputs), made anew at each reading; changing it changes nothing."""
        groups, kept, outputs = self.values.shape
        at = self.indices.long()[..., None].expand(groups, kept, outputs)
        dense = self.values.new_zeros(groups, self.in_features, outputs).scatter_add(1, at, self._values())
        return dense.transpose(1, 2).reshape(groups * outputs, self.in_features)[: self.out_features]

    def _values(self) -> Tensor:
        return self.values if self.used is None or not self.training else self.values * self.used[..., None]

    def forward(self, x: Tensor) -> Tensor:
        _expect(x, self.in_features)
        groups, kept, outputs = self.values.shape
        flat, indices = x.reshape(-1, self.in_features), self.indices.reshape(-1)
        if torch.onnx.is_in_onnx_export():  # ONNX Runtime gathers whole rows up to five times as fast as columns
            inputs = flat.t().index_select(0, indices).view(groups, kept, flat.shape[0]).transpose(1, 2)
        else:
            inputs = flat.index_select(1, indices).view(flat.shape[0], groups, kept).transpose(0, 1)
        y = torch.bmm(inputs, self._values())  # (groups, batch, outputs)
        y = y.transpose(0, 1).reshape(flat.shape[0], groups * outputs)
        if groups * outputs != self.out_features:
            y = y[:, : self.out_features]
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


class _Kernel(nn.Module):
    """What the layers with kernels have: buffers, and a dense weight on request."""

    indices: Tensor
    pointers: Tensor
    values: Tensor
    bias: Tensor | None

    def __init__(self, stored: Mapping[str, Tensor], bias: Tensor | None, columns: int, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = columns, rows
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        with torch.no_grad():  # the checks of the operator, at the door
            self(torch.zeros(0, columns, device=self.values.device))

    def __getstate__(self) -> dict[str, Any]:
        """Indices of 16 bits with a sign: torch's pickles of uint16 cannot be read."""
        buffers = {name: _turned(each, torch.uint16, torch.int16) for name, each in self._buffers.items()}
        return {**vars(self), "_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._buffers.update({n: _turned(each, torch.int16, torch.uint16) for n, each in self._buffers.items()})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves as any module does; the values stay float32 or bfloat16, the bias float32, whatever ``.to(dtype)``."""
        bias, values = self.bias, self.values
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.values.dtype not in (torch.float32, torch.bfloat16):
            self.values = values.to(self.values.device)
        if self.bias is not None and bias is not None and self.bias.dtype != torch.float32:
            self.bias = bias.to(self.bias.device)
        return self

    @property
    def weight(self) -> Tensor:
        """The dense weight (outputs, inputs), made anew at each reading; changing it changes nothing."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kept={self.values.numel()}"


def _turned(tensor: Tensor | None, dtype: torch.dtype, other: torch.dtype) -> Tensor | None:
    return tensor.view(other) if tensor is not None and tensor.dtype == dtype else tensor


class SparseLinear(_Kernel):
    """A linear layer with any zeros, as its kept weights and their 16-bit column numbers; computed by a kernel in C.

    For inference on CPUs: gradients pass to its input, but its weights do not train. Without compiled kernels
    (`secateur.native.available`) it computes the same, slowly. Made by ``SparseLinear.from_dense``.

    Args:
        indices, pointers, values, bias, columns_together, rows_together: as in `secateur.native.csr_linear`.
        in_features, out_features: of the dense layer.

    Raises:
        ValueError: an index or pointer leads out of its tensor, or the shapes do not fit.

    >>> import torch
    >>> layer = SparseLinear.from_dense(torch.tensor([[1.0, 0.0, 2.0], [0.0, 5.0, 0.0]]))
    >>> layer(torch.tensor([[1.0, 10.0, 100.0]]))
    tensor([[201.,  50.]])
    """

    def __init__(
        self,
        indices: Tensor,
        pointers: Tensor,
        values: Tensor,
        bias: Tensor | None,
        in_features: int,
        out_features: int,
        *,
        columns_together: int,
        rows_together: int,
    ) -> None:
        self.columns_together, self.rows_together = columns_together, rows_together
        stored = {"indices": indices, "pointers": pointers, "values": values}
        super().__init__(stored, bias, in_features, out_features)

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None = None, *, batch: int = 1) -> SparseLinear:
        """The layer of a weight (outputs, inputs) with zeros, laid out to be fastest for this many vectors at once.

        Up to 32 vectors, a row's entries lie in one piece. For more they lie in panels of 256 columns, or of 512 where
        fewer than 7 % are left, so that a panel's inputs stay in the first cache while 1024 rows meet it.
        """
        share = int(torch.count_nonzero(weight)) / max(weight.numel(), 1)
        columns_together = max(weight.shape[1], 1) if batch <= 32 else 256 if share >= 0.07 else 512
        return cls._laid_out(weight.detach(), bias, columns_together, rows_together=1024)

    @classmethod
    def _laid_out(cls, weight: Tensor, bias: Tensor | None, columns_together: int, rows_together: int) -> SparseLinear:
        rows, columns = weight.shape
        _few_columns(columns)
        kept = weight.ne(0)
        count = int(kept.sum())
        if count >= 2**31:
            raise ValueError(f"{count} kept weights; a pointer of 32 bits counts up to {2**31 - 1}.")
        indices, values, lengths = [], [], []
        for top in range(0, rows, rows_together):
            for left in range(0, max(columns, 1), columns_together):
                piece = kept[top : top + rows_together, left : left + columns_together]
                row, column = piece.nonzero(as_tuple=True)
                indices.append((column + left).to(torch.int32).to(torch.uint16))
                values.append(weight[top + row, left + column])
                lengths.append(piece.sum(1))
        none = torch.zeros(0, device=weight.device)
        lengths = [none.long()[:0], *lengths]
        pointers = functional.pad(torch.cat(lengths).cumsum(0), (1, 0)).to(torch.int32)
        stored = torch.cat([none.to(weight.dtype), *values])
        return cls(
            torch.cat([none.to(torch.uint16), *indices]),
            pointers,
            stored if stored.dtype == torch.bfloat16 else stored.float(),
            bias,
            columns,
            rows,
            columns_together=columns_together,
            rows_together=rows_together,
        )

    @property
    def weight(self) -> Tensor:
        panels = max(1, -(-self.in_features // self.columns_together))
        dense = dense_csr(
            self.indices, self.pointers, self.values, self.out_features, self.in_features, panels, self.rows_together
        )
        return dense.to(self.values.dtype)

    def forward(self, x: Tensor) -> Tensor:
        _expect(x, self.in_features)
        return csr_linear(
            x, self.indices, self.pointers, self.values, self.bias, self.columns_together, self.rows_together
        )

    def _layout(self) -> dict[str, Any]:
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "columns_together": self.columns_together,
            "rows_together": self.rows_together,
        }

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> SparseLinear:
        return cls(tensors["indices"], tensors["pointers"], tensors["values"], tensors.get("bias"), **layout)


class BlockLinear(_Kernel):
    """A linear layer in which 16 consecutive outputs share their inputs, as the pattern ``Block(16, 1)`` leaves it.

    For inference on CPUs, as `SparseLinear`. Made by ``BlockLinear.from_dense``.

    Args:
        indices, pointers, values, bias: as in `secateur.native.block_linear`.
        in_features, out_features: of the dense layer.

    Raises:
        ValueError: an index or pointer leads out of its tensor, or the shapes do not fit.

    >>> import torch
    >>> layer = BlockLinear.from_dense(torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]]))
    >>> layer(torch.tensor([[1.0, 10.0, 100.0]]))
    tensor([[201.,   3.]])
    """

    def __init__(
        self,
        indices: Tensor,
        pointers: Tensor,
        values: Tensor,
        bias: Tensor | None,
        in_features: int,
        out_features: int,
    ) -> None:
        stored = {"indices": indices, "pointers": pointers, "values": values}
        super().__init__(stored, bias, in_features, out_features)

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None = None) -> BlockLinear:
        """The layer of a weight (outputs, inputs) with zeros: what 16 outputs all have zero is left out."""
        rows, columns = weight.shape
        _few_columns(columns)
        blocks = -(-rows // LANES)
        tiles = functional.pad(weight.detach(), (0, 0, 0, blocks * LANES - rows))
        tiles = tiles.view(blocks, LANES, columns)
        kept = tiles.ne(0).any(1)
        block, column = kept.nonzero(as_tuple=True)
        values = tiles.transpose(1, 2)[block, column].contiguous()  # (kept blocks, 16)
        return cls(
            column.to(torch.int32).to(torch.uint16),
            functional.pad(kept.sum(1).cumsum(0), (1, 0)).to(torch.int32),
            values if values.dtype == torch.bfloat16 else values.float(),
            bias,
            columns,
            rows,
        )

    @property
    def weight(self) -> Tensor:
        dense = dense_block(self.indices, self.pointers, self.values, self.out_features, self.in_features)
        return dense.to(self.values.dtype)

    def forward(self, x: Tensor) -> Tensor:
        _expect(x, self.in_features)
        return block_linear(x, self.indices, self.pointers, self.values, self.bias, self.out_features)

    def _layout(self) -> dict[str, Any]:
        return {"in_features": self.in_features, "out_features": self.out_features}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> BlockLinear:
        return cls(tensors["indices"], tensors["pointers"], tensors["values"], tensors.get("bias"), **layout)


class WindowLinear(_Kernel):
    """A linear layer with any zeros for few vectors at once: 16 outputs walk through the inputs together.

    For inference on CPUs, as `SparseLinear`, which it beats where reading the weights is all the work: a kept weight
    takes 5 bits beside its value. Made by ``WindowLinear.from_dense``.

    Args:
        words, moves, values, pointers, order, bias: as in `secateur.native.window_linear`.
        in_features, out_features: of the dense layer.

    Raises:
        ValueError: a step leads out of the inputs, an output is not there once, or the shapes do not fit.

    >>> import torch
    >>> layer = WindowLinear.from_dense(torch.tensor([[1.0, 0.0, 2.0], [0.0, 5.0, 0.0]]))
    >>> layer(torch.tensor([[1.0, 10.0, 100.0]]))
    tensor([[201.,  50.]])
    """

    words: Tensor
    moves: Tensor
    order: Tensor

    def __init__(
        self,
        words: Tensor,
        moves: Tensor,
        values: Tensor,
        pointers: Tensor,
        order: Tensor,
        bias: Tensor | None,
        in_features: int,
        out_features: int,
    ) -> None:
        stored = {"words": words, "moves": moves, "values": values, "pointers": pointers, "order": order}
        super().__init__(stored, bias, in_features, out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.values = laid_out(self.values)
        return self

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None = None) -> WindowLinear:
        """The layer of a weight (outputs, inputs) with zeros; 16 million weights take a second or two."""
        rows, columns = weight.shape
        made: dict[str, Any] = dict(to_windows(weight))
        return cls(**made, bias=bias, in_features=columns, out_features=rows)

    @property
    def weight(self) -> Tensor:
        return from_windows(**self._stored(), rows=self.out_features, columns=self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        _expect(x, self.in_features)
        return window_linear(x, **self._stored(), bias=self.bias, rows=self.out_features)

    def extra_repr(self) -> str:
        kept = int(torch.count_nonzero(self.values))
        return f"in_features={self.in_features}, out_features={self.out_features}, kept={kept}"

    def _stored(self) -> dict[str, Tensor]:
        tensors = self._buffers  # read directly: a getattr of a module takes a microsecond each
        return {name: cast("Tensor", tensors[name]) for name in ("words", "moves", "values", "pointers", "order")}

    def _layout(self) -> dict[str, Any]:
        return {"in_features": self.in_features, "out_features": self.out_features}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> WindowLinear:
        names = ("words", "moves", "values", "pointers", "order")
        stored: dict[str, Any] = {name: tensors[name] for name in names}
        return cls(**stored, bias=tensors.get("bias"), **layout)


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
        """The dense weight (outputs, inputs, 1, ...), made anew at each reading."""
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


KINDS: dict[str, Any] = {
    cls.__name__: cls for cls in (GroupedLinear, SparseLinear, BlockLinear, WindowLinear, SemiStructuredLinear)
}


def _expect(x: Tensor, columns: int) -> None:
    if x.shape[-1] != columns:
        raise ValueError(f"the input has shape {tuple(x.shape)}; its last dimension must be {columns}.")


def _few_columns(columns: int) -> None:
    if columns > MOST_COLUMNS:
        raise ValueError(f"{columns} inputs; an index of 16 bits counts up to {MOST_COLUMNS}.")
