"""Hooks on the modules that own weights: they add up what goes in and comes out while a batch runs forward. What a
criterion needs beside the weight: asked for by naming it, as a pytest fixture is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.evidence.gradients import GRADIENTS, Gradients, Place, averaged, flow_of, hessian_product, places_of
from secateur.evidence.layers import Layer, layer_of
from secateur.evidence.statistics import STATISTICS, Evidence, Sums, checked_words, needs, sum_over_ranks
from secateur.support import (
    Forward,
    Loss,
    bytes_text,
    check_batches,
    device_of,
    free_memory,
    is_empty,
    is_sharded,
    loss_of,
    moved,
    refuse_unloaded,
    repeatable,
    replicating_group,
    run_batch,
    times_the_mean,
    track,
    unchanged,
    unwrapped,
    whole,
)
from secateur.targets import find_targets, identity_of

# ---- Hooks on the modules that own weights: they add up what goes in and comes out while a batch runs forward.
#
# Law: padding does not count, a weight that no batch reaches is an error that names it, and all ranks get the same.


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
    return found if word == "gram" else layer.inputs(found, shape)


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


# ---- What a criterion needs beside the weight: asked for by naming it, as a pytest fixture is asked for.
#
# Law: a criterion receives exactly the evidence that it names, an unknown name is an error before anything runs, and
# gathering it leaves the model as it was.


def collect(
    model: nn.Module,
    batches: Iterable[Any],
    asked: Callable[..., Any] | Iterable[str],
    *,
    weights: Mapping[str, Tensor] | None = None,
    loss: Loss | None = None,
    forward: Forward | None = None,
    train: bool = False,
) -> Evidence:
    """``{name: {word: tensor}}``: what a criterion names, gathered by running the model; what `make_masks` takes.

    One pass over the batches, two for ``hessian_grad``, none but the first batch's shapes for ``flow``. The loss is
    differentiated only where gradients are asked for. The model is as it was afterwards, also after an exception:
    modes, gradients, buffers, random states; the weights never change. Under an autocast of the caller's, gradients
    and sums are in float32 or wider all the same.

    Memory: for each word one tensor of float32 (or the weight's dtype, if wider) for each weight asked for, the Gram
    matrix or some vectors; ``grad_sq`` holds a batch's gradients beside. Gradients of other weights are dropped as
    they arrive. ``flow`` and ``hessian_grad`` are dearer: a float64 copy of the model, and a graph for a second
    derivative.

    Args:
        model: any module. Of one in DistributedDataParallel (or the module inside it) or ``fully_shard``, each rank
            passes its own batches, and all ranks get the evidence over all of them.
        batches: what a DataLoader yields: tensors, tuples of the inputs and targets, or mappings of keyword arguments.
            Moved to the model's device. An ``attention_mask`` (batch, sequence) in a mapping leaves padding out of
            the statistics of inputs and outputs.
        asked: a criterion, or some words of `VOCABULARY`.
        weights: ``{name: parameter}`` of the model; by default its `find_targets`.
        loss: ``(outputs, *targets) -> scalar`` for tuples, ``(outputs)`` for tensors, ``(outputs, batch)`` for
            mappings; by default the outputs' own ``loss``.
        forward: ``(model, batch) -> outputs``, instead of the above.
        train: run the model in training mode.

    Raises:
        TypeError: a word is unknown or can't be gathered from batches, a weight's module is of a kind whose inputs
            are not known, or there is no loss.
        ValueError: no batches, a loss or evidence that is not finite, a weight that the batches never reach, Gram
            matrices that take more than half of the free memory.

    >>> layer = nn.Linear(2, 1)
    >>> collect(layer, [torch.tensor([[3.0, 1.0]]), torch.tensor([[4.0, 0.0]])], ["input_norm"])
    {'weight': {'input_norm': tensor([[5., 1.]])}}
    """
    if callable(asked):
        words = needs(asked)
    else:
        words = checked_words([asked] if isinstance(asked, str) else asked, "this call")
    weights = find_targets(model) if weights is None else weights
    if "movement" in words:
        raise TypeError(
            "movement adds up over training steps and can't be collected from batches; give the criterion to a Pruner, "
            "which gathers it while the model trains."
        )
    if not words or not weights:
        return {name: {} for name in weights}
    inner = unwrapped(model)
    places = places_of(inner, weights)
    group = replicating_group(*next(iter(places.values()))[0][1:3])
    refuse_unloaded(inner, weights)
    sharded = [name for name in places if is_sharded(weights[name])]
    if sharded and (impossible := [word for word in ("hessian_grad", "flow") if word in words]):
        raise TypeError(f"{sharded[0]} is sharded, and {impossible[0]} can't be gathered on shards; gather it before.")
    check_batches(batches)
    batches = repeatable(batches) if "hessian_grad" in words else batches

    found: Evidence = {name: {} for name in places}
    device = device_of(inner)
    if "gram" in words:
        _check_room(places, device)
    first, count, empty = None, 0, True
    gradients = Gradients(places, frozenset(words) & GRADIENTS)
    statistics = Observation(places, frozenset(words) & frozenset(STATISTICS))
    with unchanged(inner), torch.inference_mode(False), statistics.hooked():
        inner.train(train)
        gradients.watch(inner)
        for batch in track(batches, "gathering evidence"):
            batch = moved(batch, device)
            first, count = (batch if first is None else first), count + 1
            empty = empty and is_empty(batch)
            if not statistics.words and not gradients.words:
                break  # flow looks at the first batch's shapes
            with torch.set_grad_enabled(bool(gradients.words)):
                with statistics.listening(batch):
                    outputs = run_batch(inner, batch, forward)
                if gradients.words:
                    loss_of(outputs, batch, loss, count - 1).backward()  # type: ignore[no-untyped-call]
                    gradients.end_batch()
            del outputs
        if empty:
            said = "the batches hold no token and no sample, or all is padding" if count else "there are no batches"
            raise ValueError(f"{said}: evidence comes from running the model.")
        gradients.refuse_unreached()
        times = times_the_mean(weights[sharded[0]]) if sharded and gradients.words else 1
        _merge(found, "grad", averaged(gradients.sums, count * times, group))
        _merge(found, "grad_sq", averaged(gradients.squares, count * times**2, group))
        if "hessian_grad" in words:
            slopes = {name: entry["grad"] for name, entry in found.items()}
            products = hessian_product(
                inner, places, slopes, (moved(batch, device) for batch in batches), loss, forward
            )
            _merge(found, "hessian_grad", averaged(products, count, group))
        for name, entry in statistics.results(weights, groups_of_ranks(group, weights)).items():
            found[name] |= entry
        if "flow" in words:
            _merge(found, "flow", averaged(flow_of(inner, places, first, forward), 1, group))
    for name, entry in found.items():
        for word in words:
            if not _is_finite(entry[word]):
                raise ValueError(f"{name}: {word} has entries that are NaN or infinite; look at the batches for such.")
    names = {identity_of(weights[name]): name for name in places}
    return {name: {word: found[names[identity_of(weight)]][word] for word in words} for name, weight in weights.items()}


def _check_room(places: Mapping[str, Sequence[Place]], device: torch.device | None) -> None:
    """ValueError, before anything runs, where the Gram matrices would take more than half of the free memory."""
    free, sizes = free_memory(device), dict[str, int]()
    for name, (place, *_) in places.items():
        shape = place.parameter.shape
        inputs_first = type(place.module).__name__ == "Conv1D" and hasattr(place.module, "nf")
        sizes[name] = 4 * (shape[0] if inputs_first else math.prod(shape[1:])) ** 2
    if free is not None and 2 * sum(sizes.values()) > free:
        name = max(sizes, key=lambda each: sizes[each])
        raise ValueError(
            f"{name}: its Gram matrix takes {bytes_text(sizes[name])}, all that are asked for take "
            f"{bytes_text(sum(sizes.values()))}, and half of the free {bytes_text(free)} is less; leave it out with "
            "exclude= (weights= here), or take a criterion that asks for vectors, such as wanda."
        )


def _merge(found: Evidence, word: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        found[name][word] = tensor


def _is_finite(tensor: Tensor) -> bool:
    if is_sharded(tensor):
        return bool(whole((tensor * 0).sum()).isfinite())
    return bool(tensor.isfinite().all())
