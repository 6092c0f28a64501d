"""What swaps after the greedy order are worth: an input that left comes back, and another leaves, while the loss falls.

Law: the same weight, Gram matrix and damping for all; the loss of a set is computed from the set, not from the way to
it. Swaps are those of ``shrink(choose="swaps")``.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.support.language_models import MiniLM
from benchmarks.support.tables import head, row
from secateur.shrinking.measure import chunk_of
from secateur.solvers.elimination import Elimination, eliminated

_DAMPING, _GAIN = 0.01, 1e-6


def swaps(minilm: Path, samples: int) -> None:
    """Units of MiniLM's MLPs: as `shrink` lets them leave, with its swaps after that, and one at a time."""
    subject = MiniLM(minilm)
    model = subject.load(minilm)
    layers = {name: each for name, each in model.named_modules() if name.endswith("output.dense")}
    layers = {name: each for name, each in layers.items() if ".attention." not in name}
    grams = _grams(model, layers, subject.batches(0, samples))
    columns = ("layer", "leaves", "as `shrink`", "with swaps", "one at a time", "swapped", "s", "s with swaps")
    print(head(columns))
    for name in [*layers][::2]:
        weight, hessian = layers[name].weight.detach().double(), grams[name]
        inputs = len(hessian)
        dense = float(((weight @ hessian) * weight).sum())
        hessian = hessian + _DAMPING * hessian.diagonal().mean() * torch.eye(inputs, dtype=torch.float64)
        for share in (0.3, 0.5, 0.7):
            keep, started = inputs - int(share * inputs), time.process_time()
            few = _stay(weight, hessian, keep, chunk_of(inputs))
            greedy, started = time.process_time() - started, time.process_time()
            best = _stay(weight, hessian, keep, chunk_of(inputs), chunk_of(inputs))
            swapping, one = time.process_time() - started, _stay(weight, hessian, keep, 1)
            lost = [_lost(weight, hessian, stay) / dense for stay in (few, best, one)]
            cells = [name, f"{share:.0%}", *(f"{each:.5f}" for each in lost), str(len({*few} - {*best}))]
            print(row([*cells, f"{greedy:.1f}", f"{swapping:.1f}"]), flush=True)


def _grams(model: nn.Module, layers: dict[str, nn.Module], batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    grams: dict[str, Tensor] = {}

    def add(name: str, given: Tensor) -> None:
        rows = given.flatten(0, -2).double()
        grams[name] = grams.get(name, torch.zeros(())) + rows.T @ rows

    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: add(name, given[0]))
        for name, layer in layers.items()
    ]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for hook in hooks:
        hook.remove()
    return grams


def _stay(weight: Tensor, hessian: Tensor, keep: int, chunk: int, swaps: int = 0) -> list[int]:
    """The inputs that stay."""
    layer = Elimination(weight, hessian)
    left, _ = eliminated([(layer, [[at] for at in range(len(hessian))])], keep, chunk, swaps)
    return sorted({*range(len(hessian))} - {*left})


def _lost(weight: Tensor, hessian: Tensor, stay: list[int]) -> float:
    """What the others cannot give of what left: by the Schur complement."""
    left = sorted({*range(len(hessian))} - {*stay})
    across = hessian[stay][:, left]
    given = torch.cholesky_solve(across, torch.linalg.cholesky(hessian[stay][:, stay]))
    gone = weight[:, left]
    return float((gone @ (hessian[left][:, left] - across.T @ given) * gone).sum())
