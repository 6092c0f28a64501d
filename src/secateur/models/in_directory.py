"""What `oneshot` does with a model in memory, and with a directory; how gates choose its masks; how it shares the
sparsity out.

Law: of a model in memory what can be refused is refused before any weight changes; if a block fails, those before it
stay pruned, and the error names them. Of a directory the source is not changed; a run that was killed goes on where it
was, to the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.allocation import uniform
from secateur.checkpoints import (
    CheckpointError,
    Run,
    check_new,
    check_places,
    open_checkpoint,
    previous_record,
    request_of,
    unfinished_copy,
)
from secateur.models.blocks import WHOLE, block_of, choose_targets, full_name
from secateur.models.distance import NUMBERS, DenseOutputs
from secateur.models.files import BlockFiles, Written, loaded_model
from secateur.models.hosts import Host, InFiles, InMemory
from secateur.models.jobs import Pruned, Solved
from secateur.models.observation import observe
from secateur.models.products import WeightView
from secateur.models.replay import Replay, Weights
from secateur.models.result import OneShot, PrunedBlock, PrunedTensor, Tally, write_record
from secateur.models.solving import (
    Competing,
    LearntMasks,
    MatrixJob,
    OneShotRequest,
    best_gates,
    complete,
    digest,
    held_back,
    held_batches,
    holding,
    in_turn,
    learnt,
)
from secateur.models.walk import check_pruned, never_run, walk
from secateur.selection import LazyScores
from secateur.support import (
    Between,
    LazyTensors,
    Undo,
    everywhere,
    on_rank_zero,
    printable,
    refuse_inference,
    refuse_unloaded,
    track,
)
from secateur.targets import stored_inputs_first

_Share = Annotated[float, Between(0, 1)]


def prune_in_memory(model: nn.Module, batches: Iterable[Any], request: OneShotRequest) -> OneShot:
    """`oneshot` of a module, in place; an exception says which of its blocks are pruned already."""
    started = time.monotonic()
    host = InMemory(model, batches, forward=request.forward, activations=request.activations)
    _refuse_unready(host.model)
    tally = Tally()
    try:
        _prune(host, request, tally)
    except BaseException as error:
        if tally.layers:
            names = list(dict.fromkeys(layer.block for layer in tally.layers))
            error.add_note(f"Pruned already, and left so: {names[0]} to {names[-1]} ({len(names)} blocks).")
        raise
    return tally.outcome(time.monotonic() - started)


def _refuse_unready(model: nn.Module) -> None:
    refuse_unloaded(model)
    for name, _ in model.named_parameters():
        if name.endswith("_orig"):
            raise ValueError(
                f"{name}: a mask is attached, and what the model multiplies with is no parameter; make it permanent "
                "with prune.remove, or take it off with detach."
            )


def prune_directory(
    source: Path, out: Path, batches: Iterable[Any], request: OneShotRequest, device: torch.device | str | None = None
) -> OneShot:
    """`oneshot` of a directory into another one, beside which it is made."""
    started = time.monotonic()
    check_new(out)
    check_places(source, out)
    checkpoint = open_checkpoint(source)
    previous = previous_record(source)
    every, held = held_batches(batches)
    host = InFiles(
        checkpoint,
        unfinished_copy(out),
        held,
        forward=request.forward,
        activations=request.activations,
        device=device,
    )
    host.check()
    choose_targets(host.model, host.blocks, request.include, request.exclude)
    said = request_of("oneshot", request, data=digest(every))
    with host.begun(out, said) as run:
        tally = Tally()
        blocks = _prune(host, request, tally, run)
        done = tally.outcome(time.monotonic() - started, out)

        def publish() -> None:
            write_record(run, blocks, done, request, said, host.files, previous)
            run.publish()

        on_rank_zero(publish)
    return done


def _prune(host: Host, request: OneShotRequest, tally: Tally, run: Run | None = None) -> list[PrunedBlock]:
    """Prunes the blocks of a model, and adds each to the tally; those that an earlier run pruned are only run. What the
    journal says of each."""
    targets, left_alone = choose_targets(host.model, host.blocks, request.include, request.exclude)
    tally.leave_alone(left_alone)
    blocks = [] if run is None else _done_before(run, host.blocks, targets)
    already = [block.name for block in blocks]
    for block in blocks:
        tally.add(block)

    def note(pruned: Pruned, new: Mapping[str, Solved], written: Mapping[str, Written]) -> PrunedBlock:
        assert isinstance(host, InFiles)  # of a model in memory there is no journal
        blocks.append(_noted(host.files, pruned, new, written))
        return blocks[-1]

    def share() -> dict[str, float | None]:
        with host.replaying() as replay:
            return share_out(request, targets, replay)

    def other(found: Mapping[str, Any]) -> str | None:
        return None if found.keys() == targets.keys() else "is of other weights than those to prune"

    sparsities = share() if run is None else run.stage("sparsities", dict[str, _Share | None], share, other)
    job = request.job(sparsities)
    if request.choose is not None:
        tally.gates, masks = _by_gates(host, job, run)
        job = replace(job, masks=masks)
    with host.replaying(dense=bool(request.aim)) as replay:
        for pruned in walk(replay, job, host.written_by(run, note), already=already, form=host.form(job, run)):
            tally.add(pruned)
        tally.leave_alone(never_run(replay, job))
        if not already:
            check_pruned(tally.layers, tally.left_alone, replay, job)
    return blocks


def _noted(files: BlockFiles, pruned: Pruned, new: Mapping[str, Solved], written: Mapping[str, Written]) -> PrunedBlock:
    """What the journal says of a block that `oneshot` pruned."""
    masks = files.taken_apart(pruned.block, {name: solved.mask for name, solved in new.items()}) if written else {}
    tensors = {
        name: PrunedTensor(
            (found.numel - found.nonzero) / found.numel,
            found.numel - int(masks[name].count_nonzero()),
            found.kept_as_they_were,
        )
        for name, found in written.items()
    }
    return PrunedBlock(pruned.block, pruned.layers, pruned.left_alone, tensors)


def _done_before(run: Run, blocks: Mapping[str, nn.Module], targets: Mapping[str, nn.Parameter]) -> list[PrunedBlock]:
    """The blocks that an earlier run pruned."""
    done = run.done(PrunedBlock, blocks)
    for at, block in enumerate(done):
        for number, layer in enumerate(block.layers):
            if layer.name not in targets or layer.block != block.name:
                raise run.wrong(
                    f"blocks[{at}].layers[{number}].name",
                    f"is {printable(layer.name)}, which is no weight to prune in {block.name}",
                )
    return done


# ---- How gates choose the masks: a walk says where they begin, they learn, and a walk says what is left on them.
#
# Law: all of it is done on a model in memory, which is as it was afterwards; of a directory the masks are on the disk
# before the journal says so.


class _Packed(LazyTensors):
    """Masks of eight entries a byte, each unpacked where it is asked for."""

    def __init__(self, packed: Mapping[str, npt.NDArray[np.uint8]], shapes: Mapping[str, torch.Size]) -> None:
        self.packed, self.shapes = packed, shapes

    @property
    def known(self) -> Collection[str]:
        return self.packed.keys()

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        bits = np.unpackbits(self.packed[name], count=shape.numel())
        return torch.from_numpy(bits.view(np.bool_)).reshape(shape)


@dataclass(frozen=True)
class _InState:
    """What a run's journal says of masks that learnt, which are in its state; "" of none."""

    gates: LearntMasks | None
    sha256: str


def _by_gates(host: Host, job: MatrixJob, run: Run | None) -> tuple[LearntMasks | None, Mapping[str, Tensor]]:
    """What gates came to, and the masks that they chose; none where those of the walk are as good."""
    shapes = {name: host.model.get_parameter(name).shape for name in job.targets}
    if run is None:
        gates, packed = _learn(host, job)
        return gates, _Packed(packed, shapes)
    from safetensors.numpy import load_file, save_file

    def learn() -> _InState:
        gates, packed = _learn(host, job)
        if not packed:
            return _InState(gates, "")
        run.keep_state(lambda path: save_file(packed, path))
        return _InState(gates, _sha256(run.state))

    def read() -> dict[str, npt.NDArray[np.uint8]]:
        if not run.state.exists() or _sha256(run.state) != noted.sha256:
            raise CheckpointError(f"{run.state}: is not what was written there.{run.hint}")
        found: dict[str, npt.NDArray[np.uint8]] = load_file(run.state)
        return found

    noted = run.stage("gates", _InState, learn)
    return noted.gates, _Packed(everywhere(read) if noted.sha256 else {}, shapes)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _learn(host: Host, job: MatrixJob) -> tuple[LearntMasks | None, dict[str, npt.NDArray[np.uint8]]]:
    here, every = _in_memory(host), in_turn(host.batches)
    refuse_inference(here.model)
    dense: list[DenseOutputs] = []  # of the first process
    on_rank_zero(lambda: dense.append(DenseOutputs(here.model, every, here.forward, numbers=NUMBERS)))
    matrices: dict[str, Competing] = {}
    job = replace(job, on_layer=None)  # each is told once
    begins = replace(job, solver=holding(job.solver), on_matrices=matrices.__setitem__)
    start, before = _tried(here, begins, dense)
    if not start:  # the walk will say why
        return None, {}

    def learn() -> tuple[Any, dict[str, npt.NDArray[np.uint8]]]:
        blocks = [] if WHOLE in here.blocks else [*here.blocks.values()]
        found, masks = learnt(dense[0], start, best_gates(start, matrices), blocks)
        return found, {name: np.packbits(mask.reshape(-1).numpy(force=True)) for name, mask in masks.items()}

    found, packed = on_rank_zero(learn)
    after = None
    if found.after < found.before:
        shapes = {name: mask.shape for name, mask in start.items()}
        after = _tried(here, replace(job, masks=_Packed(packed, shapes)), dense)[1]
    gates = LearntMasks(found.steps, found.before, found.after, found.losses, solved_before=before, solved_after=after)
    return gates, packed if gates.taken else {}


def _in_memory(host: Host) -> InMemory:
    """The same model with all of its weights in memory."""
    if isinstance(host, InMemory):
        return host
    assert isinstance(host, InFiles)
    model = loaded_model(host.source.root, host.device)
    blocks = {name: model.get_submodule(name) for name in host.blocks}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what there is to say of few batches was said
        return InMemory(model, in_turn(host.batches), forward=host.forward, activations=host.activations, blocks=blocks)


def _tried(host: InMemory, job: MatrixJob, dense: list[DenseOutputs]) -> tuple[dict[str, Tensor], float]:
    """The masks of a walk, and how far the outputs are from the dense ones then, on the batches that are held back;
    the weights are as they were."""
    masks: dict[str, Tensor] = {}

    def commit(pruned: Pruned, new: Mapping[str, Solved]) -> None:
        masks.update({full_name(pruned.block, name): solved.mask for name, solved in new.items()})
        host.put(pruned.block, {name: solved.values for name, solved in new.items()})

    with Undo() as undo:
        undo.values(*(host.model.get_parameter(name) for name in job.targets))
        with host.replaying(dense=job.beside_dense) as replay:
            for _ in walk(replay, job, commit, form=host.form(job, None)):
                pass
        lost = on_rank_zero(lambda: dense[0](held_back(dense[0])))
        undo.roll_back()
    return masks, lost


# ---- How a walk shares the sparsity out: an allocation from the dense model's scores.
#
# Law: `uniform` looks at nothing; any other allocation sees Wanda's scores of the dense model on the same batches,
# and the model and the replay are afterwards as they were. The dense model runs only for an allocation that reads a
# score.

Norms = Mapping[str, Mapping[WeightView, Tensor]]


def share_out(request: OneShotRequest, targets: Mapping[str, nn.Parameter], replay: Replay) -> dict[str, float | None]:
    """The sparsity of each weight. `uniform`: the same; else the counts that an allocation gives for Wanda's scores."""
    sparsity, pattern = request.sparsity, request.pattern
    if request.allocate is uniform:
        return dict.fromkeys(targets, sparsity)
    if pattern.density is not None or sparsity is None:
        raise ValueError(f"{pattern} keeps the same share of every weight; leave allocate out.")
    turned = set(stored_inputs_first(replay.model, targets))
    shapes = {
        name: p.shape
        if WHOLE in replay.blocks
        else torch.Size(_rows_shape(tuple(p.shape), inputs_first=name in turned))
        for name, p in targets.items()
    }
    try:
        counts = request.allocate(_unread(_ShapesOnly(shapes)), sparsity, pattern)
    except _ReadError:
        norms = measure_norms(replay, targets)
        with contextlib.closing(DenseScores(shapes, norms, replay.blocks, replay.weights)) as scores:
            counts = request.allocate(_unread(scores), sparsity, pattern)
    shares: dict[str, float | None] = {}
    for name, shape in shapes.items():
        if name not in counts:
            raise ValueError(f"the allocation gave no count for {name}; return {{name: units kept in each group}}.")
        groups, units = pattern.pool(torch.empty(shape, device="meta")).shape
        count = counts[name]
        kept = count * groups if isinstance(count, int) else int(count.sum())
        shares[name] = 1 - kept / (groups * units) if groups * units else sparsity
    return shares


def measure_norms(replay: Replay, targets: Mapping[str, Any]) -> Norms:
    """Runs the batches through the whole dense model: the norms of each target's inputs. The replay is as new then."""
    norms: dict[str, dict[WeightView, Tensor]] = {}
    for _ in track(range(len(replay.blocks)), "looking at the dense blocks"):
        name = replay.find_next()
        if name is None:
            break
        replay.weights.load(name, finished=False)
        wanted = {local: p for local, p in replay.blocks[name].named_parameters() if full_name(name, local) in targets}
        for piece, met in observe(replay, name, wanted, ["input_norm"]).items():
            if met.tokens:
                norms.setdefault(full_name(name, piece.name), {})[piece] = met.evidence(["input_norm"])["input_norm"]
        if name == WHOLE:
            break
        replay.store(name)
        replay.weights.unload(name)
    replay.restart(keep_all=False)
    return norms


class DenseScores(Mapping[str, Tensor]):
    """Wanda's scores (arXiv:2306.11695) of the dense model, ``|w| · ‖x‖``, (outputs, inputs), from the norms of inputs.

    Scores are made on access, from weights of which one block is loaded at a time; `close` unloads the last.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], norms: Norms, blocks: Mapping[str, nn.Module], weights: Weights
    ) -> None:
        self.shapes, self.norms, self.blocks, self.weights = shapes, norms, blocks, weights
        self._loaded: str | None = None

    def __getitem__(self, name: str) -> Tensor:
        block = block_of(name, self.blocks)
        assert block is not None
        if self._loaded != block:
            self.close()
            self.weights.load(block, finished=False)
            self._loaded = block
        parameter = self.blocks[block].get_parameter(name[len(block) + 1 :] if block else name)
        norms = self.norms.get(name, {})
        pieces = complete(sorted(norms), parameter)
        if not pieces:
            return parameter.detach().abs().float().reshape(self.shapes[name])
        nothing = torch.zeros(1, device=parameter.device, dtype=torch.float32)
        rows = [piece.of(parameter).abs().float() * norms.get(piece, nothing) for piece in pieces]
        return torch.cat(rows).reshape(self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def close(self) -> None:
        if self._loaded is not None:
            self.weights.unload(self._loaded)
            self._loaded = None


class _ReadError(BaseException):
    """An allocation asks for a score; no `Exception`, so that none takes it for its own."""


class _ShapesOnly(Mapping[str, Tensor]):
    """Scores of which only the shapes are known so far."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = shapes

    def __getitem__(self, name: str) -> NoReturn:
        raise _ReadError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _unread(scores: Mapping[str, Tensor]) -> LazyScores:
    return LazyScores(scores, lambda weight: weight)  # the scores themselves are what is read


def _rows_shape(shape: tuple[int, ...], *, inputs_first: bool) -> tuple[int, ...]:
    if len(shape) == 3:
        return (shape[0] * shape[1], shape[2])
    return shape[::-1] if inputs_first else shape
