"""The inputs of weights that do not meet tokens as they come: patches of convolutions, the states of recurrence.

Law: what is given are the rows X of which an output, or a gate, is X · weight', weights as (outputs, inputs · kernel);
hidden states are those that the network itself computes in evaluation mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

CONVOLUTIONS: dict[Any, int] = {functional.conv1d: 1, functional.conv2d: 2, functional.conv3d: 3}
_CELLS = frozenset([torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell])
_LAYERS = frozenset([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu])
RECURRENT: frozenset[Any] = _CELLS | _LAYERS
_AT_ONCE = 1 << 24  # entries of patches: a convolution's inputs are unfolded for so many examples at a time


def unfolded(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """A view (examples, channels, *places, *kernel) of a padded input."""
    for dim, (size, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, apart * (size - 1) + 1, step)[..., ::apart]
    return x


@dataclass(frozen=True, eq=False)
class Patches:
    """The unfolded inputs (patches) of one group of a convolution; rows are made a few examples at a time."""

    x: Tensor  # (examples, channels, *places), padded
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    group: int
    groups: int
    own: bool  # nobody else writes to x

    def copied(self) -> Patches:
        """With inputs of its own, which stay as they are now."""
        return self if self.own else replace(self, x=self.x.detach().clone(), own=True)

    def columns(self, start: int, stop: int) -> Patches:
        """What meets these inputs of the weight alone, whole channels of the group."""
        size = math.prod(self.kernel)
        first = self.group * (self.x.shape[1] // self.groups)
        return replace(self, x=self.x[:, first + start // size : first + stop // size], group=0, groups=1)

    def rows(self) -> Iterator[Tensor]:
        """(examples · places, channels of the group · kernel)."""
        channels = self.x.shape[1] // self.groups
        own = self.x.detach()[:, self.group * channels : (self.group + 1) * channels]
        size = max(1, own[:1].numel() * math.prod(self.kernel))
        for part in torch.split(own, max(1, _AT_ONCE // size)):
            spatial = len(self.kernel)
            patches = unfolded(part, self.kernel, self.stride, self.dilation).movedim(1, spatial + 1)
            yield patches.flatten(spatial + 1).flatten(0, spatial)


def patches_of(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, list[Patches]] | None:
    """The weight of a convolution that is about to be computed, and of each group what that is multiplied with.

    >>> convolution = torch.nn.Conv2d(2, 5, 3)
    >>> arguments = (torch.ones(1, 2, 4, 4), convolution.weight)
    >>> weight, patches = patches_of(torch.nn.functional.conv2d, arguments, {})
    >>> weight is convolution.weight, len(patches)
    (True, 1)
    """
    spatial = CONVOLUTIONS[func]
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    x, weight = given["input"], given["weight"]
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or not x.is_floating_point():
        return None
    stride, dilation = (_each(given.get(name, 1), spatial) for name in ("stride", "dilation"))
    kernel, groups, padding = tuple(weight.shape[2:]), int(given.get("groups", 1)), given.get("padding", 0)
    if padding == "same":
        total = [step * (length - 1) for step, length in zip(dilation, kernel, strict=True)]
        around = [(each // 2, each - each // 2) for each in total]
    else:
        around = [(each, each) for each in _each(0 if padding == "valid" else padding, spatial)]
    x = x[None] if x.dim() == spatial + 1 else x
    padded = any(map(any, around))
    if padded:
        x = functional.pad(x, [side for pair in reversed(around) for side in pair])
    elif groups > 1:
        x = x.clone()  # once for all groups
    own = padded or groups > 1
    return weight, [Patches(x, kernel, stride, dilation, group, groups, own) for group in range(groups)]


def _each(value: Any, count: int) -> tuple[int, ...]:
    found = tuple(value) if isinstance(value, tuple | list | torch.Size) else (value,)
    return tuple(map(int, found * count if len(found) == 1 else found))


def gates(func: Any, args: Sequence[Any]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """``(name, weight, what it is multiplied with)`` of each matrix of gates of a recurrent call, layer by layer; names
    are those that torch's modules have for them.

    Of a call over a sequence each layer is run by itself, so that its outputs are the states that its own weights meet
    at the next step; one that nobody asks for is not run. Projections (``weight_hr``) are not among them.

    >>> cell = torch.nn.RNNCell(2, 3)
    >>> given = torch.ones(1, 2), torch.zeros(1, 3), cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh
    >>> [(name, tuple(rows.shape)) for name, _, rows in gates(torch.rnn_tanh_cell, given)]
    [('weight_ih', (1, 2)), ('weight_hh', (1, 3))]
    """
    if func in _CELLS:
        x, state, input_weight, state_weight = args[:4]
        yield "weight_ih", input_weight, x
        yield "weight_hh", state_weight, state[0] if isinstance(state, tuple | list) else state
        return
    is_lstm = func is torch.lstm
    packed = isinstance(args[1], Tensor) and (is_lstm or isinstance(args[2], Tensor))
    x, sizes = args[0], args[1] if packed else None
    state, weights, has_biases, layers, _, _, bidirectional = args[2 if packed else 1 :][:7]
    batch_first = not packed and bool(args[8])
    ways, states = 2 if bidirectional else 1, list(state) if is_lstm else [state]
    each = len(weights) // (layers * ways)
    for layer in range(layers):
        own = weights[layer * ways * each : (layer + 1) * ways * each]
        for way in range(ways):
            yield f"weight_ih_l{layer}{'_reverse' * way}", own[way * each], x
        first = [part[layer * ways : (layer + 1) * ways] for part in states]
        given = tuple(first) if is_lstm else first[0]
        rest = (has_biases, 1, 0.0, False, bidirectional)
        ran = func(x, sizes, given, own, *rest) if packed else func(x, given, own, *rest, batch_first)
        x = ran[0]
        width = x.shape[-1] // ways
        for way in range(ways):
            outputs = x[..., way * width : (way + 1) * width]
            before = _states_before(outputs, first[0][way], sizes, batch_first, backwards=way == 1)
            yield f"weight_hh_l{layer}{'_reverse' * way}", own[way * each + 1], before


def _states_before(
    outputs: Tensor, first: Tensor, sizes: Tensor | None, batch_first: bool, *, backwards: bool
) -> Tensor:
    """What a layer's state was before each step, given what it was after it, and before the first."""
    if sizes is None:
        time = 1 if batch_first and outputs.dim() == 3 else 0
        length = outputs.shape[time]
        start = first.unsqueeze(time) if outputs.dim() == 3 else first.reshape(1, -1)
        kept = outputs.narrow(time, 1 if backwards else 0, length - 1)
        return torch.cat([kept, start] if backwards else [start, kept], time)
    steps = list(torch.split(outputs, sizes.tolist()))
    if backwards:  # a shorter sequence begins where it ends
        later = [*steps[1:], outputs[:0]]
        return torch.cat([torch.cat([two, first[len(two) : len(one)]]) for one, two in zip(steps, later, strict=True)])
    earlier = [first, *steps[:-1]]
    return torch.cat([before[: len(one)] for one, before in zip(steps, earlier, strict=True)])


class Calls(TorchFunctionMode):
    """Hands each call of these functions that is made within to another, before it is computed."""

    def __init__(self, of: Container[Any], see: Callable[[Any, Sequence[Any], Mapping[str, Any]], None]) -> None:
        super().__init__()
        self.of, self.see = of, see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.of:
            self.see(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
