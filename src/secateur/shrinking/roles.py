"""Which groups play the same role: in two layers of a model, or in two models of other sizes.

Law: a role is given by the names of members without their numbers, and by where the units lie in them.
"""

from __future__ import annotations

import re
from typing import Any

from secateur.coupling import Coupling, Group

__all__ = ["role_of", "tie_roles"]


def tie_roles(coupling: Coupling) -> None:
    """Groups of the same role keep equally many: same tensors but for the numbers in their names, same places in them.

    >>> import torch
    >>> from torch import nn
    >>> from secateur.coupling import find_coupling
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3)))
    >>> coupling = find_coupling(model, torch.zeros(1, 4), modes=[False])
    >>> tie_roles(coupling)
    >>> [(group.size, group.tied) for group in coupling.groups]
    [(8, 0), (4, 1), (8, 0), (4, 1), (8, 0)]
    """
    roles: dict[Any, list[Group]] = {}
    for group in coupling.groups:
        places = frozenset(coupling.indices(group, name, at).tobytes() for name, at in group.members)
        roles.setdefault((group.size, role_of(coupling, group), places), []).append(group)
    coupling.tie(roles.values())


def role_of(coupling: Coupling, group: Group) -> tuple[frozenset[tuple[str, int]], bool]:
    """A key that is equal for groups of the same role in two layers, or in two models of other sizes.

    The members without the numbers in their names, and whether the units lie side by side in the first: heads and the
    entries of heads may have the same members.
    """
    name, at = group.members[0]
    index = coupling.indices(group, name, at)
    index = index[index >= 0]
    members = frozenset((re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), at) for name, at in group.members)
    return members, bool(index[0] != index[1])
