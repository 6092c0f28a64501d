"""`recover` of a directory: it is trained to match its teacher's directory.

Law: the source and the teacher are not changed; OUT appears complete or not at all; a run that was killed goes on where
it was, to the same bytes. Block by block one block of each model is in memory; by the outputs both models are, of which
each of several processes holds its share.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
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
    digests_of_files,
    inspect_checkpoint,
    open_checkpoint,
    previous_record,
    record_text,
    request_of,
    unfinished_copy,
)
from secateur.models import (
    BlockFiles,
    InFiles,
    block_of,
    build_on_meta,
    digest,
    full_name,
    held_batches,
    refuse_empty,
)
from secateur.recovery.descent import removed_of, touchable
from secateur.recovery.local import Epochs, LocalPart, recover_locally
from secateur.recovery.outputs import (
    LOCAL_BATCHES,
    OnStep,
    Sampled,
    Steps,
    check_text,
    load_state,
    load_text,
    sampled,
    save_state,
    save_text,
    spread_over,
    steps_in,
)
from secateur.recovery.recovering import (
    OnPart,
    Request,
    check_shared,
    check_vocabularies,
    names_to_train,
    result_of,
    steps_of,
    trained_beside,
)
from secateur.recovery.result import Recovered
from secateur.support import (
    all_gather,
    everywhere,
    is_sharded,
    on_rank_zero,
    printable,
    rank_and_world,
    sharded_as,
    track,
    whole,
    widened,
    write_whole,
)

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
    check_shared(request, Sampled() if batches is None else batches)
    check_new(out)
    check_places(source, out)
    check_places(dense, out)
    asked = Sampled() if batches is None else batches
    if isinstance(asked, Sampled):
        asked = asked.of(build_on_meta(open_checkpoint(dense)))
        # to try the models on; the text comes later
        every: Any = [{"input_ids": torch.zeros(1, 2, dtype=torch.int64, device="cpu")}]
        held: Any = every
    else:
        every, held = held_batches(asked)
        for batch in held:
            refuse_empty(held, batch)
    place = _Place(source, dense, unfinished_copy(out), held, request, activations, device)
    check_text(place.student.model, every, request.share if request.steps else 1.0)
    said = _said_of(request, asked if isinstance(asked, Sampled) else every, place.theirs.source)
    with place.student.begun(out, said) as run:
        if isinstance(asked, Sampled):
            every[:] = _text(place, run, asked, request.seed)
            said = {**said, "data": digest(every)}
        parts, left_out = _local(place, run, request, on_part)
        steps, values = _by_outputs(place, run, request, every, on_step, on_disk=teacher_on_disk)
        zeros = _written(place, run, steps, values, parts, said, previous_record(source))
    return result_of(steps, parts, zeros, left_out, place.student.device, started, out)


class _Place:
    """The two directories as models whose blocks are read one at a time, and what of the student moves.

    ``kept`` are the parameters of which what is zero stays zero: those that pruning may touch, and those that the
    source's record, or one of those before it, says to have zeros.
    """

    def __init__(
        self,
        source: Path,
        dense: Path,
        work: Path,
        held: Sequence[Any],
        request: Request,
        activations: Path | str | None,
        device: torch.device | str | None,
    ) -> None:
        folder = None if activations is None else Path(activations)
        self.student, self.theirs = (
            InFiles(open_checkpoint(root), into, held, forward=request.forward, activations=own, device=device)
            for root, into, own in ((source, work, folder), (dense, dense, folder and folder / "teacher"))
        )
        student, theirs = self.student, self.theirs
        names = names_to_train(student.model, request.include, request.exclude, asking=False)
        self.trained = [name for name in names if "." in name]  # what lies at the top has no module to be written by
        before = set(_with_zeros(previous_record(source)))
        files = student.files.group_of
        self.kept = {*touchable(student.model), *(name for name in files if before & {*files[name].sources})}
        check_vocabularies(student.model, theirs.model, request.forward)
        for walk in (student, theirs):
            walk.check()
            if request.steps:  # `from_pretrained` fills what is missing with random numbers
                walk.files.check(whole=True)
            on_rank_zero(functools.partial(_check_finite, walk.source))

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


def _said_of(request: Request, batches: Iterable[Any] | Sampled, teacher: Checkpoint) -> dict[str, Any]:
    """As JSON: what the bytes of the result depend on, but for the source's files."""
    files = [path.relative_to(teacher.root) for path in (*teacher.files, teacher.root / "config.json")]
    data = {"sampled": asdict(batches)} if isinstance(batches, Sampled) else digest(batches)
    return request_of("recover", request, data=data, teacher=digests_of_files(teacher.root, files))


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
    """What a run's journal says of a block: its parts."""

    name: str
    parts: tuple[LocalPart, ...]


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
        place.student.files.write(block, new)
        run.note(_Block(block, tuple(said)))
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
            place.student.over(spread_over(place.student.batches, LOCAL_BATCHES)),
            place.theirs.over(spread_over(place.theirs.batches, LOCAL_BATCHES)),
            Epochs(request.local, request.seed),
            trained=place.trained,
            masks_of=place.masks_of,
            commit=commit,
            already=already,
            on_part=add,
        )
    return parts, (why,) if why else ()


# ---- by the outputs -------------------------------------------------------------------------------------------------


def _by_outputs(
    place: _Place,
    run: Run,
    request: Request,
    batches: Sequence[Any],
    on_step: OnStep | None,
    *,
    on_disk: bool,
) -> tuple[Steps | None, dict[str, Tensor]]:
    """The steps, if any are asked for, and the new values of what moved, by names in the model."""
    if not request.steps:
        return None, {}
    model = _loaded(run.folder, place.student, trained=True)
    teacher = place.theirs.model if on_disk else _loaded(place.theirs.source.root, place.theirs)
    trained = set(place.trained) & {name for name, _ in model.named_parameters()}
    clock = _Clock()
    with (
        place.theirs.files.in_turn() if on_disk else contextlib.nullcontext(),
        trained_beside(model, teacher, trained, removed_of(model, also=place.kept)) as held,
    ):
        steps = steps_of(model, teacher, held, request)

        def after(number: int, loss: float) -> None:
            if on_step is not None:
                on_step(number, loss)
            if number < request.steps and on_rank_zero(clock.is_due):
                run.keep_state(functools.partial(save_state, steps=steps))
                clock.rewind()

        def resume() -> None:
            # killed while they were written, some processes may be further than others: all begin again then
            done = all_gather(everywhere(functools.partial(steps_in, run.state, run.hint)))
            if done[0] and len(set(done)) == 1:
                everywhere(functools.partial(load_state, run.state, steps, run.hint))

        kept = steps.train(batches, request.seed, after, resume).is_kept
        moved = {id(mover.parameter) for mover in steps.descent.movers if kept}
        return steps, {
            name: sharded_as(each, held.parameters[name])
            for name, each in held.values().items()
            if id(held.parameters[name]) in moved
        }


def _loaded(folder: Path, walk: InFiles, *, trained: bool = False) -> nn.Module:
    if rank_and_world()[1] > 1:
        return _shared_out(folder, walk, trained=trained)
    from transformers.utils import logging

    kind: Any = type(walk.model)
    dtype = next((each.dtype for each in walk.model.parameters() if each.is_floating_point()), torch.float32)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # its own would be drawn in a pipe as well
    with blaming_config(folder, "its model cannot be loaded"):
        model: nn.Module = kind.from_pretrained(folder, local_files_only=True, dtype=dtype)
    return model.to(walk.device).eval()


def _shared_out(folder: Path, walk: InFiles, *, trained: bool) -> nn.Module:
    """The model of a directory, sharded by FSDP2: a block's weights are read as a whole, and each process keeps its
    share of them. What is trained is in float32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(walk.device.type, (rank_and_world()[1],))
    host = InFiles(open_checkpoint(folder), folder, walk.batches, forward=walk.forward, device=walk.device)
    host.check()
    model, files = host.model, host.files
    inside = {module for block in host.blocks.values() for module in block.modules()}
    shards: Any = fully_shard
    for name, block in host.blocks.items():
        files.load(name, finished=False)
        shards(_widened(block) if trained else block, mesh=mesh)
    for module in model.modules():
        if module not in inside:
            files.arrive(module)
    files.tie()
    shards(_widened(model) if trained else model, mesh=mesh)
    return model.requires_grad_(False).eval()


def _widened(module: nn.Module) -> nn.Module:
    for each in (*module.parameters(), *module.buffers()):
        if not is_sharded(each):
            each.data = widened(each.data)
    return module


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
    steps: Steps | None,
    values: Mapping[str, Tensor],
    parts: Sequence[LocalPart],
    said: Mapping[str, Any],
    previous: Mapping[str, Any] | None,
) -> dict[str, tuple[int, int]]:
    """Publishes OUT; the zeros of the weights that have any, as they lie in the files. The first process writes, and
    what is sharded is whole there one block at a time."""
    touched = set(run.written)
    folder = run.folder if steps is None else on_rank_zero(functools.partial(_copied_again, run))
    if steps is not None:
        files = BlockFiles(place.student.model, place.student.blocks, place.student.source, folder)
        for new in _by_block(values, place.student.blocks):
            gathered = {name: whole(each) for name, each in new.items()}
            touched |= set(on_rank_zero(functools.partial(files.put, gathered)))
    return on_rank_zero(lambda: _recorded(place, run, steps, parts, said, previous, touched, folder))


def _copied_again(run: Run) -> Path:
    folder = run.remade()
    for _ in track(copy_tree(run.folder, folder), "copying"):
        pass
    return folder


def _recorded(
    place: _Place,
    run: Run,
    steps: Steps | None,
    parts: Sequence[LocalPart],
    said: Mapping[str, Any],
    previous: Mapping[str, Any] | None,
    touched: Collection[str],
    folder: Path,
) -> dict[str, tuple[int, int]]:
    now, before = (inspect_checkpoint(each) for each in (folder, place.student.source.root))
    sizes = {each.name: each.numel for each in now.tensors}
    counts, old = ({each.name: each.zeros or 0 for each in found.tensors} for found in (now, before))
    groups = place.student.files.group_of
    sources = {name for target in place.kept & groups.keys() for name in groups[target].sources}
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
        "asked": {each.name: said[each.name] for each in fields(Request) if each.compare},
        "blocks": [asdict(each) for each in parts],
        "losses": [] if steps is None else steps.losses,
        "judged": None if steps is None or steps.verdict is None else steps.verdict.described(),
    }
    versions = {"transformers": said["versions"]["transformers"]}
    text = record_text("recover", record, previous=previous, versions=versions)
    if steps is None:
        run.add(RECORD, text)
    else:
        write_whole(folder / RECORD, text)
    run.publish(folder)
    return zeros


def _by_block(values: Mapping[str, Tensor], blocks: Mapping[str, nn.Module]) -> list[dict[str, Tensor]]:
    """By block, and the rest together: what a file holds as one tensor is never in two."""
    found: dict[str | None, dict[str, Tensor]] = {}
    for name, value in values.items():
        found.setdefault(block_of(name, blocks), {})[name] = value
    return list(found.values())
