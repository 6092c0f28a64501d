"""Sizes as powers of numbers, and the solution of equations between them. Which fields of a configuration determine
which sizes of the model, learnt by building the model repeatedly.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn

from secateur.coupling import Axis, Coupling, Group, Kept, Polynomial, Scope, counted, counts_kept, representative
from secateur.models import full_name, parameters_on_meta
from secateur.shrinking.apply import (
    Place,
    carry_out,
    configurations_in,
    dotted,
    fields_in,
    integer_fields,
    is_configuration,
    number_at,
    same_ways,
    unset_fields,
    with_fields,
)
from secateur.shrinking.costs import by_tie
from secateur.shrinking.oracle import lending_of
from secateur.shrinking.plan import Plan, factors_of, multiplied, plan_of
from secateur.shrinking.proof import difference, outputs, probe_of
from secateur.support import ONE_AT_A_TIME, Undo, private, restoring_generators, tensors_of, track

# ---- Sizes as powers of numbers, and the solution of equations between them.
#
# Law: a power is one of a few, found from two sizes; in logarithms powers are factors, and an equation is a row whose
# sum is zero.

_POWERS = (Fraction(1), Fraction(-1), Fraction(2), Fraction(-2), Fraction(1, 2), Fraction(-1, 2))


def power_of(size: float, before: float, field: int, field_before: int) -> Fraction | None:
    if size <= 0 or before <= 0:
        return None
    for power in _POWERS:
        if math.isclose(size / before, (field / field_before) ** float(power), rel_tol=1e-9):
            return power
    return None


def row_echelon(rows: Sequence[Mapping[Any, Fraction]], order: Sequence[Any]) -> dict[Any, dict[Any, Fraction]]:
    """The reduced row echelon form, ``{pivot: row}``; earlier variables become pivots first.

    >>> one = Fraction(1)
    >>> row_echelon([{"a": one, "b": one}, {"a": one, "b": -one, "c": 2 * one}], "abc") == {
    ...     "a": {"a": 1, "c": 1}, "b": {"b": 1, "c": -1}}
    True
    """
    solved: dict[Any, dict[Any, Fraction]] = {}
    left = [dict(row) for row in rows]
    for variable in order:
        having = next((row for row in left if variable in row), None)
        if having is None:
            continue
        left.remove(having)
        pivot = {each: value / having[variable] for each, value in having.items()}
        left = [reduced for row in left if (reduced := _without(row, variable, pivot))]
        solved = {each: _without(row, variable, pivot) for each, row in solved.items()}
        solved[variable] = pivot
    return solved


def _without(row: dict[Any, Fraction], variable: Any, pivot: Mapping[Any, Fraction]) -> dict[Any, Fraction]:
    if variable not in row:
        return row
    factor = row[variable]
    found = {each: row.get(each, Fraction(0)) - factor * pivot.get(each, Fraction(0)) for each in {**row, **pivot}}
    return {each: value for each, value in found.items() if value}


# ---- Which fields of a configuration determine which sizes of the model, learnt by building the model repeatedly.
#
# Law: a field is known by what changes when it alone does, never by its name or by its value; and a configuration
# that is said to describe a smaller model was built and compared with it: all shapes, and in float64 all outputs.
#
# The experiments run on the meta device, where a model of any size takes a fraction of a second. What a field does to
# a size is nearly always a power: rows of ``q_proj`` = heads x width of a head, queries of each = heads / shared
# heads. So in logarithms all is linear: what the coupling says of a size on the one side, what the fields do to it on
# the other. Counts that these equations force to change together are tied; those that they force to stay are frozen.

_Key = tuple[Any, ...]  # of a size: of a dimension, of an integer that a module uses, of a real number that it holds


PROVED = 1 << 24  # parameters of the model that the proof is made on: its copies in float64 stay below a gigabyte
_NARROW = 16  # fields are not made smaller than this for a proof


_REMEMBERED = 16  # configurations of which the process keeps what was learnt: of one directory it is asked many times


_PLAN = "use shrink without uniform, and save_shrunken and load_shrunken in place of the configuration"


def has_configuration(model: nn.Module) -> bool:
    """Whether a model has a configuration from which it can be rebuilt, as models of transformers have."""
    return hasattr(getattr(model, "config", None), "to_dict")


@dataclass
class _Learnt:
    """Of a class and a configuration; `possible` grows as models are asked for."""

    set_by_us: dict[Place, int] = field(default_factory=dict)  # the values of fields that are left out
    fields: dict[Place, int] = field(default_factory=dict)
    powers: dict[_Key, dict[Place, Fraction | None]] = field(default_factory=dict)
    possible: dict[frozenset[Any], bool] = field(default_factory=dict)


_LEARNT: dict[_Key, _Learnt] = {}


class Described:
    """The class and the configuration from which a model can be rebuilt.

    Args:
        model: has a ``config`` as the models of transformers do: ``to_dict()``, ``from_dict()``, and the class of the
            model can be built from it alone. Also on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kind: Any = type(model)
        config: Any = model.config
        self.config = config
        self.values: dict[str, Any] = self.config.to_dict()

    def configuration(self, changes: Mapping[Place, Any]) -> Any:
        """A configuration that differs from the model's in some fields, made as ``from_pretrained`` makes one."""
        made = private.configuration_of(type(self.config), with_fields(self.values, changes))
        same_ways(self.config, made)
        return made

    def build(
        self, changes: Mapping[Place, Any], device: torch.device | str = "meta", *, without_weights: bool = False
    ) -> nn.Module:
        """A fresh model of the same class, in evaluation mode; without weights its parameters are on meta anyway."""
        without = parameters_on_meta() if without_weights else contextlib.nullcontext()
        with ONE_AT_A_TIME, torch.device(device), restoring_generators(), without:
            made: nn.Module = self.kind(self.configuration(changes))
        return made.eval()

    def value(self, place: Place) -> Any:
        """A field before the change; None where it was not set."""
        held: Any = self.values
        for key in place:
            held = held[key] if not isinstance(held, Mapping) or key in held else None
        return held

    def adopt(self, model: nn.Module, changes: Mapping[Place, Any]) -> Callable[[], None]:
        """The configurations and integers that the model and its modules hold become those of a model built from the
        new one: also numbers that no pass has used, such as of experts in a loss.

        Returns what takes it back.
        """
        before = dict(self.build({}).named_modules())
        found = [
            (model.get_submodule(path), key, value)
            for path, module in self.build(changes).named_modules()
            for key, value in vars(module).items()
            if is_configuration(value) or (type(value) is int and vars(before[path]).get(key) not in (None, value))
        ]
        with Undo() as undo:
            for module, key, value in found:
                undo.attributes(module, key)
                setattr(module, key, value)
        return undo.roll_back

    def proved_on(self, changes: Mapping[Place, Any]) -> str:
        """The model with these fields that a proof is made on, in words."""
        sizes = ", ".join(f"{dotted(place)} {value}" for place, value in changes.items())
        return f"on {self.kind.__name__} with random weights{' and ' if sizes else ''}{sizes}"


def halved(
    count: Callable[[Mapping[Place, Any]], float | None],
    fields: Callable[[], Iterable[tuple[Place, int]]],
    found: dict[Place, Any],
    now: float | None,
    most: float,
) -> bool:
    """Halves fields until a model has at most so many parameters; whether it came to that.

    Args:
        count: of the parameters of a model with these fields; None where there is none.
        fields: those that may be halved, and what they are now.
        found: those that were changed.
        now: what ``count`` gives of it.
    """
    while now is None or now > most:
        before = now
        for place, value in fields():
            left = count({**found, place: value // 2}) if value >= 2 * _NARROW and value % 2 == 0 else None
            if left is not None and (now is None or left < now):
                found[place], now = value // 2, left
        if now == before:
            return False
    return True


class Configured(Described):
    """A model and its configuration: which fields set which sizes, and whether a configuration describes a smaller
    model.

    In its ``scope`` the groups are frozen that no field can express, and those tied that fields change together.

    Args:
        model: has a ``config`` as the models of transformers do: ``to_dict()``, ``from_dict()``, and the class of the
            model can be built from it alone. Also on the meta device.
        scope: what of the model may leave.
        heads: dimensions inside heads, too, where by their width attention is scaled and frequencies of positions are
            made: weights make up for the one, and the configuration names the others.

    Raises:
        ValueError: the model cannot be built again, or no configuration says that anything of it left.
    """

    def __init__(self, model: nn.Module, scope: Scope, *, heads: bool = False) -> None:
        super().__init__(model)
        self.heads, self._coupling = heads, scope.coupling
        self._made_up = scope.coupling.made_up() if heads else frozenset[float]()
        self._used = list(scope.coupling.used())
        self._base = self._checked(model)
        known = {id(each): name for name, each in tensors_of(model).items()}
        self._whole = set() if heads else {known[id(copy)] for copy, *_ in private.copies_of_buffers(model)}
        self._follows: dict[Place, dict[Any, Fraction]] = {}
        self._learn()
        self._axes = {group.name: group.axis for group in scope.coupling.groups}
        self.scope = self._settled(scope)

    def fields(self, counts: Mapping[str, int]) -> dict[Place, int] | None:
        """The fields that change when so many stay of each group, and their values; None where one is no integer."""
        axes = {self._axes[name]: count for name, count in counts.items()}
        ratios = {representative(axis): Fraction(count, axis.size) for axis, count in axes.items()}
        found = dict(self._set_by_us)
        for place, powers in self._follows.items():
            value = Fraction(self._fields[place])
            for axis, power in powers.items():
                if power.denominator != 1:  # a root
                    return None
                value *= ratios.get(axis, Fraction(1)) ** power.numerator
            if value.denominator != 1:
                return None
            if value != self._fields[place]:
                found[place] = int(value)
        return found

    def changes(self, kept: Kept) -> dict[Place, Any] | None:
        """The fields that change when these units stay; None where one is no integer."""
        fields = self.fields(counts_kept(kept))
        return None if fields is None else {**fields, **self._frequencies(kept)}

    def completed(self, plan: Plan, kept: Kept) -> Plan:
        """A plan that also makes of numbers by which attention is scaled what the configuration makes of them, and
        weights make up for that."""
        counts = counts_kept(kept)
        fields = self.fields(counts) if self._made_up else None
        if not fields:
            return plan
        found = self._sizes(self.build(fields))
        scaled = {key: new for key, new in found.items() if self._is_made_up(key) and new != self._base[key]}
        numbers = [((key[1], key[2]), self._base[key], new) for key, new in scaled.items()]
        scales = self._coupling.scales(counts, {self._base[key] for key in scaled} if scaled else ())
        return replace(plan, numbers=[*plan.numbers, *numbers], scales=scales)

    def _is_made_up(self, key: _Key) -> bool:
        return key[0] == "real" and self._base[key] in self._made_up and bool(self._powers.get(key))

    @functools.cached_property
    def _rotary(self) -> dict[str, tuple[Place, Any]]:
        """What has frequencies that may leave, and the place of its configuration."""
        if not self.heads:
            return {}
        built = self.build({}, "cpu", without_weights=True)
        places = {id(part): place for place, part in configurations_in(built.config)}
        return {
            path: (places[id(part)], module)
            for path, module in built.named_modules()
            if id(part := getattr(module, "config", None)) in places
            and isinstance(getattr(module, "inv_freq", None), torch.Tensor)
            and "rope_theta" in (getattr(part, "rope_parameters", None) or {})
        }

    def _frequencies(self, kept: Kept) -> dict[Place, Any]:
        """Which frequencies rotary positions have, where some of them leave: a factor for each, as LongRoPE has them
        (Ding et al. 2024, arXiv:2402.13753)."""
        found: dict[Place, Any] = {}
        for path, (place, module) in self._rotary.items():
            part, said = module.config, module.config.rope_parameters
            stay = self._coupling.kept(full_name(path, "inv_freq"), kept)[0]
            its = module.inv_freq.double().numpy()[stay]
            if not stay.all() and its.all():
                powers = said["rope_theta"] ** (np.arange(len(its)) / len(its))
                factors = (1 / (its * powers)).tolist()
                found[(*place, "rope_parameters")] = {
                    **{key: value for key, value in said.items() if key in ("rope_theta", "partial_rotary_factor")},
                    "rope_type": "longrope",
                    "attention_factor": module.attention_scaling,
                    "factor": 1.0,
                    "original_max_position_embeddings": part.max_position_embeddings,
                    "long_factor": factors,
                    "short_factor": factors,
                }
        return found

    def is_possible(self, counts: Mapping[str, int]) -> bool:
        """Whether a model can be built when so many stay of each group: widths may have to be divisible by heads."""
        changes = self.fields(counts)
        if changes is None:
            return False
        key = frozenset(changes.items())
        if key not in self._possible:
            self._possible[key] = self._tried(changes) is not None
        return self._possible[key]

    def unsaid(
        self, model: nn.Module | None, coupling: Coupling, groups: Sequence[Group], kept: Kept, inputs: Sequence[Any]
    ) -> list[Group]:
        """The groups that a model built from the new configuration does not have as the smaller model does.

        Shapes and the numbers that the code uses are compared on meta, then, unless ``model`` is None, all of its
        outputs in float64 on random weights. The model is left as it is.

        Raises:
            ValueError: no group would be left.
        """
        sets = by_tie(group for group in groups if not kept[group.name].all())
        chosen = [group for each in sets for group in each]
        if model is not None and chosen and self._is_said_in_parts(model, coupling, chosen, kept, inputs):
            return []
        probe = None if model is None else probe_of(model)
        words = self._difference(probe, coupling, chosen, kept, inputs)
        if words is None:
            return []
        wrong = [
            group
            for each in sets
            if len(sets) > 1 and self._difference(probe, coupling, each, kept, inputs) is not None
            for group in each
        ]
        wrong = wrong or chosen
        if len(wrong) == len(groups):
            raise ValueError(f"a model built from its configuration is not the smaller one: {words}; {_PLAN}.")
        return wrong

    def reduced(self, most: int) -> dict[Place, Any] | None:
        """Fields of a model of the same structure with at most so many parameters; None where none was found.

        Few layers first, then narrower ones. {} for a model that is small enough as it is.
        """

        def count(changes: Mapping[Place, Any]) -> int | None:
            try:
                built = self.build({**self._set_by_us, **changes})
            except Exception:  # whatever a configuration or a model raises for values that do not fit each other
                return None
            names = {name for name, _ in built.named_parameters()}
            return sum(each.numel() for each in built.parameters()) if names <= every else None

        every = {key[1] for key in self._base if key[0] == "size"}
        found: dict[Place, Any] = {}
        now = count(found)
        assert now is not None  # it was built before
        fields = {**dict(integer_fields(self.config, self.values)), **self._set_by_us}
        lists = [(place, value) for place, value in fields_in(self.config, self.values) if isinstance(value, list)]
        for place, value in track(list(fields.items()), "making a smaller one for the proof"):
            if now <= most:
                return found
            for few in (2, 1):  # layers: with fewer of them there are fewer tensors, of the same sizes
                changes: dict[Place, Any] = {place: few}
                changes |= {where: each[:few] for where, each in lists if len(each) == value > few}
                if value <= few or place in self._fields:
                    continue
                left = count(found | changes)
                if left is not None and left < now:
                    found, now = found | changes, left
                    break

        def fields_now() -> list[tuple[Place, int]]:
            sizes = {place: found.get(place, value) for place, value in self._fields.items()}
            return sorted(sizes.items(), key=lambda each: -each[1])

        return found if halved(count, fields_now, found, now, most) else None

    # ---- learning ---------------------------------------------------------------------------------------------------

    def _checked(self, model: nn.Module) -> dict[_Key, float]:
        """The sizes of a model that is built from the configuration as it is; they have to be the model's own."""
        name = self.kind.__name__
        try:
            found = self._sizes(self.build({}))
        except Exception as error:
            raise ValueError(
                f"{name} cannot be built again from its configuration ({type(error).__name__}: {error}); {_PLAN}."
            ) from error
        mine = self._sizes(model)
        for key in dict.fromkeys((*mine, *found)):
            if key[0] != "real" and mine.get(key) != found.get(key):
                raise ValueError(
                    f"{name} is not what its configuration says: {_spelled(key)} is {mine.get(key, 'not there')}, in a "
                    f"model built from it {found.get(key, 'not there')}; {_PLAN}."
                )
        return found

    def _sizes(self, model: nn.Module) -> dict[_Key, float]:
        found: dict[_Key, float] = {}
        for name, tensor in tensors_of(model).items():
            found |= {("size", name, at): size for at, size in enumerate(tensor.shape)}
        for each in self._used:
            found["number", each.place] = number_at(model, each.place)
        for path, module in model.named_modules():
            found |= {("real", path, key): value for key, value in vars(module).items() if type(value) is float}
        return found

    def _tried(self, changes: Mapping[Place, Any]) -> dict[_Key, float] | None:
        """The sizes with these fields; None where there is no such model, or one of other tensors."""
        try:
            found = self._sizes(self.build({**self._set_by_us, **changes}))
        except Exception:  # whatever a configuration or a model raises for values that do not fit each other
            return None
        return found if found.keys() == self._base.keys() else None

    def _learn(self) -> None:
        """Taken from an earlier model of the same class, configuration and sizes; otherwise learnt by experiments."""
        try:
            written = json.dumps(self.values)
        except TypeError:  # values that no file could hold may change under their names
            self._take(_Learnt())
            self._try_all()
            return
        key = (self.kind, type(self.config), written, frozenset(self._base.items()))
        with ONE_AT_A_TIME:
            known = _LEARNT.get(key)
        self._take(known or _Learnt())
        if known is None:
            self._try_all()
        with ONE_AT_A_TIME:
            _LEARNT.pop(key, None)
            _LEARNT[key] = self._learnt  # the last of them now
            while len(_LEARNT) > _REMEMBERED:
                del _LEARNT[next(iter(_LEARNT))]

    def _take(self, learnt: _Learnt) -> None:
        self._learnt, self._possible = learnt, learnt.possible
        self._set_by_us, self._fields, self._powers = learnt.set_by_us, learnt.fields, learnt.powers

    def _try_all(self) -> None:
        for place in track([*unset_fields(self.config, self.values), *self._asked_for()], "learning the configuration"):
            value = self._comes_to(place)
            if value is not None:
                self._set_by_us[place] = value
        fields = {**dict(integer_fields(self.config, self.values)), **self._set_by_us}
        for place, value in track(list(fields.items()), "learning the configuration"):
            powers = self._powers_of(place, value)
            if powers:
                self._fields[place] = value
                for key, power in powers.items():
                    self._powers.setdefault(key, {})[place] = power

    def _powers_of(self, place: Place, value: int) -> dict[_Key, Fraction | None]:
        """Of which power of a field each size is that changes with it; None where of none."""
        best: dict[_Key, Fraction | None] | None = None
        for other in dict.fromkeys((2 * value, 3 * value, 4 * value, value // 2, value // 3, value + 1, value - 1)):
            if other < 1 or other == value:
                continue
            sizes = self._tried({place: other})
            if sizes is None:
                continue
            changed = [key for key, size in sizes.items() if size != self._base[key]]
            powers = {key: power_of(sizes[key], self._base[key], other, value) for key in changed}
            misfits = list(powers.values()).count(None)  # as where a division leaves a remainder
            if best is None or misfits < list(best.values()).count(None):
                best = powers
            if not misfits:
                break
        return best or {}

    def _comes_to(self, place: Place) -> int | None:
        """The value that an unset field stands for: setting it leaves all sizes as they are."""
        for one, other in ((16, 32), (24, 48)):
            first, second = self._tried({place: one}), self._tried({place: other})
            if first is None or second is None:
                continue
            values = set()
            for key in first:
                power = power_of(second[key], first[key], other, one) if second[key] != first[key] else None
                if key[0] == "size" and power is not None:
                    values.add(round(one * (self._base[key] / first[key]) ** float(1 / power)))
            if len(values) == 1:
                (value,) = values
                return value if value > 0 and self._tried({place: value}) == self._base else None
        return None

    def _asked_for(self) -> list[Place]:
        """Fields that the model's code asks for and the configuration does not have, as an optional ``head_dim``."""
        config = self.configuration({})
        places = {id(part): place for place, part in configurations_in(config)}
        asked: dict[Place, None] = {}

        def missing(part: Any, name: str) -> Any:
            if id(part) in places and not name.startswith("_"):
                asked[*places[id(part)], name] = None
            raise AttributeError(f"{type(part).__name__} has no {name}")

        # models look for the class of a configuration in tables: it has to be this one, and no subclass
        kinds = {type(part) for _, part in configurations_in(config)}
        with ONE_AT_A_TIME, contextlib.ExitStack() as undo, restoring_generators(), torch.device("meta"):
            for kind in (each for each in kinds if not hasattr(each, "__getattr__")):
                kind.__getattr__ = missing
                undo.callback(delattr, kind, "__getattr__")
            self.kind(config)
        return list(asked)

    # ---- solving ----------------------------------------------------------------------------------------------------

    def _settled(self, scope: Scope) -> Scope:
        """Without the groups that no fields can express, and with those tied that they change together; keeps the
        equations."""
        polynomials = self._polynomials(scope.coupling)
        while True:
            rows = self._equations(scope, polynomials)
            order = {representative(group.axis): number for number, group in enumerate(scope.groups)}
            solved = row_echelon(rows, [*self._fields, *order])
            stay: set[Any] = set()
            together: list[tuple[Any, Any]] = []
            for pivot, row in solved.items():
                if isinstance(pivot, tuple):
                    continue
                if len(row) == 2 and sum(row.values()) == 0 and row.keys() <= order.keys():
                    one, other = row
                    together.append((one, other))
                else:
                    # one that stays, or several that only a joint rule allows: the innermost stays whole
                    stay.add(max(row, key=lambda axis: order.get(axis, -1)))
            if not stay:
                break
            for axis in stay:
                fields = {each for row in rows if axis in row for each in row if isinstance(each, tuple)}
                names = ", ".join(sorted(map(dotted, fields)))
                reason = f"{names} of the configuration would say more than this" if names else "no field sets it"
                groups = [group.name for group in scope.groups if representative(group.axis) is axis]
                scope = scope.without(groups, f"the configuration cannot express another size of it ({reason})")
        if not scope.groups:
            why = list(dict.fromkeys(each for each in scope.frozen.values() if "configuration" in each))
            raise ValueError(
                f"no configuration of {self.kind.__name__} describes a smaller model of this structure"
                f"{''.join(f' ({each})' for each in why[:3])}; {_PLAN}."
            )
        self._follows = {
            place: {axis: -factor for axis, factor in row.items() if axis != place and not isinstance(axis, tuple)}
            for place, row in solved.items()
            if isinstance(place, tuple)
        }
        by_axis = {representative(group.axis): group.name for group in scope.groups}
        return scope.tied((by_axis[one], by_axis[other]) for one, other in together)

    def _polynomials(self, coupling: Coupling) -> dict[_Key, Polynomial]:
        found: dict[_Key, Polynomial] = {
            ("size", name, at): counted(dim)
            for name in coupling.names()
            if name not in self._whole  # the configuration alone says what they hold
            for at, dim in enumerate(coupling.dims(name))
        }
        return found | {("number", each.place): value for each, value in coupling.used().items()}

    def _equations(self, scope: Scope, polynomials: Mapping[_Key, Polynomial]) -> list[dict[Any, Fraction]]:
        """Rows whose sum is zero: logarithms of what stays of axes, and of what becomes of fields."""
        whole = {representative(self._axes[name]) for name in scope.reasons}
        found: dict[frozenset[Any], dict[Any, Fraction]] = {}
        for key in self._base:
            powers = self._powers.get(key, {})
            if self._is_made_up(key):
                continue
            polynomial = _with_whole(polynomials.get(key, {(): Fraction(1)}), whole)  # real numbers stay what they are
            if len(polynomial) != 1 or None in powers.values():
                continue  # a sum: it is compared in the end
            row: dict[Any, Fraction] = {}
            for axis in next(iter(polynomial)):
                row[axis] = row.get(axis, Fraction(0)) + 1
            row |= {place: -power for place, power in powers.items() if power is not None}
            if row:
                found[frozenset(row.items())] = row
        return list(found.values())

    # ---- comparing --------------------------------------------------------------------------------------------------

    def _difference(
        self,
        probe: nn.Module | None,
        coupling: Coupling,
        groups: Sequence[Group],
        kept: Kept,
        inputs: Sequence[Any],
    ) -> str | None:
        """How a model that is built from the configuration differs from the smaller one, in words; None where it does
        not.
        """
        kept = {group.name: kept[group.name] for group in groups}
        counts = counts_kept(kept)
        changes = self.changes(kept)
        if changes is None:
            return "a field would be no integer"
        try:
            found = self._sizes(self.build(changes))
        except Exception as error:  # whatever the configuration or the model raises for these values
            return f"it raises {type(error).__name__}: {error}"
        if found.keys() != self._base.keys():
            return "it has other tensors"
        for name in coupling.names():
            for at, mask in enumerate(coupling.kept(name, kept)):
                if found["size", name, at] != int(mask.sum()):
                    return f"dimension {at} of {name} would be {found['size', name, at]}, not {int(mask.sum())}"
        for each, value in coupling.numbers(counts).items():
            if found["number", each.place] != value:
                return f"{_spelled(('number', each.place))} would be {found['number', each.place]}"
        return None if probe is None else self._other_outputs(probe, coupling, kept, changes, inputs)

    def _is_said_in_parts(
        self, model: nn.Module, coupling: Coupling, groups: Sequence[Group], kept: Kept, inputs: Sequence[Any]
    ) -> bool:
        """Whether a large model that is built from the new configuration is found to be the smaller one with one
        block's weights at a time; False says nothing."""
        kept = {group.name: kept[group.name] for group in groups}
        changes = self.changes(kept)
        lending = None if changes is None else lending_of(model)
        if lending is None or changes is None or self._difference(None, coupling, groups, kept, inputs) is not None:
            return False
        with lending, contextlib.suppress(Exception):  # whatever the model raises: a whole probe shows why
            plan = plan_of(lending.module, coupling, kept)
            lending.cut(plan)
            built = self.build(changes, next(model.parameters()).device, without_weights=True).double()
            also = lending.also(built, self.completed(plan, kept)).module
            same_constants(lending.module, also)
            for number, training in coupling.passes:
                expected, found = (outputs(each, inputs[number], training=training) for each in (lending.module, also))
                if difference(expected, found) is not None:
                    return False
            return True
        return False

    def _other_outputs(
        self, probe: nn.Module, coupling: Coupling, kept: Kept, changes: Mapping[Place, int], inputs: Sequence[Any]
    ) -> str | None:
        device = next(probe.parameters()).device
        built = self.build(changes, device).double()
        plan = plan_of(probe, coupling, kept)
        more = self.completed(plan, kept).scales[len(plan.scales) :]
        undo = carry_out(probe, plan, None)
        try:
            built.load_state_dict(probe.state_dict())
            for name, factors in factors_of(replace(plan, scales=more)).items():
                tensors_of(built)[name].data = multiplied(tensors_of(built)[name].data, factors)
            same_constants(probe, built)
            for number, training in coupling.passes:
                expected = outputs(probe, inputs[number], training=training)
                found = outputs(built, inputs[number], training=training)
                words = difference(expected, found)
                if words is not None:
                    return words
        except Exception as error:  # whatever the model raises
            return f"it raises {type(error).__name__}: {error}"
        finally:
            undo()
        return None


def _with_whole(polynomial: Polynomial, whole: Collection[Any]) -> Polynomial:
    """With the sizes of axes of which nothing leaves in their places."""
    found: Polynomial = {}
    for term, factor in polynomial.items():
        sizes = [each.size for each in term if isinstance(each, Axis) and each in whole]
        rest = tuple(each for each in term if each not in whole)
        found[rest] = found.get(rest, Fraction(0)) + factor * math.prod(sizes)
    return found


def same_constants(probe: nn.Module, built: nn.Module) -> None:
    """What a model computes for itself when it is built, in the precision in which the probe's model has it."""
    # a model in bfloat16 holds constants rounded to it; which `from_pretrained` does not
    theirs = dict(probe.named_buffers())
    for name, buffer in built.named_buffers():
        mine = theirs.get(name)
        if mine is None or mine.shape != buffer.shape or not mine.is_floating_point():
            continue
        if torch.allclose(mine, buffer, rtol=2**-7, atol=2**-14):
            buffer.data.copy_(mine)


def _spelled(key: _Key) -> str:
    if key[0] == "size":
        return f"dimension {key[2]} of {key[1]}"
    return dotted(key[1]) if key[0] == "number" else dotted(key[1:])
