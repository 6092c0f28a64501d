"""What stays in place of a module of a residual branch that left. Which slices of which tensors live and die together,
as `find_coupling` found it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.coupling.axes import (
    Axis,
    Expression,
    Product,
    indices_of,
    kept_positions,
    leaves,
    occurrences_of,
    representative,
    resolved,
    size_of,
    terms_of,
)
from secateur.coupling.equations import Polynomial, axes_of, evaluated, holds, is_frozen, settle
from secateur.coupling.numbers import Attribute, Equation, Outcome, parts_of
from secateur.coupling.residual_streams import CACHES, Branch
from secateur.coupling.trace import Dims, Look, Trace
from secateur.support import Column, Part, Shown, Table, matches

# ---- What stays in place of a module of a residual branch that left.
#
# Law: it returns zeros of the structure, and where the code around asks the shape, of what the module returned; and
# it holds no parameter.


@dataclass
class _Zeros:
    """Zeros of a shape: dimension d is ``(times * the input's at + plus) // over``, or ``sizes`` where ``at`` is -1."""

    at: tuple[int, ...]
    sizes: tuple[int, ...]
    times: tuple[int, ...]
    plus: tuple[int, ...]
    over: tuple[int, ...]
    whole: bool  # in memory of their own, for code that writes into them

    def like(self, x: Tensor) -> Tensor:
        shape = []
        for at, size, times, plus, over in zip(self.at, self.sizes, self.times, self.plus, self.over, strict=True):
            if at < 0:
                shape.append(size)
            else:
                given = x.shape[at]
                shape.append(given if (times, plus, over) == (1, 0, 1) else (given * times + plus) // over)
        dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype()
        if self.whole:
            return x.new_zeros(shape, dtype=dtype)
        return x.new_zeros((), dtype=dtype).expand(shape)


class Removed(nn.Module):
    """The module in place of one whose residual branch left: it returns zeros, and has no parameters.

    They have the structure of what the module returned, and its shapes only where the code around asks for them:
    otherwise a single 0, which adds at no cost. ``form`` is what a plan holds; see `secateur.shrinking`.

    >>> gone = Removed({"was": "Linear", "input": 0, "returns": ["tuple", {"zeros": None}, None]})
    >>> gone
    Removed(Linear)
    >>> gone(torch.ones(2, 3))
    (tensor(0.), None)
    """

    def __init__(self, form: Mapping[str, Any]) -> None:
        super().__init__()
        self.was = str(form["was"])
        self.input: int | str = form["input"]
        self.cache: str | None = form.get("cache")
        self.layer_idx = int(form.get("layer", 0))
        self.returns: Any = self._held(form["returns"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros; a cache of keys and values that is passed in gets one entry for each new token."""
        x = kwargs[self.input] if isinstance(self.input, str) else args[self.input]
        names = () if self.cache is None else (self.cache, *CACHES)
        if caches := [kwargs[each] for each in names if kwargs.get(each) is not None]:
            _fill(caches[0], x, self.layer_idx, crossed=_crossed(kwargs))
        return self._zeros(self.returns, x)

    def extra_repr(self) -> str:
        """The class that it stands for."""
        return self.was

    def _held(self, returns: Any) -> Any:
        """The form, with its shapes as attributes of this module, such that their numbers follow what leaves."""
        if isinstance(returns, Mapping) and "zeros" in returns:
            if returns["zeros"] is None:
                return None, None
            name = f"zeros_{sum(key.startswith('zeros_') for key in vars(self))}"
            at, sizes, times, plus, over = (tuple(int(row[n]) for row in returns["zeros"]) for n in range(5))
            setattr(self, name, _Zeros(at, sizes, times, plus, over, bool(returns["whole"])))
            return None, name
        if isinstance(returns, Mapping):
            return {key: self._held(each) for key, each in returns["dict"].items()}
        return [returns[0], *map(self._held, returns[1:])] if isinstance(returns, list) else returns

    def _zeros(self, returns: Any, x: Tensor) -> Any:
        if isinstance(returns, tuple):
            if returns[1] is not None:
                return getattr(self, returns[1]).like(x)
            return x.new_zeros((), dtype=x.dtype if x.is_floating_point() else torch.get_default_dtype())
        if isinstance(returns, dict):
            return {key: self._zeros(each, x) for key, each in returns.items()}
        if isinstance(returns, list):
            parts = [self._zeros(each, x) for each in returns[1:]]
            return tuple(parts) if returns[0] == "tuple" else parts
        return returns


def _crossed(kwargs: Mapping[str, Any]) -> bool:
    """Whether an attention looks at another sequence, whose keys no one counts."""
    return any(kwargs.get(key) is not None for key in ("key_value_states", "encoder_hidden_states"))


def _fill(cache: Any, x: Tensor, layer: int, *, crossed: bool) -> None:
    """Keys and values of width one: a decoder asks its first layers how many words there were."""
    cache = getattr(cache, "self_attention_cache", cache)
    if not crossed:
        zeros = x.new_zeros((x.shape[0], 1, x.shape[1], 1))
        cache.update(zeros, zeros, layer)


def replacement(form: Mapping[str, Any]) -> nn.Module | None:
    """The replacement module that a plan's entry describes; None where nothing stays.

    >>> replacement({"was": "LayerNorm", "returns": "input"})
    Identity()
    """
    if form["returns"] == "nothing":
        return None
    return nn.Identity() if form["returns"] == "input" else Removed(form)


# ---- Which slices of which tensors live and die together, as `find_coupling` found it.
#
# Law: the units of a group are slices of all its members at the same indices, whatever else leaves; every dimension
# of a parameter that is in no group is frozen, with the reason.

Kept = Mapping[str, npt.NDArray[np.bool_]]  # {group: which of its units stay}


def counts_kept(kept: Kept) -> dict[str, int]:
    """How many units stay of each group.

    >>> counts_kept({"up.out": np.array([True, False, True])})
    {'up.out': 2}
    """
    return {name: int(mask.sum()) for name, mask in kept.items()}


@dataclass(frozen=True, eq=False)
class Group:
    """Units that live and die together: index i of the axis is the same slices of all members.

    ``name`` is that of the first tensor whose outputs they are (another group of the same is numbered); ``members`` are
    ``(name of a tensor, dimension)``; groups with the same ``tied`` keep the same share of their units, equally many of
    equally many; ``notes`` say what changes beside the slices: statistics over the axis. Units of a group that is
    ``chosen`` are chosen between by their scores, such as the experts of a mixture: one that is not there is one whose
    score is minus infinity, not one that is zero. Kernels need counts that are multiples of ``multiple``. Those
    that are ``returned`` leave the model's outputs, too, of which the others stay what they are.
    """

    name: str
    axis: Axis
    size: int
    members: tuple[tuple[str, int], ...]
    tied: int
    notes: tuple[str, ...]
    chosen: bool = False
    multiple: int = 1
    returned: bool = False

    @property
    def zeroed(self) -> bool:
        """Whether a model without some units is the one in which they are zero."""
        return not (self.chosen or self.returned)

    def __repr__(self) -> str:
        return f"Group({self.name!r}, size={self.size}, members={len(self.members)})"


class Coupling(Shown):
    """The result of `find_coupling`: the free groups, and what is frozen, with the reason; prints as tables.

    Attributes:
        groups: the `Group`\\ s, in the order of the model's parameters.
        frozen: ``{(name, dimension): reasons}`` of the dimensions of parameters of which nothing may leave.
        compared: those of them whose units are compared with each other, as where they are chosen between.
        passes: which passes were watched: ``(number of the inputs, training)``.
        unknown: ``{function: calls}`` of the functions that have no rule.
        branches: the residual branches (`Branch`), in the order in which they meet their stream.
        turns: how many other choices had to be made until all that is chosen between was used; see `in_turn`.
        also: the dimensions of what `find_coupling` was asked for beside.

    >>> import torch
    >>> from secateur.coupling import find_coupling
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> found = find_coupling(model, torch.ones(1, 4))
    >>> [(group.name, group.size) for group in found.groups], found.frozen["2.weight", 0]
    ([('0.weight', 8)], 'an output of the model')
    """

    def __init__(
        self,
        trace: Trace,
        tensors: Mapping[str, Tensor],
        passes: Sequence[tuple[int, bool]],
        branches: Sequence[Branch] = (),
        turns: int = 0,
        also: Sequence[Dims] = (),
    ) -> None:
        self._trace = trace
        self._tensors = dict(tensors)
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._dims: dict[str, list[Expression]] = {name: trace.dims(tensor) for name, tensor in self._tensors.items()}
        self.unknown = dict(trace.unknown)
        self.passes = passes
        self.branches = list(branches)
        self.turns, self.also = turns, also
        self._attributes = settle(trace.equations)
        self.groups = tuple(self._groups())
        self._axes = {group.name: group.axis for group in self.groups}
        self._group_of = {group.axis: group.name for group in self.groups}
        self.frozen, self.compared = self.whole({})

    def content(self) -> Iterator[Part]:
        return _tables(self.groups, self.frozen)

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

    def numbers(self, counts: Mapping[str, int]) -> dict[Attribute, int]:
        """What these integers are when so many stay of each group."""
        at = self._at(counts)
        return {each: evaluated(polynomial, at) for each, polynomial in self.used().items()}

    def names(self) -> list[str]:
        """The tensors of the model."""
        return list(self._dims)

    def dims(self, name: str) -> list[Expression]:
        """The dimensions of a tensor of the model, as expressions of axes."""
        return self._dims[name]

    def positions(self, dim: Expression, kept: Kept) -> npt.NDArray[np.bool_]:
        """Which positions of a dimension stay; groups that are not named stay whole."""
        named = ((axis, self._group_of.get(axis, "")) for axis in leaves(dim))
        return kept_positions(dim, {axis: kept[name] for axis, name in named if name in kept})

    def kept(self, name: str, kept: Kept) -> list[npt.NDArray[np.bool_]]:
        """Which positions of each dimension of a tensor stay."""
        return [self.positions(dim, kept) for dim in self._dims[name]]

    def indices(self, group: Group, name: str, dim: int) -> npt.NDArray[np.int64]:
        """For each position of a dimension of a tensor the unit of the group that it belongs to, or -1."""
        return indices_of(group.axis, self._dims[name][dim])

    def occurrences(self, group: Group, name: str, dim: int) -> list[npt.NDArray[np.int64]]:
        """The same for each time that the group's axis is a factor of the dimension, as of pairs of its units."""
        return occurrences_of(group.axis, self._dims[name][dim])

    def terms(self, name: str, dim: int) -> list[tuple[tuple[Axis, ...], npt.NDArray[np.int64]]]:
        """A dimension of a tensor as a sum of products: the axes of each term, and its positions along them."""
        return terms_of(self._dims[name][dim])

    def attributes(self, counts: Mapping[str, int]) -> dict[Attribute, int]:
        """The integers of modules that change when so many stay of each group, and what they become."""
        at = self._at(counts)
        values = {each: evaluated(polynomial, at) for each, polynomial in self._attributes.items()}
        return {attribute: value for attribute, value in values.items() if value != attribute.value}

    def made_up(self) -> frozenset[float]:
        """Numbers by which attention is scaled wherever rows of its own make its queries."""
        return frozenset(number for number, scaled in self._trace.scaled_by.items() if scaled is not None)

    def scales(
        self, counts: Mapping[str, int], numbers: Iterable[float] = ()
    ) -> list[tuple[str, int, npt.NDArray[np.int64], float]]:
        """``(name of a parameter, dimension, indices, factor)``: what makes up for attention that its width scales.

        Args:
            numbers: those of `made_up` that become what they are of the new width, too.
        """
        found, at_axes = [], self._by_axis(counts)
        for rows, dim in itertools.chain(self._trace.scaled, *(self._trace.scaled_by[each] or () for each in numbers)):
            factor = math.sqrt(_count(dim, at_axes) / size_of(dim))
            if factor != 1:
                found += [(self._names[key], at, indices, factor) for (key, at), indices in rows.items()]
        return found

    def contradicted(self, counts: Mapping[str, int]) -> list[Group]:
        """The groups on which a comparison in the code depends whose result would change with these counts."""
        at, axes = self._at(counts), set[Axis]()
        for each in self._trace.equations:
            if isinstance(each, Outcome) and not holds(each, self._attributes, at):
                axes |= axes_of(each, self._attributes)
        return [group for group in self.groups if representative(group.axis) in axes]

    def least(self, group: Group) -> int:
        """The fewest units of a group with which, all else whole, no comparison in the code comes out otherwise; of
        those that are chosen between as many as are chosen at a time."""
        return next((n for n in range(1, group.size) if not self.contradicted({group.name: n})), group.size)

    def returned(self, in_pass: tuple[int, bool], kept: Kept) -> list[list[npt.NDArray[np.bool_]]]:
        """Which positions stay of each dimension of the tensors that the model returned in a pass."""
        return [[self.positions(dim, kept) for dim in dims] for dims in self._trace.returned.get(in_pass, ())]

    def size(self, name: str, counts: Mapping[str, int]) -> int:
        """How many entries a tensor has when so many stay of each group."""
        at_axes = self._by_axis(counts)
        return math.prod(_count(dim, at_axes) for dim in self._dims[name])

    def contractions(self) -> list[tuple[Sequence[Expression], int]]:
        """The dimensions of each contraction that was watched, whose sizes multiply to its work, and 1."""
        return [(dims, 1) for dims in self._trace.products]

    def multiply_adds(self, counts: Mapping[str, int]) -> int:
        """Multiply-adds of the passes that were watched when so many stay of each group; of contractions only."""
        return int(self.total(self.contractions(), counts))

    def total(self, terms: Iterable[tuple[Sequence[Expression], float]], counts: Mapping[str, int]) -> float:
        """``sum(times * product(dims))`` when so many stay of each group."""
        at_axes = self._by_axis(counts)
        return sum(times * math.prod(_count(dim, at_axes) for dim in dims) for dims, times in terms)

    def looks(self) -> list[Look]:
        """Where scores are made and compared, by which something is chosen."""
        return list({(each.spot, each.made, each.at): each for each in self._trace.looks}.values())

    def statistics(self, groups: Iterable[Group]) -> dict[Any, set[tuple[str, int]]]:
        """For each pass the calls, by name and number, that compute a statistic over one of the groups' axes; not of
        units that are not zero where they leave."""
        axes = {group.axis for group in groups if group.zeroed}
        found: dict[Any, set[tuple[str, int]]] = {in_pass: set() for in_pass in self.passes}
        for flag in self._trace.flagged:
            if flag.in_pass in found and not axes.isdisjoint(leaves(flag.dim)):
                found[flag.in_pass].add((flag.name, flag.number))
        return found

    def whole(self, why: Mapping[str, str]) -> tuple[dict[tuple[str, int], str], dict[tuple[str, int], None]]:
        """`frozen` and `compared` if some groups stay whole beside, ``{group: why}``."""
        beside: dict[Axis, dict[str, None]] = {}
        for name, reason in why.items():
            beside.setdefault(representative(self._axes[name]), {})[reason] = None
        frozen: dict[tuple[str, int], str] = {}
        compared: dict[tuple[str, int], None] = {}
        for name, dims in self._dims.items():
            for at, dim in enumerate(dims):
                reasons: dict[str, None] = {}
                for axis in dict.fromkeys(leaves(dim)):
                    first = representative(axis)
                    if axis.size <= 1 or not (first in beside or is_frozen(axis)):
                        continue
                    reasons |= dict.fromkeys((*axis.reasons, *first.reasons, *beside.get(first, ()), *axis.looks))
                    if axis.looks:
                        compared[name, at] = None
                if said := [each for each in reasons if each]:
                    frozen[name, at] = "; ".join(said)
        return frozen, compared

    def _groups(self) -> Iterator[Group]:
        members: dict[Axis, list[tuple[str, int]]] = {}
        for name, dims in self._dims.items():
            for at, dim in enumerate(dims):
                for axis in dict.fromkeys(leaves(dim)):
                    if axis.size > 1 and not is_frozen(axis):
                        members.setdefault(axis, []).append((name, at))
        notes: dict[Axis, list[str]] = {}
        for flag in self._trace.flagged:
            for axis in leaves(flag.dim):
                notes.setdefault(axis, []).append(f"{flag.name} over it")
        returned = {
            axis for found in self._trace.returned.values() for dims in found for dim in dims for axis in leaves(dim)
        }
        multiples: dict[Axis, int] = {}
        for dim, step in self._trace.multiples:
            for axis, each in steps_of(dim, step):
                multiples[axis] = math.lcm(multiples.get(axis, 1), each)
        numbers = {axis: number for number, axis in enumerate(dict.fromkeys(map(representative, members)))}
        names = Counter[str]()
        for axis, places in members.items():
            yield Group(
                self._named(places, names, chosen=bool(axis.looks)),
                axis,
                axis.size,
                tuple(places),
                numbers[representative(axis)],
                tuple(dict.fromkeys(notes.get(axis, ()))),
                bool(axis.looks),
                multiples.get(axis, 1),
                axis in returned,
            )

    def _by_axis(self, counts: Mapping[str, int]) -> dict[Axis, int]:
        return {self._axes[name]: count for name, count in counts.items()}

    def _at(self, counts: Mapping[str, int]) -> dict[Axis, int]:
        """By the axes that stand in polynomials."""
        return {representative(self._axes[name]): count for name, count in counts.items()}

    def _named(self, places: Sequence[tuple[str, int]], taken: Counter[str], *, chosen: bool) -> str:
        """A weight's outputs if it has some, rather than its inputs or a bias; another of the same is numbered."""
        outputs = [name for name, at in places if at == 0 and self._tensors[name].dim() > 1]
        if chosen:  # a router before what it chooses between
            outputs = [name for name in outputs if self._tensors[name].dim() == 2] or outputs
        name = (outputs or [name for name, _ in places])[0]
        taken[name] += 1
        return name if taken[name] == 1 else f"{name}:{taken[name]}"


def steps_of(dim: Expression, step: int) -> Iterable[tuple[Axis, int]]:
    """Of which numbers the counts of free axes are multiples when a dimension's size is one of ``step``."""
    whole = resolved(dim)
    if isinstance(whole, Axis):
        yield whole, step
    elif isinstance(whole, Product):
        for factor in whole.factors:
            yield from steps_of(factor, step // math.gcd(step, size_of(whole) // size_of(factor)))
    else:
        for segment in whole.segments:
            yield from steps_of(segment, step)


def _count(dim: Expression, counts: Mapping[Axis, int]) -> int:
    whole = resolved(dim)
    if isinstance(whole, Axis):
        return counts.get(whole, whole.size)
    if isinstance(whole, Product):
        return math.prod(_count(factor, counts) for factor in whole.factors)
    return sum(_count(segment, counts) for segment in whole.segments)


# ---- What may leave of what was found: a coupling is never changed, and who freezes or ties groups makes a new scope.


@dataclass(frozen=True, eq=False)
class Scope(Shown):
    """Of a `Coupling` the groups that may leave, which of them keep the same share, and why the others stay whole.

    Attributes:
        coupling: what was found; scopes of one coupling call its groups by the same names.
        groups: those that may leave; the same ``tied`` keep the same share of their units.
        reasons: ``{group: why nothing of it may leave}``, of those that were frozen since.

    >>> import torch
    >>> from secateur.coupling import find_coupling
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> scope = Scope.of(find_coupling(model, torch.ones(1, 4)))
    >>> less = scope.without(["0.weight"], "an example")
    >>> len(scope.groups), len(less.groups), less.frozen["0.weight", 0]
    (1, 0, 'an example')
    """

    coupling: Coupling
    groups: Sequence[Group]
    reasons: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, coupling: Coupling) -> Scope:
        """All that is free."""
        return cls(coupling, coupling.groups)

    @functools.cached_property
    def _whole(self) -> tuple[dict[tuple[str, int], str], dict[tuple[str, int], None]]:
        return self.coupling.whole(self.reasons) if self.reasons else (self.coupling.frozen, self.coupling.compared)

    @property
    def frozen(self) -> Mapping[tuple[str, int], str]:
        """``{(name, dimension): reasons}`` of the dimensions of tensors of which nothing may leave."""
        return self._whole[0]

    @property
    def compared(self) -> Iterable[tuple[str, int]]:
        """Those of them whose units are compared with each other."""
        return self._whole[1]

    def content(self) -> Iterator[Part]:
        return _tables(self.groups, self.frozen)

    def without(self, names: Iterable[str], why: str) -> Scope:
        """Nothing of these groups may leave, nor of those that keep the same share as they do."""
        names = {*names}
        ties = {group.tied for group in self.groups if group.name in names}
        gone = {group.name: why for group in self.groups if group.tied in ties}
        left = [group for group in self.groups if group.tied not in ties]
        return replace(self, groups=left, reasons={**self.reasons, **gone})

    def tied(self, sets: Iterable[Iterable[str]]) -> Scope:
        """Groups of one set keep the same share of their units; where one has to stay, all do."""
        number = {group.name: group.tied for group in self.groups}
        first = {tied: tied for tied in number.values()}

        def found(tied: int) -> int:
            while first[tied] != tied:
                tied = first[tied]
            return tied

        for each in sets:
            one, *others = [found(number[name]) for name in each]
            for other in others:
                if found(other) != found(one):
                    first[found(other)] = found(one)
        return replace(self, groups=[replace(group, tied=found(group.tied)) for group in self.groups])

    def within(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] = (), *, chosen: bool = False
    ) -> Scope:
        """Those whose names, or whose tensors' names, the globs let leave; only groups that are ``chosen`` between, or
        only others. Of groups that keep the same share all may leave, or none."""
        left = {
            group.name
            for group in self.groups
            if group.chosen == chosen
            and may_leave({group.name, *(name for name, _ in group.members)}, include, exclude)
        }
        partly = {group.tied for group in self.groups if group.name not in left}
        return replace(self, groups=[group for group in self.groups if group.tied not in partly])

    def contradicted(self, counts: Mapping[str, int]) -> list[Group]:
        """The groups that may leave on which a comparison in the code depends whose result would change."""
        names = {group.name for group in self.coupling.contradicted(counts)}
        return [group for group in self.groups if group.name in names]


def may_leave(names: Collection[str], include: Iterable[str] | None, exclude: Iterable[str]) -> bool:
    """Whether units with these names may leave: one of the names is included, and none excluded.

    >>> may_leave({"0.weight", "0.bias"}, ["*.weight"], ()), may_leave({"0.weight", "0.bias"}, None, ["*.bias"])
    (True, False)
    """

    def about(globs: Iterable[str]) -> bool:
        return any(matches(name, globs) for name in names)

    return (include is None or about(include)) and not about(exclude)


def _tables(groups: Iterable[Group], frozen: Mapping[tuple[str, int], str]) -> Iterator[Part]:
    yield Table.of(
        "groups",
        groups,
        Column.name("Group", lambda each: each.name),
        Column.count("Units", lambda each: each.size),
        Column.count("Dimensions that leave together", lambda each: len(each.members), key="dimensions"),
    )
    whole = Counter(frozen.values())
    if whole:
        yield ""
        because = Column.name("What stays whole, because", key="kept_because")
        yield Table.of("whole", whole.most_common(), because, Column.count("Dimensions"))
