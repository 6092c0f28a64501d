"""Convolutions in which 4 consecutive outputs share the places of their kept weights.

Law: the output is that of the dense convolution with its zeros, and of what was fused into it, within rounding.
"""

from __future__ import annotations

from typing import ClassVar

from secateur.inference.sparse_convolution import SparseConv1d, SparseConv2d

__all__ = ["BlockConv1d", "BlockConv2d"]


class BlockConv2d(SparseConv2d):
    """A convolution in which 4 consecutive outputs share the places of their kept weights, as ``Block(4, 1)`` leaves
    it, or ``Block(16, 1)``, which is four times four.

    An input that is loaded is multiplied for four outputs, so it is faster than a `SparseConv2d` with as many zeros.
    The outputs of a group are a multiple of 4, and a zero whose four has a kept weight is stored. Otherwise it is as
    `SparseConv2d`.

    >>> import torch
    >>> from torch import nn
    >>> from secateur import sparsify
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1))
    >>> masks = sparsify(model, 0.75, pattern="4x1")
    >>> layer, x = BlockConv2d.from_module(model[0]), torch.randn(2, 4, 5, 5)
    >>> layer.values.shape, torch.allclose(layer(x), model(x), atol=1e-5)
    (torch.Size([18, 4]), True)
    """

    OUTPUTS: ClassVar[int] = 4


class BlockConv1d(BlockConv2d, SparseConv1d):
    """A `BlockConv2d` for one dimension: it computes an image of one row.

    >>> import torch
    >>> from torch import nn
    >>> convolution = nn.Conv1d(4, 8, 3, padding="same")
    >>> x = torch.randn(2, 4, 9)
    >>> torch.allclose(BlockConv1d.from_module(convolution)(x), convolution(x), atol=1e-5)
    True
    """
