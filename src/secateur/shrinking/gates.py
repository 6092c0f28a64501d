"""What leaves by the loss of the whole model: a gate for each unit, expert or branch, learnt while the weights are
frozen.

Law: gates of 1 are the model bit for bit, gates of 0 the model without what leaves; at every step they cost what may be
left. The same batches give the same gates, and the model is left as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.coupling import Group
from secateur.models import NUMBERS, DenseOutputs, Descended, computing_with, full_name, recomputed, running
from secateur.shrinking.costs import CostPolynomial, TiedGroups, amount_of, timed_amount
from secateur.shrinking.counting import rounded_ties
from secateur.shrinking.measure import Curve, Measured
from secateur.shrinking.request import PruningTarget, Request
from secateur.support import Forward, track

STEPS, RATE, MOMENTA = 200, 0.1, (0.9, 0.95)  # of Adam
WARM, COLD = 1.0, 0.1  # the temperatures at the start and in the end
RAMP = 0.5  # of the steps until as much is gone as was asked
REACH = 6.0  # how far from the level a gate begins at most
JUDGED = 20  # steps, after which what gates would take is judged where that has to be looked at
_HALVINGS, _HARD = 60, 1e-4  # a temperature at which gates are 0 or 1

Worths = Mapping[str, npt.NDArray[np.float64]]  # of each group's units
Gates = Mapping[str, Tensor]  # of each group's units, in [0, 1], or exactly 0 and 1


@dataclass(frozen=True)
class Gated(Descended):
    """What gates came to, which begin such as by local losses.

    Attributes:
        worths: of the units of each group: the logarithm of what one is worth over what it costs, higher = keep.
    """

    worths: Worths = field(repr=False, kw_only=True)

    def misfit(self, named: Mapping[str, Group]) -> str | None:
        """Why they are not of this model's groups."""
        for name, its in self.worths.items():
            if name not in named or named[name].size != len(its):
                return f"has of {name} gates of {len(its)} units, which the model has not"
        return None


class GateBudget:
    """Gates that cost what may be left: ``σ((worth - level) / temperature)``, where the level is solved for.

    The level is the logarithm of the budget's multiplier. Ties lose what their units together say, and of tied groups
    each has a level of its own, so that all keep the same share. Units are in one tensor, (units,), float64, group by
    group.
    """

    def __init__(self, tied: Sequence[TiedGroups], amount: CostPolynomial, sparsity: float) -> None:
        self.tied, self.amount = tied, amount
        self.groups = [group for each in self.tied for group in each.groups]
        self.tie_of = torch.tensor(
            [at for at, each in enumerate(self.tied) for _ in each.groups], dtype=torch.int64, device="cpu"
        )
        self.sizes = torch.tensor([group.size for group in self.groups], dtype=torch.int64, device="cpu")
        self.group_of = torch.arange(len(self.groups), device="cpu").repeat_interleave(self.sizes)
        self.alike = torch.bincount(self.tie_of).double()  # groups of each tie
        self.parts = torch.tensor([float(each.parts) for each in self.tied], dtype=torch.float64, device="cpu")
        self.whole = self.amount(self.parts.numpy())
        self.goal = (1 - sparsity) * self.whole

    @classmethod
    def of(cls, subject: PruningTarget, groups: Sequence[Group], asked: Request) -> GateBudget:
        """Of groups of units, by what is asked; of a latency by what is measured of groups."""
        assert asked.sparsity is not None  # `request` has looked
        tied = rounded_ties(subject, groups, asked, {})
        its = subject.model, subject.coupling, subject.inputs[0]
        timed = asked.target == "latency"
        amount = timed_amount(*its, asked.runtime, tied) if timed else amount_of(*its, asked.target, tied)
        return cls(tied, amount, asked.sparsity)

    @classmethod
    def counting(cls, tied: Iterable[Sequence[Group]], share: float) -> GateBudget:
        """Of what is only counted: so large a share leaves."""
        ties = [TiedGroups(each, 1, {}) for each in tied]
        return cls(ties, CostPolynomial([([group.axis], 1) for each in ties for group in each.groups], ties), share)

    def meeting(self, counts: Mapping[str, int]) -> GateBudget:
        """The one that is met where so many units stay of each group, and all of those not named."""
        sizes = {group.name: group.size for group in self.groups}
        left = self.amount([each.mean({**sizes, **counts}) for each in self.tied])
        return GateBudget(self.tied, self.amount, max(0.0, 1 - left / self.whole))

    def split(self, units: Tensor) -> dict[str, Tensor]:
        """``{group: its units}``."""
        names = [group.name for group in self.groups]
        return dict(zip(names, torch.split(units, self.sizes.tolist()), strict=True))

    def prices(self, shares: Tensor) -> Tensor:
        """(units,): what a unit of each group costs, by the next part of its tie when the ties keep these shares."""
        here, steps = (shares * self.parts).numpy(), (self.parts / 1024).tolist()
        found = [-self.amount.changes(here, at, [here[at] - step])[0] / step for at, step in enumerate(steps)]
        each = (torch.tensor(found, dtype=torch.float64, device="cpu") * self.parts / self.alike)[
            self.tie_of
        ] / self.sizes
        return each[self.group_of]

    def gates(self, worths: Tensor, temperature: float, goal: float) -> Tensor:
        """(units,), in [0, 1]; gradients are those along which the cost stays."""
        with torch.no_grad():
            low, high = float(worths.min()) - 40 * temperature, float(worths.max()) + 40 * temperature
            for _ in range(_HALVINGS):
                level = (low + high) / 2
                much = self._cost(self._gates(worths, temperature, level)) > goal
                low, high = (level, high) if much else (low, level)
            found = self._gates(worths, temperature, high)
            prices = self.prices(self._by_tie(found))
            slopes = (prices * found * (1 - found)).sum() / temperature
        spent = (prices * self._gates(worths, temperature, high)).sum()
        found = self._gates(worths, temperature, high + _change(spent) / slopes.clamp_min(1e-30))
        return self._alike(worths, temperature, found) if bool((self.alike > 1).any()) else found

    def _gates(self, worths: Tensor, temperature: float, level: float | Tensor) -> Tensor:
        return torch.sigmoid((worths - level) / temperature)

    def _alike(self, worths: Tensor, temperature: float, found: Tensor) -> Tensor:
        """Each group's gates by a level of its own, at which it keeps the share of its tie."""
        wanted = self._by_tie(found)[self.tie_of]
        with torch.no_grad():
            low = torch.full(
                (len(self.groups),), float(worths.min()) - 40 * temperature, dtype=torch.float64, device="cpu"
            )
            high = torch.full_like(low, float(worths.max()) + 40 * temperature)
            for _ in range(_HALVINGS):
                levels = (low + high) / 2
                much = self._by_group(self._gates(worths, temperature, levels[self.group_of])) > wanted
                low, high = torch.where(much, levels, low), torch.where(much, high, levels)
        at_level = self._gates(worths, temperature, high[self.group_of])
        slopes = self._by_group((at_level * (1 - at_level)).detach()) / temperature
        levels = high + _change(self._by_group(at_level) - wanted) / slopes.clamp_min(1e-30)
        return self._gates(worths, temperature, levels[self.group_of])

    def _by_group(self, units: Tensor) -> Tensor:
        """The share that each group keeps."""
        return units.new_zeros(len(self.groups)).index_add(0, self.group_of, units) / self.sizes

    def _by_tie(self, units: Tensor) -> Tensor:
        """The share that each tie keeps."""
        return units.new_zeros(len(self.tied)).index_add(0, self.tie_of, self._by_group(units)) / self.alike

    def _cost(self, units: Tensor) -> float:
        return self.amount((self._by_tie(units) * self.parts).numpy())


def _change(value: Tensor) -> Tensor:
    """0, with the gradient of the value: a step of Newton's from a solution has that of the implicit function."""
    return value - value.detach()


# ---- where gates are multiplied in ----------------------------------------------------------------------------------


Places = Mapping[str, Sequence[tuple[str, int, Tensor]]]  # of a parameter the groups, dimensions and units along these


def gate_places(
    subject: PruningTarget, groups: Sequence[Group], measured: Measured, blocks: Mapping[str, nn.Module]
) -> Places:
    """Where the gates of groups are multiplied in: into what reads the units, if a block holds all of a group and
    matrices read it, so that a gate counts once; else into all that a unit has."""
    inside = [
        {full_name(block, name) for name, _ in (*module.named_parameters(), *module.named_buffers())}
        for block, module in blocks.items()
    ]
    parameters = {name for name, _ in subject.model.named_parameters()}
    found: dict[str, list[tuple[str, int, Tensor]]] = {}
    for group in groups:
        own = [(name, at) for name, at in group.members if name in parameters]
        readers = [(name, at) for name, at in own if name in measured.consumers.get(group.name, ())]
        within = any(all(name in names for name, _ in group.members) for names in inside)
        once = within and 0 < len(readers) == len({name for name, _ in readers})
        for name, at in readers if once else own:
            index = torch.from_numpy(subject.coupling.indices(group, name, at))
            found.setdefault(name, []).append((group.name, at, index))
    return found


@contextlib.contextmanager
def gated(model: nn.Module, places: Places, gates: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which the model computes with its weights times gates, which gradients reach.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> halves = {"units": torch.tensor([1.0, 0.5])}
    >>> with gated(model, {"weight": [("units", 1, torch.arange(2))]}, halves):
    ...     now = model(torch.eye(2)).flatten()
    >>> torch.equal(now, model.weight[0] * halves["units"])
    True
    """
    own = dict(model.named_parameters())
    new: dict[str, Tensor] = {}
    for name, its in places.items():
        weight: Tensor = own[name]
        for group, at, index in its:
            factors = torch.cat([gates[group].to(weight), weight.new_ones(1)])[index.to(weight.device)]
            weight = weight * factors.reshape([-1 if dim == at else 1 for dim in range(weight.dim())])
        new[name] = weight
    with computing_with(model, new):
        yield


# ---- learnt ---------------------------------------------------------------------------------------------------------


def learnt(
    subject: PruningTarget,
    budget: GateBudget,
    groups: Sequence[Group],
    measured: Measured,
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    batches: Sequence[Any],
    forward: Forward | None = None,
) -> Gated:
    """Gates of units, which begin with what was measured; see `descended`.

    Args:
        model: with its weights, in memory; it takes what one backward pass takes, and its gated weights once more.
        blocks: of it.
    """
    places = gate_places(replace(subject, model=model), groups, measured, blocks)
    dense = DenseOutputs(model, batches, forward, numbers=NUMBERS)
    return descended(
        dense, budget, _start(budget, measured), lambda gates: gated(dense.model, places, gates), [*blocks.values()]
    )


def descended(
    dense: DenseOutputs,
    budget: GateBudget,
    start: Tensor,
    within: Callable[[Gates], AbstractContextManager[Any]],
    blocks: Sequence[nn.Module] = (),
    without: Callable[[Gates], AbstractContextManager[Any]] | None = None,
) -> Gated:
    """Gates that descend on how far the outputs are from the dense ones: nothing but they moves (as in DISP-LLM,
    arXiv:2410.11988), and no penalty holds the budget, since each step meets it.

    Forwards a gate is 0 or 1, as it will be; backwards it is soft, at a temperature that falls (straight through, as in
    arXiv:1308.3432). Soft gates alone find what half-open ones can do: of a small Llama they lose .004 as they are
    learnt, and .018 as 0 and 1; these .011. What may be left falls to the goal in the first half. Where what gates
    would take loses no less than what the start would, on the batches and before repair, the start is given. The
    batches come in an order that is drawn from a seed.

    Args:
        start: (units,), float64, higher = keep.
        within: a context in which the model computes with gates, which gradients reach.
        blocks: those of which a backward pass holds no more than what they are given, where all would take more than
            `ROOM`.
        without: one in which it computes without what has a gate of 0, if gates of 0 are not quite that. Then what
            gates would take is judged every `JUDGED` steps, and the best is taken.

    Raises:
        ValueError: no gradient of the outputs reaches a gate, or one is not finite.
    """
    worths = start.clone().requires_grad_()
    order, count = dense.in_order(STEPS, torch.Generator().manual_seed(0)), len(dense.held)
    optimizer = torch.optim.Adam([worths], lr=RATE, betas=MOMENTA)
    losses: list[float] = []

    def lost(at: int, gates: Gates, within: Callable[[Gates], AbstractContextManager[Any]] = within) -> Tensor:
        with within(gates):
            return dense.rows_lost(at)

    def loses(worths: Tensor) -> float:  # without what these take
        with torch.no_grad():
            gates = budget.split(budget.gates(worths, _HARD, budget.goal).round())
            return float(torch.cat([lost(at, gates, without or within) for at in range(count)]).mean())

    with running(dense.model), torch.enable_grad():
        dense.model.requires_grad_(False)
        before = loses(start)
        best = before, start
        gates = budget.split(budget.gates(worths, WARM, budget.goal))
        again = dense.to_compute_again(blocks, lambda: lost(0, gates))
        for step in track(range(STEPS), "learning gates"):
            temperature = WARM * (COLD / WARM) ** (step / STEPS)
            goal = budget.whole - (budget.whole - budget.goal) * min(1.0, (step + 1) / (RAMP * STEPS))
            hard = budget.gates(worths.detach(), _HARD, goal).round()
            gates = budget.split(hard + _change(budget.gates(worths, temperature, goal)))
            with within(gates), recomputed(again):
                loss = dense.to_descend(order[step], "gate")
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(max(0.0, float(loss.detach())))
            judges = without is not None and (step + 1) % JUDGED == 0 and goal == budget.goal
            if judges or step + 1 == STEPS:
                best = min(best, (loses(worths.detach()), worths.detach().clone()), key=lambda each: each[0])
    found = {name: its.numpy() for name, its in budget.split(best[1]).items()}
    return Gated(STEPS, before, best[0], tuple(losses), worths=found)


def ranked_start(scores: Iterable[Tensor]) -> Tensor:
    """(units,), float64: where gates begin that are known by the order of scores alone, each (units,), higher = keep.

    >>> ranked_start([torch.tensor([3.0, 9.0]), torch.tensor([1.0, 0.0])])
    tensor([-1.0986,  1.0986,  1.0986, -1.0986], dtype=torch.float64)
    """
    places = ((each.argsort().argsort().double() + 0.5) / len(each) for each in scores)
    return torch.cat([each.logit() for each in places]).clamp(-REACH, REACH)


def _start(budget: GateBudget, measured: Measured) -> Tensor:
    """(units,), float64: the logarithm of what is lost next over what that saves, less that of the unit at which the
    goal is met; of units that nothing was measured of, as of the dearest tenth."""
    prices = budget.split(budget.prices(torch.ones(len(budget.tied), dtype=torch.float64, device="cpu")))
    found = []
    for group in budget.groups:
        worths = np.full(group.size, np.nan)
        if (curve := measured.curves.get(group.name)) is not None:
            losses = np.array([curve(count) for count in range(group.size, 0, -1)])
            more = np.maximum.accumulate(
                np.append(np.diff(losses), 0.0)
            )  # the last unit, which stays, as the one before
            order = measured.scores[group.name].argsort().numpy()
            price = max(float(prices[group.name][0]), 1e-300)
            worths[order] = np.log(np.maximum(more, 1e-300) / price) + np.linspace(0, 1e-3, group.size)
        found.append(worths)
    every = np.concatenate(found)
    every[np.isnan(every)] = 0.0 if np.isnan(every).all() else np.nanquantile(every, 0.9)
    start = torch.from_numpy(every)
    stay = budget.gates(start, _HARD, budget.goal) >= 0.5
    level = start[stay].min() if bool(stay.any()) else start.max()
    return (start - level).clamp(-REACH, REACH)


def by_gates(budget: GateBudget, measured: Measured, gates: Gated) -> Measured:
    """The measurements in which scores are the worths of the gates, and losses add up what these say: so counts are
    found that meet the budget exactly, and units that are worth less leave first."""
    prices = budget.split(budget.prices(torch.ones(len(budget.tied), dtype=torch.float64, device="cpu")))
    scores = {name: torch.from_numpy(its) for name, its in gates.worths.items()}
    curves = {}
    for name, its in scores.items():
        losses = (its.sort().values.clamp(-60, 60).exp() * prices[name]).cumsum(0).numpy()
        curves[name] = Curve(np.arange(len(its) + 1), np.concatenate([[0.0], losses])[::-1])
    return replace(measured, scores={**measured.scores, **scores}, curves={**measured.curves, **curves}, tried=True)
