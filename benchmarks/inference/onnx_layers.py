"""Grouped columns in ONNX Runtime: three ways to write them, and int8, beside the dense layer there."""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.inference.exported import onnx_file, session, slug
from benchmarks.inference.products import in_milliseconds
from benchmarks.support.tables import head, row
from secateur import sparsify
from secateur.allocation import uniform
from secateur.inference import GroupedLinear
from secateur.patterns import GroupedColumns

SPARSITIES = (0.5, 0.8, 0.9)


class _ColumnsGathered(nn.Module):
    """A `GroupedLinear` as torch computes it best: columns of the inputs are gathered."""

    def __init__(self, layer: GroupedLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        groups, kept, outputs = self.layer.values.shape
        inputs = x.index_select(1, self.layer.indices.reshape(-1)).view(-1, groups, kept).transpose(0, 1)
        return torch.bmm(inputs, self.layer.values).transpose(0, 1).reshape(-1, groups * outputs) + self.layer.bias


class _Separate(_ColumnsGathered):
    """Rows of the transposed inputs gathered, and a product of its own for each group."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        inputs = x.t().index_select(0, layer.indices.reshape(-1)).split(layer.values.shape[1])
        products = [values.t() @ part for part, values in zip(inputs, layer.values, strict=True)]
        return torch.cat(products).t() + layer.bias


def bench_onnx(options: Any) -> None:
    """Grouped columns in ONNX Runtime: three ways to write them, and int8, beside the dense layer there."""
    for threads in options.threads:
        print(f"\n{threads} thread{'s' * (threads > 1)}; milliseconds in ONNX Runtime\n")
        ways = ["dense", "columns gathered", "separate products", "**rows gathered**", "dense int8", "int8"]
        print(head(["layer", "batch", *ways]))
        for rows, columns, outputs in ((1536, 384, 64), (2048, 2048, 256)):
            for sparsity in SPARSITIES:
                torch.manual_seed(0)
                dense = nn.Linear(columns, rows)
                sparsify(nn.Sequential(dense), sparsity, pattern=GroupedColumns(outputs), allocate=uniform)
                layer = GroupedLinear.from_dense(dense.weight, dense.bias, outputs=outputs).requires_grad_(False)
                forms = {
                    "dense": (dense, False),
                    "columns": (_ColumnsGathered(layer), False),
                    "separate": (_Separate(layer), False),
                    "rows": (layer, False),
                    "dense int8": (dense, True),
                    "int8": (layer, True),
                }
                for batch in options.batches:
                    x = torch.randn(batch, columns)
                    with tempfile.TemporaryDirectory() as folder:
                        calls = {
                            name: partial(
                                session(onnx_file(Path(folder, f"{slug(name)}.onnx"), form, (x,), small), threads), x
                            )
                            for name, (form, small) in forms.items()
                        }
                        times = in_milliseconds(calls, options.rounds, options.clock)
                    label = f"{rows}×{columns}, g = {outputs}, {100 * sparsity:.0f} %"
                    medians = [f"{statistics.median(own):.3f}" for own in times.values()]
                    print(row([label, f"{batch}", *medians]), flush=True)
