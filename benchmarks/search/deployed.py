"""What `deploy` delivers, beside the dense model in int8 and int4 in the same runtime, on data that nothing else saw.

    python -m benchmarks.search.deployed minilm --model DIR --budgets 0.25,0.3
    python -m benchmarks.search.deployed minilm --model DIR --budgets 0.6 --runtime openvino:int8
    python -m benchmarks.search.deployed smollm2 --model DIR --budgets 0.3
    python -m benchmarks.search.deployed smollm2 --model DIR --budgets 0.3 --tokens 1 --runtime llamacpp:int4
    python -m benchmarks.search.deployed lite0 --packages DIR --budgets 0.5
    python -m benchmarks.search.deployed crepe --packages DIR --budgets 0.5

Budgets are shares of what the dense model takes in float32 in the runtime; one thread. MiniLM runs one
sentence of 32 tokens, SmolLM2 one text of 64, or of ``--tokens``, and gives the logits of all of it, the networks one
batch. Rows have the milliseconds in turns, how many times as fast that is as dense int8, and quality on unseen data.
Plain int8 is `quantize_dynamic` of the exported graph with its matrix products alone, as anybody calls it, in 7 bits
where sums in 8 would overflow: tables, and a head tied to one, stay in float.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.support.language_models import MiniLM, SmolLM2
from benchmarks.support.tables import head, row
from secateur import deploy
from secateur.llamacpp import LlamaCpp
from secateur.runtimes import OnnxRuntime, OpenVINO, sums_overflow
from secateur.search.deploying import InRuntime
from secateur.support import alternating, ratio

_ROUNDS = 61


@dataclass(frozen=True)
class Subject:
    """A model, what it is calibrated on, what it is timed on, and how it is judged."""

    model: nn.Module
    batches: Sequence[Any]
    example: Any
    columns: Sequence[str]
    judge: Callable[[nn.Module], Sequence[float]]


def minilm(options: argparse.Namespace) -> Subject:
    subject = MiniLM(options.model)
    text = subject.tokenizer(" ".join(subject.held_out[:4]), truncation=True, max_length=32, return_tensors="pt")
    example = {name: text[name] for name in ("input_ids", "attention_mask")}
    return Subject(subject.model, subject.batches(0, options.samples), example, subject.columns, subject.measure)


def smollm2(options: argparse.Namespace) -> Subject:
    subject = SmolLM2(options.model, judged=options.judged)
    subject.model.float()
    batches = subject.batches(0, options.samples)
    ids = batches[0] if isinstance(batches[0], torch.Tensor) else batches[0]["input_ids"]
    example = {
        "input_ids": ids[:1, : options.tokens],
        "attention_mask": torch.ones_like(ids[:1, : options.tokens]),
        "use_cache": False,
    }

    def perplexities(model: nn.Module) -> list[float]:
        found = []
        for rows in subject.held_out:
            with torch.no_grad():
                losses = [
                    functional.cross_entropy(model(input_ids=each[None]).logits[0, :-1], each[1:]).item()
                    for each in rows
                ]
            found.append(math.exp(statistics.mean(losses)))
        return found

    return Subject(subject.model, batches, example, subject.columns, perplexities)


def network(name: str, options: argparse.Namespace) -> Subject:
    from tests.real.networks import NETWORKS

    sys.path.insert(0, str(options.packages))
    found = next(each for each in NETWORKS if each.name == name)
    model = found.load(options.packages)
    batches = found.calibration(options.packages, model)
    columns = [*found.measure(options.packages, model)]
    return Subject(
        model,
        batches,
        batches[0][: options.rows],
        columns,
        lambda its: [*found.measure(options.packages, its).values()],
    )


KINDS = {"llamacpp": LlamaCpp, "openvino": OpenVINO}
SUBJECTS: dict[str, Callable[[argparse.Namespace], Subject]] = {
    "minilm": minilm,
    "smollm2": smollm2,
    "lite0": functools.partial(network, "EfficientNet-Lite0"),
    "crepe": functools.partial(network, "CREPE tiny"),
}


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("subject", choices=SUBJECTS)
    read.add_argument("--model", type=Path, help="the directory of a language model")
    read.add_argument("--packages", type=Path, help="where the packages of `make real` are")
    read.add_argument("--budgets", default="0.25", help="several with commas")
    read.add_argument("--samples", type=int, default=512)
    read.add_argument("--judged", type=int, default=8)
    read.add_argument("--rows", type=int, default=1, help="of a batch of pictures, that are timed")
    read.add_argument("--finals", type=int, default=3)
    read.add_argument("--steps", type=int, default=0, help="of training by the dense model's outputs")
    read.add_argument("--runtime", default="onnxruntime:int8")
    read.add_argument("--tokens", type=int, default=64, help="of a text of SmolLM2 that is timed")
    read.add_argument("--store", type=Path, help="where levels are, or will be")
    options = read.parse_args()
    torch.set_num_threads(1)
    subject = SUBJECTS[options.subject](options)
    with tempfile.TemporaryDirectory() as folder:
        bench(subject, [float(each) for each in options.budgets.split(",")], options, Path(folder))


def plain(folder: Path) -> Path:
    """Of the graph in ``float32``."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    place = folder / "plain"
    place.mkdir()
    how: dict[str, Any] = {"op_types_to_quantize": ["MatMul"], "per_channel": True, "weight_type": QuantType.QInt8}
    how["reduce_range"] = sums_overflow()
    quantize_dynamic(folder / "float32" / "model.onnx", place / "model.onnx", **how)
    return place


def bench(subject: Subject, budgets: Sequence[float], options: argparse.Namespace, folder: Path) -> None:
    served: dict[str, Path] = {}
    for budget in budgets:
        started = time.process_time()
        out = folder / f"{budget:g}"
        try:
            done = deploy(
                subject.model, subject.batches, budget={"latency": budget}, out=out, example_inputs=subject.example,
                runtime=options.runtime, finals=options.finals, steps=options.steps, store=options.store,
            )  # fmt: skip
        except ValueError as error:
            print(f"{budget:g}: {error}", flush=True)
            continue
        print(f"{done}\n{time.process_time() - started:.0f} s of the processor\n", flush=True)
        served[f"asked {budget:g}: {done.delivered.name}"] = out
    kind: Any = KINDS.get(options.runtime.partition(":")[0], OnnxRuntime)
    dense = {f"dense, {name}": folder / name for name in ("float32", "int8", "int4")[: 2 if kind is OpenVINO else 3]}
    for place, bits in zip(dense.values(), (32, 8, 4), strict=False):
        place.mkdir()
        runtime = kind(bits)
        if bits < 32:
            read = kind().load(folder / "float32")
            some = subject.batches[: 3 * len(subject.batches) // 4] if kind is OpenVINO else ()
            runtime.rounded(folder / "float32", place, [read.feeds(each) for each in some])
        else:
            runtime.write(subject.model, subject.example, place)
        if isinstance(runtime, LlamaCpp) and runtime.bits == 32:
            runtime.weigh(subject.model, subject.batches[: 3 * len(subject.batches) // 4], place)  # as deploy does
    if kind is OnnxRuntime:
        dense["dense, plain int8"] = plain(folder)
    served = dense | served
    loaded = {name: kind().load(place) for name, place in served.items()}
    feeds = loaded["dense, float32"].feeds(subject.example)
    calls = {name: functools.partial(each.run, feeds) for name, each in loaded.items()}
    times = alternating(calls, _ROUNDS, clock=kind().clock)
    print(head(["", "ms", "times as fast as dense int8", *subject.columns]))
    for name, each in loaded.items():
        ms, faster = 1e3 * statistics.median(times[name]), ratio(times[name], times["dense, int8"])
        found = subject.judge(InRuntime(each).eval())
        print(row([name, f"{ms:.2f}", f"{faster:.2f}", *(f"{value:.4f}" for value in found)]), flush=True)


if __name__ == "__main__":
    main()
