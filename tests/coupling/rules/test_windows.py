"""Windows over places: channels go on, places stay, and what folds places into channels multiplies."""

import functools

import pytest
import torch
import torch.nn.functional as F

from support.traced import assert_a_call_on_slices_gives_the_slices_of_its_result

_REGIONS = torch.library.Library("windows_of_tests", "DEF")
_REGIONS.define("roi_align(Tensor input, Tensor rois) -> Tensor")


def _in_boxes(x, boxes):
    """As torchvision's, which is not here: each box has two by two places of every channel."""
    return x.mean(0)[None, :, :2, :2] * boxes.sum(1).reshape(-1, 1, 1, 1)


_REGIONS.impl("roi_align", _in_boxes, "CompositeImplicitAutograd")

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "pixel_shuffle": (functools.partial(F.pixel_shuffle, upscale_factor=2), "a,4b,c,d", 2),
    "pixel_unshuffle": (functools.partial(F.pixel_unshuffle, downscale_factor=2), "a,b,2c,2d", 2),
    "unfold": (functools.partial(F.unfold, kernel_size=2), "a,b,c,d", 2),
    "fold": (functools.partial(F.fold, output_size=4, kernel_size=2), "a,4b,9", 2),
    "windows": (lambda a: a.unfold(1, 2, 1), "a,b", 1),
    "max_pool2d": (functools.partial(F.max_pool2d, kernel_size=2), "a,b,4,5", 2),
    "adaptive_avg_pool2d": (functools.partial(F.adaptive_avg_pool2d, output_size=1), "a,b,c,d", 2),
    "interpolate": (functools.partial(F.interpolate, scale_factor=2), "a,b,c,d", 2),
    "roi_align": (torch.ops.windows_of_tests.roi_align, "a,b,4,5 k,5", 2),
    "avg_pool1d": (functools.partial(F.avg_pool1d, kernel_size=2), "a,b,6", 2),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)
