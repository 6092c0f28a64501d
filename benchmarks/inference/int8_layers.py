"""Layers of 4096×4096 in int8: zeros that are skipped beside dense int8, in torch and ONNX Runtime.

The dense rivals are torch's dynamic int8 (weights by output, inputs rounded as they come) and ONNX Runtime's
(``quantize_dynamic``, by channel), in the same rounds. An error is ``‖change‖ / ‖output‖`` of what rounding changes of
the sparse layer's output; random weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.inference.exported import int8, onnx_file, session
from benchmarks.inference.products import SIZE, in_milliseconds, masked
from benchmarks.support.tables import head, row
from benchmarks.support.timing import ratio
from secateur import Block, Unstructured
from secateur.inference import BlockLinear, SparseLinear, WindowLinear, to_int8
from secateur.native import describe

DENSE = ["dense int8, torch", "dense int8, ONNX Runtime"]
GOALS = {("16×1 80 %", 1): 1.5, ("unstructured 90 %", 1): 1.5}


def forms(batch: int) -> Iterator[tuple[str, str, Tensor, nn.Module]]:
    """Names of weight and form, the weight, and the layer."""
    weights = {
        "16×1 80 %": masked(Block(16, 1), 0.8),
        "16×1 90 %": masked(Block(16, 1), 0.9),
        "unstructured 80 %": masked(Unstructured(), 0.8),
        "unstructured 90 %": masked(Unstructured(), 0.9),
    }
    for name, weight in weights.items():
        numbers, scales = to_int8(weight)
        if name.startswith("16"):
            yield name, "blocks, float32", weight, BlockLinear.from_dense(weight)
            yield name, "blocks, values in int8", weight, BlockLinear.from_dense(numbers, scales=scales)
            both = BlockLinear.from_dense(numbers, scales=scales, round_inputs=True)
            yield name, "blocks, values and inputs in int8", weight, both
            continue
        yield name, "CSR, float32", weight, SparseLinear.from_dense(weight, batch=batch)
        yield name, "CSR, values in int8", weight, SparseLinear.from_dense(numbers, batch=batch, scales=scales)
        if batch > 16:
            both = SparseLinear.from_dense(numbers, batch=batch, scales=scales, round_inputs=True)
            yield name, "CSR, values and inputs in int8", weight, both
        if batch <= 16:
            yield name, "windows, float32", weight, WindowLinear.from_dense(weight)
            yield name, "windows, values in int8", weight, WindowLinear.from_dense(numbers, scales=scales)
            both = WindowLinear.from_dense(numbers, scales=scales, round_inputs=True)
            yield name, "windows, values and inputs in int8", weight, both


def bench_int8(options: argparse.Namespace) -> None:
    print(f"{SIZE}×{SIZE}; {describe()}; clock: {options.clock}")
    dense = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False)).eval().requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        for threads in options.threads:
            torch.set_num_threads(threads)
            for batch in options.batches:
                x = torch.randn(batch, SIZE)
                path = onnx_file(Path(folder, f"dense-{batch}.onnx"), dense, (x,), True)
                served = session(path, threads)
                rivals: dict[str, Callable[[], Any]] = {
                    "dense float32": partial(dense, x),
                    DENSE[0]: partial(int8(dense), x),
                    DENSE[1]: partial(served, x),
                }
                layers = {f"{name}: {form}": (name, weight, layer) for name, form, weight, layer in forms(batch)}
                calls = {**rivals, **{label: partial(layer, x) for label, (_, _, layer) in layers.items()}}
                times = in_milliseconds(calls, options.rounds, options.clock)
                best = min(DENSE, key=lambda name: statistics.median(times[name]))
                told = "; ".join(f"{name} {statistics.median(times[name]):.2f} ms" for name in rivals)
                print(f"\n{threads} thread(s), {batch} vectors: {told}\n")
                print(head(["layer", "ms", "MB", "error", f"times faster than {best}", "goal"]))
                for label, (name, weight, layer) in layers.items():
                    expected = functional.linear(x, weight)
                    error = float((layer(x) - expected).norm() / expected.norm())
                    size = sum(tensor.nbytes for tensor in layer.state_dict().values()) / 1e6
                    faster, goal = ratio(times[label], times[best]), GOALS.get((name, batch))
                    met = "" if goal is None else f"{goal} {'met' if faster >= goal else 'missed'}"
                    cells = [label, f"{statistics.median(times[label]):.2f}", f"{size:.1f}", f"{error:.1%}"]
                    print(row([*cells, f"**{faster:.2f}**", met]), flush=True)
