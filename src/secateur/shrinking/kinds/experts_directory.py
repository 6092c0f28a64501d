"""Removes experts from a directory: ranked by calibration text or a profile, then the files are sliced tensor by
tensor.

Law: every tensor that is written is one of the source's, or rows of one, byte for byte, but for those that were
repaired; the output appears under its name complete or not at all, and a run that was killed goes on to the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.checkpoints import (
    RECORD,
    Checkpoint,
    CheckpointError,
    Origin,
    Run,
    begun,
    copy_others,
    digests_of_files,
    files_of,
    head_of,
    open_checkpoint,
    previous_record,
    record_text,
    request_of,
    write_cut,
    write_file,
    write_index,
)
from secateur.coupling import Group
from secateur.models import InFiles, digest, held_batches, loaded_model, own_share
from secateur.shrinking.directory import config_text, facts_of, origins_text
from secateur.shrinking.gates import Gated
from secateur.shrinking.kinds.expert_repair import OUTSIDE, Mended, MendedMixtures, leave_whole, mend
from secateur.shrinking.kinds.experts import Fewer, choose_experts, learnt_experts, ranked
from secateur.shrinking.kinds.mixtures import (
    Beyond,
    Mixtures,
    Profile,
    Text,
    mixtures_of,
    read_profile,
    write_profile,
)
from secateur.shrinking.kinds.routing import PairedBlocks, new_values
from secateur.shrinking.request import InDirectory, Request
from secateur.shrinking.result import ShrunkDirectory, experts_content
from secateur.shrinking.select import Choice
from secateur.solvers import UNSEEN, is_held_out
from secateur.support import Part, on_rank_zero, rank_and_world

EXPERTS = "experts.json"
FORMAT = "secateur experts"


@dataclass(frozen=True)
class ShrunkExperts(ShrunkDirectory):
    """The result of `shrink` of a directory with ``leave=Experts(...)``; prints as a table. Beside what
    `ShrunkDirectory` has:

    Attributes:
        rank: the measure by which experts were ranked.
        kept: ``{router: experts that stay}``.
        unreached: ``{router: experts}`` that no token reached.
        profile: what is known of the experts; None without data.
        unreached_first: whether those were to leave before others.
        mended: ``{router: share}``: the share of the squared residual behind a mixture that its repaired experts
            recover on held-out tokens; ``{router: why}`` in ``unmended`` of those that stay as they were.
        repaired: the tensors in the files whose values are new.
        gates, lost: of gates, as in `Shrunk`.
    """

    rank: str
    kept: Mapping[str, tuple[int, ...]] = field(repr=False)
    unreached: Mapping[str, tuple[int, ...]] = field(repr=False)
    profile: Profile | None = field(repr=False)
    unreached_first: bool
    mended: Mapping[str, float] = field(default_factory=dict, repr=False)
    unmended: Mapping[str, str] = field(default_factory=dict, repr=False)
    repaired: tuple[str, ...] = field(default=(), repr=False)
    gates: Mapping[str, Gated] = field(default_factory=dict, repr=False)
    lost: float | None = None

    def content(self) -> Iterable[Part]:
        return experts_content(self, full=True)

    def summary(self) -> Iterable[Part]:
        return experts_content(self, full=False)


def shrink_experts_directory(place: InDirectory, asked: Request) -> ShrunkExperts:
    """`shrink` of a directory into another one: experts leave, and the last matrices of those that stay take over what
    the others gave. All mixtures of one size keep the same number."""
    started = time.monotonic()
    batches, out = place.batches, place.out
    rank, profile, plan = asked.experts.rank, asked.experts.profile, asked.experts.plan
    by_data = rank != "criterion"
    if batches is not None and plan is not None:
        raise ValueError("pass either batches= or plan=, not both.")
    if batches is None and plan is None and rank not in (None, "criterion"):
        raise ValueError(f"rank={rank!r} needs data: pass batches= or plan=.")
    if profile is not None and batches is None:
        raise ValueError("profile= is written from batches: pass batches= as well.")
    if profile is not None and os.path.lexists(profile):
        raise CheckpointError(f"{profile}: is there already; give plan= to use it, or name another file.")
    if out is not None and not asked.experts.remove:
        raise ValueError("no expert leaves: say how many, such as leave=Experts(0.25) or Experts(2).")
    checkpoint = open_checkpoint(place.source)
    previous = previous_record(place.source)
    planned = None if plan is None else read_profile(Path(plan))
    there = {} if plan is None and profile is None else _files_of(checkpoint)
    if planned is not None:
        planned.check_source(there, Path(plan or ""))
    mixtures = mixtures_of(checkpoint, asked)
    if planned is not None:
        _check_same(planned, mixtures, Path(plan or ""))
    text_run = None
    if batches is not None and (by_data or asked.gates or (place.repair and out is not None)):
        text_run = _run_of(place, mixtures, asked, batches)

    measured = text_run if by_data else None

    def planned_by(
        learned: Profile | None, run: Run | None = None
    ) -> tuple[Fewer | None, dict[str, Origin], ShrunkExperts]:
        learn = functools.partial(_gates, text_run, run) if asked.gates and text_run is not None else None
        return _planned(place, mixtures, asked, learned, started, learn)

    if out is None:
        learned = planned if measured is None else _profiled(measured, there)
        done = planned_by(learned)[2]
    else:
        known = None if text_run is None else {"sha256": digest(text_run.every), "held_out": text_run.counts[1]}
        said = request_of("experts", asked, data=known, plan=planned, repair=place.repair and text_run is not None)
        with begun(out, said, checkpoint, copied=False) as run:
            learned = planned if measured is None else _learned(run, measured, there)
            with _leaving_nothing(run):
                fewer, written, done = planned_by(learned, run)
            assert fewer is not None
            digests = _write(run, mixtures, done, fewer.choice, written)
            if text_run is not None and place.repair:
                done = _repaired(run, text_run, written, digests, done)
            done = replace(done, seconds=time.monotonic() - started)

            def publish() -> None:
                run.check_said(done.repaired, digests)
                _add_records(run, mixtures, done, written, digests, previous)
                if profile is not None and learned is not None:
                    write_profile(learned, Path(profile))
                try:
                    run.publish()
                except Exception:  # the same call goes on, and writes the profile anew
                    if profile is not None:
                        Path(profile).unlink(missing_ok=True)  # by the criterion none was written
                    raise

            on_rank_zero(publish)
        return done
    if profile is not None and learned is not None and not rank_and_world()[0]:
        write_profile(learned, Path(profile))
    return done


def _planned(
    place: InDirectory,
    mixtures: Mixtures,
    asked: Request,
    known: Profile | None,
    started: float,
    learn: Callable[[Sequence[Group], Mapping[str, Tensor], float], Gated] | None,
) -> tuple[Fewer | None, dict[str, Origin], ShrunkExperts]:
    """What leaves, the origin of each tensor that is written, and the facts for the result."""
    checkpoint = mixtures.checkpoint
    routed = None if known is None else {group.name: known.routed[group.name] for group in mixtures.groups}
    fewer = choose_experts(mixtures.subject, asked, (), routed, learn) if asked.experts.remove else None
    written = mixtures.written(fewer.choice.plan) if fewer else {name: (name, {}) for name in checkpoint}
    chosen = fewer.choice.fields if fewer else {}
    groups = [group for group in mixtures.groups if fewer and group.name in fewer.choice.kept]
    done = ShrunkExperts(
        rank=asked.experts.rank or ("criterion" if known is None else "reap"),
        counts=fewer.counts if fewer else {},
        kept={group.name: tuple(fewer.choice.kept[group.name].nonzero()[0].tolist()) for group in groups if fewer},
        unreached=_unreached(known),
        profile=known,
        unreached_first=asked.experts.unreached_first,
        gates={"experts": fewer.gates} if fewer and fewer.gates else {},
        **facts_of(place, checkpoint, written, mixtures.configured, chosen, proof=mixtures.proof, started=started),
    )
    return fewer, written, done


def _unreached(known: Profile | None) -> dict[str, tuple[int, ...]]:
    found = {} if known is None else {name: each.unreached for name, each in known.routed.items()}
    return {name: each for name, each in found.items() if each}


def _files_of(checkpoint: Checkpoint) -> dict[str, str]:
    """The digests of what a model is loaded from: its weights and its configuration."""
    files = [*checkpoint.files, checkpoint.root / "config.json"]
    return digests_of_files(checkpoint.root, [path.relative_to(checkpoint.root) for path in files])


def _check_same(known: Profile, mixtures: Mixtures, path: Path) -> None:
    mine = {name: len(each.tokens) for name, each in known.routed.items()}
    for name, size in mixtures.sizes.items():
        if mine.get(name) != size:
            raise CheckpointError(f"{path}: says nothing of {name}, which chooses between {size} experts here.")


@dataclass(frozen=True, eq=False)
class _Calibration:
    """A calibration text, and how it is run.

    Attributes:
        mixtures: of the directory.
        asked: what was.
        every: all batches; ``held`` is this process's share, ``seen`` of those that rank experts, ``unseen`` of others.
        counts: tokens of those that rank, and of the others, of all processes.
        walk: the dense model, to be run.
        place: how it is.
    """

    mixtures: Mixtures
    asked: Request
    every: Sequence[Any]
    held: Sequence[Any]
    seen: Sequence[Any]
    unseen: Sequence[Any]
    counts: tuple[int, int]
    walk: InFiles
    place: InDirectory


def _run_of(place: InDirectory, mixtures: Mixtures, asked: Request, batches: Iterable[Any]) -> _Calibration:
    profiled = asked.experts.profile is not None
    every, held = held_batches(batches)
    every = list(every)
    unseen = [each for at, each in enumerate(every) if profiled and is_held_out(at)]
    seen = [each for at, each in enumerate(every) if not (profiled and is_held_out(at))]
    if profiled and not unseen:
        raise ValueError(f"a profile holds out every fourth batch: give {UNSEEN} at least, not {len(every)}.")
    walk = place.walk(mixtures.checkpoint, place.source, held)
    counts = _tokens(seen), _tokens(unseen)
    return _Calibration(mixtures, asked, every, held, own_share(seen), own_share(unseen), counts, walk, place)


def _profiled(run: _Calibration, source: Mapping[str, str]) -> Profile:
    mixtures = run.mixtures
    routed = mixtures.routed(run.seen, run.walk)
    beyond: Mapping[float, Beyond] = {}
    if len(run.unseen):
        scores: Mapping[str, Tensor] = ranked(mixtures.subject, mixtures.groups, run.asked, routed)
        beyond = mixtures.beyond(run.unseen, run.walk, scores)
    return Profile(
        Text(run.asked.experts.text, digest(run.every), *run.counts),
        run.asked.experts.rank or "reap",
        routed,
        beyond,
        source,
    )


def _gates(
    run: _Calibration, journal: Run | None, groups: Sequence[Group], scores: Mapping[str, Tensor], share: float
) -> Gated:
    """Gates of the experts of the model, which is loaded as a whole meanwhile; from an earlier run's journal."""
    named = {group.name: group for group in groups}

    def learn() -> Gated:
        its = run.mixtures.subject, groups, scores, share
        load = functools.partial(loaded_model, run.place.source, run.place.device)
        return on_rank_zero(lambda: learnt_experts(*its, load(), run.every, run.place.forward))

    return learn() if journal is None else journal.stage("gates", Gated, learn, lambda its: its.misfit(named))


def _tokens(batches: Sequence[Any]) -> int:
    """How many tokens are no padding, as far as a batch says."""
    count = 0
    for batch in batches:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
        count += int(mask.sum()) if isinstance(mask, Tensor) else ids.numel() if isinstance(ids, Tensor) else 0
    return count


# ---- writing --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _leaving_nothing(run: Run) -> Iterator[None]:
    """Removes the unfinished directory when a request is refused, since it is no run to continue."""
    try:
        yield
    except CheckpointError:
        raise  # of the journal itself, say
    except ValueError:
        if run.writes:
            run.remove()
        raise


def _learned(run: Run, calibration: _Calibration, source: Mapping[str, str]) -> Profile:
    """The statistics of the experts on a text: from an earlier run's journal, or measured now."""

    def misfit(found: Profile) -> str | None:
        sizes = {name: len(each.tokens) for name, each in found.routed.items()}
        return found.wrong() if sizes == calibration.mixtures.sizes else "is of other mixtures than the directory has"

    return run.stage("profile", Profile, lambda: _profiled(calibration, source), misfit)


def _write(
    run: Run, mixtures: Mixtures, done: ShrunkExperts, choice: Choice, written: Mapping[str, Origin]
) -> dict[str, str]:
    """The smaller directory, but for the records: file after file, those that an earlier run wrote are there. The
    SHA-256 of the bytes of each tensor."""
    checkpoint = mixtures.checkpoint

    def write_others() -> None:
        run.check_room(0 if run.written else done.nbytes[1])
        copy_others(checkpoint, run.folder, done.left_out)  # those of an earlier run, too, are whole then
        (run.folder / "config.json").write_text(config_text(checkpoint, mixtures.configured, choice.fields), "utf-8")
        write_index(checkpoint, run.folder, written, nbytes=done.nbytes[1], parameters=done.parameters[1])

    on_rank_zero(write_others)
    digests: dict[str, str] = {}

    def write(file: Path, names: Sequence[str]) -> dict[str, str]:
        found = write_file(checkpoint, run.folder, file, names, written)
        run.written.update(found)
        return found

    for file, names in files_of(checkpoint, written):
        one = functools.partial(on_rank_zero, functools.partial(write, file, names))
        other = functools.partial(_of_others, names)
        digests |= run.stage(f"sha256 of {file.as_posix()}", dict[str, str], one, other)

    def check_heads() -> None:
        for file, names in files_of(checkpoint, written) if run.goes_on else ():  # which the first process knows
            path, (head, size) = run.folder / file, head_of(checkpoint, file, names, written)
            with open(path, "rb") as opened:
                if opened.read(len(head)) != head or path.stat().st_size != size:
                    raise run.changed(file.as_posix())

    on_rank_zero(check_heads)
    return digests


def _of_others(names: Collection[str], found: Mapping[str, str]) -> str | None:
    return None if found.keys() == {*names} else "is of other tensors than the file has"


def _add_records(
    run: Run,
    mixtures: Mixtures,
    done: ShrunkExperts,
    written: Mapping[str, Origin],
    digests: Mapping[str, str],
    previous: Mapping[str, Any] | None,
) -> None:
    (run.folder / EXPERTS).write_text(origins_text(mixtures.checkpoint, written, FORMAT), "utf-8")
    found = {
        "experts": {name: {"from": size, "to": left} for name, (size, left) in done.counts.items()},
        "kept": {name: list(each) for name, each in done.kept.items()},
        "rank": done.rank,
        "text": None if done.profile is None else vars(done.profile.text),
        "repair": {"made_up_for": dict(done.mended), "not_repaired": dict(done.unmended)},
        "repaired": list(done.repaired),
        "config": {name: {"from": before, "to": after} for name, (before, after) in done.fields.items()},
        "parameters": {"from": done.parameters[0], "to": done.parameters[1]},
        "proof": done.proof,
        "sha256": {**digests, **{name: run.written[name] for name in done.repaired}},
    }
    (run.folder / RECORD).write_text(record_text("experts", found, previous=previous), "utf-8")


# ---- what stays is changed -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """What a run's journal says of a block whose mixtures changed: the SHA-256 of each tensor that did, too."""

    name: str
    shares: Mapping[str, float]
    whole: Mapping[str, str]
    tensors: Mapping[str, str]


def _repaired(
    run: Run, calibration: _Calibration, written: Mapping[str, Origin], digests: Mapping[str, str], done: ShrunkExperts
) -> ShrunkExperts:
    """The smaller directory runs beside the dense one, and its mixtures are solved, block after block."""
    groups = [group for group in calibration.mixtures.groups if group.name in done.counts]
    walk = calibration.place.walk(open_checkpoint(run.folder), run.folder, calibration.held)
    walk.files.written = run.written
    blocks = run.done(_Block, walk.blocks)
    on_rank_zero(lambda: _slice_again(run, calibration.mixtures.checkpoint, walk.source, written, blocks))
    already = [block.name for block in blocks]
    mended = MendedMixtures()
    for block in blocks:
        mended.found.update({name: Mended(share) for name, share in block.shares.items()})
        mended.found.update({name: Mended(None, why) for name, why in block.whole.items()})
    whole = calibration.walk.over(calibration.held)
    with whole.replaying() as dense, walk.replaying() as small, torch.no_grad():
        beside = PairedBlocks(dense, small, groups, walk.activations)
        leave_whole(beside.outside, OUTSIDE, mended)

        def change(name: str, its: Sequence[Group]) -> None:
            tensors: dict[str, str] = {}
            for group in its:
                tensors |= write(name, mend(beside, small, name, [group], mended, folder=walk.activations))
            names = {group.name for group in its}
            shares = {each: share for each, share in mended.shares.items() if each in names}
            whole = {each: why for each, why in mended.whole.items() if each in names}
            blocks.append(_Block(name, shares, whole, tensors))
            run.note(blocks[-1])

        def write(name: str, changed: Sequence[str]) -> dict[str, str]:
            """What changed in a block, while its weights are not in memory: they are put together once more."""
            if not changed:
                return {}
            values = new_values(walk.model, name, sorted({*changed}))
            small.weights.unload(name)
            found = on_rank_zero(functools.partial(walk.files.write, name, values))
            del values
            small.weights.load(name, finished=False)
            return (
                {each: run.written[each] for each in found if run.written[each] != digests[each]} if run.writes else {}
            )

        for _ in beside.run(change, already):
            pass
    return replace(
        done,
        mended=mended.shares,
        unmended=mended.whole,
        repaired=tuple(on_rank_zero(lambda: sorted({name for block in blocks for name in block.tensors}))),
    )


def _slice_again(
    run: Run,
    source: Checkpoint,
    copy: Checkpoint,
    written: Mapping[str, Origin],
    blocks: Sequence[_Block],
) -> None:
    """What a killed run was writing is what it was before: a tensor may be half of the one and half of the other."""
    finished = {name for block in blocks for name in block.tensors}
    for name in run.damaged():
        if name in finished:
            raise run.changed(name)
        old, cuts = written[name]
        with open(copy.entries[name].path, "r+b", buffering=0) as opened:
            opened.seek(copy.entries[name].start)
            write_cut(opened, source, source.entries[old], cuts)
            os.fsync(opened.fileno())
