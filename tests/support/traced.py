"""Calls of functions of torch on tensors whose dimensions are axes of their own."""

import numpy as np
import torch

from secateur.coupling import Axis, leaves, representative
from secateur.coupling.axes import kept_positions
from secateur.coupling.equations import is_frozen, settle
from secateur.coupling.finding import settle_choices
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
    settle_choices(trace, [trace.dims(tensor) for tensor in tensors])
    settle(trace.equations)
    outs = list(out) if isinstance(out, tuple | list) else [out]
    return trace, outs, free_of(trace, tensors)


def free_of(trace, tensors):
    axes = dict.fromkeys(axis for tensor in tensors for dim in trace.dims(tensor) for axis in leaves(dim))
    return [axis for axis in axes if axis.size > 1 and not is_frozen(axis)]


def drawn_shapes(sizes, generator):
    """``"b,2i o,i"`` as shapes: a letter is a size that is drawn, 2 to 5, a capital 3 to 6; letters are multiplied, and
    ``+`` adds."""
    found = {}

    def size(text):
        product = int("".join(each for each in text if each.isdigit()) or 1)
        for letter in filter(str.isalpha, text):
            low = 3 if letter.isupper() else 2
            product *= found.setdefault(letter, int(generator.integers(low, low + 4)))
        return product

    return [tuple(sum(map(size, dim.split("+"))) for dim in shape.split(",")) for shape in sizes.split()]


def sliced(tensor, dims, kept):
    for at, dim in enumerate(dims):
        tensor = tensor.index_select(at, torch.from_numpy(np.flatnonzero(kept_positions(dim, kept))))
    return tensor


def zeroed(tensor, dims, kept):
    for at, dim in enumerate(dims):
        shape = [1] * tensor.dim()
        shape[at] = -1
        tensor = tensor * torch.from_numpy(kept_positions(dim, kept)).reshape(shape)
    return tensor


def assert_a_call_on_slices_gives_the_slices_of_its_result(function, sizes, count, seed):
    """The law of a rule: what leaves the axes that it says are free leaves the result, and the rest is as with zeros.

    Args:
        sizes: see `drawn_shapes`.
        count: how many axes of the arguments stay free.
    """
    generator = np.random.default_rng(seed)
    tensors = arguments(*drawn_shapes(sizes, generator))
    trace, outs, free = traced(function, tensors)
    assert len(free) == count, free
    assert not any("form" in each for each in trace.unknown), trace.unknown
    counts = {}
    kept = {}
    for axis in free_of(trace, tensors + outs):
        keep = counts.setdefault(representative(axis), int(generator.integers(1, axis.size)))
        kept[axis] = np.isin(np.arange(axis.size), generator.choice(axis.size, keep, replace=False))
    expected = function(*(zeroed(tensor, trace.dims(tensor), kept) for tensor in tensors))
    expected = list(expected) if isinstance(expected, tuple | list) else [expected]
    found = function(*(sliced(tensor, trace.dims(tensor), kept) for tensor in tensors))
    found = list(found) if isinstance(found, tuple | list) else [found]
    for one, other, original in zip(expected, found, outs, strict=True):
        torch.testing.assert_close(other, sliced(one, trace.dims(original), kept), rtol=1e-4, atol=1e-5)
