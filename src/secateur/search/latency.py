"""Milliseconds of operations, measured on this machine, each once for each shape; and of whole models, in turns.

Law: a time that stands on disk was measured on this processor with these versions, or it is measured again; the model
is left as it is.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from secateur.shrinking import Plan, carry_out
from secateur.support import (
    Between,
    Fields,
    alternating,
    device_of,
    in_mode,
    moved,
    plain,
    processor,
    ratio,
    run_example,
    seeded,
    tensors_in,
    track,
    unchanged,
    write_whole,
)

Key = TypeVar("Key", bound=Hashable)

FILE = "latency.json"
FORMAT, VERSION = "secateur latency", 1
_HINT = " Delete it: it is then measured again."
_ROUNDS = 5
_AT_LEAST = 0.001  # seconds of a turn
_NEAR = 1.5  # how many times larger the one of two sizes may be for one between them to be interpolated
_WHOLE_ROUNDS, _WHOLE_SECONDS = 9, 1.0
_LARGEST = 2**62


@dataclass(frozen=True)
class Operation:
    """A call of a function of torch, but for the values: its name and arguments with a # for each whole number, the
    numbers, and how to call it on tensors like those it was called with."""

    form: str
    numbers: tuple[int, ...]
    call: Callable[[], object] = field(compare=False, repr=False)


@dataclass(frozen=True)
class _Like:
    """A tensor of a call: what another one has to be like."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> _Like:
        return _Like(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def made(self) -> Tensor:
        found = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            # small enough that no product overflows, and no zero or denormal, which a processor may be slower with
            return found.fill_(0.01)
        return found.zero_()


class _Recording(TorchFunctionMode):
    """What a model calls, one after the other. What a call calls itself is part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Operation] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_memory(each) for each in tensors_in((args, kwargs)) if _has_storage(each)}
        like = _replaced((args, kwargs), Tensor, _Like.of)
        output = func(*args, **kwargs)
        if self._computes(func, output, given):
            form: list[str] = []
            numbers: list[int] = []
            _write(like, form, numbers)
            name = resolve_name(func) or getattr(func, "__name__", "")
            self.found[Operation(f"{name}{''.join(form)}", tuple(numbers), functools.partial(_called, func, like))] += 1
        return output

    @staticmethod
    def _computes(func: Any, output: Any, given: set[int]) -> bool:
        """Not what only looks at a tensor, or at the same numbers in another shape."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return False
        results = [each for each in tensors_in(output) if _has_storage(each)]
        in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")
        return bool(results) and (in_place or not all(_memory(each) in given for each in results))


def _has_storage(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.numel() > 0


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _replaced(value: Any, kind: type, new: Callable[[Any], Any]) -> Any:
    """The arguments with others for all of a kind."""
    if isinstance(value, kind):
        return new(value)
    if isinstance(value, dict):
        return {key: _replaced(each, kind, new) for key, each in value.items()}
    if isinstance(value, tuple | list):
        parts = [_replaced(each, kind, new) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _called(func: Any, like: Any) -> Callable[[], object]:
    """The call, on tensors that are made once."""
    args, kwargs = _replaced(like, _Like, _Like.made)
    return functools.partial(func, *args, **kwargs)


def _write(value: Any, form: list[str], numbers: list[int]) -> None:
    """Its form, and the whole numbers in it, in order."""
    if isinstance(value, bool) or not isinstance(value, int | _Like | dict | tuple | list):
        form.append(_plain(value))
    elif isinstance(value, int):
        form.append("#")
        numbers.append(value)
    elif isinstance(value, _Like):
        form.append(f"{value.dtype}@{value.device.type}[{'#,' * len(value.shape)}/{'#,' * len(value.strides)}]")
        numbers += [*value.shape, *value.strides]
    elif isinstance(value, dict):
        form.append("{")
        for key, each in value.items():
            form.append(f"{key}:")
            _write(each, form, numbers)
            form.append(",")
        form.append("}")
    else:
        form.append("(")
        for each in value:
            _write(each, form, numbers)
            form.append(",")
        form.append(")")


def _plain(value: Any) -> str:
    """A flag, a number or a word as it is; of anything else its class, since its address is another each time."""
    if value is None or isinstance(value, bool | float | str | torch.dtype | torch.device | slice):
        return repr(value)
    return type(value).__qualname__


@torch.no_grad()
def operations_of(model: nn.Module, example_inputs: Any) -> Counter[Operation]:
    """The operations that compute something when the model runs on the example, in evaluation mode, and how often.

    >>> found = operations_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.ones(2, 4))
    >>> sorted({each.form.partition("(")[0].rpartition(".")[2] for each in found})
    ['linear', 'relu']
    """
    recording = _Recording()
    with unchanged(model), in_mode(model, training=False), seeded(), recording:
        run_example(model, moved(example_inputs, device_of(model)))
    return recording.found


class Times:
    """Milliseconds of operations: those that are known, and, of all others, what is measured when they are asked for.

    An operation with sizes between those of two others that are known, on a straight line, is interpolated, if the
    larger of the two is not more than half as large again.

    Args:
        folder: where ``latency.json`` is, or will be; None: times are forgotten with this object. Those of another
            processor, number of threads or version of torch are not read.

    Raises:
        ValueError: the file is damaged.

    >>> times = Times()
    >>> found = operations_of(nn.Linear(4, 8), torch.ones(2, 4))
    >>> bool(times(found) > 0), times(found) == times(found)
    (True, True)
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path = None if folder is None else folder / FILE
        self.machine = _machine()
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
        for each in sorted(set(operations), key=lambda each: (each.form, each.numbers)):
            if self.known(each) is None:
                unknown.setdefault(each.form, {})[each.numbers] = each
        if not unknown:
            return
        for form, several in track(unknown.items(), "measuring operations", len(unknown)):
            calls = {numbers: each.call() for numbers, each in several.items()}
            with torch.no_grad():
                rounds = alternating(calls, _ROUNDS, at_least=_AT_LEAST, finish=_finish(), clock=_clock())  # type: ignore[arg-type]
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


def _machine() -> dict[str, str]:
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "processor": processor(),
        "accelerator": accelerator,
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }


def _clock() -> Callable[[], float]:
    """Of a single thread the time that it computed: what else the machine does would count as waiting."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.thread_time if alone else time.perf_counter


def _finish() -> Callable[[], object] | None:
    return torch.cuda.synchronize if torch.cuda.is_available() else None


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
    dense = operations_of(model, example_inputs)
    found: dict[Key, Counter[Operation]] = {}
    for key, plan in track(plans.items(), "timing levels", len(plans)):
        undo = carry_out(model, plan, None)
        try:
            found[key] = operations_of(model, example_inputs)
        finally:
            undo()
    # of what is the same before and after nothing has to be known
    gone = {key: dense - each for key, each in found.items()}
    new = {key: each - dense for key, each in found.items()}
    times.measure({each for some in (*gone.values(), *new.values()) for each in some})
    return {key: times(gone[key]) - times(new[key]) for key in plans}


@torch.no_grad()
def milliseconds_of(dense: nn.Module, smaller: nn.Module, example_inputs: Any) -> tuple[float, float]:
    """Of a pass of each on the example, in evaluation mode: timed in turns, the second by the median of the ratios."""
    inputs = moved(example_inputs, device_of(dense))
    calls = {"dense": functools.partial(run_example, dense, inputs)}
    calls["smaller"] = functools.partial(run_example, smaller, inputs)
    with unchanged(dense), unchanged(smaller), in_mode(dense, training=False), in_mode(smaller, training=False):
        rounds = alternating(calls, _WHOLE_ROUNDS, seconds=_WHOLE_SECONDS, finish=_finish(), clock=_clock())
    before = 1e3 * statistics.median(rounds["dense"])
    return before, before / ratio(rounds["smaller"], rounds["dense"])
