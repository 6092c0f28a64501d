"""The inference benchmark's own arithmetic: tables, caches, and that what is timed is what was judged."""

import pytest
import torch
from torch import nn

from benchmarks.inference import exported, kernels_right
from benchmarks.inference.subjects import Subject
from benchmarks.inference.whole_models import Row, packed_copy, table
from secateur import sparsify
from secateur.allocation import uniform
from secateur.inference import GroupedLinear
from secateur.patterns import GroupedColumns


class Small(Subject):
    title, metric, form = "small", "right, %", ".1f"

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
        self.example = self.judged = (torch.randn(4, 64),)

    def accuracy(self, call):
        return float(torch.as_tensor(call(*self.example)).mean())


def test_a_table_by_hand():
    """Ratios are medians of the rounds' ratios, each beside the fastest rival of its kind."""
    rows = [
        Row("eager", lambda: None, 4_000_000, 97.65, kind="float"),
        Row("compiled", lambda: None, 4_000_000, 97.65, kind="float"),
        Row("int8", lambda: None, 1_000_000, 97.5, kind="int8"),
        Row("packed", lambda: None, 500_000, 96.0, "2 of 3 layers"),
    ]
    times = {"eager": [4.0, 8.0, 6.0], "compiled": [2.0, 2.0, 4.0], "int8": [1.0, 1.0, 1.0], "packed": [1.0, 4.0, 2.0]}
    lines = table(Small(), rows, times, 1).splitlines()
    assert lines[1] == "small, 1 thread; times faster than"
    assert lines[3] == "| | ms | eager | best dense: compiled | best int8: int8 | weights, MB | right, % | |"
    assert lines[4].count("|") == lines[5].count("|") == 9
    assert lines[5] == "| eager | 6.00 | 1.00 | 0.50 | 0.17 | 4.00 | 97.7 |  |"
    assert lines[8] == "| packed | 2.00 | 3.00 | 2.00 | 0.50 | 0.50 | 96.0 | 2 of 3 layers |"


def test_what_is_packed_gives_the_same_outputs():
    subject = Small()
    sparsify(subject.model, 0.75, pattern=GroupedColumns(16), allocate=uniform)
    packed, note = packed_copy(subject, subject.model, kernels_too=False, at_least=1e-9)
    assert note == "2 of 2 layers packed"
    assert isinstance(packed[0], GroupedLinear)
    assert isinstance(subject.model[0], nn.Linear)
    torch.testing.assert_close(packed(*subject.example), subject.model(*subject.example))
    assert exported.bytes_of(packed) < exported.bytes_of(subject.model)


@pytest.mark.parametrize("quantized", [False, True])
def test_grouped_columns_in_onnxruntime(tmp_path, quantized):
    """Also in int8, whose scales are one a tensor where products are batched."""
    subject = Small()
    sparsify(subject.model, 0.5, pattern=GroupedColumns(16), allocate=uniform)
    packed, _ = packed_copy(subject, subject.model, kernels_too=False, at_least=1e-9)
    path = exported.onnx_file(tmp_path / "model.onnx", packed, subject.example, quantized)
    found = torch.from_numpy(exported.session(path, 1)(*subject.example))
    expected = subject.model(*subject.example).detach()
    error = float((found - expected).norm() / expected.norm())
    assert error < (0.05 if quantized else 1e-5)
    assert (error > 1e-5) == quantized


def test_the_kernels_are_compared_with_what_they_should_give(monkeypatch):
    torch.manual_seed(0)
    count, furthest = kernels_right.products(sizes=((16, 16),), batches=(1, 17))
    assert count == 4 * 2 * 3 * 2 * 2
    assert furthest < 1e-4
    assert kernels_right.convolutions() == 60
    assert kernels_right.rounding(sizes=((16, 16),), batches=(1, 33)) == 22
    monkeypatch.setattr(kernels_right.SparseLinear, "forward", lambda self, x: x.new_ones(len(x), 16))
    with pytest.raises(AssertionError, match="not close"):
        kernels_right.products(sizes=((16, 16),), batches=(1,))


def test_ranges_of_activations_are_those_that_were_seen(tmp_path):
    """One small image cuts off what larger ones need."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU()).eval().requires_grad_(False)
    small, large = (0.1 * torch.ones(1, 1, 6, 6),), (torch.randn(1, 1, 6, 6),)
    errors = []
    for name, ranges in (("one", ()), ("two", [small, large])):
        path = exported.onnx_file_of_convolutions(tmp_path / f"{name}.onnx", model, small, ranges)
        found = torch.from_numpy(exported.session(path, 1)(*large))
        errors.append(float((found - model(*large)).norm() / model(*large).norm()))
    assert errors[1] < 0.05 < errors[0]
