"""What a pruned weight costs in every forward: `torch.nn.utils.prune`, and `secateur.prune` in its place.

    python benchmarks/prune/run.py [--processes 7] [--rounds 60] [--allocator default] [--only CASE] [--json FILE]

One process and one thread hold a dense model and its two pruned copies, l1 at 0.5. They take turns in slices of a few
milliseconds, in an order that changes with every round; a figure is the median of the rounds' ratios of processor time,
so that what disturbs the machine disturbs all alike. glibc is told to keep what is freed: by default it hands the top
of its heap back to the system and asks for it again at every step of a model with layers of a megabyte, the dense one
included; how often depends on what lies there by accident, which several processes and `--allocator default` show.
Training is forward and backward; without gradients, the model evaluates under `no_grad`. A second copy of the dense
model takes part: how far its ratio is from 1 is the noise.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from secateur import prune

SLICE = 4e-3  # seconds
VARIANTS = ("dense", "dense again", "original", "ours")
KEEP_WHAT_IS_FREED = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
Taken = dict[str, list[float]]


def linears(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.ReLU())))


def convolutions() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())))


def encoder() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)


# {title: (model, shape of the input, the tensors to prune)}; `self_attn.out_proj` is not among them, for the original
# computes with a stale one and cannot train it
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "six linear layers of 512": (lambda: linears(6, 512), (32, 512), ("weight",)),
    "four 3×3 convolutions of 32 channels": (convolutions, (8, 32, 16, 16), ("weight",)),
    "LSTM of 256": (lambda: nn.LSTM(256, 256), (32, 8, 256), ("weight_ih_l0", "weight_hh_l0")),
    "encoder layer of 128": (encoder, (8, 32, 128), ("linear1.weight", "linear2.weight")),
    "encoder layer of 128, attention too": (
        encoder, (8, 32, 128), ("linear1.weight", "linear2.weight", "self_attn.in_proj_weight"),
    ),
    "twenty linear layers of 16": (lambda: linears(20, 16), (8, 16), ("weight",)),
}  # fmt: skip


def pruned(model: nn.Module, names: tuple[str, ...], library: object) -> nn.Module:
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        for name in list(module._parameters):
            if name in names or f"{path}.{name}" in names:
                library.l1_unstructured(module, name, amount=0.5)
    return model


def training(model: nn.Module, x: Tensor) -> Callable[[], None]:
    model.train()
    parameters = list(model.parameters())

    def step() -> None:
        y = model(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
        for parameter in parameters:
            parameter.grad = None

    return step


def without_gradients(model: nn.Module, x: Tensor) -> Callable[[], None]:
    model.eval()

    def step() -> None:
        with torch.no_grad():
            model(x)

    return step


MODES = {"training": training, "without gradients": without_gradients}


def slice_of(step: Callable[[], None], times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        step()
    return time.process_time() - start


def child(title: str, mode: str, rounds: int) -> Taken:
    """The seconds of one pass, of every variant in every round."""
    torch.set_num_threads(1)
    make, shape, names = CASES[title]
    torch.manual_seed(0)
    dense, x = make(), torch.randn(shape)
    models = {
        "dense": dense,
        "dense again": copy.deepcopy(dense),
        "original": pruned(dense, names, torch_prune),
        "ours": pruned(dense, names, prune),
    }
    steps = {variant: MODES[mode](models[variant], x) for variant in VARIANTS}
    warm = [slice_of(step, 20) for step in steps.values()]
    times = max(1, round(SLICE / (warm[0] / 20)))
    order = random.Random(0)
    taken: Taken = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant in order.sample(VARIANTS, len(VARIANTS)):
            taken[variant].append(slice_of(steps[variant], times) / times)
    return taken


def ratios(taken: Taken, above: str, below: str) -> list[float]:
    return [a / b for a, b in zip(taken[above], taken[below], strict=True)]


def summary(processes: list[Taken]) -> dict[str, float]:
    """Medians over all rounds of all processes, and between which bounds the processes' own medians lie."""

    def over(above: str, below: str) -> float:
        return statistics.median(each for taken in processes for each in ratios(taken, above, below))

    own = [statistics.median(ratios(taken, "ours", "original")) for taken in processes]
    return {
        "dense, µs": statistics.median(each for taken in processes for each in taken["dense"]) * 1e6,
        "dense again": over("dense again", "dense"),
        "original": over("original", "dense"),
        "ours": over("ours", "dense"),
        "ours/original": over("ours", "original"),
        "least": min(own),
        "most": max(own),
    }


def line(title: str, mode: str, row: dict[str, float]) -> str:
    figures = " | ".join(f"{row[key]:.2f}" for key in ("dense again", "original", "ours"))
    compared = f"**{row['ours/original']:.3f}** ({row['least']:.3f} … {row['most']:.3f})"
    return f"| {title} | {mode} | {row['dense, µs']:.0f} | {figures} | {compared} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=7, help="for each case, in turn")
    parser.add_argument("--rounds", type=int, default=60, help="in each process")
    parser.add_argument("--allocator", choices=["keeping", "default"], default="keeping")
    parser.add_argument("--only", default="", help="cases whose title contains this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("CASE", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(*arguments.child, arguments.rounds)))
        return
    environment = os.environ | (KEEP_WHAT_IS_FREED if arguments.allocator == "keeping" else {})
    chosen = [(title, mode) for title in CASES if arguments.only in title for mode in MODES]
    processes: dict[tuple[str, str], list[Taken]] = {each: [] for each in chosen}
    for _ in range(arguments.processes):
        for each in chosen:
            command = [sys.executable, __file__, "--rounds", str(arguments.rounds), "--child", *each]
            output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
            processes[each].append(json.loads(output))
    rows = {each: summary(taken) for each, taken in processes.items()}
    print(f"torch {torch.__version__}, {platform.machine()}, one thread, allocator: {arguments.allocator}")
    print("| | | dense, µs | dense again | original | ours | ours / original |")
    print("|---|---|---|---|---|---|---|")
    for each, row in rows.items():
        print(line(*each, row))
    if arguments.json:
        rows_with_names = [{"case": title, "mode": mode, **row} for (title, mode), row in rows.items()]
        arguments.json.write_text(json.dumps(rows_with_names, indent=1))


if __name__ == "__main__":
    main()
