"""What the ``secateur.json`` of a directory of fewer units, blocks or experts claims of which part each tensor is.

Law: each tensor is what ``plan.json``, ``blocks.json`` or ``experts.json`` leaves of the source's, but for those that
the record says have new values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn

from secateur.checkpoints import (
    RECORD,
    Beside,
    Checkpoint,
    CheckpointError,
    Cuts,
    Part,
    Structure,
    UnknownModelError,
    Write,
    meta_model_of,
    open_checkpoint,
)
from secateur.models import Stored, find_blocks, groups_of
from secateur.shrinking.directory import origins_in, write_scaled
from secateur.shrinking.files import read_plans
from secateur.shrinking.kinds.blocks_directory import BLOCKS
from secateur.shrinking.kinds.blocks_directory import FORMAT as BLOCKS_FORMAT
from secateur.shrinking.kinds.experts_directory import EXPERTS
from secateur.shrinking.kinds.experts_directory import FORMAT as EXPERTS_FORMAT
from secateur.shrinking.plan import Factors, Plan, factors_of, fits
from secateur.support import Fields, printable, tensors_of

PLAN = "plan.json"


def structure_of(directory: Path, read: Fields) -> Structure:
    """What the record of `shrink` claims."""
    checkpoint, problems, unchecked = open_checkpoint(directory), list[str](), list[str]()
    if is_plan := "groups" in read.values:
        file, moved, plan = PLAN, _repaired(read), _plan(directory / PLAN)
    elif "blocks" in read.values:
        file, moved = BLOCKS, {*read.inner("calibration").each_named("patched", float)}
        origins = origins_in(directory / BLOCKS, BLOCKS_FORMAT, "which blocks stayed")
    else:
        file, moved = EXPERTS, {*read.each("repaired", str)}
        origins = origins_in(directory / EXPERTS, EXPERTS_FORMAT, "which experts stayed")
        problems += _about_experts(read)
    try:
        model = meta_model_of(checkpoint)
        if is_plan:
            Stored(model, checkpoint, plan.tensors if plan.outputs else None)
        else:
            problems += _lacking(model, checkpoint)
    except UnknownModelError:
        unchecked.append("no model can be built of config.json here: whether the files hold it")
    except CheckpointError as error:
        problems.append(str(error))

    def beside(source: Path) -> Beside:
        dense = open_checkpoint(source)
        if is_plan:
            return _planned(dense, plan)
        made_of, gone = origins
        return Beside(dense, {name: Part(old, cuts) for name, (old, cuts) in made_of.items()}, gone)

    return Structure(checkpoint, beside, file, frozenset(moved), problems, unchecked)


def _lacking(model: nn.Module, checkpoint: Checkpoint) -> list[str]:
    """The first parameter of a block that no file holds: ``from_pretrained`` would draw it at random."""
    blocks: Mapping[str, nn.Module] = {}
    with contextlib.suppress(ValueError):  # there is no stack: one block may be left
        blocks = find_blocks(model)
    mine = dict(model.named_parameters(remove_duplicate=False))
    held = {id(mine[name]) for group in groups_of(model, checkpoint) for name in group.targets if name in mine}
    inside = (f"{path}.{name}" for path, block in blocks.items() for name, _ in block.named_parameters())
    lost = next((name for name in inside if id(mine[name]) not in held), None)
    return [] if lost is None else [f"{lost} of the model that config.json describes is in no file."]


def _plan(path: Path) -> Plan:
    try:
        (plan,) = read_plans(path)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: is not the one plan of a shrunken directory ({error}).") from error
    return plan


def _planned(dense: Checkpoint, plan: Plan) -> Beside:
    names, shapes = {name: name for name in dense}, {name: entry.shape for name, entry in dense.entries.items()}
    stored: Stored | None = None
    with contextlib.suppress(UnknownModelError):  # a class of somebody's own: names in the files are those of the plan
        model = meta_model_of(dense)
        stored = Stored(model, dense, plan.tensors if plan.outputs else None)
        names |= stored.names
        shapes = {name: tuple(each.shape) for name, each in tensors_of(model).items()}
    kept, problems = dict[str, Cuts](), list[str]()
    for name, (shape, cuts) in plan.tensors.items():
        if name not in shapes:
            continue
        if tuple(shape) == shapes[name] and all(at < len(shape) and fits(each, shape[at]) for at, each in cuts.items()):
            kept[name] = cuts
        else:
            problems.append(f"{printable(name)}: {PLAN} does not fit the source's shape {shapes[name]}.")
    left, scales = kept, factors_of(plan)
    try:
        left = kept if stored is None else stored.cuts(kept)
    except CheckpointError as error:
        problems.append(str(error))
    parts = {name: Part(name, left.get(name, {})) for name in names}
    parts |= {
        name: Part(name, left.get(name, {}), _scaled(scales[its])) for name, its in names.items() if its in scales
    }
    return Beside(dense, parts, problems=problems)


def _scaled(factors: Factors) -> Write:
    return lambda written, checkpoint, entry, cuts: write_scaled(written, checkpoint, entry, cuts, factors)


def _repaired(read: Fields) -> set[str]:
    calibration = read.inner("calibration") if "calibration" in read.values else read
    if not calibration.optional("repair", bool):
        return set()
    keys = ("biases", "normalizations", "rotated")
    moved = [calibration.each(key, str) for key in keys if key in calibration.values]
    return {*calibration.each_named("errors", float), *(name for names in moved for name in names)}


def _about_experts(read: Fields) -> Iterator[str]:
    kept = read.inner("kept")
    for name, change in read.inners_named("experts"):
        left, stays = change.take("to", int, least=1), {*kept.each(name, int, least=0)}
        if len(stays) != left:
            yield f"{RECORD}: {printable(name)} keeps {len(stays)} experts, and says {left}."
