"""Repair after residual branches left: the weights before them are fitted to what the branches added.

Law: a patch is merged into a weight that is there already, so that nothing is computed in addition; on the calibration
the stream is nearer to the dense model's with it, and the outputs no further; where that is not so, there is none.
Sums are in float64 and rounded once.

A matrix W whose outputs are added to the stream becomes ``W + Δ``, and ``X Δᵀ + b`` is fitted by least squares
to the residual: the dense stream behind the branches minus the present one; b only where there is a bias. ReplaceMe
(arXiv:2505.02819) looks for ``T`` with ``Δ = T W - W``, which is among these. Where the stream is normalized (BERT),
each of its channels is scaled and moved by the scales of the normalization, as LinearPatch (arXiv:2505.24680) does with
a matrix of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from secateur.blockwise import parts_of, walk_model
from secateur.coupling import Branch
from secateur.shrinking.following import Following
from secateur.shrinking.output_costs import OutputCosts, running
from secateur.shrinking.seams import Place, Seam, Stream, rows_of
from secateur.solvers import aimed
from secateur.support import Forward, Undo, device_of, moved, track

__all__ = ["DAMPINGS", "MatrixPatch", "ScalePatch", "Solver", "add_batch", "new_values", "patch", "solver_of"]

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
            walk_model(model, batches, job, forward=forward)
            if costs.now(stream.without) > cost:
                _write(model, now_there)
            _write(model, {name: now_there[name] for name in zeros})
    return found


def _following(
    model: nn.Module, zeros: Sequence[str], patched: Mapping[str, Tensor], behind: Sequence[str]
) -> Following | None:
    """The walk that makes what is behind follow the dense stream; None where it goes through none of that, or not
    through all that changes."""
    blocks = tuple(f"{name}." if name else "" for name in parts_of(model))
    given = {name: torch.zeros_like(model.get_parameter(name)) for name in zeros} | dict(patched)
    moved_on = [name for name in behind if name not in given and name.startswith(blocks)]
    return Following(given, moved_on) if moved_on and all(name.startswith(blocks) for name in given) else None


def _write(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).copy_(value)


def _solved(
    model: nn.Module, stream: Stream, seam: Seam, batches: Sequence[Any], dense: Sequence[Mapping[int, Tensor]]
) -> tuple[dict[str, Tensor], float]:
    """New values, if they help."""
    place = seam.place
    weight = model.get_parameter(place.weight).detach()
    bias = None if place.bias is None else model.get_parameter(place.bias).detach()
    solver = solver_of(place, weight, bias)
    with running(model):
        for number, (batch, wanted) in enumerate(zip(batches, dense, strict=True)):
            inputs, rows, index = stream.met(batch, seam)
            lack = rows_of(wanted[seam.final], turned=place.turned).double() - rows.double()
            lack = lack if index is None else lack[index]
            add_batch(solver, inputs, lack, number, len(batches))
    return new_values(place, weight, solver)


def solver_of(place: Place, weight: Tensor, bias: Tensor | None) -> Solver:
    """What finds new values for a weight and its bias."""
    return ScalePatch(weight, bias) if place.piece is None else MatrixPatch(place.piece.of(weight), bias)


def add_batch(solver: Solver, inputs: Iterator[Tensor], lack: Tensor, number: int, count: int) -> None:
    """Adds one of so many batches: the inputs of a place, in parts, and the residual behind it; some rows are held
    out.
    """
    for part, lacks in _together(inputs, lack):
        if count >= _HELD_OUT:
            solver.add(part, lacks, held_out=number % _HELD_OUT == _HELD_OUT - 1)
            continue
        held = torch.arange(len(part), device=part.device) % _HELD_OUT == _HELD_OUT - 1
        for is_held in (False, True):
            solver.add(part[held == is_held], lacks[held == is_held], held_out=is_held)


def new_values(place: Place, weight: Tensor, solver: Solver) -> tuple[dict[str, Tensor], float]:
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


def _together(inputs: Iterator[Tensor], lack: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    done = 0
    for part in inputs:
        yield part.double(), lack[done : done + len(part)]
        done += len(part)


class Solver(Protocol):
    def add(self, inputs: Tensor, lack: Tensor, *, held_out: bool) -> None:
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
    lacks: Tensor
    squares: float = 0.0
    count: int = 0

    @classmethod
    def zeros(cls, *shapes: tuple[int, ...], like: Tensor) -> _Sums:
        gram, cross, inputs, lacks = (torch.zeros(each, dtype=torch.float64, device=like.device) for each in shapes)
        return cls(gram, cross, inputs, lacks)

    def add(self, gram: Tensor, cross: Tensor, inputs: Tensor, lacks: Tensor) -> None:
        """Of some rows."""
        self.gram += gram
        self.cross += cross
        self.inputs += inputs.sum(0)
        self.lacks += lacks.sum(0)
        self.squares += float(lacks.square().sum())
        self.count += len(lacks)

    def plus(self, other: _Sums) -> _Sums:
        return _Sums(
            self.gram + other.gram,
            self.cross + other.cross,
            self.inputs + other.inputs,
            self.lacks + other.lacks,
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

    def add(self, inputs: Tensor, lack: Tensor, *, held_out: bool) -> None:
        self.sums[held_out].add(inputs.T @ inputs, lack.T @ inputs, inputs, lack)

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
            cross = cross - torch.outer(sums.lacks, mean)
            gram.diagonal().clamp_(min=0)  # what is constant is rounding
        change = aimed(torch.zeros_like(cross), cross, gram=gram, damping=damping)
        shift = (sums.lacks - change @ sums.inputs) / sums.count
        return change, shift if self.bias is not None else torch.zeros_like(shift)

    def _error(self, sums: _Sums, change: Tensor, shift: Tensor) -> float:
        """The squared residual that is left with it."""
        cross = sums.cross - torch.outer(shift, sums.inputs)
        both = (change @ sums.gram * change).sum() - 2 * (change * cross).sum()
        constant = sums.count * shift.square().sum() - 2 * (shift * sums.lacks).sum()
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

    def add(self, inputs: Tensor, lack: Tensor, *, held_out: bool) -> None:
        self.sums[held_out].add(inputs.square().sum(0), (inputs * lack).sum(0), inputs, lack)

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
            cross = cross - sums.inputs * sums.lacks / sums.count
        least = 1e-9 * sums.gram + torch.finfo(torch.float64).tiny
        more = torch.where(gram > least, cross / gram.clamp_min(least), 0.0)
        shift = (sums.lacks - more * sums.inputs) / sums.count
        return more, shift if self.bias is not None else torch.zeros_like(shift)

    @staticmethod
    def _error(sums: _Sums, more: Tensor, shift: Tensor) -> float:
        cross = sums.cross - shift * sums.inputs
        found = more.square() * sums.gram - 2 * more * cross + sums.count * shift.square() - 2 * shift * sums.lacks
        return max(0.0, sums.squares + float(found.sum()))
