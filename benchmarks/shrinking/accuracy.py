"""What it costs in accuracy, at equal multiply-adds: at once, and after the same fine-tuning."""

from __future__ import annotations

import copy
import fnmatch
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.shrinking import peers
from benchmarks.shrinking.effect import by_ours
from benchmarks.shrinking.networks import TUNING, ViT, right_share, train
from benchmarks.shrinking.sizes import count_of, multiply_adds
from secateur import demo
from secateur.allocation import everywhere
from secateur.criteria import ln_norm, taylor
from secateur.evidence import collect

# how each is made, its optimizer, and epochs before pruning
NETWORKS: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "digits CNN": (demo.DigitsNet, "sgd", 40),
    "ViT": (ViT, "adam", 60),
}

SHARES = (0.3, 0.5, 0.7, 0.85)
REGULARIZED = "tp GroupNormPruner"  # by its penalty, within its fine-tuning


def squared_gradients(model: nn.Module, data: demo.Digits) -> dict[str, dict[str, Tensor]]:
    """Of small batches of the training images: evidence for `criteria.taylor`."""
    model = copy.deepcopy(model)
    batches = list(zip(data.train_images.split(22), data.train_labels.split(22), strict=True))
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.dim() > 1}
    return collect(model, batches, taylor, weights=weights, loss=functional.cross_entropy)


def methods() -> dict[str, Callable[[nn.Module, demo.Digits, float], nn.Module]]:
    """What is compared: the first is ours as it comes with data, and the goals are about it beside the second."""

    def mine(**options: Any) -> Callable[[nn.Module, demo.Digits, float], nn.Module]:
        return lambda model, data, share: by_ours(model, data.train_images, share, **options)

    def other(importance: Callable[[], object], **options: Any) -> Callable[..., nn.Module]:
        return lambda model, data, share: peers.by_theirs(model, data.train_images, share, importance, **options)

    found: dict[str, Callable[[nn.Module, demo.Digits, float], nn.Module]] = {
        "shrink, data": lambda model, data, share: by_ours(
            model, data.train_images, share, batches=list(data.train_images.split(64))
        ),
        "shrink": mine(),
        "shrink, everywhere": mine(allocate=everywhere),
        "shrink, squares": mine(criterion=ln_norm),
        "shrink, squares everywhere": mine(criterion=ln_norm, allocate=everywhere),
        "shrink, taylor": lambda model, data, share: by_ours(
            model, data.train_images, share, criterion=taylor, evidence=squared_gradients(model, data)
        ),
    }
    if peers.tp is not None:
        norm, first = peers.group_norm(), peers.first_layer()
        found |= {
            "tp magnitude (first layer, L1)": other(first),
            "tp group norm": other(norm),
            "tp group norm, global": other(norm, global_pruning=True),
        }
    return found


def accuracy(
    seeds: int = 3, only: str = "*", tuning: int = TUNING, by: Sequence[str] | None = None, **_: Any
) -> dict[str, Any]:
    """Accuracy on the test images, at once and after the same fine-tuning, at equal multiply-adds; by these methods."""
    data = demo.load_digits()
    rows: list[dict[str, Any]] = []
    for network in fnmatch.filter(NETWORKS, only):
        make, kind, epochs = NETWORKS[network]
        for seed in range(seeds):
            torch.manual_seed(seed)
            dense = make()
            train(dense, data, kind, epochs, seed)
            whole = multiply_adds(dense, data.train_images)
            base = {"network": network, "seed": seed}
            rows.append({**base, "method": "dense", "share": 0.0, "accuracy": right_share(dense, data), "left": 1.0})
            for share in SHARES:
                for name, make_smaller in methods().items():
                    if by is not None and name not in by:
                        continue
                    smaller = make_smaller(copy.deepcopy(dense), data, share)
                    at_once = right_share(smaller.eval(), data)
                    train(smaller, data, kind, tuning, seed)
                    rows.append(_row(base, name, share, smaller, data, whole, at_once))
                if peers.tp is not None and (by is None or REGULARIZED in by):
                    smaller = peers.regularized(dense, data, kind, share, seed)
                    rows.append(_row(base, REGULARIZED, share, smaller, data, whole, None))
            print_accuracy(rows)
    return {"rows": rows}


def _row(
    base: Mapping[str, Any],
    method: str,
    share: float,
    model: nn.Module,
    data: demo.Digits,
    whole: int,
    at_once: float | None,
) -> dict[str, Any]:
    left = multiply_adds(model, data.train_images) / whole
    found = {"accuracy": right_share(model, data), "at once": at_once, "left": left, "weights": count_of(model)}
    return {**base, "method": method, "share": share, **found}


def print_accuracy(rows: Sequence[Mapping[str, Any]]) -> None:
    for network in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == network]
        dense = [100 * row["accuracy"] for row in mine if row["method"] == "dense"]
        for measured, told in (("at once", "before fine-tuning"), ("accuracy", "after it")):
            print(f"\n{network}, {told}: dense {statistics.mean(dense):.2f} %", end=" ")
            print("(of macs that stay, accuracy, ± standard deviation)")
            print(f"{'':32}", *(f"{f'-{share:.0%}':>20}" for share in SHARES), f"{'mean':>8}")
            for method in dict.fromkeys(row["method"] for row in mine if row["method"] != "dense"):
                these = [row for row in mine if row["method"] == method]
                if any(row[measured] is None for row in these):  # of what is pruned within its fine-tuning
                    continue
                cells, mean = _cells(these, measured)
                print(f"{method:32}", *(f"{cell:>20}" for cell in cells), f"{mean:8.2f}", flush=True)


def _cells(rows: Sequence[Mapping[str, Any]], measured: str) -> tuple[list[str], float]:
    """One method's, by share, and their mean."""
    cells, means = [], []
    for share in SHARES:
        values = [100 * row[measured] for row in rows if row["share"] == share]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        left = statistics.mean(row["left"] for row in rows if row["share"] == share)
        means.append(statistics.mean(values))
        cells.append(f"{left:6.3f} {means[-1]:6.2f} ±{spread:4.2f}")
    return cells, statistics.mean(means)
