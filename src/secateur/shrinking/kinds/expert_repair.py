"""Repair of mixtures after experts left: least squares for the last matrices of the experts that stay.

Law: nothing but these matrices changes; they are solved in float64 and rounded once, and a mixture stays as it is
unless the residual of the stream behind it becomes smaller on held-out tokens.

A mixture's outputs are linear in its experts' last matrices together, each times its weight. So the experts are solved
one after the other for the residual of the others, for some rounds: that needs the memory of one expert and of the
tokens' features. The target is the dense model's stream behind the block, so that errors of earlier blocks are
repaired, too; where the mixture's output is not a summand of the stream, the target is that output in the dense model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.coupling import Group
from secateur.models import InMemory, Outputs, Replay, WeightView
from secateur.shrinking.kinds.routing import ExpertRows, PairedBlocks, Pass, rows_of_experts
from secateur.solvers import UNSEEN, best_damping, is_held_out
from secateur.support import Forward, Undo, all_gather, rank_and_world

# Of the mean diagonal: the one that is best on tokens that it did not see. Of 3072 tokens 1e-3 was, of 144 it was 1.
DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)
_ROUNDS = 3  # more brought nothing on a mixture of 4 experts, 2 at a time
OUTSIDE = "it is in none of the blocks, or is one"
_LARGE = 4096  # inputs, from which a Gram matrix is in float32: in float64 it would be larger than the block


@dataclass(frozen=True)
class Mended:
    """The repair of one mixture: the share of the squared residual recovered on held-out tokens; None where it stays as
    it was, and then why."""

    share: float | None
    why: str = ""


@dataclass(eq=False)
class MendedMixtures:
    """Of each mixture, by the name of its router."""

    found: dict[str, Mended] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, float]:
        return {name: each.share for name, each in self.found.items() if each.share is not None}

    @property
    def whole(self) -> dict[str, str]:
        """Those that stay as they were, and why."""
        return {name: each.why for name, each in self.found.items() if each.share is None}


def mend_mixtures(
    model: nn.Module,
    dense: nn.Module,
    groups: Sequence[Group],
    batches: Sequence[Any],
    *,
    forward: Forward | None,
    undo: Undo,
) -> MendedMixtures:
    """Repairs a model of which experts left, beside the one that it was; ``groups`` are of the former."""
    mended = MendedMixtures()
    host, whole = (InMemory(each, batches, forward=forward) for each in (model, dense))
    if (name := host.repeated()) is not None:
        leave_whole(groups, f"{name or 'the model'} runs more than once in a forward pass", mended)
        return mended
    with whole.replaying() as before, host.replaying() as small, torch.no_grad():
        beside = PairedBlocks(before, small, groups)
        leave_whole(beside.outside, OUTSIDE, mended)

        def change(name: str, its: Sequence[Group]) -> None:
            mend(beside, small, name, its, mended, undo=undo)

        for _ in beside.run(change):
            pass
    return mended


def leave_whole(groups: Iterable[Group], why: str, mended: MendedMixtures) -> None:
    """Mixtures of which nothing can change."""
    for group in groups:
        mended.found[group.name] = Mended(None, why)


def mend(
    beside: PairedBlocks,
    side: Replay,
    block: str,
    groups: Iterable[Group],
    done: MendedMixtures,
    *,
    undo: Undo | None = None,
    folder: Path | None = None,
) -> list[str]:
    """Solves the mixtures of a block whose weights are there, and puts the new values in place; the names of the
    parameters that changed."""
    changed: list[str] = []
    for group in groups:
        kept = _Kept(Outputs(folder, "experts"))
        try:
            why = kept.learn(beside.passes(block, group), side.model, group)
            done.found[group.name] = Mended(None, why) if why else _solved(kept, side.model, undo)
            if done.found[group.name].share is not None:
                changed += sorted({piece.name for piece in kept.pieces})
        finally:
            kept.store.clear()
    return changed


@dataclass(eq=False)
class _Kept:
    """Features, weights and residuals of the tokens of a mixture."""

    store: Outputs
    rows: list[list[ExpertRows]] = field(default_factory=list)  # of each batch, without features
    residual: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float32, device="cpu"))
    unseen: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float32, device="cpu"))
    pieces: list[WeightView] = field(default_factory=list)

    def learn(self, passes: Iterable[Pass], model: nn.Module, group: Group) -> str:
        """Goes through the batches; why nothing can be done, or nothing."""
        residuals, first = [], 0
        why = ""
        for number, each in enumerate(passes):
            found = None if why else rows_of_experts(model, group, each.given, each.own, each.path)
            if found is None:
                why = why or "what its experts give is not added up as it is"
                continue  # other processes wait for as many steps
            self.store.save("rows", number, [one.features for one in found])
            empty = torch.zeros(0, dtype=torch.float32, device="cpu")
            self.rows.append([ExpertRows(one.unit, one.piece, one.tokens + first, one.weights, empty) for one in found])
            residuals.append(each.residual)
            first += len(each.residual)
        whys = [each for each in all_gather(why) if each]
        if whys:
            return str(whys[0])
        self.residual = torch.cat(residuals)
        if not bool(self.residual.isfinite().all()):
            why = "what it gives, or should give, holds NaN or infinity"
        self.unseen = _held_out(residuals)
        mine = {one.piece for its in self.rows for one in its}
        self.pieces = sorted({piece for its in all_gather(sorted(mine)) for piece in its})
        whys = [each for each in all_gather(why) if each]
        return str(whys[0]) if whys else ""

    def of(self, piece: WeightView, these: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The features of one matrix times their weights, (rows, inputs), and their tokens; of ``these`` tokens."""
        found, tokens = [], []
        for number, its in enumerate(self.rows):
            features = self.store.load("rows", number)
            for at, one in enumerate(its):
                if one.piece != piece:
                    continue
                keep = slice(None) if these is None else these[one.tokens]
                whole = ExpertRows(one.unit, piece, one.tokens[keep], one.weights[keep], features[at][keep])
                found.append(whole.weighted())
                tokens.append(whole.tokens)
        if not found:
            return torch.zeros(0, piece.shape[1], device=self.residual.device, dtype=torch.float32), torch.zeros(
                0, dtype=torch.long, device="cpu"
            )
        return torch.cat(found).to(self.residual.device), torch.cat(tokens)


def _held_out(parts: Sequence[Tensor]) -> Tensor:
    """Which rows of these batches are held out, by the numbers that batches, or rows, have in one process."""
    rank, world = rank_and_world()
    counted = all_gather([len(each) for each in parts] if any(map(len, parts)) else [])
    sizes = {at * world + other: size for other, its in enumerate(counted) for at, size in enumerate(its)}
    found = [torch.zeros(0, dtype=torch.bool, device="cpu")]
    for number, part in enumerate(parts):
        mine = number * world + rank
        numbers = torch.full((len(part),), mine, dtype=torch.int64, device="cpu")
        if len(sizes) < UNSEEN:
            numbers = torch.arange(len(part), device="cpu") + sum(size for at, size in sizes.items() if at < mine)
        found.append(torch.as_tensor(is_held_out(numbers)))
    return torch.cat(found)


_Changes = dict[WeightView, Tensor]  # (inputs, outputs), what is added to a matrix, turned


def _solved(kept: _Kept, model: nn.Module, undo: Undo | None) -> Mended:
    before = _squares(kept.residual[kept.unseen])
    size = _scale(kept, ~kept.unseen)
    best = best_damping(DAMPINGS if size > 0 else (), lambda each: _squares(_unseen_lack(kept, each * size)), before)
    if best is None:
        return Mended(None, "no change of its experts reduced the residual of the stream on held-out tokens")
    residual = kept.residual.clone()
    changes = _fitted(kept, best[0] * _scale(kept, None))
    for piece, change in changes.items():
        old = piece.of(model.get_parameter(piece.name))
        new = (old.to(change.dtype) + change.T.to(old.device)).to(old.dtype)
        _take(kept, piece, change.copy_((new.to(change.dtype) - old.to(change.dtype)).T), residual)
    if not _squares(residual) < _squares(kept.residual):
        return Mended(None, "the change is lost when its weights are rounded to their dtype")
    if undo is not None:
        undo.values(*(model.get_parameter(name) for name in sorted({piece.name for piece in changes})))
    with torch.no_grad():
        for piece, change in changes.items():
            old = piece.of(model.get_parameter(piece.name))
            old.copy_(old.to(change.dtype) + change.T.to(old.device))
    return Mended(1 - best[1] / before)


def _unseen_lack(kept: _Kept, damping: float) -> Tensor:
    """The residual of held-out tokens after one round of solving on the others."""
    residual = kept.residual.clone()
    for piece in kept.pieces:
        rows, tokens = kept.of(piece, ~kept.unseen)
        wide = _wide(piece, rows)
        own = residual[tokens].double()
        change = _ridge(wide, own.to(wide.dtype), damping).to(residual.dtype)
        residual[tokens] = (own - wide.double() @ change.double()).to(residual.dtype)
        _take(kept, piece, change, residual, kept.unseen)
    return residual[kept.unseen]


def _fitted(kept: _Kept, damping: float) -> _Changes:
    """Ridge regression of all experts together, one after the other; what is added."""
    residual = kept.residual.clone()
    changes = _room(kept)
    for number in range(_ROUNDS):
        for piece in kept.pieces:
            rows, tokens = kept.of(piece)
            wide = _wide(piece, rows)
            own = residual[tokens].double()
            if number:
                own += wide.double() @ changes[piece].double()
            changes[piece].copy_(_ridge(wide, own.to(wide.dtype), damping))
            residual[tokens] = (own - wide.double() @ changes[piece].double()).to(residual.dtype)
    return changes


def _room(kept: _Kept) -> _Changes:
    """For a change of each matrix, at once: as tensors of their own, made between others, they would cut the heap up,
    and twice as much memory would stay taken."""
    sizes = [piece.shape[0] * piece.shape[1] for piece in kept.pieces]
    parts = torch.split(torch.empty(sum(sizes), dtype=kept.residual.dtype, device=kept.residual.device), sizes)
    return {piece: part.view(piece.shape[1], -1) for piece, part in zip(kept.pieces, parts, strict=True)}


def _wide(piece: WeightView, rows: Tensor) -> Tensor:
    return rows.double() if piece.shape[1] <= _LARGE else rows


def _take(kept: _Kept, piece: WeightView, change: Tensor, residual: Tensor, these: Tensor | None = None) -> None:
    """Subtracts from the residual what a change of one matrix adds, for ``these`` tokens."""
    rows, tokens = kept.of(piece, these)
    residual[tokens] -= (rows.double() @ change.double()).to(residual.dtype)


def _squares(residual: Tensor) -> float:
    return _total(float(residual.double().square().sum()))


def _scale(kept: _Kept, these: Tensor | None) -> float:
    """The mean diagonal entry of the Gram matrices of all experts that have tokens."""
    squares, entries = 0.0, 0
    for piece in kept.pieces:
        rows, _ = kept.of(piece, these)
        squares += float(rows.double().square().sum())
        entries += piece.shape[1]
    return _total(squares) / max(1, entries)


def _ridge(rows: Tensor, residual: Tensor, damping: float) -> Tensor:
    """(inputs, outputs): the X of least ``‖rows @ X - residual‖² + damping ‖X‖²``; of several processes, of all
    rows.
    """
    alone = rank_and_world()[1] == 1
    if alone and len(rows) < rows.shape[1]:  # as many unknowns as tokens
        return rows.T @ _divided(residual, rows @ rows.T, damping)
    return _of_the_first(_divided(_sum(rows.T @ residual), _sum(rows.T @ rows), damping))


def _divided(right: Tensor, gram: Tensor, damping: float) -> Tensor:
    """``(gram + damping)⁻¹ @ right``; more damping where that has no Cholesky factor, as it may be in float32."""
    while True:
        gram.diagonal().add_(damping)
        factor, wrong = torch.linalg.cholesky_ex(gram)
        if not bool(wrong):
            return torch.cholesky_solve(right, factor)
        damping *= 9  # to ten times as much


# ---- several processes ----------------------------------------------------------------------------------------------


def _total(value: float) -> float:
    """The sum over all processes, in their order, so that all have the same."""
    return float(sum(all_gather(value)))


def _sum(tensor: Tensor) -> Tensor:
    if rank_and_world()[1] > 1:
        from torch import distributed

        distributed.all_reduce(tensor)
    return tensor


def _of_the_first(tensor: Tensor) -> Tensor:
    """Processors of another kind would round otherwise."""
    if rank_and_world()[1] > 1:
        from torch import distributed

        tensor = tensor.contiguous()
        distributed.broadcast(tensor, src=0)
    return tensor
