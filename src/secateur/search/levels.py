"""The file that holds the levels of one group; no pickle.

Law: a file is there whole or not at all, and what it says is held to its form before anything is believed; weights are
read when they are used.

Levels: for every group a few amounts of pruning, already repaired, each with its error and its cost.

Law: level 0 is the model bit for bit, and the model is restored, bit for bit, when a choice is removed; any
choice of one level for each group is a model. What is on disk is there whole, and is of one model and one request.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.models import digest
from secateur.runtimes import OnnxRuntime, rounding
from secateur.search.costs import TARGETS, CostModel, CostTerms, stored
from secateur.support import (
    Between,
    Column,
    Fields,
    LazyTensors,
    Part,
    Shown,
    Table,
    Undo,
    open_regular,
    plain,
    records,
    tensors_of,
    unwrapped,
    write_whole,
)

_HINT = " Make the levels again, in another folder."
_KEY = "secateur"  # a second key would be written before it or behind it, by chance
_KINDS = ("width", "heads", "layer")


@dataclass(frozen=True)
class Kept:
    """One level, without its tensors.

    Attributes:
        share, kept, error, loss: as of `Level`.
        left: ``{target: what is left of the group}``, as the bill counts it.
        values: names of the parameters that have values of their own.
    """

    share: Annotated[float, Between(0, 1)]
    kept: Annotated[int, Between(0)]
    error: Annotated[float, Between(0)]
    loss: Annotated[float, Between(0)] | None
    left: Mapping[str, Annotated[float, Between(0)]]
    values: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Entry:
    """What is known of the levels of a group, but for the dense one.

    Attributes:
        of_levels: the digest of the levels that they are a part of.
        name, kind: of the group.
        of: how many units it has; of a layer entries.
        groups: those of the coupling that leave together; of a layer its parameter.
        sizes: units of each.
        members: ``(parameter, dimension, number of the group)``: slices that become zero with its units.
        levels: the smallest share first.
    """

    of_levels: str
    name: str
    kind: str
    of: Annotated[int, Between(1)]
    groups: tuple[str, ...]
    sizes: tuple[Annotated[int, Between(1)], ...]
    members: tuple[tuple[str, Annotated[int, Between(0, 15)], Annotated[int, Between(0)]], ...]
    levels: tuple[Kept, ...]

    def wrong(self) -> str | None:
        """What of it contradicts the rest, if something does."""
        if self.kind not in _KINDS:
            return f"kind must be one of {', '.join(_KINDS)}"
        if len(self.groups) != len(self.sizes):
            return f"sizes is of {len(self.sizes)} groups, and there are {len(self.groups)}"
        if any(group >= len(self.sizes) for *_, group in self.members):
            return "members is of a group that there is not"
        if any(level.kept > self.of or {*level.left} != {*TARGETS} for level in self.levels):
            return f"levels keep more than there is, or are not of {', '.join(TARGETS)}"
        return None


@dataclass(frozen=True, eq=False)
class Stored(Entry):
    """The levels of a group, with their tensors.

    Attributes:
        tensors: ``units.M``, the unit of each position of member M or -1; ``kept.L.G``, which units of group G stay at
            level L; ``value.L.NAME``, a parameter at level L.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)

    def value(self, at: int, name: str) -> Tensor:
        """A parameter at a level, which are numbered from 1."""
        return self.tensors[f"value.{at}.{name}"]

    def mask(self, at: int, group: int) -> npt.NDArray[np.bool_]:
        """Which units of a group stay."""
        found: npt.NDArray[np.bool_] = self.tensors[f"kept.{at}.{group}"].numpy().astype(bool)
        return found

    def gone(self, at: int) -> Iterator[tuple[str, int, npt.NDArray[np.bool_]]]:
        """``(parameter, dimension, positions that become zero)``."""
        for number, (name, dim, group) in enumerate(self.members):
            units = self.tensors[f"units.{number}"].numpy()
            left = np.append(~self.mask(at, group), False)  # the last is of positions without a unit
            yield name, dim, left[units]


def file_of(folder: Path, name: str) -> Path:
    """Where the levels of a group are: a name of a parameter may be longer than one of a file."""
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.safetensors"


def write_entry(folder: Path, entry: Stored) -> Path:
    """Writes the levels of a group into a folder."""
    from safetensors.torch import save

    said = json.dumps({each.name: plain(getattr(entry, each.name)) for each in fields(Entry)}, allow_nan=False)
    tensors = {name: each.detach().cpu().contiguous() for name, each in entry.tensors.items()}
    return write_whole(file_of(folder, entry.name), save(tensors, {_KEY: f"{digest([said, tensors])} {said}"}))


def lies_in(folder: Path, entry: Stored) -> bool:
    """Whether a group's tensors are those of its file there."""
    return isinstance(entry.tensors, _OfFile) and entry.tensors.path == file_of(folder, entry.name)


class _OfFile(LazyTensors):
    """The tensors of a file."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        self._file: Any = safe_open(path, "pt")

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({**self},)  # the file may be gone: a copy has the tensors themselves

    @functools.cached_property
    def known(self) -> tuple[str, ...]:
        return tuple(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        found: Tensor = self._file.get_tensor(name)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._file.get_slice(name).get_dtype())

    def said(self) -> tuple[str, str]:
        """What is written of them, and the SHA-256 of all of it."""
        total, _, said = str((self._file.metadata() or {}).get(_KEY, "")).partition(" ")
        return said, total


def read_entry(folder: Path, name: str, digest: str) -> Stored:
    """The levels of a group in a folder.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or part of other levels.
    """
    from safetensors import SafetensorError

    path = file_of(folder, name)
    with open_regular(path):
        pass
    try:
        tensors = _OfFile(path)
        said, _ = tensors.said()
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged: no safetensors file ({error}).{_HINT}") from None
    read = Fields(records.parse_json(said.encode(), path, hint=_HINT), path, hint=_HINT)
    entry = read.whole(Entry)
    if entry.of_levels != digest or entry.name != name:
        raise ValueError(f"{path}: of other levels, which were made of another model, other data or otherwise.{_HINT}")
    if (why := entry.wrong()) is not None:
        raise read.wrong("", why)
    _check_tensors(read, entry, tensors)
    return Stored(**vars(entry), tensors=tensors)


def _check_tensors(read: Fields, entry: Entry, tensors: _OfFile) -> None:
    """Their names, types, sizes and values, and that units are units."""
    wanted: dict[str, tuple[str, int | None]] = {f"units.{at}": ("I32", None) for at in range(len(entry.members))}
    for at, level in enumerate(entry.levels, 1):
        if entry.kind != "layer":
            wanted |= {f"kept.{at}.{group}": ("U8", size) for group, size in enumerate(entry.sizes)}
        wanted |= {f"value.{at}.{name}": ("", None) for name in level.values}
    if set(wanted) != set(tensors):
        other = sorted(set(wanted) ^ set(tensors))
        raise read.wrong("", f"does not hold what it says: {', '.join(other[:3])}")
    for name, (dtype, size) in wanted.items():
        shape = tensors.shape(name)
        if dtype and (tensors.dtype(name) != dtype or len(shape) != 1 or (size is not None and shape != (size,))):
            raise read.wrong("", f"holds {name} as {tensors.dtype(name)} of shape {shape}")
    for at, (_, _, group) in enumerate(entry.members):
        units = tensors[f"units.{at}"].numpy()
        if len(units) and not (units.min() >= -1 and units.max() < entry.sizes[group]):
            raise read.wrong("", f"holds units.{at} of units that group {group} has not")
    said, total = tensors.said()
    if total != digest([said, tensors]):
        raise read.wrong("", "holds other values than were written: their SHA-256 is another")


def together(dense: Tensor, several: Sequence[Tensor]) -> Tensor:
    """The values of a parameter with the changes of all of these: a single one is as it is."""
    if len(several) == 1:
        return several[0]
    wide = dense.double()
    return torch.stack([each.to(wide) - wide for each in several]).sum(0).add_(wide).to(dense.dtype)


def in_order(levels: Sequence[Kept]) -> tuple[Kept, ...]:
    """With errors and losses that never fall; no losses where one is not known."""
    errors = rising([each.error for each in levels])
    known = all(each.loss is not None for each in levels)
    losses = rising([each.loss or 0.0 for each in levels])
    return tuple(
        replace(each, error=error, loss=loss if known else None)
        for each, error, loss in zip(levels, errors, losses, strict=True)
    )


def rising(values: Sequence[float]) -> list[float]:
    """Each at least as large as those before.

    >>> rising([0.1, 0.05, 0.3])
    [0.1, 0.1, 0.3]
    """
    found: list[float] = []
    for value in values:
        found.append(max(found[-1] if found else 0.0, value))
    return found


def tensor_of(mask: npt.NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy(mask.astype(np.uint8))


FORMAT, VERSION = "secateur levels", 1
FILE = "levels.json"


@dataclass(frozen=True)
class Level:
    """A level of a group: how much of it leaves, and the error and the cost then.

    Attributes:
        share: what was asked to leave; 0.0 is dense.
        kept, of: units that stay, of how many; of a layer entries.
        error: the squared error of the outputs of the group's consumers after repair, over their squares; 0.0 is dense,
            and a larger share never has a smaller error.
        loss: the divergence of the model's outputs to second order, per token or example; None where no slopes were
            measured.
        costs: what goes with the group then: "params", "macs", "bytes".
        bits: of its matrices, where these are chosen, too.
    """

    share: float
    kept: int
    of: int
    error: float
    loss: float | None
    costs: Mapping[str, float] = field(default_factory=dict)
    bits: int = 32


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of levels: SHA-256 of the model and of the batches, and the arguments as JSON."""

    model: str
    batches: str
    asked: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Of all of it."""
        text = json.dumps([self.model, self.batches, self.asked], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class _Said:
    """What ``levels.json`` says: what they were made of, the groups, why others have none, notes, and costs."""

    model: str
    batches: str
    asked: Mapping[str, Any]
    groups: tuple[str, ...]
    left_alone: Mapping[str, str]
    in_blocks: Mapping[str, str]
    costs: CostTerms


class Levels(Mapping[str, tuple[Level, ...]], Shown):
    """A mapping of each group to its levels, ``{group: (dense, a smaller share, ..)}``; prints as a table.

    A choice is ``{group: number of the level}``; groups that it does not name stay dense.

    Attributes:
        kind: ``{group: "width", "heads" or "layer"}``.
        groups: ``{group: groups of the coupling}`` that leave with it, by their names; of a layer its parameter.
        members: ``{group: parameters}`` of which a part leaves with it.
        fixed: ``{target: cost}`` of what is in no group: with all dense levels' costs it is the model's. Where groups
            share a tensor, as channels in and out of a convolution, it is less: each has the whole of it. `cost` says
            what any choice costs.
        left_alone: ``{group: why it has no levels}``.
        in_blocks: ``{parameter: note}`` of those whose Gram matrix was summed in blocks of inputs; of a run that was
            killed, of what was made after it.
        made: what they were made of.

    >>> from secateur.search import make_levels
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)))
    >>> levels = make_levels(model, [torch.randn(64, 4)], shares=(0.5,))
    >>> [(name, [level.kept for level in each]) for name, each in levels.items()]
    [('0.0.weight', [8, 4]), ('1.0.weight', [8, 4])]
    >>> before = model(torch.ones(1, 4))
    >>> with levels.assembled(model, {"1.0.weight": 1}):
    ...     int(model[1][0].weight.any(dim=1).sum())
    4
    >>> torch.equal(model(torch.ones(1, 4)), before)
    True
    """

    def __init__(
        self,
        entries: Sequence[Stored],
        bill: CostModel,
        made: Fingerprint,
        left_alone: Mapping[str, str],
        in_blocks: Mapping[str, str],
    ) -> None:
        self.made = made
        self.left_alone, self.in_blocks = dict(left_alone), dict(in_blocks)
        self._bill = bill
        self._entries = {entry.name: entry for entry in entries}
        self._numbers = {entry.name: number for number, entry in enumerate(entries)}
        self.kind = {entry.name: entry.kind for entry in entries}
        self.groups = {entry.name: entry.groups for entry in entries}
        self.members = {entry.name: {name for name, *_ in entry.members} for entry in entries}
        self.fixed = {target: bill.fixed(target) for target in TARGETS}
        self._levels = {entry.name: self._levels_of(number, entry) for number, entry in enumerate(entries)}
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:  # the models that were found to be theirs are looked at again
        return type(self), ([*self._entries.values()], self._bill, self.made, self.left_alone, self.in_blocks)

    def _levels_of(self, number: int, entry: Stored) -> tuple[Level, ...]:
        def costs(left: Mapping[str, float]) -> dict[str, float]:
            return {target: self._bill.own(target, number, left[target]) for target in TARGETS}

        whole = dict.fromkeys(TARGETS, self._bill.dense[number])
        first = Level(0.0, entry.of, entry.of, 0.0, 0.0 if all(_has_loss(entry)) else None, costs(whole))
        return first, *(
            Level(each.share, each.kept, entry.of, each.error, each.loss, costs(each.left)) for each in entry.levels
        )

    def __getitem__(self, name: str) -> tuple[Level, ...]:
        return self._levels[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._levels)

    def __len__(self) -> int:
        return len(self._levels)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    # ---- what a choice costs --------------------------------------------------------------------------------------

    def cost(self, choice: Mapping[str, int], target: str, densities: Mapping[str, float] | None = None) -> float:
        """The cost of the model at a choice: "params" (entries that are not zero), "macs" (multiply-adds of the
        example, those with zeros left out) or "bytes" (of parameters and buffers; of sparse layers what is kept and a
        bit an entry, or dense if that is less). It is no sum over groups that share a tensor. With ``densities``, of
        matrices by their names, these are counted instead of what their levels say."""
        if target not in TARGETS:
            raise ValueError(f"target must be one of {', '.join(map(repr, TARGETS))}, not {target!r}.")
        left = {
            self._numbers[name]: self._entries[name].levels[at - 1].left[target]
            for name, at in self._chosen(choice).items()
        }
        for name, density in (densities or {}).items():
            entry = self._entries[f"{name}:layer"]
            itemsize = entry.value(1, name).element_size() if target == "bytes" else 0
            left[self._numbers[entry.name]] = stored(density, itemsize) if itemsize else density
        return self._bill.of(target, left)

    # ---- what a choice is -----------------------------------------------------------------------------------------

    def kept(self, choice: Mapping[str, int]) -> dict[str, npt.NDArray[np.bool_]]:
        """``{group of the coupling: which units stay}`` of the groups of which some leave; see `find_coupling`."""
        found: dict[str, npt.NDArray[np.bool_]] = {}
        for name, at in self._chosen(choice).items():
            entry = self._entries[name]
            if entry.kind != "layer":
                found |= {group: entry.mask(at, axis) for axis, group in enumerate(entry.groups)}
        return found

    def weights(self, model: nn.Module, choice: Mapping[str, int]) -> dict[str, Tensor]:
        """New values of the parameters that a choice changes, in dense shape.

        Where two levels change a parameter its values are the dense ones and both changes; then what left is zero.
        """
        model = unwrapped(model)
        self._check(model)
        parameters = dict(model.named_parameters())
        found: dict[str, list[Tensor]] = {}
        zeros: dict[str, list[Tensor]] = {}
        gone: dict[str, list[tuple[int, npt.NDArray[np.bool_]]]] = {}
        for name, at in self._chosen(choice).items():
            entry = self._entries[name]
            for key in entry.levels[at - 1].values:
                value = entry.value(at, key)
                found.setdefault(key, []).append(value)
                if entry.kind == "layer":
                    zeros.setdefault(key, []).append(value == 0)
            for member, dim, places in entry.gone(at):
                gone.setdefault(member, []).append((dim, places))
        new: dict[str, Tensor] = {}
        for key in dict.fromkeys([*found, *gone]):
            values, slices = found.get(key, ()), gone.get(key, ())
            _check_fit(key, parameters, values, slices)
            new[key] = _combined(parameters[key].detach(), values, zeros.get(key, ()), slices)
        return new

    def touched(self, choice: Mapping[str, int]) -> set[str]:
        """The parameters that a choice changes, or takes a part of."""
        found: set[str] = set()
        for name, at in self._chosen(choice).items():
            entry = self._entries[name]
            found |= {*entry.levels[at - 1].values, *(member for member, _, _ in entry.members)}
        return found

    @contextlib.contextmanager
    def assembled(self, model: nn.Module, choice: Mapping[str, int]) -> Iterator[nn.Module]:
        """A context in which the model has these levels' weights, in dense shape: units that left are zeros, and their
        consumers are repaired. Afterwards the model is restored, bit for bit.

        Raises:
            KeyError: there is no such group.
            ValueError: it has no such level, or the model is not the one that the levels were made of.
        """
        inner = unwrapped(model)
        new = self.weights(inner, choice)
        parameters = dict(inner.named_parameters())
        undo = Undo()
        try:
            for name, value in new.items():
                undo.call(_set_data, parameters[name], parameters[name].data)
                parameters[name].data = value
            yield model
        finally:
            undo.roll_back()

    def _chosen(self, choice: Mapping[str, int]) -> dict[str, int]:
        """Without the groups that stay dense."""
        for name, at in choice.items():
            if name not in self._levels:
                raise KeyError(f"there are no levels of {name!r}; of {', '.join([*self._levels][:5])}, ..")
            if not 0 <= at < len(self._levels[name]):
                raise ValueError(f"{name} has levels 0 to {len(self._levels[name]) - 1}, and none of {at}.")
        return {name: at for name, at in choice.items() if at}

    def _check(self, model: nn.Module) -> None:
        """Once for each model."""
        if model in self._known:
            return
        if digest_of(model) != self.made.model:
            raise ValueError(
                f"these levels are of another {type(model).__name__}, or of one with other weights; make them of this "
                "one, or load the weights that they were made of."
            )
        self._known.add(model)

    # ---- on disk --------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Writes them into a folder, which is made if it is not there: a safetensors file for each group, and last
        ``levels.json``."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for entry in self._entries.values():
            if not lies_in(folder, entry):
                write_entry(folder, entry)
        said = _Said(
            **vars(self.made),
            groups=tuple(self._entries),
            left_alone=self.left_alone,
            in_blocks=self.in_blocks,
            costs=self._bill.terms(),
        )
        write_whole(folder / FILE, json.dumps({"format": FORMAT, "version": VERSION, **plain(said)}, indent=1))

    @classmethod
    def load(cls, folder: str | Path) -> Levels:
        """Those in a folder; weights are read when they are used.

        Raises:
            FileNotFoundError: there are none.
            ValueError: a file is damaged, or of other levels.
        """
        folder = Path(folder)
        read = Fields.read(folder / FILE, hint=_HINT).of_format(FORMAT, VERSION)
        said = read.whole(_Said)
        made = Fingerprint(said.model, said.batches, said.asked)
        if len({*said.groups}) != len(said.groups):
            raise read.wrong("groups", "names a group twice")
        if (why := said.costs.wrong()) is not None or len(said.costs.dense) != len(said.groups):
            raise read.wrong("costs", why or f"is of {len(said.costs.dense)} groups, and there are {len(said.groups)}")
        entries = [read_entry(folder, name, made.digest) for name in said.groups]
        return cls(entries, said.costs.model(), made, said.left_alone, said.in_blocks)

    # ---- shown ----------------------------------------------------------------------------------------------------

    def content(self) -> Iterator[Part]:
        yield Table.of("groups", self._levels, *self.columns())
        yield ""
        count = sum(len(each) - 1 for each in self._levels.values())
        yield (
            f"{count} levels of {len(self)} groups: the squared relative error of what consumes a group, where so much "
            "of it alone leaves."
        )
        if self.left_alone:
            yield f"{len(self.left_alone)} groups have no levels, such as {_first(self.left_alone)}."

    def columns(self) -> Iterator[Column]:
        """Of a table of groups: what each is, and what it costs to leave a share of it out."""
        yield Column("Group", shown_name)
        yield Column("Kind", lambda name: self.kind[name])
        yield Column.count("Of", lambda name: self[name][0].of)
        for share in self.shares:
            yield Column.figure(f"error {told_share(share)}", self.at(share, lambda level, _: level.error), ".4f")

    @property
    def shares(self) -> list[float]:
        """Those of all levels, in order."""
        return sorted({level.share for each in self._levels.values() for level in each[1:]})

    def at(self, share: float, of: Callable[[Level, int], Any]) -> Callable[[str], Any]:
        """What ``of`` says of a group's level of this share and its number; None where it has none."""

        def found(name: str) -> Any:
            numbers = [at for at, level in enumerate(self[name]) if at and level.share == share]
            return of(self[name][numbers[0]], numbers[0]) if numbers else None

        return found


BYTES = {32: 4.0, 8: 1.0, 4: 0.64}  # of a weight of so many bits; of 4 a scale and an offset for 32 of them
MATRIX = "matrix"  # the kind of a linear or table that is in no group: it stays whole, in fewer bits


class Rung(NamedTuple):
    """A level of a group, the bits of its matrices then, and what is lost by both."""

    level: int
    bits: int
    loss: float


class Matrix(NamedTuple):
    """The weight of a linear, a convolution or a table that can have fewer bits, and the module that has it."""

    module: str
    weight: str
    shape: tuple[int, ...]
    itemsize: int
    is_table: bool


class RoundedLevels(Levels):
    """Levels of groups, and bits of their matrices, on one ladder: a number is of a level of `exact` and of bits.

    Law: of the model that it assembles, what levels change is changed as `exact` does it, and then linears and tables
    compute with their bits; bytes are those of the weights as they are written.

    Args:
        exact: the levels without bits.
        rungs: ``{group, or name of a matrix that is in none: rungs}``, the first of which is dense and of 32 bits.
        matrices: ``{group, or name: matrices}`` whose bits they are.
    """

    def __init__(
        self, exact: Levels, rungs: Mapping[str, Sequence[Rung]], matrices: Mapping[str, Sequence[Matrix]]
    ) -> None:
        vars(self).update(vars(exact))
        self.exact, self.rungs, self.matrices = exact, rungs, matrices
        alone = [name for name in rungs if name not in exact]
        self.kind = exact.kind | dict.fromkeys(alone, MATRIX)
        self.groups = exact.groups | dict.fromkeys(alone, ())
        self._gone: dict[tuple[str, int], list[tuple[str, int, int]]] = {}
        self._levels = {**exact} | {name: self._rounded(name, its) for name, its in rungs.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.exact, self.rungs, self.matrices)

    def _rounded(self, name: str, rungs: Sequence[Rung]) -> tuple[Level, ...]:
        of = self.exact.get(name) or (Level(0.0, 1, 1, 0.0, 0.0, dict.fromkeys(TARGETS, 0.0)),)
        found = []
        for each in rungs:
            level = of[each.level]
            saved = self._saved({name: each.level} if each.level else {}, {name: each.bits})
            costs = {**level.costs, "bytes": level.costs["bytes"] - saved}
            found.append(replace(level, error=each.loss, loss=each.loss, costs=costs, bits=each.bits))
        return tuple(found)

    def bits(self, choice: Mapping[str, int]) -> dict[str, int]:
        """``{module: bits}`` of those with fewer than 32; of a table they are 8."""
        its = self._bits(choice).items()
        return {one.module: max(bits, 8 * one.is_table) for name, bits in its for one in self.matrices.get(name, ())}

    def _bits(self, choice: Mapping[str, int]) -> dict[str, int]:
        every = {name: self[name][at].bits for name, at in choice.items()}
        return {name: bits for name, bits in every.items() if bits < 32}

    def cost(self, choice: Mapping[str, int], target: str, densities: Mapping[str, float] | None = None) -> float:
        found = super().cost(choice, target, densities)
        return found - self._saved(self._chosen(choice), self._bits(choice)) if target == "bytes" else found

    def _saved(self, levels: Mapping[str, int], bits: Mapping[str, int]) -> float:
        """Bytes less than the weights have in float; a table that a head is tied to is there twice, if rounded."""
        left: dict[tuple[str, int], int] = {}
        for name, at in levels.items():
            for member, dim, gone in self._leaving(name, at):
                left[member, dim] = left.get((member, dim), 0) + gone
        saved = 0.0
        for name, its in bits.items():
            once = dict[str, Matrix]()
            for one in self.matrices.get(name, ()):
                count = math.prod(size - left.get((one.weight, dim), 0) for dim, size in enumerate(one.shape))
                saved += count * (one.itemsize * (one.weight not in once) - BYTES[max(its, 8 * one.is_table)])
                once[one.weight] = one
        return saved

    def _leaving(self, name: str, at: int) -> list[tuple[str, int, int]]:
        """``(parameter, dimension, how many positions of it leave)``."""
        if (name, at) not in self._gone:
            gone = self._entries[name].gone(at)
            self._gone[name, at] = [(member, dim, int(places.sum())) for member, dim, places in gone]
        return self._gone[name, at]

    @contextlib.contextmanager
    def assembled(self, model: nn.Module, choice: Mapping[str, int]) -> Iterator[nn.Module]:
        with super().assembled(model, choice), rounding(unwrapped(model), self.bits(choice)):
            yield model

    def _chosen(self, choice: Mapping[str, int]) -> dict[str, int]:
        its = super()._chosen(choice).items()
        return {name: at for name, rung in its if (at := self.rungs[name][rung].level if name in self.rungs else rung)}


CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d


def matrices_of(model: nn.Module, runtime: OnnxRuntime) -> list[list[Matrix]]:
    """The linears and tables of a model whose weights can have fewer bits there, and convolutions, if it calibrates;
    those that share a weight, together."""
    kinds = {nn.Linear, nn.Embedding, *(CONVOLUTIONS if runtime.calibrated else ())}
    found: dict[str, list[Matrix]] = {}
    names = {id(each): name for name, each in model.named_parameters()}
    for name, module in model.named_modules():
        its: Any = getattr(module, "weight", None)
        if type(module) in kinds and id(its) in names:
            weight = names[id(its)]
            one = Matrix(name, weight, tuple(its.shape), its.element_size(), isinstance(module, nn.Embedding))
            found.setdefault(weight, []).append(one)
    return [*found.values()]


def told(value: float) -> str:
    """A number whose size matters, small or large.

    >>> told(0.0), told(0.00012345), told(1.5), told(123.456)
    ('0', '0.000123', '1.5', '123')
    """
    return f"{value:.3g}"


def told_share(share: float) -> str:
    """A share that was asked for, as it was asked.

    >>> told_share(0.3), told_share(0.125)
    ('30%', '12.5%')
    """
    return f"{100 * share:g}%"


def shown_name(name: str) -> str:
    """The name of a group, or of a layer's parameter."""
    return name.removesuffix(":layer")


def digest_of(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers of a model, with their names."""
    return digest([dict(tensors_of(unwrapped(model)))])


def _first(reasons: Mapping[str, str]) -> str:
    name, why = next(iter(reasons.items()))
    return f"{name}: {why}"


def _has_loss(entry: Stored) -> list[bool]:
    return [each.loss is not None for each in entry.levels]


def _set_data(tensor: Tensor, data: Tensor) -> None:
    tensor.data = data


def _check_fit(
    name: str,
    parameters: Mapping[str, Tensor],
    new: Sequence[Tensor],
    gone: Sequence[tuple[int, npt.NDArray[np.bool_]]],
) -> None:
    """A file of levels is a file like others."""
    shape = tuple(parameters[name].shape) if name in parameters else None
    if shape is None:
        raise ValueError(f"the levels change {name}, which is no parameter of the model; make them again.")
    if any(tuple(each.shape) != shape for each in new) or any(
        dim >= len(shape) or len(places) != shape[dim] for dim, places in gone
    ):
        raise ValueError(f"the levels of {name} do not fit its shape {shape}; make them again.")


def _combined(
    dense: Tensor, new: Sequence[Tensor], zeros: Sequence[Tensor], gone: Sequence[tuple[int, npt.NDArray[np.bool_]]]
) -> Tensor:
    found = torch.empty_like(dense).copy_(together(dense, new)) if new else dense.clone()
    for mask in zeros:
        found.masked_fill_(mask.to(found.device), 0)
    for dim, places in gone:
        shape = [1] * found.dim()
        shape[dim] = -1
        found.masked_fill_(torch.from_numpy(places).reshape(shape).to(found.device), 0)
    return found
