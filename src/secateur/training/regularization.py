"""Training toward fewer units: penalties that shrink whole channels, heads and hidden units, as an option of a Pruner.

Law: a penalty acts on all entries that would leave with a unit, by multiplication after the optimizer's step; where its
strength is 0 the run is the same bit for bit; what it ends at is exactly zero, so that `shrink` takes it out unchanged.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.coupling import Coupling, Group, Scope, find_coupling
from secateur.schedules import Moment
from secateur.shrinking import check_globs, names_of, plans_of, shrink
from secateur.support import is_sharded, seeded

_GONE = 23 * math.log(2)  # the penalty alone shrinks an entry by this factor's exponential: float32 shows no more


@dataclass(frozen=True, eq=False)
class Growing:
    """An L2 penalty that grows on the units that `shrink` would take out; made by `growing`."""

    sparsity: float
    example_inputs: Any = field(repr=False)
    ceiling: float | None = None
    begin: Moment = 0
    end: Moment = 0.6
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.ceiling is not None and not 0 <= self.ceiling < math.inf:
            raise ValueError(f"the ceiling of a growing penalty is a finite number from 0 up; got {self.ceiling}.")
        own = {"model", "example_inputs", "sparsity", "optimizer"}
        allowed = inspect.signature(shrink).parameters.keys() - own - {"out", "activations", "device"}  # of a directory
        if unknown := self.options.keys() - allowed:
            raise TypeError(
                f"growing takes the options of shrink ({', '.join(sorted(allowed))}), not {min(unknown)!r}."
            )
        if self.options.get("target") == "latency":
            raise ValueError(
                "a measured latency differs between runs and between processes, which would choose other units: "
                "use target='macs'."
            )


@dataclass(frozen=True, eq=False)
class GroupLasso:
    """A penalty on the norm of each unit; made by `group_lasso`."""

    strength: float
    example_inputs: Any = field(repr=False)
    begin: Moment = 0
    end: Moment = 0.6
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise ValueError(f"the strength of a group lasso is a finite number from 0 up; got {self.strength}.")


Regularization = Growing | GroupLasso


def growing(
    sparsity: float,
    example_inputs: Any,
    *,
    ceiling: float | None = None,
    begin: Moment = 0,
    end: Moment = 0.6,
    **options: Any,
) -> Growing:
    """``w ← w / (1 + s)``, s growing to the ceiling, for units that are to leave: GReg-1 (arXiv:2012.09243).

    At ``begin`` the units are chosen that ``shrink(model, example_inputs, sparsity, **options)`` would take out. After
    each step all entries that leave with them make the proximal step of ``s/2 · w²``; s grows in equal parts, and at
    ``end`` the entries become exactly zero and stay so. ``shrink(model, example_inputs)`` then takes them out, and the
    model computes what it computed (but for the statistics of a `LayerNorm` over them).

    The paper adds ``λ·w`` to the gradient, by which plain SGD takes ``s = lr·λ``. Applied apart from the optimizer the
    penalty is the same with all of them: Adam would divide it by the size of the gradients. An entry that leaves with
    two units (of the outputs of a convolution, and of its inputs) is penalized by both.

    Args:
        sparsity: as in `shrink`, of its ``target``.
        example_inputs: as in `shrink`.
        ceiling: the last s. By default such that the penalty alone would bring an entry to 1e-7 of itself: 32 through
            the steps from begin to end (at least 8 units of the last place of half-precision weights, which take no
            smaller steps).
        begin, end: moments as in `secateur.schedules`. A model that is not trained yet is ranked at a later begin.
        options: of `shrink`: criterion, allocate, include, exclude, round_to, target, ...

    Published with: λ rising by 10⁻⁴ every 5 (ImageNet) or 10 (CIFAR) steps to 1, units chosen by their L1 norm.

    >>> growing(0.5, torch.zeros(1, 3), end=100)
    Growing(sparsity=0.5, ceiling=None, begin=0, end=100)
    """
    return Growing(sparsity, example_inputs, ceiling, begin, end, options)


def group_lasso(
    strength: float,
    example_inputs: Any,
    *,
    begin: Moment = 0,
    end: Moment = 0.6,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
) -> GroupLasso:
    """``w ← w · max(0, 1 - lr·λ / rms(u))`` for each unit u: proximal steps of ``λ Σ_u √|u| ‖u‖₂``.

    Structured sparsity learning (arXiv:1608.03665) on the groups of arXiv:2301.12900: a unit is all entries that leave
    together, and ``rms(u) = ‖u‖₂/√|u|``. Units whose root mean square falls below lr·λ become exactly zero, which
    subgradients never reach; they may return until ``end``. From then on what is zero stays zero and the rest trains
    without penalty, which undoes its bias. ``shrink(model, example_inputs)`` takes the zeros out.

    Entries in several units are multiplied by the factors of all, each of the weights before: to first order in lr the
    step of the sum. λ is compared to gradients, which SGD follows as they are: units that the loss does not need go,
    the others stay. Adam moves every entry by about lr, needed or not, which separates them less; and it takes a long
    run in any case. `growing` needs neither.

    Args:
        strength: λ; how many units leave follows from it. 0 changes nothing.
        example_inputs: as in `shrink`.
        begin, end: moments as in `secateur.schedules`; the penalty acts between them.
        include, exclude: globs over the names of tensors, as in `shrink`: only units that take part in these; no unit
            that takes part in these.

    >>> group_lasso(0.1, torch.zeros(1, 3), end=100)
    GroupLasso(strength=0.1, begin=0, end=100, include=None, exclude=())
    """
    included = None if include is None else (include,) if isinstance(include, str) else tuple(include)
    excluded = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    return GroupLasso(strength, example_inputs, begin, end, included, excluded)


def _each(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(type(each) is kind for each in value)


def _are_masks(value: Any) -> bool:
    return _each(Tensor)(value) and all(
        mask.dtype == torch.bool and mask.dim() == 1 and mask.layout == torch.strided and not mask.is_meta
        for mask in value
    )


# of the state: what each is, in words and as a check
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "kind": ("the name of a rule", lambda value: isinstance(value, str)),
    "names": ("a list of names", _each(str)),
    "dims": ("a list of integers", _each(int)),
    "leaving": ("a list of dense bool vectors", _are_masks),
}


@dataclass(frozen=True)
class _Slices:
    """A dimension of a parameter that takes part in a group.

    ``positions`` (units, positions of each): an axis occurs as often at each of its indices.
    """

    name: str
    dim: int
    positions: Tensor


class Penalty:
    """What a Pruner remembers of a `Regularization`: which slices of which parameters are to leave.

    Args:
        rule: made by `growing` or `group_lasso`.
        model: not wrapped.
        optimizers: all that train it.
        moment: from a moment to a step.
        total_steps: the length of the run, if it is known.

    Raises:
        ValueError: nothing can leave, a parameter that should is not trained, the end is beyond that of the run.
    """

    def __init__(
        self,
        rule: Regularization,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        moment: Callable[[Moment], int],
        total_steps: int | None,
    ) -> None:
        self._rule = rule
        self._model = model
        self._optimizers = optimizers
        self._parameters = dict(model.named_parameters())
        self._sizes = {name: parameter.numel() for name, parameter in self._parameters.items()}  # before they shrink
        self._places: list[Mapping[str, Tensor]] = [self._parameters]
        if sharded := [name for name, parameter in self._parameters.items() if is_sharded(parameter)]:
            raise ValueError(f"{sharded[0]} is sharded: a unit's entries lie on several ranks; regularize before.")
        self.begin, self.end = moment(rule.begin), moment(rule.end)
        if not 0 <= self.begin < self.end:
            raise ValueError(f"{rule}: begins at step {self.begin}, and ends at step {self.end}.")
        if total_steps is not None and self.end > total_steps:
            raise ValueError(f"{rule}: ends at step {self.end}, after the run of {total_steps} steps.")
        self._leaving: dict[tuple[str, int], Tensor] = {}
        self._held_at: dict[tuple[str, int], Tensor] | None = None
        self._indices: dict[tuple[str, int], Tensor] = {}
        self._groups: list[list[_Slices]] = []
        if isinstance(rule, Growing):
            self._leaving = self._chosen(rule)  # also where it begins later: what cannot be done is said at once
            self._ceiling = self._default_ceiling() if rule.ceiling is None else rule.ceiling
            names = {name for name, _ in self._leaving}
        else:
            self._groups = self._coupled(rule)
            names = {each.name for group in self._groups for each in group}
            self._rates(names)
        self._shapes = {name: self._parameters[name].shape for name in names}
        trained = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
        for name in sorted(names):
            if id(self._parameters[name]) not in trained or not self._parameters[name].requires_grad:
                raise ValueError(f"{name} should become smaller but no optimizer trains it: pass exclude={name!r}.")

    def strength(self, step: int) -> float:
        """Of the penalty at a step: s of `growing`, λ of `group_lasso`; 0 before the beginning and from the end on."""
        if not self.begin < step < self.end:
            return 0.0
        if isinstance(self._rule, GroupLasso):
            return self._rule.strength
        return self._ceiling * (step - self.begin) / (self.end - self.begin)

    @property
    def leaving(self) -> float:
        """The fraction of the model's parameters that leave with the units that are chosen, or zero by the lasso."""
        kept = {name: float(size) for name, size in self._sizes.items()}
        for (name, _), mask in self._leaving.items():
            kept[name] *= 1 - mask.count_nonzero().item() / len(mask)
        return 1 - sum(kept.values()) / sum(self._sizes.values())

    @torch.no_grad()
    def after_step(self, step: int, *, counted: bool) -> None:
        """Act after an optimizer's step; only counted ones, those of the first optimizer, are penalized."""
        for name, shape in self._shapes.items():
            if self._parameters[name].shape != shape:
                raise ValueError(
                    f"{name} has another shape than when the Pruner was made: finish() it before shrink, and make a "
                    "new one to train on."
                )
        if counted and isinstance(self._rule, Growing) and step == self.begin:
            self._leaving = self._chosen(self._rule)
        if step >= self.end:
            self.hold()
        elif counted and (strength := self.strength(step)):
            if isinstance(self._rule, GroupLasso):
                self._apply(self._lasso(strength))
            else:
                self._apply({place: 1 - mask * (strength / (1 + strength)) for place, mask in self._leaving.items()})

    @torch.no_grad()
    def hold(self) -> None:
        """Zero what is to leave, in all places."""
        if self._held_at is not self._leaving:  # found once: to look for them waits for the device
            self._held_at = self._leaving
            self._indices = {place: mask.nonzero().flatten() for place, mask in self._leaving.items()}
        for parameters in self._places:
            for (name, dim), indices in self._indices.items():
                if len(indices):
                    parameters[name].index_fill_(dim, indices.to(parameters[name].device), 0)

    def check_follower(self, parameters: Mapping[str, Tensor]) -> None:
        """``KeyError`` or ``ValueError`` unless the same slices can leave the parameters of another model."""
        names = {name for name, _ in self._leaving} | {each.name for group in self._groups for each in group}
        for name in sorted(names):
            if name not in parameters:
                raise KeyError(f"the model that is to follow has no parameter {name!r}.")
            if parameters[name].shape != self._parameters[name].shape or parameters[name].is_meta:
                raise ValueError(
                    f"{name} is of shape {tuple(parameters[name].shape)} on {parameters[name].device} in the model "
                    f"that is to follow, {tuple(self._parameters[name].shape)} in the Pruner's."
                )

    def follow(self, parameters: Mapping[str, Tensor], step: int) -> None:
        """Keep the same zeros in the parameters of another model, which `check_follower` found to fit."""
        self._places = [*self._places, parameters]
        if step >= self.end:
            self.hold()

    def state_dict(self) -> dict[str, Any]:
        """Which slices are to leave, as plain values and tensors."""
        return {
            "kind": type(self._rule).__name__,
            "names": [name for name, _ in self._leaving],
            "dims": [dim for _, dim in self._leaving],
            "leaving": [mask.cpu().clone() for mask in self._leaving.values()],
        }

    def read(self, state: Mapping[str, Any]) -> dict[tuple[str, int], Tensor]:
        """What a state says is to leave.

        Raises:
            ValueError: it is of another rule or another model.
        """
        if state.keys() != _FIELDS.keys():
            raise ValueError(f"the state's regularize has {', '.join(map(str, state))}, not {', '.join(_FIELDS)}.")
        for field_name, (what, fits) in _FIELDS.items():
            if not fits(state[field_name]):
                raise ValueError(f"the state's regularize: its {field_name} is not {what}.")
        if state["kind"] != type(self._rule).__name__:
            raise ValueError(f"the state is of a run with {state['kind']}, the Pruner has {self._rule}.")
        names, dims, masks = state["names"], state["dims"], state["leaving"]
        if not len(names) == len(dims) == len(masks):
            raise ValueError(
                f"the state has {len(names)} names, {len(dims)} dims and {len(masks)} masks of what leaves."
            )
        penalized = {(each.name, each.dim) for group in self._groups for each in group}
        found: dict[tuple[str, int], Tensor] = {}
        for name, dim, mask in zip(names, dims, masks, strict=True):
            shape = tuple(self._parameters[name].shape) if name in self._parameters else "no such parameter"
            if isinstance(shape, str) or not 0 <= dim < len(shape) or mask.shape != shape[dim : dim + 1]:
                raise ValueError(f"{name}: the state has {mask.numel()} slices of dimension {dim}, the model {shape}.")
            if (name, dim) in found or (self._groups and (name, dim) not in penalized):
                raise ValueError(f"{name}: the state lets slices of dimension {dim} leave twice, or the rule does not.")
            if any(name not in parameters for parameters in self._places):
                raise ValueError(
                    f"{name}: the state lets slices of it leave, but a model that follows does not have it."
                )
            found[name, dim] = mask.to(self._parameters[name].device, copy=True)
        return found

    def take(self, leaving: dict[tuple[str, int], Tensor]) -> None:
        """Go on with what `read` found."""
        self._leaving = leaving

    def __str__(self) -> str:
        told = f"{self._rule}: between steps {self.begin:,} and {self.end:,}"
        return told + (f"; {self.leaving:.1%} of the parameters are to leave" if self._leaving else "")

    def _chosen(self, rule: Growing) -> dict[tuple[str, int], Tensor]:
        """The slices of parameters that shrink would take out."""
        smaller = copy.deepcopy(self._model)
        with seeded(), torch.enable_grad():
            shrink(smaller, rule.example_inputs, rule.sparsity, **rule.options)
        kept: dict[tuple[str, int], Tensor] = {}
        for plan in plans_of(smaller)[len(plans_of(self._model)) :]:
            for name, (_, cuts) in plan.tensors.items():
                for dim, indices in cuts.items():
                    if name in self._parameters:
                        now = torch.from_numpy(indices)
                        kept[name, dim] = kept[name, dim][now] if (name, dim) in kept else now
        found = {}
        for (name, dim), positions in kept.items():
            parameter = self._parameters[name]
            mask = torch.ones(parameter.shape[dim], dtype=torch.bool)
            mask[positions] = False
            found[name, dim] = mask.to(parameter.device)
        return found

    def _default_ceiling(self) -> float:
        least = [8 * torch.finfo(self._parameters[name].dtype).eps for name, _ in self._leaving]
        return max(2 * _GONE / (self.end - self.begin), *least, 0.0)

    def _coupled(self, rule: GroupLasso) -> list[list[_Slices]]:
        """The groups' members among the parameters."""
        coupling = find_coupling(self._model, rule.example_inputs)
        check_globs(names_of(coupling), (*(rule.include or ()), *rule.exclude))
        found = [
            self._slices(coupling, group) for group in Scope.of(coupling).within(rule.include, rule.exclude).groups
        ]
        if not found:
            why = "".join(f"\n  {name} dimension {dim}: {why}" for (name, dim), why in [*coupling.frozen.items()][:10])
            raise ValueError(f"no unit of the model can leave: nothing to regularize.{why}")
        return found

    def _slices(self, coupling: Coupling, group: Group) -> list[_Slices]:
        found = []
        for name, dim in group.members:
            if name in self._parameters:
                index = coupling.indices(group, name, dim)
                order = np.argsort(index, kind="stable")[np.count_nonzero(index < 0) :]
                positions = torch.from_numpy(order.reshape(group.size, -1))
                found.append(_Slices(name, dim, positions.to(self._parameters[name].device)))
        return found

    def _rates(self, names: Iterable[str]) -> dict[str, float]:
        """The learning rate of each parameter now; looked up each time, as loading a state makes new groups."""
        rates = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    rates[id(parameter)] = group.get("lr")
        found = {}
        for name in names:
            rate = rates.get(id(self._parameters[name]), 0.0)
            if rate is None:
                raise ValueError(f"the optimizer of {name} has no lr, by which a group lasso is scaled: use growing.")
            found[name] = float(rate)
        return found

    def _lasso(self, strength: float) -> dict[tuple[str, int], Tensor]:
        """For each dimension of each parameter the factors of its positions; notes which units are at zero."""
        rates = self._rates({each.name for group in self._groups for each in group})
        squares: dict[tuple[str, int], Tensor] = {}
        factors: dict[tuple[str, int], Tensor] = {}
        for group in self._groups:
            total: Tensor | float = 0.0
            entries = 0
            for each in group:
                parameter = self._parameters[each.name]
                place = each.name, each.dim
                if place not in squares:
                    squares[place] = _squares(parameter, each.dim)
                its = squares[place][each.positions].sum(1)
                total = its if isinstance(total, float) else total + its.to(total.device)
                entries += parameter.numel() // parameter.shape[each.dim] * each.positions.shape[1]
            assert isinstance(total, Tensor)
            rms = (total / entries).sqrt()
            for each in group:
                place = each.name, each.dim
                parameter = self._parameters[each.name]
                if place not in factors:
                    factors[place] = torch.ones(parameter.shape[each.dim], dtype=rms.dtype, device=parameter.device)
                # at rms 0, also with lr 0: 0/0 would be NaN
                factor = torch.where(rms == 0, 0.0, 1 - rates[each.name] * strength / rms).clamp(min=0)
                factors[place][each.positions] *= factor.to(parameter.device)[:, None]
        self._leaving = {place: factor == 0 for place, factor in factors.items()}
        return factors

    def _apply(self, factors: Mapping[tuple[str, int], Tensor]) -> None:
        for (name, dim), factor in factors.items():
            parameter = self._parameters[name]
            shape = [1] * parameter.dim()
            shape[dim] = -1
            parameter.mul_(factor.reshape(shape))


def _squares(parameter: Tensor, dim: int) -> Tensor:
    """The sum of squares at each index of a dimension, summed in at least float32."""
    wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    others = [other for other in range(parameter.dim()) if other != dim]
    if not others:
        return parameter.detach().to(wide).square()
    norms: Tensor = torch.linalg.vector_norm(parameter.detach(), dim=others, dtype=wide)
    return norms.square()
