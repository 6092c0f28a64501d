"""What one core does in a second, of what `benchmarks/oneshot/run.py projection` does not time: a table.

    OMP_NUM_THREADS=1 python -m benchmarks.scale.rates [--width 4096]

Law: what is timed is the library's own code on one matrix, by the processor's clock; operations are counted as
`benchmarks/scale/run.py` counts them, a product as two.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from secateur import pack
from secateur.checkpoints import inspect_checkpoint
from secateur.operations import operations_of
from secateur.runtimes import OnnxRuntime
from secateur.solvers import Elimination, eliminated
from secateur.storage import expand_checkpoint, save_compressed

ROUNDS = 32  # in which the units of a group leave


def seconds_of(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def eliminating(width: int) -> float:
    """Operations a second of what `shrink` does with a matrix whose columns leave, in float64."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2 * width, width, generator=generator), torch.randn(width, width, generator=generator)
    gram, units = x.T @ x, [[at] for at in range(width)]
    crossed = torch.randn(width, width, generator=generator)

    def run() -> None:
        eliminated([(Elimination(weight, gram), units)], 1, -(-width // ROUNDS))
        layer = Elimination(weight, gram, residual_cross=crossed, aim=0.5)
        eliminated([(layer, units)], width * 4 // 5, -(-width // ROUNDS))
        layer.finish()
        layer.squares(layer.settled(2 * width))

    # two inversions, what is aimed at and what settles, as cubes; what leaves: all columns, and a fifth of them
    return (3 + 3 + 2 + 2 + 1.2 * 4) * width**3 / seconds_of(run)


def filing(width: int, folder: Path) -> tuple[float, ...]:
    """Bytes of bfloat16 a second, half of them zeros, of `compress`, `expand` and `inspect`."""
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = {"weight": weight.masked_fill_(weight.float().abs() < weight.float().abs().median(), 0)}
    small, whole = folder / "small.safetensors", folder / "whole.safetensors"
    done = (
        seconds_of(lambda: save_compressed(tensors, small)),
        seconds_of(lambda: expand_checkpoint(small, whole)),
        seconds_of(lambda: inspect_checkpoint(whole)),
    )
    return tuple(2 * width**2 / each for each in done)


def packing(width: int) -> float:
    """Parameters a second of `pack`, in float32, for one token; it times the forms that zeros allow."""
    model = nn.Sequential(nn.Linear(width, width, bias=False))
    with torch.no_grad():
        model[0].weight.mul_(model[0].weight.abs() > model[0].weight.abs().quantile(0.8))
    return width**2 / seconds_of(lambda: pack(model, torch.ones(1, width)))


def probing(width: int, folder: Path) -> float:
    """Bytes of float32 a second of `cost`, which exports a matrix, has the runtime read it, and writes its shape."""
    (found,) = operations_of(nn.Linear(width, width, bias=False), torch.ones(64, width))
    return 4 * width**2 / seconds_of(lambda: OnnxRuntime().write_alone(*found.alone(), folder / "probe.onnx"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    asked = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, width {asked.width}; in a second of the processor, 10⁹")
    with tempfile.TemporaryDirectory() as folder:
        words = "operations of `shrink`, float64 | bytes of `compress` | `expand` | `inspect` | parameters of `pack`"
        print(f"| {words} | bytes of `cost` |\n|{'---|' * 6}")
        own = Path(folder)
        rates = eliminating(asked.width), *filing(asked.width, own), packing(asked.width), probing(asked.width, own)
    print(f"| {' | '.join(f'{each / 1e9:.3g}' for each in rates)} |")


if __name__ == "__main__":
    main()
