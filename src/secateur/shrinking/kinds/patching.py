"""Where residual branches leave a stream: the linear layer just before them, and the residual of the stream behind
them. Repair after residual branches left: the weights before them are fitted to what the branches added.
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

from secateur.coupling import Branch, SameDraws, find_coupling, may_leave
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
    running,
)
from secateur.shrinking.gates import Gated
from secateur.shrinking.kinds.branches import (
    OutputCosts,
    choose_branches,
    influences,
    learnt_branches,
    named_branches,
    names_in,
    number_of,
)
from secateur.shrinking.plan import plan_without
from secateur.shrinking.repair import StreamCorrection
from secateur.shrinking.select import Leaving, Left, check_globs
from secateur.solvers import Fit, ScaleFit
from secateur.support import Forward, Undo, device_of, moved, on_rank_zero, private, run_batch, tensors_of, track

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
    def without(self, _batch: Any = None) -> Iterator[None]:
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
        stream: list[Tensor] = []

        def seen(number: int, _: Sequence[Any]) -> Callable[[Tensor], None]:
            def then(total: Tensor) -> None:
                if number == seam.final:
                    stream.append(total.detach().clone())
                    raise AllMetError

            return then

        def run() -> None:
            with contextlib.suppress(AllMetError), SameDraws(zeroed=self._zeroed, seen=seen):
                run_batch(self.model, batch, self.forward)

        inputs, index = given_to(seam.place, self.model, Tokens.of(batch), run)
        return inputs, as_rows(stream[0], turned=seam.place.turned), index

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


def given_to(
    place: LinearSite, module: nn.Module, tokens: Tokens, run: Callable[[], Any]
) -> tuple[Iterator[Tensor], Tensor | None]:
    """What a place in a module is given when that runs, in parts, or of scales what they give; and which of the rows
    are no padding."""
    watched = LinearSites(module, {place.weight} if place.piece else set(), tokens)
    scaled: list[Tensor] = []

    def gave(value: Tensor, here: LinearSite) -> None:
        if here.weight == place.weight and here.piece is None:
            scaled.append(value.detach().clone())

    watched.gave = gave
    with watched:
        run()
    if place.piece is not None:
        inputs, index = watched.last[place.piece]
        return inputs.rows(), index
    values, mask = scaled[-1], tokens.own
    rows = as_rows(values, turned=False)
    index = None if mask is None or mask.shape != values.shape[:-1] else mask.reshape(-1).to(values.device)
    return iter([rows if index is None else rows[index]]), index


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
        value = output[0] if isinstance(output, tuple) and output else output
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
    cost = costs.now(within=stream.without)
    found: dict[str, float] = {}
    patched: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for seam in track(stream.seams, "patching"):
        values, share = _solved(model, stream, seam, held, dense)
        if not values:
            continue
        before = dict(zip(values, undo.values(*(model.get_parameter(name) for name in values)), strict=True))
        _write(model, values)
        if (now := costs.now(within=stream.without)) <= cost:
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
            if costs.now(within=stream.without) > cost:
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

    def rows() -> Iterator[tuple[Iterable[Tensor], Tensor]]:
        for batch, wanted in zip(batches, dense, strict=True):
            inputs, present, index = stream.met(batch, seam)
            residual = as_rows(wanted[seam.final], turned=place.turned).double() - present.double()
            yield inputs, residual if index is None else residual[index]

    weight, bias = (None if name is None else model.get_parameter(name).detach() for name in (place.weight, place.bias))
    assert weight is not None
    with running(model):
        return fitted(place, weight, bias, rows(), len(batches))


def fitted(
    place: LinearSite, weight: Tensor, bias: Tensor | None, rows: Iterable[tuple[Iterable[Tensor], Tensor]], count: int
) -> tuple[dict[str, Tensor], float]:
    """New values of a place, by the names of parameters, and the share of the squared residual that they recover;
    nothing where they do not help.

    Args:
        rows: of each of so many batches what the place is given, in parts, and the residual behind it.
    """
    fit = ScaleFit(weight, bias) if place.piece is None else Fit(place.piece.of(weight), bias)
    for number, (inputs, residual) in enumerate(rows):
        fit.add_batch(inputs, residual, number, count)
    new, share = fit.solved()
    if new is None:
        return {}, 0.0
    values = {place.weight: new[0]}
    if place.piece is not None:
        values[place.weight] = weight.clone()
        place.piece.of(values[place.weight]).copy_(new[0])
    if place.bias is not None and new[1] is not None:
        values[place.bias] = new[1]
    return values, share


# ---- Residual branches that leave a module: which, and what makes up for them.


def leave_branches(leaving: Leaving, branches: Branches) -> Left:
    """Those that are named leave, or those that cost the outputs least; then `patch` repairs what stays."""
    model, coupling, asked, batches = leaving.model, leaving.coupling, leaving.asked, leaving.batches
    check_globs(leaving.known, asked.globs)
    costs = None if batches is None else OutputCosts(model, batches, leaving.forward)
    stayed: dict[str, str] = {}
    learnt: Gated | None = None
    if branches.names:
        gone = named_branches(model, coupling, branches.names, leaving.inputs, verify=asked.verify)
    else:
        score: Any = influences if costs is None else costs
        free = [each for each in coupling.branches if may_leave(names_in(each), asked.include, asked.exclude)]
        some = 0 < number_of(branches.share, coupling.branches) < len(free)  # else there is nothing to choose
        if asked.gates and costs is not None and batches is not None and some:
            its = free, coupling.branches, branches.share, batches, costs
            learnt = on_rank_zero(lambda: learnt_branches(*its))
            score = dict(zip(free, learnt.worths["branches"].tolist(), strict=True))
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
    return Left(plan_without(gone), facts, gates=learnt)
