"""`Plan`: what leaves a model, as a value that is made from a choice, or read from JSON.

Law: a plan says shapes and numbers before and after, so that whoever carries it out can see that it fits; of plain
values it is what they were made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.coupling import Branch, Coupling, Kept, counts_kept, replacement
from secateur.support import Between, Fields, tensors_of

# (dimension, what its positions are multiplied by)
Factors = list[tuple[int, npt.NDArray[np.float64]]]
_LARGEST, _HUGE = 2**63 - 1, 1e308  # what an index, and a float, can be
Indices = dict[Annotated[int, Between(0, 7)], tuple[Annotated[int, Between(0, _LARGEST)], ...]]  # by dimension
ATTRIBUTE = "shrink_plans"  # of a shrunken model: what was removed, in order


@dataclass(frozen=True)
class Plan:
    """A removal plan: which indices of tensors' dimensions stay, which numbers of modules change, which modules leave.

    Attributes:
        tensors: ``{name: (shape before, {dimension: kept indices})}``.
        numbers: ``[(place, before, after)]``; a place is the path of a module, then names, keys and indices.
        scales: ``[(name, dimension, indices, factor)]``: entries, of those before, that are multiplied by a number,
            since the code divides by the root of a size that became smaller.
        modules: ``{path: form}`` of what stays in place of modules that leave; see `Removed` in `secateur.coupling`.
        outputs: the modules whose outputs leave what the model returns.
    """

    tensors: dict[str, tuple[tuple[int, ...], dict[int, npt.NDArray[np.int64]]]]
    numbers: Sequence[tuple[tuple[str | int, ...], int | float, int | float]]
    scales: list[tuple[str, int, npt.NDArray[np.int64], float]] = field(default_factory=list)
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()

    def takes(self, branch: Branch) -> bool:
        """Whether nothing is left of a residual branch: all that has its parameters leaves."""
        return all(any(name.startswith(f"{path}.") for path in self.modules) for name in branch.parameters)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "tensors": {
                name: {"shape": list(shape), "kept": {str(at): each.tolist() for at, each in kept.items()}}
                for name, (shape, kept) in self.tensors.items()
            },
            "numbers": [{"place": list(place), "from": old, "to": new} for place, old, new in self.numbers],
            "scales": [
                {"tensor": name, "dimension": at, "indices": indices.tolist(), "by": factor}
                for name, at, indices, factor in self.scales
            ],
            **({"modules": {path: dict(form) for path, form in self.modules.items()}} if self.modules else {}),
            **({"outputs": list(self.outputs)} if self.outputs else {}),
        }


def plan_in(read: Fields) -> Plan:
    """What `Plan.to_json` made."""
    tensors = {
        name: (
            tuple(entry.each("shape", int)),
            {at: np.asarray(each, dtype=np.int64) for at, each in entry.value("kept", Indices).items()},
        )
        for name, entry in read.inners_named("tensors")
    }
    numbers = [(_place(each), *_change(each)) for each in read.inners("numbers")]
    scales = [
        (
            each.take("tensor", str),
            each.take("dimension", int),
            np.asarray(each.each("indices", int, least=0, most=_LARGEST), dtype=np.int64),
            float(each.take("by", float, least=-_HUGE, most=_HUGE)),
        )
        for each in (read.inners("scales") if "scales" in read.values else ())
    ]
    modules: dict[str, Mapping[str, Any]] = {}
    for path, form in read.inners_named("modules") if "modules" in read.values else ():
        try:
            replacement(form.values)  # one that cannot be made is no plan
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise form.wrong("", f"describes no module ({error})") from None
        modules[path] = dict(form.values)
    outputs = tuple(read.each("outputs", str)) if "outputs" in read.values else ()
    return Plan(tensors, numbers, scales, modules, outputs)


def _change(number: Fields) -> tuple[int | float, int | float]:
    kind = float if type(number.values.get("from")) is float else int
    was, becomes = (number.take(key, kind, least=-_HUGE, most=_HUGE) for key in ("from", "to"))
    return was, becomes


def _place(number: Fields) -> tuple[str | int, ...]:
    found = number.take("place", list)
    if not all(type(each) in (str, int) for each in found) or len(found) < 2:
        raise number.wrong("place", "is no place of a number: the path of a module, then names, keys and indices")
    return tuple(found)


def plans_of(model: nn.Module) -> list[Plan]:
    """The plans that were carried out on a model, in order."""
    return list(getattr(model, ATTRIBUTE, ()))


def plan_of(model: nn.Module, coupling: Coupling, kept: Kept) -> Plan:
    """The plan that keeps these units of the groups."""
    tensors: dict[str, tuple[tuple[int, ...], dict[int, npt.NDArray[np.int64]]]] = {}
    for name, tensor in tensors_of(model).items():
        masks = coupling.kept(name, kept)
        cuts = {at: np.flatnonzero(mask) for at, mask in enumerate(masks) if not mask.all()}
        if cuts:
            tensors[name] = (tuple(tensor.shape), cuts)
    counts = counts_kept(kept)
    numbers = [(each.place, each.value, value) for each, value in coupling.attributes(counts).items()]
    return Plan(tensors, numbers, coupling.scales(counts))


def plan_without(branches: Iterable[Branch]) -> Plan:
    """The plan that removes residual branches; of nested modules that leave, it names only the outer."""
    modules = {path: form for branch in branches for path, form in branch.modules.items()}
    outer = {path: form for path, form in modules.items() if not any(path.startswith(f"{other}.") for other in modules)}
    return Plan({}, [], modules=outer)


def fits(indices: npt.NDArray[np.int64], size: int) -> bool:
    return bool(
        indices.ndim == 1
        and len(indices)
        and indices[0] >= 0
        and indices[-1] < size
        and (indices[1:] > indices[:-1]).all()  # a difference could wrap around
    )


def factors_of(plan: Plan) -> dict[str, Factors]:
    """For each tensor that is scaled ``(dimension, factors of the positions that stay)``."""
    found: dict[str, Factors] = {}
    for name, at, indices, factor in plan.scales:
        shape, kept = plan.tensors.get(name, ((), {}))
        if not 0 <= at < len(shape) or not fits(indices, shape[at]):
            raise ValueError(f"the plan scales entries of {name} that it does not make smaller, or that are not there.")
        factors = np.ones(shape[at])
        factors[indices] = factor
        found.setdefault(name, []).append((at, factors[kept[at]] if at in kept else factors))
    return found


def multiplied(tensor: Tensor, scales: Factors) -> Tensor:
    """Along a dimension; not rounded to half precision before."""
    for at, factors in scales:
        shape = [1] * tensor.dim()
        shape[at] = -1
        wide = tensor.double() if tensor.dtype == torch.float64 else tensor.float()
        tensor = (wide * torch.from_numpy(factors).to(wide).reshape(shape)).to(tensor.dtype)
    return tensor
