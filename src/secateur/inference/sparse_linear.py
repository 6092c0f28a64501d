"""A linear layer with any zeros, as its kept weights and their column numbers.

Law: its output is that of the dense layer with its zeros, within rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from secateur.inference.kernel_layer import KernelLayer, as_stored, expect, few_columns, in_fours, rounds_with
from secateur.native import csr_linear, dense_csr

__all__ = ["SparseLinear"]

_ROUNDED = 1024, 128  # columns and rows together where inputs are rounded: codes and sums in the second cache


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
        none = torch.zeros(0, device=weight.device)
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
        return cls(
            column.to(torch.int32).to(torch.uint16),
            functional.pad(length.cumsum(0), (1, 0)).to(torch.int32),
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

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are rounded to 8 bits as they come."""
        return self.values.dim() == 2

    def _layout(self) -> dict[str, Any]:
        return super()._layout() | {"columns_together": self.columns_together, "rows_together": self.rows_together}
