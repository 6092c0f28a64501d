"""Recurrent layers and cells, by their weights.

Law: one axis of units is in the state, and in each gate of each weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from secateur.coupling.axes import Expression, concatenated, factored, freeze, size_of, unify
from secateur.coupling.operations import rule
from secateur.coupling.trace import Call, tensors_of_tree, without_rule

__all__: list[str] = []


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
