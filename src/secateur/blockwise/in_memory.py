"""The walk over a model in memory: its weights change in place, block by block.

Law: what can be refused is refused before any weight changes; if a block fails, those before it stay pruned, and the
error names them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.blockwise.dense_scores import share_out
from secateur.blockwise.finding import parts_of
from secateur.blockwise.jobs import Job, Pruned, Solved
from secateur.blockwise.observation import prepared
from secateur.blockwise.outcome import OneShot, Tally
from secateur.blockwise.replay import RUNS_AGAIN, Outputs, Replay
from secateur.blockwise.request import Request, held_batches
from secateur.blockwise.targets import choose_targets
from secateur.blockwise.walk import check_pruned, never_run, walk
from secateur.support import Forward, device_of, moved, run_batch, unchanged, unwrapped

__all__ = ["InMemory", "prune_in_memory", "refuse_repeated", "walk_model"]


def prune_in_memory(model: nn.Module, batches: Iterable[Any], request: Request) -> OneShot:
    """`oneshot` of a module; an exception says which of its blocks are pruned already."""
    started = time.monotonic()
    _, held = held_batches(batches)
    inner = unwrapped(model)
    _refuse_unready(inner)
    tally = Tally()
    inference = any(parameter.is_inference() for parameter in inner.parameters())  # may be written to in this mode only
    with unchanged(inner), torch.inference_mode(inference), prepared(inner), _blamed_on_blocks(tally):
        blocks = parts_of(inner)
        targets, left_alone = choose_targets(inner, blocks, request.include, request.exclude)
        tally.leave_alone(left_alone)
        refuse_repeated(inner, blocks, held[0], request.forward)
        weights = InMemory(blocks)
        replay = Replay(
            inner,
            blocks,
            outputs=Outputs(request.activations),
            dense=request.dense_outputs(),
            forward=request.forward,
            device=device_of(inner),
        )
        with contextlib.ExitStack() as stack:
            stack.callback(replay.clear)
            stack.enter_context(replay.installed())
            job = request.job(share_out(request, targets, replay, weights, held))
            for pruned in walk(replay, weights, held, job):
                tally.add(pruned)
            tally.leave_alone(never_run(replay, job))
            check_pruned(tally.layers, tally.left_alone, replay, job)
    return tally.outcome(time.monotonic() - started)


def walk_model(
    model: nn.Module,
    batches: Iterable[Any],
    job: Job,
    *,
    forward: Forward | None = None,
    activations: Path | None = None,
) -> list[Pruned]:
    """Walks over the blocks of a model in memory, or the layers of one without blocks (`parts_of`), with any `Job`;
    returns the job's result for each block.

    Raises:
        ValueError: the model has no matrices, or runs one of its blocks more than once in a forward pass.
    """
    _, held = held_batches(batches)
    inner = unwrapped(model)
    with unchanged(inner), prepared(inner), torch.no_grad():
        blocks = parts_of(inner)
        refuse_repeated(inner, blocks, held[0], forward)
        replay = Replay(
            inner,
            blocks,
            outputs=Outputs(activations),
            dense=Outputs(activations, "dense") if job.beside_dense else None,
            forward=forward,
            device=device_of(inner),
        )
        with contextlib.ExitStack() as stack:
            stack.callback(replay.clear)
            stack.enter_context(replay.installed())
            return list(walk(replay, InMemory(blocks), held, job))


class InMemory:
    """The `Weights` of a walk over a model in memory."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.blocks = blocks

    def load(self, block: str, *, finished: bool) -> None:
        pass

    def unload(self, block: str) -> None:
        pass

    def arrive(self, module: nn.Module) -> None:
        pass

    def commit(self, pruned: Pruned, new: Mapping[str, Solved]) -> None:
        parameters = dict(self.blocks[pruned.block].named_parameters())
        with torch.no_grad():
            for name, solved in new.items():
                parameters[name].copy_(solved.values)


def _refuse_unready(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ValueError(f"{name} is on the meta device and has no values; load the model, or pass its directory.")
        if name.endswith("_orig"):
            raise ValueError(
                f"{name}: a mask is attached, and what the model multiplies with is no parameter; make it permanent "
                "with prune.remove, or take it off with detach."
            )


def refuse_repeated(model: nn.Module, blocks: Mapping[str, nn.Module], batch: Any, forward: Forward | None) -> None:
    """Raises ValueError for a block that runs twice in a forward pass, before anything changes.

    In a directory it is found when it happens, and nothing is published; a model in memory would be half pruned.
    """
    calls: list[str] = []
    hooks = [
        block.register_forward_pre_hook(lambda *_, name=name: calls.append(name)) for name, block in blocks.items()
    ]
    try:
        with torch.no_grad():
            run_batch(model, moved(batch, device_of(model)), forward)
    finally:
        for hook in hooks:
            hook.remove()
    if repeated := [name for name in blocks if calls.count(name) > 1]:
        raise ValueError(RUNS_AGAIN.format(name=repeated[0]))


@contextlib.contextmanager
def _blamed_on_blocks(tally: Tally) -> Iterator[None]:
    """An exception says which blocks of a model in memory are pruned already."""
    try:
        yield
    except BaseException as error:
        if tally.layers:
            names = list(dict.fromkeys(layer.block for layer in tally.layers))
            error.add_note(f"Pruned already, and left so: {names[0]} to {names[-1]} ({len(names)} blocks).")
        raise
