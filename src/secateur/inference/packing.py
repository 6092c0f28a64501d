"""Layers that skip what was removed, put in a model where they are measured to be faster.

Law: a packed layer's output is that of the dense layer with its zeros, within rounding; a layer stays dense unless
another form beats the best dense one on the user's own batch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.inference.semi_structured import (
    SemiStructuredLinear,
    why_no_semi_structured_device,
    why_not_semi_structured,
)
from secateur.native import (
    LANES,
    MOST_COLUMNS,
    available,
    block_linear,
    csr_linear,
    dense_block,
    dense_csr,
    describe,
    from_windows,
    laid_out,
    to_windows,
    window_linear,
)
from secateur.support import (
    Fields,
    Forward,
    alternating,
    device_of,
    moved,
    records,
    run_example,
    track,
    unchanged,
    write_whole,
)

__all__ = [
    "BlockLinear",
    "GroupedLinear",
    "PackedLayer",
    "Packing",
    "Pointwise",
    "SparseLinear",
    "WindowLinear",
    "load_packed",
    "pack",
    "save_packed",
]

_GROUPS = (256, 128, 64, 32, 16)  # outputs that may share a choice of inputs, the fastest first
_SLACK = 1.05  # times the fewest products that any number of groups needs
_FEW_VECTORS = 16  # with more, SparseLinear is faster than WindowLinear
_WORTH_TRYING = 0.8  # of the dense products; above that no form was ever faster


# ----------------------------------------------------------------------------------------------------------- modules


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


class SparseLinear(_Kernel):
    """A linear layer with any zeros, as its kept weights and their 16-bit column numbers; computed by a kernel in C.

    For inference on CPUs: gradients pass to its input, but its weights do not train. Without compiled kernels
    (`secateur.native.available`) it computes the same, slowly. Made by ``SparseLinear.from_dense``.

    Args:
        indices, pointers, values, bias, columns_together, rows_together: as in `secateur.native.csr_linear`.
        in_features, out_features: of the dense layer.

    Raises:
        ValueError: an index or pointer leads out of its tensor, or the shapes do not fit.

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


_KINDS: dict[str, Any] = {
    cls.__name__: cls for cls in (GroupedLinear, SparseLinear, BlockLinear, WindowLinear, SemiStructuredLinear)
}


def _expect(x: Tensor, columns: int) -> None:
    if x.shape[-1] != columns:
        raise ValueError(f"the input has shape {tuple(x.shape)}; its last dimension must be {columns}.")


def _few_columns(columns: int) -> None:
    if columns > MOST_COLUMNS:
        raise ValueError(f"{columns} inputs; an index of 16 bits counts up to {MOST_COLUMNS}.")


# -------------------------------------------------------------------------------------------------------------- pack


@dataclass(frozen=True)
class PackedLayer:
    """What `pack` found about one layer.

    - ``kind``: the form that it has now; ``"dense"`` where it stayed.
    - ``why``: the reason for staying dense, or empty.
    - ``dense_ms``, ``best_dense_ms``, ``packed_ms``: one call on the example; the layer as it was, the fastest dense
      form, the fastest other form (None: there was nothing to time).
    - ``dense_bytes``, ``bytes``: of its weight and bias, before and now.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    sparsity: float
    why: str = ""
    dense_ms: float | None = None
    best_dense_ms: float | None = None
    packed_ms: float | None = None
    dense_bytes: int = 0
    bytes: int = 0

    @property
    def speedup(self) -> float | None:
        """Against the fastest dense form; above 1 is faster, also where the layer stayed dense."""
        return None if not self.packed_ms or self.best_dense_ms is None else self.best_dense_ms / self.packed_ms


@dataclass(frozen=True)
class Packing:
    """What `pack` did; ``str()`` of it is a table."""

    layers: tuple[PackedLayer, ...]

    @property
    def packed(self) -> tuple[PackedLayer, ...]:
        return tuple(layer for layer in self.layers if layer.kind != "dense")

    def __str__(self) -> str:
        rows = [("layer", "shape", "zeros", "now", "ms dense", "ms packed", "faster", ""), *map(_row, self.layers)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        before, after = sum(each.dense_bytes for each in self.layers), sum(each.bytes for each in self.layers)
        lines.append(
            f"{len(self.packed)} of {len(self.layers)} layers packed; their {before / 1e6:.3g} MB are now "
            f"{after / 1e6:.3g} MB."
        )
        return "\n".join(lines)


def _row(layer: PackedLayer) -> tuple[str, ...]:
    return (
        layer.name,
        "×".join(map(str, layer.shape)),
        f"{layer.sparsity:.0%}",
        layer.kind,
        "" if layer.best_dense_ms is None else f"{layer.best_dense_ms:.3g}",
        "" if layer.packed_ms is None else f"{layer.packed_ms:.3g}",
        "" if layer.speedup is None else f"{layer.speedup:.2f}×",
        layer.why,
    )


def pack(
    model: nn.Module,
    example_inputs: Any,
    *,
    at_least: float = 1.1,
    kernels_too: bool = True,
    semi_structured: bool = False,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    forward: Forward | None = None,
) -> Packing:
    """Replace layers whose zeros pay by faster ones, in place; each is timed on the example inputs and stays dense
    unless ``at_least`` times faster than the best dense form of it.

    Linear layers, transformers' ``Conv1D`` and convolutions with a kernel of one place are looked at; attached masks
    count as zeros and are left behind. The model is run once on the example, in evaluation mode, and each layer then
    meets the inputs that reached it: use a batch of the size and threads that will be served. Zeros alone do nothing:
    where no form is faster, the report says so and the layer stays as it is; `secateur.shrink` makes it smaller.

    Larger kernels stay dense: unfolding the inputs of a 3×3 convolution costs more than its zeros save.

    Args:
        model: changed in place, unless an error is raised.
        example_inputs: what the model is called with, as in `torch.export`: a tuple holds positional arguments, a
            mapping keyword arguments, and anything else is the only argument.
        at_least: how many times faster than the best dense form.
        kernels_too: False for plain torch operations only: what is packed trains, and exports to ONNX.
        semi_structured: on a CUDA device, also try 2:4 on sparse tensor cores (`SemiStructuredLinear`), for weights in
            float16 or bfloat16 with multiples of 32 outputs and 64 inputs, whose zeros are 2:4.
        include, exclude: globs over layers' names (``"encoder.*"``).
        forward: ``(model, example_inputs) -> outputs`` for a model that is called otherwise.

    Returns:
        What was chosen for each layer, and what was measured.

    Raises:
        ValueError: there is no such layer, ``at_least`` is not positive, ``semi_structured`` without a GPU that can, or
            a packed layer's output is not that of the dense one.

    >>> from secateur import apply_, make_masks
    >>> from secateur.targets import find_targets
    >>> from secateur.patterns import GroupedColumns
    >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))
    >>> masks = make_masks(find_targets(model, include="0.weight"), 0.9, pattern=GroupedColumns(256))
    >>> apply_(model, masks)
    >>> packing = pack(model, torch.randn(1, 1024))
    >>> len(packing.layers), packing.layers[1].why
    (2, 'no zeros')
    """
    if not at_least > 0:
        raise ValueError(f"at_least says how many times faster, so it is positive; got {at_least}.")
    device = device_of(model) or torch.device("cpu")
    if semi_structured and (why := why_no_semi_structured_device(device)):
        raise ValueError(f"{why}; leave semi_structured out.")
    chosen = _layers(model, include, exclude)
    inputs = _inputs_of(model, chosen, example_inputs, forward or run_example)
    layers: list[PackedLayer] = []
    replacements: dict[str, nn.Module] = {}
    for name, module in track(chosen.items(), "timing layers"):
        found, replacement = _consider(model, name, module, inputs.get(name), at_least, kernels_too, semi_structured)
        layers.append(found)
        if replacement is not None:
            replacements[name] = replacement
    for name, replacement in replacements.items():
        replacement.train(chosen[name].training)
        _put(model, name, replacement)
    return Packing(tuple(layers))


def save_packed(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a packed model as one safetensors file: its tensors, and in the header which layers have which form.

    Raises:
        ValueError: no layer of the model is packed.
        OSError: the file cannot be written.
    """
    from safetensors.torch import save as to_bytes

    forms = {name: _form(module) for name, module in _packed_modules(model)}
    if not forms:
        raise ValueError(f"no layer of {type(model).__name__} is packed; save its state_dict instead.")
    tensors: dict[str, Tensor] = {}
    first: dict[Any, str] = {}
    same: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        known = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name)
        if known != name and tensor.numel():
            same[name] = known
        else:
            tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    header = {"kind": "packed", "version": 1, "layers": forms, "same": same}
    write_whole(path, to_bytes(tensors, metadata={"secateur": json.dumps(header)}))


def load_packed(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Give a dense model of the same architecture the layers and tensors that `save_packed` wrote, in place.

    Everything is checked before the model changes: a file whose indices lead out of a layer's inputs is refused.

    Raises:
        ValueError: it is no such file, or of another model.
        OSError: it is not there.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file.")
    try:
        with safe_open(path, framework="pt") as file:
            about = (file.metadata() or {}).get("secateur", "{}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file of a packed model: {error}") from None
    header = Fields(records.parse_json(about.encode(), Path(path)), Path(path))
    if header.values.get("kind") != "packed":
        raise ValueError(f"{path} holds no packed model; load_state_dict reads plain weights.")
    if (version := header.take("version", int)) != 1:
        raise ValueError(f"{path} is of version {version}; this secateur reads version 1.")
    for name, other in header.each_named("same", str).items():
        if other not in tensors:
            raise header.inner("same").wrong(name, "is the same as a tensor that is not there")
        tensors[name] = tensors[other]
    forms = list(header.inners_named("layers"))
    try:
        replacements = {name: _module_of(name, form, tensors) for name, form in forms}
        for name, replacement in replacements.items():
            _check_fits(name, model.get_submodule(name), replacement)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} does not fit {type(model).__name__}: {error}") from None
    inside = tuple(f"{name}." for name in replacements)
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(inside)}
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(inside)}
    if rest.keys() != own.keys():
        odd = sorted(rest.keys() ^ own.keys())
        raise ValueError(f"{path} does not fit {type(model).__name__}: {', '.join(odd[:5])} only on one side.")
    for name, tensor in own.items():
        if rest[name].shape != tensor.shape:
            raise ValueError(
                f"{path}: {name} has shape {tuple(rest[name].shape)}, in {type(model).__name__} {tuple(tensor.shape)}."
            )
    device = device_of(model)
    for name, replacement in replacements.items():
        replacement.train(model.get_submodule(name).training)
        _put(model, name, replacement if device is None else replacement.to(device))
    model.load_state_dict(rest, strict=False)


# ------------------------------------------------------------------------------------------------------- the choice


def _layers(
    model: nn.Module, include: str | Iterable[str] | None, exclude: str | Iterable[str] | None
) -> dict[str, nn.Module]:
    layers = {name: module for name, module in model.named_modules() if _is_layer(module)}
    if _is_layer(model):
        raise ValueError(
            f"the model is a single {type(model).__name__}; put it in nn.Sequential, so that it can be replaced."
        )
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer or convolution.")
    for globs, keep in ((include, True), (exclude, False)):
        for glob in [globs] if isinstance(globs, str) else globs or ():
            if not any(fnmatchcase(name, glob) for name in layers):
                raise ValueError(f"no layer matches {glob!r}; there are {', '.join(list(layers)[:5])}.")
        if globs is not None:
            words = [globs] if isinstance(globs, str) else list(globs)
            layers = {
                name: module
                for name, module in layers.items()
                if any(fnmatchcase(name, word) for word in words) == keep
            }
    return layers


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.modules.conv._ConvNd) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    return hasattr(module, "nf") and any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def _inputs_of(
    model: nn.Module, layers: Mapping[str, nn.Module], example_inputs: Any, forward: Forward
) -> dict[str, Tensor]:
    """The first input that each layer is called with."""
    inputs: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            given = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(given, Tensor):
                inputs.setdefault(name, given.detach())

        return see

    with unchanged(model), torch.no_grad():
        handles = [m.register_forward_pre_hook(watch(name), with_kwargs=True) for name, m in layers.items()]
        try:
            model.eval()
            forward(model, moved(example_inputs, device_of(model)))
        finally:
            for handle in handles:
                handle.remove()
    return inputs


def _consider(
    model: nn.Module,
    name: str,
    module: nn.Module,
    x: Tensor | None,
    at_least: float,
    kernels_too: bool,
    semi_structured: bool,
) -> tuple[PackedLayer, nn.Module | None]:
    with torch.no_grad():
        weight = cast("Tensor", module.weight).detach()
        zeros = 1 - int(torch.count_nonzero(weight)) / weight.numel() if weight.numel() else 0.0
        bias = cast("Tensor | None", module.bias)
        size = weight.nbytes + (0 if bias is None else bias.nbytes)
        known = PackedLayer(name, "dense", tuple(weight.shape), zeros, dense_bytes=size, bytes=size)
        why = _why_not(model, module, zeros, x)
        if why or x is None:
            return dataclasses.replace(known, why=why), None
        matrix = weight.t() if _is_conv1d(module) else weight.flatten(1)
        batch = x.numel() // max(matrix.shape[1], 1)
        candidates = list(_candidates(matrix, bias, batch, kernels_too and x.device.type == "cpu"))
        no_fours = why_not_semi_structured(matrix) if semi_structured else ""
        if semi_structured and not no_fours:
            candidates.append(SemiStructuredLinear.from_dense(matrix.contiguous(), bias))
        if not candidates:
            why = no_fours or _no_form(zeros, kernels_too and x.device.type == "cpu")
            return dataclasses.replace(known, why=why), None
        if isinstance(module, nn.modules.conv._ConvNd):
            candidates = [Pointwise(each, module.stride) for each in candidates]
        expected = module(x)
        trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        for each in candidates:
            each.to(x.device).requires_grad_(trained).eval()
            _check_same(name, each(x), expected)
        was_training = module.training
        module.eval()
        dense: list[Callable[[Tensor], Any]] = [module.forward, *_other_dense(module, matrix, bias, x)]
        try:
            times = _timed([*dense, *candidates], x)
        finally:
            module.train(was_training)
    best_dense = min(times[: len(dense)])
    packed, replacement = min(zip(times[len(dense) :], candidates, strict=True), key=lambda pair: pair[0])
    found = dataclasses.replace(known, dense_ms=times[0], best_dense_ms=best_dense, packed_ms=packed)
    if best_dense < at_least * packed:
        return dataclasses.replace(
            found, why=f"dense is {'faster' if best_dense <= packed else 'nearly as fast'}"
        ), None
    kind = type(replacement.linear if isinstance(replacement, Pointwise) else replacement).__name__
    return dataclasses.replace(
        found, kind=kind, bytes=sum(tensor.nbytes for tensor in replacement.state_dict().values())
    ), replacement


def _why_not(model: nn.Module, module: nn.Module, zeros: float, x: Tensor | None) -> str:
    """Why a layer cannot be packed, or an empty string."""
    if isinstance(module, nn.modules.conv._ConvNd) and (
        module.transposed or module.groups != 1 or any(size != 1 for size in module.kernel_size) or _pads(module)
    ):
        return "only kernels of one place pay; shrink takes whole channels out"
    if zeros == 0:
        return "no zeros"
    if x is None:
        return "not called on the example; something else reads its weight, or nothing does"
    if nn.utils.parametrize.is_parametrized(module):
        return "parametrized; remove the parametrization first"
    forward = type(module).forward
    if not _is_conv1d(module) and forward not in (
        nn.Linear.forward,
        nn.Conv1d.forward,
        nn.Conv2d.forward,
        nn.Conv3d.forward,
    ):
        return f"{type(module).__name__} computes in its own way"
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._backward_hooks.values()]
    if any(not hasattr(hook, "_tensor_name") for hook in hooks):
        return "it has hooks, which would be lost"
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    holders = sum(id(p) in own for m in model.modules() for p in m._parameters.values() if p is not None)
    if holders > len(own):
        return "its weight is shared with another module"
    if cast("Tensor", module.weight).dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return f"its weight is {cast('Tensor', module.weight).dtype}"
    return ""


def _pads(module: nn.modules.conv._ConvNd) -> bool:
    return isinstance(module.padding, tuple) and any(module.padding)


def _no_form(zeros: float, kernels_too: bool) -> str:
    if kernels_too and not available():
        return f"{zeros:.0%} zeros in no pattern that plain operations skip, and {describe()}"
    return f"{zeros:.0%} zeros in no pattern that can be skipped"


def _candidates(weight: Tensor, bias: Tensor | None, batch: int, with_kernels: bool) -> Iterator[nn.Module]:
    """The forms that leave at least a fifth of the products out."""
    rows, columns = weight.shape
    alive = weight.ne(0)
    products = {outputs: _grouped_products(alive, outputs) for outputs in (*_GROUPS, rows) if 0 < outputs <= rows}
    fewest = min(products.values(), default=math.inf)
    if products and fewest <= _WORTH_TRYING * rows * columns:
        outputs = max(size for size, count in products.items() if count <= fewest * _SLACK)
        yield GroupedLinear.from_dense(weight, bias, outputs=outputs)
    if not with_kernels or not available() or weight.dtype == torch.float64:
        return
    if int(alive.sum()) <= _WORTH_TRYING * rows * columns and batch <= _FEW_VECTORS:
        yield WindowLinear.from_dense(weight, bias)
    if columns > MOST_COLUMNS:
        return
    blocks = functional.pad(alive, (0, 0, 0, -rows % LANES)).view(-1, LANES, columns).any(1)
    if int(blocks.sum()) * LANES <= _WORTH_TRYING * rows * columns:
        yield BlockLinear.from_dense(weight, bias)
    if int(alive.sum()) <= _WORTH_TRYING * rows * columns:
        yield SparseLinear.from_dense(weight, bias, batch=batch)


def _grouped_products(alive: Tensor, outputs: int) -> int:
    rows, columns = alive.shape
    kept = functional.pad(alive, (0, 0, 0, -rows % outputs)).view(-1, outputs, columns).any(1).sum(1)
    return int(kept.max()) * kept.shape[0] * outputs


def _other_dense(
    module: nn.Module, matrix: Tensor, bias: Tensor | None, x: Tensor
) -> Iterator[Callable[[Tensor], Any]]:
    """The packed dense product that torch.compile uses when it freezes a model."""
    if (
        isinstance(module, nn.modules.conv._ConvNd)
        or x.device.type != "cpu"
        or not torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    ):
        return
    if x.dtype != matrix.dtype or x.dtype not in (torch.float32, torch.bfloat16) or not x.numel():
        return
    flat = x.reshape(-1, x.shape[-1])
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), flat.shape[0])
        torch.ops.mkldnn._linear_pointwise(flat, weight, bias, "none", [], "")
    except (AttributeError, RuntimeError):  # these operators are torch's own and may go
        return
    yield lambda x: torch.ops.mkldnn._linear_pointwise(x.reshape(-1, x.shape[-1]), weight, bias, "none", [], "")


def _check_same(name: str, packed: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[expected.dtype]
    if not math.isfinite(scale):
        raise ValueError(f"{name}: its output on the example is not finite, so there is nothing to compare with.")
    if (
        packed.shape != expected.shape
        or float((packed - expected).abs().max() if packed.numel() else 0) > tolerance * scale
    ):
        raise ValueError(
            f"{name}: the packed layer's output is not that of the dense one; exclude it, and report this."
        )


def _timed(functions: list[Callable[[Tensor], Any]], x: Tensor) -> list[float]:
    """Milliseconds of each on x, the median of rounds in which they alternate."""

    def finish() -> None:  # a GPU's calls return before it is done
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)

    calls = {number: functools.partial(function, x) for number, function in enumerate(functions)}
    longest = max(seconds for [seconds] in alternating(calls, 1, repeats=2, finish=finish).values())
    repeats = max(1, min(50, int(0.001 / max(longest, 1e-6))))
    times = alternating(calls, 9, repeats=repeats, finish=finish)
    return [1e3 * statistics.median(seconds) for seconds in times.values()]


# ---------------------------------------------------------------------------------------------------- in the model


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    model.get_submodule(parent)._modules[key] = module


def _packed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside = ""
    for name, module in model.named_modules():
        if isinstance(module, Pointwise):
            inside = f"{name}."
            yield name, module
        elif type(module).__name__ in _KINDS and not (inside and name.startswith(inside)):
            yield name, module


def _form(module: nn.Module) -> dict[str, Any]:
    linear: Any = module.linear if isinstance(module, Pointwise) else module
    form = {"kind": type(linear).__name__, **linear._layout()}
    return {**form, "stride": list(module.stride)} if isinstance(module, Pointwise) else form


def _module_of(name: str, form: Fields, tensors: Mapping[str, Tensor]) -> nn.Module:
    kind, stride = form.take("kind", str), form.each("stride", int, least=1) if "stride" in form.values else None
    layout = {key: form.take(key, int, least=0) for key in form.values if key not in ("kind", "stride")}
    if kind not in _KINDS:
        raise form.wrong("kind", f"is {kind!r}, which this secateur does not know")
    prefix = f"{name}.linear." if stride is not None else f"{name}."
    own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    linear: nn.Module = _KINDS[kind]._from_tensors(own, layout)
    return linear if stride is None else Pointwise(linear, tuple(stride))


def _check_fits(name: str, dense: nn.Module, packed: nn.Module) -> None:
    shape = tuple(cast("Tensor", dense.weight).shape)
    linear: Any = packed.linear if isinstance(packed, Pointwise) else packed
    expected = (linear.out_features, linear.in_features)
    if (shape[::-1] if _is_conv1d(dense) else shape[:2]) != expected:
        raise ValueError(f"{name} is {expected[0]}×{expected[1]} in the file, but has a weight of shape {shape} here.")
