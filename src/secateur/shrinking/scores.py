"""The score of a unit: a criterion's scores, summed over all tensors that hold a part of it.

Law: one weight is held at a time, and one that comes in blocks of rows has the score of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secateur.coupling import Axis, Group, size_of
from secateur.shrinking.request import Request
from secateur.shrinking.subject import Subject
from secateur.support import track

__all__ = ["rows_at_once", "scores_of"]

_PIECE = 1 << 17  # entries of a weight that are scored at a time: in cache


def scores_of(subject: Subject, groups: Sequence[Group], asked: Request) -> dict[Axis, Tensor]:
    """For each group the score of each of its units; one weight is held at a time."""
    coupling, weights, criterion = subject.coupling, subject.weights, asked.criterion
    units = {group.axis: np.zeros(group.size) for group in groups}
    places: dict[str, list[tuple[Group, int]]] = {}
    for group in groups:
        members = [(name, at) for name, at in group.members if name in weights]
        matrices = [(name, at) for name, at in members if len(coupling.dims(name)) > 1]
        for name, at in matrices or members:
            places.setdefault(name, []).append((group, at))
    for name in track([name for name in coupling.names() if name in places], "scoring"):
        shape = [size_of(dim) for dim in coupling.dims(name)]
        its = asked.evidence.get(name, {})
        if not getattr(criterion, "elementwise", False) or its:
            whole = criterion(weights[name].detach(), **its)
            along = _sums([whole], shape, [at for _, at in places[name]], lambda scores: scores)
        else:
            along = _sums(subject.blocks(name), shape, [at for _, at in places[name]], criterion)
        for group, at in places[name]:
            for index in coupling.occurrences(group, name, at):
                np.add.at(units[group.axis], index[index >= 0], along[at][index >= 0])
    for group in groups:
        if np.isnan(units[group.axis]).any():
            raise ValueError(f"a score of {group.name} is NaN; correct the weights or the criterion first.")
    return {axis: torch.from_numpy(each / (abs(each).mean() or 1.0)) for axis, each in units.items()}


def rows_at_once(shape: Sequence[int]) -> int:
    """How many rows of a weight are scored at a time."""
    return max(1, _PIECE // max(1, math.prod(shape[1:])))


def _sums(
    blocks: Iterable[Tensor], shape: Sequence[int], dims: Sequence[int], criterion: Callable[[Tensor], Tensor]
) -> dict[int, npt.NDArray[np.float64]]:
    """The sums of a weight's scores over all dimensions but one, for each of ``dims``, in float64.

    The weight comes as one or more blocks of its rows; all but the last have a multiple of `rows_at_once`.
    """
    found = {at: torch.zeros(shape[at], dtype=torch.float64) for at in dims}
    rows, start = rows_at_once(shape), 0
    for block in blocks:
        for part in torch.split(block, rows):
            piece = criterion(part).double()
            for at, total in found.items():
                others = [dim for dim in range(piece.dim()) if dim != at]
                along = (piece.sum(others) if others else piece).cpu()
                if at == 0:
                    total[start : start + len(part)] = along
                else:
                    total += along
            start += len(part)
    return {at: total.numpy() for at, total in found.items()}
