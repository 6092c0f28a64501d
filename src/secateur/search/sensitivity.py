"""The sensitivity of a model to pruning each group alone by 10, 30, 50, 70 %: the layer's error and the model's loss.
Precomputed levels, as `sensitivity` returns or writes them: a search starts from them and their measured losses.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import nn

from secateur.models import ROWS, ByText, Solve, loaded_model
from secateur.patterns import Pattern
from secateur.search.levels import Levels, digest_of, shown_name, told_share
from secateur.search.making import SHARES, check_alike, made_by_all, make_levels
from secateur.search.result import MEANS, Cost
from secateur.search.score import SCORES, ModelLoss, Replayed, Score, known_by
from secateur.search.space import Class
from secateur.shrinking import in_blocks_parts
from secateur.solvers import admm
from secateur.support import (
    Between,
    Column,
    Fields,
    Forward,
    Part,
    Table,
    alone,
    everywhere,
    for_directories,
    name_of,
    on_rank_zero,
    percent,
    plain,
    side_by_side,
    unwrapped,
    without_autocast,
    write_whole,
)

# The sensitivity of a model to pruning each group alone by 10, 30, 50, 70 %: the layer's error and the model's loss.
#
# Law: every cell is measured, none is estimated; the model is restored, bit for bit; measurements are kept beside the
# levels, and a run that was killed continues with the groups that are missing. Of several processes each measures some
# of the groups, and all of them find what one does, to the bit.

FILE = "scores.json"
_FORMAT, _VERSION = "secateur scores", 1
_HINT = " Delete it: the scores are then measured again."
_LABELS = {"kl": "divergence (kl)", "cosine": "1 - cosine"}  # a chart says that more of it is worse


@dataclass(frozen=True, eq=False)
class Sensitivity(ByText):
    """The result of `sensitivity`; prints as a table.

    Attributes:
        levels: of every group.
        scores: ``{group: what the model lost at each level}``, 0 for the dense one; of a function the dense model's
            score less the model's.
        score: "kl", "cosine", "change" or the name of a function.
        dense: the dense model's own score, where it is a function's.
        rows: tokens or examples that scores are measured on; 0 where a function says.
        share: of the batches' entries.
        passes: forward passes of these rows that the scores took.
        function: the key of a function; see `secateur.search.score.known_by`.
    """

    levels: Levels
    scores: Mapping[str, tuple[float, ...]]
    score: str
    dense: float = 0.0
    rows: int = 0
    share: float = 0.0
    passes: float = 0.0
    function: str | None = field(default="", repr=False)

    def save(self, folder: str | Path) -> None:
        """Writes the levels into a folder, as `Levels.save` does, and the scores beside them."""
        self.levels.save(folder)
        _write(Path(folder), self)

    @classmethod
    def load(cls, folder: str | Path) -> Sensitivity:
        """What is in a folder.

        Raises:
            FileNotFoundError: there is none.
            ValueError: a file is damaged, or not all groups are measured.
        """
        folder = Path(folder)
        levels = Levels.load(folder)
        found = _read(folder / FILE, levels)
        if missing := [name for name in levels if name not in found.scores]:
            raise ValueError(f"{folder / FILE}: {missing[0]} is not measured yet; run the same call again to go on.")
        return found._in_order()

    def _in_order(self) -> Sensitivity:
        return replace(self, scores={name: self.scores[name] for name in self.levels})

    @property
    def _by(self) -> tuple[str, float, int, float, str | None]:
        """What scores were measured by."""
        return self.score, self.dense, self.rows, self.share, self.function

    def content(self) -> Iterator[Part]:
        """A row for each group, and one for each level of it."""
        yield from self.summary()
        found = [
            (name, level, score)
            for name, each in self.levels.items()
            for level, score in zip(each, self.scores[name], strict=True)
        ]

        def cost(word: str) -> Column:
            return Column(word, lambda each: Cost.of(word, each[1].costs[word]), side="right")

        yield Table.of(
            "levels",
            found,
            Column.name("Group", lambda each: shown_name(each[0])),
            Column("Kind", lambda each: self.levels.kind[each[0]]),
            Column.portion("Share", lambda each: each[1].share),
            Column.count("Of", lambda each: each[1].of),
            Column.count("Kept", lambda each: each[1].kept),
            Column.figure("Error", lambda each: each[1].error, ".4f"),
            Column.figure("Loss", lambda each: each[1].loss),
            Column.figure("Score", lambda each: each[2]),
            *map(cost, found[0][1].costs if found else ()),
            title="Level by level",
        )

    def summary(self) -> Iterator[Part]:
        """A row for each group: its errors and the model's scores at each share."""
        shares = self.levels.shares

        def score(share: float) -> Column:
            of = self.levels.at(share, lambda _, number: number)
            return Column.figure(
                f"{self.score} {told_share(share)}",
                lambda name: None if (number := of(name)) is None else self.scores[name][number],
                key=f"score_{told_share(share).rstrip('%')}",
            )

        table = Table.of("groups", self.levels, *self.levels.columns(), *map(score, shares), title="Group by group")
        middle = min(shares, key=lambda share: abs(share - 0.5))
        told = (
            f"What the model loses ({self.score}) where {told_share(middle)} of each group alone leaves; a line joins "
            "groups that differ in numbers alone."
        )
        label = _LABELS.get(self.score, self.score)
        yield table.drawn(score(middle).key, "What each group costs", told, label=label)
        yield ""
        meant = MEANS.get(self.score, f"of {self.score}, which is {self.dense:g} for the dense one")
        yield (
            "Where so much of a group alone leaves: the squared relative error of what consumes it, after repair; and "
            f"what the model loses, {meant}."
        )
        yield self.told_cost()
        yield from self.by_text()
        if self.levels.left_alone:
            name, why = next(iter(self.levels.left_alone.items()))
            yield f"{len(self.levels.left_alone)} without levels, such as {name}: {why}."
        yield from in_blocks_parts(self.in_blocks)

    @property
    def in_blocks(self) -> Mapping[str, str]:
        """``{parameter: note}`` of those whose Gram matrix was summed in blocks of inputs."""
        return self.levels.in_blocks

    def told_cost(self) -> str:
        """What the scores took."""
        cells = sum(len(each) - 1 for each in self.levels.values())
        what = f"of the {self.rows:,} rows that they are measured on" if self.rows else "of the function"
        line = f"{cells} scores took {self.passes:.1f} runs {what}"
        if self.share:
            line += (
                f", {percent(self.share)} of the calibration: as much as {self.passes * self.share:.2f} runs of that"
            )
        return f"{line}."


@without_autocast()
def sensitivity(
    model: nn.Module | Path | str,
    batches: Iterable[Any],
    *,
    score: Score | None = None,
    over: str | Sequence[str] = ("shrink",),
    shares: Sequence[float] = SHARES,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    solver: str | Solve = admm,
    pattern: str | Pattern | None = None,
    round_to: int | None = None,
    verify: bool = True,
    example_inputs: Any = None,
    forward: Forward | None = None,
    rows: int = ROWS,
    store: str | Path | None = None,
    device: torch.device | str | None = None,
) -> Sensitivity:
    """Measures what each group costs when it alone loses a share of its units, or each layer a share of its entries.
    The model is not changed.

    Errors come with the levels (`make_levels`): two passes over the batches for all cells. Each score is measured, on
    the first thousand rows of the batches; of the model only the changed block and what is behind it is run, on average
    half of it, since the dense stream before it is cached. So of a calibration of a hundred thousand tokens
    the eight cells of a block take a twenty-fifth of a pass. What was run is in ``passes``.

    In several processes of `torch.distributed` each is given the same, and makes the levels, or with a ``store`` the
    first, and the others read them there. Scores are measured side by side, a group in each, and all return what one
    process finds.

    Args:
        model: any module with its weights; or a Hugging Face directory, whose model is loaded into memory.
        score: what the model loses by it: "kl", "cosine" or "change", or ``model -> float``, higher = better; see
            `secateur.search.ModelLoss`. A function is run for every cell, on whatever it likes: where that is the same
            inputs each time, what is before the changed block is not computed again. The model is in evaluation mode
            then, without gradients.
        rows: tokens or examples that scores are measured on.
        store: a folder, which `secateur.search.Levels.load` and `Sensitivity.load` read, and in which a run that was
            killed goes on. Scores of a lambda, a partial, a method, or a function within another are measured again:
            nothing shows that they are the same.
        device: for a directory, where its model is loaded; by default the processor.
        batches, over, shares, include, exclude, solver, pattern, round_to, verify, example_inputs, forward: as
            for `make_levels`.

    Raises:
        ValueError: as `make_levels`; a score is not known, or not finite of the dense model; or several processes are
            given other models, batches or arguments.

    >>> import torch
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)))
    >>> found = sensitivity(model, [torch.randn(64, 4)], shares=(0.25, 0.75))
    >>> found.score, {name: each[0] for name, each in found.scores.items()}
    ('change', {'0.0.weight': 0.0, '1.0.weight': 0.0})
    >>> all(less < more for _, less, more in found.scores.values())
    True
    """
    held = batches if isinstance(batches, list) else list(batches)
    if isinstance(model, Path | str):
        source = Path(model)
        loaded = everywhere(lambda: loaded_model(source, device))
    else:
        for_directories(device=device)
        loaded = model

    def make(folder: Path | None) -> Levels:
        return make_levels(
            loaded,
            held,
            over=over,
            shares=shares,
            include=include,
            exclude=exclude,
            solver=solver,
            pattern=pattern,
            round_to=round_to,
            verify=verify,
            example_inputs=example_inputs,
            forward=forward,
            store=folder,
        )

    levels = made_by_all(make, None if store is None else Path(store))
    check_alike(levels, loaded, held, rows, score if isinstance(score, str) else None)
    loss = everywhere(lambda: ModelLoss(loaded, [] if callable(score) else held, forward, score, rows=rows))
    folder = None if store is None else Path(store)  # of several processes the first writes
    found = Sensitivity(
        levels,
        {},
        name_of(score) if callable(score) else loss.word,
        loss.dense_score or 0.0,
        loss.rows,
        loss.share,
        function=known_by(score) if callable(score) else "",
    )

    def earlier() -> tuple[Mapping[str, tuple[float, ...]], float]:
        # of a function that nothing tells from others it is not known what measured what is there
        if folder is not None and (folder / FILE).exists() and found.function is not None:
            there = _read(folder / FILE, levels)
            if there._by == found._by:
                return there.scores, there.passes
        return {}, 0.0

    known, before = on_rank_zero(earlier)
    found = replace(found, scores=known, passes=before)
    if any(name not in found.scores for name in levels):
        for name, values, more in _measured(levels, loss, found.scores):
            found = replace(found, scores={**found.scores, name: values}, passes=before + more)
            if folder is not None:
                on_rank_zero(functools.partial(_write, folder, found))
    with alone():
        return found._in_order().over_texts(loaded, batches, forward=forward)


def _measured(
    levels: Levels, loss: ModelLoss, already: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[float, ...], float]]:
    """Of each group that is not measured yet its scores, and how many passes were run so far. Several processes measure
    groups side by side, each the next one."""
    replayed, passes = Replayed(loss.model, loss), 0.0
    left = [name for name in levels if name not in already]

    def measure(name: str) -> tuple[str, tuple[float, ...], float]:
        before, values = replayed.passes, [0.0]
        for at in range(1, len(levels[name])):
            with levels.assembled(loss.model, {name: at}):
                values.append(replayed(levels.touched({name: at})))
        return name, tuple(values), replayed.passes - before

    for name, values, more in side_by_side(measure, left, "measuring scores"):
        passes += more
        yield name, values, passes


# ---- on disk --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Said:
    """What ``scores.json`` says: of which levels, by what, and what each group lost; null is infinite."""

    of_levels: str
    score: str
    dense: float
    rows: Annotated[int, Between(0)]
    share: Annotated[float, Between(0)]
    function: str | None
    passes: Annotated[float, Between(0)]
    scores: Mapping[str, tuple[float | None, ...]]


def _write(folder: Path, found: Sensitivity) -> None:
    scores = {name: tuple(each if each < math.inf else None for each in its) for name, its in found.scores.items()}
    said = plain(_Said(found.levels.made.digest, *found._by, found.passes, scores))
    text = json.dumps({"format": _FORMAT, "version": _VERSION, **said}, indent=1, allow_nan=False)
    write_whole(folder / FILE, text)


def _read(path: Path, levels: Levels) -> Sensitivity:
    """What was measured of these levels so far."""
    read = Fields.read(path, hint=_HINT).of_format(_FORMAT, _VERSION)
    said = read.whole(_Said)
    if said.of_levels != levels.made.digest:
        raise read.wrong("of_levels", "is of other levels than those beside it")
    for name, its in said.scores.items():
        if name not in levels or len(its) != len(levels[name]):
            raise read.wrong(f"scores.{name}", "is of no group that has so many levels")
        if said.score in SCORES and any(each is not None and each < 0 for each in its):  # a function's may get better
            raise read.wrong(f"scores.{name}", "is below 0")
    scores = {
        name: tuple(math.inf if each is None else float(each) for each in its) for name, its in said.scores.items()
    }
    by = said.score, said.dense, said.rows, said.share
    return Sensitivity(levels, scores, *by, passes=said.passes, function=said.function)


# Precomputed levels, as `sensitivity` returns or writes them: a search starts from them and their measured losses.
#
# Law: they are of this model, bit for bit; losses that were measured by another score are ignored.


def given(said: Levels | Sensitivity | str | os.PathLike[str], model: nn.Module) -> Sensitivity:
    """Reads the argument ``levels=`` of `fit`; of levels alone there are no scores.

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
    found = Sensitivity(said, {}, "") if isinstance(said, Levels) else said
    if not isinstance(found, Sensitivity):
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
