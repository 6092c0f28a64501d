"""Proves what a directory claims of itself: `verify_checkpoint` reads its ``secateur.json`` and every tensor.

Law: what the record claims is counted on the stored bytes, never believed; nothing larger than one tensor's zeros is
held; whatever is wrong with a file is a problem that is named, or a `CheckpointError` of one line.
"""

from __future__ import annotations

import filecmp
import importlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from secateur.checkpoints.inspect import layout_of, zero_pieces
from secateur.checkpoints.reading import HEADER_KEY, Checkpoint, CheckpointError, TensorEntry, open_checkpoint
from secateur.checkpoints.record import (
    RECORD,
    Beside,
    Part,
    Structure,
    Zeros,
    about_config,
    about_parameters,
    claims_of,
    previous_record,
)
from secateur.checkpoints.results import verified, verified_tensors
from secateur.checkpoints.slicing import Compared, pieces_of_cut, sha256_of, shape_of_cut
from secateur.checkpoints.writing import files_below, other_weights
from secateur.patterns import NM, Block, Channels, GroupedColumns, Pattern, Rows, Unstructured
from secateur.report import Reported
from secateur.support import Fields, printable, track
from secateur.support import Part as Shown

PIECE = 32 << 20  # bytes of two files compared at once
# By the method of a record: the module whose structure_of reads which part of the source's each tensor is.
_STRUCTURES = {
    "shrink": "secateur.shrinking.verify",
    "experts": "secateur.shrinking.verify",
    "vocabulary": "secateur.vocabulary.directory",
}


@dataclass(frozen=True)
class VerifiedTensor:
    """The verification of one tensor; fields are None where there is nothing to count or to compare with.

    ``zeros`` are counted, ``claimed`` is what the record says (None: nothing), ``pattern`` tells whether the zeros are
    where the pattern wants them, ``unchanged`` whether all that was not removed has the source's bytes, ``alone``
    whether the record calls it left alone.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    zeros: int | None
    claimed: int | None = None
    pattern: bool | None = None
    unchanged: bool | None = None
    alone: bool = False


@dataclass(frozen=True)
class Verification(Reported):
    """The result of `verify_checkpoint`; prints as a table. The checkpoint is valid if there are no ``problems``.

    ``unchecked`` says what could not be verified and why; ``files`` is how many other files were compared with the
    source's.
    """

    path: Path
    source: Path | None
    pattern: str | None
    tensors: tuple[VerifiedTensor, ...]
    files: int = 0
    problems: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all that was checked holds."""
        return not self.problems

    @property
    def target_sparsity(self) -> float | None:
        """The fraction of zeros in the tensors that the record calls pruned."""
        pruned = [tensor for tensor in self.tensors if tensor.claimed is not None and not tensor.alone]
        size = sum(math.prod(tensor.shape) for tensor in pruned)
        return sum(tensor.zeros or 0 for tensor in pruned) / size if size else None

    def content(self) -> Iterator[Shown]:
        """What is printed, and a row for each tensor."""
        yield from self.summary()
        yield verified_tensors(self)

    def summary(self) -> Iterator[Shown]:
        """What is wrong, what could not be checked, and the verdict."""
        return verified(self)


def verify_checkpoint(directory: Path | str, source: Path | str | None = None) -> Verification:
    """Whether a directory is what its ``secateur.json`` says, whichever verb wrote it; compares with ``source``.

    Of each tensor that the record calls pruned, or says the zeros of: as many as it says, to the unit; of pruned ones
    its mask's entries among them, and the pattern, along the inputs as they are stored. Where units, blocks, experts or
    tokens left: the number of parameters, the configuration, and the bytes that were written. With the source: each
    tensor is what stays of the source's, byte for byte, in the same file, but for those whose values the record says
    are new, of which the dtype and the shape are; of pruned ones whose kept weights are claimed to be unchanged,
    whatever differs is +0; and every other file, and every other field of the configuration, is the source's.

    Args:
        directory: what was pruned or shrunk, or both.
        source: what it was made from, if it is there still; of what was shrunk and then pruned, what lies before
            either.

    Raises:
        CheckpointError: either directory is damaged or missing, or there is no ``secateur.json`` to verify; the weights
            are compressed; or the source is not what the records say. What does not hold is no error, but one of the
            result's ``problems``.

    >>> import json, tempfile
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> save_file({"fc.weight": torch.tensor([[0.0, 2.0, 0.0, 3.0]])}, folder / "model.safetensors")
    >>> record = {"pattern": "2:4", "pruned": {"fc.weight": 0.5}, "left_alone": {}}
    >>> (folder / RECORD).write_text(json.dumps(record)) and verify_checkpoint(folder).ok
    True
    >>> (folder / RECORD).write_text(json.dumps({**record, "pattern": "1:4"})) and verify_checkpoint(folder).problems
    ('fc.weight: 1 of 1 groups keeps more than 1 of 4.',)
    """
    directory, source = Path(directory), None if source is None else Path(source)
    if not (directory / RECORD).is_file():
        open_checkpoint(directory)  # what is none is told first
        raise CheckpointError(f"{directory}: no {RECORD} here, so that nothing is claimed; name a pruned directory.")
    read = claims_of(directory)
    shaped, pruned = _shaped(read, directory, source)
    zeros = None if read is shaped else Zeros.of(read)
    structure = Structure(open_checkpoint(directory)) if shaped is None else _structure_of(directory, shaped)
    checkpoint, moved = structure.checkpoint, structure.moved | pruned
    if any(HEADER_KEY in metadata for metadata in checkpoint.metadata.values()):
        raise CheckpointError(
            f"{directory}: compressed, and what {RECORD} says is of the weights before: write "
            "them with secateur expand and verify that directory."
        )
    written = {} if shaped is None or "sha256" not in shaped.values else shaped.each_named("sha256", str)
    problems, unchecked = [*structure.problems], [*structure.unchecked]
    if zeros is not None:
        problems += zeros.about_names(checkpoint)
        unchecked += zeros.unchecked
    if shaped is not None:
        problems += about_parameters(checkpoint, shaped)
        problems += (
            f"{printable(name)}: was written, {RECORD} says; it is not here."
            for name in sorted((written.keys() | moved) - {*checkpoint})
        )
        if moved:
            unchecked.append(f"{len(moved)} tensors have new values: whether these are the best")
    beside = None if source is None else structure.beside(source)
    if beside is None:
        unknown = "what the tensors hold, and " if shaped is not None and not written else ""
        unchecked.append(f"no source was given: {unknown}whether all else is unchanged")
    else:
        problems += [*beside.problems, *_missing(checkpoint, beside, structure.file)]
    if shaped is not None:
        problems += about_config(checkpoint, shaped, None if beside is None else beside.dense)
    tensors = []
    for name, entry in track(checkpoint.entries.items(), "verifying", total=len(checkpoint)):
        found, its = VerifiedTensor(name, entry.shape, entry.dtype, None), list[str]()
        if zeros is not None:
            found, its = _counted(checkpoint, entry, zeros, unchecked)
        if beside is not None:
            mask = zeros if shaped is None and zeros is not None and zeros.keeps_weights else None
            same, wrong = _compared(checkpoint, entry, beside, structure.file, moved, mask)
            found, its = replace(found, unchanged=same), [*its, *wrong]
        if name not in pruned and not (beside is not None and its):  # one that is another already says no more
            its += _stored(checkpoint, entry, written, moved)
        tensors.append(found)
        problems += (f"{printable(name)}: {problem}" for problem in its)
    if zeros is not None:
        problems += _about_shares(checkpoint, tensors, zeros)
    files = 0
    if beside is not None and source is not None:
        files, others = _about_files(directory, source, checkpoint, beside, structure.file)
        problems += others
    return Verification(
        directory,
        source,
        None if zeros is None else zeros.word,
        tuple(tensors),
        files,
        tuple(problems),
        tuple(dict.fromkeys(unchecked)),
    )


def _shaped(read: Fields, directory: Path, source: Path | None) -> tuple[Fields | None, frozenset[str]]:
    """The record of a verb that wrote parts of tensors, the last before zeros were made in these, unless the source is
    what that verb wrote; and the tensors with such zeros."""
    pruned, top, there = set[str](), read, None if source is None else previous_record(source)
    while read.optional("method", str) not in _STRUCTURES:
        if read is top or "pruned" in read.values:
            pruned |= read.each_named("pruned", float, least=0, most=1).keys()
        if source is None or not isinstance(before := read.values.get("previous"), dict) or before == there:
            return None, frozenset(pruned)
        read = read.inner("previous")
    if read is not top and read.values.get("previous") != there:
        raise CheckpointError(
            f"{directory}: was shrunk, and then pruned, and {source} is neither what was shrunk nor what was pruned: "
            f"their {RECORD} say otherwise. Name one of these two."
        )
    return read, frozenset(pruned)


def _structure_of(directory: Path, read: Fields) -> Structure:
    found: Structure = importlib.import_module(_STRUCTURES[read.take("method", str)]).structure_of(directory, read)
    return found


# ---- beside the source ----------------------------------------------------------------------------------------------


def _missing(checkpoint: Checkpoint, beside: Beside, file: str) -> Iterator[str]:
    """What is not on both sides, and ``__metadata__`` that differs."""
    names = {*checkpoint} | beside.parts.keys()
    used = {beside.parts.get(name, Part(name)).name for name in names}
    said = f", and {file} does not say that it left" if file else ""
    for name in beside.dense:
        if name not in used and name not in beside.gone:
            yield f"{printable(name)}: in the source, but not here{said}."
    for name in sorted(beside.parts.keys() - {*checkpoint}):
        yield f"{printable(name)}: {file} says what it was; it is not here."
    for name in sorted(used & {*beside.gone}):
        yield f"{printable(name)}: left, {file} says; it is here."
    for path in checkpoint.files:
        its = beside.dense.metadata.get(beside.dense.root / path.relative_to(checkpoint.root))
        if its is not None and checkpoint.metadata[path] != its:
            yield f"{path.name}: its __metadata__ is not the source's."


def _compared(
    checkpoint: Checkpoint,
    entry: TensorEntry,
    beside: Beside,
    file: str,
    moved: Collection[str],
    mask: Zeros | None,
) -> tuple[bool | None, list[str]]:
    """Whether a tensor has the bytes that stay of the source's; None where the record says that its values are new."""
    part, dense = beside.parts.get(entry.name, Part(entry.name)), beside.dense
    its = dense.entries.get(part.name)
    old = "" if part.name == entry.name else f" {printable(part.name)}"
    if its is None:
        return None, [f"not in the source{old and f', as{old}'}."]
    whole = all(at < len(its.shape) and _fits(kept, its.shape[at]) for at, kept in part.cuts.items())
    if not whole or (part.cuts and its.torch_dtype is None):
        return None, [f"{file} does not fit the source's shape {its.shape}."]
    if (entry.dtype, entry.shape) != (its.dtype, wanted := shape_of_cut(its, part.cuts)):
        return None, [f"{entry.dtype} of shape {entry.shape}; of the source{old} stay {its.dtype} {wanted}."]
    here, there = entry.path.relative_to(checkpoint.root), its.path.relative_to(dense.root)
    problems = [f"in {here}, in the source in {there}."] if here != there else []
    if mask is not None and entry.name in mask.pruned:
        removed = mask.removed.get(entry.name, entry.numel)
        different, not_zero = _changed(checkpoint, dense, entry)
        if not_zero:
            problems.append(f"{not_zero:,} kept values are not the source's.")
        elif different > removed:
            problems.append(f"{different:,} values differ from the source's; only {removed:,} are removed.")
        return not not_zero and different <= removed, problems
    if entry.name in moved:
        return None, problems
    compared = Compared(checkpoint, entry.name)
    part.write(cast(BinaryIO, compared), dense, its, part.cuts)
    if not compared.all_of_it:
        problems.append(f"its bytes are not {'what stays of ' if file else ''}the source's{old}.")
    return compared.all_of_it, problems


def _fits(kept: Any, size: int) -> bool:
    return bool(len(kept) and kept[0] >= 0 and kept[-1] < size and (kept[1:] > kept[:-1]).all())


def _stored(
    checkpoint: Checkpoint, entry: TensorEntry, written: Mapping[str, str], moved: Collection[str]
) -> Iterator[str]:
    """What is wrong with a tensor as it stands in its file."""
    if written and entry.name not in written:
        yield f"{RECORD} does not say that it was written."
    elif written and sha256_of(checkpoint, entry.name) != written[entry.name]:
        yield "its bytes are not those that were written: their SHA-256 is another."
    elif (
        entry.name in moved
        and entry.shape
        and entry.numel
        and entry.is_floating_point
        and entry.torch_dtype is not None
        and not all(bool(rows.isfinite().all()) for rows in pieces_of_cut(checkpoint, entry, {}, as_rows=True))
    ):
        yield "has new values, and holds NaN or infinity."


def _changed(checkpoint: Checkpoint, dense: Checkpoint, entry: TensorEntry) -> tuple[int, int]:
    """How many values have not the source's bytes, and how many of them are not +0."""
    width = entry.nbytes // entry.numel if entry.numel and entry.nbytes % entry.numel == 0 else 1
    step = PIECE // width * width
    different = not_zero = 0
    for start in range(0, entry.nbytes, step):
        stop = min(start + step, entry.nbytes)
        ours, theirs = (each.raw(entry.name, start, stop) for each in (checkpoint, dense))
        if torch.equal(ours, theirs):
            continue
        unlike = (ours != theirs).view(-1, width).any(1)
        different += int(unlike.sum())
        not_zero += int((unlike & ours.view(-1, width).any(1)).sum())
    return different, not_zero


def _about_files(
    directory: Path, source: Path, checkpoint: Checkpoint, beside: Beside, file: str
) -> tuple[int, list[str]]:
    """How many other files are the source's, and which are not what they have to be."""
    both = ((checkpoint, directory), (beside.dense, source))
    weights = {path.relative_to(root) for each, root in both for path in each.files}
    made, gone = {Path(RECORD)}, set[Path]()
    if file:  # each file of weights is another, and the configuration was seen
        weights |= {each.index.relative_to(root) for each, root in both if each.index is not None}
        made |= {Path(file), Path("config.json")}
        gone = {*other_weights(beside.dense, source)}
    ours, theirs = ({*files_below(root)} - weights - made - beside.files.keys() for root in (directory, source))
    problems = [f"{printable(str(path))}: in the source, but not here." for path in sorted(theirs - gone - ours)]
    problems += [f"{printable(str(path))}: not in the source." for path in sorted(ours - theirs)]
    for path, text in beside.files.items():
        if (directory / path).exists() != (text is not None):
            problems.append(f"{printable(str(path))}: {'says what the source says' if text is None else 'not here'}.")
        elif text is not None and (directory / path).read_bytes() != text.encode():
            problems.append(f"{printable(str(path))}: is not what the source's becomes.")
    same = {path for path in ours & theirs if filecmp.cmp(directory / path, source / path, shallow=False)}
    problems += [f"{printable(str(path))}: its bytes are not the source's." for path in sorted((ours & theirs) - same)]
    return len(same), problems


# ---- zeros ----------------------------------------------------------------------------------------------------------


def _about_shares(checkpoint: Checkpoint, tensors: Sequence[VerifiedTensor], claims: Zeros) -> Iterator[str]:
    counted = [(tensor, checkpoint.entries[tensor.name].numel) for tensor in tensors if tensor.zeros is not None]
    for group, claimed in claims.sparsity.items():
        its = [(each.zeros or 0, size) for each, size in counted if group == "model" or each.name in claims.pruned]
        size = sum(size for _, size in its)
        share = sum(zeros for zeros, _ in its) / size if size else 0.0
        if not math.isclose(share, claimed, rel_tol=1e-9, abs_tol=1e-12):
            yield f"{RECORD} claims a sparsity of {claimed} of the {group}; it is {share}."


def _counted(
    checkpoint: Checkpoint, entry: TensorEntry, claims: Zeros, unchecked: list[str]
) -> tuple[VerifiedTensor, list[str]]:
    """The zeros of a tensor, and what does not hold of them."""
    name, problems, alone = entry.name, list[str](), entry.name not in claims.pruned
    found = VerifiedTensor(name, entry.shape, entry.dtype, None, claims.zeros.get(name), alone=alone)
    if entry.torch_dtype is None:
        what = "calls it pruned" if not alone else "says how many zeros it has"
        if not alone or found.claimed is not None:
            problems.append(f"{RECORD} {what}; it is of dtype {entry.dtype}, which this torch cannot read.")
        return found, problems
    if alone:
        zeros, claimed = sum(int(piece.count_nonzero()) for piece in zero_pieces(checkpoint, entry)), found.claimed
    else:
        where, at = torch.empty(entry.numel, dtype=torch.bool, device="cpu"), 0
        for piece in zero_pieces(checkpoint, entry):
            where[at : at + len(piece)] = piece
            at += len(piece)
        zeros, claimed = int(where.count_nonzero()), round(claims.pruned[name] * entry.numel)
    found = replace(found, zeros=zeros, claimed=claimed)
    if claimed is not None and zeros != claimed:
        problems.append(f"{zeros:,} of {entry.numel:,} values are zero; {RECORD} claims {claimed:,}.")
    removed = claims.removed.get(name)
    if alone or claims.pattern is None:
        violation = None
    elif removed is None and not isinstance(claims.pattern, NM | Unstructured):
        unchecked.append(f"{RECORD} does not say how many entries of some tensors are removed: their pattern")
        return found, problems
    else:
        try:
            rows = layout_of(name, entry.shape, checkpoint.config).to_rows(where.reshape(entry.shape))
            violation = _violation(claims.pattern, rows, removed or 0)
        except ValueError as error:
            violation = str(error)
        found = replace(found, pattern=violation is None)
    if not alone and removed is not None and zeros < removed:
        problems.append(f"{RECORD} says that {removed:,} are removed; only {zeros:,} are zero.")
    return found, problems if violation is None else [*problems, violation]


def _violation(pattern: Pattern, zero: Tensor, removed: int) -> str | None:
    """What contradicts the pattern in (outputs, inputs, ...) of which True is zero; None if nothing does."""
    if isinstance(pattern, NM):
        groups = broken = 0
        parts: Sequence[Tensor] = (zero,)
        if zero.dim() > 1:  # copied by pool: in parts across the groups
            across = 0 if pattern.axis % zero.dim() else 1
            parts = torch.split(zero, max(1, PIECE * zero.shape[across] // max(zero.numel(), 1)), across)
        for part in parts:
            table = pattern.pool(part)
            groups += len(table)
            broken += int((table.sum(1) < pattern.m - pattern.n).sum())
        return f"{broken:,} of {groups:,} groups keeps more than {pattern.n} of {pattern.m}." if broken else None
    if isinstance(pattern, Unstructured):
        return None
    if not zero.dim():
        raise ValueError("a scalar has no rows, blocks or channels.")
    if isinstance(pattern, Rows):
        each = pattern.pool(zero).sum(1)
        least = removed // max(len(each), 1)
        short = int((each < least).sum())
        return f"{short:,} of {len(each):,} rows have fewer than {least:,} zeros." if short else None
    if isinstance(pattern, GroupedColumns):
        pattern = Block(pattern.outputs, 1)
    if isinstance(pattern, Block):
        # no larger than the weight, since a ragged edge is padded to a whole block
        inputs = math.prod(zero.shape[1:])
        pattern = Block(min(pattern.height, max(len(zero), 1)), min(pattern.width, max(inputs, 1)))
        covered = 0
        for part in torch.split(zero, pattern.height * max(1, PIECE // max(inputs, 1) // pattern.height)):
            whole = pattern.pool(part.float()) == 1
            covered += int(pattern.spread(whole, part.shape).sum())
        kind = "blocks"
    else:
        assert isinstance(pattern, Channels)
        if not -zero.dim() <= pattern.dim < zero.dim():
            raise ValueError(f"has no dimension {pattern.dim} along which channels could be removed.")
        channels = zero.movedim(pattern.dim, 0).flatten(1)
        covered = int(channels.all(1).sum()) * channels.shape[1]
        kind = "channels"
    return f"{removed:,} are removed; whole {kind} of zeros have only {covered:,}." if covered < removed else None
