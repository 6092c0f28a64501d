"""Experts that stay take over what others gave: least squares of their last matrices, from their tokens.

Law: nothing but these matrices changes, and a mixture stays as it is unless its outputs come nearer to the aim.

A mixture's outputs are linear in its experts' last matrices together, each times its weight. So conjugate gradients
find them from the mixture's own code alone: products with what the experts give are runs of it, and their transposes
gradients. Few steps are taken, which damps as a ridge does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise import Tokens, prepared
from secateur.coupling import Coupling, Group
from secateur.shrinking.routing import last_matrices, mixture_of
from secateur.support import Forward, Undo, device_of, mapped, moved, run_batch, tensors_in, track, unchanged

__all__ = ["repair_mixtures"]

_AIM = 0.5  # of the way to what the dense mixture gave, as elsewhere
_STEPS = 24


def repair_mixtures(
    model: nn.Module,
    dense: nn.Module,
    coupling: Coupling,
    groups: Sequence[Group],
    batches: Sequence[Any],
    *,
    forward: Forward | None,
    undo: Undo,
) -> None:
    """Of a model of which experts left, beside the one that it was; ``coupling`` and ``groups`` are of the former."""
    for group in track(groups, "repairing mixtures"):
        path, module = mixture_of(model, group)
        given, wanted = _runs(model, path, batches, forward), _runs(dense, path, batches, forward)
        parts = last_matrices(model, coupling, group, given[0][0])
        if not parts or any(each.dtype not in (torch.float32, torch.float64) for each in parts):
            continue  # half precision has no room for steps
        undo.values(*parts)
        rows = [(_rows(out, own), _rows(to, own)) for (_, out, own), (_, to, _) in zip(given, wanted, strict=True)]
        _solve(module, parts, rows, given)


def _runs(model: nn.Module, path: str, batches: Sequence[Any], forward: Forward | None) -> list[tuple[Any, Any, Any]]:
    """What a mixture is given and gives, and which tokens are no padding, for each batch."""
    found: list[tuple[Any, Any, Any]] = []
    tokens = Tokens()

    def see(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        held = mapped((args, kwargs), lambda tensor: tensor.detach().clone())
        found.append((held, mapped(out, lambda tensor: tensor.detach().clone()), tokens.own))

    hook = model.get_submodule(path).register_forward_hook(see, with_kwargs=True)
    try:
        with unchanged(model), prepared(model), torch.no_grad():
            for batch in batches:
                tokens = Tokens.of(batch)
                on_device = moved(batch, device_of(model))
                run_batch(model, on_device) if forward is None else forward(model, on_device)
    finally:
        hook.remove()
    return found


def _rows(output: Any, own: Tensor | None) -> Tensor:
    out: Tensor = next(tensor for tensor in tensors_in(output) if tensor.is_floating_point())
    rows = out.reshape(-1, out.shape[-1])
    return rows if own is None or own.numel() != len(rows) else rows[own.reshape(-1).to(rows.device)]


def _solve(
    module: nn.Module,
    parts: Sequence[nn.Parameter],
    rows: Sequence[tuple[Tensor, Tensor]],
    given: Sequence[tuple[Any, Any, Any]],
) -> None:
    start = [each.detach().clone() for each in parts]

    def outputs(at: int) -> Tensor:
        (args, kwargs), _, own = given[at]
        args, kwargs = mapped((args, kwargs), lambda tensor: tensor.clone())
        return _rows(module.forward(*args, **kwargs), own)

    def put(values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for part, value in zip(parts, values, strict=True):
                part.copy_(value)

    def back(lacks: Sequence[Tensor]) -> list[Tensor]:
        """The transposed product: the gradient of the outputs along what lacks."""
        total = [torch.zeros_like(each) for each in start]
        for at in range(len(rows)):
            with torch.enable_grad():
                along = (outputs(at) * lacks[at]).sum()
            for each, more in zip(total, torch.autograd.grad(along, list(parts)), strict=True):
                each += more
        return total

    asks = [part.requires_grad for part in parts]
    try:
        for part in parts:
            part.requires_grad_(True)
        with prepared(module):
            lacks = [_AIM * (wanted - out) for out, wanted in rows]
            gradient = back(lacks)
            change, way = [torch.zeros_like(each) for each in start], gradient
            size = _dot(gradient, gradient)
            for _ in range(_STEPS):
                if not size > 0:
                    break
                put([each + one for each, one in zip(start, way, strict=True)])
                with torch.no_grad():
                    moves = [outputs(at) - rows[at][0] for at in range(len(rows))]
                energy = sum(float(each.double().square().sum()) for each in moves)
                if not energy > 0:
                    break
                step = size / energy
                change = [each + step * one for each, one in zip(change, way, strict=True)]
                lacks = [lack - step * move for lack, move in zip(lacks, moves, strict=True)]
                put(start)
                gradient = back(lacks)
                last, size = size, _dot(gradient, gradient)
                way = [each + size / last * one for each, one in zip(gradient, way, strict=True)]
            put([each + one for each, one in zip(start, change, strict=True)])
            with torch.no_grad():
                lacks = [outputs(at) - out - _AIM * (to - out) for at, (out, to) in enumerate(rows)]
            after = sum(float(each.square().sum()) for each in lacks)
            before = sum(float((_AIM * (to - out)).square().sum()) for out, to in rows)
            if not after < before:
                put(start)
    except BaseException:
        put(start)
        raise
    finally:
        for part, asked in zip(parts, asks, strict=True):
            part.requires_grad_(asked)


def _dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(one, other, strict=True))
