"""Attention: widths of queries and keys, of values, and heads that share keys."""

import functools

import pytest
import torch.nn.functional as F

from secateur.coupling import leaves
from support.traced import arguments, assert_a_call_on_slices_gives_the_slices_of_its_result, traced

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
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
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)


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
