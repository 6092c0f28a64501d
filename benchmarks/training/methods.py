"""The methods: ``(model, sparsity, recipe) -> trained model``."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

import secateur
from benchmarks.training import peers
from benchmarks.training.tasks import Recipe, State
from secateur import Pruner, apply_, criteria, regrowth, schedules, sparsify
from secateur.evidence import collect


def dense(model: nn.Module, _sparsity: float, recipe: Recipe) -> nn.Module:
    recipe.fit(model)
    return model


def default_recipe(model: nn.Module, sparsity: float, recipe: Recipe) -> nn.Module:
    """Nothing said but the sparsity and the length of the run."""
    recipe.fit(
        model,
        begin=lambda optimizer: Pruner(model, optimizer, sparsity, total_steps=recipe.total_steps, verbose=False),
    )
    return model


def gradual_magnitude(model: nn.Module, sparsity: float, recipe: Recipe) -> nn.Module:
    recipe.fit(
        model,
        begin=lambda optimizer: Pruner(
            model, optimizer, sparsity, criterion=criteria.magnitude, total_steps=recipe.total_steps, verbose=False
        ),
    )
    return model


def one_shot_lamp(model: nn.Module, sparsity: float, recipe: Recipe) -> nn.Module:
    recipe.fit(model, begin=lambda optimizer: Pruner(model, optimizer, schedules.constant(sparsity), verbose=False))
    return model


def by_torch(method: str, model: nn.Module, sparsity: float, recipe: Recipe) -> nn.Module:
    from torch.nn.utils import prune

    weights = [(module, "weight") for module in model.modules() if isinstance(module, peers.LAYERS)]
    count = round(sparsity * sum(module.weight.numel() for module, _ in weights))
    prune.global_unstructured(weights, getattr(prune, method), amount=count)  # type: ignore[no-untyped-call]
    recipe.fit(model)
    for module, name in weights:
        prune.remove(module, name)  # type: ignore[no-untyped-call]
    return model


def synflow(model: nn.Module, sparsity: float, recipe: Recipe, rounds: int = 100) -> nn.Module:
    """Pruned before the first step, in a hundred rounds."""
    schedule = schedules.exponential(sparsity, end=rounds)
    masks: State | None = None
    for step in range(1, rounds + 1):
        evidence = collect(model, [recipe.example], criteria.synflow)
        masks = sparsify(model, schedule(step), criterion=criteria.synflow, evidence=evidence, within=masks)
    recipe.fit(
        model,
        begin=lambda optimizer: Pruner(model, optimizer, schedules.constant(sparsity), within=masks, verbose=False),
    )
    apply_(model, masks or {})
    return model


def rigl(model: nn.Module, sparsity: float, recipe: Recipe) -> nn.Module:
    """A random mask in the proportions of ERK, then drop and grow up to three quarters of the run."""
    recipe.fit(
        model,
        begin=lambda optimizer: Pruner(
            model,
            optimizer,
            schedules.constant(sparsity),
            criterion=criteria.random,
            allocate=secateur.allocation.erk,
            regrow=regrowth.rigl(),
            total_steps=recipe.total_steps,
            seed=3000 + recipe.seed,  # not the one that drew the first weights: the mask would follow their size
            verbose=False,
        ),
    )
    return model


OURS = "Pruner, default recipe"

TUNING: dict[str, Callable[[nn.Module, float, Recipe], nn.Module]] = {  # from the dense weights
    "torch.nn.utils.prune, random": functools.partial(by_torch, "RandomUnstructured"),
    "torch.nn.utils.prune, magnitude": functools.partial(by_torch, "L1Unstructured"),
    **peers.PEERS,
    "Pruner, one-shot LAMP": one_shot_lamp,
    OURS: default_recipe,
}

SCRATCH: dict[str, Callable[[nn.Module, float, Recipe], nn.Module]] = {  # as many epochs as dense and tuning together
    "Pruner, cubic from scratch": default_recipe,
    "SynFlow from the start": synflow,
    "RigL": rigl,
}

BY_MAGNITUDE = "Pruner, default recipe by magnitude"

TEXT = {  # the methods for the text, from the dense weights
    **{method: TUNING[method] for method in ("torch.nn.utils.prune, magnitude", "Pruner, one-shot LAMP", OURS)},
    BY_MAGNITUDE: gradual_magnitude,
}

DENSE = "dense"
