"""Which call of a pass took which tensors, in which modules; and passes in which terms of its sums are zero.

Law: a value is what a tensor holds between two writes; sums of real numbers are numbered in the order of their calls,
here and wherever terms become zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from secateur.coupling.axes import Expression
from secateur.coupling.operations import Operation, name_of, operation
from secateur.coupling.trace import Trace, tensors_of_tree
from secateur.support import private, seed_torch


@dataclass
class Step:
    """A call of a function of torch: what it took, made and wrote over."""

    name: str
    inputs: list[tuple[int | None, int]]  # (position among the arguments, value)
    outputs: list[int]
    visit: int  # the innermost call of a module
    mutated: set[int]  # values that it wrote over
    number: int = -1  # of a sum
    alive: bool = False


@dataclass
class Value:
    """What a tensor holds, from one write to the next."""

    producer: int  # number of the call, -1 for what was there before
    follows: bool  # the model's inputs
    real: bool
    dims: list[Expression]
    consumers: list[int] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)  # the calls of modules in which the code asked for its shape
    escapes: bool = False


@dataclass
class Visit:
    """One call of a module."""

    module: nn.Module | None
    inside: frozenset[str]  # the paths of modules that it belongs to: those running, and those that hold them
    tensors: list[tuple[int | str, int, list[Expression]]] = field(default_factory=list)  # (argument, value, dims)
    arguments: int = 0
    returns: Any = None  # the structure, with values for tensors


class Strange:
    """Stands for what a module returned beside tensors in plain containers."""


class SameDraws(TorchFunctionMode):
    """Makes random functions independent of how many numbers were drawn before, such as by a removed branch.

    ``zeroed`` are ``(number of a sum, position)`` of the terms that become zero. ``seen`` is called with the number
    and both sides of every sum, before it is taken; what it returns is called with the result.
    """

    def __init__(
        self,
        zeroed: Iterable[tuple[int, int]] = (),
        seen: Callable[[int, Sequence[Any]], Callable[[Tensor], None]] | None = None,
    ) -> None:
        super().__init__()
        self.zeroed, self.seen = frozenset(zeroed), seen
        self.sums = 0

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _, known = _known(func)
        if known.stream != "sum" or not _is_real(given := _operands(args, kwargs)):
            return func(*args, **kwargs)
        number, self.sums = self.sums, self.sums + 1
        for position in (0, 1):
            if (number, position) in self.zeroed:
                # in place where the sum is, too: the code may go on with the tensor that it wrote into
                given[position] = given[position].zero_() if position == 0 else torch.zeros_like(given[position])
        then = None if self.seen is None else self.seen(number, given)
        out = func(*given, *args[2:], **{key: kwargs[key] for key in kwargs if key not in ("input", "other")})
        if then is not None:
            then(out)
        return out


def _known(func: Any) -> tuple[str, Operation]:
    """A function's name and what is known of it. One that draws is about to draw the same numbers in every pass."""
    name = name_of(func)
    known = operation(name)
    if known.draws:
        seed_torch(20_000)
    return name, known


def _operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Both sides of a sum, by position or by name."""
    first = args[0] if args else kwargs["input"]
    return [first, args[1] if len(args) > 1 else kwargs["other"]]


def _is_real(sides: Sequence[Any]) -> bool:
    """Sums of integers are not counted: code that keeps tables of places takes them once only."""
    with private.unwatched():
        return any(isinstance(each, Tensor) and each.is_floating_point() for each in sides)


class Flow(TorchFunctionMode):
    """Watches which call takes which tensors, in which modules; enter it within the trace of axes."""

    def __init__(self, model: nn.Module, trace: Trace, in_pass: Any, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.model, self.trace, self.in_pass = model, trace, in_pass
        self.paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
        self.calls: list[Step] = []
        self.values: list[Value] = []
        self.visits = [Visit(None, frozenset())]
        self.sums = 0
        self._stack = [0]
        self._hooks: list[RemovableHandle] = []
        self._now: dict[int, int] = {}  # id of a tensor -> its value
        self._sharing: dict[int, list[int]] = {}  # memory -> ids of the tensors in it
        self.visits_of: dict[str, list[int]] = {}
        self._inputs = {id(tensor) for tensor in inputs}

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, known = _known(func)
        if known.asks is not None:
            if known.asks == "sizes":
                with private.unwatched():
                    self.values[self._value(args[0])].asked.add(self._stack[-1])
            return func(*args, **kwargs)
        given = tensors_of_tree((args, kwargs))
        with private.unwatched():
            before = [private.version_of(each) for each in given]
            inputs: list[tuple[int | None, int]] = [(None, self._value(each)) for each in given]
        if known.stream == "sum" and _is_real(sides := _operands(args, kwargs)):
            number, self.sums = self.sums, self.sums + 1
            inputs = [(at, self._value(side)) for at, side in enumerate(sides) if isinstance(side, Tensor)]
        else:
            number = -1
        out = func(*args, **kwargs)
        outs = tensors_of_tree(out)
        with private.unwatched():
            written = [each for each, old in zip(given, before, strict=True) if private.version_of(each) != old]
            self._note(name, inputs, number, written, outs)
        return out

    def _note(
        self, name: str, inputs: list[tuple[int | None, int]], number: int, written: list[Tensor], outs: list[Tensor]
    ) -> None:
        index = len(self.calls)
        mutated = {self._now[id(each)] for each in written}
        # what shares memory with a tensor that is written over is something else afterwards, too
        over = {id(tensor) for tensor in written}
        for tensor in written:
            over |= set(self._sharing.get(_memory(tensor), ()))
        inputs += [(None, self._now[each]) for each in over if self._now[each] not in {value for _, value in inputs}]
        follows = any(self.values[value].follows for _, value in inputs)
        call = Step(name, inputs, [], self._stack[-1], mutated, number)
        for each in over:
            old = self.values[self._now[each]]
            self._now[each] = self._made(Value(index, follows, old.real, old.dims))
            call.outputs.append(self._now[each])
        for out in outs:
            if id(out) not in self._now:
                real = out.is_floating_point() or out.is_complex()
                self._now[id(out)] = self._made(Value(index, follows, real, self.trace.dims(out)))
                self._sharing.setdefault(_memory(out), []).append(id(out))
                call.outputs.append(self._now[id(out)])
        if call.outputs or not outs:
            self.calls.append(call)
            for _, value in inputs:
                self.values[value].consumers.append(index)

    def _made(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _value(self, tensor: Tensor) -> int:
        if id(tensor) not in self._now:
            with private.unwatched():
                real = tensor.is_floating_point() or tensor.is_complex()
                self._sharing.setdefault(_memory(tensor), []).append(id(tensor))
            made = Value(-1, id(tensor) in self._inputs, real, self.trace.dims(tensor))
            self._now[id(tensor)] = self._made(made)
        return self._now[id(tensor)]

    def end(self, outputs: Iterable[Tensor]) -> None:
        """The pass returned these: what had no part in them is not alive, and no consumer."""
        for each in outputs:
            if id(each) in self._now:
                self.values[self._now[id(each)]].escapes = True
        for call in reversed(self.calls):
            values = [self.values[value] for value in call.outputs]
            call.alive = not call.outputs or any(
                value.escapes or any(self.calls[each].alive for each in value.consumers) for value in values
            )
        for value in self.values:
            value.consumers = [each for each in value.consumers if self.calls[each].alive]

    # -- modules

    def __enter__(self) -> Self:
        for module in self.model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._hooks.append(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._leave, with_kwargs=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        path = self.paths.get(id(module))
        outer = self.visits[self._stack[-1]].inside
        own = () if path is None else [path.rsplit(".", cut)[0] for cut in range(path.count(".") + 1)]
        visit = Visit(module, outer | {each for each in own if each}, arguments=len(args) + len(kwargs))
        arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for key, value in arguments:
            if isinstance(value, Tensor):
                visit.tensors.append((key, self._value(value), self.trace.dims(value)))
        self._stack.append(len(self.visits))
        if path is not None:
            self.visits_of.setdefault(path, []).append(len(self.visits))
        self.visits.append(visit)

    def _leave(self, *given: Any) -> None:  # module, arguments, keyword arguments, result
        self.visits[self._stack.pop()].returns = self._structure(given[-1])

    def _structure(self, out: Any) -> Any:
        """Values for tensors, within plain containers; `Strange` for what is none."""
        if isinstance(out, Tensor):
            return self._value(out), self.trace.dims(out)
        if out is None or type(out) in (bool, float, str):
            return out
        if type(out) in (tuple, list):
            return ["tuple" if type(out) is tuple else "list", *map(self._structure, out)]
        if type(out) is dict and all(isinstance(key, str) for key in out):
            return {key: self._structure(each) for key, each in out.items()}
        return Strange


def _memory(tensor: Tensor) -> int:
    if tensor.layout != torch.strided or private.is_wrapped(tensor):
        return -id(tensor)
    return private.memory_of(tensor)
