"""The walk over a model's blocks: sum what meets each weight, solve, write, run on with the new weights.

Law: a block is pruned by what reaches it from the pruned blocks before it, and of its stages each by what the solved
ones before it give; its weights change only when all of them are solved. Where the dense model is run beside the pruned
one, that has at each point what it would have by itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn

from secateur.models.blocks import WHOLE, block_of, full_name
from secateur.models.bounds import Form, form_of
from secateur.models.jobs import Job, Pruned, Solved, solved
from secateur.models.observation import observe, stages_of
from secateur.models.recall import Recall
from secateur.models.replay import LostOutputError, Replay
from secateur.models.solving import DOES_NOT_FIT, MatrixJob
from secateur.patterns import word_of
from secateur.solvers import SolverWarning
from secateur.support import track, warn
from secateur.targets import computed_weights

NEVER_RUN = "in a block that the batches never ran"
_Result = TypeVar("_Result")


Commit = Callable[[Pruned, Mapping[str, Solved]], None]


def walk(
    replay: Replay,
    job: Job,
    commit: Commit,
    *,
    already: Sequence[str] = (),
    form: Form | None = None,
) -> Iterator[Pruned]:
    """Prunes block after block in the order in which the model runs them, and gives each once its weights are written;
    those ``already`` pruned are only run. The ``form`` of sums follows from free memory where it is not given.

    Args:
        commit: writes a block's new weights down, by their names in it, and puts them in place; it is finished then.

    Raises:
        ValueError: what is to be summed takes more memory than there is.

    Warns:
        SolverWarning: some of it is summed in blocks, and the job's own result has no layers to say it of.
    """
    form = form_of(replay.model, replay.blocks, job) if form is None else form
    if form.notes and not isinstance(job, MatrixJob):
        name, note = next(iter(form.notes.items()))
        more = f" So are {len(form.notes) - 1} more." if len(form.notes) > 1 else ""
        warn(f"{name}: {note}{more}", SolverWarning)
    for name in track(already, "running finished blocks"):
        pass_through(replay, name)
    for _ in track(range(len(replay.blocks) - len(already)), "pruning blocks"):
        step = with_all_outputs(replay, functools.partial(_prune_next, replay, job, form, commit))
        if step is None:
            return
        pruned, kept = step
        yield pruned
        name = pruned.block
        if kept or len(replay.done) + 1 == len(replay.blocks):
            replay.done.append(name)  # or no block is left to run on what this one returns
        else:
            with_all_outputs(replay, functools.partial(replay.store, name))
        replay.weights.unload(name)


def run_through(
    replay: Replay,
    *,
    before: Callable[[str], None] | None = None,
    visit: Callable[[str], None] | None = None,
    finished: bool = False,
) -> Iterator[str]:
    """Runs the batches through block after block, in the order in which the model runs them, each batch once.

    Args:
        before: called with a block's name before its weights are there.
        visit: called with it when they are, before it is run: it may run batches up to the block, and change its
            weights. It may be called twice, so that it changes nothing before it has run what it runs.
        finished: the weights are the pruned ones, and are there while a block is given.
    """
    for _ in track(range(len(replay.blocks)), "running blocks"):
        name = with_all_outputs(replay, replay.find_next)
        if name is None:
            return
        if before is not None:
            before(name)
        replay.weights.load(name, finished=finished)
        try:
            if visit is not None:
                with_all_outputs(replay, functools.partial(visit, name))
            with_all_outputs(replay, functools.partial(replay.store, name))
            if finished:
                yield name
        finally:
            replay.weights.unload(name)
        if not finished:
            yield name


def never_run(replay: Replay, job: Job) -> dict[str, tuple[str, ...]]:
    """``{reason: names}`` of the weights whose blocks the walk did not reach."""
    found = tuple(full for full in job.targets if block_of(full, replay.blocks) not in replay.done)
    return {NEVER_RUN: found} if found else {}


def check_pruned(
    layers: Sequence[object], left_alone: Mapping[str, Sequence[str]], replay: Replay, job: MatrixJob
) -> None:
    """`ValueError` where a whole walk pruned nothing."""
    if layers:
        return
    if misfits := left_alone.get(DOES_NOT_FIT):
        raise ValueError(
            f"nothing was pruned: no weight fits {word_of(job.pattern)}, such as {misfits[0]} of shape "
            f"{tuple(replay.model.get_parameter(misfits[0]).shape)}; choose another pattern."
        )
    raise ValueError(
        "nothing was pruned: the batches ran none of the blocks, or no product with their weights."
        f"{convolutions_in_files(replay.model)}{computed_weights(replay.model)}"
    )


def convolutions_in_files(model: nn.Module) -> str:
    """What to do with a network of convolutions whose weights are in files; nothing of others.

    >>> convolutions_in_files(nn.Conv2d(3, 8, 3))
    ''
    """
    weights = [each.weight for each in model.modules() if isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    most = 2 * sum(each.numel() for each in weights) > sum(each.numel() for each in model.parameters())
    if not most or all(each.device.type != "meta" for each in weights):
        return ""
    return " Of a directory what convolutions multiply is not measured: load the model, and pass it in its place."


def with_all_outputs(replay: Replay, step: Callable[[], _Result]) -> _Result:
    """Runs a step of a walk; where it needs an output that was dropped, the finished blocks are run again with all
    outputs kept.

    That is found before the step writes anything, so that it can be taken twice.
    """
    try:
        return step()
    except LostOutputError:
        done = list(replay.done)
        replay.restart(keep_all=True)
        for name in done:
            pass_through(replay, name)
        return step()


def pass_through(replay: Replay, name: str) -> None:
    """Runs a finished block, with what the dense one returns beside."""
    if replay.dense is not None:
        replay.weights.load(name, finished=False)
        _store_dense(replay, name)
        replay.weights.unload(name)
    replay.weights.load(name, finished=True)
    replay.store(name)
    replay.weights.unload(name)


def _store_dense(replay: Replay, name: str) -> None:
    with replay.of_dense():
        replay.store(name)


def _prune_next(replay: Replay, job: Job, form: Form, commit: Commit) -> tuple[Pruned, bool] | None:
    """The block that the model runs next, with its new weights, and whether what it returns is stored already; None
    where there is none."""
    name = replay.find_next()
    if name is None:
        return None
    block = replay.blocks[name]
    replay.weights.load(name, finished=False)
    wanted = {local: p for local, p in block.named_parameters() if full_name(name, local) in job.targets}
    goes_on = len(replay.done) + 1 < len(replay.blocks)
    if goes_on and wanted and not (job.changes or job.in_stages or job.beside_dense):
        widths = form.within(name, wanted)
        found = observe(replay, name, wanted, job.words, around=job.around, keep=True, widths=widths)
        new, pruned = solved(job, name, block, wanted, found)
        pruned = form.noted(pruned, wanted)
        commit(pruned, new)
        return pruned, True
    goes_on = goes_on and replay.dense is not None
    kept, new, pruned = _solved(replay, job, form, name, wanted, keep_dense=goes_on)
    if goes_on and not kept:
        _store_dense(replay, name)  # as long as it has its dense weights
    commit(pruned, new)
    return pruned, False


def _solved(
    replay: Replay,
    job: Job,
    form: Form,
    name: str,
    wanted: Mapping[str, nn.Parameter],
    *,
    keep_dense: bool,
) -> tuple[bool, dict[str, Solved], Pruned]:
    """The block's new values, stage after stage, and what there is to say of them; and whether the last stage came
    by what the dense block returns, and kept it."""
    new: dict[str, Solved] = {}
    pruned = Pruned(name)
    kept = False
    if not wanted:
        return kept, new, pruned
    stages: Sequence[Mapping[str, Tensor]] = [wanted]
    repeated = False
    if job.in_stages:
        stages, repeated = stages_of(replay, name, wanted)
    recall = Recall(replay.blocks[name]) if name == WHOLE and len(stages) > 1 else None
    for at, stage in enumerate(stages):
        values = {local: each.values for local, each in new.items()} if job.in_stages else None
        differs = bool(new or replay.done)  # before anything is pruned, the two models are one
        kept = keep_dense and job.beside_dense and differs and at + 1 == len(stages)
        later = [weight for other in stages[at:] for weight in other.values()]
        with contextlib.nullcontext() if recall is None else recall.opening(later):
            found = observe(
                replay,
                name,
                stage,
                job.words,
                new=values,
                repeated=repeated,
                beside_dense=job.beside_dense and differs,
                around=job.around,
                keep_dense=kept,
                widths=form.within(name, stage),
                recall=recall,
            )
        more, said = solved(job, name, replay.blocks[name], stage, found)
        new |= more
        if recall is not None:
            own = dict(replay.blocks[name].named_parameters())
            recall.forget(own[local] for local in more)
        pruned = pruned.and_then(form.noted(said, stage))
    return kept, new, pruned
