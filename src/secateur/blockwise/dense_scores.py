"""How a walk shares the sparsity out: what an allocation says of the dense model's scores.

Law: `uniform` looks at nothing; any other allocation sees Wanda's scores of the dense model on the same batches, and
the model and the replay are afterwards as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.allocation import Allocation, uniform
from secateur.blockwise.products import Piece
from secateur.blockwise.replay import Replay
from secateur.blockwise.walk import Weights, block_of, complete, find_next, observe, store
from secateur.patterns import Pattern
from secateur.selection import LazyScores
from secateur.support import track
from secateur.targets import stored_inputs_first

__all__ = ["DenseScores", "shared_out"]


def shared_out(
    allocate: Allocation,
    sparsity: float | None,
    pattern: Pattern,
    targets: Mapping[str, nn.Parameter],
    model: nn.Module,
    replay: Replay,
    weights: Weights,
    batches: Sequence[Any],
) -> dict[str, float | None]:
    """The sparsity of each weight. `uniform`: the same; else the counts that ``allocate`` gives for Wanda's scores."""
    if allocate is uniform:
        return dict.fromkeys(targets, sparsity)
    if pattern.density is not None or sparsity is None:
        raise ValueError(f"{pattern} keeps the same share of every weight; leave allocate out.")
    dense = DenseScores(targets, model, replay, weights, batches)
    scores = LazyScores(dense, lambda weight: weight)  # the scores themselves are what is read
    counts = allocate(scores, sparsity, pattern)
    shares: dict[str, float | None] = {}
    for name in targets:
        if name not in counts:
            raise ValueError(f"the allocation gave no count for {name}; return {{name: units kept in each group}}.")
        groups, units = pattern.pool(torch.empty(dense.shapes[name], device="meta")).shape
        count = counts[name]
        kept = count * groups if isinstance(count, int) else int(count.sum())
        shares[name] = 1 - kept / (groups * units)
    return shares


class DenseScores(Mapping[str, Tensor]):
    """Wanda's scores (arXiv:2306.11695) of the dense model, ``|w| · ‖x‖``, (outputs, inputs), read on access.

    The first access runs the batches through the whole dense model; ``shapes`` runs nothing.
    """

    def __init__(
        self,
        targets: Mapping[str, nn.Parameter],
        model: nn.Module,
        replay: Replay,
        weights: Weights,
        batches: Sequence[Any],
    ) -> None:
        turned = set(stored_inputs_first(model, targets))
        self.shapes = {
            name: torch.Size(_rows_shape(tuple(p.shape), inputs_first=name in turned)) for name, p in targets.items()
        }
        self.replay, self.weights, self.batches = replay, weights, batches
        self._norms: dict[str, dict[Piece, Tensor]] | None = None
        self._loaded: str | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._norms is None:
            self._norms = self._measured()
        block = block_of(name, self.replay.blocks)
        local = name[len(block) + 1 :]
        if self._loaded != block:
            if self._loaded is not None:
                self.weights.unload(self._loaded)
            self.weights.load(block, finished=False)
            self._loaded = block
        parameter = self.replay.blocks[block].get_parameter(local)
        norms = self._norms.get(name, {})
        pieces = complete(sorted(norms), parameter)
        if not pieces:
            return parameter.detach().abs().float().reshape(self.shapes[name])
        nothing = torch.zeros(1, device=parameter.device)
        rows = [piece.of(parameter).abs().float() * norms.get(piece, nothing) for piece in pieces]
        return torch.cat(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _measured(self) -> dict[str, dict[Piece, Tensor]]:
        """The norms of each weight's inputs, from one run of the dense model; the replay is as new afterwards."""
        norms: dict[str, dict[Piece, Tensor]] = {}
        replay = self.replay
        for _ in track(range(len(replay.blocks)), "looking at the dense blocks"):
            name = find_next(replay, self.batches)
            if name is None:
                break
            self.weights.load(name, finished=False)
            wanted = {
                local: p for local, p in replay.blocks[name].named_parameters() if f"{name}.{local}" in self.shapes
            }
            for piece, sums in observe(replay, self.batches, name, wanted, ["input_norm"]).items():
                if sums.tokens:
                    norms.setdefault(f"{name}.{piece.name}", {})[piece] = sums.evidence(["input_norm"])["input_norm"]
            store(replay, self.batches, name)
            self.weights.unload(name)
        replay.restart(keep_all=False)
        return norms


def _rows_shape(shape: tuple[int, ...], *, inputs_first: bool) -> tuple[int, ...]:
    if len(shape) == 3:
        return (shape[0] * shape[1], shape[2])
    return shape[::-1] if inputs_first else shape
