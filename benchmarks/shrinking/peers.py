"""Torch-Pruning, which is not in the project's environment.

Elsewhere: `pip install --no-deps torch-pruning`, with the torch of constraints.txt, transformers, scikit-learn and this
package. Without it `tp` is None.
"""

from __future__ import annotations

import copy
import functools
import random
import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shrinking.comparison import (
    Kept,
    agreement,
    distinct,
    kept_by_value,
    outputs,
    seeded,
    tensors_of,
    with_zeros,
)
from benchmarks.shrinking.networks import TUNING, Attention, train
from benchmarks.shrinking.sizes import count_of, multiply_adds
from benchmarks.support.models import zoo
from secateur import demo

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torch_pruning as tp
    except ImportError:
        tp = None

MISSING = "torch-pruning is not installed here: only ours is measured (peers.py says how to install it)."


def ignored_by_readme(model: nn.Module, inputs: zoo.Inputs) -> list[nn.Module]:
    """Torch-Pruning is told not to prune the outputs, as its README advises: by their number of channels."""
    with torch.no_grad(), seeded():
        out = tensors_of(zoo.run(model, inputs))
    sizes = {size for each in out if each.is_floating_point() for size in each.shape[1:]}
    found = []
    for module in model.modules():
        count = getattr(module, "out_features", getattr(module, "out_channels", None))
        if count in sizes:
            found.append(module)
    return found


def theirs(name: str, ratio: str) -> dict[str, Any]:
    """The same with Torch-Pruning, as its README says: magnitude of groups, L2, outputs ignored."""
    model, inputs = zoo.ZOO[name]()
    distinct(model)
    fresh = copy.deepcopy(model)
    before = count_of(model)
    expected = [each.shape for each in outputs(copy.deepcopy(fresh).double(), inputs)]
    row: dict[str, Any] = {}
    start = time.perf_counter()
    try:
        ignored = ignored_by_readme(model, inputs)
        options: dict[str, Any] = {}
        if ratio == "uneven":
            draw = random.Random(zlib.crc32(name.encode()))
            options["pruning_ratio_dict"] = {
                module: draw.uniform(0.2, 0.8)
                for module in model.modules()
                if isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.LSTM)
            }
        pruner = tp.pruner.MagnitudePruner(
            model,
            inputs,
            importance=tp.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=0.5,
            ignored_layers=ignored,
            in_channel_groups={},  # its defaults are shared between pruners
            out_channel_groups={},
            num_heads={},
            channel_groups={},
            **options,
        )
        pruner.step()
    except Exception as error:
        return {**row, "class": "crash", "why": f"pruning: {type(error).__name__}: {error}"[:300]}
    row["seconds"] = time.perf_counter() - start
    row["left"] = count_of(model) / before
    after = dict(model.named_parameters(remove_duplicate=False))
    kept: Kept = {}
    for each, old in fresh.named_parameters(remove_duplicate=False):
        found = kept_by_value(old.detach(), after[each].detach()) if each in after else None
        if found is None:
            return {**row, "class": "WRONG", "why": f"{each} holds other values than slices of the original's"}
        kept[each] = found
    if row["left"] == 1.0:
        return {**row, "class": "nothing"}
    try:
        smaller = model.double()
        if [each.shape for each in outputs(smaller, inputs)] != expected:
            return {**row, "class": "cuts outputs"}
        form, row["gap"] = agreement(with_zeros(fresh.double(), kept), smaller, inputs)
    except Exception as error:
        return {**row, "class": "crash", "why": f"the pruned model: {type(error).__name__}: {error}"[:300]}
    row["form"] = form
    return {**row, "class": "right"} if form else {**row, "class": "WRONG", "why": f"differs by {row['gap']:.2g}"}


def couple_theirs(model: nn.Module, inputs: zoo.Inputs) -> object:
    return tp.DependencyGraph().build_dependency(model, example_inputs=inputs)


def remove_theirs(model: nn.Module, inputs: zoo.Inputs) -> object:
    pruner = tp.pruner.MagnitudePruner(
        model,
        inputs,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=ignored_by_readme(model, inputs),
    )
    return pruner.step()


def by_theirs(
    model: nn.Module, example: Tensor, share: float, importance: Callable[[], object], **options: Any
) -> nn.Module:
    """The smallest ratio of channels at which the multiply-adds are few enough, by bisection."""

    def at(ratio: float) -> nn.Module:
        smaller = copy.deepcopy(model).eval()
        prune_theirs(smaller, example, ratio, importance, **options)
        return smaller

    goal = (1 - share) * multiply_adds(model, example)
    low, high, found = 0.0, 0.98, None
    for _ in range(9):
        middle = (low + high) / 2
        smaller = at(middle)
        if multiply_adds(smaller, example) > goal:
            low = middle
        else:
            high, found = middle, smaller
    return found if found is not None else at(high)


def prune_theirs(
    model: nn.Module, example: Tensor, ratio: float, importance: Callable[[], object], **options: Any
) -> None:
    heads = {
        linear: module.heads
        for module in model.modules()
        if isinstance(module, Attention)
        for linear in (module.query, module.key, module.value)
    }
    tp.pruner.BasePruner(
        model,
        example[:2],
        importance=importance(),
        pruning_ratio=ratio,
        ignored_layers=[model.head],
        num_heads=heads,
        in_channel_groups={},
        out_channel_groups={},
        channel_groups={},
        **options,
    ).step()


def regularized(dense: nn.Module, data: demo.Digits, kind: str, share: float, seed: int) -> nn.Module:
    """Torch-Pruning's GroupNormPruner: half of the fine-tuning with its penalty, then pruning, then the other half."""
    model = copy.deepcopy(dense)
    norm = group_norm()
    penalty = tp.pruner.GroupNormPruner(
        model,
        data.train_images[:2],
        importance=norm(),
        ignored_layers=[model.head],
        in_channel_groups={},
        out_channel_groups={},
        channel_groups={},
    )
    train(model, data, kind, TUNING // 2, seed, lambda: penalty.regularize(model))
    model.zero_grad()
    smaller = by_theirs(model, data.train_images, share, norm)
    train(smaller, data, kind, TUNING - TUNING // 2, seed + 1)
    return smaller


def group_norm() -> Callable[[], object]:
    """The importance that Torch-Pruning's README shows first."""
    return functools.partial(tp.importance.GroupMagnitudeImportance, p=2)


def first_layer() -> Callable[[], object]:
    """What is left of a group is judged by the outputs of its first layer alone, L1."""
    return functools.partial(tp.importance.GroupMagnitudeImportance, p=1, group_reduction="first")
