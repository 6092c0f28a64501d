"""Statistics of experts on data: how many tokens each receives, and how large its outputs are. For each token the
inputs of each expert's last matrix, and the weight with which its output is summed. Runs the dense model and the one
with fewer experts beside each other, block by block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secateur.coupling import Coupling, Group, tensors_of_tree
from secateur.models import (
    Host,
    Outputs,
    Products,
    Replay,
    RunAlong,
    Tokens,
    WeightView,
    added_to,
    run_through,
    watched,
)
from secateur.shrinking.measure import check_finite
from secateur.support import Between, all_gather, mapped, tensors_in, track

# ---- Statistics of experts on data: how many tokens each receives, and how large its outputs are.
#
# Law: nothing changes, and names of classes do not matter. An expert's contribution for a token is its outputs times
# the model's own weight for them, renormalized where the model does that; padding, and tokens with a contribution of
# zero, do not count.
#
# The weight is the derivative of the mixture's output by the expert's: the mixture is run once more on its inputs,
# one output gradient is used for all tokens, and the gradient at an expert's outputs is that gradient times the
# weight. So it is the same for experts that run in turn or all at once, with the weight on their outputs or inputs.

MOST = 1e300  # of a sum

Array = npt.NDArray[np.float64]


@dataclass(eq=False)
class Routed:
    """Sums over the tokens that were sent to each unit: how many, and of the weight times the norm of the outputs."""

    tokens: Annotated[Array, Between(0, MOST)]
    weighted: Annotated[Array, Between(0, MOST)]

    @classmethod
    def zeros(cls, units: int) -> Routed:
        return cls(np.zeros(units), np.zeros(units))

    def everywhere(self) -> Routed:
        """The sums of all processes."""
        tokens, weighted = (sum(all_gather(each)) for each in (self.tokens, self.weighted))
        return Routed(np.asarray(tokens), np.asarray(weighted))

    @property
    def unreached(self) -> tuple[int, ...]:
        """Units that no token was sent to."""
        return tuple(np.flatnonzero(self.tokens == 0).tolist())

    def scores(self, rank: str) -> Array:
        """Of each unit, higher = keep; zero for one that no token was sent to.

        >>> Routed(np.array([2.0, 0.0]), np.array([3.0, 0.0])).scores("reap")
        array([1.5, 0. ])
        """
        if rank == "frequency":
            return self.tokens.copy()
        return self.weighted / np.maximum(self.tokens, 1)


def scores_by(rank: str, routed: Routed, by_criterion: Array, *, unreached_first: bool) -> Tensor:
    """Scores of experts by their statistics on data, higher = keep; the criterion orders equal ones.

    An expert that no token reached has no statistics: the criterion places it among all, unless it is to leave first.

    >>> routed = Routed(np.array([1.0, 0.0, 1.0, 1.0]), np.array([5.0, 0.0, 1.0, 3.0]))
    >>> scores_by("reap", routed, np.array([1.0, 9.0, 2.0, 3.0]), unreached_first=False).argsort().tolist()
    [2, 3, 0, 1]
    >>> scores_by("reap", routed, np.array([1.0, 9.0, 2.0, 3.0]), unreached_first=True).argsort().tolist()
    [1, 2, 3, 0]
    """
    if rank == "criterion":
        return torch.from_numpy(by_criterion)
    scores, reached = routed.scores(rank), routed.tokens > 0
    count = len(scores)
    places = np.empty(count)
    places[np.argsort(by_criterion, kind="stable")] = np.arange(count)
    if reached.any() and not unreached_first:
        known = np.sort(scores[reached])
        share = places[~reached] / max(1, count - 1)
        scores[~reached] = np.interp(share, np.linspace(0, 1, len(known)), known)
    elif not unreached_first:
        scores = places.copy()
    else:
        scores[~reached] = -1.0
    ranks = np.empty(count)
    ranks[np.lexsort((places, scores))] = np.arange(1, count + 1)
    return torch.from_numpy(ranks)


def mixture_of(model: nn.Module, group: Group) -> tuple[str, nn.Module]:
    """The innermost module with a forward pass that holds all members of a group: its router and its experts."""
    paths = [name.split(".")[:-1] for name, _ in group.members]
    common: list[str] = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        common.append(steps[0])
    while common and not _runs(model.get_submodule(".".join(common))):
        common.pop()
    path = ".".join(common)
    return path, model.get_submodule(path)


# ---- For each token the inputs of each expert's last matrix, and the weight with which its output is summed.
#
# Law: for the tokens that are no padding, a mixture's outputs are the sum over rows of ``weight * matrix @
# features``, and a term that does not depend on the last matrices; any other mixture has no rows. The mixture's own
# code shows which token a row belongs to: the output gradient encodes the token's number, a binary digit a column, so
# that one backward pass gives the weight and the number.


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


@dataclass(eq=False)
class Watching:
    """While it is entered, sums what the mixtures of a model do; `routed` is of each group."""

    model: nn.Module
    coupling: Coupling
    groups: Sequence[Group]
    replay: Replay | None = None
    routed: dict[str, Routed] = field(default_factory=dict)

    def run(self, host: Host) -> None:
        """Runs a model on its batches, watched."""
        with self.watching(), host.running() as (replay, blocks):
            self.replay = replay
            for _ in blocks:
                pass

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        hooks = []
        for group in self.groups:
            self.routed.setdefault(group.name, Routed.zeros(group.size))
            _, module = mixture_of(self.model, group)
            hooks.append(module.register_forward_hook(self._hook(group), with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, group: Group) -> Any:
        def see(module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
            self._see(group, module, args, kwargs)

        return see

    def _see(self, group: Group, module: nn.Module, args: Any, kwargs: Any) -> None:
        parameters = dict(self.model.named_parameters())
        owned = {name: parameters[name] for name, at in group.members if at == 0 and name in parameters}
        places = {name: self.coupling.indices(group, name, 0) for name in owned}
        args, kwargs = mapped((args, kwargs), lambda tensor: tensor.detach().clone())
        watch = _Outputs({name: (each, places[name]) for name, each in owned.items()})
        with torch.enable_grad(), watch:
            again = module.forward(*args, **kwargs)
        out = next(tensor for tensor in tensors_in(again) if tensor.is_floating_point())
        if not watch.seen or not out.requires_grad:
            return
        ways = torch.ones_like(out) * signs(out.shape[-1]).to(out)
        assert self.replay is not None
        own = Tokens.of(self.replay.batches[self.replay.at]).own
        if own is not None and own.numel() == out.shape[:-1].numel():
            ways = ways * own.reshape(out.shape[:-1]).to(ways)[..., None]
        with torch.enable_grad():
            moved_by = (out * ways).sum()
        slopes = torch.autograd.grad(moved_by, [leaf for leaf, _ in watch.seen], allow_unused=True)
        found = self.routed[group.name]
        for (leaf, units), slope in zip(watch.seen, slopes, strict=True):
            if slope is None or not leaf.numel():
                continue
            norms = leaf.detach().double().norm(dim=-1)
            weights = slope.double().norm(dim=-1) / leaf.shape[-1] ** 0.5
            sent = (weights * norms) > 0
            for total, each in ((found.tokens, sent), (found.weighted, weights * norms)):
                np.add.at(total, units, each.reshape(len(units), -1).sum(1).cpu().numpy())


class _Outputs(TorchFunctionMode):
    """Sees the outputs of calls that take an expert's part of a parameter: whose they are; a slope reaches those that
    nothing else of the experts is multiplied with or added to."""

    def __init__(self, owned: Mapping[str, tuple[Tensor, npt.NDArray[np.int64]]]) -> None:
        super().__init__()
        self.owned = {each.untyped_storage().data_ptr(): (each, units) for each, units in owned.values()}
        self.seen: list[tuple[Tensor, list[int]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor) or not out.is_floating_point() or not out.dim() or self._is_theirs(out):
            return out
        found = [
            units for each in tensors_of_tree((args, kwargs or {})) if (units := self._units_of(each, out)) is not None
        ]
        if not found:
            return out
        leaf = out.detach().requires_grad_()
        self.seen.append((leaf, found[0]))
        return leaf.clone()  # what the model changes in place is no leaf

    def _is_theirs(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self.owned

    def _units_of(self, tensor: Tensor, out: Tensor) -> list[int] | None:
        """The unit whose part this is, or those of all along the first dimension of the output."""
        if not self._is_theirs(tensor) or not tensor.numel():
            return None
        parameter, units = self.owned[tensor.untyped_storage().data_ptr()]
        if tensor.numel() == parameter.numel():
            each_has_its_own = tensor.dim() == out.dim() == 3 and tensor.shape[0] == out.shape[0] == len(units)
            return units.tolist() if each_has_its_own else None
        row = parameter.stride(0)
        first = (tensor.storage_offset() - parameter.storage_offset()) // row
        its = set(units[first : first + -(-tensor.numel() // row)].tolist())
        return list(its) if len(its) == 1 and min(its) >= 0 else None


def signs(width: int) -> Tensor:
    """A way to move outputs, the same for all tokens; no sum over it vanishes for reasons of symmetry."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (width,), generator=draw) * 2.0 - 1.0


def routed_by(host: Host, coupling: Coupling, groups: Sequence[Group]) -> dict[str, Routed]:
    """The statistics of the experts of these groups, from one run of a model's batches, of all processes.

    Raises:
        ValueError: of no expert of a mixture were outputs seen.
    """
    watching = Watching(host.model, coupling, groups)
    watching.run(host)
    alone = {group.name: Routed.zeros(group.size) for group in groups}
    found = alone if isinstance(host.batches, RunAlong) else watching.routed
    routed = {axis: each.everywhere() for axis, each in found.items()}
    try:
        check_seen(groups, routed)
    except ValueError:
        check_finite(host.model)  # which may be why
        raise
    return routed


def check_seen(groups: Sequence[Group], routed: Mapping[str, Routed]) -> None:
    """Raises ValueError for a mixture whose outputs were not seen, or are not finite."""
    for group in groups:
        found = routed[group.name]
        if not found.tokens.any():
            raise ValueError(
                f"{group.name}: no outputs of the experts that it chooses between were seen while the batches ran, so "
                'data cannot rank them; say Experts(..., rank="criterion").'
            )
        if not np.isfinite(found.weighted).all():
            raise ValueError(f"{group.name}: the outputs of its experts hold NaN or infinity; correct the weights.")


_EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}  # a weight times 1 or -1; of other dtypes a hundredth


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """What one expert was given and gave.

    Attributes:
        unit: which expert.
        piece: where its last matrix lies in a parameter of the model.
        tokens: (rows,), of the mixture's outputs that are no padding.
        weights: (rows,), with which its outputs are added up.
        features: (rows, inputs), what the matrix is multiplied with.
    """

    unit: int
    piece: WeightView
    tokens: Tensor
    weights: Tensor
    features: Tensor

    def weighted(self) -> Tensor:
        """(rows, inputs) in float32 or wider."""
        wide = torch.promote_types(self.features.dtype, torch.float32)
        return self.features.to(wide) * self.weights.to(wide)[:, None]


def output_rows(output: Any, own: Tensor | None) -> Tensor:
    """The outputs of a mixture for tokens that are no padding, (tokens, width)."""
    out = next(tensor for tensor in tensors_in(output) if tensor.is_floating_point())
    rows = out.detach().reshape(-1, out.shape[-1])
    return rows if own is None or own.numel() != len(rows) else rows[own.reshape(-1).to(rows.device)]


def places_of(model: nn.Module, group: Group) -> list[str]:
    """The modules whose outputs may be the sum: the mixture, and within it what holds the experts alone."""
    path, _ = mixture_of(model, group)
    owned = [each.split(".")[:-1] for each in _owned(model, group)]
    common = [steps[0] for steps in zip(*owned, strict=False) if len({*steps}) == 1]
    inner = ".".join(common)
    return [path, inner] if owned and inner != path and _runs(model.get_submodule(inner)) else [path]


def _owned(model: nn.Module, group: Group) -> dict[str, Tensor]:
    """The parameters that hold a matrix of each expert."""
    return {
        name: parameter
        for name, at in group.members
        if at == 0 and (parameter := dict(model.named_parameters()).get(name)) is not None and parameter.dim() > 2
    }


def rows_of_experts(
    model: nn.Module, group: Group, given: tuple[Any, Any], own: Tensor | None, path: str | None = None
) -> list[ExpertRows] | None:
    """The rows of a mixture that is ``given`` arguments; ``own`` says which tokens are no padding.

    None where its outputs are no such sum: something comes behind the experts that mixes what they give, or nothing is
    seen of them.
    """
    module = mixture_of(model, group)[1] if path is None else model.get_submodule(path)
    owned = _owned(model, group)
    watch = _Last(owned)
    args, kwargs = mapped(given, lambda tensor: tensor.detach().clone())
    with torch.enable_grad(), watch.watching(Tokens()):
        again = module.forward(*args, **kwargs)
    out = next((tensor for tensor in tensors_in(again) if tensor.is_floating_point()), None)
    if out is None or not watch.leaves or not out.requires_grad:
        return None
    told = _told(out, [leaf for leaf, _ in watch.leaves])
    if told is None:
        return None
    number = _numbers(own, out.shape[:-1].numel())
    found: list[ExpertRows] = []
    for (_, met), one in zip(watch.leaves, told, strict=True):
        if one is None:
            continue  # no last matrix: what it gives is multiplied with another one's
        for at, (piece, features) in enumerate(met):
            weights, tokens = (each if len(met) == 1 else each[at] for each in one)
            unit = _unit(piece, owned[piece.name])
            if unit is None or features.shape[0] != weights.numel():
                return None
            weights, tokens = weights.reshape(-1), number[tokens.reshape(-1)]
            counts = (weights != 0) & (tokens >= 0) & features.ne(0).any(1)
            found.append(ExpertRows(unit, piece, tokens[counts], weights[counts], features[counts]))
    return found or None


class _Last(Products):
    """Products with experts' matrices: their inputs, and their outputs as leaves of the graph, which receive
    gradients.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters, frozenset())
        self.leaves: list[tuple[Tensor, list[tuple[WeightView, Tensor]]]] = []
        self.now: list[tuple[WeightView, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now = []
        out = super().__torch_function__(func, types, args, kwargs)
        met, self.now = self.now, []
        if not met or not isinstance(out, Tensor):
            return out
        leaf = out.detach().requires_grad_()
        self.leaves.append((leaf, met))
        return leaf.clone()  # what the model changes in place is no leaf

    def _met(self, piece: WeightView, inputs: Any, key: Any) -> None:
        if (piece, key) not in self.counted:
            self.counted.add((piece, key))
            self.now += [(piece, rows.detach()) for rows in inputs.rows()]


def _unit(piece: WeightView, parameter: Tensor) -> int | None:
    """Whose matrix it is; None where it is not one along the first dimension."""
    first, rest = divmod(piece.offset, parameter.stride(0))
    return first if not rest and parameter[first].numel() == piece.shape[0] * piece.shape[1] else None


def _numbers(own: Tensor | None, count: int) -> Tensor:
    """Of each token its number among those that are no padding, or -1."""
    if own is None or own.numel() != count:
        return torch.arange(count)
    kept = own.reshape(-1).cpu()
    return torch.where(kept, kept.long().cumsum(0) - 1, -1)


def _told(out: Tensor, leaves: Sequence[Tensor]) -> list[tuple[Tensor, Tensor] | None] | None:
    """For each leaf the weights and the tokens of its rows; None for one that is not summed, and None for all where one
    is not summed linearly."""
    width, count = out.shape[-1], out.shape[:-1].numel()
    digits = max(1, (count - 1).bit_length())
    tokens = torch.arange(count, device=out.device)
    spelled = torch.stack([torch.ones_like(tokens), *(1 - 2 * (tokens >> at & 1) for at in range(digits))], 1)
    columns = spelled[:, torch.arange(-(-(1 + digits) // width) * width, device=out.device) % (1 + digits)].to(out)
    passes = []
    for way in torch.split(columns, width, 1):
        with torch.enable_grad():
            moved_by = (out * way.reshape(out.shape)).sum()
        passes.append(torch.autograd.grad(moved_by, leaves, allow_unused=True, retain_graph=True))
    found: list[tuple[Tensor, Tensor] | None] = []
    for leaf, *slopes in zip(leaves, *passes, strict=True):
        if slopes[0] is None:
            found.append(None)
            continue
        if leaf.shape[-1] != width or any(slope is None for slope in slopes):
            return None
        whole = torch.cat(list(slopes), -1)
        weights = whole[..., 0]
        number = sum((whole[..., 1 + at] * weights < 0).long() << at for at in range(digits))
        assert isinstance(number, Tensor)
        number = number.clamp(max=count - 1)
        off = (whole - weights[..., None] * columns[number]).abs().amax(-1)
        if bool((off > _EXACT.get(out.dtype, 1e-2) * weights.abs()).any()):
            return None
        found.append((weights.detach().cpu(), number.cpu()))
    return found


# ---- Runs the dense model and the one with fewer experts beside each other, block by block.
#
# Law: a block of the smaller model is given what its own changed blocks before it gave; of both models together one
# block's weights are there at a time, and what blocks pass on.


class Pass(NamedTuple):
    """The inputs and the residual of a mixture in one batch.

    Attributes:
        path: the module that adds up what experts give: the mixture, or a part of it.
        given: its arguments, ``(args, kwargs)``.
        own: which tokens are no padding; None for all.
        residual: (tokens, width), the residual: dense outputs minus these, for those tokens.
    """

    path: str
    given: tuple[Any, Any]
    own: Tensor | None
    residual: Tensor


@dataclass(eq=False)
class PairedBlocks:
    """The walk over both.

    Attributes:
        dense: the model as it was.
        small: the one of fewer experts.
        groups: of its mixtures.
        folder: for what is kept of a block's tokens; None: memory.
    """

    dense: Replay
    small: Replay
    groups: Sequence[Group]
    folder: Path | None = None
    _inside: dict[str, list[Group]] = field(default_factory=dict)
    _wanted: Outputs = field(default_factory=Outputs)
    _paths: dict[str, str] = field(default_factory=dict)  # whose outputs are looked at
    _adds_up: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._wanted = Outputs(self.folder, "mixtures")
        for group in self.groups:
            *_, path = places_of(self.small.model, group)
            block = next((each for each in self.small.blocks if _is_in(path, each) and path != each), None)
            if block is not None:
                self._inside.setdefault(block, []).append(group)

    @property
    def outside(self) -> list[Group]:
        """Mixtures in none of the blocks."""
        inside = {id(group) for groups in self._inside.values() for group in groups}
        return [group for group in self.groups if id(group) not in inside]

    def run(self, change: Callable[[str, Sequence[Group]], None], already: Sequence[str] = ()) -> Iterator[str]:
        """Goes through the blocks, and gives the name of each when both have run it; ``change`` is called with a
        block's name and mixtures when the smaller model's weights of it are there, but for those ``already`` changed.
        """
        dense = run_through(self.dense, visit=self._look)

        def follow(name: str) -> None:
            if next(dense, None) != name:
                raise ValueError(f"{name} is not what the dense model runs next; pass batches of one kind.")

        def visit(name: str) -> None:
            if name in self._inside and name not in already:
                change(name, self._inside[name])

        try:
            yield from run_through(self.small, before=follow, visit=visit)
        finally:
            self._wanted.clear()

    def passes(self, name: str, group: Group) -> Iterator[Pass]:
        """The batches through a block of the smaller model as it is now, with its mixture's residual."""
        path = self._paths[group.name]
        for number, batch in enumerate(track(self.small.batches, f"watching {name or 'the model'}")):
            given, output, whole = _through(self.small, number, batch, name, path)
            own = Tokens.of(batch).own
            if isinstance(self.small.batches, RunAlong):  # to keep step with the other processes
                own = torch.zeros(_rows(output).shape[0], dtype=torch.bool)
            if self._adds_up[group.name]:
                wanted = self.dense.outputs.load(name, number)
                residual = output_rows(_wide(wanted), own).to(_rows(whole).device) - output_rows(_wide(whole), own)
            else:
                wanted = self._wanted.load(group.name, number)
                residual = output_rows(wanted, own).to(_rows(output).device) - output_rows(_wide(output), own)
            yield Pass(path, given, own, residual)

    def _look(self, name: str) -> None:
        """At a block of the dense model: where a mixture's outputs are no summand of the block's, they are kept."""
        for group in self._inside.get(name, ()):
            if group.name not in self._paths:
                self._paths[group.name] = self._place(name, group)
                self._adds_up[group.name] = _adds_up(self.dense, name, self._paths[group.name])
            path = self._paths[group.name]
            if not self._adds_up[group.name]:
                for number, batch in enumerate(self.dense.batches):
                    _, output, _ = _through(self.dense, number, batch, name, path)
                    self._wanted.save(group.name, number, _wide(output))

    def _place(self, name: str, group: Group) -> str:
        """The mixture, or a part of it if only what that gives is a sum over experts."""
        first, *others = (path for path in places_of(self.dense.model, group) if path != name)
        for path in (first, *others):
            given, _, _ = _through(self.dense, 0, self.dense.batches[0], name, path)
            if rows_of_experts(self.dense.model, group, given, None, path) is not None:
                return path
        return first


def _is_in(path: str, block: str) -> bool:
    return not block or path == block or path.startswith(f"{block}.")


def _rows(output: Any) -> Tensor:
    out = next(tensor for tensor in tensors_in(output) if tensor.is_floating_point())
    return out.reshape(-1, out.shape[-1])


def _wide(output: Any) -> Tensor:
    """The first tensor of outputs in float32 or wider, so that differences are not rounded."""
    out = next(tensor for tensor in tensors_in(output) if tensor.is_floating_point())
    return out.to(torch.promote_types(out.dtype, torch.float32))


def _through(
    side: Replay, number: int, batch: Any, name: str, path: str, move: Callable[[Any], Any] | None = None
) -> tuple[tuple[Any, Any], Any, Any]:
    """A batch through a block: what the mixture in it is given, and gives, and what the block gives."""
    seen: list[Any] = []

    def see(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        seen.append((mapped((args, kwargs), lambda tensor: tensor.detach().clone()), output))
        return None if move is None else move(output)

    def handle(reached: str, _args: Any, _kwargs: Any, call: Callable[[], Any]) -> None:
        if reached == name:
            with torch.set_grad_enabled(move is not None):
                seen.append(call())

    hook = side.model.get_submodule(path).register_forward_hook(see, with_kwargs=True)
    try:
        side.run(number, batch, handle)
    finally:
        hook.remove()
    if len(seen) != 2:
        raise ValueError(f"batch {number} does not run {path} once, as the first one does; pass batches of one kind.")
    (given, output), whole = seen
    return given, output, whole


def _adds_up(side: Replay, name: str, path: str) -> bool:
    """Whether a mixture's outputs are added to those of its block as they are."""
    seen: list[Tensor] = []

    def watch(given: Any) -> Any:
        first = next(tensor for tensor in tensors_in(given) if tensor.is_floating_point())
        known, passed_on = watched(first)
        seen.append(known)
        return mapped(given, lambda tensor: passed_on if tensor is first else tensor)

    _, _, whole = _through(side, 0, side.batches[0], name, path, watch)
    end = next(tensor for tensor in tensors_in(whole) if tensor.is_floating_point())
    return added_to(end, seen)[0]


def new_values(model: nn.Module, block: str, names: Sequence[str]) -> Mapping[str, Tensor]:
    """The values of parameters, by their names in a block."""
    start = f"{block}." if block else ""
    return {name.removeprefix(start): model.get_parameter(name).detach() for name in names}
