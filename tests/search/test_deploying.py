"""`deploy`: the runtime alone loads what is delivered, the budget holds there, and what was begun goes on; no clock."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from secateur import deploy, runtimes
from secateur.checkpoints import CheckpointError, Run, locked, unfinished_folder
from secateur.cli.measuring import with_threads
from secateur.recovery.outputs import Steps
from secateur.runtimes import OnnxRuntime, OpenVINO
from secateur.search import deploying, making
from secateur.search.deploying import CHECK, InRuntime
from secateur.search.fitting import Executor
from secateur.search.levels import BYTES
from support import open_vino
from support.families import make
from support.forks import assert_killed, interrupted, killing
from support.stacks import contents
from support.unchanged import is_unchanged, state_of


@dataclass(frozen=True)
class BySize(OnnxRuntime):
    """ONNX Runtime, in which a pass takes as many seconds as there are bytes to load."""

    now: list[float] = field(default_factory=lambda: [0.0], compare=False, repr=False)

    def __call__(self, model, example_inputs, *, traced=False):
        size = BYTES[self.bits] * max(1, sum(each.numel() for each in model.parameters()))
        if self.modules is not None:
            size = 4 * sum(each.numel() for each in model.parameters())
            size -= sum((4 - BYTES[bits]) * model.get_submodule(name).weight.numel() for name, bits in self.modules)
        return lambda: self._waited(size)

    def load(self, folder):
        found, size = super().load(folder), (folder / "model.onnx").stat().st_size

        def run(feeds):
            self._waited(size)
            return found.run(feeds)

        return replace(found, run=run)

    def _waited(self, size):
        self.now[0] += size

    @property
    def clock(self):
        return lambda: self.now[0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(64, 16)).eval()


def given(count=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(24, 64, generator=generator) for _ in range(count)]


def deployed(out, budget, model=None, batches=None, **how):
    how = {"finals": 1, "shares": (0.25, 0.5, 0.75), "runtime": BySize(8)} | how
    limits = budget if isinstance(budget, dict) else {"latency": budget}
    return deploy(model or blocks(), batches or given(), budget=limits, out=out, **how)


ALONE = """
import sys
import numpy as np
import onnxruntime
folder = sys.argv[1]
session = onnxruntime.InferenceSession(f"{folder}/model.onnx", providers=["CPUExecutionProvider"])
known = np.load(f"{folder}/check.npz")
feeds = {name.partition("/")[2]: known[name] for name in known if name.startswith("inputs/")}
names = [each.name for each in session.get_outputs()]
for name, found in zip(names, session.run(None, feeds)):
    np.testing.assert_allclose(found.reshape(-1)[:1000], known[f"outputs/{name}"], rtol=1e-4, atol=1e-4)
assert "torch" not in sys.modules and names
print(len(feeds))
"""


def runs_alone(folder):
    done = subprocess.run([sys.executable, "-c", ALONE, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """Half of what int8 takes."""
    model, out = blocks(), tmp_path_factory.mktemp("deployed") / "served"
    before = state_of(model)
    with with_threads(1):  # as the copies of a process have, which are killed
        done = deployed(out, 0.16, model, steps=3)
    return done, is_unchanged(model, before)


def test_the_runtime_alone_loads_it_and_gives_what_is_recorded(pruned):
    done, _ = pruned
    assert sorted(path.name for path in done.out.iterdir()) == [CHECK, "model.onnx", "secateur.json"]
    assert runs_alone(done.out) == 1


def test_the_budget_holds_and_what_loses_least_is_delivered(pruned):
    done, unchanged = pruned
    dense, its = done.candidates[0], done.delivered
    assert (dense.made, dense.form, dense.left) == ("dense", "float32", 1.0)
    assert dense.loss < 1e-9
    assert done.limits["latency"] == pytest.approx(0.16 * dense.ms)
    within = [each for each in done.candidates if each.ms <= 1.03 * done.limits["latency"]]
    assert its in within
    assert its.loss == min(each.loss for each in within)
    assert its.made.startswith("fit-")
    assert 0.2 < its.left < 0.8
    size = (done.out / "model.onnx").stat().st_size
    assert its.nbytes == size
    assert its.ms == pytest.approx(1e3 * size, rel=1e-6)
    assert unchanged
    assert not unfinished_folder(done.out).exists()


@pytest.mark.long
def test_what_is_pruned_is_trained_before_it_is_exported(tmp_path):
    """Towards the dense model, on what is not held back: the same shapes, less loss on what is."""
    model, batches = blocks(), given(32)
    before = state_of(model)
    plain, trained = (deployed(tmp_path / f"{n}", 0.16, model, batches, steps=n) for n in (0, 300))
    assert is_unchanged(model, before)
    first, second = ([each for each in done.candidates if each.made.startswith("fit-")] for done in (plain, trained))
    assert [(each.form, each.nbytes) for each in first] == [(each.form, each.nbytes) for each in second]
    for was, now in zip(first, second, strict=True):
        assert now.loss < 0.97 * was.loss, (was, now)
    assert trained.candidates[0].loss == plain.candidates[0].loss


def test_what_is_judged_is_what_the_runtime_gives(pruned):
    """By the same distance, of the same batches, as of a module of torch."""
    done, _ = pruned
    judged = deploying.ModelLoss(blocks(), deploying.split(given())[1])
    assert judged.of(InRuntime(OnnxRuntime().load(done.out))) == pytest.approx(done.delivered.loss, rel=1e-4)


def test_the_record_says_what_was_measured(pruned):
    done, _ = pruned
    record = json.loads((done.out / "secateur.json").read_text())
    assert record["method"] == "deploy"
    assert [each["ms"] for each in record["candidates"]] == [each.ms for each in done.candidates]
    assert record["delivered"] in record["candidates"]
    assert record["files"].keys() == {CHECK, "model.onnx"}


def test_the_result_says_so_in_its_first_line(pruned, tmp_path):
    done, _ = pruned
    assert str(done).startswith(f"Delivered: pruned to {done.delivered.left:.1%} of its parameters, int8")
    assert str(done).count(", delivered") + str(done).count("delivered\n") >= 1
    (chart,) = next(part for part in done.content() if getattr(part, "name", "") == "candidates").charts
    assert sum(each.startswith("delivered: ") for each in chart.series) == 1
    assert done.report(tmp_path / "page.html").stat().st_size > 1000


@pytest.mark.long
def test_dense_int8_is_delivered_where_it_is_enough(tmp_path):
    done = deployed(tmp_path / "served", 0.5)
    assert str(done).startswith("Delivered: the dense model, int8")
    assert {each.made for each in done.candidates} == {"dense"}
    assert done.delivered.ms <= 1.03 * done.limits["latency"]
    runs_alone(done.out)


@pytest.mark.long
def test_matrices_that_int8_hurts_most_stay_in_float_where_there_is_time(tmp_path):
    done = deployed(tmp_path / "served", 0.7)
    mixed = [each for each in done.candidates if each.kept]
    whole = next(each for each in done.candidates if each.form == "int8" and not each.kept)
    assert [each.kept for each in mixed] == [1, 2, 4][: len(mixed)]
    assert done.delivered in mixed
    assert done.delivered.loss < whole.loss
    assert str(done).startswith(f"Delivered: the dense model, int8, {done.delivered.kept} matri")
    runs_alone(done.out)


@pytest.mark.long
def test_of_many_matrices_those_whose_outputs_move_most_stay_in_float(tmp_path):
    """One of 26 reads an input far larger than its others, which 8 bits of all of them do not resolve."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(26))).eval()
    with torch.no_grad():
        for layer in model:
            nn.init.orthogonal_(layer.weight)
        model[16].weight[0] *= 500
        model[16].bias[0] *= 500
        model[17].weight[:, 0] /= 500
    done = deployed(tmp_path / "served", 0.5, model)
    whole, one, *_ = [each for each in done.candidates if each.made == "dense" and each.form == "int8"]
    assert (whole.kept, one.kept) == (0, 1)
    assert one.loss < 0.3 * whole.loss
    runs_alone(done.out)


@pytest.mark.long
def test_4_bits_compete_where_they_are_asked_for(tmp_path):
    """Less than int8 takes: dense in 4 bits, or pruned in one of the two; and matrices in float where there is time."""
    pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")  # from 1.22 on
    done = deployed(tmp_path / "served", 0.2, runtime=BySize(4))
    dense = {each.form: each for each in done.candidates if each.made == "dense" and not each.kept}
    assert [*dense] == ["float32", "int8", "int4"]
    assert dense["int4"].nbytes < 0.7 * dense["int8"].nbytes
    assert dense["int8"].loss < dense["int4"].loss
    assert done.delivered.form == "int4"
    assert done.delivered.made == "dense"
    within = [each for each in done.candidates if each.ms <= 1.03 * done.limits["latency"]]
    assert done.delivered.loss == min(each.loss for each in within)
    kept = [each for each in done.candidates if each.kept]
    assert kept
    assert {each.form for each in kept} == {"int4"}
    runs_alone(done.out)
    pruned = deployed(tmp_path / "smaller", 0.1, runtime=BySize(4))
    assert {each.form for each in pruned.candidates if each.made != "dense"} == {"float32", "int8", "int4"}
    assert pruned.delivered.ms <= 1.03 * pruned.limits["latency"]
    runs_alone(pruned.out)


@pytest.mark.long
def test_width_and_bits_are_chosen_together_where_that_is_asked_for(tmp_path):
    """Between dense in 8 bits and dense in 4, and below both: what is mixed loses less than what is not."""
    pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    for share, left in ((0.22, 1.0), (0.17, 0.99)):
        done = deployed(tmp_path / str(share), share, runtime=BySize(4, modules=()))
        assert done.delivered.form == "mixed bits"
        assert done.delivered.left <= left
        assert done.delivered.name.startswith("dense" if left == 1 else "pruned to ")
        within = [each for each in done.candidates if each.within(done.limits)]
        assert done.delivered.loss == min(each.loss for each in within)
        assert {"int8", "int4"} < {each.form for each in done.candidates}
        runs_alone(done.out)
        record = json.loads((done.out / "secateur.json").read_text())
        assert record["delivered"]["form"] == "mixed bits"


class HalfFixed(nn.Module):
    """Half of its file is no parameter and no buffer."""

    def __init__(self):
        super().__init__()
        self.blocks = blocks()
        self.fixed = torch.randn(24, sum(each.numel() for each in self.blocks.parameters()) // 24)

    def forward(self, x):
        return self.blocks(x) + self.fixed[:, :16] + self.fixed.mean()


@pytest.mark.long
def test_what_is_no_weight_stays_in_a_file_of_mixed_bits(tmp_path):
    """The first budget that `fit` is given allows for it."""
    pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    mixed = BySize(4, modules=())
    done = deployed(tmp_path / "served", {"bytes": 0.58}, HalfFixed().eval(), runtime=mixed)
    assert len({each.made for each in done.candidates}) == 2
    assert done.delivered.form == "mixed bits"
    with pytest.raises(ValueError, match=r"what is no weight of a matrix product, .* is more than that"):
        deployed(tmp_path / "too small", {"bytes": 0.48}, HalfFixed().eval(), runtime=mixed)


def nbytes(folder):
    return sum(path.stat().st_size for path in folder.iterdir() if path.name.startswith("model."))


@pytest.mark.parametrize(("share", "made", "form"), [(0.5, "dense", "int8"), (0.2, "pruned", "int8")])
@pytest.mark.long
def test_bytes_are_those_of_the_files_that_the_runtime_loads(tmp_path, share, made, form):
    """Without a limit of time: what is too large is not delivered, and what was pruned is within at the first try."""
    done = deployed(tmp_path / "served", {"bytes": share})
    dense, its = done.candidates[0], done.delivered
    assert done.limits == {"bytes": pytest.approx(share * dense.nbytes)}
    within = [each for each in done.candidates if each.nbytes <= done.limits["bytes"]]
    assert its.loss == min(each.loss for each in within)
    assert ("dense" if its.made == "dense" else "pruned", its.form) == (made, form)
    assert nbytes(done.out) == its.nbytes <= done.limits["bytes"]
    assert len({each.made for each in done.candidates}) == 1 + (made == "pruned")
    first, *_ = str(done).splitlines()
    assert first.endswith(f"MB, {its.nbytes / dense.nbytes:.1%} of its.")
    assert f"Asked: {share:.1%} of what the dense model takes in float32, " in str(done)
    assert "MB of the files." in str(done)
    (chart,) = next(part for part in done.content() if getattr(part, "name", "") == "candidates").charts
    assert [1e6 * each for each in chart.places] == pytest.approx([each.nbytes for each in done.candidates])
    record = json.loads((done.out / "secateur.json").read_text())
    assert record["budget"] == {"asked": {"bytes": share}, **done.limits}
    runs_alone(done.out)


@pytest.mark.long
def test_bytes_and_milliseconds_both_hold(tmp_path):
    done = deployed(tmp_path / "served", {"latency": 0.2, "bytes": 0.16})
    assert done.delivered.ms <= 1.03 * done.limits["latency"]
    assert done.delivered.nbytes <= done.limits["bytes"]
    assert re.fullmatch(r"fit-latency-0\.\d{4}-params-0\.\d{4}", done.delivered.made)
    over = [each for each in done.candidates if "over the budget" in done._note(each)]
    assert over
    assert all(not each.within(done.limits) for each in over)


@pytest.mark.parametrize("runtime", [BySize(8), BySize(4, modules=())])
def test_a_model_without_parameters_loses_none(runtime, tmp_path):
    pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    with pytest.raises(ValueError, match="Nothing was pruned to it: what is no weight of a matrix product"):
        deployed(tmp_path / "served", {"bytes": 0.5}, nn.ReLU(), runtime=runtime)


def test_bytes_that_cannot_be_met_are_an_error(tmp_path):
    said = r"^nothing takes 0\.0004 MB or less in the runtime: nearest comes dense, int8, .* MB of .* Nothing was"
    with pytest.raises(ValueError, match=said):
        deployed(tmp_path / "served", {"bytes": 400})
    assert not (tmp_path / "served").exists()


def test_the_dense_model_is_delivered_where_it_is_within(tmp_path):
    done = deployed(tmp_path / "served", 1.0)
    assert done.delivered is done.candidates[0]
    assert str(done).startswith(
        "Delivered: the dense model, float32: it meets the budget, and nothing had to be pruned"
    )
    assert "which are held back" in str(done)
    assert "losses on the one batch that there was, " in str(deployed(tmp_path / "one", 1.0, batches=given(1)))


@pytest.mark.long
def test_in_float_fit_is_timed_in_float_and_int8_is_tried_too(tmp_path):
    done = deployed(tmp_path / "served", 0.6, runtime=BySize())
    assert {(each.made == "dense", each.form) for each in done.candidates} == {
        (dense, form) for dense in (True, False) for form in ("float32", "int8")
    }
    assert done.delivered.loss == min(each.loss for each in done.candidates if each.ms <= 1.03 * done.limits["latency"])


@pytest.mark.long
def test_what_cannot_be_met_says_what_came_nearest_and_another_budget_goes_on(tmp_path, monkeypatch):
    out = tmp_path / "served"
    said = r"^nothing takes .* ms or less in the runtime: nearest comes dense, int8, .* Nothing was pruned to it: the "
    with pytest.raises(ValueError, match=said) as caught:
        deployed(out, 0.001)
    assert f"What was measured is kept in {unfinished_folder(out)}, for the same command with another" in str(
        caught.value
    )
    assert not out.exists()

    def not_again(*_args, **_named):
        raise AssertionError("it was exported already")

    monkeypatch.setattr(deploying._Trying, "_written", not_again)
    assert deployed(out, 0.4).delivered.form == "int8"
    assert [path.name for path in tmp_path.iterdir()] == ["served"]


def test_what_is_slower_than_the_dense_model_is_said():
    near = deploying.Candidate("dense", "float32", 1.0, 2.0, 0.0, 1, 0, "", {})
    dense = replace(near, ms=1.0)
    with pytest.raises(ValueError, match=r"^nothing takes 0\.5 ms or less .* with 1 ms \(1\.000 of the dense model"):
        deploying._least([dense, near], {"latency": 0.5}, [])
    asked, limits = deploying.parse_budget({"latency": 2.0}), {"latency": 2.0}
    done = deploying.Deployed(asked, limits, [dense, near], dense, "change", None, 4, 1, 1.0, Path("out"))
    assert (done._note(dense), done._note(near)) == ("delivered", "slower than dense")
    assert str(done).startswith("Delivered: the dense model")
    smaller = replace(near, form="int4", ms=1.02)  # as a budget of bytes may deliver
    done = deploying.Deployed(asked, limits, [dense, smaller], smaller, "change", None, 4, 1, 1.0, Path("out"))
    first, second, *_ = str(done).splitlines()
    assert first == "It is slower than the dense model: 1.02 ms, where that takes 1 in float32."
    assert second.startswith("Delivered: the dense model, int4: it meets the budget")


@pytest.mark.long
def test_a_run_that_was_killed_goes_on(pruned, tmp_path):
    """Where the dense model is judged in int8; where `fit` writes levels, and where it carries out what it chose; in a
    step of `recover`; where the pruned graph is half written, and where it is judged; and before OUT has its name."""
    out = tmp_path / "served"
    places = {
        "judged": (deploying._Trying, "judged"),
        "level": (making, "write_entry"),
        "fitted": (Executor, "__call__"),
        "step": (Steps, "_lost"),
        "graph": (runtimes, "_strip"),
        "publish": (Run, "publish"),
    }

    def dying(moment, _, out):
        killing(moment, **places)
        deployed(out, 0.16, steps=3)

    moments = ["judged:2", "level:2", "fitted:1", "step:2", "graph:1", "judged:2", "publish:1"]
    assert_killed(dying, moments, None, out)
    with with_threads(1):
        with interrupted(deploying, "_assembled"):
            deployed(out, 0.16, steps=3)
        assert not out.exists()
        for place in ("dense/int8", "fit-*/float32"):  # what was made before is not what it was
            graph, *_ = (tmp_path / "served.unfinished" / "result").glob(f"{place}/model.onnx")
            whole = graph.read_bytes()
            graph.write_bytes(whole[:-1])
            with pytest.raises(
                CheckpointError, match=rf"is of .*/{graph.parent.name}, which is gone, or not what was wr"
            ):
                deployed(out, 0.16, steps=3)
            graph.write_bytes(whole)
        done = deployed(out, 0.16, steps=3)
    assert [(each.made, each.form, each.nbytes) for each in done.candidates] == [
        (each.made, each.form, each.nbytes) for each in pruned[0].candidates
    ]
    assert (out / "model.onnx").read_bytes() == (pruned[0].out / "model.onnx").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["served"]


def test_another_model_does_not_go_on_with_what_is_there(tmp_path):
    out = tmp_path / "served"
    with pytest.raises(ValueError, match="nothing takes"):
        deployed(out, 0.001)
    other = blocks()
    nn.init.normal_(other[2].weight)
    with pytest.raises(CheckpointError, match=r"was begun with model .*, not .*remove it to start over"):
        deployed(out, 0.5, other)


def test_two_at_once_and_a_place_that_cannot_be_written(tmp_path, monkeypatch):
    out = tmp_path / "served"
    place = unfinished_folder(out)
    place.mkdir()
    with locked(place), pytest.raises(CheckpointError, match="another process is at work here"):
        deployed(out, 0.5)
    for path in place.iterdir():
        path.unlink()
    place.rmdir()

    def denied(self, *_args, **_named):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(PermissionError):
        deployed(out, 0.5)
    assert not list(tmp_path.iterdir())


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 16), nn.Linear(16, 4)

    def forward(self, x):
        return torch.special.bessel_j0(self.down(self.up(x).relu()))


@pytest.mark.long
def test_a_failing_run_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(runtimes, "_for_any_size", lambda *_: {})  # as of a model whose code asks for its sizes
    for model, batches, said in (
        (Unknown(), given(), r"^the model cannot be exported to ONNX: (?!.*runtime=)"),
        (blocks(), [*given(3), torch.zeros(12, 64)], r"does not run on \w+ \(12, 64\): .* Give batches of one shape"),
    ):
        with pytest.raises(ValueError, match=said):
            deployed(tmp_path / "served", 0.5, model, batches)
        assert not list(tmp_path.iterdir())


def test_a_form_that_the_quantizer_refuses_is_a_line(tmp_path, monkeypatch):
    def refused(*_args):
        raise KeyError("an operation")

    monkeypatch.setattr(runtimes, "_in_int8", refused)
    done = deployed(tmp_path / "served", 1.0)
    assert [each.form for each in done.candidates] == ["float32"]
    (line,) = done.said
    assert line.startswith("Not tried: ONNX Runtime ")
    assert line.endswith("int8 does not round the model: KeyError: 'an operation'.")


def test_what_is_wrong_is_said_before_anything_is_computed(tmp_path, monkeypatch):
    out = tmp_path / "served"
    for budget, runtime, kind, said in (
        ({"params": 0.5}, None, ValueError, "the budget of deploy is a latency.* and not params"),
        ({"latency": 0.5, "params": 0.5}, "onnxruntime", ValueError, "the budget of deploy is a latency"),
        ({"latency": 0.5}, "torch", ValueError, r"deploy writes what a runtime loads: .*for torch .*secateur\.fit"),
        ({"latency": 0.5}, "onnx", ValueError, "no runtime is called 'onnx'"),
    ):
        with pytest.raises(kind, match=said):
            deploy(None, None, budget=budget, runtime=runtime, out=out)
    for odd, said in (
        ({"batches": {}}, "there are no batches"),
        ({"batches": given(), "example_inputs": torch.zeros(2, 64, device="meta")}, "a batch is on the meta device"),
    ):
        with pytest.raises(ValueError, match=said):
            deploy(blocks(), budget={"latency": 0.5}, out=out, **odd)
    with pytest.raises(ValueError, match="steps is a whole number, 0 or more; got -1"):
        deploy(None, None, budget={"latency": 0.5}, steps=-1, out=out)
    with pytest.raises(CheckpointError, match="already exists"):
        deploy(None, None, budget={"latency": 0.5}, out=tmp_path)
    with pytest.raises(ValueError, match=r"0\.up\.weight is on the meta device and has no values; load the weights"):
        deploy(blocks().to("meta"), given(), budget={"latency": 0.5}, out=out)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"^ONNX Runtime is not installed: pip install \"secateur\[onnx\]\"$"):
        deploy(None, None, budget={"latency": 0.5}, out=out)


@pytest.fixture
def asked(monkeypatch):
    """What NNCF was asked for, by a stand-in; with SECATEUR_OPENVINO=1 in the environment by the real one."""
    found = []
    if "SECATEUR_OPENVINO" not in os.environ:
        version = metadata.version
        monkeypatch.setitem(sys.modules, "openvino", open_vino.openvino())
        monkeypatch.setitem(sys.modules, "nncf", open_vino.nncf(found))
        monkeypatch.setattr(metadata, "version", lambda name: "0.0" if name == "openvino" else version(name))
    return found


@pytest.mark.parametrize("overflows", [False, True])
def test_int8_of_openvino_is_calibrated_on_what_is_not_held_back(overflows, asked, tmp_path, monkeypatch):
    """Where sums of products would overflow, weights have 7 bits in it, too."""
    if overflows:
        monkeypatch.setattr(runtimes, "sums_overflow", lambda: True)
    model, batches = cnn(), [torch.randn(4, 3, 12, 12) for _ in range(4)]
    done = deploy(model, batches, budget={"bytes": 0.9}, out=tmp_path / "out", runtime="openvino:int8")
    assert [each.form for each in done.candidates] == ["float32", "int8, calibrated"]
    assert (done.delivered.made, done.delivered.form, done.delivered.loss < 0.05) == ("dense", "int8, calibrated", True)
    assert {each.name for each in done.out.iterdir()} == {CHECK, "model.xml", "model.bin", "secateur.json"}
    assert json.loads((done.out / "secateur.json").read_text())["runtime"].endswith(", int8")
    found = InRuntime(OpenVINO().load(done.out))(batches[0][:3])
    torch.testing.assert_close(found, model(batches[0][:3]), atol=0.2, rtol=0.2)
    OpenVINO(8)(blocks(), given()[0])()  # as levels are timed
    if asked:
        how = ["enable"] if runtimes.sums_overflow() else []
        assert asked == [(3, None, *how), (1, "transformer", *how)]  # attention has ways of its own


def cnn():
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()


@pytest.mark.long
def test_convolutions_are_calibrated_on_the_batches(tmp_path):
    batches = [(torch.randn(4, 3, 12, 12), torch.zeros(4)) for _ in range(4)]
    done = deployed(tmp_path / "served", 0.9, cnn(), batches)
    forms = {each.form: each for each in done.candidates if not each.kept}
    assert forms.keys() == {"float32", "int8", "int8, calibrated"}
    assert forms["int8, calibrated"].nbytes < forms["int8"].nbytes
    assert 0 < forms["int8, calibrated"].loss < 0.05
    served = InRuntime(OnnxRuntime().load(done.out))
    one = torch.randn(1, 3, 12, 12)  # of another number of pictures than what it was exported with
    assert served(one).shape == (1, 10)
    runs_alone(done.out)


@pytest.mark.long
def test_channels_leave_in_multiples_of_16_below_calibrated_int8(tmp_path):
    torch.manual_seed(0)
    second, head = nn.Conv2d(32, 64, 3, stride=2), (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), second, nn.BatchNorm2d(64), nn.ReLU(), *head).eval()
    before, batches = state_of(model), [torch.randn(4, 3, 12, 12) for _ in range(4)]
    done = deployed(tmp_path / "served", {"bytes": 0.26}, model, batches)
    smallest, its = min(each.nbytes for each in done.candidates if each.made == "dense"), done.delivered
    assert its.nbytes == nbytes(done.out) <= done.limits["bytes"] < smallest
    assert (its.made.startswith("fit-params-"), its.form) == (True, "int8, calibrated")
    weights = (each for each in onnx.load(done.out / "model.onnx").graph.initializer if len(each.dims) == 4)
    widths = [each.dims[0] for each in weights]
    assert sum(widths) < 96
    assert not any(each % 16 for each in widths)
    assert is_unchanged(model, before)
    assert runs_alone(done.out) == 1


@pytest.mark.long
def test_a_directory_whose_int8_takes_too_many_bytes_is_pruned(tmp_path):
    """What is delivered takes fewer than that, also of texts of other lengths, and the directory stays as it was."""
    make("bert", num_hidden_layers=1, intermediate_size=2048).save_pretrained(tmp_path / "dense")
    before, generator = contents(tmp_path / "dense"), torch.Generator().manual_seed(1)
    batches = [torch.randint(1, 30, (2, 12), generator=generator) for _ in range(4)]
    done = deployed(tmp_path / "served", {"bytes": 0.48}, tmp_path / "dense", batches)
    dense, its = [each for each in done.candidates if each.made == "dense"], done.delivered
    assert its.nbytes == nbytes(done.out) <= done.limits["bytes"] < min(each.nbytes for each in dense)
    assert (its.made.startswith("fit-params-"), its.form) == (True, "int8")
    assert 0.2 < its.left < 0.9
    loaded = OnnxRuntime().load(done.out)
    ids = torch.randint(1, 30, (3, 7), generator=generator)
    assert InRuntime(loaded)(input_ids=ids).logits.shape == (3, 7, 64)
    assert contents(tmp_path / "dense") == before
    assert runs_alone(done.out) == 2


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.long
def test_a_directory_with_its_tokenizer(tmp_path, family):
    make(family).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "chat_template.jinja", "notes.txt"):
        (tmp_path / "dense" / name).write_text("{}")
    before = contents(tmp_path / "dense")
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(1, 30, (1, 12), generator=generator) for _ in range(4)]
    done = deployed(tmp_path / "served", 1.0, tmp_path / "dense", batches)
    assert contents(tmp_path / "dense") == before
    names = {path.name for path in done.out.iterdir()} - {CHECK, "model.onnx", "secateur.json"}
    assert names == {"tokenizer.json", "tokenizer_config.json", "vocab.txt", "chat_template.jinja"}
    loaded = OnnxRuntime().load(done.out)
    assert loaded.inputs == ("input_ids", "attention_mask")
    assert loaded.outputs == ("logits",)  # no cache
    ids = torch.randint(1, 30, (3, 7), generator=generator)  # other texts, of other lengths
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    found = InRuntime(loaded)(input_ids=ids, attention_mask=mask).logits
    alone = InRuntime(loaded)(input_ids=ids[1:2, :4]).logits
    np.testing.assert_allclose(found[1, :4], alone[0], rtol=0.1, atol=0.1 * float(alone.abs().max()))
    assert runs_alone(done.out) == 2


class Outputs(nn.Module):
    """Several outputs, without names or with, and an input that is no row of the batch."""

    def __init__(self, named):
        super().__init__()
        self.net, self.named = blocks(), named

    def forward(self, x, scale):
        y = self.net(x) * scale
        return {"logits": y, "total": y.sum(-1)} if self.named else (y, y.sum(-1))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.long
def test_several_outputs_keep_their_form_whatever_else_a_batch_holds(named, tmp_path):
    batches = [{"x": each, "scale": torch.full((1,), 2.0)} for each in given()]
    done = deployed(tmp_path / "served", 1.0, Outputs(named), batches)
    loaded = OnnxRuntime().load(done.out)
    assert loaded.outputs == (("logits", "total") if named else ("output_0", "output_1"))
    model = Outputs(named)
    wanted, found = model(**batches[0]), InRuntime(loaded)(**batches[0])
    assert isinstance(found, dict if named else tuple)
    both = zip(wanted.values(), found.values(), strict=True) if named else zip(wanted, found, strict=True)
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in both)
    assert runs_alone(done.out) == 2


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.long
def test_half_precision_is_served_in_float32(half, tmp_path):
    model = blocks().to(half)
    done = deployed(tmp_path / "served", 1.0, model, [each.to(half) for each in given()])
    assert done.delivered.name == "dense, float32"
    wanted = blocks().to(half).float()(given()[0])
    assert torch.allclose(InRuntime(OnnxRuntime().load(done.out))(given()[0]), wanted, atol=1e-4)
    assert next(model.parameters()).dtype == half


@pytest.mark.long
def test_what_exporters_print_is_not_shown(tmp_path, capfd):
    class Turning(Block):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(ValueError, match=r"cannot be exported to ONNX: .*data-dependent"):
        deployed(tmp_path / "served", 1.0, Turning())
    assert "def forward" not in "".join(capfd.readouterr())


def test_what_the_tracing_exporter_prints_is_not_shown_either(capfd):
    """Levels are timed by it first; of heads that share keys it fails, and printed a graph into what `--json` gives."""
    few = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="cannot be exported to ONNX"):
        OnnxRuntime()(SharedKeys(), (torch.randn(1, 4, 3, 4), few, few), traced=True)
    assert capfd.readouterr().out == ""


class SharedKeys(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
