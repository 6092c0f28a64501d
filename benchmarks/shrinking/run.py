"""`shrink` beside Torch-Pruning: is it right, how fast is it, what is gained, what does it cost in accuracy.

    python benchmarks/shrinking/run.py coverage|speed|effect|accuracy|kept|depth|nearest [--seeds 3] [--only GLOB]
        [--json FILE]
    python benchmarks/shrinking/run.py real --smollm2 DIR --minilm DIR [--rows ours,flap] [--seeds 3] [--cache FILE]
    python benchmarks/shrinking/run.py real --times DIR DIR
    python benchmarks/shrinking/run.py tuned --smollm2 DIR DIR2 [DIR3 ...] [--steps 24]
    python benchmarks/shrinking/run.py onnxsim --minilm DIR [--samples 512] [--level 'half of the multiply-adds']
    python benchmarks/shrinking/run.py swaps --minilm DIR [--samples 512]
    python benchmarks/shrinking/run.py branches --smollm2 DIR --minilm DIR [--cache FILE] [--leave '4 branches']
    python benchmarks/shrinking/run.py expand FOLDER OUT

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
from benchmarks.shrinking import branches, graphs, packages, peers, real, times
from benchmarks.shrinking.accuracy import accuracy
from benchmarks.shrinking.correctness import coverage
from benchmarks.shrinking.effect import depth, effect
from benchmarks.shrinking.kept import kept
from benchmarks.shrinking.nearest import nearest
from benchmarks.shrinking.speed import child, speed
from benchmarks.shrinking.swaps import swaps
from benchmarks.shrinking.tuned import tuned

COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "coverage": coverage,
    "speed": speed,
    "effect": effect,
    "accuracy": accuracy,
    "kept": kept,
    "depth": depth,
    "nearest": nearest,
}


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=(command.__doc__ or "").split("\n")[0])
        one.add_argument("--seeds", type=int, default=3)
        one.add_argument("--only", default="*", help="a glob over the zoo's names, or over the networks of accuracy")
        one.add_argument("--json", type=Path)
        one.add_argument("--methods", help="of accuracy, separated by ;, such as 'shrink, data;shrink'")
        one.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    _declare_real(commands)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.what == "real":
        _real(given)
    elif given.what == "branches":
        _branches(given)
    elif given.what == "onnxsim":
        if why := packages.missing("onnxsim"):
            raise SystemExit(why)
        graphs.repaired(given.minilm, given.samples, given.level)
    elif given.what == "swaps":
        swaps(given.minilm, given.samples)
    elif given.what == "tuned":
        tuned(given.smollm2, given.directories, given.steps, given.rate, given.judged, given.seed)
    elif given.what == "expand":
        real.expand(given.folder, given.out)
    elif given.child:
        child(*given.child)
    else:
        _beside_torch_pruning(given)


def _declare_real(commands: Any) -> None:
    one = commands.add_parser("real", help="real trained models at once, without training")
    for model in real.MODELS:
        one.add_argument(f"--{model}", type=Path, help="the model's directory")
    one.add_argument("--rows", default=",".join(real.RIVALS), help="whom to compare, of %(default)s")
    one.add_argument("--levels", default="0.1,0.2,0.3", help="of all parameters of SmolLM2 (%(default)s)")
    one.add_argument("--seeds", type=int, default=3, help="of the calibration (%(default)s)")
    one.add_argument("--samples", type=int, default=24, help="sequences of 512 tokens to calibrate with (%(default)s)")
    one.add_argument(
        "--text", choices=real.TEXTS, default=real.TEXTS[0], help="what SmolLM2 is calibrated on (%(default)s)"
    )
    one.add_argument("--judged", type=int, default=24, help="sequences of 512 tokens of each text (%(default)s)")
    one.add_argument("--cache", type=Path, help="a file for the rows, which a run that was interrupted goes on with")
    one.add_argument("--keep", type=Path, help="a folder for the models, to take their times")
    one.add_argument("--threads", type=int, default=1, help="of a row (%(default)s)")
    one.add_argument("--times", type=Path, nargs="+", help="directories: only the milliseconds of these, in turn")
    one.add_argument("--rounds", type=int, default=9, help="of the times (%(default)s)")
    one.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    one = commands.add_parser("onnxsim", help="MiniLM as a file of ONNX, pruned and repaired by onnxsim")
    one.add_argument("--minilm", type=Path, required=True, help="the model's directory")
    one.add_argument("--samples", type=int, default=512, help="sentences to calibrate with (%(default)s)")
    one.add_argument("--level", choices=graphs.SHARES, default=real.HALF, help="what leaves (%(default)s)")
    one = commands.add_parser("swaps", help="inputs that left and come back while others leave, after the greedy order")
    one.add_argument("--minilm", type=Path, required=True, help="the model's directory")
    one.add_argument("--samples", type=int, default=512, help="sentences to calibrate with (%(default)s)")
    one = commands.add_parser("branches", help="real trained models that lose depth, without training")
    for model in branches.MODELS:
        one.add_argument(f"--{model}", type=Path, help="the model's directory")
    one.add_argument("--judged", type=int, default=24, help="sequences of 512 tokens of each text (%(default)s)")
    one.add_argument("--cache", type=Path, help="a file for the rows, which a run that was interrupted goes on with")
    one.add_argument("--leave", help="such as 4 branches,2 blocks; by default all that RESULTS.md shows")
    one.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    one = commands.add_parser("tuned", help="directories that `real --keep` left, after equal plain fine-tuning")
    one.add_argument("--smollm2", type=Path, required=True, help="the whole model's directory")
    one.add_argument("directories", type=Path, nargs="+", help="of smaller ones")
    one.add_argument("--steps", type=int, default=24, help="of 512 tokens each (%(default)s)")
    one.add_argument("--rate", type=float, default=1e-4, help="the highest of one cycle of AdamW (%(default)s)")
    one.add_argument("--judged", type=int, default=24, help="sequences of 512 tokens (%(default)s)")
    one.add_argument("--seed", type=int, default=0, help="of the order of sequences (%(default)s)")
    one = commands.add_parser("expand", help="a directory of the GGUF file in an unpacked wheel, for real --smollm2")
    one.add_argument("folder", type=Path, help="where the wheel was unpacked to")
    one.add_argument("out", type=Path)


def _real(given: argparse.Namespace) -> None:
    if given.child:
        real.child(given.child)
        return
    told = f"{given.threads} thread{'s' * (given.threads > 1)}"
    print(f"{platform.machine()}, {told}, torch {torch.__version__}, Python {platform.python_version()}, {commit()}")
    if given.times:
        times.times(given.times, given.rounds)
        return
    real.real(
        real.Options(
            directories={model: path for model in real.MODELS if (path := getattr(given, model)) is not None},
            rows=tuple(given.rows.split(",")),
            levels=tuple(given.levels.split(",")),
            seeds=given.seeds,
            samples=given.samples,
            judged=given.judged,
            cache=given.cache,
            keep=given.keep,
            threads=given.threads,
            text=given.text,
        )
    )


def _branches(given: argparse.Namespace) -> None:
    if given.child:
        branches.child(given.child)
        return
    print(f"{platform.machine()}, 1 thread, torch {torch.__version__}, Python {platform.python_version()}, {commit()}")
    directories = {model: path for model in branches.MODELS if (path := getattr(given, model)) is not None}
    branches.branches(directories, given.judged, given.cache, given.leave)


def _beside_torch_pruning(given: argparse.Namespace) -> None:
    about = {
        "machine": f"{platform.machine()}, 1 thread, torch {torch.__version__}, Python {platform.python_version()}",
        "torch-pruning": None if peers.tp is None else importlib.metadata.version("torch-pruning"),
        "commit": commit(),
    }
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    if peers.tp is None:
        print(peers.MISSING)
    by = None if given.methods is None else given.methods.split(";")
    results = COMMANDS[given.what](seeds=given.seeds, only=given.only, by=by)
    if given.json:
        given.json.write_text(json.dumps({**about, **results}, indent=1))


if __name__ == "__main__":
    main()
