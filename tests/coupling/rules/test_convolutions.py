"""Convolutions: channels in and out, of groups and of each channel alone; kernels and places stay."""

import functools

import pytest
import torch.nn.functional as F

from support.traced import assert_a_call_on_slices_gives_the_slices_of_its_result

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "conv2d": (functools.partial(F.conv2d, padding=1), "b,i,5,4 o,i,3,3 o", 3),
    "conv2d of one place": (F.conv2d, "b,i,h,w o,i,1,1 o", 5),
    "conv1d with a stride": (functools.partial(F.conv1d, stride=2), "b,i,9 o,i,3", 3),
    "conv2d, depthwise": (lambda x, w: F.conv2d(x, w, groups=x.shape[1]), "b,c,5,5 c,1,3,3", 2),
    "conv2d, depthwise twice": (lambda x, w: F.conv2d(x, w, groups=x.shape[1]), "b,c,5,5 2c,1,3,3", 3),
    "conv2d in 2 groups": (functools.partial(F.conv2d, groups=2), "b,2i,5,5 2o,i,3,3 2o", 3),
    "conv_transpose2d": (functools.partial(F.conv_transpose2d, stride=2), "b,i,5,4 i,o,3,3 o", 3),
    "conv_transpose2d in 2 groups": (functools.partial(F.conv_transpose2d, groups=2), "b,2i,5,5 2i,o,3,3 2o", 3),
    "conv1d, depthwise": (lambda x, w: F.conv1d(x, w, groups=x.shape[1]), "b,c,7 c,1,3", 2),
    "conv3d": (F.conv3d, "b,i,3,4,5 o,i,2,2,2", 3),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)
