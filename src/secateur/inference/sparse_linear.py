"""A linear layer with any zeros, as its kept weights and their column numbers.

Law: its output is that of the dense layer with its zeros, within rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from secateur.inference.kernel_layer import KernelLayer, as_stored, expect, few_columns
from secateur.native import csr_linear, dense_csr

__all__ = ["SparseLinear"]


class SparseLinear(KernelLayer):
    """A linear layer with any zeros, as its kept weights and their 16-bit column numbers; computed by a kernel in C.

    For inference on CPUs: gradients pass to its input, but its weights do not train. Without compiled kernels
    (`secateur.native.available`) it computes the same, slowly. Made by ``SparseLinear.from_dense``.

    Args:
        indices, pointers, values, bias, columns_together, rows_together, scales: as in `secateur.native.csr_linear`.
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
        scales: Tensor | None = None,
    ) -> None:
        self.columns_together, self.rows_together = columns_together, rows_together
        stored = {"indices": indices, "pointers": pointers, "values": values}
        super().__init__(stored, bias, in_features, out_features, scales)

    @classmethod
    def from_dense(
        cls, weight: Tensor, bias: Tensor | None = None, *, batch: int = 1, scales: Tensor | None = None
    ) -> SparseLinear:
        """The layer of a weight (outputs, inputs) with zeros, laid out to be fastest for this many vectors at once.

        Up to 32 vectors, a row's entries lie in one piece. For more they lie in panels of 256 columns, or of 512 where
        fewer than 7 % are left, so that a panel's inputs stay in the first cache while 1024 rows meet it.

        Args:
            scales: of a weight in int8, as `to_int8` gives both.

        Raises:
            ValueError: scales do not fit the weight.
        """
        share = int(torch.count_nonzero(weight)) / max(weight.numel(), 1)
        columns_together = max(weight.shape[1], 1) if batch <= 32 else 256 if share >= 0.07 else 512
        return cls._laid_out(weight, bias, columns_together, 1024, scales)

    @classmethod
    def _laid_out(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        columns_together: int,
        rows_together: int,
        scales: Tensor | None = None,
    ) -> SparseLinear:
        weight = as_stored(weight, scales)
        rows, columns = weight.shape
        few_columns(columns)
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
            stored,
            bias,
            columns,
            rows,
            columns_together=columns_together,
            rows_together=rows_together,
            scales=scales,
        )

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

    def _layout(self) -> dict[str, Any]:
        return super()._layout() | {"columns_together": self.columns_together, "rows_together": self.rows_together}
