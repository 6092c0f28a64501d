"""`deploy`: what a runtime loads, of a model within so many milliseconds there, or bytes: fitted, in 8 or 4 bits where
that pays, and judged in the runtime itself.

Law: every time, every loss and every size is that of the files that are delivered, run by the runtime; of the
candidates within the budget the one that loses least is delivered, also where nothing was pruned for it; the model
stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from secateur import runtimes
from secateur.checkpoints import (
    RECORD,
    CheckpointError,
    Run,
    begun,
    check_new,
    check_places,
    digests_of_files,
    library_versions,
    open_checkpoint,
    previous_record,
    record_text,
)
from secateur.llamacpp import BLOCK, LlamaCpp
from secateur.models import ByText, NamedTexts, digest, example_of, loaded_model, reached_by_name
from secateur.recovery import rate_for, recover
from secateur.runtimes import Loaded, OnnxRuntime, OpenVINO, Runtime
from secateur.search.costs import Budget, parse_budget
from secateur.search.directory import LEVELS, check_outside
from secateur.search.fitting import FINALS, fit
from secateur.search.levels import BYTES, CONVOLUTIONS, Levels
from secateur.search.making import check_values
from secateur.search.result import MEANS
from secateur.search.score import ModelLoss, Score, share_left, split
from secateur.search.sensitivity import Sensitivity
from secateur.support import (
    Between,
    Chart,
    Column,
    Part,
    Table,
    alternating,
    batch_inputs,
    check_data,
    described,
    globs_of,
    mapped,
    printable,
    processor,
    rank_and_world,
    ratio,
    tensors_in,
    tensors_of,
    unwrapped,
    widened,
    without_autocast,
)

FLOAT, INT8, CALIBRATED, INT4, MIXED = "float32", "int8", "int8, calibrated", "int4", "mixed bits"
DENSE = "dense"
CHECK = "check.npz"  # some inputs, and what the runtime gave for them
CLOSE = 0.03  # of a budget, that a measured latency may be over it
_ROUNDS, _SECONDS = 15, 1.5
_WORST = 1e300  # a loss that JSON can hold
_TRIES = 3  # budgets that are given to `fit`, until its result is within in the runtime
_AIM = 0.99  # of the budget
_MATTERS = 0.05  # of a loss: what rounding loses less of, no layer stays in float for
_UNITS = 24  # operations that are rounded without one of them in turn; of more it is looked at what each moves
_CALIBRATED_ON = 16  # batches
_CHANNELS = 16  # of which processors compute as many at once
_TOLD = 1000  # numbers of each output that the check keeps
_UNNAMED = re.compile(r"output_\d+")  # what a tuple holds
_TOKENIZER = re.compile(
    r"(special_)?tokens?i?z?e?r?.*\.(json|model)|vocab\..*|merges\.txt|added_tokens\.json|special_tokens_map\.json|"
    r".*\.(model|spm|tiktoken)|chat_template.*|(pre)?processor_config\.json"
)


@runtime_checkable
class Served(Runtime, Protocol):
    """A runtime that loads what stands in a folder."""

    def write(self, model: nn.Module, example_inputs: Any, folder: Path) -> None: ...

    def load(self, folder: Path) -> Loaded: ...


@dataclass(frozen=True)
class Candidate:
    """What could be delivered, as it was measured in the runtime.

    Attributes:
        made: ``"dense"``, or of which budget `fit` made it.
        form: ``"float32"``, ``"int8"``, ``"int8, calibrated"``, ``"int4"`` or ``"mixed bits"``.
        left: the share of the parameters that is left.
        ms: of a pass on the first batch, next to the dense model in float32.
        loss: of its outputs on the batches held back, by what they are compared.
        nbytes: of its files.
        kept: how many matrices keep more bits: float, or 8 of a model that llama.cpp has in 4.
        folder: where it is, in the unfinished run.
        files: the SHA-256 of each file there.
    """

    made: str
    form: str
    left: Annotated[float, Between(0)]
    ms: Annotated[float, Between(0)]
    loss: float
    nbytes: Annotated[int, Between(0)]
    kept: Annotated[int, Between(0)]
    folder: str
    files: Mapping[str, str]

    @property
    def costs(self) -> dict[str, float]:
        """By the words of a budget."""
        return {"latency": self.ms, "bytes": self.nbytes}

    def within(self, limits: Mapping[str, float], close: float = CLOSE) -> bool:
        """Whether no cost is over its limit, of milliseconds but for what a measurement may be off."""
        return all(self.costs[word] <= most * (1 + close * (word == "latency")) for word, most in limits.items())

    def spent(self, limits: Mapping[str, float]) -> float:
        """The share of a limit that it costs, of the one that is nearest."""
        return max(self.costs[word] / most for word, most in limits.items())

    @property
    def name(self) -> str:
        what = "dense" if self.left == 1 else f"pruned to {self.left:.1%} of its parameters"
        kept = f", {self.kept} {'matrix' if self.kept == 1 else 'matrices'} in more bits" if self.kept else ""
        return f"{what}, {self.form}{kept}"


@dataclass(frozen=True, eq=False)
class Deployed(ByText):
    """The result of `deploy`; prints as a table.

    Attributes:
        asked: the budget, and ``limits`` its milliseconds and bytes.
        candidates: all that was measured, the dense model in float32 first.
        delivered: the one that is in ``out``.
        compared: by which word of `secateur.search.ModelLoss` outputs were, unless ``dense_score`` is the dense model's
            score.
        batches: how many there were, ``held_back`` of which judge.
        seconds: that it took.
        out: the folder that was written.
        said: what else there is to say.
    """

    asked: Budget
    limits: Mapping[str, float]
    candidates: Sequence[Candidate]
    delivered: Candidate
    compared: str
    dense_score: float | None
    batches: int
    held_back: int
    seconds: float
    out: Path
    said: Sequence[str] = field(default=())

    def content(self) -> Iterator[Part]:
        its, dense = self.delivered, self.candidates[0]
        if its.ms > dense.ms:
            yield f"It is slower than the dense model: {its.ms:.4g} ms, where that takes {dense.ms:.4g} in float32."
        yield self._first()
        yield ""
        for word, asked in self.asked.limits.items():
            share = f"{asked:.1%} of what the dense model takes in float32, " if asked <= 1 else ""
            how = f"; levels are timed in {self.asked.runtime}" if word == "latency" else " of the files"
            if word == "latency" and isinstance(self.asked.runtime, LlamaCpp):
                how = f" in {self.asked.runtime}; what is pruned is pruned by parameters"
            yield f"Asked: {share}{_amount(word, self.limits[word])}{how}."
        yield ""
        yield self._table()
        yield ""
        yield from self.by_text()
        if self.dense_score is None:
            yield f"The loss is {MEANS[self.compared]}."
        else:
            yield f"The loss is what the score falls by; the dense model's is {self.dense_score:.5g}."
        judged = f"{self.held_back} of {self.batches} batches, which are held back"
        if self.batches == 1:
            judged = "the one batch that there was, from which all else was chosen, too"
        yield f"All is measured in the runtime, losses on {judged}, times on the first; {self.seconds:.0f} s in all."
        yield from self.said
        yield printable(f"In {self.out}; {RECORD} in it says what was measured.", 1000)

    def _first(self) -> str:
        its, dense = self.delivered, self.candidates[0]
        took = f"{its.ms:.3g} ms, {its.ms / dense.ms:.1%} of the dense float32 model's {dense.ms:.3g}"
        if "bytes" in self.limits:
            took += f"; {_amount('bytes', its.nbytes)}, {its.nbytes / dense.nbytes:.1%} of its"
        if its.made == DENSE:
            pruned = any(each.made != DENSE for each in self.candidates)
            why = "loses less than anything that was pruned" if pruned else "nothing had to be pruned"
            return f"Delivered: the dense model, {its.name.partition(', ')[2]}: it meets the budget, and {why}. {took}."
        return f"Delivered: {its.name}: {took}."

    def _note(self, each: Candidate) -> str:
        notes = ["delivered"] if each is self.delivered else []
        notes += [] if each.within(self.limits) else ["over the budget"]
        notes += ["slower than dense"] if each.ms > self.candidates[0].ms else []
        return ", ".join(notes)

    def _table(self) -> Table:
        dense = self.candidates[0].ms
        table = Table.of(
            "candidates",
            self.candidates,
            Column.name("Candidate", lambda each: each.name, key="name"),
            Column.figure("ms", lambda each: each.ms),
            Column.portion("of dense", lambda each: each.ms / dense),
            Column.figure("loss", lambda each: each.loss, ".5g"),
            Column.bytes("size", lambda each: each.nbytes, key="bytes"),
            Column("", self._note, key="note"),
            title="What was measured",
        )
        along = next(iter(self.limits))
        close, unit, name = {"latency": (CLOSE, 1.0, "milliseconds"), "bytes": (0.0, 1e6, "megabytes")}[along]
        most = self.limits[along] * (1 + close)
        line = ", the line," if any(each.costs[along] > most for each in self.candidates) else ""
        what = "score" if self.dense_score is not None else {"cosine": "cosine"}.get(self.compared, "share left")
        chart = Chart(
            f"The {what} against {name}",
            f"Each candidate in the runtime; up to {_amount(along, most)}{line} it is within the budget.",
            [each.name for each in self.candidates],
            [self._quality(each) for each in self.candidates],
            what,
            series=[self._series(each) for each in self.candidates],
            places=[each.costs[along] / unit for each in self.candidates],
            along=f"{name} of {'a pass' if along == 'latency' else 'its files'}",
            joined=False,
            from_zero=False,
            chosen=self._series(self.delivered),
            most=most / unit,
        )
        return replace(table, charts=[chart])

    def _series(self, each: Candidate) -> str:
        if each is self.delivered:
            return f"delivered: {each.name}"
        return f"{'dense' if each.made == DENSE else 'pruned'}, {each.form}"

    def _quality(self, each: Candidate) -> float:
        return share_left(each.loss, self.compared) if self.dense_score is None else self.dense_score - each.loss


@without_autocast()
def deploy(
    model: nn.Module | Path | str,
    batches: Iterable[Any],
    *,
    budget: Mapping[str, float],
    out: Path | str,
    runtime: str | Served = "onnxruntime:int8",
    score: Score | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    shares: Sequence[float] | None = None,
    round_to: int | None = None,
    example_inputs: Any = None,
    finals: int = FINALS,
    steps: int = 0,
    seed: int = 0,
    store: Path | str | None = None,
    levels: Levels | Sensitivity | Path | str | None = None,
) -> Deployed:
    """Write what a runtime loads, of a model that takes no more than so many milliseconds there, or bytes, with the
    least loss.

    The dense model is exported, in float32, in 8 bits and, where they are asked for, in 4, and each is timed and judged
    in the runtime. Where the budget is less than it takes in the fastest form that was asked for, `secateur.fit` prunes
    a copy to the budget, timed in that form, and what it finishes is exported and measured in all forms, after as many
    ``steps`` of training as you ask for. Where fewer bits leave time, the matrices that they hurt most keep more,
    as many as the budget allows. What loses least of all that is within the budget is delivered. If that is the dense
    model in fewer bits, the first line says so.

    Each time is measured in turns with the dense model in float32. Weights are rounded by the runtime's own quantizers:
    8 bits of matrix products with inputs as they come, and, of a model with convolutions, also with ranges from the
    batches that are not held back; 4 bits of matrix products, with a range for each 32 of them.

    Args:
        model: any module with its weights, or a Hugging Face directory; it stays as it is. Half precision is converted
            to float32.
        batches: what a DataLoader yields, or ``{name: batches}`` of several texts. A quarter of them is held back, to
            judge, also from `fit` and its repair; of a single batch none is.
        budget: ``{"latency": 0.25}``, a share of what the dense model takes in float32 in the runtime; above 1
            milliseconds. A result may be over it by 3 %, what is measured being no exact number. ``{"bytes": 0.25}``, a
            share of the files that the runtime loads of the dense model in float32; above 1 bytes. Or both.
        out: the folder to write, which must not exist: ``model.onnx`` (of OpenVINO ``model.xml`` and ``model.bin``, of
            llama.cpp ``model.gguf``), of a directory the files of its tokenizer, ``secateur.json``, which says what was
            measured, and ``check.npz``, some inputs with the outputs that the runtime gave for them. Beside it is
            ``<out>.unfinished`` until it does, with all that took long: a run that was killed goes on there, also with
            another budget.
        runtime: ``"onnxruntime:int8"``, ``"onnxruntime:int4"`` (8 bits are tried, too; ONNX Runtime 1.22 or later),
            ``"onnxruntime"``, ``"openvino"`` or ``"openvino:int8"`` (with NNCF), in which levels are timed; or a value
            of `secateur.runtimes` with ``write`` and ``load``. With ``"onnxruntime:mixed"`` `secateur.fit` chooses the
            bits of each group with what leaves of it, and that is a candidate beside the dense model in 8 and 4 bits.
            ``"llamacpp:int8"`` or ``"llamacpp:int4"``: llama.cpp, of Llama, Mistral and Qwen2. It runs no part of a
            model alone, so what is pruned is pruned by parameters, and timed as a whole, on ``example_inputs`` (a
            single token is what the next one takes).
        score, include, exclude, shares, finals, seed, store, levels: as in `secateur.fit`.
        round_to: likewise; but of a model with convolutions multiples of 16 if left out, since runtimes compute so
            many channels at once: EfficientNet-Lite0 without half of its multiply-adds took 12.1 ms for 6.9 in ONNX
            Runtime where it was left any number of them, and 3.3 for 6.0 with multiples of 16.
        example_inputs: what the model is called with when it is exported and timed; by default the first batch.
        steps: of `secateur.recover` by the dense model's outputs, for what `fit` finished, before it is exported; each
            over one of the batches that are not held back, in rounds. Up to 80 have its rate of 1e-4, more a higher
            one, 400 and more 5e-4. 0: none.

    Returns:
        A `Deployed`: all candidates with their times and losses, and which of them was delivered; it prints as a table.

    Raises:
        ValueError: nothing is within the budget (what comes nearest is said, and what was measured is kept for another
            budget), the model cannot be exported, or what `secateur.fit` refuses.
        ImportError: the runtime is not installed; before anything is computed.
        CheckpointError: an ``out`` that exists, a directory that cannot be read; another process, or what no such run
            has put there, in ``<out>.unfinished``.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     batches = [torch.randn(16, 8) for _ in range(4)]
    ...     done = deploy(model, batches, budget={"latency": 1.0}, out=Path(folder, "served"))
    ...     sorted(path.name for path in done.out.iterdir())
    ['check.npz', 'model.onnx', 'secateur.json']
    >>> done.delivered.name
    'dense, float32'
    """
    started = time.monotonic()
    if (world := rank_and_world()[1]) > 1:
        raise ValueError(
            f"deploy runs in one process, and there are {world}, of which each would do all of it, and disturb what "
            "others time: call it in one of them, before the others begin."
        )
    if not {*(words := parse_budget(budget).words)} <= {"latency", "bytes"}:
        raise ValueError(
            'the budget of deploy is a latency, {"latency": 0.25}, or bytes of what the runtime loads, '
            f'{{"bytes": 0.25}}, and not {", ".join(words)}.'
        )
    asked = replace(parse_budget(budget), runtime=runtimes.timed_by(runtime, True, whole=True, mixed=True))
    if isinstance(asked.runtime, LlamaCpp) and isinstance(model, Path | str):
        asked = replace(asked, runtime=replace(asked.runtime, tokenizer=Path(model)))
    if not isinstance(asked.runtime, Served):
        raise ValueError(
            'deploy writes what a runtime loads: runtime= is "onnxruntime:int8", "onnxruntime:int4", '
            '"onnxruntime:mixed", "onnxruntime", "openvino", "openvino:int8", "llamacpp:int8" or "llamacpp:int4"; '
            f"for {asked.runtime} there is secateur.fit."
        )
    if type(steps) is not int or steps < 0:
        raise ValueError(f"steps is a whole number, 0 or more; got {steps!r}.")
    source, place = (Path(model) if isinstance(model, Path | str) else None), Path(out)
    folder = None if store is None else Path(store)
    if source is not None:
        check_places(source, place)
    check_new(place)
    check_outside(place, store=folder, levels=Path(levels) if isinstance(levels, str | Path) else None)
    every = NamedTexts.of(batches)
    given = loaded_model(source) if source is not None else unwrapped(cast(nn.Module, model))
    wide = [mapped(batch, widened) for batch in every]  # the model is float32 from here on
    check_values(given)
    every = batches = NamedTexts(wide, every.names) if isinstance(every, NamedTexts) else wide
    rest, back = split(every)
    dense = copy.deepcopy(given).cpu().float().eval()
    asked_with = example_of(dense, every[0], None) if example_inputs is None else mapped(example_inputs, widened)
    check_data([asked_with], "since the model is exported and timed on the example")
    example = _with_mask(dense, asked_with)
    scope = {"include": globs_of(include), "exclude": globs_of(exclude)}
    if round_to is None and levels is None and (_has_convolutions(dense) or isinstance(asked.runtime, LlamaCpp)):
        round_to = BLOCK if isinstance(asked.runtime, LlamaCpp) else _CHANNELS
    made_of = {
        "verb": "deploy",
        "model": digest([given.state_dict()]) if source is None else None,
        "batches": [digest(every), len(back)],
        "example": digest([example]),
        "score": described(score) if callable(score) else score,
        **scope,
        "shares": None if shares is None else sorted(map(float, shares)),
        "levels": levels if levels is None or isinstance(levels, str) else _digest_of(levels),
        "round_to": round_to,
        "finals": finals,
        "steps": steps,
        "seed": seed,
        "runtime": str(asked.runtime),
        "machine": [processor(), torch.get_num_threads()],
        "versions": library_versions(),
    }
    with begun(place, made_of, None if source is None else open_checkpoint(source), copied=False) as run:
        run.kept = run.folder
        run.hint = (
            f" What was measured is kept in {run.place}, for the same command with another budget; remove it to give "
            "other options."
        )
        how: dict[str, Any] = {"shares": shares, "finals": finals, "seed": seed, "levels": levels, "score": score}
        how |= {"round_to": round_to}
        how |= scope | {"store": (run.folder / LEVELS if folder is None else folder) if levels is None else folder}
        trying = _Trying(run, dense, every, rest, ModelLoss(dense, back, None, score), example, asked, how, steps)
        limits, candidates, said = trying.all()
        delivered = _least(candidates, limits, said)
        _assembled(run, trying, delivered, source, candidates, limits)
        run.publish(run.folder / "delivered")
    reach = reached_by_name(dense, batches)
    return Deployed(
        asked=asked,
        limits=limits,
        candidates=candidates,
        delivered=delivered,
        compared=trying.measured.word,
        dense_score=trying.measured.dense_score,
        batches=len(every),
        held_back=len(back),
        seconds=time.monotonic() - started,
        out=place,
        said=said,
        reach=reach,
    )


def _digest_of(levels: Levels | Sensitivity | Path) -> str:
    if isinstance(levels, Path):
        return str(levels)
    return (levels.levels if isinstance(levels, Sensitivity) else levels).made.digest


def _amount(word: str, amount: float) -> str:
    return f"{amount:.3g} ms" if word == "latency" else f"{amount / 1e6:.3g} MB"


def _least(candidates: Sequence[Candidate], limits: Mapping[str, float], said: Sequence[str]) -> Candidate:
    """What loses least within the budget; ValueError with what comes nearest to it."""
    within = [each for each in candidates if each.within(limits)]
    if within:
        return min(within, key=lambda each: each.loss)
    near, dense = min(candidates, key=lambda each: each.spent(limits)), candidates[0]
    most = " and ".join(_amount(*each) for each in limits.items())
    size = f" and {_amount('bytes', near.nbytes)} of {_amount('bytes', dense.nbytes)}" if "bytes" in limits else ""
    slower = "" if near.ms < dense.ms or near is dense else f", slower than the dense model's {dense.ms:.3g}"
    why = f" {' '.join(said)}" if said else ""
    raise ValueError(
        f"nothing takes {most} or less in the runtime: nearest comes {near.name}, with {near.ms:.3g} ms"
        f"{slower} ({near.ms / dense.ms:.3f} of the dense model in float32){size}, and it loses {near.loss:.4g}.{why} "
        "Ask for more."
    )


@dataclass(frozen=True)
class _Made:
    """What a run's journal says of a graph that was pruned: the share of the parameters that is left, its files, and
    the bits that were chosen of its modules."""

    left: Annotated[float, Between(0)]
    files: Mapping[str, str]
    bits: Mapping[str, int] = field(default_factory=dict)


def _misfit(folder: Path, files: Mapping[str, str]) -> str | None:
    """Why a folder is not what was noted of it."""
    if folder.is_dir() and digests_of_files(folder) == files:
        return None
    return f"is of {folder.parent.name}/{folder.name}, which is gone, or not what was written there"


@dataclass(eq=False)
class _Trying:
    """Makes candidates and measures them, each once, also over runs that were stopped."""

    run: Run
    dense: nn.Module
    every: Sequence[Any]
    rest: Sequence[Any]
    measured: ModelLoss
    example: Any
    asked: Budget
    how: Mapping[str, Any]
    steps: int
    found: list[Candidate] = field(default_factory=list)
    bits: dict[str, Mapping[str, int]] = field(default_factory=dict)

    @functools.cached_property
    def forms(self) -> dict[str, Served]:
        """What there is of each graph."""
        mine = cast(Served, self.asked.runtime)
        if isinstance(mine, LlamaCpp):
            rounded = {INT8: 8} | ({INT4: 4} if mine.bits == 4 else {})
            return {form: replace(mine, bits=bits) for form, bits in ({FLOAT: 32} | rounded).items()}
        found: dict[str, Served] = {FLOAT: mine}
        if isinstance(mine, OpenVINO) and mine.bits == 8:
            found = {FLOAT: replace(mine, bits=32), CALIBRATED: mine}
        if not isinstance(mine, OnnxRuntime):
            return found
        alike = replace(mine, calibrated=False, modules=None)
        found = {FLOAT: replace(alike, bits=32), INT8: replace(alike, bits=8)}
        if _has_convolutions(self.dense):
            found[CALIBRATED] = replace(alike, bits=8, calibrated=True)
        if mine.bits == 4:
            found[INT4] = alike
        if runtimes.is_mixed(mine):
            found[MIXED] = replace(mine, bits=8, calibrated=True) if CALIBRATED in found else mine
        return found

    def all(self) -> tuple[dict[str, float], list[Candidate], list[str]]:
        """The budget's milliseconds and bytes, what was measured, and what there is to say."""
        said: list[str] = []
        whole = self.tried(DENSE, FLOAT, 1.0)
        limits = self.asked.of(whole.costs)
        for form in [each for each in self.forms if each not in (FLOAT, MIXED)]:
            try:
                self.tried(DENSE, form, 1.0)
            except CheckpointError:
                raise
            except ValueError as error:
                said.append(f"Not tried: {error}")
                del self.forms[form]
        if whole.within(limits, 0):
            return limits, self.found, said
        base = whole if MIXED in self.forms else self._base(limits)
        if not base.within(limits, 0):
            try:
                self._fitted(base, limits)
            except CheckpointError:  # what a run left is damaged
                raise
            except ValueError as error:  # such as a budget that no choice of levels meets
                said.append(f"Nothing was pruned to it: {str(error).splitlines()[0]}")
        within = [each for each in self.found if each.form not in (FLOAT, MIXED) and each.within(limits, 0)]
        if within:
            self._without_the_worst(min(within, key=lambda each: each.loss), limits)
        return limits, self.found, said

    def _base(self, limits: Mapping[str, float]) -> Candidate:
        """The dense model in the form that levels are timed in: if it may be rounded, the fastest, or the smallest."""
        rounds = getattr(self.asked.runtime, "bits", 32) < 32
        return min((each for each in self.found if rounds or each.form == FLOAT), key=lambda each: each.spent(limits))

    def _fitted(self, base: Candidate, limits: Mapping[str, float]) -> None:
        """What `fit` finishes at the budget, in every form; once more where the files take more than it said."""
        shares: dict[str, float] = {}
        mine, form = base, MIXED if MIXED in self.forms else base.form
        # llama.cpp runs no part of a model by itself, whose time a level could be: its parameters stand for it
        word = "params" if isinstance(self.asked.runtime, LlamaCpp) else "latency"
        for _ in range(_TRIES):
            if mine.ms > limits.get("latency", mine.ms):
                known = shares.get(word)
                share = _AIM * limits["latency"] / mine.ms
                shares[word] = share if known is None else known * min(0.98, share)
            over = mine.nbytes - _AIM * limits.get("bytes", mine.nbytes / _AIM)
            if form == MIXED and "bytes" in limits:  # whose levels say what they take in a file, but for the graph
                whole = sum(each.nbytes for each in tensors_of(self.dense).values()) or 1
                shares["bytes"] = shares.get("bytes", 1.0) - max(over, 0.0) / whole
            elif mine.nbytes > limits.get("bytes", mine.nbytes):  # what leaves a file are rounded weights
                weights = over / BYTES[getattr(self.forms[form], "bits", 32)]
                shares["params"] = min(mine.left - weights / _size(self.dense), shares.get("params", 1.0))
            if min(shares.get("params", 1.0), shares.get("bytes", 1.0)) <= 0:
                raise ValueError("what is no weight of a matrix product, or stays in float, is more than that.")
            made = "fit" + "".join(f"-{word}-{share:.4f}" for word, share in shares.items())
            left = self._left(made, {word: round(share, 4) for word, share in shares.items()}, form)
            took = [self.tried(made, each, left) for each in self.forms if left < 1 or each == form]
            mine = next(each for each in took if each.form == form)
            if mine.within(limits):
                return

    def _left(self, made: str, shares: Mapping[str, float], form: str) -> float:
        """What is left of a copy that is fitted to these shares, whose graph is written, now or before."""
        folder = self._folder(made, FLOAT)

        def compute() -> _Made:
            left, bits = self._pruned(made, shares, form)
            return _Made(left, digests_of_files(folder), bits)

        found = self.run.stage(made, _Made, compute, lambda its: _misfit(folder, its.files))
        self.bits[made] = found.bits
        return found.left

    def _pruned(self, made: str, shares: Mapping[str, float], form: str) -> tuple[float, Mapping[str, int]]:
        """Writes the graph of a copy that is fitted to these shares; returns what is left of it, and the bits of its
        modules."""
        copied = copy.deepcopy(self.dense)
        done = fit(
            copied,
            self.rest,  # not by what judges
            budget=shares,
            runtime=self.forms[form] if "latency" in shares or form == MIXED else None,
            example_inputs=self.example,
            **self.how,
        )
        if self.steps:
            rate, seed = rate_for(self.steps), self.how["seed"]
            recover(copied, self.dense, self.rest, steps=self.steps, local=0, rate=rate, seed=seed)
        self._written(made, copied)
        return _size(copied) / _size(self.dense), done.chosen.bits

    def _written(self, made: str, model: nn.Module) -> None:
        folder, runtime = _fresh(self._folder(made, FLOAT)), self.forms[FLOAT]
        try:
            with _without_cache(model), torch.no_grad():
                runtime.write(model.eval(), self.example, folder)
                if isinstance(runtime, LlamaCpp) and INT4 in self.forms:
                    runtime.weigh(model, self.rest[:_CALIBRATED_ON], folder)
        except BaseException:
            shutil.rmtree(folder.parent)
            raise

    def _folder(self, made: str, form: str, kept: int = 0) -> Path:
        return self.run.folder / made / f"{form.replace(', ', '-')}{f'-{kept}' if kept else ''}"

    def tried(
        self,
        made: str,
        form: str,
        left: float,
        keep: Sequence[str] = (),
        kept: int = 0,
    ) -> Candidate:
        """A candidate, measured now or by a run before."""
        folder = self._folder(made, form, kept)
        place = folder.relative_to(self.run.folder).as_posix()

        def compute() -> Candidate:
            is_dense = made == DENSE and form == FLOAT
            if is_dense:
                self._written(made, self.dense)
            elif form != FLOAT:
                self.rounded(made, form, _fresh(folder), keep)
            try:
                ms, loss = self.judged(form, folder, is_dense=is_dense)
            except ValueError:
                shutil.rmtree(folder.parent if is_dense else folder)
                raise
            nbytes = sum(each.stat().st_size for each in folder.iterdir())
            return Candidate(made, form, left, ms, loss, nbytes, kept, place, digests_of_files(folder))

        def wrong(its: Candidate) -> str | None:
            if (its.made, its.form, its.kept, its.folder) != (made, form, kept, place):
                return f"is of another candidate than {place}"
            return _misfit(folder, its.files)

        name = f"{made}: {form}{f' but {kept}' if kept else ''}"
        self.found.append(self.run.stage(name, Candidate, compute, wrong))
        return self.found[-1]

    def rounded(self, made: str, form: str, folder: Path, keep: Sequence[str]) -> None:
        runtime, source = self.forms[form], self._folder(made, FLOAT)
        assert isinstance(runtime, OnnxRuntime | OpenVINO | LlamaCpp)
        if form == MIXED:
            runtime = replace(cast(OnnxRuntime, runtime), modules=(*self.bits[made].items(),))
        feeds: Iterable[Mapping[str, Any]] = ()
        if getattr(runtime, "calibrated", False) or form == CALIBRATED:
            loaded = self.forms[FLOAT].load(source)
            feeds = [_feeds(loaded, batch_inputs(batch)) for batch in self.rest[:_CALIBRATED_ON]]
        runtime.rounded(source, folder, feeds, keep)

    def judged(self, form: str, folder: Path, *, is_dense: bool = False, timed: bool = True) -> tuple[float, float]:
        """Milliseconds, and the loss on what is held back."""
        loaded = self.forms[form].load(folder)
        loss = min(self.measured.of(InRuntime(loaded)), _WORST)
        if not timed:
            return 0.0, loss
        first = self.forms[FLOAT].load(self._folder(DENSE, FLOAT))
        feeds = _feeds(first, self.example)
        calls = {"dense": functools.partial(first.run, feeds)}
        if not is_dense:
            calls["other"] = functools.partial(loaded.run, feeds)
        rounds = alternating(calls, _ROUNDS, seconds=_SECONDS, clock=self.forms[form].clock)
        if is_dense:
            return 1e3 * statistics.median(rounds["dense"]), loss
        return self.found[0].ms / ratio(rounds["other"], rounds["dense"]), loss

    def _without_the_worst(self, best: Candidate, limits: Mapping[str, float]) -> None:
        """The same with more bits for the matrices that rounding hurts most: one, two, four, while they are within."""
        runtime = self.forms[best.form]
        exact = next(each.loss for each in self.found if each.made == best.made and each.form == FLOAT)
        if best.loss - exact <= _MATTERS * best.loss or not isinstance(runtime, OnnxRuntime | LlamaCpp):
            return
        source, units = self._folder(best.made, FLOAT), dict[str, list[str]]()
        places = runtime.matrices(source)
        each_alone = len(places) > _UNITS and best.form != CALIBRATED
        for operation, module in places.items():
            name = operation if each_alone else module if len(places) <= _UNITS else re.sub(r"\d+", "*", module)
            units.setdefault(name, []).append(operation)

        def compute() -> dict[str, float]:
            if not each_alone:
                return {name: self._loss_without(best, its) for name, its in units.items()}
            feeds: Mapping[str, Any] = {}  # what llama.cpp's matrices read was met by `weigh`
            if isinstance(runtime, OnnxRuntime):
                feeds, _ = _one(self.forms[FLOAT].load(source), batch_inputs(self.rest[0]))
            return {name: -error for name, error in runtime.errors(source, feeds).items()}

        losses = self.run.stage(f"{best.made}: {best.form} without", dict[str, float], compute)
        order, count = sorted(losses, key=lambda name: losses[name]), 1
        while count < len(order):
            keep = [operation for name in order[:count] for operation in units[name]]
            its = self.tried(best.made, best.form, best.left, keep, len(keep))
            if not its.within(limits):
                break
            count *= 2

    def _loss_without(self, best: Candidate, keep: Sequence[str]) -> float:
        folder = _fresh(self.run.folder / best.made / "trial")
        try:
            self.rounded(best.made, best.form, folder, keep)
            return self.judged(best.form, folder, timed=False)[1]
        finally:
            shutil.rmtree(folder)


class InRuntime(nn.Module):
    """A graph in a runtime, called as the model that it is of is, and with outputs of the same names."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__()
        self.loaded = loaded

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        feeds = _feeds(self.loaded, kwargs or args)
        try:
            found = [torch.from_numpy(np.asarray(each)) for each in self.loaded.run(feeds)]
        except Exception as error:
            shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in feeds.items())
            line = next(iter(str(error).strip().splitlines()), "")
            raise ValueError(
                f"the exported graph does not run on {shapes}: {printable(line, 300)}. Give batches of one shape."
            ) from error
        if self.loaded.outputs == ("output",):
            return found[0]
        if all(_UNNAMED.fullmatch(name) for name in self.loaded.outputs):
            return tuple(found)
        return _Named(zip(self.loaded.outputs, found, strict=True))


class _Named(dict[str, Tensor]):
    """Outputs by name, also as attributes, as transformers' are."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


def _feeds(loaded: Loaded, inputs: Any) -> dict[str, Any]:
    """Of what a model is called with; a mask of all tokens where there is none."""
    if "attention_mask" in loaded.inputs and not isinstance(inputs, Mapping):
        ids = next(tensors_in(inputs))
        inputs = {loaded.inputs[0]: ids}
    if "attention_mask" in loaded.inputs and "attention_mask" not in inputs:
        inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    return loaded.feeds(inputs)


def _one(loaded: Loaded, inputs: Any) -> tuple[dict[str, Any], Sequence[Any]]:
    """The first row of a batch as it is fed, and what the graph gives for it; all rows if it does not take one."""
    feeds = _feeds(loaded, mapped(inputs, lambda each: each[:1] if each.dim() else each))
    try:
        return feeds, loaded.run(feeds)
    except Exception:  # a graph of one size, or an input that is no example
        feeds = _feeds(loaded, inputs)
        return feeds, loaded.run(feeds)


def _with_mask(model: nn.Module, example: Any) -> Any:
    """An example of tokens with a mask, if the model takes one, so that texts of several lengths can be served."""
    takes = "attention_mask" in inspect.signature(model.forward).parameters
    if not (takes and isinstance(example, Mapping) and "input_ids" in example and "attention_mask" not in example):
        return example
    return {**example, "attention_mask": torch.ones_like(example["input_ids"])}


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """A model that returns no cache of keys and values, which is no output that is served."""
    config: Any = getattr(model, "config", None)
    was = getattr(config, "use_cache", None)
    if was:
        config.use_cache = False
    try:
        yield
    finally:
        if was:
            config.use_cache = was


def _has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(each, CONVOLUTIONS) for each in model.modules())


def _fresh(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _size(model: nn.Module) -> int:
    """Numbers in its parameters; 1 of a model without any, which loses no share of them."""
    return sum(each.numel() for each in model.parameters()) or 1


def _assembled(
    run: Run,
    trying: _Trying,
    delivered: Candidate,
    source: Path | None,
    candidates: Sequence[Candidate],
    limits: Mapping[str, float],
) -> None:
    """The folder as it will be: graph, tokenizer, check, record."""
    folder = run.folder / "delivered"
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(run.folder / delivered.folder, folder)
    for path in sorted(source.iterdir()) if source is not None else ():
        if path.is_file() and _TOKENIZER.fullmatch(path.name):
            shutil.copyfile(path, folder / path.name)
    loaded = trying.forms[delivered.form].load(folder)
    feeds, found = _one(loaded, batch_inputs(trying.measured.held[0].batch))
    outputs = zip(loaded.outputs, found, strict=True)
    told: dict[str, Any] = {f"outputs/{name}": np.asarray(each).reshape(-1)[:_TOLD] for name, each in outputs}
    np.savez(folder / CHECK, **{f"inputs/{name}": each for name, each in feeds.items()} | told)
    said = {
        "runtime": str(trying.forms[delivered.form]),
        "threads": torch.get_num_threads(),
        "processor": processor(),
        "budget": {"asked": dict(trying.asked.limits), **limits},
        "compared": trying.measured.word,
        "delivered": _told(delivered),
        "candidates": [_told(each) for each in candidates],
        "inputs": [*loaded.inputs],
        "outputs": [*loaded.outputs],
        "files": digests_of_files(folder),
    }
    previous = None if source is None else previous_record(source)
    text = record_text("deploy", said, previous=previous, versions=library_versions())
    (folder / RECORD).write_text(text, encoding="utf-8")


def _told(each: Candidate) -> dict[str, Any]:
    """Of a candidate what a record says."""
    numbers = {"left": each.left, "ms": each.ms, "loss": each.loss, "bytes": each.nbytes}
    return {"made": each.made, "form": each.form, "matrices_in_more_bits": each.kept, **numbers}
