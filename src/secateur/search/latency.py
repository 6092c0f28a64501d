"""Milliseconds of operations, measured on this machine in the runtime that is asked for, each once for each shape.

Law: a time that stands on disk was measured on this processor with these versions, or it is measured again; the model
is left as it is.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from secateur.runtimes import Runtime, Torch, finish
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
    run_example,
    seeded,
    tensors_in,
    tensors_of,
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
_LARGEST = 2**62


@dataclass(frozen=True)
class Operation:
    """A call of a function of torch, but for the values: its name and arguments with a # for each whole number, the
    numbers, and how to call it in a runtime on tensors like those it was called with."""

    form: str
    numbers: tuple[int, ...]
    call: Callable[..., Callable[[], object]] = field(compare=False, repr=False)


@dataclass(frozen=True)
class _Like:
    """A tensor of a call: what another one has to be like; whether the model has it, as it has a weight."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_constant: bool = False

    @staticmethod
    def of(tensor: Tensor, constants: Collection[int] = ()) -> _Like:
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return _Like(shape, strides, tensor.dtype, tensor.device, id(tensor) in constants)

    def made(self) -> Tensor:
        found = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            # small enough that no product overflows, and no zero or denormal, which a processor may be slower with
            return found.fill_(0.01)
        return found.zero_()


class _Recording(TorchFunctionMode):
    """What a model calls, one after the other. What a call calls itself is part of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: Counter[Operation] = Counter()
        self._constants = {id(each) for each in tensors_of(model).values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_memory(each) for each in tensors_in((args, kwargs)) if _has_storage(each)}
        like = _replaced((args, kwargs), Tensor, functools.partial(_Like.of, constants=self._constants))
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


def _called(func: Any, like: Any, runtime: Runtime | None = None) -> Callable[[], object]:
    """The call, on tensors that are made once; torch's own where a runtime does not take it by itself."""
    if runtime is not None and runtime != Torch():
        alone = _Alone(func, like)
        with contextlib.suppress(ValueError):
            return runtime(alone, alone.inputs, traced=True)
    args, kwargs = _replaced(like, _Like, _Like.made)
    return functools.partial(func, *args, **kwargs)


class _Alone(nn.Module):
    """A model of one operation: what was constant is a parameter, so that the runtime may lay it out as it likes."""

    def __init__(self, func: Any, like: Any) -> None:
        super().__init__()
        self.func, self.like = func, like
        self.constants, inputs = nn.ParameterList(), list[Tensor]()
        for each in _all_like(like):
            made = each.made()
            if each.is_constant:
                self.constants.append(nn.Parameter(made, requires_grad=False))
            else:
                inputs.append(made)
        self.inputs = tuple(inputs)

    def forward(self, *inputs: Tensor) -> Any:
        given, own = iter(inputs), iter(self.constants)
        args, kwargs = _replaced(self.like, _Like, lambda each: next(own if each.is_constant else given))
        return self.func(*args, **kwargs)


def _all_like(value: Any) -> list[_Like]:
    """The tensors of a call, in the order in which they are replaced."""
    found: list[_Like] = []
    _replaced(value, _Like, found.append)
    return found


def _write(value: Any, form: list[str], numbers: list[int]) -> None:
    """Its form, and the whole numbers in it, in order."""
    if isinstance(value, bool) or not isinstance(value, int | _Like | dict | tuple | list):
        form.append(_plain(value))
    elif isinstance(value, int):
        form.append("#")
        numbers.append(value)
    elif isinstance(value, _Like):
        kind = "=" if value.is_constant else ""
        form.append(f"{kind}{value.dtype}@{value.device.type}[{'#,' * len(value.shape)}/{'#,' * len(value.strides)}]")
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
    recording = _Recording(model)
    with unchanged(model), in_mode(model, training=False), seeded(), recording:
        run_example(model, moved(example_inputs, device_of(model)))
    return recording.found


class Times:
    """Milliseconds of operations: those that are known, and, of all others, what is measured when they are asked for.

    An operation with sizes between those of two others that are known, on a straight line, is interpolated, if the
    larger of the two is not more than half as large again.

    Args:
        folder: where ``latency.json`` is, or will be; None: times are forgotten with this object. Those of another
            processor, number of threads or version of what runs them are not read.
        runtime: where; torch if left out. What it does not take by itself is timed in torch.

    Raises:
        ValueError: the file is damaged.

    >>> times = Times()
    >>> found = operations_of(nn.Linear(4, 8), torch.ones(2, 4))
    >>> bool(times(found) > 0), times(found) == times(found)
    (True, True)
    """

    def __init__(self, folder: Path | None = None, runtime: Runtime | None = None) -> None:
        self.path = None if folder is None else folder / FILE
        self.runtime = Torch() if runtime is None else runtime
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
        for each in sorted(set(operations), key=lambda each: (each.form, each.numbers)):
            if self.known(each) is None:
                unknown.setdefault(each.form, {})[each.numbers] = each
        if not unknown:
            return
        for form, several in track(unknown.items(), "measuring operations", len(unknown)):
            with torch.no_grad():
                calls = {numbers: each.call(self.runtime) for numbers, each in several.items()}
                how = {"at_least": _AT_LEAST, "finish": finish(), "clock": self.runtime.clock}
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


def _machine(runtime: Runtime) -> dict[str, str]:
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "processor": processor(),
        "accelerator": accelerator,
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
