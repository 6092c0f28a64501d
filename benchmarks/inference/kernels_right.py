"""Whether the compiled kernels are right on a machine where the tests do not run, such as one that is emulated.

    python benchmarks/inference/kernels_right.py

Law: it needs torch and the library alone. Each product is compared with the same in float64, each convolution with the
dense one, where a removed weight is 0.
"""

from __future__ import annotations

import platform
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur import native
from secateur.inference import BlockConv2d, BlockLinear, SparseConv2d, SparseLinear, WindowLinear

SIZES = ((1, 1), (16, 16), (33, 90), (70, 37), (128, 256))
BATCHES = (1, 2, 15, 16, 17, 33, 65, 130)
CONVOLUTIONS = (
    (1, 1, 0, 1),
    (3, 1, 1, 1),
    (3, 2, 1, 1),
    (5, 1, 2, 1),
    (3, 1, 2, 2),
)  # kernel, stride, padding, dilation


def products(sizes: tuple[tuple[int, int], ...] = SIZES, batches: tuple[int, ...] = BATCHES) -> tuple[int, float]:
    """How many were right, and the furthest from float64; `AssertionError` for one that is not."""
    count, furthest = 0, 0.0
    for rows, columns in sizes:
        for density in (0.0, 0.05, 0.3, 1.0):
            for dtype in (torch.float32, torch.bfloat16):
                alone = torch.rand(rows, columns) < density
                blocks = (torch.rand(-(-rows // 16), columns) < density).repeat_interleave(16, 0)[:rows]
                weights = {
                    kind: (torch.randn(rows, columns) * alone).to(dtype) for kind in (SparseLinear, WindowLinear)
                }
                for kind, weight in {**weights, BlockLinear: (torch.randn(rows, columns) * blocks).to(dtype)}.items():
                    for bias in (None, torch.randn(rows)):
                        layer = kind.from_dense(weight, bias)
                        for batch in batches:
                            furthest = max(furthest, _off(layer, torch.randn(batch, columns), weight, bias))
                            count += 1
    return count, furthest


def _off(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    found = layer(x).double()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    return float((found - wanted).abs().max())


@torch.no_grad()
def convolutions() -> int:
    """How many were right; `AssertionError` for one that is not."""
    count = 0
    for groups in (1, 2, 4):
        for kernel, stride, padding, dilation in CONVOLUTIONS:
            dense = nn.Conv2d(8, 16, kernel, stride, padding, dilation, groups)
            dense.weight.mul_(torch.rand_like(dense.weight) < 0.2)
            for form in (SparseConv2d, BlockConv2d):
                packed = form.from_module(dense)
                for size in (1, 3):
                    x = torch.randn(size, 8, 11, 13)
                    torch.testing.assert_close(packed(x), dense(x), rtol=1e-4, atol=1e-4)
                    count += 1
    return count


@torch.no_grad()
def rounding(sizes: tuple[tuple[int, int], ...] = SIZES, batches: tuple[int, ...] = BATCHES) -> int:
    """How many that round weights and inputs to int8 were right; `AssertionError` for one that is not.

    Inputs are whole numbers from 0 to 255 less something, which are rounded to themselves.
    """
    count = 0
    for less in (0, 100):
        for rows, columns in sizes:
            numbers = torch.randint(-127, 128, (rows, columns)) * (torch.rand(rows, columns) < 0.3)
            for kind in (SparseLinear, WindowLinear, BlockLinear):
                layer = kind.from_dense(numbers.to(torch.int8), scales=torch.ones(rows), round_inputs=True)
                for batch in batches:
                    x = _whole(batch, columns) - less
                    torch.testing.assert_close(layer(x), x @ numbers.t().float(), rtol=1e-5, atol=1e-2)
                    count += 1
        for kernel, stride, padding, dilation in CONVOLUTIONS:
            numbers = torch.randint(-127, 128, (20, 8, kernel, kernel)) * (torch.rand(20, 8, kernel, kernel) < 0.2)
            geometry = {"stride": [stride] * 2, "padding": [padding] * 4, "dilation": [dilation] * 2}
            packed = SparseConv2d.from_dense(
                numbers.to(torch.int8), scales=torch.ones(20), round_inputs=True, **geometry
            )
            x = _whole(3, 8 * 11 * 13).view(3, 8, 11, 13) - less
            wanted = functional.conv2d(x, numbers.float(), None, stride, padding, dilation)
            torch.testing.assert_close(packed(x), wanted, rtol=1e-5, atol=1e-2)
            count += 1
    return count


def _whole(batch: int, columns: int) -> Tensor:
    x = torch.randint(0, 256, (batch, columns)).float()
    x[:, 0], x[:, -1] = 0.0, 255.0
    return x


def main() -> None:
    torch.manual_seed(0)
    print(f"{platform.machine()}, torch {torch.__version__}, {native.describe()}", flush=True)
    count, furthest = products()
    print(f"{count:,} products are right; the furthest is {furthest:.1e} from float64.", flush=True)
    print(f"{rounding()} with weights and inputs in int8 are right.", flush=True)
    print(f"{convolutions()} convolutions are right; {time.process_time():.0f} s of the processor.")


if __name__ == "__main__":
    main()
