"""What stays dense beside packed convolutions, in the form in which torch computes it fastest.

Law: a folded convolution is the convolution and its batch normalization within rounding; a max-pooling here is
torch's own, number for number.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.inference.sparse_convolution import SparseConv2d, folded
from secateur.support import private

__all__ = ["ChannelsLastMaxPool2d", "FoldedConv2d", "lay_out", "may_be_turned", "may_fold"]


class FoldedConv2d(nn.Conv2d):
    """A dense convolution with the batch normalization that followed it in its weight and bias.

    >>> import torch
    >>> from torch import nn
    >>> convolution, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()
    >>> x = torch.randn(2, 3, 8, 8)
    >>> torch.allclose(FoldedConv2d.from_module(convolution, norm)(x), norm(convolution(x)), atol=1e-5)
    True
    """

    @classmethod
    def from_module(cls, module: Any, norm: Any = None, *, channels_last: bool = False) -> Self:
        """Of a convolution of torch with two dimensions.

        Args:
            norm: the batch normalization, in evaluation mode; None for a bias of zeros, to be loaded.
            channels_last: whether it computes, and returns, the channels of a place side by side.
        """
        weight, bias = module.weight.detach(), module.bias
        first = next(each for each in (bias, getattr(norm, "bias", None), module.weight) if each is not None)
        if norm is not None:
            weight, bias = folded(weight, bias, norm)
        like = {"device": "meta", "dtype": weight.dtype, "padding_mode": module.padding_mode, "groups": module.groups}
        sizes = module.in_channels, module.out_channels, module.kernel_size
        made = cls(*sizes, module.stride, module.padding, module.dilation, **like)
        trained = module.weight.requires_grad
        layout = torch.channels_last if channels_last else torch.contiguous_format
        made.weight = nn.Parameter(weight.clone(memory_format=layout), requires_grad=trained)
        zeros = weight.new_zeros(module.out_channels)
        # a copy: what is loaded later must not reach the dense layer's
        bias = zeros if bias is None else bias.detach().to(weight, copy=True)
        made.bias = nn.Parameter(bias, requires_grad=first.requires_grad)
        return made.train(module.training)

    @property
    def channels_last(self) -> bool:
        return not self.weight.is_contiguous()


class ChannelsLastMaxPool2d(nn.MaxPool2d):
    """Max-pooling of images whose channels lie side by side, which torch computes many times faster than of planes.

    Args:
        pooling: a `torch.nn.MaxPool2d` that returns no indices.
        rectified: whether a ReLU is part of it.

    >>> import torch
    >>> from torch import nn
    >>> pooling, x = nn.MaxPool2d(3, stride=2, padding=1), torch.randn(2, 4, 9, 9)
    >>> torch.equal(ChannelsLastMaxPool2d(pooling)(x), pooling(x))
    True
    """

    def __init__(self, pooling: nn.MaxPool2d, rectified: bool = False) -> None:
        sizes = pooling.kernel_size, pooling.stride, pooling.padding, pooling.dilation
        super().__init__(*sizes, return_indices=False, ceil_mode=pooling.ceil_mode)
        self.rectified = bool(rectified)
        self.train(pooling.training)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        y: Tensor = super().forward(x)
        return (functional.relu(y) if self.rectified else y).contiguous()

    def extra_repr(self) -> str:
        return super().extra_repr() + ", rectified=True" * self.rectified


def lay_out(model: nn.Module) -> None:
    """Puts the weights of dense convolutions beside packed ones into the usual memory format, in place.

    A dense convolution in ``channels_last`` would have each packed one after it copy its input: a ResNet-50 that came
    so took twice as long.

    >>> dense = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    >>> lay_out(nn.Sequential(dense, SparseConv2d.from_module(nn.Conv2d(4, 4, 3))))
    >>> dense.weight.is_contiguous()
    True
    """
    if not any(isinstance(module, SparseConv2d) for module in model.modules()):
        return
    for module in model.modules():
        if private.is_convolution(module) and not isinstance(module, FoldedConv2d):  # that is as it was measured
            for parameter in module.parameters(recurse=False):
                if parameter.stride() != torch.empty(parameter.shape, device="meta").stride():
                    parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def may_fold(module: nn.Module) -> bool:
    """Whether a batch normalization can become part of a convolution that stays dense: one of torch's own with two
    dimensions, in float32, without hooks and parametrizations.

    >>> may_fold(nn.Conv2d(3, 4, 3)), may_fold(nn.Conv1d(3, 4, 3)), may_fold(nn.Conv2d(3, 4, 3).half())
    (True, False, False)
    """
    return type(module) is nn.Conv2d and module.weight.dtype == torch.float32 and not private.hooks_of(module)


def may_be_turned(module: nn.Module) -> bool:
    """Whether a module is a max-pooling that can take images whose channels lie side by side.

    >>> may_be_turned(nn.MaxPool2d(2)), may_be_turned(nn.MaxPool2d(2, return_indices=True))
    (True, False)
    """
    return type(module) is nn.MaxPool2d and not module.return_indices and not private.hooks_of(module)
