"""A convolution with a kernel of one place, as a linear layer at each place.

Law: its output is that of the convolution, within rounding.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

__all__ = ["Pointwise"]


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
