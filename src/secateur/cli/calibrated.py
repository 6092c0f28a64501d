"""Commands that run a directory's model on a text: oneshot, recover, sensitivity, fit, deploy."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.cli.options import TEXT, command
from secateur.cli.terminal import (
    Answer,
    Asked,
    join_processes,
    lines_of,
    memory,
    one_process,
    read_data,
    resumable,
    warnings_as_lines,
)

if TYPE_CHECKING:
    from secateur.models import Layer
    from secateur.recovery import LocalPart

PAUSE = 10.0  # seconds between two lines about steps


@command(
    "oneshot", "Prune a transformer block by block, with calibration text.", "directory",
    *TEXT, "out", "sparsity", "pattern", "solver", "allocate", "values", "choose", "include", "exclude", "activations",
    "device",
    verb="models/oneshot.py:oneshot", required=("data", "out"),
)  # fmt: skip
def oneshot(asked: Asked) -> Iterator[Any]:
    """Prune a model with calibration text, block by block, and mend what is left.

    Weights are read one block at a time: a model larger than memory is no trouble. Embeddings, heads, normalizations
    and routers are left alone. A run that was stopped goes on where it was if the same command is given again; OUT
    appears complete or not at all. Under torchrun the text is shared out among the processes.
    """
    from secateur import allocation, patterns, solvers
    from secateur.models import oneshot as prune_blocks

    solve, shared = solvers.parse(asked.solver), allocation.parse(asked.allocate)
    chosen = allocation.narrowest(solve) if asked.pattern is None else patterns.parse(asked.pattern)
    asked["pattern"] = asked.pattern or patterns.word_of(chosen)
    with resumable(), warnings_as_lines(), asked.recorded():
        join_processes(asked.device)
        if chosen.density is not None and shared is not allocation.uniform:
            raise ValueError(f"{asked.pattern} keeps the same share of every weight; leave --allocate out.")
        done = prune_blocks(
            asked.directory,
            read_data(asked),
            solver=solve,
            pattern=chosen,
            allocate=shared,
            on_layer=functools.partial(_print_layer, started=time.monotonic()),
            **asked.only("sparsity", "values", "choose", "include", "exclude", "out", "activations", "device"),
        )
    yield Answer(done, printed=[*done.by_text(), *lines_of(done)], title=", pruned block by block")


def _print_layer(layer: Layer, started: float) -> None:
    """A line a layer, on stderr."""
    if int(os.environ.get("RANK", "0")):
        return
    error = "no tokens" if not layer.tokens else "no relative error"
    error = error if layer.error is None else f"error {layer.error:.4f}"
    idle = f", experts without tokens: {', '.join(map(str, layer.without_tokens))}" if layer.without_tokens else ""
    print(
        f"{layer.name}: {layer.sparsity:.1%} removed, {error}, {layer.seconds:.1f} s{memory()}{idle} "
        f"({time.monotonic() - started:.0f} s so far)",
        file=sys.stderr,
        flush=True,
    )


@command(
    "recover", "Train what pruning left towards the model that it came from.", "directory",
    "teacher", *TEXT, "out", "steps", "local", "adapters", "rate", "autocast", "batch",
    "include", "exclude", "teacher_on_disk", "activations", "device",
    verb="recovery/recovering.py:recover", required=("teacher", "out"), batch=8, samples=512,
)  # fmt: skip
def recover(asked: Asked) -> Iterator[Any]:
    """Train what pruning left towards the model that it came from. What is zero stays zero, to the last one.

    First block by block against the teacher's activations, with one block of each model in memory; then the whole model
    by the teacher's outputs, with both in memory: --steps 0 leaves that out, --teacher-on-disk the teacher. No labels
    are needed; without --data the teacher writes the text, 512 tokens a sequence. A run that was stopped goes on where
    it was if the same command is given again; OUT appears complete or not at all, and secateur verify OUT counts its
    zeros. Under torchrun (-m -- secateur recover …), with --local 0, each process holds its share of both models and
    runs its part of each batch.
    """
    from secateur.recovery import Sampled
    from secateur.recovery import recover as train

    with resumable(), warnings_as_lines(), asked.recorded():
        join_processes(asked.device)
        if asked.data is None:
            batches: Any = Sampled(asked.samples, asked.sequence_length, asked.batch)
        else:
            batches = _in_batches(read_data(asked), asked.batch)
        done = train(
            asked.directory,
            asked.teacher,
            batches,
            out=asked.out,
            on_part=_say_part,
            on_step=_saying(asked.steps),
            **asked.only("steps", "local", "adapters", "rate", "autocast", "include", "exclude", "seed"),
            **asked.only("teacher_on_disk", "activations", "device"),
        )
    yield Answer(done, printed=[*done.by_text(), *lines_of(done)], title=", recovered")


def _in_batches(texts: list[Any], size: int) -> list[Any]:
    """Sequences of one length, or pictures of one size, together, of each text by itself; others stay as they are."""
    import torch

    from secateur.models import NamedTexts

    if isinstance(texts, NamedTexts):
        parts = {name: _in_batches(its, size) for name, its in texts.by_name().items()}
        return NamedTexts(itertools.chain(*parts.values()), (name for name, its in parts.items() for _ in its))
    if all(isinstance(each, dict) and {*each} == {"pixel_values"} for each in texts):
        return [{"pixel_values": one} for one in _in_batches([each["pixel_values"] for each in texts], size)]
    if any(not isinstance(each, torch.Tensor) or each.shape != texts[0].shape or len(each) > 1 for each in texts):
        return texts
    return [torch.cat(texts[at : at + size]) for at in range(0, len(texts), size)]


def _say_part(part: LocalPart) -> None:
    """A line a part of a block, on stderr."""
    print(
        f"{part.block}, up to {part.part}: relative error {part.after:.5f} to the teacher, before {part.before:.5f}"
        f"{memory()}",
        file=sys.stderr,
        flush=True,
    )


def _saying(steps: int) -> Callable[[int, float], None]:
    """A line now and then, on stderr."""
    said = time.monotonic()

    def say(number: int, loss: float) -> None:
        nonlocal said
        if os.environ.get("RANK", "0") != "0":
            return
        if number in (1, steps) or time.monotonic() - said >= PAUSE:
            said = time.monotonic()
            print(f"step {number:,} of {steps:,}: loss {loss:.5f}{memory()}", file=sys.stderr, flush=True)

    return say


@command(
    "sensitivity", "Say what each part of a model would cost it, with a text.", "directory",
    *TEXT, "over", "shares", "score", "include", "exclude", "solver", "pattern", "store",
    verb="search/sensitivity.py:sensitivity", required=("data",),
)  # fmt: skip
def sensitivity(asked: Asked) -> Iterator[Any]:
    """Say what each head group, width and channel group, or each layer, costs when it alone goes to 10, 30, 50, 70 %.

    Of each there are two numbers: how far the outputs of what consumes it are off after repair, and what the model's
    own outputs lose by it. The model is loaded into memory and nothing of it is written. What is found is kept in a
    folder where --store names one, from which other verbs go on. Under torchrun groups are measured side by side.
    """
    from secateur.search import SCORES, SHARES
    from secateur.search import sensitivity as measure

    if asked.score not in (None, *SCORES):
        raise ValueError(f"--score must be one of {', '.join(SCORES)}, not {asked.score}; functions are for Python.")
    with resumable(asked.store is not None), warnings_as_lines():
        join_processes(None)
        found = measure(
            asked.directory,
            read_data(asked),
            over=asked.over or ("shrink",),
            shares=asked.shares or SHARES,
            **asked.only("score", "include", "exclude", "solver", "pattern", "store"),
        )
    yield Answer(found, title=", what each part costs")


@command(
    "fit", "Spend no more than a budget, and lose as little as can be.", "directory",
    *TEXT, "out", "budget", "runtime", "keep_share", "target", "over", "shares", "score", "include",
    "exclude", "solver", "pattern", "finals", "store", "levels",
    verb="search/fitting.py:fit", required=("data", "out"),
)  # fmt: skip
def fit(asked: Asked) -> Iterator[Any]:
    """Spend no more than a budget, and lose as little as that allows; or keep so much, and spend as little as can be.

    Of each group some levels are made, of how much of it leaves, and each is repaired. Which of them together lose
    least at the budget is searched with the whole model, which is loaded into memory for it. Then shrink and oneshot go
    through the directory block by block with what was chosen, and mend what stays; from_pretrained loads OUT. A run
    that was stopped goes on if the same command is given again; OUT appears complete or not at all. Under torchrun (-m
    -- secateur fit …) choices are measured side by side, and the first process writes what one alone would.
    """
    from secateur.checkpoints import check_new
    from secateur.search import budget_in_words, shares_in_words
    from secateur.search import fit as fit_model

    limits = budget_in_words(asked.budget) if asked.budget else None
    keep = None if asked.keep_share is None else shares_in_words(asked.keep_share)
    if (limits is None) == (asked.keep_share is None):
        raise ValueError(
            "give --budget latency=0.6, what may be spent, or --keep 0.99, what has to stay: one of the two."
        )
    check_new(asked.out)
    finals = {} if asked.finals is None else {"finals": asked.finals}
    with resumable(), warnings_as_lines(), asked.recorded():
        join_processes(None)
        done = fit_model(
            asked.directory,
            read_data(asked),
            out=asked.out,
            budget=limits,
            keep=keep,
            over=asked.over or ("shrink",),
            **asked.only("target", "runtime", "shares", "score", "seed", "store", "levels"),
            **asked.only("include", "exclude", "solver", "pattern"),
            **finals,
        )
    yield Answer(done, title=", fitted to a budget")


@command(
    "deploy", "Write what a runtime loads, within so many milliseconds there.", "model",
    *TEXT, "out", "budget", "runtime", "score", "include", "exclude", "shares", "finals", "steps", "store", "threads",
    verb="search/deploying.py:deploy", required=("data", "out", "budget"),
)  # fmt: skip
def deploy(asked: Asked) -> Iterator[Any]:
    """Write what ONNX Runtime, OpenVINO or llama.cpp loads, within so many milliseconds there, with the least loss.

    The dense model is exported, in float32, int8 and, of onnxruntime:int4, onnxruntime:mixed and llamacpp:int4, int4;
    where these take longer than the budget it is pruned as fit does it, timed in the runtime, trained for --steps, and
    exported, too. With onnxruntime:mixed the bits of each group are chosen with what leaves of it.
    All of them are timed and judged in the runtime, on the text's first sequence and on a quarter that is held back,
    and what loses least within the budget is in OUT, with the tokenizer. A run that was stopped goes on if the same
    command is given again, also with another budget; OUT appears complete or not at all. Modules are looked for in this
    directory first, and importing one runs its code: name only what you trust.
    """
    from secateur.checkpoints import check_new
    from secateur.cli.measuring import model_of, with_threads
    from secateur.search import budget_in_words
    from secateur.search import deploy as deploy_model

    one_process("deploy")
    check_new(asked.out)
    finals = {} if asked.finals is None else {"finals": asked.finals}
    with resumable(), warnings_as_lines(), asked.recorded(), with_threads(asked.threads):
        model = None if Path(asked.model).is_dir() else model_of(asked.model)[0].eval()
        done = deploy_model(
            asked.model if model is None else model,
            read_data(asked, model),
            budget=budget_in_words(asked.budget),
            **asked.only("out", "runtime", "score", "include", "exclude", "shares", "steps", "seed", "store"),
            **finals,
        )
    yield Answer(done, title=", deployed")
