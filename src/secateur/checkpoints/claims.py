"""What the records of all verbs claim alike of a directory, seen again on what is stored.

Law: what does not hold is a sentence; only a record that is damaged or of something else is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from secateur.checkpoints.headers import CheckpointError
from secateur.checkpoints.reading import Checkpoint
from secateur.checkpoints.record import RECORD
from secateur.support import Fields, printable

__all__ = ["HINT", "about_config", "about_parameters", "claims_of", "is_made_by"]

HINT = " It is not the record of this model, or no longer."


def claims_of(directory: Path) -> Fields:
    """The fields of a directory's record."""
    return Fields.read(directory / RECORD, error=CheckpointError, hint=HINT, finite=False)


def is_made_by(directory: Path | str, method: str) -> bool:
    """Whether there is a record, and of this method."""
    directory = Path(directory)
    return (directory / RECORD).is_file() and claims_of(directory).values.get("method") == method


def about_parameters(checkpoint: Checkpoint, claims: Fields) -> Iterator[str]:
    """How many parameters there are, if the record says another number."""
    claimed = claims.inner("parameters").take("to", int, least=0)
    if (counted := sum(entry.numel for entry in checkpoint.entries.values())) != claimed:
        yield f"the files hold {counted:,} parameters; {RECORD} claims {claimed:,}."


def about_config(checkpoint: Checkpoint, claims: Fields) -> Iterator[str]:
    """The fields of ``config.json`` that are not what the record says they became."""
    for place, change in claims.inners_named("config"):
        wanted, value = change.values.get("to"), _at(checkpoint.config, place.split("."))
        if value != wanted:
            yield f"config.json: {printable(place)} is {printable(str(value), 60)}, not {printable(str(wanted), 60)}."


def _at(values: Any, place: list[str]) -> Any:
    for key in place:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
