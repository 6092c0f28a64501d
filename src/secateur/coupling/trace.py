"""Which dimensions of which tensors are the same axis: forward passes, watched at the level of torch's functions.

Law: a function without a rule freezes every axis that it touches, and the reason says its name; what the passes did not
touch is frozen too. Pruning less is allowed, pruning wrongly is not.

A rule (`rules`) is told the dimensions of a call's tensors as expressions of axes, unifies what has to be the same, and
says what the dimensions of the result are. Numbers keep their origin (`numbers`): sizes that were
read off tensors and integers that modules hold follow what leaves, those written in the code freeze what they fix.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from secateur.coupling.axes import Axis, Expression, freeze, leaves, size_of
from secateur.coupling.numbers import Attribute, Equation, Known, Log, formula_of
from secateur.coupling.origins import Origin, Rows, depends_on, overlap, rows_of, same

__all__ = [
    "CARRIES",
    "Call",
    "Dims",
    "Flag",
    "INSTEAD",
    "RULES",
    "Trace",
    "Unseen",
    "WITHOUT_DROPOUT",
    "name_of",
    "numbers_that_remember",
    "rule",
    "tensors_of_tree",
    "without_rule",
    "written_in_others",
]

Dims = list[Expression]
Rule = Callable[["Call"], None]
RULES: dict[str, Rule] = {}
CARRIES: set[str] = set()  # functions value by value, or that only move values: a statistic stays one
CUTS = {"chunk", "concat", "concatenate", "cat", "narrow", "pad", "select", "split", "split_with_sizes", "stack"}
CUTS |= {"tensor_split", "unbind"}
INSTEAD: dict[str, Callable[..., Any]] = {}  # functions that are followed as these, written in others


@dataclass(frozen=True)
class Flag:
    """A statistic over a dimension: the ``number``-th call of a function in a pass."""

    dim: Expression
    in_pass: Any
    name: str
    number: int


class Trace(TorchFunctionMode):
    """Follows axes through every call of a torch function while it is active.

    >>> import secateur.coupling  # with its rules
    >>> from secateur.coupling import resolved
    >>> weight, x = torch.randn(4, 3), torch.randn(2, 3)
    >>> with Trace() as trace:
    ...     y = torch.nn.functional.linear(x, weight).relu()
    >>> resolved(trace.dims(y)[1]) is resolved(trace.dims(weight)[0])
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self.equations: Log = []  # between sizes, which have to hold
        self.flagged: list[Flag] = []  # statistics over axes, which change when some of them leave
        self.in_pass: Any = None  # which pass is being watched
        self.reached: set[Axis] = set()  # what some function did more with than to move or cut it
        self.pooled: dict[int, list[Expression]] = {}  # ids of statistics -> the dimensions they were taken over
        self.made: list[tuple[Dims, int]] = []  # results with memory of their own, and the bytes of an entry
        self.products: list[Dims] = []  # per contraction the dimensions whose sizes multiply to its multiply-adds
        self.unknown: dict[str, int] = {}  # functions without a rule, and how often they were called
        self.calls = Counter[str]()  # of functions by name, in this pass
        self.touched: set[int] = set()  # ids of the tensors that were arguments
        self.weights: set[int] = set()  # ids of the parameters of the model
        self.origins: dict[int, Origin] = {}  # ids of tensors -> the call that made them
        self.scaled: list[tuple[Rows, Expression]] = []  # what to multiply by the root of a share that stays
        self._dims: dict[int, Dims] = {}
        self._alive: list[Tensor] = []  # an id is not used twice while its tensor lives
        self.inside = 0  # calls of functions of torch that are running

    def declare(self, tensor: Tensor, dims: Iterable[Expression]) -> None:
        """The dimensions of a tensor are these."""
        found = list(dims)
        assert [size_of(dim) for dim in found] == list(tensor.shape), (found, tensor.shape)
        if id(tensor) not in self._dims:
            self._alive.append(tensor)
        self._dims[id(tensor)] = found

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Let go of all tensors but these."""
        kept = {id(tensor): tensor for tensor in tensors}
        self.pooled.clear()
        self.origins.clear()
        self._dims = {key: dims for key, dims in self._dims.items() if key in kept}
        self._alive = [kept[key] for key in self._dims]

    def knows(self, tensor: Tensor) -> bool:
        """Whether the pass has seen it."""
        return id(tensor) in self._dims

    def dims(self, tensor: Tensor) -> Dims:
        """The dimensions of a tensor; those of one that the code made itself are frozen."""
        if not self.knows(tensor):
            self.declare(tensor, [Axis(size, reasons=["a tensor that the code makes itself"]) for size in tensor.shape])
        return self._dims[id(tensor)]

    def freeze_pooled(self, tensor: Tensor, why: str) -> None:
        """A statistic is used for more than to normalize what it was taken over: that has to stay whole."""
        for dim in self.pooled.get(id(tensor), ()):
            freeze(dim, why)

    def divided_by_root(self, tensor: Tensor, other: Tensor, dim: Expression, why: str) -> None:
        """The code divides a product of two tensors by the root of the size of a dimension, which may become smaller.

        The weights that make the first tensor can make up for that, where they make nothing else; otherwise nothing of
        the dimension may leave.
        """
        rows, its = rows_of(tensor, self.origins), rows_of(other, self.origins)
        if rows is None or not self.weights.issuperset(key for key, _ in rows):
            freeze(dim, why)
            return
        if overlap(rows, its) if its else depends_on(other, [key for key, _ in rows], self.origins):
            freeze(dim, why)
            return
        for before, its_dim in self.scaled:
            if overlap(rows, before):
                if list(leaves(dim)) != list(leaves(its_dim)) or not same(rows, before):
                    freeze(dim, why)
                    freeze(its_dim, why)
                return
        self.scaled.append((rows, dim))

    def agree(self, number: int, dim: Expression, why: str) -> None:
        """A size that the code asks for is that of a dimension, whatever leaves."""
        self.equations.append(Equation(formula_of(number), dim, why))

    def number(self, dim: Expression) -> Known:
        """The size of a dimension, which remembers where it came from."""
        return Known(size_of(dim), dim, self.equations)

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        for each in tensors_of_tree((args, kwargs)):
            if torch._C._functorch.is_functorch_wrapped_tensor(each):
                self._freeze_wrapped(each)
            self.dims(each)  # before the call, which may change the shape
            self.touched.add(id(each))
        body = written_in_others(func, name)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        self.calls[name] += 1
        plain_args, plain_kwargs = tree_map_only(Known, int.__index__, (args, kwargs))
        given = {each.untyped_storage()._cdata for each in tensors_of_tree((args, kwargs)) if _is_dense(each)}
        self.inside += 1
        try:
            call_it: Callable[..., Any] = WITHOUT_DROPOUT.get(name, _called)
            out = call_it(func, *plain_args, **plain_kwargs)
        finally:
            self.inside -= 1
        self._remember(func, name, plain_args, plain_kwargs, out)
        call = Call(self, name, args, kwargs, out)
        if name not in CARRIES and name not in CUTS and tensors_of_tree(out):
            self.reached.update(axis for each in call.tensors() for dim in self.dims(each) for axis in leaves(dim))
        self._look(call)
        self._follow_statistics(call)
        self.made += [
            (self.dims(each), each.element_size())
            for each in tensors_of_tree(out)
            if _is_dense(each) and each.untyped_storage()._cdata not in given
        ]
        return call.out

    def _remember(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Where the results came from; a tensor that was changed in place came from what it was, too."""
        results = [out] if isinstance(out, Tensor) else tensors_of_tree(out)
        given = {id(each) for each in tensors_of_tree((args, kwargs))}
        if name == "setitem":
            results = [args[0]]
        for number, each in enumerate(results):
            if id(each) in given:
                before = self.origins.get(id(each))
                parts = (*tensors_of_tree((args, kwargs)), *(before.tensors() if before else ()))
                self.origins[id(each)] = Origin("changed in place", func, parts, {})
            else:
                self.origins[id(each)] = Origin(name, func, args, kwargs, None if each is out else number)

    def _look(self, call: Call) -> None:
        name, out = call.name, call.out
        if name in RULES:
            self.inside += 1  # what the rule computes is not the model's
            try:
                made = RULES[name](call)
                call.out = out if made is None else made
            except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                # a form of the call that the rule does not know; what it unified until then stays so
                call.name = f"this form of {name}"
                without_rule(call)
            finally:
                self.inside -= 1
        elif tensors_of_tree(out):
            without_rule(call)

    def _follow_statistics(self, call: Call) -> None:
        """A mean that meets what it was taken over again normalizes it; one that goes elsewhere is a pooled value."""
        dims = [dim for tensor in call.tensors() for dim in self.pooled.get(id(tensor), ())]
        if not dims:
            return
        outs = tensors_of_tree(call.out)
        if call.name not in CARRIES and outs:
            for dim in dims:
                freeze(dim, f"a statistic over it is used by {call.name}")
            return
        for out in outs:
            there = {axis for dim in self.dims(out) for axis in leaves(dim)}
            if left := [dim for dim in dims if there.isdisjoint(axis for axis in leaves(dim) if axis.size > 1)]:
                self.pooled[id(out)] = left

    def _freeze_wrapped(self, tensor: Tensor) -> None:
        """A tensor inside torch.func.vmap or grad: it has other dimensions there than outside."""
        inner = tensor
        while torch._C._functorch.is_functorch_wrapped_tensor(inner):
            inner = torch._C._functorch.get_unwrapped(inner)
            if self.knows(inner):
                for dim in self.dims(inner):
                    freeze(dim, "used inside torch.func")


class Unseen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations that no function of torch was called for, as of scripted functions and C++ extensions: no rule."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.trace.inside and func is not torch.ops.aten.lift_fresh.default:
            without_rule(Call(self.trace, str(func), args, kwargs or {}, out))
        return out


class Call:
    """One call, as a rule sees it."""

    def __init__(self, trace: Trace, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        self.trace, self.name, self.args, self.kwargs, self.out = trace, name, args, kwargs, out

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or by name."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def dims(self, tensor: Tensor) -> Dims:
        """The dimensions of a tensor."""
        return self.trace.dims(tensor)

    def returns(self, dims: Iterable[Expression], out: Tensor | None = None) -> None:
        """The dimensions of the result."""
        self.trace.declare(self.out if out is None else out, dims)

    def freeze(self, dim: Expression, why: str = "") -> None:
        """Nothing of it may leave."""
        freeze(dim, why or self.name)

    def flag(self, dim: Expression) -> None:
        """The function computes a statistic over a dimension: it changes when some of it leaves."""
        self.trace.flagged.append(Flag(dim, self.trace.in_pass, self.name, self.trace.calls[self.name]))

    def fresh(self, size: int, why: str = "") -> Axis:
        """A dimension of the result that is no axis of the arguments."""
        return Axis(int.__index__(size), reasons=[why or self.name])

    def sequence(self, position: int, name: str) -> list[Any]:
        """Integers given as one sequence or one by one."""
        given = self.args[position:] if len(self.args) > position else self.kwargs[name]
        return list(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else list(given)

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return tensors_of_tree((self.args, dict(self.kwargs)))


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for functions of torch by name, without leading or trailing underscores.

    >>> @rule("twice_as_wide")
    ... def _twice_as_wide(call):
    ...     (last,) = call.dims(call.args[0])[-1:]
    ...     call.returns([*call.dims(call.args[0])[:-1], concatenated([last, last])])
    >>> del RULES["twice_as_wide"]
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def without_rule(call: Call) -> None:
    """Freeze all that a call touches."""
    why = f"{call.name} has no rule"
    call.trace.unknown[call.name] = call.trace.unknown.get(call.name, 0) + 1
    for tensor in call.tensors():
        for dim in call.dims(tensor):
            freeze(dim, why)
    for number in tree_leaves((call.args, dict(call.kwargs))):
        if isinstance(number, Known):
            number.stays(why)
    for tensor in tensors_of_tree(call.out):
        if not call.trace.knows(tensor) or [size_of(dim) for dim in call.dims(tensor)] != list(tensor.shape):
            call.trace.declare(tensor, [call.fresh(size, why) for size in tensor.shape])


@contextlib.contextmanager
def numbers_that_remember(model: nn.Module, log: Log) -> Iterator[None]:
    """Within, the integers that the modules of a model hold are `Known`, with an `Attribute` as their formula.

    Integers held directly, in tuples, lists and dicts, and in the fields of objects such as configurations.

    >>> class Heads(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.heads = 4
    >>> model = Heads()
    >>> with numbers_that_remember(model, []):
    ...     print(model.heads.formula, model.heads, type(model.heads).__name__)
    heads 4 Known
    >>> type(model.heads).__name__
    'int'
    """
    undo: list[Callable[[], Any]] = []
    seen: set[int] = set()

    def walk(held: dict[str, Any], place: tuple[str | int, ...], skip: Iterable[str] = ()) -> None:
        for key, value in list(held.items()):
            if key in skip or not isinstance(key, str):
                continue
            replaced = remembering(value, (*place, key))
            if replaced is not value:
                undo.append(functools.partial(held.__setitem__, key, value))
                held[key] = replaced

    def remembering(value: Any, place: tuple[str | int, ...]) -> Any:
        if type(value) is int and abs(value) > 1:
            return Known(value, Attribute(place, value), log)
        if type(value) in (tuple, list, torch.Size) and value and all(type(each) is int for each in value):
            return type(value)([remembering(each, (*place, number)) for number, each in enumerate(value)])
        if id(value) not in seen and (type(value) is dict or _has_fields(value)):
            seen.add(id(value))
            walk(value if type(value) is dict else vars(value), place)
        return value

    try:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                walk(vars(module), (path,), _OF_EVERY_MODULE)
        yield
    finally:
        for each in reversed(undo):
            each()


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weights_names", "_all_weights"}


def _has_fields(value: Any) -> bool:
    """An object of a class of the user's or a library's that holds values, such as a configuration."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | Tensor | type | types.FunctionType | types.ModuleType | enum.Enum)
        and kind.__module__.split(".")[0] not in ("builtins", "torch", "functools", "logging", "threading", "weakref")
    )


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def tensors_of_tree(tree: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def name_of(func: Any) -> str:
    """The name of a function of torch without underscores around it; of an attribute the attribute's."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", name)) + ("=" if name == "__set__" else "")
    return name.strip("_")


def written_in_others(func: Any, name: str) -> Callable[..., Any] | None:
    """The body of a function without a rule that calls others; None for one that is looked at as a whole."""
    return None if name in RULES else INSTEAD.get(name, _transparent(func))


def _called(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _not_dropped(_func: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.clone()


def _attention_without_dropout(func: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) > 4:
        args = (*args[:4], 0.0, *args[5:])
    return func(*args, **{**kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {})})


# Passes are compared number by number, and dropout draws as many as there are entries.
WITHOUT_DROPOUT: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"), _not_dropped),
    **dict.fromkeys(("feature_alpha_dropout", "feature_dropout"), _not_dropped),
    "scaled_dot_product_attention": _attention_without_dropout,
}


def _no(*_: Any) -> bool:
    return False


@functools.cache
def _transparent(func: Any) -> Callable[..., Any] | None:
    """A function of torch that is written in Python, such that the functions that it calls are seen."""
    code = getattr(func, "__code__", None)
    if code is None or not any(name.startswith("has_torch_function") for name in code.co_names):
        return None
    told = {name: _no for name in code.co_names if name.startswith("has_torch_function")}
    made = types.FunctionType(code, {**func.__globals__, **told}, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made
