"""`recover` of a directory: it is trained to match its teacher's directory.

Law: the source and the teacher are not changed; OUT appears complete or not at all; a run that was killed goes on where
it was, to the same bytes. Block by block one block of each model is in memory; by the outputs both models are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.checkpoints import (
    RECORD,
    Checkpoint,
    CheckpointError,
    Run,
    blaming_config,
    check_new,
    check_places,
    copy_tree,
    inspect_checkpoint,
    library_versions,
    open_checkpoint,
    previous_record,
    record_text,
    unfinished_copy,
)
from secateur.models import (
    BlockFiles,
    InFiles,
    build_on_meta,
    digest,
    full_name,
    held_batches,
    prepared,
    refuse_empty,
)
from secateur.recovery.descent import moving, removed_of
from secateur.recovery.local import Epochs, LocalPart, recover_locally
from secateur.recovery.outputs import (
    OnStep,
    Sampled,
    Steps,
    casting,
    check_text,
    load_state,
    load_text,
    sampled,
    save_state,
    save_text,
    spread_over,
)
from secateur.recovery.recovering import OnPart, Request, check_vocabularies, names_to_train, steps_of
from secateur.recovery.result import Judged, Recovered, memory_of
from secateur.support import printable, rank_and_world, track, unchanged, write_whole
from secateur.targets import find_targets

EVERY = 60.0  # seconds between two states that are written down, and at least twenty times what one takes


def recover_directory(
    source: Path,
    out: Path,
    dense: Path,
    batches: Iterable[Any] | Sampled | None,
    request: Request,
    *,
    activations: Path | str | None,
    teacher_on_disk: bool,
    device: torch.device | str | None,
    on_part: OnPart | None,
    on_step: OnStep | None,
) -> Recovered:
    """`recover` of a directory into another one, of which ``secateur.json`` says how many zeros each tensor has."""
    started = time.monotonic()
    if rank_and_world()[1] > 1:
        raise ValueError("recover runs in one process; start it without torchrun.")
    check_new(out)
    check_places(source, out)
    check_places(dense, out)
    asked = Sampled() if batches is None else batches
    if isinstance(asked, Sampled):
        asked = asked.of(build_on_meta(open_checkpoint(dense)))
        every: Any = [{"input_ids": torch.zeros(1, 2, dtype=torch.int64)}]  # to try the models on; the text comes later
        held: Any = every
    else:
        every, held = held_batches(asked)
        for batch in held:
            refuse_empty(held, batch)
    place = _Place.of(source, dense, unfinished_copy(out), held, request, activations, device)
    check_text(place.student.model, every, request.share if request.steps else 1.0)
    said = _said_of(request, asked if isinstance(asked, Sampled) else every, place.theirs.source)
    with casting(place.student.device, None), place.student.begun(out, said) as run:
        if isinstance(asked, Sampled):
            every[:] = _text(place, run, asked, request.seed)
            said = {**said, "data": digest(every)}
        parts, left_out = _local(place, run, request, on_part)
        ended = _by_outputs(place, run, request, every, on_step, on_disk=teacher_on_disk) if request.steps else None
        zeros, folder = _written(place, run, ended, parts, said, previous_record(source))
        run.publish(folder)
    return Recovered(
        losses=() if ended is None else tuple(ended.steps.losses),
        loss=None if ended is None else ended.steps.word,
        parts=tuple(parts),
        zeros=zeros,
        rows=0 if ended is None else ended.steps.rows,
        seconds=time.monotonic() - started,
        memory=memory_of(place.student.device),
        left_out=left_out,
        out=out,
        judged=None if ended is None else ended.judged,
    )


class _Place:
    """The two directories as models whose blocks are read one at a time, and what of the student moves.

    ``kept`` are the parameters of which what is zero stays zero: those that pruning may touch, and those that the
    source's record, or one of those before it, says to have zeros.
    """

    def __init__(self, student: InFiles, theirs: InFiles, request: Request, root: Path) -> None:
        self.student, self.theirs = student, theirs
        names = names_to_train(student.model, request.include, request.exclude, asking=False)
        self.trained = [name for name in names if "." in name]  # what lies at the top has no module to be written by
        before = set(_with_zeros(previous_record(root)))
        files = student.files.group_of
        self.kept = {*_touchable(student.model), *(name for name in files if before & {*files[name].sources})}

    @staticmethod
    def of(
        source: Path,
        dense: Path,
        work: Path,
        held: Sequence[Any],
        request: Request,
        activations: Path | str | None,
        device: torch.device | str | None,
    ) -> _Place:
        folder = None if activations is None else Path(activations)
        walks = []
        for root, into, own in ((source, work, folder), (dense, dense, None if folder is None else folder / "teacher")):
            walks.append(
                InFiles(open_checkpoint(root), into, held, forward=request.forward, activations=own, device=device)
            )
        place = _Place(walks[0], walks[1], request, source)
        check_vocabularies(walks[0].model, walks[1].model, request.forward)
        for walk in walks:
            walk.check()
            _check_finite(walk.source)
        return place

    def masks_of(self, block: str) -> dict[str, Tensor]:
        """What is removed of a block that is loaded."""
        weights = dict(self.student.blocks[block].named_parameters())
        masks = {name: each.ne(0) for name, each in weights.items() if full_name(block, name) in self.kept}
        return {name: mask for name, mask in masks.items() if not bool(mask.all())}


def _check_finite(source: Checkpoint) -> None:
    """`CheckpointError` for a weight that is NaN or infinite, by name: a loss would only be said to be."""
    for name, entry in track(source.entries.items(), "looking for NaN", total=len(source)):
        if entry.torch_dtype is None or not entry.torch_dtype.is_floating_point:
            continue
        values = source[name]
        if not bool((values.float() if values.element_size() == 1 else values).isfinite().all()):
            raise CheckpointError(
                f"{entry.path}: {printable(name)} has entries that are NaN or infinite; nothing can be learned from it."
            )


def _with_zeros(record: object) -> Iterator[str]:
    """The tensors that a record, or one of those before it, says to have zeros."""
    while isinstance(record, dict):
        for said in (record.get("pruned"), record.get("zeros")):
            yield from (name for name, share in said.items() if share) if isinstance(said, dict) else ()
        record = record.get("previous")


def _touchable(model: nn.Module) -> set[str]:
    try:
        return set(find_targets(model))
    except ValueError:  # there is none
        return set()


def _said_of(request: Request, batches: Iterable[Any] | Sampled, teacher: Checkpoint) -> dict[str, Any]:
    """As JSON: what the bytes of the result depend on, but for the source's files."""
    hashes = {}
    for path in track([*teacher.files, teacher.root / "config.json"], "reading the teacher"):
        with open(path, "rb") as file:
            hashes[str(path.relative_to(teacher.root))] = hashlib.file_digest(file, "sha256").hexdigest()
    data = {"sampled": asdict(batches)} if isinstance(batches, Sampled) else digest(batches)
    return {"verb": "recover", "data": data, "teacher": hashes, **request.described(), "versions": library_versions()}


def _text(place: _Place, run: Run, asked: Sampled, seed: int) -> list[dict[str, Tensor]]:
    """What the teacher writes, or wrote for an earlier run."""
    said = {"seed": seed, **asdict(asked)}
    start = None
    if run.sampled.exists():
        vocabulary = int(place.theirs.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        start = load_text(run.sampled, asked, said, vocabulary, run.hint)
    if start is None or len(start) < asked.samples:
        teacher = _loaded(place.theirs.source.root, place.theirs)
        start = sampled(
            teacher,
            asked,
            seed,
            start,
            lambda rows: run.keep_sampled(functools.partial(save_text, rows=rows, said=said)),
        )
    return asked.batches(start)


# ---- block by block -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """What a run's journal says of a block: its parts, and the tensors in the files that were written."""

    name: str
    parts: tuple[LocalPart, ...]
    tensors: tuple[str, ...]


def _local(
    place: _Place, run: Run, request: Request, on_part: OnPart | None
) -> tuple[list[LocalPart], tuple[str, ...]]:
    """What became of each part, of an earlier run's too; and what was left out."""
    if not request.local:
        return [], ()
    done = run.done(_Block, place.student.blocks)
    already, parts = [block.name for block in done], [part for block in done for part in block.parts]
    if len(already) == len(place.student.blocks):
        return parts, ()

    def commit(block: str, new: Mapping[str, Tensor], said: Sequence[LocalPart]) -> None:
        written = place.student.files.write(block, new)
        run.note(_Block(block, tuple(said), tuple(sorted(written))))
        place.student.put(block, new)  # the block is run once more with its new weights

    def add(part: LocalPart) -> None:
        parts.append(part)
        if on_part is not None:
            on_part(part)

    with contextlib.ExitStack() as stack:
        for host in (place.student, place.theirs):
            if host.activations is not None and not host.activations.exists():
                host.activations.mkdir()
                stack.callback(host.activations.rmdir)
        why = recover_locally(
            place.student.over(spread_over(place.student.batches, request.local_batches)),
            place.theirs.over(spread_over(place.theirs.batches, request.local_batches)),
            Epochs(request.local, request.local_rate, request.seed),
            trained=place.trained,
            masks_of=place.masks_of,
            commit=commit,
            already=already,
            on_part=add,
        )
    return parts, (why,) if why else ()


# ---- by the outputs -------------------------------------------------------------------------------------------------


class _Ended:
    """The result of the steps: the new values, by names in the model."""

    def __init__(self, steps: Steps, values: Mapping[str, Tensor], judged: Judged) -> None:
        self.steps, self.values, self.judged = steps, values, judged


def _by_outputs(
    place: _Place,
    run: Run,
    request: Request,
    batches: Sequence[Any],
    on_step: OnStep | None,
    *,
    on_disk: bool,
) -> _Ended:
    model = _loaded(run.folder, place.student)
    teacher = place.theirs.model if on_disk else _loaded(place.theirs.source.root, place.theirs)
    removed = removed_of(model, also=place.kept)
    model.requires_grad_(False)
    teacher.requires_grad_(False)
    trained = set(place.trained) & {name for name, _ in model.named_parameters()}
    with contextlib.ExitStack() as stack:
        for each in (model, teacher):
            stack.enter_context(unchanged(each))
            stack.enter_context(prepared(each))
        if on_disk:
            stack.enter_context(place.theirs.files.in_turn())
        held = stack.enter_context(moving(model, trained, removed))
        steps = steps_of(model, teacher, held.parameters, removed, request)
        steps.begin(batches)
        if run.state.exists():
            load_state(run.state, steps, run.hint)
        clock = _Clock()

        def after(number: int, loss: float) -> None:
            if on_step is not None:
                on_step(number, loss)
            if number < request.steps and clock.is_due():
                run.keep_state(functools.partial(save_state, steps=steps))
                clock.rewind()

        steps.run(batches, request.seed, after)
        judged = steps.judged()
        judged.warn(request.rate)
        moved = {id(mover.parameter) for mover in steps.descent.movers if judged.is_kept}
        values = {name: each for name, each in held.values().items() if id(held.parameters[name]) in moved}
    return _Ended(steps, values, judged)


def _loaded(folder: Path, walk: InFiles) -> nn.Module:
    from transformers.utils import logging

    kind: Any = type(walk.model)
    dtype = next((each.dtype for each in walk.model.parameters() if each.is_floating_point()), torch.float32)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # its own would be drawn in a pipe as well
    with blaming_config(folder, "its model cannot be loaded"):
        model: nn.Module = kind.from_pretrained(folder, local_files_only=True, dtype=dtype)
    return model.to(walk.device).eval()


class _Clock:
    """When a state is written down: not more often than `EVERY`, nor for more than a twentieth of the time."""

    def __init__(self) -> None:
        self.last, self.asked, self.took = time.monotonic(), 0.0, 0.0

    def is_due(self) -> bool:
        self.asked = time.monotonic()
        return self.asked - self.last >= max(EVERY, 20 * self.took)

    def rewind(self) -> None:
        self.last = time.monotonic()
        self.took = self.last - self.asked


# ---- written --------------------------------------------------------------------------------------------------------


def _written(
    place: _Place,
    run: Run,
    ended: _Ended | None,
    parts: Sequence[LocalPart],
    said: Mapping[str, Any],
    previous: Mapping[str, Any] | None,
) -> tuple[dict[str, tuple[int, int]], Path]:
    """The folder that becomes OUT, and the zeros of the weights that have any, as they lie in the files."""
    touched = {name for block in run.done(_Block, place.student.blocks) for name in block.tensors}
    folder = run.folder
    if ended is not None:
        folder = run.remade()
        for _ in track(copy_tree(run.folder, folder), "copying"):
            pass
        files = BlockFiles(place.student.model, place.student.blocks, place.student.source, folder)
        for top, new in _by_top(ended.values).items():
            touched |= set(files.write(top, new))
    now, before = (inspect_checkpoint(each) for each in (folder, place.student.source.root))
    sizes = {each.name: each.numel for each in now.tensors}
    counts, old = ({each.name: each.zeros or 0 for each in found.tensors} for found in (now, before))
    sources = {name for target in place.kept for name in _sources(place.student.files, target)}
    zeros = {name: (old[name], count) for name, count in counts.items() if name in sources and old[name]}
    record = {
        "kept_weights": "updated",
        "pruned": {name: count / max(sizes[name], 1) for name, count in counts.items() if name in touched},
        "removed": {name: old[name] for name in zeros if name in touched},
        "left_alone": {"not trained": [name for name in counts if name not in touched]},
        "zeros": {name: old[name] for name in zeros if name not in touched},
        "sparsity": {"model": now.total().sparsity},
        "data": {"sha256": said["data"]},
        "teacher": said["teacher"],
        "asked": {name: value for name, value in said.items() if name not in ("verb", "data", "teacher", "versions")},
        "blocks": [asdict(each) for each in parts],
        "losses": [] if ended is None else ended.steps.losses,
        "judged": None if ended is None else ended.judged.described(),
    }
    versions = {"transformers": said["versions"]["transformers"]}
    text = record_text("recover", record, previous=previous, versions=versions)
    if ended is None:
        run.add(RECORD, text)
    else:
        write_whole(folder / RECORD, text)
    return zeros, folder


def _by_top(values: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """By the first part of their names: what a file holds as one tensor is never in two."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in values.items():
        top, _, rest = name.partition(".")
        found.setdefault(top, {})[rest] = value
    return found


def _sources(files: BlockFiles, target: str) -> tuple[str, ...]:
    group = files.group_of.get(target)
    return () if group is None else group.sources
