"""What a step and a checkpoint cost."""

from __future__ import annotations

import argparse
import copy
import functools
import io
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.support.timing import alternating
from benchmarks.training import peers
from benchmarks.training.networks import GPT, MLP, ResNet8
from benchmarks.training.tasks import Recipe
from secateur import Pruner, schedules, sparsify

UPDATES = "Pruner, an update at every step"


class Masked(nn.Module):
    """A parametrization that multiplies by a mask."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def stepper(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        loss = Recipe.loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    model.train()
    return step


def step_cases(model: nn.Module, x: Tensor, y: Tensor, make: Callable[..., Any], absent: dict[str, str]) -> Any:
    """``{case: one optimizer step}`` at 90 %, each with a copy of the model."""
    steps = {}

    def add(case: str, prepare: Callable[[nn.Module], Any], begin: Callable[..., object] = lambda *_: None) -> None:
        mine = copy.deepcopy(model)
        mine = prepare(mine) or mine
        optimizer = make(mine.parameters())
        begin(mine, optimizer)
        steps[case] = stepper(mine, x, y, optimizer)

    def attach_torch(mine: nn.Module) -> None:
        from torch.nn.utils import prune

        layers = [(module, "weight") for module in mine.modules() if isinstance(module, peers.LAYERS)]
        prune.global_unstructured(layers, prune.L1Unstructured, amount=0.9)  # type: ignore[no-untyped-call]

    def parametrize(mine: nn.Module) -> None:
        from torch.nn.utils.parametrize import register_parametrization

        for name, mask in sparsify(mine, 0.9).items():
            path, _, leaf = name.rpartition(".")
            register_parametrization(mine.get_submodule(path), leaf, Masked(mask))

    def nothing(_mine: nn.Module) -> None:
        pass

    add("dense", nothing)
    between = schedules.constant(0.9)
    rising = schedules.linear(0.9, initial=0.5, end=10**6)
    add("Pruner between updates", nothing, lambda mine, o: Pruner(mine, o, between, verbose=False))
    add(UPDATES, nothing, lambda mine, o: Pruner(mine, o, rising, every=1, verbose=False))
    add("torch.nn.utils.prune", attach_torch)
    add("torch parametrizations", parametrize)
    if "nncf.prune" not in absent:
        with peers.quietly():
            add("nncf.prune", lambda mine: peers.nncf_model(mine, 0.9, x))
    return steps


def updates(steps: int) -> int:
    """How often a Pruner that is told nothing but the length of the run chooses new masks."""
    ramp = round(0.6 * steps)
    return -(-ramp // max(1, ramp // 100))


def saved_bytes(state: object) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    absent = peers.missing()
    rounds, repeats = (2, 2) if options.smoke else (30, 0)
    networks: dict[str, tuple[nn.Module, int]] = {"MLP, batch 64": (MLP(), 64), "MLP, batch 128": (MLP(), 128)}
    if not options.smoke:
        networks["ResNet-8, batch 64"] = (ResNet8(), 64)
        networks["GPT, batch 8 × 64"] = (GPT(100, width=192), 8)
    results: dict[str, Any] = {"missing": absent}
    for peer, reason in absent.items():
        print(f"{peer} is left out: {reason}.")
    print("times of a dense step, the median over rounds of each round's ratio of medians (first and third quartile)")
    for name, (model, batch) in networks.items():
        characters = isinstance(model, GPT)
        x = torch.randint(100, (batch, 64)) if characters else torch.randn(batch, 1, 8, 8)
        y = torch.randint(100, (batch, 64)) if characters else torch.randint(10, (batch,))
        adamw = functools.partial(torch.optim.AdamW, lr=1e-5)
        sgd = functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9, weight_decay=5e-4, nesterov=True)
        steps = step_cases(model, x, y, adamw if characters else sgd, absent)
        ratios, seconds = rounds_of(steps, rounds, repeats)
        quartiles = {case: statistics.quantiles(ratio, n=4) for case, ratio in ratios.items()}
        total = sum(parameter.numel() for parameter in model.parameters())
        print(f"\n{name}: {total:,} parameters, a dense step takes {1000 * seconds:.2f} ms")
        for case, (low, middle, high) in quartiles.items():
            print(f"  {case:>32}: {middle:.3f} ({low:.3f} … {high:.3f})")
        update = quartiles[UPDATES][1] - quartiles["Pruner between updates"][1]
        between = quartiles["Pruner between updates"][1]
        amortised = {length: between + updates(length) / length * update for length in (320, 1000, 10_000, 100_000)}
        print(f"  an update costs {update:.2f} dense steps; at the default interval a whole run takes "
              + ", ".join(f"{ratio:.3f} ({length:,} steps)" for length, ratio in amortised.items()))  # fmt: skip
        results[name] = {"ratios": quartiles, "seconds": seconds, "update": update, "amortised": amortised}
        results[name]["checkpoint"] = checkpoints(model, x, y, absent)
    return results


def rounds_of(steps: dict[str, Callable[[], None]], rounds: int, repeats: int) -> tuple[dict[str, list[float]], float]:
    """In each round every case has its turn, in a rotating order, and counts with the median of its steps."""
    for step in steps.values():
        for _ in range(2 if repeats else 20):
            step()
    if not repeats:
        start = time.perf_counter()
        for _ in range(10):
            steps["dense"]()
        repeats = max(3, min(100, round(1.5 / (time.perf_counter() - start))))  # 0.15 seconds a turn
    fewer = {case: max(3, repeats // 8) if case == UPDATES else repeats for case in steps}
    times = alternating(steps, rounds, warm_up=0, repeats=fewer, middle=True, rotate=True)
    ratios = {case: [own / plain for own, plain in zip(times[case], times["dense"], strict=True)] for case in steps}
    return ratios, statistics.median(times["dense"])


def checkpoints(model: nn.Module, x: Tensor, y: Tensor, absent: dict[str, str]) -> dict[str, float]:
    """Bytes that pruning adds to what is saved of the same training without pruning, as a share of it."""
    sgd = functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
    mine = copy.deepcopy(model)
    optimizer = sgd(mine.parameters())
    pruner = Pruner(mine, optimizer, schedules.constant(0.9), verbose=False)
    stepper(mine, x, y, optimizer)()
    saved = {"model": mine.state_dict(), "optimizer": optimizer.state_dict()}
    alone, together = saved_bytes(saved["model"]), saved_bytes(saved)
    found = {
        "Pruner, its state over the model's": saved_bytes(pruner.state_dict()) / alone,
        "Pruner, in one file with model and optimizer": saved_bytes(saved | {"pruner": pruner.state_dict()}) / together
        - 1,
    }
    if "fasterai" not in absent:
        with peers.quietly():
            theirs = peers.fasterai_sparsified(copy.deepcopy(model), 0.9)
        found["fasterai, the model"] = saved_bytes(theirs.state_dict()) / alone - 1
        theirs_together = saved_bytes(saved | {"model": theirs.state_dict()})
        found["fasterai, in one file with model and optimizer"] = theirs_together / together - 1
    if "Lightning ModelPruning" not in absent:
        recipe = Recipe(1, 2, 0, 0.1, x, lambda _: iter([(x, y)] * 2), sgd)
        sizes = [peers.lightning_checkpoint(copy.deepcopy(model), recipe, sparsity) for sparsity in (None, 0.9)]
        found["Lightning ModelPruning, in one file with model and optimizer"] = sizes[1] / sizes[0] - 1
    print("  a checkpoint grows:")
    for who, share in found.items():
        print(f"  {who:>62}: +{100 * share:.2f} %")
    return found
