"""One-shot pruning of a model made of repeated blocks: calibrate, prune and repair one block after the other.

Law: a block is pruned by what reaches it from the pruned blocks before it; its weights change only when all of them
are solved, and are written down before the next block is read. Memory is one block and the activations between two.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur import allocation, patterns, solvers
from secateur.allocation import Allocation, check_sparsity, narrowest, uniform
from secateur.blockwise.dense_scores import shared_out
from secateur.blockwise.directory import BlockFiles, blaming_config, build_on_meta
from secateur.blockwise.finding import find_blocks
from secateur.blockwise.journal import Unfinished, check_new, unfinished, unfinished_copy
from secateur.blockwise.replay import RUNS_AGAIN, LostOutputError, Outputs, Replay
from secateur.blockwise.walk import Job, Layer, Solve, Solved, choose_targets, find_next, prepared, rank_and_world, walk
from secateur.checkpoints import (
    RECORD,
    CheckpointError,
    check_arguments,
    check_places,
    inspect_checkpoint,
    open_checkpoint,
    previous_record,
    record_text,
)
from secateur.evidence import needs
from secateur.patterns import NM, Pattern, Rows, Unstructured, word_of
from secateur.solvers import admm
from secateur.support import Fields, Forward, device_of, moved, printable, run_batch, unchanged, unwrapped
from secateur.version import __version__

__all__ = ["Layer", "OneShot", "oneshot"]

GATHERED = frozenset(["gram", "input_norm", "input_mean", "input_var"])


@dataclass(frozen=True)
class OneShot:
    """What `oneshot` did: its layers in the order of the walk, and ``{reason: names}`` of the matrices left alone."""

    layers: tuple[Layer, ...]
    left_alone: Mapping[str, tuple[str, ...]]
    seconds: float
    out: Path | None = None

    @property
    def sparsity(self) -> float:
        """The fraction of the pruned weights' entries that are 0."""
        sizes = [math.prod(layer.shape) for layer in self.layers]
        return sum(size * layer.sparsity for size, layer in zip(sizes, self.layers, strict=True)) / sum(sizes)

    @property
    def error(self) -> float:
        """The mean of the layers' errors."""
        errors = [layer.error for layer in self.layers if layer.error is not None]
        return sum(errors) / len(errors) if errors else 0.0

    @property
    def warnings(self) -> tuple[str, ...]:
        """All layers' warnings, with their names."""
        return tuple(f"{layer.name}: {text}" for layer in self.layers for text in layer.warnings)


def oneshot(
    model: nn.Module | Path | str,
    batches: Iterable[Any],
    sparsity: float | None = None,
    *,
    solver: str | Solve = admm,
    pattern: str | Pattern | None = None,
    allocate: str | Allocation = uniform,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    out: Path | str | None = None,
    forward: Forward | None = None,
    activations: Path | str | None = None,
    device: torch.device | str | None = None,
    arguments: Mapping[str, Any] | None = None,
    on_layer: Callable[[Layer], None] | None = None,
) -> OneShot:
    """Prunes a model of repeated blocks with calibration data, block by block, as SparseGPT does (Frantar & Alistarh
    2023, arXiv:2301.00774) and Wanda (Sun et al. 2023, arXiv:2306.11695): in memory, or a directory larger than it.

    For each block in the order in which the model runs them: run the batches up to it through the pruned blocks before
    it, sum what each of its matrices is multiplied with, solve all of them, and run it again with its new weights. All
    matrices of a block are solved from one such run, as in the authors' code. Sums are over tokens, in float32 or
    wider, and leave out what an ``attention_mask`` calls padding; they do not depend on how tokens are batched.

    Blocks are found by structure (`find_blocks`), their weights by watching the products in them: ``Linear``,
    ``Conv1D``, each expert of a fused tensor, the parts of ``MultiheadAttention``. Embeddings, heads and all else
    outside the blocks, and routers, normalizations and adapters inside them, are left alone. An expert that no token
    was sent to is pruned by magnitude, and named in its layer's ``without_tokens``.

    A model in memory is changed in place, block by block; if a block fails, those before it stay pruned. A directory
    is not changed: the result is written beside ``out`` and renamed at the end, and a run that was killed goes on where
    it was when it is started again. In processes of `torch.distributed`, each takes its share of the batches.

    Args:
        model: any module, or a Hugging Face directory with safetensors files.
        batches: tensors, tuples that begin with the input, or mappings of keyword arguments; see `secateur.support`.
            Gone through several times; an iterator is put into a list.
        sparsity: fraction of each weight that is removed; none for a pattern that fixes it, such as ``NM(2, 4)``.
        solver: ``(weight, sparsity, pattern, *, <evidence>) -> (new weight, mask)``, by default `admm`; others are in
            `secateur.solvers` and `secateur.solvers`, and `from_criterion` makes one of any criterion. It may ask
            for ``gram``, ``input_norm``, ``input_mean`` and ``input_var``. Or a word, such as ``"sparsegpt"``.
        pattern: `Unstructured` by default, and `Rows` where the solver's scores compare within an output, as Wanda's
            and DSnoT's do; or a word, such as ``"2:4"``. Experts, and other matrices that share a tensor, compete
            apart.
        allocate: how the sparsity is shared out among the weights; see `secateur.allocation`. `uniform` gives all the
            same; any other is asked about Wanda's scores on the dense model, which costs one more run if it looks at
            them.
        include, exclude: globs over parameter names, as `find_targets` takes them; include can ask for routers.
        out: for a directory, the one to write, which must not exist.
        forward: ``(model, batch) -> outputs``; see `secateur.support.run`.
        activations: a folder for what blocks pass on, in files mapped into memory; by default it stays in memory.
        device: for a directory, where blocks are computed; by default the processor.
        arguments: what ``secateur.json`` shall say of how this was called.
        on_layer: called with each `Layer` once it is solved.

    Raises:
        ValueError: no blocks, no batches, a glob without a match, a sparsity or shape that does not fit the pattern,
            activations that are NaN, a block that runs twice in a forward pass.
        TypeError: the solver asks for what is not gathered here, or a batch is of no known kind.
        CheckpointError: a directory that cannot be read, or an ``out`` that cannot be written.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    >>> done = oneshot(model, [torch.randn(32, 8)], 0.5)
    >>> [(layer.name, layer.sparsity, layer.tokens) for layer in done.layers]
    [('0.0.weight', 0.5, 32), ('1.0.weight', 0.5, 32)]
    """
    solver, allocate = solvers.parse(solver), allocation.parse(allocate)
    pattern = narrowest(solver) if pattern is None else patterns.parse(pattern)
    _check_sparsity(sparsity, pattern)
    words = needs(solver)
    if impossible := sorted(set(words) - GATHERED):
        raise TypeError(
            f"{getattr(solver, '__name__', solver)} asks for {', '.join(impossible)}; a walk over blocks gathers "
            f"{', '.join(sorted(GATHERED))} and no gradients."
        )
    started = time.monotonic()
    include, exclude = _listed(include), _listed(exclude)
    if not isinstance(model, nn.Module):
        if out is None:
            raise ValueError(f"{model} is a directory, which is not changed; name the one to write with out=.")
        ask = _Ask(Path(model), Path(out), sparsity, solver, pattern, allocate, include, exclude, arguments or {})
        folder = None if activations is None else Path(activations)
        return _prune_directory(ask, batches, words, forward, folder, device, on_layer, started)
    if out is not None:
        raise ValueError("out= is for directories; a model in memory is changed in place. Save it yourself afterwards.")
    held = _held(batches)
    inner = unwrapped(model)
    _refuse_unready(inner)
    inference = any(parameter.is_inference() for parameter in inner.parameters())  # may be written to in this mode only
    with unchanged(inner), torch.inference_mode(inference), prepared(inner), _blamed_on_blocks() as job_done:
        blocks = find_blocks(inner)
        targets, left_alone = choose_targets(inner, blocks, include, exclude)
        _refuse_repeated(inner, blocks, held[0], forward)
        weights = _InMemory(blocks)
        outputs = Outputs(None if activations is None else Path(activations))
        replay = Replay(inner, blocks, outputs=outputs, forward=forward, device=device_of(inner))
        job = Job(solver, pattern, {}, words, on_layer, job_done, left_alone)
        with contextlib.closing(_Closing(outputs)), replay.installed():
            job.sparsities = shared_out(allocate, sparsity, pattern, targets, inner, replay, weights, held)
            walk(replay, weights, held, job)
    return _report(job, time.monotonic() - started, None)


class _InMemory:
    """The weights are the model's own."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.blocks = blocks

    def load(self, block: str, *, finished: bool) -> None:
        pass

    def unload(self, block: str) -> None:
        pass

    def arrive(self, module: nn.Module) -> None:
        pass

    def commit(self, block: str, new: Mapping[str, Solved], layers: Sequence[Layer]) -> None:  # noqa: ARG002
        parameters = dict(self.blocks[block].named_parameters())
        with torch.no_grad():
            for name, solved in new.items():
                parameters[name].copy_(solved.values)


@dataclass(frozen=True)
class _Ask:
    """What the bytes of a pruned directory depend on, but for the batches and the source's files."""

    source: Path
    out: Path
    sparsity: float | None
    solver: Solve
    pattern: Pattern
    allocate: Allocation
    include: list[str] | None
    exclude: list[str] | None
    arguments: Mapping[str, Any]

    def request(self, data: str) -> dict[str, Any]:
        """As JSON: what a run that goes on must have in common with the one that was killed."""
        return {
            "data": data,
            "sparsity": self.sparsity,
            "pattern": word_of(self.pattern),
            "solver": _described(self.solver),
            "allocate": _described(self.allocate),
            "include": self.include,
            "exclude": self.exclude,
            "processes": rank_and_world()[1],
            "versions": _versions(),
        }


def _prune_directory(
    ask: _Ask,
    batches: Iterable[Any],
    words: tuple[str, ...],
    forward: Forward | None,
    activations: Path | None,
    device: torch.device | str | None,
    on_layer: Callable[[Layer], None] | None,
    started: float,
) -> OneShot:
    check_new(ask.out)
    check_places(ask.source, ask.out)
    check_arguments(ask.arguments)
    checkpoint = open_checkpoint(ask.source)
    previous = previous_record(ask.source)
    every = batches if isinstance(batches, Sequence) else list(batches)
    held = _held(every)
    device = torch.device("cpu" if device is None else device)
    model = build_on_meta(checkpoint)
    for buffers in [module._buffers for module in model.modules()]:
        buffers.update({key: None if buffer is None else buffer.to(device) for key, buffer in buffers.items()})
    with blaming_config(ask.source, "the model is not one of repeated blocks"):
        blocks = find_blocks(model)
    targets, left_alone = choose_targets(model, blocks, ask.include, ask.exclude)
    files = BlockFiles(model, blocks, checkpoint, unfinished_copy(ask.out), device)
    files.check()
    forward = functools.partial(_run_of_directory, ask.source) if forward is None else forward
    _try(model, files, held[0], forward, device)
    request = ask.request(digest(every))
    rank, world = rank_and_world()
    if rank:
        _barrier(world)  # the first process has copied the source
    with unfinished(ask.out, request, checkpoint, first=not rank) as begun, prepared(model):
        if not rank:
            begun.copy()
            _barrier(world)
        job = Job(ask.solver, ask.pattern, {}, words, on_layer, [], left_alone)
        sparsities = _gone_on_with(begun, job, blocks, targets)
        weights = _InFiles(files, begun, job)
        outputs = Outputs(activations)
        replay = Replay(model, blocks, outputs=outputs, forward=forward, on_arrival=weights.arrive, device=device)
        with contextlib.closing(_Closing(outputs)), replay.installed(), torch.random.fork_rng(devices=[]):
            if sparsities is not None:
                job.sparsities = sparsities
            else:
                job.sparsities = shared_out(
                    ask.allocate, ask.sparsity, ask.pattern, targets, model, replay, weights, held
                )
                if not rank:
                    begun.learn(sparsities=job.sparsities)
            walk(replay, weights, held, job, already=[block["name"] for block in begun.blocks])
        done = _report(job, time.monotonic() - started, ask.out)
        if not rank:
            write_record(begun, done, ask, request, files, previous)
            begun.publish()
        _barrier(world)
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

    def __init__(self, files: BlockFiles, run: Unfinished, job: Job) -> None:
        self.files, self.run, self.job = files, run, job
        self.load, self.unload, self.arrive = files.load, files.unload, files.arrive

    def commit(self, block: str, new: Mapping[str, Solved], layers: Sequence[Layer]) -> None:
        rank, world = rank_and_world()
        if not rank:
            written = self.files.write(block, {name: solved.values for name, solved in new.items()})
            masks = self.files.taken_apart(block, {name: solved.mask for name, solved in new.items()})
            tensors = {
                name: {
                    "sparsity": (found.numel - found.nonzero) / found.numel,
                    "removed": found.numel - int(masks[name].count_nonzero()),
                    "kept_as_they_were": found.kept_as_they_were,
                }
                for name, found in written.items()
            }
            self.run.facts["left_alone"] = self.job.left_alone
            self.run.note({"name": block, "layers": [asdict(layer) for layer in layers], "tensors": tensors})
        _barrier(world)
        with torch.no_grad():  # the block is run once more with its new weights
            for name, solved in new.items():
                self.files.blocks[block].get_parameter(name).copy_(solved.values)


def _gone_on_with(
    begun: Unfinished, job: Job, blocks: Mapping[str, nn.Module], targets: Mapping[str, nn.Parameter]
) -> dict[str, float | None] | None:
    """Adds what an earlier run did to the job; the sparsities that it went by, None if it did not come so far."""
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
            job.layers.append(found)
    facts = journal.inner("facts")
    facts.only("sparsities", "left_alone")
    if "left_alone" in facts.values:
        reasons = facts.inner("left_alone")
        job.left_alone.update({reason: reasons.each(reason, str) for reason in reasons.values})
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


def _barrier(world: int) -> None:
    if world > 1:
        from torch import distributed

        distributed.barrier()


def digest(batches: Iterable[Any]) -> str:
    """The SHA-256 of all tensors in the batches: names, dtypes, shapes and values.

    >>> digest([torch.tensor([1, 2])]) == digest([torch.tensor([1, 3])])
    False
    """
    total = hashlib.sha256()

    def add(batch: Any) -> None:
        if isinstance(batch, Tensor):
            whole = batch.detach().cpu().contiguous()
            total.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
            total.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
        elif isinstance(batch, Mapping):
            for key in sorted(batch):
                total.update(str(key).encode())
                add(batch[key])
        elif isinstance(batch, tuple | list):
            total.update(b"(")
            for part in batch:
                add(part)
        else:
            total.update(repr(batch).encode())

    for batch in batches:
        add(batch)
        total.update(b";")
    return total.hexdigest()


def _described(function: Any) -> str:
    """A callable's name, with what a partial gives it."""
    if isinstance(function, functools.partial):
        given = [*map(repr, function.args), *(f"{key}={value!r}" for key, value in function.keywords.items())]
        return f"{_described(function.func)}({', '.join(given)})"
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _listed(globs: str | Iterable[str] | None) -> list[str] | None:
    return None if globs is None else [globs] if isinstance(globs, str) else list(globs)


def _versions() -> dict[str, str]:
    import transformers

    return {"secateur": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def write_record(
    run: Unfinished,
    done: OneShot,
    ask: _Ask,
    request: Mapping[str, Any],
    files: BlockFiles,
    previous: Mapping[str, Any] | None,
) -> None:
    """``secateur.json``; no time and no path of our own: the same call on the same files writes the same bytes.

    Names are those of the tensors in files, but under ``layers``, where they are the model's. ``removed`` leaves out
    what stands in several tensors of the file and competed as one, where the pattern counts units. ``previous`` is the
    record of the source.
    """
    pruned = {name: found for block in run.blocks for name, found in block["tensors"].items()}
    alone = {name for name in pruned if isinstance(ask.pattern, Unstructured | Rows | NM) or files.stands_alone(name)}
    record = {
        "secateur": __version__,
        "torch": torch.__version__,
        "transformers": request["versions"]["transformers"],
        "method": "oneshot",
        "arguments": dict(ask.arguments),
        "solver": request["solver"],
        "kept_weights": "unchanged" if all(found["kept_as_they_were"] for found in pruned.values()) else "updated",
        "pattern": request["pattern"],
        "allocate": request["allocate"],
        "data": {"sha256": request["data"]},
        "sparsity": {"targets": done.sparsity, "model": inspect_checkpoint(run.folder).total().sparsity},
        "pruned": {name: found["sparsity"] for name, found in pruned.items()},
        "removed": {name: found["removed"] for name, found in pruned.items() if name in alone},
        "layers": {
            layer.name: {
                "sparsity": layer.sparsity,
                "error": layer.error,
                "tokens": layer.tokens,
                "without_tokens": list(layer.without_tokens),
            }
            for layer in done.layers
        },
        "warnings": list(done.warnings),
        "left_alone": files.left_alone(pruned, done.left_alone),
    }
    if previous is not None:
        record["previous"] = previous
    run.add(RECORD, record_text(record))


def _refuse_unready(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ValueError(f"{name} is on the meta device and has no values; load the model, or pass its directory.")
        if name.endswith("_orig"):
            raise ValueError(
                f"{name}: a mask is attached, and what the model multiplies with is no parameter; make it permanent "
                "with prune.remove, or take it off with detach."
            )


def _refuse_repeated(model: nn.Module, blocks: Mapping[str, nn.Module], batch: Any, forward: Forward | None) -> None:
    """A block that runs twice in a forward pass is an error before anything changes.

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


class _Closing:
    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs

    def close(self) -> None:
        self.outputs.clear()


@contextlib.contextmanager
def _blamed_on_blocks() -> Iterator[list[Layer]]:
    """An exception says which blocks of a model in memory are pruned already."""
    layers: list[Layer] = []
    try:
        yield layers
    except BaseException as error:
        if layers:
            names = list(dict.fromkeys(layer.block for layer in layers))
            error.add_note(f"Pruned already, and left so: {names[0]} to {names[-1]} ({len(names)} blocks).")
        raise


def _report(job: Job, seconds: float, out: Path | None) -> OneShot:
    return OneShot(tuple(job.layers), {why: tuple(names) for why, names in job.left_alone.items()}, seconds, out)


def _check_sparsity(sparsity: float | None, pattern: Pattern) -> None:
    if sparsity is not None:
        check_sparsity(sparsity)
    if pattern.density is None and sparsity is None:
        raise ValueError(f"{pattern} needs a sparsity: the fraction of each weight to remove, in [0, 1].")
    if pattern.density is not None and sparsity is not None and abs(1 - pattern.density - sparsity) > 1e-9:
        raise ValueError(f"{pattern} removes {1 - pattern.density:g} of the weights, not {sparsity}; leave it out.")


def _held(batches: Iterable[Any]) -> Sequence[Any]:
    """This rank's batches, in a list."""
    if isinstance(batches, Tensor | Mapping | str):
        raise TypeError(f"batches is an iterable of batches, not a {type(batches).__name__}; pass [batch].")
    held = batches if isinstance(batches, Sequence) else list(batches)
    if not len(held):
        raise ValueError("there are no batches: what to prune is learned from running the model.")
    rank, world = rank_and_world()
    if len(held) < world:
        raise ValueError(f"{world} processes need at least as many batches; there are {len(held)}.")
    return held[rank::world]
