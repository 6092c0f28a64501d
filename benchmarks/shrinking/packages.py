"""Rivals that are packages, on real transformers: Torch-Pruning and optipfair, which take units of MLPs.

Elsewhere: `pip install --no-deps torch-pruning==1.6.1 optipfair==0.4.2` into the environment of the tests (or
`--target FOLDER`, and FOLDER in PYTHONPATH), so that torch stays the one of constraints.txt.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shrinking.rivals import Batches, Keep, all_groups, best, per_unit, told

PACKAGES = {"torch_pruning": "torch-pruning==1.6.1", "optipfair": "optipfair==0.4.2"}


def missing(package: str) -> str | None:
    """Why a package cannot be compared with here, and what to do."""
    if importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed (pip install --no-deps {PACKAGES[package]})"


def _torch_pruning(
    model: nn.Module, batches: Batches, keep: Keep, importance: Callable[[Any], Callable[..., Tensor]]
) -> None:
    """Its graph couples, its importance scores whole groups, its groups prune themselves; how many is told."""
    import torch_pruning as tp

    for parameter in model.parameters():
        parameter.requires_grad_(True)  # its graph is autograd's
    example = {name: tensor[:1] for name, tensor in batches[0].items()}
    if hasattr(model, "lm_head"):
        example["use_cache"] = False
    graph = tp.DependencyGraph().build_dependency(
        model, example_inputs=example, forward_fn=lambda called, inputs: called(**inputs)[0]
    )
    score = importance(tp)
    for group in all_groups(model):
        kept = keep.of(group)
        if kept == group.count:
            continue
        if group.kind != "units":
            raise ValueError("Torch-Pruning is compared on the units of MLPs only.")
        first = group.producers[0]
        everything = graph.get_pruning_group(first, tp.prune_linear_out_channels, idxs=list(range(group.count)))
        scores = per_unit(group, score(everything).detach())
        stays = set(best(scores, kept).tolist())
        gone = [unit for unit in range(group.count) if unit not in stays]
        graph.get_pruning_group(first, tp.prune_linear_out_channels, idxs=gone).prune()
    model.zero_grad()
    told(model, keep)


def group_norm(model: nn.Module, batches: Batches, keep: Keep) -> None:
    """The importance that its README shows first: the L2 norm over the group."""
    _torch_pruning(model, batches, keep, lambda tp: tp.importance.GroupMagnitudeImportance(p=2))


def taylor(model: nn.Module, batches: Batches, keep: Keep) -> None:
    """First order, with the gradient of the calibration's next-token loss."""
    for batch in batches:
        (model(**batch, labels=batch["input_ids"], use_cache=False).loss / len(batches)).backward()
    _torch_pruning(model, batches, keep, lambda tp: tp.importance.GroupTaylorImportance())


def optipfair(model: nn.Module, batches: Batches, keep: Keep) -> None:
    """Its default score, peak-to-peak magnitude, times the norm of activations ("MAW" with data)."""
    from optipfair import prune_model

    whole = model.config.intermediate_size
    gone = whole - keep.units
    prune_model(
        model,
        neuron_selection_method="MAW",
        pruning_percentage=100 * (gone + 0.5) / whole,  # it rounds down
        dataloader=[{**batch, "attention_mask": torch.ones_like(batch["input_ids"])} for batch in batches],
        show_progress=False,
    )
