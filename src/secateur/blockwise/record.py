"""``secateur.json`` in a directory that `oneshot` pruned, and what its journal is begun with.

Law: no time and no path of our own: the same call on the same files writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from secateur.blockwise.directory import BlockFiles
from secateur.blockwise.journal import Unfinished
from secateur.blockwise.outcome import OneShot
from secateur.blockwise.request import Request, digest
from secateur.checkpoints import RECORD, inspect_checkpoint, library_versions, record_text
from secateur.patterns import NM, Rows, Unstructured

__all__ = ["said_of", "write_record"]


def said_of(request: Request, batches: Iterable[Any]) -> dict[str, Any]:
    """As JSON: what the bytes of a pruned directory depend on, but for the source's files."""
    return {"data": digest(batches), **request.described(), "versions": library_versions()}


def write_record(
    run: Unfinished,
    done: OneShot,
    request: Request,
    said: Mapping[str, Any],
    files: BlockFiles,
    previous: Mapping[str, Any] | None,
) -> None:
    """Writes ``secateur.json`` into the copy.

    Names are those of the tensors in files, but under ``layers``, where they are the model's. ``removed`` leaves out
    what stands in several tensors of the file and competed as one, where the pattern counts units. ``previous`` is the
    record of the source, and ``said`` what the journal was begun with.
    """
    pruned = {name: found for block in run.blocks for name, found in block["tensors"].items()}
    alone = {
        name for name in pruned if isinstance(request.pattern, Unstructured | Rows | NM) or files.stands_alone(name)
    }
    record = {
        "solver": said["solver"],
        "kept_weights": "unchanged" if all(found["kept_as_they_were"] for found in pruned.values()) else "updated",
        "pattern": said["pattern"],
        "allocate": said["allocate"],
        "stages": said["stages"],
        "aim": said["aim"],
        "data": {"sha256": said["data"]},
        "sparsity": {"targets": done.sparsity, "model": inspect_checkpoint(run.folder).total().sparsity},
        "pruned": {name: found["sparsity"] for name, found in pruned.items()},
        "removed": {name: found["removed"] for name, found in pruned.items() if name in alone},
        "layers": {
            layer.name: {
                "sparsity": layer.sparsity,
                "error": layer.error,
                "tokens": layer.tokens,
                "without_tokens": list(layer.without_tokens),
            }
            for layer in done.layers
        },
        "warnings": list(done.warnings),
        "left_alone": files.left_alone(pruned, done.left_alone),
    }
    text = record_text(
        "oneshot",
        record,
        arguments=request.arguments,
        previous=previous,
        versions={"transformers": said["versions"]["transformers"]},
    )
    run.add(RECORD, text)
