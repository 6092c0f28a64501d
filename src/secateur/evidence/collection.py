"""What a criterion needs beside the weight: asked for by naming it, as a pytest fixture is asked for.

Law: a criterion receives exactly the evidence that it names, an unknown name is an error before anything runs, and
gathering it leaves the model as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.evidence.gradients import GRADIENTS, Gradients, averaged, flow_of, hessian_product
from secateur.evidence.observation import Observation, groups_of_ranks
from secateur.evidence.places import Place, places_of
from secateur.evidence.statistics import STATISTICS
from secateur.evidence.vocabulary import Evidence, checked_words, needs
from secateur.support import (
    Forward,
    Loss,
    bytes_text,
    check_batches,
    device_of,
    free_memory,
    is_sharded,
    loss_of,
    moved,
    repeatable,
    replicating_group,
    run_batch,
    track,
    unchanged,
    unwrapped,
    whole,
)
from secateur.targets import find_targets, identity_of

__all__ = ["collect"]


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
    sharded = [name for name in places if is_sharded(weights[name])]
    if sharded and (impossible := [word for word in ("hessian_grad", "flow") if word in words]):
        raise TypeError(f"{sharded[0]} is sharded, and {impossible[0]} can't be gathered on shards; gather it before.")
    check_batches(batches)
    batches = repeatable(batches) if "hessian_grad" in words else batches

    found: Evidence = {name: {} for name in places}
    device = device_of(inner)
    if "gram" in words:
        _check_room(places, device)
    first, count = None, 0
    gradients = Gradients(places, frozenset(words) & GRADIENTS)
    statistics = Observation(places, frozenset(words) & frozenset(STATISTICS))
    with unchanged(inner), torch.inference_mode(False), statistics.hooked():
        inner.train(train)
        gradients.watch(inner)
        for batch in track(batches, "gathering evidence"):
            batch = moved(batch, device)
            first, count = (batch if first is None else first), count + 1
            if not statistics.words and not gradients.words:
                break  # flow looks at the first batch's shapes
            with torch.set_grad_enabled(bool(gradients.words)):
                with statistics.listening(batch):
                    outputs = run_batch(inner, batch, forward)
                if gradients.words:
                    loss_of(outputs, batch, loss, count - 1).backward()  # type: ignore[no-untyped-call]
                    gradients.end_batch()
            del outputs
        if not count:
            raise ValueError("there are no batches: evidence comes from running the model.")
        gradients.refuse_unreached()
        _merge(found, "grad", averaged(gradients.sums, count, group))
        _merge(found, "grad_sq", averaged(gradients.squares, count, group))
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
