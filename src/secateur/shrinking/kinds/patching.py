"""Where residual branches leave a stream: the linear layer just before them, and the residual of the stream behind
them. Repair after residual branches left: the weights before them are fitted to what the branches added.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.coupling import Branch, SameDraws, find_coupling
from secateur.kinds import Branches
from secateur.models import (
    AllMetError,
    InMemory,
    Inputs,
    PairedStats,
    ProductCall,
    Rows,
    Tokens,
    WeightView,
    is_turned,
    parts_of,
)
from secateur.shrinking.kinds.branches import OutputCosts, choose_branches, influences, named_branches, running
from secateur.shrinking.plan import plan_without
from secateur.shrinking.repair import StreamCorrection
from secateur.shrinking.select import Leaving, Left, check_globs
from secateur.solvers import aimed
from secateur.support import Forward, Undo, device_of, moved, private, run_batch, tensors_of, track

# Where residual branches leave a stream: the linear layer just before them, and the residual of the stream behind
# them.
#
# Law: the model is run as it is, with the terms of the branches made zero, so that sums have one number in all runs;
# what is watched changes nothing. A place is one that a linear map can be merged into: a matrix whose outputs are
# added to the stream, or the scales of a layer normalization that gives it. Its parameters are used there and nowhere
# else.
#
# Sums, and their terms, are recognised by their memory: from the sum where a branch was added back to the last place
# that reaches it through sums alone.

_SUMS = 2  # of a chain x + f(x) + g(x), and where the stream before it came from


@dataclass(frozen=True)
class LinearSite:
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
    piece: WeightView | None
    turned: bool
    at: int


@dataclass(frozen=True)
class MergePoint:
    """Branches that leave one after the other, and the place before them.

    Attributes:
        place: where a patch goes.
        final: the number of the sum behind the last of them, at which the stream is compared with the dense model's.
        names: of the branches.
    """

    place: LinearSite
    final: int
    names: tuple[str, ...]


@dataclass(eq=False)
class _Node:
    """A tensor that was seen: the result of a sum, or what a place gave."""

    tensor: Tensor
    version: int
    place: LinearSite | None = None
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

    def met(self, batch: Any, seam: MergePoint) -> tuple[Iterator[Tensor], Tensor, Tensor | None]:
        """A run without the branches, to the seam: what the place is given, in parts, or of scales what it gives; the
        stream behind the seam, as rows in this order; and which of its rows are no padding."""
        watched = LinearSites(self.model, {seam.place.weight} if seam.place.piece else set(), Tokens.of(batch))
        stream: list[Tensor] = []
        scaled: list[Tensor] = []

        def seen(number: int, _: Sequence[Any]) -> Callable[[Tensor], None]:
            def then(total: Tensor) -> None:
                if number == seam.final:
                    stream.append(total.detach().clone())
                    raise AllMetError

            return then

        def gave(value: Tensor, place: LinearSite) -> None:
            if place.weight == seam.place.weight and place.piece is None:
                scaled.append(value.detach().clone())

        watched.gave = gave
        with contextlib.suppress(AllMetError), watched, SameDraws(zeroed=self._zeroed, seen=seen):
            run_batch(self.model, batch, self.forward)
        if seam.place.piece is None:
            mask = Tokens.of(batch).own
            values = scaled[-1]
            index = mask.reshape(-1).to(values.device) if mask is not None and mask.shape == values.shape[:-1] else None
            every = as_rows(values, turned=False)
            return iter([every if index is None else every[index]]), as_rows(stream[0], turned=False), index
        inputs, index = watched.last[seam.place.piece]
        return inputs.rows(), as_rows(stream[0], turned=seam.place.turned), index

    def makers(self, batch: Any) -> dict[str, LinearSite]:
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

    def _watched(self, batch: Any, *, zeroed: Iterable[tuple[int, int]], leaving: set[str]) -> tuple[_Run, LinearSites]:
        """A run of a batch, to the end: what gave something may be used again. What leaves gives nothing."""
        run, zeroed = _Run(), set(zeroed)
        names = {name for name, each in self.model.named_parameters() if each.dim() == 2} - leaving
        watched = LinearSites(self.model, names, Tokens.of(batch))

        def gave(value: Tensor, place: LinearSite) -> None:
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

    def _found(self, batch: Any) -> list[MergePoint]:
        if not self._terms:
            return []
        run, watched = self._watched(batch, zeroed=self._zeroed, leaving=self._leaving)
        usable = self._usable(watched, self._leaving)
        by_weight: dict[str, MergePoint] = {}
        for name, term in sorted(self._terms.items(), key=lambda each: each[1].final):
            places = [each for each in _places(run.sums.get(term.final), _SUMS) if usable(each)]
            if places:
                place = max(places, key=lambda each: each.at)
                before = by_weight.get(place.weight)
                names_of = (*(before.names if before is not None else ()), name)
                by_weight[place.weight] = MergePoint(place, term.final, names_of)
        return sorted(by_weight.values(), key=lambda seam: seam.place.at)

    def _usable(self, watched: LinearSites, leaving: set[str]) -> Callable[[LinearSite], bool]:
        """Whether parameters are used in this place and in no other."""
        holders = Counter(
            id(each)
            for module in self.model.modules()
            for each in private.parameters_of(module).values()
            if each is not None
        )
        memories = Counter(each.untyped_storage().data_ptr() for each in tensors_of(self.model).values())

        def usable(place: LinearSite) -> bool:
            for name in filter(None, (place.weight, place.bias)):
                parameter = self.model.get_parameter(name)
                once = holders[id(parameter)] == 1 and memories[parameter.untyped_storage().data_ptr()] == 1
                if not once or watched.times[name] != 1 or name in leaving or not parameter.is_floating_point():
                    return False
            if place.piece is None:
                return True
            return place.piece.shape[0] * place.piece.shape[1] == self.model.get_parameter(place.weight).numel()

        return usable


def as_rows(tensor: Tensor, *, turned: bool) -> Tensor:
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


def _places(node: _Node | None, sums: int) -> Iterator[LinearSite]:
    """The places that reach a sum through no more sums than so many, those of branches that left not counted."""
    if node is None:
        return
    if node.place is not None:
        yield node.place
    left = sums if node.zeroed else sums - 1
    if node.parts and left >= 0:
        for part in node.parts:
            yield from _places(part, left)


class LinearSites(PairedStats):
    """Watches what places give, and what their matrices are multiplied with."""

    def __init__(self, model: nn.Module, names: set[str], tokens: Tokens) -> None:
        super().__init__({name: model.get_parameter(name) for name in names}, frozenset())
        self.watching(tokens)
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.gave: Callable[[Tensor, LinearSite], Tensor | None] = lambda *_: None
        self.last: dict[WeightView, tuple[Inputs, Tensor | None]] = {}  # and which of the rows are no padding
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
                return self._passed_on(output, output, LinearSite(weight, bias, None, False, 0))
            return output
        output = super(PairedStats, self).__torch_function__(func, types, args, kwargs)
        met = self.product_of(func, args, kwargs)
        value = output[0] if isinstance(output, tuple) else output
        if met is None or not isinstance(value, Tensor) or value.shape[-1] != met.piece.shape[0]:
            return output
        bias = _bias_of(func, args, kwargs)
        name = None if bias is None else self.names.get(id(bias))
        self.times.update([name] if name is not None else [])
        return self._passed_on(output, value, LinearSite(met.piece.name, name, met.piece, False, 0))

    def _passed_on(self, output: Any, value: Tensor, site: LinearSite) -> Any:
        """What the model goes on with, where who watches gives something in the place of what was given."""
        other = self.gave(value, site)
        return output if other is None else (other, *output[1:]) if isinstance(output, tuple) else other

    def _add(self, piece: WeightView, inputs: Inputs, key: Any) -> None:
        self.seen.setdefault(key, (inputs.x, piece))  # held, so that what comes later lies elsewhere
        self.just_met.append(ProductCall(piece, 0))
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


# ---- Repair after residual branches left: the weights before them are fitted to what the branches added.
#
# Law: a patch is merged into a weight that is there already, so that nothing is computed in addition; on the
# calibration the stream is nearer to the dense model's with it, and the outputs no further; where that is not so,
# there is none. Sums are in float64 and rounded once.
#
# A matrix W whose outputs are added to the stream becomes ``W + Δ``, and ``X Δᵀ + b`` is fitted by least squares to
# the residual: the dense stream behind the branches minus the present one; b only where there is a bias. ReplaceMe
# (arXiv:2505.02819) looks for ``T`` with ``Δ = T W - W``, which is among these. Where the stream is normalized
# (BERT), each of its channels is scaled and moved by the scales of the normalization, as LinearPatch
# (arXiv:2505.24680) does with a matrix of its own.

DAMPINGS = (1e-7, 1e-3, 1e-2, 1e-1, 1.0)  # of the mean diagonal: the one that is best on rows that it did not see
_HELD_OUT = 4  # every so many a batch, or a row where there are fewer batches


def patch(
    model: nn.Module,
    gone: Sequence[Branch],
    batches: Sequence[Any],
    *,
    costs: OutputCosts,
    forward: Forward | None,
    undo: Undo,
) -> dict[str, float]:
    """Changes the weights around the branches that leave, which the model has still; ``{name: share}``, the share
    of the squared residual that a weight before them recovers.

    First to last, each with the patches before it in place; then the matrices behind are fitted to the dense stream,
    too.

    Raises:
        ValueError: a batch takes another way through the model than the first one, or no walk goes through its blocks.
    """
    held = [moved(batch, device_of(model)) for batch in batches]
    with running(model):
        stream = Stream(model, gone, held[0], forward)
        makers = stream.makers(held[0])
        dense = [stream.dense(batch) for batch in track(held, "running the dense model")] if stream.seams else []
    cost = costs.now(stream.without)
    found: dict[str, float] = {}
    patched: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for seam in track(stream.seams, "patching"):
        values, share = _solved(model, stream, seam, held, dense)
        if not values:
            continue
        before = dict(zip(values, undo.values(*(model.get_parameter(name) for name in values)), strict=True))
        _write(model, values)
        if (now := costs.now(stream.without)) <= cost:
            cost, found[seam.place.weight] = now, share
            patched, whole = patched | values, before | whole
        else:
            _write(model, before)
    dense.clear()
    leaving = [makers[branch.name] for branch in gone if branch.name in makers]
    if len(leaving) == len(gone):  # else something makes a term that cannot become zero
        zeros = [name for place in leaving for name in (place.weight, place.bias) if name is not None]
        behind = [place.weight for place in makers.values() if place.at > min(each.at for each in leaving)]
        job = _following(model, zeros, patched, behind)
        if job is not None:
            names = [*job.given, *job.moved]
            now_there = dict(zip(names, undo.values(*(model.get_parameter(name) for name in names)), strict=True))
            _write(model, whole)  # the walk begins with the dense weights
            InMemory(model, batches, forward=forward).walk(job)
            if costs.now(stream.without) > cost:
                _write(model, now_there)
            _write(model, {name: now_there[name] for name in zeros})
    return found


def _following(
    model: nn.Module, zeros: Sequence[str], patched: Mapping[str, Tensor], behind: Sequence[str]
) -> StreamCorrection | None:
    """The walk that makes what is behind follow the dense stream; None where it goes through none of that, or not
    through all that changes."""
    blocks = tuple(f"{name}." if name else "" for name in parts_of(model))
    given = {name: torch.zeros_like(model.get_parameter(name)) for name in zeros} | dict(patched)
    moved_on = [name for name in behind if name not in given and name.startswith(blocks)]
    return StreamCorrection(given, moved_on) if moved_on and all(name.startswith(blocks) for name in given) else None


def _write(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).copy_(value)


def _solved(
    model: nn.Module, stream: Stream, seam: MergePoint, batches: Sequence[Any], dense: Sequence[Mapping[int, Tensor]]
) -> tuple[dict[str, Tensor], float]:
    """New values, if they help."""
    place = seam.place
    weight = model.get_parameter(place.weight).detach()
    bias = None if place.bias is None else model.get_parameter(place.bias).detach()
    solver = solver_of(place, weight, bias)
    with running(model):
        for number, (batch, wanted) in enumerate(zip(batches, dense, strict=True)):
            inputs, rows, index = stream.met(batch, seam)
            residual = as_rows(wanted[seam.final], turned=place.turned).double() - rows.double()
            residual = residual if index is None else residual[index]
            add_batch(solver, inputs, residual, number, len(batches))
    return new_values(place, weight, solver)


def solver_of(place: LinearSite, weight: Tensor, bias: Tensor | None) -> Solver:
    """What finds new values for a weight and its bias."""
    return ScalePatch(weight, bias) if place.piece is None else MatrixPatch(place.piece.of(weight), bias)


def add_batch(solver: Solver, inputs: Iterator[Tensor], residual: Tensor, number: int, count: int) -> None:
    """Adds one of so many batches: the inputs of a place, in parts, and the residual behind it; some rows are held
    out.
    """
    for part, residuals in _together(inputs, residual):
        if count >= _HELD_OUT:
            solver.add(part, residuals, held_out=number % _HELD_OUT == _HELD_OUT - 1)
            continue
        held = torch.arange(len(part), device=part.device) % _HELD_OUT == _HELD_OUT - 1
        for is_held in (False, True):
            solver.add(part[held == is_held], residuals[held == is_held], held_out=is_held)


def new_values(place: LinearSite, weight: Tensor, solver: Solver) -> tuple[dict[str, Tensor], float]:
    """What a solver found, by the names of parameters, and its share; nothing where it does not help."""
    new, share = solver.solved()
    if new is None:
        return {}, 0.0
    values = {place.weight: new[0]}
    if place.piece is not None:
        values[place.weight] = weight.clone()
        place.piece.of(values[place.weight]).copy_(new[0])
    if place.bias is not None and new[1] is not None:
        values[place.bias] = new[1]
    return values, share


def _together(inputs: Iterator[Tensor], residual: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    done = 0
    for part in inputs:
        yield part.double(), residual[done : done + len(part)]
        done += len(part)


class Solver(Protocol):
    def add(self, inputs: Tensor, residual: Tensor, *, held_out: bool) -> None:
        """More rows, in float64."""

    def solved(self) -> tuple[tuple[Tensor, Tensor | None] | None, float]:
        """The new weight and the new bias, in their dtypes, and the share of the squared residual that they recover;
        None where nothing is better."""


@dataclass(eq=False)
class _Sums:
    """Sums over rows of inputs x and of the residual l behind them; of scales, each channel's own."""

    gram: Tensor
    cross: Tensor
    inputs: Tensor
    residuals: Tensor
    squares: float = 0.0
    count: int = 0

    @classmethod
    def zeros(cls, *shapes: tuple[int, ...], like: Tensor) -> _Sums:
        gram, cross, inputs, residuals = (torch.zeros(each, dtype=torch.float64, device=like.device) for each in shapes)
        return cls(gram, cross, inputs, residuals)

    def add(self, gram: Tensor, cross: Tensor, inputs: Tensor, residuals: Tensor) -> None:
        """Of some rows."""
        self.gram += gram
        self.cross += cross
        self.inputs += inputs.sum(0)
        self.residuals += residuals.sum(0)
        self.squares += float(residuals.square().sum())
        self.count += len(residuals)

    def plus(self, other: _Sums) -> _Sums:
        return _Sums(
            self.gram + other.gram,
            self.cross + other.cross,
            self.inputs + other.inputs,
            self.residuals + other.residuals,
            self.squares + other.squares,
            self.count + other.count,
        )


class MatrixPatch:
    """Least squares for a matrix (outputs, inputs) and its bias, damped.

    >>> x = torch.randn(64, 3, dtype=torch.float64)
    >>> residual = x @ torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64).T
    >>> solver = MatrixPatch(torch.ones(1, 3), None)
    >>> solver.add(x[:48], residual[:48], held_out=False); solver.add(x[48:], residual[48:], held_out=True)
    >>> solver.solved()[0][0].round(decimals=4)
    tensor([[2., 1., 3.]])
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        outputs, inputs = weight.shape
        shapes = ((inputs, inputs), (outputs, inputs), (inputs,), (outputs,))
        self.sums = [_Sums.zeros(*shapes, like=weight) for _ in range(2)]

    def add(self, inputs: Tensor, residual: Tensor, *, held_out: bool) -> None:
        self.sums[held_out].add(inputs.T @ inputs, residual.T @ inputs, inputs, residual)

    def solved(self) -> tuple[tuple[Tensor, Tensor | None] | None, float]:
        seen, unseen = self.sums
        if not seen.count or not unseen.count:
            return None, 0.0
        errors = {each: self._error(unseen, *self._change(seen, each)) for each in DAMPINGS}
        damping = min(DAMPINGS, key=lambda each: errors[each])
        every = seen.plus(unseen)
        if not errors[damping] < unseen.squares:
            return None, 0.0
        change, shift = self._change(every, damping)
        new = (self.weight.double() + change).to(self.weight.dtype)
        moved_by = None if self.bias is None else (self.bias.double() + shift).to(self.bias.dtype)
        if not all(bool(each.isfinite().all()) for each in (new, moved_by) if each is not None):
            return None, 0.0
        rounded = new.double() - self.weight.double()
        shifted = shift if self.bias is None or moved_by is None else moved_by.double() - self.bias.double()
        share = 1 - self._error(every, rounded, shifted) / every.squares
        return ((new, moved_by), share) if share > 0 else (None, 0.0)

    def _change(self, sums: _Sums, damping: float) -> tuple[Tensor, Tensor]:
        """Of the weight and of the bias; the latter is not damped."""
        gram, cross = sums.gram, sums.cross
        if self.bias is not None:
            mean = sums.inputs / sums.count
            gram = gram - torch.outer(mean, sums.inputs)
            cross = cross - torch.outer(sums.residuals, mean)
            gram.diagonal().clamp_(min=0)  # what is constant is rounding
        change = aimed(torch.zeros_like(cross), cross, gram=gram, damping=damping)
        shift = (sums.residuals - change @ sums.inputs) / sums.count
        return change, shift if self.bias is not None else torch.zeros_like(shift)

    def _error(self, sums: _Sums, change: Tensor, shift: Tensor) -> float:
        """The squared residual that is left with it."""
        cross = sums.cross - torch.outer(shift, sums.inputs)
        both = (change @ sums.gram * change).sum() - 2 * (change * cross).sum()
        constant = sums.count * shift.square().sum() - 2 * (shift * sums.residuals).sum()
        return max(0.0, sums.squares + float(both + constant))


class ScalePatch:
    """Least squares for the scales and the shifts of channels, each by itself; the inputs are what they give.

    >>> x = torch.randn(64, 2, dtype=torch.float64)
    >>> solver = ScalePatch(torch.ones(2), torch.zeros(2))
    >>> solver.add(x[:48], x[:48] + 1, held_out=False); solver.add(x[48:], x[48:] + 1, held_out=True)
    >>> [each.round(decimals=4) for each in solver.solved()[0]]
    [tensor([2., 2.]), tensor([1., 1.])]
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.sums = [_Sums.zeros(*[(len(weight),)] * 4, like=weight) for _ in range(2)]

    def add(self, inputs: Tensor, residual: Tensor, *, held_out: bool) -> None:
        self.sums[held_out].add(inputs.square().sum(0), (inputs * residual).sum(0), inputs, residual)

    def solved(self) -> tuple[tuple[Tensor, Tensor | None] | None, float]:
        seen, unseen = self.sums
        if not seen.count or not unseen.count or not self._error(unseen, *self._change(seen)) < unseen.squares:
            return None, 0.0
        every = seen.plus(unseen)
        more, shift = self._change(every)
        new = (self.weight.double() * (1 + more)).to(self.weight.dtype)
        moved_by = None if self.bias is None else (self.bias.double() * (1 + more) + shift).to(self.bias.dtype)
        if not all(bool(each.isfinite().all()) for each in (new, moved_by) if each is not None):
            return None, 0.0
        old, now = self.weight.double(), new.double()
        rounded = torch.where(old == 0, 0.0, (now - old) / old)
        if self.bias is not None and moved_by is not None:
            shift = moved_by.double() - self.bias.double() * (1 + rounded)
        share = 1 - self._error(every, rounded, shift) / every.squares
        return ((new, moved_by), share) if share > 0 else (None, 0.0)

    def _change(self, sums: _Sums) -> tuple[Tensor, Tensor]:
        """By what share of itself each channel grows, and by how much it moves."""
        gram, cross = sums.gram, sums.cross
        if self.bias is not None:
            gram = gram - sums.inputs.square() / sums.count
            cross = cross - sums.inputs * sums.residuals / sums.count
        least = 1e-9 * sums.gram + torch.finfo(torch.float64).tiny
        more = torch.where(gram > least, cross / gram.clamp_min(least), 0.0)
        shift = (sums.residuals - more * sums.inputs) / sums.count
        return more, shift if self.bias is not None else torch.zeros_like(shift)

    @staticmethod
    def _error(sums: _Sums, more: Tensor, shift: Tensor) -> float:
        cross = sums.cross - shift * sums.inputs
        found = more.square() * sums.gram - 2 * more * cross + sums.count * shift.square() - 2 * shift * sums.residuals
        return max(0.0, sums.squares + float(found.sum()))


# ---- Residual branches that leave a module: which, and what makes up for them.


def leave_branches(leaving: Leaving, branches: Branches) -> Left:
    """Those that are named leave, or those that cost the outputs least; then `patch` repairs what stays."""
    model, coupling, asked, batches = leaving.model, leaving.coupling, leaving.asked, leaving.batches
    check_globs(leaving.known, asked.globs)
    costs = None if batches is None else OutputCosts(model, batches, leaving.forward)
    stayed: dict[str, str] = {}
    if branches.names:
        gone = named_branches(model, coupling, branches.names, leaving.inputs, verify=asked.verify)
    else:
        score = influences if costs is None else costs
        gone, stayed = choose_branches(
            model,
            coupling,
            branches.share,
            leaving.inputs,
            score=score,
            include=asked.include,
            exclude=asked.exclude,
            verify=asked.verify,
        )
    facts: dict[str, Any] = {"stayed": stayed}
    if costs is not None and batches is not None and leaving.repair:
        facts["patched"] = patch(model, gone, batches, costs=costs, forward=leaving.forward, undo=leaving.undo)
    return Left(plan_without(gone), facts)
