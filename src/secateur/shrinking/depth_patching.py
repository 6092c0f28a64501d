"""Repair after blocks left a directory: a weight before them is fitted to what they added to the residual stream.

Law: a patch is merged into a weight that is there already, so that nothing is computed in addition; a weight is a place
for one only if what it gives is added to what its block returns, which is tried out and not read off names. Of the
weights one block is in memory; the source is read and the copy written, so that a repetition gives the same bytes.

Each patch is one of `secateur.shrinking.patching`, for blocks one after the other together: the residual is
the dense model's stream behind the last of them minus this model's stream before the first. First to last, each on what
the patches before it give.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise import DirectoryWalk, LostOutputError, Outputs, Tokens, full_name, in_place
from secateur.shrinking.depth import Stack, passed_on
from secateur.shrinking.patching import add_batch, new_values, solver_of
from secateur.shrinking.repairing import free_in
from secateur.shrinking.seams import Place, Places, rows_of
from secateur.support import tensors_in, track

__all__ = ["patched_in_directory", "place_in", "seams_between"]

_LIKE = 0.99  # the cosine of what a change of a weight does with what it should do: rounding in half precision


def seams_between(stacks: Sequence[Stack], gone: Collection[str]) -> dict[str, str]:
    """``{the block before: the last of those that leave behind it}``.

    >>> stack = Stack("h", ("h.0", "h.1", "h.2", "h.3", "h.4"), ("n_layer",), ())
    >>> seams_between([stack], {"h.0", "h.2", "h.3"})
    {'h.1': 'h.3'}
    """
    found: dict[str, str] = {}
    for stack in stacks:
        before = None
        for block in stack.blocks:
            if block not in gone:
                before = block
            elif before is not None:
                found[before] = block
    return found


def patched_in_directory(place: DirectoryWalk, stacks: Sequence[Stack], gone: Collection[str]) -> dict[str, float]:
    """Writes patches into the copy; ``{name: share}``, the share of the squared residual that a weight recovers. Biases
    that moved with them are not named."""
    try:
        return _patched(place, seams_between(stacks, gone), gone, keep_all=False)
    except LostOutputError:  # a block is given what one long before it gave
        return _patched(place, seams_between(stacks, gone), gone, keep_all=True)


def _patched(
    place: DirectoryWalk, seams: Mapping[str, str], gone: Collection[str], *, keep_all: bool
) -> dict[str, float]:
    found: dict[str, float] = {}
    behind = Outputs(place.activations, "seams")
    try:
        with place.running() as (replay, blocks):
            missing = set(seams.values())
            for name in blocks if missing else ():
                if name in missing:
                    for number in range(len(place.batches)):
                        behind.save(name, number, _first(replay.outputs.load(name, number)))
                    missing.remove(name)
                if not missing:
                    break
        free = free_in(place.model, place.blocks)
        with place.replaying(dense=False) as replay:
            left, replay.keep_all = set(seams), keep_all
            for _ in track(range(len(place.blocks)), "patching"):
                following = replay.run(0, place.batches[0], lambda *_: None) if left else None
                if following is None:
                    break
                name = following
                place.files.load(name, finished=False)
                block, new = place.blocks[name], dict[str, Tensor]()
                if name in seams:
                    left.remove(name)
                    new, share = _solved(place, replay, name, behind, seams[name], free)
                    found |= dict.fromkeys(new, share)
                    place.files.put({full_name(name, local): value for local, value in new.items()})

                def store(name: str, args: Any, kwargs: Any, call: Callable[[], Any]) -> None:
                    output = call()
                    replay.keep(name, passed_on(args, kwargs, output) if name in gone else output)

                with in_place(block, new):
                    for number, batch in enumerate(place.batches):
                        replay.run(number, batch, store)
                        replay.drop_unneeded(name, number, batch)
                replay.done.append(name)
                place.files.unload(name)
                found = {full_name(name, each) if each in new else each: share for each, share in found.items()}
    finally:
        behind.clear()
    return found


def _solved(
    place: DirectoryWalk, replay: Any, name: str, behind: Outputs, last: str, free: Collection[str]
) -> tuple[dict[str, Tensor], float]:
    """New values of a block's parameters, by their names in it, and the share of the squared residual that they
    recover.
    """
    block = place.blocks[name]
    found: list[Place | None] = []

    def look(_name: str, _args: Any, _kwargs: Any, call: Callable[[], Any]) -> None:
        own = {local for local, _ in block.named_parameters() if full_name(name, local) in free}
        found.append(place_in(block, own, lambda: _first(call())))

    replay.run(0, place.batches[0], look)
    at = found[0] if found else None
    if at is None:
        return {}, 0.0
    weight = block.get_parameter(at.weight).detach()
    solver = solver_of(at, weight, None if at.bias is None else block.get_parameter(at.bias).detach())
    count = len(place.batches)

    def add(_name: str, args: Any, kwargs: Any, call: Callable[[], Any]) -> None:
        batch = place.batches[replay.at]
        tokens = Tokens.of(batch).for_block(block, args, kwargs, batch)
        watched = Places(block, {at.weight} if at.piece else set(), tokens)
        gave: list[Tensor] = []
        watched.gave = lambda value, here: gave.append(value) if here.weight == at.weight else None
        with watched:
            output = _first(call())
        lack = behind.load(last, replay.at).to(output.device).double() - output.double()
        lack = rows_of(lack, turned=False)
        if at.piece is None:
            values, mask = gave[-1], tokens.own
            index = None if mask is None or mask.shape != values.shape[:-1] else mask.reshape(-1).to(values.device)
            rows = rows_of(values, turned=False)
            inputs = iter([rows if index is None else rows[index]])
        else:
            each, index = watched.last[at.piece]
            inputs = each.rows()
        add_batch(solver, inputs, lack if index is None else lack[index], replay.at, count)

    for number, batch in enumerate(place.batches):
        replay.run(number, batch, add)
    return new_values(at, weight, solver)


def place_in(block: nn.Module, own: Collection[str], run: Callable[[], Tensor]) -> Place | None:
    """The last parameter of a block whose effect is added to the block's output unchanged: a matrix by its product,
    scales by their outputs. None where there is none.

    Args:
        block: with its weights.
        own: the parameters that nothing else holds.
        run: the block as it is run.
    """
    given: list[Place] = []
    watched = Places(block, {name for name in own if block.get_parameter(name).dim() == 2}, Tokens())
    watched.gave = lambda _value, place: given.append(place)
    with watched:
        before = run().clone()
    draw = torch.Generator().manual_seed(0)
    for place in reversed(given):
        names = [name for name in (place.weight, place.bias) if name is not None]
        if any(name not in own or watched.times[name] != 1 for name in names):
            continue
        if place.piece is not None and place.piece.shape[0] * place.piece.shape[1] != _size(block, place.weight):
            continue
        moved = place.bias if place.piece is None else place.weight
        if moved is None:
            continue
        value = block.get_parameter(moved).detach()
        spread = float(value.float().std()) if value.numel() > 1 else 0.0
        change = torch.randn(value.shape, generator=draw).to(value) * (spread or 1.0)
        with in_place(block, {moved: value + change}):
            looks = Places(block, {place.weight} if place.piece else set(), Tokens())
            with looks:
                after = run()
        wanted: Tensor
        if place.piece is None:
            wanted = change.expand(before.shape).reshape(-1, before.shape[-1])
        else:
            rows = torch.cat(list(looks.last[place.piece][0].rows()))
            wanted = rows.float() @ place.piece.of(change).float().T
        if _is_like(rows_of(after - before, turned=False), wanted):
            return place
    return None


def _is_like(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    one, other = one.double(), other.double()
    product, norms = float((one * other).sum()), float(one.norm()) * float(other.norm())
    return norms > 0 and product > _LIKE * norms and abs(float(one.norm() / other.norm()) - 1) < 1 - _LIKE


def _size(block: nn.Module, name: str) -> int:
    return block.get_parameter(name).numel()


def _first(output: Any) -> Tensor:
    return next(iter(tensors_in(output))).detach()
