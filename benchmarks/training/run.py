"""Pruning while training: accuracy at equal budgets beside the peers, the cost of a step, and a character GPT.

    python benchmarks/training/run.py accuracy|batchnorm|overhead|gpt [--seeds 3] [--json FILE] [--smoke]

Law: the methods of a table share dense starting weights, data and their order, optimizer, learning rates and number of
steps; sparsity is counted from the zeros of the model that a method leaves, over all weights of linear layers and
convolutions. Peers that are not installed are named with the reason (peers.py says how to install them).

`--smoke` is one seed and a few steps: it shows that everything runs, and no figure of it means anything.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.training.accuracy import accuracy, batchnorm, gpt
from benchmarks.training.overhead import overhead


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "batchnorm", "overhead", "gpt"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="one seed, a few steps: to see that it runs")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="trainings at a time")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
    results = {"accuracy": accuracy, "batchnorm": batchnorm, "overhead": overhead, "gpt": gpt}[options.what](options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
