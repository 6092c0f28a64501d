"""Networks without blocks: trained on scikit-learn's digits, pruned by criteria and by `oneshot`, layer by layer.

Law: every way removes the same share of each network's weights and sees the same 512 images; accuracy is on 597 images
that neither training nor calibration saw. A row is a calibration of one trained network; networks differ by seed.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.support.digits import digits, trained
from benchmarks.support.tables import head, row
from secateur import sparsify
from secateur.models import oneshot

__all__ = ["layers"]

STEPS = 600  # of training
CRITERIA = ("magnitude", "wanda", "ria")
WAYS: dict[str, dict[str, Any]] = {"at once": {"stages": False}, "stages": {"aim": 0.0}, "oneshot": {}}


class Convolutions(nn.Module):
    """Three convolutions and two linear layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)
        self.three, self.norm = nn.Conv2d(2 * width, 2 * width, 3, padding=1, stride=2), nn.BatchNorm2d(2 * width)
        self.inner, self.out = nn.Linear(32 * width, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x.view(-1, 1, 8, 8)).relu()).relu()
        x = self.norm(self.three(x)).relu().flatten(1)
        found: Tensor = self.out(self.inner(x).relu())
        return found


class Recurrent(nn.Module):
    """A recurrent network over the rows of an image."""

    def __init__(self, kind: Callable[..., nn.RNNBase], width: int = 64, **settings: Any) -> None:
        super().__init__()
        self.recurrent = kind(8, width, batch_first=True, **settings)
        self.out = nn.Linear(width * (1 + self.recurrent.bidirectional), 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.recurrent(x.view(-1, 8, 8))[0][:, -1])
        return found


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "CNN": Convolutions,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU, two layers": lambda: Recurrent(nn.GRU, num_layers=2),
    "LSTM, both ways": lambda: Recurrent(nn.LSTM, 48, bidirectional=True),
}


def layers(sparsities: list[float], seeds: int) -> list[dict[str, Any]]:
    """A table: accuracy in percent of each network at each sparsity, means over seeds, and the share of the loss."""
    x, y = digits()
    batches = list(x[:512].split(64))
    names = ["dense", *CRITERIA, *WAYS]
    print(head(["network", "sparsity", *names, "loss, of the best criterion's", "s"]))
    rows = []
    for name, make in NETWORKS.items():
        models = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            models.append(trained(make(), x[:1200], y[:1200], STEPS))
        for sparsity in sparsities:
            found: dict[str, list[float]] = {each: [] for each in names}
            seconds = []
            for model in models:
                found["dense"].append(_right(model, x, y))
                for criterion in CRITERIA:
                    pruned = copy.deepcopy(model)
                    sparsify(pruned, sparsity, criterion=criterion, batches=batches)
                    found[criterion].append(_right(pruned, x, y))
                for way, keywords in WAYS.items():
                    pruned, started = copy.deepcopy(model), time.process_time()
                    oneshot(pruned, batches, sparsity, **keywords)
                    seconds.append(time.process_time() - started)
                    found[way].append(_right(pruned, x, y))
            means = {each: statistics.mean(values) for each, values in found.items()}
            best = means["dense"] - max(means[each] for each in CRITERIA)
            share = (means["dense"] - means["oneshot"]) / best
            shown = [f"{means[each]:.1f}" for each in names]
            print(row([name, f"{sparsity:.0%}", *shown, f"{share:.2f}", f"{seconds[-1]:.1f}"]), flush=True)
            rows.append({"network": name, "sparsity": sparsity, **found})
    return rows


@torch.no_grad()
def _right(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return 100 * float((model(x[1200:]).argmax(1) == y[1200:]).float().mean())
