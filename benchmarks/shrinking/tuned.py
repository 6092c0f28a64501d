"""What is left of the difference between models that lost units after equal plain fine-tuning.

Law: each directory's model sees the same tokens in the same order, of the modules that calibrations are drawn from, and
is judged on text that neither saw, before and after.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.shrinking.sizes import count_of
from benchmarks.support.language_models import SmolLM2, fit, next_token_loss
from benchmarks.support.tables import head, row


def tuned(dense: Path, directories: Sequence[Path], steps: int, rate: float, judged: int, seed: int) -> None:
    """A row for each directory, as soon as it is there; a step is one sequence of 512 tokens.

    Args:
        dense: the whole model, whose tokenizer and texts are taken.
        directories: what `from_pretrained` loads, such as `real --keep` leaves.
        rate: the highest of one cycle of AdamW.
        judged: sequences of 512 tokens of unseen modules; a third as many of the manual.
        seed: of the order in which sequences come.
    """
    subject = SmolLM2(dense, judged)
    print(f"dense {subject.measure(subject.model)[0]:.3f}; {steps} steps of {subject.length} tokens, rate {rate:g}")
    del subject.model
    print(head(["", "parameters", *(f"{each}, {when}" for each in subject.columns for when in ("at once", "tuned")),
                "s of processor"]), flush=True)  # fmt: skip
    for directory in directories:
        model = subject.load(directory)
        model.config.use_cache = False
        before = subject.measure(model)
        began = time.process_time()
        draw = torch.Generator().manual_seed(seed)
        fit(model, next_token_loss(model, subject.train, 1, draw=draw), steps, rate)
        seconds = time.process_time() - began
        after = subject.measure(model.requires_grad_(False))
        figures = [f"{each:.3f}" for pair in zip(before, after, strict=True) for each in pair]
        print(row([directory.name, f"{count_of(model):,}", *figures, f"{seconds:.0f}"]), flush=True)
