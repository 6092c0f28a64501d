"""What the solvers do to trained models, and how many tokens are enough.

Law: calibration and evaluation share no sentence, and a model is measured by its outputs, not by the solver's word.

Seconds are CPU seconds, of the solver and of the whole call, in which a Gram matrix is summed for every method; ± are
standard deviations over calibration seeds. All weights of a block are solved from one run, as in the papers' own code;
what stages add is in stages.py.
"""

from __future__ import annotations

import copy
import functools
import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from benchmarks.support.language_models import GPT, MiniLM
from benchmarks.support.tables import head, row, spread
from secateur import NM, Rows, Unstructured, criteria
from secateur.evidence import needs
from secateur.models import oneshot
from secateur.patterns import Pattern
from secateur.solvers import Solver, admm, alps, dsnot, from_criterion, sparsegpt, with_refit

magnitude, wanda, ria = (from_criterion(c) for c in (criteria.magnitude, criteria.wanda, criteria.ria))

METHODS: dict[str, Solver] = {
    "magnitude": magnitude,
    "wanda": wanda,
    "ria": ria,
    "dsnot": dsnot,
    "sparsegpt": sparsegpt,
    "wanda+cg": with_refit(wanda),
    "sparsegpt+cg": with_refit(sparsegpt),
    "alps": alps,
    "admm": admm,
}

PER_ROW = {"wanda", "dsnot", "wanda+cg"}  # as their papers compare weights

SETTINGS: dict[str, tuple[float | None, Pattern]] = {
    "50%": (0.5, Unstructured()),
    "60%": (0.6, Unstructured()),
    "70%": (0.7, Unstructured()),
    "2:4": (None, NM(2, 4)),
    "4:8": (None, NM(4, 8)),
}


@dataclass(frozen=True)
class Run:
    """What one method made of a model: mean relative error of its layers, the subject's measures, CPU seconds."""

    setting: str
    method: str
    seed: int
    error: float
    measures: tuple[float, ...]
    solver: float
    whole: float


def timed(solver: Solver, seconds: list[float]) -> Solver:
    """The solver, which notes its CPU seconds and asks for the Gram matrix, needed or not: with it the walk measures a
    layer's error over all tokens, and without it over the first ones, which here are those of the shortest sentences.
    """
    asked = needs(solver)

    @functools.wraps(solver)
    def solve(weight: Tensor, sparsity: float | None, pattern: Pattern, /, **evidence: Tensor) -> tuple[Tensor, Tensor]:
        started = time.process_time()
        found = solver(weight, sparsity, pattern, **{word: evidence[word] for word in asked})
        seconds.append(time.process_time() - started)
        return found

    words = dict.fromkeys([*asked, "gram"])
    asking = [inspect.Parameter(word, inspect.Parameter.KEYWORD_ONLY) for word in words]
    solve.__signature__ = inspect.Signature(asking)  # type: ignore[attr-defined]
    return solve


def prune(subject: MiniLM | GPT, setting: str, method: str, seed: int, batches: list[dict[str, Tensor]]) -> Run:
    """A copy of the subject's model pruned block by block, and measured."""
    sparsity, pattern = SETTINGS[setting]
    if method in PER_ROW and isinstance(pattern, Unstructured):
        pattern = Rows()
    model, seconds = copy.deepcopy(subject.model), list[float]()
    started = time.process_time()
    done = oneshot(model, batches, sparsity, solver=timed(METHODS[method], seconds), pattern=pattern, stages=False)
    whole = time.process_time() - started
    return Run(setting, method, seed, done.error, subject.measure(model), sum(seconds), whole)


def quality(subject: MiniLM | GPT, settings: list[str], methods: list[str], seeds: int) -> dict[str, Any]:
    """Each method at each setting: a line a run, methods in turn, and after each seed the tables of all so far."""
    dense = subject.measure(subject.model)
    print("dense: " + ", ".join(f"{name} {value:.4f}" for name, value in zip(subject.columns, dense, strict=True)))
    print(f"{'seed':4} {'setting':8} {'method':13} {'layer error':>12} " + " ".join(f"{n:>14}" for n in subject.columns)
          + f" {'solver s':>9} {'whole s':>8}", flush=True)  # fmt: skip
    runs = []
    for seed in range(seeds):
        for setting in settings:
            for method in methods:
                run = prune(subject, setting, method, seed, subject.batches(seed))
                runs.append(run)
                shown = " ".join(f"{value:14.4f}" for value in run.measures)
                print(f"{seed:4} {setting:8} {method:13} {run.error:12.5f} {shown} {run.solver:9.2f} {run.whole:8.1f}",
                      flush=True)  # fmt: skip
        print(f"\nafter {seed + 1} of {seeds} seeds:\n")
        print(tables(subject.columns, dense, runs))
        print(goals(runs, higher_is_better=subject.higher_is_better), flush=True)
    return {"dense": dense, "columns": subject.columns, "runs": [asdict(run) for run in runs]}


def tables(columns: tuple[str, ...], dense: tuple[float, ...], runs: list[Run]) -> str:
    """Markdown, a table a quantity, methods down and settings across: means over seeds, ± their standard deviations."""
    settings = list(dict.fromkeys(run.setting for run in runs))
    found = {setting: _of(runs, setting) for setting in settings}
    methods = list(dict.fromkeys(run.method for run in runs))
    quantities: list[tuple[str, str, Callable[[list[Run]], str]]] = [
        ("layer error", "0", lambda runs: spread([run.error for run in runs])),
        *(
            (name, f"{dense[at]:.4f}", lambda runs, at=at: spread([run.measures[at] for run in runs]))
            for at, name in enumerate(columns)
        ),
        ("CPU s: solver, whole", "", lambda runs: f"{_mean(runs, 'solver'):.1f}, {_mean(runs, 'whole'):.1f}"),
    ]
    lines = []
    for name, without, cell in quantities:
        lines.append(head([name, *settings]))
        if without:
            lines.append(row(["dense", *[without] * len(settings)]))
        for method in methods:
            cells = [cell(found[setting][method]) if method in found[setting] else "" for setting in settings]
            lines.append(row([method, *cells]))
        lines.append("")
    return "\n".join(lines)


def goals(runs: list[Run], *, higher_is_better: bool) -> str:
    """Markdown: what was aimed at, setting by setting. Ratios are medians over seeds of runs with the same batches.

    ``admm`` ties with a method of a better mean where the seeds do not agree, and is behind where they do.
    """
    columns = "outcome", "error, of ALPS's", "solver s, of ALPS's", "whole s, of SparseGPT's", "papers' order"
    lines = [head(["admm", *columns])]
    for setting in dict.fromkeys(run.setting for run in runs):
        found = _of(runs, setting)
        if "admm" not in found:
            continue
        cells = [
            _standing(found, higher_is_better),
            _ratio(found, "alps", lambda run: run.error, 1.0),
            _ratio(found, "alps", lambda run: run.solver, 1 / 3),
            _ratio(found, "sparsegpt", lambda run: run.whole, 1.4),
        ]
        order = [method for method in ("magnitude", "wanda", "sparsegpt") if method in found]
        outcomes = [statistics.mean(run.measures[0] for run in found[method]) for method in order]
        appears = outcomes == sorted(outcomes, reverse=not higher_is_better)
        cells.append("" if len(order) < 3 else "appears" if appears else "does not appear")
        lines.append(row([setting, *cells]))
    return "\n".join(lines) + "\n"


def _standing(found: dict[str, list[Run]], higher_is_better: bool) -> str:
    """Of ``admm`` among the methods, by the first measure."""
    sign = 1 if higher_is_better else -1
    ahead = {
        method: [sign * (other.measures[0] - own.measures[0]) for own, other in zip(found["admm"], runs, strict=False)]
        for method, runs in found.items()
    }
    better = {method: differences for method, differences in ahead.items() if sum(differences) > 0}
    behind = [method for method, differences in better.items() if min(differences) > 0]
    if behind:
        return f"behind {', '.join(behind)}"
    return f"ties with {', '.join(better)}" if better else "leads"


def _ratio(found: dict[str, list[Run]], other: str, of: Callable[[Run], float], goal: float) -> str:
    if other not in found:
        return ""
    ratio = statistics.median(of(own) / of(their) for own, their in zip(found["admm"], found[other], strict=False))
    return f"{ratio:.3f}, {'met' if ratio <= goal else 'missed'}"


def _of(runs: list[Run], setting: str) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.setting == setting:
            found.setdefault(run.method, []).append(run)
    return found


def _mean(runs: list[Run], what: str) -> float:
    return statistics.mean(getattr(run, what) for run in runs)


def tokens(
    subject: MiniLM, seeds: int, every_samples: tuple[int, ...] = (8, 32, 128, 512, 2048)
) -> list[dict[str, Any]]:
    """The outcome against the number of calibration sentences, at 50 % with `admm`."""
    print(head(["sentences", "tokens", *subject.columns, "whole s"]))
    rows = []
    for samples in every_samples:
        every = [subject.batches(seed, samples) for seed in range(seeds)]
        counts = [sum(int(batch["attention_mask"].sum()) for batch in batches) for batches in every]
        runs = [prune(subject, "50%", "admm", seed, batches) for seed, batches in enumerate(every)]
        measures = [spread([run.measures[column] for run in runs]) for column in range(len(subject.columns))]
        print(
            row([str(samples), f"{statistics.mean(counts):.0f}", *measures, f"{_mean(runs, 'whole'):.1f}"]), flush=True
        )
        rows.append({"samples": samples, "tokens": counts, "runs": [asdict(run) for run in runs]})
    return rows
