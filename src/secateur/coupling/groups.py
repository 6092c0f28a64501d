"""Which slices of which tensors live and die together: `find_coupling`.

Law: whatever is removed of the groups' axes, from all members at the same indices, the model still runs and computes
what the original computes with the removed entries zeroed. What is not sure to do so is frozen, with the reason.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import secateur.coupling.rules  # noqa: F401  the rules register themselves
from secateur.coupling.axes import (
    Axis,
    Expression,
    Product,
    freeze,
    indices_of,
    kept_positions,
    leaves,
    resolved,
    size_of,
)
from secateur.coupling.numbers import (
    Attribute,
    Equation,
    Outcome,
    Polynomial,
    axes_of,
    evaluated,
    is_frozen,
    parts_of,
    representative,
    settle,
)
from secateur.coupling.residual_streams import Branch, Flow, in_all
from secateur.coupling.trace import Trace, Unseen, numbers_that_remember
from secateur.support import in_mode, restored, run_example, seeded, tensors_in, tensors_of

__all__ = ["Coupling", "Group", "Kept", "find_coupling"]

Kept = Mapping[Axis, npt.NDArray[np.bool_]]


@dataclass(frozen=True, eq=False)
class Group:
    """Units that live and die together: index i of the axis is the same slices of all members.

    ``name`` is that of the first tensor whose outputs they are (another group of the same is numbered); ``members`` are
    ``(name of a tensor, dimension)``; groups with the same ``tied`` keep the same share of their units, equally many of
    equally many; ``notes`` say what changes beside the slices: statistics over the axis.
    """

    name: str
    axis: Axis
    size: int
    members: tuple[tuple[str, int], ...]
    tied: int
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Group({self.name!r}, size={self.size}, members={len(self.members)})"


class Coupling:
    """What `find_coupling` found: the free groups, and what is frozen, with the reason.

    Attributes:
        groups: the `Group`\\ s, in the order of the model's parameters.
        frozen: ``{(name, dimension): reasons}`` of the dimensions of parameters of which nothing may leave.
        passes: which passes were watched: ``(number of the inputs, training)``.
        unknown: ``{function: calls}`` of the functions that have no rule.
        branches: the residual branches (`Branch`), in the order in which they meet their stream.
    """

    def __init__(
        self,
        trace: Trace,
        tensors: Mapping[str, Tensor],
        passes: Sequence[tuple[int, bool]],
        branches: Sequence[Branch] = (),
    ) -> None:
        self._trace = trace
        self._tensors = dict(tensors)
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._dims: dict[str, list[Expression]] = {name: trace.dims(tensor) for name, tensor in self._tensors.items()}
        self.unknown = dict(trace.unknown)
        self.passes = passes
        self.branches = list(branches)
        self._attributes: dict[Attribute, Polynomial] = {}
        self._alike: dict[Axis, Axis] = {}  # of those that keep the same share, a chain to the first of them
        self.groups: list[Group] = []
        self.frozen: dict[tuple[str, int], str] = {}
        self._settle()

    def freeze(self, groups: Iterable[Group], why: str) -> None:
        """Nothing of these may leave."""
        frozen = {group.tied for group in groups}
        for group in self.groups:
            if group.tied in frozen:
                freeze(representative(group.axis), why)
        self._settle()

    def tie(self, sets: Iterable[Iterable[Group]]) -> None:
        """Groups of one set keep the same share of their units; where one has to stay, all do."""
        for each in sets:
            first, *others = [self._first_of(group.axis) for group in each]
            for other in others:
                if self._first_of(other) is not self._first_of(first):
                    self._alike[self._first_of(other)] = self._first_of(first)
        self._settle()

    def used(self) -> dict[Attribute, Polynomial]:
        """The integers of modules that the passes made use of, in counts of axes; a constant where one stays."""
        found = {
            part: self._attributes.get(part, {(): Fraction(part.value)})
            for each in self._trace.equations
            if isinstance(each, Equation)
            for part in parts_of(each)
            if isinstance(part, Attribute)
        }
        return {each: value for each, value in found.items() if value}

    def names(self) -> list[str]:
        """The tensors of the model."""
        return list(self._dims)

    def dims(self, name: str) -> list[Expression]:
        """The dimensions of a tensor of the model, as expressions of axes."""
        return self._dims[name]

    def kept(self, name: str, kept: Kept) -> list[npt.NDArray[np.bool_]]:
        """Which positions of each dimension of a tensor stay."""
        return [kept_positions(dim, kept) for dim in self._dims[name]]

    def indices(self, group: Group, name: str, dim: int) -> npt.NDArray[np.int64]:
        """For each position of a dimension of a tensor the unit of the group that it belongs to, or -1."""
        return indices_of(group.axis, self._dims[name][dim])

    def attributes(self, counts: Mapping[Axis, int]) -> dict[Attribute, int]:
        """The integers of modules that change when so many stay of each axis, and what they become."""
        by_representative = {representative(axis): count for axis, count in counts.items()}
        values = {each: evaluated(polynomial, by_representative) for each, polynomial in self._attributes.items()}
        return {attribute: value for attribute, value in values.items() if value != attribute.value}

    def scales(self, counts: Mapping[Axis, int]) -> list[tuple[str, int, npt.NDArray[np.int64], float]]:
        """``(name of a parameter, dimension, indices, factor)``: what makes up for attention that its width scales."""
        found = []
        for rows, dim in self._trace.scaled:
            factor = math.sqrt(_count(dim, counts) / size_of(dim))
            if factor != 1:
                found += [(self._names[key], at, indices, factor) for (key, at), indices in rows.items()]
        return found

    def contradicted(self, counts: Mapping[Axis, int]) -> list[Group]:
        """The groups of which a comparison in the code depends that would come out otherwise with these counts."""
        by_representative = {representative(axis): count for axis, count in counts.items()}
        axes: set[Axis] = set()
        for each in self._trace.equations:
            if isinstance(each, Outcome) and not each.holds(self._attributes, by_representative):
                axes |= axes_of(each, self._attributes)
        return [group for group in self.groups if representative(group.axis) in axes]

    def size(self, name: str, counts: Mapping[Axis, int]) -> int:
        """How many entries a tensor has when so many stay of each axis."""
        return math.prod(_count(dim, counts) for dim in self._dims[name])

    def multiply_adds(self, counts: Mapping[Axis, int]) -> int:
        """Multiply-adds of the passes that were watched, when so many stay of each axis; only those of contractions."""
        return sum(math.prod(_count(dim, counts) for dim in dims) for dims in self._trace.products)

    def memory(self, counts: Mapping[Axis, int]) -> int:
        """Bytes of parameters, buffers and all results of the first pass, as training holds them."""
        held = sum(self.size(name, counts) * tensor.element_size() for name, tensor in self._tensors.items())
        return held + sum(math.prod(_count(dim, counts) for dim in dims) * size for dims, size in self._trace.made)

    def statistics(self, groups: Iterable[Group]) -> dict[Any, set[tuple[str, int]]]:
        """For each pass the calls, by name and number, that compute a statistic over one of the groups' axes."""
        axes = {group.axis for group in groups}
        found: dict[Any, set[tuple[str, int]]] = {in_pass: set() for in_pass in self.passes}
        for flag in self._trace.flagged:
            if not axes.isdisjoint(leaves(flag.dim)):
                found[flag.in_pass].add((flag.name, flag.number))
        return found

    def _settle(self) -> None:
        self._attributes = settle(self._trace.equations)
        members: dict[Axis, list[tuple[str, int]]] = {}
        self.frozen = {}
        for name, dims in self._dims.items():
            for at, dim in enumerate(dims):
                reasons: list[str] = []
                for axis in dict.fromkeys(leaves(dim)):
                    if axis.size > 1 and not is_frozen(axis):
                        members.setdefault(axis, []).append((name, at))
                    elif axis.size > 1:
                        reasons += [each for each in (*axis.reasons, *representative(axis).reasons) if each]
                if reasons:
                    self.frozen[name, at] = "; ".join(dict.fromkeys(reasons))
        notes: dict[Axis, list[str]] = {}
        for flag in self._trace.flagged:
            for axis in leaves(flag.dim):
                notes.setdefault(axis, []).append(f"{flag.name} over it")
        numbers = {axis: number for number, axis in enumerate(dict.fromkeys(map(self._first_of, members)))}
        names = Counter[str]()
        self.groups = [
            Group(
                self._named(places, names),
                axis,
                axis.size,
                tuple(places),
                numbers[self._first_of(axis)],
                tuple(dict.fromkeys(notes.get(axis, ()))),
            )
            for axis, places in members.items()
        ]

    def _first_of(self, axis: Axis) -> Axis:
        """The axis that stands for all that keep the same share."""
        axis = representative(axis)
        while axis in self._alike:
            axis = self._alike[axis]
        return axis

    def _named(self, places: Sequence[tuple[str, int]], taken: Counter[str]) -> str:
        """A weight's outputs if it has some, rather than its inputs or a bias; another of the same is numbered."""
        outputs = [name for name, at in places if at == 0 and self._tensors[name].dim() > 1]
        name = (outputs or [name for name, _ in places])[0]
        taken[name] += 1
        return name if taken[name] == 1 else f"{name}:{taken[name]}"


def find_coupling(
    model: nn.Module, example_inputs: Any, *, modes: Iterable[bool] | None = None, more_inputs: Iterable[Any] = ()
) -> Coupling:
    """Watch forward passes of a model, and find what leaves together. Changes nothing.

    Args:
        model: any module, also on the meta device.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        modes: which of evaluation (False) and training (True) to watch; by default both, if the model can train on the
            example.
        more_inputs: further inputs of the same form; what is found with each is joined.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> (group,) = find_coupling(model, torch.zeros(1, 3)).groups
    >>> group, group.members
    (Group('0.weight', size=8, members=3), (('0.weight', 0), ('0.bias', 0), ('2.weight', 1)))
    """
    tensors = tensors_of(model)
    trace = Trace()
    for tensor in tensors.values():
        trace.declare(tensor, [Axis(size) for size in tensor.shape])
    trace.weights = {id(tensor) for tensor in tensors.values() if isinstance(tensor, nn.Parameter)}
    used: set[int] = set()
    passes: list[tuple[int, bool]] = []
    branches: list[list[Branch]] = []  # of each pass
    for number, inputs in enumerate((example_inputs, *more_inputs)):
        for training in (False, True) if modes is None else modes:
            trace.in_pass = (number, training)
            try:
                found = _watch(model, inputs, trace, tensors)
            except Exception as error:  # such as a batch normalization in training on a batch of one
                if modes is None and training:
                    continue
                if empty := [tuple(each.shape) for each in tensors_in(inputs) if not each.numel()]:
                    raise ValueError(
                        f"the model fails on the example, in which a tensor of shape {empty[0]} holds nothing "
                        f"({error}); give an example of at least one sample."
                    ) from error
                raise
            passes.append(trace.in_pass)
            branches.append(found)
            used |= trace.touched
    for tensor in tensors.values():
        if id(tensor) not in used:
            for dim in trace.dims(tensor):
                freeze(dim, "not used in the forward pass")
    reached = {leaf for axis in trace.reached for leaf in leaves(axis)}
    for tensor in tensors.values():
        if id(tensor) not in used:
            continue
        for axis in {leaf for dim in trace.dims(tensor) for leaf in leaves(dim)} - reached:
            freeze(axis, "not reached by the example")  # such as positions beyond its length
    trace.forget(tensors.values())
    return Coupling(trace, tensors, passes, in_all(branches))


def _watch(model: nn.Module, inputs: Any, trace: Trace, tensors: Mapping[str, Tensor]) -> list[Branch]:
    trace.touched.clear()
    trace.calls.clear()
    first, trace.products, trace.made = (trace.products, trace.made), [], []
    training = trace.in_pass[1]
    remembering = numbers_that_remember(model, trace.equations)
    with in_mode(model, training=training), restored(tensors), seeded(), remembering:
        for each in tensors_in(inputs):
            trace.declare(each, [_frozen(size, "an input of the model") for size in each.shape])
        flow = Flow(model, trace, trace.in_pass, tensors_in(inputs))
        with torch.no_grad(), _without_values(tensors), Unseen(trace), trace, flow:
            out = run_example(model, inputs)
        for each in tensors_in(out):
            trace.freeze_pooled(each, "a statistic over it is an output of the model")
            for dim in trace.dims(each):
                freeze(dim, "an output of the model")
    if any(first):
        trace.products, trace.made = first  # the cost is that of the first pass
    branches = flow.found(tensors_in(out))
    trace.forget(tensors.values())
    return branches


def _frozen(size: int, why: str) -> Axis:
    return Axis(size, reasons=[why])


def _count(dim: Expression, counts: Mapping[Axis, int]) -> int:
    whole = resolved(dim)
    if isinstance(whole, Axis):
        return counts.get(whole, whole.size)
    if isinstance(whole, Product):
        return math.prod(_count(factor, counts) for factor in whole.factors)
    return sum(_count(segment, counts) for segment in whole.segments)


def _without_values(tensors: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[Any]:
    """For a model on meta: code that asks for values sees that there are none, as while it is exported."""
    if not any(tensor.is_meta for tensor in tensors.values()):
        return contextlib.nullcontext()
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)
