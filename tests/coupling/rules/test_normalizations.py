"""Normalizations: channels with their scales; what statistics are taken over by number stays."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from secateur.coupling import leaves
from support.traced import arguments, assert_a_call_on_slices_gives_the_slices_of_its_result, drawn_shapes, traced

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), "a,b a,1", 2),
    "batch_norm": (lambda x, m, v, w, b: F.batch_norm(x, m, v.abs() + 1, w, b), "b,c,t c c c c", 3),
    "layer_norm by number": (lambda x, w: F.layer_norm(x, (6,), w), "b,t,6 6", 2),
    "local_response_norm": (functools.partial(F.local_response_norm, size=2), "b,c,t", 2),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)


# name: (function of tensors, their sizes, the dimensions of the first that a statistic is taken over)
STATISTICS = {
    "batch_norm in training": (lambda x: F.batch_norm(x, None, None, training=True), "b,c,t", (0, 2)),
    "batch_norm with what was running": (lambda x, m, v: F.batch_norm(x, m, v.abs() + 1), "b,c,t c c", ()),
    "instance_norm": (F.instance_norm, "b,c,t", (2,)),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[1:]), "b,c,t", (1, 2)),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:]), "b,c,t", (2,)),
    "group_norm": (lambda x: F.group_norm(x, 2), "b,2c,t", (1,)),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_over_what_may_leave_is_flagged(name, seed):
    """Of a group normalization it is a factor of the channels, those of one group."""
    function, sizes, over = STATISTICS[name]
    tensors = arguments(*drawn_shapes(sizes, np.random.default_rng(seed)))
    trace, _, _ = traced(function, tensors)
    flagged = {axis for flag in trace.flagged for axis in leaves(flag.dim)}
    dims = trace.dims(tensors[0])
    assert {at for at, dim in enumerate(dims) if flagged & set(leaves(dim))} == set(over)
    assert flagged <= {axis for dim in dims for axis in leaves(dim)}
