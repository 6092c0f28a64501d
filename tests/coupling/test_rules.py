"""Laws of the rules: what a call does to slices of its arguments it does to slices of its result."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from secateur.coupling import representative
from secateur.coupling.axes import kept_positions
from support.traced import arguments, free_of, traced

# name: (function of tensors, their shapes, how many axes stay free)
CALLS = {
    "linear": (F.linear, [(5, 6), (4, 6), (4,)], 3),
    "linear without bias": (lambda x, w: F.linear(x, w), [(2, 5, 6), (4, 6)], 4),
    "matmul": (torch.matmul, [(3, 5, 6), (3, 6, 4)], 4),
    "matmul, one matrix": (lambda a, b: a @ b, [(3, 5, 6), (6, 4)], 4),
    "matmul, vector": (torch.matmul, [(5, 6), (6,)], 2),
    "mv": (torch.mv, [(5, 6), (6,)], 2),
    "bmm": (torch.bmm, [(3, 5, 6), (3, 6, 4)], 4),
    "addmm": (torch.addmm, [(4,), (5, 6), (6, 4)], 3),
    "outer": (torch.outer, [(5,), (6,)], 2),
    "einsum": (functools.partial(torch.einsum, "bij,bjk->bki"), [(3, 5, 6), (3, 6, 4)], 4),
    "einsum with dots": (functools.partial(torch.einsum, "...ij,jk->...ki"), [(2, 3, 5, 6), (6, 4)], 5),
    "einsum without arrow": (functools.partial(torch.einsum, "ij,jk"), [(5, 6), (6, 4)], 3),
    "tensordot": (functools.partial(torch.tensordot, dims=2), [(3, 5, 6), (5, 6, 4)], 4),
    "bilinear": (F.bilinear, [(3, 5), (3, 6), (4, 5, 6), (4,)], 4),
    "conv2d": (functools.partial(F.conv2d, padding=1), [(2, 6, 5, 5), (4, 6, 3, 3), (4,)], 3),
    "conv2d of one place": (F.conv2d, [(2, 6, 5, 7), (4, 6, 1, 1), (4,)], 5),
    "conv1d with a stride": (functools.partial(F.conv1d, stride=2), [(2, 6, 9), (4, 6, 3)], 3),
    "conv2d, depthwise": (lambda x, w: F.conv2d(x, w, groups=x.shape[1]), [(2, 6, 5, 5), (6, 1, 3, 3)], 2),
    "conv2d, depthwise twice": (lambda x, w: F.conv2d(x, w, groups=x.shape[1]), [(2, 6, 5, 5), (12, 1, 3, 3)], 3),
    "conv2d in 2 groups": (functools.partial(F.conv2d, groups=2), [(2, 6, 5, 5), (8, 3, 3, 3), (8,)], 3),
    "conv_transpose2d": (functools.partial(F.conv_transpose2d, stride=2), [(2, 6, 5, 5), (6, 4, 3, 3), (4,)], 3),
    "conv_transpose2d in 2 groups": (
        functools.partial(F.conv_transpose2d, groups=2),
        [(2, 6, 5, 5), (6, 4, 3, 3), (8,)],
        3,
    ),
    "add, broadcast": (lambda a, b: a + b, [(3, 5, 6), (5, 1)], 3),
    "gelu": (F.gelu, [(3, 5)], 2),
    "prelu": (F.prelu, [(3, 5), (5,)], 2),
    "where": (lambda a, b: torch.where(a > 0, a, b), [(3, 5), (3, 5)], 2),
    "masked_fill": (lambda a: a.masked_fill(a < 0, 0.0), [(3, 5)], 2),
    "in place": (lambda a, b: a.clone().mul_(b), [(3, 5), (5,)], 2),
    "complex numbers": (lambda a, b: torch.view_as_real(torch.polar(a.abs(), b) * 2), [(3, 5), (3, 5)], 2),
    "pairs as complex": (lambda a: torch.view_as_complex(a).abs(), [(3, 5, 2)], 2),
    "masked_scatter": (
        lambda a, b: a.masked_scatter(torch.tensor([True, False, True])[:, None].expand_as(a), b),
        [(3, 5), (4, 5)],
        1,
    ),
    "sum": (lambda a: a.sum(1), [(3, 5, 6)], 3),
    "norm": (lambda a: a.norm(dim=-1), [(3, 5, 6)], 3),
    "normalize": (functools.partial(F.normalize, dim=1), [(3, 5, 6)], 3),
    "softmax": (functools.partial(torch.softmax, dim=1), [(3, 5, 6)], 2),
    "cumsum": (functools.partial(torch.cumsum, dim=1), [(3, 5, 6)], 2),
    "sort": (lambda a: a.sort(1).values, [(3, 5, 6)], 2),
    "topk": (lambda a: a.topk(2, dim=1).values, [(3, 5, 6)], 2),
    "max": (lambda a: a.max(1).values, [(3, 5, 6)], 2),
    "argmax": (lambda a: a.argmax(1), [(3, 5, 6)], 2),
    "view that splits": (lambda a: a.view(3, -1, 2), [(3, 6)], 1),
    "view by shape": (lambda a: a.view(a.shape[0], a.shape[1] // 2, 2), [(3, 6)], 2),
    "view that joins": (lambda a: a.view(a.size(0), -1), [(3, 5, 6)], 3),
    "view by number": (lambda a: a.view(3, 6), [(3, 2, 3)], 0),
    "view that cuts across": (lambda a: a.view(4, 9), [(6, 6)], 0),
    "heads": (lambda a: a.view(a.shape[0], 3, -1).transpose(0, 1).reshape(-1, a.shape[1] // 3), [(4, 6)], 2),
    "flatten": (lambda a: a.flatten(1), [(3, 5, 6)], 3),
    "unflatten": (lambda a: a.unflatten(1, (2, -1)), [(3, 6)], 2),
    "permute": (lambda a: a.permute(2, 0, 1), [(3, 5, 6)], 3),
    "transpose": (lambda a: a.transpose(0, -1), [(3, 5, 6)], 3),
    "t": (lambda a: a.t(), [(3, 5)], 2),
    "mT": (lambda a: a.mT, [(3, 5, 6)], 3),
    "movedim": (lambda a: a.movedim(0, -1), [(3, 5, 6)], 3),
    "unsqueeze": (lambda a: a.unsqueeze(-1), [(3, 5)], 2),
    "squeeze": (lambda a: a.squeeze(1), [(3, 1, 5)], 2),
    "squeeze all": (lambda a: a.squeeze(), [(3, 1, 5)], 0),
    "expand": (lambda a, b: a.expand(b.shape[0], -1), [(1, 5), (4, 5)], 3),
    "expand_as": (lambda a, b: a.expand_as(b), [(5,), (4, 5)], 3),
    "repeat": (lambda a: a.repeat(2, 3), [(3, 5)], 2),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, dim=1), [(3, 5)], 2),
    "cat": (lambda a, b: torch.cat([a, b], 1), [(3, 5), (3, 4)], 3),
    "stack": (lambda a, b: torch.stack([a, b], 1), [(3, 5), (3, 5)], 2),
    "unbind": (lambda a: a.unbind(1), [(3, 2, 5)], 2),
    "chunk": (lambda a: a.chunk(2, 1), [(3, 6)], 3),
    "uneven chunks": (lambda a: a.chunk(2, 1), [(3, 5)], 1),
    "split by number": (lambda a: a.split(2, 1), [(3, 6)], 1),
    "split by shape": (lambda a, b: a.split([b.shape[0], a.shape[1] - b.shape[0]], 1), [(3, 6), (2,)], 4),
    "slice by number": (lambda a: a[:, :4], [(3, 6)], 2),
    "slice by shape": (lambda a, b: a[:, : b.shape[0]], [(3, 6), (4,)], 4),
    "slice of the rest": (lambda a, b: a[:, b.shape[0] :], [(3, 6), (4,)], 4),
    "slice from the end": (lambda a, b: a[:, -b.shape[0] :], [(3, 6), (4,)], 4),
    "every second": (lambda a: a[:, 1::2], [(3, 6)], 2),
    "one by number": (lambda a: a[:, 2], [(3, 6)], 1),
    "dots and none": (lambda a: a[..., None, :], [(3, 6)], 2),
    "chosen by a tensor": (lambda a: a[:, torch.tensor([0, 2])], [(3, 6)], 1),
    "index_select": (lambda a: a.index_select(1, torch.tensor([0, 2])), [(3, 6)], 1),
    "assigned": (lambda a, b: _assigned(a, b), [(3, 6), (3, 6)], 2),
    "pad": (functools.partial(F.pad, pad=(1, 2)), [(3, 6)], 2),
    "pad, reflect": (functools.partial(F.pad, pad=(1, 2), mode="reflect"), [(2, 3, 6)], 2),
    "pixel_shuffle": (functools.partial(F.pixel_shuffle, upscale_factor=2), [(2, 12, 3, 3)], 2),
    "pixel_unshuffle": (functools.partial(F.pixel_unshuffle, downscale_factor=2), [(2, 3, 4, 4)], 2),
    "channel_shuffle": (lambda a: F.channel_shuffle(a, 2), [(2, 6, 3, 3)], 4),
    "unfold": (functools.partial(F.unfold, kernel_size=2), [(2, 3, 4, 4)], 2),
    "fold": (functools.partial(F.fold, output_size=4, kernel_size=2), [(2, 12, 9)], 2),
    "windows": (lambda a: a.unfold(1, 2, 1), [(3, 6)], 1),
    "roll": (lambda a: a.roll(1, 0), [(3, 6)], 1),
    "flip": (lambda a: a.flip(0), [(3, 6)], 1),
    "tril": (torch.tril, [(2, 5, 5)], 1),
    "max_pool2d": (functools.partial(F.max_pool2d, kernel_size=2), [(2, 6, 4, 4)], 2),
    "adaptive_avg_pool2d": (functools.partial(F.adaptive_avg_pool2d, output_size=1), [(2, 6, 4, 4)], 2),
    "interpolate": (functools.partial(F.interpolate, scale_factor=2), [(2, 6, 4, 4)], 2),
    "glu": (functools.partial(F.glu, dim=1), [(3, 6)], 2),
    "zeros by shape": (lambda a: torch.zeros(a.shape[0], 2) + a.sum(1, keepdim=True), [(3, 6)], 2),
    "attention": (
        functools.partial(F.scaled_dot_product_attention, scale=0.5),
        [(2, 3, 5, 6), (2, 3, 7, 6), (2, 3, 7, 4)],
        5,
    ),
    "attention, scaled": (F.scaled_dot_product_attention, [(2, 3, 5, 6), (2, 3, 7, 6), (2, 3, 7, 4)], 4),
    "attention, grouped": (
        functools.partial(F.scaled_dot_product_attention, scale=1.0, enable_gqa=True),
        [(2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)],
        6,
    ),
    "vector_norm": (functools.partial(torch.linalg.vector_norm, dim=1), [(3, 5, 6)], 3),
    "vector_norm of the largest": (functools.partial(torch.linalg.vector_norm, ord=torch.inf, dim=1), [(3, 5)], 0),
    "type_as": (lambda a, b: a.type_as(b), [(3, 5), (2, 4, 6)], 5),
    "index_add": (lambda a, b: a.index_add(0, torch.tensor([1, 0]), b), [(3, 5), (2, 5)], 1),
    "scatter": (lambda a, b: a.scatter(1, torch.tensor([[1, 0]] * 3), b), [(3, 5), (3, 2)], 0),
    "counted": (lambda a: torch.arange(a.shape[1]) + a, [(3, 5)], 1),
    "fft": (lambda a: torch.fft.fft(a, dim=1).real, [(3, 5, 6)], 2),
    "rfft": (lambda a: torch.fft.rfft(a).abs(), [(3, 5, 6)], 2),
    "fftn": (lambda a: torch.fft.fftn(a, dim=(1, 2)).imag, [(3, 5, 6)], 1),
    "cosine_similarity": (functools.partial(F.cosine_similarity, dim=1), [(3, 5), (3, 5)], 2),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), [(4, 6), (4, 1)], 2),
    "lstm cell": (
        lambda x, h, c, wi, wh, bi, bh: torch.lstm_cell(x, (h, c), wi, wh, bi, bh),
        [(2, 5), (2, 3), (2, 3), (12, 5), (12, 3), (12,), (12,)],
        3,
    ),
    "gru cell": (torch.gru_cell, [(2, 5), (2, 3), (9, 5), (9, 3), (9,), (9,)], 3),
}


def _assigned(a, b):
    out = torch.zeros_like(a)
    out[:, : a.shape[1]] = b * a
    return out


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


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("seed", range(3))
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    function, shapes, count = CALLS[name]
    tensors = arguments(*shapes)
    trace, outs, free = traced(function, tensors)
    assert len(free) == count, (name, free)
    assert not any("form" in each for each in trace.unknown), trace.unknown
    generator = np.random.default_rng(seed)
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
