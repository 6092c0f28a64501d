"""What each rule says of a call: on slices of its arguments it gives the slices of its result."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 its operator
from torch import nn

from secateur import shrink
from secateur.coupling import find_coupling, leaves
from secateur.coupling.axes import Axis
from secateur.coupling.operations import operation
from secateur.coupling.rules.pointwise import each_of, places, plain_number
from secateur.coupling.trace import Trace
from support.traced import arguments, assert_a_call_on_slices_gives_the_slices_of_its_result, drawn_shapes, traced


def _assigned(a, b):
    out = torch.zeros_like(a)
    out[:, : a.shape[1]] = b * a
    return out


SOLVE = functools.partial(torch.linalg.solve_triangular, upper=False, unitriangular=True)


_REGIONS = torch.library.Library("windows_of_tests", "DEF")


_REGIONS.define("roi_align(Tensor input, Tensor rois) -> Tensor")


def _in_boxes(x, boxes):
    """As torchvision's, which is not here: each box has two by two places of every channel."""
    return x.mean(0)[None, :, :2, :2] * boxes.sum(1).reshape(-1, 1, 1, 1)


_REGIONS.impl("roi_align", _in_boxes, "CompositeImplicitAutograd")


# kind of rule: {name: (function of tensors, their sizes, how many axes stay free)}
RULES = {
    # Attention: widths of queries and keys, of values, and heads that share keys.
    "attention": {
        "attention": (functools.partial(F.scaled_dot_product_attention, scale=0.5), "b,h,t,e b,h,s,e b,h,s,v", 5),
        "attention, scaled": (F.scaled_dot_product_attention, "b,h,t,e b,h,s,e b,h,s,v", 4),
        "attention, grouped": (
            functools.partial(F.scaled_dot_product_attention, scale=1.0, enable_gqa=True),
            "b,2h,t,e b,h,s,e b,h,s,v",
            6,
        ),
        "attention, causal": (
            functools.partial(F.scaled_dot_product_attention, scale=0.5, is_causal=True),
            "b,h,t,e b,h,t,e b,h,t,v",
            4,
        ),
    },
    # Functions that choose along a dimension: of what is chosen between the call follows, of all else it stays whole.
    "choices": {
        "softmax": (functools.partial(torch.softmax, dim=1), "a,b,c", 2),
        "log_softmax": (functools.partial(F.log_softmax, dim=0), "a,b", 1),
        "cumsum": (functools.partial(torch.cumsum, dim=1), "a,b,c", 2),
        "topk": (lambda a: a.topk(2, dim=1).values, "a,B,c", 2),
        "places that are not used": (lambda a: a.topk(2, dim=1), "a,B,c", 2),
        "the largest": (lambda a: a.amax(1), "a,b,c", 2),
        "the place of the largest": (lambda a: a.argmax(-1).float(), "a,b", 1),
    },
    # Convolutions: channels in and out, of groups and of each channel alone; kernels and places stay.
    "convolutions": {
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
    },
    # Tensors that are made: of sizes that were asked for they lose what those lose.
    "creation": {
        "zeros by shape": (lambda a: torch.zeros(a.shape[0], 2) + a.sum(1, keepdim=True), "a,b", 2),
        "counted": (lambda a: torch.arange(a.shape[1]) + a, "a,b", 1),
        "ones of a number": (lambda a: torch.ones(4) + a, "a,4", 1),
        "new_zeros": (lambda a: a.new_zeros(a.shape[1], a.shape[0]) + a.t(), "a,b", 2),
        "full": (lambda a: torch.full((a.shape[0], 1), 2.0) * a, "a,b", 2),
    },
    # Indexing: what is taken by its number stays, what is sliced by a size follows the size.
    "indexing": {
        "slice by number": (lambda a: a[:, :4], "a,6", 2),
        "slice by shape": (lambda a, b: a[:, : b.shape[0]], "a,b+c b", 4),
        "slice of the rest": (lambda a, b: a[:, b.shape[0] :], "a,b+c b", 4),
        "slice from the end": (lambda a, b: a[:, -b.shape[0] :], "a,b+c b", 4),
        "every second": (lambda a: a[:, 1::2], "a,2b", 2),
        "one by number": (lambda a: a[:, 2], "a,B", 1),
        "dots and none": (lambda a: a[..., None, :], "a,b", 2),
        "chosen by a tensor": (lambda a: a[:, torch.tensor([0, 2])], "a,B", 1),
        "index_select": (lambda a: a.index_select(1, torch.tensor([0, 2])), "a,B", 1),
        "assigned": (lambda a, b: _assigned(a, b), "a,b a,b", 2),
        "index_add": (lambda a, b: a.index_add(0, torch.tensor([1, 0]), b), "a,b 2,b", 1),
        "scatter": (lambda a, b: a.scatter(1, torch.tensor([[1, 0]] * 3), b), "3,b 3,2", 0),
        "masked_scatter": (
            lambda a, b: a.masked_scatter(torch.tensor([True, False, True])[:, None].expand_as(a), b),
            "3,b 4,b",
            1,
        ),
        "embedding": (lambda w: F.embedding(torch.tensor([[0, 1], [1, 0]]), w), "a,b", 1),
        "gather": (lambda a: a.gather(1, torch.tensor([[0], [1]])), "2,b", 0),
    },
    # Normalizations: channels with their scales; what statistics are taken over by number stays.
    "normalizations": {
        "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), "a,b a,1", 2),
        "batch_norm": (lambda x, m, v, w, b: F.batch_norm(x, m, v.abs() + 1, w, b), "b,c,t c c c c", 3),
        "layer_norm by number": (lambda x, w: F.layer_norm(x, (6,), w), "b,t,6 6", 2),
        "local_response_norm": (functools.partial(F.local_response_norm, size=2), "b,c,t", 2),
    },
    # Joining and cutting: pieces are axes of their own where the code takes them by their sizes.
    "pieces": {
        "cat": (lambda a, b: torch.cat([a, b], 1), "a,b a,c", 3),
        "column_stack": (lambda a, b: torch.column_stack([a, b]), "a,b a,c", 3),
        "hstack": (lambda a, b: torch.hstack([a, b]), "a,b a,c", 3),
        "vstack": (lambda a, b: torch.vstack([a, b]), "a,b c,b", 3),
        "dstack": (lambda a, b: torch.dstack([a, b]), "a,b,c a,b,d", 4),
        "stack": (lambda a, b: torch.stack([a, b], 1), "a,b a,b", 2),
        "unbind": (lambda a: a.unbind(1), "a,2,b", 2),
        "chunk": (lambda a: a.chunk(2, 1), "a,2b", 3),
        "uneven chunks": (lambda a: a.chunk(2, 1), "a,5", 1),
        "split by number": (lambda a: a.split(2, 1), "a,2b", 1),
        "split by shape": (lambda a, b: a.split([b.shape[0], a.shape[1] - b.shape[0]], 1), "a,b+c b", 4),
        "pad": (functools.partial(F.pad, pad=(1, 2)), "a,b", 2),
        "pad, reflect": (functools.partial(F.pad, pad=(1, 2), mode="reflect"), "a,b,C", 2),
        "glu": (functools.partial(F.glu, dim=1), "a,2b", 2),
        "narrow by shape": (lambda a, b: a.narrow(1, 0, b.shape[0]), "a,b+c b", 4),
        "cat of three": (lambda *parts: torch.cat(parts), "a,b c,b d,b", 4),
    },
    # Pointwise functions: what is broadcast together is one axis.
    "pointwise": {
        "add, broadcast": (lambda a, b: a + b, "a,b,c b,1", 3),
        "gelu": (F.gelu, "a,b", 2),
        "prelu": (F.prelu, "a,b b", 2),
        "where": (lambda a, b: torch.where(a > 0, a, b), "a,b a,b", 2),
        "masked_fill": (lambda a: a.masked_fill(a < 0, 0.0), "a,b", 2),
        "in place": (lambda a, b: a.clone().mul_(b), "a,b b", 2),
        "complex numbers": (lambda a, b: torch.view_as_real(torch.polar(a.abs(), b) * 2), "a,b a,b", 2),
        "pairs as complex": (lambda a: torch.view_as_complex(a).abs(), "a,b,2", 2),
        "type_as": (lambda a, b: a.type_as(b), "a,b c,d,e", 5),
        "three, broadcast": (torch.addcmul, "a,b b a,1", 2),
        "subtracted twice": (lambda a, b: a - b - b, "a,b a,b", 2),
    },
    # Products: what is multiplied along is one axis of both, and leaves the result.
    "products": {
        "linear": (F.linear, "b,i o,i o", 3),
        "linear without bias": (lambda x, w: F.linear(x, w), "a,b,i o,i", 4),
        "matmul": (torch.matmul, "a,b,i a,i,o", 4),
        "matmul, one matrix": (lambda a, b: a @ b, "a,b,i i,o", 4),
        "matmul, vector": (torch.matmul, "b,i i", 2),
        "mv": (torch.mv, "b,i i", 2),
        "bmm": (torch.bmm, "a,b,i a,i,o", 4),
        "addmm": (torch.addmm, "o b,i i,o", 3),
        "outer": (torch.outer, "a b", 2),
        "einsum": (functools.partial(torch.einsum, "bij,bjk->bki"), "b,i,j b,j,k", 4),
        "einsum with dots": (functools.partial(torch.einsum, "...ij,jk->...ki"), "a,b,i,j j,k", 5),
        "einsum without arrow": (functools.partial(torch.einsum, "ij,jk"), "i,j j,k", 3),
        "tensordot": (functools.partial(torch.tensordot, dims=2), "a,i,j i,j,b", 4),
        "bilinear": (F.bilinear, "b,i b,j o,i,j o", 4),
        "baddbmm": (torch.baddbmm, "a,b,o a,b,i a,i,o", 4),
        "vector, matmul": (torch.matmul, "i i,o", 2),
        "solve_triangular": (SOLVE, "a,b,i,i a,b,i,o", 3),
        "solve_triangular, one system": (SOLVE, "i,i a,i,o", 2),
    },
    # Questions for sizes are answered with what they are the sizes of; what leaves torch stays.
    "questions": {
        "shape": (lambda x: torch.ones(x.shape[1], x.shape[0]), "a,b", 2),
        "size": (lambda x: torch.ones(x.size(1), x.size(-2)), "a,b", 2),
        "size by name": (lambda x: torch.ones(x.size(dim=1)), "a,b", 2),
        "size of all": (lambda x: torch.ones(x.size()), "a,b", 2),
        "numel": (lambda x: torch.ones(x.numel()), "a,b", 2),
        "nelement": (lambda x: torch.ones(x.nelement() // x.size(0)), "a,b,c", 3),
    },
    # Recurrent cells: the gates lose the same units, from their rows and from the state.
    "recurrent": {
        "lstm cell": (
            lambda x, h, c, wi, wh, bi, bh: torch.lstm_cell(x, (h, c), wi, wh, bi, bh),
            "b,i b,h b,h 4h,i 4h,h 4h 4h",
            3,
        ),
        "gru cell": (torch.gru_cell, "b,i b,h 3h,i 3h,h 3h 3h", 3),
        "rnn_tanh cell": (torch.rnn_tanh_cell, "b,i b,h h,i h,h h h", 3),
    },
    # Reductions: an axis that sums run over may lose zeros, one in which something is chosen may not.
    "reductions": {
        "sum": (lambda a: a.sum(1), "a,b,c", 3),
        "norm": (lambda a: a.norm(dim=-1), "a,b,c", 3),
        "normalize": (functools.partial(F.normalize, dim=1), "a,b,c", 3),
        "max": (lambda a: a.max(1).values, "a,b,c", 2),
        "argmax": (lambda a: a.argmax(1), "a,b,c", 2),
        "vector_norm": (functools.partial(torch.linalg.vector_norm, dim=1), "a,b,c", 3),
        "vector_norm of the largest": (functools.partial(torch.linalg.vector_norm, ord=torch.inf, dim=1), "a,b", 0),
        "cosine_similarity": (functools.partial(F.cosine_similarity, dim=1), "a,b a,b", 2),
        "sum of all": (lambda a: a.sum(), "a,b", 2),
        "sum, kept": (lambda a: a.sum((0, 2), keepdim=True), "a,b,c", 3),
    },
    # Functions that look along a dimension: it stays, and the others go on.
    "scans": {
        "sort": (lambda a: a.sort(1).values, "a,b,c", 2),
        "roll": (lambda a: a.roll(1, 0), "a,b", 1),
        "flip": (lambda a: a.flip(0), "a,b", 1),
        "tril": (torch.tril, "a,b,c", 1),
        "fft": (lambda a: torch.fft.fft(a, dim=1).real, "a,b,c", 2),
        "rfft": (lambda a: torch.fft.rfft(a).abs(), "a,b,c", 2),
        "fftn": (lambda a: torch.fft.fftn(a, dim=(1, 2)).imag, "a,b,c", 1),
    },
    # Views: how sizes that the code asked for, or wrote as numbers, cut axes apart and join them.
    "shapes": {
        "view that splits": (lambda a: a.view(3, -1, 2), "3,2b", 1),
        "view by shape": (lambda a: a.view(a.shape[0], a.shape[1] // 2, 2), "a,2b", 2),
        "view that joins": (lambda a: a.view(a.size(0), -1), "a,b,c", 3),
        "view by number": (lambda a: a.view(3, 6), "3,2,3", 0),
        "view that cuts across": (lambda a: a.view(4, 9), "6,6", 0),
        "view that cuts across what is before": (lambda a: a.view(2, 15, -1), "3,5,2b", 1),
        "heads": (lambda a: a.view(a.shape[0], 3, -1).transpose(0, 1).reshape(-1, a.shape[1] // 3), "a,3b", 2),
        "flatten": (lambda a: a.flatten(1), "a,b,c", 3),
        "unflatten": (lambda a: a.unflatten(1, (2, -1)), "a,2b", 2),
        "permute": (lambda a: a.permute(2, 0, 1), "a,b,c", 3),
        "transpose": (lambda a: a.transpose(0, -1), "a,b,c", 3),
        "t": (lambda a: a.t(), "a,b", 2),
        "mT": (lambda a: a.mT, "a,b,c", 3),
        "movedim": (lambda a: a.movedim(0, -1), "a,b,c", 3),
        "unsqueeze": (lambda a: a.unsqueeze(-1), "a,b", 2),
        "squeeze": (lambda a: a.squeeze(1), "a,1,b", 2),
        "expand": (lambda a, b: a.expand(b.shape[0], -1), "1,b c,d", 3),
        "expand_as": (lambda a, b: a.expand_as(b), "b c,b", 3),
        "repeat": (lambda a: a.repeat(2, 3), "a,b", 2),
        "repeat_interleave": (lambda a: a.repeat_interleave(2, dim=1), "a,b", 2),
        "channel_shuffle": (lambda a: F.channel_shuffle(a, 2), "a,2b,c,d", 4),
        "ravel": (lambda a: a.ravel(), "a,b", 2),
        "view_as": (lambda a, b: a.view_as(b), "ab b,a", 4),
    },
    # Windows over places: channels go on, places stay, and what folds places into channels multiplies.
    "windows": {
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
    },
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, calls in RULES.items() for name in calls])
def test_a_call_on_slices_gives_the_slices_of_its_result(kind, name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*RULES[kind][name], seed)


# ---- arguments ----


@pytest.mark.parametrize(("given", "values"), [(3, [3, 3]), ((3, 4), [3, 4]), ((3,), [3, 3]), ("same", ["same"] * 2)])
def test_an_argument_is_given_once_or_for_each_dimension(given, values):
    assert [each_of(given, at) for at in range(2)] == values


@pytest.mark.parametrize(("given", "found"), [(None, {0, 1, 2}), (-1, {2}), ((0, -2), {0, 1}), ([1], {1}), ((), set())])
def test_places_count_from_the_end_too(given, found):
    assert places(given, 3) == found
    assert places(0, 0) == {0}


def test_a_plain_number_asks_for_no_equation():
    trace = Trace()
    number = trace.number(Axis(6))
    assert type(number) is not int
    assert type(plain_number(number)) is int
    assert plain_number(number) // 2 == 3
    assert type(each_of(number, 0)) is int
    assert not trace.equations
    assert plain_number(2.5) == 2.5


# ---- attention ----


def test_places_of_a_causal_mask_stay():
    """Learned queries under one would see other keys if some of them left."""
    tensors = arguments((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 6))
    attention = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    trace, _, free = traced(attention, tensors)
    for tensor in tensors:
        assert not set(leaves(trace.dims(tensor)[2])) & set(free)


def test_width_that_attention_is_scaled_by_stays_unless_rows_can_make_up_for_it():
    """Queries and keys of unknown origin have no rows to multiply; with a scale of one's own none is needed."""
    tensors = arguments((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6))
    for scale, frozen in ((None, True), (0.5, False)):
        trace, _, free = traced(functools.partial(F.scaled_dot_product_attention, scale=scale), tensors)
        assert set(leaves(trace.dims(tensors[0])[3])).isdisjoint(free) == frozen


# ---- choices ----


class Chooses(nn.Module):
    """Rows of a table, by what a layer says of them."""

    def __init__(self, take, rows=5):
        super().__init__()
        self.rows, self.take = rows, take
        self.score, self.out = nn.Linear(3, rows), nn.Linear(4, 2)
        self.table = nn.Parameter(torch.randn(rows, 4))

    def forward(self, x):
        return self.out(self.take(self, self.score(x)))


def weighed(self, mask):
    return mask.to(self.table.dtype) @ self.table


# how rows are taken by scores, of which the rows may be fewer
FOLLOWED = {
    "rows by places": lambda self, scores: self.table[scores.topk(2).indices].sum(1),
    "rows by the largest": lambda self, scores: self.table[scores.argmax(-1)],
    "the largest, with its place": lambda self, scores: self.table[scores.max(-1)[1]],
    "looked up": lambda self, scores: F.embedding(scores.topk(2).indices, self.table).sum(1),
    "selected": lambda self, scores: self.table.index_select(0, scores.argmax(-1)),
    "one_hot": lambda self, scores: weighed(self, F.one_hot(scores.argmax(-1), self.rows)),
    "one_hot with one more": lambda self, scores: weighed(
        self, F.one_hot(scores.argmax(-1), self.rows + 1)[:, : self.rows]
    ),
    "scattered": lambda self, scores: weighed(
        self, torch.zeros_like(scores).scatter(1, scores.topk(2).indices, scores.topk(2).values)
    ),
    "gathered": lambda self, scores: (
        scores.softmax(-1).gather(1, scores.topk(2).indices).unsqueeze(-1) * self.table[scores.topk(2).indices]
    ).sum(1),
    "joined places": lambda self, scores: self.table[
        torch.cat([scores.argmax(-1, keepdim=True), scores.topk(2).indices], 1)
    ].sum(1),
    "counted": lambda self, scores: weighed(
        self, torch.bincount(scores.argmax(-1), minlength=self.rows).expand(scores.shape[0], -1)
    ),
    "where it is true": lambda self, scores: torch.zeros(
        scores.shape[0], self.table.shape[1], dtype=scores.dtype
    ).index_add(
        0, *(lambda token, row: (token, self.table[row]))(*torch.where(scores == scores.amax(-1, keepdim=True)))
    ),
}


# and of which they may not
WHOLE = {
    "a number in the code": lambda self, scores: self.table[scores.argmax(-1)] + (scores.argmax(-1) == 1)[:, None],
    "out of torch": lambda self, scores: self.table[scores.argmax(-1)] + scores.argmax(-1)[0].item(),
    "one_hot of a number": lambda self, scores: weighed(self, F.one_hot(scores.argmax(-1), 5)),
    "the smallest": lambda self, scores: self.table[scores.topk(2, largest=False).indices].sum(1),
    "computed places": lambda self, scores: self.table[(scores.argmax(-1) + 1) % self.rows],
    "written over": lambda self, scores: self.table[scores.argmax(-1).mul_(0)],
    "sorted": lambda self, scores: self.table[scores.sort(-1).indices[:, 0]],
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_rows_that_scores_choose_between_may_be_fewer(name):
    model = Chooses(FOLLOWED[name])
    coupling = find_coupling(model, torch.randn(6, 3))
    (rows,) = [group for group in coupling.groups if group.chosen]
    assert rows.size == model.rows
    assert set(rows.members) == {("score.weight", 0), ("score.bias", 0), ("table", 0)}


@pytest.mark.parametrize("name", WHOLE)
def test_rows_stay_where_it_is_not_known_that_scores_alone_choose(name):
    coupling = find_coupling(Chooses(WHOLE[name]), torch.randn(6, 3))
    assert not any(group.chosen for group in coupling.groups)
    assert ("score.weight", 0) in coupling.frozen or ("table", 0) in coupling.frozen


def test_as_many_stay_as_are_chosen():
    coupling = find_coupling(Chooses(FOLLOWED["rows by places"]), torch.randn(6, 3))
    (rows,) = [group for group in coupling.groups if group.chosen]
    assert not coupling.contradicted({rows.name: 2})
    assert coupling.contradicted({rows.name: 1}) == [rows]
    assert coupling.least(rows) == 2


# ---- normalizations ----


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


# ---- products ----


class Grouped(nn.Module):
    """Rows go to one of two matrices."""

    def __init__(self, product, inputs=8, hidden=12, outputs=8):
        super().__init__()
        self.product = product
        self.inp, self.out = nn.Linear(3, inputs), nn.Linear(outputs, 2)
        self.up = nn.Parameter(torch.randn(2, inputs, hidden))
        self.down = nn.Parameter(torch.randn(2, outputs, hidden))

    def forward(self, x):
        ends = torch.tensor([3, 7], dtype=torch.int32, device=x.device)
        inside = self.product(self.inp(x), self.up, offs=ends).relu()
        return self.out(self.product(inside, self.down.transpose(1, 2), offs=ends))


# older torch has none; then transformers calls the other
PRODUCTS = [torch.ops.transformers.grouped_mm_fallback, *([F.grouped_mm] if hasattr(F, "grouped_mm") else [])]


@pytest.mark.parametrize("product", PRODUCTS)
def test_grouped_products_lose_rows_that_kernels_can_load(product):
    coupling = find_coupling(Grouped(product), torch.randn(7, 3))
    found = {group.members: group.multiple for group in coupling.groups}
    assert found == {
        (("up", 1), ("inp.weight", 0), ("inp.bias", 0)): 4,  # of four bytes
        (("up", 2), ("down", 2)): 4,
        (("down", 1), ("out.weight", 1)): 4,
    }
    for sparsity, dead in ((0.5, ()), (None, (1, 4, 6, 7, 9))):
        model = Grouped(product)
        with torch.no_grad():
            model.up[:, :, list(dead)] = 0
            model.down[:, :, list(dead)] = 0
        before = model(torch.ones(7, 3))
        shrink(model, torch.randn(7, 3), sparsity)
        assert {size % 4 for each in (model.up, model.down) for size in each.shape[1:]} == {0}
        after = model(torch.ones(7, 3))  # the kernel takes it
        if sparsity is None:
            assert model.up.shape[2] == 8
            torch.testing.assert_close(after, before)


# ---- questions ----


@pytest.mark.parametrize("leaves", [lambda x: x.tolist(), lambda x: len(x), lambda x: x.stride()])
def test_what_leaves_torch_is_frozen(leaves):
    (x,) = arguments((3, 4))

    def asked(given):
        leaves(given)
        return given + 1

    _, _, free = traced(asked, [x])
    assert free == []


@pytest.mark.parametrize("fact", ["dtype", "device", "is_leaf", "layout", "requires_grad"])
def test_facts_cost_nothing(fact):
    (x,) = arguments((3, 4))

    def asked(given):
        assert getattr(given, fact) == getattr(torch.ones(1), fact)
        return given + 1

    _, _, free = traced(asked, [x])
    assert len(free) == 2
    assert operation(fact).asks == "facts"


# ---- shapes ----


def test_what_is_squeezed_wherever_it_is_one_keeps_more_than_one():
    class Squeezed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.down(self.up(x).squeeze())

    coupling = find_coupling(Squeezed(), torch.zeros(4, 3))
    (group,) = coupling.groups
    assert not coupling.contradicted({group.name: 2})
    assert coupling.contradicted({group.name: 1}) == [group]
