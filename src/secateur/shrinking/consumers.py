"""The columns of the matrices that consume a group's units, and the rows of those that produce them.

Law: found by where a matrix lies in its parameter, never by names; a column belongs to one unit of a group at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from torch import Tensor

from secateur.blockwise import Piece
from secateur.coupling import Axis, Coupling, Group

__all__ = ["Columns", "columns_of", "rows_of"]

Columns = list[list[int]]  # of each unit


def columns_of(
    coupling: Coupling, groups: Iterable[Group], name: str, piece: Piece, parameter: Tensor
) -> Mapping[Axis, Columns]:
    """``{axis: the columns of each of its units}`` of the groups whose units the inputs of a matrix are.

    Args:
        name: of the parameter, in the model.
        piece: where the matrix (outputs, inputs) lies in it.
    """
    return _along(coupling, groups, name, piece, parameter, outputs=False)


def rows_of(
    coupling: Coupling, groups: Iterable[Group], name: str, piece: Piece, parameter: Tensor
) -> Mapping[Axis, Columns]:
    """The same of the groups whose units the outputs of a matrix are: the rows of each unit."""
    return _along(coupling, groups, name, piece, parameter, outputs=True)


def _along(
    coupling: Coupling, groups: Iterable[Group], name: str, piece: Piece, parameter: Tensor, *, outputs: bool
) -> dict[Axis, Columns]:
    strides = parameter.stride()
    along, across = (
        piece.offset + np.arange(piece.shape[dim]) * piece.strides[dim] for dim in ((0, 1) if outputs else (1, 0))
    )
    found: dict[Axis, Columns] = {}
    for group in groups:
        for at in [at for member, at in group.members if member == name and strides[at]]:
            places, others = (each // strides[at] % parameter.shape[at] for each in (along, across))
            units = coupling.indices(group, name, at)[places]
            if (units[0] == units).all() or not (others == others[0]).all():
                continue  # it runs the other way, or not within this matrix
            members: Columns = [[] for _ in range(group.size)]
            for position, unit in enumerate(units.tolist()):
                if unit >= 0:
                    members[unit].append(position)
            found[group.axis] = members
    return found
