"""What the ``secateur.json`` of a shrunken directory claims, seen again on the stored bytes.

Law: every tensor is what the plan leaves of the source's, byte for byte, but for those that the record says were
repaired: of these the shape is, they hold numbers, and like all others they have the bytes that were written. That
these are the best values is nothing that bytes could show, and is said to be unchecked. The same where another verb
pruned it later: of the tensors with zeros their shape is, and the zeros are counted.
"""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from torch import nn

from secateur.checkpoints import (
    OTHER_WEIGHTS,
    RECORD,
    Checkpoint,
    CheckpointError,
    Compared,
    Cuts,
    TensorEntry,
    Verification,
    VerifiedTensor,
    about_config,
    about_parameters,
    claims_of,
    files_below,
    meta_model_of,
    open_checkpoint,
    previous_record,
    rows_of,
    sha256_of,
    shape_of_cut,
    verify_checkpoint,
)
from secateur.shrinking.directory import tensor_names, write_cut
from secateur.shrinking.files import read_plans
from secateur.shrinking.origins import about_origins, origins_in, unnamed
from secateur.shrinking.plan import Factors, Plan, factors_of, fits
from secateur.shrinking.scores import rows_at_once
from secateur.support import Fields, printable, track

__all__ = [
    "about_bytes",
    "about_files",
    "digests_in",
    "is_shrunken",
    "verify_origins",
    "verify_pruned_later",
    "verify_shrunken_checkpoint",
    "was_pruned_later",
]

PLAN = "plan.json"
_ALONE = "no source was given"


def is_shrunken(directory: Path | str) -> bool:
    """Whether there is a record that `shrink_checkpoint` wrote; any other is for `verify_checkpoint`."""
    if not (Path(directory) / RECORD).is_file():
        return False
    return _is_of_shrink(claims_of(Path(directory)).values)


def _is_of_shrink(values: Mapping[str, Any]) -> bool:
    return "groups" in values and "pruned" not in values


def was_pruned_later(directory: Path | str, source: Path | str | None) -> bool:
    """Whether zeros were made in what `shrink_checkpoint` wrote, and the source is not that, but what lies before it:
    then it is for `verify_pruned_later`."""
    directory = Path(directory)
    if source is None or not (directory / RECORD).is_file():
        return False
    values = claims_of(directory).values
    before = values.get("previous")
    if "pruned" not in values or not isinstance(before, dict) or not _is_of_shrink(before):
        return False
    return previous_record(Path(source)) != before


def verify_pruned_later(directory: Path | str, source: Path | str) -> Verification:
    """Whether a directory is what both its records say: zeros, in what a plan left of the source.

    Zeros and their pattern are counted as by `verify_checkpoint`. Each tensor has the dtype and the shape that the plan
    leaves of the source's. One that was not pruned has the SHA-256 that shrinking wrote, and, if that did not repair
    it, is what the plan leaves, byte for byte. The configuration, the number of parameters and other files are held to
    the record of shrinking and to the source.

    Args:
        directory: what `shrink_checkpoint` wrote and another verb pruned, as `fit` does with both.
        source: what was shrunk.

    Raises:
        CheckpointError: a damaged or missing directory, record or plan; or the source is not what was shrunk, as the
            records say.
    """
    directory = Path(directory)
    counted = verify_checkpoint(directory)
    checkpoint, claims = open_checkpoint(directory), claims_of(directory)
    read, pruned = claims.inner("previous"), {*claims.each_named("pruned", float)}
    if previous_record(Path(source)) != read.values.get("previous"):
        raise CheckpointError(
            f"{directory}: was shrunk, and then pruned, and {source} is neither what was shrunk nor what was pruned: "
            f"their {RECORD} say otherwise. Name one of these two."
        )
    dense, plan, repaired = open_checkpoint(source), _plan(directory / PLAN), _repaired(read)
    problems, unchecked = [*counted.problems], [each for each in counted.unchecked if not each.startswith(_ALONE)]
    problems += _about_sizes(checkpoint, read, unchecked)
    stored = {
        name: problem
        for name, problem in about_bytes(checkpoint, digests_in(read), repaired - pruned)
        if name not in pruned or name not in checkpoint
    }
    same: dict[str, bool | None] = {}
    for tensor, problem in _about_tensors(checkpoint, dense, plan, repaired | pruned):
        problems += [problem] if problem else []
        if tensor is not None:
            same[tensor.name] = tensor.unchanged
            if problem:
                stored.pop(tensor.name, None)  # it is told already
    files, others = about_files(checkpoint, dense, {Path(RECORD), Path(PLAN), Path("config.json")})
    if moved := (repaired | pruned) & {*checkpoint}:
        unchecked.append(f"{len(moved)} tensors were repaired or pruned: whether what they keep are the best values")
    tensors = tuple(replace(each, unchanged=same.get(each.name)) for each in counted.tensors)
    found = (*problems, *stored.values(), *others)
    return Verification(directory, dense.root, counted.pattern, tensors, files, found, tuple(unchecked))


def verify_shrunken_checkpoint(directory: Path | str, source: Path | str | None = None) -> Verification:
    """Whether a directory is what its ``secateur.json`` and ``plan.json`` say; compares with ``source`` where given.

    The files hold the tensors of the model that ``config.json`` describes, as many parameters as the record says, and
    the configuration has the values that it says. With the source: each tensor is the slice of the source's that the
    plan leaves, byte for byte, but for those that were repaired with data, which are counted; and other files are the
    source's. With or without it each tensor has the SHA-256 that the record says, and the repaired ones hold no NaN.

    Args:
        directory: what `shrink_checkpoint` wrote.
        source: what it was made from, if it is there still.

    Raises:
        CheckpointError: a damaged or missing directory, record or plan. What does not hold is no error, but one of the
            result's ``problems``.
    """
    directory = Path(directory)
    checkpoint, read = open_checkpoint(directory), claims_of(directory)
    plan, unchecked, repaired = _plan(directory / PLAN), list[str](), _repaired(read)
    beside = _Beside(
        PLAN, "what the plan leaves of its", lambda dense: _about_tensors(checkpoint, dense, plan, repaired)
    )
    problems = list(_about_sizes(checkpoint, read, unchecked))
    return _seen_again(checkpoint, read, source, beside, ("repaired", repaired), problems, unchecked)


def _repaired(read: Fields) -> set[str]:
    if "calibration" not in read.values:
        return set()
    calibration = read.inner("calibration")
    if not calibration.take("repair", bool):
        return set()
    moved = [calibration.each(key, str) for key in ("biases", "normalizations") if key in calibration.values]
    return {*calibration.each_named("errors", float), *(name for names in moved for name in names)}


def verify_origins(
    checkpoint: Checkpoint,
    read: Fields,
    source: Path | str | None,
    origins: tuple[str, str, str],
    moved: tuple[str, Collection[str]],
    problems: Iterable[str],
) -> Verification:
    """Whether each tensor is the source's that a file names, or rows of it, but for those that data moved.

    Args:
        checkpoint: what was written.
        read: its record.
        source: what it was made from, if it is there still.
        origins: the file that says which tensor is which, its format, and what it says.
        moved: what became of some, such as "repaired", and of which.
        problems: what is wrong beside.
    """
    file, kind, what = origins
    made_of, gone = origins_in(checkpoint.root / file, kind, what)
    beside = _Beside(
        file,
        "the source's",
        lambda dense: about_origins(checkpoint, dense, made_of, file, moved[1]),
        lambda dense: unnamed(checkpoint, dense, made_of, gone, file),
    )
    return _seen_again(checkpoint, read, source, beside, moved, problems)


@dataclass(frozen=True)
class _Beside:
    """How a directory is compared with its source: the file that says what each tensor is, what that is in words, and
    what is found of tensors and of what the file does not name."""

    file: str
    expected: str
    tensors: Callable[[Checkpoint], Iterable[tuple[VerifiedTensor | None, str | None]]]
    unnamed: Callable[[Checkpoint], Iterable[str]] = lambda _: ()


def _seen_again(
    checkpoint: Checkpoint,
    read: Fields,
    source: Path | str | None,
    beside: _Beside,
    moved: tuple[str, Collection[str]],
    problems: Iterable[str],
    unchecked: Iterable[str] = (),
) -> Verification:
    word, names = moved
    found, left = [*problems], [*unchecked]
    found += [
        f"{printable(name)}: was {word}, {RECORD} says; it is not here." for name in sorted({*names} - {*checkpoint})
    ]
    written = digests_in(read)
    stored = dict(about_bytes(checkpoint, written, names))
    if names:
        unknown = "whether these are the best values" if written else "what they hold"
        left.append(f"{len(names)} tensors were {word} with data: {unknown}")
    if source is None:
        found += stored.values()
        unknown = f"whether the tensors are {beside.expected}" if written else "what the tensors hold"
        left.append(f"no source was given: {unknown}, and whether all else is unchanged")
        entries = checkpoint.entries.items()
        tensors = tuple(VerifiedTensor(name, each.shape, each.dtype, None) for name, each in entries)
        return Verification(checkpoint.root, None, None, tensors, 0, tuple(found), tuple(left))
    dense = open_checkpoint(source)
    seen: list[VerifiedTensor] = []
    for tensor, problem in beside.tensors(dense):
        seen += [tensor] if tensor else []
        found += [problem] if problem else []
        if problem and tensor:
            stored.pop(tensor.name, None)  # it is told already
    found += [*stored.values(), *beside.unnamed(dense)]
    same, others = about_files(checkpoint, dense, {Path(RECORD), Path(beside.file), Path("config.json")})
    return Verification(checkpoint.root, dense.root, None, tuple(seen), same, (*found, *others), tuple(left))


def digests_in(read: Fields) -> dict[str, str]:
    """The SHA-256 of each tensor as it was written, where a record says it."""
    return read.each_named("sha256", str) if "sha256" in read.values else {}


def about_bytes(
    checkpoint: Checkpoint, written: Mapping[str, str], repaired: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """What is wrong with tensors as they stand in the files, by their names."""
    for name in written.keys() - {*checkpoint}:
        yield name, f"{printable(name)}: was written, {RECORD} says; it is not here."
    for name, entry in track(checkpoint.entries.items(), "reading", total=len(checkpoint)):
        if written and name not in written:
            yield name, f"{printable(name)}: {RECORD} does not say that it was written."
        elif written and sha256_of(checkpoint, name) != written[name]:
            yield name, f"{printable(name)}: its bytes are not those that were written: their SHA-256 is another."
        elif name in repaired and not _is_finite(checkpoint, entry):
            yield name, f"{printable(name)}: was repaired, and holds NaN or infinity."


def _is_finite(checkpoint: Checkpoint, entry: TensorEntry) -> bool:
    """Whether it holds numbers, as far as this torch can read it."""
    if not entry.numel or not entry.is_floating_point or entry.torch_dtype is None:
        return True
    return all(bool(rows.isfinite().all()) for rows in rows_of(checkpoint, entry, rows_at_once(entry.shape)))


def _plan(path: Path) -> Plan:
    try:
        (plan,) = read_plans(path)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: is not the one plan of a shrunken directory ({error}).") from error
    return plan


def _model(checkpoint: Checkpoint) -> nn.Module | None:
    """None where it is a class of somebody's own: then names in the files are those of the plan."""
    try:
        return meta_model_of(checkpoint)
    except CheckpointError:
        return None


def _about_sizes(checkpoint: Checkpoint, read: Fields, unchecked: list[str]) -> Iterator[str]:
    model = _model(checkpoint)
    if model is None:
        unchecked.append("no model can be built of config.json here: whether the files hold it")
    else:
        try:
            tensor_names(model, checkpoint)
        except CheckpointError as error:
            yield str(error)
    yield from about_parameters(checkpoint, read)
    yield from about_config(checkpoint, read)


def _about_tensors(
    checkpoint: Checkpoint, dense: Checkpoint, plan: Plan, repaired: Collection[str]
) -> Iterator[tuple[VerifiedTensor | None, str | None]]:
    model = _model(dense)
    names = {} if model is None else tensor_names(model, dense)
    scales = factors_of(plan)
    for name in checkpoint:
        if name not in dense:
            yield None, f"{printable(name)}: not in the source."
    for name, entry in track(dense.entries.items(), "verifying", total=len(dense)):
        if name not in checkpoint:
            yield None, f"{printable(name)}: in the source, but not here."
            continue
        its, mine = checkpoint.entries[name], names.get(name, name)
        shape, cuts = plan.tensors.get(mine, (entry.shape, {}))
        wrong = (
            tuple(shape) != entry.shape
            or (cuts and entry.torch_dtype is None)
            or not all(at < len(shape) and fits(indices, shape[at]) for at, indices in cuts.items())
        )
        if wrong:
            yield None, f"{printable(name)}: {PLAN} does not fit the source's shape {entry.shape}."
            continue
        same = None
        problem = None
        if (its.dtype, its.shape) != (entry.dtype, shape_of_cut(entry, cuts)):
            left = f"the plan leaves {entry.dtype} of shape {shape_of_cut(entry, cuts)}"
            problem = f"{printable(name)}: {its.dtype} of shape {its.shape}; of the source {left}."
        elif name not in repaired:
            same = _is_cut(checkpoint, name, dense, cuts, scales.get(mine, []))
            if not same:
                problem = f"{printable(name)}: is not what the plan leaves of the source's."
        yield VerifiedTensor(name, its.shape, its.dtype, None, unchanged=same), problem


def _is_cut(checkpoint: Checkpoint, name: str, dense: Checkpoint, cuts: Cuts, factors: Factors) -> bool:
    compared = Compared(checkpoint, name)
    write_cut(cast(BinaryIO, compared), dense, dense.entries[name], cuts, factors)
    return compared.all_of_it


def about_files(checkpoint: Checkpoint, dense: Checkpoint, made: Collection[Path]) -> tuple[int, list[str]]:
    """How many other files than those that were ``made`` are the source's, and which are not."""
    weights = {file.relative_to(each.root) for each in (checkpoint, dense) for file in each.files}
    weights |= {each.index.relative_to(each.root) for each in (checkpoint, dense) if each.index is not None}
    changed = weights | {*made}
    ours, theirs = ({*files_below(each.root)} - changed for each in (checkpoint, dense))
    problems = [
        f"{printable(str(file))}: in the source, but not here."
        for file in sorted(theirs - ours)
        if file.suffix not in OTHER_WEIGHTS
    ]
    problems += [f"{printable(str(file))}: not in the source." for file in sorted(ours - theirs)]
    both = sorted(ours & theirs)
    same = [file for file in both if filecmp.cmp(checkpoint.root / file, dense.root / file, shallow=False)]
    problems += [f"{printable(str(file))}: its bytes are not the source's." for file in both if file not in same]
    return len(same), problems
