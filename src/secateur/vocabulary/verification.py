"""What the ``secateur.json`` of a directory claims of which tokens left.

Law: every tensor holds the rows of the source's that the kept numbers name, byte for byte; every file that numbers
tokens is what the source's becomes by them; and the two tokenizers make the same of texts whose tokens all stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from secateur.checkpoints import (
    HINT,
    RECORD,
    Beside,
    Checkpoint,
    CheckpointError,
    Part,
    Structure,
    open_checkpoint,
)
from secateur.support import Fields, printable
from secateur.vocabulary.directory import FORMAT, KEPT, Source, cuts_of, source_of
from secateur.vocabulary.files import model_folder, read_tokens
from secateur.vocabulary.proof import agree, encoding, random_texts, renaming
from secateur.vocabulary.tokens import Ids

__all__ = ["structure_of"]


def structure_of(directory: Path, read: Fields) -> Structure:
    """What the record of `shrink_vocabulary_checkpoint` claims."""
    checkpoint = open_checkpoint(model_folder(directory))
    kept = _kept(directory / KEPT)

    def beside(source: Path) -> Beside:
        dense = source_of(source)
        problems, files = list[str](), dict[Path, str | None]()
        here = kept[kept < max(dense.tokens.size, dense.axes.rows)]
        if len(here) < len(kept):
            problems.append(f"{KEPT}: number {int(kept.max()):,} is beyond the source's tokens.")
        try:
            files = dense.rewritten(here)
        except (KeyError, ValueError) as error:  # numbers that stay without which no tokenizer is
            problems.append(f"{KEPT}: leaves out what the source's tokenizer needs ({printable(str(error), 100)}).")
        parts = {name: Part(name, cuts) for name, cuts in cuts_of(dense, here).items()}
        return Beside(dense.checkpoint, parts, (), files, [*problems, *_about_texts(checkpoint, dense, here)])

    return Structure(checkpoint, beside, KEPT, problems=[*_about_sizes(checkpoint, read, kept)])


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
    for name, shorter in read.inners_named("shorter"):
        at = shorter.take("dimension", int, least=0, most=1)
        entry = checkpoint.entries.get(name)
        if entry is None:
            yield f"{printable(name)}: became shorter, {RECORD} says; it is not here."
        elif at >= len(entry.shape) or entry.shape[at] != size:
            yield f"{printable(name)}: has shape {entry.shape}; {RECORD} claims {size:,} tokens."
    try:
        tokens = read_tokens(checkpoint.root)
    except CheckpointError as error:
        yield str(error)
        return
    if not {*tokens.by_id} <= set(range(len(kept))):
        yield f"the tokenizer has numbers up to {tokens.size - 1:,}; {KEPT} names {len(kept):,} that stayed."


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
