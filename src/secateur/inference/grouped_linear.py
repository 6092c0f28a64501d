"""A linear layer whose groups of outputs read inputs of their own.

Law: its output is that of the dense layer with its zeros, within rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.inference.kernel_layer import expect

__all__ = ["GroupedLinear"]


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
