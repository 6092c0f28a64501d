"""What stages and aiming at the dense model are worth through `oneshot` itself, and what they cost.

Law: every way removes as many weights by the same solver, the default one, on the same batches; models are measured on
text that no calibration saw.

- **at once**: all weights of a block from one run of the dense block, as in SparseGPT's and Wanda's own code.
- **stages**: each stage of a block on what the pruned stages before it give.
- **stages, aim a**: the same, each weight first moved a of the way towards what restores the dense model.
"""

from __future__ import annotations

import copy
import functools
import random
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.oneshot.quality import SETTINGS
from benchmarks.support.tables import head, row, spread
from secateur.models import oneshot

__all__ = ["WAYS", "LanguageModel", "stages"]

WAYS: dict[str, dict[str, Any]] = {
    "at once": {"stages": False},
    "stages": {"aim": 0.0},
    "stages, aim 0.5": {"aim": 0.5},
    "stages, aim 1": {"aim": 1.0},
}


class Subject(Protocol):
    """A trained model, and how it is measured."""

    model: nn.Module
    columns: tuple[str, ...]

    def batches(self, seed: int, samples: int, size: int) -> list[dict[str, Tensor]]:
        """For calibration, another choice for each seed."""

    def measure(self, model: nn.Module) -> tuple[float, ...]:
        """A number for each of the columns."""


class LanguageModel:
    """A causal language model of a directory, measured by its perplexity on 24 × 512 tokens of a text of its own."""

    columns = ("perplexity",)

    def __init__(self, directory: Path, calibration: Path, judge: Path, length: int = 256) -> None:
        import transformers

        transformers.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.length = length
        self.calibration, self.judge = (
            tokenizer(path.read_text(), return_tensors="pt", verbose=False).input_ids[0]
            for path in (calibration, judge)
        )

    def batches(self, seed: int, samples: int, size: int) -> list[dict[str, Tensor]]:
        starts = range(0, len(self.calibration) - self.length, self.length)
        rows = torch.stack([self.calibration[at:][: self.length] for at in random.Random(seed).sample(starts, samples)])
        return [{"input_ids": part} for part in rows.split(size)]

    @torch.no_grad()
    def measure(self, model: nn.Module) -> tuple[float, ...]:
        rows = self.judge[: 24 * 512].reshape(-1, 1, 512)
        losses = [float(model(input_ids=ids, labels=ids).loss) for ids in rows]
        return (float(torch.tensor(losses).mean().exp()),)


def stages(subject: Subject, settings: list[str], ways: list[str], seeds: int, samples: int, size: int) -> Any:
    """A table: each way at each setting, means over calibration seeds; seconds are of the processor, of the call."""
    dense = subject.measure(subject.model)
    print("dense: " + ", ".join(f"{name} {value:.4f}" for name, value in zip(subject.columns, dense, strict=True)))
    print(head(["setting", "way", *subject.columns, "CPU s", "of at once"]), flush=True)
    rows = []
    for setting in settings:
        sparsity, pattern = SETTINGS[setting]
        prune = functools.partial(oneshot, sparsity=sparsity, pattern=pattern)
        base = 0.0
        for way in ways:
            runs, seconds = [], []
            for seed in range(seeds):
                model, batches = copy.deepcopy(subject.model), subject.batches(seed, samples, size)
                started = time.process_time()
                prune(model, batches, **WAYS[way])
                seconds.append(time.process_time() - started)
                runs.append(subject.measure(model))
            taken = sum(seconds) / seeds
            base = base or taken
            columns = [spread(list(column)) for column in zip(*runs, strict=True)]
            print(row([setting, way, *columns, f"{taken:.1f}", f"{taken / base:.2f}"]), flush=True)
            rows.append({"setting": setting, "way": way, "runs": runs, "seconds": seconds})
    return rows
