"""Which level of each group: by dynamic programming, by the fixed allocations, and by switching levels from there on.

Law: nothing of the model changes; what is chosen fits the budget, and loses no more than any fixed allocation of the
same levels and budget does, on the batches held back.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from secateur.coupling import Axis, Coupling, find_coupling
from secateur.search.budgets import Budget
from secateur.search.candidates import candidates
from secateur.search.evolution import Choice, Evolved, evolved
from secateur.search.fitted import KINDS, Chosen, Point, cost_text, knee_of
from secateur.search.held_back import HeldBack
from secateur.search.latency import Times, milliseconds_of, saved_by
from secateur.search.levels import Levels
from secateur.search.space import Predicted, Space, classes_of
from secateur.shrinking import Configured, carry_out, has_configuration, plan_of, tie_roles
from secateur.support import Forward, track, unwrapped

__all__ = ["Choosing"]

_POINTS = 6  # of the curve, below the dense model
_CLOSE = 0.02  # of a latency, that is not corrected any more
_CORRECTIONS = 3
_SMALLER = 0.96  # of a budget, from one try to keep the score to the next
_TRIES = 4
ERRORS = "errors"  # what the sum of the levels' errors chooses


@dataclass(eq=False)
class Choosing:
    """What is asked, and what is known of the model so far; the parameters are those of `secateur.fit`."""

    model: nn.Module
    asked: Budget
    levels: Levels
    rest: Sequence[Any]  # that levels were made of
    measured: HeldBack
    example: Any
    timed_on: Any  # what a latency is of
    forward: Forward | None = None
    uniform: bool = False
    seed: int = 0
    passes: float = 30.0
    folder: Path | None = None
    whole: nn.Module | None = None  # a copy of the dense model, to time others beside
    trials: dict[Choice, float] = field(default_factory=dict)  # milliseconds that were measured
    spent: float = 0.0
    starts: dict[str, Choice] = field(default_factory=dict)  # that the last search began with

    def __post_init__(self) -> None:
        self.inner = unwrapped(self.model)
        self.coupling = find_coupling(self.inner, self.example)
        self.axes: dict[str, Axis] = {group.name: group.axis for group in self.coupling.groups}
        possible = None
        tied: Iterable[Iterable[str]] = [[name] for name in self.levels if self.levels.kind[name] in KINDS]
        if self.uniform:
            tied, possible = self._uniform()
        self.space = Space(self.levels, classes_of(self.levels, tied), possible=possible)
        if not self.space.classes:
            raise ValueError("nothing that has levels can leave: no configuration says that any of it left.")
        if "latency" in self.asked.words:
            self.space.predicted = self._predicted()

    # ---- what can be chosen ---------------------------------------------------------------------------------------

    def _uniform(self) -> tuple[list[list[str]], Callable[[Mapping[str, int]], bool] | None]:
        """Which groups go to a level together, so that a configuration can say it, and which choices it can say."""
        coupling: Coupling = find_coupling(self.inner, self.example)  # one that may be tied
        axes = {group.name: group.axis for group in coupling.groups}
        configured = None
        if has_configuration(self.inner):
            configured = Configured(self.inner, coupling)
        else:
            tie_roles(coupling)
        number = {group.axis: group.tied for group in coupling.groups}
        tied: dict[Any, list[str]] = {}
        for name in self.levels:
            if self.levels.kind[name] == "layer":
                tied[name] = [name]
            elif self.levels.kind[name] in KINDS:
                numbers = {number.get(axes[each]) if each in axes else None for each in self.levels.groups[name]}
                if None not in numbers and len(numbers) == 1:
                    tied.setdefault(numbers.pop(), []).append(name)
        if configured is None:
            return [*tied.values()], None
        said = configured

        def possible(choice: Mapping[str, int]) -> bool:
            return said.is_possible({axes[name]: int(mask.sum()) for name, mask in self.levels.kept(choice).items()})

        return [*tied.values()], possible

    # ---- latency --------------------------------------------------------------------------------------------------

    def _predicted(self) -> Predicted:
        """What each level of each group saves; groups of which all is alike are measured once."""
        self.whole = copy.deepcopy(self.inner)
        alike: dict[Any, str] = {}
        of: dict[str, str] = {}
        for name, levels in self.levels.items():
            if self.levels.kind[name] != "layer":
                costs = tuple((each.kept, each.of, each.costs["macs"], each.costs["params"]) for each in levels)
                of[name] = alike.setdefault((self.levels.kind[name], costs), name)
        plans = {
            (name, at): plan_of(self.whole, self.coupling, self._masks({name: at}))
            for name in alike.values()
            for at in range(1, len(self.levels[name]))
        }
        saved = saved_by(self.whole, self.timed_on, plans, Times(self.folder))
        table = {
            name: [0.0, *(saved[first, at] for at in range(1, len(self.levels[name])))] for name, first in of.items()
        }
        return Predicted(milliseconds_of(self.whole, self.whole, self.timed_on)[0], table)

    def _masks(self, named: Mapping[str, int]) -> dict[Axis, Any]:
        return {self.axes[name]: np.asarray(mask) for name, mask in self.levels.kept(named).items()}

    def _tried(self, choice: Choice) -> float:
        """Milliseconds of a model of this structure, measured beside the dense one."""
        if choice not in self.trials:
            assert self.whole is not None
            assert self.space.predicted is not None
            smaller = copy.deepcopy(self.whole)
            carry_out(smaller, plan_of(smaller, self.coupling, self._masks(self.space.named(choice))), None)
            before, after = milliseconds_of(self.whole, smaller, self.timed_on)
            self.trials[choice] = after / before * self.space.predicted.dense
        return self.trials[choice]

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
        predicted.factor = max(0.0, (predicted.dense - measured) / table)
        return True

    # ---- choosing -------------------------------------------------------------------------------------------------

    def _least(self, limits: Mapping[str, float]) -> Choice:
        """By dynamic programming; ValueError where so little cannot be spent."""
        for _ in range(_CORRECTIONS):
            found = self.space.least(limits)
            if found is None and "latency" in limits and self._corrected(self.space.last, limits):
                found = self.space.least(limits)
            if found is None:
                raise self._unattainable(limits)
            if not self._corrected(found, limits):
                break
        found = self.space.least(limits)
        if found is None:
            raise self._unattainable(limits)
        return found

    def _unattainable(self, limits: Mapping[str, float]) -> ValueError:
        costs = self.space.costs(self.space.last, limits)
        word = max(limits, key=lambda word: costs[word] / limits[word])
        whole = self.space.cost(self.space.dense, word)
        return ValueError(
            f"the {word} cannot come to {cost_text(word, limits[word])} of {cost_text(word, whole)}: at the last level "
            f"of each group it is {cost_text(word, costs[word])}. Ask for more, pass shares= with larger ones, or more "
            "of over=."
        )

    def _loss(self, choice: Choice, some: Sequence[int]) -> float:
        with self.levels.assembled(self.model, self.space.named(choice)):
            return self.measured(some)

    def _all(self, choice: Choice) -> float:
        """The loss on all that is held back; a pass that counts."""
        if choice == self.space.dense:
            return 0.0
        self.spent += 1
        return self._loss(choice, range(len(self.measured.batches)))

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
                batches=len(self.measured.batches),
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
        self.starts = found | candidates(self.inner, self.space, limits, self.rest, forward=self.forward)
        return self.starts

    def _curve(self, word: str) -> list[Point]:
        """From the dense model down to the least that there is, each by dynamic programming."""
        points = [Point(1.0, 0.0, self.measured.dense_score)]
        whole = self.space.cost(self.space.dense, word)
        least = max(0.0, self.space.cost(self.space.last, word) / whole)
        seen = {self.space.dense}
        for share in track(np.linspace(1.0, least, _POINTS + 1)[1:], "walking the curve"):
            choice = self.space.least({word: float(share) * whole})
            if choice is not None and choice not in seen:
                seen.add(choice)
                points.append(self._point(self.space.cost(choice, word) / whole, self._all(choice)))
        return points

    def _point(self, share: float, loss: float) -> Point:
        dense = self.measured.dense_score
        return Point(share, loss, None if dense is None else dense - loss)

    @property
    def dense(self) -> dict[str, float]:
        """What the model costs now."""
        return self.space.costs(self.space.dense, dict.fromkeys(("params", "macs", "bytes", *self.asked.words)))

    def within(self, finals: int = 1, judge: Callable[[Mapping[str, int]], float] | None = None) -> Chosen:
        """The least loss at what may be spent.

        Args:
            finals: how many choices are judged when they are finished: what was found, then the fixed allocations, the
                best first.
            judge: ``choice -> loss`` of the finished model.

        Raises:
            ValueError: so little cannot be spent.
        """
        dense, word = self.dense, self.asked.words[0]
        limits = self.asked.of(dense)
        if self.space.fits(self.space.dense, limits):
            return self._chosen(limits, Evolved(self.space.dense, 0.0, {}, 0.0, 0), [])
        self._least(limits)  # what cannot be met is said before the long part begins
        curve = self._curve(word)
        found = self._searched(limits, max(1.0, self.passes - self.spent))
        finished: dict[str, float] = {}
        if judge is not None and finals > 1:
            names = sorted((name for name in found.losses if name != ERRORS), key=lambda name: found.losses[name])
            several = {found.choice: ("searched", found.loss)}
            for name in names:
                if self.space.fits(self.starts[name], limits):
                    several.setdefault(self.starts[name], (name, found.losses[name]))
            first = dict(list(several.items())[:finals])
            if len(first) > 1:
                judged = {choice: judge(self.space.named(choice)) for choice in track(first, "finishing the best")}
                finished = {first[choice][0]: loss for choice, loss in judged.items()}
                best = min(judged, key=lambda choice: judged[choice])
                found = replace(found, choice=best, loss=first[best][1])
        at = self._point(self.space.cost(found.choice, word) / dense[word], found.loss)
        return replace(self._chosen(limits, found, [at, *curve]), finals=finished)

    def kept(self) -> Sequence[Chosen]:
        """As little as it gets while the score is kept, and after it what is a little larger, the smallest first: down
        by dynamic programming, then by searching.

        Raises:
            ValueError: the dense model's score is not above 0, or nothing that is smaller keeps so much of it.
        """
        dense, word, before = self.dense[self.asked.target], self.asked.target, self.measured.dense_score
        assert before is not None  # checked at the door
        assert self.asked.keep is not None
        if before <= 0:
            raise ValueError(
                f"the dense model's score is {before:g}, of which no share can be kept; return one above 0."
            )
        most = before - self.asked.keep * before  # that may be lost
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
        if not found:
            raise self.nothing_kept(high)
        return found

    def nothing_kept(self, share: float) -> ValueError:
        assert self.asked.keep is not None
        return ValueError(
            f"no model was found that is smaller and keeps {self.asked.keep:.1%} of the score of "
            f"{self.measured.dense_score:.5g}: at {share:.1%} of the {self.asked.target} it is less. Ask for less of "
            "the score, or pass shares= with smaller ones."
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
            held_back=len(self.measured.batches),
            passes=self.spent,
            generations=found.generations,
            compared=self.measured.word,
        )
