"""Shrinks a checkpoint directory shard by shard, from a plan that is made on the meta device. Origins: from which
tensor of the source each tensor of a directory was copied, and which rows; written and read.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from secateur.checkpoints import (
    HINT,
    RECORD,
    Checkpoint,
    CheckpointError,
    Cuts,
    Origin,
    TensorEntry,
    copy_others,
    meta_model_of,
    nbytes_of_cut,
    new_directory,
    open_checkpoint,
    other_weights,
    pieces_of_cut,
    previous_record,
    record_text,
    request_of,
    shape_of_cut,
    write_bytes,
    write_sliced,
)
from secateur.coupling import Coupling, Scope, find_coupling
from secateur.kinds import Outputs
from secateur.models import InFiles, Stored, digest, example_for, find_blocks, held_batches
from secateur.shrinking.apply import Place, with_fields
from secateur.shrinking.calibrated import Calibrated, calibrated_selection
from secateur.shrinking.configuration import PROVED, Configured, Described, has_configuration
from secateur.shrinking.files import json_of_plans
from secateur.shrinking.gates import Gated
from secateur.shrinking.kinds.outputs import choose_outputs
from secateur.shrinking.plan import Factors, Indices, Plan, factors_of, multiplied
from secateur.shrinking.request import InDirectory, PruningTarget, Request, pruning_target
from secateur.shrinking.result import ShrunkDirectory, directory_content
from secateur.shrinking.select import (
    Choice,
    check_globs,
    choose,
    groups_in_scope,
    layer_signature,
    names_of,
)
from secateur.support import (
    Fields,
    Part,
    described,
    mapped,
    on_rank_zero,
    private,
)

# ---- Shrinks a checkpoint directory shard by shard, from a plan that is made on the meta device.
#
# Law: the output is what `shrink` makes of the loaded model, tensor for tensor, but no more than one tensor is ever
# in memory, or with data one block; it appears under its name complete or not at all.


@dataclass(frozen=True)
class CheckpointShrinking(ShrunkDirectory):
    """The result of `shrink` of a directory; prints as a table. Beside what `ShrunkDirectory` has:

    Attributes:
        plan: which indices stay of each tensor, under the model's names.
        frozen: ``{(name, dimension): reasons}`` of what had to stay whole.
        asked: what was asked for.
        got: the fraction of the target that leaves, the nearest to what was asked that exists.
        beside: the two that are nearest to what was asked and exist, less first; ``got`` is one of them.
        tokens: how many were measured; None without data.
        errors: ``{name in the files: error}`` of the matrices whose columns left: the squared error of the outputs as a
            share of the variance of the residual stream that they are added to, or of their own.
        biases: the tensors in the files that are biases and moved with them.
        normalizations: those that are weights and biases of normalizations over a width that lost entries, and moved.
        gates, lost: of gates, as in `Shrunk`.
        rotated: the groups that lost dimensions which were rotated before.
        in_blocks: ``{tensor in the files: note}`` of those whose Gram matrix was summed in blocks of inputs.
    """

    plan: Plan
    frozen: Mapping[tuple[str, int], str]
    asked: Request
    got: float
    beside: tuple[float, float]
    tokens: int | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    normalizations: tuple[str, ...] = ()
    gates: Mapping[str, Gated] = field(default_factory=dict, repr=False)
    lost: float | None = None
    rotated: Sequence[str] = ()
    in_blocks: Mapping[str, str] = field(default_factory=dict)

    def content(self) -> Iterable[Part]:
        return directory_content(self, full=True)

    def summary(self) -> Iterable[Part]:
        return directory_content(self, full=False)


def facts_of(
    place: InDirectory,
    checkpoint: Checkpoint,
    written: Mapping[str, Origin],
    described: Described,
    fields: Mapping[Place, Any],
    *,
    proof: str,
    started: float,
) -> dict[str, Any]:
    """The fields of `ShrunkDirectory`, but for the counts, where of a checkpoint these tensors are written."""
    entries = checkpoint.entries
    shapes = [(entries[old], shape_of_cut(entries[old], cuts)) for old, cuts in written.values()]
    return {
        "out": place.out,
        "fields": {".".join(map(str, at)): (described.value(at), value) for at, value in fields.items()},
        "parameters": (sum(each.numel for each in entries.values()), sum(math.prod(shape) for _, shape in shapes)),
        "nbytes": (checkpoint.nbytes, sum(nbytes_of_cut(entry, shape) for entry, shape in shapes)),
        "proof": proof,
        "left_out": () if place.out is None else other_weights(checkpoint),
        "seconds": time.monotonic() - started,
    }


def shrink_units_directory(place: InDirectory, asked: Request, example_inputs: Any) -> CheckpointShrinking:
    """`shrink` of a directory into another one: channels, heads and hidden units leave, or outputs of a head."""
    started = time.monotonic()
    if asked.target == "latency":
        raise ValueError(
            "target must be one of 'params', 'active_params', 'macs', 'bytes', 'kv_bytes', 'units' for a checkpoint, "
            "not 'latency'."
        )
    checkpoint = open_checkpoint(place.source)
    previous = previous_record(place.source)
    model = meta_model_of(checkpoint)
    if not has_configuration(model):
        raise ValueError(f"{type(model).__name__} has no config that could say the new sizes; load it and use shrink.")
    example_inputs = example_for(model) if example_inputs is None else example_inputs
    outputs = next((each for each in asked.leave if isinstance(each, Outputs)), None)
    if outputs is not None and place.batches is not None:
        raise ValueError(
            "outputs leave by their names or numbers: leave out batches=, and shrink what that wrote by it."
        )
    if place.batches is not None:
        every, held = held_batches(place.batches)
        walk = _to_walk(place, checkpoint, model, held)
    if outputs is None:
        dense = _dense(checkpoint, model, example_inputs, verify=asked.verify, heads=asked.rotate)
    if place.batches is None:
        if outputs is None:
            choice = choose(dense.subject, asked)
        else:
            dense, choice = _without_outputs(checkpoint, model, example_inputs, outputs, verify=asked.verify)
        cuts = dense.cuts(choice.plan)
        planned = _planned(dense, asked, choice, cuts, place, started)
        if place.out is None:
            return planned
        with new_directory(place.out) as temporary:
            digests = _write_directory(checkpoint, temporary, dense, planned, choice, cuts)
            (temporary / RECORD).write_text(_record(planned, asked, previous, sha256=digests), "utf-8")
        return replace(planned, seconds=time.monotonic() - started)
    check_globs(names_of(dense.subject.coupling), asked.globs)
    groups_in_scope(dense.subject.scope, asked)
    repair = place.repair
    if place.out is None:
        found = calibrated_selection(dense.subject, asked, walk, repair=repair)
        return _calibrated(
            _planned(dense, asked, found.choice, dense.cuts(found.choice.plan), place, started), dense, found
        )
    example = digest([example_inputs])
    with walk.begun(place.out, request_of("shrink", asked, data=digest(every), example=example, repair=repair)) as run:
        found = calibrated_selection(dense.subject, asked, walk, repair=repair, run=run)
        cuts = dense.cuts(found.choice.plan)
        planned = _calibrated(_planned(dense, asked, found.choice, cuts, place, started), dense, found)

        def publish() -> None:
            if repair:  # else columns are zeros that leave
                run.check_said({*planned.errors, *planned.biases, *planned.normalizations, *checkpoint.moved})
            calibration = {
                "data": {"sha256": run.request["data"]},
                "tokens": found.tokens,
                "repair": repair,
                "errors": planned.errors,
                "biases": list(planned.biases),
                "normalizations": list(planned.normalizations),
                "rotated": sorted(checkpoint.moved),
            }
            folder = run.remade()
            digests = _write_directory(open_checkpoint(run.folder), folder, dense, planned, found.choice, cuts)
            record = _record(planned, asked, previous, calibration=calibration, sha256=digests)
            (folder / RECORD).write_text(record, "utf-8")
            run.publish(folder)

        on_rank_zero(publish)
    return replace(planned, seconds=time.monotonic() - started)


def _to_walk(place: InDirectory, checkpoint: Checkpoint, model: nn.Module, held: Sequence[Any]) -> InFiles:
    """A walk through a directory whose model is of blocks, and runs; else an error before anything is written."""
    try:
        find_blocks(model)
    except ValueError:
        raise ValueError(
            f"{checkpoint.root}: {type(model).__name__} has no repeated blocks, and a directory is gone through block "
            "by block; load it and use shrink(model, example_inputs, ..., batches=...)."
        ) from None
    return place.walk(checkpoint, place.work, held)


@dataclass(frozen=True)
class _Dense:
    """What is to become smaller: the model, the files, and which tensor of the one is which of the other."""

    checkpoint: Checkpoint
    stored: Stored
    subject: PruningTarget
    configured: Described
    proof: str

    def cuts(self, plan: Plan) -> dict[str, Cuts]:
        """What stays of each tensor in the files that becomes smaller.

        Raises:
            CheckpointError: that cannot leave the tensors that make it up.
        """
        if joined := [name for name in factors_of(plan) if not self.stored.is_alone(name)]:
            raise CheckpointError(
                f"{self.checkpoint.root}: {joined[0]} is made of several tensors, which cannot be scaled; load the "
                "model, use shrink(..., uniform=True), and save it."
            )
        return self.stored.cuts({name: cuts for name, (_, cuts) in plan.tensors.items()})


def _dense(
    checkpoint: Checkpoint, model: nn.Module, example_inputs: Any, *, verify: bool, heads: bool = False
) -> _Dense:
    stored = Stored(model, checkpoint)
    scope = Scope.of(coupling_on_meta(model, example_inputs))
    whole = [group.name for group in scope.groups if not stored.computed.isdisjoint(name for name, _ in group.members)]
    configured = Configured(model, scope.without(whole, "transformers computes a part as it loads it"), heads=heads)
    real, proof, scope = _proof(configured, example_inputs, verify=verify)
    subject = PruningTarget(model, scope, [example_inputs], stored, stored.rows, configured, real)
    return _Dense(checkpoint, stored, subject, configured, proof)


def _without_outputs(
    checkpoint: Checkpoint, model: nn.Module, example_inputs: Any, outputs: Outputs, *, verify: bool
) -> tuple[_Dense, Choice]:
    """What stays without outputs of a head; the configuration has to say it.

    Where the model is too large to be proved on, a smaller one of its class is, and of that the same outputs leave.
    """
    described, inputs, proof = Described(model), [example_inputs], "not proved, as asked"
    proved_on = None
    if sum(each.numel() for each in model.parameters()) <= PROVED:
        model = described.build({}, "cpu")
        proved_on, proof = (model, described.proved_on({})) if verify else (None, proof)
    else:
        coupling = coupling_on_meta(model, example_inputs)  # which says what is wrong with the example
        small = Configured(model, Scope.of(coupling)).reduced(PROVED) if verify else None
        if small is not None:
            built, proof = described.build(small, "cpu"), described.proved_on(small)
            choose_outputs(built, outputs, inputs, Described(built), proved_on=built)
        elif verify:
            proof = "not proved: no model of this class was small enough"
    choice = choose_outputs(model, outputs, inputs, described, proved_on=proved_on)
    if not choice.fields:
        raise ValueError(
            f"{checkpoint.root}: no field of its configuration names these outputs, so from_pretrained could not load "
            "what is left; load the model, shrink it, and use save_shrunken."
        )
    subject = PruningTarget(model, choice.scope, inputs, {}, lambda *_: ())
    return _Dense(checkpoint, Stored(model, checkpoint, choice.plan.tensors), subject, described, proof), choice


def _planned(
    dense: _Dense, asked: Request, choice: Choice, cuts: Mapping[str, Cuts], place: InDirectory, started: float
) -> CheckpointShrinking:
    """The plan of a choice, with the resulting sizes and fields, for the files as they are."""
    kept, checkpoint = choice.kept, dense.checkpoint
    written = {name: (name, cuts.get(name, {})) for name in checkpoint}
    return CheckpointShrinking(
        plan=choice.plan,
        counts={
            group.name: (group.size, int(kept[group.name].sum()))
            for group in choice.scope.groups
            if group.name in kept and not kept[group.name].all()
        },
        frozen=dict(choice.scope.frozen),
        asked=asked,
        got=1 - choice.left,
        beside=(1 - choice.beside[0], 1 - choice.beside[1]),
        **facts_of(place, checkpoint, written, dense.configured, choice.fields, proof=dense.proof, started=started),
    )


def _calibrated(planned: CheckpointShrinking, dense: _Dense, found: Calibrated) -> CheckpointShrinking:
    errors = {file: found.errors[mine] for file, mine in dense.stored.names.items() if mine in found.errors}
    biases, norms = (
        tuple(file for file, mine in dense.stored.names.items() if mine in moved)
        for moved in (found.biases, found.normalizations)
    )
    notes = found.choice.in_blocks
    in_blocks = {file: notes[mine] for file, mine in dense.stored.names.items() if mine in notes}
    return replace(
        planned,
        tokens=found.tokens,
        errors=errors,
        biases=biases,
        normalizations=norms,
        gates={} if found.gates is None else {"units": found.gates},
        rotated=found.rotated,
        in_blocks=in_blocks,
    )


def coupling_on_meta(model: nn.Module, example_inputs: Any) -> Coupling:
    """The coupling (which slices leave together) of a model on the meta device; where its code asks for values, of one
    of zeros on the processor.

    Raises:
        ValueError: it cannot be traced so.
    """
    try:
        # pictures go where the model is; tokens stay, since a model may look at their values
        return find_coupling(
            model, mapped(example_inputs, lambda each: each.to("meta") if each.is_floating_point() else each)
        )
    except Exception as error:  # whatever the model raises
        with contextlib.suppress(Exception):
            return find_coupling(of_zeros(model), example_inputs)
        raise ValueError(
            f"{type(model).__name__} cannot be watched on the meta device ({type(error).__name__}: {error}). Give "
            "example_inputs of which it needs no values, with an attention_mask for instance, or load it and use "
            "shrink(..., uniform=True)."
        ) from error


def of_zeros(model: nn.Module) -> nn.Module:
    """The model of a configuration, whose weights are zeros: memory that nobody wrote to, which takes none."""
    made: nn.Module = Described(model).build({}, "cpu", without_weights=True).train(model.training)
    zeros: dict[int, nn.Parameter] = {}
    for own in map(private.parameters_of, made.modules()):
        for name, each in own.items():
            if each is not None:  # numpy asks for pages that are zero; torch would write to them
                pages = torch.from_numpy(np.zeros(each.numel() * each.itemsize, dtype=np.uint8))
                new = nn.Parameter(pages.view(each.dtype).reshape(each.shape), requires_grad=False)
                own[name] = zeros.setdefault(id(each), new)
    return made


# ---- the proof ------------------------------------------------------------------------------------------------------


def _proof(configured: Configured, example_inputs: Any, *, verify: bool) -> tuple[nn.Module | None, str, Scope]:
    """The model with values on which choices are proved, if it is the whole one; on which it is, in words; and the
    scope, in which is frozen what a smaller one finds."""
    scope = configured.scope
    if not verify:
        return None, "not proved, as asked", scope
    small = configured.reduced(PROVED)
    if small is None:
        return None, "not proved: no model of this class was small enough", scope
    real = configured.build(small, "cpu")
    if not small:
        return real, configured.proved_on(small), scope
    return None, configured.proved_on(small), _proved_on(real, scope, example_inputs, heads=configured.heads)


def _proved_on(small: nn.Module, scope: Scope, example_inputs: Any, *, heads: bool) -> Scope:
    """Shrinks a smaller model of the same structure; roles that are not right in it, or not in it, are frozen."""
    said = Configured(small, Scope.of(find_coupling(small, example_inputs)), heads=heads)
    subject = pruning_target(small, said.scope, [example_inputs], configured=said, proved_on=small)
    its = choose(subject, Request(sparsity=0.5, round_to=1, target="units")).scope
    roles = {group.name: layer_signature(its.coupling, group) for group in its.coupling.groups}
    whole, free = {roles[name]: why for name, why in its.reasons.items()}, {roles[group.name] for group in its.groups}
    for group in scope.groups:
        if (role := layer_signature(scope.coupling, group)) not in free:
            why = whole.get(role, "it is not free in the smaller model that the proof is made on")
            scope = scope.without([group.name], why)
    return scope


# ---- writing --------------------------------------------------------------------------------------------------------


def _write_directory(
    checkpoint: Checkpoint,
    target: Path,
    dense: _Dense,
    planned: CheckpointShrinking,
    choice: Choice,
    cuts: Mapping[str, Cuts],
) -> dict[str, str]:
    """The smaller model, of the files of a checkpoint: the dense one, or a copy of it whose weights are repaired; the
    SHA-256 of the bytes of each tensor that was written."""
    scales = factors_of(choice.plan)
    factors = {file: scales[mine] for file, mine in dense.stored.names.items() if mine in scales}
    copy_others(checkpoint, target, planned.left_out)
    digests = write_sliced(
        checkpoint,
        target,
        {name: (name, cuts.get(name, {})) for name in checkpoint},
        lambda file, of, entry, its: write_scaled(file, of, entry, its, factors.get(entry.name, [])),
        nbytes=planned.nbytes[1],
        parameters=planned.parameters[1],
    )
    (target / "config.json").write_text(config_text(checkpoint, dense.configured, choice.fields), "utf-8")
    (target / "plan.json").write_text(json_of_plans([choice.plan]), "utf-8")
    return digests


def write_scaled(written: BinaryIO, checkpoint: Checkpoint, entry: TensorEntry, cuts: Cuts, factors: Factors) -> None:
    """What stays of one tensor, scaled, read and written piece by piece."""
    done = 0
    for piece in pieces_of_cut(checkpoint, entry, cuts, as_rows=bool(factors)):
        rows = slice(done, done + len(piece))
        done = rows.stop
        scaled = [(at, each[rows] if at == 0 else each) for at, each in factors]
        write_bytes(written, multiplied(piece, scaled))


def config_text(checkpoint: Checkpoint, configured: Described, fields: Mapping[Place, Any]) -> str:
    """The file as it was with the fields changed; where that would not say it, all that the configuration holds."""
    wanted = configured.configuration(fields)
    with contextlib.suppress(Exception):  # a part that the file leaves out, or what the configuration raises
        values = with_fields(checkpoint.config, fields)
        if _public(type(wanted).from_dict(with_fields(values, {}))) == _public(wanted):
            return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    return json.dumps(_public(wanted), indent=2, ensure_ascii=False) + "\n"


def _public(config: Any) -> dict[str, Any]:
    """What a configuration says, without where it was read from."""
    return {key: value for key, value in config.to_dict().items() if not key.startswith("_")}


def _record(
    done: CheckpointShrinking,
    asked: Request,
    previous: Mapping[str, Any] | None,
    **more: Any,
) -> str:
    found = {
        "config": {name: {"from": before, "to": after} for name, (before, after) in done.fields.items()},
        "groups": {name: {"from": before, "to": after} for name, (before, after) in done.counts.items()},
        "parameters": {"from": done.parameters[0], "to": done.parameters[1]},
        "proof": done.proof,
        "criterion": described(asked.criterion),
        "choose": asked.choose,
        "allocate": None if asked.allocate is None else described(asked.allocate),
    }
    return record_text("shrink", {**found, **more}, previous=previous)


# Origins: from which tensor of the source each tensor of a directory was copied, and which rows; written and read.
#
# Law: tensors have the source's bytes; the record names every tensor that has another name or fewer entries, and
# those of the source that left.


def origins_text(checkpoint: Checkpoint, written: Mapping[str, Origin], kind: str) -> str:
    """As JSON, a file of this kind."""
    changed = {
        name: {"from": old, "kept": {str(at): each.tolist() for at, each in cuts.items()}}
        for name, (old, cuts) in written.items()
        if name != old or cuts
    }
    gone = sorted({*checkpoint} - {old for old, _ in written.values()})
    return json.dumps({"format": kind, "version": 1, "tensors": changed, "gone": gone})


def origins_in(path: Path, kind: str, what: str) -> tuple[Mapping[str, Origin], set[str]]:
    """The origin of each tensor that was renamed or sliced, and the source's tensors that left."""
    try:
        read = Fields.read(path, error=CheckpointError, hint=HINT).of_format(kind, 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; it says {what}.") from None
    found: dict[str, Origin] = {}
    for name, its in read.inners_named("tensors"):
        kept: dict[int, tuple[int, ...]] = its.value("kept", Indices)
        found[name] = (its.take("from", str), {at: np.array(each, dtype=np.int64) for at, each in kept.items()})
    return found, set(read.each("gone", str))
