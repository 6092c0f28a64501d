"""Blocks of a directory's model that can leave whole, and the configuration that says so. How far the outputs of a
directory's model move without some of its blocks, on real inputs; which blocks to remove. Repair after blocks left a
directory: a weight before them is fitted to what they added to the residual stream.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.models import (
    ROWS,
    InFiles,
    Outputs,
    Replay,
    Tokens,
    added_to,
    divergence,
    find_blocks,
    full_name,
    mean_of,
    run_through,
    watched,
)
from secateur.shrinking.apply import Place, fields_in, integer_fields
from secateur.shrinking.configuration import PROVED, Described, halved, same_constants
from secateur.shrinking.kinds.patching import LinearSite, LinearSites, as_rows, fitted, given_to
from secateur.shrinking.proof import difference, outputs, probe_of
from secateur.shrinking.repair import free_in
from secateur.support import mapped, running_as, share_of, tensors_in, track

# ---- Blocks of a directory's model that can leave whole, and the configuration that says so.
#
# Law: which fields count a stack's blocks is learnt by building the model with one less, never by their names. A
# model of the new configuration, with the blocks that stay in their order, computes what the original does when the
# other blocks return their inputs: proved on random weights in float64, on a narrow model of the class with as many
# blocks.

_Sizes = dict[str, torch.Size]


@dataclass(frozen=True)
class Stack:
    """Blocks that a model runs one after the other.

    Attributes:
        name: the path of the list that they are in.
        blocks: their paths.
        place: the field of the configuration that counts them.
        lists: fields that have an entry for each of them.
        follows: whether what the configuration's class makes of the count has to follow it.
    """

    name: str
    blocks: tuple[str, ...]
    place: Place
    lists: tuple[Place, ...]
    follows: bool = False

    def stay(self, gone: Collection[str]) -> list[int]:
        """The numbers of the blocks that stay."""
        return [number for number, block in enumerate(self.blocks) if block not in gone]

    def fields(self, described: Described, gone: Collection[str]) -> dict[Place, Any]:
        """What the configuration says without some blocks."""
        stay = self.stay(gone)
        if len(stay) == len(self.blocks):
            return {}
        return {
            **(_following(described, self.place, len(stay)) if self.follows else {}),
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


def _counted(
    model: nn.Module, described: Described, stack: str, count: int
) -> tuple[Place, tuple[Place, ...], bool] | None:
    """The field that counts the blocks of a stack, those that have an entry for each, and whether others follow it."""
    last = f"{stack}.{count - 1}."
    wanted = {name: size for name, size in _sizes(model).items() if not name.startswith(last)}
    known = list(fields_in(described.config, described.values))
    every = tuple(place for place, value in known if isinstance(value, list | tuple) and len(value) == count)
    for place, value in integer_fields(described.config, described.values):
        if value != count:
            continue
        following = _following(described, place, count - 1)
        for lists, follows in itertools.product(dict.fromkeys((every, ())), (False, True) if following else (False,)):
            changes = {**(following if follows else {}), place: count - 1}
            changes |= {each: list(described.value(each))[:-1] for each in lists}
            with contextlib.suppress(Exception):  # whatever a model raises for values that do not fit each other
                if _sizes(described.build(changes)) == wanted:
                    return place, lists, follows
    return None


def _following(described: Described, place: Place, count: int) -> dict[Place, Any]:
    """What the configuration's class itself makes of another count, such as the name of each stage, where it was made
    of the one before."""
    if len(place) > 1:
        return {}
    kind: Any = type(described.config)
    try:
        before, after = (kind(**{str(place[0]): number}).to_dict() for number in (described.value(place), count))
    except Exception:  # it wants more than a count
        return {}
    return {
        (key,): value
        for key, value in after.items()
        if (key,) != place and before.get(key) != value and described.values.get(key) == before.get(key)
    }


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


def passed_on(args: Any, kwargs: Mapping[str, Any], output: Any, gate: Tensor | None = None) -> Any:
    """The outputs of a block that adds nothing: the residual stream that it was given, in the place of its own. With a
    gate, of any shape that broadcasts, what it adds times that: with 1 its own bit for bit, with 0 what it was given.

    Raises:
        ValueError: it returns another shape.
    """
    given = next((each for each in tensors_in((args, dict(kwargs))) if each.is_floating_point()), None)
    first = next(tensors_in(output), None)
    if given is None or first is None or given.shape != first.shape:
        raise ValueError("a block returns another shape than it is given, so what leaves with it cannot be passed on.")
    stream = given if gate is None else given.lerp(first, gate.to(first))
    return mapped(output, lambda tensor: stream if tensor is first else tensor)


@contextlib.contextmanager
def passing(
    model: nn.Module, gone: Collection[str], instead: Callable[[str, Any, Any, Any], Any] | None = None
) -> Iterator[None]:
    """A context in which these blocks return the stream that they are given; or what ``instead`` gives for a block's
    name, its arguments and its output.
    """

    def called(path: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return passed_on(args, kwargs, output) if instead is None else instead(path, args, kwargs, output)

    blocks = {path: model.get_submodule(path) for path in gone}
    with running_as({block: functools.partial(called, path, block.forward) for path, block in blocks.items()}):
        yield


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

    def fields() -> Iterator[tuple[Place, int]]:
        for place, value in track(list(integer_fields(described.config, described.values)), "making a narrow one"):
            if place not in deep:
                yield place, found.get(place, value)

    if not halved(count, fields, found, count(found), most):
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


# ---- How far the outputs of a directory's model move without some of its blocks, on real inputs.
#
# Law: of the weights one block is in memory, and a pass reads each once, whatever the number of blocks that are
# tried: what is behind a block is run for it and once more without it.

AT_ONCE = 4  # blocks that are tried in one pass, when not all are
_BATCHES = 4  # at most


def few_batches(batches: Sequence[Any]) -> list[Any]:
    """The first batches, until they hold a thousand tokens, or examples."""
    held: list[Any] = []
    rows = 0
    for batch in batches[:_BATCHES]:
        tensors = [each for each in tensors_in(batch) if each.dim()]
        ids = [each.numel() for each in tensors if each.dim() > 1 and not each.is_floating_point()]
        count = max(ids or [each.shape[0] for each in tensors], default=0)
        held.append(share_of(batch, (ROWS - rows) / count) if count > ROWS - rows else batch)
        rows += count
        if rows >= ROWS:
            break
    return held


class DepthCosts:
    """Divergences from the outputs of the whole model; see `secateur.models.divergence`.

    Args:
        place: the model whose weights lie in files.
        batches: of which the first are used, as many as make a thousand rows of outputs.
    """

    def __init__(self, place: InFiles, batches: Sequence[Any]) -> None:
        self.place = place.over(few_batches(batches))
        self.dense: dict[int, Any] = {}
        self(())  # the whole model's outputs

    def __call__(
        self, gone: Collection[str], more: Collection[str] = (), *, written: bool = False
    ) -> dict[str | None, float]:
        """The divergence without the blocks that are ``gone``, under None, and without each of ``more`` as well.

        Args:
            written: the weights are those of the copy that is written.
        """
        place, tried = self.place, list[str]()
        count, lost = len(place.batches), dict[int, tuple[float, int]]()
        is_first = not self.dense

        def tries(name: str, args: Any, kwargs: Any, output: Any) -> Any:
            """Of each batch there is a run more from here on, without the block."""
            if replay.at < count and name not in tried:
                replay.fork(name, count * (1 + len(tried)) + replay.at, passed_on(args, kwargs, output))
            is_without = replay.at >= count and tried[replay.at // count - 1] == name
            return passed_on(args, kwargs, output) if is_without else output

        def compared(model: nn.Module, batch: Any) -> Any:
            outputs = place.forward(model, batch)  # which comes to its end in the last run of a batch
            if is_first:
                self.dense[replay.at] = outputs
            lost[replay.at] = divergence(self.dense[replay.at % count], outputs, Tokens.of(batch).own)
            return outputs

        with (
            passing(place.model, gone),
            passing(place.model, more, tries),
            place.running(written=written) as (replay, blocks),
        ):
            replay.how = compared
            for name in blocks:
                if name in more:
                    tried.append(name)
                    replay.batches = [*replay.batches, *place.batches]
        runs = [[lost[count * at + number] for number in range(count)] for at in range(1 + len(tried))]
        return {name: mean_of(its) for name, its in zip([None, *tried], runs, strict=True)}


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
    seams = seams_between(stacks, gone)
    found: dict[str, float] = {}
    behind, free = Outputs(place.activations, "seams"), free_in(place.model, place.blocks)

    def fit(name: str) -> None:
        if name in seams:
            new, share = _solved(place, replay, name, behind, seams[name], free)
            found.update({full_name(name, local): share for local in new})
            place.files.write(name, new)
            place.put(name, new)

    try:
        missing, left = set(seams.values()), set(seams)
        with place.running() as (replay, blocks):
            for name in blocks if missing else ():
                if name in missing:
                    for number in range(len(place.batches)):
                        behind.save(name, number, _first(replay.outputs.load(name, number)))
                    missing.remove(name)
                if not missing:
                    break
        with passing(place.model, gone), place.replaying() as replay, torch.no_grad():
            for name in run_through(replay, visit=fit) if left else ():
                left.discard(name)
                if not left:
                    break
    finally:
        behind.clear()
    return found


def _solved(
    place: InFiles, replay: Replay, name: str, behind: Outputs, last: str, free: Collection[str]
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
    weight, bias = (None if each is None else block.get_parameter(each).detach() for each in (at.weight, at.bias))
    assert weight is not None
    return fitted(at, weight, bias, _rows(place, replay, block, at, behind, last), len(place.batches))


def _rows(
    place: InFiles, replay: Replay, block: nn.Module, at: LinearSite, behind: Outputs, last: str
) -> Iterator[tuple[Iterable[Tensor], Tensor]]:
    """Of each batch what a place in the block is given, and the residual behind it."""
    met: list[tuple[Iterable[Tensor], Tensor]] = []

    def see(_name: str, args: Any, kwargs: Any, call: Callable[[], Any]) -> None:
        batch = place.batches[replay.at]
        tokens = Tokens.of(batch).for_block(block, args, kwargs, batch)
        given: list[Tensor] = []
        inputs, index = given_to(at, block, tokens, lambda: given.append(_first(call())))
        residual = behind.load(last, replay.at).to(given[0].device).double() - given[0].double()
        residual = as_rows(residual, turned=False)
        met.append((inputs, residual if index is None else residual[index]))

    for number, batch in enumerate(place.batches):
        replay.run(number, batch, see)
        yield met.pop()


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
    for place in added_to(end, given):
        names = [name for name in (place.weight, place.bias) if name is not None]
        alone = all(name in own and sites.times[name] == 1 for name in names)
        piece = place.piece
        whole = place.bias is not None if piece is None else math.prod(piece.shape) == _size(block, place.weight)
        if alone and whole:
            return place
    return None


def _size(block: nn.Module, name: str) -> int:
    return block.get_parameter(name).numel()


def _first(output: Any) -> Tensor:
    return next(iter(tensors_in(output)))
