"""Precomputed levels, as `sensitivity` returns or writes them: a search starts from them and their measured losses.

Law: they are of this model, bit for bit; losses that were measured by another score are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import nn

from secateur.search.levels import Levels, digest_of
from secateur.search.sensitivity import FILE, Sensitivity
from secateur.search.space import Class
from secateur.support import unwrapped

__all__ = ["Given", "curves_of", "given"]


@dataclass(frozen=True, eq=False)
class Given:
    """Precomputed levels, and the model's loss at each of them alone, where that was measured.

    Attributes:
        levels: of the groups.
        scores: ``{group: what the model loses at each level}``; empty where nothing was measured.
        word: by which score.
    """

    levels: Levels
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    word: str = ""


def given(said: Levels | Sensitivity | str | os.PathLike[str], model: nn.Module) -> Given:
    """Reads the argument ``levels=`` of `fit`.

    Args:
        said: levels, what `sensitivity` returned, or the folder that either was written to.
        model: that they have to be of.

    Raises:
        FileNotFoundError: there are none in the folder.
        ValueError: a file is damaged, or they are of another model.
        TypeError: it is none of these.
    """
    if isinstance(said, str | os.PathLike):
        folder = Path(said)
        said = Sensitivity.load(folder) if (folder / FILE).exists() else Levels.load(folder)
    if isinstance(said, Sensitivity):
        found = Given(said.levels, said.scores, said.score)
    elif isinstance(said, Levels):
        found = Given(said)
    else:
        raise TypeError(
            f"levels= is what sensitivity or make_levels gave, or the folder they wrote, not a {type(said).__name__}."
        )
    if found.levels.made.model != digest_of(unwrapped(model)):
        raise ValueError("levels= are of another model, or of other weights of it; make them of this one.")
    return found


def curves_of(scores: Mapping[str, Sequence[float]], classes: Sequence[Class]) -> list[list[float]] | None:
    """What each class loses at each of its levels: the sum of its groups, which never falls; None where a group was not
    measured.

    >>> curves_of({"a": (0.0, 2.0, 1.5), "b": (0.0, 1.0, 1.0)}, [Class(("a", "b"), ((0, 0), (1, 1), (2, 2)))])
    [[0.0, 3.0, 3.0]]
    >>> curves_of({}, [Class(("a",), ((0,), (1,)))]) is None
    True
    """
    if any(name not in scores for each in classes for name in each.names):
        return None
    found = []
    for each in classes:
        sums = [sum(scores[name][at] for name, at in zip(each.names, its, strict=True)) for its in each.levels]
        found.append([float(value) for value in np.maximum.accumulate(np.maximum(sums, 0.0))])
    return found
