"""``secateur.json``: what a directory says of how it was pruned, and where it may be written. What ``secateur.json``
claims, each value held to its type: of zeros, and of which tensor of a source each one is.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from secateur.checkpoints.families import family_of
from secateur.checkpoints.reading import Checkpoint, CheckpointError, open_checkpoint
from secateur.checkpoints.slicing import Cuts, Write, write_cut
from secateur.patterns import NM, Block, Channels, GroupedColumns, Pattern, Rows, Unstructured, parse, word_of
from secateur.support import Fields, printable, records
from secateur.version import __version__

# ---- ``secateur.json``: what a directory says of how it was pruned, and where it may be written.
#
# Law: a record is JSON, without NaN or infinity, and the same call on the same files writes the same bytes.

RECORD = "secateur.json"


def record_text(
    method: str,
    found: Mapping[str, Any],
    *,
    previous: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
) -> str:
    """What ``secateur.json`` holds; `ValueError` for NaN or infinity, which Python writes though JSON has none.

    No time and no path of our own: the same call on the same files writes the same bytes. How the verb was called is
    said by `called_as`.

    Args:
        method: the verb.
        found: what it says of the result.
        previous: of the source, see `previous_record`.
        versions: of what else the result depends on, beside this library and torch.

    >>> json.loads(record_text("sparsify", {"sparsity": 0.5}))["sparsity"]
    0.5
    """
    record = {
        "secateur": __version__,
        "torch": torch.__version__,
        **(versions or {}),
        "method": method,
        "arguments": dict(_CALLED_AS.get()),
        **found,
    }
    if previous is not None:
        record["previous"] = previous
    return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def library_versions() -> dict[str, str]:
    """The versions of the libraries on which the bytes of a written directory depend; a continued run needs the same.

    >>> [*library_versions()]
    ['secateur', 'torch', 'transformers']
    """
    import transformers

    return {"secateur": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


_CALLED_AS: ContextVar[Mapping[str, Any]] = ContextVar("called_as", default=MappingProxyType({}))


@contextlib.contextmanager
def called_as(arguments: Mapping[str, Any]) -> Iterator[None]:
    """A context in which ``secateur.json`` says that a verb was called with these arguments, as commands do. A verb
    raises `ValueError` before anything is done where one is NaN, infinite, or no value of JSON.

    >>> with called_as({"sparsity": 0.5}):
    ...     json.loads(record_text("sparsify", {}))["arguments"]
    {'sparsity': 0.5}
    """
    token = _CALLED_AS.set(arguments)
    try:
        yield
    finally:
        _CALLED_AS.reset(token)


def previous_record(source: Path) -> dict[str, Any] | None:
    """What ``secateur.json`` says of a source that was pruned before, which the next one carries on; NaN, which is no
    JSON, as None."""
    path = source / RECORD
    if not path.exists():
        return None
    hint = " It is not the record of a pruned model; remove it, or put the right one there."
    found = records.read_json(path, error=CheckpointError, hint=hint, finite=False)
    return {key: _finite(value) for key, value in found.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value


def places(source: Path | str, out: Path | str | None) -> tuple[Path, Path | None]:
    """The checked ``source`` and ``out`` of a verb.

    Raises:
        CheckpointError: as `check_places` and `check_new`.
    """
    root, out = Path(source), None if out is None else Path(out)
    check_places(root, root.parent / f"{root.name}.smaller" if out is None else out)
    if out is not None:
        check_new(out)
    return root, out


def check_new(out: Path) -> None:
    """`CheckpointError` unless a directory of this name can be made."""
    if os.path.lexists(out):
        raise CheckpointError(f"{out}: already exists; nothing is overwritten. Choose another name, or remove it.")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out.parent}: no such directory; create it first.")


def check_places(source: Path, out: Path) -> None:
    """`CheckpointError` unless ``source`` is a directory and ``out`` lies outside it; `ValueError` unless a record can
    say how the verb was called (`called_as`)."""
    for name, value in _CALLED_AS.get().items():
        try:
            json.dumps({name: value}, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            what = printable(repr(value), 60)
            raise ValueError(f"{RECORD} is JSON and cannot say of the arguments: {name} is {what}.") from None
    if not source.exists():
        raise CheckpointError(f"{source}: no such directory.")
    if not source.is_dir():
        raise CheckpointError(f"{source}: not a directory; put the file into one, with its config.json.")
    here = out.parent.resolve() / out.name
    if here == source.resolve():
        raise CheckpointError(f"{out}: the output would replace the input; choose another directory.")
    if here.is_relative_to(source.resolve()):
        raise CheckpointError(f"{out}: lies inside the input {source}; choose a directory outside.")


# What ``secateur.json`` claims, each value held to its type: of zeros, and of which tensor of a source each one is.
#
# Law: what does not hold is a sentence; only a record that is damaged or of something else is an error.
#
# A record that claims zeros. Other keys are ignored::
#
#     {
#       "method": "oneshot",
#       "kept_weights": "updated",
#       "pattern": "2:4",
#       "pruned": {"a.weight": 0.5},
#       "removed": {"a.weight": 512},
#       "left_alone": {"why": ["b"]},
#       "sparsity": {"targets": 0.5, "model": 0.4}
#     }
#
# - ``kept_weights``: "unchanged" where the kept weights have the source's bytes, as by a mask alone; "updated" where
#   they may have changed. Left out: unchanged if ``method`` is "sparsify" or left out, else updated.
# - ``pattern``: a word of `secateur.patterns.parse`, or the repr of one of the library's patterns, such as
#   "NM(n=2, m=4, axis=1)". Null or left out: none is claimed.
# - ``pruned``: for each tensor whose bytes may have changed the fraction of zeros among its stored values, from which
#   the exact count follows.
# - ``removed``: how many entries a tensor's mask removes, kept zeros not counted. Rows, blocks and channels are checked
#   by it; it is left out for a tensor whose parts (experts, q/k/v) were given different sparsities.
# - ``left_alone``: the names of all other tensors, by reasons.
# - ``zeros``: of tensors that are left alone how many entries are zero and are to stay so.
# - ``sparsity``: of all pruned tensors together, and of all tensors of a dtype that torch reads.

HINT = " It is not the record of this model, or no longer."
_PATTERNS: dict[str, Callable[..., Pattern]] = {
    kind.__name__: kind for kind in (NM, Block, Channels, GroupedColumns, Rows, Unstructured)
}


def claims_of(directory: Path) -> Fields:
    """The fields of a directory's record."""
    return Fields.read(directory / RECORD, error=CheckpointError, hint=HINT, finite=False)


# ---- structure ------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """What a tensor is of the source's: its name there, which indices stay, and how these are written."""

    name: str
    cuts: Cuts = MappingProxyType({})
    write: Write = write_cut


@dataclass(frozen=True)
class Beside:
    """A source, and what is made of it.

    Attributes:
        dense: its tensors.
        parts: what each tensor is, but for those that are the source's of the same name.
        gone: tensors of the source that left.
        files: the text of files that say something else than the source's; None of those that left.
        problems: what is wrong beside.
    """

    dense: Checkpoint
    parts: Mapping[str, Part] = field(default_factory=dict)
    gone: Collection[str] = ()
    files: Mapping[Path, str | None] = field(default_factory=dict)
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class Structure:
    """What a record claims of a directory whose tensors are parts of its source's.

    Attributes:
        checkpoint: what was written.
        beside: reads the source.
        file: the name of the file that says which part each tensor is; none where each is the source's.
        moved: the tensors that have new values.
        problems, unchecked: what is wrong, or not known, without the source.
    """

    checkpoint: Checkpoint
    beside: Callable[[Path], Beside] = lambda source: Beside(open_checkpoint(source))
    file: str = ""
    moved: frozenset[str] = frozenset()
    problems: Sequence[str] = ()
    unchecked: Sequence[str] = ()


def about_parameters(checkpoint: Checkpoint, claims: Fields) -> Iterator[str]:
    """How many parameters there are, if the record says another number."""
    claimed = claims.inner("parameters").take("to", int, least=0)
    if (counted := sum(entry.numel for entry in checkpoint.entries.values())) != claimed:
        yield f"the files hold {counted:,} parameters; {RECORD} claims {claimed:,}."


def about_config(checkpoint: Checkpoint, claims: Fields, dense: Checkpoint | None = None) -> Iterator[str]:
    """The fields of ``config.json`` that are not what the record says they became, or else what the source's are."""
    changes = {place: change.values.get("to") for place, change in claims.inners_named("config")}
    ours, wanted = checkpoint.config, _changed(checkpoint.config if dense is None else dense.config, changes)
    if dense is not None and ours != wanted:
        with contextlib.suppress(Exception):  # whatever a configuration raises: then the files are compared
            (_, mine), (_, its) = family_of(checkpoint), family_of(dense)
            if _whole(ours) == (said := _whole(mine.to_dict())):  # written where the source's leaves out what changed
                ours, wanted = said, _whole(type(its).from_dict(_changed(_whole(its.to_dict()), changes)).to_dict())
    yield from (
        f"config.json: {printable(place)} is {printable(str(value), 60)}, not {printable(str(other), 60)}."
        for place, value, other in _differences(ours, wanted)
    )


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says, as a file does, but for who wrote it."""
    found = json.loads(json.dumps(dict(values), default=str))
    return {key: value for key, value in found.items() if not key.startswith("_") and key != "transformers_version"}


def _changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with fields set, by their dotted names."""
    made = copy.deepcopy(dict(values))
    for place, value in changes.items():
        held: Any = made
        *around, last = place.split(".")
        try:
            for key in around:
                held = held[int(key)] if isinstance(held, list) else held.setdefault(key, {})
            held[int(last) if isinstance(held, list) else last] = value
        except (ValueError, LookupError, TypeError, AttributeError):  # there is no such place: that is a difference
            made[place] = value
    return made


def _differences(ours: Any, wanted: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(ours, Mapping) and isinstance(wanted, Mapping):
        for key in dict.fromkeys((*wanted, *ours)):
            if not str(key).startswith("_"):  # of where it was read
                yield from _differences(ours.get(key), wanted.get(key), f"{place}.{key}" if place else str(key))
    elif ours != wanted:
        yield place, ours, wanted


# ---- zeros ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Zeros:
    """What a record claims of zeros."""

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
    def of(read: Fields) -> Zeros:
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
        return Zeros(
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
