"""Levels: for every group a few amounts of pruning, already repaired, each with its error and its cost.

Law: level 0 is the model bit for bit, and the model is restored, bit for bit, when a choice is removed; any
choice of one level for each group is a model. What is on disk is there whole, and is of one model and one request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.blockwise import digest
from secateur.search.costs import TARGETS, Bill, bill_in, stored
from secateur.search.files import Stored, lies_in, read_entry, write_entry
from secateur.support import Fields, Part, Rows, Shown, Undo, tensors_of, unwrapped, write_whole

__all__ = ["Level", "Levels", "Made", "digest_of", "shown_name", "told", "told_share"]

FORMAT, VERSION = "secateur levels", 1
FILE = "levels.json"
_HINT = " Make the levels again, in another folder."


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
    """

    share: float
    kept: int
    of: int
    error: float
    loss: float | None
    costs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    """The fingerprint of levels: SHA-256 of the model and of the batches, and the arguments as JSON."""

    model: str
    batches: str
    asked: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Of all of it."""
        text = json.dumps([self.model, self.batches, self.asked], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class Levels(Mapping[str, tuple[Level, ...]], Shown):
    """A mapping of each group to its levels, ``{group: (dense, a smaller share, ..)}``; prints as a table.

    A choice is ``{group: number of the level}``; groups that it does not name stay dense.

    Attributes:
        kind: ``{group: "width", "heads" or "layer"}``.
        groups: ``{group: groups of the coupling}`` that leave with it, by their names; of a layer its parameter.
        fixed: ``{target: cost}`` of what is in no group: with all dense levels' costs it is the model's. Where groups
            share a tensor, as channels in and out of a convolution, it is less: each has the whole of it. `cost` says
            what any choice costs.
        left_alone: ``{group: why it has no levels}``.
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

    def __init__(self, entries: Sequence[Stored], bill: Bill, made: Made, left_alone: Mapping[str, str]) -> None:
        self.made = made
        self.left_alone = dict(left_alone)
        self._bill = bill
        self._entries = {entry.name: entry for entry in entries}
        self._numbers = {entry.name: number for number, entry in enumerate(entries)}
        self.kind = {entry.name: entry.kind for entry in entries}
        self.groups = {entry.name: entry.groups for entry in entries}
        self.fixed = {target: bill.fixed(target) for target in TARGETS}
        self._levels = {entry.name: self._levels_of(number, entry) for number, entry in enumerate(entries)}
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()

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
                write_entry(folder, entry, self.made.digest)
        write_whole(folder / FILE, json.dumps(self._to_json(), indent=1))

    def _to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.made.model,
            "batches": self.made.batches,
            "asked": dict(self.made.asked),
            "groups": list(self._entries),
            "left_alone": self.left_alone,
            "costs": self._bill.to_json(),
        }

    @classmethod
    def load(cls, folder: str | Path) -> Levels:
        """Those in a folder; weights are read when they are used.

        Raises:
            FileNotFoundError: there are none.
            ValueError: a file is damaged, or of other levels.
        """
        folder = Path(folder)
        read = Fields.read(folder / FILE, hint=_HINT)
        if read.take("format", str) != FORMAT or read.take("version", int) != VERSION:
            raise read.wrong("format", f"is not {FORMAT!r} of version {VERSION}")
        read.only("format", "version", "model", "batches", "asked", "groups", "left_alone", "costs")
        made = Made(read.take("model", str), read.take("batches", str), read.take("asked", dict))
        entries = [read_entry(folder, name, made.digest) for name in read.each("groups", str)]
        if len({entry.name for entry in entries}) != len(entries):
            raise read.wrong("groups", "names a group twice")
        bill = bill_in(read.inner("costs"))
        if len(bill.dense) != len(entries):
            raise read.wrong("costs.dense", f"is of {len(bill.dense)} groups, and there are {len(entries)}")
        return cls(entries, bill, made, read.each_named("left_alone", str))

    # ---- shown ----------------------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[Part]:
        shares = sorted({level.share for each in self._levels.values() for level in each[1:]})
        columns = ["Group", "Kind", ">Of", *(f">{told_share(share)}" for share in shares)]
        rows: list[list[object]] = []
        for name, levels in self._levels.items():
            errors = {level.share: f"{level.error:.4f}" for level in levels[1:]}
            rows.append(
                [shown_name(name), self.kind[name], f"{levels[0].of:,}", *(errors.get(share) for share in shares)]
            )
        yield Rows(columns, rows)
        yield ""
        count = sum(len(each) - 1 for each in self._levels.values())
        yield (
            f"{count} levels of {len(self)} groups: the squared relative error of what consumes a group, where so much "
            "of it alone leaves."
        )
        if self.left_alone:
            yield f"{len(self.left_alone)} groups have no levels, such as {_first(self.left_alone)}."


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
    if len(new) == 1:
        found = torch.empty_like(dense).copy_(new[0])
    elif new:
        wide = dense.double()
        found = torch.stack([each.to(wide) - wide for each in new]).sum(0).add_(wide).to(dense.dtype)
    else:
        found = dense.clone()
    for mask in zeros:
        found.masked_fill_(mask.to(found.device), 0)
    for dim, places in gone:
        shape = [1] * found.dim()
        shape[dim] = -1
        found.masked_fill_(torch.from_numpy(places).reshape(shape).to(found.device), 0)
    return found
