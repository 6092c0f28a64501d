"""A linear layer in which 16 consecutive outputs share their inputs.

Law: its output is that of the dense layer with its zeros, within rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from secateur.inference.kernel_layer import KernelLayer, as_stored, expect, few_columns, rounds_with
from secateur.native import LANES, block_linear, dense_block

__all__ = ["BlockLinear"]


class BlockLinear(KernelLayer):
    """A linear layer in which 16 consecutive outputs share their inputs, as the pattern ``Block(16, 1)`` leaves it.

    For inference on CPUs, as `SparseLinear`. Made by ``BlockLinear.from_dense``.

    Args:
        indices, pointers, values, bias, scales: as in `secateur.native.block_linear`.
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
        *,
        scales: Tensor | None = None,
    ) -> None:
        stored = {"indices": indices, "pointers": pointers, "values": values}
        super().__init__(stored, bias, in_features, out_features, scales)

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
        return cls(
            column.to(torch.int32).to(torch.uint16),
            functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
            values,
            bias,
            columns,
            rows,
            scales=scales,
        )

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
