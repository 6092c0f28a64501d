"""Calibration text for a directory: the options that say which, declared once, and what is made of them.

Law: a model of repeated blocks does not shrink without data unless that is asked for by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from secateur.cli.runs import join_processes, read_text, resumable, warnings_as_lines

__all__ = ["Data", "calibration"]

Data = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Calibration text, .txt or .jsonl; or random, for tokens without sense. For a directory.",
        show_default=False,
    ),
]


@contextlib.contextmanager
def calibration(
    directory: Path,
    data: str | None,
    *,
    samples: int,
    sequence_length: int | None,
    seed: int,
    activations: Path | None,
    device: str | None,
    repair: bool,
    without_data: bool,
) -> Iterator[dict[str, Any]]:
    """What `shrink_checkpoint` is given of it: the batches, and where they are run; nothing without data.

    Raises:
        ValueError: there is no data, a model of repeated blocks, and no word that this is meant.
    """
    if data is None:
        if not without_data:
            _ask_for_data(directory)
        yield {}
        return
    if without_data:
        raise ValueError("--data names a text, and --without-data says that there is none: leave one of them out.")
    with resumable():
        join_processes(device)
        with warnings_as_lines():
            batches = read_text(directory, data, samples=samples, sequence_length=sequence_length, seed=seed)
        yield {"batches": batches, "repair": repair, "activations": activations, "device": device}


def _ask_for_data(directory: Path) -> None:
    from secateur.blockwise import find_blocks
    from secateur.checkpoints import meta_model_of, open_checkpoint

    model = meta_model_of(open_checkpoint(directory))
    try:
        find_blocks(model)
    except ValueError:
        return
    reads = getattr(model, "main_input_name", None) == "input_ids"
    how = "pass --data FILE, a .txt or .jsonl" if reads else "load the model and call shrink(..., batches=...)"
    raise ValueError(
        f"{directory}: {type(model).__name__} is made of repeated blocks, which do not survive a choice by their "
        "weights alone: without 10% of SmolLM2-135M perplexity goes from 15 to 325 000; where a text chooses and "
        f"repairs, to 15.6. So {how}; or say --without-data, to train it afterwards."
    )
