"""`shrink` beside Torch-Pruning: is it right, how fast is it, what is gained, what does it cost in accuracy.

    python benchmarks/shrinking/run.py coverage|speed|effect|accuracy|depth|nearest [--seeds 3] [--only GLOB]
        [--json FILE]

Law: nothing here trusts the library's own proof. Whether a smaller model is right is decided by a comparison that is
written beside this file, the same for both libraries; ratios are of medians of runs that alternate in one process.

Where Torch-Pruning is not installed (peers.py says how), the script says so and measures ours alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.shrinking import peers
from benchmarks.shrinking.accuracy import accuracy
from benchmarks.shrinking.correctness import coverage
from benchmarks.shrinking.effect import depth, effect
from benchmarks.shrinking.nearest import nearest
from benchmarks.shrinking.speed import child, speed

COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "coverage": coverage,
    "speed": speed,
    "effect": effect,
    "accuracy": accuracy,
    "depth": depth,
    "nearest": nearest,
}


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="*", help="a glob over the zoo's names, or over the networks of accuracy")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.child:
        child(*given.child)
        return
    about = {
        "machine": f"{platform.machine()}, 1 thread, torch {torch.__version__}, Python {platform.python_version()}",
        "torch-pruning": None if peers.tp is None else importlib.metadata.version("torch-pruning"),
        "commit": commit(),
    }
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    if peers.tp is None:
        print(peers.MISSING)
    results = COMMANDS[given.what](seeds=given.seeds, only=given.only)
    if given.json:
        given.json.write_text(json.dumps({**about, **results}, indent=1))


if __name__ == "__main__":
    main()
