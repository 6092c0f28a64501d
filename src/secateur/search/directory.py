"""A directory fitted to a budget: the model is loaded to choose, and the directory is carried through by the verbs.

Law: the result appears under its name complete or not at all. A run that was stopped goes on with its levels and with
what was chosen: what took long stays in ``<out>.unfinished``, for the same command or one with another budget.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from secateur import patterns
from secateur.checkpoints import (
    CheckpointError,
    begun,
    check_new,
    check_places,
    claims_of,
    library_versions,
    open_checkpoint,
    unfinished_folder,
)
from secateur.models import OneShot, Solve, digest, example_of, loaded_model, oneshot
from secateur.patterns import Pattern
from secateur.search.choosing import LevelSearch, kept_by
from secateur.search.costs import Budget
from secateur.search.fitting import (
    Executor,
    Units,
    check_all_pruned,
    check_counts,
    check_unmade,
    counted,
    pattern_of,
    rounding_for,
    shares_for,
    told_entries,
    told_of,
)
from secateur.search.levels import Levels
from secateur.search.making import make_levels
from secateur.search.result import Chosen, Fitted, cost_text
from secateur.search.score import SCORES, ModelLoss, Score
from secateur.search.sensitivity import Sensitivity, given
from secateur.shrinking import CheckpointShrinking, shrink
from secateur.support import Fields, described, plain, write_whole

LEVELS = "levels"
FILE = "chosen.json"
FORMAT, VERSION = "secateur choice", 2
_HINT = " Delete it: the choice is then made again."
_EXACT = 1 + 1e-9


def check_outside(out: Path, **named: Path | None) -> None:
    """`CheckpointError` where a folder that somebody named lies in one that this run makes or removes."""
    for name, path in named.items():
        for taken in (out, unfinished_folder(out)):
            if path is not None and path.resolve().is_relative_to(taken.parent.resolve() / taken.name):
                raise CheckpointError(
                    f"{path}: {name} lies in {taken}, which this run makes and moves; choose another folder for it, or "
                    "another name for the result."
                )


def fit_directory(
    source: Path,
    out: Path,
    every: Sequence[Any],
    rest: Sequence[Any],
    back: Sequence[Any],
    asked: Budget,
    kinds: tuple[str, ...],
    solver: Solve,
    scope: Mapping[str, Any],
    *,
    score: Score | None,
    shares: Sequence[float] | None,
    pattern: str | Pattern | None,
    round_to: int | None,
    evaluations: float,
    finals: int,
    seed: int,
    store: Path | None,
    levels: Levels | Sensitivity | Path | str | None,
    device: torch.device | str | None,
) -> Fitted:
    """`fit` of a directory into another one, with the batches ``back`` of ``every`` held back from the ``rest``."""
    started = time.monotonic()
    check_new(out)
    check_places(source, out)
    named = Path(levels) if isinstance(levels, str | os.PathLike) else None
    check_outside(out, source=source, store=store, levels=named)
    model = loaded_model(source, device)
    known = None if levels is None else given(levels, model)
    if known is not None:
        check_unmade(shares, round_to, known.levels, kinds, solver)
    made_of = {
        "batches": [digest(every), len(back)],
        "levels": None if known is None else known.levels.made.digest,
        "over": sorted(kinds),
        "shares": None if shares is None else sorted(map(float, shares)),
        **scope,
        "solver": described(solver) if "oneshot" in kinds else None,
        "pattern": None if pattern is None else patterns.word_of(patterns.parse(pattern)),
        "round_to": round_to,
    }
    with begun(out, made_of, open_checkpoint(source), copied=False) as run:
        run.kept = run.folder
        run.hint = (
            f" What was measured is kept in {run.place}, for the same command with another budget; remove it to give "
            "other options."
        )
        folder = run.folder / LEVELS if store is None else store
        if known is not None:
            made = known.levels
            folder.mkdir(parents=True, exist_ok=True)
        else:
            made = make_levels(
                model,
                rest,
                over=kinds,
                shares=shares_for(shares, kinds),
                solver=solver,
                pattern=pattern,
                round_to=rounding_for(model, example_of(model, every[0]), round_to),
                store=folder,
                **scope,
            )
        its = pattern_of(made, pattern)
        said = {
            "source": _sha256({name: each["sha256"] for name, each in run.files.items()}),
            "made_of": made_of,
            "versions": library_versions(),
            "levels": made.made.digest,
            "measured": None if known is None else [known.word, _sha256(known.scores)],
            "pattern": patterns.word_of(its),
            "budget": dict(asked.limits),
            "keep": asked.keep,
            "target": asked.target,
            "score": described(score) if callable(score) else score,
            "evaluations": evaluations,
            "finals": finals,
            "seed": seed,
        }
        said = plain(said)
        measured = None
        chosen = None if callable(score) else _chosen_before(folder / FILE, said, made, asked.words)
        if chosen is None or asked.keep is not None:
            measured = ModelLoss(model, back, score=score)
        if chosen is None:
            assert measured is not None
            choosing = LevelSearch(
                model=model,
                asked=asked,
                levels=made,
                rest=rest,
                measured=measured,
                example=example_of(model, every[0]),
                timed_on=example_of(model, every[0], None),
                uniform=True,
                over=kinds,
                seed=seed,
                passes=evaluations,
                folder=folder,
                known=known,
                scope=scope,
                in_directory=True,
            )
            carrying = Executor(choosing, every, solver, scope, uniform=True, verify=False, pattern=its)
            chosen = (
                choosing.within(finals, carrying)
                if asked.keep is None
                else _kept(choosing, carrying, asked.keep, finals)
            )
            text = {"format": FORMAT, "version": VERSION, "asked": said, "chosen": plain(chosen)}
            write_whole(folder / FILE, json.dumps(text, indent=1))
        task = _Task(source, every, solver, scope, its, made, chosen, device)
        try:
            done = task.written(run.folder, _sha256([said, chosen.choice, chosen.units]))
            got = _got(asked, chosen, done, made)
            finished: tuple[float, float | None] = (math.nan, None)
            if measured is not None and asked.keep is not None:
                finished = measured.finished(loaded_model(done.folder, device))
                if not kept_by(measured.lost(finished), measured.most(asked.keep)):
                    raise ValueError(
                        f"the written model keeps less than {asked.keep:.1%}, unlike its copy in memory, and was "
                        "deleted: ask for a slightly larger keep, so that rounding does not matter."
                    )
        except CheckpointError:
            raise  # such as a full disk: the same choice is carried on with
        except ValueError:
            (folder / FILE).unlink(missing_ok=True)  # the same would fail again
            _remove_stages(run.folder)
            raise
        run.publish(done.folder)
    last = done.pruned is None
    return Fitted(
        asked=asked,
        chosen=chosen,
        got=got,
        levels=made,
        batches=len(every),
        finished=None if math.isnan(finished[0]) else finished[0],
        finished_score=finished[1],
        seconds=time.monotonic() - started,
        out=out,
        shrunk=None if done.shrunk is None else replace(done.shrunk, out=out if last else None),
        pruned=None if done.pruned is None else replace(done.pruned, out=out),
        apart=known is None,
    )


@dataclass(frozen=True)
class _Done:
    """The directories and results of the verbs that were run."""

    folder: Path
    shrunk: CheckpointShrinking | None = None
    pruned: OneShot | None = None


@dataclass(frozen=True)
class _Task:
    """A choice that the verbs are to carry out on a directory."""

    source: Path
    batches: Sequence[Any]
    solver: Solve
    scope: Mapping[str, Any]
    pattern: Pattern
    levels: Levels
    chosen: Chosen
    device: torch.device | str | None

    def written(self, folder: Path, made_of: str) -> _Done:
        """The result, not yet under its name.

        Raises:
            ValueError: nothing has to leave, or other than was chosen did.
        """
        told = told_of(self.levels, self.chosen.choice)
        units, entries = told.units if self.chosen.units is None else self.chosen.units, told.entries
        if not units and not entries:  # of a budget alone: what keeps a score is smaller, or an error
            raise ValueError(f"{self.source}: costs no more than the budget as it is; nothing was written.")
        where, result, smaller = self.source, folder / f"result-{made_of[:12]}", folder / f"shrunk-{made_of[:12]}"
        _remove_stages(folder, but=made_of[:12])
        if result.exists():  # of a run that was stopped before it was seen that it holds
            shutil.rmtree(result)
        shrunk: CheckpointShrinking | None = None
        if units:
            where = smaller if entries else result
            if not where.exists():
                done: Any = shrink(
                    self.source,
                    sparsity=0.5,  # the allocation says how many
                    target="units",
                    allocate=Units(units),
                    round_to=1,
                    batches=self.batches,
                    device=self.device,
                    out=where,
                    **self.scope,
                )
                shrunk = done
            sizes = {name: mask.size for name, mask in self.levels.kept(self.chosen.choice).items()}
            _check_counts(where, {name: count for name, count in units.items() if count != sizes.get(name)})
        if not entries:
            return _Done(where, shrunk)
        pruned = oneshot(
            where,
            self.batches,
            solver=self.solver,
            out=result,
            device=self.device,
            **told_entries(entries, self.pattern, self.scope),
        )
        check_all_pruned(pruned, entries, self.pattern)
        return _Done(result, shrunk, pruned)


def _remove_stages(folder: Path, but: str = "-") -> None:
    """Removes what verbs wrote on the way, of other choices than this one."""
    for path in folder.iterdir():
        if path.name != LEVELS and not path.name.partition("-")[2].startswith(but):
            shutil.rmtree(path)


def _check_counts(folder: Path, units: Mapping[str, int]) -> None:
    """ValueError where what was written keeps other units than were chosen."""
    kept = {name: each.take("to", int, least=0) for name, each in claims_of(folder).inners_named("groups")}
    check_counts(units, kept, "Nothing was written; --exclude this group, or ask for another budget.")


def _got(asked: Budget, chosen: Chosen, done: _Done, levels: Levels) -> dict[str, float]:
    """What the result costs; ValueError where that is more than it may."""
    got = dict(chosen.predicted)
    if done.pruned is not None:
        got |= counted(levels, chosen.choice, done.pruned)
    if done.shrunk is not None and done.pruned is None:
        for word, (before, after) in (("params", done.shrunk.parameters), ("bytes", done.shrunk.nbytes)):
            got[word] = chosen.dense[word] - before + after
    if over_limit := [
        word
        for word, limit in chosen.limits.items()
        if asked.keep is None and word != "latency" and got[word] > limit * _EXACT
    ]:
        raise ValueError(
            f"{cost_text(over_limit[0], got[over_limit[0]])} of the {over_limit[0]} would be left, and "
            f"{cost_text(over_limit[0], chosen.limits[over_limit[0]])} were asked for: some of it had to stay. Nothing "
            "was written."
        )
    if chosen.measured is not None:
        got["latency"] = chosen.measured
    return got


def _kept(choosing: LevelSearch, carrying: Executor, keep: float, finals: int) -> Chosen:
    """The smallest that keeps so much when it is finished; ValueError where none does."""
    most = choosing.measured.most(keep)
    for chosen in choosing.kept(finals, carrying):
        if kept_by(carrying.lost_of(chosen.choice), most):
            return chosen
    word = choosing.asked.target
    raise choosing.nothing_kept(chosen.limits[word] / chosen.dense[word])


def _sha256(values: Any) -> str:
    """The SHA-256 of what can be written as JSON."""
    text = json.dumps(dict(values) if isinstance(values, Mapping) else values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _chosen_before(path: Path, said: Mapping[str, Any], levels: Levels, words: Sequence[str]) -> Chosen | None:
    """The choice of an earlier run; None where there is none, or its request was another.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        read = Fields.read(path, hint=_HINT)
    except FileNotFoundError:
        return None
    if read.take("format", str) != FORMAT or read.take("version", int) != VERSION:
        raise read.wrong("format", f"is not {FORMAT!r} of version {VERSION}")
    read.only("format", "version", "asked", "chosen")
    if read.take("asked", dict) != said:
        return None
    chosen: Chosen = read.value("chosen", Chosen)
    for name, at in chosen.choice.items():
        if name not in levels or not 0 < at < len(levels[name]):
            raise read.wrong(f"chosen.choice.{name}", "is no level that there is")
    for each in ("limits", "dense", "predicted"):
        if not {*words} <= {*getattr(chosen, each)}:
            raise read.wrong(f"chosen.{each}", f"is not of {', '.join(words)}")
    if chosen.taken is not None and chosen.taken not in chosen.finals:
        raise read.wrong("chosen.taken", "is none of the finals")
    if chosen.compared not in SCORES:
        raise read.wrong("chosen.compared", f"is none of {', '.join(SCORES)}")
    return chosen
