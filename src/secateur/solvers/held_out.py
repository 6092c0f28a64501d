"""Least squares whose damping is the one that is best on rows that were held out, a quarter of all.

Law: what was found is better than nothing on the rows held out, or there is none; it is then fitted to all rows. Sums
are in float64, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from secateur.solvers.elimination import aimed

UNSEEN = 4  # every fourth batch is held out, or every fourth row where there are fewer batches
At = TypeVar("At", int, Tensor)


def is_held_out(at: At) -> bool | Tensor:
    """Whether the batch, or the row, of this number is held out.

    >>> [at for at in range(9) if is_held_out(at)]
    [3, 7]
    """
    return at % UNSEEN == UNSEEN - 1


def best_damping(
    dampings: Iterable[float], error: Callable[[float], float], before: float
) -> tuple[float, float] | None:
    """The damping that leaves least on what was held out, and its error; None where none leaves less than ``before``.

    >>> best_damping((0.1, 1.0), lambda damping: damping * 4, 2.0)
    (0.1, 0.4)
    >>> best_damping((0.1, 1.0), lambda damping: math.nan, 2.0) is None
    True
    """
    errors = {damping: found for damping in dampings if (found := error(damping)) < before}
    best = min(errors, key=errors.__getitem__, default=math.nan)
    return (best, errors[best]) if errors else None


@dataclass(eq=False)
class RowSums:
    """Sums over rows of inputs x and of the residual l behind them; of scales, each channel's own."""

    gram: Tensor
    cross: Tensor
    inputs: Tensor
    residuals: Tensor
    squares: float = 0.0
    count: int = 0

    @classmethod
    def zeros(cls, *shapes: tuple[int, ...], device: torch.device) -> RowSums:
        gram, cross, inputs, residuals = (torch.zeros(each, dtype=torch.float64, device=device) for each in shapes)
        return cls(gram, cross, inputs, residuals)

    def add(self, gram: Tensor, cross: Tensor, inputs: Tensor, residuals: Tensor) -> None:
        """Of some rows."""
        self.gram += gram
        self.cross += cross
        self.inputs += inputs.sum(0)
        self.residuals += residuals.sum(0)
        self.squares += float(residuals.square().sum())
        self.count += len(residuals)

    def plus(self, other: RowSums) -> RowSums:
        return RowSums(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))


class Fit:
    """Least squares for a matrix (outputs, inputs) and its bias, damped; the residual is of its outputs.

    >>> x = torch.randn(64, 3, dtype=torch.float64)
    >>> residual = x @ torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64).T
    >>> fit = Fit(torch.ones(1, 3), None)
    >>> fit.add(x[:48], residual[:48], held_out=False); fit.add(x[48:], residual[48:], held_out=True)
    >>> fit.solved()[0][0].round(decimals=4)
    tensor([[2., 1., 3.]])
    """

    dampings: tuple[float, ...] = (1e-7, 1e-3, 1e-2, 1e-1, 1.0)  # of the mean diagonal

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.sums = [RowSums.zeros(*self._shapes(weight.shape), device=weight.device) for _ in range(2)]

    def add_batch(self, inputs: Iterable[Tensor], residual: Tensor, number: int, count: int) -> None:
        """Adds one of so many batches: the rows of inputs, in parts, and the residual behind all of them."""
        done = 0
        for part in inputs:
            x, behind = part.double(), residual[done : done + len(part)]
            done += len(part)
            if count >= UNSEEN:
                self.add(x, behind, held_out=bool(is_held_out(number)))
                continue
            held = torch.as_tensor(is_held_out(torch.arange(len(x), device=x.device)))
            for which in (False, True):
                self.add(x[held == which], behind[held == which], held_out=which)

    def add(self, inputs: Tensor, residual: Tensor, *, held_out: bool) -> None:
        """More rows, in float64."""
        self.sums[held_out].add(*self._products(inputs, residual), inputs, residual)

    def solved(self) -> tuple[tuple[Tensor, Tensor | None] | None, float]:
        """The new weight and the new bias, in their dtypes, and the share of the squared residual that they recover;
        None where nothing is better."""
        seen, unseen = self.sums
        if not seen.count or not unseen.count:
            return None, 0.0
        best = best_damping(self.dampings, lambda each: self._error(unseen, *self._change(seen, each)), unseen.squares)
        if best is None:
            return None, 0.0
        every = seen.plus(unseen)
        change, shift = self._change(every, best[0])
        weight, bias = self._moved(change, shift)
        new, moved = weight.to(self.weight.dtype), None
        if self.bias is not None and bias is not None:
            moved = bias.to(self.bias.dtype)
        if not all(bool(each.isfinite().all()) for each in (new, moved) if each is not None):
            return None, 0.0
        share = 1 - self._error(every, *self._rounded(new, moved, shift)) / every.squares
        return ((new, moved), share) if share > 0 else (None, 0.0)

    def _moved(self, change: Tensor, shift: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with the change."""
        return self.weight.double() + change, None if self.bias is None else self.bias.double() + shift

    def _rounded(self, new: Tensor, moved: Tensor | None, shift: Tensor) -> tuple[Tensor, Tensor]:
        """The change that is left of it in the weight's dtype."""
        left = shift if self.bias is None or moved is None else moved.double() - self.bias.double()
        return new.double() - self.weight.double(), left

    @staticmethod
    def _shapes(shape: torch.Size) -> tuple[tuple[int, ...], ...]:
        outputs, inputs = shape
        return (inputs, inputs), (outputs, inputs), (inputs,), (outputs,)

    @staticmethod
    def _products(inputs: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return inputs.T @ inputs, residual.T @ inputs

    def _change(self, sums: RowSums, damping: float) -> tuple[Tensor, Tensor]:
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

    @staticmethod
    def _error(sums: RowSums, change: Tensor, shift: Tensor) -> float:
        """The squared residual that is left with it."""
        cross = sums.cross - torch.outer(shift, sums.inputs)
        both = (change @ sums.gram * change).sum() - 2 * (change * cross).sum()
        constant = sums.count * shift.square().sum() - 2 * (shift * sums.residuals).sum()
        return max(0.0, sums.squares + float(both + constant))


class ScaleFit(Fit):
    """Least squares for the scales and the shifts of channels, each by itself; the inputs are what they give.

    >>> x = torch.randn(64, 2, dtype=torch.float64)
    >>> fit = ScaleFit(torch.ones(2), torch.zeros(2))
    >>> fit.add(x[:48], x[:48] + 1, held_out=False); fit.add(x[48:], x[48:] + 1, held_out=True)
    >>> [each.round(decimals=4) for each in fit.solved()[0]]
    [tensor([2., 2.]), tensor([1., 1.])]
    """

    dampings = (0.0,)

    def _moved(self, change: Tensor, shift: Tensor) -> tuple[Tensor, Tensor | None]:
        weight = self.weight.double() * (1 + change)
        return weight, None if self.bias is None else self.bias.double() * (1 + change) + shift

    def _rounded(self, new: Tensor, moved: Tensor | None, shift: Tensor) -> tuple[Tensor, Tensor]:
        old = self.weight.double()
        change = torch.where(old == 0, 0.0, (new.double() - old) / old)
        left = shift if self.bias is None or moved is None else moved.double() - self.bias.double() * (1 + change)
        return change, left

    @staticmethod
    def _shapes(shape: torch.Size) -> tuple[tuple[int, ...], ...]:
        return (tuple(shape),) * 4

    @staticmethod
    def _products(inputs: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return inputs.square().sum(0), (inputs * residual).sum(0)

    def _change(self, sums: RowSums, damping: float) -> tuple[Tensor, Tensor]:  # noqa: ARG002
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
    def _error(sums: RowSums, change: Tensor, shift: Tensor) -> float:
        cross = sums.cross - shift * sums.inputs
        found = (
            change.square() * sums.gram - 2 * change * cross + sums.count * shift.square() - 2 * shift * sums.residuals
        )
        return max(0.0, sums.squares + float(found.sum()))
