"""The file that holds the levels of one group; no pickle.

Law: a file is there whole or not at all, and what it says is held to its form before anything is believed; weights are
read when they are used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secateur.search.costs import TARGETS
from secateur.support import Fields, open_regular, records, write_whole

__all__ = ["Kept", "Stored", "file_of", "lies_in", "read_entry", "rising", "tensor_of", "write_entry"]

_HINT = " Make the levels again, in another folder."
_KEY = "secateur"
_KINDS = ("width", "heads", "layer")


@dataclass(frozen=True)
class Kept:
    """One level, without its tensors.

    Attributes:
        share, kept, error, loss: as of `Level`.
        left: ``{target: what is left of the group}``, as the bill counts it.
        values: names of the parameters that have values of their own.
    """

    share: float
    kept: int
    error: float
    loss: float | None
    left: Mapping[str, float]
    values: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Stored:
    """The levels of a group, but for the dense one.

    Attributes:
        name, kind: of the group.
        of: how many units it has; of a layer entries.
        groups: those of the coupling that leave together; of a layer its parameter.
        sizes: units of each.
        members: ``(parameter, dimension, number of the group)``: slices that become zero with its units.
        levels: the smallest share first.
        tensors: ``units.M``, the unit of each position of member M or -1; ``kept.L.G``, which units of group G stay at
            level L; ``value.L.NAME``, a parameter at level L.
    """

    name: str
    kind: str
    of: int
    groups: tuple[str, ...]
    sizes: tuple[int, ...]
    members: tuple[tuple[str, int, int], ...]
    levels: tuple[Kept, ...]
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


def write_entry(folder: Path, entry: Stored, digest: str) -> Path:
    """Writes the levels of a group into a folder, as part of the levels with this digest."""
    from safetensors.torch import save

    said = {
        "of_levels": digest,
        "name": entry.name,
        "kind": entry.kind,
        "of": entry.of,
        "groups": list(entry.groups),
        "sizes": list(entry.sizes),
        "members": [list(each) for each in entry.members],
        "levels": [
            {
                "share": each.share,
                "kept": each.kept,
                "error": each.error,
                "loss": each.loss,
                "left": dict(each.left),
                "values": list(each.values),
            }
            for each in entry.levels
        ],
    }
    tensors = {name: each.detach().cpu().contiguous() for name, each in entry.tensors.items()}
    return write_whole(file_of(folder, entry.name), save(tensors, {_KEY: json.dumps(said, allow_nan=False)}))


def lies_in(folder: Path, entry: Stored) -> bool:
    """Whether a group's tensors are those of its file there."""
    return isinstance(entry.tensors, _OfFile) and entry.tensors.path == file_of(folder, entry.name)


class _OfFile(Mapping[str, Tensor]):
    """The tensors of a file, read on access."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        self._file: Any = safe_open(path, "pt")
        self._names: tuple[str, ...] = tuple(self._file.keys())  # type: ignore[no-untyped-call]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        found: Tensor = self._file.get_tensor(name)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._file.get_slice(name).get_dtype())

    def said(self) -> str:
        return str((self._file.metadata() or {}).get(_KEY, ""))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
        said = tensors.said()
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged: no safetensors file ({error}).{_HINT}") from None
    read = Fields(records.parse_json(said.encode(), path, hint=_HINT), path, hint=_HINT)
    read.only("of_levels", "name", "kind", "of", "groups", "sizes", "members", "levels")
    if read.take("of_levels", str) != digest or read.take("name", str) != name:
        raise ValueError(f"{path}: of other levels, which were made of another model, other data or otherwise.{_HINT}")
    kind = read.take("kind", str)
    if kind not in _KINDS:
        raise read.wrong("kind", f"must be one of {', '.join(_KINDS)}")
    groups, sizes = tuple(read.each("groups", str)), tuple(read.each("sizes", int, least=1))
    members = []
    for at, each in enumerate(read.each("members", list)):
        if [type(one) for one in each] != [str, int, int] or not 0 <= each[2] < len(sizes) or not 0 <= each[1] < 16:
            raise read.wrong(f"members[{at}]", "is no parameter, dimension and group")
        members.append((each[0], each[1], each[2]))
    if len(groups) != len(sizes):
        raise read.wrong("sizes", f"is of {len(sizes)} groups, and there are {len(groups)}")
    levels = tuple(_level_in(each, read.take("of", int, least=1)) for each in read.inners("levels"))
    entry = Stored(name, kind, read.take("of", int), groups, sizes, tuple(members), levels, tensors)
    _check_tensors(read, entry, tensors)
    return entry


def _level_in(read: Fields, of: int) -> Kept:
    read.only("share", "kept", "error", "loss", "left", "values")
    left = read.each_named("left", float, least=0)
    if set(left) != set(TARGETS):
        raise read.wrong("left", f"is not of {', '.join(TARGETS)}")
    return Kept(
        read.take("share", float, least=0, most=1),
        read.take("kept", int, least=0, most=of),
        read.take("error", float, least=0),
        read.maybe("loss", float, least=0),
        left,
        tuple(read.each("values", str)),
    )


def _check_tensors(read: Fields, entry: Stored, tensors: _OfFile) -> None:
    """Their names, types and sizes, and that units are units."""
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
