"""Accuracy at equal budgets, of every method in turn, and what the differences are worth.

Each training is one thread of one process, as many at a time as there are cores, so that the figures do not depend on
their number.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.support import corpora
from benchmarks.support.tables import head, row, spread
from benchmarks.training import peers
from benchmarks.training.methods import DENSE, OURS, SCRATCH, TEXT, TUNING, dense
from benchmarks.training.tasks import Digits, State, initial, task
from secateur import sparsify
from secateur.pipeline import reestimate_batchnorm


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


def pick(outcomes: Iterable[Outcome], **wanted: object) -> list[Outcome]:
    return [each for each in outcomes if all(getattr(each, key) == value for key, value in wanted.items())]


def cell(found: Sequence[Outcome], digits: int) -> str:
    if not found:
        return "–"
    if any(each.error for each in found):
        return "fails"
    return spread([each.score for each in found], digits)


def table(outcomes: Sequence[Outcome], name: str, methods: Sequence[str], digits: int) -> None:
    sparsities = sorted({each.sparsity for each in outcomes if each.sparsity})
    before, after = (pick(outcomes, task=name, method=DENSE, scratch=scratch) for scratch in (True, False))
    print(f"\n{name}: dense {cell(before, digits)}, fine-tuned as long {cell(after, digits)}\n")
    print(head(["method", *(f"{100 * sparsity:g} %" for sparsity in sparsities), "off by at most"]))
    for method in methods:
        mine = pick(outcomes, task=name, method=method)
        cells = [cell(pick(mine, sparsity=sparsity), digits) for sparsity in sparsities]
        wrong = max((abs(each.measured - each.sparsity) for each in mine), default=math.nan)
        print(row([method, *cells, f"{100 * wrong:.3f} %"]))
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
    columns = ["network", "ours − other", "difference in points at each sparsity (error bar of one percentage)"]
    print(f"\n{head(columns)}")
    for name, ours, other in dict.fromkeys((each["task"], each["ours"], each["other"]) for each in rows):
        cells = [
            f"{100 * each['sparsity']:g} %: {each['difference']:+.2f} ({each['bar']:.2f}) {each['verdict']}"
            for each in rows
            if (each["task"], each["ours"], each["other"]) == (name, ours, other)
        ]
        print(row([name, f"{ours} − {other}", "; ".join(cells)]))


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
            scores = found.setdefault(f"{sparsity:.0%}", {"as it is": [], "re-estimated": []})
            scores["as it is"].append(statistics.mean(digits.scores(pruned)))
            reestimate_batchnorm(pruned, batches)
            scores["re-estimated"].append(statistics.mean(digits.scores(pruned)))
    print(head(["removed", "as it is", "re-estimated"]))
    for removed, scores in found.items():
        print(row([removed, *(spread(each, 1, statistics.pstdev) for each in scores.values())]))
    return found


def gpt(options: argparse.Namespace) -> dict[str, Any]:
    count = len(corpora.language_reference())
    print(f"text: {count:,} characters of pydoc_data.topics, Python {platform.python_version()}")
    outcomes = train_all(["GPT"], list(TEXT), [], options)
    table(outcomes, "GPT", list(TEXT), 3)
    return {"runs": [plain(each) for each in outcomes]}


def plain(outcome: Outcome) -> dict[str, Any]:
    kept = asdict(outcome)
    del kept["state"], kept["scores"]
    return kept | {"score": outcome.score}
