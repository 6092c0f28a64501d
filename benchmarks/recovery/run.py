"""Recovery after pruning: plain fine-tuning, by the outputs, block by block, and both, at equal tokens.

    python benchmarks/recovery/run.py minilm --minilm DIR [--settings 2:4,half,0.7] [--ways outputs,local,both]
                                             [--sentences 1536] [--seeds 0,1,2]
    python benchmarks/recovery/run.py smollm2 --pruned DIR2 --teacher DIR --data FILE --judge FILE [FILE ...]
                                              [--ways outputs,plain,mixed] [--tokens 1000000] [--seeds 0,1,2]
                                              [--autocast bfloat16] [--compile] [--sampled]
    python benchmarks/recovery/run.py texts FOLDER           # calib.txt, judge.txt, manual.txt and wide.txt
    python benchmarks/recovery/run.py speed --pruned DIR2 --teacher DIR --data FILE [--length 128] [--batch 4]
    python benchmarks/recovery/run.py adapters
    python benchmarks/recovery/run.py measure --minilm DIR DIR2 [DIR3 ...]

``--minilm`` is the directory of all-MiniLM-L6-v2. ``--pruned`` is what a verb left of ``--teacher``, such as
``secateur shrink DIR -s 0.2 --data FILE --out DIR2``. What is judged on is not trained on. Each ``--judge`` has a
column; what is back, and how far the outputs are, is of the first. ``--tokens 4096,16384`` judges one run at both;
``--sampled`` trains on what the teacher writes, and not on ``--data``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.recovery.ways import SETTINGS, WAYS, Runs, adapters, measured, minilm, smollm2, speeds, write_texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("minilm")
    command.add_argument("--minilm", type=Path, required=True)
    command.add_argument("--settings", default="2:4,half", help=f"of {','.join(SETTINGS)}")
    command.add_argument("--ways", default="outputs,local,both")
    command.add_argument("--seeds", default="0,1,2")
    command.add_argument("--sentences", type=int, default=1536, help="each is run once in each way")
    command.add_argument("--batch", type=int, default=16)
    command.add_argument("--rate", type=float, default=1e-4)
    command = commands.add_parser("smollm2")
    command.add_argument("--pruned", type=Path, required=True)
    command.add_argument("--teacher", type=Path, required=True)
    command.add_argument("--data", type=Path, required=True)
    command.add_argument("--judge", type=Path, required=True, nargs="+")
    command.add_argument("--ways", default=",".join(WAYS))
    command.add_argument("--seeds", default="0")
    command.add_argument("--tokens", default="1000000", help="where each run is judged, the last of which is its end")
    command.add_argument("--length", type=int, default=512)
    command.add_argument("--batch", type=int, default=4)
    command.add_argument("--rate", type=float, default=1e-4)
    command.add_argument(
        "--judged", type=int, default=24, help="rows of the judge's text, as long as those of the data"
    )
    command.add_argument("--autocast", help="bfloat16")
    command.add_argument("--sampled", action="store_true", help="train on what the teacher writes")
    command.add_argument("--compile", action="store_true", help="run both models as torch.compile has them")
    command = commands.add_parser("texts", help="write what SmolLM2 is trained and judged on")
    command.add_argument("folder", type=Path)
    command = commands.add_parser("speed", help="of a step by the outputs, in float32 and bfloat16")
    command.add_argument("--pruned", type=Path, required=True)
    command.add_argument("--teacher", type=Path, required=True)
    command.add_argument("--data", type=Path, required=True)
    command.add_argument("--length", type=int, default=128)
    command.add_argument("--batch", type=int, default=4)
    command.add_argument("--rounds", type=int, default=3)
    commands.add_parser("adapters")
    command = commands.add_parser("measure", help="the cosine of embeddings to MiniLM's own")
    command.add_argument("--minilm", type=Path, required=True)
    command.add_argument("directories", type=Path, nargs="+")
    for command in commands.choices.values():
        command.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    rows: list[dict[str, Any]]
    if arguments.command == "minilm":
        settings, ways = arguments.settings.split(","), arguments.ways.split(",")
        seeds = _numbers(arguments.seeds)
        rows = minilm(arguments.minilm, settings, ways, seeds, arguments.sentences, arguments.batch, arguments.rate)
    elif arguments.command == "smollm2":
        runs = Runs(
            arguments.ways.split(","), _numbers(arguments.seeds), _numbers(arguments.tokens), arguments.length,
            arguments.batch, arguments.rate, arguments.judged, arguments.autocast, arguments.sampled,
            arguments.compile,
        )  # fmt: skip
        rows = smollm2((arguments.pruned, arguments.teacher), (arguments.data, *arguments.judge), runs)
    elif arguments.command == "texts":
        write_texts(arguments.folder)
        rows = []
    elif arguments.command == "speed":
        directories = arguments.pruned, arguments.teacher
        rows = speeds(directories, arguments.data, arguments.length, arguments.batch, arguments.rounds)
    elif arguments.command == "measure":
        rows = measured(arguments.minilm, arguments.directories)
    else:
        rows = adapters()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    main()
