"""Runs the dense model and the one with fewer experts beside each other, block by block.

Law: a block of the smaller model is given what its own changed blocks before it gave; of both models together one
block's weights are there at a time, and what blocks pass on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secateur.blockwise import (
    DirectoryWalk,
    InMemory,
    Outputs,
    Replay,
    RunAlong,
    Tokens,
    Weights,
    parts_of,
    prepared,
    run_through,
)
from secateur.coupling import Group
from secateur.shrinking.expert_rows import output_rows, places_of, rows_of_experts
from secateur.shrinking.routing import signs
from secateur.support import Forward, device_of, mapped, moved, run_batch, tensors_in, track, unchanged

__all__ = ["Beside", "Pass", "Side", "of_directory", "of_model", "runs_again"]

_NEAR = {torch.float64: 1e-6, torch.float32: 1e-3}  # as which a sum is seen; of other dtypes a twentieth


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two: what runs it, and where its weights are."""

    model: nn.Module
    replay: Replay
    weights: Weights
    batches: Sequence[Any]


class Pass(NamedTuple):
    """The inputs and the residual of a mixture in one batch.

    Attributes:
        path: the module that adds up what experts give: the mixture, or a part of it.
        given: its arguments, ``(args, kwargs)``.
        own: which tokens are no padding; None for all.
        lack: (tokens, width), the residual: dense outputs minus these, for those tokens.
    """

    path: str
    given: tuple[Any, Any]
    own: Tensor | None
    lack: Tensor


@contextlib.contextmanager
def of_model(model: nn.Module, batches: Sequence[Any], forward: Forward | None) -> Iterator[Side]:
    """A model in memory."""
    blocks = parts_of(model)
    with unchanged(model), prepared(model), torch.no_grad():
        replay = Replay(model, blocks, outputs=Outputs(), forward=forward, device=device_of(model))
        with contextlib.ExitStack() as stack:
            stack.callback(replay.clear)
            stack.enter_context(replay.installed())
            yield Side(model, replay, InMemory(blocks), batches)


@contextlib.contextmanager
def of_directory(walk: DirectoryWalk, batches: Sequence[Any]) -> Iterator[Side]:
    """A model whose weights are in files."""
    with walk.replaying(dense=False) as replay, torch.no_grad():
        yield Side(walk.model, replay, walk.weights(), batches)


def runs_again(model: nn.Module, batch: Any, forward: Forward | None) -> str | None:
    """A block that runs more than once in a forward pass, if there is one."""
    calls: dict[str, int] = {}

    def count(name: str) -> None:
        calls[name] = calls.get(name, 0) + 1

    hooks = [
        block.register_forward_pre_hook(lambda *_, name=name: count(name)) for name, block in parts_of(model).items()
    ]
    try:
        with unchanged(model), torch.no_grad():
            on_device = moved(batch, device_of(model))
            run_batch(model, on_device) if forward is None else forward(model, on_device)
    finally:
        for hook in hooks:
            hook.remove()
    return next((name for name, times in calls.items() if times > 1), None)


@dataclass(eq=False)
class Beside:
    """The walk over both.

    Attributes:
        dense: the model as it was.
        small: the one of fewer experts.
        groups: of its mixtures.
        folder: for what is kept of a block's tokens; None: memory.
    """

    dense: Side
    small: Side
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
            block = next((each for each in self.small.replay.blocks if _is_in(path, each) and path != each), None)
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
        dense = run_through(self.dense.replay, self.dense.weights, self.dense.batches, visit=self._look)

        def follow(name: str) -> None:
            if next(dense, None) != name:
                raise ValueError(f"{name} is not what the dense model runs next; pass batches of one kind.")

        def visit(name: str) -> None:
            if name in self._inside and name not in already:
                change(name, self._inside[name])

        try:
            yield from run_through(
                self.small.replay, self.small.weights, self.small.batches, before=follow, visit=visit
            )
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
                wanted = self.dense.replay.outputs.load(name, number)
                lack = output_rows(_wide(wanted), own).to(_rows(whole).device) - output_rows(_wide(whole), own)
            else:
                wanted = self._wanted.load(group.name, number)
                lack = output_rows(wanted, own).to(_rows(output).device) - output_rows(_wide(output), own)
            yield Pass(path, given, own, lack)

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
    side: Side, number: int, batch: Any, name: str, path: str, move: Callable[[Any], Any] | None = None
) -> tuple[tuple[Any, Any], Any, Any]:
    """A batch through a block: what the mixture in it is given, and gives, and what the block gives."""
    seen: list[Any] = []

    def see(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        seen.append((mapped((args, kwargs), lambda tensor: tensor.detach().clone()), output))
        return None if move is None else move(output)

    def handle(reached: str, _args: Any, _kwargs: Any, call: Callable[[], Any]) -> None:
        if reached == name:
            seen.append(call())

    hook = side.model.get_submodule(path).register_forward_hook(see, with_kwargs=True)
    try:
        side.replay.run(number, batch, handle)
    finally:
        hook.remove()
    if len(seen) != 2:
        raise ValueError(f"batch {number} does not run {path} once, as the first one does; pass batches of one kind.")
    (given, output), whole = seen
    return given, output, whole


def _adds_up(side: Side, name: str, path: str) -> bool:
    """Whether a block's outputs move as those of a mixture in it do, by so much."""
    batch = side.batches[0]
    _, output, whole = _through(side, 0, batch, name, path)
    before, rows = _wide(output), _wide(whole)
    if before.numel() != rows.numel() or before.shape[-1] != rows.shape[-1]:
        return False
    # as large as what it is added to, whose rounding is no sign of anything
    size = float(max(before.square().mean(), rows.square().mean()).sqrt()) or 1.0
    way = size * signs(before.shape[-1]).to(before)

    def move(given: Any) -> Any:
        first = next(tensor for tensor in tensors_in(given) if tensor.is_floating_point())
        return mapped(given, lambda tensor: (tensor + way.to(tensor.dtype)) if tensor is first else tensor)

    _, _, moved_by = _through(side, 0, batch, name, path, move)
    off = (_wide(moved_by) - rows - way).abs().mean() / size
    return bool(off < _NEAR.get(next(iter(tensors_in(output))).dtype, 0.05))


def new_values(model: nn.Module, block: str, names: Sequence[str]) -> Mapping[str, Tensor]:
    """The values of parameters, by their names in a block."""
    start = f"{block}." if block else ""
    return {name.removeprefix(start): model.get_parameter(name).detach() for name in names}
