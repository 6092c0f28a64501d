"""Which matrices of a model's blocks are pruned, and why the others are left alone.

Law: what lies outside the blocks, or is shared with another block, is never chosen; each matrix has one reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from secateur.blockwise.finding import WHOLE
from secateur.support import matched
from secateur.targets import identity_of, kinds_within

__all__ = ["block_of", "choose_targets", "full_name"]


def choose_targets(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    include: str | Iterable[str] | None,
    exclude: str | Iterable[str] | None,
) -> tuple[dict[str, nn.Parameter], dict[str, list[str]]]:
    """``{full name: parameter}`` of the matrices inside blocks that may be pruned, and ``{reason: names}`` of the rest.

    Raises:
        ValueError: a glob matches nothing, asks for what lies outside the blocks, or nothing is left.

    >>> from secateur.blockwise import find_blocks
    >>> blocks = (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))
    >>> model = nn.Sequential(*blocks)
    >>> chosen, left = choose_targets(model, find_blocks(model), None, "*.1.weight")
    >>> [*chosen]
    ['0.0.weight', '1.0.weight']
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    included, excluded = matched(include, names), matched(exclude, names) or set()
    holders: dict[Any, set[str | None]] = {}
    for name, parameter in names.items():
        holders.setdefault(identity_of(parameter), set()).add(block_of(name, blocks))
    targets: dict[str, nn.Parameter] = {}
    left_alone: dict[str, list[str]] = {}
    reasons = kinds_within(model)
    seen = set()
    for name, parameter in names.items():
        if parameter.dim() < 2 or not parameter.is_floating_point() or identity_of(parameter) in seen:
            continue
        seen.add(identity_of(parameter))
        block = block_of(name, blocks)
        reason = None
        if block is None:
            reason = "outside the blocks"
        elif len(holders[identity_of(parameter)]) > 1:
            reason = "shared with another block"
        elif name in excluded:
            reason = "excluded"
        elif included is not None:
            reason = None if name in included else "not included"
        else:
            reason = reasons.get(name)
        if reason is None:
            targets[name] = parameter
        else:
            left_alone.setdefault(reason, []).append(name)
    if included is not None:
        for name in sorted(included):
            for reason in ("outside the blocks", "shared with another block"):
                if name in left_alone.get(reason, ()):
                    raise ValueError(
                        f"{name} is {reason}, and only what is within blocks is pruned here; use sparsify."
                    )
    if not targets:
        said = ", ".join(f"{len(found)} {reason}" for reason, found in left_alone.items())
        raise ValueError(f"no matrix is left to prune ({said}).")
    return targets, left_alone


def full_name(block: str, local: str) -> str:
    """A parameter's name in the model, given its name in a block; a model that is one block has the name "".

    >>> full_name("layers.1", "fc.weight"), full_name("", "fc.weight")
    ('layers.1.fc.weight', 'fc.weight')
    """
    return f"{block}.{local}" if block else local


def block_of(name: str, blocks: Mapping[str, nn.Module]) -> str | None:
    """The block that a parameter is in.

    >>> block_of("layers.1.fc.weight", {"layers.1": nn.Identity()})
    'layers.1'
    """
    if WHOLE in blocks:
        return WHOLE
    parts = name.split(".")
    for count in range(1, len(parts)):
        if (path := ".".join(parts[:count])) in blocks:
            return path
    return None
