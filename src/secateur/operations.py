"""The operations that a model calls, one by one, and what each takes on a machine that is not this one: by a table that
was made there, or by a function.

Law: what a table says is what is returned; what it says nothing of, and has nothing on both sides of, is an error that
names it. The model stays as it is.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from secateur.runtimes import Runtime, Torch
from secateur.support import (
    described,
    device_of,
    in_mode,
    moved,
    printable,
    run_example,
    seeded,
    tensors_in,
    tensors_of,
    unchanged,
)

__all__ = ["COLUMNS", "Operation", "PriceTable", "Priced", "operations_of", "priced_rows", "shapes_text", "step_in"]


Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Operation:
    """A call of a function of torch, but for the values: its name and arguments with a # for each whole number, the
    numbers, and how to call it in a runtime on tensors like those it was called with."""

    form: str
    numbers: tuple[int, ...]
    func: Any = field(compare=False, repr=False)
    like: Any = field(default=((), {}), compare=False, repr=False)

    @property
    def name(self) -> str:
        """Of the function, without where it stands.

        >>> Operation("torch.nn.functional.linear(#)", (1,), nn.functional.linear).name
        'linear'
        """
        return self.form.partition("(")[0].rpartition(".")[2]

    @property
    def spelled(self) -> tuple[str, Shapes, tuple[int, ...]]:
        """``(name and arguments without sizes, the shapes of its tensors, its whole numbers)``, as a table names it.
        Where and how a tensor lies in memory is the affair of what runs it.

        >>> (found,) = operations_of(nn.Linear(4, 8), torch.ones(2, 4))
        >>> found.spelled
        ('linear(float32, =float32, =float32)', ((2, 4), (8, 4), (8,)), ())
        """
        shapes, numbers = list[tuple[int, ...]](), list[int]()
        args, kwargs = self.like
        said = [_spelled(each, shapes, numbers) for each in args]
        said += [f"{key}: {_spelled(each, shapes, numbers)}" for key, each in kwargs.items()]
        return f"{self.name}({', '.join(said)})", tuple(shapes), tuple(numbers)

    def alone(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """A model of it, and what that is called with."""
        made = _Alone(self.func, self.like)
        return made, made.inputs

    def call(self, runtime: Runtime | None = None) -> Callable[[], object]:
        """The call, on tensors that are made once; torch's own where a runtime does not take it by itself."""
        if runtime is not None and runtime != Torch():
            model, inputs = self.alone()
            with contextlib.suppress(ValueError):
                return runtime(model, inputs, traced=True)
        args, kwargs = _replaced(self.like, _Like, _Like.made)
        return functools.partial(self.func, *args, **kwargs)


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
            self.found[Operation(f"{name}{''.join(form)}", tuple(numbers), func, like)] += 1
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


def _spelled(value: Any, shapes: list[tuple[int, ...]], numbers: list[int]) -> str:
    """An argument without its sizes, which are added to these."""
    if isinstance(value, _Like):
        shapes.append(value.shape)
        return f"{'=' * value.is_constant}{str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, int) and not isinstance(value, bool):
        numbers.append(value)
        return "#"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_spelled(each, shapes, numbers)}' for key, each in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_spelled(each, shapes, numbers) for each in value)}]"
    return _plain(value)


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


# ---- What operations take elsewhere.

COLUMNS = ("operation", "shapes", "numbers", "milliseconds")  # of a table of times
STEPS = (32, 16, 8)  # that kernels may have
_FLAT = 0.25  # of what a width would gain by itself: where it gains no more, times have steps
_LINES = 3  # along so many of which a shape may be smaller at once

Sizes = tuple[int, ...]
Rows = Mapping[tuple[str, tuple[int, ...]], Mapping[Sizes, float]]  # by operation and how many sizes each part has


class _ByOperation:
    """A price of each operation; a model's is their sum."""

    def of(self, operation: Operation) -> float:
        raise NotImplementedError

    def total(self, model: nn.Module, example_inputs: Any) -> float:
        """Milliseconds of all operations of a model on the example."""
        return math.fsum(times * self.of(each) for each, times in operations_of(model, example_inputs).items())


@dataclass(frozen=True)
class Priced(_ByOperation):
    """Milliseconds by a function: ``cost(operation, shapes)``, of a name such as ``"linear"`` or ``"conv2d"`` and the
    shapes of its tensors in order, inputs and weights.

    >>> work = Priced(lambda operation, shapes: shapes[1][0] * shapes[1][1] / 1e3 if operation == "linear" else 0.0)
    >>> work.total(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.ones(2, 4))
    0.032
    """

    cost: Callable[[str, Shapes], float]

    def of(self, operation: Operation) -> float:
        """Of one.

        Raises:
            ValueError: what the function says is no number of milliseconds.
        """
        _, shapes, _ = operation.spelled
        found = self.cost(operation.name, shapes)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= sys.float_info.max:
            raise ValueError(
                f"{described(self.cost)} says that {operation.name} of {shapes_text(shapes)} takes {found!r}; it has "
                "to be milliseconds, 0 or more."
            )
        return float(found)

    def __str__(self) -> str:
        return f"the function {described(self.cost)}"


@dataclass(frozen=True, eq=False)
class PriceTable(_ByOperation):
    r"""Milliseconds by a table that was made elsewhere, of `secateur.search.write_probes`.

    A shape that it has not is interpolated between its two neighbours in width; one that is smaller in several ways, as
    a convolution with fewer channels in and out, by the share of each.

    Attributes:
        path: where it was read.
        sha256: of the file.
        rows: ``{(operation, sizes of each part): {sizes: milliseconds}}``.

    >>> import tempfile
    >>> path, linear = Path(tempfile.mkdtemp()) / "board.csv", '"linear(float32, =float32, =float32)"'
    >>> rows = [",".join(COLUMNS), f"{linear},2x4 8x4 8,,1.5", f"{linear},2x4 4x4 4,,1.0"]
    >>> _ = path.write_text("\n".join(rows))
    >>> PriceTable.read(path).total(nn.Linear(4, 6), torch.ones(2, 4))
    1.25
    """

    path: Path
    sha256: str
    rows: Rows = field(repr=False)

    @classmethod
    def read(cls, path: Path | str) -> PriceTable:
        """The table in a file; commas, or semicolons as spreadsheets write them, with commas in numbers.

        Raises:
            FileNotFoundError: there is none.
            ValueError: a column is not there, or a row is no operation with a time.
        """
        path = Path(path)
        data = path.read_bytes()
        try:
            lines = data.decode("utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise ValueError(f"{path}: is no text in UTF-8, and so no table of times.") from None
        first = lines[0] if lines else ""
        mark = ";" if first.count(";") > first.count(",") else ","
        reader = csv.DictReader(lines, delimiter=mark)
        try:
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            read = [(reader.line_num, row) for row in reader]
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: is no row of a table ({error}).") from None
        if missing:
            hint = " Run time_probes.py there, which writes it." if missing == ["milliseconds"] else ""
            raise ValueError(
                f"{path}: has no column {missing[0]}; a table of times has {', '.join(COLUMNS)}, as board.csv.{hint}"
            )
        rows: dict[tuple[str, tuple[int, ...]], dict[Sizes, float]] = {}
        for line, row in read:
            operation, shapes, numbers, ms = _read(path, line, row, mark)
            key, sizes = _key(operation, shapes, numbers)
            its = rows.setdefault(key, {})
            if sizes in its:
                raise ValueError(f"{path}, line {line}: {operation} of {shapes_text(shapes)} has a time already.")
            its[sizes] = ms
        if not rows:
            raise ValueError(f"{path}: holds no times.")
        return cls(path, hashlib.sha256(data).hexdigest(), rows)

    def of(self, operation: Operation) -> float:
        """Of one.

        Raises:
            ValueError: it has no time of it, and none on both sides.
        """
        word, shapes, numbers = operation.spelled
        key, sizes = _key(word, shapes, numbers)
        found = self.rows.get(key, {}).get(sizes)
        if found is None:
            found = _within(sizes, self._corners(key))
        if found is None:
            said = f"{word}, {shapes_text(shapes)}{f', {shapes_text([numbers])}' if numbers else ''}"
            raise ValueError(
                f"{self.path}: has no time of {printable(said, 400)}, nor of shapes on both sides of it. A table is of "
                "one model, and of one size of batch: make probes of this model with the --batch and --tokens that it "
                "is run with (secateur cost), or add this row."
            )
        return found

    def _corners(self, key: tuple[str, tuple[int, ...]]) -> Sequence[_Corner]:
        if key not in self._found:
            self._found[key] = corners_of(self.rows.get(key, {}))
        return self._found[key]

    @functools.cached_property
    def _found(self) -> dict[tuple[str, tuple[int, ...]], Sequence[_Corner]]:
        return {}

    def __str__(self) -> str:
        return f"the table {printable(self.path.name)} ({self.sha256[:12]})"


def priced_rows(times: Mapping[Operation, float]) -> Rows:
    """As a table has them.

    >>> times = {each: 1.5 for each in operations_of(nn.Linear(4, 8), torch.ones(2, 4))}
    >>> [*priced_rows(times).values()]
    [{(2, 4, 8, 4, 8): 1.5}]
    """
    found: dict[tuple[str, tuple[int, ...]], dict[Sizes, float]] = {}
    for operation, ms in times.items():
        key, sizes = _key(*operation.spelled)
        found.setdefault(key, {})[sizes] = ms
    return found


def shapes_text(shapes: Iterable[Sequence[int]]) -> str:
    """
    >>> shapes_text([(2, 4), (), (8,)])
    '2x4 scalar 8'
    """
    return " ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)


def _key(operation: str, shapes: Shapes, numbers: Sequence[int]) -> tuple[tuple[str, tuple[int, ...]], Sizes]:
    return (operation, (*map(len, shapes), len(numbers))), (*itertools.chain(*shapes), *numbers)


def _read(path: Path, line: int, row: Mapping[str, Any], mark: str) -> tuple[str, Shapes, tuple[int, ...], float]:
    operation, shapes, numbers, ms = (str(row[column] or "").strip() for column in COLUMNS)
    try:
        time = float(ms.replace(",", ".") if mark == ";" else ms)
    except ValueError:
        time = math.nan
    if not 0 <= time < math.inf:
        raise ValueError(f"{path}, line {line}: milliseconds is {printable(ms)!r}; it has to be a number, 0 or more.")
    try:
        each = tuple(() if part == "scalar" else tuple(map(int, part.split("x"))) for part in shapes.split())
        found = operation, each, tuple(map(int, numbers.split())), time
        np.array([*itertools.chain(*found[1]), *found[2]], dtype=np.float64)
        return found
    except (ValueError, OverflowError):
        raise ValueError(
            f"{path}, line {line}: shapes are such as 1x64x384 1536x384, and numbers such as -1 2, not "
            f"{printable(shapes)!r} and {printable(numbers)!r}."
        ) from None


@dataclass(frozen=True)
class _Corner:
    """A shape that none of the others is larger than, and the lines from it to smaller ones: along each direction, of
    which the largest part is 1, ``[(how much smaller, milliseconds)]``, itself first."""

    sizes: npt.NDArray[np.float64]
    ms: float
    lines: Mapping[tuple[float, ...], Sequence[tuple[float, float]]]


def corners_of(rows: Mapping[Sizes, float]) -> Sequence[_Corner]:
    """All of them.

    >>> (corner,) = corners_of({(8, 4): 2.0, (4, 4): 1.0, (8, 2): 1.5})
    >>> corner.lines
    {(1.0, 0.0): [(0.0, 2.0), (4.0, 1.0)], (0.0, 1.0): [(0.0, 2.0), (2.0, 1.5)]}
    """
    every = {sizes: np.array(sizes, dtype=np.float64) for sizes in rows}
    found = []
    for sizes, here in every.items():
        if any(other != sizes and (its >= here).all() for other, its in every.items()):
            continue
        lines: dict[tuple[float, ...], list[tuple[float, float]]] = {}
        for other, its in every.items():
            gap = here - its
            if other != sizes and (gap >= 0).all():
                length = float(gap.max())
                direction = tuple(np.round(gap / length, 9).tolist())
                lines.setdefault(direction, [(0.0, rows[sizes])]).append((length, rows[other]))
        found.append(_Corner(here, rows[sizes], {way: sorted(line) for way, line in lines.items()}))
    return found


def _within(sizes: Sizes, corners: Sequence[_Corner]) -> float | None:
    """What a shape takes that is not in the table: from the nearest corner the share along each line; None where
    something of it is on no line, or beyond its end."""
    wanted = np.array(sizes, dtype=np.float64)
    for corner in sorted(corners, key=lambda each: float(np.abs(each.sizes - wanted).sum())):
        gap = corner.sizes - wanted
        if (gap < 0).any():
            continue
        for count in range(1, _LINES + 1):
            for ways in itertools.combinations(corner.lines, count):
                if (share := _share(gap, ways, corner)) is not None:
                    return corner.ms * share
    return None


def _share(gap: npt.NDArray[np.float64], ways: Sequence[tuple[float, ...]], corner: _Corner) -> float | None:
    left, share = gap.copy(), 1.0
    for way in ways:
        direction = np.array(way)
        its = direction > 0
        length = float((gap[its] / direction[its]).max())
        if not length or np.abs(gap[its] - length * direction[its]).max() > 1e-6 * length or not left[its].any():
            return None
        line = corner.lines[way]
        if length > line[-1][0]:
            return None
        left[its] = 0
        there = float(np.interp(length, [at for at, _ in line], [ms for _, ms in line]))
        share *= there / corner.ms if corner.ms else 1.0
    return None if left.any() else share


def step_in(rows: Rows) -> int | None:
    """The largest of 32, 16 and 8 that times have steps of: of weights whose widths are no multiple of it the time is
    that of the next multiple, or more; None where that is so of none.

    It is so where all such widths together gain less than a quarter of what widths gain whose time is proportional.

    >>> times = {(1, 4, width, 4, width): float(-(-width // 16)) for width in (64, 60, 56, 48, 40, 32)}
    >>> step_in({("linear(float32, =float32, =float32)", (2, 2, 1)): times})
    16
    """
    for step in STEPS:
        gained = expected = 0.0
        for (operation, _), its in rows.items():
            if "=" not in operation:
                continue
            for corner in corners_of(its):
                for way, line in corner.lines.items():
                    for less, more, share in _pairs(np.array(way), line, corner.sizes, step):
                        gained += more - less
                        expected += more * share
        if expected and gained <= _FLAT * expected:
            return step
    return None


def _pairs(
    way: npt.NDArray[np.float64],
    line: Sequence[tuple[float, float]],
    corner: Sizes | npt.NDArray[np.float64],
    step: int,
) -> Iterator[tuple[float, float, float]]:
    """``(milliseconds of a width that is no multiple, of the next one that is, the share that it is narrower)``."""
    its = way > 0
    widths = [(np.asarray(corner)[its] - length * way[its], ms) for length, ms in line]
    for wide, ms in widths:
        if not (wide % step).any():
            continue
        after = [
            (above, more)
            for above, more in widths
            if not (above % step).any() and (above > wide).all() and (above - wide < step).all()
        ]
        for above, more in after[:1]:
            yield ms, more, float(1 - (wide / above).min())
