"""Text to train on that the teacher writes itself, where none is given: `Sampled`.

Law: what is written follows from the teacher, the request and the seed; the generators of the process stay as they are.

As LLM-QAT (Liu et al. 2023, arXiv:2305.17888) trains on, but drawn at temperature 1 from the first token on: what the
teacher finds likely, as often as it does. An end of a text is a token like others, and the next text follows it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise import longest_sequence
from secateur.checkpoints import CheckpointError
from secateur.recovery.losses import NO_TEXT
from secateur.support import device_of, in_mode, track

__all__ = ["Sampled", "check_text", "load_text", "sampled", "save_text", "writes_text"]

LENGTH = 512  # tokens of a sequence, or fewer where the model takes fewer
TOGETHER = 32  # sequences are drawn at a time, by a seed of their own: a run that was stopped goes on after them


@dataclass(frozen=True)
class Sampled:
    """Requests training text that is sampled from the teacher, in place of batches.

    Args:
        samples: how many sequences.
        length: tokens in each; None: 512, or fewer where the model takes fewer.
        size: sequences in a batch.
    """

    samples: int = 512
    length: int | None = None
    size: int = 8

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if (value is not None or name != "length") and (type(value) is not int or value < 1 + (name == "length")):
                raise ValueError(f"{name} is a whole number, {1 + (name == 'length')} or more; got {value!r}.")

    def of(self, teacher: nn.Module) -> Sampled:
        """With the length that this teacher's sequences have.

        Raises:
            ValueError: it writes no text, or none so long.
        """
        config: Any = getattr(teacher, "config", None)
        if not writes_text(teacher):
            raise ValueError(
                f"no text is given, and a {type(teacher).__name__} writes none of its own, from which this could be "
                "learned: pass batches=, of a directory --data FILE."
            )
        most = longest_sequence(config.to_dict())
        length = min(LENGTH, most or LENGTH) if self.length is None else self.length
        if most is not None and length > most:
            raise ValueError(f"length={length}, but a {type(teacher).__name__} takes {most} tokens at most.")
        return Sampled(self.samples, length, self.size)

    def batches(self, rows: Tensor) -> list[dict[str, Tensor]]:
        """The rows as token batches."""
        return [{"input_ids": rows[at : at + self.size]} for at in range(0, len(rows), self.size)]


def writes_text(model: nn.Module) -> bool:
    """Whether it is a causal language model of transformers, whose logits are of the next token.

    >>> writes_text(nn.Linear(2, 2))
    False
    """
    config: Any = getattr(model, "config", None)
    can = getattr(model, "can_generate", None)
    return config is not None and can is not None and bool(can()) and not getattr(config, "is_encoder_decoder", False)


def check_text(model: nn.Module, batches: Any, share: float) -> None:
    """`ValueError` where a share of the loss is to be the text's own, and there is none: known before anything runs of
    a list of batches."""
    first = batches[0] if isinstance(batches, Sequence) and len(batches) else None
    labelled = isinstance(first, Mapping) and "labels" in first
    if share < 1 and first is not None and not labelled and not writes_text(model):
        raise ValueError(NO_TEXT)


def sampled(
    teacher: Any,
    asked: Sampled,
    seed: int,
    start: Tensor | None = None,
    after: Callable[[Tensor], None] = lambda _rows: None,
) -> Tensor:
    """(samples, length) of int64.

    Args:
        teacher: a causal language model of transformers.
        asked: `Sampled.of` it.
        seed: of what is drawn.
        start: the first rows, drawn already.
        after: called with all rows so far when some more are there.
    """
    rows = torch.empty(0, asked.length or LENGTH, dtype=torch.int64) if start is None else start
    parts = [rows]
    for at in track(range(len(rows), asked.samples, TOGETHER), "sampling from the teacher"):
        parts.append(_drawn(teacher, min(TOGETHER, asked.samples - at), asked.length or LENGTH, seed + at))
        after(torch.cat(parts))
    return torch.cat(parts)


@torch.no_grad()
def _drawn(teacher: Any, count: int, length: int, seed: int) -> Tensor:
    from transformers import GenerationConfig

    device = device_of(teacher) or torch.device("cpu")
    own = teacher.generation_config
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), in_mode(teacher, training=False):
        torch.manual_seed(seed % (1 << 63))
        first = _first(teacher, count).to(device)
        # what a directory says of chats, such as a lower temperature or words that are never said, is left out
        kind: Any = GenerationConfig
        teacher.generation_config = kind(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length - 1)
        try:
            found: Tensor = teacher.generate(first, attention_mask=torch.ones_like(first))
        finally:
            teacher.generation_config = own
    return found.cpu()


def _first(teacher: Any, count: int) -> Tensor:
    """The token that a text begins with; where the model knows none, each begins with one of all."""
    for name in ("bos_token_id", "eos_token_id"):
        for config in (teacher.generation_config, teacher.config):
            token = getattr(config, name, None)
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int):
                return torch.full((count, 1), token)
    return torch.randint(int(teacher.config.vocab_size), (count, 1))


# ---- in a file, for a run that goes on ------------------------------------------------------------------------------


def save_text(path: Path, rows: Tensor, said: dict[str, Any]) -> None:
    """Writes what is drawn so far."""
    from safetensors.torch import save_file

    text = json.dumps(said, sort_keys=True)
    save_file({"tokens": rows.contiguous()}, path, metadata={"asked": text, "sha256": _digest(rows, text)})


def load_text(path: Path, asked: Sampled, said: dict[str, Any], vocabulary: int, hint: str = "") -> Tensor:
    """What an earlier run drew.

    Raises:
        CheckpointError: the file is damaged, or of another run.
    """
    from safetensors import SafetensorError, safe_open

    text = json.dumps(said, sort_keys=True)
    try:
        with safe_open(path, framework="pt") as file:
            rows: Tensor = file.get_tensor("tokens")
            found = file.metadata() or {}
        if found.get("asked") != text:
            raise ValueError("it is of another request")
        if found.get("sha256") != _digest(rows, text):
            raise ValueError("its SHA-256 is not that of what it holds")
        if rows.dtype != torch.int64 or rows.dim() != 2 or rows.shape[1] != asked.length or len(rows) > asked.samples:
            raise ValueError(f"it holds {tuple(rows.shape)} of {rows.dtype}")
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < vocabulary:
            raise ValueError("it holds tokens that the teacher has not")
    except (SafetensorError, ValueError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: the text of a run that was stopped, and damaged ({error}).{hint}") from None
    whole = len(rows) == asked.samples
    return rows if whole else rows[: len(rows) // TOGETHER * TOGETHER]


def _digest(rows: Tensor, text: str) -> str:
    total = hashlib.sha256(f"{text}{tuple(rows.shape)}".encode())
    total.update(rows.contiguous().numpy().data if rows.numel() else b"")
    return total.hexdigest()
