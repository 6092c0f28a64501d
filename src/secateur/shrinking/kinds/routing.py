"""For each token the inputs of each expert's last matrix, and the weight with which its output is summed. Runs the
dense model and the one with fewer experts beside each other, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secateur.coupling import Group
from secateur.models import (
    Outputs,
    Products,
    Replay,
    RunAlong,
    Tokens,
    WeightView,
    added_to,
    has_forward,
    mixture_of,
    run_through,
    watched,
)
from secateur.support import mapped, tensors_in, track

# ---- For each token the inputs of each expert's last matrix, and the weight with which its output is summed.
#
# Law: for the tokens that are no padding, a mixture's outputs are the sum over rows of ``weight * matrix @
# features``, and a term that does not depend on the last matrices; any other mixture has no rows. The mixture's own
# code shows which token a row belongs to: the output gradient encodes the token's number, a binary digit a column, so
# that one backward pass gives the weight and the number.


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
        return self.features.to(wide) * self.weights.to(self.features.device, wide)[:, None]


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
    return [path, inner] if owned and inner != path and has_forward(model.get_submodule(inner)) else [path]


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
            counts = (weights != 0) & (tokens >= 0) & features.ne(0).any(1).cpu()
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
        if self.count_once(piece, key):
            self.now += [(piece, rows.detach()) for rows in inputs.rows()]


def _unit(piece: WeightView, parameter: Tensor) -> int | None:
    """Whose matrix it is; None where it is not one along the first dimension."""
    first, rest = divmod(piece.offset, parameter.stride(0))
    return first if not rest and parameter[first].numel() == piece.shape[0] * piece.shape[1] else None


def _numbers(own: Tensor | None, count: int) -> Tensor:
    """Of each token its number among those that are no padding, or -1."""
    if own is None or own.numel() != count:
        return torch.arange(count, device="cpu")
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
                own = torch.zeros(_rows(output).shape[0], dtype=torch.bool, device="cpu")
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
    return bool(added_to(end, enumerate(seen)))


def new_values(model: nn.Module, block: str, names: Sequence[str]) -> Mapping[str, Tensor]:
    """The values of parameters, by their names in a block."""
    start = f"{block}." if block else ""
    return {name.removeprefix(start): model.get_parameter(name).detach() for name in names}
