"""Results as data: what was measured of runs, a network described, a summary over seeds, and the table of a report."""

import dataclasses
import json
import math
import operator
import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from secateur.support import Fields, in_mode, private, processor, run_example, table_of, write_whole
from secateur.version import __version__

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


# ---- What was measured: runs of methods at sparsities, layers, weights; plain values that travel as JSON.
#
# Law: a result states what was measured and nothing else; what was not is None.


def _as_tuples(value: Any, *names: str) -> None:
    """JSON gives lists, and mappings for what they hold."""
    for name in names:
        parts = (_PARTS[name](**one) if isinstance(one, Mapping) else one for one in getattr(value, name))
        object.__setattr__(value, name, tuple(parts))


@dataclasses.dataclass(frozen=True)
class Run:
    """One network, pruned once and measured.

    ``sparsity`` is the measured fraction removed of the weights that may be pruned, in [0, 1); 0 is the dense network.
    ``overall`` is the fraction removed of all parameters. ``before`` and ``after`` are the metric (percent accuracy,
    unless `Results` says otherwise) before and after fine-tuning; a method that prunes while it trains has no
    ``before``. ``bytes`` is the size of the saved file, ``zipped`` the size of the same file after zip compression,
    ``compressed`` that of `secateur.save_compressed`'s file, ``memory`` the bytes of all tensors when it runs,
    ``latency_ms`` the time of one forward pass in milliseconds, ``batch_ms`` that of a large batch, ``multiply_adds``
    what that pass has to multiply: see `count_multiply_adds`. ``None`` means "not measured". Runs of one ``method`` and
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
    batch_ms: float | None = None
    memory: int | None = None
    compressed: int | None = None

    def __post_init__(self) -> None:
        where = f"run of {self.method!r} with seed {self.seed}"
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"{where}: sparsity is a fraction in [0, 1), not {self.sparsity}; 90 % is written 0.9.")
        if self.before is None and self.after is None:
            raise ValueError(f"{where}: neither before nor after was measured; a run shows one of them at least.")
        if self.overall is not None and not 0 <= self.overall < 1:
            raise ValueError(f"{where}: overall is a fraction in [0, 1), not {self.overall}; 90 % is written 0.9.")
        for name in ("before", "after", "latency_ms", "batch_ms"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(
                    f"{where}: {name} is {value}; give a finite number, or None where nothing was measured."
                )
        for name in ("bytes", "zipped", "latency_ms", "batch_ms", "multiply_adds", "memory", "compressed"):
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
        _as_tuples(self, "shape")
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
    `describe`.

    >>> from secateur.report import describe
    >>> weights = {"weight": torch.tensor([1.0, 2.0])}
    >>> network = describe("mine", weights, {"weight": torch.tensor([True, False])})
    >>> network.layers[0].sparsity, sum(network.kept), sum(network.removed)
    (0.5, 1, 1)
    """

    title: str
    layers: tuple[Layer, ...]
    edges: tuple[float, ...]
    kept: tuple[int, ...]
    removed: tuple[int, ...]

    def __post_init__(self) -> None:
        _as_tuples(self, "layers", "edges", "kept", "removed")
        if not len(self.edges) == len(self.kept) + 1 == len(self.removed) + 1:
            raise ValueError(
                f"{self.title!r}: n counts need n + 1 edges; there are {len(self.edges)} edges, "
                f"{len(self.kept)} counts of kept and {len(self.removed)} of removed weights."
            )


@dataclasses.dataclass(frozen=True)
class History:
    """How one network was pruned while it trained: ``sparsity`` and ``churn`` at each of some optimizer ``steps``.

    ``churn`` is the fraction of the weights whose mask changed at that step, 0 where no update fell on it. All three
    are in `Pruner.metrics`. ``method`` is the `Run.method` that it is an example of.

    >>> History("gradual", steps=(0, 1), sparsity=(0.0, 0.5), churn=(0.0, 0.5)).churn
    (0.0, 0.5)
    """

    method: str
    steps: tuple[int, ...]
    sparsity: tuple[float, ...]
    churn: tuple[float, ...]

    def __post_init__(self) -> None:
        _as_tuples(self, "steps", "sparsity", "churn")
        if not len(self.steps) == len(self.sparsity) == len(self.churn) > 0:
            raise ValueError(
                f"history of {self.method!r}: {len(self.steps)} steps, {len(self.sparsity)} sparsities and "
                f"{len(self.churn)} churns; give one of each for every step."
            )
        for name in ("sparsity", "churn"):
            for value in getattr(self, name):
                if not 0 <= value <= 1:
                    raise ValueError(f"history of {self.method!r}: {name} is a fraction in [0, 1], not {value}.")


@dataclasses.dataclass(frozen=True)
class Check:
    """The same pruning with one thing spoilt, and what a reader learns from how much that costs.

    >>> Check("mask shuffled", "what positions are worth", [Run("mask shuffled", 0.9, 12.0, 90.1)]).runs[0].after
    90.1
    """

    name: str
    tells: str
    runs: tuple[Run, ...]

    def __post_init__(self) -> None:
        _as_tuples(self, "runs")
        if not self.runs:
            raise ValueError(f"check {self.name!r} holds no runs; give one at least.")


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything that a report shows. All but ``title`` and ``runs`` may be left out.

    ``text`` is what to read first and ``notes`` how it was measured, one paragraph an element. ``metric`` names what
    ``before`` and ``after`` are, ``unit`` its unit. ``command`` is the command line that makes these results again;
    ``versions`` is what it ran on, by default `environment`. ``examples`` is the number of test examples, which gives a
    percentage its `wilson` interval. ``histories`` are of methods that prune while they train; ``checks`` the sanity
    checks, the method itself first. ``shrunken`` are networks that lost whole channels or skip their zeros, after those
    to compare them with, the dense one (sparsity 0) first.

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
    examples: int | None = None
    histories: tuple[History, ...] = ()
    checks: tuple[Check, ...] = ()
    shrunken: tuple[Run, ...] = ()

    def __post_init__(self) -> None:
        for name in ("text", "notes"):
            if isinstance(value := getattr(self, name), str):
                raise TypeError(f"{name} is a sequence of paragraphs; write [{value[:30]!r}] for a single one.")
        _as_tuples(self, "text", "notes", "runs", "shrunken", "networks", "histories", "checks")
        if not self.runs:
            raise ValueError(f"results {self.title!r} hold no runs; a report needs one at least.")
        if self.examples is not None and self.examples < 1:
            raise ValueError(f"results {self.title!r}: examples is {self.examples}; leave it out if it is not known.")


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
        "processor": processor(),
        "cores": str(os.cpu_count() or "unknown"),
        "torch threads": str(torch.get_num_threads()),
    }


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
    return _made(Results, Fields.read(path, hint=f" {path.name} does not hold the results of a report."))


T = TypeVar("T")

_PARTS: dict[str, type] = {
    "runs": Run, "shrunken": Run, "networks": Network, "layers": Layer, "histories": History, "checks": Check
}  # fmt: skip


def _made(kind: type[T], read: Fields) -> T:
    """A dataclass of the fields of a record."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    read.only(*(each.name for each in fields))
    for each in fields:
        if each.default is each.default_factory is dataclasses.MISSING and each.name not in read.values:
            raise read.wrong(each.name, "is missing")
    values = dict(read.values)
    for name, part in _PARTS.items():
        if name in values:
            values[name] = [_made(part, inner) for inner in read.inners(name)]
    try:
        return kind(**values)
    except (TypeError, ValueError, AttributeError) as error:
        raise read.wrong("", f"cannot be: {str(error).rstrip('.')}") from None


# ---- A network described: which weights its masks keep, and what one forward pass has to multiply.
#
# Law: nothing of the network is changed.


def describe(title: str, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], *, bins: int = 60) -> Network:
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
    return Network(title, tuple(layers), tuple(edges.tolist()), tuple(kept.tolist()), tuple(removed.tolist()))


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"


def count_multiply_adds(model: nn.Module, example_inputs: Any) -> int:
    """``Σ over layers: nonzero weights · places where each is used``: what one forward pass has to multiply and add.

    Of linear layers and convolutions alone; a place is a position of the output (of a transposed convolution: of the
    input), padding included. Biases, normalizations, activations and attention's products are not counted. This is the
    work that is left in theory: a dense kernel multiplies by the zeros too.

    The model is run once on ``example_inputs``, what it is called with as in `torch.export` (a tuple holds positional
    arguments, a mapping keyword arguments), in evaluation mode and without gradients.

    >>> layer = nn.Linear(3, 2)
    >>> with torch.no_grad():
    ...     _ = layer.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 3.0]]))
    >>> count_multiply_adds(layer, torch.zeros(5, 3))
    15
    """
    total = 0

    def count(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        weight = module.weight
        assert isinstance(weight, Tensor)
        if isinstance(module, nn.Linear):
            places = output.numel() // max(module.out_features, 1)
        elif private.is_transposed_convolution(module):
            places = given[0].numel() // module.in_channels
        else:
            assert private.is_convolution(module)
            places = output.numel() // module.out_channels
        total += int(weight.count_nonzero()) * places

    layers = [module for module in model.modules() if isinstance(module, nn.Linear | private.Convolution)]
    hooks = [module.register_forward_hook(count) for module in layers]
    try:
        with in_mode(model, training=False), torch.no_grad():
            run_example(model, example_inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return total


# ---- Runs summed up: means over seeds and their spread, intervals, the best of each sparsity.
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


# ---- The table of a report, for a page and for a terminal.
#
# Law: a column is shown if something of it was measured; both tables say the same.


def _with_spread(mean: float | None, sd: float | None) -> str:
    if mean is None:
        return "–"
    return f"{mean:.1f}" if sd is None else f"{mean:.1f} ± {sd:.1f}"


def print_summary(results: Results) -> None:
    """Print the table of `summarize` to the terminal: mean ± standard deviation over seeds, sizes, milliseconds."""
    from rich.console import Console
    from rich.text import Text

    rows = summarize(results.runs)
    columns = columns_of(results, rows)
    tuned = any(column.key == "after" for column in columns)
    caption = f"{results.metric} before and after fine-tuning" if tuned else ""
    if any(row.before_sd is not None for row in rows):
        caption += ("; " if caption else "") + "mean ± standard deviation over seeds"
    console = Console()
    by_sparsity = sorted(rows, key=lambda row: round(row.sparsity, 2))
    console.print(_printed(by_sparsity, columns, Text(results.title, "bold"), Text(caption)))
    if results.shrunken:
        title = Text(f"\nChannels that left, zeros that are skipped: {results.metric} after fine-tuning", "bold")
        console.print(_printed(*shrunken_table(results), title, None))
    if results.checks:
        wide = max(len(check.name) for check in results.checks)
        removed = 100 * summarize(results.checks[0].runs)[0].sparsity
        console.print(f"\nSanity checks, {removed:.1f} % removed", style="bold", highlight=False)
        for check, [row] in ((check, summarize(check.runs)) for check in results.checks):
            shown = (
                _with_spread(row.before, row.before_sd) if row.after is None else _with_spread(row.after, row.after_sd)
            )
            console.print(Text(f"{check.name:{wide}}  {shown}"))


def _printed(rows: Sequence[Row], columns: "Sequence[Column]", title: "Text", caption: "Text | None") -> "Table":
    """A table for a terminal: a rule where the sparsity changes, the best of each in bold."""
    from rich import box
    from rich.text import Text

    columns = [column for column in columns if column.brief]
    heads = [f"{column.brief}\n{column.unit}" if column.unit else column.brief for column in columns]
    table = table_of(
        [f"{'>' * column.numeric}{head}" for column, head in zip(columns, heads, strict=True)],
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1),
    )
    best = best_rows(rows)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last = following is None or round(following.sparsity, 2) != round(row.sparsity, 2)
        cells = [Text(column.show(row)) for column in columns]
        table.add_row(*cells, end_section=last, style="bold" if row in best else "")
    return table


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a page's table, whose rows are `Row` or numbers; one without a ``brief`` head is left out on a
    terminal, as are asides."""

    key: str
    head: str
    brief: str
    unit: str
    numeric: bool
    values: Mapping[Any, float | str | None]
    texts: Mapping[Any, str]
    aside: str = ""  # what is said beside each text
    asides: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    bars: Mapping[Any, float] = dataclasses.field(default_factory=dict)  # shares, drawn before each text

    def value(self, row: Any) -> float | str | None:
        return self.values[row]

    def show(self, row: Any) -> str:
        return self.texts[row]

    @property
    def widest(self) -> int:
        """How many characters its longest text has: behind bars all take as much, so that bars stand in line."""
        return max(map(len, self.texts.values()), default=0)


# What a network costs: a field of `Row`, heads on a page and on a terminal, unit, how it is shown, beside it
_COSTS = (
    ("bytes", "file", "file", "kB", ".1f", 1e-3, "times smaller"),
    ("zipped", "file, zipped", "zipped", "kB", ".1f", 1e-3, "times smaller"),
    ("compressed", "file, compressed", "", "kB", ".1f", 1e-3, "times smaller"),
    ("memory", "in memory", "", "kB", ".1f", 1e-3, "times smaller"),
    ("multiply_adds", "multiply-adds", "", "thousands", ",.0f", 1e-3, "times fewer"),
    ("latency_ms", "latency", "latency", "ms", ".2f", 1.0, "times faster"),
    ("batch_ms", "latency of a batch", "batch", "ms", ".2f", 1.0, "times faster"),
)


def columns_of(results: Results, rows: Sequence[Row]) -> list[Column]:
    """What both tables show: only columns for which something was measured."""
    tuned = any(row.after is not None for row in rows)
    first, last = f"{results.metric} before fine-tuning", f"{results.metric} after fine-tuning"
    dense = next((row for row in rows if not row.sparsity), None)
    names: dict[Row, float | str | None] = {row: row.method for row in rows}
    columns = [Column("method", "method", "method", "", False, names, {row: row.method for row in rows})]

    def add(
        key: str, head: str, brief: str, unit: str, value: Callable[[Row], float | None], show: Callable[[Row], str]
    ) -> None:
        values: dict[Row, float | str | None] = {row: value(row) for row in rows}
        if any(measured is not None for measured in values.values()):
            texts = {row: "–" if values[row] is None else show(row) for row in rows}
            columns.append(Column(key, head, brief, unit, True, values, texts))

    def plain(key: str, head: str, brief: str, unit: str, form: str, scale: float = 1.0) -> None:
        def value(row: Row) -> float | None:
            measured = getattr(row, key)
            return None if measured is None else measured * scale

        add(key, head, brief, unit, value, lambda row: format(value(row), form))

    def compare(key: str, aside: str, cost: Callable[[Row], float | None]) -> None:
        """Beside each value, how many times less it costs than the dense network."""
        most = None if dense is None else cost(dense)
        if most is not None and columns[-1].key == key:
            asides = {row: f"{most / less:.1f}" for row in rows if (less := cost(row))}
            columns[-1] = dataclasses.replace(columns[-1], aside=aside, asides=asides)

    plain("sparsity", "sparsity", "removed", "%", ".1f", 100)
    add(
        "before",
        first if tuned else results.metric,
        "before" if tuned else results.metric,
        results.unit,
        lambda row: row.before,
        lambda row: _with_spread(row.before, row.before_sd),
    )
    add("after", last, "after", results.unit, lambda row: row.after, lambda row: _with_spread(row.after, row.after_sd))
    intervals = {row: interval_of(results, row.before if row.after is None else row.after) for row in rows}
    add(
        "interval",
        "95 % interval",
        "",
        results.unit,
        lambda row: None if (interval := intervals[row]) is None else interval[0],
        lambda row: " – ".join(f"{bound:.1f}" for bound in intervals[row] or ()),
    )
    plain("overall", "of all parameters", "", "%", ".1f", 100)
    compare("overall", "times fewer", lambda row: None if row.overall is None else 1 - row.overall)
    for key, head, brief, unit, form, scale, aside in _COSTS:
        plain(key, head, brief, unit, form, scale)
        if key != "bytes" or len({row.bytes for row in rows}) > 1:
            compare(key, aside, operator.attrgetter(key))
    return columns


def shrunken_table(results: Results) -> tuple[list[Row], list[Column]]:
    """The rows and columns of the table of what is smaller and faster: what that cost and gained, and no more.

    >>> from secateur.report import Run
    >>> runs = [Run("dense", 0.0, 99.0, 99.0, bytes=900), Run("channels", 0.5, 60.0, 98.0, bytes=300)]
    >>> rows, columns = shrunken_table(Results("Mine", runs, shrunken=runs))
    >>> [(column.key, column.asides.get(rows[1])) for column in columns]
    [('method', None), ('sparsity', None), ('after', None), ('bytes', '3.0')]
    """
    rows = summarize(results.shrunken)
    columns = columns_of(results, rows)
    left_out = {"interval", "overall"} | ({"before"} if any(row.after is not None for row in rows) else set())
    kept = [column for column in columns if column.key not in left_out]
    return rows, [
        dataclasses.replace(column, brief="mult-adds") if column.key == "multiply_adds" else column for column in kept
    ]
