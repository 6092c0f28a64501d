"""The workspace of `fit` of a directory until that is complete: ``<out>.unfinished``, with a lock and the request.
A directory fitted to a budget: the model is loaded to choose, and the directory is carried through by the verbs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from secateur import patterns
from secateur.checkpoints import (
    LOCK,
    CheckpointError,
    check_new,
    check_places,
    claims_of,
    digests_of_files,
    library_versions,
    locked,
    publish,
    unfinished_folder,
)
from secateur.models import OneShot, Solve, digest, loaded_model, oneshot
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
from secateur.search.result import Chosen, Fitted, Point, cost_text
from secateur.search.score import SCORES, HeldBack, Score
from secateur.search.sensitivity import Sensitivity, given
from secateur.shrinking import CheckpointShrinking, example_of, shrink_checkpoint
from secateur.support import Fields, described, printable, write_whole

# ---- The workspace of `fit` of a directory until that is complete: ``<out>.unfinished``, with a lock and the request.
#
# Law: nothing is removed but what a fit has put there; one process at a time is in it; what took long stays, for the
# same command or one with another budget, and an error says so.

NOTE = "fit.json"
# A directory fitted to a budget: the model is loaded to choose, and the directory is carried through by the verbs.
#
# Law: the result appears under its name complete or not at all; a run that was killed goes on with its levels and
# with what was chosen.

FORMAT, VERSION = "secateur fit", 1
LEVELS = "levels"
_STAGE = re.compile(r"(shrunk|result)-[0-9a-f]{12}(\.unfinished)?")
_TEMPORARY = re.compile(rf"\.{re.escape(NOTE)}\..*\.tmp")


@dataclass(frozen=True)
class FitWorkspace:
    """The workspace beside ``out``: levels, the choice, and intermediate directories."""

    out: Path

    @property
    def folder(self) -> Path:
        """The path of the workspace."""
        return unfinished_folder(self.out)

    @property
    def levels(self) -> Path:
        """The path for levels where no store was named."""
        return self.folder / LEVELS

    def stage(self, what: str, digest: str) -> Path:
        """For a directory on the way, "shrunk" or the "result", by what it is made of; others are removed."""
        for path in self._stages():
            if digest[:12] not in path.name:
                shutil.rmtree(path)
        return self.folder / f"{what}-{digest[:12]}"

    def publish(self, result: Path) -> None:
        """Gives the result its final name, and removes the rest.

        Raises:
            CheckpointError: the name was taken meanwhile.
        """
        publish(result, self.out)
        self.remove()

    @property
    def has_levels(self) -> bool:
        """Whether some were made here."""
        return self.levels.is_dir() and any(self.levels.iterdir())

    @property
    def is_bare(self) -> bool:
        """Whether nothing is there that a run could go on with."""
        return not any(path.is_dir() and any(path.iterdir()) for path in self.folder.iterdir())

    def remove(self) -> None:
        """Removes what a fit has written there, the lock last, and the folder if nothing else is in it."""
        self.clear()
        if self.levels.is_dir() and not self.levels.is_symlink():
            shutil.rmtree(self.levels)
        (self.folder / NOTE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # Windows keeps what is open, and somebody may have put something there
            (self.folder / LOCK).unlink()
            self.folder.rmdir()

    def clear(self) -> None:
        """Removes the intermediate directories."""
        for path in self._stages():
            shutil.rmtree(path)

    def _stages(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if _STAGE.fullmatch(path.name) and not path.is_symlink()]

    def check(self) -> None:
        """Whether what is there was put there by a fit, from its names alone.

        Raises:
            CheckpointError: it is a link or a file, or holds what no fit has put there.
        """
        if not os.path.lexists(self.folder):
            return
        advice = "move it, or choose another name for the result."
        if self.folder.is_symlink() or not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no folder of an unfinished fit, and in the way of one; {advice}")
        names = set(os.listdir(self.folder))
        for name in sorted(names):
            wanted = stat.S_ISDIR if name == LEVELS or _STAGE.fullmatch(name) else stat.S_ISREG
            ours = name == LOCK or _TEMPORARY.fullmatch(name) or (NOTE in names and (name == NOTE or _is_dir(name)))
            if not ours or not wanted(os.lstat(self.folder / name).st_mode):
                raise CheckpointError(
                    f"{self.folder}: holds {printable(name)}, which no unfinished fit has put there; {advice}"
                )

    def begin(self, request: Mapping[str, Any]) -> None:
        """Notes what was asked, or holds it to the note of the run that was stopped.

        Raises:
            CheckpointError: that was asked for something else, or its note is damaged.
        """
        for path in self.folder.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                path.unlink()
        path, hint = self.folder / NOTE, f" Remove {self.folder} to start over."
        asked = json.loads(json.dumps(request))
        try:
            read = Fields.read(path, error=CheckpointError, hint=hint)
        except FileNotFoundError:
            note = {"format": FORMAT, "version": VERSION, "asked": asked}
            write_whole(path, json.dumps(note, indent=1))
            return
        if read.take("format", str) != FORMAT or read.take("version", int) != VERSION:
            raise read.wrong("format", f"is not {FORMAT!r} of version {VERSION}")
        read.only("format", "version", "asked")
        before = read.take("asked", dict)
        if other := [name for name in {**before, **asked} if before.get(name) != asked.get(name)]:
            raise CheckpointError(
                f"{self.folder}: a fit of another {', another '.join(map(printable, other))} was stopped here. Give "
                "its command again to finish it, or remove the folder to start over."
            )


@contextlib.contextmanager
def working(out: Path, request: Mapping[str, Any]) -> Iterator[FitWorkspace]:
    """The place, new or found. After an error it stays if it holds levels, or what a stopped run can go on with.

    Args:
        out: what becomes of it.
        request: what the levels are made of, as JSON.

    Raises:
        CheckpointError: another process is in it, it is nobody's, or of a fit of something else.
    """
    place = FitWorkspace(out)
    place.check()
    new = not place.folder.exists()
    place.folder.mkdir(exist_ok=True)
    with locked(place.folder):
        place.check()  # another run may have ended since
        place.begin(request)
        try:
            yield place
        except BaseException as error:  # after a full disk, say, the same command goes on
            in_vain = isinstance(error, ValueError) and not isinstance(error, CheckpointError)
            if new and (place.is_bare or (in_vain and not place.has_levels)):
                place.remove()
            elif type(error) is ValueError and place.has_levels:
                raise ValueError(
                    f"{error} What was measured is kept in {place.folder}, for the same command with another budget; "
                    "remove it to give other options."
                ).with_traceback(error.__traceback__) from None
            raise


def check_outside(out: Path, **named: Path | None) -> None:
    """`CheckpointError` where a folder that somebody named lies in one that this run makes or removes."""
    for name, path in named.items():
        for taken in (out, unfinished_folder(out)):
            if path is not None and path.resolve().is_relative_to(taken.parent.resolve() / taken.name):
                raise CheckpointError(
                    f"{path}: {name} lies in {taken}, which this run makes and moves; choose another folder for it, or "
                    "another name for the result."
                )


def _is_dir(name: str) -> bool:
    return name == LEVELS or _STAGE.fullmatch(name) is not None


FILE = "chosen.json"
DIRECTORY_FORMAT, DIRECTORY_VERSION = "secateur choice", 1
_HINT = " Delete it: the choice is then made again."
_EXACT = 1 + 1e-9


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
        "source": _sha256(digests_of_files(source)),
        "batches": [digest(every), len(back)],
        "levels": None if known is None else known.levels.made.digest,
        "over": sorted(kinds),
        "shares": None if shares is None else sorted(map(float, shares)),
        **scope,
        "solver": described(solver) if "oneshot" in kinds else None,
        "pattern": None if pattern is None else patterns.word_of(patterns.parse(pattern)),
        "round_to": round_to,
    }
    with working(out, made_of) as place:
        folder = place.levels if store is None else store
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
        said = json.loads(json.dumps(said))
        measured = None
        chosen = None if callable(score) else _chosen_before(folder / FILE, said, made, asked.words)
        if chosen is None or asked.keep is not None:
            measured = HeldBack(model, back, score=score)
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
            write_whole(folder / FILE, json.dumps(_to_json(chosen, said), indent=1))
        task = _Task(source, every, solver, scope, its, made, chosen, device)
        try:
            done = task.written(place, _sha256([said, chosen.choice, chosen.units]))
            got = _got(asked, chosen, done, made)
            finished: tuple[float, float | None] = (math.nan, None)
            if measured is not None and asked.keep is not None:
                finished = measured.finished_by(loaded_model(done.folder, device))
                if not kept_by(measured.lost(finished), measured.most(asked.keep)):
                    raise ValueError(
                        f"the written model keeps less than {asked.keep:.1%}, unlike its copy in memory, and was "
                        "deleted: ask for a slightly larger keep, so that rounding does not matter."
                    )
        except CheckpointError:
            raise  # such as a full disk: the same choice is carried on with
        except ValueError:
            (folder / FILE).unlink(missing_ok=True)  # the same would fail again
            place.clear()
            raise
        place.publish(done.folder)
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

    def written(self, place: FitWorkspace, made_of: str) -> _Done:
        """The result, not yet under its name.

        Raises:
            ValueError: nothing has to leave, or other than was chosen did.
        """
        told = told_of(self.levels, self.chosen.choice)
        units, entries = told.units if self.chosen.units is None else self.chosen.units, told.entries
        if not units and not entries:  # of a budget alone: what keeps a score is smaller, or an error
            raise ValueError(f"{self.source}: costs no more than the budget as it is; nothing was written.")
        where, result = self.source, place.stage("result", made_of)
        if result.exists():  # of a run that was stopped before it was seen that it holds
            shutil.rmtree(result)
        shrunk: CheckpointShrinking | None = None
        if units:
            where = place.stage("shrunk", made_of) if entries else result
            if not where.exists():
                shrunk = shrink_checkpoint(
                    self.source,
                    where,
                    0.5,  # the allocation says how many
                    target="units",
                    allocate=Units(units),
                    round_to=1,
                    batches=self.batches,
                    device=self.device,
                    **self.scope,
                )
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


def _to_json(chosen: Chosen, said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": DIRECTORY_FORMAT,
        "version": DIRECTORY_VERSION,
        "asked": dict(said),
        "chosen": _finite(asdict(chosen)),
    }


def _finite(value: Any) -> Any:
    """With null for what is infinite, which JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and value in (math.inf, -math.inf) else value


def _chosen_before(path: Path, said: Mapping[str, Any], levels: Levels, words: Sequence[str]) -> Chosen | None:
    """The choice of an earlier run; None where there is none, or its request was another.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        read = Fields.read(path, hint=_HINT)
    except FileNotFoundError:
        return None
    if read.take("format", str) != DIRECTORY_FORMAT or read.take("version", int) != DIRECTORY_VERSION:
        raise read.wrong("format", f"is not {DIRECTORY_FORMAT!r} of version {DIRECTORY_VERSION}")
    read.only("format", "version", "asked", "chosen")
    if read.take("asked", dict) != said:
        return None
    its = read.inner("chosen")
    its.only(*Chosen.__dataclass_fields__)
    choice = its.each_named("choice", int, least=1)
    for name, at in choice.items():
        if name not in levels or at >= len(levels[name]):
            raise its.wrong(f"choice.{name}", "is no level that there is")
    numbers = {name: its.each_named(name, float) for name in ("limits", "dense", "predicted")}
    for name, each in numbers.items():
        if not {*words} <= {*each}:
            raise its.wrong(name, f"is not of {', '.join(words)}")
    units = None if its.values.get("units") is None else its.each_named("units", int, least=0)
    lost, finals = its.inner("candidates"), its.inner("finals")
    taken = its.optional("taken", str)
    if taken is not None and taken not in finals.values:
        raise its.wrong("taken", "is none of the finals")
    compared = its.take("compared", str)
    if compared not in SCORES:
        raise its.wrong("compared", f"is none of {', '.join(SCORES)}")
    return Chosen(
        **numbers,
        measured=its.maybe("measured", float, least=0),
        choice=choice,
        candidates={name: _or_infinite(lost.maybe(name, float)) for name in lost.values},
        loss=_or_infinite(its.maybe("loss", float)),
        dense_score=its.maybe("dense_score", float),
        curve=tuple(
            Point(each.take("share", float), _or_infinite(each.maybe("loss", float)), each.maybe("score", float))
            for each in its.inners("curve")
        ),
        knee=its.maybe("knee", float),
        held_back=its.take("held_back", int, least=1),
        passes=its.take("passes", float, least=0),
        generations=its.take("generations", int, least=0),
        compared=compared,
        finals={name: _or_infinite(finals.maybe(name, float)) for name in finals.values},
        taken=taken,
        units=units,
        over=tuple(its.each("over", str)),
        stays=its.each_named("stays", str) if "stays" in its.values else {},
    )


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value
