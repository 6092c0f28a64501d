"""What torch's functions do to axes: one rule a kind of function.

Law: a rule unifies what has to be the same, freezes what the function looks along or what the code fixed by a number,
and gives the result's dimensions; so whatever leaves the axes that stay free, the call still runs and its result loses
exactly what the rule says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from secateur.coupling.axes import (
    Axis,
    Expression,
    concatenated,
    cut,
    factored,
    freeze,
    leaves,
    multiplied,
    size_of,
    unify,
)
from secateur.coupling.numbers import Known
from secateur.coupling.trace import CARRIES, INSTEAD, Call, Dims, rule, tensors_of_tree, without_rule

__all__: list[str] = []


def _places(given: Any, rank: int) -> set[int]:
    """Dimensions named by an integer, several, or none (all)."""
    if given is None:
        return set(range(rank))
    return {int(at) % max(rank, 1) for at in ([given] if isinstance(given, int) else given)}


# ---- questions ------------------------------------------------------------------------------------------------------


@rule("shape")
def _shape(call: Call) -> Any:
    return torch.Size([call.trace.number(dim) for dim in call.dims(call.args[0])])


@rule("size")
def _size(call: Call) -> Any:
    at = call.get(1, "dim")
    return _shape(call) if at is None else call.trace.number(call.dims(call.args[0])[at])


@rule("numel", "nelement")
def _numel(call: Call) -> Any:
    return call.trace.number(multiplied([Axis(1), *call.dims(call.args[0])]))


@rule("len", "tolist", "numpy", "array", "iter", "stride")
def _leaves_torch(call: Call) -> None:
    """Values or sizes that leave torch: what becomes of them is not seen."""
    for dim in call.dims(call.args[0]):
        freeze(dim, f"{call.name} takes it out of torch")


# ---- value by value -------------------------------------------------------------------------------------------------

_POINTWISE = """
    abs absolute acos acosh add addcdiv addcmul alpha_dropout and angle asin asinh atan atan2 atanh bernoulli
    bfloat16 bitwise_and bitwise_not bitwise_or bitwise_xor bool broadcast_tensors ceil celu clamp clamp_max
    clamp_min clip clone complex conj contiguous copy copysign cos cosh cpu cuda data data= deg2rad detach digamma div
    divide double dropout dropout1d dropout2d dropout3d elu empty_like eq erf erfc erfinv exp exp2 expm1 exponential
    feature_alpha_dropout feature_dropout fill fill_diagonal float float_power floor floor_divide floordiv fmax fmin
    fmod frac full_like ge gelu grad= greater greater_equal gt half hardshrink hardsigmoid hardswish hardtanh
    heaviside hypot iadd iand idiv ifloordiv imag imul int invert ior ipow isfinite isinf isnan isub itruediv ixor
    le leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and
    logical_not logical_or logical_xor logit logsigmoid long lt masked_fill maximum minimum mish mod mul multiply
    mvlgamma nan_to_num native_dropout ne neg negative nextafter normal not_equal ones_like or polar polygamma pos
    positive pow radd rand_like randint_like randn_like rdiv real reciprocal relu relu6 remainder requires_grad
    requires_grad= retain_grad rfloordiv rmod rmul ror round rpow rrelu rsqrt rsub rtruediv rxor selu sgn short
    sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign special_erf special_expit sqrt square sub
    subtract tan tanh tanhshrink threshold to true_divide truediv trunc type uniform where xlogy xor zero zeros_like
"""


def _broadcast(call: Call, tensors: Iterable[Tensor], rank: int) -> Dims:
    """Dimensions aligned from the right; those of size 1 stretch."""
    dims: Dims = [Axis(1) for _ in range(rank)]
    for tensor in tensors:
        its = call.dims(tensor)
        for at, dim in enumerate(its, start=rank - len(its)):
            if size_of(dim) == 1:
                continue
            if size_of(dims[at]) == 1:
                dims[at] = dim
            else:
                unify(dims[at], dim, call.name)
    return dims


@rule(*_POINTWISE.split())
def _pointwise(call: Call) -> None:
    tensors = call.tensors()
    if call.name == "where" and len(tensors) == 1 and len(call.args) == 1:
        without_rule(call)  # the places where it is true
        return
    for out in tensors_of_tree(call.out):
        dims = _broadcast(call, tensors, max([out.dim(), *(each.dim() for each in tensors)]))[-out.dim() or None :]
        if not out.dim():
            dims = []
        call.returns(
            [dim if size_of(dim) == size else call.fresh(size) for dim, size in zip(dims, out.shape, strict=True)], out
        )


@rule("type_as")
def _type_as(call: Call) -> None:
    call.returns(call.dims(call.args[0]))


@rule("view_as_complex")
def _view_as_complex(call: Call) -> None:
    *dims, pair = call.dims(call.args[0])
    freeze(pair, "the two parts of a complex number")
    call.returns(dims)


@rule("view_as_real")
def _view_as_real(call: Call) -> None:
    call.returns([*call.dims(call.args[0]), call.fresh(2, "the two parts of a complex number")])


@rule("prelu")
def _prelu(call: Call) -> None:
    x, weight = call.dims(call.args[0]), call.dims(call.get(1, "weight"))
    if size_of(weight[0]) > 1:
        unify(x[1], weight[0])
    call.returns(x)


# ---- made by the code -----------------------------------------------------------------------------------------------


def _sized(call: Call, number: int, why: str) -> Expression:
    """A dimension made at a size that the code asks for: it follows that number."""
    if not isinstance(number, Known):
        return call.fresh(number, f"{why} of {int(number)}, which is written in the code")
    made = Axis(int.__index__(number))
    call.trace.agree(number, made, f"{why} of {int.__index__(number)}")
    return made


@rule("zeros", "ones", "empty", "rand", "randn", "full")
def _made(call: Call) -> None:
    given = call.get(0, "size") if call.name == "full" else call.sequence(0, "size")
    sizes = [each for each in given if isinstance(each, int)]
    if len(sizes) != call.out.dim():
        without_rule(call)
    else:
        call.returns(_sized(call, size, "a tensor made") for size in sizes)


@rule("arange", "eye", "linspace", "logspace", "tensor", "scalar_tensor", "as_tensor", "from_numpy", "empty_strided")
def _counted(call: Call) -> None:
    """Values that depend on their place, or come from elsewhere: the sizes that they were made at stay."""
    for number in tree_leaves((call.args, dict(call.kwargs))):
        if isinstance(number, Known):
            number.stays(f"counted by {call.name}")
    for out in tensors_of_tree(call.out):
        if not call.trace.knows(out):
            call.returns([call.fresh(size, call.name) for size in out.shape], out)


@rule("new_zeros", "new_ones", "new_empty", "new_full")
def _new(call: Call) -> None:
    given = call.get(1, "size") if call.name == "new_full" else call.sequence(1, "size")
    given = [given] if isinstance(given, int) else given
    call.returns(_sized(call, size, "a tensor made") for size in given)


# ---- contractions ---------------------------------------------------------------------------------------------------


@rule("linear")
def _linear(call: Call) -> None:
    x, weight, bias = call.dims(call.get(0, "input")), call.dims(call.get(1, "weight")), call.get(2, "bias")
    unify(x[-1], weight[-1])
    if bias is not None and len(weight) > 1:
        unify(call.dims(bias)[0], weight[0])
    call.trace.products.append([*x, *weight[:-1]])
    call.returns([*x[:-1], *weight[:-1]])


@rule("bilinear")
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


@rule("matmul", "bmm", "mm", "imatmul", "mv", "dot", "vdot")
def _matmul(call: Call) -> None:
    _multiply(call, call.args[0], call.get(1, "other", call.kwargs.get("mat2", call.kwargs.get("tensor"))))


@rule("rmatmul")
def _rmatmul(call: Call) -> None:
    _multiply(call, call.args[1], call.args[0])


@rule("outer", "ger")
def _outer(call: Call) -> None:
    call.returns([*call.dims(call.args[0]), *call.dims(call.args[1])])


@rule("addmm", "baddbmm", "addmv", "addbmm")
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
    rank = max(len(one), len(other)) - 2
    batch: Dims = [Axis(1) for _ in range(max(rank, 0))]
    for dims in (one[:-2], other[:-2]):
        for at, dim in enumerate(dims, start=rank - len(dims)):
            if size_of(dim) > 1 and size_of(batch[at]) > 1:
                unify(batch[at], dim)
            elif size_of(dim) > 1:
                batch[at] = dim
    rows = one[-2:-1] if len(one) > 1 else []
    columns = other[-1:] if len(other) > 1 else []
    call.trace.products.append([*batch, *rows, *columns, one[-1]])
    call.returns([*batch, *rows, *columns])


@rule("einsum")
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


@rule("tensordot")
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


@rule("scaled_dot_product_attention")
def _attention(call: Call) -> None:
    query, key, value = (call.dims(call.get(at, name)) for at, name in enumerate(("query", "key", "value")))
    unify(query[-1], key[-1])
    unify(key[-2], value[-2])
    freeze(key[-2], "softmax along it")
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


@rule("conv1d", "conv2d", "conv3d")
def _convolution(call: Call) -> None:
    _convolve(call, call.get(6, "groups", 1), transposed=False)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed_convolution(call: Call) -> None:
    _convolve(call, call.get(6, "groups", 1), transposed=True)


def _convolve(call: Call, groups: int, *, transposed: bool) -> None:
    x, weight, bias = call.dims(call.get(0, "input")), call.dims(call.get(1, "weight")), call.get(2, "bias")
    spatial = len(weight) - 2
    batch, channels = x[: len(x) - spatial - 1], x[-spatial - 1]
    stride, padding = call.get(3, "stride", 1), call.get(4, "padding", 0)
    # a kernel of one place looks at each place alone
    alone = [
        size_of(kernel) == 1 and _each(stride, at) == 1 and _each(padding, at) in (0, "valid")
        for at, kernel in enumerate(weight[2:])
    ]
    for at, (dim, kernel) in enumerate(zip(x[len(x) - spatial :], weight[2:], strict=True)):
        if not alone[at]:
            freeze(dim, "a dimension that a kernel moves over")
            freeze(kernel, "a kernel")
    inputs, outputs = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
    count = int.__index__(groups)
    if count == 1:
        unify(channels, inputs)
        made = outputs
    else:
        # the side of the weight that holds all groups, and the other, which holds those of one group
        whole, own = (inputs, outputs) if transposed else (outputs, inputs)
        split, its = factored(whole, size_of(whole) // count), factored(channels, size_of(channels) // count)
        if split is None or its is None:
            without_rule(call)
            return
        unify(split[0], its[0], "groups of a convolution")
        if transposed:
            unify(channels, inputs, "groups of a convolution")
            made = multiplied([split[0], own])
        else:
            unify(its[1], own, "groups of a convolution")
            made = outputs
        call.trace.agree(groups, split[0], f"{count} groups of a convolution")
    if bias is not None:
        unify(call.dims(bias)[0], made)
    places = [
        dim if passes and size_of(dim) == size else call.fresh(size, "a place")
        for dim, passes, size in zip(x[len(x) - spatial :], alone, call.out.shape[len(batch) + 1 :], strict=True)
    ]
    moved = x[-spatial:] if transposed else places
    call.trace.products.append(
        [*batch, *moved, *weight[2:], *([channels, weight[1]] if transposed else [made, weight[1]])]
    )
    call.returns([*batch, made, *places])


def _each(given: Any, at: int) -> Any:
    """The value for one dimension of an argument given once or for each."""
    return _plain(given if isinstance(given, int | str) else given[at] if len(given) > 1 else given[0])


def _plain(number: Any) -> Any:
    """Without its origin: the rule's own arithmetic is not the model's."""
    return int.__index__(number) if isinstance(number, int) else number


@rule("embedding", "embedding_bag")
def _embedding(call: Call) -> None:
    first, second = call.get(0, "input"), call.get(1, "weight")
    tokens, weight = (second, first) if first.is_floating_point() else (first, second)
    table = call.dims(weight)
    freeze(table[0], "a vocabulary")
    if call.name == "embedding":
        call.returns([*call.dims(tokens), table[1]])
        return
    out = call.out[0] if isinstance(call.out, tuple) else call.out
    call.returns([call.fresh(out.shape[0], "bags"), table[1]], out)


# ---- recurrent layers -----------------------------------------------------------------------------------------------

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@rule(*_GATES)
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


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
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


# ---- normalizations and reductions ----------------------------------------------------------------------------------


@rule("batch_norm", "instance_norm")
def _batch_norm(call: Call) -> None:
    x = call.dims(call.get(0, "input"))
    for tensor in call.tensors()[1:]:
        if tensor.dim() == 1:
            unify(x[1], call.dims(tensor)[0])
    of_batch = call.get(5, "training", call.kwargs.get("use_input_stats", False)) or call.get(1, "running_mean") is None
    for dim in (x[2:] if call.name == "instance_norm" else [x[0], *x[2:]]) if of_batch else []:
        call.flag(dim)
    call.returns(x)


@rule("layer_norm", "rms_norm")
def _layer_norm(call: Call) -> None:
    x, shape = call.dims(call.get(0, "input")), call.get(1, "normalized_shape")
    shape = [shape] if isinstance(shape, int) else list(shape)
    normalized = x[len(x) - len(shape) :]
    for tensor in (call.get(2, "weight"), call.get(3, "bias") if call.name == "layer_norm" else None):
        if tensor is not None:
            for dim, its in zip(normalized, call.dims(tensor), strict=True):
                unify(dim, its)
    for number, dim in zip(shape, normalized, strict=True):
        call.trace.agree(number, dim, f"normalized over {int.__index__(number)}")
        call.flag(dim)
    call.returns(x)


@rule("group_norm")
def _group_norm(call: Call) -> None:
    x, groups = call.dims(call.get(0, "input")), call.get(1, "num_groups")
    for tensor in (call.get(2, "weight"), call.get(3, "bias")):
        if tensor is not None:
            unify(x[1], call.dims(tensor)[0])
    split = factored(x[1], size_of(x[1]) // int.__index__(groups))
    if split is None:
        freeze(x[1], "normalized over in groups")
    else:
        call.trace.agree(groups, split[0], f"{int.__index__(groups)} groups of a normalization")
        call.flag(split[1])
    call.returns(x)


@rule("local_response_norm")
def _local_response_norm(call: Call) -> None:
    x = call.dims(call.args[0])
    freeze(x[1], "normalized by its neighbours")
    call.returns(x)


@rule("weight_norm")
def _weight_norm(call: Call) -> None:
    direction, length = call.dims(call.args[0]), call.dims(call.args[1])
    for one, other in zip(direction, length, strict=True):
        if size_of(other) > 1:
            unify(one, other)
    call.returns(direction)


_SUMS = {"sum", "norm", "vector_norm", "linalg_vector_norm", "nansum", "count_nonzero"}
_STATISTICS = {"mean", "var", "std", "nanmean", "var_mean", "std_mean"}


@rule(*_SUMS, *_STATISTICS, "amax", "amin", "prod", "all", "any", "logsumexp", "max", "min", "median", "argmax")
@rule("argmin", "aminmax", "mode")
def _reduce(call: Call) -> None:
    x = call.dims(call.args[0])
    second = call.get(1, "other")
    if call.name in ("max", "min") and isinstance(second, Tensor):
        _pointwise(call)
        return
    given = call.get(1, "dim", call.kwargs.get("axis"))
    if call.name == "norm":
        given = call.get(2, "dim")
        if call.get(1, "p", 2) not in (2, 1, "fro", 2.0, 1.0):
            without_rule(call)
            return
    if call.name.endswith("vector_norm"):
        given = call.get(2, "dim")
        if call.get(1, "ord", 2) not in (1, 2):
            without_rule(call)
            return
    if isinstance(given, bool):  # var(unbiased)
        given = call.kwargs.get("dim")
    reduced = _places(given, len(x))
    for at in reduced:
        if call.name in _STATISTICS:
            call.flag(x[at])
        elif call.name not in _SUMS:
            freeze(x[at], f"{call.name} over it")
    for out in tensors_of_tree(call.out):
        keeps = out.dim() == len(x) and bool(reduced)
        left = [Axis(1) if at in reduced else dim for at, dim in enumerate(x) if keeps or at not in reduced]
        call.returns(left, out)
        if call.name in _STATISTICS:
            call.trace.pooled[id(out)] = [x[at] for at in reduced]


@rule("cosine_similarity", "pairwise_distance", "cdist")
def _distance(call: Call) -> None:
    tensors = call.tensors()
    one, other = call.dims(tensors[0]), call.dims(tensors[1])
    if call.name == "cdist":
        unify(one[-1], other[-1])
        batch = [dim if size_of(dim) > 1 else its for dim, its in zip(one[:-2], other[:-2], strict=True)]
        for dim, its in zip(one[:-2], other[:-2], strict=True):
            if size_of(dim) > 1 and size_of(its) > 1:
                unify(dim, its)
        call.returns([*batch, one[-2], other[-2]])
        return
    whole = _broadcast(call, tensors[:2], max(len(one), len(other)))
    at = int(call.get(2, "dim", 1)) % len(whole) if call.name == "cosine_similarity" else len(whole) - 1
    if call.name == "pairwise_distance":
        freeze(whole[-1], "a small number is added along it")
    keeps = call.out.dim() == len(whole)
    call.returns([Axis(1) if other == at else dim for other, dim in enumerate(whole) if keeps or other != at])


@rule("softmax", "log_softmax", "cumsum", "cumprod", "sort", "argsort", "topk", "flip", "softmin", "logcumsumexp")
@rule("gumbel_softmax", "kthvalue", "diff", "fliplr", "flipud", "cummax", "cummin", "unique_consecutive", "rot90")
@rule(
    "fft_fft",
    "fft_ifft",
    "fft_rfft",
    "fft_irfft",
    "fft_fftn",
    "fft_ifftn",
    "sparsemax",
    "multinomial",
    "renorm",
    "roll_one",
)
def _across(call: Call) -> None:
    """Functions that look along a dimension, or choose in it: it is frozen, and of the result it is its own."""
    x = call.dims(call.args[0])
    position = {"topk": 2, "kthvalue": 2, "diff": 2, "gumbel_softmax": 4}
    default = dict.fromkeys(("sort", "argsort", "topk", "kthvalue", "diff", "gumbel_softmax"), -1)
    if call.name.startswith("fft_"):
        position[call.name] = 2
        if not call.name.endswith("n"):
            default[call.name] = -1
    given = call.get(position.get(call.name, 1), "dim", call.kwargs.get("dims", default.get(call.name)))
    if isinstance(given, bool) or not isinstance(given, int | tuple | list) or not x:
        without_rule(call)
        return
    over = _places(given, len(x))
    for at in over:
        freeze(x[at], f"{call.name} along it")
    for out in tensors_of_tree(call.out):
        if out.dim() == len(x):
            kept = [call.fresh(out.shape[at]) if at in over else dim for at, dim in enumerate(x)]
        else:
            kept = [dim for at, dim in enumerate(x) if at not in over]
        if [size_of(dim) for dim in kept] != list(out.shape):
            without_rule(call)
            return
        call.returns(kept, out)


@rule("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "lp_pool1d", "lp_pool2d")
@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "interpolate", "upsample", "grid_sample")
@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "max_unpool1d", "max_unpool2d")
@rule("adaptive_max_pool1d_with_indices", "adaptive_max_pool2d_with_indices", "max_pool2d_with_indices")
def _pool(call: Call) -> None:
    x = call.dims(call.get(0, "input"))
    digit = next((int(each[0]) for each in call.name.split("pool")[-1:] if each[:1].isdigit()), None)
    places = min(digit if digit is not None else len(x) - 2, len(x) - 1)
    if call.name.startswith("max_unpool"):
        for dim, its in zip(x, call.dims(call.get(1, "indices")), strict=True):
            unify(dim, its)
    for dim in x[len(x) - places :]:
        freeze(dim, "a dimension that a window moves over")
    for out in tensors_of_tree(call.out):
        made = [call.fresh(size, "a place") for size in out.shape[out.dim() - places :]]
        call.returns([*x[: len(x) - places], *made], out)


# ---- movements ------------------------------------------------------------------------------------------------------


@rule("view", "reshape", "unsafe_view")
def _view(call: Call) -> None:
    if any(isinstance(each, torch.dtype) for each in call.args):
        without_rule(call)
        return
    _reshaped(call, call.sequence(1, "shape" if "shape" in call.kwargs else "size"))


@rule("flatten")
def _flatten(call: Call) -> None:
    x = call.dims(call.args[0])
    begin, end = int(call.get(1, "start_dim", 0)) % max(len(x), 1), int(call.get(2, "end_dim", -1)) % max(len(x), 1)
    call.returns([*x[:begin], multiplied(x[begin : end + 1]), *x[end + 1 :]] if x else [Axis(1)])


@rule("ravel")
def _ravel(call: Call) -> None:
    call.returns([multiplied([Axis(1), *call.dims(call.args[0])])])


@rule("unflatten")
def _unflatten(call: Call) -> None:
    at, sizes = int(call.get(1, "dim")) % call.args[0].dim(), call.get(2, "sizes")
    if not all(isinstance(size, int) for size in sizes):
        without_rule(call)
        return
    shape = [call.trace.number(dim) for dim in call.dims(call.args[0])]
    _reshaped(call, [*shape[:at], *sizes, *shape[at + 1 :]])


@rule("view_as", "reshape_as")
def _view_as(call: Call) -> None:
    _reshaped(call, [call.trace.number(dim) for dim in call.dims(call.args[1])])


def _reshaped(call: Call, asked: Sequence[int]) -> None:
    """Blocks of old dimensions become blocks of new ones, each of the size that the code asks for."""
    old, sizes = call.dims(call.args[0]), list(call.out.shape)
    if 0 in sizes:
        call.returns(call.fresh(size, "an empty view") for size in sizes)
        return
    made: Dims = []
    taken = 0
    while len(made) < len(sizes):
        block: Dims = []
        begin = len(made)
        count, wanted = 1, sizes[begin]
        ends = begin + 1
        while count != wanted or (not block and taken < len(old) and wanted != 1):
            if count < wanted:
                block.append(old[taken])
                count *= size_of(old[taken])
                taken += 1
            else:
                wanted *= sizes[ends]
                ends += 1
        whole = multiplied(block)
        parts: Dims = []
        for size in reversed(sizes[begin + 1 : ends]):
            split = factored(whole, size)
            if split is None:
                freeze(multiplied(block), "a view that cuts through it")
                parts = [call.fresh(each, "a view") for each in reversed(sizes[begin + 1 : ends])]
                whole = call.fresh(sizes[begin], "a view")
                break
            whole, inner = split
            parts.append(inner)
        made += [whole, *reversed(parts)]
    for size, dim in zip(asked, made, strict=True):
        if int.__index__(size) != -1:
            call.trace.agree(size, dim, f"a view to {int.__index__(size)}")
    call.returns(made)


@rule("permute")
def _permute(call: Call) -> None:
    x = call.dims(call.args[0])
    call.returns(x[int(at)] for at in call.sequence(1, "dims"))


@rule("transpose", "swapaxes", "swapdims")
def _transpose(call: Call) -> None:
    x = list(call.dims(call.args[0]))
    first = int(call.get(1, "dim0", call.kwargs.get("axis0", 0)))
    second = int(call.get(2, "dim1", call.kwargs.get("axis1", 0)))
    x[first], x[second] = x[second], x[first]
    call.returns(x)


@rule("t", "T", "mT", "H", "mH", "adjoint")
def _swapped(call: Call) -> None:
    x = list(call.dims(call.args[0]))
    call.returns([*x[:-2], *x[-2:][::-1]] if call.name != "T" else x[::-1])


@rule("movedim", "moveaxis")
def _movedim(call: Call) -> None:
    x = call.dims(call.args[0])
    marks = torch.empty(tuple(range(1, len(x) + 1)), device="meta")
    moved = torch.movedim(marks, call.get(1, "source"), call.get(2, "destination"))
    call.returns(x[size - 1] for size in moved.shape)


@rule("unsqueeze")
def _unsqueeze(call: Call) -> None:
    x = list(call.dims(call.args[0]))
    x.insert(int(call.get(1, "dim")) % (len(x) + 1), Axis(1))
    call.returns(x)


@rule("squeeze")
def _squeeze(call: Call) -> None:
    x = call.dims(call.args[0])
    given = call.get(1, "dim")
    over = _places(given, len(x))
    if given is None:
        for dim in x:
            freeze(dim, "squeezed wherever it is one, which it could become")
    call.returns(dim for at, dim in enumerate(x) if at not in over or size_of(dim) != 1)


@rule("expand", "broadcast_to")
def _expand(call: Call) -> None:
    _stretched(call, call.sequence(1, "size"))


@rule("expand_as")
def _expand_as(call: Call) -> None:
    _stretched(call, [call.trace.number(dim) for dim in call.dims(call.args[1])])


def _stretched(call: Call, asked: Sequence[int]) -> None:
    x = call.dims(call.args[0])
    made: Dims = []
    for at, number in enumerate(asked):
        own = at - (len(asked) - len(x))
        dim = x[own] if own >= 0 else Axis(1)
        size = int.__index__(number)
        if size_of(dim) == 1 and size > 1:
            dim = _sized(call, number, "stretched to a size")
        elif size != -1:
            call.trace.agree(number, dim, f"expanded to {size}")
        made.append(dim)
    call.returns(made)


@rule("repeat", "tile")
def _repeat(call: Call) -> None:
    x, times = call.dims(call.args[0]), call.sequence(1, "repeats" if call.name == "repeat" else "dims")
    if len(times) < len(x):
        times = [1] * (len(x) - len(times)) + times
    padded = [*(Axis(1) for _ in range(len(times) - len(x))), *x]
    call.returns(
        dim if int.__index__(count) == 1 else multiplied([_sized(call, count, "repeats"), dim])
        for count, dim in zip(times, padded, strict=True)
    )


@rule("repeat_interleave")
def _repeat_interleave(call: Call) -> None:
    x, count, at = call.dims(call.args[0]), call.get(1, "repeats"), call.get(2, "dim")
    if not isinstance(count, int) or at is None:
        without_rule(call)
        return
    made = list(x)
    made[at] = multiplied([x[at], _sized(call, count, "repeats")])
    call.returns(made)


@rule("cat", "concat", "concatenate", "hstack", "vstack", "dstack")
def _cat(call: Call) -> None:
    given = list(call.get(0, "tensors"))
    if call.name in ("hstack", "vstack", "dstack") and any(each.dim() < 3 for each in given):
        without_rule(call)
        return
    tensors = [each for each in given if each.dim() > 1 or each.numel()]
    named = {"hstack": 1, "vstack": 0, "dstack": 2}.get(call.name)
    at = named if named is not None else int(call.kwargs.get("axis", call.get(1, "dim", 0))) % call.out.dim()
    parts = [call.dims(tensor) for tensor in tensors]
    for part in parts[1:]:
        for other, dim in enumerate(part):
            if other != at:
                unify(parts[0][other], dim)
    made = list(parts[0])
    made[at] = concatenated([part[at] for part in parts])
    call.returns(made)


@rule("stack")
def _stack(call: Call) -> None:
    tensors, at = call.get(0, "tensors"), int(call.get(1, "dim", 0)) % call.out.dim()
    parts = [call.dims(tensor) for tensor in tensors]
    for part in parts[1:]:
        for first, dim in zip(parts[0], part, strict=True):
            unify(first, dim)
    made = list(parts[0])
    made.insert(at, call.fresh(len(parts), "a stack"))
    call.returns(made)


@rule("unbind")
def _unbind(call: Call) -> None:
    at = int(call.get(1, "dim", 0)) % call.args[0].dim()
    x = call.dims(call.args[0])
    freeze(x[at], "unbind along it")
    for out in call.out:
        call.returns([*x[:at], *x[at + 1 :]], out)


@rule("chunk", "tensor_split", "hsplit", "vsplit")
def _chunk(call: Call) -> None:
    count = call.get(1, "chunks", call.kwargs.get("sections"))
    if call.name in ("hsplit", "vsplit") or not isinstance(count, int):
        without_rule(call)
        return
    at = int(call.get(2, "dim", 0)) % call.args[0].dim()
    lengths = [int(out.shape[at]) for out in call.out]
    pieces = _parts(call, at, lengths)
    for length, piece in zip(lengths, pieces, strict=True):
        if length == lengths[0] == lengths[-1]:
            call.trace.agree(call.trace.number(pieces[0]), piece, f"{len(lengths)} chunks of equal length")
        else:
            freeze(piece, "chunks of different lengths")
    if isinstance(count, Known):
        count.stays("a number of chunks")


@rule("split", "split_with_sizes")
def _split(call: Call) -> None:
    at = int(call.get(2, "dim", 0)) % call.args[0].dim()
    lengths = [int(out.shape[at]) for out in call.out]
    given = call.get(1, "split_size_or_sections", call.kwargs.get("split_size", call.kwargs.get("split_sizes")))
    asked = list(given) if isinstance(given, tuple | list) else [given] * len(call.out)
    for number, piece, length in zip(asked, _parts(call, at, lengths), lengths, strict=True):
        if int.__index__(number) == length:
            call.trace.agree(number, piece, f"split by {length}")
        else:
            freeze(piece, "the rest of a split")


@rule("narrow")
def _narrow(call: Call) -> None:
    x, at = call.dims(call.args[0]), int(call.get(1, "dim")) % call.args[0].dim()
    begin, length = call.get(2, "start"), call.get(3, "length")
    if isinstance(begin, Tensor):
        without_rule(call)
        return
    piece = _sliced(call, x[at], slice(begin, begin + length, None))
    call.returns([*x[:at], piece, *x[at + 1 :]])


def _parts(call: Call, at: int, lengths: Sequence[int]) -> Dims:
    x = call.dims(call.args[0])
    rest: Expression = x[at]
    pieces: Dims = []
    for length in lengths:
        split = cut(rest, length)
        if split is None:
            freeze(x[at], f"{call.name} cuts through it")
            pieces = [call.fresh(each) for each in lengths]
            break
        pieces.append(split[0])
        rest = split[1]
    for piece, out in zip(pieces, call.out, strict=True):
        call.returns([*x[:at], piece, *x[at + 1 :]], out)
    return pieces


@rule("getitem")
def _getitem(call: Call) -> None:
    dims = _indexed(call, call.dims(call.args[0]), call.args[1])
    if dims is None or [size_of(dim) for dim in dims] != list(call.out.shape):
        without_rule(call)
    else:
        call.returns(dims)


@rule("setitem")
def _setitem(call: Call) -> None:
    target = _indexed(call, call.dims(call.args[0]), call.args[1])
    value = call.args[2]
    if target is None:
        without_rule(call)
    elif isinstance(value, Tensor):
        its = call.dims(value)
        for dim, other in zip(reversed(target), reversed(its), strict=False):
            if size_of(other) > 1:
                unify(dim, other, "written into")


def _indexed(call: Call, x: Dims, index: Any) -> Dims | None:
    """The dimensions of ``x[index]``; None where there is no rule."""
    indices = list(index) if isinstance(index, tuple) else [index]
    indices = [torch.as_tensor(each) if isinstance(each, list) else each for each in indices]
    taking = sum(
        each.dim() if isinstance(each, Tensor) and each.dtype == torch.bool else 1
        for each in indices
        if each is not None and each is not Ellipsis and not isinstance(each, bool)
    )
    if taking > len(x) or any(isinstance(each, bool) for each in indices):
        return None
    if Ellipsis not in [each if not isinstance(each, Tensor) else None for each in indices]:
        indices.append(Ellipsis)
    made: Dims = []
    chosen: list[Tensor] = []
    first_chosen = None
    at = 0
    for each in indices:
        if each is Ellipsis:
            made += x[at : at + len(x) - taking]
            at += len(x) - taking
        elif each is None:
            made.append(Axis(1))
        elif isinstance(each, slice):
            made.append(_sliced(call, x[at], each))
            at += 1
        elif isinstance(each, Tensor) and each.dtype == torch.bool:
            return None
        elif isinstance(each, Tensor):
            freeze(x[at], "chosen by a tensor")
            if chosen and first_chosen != len(made):
                return None  # tensors apart from each other: their dimensions come first
            first_chosen = len(made)
            chosen.append(each)
            at += 1
        elif isinstance(each, int):
            if isinstance(each, Known):
                each.stays("an index")
            freeze(x[at], "one of it is taken by its number")
            at += 1
        else:
            return None
    if chosen:
        assert first_chosen is not None
        made[first_chosen:first_chosen] = _broadcast(call, chosen, max(each.dim() for each in chosen))
    return made


def _sliced(call: Call, dim: Expression, asked: slice) -> Expression:
    """A piece of a dimension, whose ends are where the code says."""
    size = size_of(dim)
    if any(isinstance(each, Tensor) for each in (asked.start, asked.stop, asked.step)):
        freeze(dim, "a slice by a tensor")
        asked = slice(*(None if each is None else int(each) for each in (asked.start, asked.stop, asked.step)))
    begin, end, step = slice(*(_plain(each) for each in (asked.start, asked.stop, asked.step))).indices(size)
    length = len(range(begin, end, step))
    if begin == 0 and asked.stop is None and step == 1:
        return dim
    if all(axis.reasons or axis.size == 1 for axis in leaves(dim)):
        return call.fresh(length, "a slice")
    if step > 1 and asked.stop is None and size % step == 0 and begin < step:
        split = factored(dim, step)  # every step-th: the inner ones stay as they are
        if split is not None:
            freeze(split[1], f"every {step}th is taken")
            return split[0]
    if step != 1:
        freeze(dim, "a slice with steps")
        return call.fresh(length, "a slice with steps")
    head = cut(dim, begin)
    body = cut(head[1], length) if head is not None else None
    if head is None or body is None:
        freeze(dim, "a slice that cuts through it")
        return call.fresh(length, "a slice")
    for given, before in ((asked.start, head[0]), (asked.stop, concatenated([head[0], body[0]]))):
        if given is None:
            continue
        number = int.__index__(given)
        if number >= 0 and number <= size:
            call.trace.agree(given, before, f"a slice at {number}")
        elif -size <= number < 0:
            after = concatenated([body[0], body[1]]) if before is head[0] else body[1]
            call.trace.agree(-given, after, f"a slice at {number}")
        else:
            freeze(dim, "a slice beyond its end")
    return body[0]


@rule("select")
def _select(call: Call) -> None:
    x, at = call.dims(call.args[0]), int(call.get(1, "dim")) % call.args[0].dim()
    freeze(x[at], "one of it is taken by its number")
    call.returns([*x[:at], *x[at + 1 :]])


@rule("index_select")
def _index_select(call: Call) -> None:
    x, at = call.dims(call.args[0]), int(call.get(1, "dim")) % call.args[0].dim()
    freeze(x[at], "chosen by a tensor")
    call.returns([*x[:at], *call.dims(call.get(2, "index")), *x[at + 1 :]])


@rule("gather", "take_along_dim")
def _gather(call: Call) -> None:
    named = call.name == "gather"
    index, at = (call.get(2, "index"), call.get(1, "dim")) if named else (call.get(1, "indices"), call.get(2, "dim"))
    if at is None:
        without_rule(call)
        return
    x, its = call.dims(call.args[0]), call.dims(index)
    at = int(at) % len(x)
    for other, (dim, place) in enumerate(zip(x, its, strict=True)):
        if other == at:
            freeze(dim, "chosen by a tensor")
        elif size_of(dim) == size_of(place):
            unify(dim, place)
        else:
            freeze(dim, "chosen by a tensor")
    call.returns([dim if size_of(dim) > 1 or named else x[other] for other, dim in enumerate(its)])


@rule("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy")
def _scatter(call: Call) -> None:
    """Values written at places that a tensor says: what is written into along that dimension stays."""
    x, at = call.dims(call.args[0]), int(call.get(1, "dim")) % call.args[0].dim()
    source = call.get(3, "src", call.kwargs.get("source", call.kwargs.get("tensor")))
    others = [call.dims(source)] if isinstance(source, Tensor) else []
    if call.name.startswith("scatter"):
        others.append(call.dims(call.get(2, "index")))
    freeze(x[at], "written at places that a tensor says")
    for its in others:
        freeze(its[at], "written at places that a tensor says")
        for number, (dim, other) in enumerate(zip(x, its, strict=True)):
            if number != at and size_of(dim) == size_of(other):
                unify(dim, other, call.name)
            elif number != at:
                freeze(dim, "written in part")
                freeze(other, "written in part")
    call.returns(x)


@rule("masked_scatter")
def _masked_scatter(call: Call) -> None:
    """Whole rows that a mask chooses are replaced, one after the other, by those of another tensor."""
    target, mask, source = call.args[0], call.get(1, "mask"), call.get(2, "source")
    if mask.shape != target.shape or mask.stride(-1) != 0 or source.shape[-1:] != target.shape[-1:]:
        without_rule(call)
        return
    x, its, rows = call.dims(target), call.dims(mask), call.dims(source)
    for dim in (*x[:-1], *its[:-1], *rows[:-1]):
        freeze(dim, "chosen by a mask")
    unify(x[-1], its[-1])
    unify(x[-1], rows[-1])
    call.returns(x)


@rule("one_hot")
def _one_hot(call: Call) -> None:
    call.returns([*call.dims(call.args[0]), call.fresh(call.out.shape[-1], "classes")])


@rule("diagonal", "diag", "diag_embed", "tril", "triu")
def _diagonal(call: Call) -> None:
    x = call.dims(call.args[0])
    for dim in x[-2:] if call.name in ("tril", "triu") else x:
        freeze(dim, "a diagonal")
    if call.name in ("tril", "triu"):
        call.returns(x)
    else:
        call.returns(call.fresh(size, "a diagonal") for size in call.out.shape)


@rule("pad", "constant_pad_nd")
def _pad(call: Call) -> None:
    x, widths = call.dims(call.args[0]), list(call.get(1, "pad"))
    made = list(x)
    for number in range(len(widths) // 2):
        before, after = widths[2 * number : 2 * number + 2]
        at = len(x) - 1 - number
        plain = int.__index__(before), int.__index__(after)
        if plain == (0, 0):
            continue
        if min(plain) < 0 or (call.name == "pad" and call.get(2, "mode", "constant") != "constant"):
            freeze(x[at], "padded")
            made[at] = call.fresh(call.out.shape[at], "padded")
        else:
            made[at] = concatenated([_sized(call, before, "padding"), x[at], _sized(call, after, "padding")])
    call.returns(made)


@rule("pixel_shuffle")
def _pixel_shuffle(call: Call) -> None:
    x, factor = call.dims(call.args[0]), int(call.get(1, "upscale_factor"))
    split = factored(x[-3], factor * factor)
    if split is None:
        without_rule(call)
        return
    for dim in (split[1], *x[-2:]):
        freeze(dim, "pixels")
    call.returns([*x[:-3], split[0], *(call.fresh(size, "pixels") for size in call.out.shape[-2:])])


@rule("pixel_unshuffle")
def _pixel_unshuffle(call: Call) -> None:
    x, factor = call.dims(call.args[0]), int(call.get(1, "downscale_factor"))
    for dim in x[-2:]:
        freeze(dim, "pixels")
    made = multiplied([x[-3], call.fresh(factor * factor, "pixels")])
    call.returns([*x[:-3], made, *(call.fresh(size, "pixels") for size in call.out.shape[-2:])])


@rule("unfold", "im2col")
def _unfold(call: Call) -> None:
    x = call.dims(call.args[0])
    if call.out.dim() == len(x) + 1:  # Tensor.unfold(dimension, size, step)
        at = int(call.get(1, "dimension")) % len(x)
        freeze(x[at], "windows move over it")
        places = call.fresh(call.out.shape[at], "windows")
        call.returns([*x[:at], places, *x[at + 1 :], call.fresh(call.out.shape[-1], "windows")])
        return
    for dim in x[-2:]:
        freeze(dim, "windows move over it")
    window = call.out.shape[-2] // size_of(x[-3])
    patches = multiplied([x[-3], call.fresh(window, "windows")])
    call.returns([*x[:-3], patches, call.fresh(call.out.shape[-1], "windows")])


@rule("fold", "col2im")
def _fold(call: Call) -> None:
    x = call.dims(call.args[0])
    split = factored(x[-2], size_of(x[-2]) // call.out.shape[-3])
    if split is None:
        without_rule(call)
        return
    freeze(split[1], "windows")
    freeze(x[-1], "windows")
    call.returns([*x[:-2], split[0], *(call.fresh(size, "windows") for size in call.out.shape[-2:])])


@rule("roll")
def _roll(call: Call) -> None:
    x = call.dims(call.args[0])
    given = call.get(2, "dims")
    for at in _places(None if given == () else given, len(x)):
        freeze(x[at], "rolled")
    call.returns(x)


# ---- functions that are followed as others --------------------------------------------------------------------------


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * gate.sigmoid()


def _channel_shuffle(x: Tensor, groups: int) -> Tensor:
    split = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return split.transpose(1, 2).reshape(x.shape)


INSTEAD.update(glu=_glu, channel_shuffle=_channel_shuffle, native_channel_shuffle=_channel_shuffle)
CARRIES.update(_POINTWISE.split())
CARRIES.update({"unsqueeze", "squeeze", "getitem", "view", "reshape", "expand", "expand_as", "flatten"})
CARRIES.update({"permute", "transpose", "t"})
