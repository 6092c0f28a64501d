"""Rivals that are packages, on real transformers: Torch-Pruning and optipfair, which take units of MLPs.

Torch-Pruning takes heads, too, where each has its own keys and values.

Elsewhere: `pip install --no-deps torch-pruning==1.6.1 optipfair==0.4.2` into the environment of the tests (or
`--target FOLDER`, and FOLDER in PYTHONPATH), so that torch stays the one of constraints.txt.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shrinking.rivals import Batches, Keep, all_groups, best, columns_of, per_unit, told

PACKAGES = {
    "torch_pruning": "torch-pruning==1.6.1",
    "optipfair": "optipfair==0.4.2",
    "onnxsim": "onnxsim==0.8.1",
}


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
        kept, width = keep.of(group), group.consumer.in_features
        if kept == group.count:
            continue
        first = group.producers[0]
        if first.out_features != width:
            raise ValueError("Torch-Pruning is compared where each head has its own keys and values.")
        everything = graph.get_pruning_group(first, tp.prune_linear_out_channels, idxs=list(range(width)))
        stays = set(columns_of(group, best(per_unit(group, score(everything).detach()), kept)).tolist())
        gone = [entry for entry in range(width) if entry not in stays]
        graph.get_pruning_group(first, tp.prune_linear_out_channels, idxs=gone).prune()
    model.zero_grad()
    told(model, keep)


def group_norm(model: nn.Module, batches: Batches, keep: Keep) -> None:
    """The importance that its README shows first: the L2 norm over the group."""
    _torch_pruning(model, batches, keep, lambda tp: tp.importance.GroupMagnitudeImportance(p=2))


def taylor(model: nn.Module, batches: Batches, keep: Keep) -> None:
    """First order, with the gradient of the calibration's next-token loss; of an encoder, of `contrast`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for batch in batches:
            if hasattr(model, "lm_head"):
                loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
            else:
                loss = contrast(model, batch)
            (loss / len(batches)).backward()
    _torch_pruning(model, batches, keep, lambda tp: tp.importance.GroupTaylorImportance())


def contrast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss that sentences alone give (SimCSE, 2104.08821): each finds itself among the batch, under other dropout."""

    def embedded() -> Tensor:
        kept = batch["attention_mask"][..., None].float()
        return nn.functional.normalize((model(**batch)[0] * kept).sum(1) / kept.sum(1))

    model.train()
    similar = embedded() @ embedded().T / 0.05
    model.eval()
    return nn.functional.cross_entropy(similar, torch.arange(len(similar)))


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
