"""`fit`: levels are made, chosen for the least loss within a budget, and carried out by `shrink` and `oneshot`.

Law: the finished model costs no more than the budget, latency up to the error of a measurement; its loss is no more
than that of any fixed allocation of the same budget, compared as finished models, or else as levels on held-back data;
a call that fails changes nothing.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur import patterns, solvers
from secateur.coupling import counts_kept, find_coupling
from secateur.models import NamedTexts, OneShot, Solve, example_of, naming_batch, oneshot, reached_by_name
from secateur.patterns import Pattern
from secateur.runtimes import Elsewhere, Runtime, is_mixed, rounding
from secateur.search.choosing import PASSES, ByItself, LevelSearch, kept_by
from secateur.search.costs import BESIDE, TARGETS, Budget, Judged, beside, holds, nonzeros, parse_budget
from secateur.search.latency import step_of
from secateur.search.levels import Levels
from secateur.search.making import FINE, UNSTRUCTURED, check_alike, check_values, made_by_all, make_levels
from secateur.search.result import KINDS, Chosen, Fitted, cost_text
from secateur.search.score import ModelLoss, Score, check_word, guarded_of, split
from secateur.search.sensitivity import Sensitivity, given
from secateur.search.space import LAYER
from secateur.shrinking import Memory, Shrunk, remembering, shrink
from secateur.solvers import admm
from secateur.support import (
    Forward,
    Undo,
    alone,
    check_data,
    described,
    directories,
    everywhere,
    for_directories,
    globs_of,
    naming_example,
    on_rank_zero,
    printable,
    refuse,
    unwrapped,
    warn,
    without_autocast,
)

FINALS = 12
SHARES = tuple(round(0.1 * at, 2) for at in range(1, 10))
ROUNDED_FROM = 64  # units of a group
_TRIES = 3
_UNPROVED = (ValueError, RuntimeError, TypeError, IndexError)  # as of a weight that is normalized over one input
_SMALL = 0.01  # of the parameters: where 16 units are more, counts are not rounded


class _MissedError(Exception):
    """The finished model does not keep its score."""


@without_autocast()
def fit(
    model: nn.Module | Path | str,
    batches: Iterable[Any],
    *,
    budget: Mapping[str, float] | None = None,
    runtime: str | Path | Runtime | Elsewhere | Callable[..., float] | None = None,
    keep: float | Mapping[str, float] | None = None,
    score: Score | None = None,
    over: str | Sequence[str] = ("shrink",),
    target: str = "params",
    uniform: bool = False,
    shares: Sequence[float] | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    solver: str | Solve = admm,
    pattern: str | Pattern | None = None,
    round_to: int | None = None,
    example_inputs: Any = None,
    forward: Forward | None = None,
    finals: int = FINALS,
    seed: int = 0,
    store: Path | str | None = None,
    levels: Levels | Sensitivity | Path | str | None = None,
    verify: bool = True,
    out: Path | str | None = None,
    device: torch.device | str | None = None,
) -> Fitted:
    """Prune a model to a budget with the least loss, or to the least cost that keeps a share of its score; in place.

    Each group of units, or each matrix, has a few levels: so much leaves, the rest is repaired, with error and cost
    (`make_levels`). Dynamic programming over the loss of each group alone gives a choice of them (SPDY,
    arXiv:2201.13096; ZipLM, arXiv:2302.04089), and so do the fixed allocations. Errors of layers do not add up: so
    gates, each between two levels of its group, move along the slope of the whole model's loss (80 steps of a batch
    each, forwards and backwards), and from the best of these levels are switched (EvoPress, arXiv:2410.14649), in
    coarse steps first (arXiv:2503.09657). Some models are finished, and their loss decides what is tried next. The
    best is carried out by `secateur.shrink` and `secateur.oneshot` with these counts, so that the model gets smaller,
    or sparser, and is repaired block by block, each on what the ones before it give.

    The model of a directory is in memory while it is chosen; what is written keeps what its configuration can say, as
    with ``uniform``. Then `secateur.shrink` and `secateur.oneshot` go through the directory block by block with what
    was chosen, so that ``secateur.json`` says what was done, `verify_checkpoint` and `secateur verify` prove it, and a
    run that was killed goes on. With ``keep`` what is written is loaded and judged once more.

    In several processes of `torch.distributed` each is given the same whole model, and all come to what one comes to,
    bit for bit but for latencies, which the first measures for all. Side by side they measure groups and choices and
    finish the first half of the ``finals``; each of the second half follows from the one before it, and is the first
    process's. Each makes the levels, or with a ``store``, or of a directory, the first; it writes, and the others
    wait.

    Args:
        model: any module with its weights, or a Hugging Face directory.
        batches: what a DataLoader yields, or ``{name: batches}`` of several texts. A quarter of them, of each text, is
            held back from the levels, for the search; of a single batch none is.
        budget: ``{"params": 0.5, "macs": .., "bytes": .., "latency": ..}``, all of which hold: up to 1 a share of what
            the dense model costs, above that the cost itself; of latency milliseconds, measured on this machine.
            Parameters are those that are not zero, bytes those of the tensors in memory (of matrices with zeros what
            is kept and a bit an entry). Of mixtures ``"active_params"`` are the parameters that one token passes
            through, embeddings and head among them; of what reads text ``"kv_bytes"`` are the bytes of keys and
            values that its cache keeps of each token.
        runtime: where a latency is measured, of each level and of the result, with as many threads as torch has:
            ``"torch"``, which is meant if left out, ``"onnxruntime"``, ``"onnxruntime:int8"``, ``"onnxruntime:int4"``,
            ``"openvino"``, ``"openvino:int8"``, or a value of `secateur.runtimes`. With ``"onnxruntime:mixed"`` the
            search chooses, with what leaves of a group, whether the linears and tables that are left of it are served
            in float, in 8 bits or in 4 (``.bits`` says which): losses are of models that are rounded so, and latency
            and bytes, all that can be budgeted then, are of what is served. Of a machine that is not this one,
            the table that it wrote with the probes of `secateur.search.write_probes` (``"board.csv"``), or a function
            ``(operation, shapes) -> milliseconds`` of what operations take, such as ``("linear", ((1, 64, 384), (1536,
            384), (1536,)))``: nothing is timed then, and what is promised is by these prices.
        keep: the share of the dense model's score that has to be kept, while ``target`` gets as small as it can. Where
            ``score`` is no function it is a share of the outputs on the batches held back: of "cosine" the mean cosine,
            of "kl" exp(-divergence), of "change" the share of their variance. Or ``{"mine": 0.99, "theirs": 0.9}``, of
            each text that is named the share of its own outputs; others have no bound.
        score: ``model -> float``, higher is better; or how the model's outputs are compared with the dense model's, on
            the batches held back: ``"kl"``, ``"cosine"`` or ``"change"``, by default the first of them that its outputs
            are made for (see `secateur.search.ModelLoss`).
        over: ``"shrink"``, units that leave; ``"oneshot"``, entries that become zero; or both. Zeros are no faster by
            themselves, so a latency asks for ``"shrink"``.
        target: which cost is to get small, with ``keep``.
        uniform: keep what the model's configuration can say, so that ``from_pretrained`` loads what is saved.
        shares: the levels: how much leaves, each in (0, 1); by default 5 % to 90 % in steps of five, of
            entries 10 % to 90 % in steps of ten.
        include, exclude: globs over the names of groups and of all their tensors.
        solver: of entries; see `secateur.oneshot`.
        pattern: of entries; see `secateur.oneshot`. Where it fixes how much leaves, as ``"2:4"`` does, what is chosen
            is which matrices get it; else how much of each leaves in it.
        round_to: counts of units are multiples of this; by default of 16 in groups of 64 units or more, but for small
            models; of 32, 16 or 8 where the times of a table have such steps.
        example_inputs: what the model is called with when its multiply-adds are counted and its latency is measured.
            By default the first batch; needed with ``forward``.
        forward: ``(model, batch) -> outputs``, how a batch is run.
        finals: how many models are finished on a copy, by what levels were made of, before the one that loses least
            (half on these batches, half on those held back) is taken: what was found, the fixed allocations, the best
            first, what `shrink` makes of the budget by itself, and then what these say. The best fixed allocation is
            taken where no other is better by more than noise (`secateur.search.costs.taken_of`). 1: none is, which
            takes a tenth of the time; 2: what was found and what `shrink` makes of it, or, where it takes no such
            budget (of time, or of zeros), the best fixed allocation. What no choice of levels meets, as of a stream's
            width none are made, is left to `shrink`. With ``keep`` a third of them is finished, on the way down from
            what levels keep.
        seed: of the switches. One seed, one result, but for latencies.
        store: a folder for levels and latencies: they are made once, and a run that was killed goes on.
        levels: that are made already: what `sensitivity` gave, or the folder that it wrote. None are made then, and
            what was measured by the same score is not measured again. They may be of all batches, so that nothing is
            held back from them. Of these ``include`` and ``exclude`` say what may leave; ``over``, ``solver`` and
            ``pattern`` have to be those that they were made with.
        verify: prove that nothing else changes, on random weights in float64.
        out: for a directory, the one to write, which must not exist. Beside it is ``<out>.unfinished`` until it does,
            with the levels and what was chosen (unless ``store`` names a folder for these), and with what verbs write
            on the way. One process at a time is in it; nothing in it is anybody else's.
        device: for a directory, where it is computed; by default the processor.

    Returns:
        A `Fitted`: the choice, what it costs and loses, what the candidates lose, the curve with its knee; it prints
        as tables. ``.model`` is the module, the same object.

    Raises:
        ValueError: the budget cannot be met, or the score not be kept; several processes are given other models,
            batches or arguments; or what `make_levels`, `shrink` and `oneshot` refuse. Of a directory levels stay
            then, and the message says where.
        CheckpointError: an ``out`` that exists, a directory that cannot be read; another process, or what no fit of
            this request has put there, in ``<out>.unfinished``.
        TypeError: a limit or a score is no number.

    Warns:
        UserWarning: the model costs no more than the budget as it is.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2)))
    >>> done = fit(model, [torch.randn(32, 4) for _ in range(4)], budget={"params": 0.6}, finals=1)
    >>> sum(each.numel() for each in model.parameters()) <= 0.6 * done.dense["params"]
    True
    >>> done.loss <= min(done.candidates.values())
    True
    """
    started = time.monotonic()
    asked = FitRequest(
        budget=parse_budget(budget, keep, target=target, runtime=runtime),
        over=(over,) if isinstance(over, str) else tuple(over),
        score=score,
        shares=shares,
        scope={"include": globs_of(include), "exclude": globs_of(exclude)},
        solver=solvers.parse(solver),
        pattern=None if pattern is None else patterns.parse(pattern),
        round_to=round_to,
        finals=finals,
        seed=seed,
        levels=levels,
        uniform=uniform or isinstance(model, Path | str),
        verify=verify,
        example_inputs=example_inputs,
        forward=forward,
    )
    every = batches = NamedTexts.of(batches)
    guarded_of(asked.budget.keep, every, score)
    folder = None if store is None else Path(store)
    if isinstance(model, Path | str):
        from secateur.search.directory import fit_directory

        if is_mixed(asked.budget.runtime):
            raise ValueError("a directory holds no bits of each matrix; secateur.deploy writes what has them.")

        why = "is for modules: a directory is called as its configuration says, and always proved."
        refuse(why, example_inputs=example_inputs, forward=forward, verify=None if verify else False)
        done = fit_directory(*directories(model, out), every, asked, folder, device)
        with alone():
            return done.over_texts(model, batches, device=device)
    for_directories(out=out, device=device)
    if forward is not None and example_inputs is None:
        raise ValueError("with forward= the batches do not say what the model is called with; pass example_inputs=.")
    given, model = model, unwrapped(model, resized="shrink" in asked.over)
    check_values(model)
    check_data(every, "since losses are measured by running the model")
    with alone():
        reach = reached_by_name(model, batches, forward=forward)
    known = asked.given(model)
    step = asked.step(model, every)
    made = asked.made(model, every, folder, step) if known is None else known.levels
    carrying = asked.executor(model, made, known, every, folder)
    choosing = carrying.choosing
    if asked.budget.keep is None:
        chosen = choosing.within(finals, carrying)
        within_as_it_is(chosen)
        with alone():
            shrunk, pruned, finished, got = carrying(chosen, None)
    else:
        for chosen in choosing.kept(finals, carrying):
            try:
                with alone():
                    shrunk, pruned, finished, got = carrying(chosen, choosing.measured.most(asked.budget.keep))
            except _MissedError:
                continue
            break
        else:
            raise choosing.nothing_kept(chosen.limits[target] / chosen.dense[target])
    return Fitted(
        asked=asked.budget,
        chosen=chosen,
        got=carrying.timed(chosen, got),
        levels=choosing.levels,
        batches=len(every),
        finished=finished[0],
        finished_score=finished[1],
        kept=choosing.measured.kept(),
        seconds=time.monotonic() - started,
        model=given,
        shrunk=shrunk,
        pruned=pruned,
        apart=known is None,
        step=step,
        reach=reach,
    )


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """The checked arguments of `fit`; see there. The scope is ``{"include": globs or None, "exclude": globs or None}``.

    Raises:
        ValueError, TypeError: what cannot be asked for together.
    """

    budget: Budget
    over: tuple[str, ...]
    score: Score | None
    shares: Sequence[float] | None
    scope: Mapping[str, Any]
    solver: Solve
    pattern: Pattern | None
    round_to: int | None
    finals: int
    seed: int
    levels: Levels | Sensitivity | Path | str | None
    uniform: bool
    verify: bool
    example_inputs: Any
    forward: Forward | None

    def __post_init__(self) -> None:
        if not self.over or not {*self.over} <= {*KINDS}:
            raise ValueError(f"over says which kinds of levels, of {', '.join(map(repr, KINDS))}; got {self.over!r}.")
        if "latency" in self.budget.words and {*self.over} == {"oneshot"}:
            raise ValueError(
                'zeros make nothing faster by themselves, so a latency asks for over=("shrink",), or both; to make '
                "zeros fast, secateur.pack the result."
            )
        if is_mixed(self.budget.runtime) and {*self.over} != {"shrink"}:
            raise ValueError('bits are chosen of what stays where units leave: with them over= is ("shrink",).')
        if self.finals < 1:
            raise ValueError(f"finals must be at least 1, the number of models that are finished; not {self.finals}.")
        if self.score is not None and not isinstance(self.score, str) and not callable(self.score):
            raise TypeError(f"score is a function (model) -> float, higher is better, not {self.score!r}.")
        if isinstance(self.score, str):
            check_word(self.score)

    def given(self, model: nn.Module) -> Sensitivity | None:
        """The levels that are made already; ValueError where they are to be others."""
        if self.levels is None:
            return None
        found = given(self.levels, model)
        if self.shares is not None or self.round_to is not None:
            raise ValueError("levels= have their own shares and round_to; leave out shares= and round_to=.")
        asked = found.levels.made.asked
        if missing := [word for word in self.over if word not in asked["over"]]:
            raise ValueError(
                f"over= says {', '.join(map(repr, self.over))}, and levels= were made over "
                f"{', '.join(map(repr, asked['over']))}: make them over {missing[0]!r}, too, or leave it out."
            )
        if "oneshot" in self.over and described(self.solver) != asked.get("solver"):
            raise ValueError(
                f"levels= are of the solver {asked.get('solver')}, and solver= says {described(self.solver)}: pass the "
                "one that they were made with, or make them again."
            )
        return found

    def made(self, model: nn.Module, every: Sequence[Any], store: Path | None, step: int | None) -> Levels:
        """Levels of the batches but for those held back, made now or by an earlier run."""

        def make(folder: Path | None) -> Levels:
            example = self.example(model, every)
            with naming_batch(every, every[0]) if self.example_inputs is None else naming_example(model, example):
                round_to = rounding_for(model, example, step or self.round_to)
            return make_levels(
                model,
                split(every)[0],
                over=self.over,
                shares=self.shares or (SHARES if "oneshot" in self.over else FINE),
                solver=self.solver,
                pattern=self.pattern,
                round_to=round_to,
                verify=self.verify,
                example_inputs=self.example_inputs,
                forward=self.forward,
                store=folder,
                **self.scope,
            )

        return made_by_all(make, store)

    def step(self, model: nn.Module, every: Sequence[Any]) -> int | None:
        """The multiple of units that a machine elsewhere asks for, where nothing else was asked for; ValueError where
        it has no price of the model."""
        runtime = self.budget.runtime
        if not isinstance(runtime, Elsewhere):
            return None
        inner, example = unwrapped(model), self.example(model, every, None)
        runtime.total(inner, example)
        return None if self.round_to is not None or self.levels is not None else step_of(runtime, inner, example)

    def loss(self, model: nn.Module, back: Sequence[Any]) -> ModelLoss:
        """The loss against a model on the batches held back."""
        keep = self.budget.keep if isinstance(self.budget.keep, Mapping) else None
        return ModelLoss(model, back, self.forward, self.score, keep=keep)

    def example(self, model: nn.Module, every: Sequence[Any], *rows: None) -> Any:
        """What the model is called with: the first rows of the first batch, or with None all of them."""
        return example_of(model, every[0], *rows) if self.example_inputs is None else self.example_inputs

    def executor(
        self,
        model: nn.Module,
        levels: Levels,
        known: Sensitivity | None,
        every: Sequence[Any],
        folder: Path | None,
        *,
        in_directory: bool = False,
    ) -> Executor:
        """The search of these levels, and what carries out what it finds."""
        budget = self.budget.limits, self.budget.keep, self.budget.target, str(self.budget.runtime)
        asked = *budget, self.over, self.scope, self.uniform, self.finals, self.seed
        check_alike(levels, model, every, *asked, self.score if isinstance(self.score, str) else None)
        rest, back = split(every)
        choosing = LevelSearch(
            model=model,
            asked=self.budget,
            levels=levels,
            rest=rest,
            measured=everywhere(lambda: self.loss(model, back)),
            example=self.example(model, every),
            timed_on=self.example(model, every, None),
            forward=self.forward,
            uniform=self.uniform,
            over=self.over,
            seed=self.seed,
            passes=PASSES,
            folder=folder,
            known=known,
            scope=self.scope,
            in_directory=in_directory,
        )
        return Executor(choosing, every, self, pattern_of(levels, self.pattern))


def rounding_for(model: nn.Module, example_inputs: Any, round_to: int | None) -> int | None:
    """What was asked for; by default what levels take, but of a small model no multiple, as `shrink` has none there.

    >>> rounding_for(nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4)), torch.zeros(1, 4), None)
    1
    """
    if round_to is not None:
        return round_to
    coupling = find_coupling(unwrapped(model), example_inputs)
    names = [name for name, _ in unwrapped(model).named_parameters()]

    def size(counts: Mapping[str, int]) -> int:
        return sum(coupling.size(name, counts) for name in names)

    whole = size({})
    units = [whole - size({group.name: group.size - 1}) for group in coupling.groups if group.size >= ROUNDED_FROM]
    return 1 if units and 16 * min(units) > _SMALL * whole else None


def pattern_of(levels: Levels, asked: Pattern | None) -> Pattern:
    """Which the levels of entries are of; ValueError where that is not what was asked for."""
    word = str(levels.made.asked.get("pattern", UNSTRUCTURED))
    if asked is not None and patterns.word_of(asked) != word and "oneshot" in levels.made.asked["over"]:
        raise ValueError(
            f"levels= are of the pattern {word}, and pattern= says {patterns.word_of(asked)}; leave it out."
        )
    return patterns.parse(word) if asked is None else asked


def told_entries(entries: Mapping[str, float], pattern: Pattern, scope: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `oneshot` that remove these shares of matrices; a pattern that fixes the share is for them
    alone.

    >>> told_entries({"0.weight": 0.5}, patterns.NM(2, 4), {"include": None})["include"]
    ['0.weight']
    """
    if pattern.density is not None:
        return {**scope, "sparsity": None, "pattern": pattern, "include": [*entries]}
    mean = sum(entries.values()) / len(entries)
    return {**scope, "sparsity": mean, "pattern": pattern, "allocate": Entries(entries)}


def check_all_pruned(done: OneShot, entries: Collection[str], pattern: Pattern) -> None:
    """ValueError where a matrix lost units, so that the pattern fits it no more, and the budget would not hold."""
    if left := set(entries) - {layer.name for layer in done.layers}:
        raise ValueError(
            f"{min(left)} does not fit the pattern {patterns.word_of(pattern)} any more once units left it: pass "
            'round_to= with a multiple that fits, or one of over="shrink" and "oneshot".'
        )


def within_as_it_is(chosen: Chosen) -> None:
    """Warns where nothing has to leave."""
    if not chosen.choice and not chosen.candidates:
        warn("the model costs no more than the budget as it is: nothing leaves.")


@dataclass(frozen=True)
class Told:
    """The arguments of the verbs: how many units of each group stay, and the sparsity of matrices."""

    units: Mapping[str, int] = field(default_factory=dict)
    entries: Mapping[str, float] = field(default_factory=dict)


def told_of(levels: Levels, choice: Mapping[str, int]) -> Told:
    """The arguments of the verbs that carry out a choice."""
    chosen = {name: at for name, at in choice.items() if at}
    units = counts_kept(levels.kept(chosen))
    layers = {name: levels[name][at] for name, at in chosen.items() if levels.kind[name] == "layer"}
    return Told(units, {name.removesuffix(LAYER): 1 - level.kept / level.of for name, level in layers.items()})


def told_by(levels: Levels, chosen: Chosen) -> Told:
    """The arguments of the verbs that carry out what was chosen."""
    return told_of(levels, chosen.choice) if chosen.units is None else Told(chosen.units)


@dataclass(eq=False)
class Executor:
    """Carries out a choice on the module by the verbs; if the result is wrong, the module is restored."""

    choosing: LevelSearch
    every: Sequence[Any]
    asked: FitRequest
    pattern: Pattern
    memory: Memory = field(default_factory=Memory)  # of copies that are finished: they begin alike

    def __call__(
        self, chosen: Chosen, most: float | None
    ) -> tuple[Shrunk | None, OneShot | None, tuple[float, float | None], dict[str, float]]:
        """The results of the verbs, the loss and score of the resulting model, and its costs without latency.

        Raises:
            ValueError: it costs more than it may.
            _MissedError: it loses more than ``most``.
        """
        task = self.choosing
        told = told_by(task.levels, chosen)
        result: list[tuple[OneShot | None, tuple[float, float | None], dict[str, float]]] = []

        def then(shrunk: Shrunk | None) -> None:
            if shrunk is not None:
                _check_counts(told, shrunk)
            with Undo() as undo:
                pruned = None
                if told.entries:
                    undo.values(*{id(each): each for each in task.inner.parameters()}.values())
                    pruned = self._pruned(task.model, told.entries, self.every)
                got = self._costs(chosen, shrunk, pruned)
                check_costs(chosen, got)
                with rounding(task.inner, task.bits(chosen.choice)):
                    finished = task.measured.finished()
                if most is not None and not kept_by(task.measured.lost(finished), most):
                    raise _MissedError
            result.append((pruned, finished, got))

        shrunk = None
        if told.units:
            shrunk = self._shrunk(task.model, told, self.every, verify=self.asked.verify, report=then)
        else:
            then(None)
        return shrunk, *result[0]

    def judged(self, choice: Mapping[str, int]) -> Judged:
        """What is lost when a choice is carried out on a copy, by what levels were made of: on these batches, and as
        much again on those held back. Of these alone a few would say which is the best, mostly by chance."""
        copied = self._copied(told_of(self.choosing.levels, choice), self.choosing.rest)
        with rounding(unwrapped(copied), self.choosing.bits(choice)):
            return self._lost(copied)

    def held(self, choice: Mapping[str, int]) -> float:
        """What is lost on the batches held back when a choice is carried out on a copy, by the others."""
        return self.choosing.measured.of(self._copied(told_of(self.choosing.levels, choice), self.choosing.rest))

    def lost_of(self, choice: Mapping[str, int]) -> float:
        """What is lost on the batches held back when a choice is carried out on a copy, by all there are."""
        return self.choosing.measured.of(self._copied(told_of(self.choosing.levels, choice), self.every))

    def _copied(self, told: Told, batches: Sequence[Any], *, verify: bool = False) -> nn.Module:
        copied = copy.deepcopy(self.choosing.model)
        if told.units:
            with remembering(self.memory):
                self._shrunk(copied, told, batches, verify=verify)
        if told.entries:
            self._pruned(copied, told.entries, batches)
        return copied

    def _lost(self, model: nn.Module) -> Judged:
        task = self.choosing
        if task.measured.score is not None:
            return Judged(task.measured.of(model))
        return Judged.by(task.measured.by_row(model), task.seen.by_row(model))

    def by_itself(self, limits: Mapping[str, float], *, by_all: bool = False, verify: bool = False) -> ByItself | None:
        """What `shrink` makes of a budget of anything but time on a copy, by what levels were made of, or by all
        batches. Proved only where it does not run as it is."""
        task = self.choosing
        if not {*limits} <= {*TARGETS, *BESIDE} or "shrink" not in task.over or "oneshot" in task.over:
            return None
        if is_mixed(self.asked.budget.runtime):
            return None  # it chooses no bits
        try:
            copied, units, costs = self._asked(limits, self.every if by_all else task.rest, verify=verify)
        except ValueError:
            return None  # not so much can leave by its rules
        if not holds(limits, costs):
            return None
        try:
            return ByItself(self._lost(copied), units, costs)
        except _UNPROVED:
            if verify or not self.asked.verify:
                raise
            return self.by_itself(limits, by_all=by_all, verify=True)

    def _asked(
        self, limits: Mapping[str, float], batches: Sequence[Any], *, verify: bool
    ) -> tuple[nn.Module, dict[str, int], dict[str, float]]:
        """A copy from which `shrink` took as much as the tightest of these limits says, and a little more until all of
        them hold, if that comes soon; its counts and costs."""
        task, dense = self.choosing, self.choosing.dense
        word = min(limits, key=lambda word: limits[word] / dense[word])
        share, timed = 1 - limits[word] / dense[word], word == "latency"
        for _ in range(_TRIES):
            # in each process: its first copy begins with what is measured; copies of inference mode have no gradients
            with alone(), remembering(self.memory), torch.inference_mode(False):
                copied = copy.deepcopy(task.model)
                done = shrink(
                    copied,
                    task.timed_on if timed else task.example,
                    share,
                    target="params" if word == "bytes" else word,
                    runtime=self.asked.budget.runtime if timed else None,
                    batches=batches,
                    forward=task.forward,
                    uniform=self.asked.uniform,
                    verify=verify,
                    **self.asked.scope,
                )
            costs = _costs_of(done) | beside(copied, task.example, limits)
            costs |= {"latency": (1 - done.got) * dense[word]} if timed else {}
            over = max((costs[word] - limit) / dense[word] for word, limit in limits.items() if word in costs)
            if over <= 0:
                break
            share = max(share + 1.5 * over, done.beside[1])  # what is nearest is more: the next smaller one that is
        return copied, {name: int(mask.sum()) for name, mask in done.kept.items() if not mask.all()}, costs

    def _shrunk(
        self,
        model: nn.Module,
        told: Told,
        batches: Sequence[Any],
        *,
        verify: bool,
        report: Callable[[Shrunk], None] | None = None,
    ) -> Shrunk:
        return shrink(
            model,
            self.choosing.example,
            0.5,  # the allocation says how many
            target="units",
            allocate=Units(told.units),
            round_to=1,
            batches=batches,
            forward=self.choosing.forward,
            uniform=self.asked.uniform,
            verify=verify,
            report=report,
            **self.asked.scope,
        )

    def _pruned(self, model: nn.Module, entries: Mapping[str, float], batches: Sequence[Any]) -> OneShot:
        done = oneshot(
            model,
            batches,
            solver=self.asked.solver,
            forward=self.choosing.forward,
            **told_entries(entries, self.pattern, self.asked.scope),
        )
        check_all_pruned(done, entries, self.pattern)
        return done

    def _costs(self, chosen: Chosen, shrunk: Shrunk | None, pruned: OneShot | None) -> dict[str, float]:
        """What the finished model costs, counted."""
        got = dict(chosen.predicted)
        if shrunk is not None:
            got |= {word: its for word, its in _costs_of(shrunk).items() if word != "bytes" or not chosen.bits}
        if pruned is not None:
            got |= counted(self.choosing.levels, chosen.choice, pruned)
        task = self.choosing
        return got | beside(task.inner, task.example, got) | {"params": float(nonzeros(task.inner))}

    def timed(self, chosen: Chosen, got: Mapping[str, float]) -> dict[str, float]:
        """With the latency, where one is asked for."""
        task = self.choosing
        if "latency" not in got:
            return dict(got)

        def ratio() -> float:
            assert task.timer is not None
            before, after = task.timer(task.inner, task.served(chosen.choice))
            return after / before

        return {**got, "latency": on_rank_zero(ratio) * chosen.dense["latency"]}


def counted(levels: Levels, choice: Mapping[str, int], pruned: OneShot) -> dict[str, float]:
    """What a choice costs by the entries that are left of its matrices."""
    densities = {each.name: 1 - each.sparsity for each in pruned.layers if f"{each.name}{LAYER}" in levels}
    return {word: levels.cost(choice, word, densities) for word in TARGETS}


def _costs_of(shrunk: Shrunk) -> dict[str, float]:
    return {
        "params": float(shrunk.parameters[1]),
        "macs": float(shrunk.multiply_adds[1]),
        "bytes": float(shrunk.nbytes[1]),
    }


def _check_counts(told: Told, shrunk: Shrunk) -> None:
    """Raises ValueError where other units left than were chosen."""
    kept = counts_kept(shrunk.kept)
    sizes = {group.name: group.size for group in shrunk.scope.groups if not group.chosen}
    asked, left = ({name: each.get(name, size) for name, size in sizes.items()} for each in (told.units, kept))
    check_counts(asked, left, "Nothing was changed; exclude= this group, or ask for another budget.", sizes)


def check_counts(
    asked: Mapping[str, int], left: Mapping[str, int], advice: str, sizes: Mapping[str, int] | None = None
) -> None:
    """ValueError where a group keeps another count than was chosen: their sum alone may come out equal.

    Args:
        asked, left: the counts of the groups that lose something; of others nothing, or the whole.
        advice: what to do about it.
        sizes: of the groups, where they are known.
    """
    for name in sorted({*asked, *left}):
        if asked.get(name) != left.get(name):
            chosen, found = (each.get(name, "all") for each in (asked, left))
            size = f"{sizes[name]} " if sizes else ""
            raise ValueError(
                f"{printable(name)}: the search chose {chosen} of its {size}units to stay, but shrink can keep only "
                f"{found} together with the other choices. {advice}"
            )


def check_costs(chosen: Chosen, got: Mapping[str, float], what: str = "changed") -> None:
    """Raises ValueError where less left than was chosen, and the budget does not hold."""
    for word, limit in chosen.limits.items():
        if word != "latency" and got.get(word, 0.0) > limit * (1 + 1e-9):
            raise ValueError(
                f"{cost_text(word, got[word])} of the {word} are left, where {cost_text(word, limit)} were asked for "
                f"and {cost_text(word, chosen.predicted[word])} chosen: some of it had to stay. Nothing was {what}."
            )


@dataclass(frozen=True)
class Units:
    """The allocation that keeps these counts, and all of other groups."""

    counts: Mapping[str, int]

    def __call__(self, scores: Mapping[str, torch.Tensor], _sparsity: float, _pattern: Pattern) -> dict[str, Any]:
        return {name: self.counts.get(name, each.numel()) for name, each in scores.items()}


@dataclass(frozen=True)
class Entries:
    """The allocation that removes these shares of matrices, and nothing of others: as many units stay as have no more
    entries than that, whichever they are."""

    shares: Mapping[str, float]

    def __call__(self, scores: Mapping[str, torch.Tensor], _sparsity: float, pattern: Pattern) -> dict[str, Any]:
        found = {}
        for name, each in scores.items():
            shape = torch.Size(each.shape)
            groups, units = pattern.pool(torch.empty(shape, device="meta")).shape
            found[name] = units
            if share := self.shares.get(name, 0.0):
                room = (1 - share) * shape.numel() * (1 + 1e-12) + 1e-6  # a share is no exact number
                found[name] = _units_within(room, pattern, shape, groups, units)
        return found


def _units_within(room: float, pattern: Pattern, shape: torch.Size, groups: int, units: int) -> int:
    """How many units of each group have no more entries than there is room for, if they are the largest.

    >>> tiles = patterns.Block(2, 1)  # of three rows: two tiles a column, of two entries and of one
    >>> _units_within(4.0, tiles, torch.Size([3, 2]), 1, 4), _units_within(5.0, tiles, torch.Size([3, 2]), 1, 4)
    (2, 3)
    """
    if groups * units == shape.numel():
        return int(room // groups)
    which = pattern.spread(torch.arange(groups * units, device="cpu").reshape(groups, units), shape)
    sizes = which.flatten().bincount(minlength=groups * units).reshape(groups, units)
    most = sizes.sort(dim=1, descending=True).values.cumsum(1).sum(0)  # of so many units of each group
    return int((most <= room).sum())
