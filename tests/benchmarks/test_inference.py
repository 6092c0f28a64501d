"""The inference benchmark's own arithmetic: tables, caches, and that what is timed is what was judged."""

import argparse

import pytest
import torch
from torch import nn

from benchmarks.inference import convolutions, exported, kernels_right, products, scenes
from benchmarks.inference.exported import slug
from benchmarks.inference.subjects import Subject, bottlenecks, cached, mlp
from benchmarks.inference.whole_models import Accuracies, Row, label, packed_copy, table
from secateur import sparsify
from secateur.allocation import uniform
from secateur.inference import GroupedLinear
from secateur.native import available, loading
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


def test_a_table_without_int8():
    lines = table(Small(), [Row("eager", lambda: None, 1, 1.0, kind="float")], {"eager": [1.0]}, 2).splitlines()
    assert lines[1] == "small, 2 threads; times faster than"
    assert lines[3].count("|") == lines[5].count("|") == 8


def test_names_of_rows_and_files():
    assert label("16x1", 0.5) == "16×1 50 %"
    assert slug("16×1 50 %") == "16x1-50"
    assert slug("columns:64 80 %, trained on") == "columns-64-80-trained-on"


def test_a_model_is_made_once(tmp_path):
    made = []

    def make(model):
        made.append(model)
        nn.init.constant_(model.weight, 3.0)

    for _ in range(2):
        model = cached(tmp_path / "a" / "model.safetensors", nn.Linear(2, 2).train(), make)
        assert torch.equal(model.weight, torch.full((2, 2), 3.0))
        assert not model.training
    assert len(made) == 1


def test_accuracies_are_kept(tmp_path):
    assert Accuracies(tmp_path / "a" / "accuracies.json").of("row", lambda: 1.5) == 1.5
    again = Accuracies(tmp_path / "a" / "accuracies.json")
    assert again.of("row", lambda: pytest.fail("known")) == 1.5
    assert again.of("other", lambda: 2.5) == 2.5


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


def test_bytes_of_quantized_models_count_their_weights():
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    dense, small = exported.bytes_of(model), exported.bytes_of(exported.int8(model))
    assert dense == 4 * 256 * 256
    assert 256 * 256 < small < 1.1 * 256 * 256


def test_bottlenecks_keep_their_shape():
    model = bottlenecks().eval()
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert mlp()(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_threads_of_torch_s_and_of_the_kernels_own(capsys, monkeypatch):
    options = argparse.Namespace(batches=[1], rounds=1)
    if available():
        products.bench_threads(options)
        rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
        assert [row[0].strip() for row in rows] == ["CSR 80 %", "CSR 90 %", "16×1 80 %", "16×1 90 %"]
        assert all(float(row[2]) > 0 and float(row[3]) > 0 for row in rows)
    monkeypatch.setattr(loading, "_team", lambda: None)
    with pytest.raises(SystemExit, match="nothing to compare here"):
        products.bench_threads(options)


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


def test_scenes_are_those_of_their_seed_and_end_at_the_edge():
    made = scenes.Scenes(96)
    images, labels = made.batch(3, torch.Generator().manual_seed(5), 48)
    again, same = made.batch(3, torch.Generator().manual_seed(5), 48)
    assert images.shape == (3, 1, 48, 48)
    assert torch.equal(images, again)
    assert torch.equal(labels, same)
    quiet = made.drawn(made.unseen[:2], torch.Generator().manual_seed(5), 48)
    assert quiet.shape == (2, 1, 48, 48)
    assert len(made.unseen) == len(made.test_labels) == 2 * 719


def test_a_crop_shows_the_same_digits_as_large(monkeypatch):
    monkeypatch.setattr(scenes, "PIECES", 0)
    monkeypatch.setattr(scenes, "NOISE", 0)
    made = scenes.Scenes(96)
    whole, crop = (made.batch(16, torch.Generator().manual_seed(5), size)[0].sum((1, 2, 3)) for size in (96, 48))
    torch.testing.assert_close(crop, whole, rtol=0.05, atol=0)


def test_zeros_leave_the_first_convolution_and_depthwise_ones():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 40, 1)
    )
    made = convolutions.sparse(model, 0.9)
    zeros = [float((made[at].weight == 0).double().mean()) for at in (0, 2, 3)]
    assert zeros == pytest.approx([0, 0, 0.9])
    assert not made.training
    assert not any(parameter.requires_grad for parameter in made.parameters())


def test_the_detector_sees_every_place_of_three_levels():
    options = argparse.Namespace(models=["resnet", "detector"], depths=[18])
    assert [(title, size) for title, _, size in convolutions.networks(options)] == [
        ("ResNet-18", 224),
        ("detector", 320),
    ]
    with torch.no_grad():
        made = convolutions.Detector(width=16, classes=3).eval()(torch.randn(1, 3, 64, 64))
    assert made.shape == (1, 8 * 8 + 4 * 4 + 2 * 2, 7)


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
