"""What zeros are worth at inference: kernels beside the best dense product and their floors, and whole models.

    python benchmarks/inference.py kernels [--threads 1,2] [--batches 1,16,256] [--rounds 9] [--clock wall|cpu]
    python benchmarks/inference.py threads [--batches 1,16,256] [--rounds 9]
    python benchmarks/inference.py models [--threads 1,2] [--only mlp,llama] [--minilm DIR] [--cache DIR] [--rounds 9]
    python benchmarks/inference.py onnx [--threads 1,2] [--batches 1,16,256] [--rounds 9] [--clock wall|cpu]

Law: everything that is compared runs in one process, alternating, and a ratio is the median of the rounds' ratios. The
best dense product is the fastest of torch's `linear`, the same on a transposed weight, and oneDNN's packed one (which a
frozen `torch.compile` uses), measured in the same rounds. On a busy machine ``--clock cpu`` with one thread is
steadier.

A floor is the larger of two times: the bytes that a product has to read, over the bandwidth of summing 256 MB, and its
multiplications and additions, over the rate of a dense product of 2048³; both measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur import Block, Unstructured, sparsify
from secateur.allocation import uniform
from secateur.inference import BlockLinear, GroupedLinear, SparseLinear, WindowLinear
from secateur.native import kernels
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


def alternating(functions: dict[str, Callable[[], Any]], rounds: int, clock: str) -> dict[str, list[float]]:
    """Milliseconds of each in each round, after one that does not count.

    Threads of the runtime before go on looking for work for a while after their call, and those of this one may wake on
    one core and be parted only later. So each is waited for, and calls count after a twentieth of a second of others.
    """
    now = time.perf_counter if clock == "wall" else time.process_time
    times: dict[str, list[float]] = {name: [] for name in functions}

    def called(function: Callable[[], Any], seconds: float) -> float:
        started, calls = now(), 0
        while calls < 1 or now() - started < seconds:
            function()
            calls += 1
        return (now() - started) / calls

    with torch.no_grad():
        for turn in range(rounds + 1):
            for name, function in functions.items():
                time.sleep(0.02)
                called(function, 0.05)
                milliseconds = called(function, 0.01) * 1e3
                if turn:
                    times[name].append(milliseconds)
    return times


def ratio(ours: list[float], rival: list[float]) -> float:
    return statistics.median(theirs / own for own, theirs in zip(ours, rival, strict=True))


def floors(rounds: int, clock: str) -> tuple[float, float]:
    """(bytes, operations) in a millisecond."""
    large, square = torch.ones(64 << 20), torch.randn(2048, 2048)
    times = alternating({"sum": large.sum, "product": lambda: square @ square}, rounds, clock)
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
    print(f"{SIZE}×{SIZE}; {kernels.describe()}; clock: {options.clock}\n")
    for threads in options.threads:
        torch.set_num_threads(threads)
        bandwidth, rate = floors(options.rounds, options.clock)
        print(f"\n{threads} thread(s): {bandwidth / 1e6:.1f} GB/s, {rate / 1e6:.0f} GFLOP/s\n")
        print("| form | batch | best dense, ms | ours, ms | times faster | goal | floor, ms | ours / floor |")
        print("|---|---|---|---|---|---|---|---|")
        for number, batch in enumerate(options.batches):
            x = torch.randn(batch, SIZE)
            dense = {kind: torch.randn(SIZE, SIZE).to(kind) for kind in (torch.float32, torch.bfloat16)}
            for name, dtype, layer in forms(batch):
                own_x = x.to(dtype)
                rivals = dense_products(dense[dtype], own_x)
                times = alternating({**rivals, "ours": partial(layer, own_x)}, options.rounds, options.clock)
                best = min(rivals, key=lambda rival: statistics.median(times[rival]))
                ours, faster = statistics.median(times["ours"]), ratio(times["ours"], times[best])
                read = sum(tensor.nbytes for tensor in layer.state_dict().values()) + 8 * batch * SIZE
                floor = max(read / bandwidth, 2 * layer.values.numel() * batch / rate)
                goals = GOALS.get(name, ())
                goal = (
                    f"{goals[number]} {'met' if faster >= goals[number] else 'missed'}" if number < len(goals) else ""
                )
                print(
                    f"| {name} | {batch} | {statistics.median(times[best]):.2f} ({best}) | {ours:.2f} | "
                    f"**{faster:.2f}** | {goal} | {floor:.2f} | {ours / floor:.1f} |",
                    flush=True,
                )


def bench_threads(options: argparse.Namespace) -> None:
    """A kernel between torch's operations, in two threads of torch's and in two of its own."""
    torch.set_num_threads(2)
    compiled = kernels._library()[0]
    if compiled is None or kernels._team() is None:
        raise SystemExit(f"nothing to compare here: {kernels.describe()}")
    print("two threads; a pruned pair of layers of 384 and 1536, GELU between and LayerNorm after, four times\n")
    print("| form | batch | own threads, ms | torch's, ms | times faster |")
    print("|---|---|---|---|---|")
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

                forms = {"own": partial(stack, None), "torch": partial(stack, kernels._team())}
                times = alternating(forms, options.rounds, "wall")
                own, shared = (statistics.median(times[word]) for word in ("own", "torch"))
                faster = ratio(times["torch"], times["own"])
                label = f"{name} {sparsity * 100:.0f} %"
                print(f"| {label} | {batch} | {own:.2f} | {shared:.2f} | **{faster:.2f}** |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("what", choices=["kernels", "threads", "models", "onnx"])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--batches", type=numbers, default=[1, 16, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--only", default="*", help="which models: mlp, cnn, bottlenecks, minilm, llama; globs, commas")
    parser.add_argument("--minilm", type=Path, help="the folder of all-MiniLM-L6-v2; left out without")
    parser.add_argument("--cache", type=Path, default=Path("inference-cache"), help="trained and pruned models")
    parser.add_argument("--gpt-steps", type=int, default=500)
    parser.add_argument("--repair-steps", type=int, default=200)
    options = parser.parse_args()
    if options.what == "kernels":
        bench_kernels(options)
    elif options.what == "threads":
        bench_threads(options)
    else:
        import whole_models

        whole_models.bench_models(options) if options.what == "models" else whole_models.bench_onnx(options)


if __name__ == "__main__":
    main()
