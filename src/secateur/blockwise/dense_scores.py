"""How a walk shares the sparsity out: an allocation from the dense model's scores.

Law: `uniform` looks at nothing; any other allocation sees Wanda's scores of the dense model on the same batches, and
the model and the replay are afterwards as they were. The dense model runs only for an allocation that reads a score.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from secateur.allocation import uniform
from secateur.blockwise.finding import WHOLE
from secateur.blockwise.observation import find_next, observe, store
from secateur.blockwise.products import Piece
from secateur.blockwise.replay import Replay
from secateur.blockwise.request import Request
from secateur.blockwise.solving import complete
from secateur.blockwise.targets import block_of, full_name
from secateur.blockwise.walk import Weights
from secateur.selection import LazyScores
from secateur.support import track
from secateur.targets import stored_inputs_first

__all__ = ["DenseScores", "share_out"]

Norms = Mapping[str, Mapping[Piece, Tensor]]


def share_out(
    request: Request, targets: Mapping[str, nn.Parameter], replay: Replay, weights: Weights, batches: Sequence[Any]
) -> dict[str, float | None]:
    """The sparsity of each weight. `uniform`: the same; else the counts that an allocation gives for Wanda's scores."""
    sparsity, pattern = request.sparsity, request.pattern
    if request.allocate is uniform:
        return dict.fromkeys(targets, sparsity)
    if pattern.density is not None or sparsity is None:
        raise ValueError(f"{pattern} keeps the same share of every weight; leave allocate out.")
    turned = set(stored_inputs_first(replay.model, targets))
    shapes = {
        name: p.shape
        if WHOLE in replay.blocks
        else torch.Size(_rows_shape(tuple(p.shape), inputs_first=name in turned))
        for name, p in targets.items()
    }
    try:
        counts = request.allocate(_unread(_ShapesOnly(shapes)), sparsity, pattern)
    except _ReadError:
        norms = measure_norms(replay, weights, batches, targets)
        with contextlib.closing(DenseScores(shapes, norms, replay.blocks, weights)) as scores:
            counts = request.allocate(_unread(scores), sparsity, pattern)
    shares: dict[str, float | None] = {}
    for name, shape in shapes.items():
        if name not in counts:
            raise ValueError(f"the allocation gave no count for {name}; return {{name: units kept in each group}}.")
        groups, units = pattern.pool(torch.empty(shape, device="meta")).shape
        count = counts[name]
        kept = count * groups if isinstance(count, int) else int(count.sum())
        shares[name] = 1 - kept / (groups * units)
    return shares


def measure_norms(replay: Replay, weights: Weights, batches: Sequence[Any], targets: Mapping[str, Any]) -> Norms:
    """Runs the batches through the whole dense model: the norms of each target's inputs. The replay is as new then."""
    norms: dict[str, dict[Piece, Tensor]] = {}
    for _ in track(range(len(replay.blocks)), "looking at the dense blocks"):
        name = find_next(replay, batches)
        if name is None:
            break
        weights.load(name, finished=False)
        wanted = {local: p for local, p in replay.blocks[name].named_parameters() if full_name(name, local) in targets}
        for piece, met in observe(replay, batches, name, wanted, ["input_norm"]).items():
            if met.tokens:
                norms.setdefault(full_name(name, piece.name), {})[piece] = met.evidence(["input_norm"])["input_norm"]
        if name == WHOLE:
            break
        store(replay, batches, name)
        weights.unload(name)
    replay.restart(keep_all=False)
    return norms


class DenseScores(Mapping[str, Tensor]):
    """Wanda's scores (arXiv:2306.11695) of the dense model, ``|w| · ‖x‖``, (outputs, inputs), from the norms of inputs.

    Scores are made on access, from weights of which one block is loaded at a time; `close` unloads the last.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], norms: Norms, blocks: Mapping[str, nn.Module], weights: Weights
    ) -> None:
        self.shapes, self.norms, self.blocks, self.weights = shapes, norms, blocks, weights
        self._loaded: str | None = None

    def __getitem__(self, name: str) -> Tensor:
        block = block_of(name, self.blocks)
        assert block is not None
        if self._loaded != block:
            self.close()
            self.weights.load(block, finished=False)
            self._loaded = block
        parameter = self.blocks[block].get_parameter(name[len(block) + 1 :] if block else name)
        norms = self.norms.get(name, {})
        pieces = complete(sorted(norms), parameter)
        if not pieces:
            return parameter.detach().abs().float().reshape(self.shapes[name])
        nothing = torch.zeros(1, device=parameter.device)
        rows = [piece.of(parameter).abs().float() * norms.get(piece, nothing) for piece in pieces]
        return torch.cat(rows).reshape(self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def close(self) -> None:
        if self._loaded is not None:
            self.weights.unload(self._loaded)
            self._loaded = None


class _ReadError(BaseException):
    """An allocation asks for a score; no `Exception`, so that none takes it for its own."""


class _ShapesOnly(Mapping[str, Tensor]):
    """Scores of which only the shapes are known so far."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = shapes

    def __getitem__(self, name: str) -> NoReturn:
        raise _ReadError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _unread(scores: Mapping[str, Tensor]) -> LazyScores:
    return LazyScores(scores, lambda weight: weight)  # the scores themselves are what is read


def _rows_shape(shape: tuple[int, ...], *, inputs_first: bool) -> tuple[int, ...]:
    if len(shape) == 3:
        return (shape[0] * shape[1], shape[2])
    return shape[::-1] if inputs_first else shape
