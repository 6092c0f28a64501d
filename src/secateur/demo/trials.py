"""Networks on their way to the table: methods × sparsities × seeds, sanity checks, and networks without some channels.

Law: every method gets the same networks and the same budget, and the same seeds give the same accuracies on the same
machine, whatever its number of cores.
"""

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from secateur.allocation import uniform
from secateur.demo.data import Digits
from secateur.demo.methods import Method
from secateur.demo.network import DigitsNet
from secateur.demo.training import RATE, accuracy, train
from secateur.patterns import GroupedColumns
from secateur.pipeline import apply_, reestimate_batchnorm, sparsify
from secateur.report import count_multiply_adds
from secateur.shrinking import shrink
from secateur.targets import find_targets
from secateur.training import Pruner

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = [
    "COLUMNS",
    "COLUMN_SPARSITY",
    "LESS_WORK",
    "Plan",
    "SEEDS",
    "SPARSITIES",
    "Trial",
    "grouped_trials",
    "pruned_trials",
    "shrunken_trials",
    "spoilt_trials",
    "those_beside",
    "train_all",
    "train_dense",
    "untrained_networks",
]

SEEDS = (0, 1, 2)
SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98)
LESS_WORK = (0.5, 0.75)  # the fractions of the multiply-adds that leave with whole channels
COLUMNS, COLUMN_SPARSITY = GroupedColumns(16), 0.8  # a pattern that layers can skip in any runtime
# What is added to a seed: masks drawn from the stream that drew the weights would keep the largest of them
WEIGHTS, ORDER, FRESH_WEIGHTS, SCORES, CHECKS = 0, 1000, 2000, 3000, 4000


@dataclass(frozen=True)
class Plan:
    """What is run: each method at each sparsity for each seed, and for how many epochs, dense and of fine-tuning."""

    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    sparsities: tuple[float, ...]
    epochs: int
    tuning_epochs: int


@dataclass
class Trial:
    """One network on its way to the table: pruned, or about to be, and then trained for some epochs."""

    label: str
    asked: float | None  # None: the pattern says it
    seed: int
    model: nn.Module
    masks: Mapping[str, Tensor]
    epochs: int
    order: int  # seeds the order of the images
    method: Method | None = None  # None: the dense network, or a sanity check
    originals: Mapping[str, Tensor] = field(default_factory=dict)  # the weights before any was removed
    history: list[tuple[int, float, float]] = field(default_factory=list)
    before: float | None = None
    after: float = math.nan


def _in_parallel(jobs: Sequence[Callable[[], None]]) -> None:
    """Run the jobs on all cores, each on one thread, so that the results are the same however many cores there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))  # the setting is a thread's own
    try:
        for done in [pool.submit(job) for job in jobs]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def untrained_networks(seeds: Sequence[int], offset: int = WEIGHTS) -> dict[int, nn.Module]:
    """``{seed: network}`` with the first weights of each seed, or of others that lie ``offset`` further."""
    models: dict[int, nn.Module] = {}
    for seed in seeds:
        torch.manual_seed(offset + seed)
        models[seed] = DigitsNet()
    return models


def train_dense(
    untrained: Mapping[int, nn.Module], data: Digits, epochs: int, progress: "Progress"
) -> dict[int, nn.Module]:
    bar = progress.add_task(f"Training {len(untrained)} dense networks, epochs", total=len(untrained) * epochs)
    models = {seed: copy.deepcopy(model) for seed, model in untrained.items()}

    def job(seed: int) -> Callable[[], None]:
        return lambda: train(
            models[seed], data, epochs=epochs, rate=RATE, seed=seed, after_epoch=lambda: progress.advance(bar)
        )

    _in_parallel([job(seed) for seed in models])
    return models


def pruned_trials(plan: Plan, dense: Mapping[int, nn.Module], data: Digits, progress: "Progress") -> list[Trial]:
    """All networks of the table, pruned where that comes before training."""
    wanted: list[tuple[Method | None, float | None]] = [(None, 0.0)]
    for one in plan.methods:
        fixed = "pattern" in (one.choices or {})
        wanted += [(one, sparsity) for sparsity in ([None] if fixed else plan.sparsities)]
    bar = progress.add_task("Pruning, networks", total=len(wanted) * len(dense))
    trials = []
    for method, sparsity in wanted:
        for seed in dense:
            model = copy.deepcopy(dense[seed])
            originals = {name: weight.detach().clone() for name, weight in find_targets(model).items()}
            masks: Mapping[str, Tensor] = {}
            if method is not None and method.choices is not None:
                torch.manual_seed(SCORES + seed)  # random scores come from the global generator
                masks = sparsify(model, sparsity, **method.choices)
            label = method.label if method else "dense"
            trial = Trial(label, sparsity, seed, model, masks, plan.tuning_epochs, ORDER + seed, method, originals)
            if method is None or method.choices is not None:
                trial.before = _measured(model, data)
            trials.append(trial)
            progress.advance(bar)
    return trials


def spoilt_trials(
    trials: Sequence[Trial], dense: Mapping[int, nn.Module], sparsities: Sequence[float]
) -> dict[str, list[Trial]]:
    """Networks that share all but one thing with a method's: of LAMP at 95 %, where these are among what was asked."""
    sound = [trial for trial in trials if trial.method and trial.masks and trial.asked is not None]
    if not sound:
        return {}
    label = "LAMP" if any(trial.label == "LAMP" for trial in sound) else sound[0].label
    asked = 0.95 if 0.95 in sparsities else max(sparsities)
    checks: dict[str, list[Trial]] = {"shuffled": [], "random": [], "re-initialized": []}
    fresh = untrained_networks(list(dense), offset=FRESH_WEIGHTS)
    for trial in sound:
        if (trial.label, trial.asked) != (label, asked):
            continue
        generator = torch.Generator().manual_seed(CHECKS + trial.seed)
        shuffled = {name: _shuffled(mask.flatten(1), generator) for name, mask in trial.masks.items()}
        drawn = {name: _shuffled(mask.reshape(1, -1), generator) for name, mask in trial.masks.items()}
        for check, masks, source in (
            ("shuffled", shuffled, dense),
            ("random", drawn, dense),
            ("re-initialized", trial.masks, fresh),
        ):
            model = copy.deepcopy(source[trial.seed])
            masks = {name: mask.reshape(trial.masks[name].shape) for name, mask in masks.items()}
            apply_(model, masks)
            checks[check].append(Trial(label, asked, trial.seed, model, masks, trial.epochs, trial.order))
    return checks


def shrunken_trials(dense: Mapping[int, nn.Module], data: Digits, epochs: int, progress: "Progress") -> list[Trial]:
    """Networks that lost whole channels, for each fraction of the multiply-adds that leaves."""
    bar = progress.add_task("Shrinking, networks", total=len(LESS_WORK) * len(dense))
    trials = []
    for fraction in LESS_WORK:
        for seed in dense:
            model = copy.deepcopy(dense[seed])
            originals = {name: weight.detach().clone() for name, weight in find_targets(model).items()}
            shrink(model, data.train_images[:2], fraction, target="macs")
            trial = Trial("channels (shrink)", fraction, seed, model, {}, epochs, ORDER + seed, originals=originals)
            trial.before = _measured(model, data)
            trials.append(trial)
            progress.advance(bar)
    return trials


def grouped_trials(dense: Mapping[int, nn.Module], epochs: int) -> list[Trial]:
    """Networks in which groups of outputs share their zeros; stem and head are too small to give any."""
    trials = []
    for seed, whole in dense.items():
        model = copy.deepcopy(whole)
        originals = {name: weight.detach().clone() for name, weight in find_targets(model).items()}
        masks = sparsify(model, COLUMN_SPARSITY, pattern=COLUMNS, allocate=uniform, exclude=["stem.*", "head.*"])
        label = f"columns:{COLUMNS.outputs}"
        trials.append(Trial(label, COLUMN_SPARSITY, seed, model, masks, epochs, ORDER + seed, originals=originals))
    return trials


def those_beside(trials: Sequence[Trial], shrunken: Sequence[Trial]) -> list[Trial]:
    """The dense networks, of one method those with about as many multiply-adds left, then the shrunken ones."""
    masked = [trial for trial in trials if trial.method]
    label = next(
        (trial.label for trial in reversed(masked) if trial.label == "gradual"), masked[0].label if masked else ""
    )
    near = set()
    for fraction in LESS_WORK:
        work = [trial for trial in masked if trial.label == label]
        if work:
            near.add(min(work, key=lambda trial: abs(1 - fraction - _work(trial) / _work(trials[0]))).asked)
    chosen = [trial for trial in masked if trial.label == label and trial.asked in near]
    return [*(trial for trial in trials if trial.method is None), *chosen, *shrunken]


def _work(trial: Trial) -> int:
    return count_multiply_adds(trial.model, torch.zeros(1, 1, 8, 8))


def _shuffled(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Each row in an order of its own."""
    return rows.gather(1, torch.rand(rows.shape, generator=generator).argsort(dim=1))


def train_all(trials: Sequence[Trial], data: Digits, progress: "Progress") -> None:
    """Fine-tune, or train, every network, and measure it."""
    bar = progress.add_task(f"Fine-tuning {len(trials)} networks, epochs", total=sum(trial.epochs for trial in trials))

    def job(trial: Trial) -> Callable[[], None]:
        return lambda: _train_one(trial, data, lambda: progress.advance(bar))

    longest_first = sorted(trials, key=lambda trial: -trial.epochs)  # so that the cores end together
    _in_parallel([job(trial) for trial in longest_first])
    for trial in trials:  # in turn: re-estimation puts back random states, which threads share
        trial.after = _measured(trial.model, data)


def _train_one(trial: Trial, data: Digits, after_epoch: Callable[[], object]) -> None:
    settings: dict[str, Any] = {"epochs": trial.epochs, "rate": RATE, "seed": trial.order, "after_epoch": after_epoch}
    if trial.method is None or trial.method.choices is not None:
        train(trial.model, data, masks=trial.masks or None, **settings)
        return
    sparsity = trial.asked
    assert sparsity is not None
    pruners: list[Pruner] = []

    def begin(optimizer: torch.optim.Optimizer, steps: int) -> None:
        pruner = Pruner(trial.model, optimizer, sparsity, total_steps=steps, verbose=False)  # the default recipe
        pruners.append(pruner)
        trial.masks = pruner.masks
        trial.history.append((0, pruner.metrics()["sparsity"], 0.0))

    def after_step() -> None:
        [pruner] = pruners
        metrics, masks = pruner.metrics(), pruner.masks
        updated = any(not torch.equal(mask, trial.masks[name]) for name, mask in masks.items())
        trial.history.append((int(metrics["step"]), metrics["sparsity"], metrics["churn"] if updated else 0.0))
        trial.masks = masks

    train(trial.model, data, begin=begin, after_step=after_step, **settings)
    trial.masks = pruners[0].finish()


def _measured(model: nn.Module, data: Digits) -> float:
    """The accuracy on the test images, with batch normalization re-estimated from the training images."""
    reestimate_batchnorm(model, [data.train_images])
    return accuracy(model, data.test_images, data.test_labels)
