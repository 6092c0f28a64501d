"""Training toward fewer units: a penalty that shrinks whole channels, heads and hidden units, as an option of a Pruner.

Law: it acts on all entries that would leave with a unit, by multiplication after the optimizer's step; where its
strength is 0 the run is the same bit for bit; what it ends at is exactly zero, so that `shrink` takes it out unchanged.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.schedules import Moment
from secateur.shrinking import plans_of, shrink
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


def _each(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(type(each) is kind for each in value)


def _are_masks(value: Any) -> bool:
    return _each(Tensor)(value) and all(
        mask.dtype == torch.bool and mask.dim() == 1 and mask.layout == torch.strided and not mask.is_meta
        for mask in value
    )


# of the state: what each is, in words and as a check
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "names": ("a list of names", _each(str)),
    "dims": ("a list of integers", _each(int)),
    "leaving": ("a list of dense bool vectors", _are_masks),
}


class Penalty:
    """What a Pruner remembers of a `Growing`: which slices of which parameters are to leave.

    Args:
        rule: made by `growing`.
        model: not wrapped.
        optimizers: all that train it.
        moment: from a moment to a step.
        total_steps: the length of the run, if it is known.

    Raises:
        ValueError: nothing can leave, a parameter that should is not trained, the end is beyond that of the run.
    """

    def __init__(
        self,
        rule: Growing,
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
        self._held_at: dict[tuple[str, int], Tensor] | None = None
        self._indices: dict[tuple[str, int], Tensor] = {}
        self._leaving = self._chosen()  # also where it begins later: what cannot be done is said at once
        self._ceiling = self._default_ceiling() if rule.ceiling is None else rule.ceiling
        names = {name for name, _ in self._leaving}
        self._shapes = {name: self._parameters[name].shape for name in names}
        trained = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
        for name in sorted(names):
            if id(self._parameters[name]) not in trained or not self._parameters[name].requires_grad:
                raise ValueError(f"{name} should become smaller but no optimizer trains it: pass exclude={name!r}.")

    def strength(self, step: int) -> float:
        """Of the penalty at a step: the s of `growing`; 0 before the beginning and from the end on."""
        if not self.begin < step < self.end:
            return 0.0
        return self._ceiling * (step - self.begin) / (self.end - self.begin)

    @property
    def leaving(self) -> float:
        """The fraction of the model's parameters that leave with the units that are chosen."""
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
        if counted and step == self.begin:
            self._leaving = self._chosen()
        if step >= self.end:
            self.hold()
        elif counted and (strength := self.strength(step)):
            for (name, dim), mask in self._leaving.items():
                parameter = self._parameters[name]
                factors = 1 - mask * (strength / (1 + strength))
                parameter.mul_(factors.reshape([-1 if at == dim else 1 for at in range(parameter.dim())]))

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
        for name in sorted({name for name, _ in self._leaving}):
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
            "names": [name for name, _ in self._leaving],
            "dims": [dim for _, dim in self._leaving],
            "leaving": [mask.cpu().clone() for mask in self._leaving.values()],
        }

    def read(self, state: Mapping[str, Any]) -> dict[tuple[str, int], Tensor]:
        """What a state says is to leave.

        Raises:
            ValueError: it is of another model.
        """
        if state.keys() != _FIELDS.keys():
            raise ValueError(f"the state's regularize has {', '.join(map(str, state))}, not {', '.join(_FIELDS)}.")
        for field_name, (what, fits) in _FIELDS.items():
            if not fits(state[field_name]):
                raise ValueError(f"the state's regularize: its {field_name} is not {what}.")
        names, dims, masks = state["names"], state["dims"], state["leaving"]
        if not len(names) == len(dims) == len(masks):
            raise ValueError(
                f"the state has {len(names)} names, {len(dims)} dims and {len(masks)} masks of what leaves."
            )
        found: dict[tuple[str, int], Tensor] = {}
        for name, dim, mask in zip(names, dims, masks, strict=True):
            shape = tuple(self._parameters[name].shape) if name in self._parameters else "no such parameter"
            if isinstance(shape, str) or not 0 <= dim < len(shape) or mask.shape != shape[dim : dim + 1]:
                raise ValueError(f"{name}: the state has {mask.numel()} slices of dimension {dim}, the model {shape}.")
            if (name, dim) in found:
                raise ValueError(f"{name}: the state lets slices of dimension {dim} leave twice.")
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

    def _chosen(self) -> dict[tuple[str, int], Tensor]:
        """The slices of parameters that shrink would take out."""
        smaller = copy.deepcopy(self._model)
        with seeded(), torch.enable_grad():
            shrink(smaller, self._rule.example_inputs, self._rule.sparsity, **self._rule.options)
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
            mask = torch.ones(parameter.shape[dim], dtype=torch.bool, device="cpu")
            mask[positions] = False
            found[name, dim] = mask.to(parameter.device)
        return found

    def _default_ceiling(self) -> float:
        least = [8 * torch.finfo(self._parameters[name].dtype).eps for name, _ in self._leaving]
        return max(2 * _GONE / (self.end - self.begin), *least, 0.0)
