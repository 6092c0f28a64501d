"""Milliseconds of operations, measured on this machine in the runtime that is asked for, each once for each shape; and
probes of them, small files that are timed on another machine.

Law: a time that stands on disk was measured on this processor with these versions, or it is measured again; probes
are there all or none; the model is left as it is.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from torch import nn

from secateur import runtimes
from secateur.checkpoints import new_directory
from secateur.coupling import Group, find_coupling
from secateur.models import without_cache
from secateur.operations import COLUMNS, Operation, Priced, PriceTable, operations_of, priced_rows, shapes_text, step_in
from secateur.runtimes import Elsewhere, OnnxRuntime, Runtime, Torch
from secateur.search.making import FINE, check_values
from secateur.shrinking import Plan, TiedGroups, by_tie, carry_out, counts_at, plan_of
from secateur.support import (
    Between,
    Column,
    Fields,
    Part,
    Shown,
    Table,
    accelerator,
    alternating,
    naming_example,
    plain,
    printable,
    processor,
    tensors_of,
    track,
    unwrapped,
    write_whole,
)

Key = TypeVar("Key", bound=Hashable)

FILE = "latency.json"
FORMAT, VERSION = "secateur latency", 1
_HINT = " Delete it: it is then measured again."
_ROUNDS = 5
_AT_LEAST = 0.001  # seconds of a turn
_NEAR = 1.5  # how many times larger the one of two sizes may be for one between them to be interpolated
_LARGEST = 2**62


class Times:
    """Milliseconds of operations: those that are known, and, of all others, what is measured when they are asked for.

    An operation with sizes between those of two others that are known, on a straight line, is interpolated, if the
    larger of the two is not more than half as large again.

    Args:
        folder: where ``latency.json`` is, or will be; None: times are forgotten with this object. Those of another
            processor, number of threads or version of what runs them are not read.
        runtime: where; torch if left out. What it does not take by itself is timed in torch. Elsewhere nothing is
            timed, and nothing written.

    Raises:
        ValueError: the file is damaged.

    >>> times = Times()
    >>> found = operations_of(nn.Linear(4, 8), torch.ones(2, 4))
    >>> bool(times(found) > 0), times(found) == times(found)
    (True, True)
    """

    def __init__(self, folder: Path | None = None, runtime: Runtime | Elsewhere | None = None) -> None:
        self.runtime = Torch() if runtime is None else runtime
        self.path = None if folder is None or isinstance(self.runtime, Elsewhere) else folder / FILE
        self.machine = _machine(self.runtime)
        self._known: dict[str, dict[tuple[int, ...], float]] = {}
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def __call__(self, operations: Mapping[Operation, int]) -> float:
        """The sum over all of them."""
        self.measure(operations)
        return math.fsum(times * (self.known(each) or 0.0) for each, times in operations.items())

    def known(self, operation: Operation) -> float | None:
        """What is measured, or lies between two that are."""
        table = self._known.get(operation.form, {})
        found = table.get(operation.numbers)
        return found if found is not None else _between(operation.numbers, table)

    def measure(self, operations: Iterable[Operation]) -> None:
        """Those that are not known, in turns with others of the same form."""
        unknown: dict[str, dict[tuple[int, ...], Operation]] = {}
        if isinstance(self.runtime, Elsewhere):
            for each in operations:
                self._known.setdefault(each.form, {})[each.numbers] = self.runtime.of(each)
            return
        for each in sorted(set(operations), key=lambda each: (each.form, each.numbers)):
            if self.known(each) is None:
                unknown.setdefault(each.form, {})[each.numbers] = each
        if not unknown:
            return
        for form, several in track(unknown.items(), "measuring operations", len(unknown)):
            with torch.no_grad():
                calls = {numbers: each.call(self.runtime) for numbers, each in several.items()}
                how = {"at_least": _AT_LEAST, "clock": self.runtime.clock}
                rounds = alternating(calls, _ROUNDS, **how)  # type: ignore[arg-type]
            table = self._known.setdefault(form, {})
            # the least: whatever else the machine does only adds to it
            table.update({numbers: 1e3 * min(each) for numbers, each in rounds.items()})
        self.save()

    def save(self) -> None:
        """Writes what is known, if there is a folder for it."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = tuple((form, numbers, ms) for form, table in self._known.items() for numbers, ms in table.items())
        said = {"format": FORMAT, "version": VERSION, **plain(_Said(self.machine, rows))}
        write_whole(self.path, json.dumps(said, indent=0, allow_nan=False))

    def _read(self, path: Path) -> None:
        said = Fields.read(path, hint=_HINT).of_format(FORMAT, VERSION).whole(_Said)
        if said.machine == self.machine:
            for form, numbers, ms in said.times:
                self._known.setdefault(form, {})[numbers] = float(ms)


_Number = Annotated[int, Between(-_LARGEST, _LARGEST)]
_Milliseconds = Annotated[float, Between(math.ulp(0.0), 1e12)]


@dataclass(frozen=True)
class _Said:
    """What ``latency.json`` says: of which machine, and ``(form, numbers, milliseconds)`` of each operation."""

    machine: Mapping[str, str]
    times: tuple[tuple[str, tuple[_Number, ...], _Milliseconds], ...]


def _machine(runtime: Runtime | Elsewhere) -> dict[str, str]:
    return {
        "processor": processor(),
        "accelerator": accelerator(),
        "runtime": str(runtime),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }


def _between(numbers: Sequence[int], table: Mapping[tuple[int, ...], float]) -> float | None:
    """On the line between two that are near, the nearest two; None where there are none.

    >>> round(_between((5, 3), {(4, 3): 1.0, (6, 3): 2.0}) or 0, 6), _between((5, 3), {(4, 3): 1.0, (6, 4): 2.0})
    (1.5, None)
    """
    here = np.array(numbers, dtype=np.float64)
    every = [(np.array(each, dtype=np.float64), ms) for each, ms in table.items() if len(each) == len(numbers)]
    below = [(at, ms) for at, ms in every if (at <= here).all()]
    above = [(at, ms) for at, ms in every if (at >= here).all()]
    best: tuple[float, float] | None = None
    for low, less in below:
        for high, more in above:
            gap = high - low
            if not (high <= _NEAR * low).all() or not gap.any():
                continue
            share = float((here - low) @ gap / (gap @ gap))
            if np.abs(low + share * gap - here).max() <= 1e-9 * max(1.0, float(np.abs(here).max())):
                length = float(gap @ gap)
                if best is None or length < best[0]:
                    best = length, less + share * (more - less)
    return None if best is None else best[1]


@torch.no_grad()
def saved_by(model: nn.Module, example_inputs: Any, plans: Mapping[Key, Plan], times: Times) -> dict[Key, float]:
    """``{key: milliseconds}`` that the operations of the model on the example take less when a plan is carried out; the
    model runs once for each, and is as before at the end. More than before is a number below 0."""
    changed = changed_by(model, example_inputs, plans)
    times.measure({each for both in changed.values() for some in both for each in some})
    return {key: times(gone) - times(new) for key, (gone, new) in changed.items()}


@torch.no_grad()
def changed_by(
    model: nn.Module, example_inputs: Any, plans: Mapping[Key, Plan]
) -> dict[Key, tuple[Counter[Operation], Counter[Operation]]]:
    """``{key: operations that are there no more when a plan is carried out, and new ones}``: of what is the same before
    and after nothing has to be known."""
    dense = operations_of(model, example_inputs)
    found = dict(zip(plans, _after(model, example_inputs, plans.values(), "timing levels"), strict=True))
    return {key: (dense - each, each - dense) for key, each in found.items()}


def _after(model: nn.Module, example_inputs: Any, plans: Collection[Plan], what: str) -> Iterator[Counter[Operation]]:
    """The operations of the model when each of these is carried out; it is as before after each."""
    for plan in track(plans, what, len(plans)):
        undo = carry_out(model, plan, None)
        try:
            found = operations_of(model, example_inputs)
        finally:
            undo()
        yield found


# ---- Probes: the operations that levels need, as files that are timed on another machine.

PROBES, SCRIPT = "probes.csv", "time_probes.py"
NOTHING = "nothing.onnx"  # what a call takes by itself, which the script subtracts
_AROUND = (0.25, 0.5, 0.75)  # of a width, where it is looked whether times have steps
_BESIDE = (0, 4, 8, 16, 24, 32)
_AROUND_FROM = 96  # parts
_STEP = 32


@dataclass(frozen=True)
class Probes(Shown):
    """Probes that were written; prints as a table.

    Attributes:
        folder: where.
        count: ``{function: how many shapes of it}``.
        left_out: the same of those that cannot be exported one by one, and count as nothing.
        runtime: which they are for.
    """

    folder: Path
    count: Mapping[str, int]
    left_out: Mapping[str, int]
    runtime: str

    def content(self) -> Iterator[Part]:
        yield Table.of(
            "probes",
            self.count.items(),
            Column("Operation", lambda each: each[0]),
            Column.count("Shapes", lambda each: each[1]),
        )
        yield ""
        if self.left_out:
            names = ", ".join(sorted(self.left_out))
            yield f"Not exported by themselves, and counted as nothing: {names}."
        yield printable(f"{sum(self.count.values())} probes for {self.runtime} are in {self.folder}.", 1000)
        yield (
            f"There, with onnxruntime and numpy alone: python {SCRIPT} --threads 1; board.csv is what --runtime of fit "
            "takes (runtime= of fit and shrink)."
        )
        yield (f"By other means, such as trtexec --onnx=FILE: a table of {PROBES} with one more column, {COLUMNS[-1]}.")


def write_probes(
    model: nn.Module, example_inputs: Any, folder: Path | str, *, runtime: str | OnnxRuntime = "onnxruntime"
) -> Probes:
    """Write a small ONNX file of each operation of a model, of the shapes that it has at fewer units of each group,
    and a script that times them where there is only ONNX Runtime and numpy.

    Of each group they are those of 5 % to 90 % that leave and of the least count, and some around a quarter, a half and
    three quarters of it, by which `secateur.fit` sees whether widths have to be multiples of 8, 16 or 32. What lies
    between is interpolated. In the folder are ``probes.csv``, a row an operation, and ``time_probes.py``, which writes
    ``board.csv``: what ``runtime=`` of `secateur.fit` and `secateur.shrink` takes.

    Args:
        model: any module, with its weights; it stays as it is.
        example_inputs: what it is called with, of the size that is served.
        folder: must not exist; it appears complete or not at all.
        runtime: ``"onnxruntime"``, which also TensorRT and others read; ``"onnxruntime:int8"`` or
            ``"onnxruntime:int4"``, its matrix products in 8 bits, or with weights in 4.

    Raises:
        ValueError: another runtime; the model has no values, is in bfloat16, or nothing of it can leave.
        CheckpointError: the folder exists. ImportError: onnx is not installed.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> done = write_probes(model, torch.ones(1, 4), Path(tempfile.mkdtemp()) / "probes")
    >>> sorted(done.count)
    ['linear', 'relu']
    """
    where = runtimes.parse(runtime)
    if not isinstance(where, OnnxRuntime) or where.calibrated or runtimes.is_mixed(where):
        raise ValueError(
            'probes are for "onnxruntime", whose files others read, too, "onnxruntime:int8" or "onnxruntime:int4"; not '
            f"for {runtime!r}."
        )
    where.package()
    model, folder = unwrapped(model), Path(folder)
    check_values(model)
    where.check(model)  # else all of it would be left out
    with naming_example(model, example_inputs):
        found = sorted(probed(model, example_inputs), key=lambda each: each.spelled)
    by_spelling = {each.spelled: each for each in found}
    count, left_out = Counter[str](), Counter[str]()
    with new_directory(folder) as made:
        with (made / PROBES).open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(("file", *COLUMNS[:-1]))
            for number, (spelled, each) in enumerate(track(by_spelling.items(), "writing probes", len(by_spelling)), 1):
                operation, shapes, numbers = spelled
                name = f"{number:04d}-{each.name}.onnx"
                try:
                    where.write_alone(*each.alone(), made / name)
                    count[each.name] += 1
                except ValueError:
                    (made / name).unlink(missing_ok=True)
                    name = ""
                    left_out[each.name] += 1
                rows.writerow((name, operation, shapes_text(shapes), " ".join(map(str, numbers))))
        where.write_alone(nn.Identity(), torch.ones(1, dtype=torch.float32, device="cpu"), made / NOTHING)
        script = resources.files(__package__) / f"{SCRIPT}.txt"
        (made / SCRIPT).write_text(script.read_text("utf-8"), "utf-8")
    return Probes(folder, dict(count), dict(left_out), str(where))


@torch.no_grad()
def probed(model: nn.Module, example_inputs: Any) -> set[Operation]:
    """The operations of a model, and those that it has at fewer units of each group that is not like another one."""
    example = without_cache(model, example_inputs)
    coupling = find_coupling(model, example)
    found = {*operations_of(model, example)}
    plans: dict[Any, Plan] = {}
    shapes = {name: tuple(each.shape) for name, each in tensors_of(model).items()}
    for groups in by_tie(each for each in coupling.groups if each.zeroed):
        alike = tuple(sorted((shapes[name], at, each.size) for each in groups for name, at in each.members))
        for counts in _counts_of(groups):
            key = alike, tuple(counts.values())
            if key not in plans and not coupling.contradicted(counts):
                kept = {each.name: np.arange(each.size) < counts[each.name] for each in groups}
                plans[key] = plan_of(model, coupling, kept)
    if not plans:
        raise ValueError("nothing of the model can leave, so there is nothing to time; secateur explain says why.")
    for each in _after(model, example, plans.values(), "looking at smaller models"):
        found |= {*each}
    return found


def _counts_of(groups: Sequence[Group]) -> Iterator[dict[str, int]]:
    """How many units stay of tied groups: those of levels, the least, and some around which times may have steps."""
    levels, exact = TiedGroups(groups, None, {}), TiedGroups(groups, 1, {})
    parts = {int(exact.choices()[-1]), *(each for _, each in counts_at(levels, FINE))}
    if exact.parts >= _AROUND_FROM:
        near = (round(share * exact.parts / _STEP) * _STEP + more for share in _AROUND for more in _BESIDE)
        parts |= {each for each in near if each % exact.step == 0 and each >= exact.least}
    return (exact.counts(each) for each in sorted(parts) if each < exact.parts)


def step_of(runtime: Elsewhere, model: nn.Module, example_inputs: Any) -> int | None:
    """Of which number of units a machine elsewhere wants multiples; None where its times have no steps."""
    if isinstance(runtime, Priced):
        return step_in(priced_rows({each: runtime.of(each) for each in probed(model, example_inputs)}))
    return step_in(runtime.rows) if isinstance(runtime, PriceTable) else None
