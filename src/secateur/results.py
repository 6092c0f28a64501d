"""What was measured: runs of methods at sparsities, layers, weights; plain values that travel as JSON.

Law: a result states what was measured and nothing else; what was not is None.
"""

import dataclasses
import json
import math
import os
import platform
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from secateur.files import write_whole
from secateur.version import __version__

__all__ = [
    "Column",
    "Layer",
    "Network",
    "Results",
    "Row",
    "Run",
    "best_rows",
    "columns_of",
    "describe",
    "environment",
    "load_results",
    "print_summary",
    "save_results",
    "summarize",
]


@dataclasses.dataclass(frozen=True)
class Run:
    """One network, pruned once and measured.

    ``sparsity`` is the measured fraction of weights removed, in [0, 1); 0 is the dense network. ``before`` and
    ``after`` are the metric (percent accuracy, unless `Results` says otherwise) before and after fine-tuning.
    ``bytes`` is the size of the saved file, ``zipped`` the size of the same file after zip compression, ``latency_ms``
    the time of one forward pass in milliseconds. ``None`` means "not measured". Runs of one ``method`` and
    ``sparsity`` with different ``seed`` give the spread.

    >>> Run("magnitude", sparsity=0.9, seed=0, before=61.6, after=98.1).after
    98.1
    """

    method: str
    sparsity: float
    before: float
    after: float | None = None
    seed: int = 0
    bytes: int | None = None
    zipped: int | None = None
    latency_ms: float | None = None

    def __post_init__(self) -> None:
        where = f"run of {self.method!r} with seed {self.seed}"
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"{where}: sparsity is a fraction in [0, 1), not {self.sparsity}; 90 % is written 0.9.")
        for name in ("before", "after", "latency_ms"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(
                    f"{where}: {name} is {value}; give a finite number, or None where nothing was measured."
                )
        for name in ("bytes", "zipped", "latency_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{where}: {name} is {value}; give a number above 0, or None if it was not measured.")


@dataclasses.dataclass(frozen=True)
class Layer:
    """One weight: its ``name``, its ``shape`` and how many of its elements were ``kept``.

    >>> layer = Layer("head.weight", shape=(10, 32), kept=80)
    >>> layer.weights, layer.sparsity
    (320, 0.75)
    """

    name: str
    shape: tuple[int, ...]
    kept: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # JSON gives lists
        if not 0 <= self.kept <= self.weights:
            raise ValueError(
                f"{self.name} has {self.weights} weights of shape {self.shape}; {self.kept} cannot be kept."
            )

    @property
    def weights(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def sparsity(self) -> float:
        """The fraction removed; 0 for an empty weight."""
        return 1 - self.kept / self.weights if self.weights else 0.0


@dataclasses.dataclass(frozen=True)
class Network:
    """One pruned network in detail: its layers, and a histogram of the weights kept and removed.

    ``edges`` has one element more than ``kept`` and ``removed``, which count the weights between two edges. Made by
    `describe`. ``method`` is the `Run.method` that it is an example of, if any: it then has the colour of that method.
    """

    title: str
    layers: tuple[Layer, ...]
    edges: tuple[float, ...]
    kept: tuple[int, ...]
    removed: tuple[int, ...]
    method: str = ""

    def __post_init__(self) -> None:
        layers = tuple(one if isinstance(one, Layer) else Layer(**one) for one in self.layers)
        object.__setattr__(self, "layers", layers)
        for name in ("edges", "kept", "removed"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not len(self.edges) == len(self.kept) + 1 == len(self.removed) + 1:
            raise ValueError(
                f"{self.title!r}: n counts need n + 1 edges; there are {len(self.edges)} edges, "
                f"{len(self.kept)} counts of kept and {len(self.removed)} of removed weights."
            )


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything that a report shows. All but ``title`` and ``runs`` may be left out.

    ``text`` is what to read first and ``notes`` how it was measured, one paragraph an element. ``metric`` names what
    ``before`` and ``after`` are, ``unit`` its unit. ``command`` is the command line that makes these results again;
    ``versions`` is what it ran on, by default `environment`.

    >>> Results("Mine", runs=(Run("magnitude", 0.9, before=61.6),)).metric
    'accuracy'
    """

    title: str
    runs: tuple[Run, ...]
    networks: tuple[Network, ...] = ()
    text: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    metric: str = "accuracy"
    unit: str = "%"
    command: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=lambda: environment())

    def __post_init__(self) -> None:
        for name in ("text", "notes"):
            if isinstance(value := getattr(self, name), str):
                raise TypeError(f"{name} is a sequence of paragraphs; write [{value[:30]!r}] for a single one.")
            object.__setattr__(self, name, tuple(value))
        runs = tuple(one if isinstance(one, Run) else Run(**one) for one in self.runs)
        object.__setattr__(self, "runs", runs)
        networks = tuple(one if isinstance(one, Network) else Network(**one) for one in self.networks)
        object.__setattr__(self, "networks", networks)
        if not self.runs:
            raise ValueError(f"results {self.title!r} hold no runs; a report needs one at least.")


def environment() -> dict[str, str]:
    """The versions, the processor and the number of threads; neither host name nor path.

    >>> list(environment())
    ['secateur', 'torch', 'numpy', 'python', 'system', 'processor', 'cores', 'torch threads']
    """
    return {
        "secateur": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}".strip(),
        "processor": _processor(),
        "cores": str(os.cpu_count() or "unknown"),
        "torch threads": str(torch.get_num_threads()),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or "unknown"


def describe(
    title: str, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], *, method: str = "", bins: int = 60
) -> Network:
    """The `Network` that the masks make of these weights, which are those **before** pruning.

    ``weights`` and ``masks`` go by parameter name; a mask is a bool tensor of its weight's shape, True = kept. Weights
    without a mask are left out. The histogram has ``bins`` bins, symmetric about 0, over all the masked weights.

    Raises ``ValueError`` where a mask has no weight or another shape than its weight, or a weight is not finite.

    >>> weight = torch.tensor([[3.0, -1.0], [0.5, -4.0]])
    >>> network = describe("top half", {"w": weight}, {"w": weight.abs() > 2}, bins=4)
    >>> network.edges, network.kept, network.removed
    ((-4.0, -2.0, 0.0, 2.0, 4.0), (1, 0, 0, 1), (0, 1, 1, 0))
    """
    for name, mask in masks.items():
        if name not in weights:
            raise ValueError(f"there is a mask for {name} but no weight; weights has {_few(weights)}.")
        weight = weights[name]
        if weight.shape != mask.shape:
            raise ValueError(f"the mask of {name} has shape {tuple(mask.shape)}, its weight {tuple(weight.shape)}.")
        if not weight.isfinite().all():
            raise ValueError(f"{name} holds inf or NaN; a histogram needs finite weights.")
    largest = max((float(weights[name].abs().max()) for name, mask in masks.items() if mask.numel()), default=0.0)
    edges = np.linspace(-1, 1, bins + 1) * (largest or 1.0)
    kept, removed = np.zeros(bins, dtype=np.int64), np.zeros(bins, dtype=np.int64)
    layers = []
    for name, mask in masks.items():
        weight, mask = weights[name].detach().double().cpu(), mask.detach().bool().cpu()
        kept += np.histogram(weight[mask].numpy(), edges)[0]
        removed += np.histogram(weight[~mask].numpy(), edges)[0]
        layers.append(Layer(name, tuple(mask.shape), int(mask.sum())))
    return Network(title, tuple(layers), tuple(edges.tolist()), tuple(kept.tolist()), tuple(removed.tolist()), method)


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"


def save_results(results: Results, path: str | os.PathLike[str]) -> None:
    """Write the results as JSON, to a temporary name first. `load_results` reads them back."""
    write_whole(path, json.dumps(dataclasses.asdict(results), indent=1, allow_nan=False) + "\n")


def load_results(path: str | os.PathLike[str]) -> Results:
    """The `Results` that `save_results` wrote; ``ValueError`` where the file holds anything else."""
    try:
        return Results(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} does not hold the results of a report: {error}") from error


@dataclasses.dataclass(frozen=True)
class Row:
    """The runs of one method at one sparsity: means over seeds, and sample standard deviations (None with one seed).

    ``before_range`` and ``after_range`` are the smallest and the largest over the seeds.
    """

    method: str
    sparsity: float
    seeds: int
    before: float
    before_sd: float | None
    before_range: tuple[float, float]
    after: float | None
    after_sd: float | None
    after_range: tuple[float, float] | None
    bytes: float | None
    zipped: float | None
    latency_ms: float | None


def summarize(runs: Iterable[Run]) -> list[Row]:
    """One `Row` for each method and sparsity (to a tenth of a percent), in the order of first appearance.

    ``latency_ms`` is the mean over the runs where it was measured; so are the sizes. ``after`` is None unless every
    run of the row has it, because a mean over some of the seeds would not compare.

    >>> [row] = summarize([Run("lamp", 0.9, before=40, seed=0), Run("lamp", 0.9, before=50, seed=1)])
    >>> row.before, round(row.before_sd, 2), row.before_range, row.after
    (45.0, 7.07, (40, 50), None)
    """
    groups: dict[tuple[str, float], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.method, round(run.sparsity, 3)].append(run)
    rows = []
    for (method, _), group in groups.items():
        before = [run.before for run in group]
        after = [run.after for run in group if run.after is not None]
        if len(after) < len(group):
            after = []
        rows.append(
            Row(
                method,
                statistics.fmean(run.sparsity for run in group),
                len({run.seed for run in group}),
                statistics.fmean(before),
                _sd(before),
                (min(before), max(before)),
                statistics.fmean(after) if after else None,
                _sd(after),
                (min(after), max(after)) if after else None,
                _mean(run.bytes for run in group),
                _mean(run.zipped for run in group),
                _mean(run.latency_ms for run in group),
            )
        )
    return rows


def _sd(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _mean(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return statistics.fmean(measured) if measured else None


def _with_spread(mean: float | None, sd: float | None) -> str:
    if mean is None:
        return "–"
    return f"{mean:.1f}" if sd is None else f"{mean:.1f} ± {sd:.1f}"


def print_summary(results: Results) -> None:
    """Print the table of `summarize` to the terminal: mean ± standard deviation over seeds, sizes, milliseconds."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = summarize(results.runs)
    columns = columns_of(results, rows)
    tuned = any(column.key == "after" for column in columns)
    caption = f"{results.metric} before and after fine-tuning" if tuned else ""
    if any(row.before_sd is not None for row in rows):
        caption += ("; " if caption else "") + "mean ± standard deviation over seeds"
    table = Table(
        title=Text(results.title, "bold"), caption=Text(caption), title_justify="left", caption_justify="left",
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
    )  # fmt: skip
    for column in columns:
        head = f"{column.brief}\n{column.unit}" if column.unit else column.brief
        table.add_column(Text(head), justify="right" if column.numeric else "left", no_wrap=True)
    best = best_rows(rows)
    by_sparsity = sorted(rows, key=lambda row: round(row.sparsity, 2))
    for row, following in zip(by_sparsity, [*by_sparsity[1:], None], strict=True):
        last = following is None or round(following.sparsity, 2) != round(row.sparsity, 2)
        cells = [Text(column.show(row)) for column in columns]
        table.add_row(*cells, end_section=last, style="bold" if row in best else "")
    Console().print(table)


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows with the highest ``after`` among those of the same sparsity, to a percent."""
    groups = defaultdict(list)
    for row in rows:
        if row.after is not None and row.sparsity:
            groups[round(row.sparsity, 2)].append(row)
    return [max(group, key=lambda row: row.after or 0.0) for group in groups.values() if len(group) > 1]


@dataclasses.dataclass(frozen=True)
class Column:
    key: str
    head: str
    brief: str  # the head in a terminal
    unit: str
    numeric: bool
    values: Mapping[Row, float | str | None]
    texts: Mapping[Row, str]

    def value(self, row: Row) -> float | str | None:
        return self.values[row]

    def show(self, row: Row) -> str:
        return self.texts[row]


def columns_of(results: Results, rows: Sequence[Row]) -> list[Column]:
    """What both tables show: only columns for which something was measured."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    columns = [
        Column("method", "method", "method", "", False, {r: r.method for r in rows}, {r: r.method for r in rows}),
        Column(
            "sparsity",
            "sparsity",
            "removed",
            "%",
            True,
            {r: r.sparsity for r in rows},
            {r: f"{100 * r.sparsity:.1f}" for r in rows},
        ),
    ]
    tuned = any(row.after is not None for row in rows)
    columns.append(
        Column(
            "before",
            f"{results.metric} before fine-tuning" if tuned else results.metric,
            "before" if tuned else results.metric,
            results.unit,
            True,
            {r: r.before for r in rows},
            {r: _with_spread(r.before, r.before_sd) for r in rows},
        )
    )
    if tuned:
        columns.append(
            Column(
                "after",
                f"{results.metric} after fine-tuning",
                "after",
                results.unit,
                True,
                {r: r.after for r in rows},
                {r: _with_spread(r.after, r.after_sd) for r in rows},
            )
        )
    for key, head, brief, unit, scale, form in (
        ("bytes", "file", "file", "kB", 1e3, ".1f"),
        ("zipped", "file, zipped", "zipped", "kB", 1e3, ".1f"),
        ("latency_ms", "latency", "latency", "ms", 1, ".2f"),
    ):
        values = {row: getattr(row, key) for row in rows}
        if any(value is not None for value in values.values()):
            scaled = {row: None if value is None else value / scale for row, value in values.items()}
            columns.append(
                Column(key, head, brief, unit, True, scaled, {r: number(v, form) for r, v in scaled.items()})
            )
    return columns
