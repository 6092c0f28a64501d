"""Training block by block: each part of a block is fitted to the teacher's activations, on the inputs that the
recovered blocks before it give.

Law: one block is trained at a time, and what is kept of the others is what they pass on; a part that did not come
nearer is left as it was.

After Roux et al. 2025, arXiv:2510.14444: parts that hold a nonlinearity do as well as whole blocks, and single matrices
worse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from secateur.blockwise import Replay, Tokens, Weights, block_of, find_next, full_name, with_all_outputs
from secateur.recovery.closing import DAMPINGS, Gathered, adds_up
from secateur.recovery.descent import Descent, order_of
from secateur.recovery.following import Follows
from secateur.recovery.halves import OUTPUT, Part, parts_of_block, run_to, seen_at, stream_in
from secateur.recovery.losses import rows_of
from secateur.recovery.moving import Moving, movers_for, moving, widened_batch
from secateur.support import mapped, track

__all__ = [
    "Commit",
    "Epochs",
    "LocalPart",
    "NotComparableError",
    "Side",
    "of_one_block",
    "recover_blocks",
    "share_lost",
]

STACKS_DIFFER = "the teacher's blocks are others: {ours} here, {theirs} there"
WIDTHS_DIFFER = "what {name} passes on has shape {ours} here, and {theirs} in the teacher"


class NotComparableError(Exception):
    """The blocks of the two models are not those of one stream."""


@dataclass(frozen=True)
class LocalPart:
    """The result for one part of a block: its relative squared error to the teacher's activations, before and after."""

    block: str
    part: str
    before: float
    after: float


@dataclass(frozen=True)
class Side:
    """A model that is run block by block, where its weights are, and what it is run on."""

    replay: Replay
    weights: Weights
    batches: Sequence[Any]


@dataclass(frozen=True)
class Epochs:
    """How each part is trained: how often on each batch, the highest rate, the seed."""

    count: int
    rate: float
    seed: int


class Commit(Protocol):
    """Writes a block's new values down, by their names in it, and puts them in place."""

    def __call__(self, block: str, new: Mapping[str, Tensor], said: Sequence[LocalPart], /) -> None: ...


@dataclass(frozen=True)
class _Met:
    """What one batch gives a block: arguments, which tokens are no padding, and what the teacher has at the ends."""

    args: Any
    kwargs: Any
    mask: Tensor | None
    wanted: Mapping[str, Tensor]


def of_one_block(model: nn.Module, blocks: Collection[str], trained: Collection[str]) -> set[str]:
    """Of the trained parameters those that one block holds, and nothing else: a tied one is not for a block to move."""
    holders: dict[int, set[str | None]] = {}
    names = dict(model.named_parameters(remove_duplicate=False))
    places = dict.fromkeys(blocks, model)
    for name, parameter in names.items():
        holders.setdefault(id(parameter), set()).add(block_of(name, places))
    return {name for name in trained if holders[id(names[name])] != {None} and len(holders[id(names[name])]) == 1}


def share_lost(tensor: Tensor, wanted: Tensor, mask: Tensor | None = None) -> Tensor:
    """``mean over tokens of ‖student - teacher‖² / ‖teacher‖²``: a token of large activations counts like others, as
    after the normalization that they go to.

    >>> share_lost(torch.tensor([[1.0, 0.0], [0.0, 8.0]]), torch.tensor([[1.0, 1.0], [0.0, 8.0]])).item()
    0.25
    """
    ours, theirs = (rows_of(each, mask).float() for each in (tensor, wanted.to(tensor.device)))
    sizes = theirs.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return ((ours - theirs).square().sum(-1) / sizes).mean()


def recover_blocks(
    student: Side,
    teacher: Side,
    way: Epochs,
    *,
    trained: Collection[str],
    masks_of: Callable[[str], Mapping[str, Tensor]],
    commit: Commit,
    follows: Mapping[str, Follows],
    already: Sequence[str] = (),
) -> Iterator[LocalPart]:
    """Trains block after block, in the order in which the model runs them; yields the `LocalPart` of each part.

    Args:
        student, teacher: the two models, between installed replays, and the same batches for both.
        way: how a part is trained.
        trained: names of parameters that move, each of one block.
        masks_of: what is removed of a block that is loaded, by names in it.
        commit: what is done with a block's new values.
        follows: which of the teacher's blocks each block follows.
        already: blocks that are done, and only run.

    Raises:
        NotComparableError: the two models stack other blocks, or blocks of another width.
        ValueError: a loss is not finite.
    """
    for finished in track(already, "running finished blocks"):
        for theirs in (*follows[finished].skipped, *follows[finished].blocks):
            _passed_through(teacher, theirs)
        _passed_through(student, finished)
    for number in track(range(len(already), len(student.replay.blocks)), "recovering blocks"):
        name = _next(student)
        span = Follows((), ()) if name is None else follows[name]
        for skipped in span.skipped:
            _passed_through(teacher, skipped)
        if (found := _next(teacher)) != next(iter(span.blocks), None):
            raise NotComparableError(STACKS_DIFFER.format(ours=name, theirs=found))
        if name is None:
            return
        student.weights.load(name, finished=False)
        block = student.replay.blocks[name]
        own = {local: each for local, each in block.named_parameters() if full_name(name, local) in trained}
        masks = {local: mask for local, mask in masks_of(name).items() if local in own}
        with moving(block, own, masks) as held:
            said = _recovered(student, teacher, name, span.blocks, held, way, number)
            new = held.values()
        commit(name, new, said)
        yield from said
        _store(student, name)
        student.weights.unload(name)


def _next(side: Side) -> str | None:
    return with_all_outputs(side.replay, side.weights, side.batches, lambda: find_next(side.replay, side.batches))


def _store(side: Side, name: str) -> None:
    if _is_last(side.replay):
        side.replay.done.append(name)
    else:
        with_all_outputs(side.replay, side.weights, side.batches, lambda: side.replay.store(name, side.batches))


def _is_last(replay: Replay) -> bool:
    return len(replay.done) + 1 == len(replay.blocks)


def _passed_through(side: Side, name: str) -> None:
    side.weights.load(name, finished=True)
    _store(side, name)
    side.weights.unload(name)


def _recovered(
    student: Side, teacher: Side, name: str, span: Sequence[str], held: Moving, way: Epochs, number: int
) -> list[LocalPart]:
    block, forward = student.replay.blocks[name], student.replay.forwards[name]
    given = _given(student, name)
    args, kwargs, _ = given[0]
    theirs = dict(teacher.replay.blocks[span[0]].named_modules())
    parts = [Part(OUTPUT, ())]
    if held.parameters:
        parts = parts_of_block(block, held.parameters, lambda: forward(*_copied(args), **_copied(kwargs)), theirs)
    wanted = _wanted_of_span(teacher, span, parts)
    with torch.no_grad():
        ours = run_to(block, OUTPUT, lambda: forward(*_copied(args), **_copied(kwargs)))
    parts = _comparable_parts(name, parts, ours, wanted[0])
    met = [_Met(*each, wants) for each, wants in zip(given, wanted, strict=True)]
    run = _Run(name, block, forward, met)
    return [
        run.descended(part, held, way, way.seed + 100 * number + at) for at, part in enumerate(parts) if part.parameters
    ]


def _given(side: Side, name: str) -> list[tuple[Any, Any, Tensor | None]]:
    """Of each batch what the block is given, and which tokens count; what is alike in batches is kept once."""
    found: list[tuple[Any, Any, Tensor | None]] = []
    alike: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def kept(tensor: Tensor) -> Tensor:
        key = (tensor.shape, tensor.dtype)
        if key in alike and torch.equal(alike[key], tensor):
            return alike[key]
        own = tensor.detach().clone()
        alike.setdefault(key, own)
        return own

    def catch(reached: str, args: Any, kwargs: Any, _call: Callable[[], Any]) -> None:
        if reached == name:
            masks = Tokens.of(batch).for_block(side.replay.blocks[name], args, kwargs, batch)
            found.append((mapped(args, kept), mapped(kwargs, kept), masks.own))

    for number, batch in enumerate(side.batches):
        side.replay.run(number, batch, catch)
        if len(found) <= number:
            raise ValueError(
                f"batch {number} does not run {name}, which the first batch runs; pass batches of one kind."
            )
    return found


def _wanted_of_span(side: Side, span: Sequence[str], parts: Sequence[Part]) -> list[dict[str, Tensor]]:
    """As `_wanted_of`, of several blocks of the teacher: the ends of halves of the first, the output of the last."""
    inner = [each for part in parts[:-1] for each in (part.end, part.sum)]
    output = [OUTPUT, parts[-1].sum]
    if len(span) == 1:
        return _wanted_of(side, span[0], dict.fromkeys([*inner, *output]))
    first = _wanted_of(side, span[0], dict.fromkeys(inner))
    for name in span[1:-1]:
        _passed_through(side, name)
    last = _wanted_of(side, span[-1], dict.fromkeys(output))
    return [{**one, **other} for one, other in zip(first, last, strict=True)]


def _wanted_of(side: Side, name: str, ends: Collection[str]) -> list[dict[str, Tensor]]:
    """What the teacher's block has at the ends of the parts, for each batch; the block is finished then."""
    side.weights.load(name, finished=False)
    replay, block, last = side.replay, side.replay.blocks[name], _is_last(side.replay)
    wanted: list[dict[str, Tensor]] = [{} for _ in side.batches]

    def run() -> None:
        for number, batch in enumerate(track(side.batches, f"running the teacher's {name}")):
            found = wanted[number]

            def watch(_reached: str, _args: Any, _kwargs: Any, call: Callable[[], Any], found: Any = found) -> None:
                def keep(end: str, tensor: Tensor) -> None:
                    found[end] = tensor.detach().clone()

                with seen_at(block, [end for end in ends if end != OUTPUT], keep):
                    output = call()
                if (stream := stream_in(output)) is not None:
                    found[OUTPUT] = stream.detach().clone()
                if not last:
                    replay.keep(name, output)

            replay.run(number, batch, watch)
            if not last:
                replay.drop_unneeded(name, number, batch)
        replay.done.append(name)

    with_all_outputs(replay, side.weights, side.batches, run)
    side.weights.unload(name)
    return wanted


def _comparable_parts(name: str, parts: Sequence[Part], ours: Tensor, wanted: Mapping[str, Tensor]) -> list[Part]:
    """Those whose ends the teacher has in the same shape; the others go with the next."""
    theirs = wanted.get(OUTPUT)
    if theirs is None or theirs.shape != ours.shape:
        shape = "no shape" if theirs is None else tuple(theirs.shape)
        raise NotComparableError(WIDTHS_DIFFER.format(name=name, ours=tuple(ours.shape), theirs=shape))
    found: list[Part] = []
    waiting: tuple[str, ...] = ()
    for part in parts:
        waiting += part.parameters
        if part.end in wanted and wanted[part.end].shape == ours.shape:
            there = part.sum in wanted and wanted[part.sum].shape == ours.shape
            found.append(Part(part.end, waiting, part.sum if there else part.end))
            waiting = ()
    return found


def _copied(value: Any) -> Any:
    """For one run of a block, which may write to it; as wide as its weights."""
    return mapped(value, lambda tensor: widened_batch(tensor).clone())


@dataclass(frozen=True)
class _Run:
    """A block and what it is run on."""

    name: str
    block: nn.Module
    forward: Callable[..., Any]
    met: Sequence[_Met]

    def lost(self, end: str, met: _Met) -> Tensor:
        tensor = run_to(self.block, end, lambda: self.forward(*_copied(met.args), **_copied(met.kwargs)))
        return share_lost(tensor, met.wanted[end], met.mask)

    @torch.no_grad()
    def whole(self, end: str, several: Sequence[_Met] = ()) -> float:
        """The mean share that is lost, of these or of all."""
        several = several or self.met
        return sum(float(self.lost(end, met)) for met in several) / len(several)

    def close(self, part: Part, held: Moving) -> None:
        """Least squares for the matrix that is added up where the part ends, if there is one, and if it helps where it
        was not fitted."""

        def run(met: _Met) -> Tensor:
            return run_to(self.block, part.sum, lambda: self.forward(*_copied(met.args), **_copied(met.kwargs)))

        name = adds_up(self.block, part.parameters, lambda: run(self.met[0]))
        layer = None if name is None else self.block.get_submodule(name)
        if not isinstance(layer, nn.Linear) or (layer.bias is not None and f"{name}.bias" not in part.parameters):
            return
        own = {key: held.parameters[f"{name}.{key}"] for key in ("weight", "bias") if getattr(layer, key) is not None}
        mask, gathered = held.masks.get(f"{name}.weight"), Gathered(layer)
        apart = len(self.met) // 4 or (len(self.met) > 1)  # are not summed at first, and say how much damping is best
        summed, judging = self.met[: len(self.met) - apart], self.met[len(self.met) - apart :] or self.met

        def add(several: Sequence[_Met]) -> None:
            for met in several:
                gathered.run(lambda met=met: run(met), met.wanted[part.sum], met.mask)  # type: ignore[misc]

        @torch.no_grad()
        def put(values: Mapping[str, Tensor]) -> None:
            for key, each in values.items():
                own[key].copy_(each)

        start = {key: each.detach().clone() for key, each in own.items()}
        add(summed)
        best, least = None, self.whole(part.end, judging)
        for damping in DAMPINGS:
            put(gathered.solved(mask, damping))
            found = self.whole(part.end, judging)
            put(start)
            if found < least:
                best, least = damping, found
        if best is not None:
            if apart:
                add(judging)
            put(gathered.solved(mask, best))

    def descended(self, part: Part, held: Moving, way: Epochs, seed: int) -> LocalPart:
        named = {local: held.parameters[local] for local in part.parameters}
        start = {local: each.detach().clone() for local, each in named.items()}
        before = self.whole(part.end)
        flags = {local: each.requires_grad for local, each in held.parameters.items()}
        try:
            for local, each in held.parameters.items():
                each.requires_grad_(local in named)
            self.close(part, held)
            movers = movers_for(self.block, named, held.masks)
            descent = Descent(movers, way.count * len(self.met), rate=way.rate)
            with torch.enable_grad():
                for epoch in range(way.count):
                    for at in order_of(seed, epoch, len(self.met)):
                        descent.step(self.lost(part.end, self.met[at]))
        finally:
            for local, each in held.parameters.items():
                each.requires_grad_(flags[local])
        after = self.whole(part.end)
        if not after < before:
            with torch.no_grad():
                for local, each in named.items():
                    each.copy_(start[local])
            after = before
        return LocalPart(self.name, part.end or "output", before, after)
