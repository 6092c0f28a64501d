"""What stays in place of each module of a residual branch, as a plan holds it.

Law: a module leaves only if all of its calls lie in the branch, and what it returned is known: its input, or zeros
whose sizes follow from the input's and from its own weights.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from secateur.coupling.axes import Axis, Expression, leaves, size_of
from secateur.coupling.flow import Flow, Strange, Visit
from secateur.coupling.operations import operation
from secateur.support import private

__all__ = ["Forms", "axes_of"]

_CACHES = ("past_key_values", "past_key_value")  # how transformers' attention modules are handed their cache


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
        own = {axis for each in module.parameters() for dim in self._trace.dims(each) for axis in axes_of(dim)}
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
        caches = [each for each in _CACHES if each in inspect.signature(module.forward).parameters]
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


def axes_of(expression: Expression) -> list[Axis]:
    return [axis for axis in leaves(expression) if axis.size > 1]


def _same_dim(one: Expression, other: Expression) -> bool:
    """Whether two dimensions are the same axes; of size one they are anyway."""
    if size_of(one) != size_of(other):
        return False
    return one is other or axes_of(one) == axes_of(other)


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
    return None if same or not own.issuperset(axes_of(dim)) else (-1, size_of(dim), *plain)


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
