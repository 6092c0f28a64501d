"""Attention as one function.

Law: queries and keys share their width, keys and values their places, which the softmax keeps whole.
"""

from __future__ import annotations

from typing import Any

from secateur.coupling.axes import factored, freeze, size_of, unify
from secateur.coupling.operations import declare, rule
from secateur.coupling.trace import Call, Dims

__all__: list[str] = []


def _without_dropout(func: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) > 4:
        args = (*args[:4], 0.0, *args[5:])
    return func(*args, **{**kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {})})


@rule("scaled_dot_product_attention", stream="contraction", steady=_without_dropout)
def _attention(call: Call) -> None:
    query, key, value = (call.dims(call.get(at, name)) for at, name in enumerate(("query", "key", "value")))
    unify(query[-1], key[-1])
    unify(key[-2], value[-2])
    freeze(key[-2], "softmax along it")
    if call.get(5, "is_causal", False):
        freeze(query[-2], "a causal mask counts from it")
    if call.get(6, "scale") is None:
        why = "attention is scaled by the width of a head"
        call.trace.divided_by_root(call.get(0, "query"), call.get(1, "key"), query[-1], why)
    batch: Dims = []
    for at in range(-len(query), -2):
        unify(key[at], value[at])
        if size_of(query[at]) == size_of(key[at]):
            unify(query[at], key[at])
        elif call.get(7, "enable_gqa", False):
            split = factored(query[at], size_of(query[at]) // size_of(key[at]))
            if split is None or not unify(split[0], key[at]):
                freeze(query[at], "grouped queries")
                freeze(key[at], "grouped queries")
        batch.append(query[at] if size_of(query[at]) >= size_of(key[at]) else key[at])
    mask = call.get(3, "attn_mask")
    if mask is not None:
        for dim, its in zip(reversed([*batch, query[-2], key[-2]]), reversed(call.dims(mask)), strict=False):
            if size_of(its) > 1:
                unify(dim, its)
    call.trace.products += [[*batch, *query[-2:], key[-2]], [*batch, query[-2], *value[-2:]]]
    call.returns([*batch, query[-2], value[-1]])


declare("multi_head_attention_forward", stream="contraction")  # what it is written in has its rules
