"""Which groups of units may leave: globs over the names of groups and of all their tensors.

Law: a group is left whole if any of its names says so; of groups that keep equally many all may leave, or none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from secateur.coupling import OUTPUT, Coupling, Group
from secateur.shrinking.request import Request
from secateur.support import matched, matches

__all__ = ["check_globs", "groups_in_scope", "may_leave", "names_of"]


def names_of(coupling: Coupling) -> set[str]:
    """The names of a group that a glob can match: its own, and those of all its tensors."""
    names = {name for group in coupling.groups for name, _ in group.members} | {name for name, _ in coupling.frozen}
    return names | {group.name for group in coupling.groups}


def check_globs(known: Collection[str], globs: Iterable[str]) -> None:
    """Raises ValueError for a glob that matches none of the names."""
    matched(globs, known, "tensor or group")


def may_leave(names: Collection[str], include: Iterable[str] | None, exclude: Iterable[str]) -> bool:
    """Whether units with these names may leave: one of the names is included, and none excluded."""

    def about(globs: Iterable[str]) -> bool:
        return any(matches(name, globs) for name in names)

    return (include is None or about(include)) and not about(exclude)


def groups_in_scope(coupling: Coupling, asked: Request, *, chosen: bool = False) -> list[Group]:
    """The groups that may lose units: with ``chosen`` those of experts, else all others.

    Raises:
        ValueError: there is none; the message says what is frozen and why.
    """
    left = [
        group
        for group in coupling.groups
        if group.chosen == chosen
        and may_leave({group.name, *(name for name, _ in group.members)}, asked.include, asked.exclude)
    ]
    # of groups that keep equally many, all leave together or none
    partly = {group.tied for group in coupling.groups if group not in left}
    left = [group for group in left if group.tied not in partly]
    if not left and chosen:
        by_reason: dict[str, list[str]] = {}
        for name, at in coupling.compared:
            by_reason.setdefault(coupling.frozen[name, at], []).append(f"{name} dimension {at}")
        why = "".join(
            f"\n  {places[0]}{f' and {len(places) - 1} others' if len(places) > 1 else ''}: {reason}."
            for reason, places in [*by_reason.items()][:10]
        )
        if any(OUTPUT in reason for reason in by_reason):
            why += "\n  Where routers return their scores, give an example without, such as output_router_logits=False."
        raise ValueError(f"no experts of the model can leave: no router that chooses between units was found.{why}")
    if not left:
        reasons = dict.fromkeys(coupling.frozen.values())
        why = "".join(
            f"\n  {name} dimension {at}: {reason}" for (name, at), reason in list(coupling.frozen.items())[:10]
        )
        kept = f"\n  include and exclude leave whole: {', '.join(group.name for group in coupling.groups[:10])}"
        raise ValueError(
            f"nothing of the model can leave ({len(reasons)} reasons).{why}{kept if coupling.groups else ''}"
        )
    return left
