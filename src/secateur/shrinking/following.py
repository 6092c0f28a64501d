"""Repair behind removed branches: matrix by matrix, the residual stream is moved towards the dense model's.

Law: a matrix is changed only where its outputs come nearer to what is aimed at, on the calibration; what it is changed
by is damped. Those before the first branch that leaves stay as they are, bit for bit.

The walk runs the dense model beside the smaller one. For that the matrices that make the terms of the branches become
zeros when their stage is solved; they leave afterwards, with their branches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from secateur.blockwise import Met, Piece, Pruned, Solved, full_name
from secateur.shrinking.repairing import AIM, DAMPING
from secateur.solvers import aimed

__all__ = ["Following"]


@dataclass(eq=False)
class Following:
    """The job of a walk over the model that loses branches; see `secateur.blockwise`.

    Attributes:
        given: ``{name: values}`` of parameters that are what they are: zeros, and what was patched.
        moved: the matrices that aim at the dense stream.
    """

    given: Mapping[str, Tensor]
    moved: Collection[str]
    aim: float = AIM
    damping: float = DAMPING
    in_stages: bool = True
    beside_dense: bool = True
    around: bool = False
    changes: bool = True
    words: tuple[str, ...] = ("gram",)
    _done: set[str] = field(default_factory=set)

    @property
    def targets(self) -> Collection[str]:
        return {name for name, values in self.given.items() if values.dim() == 2} | {*self.moved}

    def solve_stage(
        self, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[Piece, Met]
    ) -> tuple[Mapping[str, Solved], Pruned]:
        inside = {full_name(block, name): name for name, _ in module.named_parameters()}
        watched = self.targets
        new: dict[str, Solved] = {}
        for name, values in self.given.items():  # biases and scales with the first stage, matrices with theirs
            if name in inside and name not in self._done and (inside[name] in stage or name not in watched):
                self._done.add(name)
                new[inside[name]] = _whole(values)
        for piece, met in found.items():
            name = full_name(block, piece.name)
            if name in self.given or met.lacking is None or not met.tokens:
                continue
            parameter = stage[piece.name]
            solved = new.setdefault(piece.name, _whole(parameter.detach().clone()))
            matrix = piece.of(parameter)
            piece.of(solved.values).copy_(self._nearer(matrix, met, met.lacking.double()))
        return new, Pruned(block)

    def _nearer(self, matrix: Tensor, met: Met, lacking: Tensor) -> Tensor:
        assert met.sums.gram is not None  # one of the words
        gram, old = met.sums.gram.double(), matrix.double()
        new = aimed(old, lacking, gram=gram, aim=self.aim, damping=self.damping).to(matrix.dtype)
        change = new.double() - old
        # how much further from what is aimed at
        further = (change @ gram * change).sum() - 2 * self.aim * (change * lacking).sum()
        return new if bool(further < 0) else matrix  # not where it is no number


def _whole(values: Tensor) -> Solved:
    return Solved(values, torch.ones_like(values, dtype=torch.bool))
