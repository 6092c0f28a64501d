"""The repair of what stays: columns leave their matrices as units, and the others are solved by least squares.

Law: as many units stay of each group as was chosen; on the calibration, the outputs of a matrix are never further from
their target than without repair; weights are solved in float64 and rounded once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.blockwise import Met, Piece, Pruned, Solved, full_name
from secateur.coupling import Axis, Coupling, Group, Kept
from secateur.shrinking.consumers import Columns, columns_of
from secateur.shrinking.measuring import (
    WORDS,
    Measured,
    chunk_of,
    counts_of,
    elimination_of,
    with_constant,
)
from secateur.solvers import Elimination, eliminated

__all__ = ["AIM", "DAMPING", "Repairing", "free_in", "repaired"]

DAMPING = 0.1  # of the mean diagonal: SmolLM2 without 20 % has perplexity 18.2, and 18.8 at 0.01
AIM = 0.5  # of the way to the dense stream: MiniLM without half of its MLPs' units .940; .938 at 0, .937 at 1


@dataclass(eq=False)
class Repairing:
    """The `Job` that removes columns and repairs matrices in a walk over the model; see `secateur.blockwise`.

    A matrix' columns that left are zeros; where it has a bias, that moves with the others. Where all consumers of
    a group are solved in one stage, the units that leave are chosen again from the inputs there; else ``chosen`` holds.
    A matrix that loses nothing is aimed at the dense stream, too.

    Attributes:
        free: the matrices and biases that may move: `free_in`.
        kept: which units stay, after the walk.
        errors: ``{name: error}``: the squared error of a matrix' outputs with its new values, as a share of the
            variance of the stream that they are added to, or of their own.
        biases: which moved with their matrices.
    """

    coupling: Coupling
    groups: Sequence[Group]
    chosen: Kept
    measured: Measured
    free: Collection[str]
    repair: bool = True
    aim: float = AIM
    damping: float = DAMPING
    in_stages: bool = True
    around: bool = True
    changes: bool = True
    kept: dict[Axis, npt.NDArray[np.bool_]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    biases: set[str] = field(default_factory=set)
    words: tuple[str, ...] = WORDS

    def __post_init__(self) -> None:
        self.kept.update(self.chosen)
        self.groups = [group for group in self.groups if not self.chosen[group.axis].all()]

    @property
    def beside_dense(self) -> bool:
        return self.repair and self.aim > 0

    @property
    def targets(self) -> Collection[str]:
        lose = {name for group in self.groups for name in self.measured.consumers.get(group.axis, ())}
        if not (self.beside_dense and lose):
            return lose
        return lose | {
            name for name in self.coupling.names() if name in self.free and len(self.coupling.dims(name)) > 1
        }

    def solve_stage(
        self,
        block: str,
        module: nn.Module,
        stage: Mapping[str, Tensor],
        found: Mapping[Piece, Met],
    ) -> tuple[Mapping[str, Solved], Pruned]:
        found = {piece: self._with_free_bias(block, met) for piece, met in found.items()}
        layers: dict[Piece, Elimination] = {}
        columns: dict[Piece, Mapping[Axis, Columns]] = {}
        for piece, met in found.items():
            name = full_name(block, piece.name)
            its = columns_of(self.coupling, self.groups, name, piece, stage[piece.name])
            moves = self.repair and name in self.free
            if its or (moves and met.lacking is not None):
                matrix, columns[piece] = piece.of(stage[piece.name]), its
                slopes = self.measured.slopes.get(piece.named(name))
                aim = self.aim if moves else 0.0
                layers[piece] = elimination_of(name, matrix, met, slopes, damping=self.damping, aim=aim)
        here = {full_name(block, name) for name in stage}
        for group in self.groups:  # heads before what is within them
            behind = [(layer, columns[at][group.axis]) for at, layer in layers.items() if group.axis in columns[at]]
            if behind:
                self._remove(group, behind, anew=self.measured.consumers[group.axis] <= here)
        for layer in layers.values():
            layer.finish()
        new: dict[str, Solved] = {}
        for piece in list(layers):
            layer = layers.pop(piece)  # each holds several matrices of its size
            parameter = stage[piece.name]
            solved = new.setdefault(
                piece.name, Solved(parameter.detach().clone(), torch.ones_like(parameter, dtype=torch.bool))
            )
            gone = np.zeros(piece.shape[1], dtype=bool)
            for axis, units in columns[piece].items():
                gone[[column for at, its in enumerate(units) if not self.kept[axis][at] for column in its]] = True
            mask = torch.from_numpy(~gone).to(parameter.device)
            matrix, met = piece.of(parameter), found[piece]
            bias = None if met.bias is None else met.bias.of(module.get_parameter(met.bias.name))
            name = full_name(block, piece.name)
            moves = self.repair and name in self.free
            values, moved, lost = repaired(matrix, bias, layer, met, mask, moves=moves, aim=self.aim)
            piece.of(solved.values).copy_(values[:, : piece.shape[1]])
            if met.bias is not None and moved is not None:
                self.biases.add(full_name(block, met.bias.name))
                old = module.get_parameter(met.bias.name)
                whole = Solved(old.detach().clone(), torch.ones_like(old, dtype=torch.bool))
                met.bias.of(new.setdefault(met.bias.name, whole).values).copy_(moved)
            piece.of(solved.mask).copy_(mask.expand(piece.shape))
            self.errors[name] = self.errors.get(name, 0.0) + float((lost * counts_of(matrix, met).to(lost)).sum())
        return new, Pruned(block)

    def _with_free_bias(self, block: str, met: Met) -> Met:
        """Where something else holds the bias, as if there were none."""
        free = met.bias is None or full_name(block, met.bias.name) in self.free
        return met if free else replace(met, bias=None)

    def _remove(self, group: Group, layers: Sequence[tuple[Elimination, Columns]], *, anew: bool) -> None:
        count = int(self.chosen[group.axis].sum())
        if anew:
            left, _ = eliminated(layers, count, chunk_of(group.size))
            self.kept[group.axis] = np.ones(group.size, dtype=bool)
            self.kept[group.axis][left] = False
            return
        for layer, units in layers:
            layer.remove([column for at in np.flatnonzero(~self.kept[group.axis]) for column in units[at]])


def repaired(
    matrix: Tensor,
    bias: Tensor | None,
    layer: Elimination,
    met: Met,
    mask: Tensor,
    *,
    moves: bool = True,
    aim: float = 0.0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The repaired weight and its bias, or the old ones with zeros where columns left if these are nearer to
    the target; the weight with a column for the constant where it has a bias. And the squared error of each
    output against the target.

    Args:
        matrix: (outputs, inputs), dense.
        bias: (outputs,), what is added to this product's outputs and no other's.
        layer: from which the columns left.
        met: the statistics of the matrix' inputs.
        mask: (inputs,), False where a column left.
        moves: whether anything may move; else columns are zeroed.
        aim: the share of the residual to the dense model that is the target, from 0 to 1; the layer's own.
    """
    given = with_constant(matrix, met)
    plain = given.matrix.clone()
    plain[:, : len(mask)] *= mask.to(matrix.dtype)
    if not moves:
        return plain, None, layer.squares(plain)
    wide = layer.settled(met.tokens)
    found, moved = wide.to(matrix.dtype).to(wide), None
    if bias is not None and given.constant is not None:
        moved = (bias.double() + given.constant * wide[:, -1]).to(bias.dtype)
        found[:, -1] = (moved.double() - bias.double()) / given.constant
    if given.lacking is None:  # then the layer aims at the matrix
        lost, least = layer.squares(found), layer.squares(plain)
        return (found, moved, lost) if float(lost.sum()) <= float(least.sum()) else (plain, None, least)
    towards = given.matrix.double() @ layer.gram
    towards += given.lacking.double() * (aim / layer.scale)

    def distance(values: Tensor) -> float:  # over the scale, and but for what does not depend on the values
        wide = values.double()
        return float(torch.sub(wide @ layer.gram, towards, alpha=2).mul_(wide).sum())

    if distance(found) <= distance(plain):
        return found, moved, layer.squares(found)
    return plain, None, layer.squares(plain)


def free_in(model: nn.Module, parts: Mapping[str, nn.Module]) -> frozenset[str]:
    """The names of the parameters that only these parts of the model hold. A shared one, such as an embedding that is
    the head, too, is left out: least squares for one use would be wrong for the other.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> model[2].weight = model[0].weight
    >>> sorted(free_in(model, {"": model}))
    ['1.bias', '1.weight', '2.bias']
    """
    places = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return frozenset(
        full_name(part, name)
        for part, module in parts.items()
        for name, parameter in module.named_parameters()
        if places[id(parameter)] == 1
    )
