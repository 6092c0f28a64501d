"""``secateur.json``: what a directory says of how it was pruned, and where it may be written.

Law: a record is JSON, without NaN or infinity, and the same call on the same files writes the same bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from secateur.checkpoints.headers import CheckpointError
from secateur.support import printable, records
from secateur.version import __version__

__all__ = [
    "RECORD",
    "check_arguments",
    "check_new",
    "check_places",
    "library_versions",
    "places",
    "previous_record",
    "record_text",
]

RECORD = "secateur.json"


def record_text(
    method: str,
    found: Mapping[str, Any],
    *,
    arguments: Mapping[str, Any] | None = None,
    previous: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
) -> str:
    """What ``secateur.json`` holds; `ValueError` for NaN or infinity, which Python writes though JSON has none.

    No time and no path of our own: the same call on the same files writes the same bytes.

    Args:
        method: the verb.
        found: what it says of the result.
        arguments: how it was called, see `check_arguments`.
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
        "arguments": dict(arguments or {}),
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


def check_arguments(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments that a record shall name, if it can: before anything is done.

    Raises:
        ValueError: NaN or infinity is among them, or what is no value of JSON.

    >>> check_arguments({"sparsity": float("nan")})
    Traceback (most recent call last):
    ValueError: arguments= is what secateur.json shall say, as JSON: sparsity cannot be, nan.
    """
    for name, value in (arguments or {}).items():
        try:
            json.dumps({name: value}, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            what = printable(repr(value), 60)
            raise ValueError(f"arguments= is what {RECORD} shall say, as JSON: {name} cannot be, {what}.") from None
    return dict(arguments or {})


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


def places(
    source: Path | str, out: Path | str | None, arguments: Mapping[str, Any] | None
) -> tuple[Path, Path | None, dict[str, Any]]:
    """The checked ``source`` and ``out`` of a verb, and its arguments for the record.

    Raises:
        CheckpointError: as `check_places` and `check_new`.
        ValueError: as `check_arguments`.
    """
    root, out = Path(source), None if out is None else Path(out)
    said = check_arguments(arguments)
    check_places(root, root.parent / f"{root.name}.smaller" if out is None else out)
    if out is not None:
        check_new(out)
    return root, out, said


def check_new(out: Path) -> None:
    """`CheckpointError` unless a directory of this name can be made."""
    if os.path.lexists(out):
        raise CheckpointError(f"{out}: already exists; nothing is overwritten. Choose another name, or remove it.")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out.parent}: no such directory; create it first.")


def check_places(source: Path, out: Path) -> None:
    """`CheckpointError` unless ``source`` is a directory and ``out`` lies outside it."""
    if not source.exists():
        raise CheckpointError(f"{source}: no such directory.")
    if not source.is_dir():
        raise CheckpointError(f"{source}: not a directory; put the file into one, with its config.json.")
    here = out.parent.resolve() / out.name
    if here == source.resolve():
        raise CheckpointError(f"{out}: the output would replace the input; choose another directory.")
    if here.is_relative_to(source.resolve()):
        raise CheckpointError(f"{out}: lies inside the input {source}; choose a directory outside.")
