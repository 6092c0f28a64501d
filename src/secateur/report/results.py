"""What was measured: runs of methods at sparsities, layers, weights; plain values that travel as JSON.

Law: a result states what was measured and nothing else; what was not is None.
"""

import dataclasses
import json
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from secateur.support import Fields, processor, write_whole
from secateur.version import __version__

__all__ = ["Check", "History", "Layer", "Network", "Results", "Run", "environment", "load_results", "save_results"]


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
