"""Proves what a pruned checkpoint claims of itself: `verify_checkpoint` reads its ``secateur.json`` and every tensor.

Law: what the record claims is counted on the stored bytes, never believed; nothing larger than one tensor's zeros is
held; whatever is wrong with a file is a problem that is named, or a `CheckpointError` of one line.

The record that is verified, ``secateur.json`` beside the weights. Other keys are ignored::

    {
      "method": "oneshot",
      "kept_weights": "updated",
      "pattern": "2:4",
      "pruned": {"a.weight": 0.5},
      "removed": {"a.weight": 512},
      "left_alone": {"why": ["b"]},
      "sparsity": {"targets": 0.5, "model": 0.4}
    }

- ``kept_weights``: "unchanged" where the kept weights have the source's bytes, as by a mask alone; "updated" where they
  may have changed. Left out: unchanged if ``method`` is "sparsify" or left out, else updated.
- ``pattern``: a word of `secateur.patterns.parse`, or the repr of one of the library's patterns, such as
  "NM(n=2, m=4, axis=1)". Null or left out: none is claimed.
- ``pruned``: for each tensor whose bytes may have changed the fraction of zeros among its stored values, from which
  the exact count follows.
- ``removed``: how many entries a tensor's mask removes, kept zeros not counted. Rows, blocks and channels are checked
  by it; it is left out for a tensor whose parts (experts, q/k/v) were given different sparsities.
- ``left_alone``: the names of all other tensors, by reasons.
- ``zeros``: of tensors that are left alone how many entries are zero and are to stay so.
- ``sparsity``: of all pruned tensors together, and of all tensors of a dtype that torch reads.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.checkpoints.headers import HEADER_KEY, CheckpointError, TensorEntry
from secateur.checkpoints.inspection import zero_pieces
from secateur.checkpoints.layouts import layout_of
from secateur.checkpoints.reading import Checkpoint, open_checkpoint
from secateur.checkpoints.record import RECORD
from secateur.checkpoints.tables import verified_rows
from secateur.patterns import NM, Block, Channels, GroupedColumns, Pattern, Rows, Unstructured, parse, word_of
from secateur.report import Reported, Sheet
from secateur.support import Fields, Part, printable, track

__all__ = ["Verification", "VerifiedTensor", "verify_checkpoint"]

PIECE = 32 << 20  # bytes of two files compared at once
_PATTERNS: dict[str, Callable[..., Pattern]] = {
    kind.__name__: kind for kind in (NM, Block, Channels, GroupedColumns, Rows, Unstructured)
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

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "shape": list(self.shape)}


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

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "path": str(self.path),
            "source": None if self.source is None else str(self.source),
            "ok": self.ok,
            "pattern": self.pattern,
            "sparsity": self.target_sparsity,
            "problems": list(self.problems),
            "unchecked": list(self.unchecked),
            "files": self.files,
            "tensors": [tensor.as_json() for tensor in self.tensors],
        }

    def _sheets(self) -> list[Sheet]:
        from secateur.checkpoints.sheets import verified_sheets

        return verified_sheets(self)

    def _parts(self) -> Iterator[Part]:
        """What is wrong, what could not be checked, and the verdict."""
        yield from (f"wrong: {printable(problem, 1000)}" for problem in self.problems)
        yield from (f"unchecked: {printable(what, 1000)}" for what in self.unchecked)
        if self.problems or self.unchecked:
            yield ""
        if any(tensor.zeros is not None for tensor in self.tensors):  # of a shrunken model no zeros are counted
            yield verified_rows(self)
        yield ""
        pattern = f", pattern {self.pattern}" if self.pattern else ""
        compared = f", {self.files} other files compared" if self.source else ""
        verdict = "holds" if self.ok else f"does not hold: {len(self.problems)} problems"
        yield f"{printable(str(self.path))}: what {RECORD} claims {verdict}{pattern}{compared}."


def verify_checkpoint(directory: Path | str, source: Path | str | None = None) -> Verification:
    """Counts on the stored bytes what ``secateur.json`` claims; compares with ``source`` where that is given.

    Of each tensor that the record calls pruned, or says the zeros of: as many as it says, to the unit; of pruned ones
    its mask's entries among them, and the pattern, along the inputs as they are stored. With the source: the same
    tensors, dtypes, shapes and files; the bytes of every tensor that is not pruned, and of every other file; and of
    pruned tensors whose kept weights are claimed to be unchanged, that whatever differs from the source is +0.

    Args:
        directory: what was pruned.
        source: what it was pruned from, if it is there still.

    Raises:
        CheckpointError: either directory is damaged or missing, or there is no ``secateur.json`` to verify: none, or
            that of a shrunken model; or the weights are compressed. What does not hold is no error, but one of the
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
    directory = Path(directory)
    checkpoint = open_checkpoint(directory)
    if not (directory / RECORD).is_file():
        raise CheckpointError(f"{directory}: no {RECORD} here, so that nothing is claimed; name a pruned directory.")
    if any(HEADER_KEY in metadata for metadata in checkpoint.metadata.values()):
        raise CheckpointError(
            f"{directory}: compressed, and what {RECORD} says is of the weights before: write "
            "them with secateur expand and verify that directory."
        )
    hint = " It is not the record of this model, or no longer."
    read = Fields.read(directory / RECORD, error=CheckpointError, hint=hint, finite=False)
    if "pruned" not in read.values and "groups" in read.values:
        raise CheckpointError(
            f"{read.path}: the record of a model that was shrunken: no zeros are claimed, so that there are none to "
            "count. secateur shrink proves what it writes, before it writes it."
        )
    claims = _Claims.of(read)
    dense = None if source is None else open_checkpoint(source)
    problems: list[str] = []
    unchecked = list(claims.unchecked)
    problems += claims.about_names(checkpoint)
    if dense is None:
        unchecked.append("no source was given: whether all else is unchanged")
    else:
        problems += _about_entries(checkpoint, dense)
    tensors = []
    zeros = {"targets": 0, "model": 0}
    sizes = {"targets": 0, "model": 0}
    for name, entry in track(checkpoint.entries.items(), "verifying", total=len(checkpoint)):
        found, its = _verified(checkpoint, dense, entry, claims, unchecked)
        tensors.append(found)
        problems += (f"{printable(name)}: {problem}" for problem in its)
        for group in ("targets", "model") if name in claims.pruned else ("model",):
            if found.zeros is not None:
                zeros[group] += found.zeros
                sizes[group] += entry.numel
    for group, claimed in claims.sparsity.items():
        share = zeros[group] / sizes[group] if sizes[group] else 0.0
        if not math.isclose(share, claimed, rel_tol=1e-9, abs_tol=1e-12):
            problems.append(f"{RECORD} claims a sparsity of {claimed} of the {group}; it is {share}.")
    files = 0
    if dense is not None:
        files, others = _about_files(checkpoint, dense)
        problems += others
    return Verification(
        directory,
        None if dense is None else dense.root,
        claims.word,
        tuple(tensors),
        files,
        tuple(problems),
        tuple(dict.fromkeys(unchecked)),
    )


# ---- what is claimed ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Claims:
    """The record, each value held to its type."""

    word: str | None
    pattern: Pattern | None
    keeps_weights: bool
    pruned: Mapping[str, float]
    removed: Mapping[str, int]
    left_alone: frozenset[str] | None
    zeros: Mapping[str, int]
    sparsity: Mapping[str, float]
    unchecked: tuple[str, ...] = field(default=())

    @staticmethod
    def of(read: Fields) -> _Claims:
        pruned = read.each_named("pruned", float, least=0, most=1)
        removed = read.each_named("removed", int, least=0) if "removed" in read.values else {}
        alone = None
        if read.values.get("left_alone") is not None:
            reasons = read.inner("left_alone")
            alone = frozenset(name for reason in reasons.values for name in reasons.each(reason, str))
        totals = read.inner("sparsity") if "sparsity" in read.values else Fields({}, read.path)
        shares = {group: totals.optional(group, float, least=0, most=1) for group in ("targets", "model")}
        word = read.optional("pattern", str)
        method, kept = read.optional("method", str), read.optional("kept_weights", str)
        if kept is None:
            kept = "unchanged" if method in (None, "sparsify") else "updated"
        if kept not in ("unchanged", "updated"):
            raise read.wrong("kept_weights", 'must be "unchanged" or "updated"')
        unchecked = []
        pattern = None
        if word is not None and (pattern := _pattern_of(word)) is None:
            unchecked.append(f"the pattern {printable(word)}, which is not one of the library's")
        if alone is None:
            unchecked.append(f"{RECORD} does not say what was left alone: whether it names all tensors")
        return _Claims(
            word_of(pattern) if pattern else word and printable(word),
            pattern,
            kept == "unchanged",
            pruned,
            removed,
            alone,
            read.each_named("zeros", int, least=0) if "zeros" in read.values else {},
            {group: share for group, share in shares.items() if share is not None},
            tuple(unchecked),
        )

    def about_names(self, checkpoint: Checkpoint) -> Iterator[str]:
        """Whether the record speaks of the tensors that there are, and of each once."""
        for name in self.pruned:
            if name not in checkpoint:
                yield f"{printable(name)}: {RECORD} calls it pruned; it is not in the checkpoint."
        for name in self.removed:
            if name not in self.pruned:
                yield f"{printable(name)}: {RECORD} says how much of it is removed, but not that it is pruned."
        for name in self.zeros:
            if name not in checkpoint or name in self.pruned:
                what = "calls it pruned, too" if name in self.pruned else "it is not in the checkpoint"
                yield f"{printable(name)}: {RECORD} says how many zeros it has, left alone; {what}."
        if self.left_alone is None:
            return
        for name in sorted(self.left_alone - checkpoint.entries.keys()):
            yield f"{printable(name)}: {RECORD} calls it left alone; it is not in the checkpoint."
        for name in checkpoint:
            if name not in self.pruned and name not in self.left_alone:
                yield f"{printable(name)}: in the checkpoint, but not in {RECORD}."
            elif name in self.pruned and name in self.left_alone:
                yield f"{printable(name)}: {RECORD} calls it both pruned and left alone."


def _pattern_of(word: str) -> Pattern | None:
    """From a word or the repr of a pattern; None if it is of somebody's own."""
    if len(word) > 100:
        return None
    try:
        if found := re.fullmatch(r"(\w+)\((.*)\)", word):
            options = dict(part.split("=") for part in found[2].split(", ") if part)
            if options.pop("reduce", "None") != "None":
                return None
            return _PATTERNS[found[1]](**{key: int(value) for key, value in options.items()})
        return parse(word)
    except (ValueError, TypeError, KeyError):
        return None


# ---- what is there --------------------------------------------------------------------------------------------------


def _verified(
    checkpoint: Checkpoint, dense: Checkpoint | None, entry: TensorEntry, claims: _Claims, unchecked: list[str]
) -> tuple[VerifiedTensor, list[str]]:
    """What is found of a tensor, and what does not hold."""
    name, problems = entry.name, list[str]()
    share = claims.pruned.get(name)
    known = (name, entry.shape, entry.dtype)
    original = None if dense is None else dense.entries.get(name)
    comparable = original is not None and (original.dtype, original.shape) == (entry.dtype, entry.shape)
    if share is None or entry.torch_dtype is None:
        zeros = None
        if entry.torch_dtype is not None:
            zeros = sum(int(piece.count_nonzero()) for piece in zero_pieces(checkpoint, entry))
        elif share is not None:
            problems.append(f"{RECORD} calls it pruned; it is of dtype {entry.dtype}, which this torch cannot read.")
        same = _changed(checkpoint, dense, entry) == (0, 0) if dense is not None and comparable else None
        if same is False:
            problems.append("was left alone, but its bytes are not the source's.")
        claimed = claims.zeros.get(name)
        if claimed is not None and zeros != claimed:
            had = (
                "no values that this torch reads" if zeros is None else f"{zeros:,} of {entry.numel:,} values are zero"
            )
            problems.append(f"{had}; {RECORD} claims {claimed:,}.")
        return VerifiedTensor(*known, zeros, claimed, unchanged=same, alone=share is None), problems

    where, at = torch.empty(entry.numel, dtype=torch.bool), 0
    for piece in zero_pieces(checkpoint, entry):
        where[at : at + len(piece)] = piece
        at += len(piece)
    zeros, claimed = int(where.count_nonzero()), round(share * entry.numel)
    removed = claims.removed.get(name)
    if zeros != claimed:
        problems.append(f"{zeros:,} of {entry.numel:,} values are zero; {RECORD} claims {claimed:,}.")
    if removed is not None and zeros < removed:
        problems.append(f"{RECORD} says that {removed:,} are removed; only {zeros:,} are zero.")
    holds = None
    if claims.pattern is not None and (removed is not None or isinstance(claims.pattern, NM | Unstructured)):
        rows = layout_of(name, entry.shape, checkpoint.config).to_rows(where.reshape(entry.shape))
        try:
            violation = _violation(claims.pattern, rows, removed or 0)
        except ValueError as error:
            violation = str(error)
        holds = violation is None
        if violation is not None:
            problems.append(violation)
    elif claims.pattern is not None:
        unchecked.append(f"{RECORD} does not say how many entries of some tensors are removed: their pattern")
    same = None
    if dense is not None and comparable:
        different, not_zero = _changed(checkpoint, dense, entry)
        if claims.keeps_weights:
            same = not not_zero and (removed is None or different <= removed)
            if not_zero:
                problems.append(f"{not_zero:,} kept values are not the source's.")
            elif not same:
                problems.append(f"{different:,} values differ from the source's; only {removed:,} are removed.")
    return VerifiedTensor(*known, zeros, claimed, holds, same), problems


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


def _about_entries(checkpoint: Checkpoint, dense: Checkpoint) -> Iterator[str]:
    """Whether both have the same tensors in the same files."""
    for name in dense:
        if name not in checkpoint:
            yield f"{printable(name)}: in the source, but not here."
    for name, entry in checkpoint.entries.items():
        original = dense.entries.get(name)
        if original is None:
            yield f"{printable(name)}: not in the source."
            continue
        if (entry.dtype, entry.shape) != (original.dtype, original.shape):
            yield (
                f"{printable(name)}: {entry.dtype} of shape {entry.shape}, in the source {original.dtype} of shape "
                f"{original.shape}."
            )
        files = [at.path.relative_to(where.root) for at, where in ((entry, checkpoint), (original, dense))]
        if files[0] != files[1]:
            yield f"{printable(name)}: in {files[0]}, in the source in {files[1]}."
    for file in checkpoint.files:
        original_file = dense.root / file.relative_to(checkpoint.root)
        if checkpoint.metadata[file] != dense.metadata.get(original_file, checkpoint.metadata[file]):
            yield f"{file.name}: its __metadata__ is not the source's."


def _about_files(checkpoint: Checkpoint, dense: Checkpoint) -> tuple[int, list[str]]:
    """How many other files are the source's, and which are not."""
    weights = {file.relative_to(each.root) for each in (checkpoint, dense) for file in each.files}
    ours, theirs = ({*_files(each.root)} - weights - {Path(RECORD)} for each in (checkpoint, dense))
    problems = [f"{printable(str(file))}: in the source, but not here." for file in sorted(theirs - ours)]
    problems += [f"{printable(str(file))}: not in the source." for file in sorted(ours - theirs)]
    same = 0
    for file in sorted(ours & theirs):
        if _same_bytes(checkpoint.root / file, dense.root / file):
            same += 1
        else:
            problems.append(f"{printable(str(file))}: its bytes are not the source's.")
    return same, problems


def _files(root: Path) -> Iterator[Path]:
    for directory, folders, names in os.walk(root):
        if Path(directory) == root:  # git's own copy of the files is not carried over
            folders[:] = [name for name in folders if name != ".git"]
            names = [name for name in names if name != ".git"]
        yield from ((Path(directory) / name).relative_to(root) for name in names)


def _same_bytes(ours: Path, theirs: Path) -> bool:
    if not (ours.is_file() and theirs.is_file()) or ours.stat().st_size != theirs.stat().st_size:
        return False  # a named pipe would wait for ever
    with open(ours, "rb") as first, open(theirs, "rb") as second:
        while piece := first.read(PIECE):
            if piece != second.read(PIECE):
                return False
    return True
