"""Results over methods, sparsities and seeds: what was measured, summed up and shown. `secateur demo` has them, and an
experiment of yours may.

Law: a result states what was measured and nothing else; what was not is None, and a column of nothing is left out.
"""

import dataclasses
import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from secateur.report.measured import environment
from secateur.report.page import Reported
from secateur.support import Chart, Column, Fields, Part, Table, write_whole


@dataclasses.dataclass(frozen=True)
class Run:
    """One network, pruned once and measured.

    ``sparsity`` is the measured fraction removed of the weights that may be pruned, in [0, 1); 0 is the dense network.
    ``overall`` is the fraction removed of all parameters. ``before`` and ``after`` are the metric (percent accuracy,
    unless `Results` says otherwise) before and after fine-tuning; a method that prunes while it trains has no
    ``before``. ``bytes`` is the size of the saved file, ``zipped`` the size of the same file after zip compression,
    ``latency_ms`` the time of one forward pass in milliseconds, ``multiply_adds`` what that pass has to multiply: see
    `count_multiply_adds`. ``None`` means "not measured". Runs of one ``method`` and
    ``sparsity`` with different ``seed`` give the spread.

    >>> Run("magnitude", sparsity=0.9, seed=0, before=61.6, after=98.1).after
    98.1
    """

    method: str
    sparsity: float
    before: float | None
    after: float | None = None
    seed: int = 0
    bytes: int | None = None
    zipped: int | None = None
    latency_ms: float | None = None
    overall: float | None = None
    multiply_adds: int | None = None

    def __post_init__(self) -> None:
        where = f"run of {self.method!r} with seed {self.seed}"
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"{where}: sparsity is a fraction in [0, 1), not {self.sparsity}; 90 % is written 0.9.")
        if self.before is None and self.after is None:
            raise ValueError(f"{where}: neither before nor after was measured; a run shows one of them at least.")
        if self.overall is not None and not 0 <= self.overall < 1:
            raise ValueError(f"{where}: overall is a fraction in [0, 1), not {self.overall}; 90 % is written 0.9.")
        for name in ("before", "after", "latency_ms"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(
                    f"{where}: {name} is {value}; give a finite number, or None where nothing was measured."
                )
        for name in ("bytes", "zipped", "latency_ms", "multiply_adds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{where}: {name} is {value}; give a number above 0, or None if it was not measured.")


@dataclasses.dataclass(frozen=True)
class Results(Reported):
    """Runs of several methods, as tables and charts; ``.report(path)`` writes them as a page.

    ``text`` is what to read first and ``notes`` how it was measured, one paragraph an element. ``metric`` names what
    ``before`` and ``after`` are, ``unit`` its unit. ``command`` is the command line that makes these results again;
    ``versions`` is what it ran on, by default `environment`. ``examples`` is the number of test examples, which gives a
    percentage its `wilson` interval.

    >>> print(Results("Mine", [Run("dense", 0.0, before=98.0), Run("magnitude", 0.9, before=61.6)]))
    Method     Removed  Accuracy
    dense           0%      98.0
    magnitude    90.0%      61.6
    <BLANKLINE>
    No method is named random, a baseline against which to judge the others.
    """

    title: str
    runs: Sequence[Run]
    text: Sequence[str] = ()
    notes: Sequence[str] = ()
    metric: str = "accuracy"
    unit: str = "%"
    command: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=environment)
    examples: int | None = None

    def __post_init__(self) -> None:
        for name in ("text", "notes"):
            if isinstance(value := getattr(self, name), str):
                raise TypeError(f"{name} is a sequence of paragraphs; write [{value[:30]!r}] for a single one.")
        for name in ("text", "notes", "runs"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.runs:
            raise ValueError(f"results {self.title!r} hold no runs; a report needs one at least.")
        if self.examples is not None and self.examples < 1:
            raise ValueError(f"results {self.title!r}: examples is {self.examples}; leave it out if it is not known.")

    def content(self) -> Iterator[Part]:
        """All of it, and how it was measured."""
        yield from self.summary()
        if self.notes:
            yield ""
            yield from self.notes

    def summary(self) -> Iterator[Part]:
        """What to read first, and the table of methods and sparsities."""
        for paragraph in self.text:
            yield paragraph
            yield ""
        rows = summarize(self.runs)
        yield self._drawn(self._table(rows), rows)
        if missing := missing_baselines(rows):
            yield ""
            yield f"No method is named {' or '.join(missing)}, a baseline against which to judge the others."

    def _table(self, rows: Sequence["Row"]) -> Table:
        columns = [
            Column.name("Method", lambda row: row.method),
            Column.portion("Removed", lambda row: row.sparsity, bar=False),
            *self._metrics(rows),
            Column("95 % interval", self._interval, _between, "right", "interval", number=lambda pair: pair[0]),
            Column.portion("Of all parameters", lambda row: row.overall, bar=False, key="overall"),
            Column.bytes("File", _rounded("bytes"), key="bytes"),
            Column.bytes("Zipped", _rounded("zipped"), key="zipped"),
            Column.count("Multiply-adds", _rounded("multiply_adds")),
            Column.figure("Latency, ms", lambda row: row.latency_ms, ".2f", key="latency_ms"),
        ]
        return Table.of("runs", rows, *columns, title="All methods and sparsities").filled()

    def _metrics(self, rows: Sequence["Row"]) -> Iterator[Column]:
        tuned = any(row.after is not None for row in rows)
        for stage in ("before", "after") if tuned else ("before",):
            yield self._metric(stage, f"{stage.capitalize()} tuning" if tuned else self.metric.capitalize())

    def _metric(self, stage: str, head: str) -> Column:
        """The mean over seeds and their spread."""

        def of(row: Any) -> tuple[float, float | None] | None:
            mean = getattr(row, stage)
            return None if mean is None else (mean, getattr(row, f"{stage}_sd"))

        return Column(head, of, _with_spread, "right", stage, "–", number=lambda pair: pair[0])

    def _interval(self, row: "Row") -> tuple[float, float] | None:
        """The 95 % `wilson` interval, in percent, of the mean over seeds: seeds share the examples, and add none."""
        mean = row.before if row.after is None else row.after
        if self.examples is None or self.unit != "%" or mean is None or not 0 <= mean <= 100:
            return None
        low, high = wilson(mean / 100, self.examples)
        return 100 * low, 100 * high

    def _drawn(self, table: Table, rows: Sequence["Row"]) -> Table:
        """With the metric by what is left, and by multiply-adds."""
        stage = "after" if any(row.after is not None for row in rows) else "before"
        when = " after tuning" if stage == "after" else ""
        unit = f"{self.metric} ({self.unit})" if self.unit else self.metric
        for title, along, places in (
            ("sparsity", "weights removed (%)", [100 * row.sparsity for row in rows]),
            ("work", "multiply-adds", [row.multiply_adds for row in rows]),
        ):
            measured = zip(rows, places, strict=True)
            place = {row: at for row, at in measured if at is not None and getattr(row, stage) is not None}
            if len({*place.values()}) > 1:
                chart = Chart(
                    f"{self.metric.capitalize()} against {title}",
                    f"{self.metric.capitalize()}{when}, means over seeds.",
                    [row.method for row in place],
                    [getattr(row, stage) for row in place],
                    unit,
                    series=[row.method for row in place],
                    places=[*place.values()],
                    along=along,
                    from_zero=False,
                )
                table = dataclasses.replace(table, charts=[*table.charts, chart])
        return table


def _rounded(key: str) -> Any:
    def of(row: Any) -> int | None:
        mean = getattr(row, key)
        return None if mean is None else round(mean)

    return of


def _between(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.1f} – {pair[1]:.1f}"


def _with_spread(pair: tuple[float, float | None]) -> str:
    mean, sd = pair
    return f"{mean:.1f}" if sd is None else f"{mean:.1f} ± {sd:.1f}"


def save_results(results: Results, path: str | os.PathLike[str]) -> None:
    """Write the results as JSON, to a temporary name first. `load_results` reads them back.

    >>> import tempfile
    >>> results = Results("mine", [Run("magnitude", 0.5, before=97.0)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_results(results, Path(folder, "results.json"))
    ...     load_results(Path(folder, "results.json")) == results
    True
    """
    write_whole(path, json.dumps(dataclasses.asdict(results), indent=1, allow_nan=False) + "\n")


def load_results(path: str | os.PathLike[str]) -> Results:
    """The `Results` that `save_results` wrote; ``ValueError`` where the file holds anything else.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_results(Results("mine", [Run("magnitude", 0.5, before=97.0)]), Path(folder, "results.json"))
    ...     load_results(Path(folder, "results.json")).runs[0].before
    97.0
    """
    path = Path(path)
    read = Fields.read(path, hint=f" {path.name} does not hold the results of a report.")
    return _made(
        Results, read, {**read.values, "runs": [_made(Run, each, each.values) for each in read.inners("runs")]}
    )


T = TypeVar("T")


def _made(kind: type[T], read: Fields, values: Mapping[str, Any]) -> T:
    """A dataclass of the fields of a record."""
    try:
        return kind(**values)
    except (TypeError, ValueError, AttributeError) as error:
        raise read.wrong("", f"cannot be: {str(error).rstrip('.')}") from None


# ---- Runs summed up: means over seeds and their spread, intervals.
#
# Law: a score that is missing for some of the seeds has no mean over the others.


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


_MEANS = ["sparsity", "overall", "bytes", "zipped", "multiply_adds", "latency_ms"]


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
