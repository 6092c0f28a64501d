"""Where residual branches leave a stream: the linear layer just before them, and the residual of the stream behind
them.

Law: the model is run as it is, with the terms of the branches made zero, so that sums have one number in all runs; what
is watched changes nothing. A place is one that a linear map can be merged into: a matrix whose outputs are added to the
stream, or the scales of a layer normalization that gives it. Its parameters are used there and nowhere else.

Sums, and their terms, are recognised by their memory: from the sum where a branch was added back to the
last place that reaches it through sums alone.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.blockwise import AllMetError, Inputs, Meeting, Pairs, Piece, Rows, Tokens, is_turned
from secateur.coupling import Branch, SameDraws, find_coupling
from secateur.support import Forward, private, run_batch, tensors_of

__all__ = ["Place", "Places", "Seam", "Stream", "rows_of"]

_SUMS = 2  # of a chain x + f(x) + g(x), and where the stream before it came from


@dataclass(frozen=True)
class Place:
    """What a linear map can be merged into: a product with a whole matrix, or a layer normalization.

    Attributes:
        weight: the name of its matrix, or of its scales.
        bias: what is added, if there is anything.
        piece: the matrix; None for scales.
        turned: the outputs lie in the stream with the first two dimensions the other way round.
        at: when in a run; the later, the higher.
    """

    weight: str
    bias: str | None
    piece: Piece | None
    turned: bool
    at: int


@dataclass(frozen=True)
class Seam:
    """Branches that leave one after the other, and the place before them.

    Attributes:
        place: where a patch goes.
        final: the number of the sum behind the last of them, at which the stream is compared with the dense model's.
        names: of the branches.
    """

    place: Place
    final: int
    names: tuple[str, ...]


@dataclass(eq=False)
class _Node:
    """A tensor that was seen: the result of a sum, or what a place gave."""

    tensor: Tensor
    version: int
    place: Place | None = None
    parts: tuple[_Node, ...] = ()
    zeroed: bool = False  # a sum of which a branch left

    @property
    def size(self) -> int:
        return self.tensor.numel()


@dataclass(eq=False)
class _Run:
    """One run of a batch."""

    now: dict[int, _Node] = field(default_factory=dict)
    sums: dict[int, _Node] = field(default_factory=dict)
    sides: dict[tuple[int, int], _Node] = field(default_factory=dict)  # of those that are plain sums
    count: int = 0


class _Called(nn.Module):
    """How a model is called with a batch."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model, self.call = model, forward

    def forward(self, batch: Any) -> Any:
        return run_batch(self.model, batch, self.call)


class Stream:
    """The sums of a model that loses branches, in the pass that a batch takes.

    Args:
        model: it has its branches still.
        gone: those that leave.
        batch: one like all others.
        forward: how it is run.

    Attributes:
        seams: first to last. A branch before which nothing is linear has none.
    """

    def __init__(self, model: nn.Module, gone: Sequence[Branch], batch: Any, forward: Forward | None = None) -> None:
        self.model, self.forward = model, forward
        coupling = find_coupling(_Called(model, forward), (batch,), modes=[False])
        (in_pass,) = coupling.passes
        self._every = {branch.name.removeprefix("model."): branch.terms[in_pass] for branch in coupling.branches}
        self._terms = {branch.name: self._every[branch.name] for branch in gone if branch.name in self._every}
        self._leaving = {name for branch in gone for name in branch.parameters}
        self._sums: int | None = None
        self.seams = self._found(batch)

    @contextlib.contextmanager
    def without(self) -> Iterator[None]:
        """Within, a run of the model has zeros for the terms of the branches."""
        with SameDraws(zeroed=self._zeroed):
            yield

    @property
    def _zeroed(self) -> set[tuple[int, int]]:
        return {(term.number, term.position) for term in self._terms.values()}

    def dense(self, batch: Any) -> dict[int, Tensor]:
        """The stream behind each seam, with all branches there.

        Raises:
            ValueError: the batch takes another way through the model than the first.
        """
        wanted, found = {seam.final for seam in self.seams}, dict[int, Tensor]()

        def seen(number: int, _: Sequence[Any]) -> Callable[[Tensor], None]:
            return lambda total: found.__setitem__(number, total.detach().clone()) if number in wanted else None

        with SameDraws(seen=seen) as draws:
            run_batch(self.model, batch, self.forward)
        if self._sums is None:
            self._sums = draws.sums
        if draws.sums != self._sums:
            raise ValueError(
                f"a batch takes {draws.sums} sums and the first one {self._sums}, so it takes another way through the "
                "model; pass batches of one kind, or repair=False."
            )
        return found

    def met(self, batch: Any, seam: Seam) -> tuple[Iterator[Tensor], Tensor, Tensor | None]:
        """A run without the branches, to the seam: what the place is given, in parts, or of scales what it gives; the
        stream behind the seam, as rows in this order; and which of its rows are no padding."""
        watched = Places(self.model, {seam.place.weight} if seam.place.piece else set(), Tokens.of(batch))
        stream: list[Tensor] = []
        scaled: list[Tensor] = []

        def seen(number: int, _: Sequence[Any]) -> Callable[[Tensor], None]:
            def then(total: Tensor) -> None:
                if number == seam.final:
                    stream.append(total.detach().clone())
                    raise AllMetError

            return then

        def gave(value: Tensor, place: Place) -> None:
            if place.weight == seam.place.weight and place.piece is None:
                scaled.append(value.detach().clone())

        watched.gave = gave
        with contextlib.suppress(AllMetError), watched, SameDraws(zeroed=self._zeroed, seen=seen):
            run_batch(self.model, batch, self.forward)
        if seam.place.piece is None:
            mask = Tokens.of(batch).own
            values = scaled[-1]
            index = mask.reshape(-1).to(values.device) if mask is not None and mask.shape == values.shape[:-1] else None
            every = rows_of(values, turned=False)
            return iter([every if index is None else every[index]]), rows_of(stream[0], turned=False), index
        inputs, index = watched.last[seam.place.piece]
        return inputs.rows(), rows_of(stream[0], turned=seam.place.turned), index

    def makers(self, batch: Any) -> dict[str, Place]:
        """The products whose outputs are the terms of branches, in the order in which they run. Branches whose term is
        no such product, or whose matrix is shared or used twice, have none."""
        run, watched = self._watched(batch, zeroed=(), leaving=set())
        usable = self._usable(watched, set())
        found = {
            name: node.place
            for name, term in self._every.items()
            if (node := run.sides.get((term.number, term.position))) and node.place and node.place.piece
        }
        return {name: found[name] for name in sorted(found, key=lambda each: found[each].at) if usable(found[name])}

    # -- which place is before a branch

    def _watched(self, batch: Any, *, zeroed: Iterable[tuple[int, int]], leaving: set[str]) -> tuple[_Run, Places]:
        """A run of a batch, to the end: what gave something may be used again. What leaves gives nothing."""
        run, zeroed = _Run(), set(zeroed)
        names = {name for name, each in self.model.named_parameters() if each.dim() == 2} - leaving
        watched = Places(self.model, names, Tokens.of(batch))

        def gave(value: Tensor, place: Place) -> None:
            run.count += 1
            run.now[private.memory_of(value)] = _Node(value, private.version_of(value), replace(place, at=run.count))

        def seen(number: int, sides: Sequence[Any]) -> Callable[[Tensor], None]:
            parts = tuple(_part(run, each) for each in sides)
            plain = _plain_sum(sides) if any(parts) else None

            def then(total: Tensor) -> None:
                same = plain is not None and torch.equal(plain, total)  # neither a difference nor a multiple
                gone = any((number, position) in zeroed for position in (0, 1))
                its = tuple(each for each in parts if each is not None and each.size == total.numel()) if same else ()
                node = _Node(total, private.version_of(total), parts=its, zeroed=gone)
                run.now[private.memory_of(total)] = node
                run.sums[number] = node
                if same:
                    run.sides.update({(number, at): part for at, part in enumerate(parts) if part is not None})

            return then

        watched.gave = gave
        with watched, SameDraws(zeroed=zeroed, seen=seen):
            run_batch(self.model, batch, self.forward)
        return run, watched

    def _found(self, batch: Any) -> list[Seam]:
        if not self._terms:
            return []
        run, watched = self._watched(batch, zeroed=self._zeroed, leaving=self._leaving)
        usable = self._usable(watched, self._leaving)
        by_weight: dict[str, Seam] = {}
        for name, term in sorted(self._terms.items(), key=lambda each: each[1].final):
            places = [each for each in _places(run.sums.get(term.final), _SUMS) if usable(each)]
            if places:
                place = max(places, key=lambda each: each.at)
                before = by_weight.get(place.weight)
                names_of = (*(before.names if before is not None else ()), name)
                by_weight[place.weight] = Seam(place, term.final, names_of)
        return sorted(by_weight.values(), key=lambda seam: seam.place.at)

    def _usable(self, watched: Places, leaving: set[str]) -> Callable[[Place], bool]:
        """Whether parameters are used in this place and in no other."""
        holders = Counter(
            id(each)
            for module in self.model.modules()
            for each in private.parameters_of(module).values()
            if each is not None
        )
        memories = Counter(each.untyped_storage().data_ptr() for each in tensors_of(self.model).values())

        def usable(place: Place) -> bool:
            for name in filter(None, (place.weight, place.bias)):
                parameter = self.model.get_parameter(name)
                once = holders[id(parameter)] == 1 and memories[parameter.untyped_storage().data_ptr()] == 1
                if not once or watched.times[name] != 1 or name in leaving or not parameter.is_floating_point():
                    return False
            if place.piece is None:
                return True
            return place.piece.shape[0] * place.piece.shape[1] == self.model.get_parameter(place.weight).numel()

        return usable


def rows_of(tensor: Tensor, *, turned: bool) -> Tensor:
    return (tensor.transpose(0, 1) if turned else tensor).reshape(-1, tensor.shape[-1])


def _part(run: _Run, side: Any) -> _Node | None:
    """What is known of a side of a sum, if it was not written into since; a place with the order in which its outputs
    lie there."""
    if not isinstance(side, Tensor) or side.layout != torch.strided or not side.dim():
        return None
    node = run.now.get(private.memory_of(side))
    if node is None or private.version_of(side) != node.version:
        return None
    turned = is_turned(node.tensor, side)
    if turned is None or (turned and node.place is None):
        return None
    return replace(node, place=replace(node.place, turned=turned)) if turned and node.place else node


def _plain_sum(sides: Sequence[Any]) -> Tensor | None:
    """The sum of both sides, before it is taken: it may be in place."""
    one, other = sides
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return None
    with private.unwatched():
        return one + other


def _places(node: _Node | None, sums: int) -> Iterator[Place]:
    """The places that reach a sum through no more sums than so many, those of branches that left not counted."""
    if node is None:
        return
    if node.place is not None:
        yield node.place
    left = sums if node.zeroed else sums - 1
    if node.parts and left >= 0:
        for part in node.parts:
            yield from _places(part, left)


class Places(Pairs):
    """Watches what places give, and what their matrices are multiplied with."""

    def __init__(self, model: nn.Module, names: set[str], tokens: Tokens) -> None:
        super().__init__({name: model.get_parameter(name) for name in names}, frozenset())
        self.watching(tokens)
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.gave: Callable[[Tensor, Place], None] = lambda *_: None
        self.last: dict[Piece, tuple[Inputs, Tensor | None]] = {}  # and which of the rows are no padding
        self.times: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.just_met = []
        if func is functional.layer_norm:
            output = func(*args, **kwargs)
            bound = inspect.signature(func).bind(*args, **kwargs).arguments
            weight, bias = (self.names.get(id(bound.get(key))) for key in ("weight", "bias"))
            self.times.update(each for each in (weight, bias) if each is not None)
            if weight is not None and len(bound["normalized_shape"]) == 1 and (bias or bound.get("bias") is None):
                self.gave(output, Place(weight, bias, None, False, 0))
            return output
        output = super(Pairs, self).__torch_function__(func, types, args, kwargs)
        met = self.product_of(func, args, kwargs)
        value = output[0] if isinstance(output, tuple) else output
        if met is None or not isinstance(value, Tensor) or value.shape[-1] != met.piece.shape[0]:
            return output
        bias = _bias_of(func, args, kwargs)
        name = None if bias is None else self.names.get(id(bias))
        self.times.update([name] if name is not None else [])
        self.gave(value, Place(met.piece.name, name, met.piece, False, 0))
        return output

    def _add(self, piece: Piece, inputs: Inputs, key: Any) -> None:
        self.seen.setdefault(key, (inputs.x, piece))  # held, so that what comes later lies elsewhere
        self.just_met.append(Meeting(piece, 0))
        self.times[piece.name] += 1
        index = inputs.index if isinstance(inputs, Rows) else None
        if len(self.parameters) == 1:  # else only their order is of interest
            self.last[piece] = inputs.copied(), index


def _bias_of(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a product adds to its outputs, if that is a parameter or may be one."""
    if func is functional.linear:
        return args[2] if len(args) > 2 else kwargs.get("bias")
    if func in (torch.addmm, Tensor.addmm):
        return args[0] if args else kwargs.get("input")
    if func is functional.multi_head_attention_forward:
        return inspect.signature(func).bind(*args, **kwargs).arguments.get("out_proj_bias")
    return None
