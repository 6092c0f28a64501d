"""What a shrinking is asked: the arguments, checked once; the model as module or on meta; where no data chose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur import allocation, criteria, kinds, runtimes
from secateur.allocation import Allocation, check_sparsity
from secateur.checkpoints import Checkpoint, unfinished_copy
from secateur.coupling import Coupling, Group, Kept, Scope
from secateur.criteria import magnitude
from secateur.evidence import needs
from secateur.kinds import Blocks, Branches, Experts, Kind
from secateur.models import InFiles, find_blocks
from secateur.operations import PriceTable, step_in
from secateur.runtimes import Elsewhere, Runtime
from secateur.shrinking.apply import Place
from secateur.shrinking.configuration import Configured
from secateur.shrinking.costs import TARGETS
from secateur.shrinking.plan import Plan, plan_of
from secateur.shrinking.proof import wrong_groups
from secateur.support import Forward, check_choose, globs_of, warn

CHOOSE = ("gates", "swaps")

# ---- The arguments that `shrink` and the verbs for directories share, checked once.
#
# Law: a request holds values, not words; arguments that are not allowed are refused before the model runs.


@dataclass(frozen=True, kw_only=True)
class Request:
    """The checked arguments of `secateur.shrink`: how much leaves, and how it is chosen.

    Attributes:
        sparsity: the fraction of ``target`` that leaves; None: what is zero.
        target: one of `TARGETS`.
        runtime: where a latency is measured.
        criterion: ``(weight, *, <evidence>) -> scores``.
        choose: one of `CHOOSE`: "gates" where data chooses by the loss of the whole model, "swaps" where units that
            left come back for others; None: by what the next matrices lose, one after the other.
        allocate: how many units each group keeps; None: the same share, residual streams and heads later.
        evidence: ``{name: {keyword: Tensor}}``, for the criterion.
        include: globs of what may leave; None: all.
        exclude: globs of what stays whole.
        round_to: counts are multiples of this, by default of the steps of a table of times; None: of 16 in groups of 64
            or more, where such a step is small.
        uniform: the counts are those that a configuration can say.
        rotate: dimensions inside heads are rotated before some leave.
        verify: nothing leaves that is not proved to change nothing else.
        leave: what leaves before other units, at most one of each kind.
    """

    sparsity: float | None = None
    target: str = "params"
    runtime: Runtime | Elsewhere = field(default=runtimes.Torch(), repr=False)
    criterion: Callable[..., Tensor] = field(default=magnitude, repr=False)
    choose: str | None = None
    allocate: Allocation | None = field(default=None, repr=False)
    evidence: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    round_to: int | None = None
    uniform: bool = False
    rotate: bool = False
    verify: bool = True
    leave: tuple[Kind, ...] = ()

    def __post_init__(self) -> None:
        if self.round_to is not None and self.round_to < 1:
            raise ValueError(f"round_to must be at least 1, not {self.round_to}.")

    @property
    def gates(self) -> bool:
        """Whether gates choose."""
        return self.choose == "gates"

    @property
    def globs(self) -> tuple[str, ...]:
        """All of them: each has to match something."""
        return (*(self.include or ()), *self.exclude)

    @property
    def experts(self) -> Experts:
        """The experts that leave; 0 of them where none do."""
        return next((each for each in self.leave if isinstance(each, Experts)), Experts())

    @property
    def branches(self) -> float | tuple[str, ...]:
        """How many residual branches leave, or which."""
        return next((each.names or each.share for each in self.leave if isinstance(each, Branches)), 0.0)

    @property
    def blocks(self) -> float:
        """How many blocks of a directory leave."""
        return next((each.remove for each in self.leave if isinstance(each, Blocks)), 0.0)


@dataclass(frozen=True)
class InDirectory:
    """The arguments of `secateur.shrink` that say which directory becomes which, and how its model is run.

    Attributes:
        source, out: as `secateur.checkpoints.places` checked them; without ``out`` nothing is written.
        batches, repair, forward, activations, device: as for `secateur.shrink`.
    """

    source: Path
    out: Path | None
    batches: Iterable[Any] | None
    repair: bool
    forward: Forward | None
    activations: Path | str | None
    device: torch.device | str | None

    def walk(self, checkpoint: Checkpoint, work: Path, held: Sequence[Any]) -> InFiles:
        """The model of a checkpoint, to be run block by block on these batches; ``work`` is where blocks are written.

        Raises:
            ValueError: it is of no blocks, or does not run.
        """
        walk = InFiles(checkpoint, work, held, forward=self.forward, activations=self.activations, device=self.device)
        walk.check()
        return walk

    @property
    def work(self) -> Path:
        """Where blocks are written that are changed."""
        return self.source if self.out is None else unfinished_copy(self.out)


def request(
    *,
    criterion: str | Callable[..., Tensor] = magnitude,
    allocate: str | Allocation | None = None,
    evidence: Mapping[str, Mapping[str, Tensor]] | None = None,
    leave: Kind | str | Iterable[Kind | str] | None = None,
    runtime: Any = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    **given: Any,
) -> Request:
    """The request that the arguments of a verb make: words become values, one glob a tuple of one.

    Raises:
        ValueError: a number that is no share, a word that means nothing.

    >>> request(sparsity=0.5, exclude="head.*").exclude
    ('head.*',)
    """
    made = Request(
        criterion=criteria.parse(criterion),
        allocate=None if allocate is None else allocation.parse(allocate),
        evidence=evidence or {},
        include=globs_of(include),
        exclude=globs_of(exclude) or (),
        leave=kinds.parse(leave),
        runtime=runtimes.timed_by(runtime, given.get("target") == "latency"),
        **given,
    )
    if made.round_to is None and isinstance(made.runtime, PriceTable):
        made = replace(made, round_to=step_in(made.runtime.rows))
    if made.target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(map(repr, TARGETS))}, not {made.target!r}.")
    if made.sparsity is not None:
        check_sparsity(made.sparsity)
    check_choose(made.choose, *CHOOSE)
    counted = made.experts.remove or made.blocks or (isinstance(made.branches, int | float) and made.branches)
    if made.choose == "swaps" and made.sparsity is None:
        raise ValueError("swaps are of units; say by sparsity= how many leave, or leave out choose=.")
    if made.gates and made.sparsity is None and not counted:
        raise ValueError(
            "gates learn which units leave, or experts, branches or blocks; say by sparsity= or leave= how much that "
            "is, or leave out choose=."
        )
    if made.rotate and made.sparsity is None:
        raise ValueError("rotate is about dimensions that leave; say by sparsity= how much that is.")
    if made.branches and made.uniform:
        raise ValueError(
            "no configuration describes removed branches: leave out uniform, or Branches; of a directory whole blocks "
            "leave, by leave=Blocks(...)."
        )
    return made


# ---- The warning before a model of blocks is shrunken by the magnitude of its weights alone.
#
# Law: only where data would help: where residual blocks multiply with matrices, and nobody gave evidence.


class WithoutDataWarning(UserWarning):
    """Warning: units of a model of blocks are ranked by magnitude, which ruins a trained model.

    Where the model is trained afterwards anyway, filter it:

    >>> import warnings
    >>> warnings.simplefilter("ignore", WithoutDataWarning)
    """


def warn_without_data(model: nn.Module, coupling: Coupling, asked: Request) -> None:
    """Warns, if data would help."""
    if not asked.sparsity or asked.evidence or needs(asked.criterion) or not _has_residual_blocks(model, coupling):
        return
    warn(
        "shrink without data ranks units by magnitude and repairs nothing. Of SmolLM2-135M that leaves little: without "
        "10 % of its parameters its perplexity is 325 000, and was 15. Pass batches=, some dozens of real "
        "inputs (of a language model, what secateur.read_calibration gives). If the model is trained afterwards, or "
        "has not been so far, filter secateur.shrinking.WithoutDataWarning.",
        WithoutDataWarning,
    )


def _has_residual_blocks(model: nn.Module, coupling: Coupling) -> bool:
    """Whether blocks are repeated around which a stream runs, and units of theirs are multiplied with matrices."""
    try:
        blocks = find_blocks(model)
    except ValueError:
        return False
    inside = {f"{block}.{name}" for block, module in blocks.items() for name, _ in module.named_parameters()}
    residual = {name for branch in coupling.branches for name in branch.parameters} & inside
    consumers = {name for group in coupling.groups for name, at in group.members if at == 1} & residual
    return any(len(coupling.dims(name)) == 2 for name in consumers)


# ---- The model that is shrunken: a module with its weights, or one on the meta device whose weights lie in files.
#
# Law: the selection reads this value alone, so that modules and directories are treated alike.


@dataclass(frozen=True)
class PruningTarget:
    """A model to be shrunken, with its coupling, its configuration and access to its weights.

    Attributes:
        model: the module; its weights are not asked of it.
        scope: what of it may leave.
        inputs: the examples that were watched.
        weights: ``{name: parameter}``, of which one at a time is looked at.
        blocks: ``(name, step)``: the rows of a parameter, some at a time: all but the last a multiple of ``step``.
        configured: what is to say what is left; None where nothing does.
        proved_on: a model with values on which the proof is made, this one or one like it; None: there is no proof.
    """

    model: nn.Module
    scope: Scope
    inputs: Sequence[Any]
    weights: Mapping[str, Tensor]
    blocks: Callable[[str, int], Iterable[Tensor]]
    configured: Configured | None = None
    proved_on: nn.Module | None = None

    @property
    def coupling(self) -> Coupling:
        return self.scope.coupling

    def objections(self, groups: Sequence[Group], kept: Kept) -> tuple[list[Group], str]:
        """The groups of which this cannot be all that is kept, and why not."""
        if self.proved_on is not None:
            wrong = wrong_groups(self.proved_on, self.coupling, groups, kept, self.inputs)
            if wrong:
                return wrong, "the smaller model computed something else"
        if self.configured is None:
            return [], ""
        wrong = self.configured.unsaid(self.proved_on, self.coupling, groups, kept, self.inputs)
        return wrong, "a model built from the configuration is not the smaller one"

    def fields(self, kept: Kept) -> dict[Place, Any]:
        """What the configuration becomes, if there is one, when these units stay."""
        return {} if self.configured is None else self.configured.changes(kept) or {}

    def plan(self, kept: Kept) -> Plan:
        """What leaves when these units stay, and what becomes of numbers that the configuration says."""
        plan = plan_of(self.model, self.coupling, kept)
        return plan if self.configured is None else self.configured.completed(plan, kept)

    def is_possible(self, counts: Mapping[str, int]) -> bool:
        """Whether there is a model of which so many units are left."""
        return self.configured is None or self.configured.is_possible(counts)


def pruning_target(
    model: nn.Module,
    scope: Scope,
    inputs: Sequence[Any],
    *,
    configured: Configured | None = None,
    proved_on: nn.Module | None = None,
) -> PruningTarget:
    """The `PruningTarget` of a module in memory."""
    weights = dict(model.named_parameters())
    return PruningTarget(model, scope, inputs, weights, lambda name, _: [weights[name].detach()], configured, proved_on)
