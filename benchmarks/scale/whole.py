"""One model of a billion parameters, run from beginning to end: the verbs on a directory of its shapes.

    python -m benchmarks.scale.whole oneshot shrink --folder FOLDER [--layers 22] [--sequences 16] [--length 64]

Law: the verbs run as they do for a user, each in a process of its own, on random weights and random tokens: what is
measured is time and memory, and nothing of quality. Peak memory is the process' own high-water mark; hours are of
the processor and of the wall, with the threads that OMP_NUM_THREADS says. What was written is deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models

from benchmarks.scale.run import of_one_core
from benchmarks.scale.shapes import ONE_BILLION, shapes_of
from benchmarks.shrinking.shards import write

VERBS = {
    "oneshot": ["--sparsity", "0.5", "--solver", "sparsegpt"],
    "oneshot-admm": ["--sparsity", "0.5"],
    "shrink": ["--sparsity", "0.2"],
}


def made(folder: Path, config: dict[str, Any]) -> None:
    """A directory of random weights, with a tokenizer of as many words; complete or not there."""
    half = folder.with_name("half")
    shutil.rmtree(half, ignore_errors=True)
    write(half, config, 1 << 30, holes=False, scale=0.02)
    words = Tokenizer(models.WordLevel({"?": 0, **{f"w{at}": at for at in range(1, config["vocab_size"])}}, "?"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(half)
    half.rename(folder)


def ran(verb: str, source: Path, out: Path, sequences: int, length: int) -> dict[str, Any]:
    """What one verb took: seconds of the wall and of the processor, bytes that were resident at most."""
    command = [sys.executable, "-m", "secateur", verb.partition("-")[0], str(source), "--out", str(out)]
    command += ["--data", "random", "--samples", str(sequences), "--sequence-length", str(length), *VERBS[verb]]
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{verb} ended with {done.returncode}; run the same command again to go on.")
    return {
        "verb": verb,
        "wall": time.monotonic() - started,
        "processor": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak": after.ru_maxrss * 1024,  # of the largest child so far: verbs are given from the least to the most
        "written": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        "said": done.stdout.splitlines()[-6:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verbs", nargs="+", choices=VERBS)
    parser.add_argument("--folder", type=Path, required=True, help="on a disk with three times the model's bytes free")
    parser.add_argument("--layers", type=int, default=ONE_BILLION["num_hidden_layers"])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    source = asked.folder / f"llama-{asked.layers}"
    if not source.exists():
        made(source, {**ONE_BILLION, "num_hidden_layers": asked.layers})
    for verb in asked.verbs:
        out = asked.folder / verb
        row = ran(verb, source, out, asked.sequences, asked.length)
        row |= {"layers": asked.layers, "tokens": asked.sequences * asked.length}
        if verb in ("oneshot", "shrink"):
            shapes = shapes_of({**ONE_BILLION, "num_hidden_layers": asked.layers})
            row["projected"] = of_one_core(shapes, asked.sequences * asked.length, verb)  # seconds, bytes
        print(json.dumps({**row, "threads": os.environ.get("OMP_NUM_THREADS", "all")}), flush=True)
        shutil.rmtree(out)
    shutil.rmtree(source)


if __name__ == "__main__":
    main()
