"""Where a model holds its weights: the modules and keys of each, of which a tied one has several.

Law: parameters over one memory are one weight.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from secateur.support import private
from secateur.targets import identity_of

__all__ = ["Place", "distinct", "places_of"]


class Place(NamedTuple):
    """Where a weight is in the model."""

    module_name: str
    module: nn.Module
    key: str
    parent: nn.Module | None

    @property
    def parameter(self) -> nn.Parameter:
        parameter = private.parameters_of(self.module)[self.key]
        assert parameter is not None
        return parameter


def places_of(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, list[Place]]:
    """``{name: places}``, several where a weight is tied; of names for one tensor the first."""
    names: dict[Hashable, str] = {}
    for name, weight in weights.items():
        names.setdefault(identity_of(weight), name)
    places: dict[str, list[Place]] = {name: [] for name in names.values()}
    for module_name, module in model.named_modules():
        parent = model.get_submodule(module_name.rpartition(".")[0]) if module_name else None
        for key, parameter in private.parameters_of(module).items():
            same = None if parameter is None else names.get(identity_of(parameter))
            if same is not None:
                places[same].append(Place(module_name, module, key, parent))
    for name, found in places.items():
        if not found:
            raise ValueError(
                f"{name} is no parameter of this {type(model).__name__}; pass weights=find_targets(model)."
            )
    return places


def distinct(places: list[Place]) -> list[nn.Parameter]:
    """The Parameters that are one weight: several where two of them share memory."""
    return list({id(place.parameter): place.parameter for place in places}.values())
