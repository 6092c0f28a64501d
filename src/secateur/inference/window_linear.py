"""A linear layer with any zeros, for few vectors at once.

Law: its output is that of the dense layer with its zeros, within rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from secateur.inference.kernel_layer import KernelLayer, as_stored, expect, rounds_with
from secateur.native import from_windows, laid_out, to_windows, window_linear

__all__ = ["WindowLinear"]


class WindowLinear(KernelLayer):
    """A linear layer with any zeros for few vectors at once: 16 outputs walk through the inputs together.

    For inference on CPUs, as `SparseLinear`, which it beats where reading the weights is all the work: a kept weight
    takes 5 bits beside its value. Made by ``WindowLinear.from_dense``.

    Args:
        words, moves, values, pointers, order, bias, scales: as in `secateur.native.window_linear`.
        in_features, out_features: of the dense layer.

    Raises:
        ValueError: a step leads out of the inputs, an output is not there once, or the shapes do not fit.

    >>> import torch
    >>> layer = WindowLinear.from_dense(torch.tensor([[1.0, 0.0, 2.0], [0.0, 5.0, 0.0]]))
    >>> layer(torch.tensor([[1.0, 10.0, 100.0]]))
    tensor([[201.,  50.]])
    """

    STORED = ("words", "moves", "values", "pointers", "order")

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
        *,
        scales: Tensor | None = None,
    ) -> None:
        stored = {"words": words, "moves": moves, "values": values, "pointers": pointers, "order": order}
        super().__init__(stored, bias, in_features, out_features, scales)

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
        made: dict[str, Any] = dict(to_windows(weight, in_fours=round_inputs))
        return cls(**made, bias=bias, in_features=columns, out_features=rows, scales=scales)

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
