"""Experts that leave: of each set of units that are chosen between as many, those of the least score.

Law: all sets of one size keep the same number, and at least as many as are chosen at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from secateur.shrinking.counts import Choice, choose
from secateur.shrinking.request import Request
from secateur.shrinking.scope import groups_in_scope
from secateur.shrinking.subject import Subject

__all__ = ["choose_experts"]


def choose_experts(
    subject: Subject, asked: Request, known: Collection[str]
) -> tuple[Choice, dict[str, tuple[int, int]]]:
    """Which experts stay, and how many of each mixture there were and are.

    Raises:
        ValueError: none can leave, or not as many as asked.
    """
    asked = replace(asked, target="units", round_to=1, allocate=None)
    groups = groups_in_scope(subject.coupling, asked, chosen=True)
    sizes = dict.fromkeys(group.size for group in groups)
    subject.coupling.tie([group for group in groups if group.size == size] for size in sizes)
    every = sum(group.size for group in groups)
    number = (
        sum(min(asked.experts, group.size - 1) for group in groups) if asked.experts >= 1 else asked.experts * every
    )
    choice = choose(subject, replace(asked, sparsity=number / every), known, chosen=True)
    stay = {
        group.name: (group.size, int(choice.kept[group.axis].sum())) for group in groups if group.axis in choice.kept
    }
    return choice, stay
