"""Runtimes: what they run is the model, timed in turns; no clock in any verdict."""

import contextlib
import copy
import logging
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import secateur
from secateur import deploy, fit, runtimes, shrink
from secateur.runtimes import OnnxRuntime, OpenVINO, Timer, Torch, parse
from support.measured import ByParameters
from support.unchanged import is_unchanged, state_of

FOUR_BITS = "onnxruntime.quantization.matmul_nbits_quantizer"  # from 1.22 on


class Named(nn.Module):
    """It is called by names, in another order than theirs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(6, 8)

    def forward(self, left, right=None):
        return {"sum": self.first(left) - self.second(right)}


def net():
    return nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 4))


@pytest.mark.parametrize(
    ("make", "example"),
    [
        (net, torch.randn(3, 4)),
        (Named, {"right": torch.randn(3, 6), "left": torch.randn(3, 4)}),
        (Named, [torch.randn(3, 4), torch.randn(3, 6)]),
        (lambda: nn.Conv2d(3, 4, 3).half(), torch.randn(2, 3, 6, 6).half()),
    ],
)
def test_onnx_runtime_runs_the_model(make, example):
    """In evaluation mode, and the model is as before."""
    model = make().train()
    before = state_of(model)
    own = Timer(model, example, seconds=0.0)._call
    its = Timer(model, example, OnnxRuntime(), seconds=0.0)._call()
    model.eval()
    wanted = own()
    wanted = wanted["sum"] if isinstance(wanted, dict) else wanted
    torch.testing.assert_close(torch.from_numpy(its[0]), wanted, rtol=2e-3, atol=2e-3)
    model.train()
    assert is_unchanged(model, before)


def test_an_example_of_one_token_makes_a_graph_for_any_number_of_them(tmp_path):
    """As the next token of a language model is timed; a column of numbers that is none stays one."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)).eval()
    OnnxRuntime().write(model, torch.ones(1, 1, dtype=torch.int64), tmp_path)
    loaded = OnnxRuntime().load(tmp_path)
    for shape in ((1, 1), (2, 5)):
        ids = torch.randint(0, 9, shape)
        (found,) = loaded.run({"input": ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(ids), rtol=1e-4, atol=1e-5)
    column = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(4, 3)).eval()
    OnnxRuntime().write(column, torch.ones(1, 1, dtype=torch.int64), tmp_path)
    ids = torch.randint(0, 9, (3, 1))
    (found,) = OnnxRuntime().load(tmp_path).run({"input": ids.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), column(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.long
def test_fewer_bits_are_near_and_not_the_same(traced):
    """Of 40 inputs, which are no whole number of blocks."""
    pytest.importorskip(FOUR_BITS)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(16, 40)
    exact, int8, int4 = (OnnxRuntime(bits)(model, x, traced=traced)()[0] for bits in (32, 8, 4))
    errors = [abs(exact - each).max() / abs(exact).max() for each in (int8, int4)]
    assert 0 < errors[0] < 0.1
    assert 2 * errors[0] < errors[1] < 0.3


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.long
def test_no_sum_of_products_in_8_bits_overflows_on_this_processor(calibrated, tmp_path):
    """Two of the largest input by the largest weight are more than 16 bits hold, in which some processors add them."""
    model, x = nn.Sequential(nn.Linear(64, 8, bias=False)), torch.ones(16, 64)
    nn.init.ones_(model[0].weight)
    OnnxRuntime().write(model, x, tmp_path)
    feeds = OnnxRuntime().load(tmp_path).feeds(x)
    OnnxRuntime(8, calibrated).rounded(tmp_path, tmp_path / "int8", [feeds])
    (found,) = OnnxRuntime().load(tmp_path / "int8").run(feeds)
    np.testing.assert_allclose(found, model(x).detach(), rtol=0.02)


@pytest.mark.parametrize(("overflows", "largest"), [(False, 127), (True, 64)])
def test_weights_of_products_have_7_bits_where_their_sums_would_overflow(overflows, largest, tmp_path, monkeypatch):
    """And tables 8, whose rows are not added; and what rounding moves is foretold of as many bits."""
    monkeypatch.setattr(runtimes, "sums_overflow", lambda: overflows)
    torch.manual_seed(0)
    model, ids, of = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 8)), torch.randint(40, (4, 6)), OnnxRuntime(8)
    OnnxRuntime().write(model, ids, tmp_path)
    of.rounded(tmp_path, tmp_path / "int8")
    stored = [
        onnx.numpy_helper.to_array(each)
        for each in onnx.load(tmp_path / "int8" / "model.onnx").graph.initializer
        if each.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    ]
    sizes = {each.shape: int(np.ptp(each.astype(int))) for each in stored if each.ndim == 2}
    assert 1.5 * largest < sizes[16, 8] <= 2 * largest
    assert sizes[40, 16] > 192
    with runtimes.rounding(model, {"1": 8}):
        near = model[1](torch.eye(16)) - model[1].bias
    apart = (near - model[1].weight.T).abs().amax(0) / (model[1].weight.amax(1) - model[1].weight.amin(1))
    assert 0.25 < apart.max() * (127 if overflows else 255) <= 0.51


def test_4_bits_are_an_eighth_but_for_scales_and_what_is_kept(tmp_path):
    pytest.importorskip(FOUR_BITS)
    model, x = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), torch.randn(16, 256)
    OnnxRuntime().write(model, x, tmp_path)
    of, sizes = OnnxRuntime(4), []
    for name, keep in (("none", ()), ("one", [*of.matrices(tmp_path)][:1]), ("all", [*of.matrices(tmp_path)])):
        of.rounded(tmp_path, tmp_path / name, keep=keep)
        sizes.append((tmp_path / name / "model.onnx").stat().st_size)
    weight = 256 * 512
    assert sizes[1] - sizes[0] == pytest.approx(weight * (4 - 0.5 - 4.5 / 32), rel=0.01)
    assert sizes[2] - sizes[1] == pytest.approx(weight * (4 - 0.5 - 4.5 / 32), rel=0.01)
    assert sizes[2] == pytest.approx((tmp_path / "model.onnx").stat().st_size, rel=0.01)
    kept = OnnxRuntime().load(tmp_path / "all")
    (found,) = kept.run(kept.feeds(x))
    torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=1e-4, atol=1e-4)


def test_4_bits_that_the_runtime_is_too_old_for_are_said(monkeypatch):
    monkeypatch.setitem(sys.modules, FOUR_BITS, None)
    said = r"^4 bits need ONNX Runtime 1\.22 or later, and this is [\d.]+: pip install --upgrade onnxruntime$"
    for call in (
        lambda: OnnxRuntime(4)(nn.Linear(4, 4), torch.ones(2, 4)),
        lambda: fit(net(), None, budget={"latency": 0.5}, runtime="onnxruntime:int4"),
    ):
        with pytest.raises(ImportError, match=said):
            call()
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(ImportError, match=r"^NNCF, which rounds for OpenVINO, is not installed: pip install nncf "):
        deploy(None, None, budget={"latency": 0.5}, out=None, runtime="openvino:int8")
    with pytest.raises(ValueError, match=r"^bits is 32 or 8; got 4\.$"):
        OpenVINO(4)


@pytest.mark.parametrize(("bits", "calibrated"), [(16, False), (4, True), (32, True), ("8", False)])
def test_bits_that_nothing_rounds_to_are_refused(bits, calibrated):
    with pytest.raises(ValueError, match="bits is 32, 8 or 4, and only 8 can be calibrated; got"):
        OnnxRuntime(bits, calibrated)


class Batched(nn.Module):
    """A product of matrices with several weights at once, beside one with a single one."""

    def __init__(self):
        super().__init__()
        self.several, self.single = nn.Parameter(torch.randn(4, 8, 8)), nn.Linear(8, 8)

    def forward(self, x):
        return self.single(x @ self.several)


@pytest.mark.long
def test_products_with_several_weights_are_rounded_too():
    pytest.importorskip(FOUR_BITS)
    torch.manual_seed(0)
    model, x = Batched(), torch.randn(4, 3, 8)
    exact, int8, int4 = (OnnxRuntime(bits)(model, x)()[0] for bits in (32, 8, 4))
    assert 0 < abs(exact - int8).max() < 0.1 * abs(exact).max()
    assert 0 < abs(exact - int4).max() < 0.3 * abs(exact).max()


class Tied(nn.Module):
    """Logits by the table of embeddings."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(500, 64), nn.Linear(64, 64), nn.Linear(64, 500, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.up(self.table(tokens)).relu())


@pytest.mark.parametrize("bits", [8, 4])
def test_tables_and_heads_that_are_tied_to_them_are_rounded_unless_they_are_kept(tmp_path, bits):
    pytest.importorskip(FOUR_BITS)
    torch.manual_seed(0)
    model, x, of, weight = Tied(), torch.randint(500, (2, 12)), OnnxRuntime(bits), 500 * 64
    OnnxRuntime().write(model, x, tmp_path)
    names = {module: operation for operation, module in of.matrices(tmp_path).items()}
    assert sorted(names) == ["head", "table", "up"]
    sizes, outputs, each = {}, {}, {8: 1, 4: 0.5 + 4.5 / 32}[bits]
    for keep in ("", "table", "head", "table head up"):
        place = tmp_path / f"kept {keep}"
        of.rounded(tmp_path, place, keep=[names[name] for name in keep.split()])
        sizes[keep], loaded = (place / "model.onnx").stat().st_size, OnnxRuntime().load(place)
        (outputs[keep],) = loaded.run(loaded.feeds(x))
    assert sizes["table"] - sizes[""] == pytest.approx(3 * weight, rel=0.02)
    assert sizes["head"] - sizes[""] == pytest.approx((4 - 1 - each) * weight, rel=0.05)  # its table is one
    exact = model(x).detach().numpy()
    errors = {keep: abs(found - exact).max() / abs(exact).max() for keep, found in outputs.items()}
    assert errors["table head up"] < 1e-5
    assert 0 < errors["table"] < 0.3
    assert 0 < errors[""] < 0.3


@pytest.mark.parametrize("bits", [8, 4])
def test_how_far_rounding_moves_an_output_is_what_the_runtime_moves(tmp_path, bits):
    """Of each operation alone, as far as its neighbours are in float; of a table its own rows."""
    pytest.importorskip(FOUR_BITS)
    torch.manual_seed(0)
    model, x, of = Tied(), torch.randint(500, (2, 12)), OnnxRuntime(bits)
    with torch.no_grad():
        model.up.weight[:, 0], model.table.weight[:, 0] = 0.01, 30  # an input far larger than others
    OnnxRuntime().write(model, x, tmp_path)
    loaded = OnnxRuntime().load(tmp_path)
    feeds, places = loaded.feeds(x), of.matrices(tmp_path)
    found = {places[name]: error for name, error in of.errors(tmp_path, feeds).items()}
    assert found.keys() == {"table", "up", "head"}
    of.rounded(tmp_path, tmp_path / "head", keep=[name for name, module in places.items() if module != "head"])
    (exact,), (moved,) = loaded.run(feeds), OnnxRuntime().load(tmp_path / "head").run(feeds)
    assert found["head"] == pytest.approx(float(np.linalg.norm(moved - exact) / np.linalg.norm(exact)), rel=0.5)
    assert found["up"] > 0.01
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "model.onnx"]


@pytest.mark.long
def test_exporters_say_nothing_and_leave_logging_and_warnings_as_they_were(caplog):
    was = logging.root.manager.disable
    OnnxRuntime(8)(nn.Linear(4, 4), torch.ones(2, 4))  # what is imported then has filters of its own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filters = list(warnings.filters)
        OnnxRuntime(8)(nn.Linear(4, 4), torch.ones(2, 4))()
        assert warnings.filters == filters
    said = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert (logging.root.manager.disable, said) == (was, [])


@pytest.mark.long
def test_two_threads_leave_logging_and_warnings_as_they_were():
    was, filters = logging.root.manager.disable, list(warnings.filters)
    models = [nn.Linear(4, width) for width in (3, 5, 7)]
    with ThreadPoolExecutor(3) as threads:
        calls = [*threads.map(lambda model: OnnxRuntime(8)(model, torch.ones(2, 4)), models)]
    assert [call()[0].shape for call in calls] == [(2, 3), (2, 5), (2, 7)]
    assert (logging.root.manager.disable, warnings.filters) == (was, filters)


def test_nothing_is_left_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    call = OnnxRuntime()(nn.Linear(4, 4), torch.ones(2, 4))
    call()
    assert not list(tmp_path.iterdir())


class Anchored(nn.Module):
    """It keeps what it made for a shape, as a detector does."""

    shape = None

    def __init__(self):
        super().__init__()
        self.anchors = torch.empty(0)

    def forward(self, x):
        if self.shape != x.shape:
            self.shape, self.anchors = x.shape, torch.ones(x.shape[-1])
        return x + self.anchors


def test_what_a_model_keeps_is_as_before():
    model, x = Anchored(), torch.zeros(2, 3)
    with contextlib.suppress(ValueError):  # an older exporter takes no tensor that a model keeps
        (found,) = OnnxRuntime()(model, x)()
        assert torch.equal(torch.from_numpy(found), torch.ones(2, 3))
    assert (model.shape, model.anchors.numel()) == (None, 0)
    assert torch.equal(model(x), torch.ones(2, 3))


class Unknown(nn.Module):
    """It ends in a function that ONNX does not have."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x):
        return torch.special.bessel_j0(self.down(self.up(x).relu()))


@pytest.mark.parametrize(
    ("model", "example", "message"),
    [
        (
            Unknown(),
            torch.ones(2, 4),
            r"^the model cannot be exported to ONNX: .*[^.]\. Leave out runtime=, or give .*\.$",
        ),
        (nn.Linear(4, 4).bfloat16(), torch.ones(2, 4).bfloat16(), "no bfloat16: convert it to float32"),
    ],
)
def test_what_cannot_be_exported_is_said(model, example, message):
    with pytest.raises(ValueError, match=message) as caught:
        OnnxRuntime()(model, example)
    assert "\n" not in str(caught.value)


def test_what_the_runtime_does_not_take_is_said():
    said = r"^ONNX Runtime .*, int8 does not run the model: InvalidGraph: .*give runtime=\"torch\"\.$"
    with pytest.raises(ValueError, match=said) as caught:
        OnnxRuntime(8)(nn.Linear(4, 4).half(), torch.ones(2, 4).half())
    assert "\n" not in str(caught.value)


def test_a_failing_export_changes_nothing():
    model = Unknown()
    before = state_of(model)
    with pytest.raises(ValueError, match="cannot be exported"):
        shrink(model, torch.ones(2, 4), 0.3, target="latency", runtime="onnxruntime")
    assert is_unchanged(model, before)


@pytest.mark.parametrize(
    "word", ["torch", "onnxruntime", "onnxruntime:int8", "onnxruntime:int4", "openvino", "openvino:int8"]
)
def test_words_are_values(word):
    assert parse(parse(word)) == parse(word)
    assert parse(None) == Torch()


@pytest.mark.parametrize(
    ("runtime", "kind", "message"),
    [
        ("onnx", ValueError, "no runtime is called 'onnx'"),
        (OnnxRuntime, TypeError, "runtime= is one of 'torch', 'onnxruntime'.* or a value of them"),
        (3, TypeError, "not 3"),
    ],
)
def test_what_is_no_runtime_is_said(runtime, kind, message):
    with pytest.raises(kind, match=message):
        parse(runtime)


def test_a_runtime_where_nothing_is_timed_is_refused():
    model, x = net(), torch.randn(8, 4)
    for call in (
        lambda: shrink(model, x, 0.3, runtime="onnxruntime"),
        lambda: fit(model, [x], budget={"params": 0.5}, runtime="onnxruntime"),
    ):
        with pytest.raises(ValueError, match=r"^runtime= says where a latency is measured, and none is asked for"):
            call()


def test_a_runtime_that_is_not_installed_says_so_before_anything_is_computed(monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    said = r'^OpenVINO is not installed: pip install openvino "secateur\[onnx\]"$'
    for call in (
        lambda: OpenVINO()(nn.Linear(4, 4), torch.ones(2, 4)),
        lambda: shrink(None, None, 0.3, target="latency", runtime="openvino"),
        lambda: fit(None, None, budget={"latency": 0.5}, runtime="openvino"),
    ):
        with pytest.raises(ImportError, match=said):
            call()


# ---- Laws of the verbs: what is asked for holds in the runtime. ----


def blocks():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)))


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_shrink_takes_as_long_as_it_is_asked_in_the_runtime(share):
    model, x = blocks(), torch.randn(8, 8)
    size = sum(each.numel() for each in model.parameters())
    done = shrink(model, x, share, target="latency", runtime=ByParameters(), round_to=1)
    left = sum(each.numel() for each in model.parameters()) / size
    assert 1 - share - 0.03 < left <= 1 - share
    assert done.got == pytest.approx(1 - left)


def test_fit_takes_as_long_as_it_is_asked_in_the_runtime():
    model, batches = blocks(), [torch.randn(16, 8) for _ in range(4)]
    size = sum(each.numel() for each in model.parameters())
    done = fit(model, batches, budget={"latency": 0.5}, runtime=ByParameters(), round_to=1, finals=1)
    assert 0.45 * size < sum(each.numel() for each in model.parameters()) <= 0.5 * size
    assert done.got["latency"] == pytest.approx(1e3 * sum(each.numel() for each in model.parameters()))


def test_fit_says_in_which_runtime():
    model, batches = blocks(), [torch.randn(16, 8) for _ in range(2)]
    how = {"finals": 1, "shares": [0.5]}
    where = ByParameters()
    done = fit(copy.deepcopy(model), batches, budget={"latency": 0.9}, runtime=where, **how)
    assert str(done).startswith(f"Asked: latency 90.0%, timed in {where}.\n\n")
    slower = replace(done, got={**done.got, "latency": 2 * done.dense["latency"]})
    assert str(slower).splitlines()[0].startswith("It is slower than the dense model: ")
    assert "timed in" not in str(fit(model, batches, budget={"params": 0.9}, **how))


def test_the_front_door_has_the_words():
    assert secateur.runtimes.OpenVINO is OpenVINO
