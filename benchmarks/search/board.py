"""How far a model that was fitted by a table of another machine is from what was asked, measured there as a whole.

    python benchmarks/search/board.py emit --model DIR --folder FOLDER [--tokens 32] [--runtime onnxruntime:int8]
    BOARD/bin/python FOLDER/probes/time_probes.py --threads 1 --out FOLDER/board.csv
    python benchmarks/search/board.py fit --model DIR --folder FOLDER --table board.csv [--budget 0.6] [--samples 64]
    BOARD/bin/python benchmarks/search/board.py time --folder FOLDER --threads 1

"The board" is an environment of its own with another ONNX Runtime and nothing else, such as ``python -m venv BOARD;
BOARD/bin/pip install 'onnxruntime==1.20.*'``; emit and fit run where the library is. ``--model`` is the directory of
all-MiniLM-L6-v2. What is timed as a whole is the exported graph, the dense one and the fitted one in turns, in 8 bits
if the probes are (say so to ``fit``, too). With ``--samples 0`` it is `shrink` without data, for its widths alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

DENSE, FITTED = "dense", "fitted"


def loaded(options: argparse.Namespace) -> tuple[Any, Any, list[str], dict[str, Any]]:
    """The model, its tokenizer, sentences, and what is timed."""
    sys.path[0] = str(Path(__file__).parents[2])
    import torch
    import transformers

    from benchmarks.support import corpora
    from benchmarks.support.language_models import MiniLM

    torch.set_num_threads(options.threads)
    tokenizer, sentences = transformers.AutoTokenizer.from_pretrained(options.model), corpora.sentences()
    how = {"truncation": True, "max_length": options.tokens, "return_tensors": "pt"}
    text = tokenizer(" ".join(sentences[:4]), **how)
    example = {name: text[name] for name in ("input_ids", "attention_mask")}
    return MiniLM.load(options.model), tokenizer, sentences, example


def emit(options: argparse.Namespace) -> None:
    model, *_, example = loaded(options)
    from secateur.search import write_probes

    options.folder.mkdir(parents=True, exist_ok=True)
    print(write_probes(model, example, options.folder / "probes", runtime=options.runtime))
    written(model, example, options.folder / DENSE, options.runtime)


def written(model: Any, example: Any, folder: Path, runtime: str) -> None:
    from secateur.runtimes import OnnxRuntime, parse

    form = parse(runtime)
    assert isinstance(form, OnnxRuntime)
    whole = folder / "float32" if form.bits < 32 else folder
    whole.mkdir(parents=True, exist_ok=True)
    form.write(model, example, whole)
    if form.bits < 32:
        form.rounded(whole, folder)


def fitted(options: argparse.Namespace) -> None:
    model, tokenizer, sentences, example = loaded(options)
    from secateur import fit, shrink

    started, table = time.monotonic(), options.folder / options.table
    if not options.samples:
        done = shrink(model, example, 1 - options.budget, target="latency", runtime=table, verify=False)
        written(model, example, options.folder / FITTED, options.runtime)
        print(json.dumps({"asked": options.budget, "by the table": 1 - done.got}))
        return
    chosen = random.Random(0).sample(sentences[1000:], options.samples)
    how = {"padding": True, "truncation": True, "max_length": options.tokens, "return_tensors": "pt"}
    done = fit(
        model,
        [dict(tokenizer(chosen[at : at + 16], **how)) for at in range(0, len(chosen), 16)],
        budget={"latency": options.budget},
        runtime=table,
        example_inputs=example,
        finals=options.finals,
        store=options.folder / "levels",
    )
    print(done)
    written(model, example, options.folder / FITTED, options.runtime)
    by_table = {"dense": done.dense["latency"], "got": done.got["latency"]}
    seconds = round(time.monotonic() - started)
    print(json.dumps({"asked": options.budget, "step": done.step, "table": by_table, "seconds": seconds}))


def timed(options: argparse.Namespace) -> None:
    """Without the library, in the board's environment."""
    import numpy as np
    import onnxruntime

    how = onnxruntime.SessionOptions()
    how.intra_op_num_threads, how.log_severity_level = options.threads, 3
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    calls = {}
    for name in (DENSE, FITTED):
        path = str(options.folder / name / "model.onnx")
        session = onnxruntime.InferenceSession(path, how, providers=["CPUExecutionProvider"])
        feeds = {each.name: np.ones((1, options.tokens), dtype=np.int64) for each in session.get_inputs()}
        calls[name] = session, feeds
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds + 1):
        for name, (session, feeds) in calls.items():
            started = clock()
            for _ in range(5):
                session.run(None, feeds)
            rounds[name].append(200 * (clock() - started))
    ratios = [after / before for before, after in zip(rounds[DENSE][1:], rounds[FITTED][1:], strict=True)]
    print(
        json.dumps(
            {
                "onnxruntime": onnxruntime.__version__,
                "threads": options.threads,
                "milliseconds": {name: round(statistics.median(each[1:]), 3) for name, each in rounds.items()},
                "ratio": round(statistics.median(ratios), 4),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["emit", "fit", "time"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--table", default="board.csv")
    parser.add_argument("--budget", type=float, default=0.6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--finals", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runtime", default="onnxruntime")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    {"emit": emit, "fit": fitted, "time": timed}[options.what](options)


if __name__ == "__main__":
    main()
