"""A directory fitted to a budget: the model is loaded to choose, and the directory is carried through by the verbs.

Law: the result appears under its name complete or not at all. A run that was stopped goes on with its levels and with
what was chosen: what took long stays in ``<out>.unfinished``, for the same command or one with another budget.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
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
    verify_checkpoint,
)
from secateur.models import OneShot, digest, loaded_model, oneshot
from secateur.operations import Priced
from secateur.patterns import Pattern
from secateur.search.choosing import kept_by
from secateur.search.costs import Budget, words_of_shares
from secateur.search.fitting import (
    Executor,
    FitRequest,
    Units,
    check_all_pruned,
    check_costs,
    check_counts,
    counted,
    pattern_of,
    told_by,
    told_entries,
)
from secateur.search.levels import Levels
from secateur.search.result import Chosen, Fitted
from secateur.search.score import SCORES, split
from secateur.shrinking import CheckpointShrinking, shrink
from secateur.support import Fields, alone, described, on_rank_zero, plain, side_by_side, write_whole

LEVELS = "levels"
FILE = "chosen.json"
FORMAT, VERSION = "secateur choice", 2
_HINT = " Delete it: the choice is then made again."


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
    asked: FitRequest,
    store: Path | None,
    device: torch.device | str | None,
) -> Fitted:
    """`fit` of a directory into another one."""
    started = time.monotonic()
    budget, (_, back) = asked.budget, split(every)
    check_new(out)
    check_places(source, out)
    named = Path(asked.levels) if isinstance(asked.levels, str | os.PathLike) else None
    check_outside(out, source=source, store=store, levels=named)
    model = loaded_model(source, device)
    known = asked.given(model)
    step = asked.step(model, every)
    made_of = {
        "batches": [digest(every), len(back)],
        "levels": None if known is None else known.levels.made.digest,
        "over": sorted(asked.over),
        "shares": None if asked.shares is None else sorted(map(float, asked.shares)),
        **asked.scope,
        "solver": described(asked.solver) if "oneshot" in asked.over else None,
        "pattern": None if asked.pattern is None else patterns.word_of(asked.pattern),
        "round_to": asked.round_to if step is None else step,
    }
    with begun(out, made_of, open_checkpoint(source), copied=False) as run:
        run.kept = run.folder
        run.hint = (
            f" What was measured is kept in {run.place}, for the same command with another budget; remove it to give "
            "other options."
        )
        folder = run.folder / LEVELS if store is None else store
        if known is not None:
            folder.mkdir(parents=True, exist_ok=True)
        made = asked.made(model, every, folder, step) if known is None else known.levels
        its = pattern_of(made, asked.pattern)
        said = plain(
            {
                "source": _sha256({name: each["sha256"] for name, each in run.files.items()}),
                "made_of": made_of,
                "versions": library_versions(),
                "levels": made.made.digest,
                "measured": None if known is None else [known.score, _sha256(known.scores)],
                "pattern": patterns.word_of(its),
                "budget": dict(budget.limits),
                "keep": budget.keep,
                "target": budget.target,
                "runtime": str(budget.runtime),
                "score": described(asked.score) if callable(asked.score) else asked.score,
                "finals": asked.finals,
                "seed": asked.seed,
            }
        )
        other = callable(asked.score) or isinstance(budget.runtime, Priced)  # a function that may say otherwise now
        chosen = on_rank_zero(lambda: None if other else _chosen_before(folder / FILE, said, made, budget.words))
        measured = None
        if chosen is None:
            carrying = asked.executor(model, made, known, every, folder, in_directory=True)
            measured = carrying.choosing.measured
            chosen = _chosen(carrying)
            text = {"format": FORMAT, "version": VERSION, "asked": said, "chosen": plain(chosen)}
            on_rank_zero(functools.partial(write_whole, folder / FILE, json.dumps(text, indent=1)))
        elif budget.keep is not None:
            measured = asked.loss(model, back)
        made_of_it = _sha256([said, chosen.choice, chosen.units])[:12]

        def write() -> tuple[_Done, dict[str, float], tuple[float | None, float | None], Mapping[str, float]]:
            finished: tuple[float | None, float | None] = (None, None)
            kept: Mapping[str, float] = {}
            try:
                with alone():
                    done = _written(source, run.folder, made_of_it, every, asked, its, made, chosen, device)
                got = _got(budget, chosen, done, made)
                if measured is not None and budget.keep is not None:
                    written = loaded_model(done.folder, device)
                    finished, kept = measured.finished(written), measured.kept(written)
                    if not kept_by(measured.lost(finished), measured.most(budget.keep)):
                        raise ValueError(
                            f"the written model keeps less than {words_of_shares(budget.keep)}, unlike its copy in "
                            "memory, and was deleted: ask for a slightly larger keep, so that rounding does not matter."
                        )
            except CheckpointError:
                raise  # such as a full disk: the same choice is carried on with
            except ValueError:
                (folder / FILE).unlink(missing_ok=True)  # the same would fail again
                _remove_stages(run.folder)
                raise
            run.publish(done.folder)
            return done, got, finished, kept

        done, got, finished, kept = on_rank_zero(write)
    last = done.pruned is None
    return Fitted(
        asked=budget,
        chosen=chosen,
        got=got,
        levels=made,
        batches=len(every),
        finished=finished[0],
        finished_score=finished[1],
        kept=kept,
        seconds=time.monotonic() - started,
        out=out,
        shrunk=None if done.shrunk is None else replace(done.shrunk, out=out if last else None),
        pruned=None if done.pruned is None else replace(done.pruned, out=out),
        apart=known is None,
        step=step,
    )


@dataclass(frozen=True)
class _Done:
    """The directories and results of the verbs that were run."""

    folder: Path
    shrunk: CheckpointShrinking | None = None
    pruned: OneShot | None = None


def _written(
    source: Path,
    folder: Path,
    made_of: str,
    batches: Sequence[Any],
    asked: FitRequest,
    pattern: Pattern,
    levels: Levels,
    chosen: Chosen,
    device: torch.device | str | None,
) -> _Done:
    """What the verbs make of a directory by a choice, not yet under its name.

    Raises:
        ValueError: nothing has to leave, or other than was chosen did.
    """
    told = told_by(levels, chosen)
    units, entries = told.units, told.entries
    if not units and not entries:  # of a budget alone: what keeps a score is smaller, or an error
        raise ValueError(f"{source}: costs no more than the budget as it is; nothing was written.")
    where, result, smaller = source, folder / f"result-{made_of}", folder / f"shrunk-{made_of}"
    _remove_stages(folder, but=made_of)
    if result.exists():  # of a run that was stopped before it was seen that it holds
        shutil.rmtree(result)
    shrunk: CheckpointShrinking | None = None
    if units:
        where = smaller if entries else result
        if where.exists() and not _holds(where, source):
            shutil.rmtree(where)
        if not where.exists():
            done: Any = shrink(
                source,
                sparsity=0.5,  # the allocation says how many
                target="units",
                allocate=Units(units),
                round_to=1,
                batches=batches,
                device=device,
                out=where,
                **asked.scope,
            )
            shrunk = done
        sizes = {name: mask.size for name, mask in levels.kept(chosen.choice).items()}
        _check_counts(where, {name: count for name, count in units.items() if count != sizes.get(name)})
    if not entries:
        return _Done(where, shrunk)
    told_of_it = told_entries(entries, pattern, asked.scope)
    pruned = oneshot(where, batches, solver=asked.solver, out=result, device=device, **told_of_it)
    check_all_pruned(pruned, entries, pattern)
    return _Done(result, shrunk, pruned)


def _holds(folder: Path, source: Path) -> bool:
    """Whether what a verb wrote for a run that was stopped is still that."""
    with contextlib.suppress(CheckpointError):
        return verify_checkpoint(folder, source).ok
    return False


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
    if asked.keep is None:
        check_costs(chosen, got, "written")
    if chosen.measured is not None:
        got["latency"] = chosen.measured
    return got


def _chosen(carrying: Executor) -> Chosen:
    """What the budget allows, or the smallest that keeps so much when it is finished; ValueError where none does."""
    choosing, finals = carrying.choosing, carrying.asked.finals
    if choosing.asked.keep is None:
        return choosing.within(finals, carrying)
    most = choosing.measured.most(choosing.asked.keep)
    for chosen in choosing.kept(finals, carrying):
        (lost,) = side_by_side(carrying.lost_of, [chosen.choice])
        if kept_by(lost, most):
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
        read = Fields.read(path, hint=_HINT).of_format(FORMAT, VERSION)
    except FileNotFoundError:
        return None
    read.only("asked", "chosen")
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
