"""Models that are a table of tokens and no more, of whose rows a text's mean is its vector. A directory of which tokens
leave: tokenizer, configurations, and the rows of tensors in shards. What the ``secateur.json`` of a directory claims
of which tokens left.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from secateur.checkpoints import (
    HINT,
    RECORD,
    Beside,
    Checkpoint,
    CheckpointError,
    Cuts,
    Part,
    Structure,
    copy_others,
    family_of,
    meta_model_of,
    nbytes_of_cut,
    new_directory,
    open_checkpoint,
    other_weights,
    places,
    previous_record,
    record_text,
    shape_of_cut,
    write_sliced,
)
from secateur.support import Fields, printable, private, tensors_of
from secateur.vocabulary.axes import Axes, axes_of, builder, embedding_of
from secateur.vocabulary.choosing import Asked, Rows, rows_in_files
from secateur.vocabulary.files import (
    by_transformers,
    is_static,
    model_folder,
    needed_in,
    of_tokenizer,
    read_tokens,
    rewritten,
)
from secateur.vocabulary.planning import (
    Planned,
    Texts,
    agree,
    encoding,
    planned,
    positions_begin_behind,
    random_texts,
    renaming,
)
from secateur.vocabulary.result import ShrunkVocabulary
from secateur.vocabulary.tokens import Ids, Tokens

# ---- Models that are a table of tokens and no more, of whose rows a text's mean is its vector.
#
# Law: such a directory has one tensor, with a row for each token, and no configuration that counts them.

TABLES = ("embedding.weight", "embeddings")  # as sentence-transformers writes it, and model2vec


class Table(nn.Module):
    """The table, without values; it says of itself what a model of transformers does."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, device="meta"), requires_grad=False)
        self.config: Any = SimpleNamespace()

    def get_input_embeddings(self) -> nn.Module:
        return self


def table_of(checkpoint: Checkpoint, tokens: Tokens) -> tuple[Table, Axes, dict[str, str]]:
    """The table in the files of a directory, what counts tokens in it, and the table's name for the tensor.

    Raises:
        CheckpointError: there are other tensors, or not a row for each token.
    """
    found = list(checkpoint.entries.items())
    if len(found) != 1 or found[0][0] not in TABLES or len(found[0][1].shape) != 2:
        names = ", ".join(printable(name) for name, _ in found[:3]) or "no tensor"
        raise CheckpointError(f"{checkpoint.root}: holds {names}, and not one table of tokens, {' or '.join(TABLES)}.")
    ((name, entry),) = found
    rows, width = entry.shape
    if tokens.size > rows:
        raise CheckpointError(
            f"{entry.path}: {name} has {rows:,} rows; the tokenizer has numbers up to {tokens.size - 1:,}."
        )
    return Table(rows, width), Axes(rows, (), {"weight": 0}, (), {"weight": (rows, width)}), {name: "weight"}


# ---- A directory of which tokens leave: tokenizer, configurations, and the rows of tensors in shards.
#
# Law: every tensor that does not count tokens has the bytes that it had, every other the rows of the tokens that
# stay; no more than a piece of one is in memory, and the output appears under its name complete or not at all.

KEPT = "vocabulary.json"
FORMAT = "secateur vocabulary"
_TRIED = 500  # texts of each kind that transformers' tokenizers are compared on


@dataclass(frozen=True)
class Source:
    """A directory as it is.

    Attributes:
        root: the directory.
        checkpoint: of the model's folder, the same or one in it.
        model: on the meta device; of a table of tokens that alone.
        axes: what counts tokens in the model.
        names: the model's name of each tensor in the files that counts tokens.
        tokens: of its tokenizer.
        loaded: the tokenizer as transformers loads it; None where it does not, or nobody has it do so.
        left_whole: tensors in the files that are as long and no part of the model.
    """

    root: Path
    checkpoint: Checkpoint
    model: Any
    axes: Axes
    names: Mapping[str, str]
    tokens: Tokens
    loaded: Any
    left_whole: tuple[str, ...]

    def needed(self) -> set[int]:
        """The numbers that stay whatever is asked: those that a configuration, a template or a class names."""
        found = needed_in(self.checkpoint.root, self.tokens, self.model.config, self.axes)
        every = {**self.tokens.model, **self.tokens.added}
        special = () if self.loaded is None else self.loaded.all_special_tokens
        found |= {every[str(token)] for token in special if str(token) in every}
        padding = getattr(self.model.config, "pad_token_id", None)
        return found | positions_begin_behind(self.model, self.axes, padding)

    def rows(self) -> Rows:
        """The rows of its embedding."""
        embedding = embedding_of(self.model)
        mine = {name for name, tensor in tensors_of(self.model).items() if tensor is embedding}
        return rows_in_files(self.checkpoint, [name for name, each in self.names.items() if each in mine])

    def rewritten(self, order: Ids) -> dict[Path, str | None]:
        """What files say once tokens have left, by their relative paths."""
        place = self.checkpoint.root.relative_to(self.root)
        if self.axes.places:
            found = rewritten(self.checkpoint, self.tokens, order, self.model.config, self.axes)
        else:  # no configuration counts them
            found = of_tokenizer(self.checkpoint.root, self.tokens, order)
        return {place / path: text for path, text in found.items()}


def source_of(root: Path) -> Source:
    """A directory, read as far as its headers.

    Raises:
        CheckpointError: it is damaged, has no tokenizer that can be rewritten, or is not what its configuration says.
    """
    folder = model_folder(root)
    checkpoint = open_checkpoint(folder)
    tokens = read_tokens(folder)
    loaded = None
    if is_static(root):
        return Source(root, checkpoint, *table_of(checkpoint, tokens), tokens, loaded, ())
    model: Any = meta_model_of(checkpoint)
    kind, _ = family_of(checkpoint)
    try:
        axes = axes_of(model, builder(kind))
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
    names, left_whole = _named_in_files(checkpoint, model, axes)
    with contextlib.suppress(CheckpointError):
        loaded = by_transformers(folder)
    return Source(root, checkpoint, model, axes, names, tokens, loaded, left_whole)


def shrink_vocabulary_directory(
    source: Path | str, out: Path | str | None, texts: Texts | None, wanted: Asked
) -> ShrunkVocabulary:
    """`shrink_vocabulary` of a directory into another one, a piece of a tensor in memory at a time."""
    started = time.monotonic()
    root, out = places(source, out)
    dense = source_of(root)
    previous = previous_record(root)
    plan = planned(dense.tokens, texts, wanted, dense.needed(), dense.axes.rows, str(dense.checkpoint.root), dense.rows)
    done = _outcome(dense, plan, out, started)
    if out is None:
        return done
    with new_directory(out) as temporary:
        proof = _write(dense, plan, done, temporary, previous)
    return replace(done, proof=proof, seconds=time.monotonic() - started)


def cuts_of(dense: Source, order: Ids) -> dict[str, Cuts]:
    """What stays of each tensor in the files that counts tokens."""
    rows = order[order < dense.axes.rows]
    return {name: {dense.axes.tensors[mine]: rows} for name, mine in dense.names.items()}


def _named_in_files(checkpoint: Checkpoint, model: nn.Module, axes: Axes) -> tuple[dict[str, str], tuple[str, ...]]:
    """The model's name of each tensor in the files that counts tokens; and which are as long without being the model's.

    As `from_pretrained` finds them: under their names, with or without the prefix of the model inside, or as
    transformers' loader renames them; else the one tensor whose name ends alike and that has the shape.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found: dict[str, str] = {}
    unknown: list[str] = []
    for name, entry in checkpoint.entries.items():
        mine = next((each for each in (name, prefix + name, name.removeprefix(prefix)) if each in axes.shapes), None)
        if mine is None:
            unknown += [name] if axes.rows in entry.shape else []
        elif mine in axes.tensors:
            if entry.shape != axes.shapes[mine]:
                raise CheckpointError(
                    f"{entry.path}: {printable(name)} has shape {entry.shape}, in {type(model).__name__} as "
                    f"config.json says it {axes.shapes[mine]}."
                )
            found[name] = mine
    if unknown:
        for mine, (conversion, parts) in private.loaded_as(model, unknown, tensors_of(model)).items():
            name = parts[0][0]
            if mine in axes.tensors and conversion is None and checkpoint.entries[name].shape == axes.shapes[mine]:
                found[name] = mine
                unknown.remove(name)
    for names in _aliases(model, axes):
        if not any(mine in names for mine in found.values()):
            alike = [
                (each, mine)
                for mine in names
                for each in unknown
                if checkpoint.entries[each].shape == axes.shapes[mine] and each.split(".")[-2:] == mine.split(".")[-2:]
            ]
            if len({each for each, _ in alike}) != 1:
                if _is_buffer(model, names[0]):  # that the model makes itself
                    continue
                raise CheckpointError(
                    f"{checkpoint.root}: {names[0]} of {type(model).__name__}, which has a row for each token, is not "
                    "in the files. Load the model and save it, so that names are those of this transformers."
                )
            found[alike[0][0]] = alike[0][1]
            unknown.remove(alike[0][0])
    for name in found:
        if checkpoint.entries[name].torch_dtype is None:
            raise CheckpointError(f"{printable(name)} is of a dtype that this torch cannot read; save it in another.")
    return found, tuple(unknown)


def _aliases(model: nn.Module, axes: Axes) -> Iterator[list[str]]:
    """The names of each tensor that counts tokens."""
    every: dict[int, list[str]] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        if name in axes.tensors:
            every.setdefault(id(tensor), []).append(name)
    yield from every.values()


def _is_buffer(model: nn.Module, name: str) -> bool:
    return name in dict(model.named_buffers())


def _outcome(dense: Source, plan: Planned, out: Path | None, started: float) -> ShrunkVocabulary:
    entries, cuts = dense.checkpoint.entries, cuts_of(dense, plan.order)
    shapes = {name: shape_of_cut(entry, cuts.get(name, {})) for name, entry in entries.items()}
    files = dense.rewritten(plan.order)
    place = dense.checkpoint.root.relative_to(dense.root)
    config = json.loads(files.get(place / "config.json") or "{}")
    skipped = {path for path, text in files.items() if text is None} | {*other_weights(dense.checkpoint, dense.root)}
    return ShrunkVocabulary(
        plan.order,
        dense.tokens.kind,
        (dense.axes.rows, int((plan.order < dense.axes.rows).sum())),
        (sum(each.numel for each in entries.values()), sum(map(math.prod, shapes.values()))),
        (dense.checkpoint.nbytes, sum(nbytes_of_cut(each, shapes[each.name]) for each in entries.values())),
        dict(_changes(dense.checkpoint.config, config)),
        {name: next(iter(each)) for name, each in cuts.items()},
        None if plan.counted is None else plan.counted.words,
        None if plan.counted is None or plan.after is None else (plan.counted.tokens, plan.after),
        plan.seen,
        plan.unseen,
        plan.proof,
        time.monotonic() - started,
        plan.counting,
        plan.gone,
        out,
        tuple(sorted(skipped)),
        dense.left_whole,
        plan.sample,
        reach=plan.reach(dense.axes.rows),
    )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            yield from _changes(old, value, f"{place}{key}.")
        elif old != value:
            yield f"{place}{key}", (old, value)


def _write(
    dense: Source,
    plan: Planned,
    done: ShrunkVocabulary,
    target: Path,
    previous: Mapping[str, Any] | None,
) -> str:
    """The directory; returns on what the law was seen, in words."""
    files = dense.rewritten(plan.order)
    copy_others(dense.checkpoint, target, {*done.left_out, *files}, root=dense.root)
    for path, text in files.items():
        if text is not None:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_text(text, "utf-8")
    cuts = cuts_of(dense, plan.order)
    write_sliced(
        dense.checkpoint,
        target / dense.checkpoint.root.relative_to(dense.root),
        {name: (name, cuts.get(name, {})) for name in dense.checkpoint},
        nbytes=done.nbytes[1],
        parameters=done.parameters[1],
    )
    proof = f"{plan.proof}; {_by_transformers(dense, plan, target)}"
    kept = {"format": FORMAT, "version": 1, "kept": [int(number) for number in plan.order]}
    (target / KEPT).write_text(json.dumps(kept), "utf-8")
    found = {
        "tokens": {"from": done.rows[0], "to": done.rows[1]},
        "parameters": {"from": done.parameters[0], "to": done.parameters[1]},
        "config": {name: {"from": before, "to": after} for name, (before, after) in done.fields.items()},
        "shorter": {name: {"dimension": at} for name, at in done.tensors.items()},
        "proof": proof,
    }
    (target / RECORD).write_text(record_text("vocabulary", found, previous=previous), "utf-8")
    return proof


def _by_transformers(dense: Source, plan: Planned, target: Path) -> str:
    """The law, seen through the tokenizers that transformers loads of both directories.

    Raises:
        ValueError: it does not hold, or the new one cannot be loaded where the old one could.
    """
    place = dense.checkpoint.root.relative_to(dense.root)
    before = dense.loaded
    if before is None:
        return "no tokenizer that transformers loads"
    try:
        after = by_transformers(target / place)
    except CheckpointError as error:
        raise ValueError(f"transformers loads the source's tokenizer, and not the smaller one: {error}") from None
    texts = [*([] if plan.counted is None else plan.counted.passages[:_TRIED]), *plan.random[:_TRIED]]
    old = [np.array(each, dtype=np.int64) for each in before(texts, verbose=False)["input_ids"]]

    def encode(some: Any) -> list[Ids]:
        return [np.array(each, dtype=np.int64) for each in after(list(some), verbose=False)["input_ids"]]

    right, _ = agree(texts, old, encode, plan.new, f"{dense.root}: what transformers makes")
    return f"on {right:,} of {len(texts):,} as transformers loads both"


# ---- What the ``secateur.json`` of a directory claims of which tokens left.
#
# Law: every tensor holds the rows of the source's that the kept numbers name, byte for byte; every file that numbers
# tokens is what the source's becomes by them; and the two tokenizers make the same of texts whose tokens all stay.


def structure_of(directory: Path, read: Fields) -> Structure:
    """What the record of `shrink_vocabulary` claims."""
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
        read = Fields.read(path, error=CheckpointError, hint=HINT).of_format(FORMAT, 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; it says which tokens stayed.") from None
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
