"""The interface between a walk over blocks and what is done at each stage of a block.

Law: a job sees a stage's weights and the statistics of their inputs, and returns new values; it runs nothing and writes
nothing. It is the same for weights in memory and in files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from secateur.blockwise.products import Met, Piece

__all__ = ["Job", "Layer", "Pruned", "Solved"]


@dataclass(frozen=True)
class Layer:
    """The result for one pruned weight: its sparsity, its error and the number of tokens.

    ``sparsity`` is the share of its stored values that are 0, be they removed or 0 by themselves or by rounding.
    ``error`` is ``‖X(W' - W)ᵀ‖² / ‖XWᵀ‖²``, the squared relative error of its outputs on the inputs that reach it in
    the pruned model, W being the target weight; None where no token did, or where the outputs were all 0
    and no longer are. ``tokens`` counts those inputs; ``without_tokens`` are the experts that none were sent to, which
    were pruned by magnitude.
    """

    name: str
    block: str
    shape: tuple[int, ...]
    sparsity: float
    error: float | None
    tokens: int
    seconds: float
    without_tokens: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


class Solved(NamedTuple):
    """A parameter's new values and its mask, True = kept, both of its shape."""

    values: Tensor
    mask: Tensor


class Pruned(NamedTuple):
    """The result for one block: a `Layer` for each weight that was solved, and ``{reason: names}`` of those that could
    not be pruned."""

    block: str
    layers: tuple[Layer, ...] = ()
    left_alone: Mapping[str, tuple[str, ...]] = {}

    def and_then(self, later: Pruned) -> Pruned:
        """This result, and that of a later stage of the block."""
        reasons = dict.fromkeys([*self.left_alone, *later.left_alone])
        left_alone = {why: (*self.left_alone.get(why, ()), *later.left_alone.get(why, ())) for why in reasons}
        return Pruned(self.block, (*self.layers, *later.layers), left_alone)


class Job(Protocol):
    """What a walk does at each stage of a block: pruning matrices by a solver, or another task, such as removing units.

    The walk takes a block's targets in stages, in the order in which they compute, or all at once. For each stage it
    sums over the inputs of its weights where the stages before have their new values already, asks `solve_stage`, and
    puts the returned values in the weights' places; they are written when the last stage of the block is solved.
    """

    @property
    def targets(self) -> Collection[str]:
        """The parameters whose products are watched, by full name; those of one block are given to it in stages."""

    @property
    def words(self) -> Collection[str]:
        """What is summed of the inputs; see `secateur.evidence.VOCABULARY`."""

    @property
    def in_stages(self) -> bool:
        """Whether a block's weights are solved in stages; else all at once, from one run of the dense block."""

    @property
    def beside_dense(self) -> bool:
        """Whether the dense model is run beside the pruned one, so that each `Met` has the residual to it."""

    @property
    def around(self) -> bool:
        """Whether each `Met` has statistics of the sum that its outputs are added to, such as the residual stream."""

    @property
    def changes(self) -> bool:
        """Whether new values may be given; where all that is done is to measure, all at once, a block is run once."""

    def solve_stage(
        self, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[Piece, Met]
    ) -> tuple[Mapping[str, Solved], Pruned]:
        """New values by names in the block, and the result for this stage.

        Args:
            block: its name.
            module: the block, which still has its dense weights.
            stage: ``{name in the block: parameter}``.
            found: the statistics of their inputs; empty where the batches did not run the block.

        The values may be of any of the block's parameters, also of earlier stages, such as the rows of a product that
        nothing reads any more, or of a bias: later stages see them. Nothing is written here.
        """
