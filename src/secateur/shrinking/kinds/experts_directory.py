"""Removes experts from a directory: ranked by calibration text or a profile, then the files are sliced tensor by
tensor.

Law: every tensor that is written is one of the source's, or rows of one, byte for byte, but for those that were
repaired; the output appears under its name complete or not at all, and a run that was killed goes on to the same bytes.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.checkpoints import (
    RECORD,
    Checkpoint,
    CheckpointError,
    Unfinished,
    copy_others,
    digests_of_files,
    library_versions,
    nbytes_of_cut,
    open_checkpoint,
    other_weights,
    places,
    previous_record,
    record_text,
    sha256_of,
    shape_of_cut,
    unfinished,
)
from secateur.coupling import Group
from secateur.models import DirectoryWalk, RunAlong, barrier, digest, held_batches, on_rank_zero, rank_and_world
from secateur.report import Reported, Sheet
from secateur.shrinking.directory import Origin, config_text, files_of, origins_text, write_cut, write_file, write_index
from secateur.shrinking.kinds.expert_repair import OUTSIDE, Mended, MendedMixtures, leave_whole, mend
from secateur.shrinking.kinds.experts import Fewer, choose_experts, ranked
from secateur.shrinking.kinds.mixtures import (
    Beyond,
    Mixtures,
    Profile,
    Text,
    mixtures_of,
    profile_in,
    profile_values,
    read_profile,
    write_profile,
)
from secateur.shrinking.kinds.routing import PairedBlocks, new_values, of_directory
from secateur.shrinking.request import Request, request
from secateur.shrinking.result import experts_parts
from secateur.shrinking.select import Choice
from secateur.support import Forward, Part, track

EXPERTS = "experts.json"
FORMAT = "secateur experts"
_HELD_OUT = 4  # every fourth batch of a profile's text ranks nothing: on it is measured what leaving experts costs


@dataclass(frozen=True)
class ShrunkExperts(Reported):
    """The result of `shrink_experts_checkpoint`; prints as a table.

    Attributes:
        out: the directory that was written, if one was.
        rank: the measure by which experts were ranked.
        counts: ``{router: (experts before, after)}``; empty where none were to leave.
        kept: ``{router: experts that stay}``.
        unreached: ``{router: experts}`` that no token reached.
        profile: what is known of the experts; None without data.
        fields: the fields of the configuration that changed, ``{dotted name: (before, after)}``.
        parameters, nbytes: ``(before, after)``, of the tensors in the files.
        proof: on which model it was proved that nothing else changes, in words.
        unreached_first: whether those were to leave before others.
        mended: ``{router: share}``: the share of the squared residual behind a mixture that its repaired experts
            recover on held-out tokens; ``{router: why}`` in ``unmended`` of those that stay as they were.
        repaired: the tensors in the files whose values are new.
        left_out: files of the source that hold the weights in other forms, and were not copied.
        seconds: wall time.
    """

    out: Path | None
    rank: str
    counts: Mapping[str, tuple[int, int]]
    kept: Mapping[str, tuple[int, ...]] = field(repr=False)
    unreached: Mapping[str, tuple[int, ...]] = field(repr=False)
    profile: Profile | None = field(repr=False)
    fields: Mapping[str, tuple[Any, Any]]
    parameters: tuple[int, int]
    nbytes: tuple[int, int]
    proof: str
    unreached_first: bool
    left_out: tuple[Path, ...]
    seconds: float
    mended: Mapping[str, float] = field(default_factory=dict, repr=False)
    unmended: Mapping[str, str] = field(default_factory=dict, repr=False)
    repaired: tuple[str, ...] = field(default=(), repr=False)

    def _sheets(self) -> list[Sheet]:
        from secateur.shrinking.result import experts_sheets

        return experts_sheets(self)

    def _parts(self) -> Iterable[Part]:
        return experts_parts(self)


def shrink_experts_checkpoint(
    source: Path | str,
    out: Path | str | None,
    remove: float = 0.0,
    *,
    batches: Iterable[Any] | None = None,
    profile: Path | str | None = None,
    plan: Path | str | None = None,
    rank: str | None = None,
    unreached_first: bool = False,
    repair: bool = True,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    text: str = "batches",
    forward: Forward | None = None,
    activations: Path | str | None = None,
    device: torch.device | str | None = None,
    verify: bool = True,
) -> ShrunkExperts:
    """Writes to ``out`` the model of a Hugging Face directory with fewer experts; ``from_pretrained`` loads it.

    The model runs block by block, with one block's weights in memory, and data says what each expert does (`shrink`,
    ``rank_experts``). The configuration says the new number, all mixtures of one size keep the same, and never fewer
    than are chosen at a time. Then, with batches, the smaller model runs beside the dense one, and the last matrices of
    the experts that stay take over what the others gave; nothing else of what stays is changed. ``secateur.json`` and
    ``experts.json``, what each tensor was, are added.

    A run that was killed goes on where it was when it is started again, from ``<out>.unfinished``, to the same bytes;
    in processes of `torch.distributed` each takes its share of the batches.

    Args:
        source: a directory with ``config.json`` and safetensors files, sharded or not, each expert by itself or not.
        out: must not exist, nor lie inside ``source``. None: nothing is written but a profile.
        remove: the fraction of the experts of each mixture, or how many (1, 2, ...).
        batches: what a DataLoader yields, as for `oneshot`.
        profile: a file for what the batches say, which must not exist. A quarter of the batches ranks nothing then, and
            says what the model's outputs lose without experts.
        plan: such a file, in place of batches: nothing is run.
        rank: ``"reap"``, ``"frequency"`` or ``"criterion"`` (magnitude; the default without data), as ``rank_experts``
            of `shrink`.
        unreached_first: experts that no token reached leave first.
        repair: with batches, solve for the last matrices of the experts that stay, towards the dense model's stream.
        include, exclude: globs over names of routers and tensors of mixtures.
        text: what the profile calls the batches.
        forward, activations, device: as for `oneshot`.
        verify: prove on random weights, on a smaller model of the class, that nothing else changes.

    Raises:
        CheckpointError: a damaged checkpoint or profile, one of another model, or an ``out`` that cannot be.
        ValueError: nothing can leave, or not as much as asked, or no configuration says it.
        OSError: a full disk, a missing permission. Nothing is left under ``out`` in any case.

    >>> import tempfile
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    >>> config = MixtralConfig(vocab_size=9, num_hidden_layers=1, num_local_experts=4, **sizes)
    >>> folder = Path(tempfile.mkdtemp())
    >>> MixtralForCausalLM(config).save_pretrained(folder / "whole")
    >>> batches = [{"input_ids": torch.randint(0, 9, (2, 8))} for _ in range(4)]
    >>> done = shrink_experts_checkpoint(folder / "whole", folder / "small", 0.25, batches=batches)
    >>> done.counts
    {'model.layers.0.mlp.gate.weight': (4, 3)}
    >>> MixtralForCausalLM.from_pretrained(folder / "small").config.num_local_experts
    3
    """
    started = time.monotonic()
    asked = request(
        experts=remove,
        rank_experts=rank,
        unreached_first=unreached_first,
        include=include,
        exclude=exclude,
        verify=verify,
        uniform=True,
    )
    by_data = rank != "criterion"
    if batches is not None and plan is not None:
        raise ValueError("pass either batches= or plan=, not both.")
    if batches is None and plan is None and rank not in (None, "criterion"):
        raise ValueError(f"rank={rank!r} needs data: pass batches= or plan=.")
    if profile is not None and batches is None:
        raise ValueError("profile= is written from batches: pass batches= as well.")
    if profile is not None and os.path.lexists(profile):
        raise CheckpointError(f"{profile}: is there already; give plan= to use it, or name another file.")
    root, out = places(source, out)
    if out is not None and not remove:
        raise ValueError("remove is 0, so no expert leaves: pass a fraction in (0, 1), or a number of experts.")
    checkpoint = open_checkpoint(root)
    previous = previous_record(root)
    planned = None if plan is None else read_profile(Path(plan))
    there = {} if plan is None and profile is None else _files_of(checkpoint)
    if planned is not None:
        planned.check_source(there, Path(plan or ""))
    mixtures = mixtures_of(checkpoint, asked)
    if planned is not None:
        _check_same(planned, mixtures, Path(plan or ""))
    run = None
    if batches is not None and (by_data or (repair and out is not None)):
        run = _run_of(mixtures, asked, batches, text, forward, activations, device, profiled=profile is not None)

    def known() -> Profile | None:
        if run is None or not by_data:
            return planned
        return replace(_profiled(run), source=there)

    if out is None:
        learned = known()
        done = _planned(mixtures, asked, learned, out, started)[2]
    else:
        request_ = _said_of(asked, run, planned, repair=repair and run is not None)
        with _begun(out, request_, checkpoint) as begun:
            learned = _learned(begun, mixtures, known)
            with _leaving_nothing(begun):
                fewer, written, done = _planned(mixtures, asked, learned, out, started)
            assert fewer is not None
            digests = _write(begun, mixtures, done, fewer.choice, written)
            if run is not None and repair:
                done = _repaired(begun, run, written, done)
            done = replace(done, seconds=time.monotonic() - started)
            if not rank_and_world()[0]:
                _add_records(begun.folder, mixtures, done, written, digests, previous)
                if profile is not None and learned is not None:
                    write_profile(learned, Path(profile))
                begun.publish()
            barrier()
        return done
    if profile is not None and learned is not None and not rank_and_world()[0]:
        write_profile(learned, Path(profile))
    return done


def _planned(
    mixtures: Mixtures,
    asked: Request,
    known: Profile | None,
    out: Path | None,
    started: float,
) -> tuple[Fewer | None, dict[str, Origin], ShrunkExperts]:
    """What leaves, the origin of each tensor that is written, and the facts for the result."""
    checkpoint = mixtures.checkpoint
    routed = None if known is None else {group.name: known.routed[group.name] for group in mixtures.groups}
    fewer = choose_experts(mixtures.subject, asked, (), routed) if asked.experts else None
    written = mixtures.written(fewer.choice.plan) if fewer else {name: (name, {}) for name in checkpoint}
    entries = checkpoint.entries
    shapes = {name: shape_of_cut(entries[old], cuts) for name, (old, cuts) in written.items()}
    nbytes = sum(nbytes_of_cut(entries[written[name][0]], shape) for name, shape in shapes.items())
    chosen = fewer.choice.fields if fewer else {}
    groups = [group for group in mixtures.groups if fewer and group.name in fewer.choice.kept]
    done = ShrunkExperts(
        out=out,
        rank=asked.rank_experts or ("criterion" if known is None else "reap"),
        counts=fewer.counts if fewer else {},
        kept={group.name: tuple(fewer.choice.kept[group.name].nonzero()[0].tolist()) for group in groups if fewer},
        unreached=_unreached(known),
        profile=known,
        fields={".".join(map(str, at)): (mixtures.configured.value(at), value) for at, value in chosen.items()},
        parameters=(sum(each.numel for each in entries.values()), sum(map(math.prod, shapes.values()))),
        nbytes=(checkpoint.nbytes, nbytes),
        proof=mixtures.proof,
        unreached_first=asked.unreached_first,
        left_out=() if out is None else other_weights(checkpoint),
        seconds=time.monotonic() - started,
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
class _Run:
    """A calibration text, and how it is run.

    Attributes:
        mixtures: of the directory.
        asked: what was.
        every: all batches; ``held`` is this process's share, ``seen`` of those that rank experts, ``unseen`` of others.
        counts: tokens of those that rank, and of the others, of all processes.
        name: what the profile calls them.
        walk: the dense model, to be run.
    """

    mixtures: Mixtures
    asked: Request
    every: Sequence[Any]
    held: Sequence[Any]
    seen: Sequence[Any]
    unseen: Sequence[Any]
    counts: tuple[int, int]
    name: str
    walk: DirectoryWalk
    activations: Path | None


def _run_of(
    mixtures: Mixtures,
    asked: Request,
    batches: Iterable[Any],
    text: str,
    forward: Forward | None,
    activations: Path | str | None,
    device: torch.device | str | None,
    *,
    profiled: bool,
) -> _Run:
    every, held = held_batches(batches)
    every = list(every)
    unseen = every[_HELD_OUT - 1 :: _HELD_OUT] if profiled else []
    seen = [each for at, each in enumerate(every) if not profiled or at % _HELD_OUT != _HELD_OUT - 1]
    if profiled and not unseen:
        raise ValueError(f"a profile holds out every fourth batch: give {_HELD_OUT} at least, not {len(every)}.")
    folder = None if activations is None else Path(activations)
    walk = DirectoryWalk(
        mixtures.checkpoint, mixtures.checkpoint.root, held, forward=forward, activations=folder, device=device
    )
    walk.check()
    counts = _tokens(seen), _tokens(unseen)
    return _Run(mixtures, asked, every, held, _share(seen), _share(unseen), counts, text, walk, folder)


def _share(batches: Sequence[Any]) -> Sequence[Any]:
    """This process's; one without a share of its own runs along."""
    rank, world = rank_and_world()
    return batches[rank::world] if rank < len(batches) else RunAlong(batches[:1])


def _profiled(run: _Run) -> Profile:
    mixtures = run.mixtures
    routed = mixtures.routed(run.seen, run.walk)
    beyond: Mapping[float, Beyond] = {}
    if len(run.unseen):
        scores: Mapping[str, Tensor] = ranked(mixtures.subject, mixtures.groups, run.asked, routed)
        beyond = mixtures.beyond(run.unseen, run.walk, scores)
    return Profile(
        Text(run.name, digest(run.every), *run.counts),
        run.asked.rank_experts or "reap",
        routed,
        beyond,
    )


def _tokens(batches: Sequence[Any]) -> int:
    """How many tokens are no padding, as far as a batch says."""
    count = 0
    for batch in batches:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
        count += int(mask.sum()) if isinstance(mask, Tensor) else ids.numel() if isinstance(ids, Tensor) else 0
    return count


# ---- writing --------------------------------------------------------------------------------------------------------


def _said_of(asked: Request, run: _Run | None, planned: Profile | None, *, repair: bool) -> dict[str, Any]:
    """As JSON: what the bytes of a directory of fewer experts depend on, but for the source's files."""
    return {
        "method": "experts",
        "data": None if run is None else {"sha256": digest(run.every)},
        "held_out": None if run is None else run.counts[1],
        "plan": None if planned is None else profile_values(planned),
        "remove": asked.experts,
        "rank": asked.rank_experts,
        "unreached_first": asked.unreached_first,
        "include": asked.include,
        "exclude": asked.exclude,
        "verify": asked.verify,
        "repair": repair,
        "processes": rank_and_world()[1],
        "versions": library_versions(),
    }


@contextlib.contextmanager
def _begun(out: Path, said: Mapping[str, Any], checkpoint: Checkpoint) -> Iterator[Unfinished]:
    """The unfinished directory beside ``out``, which the first process makes."""
    rank, _ = rank_and_world()
    if rank:
        barrier()
    with unfinished(out, said, checkpoint, first=not rank, room=0) as begun:
        if not rank:
            barrier()
        yield begun


@contextlib.contextmanager
def _leaving_nothing(begun: Unfinished) -> Iterator[None]:
    """Removes the unfinished directory when a request is refused, since it is no run to continue."""
    try:
        yield
    except CheckpointError:
        raise  # of the journal itself, say
    except ValueError:
        if not rank_and_world()[0]:
            begun.remove()
        raise


def _learned(begun: Unfinished, mixtures: Mixtures, known: Callable[[], Profile | None]) -> Profile | None:
    """The statistics of the experts on a text: from an earlier run's journal, or measured now."""
    facts = begun.found().inner("facts")
    facts.only("profile", "files", "sha256", "writing")
    if "profile" in facts.values:
        found = profile_in(facts.inner("profile"))
        if {name: len(each.tokens) for name, each in found.routed.items()} != mixtures.sizes:
            raise facts.wrong("profile", "is of other mixtures than the directory has")
        return found
    learned = known()
    if learned is not None and not rank_and_world()[0]:
        begun.fill()
        begun.learn(profile=profile_values(learned))
    return learned


def _write(
    begun: Unfinished, mixtures: Mixtures, done: ShrunkExperts, choice: Choice, written: Mapping[str, Origin]
) -> dict[str, str]:
    """The smaller directory, but for the records: file after file, those that an earlier run wrote are there. The
    SHA-256 of the bytes of each tensor, as far as this process wrote."""
    if rank_and_world()[0]:
        barrier()
        return {}
    checkpoint = mixtures.checkpoint
    facts = begun.found().inner("facts")
    there = facts.each("files", str) if "files" in facts.values else []
    digests = facts.each_named("sha256", str) if there else {}
    begun.check_room(0 if there else done.nbytes[1])
    if not there:
        begun.empty()
    copy_others(checkpoint, begun.folder, done.left_out)  # those of an earlier run, too, are whole then
    (begun.folder / "config.json").write_text(config_text(checkpoint, mixtures.configured, choice.fields), "utf-8")
    places: dict[str, str] = {}
    for file, names in track(files_of(checkpoint, written), "slicing"):
        place = file.as_posix()
        places.update(dict.fromkeys(names, place))
        if place in there:
            continue
        digests |= write_file(checkpoint, begun.folder, file, names, written)
        begun.fill()
        there = [*there, place]
        begun.learn(files=there, sha256=digests)
    write_index(checkpoint, begun.folder, places, nbytes=done.nbytes[1], parameters=done.parameters[1])
    barrier()
    return digests


def _add_records(
    target: Path,
    mixtures: Mixtures,
    done: ShrunkExperts,
    written: Mapping[str, Origin],
    digests: Mapping[str, str],
    previous: Mapping[str, Any] | None,
) -> None:
    (target / EXPERTS).write_text(origins_text(mixtures.checkpoint, written, FORMAT), "utf-8")
    small = open_checkpoint(target)
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
        "sha256": {**digests, **{name: sha256_of(small, name) for name in done.repaired}},
    }
    (target / RECORD).write_text(record_text("experts", found, previous=previous), "utf-8")


# ---- what stays is changed -------------------------------------------------------------------------------------------


def _repaired(begun: Unfinished, run: _Run, written: Mapping[str, Origin], done: ShrunkExperts) -> ShrunkExperts:
    """The smaller directory runs beside the dense one, and its mixtures are solved, block after block."""
    groups = [group for group in run.mixtures.groups if group.name in done.counts]
    walk = DirectoryWalk(
        open_checkpoint(begun.folder),
        begun.folder,
        run.held,
        forward=run.walk.forward,
        activations=run.activations,
        device=run.walk.device,
    )
    mended = MendedMixtures()
    already, tensors = _gone_on_with(begun, walk, mended)
    _write_again(begun, run.mixtures.checkpoint, walk, written, already)
    rank, _ = rank_and_world()
    run.walk.batches = run.held
    with of_directory(run.walk, run.held) as dense, of_directory(walk, run.held) as small:
        beside = PairedBlocks(dense, small, groups, run.activations)
        leave_whole(beside.outside, OUTSIDE, mended)

        def change(name: str, its: Sequence[Group]) -> None:
            names: list[str] = []
            for group in its:
                names += write(name, mend(beside, small, name, [group], mended, folder=run.activations))
            if not rank:
                begun.note(_noted(name, its, mended, names))
                tensors.update(names)

        def write(name: str, changed: Sequence[str]) -> list[str]:
            """What changed in a block, while its weights are not in memory: they are put together once more."""
            if not changed:
                return []
            values = new_values(walk.model, name, sorted({*changed}))
            small.weights.unload(name)
            if not rank:
                begun.learn(writing=name)
            found = {} if rank else walk.files.write(name, values)
            barrier()
            del values
            small.weights.load(name, finished=False)
            return [each for each, what in found.items() if not what.kept_as_they_were]

        for _ in beside.run(change, already):
            pass
    return replace(
        done,
        mended=mended.shares,
        unmended=mended.whole,
        repaired=tuple(on_rank_zero(lambda: sorted(tensors))),
    )


def _noted(block: str, groups: Sequence[Group], mended: MendedMixtures, tensors: Sequence[str]) -> dict[str, Any]:
    """What the journal says of a block whose mixtures changed."""
    names = {group.name for group in groups}
    return {
        "name": block,
        "made_up_for": {name: each for name, each in mended.shares.items() if name in names},
        "not_repaired": {name: each for name, each in mended.whole.items() if name in names},
        "tensors": list(tensors),
    }


def _gone_on_with(begun: Unfinished, walk: DirectoryWalk, mended: MendedMixtures) -> tuple[list[str], set[str]]:
    """The blocks that an earlier run changed, and which tensors; what it said of them is said again."""
    already: list[str] = []
    tensors: set[str] = set()
    for block in begun.found().inners("blocks"):
        block.only("name", "made_up_for", "not_repaired", "tensors")
        name = block.take("name", str)
        if name not in walk.blocks or name in already:
            raise block.wrong("name", f"is {name}, which is no block of the model, or is there twice")
        already.append(name)
        mended.found.update({each: Mended(share) for each, share in block.each_named("made_up_for", float).items()})
        mended.found.update({each: Mended(None, why) for each, why in block.each_named("not_repaired", str).items()})
        tensors.update(block.each("tensors", str))
    return already, tensors


def _write_again(
    begun: Unfinished,
    source: Checkpoint,
    walk: DirectoryWalk,
    written: Mapping[str, Origin],
    already: Sequence[str],
) -> None:
    """The block that a killed run was writing is what it was before: a tensor may be half of the one and half of the
    other."""
    facts = begun.found().inner("facts")
    if not rank_and_world()[0] and "writing" in facts.values:
        block = facts.take("writing", str)
        if block not in walk.blocks:
            raise facts.wrong("writing", f"is {block}, which is no block of the model")
        groups = [group for name, group in walk.files.group_of.items() if name.startswith(f"{block}.")]
        for name in {name for group in groups for name in group.sources} if block not in already else ():
            old, cuts = written[name]
            entry = walk.source.entries[name]
            with open(entry.path, "r+b", buffering=0) as opened:
                opened.seek(entry.start)
                write_cut(opened, source, source.entries[old], cuts, [])
                os.fsync(opened.fileno())
    barrier()
