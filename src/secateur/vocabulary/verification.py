"""What the ``secateur.json`` of a directory claims of which tokens left, seen again on the stored bytes.

Law: every tensor holds the rows of the source's that the kept numbers name, byte for byte; every file that numbers
tokens is what the source's becomes by them; and the two tokenizers make the same of texts whose tokens all stay.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from secateur.checkpoints import (
    HINT,
    RECORD,
    Checkpoint,
    CheckpointError,
    Compared,
    Verification,
    VerifiedTensor,
    about_config,
    about_parameters,
    claims_of,
    files_below,
    is_made_by,
    open_checkpoint,
    other_weights,
    pieces_of_cut,
    shape_of_cut,
    write_bytes,
)
from secateur.support import Fields, printable, track
from secateur.vocabulary.directory import FORMAT, KEPT, Source, cuts_of, source_of
from secateur.vocabulary.files import model_folder, read_tokens
from secateur.vocabulary.proof import agree, encoding, random_texts, renaming
from secateur.vocabulary.tokens import Ids

__all__ = ["is_shrunken_vocabulary", "verify_vocabulary_checkpoint"]


def is_shrunken_vocabulary(directory: Path | str) -> bool:
    """Whether a directory has a record that `shrink_vocabulary_checkpoint` wrote."""
    return is_made_by(directory, "vocabulary")


def verify_vocabulary_checkpoint(directory: Path | str, source: Path | str | None = None) -> Verification:
    """Verifies a directory against its ``secateur.json`` and ``vocabulary.json``, and against ``source`` if given.

    The tensors that count tokens are as long as the record says, ``config.json`` says so, and the tokenizer has as many
    tokens. With the source: each tensor holds the rows of the source's that stay, byte for byte, or all of it; files
    that number tokens are what the source's become; others are the source's; and of random texts whose tokens all stay
    the tokenizer makes the same as the source's, renamed.

    Args:
        directory: what `shrink_vocabulary_checkpoint` wrote.
        source: what it was made from, if it is there still.

    Raises:
        CheckpointError: a damaged or missing directory or record. What does not hold is no error, but one of the
            result's ``problems``.
    """
    directory = Path(directory)
    read = claims_of(directory)
    checkpoint = open_checkpoint(model_folder(directory))
    kept = _kept(directory / KEPT)
    problems = list(_about_sizes(checkpoint, read, kept))
    if source is None:
        tensors = [VerifiedTensor(name, each.shape, each.dtype, None) for name, each in checkpoint.entries.items()]
        unchecked = ("no source was given: what the tensors hold, and whether texts are read as before",)
        return Verification(directory, None, None, tuple(tensors), 0, tuple(problems), unchecked)
    dense = source_of(Path(source))
    if len(kept) and int(kept.max()) >= max(dense.tokens.size, dense.axes.rows):
        problems.append(f"{KEPT}: number {int(kept.max()):,} is beyond the source's tokens.")
        return Verification(directory, dense.root, None, (), 0, tuple(problems), ())
    found: list[VerifiedTensor] = []
    for tensor, problem in _about_tensors(checkpoint, dense, kept):
        found += [tensor] if tensor else []
        problems += [problem] if problem else []
    same, wrong = _about_files(directory, dense, kept)
    problems += [*wrong, *_about_texts(checkpoint, dense, kept)]
    return Verification(directory, dense.root, None, tuple(found), same, tuple(problems), ())


def _kept(path: Path) -> Ids:
    """The old number of each new one."""
    try:
        read = Fields.read(path, error=CheckpointError, hint=HINT)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; it says which tokens stayed.") from None
    if read.take("format", str) != FORMAT or read.take("version", int) != 1:
        raise read.wrong("format", f"is not {FORMAT!r}, version 1")
    kept = read.each("kept", int, least=0)
    if len(set(kept)) < len(kept):
        raise read.wrong("kept", "has a number twice")
    if max(kept, default=0) >= 1 << 40:
        raise read.wrong("kept", "has a number that no tokenizer has")
    return np.array(kept, dtype=np.int64)


def _about_sizes(checkpoint: Checkpoint, read: Fields, kept: Ids) -> Iterator[str]:
    size = read.inner("tokens").take("to", int, least=0)
    yield from about_parameters(checkpoint, read)
    for name, shorter in read.inners_named("shorter"):
        at = shorter.take("dimension", int, least=0, most=1)
        entry = checkpoint.entries.get(name)
        if entry is None:
            yield f"{printable(name)}: became shorter, {RECORD} says; it is not here."
        elif at >= len(entry.shape) or entry.shape[at] != size:
            yield f"{printable(name)}: has shape {entry.shape}; {RECORD} claims {size:,} tokens."
    yield from about_config(checkpoint, read)
    try:
        tokens = read_tokens(checkpoint.root)
    except CheckpointError as error:
        yield str(error)
        return
    if not {*tokens.by_id} <= set(range(len(kept))):
        yield f"the tokenizer has numbers up to {tokens.size - 1:,}; {KEPT} names {len(kept):,} that stayed."


def _about_tensors(
    checkpoint: Checkpoint, dense: Source, kept: Ids
) -> Iterator[tuple[VerifiedTensor | None, str | None]]:
    cuts = cuts_of(dense, kept)
    for name in checkpoint:
        if name not in dense.checkpoint:
            yield None, f"{printable(name)}: not in the source."
    for name, entry in track(dense.checkpoint.entries.items(), "verifying", total=len(dense.checkpoint)):
        if name not in checkpoint:
            yield None, f"{printable(name)}: in the source, but not here."
            continue
        its, wanted = checkpoint.entries[name], shape_of_cut(entry, cuts.get(name, {}))
        if (its.dtype, its.shape) != (entry.dtype, wanted):
            problem = f"{printable(name)}: {its.dtype} of shape {its.shape}; of the source stay {entry.dtype} {wanted}."
            yield VerifiedTensor(name, its.shape, its.dtype, None), problem
            continue
        compared = Compared(checkpoint, name)
        for piece in pieces_of_cut(dense.checkpoint, entry, cuts.get(name, {})):
            write_bytes(cast(BinaryIO, compared), piece)
        same = compared.all_of_it
        problem = f"{printable(name)}: is not the rows of the source's that stay."
        yield VerifiedTensor(name, its.shape, its.dtype, None, unchanged=same), None if same else problem


def _about_files(directory: Path, dense: Source, kept: Ids) -> tuple[int, list[str]]:
    """How many other files are the source's, and which are not what they have to be."""
    problems = []
    place = dense.checkpoint.root.relative_to(dense.root)
    try:
        wanted = dense.rewritten(kept)
    except (KeyError, ValueError) as error:  # numbers that stay without which no tokenizer is
        return 0, [f"{KEPT}: leaves out what the source's tokenizer needs ({printable(str(error), 100)})."]
    for path, text in wanted.items():
        there = directory / path
        if text is None:
            problems += [f"{printable(str(path))}: says the old numbers."] if there.exists() else []
        elif not there.is_file():
            problems.append(f"{printable(str(path))}: in the source, but not here.")
        elif not _says(there, text, as_json=path == place / "config.json"):
            problems.append(f"{printable(str(path))}: is not what the source's becomes under the new numbers.")
    weights = {file.relative_to(dense.root) for file in dense.checkpoint.files}
    if dense.checkpoint.index is not None:
        weights.add(dense.checkpoint.index.relative_to(dense.root))
    gone = {*other_weights(dense.checkpoint, dense.root)}
    others = {*files_below(dense.root)} - weights - wanted.keys() - gone - {Path(RECORD), Path(KEPT)}
    ours = {*files_below(directory)} - weights - wanted.keys() - {Path(RECORD), Path(KEPT)}
    problems += [f"{printable(str(path))}: in the source, but not here." for path in sorted(others - ours)]
    problems += [f"{printable(str(path))}: not in the source." for path in sorted(ours - others)]
    both = sorted(others & ours)
    same = [path for path in both if filecmp.cmp(directory / path, dense.root / path, shallow=False)]
    problems += [f"{printable(str(path))}: its bytes are not the source's." for path in both if path not in same]
    return len(same), problems


def _says(path: Path, text: str, *, as_json: bool) -> bool:
    try:
        found = path.read_text("utf-8")
        return found == text or (as_json and json.loads(found) == json.loads(text))
    except ValueError:
        return False


def _about_texts(checkpoint: Checkpoint, dense: Source, kept: Ids) -> Iterator[str]:
    """The law on random texts, of all of Unicode and of tokens that stayed."""
    try:
        smaller = read_tokens(checkpoint.root)
    except CheckpointError:
        return  # said before
    random = random_texts(dense.tokens, kept, seed=1)
    new = renaming(kept, max(dense.tokens.size, dense.axes.rows))
    old = encoding(dense.tokens.backend)(random)
    try:
        agree(random, old, encoding(smaller.backend), new, "the tokens")
    except ValueError as error:
        yield str(error).replace(": nothing was changed", "")
