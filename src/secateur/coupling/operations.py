"""What is known of the functions of torch: one declaration an operation, which all that follow a model ask.

Law: a fact about an operation stands in its declaration and nowhere else; where none is declared, the careful answer
holds. So a rule of a user's own reaches all who ask: the trace of axes, the residual streams, the origins of rows and
the proof.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from secateur.support import private, unknown

__all__ = ["OPERATIONS", "Operation", "Weight", "declare", "name_of", "operation", "rule", "written_in_others"]

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
