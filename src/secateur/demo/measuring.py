"""What is measured of a trained network: sizes, work, and milliseconds beside the others."""

import copy
import functools
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from secateur.demo.data import Digits
from secateur.demo.training import BATCH
from secateur.demo.trials import Trial
from secateur.inference import Packing, pack
from secateur.pipeline import sparsity_of
from secateur.report import Network, Run, count_multiply_adds, describe
from secateur.storage import save_compressed
from secateur.support import in_turns, seconds_of
from secateur.targets import find_targets

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = [
    "Packed",
    "compressed_size",
    "file_size",
    "memory_of",
    "milliseconds",
    "network_of",
    "packed_of",
    "parameters_of",
    "run_of",
]

ROUNDS = 100  # of timing


@dataclass(frozen=True)
class Packed:
    """A masked network whose layers skip zeros where that is faster: with one image, and with a batch."""

    trial: Trial
    one: nn.Module
    many: nn.Module
    packings: tuple[Packing, Packing]  # for one image, and for a batch


def packed_of(trial: Trial, data: Digits) -> Packed:
    one, many = (copy.deepcopy(trial.model).eval() for _ in range(2))
    packings = pack(one, data.train_images[:1]), pack(many, data.train_images[:BATCH])
    return Packed(trial, one, many, packings)


@torch.inference_mode()
def milliseconds(models: Sequence[nn.Module], progress: "Progress", *, images: int = 1, calls: int = 3) -> list[float]:
    """Milliseconds of so many images through each model on one thread: the fastest of many rounds, in each of which
    every model has its turn, so that a slow moment of the machine touches all of them and is then left out."""
    bar = progress.add_task(f"Timing {f'{images} images' if images > 1 else 'one image'}, rounds", total=ROUNDS)
    image = torch.zeros(images, 1, 8, 8)

    def turn(model: nn.Module) -> float:
        model.eval()
        model(image)  # what the turn before has left in the caches is not its own
        taken = seconds_of(functools.partial(model, image), repeats=calls)
        if model is models[-1]:
            progress.advance(bar)
        return taken

    turns = {number: functools.partial(turn, model) for number, model in enumerate(models)}
    return [1000 * min(times) for times in in_turns(turns, ROUNDS, warm_up=0).values()]


def run_of(trial: Trial, latency_ms: float | None = None) -> Run:
    from safetensors.torch import save

    file = save(trial.model.state_dict())
    zeros = sum(weight.numel() - int(weight.count_nonzero()) for weight in find_targets(trial.model).values())
    return Run(
        trial.label,
        sparsity_of(trial.model) if trial.masks else 0.0,
        trial.before,
        trial.after,
        trial.seed,
        bytes=len(file),
        zipped=len(zlib.compress(file, level=9)),
        latency_ms=latency_ms,
        overall=zeros / parameters_of(trial.model) if trial.masks else 0.0,
        multiply_adds=count_multiply_adds(trial.model, torch.zeros(1, 1, 8, 8)),
    )


def file_size(model: nn.Module) -> int:
    from safetensors.torch import save

    return len(save(model.state_dict()))


def memory_of(model: nn.Module) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}.values())


def compressed_size(model: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return save_compressed(model, Path(folder, "model.safetensors")).stored


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def network_of(trial: Trial) -> Network:
    whole = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in trial.originals.items()}
    title = f"{trial.label}, {100 * sparsity_of(trial.model):.1f} % removed, seed {trial.seed}"
    return describe(title, trial.originals, whole | dict(trial.masks))
