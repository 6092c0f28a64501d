"""What is known of the functions of torch: one declaration an operation, which all that follow a model ask. Which
entries of which parameters a tensor is proportional to, followed backwards through the calls that made it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.support import private, unknown

# ---- What is known of the functions of torch: one declaration an operation, which all that follow a model ask.
#
# Law: a fact about an operation stands in its declaration and nowhere else; where none is declared, the careful
# answer holds. So a rule of a user's own reaches all who ask: the trace of axes, the residual streams, the origins of
# rows and the proof.

Rule = Callable[[Any], Any]  # of a `Call`

_WORDS = {
    "asks": ("sizes", "facts"),
    "rows": ("moved", "product", "quotient", "same", "sum"),
    "stream": ("contraction", "sum"),
    "values": ("cut", "kept", "used"),
}


@dataclass(frozen=True)
class Weight:
    """A weight that a result is proportional to, and a bias that is added: ``(position, name)`` of the arguments.

    ``dim`` is the dimension of the weight that the result has: 0, with those of a kernel behind it, or -1.
    """

    at: tuple[int, str]
    bias: tuple[int, str] | None = None
    dim: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """The declaration of a torch function for tracing; each facet answers one question about it.

    Attributes:
        axes: what it does to the dimensions of tensors, a function of the `Call`. Without one it freezes all that it
            touches, unless it is written in other functions: then those are followed.
        instead: a function that computes the same in other functions of torch, which are followed.
        values: what it makes of the values along an axis. "kept": each for itself, or all of them moved, so that a
            statistic stays one; "cut": some are taken, or others joined to them; "used": anything else.
        rows: how its result is proportional to rows of parameters. "moved": it only moves values (it is called with
            integers in their place); "same": what its
            first tensor is; "sum" of two tensors; "product"; "quotient", to its first tensor; or to a `Weight`.
        stream: what it is on the way of a residual stream: a "sum" of its first two arguments, or a "contraction",
            which a branch has and the way around it has not.
        zero: whether it makes a 0 of a single 0, so that this may stand for a tensor of zeros.
        asks: a question that is not about values: for "sizes", or for other "facts" such as a dtype.
        draws: whether it draws random numbers.
        writes: whether it writes into its first argument, and returns nothing.
        steady: ``(function, *arguments)``: how it is called where passes are compared number by number, for one that
            draws as many random numbers as there are entries.
        proved: ``(function, *arguments)``: how the proof calls it, where what it computes would hide something.
        uncounted: ``(*arguments, sums=)``: what the proof computes instead where it takes a statistic over an axis that
            loses entries: a form that zeros do not change, which with ``sums`` is made of sums, without of nothing.
    """

    axes: Rule | None = None
    instead: Callable[..., Any] | None = None
    values: str = "used"
    rows: str | Weight | None = None
    stream: str | None = None
    zero: bool = False
    asks: str | None = None
    draws: bool = False
    writes: bool = False
    steady: Callable[..., Any] | None = None
    proved: Callable[..., Any] | None = None
    uncounted: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for facet, words in _WORDS.items():
            said = getattr(self, facet)
            if isinstance(said, str) and said not in words:
                raise unknown(said, words, f"value of {facet}")


OPERATIONS: dict[str, Operation] = {}
_UNDECLARED = Operation()
_FACETS = frozenset(each.name for each in fields(Operation))


def operation(name: str) -> Operation:
    """The declaration of a torch function, by its `name_of`.

    >>> import secateur.coupling  # with its rules
    >>> operation("relu").values, operation("iadd").stream, operation("something_else").axes
    ('kept', 'sum', None)
    """
    return OPERATIONS.get(name, _UNDECLARED)


def declare(*names: str, **facets: Any) -> None:
    """Declare what torch functions do; the facets are those of `Operation`. Facets that are not given stay as they
    were.

    Names are without leading or trailing underscores.

    Raises:
        TypeError: a name is none. ValueError: there is no such facet, or it has no such value.

    >>> declare("thrice", values="kept", rows="same", zero=True)
    >>> operation("thrice").rows
    'same'
    >>> declare("thrice", value="kept")
    Traceback (most recent call last):
    ...
    ValueError: no facet of an operation is called 'value'; did you mean values? There are asks, axes, draws, instead, \
proved, rows, steady, stream, uncounted, values, writes and zero.
    >>> del OPERATIONS["thrice"]
    """
    _check(names)
    for facet in facets:
        if facet not in _FACETS:
            raise unknown(facet, _FACETS, "facet of an operation")
    said = {name: replace(operation(name), **facets) for name in names}
    OPERATIONS.update(said)


def rule(*names: str, **facets: Any) -> Callable[[Rule], Rule]:
    """Register a function of a `Call` as what functions of torch do to axes, with other facets of an `Operation`.

    >>> from secateur.coupling import concatenated
    >>> @rule("twice_as_wide", values="cut")
    ... def _twice_as_wide(call):
    ...     *others, last = call.dims(call.args[0])
    ...     call.returns([*others, concatenated([last, last])])
    >>> del OPERATIONS["twice_as_wide"]
    """

    _check(names)

    def register(function: Rule) -> Rule:
        declare(*names, axes=function, **facets)
        return function

    return register


def _check(names: tuple[Any, ...]) -> None:
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f'say the names of functions of torch that it is for, as in rule("relu"), not {names!r}.')


def name_of(func: Any) -> str:
    """The name of a torch function, or of an attribute, without underscores around it.

    >>> import torch
    >>> name_of(torch.Tensor.__add__), name_of(torch.nn.functional.relu)
    ('add', 'relu')
    """
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", name)) + ("=" if name == "__set__" else "")
    return name.strip("_")


def written_in_others(func: Any, name: str) -> Callable[..., Any] | None:
    """The Python body of a function that has no rule and calls others, to be traced; None for one that has a rule."""
    known = operation(name)
    return None if known.axes is not None else known.instead or private.written_in_python(func)


# Which entries of which parameters a tensor is proportional to, followed backwards through the calls that made it.
#
# Law: multiply those entries by a number, and the tensor is multiplied by it; where that is not sure there is no
# answer.
#
# Each position of the tensor is marked with the row of a parameter that it comes from, by giving the functions that
# only move values the marks instead of the values. What adds has several marks a position.

Rows = dict[tuple[int, int], npt.NDArray[np.int64]]  # (id of a parameter, dimension) -> sorted indices
_Marks = list[Tensor]  # integers in the tensor's shape: what it is the sum of


@dataclass(frozen=True, eq=False)
class Origin:
    """The call that produced a tensor, and its index among that call's outputs."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int | None = None

    def get(self, position: int, name: str) -> Any:
        """An argument by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name)

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return private.tensors_of_tree((self.args, dict(self.kwargs)))


def rows_of(tensor: Tensor, origins: Mapping[int, Origin]) -> Rows | None:
    """The rows that a tensor is proportional to; None where it is to none, or it is not known.

    Args:
        tensor: what was made.
        origins: ``{id of a tensor: the call that made it}`` of all tensors on the way; parameters have none.

    >>> weight, x = nn.Parameter(torch.randn(6, 2)), torch.randn(3, 2)
    >>> y = torch.nn.functional.linear(x, weight)
    >>> half = y.chunk(2, 1)[1]
    >>> origins = {id(y): Origin("linear", torch.nn.functional.linear, (x, weight), {})}
    >>> origins[id(half)] = Origin("chunk", torch.chunk, (y, 2, 1), {}, 1)
    >>> rows_of(half, origins)[id(weight), 0]
    array([3, 4, 5])
    """
    if not tensor.numel():
        return None
    way = _Way(origins)
    with private.real_values():
        marks = way.marks(tensor, 0)
        every = None if marks is None else [np.unique(each.cpu().numpy()) for each in marks]
    if every is None:
        return None
    marked = np.unique(np.concatenate(every))
    ends = np.searchsorted(marked, [*way.begins, way.following])
    parts = zip(way.keys, way.begins, itertools.pairwise(ends), strict=True)
    return {key: marked[first:last] - begin for key, begin, (first, last) in parts if first < last}


def overlap(one: Rows, other: Rows) -> bool:
    """Whether two have an entry of a parameter in common."""
    return any(
        first == second and (at != its or np.intersect1d(rows, others).size > 0)
        for (first, at), rows in one.items()
        for (second, its), others in other.items()
    )


def same(one: Rows, other: Rows) -> bool:
    """Whether they are the same entries."""
    return one.keys() == other.keys() and all(np.array_equal(rows, other[key]) for key, rows in one.items())


def depends_on(tensor: Tensor, keys: Iterable[int], origins: Mapping[int, Origin]) -> bool:
    """Whether some of the tensors with these ids had a part in it."""
    wanted, seen, waiting = set(keys), set[int](), [tensor]
    while waiting:
        each = waiting.pop()
        if id(each) in wanted:
            return True
        if id(each) not in seen:
            seen.add(id(each))
            origin = origins.get(id(each))
            waiting += [] if origin is None else origin.tensors()
    return False


class _Way:
    """One walk backwards."""

    def __init__(self, origins: Mapping[int, Origin]) -> None:
        self.origins = origins
        self.keys: list[tuple[int, int]] = []
        self.begins: list[int] = []  # the first mark of each key
        self.following = 0

    def marks(self, tensor: Tensor, dim: int) -> _Marks | None:
        """``dim``: which dimension of a parameter is marked, if the way ends at one."""
        if isinstance(tensor, nn.Parameter):
            return [self._parameter(tensor, dim)] if dim < tensor.dim() and tensor.is_floating_point() else None
        origin = self.origins.get(id(tensor))
        if origin is None:
            return None
        if operation(origin.name).rows == "moved":
            return self._moved(origin, dim)
        found = self._computed(origin, dim)
        return None if found is None else [each.expand(tensor.shape) for each in found]

    def _parameter(self, tensor: Tensor, dim: int) -> Tensor:
        key = id(tensor), dim
        if key not in self.keys:
            self.keys.append(key)
            self.begins.append(self.following)
            self.following += tensor.shape[dim]
        begin = self.begins[self.keys.index(key)]
        shape = [1] * tensor.dim()
        shape[dim] = -1
        device = "cpu" if tensor.is_meta else tensor.device
        return torch.arange(begin, begin + tensor.shape[dim], device=device).reshape(shape).expand(tensor.shape)

    def _moved(self, origin: Origin, dim: int) -> _Marks | None:
        marks: dict[int, _Marks] = {}
        for each in origin.tensors():
            if each.is_floating_point():
                its = self.marks(each, dim)
                if its is None:
                    return None
                marks[id(each)] = its
            elif each.is_meta or private.is_fake(each):
                return None  # places that nobody knows
        found: _Marks = []
        for number in range(max(map(len, marks.values()), default=0)):

            def marked(each: Tensor, number: int = number) -> Tensor:
                its = marks.get(id(each))
                # marks stretch without memory, so that a view may need a copy where the tensor's did not
                return each if its is None else its[min(number, len(its) - 1)].contiguous()

            args, kwargs = private.tree_map_only(Tensor, marked, (origin.args, dict(origin.kwargs)))
            out = origin.func(*args, **kwargs)
            found.append(out if origin.number is None else out[origin.number])
        return found

    def _computed(self, origin: Origin, dim: int) -> _Marks | None:
        tensors = origin.tensors()
        match operation(origin.name).rows:
            case "same":
                return self.marks(tensors[0], dim)
            case "sum":  # of two tensors: a number that is added is proportional to nothing
                return self._all(self.marks(each, dim) for each in tensors) if len(tensors) == 2 else None
            case "product":
                return self._multiplied(tensors, dim, divided=False)
            case "quotient":
                return self._multiplied(tensors, dim, divided=True)
            case Weight() as weight:
                return self._by_weight(origin, weight)
        return None

    def _multiplied(self, tensors: list[Tensor], dim: int, *, divided: bool) -> _Marks | None:
        for at, each in enumerate(tensors[:1] if divided else tensors):
            marks = self.marks(each, dim)
            if marks is None:
                continue
            other = tensors[1 - at : 2 - at] if len(tensors) == 2 else []
            if any(depends_on(its, [key for key, _ in self.keys], self.origins) for its in other):
                return None  # not proportional, but of another degree
            return marks
        return None

    def _by_weight(self, origin: Origin, said: Weight) -> _Marks | None:
        """Functions of a weight and a bias, to which their result is proportional."""
        weight = origin.get(*said.at)
        bias = None if said.bias is None else origin.get(*said.bias)
        if not isinstance(weight, Tensor):
            return None
        rows = self._along(weight, said.dim if said.dim >= 0 else weight.dim() + said.dim)
        its = [] if bias is None else self._along(bias, 0)
        both = self._all([rows, its])
        if said.dim == 0 and both is not None:  # behind it are the dimensions that a kernel moves over
            return [each.reshape(-1, *(1 for _ in weight.shape[2:])) for each in both]
        return both

    def _along(self, weight: Tensor, own: int) -> _Marks | None:
        """One mark for each index along a dimension of a weight, whatever the other indices."""
        if isinstance(weight, nn.Parameter) and weight.numel():  # its marks are as many as a large matrix has entries
            marks = self.marks(weight, own)
            first: tuple[Any, ...] = (slice(None), *[0] * (weight.dim() - 1))
            return None if marks is None else [each.movedim(own, 0)[first] for each in marks]
        for dim in range(weight.dim()):
            marks = self.marks(weight, dim)
            if marks is None:
                continue
            flat = [each.movedim(own, 0).reshape(weight.shape[own], -1) for each in marks]
            if all(bool((each == each[:, :1]).all()) for each in flat):
                return [each[:, 0] for each in flat]
        return None

    def _all(self, parts: Any) -> _Marks | None:
        found: _Marks = []
        for part in parts:
            if part is None:
                return None
            found += part
        return found
