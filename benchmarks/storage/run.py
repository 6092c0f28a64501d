"""What compressed checkpoints weigh, and how long they take to load, against dense ones and zipped ones.

    python benchmarks/storage/run.py [--side 4096] [--repeats 7] [--no-times] [--no-sizes] [--no-memory]

Weights are normal random numbers, pruned by magnitude. All sizes are of files or byte strings over those of the dense
safetensors file. The bound is the entropy of the mask plus the kept values as they are; the second bound has each byte
of the values at the entropy of its place (order 0). Times are those of one thread's processor, loading a file in the
page cache into memory of its own; the ways alternate, and the ratio is the median of each round's. Memory is what the
peak of a process of its own rises by, in tensors of 64 MB, half of whose entries are zero and some of those -0.0.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file, save, save_file

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.support.memory import high_water_mark
from benchmarks.support.processes import in_a_process
from benchmarks.support.tables import head, row
from benchmarks.support.timing import alternating, ratio
from secateur import NM, make_masks
from secateur.checkpoints import open_checkpoint
from secateur.storage import expand_checkpoint, load_compressed, save_compressed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, "2:4")


def pruned(side: int, dtype: torch.dtype, sparsity: float | str) -> torch.Tensor:
    weight = torch.randn(side, side, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    chosen = {"pattern": NM(2, 4)} if isinstance(sparsity, str) else {"sparsity": sparsity}
    return weight.masked_fill_(~make_masks({"weight": weight}, **chosen)["weight"], 0)


def entropy(share: float) -> float:
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p)


def bounds(weight: torch.Tensor, sparsity: float | str) -> tuple[float, float]:
    """Bits of mask and values over the dense bits: with values as they are, and with the entropy of their bytes."""
    width = weight.element_size()
    kept = weight[weight != 0]
    density = kept.numel() / weight.numel()
    mask = math.log2(math.comb(4, 2)) / 4 if isinstance(sparsity, str) else entropy(density)
    columns = kept.view(torch.uint8).reshape(-1, width)
    shares = [np.bincount(columns[:, byte].numpy(), minlength=256) / kept.numel() for byte in range(width)]
    packed = sum(float(-(p[p > 0] * np.log2(p[p > 0])).sum()) for p in shares)
    return (mask + density * 8 * width) / (8 * width), (mask + density * packed) / (8 * width)


def sizes(side: int, folder: Path) -> None:
    columns = ["bound", "its bytes' bound", "compressed", "encoding", "+ zstd", "zlib 6 of dense", "zstd 3 of dense"]
    print(f"## Bytes over those of dense, {side}x{side}\n")
    print(head(["", *columns]))
    for name, dtype in DTYPES.items():
        for sparsity in SPARSITIES:
            weight = pruned(side, dtype, sparsity)
            dense = save({"weight": weight})
            file = folder / "weight.safetensors"
            plain = save_compressed({"weight": weight}, file)
            plain_size = file.stat().st_size
            save_compressed({"weight": weight}, file, zstd=True)
            cells = [
                *(f"{bound:.4f}" for bound in bounds(weight, sparsity)),
                f"{plain_size / len(dense):.4f}",
                plain.tensors[0].encoding,
                f"{file.stat().st_size / len(dense):.4f}",
                f"{len(zlib.compress(dense, 6)) / len(dense):.4f}",
                f"{len(zstandard.ZstdCompressor(3).compress(dense)) / len(dense):.4f}",
            ]
            label = sparsity if isinstance(sparsity, str) else f"{sparsity:.0%}"
            print(row([f"{name} {label}", *cells]), flush=True)


def times(side: int, repeats: int, folder: Path) -> None:
    print(f"\n## Time to load over that of dense, {side}x{side}, one thread, {repeats} rounds\n")
    print(head(["", "dense, safetensors (s)", "dense, read by Secateur", "compressed", "with zstd"]))
    torch.set_num_threads(1)
    for name, dtype in DTYPES.items():
        for sparsity in SPARSITIES:
            weight = pruned(side, dtype, sparsity)
            save_file({"weight": weight}, folder / "dense.safetensors")
            save_compressed({"weight": weight}, folder / "plain.safetensors")
            save_compressed({"weight": weight}, folder / "zipped.safetensors", zstd=True)
            ways: dict[str, Callable[[], object]] = {
                # load_file maps the file: only a copy has been read
                "dense": lambda: {
                    name: tensor.clone() for name, tensor in load_file(folder / "dense.safetensors").items()
                },
                "ours": lambda: dict(open_checkpoint(folder / "dense.safetensors")),
                "compressed": lambda: dict(load_compressed(folder / "plain.safetensors")),
                "zstd": lambda: dict(load_compressed(folder / "zipped.safetensors")),
            }
            spent = alternating(ways, repeats, clock="cpu")
            slower = [f"{ratio(spent['dense'], spent[way]):.2f}" for way in ways if way != "dense"]
            label = sparsity if isinstance(sparsity, str) else f"{sparsity:.0%}"
            print(row([f"{name} {label}", f"{statistics.median(spent['dense']):.3f}", *slower]), flush=True)


def risen(work: str, folder: Path, zstd: bool) -> int:
    """Bytes by which one piece of work lifts the peak of this process, once libraries have what they take at first."""
    save_compressed({"weight": torch.eye(300)}, folder / "first", zstd=zstd)
    expand_checkpoint(folder / "first", folder / "again")
    before = high_water_mark()
    if work == "compress":
        save_compressed(folder / "dense", folder / "small", zstd=zstd)
    elif work == "load":
        load_compressed(folder / "small")["weight"]
    else:
        expand_checkpoint(folder / "small", folder / "expanded")
    return high_water_mark() - before


def memory(folder: Path) -> None:
    weight = torch.empty(4096, 4096).uniform_(1, 2)
    weight[:, ::2] = 0
    weight[:, 1::64] *= -0.0
    save_file({"weight": weight}, folder / "dense")
    print(f"\n## Memory, in tensors\n\n{head(['', 'compress', 'load', 'expand'])}")
    for zstd in ("plain", "zstd"):
        works = ("compress", "load", "expand")
        risings = [in_a_process(work, __file__, "--child", work, str(folder), zstd) for work in works]
        print(row([zstd, *(f"{rising / weight.nbytes:.2f}" for rising in risings)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--no-sizes", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        work, where, zstd = arguments.child
        print(risen(work, Path(where), zstd == "zstd"))
        return
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.no_sizes:
            sizes(arguments.side, Path(folder))
        if not arguments.no_times:
            times(arguments.side, arguments.repeats, Path(folder))
        if not arguments.no_memory:
            memory(Path(folder))


if __name__ == "__main__":
    main()
