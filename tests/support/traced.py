"""Calls of functions of torch on tensors whose dimensions are axes of their own."""

import torch

from secateur.coupling import Axis, leaves
from secateur.coupling.equations import is_frozen, settle
from secateur.coupling.trace import Trace, Unseen


def arguments(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def traced(function, tensors):
    """The trace, the results, and the axes of the arguments that stay free."""
    trace = Trace()
    for tensor in tensors:
        trace.declare(tensor, [Axis(size) for size in tensor.shape])
    with Unseen(trace), trace:
        out = function(*tensors)
    settle(trace.equations)
    outs = list(out) if isinstance(out, tuple | list) else [out]
    return trace, outs, free_of(trace, tensors)


def free_of(trace, tensors):
    axes = dict.fromkeys(axis for tensor in tensors for dim in trace.dims(tensor) for axis in leaves(dim))
    return [axis for axis in axes if axis.size > 1 and not is_frozen(axis)]
