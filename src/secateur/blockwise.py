"""One-shot pruning of a model made of repeated blocks: calibrate, prune and repair one block after the other.

Law: a block is pruned by what reaches it from the pruned blocks before it; its weights change only when all of them
are solved, and are written down before the next block is read. Memory is one block and the activations between two.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from secateur.allocation import Allocation, check_sparsity, uniform
from secateur.batches import Forward, device_of, mapped, unchanged, unwrapped
from secateur.block_files import BlockFiles, build_on_meta
from secateur.blocks import experts_owners, find_blocks, is_expert, left_alone_within
from secateur.checkpoint_sparsification import RECORD
from secateur.checkpoint_sparsification import _check_places as check_places
from secateur.checkpoints import Checkpoint, open_checkpoint
from secateur.criteria import magnitude
from secateur.evidence import needs
from secateur.files import write_whole
from secateur.inspection import inspect_checkpoint
from secateur.patterns import Pattern, Unstructured
from secateur.products import Piece, Products, Statistics, Tokens, encoder_states, silenced
from secateur.progress import track
from secateur.replay import LostOutput, Outputs, Replay
from secateur.resumable import Unfinished, unfinished
from secateur.selection import LazyScores
from secateur.solvers import Solver, from_criterion, sparsegpt
from secateur.targets import _identity as identity_of
from secateur.targets import _matched as matched
from secateur.targets import stored_inputs_first
from secateur.version import __version__

__all__ = ["Layer", "OneShot", "oneshot"]

GATHERED = frozenset(["gram", "input_norm", "input_mean", "input_var"])
NOT_A_PRODUCT = "not a matrix that inputs are multiplied with"
NEVER_RUN = "in a block that the batches never ran"


@dataclass(frozen=True)
class Layer:
    """What became of one weight.

    ``error`` is ``‖X(W' - W)ᵀ‖² / ‖XWᵀ‖²``, the squared relative error of its outputs on the inputs that reach it in the
    pruned model; None where no token did. ``tokens`` counts those inputs; ``without_tokens`` are the experts that none
    were sent to, which were pruned by magnitude.
    """

    name: str
    block: str
    shape: tuple[int, ...]
    sparsity: float
    error: float | None
    tokens: int
    seconds: float
    without_tokens: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


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


class Weights(Protocol):
    """Where a model's weights are: in the model, or in files, of which one block at a time is read into it."""

    def load(self, block: str, *, finished: bool) -> None:
        """The block's weights are there; those of a finished block are the pruned ones."""

    def unload(self, block: str) -> None:
        """They need not be there any more."""

    def arrive(self, module: nn.Module) -> None:
        """A module outside the blocks is about to run."""

    def commit(self, block: str, new: Mapping[str, Tensor], layers: Sequence[Layer]) -> None:
        """The new weights by their names in the block; afterwards the block counts as finished."""


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

    def commit(self, block: str, new: Mapping[str, Tensor], layers: Sequence[Layer]) -> None:  # noqa: ARG002
        parameters = dict(self.blocks[block].named_parameters())
        with torch.no_grad():
            for name, values in new.items():
                parameters[name].copy_(values)


@dataclass
class Job:
    """What is asked of every block."""

    solver: Solver
    pattern: Pattern
    sparsities: Mapping[str, float | None]  # of the targets, by full name
    words: tuple[str, ...]
    on_layer: Callable[[Layer], None] | None = None
    layers: list[Layer] = field(default_factory=list)
    left_alone: dict[str, list[str]] = field(default_factory=dict)


def oneshot(
    model: nn.Module | Path | str,
    batches: Iterable[Any],
    sparsity: float | None = None,
    *,
    solver: Solver = sparsegpt,
    pattern: Pattern | None = None,
    allocate: Allocation = uniform,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    out: Path | str | None = None,
    forward: Forward | None = None,
    activations: Path | str | None = None,
    device: torch.device | str | None = None,
    arguments: Mapping[str, Any] | None = None,
    on_layer: Callable[[Layer], None] | None = None,
) -> OneShot:
    """Prunes a model of repeated blocks with calibration data, block by block: SparseGPT (Frantar & Alistarh 2023,
    arXiv:2301.00774), Wanda and their kin, on a model in memory or on a directory larger than memory.

    For each block in the order in which the model runs them: run the batches up to it through the pruned blocks before
    it, sum what each of its matrices is multiplied with, solve all of them, and run it again with its new weights. All
    matrices of a block are solved from one such run, as in the authors' code. Sums are over tokens, in float32 or
    wider, and leave out what an ``attention_mask`` calls padding; they do not depend on how tokens are batched.

    Blocks are found by structure (`find_blocks`), their weights by watching the products in them: ``Linear``, ``Conv1D``,
    each expert of a fused tensor, the parts of ``MultiheadAttention``. Embeddings, heads and all else outside the
    blocks, and routers, normalizations and adapters inside them, are left alone. An expert that no token was sent to is
    pruned by magnitude, and named in its layer's ``without_tokens``.

    A model in memory is changed in place, block by block; if a block fails, those before it stay pruned. A directory
    is not changed: the result is written beside ``out`` and renamed at the end, and a run that was killed goes on where
    it was when it is started again. In processes of `torch.distributed`, each takes its share of the batches.

    Args:
        model: any module, or a Hugging Face directory with safetensors files.
        batches: tensors, tuples that begin with the input, or mappings of keyword arguments; see `secateur.batches`.
            Gone through several times; an iterator is put into a list.
        sparsity: fraction of each weight that is removed; none for a pattern that fixes it, such as ``NM(2, 4)``.
        solver: ``(weight, sparsity, pattern, *, <evidence>) -> (new weight, mask)``; see `secateur.solvers`. It may ask
            for ``gram``, ``input_norm``, ``input_mean`` and ``input_var``.
        pattern: `Unstructured` by default. Experts, and other matrices that share a tensor, compete apart.
        allocate: how the sparsity is shared out among the weights; see `secateur.allocation`. `uniform` gives all the
            same; any other is asked about Wanda's scores on the dense model, which costs one more run.
        include, exclude: globs over parameter names, as `find_targets` takes them; include can ask for routers.
        out: for a directory, the one to write, which must not exist.
        forward: ``(model, batch) -> outputs``; see `secateur.batches.run`.
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
    pattern = Unstructured() if pattern is None else pattern
    _check_sparsity(sparsity, pattern)
    words = needs(solver)
    if impossible := sorted(set(words) - GATHERED):
        raise TypeError(
            f"{getattr(solver, '__name__', solver)} asks for {', '.join(impossible)}; a walk over blocks gathers "
            f"{', '.join(sorted(GATHERED))} and no gradients."
        )
    started = time.monotonic()
    if not isinstance(model, nn.Module):
        if out is None:
            raise ValueError(f"{model} is a directory, which is not changed; name the one to write with out=.")
        ask = _Ask(Path(model), Path(out), sparsity, solver, pattern, allocate, include, exclude, arguments or {})
        outputs = None if activations is None else Path(activations)
        return _prune_directory(ask, batches, words, forward, outputs, device, on_layer, started)
    if out is not None:
        raise ValueError("out= is for directories; a model in memory is changed in place. Save it yourself afterwards.")
    held = _held(batches)
    inner = unwrapped(model)
    with unchanged(inner), prepared(inner), _blamed_on_blocks() as job_done:
        blocks = find_blocks(inner)
        targets, left_alone = choose_targets(inner, blocks, include, exclude)
        weights = _InMemory(blocks)
        outputs = Outputs(None if activations is None else Path(activations))
        replay = Replay(inner, blocks, outputs=outputs, forward=forward, device=device_of(inner))
        job = Job(solver, pattern, {}, words, on_layer, job_done, left_alone)
        with contextlib.closing(_Closing(outputs)), replay.installed():
            job.sparsities = shared_out(allocate, sparsity, pattern, targets, inner, replay, weights, held)
            walk(replay, weights, held, job)
    return finished(job, time.monotonic() - started, None)


@dataclass(frozen=True)
class _Ask:
    """What the bytes of a pruned directory depend on, but for the batches."""

    source: Path
    out: Path
    sparsity: float | None
    solver: Solver
    pattern: Pattern
    allocate: Allocation
    include: str | Iterable[str] | None
    exclude: str | Iterable[str] | None
    arguments: Mapping[str, Any]

    def request(self, checkpoint: Checkpoint, data: str) -> dict[str, Any]:
        """As JSON: what a run that goes on must have in common with the one that was killed."""
        return {
            "source": {
                "config": hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode()).hexdigest()[:16],
                "tensors": {
                    str(file.relative_to(checkpoint.root)): [file.stat().st_size, _header_hash(file)]
                    for file in checkpoint.files
                },
            },
            "data": data,
            "sparsity": self.sparsity,
            "pattern": repr(self.pattern),
            "solver": _described(self.solver),
            "allocate": _described(self.allocate),
            "include": _listed(self.include),
            "exclude": _listed(self.exclude),
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
    check_places(ask.source, ask.out)
    checkpoint = open_checkpoint(ask.source)
    every = batches if isinstance(batches, Sequence) else list(batches)
    held = _held(every)
    device = torch.device("cpu" if device is None else device)
    model = build_on_meta(checkpoint)
    for buffers in [module._buffers for module in model.modules()]:
        buffers.update({key: None if buffer is None else buffer.to(device) for key, buffer in buffers.items()})
    blocks = find_blocks(model)
    targets, left_alone = choose_targets(model, blocks, ask.include, ask.exclude)
    request = ask.request(checkpoint, digest(every))
    rank, world = rank_and_world()
    if rank:
        _barrier(world)  # the first process has copied the source
    with unfinished(ask.out, request, checkpoint, first=not rank) as run, prepared(model):
        if not rank:
            run.copy(ask.source)
            _barrier(world)
        files = BlockFiles(model, blocks, checkpoint, run.folder, device)
        job = Job(ask.solver, ask.pattern, {}, words, on_layer, [], left_alone)
        job.left_alone.update(run.facts.get("left_alone", {}))
        job.layers.extend(_layer_from_json(layer) for block in run.blocks for layer in block["layers"])
        weights = _InFiles(files, run, job)
        outputs = Outputs(activations)
        replay = Replay(model, blocks, outputs=outputs, forward=forward, on_arrival=weights.arrive, device=device)
        with contextlib.closing(_Closing(outputs)), replay.installed(), torch.random.fork_rng(devices=[]):
            if "sparsities" in run.facts:
                job.sparsities = run.facts["sparsities"]
            else:
                job.sparsities = shared_out(
                    ask.allocate, ask.sparsity, ask.pattern, targets, model, replay, weights, held
                )
                if not rank:
                    run.learn(sparsities=job.sparsities)
            walk(replay, weights, held, job, already=[block["name"] for block in run.blocks])
        done = finished(job, time.monotonic() - started, ask.out)
        if not rank:
            write_record(run, done, ask, request)
            run.publish()
        _barrier(world)
    return done


class _InFiles:
    """The weights are in files; the first process writes."""

    def __init__(self, files: BlockFiles, run: Unfinished, job: Job) -> None:
        self.files, self.run, self.job = files, run, job
        self.load, self.unload, self.arrive = files.load, files.unload, files.arrive

    def commit(self, block: str, new: Mapping[str, Tensor], layers: Sequence[Layer]) -> None:
        rank, world = rank_and_world()
        if not rank:
            written = self.files.write(block, new)
            tensors = {name: 1 - values.count_nonzero().item() / values.numel() for name, values in written.items()}
            self.run.facts["left_alone"] = self.job.left_alone
            self.run.note({"name": block, "layers": [asdict(layer) for layer in layers], "tensors": tensors})
        _barrier(world)
        with torch.no_grad():  # the block is run once more with its new weights
            for name, values in new.items():
                self.files.blocks[block].get_parameter(name).copy_(values)


def _layer_from_json(found: Mapping[str, Any]) -> Layer:
    lists = {key: tuple(found[key]) for key in ("shape", "without_tokens", "warnings")}
    return Layer(**{**found, **lists})


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


def _header_hash(file: Path) -> str:
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return hashlib.sha256(opened.read(length)).hexdigest()[:16]


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


def write_record(run: Unfinished, done: OneShot, ask: _Ask, request: Mapping[str, Any]) -> None:
    """``secateur.json``: no time and no path of our own, so that the same call on the same files writes the same bytes."""
    path = run.folder / RECORD
    previous = None
    if path.exists():
        with contextlib.suppress(ValueError):
            previous = json.loads(path.read_text("utf-8"))
    pruned = {name: share for block in run.blocks for name, share in block["tensors"].items()}
    record = {
        "secateur": __version__,
        "torch": torch.__version__,
        "transformers": request["versions"]["transformers"],
        "method": "oneshot",
        "arguments": dict(ask.arguments),
        "solver": request["solver"],
        "pattern": request["pattern"],
        "allocate": request["allocate"],
        "data": {"sha256": request["data"]},
        "sparsity": {"targets": done.sparsity, "model": inspect_checkpoint(run.folder).total().sparsity},
        "pruned": pruned,
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
        "left_alone": {reason: list(names) for reason, names in done.left_alone.items()},
    }
    if previous is not None:
        record["previous"] = previous
    write_whole(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


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


def finished(job: Job, seconds: float, out: Path | None) -> OneShot:
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


def rank_and_world() -> tuple[int, int]:
    """(this process, how many there are)."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


@contextlib.contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """For replaying: evaluation mode, no key/value caches (a second run of a block would attend to its first), and
    experts one after the other, so that each one's product is seen."""
    model.eval()
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    changed: list[tuple[Any, str, Any]] = []
    for config in configs.values():
        for key, value in (("use_cache", False), ("_experts_implementation_internal", "eager")):
            if hasattr(config, key) and getattr(config, key) not in (value, None):
                changed.append((config, key, getattr(config, key)))
                setattr(config, key, value)
    try:
        yield
    finally:
        for config, key, value in changed:
            setattr(config, key, value)


def choose_targets(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    include: str | Iterable[str] | None,
    exclude: str | Iterable[str] | None,
) -> tuple[dict[str, nn.Parameter], dict[str, list[str]]]:
    """``{full name: parameter}`` of the matrices inside blocks that may be pruned, and ``{reason: names}`` of others."""
    names = {name: parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    included, excluded = matched(include, names), matched(exclude, names) or set()
    holders: dict[Any, set[str]] = {}
    for name, parameter in names.items():
        holders.setdefault(identity_of(parameter), set()).add(_block_of(name, blocks))
    targets: dict[str, nn.Parameter] = {}
    left_alone: dict[str, list[str]] = {}
    reasons = {
        f"{block}.{name}": reason
        for block, module in blocks.items()
        for name, reason in left_alone_within(module).items()
    }
    seen = set()
    for name, parameter in names.items():
        if parameter.dim() < 2 or not parameter.is_floating_point() or identity_of(parameter) in seen:
            continue
        seen.add(identity_of(parameter))
        block = _block_of(name, blocks)
        reason = None
        if not block:
            reason = "outside the blocks"
        elif len(holders[identity_of(parameter)]) > 1:
            reason = "shared with another block"
        elif name in excluded:
            reason = "excluded"
        elif included is not None:
            reason = None if name in included else "not included"
        else:
            reason = reasons.get(name)
        if reason is None:
            targets[name] = parameter
        else:
            left_alone.setdefault(reason, []).append(name)
    if included is not None:
        for name in sorted(included):
            for reason in ("outside the blocks", "shared with another block"):
                if name in left_alone.get(reason, ()):
                    raise ValueError(
                        f"{name} is {reason}, and only what is within blocks is pruned here; use sparsify."
                    )
    if not targets:
        said = ", ".join(f"{len(found)} {reason}" for reason, found in left_alone.items())
        raise ValueError(f"no matrix is left to prune ({said}).")
    return targets, left_alone


def _block_of(name: str, blocks: Mapping[str, nn.Module]) -> str:
    parts = name.split(".")
    for count in range(1, len(parts)):
        if (path := ".".join(parts[:count])) in blocks:
            return path
    return ""


# -------------------------------------------------------------------------------------------------------- the walk


def walk(replay: Replay, weights: Weights, batches: Sequence[Any], job: Job, *, already: Sequence[str] = ()) -> None:
    """Prunes block after block in the order in which the model runs them; those ``already`` pruned are only run."""
    for name in track(already, "running finished blocks"):
        _pass_through(replay, weights, batches, name)
    left = len(replay.blocks) - len(already)
    for _ in track(range(left), "pruning blocks"):
        try:
            name = _next(replay, weights, batches, job)
        except LostOutput:
            # an output of long ago is needed after all: the finished blocks are run again, and all outputs kept
            done = list(replay.done)
            replay.restart(keep_all=True)
            for finished_block in done:
                _pass_through(replay, weights, batches, finished_block)
            name = _next(replay, weights, batches, job)
        if name is None:
            break
    never = [name for name in replay.blocks if name not in replay.done]
    for full in job.sparsities:
        if _block_of(full, replay.blocks) in never:
            job.left_alone.setdefault(NEVER_RUN, []).append(full)
    if not job.layers and not already:
        raise ValueError("nothing was pruned: the batches ran none of the blocks, or no product with their weights.")


def _pass_through(replay: Replay, weights: Weights, batches: Sequence[Any], name: str) -> None:
    weights.load(name, finished=True)
    _store(replay, batches, name)
    weights.unload(name)


def _next(replay: Replay, weights: Weights, batches: Sequence[Any], job: Job) -> str | None:
    """Prunes the block that the model runs next; returns its name, or None where there is none."""
    if replay.done:
        replay.forget(0, batches[0])
    reached: list[str] = []
    if replay.run(0, batches[0], lambda name, *_: reached.append(name)) is None:
        return None
    name = reached[0]
    block = replay.blocks[name]
    weights.load(name, finished=False)
    parameters = dict(block.named_parameters())
    wanted = {local: p for local, p in parameters.items() if f"{name}.{local}" in job.sparsities}
    if wanted:
        products = _observe(replay, batches, name, wanted, job)
        new, layers = _solve(name, block, wanted, products, job)
        weights.commit(name, new, layers)
        job.layers.extend(layers)
    else:
        weights.commit(name, {}, [])
    _store(replay, batches, name)
    weights.unload(name)
    return name


def _observe(
    replay: Replay, batches: Sequence[Any], name: str, wanted: Mapping[str, Tensor], job: Job
) -> dict[Piece, Statistics]:
    block = replay.blocks[name]
    products = Products(wanted, frozenset(job.words))
    tokens, first = Tokens(), None

    def observe(reached: str, args: Any, kwargs: Any, call: Callable[[], Any]) -> None:
        nonlocal first
        assert reached == name, f"batch {number} ran {reached} where the first one ran {name}"
        masks = tokens.for_block(block, args, kwargs, batch)
        states = encoder_states(block, args, kwargs)
        hooks = [owner.register_forward_pre_hook(silenced(masks.own), with_kwargs=True) for owner in owners]
        try:
            with products.watching(masks, states):
                output = call()
        finally:
            for hook in hooks:
                hook.remove()
        if number == 0:
            first = mapped(output, lambda tensor: tensor.detach().clone())

    owners = experts_owners(block)
    for number, batch in enumerate(track(batches, f"calibrating {name}")):
        tokens = Tokens.of(batch)
        if replay.run(number, batch, observe) is None:
            raise ValueError(
                f"batch {number} does not run {name}, which the first batch runs; pass batches of one kind."
            )
    if replay.is_run_again(name, 0, batches[0], first):
        raise ValueError(
            f"{name} runs more than once in a forward pass (weights shared between layers); pruning it block by block "
            "would see its first run only. Use sparsify(model, criterion=criteria.wanda, batches=...)."
        )
    found = reduced(products)
    for sums in {id(sums): sums for sums in found.values()}.values():
        sums.finish()
    return found


def _store(replay: Replay, batches: Sequence[Any], name: str) -> None:
    def store(reached: str, args: Any, kwargs: Any, call: Callable[[], Any]) -> None:  # noqa: ARG001
        replay.save(name, number, call())

    for number, batch in enumerate(track(batches, f"running {name}")):
        replay.run(number, batch, store)
    replay.finish(name)


def _solve(
    block: str, module: nn.Module, wanted: Mapping[str, Tensor], found: Mapping[Piece, Statistics], job: Job
) -> tuple[dict[str, Tensor], list[Layer]]:
    """New values of the block's weights, none written yet, and what there is to say about each."""
    new: dict[str, Tensor] = {}
    layers: list[Layer] = []
    for local, parameter in wanted.items():
        full = f"{block}.{local}"
        pieces = _complete(sorted(piece for piece in found if piece.name == local), parameter)
        if not pieces and is_expert(local) and isinstance(module.get_submodule(local.rpartition(".")[0]), nn.Linear):
            pieces = [Piece(local, 0, (parameter.shape[0], parameter.shape[1]), parameter.stride())]  # an idle one
        if not pieces:
            job.left_alone.setdefault(NOT_A_PRODUCT, []).append(full)
            continue
        try:
            job.pattern.pool(torch.empty(pieces[0].shape, device="meta"))
        except ValueError as error:
            job.left_alone.setdefault("of a shape that does not fit the pattern", []).append(f"{full} ({error})")
            continue
        started = time.monotonic()
        values = parameter.detach().clone()
        layers.append(_solve_pieces(full, block, parameter, values, pieces, found, job, started))
        new[local] = values
        if job.on_layer is not None:
            job.on_layer(layers[-1])
    return new, layers


def _solve_pieces(
    full: str,
    block: str,
    parameter: Tensor,
    values: Tensor,
    pieces: Sequence[Piece],
    found: Mapping[Piece, Statistics],
    job: Job,
    started: float,
) -> Layer:
    removed = lost = whole = 0.0
    tokens, unseen, said = 0, [], []
    for number, piece in enumerate(pieces):
        matrix = piece.of(parameter).clone(
            memory_format=torch.contiguous_format
        )  # a solver may write into its argument
        sums = found.get(piece)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if sums is None or not sums.tokens:
                    unseen.append(number)
                    new, mask = from_criterion(magnitude)(matrix, job.sparsities[full], job.pattern)
                else:
                    tokens += sums.tokens
                    evidence = sums.evidence(job.words)
                    new, mask = job.solver(matrix, job.sparsities[full], job.pattern, **evidence)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{full}: {error}") from error
        said += [str(warning.message) for warning in caught]
        if sums is not None:
            parts = sums.error(matrix, new)
            lost, whole = lost + parts[0], whole + parts[1]
        removed += mask.numel() - int(mask.sum())
        piece.of(values).copy_(new)
    return Layer(
        full,
        block,
        tuple(parameter.shape),
        removed / parameter.numel(),
        lost / whole if whole > 0 else (0.0 if tokens else None),
        tokens,
        time.monotonic() - started,
        tuple(unseen) if len(pieces) > 1 else (),
        tuple(dict.fromkeys(said)),
    )


def _complete(pieces: Sequence[Piece], parameter: Tensor) -> list[Piece]:
    """All matrices of a parameter in the order of memory, given those that were seen; none where they do not tile it.

    Experts that no token was sent to were not seen: they lie where the others' distance says.
    """
    if not pieces or sum(math.prod(piece.shape) for piece in pieces) == parameter.numel():
        return list(pieces)
    first = pieces[0]
    places = range(0, parameter.numel(), math.prod(first.shape))
    whole = [Piece(first.name, at, first.shape, first.strides) for at in places]
    return whole if set(pieces) <= set(whole) and parameter.is_contiguous() else []


def reduced(products: Products) -> dict[Piece, Statistics]:
    """What all processes saw, the same on each; of one process, its own."""
    rank, world = rank_and_world()
    if world == 1:
        return products.found()
    from torch import distributed

    mine = products.found()
    device = next(iter(products.parameters.values()))[1].device
    everyone: list[Any] = [None] * world
    shared = {piece: products.shared.get(piece, piece) for piece in mine}
    distributed.all_gather_object(everyone, shared)
    leaders: dict[Piece, Piece] = {}
    for other in everyone:
        for piece, leader in other.items():
            leaders[piece] = min(leader, leaders.get(piece, leader))
    total: dict[Piece, Statistics] = {}
    for leader in sorted(set(leaders.values())):
        sums = products.sums.get(leader) or Statistics(products.words, leader.shape[1])
        sums.add_over_ranks(device)
        total[leader] = sums
    return {piece: total[leader] for piece, leader in sorted(leaders.items())}


# ----------------------------------------------------------------------------------------- sparsity for each weight


def shared_out(
    allocate: Allocation,
    sparsity: float | None,
    pattern: Pattern,
    targets: Mapping[str, nn.Parameter],
    model: nn.Module,
    replay: Replay,
    weights: Weights,
    batches: Sequence[Any],
) -> dict[str, float | None]:
    """The sparsity of each weight. `uniform`: the same; else the counts that ``allocate`` gives for Wanda's scores."""
    if allocate is uniform:
        return dict.fromkeys(targets, sparsity)
    if pattern.density is not None or sparsity is None:
        raise ValueError(f"{pattern} keeps the same share of every weight; leave allocate out.")
    dense = DenseScores(targets, model, replay, weights, batches)
    scores = LazyScores(dense, lambda weight: weight)  # the scores themselves are what is read
    counts = allocate(scores, sparsity, pattern)
    shares: dict[str, float | None] = {}
    for name in targets:
        if name not in counts:
            raise ValueError(f"the allocation gave no count for {name}; return {{name: units kept in each group}}.")
        groups, units = pattern.pool(torch.empty(dense.shapes[name], device="meta")).shape
        count = counts[name]
        kept = count * groups if isinstance(count, int) else int(count.sum())
        shares[name] = 1 - kept / (groups * units)
    return shares


class DenseScores(Mapping[str, Tensor]):
    """Wanda's scores (arXiv:2306.11695) of the dense model, ``|w| · ‖x‖``, (outputs, inputs), read on access.

    The first access runs the batches through the whole dense model; ``shapes`` runs nothing.
    """

    def __init__(
        self,
        targets: Mapping[str, nn.Parameter],
        model: nn.Module,
        replay: Replay,
        weights: Weights,
        batches: Sequence[Any],
    ) -> None:
        turned = set(stored_inputs_first(model, targets))
        self.shapes = {
            name: torch.Size(_rows_shape(tuple(p.shape), inputs_first=name in turned)) for name, p in targets.items()
        }
        self.replay, self.weights, self.batches = replay, weights, batches
        self._norms: dict[str, dict[Piece, Tensor]] | None = None
        self._loaded: str | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._norms is None:
            self._norms = self._measured()
        block = _block_of(name, self.replay.blocks)
        local = name[len(block) + 1 :]
        if self._loaded != block:
            if self._loaded is not None:
                self.weights.unload(self._loaded)
            self.weights.load(block, finished=False)
            self._loaded = block
        parameter = self.replay.blocks[block].get_parameter(local)
        norms = self._norms.get(name, {})
        pieces = _complete(sorted(norms), parameter)
        if not pieces:
            return parameter.detach().abs().float().reshape(self.shapes[name])
        rows = [piece.of(parameter).abs().float() * norms.get(piece, torch.zeros(1)) for piece in pieces]
        return torch.cat(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _measured(self) -> dict[str, dict[Piece, Tensor]]:
        """The norms of each weight's inputs, from one run of the dense model; the replay is as new afterwards."""
        norms: dict[str, dict[Piece, Tensor]] = {}
        magnitudes = Job(from_criterion(magnitude), Unstructured(), dict.fromkeys(self.shapes, 0.0), ("input_norm",))
        replay = self.replay
        for _ in track(range(len(replay.blocks)), "looking at the dense blocks"):
            if replay.done:
                replay.forget(0, self.batches[0])
            reached: list[str] = []
            if replay.run(0, self.batches[0], lambda name, *_, to=reached: to.append(name)) is None:
                break
            name = reached[0]
            self.weights.load(name, finished=False)
            wanted = {
                local: p for local, p in replay.blocks[name].named_parameters() if f"{name}.{local}" in self.shapes
            }
            for piece, sums in _observe(replay, self.batches, name, wanted, magnitudes).items():
                if sums.tokens:
                    norms.setdefault(f"{name}.{piece.name}", {})[piece] = sums.evidence(["input_norm"])["input_norm"]
            _store(replay, self.batches, name)
            self.weights.unload(name)
        replay.restart(keep_all=False)
        return norms


def _rows_shape(shape: tuple[int, ...], *, inputs_first: bool) -> tuple[int, ...]:
    if len(shape) == 3:
        return (shape[0] * shape[1], shape[2])
    return shape[::-1] if inputs_first else shape
