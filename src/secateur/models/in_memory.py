"""How a walk shares the sparsity out: an allocation from the dense model's scores. The walk over a model in memory: its
weights change in place, block by block.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from secateur.allocation import uniform
from secateur.models.blocks import WHOLE, block_of, choose_targets, full_name, parts_of, widened
from secateur.models.jobs import Job, Pruned, Solved
from secateur.models.observation import find_next, observe, prepared, store
from secateur.models.products import WeightView
from secateur.models.replay import Outputs, Replay
from secateur.models.result import OneShot, Tally
from secateur.models.solving import Request, complete, held_batches
from secateur.models.walk import Weights, check_pruned, never_run, walk
from secateur.selection import LazyScores
from secateur.support import Forward, device_of, moved, run_batch, track, unchanged, unwrapped
from secateur.targets import stored_inputs_first

# ---- How a walk shares the sparsity out: an allocation from the dense model's scores.
#
# Law: `uniform` looks at nothing; any other allocation sees Wanda's scores of the dense model on the same batches,
# and the model and the replay are afterwards as they were. The dense model runs only for an allocation that reads a
# score.

Norms = Mapping[str, Mapping[WeightView, Tensor]]


def share_out(
    request: Request, targets: Mapping[str, nn.Parameter], replay: Replay, weights: Weights, batches: Sequence[Any]
) -> dict[str, float | None]:
    """The sparsity of each weight. `uniform`: the same; else the counts that an allocation gives for Wanda's scores."""
    sparsity, pattern = request.sparsity, request.pattern
    if request.allocate is uniform:
        return dict.fromkeys(targets, sparsity)
    if pattern.density is not None or sparsity is None:
        raise ValueError(f"{pattern} keeps the same share of every weight; leave allocate out.")
    turned = set(stored_inputs_first(replay.model, targets))
    shapes = {
        name: p.shape
        if WHOLE in replay.blocks
        else torch.Size(_rows_shape(tuple(p.shape), inputs_first=name in turned))
        for name, p in targets.items()
    }
    try:
        counts = request.allocate(_unread(_ShapesOnly(shapes)), sparsity, pattern)
    except _ReadError:
        norms = measure_norms(replay, weights, batches, targets)
        with contextlib.closing(DenseScores(shapes, norms, replay.blocks, weights)) as scores:
            counts = request.allocate(_unread(scores), sparsity, pattern)
    shares: dict[str, float | None] = {}
    for name, shape in shapes.items():
        if name not in counts:
            raise ValueError(f"the allocation gave no count for {name}; return {{name: units kept in each group}}.")
        groups, units = pattern.pool(torch.empty(shape, device="meta")).shape
        count = counts[name]
        kept = count * groups if isinstance(count, int) else int(count.sum())
        shares[name] = 1 - kept / (groups * units)
    return shares


def measure_norms(replay: Replay, weights: Weights, batches: Sequence[Any], targets: Mapping[str, Any]) -> Norms:
    """Runs the batches through the whole dense model: the norms of each target's inputs. The replay is as new then."""
    norms: dict[str, dict[WeightView, Tensor]] = {}
    for _ in track(range(len(replay.blocks)), "looking at the dense blocks"):
        name = find_next(replay, batches)
        if name is None:
            break
        weights.load(name, finished=False)
        wanted = {local: p for local, p in replay.blocks[name].named_parameters() if full_name(name, local) in targets}
        for piece, met in observe(replay, batches, name, wanted, ["input_norm"]).items():
            if met.tokens:
                norms.setdefault(full_name(name, piece.name), {})[piece] = met.evidence(["input_norm"])["input_norm"]
        if name == WHOLE:
            break
        store(replay, batches, name)
        weights.unload(name)
    replay.restart(keep_all=False)
    return norms


class DenseScores(Mapping[str, Tensor]):
    """Wanda's scores (arXiv:2306.11695) of the dense model, ``|w| · ‖x‖``, (outputs, inputs), from the norms of inputs.

    Scores are made on access, from weights of which one block is loaded at a time; `close` unloads the last.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], norms: Norms, blocks: Mapping[str, nn.Module], weights: Weights
    ) -> None:
        self.shapes, self.norms, self.blocks, self.weights = shapes, norms, blocks, weights
        self._loaded: str | None = None

    def __getitem__(self, name: str) -> Tensor:
        block = block_of(name, self.blocks)
        assert block is not None
        if self._loaded != block:
            self.close()
            self.weights.load(block, finished=False)
            self._loaded = block
        parameter = self.blocks[block].get_parameter(name[len(block) + 1 :] if block else name)
        norms = self.norms.get(name, {})
        pieces = complete(sorted(norms), parameter)
        if not pieces:
            return parameter.detach().abs().float().reshape(self.shapes[name])
        nothing = torch.zeros(1, device=parameter.device)
        rows = [piece.of(parameter).abs().float() * norms.get(piece, nothing) for piece in pieces]
        return torch.cat(rows).reshape(self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def close(self) -> None:
        if self._loaded is not None:
            self.weights.unload(self._loaded)
            self._loaded = None


class _ReadError(BaseException):
    """An allocation asks for a score; no `Exception`, so that none takes it for its own."""


class _ShapesOnly(Mapping[str, Tensor]):
    """Scores of which only the shapes are known so far."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = shapes

    def __getitem__(self, name: str) -> NoReturn:
        raise _ReadError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _unread(scores: Mapping[str, Tensor]) -> LazyScores:
    return LazyScores(scores, lambda weight: weight)  # the scores themselves are what is read


def _rows_shape(shape: tuple[int, ...], *, inputs_first: bool) -> tuple[int, ...]:
    if len(shape) == 3:
        return (shape[0] * shape[1], shape[2])
    return shape[::-1] if inputs_first else shape


# ---- The walk over a model in memory: its weights change in place, block by block.
#
# Law: what can be refused is refused before any weight changes; if a block fails, those before it stay pruned, and
# the error names them.


def prune_in_memory(model: nn.Module, batches: Iterable[Any], request: Request) -> OneShot:
    """`oneshot` of a module; an exception says which of its blocks are pruned already."""
    started = time.monotonic()
    _, held = held_batches(batches)
    inner = unwrapped(model)
    _refuse_unready(inner)
    tally = Tally()
    inference = any(parameter.is_inference() for parameter in inner.parameters())  # may be written to in this mode only
    with unchanged(inner), torch.inference_mode(inference), prepared(inner), _blamed_on_blocks(tally):
        blocks = parts_once(inner, held[0], request.forward)
        targets, left_alone = choose_targets(inner, blocks, request.include, request.exclude)
        tally.leave_alone(left_alone)
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
        ValueError: the model has no matrices.
    """
    _, held = held_batches(batches)
    inner = unwrapped(model)
    with unchanged(inner), prepared(inner), torch.no_grad():
        blocks = parts_once(inner, held[0], forward)
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


def parts_once(model: nn.Module, batch: Any, forward: Forward | None) -> dict[str, nn.Module]:
    """`parts_of` a model, `widened` to what runs once in a forward pass of the batch."""
    blocks, calls = parts_of(model), calls_of(model, batch, forward)
    while repeated := [name for name, block in blocks.items() if name and calls[block] > 1]:
        blocks = widened(model, blocks, repeated[0])
    return blocks


def calls_of(model: nn.Module, batch: Any, forward: Forward | None) -> Counter[nn.Module]:
    """How often each module is called in a forward pass of the batch.

    >>> twice = nn.Linear(2, 2)
    >>> calls_of(nn.Sequential(twice, nn.ReLU(), twice), torch.ones(1, 2), None)[twice]
    2
    """
    calls: Counter[nn.Module] = Counter()
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(lambda module, _: calls.update([module])).remove)
        with torch.no_grad():
            run_batch(model, moved(batch, device_of(model)), forward)
    return calls


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
