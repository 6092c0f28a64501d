"""For each token the inputs of each expert's last matrix, and the weight with which its output is summed.

Law: for the tokens that are no padding, a mixture's outputs are the sum over rows of ``weight * matrix @ features``,
and a term that does not depend on the last matrices; any other mixture has no rows.
The mixture's own code shows which token a row belongs to: the output gradient encodes the token's number, a binary
digit a column, so that one backward pass gives the weight and the number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise import Piece, Products, Tokens
from secateur.coupling import Group
from secateur.shrinking.routing import mixture_of
from secateur.support import mapped, tensors_in

__all__ = ["ExpertRows", "output_rows", "places_of", "rows_of_experts"]

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
    piece: Piece
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


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


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
        self.leaves: list[tuple[Tensor, list[tuple[Piece, Tensor]]]] = []
        self.now: list[tuple[Piece, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now = []
        out = super().__torch_function__(func, types, args, kwargs)
        met, self.now = self.now, []
        if not met or not isinstance(out, Tensor):
            return out
        leaf = out.detach().requires_grad_()
        self.leaves.append((leaf, met))
        return leaf.clone()  # what the model changes in place is no leaf

    def _met(self, piece: Piece, inputs: Any, key: Any) -> None:
        if (piece, key) not in self.counted:
            self.counted.add((piece, key))
            self.now += [(piece, rows.detach()) for rows in inputs.rows()]


def _unit(piece: Piece, parameter: Tensor) -> int | None:
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
