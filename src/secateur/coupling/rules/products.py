"""Linear layers, products of matrices, attention as one function, recurrent layers and cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from secateur.coupling.axes import Axis, Expression, concatenated, factored, freeze, size_of, unify
from secateur.coupling.operations import Weight, declare, rule
from secateur.coupling.trace import Call, Dims, tensors_of_tree, without_rule

# ---- Linear layers and products of matrices.
#
# Law: what is summed over is one axis of both sides; the others are the result's.

_AT_ONCE = 16  # bytes that kernels of grouped products load: the rows of what they are given have to be multiples


@rule("linear", rows=Weight((1, "weight"), (2, "bias")), stream="contraction")
def _linear(call: Call) -> None:
    x, weight, bias = call.dims(call.get(0, "input")), call.dims(call.get(1, "weight")), call.get(2, "bias")
    unify(x[-1], weight[-1])
    if bias is not None and len(weight) > 1:
        unify(call.dims(bias)[0], weight[0])
    call.trace.products.append([*x, *weight[:-1]])
    call.returns([*x[:-1], *weight[:-1]])


@rule("bilinear", stream="contraction")
def _bilinear(call: Call) -> None:
    first, second = call.dims(call.get(0, "input1")), call.dims(call.get(1, "input2"))
    weight, bias = call.dims(call.get(2, "weight")), call.get(3, "bias")
    unify(first[-1], weight[1])
    unify(second[-1], weight[2])
    if bias is not None:
        unify(call.dims(bias)[0], weight[0])
    for one, other in zip(first[:-1], second[:-1], strict=True):
        unify(one, other)
    call.returns([*first[:-1], weight[0]])


@rule("vdot")
@rule("bmm", "imatmul", "mv", "dot", stream="contraction")
@rule("matmul", rows=Weight((1, "other"), dim=-1), stream="contraction")
@rule("mm", rows=Weight((1, "mat2"), dim=-1), stream="contraction")
def _matmul(call: Call) -> None:
    _multiply(call, call.args[0], call.get(1, "other", call.kwargs.get("mat2", call.kwargs.get("tensor"))))


@rule("rmatmul", stream="contraction")
def _rmatmul(call: Call) -> None:
    _multiply(call, call.args[1], call.args[0])


@rule("outer", "ger")
def _outer(call: Call) -> None:
    call.returns([*call.dims(call.args[0]), *call.dims(call.args[1])])


@rule("baddbmm", "addmv", "addbmm", stream="contraction")
@rule("addmm", rows=Weight((2, "mat2"), (0, "input"), dim=-1), stream="contraction")
def _addmm(call: Call) -> None:
    names = ("vec",) if call.name == "addmv" else ("mat2", "batch2")
    first = call.get(1, "mat1", call.kwargs.get("batch1", call.kwargs.get("mat")))
    second = call.get(2, names[0], call.kwargs.get(names[-1]))
    if call.name == "addbmm" or first is None or second is None:
        without_rule(call)
        return
    _multiply(call, first, second)
    for dim, its in zip(reversed(call.dims(call.out)), reversed(call.dims(call.args[0])), strict=False):
        if size_of(its) > 1:
            unify(dim, its)


def _multiply(call: Call, first: Tensor, second: Tensor) -> None:
    one, other = call.dims(first), call.dims(second)
    unify(one[-1], other[-2] if len(other) > 1 else other[0])
    batch = _batch(one, other)
    rows = one[-2:-1] if len(one) > 1 else []
    columns = other[-1:] if len(other) > 1 else []
    call.trace.products.append([*batch, *rows, *columns, one[-1]])
    call.returns([*batch, *rows, *columns])


def _batch(one: Dims, other: Dims) -> Dims:
    """The dimensions of many matrices that meet others, each its own or all the same."""
    rank = max(len(one), len(other)) - 2
    batch: Dims = [Axis(1) for _ in range(max(rank, 0))]
    for dims in (one[:-2], other[:-2]):
        for at, dim in enumerate(dims, start=rank - len(dims)):
            if size_of(dim) > 1 and size_of(batch[at]) > 1:
                unify(batch[at], dim)
            elif size_of(dim) > 1:
                batch[at] = dim
    return batch


@rule("linalg_solve_triangular")
def _solve_triangular(call: Call) -> None:
    """Each column of the right side is solved by itself, along rows that all meet each other."""
    if call.kwargs.get("left") is False:
        without_rule(call)
        return
    one, other = call.dims(call.args[0]), call.dims(call.get(1, "B"))
    for dim in (*one[-2:], other[-2]):
        freeze(dim, "solved along it")
    call.returns([*_batch(one, other), *other[-2:]])


def _group_by_group(_func: Any, x: Tensor, weight: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """Of any width, and in any precision."""
    made = x.new_zeros(x.shape[0], weight.shape[-1])
    begin = 0
    for number, end in enumerate(offs.tolist()):
        made[begin:end] = x[begin:end] @ weight[number]
        begin = end
    return made


def _of_any_precision(func: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Without values there is no kernel, which would have one precision only."""
    made: Tensor = x.new_empty(x.shape[0], weight.shape[-1]) if x.is_meta else func(x, weight, *args, **kwargs)
    return made


# the second is what transformers calls where torch has no kernel: before 2.9, and before 2.11 at odd addresses
@rule("grouped_mm", "grouped_mm_fallback", stream="contraction", proved=_group_by_group, steady=_of_any_precision)
def _grouped_mm(call: Call) -> None:
    """Rows in groups, each times a matrix of its own; where the groups end is counted."""
    x, weight, ends = call.dims(call.args[0]), call.dims(call.args[1]), call.dims(call.get(2, "offs"))
    if len(x) != 2 or len(weight) != 3 or call.kwargs.get("bias") is not None:
        without_rule(call)
        return
    unify(weight[0], ends[0])
    unify(x[1], weight[1])
    bytes_at_once = max(1, _AT_ONCE // call.args[0].element_size())
    for dim in (x[1], weight[1], weight[2]):
        call.trace.multiples.append((dim, bytes_at_once))
    call.trace.products.append([x[0], weight[1], weight[2]])
    call.returns([x[0], weight[2]])


@rule("einsum", stream="contraction")
def _einsum(call: Call) -> None:
    equation, tensors = call.args[0], list(call.args[1:])
    if len(tensors) == 1 and isinstance(tensors[0], tuple | list):
        tensors = list(tensors[0])
    if not isinstance(equation, str):
        without_rule(call)
        return
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    words = inputs.split(",")
    # "..." stands for the digits that are left, counted from the right
    spread = [tensor.dim() - len(word.replace("...", "")) for word, tensor in zip(words, tensors, strict=True)]
    most = max([0, *(count for word, count in zip(words, spread, strict=True) if "..." in word)])
    digits = [chr(0x100 + number) for number in range(most)]
    words = [word.replace("...", "".join(digits[most - count :])) for word, count in zip(words, spread, strict=True)]
    letters: dict[str, Expression] = {}
    for word, tensor in zip(words, tensors, strict=True):
        for letter, dim in zip(word, call.dims(tensor), strict=True):
            if letter not in letters or size_of(letters[letter]) == 1:
                letters[letter] = dim
            elif size_of(dim) > 1:
                unify(letters[letter], dim)
    if arrow:
        output = output.replace("...", "".join(digits))
    else:
        joined = "".join(words)
        output = "".join(digits + sorted(each for each in letters if joined.count(each) == 1 and each not in digits))
    if len(words) > 1:
        call.trace.products.append(list(letters.values()))
    call.returns(letters[letter] for letter in output)


@rule("tensordot", stream="contraction")
def _tensordot(call: Call) -> None:
    one, other, over = call.dims(call.args[0]), call.dims(call.args[1]), call.get(2, "dims", 2)
    if isinstance(over, int):
        over = (range(len(one) - over, len(one)), range(over))
    if isinstance(over, Tensor):
        without_rule(call)
        return
    left, right = ([int(at) % len(dims) for at in each] for each, dims in zip(over, (one, other), strict=True))
    for first, second in zip(left, right, strict=True):
        unify(one[first], other[second])
    call.returns(
        [dim for at, dim in enumerate(one) if at not in left] + [dim for at, dim in enumerate(other) if at not in right]
    )


# ---- Attention as one function.
#
# Law: queries and keys share their width, keys and values their places, which the softmax keeps whole.


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
    scale = call.get(6, "scale")
    if isinstance(scale, float):
        call.trace.multiplied_by(scale, call.get(0, "query"), call.get(1, "key"), query[-1])
    elif scale is None:
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
            else:
                call.trace.told(split[1], "queries of a key")
        batch.append(query[at] if size_of(query[at]) >= size_of(key[at]) else key[at])
    mask = call.get(3, "attn_mask")
    if mask is not None:
        for dim, its in zip(reversed([*batch, query[-2], key[-2]]), reversed(call.dims(mask)), strict=False):
            if size_of(its) > 1:
                unify(dim, its)
    call.trace.products += [[*batch, *query[-2:], key[-2]], [*batch, query[-2], *value[-2:]]]
    call.returns([*batch, query[-2], value[-1]])


declare("multi_head_attention_forward", stream="contraction")  # what it is written in has its rules


# ---- Recurrent layers and cells, by their weights.
#
# Law: one axis of units is in the state, and in each gate of each weight.


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", stream="contraction")
def _recurrent(call: Call) -> None:
    packed = isinstance(call.args[1], Tensor) and isinstance(call.args[3], list | tuple)
    data, hidden, weights, biased, layers = (call.args[at] for at in ((0, 2, 3, 4, 5) if packed else (0, 1, 2, 3, 4)))
    both = bool(call.args[8 if packed else 7])
    states = list(hidden) if isinstance(hidden, tuple | list) else [hidden]
    directions = 2 if both else 1
    each = len(weights) // (int(layers) * directions)
    if each != (4 if biased else 2):  # with projections
        without_rule(call)
        return
    x = call.dims(data)
    unit = call.dims(states[0])[-1]
    for state in states[1:]:
        unify(call.dims(state)[-1], unit)
    for state in states:
        freeze(call.dims(state)[0], "layers")
        if len(x) == 3:
            unify(call.dims(state)[1], x[0 if call.args[8] else 1], "a batch")
    below = x[-1]
    for layer in range(int(layers)):
        for direction in range(directions):
            at = (layer * directions + direction) * each
            _gates(call, weights[at : at + each], below, unit)
        below = concatenated([unit] * directions)
    outs = list(call.out)
    call.returns([*x[:-1], below], outs[0])
    for out, state in zip(outs[1:], states, strict=True):
        call.returns(call.dims(state), out)


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", stream="contraction")
def _cell(call: Call) -> None:
    x, hidden = call.dims(call.args[0]), call.args[1]
    states = list(hidden) if isinstance(hidden, tuple | list) else [hidden]
    unit = call.dims(states[0])[-1]
    for state in states:
        for dim, its in zip(call.dims(state), [*x[:-1], unit], strict=True):
            unify(dim, its)
    _gates(call, [each for each in call.args[2:] if each is not None], x[-1], unit)
    for out in tensors_of_tree(call.out):
        call.returns([*x[:-1], unit], out)


def _gates(call: Call, weights: Sequence[Tensor], below: Expression, unit: Expression) -> None:
    for number, weight in enumerate(weights):
        dims = call.dims(weight)
        split = factored(dims[0], size_of(unit))
        if split is None or not unify(split[1], unit, "gates"):
            freeze(dims[0], "gates")
            freeze(unit, "gates")
            continue
        freeze(split[0], "gates")
        if len(dims) > 1:
            unify(dims[1], below if number == 0 else unit)
