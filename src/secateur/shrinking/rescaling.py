"""Re-fits the weights and biases of normalizations whose width lost entries, so that the other entries keep their
scale.

Law: normalizations are found by what they compute, never by their class; others do not change; on the calibration, the
outputs are nearer to the dense ones afterwards. Of entries that were zero nothing is seen any more, but for rounding
and what is added to a variance. In a directory it is the same, with the weights of a block in memory.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.blockwise import DirectoryWalk, RunAlong, Tokens, full_name, gathered
from secateur.shrinking.execution import carry_out
from secateur.shrinking.plan import Plan
from secateur.support import Forward, device_of, in_mode, moved, run_batch, track, unchanged

__all__ = ["rescale", "rescaled_in_directory"]


@dataclass(frozen=True)
class _Sums:
    """Over tokens, (entries,), float64: of g, the factor of a weight; of e, the residual of the outputs; of g·g and
    of g·e."""

    tokens: int
    values: Tensor

    def plus(self, other: _Sums | None) -> _Sums:
        return self if other is None else _Sums(self.tokens + other.tokens, self.values + other.values)


@dataclass(eq=False)
class _Norm:
    """A module that multiplies each entry of a width by its own weight; ``smaller`` is what the plan leaves of it."""

    module: nn.Module
    smaller: nn.Module
    kept: Tensor
    sums: _Sums | None = None

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
        self.sums = _Sums(len(rows), more).plus(self.sums)


def _settled(own: Mapping[str, Tensor], kept: Tensor, sums: _Sums | None) -> dict[str, Tensor]:
    """Least squares for each entry by itself, the constant going to the bias, if there is one; nothing where a sum is
    not finite."""
    if sums is None or not bool(sums.values.isfinite().all()):
        return {}
    slope, lack, squares, products = sums.values
    if "bias" in own:
        squares, products = squares - slope * slope / sums.tokens, products - slope * lack / sums.tokens
    more = torch.where(squares > 1e-12 * sums.values[2], products / squares, 0.0)
    new = {key: each.clone() for key, each in own.items()}
    new["weight"][kept] += more.to(new["weight"].dtype)
    if "bias" in own:
        new["bias"][kept] += ((lack - more * slope) / sums.tokens).to(new["bias"].dtype)
    return new


def rescale(model: nn.Module, plan: Plan, batches: Sequence[Any], *, forward: Forward | None = None) -> None:
    """Moves the weights and biases of modules over a width of which the plan takes entries; it is not carried out yet.

    One pass over the batches, where there are such modules. The model computes with the whole width meanwhile.
    """
    norms = [norm for path in _along_widths(model, plan) if (norm := _norm_at(model, path, plan)) is not None]
    if not norms:
        return
    tokens = Tokens()

    def see(norm: _Norm, _: nn.Module, given: Any, output: Any) -> None:
        if _is_seen(given, output):
            norm.see(given[0], output, tokens.own)

    with unchanged(model), in_mode(model, training=False), torch.no_grad(), contextlib.ExitStack() as stack:
        for norm in norms:
            stack.callback(norm.module.register_forward_hook(functools.partial(see, norm)).remove)
        for batch in track(list(batches), "looking at normalizations"):
            tokens = Tokens.of(batch)
            run_batch(model, moved(batch, device_of(model)), forward)
    with torch.no_grad():
        for norm in norms:
            own = _own(norm.module)
            for key, value in _settled(own, norm.kept, norm.sums).items():
                own[key].copy_(value)


def rescaled_in_directory(place: DirectoryWalk, plan: Plan) -> dict[str, Tensor]:
    """What `rescale` would make of normalizations, ``{name: values}``, of a model whose weights lie in the copy that is
    written: one pass, block by block. Their own weights are still those of the source, whatever the copy has.

    The same on all processes.
    """
    paths = list(_along_widths(place.model, plan))
    if not paths:
        return {}
    found: dict[str, tuple[dict[str, Tensor], Tensor, _Sums | None]] = {}
    norms: dict[str, _Norm | None] = {}
    seen: dict[str, set[int]] = {path: set() for path in paths}
    dense = {place.model.get_submodule(path) for path in paths}
    with place.running(written=True, dense=dense) as (replay, blocks):

        def see(path: str, module: nn.Module, given: Any, output: Any) -> None:
            number = replay.at
            if number in seen[path] or isinstance(place.batches, RunAlong):
                return  # what lies outside of blocks runs again for each of them
            seen[path].add(number)
            if path not in norms:
                norms[path] = norm = _norm_at(place.model, path, plan)
                if norm is not None:
                    found[path] = {key: each.clone() for key, each in _own(module).items()}, norm.kept, None
            norm = norms[path]
            if norm is not None and _is_seen(given, output):
                norm.see(given[0], output, Tokens.of(place.batches[number]).own)

        with contextlib.ExitStack() as stack:
            for path in paths:
                hook = place.model.get_submodule(path).register_forward_hook(functools.partial(see, path))
                stack.callback(hook.remove)
            for _ in blocks:
                pass
    for path, norm in norms.items():
        if norm is not None:
            found[path] = (*found[path][:2], norm.sums)
    new: dict[str, Tensor] = {}
    everyone = gathered(found)
    for path in sorted({path for each in everyone for path in each}):
        seen_by = [each[path] for each in everyone if path in each]
        sums: _Sums | None = None
        for _, _, its in seen_by:
            sums = sums if its is None else its.plus(sums)
        own, kept, _ = seen_by[0]
        new |= {full_name(path, key): value for key, value in _settled(own, kept, sums).items()}
    return new


def _is_seen(given: Any, output: Any) -> bool:
    """Whether a module was given one tensor and gave another of its shape."""
    return (
        bool(given) and isinstance(given[0], Tensor) and isinstance(output, Tensor) and given[0].shape == output.shape
    )


def _along_widths(model: nn.Module, plan: Plan) -> Iterator[str]:
    """The paths of modules whose own tensors are a weight, and a bias, along a width of which entries leave."""
    for path, module in model.named_modules():
        own = _own(module)
        names = [full_name(path, key) for key in own]
        if "weight" not in own or own.keys() - {"weight", "bias"} or any(module.children()):
            continue
        if any(each.dim() != 1 for each in own.values()) or any(True for _ in module.buffers()):
            continue
        if not all(name in plan.tensors and 0 in plan.tensors[name][1] for name in names):
            continue
        cuts = [plan.tensors[name][1][0] for name in names]
        if all(np.array_equal(cuts[0], each) for each in cuts):
            yield path


def _norm_at(model: nn.Module, path: str, plan: Plan) -> _Norm | None:
    """The module there, if its outputs change with what is counted."""
    module = model.get_submodule(path)
    names = {key: full_name(path, key) for key in _own(module)}
    kept = torch.as_tensor(plan.tensors[names["weight"]][1][0], device=_own(module)["weight"].device)
    norm = _Norm(module, _smaller(module, path, names, plan), kept)
    return norm if _counts(norm) else None


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
