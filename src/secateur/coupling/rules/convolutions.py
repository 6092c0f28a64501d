"""Convolutions, transposed or not, in groups or not.

Law: channels are axes as of a linear layer, in each group; what a kernel moves over stays whole.
"""

from __future__ import annotations

from secateur.coupling.axes import factored, freeze, multiplied, size_of, unify
from secateur.coupling.operations import Weight, rule
from secateur.coupling.rules.arguments import each_of
from secateur.coupling.trace import Call, without_rule

__all__: list[str] = []


@rule("conv1d", "conv2d", "conv3d", rows=Weight((1, "weight"), (2, "bias")), stream="contraction")
def _convolution(call: Call) -> None:
    _convolve(call, call.get(6, "groups", 1), transposed=False)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", stream="contraction")
def _transposed_convolution(call: Call) -> None:
    _convolve(call, call.get(6, "groups", 1), transposed=True)


def _convolve(call: Call, groups: int, *, transposed: bool) -> None:
    x, weight, bias = call.dims(call.get(0, "input")), call.dims(call.get(1, "weight")), call.get(2, "bias")
    spatial = len(weight) - 2
    batch, channels = x[: len(x) - spatial - 1], x[-spatial - 1]
    stride, padding = call.get(3, "stride", 1), call.get(4, "padding", 0)
    # a kernel of one place looks at each place alone
    alone = [
        size_of(kernel) == 1 and each_of(stride, at) == 1 and each_of(padding, at) in (0, "valid")
        for at, kernel in enumerate(weight[2:])
    ]
    for at, (dim, kernel) in enumerate(zip(x[len(x) - spatial :], weight[2:], strict=True)):
        if not alone[at]:
            freeze(dim, "a dimension that a kernel moves over")
            freeze(kernel, "a kernel")
    inputs, outputs = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
    count = int.__index__(groups)
    if count == 1:
        unify(channels, inputs)
        made = outputs
    else:
        # the side of the weight that holds all groups, and the other, which holds those of one group
        whole, own = (inputs, outputs) if transposed else (outputs, inputs)
        split, its = factored(whole, size_of(whole) // count), factored(channels, size_of(channels) // count)
        if split is None or its is None:
            without_rule(call)
            return
        unify(split[0], its[0], "groups of a convolution")
        if transposed:
            unify(channels, inputs, "groups of a convolution")
            made = multiplied([split[0], own])
        else:
            unify(its[1], own, "groups of a convolution")
            made = outputs
        call.trace.agree(groups, split[0], f"{count} groups of a convolution")
    if bias is not None:
        unify(call.dims(bias)[0], made)
    places = [
        dim if passes and size_of(dim) == size else call.fresh(size, "a place")
        for dim, passes, size in zip(x[len(x) - spatial :], alone, call.out.shape[len(batch) + 1 :], strict=True)
    ]
    moved = x[-spatial:] if transposed else places
    call.trace.products.append(
        [*batch, *moved, *weight[2:], *([channels, weight[1]] if transposed else [made, weight[1]])]
    )
    call.returns([*batch, made, *places])
