"""Runs summed up: means over seeds and their spread, intervals, the best of each sparsity.

Law: a score that is missing for some of the seeds has no mean over the others.
"""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from secateur.report.results import Results, Run

__all__ = ["Row", "best_rows", "interval_of", "missing_baselines", "summarize", "wilson"]


@dataclasses.dataclass(frozen=True)
class Row:
    """The runs of one method at one sparsity: means over seeds, and sample standard deviations (None with one seed).

    ``before_range`` and ``after_range`` are the smallest and the largest over the seeds.

    >>> from secateur.report import Run
    >>> [row] = summarize([Run("magnitude", 0.5, before=96.0), Run("magnitude", 0.5, before=98.0, seed=1)])
    >>> row.before, row.before_range, row.seeds
    (97.0, (96.0, 98.0), 2)
    """

    method: str
    sparsity: float
    overall: float | None
    seeds: int
    before: float | None
    before_sd: float | None
    before_range: tuple[float, float] | None
    after: float | None
    after_sd: float | None
    after_range: tuple[float, float] | None
    bytes: float | None
    zipped: float | None
    multiply_adds: float | None
    latency_ms: float | None
    batch_ms: float | None
    memory: float | None
    compressed: float | None


_MEANS = ["sparsity", "overall", "bytes", "zipped", "multiply_adds", "latency_ms", "batch_ms", "memory", "compressed"]


def summarize(runs: Iterable[Run]) -> list[Row]:
    """One `Row` for each method and sparsity (to a tenth of a percent), in the order of first appearance.

    ``latency_ms`` is the mean over the runs where it was measured; so are the sizes. ``before`` and ``after`` are None
    unless every run of the row has them, because a mean over some of the seeds would not compare.

    >>> [row] = summarize([Run("lamp", 0.9, before=40, seed=0), Run("lamp", 0.9, before=50, seed=1)])
    >>> row.before, round(row.before_sd, 2), row.before_range, row.after
    (45.0, 7.07, (40, 50), None)
    """
    groups: dict[tuple[str, float], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.method, round(run.sparsity, 3)].append(run)
    rows = []
    for (method, _), group in groups.items():
        found: dict[str, Any] = {name: _mean(getattr(run, name) for run in group) for name in _MEANS}
        for stage in ("before", "after"):
            values = _all_or_none(getattr(run, stage) for run in group)
            found |= {stage: statistics.fmean(values) if values else None, f"{stage}_sd": _sd(values)}
            found[f"{stage}_range"] = (min(values), max(values)) if values else None
        rows.append(Row(method=method, seeds=len({run.seed for run in group}), **found))
    return rows


def wilson(share: float, examples: int, *, z: float = 1.96) -> tuple[float, float]:
    """``(p + z²/2n ± z·√(p(1-p)/n + z²/4n²)) / (1 + z²/n)``: the interval of a share p of n examples (Wilson 1927).

    With z = 1.96, 95 of 100 such intervals hold the share that endlessly many examples would give. Unlike ``p ± z·σ``
    it never leaves [0, 1], and it does not shrink to nothing at 0 or 1. Both bounds are fractions.

    >>> [round(bound, 4) for bound in wilson(0.99, 719)]
    [0.9797, 0.9951]
    """
    if not 0 <= share <= 1 or examples < 1:
        raise ValueError(f"a share in [0, 1] of one example or more has an interval; got {share} of {examples}.")
    middle = share + z * z / (2 * examples)
    half = z * math.sqrt(share * (1 - share) / examples + z * z / (4 * examples * examples))
    scale = 1 + z * z / examples
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)


def interval_of(results: Results, mean: float | None) -> tuple[float, float] | None:
    """The 95 % `wilson` interval, in percent, of a row's ``before`` or ``after``.

    It belongs to the mean over seeds, for the number of examples of the test set: seeds share the examples and so add
    none. None where the metric is no percentage or the number of examples is not known.

    >>> results = Results("Mine", [Run("lamp", 0.9, before=50.0)], examples=100)
    >>> [round(bound, 1) for bound in interval_of(results, 50.0)]
    [40.4, 59.6]
    """
    if results.examples is None or results.unit != "%" or mean is None or not 0 <= mean <= 100:
        return None
    low, high = wilson(mean / 100, results.examples)
    return 100 * low, 100 * high


def missing_baselines(rows: Iterable[Row]) -> list[str]:
    """Which of the baselines, ``random`` and ``magnitude``, no pruning method is named after.

    >>> missing_baselines(summarize([Run("global magnitude", 0.9, before=40)]))
    ['random']
    """
    names = [row.method.casefold() for row in rows if row.sparsity]
    return [baseline for baseline in ("random", "magnitude") if not any(baseline in name for name in names)]


def _all_or_none(values: Iterable[float | None]) -> list[float]:
    values = list(values)
    measured = [value for value in values if value is not None]
    return measured if len(measured) == len(values) else []


def _sd(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _mean(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return statistics.fmean(measured) if measured else None


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows with the highest ``after`` among those of the same sparsity, to a percent."""
    groups = defaultdict(list)
    for row in rows:
        if row.after is not None and row.sparsity:
            groups[round(row.sparsity, 2)].append(row)
    return [max(group, key=lambda row: row.after or 0.0) for group in groups.values() if len(group) > 1]
