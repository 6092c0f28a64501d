"""Scores in which each of the units that are chosen between has its turn. Call sites: in which module of a model a
function of torch is called, and the index of the call there. Which dimensions of which tensors are the same axis:
forward passes, watched at the level of torch's functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from secateur.coupling.axes import Axis, Expression, cut, freeze, leaves, look, multiplied, size_of, tie, unify
from secateur.coupling.numbers import Along, Equation, Known, Log, Numbered, Outcome, formula_of
from secateur.coupling.operations import (
    Origin,
    Rows,
    depends_on,
    name_of,
    operation,
    overlap,
    rows_of,
    same,
    written_in_others,
)
from secateur.support import private

# ---- Scores in which each of the units that are chosen between has its turn.
#
# Law: in as many turns as there are units for each row, every unit is the best of some row; what is the same for two
# models stays the same, and what was different stays so.

_PREFERRED = 2.5  # more than two scores are apart that are scaled to [-1, 1]


def cycle_choices(scores: Tensor, at: int, places: Tensor, turn: int) -> Tensor:
    """Scores along a dimension, scaled to [-1, 1], with a bonus for one of ``places`` in each row, so that each is
    chosen in turn.

    >>> import torch
    >>> cycle_choices(torch.tensor([[1.0, 4.0, 2.0]]), 1, torch.arange(3), 2)
    tensor([[0.2500, 1.0000, 3.0000]])
    """
    moved = scores.movedim(at, -1)
    largest = moved.detach()[..., places].abs().nan_to_num(0.0, 0.0, 0.0).max().clamp_min(1e-12)
    rows = moved.shape[:-1].numel()
    numbers = torch.arange(rows, device=scores.device)
    bonus = torch.zeros(rows, moved.shape[-1], dtype=scores.dtype, device=scores.device)
    bonus[numbers, places[(numbers + turn * rows) % len(places)]] = _PREFERRED
    return (moved / largest + bonus.reshape(moved.shape)).movedim(-1, at)


# ---- Call sites: in which module of a model a function of torch is called, and the index of the call there.
#
# Law: a spot does not depend on what other modules did before, so that it is the same where tokens go other ways.


@dataclass(frozen=True)
class Spot:
    """A call site: the ``number``-th call of a function in the own code of the module at ``path``."""

    path: str
    name: str
    number: int


class CallSites:
    """Knows which module of a model runs, while it is entered.

    >>> model = nn.Sequential(nn.ReLU(), nn.ReLU())
    >>> with CallSites(model) as where:
    ...     where.spot("relu"), where.spot("relu")
    (Spot(path='', name='relu', number=1), Spot(path='', name='relu', number=2))
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
        self._running: list[tuple[str, Counter[str]]] = [("", Counter())]
        self._hooks: list[RemovableHandle] = []

    def spot(self, name: str) -> Spot:
        """Where a function is called now; asked once a call."""
        path, calls = self._running[-1]
        calls[name] += 1
        return Spot(path, name, calls[name])

    @property
    def module(self) -> nn.Module:
        """The module that runs."""
        return self._model.get_submodule(self._running[-1][0])

    def modules(self) -> Iterable[nn.Module]:
        """All of the model."""
        return self._model.modules()

    @property
    def visits(self) -> list[object]:
        """For each module that runs, the outer first, what is another for each of its calls."""
        return [calls for _, calls in self._running]

    def __enter__(self) -> Self:
        for module in self._model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
                self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._running.append((self._paths.get(id(module), ""), Counter()))

    def _leave(self, *_: Any) -> None:
        if len(self._running) > 1:
            self._running.pop()


# Which dimensions of which tensors are the same axis: forward passes, watched at the level of torch's functions.
#
# Law: a function without a rule freezes every axis that it touches, and the reason says its name; what the passes did
# not touch is frozen too. Pruning less is allowed, pruning wrongly is not.
#
# A rule (`rules`, of the operation's declaration in `operations`) is given the dimensions of a call's tensors as
# expressions of axes, unifies what has to be the same, and says what the dimensions of the result are. Numbers keep
# their origin (`numbers`): sizes that were read off tensors and integers that modules hold follow what leaves, those
# written in the code freeze what they fix.

Dims = list[Expression]
Scaled = list[tuple[Rows, Expression]]  # rows of weights, and the dimension for whose share they can make up

_WORDS = """
    bfloat16 clamp clamp_max clamp_min clone contiguous cpu cuda detach double expand expand_as flatten float gather
    getitem half index_select int long masked_select permute ravel repeat repeat_interleave reshape select sort split
    squeeze t to transpose type type_as unbind unflatten unique unsqueeze view view_as
"""
_ARITHMETIC = frozenset(
    [
        "add",
        "floor_divide",
        "floordiv",
        "masked_fill",
        "mod",
        "mul",
        "radd",
        "remainder",
        "rmul",
        "rsub",
        "sub",
        "where",
    ]
)
_CHOOSING = {"topk": 2, "argmax": 1, "max": 1}  # and the position of the dimension among the arguments
_SAME_NUMBERS = frozenset(_WORDS.split())  # of which the results are numbers that the first tensor holds


@dataclass(frozen=True)
class Flag:
    """A statistic over a dimension: the ``number``-th call of a function in a pass."""

    dim: Expression
    in_pass: Any
    name: str
    number: int


@dataclass(frozen=True)
class Look:
    """A call site where a router's scores are made or compared, such as a ``topk``.

    ``made``: the call's result has the scores along dimension ``at``; else its first tensor has, and it compares them.
    """

    spot: Spot
    made: bool
    at: int
    dim: Expression


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
        self.equations = Log()  # between sizes, which have to hold
        self.flagged: list[Flag] = []  # statistics over axes, which change when some of them leave
        self.in_pass: Any = None  # which pass is being watched
        self.reached: set[Axis] = set()  # what some function did more with than to move or cut it
        self.pooled: dict[int, list[Expression]] = {}  # ids of statistics -> the dimensions they were taken over
        self.products: list[Dims] = []  # per contraction the dimensions whose sizes multiply to its multiply-adds
        self.unknown: dict[str, int] = {}  # functions without a rule, and how often they were called
        self.calls = Counter[str]()  # of functions by name, in this pass
        self.touched: set[int] = set()  # ids of the tensors that were arguments
        self.weights: set[int] = set()  # ids of the parameters of the model
        self.outputs: list[nn.Module] = []  # whose outputs may leave what the model returns
        self.given: list[Dims] = []  # the dimensions of these outputs
        self.returned: dict[Any, list[Dims]] = {}  # by pass the dimensions of what the model returned
        self.origins: dict[int, Origin] = {}  # ids of tensors -> the call that made them
        self.scaled: Scaled = []  # what to multiply by the root of a share that stays
        self.scaled_by: dict[float, Scaled | None] = {}  # by numbers of the code's; None where nothing can make up
        self.where: CallSites | None = None
        self.numbered = Numbered(self)  # what numbers of Python's mean
        self.equations.tells = self.numbered.compared
        self.turn: int | None = None  # which choices are made; None: those of the values
        self.own: set[Axis] = set()  # of the model's tensors, when other choices are made
        self.looks: list[Look] = []  # along dimensions whose things may be chosen between
        self.chosen: list[Expression] = []  # dimensions that a choice was made in
        self.multiples: list[tuple[Expression, int]] = []  # dimensions whose sizes kernels need to be multiples
        self.spots: dict[int, Spot] = {}  # ids of products -> the call that made them
        self.places: dict[int, Expression] = {}  # ids of tensors of integers -> the dimension whose places they say
        self.computed: dict[int, Expression] = {}  # ids of tensors that were computed of such
        self.rows_of_places: dict[int, tuple[Expression, int]] = {}  # ids of places times how many lie in a row
        self.ranked: dict[Axis, Axis] = {}  # the places in an order -> what is in it
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
        self.spots.clear()
        self.places.clear()
        self.computed.clear()
        self.rows_of_places.clear()
        self.numbered.settle()
        self._dims = {key: dims for key, dims in self._dims.items() if key in kept}
        self._alive = [kept[key] for key in self._dims]

    def everything(self) -> Iterable[Dims]:
        """The dimensions of all tensors that it knows."""
        return self._dims.values()

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
        for each in self._not_made_up(self.scaled, tensor, other, dim):
            freeze(each, why)

    def multiplied_by(self, number: float, tensor: Tensor, other: Tensor, dim: Expression) -> None:
        """The code multiplies the product by a number of its own, which a configuration may say by the dimension."""
        scaled = self.scaled_by.setdefault(number, [])
        if scaled is not None and self._not_made_up(scaled, tensor, other, dim):
            self.scaled_by[number] = None

    def _not_made_up(self, scaled: Scaled, tensor: Tensor, other: Tensor, dim: Expression) -> list[Expression]:
        """Dimensions for whose share no weights can make up; otherwise notes which rows of them can."""
        rows, its = rows_of(tensor, self.origins), rows_of(other, self.origins)
        if rows is None or not self.weights.issuperset(key for key, _ in rows):
            return [dim]
        if overlap(rows, its) if its else depends_on(other, [key for key, _ in rows], self.origins):
            return [dim]
        for before, its_dim in scaled:
            if overlap(rows, before):
                return [] if list(leaves(dim)) == list(leaves(its_dim)) and same(rows, before) else [dim, its_dim]
        scaled.append((rows, dim))
        return []

    def compared(self, call: Call, tensor: Tensor, at: int, why: str, *, scores: bool = True) -> bool:
        """A call compares the things of a dimension with each other, and is as good without those of the least score.

        Whether they may be chosen between, and so leave; where they may not, they are frozen. ``scores``: what is not
        there is minus infinity; else zero.
        """
        dim = self.dims(tensor)[at]
        if all(axis.reasons or axis.size == 1 for axis in leaves(dim)):
            freeze(dim, why)
            return False
        look(dim, why)
        if scores and tensor.is_floating_point():
            self.looks.append(Look(call.spot, made=False, at=at, dim=dim))
            self.looks += [
                Look(self.spots[id(each)], made=True, at=its, dim=self.dims(each)[its])
                for each, its in self._makers(tensor, dim)
            ]
        return True

    def _makers(self, tensor: Tensor, dim: Expression) -> list[tuple[Tensor, int]]:
        """The products that scores come from, and where they have them."""
        axes = {axis for axis in leaves(dim) if axis.size > 1}
        waiting, seen, found = [tensor], {id(tensor)}, []
        while waiting:
            each = waiting.pop()
            there = [at for at, its in enumerate(self.dims(each)) if not axes.isdisjoint(leaves(its))]
            if not there:
                continue
            if id(each) in self.spots:
                found.append((each, there[0]))
                continue
            origin = self.origins.get(id(each))
            for part in () if origin is None else origin.tensors():
                if id(part) not in seen:
                    seen.add(id(part))
                    waiting.append(part)
        return found

    def choose(self, dim: Expression, tensor: Tensor, why: str = "chosen by a tensor") -> bool:
        """A tensor says which things of a dimension to take: those whose places it holds; else it is frozen."""
        places = self.places.get(id(tensor))
        if places is not None and size_of(places) > size_of(dim):
            places = (cut(places, size_of(dim)) or (None,))[0]  # those behind its end are not meant
        if places is None or size_of(places) != size_of(dim) or not unify(dim, places):
            freeze(dim, why)
            return False
        look(dim, why)
        self.chosen.append(dim)
        return True

    def ranks(self, ordered: Axis) -> Axis:
        """The positions of an axis in the order of their scores, the best first; the size is that of the axis."""
        made = Axis(ordered.size)
        tie(ordered, made, "as many as were ordered")
        self.ranked[made] = ordered
        return made

    def agree(self, number: int, dim: Expression, why: str) -> None:
        """A size that the code asks for is that of a dimension, whatever leaves."""
        self.equations.append(Equation(formula_of(number), dim, why))

    def told(self, dim: Expression, why: str) -> None:
        """A size that the code does not ask for here, but, where the model goes another way, as with a mask, of an
        integer of the running module. What all modules of its kind hold alike may be that: if the code compared it,
        it is the dimension's, and else the dimension stays whole."""
        if self.where is None:
            return
        runs = self.where.module
        alike = [vars(each) for each in self.where.modules() if type(each) is type(runs)]
        held = {
            key: number
            for key, number in vars(runs).items()
            if isinstance(number, Known)
            and all(isinstance(its := each.get(key), int) and int.__index__(its) == size_of(dim) for each in alike)
        }
        asked = [part for each in self.equations if isinstance(each, Outcome) for part in (each.left, each.right)]
        if len(held) == 1 and (number := next(iter(held.values()))).formula in asked:
            self.agree(number, dim, why)
        elif held:
            freeze(dim, f"{why}, of which there are as many as {next(iter(held))} says")

    def number(self, dim: Expression) -> Known:
        """The size of a dimension, which remembers where it came from."""
        return Known(size_of(dim), dim, self.equations)

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        tensors = tensors_of_tree((args, kwargs))
        for each in tensors:
            if private.is_wrapped(each):
                self._freeze_wrapped(each)
            self.dims(each)  # before the call, which may change the shape
            self.touched.add(id(each))
        body = written_in_others(func, name)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        known = operation(name)
        self.calls[name] += 1
        spot = Spot("", name, self.calls[name]) if self.where is None else self.where.spot(name)
        plain_args, plain_kwargs = private.tree_map_only(Known, int.__index__, (args, kwargs))
        plain_args, plain_kwargs = private.tree_map_only(Along, Along.plain, (plain_args, plain_kwargs))
        self.inside += 1
        if self.turn is not None and name in _CHOOSING:
            plain_args = self._in_turn(name, plain_args, plain_kwargs)
        try:
            if known.steady is None:
                out = func(*plain_args, **plain_kwargs)
            else:
                out = known.steady(func, *plain_args, **plain_kwargs)
        finally:
            self.inside -= 1
        self._remember(func, name, plain_args, plain_kwargs, out)
        call = Call(self, name, args, kwargs, out, spot)
        if known.values == "used" and tensors_of_tree(out):
            self.reached.update(axis for each in call.tensors() for dim in self.dims(each) for axis in leaves(dim))
        self._look(call)
        if known.stream == "contraction" and isinstance(out, Tensor):
            self.spots[id(out)] = spot
        self._follow_statistics(call)
        self._follow_places(call)
        self.numbered.meet(call.tensors(), tensors_of_tree(out))
        return call.out

    def _in_turn(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call that chooses along a dimension of the model's own, with other scores."""
        position = _CHOOSING[name]
        at = args[position] if len(args) > position else kwargs.get("dim", -1 if name == "topk" else None)
        if not args or type(at) is not int or not args[0].is_floating_point() or not args[0].dim():
            return args
        axes = [axis for axis in leaves(self.dims(args[0])[at]) if axis.size > 1]
        if not axes or not self.own.issuperset(axes):
            return args
        assert self.turn is not None
        places = torch.arange(args[0].shape[at], device=args[0].device)
        return (cycle_choices(args[0], at % args[0].dim(), places, self.turn), *args[1:])

    def _remember(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Where the results came from; a tensor that was changed in place came from what it was, too."""
        results = [out] if isinstance(out, Tensor) else tensors_of_tree(out)
        given = {id(each) for each in tensors_of_tree((args, kwargs))}
        if operation(name).writes:
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
        axes = operation(name).axes
        if axes is not None:
            self.inside += 1  # what the rule computes is not the model's
            try:
                made = axes(call)
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
        if operation(call.name).values != "kept" and outs:
            for dim in dims:
                freeze(dim, f"a statistic over it is used by {call.name}")
            return
        for out in outs:
            there = {axis for dim in self.dims(out) for axis in leaves(dim)}
            if left := [dim for dim in dims if there.isdisjoint(axis for axis in leaves(dim) if axis.size > 1)]:
                self.pooled[id(out)] = left

    def _follow_places(self, call: Call) -> None:
        """Numbers that say places still do after they were moved, or taken in part; none may leave torch."""
        given, outs = call.tensors(), tensors_of_tree(call.out)
        places = self.places.get(id(given[0])) if given else None
        from_places = [self.places.get(id(each), self.computed.get(id(each))) for each in given]
        source = next((each for each in from_places if each is not None), None)
        if source is None:
            return
        if not outs and operation(call.name).asks is None and call.name not in ("iter", "setitem"):
            numbers = private.tree_leaves(call.out)
            if places is not None and all(type(each) is int for each in numbers):
                self.numbered.leaves(places, numbers)
            else:
                freeze(source, f"{call.name} takes it out of torch")
        same = call.name in _SAME_NUMBERS
        if call.name in ("cat", "concat", "concatenate", "stack"):
            others = [self.places.get(id(each)) for each in given]
            same = all(
                places is not None and other is not None and size_of(other) == size_of(places) and unify(places, other)
                for other in others
            )
        elif call.name == "masked_fill" and places is not None:  # by the number of a place
            value = call.get(2, "value")
            same = type(value) is int and 0 <= value < size_of(places)
        if call.name in ("mul", "rmul") and places is not None and isinstance(number := call.get(1, "other"), Known):
            self.rows_of_places[id(outs[0])] = places, number
        elif call.name == "add" and len(given) == 2 and outs and self._follow_grid(given, outs[0]):
            return
        for out in outs:
            if same and places is not None and (call.name not in ("sort", "unique") or out is outs[0]):
                self.places.setdefault(id(out), places)
                continue
            if out is given[0] and call.name != "iter":
                self.places.pop(id(out), None)  # written over
            if id(out) not in self.places and call.name in _ARITHMETIC | _SAME_NUMBERS:
                self.computed[id(out)] = source

    def _follow_grid(self, given: Sequence[Tensor], out: Tensor) -> bool:
        """Places times the length of a row, and places in it, are places of both together."""
        for one, other in (given, given[::-1]):
            rows, inner = self.rows_of_places.get(id(one)), self.places.get(id(other))
            if rows is not None and inner is not None and int.__index__(rows[1]) == size_of(inner):
                self.agree(rows[1], inner, f"rows of {size_of(inner)}")
                self.places[id(out)] = multiplied([rows[0], inner])
                return True
        return False

    def _freeze_wrapped(self, tensor: Tensor) -> None:
        """A tensor inside torch.func.vmap or grad: it has other dimensions there than outside."""
        inner = tensor
        while private.is_wrapped(inner):
            inner = private.unwrapped_once(inner)
            if self.knows(inner):
                for dim in self.dims(inner):
                    freeze(dim, "used inside torch.func")


class Unseen(private.DispatchMode):  # type: ignore[no-untyped-call]
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
    """A call of a torch function during tracing: its arguments, results and axes, for a rule."""

    def __init__(
        self,
        trace: Trace,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
        spot: Spot | None = None,
    ) -> None:
        self.trace, self.name, self.args, self.kwargs, self.out = trace, name, args, kwargs, out
        self.spot = spot or Spot("", name, 0)
        self._tensors: list[Tensor] | None = None

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
        if self._tensors is None:
            self._tensors = tensors_of_tree((self.args, dict(self.kwargs)))
        return self._tensors


def without_rule(call: Call) -> None:
    """Freeze all that a call touches."""
    why = f"{call.name} has no rule"
    call.trace.unknown[call.name] = call.trace.unknown.get(call.name, 0) + 1
    for tensor in call.tensors():
        for dim in call.dims(tensor):
            freeze(dim, why)
    for number in private.tree_leaves((call.args, dict(call.kwargs))):
        if isinstance(number, Known):
            number.stays(why)
    for tensor in tensors_of_tree(call.out):
        if not call.trace.knows(tensor) or [size_of(dim) for dim in call.dims(tensor)] != list(tensor.shape):
            call.trace.declare(tensor, [call.fresh(size, why) for size in tensor.shape])


def tensors_of_tree(tree: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts.

    >>> [each.item() for each in tensors_of_tree({"a": (torch.tensor(1), [torch.tensor(2)]), "b": "no"})]
    [1, 2]
    """
    return private.tensors_of_tree(tree)
