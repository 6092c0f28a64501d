"""A run over calibration text, whatever it does to the model: its processes, its text, its warnings, its end.

Law: what is wrong is one line on stderr, and of several processes one speaks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from secateur.cli.terminal import fail

__all__ = ["join_processes", "one_process", "read_text", "resumable", "warnings_as_lines"]


def read_text(directory: Path, data: str, *, samples: int, sequence_length: int | None, seed: int) -> list[Any]:
    """The batches of ``--data``; a directory without a model is reported before a missing tokenizer."""
    from secateur.blockwise import family_of, read_calibration
    from secateur.checkpoints import open_checkpoint

    family_of(open_checkpoint(directory))
    return read_calibration(
        data, tokenizer_directory=directory, samples=samples, sequence_length=sequence_length, seed=seed
    )


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """A warning is one line on stderr, at once, without the place in the code, which is not the reader's."""
    from secateur.support import printable

    def show(message: Warning | str, *_: object) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"Warning: {printable(str(message), 400)}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show  # type: ignore[assignment]
        yield


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise fail("interrupted; run the same command again to go on.", code=130) from None


def one_process(verb: str) -> None:
    """Under torchrun an error, of a verb that shares nothing out: each process would find the others at work."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise fail(f"{verb} runs in one process; start it without torchrun.")


def join_processes(device: str | None) -> None:
    """Under torchrun, every process joins the others."""
    import torch
    from torch import distributed

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and distributed.is_available() and not distributed.is_initialized():
        on_device = device is not None and torch.device(device).type == "cuda"
        if on_device:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("nccl" if on_device else "gloo")
