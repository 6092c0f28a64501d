"""Compressing and expanding take the memory of one tensor at most, whatever the encoding."""

import subprocess
import sys

import pytest

# A process of its own: the peak of a process never falls. Files are small, the tensor is 64 MB.
PROGRAM = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from safetensors.torch import save_file
from secateur.storage import expand_checkpoint, load_compressed, save_compressed

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

work, folder, zstd = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "zstd"
if work == "write":
    side = 4096
    weight = torch.empty(side, side).uniform_(1, 2)
    weight[:, ::2] = 0
    weight[:, 1::64] *= -0.0
    save_file({"weight": weight}, folder / "dense")
else:
    save_compressed({"weight": torch.eye(300)}, folder / "first", zstd=zstd)  # what libraries take at first use
    expand_checkpoint(folder / "first", folder / "again")
    before = peak()
    if work == "compress":
        save_compressed(folder / "dense", folder / "small", zstd=zstd)
    elif work == "load":
        assert load_compressed(folder / "small")["weight"].shape == (4096, 4096)
    else:
        expand_checkpoint(folder / "small", folder / "expanded")
        assert (folder / "expanded").stat().st_size == (folder / "dense").stat().st_size
    print(peak() - before)
"""


def run(work, folder, zstd):
    command = [sys.executable, "-c", PROGRAM, work, str(folder), "zstd" if zstd else "plain"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("zstd", [False, True])
def test_the_memory_of_one_tensor(tmp_path, zstd):
    run("write", tmp_path, zstd)
    tensor = 4096 * 4096 * 4
    more = {work: int(run(work, tmp_path, zstd)) for work in ("compress", "load", "expand")}
    print({work: f"{size / tensor:.2f} tensors" for work, size in more.items()})
    assert more["compress"] < tensor + 40e6
    assert more["load"] < tensor + 30e6
    # values in zstd come by planes of bytes, so that all of them have to be there; half of them are kept
    assert more["expand"] < (tensor / 2 if zstd else 0) + 30e6
