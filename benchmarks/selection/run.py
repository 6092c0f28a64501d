"""Global pruning of 100 M float32 weights in 8 layers, and n:m and block masks of a 4096×11008 layer.

    python benchmarks/selection/run.py [--repeats 5] [--json FILE]

Each measurement is a process of its own; ours and torch's alternate; medians. Time is that of the one call. Peak memory
is the growth of the resident set's high-water mark during the call, as a multiple of the model's bytes (Linux only).
The floor is the memory traffic alone: all weights read, the masks written, all weights read and written.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import resource
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.support.memory import from_its_peak
from benchmarks.support.processes import in_a_process
from benchmarks.support.timing import alternating, timed

LAYERS, OUTPUTS, INPUTS = 8, 2500, 5000
BYTES = LAYERS * OUTPUTS * INPUTS * 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(INPUTS, OUTPUTS, bias=False) for _ in range(LAYERS)))


def theirs_global(amount: float, model: nn.Module) -> object:
    from torch.nn.utils import prune

    return prune.global_unstructured([(m, "weight") for m in model], prune.L1Unstructured, amount=amount)


def ours_global(amount: float, model: nn.Module) -> object:
    from secateur import prune

    return prune.global_unstructured([(m, "weight") for m in model], prune.L1Unstructured, amount=amount)


def ours_sparsify(amount: float, model: nn.Module) -> object:
    from secateur import sparsify

    return sparsify(model, amount)


def floor(_: float, model: nn.Module) -> object:
    """The memory traffic alone, in torch's own operations."""
    masks = [torch.empty(m.weight.shape, dtype=torch.bool) for m in model]
    with torch.no_grad():
        for m in model:
            m.weight.sum()
        for mask in masks:
            mask.fill_(True)
        for m in model:
            m.weight.neg_()
    return masks


CASES = {"torch": theirs_global, "prune": ours_global, "sparsify": ours_sparsify, "floor": floor}


def child(case: str, amount: float) -> None:
    import secateur  # noqa: F401  (imports are not what is timed)

    model = network()
    small = nn.Sequential(nn.Linear(600, 600, bias=False))
    CASES[case](amount, small)  # lazy imports and first calls
    with from_its_peak() as memory:
        seconds, kept = timed(functools.partial(CASES[case], amount, model))
    zeros = sum(int((m.weight == 0).sum()) for m in model) if case != "floor" else 0
    print(json.dumps({"seconds": seconds, "growth": memory["peak"], "zeros": zeros, "kept": kept is not None}))


def measure(case: str, amount: float) -> dict[str, float]:
    found: dict[str, float] = in_a_process(case, __file__, "--child", case, "--amount", str(amount))
    return found


def median(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def seconds_of(action: Callable[[], object], repeats: int = 7) -> float:
    return statistics.median(alternating({"action": action}, repeats)["action"])


def patterns_on_one_layer() -> list[dict[str, object]]:
    from secateur import Block, NM, make_masks  # noqa: I001
    from secateur.allocation import uniform

    weight = torch.randn(4096, 11008)
    target = torch.empty_like(weight)
    rows = []
    for pattern in (NM(2, 4), NM(4, 8), NM(1, 4), Block(16, 1), Block(4, 4), Block(32, 32)):
        sparsity = None if pattern.density is not None else 0.5
        ours = functools.partial(make_masks, {"w": weight}, sparsity, pattern=pattern, allocate=uniform)
        passes = seconds_of(weight.abs) + seconds_of(functools.partial(target.copy_, weight))
        seconds = seconds_of(ours, 5)
        rows.append({"pattern": str(pattern), "seconds": seconds, "abs + write": passes, "ratio": seconds / passes})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=CASES)
    parser.add_argument("--amount", type=float, default=0.5)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.amount)
        return
    results: dict[str, object] = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "memory": resource.getpagesize(),
    }
    print(results["machine"])
    print(f"{'amount':>7} {'case':>9} {'seconds':>9} {'min':>7} {'max':>7} {'ratio':>7} {'peak/model':>11}")
    for amount in (0.5, 0.9):
        runs: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
        for _ in range(arguments.repeats):
            for case in CASES:
                runs[case].append(measure(case, amount))
        expected = round(amount * BYTES / 4)
        for case, found in runs.items():
            assert case == "floor" or all(run["zeros"] == expected for run in found), case
            seconds = median(found, "seconds")
            growth = median(found, "growth") - (BYTES / 4 if case == "sparsify" else 0)
            ratio = median(runs["torch"], "seconds") / seconds
            times = [run["seconds"] for run in found]
            print(f"{amount:7} {case:>9} {seconds:9.3f} {min(times):7.3f} {max(times):7.3f} {ratio:6.1f}x "
                  f"{growth / BYTES:11.3f}")  # fmt: skip
            results[f"{case} {amount}"] = {"seconds": seconds, "ratio": ratio, "peak": growth / BYTES}
    print("sparsify's peak is beyond the model and its bool masks (0.25 of the model).")
    results["patterns"] = patterns_on_one_layer()
    for row in results["patterns"]:  # type: ignore[attr-defined]
        print(f"{row['pattern']:>42}: {row['seconds']:.3f} s, {row['ratio']:.2f} times abs() + one write pass")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
