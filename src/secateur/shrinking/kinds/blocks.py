"""Blocks of a directory's model that can leave whole, and the configuration that says so. How far the outputs of a
directory's model move without some of its blocks, on real inputs; which blocks to remove. Repair after blocks left a
directory: a weight before them is fitted to what they added to the residual stream.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.models import (
    InFiles,
    LostOutputError,
    Outputs,
    Tokens,
    added_to,
    divergence,
    find_blocks,
    full_name,
    in_place,
    watched,
)
from secateur.shrinking.apply import Place, fields_in, integer_fields
from secateur.shrinking.configuration import Described, same_constants
from secateur.shrinking.directory import PROVED
from secateur.shrinking.kinds.branches import few_batches
from secateur.shrinking.kinds.patching import LinearSite, LinearSites, add_batch, as_rows, new_values, solver_of
from secateur.shrinking.proof import difference, outputs, probe_of
from secateur.shrinking.repair import free_in
from secateur.support import mapped, moved, tensors_in, track

# ---- Blocks of a directory's model that can leave whole, and the configuration that says so.
#
# Law: which fields count a stack's blocks is learnt by building the model with one less, never by their names. A
# model of the new configuration, with the blocks that stay in their order, computes what the original does when the
# other blocks return their inputs: proved on random weights in float64, on a narrow model of the class with as many
# blocks.

_NARROW = 16  # fields are not made smaller than this for a proof
_Sizes = dict[str, torch.Size]


@dataclass(frozen=True)
class Stack:
    """Blocks that a model runs one after the other.

    Attributes:
        name: the path of the list that they are in.
        blocks: their paths.
        place: the field of the configuration that counts them.
        lists: fields that have an entry for each of them.
    """

    name: str
    blocks: tuple[str, ...]
    place: Place
    lists: tuple[Place, ...]

    def stay(self, gone: Collection[str]) -> list[int]:
        """The numbers of the blocks that stay."""
        return [number for number, block in enumerate(self.blocks) if block not in gone]

    def fields(self, described: Described, gone: Collection[str]) -> dict[Place, Any]:
        """What the configuration says without some blocks."""
        stay = self.stay(gone)
        if len(stay) == len(self.blocks):
            return {}
        return {
            self.place: len(stay),
            **{place: [described.value(place)[number] for number in stay] for place in self.lists},
        }


def stacks_of(model: nn.Module, described: Described) -> list[Stack]:
    """The stacks of which a configuration can count fewer blocks.

    Raises:
        ValueError: there is none.
    """
    numbers: dict[str, list[int]] = {}
    for path in find_blocks(model):
        stack, _, number = path.rpartition(".")
        if number.isdecimal():
            numbers.setdefault(stack, []).append(int(number))
    found = []
    for stack, its in numbers.items():
        if len(its) > 1 and sorted(its) == list(range(len(its))):
            counted = _counted(model, described, stack, len(its))
            if counted is not None:
                found.append(Stack(stack, tuple(f"{stack}.{number}" for number in range(len(its))), *counted))
    if not found:
        raise ValueError(
            f"no field of the configuration of {type(model).__name__} counts its blocks, so none can leave."
        )
    return found


def _counted(model: nn.Module, described: Described, stack: str, count: int) -> tuple[Place, tuple[Place, ...]] | None:
    """The field that counts the blocks of a stack, and those that have an entry for each."""
    last = f"{stack}.{count - 1}."
    wanted = {name: size for name, size in _sizes(model).items() if not name.startswith(last)}
    known = list(fields_in(described.config, described.values))
    every = tuple(place for place, value in known if isinstance(value, list | tuple) and len(value) == count)
    for place, value in integer_fields(described.config, described.values):
        if value != count:
            continue
        for lists in dict.fromkeys((every, ())):
            changes = {place: count - 1, **{each: list(described.value(each))[:-1] for each in lists}}
            with contextlib.suppress(Exception):  # whatever a model raises for values that do not fit each other
                if _sizes(described.build(changes)) == wanted:
                    return place, lists
    return None


def _sizes(model: nn.Module) -> _Sizes:
    return {name: tensor.shape for name, tensor in model.named_parameters()}


def renamed(name: str, stacks: Sequence[Stack], gone: Collection[str], prefix: str = "") -> str | None:
    """What a tensor is called when blocks left; None where it left with one. In files the prefix of the base model may
    be there or not.

    >>> stack = Stack("model.layers", ("model.layers.0", "model.layers.1"), ("num_hidden_layers",), ())
    >>> names = ("layers.1.mlp.weight", "model.layers.0.mlp.weight", "model.norm.weight")
    >>> [renamed(name, [stack], {"model.layers.0"}, "model.") for name in names]
    ['layers.0.mlp.weight', None, 'model.norm.weight']
    """
    for stack in stacks:
        paths = {stack.name, prefix + stack.name, stack.name.removeprefix(prefix)}
        found = re.match(rf"({'|'.join(map(re.escape, paths))})\.(\d+)\.", name)
        if found is not None and int(found[2]) < len(stack.blocks):
            stay = stack.stay(gone)
            if int(found[2]) not in stay:
                return None
            return f"{found[1]}.{stay.index(int(found[2]))}.{name[found.end() :]}"
    return name


def passed_on(args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    """The outputs of a block that adds nothing: the residual stream that it was given, in the place of its own.

    Raises:
        ValueError: it returns another shape.
    """
    given = next((each for each in tensors_in((args, dict(kwargs))) if each.is_floating_point()), None)
    first = next(tensors_in(output), None)
    if given is None or first is None or given.shape != first.shape:
        raise ValueError("a block returns another shape than it is given, so what leaves with it cannot be passed on.")
    return mapped(output, lambda tensor: given if tensor is first else tensor)


@contextlib.contextmanager
def passing(model: nn.Module, gone: Collection[str]) -> Iterator[None]:
    """A context in which these blocks return the stream that they are given."""

    def called(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return passed_on(args, kwargs, forward(*args, **kwargs))

    blocks = [model.get_submodule(path) for path in gone]
    before = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = functools.partial(called, block.forward)
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


# ---- the proof ------------------------------------------------------------------------------------------------------


def narrowed(described: Described, stacks: Sequence[Stack], most: int = PROVED) -> dict[Place, Any]:
    """Fields of a model of the class that has as many blocks, and at most so many parameters.

    Raises:
        ValueError: none was found.
    """
    deep = {place for stack in stacks for place in (stack.place, *stack.lists)}
    shallow: dict[Place, Any] = {}
    for stack in stacks:  # to look for sizes, two blocks are enough
        shallow |= stack.fields(described, stack.blocks[2:])

    def count(changes: Mapping[Place, Any]) -> float | None:
        try:
            built = described.build({**changes, **shallow})
        except Exception:  # whatever a configuration or a model raises for values that do not fit each other
            return None
        total = float(sum(each.numel() for each in built.parameters()))
        for stack in stacks:
            here = sum(each.numel() for path in stack.blocks[:2] for each in built.get_submodule(path).parameters())
            total += here * (len(stack.blocks) - 2) / 2
        return total

    found: dict[Place, Any] = {}
    now = count(found)
    while now is None or now > most:
        before = now
        for place, value in track(list(integer_fields(described.config, described.values)), "making a narrow one"):
            value = found.get(place, value)
            if place in deep or value < 2 * _NARROW or value % 2:
                continue
            left = count({**found, place: value // 2})
            if left is not None and (now is None or left < now):
                found[place], now = value // 2, left
        if now == before:
            raise ValueError("no narrow model of this class was found to prove it on.")
    return found


def prove_without(
    described: Described,
    stacks: Sequence[Stack],
    gone: Collection[str],
    example_inputs: Any,
    small: Mapping[Place, Any],
) -> str | None:
    """What differs, in words, between a model whose blocks pass on what they are given and one that is built without
    them; None where nothing does."""
    fields: dict[Place, Any] = {}
    for stack in stacks:
        fields |= stack.fields(described, gone)
    probe = probe_of(described.build(small, "cpu"))
    try:
        built = described.build({**small, **fields}, "cpu").double()
        state: dict[str, Tensor] = {}
        for name, tensor in probe.state_dict().items():
            new = renamed(name, stacks, gone)
            if new is not None:
                state[new] = tensor
        built.load_state_dict(state)
        same_constants(probe, built)
        for training in (False, True):
            with passing(probe, gone):
                expected = outputs(probe, example_inputs, training=training)
            words = difference(expected, outputs(built, example_inputs, training=training))
            if words is not None:
                return words
            if gone and difference(expected, outputs(probe, example_inputs, training=training)) is None:
                return "it computes the same with the blocks as without, so nothing can be compared"
    except Exception as error:  # whatever the model raises
        return f"it raises {type(error).__name__}: {error}"
    return None


# How far the outputs of a directory's model move without some of its blocks, on real inputs; which blocks to remove.
#
# Law: of the weights one block is in memory, and a pass reads each once, whatever the number of blocks that are
# tried: what is behind a block is run for it and once more without it. Blocks leave one by one, each the one without
# which the outputs move least, the others being gone, as branches in `secateur.shrinking.kinds.branches`.

_AT_ONCE = 4  # blocks that are tried in one pass, when not all are

Costs = Callable[[Collection[str], Collection[str]], Mapping[str | None, float]]


class DepthCosts:
    """Divergences from the outputs of the whole model; see `secateur.models.divergence`.

    Args:
        place: the model whose weights lie in files.
        batches: of which the first are used, as many as make a thousand rows of outputs.
    """

    def __init__(self, place: InFiles, batches: Sequence[Any]) -> None:
        self.place = place
        self.held: Sequence[Any] = few_batches(batches)
        self.dense: list[Any] = []
        self(())  # the whole model's outputs

    def __call__(
        self, gone: Collection[str], more: Collection[str] = (), *, written: bool = False
    ) -> dict[str | None, float]:
        """The divergence without the blocks that are ``gone``, under None, and without each of ``more`` as well.

        Args:
            written: the weights are those of the copy that is written.
        """
        try:
            return self._run(gone, more, written=written, keep_all=False)
        except LostOutputError:  # a block is given what one long before it gave
            return self._run(gone, more, written=written, keep_all=True)

    def _run(
        self, gone: Collection[str], more: Collection[str], *, written: bool, keep_all: bool
    ) -> dict[str | None, float]:
        count, last = len(self.held), list[Any]()
        held = [moved(each, self.place.device) for each in self.held]
        first: dict[str | None, int] = {None: 0}  # the numbers of the runs without a block begin there

        def kept(model: Any, batch: Any) -> Any:
            last[:] = [forward(model, batch)]
            return last[0]

        with self.place.replaying(dense=False) as replay:
            forward = self.place.forward
            replay.how, replay.keep_all = kept, keep_all
            files = self.place.files
            for _ in track(range(len(self.place.blocks)), "running without blocks"):
                name = replay.run(0, held[0], lambda *_: None)
                if name is None:
                    break
                files.load(name, finished=written)

                def store(
                    name: str,
                    args: Any,
                    kwargs: Any,
                    call: Callable[[], Any],
                ) -> None:
                    output = call()
                    less = passed_on(args, kwargs, output) if name in gone or name in more else None
                    replay.keep(name, less if name in gone else output)
                    if name in more and replay.at < count:
                        replay.fork(name, first[name] + replay.at, less)

                known = list(first.values())
                if name in more:
                    first[name] = count * len(first)
                for start in known:
                    for number, batch in enumerate(held):
                        replay.run(start + number, batch, store)
                        replay.drop_unneeded(name, start + number, batch)
                replay.done.append(name)
                if name in more:
                    for number, batch in enumerate(held):
                        replay.drop_unneeded(name, first[name] + number, batch)
                files.unload(name)
            found: dict[str | None, float] = {}
            for which, start in first.items():
                total, rows = 0.0, 0
                for number, batch in enumerate(held):
                    replay.run(start + number, batch, lambda *_: None)
                    if len(self.dense) < count:
                        self.dense.append(last[0])
                    lost, counted = divergence(self.dense[number], last[0], Tokens.of(batch).own)
                    total, rows = total + lost, rows + counted
                found[which] = total / rows if rows and math.isfinite(total) else math.inf
        return found


def least(
    costs: Costs, candidates: Sequence[str], target: int, stacks: Mapping[str, Collection[str]]
) -> tuple[list[str], float]:
    """A set of ``target`` candidates whose removal moves the outputs little, fewer where there are no more; and the
        divergence. One block of each stack stays.

    A cost that was measured with fewer blocks gone counts as a lower bound, so that few are measured again.

    >>> price = {"a": 3.0, "b": 1.0, "c": 2.0}
    >>> def costs(gone, more):
    ...     base = sum(price[each] for each in gone)
    ...     return {None: base} | {each: base + price[each] for each in more}
    >>> least(costs, list(price), 2, {"h": "abc"})
    (['b', 'c'], 3.0)
    """
    gone: list[str] = []
    lost, known = 0.0, dict.fromkeys(candidates, -math.inf)
    fresh: dict[str, int] = {}
    for _ in track(range(target), "choosing blocks"):
        last = {each for its in stacks.values() if len({*its} - {*gone}) == 1 for each in its}
        left = [each for each in candidates if each not in gone and each not in last]
        if not left:
            break
        while fresh.get(best := min(left, key=lambda each: known[each])) != len(gone):
            stale = sorted((each for each in left if fresh.get(each) != len(gone)), key=lambda each: known[each])
            found = costs(gone, stale[:_AT_ONCE] if gone else stale)
            lost = found[None]
            for each in stale:
                if each in found:
                    known[each], fresh[each] = found[each] - lost, len(gone)
        gone.append(best)
        lost += known[best]
    return gone, lost


# Repair after blocks left a directory: a weight before them is fitted to what they added to the residual stream.
#
# Law: a patch is merged into a weight that is there already, so that nothing is computed in addition; a weight is a
# place for one only if what it gives is added to what its block returns, which is tried out and not read off names.
# Of the weights one block is in memory; the source is read and the copy written, so that a repetition gives the same
# bytes.
#
# Each patch is one of `secateur.shrinking.kinds.patching`, for blocks one after the other together: the residual is
# the dense model's stream behind the last of them minus this model's stream before the first. First to last, each on
# what the patches before it give.


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


def patched_in_directory(place: InFiles, stacks: Sequence[Stack], gone: Collection[str]) -> dict[str, float]:
    """Writes patches into the copy; ``{name: share}``, the share of the squared residual that a weight recovers. Biases
    that moved with them are not named."""
    try:
        return _patched(place, seams_between(stacks, gone), gone, keep_all=False)
    except LostOutputError:  # a block is given what one long before it gave
        return _patched(place, seams_between(stacks, gone), gone, keep_all=True)


def _patched(place: InFiles, seams: Mapping[str, str], gone: Collection[str], *, keep_all: bool) -> dict[str, float]:
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
    place: InFiles, replay: Any, name: str, behind: Outputs, last: str, free: Collection[str]
) -> tuple[dict[str, Tensor], float]:
    """New values of a block's parameters, by their names in it, and the share of the squared residual that they
    recover.
    """
    block = place.blocks[name]
    found: list[LinearSite | None] = []

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
        watched = LinearSites(block, {at.weight} if at.piece else set(), tokens)
        gave: list[Tensor] = []
        watched.gave = lambda value, here: gave.append(value) if here.weight == at.weight else None
        with watched:
            output = _first(call())
        residual = behind.load(last, replay.at).to(output.device).double() - output.double()
        residual = as_rows(residual, turned=False)
        if at.piece is None:
            values, mask = gave[-1], tokens.own
            index = None if mask is None or mask.shape != values.shape[:-1] else mask.reshape(-1).to(values.device)
            rows = as_rows(values, turned=False)
            inputs = iter([rows if index is None else rows[index]])
        else:
            each, index = watched.last[at.piece]
            inputs = each.rows()
        add_batch(solver, inputs, residual if index is None else residual[index], replay.at, count)

    for number, batch in enumerate(place.batches):
        replay.run(number, batch, add)
    return new_values(at, weight, solver)


def place_in(block: nn.Module, own: Collection[str], run: Callable[[], Tensor]) -> LinearSite | None:
    """The last parameter of a block whose effect is added to the block's output unchanged: a matrix by its product,
    scales by their outputs. None where there is none.

    Args:
        block: with its weights.
        own: the parameters that nothing else holds.
        run: the block as it is run.
    """
    given: list[tuple[LinearSite, Tensor]] = []

    def gave(value: Tensor, place: LinearSite) -> Tensor:
        known, passed_on = watched(value)
        given.append((place, known))
        return passed_on

    sites = LinearSites(block, {name for name in own if block.get_parameter(name).dim() == 2}, Tokens())
    sites.gave = gave
    with torch.inference_mode(False), torch.enable_grad(), sites:
        end = run()
    added = added_to(end, [known for _, known in given])
    for (place, _), is_added in reversed([*zip(given, added, strict=True)]):
        names = [name for name in (place.weight, place.bias) if name is not None]
        alone = all(name in own and sites.times[name] == 1 for name in names)
        piece = place.piece
        whole = place.bias is not None if piece is None else math.prod(piece.shape) == _size(block, place.weight)
        if is_added and alone and whole:
            return place
    return None


def _size(block: nn.Module, name: str) -> int:
    return block.get_parameter(name).numel()


def _first(output: Any) -> Tensor:
    return next(iter(tensors_in(output)))
