"""What swaps after the greedy order are worth: an input that left comes back, and another leaves, while the loss falls.

Law: the same weight, Gram matrix and damping for all; the loss of a set is computed from the set, not from the way to
it. Swaps are many at once at first, fewer where that gains nothing, as in OSSCAR (Meng et al. 2024, arXiv:2403.12983).
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
    """Units of MiniLM's MLPs: in `shrink`'s chunks, one at a time, and with swaps after that."""
    subject = MiniLM(minilm)
    model = subject.load(minilm)
    layers = {name: each for name, each in model.named_modules() if name.endswith("output.dense")}
    layers = {name: each for name, each in layers.items() if ".attention." not in name}
    grams = _grams(model, layers, subject.batches(0, samples))
    columns = ("layer", "leaves", "as `shrink`", "one at a time", "with swaps", "swapped", "s", "s of swaps")
    print(head(columns))
    for name in [*layers][::2]:
        weight, hessian = layers[name].weight.detach().double(), grams[name]
        inputs = len(hessian)
        dense = float(((weight @ hessian) * weight).sum())
        hessian = hessian + _DAMPING * hessian.diagonal().mean() * torch.eye(inputs, dtype=torch.float64)
        for share in (0.3, 0.5, 0.7):
            keep, started = inputs - int(share * inputs), time.process_time()
            few, one = (_greedy(weight, hessian, range(inputs), keep, chunk) for chunk in (chunk_of(inputs), 1))
            greedy, started = time.process_time() - started, time.process_time()
            best = _swapped(weight, hessian, one, max(1, inputs // 50))
            lost = [_lost(weight, hessian, stay) / dense for stay in (few, one, best)]
            cells = [name, f"{share:.0%}", *(f"{each:.5f}" for each in lost), str(len({*one} - {*best}))]
            print(row([*cells, f"{greedy:.1f}", f"{time.process_time() - started:.1f}"]), flush=True)


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


def _greedy(weight: Tensor, hessian: Tensor, among: range | list[int], keep: int, chunk: int = 1) -> list[int]:
    """The inputs that stay, where those that are not among them left before, all at once."""
    layer = Elimination(weight, hessian)
    layer.remove([*({*range(len(hessian))} - {*among})])
    left, _ = eliminated([(layer, [[each] for each in among])], keep, chunk)
    gone = {among[at] for at in left}
    return [each for each in among if each not in gone]


def _parts(weight: Tensor, hessian: Tensor, stay: list[int]) -> tuple[Tensor, list[int], Tensor]:
    """The weight of what left, what left, and what the others cannot give of it: the Schur complement."""
    left = [*({*range(len(hessian))} - {*stay})]
    across = hessian[stay][:, left]
    given = torch.cholesky_solve(across, torch.linalg.cholesky(hessian[stay][:, stay]))
    return weight[:, left], left, hessian[left][:, left] - across.T @ given


def _lost(weight: Tensor, hessian: Tensor, stay: list[int]) -> float:
    gone, _, rest = _parts(weight, hessian, stay)
    return float((gone @ rest * gone).sum())


def _swapped(weight: Tensor, hessian: Tensor, stay: list[int], many: int) -> list[int]:
    lost = _lost(weight, hessian, stay)
    while many:
        gone, left, rest = _parts(weight, hessian, stay)
        gains = (gone @ rest).square().sum(0) / rest.diagonal()
        back = [left[at] for at in gains.topk(min(many, len(left))).indices.tolist()]
        tried = _greedy(weight, hessian, sorted([*stay, *back]), len(stay))
        if (now := _lost(weight, hessian, tried)) < lost * (1 - _GAIN):
            stay, lost = tried, now
        else:
            many //= 2
    return stay
