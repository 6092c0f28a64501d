"""Hosts: a model, wherever its weights are. `InMemory` has them in its parameters, `InFiles` reads one block's at once.

Law: both answer alike, so that what runs a model is written once. A model in memory is afterwards as it was, but for
values that were `put`; of one in files the source is not changed, and new values go into a copy.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from secateur.checkpoints import HEADER_KEY, Checkpoint, CheckpointError, Run, begun, blaming_config
from secateur.models.batches import naming_batch, passes, which
from secateur.models.blocks import find_blocks, parts_of, widened
from secateur.models.bounds import Form, form_of
from secateur.models.files import BlockFiles, Written, build_on_meta, loaded_model
from secateur.models.jobs import Job, Pruned, Solved
from secateur.models.observation import prepared
from secateur.models.products import WeightView
from secateur.models.replay import Outputs, Replay, Weights
from secateur.models.slopes import slopes, slopes_by_block
from secateur.models.solving import held_batches
from secateur.models.walk import run_through, walk
from secateur.support import (
    Forward,
    device_of,
    moved,
    on_rank_zero,
    private,
    run_batch,
    track,
    unchanged,
    unwrapped,
    usable,
)

Note = Callable[[Pruned, Mapping[str, Solved], Mapping[str, Written]], Any]


class Host:
    """A model that batches are run through, block by block.

    Attributes:
        model: the module; of a directory on the meta device.
        blocks: ``{name: module}``.
        batches: this process's share.
        forward: ``(model, batch) -> outputs``.
        activations: a folder for what blocks pass on; None: memory.
        device: where blocks are computed.
        weights: what reads those of a block.
        in_blocks: ``{parameter: note}`` of what walks summed in blocks of inputs.
    """

    model: nn.Module
    blocks: Mapping[str, nn.Module]
    batches: Sequence[Any]
    forward: Forward | None
    activations: Path | None
    device: torch.device | None
    weights: Weights
    in_blocks: dict[str, str]

    def over(self, batches: Sequence[Any]) -> Self:
        """The same model and other batches."""
        other = copy.copy(self)
        other.batches = batches
        return other

    def prepared(self) -> contextlib.AbstractContextManager[Any]:
        """A context for running the model, which is as it was afterwards."""
        raise NotImplementedError

    @contextlib.contextmanager
    def replaying(self, *, dense: bool = False, blocks: bool = True) -> Iterator[Replay]:
        """What runs the batches up to a block.

        Args:
            dense: also through the blocks as they were, beside.
            blocks: whether block by block; else each batch from end to end.
        """
        replay = Replay(
            self.model,
            self.blocks if blocks else {},
            self.batches,
            weights=self.weights,
            outputs=Outputs(self.activations),
            dense=Outputs(self.activations, "dense") if dense else None,
            forward=self.forward,
            device=self.device,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(replay.clear)
            stack.enter_context(self.prepared())
            stack.enter_context(replay.installed())
            yield replay

    @contextlib.contextmanager
    def running(
        self, *, written: bool = False, dense: Collection[nn.Module] = ()
    ) -> Iterator[tuple[Replay, Iterator[str]]]:
        """The replay, and the blocks, each given when it was run and while its weights are there; in the end each batch
        is run on to what the model returns. A model in memory runs each batch from end to end, and gives no block.

        Args:
            written: the weights are those of the copy that is written.
            dense: modules whose weights are those of the source all the same.
        """
        by_block = isinstance(self, InFiles)
        with self.weights.keeping(dense), self.replaying(blocks=by_block) as replay, torch.no_grad():
            yield replay, _to_the_end(replay, written=written)

    def run(self) -> None:
        """Runs the dense model on the batches, for who watches its modules."""
        with self.running() as (_, blocks):
            for _ in blocks:
                pass

    def slopes(self, names: Iterable[str], batches: Sequence[Any]) -> dict[WeightView, Tensor]:
        """The mean squared slopes of the dense model's outputs along those of products in the blocks; see `slopes`.
        Empty where the outputs are of all positions together."""
        raise NotImplementedError

    def put(self, block: str, new: Mapping[str, Tensor]) -> None:
        """New values of a block's parameters, by their names in it, are in their places."""
        parameters = dict(self.blocks[block].named_parameters())
        with torch.no_grad():
            for name, values in new.items():
                parameters[name].copy_(values)

    def change(self, new: Mapping[str, Tensor]) -> None:
        """New values of parameters anywhere in the model, by full names: in their places, or in the copy."""
        with torch.no_grad():
            for name, value in new.items():
                self.model.get_parameter(name).copy_(value)

    def written_by(self, run: Run | None, note: Note | None) -> Callable[[Pruned, Mapping[str, Solved]], None]:
        """What puts a job's new values, and writes them down before; without a run that has begun, and what is noted of
        a block, nothing is written."""

        def commit(pruned: Pruned, new: Mapping[str, Solved]) -> None:
            values = {name: solved.values for name, solved in new.items()}
            if run is not None and note is not None:
                written: dict[str, Written] = {}
                on_rank_zero(lambda: written.update(self.weights.write(pruned.block, values)))
                run.note(note(pruned, new, written))
            self.put(pruned.block, values)  # the block is run once more with its new weights

        return commit

    def walk(
        self, job: Job, run: Run | None = None, note: Note | None = None, already: Sequence[str] = ()
    ) -> list[Pruned]:
        """Does a job block by block, those ``already`` done are only run; the job's result for each block.

        Args:
            run: where new weights are written.
            note: ``(pruned, new, written) -> what the journal says of the block``; called on all processes, of which
                the first has written.
        """
        form = self.form(job, run)
        with self.replaying(dense=job.beside_dense) as replay, torch.no_grad():
            return list(walk(replay, job, self.written_by(run, note), already=already, form=form))

    def form(self, job: Job, run: Run | None) -> Form:
        """How the Gram matrices of a walk are summed: as memory is free now, or was when the run began."""
        compute = functools.partial(form_of, self.model, self.blocks, job)
        form = compute() if run is None else run.stage("form", Form, compute)
        self.in_blocks |= form.notes
        return form


def _to_the_end(replay: Replay, *, written: bool) -> Iterator[str]:
    yield from run_through(replay, finished=written)
    for number, batch in enumerate(track(replay.batches, "running on to the end")):
        replay.run(number, batch, lambda *_: None)


class InMemory(Host):
    """A model in memory, by its blocks, or the layers of one without blocks (`parts_of`), `widened` to what runs once.

    Args:
        model: any module.
        batches: what a DataLoader yields; of several processes each takes its share.
        forward: ``(model, batch) -> outputs``.
        activations: a folder for what blocks pass on; None: memory.
        blocks: those to go through.

    Raises:
        ValueError: the model has no matrices, or there are no batches.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        *,
        forward: Forward | None = None,
        activations: Path | None = None,
        blocks: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.model = unwrapped(model)
        self._given = blocks
        _, self.batches = held_batches(batches)
        self.forward, self.activations, self.in_blocks = forward, activations, {}
        self.device, self.weights = device_of(self.model), Weights()

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        inference = any(each.is_inference() for each in self.model.parameters())  # may be written to in this mode only
        with unchanged(self.model), torch.inference_mode(inference), prepared(self.model):
            yield

    @functools.cached_property
    def blocks(self) -> Mapping[str, nn.Module]:  # type: ignore[override]
        if self._given is not None:
            return self._given
        blocks, calls = parts_of(self.model), self._calls()
        while repeated := [name for name, block in blocks.items() if name and calls[block] > 1]:
            blocks = widened(self.model, blocks, repeated[0])
        return blocks

    def repeated(self) -> str | None:
        """A block that runs more than once in a forward pass, if there is one."""
        calls, blocks = self._calls(), parts_of(self.model) if self._given is None else self._given
        return next((name for name, block in blocks.items() if calls[block] > 1), None)

    def _calls(self) -> Counter[nn.Module]:
        """How often each module is called in a forward pass of the first batch."""
        calls: Counter[nn.Module] = Counter()
        with self.prepared(), torch.no_grad(), contextlib.ExitStack() as stack:
            for module in self.model.modules():
                stack.callback(module.register_forward_pre_hook(lambda module, _: calls.update([module])).remove)
            with naming_batch(self.batches, self.batches[0], self.forward):
                run_batch(self.model, moved(self.batches[0], self.device), self.forward)
        return calls

    def slopes(self, names: Iterable[str], batches: Sequence[Any]) -> dict[WeightView, Tensor]:
        return slopes(self.model, batches, names, forward=self.forward, unless_pooled=True)


class InFiles(Host):
    """A model whose weights lie in files.

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

    forward: Forward
    device: torch.device

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
        self.source, self.batches, self.in_blocks = source, batches, {}
        self.activations = None if activations is None else Path(activations)
        self.device = usable(device)
        self.model = build_on_meta(source)
        for buffers in [private.buffers_of(module) for module in self.model.modules()]:
            buffers.update({key: None if buffer is None else buffer.to(self.device) for key, buffer in buffers.items()})
        with blaming_config(source.root, "the model is not one of repeated blocks"):
            self.blocks = find_blocks(self.model)
        self.weights = self.files = BlockFiles(self.model, self.blocks, source, work, self.device)
        self._own_forward = forward is None
        self.forward = functools.partial(_run_of_directory, source.root, batches) if forward is None else forward

    def check(self) -> None:
        """Whether the files hold the blocks and the model runs: else it is an error before anything is copied. Where
        its first block runs again, the blocks are `widened`."""
        self.files.check()
        self._check_decoder()
        while name := self._repeated():
            self.blocks = widened(self.model, self.blocks, name)
            self.weights = self.files = BlockFiles(self.model, self.blocks, self.source, self.files.work, self.device)

    def _check_decoder(self) -> None:
        """ValueError where an encoder-decoder reads a text, and neither it nor the text says what its decoder reads."""
        config: Any = getattr(self.model, "config", None)
        given = self.batches[0] if self.batches and self._own_forward else None
        if getattr(config, "is_encoder_decoder", False) and isinstance(given, Tensor):
            try:
                with contextlib.suppress(RuntimeError), self.prepared(), torch.no_grad():  # values, which are not there
                    run_batch(self.model, given.to("meta"))
            except ValueError as error:
                raise ValueError(
                    f"{self.source.root}: {type(self.model).__name__} has a decoder, and a text does not say what that "
                    'reads; pass batches that do, such as {"input_ids": …, "labels": …} (--data module:batches).'
                ) from error

    def _repeated(self) -> str | None:
        """The first block, if the model runs it again behind its first run."""
        first: list[Any] = []
        with self.over(self.batches[:1]).replaying() as replay:
            name = replay.find_next()
            if not name:
                return None
            self.files.load(name, finished=False)
            replay.run(0, replay.batches[0], lambda _name, _args, _kwargs, call: first.append(call()))
            self.files.unload(name)
            return name if replay.is_run_again(name, replay.batches[0], first[0]) else None

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        with prepared(self.model), torch.random.fork_rng(devices=[]):
            yield

    @contextlib.contextmanager
    def begun(self, out: Path, said: Mapping[str, Any]) -> Iterator[Run]:
        """The directory that is written beside ``out``, a copy of the source; see `secateur.checkpoints.begun`."""
        with begun(out, said, self.source) as run:
            self.files.written = run.written
            yield run

    def slopes(self, names: Iterable[str], batches: Sequence[Any]) -> dict[WeightView, Tensor]:
        with prepared(self.model), self.files.arriving():
            return slopes_by_block(
                self.model,
                self.blocks,
                batches,
                names,
                weights=self.files,
                outputs=Outputs(self.activations, "slopes"),
                forward=self.forward,
                device=self.device,
                unless_pooled=True,
            )

    def change(self, new: Mapping[str, Tensor]) -> None:
        on_rank_zero(lambda: self.files.put(new))

    def read_as(self, moved: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        """What is read of these parameters of the source, and of no others, is what these functions make of it."""
        self.source.moved.clear()
        self.source.moved.update({self.files.sources_of(name)[0]: change for name, change in moved.items()})

    def rewritten(self) -> list[str]:
        """Writes into the copy what is read otherwise than the source has it; the names of these tensors in files."""
        names = {name: target for target, group in self.files.group_of.items() for name in group.sources}
        self.change({names[name]: self.source[name] for name in self.source.moved})
        return sorted(self.source.moved)

    def loaded(self) -> nn.Module:
        """The whole model in memory, with the weights that are read here."""
        model = loaded_model(self.source.root, self.device)
        for name, group in self.files.group_of.items():
            if group.sources[0] in self.source.moved:
                model.get_parameter(name).data.copy_(self.source[group.sources[0]])
        return model


def _run_of_directory(root: Path, batches: Sequence[Any], model: nn.Module, batch: Any) -> Any:
    """`run_batch`; where the model cannot compute as its configuration says, the error names ``config.json``."""
    try:
        return run_batch(model, batch)
    except Exception as error:
        if passes(error):
            raise
        with blaming_config(root, f"the model that it describes does not run on {which(batches, batch)}"):
            raise
