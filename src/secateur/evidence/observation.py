"""Hooks on the modules that own weights: they add up what goes in and comes out while a batch runs forward.

Law: padding does not count, a weight that no batch reaches is an error that names it, and all ranks get the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from secateur.evidence.layers import Layer, layer_of
from secateur.evidence.places import Place
from secateur.evidence.statistics import Sums, sum_over_ranks
from secateur.evidence.vocabulary import Evidence
from secateur.support import is_sharded

__all__ = ["Observation", "groups_of_ranks"]


class Observation:
    """Hooks on the modules that own the weights; they add up what goes in and comes out while `listening`."""

    def __init__(self, places: Mapping[str, list[Place]], words: frozenset[str]) -> None:
        self.words = words
        self.layers = {name: [_layer(name, place, words) for place in found] for name, found in places.items() if words}
        self.sums = {name: Sums(words) for name in self.layers}
        self.places = places
        self.active = False
        self.keep: Tensor | None = None
        for name, layers in self.layers.items():
            if len({layer.kind for layer in layers}) > 1:
                kinds = " and ".join(f"{place.module_name} ({type(place.module).__name__})" for place in places[name])
                raise TypeError(
                    f"{name} is shared by {kinds}, whose inputs are not the same features; leave it out with exclude=, "
                    f"or take a criterion without {', '.join(sorted(words))}."
                )

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        handles = [
            layer.module.register_forward_hook(functools.partial(self._see, self.sums[name], layer), with_kwargs=True)
            for name, layers in self.layers.items()
            for layer in layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def listening(self, batch: Any) -> Iterator[None]:
        """Only in the forward pass: in the backward one, activation checkpoints run modules again."""
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        self.keep = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def _see(self, sums: Sums, layer: Layer, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.active:
            with torch.no_grad():
                layer.observe(sums, args, kwargs, output, self.keep)
            sums.calls += 1

    def results(self, weights: Mapping[str, Tensor], groups: list[Any]) -> Evidence:
        for group in groups:
            sum_over_ranks(self.sums, group, device=next(iter(weights.values())).device)
        found: Evidence = {}
        for name, sums in self.sums.items():
            if not sums.calls:
                place = self.places[name][0]
                raise ValueError(
                    f"{name}: the batches never ran {place.module_name or 'the model'} "
                    f"({type(place.module).__name__}); leave it out with exclude=, or pass batches that do."
                )
            sums.finish()
            weight, layer = weights[name], self.layers[name][0]
            found[name] = {word: _placed(_laid(word, sums, layer, weight.shape), weight) for word in self.words}
        return found


def _layer(name: str, place: Place, words: frozenset[str]) -> Layer:
    layer = layer_of(place.module, place.key, place.parent)
    missing = sorted(words if layer is None else words - layer.words)
    if layer is None or missing:
        where = f"{place.module_name} " if place.module_name else ""
        raise TypeError(
            f"{name} belongs to {where}({type(place.module).__name__}), of which {', '.join(missing)} can't be "
            f"gathered; leave it out with exclude=, or take a criterion without."
        )
    return layer


def _laid(word: str, sums: Sums, layer: Layer, shape: torch.Size) -> Tensor:
    """What the word asks for, as it lies beside the weight."""
    found = sums.statistic(word)
    if word == "gram":
        return found
    return layer.outputs(found, shape) if word == "output_norm" else layer.inputs(found, shape)


def _placed(statistic: Tensor, weight: Tensor) -> Tensor:
    """On the weight's device; for a weight in shards, whole on every rank."""
    statistic = statistic.to(weight.device)
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        return statistic
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(statistic, mesh, [Replicate()] * mesh.ndim, run_check=False)


def groups_of_ranks(group: Any, weights: Mapping[str, Tensor]) -> list[Any]:
    """The groups of ranks that see different batches."""
    if group is not None:
        return [group]
    sharded: list[Any] = [weight for weight in weights.values() if is_sharded(weight)]
    mesh = sharded[0].device_mesh if sharded else None
    return [] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
