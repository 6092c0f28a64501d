"""Every criterion's default on trained networks, beside random pruning and beside narrower and wider competitions.

    python benchmarks/criteria/run.py [--network MLP] [--seeds 3] [--json FILE] [--smoke]

Law: networks, images and batches of a table are those of all its rows; weights are counted in the masks.

Three networks are trained on scikit-learn's digits: an MLP, convolutions with BatchNorm (whose statistics are
re-estimated after pruning for every row alike) and a transformer over 2×2 patches. Each criterion then removes 50 % and
80 % of the weights within the rows, within the layers, and over the whole model; its default is in bold. Movement is
gathered while the network learns other images, the digits turned by 90 degrees, and GraSP, SNIP and SynFlow are also
used as they were published, before training. ± is the standard deviation over seeds. `--smoke` is one seed and a few
steps: it shows that everything runs, and no figure of it is true.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur import Pruner, Rows, Unstructured, apply_, criteria, sparsify
from secateur.allocation import everywhere, uniform
from secateur.demo import Digits, load_digits

BATCH = 64
SPARSITIES = (0.5, 0.8)
SCOPES: dict[str, dict[str, Any]] = {
    "row": {"pattern": Rows(), "allocate": uniform},
    "layer": {"pattern": Unstructured(), "allocate": uniform},
    "model": {"pattern": Unstructured(), "allocate": everywhere},
}
AT_ONCE = ("random", "magnitude", "ln_norm", "lamp", "wanda", "ria", "taylor", "snip", "synflow", "grasp")
GATHERED = ("random", "magnitude", "movement", "soft_movement")  # while a Pruner trains
FROM_SCRATCH = ("random", "grasp", "snip", "synflow")  # before training


class Transformer(nn.Module):
    """Two pre-normalized layers of width 32 over 16 patches of 2×2."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.places = nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places.weight
        logits: Tensor = self.head(self.norm(self.encoder(x)).mean(1))
        return logits


def mlp() -> nn.Sequential:
    """64-128-64-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutions(channels: tuple[int, ...] = (16, 32, 48, 48)) -> nn.Sequential:
    """On 16×16, pooled once to 8×8, in the end to 1: a Linear then sees one token where the first layer sees 256."""
    layers: list[nn.Module] = [nn.Upsample(scale_factor=2)]
    for at, (inputs, outputs) in enumerate(zip((1, *channels), channels, strict=False)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if at == 0 else []
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(*layers, *head)


class Case(NamedTuple):
    """A network, and what its training takes."""

    make: Callable[[], nn.Module]
    epochs: int
    rate: float


CASES = {
    "MLP": Case(mlp, 20, 3e-3),
    "convolutions": Case(convolutions, 6, 5e-3),
    "transformer": Case(Transformer, 30, 5e-3),
}


def in_batches(data: Digits, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Training batches, shuffled anew in each epoch; never a last one that is smaller."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(data.train_labels), generator=generator)
        for chosen in order.split(BATCH)[:-1]:
            yield data.train_images[chosen], data.train_labels[chosen]


def trained(case: Case, data: Digits, seed: int) -> nn.Module:
    """A new network of the seed, trained."""
    torch.manual_seed(seed)
    return train(case.make(), case, data, seed)


def train(model: nn.Module, case: Case, data: Digits, seed: int, masks: dict[str, Tensor] | None = None) -> nn.Module:
    """AdamW in one cycle; with masks, what they remove stays zero."""
    batches = list(in_batches(data, case.epochs, seed))
    optimizer = torch.optim.AdamW(model.parameters(), case.rate)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, case.rate, total_steps=len(batches) + 1)
    model.train()
    for images, labels in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        cycle.step()
        if masks is not None:
            apply_(model, masks)
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """Percent of the test images."""
    return float((model.eval()(data.test_images).argmax(1) == data.test_labels).double().mean() * 100)


def turned(data: Digits) -> Digits:
    """Another task for the same network."""
    train, test = (images.rot90(1, (2, 3)) for images in (data.train_images, data.test_images))
    return data._replace(train_images=train, test_images=test)


def evidence_batches(data: Digits) -> list[tuple[Tensor, Tensor]]:
    """512 training images, which every criterion may look at."""
    return list(zip(data.train_images[:512].split(BATCH), data.train_labels[:512].split(BATCH), strict=True))


def pruned(
    model: nn.Module, sparsity: float, criterion: str, data: Digits, seed: int, scope: str | None = None
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy that is pruned at once, at the criterion's default without a scope, and its masks; BatchNorm sees data."""
    other = copy.deepcopy(model)
    torch.manual_seed(1000 + seed)  # random scores come from the global generator
    with warnings.catch_warnings():  # wider than the scores allow, on purpose
        warnings.filterwarnings("ignore", message=f"{criterion} scores the weights of one")
        masks = sparsify(
            other,
            sparsity,
            criterion=criterion,
            batches=evidence_batches(data),
            loss=functional.cross_entropy,
            **(SCOPES[scope] if scope else {}),
        )
    return other, masks


def fine_tuned(model: nn.Module, sparsity: float, criterion: str, data: Digits, seed: int, epochs: int) -> nn.Module:
    """A copy that a Pruner has pruned by its default recipe, while it learned turned images."""
    other = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(other.parameters(), 0.02, momentum=0.9)
    batches = list(in_batches(data, epochs, 2000 + seed))
    pruner = Pruner(other, optimizer, sparsity, criterion=criterion, total_steps=len(batches), verbose=False)
    for images, labels in batches:
        optimizer.zero_grad()
        functional.cross_entropy(other(images), labels).backward()
        optimizer.step()
    pruner.finish()
    return other


def from_scratch(case: Case, sparsity: float, criterion: str, data: Digits, seed: int) -> nn.Module:
    """A new network that is pruned before it is trained."""
    torch.manual_seed(seed)
    model, masks = pruned(case.make(), sparsity, criterion, data, seed)
    return train(model, case, data, seed, masks)


def table(title: str, columns: list[str], rows: dict[str, list[list[float]]]) -> None:
    print(f"\n{title}\n\n| criterion | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, cells in rows.items():
        default = criteria.scope_of(criteria.parse(name))
        texts = []
        for column, cell in zip(columns, cells, strict=True):
            mean = f"**{statistics.mean(cell):.1f}**" if column.startswith(default) else f"{statistics.mean(cell):.1f}"
            texts.append(mean + (f" ± {statistics.stdev(cell):.1f}" if len(cell) > 1 else ""))
        print(f"| {name} | {' | '.join(texts)} |")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=CASES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data = load_digits()
    cases = {name: case._replace(epochs=1) if chosen.smoke else case for name, case in CASES.items()}
    seeds = range(1 if chosen.smoke else chosen.seeds)
    found: dict[str, dict[str, dict[str, list[list[float]]]]] = {}
    for name, case in cases.items():
        if chosen.network not in (None, name):
            continue
        models = [trained(case, data, seed) for seed in seeds]
        dense = [accuracy(model, data) for model in models]
        print(f"\n### {name}: dense {statistics.mean(dense):.1f} %")
        columns = [f"{scope}, {sparsity:.0%}" for scope in SCOPES for sparsity in SPARSITIES]
        at_once: dict[str, list[list[float]]] = {}
        least: dict[str, list[list[float]]] = {}
        for criterion in AT_ONCE:
            done = [
                [
                    pruned(model, sparsity, criterion, data, seed, scope)
                    for seed, model in zip(seeds, models, strict=True)
                ]
                for scope in SCOPES
                for sparsity in SPARSITIES
            ]
            at_once[criterion] = [[accuracy(model, data) for model, _ in cell] for cell in done]
            least[criterion] = [
                [100 * min(float(mask.double().mean()) for mask in masks.values()) for _, masks in cell]
                for cell in done
            ]
        table("Accuracy after pruning at once, %", columns, at_once)
        table("The least that a layer keeps, %", columns, least)
        epochs = 1 if chosen.smoke else 10
        other = turned(data)
        gathered = {
            criterion: [
                [
                    accuracy(fine_tuned(model, sparsity, criterion, other, seed, epochs), other)
                    for seed, model in zip(seeds, models, strict=True)
                ]
                for sparsity in SPARSITIES
            ]
            for criterion in GATHERED
        }
        table(
            f"Turned digits, after {epochs} epochs with a Pruner, %",
            [f"{sparsity:.0%}" for sparsity in SPARSITIES],
            gathered,
        )
        higher = (*SPARSITIES, 0.95)
        scratch = {
            criterion: [
                [accuracy(from_scratch(case, sparsity, criterion, data, seed), data) for seed in seeds]
                for sparsity in higher
            ]
            for criterion in FROM_SCRATCH
        }
        table("Pruned before training, then trained, %", [f"{sparsity:.0%}" for sparsity in higher], scratch)
        found[name] = {
            "dense": {"dense": [dense]},
            "at once": at_once,
            "least kept": least,
            "Pruner": gathered,
            "before training": scratch,
        }
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
