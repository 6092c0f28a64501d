"""Residual branches: what of a model's calls meets the rest only in a sum that its own input goes around.

Law: a branch is a cone of the data flow. Whatever is in it reaches the model's outputs through one term of one sum, so
a model in which that term is zero does not need the modules that lie in it whole.

`Flow` watches passes, beside the trace of axes: which call took which tensors, in which modules. `branches_of` reads
the sums off it: ``x + f(x)``, ``x + attention(x) + mlp(x)``, ``shortcut(x) + f(x)`` where the shortcut is the shorter
way.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from secateur.coupling.flow import Flow, Step
from secateur.coupling.forms import Forms, axes_of
from secateur.coupling.operations import operation

__all__ = ["Branch", "Term", "branches_of", "in_all"]


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
        shared = {axis for each in self.model.parameters() for dim in self.trace.dims(each) for axis in axes_of(dim)}
        branches = []
        for final in range(len(self.calls)):
            call = self.calls[final]
            if call.number >= 0 and call.alive and self._joins(call) is None:
                terms = list(self._terms(final))
                dims = self.values[call.outputs[0]].dims
                features = tuple(at for at, dim in enumerate(dims) if shared & set(axes_of(dim)))
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
