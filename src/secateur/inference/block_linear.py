"""A linear layer in which 16 consecutive outputs share their inputs.

Law: its output is that of the dense layer with its zeros, within rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from secateur.inference.kernel_layer import KernelLayer, expect, few_columns
from secateur.native import LANES, block_linear, dense_block

__all__ = ["BlockLinear"]


class BlockLinear(KernelLayer):
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
        few_columns(columns)
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
        expect(x, self.in_features)
        return block_linear(x, self.indices, self.pointers, self.values, self.bias, self.out_features)
