"""What happened, on one page: accuracy against sparsity and size, layer by layer, weight by weight.

Law: a report states what was measured and nothing else; the page loads nothing, whatever the names in it.
"""

import dataclasses
import html
import itertools
import json
import math
import os
import platform
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from secateur.version import __version__

__all__ = [
    "Layer",
    "Network",
    "Results",
    "Row",
    "Run",
    "describe",
    "environment",
    "load_results",
    "print_summary",
    "save_results",
    "summarize",
    "write_report",
]

# --------------------------------------------------------------------------------------------------------------------
# The results: plain values that travel as JSON
# --------------------------------------------------------------------------------------------------------------------


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
    _write(Path(path), json.dumps(dataclasses.asdict(results), indent=1, allow_nan=False) + "\n")


def load_results(path: str | os.PathLike[str]) -> Results:
    """The `Results` that `save_results` wrote; ``ValueError`` where the file holds anything else."""
    try:
        return Results(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} does not hold the results of a report: {error}") from error


# --------------------------------------------------------------------------------------------------------------------
# The summary: one row a method and sparsity
# --------------------------------------------------------------------------------------------------------------------


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
    columns = _columns(results, rows)
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
    best = _best(rows)
    by_sparsity = sorted(rows, key=lambda row: round(row.sparsity, 2))
    for row, following in zip(by_sparsity, [*by_sparsity[1:], None], strict=True):
        last = following is None or round(following.sparsity, 2) != round(row.sparsity, 2)
        cells = [Text(column.show(row)) for column in columns]
        table.add_row(*cells, end_section=last, style="bold" if row in best else "")
    Console().print(table)


def _best(rows: Sequence[Row]) -> list[Row]:
    """The rows with the highest ``after`` among those of the same sparsity, to a percent."""
    groups = defaultdict(list)
    for row in rows:
        if row.after is not None and row.sparsity:
            groups[round(row.sparsity, 2)].append(row)
    return [max(group, key=lambda row: row.after or 0.0) for group in groups.values() if len(group) > 1]


@dataclasses.dataclass(frozen=True)
class _Column:
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


def _columns(results: Results, rows: Sequence[Row]) -> list[_Column]:
    """What both tables show: only columns for which something was measured."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    columns = [
        _Column("method", "method", "method", "", False, {r: r.method for r in rows}, {r: r.method for r in rows}),
        _Column(
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
        _Column(
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
            _Column(
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
                _Column(key, head, brief, unit, True, scaled, {r: number(v, form) for r, v in scaled.items()})
            )
    return columns


# --------------------------------------------------------------------------------------------------------------------
# The page
# --------------------------------------------------------------------------------------------------------------------


def write_report(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write ``results`` as one self-contained HTML page, to a temporary name first, and return its path.

    The page holds its style, its script, its plots (SVG) and its data (JSON, under the id ``results``), and a content
    security policy that forbids it to load anything. It reads in light and dark and prints. Names are escaped.

    Needs jinja2 and matplotlib: ``ImportError`` says how to install them. The folder of ``path`` must exist.

    >>> import tempfile
    >>> runs = [Run("magnitude", sparsity, before=99 - 50 * sparsity) for sparsity in (0.5, 0.9)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_report(Results("Mine", runs), Path(folder, "report.html"))
    ...     page.name, page.read_text(encoding="utf-8").startswith("<!doctype html>")
    ('report.html', True)
    """
    try:
        import jinja2
        import markupsafe
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError(f"a report needs jinja2 and matplotlib ({error}): pip install 'secateur[report]'") from error
    import base64
    import hashlib

    folder = Path(__file__).parent / "templates"
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    page = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    ).get_template("report.html.j2")

    rows = summarize(results.runs)
    with mpl.rc_context():
        mpl.rcdefaults()  # the reader's matplotlibrc has no say in the page
        mpl.rcParams.update(cast(Any, _RC))
        plots = [*_accuracy_plots(results, rows), *_size_plot(results, rows), *_layer_plot(results, rows)]
        histograms = [_histogram(network, number) for number, network in enumerate(results.networks, 1)]
    text = page.render(
        results=results,
        columns=_columns(results, rows),
        rows=rows,
        best=_best(rows),
        plots=plots,
        histograms=histograms,
        data=dataclasses.asdict(results),
        style=markupsafe.Markup(style),
        script=markupsafe.Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        seeds=max(row.seeds for row in rows),
    )
    _write(Path(path), text)
    return Path(path)


def _write(path: Path, text: str) -> None:
    """All of ``text`` under ``path``, or nothing."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.name} cannot be written: there is no folder {path.parent}; create it first.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------------------------
# The plots: SVG whose colours are the page's, so that they follow light and dark
# --------------------------------------------------------------------------------------------------------------------

# matplotlib draws with stand-ins; `_svg` puts the page's CSS variables in their place.
_INK, _FAINT, _PAPER = "#010001", "#010002", "#010003"
_KEPT, _REMOVED = "#010011", "#010012"
_SERIES = [f"#0200{number:02x}" for number in range(8)]
_STAND_INS = {_INK: "--ink", _FAINT: "--faint", _PAPER: "--paper", _KEPT: "--series-0", _REMOVED: "--series-1"} | {
    color: f"--series-{number}" for number, color in enumerate(_SERIES)
}
_MARKERS = "osD^vPX*"
_NAME: dict[str, Any] = {"parse_math": False, "fontweight": "bold", "fontsize": 9.5}  # a $ in a name is a $
_RC: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it is searched, read aloud and scaled
    "font.size": 10.5,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.45,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
}


@dataclasses.dataclass(frozen=True)
class _Plot:
    title: str
    caption: str
    svg: Any  # Markup


def _svg(figure: Any, prefix: str, label: str) -> Any:
    """The figure as inline SVG: the page's colours and fonts, ids of its own, a label for screen readers."""
    import io

    import markupsafe
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": prefix}):  # the same results give the same bytes
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)  # HTML knows SVG; no address is left in the page
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for color, variable in _STAND_INS.items():
        text = text.replace(color, f"var({variable})")
    head = f'<svg role="img" aria-label="{html.escape(label)}"'
    return markupsafe.Markup(text.replace("<svg", head, 1))


def _accuracy_scale(results: Results, values: Sequence[float]) -> tuple[Any, list[float] | None]:
    """The map from metric to height and its ticks. Percentages near 100 are spread by their distance from 100,
    since 99 and 98 differ as much as 90 and 80 do: twice the errors."""
    if results.unit != "%" or max(values) < 90 or max(values) > 100 or min(values) < 0:
        return (lambda value: value), None
    ticks = [float(tick) for tick in (0, 50, 80, 90, 95, 98, 99, 100) if tick >= min(values) - 50]
    return (lambda value: -math.log10(101 - value)), ticks


def _series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    series: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        series[row.method].append(row)
    return {method: sorted(group, key=lambda row: row.sparsity) for method, group in series.items()}


def _styles(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each method that prunes; both, so that the plot reads without colour."""
    pruned = [method for method, group in _series(rows).items() if any(row.sparsity for row in group)]
    return {name: (_SERIES[n % len(_SERIES)], _MARKERS[n % len(_MARKERS)]) for n, name in enumerate(pruned)}


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.1))
    axes = figure.add_axes((0.085, 0.13, 0.595, 0.79))
    return figure, axes


def _curves(results: Results, rows: Sequence[Row], stage: str, axes: Any, abscissa: Any) -> None:
    """One line a method, a band from the lowest to the highest seed, the name at the line's end."""
    scale, ticks = _accuracy_scale(results, [v for row in rows for v in (row.before, row.after) if v is not None])
    labels = []
    styles = _styles(rows)
    for method, group in _series(rows).items():
        points = [row for row in group if getattr(row, stage) is not None and abscissa(row) is not None]
        if not points:
            continue
        ys = [scale(getattr(row, stage)) for row in points]
        low = [scale(getattr(row, f"{stage}_range")[0]) for row in points]
        high = [scale(getattr(row, f"{stage}_range")[1]) for row in points]
        if method not in styles:  # a dense network: the line to beat
            axes.axhline(ys[0], color=_INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1.5)
            axes.axhspan(low[0], high[0], color=_INK, alpha=0.1, linewidth=0)
            labels.append((ys[0], None, method, _INK))
            continue
        color, marker = styles[method]
        xs = [abscissa(row) for row in points]
        if len(points) > 1:
            axes.fill_between(xs, low, high, color=color, alpha=0.18, linewidth=0)
        else:
            axes.vlines(xs, low, high, color=color, linewidth=5, alpha=0.3)
        axes.plot(
            xs,
            ys,
            color=color,
            linewidth=1.7,
            marker=marker,
            markersize=5.5,
            markeredgecolor=_PAPER,
            markeredgewidth=0.8,
            zorder=2 if len(points) > 1 else 3,
        )
        labels.append((ys[-1], xs[-1], method, color))
    if ticks:
        axes.set_yticks([scale(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
        axes.set_ylim(scale(ticks[0]) - 0.03, scale(100) + 0.03)
    unit = f"{results.metric} ({results.unit})" if results.unit else results.metric
    axes.text(-0.12, 1.045, unit, transform=axes.transAxes, va="bottom", parse_math=False)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    _place_labels(axes, labels)


def _place_labels(axes: Any, labels: Sequence[tuple[float, float | None, str, str]]) -> None:
    """Names beside the right edge, as near as they can be to the ends of their lines without touching each other."""
    bottom, top = axes.get_ylim()
    left, right = axes.get_xlim()
    gap = (top - bottom) * 0.056
    wanted = sorted(labels, key=lambda label: label[0])
    heights: list[float] = []
    for label in wanted:
        heights.append(max(label[0], heights[-1] + gap) if heights else max(label[0], bottom + gap / 2))
    overflow = (heights[-1] if heights else bottom) - (top - gap / 4)
    if overflow > 0:  # push down from the top, just as far as needed
        ceiling = top - gap / 4
        for index in range(len(heights) - 1, -1, -1):
            heights[index] = min(heights[index], ceiling)
            ceiling = heights[index] - gap
    edge = (right - left) * 0.035
    for (y, x, name, color), height in zip(wanted, heights, strict=True):
        start = right if x is None else x
        line_ends_here = x is None or abs(x - right) <= abs(right - left) * 0.12
        if line_ends_here:
            axes.plot(
                [start, right + edge * 0.9], [y, height], color=color, linewidth=0.8, alpha=0.7, clip_on=False, zorder=1
            )
            axes.text(
                right + edge * 1.15,
                height,
                _short(name),
                color=color,
                va="center",
                ha="left",
                **_NAME,
            )
        else:  # a line that stops early carries its name where it stops
            arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.8, "shrinkB": 3}
            offset = _free_place(axes, start, y, 0.62 * _NAME["fontsize"] * len(_short(name)))
            axes.annotate(
                _short(name), (start, y), offset, textcoords="offset points", color=color, arrowprops=arrow, **_NAME
            )
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)


def _free_place(axes: Any, x: float, y: float, width: float) -> tuple[float, float]:
    """Where, in points from (x, y), a name of this width is farthest from every line: on a grid of places below."""
    pixel = axes.figure.dpi / 72
    lines = [
        axes.transData.transform(line.get_xydata())
        for line in axes.get_lines()
        if line.get_transform() == axes.transData
    ]
    steps = np.linspace(0, 1, 30)[:, None]
    points = np.concatenate(
        [a + (b - a) * steps for line in lines for a, b in itertools.pairwise(line)] or [np.zeros((1, 2))]
    )
    middle, height = axes.transData.transform((x, y)) / pixel, _NAME["fontsize"]

    def clearance(offset: tuple[float, float]) -> float:
        left, bottom = middle + offset
        across = np.maximum(np.maximum(left - points[:, 0] / pixel, points[:, 0] / pixel - left - width), 0)
        along = np.maximum(np.maximum(bottom - points[:, 1] / pixel, points[:, 1] / pixel - bottom - height), 0)
        near = float(np.hypot(across, along).min())
        return min(near, 8) - 0.05 * math.hypot(*offset)  # 8 points are enough; then rather close to its own mark

    bottom = axes.transAxes.transform((0, 0))[1] / pixel
    places = [(dx, dy) for dx in (-6.0, 10.0, 30.0) for dy in range(-140, -15, 6) if middle[1] + dy > bottom + 4]
    return max(places, key=clearance, default=(8.0, 12.0))


def _short(name: str, limit: int = 16) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _accuracy_plots(results: Results, rows: Sequence[Row]) -> list[_Plot]:
    stages = ["before"] + ["after"] * any(row.after is not None for row in rows)
    plots = []
    for stage in stages:
        figure, axes = _figure()
        marks = _marks(rows)
        axes.set_xticks([-math.log10(1 - mark) for mark in marks], [f"{100 * mark:.3g}" for mark in marks])
        axes.set_xlim(-math.log10(1 - marks[0]) - 0.08, -math.log10(1 - marks[-1]) + 0.08)
        axes.set_xlabel("weights removed (%)")
        _curves(results, rows, stage, axes, lambda row: -math.log10(1 - row.sparsity))
        title = results.metric.capitalize()
        if len(stages) == 2:
            title += f" {stage} fine-tuning"
        caption = f"{results.metric.capitalize()} against sparsity, mean and range over seeds."
        plots.append(_Plot(title, caption, _svg(figure, f"curve-{stage}", f"{title}: {caption}")))
    return plots


def _marks(rows: Sequence[Row]) -> list[float]:
    """The sparsities to mark: of several that are close together, the one that most rows have."""
    counts = Counter(round(row.sparsity, 3) for row in rows if row.sparsity)
    marks: list[float] = []
    for sparsity, _ in counts.most_common():
        if all(abs(math.log10((1 - sparsity) / (1 - mark))) > 0.08 for mark in marks):
            marks.append(sparsity)
    return sorted(marks) or [0.0]


def _size_plot(results: Results, rows: Sequence[Row]) -> list[_Plot]:
    sized = [row for row in rows if row.zipped is not None]
    if not sized:
        return []
    stage = "after" if any(row.after is not None for row in sized) else "before"
    figure, axes = _figure()
    kilobytes = [row.zipped / 1e3 for row in sized if row.zipped is not None]
    low, high = min(kilobytes), max(kilobytes)
    nice = [m * 10.0**e for e in range(-3, 9) for m in (1, 2, 3, 5, 7)]
    marks = [mark for mark in nice if low * 0.9 <= mark <= high * 1.1]
    axes.set_xticks([math.log10(mark) for mark in marks], [f"{mark:g}" for mark in marks])
    pad = 0.04 * max(math.log10(high / low), 0.1)
    axes.set_xlim(math.log10(high) + pad, math.log10(low) - pad)  # as in the other plots, right is pruned most
    axes.set_xlabel("file, zipped (kB): smaller to the right")
    _curves(results, sized, stage, axes, lambda row: None if row.zipped is None else math.log10(row.zipped / 1e3))
    title = f"{results.metric.capitalize()} against size"
    if stage == "after":
        title += ", after fine-tuning"
    caption = "Size of the saved file after zip compression, mean over seeds."
    return [_Plot(title, caption, _svg(figure, "size", f"{title}: {caption}"))]


def _layer_plot(results: Results, rows: Sequence[Row]) -> list[_Plot]:
    """Where each method cuts: the sparsity of every layer. Left out for one network only, or very many layers."""
    from matplotlib.figure import Figure

    styles = _styles(rows)
    networks = [network for network in results.networks if network.method in styles]
    names = list(dict.fromkeys(layer.name for network in networks for layer in network.layers))
    if len(networks) < 2 or not 2 <= len(names) <= 24:
        return []
    height = max(4.1, 1.2 + 0.22 * len(names))
    figure = Figure(figsize=(5.6, height))
    axes = figure.add_axes((0.335, 0.533 / height, 0.635, 1 - 1.05 / height))
    places = {name: -number for number, name in enumerate(names)}
    for network in networks:
        color, marker = styles[network.method]
        xs, ys = zip(*((100 * layer.sparsity, places[layer.name]) for layer in network.layers), strict=True)
        axes.plot(
            xs, ys, color=color, marker=marker, linewidth=0.6, markersize=6, markeredgecolor=_PAPER,
            markeredgewidth=0.8, alpha=0.9, clip_on=False,
        )  # fmt: skip
    axes.set_yticks(list(places.values()), [name if len(name) <= 23 else f"…{name[-22:]}" for name in names])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_xlim(-2, 102)
    axes.set_ylim(-len(names) + 0.4, 0.6)
    axes.set_xlabel("weights of the layer removed (%)")
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    for number, network in enumerate(networks):  # the legend, in rows of three
        color, marker = styles[network.method]
        x, y = -0.5 + 0.5 * (number % 3), 1 + (0.36 - 0.2 * (number // 3)) / (height - 1.05)
        axes.plot(x, y + 0.004, marker=marker, color=color, markersize=6, transform=axes.transAxes, clip_on=False)
        axes.text(
            x + 0.03, y, _short(network.method), color=color, transform=axes.transAxes, va="center", **_NAME,
        )  # fmt: skip
    title = "Where each method cuts"
    removed = sorted(
        1 - sum(layer.kept for layer in n.layers) / sum(layer.weights for layer in n.layers) for n in networks
    )
    caption = f"Sparsity of each layer, in networks with {100 * removed[0]:.3g} to {100 * removed[-1]:.3g} % removed."
    return [_Plot(title, caption, _svg(figure, "layers", f"{title}: {caption}"))]


def _histogram(network: Network, number: int) -> _Plot:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.0))
    axes = figure.add_axes((0.1, 0.175, 0.88, 0.72))
    for counts, color, alpha in ((network.removed, _REMOVED, 0.55), (network.kept, _KEPT, 0.55)):
        axes.stairs(counts, network.edges, fill=True, color=color, alpha=alpha, linewidth=0)
        axes.stairs(counts, network.edges, color=color, linewidth=1.2)
    most = max([*network.kept, *network.removed, 1])
    axes.set_yscale("symlog", linthresh=1, linscale=0.4)
    marks = [10**power for power in range(math.floor(math.log10(most)) + 1)]
    axes.set_yticks(marks, [f"{mark:,}" for mark in marks])
    axes.minorticks_off()
    axes.set_ylim(0, max(most * 1.6, 2))
    axes.set_xlim(network.edges[0], network.edges[-1])
    axes.set_xlabel("weight before pruning")
    axes.text(-0.1, 1.03, "weights", transform=axes.transAxes, va="bottom")
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="x")
    for x, align, color, word, counts in (
        (0.5, "center", _REMOVED, "removed", network.removed),
        (1.0, "right", _KEPT, "kept", network.kept),
    ):
        axes.text(
            x, 1.03, f"■ {sum(counts):,} {word}", color=color, transform=axes.transAxes, ha=align, va="bottom", **_NAME,
        )  # fmt: skip
    title = "Weights kept and removed"
    return _Plot(title, "Counts on a log scale.", _svg(figure, f"histogram-{number}", f"{network.title}: {title}"))
