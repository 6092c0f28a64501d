"""Which groups of units may leave: globs over the names of groups and of all their tensors.

Law: a group is left whole if any of its names says so; of groups that keep equally many all may leave, or none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from secateur.coupling import Coupling, Group

__all__ = ["check_globs", "chosen", "globs_of", "names_of"]


def globs_of(given: str | Iterable[str] | None) -> list[str] | None:
    return None if given is None else [given] if isinstance(given, str) else list(given)


def names_of(coupling: Coupling) -> set[str]:
    """What a glob can match."""
    names = {name for group in coupling.groups for name, _ in group.members} | {name for name, _ in coupling.frozen}
    return names | {group.name for group in coupling.groups}


def check_globs(known: Collection[str], *given: str | Iterable[str] | None) -> None:
    for glob in (each for one in given for each in globs_of(one) or ()):
        if not any(fnmatchcase(name, glob) for name in known):
            raise ValueError(f"{glob!r} matches no tensor of the model.")


def chosen(
    coupling: Coupling,
    include: str | Iterable[str] | None,
    keep: str | Iterable[str] | None,
    known: Collection[str],
) -> list[Group]:
    check_globs(known, include, keep)
    included, whole = globs_of(include), globs_of(keep) or []

    def about(group: Group, globs: Sequence[str]) -> bool:
        names = {group.name, *(name for name, _ in group.members)}
        return any(fnmatchcase(name, glob) for name in names for glob in globs)

    wanted = [group for group in coupling.groups if included is None or about(group, included)]
    left = [group for group in wanted if not about(group, whole)]
    # of groups that keep equally many, all leave together or none
    excluded = {group.tied for group in coupling.groups} - {group.tied for group in left}
    partly = {group.tied for group in coupling.groups if group not in left}
    left = [group for group in left if group.tied not in excluded | partly]
    if not left:
        reasons = dict.fromkeys(coupling.frozen.values())
        why = "".join(
            f"\n  {name} dimension {at}: {reason}" for (name, at), reason in list(coupling.frozen.items())[:10]
        )
        raise ValueError(f"nothing of the model can leave ({len(reasons)} reasons).{why}")
    return left
