"""Where masks act: the weights of a model, or of one that follows it, multiplied in one call after each step.

Law: values are written in place, into the memory that the weights have now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from secateur.support import is_sharded, local, private, unwrapped
from secateur.targets import find_layers

__all__ = ["Place", "check_follower", "locals_of", "parameters_that_follow", "weights_to_prune"]


class Place:
    """Weights that are multiplied by the masks after each step: the model's, or those of a model that follows it."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.masks: Mapping[str, Tensor] | None = None
        self.values: list[Tensor] = []
        self.factors: list[Tensor] = []
        self._pointers: list[tuple[Tensor, int]] = []
        self._sharded = any(is_sharded(weight) for weight in weights.values())

    @property
    def is_stale(self) -> bool:
        """Whether a weight has other memory than when it was gathered, as after ``model.to``."""
        return self._sharded or any(weight.data_ptr() != at for weight, at in self._pointers)

    def gather(self, masks: Mapping[str, Tensor]) -> None:
        """Take hold of the weights' own memory, and of the masks on its devices."""
        weights = [self.weights[name] for name in masks]
        for (name, mask), weight in zip(masks.items(), weights, strict=True):
            if mask.shape != weight.shape:
                raise ValueError(
                    f"{name} has another shape than when the Pruner was made: finish() it before shrink, and make a "
                    "new one to train on."
                )
        self.masks = masks
        self.values = locals_of(weights)
        self.factors = [local(mask).to(value.device) for mask, value in zip(masks.values(), self.values, strict=True)]
        self._pointers = [] if self._sharded else [(weight, weight.data_ptr()) for weight in weights]

    def zero(self, masks: Mapping[str, Tensor]) -> None:
        """Multiply the weights by masks, in one call for all that lie here.

        What is handed to that call is kept from step to step: on a small network the rest would cost more than it.
        """
        if self.masks is not masks or self.is_stale:
            self.gather(masks)
        if self.values:
            private.multiply_all(self.values, self.factors)


def weights_to_prune(
    model: nn.Module, include: str | Iterable[str] | None, exclude: str | Iterable[str] | None
) -> dict[str, Tensor]:
    """``{name: weight}`` of a model's layers that a Pruner can prune.

    Raises:
        ValueError: one belongs to a mask that is attached, or has no values.
    """
    weights: dict[str, Tensor] = {**find_layers(model, include=include, exclude=exclude)}
    if attached := [name for name in weights if name.endswith("_orig")]:
        raise ValueError(f"{attached[0]} belongs to a mask that is attached: detach(model) first.")
    if meta := [name for name, weight in weights.items() if weight.device.type == "meta"]:
        raise ValueError(f"{meta[0]} is on the meta device, where there are no values; load the weights first.")
    return weights


def parameters_that_follow(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a copy of a model, or of an average of it, by their names in the model.

    Raises:
        KeyError: one of the weights is missing.
        ValueError: one can't have the zeros of the model's.
    """
    inside = unwrapped(model)
    parameters: dict[str, Tensor] = dict(inside.named_parameters())
    if isinstance(averaged := getattr(inside, "module", None), nn.Module):
        parameters = dict(averaged.named_parameters()) | parameters
    if missing := [name for name in weights if name not in parameters]:
        raise KeyError(f"{type(model).__name__} has no weight {missing[0]!r}; follow takes a copy of the model.")
    for name, weight in weights.items():
        check_follower(name, parameters[name], weight)
    return parameters


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's parts, sharing memory."""
    return [local(tensor.detach()) for tensor in tensors]


def check_follower(name: str, weight: Tensor, own: Tensor) -> None:
    """``ValueError`` unless a weight can have the zeros of another."""
    if weight.shape != own.shape:
        raise ValueError(f"{name} has shape {tuple(weight.shape)} in the model that follows, {tuple(own.shape)} here.")
    if weight.is_meta or not weight.is_floating_point():
        raise ValueError(
            f"{name} is of {weight.dtype} on {weight.device} in the model that follows: it can't be zeroed."
        )
    if is_sharded(weight) != is_sharded(own) or getattr(weight, "placements", None) != getattr(own, "placements", None):
        raise ValueError(f"{name} is not sharded in the model that follows as it is here.")
