"""How fast solvers and their sums are, and what that would be for models of 7 and 70 billion parameters."""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.timing import alternating, ratios
from secateur import NM, Unstructured
from secateur.evidence import add_gram
from secateur.solvers import admm, output_error, sparsegpt


@torch.no_grad()
def plain_sparsegpt(weight: Tensor, gram: Tensor, sparsity: float | None, group: tuple[int, int] | None) -> Tensor:
    """SparseGPT as its paper writes it, in float32: two Cholesky factorizations, an inverse, a column at a time."""
    W, H = weight.clone(), gram.clone()
    columns = W.shape[1]
    H.diagonal().add_(0.01 * H.diagonal().mean())
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)
    for start in range(0, columns, 128):
        end = min(start + 128, columns)
        now, inverse = W[:, start:end].clone(), upper[start:end, start:end]
        d = inverse.diagonal()
        errors = torch.zeros_like(now)
        gone = torch.zeros_like(now, dtype=torch.bool)
        if group is None:
            assert sparsity is not None
            scores = now**2 / d**2
            gone = scores <= scores.flatten().sort()[0][int(scores.numel() * sparsity) - 1]
        for j in range(end - start):
            if group is not None and j % group[1] == 0:
                scores = now[:, j : j + group[1]] ** 2 / d[j : j + group[1]] ** 2
                gone.scatter_(1, j + scores.topk(group[1] - group[0], dim=1, largest=False).indices, True)
            error = torch.where(gone[:, j], now[:, j], 0.0) / d[j]
            now[:, j:] -= error[:, None] @ inverse[j : j + 1, j:]
            errors[:, j] = error
        W[:, start:end] = now.masked_fill_(gone, 0)
        W[:, end:] -= errors @ upper[start:end, end:]
    return W


def solver_speed(width: int, repeats: int) -> list[dict[str, Any]]:
    """The library's SparseGPT beside the plain one, on a square layer, alternating."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * width, width, generator=generator)
    x = x @ (torch.randn(width, width, generator=generator) / width**0.5) + x
    gram = x.T @ x
    weight = torch.randn(width, width, generator=generator) / width**0.5
    del x
    print(f"{width} x {width}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'pattern':8} {'plain s':>8} {'ours s':>8} {'ratio':>12} {'error, plain':>13} {'error, ours':>12}")
    rows = []
    for name, sparsity, pattern in (("50%", 0.5, Unstructured()), ("2:4", None, NM(2, 4))):
        group = (pattern.n, pattern.m) if isinstance(pattern, NM) else None
        new: dict[str, Tensor] = {}

        def plain(new: dict[str, Tensor] = new, sparsity: Any = sparsity, group: Any = group) -> None:
            new["plain"] = plain_sparsegpt(weight, gram, sparsity, group)

        def ours(new: dict[str, Tensor] = new, sparsity: Any = sparsity, pattern: Any = pattern) -> None:
            new["ours"] = sparsegpt(weight, sparsity, pattern, gram=gram.clone())[0]  # a copy: nothing is remembered

        times = alternating({"plain": plain, "ours": ours}, repeats, warm_up=0)
        faster = sorted(ratios(times["ours"], times["plain"]))
        errors = [float(output_error(weight, new[which], gram)) for which in ("plain", "ours")]
        a, b = (statistics.median(times[which]) for which in ("plain", "ours"))
        print(f"{name:8} {a:8.2f} {b:8.2f} {statistics.median(faster):5.2f} ({faster[0]:.2f} … {faster[-1]:.2f}) "
              f"{errors[0]:10.6f} {errors[1]:12.6f}", flush=True)  # fmt: skip
        rows.append({"pattern": name, "plain": a, "ours": b, "ratios": faster, "errors": errors})
    return rows


def gram_speed(width: int, tokens: int, repeats: int) -> dict[str, float]:
    """Ways to add x'x to a Gram matrix, beside all of it in one product; processor time, taking turns."""
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
    half, gram = x.bfloat16(), torch.zeros(width, width)

    def panels(size: int) -> None:
        for start in range(0, width, size):
            gram[start : start + size, start:].addmm_(x[:, start : start + size].T, x[:, start:])

    def halved(start: int, end: int, least: int) -> None:
        if end - start <= least:
            gram[start:end, start:end].addmm_(x[:, start:end].T, x[:, start:end])
            return
        middle = (start + end) // 2
        gram[start:middle, middle:end].addmm_(x[:, start:middle].T, x[:, middle:end])
        halved(start, middle, least)
        halved(middle, end, least)

    ways: dict[str, Callable[[], Any]] = {
        "all of it": lambda: gram.addmm_(x.T, x),
        "the library's": lambda: add_gram(gram, x),
        **{f"upper half, panels of {size}": functools.partial(panels, size) for size in (256, 512, 1024)},
        **{f"upper half, halved to {size}": functools.partial(halved, 0, width, size) for size in (128, 256, 512)},
        "numpy's x.T @ x (syrk)": lambda: x.numpy().T @ x.numpy(),
        "all of it, bfloat16": lambda: half.T @ half,
    }
    seconds = alternating(ways, repeats, clock="cpu", warm_up=0, told="Gram products")
    print(f"{tokens} tokens, {width} inputs, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"bfloat16 instructions: {'yes' if _has_bfloat16() else 'no'}")
    for name, times in seconds.items():
        print(f"{name:27} {statistics.median(times):7.3f} s, {statistics.median(seconds['all of it']) / statistics.median(times):5.2f} times as fast")  # noqa: E501  # fmt: skip
    return {name: statistics.median(times) for name, times in seconds.items()}


def _has_bfloat16() -> bool:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


# Layers of a Llama: how many blocks; the weights (outputs, inputs) of one; the widths of its Gram matrices.
LLAMAS: dict[str, tuple[int, list[tuple[int, int]], list[int]]] = {
    "7 B": (32, [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)], [4096, 4096, 4096, 11008]),
    "70 B": (
        80,
        [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)],
        [8192, 8192, 8192, 28672],
    ),
}


def projection(width: int, tokens: int, disk: Path) -> dict[str, Any]:
    """Hours for a Llama of 7 and of 70 billion parameters: rates are measured here, the rest is arithmetic."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4 * width, width, generator=generator), torch.randn(width, width, generator=generator)

    def rate(operations: float, run: Callable[[], Any]) -> float:
        return operations / statistics.median(alternating({"run": run}, 3)["run"])

    gram = x.T @ x
    # operations of the solvers for n inputs and m outputs, as docs/guides/solvers.md counts them, a product as two
    solvers = {
        "sparsegpt": (sparsegpt, lambda n, m: n**3 / 3 + n * n * m),
        "admm": (admm, lambda n, m: 8 * n**3 + (15 + 8) * 2 * n * n * m),
    }
    measured = {
        "forward": rate(2 * x.shape[0] * width**2, lambda: x @ weight),
        "Gram": rate(x.shape[0] * width**2, lambda: add_gram(None, x)),  # half of the products are needed
    }
    for name, (solver, operations) in solvers.items():
        solve = functools.partial(solver, weight, 0.5, Unstructured())
        measured[name] = rate(operations(width, width), lambda solve=solve: solve(gram=gram.clone()))
    with tempfile.NamedTemporaryFile(dir=disk) as file:
        block = x.numpy().tobytes()
        started = time.perf_counter()
        for _ in range(16):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        measured["writing"] = 16 * len(block) / (time.perf_counter() - started)
    print(f"measured with {torch.get_num_threads()} threads at width {width}: ", end="")
    print(", ".join(f"{name} {value / 1e9:.3g} G/s" for name, value in measured.items()))
    print("\nprojected, hours (bfloat16 weights computed in float32; attention's own products are left out)")
    print(
        f"{'':6} {'GB read, written':>17} {'forward':>8} {'Gram':>6} {'sparsegpt':>10} {'admm':>6} {'disk':>6} "
        f"{'all, admm':>10}"
    )
    found = {}
    for name, (blocks, shapes, grams) in LLAMAS.items():
        weights = sum(rows * columns for rows, columns in shapes)
        hours = {
            "forward": blocks
            * 2
            * 2
            * weights
            * tokens
            / measured["forward"],  # once to see, once with the new weights
            "Gram": blocks * tokens * sum(n * n for n in grams) / measured["Gram"],
            **{
                each: blocks * sum(operations(columns, rows) for rows, columns in shapes) / measured[each]
                for each, (_, operations) in solvers.items()
            },
            "disk": 2 * 2 * blocks * weights / measured["writing"],
        }
        hours = {each: seconds / 3600 for each, seconds in hours.items()}
        whole = sum(hours.values()) - hours["sparsegpt"]
        print(
            f"{name:6} {2 * blocks * weights / 1e9:17.0f} {hours['forward']:8.1f} {hours['Gram']:6.1f} "
            f"{hours['sparsegpt']:10.1f} {hours['admm']:6.1f} {hours['disk']:6.2f} {whole:10.1f}",
            flush=True,
        )
        found[name] = {**hours, "all, admm": whole}
    return {"measured": measured, "hours": found}
