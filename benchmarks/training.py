"""Pruning while training: accuracy at equal budgets beside the peers, the cost of a step, and a character GPT.

    python benchmarks/training.py accuracy|batchnorm|overhead|gpt [--seeds 3] [--json FILE] [--smoke]

Law: the methods of a table share dense starting weights, data and their order, optimizer, learning rates and number of
steps; sparsity is counted from the zeros of the model that a method leaves, over all weights of linear layers and
convolutions. Peers that are not installed are named with the reason (training_peers.py says how to install them).

Each training is one thread of one process, as many at a time as there are cores, so that the figures do not depend on
their number. `--smoke` is one seed and a few steps: it shows that everything runs, and no figure of it means anything.
"""

from __future__ import annotations

import argparse
import copy
import functools
import io
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import secateur
from secateur import Pruner, apply_, criteria, regrowth, schedules, sparsify
from secateur.demo import load_digits
from secateur.evidence import collect

sys.path.insert(0, str(Path(__file__).parent))
import training_peers as peers

State = dict[str, Tensor]

# --------------------------------------------------------------------------------------------------------------------
# The networks
# --------------------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """64-300-100-10: 50 200 weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(y + self.shortcut(x))


class ResNet8(nn.Module):
    """Three blocks of 16, 32 and 64 channels: 77 072 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(functional.relu(self.norm(self.stem(x))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(count, length, width))
        y: Tensor = x + self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return y


class GPT(nn.Module):
    """Characters in, logits of the next one out; (n, length) to (n, length, characters)."""

    def __init__(self, characters: int, length: int = 64, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Attention(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.places.weight[: x.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


# --------------------------------------------------------------------------------------------------------------------
# What all methods share
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class Recipe:
    """Batches, optimizer, learning rates and loss of one training."""

    epochs: int
    steps_per_epoch: int
    seed: int
    rate: float
    example: Tensor
    draw: Callable[[torch.Generator], Iterator[tuple[Tensor, Tensor]]]  # the batches of an epoch
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def epochs_of_batches(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.epochs):
            yield list(self.draw(generator))

    def rates(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.rate, total_steps=self.total_steps, pct_start=0.2, cycle_momentum=False
        )

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def fit(
        self,
        model: nn.Module,
        *,
        begin: Callable[[torch.optim.Optimizer], object] = lambda _optimizer: None,
        before_epoch: Callable[[int], object] = lambda _epoch: None,
    ) -> None:
        """The plain loop; ``begin`` is handed the optimizer before the first step."""
        optimizer = self.optimizer(model.parameters())
        rates = self.rates(optimizer)
        begin(optimizer)
        model.train()
        for epoch, batches in enumerate(self.epochs_of_batches()):
            before_epoch(epoch)
            for x, y in batches:
                loss = self.loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                rates.step()


class Digits:
    """scikit-learn's digits: 1078 images to train, 719 to test; the score is the percentage read right."""

    dense_epochs, tuning_epochs = 40, 20
    sparsities = (0.8, 0.9, 0.95, 0.98)
    sparsities_from_scratch = (0.95, 0.98)  # each takes three times as long
    batch = 64

    def __init__(self, network: Callable[[], nn.Module]) -> None:
        self.network = network
        self.data = load_digits()

    def recipe(self, epochs: int, seed: int) -> Recipe:
        images, labels = self.data.train_images, self.data.train_labels
        steps = len(images) // self.batch

        def draw(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
            order = torch.randperm(len(images), generator=generator)
            for chosen in order[: steps * self.batch].reshape(steps, self.batch):
                yield images[chosen], labels[chosen]

        sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        return Recipe(epochs, steps, seed, 0.1, images[:2], draw, sgd)

    @torch.no_grad()
    def scores(self, model: nn.Module) -> list[float]:
        """100 for each test image read right, 0 for each read wrong."""
        model.eval()
        right = model(self.data.test_images).argmax(1) == self.data.test_labels
        return (100.0 * right).tolist()


@functools.cache
def text() -> str:
    """The language reference that Python carries for ``help()``, 0.4 million characters, each paragraph once."""
    from pydoc_data.topics import topics

    paragraphs = dict.fromkeys(part for name in sorted(topics) for part in topics[name].split("\n\n"))
    return "\n\n".join(paragraphs)


class Text:
    """The next character of Python's language reference; the last tenth is held out; the score is bits a character."""

    dense_epochs, tuning_epochs = 40, 12  # of 25 steps
    sparsities = (0.5, 0.8, 0.9)
    sparsities_from_scratch = ()
    batch, length, steps = 12, 64, 25

    def __init__(self) -> None:
        characters = sorted(set(text()))
        codes = torch.tensor([characters.index(c) for c in text()])
        split = len(codes) * 9 // 10
        self.train, self.test = codes[:split], codes[split:]
        self.network = functools.partial(GPT, len(characters), self.length, width=96, layers=3)

    def recipe(self, epochs: int, seed: int) -> Recipe:
        def draw(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range(self.steps):
                starts = torch.randint(len(self.train) - self.length, (self.batch, 1), generator=generator)
                window = self.train[starts + torch.arange(self.length + 1)]
                yield window[:, :-1], window[:, 1:]

        adamw = functools.partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        example = self.train[: self.length].reshape(1, -1)
        return Recipe(epochs, self.steps, seed, 3e-3, example, draw, adamw)

    @torch.no_grad()
    def scores(self, model: nn.Module) -> list[float]:
        """Bits a character in each window of the held-out text."""
        model.eval()
        windows = self.test[: (len(self.test) - 1) // self.length * self.length]
        x, y = windows.reshape(-1, self.length), self.test[1 : len(windows) + 1].reshape(-1, self.length)
        losses = functional.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
        return (losses.mean(1) / math.log(2)).tolist()


@functools.cache
def task(name: str) -> Digits | Text:
    return {"MLP": lambda: Digits(MLP), "ResNet-8": lambda: Digits(ResNet8), "GPT": Text}[name]()


def initial(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return task(name).network()


# --------------------------------------------------------------------------------------------------------------------
# The methods: (model, sparsity, recipe) -> trained model
# --------------------------------------------------------------------------------------------------------------------


def dense(model: nn.Module, _sparsity: float, recipe: Recipe) -> nn.Module:
    recipe.fit(model)
    return model


def default_recipe(model: nn.Module, sparsity: float, recipe: Recipe) -> nn.Module:
    """Nothing said but the sparsity and the length of the run."""
    recipe.fit(
        model,
        begin=lambda optimizer: Pruner(model, optimizer, sparsity, total_steps=recipe.total_steps, verbose=False),
    )
    return model


def gradual_magnitude(model: nn.Module, sparsity: float, recipe: Recipe) -> nn.Module:
    recipe.fit(
        model,
        begin=lambda optimizer: Pruner(
            model, optimizer, sparsity, criterion=criteria.magnitude, total_steps=recipe.total_steps, verbose=False
        ),
    )
    return model


def one_shot_lamp(model: nn.Module, sparsity: float, recipe: Recipe) -> nn.Module:
    recipe.fit(model, begin=lambda optimizer: Pruner(model, optimizer, schedules.constant(sparsity), verbose=False))
    return model


def by_torch(method: str, model: nn.Module, sparsity: float, recipe: Recipe) -> nn.Module:
    from torch.nn.utils import prune

    weights = [(module, "weight") for module in model.modules() if isinstance(module, peers.LAYERS)]
    count = round(sparsity * sum(module.weight.numel() for module, _ in weights))
    prune.global_unstructured(weights, getattr(prune, method), amount=count)  # type: ignore[no-untyped-call]
    recipe.fit(model)
    for module, name in weights:
        prune.remove(module, name)  # type: ignore[no-untyped-call]
    return model


def synflow(model: nn.Module, sparsity: float, recipe: Recipe, rounds: int = 100) -> nn.Module:
    """Pruned before the first step, in a hundred rounds."""
    schedule = schedules.exponential(sparsity, end=rounds)
    masks: State | None = None
    for step in range(1, rounds + 1):
        evidence = collect(model, [recipe.example], criteria.synflow)
        masks = sparsify(model, schedule(step), criterion=criteria.synflow, evidence=evidence, within=masks)
    recipe.fit(
        model,
        begin=lambda optimizer: Pruner(model, optimizer, schedules.constant(sparsity), within=masks, verbose=False),
    )
    apply_(model, masks or {})
    return model


def rigl(model: nn.Module, sparsity: float, recipe: Recipe) -> nn.Module:
    """A random mask in the proportions of ERK, then drop and grow up to three quarters of the run."""
    recipe.fit(
        model,
        begin=lambda optimizer: Pruner(
            model,
            optimizer,
            schedules.constant(sparsity),
            criterion=criteria.random,
            allocate=secateur.allocation.erk,
            regrow=regrowth.rigl(),
            total_steps=recipe.total_steps,
            seed=3000 + recipe.seed,  # not the one that drew the first weights: the mask would follow their size
            verbose=False,
        ),
    )
    return model


OURS = "Pruner, default recipe"
TUNING: dict[str, Callable[[nn.Module, float, Recipe], nn.Module]] = {  # from the dense weights
    "torch.nn.utils.prune, random": functools.partial(by_torch, "RandomUnstructured"),
    "torch.nn.utils.prune, magnitude": functools.partial(by_torch, "L1Unstructured"),
    **peers.PEERS,
    "Pruner, one-shot LAMP": one_shot_lamp,
    OURS: default_recipe,
}
SCRATCH: dict[str, Callable[[nn.Module, float, Recipe], nn.Module]] = {  # as many epochs as dense and tuning together
    "Pruner, cubic from scratch": default_recipe,
    "SynFlow from the start": synflow,
    "RigL": rigl,
}
BY_MAGNITUDE = "Pruner, default recipe by magnitude"
TEXT = {  # the methods for the text, from the dense weights
    **{method: TUNING[method] for method in ("torch.nn.utils.prune, magnitude", "Pruner, one-shot LAMP", OURS)},
    BY_MAGNITUDE: gradual_magnitude,
}
DENSE = "dense"


# --------------------------------------------------------------------------------------------------------------------
# Trainings, several at a time
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    task: str
    method: str
    sparsity: float
    seed: int
    epochs: int
    scratch: bool
    state: State | None = field(default=None, repr=False)  # to start from


@dataclass
class Outcome:
    task: str
    method: str
    sparsity: float
    seed: int
    scratch: bool
    measured: float = math.nan  # sparsity
    scores: list[float] = field(default_factory=list, repr=False)  # of each test image, or window of text
    error: str = ""
    state: State | None = field(default=None, repr=False)

    @property
    def score(self) -> float:
        return statistics.fmean(self.scores) if self.scores else math.nan


def zeros(model: nn.Module) -> float:
    weights = [module.weight for module in model.modules() if isinstance(module, peers.LAYERS)]
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def work(job: Job) -> Outcome:
    torch.set_num_threads(1)
    model = initial(job.task, job.seed)
    if job.state is not None:
        model.load_state_dict(job.state)
    recipe = task(job.task).recipe(job.epochs, job.seed if job.scratch else 1000 + job.seed)
    outcome = Outcome(job.task, job.method, job.sparsity, job.seed, job.scratch)
    torch.manual_seed(2000 + job.seed)  # random masks come from the global generator
    try:
        trained = ({DENSE: dense} | TEXT | TUNING | SCRATCH)[job.method](model, job.sparsity, recipe)
    except Exception as error:  # a peer that fails is reported as failing, and the others go on
        if job.method not in peers.PEERS:
            raise
        outcome.error = f"{type(error).__name__}: {error}".splitlines()[0]
        return outcome
    outcome.measured, outcome.scores = zeros(trained), task(job.task).scores(trained)
    if job.method == DENSE and job.scratch:
        outcome.state = trained.state_dict()
    return outcome


def run(jobs: Sequence[Job], processes: int, told: str) -> list[Outcome]:
    outcomes = []
    started = time.perf_counter()

    def note() -> None:
        end = "" if sys.stderr.isatty() else "\n"
        print(f"\r{told}: {len(outcomes)} of {len(jobs)}", end=end, file=sys.stderr, flush=True)

    if processes == 1:
        for job in jobs:
            outcomes.append(work(job))
            note()
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            for outcome in pool.imap_unordered(work, jobs):
                outcomes.append(outcome)
                note()
    print(f"{told}: {len(jobs)} trainings, {time.perf_counter() - started:.0f} s")
    return outcomes


def train_all(
    tasks: Sequence[str], tuning: Sequence[str], scratch: Sequence[str], options: argparse.Namespace
) -> list[Outcome]:
    """The dense networks, then every method at every sparsity from them (or from the same initial weights)."""
    before = {name: (2, 2) if options.smoke else (task(name).dense_epochs, task(name).tuning_epochs) for name in tasks}
    seeds = range(1 if options.smoke else options.seeds)
    first = run(
        [Job(name, DENSE, 0.0, seed, before[name][0], True) for name in tasks for seed in seeds],
        options.processes,
        "dense",
    )
    states = {(outcome.task, outcome.seed): outcome.state for outcome in first}
    jobs = []
    for name in tasks:
        dense_epochs, tuning_epochs = before[name]
        for sparsity in (0.9,) if options.smoke else task(name).sparsities:
            for seed in seeds:
                start = states[name, seed]
                jobs += [Job(name, method, sparsity, seed, tuning_epochs, False, start) for method in tuning]
                if sparsity in task(name).sparsities_from_scratch or options.smoke:
                    jobs += [Job(name, m, sparsity, seed, dense_epochs + tuning_epochs, True) for m in scratch]
        for seed in seeds:
            jobs.append(Job(name, DENSE, 0.0, seed, tuning_epochs, False, states[name, seed]))
    jobs.sort(key=lambda job: (-job.epochs, job.task == "MLP"))  # the longest first
    return first + run(jobs, options.processes, "pruned")


# --------------------------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------------------------


def pick(outcomes: Iterable[Outcome], **wanted: object) -> list[Outcome]:
    return [each for each in outcomes if all(getattr(each, key) == value for key, value in wanted.items())]


def cell(found: Sequence[Outcome], digits: int) -> str:
    if not found:
        return "–"
    if any(each.error for each in found):
        return "fails"
    mean = f"{statistics.fmean(each.score for each in found):.{digits}f}"
    return mean if len(found) == 1 else f"{mean} ± {statistics.stdev(each.score for each in found):.{digits}f}"


def table(outcomes: Sequence[Outcome], name: str, methods: Sequence[str], digits: int) -> None:
    sparsities = sorted({each.sparsity for each in outcomes if each.sparsity})
    before, after = (pick(outcomes, task=name, method=DENSE, scratch=scratch) for scratch in (True, False))
    print(f"\n{name}: dense {cell(before, digits)}, fine-tuned as long {cell(after, digits)}\n")
    print("| method | " + " | ".join(f"{100 * sparsity:g} %" for sparsity in sparsities) + " | off by at most |")
    print("|---" * (len(sparsities) + 2) + "|")
    for method in methods:
        mine = pick(outcomes, task=name, method=method)
        rows = [cell(pick(mine, sparsity=sparsity), digits) for sparsity in sparsities]
        wrong = max((abs(each.measured - each.sparsity) for each in mine), default=math.nan)
        print(f"| {method} | " + " | ".join(rows) + f" | {100 * wrong:.3f} % |")
    for message in sorted({f"{each.method} fails: {each.error}" for each in outcomes if each.error}):
        print(message)


def error_bar(percent: float, count: int) -> float:
    """One standard error of a percentage of ``count`` test images, which more seeds do not make smaller."""
    share = min(max(percent / 100, 0.5 / count), 1 - 0.5 / count)
    return 100 * math.sqrt(share * (1 - share) / count)


def paired(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> tuple[float, float]:
    """The mean difference over all seeds and its standard error over the test images, each compared with itself."""
    per_image = [
        statistics.fmean(column)
        for column in zip(
            *(
                [a - b for a, b in zip(one.scores, other.scores, strict=True)]
                for one, other in zip(ours, theirs, strict=True)
            ),
            strict=True,
        )
    ]
    return statistics.fmean(per_image), statistics.stdev(per_image) / math.sqrt(len(per_image))


def compare(outcomes: Sequence[Outcome], name: str, ours: str, others: Sequence[str]) -> list[dict[str, Any]]:
    """Ours minus each other, with a verdict by the error bar of our percentage."""
    rows = []
    for sparsity in sorted({each.sparsity for each in outcomes if each.sparsity}):
        mine = sorted(pick(outcomes, task=name, method=ours, sparsity=sparsity), key=lambda each: each.seed)
        for method in others:
            wanted = {"method": DENSE, "scratch": True} if method == DENSE else {"method": method, "sparsity": sparsity}
            theirs = sorted(pick(outcomes, task=name, **wanted), key=lambda each: each.seed)
            if not mine or not theirs or any(each.error for each in theirs):
                continue
            difference, error = paired(mine, theirs)
            bar = error_bar(statistics.fmean(each.score for each in mine), len(mine[0].scores))
            verdict = "tie" if abs(difference) <= bar else "better" if difference > 0 else "WORSE"
            rows.append(
                {"task": name, "sparsity": sparsity, "ours": ours, "other": method, "difference": difference,
                 "paired error": error, "bar": bar, "verdict": verdict}
            )  # fmt: skip
    return rows


def print_comparisons(rows: Sequence[dict[str, Any]]) -> None:
    print("\n| network | ours − other | difference in points at each sparsity (error bar of one percentage) |")
    print("|---|---|---|")
    for name, ours, other in dict.fromkeys((row["task"], row["ours"], row["other"]) for row in rows):
        cells = [
            f"{100 * row['sparsity']:g} %: {row['difference']:+.2f} ({row['bar']:.2f}) {row['verdict']}"
            for row in rows
            if (row["task"], row["ours"], row["other"]) == (name, ours, other)
        ]
        print(f"| {name} | {ours} − {other} | {'; '.join(cells)} |")


def accuracy(options: argparse.Namespace) -> dict[str, Any]:
    absent = peers.missing()
    for peer, reason in absent.items():
        print(f"{peer} is left out: {reason}.")
    tuning = [method for method in TUNING if method not in absent]
    tasks = ["MLP"] if options.smoke else ["MLP", "ResNet-8"]
    outcomes = train_all(tasks, tuning, list(SCRATCH), options)
    rows = []
    for name in tasks:
        table(outcomes, name, [*tuning, *SCRATCH], 1)
        rows += compare(outcomes, name, OURS, [method for method in tuning if method != OURS])
        for method in SCRATCH:
            rows += compare(outcomes, name, method, [DENSE])
    print_comparisons(rows)
    return {"runs": [plain(each) for each in outcomes], "comparisons": rows, "missing": absent}


def batchnorm(options: argparse.Namespace) -> dict[str, Any]:
    """ResNet-8 right after global magnitude pruning, without any training: as it is, and re-estimated."""
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(1 if options.smoke else options.seeds):
        digits = task("ResNet-8")
        assert isinstance(digits, Digits)
        model = initial("ResNet-8", seed)
        recipe = digits.recipe(1 if options.smoke else digits.dense_epochs, seed)
        recipe.fit(model)
        batches = list(digits.data.train_images.split(digits.batch))
        for sparsity in (0.0, 0.5, 0.7, 0.8, 0.9):
            pruned = copy.deepcopy(model)
            sparsify(pruned, sparsity)
            row = found.setdefault(f"{sparsity:.0%}", {"as it is": [], "re-estimated": []})
            row["as it is"].append(statistics.mean(digits.scores(pruned)))
            secateur.pipeline.reestimate_batchnorm(pruned, batches)
            row["re-estimated"].append(statistics.mean(digits.scores(pruned)))
    print("| removed | as it is | re-estimated |\n|---|---|---|")
    for removed, row in found.items():
        spread = (f"{statistics.mean(each):.1f} ± {statistics.pstdev(each):.1f}" for each in row.values())
        print(f"| {removed} | {' | '.join(spread)} |")
    return found


def gpt(options: argparse.Namespace) -> dict[str, Any]:
    print(f"text: {len(text()):,} characters of pydoc_data.topics, Python {platform.python_version()}")
    outcomes = train_all(["GPT"], list(TEXT), [], options)
    table(outcomes, "GPT", list(TEXT), 3)
    return {"runs": [plain(each) for each in outcomes]}


def plain(outcome: Outcome) -> dict[str, Any]:
    kept = asdict(outcome)
    del kept["state"], kept["scores"]
    return kept | {"score": outcome.score}


# --------------------------------------------------------------------------------------------------------------------
# What a step and a checkpoint cost
# --------------------------------------------------------------------------------------------------------------------


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
    """In each round every case has its turn, in a rotating order; what is slow for a moment is slow for one median."""
    for step in steps.values():
        for _ in range(2 if repeats else 20):
            step()
    if not repeats:
        start = time.perf_counter()
        for _ in range(10):
            steps["dense"]()
        repeats = max(3, min(100, round(1.5 / (time.perf_counter() - start))))  # 0.15 seconds a turn
    ratios: dict[str, list[float]] = {case: [] for case in steps}
    dense_times = []
    for number in range(rounds):
        cases = list(steps)
        turn = number % len(cases)
        medians = {}
        for case in cases[turn:] + cases[:turn]:
            times = []
            for _ in range(max(3, repeats // 8) if case == UPDATES else repeats):
                start = time.perf_counter()
                steps[case]()
                times.append(time.perf_counter() - start)
            medians[case] = statistics.median(times)
        dense_times.append(medians["dense"])
        for case in cases:
            ratios[case].append(medians[case] / medians["dense"])
    return ratios, statistics.median(dense_times)


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "batchnorm", "overhead", "gpt"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="one seed, a few steps: to see that it runs")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="trainings at a time")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
    results = {"accuracy": accuracy, "batchnorm": batchnorm, "overhead": overhead, "gpt": gpt}[options.what](options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
