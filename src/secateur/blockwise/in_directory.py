"""The walk over a directory: weights are read from files, and written into a copy that becomes the result.

Law: the source is not changed; a run that was killed goes on where it was, to the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.blockwise.dense_scores import share_out
from secateur.blockwise.directory import BlockFiles
from secateur.blockwise.finding import find_blocks
from secateur.blockwise.jobs import Layer, Pruned, Solved
from secateur.blockwise.journal import Unfinished, check_new, unfinished, unfinished_copy
from secateur.blockwise.observation import find_next, prepared
from secateur.blockwise.outcome import OneShot, Tally
from secateur.blockwise.processes import barrier, rank_and_world
from secateur.blockwise.record import said_of, write_record
from secateur.blockwise.replay import LostOutputError, Outputs, Replay
from secateur.blockwise.request import Request, held_batches
from secateur.blockwise.skeleton import blaming_config, build_on_meta
from secateur.blockwise.targets import choose_targets
from secateur.blockwise.walk import check_pruned, never_run, walk
from secateur.checkpoints import CheckpointError, check_arguments, check_places, open_checkpoint, previous_record
from secateur.support import Fields, Forward, printable, private, run_batch

__all__ = ["prune_directory"]


def prune_directory(
    source: Path, out: Path, batches: Iterable[Any], request: Request, device: torch.device | str | None = None
) -> OneShot:
    """`oneshot` of a directory into another one, beside which it is made."""
    started = time.monotonic()
    check_new(out)
    check_places(source, out)
    check_arguments(request.arguments)
    checkpoint = open_checkpoint(source)
    previous = previous_record(source)
    every, held = held_batches(batches)
    device = torch.device("cpu" if device is None else device)
    model = build_on_meta(checkpoint)
    for buffers in [private.buffers_of(module) for module in model.modules()]:
        buffers.update({key: None if buffer is None else buffer.to(device) for key, buffer in buffers.items()})
    with blaming_config(source, "the model is not one of repeated blocks"):
        blocks = find_blocks(model)
    targets, left_alone = choose_targets(model, blocks, request.include, request.exclude)
    files = BlockFiles(model, blocks, checkpoint, unfinished_copy(out), device)
    files.check()
    forward = functools.partial(_run_of_directory, source) if request.forward is None else request.forward
    _try(model, files, held[0], forward, device)
    said = said_of(request, every)
    rank, _ = rank_and_world()
    if rank:
        barrier()  # the first process has copied the source
    with unfinished(out, said, checkpoint, first=not rank) as begun, prepared(model):
        if not rank:
            begun.copy()
            barrier()
        tally = Tally()
        tally.leave_alone(left_alone)
        sparsities = _gone_on_with(begun, tally, blocks, targets)
        weights = _InFiles(files, begun, tally)
        replay = Replay(
            model,
            blocks,
            outputs=Outputs(request.activations),
            dense=request.dense_outputs(),
            forward=forward,
            on_arrival=weights.arrive,
            device=device,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(replay.clear)
            stack.enter_context(replay.installed())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            if sparsities is None:
                sparsities = share_out(request, targets, replay, weights, held)
                if not rank:
                    begun.learn(sparsities=sparsities)
            job, already = request.job(sparsities), [block["name"] for block in begun.blocks]
            for pruned in walk(replay, weights, held, job, already=already):
                tally.layers.extend(pruned.layers)  # what is left alone was noted as the block was written
            tally.leave_alone(never_run(replay, job))
            if not already:
                check_pruned(tally.layers, tally.left_alone, replay, job)
        done = tally.outcome(time.monotonic() - started, out)
        if not rank:
            write_record(begun, done, request, said, files, previous)
            begun.publish()
        barrier()
    return done


def _run_of_directory(root: Path, model: nn.Module, batch: Any) -> Any:
    """`run`; what a model raises that can't compute with what its configuration says is an error of that."""
    try:
        return run_batch(model, batch)
    except (CheckpointError, LostOutputError, OSError, MemoryError):
        raise
    except Exception as error:
        if _is_our_own(error):
            raise
        with blaming_config(root, "the model that it describes does not run on the batches"):
            raise


def _is_our_own(error: Exception) -> bool:
    """Whether a call of this library found it, and not the model's code or torch's, of which no frame may be seen."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    frame = None if trace is None else trace.tb_frame
    own = frame is not None and str(frame.f_globals.get("__name__")).startswith("secateur.")
    watched = frame is not None and frame.f_code.co_name == "__torch_function__"  # where torch's products are called
    return isinstance(error, ValueError | TypeError) and own and not watched


def _try(model: nn.Module, files: BlockFiles, batch: Any, forward: Forward, device: torch.device) -> None:
    """Runs one batch to the end of the first block: what can't run is an error before anything is copied."""
    replay = Replay(model, files.blocks, forward=forward, on_arrival=files.arrive, device=device)
    with prepared(model), replay.installed(), torch.random.fork_rng(devices=[]):
        name = find_next(replay, [batch])
        if name is not None:
            files.load(name, finished=False)
            replay.run(0, batch, lambda _name, _args, _kwargs, call: call())
            files.unload(name)


class _InFiles:
    """The weights are in files; the first process writes."""

    def __init__(self, files: BlockFiles, run: Unfinished, tally: Tally) -> None:
        self.files, self.run, self.tally = files, run, tally
        self.load, self.unload, self.arrive = files.load, files.unload, files.arrive

    def commit(self, pruned: Pruned, new: Mapping[str, Solved]) -> None:
        self.tally.leave_alone(pruned.left_alone)
        if not rank_and_world()[0]:
            written = self.files.write(pruned.block, {name: solved.values for name, solved in new.items()})
            masks = self.files.taken_apart(pruned.block, {name: solved.mask for name, solved in new.items()})
            tensors = {
                name: {
                    "sparsity": (found.numel - found.nonzero) / found.numel,
                    "removed": found.numel - int(masks[name].count_nonzero()),
                    "kept_as_they_were": found.kept_as_they_were,
                }
                for name, found in written.items()
            }
            self.run.facts["left_alone"] = self.tally.left_alone
            layers = [asdict(layer) for layer in pruned.layers]
            self.run.note({"name": pruned.block, "layers": layers, "tensors": tensors})
        barrier()
        with torch.no_grad():  # the block is run once more with its new weights
            for name, solved in new.items():
                self.files.blocks[pruned.block].get_parameter(name).copy_(solved.values)


def _gone_on_with(
    begun: Unfinished, tally: Tally, blocks: Mapping[str, nn.Module], targets: Mapping[str, nn.Parameter]
) -> dict[str, float | None] | None:
    """Adds what an earlier run did to the tally; the sparsities that it went by, None if it did not come so far."""
    journal = begun.found()
    seen: set[str] = set()
    for block in journal.inners("blocks"):
        block.only("name", "layers", "tensors")
        name = block.take("name", str)
        if name not in blocks or name in seen:
            raise block.wrong("name", f"is {printable(name)}, which is no block of the model, or is there twice")
        seen.add(name)
        written = block.inner("tensors")
        for tensor in map(written.inner, written.values):
            tensor.only("sparsity", "removed", "kept_as_they_were")
            tensor.take("sparsity", float, least=0, most=1)
            tensor.take("removed", int, least=0)
            tensor.take("kept_as_they_were", bool)
        for layer in block.inners("layers"):
            found = _layer_from_journal(layer)
            if found.name not in targets or found.block != name:
                raise layer.wrong("name", f"is {printable(found.name)}, which is no weight to prune in {name}")
            tally.layers.append(found)
    facts = journal.inner("facts")
    facts.only("sparsities", "left_alone")
    if "left_alone" in facts.values:
        reasons = facts.inner("left_alone")
        tally.left_alone.update({reason: reasons.each(reason, str) for reason in reasons.values})
    if "sparsities" not in facts.values:
        if seen:
            raise facts.wrong("sparsities", "is missing")
        return None
    shares = facts.inner("sparsities")
    sparsities = {name: shares.maybe(name, float, least=0, most=1) for name in shares.values}
    if sparsities.keys() != targets.keys():
        raise facts.wrong("sparsities", "is of other weights than those to prune")
    return sparsities


def _layer_from_journal(found: Fields) -> Layer:
    found.only(*(field.name for field in fields(Layer)))
    return Layer(
        found.take("name", str),
        found.take("block", str),
        tuple(found.each("shape", int, least=0)),
        found.take("sparsity", float, least=0, most=1),
        found.maybe("error", float),
        found.take("tokens", int, least=0),
        found.take("seconds", float, least=0),
        tuple(found.each("without_tokens", int, least=0)),
        tuple(found.each("warnings", str)),
    )
