"""Convolutions, transposed or not, in groups or not. Functions of windows: pooling, interpolation, unfolding, pixel
shuffling.
"""

from __future__ import annotations

from secateur.coupling.axes import factored, freeze, multiplied, size_of, unify
from secateur.coupling.operations import Weight, rule
from secateur.coupling.rules.pointwise import each_of
from secateur.coupling.trace import Call, tensors_of_tree, without_rule

# ---- Convolutions, transposed or not, in groups or not.
#
# Law: channels are axes as of a linear layer, in each group; what a kernel moves over stays whole.


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


# ---- Functions of windows: pooling, interpolation, unfolding, pixel shuffling.
#
# Law: places stay whole; channels pass, whatever is made of their places.


@rule(
    "adaptive_max_pool1d_with_indices",
    "adaptive_max_pool2d_with_indices",
    "max_pool2d_with_indices",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "max_unpool1d",
    "max_unpool2d",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "interpolate",
    "upsample",
    "grid_sample",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "lp_pool1d",
    "lp_pool2d",
)
def _pool(call: Call) -> None:
    x = call.dims(call.get(0, "input"))
    digit = next((int(each[0]) for each in call.name.split("pool")[-1:] if each[:1].isdigit()), None)
    places = min(digit if digit is not None else len(x) - 2, len(x) - 1)
    if call.name.startswith("max_unpool"):
        for dim, its in zip(x, call.dims(call.get(1, "indices")), strict=True):
            unify(dim, its)
    for dim in x[len(x) - places :]:
        freeze(dim, "a dimension that a window moves over")
    for out in tensors_of_tree(call.out):
        made = [call.fresh(size, "a place") for size in out.shape[out.dim() - places :]]
        call.returns([*x[: len(x) - places], *made], out)


@rule("roi_align", "roi_pool")
def _regions(call: Call) -> None:
    """torchvision's: of each box ``(picture, x, y, x, y)`` the places in it, of all channels."""
    x, boxes = call.dims(call.get(0, "input")), call.dims(call.get(1, "rois"))
    freeze(x[0], "chosen by a tensor")
    freeze(boxes[1], "the corners of a box")
    for dim in x[2:]:
        freeze(dim, "a dimension that a window moves over")
    call.returns([boxes[0], x[1], *(call.fresh(size, "a place") for size in call.out.shape[2:])])


@rule("unfold", "im2col")
def _unfold(call: Call) -> None:
    x = call.dims(call.args[0])
    if call.out.dim() == len(x) + 1:  # Tensor.unfold(dimension, size, step)
        at = int(call.get(1, "dimension")) % len(x)
        freeze(x[at], "windows move over it")
        places = call.fresh(call.out.shape[at], "windows")
        call.returns([*x[:at], places, *x[at + 1 :], call.fresh(call.out.shape[-1], "windows")])
        return
    for dim in x[-2:]:
        freeze(dim, "windows move over it")
    window = call.out.shape[-2] // size_of(x[-3])
    patches = multiplied([x[-3], call.fresh(window, "windows")])
    call.returns([*x[:-3], patches, call.fresh(call.out.shape[-1], "windows")])


@rule("fold", "col2im")
def _fold(call: Call) -> None:
    x = call.dims(call.args[0])
    split = factored(x[-2], size_of(x[-2]) // call.out.shape[-3])
    if split is None:
        without_rule(call)
        return
    freeze(split[1], "windows")
    freeze(x[-1], "windows")
    call.returns([*x[:-2], split[0], *(call.fresh(size, "windows") for size in call.out.shape[-2:])])


@rule("pixel_shuffle")
def _pixel_shuffle(call: Call) -> None:
    x, factor = call.dims(call.args[0]), int(call.get(1, "upscale_factor"))
    split = factored(x[-3], factor * factor)
    if split is None:
        without_rule(call)
        return
    for dim in (split[1], *x[-2:]):
        freeze(dim, "pixels")
    call.returns([*x[:-3], split[0], *(call.fresh(size, "pixels") for size in call.out.shape[-2:])])


@rule("pixel_unshuffle")
def _pixel_unshuffle(call: Call) -> None:
    x, factor = call.dims(call.args[0]), int(call.get(1, "downscale_factor"))
    for dim in x[-2:]:
        freeze(dim, "pixels")
    made = multiplied([x[-3], call.fresh(factor * factor, "pixels")])
    call.returns([*x[:-3], made, *(call.fresh(size, "pixels") for size in call.out.shape[-2:])])
