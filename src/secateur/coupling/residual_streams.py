"""The calls of a pass, and residual branches among them: what meets the rest only in a sum that its own input goes
around, and what stays in place of its modules.
"""

from __future__ import annotations

import heapq
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from secateur.coupling.axes import Axis, Expression, leaves, size_of
from secateur.coupling.operations import Operation, name_of, operation
from secateur.coupling.trace import Trace, tensors_of_tree
from secateur.support import private, seed_torch

# ---- Which call of a pass took which tensors, in which modules; and passes in which terms of its sums are zero.
#
# Law: a value is what a tensor holds between two writes; sums of real numbers are numbered in the order of their calls,
# here and wherever terms become zero.


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


# ---- What stays in place of each module of a residual branch, as a plan holds it.
#
# Law: a module leaves only if all of its calls lie in the branch, and what it returned is known: its input, or zeros
# whose sizes follow from the input's and from its own weights.


# how attention modules of transformers are handed their cache: since 5.24, and before
CACHES = ("cache", "past_key_values", "past_key_value")


class Forms:
    """Of one pass; ``total`` says how many of its calls that are alive belong to each module."""

    def __init__(self, flow: Flow, total: Mapping[str, int]) -> None:
        self.calls, self.values, self.visits, self.paths = flow.calls, flow.values, flow.visits, flow.paths
        self._trace, self._visits_of, self._total = flow.trace, flow.visits_of, total

    def of(self, cone: set[int], index: int, term: int, stream: int) -> dict[str, dict[str, Any]]:
        """What stays in place of each module that lies in a cone whole; largest first, then what it consists of."""
        counts = Counter(path for each in cone for path in self.visits[self.calls[each].visit].inside)
        whole = {path for path, count in counts.items() if count == self._total[path]}
        while True:
            chosen = {path for path in whole if not any(_holds(other, path) for other in whole)}
            owner = {
                each: next((path for path in self.visits[self.calls[each].visit].inside if path in chosen), None)
                for each in cone
            }
            tail, last, asked = self._tail(cone, owner, term)
            same_shape = _same(self.values[term].dims, self.values[stream].dims)
            scalar = (
                all(operation(name).zero for name in tail)
                and same_shape
                and not asked
                and term not in self.calls[index].mutated
            )
            forms = {path: self._form(path, owner, scalar=scalar and path in last, last=last) for path in chosen}
            strange = {path for path, form in forms.items() if form is None}
            if not strange:
                order = [path for path in self.paths.values() if path in forms]
                found = {path: form for path in sorted(order, key=self._visits_of.__getitem__) if (form := forms[path])}
                return found if last else {}
            whole -= strange

    def _tail(self, cone: set[int], owner: Mapping[int, str | None], term: int) -> tuple[set[str], set[str], bool]:
        """The functions between the modules that leave and the sum, the modules that they take their values of, and
        whether the code there asks for a shape."""
        names: set[str] = set()
        last: set[str] = set()
        asked = False
        waiting, seen = [term], {term}
        while waiting:
            value = self.values[waiting.pop()]
            each = value.producer
            if each not in cone:
                continue
            path = owner[each]
            asked = asked or any(path is None or path not in self.visits[visit].inside for visit in value.asked)
            if path is not None:
                last.add(path)
                continue
            names.add(self.calls[each].name)
            before = {value for _, value in self.calls[each].inputs} - seen
            seen |= before
            waiting += before
        return names, last, asked

    def _form(
        self, path: str, owner: Mapping[int, str | None], *, scalar: bool, last: set[str]
    ) -> dict[str, Any] | None:
        """What stays in place of a module, as a plan holds it; None where its results have no shape that is known."""
        visits = [self.visits[each] for each in self._visits_of.get(path, ())]
        if not visits:
            return None
        once = len(visits) == 1  # one that is called in between, too, needs a shape there
        forms = [self._form_of_visit(path, visit, owner, scalar=scalar and once, ends=path in last) for visit in visits]
        return forms[0] if all(form is not None and form == forms[0] for form in forms) else None

    def _form_of_visit(
        self, path: str, visit: Visit, owner: Mapping[int, str | None], *, scalar: bool, ends: bool
    ) -> dict[str, Any] | None:
        module = visit.module
        assert module is not None
        tensors = [each for each in visit.tensors if self.values[each[1]].real] or visit.tensors
        if not tensors:
            return None
        argument, _, dims = tensors[0]
        form: dict[str, Any] = {"was": type(module).__name__, "input": argument}
        own = {axis for each in module.parameters() for dim in self._trace.dims(each) for axis in axes_in(dim)}
        out = visit.returns
        alone = isinstance(out, tuple) and visit.arguments == 1 and argument == 0
        if alone and not ends and _same(out[1], dims) and not self._is_written(out[0], owner):
            return {"was": form["was"], "returns": "input"}

        def described(returns: Any) -> Any:
            if isinstance(returns, list):
                return [returns[0], *map(described, returns[1:])]
            if isinstance(returns, dict):
                return {"dict": {key: described(each) for key, each in returns.items()}}
            if not isinstance(returns, tuple):
                return returns
            value, its_dims = returns
            if scalar or all(owner.get(each) == path for each in self.values[value].consumers):
                return {"zeros": None}
            shape = [_explained(dim, at, dims, module, own) for at, dim in enumerate(its_dims)]
            if None in shape:
                return Strange
            return {"zeros": [list(each) for each in shape if each], "whole": self._is_written(value, owner)}

        form["returns"] = described(out)
        if _strange(form["returns"]):
            return None
        layer = getattr(module, "layer_idx", None)
        caches = [each for each in CACHES if each in inspect.signature(module.forward).parameters]
        if caches and isinstance(layer, int):
            form |= {"cache": caches[0], "layer": int.__index__(layer)}
        return form

    def _is_written(self, value: int, owner: Mapping[int, str | None]) -> bool:
        """Whether a call outside the modules that leave writes over a value that one of them returns, or a view."""
        waiting, seen = [value], {value}
        while waiting:
            each = waiting.pop()
            for index in self.values[each].consumers:
                if owner.get(index) is not None:
                    continue
                if self.calls[index].mutated & seen:
                    return True
                if index in owner:
                    more = set(self.calls[index].outputs) - seen
                    seen |= more
                    waiting += more
        return False


def _strange(returns: Any) -> bool:
    if isinstance(returns, list):
        return any(map(_strange, returns))
    if isinstance(returns, dict) and "dict" in returns:
        return any(map(_strange, returns["dict"].values()))
    return returns is Strange


def _holds(outer: str, inner: str) -> bool:
    return inner.startswith(f"{outer}.")


def axes_in(expression: Expression) -> list[Axis]:
    return [axis for axis in leaves(expression) if axis.size > 1]


def _same_dim(one: Expression, other: Expression) -> bool:
    """Whether two dimensions are the same axes; of size one they are anyway."""
    if size_of(one) != size_of(other):
        return False
    return one is other or axes_in(one) == axes_in(other)


def _same(first: Sequence[Expression], second: Sequence[Expression]) -> bool:
    return len(first) == len(second) and all(map(_same_dim, first, second))


def _explained(
    dim: Expression, place: int, dims: Sequence[Expression], module: nn.Module, own: set[Axis]
) -> tuple[int, int, int, int, int] | None:
    """How a dimension of a result follows from the input's; see `_Zeros`."""
    plain = (1, 0, 1)
    if private.is_convolution(module):
        spatial = place - (len(dims) - len(module.kernel_size))
        if spatial >= 0:
            return _convolved(module, spatial, place)
        if spatial == -1:
            return -1, size_of(dim), *plain
    if isinstance(module, nn.Linear) and place == len(dims) - 1:
        return -1, size_of(dim), *plain
    same = [at for at, each in enumerate(dims) if _same_dim(dim, each)]
    if place in same:
        return place, 0, *plain
    if size_of(dim) > 1 and same:
        return same[0], 0, *plain
    # a width of its own weights, and nothing that comes from the input
    return None if same or not own.issuperset(axes_in(dim)) else (-1, size_of(dim), *plain)


def _convolved(module: private.Convolution, spatial: int, place: int) -> tuple[int, int, int, int, int] | None:
    """The size of a convolution's result, as torch defines it."""
    reach = module.dilation[spatial] * (module.kernel_size[spatial] - 1)
    stride = module.stride[spatial]
    if module.transposed:
        padding = module.padding[spatial]
        if isinstance(padding, str):
            return None
        return place, 0, stride, reach + 1 - stride - 2 * padding + module.output_padding[spatial], 1
    if module.padding == "same":
        return place, 0, 1, 0, 1
    padding = 0 if module.padding == "valid" else module.padding[spatial]
    assert isinstance(padding, int)
    return place, 0, 1, 2 * padding - reach - 1 + stride, stride


# ---- Residual branches: what of a model's calls meets the rest only in a sum that its own input goes around.
#
# Law: a branch is a cone of the data flow. Whatever is in it reaches the model's outputs through one term of one sum,
# so a model in which that term is zero does not need the modules that lie in it whole.
#
# `Flow` watches passes, beside the trace of axes: which call took which tensors, in which modules. `branches_of`
# reads the sums off it: ``x + f(x)``, ``x + attention(x) + mlp(x)``, ``shortcut(x) + f(x)`` where the shortcut is the
# shorter way.


@dataclass(frozen=True)
class Term:
    """Where a branch meets its stream in one pass: calls of sums are numbered from 0.

    ``final`` is the sum that has all terms of a chain ``x + f(x) + g(x)``; ``features`` are the dimensions of it that
    parameters share, such as the width: the others are positions and examples.
    """

    number: int
    position: int
    final: int
    features: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Branch:
    """A residual branch: ``stream + branch``.

    Attributes:
        name: the module that holds most of its parameters.
        modules: ``{path: form}`` of the modules that lie in it whole, and what stays in their place.
        parameters: the names that leave with it.
        entries: how many numbers these are.
        terms: ``{pass: Term}``.
    """

    name: str
    modules: Mapping[str, Mapping[str, Any]]
    parameters: tuple[str, ...]
    entries: int
    terms: Mapping[Any, Term]

    def without(self, path: str) -> Branch | None:
        """The same with one of its modules left in place; None where that makes what is added, or nothing is left."""
        rest = {each: form for each, form in self.modules.items() if each != path}
        names = tuple(each for each in self.parameters if not each.startswith(f"{path}."))
        return (
            replace(self, modules=rest, parameters=names)
            if names and self.modules[path]["returns"] == "input"
            else None
        )

    def __repr__(self) -> str:
        return f"Branch({self.name!r}, modules={len(self.modules)}, entries={self.entries})"


def in_all(passes: Sequence[Sequence[Branch]]) -> list[Branch]:
    """The branches that were found in every pass, with the same modules and forms."""
    if not passes:
        return []
    return [
        replace(branch, terms={in_pass: term for each in same for in_pass, term in each.terms.items()})
        for branch in passes[0]
        if len(same := [each for found in passes for each in found if each.modules == branch.modules]) == len(passes)
    ]


def branches_of(flow: Flow, outputs: Iterable[Tensor]) -> list[Branch]:
    """The branches of the pass that was watched, in the order of their sums."""
    flow.end(outputs)
    return _Streams(flow).found()


class _Streams:
    """The sums of one pass, and what goes around their terms."""

    def __init__(self, flow: Flow) -> None:
        self.calls, self.values, self.visits = flow.calls, flow.values, flow.visits
        self.model, self.trace, self.in_pass = flow.model, flow.trace, flow.in_pass
        total = Counter(path for call in self.calls if call.alive for path in self.visits[call.visit].inside)
        self._forms = Forms(flow, total)

    def found(self) -> list[Branch]:
        """The branches, in the order of their sums."""
        shared = {axis for each in self.model.parameters() for dim in self.trace.dims(each) for axis in axes_in(dim)}
        branches = []
        for final in range(len(self.calls)):
            call = self.calls[final]
            if call.number >= 0 and call.alive and self._joins(call) is None:
                terms = list(self._terms(final))
                dims = self.values[call.outputs[0]].dims
                features = tuple(at for at, dim in enumerate(dims) if shared & set(axes_in(dim)))
                for index, position, value in terms:
                    others = [other for place, at, other in terms if (place, at) != (index, position)]
                    at = Term(self.calls[index].number, position, call.number, features)
                    branch = self._branch(index, value, others, at)
                    branches += [branch] if branch is not None else []
        return branches

    def _joins(self, call: Step) -> int | None:
        """The sum that is the only one to take the result of a sum."""
        consumers = {each for value in call.outputs for each in self.values[value].consumers}
        if len(consumers) != 1 or any(self.values[value].escapes for value in call.outputs):
            return None
        (only,) = consumers
        takes = [value for _, value in self.calls[only].inputs if value in call.outputs]
        return only if self.calls[only].number >= 0 and len(takes) == 1 else None

    def _terms(self, final: int) -> Iterator[tuple[int, int, int]]:
        """(call, position, value) of all terms of a chain of sums."""
        waiting = [final]
        while waiting:
            index = waiting.pop()
            for position, value in self.calls[index].inputs:
                if position is None:
                    continue
                producer = self.values[value].producer
                if producer >= 0 and self.calls[producer].number >= 0 and self._joins(self.calls[producer]) == index:
                    waiting.append(producer)
                else:
                    yield index, position, value

    def _branch(self, index: int, term: int, others: Sequence[int], at: Term) -> Branch | None:
        """The branch whose last value is ``term``, where one of the ``others`` is its stream."""
        cone = self._cone(index, term)
        if not cone:
            return None
        entering = {
            value
            for each in cone
            for _, value in self.calls[each].inputs
            if self.values[value].producer not in cone and self.values[value].follows and self.values[value].real
        }
        stream = next((other for other in others if self._goes_around(entering, other, term, cone)), None)
        if stream is None:
            return None
        forms = self._forms.of(cone, index, term, stream)
        names = {
            name: parameter
            for path in forms
            for name, parameter in self.model.get_submodule(path).named_parameters(prefix=path)
        }
        if not names:
            return None
        weights = Counter({path: sum(p.numel() for p in self.model.get_submodule(path).parameters()) for path in forms})
        entries = sum(parameter.numel() for parameter in {id(each): each for each in names.values()}.values())
        return Branch(weights.most_common(1)[0][0], forms, tuple(names), entries, {self.in_pass: at})

    def _goes_around(self, entering: set[int], other: int, term: int, cone: set[int]) -> bool:
        """Whether a term is what goes into another, on a way with fewer contractions: none, or one as of a shortcut."""
        for value in sorted(entering, key=lambda each: each != other):
            through = self._depth(value, term, cone)
            if not through:
                continue
            for start in self._same_stream(value, other):
                around = self._depth(start, other)
                if around is not None and around < min(through, 2):
                    return True
        return False

    def _same_stream(self, value: int, other: int) -> list[int]:
        """A value, and those that it was made of without a contraction, back to the last sum: what is normalized."""
        found, waiting = [value], [value]
        while waiting and found[-1] != other:
            producer = self.values[waiting.pop()].producer
            if producer < 0 or self.calls[producer].number >= 0 or _contracts(self.calls[producer]):
                continue
            for _, before in self.calls[producer].inputs:
                if self.values[before].follows and self.values[before].real and before not in found:
                    found.append(before)
                    waiting.append(before)
        return found

    def _cone(self, index: int, term: int) -> set[int]:
        """The calls whose results reach the outputs only through a term of a sum."""
        value = self.values[term]
        if value.producer < 0 or value.consumers != [index] or value.escapes:
            return set()
        cone: set[int] = set()
        waiting, seen = [-value.producer], {value.producer}
        while waiting:  # from the last call to the first, such that what takes a result is known before what makes it
            each = -heapq.heappop(waiting)
            outputs = self.calls[each].outputs
            if any(self.values[out].escapes for out in outputs):
                continue
            if not all(out == term or cone.issuperset(self.values[out].consumers) for out in outputs):
                continue
            cone.add(each)
            before = {self.values[taken].producer for _, taken in self.calls[each].inputs} - seen - {-1}
            seen |= before
            for producer in before:
                heapq.heappush(waiting, -producer)
        return cone

    def _depth(self, start: int, end: int, within: set[int] | None = None) -> int | None:
        """The most contractions on a way from one value to another; None where there is none."""
        if start == end:
            return 0
        first = self.values[start].producer
        reached, waiting = set(), [self.values[end].producer]
        while waiting:
            each = waiting.pop()
            if each > first and each not in reached and (within is None or each in within):
                reached.add(each)
                waiting += [self.values[value].producer for _, value in self.calls[each].inputs]
        depth: dict[int, int] = {start: 0}
        for each in sorted(reached):
            ways = [depth[value] for _, value in self.calls[each].inputs if value in depth]
            if ways:
                call = self.calls[each]
                depth.update(dict.fromkeys(call.outputs, max(ways) + _contracts(call)))
        return depth.get(end)


def _contracts(call: Step) -> bool:
    return operation(call.name).stream == "contraction"
