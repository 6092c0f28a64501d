"""Which columns of which matrices the units of a group are: what multiplies what they give.

Law: told by where a matrix lies in its parameter, never by names; a column belongs to one unit of a group at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from secateur.blockwise import Piece
from secateur.coupling import Axis, Coupling, Group

__all__ = ["Columns", "columns_of"]

Columns = list[list[int]]  # of each unit


@dataclass(frozen=True)
class _Member:
    group: Group
    at: int  # dimension of the parameter


def columns_of(
    coupling: Coupling, groups: Iterable[Group], name: str, piece: Piece, parameter: Tensor
) -> Mapping[Axis, Columns]:
    """``{axis: the columns of each of its units}`` of the groups whose units the inputs of a matrix are.

    Args:
        name: of the parameter, in the model.
        piece: where the matrix (outputs, inputs) lies in it.
    """
    members = [_Member(group, at) for group in groups for name_of, at in group.members if name_of == name]
    if not members:
        return {}
    rows, width = piece.shape
    offsets = piece.offset + np.arange(width) * piece.strides[1]
    down = piece.offset + np.arange(rows) * piece.strides[0]
    sizes, strides = parameter.shape, parameter.stride()
    found: dict[Axis, Columns] = {}
    for member in members:
        places = offsets // strides[member.at] % sizes[member.at] if strides[member.at] else offsets * 0
        others = down // strides[member.at] % sizes[member.at]
        units = coupling.indices(member.group, name, member.at)[places]
        if (units[0] == units).all() or not (others == others[0]).all():
            continue  # it runs along the outputs, or not within this matrix
        columns: Columns = [[] for _ in range(member.group.size)]
        for column, unit in enumerate(units.tolist()):
            if unit >= 0:
                columns[unit].append(column)
        if any(columns):
            found[member.group.axis] = columns
    return found
