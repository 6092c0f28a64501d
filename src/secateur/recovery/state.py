"""What a run by the outputs goes on from, in one file: the parameters, what the optimizer remembers, the losses so far.

Law: what was saved is what is read, to the bit, or it is an error of one line; nothing in the file is run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.checkpoints import CheckpointError
from secateur.recovery.outputs import Steps
from secateur.support import Fields

__all__ = ["load_state", "save_state"]


def save_state(path: Path, steps: Steps) -> None:
    """Writes where the steps are."""
    from safetensors.torch import save_file

    tensors = {name: value.contiguous().cpu() for name, value in steps.descent.state().items()}
    said = {"done": steps.descent.done, "losses": steps.losses, "rows": steps.rows, "loss": steps.word}
    text = json.dumps(said, allow_nan=False)
    save_file(tensors, path, metadata={"steps": text, "sha256": _digest(tensors, text)})


def load_state(path: Path, steps: Steps, hint: str = "") -> None:
    """Goes on from there.

    Raises:
        CheckpointError: the file is damaged, or of another run.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            said: Mapping[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        text = said.get("steps", "")
        if said.get("sha256") != _digest(tensors, text):
            raise ValueError("its SHA-256 is not that of what it holds")
        found: Any = json.loads(text)
    except (SafetensorError, ValueError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: the state of a run that was stopped, and damaged ({error}).{hint}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: the state of a run that was stopped, and damaged (no fields).{hint}")
    fields = Fields(found, path, error=CheckpointError, hint=hint)
    done = fields.take("done", int, least=0, most=steps.descent.steps)
    losses = fields.each("losses", float)
    if len(losses) != done or not all(map(math.isfinite, losses)):
        raise fields.wrong("losses", f"is not one for each of {done} steps")
    try:
        steps.descent.load(tensors, done)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; it is of another run.{hint}") from None
    steps.losses, steps.rows = list(losses), fields.take("rows", int, least=0)
    if steps.loss is None:
        steps.loss = fields.take("loss", str)


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        total.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
