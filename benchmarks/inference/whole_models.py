"""Whole models with trained weights: what pruning does to milliseconds and bytes, with the accuracy beside it.

Law: no latency without an accuracy; the rows of a table run in one process, alternating, and a ratio is the median of
the rounds' ratios; dense rivals (torch.compile, ONNX Runtime, int8) run in the same rounds as what is pruned.

Trained and pruned weights, and their accuracies, stay in ``--cache``: a second run only measures time.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.inference.exported import bytes_of, int8, onnx_file, quiet, session, slug
from benchmarks.inference.onnx_layers import SPARSITIES
from benchmarks.inference.products import in_milliseconds
from benchmarks.inference.subjects import Digits, Subject, cached, subjects
from benchmarks.support.timing import ratio
from secateur.inference import pack
from secateur.patterns import parse
from secateur.shrinking import load_shrunken, save_shrunken

PATTERNS = ("unstructured", "16x1", "columns:64")

TRAINED_ON = ("columns:64", 0.8)  # the sparse form that has the shrunken one's training, too


class Accuracies:
    """What was judged before, by row, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, row: str, measure: Callable[[], float]) -> float:
        if row not in self.known:
            with torch.no_grad():
                self.known[row] = measure()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.known, indent=1))
        return self.known[row]


def variants(subject: Subject, cache: Path) -> Iterator[tuple[str, nn.Module]]:
    """Every pruned model, dense tensors with zeros in them, and the shrunken one."""
    for word in PATTERNS:
        for sparsity in SPARSITIES:
            name = label(word, sparsity)
            model = copy.deepcopy(subject.model)
            cached(cache / f"{slug(name)}.safetensors", model, partial(_prune, subject, word, sparsity))
            yield name, model
            if (word, sparsity) == TRAINED_ON and not isinstance(subject, Digits):
                name = f"{name}, trained on"
                cached(cache / f"{slug(name)}.safetensors", model, partial(_train_on, subject))
                yield name, model
    model, folder = copy.deepcopy(subject.model), cache / "shrunken"
    if folder.exists():
        load_shrunken(model, folder)
    else:
        print(f"  making {cache.name}/shrunken", flush=True)
        subject.shrink(model)
        subject.train(model, None)
        save_shrunken(model, folder)
    yield "shrink, half the MACs", model.eval()


def _prune(subject: Subject, word: str, sparsity: float, model: nn.Module) -> None:
    subject.prune(model, parse(word), sparsity)


def _train_on(subject: Subject, model: nn.Module) -> None:
    masks = {
        name: weight != 0 for name, weight in model.named_parameters() if weight.dim() == 2 and (weight == 0).any()
    }
    subject.train(model, masks)


def label(word: str, sparsity: float) -> str:
    return f"{word.replace('x', '×')} {100 * sparsity:.0f} %"


@dataclass
class Row:
    """One way to run a model: what one call is, the bytes of its weights, what it costs in accuracy."""

    name: str
    call: Callable[[], Any]
    bytes: int
    accuracy: float
    note: str = ""
    kind: str = "pruned"  # or float, or int8: the dense rivals


def rows_of(subject: Subject, cache: Path, folder: Path, threads: int) -> list[Row]:
    """All rows of a subject at this number of threads; models that are exported go to ``folder``, once for all."""
    accuracies = Accuracies(cache / "accuracies.json")
    example = subject.example
    rows: list[Row] = []

    def torch_row(name: str, model: nn.Module, accuracy: str, **more: Any) -> None:
        served = subject.serve(model)
        judge = subject.judge(model)
        rows.append(
            Row(
                name,
                lambda: served(*example),
                bytes_of(model),
                accuracies.of(accuracy, lambda: subject.accuracy(judge)),
                **more,
            )
        )

    def onnx_row(name: str, model: nn.Module, quantized: bool, **more: Any) -> None:
        """As `torch_row`, in ONNX Runtime; what it can't export or run is said."""
        try:
            served = judged = onnx_file(folder / f"{slug(name)}.onnx", subject.serve(model), example, quantized)
            run = judge = session(served, threads)
            if subject.judged is not example:
                judged = onnx_file(
                    folder / f"{slug(name)}-judged.onnx", subject.judge(model), subject.judged, quantized
                )
                judge = session(judged, threads)
            accuracy = accuracies.of(name, lambda: subject.accuracy(judge))
            rows.append(Row(name, lambda: run(*example), judged.stat().st_size, accuracy, **more))
        except Exception as error:  # an exporter's failure is a finding
            said(name, error)

    def said(name: str, error: Exception) -> None:
        print(f"({subject.title}: no {name}: {type(error).__name__}: {str(error)[:200].splitlines()})", flush=True)

    dense = subject.model
    torch_row("eager", dense, "eager", kind="float")
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(subject.serve(dense)), options={"freezing": True})
    name = "torch.compile, frozen"
    try:
        with quiet():
            compiled(*example)
        rows.append(Row(name, lambda: compiled(*example), bytes_of(dense), rows[0].accuracy, kind="float"))
    except Exception as error:  # as above
        said(name, error)
    onnx_row("ONNX Runtime", dense, False, kind="float")
    torch_row("int8, torch", int8(dense), "int8, torch", kind="int8")
    onnx_row("int8, ONNX Runtime", dense, True, kind="int8")
    for name, model in variants(subject, cache):
        if name.startswith("shrink"):
            torch_row(name, model, name)
            onnx_row(f"{name}, ONNX Runtime", model, False)
            torch_row(f"{name}, int8 (torch)", int8(model), f"{name}, int8 (torch)")
            onnx_row(f"{name}, int8 (ONNX Runtime)", model, True)
            continue
        accuracy = accuracies.of(name, lambda model=model: subject.accuracy(subject.judge(model)))
        packed, note = packed_copy(subject, model)
        served = subject.serve(packed)
        rows.append(Row(f"{name}, packed", partial(served, *example), bytes_of(packed), accuracy, note))
        if name.startswith("columns"):
            plain, note = packed_copy(subject, model, kernels_too=False, at_least=1e-9)
            onnx_row(f"{name}, ONNX Runtime", plain, False, note=note)
            onnx_row(f"{name}, int8 (ONNX Runtime)", plain, True, note=note)
    return rows


def packed_copy(subject: Subject, model: nn.Module, **how: Any) -> tuple[nn.Module, str]:
    """A packed copy, made sure to give the masked model's outputs, and how many layers were packed."""
    model = copy.deepcopy(model)
    served = subject.serve(model)
    with torch.no_grad():
        expected = served(*subject.example)
        packing = pack(served, subject.example, **how)
        found = served(*subject.example)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    return model, f"{len(packing.packed)} of {len(packing.layers)} layers packed"


def table(subject: Subject, rows: list[Row], times: dict[str, list[float]], threads: int) -> str:
    """Markdown: what each row takes and holds, and how many times faster it is than three dense rivals."""

    def fastest(kind: str) -> Row | None:
        return min(
            (row for row in rows if row.kind == kind), key=lambda row: statistics.median(times[row.name]), default=None
        )

    rivals = [rows[0], fastest("float"), fastest("int8")]
    heads = ["eager"] + [
        f"best {word}: {row.name}" for word, row in zip(("dense", "int8"), rivals[1:], strict=True) if row
    ]
    lines = [
        f"\n{subject.title}, {threads} thread{'s' * (threads > 1)}; times faster than\n",
        "| | ms | " + " | ".join(heads) + f" | weights, MB | {subject.metric} | |",
        "|---" * (5 + len(heads)) + "|",
    ]
    for row in rows:
        faster = [f"{ratio(times[row.name], times[rival.name]):.2f}" for rival in rivals if rival]
        lines.append(
            f"| {row.name} | {statistics.median(times[row.name]):.2f} | {' | '.join(faster)} | {row.bytes / 1e6:.2f} | "
            f"{format(row.accuracy, subject.form)} | {row.note} |"
        )
    return "\n".join(lines)


def bench_models(options: Any) -> None:
    makers = subjects(options)
    chosen = [name for name in makers if any(fnmatch.fnmatch(name, word) for word in options.only.split(","))]
    if not chosen:
        raise SystemExit(f"--only {options.only} matches none of {', '.join(makers)}.")
    started = time.monotonic()
    for name in chosen:
        make, place = makers[name]
        torch.set_num_threads(max(options.threads))  # to train and prune with
        cache = options.cache / place
        subject = make(cache)
        for _ in variants(subject, cache):  # all that is missing, before anything is timed
            pass
        with tempfile.TemporaryDirectory() as folder:
            for threads in options.threads:
                torch.set_num_threads(threads)
                with torch.no_grad():
                    rows = rows_of(subject, cache, Path(folder), threads)
                    times = in_milliseconds({row.name: row.call for row in rows}, options.rounds, options.clock)
                print(table(subject, rows, times, threads), flush=True)
    print(f"\nAll of it took {(time.monotonic() - started) / 60:.0f} minutes.")
