"""Convolutions that skip zeros, those in which 4 outputs share theirs, and what stays dense beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.inference.linear import KernelLayer, as_stored, few_columns, in_fours, numbered, rounds_with
from secateur.native import (
    RECTIFIERS,
    as_looked_at,
    dense_convolution,
    size_after,
    sparse_convolution,
    together_for,
)
from secateur.support import private, to_int8

# ---- Convolutions with any zeros, as their kept weights and their places, in one and two dimensions.
#
# Law: the output is that of the dense convolution with its zeros, and of what was fused into it, within rounding.

_LAYOUT = ("kernel", "stride", "padding", "dilation")


def why_no_sparse_convolution(module: Any) -> str:
    """Why a convolution cannot be a `SparseConv2d` or `SparseConv1d`, or an empty string.

    >>> from torch import nn
    >>> why_no_sparse_convolution(nn.Conv2d(8, 8, 3, padding_mode="reflect"))
    'it pads with reflect, and only zeros are skipped'
    >>> why_no_sparse_convolution(nn.Conv2d(8, 8, 3, groups=8))
    'each output reads one channel, and there is nothing to skip'
    """
    if module.transposed:
        return "it is transposed"
    if module.weight.dim() > 4:
        return "it has three dimensions"
    if module.padding_mode != "zeros":
        return f"it pads with {module.padding_mode}, and only zeros are skipped"
    if module.in_channels == module.groups:
        return "each output reads one channel, and there is nothing to skip"
    try:
        few_columns(module.weight[0].numel())
    except ValueError as error:
        return str(error)
    return ""


def kept_places(weight: Tensor, shared: int) -> Tensor:
    """Which inputs so many consecutive outputs keep: bool (outputs / shared, inputs of an output).

    >>> kept_places(torch.tensor([[1.0, 0.0, 0.0]] * 3 + [[0.0, 2.0, 0.0]]), 4)
    tensor([[ True,  True, False]])
    """
    return weight.ne(0).reshape(weight.shape[0] // shared, shared, -1).any(1)


class SparseConv2d(KernelLayer):
    """A convolution with any zeros, as its kept weights and their 16-bit places; computed by a kernel in C.

    For inference on CPUs, as `SparseLinear`. A batch normalization and an activation that follow can be part of it, and
    it adds what it is given beside its input before the activation. Made by ``SparseConv2d.from_dense`` or
    ``from_module``.

    What it stores, and the numbers of its layout, are as in `secateur.native.sparse_convolution`.

    >>> import torch
    >>> from torch import nn
    >>> convolution = nn.Conv2d(4, 6, 3, padding=1)
    >>> x = torch.randn(2, 4, 5, 5)
    >>> torch.allclose(SparseConv2d.from_module(convolution)(x), convolution(x), atol=1e-5)
    True
    """

    OUTPUTS: ClassVar[int] = 1  # that share the places of their kept weights
    LAYOUT = (*_LAYOUT, "groups", "together", "rectified", "rectifier")

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    together: int
    rectified: bool
    rectifier: str

    def _nothing(self) -> Tensor:
        sizes = [1 + step * (size - 1) for step, size in zip(self.dilation, self.kernel, strict=True)]
        return torch.zeros(0, self.in_features, *sizes, device=self.values.device, dtype=torch.float32)

    @property
    def in_channels(self) -> int:
        return self.in_features

    @property
    def out_channels(self) -> int:
        return self.out_features

    @classmethod
    def from_dense(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        stride: Sequence[int] = (1, 1),
        padding: Sequence[int] = (0, 0, 0, 0),
        dilation: Sequence[int] = (1, 1),
        groups: int = 1,
        rectified: bool = False,
        size: Sequence[int] = (56, 56),
        together: int | None = None,
        scales: Tensor | None = None,
        round_inputs: bool = False,
    ) -> Self:
        """The layer of a weight (outputs, channels of a group, height, width) with zeros.

        Args:
            size: height and width of an output, for which it is laid out to be fastest; or ``together`` says how.
            scales: of a weight in int8, as `to_int8` gives both.
            round_inputs: whether inputs are rounded to 8 bits, too, each image as it comes; needs scales.

        Raises:
            ValueError: scales do not fit the weight, or are missing where inputs are rounded; or outputs share places,
                whose inputs are not rounded.
        """
        rounds_with(scales, round_inputs)
        if round_inputs and cls.OUTPUTS > 1:
            raise ValueError(f"a {cls.__name__} takes its inputs as they are; a SparseConv2d rounds them.")
        weight = as_stored(weight, scales)
        rows, channels, *kernel = weight.shape
        area = kernel[0] * kernel[1]
        few_columns(channels * area)
        if rows // groups % (shared := cls.OUTPUTS):
            raise ValueError(f"{rows // groups} outputs of a group are no multiple of the {shared} that share places.")
        units, kept = weight.reshape(rows // shared, shared, channels * area), kept_places(weight, shared)
        share = int(torch.count_nonzero(kept)) / max(kept.numel(), 1)
        below = (kernel[0] - 1) * dilation[0] // stride[0] * size[1]
        places = size[0] * size[1]
        together = together or together_for(channels, kernel, places, below, share, shared, of_bytes=round_inputs)
        columns_together = together * area
        starts = range(0, channels * area, columns_together)
        entries = [kept[:, left : left + columns_together].nonzero(as_tuple=True) for left in starts]
        none = torch.zeros(0, device=weight.device, dtype=torch.float32)
        columns = [column + left for left, (_, column) in zip(starts, entries, strict=True)]
        values = [units[at, :, column] for (at, _), column in zip(entries, columns, strict=True)]
        lengths = [none.long(), *(kept[:, left : left + columns_together].sum(1) for left in starts)]
        column, length = torch.cat([none.long(), *columns]), torch.cat(lengths)
        stored = torch.cat([none.to(weight.dtype).view(0, 1).expand(0, shared), *values])
        if shared == 1:
            stored = stored[:, 0]
        if round_inputs:
            column, stored, length = in_fours(column, stored, length)
        lists = dict(zip(_LAYOUT, map(list, (kernel, stride, padding, dilation)), strict=True))
        others = {"groups": groups, "together": together, "rectified": rectified, "rectifier": "relu"}
        given = (*numbered(column, length), stored.contiguous())
        return cls(given, bias, channels * groups, rows, scales, **lists, **others)

    @classmethod
    def from_module(
        cls,
        module: Any,
        norm: Any = None,
        *,
        size: Sequence[int] = (56, 56),
        together: int | None = None,
        values: str | None = None,
        inputs: str | None = None,
    ) -> Self:
        """The layer of a convolution of torch, and of the batch normalization that follows, if any.

        Args:
            values: "int8" for a rounded weight; a batch normalization then goes into its scales.
            inputs: "int8" with it, to round each image as it comes.

        Raises:
            ValueError: inputs are to be rounded without values, its padding is none with zeros, or it is transposed, of
                three dimensions or depthwise.
        """
        if why := why_no_sparse_convolution(module):
            raise ValueError(f"{type(module).__name__} cannot be skipped through: {why}.")
        weight, bias, scales = module.weight.detach(), module.bias, None
        if values is not None:
            weight, scales = to_int8(weight)
        if norm is not None and scales is not None:
            scales, bias = folded(scales, bias, norm)
        elif norm is not None:
            weight, bias = folded(weight, bias, norm)
        return cls.from_dense(
            weight.unsqueeze(2) if weight.dim() == 3 else weight,
            bias,
            size=[1, *size][-2:],
            together=together,
            scales=scales,
            round_inputs=inputs is not None,
            **_geometry_of(module),
        )

    @property
    def weight(self) -> Tensor:
        """The dense weight (outputs, channels of a group, ...), computed at each access; changing it has no effect."""
        return self._weight()

    def _weight(self) -> Tensor:
        channels = self.in_features // self.groups
        stored = self.indices, self.pointers, self.values
        rows, together, shared = self.out_features, self.together, self.OUTPUTS
        return self._scaled(dense_convolution(*stored, rows, channels, self.kernel, together, shared))

    def forward(
        self, x: Tensor, addend: Tensor | None = None, into: Tensor | None = None, apart: bool = False
    ) -> Tensor:
        """``into``, ``apart``: what memory the result may take, as in `secateur.native.sparse_convolution`."""
        if x.dim() == 3:
            return SparseConv2d.forward(self, x[None], None if addend is None else addend[None])[0]
        if x.dim() != 4 or x.shape[1] != self.in_features:
            raise ValueError(f"the input has shape {tuple(x.shape)}; it must be (images, {self.in_features}, ...).")
        if addend is not None and (addend.dtype != x.dtype or addend.shape != self._shape_for(x)):
            y = self._convolved(x, None, False) + addend
            return RECTIFIERS[self.rectifier](y) if self.rectified else y
        return self._convolved(x, addend, self.rectified, into, apart)

    def _shape_for(self, x: Tensor) -> tuple[int, ...]:
        """The shape of what is made of x."""
        size = size_after(x.shape[2:], self.kernel, self.stride, self.padding, self.dilation)
        return x.shape[0], self.out_features, *size

    def _convolved(
        self, x: Tensor, addend: Tensor | None, rectified: bool, into: Tensor | None = None, apart: bool = False
    ) -> Tensor:
        own: dict[str, Any] = self._buffers  # to ask the module for each of them takes three microseconds
        return sparse_convolution(
            x,
            own["indices"],
            own["pointers"],
            own["values"],
            own["bias"],
            addend,
            self.kernel,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.together,
            rectified,
            own["scales"],
            self.OUTPUTS,
            into,
            self.rectifier,
            apart,
        )

    def looked_at(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What a `secateur.native.Chain` knows the layer by: its tensors, and how it computes."""
        own: dict[str, Any] = self._buffers
        lists = self.kernel, self.stride, self.padding, self.dilation, self.groups, self.together
        stored = own["indices"], own["pointers"], own["values"], own["scales"], own["bias"]
        return stored, as_looked_at((*lists, self.rectifier if self.rectified else "", self.OUTPUTS))

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are rounded to 8 bits as they come."""
        own: dict[str, Any] = self._buffers  # asked for at every call, see `_convolved`
        return self.OUTPUTS == 1 and own["values"].dim() == 2

    def described(self, module: Any = None) -> dict[str, Any]:
        """What makes two convolutions the same but for their numbers: of this one, or of a module of torch."""
        if module is not None:
            sizes, kernel = (module.in_channels, module.out_channels), [1, *module.kernel_size][-2:]
            return {"channels": sizes, "kernel": kernel, **_geometry_of(module)}
        own = {name: getattr(self, name) for name in (*_LAYOUT, "groups")}
        return {"channels": (self.in_features, self.out_features), **own}

    def extra_repr(self) -> str:
        words = [f"{self.in_features}, {self.out_features}"]
        words += [f"{name}={tuple(getattr(self, name))}" for name in _LAYOUT]
        words += [f"groups={self.groups}"] * (self.groups > 1) + [
            "rectified" if self.rectifier == "relu" else self.rectifier
        ] * self.rectified
        return ", ".join([*words, f"kept={self.values.numel()}"]) + self._in_int8()

    def _layout(self) -> dict[str, Any]:
        numbers = {f"{name}_{n}": size for name in _LAYOUT for n, size in enumerate(getattr(self, name))}
        sizes = {"in_channels": self.in_features, "out_channels": self.out_features}
        others = {"groups": self.groups, "together": self.together, "rectified": int(self.rectified)}
        which = {} if self.rectifier == "relu" else {"rectifier": [*RECTIFIERS].index(self.rectifier)}
        return sizes | numbers | others | which

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> Self:
        numbers = dict(layout)
        lists: dict[str, Any] = {
            name: [numbers.pop(f"{name}_{n}") for n in range(4 if name == "padding" else 2)] for name in _LAYOUT
        }
        if (which := numbers.pop("rectifier", 0)) >= len(RECTIFIERS):
            raise ValueError(f"rectifier {which} of a convolution is none that this secateur knows.")
        sizes = {"in_features": numbers.pop("in_channels"), "out_features": numbers.pop("out_channels")}
        activation = {"rectifier": [*RECTIFIERS][which], "rectified": bool(numbers.pop("rectified"))}
        return super()._from_tensors(tensors, {**sizes, **lists, **numbers, **activation})


class SparseConv1d(SparseConv2d):
    """A `SparseConv2d` for one dimension: it computes an image of one row.

    >>> import torch
    >>> from torch import nn
    >>> convolution = nn.Conv1d(4, 6, 3, padding="same")
    >>> x = torch.randn(2, 4, 9)
    >>> torch.allclose(SparseConv1d.from_module(convolution)(x), convolution(x), atol=1e-5)
    True
    """

    def _nothing(self) -> Tensor:
        if self.kernel[0] != 1:
            raise ValueError(f"a kernel of {self.kernel[0]} rows has two dimensions.")
        return super()._nothing().squeeze(-2)

    @property
    def weight(self) -> Tensor:
        return self._weight().squeeze(2)

    def forward(
        self, x: Tensor, addend: Tensor | None = None, into: Tensor | None = None, apart: bool = False
    ) -> Tensor:
        del apart  # images of one row have no planes
        addend, into = (None if each is None else each.unsqueeze(-2) for each in (addend, into))
        return super().forward(x.unsqueeze(-2), addend, into).squeeze(-2)


def _geometry_of(module: Any) -> dict[str, Any]:
    """How a convolution of torch meets an image of two dimensions."""
    padding = [*private.padding_of(module), 0, 0][:4]  # from the last dimension on
    return {
        "stride": [1, *module.stride][-2:],
        "padding": [*padding[2:], *padding[:2]],
        "dilation": [1, *module.dilation][-2:],
        "groups": module.groups,
    }


def folded(weight: Tensor, bias: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution with which it computes what a batch normalization makes of its outputs."""
    mean, variance = cast("Tensor", norm.running_mean).double(), cast("Tensor", norm.running_var).double()
    scale = (variance + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -mean * scale if bias is None else (bias.detach().double() - mean) * scale
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    scaled = weight.double() * scale.view(-1, *[1] * (weight.dim() - 1))
    return scaled.to(weight.dtype), shift.float()


# ---- Convolutions in which 4 consecutive outputs share the places of their kept weights.
#
# Law: the output is that of the dense convolution with its zeros, and of what was fused into it, within rounding.


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


# ---- What stays dense beside packed convolutions, in the form in which torch computes it fastest.
#
# Law: a folded convolution is the convolution and its batch normalization within rounding; a max-pooling here is
# torch's own, number for number.


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
