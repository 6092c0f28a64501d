"""Kernels that skip zeros, beside the best dense product and their floors.

The best dense product is the fastest of torch's `linear`, the same on a transposed weight, and oneDNN's packed one
(which a frozen `torch.compile` uses), measured in the same rounds.

A floor is the larger of two times: the bytes that a product has to read, over the bandwidth of summing 256 MB, and its
multiplications and additions, over the rate of a dense product of 2048³; both measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.support.tables import head, row
from benchmarks.support.timing import alternating, ratio
from secateur import Block, Unstructured, sparsify
from secateur.allocation import uniform
from secateur.inference import BlockLinear, GroupedLinear, SparseLinear, WindowLinear
from secateur.native import describe, library, loading
from secateur.patterns import GroupedColumns

SIZE = 4096

# the least ratios to the best dense product that were asked for, at batches 1, 16 and 256
GOALS = {
    "CSR 80 %": (1.6, 2.1, 1.4),
    "CSR 90 %": (3.1, 4.0, 3.0),
    "CSR 95 %": (5.9, 7.8, 5.5),
    "16×1 90 %": (4.9, 8.0, 5.6),
    "grouped columns 80 %": (2.1, 2.4, 3.4),
    "grouped columns 90 %": (3.2, 4.8, 6.2),
    "windows bfloat16 50 %": (1.4,),  # asked of a bitmask
    "windows bfloat16 70 %": (2.0,),
    "windows bfloat16 90 %": (2.2,),
}


def in_milliseconds(functions: dict[str, Callable[[], Any]], rounds: int, clock: str) -> dict[str, list[float]]:
    """Of each in each round; threads are parted, and those of the runtime before asleep."""
    with torch.no_grad():
        times = alternating(functions, rounds, clock=clock, settle=0.05, at_least=0.01)
    return {name: [1e3 * seconds for seconds in own] for name, own in times.items()}


def floors(rounds: int, clock: str) -> tuple[float, float]:
    """(bytes, operations) in a millisecond."""
    large, square = torch.ones(64 << 20), torch.randn(2048, 2048)
    times = in_milliseconds({"sum": large.sum, "product": lambda: square @ square}, rounds, clock)
    return large.nbytes / statistics.median(times["sum"]), 2 * 2048**3 / statistics.median(times["product"])


@functools.cache
def masked(pattern: Any, sparsity: float, dtype: torch.dtype = torch.float32) -> Tensor:
    layer = nn.Linear(SIZE, SIZE, bias=False)
    sparsify(layer, sparsity, pattern=pattern, allocate=uniform)
    return layer.weight.detach().to(dtype)


@functools.cache
def windows(sparsity: float, dtype: torch.dtype) -> WindowLinear:
    return WindowLinear.from_dense(masked(Unstructured(), sparsity, dtype))


def forms(batch: int) -> Iterator[tuple[str, torch.dtype, Any]]:
    """Names, dtypes and layers; windows for few vectors only, as `pack` does."""
    for dtype, word in ((torch.float32, ""), (torch.bfloat16, "bfloat16 ")):
        for sparsity in (0.5, 0.7, 0.8, 0.9, 0.95) if batch <= 16 else ():
            yield f"windows {word}{sparsity * 100:.0f} %", dtype, windows(sparsity, dtype)
        for sparsity in (0.5, 0.7, 0.9) if word else (0.8, 0.9, 0.95):
            weight = masked(Unstructured(), sparsity, dtype)
            yield f"CSR {word}{sparsity * 100:.0f} %", dtype, SparseLinear.from_dense(weight, batch=batch)
    for sparsity in (0.8, 0.9):
        yield (
            f"16×1 {sparsity * 100:.0f} %",
            torch.float32,
            BlockLinear.from_dense(masked(Block(16, 1), sparsity)),
        )
    for sparsity in (0.8, 0.9):
        yield (
            f"grouped columns {sparsity * 100:.0f} %",
            torch.float32,
            GroupedLinear.from_dense(masked(GroupedColumns(256), sparsity), outputs=256).requires_grad_(False),
        )


def dense_products(weight: Tensor, x: Tensor) -> dict[str, Callable[[], Any]]:
    turned = weight.t().contiguous()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0])
    return {
        "linear": lambda: functional.linear(x, weight),
        "transposed": lambda: x @ turned,
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
    }


def bench_kernels(options: argparse.Namespace) -> None:
    print(f"{SIZE}×{SIZE}; {describe()}; clock: {options.clock}\n")
    for threads in options.threads:
        torch.set_num_threads(threads)
        bandwidth, rate = floors(options.rounds, options.clock)
        print(f"\n{threads} thread(s): {bandwidth / 1e6:.1f} GB/s, {rate / 1e6:.0f} GFLOP/s\n")
        columns = ["form", "batch", "best dense, ms", "ours, ms", "times faster", "goal", "floor, ms", "ours / floor"]
        print(head(columns))
        for number, batch in enumerate(options.batches):
            x = torch.randn(batch, SIZE)
            dense = {kind: torch.randn(SIZE, SIZE).to(kind) for kind in (torch.float32, torch.bfloat16)}
            for name, dtype, layer in forms(batch):
                own_x = x.to(dtype)
                rivals = dense_products(dense[dtype], own_x)
                times = in_milliseconds({**rivals, "ours": partial(layer, own_x)}, options.rounds, options.clock)
                best = min(rivals, key=lambda rival: statistics.median(times[rival]))
                ours, faster = statistics.median(times["ours"]), ratio(times["ours"], times[best])
                read = sum(tensor.nbytes for tensor in layer.state_dict().values()) + 8 * batch * SIZE
                floor = max(read / bandwidth, 2 * layer.values.numel() * batch / rate)
                goals = GOALS.get(name, ())
                goal = (
                    f"{goals[number]} {'met' if faster >= goals[number] else 'missed'}" if number < len(goals) else ""
                )
                rival = f"{statistics.median(times[best]):.2f} ({best})"
                cells = [name, f"{batch}", rival, f"{ours:.2f}", f"**{faster:.2f}**", goal, f"{floor:.2f}"]
                print(row([*cells, f"{ours / floor:.1f}"]), flush=True)


def bench_threads(options: argparse.Namespace) -> None:
    """A kernel between torch's operations, in two threads of torch's and in two of its own."""
    torch.set_num_threads(2)
    compiled = library()
    if compiled is None or loading._team() is None:
        raise SystemExit(f"nothing to compare here: {describe()}")
    print("two threads; a pruned pair of layers of 384 and 1536, GELU between and LayerNorm after, four times\n")
    print(head(["form", "batch", "own threads, ms", "torch's, ms", "times faster"]))
    norm = nn.LayerNorm(384)
    for name, pattern in (("CSR", Unstructured()), ("16×1", Block(16, 1))):
        for sparsity in (0.8, 0.9):
            widen, narrow = nn.Linear(384, 1536, bias=False), nn.Linear(1536, 384, bias=False)
            for layer in (widen, narrow):
                sparsify(layer, sparsity, pattern=pattern, allocate=uniform)
            for batch in options.batches:
                x = torch.randn(batch, 384)
                pair = [
                    SparseLinear.from_dense(layer.weight.detach(), batch=batch)
                    if name == "CSR"
                    else BlockLinear.from_dense(layer.weight.detach())
                    for layer in (widen, narrow)
                ]

                def stack(team: Any, x: Tensor = x, pair: list[Any] = pair) -> Tensor:
                    compiled.secateur_team(team)
                    for _ in range(4):
                        x = norm(x + pair[1](functional.gelu(pair[0](x))))
                    return x

                forms = {"own": partial(stack, None), "torch": partial(stack, loading._team())}
                times = in_milliseconds(forms, options.rounds, "wall")
                own, shared = (statistics.median(times[word]) for word in ("own", "torch"))
                faster = ratio(times["torch"], times["own"])
                label = f"{name} {sparsity * 100:.0f} %"
                print(row([label, f"{batch}", f"{own:.2f}", f"{shared:.2f}", f"**{faster:.2f}**"]), flush=True)
