"""The walk over a model's blocks: sum what meets each weight, solve, write, run on with the new weights.

Law: a block is pruned by what reaches it from the pruned blocks before it, and its weights change only when all of them
are solved.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from secateur.blockwise.finding import experts_owners, is_expert, left_alone_within
from secateur.blockwise.products import AllMetError, Piece, Products, Statistics, Tokens, encoder_states, silenced
from secateur.blockwise.replay import RUNS_AGAIN, LostOutputError, Replay
from secateur.criteria import magnitude
from secateur.patterns import Pattern, word_of
from secateur.solvers import from_criterion
from secateur.support import mapped, track
from secateur.targets import identity_of, matched

__all__ = [
    "Job",
    "Layer",
    "Solve",
    "Solved",
    "Weights",
    "block_of",
    "choose_targets",
    "complete",
    "find_next",
    "observe",
    "prepared",
    "rank_and_world",
    "store",
    "walk",
]

Solve = Callable[..., tuple[Tensor, Tensor]]
NOT_A_PRODUCT = "not a matrix that inputs are multiplied with"
NEVER_RUN = "in a block that the batches never ran"
DOES_NOT_FIT = "of a shape that does not fit the pattern"


@dataclass(frozen=True)
class Layer:
    """What became of one weight.

    ``error`` is ``‖X(W' - W)ᵀ‖² / ‖XWᵀ‖²``, the squared relative error of its outputs on the inputs that reach it in
    the pruned model; None where no token did, or where the outputs were all 0 and no longer are. ``tokens`` counts
    those inputs; ``without_tokens`` are the experts that none were sent to, which were pruned by magnitude.
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


class Solved(NamedTuple):
    """A weight's new values and its mask, True = kept, both of its shape."""

    values: Tensor
    mask: Tensor


class Weights(Protocol):
    """Where a model's weights are: in the model, or in files, of which one block at a time is read into it."""

    def load(self, block: str, *, finished: bool) -> None:
        """The block's weights are there; those of a finished block are the pruned ones."""

    def unload(self, block: str) -> None:
        """They need not be there any more."""

    def arrive(self, module: nn.Module) -> None:
        """A module outside the blocks is about to run."""

    def commit(self, block: str, new: Mapping[str, Solved], layers: Sequence[Layer]) -> None:
        """The new weights by their names in the block; afterwards the block counts as finished."""


@dataclass
class Job:
    """What is asked of every block."""

    solver: Solve
    pattern: Pattern
    sparsities: Mapping[str, float | None]  # of the targets, by full name
    words: tuple[str, ...]
    on_layer: Callable[[Layer], None] | None = None
    layers: list[Layer] = field(default_factory=list)
    left_alone: dict[str, list[str]] = field(default_factory=dict)


def rank_and_world() -> tuple[int, int]:
    """(this process, how many there are)."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


@contextlib.contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """For replaying: evaluation mode, no key/value caches (a second run of a block would attend to its first), and
    experts one after the other, so that each one's product is seen. The fused attention of nn.TransformerEncoder reads
    the weights of its layers without running them, and is off."""
    model.eval()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
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
        torch.backends.mha.set_fastpath_enabled(fast)
        for config, key, value in changed:
            setattr(config, key, value)


def choose_targets(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    include: str | Iterable[str] | None,
    exclude: str | Iterable[str] | None,
) -> tuple[dict[str, nn.Parameter], dict[str, list[str]]]:
    """``{full name: parameter}`` of the matrices inside blocks that may be pruned, and ``{reason: names}`` of the rest.

    Raises:
        ValueError: a glob matches nothing, asks for what lies outside the blocks, or nothing is left.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    included, excluded = matched(include, names), matched(exclude, names) or set()
    holders: dict[Any, set[str]] = {}
    for name, parameter in names.items():
        holders.setdefault(identity_of(parameter), set()).add(block_of(name, blocks))
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
        block = block_of(name, blocks)
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


def block_of(name: str, blocks: Mapping[str, nn.Module]) -> str:
    """The block that a parameter is in, or "".

    >>> block_of("layers.1.fc.weight", {"layers.1": nn.Identity()})
    'layers.1'
    """
    parts = name.split(".")
    for count in range(1, len(parts)):
        if (path := ".".join(parts[:count])) in blocks:
            return path
    return ""


def walk(replay: Replay, weights: Weights, batches: Sequence[Any], job: Job, *, already: Sequence[str] = ()) -> None:
    """Prunes block after block in the order in which the model runs them; those ``already`` pruned are only run."""
    for name in track(already, "running finished blocks"):
        _pass_through(replay, weights, batches, name)
    left = len(replay.blocks) - len(already)
    for _ in track(range(left), "pruning blocks"):
        try:
            pruned = _next(replay, weights, batches, job)
        except LostOutputError:
            # an output of long ago is needed after all: the finished blocks are run again, and all outputs kept
            done = list(replay.done)
            replay.restart(keep_all=True)
            for name in done:
                _pass_through(replay, weights, batches, name)
            pruned = _next(replay, weights, batches, job)
        if pruned is None:
            break
    never = [name for name in replay.blocks if name not in replay.done]
    for full in job.sparsities:
        if block_of(full, replay.blocks) in never:
            job.left_alone.setdefault(NEVER_RUN, []).append(full)
    if not job.layers and not already:
        if misfits := job.left_alone.get(DOES_NOT_FIT):
            raise ValueError(
                f"nothing was pruned: no weight fits {word_of(job.pattern)}, such as {misfits[0]} of shape "
                f"{tuple(replay.model.get_parameter(misfits[0]).shape)}; choose another pattern."
            )
        raise ValueError("nothing was pruned: the batches ran none of the blocks, or no product with their weights.")


def _pass_through(replay: Replay, weights: Weights, batches: Sequence[Any], name: str) -> None:
    weights.load(name, finished=True)
    store(replay, batches, name)
    weights.unload(name)


def find_next(replay: Replay, batches: Sequence[Any]) -> str | None:
    """The block that the model runs next, or None where it comes to its end."""
    return replay.run(0, batches[0], lambda *_: None)


def _next(replay: Replay, weights: Weights, batches: Sequence[Any], job: Job) -> str | None:
    """Prunes the block that the model runs next; returns its name, or None where there is none."""
    name = find_next(replay, batches)
    if name is None:
        return None
    block = replay.blocks[name]
    weights.load(name, finished=False)
    parameters = dict(block.named_parameters())
    wanted = {local: p for local, p in parameters.items() if f"{name}.{local}" in job.sparsities}
    if wanted:
        found = observe(replay, batches, name, wanted, job.words)
        new, layers = _solve(name, block, wanted, found, job)
        del found
        weights.commit(name, new, layers)
        job.layers.extend(layers)
    else:
        weights.commit(name, {}, [])
    if len(replay.done) + 1 < len(replay.blocks):
        store(replay, batches, name)
    else:
        replay.done.append(name)  # no block is left to run on what this one returns
    weights.unload(name)
    return name


def observe(
    replay: Replay, batches: Sequence[Any], name: str, wanted: Mapping[str, Tensor], words: Iterable[str]
) -> dict[Piece, Statistics]:
    """The sums of what meets the block's weights when the batches are run up to it and through it.

    Raises:
        ValueError: a batch does not run the block, the model runs it more than once, or a sum is not finite.
    """
    block = replay.blocks[name]
    products = Products(wanted, frozenset(words))
    tokens, first = Tokens(), None

    def watch(reached: str, args: Any, kwargs: Any, call: Callable[[], Any]) -> None:
        nonlocal first
        if reached != name:
            return
        masks = tokens.for_block(block, args, kwargs, batch)
        states = encoder_states(block, args, kwargs)
        # what a block returns is asked for once; the last product of the other passes need not be computed
        with contextlib.suppress(AllMetError), contextlib.ExitStack() as stack:
            for owner in owners:
                stack.callback(owner.register_forward_pre_hook(silenced(masks.own), with_kwargs=True).remove)
            stack.enter_context(products.watching(masks, states, stops=number > 0))
            output = call()
            if number == 0:
                first = mapped(output, lambda tensor: tensor.detach().clone())

    owners = experts_owners(block)
    for number, batch in enumerate(track(batches, f"calibrating {name}")):
        tokens = Tokens.of(batch)
        if replay.run(number, batch, watch) != name:
            raise ValueError(
                f"batch {number} does not run {name}, which the first batch runs; pass batches of one kind."
            )
    if replay.is_run_again(name, batches[0], first):
        raise ValueError(RUNS_AGAIN.format(name=name))
    found = reduced(products)
    for sums in {id(sums): sums for sums in found.values()}.values():
        sums.finish()
    for piece, sums in found.items():
        if not sums.is_finite():
            for local, weight in wanted.items():  # which may be why
                if not bool(weight.isfinite().all()):
                    shape = tuple(weight.shape)
                    raise ValueError(
                        f"{name}.{local}: the weight of shape {shape} has entries that are NaN or infinite."
                    )
            raise ValueError(
                f"{name}.{piece.name}: what it is multiplied with holds NaN or infinity, or squares beyond float64; "
                "look at the batches, at the model's configuration (config.json) and its weights, or run the model in "
                "a wider dtype (float16 overflows where bfloat16 does not)."
            )
    return found


def store(replay: Replay, batches: Sequence[Any], name: str) -> None:
    """Runs a block with the weights that it has now, and stores what it returns; it is finished then."""
    replay.store(name, track(batches, f"running {name}"))


def _solve(
    block: str, module: nn.Module, wanted: Mapping[str, Tensor], found: Mapping[Piece, Statistics], job: Job
) -> tuple[dict[str, Solved], list[Layer]]:
    """New values of the block's weights, none written yet, and what there is to say about each."""
    new: dict[str, Solved] = {}
    layers: list[Layer] = []
    rank, world = rank_and_world()
    for local, parameter in wanted.items():
        full = f"{block}.{local}"
        pieces = complete(sorted(piece for piece in found if piece.name == local), parameter)
        if not pieces and is_expert(local) and isinstance(module.get_submodule(local.rpartition(".")[0]), nn.Linear):
            strides = parameter.stride(0), parameter.stride(1)
            pieces = [Piece(local, 0, (parameter.shape[0], parameter.shape[1]), strides)]  # an expert without tokens
        if not pieces:
            job.left_alone.setdefault(NOT_A_PRODUCT, []).append(full)
            continue
        try:
            job.pattern.pool(torch.empty(pieces[0].shape, device="meta"))
        except ValueError:
            job.left_alone.setdefault(DOES_NOT_FIT, []).append(full)
            continue
        solved = Solved(parameter.detach().clone(), torch.ones_like(parameter, dtype=torch.bool))
        owner = len(layers) % world  # each process solves its share
        layer: Layer | Exception | None = None
        if owner == rank:
            try:
                layer = _solve_pieces(full, block, parameter, solved, pieces, found, job)
            except (ValueError, TypeError, RuntimeError) as error:
                if world == 1:
                    raise
                layer = error
        layer = _handed_out(layer, solved, owner)
        layers.append(layer)
        new[local] = solved
        if job.on_layer is not None:
            job.on_layer(layer)
    return new, layers


def _handed_out(layer: Any, solved: Solved, owner: int) -> Layer:
    """What one process solved, on all of them; an error of one is raised on all."""
    if rank_and_world()[1] > 1:
        from torch import distributed

        said = [layer]
        distributed.broadcast_object_list(said, src=owner)
        layer = said[0]
        if not isinstance(layer, Exception):
            distributed.broadcast(solved.values, src=owner)
            distributed.broadcast(solved.mask.view(torch.uint8), src=owner)
    if isinstance(layer, Exception):
        raise layer
    assert isinstance(layer, Layer)
    return layer


def _solve_pieces(
    full: str,
    block: str,
    parameter: Tensor,
    solved: Solved,
    pieces: Sequence[Piece],
    found: Mapping[Piece, Statistics],
    job: Job,
) -> Layer:
    started = time.monotonic()
    removed = lost = whole = 0.0
    tokens, unseen, said = 0, [], []
    for number, piece in enumerate(pieces):
        # a copy: outputs first in memory, whatever the layout, and a solver of somebody's own may write into it
        matrix = piece.of(parameter).clone(memory_format=torch.contiguous_format)
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
        if not bool(new.isfinite().all()):
            raise ValueError(f"{full}: the solver's new weight of shape {tuple(new.shape)} holds NaN or infinity.")
        said += [str(warning.message) for warning in caught]
        if sums is not None:
            parts = sums.error(matrix, new)
            lost, whole = lost + parts[0], whole + parts[1]
        removed += mask.numel() - int(mask.sum())
        piece.of(solved.values).copy_(new)
        piece.of(solved.mask).copy_(mask)
    relative = lost / whole if whole > 0 else 0.0 if tokens and not lost > 0 else None
    if tokens and relative is None:
        said.append("its outputs were all 0 and no longer are; no error relates to that.")
    return Layer(
        full,
        block,
        tuple(parameter.shape),
        removed / parameter.numel(),
        relative,
        tokens,
        time.monotonic() - started,
        tuple(unseen) if len(pieces) > 1 else (),
        tuple(dict.fromkeys(said)),
    )


def complete(pieces: Sequence[Piece], parameter: Tensor) -> list[Piece]:
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
    if rank_and_world()[1] == 1:
        return products.found()
    from torch import distributed

    like = next(iter(products.parameters.values()))[1]
    everyone: list[Any] = [None] * rank_and_world()[1]
    distributed.all_gather_object(everyone, {piece: products.shared.get(piece, piece) for piece in products.found()})
    leaders: dict[Piece, Piece] = {}
    for piece, leader in ((piece, leader) for other in everyone for piece, leader in other.items()):
        # where processes do not agree on whose inputs are whose, the piece has sums of its own
        leaders[piece] = leader if leaders.get(piece, leader) == leader else piece
    total: dict[Piece, Statistics] = {}
    for leader in sorted({*leaders.values()}):
        sums = products.found().get(leader)
        sums = Statistics(products.words, leader.shape[1]) if sums is None else copy.copy(sums)
        sums.add_over_ranks(like)
        total[leader] = sums
    return {piece: total[leader] for piece, leader in sorted(leaders.items())}
