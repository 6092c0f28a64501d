"""The search for a level of each group: dynamic programming, the fixed allocations, an evolutionary search from there,
and in the end the measured loss of finished models.

Law: nothing of the model changes; what is chosen fits the budget, and loses no more than any fixed allocation of the
same levels and budget does, on the batches held back; finished, no more than any of these that was finished.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from secateur.coupling import Coupling, Group, Scope, counts_kept, find_coupling, may_leave
from secateur.models import NoSlopeError, computing_with, example_for, parts_of, recomputed, running, shorter
from secateur.operations import Operation, operations_of
from secateur.runtimes import Elsewhere, OnnxRuntime, Runtime, Timer, is_mixed, rounding
from secateur.search.costs import (
    BESIDE,
    Budget,
    CostModel,
    Judged,
    Variable,
    bill_of,
    holds,
    nonzeros,
    taken_of,
    words_of_shares,
)
from secateur.search.latency import Times, changed_by, saved_by
from secateur.search.levels import CONVOLUTIONS, Levels, Matrix, RoundedLevels, Rung, matrices_of
from secateur.search.result import KINDS, Chosen, Point, cost_text, knee_of
from secateur.search.score import ModelLoss
from secateur.search.search import STEPS, Choice, Evolved, Gate, descended, evolved, looked_at, measured_curve
from secateur.search.sensitivity import Sensitivity, curves_of
from secateur.search.space import Class, Predicted, Space, candidates, classes_of
from secateur.shrinking import (
    Configured,
    Plan,
    TiedGroups,
    carry_out,
    check_globs,
    coupling_on_meta,
    has_configuration,
    names_of,
    plan_of,
    tie_roles,
)
from secateur.support import (
    Forward,
    alone,
    in_mode,
    mapped,
    normal,
    on_rank_zero,
    run_example,
    side_by_side,
    track,
    unwrapped,
)

PASSES = 30.0  # over the batches held back that a search may make, with the curve and the candidates
_POINTS = 6  # of the curve, below the dense model
_LEAST = 0.01  # of what the model costs, that the curve goes down to
_CLOSE = 0.02  # of a latency, that is not corrected any more
_CORRECTIONS = 3
_SMALLER = 0.96  # of a budget, from one try to keep the score to the next
_TRIES = 4
_NEAR_ENOUGH = 0.01  # of what a model costs: two shares are one
ERRORS = "errors"  # what the sum of the levels' errors chooses
SEARCHED, DEFAULT, GATES = "searched", "shrink, by itself", "gates"
_ALONE = 1 / 3  # of the passes, that groups are measured alone in
_WORSE = 2.0  # times the loss of the best fixed allocation: what loses more is not finished
_OF_WEIGHTS = {"linear", "embedding", "conv1d", "conv2d", "conv3d"}
_NEAR = 6  # of so many levels one, from the best to what is finished next


def _of_weights(several: Counter[Operation], is_of: bool) -> Counter[Operation]:
    """Those that multiply with a weight, or look up its rows; or the others."""
    return Counter({each: count for each, count in several.items() if (each.name in _OF_WEIGHTS) == is_of})


def kept_by(lost: float, most: float) -> bool:
    """Whether no more is lost than may be, but for rounding.

    >>> kept_by(0.01 + 1e-15, 0.01), kept_by(0.02, 0.01)
    (True, False)
    """
    return lost <= most + 1e-9 * max(1.0, abs(most))


@dataclass(frozen=True)
class ByItself:
    """The result of `secateur.shrink` at a budget, without a search.

    Attributes:
        judged: the loss of the finished model.
        units: ``{group of the coupling: how many stay}``.
        costs: of the finished model.
    """

    judged: Judged
    units: Mapping[str, int]
    costs: Mapping[str, float]


class Finishing(Protocol):
    """Choices carried out on a copy of the model, by what levels were made of."""

    def judged(self, choice: Mapping[str, int]) -> Judged:
        """The loss of the finished model."""

    def held(self, choice: Mapping[str, int]) -> float:
        """Its loss on the held-back batches, which it was not fitted on."""

    def by_itself(self, limits: Mapping[str, float], *, by_all: bool = False) -> ByItself | None:
        """What a verb makes of the budget, by what levels were made of or by all batches; None where none takes such a
        budget."""


@dataclass(frozen=True)
class _Seen:
    """A coupling that shrink would find: what it would object to, before anything is chosen.

    Attributes:
        scope: with what a configuration cannot say frozen, and the rest tied, where that is asked for.
        configured: what says whether there is such a model; None where nothing does.
    """

    scope: Scope
    configured: Configured | None = None

    @functools.cached_property
    def groups(self) -> dict[str, Group]:
        return {group.name: group for group in self.scope.groups}

    def tied_to(self, names: Iterable[str]) -> set[str]:
        """All groups of the ties that these are in."""
        numbers = {self.groups[name].tied for name in names if name in self.groups}
        return {name for name, group in self.groups.items() if group.tied in numbers}

    def objection(self, kept: Mapping[str, Any], example: Any = None) -> str | None:
        """Why these groups cannot keep these units; None where they can. With an example what a configuration builds is
        compared with the smaller model, too."""
        groups = self.groups
        masks = {name: np.asarray(mask) for name, mask in kept.items() if name in groups}
        counts = counts_kept(masks)
        if self.scope.contradicted(counts):
            return "a comparison in the code would change its result"
        if self.configured is None or not counts:
            return None
        if not self.configured.is_possible(counts):
            return "the configuration cannot express this size of it"
        if example is not None:
            its = [groups[name] for name in kept if name in groups]
            try:
                wrong = self.configured.unsaid(None, self.scope.coupling, its, masks, [example])
            except ValueError:  # of all of them
                wrong = its
            if wrong:
                return "a model built from the configuration is not the smaller one"
        return None


class _Slopes:
    """How the loss of one batch changes with the share of each gate, where the model's weights lie between the levels
    of all; of these there are two of each class in memory, besides the weights and the slopes along them.

    Args:
        search: of the levels, in a context where its model runs with gradients.
    """

    def __init__(self, search: LevelSearch) -> None:
        held, rest = search.measured, search.seen  # by one of the batches alone, what is found is of that one
        without = [*held.unguarded, *(len(held.held) + at for at in rest.unguarded)]
        self.search, self.measured = search, copy.copy(held)
        self.measured.held = mapped([*held.held, *rest.held], normal)
        self.dense = {name: each.detach() for name, each in search.inner.named_parameters()}
        self.known: list[dict[int, dict[str, Tensor]]] = [{} for _ in search.space.classes]
        draw = torch.Generator().manual_seed(search.seed % (1 << 63))
        self.order = self.measured.in_order(STEPS, draw, without=without)
        self.again: Sequence[nn.Module] | None = None  # what a backward pass computes once more

    def __call__(self, gates: Sequence[Gate], step: int) -> list[float]:
        ends = [self._ends(at, gate) for at, gate in enumerate(gates)]
        new: dict[str, Tensor] = {}
        for its, gate in zip(ends, gates, strict=True):
            for name, low, high in self._pairs(*its):
                between = torch.lerp(low, high, gate.share)
                new[name] = between if name not in new else new[name] + (between - self.dense[name])
        leaves = {name: each.detach().requires_grad_() for name, each in new.items()}
        with computing_with(self.search.inner, leaves):
            if self.again is None:
                blocks = [*parts_of(self.search.inner).values()]
                self.again = self.measured.to_compute_again(blocks, lambda: self.measured.rows_lost(self.order[0]))
            with recomputed(self.again):
                loss = self.measured.to_descend(self.order[step], "level")
                found = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
        slopes = {name: each for name, each in zip(leaves, found, strict=True) if each is not None}
        return [
            math.fsum(
                float((slopes[name] * (high - low)).sum()) for name, low, high in self._pairs(*its) if name in slopes
            )
            for its in ends
        ]

    def _ends(self, at: int, gate: Gate) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The values of the two levels; those of others are let go of."""
        known, search = self.known[at], self.search
        self.known[at] = {
            level: known[level] if level in known else search.levels.weights(search.inner, search.one(at, level))
            for level in (gate.low, gate.high)
        }
        return self.known[at][gate.low], self.known[at][gate.high]

    def _pairs(self, low: Mapping[str, Tensor], high: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name in dict.fromkeys([*low, *high]):
            yield name, low.get(name, self.dense[name]), high.get(name, self.dense[name])


@dataclass(eq=False)
class LevelSearch:
    """What is asked, and what is known of the model so far; the parameters are those of `secateur.fit`.

    Attributes:
        scope: ``{"include": globs or None, "exclude": globs or None}``: what may leave of all that has levels.
        in_directory: that `shrink` of a directory carries it out, which watches the model on the meta device.
        stays: ``{group: why}`` of what has levels and stays whole all the same.
    """

    model: nn.Module
    asked: Budget
    levels: Levels
    rest: Sequence[Any]  # that levels were made of
    measured: ModelLoss
    example: Any
    timed_on: Any  # what a latency is of
    forward: Forward | None = None
    uniform: bool = False
    over: tuple[str, ...] = ("shrink", "oneshot")
    seed: int = 0
    passes: float = PASSES
    folder: Path | None = None
    timer: Timer | None = None  # of a copy of the dense model, to time others beside
    trials: dict[Choice, float] = field(default_factory=dict)  # milliseconds that were measured
    spent: float = 0.0
    starts: dict[str, Choice] = field(default_factory=dict)  # that the last search began with
    alike: Mapping[str, Choice] = field(default_factory=dict)  # all of the model in so many bits
    default: ByItself | None = None
    known: Sensitivity | None = None  # that was measured before
    scope: Mapping[str, Any] = field(default_factory=dict)
    in_directory: bool = False
    stays: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inner = unwrapped(self.model)
        self.coupling = find_coupling(self.inner, self.example)
        self.kinds = {kind for word in self.over for kind in KINDS[word]}
        free = self._in_scope([name for name in self.levels if self.levels.kind[name] in self.kinds])
        self._seen_alone = _Seen(Scope.of(self.coupling))
        self._seen = [(self._seen_alone, None)]
        tied: Iterable[Iterable[str]] = [[name] for name in free]
        if self.uniform:
            tied = self._uniform(free)
        classes = [self._allowed(each) for each in classes_of(self.levels, tied)]
        self.space = Space(self.levels, [each for each in classes if len(each.levels) > 1], possible=self._is_possible)
        if not self.space.classes:
            raise ValueError(f"nothing that has levels can leave.{self._why()}")
        self.space.beside = self._bill([word for word in self.asked.words if word in BESIDE])
        if "latency" in self.asked.words:
            self.space.predicted = on_rank_zero(self._predicted)  # two that time at once disturb each other

    @functools.cached_property
    def seen(self) -> ModelLoss:
        """The loss on the batches that levels were made of, by outputs."""
        word: Any = self.measured.word
        return ModelLoss(self.model, self.rest, self.forward, word, keep=self.measured.keep)

    @functools.cached_property
    def _mixed(self) -> OnnxRuntime | None:
        """The runtime, if bits are chosen, too: it calibrates where there are convolutions, which gain nothing else."""
        if not is_mixed(self.asked.runtime):
            return None
        mine = cast(OnnxRuntime, self.asked.runtime)
        convolved = any(isinstance(each, CONVOLUTIONS) for each in self.inner.modules())
        return replace(mine, bits=8, calibrated=True) if convolved else mine

    @property
    def _timed_in(self) -> Runtime | Elsewhere:
        """Where levels are timed before any bits are chosen."""
        return self._in(32) if self._mixed else self.asked.runtime

    # ---- what can be chosen ---------------------------------------------------------------------------------------

    def _in_scope(self, names: Sequence[str]) -> list[str]:
        """Those that the globs say may leave."""
        include, exclude = self.scope.get("include"), self.scope.get("exclude") or ()
        modules = {name for name, _ in self.inner.named_modules()}
        known = names_of(self.coupling) | modules | {name for name, _ in self.inner.named_parameters()}
        check_globs(known, (*(include or ()), *exclude))
        members = {group.name: {name for name, _ in group.members} for group in self.coupling.groups}

        def may(name: str) -> bool:
            groups = self.levels.groups[name]
            if self.levels.kind[name] == "layer":
                return may_leave({*groups}, include, exclude)
            return all(may_leave({group} | members.get(group, set()), include, exclude) for group in groups)

        free = [name for name in names if may(name)]
        self.stays |= {name: "include and exclude leave it whole" for name in names if name not in free}
        return free

    def _uniform(self, free: Sequence[str]) -> list[list[str]]:
        """Which groups go to a level together, so that a configuration can say it."""
        layers = [name for name in free if self.levels.kind[name] == "layer"]
        units = [name for name in free if name not in layers]
        if not units:
            return [[name] for name in layers]
        self._seen = [self._said_of(self.inner, self.example, self.coupling)]
        if self.in_directory:
            meta = self._seen[0][0].configured
            if meta is not None:
                built = meta.build({})
                example = example_for(built)
                self._seen.append(self._said_of(built, example, coupling_on_meta(built, example)))
        tied: dict[Any, list[str]] = {}
        for name in units:
            roles = tuple(self._tie_of(name, seen) for seen, _ in self._seen)
            if None in roles:
                self.stays[name] = self._frozen(name)
            else:
                tied.setdefault(roles, []).append(name)
        found = []
        for names in tied.values():
            there = {group for name in names for group in self.levels.groups[name]}
            others = sorted(set[str]().union(*(seen.tied_to(there) for seen, _ in self._seen)) - there)
            if not others:
                found.append(names)
            else:
                why = (
                    f"one number says how much stays of it and of {others[0]}, which has no levels or is to stay whole"
                )
                self.stays |= dict.fromkeys(names, why)
        return [*([name] for name in layers), *found]

    def _said_of(self, model: nn.Module, example: Any, coupling: Coupling) -> tuple[_Seen, Any]:
        """What may leave, with its groups tied, and the example that it was traced with."""
        scope = Scope.of(coupling)
        if has_configuration(model):
            configured = Configured(model, scope)
            return _Seen(configured.scope, configured), shorter(example)
        return _Seen(tie_roles(scope)), None

    def _tie_of(self, name: str, seen: _Seen) -> int | None:
        """Which tie the groups of an entry are in; None where one of them is in none, or in another. Groups of the same
        tensors have numbers in their names, which depend on what was watched."""
        mine, groups = self._seen_alone.groups, seen.groups
        numbers = {
            groups[each].tied
            if each in groups and each in mine and {*groups[each].members} == {*mine[each].members}
            else None
            for each in self.levels.groups[name]
        }
        return numbers.pop() if len(numbers) == 1 else None

    def _frozen(self, name: str) -> str:
        """Why shrink leaves it whole."""
        for group in self.levels.groups[name]:
            for place in self._seen_alone.groups[group].members if group in self._seen_alone.groups else ():
                for seen, _ in self._seen:
                    if place in seen.scope.frozen:
                        return seen.scope.frozen[place]
        return "no configuration describes it with fewer units"

    def _allowed(self, each: Class) -> Class:
        """With the levels that nothing objects to."""
        levels, why = [each.levels[0]], ""
        for its in each.levels[1:]:
            kept = self.levels.kept(dict(zip(each.names, its, strict=True)))
            said = next((said for seen, example in self._seen if (said := seen.objection(kept, example))), None)
            if said is None:
                levels.append(its)
            why = said or why
        if len(levels) == 1:
            self.stays |= dict.fromkeys(each.names, why or "its groups have no level in common")
        return replace(each, levels=tuple(levels))

    def _is_possible(self, choice: Mapping[str, int]) -> bool:
        """Whether shrink would take such a choice."""
        kept = self.levels.kept(choice)
        return all(seen.objection(kept) is None for seen, _ in self._seen)

    def _why(self) -> str:
        """What stays whole, and why: of each reason one."""
        if not self.stays:
            return f" There are no levels over {', '.join(map(repr, self.over))}."
        by_reason: dict[str, list[str]] = {}
        for name, why in self.stays.items():
            by_reason.setdefault(why, []).append(name)
        said = [
            f"{names[0]}{f' and {len(names) - 1} others' if len(names) > 1 else ''}: {why}"
            for why, names in [*by_reason.items()][:10]
        ]
        return f" {'; '.join(said)}."

    def _bill(self, words: Sequence[str]) -> CostModel | None:
        """What any choice costs of what levels say nothing of."""
        if not words:
            return None
        groups = {group.name: group for group in self.coupling.groups}
        entries: list[Variable] = [
            its[0] if self.levels.kind[name] == "layer" else TiedGroups([groups[each] for each in its], 1, {})
            for name, its in self.levels.groups.items()
        ]
        return bill_of(self.inner, self.coupling, entries, self.example, words)

    # ---- latency --------------------------------------------------------------------------------------------------

    def _predicted(self) -> Predicted:
        """What each level of each group saves; groups of which all is alike are measured once."""
        self.timer = Timer(copy.deepcopy(self.inner), self.timed_on, self._timed_in)
        of, plans = self._plans()
        saved = saved_by(self.timer.dense, self.timed_on, plans, Times(self.folder, self._timed_in))
        table = {
            name: [0.0, *(saved[first, at] for at in range(1, len(self.levels[name])))] for name, first in of.items()
        }
        return Predicted(self.timer(self.timer.dense)[0], table)

    def _plans(self) -> tuple[dict[str, str], dict[tuple[str, int], Plan]]:
        """``{group: one that is like it}``, and what is carried out of each level of these."""
        assert self.timer is not None
        alike: dict[Any, str] = {}
        of: dict[str, str] = {}
        for name, levels in self.levels.items():
            if self.levels.kind[name] != "layer":
                costs = tuple((each.kept, each.of, each.costs["macs"], each.costs["params"]) for each in levels)
                of[name] = alike.setdefault((self.levels.kind[name], costs), name)
        return of, {
            (name, at): plan_of(self.timer.dense, self.coupling, self._masks({name: at}))
            for name in alike.values()
            for at in range(1, len(self.levels[name]))
        }

    def _masks(self, named: Mapping[str, int]) -> dict[str, Any]:
        return {name: np.asarray(mask) for name, mask in self.levels.kept(named).items()}

    def _tried(self, choice: Choice) -> float:
        """The milliseconds of a model of this structure, measured in turns with the dense one."""
        if choice not in self.trials:
            self.trials[choice] = on_rank_zero(functools.partial(self._timed, choice))
        return self.trials[choice]

    def _timed(self, choice: Choice) -> float:
        assert self.timer is not None
        assert self.space.predicted is not None
        smaller = copy.deepcopy(self.timer.dense)
        carry_out(smaller, plan_of(smaller, self.coupling, self._masks(self.space.named(choice))), None)
        before, after = self.timer(smaller, self.served(self.space.named(choice)))
        return after / before * self.space.predicted.dense

    def served(self, named: Mapping[str, int]) -> Runtime | None:
        """Where a choice is run, if bits are chosen, too."""
        return None if self._mixed is None else replace(self._mixed, modules=(*self.bits(named).items(),))

    def bits(self, named: Mapping[str, int]) -> dict[str, int]:
        """``{module: bits}`` of those with fewer than 32 at a choice."""
        return self.levels.bits(named) if isinstance(self.levels, RoundedLevels) else {}

    def _corrected(self, choice: Choice, limits: Mapping[str, float]) -> bool:
        """Whether the prediction was off, and is now what was measured."""
        predicted = self.space.predicted
        if predicted is None or "latency" not in limits or not any(choice):
            return False
        measured, table = self._tried(choice), predicted.by_table(self.space.named(choice))
        off = measured / limits["latency"] - 1
        below = predicted.of(self.space.named(choice)) / limits["latency"] - 1  # what levels are too coarse for
        if abs(off) <= _CLOSE or abs(off - below) <= _CLOSE / 2 or table <= 0:
            return False
        sure = predicted.surely(self.space.named(choice))
        predicted.factor = max(0.0, (predicted.dense - sure - measured) / table)
        return True

    # ---- bits -----------------------------------------------------------------------------------------------------

    def _with_bits(self) -> None:
        """From here on levels are also of the bits of what they leave: of both together those that nothing beats in all
        that it costs and in what it loses. A linear or table of no group has bits alone."""
        exact, space = self.levels, self.space
        assert self._mixed is not None
        cells, matrices = matrices_of(self.inner, self._mixed), dict[str, list[Matrix]]()
        members = self.levels.members
        for name in (name for each in space.classes for name in each.names):
            mine = [each for each in cells if len(each) == 1 and each[0].weight in members[name]]
            cells = [each for each in cells if each not in mine]
            matrices[name] = [one for each in mine for one in each]
        matrices |= {each[0].weight: each for each in cells}
        classes = [*space.classes, *(Class((each[0].weight,), ((0,),)) for each in cells)]
        curves = [*space.errors(), *([0.0] for _ in cells)]
        lost = self._lost_by_bits([[one for name in each.names for one in matrices[name]] for each in classes])
        pairs = [
            [(at, bits, curve[at] + more) for at in range(len(curve)) for bits, more in its.items()]
            for curve, its in zip(curves, lost, strict=True)
        ]
        timed = "latency" in self.asked.words
        saved = on_rank_zero(lambda: self._saved_by_bits(classes, pairs, matrices)) if timed else {}
        found = [self._unbeaten(*each, exact, matrices, saved) for each in zip(classes, pairs, strict=True)]
        pairs, alike = [pairs for pairs, _ in found], [alike for _, alike in found]
        rungs = {
            name: [Rung(each.levels[at][number], bits, loss / len(each.names)) for at, bits, loss in its]
            for each, its in zip(classes, pairs, strict=True)
            for number, name in enumerate(each.names)
        }
        ladders = [
            Class(each.names, tuple((at,) * len(each.names) for at in range(len(its))))
            for each, its in zip(classes, pairs, strict=True)
        ]
        self.levels = RoundedLevels(exact, rungs, matrices)
        self.space = Space(self.levels, [each for each in ladders if len(each.levels) > 1], possible=self._is_possible)
        self.space.curves = [[loss for *_, loss in its] for its in pairs if len(its) > 1]
        several = [its for its, rungs in zip(alike, pairs, strict=True) if len(rungs) > 1]
        self.alike = {f"int{bits}": tuple(its.get(bits, 0) for its in several) for bits in self._mixed.menu}
        if space.predicted is not None:
            sure = {name: [saved[name, 0, each.bits] for each in its] for name, its in rungs.items()}
            table = {
                name: [saved[name, each.level, each.bits] - saved[name, 0, each.bits] for each in its]
                for name, its in rungs.items()
            }
            self.space.predicted = replace(space.predicted, saved=table, factor=1.0, sure=sure)
        self.trials.clear()

    def _lost_by_bits(self, every: Sequence[Sequence[Matrix]]) -> list[dict[int, float]]:
        """``{bits: what the model loses}`` when these alone have as many."""
        assert self._mixed is not None
        several = self._mixed.menu
        menu = [() if not some else several[:1] if all(one.is_table for one in some) else several for some in every]
        runs = sum(map(len, menu))
        some, passes = self._some(runs)
        self.spent += passes

        def lost(at: int) -> dict[int, float]:
            found = {32: 0.0}
            for bits in menu[at]:
                with rounding(self.inner, {one.module: bits for one in every[at]}):
                    found[bits] = max(0.0, self.measured.now(some))
            return found

        return [*side_by_side(lost, range(len(every)), "rounding groups alone")]

    def _saved_by_bits(
        self,
        classes: Sequence[Class],
        pairs: Sequence[Sequence[tuple[int, int, float]]],
        matrices: Mapping[str, Sequence[Matrix]],
    ) -> dict[tuple[str, int, int], float]:
        """``{(group, level, bits): milliseconds}`` that it takes less than the dense group in float, by the times of
        operations with as many bits."""
        assert self.timer is not None
        assert self._mixed is not None
        of, plans = self._plans()
        changed = changed_by(self.timer.dense, self.timed_on, plans)
        alone = self._operations([one.module for its in matrices.values() for one in its])
        every = {each for both in changed.values() for some in both for each in some}
        every |= {each for its in alone.values() for each in its}
        menu = self._mixed.menu
        times = {bits: Times(self.folder and self.folder / f"int{bits}", self._in(bits)) for bits in menu}
        times[32] = Times(self.folder, self._in(32))
        for each in times.values():
            each.measure(every)
        slower = self._slower(times, alone)
        found: dict[tuple[str, int, int], float] = {}
        for cls, its in zip(classes, pairs, strict=True):
            for at, bits, _ in its:
                for name, level in zip(cls.names, cls.levels[at], strict=True):
                    whole = {each: sum(times[each](alone[one.module]) for one in matrices[name]) for each in (32, bits)}
                    gone, new = changed[of[name], level] if level else (Counter[Operation](), Counter[Operation]())
                    saved = [times[32](_of_weights(some, False)) for some in (gone, new)]
                    less = [slower[bits] * times[bits](_of_weights(some, True)) for some in (gone, new)]
                    found[name, level, bits] = slower[32] * whole[32] - slower[bits] * whole[bits]
                    found[name, level, bits] += saved[0] - saved[1] + less[0] - less[1]
        return found

    def _slower(self, times: Mapping[int, Times], alone: Mapping[str, Counter[Operation]]) -> dict[int, float]:
        """``{bits: how many times as long operations take in the dense model}``: one that is timed by itself finds its
        weights in a near cache, in the model it does not, and fewer bits are less to wait for."""
        assert self.timer is not None
        assert self.space.predicted is not None
        whole = {bits: sum(its(each) for each in alone.values()) for bits, its in times.items()}
        rest = times[32](operations_of(self.timer.dense, self.timed_on)) - whole[32]
        found = {}
        for bits in times:
            before, after = self.timer(self.timer.dense, self._in(bits))
            took = after / before * self.space.predicted.dense
            found[bits] = max(0.1, (took - rest) / max(1e-9, whole[bits]))
        return found

    def _in(self, bits: int) -> Runtime:
        assert self._mixed is not None
        return replace(self._mixed, bits=bits, calibrated=self._mixed.calibrated and bits == 8, modules=None)

    def _operations(self, modules: Sequence[str]) -> dict[str, Counter[Operation]]:
        """What these call by themselves, on what they are given in the example."""
        assert self.timer is not None
        dense, given = self.timer.dense, list[tuple[str, Any]]()
        with contextlib.ExitStack() as hooks, in_mode(dense, training=False), torch.no_grad():
            for name in modules:

                def seen(_module: nn.Module, args: Any, name: str = name) -> None:
                    given.append((name, args))

                hooks.callback(dense.get_submodule(name).register_forward_pre_hook(seen).remove)
            run_example(dense, self.timed_on)
        found = {name: Counter[Operation]() for name in modules}
        for name, args in given:
            found[name] += operations_of(dense.get_submodule(name), args)
        return found

    def _unbeaten(
        self,
        cls: Class,
        pairs: Sequence[tuple[int, int, float]],
        exact: Levels,
        matrices: Mapping[str, Sequence[Matrix]],
        saved: Mapping[tuple[str, int, int], float],
    ) -> tuple[list[tuple[int, int, float]], dict[int, int]]:
        """Of pairs of a level and bits those that lose less than all that cost no more, the least loss first; and of
        each number of bits which of them costs and loses no more than all of the group in as many."""
        every = {
            name: [Rung(cls.levels[at][number], bits, loss) for at, bits, loss in pairs]
            for number, name in enumerate(cls.names)
        }
        known = RoundedLevels(exact, every, matrices)

        def costs(number: int) -> list[float]:
            found = []
            for word in self.asked.words:
                its = [(name, known.rungs[name][number]) for name in cls.names]
                found.append(
                    -sum(saved[name, rung.level, rung.bits] for name, rung in its)
                    if word == "latency"
                    else sum(known[name][number].costs[word] for name, _ in its)
                )
            return found

        left: list[int] = []
        spent = [costs(number) for number in range(len(pairs))]

        def covers(number: int, other: int) -> bool:
            return all(one <= its for one, its in zip(spent[number], spent[other], strict=True))

        for number in sorted(range(len(pairs)), key=lambda number: (pairs[number][2], spent[number])):
            if not any(covers(each, number) for each in left):
                left.append(number)
        whole = {bits: number for number, (at, bits, _) in enumerate(pairs) if not at}
        left = [whole[32], *(each for each in left if each != whole[32])]
        alike = {
            bits: next(at for at, each in enumerate(left) if covers(each, number)) for bits, number in whole.items()
        }
        return [pairs[number] for number in left], alike

    # ---- choosing -------------------------------------------------------------------------------------------------

    def _least(self, limits: Mapping[str, float]) -> Choice:
        """By dynamic programming; ValueError where so little cannot be spent."""
        found = self.space.least(limits)
        for _ in range(_CORRECTIONS):
            if not self._corrected(self.space.last if found is None else found, limits):
                break
            found = self.space.least(limits)
        if found is None:
            raise self._unattainable(limits)
        return found

    def _unattainable(self, limits: Mapping[str, float]) -> ValueError:
        costs = self.space.costs(self.space.last, limits)
        word = max(limits, key=lambda word: costs[word] / limits[word])
        dense = self.space.cost(self.space.dense, word)
        asked = f"the {word} cannot come to {cost_text(word, limits[word])} of {cost_text(word, dense)}: "
        if holds(limits, costs):
            kept = self.levels.kept(self.space.named(self.space.last))
            why = next((said for seen, _ in self._seen if (said := seen.objection(kept))), "no other choice fits")
            return ValueError(
                f"{asked}what would is refused, as the last level of each group: {why}. Ask for more, pass other "
                "shares=, or exclude= some of it."
            )
        amount = self.asked.limits.get(word, 0.0)
        hint = f" {amount:g} is above 1, and so an amount: 60 % is 0.6." if amount > 1 else ""
        whole = {**self.levels.left_alone, **self.stays}
        stays = next((f" {len(whole)} stay whole, such as {one}: {why}." for one, why in whole.items()), "")
        return ValueError(
            f"{asked}at the last level of each group it is {cost_text(word, costs[word])}. Ask for more, pass shares= "
            f"with larger ones (--share), or more of over= (--over).{hint}{stays}"
        )

    def _loss(self, choice: Choice, some: Sequence[int]) -> float:
        with self.levels.assembled(self.model, self.space.named(choice)):
            return self.measured(some)

    def _all(self, choice: Choice) -> float:
        """The loss on all that is held back; a pass that counts."""
        return self._each([choice])[0]

    def _each(self, choices: Sequence[Choice], what: str = "") -> list[float]:
        """The same of several, side by side."""
        dense, every = self.space.dense, range(len(self.measured.held))
        self.spent += sum(each != dense for each in choices)
        return [*side_by_side(lambda each: 0.0 if each == dense else self._loss(each, every), choices, what)]

    def _searched(self, limits: Mapping[str, float], passes: float) -> Evolved:
        """From all candidates there are; the latencies are corrected, and the search is repeated once, if need be."""
        starts = self._starts(limits)
        for again in (False, True):
            fitting = {name: each for name, each in starts.items() if self.space.fits(each, limits)}
            found = evolved(
                self.space.sizes,
                fitting,
                self._loss,
                lambda choice: self.space.fits(choice, limits),
                batches=len(self.measured.held),
                passes=max(passes, 1.0),
                seed=self.seed,
            )
            self.spent += found.passes
            if again or not self._corrected(found.choice, limits):
                break
            starts = self._starts(limits)
            passes /= 2
        return found

    def _starts(self, limits: Mapping[str, float]) -> dict[str, Choice]:
        found = {ERRORS: self._least(limits)}
        self.starts = found | candidates(self.inner, self.space, limits)
        self.starts |= {
            name: self.space.filled(choice, limits)
            for name, choice in self.alike.items()
            if self.space.fits(choice, limits)
        }
        if self.default is not None and (near := self.space.nearest(self.default.units, limits)) is not None:
            self.starts["shrink"] = near
        if self._mixed is None and (its := self._by_gates(found[ERRORS], limits)) is not None:
            self.starts[GATES] = its
        return self.starts

    def _by_gates(self, start: Choice, limits: Mapping[str, float]) -> Choice | None:
        """What fits and is nearest to where gates between levels end; None where the loss has no slope along them, or
        where one class alone can save, as the budget says what then stays."""
        saved = [[its[0] - each for each in its] for its in self.space.spent(limits)]
        if sum(max(its) > 0 for its in saved) < 2:
            return None

        def ends() -> list[float]:
            with alone(), torch.inference_mode(False), running(self.inner), torch.enable_grad():
                self.inner.requires_grad_(False)
                return descended(saved, start, _Slopes(self))

        try:
            found = on_rank_zero(ends)  # sums of other processes may be others
        except NoSlopeError:  # nor had what levels say
            return None
        far = [[(each - end) ** 2 / (max(its) or 1.0) for each in its] for its, end in zip(saved, found, strict=True)]
        return self.space.least(limits, far)

    def one(self, at: int, level: int) -> dict[str, int]:
        """``{group: its level}`` where a class alone is at one."""
        return self.space.named(tuple(level if here == at else 0 for here in range(len(self.space.classes))))

    def _measure_alone(self) -> None:
        """Measures the loss of each class alone in the whole model, at a level or two. The levels' own estimates are of
        second order, and far off for a model whose outputs depend on all positions together."""
        as_known = self.measured.score is None and self.measured.keep is None
        if self.known is not None and self.known.score == self.measured.word and as_known:
            self.space.curves = curves_of(self.known.scores, self.space.classes)
            if self.space.curves is not None:
                return
        granted = _ALONE * self.passes * len(self.measured.held)
        levels = [looked_at(size) for size in self.space.sizes]
        if sum(map(len, levels)) > granted:
            levels = [each[-1:] for each in levels]
        runs = sum(map(len, levels))
        if not runs or (runs > granted and self._mixed is None):
            return
        some, passes = self._some(runs)
        told = self.space.errors()
        lost = [
            *side_by_side(
                lambda at: {level: self._alone(at, level, some) for level in levels[at]},
                range(len(levels)),
                "measuring groups alone",
            )
        ]
        self.spent += passes
        ratios = [
            loss / told[at][level]
            for at, its in enumerate(lost)
            for level, loss in its.items()
            if told[at][level] > 0 and 0 < loss < math.inf
        ]
        usual = statistics.median(ratios) if ratios else 1.0
        self.space.curves = [measured_curve(each, its, usual) for each, its in zip(told, lost, strict=True)]

    def _some(self, runs: int) -> tuple[list[int], float]:
        """On which batches so many runs are made that groups are measured alone in, and the passes that takes."""
        batches = len(self.measured.held)
        count = min(batches, max(1, int(_ALONE * self.passes * batches / max(1, runs))))
        return [(2 * at + 1) * batches // (2 * count) for at in range(count)], runs * count / batches

    def _alone(self, at: int, level: int, some: Sequence[int]) -> float:
        with self.levels.assembled(self.model, self.one(at, level)):
            return self.measured.now(some)

    def _curve(self, word: str) -> list[Point]:
        """From the dense model down to the least that there is, each by dynamic programming."""
        points = [Point(1.0, 0.0, self.measured.dense_score)]
        whole = self.space.cost(self.space.dense, word)
        least = max(_LEAST, self.space.cost(self.space.last, word) / whole)
        found = [self.space.least({word: float(share) * whole}) for share in np.linspace(1.0, least, _POINTS + 1)[1:]]
        choices = [each for each in dict.fromkeys(found) if each is not None and each != self.space.dense]
        for choice, lost in zip(choices, self._each(choices, "walking the curve"), strict=True):
            points.append(self._point(self.space.cost(choice, word) / whole, lost))
        return points

    def _point(self, share: float, loss: float) -> Point:
        dense = self.measured.dense_score
        return Point(share, loss, None if dense is None else dense - loss)

    @property
    def dense(self) -> dict[str, float]:
        """What the model costs now."""
        return self.space.costs(self.space.dense, dict.fromkeys(("params", "macs", "bytes", *self.asked.words)))

    def within(self, finals: int = 1, finishing: Finishing | None = None) -> Chosen:
        """The choice of least loss within the limits.

        Args:
            finals: how many models are finished and compared: what was found, the fixed allocations, the best first,
                and then what these say of the groups.
            finishing: what finishes them.

        Raises:
            ValueError: no choice costs so little.
        """
        dense, word = self.dense, self.asked.words[0]
        limits = self.asked.of(dense)
        counted = {**dense, "params": float(nonzeros(self.inner))}
        if self.space.fits(self.space.dense, limits) or holds(limits, counted):
            as_it_is = self._chosen(limits, Evolved(self.space.dense, 0.0, {}, 0.0, 0), [])
            return replace(as_it_is, predicted={**as_it_is.predicted, "params": counted["params"]})
        if self._mixed is not None:
            self._measure_alone()
            self._with_bits()
        try:
            self._least(limits)  # what cannot be met is said before the long part begins
        except ValueError:
            self.default = None if finishing is None else finishing.by_itself(limits)
            if finishing is None or self.default is None:
                raise
            return self._without_levels(limits, self.default, finishing)
        if self._mixed is None:
            self._measure_alone()
        curve = self._curve(word)
        if finishing is not None and finals > 1:
            self.default = finishing.by_itself(limits)
        found = self._searched(limits, max(1.0, self.passes - self.spent))
        finished: dict[str, float] = {}
        taken = None
        if finishing is not None and finals > 1:
            found, finished, taken = self._finished(limits, found, finals, finishing)
        at = self._point(self.space.cost(found.choice, word) / dense[word], found.loss)
        chosen = replace(self._chosen(limits, found, [at, *curve]), finals=finished, taken=taken)
        if finishing is not None and taken == DEFAULT:
            assert self.default is not None
            chosen = self._by_default(chosen, self.default, finishing)
        return chosen

    def _by_default(self, chosen: Chosen, default: ByItself, finishing: Finishing) -> Chosen:
        """What `shrink` makes of the budget by all batches, as it does without a search."""
        default = finishing.by_itself(chosen.limits, by_all=True) or default
        return replace(chosen, units=dict(default.units), predicted={**chosen.predicted, **default.costs})

    def _without_levels(self, limits: Mapping[str, float], default: ByItself, finishing: Finishing) -> Chosen:
        """What `shrink` makes of a budget that no choice of levels meets: it takes of groups that have none, too, such
        as the width of a residual stream."""
        loss = default.judged.loss
        found = Evolved(self.space.near(default.units), loss, {DEFAULT: loss}, 0.0, 0)
        chosen = replace(self._chosen(limits, found, []), finals={DEFAULT: loss}, taken=DEFAULT, stays={})
        return self._by_default(chosen, default, finishing)

    def _finished(
        self, limits: Mapping[str, float], found: Evolved, finals: int, finishing: Finishing
    ) -> tuple[Evolved, dict[str, float], str | None]:
        """The best of so many that were finished, what each of them loses, and which was taken (see `taken_of`).

        What was found and the best fixed allocations come first, and then what the curves say is best near the best of
        these, or one step beside it. (Weights of the curves, learnt from what finished models lost, gained nothing.)
        """
        named = {} if self.default is None else {DEFAULT: self.default.judged}
        fixed = sorted((name for name in found.losses if name not in (ERRORS, GATES)), key=found.losses.__getitem__)
        most = _WORSE * found.losses[fixed[0]] if fixed else 0.0
        first = {found.choice: SEARCHED}
        for name in fixed:
            choice = self.starts[name]
            if len(first) > max(1, finals // 2 - len(named)) or found.losses[name] > most:
                break
            if len(first) + len(named) == finals:
                break
            if self.space.fits(choice, limits) and self._in_time(choice, limits):
                first.setdefault(choice, name)
        judged: dict[Choice, float] = {}
        if len(first) + len(named) == 1 == finals - 1:
            return found, {}, None  # there is nothing to compare with
        its: dict[str, Choice] = {}
        several = side_by_side(lambda choice: self._judged(choice, finishing), [*first], "finishing the best")
        for (choice, name), found_of_it in zip(first.items(), several, strict=True):
            named[name], its[name], judged[choice] = found_of_it, choice, found_of_it.loss
        for number in track(range(1, finals - len(named) + 1), "finishing others"):
            step = self._proposed(judged, limits)
            if step is None:
                break
            (named[f"step {number}"],) = side_by_side(lambda choice: self._judged(choice, finishing), [step])
            its[f"step {number}"], judged[step] = step, named[f"step {number}"].loss
        its[DEFAULT] = self.starts.get("shrink", self.space.dense)
        if not self.space.fits(its[DEFAULT], limits):
            its[DEFAULT] = min(judged, key=judged.__getitem__)
        allocations = {self.starts[name] for name in fixed}
        taken = taken_of(named, {DEFAULT, *(name for name, choice in its.items() if choice in allocations)})
        best = its[taken]
        loss = found.known[best] if best in found.known else found.loss if best == found.choice else self._all(best)
        return replace(found, choice=best, loss=loss), {name: each.loss for name, each in named.items()}, taken

    def _judged(self, choice: Choice, finishing: Finishing) -> Judged:
        named = self.space.named(choice)
        counts = counts_kept(self._masks(named))
        if self.default is not None and counts == self.default.units and len(counts) == len(named):
            return self.default.judged  # it is that model
        return finishing.judged(named)

    def _proposed(self, judged: Mapping[Choice, float], limits: Mapping[str, float]) -> Choice | None:
        """What the curves say is best of what was not finished yet, near the best that was; None where nothing else
        is."""
        best = min(judged, key=lambda choice: judged[choice])
        curves = self.space.errors()
        near = [
            [error if abs(at - here) <= max(1, round(len(its) / _NEAR)) else math.inf for at, error in enumerate(its)]
            for its, here in zip(curves, best, strict=True)
        ]
        found = self.space.least(limits, near)
        if found is not None and found not in judged and self._in_time(found, limits):
            return found
        beside = [each for each in self._beside(best, limits, curves) if each not in judged]
        for choice in sorted(beside, key=lambda each: sum(its[at] for its, at in zip(curves, each, strict=True))):
            if self._in_time(choice, limits):
                return choice
        return None

    def _beside(self, best: Choice, limits: Mapping[str, float], told: Sequence[Sequence[float]]) -> set[Choice]:
        """What fits one step from a choice: a class goes up by a level, and what that leaves goes elsewhere."""
        found = set()
        for at, size in enumerate(self.space.sizes):
            if best[at] + 1 == size:
                continue
            up = (*best[:at], best[at] + 1, *best[at + 1 :])
            stay = [
                [math.inf if here == at and level <= best[at] else each for level, each in enumerate(its)]
                for here, its in enumerate(told)
            ]
            found.add(self.space.filled(up, limits, stay))
        return {each for each in found if self.space.fits(each, limits)}

    def _in_time(self, choice: Choice, limits: Mapping[str, float]) -> bool:
        """Whether its latency, where one is asked for, is what was predicted."""
        return "latency" not in limits or self._tried(choice) <= limits["latency"] * (1 + _CLOSE)

    def kept(self, finals: int = 1, finishing: Finishing | None = None) -> Sequence[Chosen]:
        """As little as it gets while the score is kept, and after it what is a little larger, the smallest first: down
        by dynamic programming, then by searching; and from there by what is finished, which keeps more than levels do.

        Args:
            finals: of these a third is finished, at most, on the way down.
            finishing: what finishes them.

        Raises:
            ValueError: the dense model's score is not above 0, or nothing that is smaller keeps so much of it.
        """
        assert self.asked.keep is not None
        dense, word, most = self.dense[self.asked.target], self.asked.target, self.measured.most(self.asked.keep)
        self._measure_alone()
        curve = self._curve(word)
        least = curve[-1].share
        low = max((each.share for each in curve if each.loss > most), default=least)
        high = min(each.share for each in curve if each.loss <= most and each.share >= low)
        while self.spent < self.passes / 2 and high - low > 0.01:
            middle = (low + high) / 2
            choice = self.space.least({word: middle * dense})
            loss = math.inf if choice is None else self._all(choice)
            if choice is not None:
                curve.append(self._point(self.space.cost(choice, word) / dense, loss))
            low, high = (low, middle) if loss <= most else (middle, high)
        found: list[Chosen] = []
        share = high
        while len(found) < _TRIES:
            limits = {word: share * dense}
            if self.space.fits(self.space.dense, limits):
                break
            each = self._searched(limits, max(1.0, (self.passes - self.spent) / 2))
            if each.loss > most:
                break
            found.insert(0, self._chosen(limits, each, curve))
            share *= _SMALLER
            if share * dense < self.space.cost(self.space.last, word):
                break
        if finishing is not None:
            found = [*self._finished_below(most, found, curve, finals // 3, finishing), *found]
        if not found:
            raise self.nothing_kept(high)
        return found

    def _finished_below(
        self, most: float, found: Sequence[Chosen], curve: Sequence[Point], tries: int, finishing: Finishing
    ) -> list[Chosen]:
        """What is smaller than what was found and keeps the score when it is finished, the smallest first: halfway, and
        halfway again."""
        dense, word = self.dense[self.asked.target], self.asked.target
        high = found[0].limits[word] / dense if found else 1.0
        low = self.space.cost(self.space.last, word) / dense
        smaller: list[Chosen] = []
        finished: dict[str, float] = {}
        for _ in track(range(tries), "finishing smaller ones"):
            middle = (low + high) / 2
            choice = self.space.least({word: middle * dense})
            if high - low <= _NEAR_ENOUGH or choice is None or not any(choice):
                break
            share = self.space.cost(choice, word) / dense
            (lost,) = side_by_side(finishing.held, [self.space.named(choice)])
            finished[f"{share:.1%}"] = lost
            if kept_by(lost, most):
                chosen = self._chosen({word: middle * dense}, Evolved(choice, self._all(choice), {}, 0.0, 0), curve)
                smaller.insert(0, replace(chosen, finals=dict(finished)))
                high = share
            else:
                low = middle
        return smaller

    def nothing_kept(self, share: float) -> ValueError:
        assert self.asked.keep is not None
        score = self.measured.dense_score
        whole = "of the dense model's outputs" if score is None else f"of the score of {score:.5g}"
        hint = " keep is a share: 0.99 is 99 %." if self.asked.keep == 1 else ""
        return ValueError(
            f"no model was found that is smaller and keeps {words_of_shares(self.asked.keep)} {whole}: at {share:.1%} "
            f"of the {self.asked.target} it is less. Ask for less of it, or pass shares= with smaller ones.{hint}"
        )

    def _chosen(self, limits: Mapping[str, float], found: Evolved, curve: Sequence[Point]) -> Chosen:
        score, dense = self.measured.dense_score, self.dense
        told = sorted(set(curve), key=lambda each: (-each.share, each.loss))
        return Chosen(
            limits=limits,
            dense=dense,
            predicted=self.space.costs(found.choice, dense),
            measured=self._tried(found.choice) if "latency" in dense and any(found.choice) else None,
            choice=self.space.named(found.choice),
            candidates=dict(found.losses),
            loss=found.loss,
            dense_score=score,
            curve=tuple(told),
            knee=knee_of(told),
            held_back=len(self.measured.held),
            passes=self.spent,
            generations=found.generations,
            compared=self.measured.word,
            over=self.over,
            stays=dict(self.stays),
            bits=self.bits(self.space.named(found.choice)),
        )
