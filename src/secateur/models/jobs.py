"""The interface between a walk over blocks and what is done at each stage of a block. Communication between processes:
ranks, sums over all batches, and solved weights.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from secateur.evidence import Sums, sum_over_ranks
from secateur.models.products import SAMPLE, InputStats, Products, WeightView
from secateur.support import Between, all_gather, broadcast, on_rank_zero, rank_and_world

# ---- The interface between a walk over blocks and what is done at each stage of a block.
#
# Law: a job sees a stage's weights and the statistics of their inputs, and returns new values; it runs nothing and
# writes nothing. It is the same for weights in memory and in files.


Count = Annotated[int, Between(0)]


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
    shape: tuple[Count, ...]
    sparsity: Annotated[float, Between(0, 1)]
    error: float | None
    tokens: Count
    seconds: Annotated[float, Between(0)]
    without_tokens: tuple[Count, ...] = ()
    warnings: tuple[str, ...] = ()


class Solved(NamedTuple):
    """A parameter's new values and its mask, True = kept, both of its shape."""

    values: Tensor
    mask: Tensor


class Pruned(NamedTuple):
    """The result for one block: a `Layer` for each weight that was solved, and ``{reason: names}`` of those that could
    not be pruned; ``in_blocks`` has a note on each whose Gram matrix was summed in blocks."""

    block: str
    layers: tuple[Layer, ...] = ()
    left_alone: Mapping[str, tuple[str, ...]] = {}
    in_blocks: Mapping[str, str] = {}

    def and_then(self, later: Pruned) -> Pruned:
        """This result, and that of a later stage of the block."""
        reasons = dict.fromkeys([*self.left_alone, *later.left_alone])
        left_alone = {why: (*self.left_alone.get(why, ()), *later.left_alone.get(why, ())) for why in reasons}
        return Pruned(self.block, (*self.layers, *later.layers), left_alone, {**self.in_blocks, **later.in_blocks})


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
        return False

    @property
    def beside_dense(self) -> bool:
        """Whether the dense model is run beside the pruned one, so that each `InputStats` has the residual to it."""
        return False

    @property
    def around(self) -> bool:
        """Whether each `InputStats` has statistics of the sum that its outputs are added to: the residual stream."""
        return False

    @property
    def changes(self) -> bool:
        """Whether new values may be given; where all that is done is to measure, all at once, a block is run once."""
        return True

    @property
    def by_the_first(self) -> bool:
        """Whether the first process solves for all: sums that were rounded in another order, or a processor of another
        kind, would choose other units."""
        return False

    def solve_stage(
        self, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[WeightView, InputStats]
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


def solved(
    job: Job, block: str, module: nn.Module, stage: Mapping[str, Tensor], found: Mapping[WeightView, InputStats]
) -> tuple[Mapping[str, Solved], Pruned]:
    """What the job says of a stage, the same on all processes."""
    rank, world = rank_and_world()
    if world == 1 or not job.by_the_first:
        return job.solve_stage(block, module, stage, found)
    mine: dict[str, Solved] = {}

    def names() -> list[str]:
        mine.update(job.solve_stage(block, module, stage, found)[0])
        return list(mine)

    for name in on_rank_zero(names):
        like = module.get_parameter(name)
        new = mine[name] if not rank else Solved(torch.empty_like(like), torch.ones_like(like, dtype=torch.bool))
        mine[name] = Solved(*(each.contiguous() for each in new))
        broadcast(None, mine[name], 0)
    return mine, Pruned(block)


# ---- Communication between processes: ranks, sums over all batches, and solved weights.
#
# Law: after each step here all processes hold the same values; an error of one is raised on all.


class RunAlong(tuple[Any, ...]):
    """The batches of a process without a share of its own: it runs them to stay in step with the others, but sums
    nothing.

    >>> len(RunAlong(["a batch"]))
    1
    """


def reduced(products: Products) -> dict[WeightView, InputStats]:
    """The statistics summed over all processes, the same on each; with one process, its own."""
    if rank_and_world()[1] == 1:
        return products.found()
    here = products.found()
    everyone = all_gather({piece: products.shared.get(piece, piece) for piece in here})
    leaders: dict[WeightView, WeightView] = {}
    for piece, leader in ((piece, leader) for other in everyone for piece, leader in other.items()):
        # where processes do not agree on whose inputs are whose, the piece has sums of its own
        leaders[piece] = leader if leaders.get(piece, leader) == leader else piece
    total = {
        leader: copy.copy(here.get(leader, InputStats(Sums(products.words)))) for leader in sorted({*leaders.values()})
    }
    device = next(iter(products.parameters.values()))[1].device
    for met in total.values():
        met.sums = copy.copy(met.sums)  # several leaders may have had one object here
        met.sample = _first(met.sample, device)
    sum_over_ranks({leader: met.sums for leader, met in total.items()}, None, device)
    residuals = {
        piece: torch.cat([met.residual_cross, met.residual_sum[:, None].to(met.residual_cross)], 1)
        for piece, met in here.items()
        if met.residual_cross is not None and met.residual_sum is not None
    }
    residual_cross = _added(residuals, device)
    around = {piece: copy.copy(met.around) for piece, met in here.items() if met.around is not None}
    words = {piece: sums.words for piece, sums in around.items()}
    for piece, its in sorted(((piece, its) for other in all_gather(words) for piece, its in other.items())):
        around.setdefault(piece, Sums(its))
    if around:
        sum_over_ranks({piece: around[piece] for piece in sorted(around)}, None, device)
    return {
        piece: replace(total[leader], around=around.get(piece)).with_residual(residual_cross.get(piece))
        for piece, leader in sorted(leaders.items())
    }


def _added(here: Mapping[WeightView, Tensor], device: torch.device) -> dict[WeightView, Tensor]:
    """The sums over all processes, (outputs, inputs + 1); what one of them did not see counts as 0 there."""
    from torch import distributed

    everyone = all_gather({piece: tensor.dtype for piece, tensor in here.items()})
    widest: dict[WeightView, torch.dtype] = {}
    for piece, dtype in ((piece, dtype) for other in everyone for piece, dtype in other.items()):
        widest[piece] = torch.promote_types(dtype, widest.get(piece, dtype))
    found = {}
    for piece, dtype in sorted(widest.items(), key=lambda item: item[0]):
        own = here.get(piece)
        outputs, inputs = piece.shape
        zeros = torch.zeros(outputs, inputs + 1, dtype=dtype, device=device)
        found[piece] = zeros if own is None else zeros.add_(own)
        distributed.all_reduce(found[piece])
    return found


def _first(sample: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The first tokens of all processes' samples, in their order."""
    samples = all_gather([part.cpu() for part in sample])
    parts = [part.to(device) for rank in samples for part in rank]
    return [torch.cat(parts)[:SAMPLE]] if parts else []
