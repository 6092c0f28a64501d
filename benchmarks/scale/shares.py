"""What each process holds of `recover` by the outputs: peak memory in 1, 2 and 4 processes of gloo, on one machine.

    python -m benchmarks.scale.shares --folder FOLDER [--width 768] [--layers 8]

Law: every row is a run of its own; memory is each process' high-water mark, less what it had once a tiny model was
loaded and trained. The losses are there to see that the runs do the same. glibc is asked to give freed memory back
(``MALLOC_MMAP_THRESHOLD_``): else it keeps what blocks were gathered into, as of the whole model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

import torch
from torch import distributed

from benchmarks.scale.shapes import ONE_BILLION
from benchmarks.scale.whole import made
from benchmarks.shrinking.shards import warmed
from benchmarks.support.memory import from_its_peak
from benchmarks.support.processes import in_a_process
from secateur import recover, sparsify
from secateur.support import all_gather, rank_and_world

GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "1000000"}


def measured(folder: Path, out: Path) -> None:
    """One process: rank 0 prints what all of them held."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        distributed.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(1, 4096, (4, 32), generator=generator) for _ in range(4)]
    warmed()
    with from_its_peak() as found:
        done = recover(folder / "sparse", folder / "dense", batches, out=out, steps=4, local=0)
    peaks = [peak for (peak,) in all_gather((found["peak"],))]
    if not rank_and_world()[0]:
        print(json.dumps({"peaks": peaks, "losses": done.losses, "seconds": done.seconds}))
    if rank_and_world()[1] > 1:
        distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.out is not None:
        measured(asked.folder, asked.out)
        return
    asked.folder.mkdir(parents=True)
    heads = {"num_attention_heads": asked.width // 64, "num_key_value_heads": asked.width // 64}
    shape = {"hidden_size": asked.width, "intermediate_size": 3 * asked.width, "num_hidden_layers": asked.layers}
    made(asked.folder / "dense", {**ONE_BILLION, **heads, **shape, "vocab_size": 4096})
    sparsify(asked.folder / "dense", 0.5, out=asked.folder / "sparse")
    print("| processes | memory of each, MB | first loss | last loss | s |\n|---|---|---|---|---|")
    for processes in (1, 2, 4):
        out = asked.folder / f"of {processes}"
        words = ["-m", "benchmarks.scale.shares", "--folder", str(asked.folder), "--out", str(out)]
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        found = in_a_process(f"{processes} processes", "-m", *torchrun, *words, environment=GIVEN_BACK)
        peaks = ", ".join(f"{peak / 1e6:,.0f}" for peak in found["peaks"])
        first, last = found["losses"][0], found["losses"][-1]
        print(f"| {processes} | {peaks} | {first:.6f} | {last:.6f} | {found['seconds']:.0f} |", flush=True)
        shutil.rmtree(out)
    shutil.rmtree(asked.folder)


if __name__ == "__main__":
    main()
