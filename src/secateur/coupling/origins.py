"""Which entries of which parameters a tensor is proportional to, followed backwards through the calls that made it.

Law: multiply those entries by a number, and the tensor is multiplied by it; where that is not sure there is no answer.

Each position of the tensor is marked with the row of a parameter that it comes from, by giving the functions that only
move values the marks instead of the values. What adds has several marks a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.coupling.operations import Weight, operation
from secateur.support import private

__all__ = ["Origin", "Rows", "depends_on", "overlap", "rows_of", "same"]

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
    if tensor.is_meta or not tensor.numel():
        return None
    way = _Way(origins)
    marks = way.marks(tensor, 0)
    if marks is None:
        return None
    found: dict[tuple[int, int], list[npt.NDArray[np.int64]]] = {}
    for each in marks:
        for mark in np.unique(each.cpu().numpy()):
            at = np.searchsorted(way.begins, mark, side="right") - 1
            found.setdefault(way.keys[at], []).append(mark - way.begins[at])
    return {key: np.unique(np.asarray(rows, dtype=np.int64)) for key, rows in found.items()}


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
        return torch.arange(begin, begin + tensor.shape[dim], device=tensor.device).reshape(shape).expand(tensor.shape)

    def _moved(self, origin: Origin, dim: int) -> _Marks | None:
        marks: dict[int, _Marks] = {}
        for each in origin.tensors():
            if each.is_floating_point():
                its = self.marks(each, dim)
                if its is None:
                    return None
                marks[id(each)] = its
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
