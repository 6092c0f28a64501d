"""The walk over a directory: weights are read from files, and written into a copy that becomes the result.

Law: the source is not changed; a run that was killed goes on where it was, to the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from secateur.checkpoints import (
    HEADER_KEY,
    Checkpoint,
    CheckpointError,
    Run,
    begun,
    blaming_config,
    check_new,
    check_places,
    open_checkpoint,
    previous_record,
    unfinished_copy,
)
from secateur.models.batches import passes, which
from secateur.models.blocks import choose_targets, find_blocks, widened
from secateur.models.bounds import Form, form_of
from secateur.models.files import BlockFiles, Written, build_on_meta
from secateur.models.in_memory import share_out
from secateur.models.jobs import Job, Pruned, Solved
from secateur.models.observation import find_next, prepared
from secateur.models.products import WeightView
from secateur.models.replay import Outputs, Replay
from secateur.models.result import OneShot, PrunedBlock, PrunedTensor, Tally, said_of, write_record
from secateur.models.slopes import slopes_by_block
from secateur.models.solving import Request, held_batches
from secateur.models.walk import Weights, check_pruned, never_run, run_through, walk
from secateur.support import Between, Forward, barrier, on_rank_zero, printable, private, run_batch, track, usable

_Note = Callable[[Pruned, Mapping[str, Solved], Mapping[str, Written]], Any]
_Share = Annotated[float, Between(0, 1)]


def prune_directory(
    source: Path, out: Path, batches: Iterable[Any], request: Request, device: torch.device | str | None = None
) -> OneShot:
    """`oneshot` of a directory into another one, beside which it is made."""
    started = time.monotonic()
    check_new(out)
    check_places(source, out)
    checkpoint = open_checkpoint(source)
    previous = previous_record(source)
    every, held = held_batches(batches)
    place = DirectoryWalk(
        checkpoint,
        unfinished_copy(out),
        held,
        forward=request.forward,
        activations=request.activations,
        device=device,
    )
    place.check()
    targets, left_alone = choose_targets(place.model, place.blocks, request.include, request.exclude)
    said = said_of(request, every)
    with place.begun(out, said) as run:
        blocks = _done_before(run, place.blocks, targets)
        already = [block.name for block in blocks]

        def note(pruned: Pruned, new: Mapping[str, Solved], written: Mapping[str, Written]) -> PrunedBlock:
            blocks.append(_noted(place.files, pruned, new, written))
            return blocks[-1]

        with place.replaying(dense=bool(request.aim)) as replay:
            sparsities = run.stage(
                "sparsities",
                dict[str, _Share | None],
                lambda: share_out(request, targets, replay, place.weights(), held),
                lambda found: None if found.keys() == targets.keys() else "is of other weights than those to prune",
            )
            job = request.job(sparsities)
            for _ in walk(replay, place.weights(run, note), held, job, already=already, form=place.form(job, run)):
                pass
            tally = Tally()
            tally.leave_alone(left_alone)
            for block in blocks:
                tally.add(block)
            tally.leave_alone(never_run(replay, job))
            if not already:
                check_pruned(tally.layers, tally.left_alone, replay, job)
        done = tally.outcome(time.monotonic() - started, out)

        def publish() -> None:
            write_record(run, blocks, done, request, said, place.files, previous)
            run.publish()

        on_rank_zero(publish)
    return done


def _noted(files: BlockFiles, pruned: Pruned, new: Mapping[str, Solved], written: Mapping[str, Written]) -> PrunedBlock:
    """What the journal says of a block that `oneshot` pruned."""
    masks = files.taken_apart(pruned.block, {name: solved.mask for name, solved in new.items()}) if written else {}
    tensors = {
        name: PrunedTensor(
            (found.numel - found.nonzero) / found.numel,
            found.numel - int(masks[name].count_nonzero()),
            found.kept_as_they_were,
        )
        for name, found in written.items()
    }
    return PrunedBlock(pruned.block, pruned.layers, pruned.left_alone, tensors)


def _done_before(run: Run, blocks: Mapping[str, nn.Module], targets: Mapping[str, nn.Parameter]) -> list[PrunedBlock]:
    """The blocks that an earlier run pruned."""
    done = run.done(PrunedBlock, blocks)
    for at, block in enumerate(done):
        for number, layer in enumerate(block.layers):
            if layer.name not in targets or layer.block != block.name:
                raise run.wrong(
                    f"blocks[{at}].layers[{number}].name",
                    f"is {printable(layer.name)}, which is no weight to prune in {block.name}",
                )
    return done


# ---- the walk -------------------------------------------------------------------------------------------------------


class DirectoryWalk:
    """A walk over a model whose weights lie in files: runs batches through its blocks, for any `Job`.

    Args:
        source: the checkpoint.
        work: a copy of it, there once a run has `begun`, into which blocks are written; the source itself where
            nothing is.
        batches: this process's share.
        forward: ``(model, batch) -> outputs``.
        activations: a folder for what blocks pass on; None: memory.
        device: where blocks are computed; None: the processor.

    Raises:
        CheckpointError: no model can be made of what the directory says, or it is none of repeated blocks.
        ValueError: the device is not there.
    """

    def __init__(
        self,
        source: Checkpoint,
        work: Path,
        batches: Sequence[Any],
        *,
        forward: Forward | None = None,
        activations: Path | str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if any(HEADER_KEY in metadata for metadata in source.metadata.values()):
            raise CheckpointError(
                f"{source.root}: compressed; write its weights with secateur expand, and name that directory."
            )
        self.source, self.batches = source, batches
        self.in_blocks: dict[str, str] = {}  # {parameter: note} of what walks summed in blocks
        self.activations = None if activations is None else Path(activations)
        self.device = usable(device)
        self.model = build_on_meta(source)
        for buffers in [private.buffers_of(module) for module in self.model.modules()]:
            buffers.update({key: None if buffer is None else buffer.to(self.device) for key, buffer in buffers.items()})
        with blaming_config(source.root, "the model is not one of repeated blocks"):
            self.blocks = find_blocks(self.model)
        self.files = BlockFiles(self.model, self.blocks, source, work, self.device)
        self.forward = functools.partial(_run_of_directory, source.root, batches) if forward is None else forward

    def check(self) -> None:
        """Whether the files hold the blocks and the model runs: else it is an error before anything is copied. Where
        its first block runs again, the blocks are `widened`."""
        self.files.check()
        while name := _runs_again(self.model, self.files, self.batches[0], self.forward, self.device):
            self.blocks = widened(self.model, self.blocks, name)
            self.files = BlockFiles(self.model, self.blocks, self.source, self.files.work, self.device)

    @contextlib.contextmanager
    def begun(self, out: Path, said: Mapping[str, Any]) -> Iterator[Run]:
        """The directory that is written beside ``out``, a copy of the source; see `secateur.checkpoints.begun`."""
        with begun(out, said, self.source) as run:
            self.files.written = run.written
            yield run

    @contextlib.contextmanager
    def replaying(self, *, dense: bool) -> Iterator[Replay]:
        """What runs the batches up to a block; ``dense``: also through the blocks as they were, beside."""
        replay = Replay(
            self.model,
            self.blocks,
            outputs=Outputs(self.activations),
            dense=Outputs(self.activations, "dense") if dense else None,
            forward=self.forward,
            on_arrival=self.files.arrive,
            device=self.device,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(replay.clear)
            stack.enter_context(prepared(self.model))
            stack.enter_context(replay.installed())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            yield replay

    def run(self) -> None:
        """Runs the dense model on the batches, block after block, for who watches its modules."""
        with self.replaying(dense=False) as replay:
            for _ in run_through(replay, self.weights(), self.batches):
                pass

    @contextlib.contextmanager
    def running(
        self, *, written: bool = False, dense: Collection[nn.Module] = ()
    ) -> Iterator[tuple[Replay, Iterator[str]]]:
        """The replay, and the blocks, each given when it was run and while its weights are there; in the end each batch
        is run on to what the model returns.

        Args:
            written: the weights are those of the copy that is written.
            dense: modules whose weights are those of the source all the same.
        """
        with self.replaying(dense=False) as replay:
            yield replay, self._to_the_end(replay, _Read(self.files, dense), written=written)

    def _to_the_end(self, replay: Replay, weights: Weights, *, written: bool) -> Iterator[str]:
        yield from run_through(replay, weights, self.batches, finished=written)
        for number, batch in enumerate(track(self.batches, "running on to the end")):
            replay.run(number, batch, lambda *_: None)

    def slopes(self, names: Iterable[str], batches: Sequence[Any]) -> dict[WeightView, Tensor]:
        """The mean squared slopes of the dense model's outputs along those of products in the blocks; see `slopes`.
        Empty where the outputs are of all positions together."""
        with prepared(self.model), self.files.arriving():
            return slopes_by_block(
                self.model,
                self.blocks,
                self.weights(),
                batches,
                names,
                outputs=Outputs(self.activations, "slopes"),
                forward=self.forward,
                device=self.device,
                unless_pooled=True,
            )

    def weights(self, run: Run | None = None, note: _Note | None = None) -> Weights:
        """The weights for a walk; without a run that has begun and what is noted of a block, nothing is written."""
        return _InFiles(self.files, run, note)

    def walk(
        self, job: Job, run: Run | None = None, note: _Note | None = None, already: Sequence[str] = ()
    ) -> Iterator[Pruned]:
        """Does a job block by block; those ``already`` done are only run.

        Args:
            run: where new weights are written.
            note: ``(pruned, new, written) -> what the journal says of the block``; called on all processes, of which
                the first has written.
        """
        weights, form = self.weights(run, note), self.form(job, run)
        with self.replaying(dense=job.beside_dense) as replay:
            yield from walk(replay, weights, self.batches, job, already=already, form=form)

    def form(self, job: Job, run: Run | None) -> Form:
        """How the Gram matrices of a walk are summed: as memory is free now, or was when the run began."""
        compute = functools.partial(form_of, self.model, self.blocks, job)
        form = compute() if run is None else run.stage("form", Form, compute)
        self.in_blocks |= form.notes
        return form


def _run_of_directory(root: Path, batches: Sequence[Any], model: nn.Module, batch: Any) -> Any:
    """`run`; where the model cannot compute as its configuration says, the error names ``config.json``."""
    try:
        return run_batch(model, batch)
    except Exception as error:
        if passes(error):
            raise
        with blaming_config(root, f"the model that it describes does not run on {which(batches, batch)}"):
            raise


def _runs_again(model: nn.Module, files: BlockFiles, batch: Any, forward: Forward, device: torch.device) -> str | None:
    """The first block, if the model runs it again behind its first run."""
    replay = Replay(model, files.blocks, forward=forward, on_arrival=files.arrive, device=device)
    first: list[Any] = []
    with prepared(model), replay.installed(), torch.random.fork_rng(devices=[]):
        name = find_next(replay, [batch])
        if not name:
            return None
        files.load(name, finished=False)
        replay.run(0, batch, lambda _name, _args, _kwargs, call: first.append(call()))
        files.unload(name)
        return name if replay.is_run_again(name, batch, first[0]) else None


class _InFiles:
    """The weights are in files; the first process writes."""

    def __init__(self, files: BlockFiles, run: Run | None, note: _Note | None) -> None:
        self.files, self.run, self.note = files, run, note
        self.load, self.unload, self.arrive = files.load, files.unload, files.arrive

    def commit(self, pruned: Pruned, new: Mapping[str, Solved]) -> None:
        if self.run is not None and self.note is not None:
            values = {name: solved.values for name, solved in new.items()}
            written = self.files.write(pruned.block, values) if self.run.writes else {}
            self.run.note(self.note(pruned, new, written))
        barrier()
        with torch.no_grad():  # the block is run once more with its new weights
            for name, solved in new.items():
                self.files.blocks[pruned.block].get_parameter(name).copy_(solved.values)


class _Read(_InFiles):
    """The weights are in files, some always those of the source; nothing is written."""

    def __init__(self, files: BlockFiles, dense: Collection[nn.Module]) -> None:
        super().__init__(files, None, None)
        self.load = functools.partial(files.load, dense=dense)
