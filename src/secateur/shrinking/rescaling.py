"""Normalizations over a width that lost entries: their weights and biases move so that what stays keeps its scale.

Law: told by what a module computes, never by its class; where nothing is counted, nothing moves; what stays is nearer
to what it was than before, on the calibration. Of entries that were zero nothing is seen any more, but for rounding and
what is added to a variance.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.blockwise import Tokens
from secateur.shrinking.execution import carry_out
from secateur.shrinking.plan import Plan
from secateur.support import Forward, device_of, in_mode, moved, run_batch, track, unchanged

__all__ = ["rescale"]


@dataclass(eq=False)
class _Norm:
    """A module that multiplies each entry of a width by its own weight; ``smaller`` is what the plan leaves of it.

    Sums over tokens, (entries,), float64: g, what a weight is multiplied with; e, what the outputs lack.
    """

    module: nn.Module
    smaller: nn.Module
    kept: Tensor
    tokens: int = 0
    sums: Tensor | None = None  # of g, e, g·g and g·e

    def see(self, x: Tensor, y: Tensor, own: Tensor | None) -> None:
        rows, wanted = (each.detach().reshape(-1, each.shape[-1])[:, self.kept].double() for each in (x, y))
        if own is not None and own.numel() == len(rows):
            index = own.reshape(-1).to(rows.device)
            rows, wanted = rows[index], wanted[index]
        weight = _own(self.smaller)["weight"]
        found = self.smaller(rows)
        before = weight.clone()
        weight += 1
        slope = self.smaller(rows) - found
        weight.copy_(before)
        lack = wanted - found
        more = torch.stack([each.sum(0) for each in (slope, lack, slope * slope, slope * lack)])
        self.sums = more if self.sums is None else self.sums + more
        self.tokens += len(rows)

    def settle(self) -> None:
        """Least squares for each entry by itself, with what is constant in the bias, if there is one."""
        if self.sums is None or not bool(self.sums.isfinite().all()):
            return
        slope, lack, squares, products = self.sums
        own = _own(self.module)
        if "bias" in own:
            squares, products = squares - slope * slope / self.tokens, products - slope * lack / self.tokens
        moved = torch.where(squares > 1e-12 * self.sums[2], products / squares, 0.0)
        own["weight"][self.kept] += moved.to(own["weight"].dtype)
        if "bias" in own:
            own["bias"][self.kept] += ((lack - moved * slope) / self.tokens).to(own["bias"].dtype)


def rescale(model: nn.Module, plan: Plan, batches: Sequence[Any], *, forward: Forward | None = None) -> None:
    """Moves the weights and biases of modules over a width of which the plan takes entries; it is not carried out yet.

    One pass over the batches, where there are such modules. The model computes with the whole width meanwhile.
    """
    norms = list(_norms(model, plan))
    if not norms:
        return
    tokens = Tokens()

    def see(norm: _Norm, _: nn.Module, given: Any, output: Any) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(output, Tensor) and given[0].shape == output.shape:
            norm.see(given[0], output, tokens.own)

    with unchanged(model), in_mode(model, training=False), torch.no_grad(), contextlib.ExitStack() as stack:
        for norm in norms:
            stack.callback(norm.module.register_forward_hook(functools.partial(see, norm)).remove)
        for batch in track(list(batches), "looking at normalizations"):
            tokens = Tokens.of(batch)
            run_batch(model, moved(batch, device_of(model)), forward)
    with torch.no_grad():
        for norm in norms:
            norm.settle()


def _norms(model: nn.Module, plan: Plan) -> Iterator[_Norm]:
    """Modules whose own tensors are a weight, and a bias, along a width of which entries leave, and whose outputs
    change with what is counted."""
    for path, module in model.named_modules():
        own = _own(module)
        names = {key: f"{path}.{key}" if path else key for key in own}
        if "weight" not in own or own.keys() - {"weight", "bias"} or any(module.children()):
            continue
        if any(each.dim() != 1 for each in own.values()) or any(True for _ in module.buffers()):
            continue
        if not all(name in plan.tensors and 0 in plan.tensors[name][1] for name in names.values()):
            continue
        cuts = [plan.tensors[name][1][0] for name in names.values()]
        if all(np.array_equal(cuts[0], each) for each in cuts):
            kept = torch.as_tensor(cuts[0], device=own["weight"].device)
            norm = _Norm(module, _smaller(module, path, names, plan), kept)
            if _counts(norm):
                yield norm


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {key: each.detach() for key, each in module.named_parameters(recurse=False)}


def _smaller(module: nn.Module, path: str, names: dict[str, str], plan: Plan) -> nn.Module:
    """A copy of a module as the plan leaves it."""
    holder = nn.Module()
    holder.add_module("it", copy.deepcopy(module))
    tensors = {f"it.{key}": plan.tensors[name] for key, name in names.items()}
    numbers = [(("it", *place[1:]), old, new) for place, old, new in plan.numbers if place[0] == path]
    carry_out(holder, Plan(tensors, numbers), None)
    return holder.get_submodule("it").double().eval()


def _counts(norm: _Norm) -> bool:
    """Whether it is a normalization over its last dimension: of entries that are all alike the others see each one."""
    size = len(_own(norm.module)["weight"])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, size, generator=generator).to(_own(norm.module)["weight"])
    try:
        with torch.no_grad(), in_mode(norm.module, training=False):
            whole, part = norm.module(x)[:, norm.kept].double(), norm.smaller(x[:, norm.kept].double())
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False  # it wants something else
    return whole.shape == part.shape and not torch.allclose(whole, part, rtol=1e-2, atol=1e-2)
