"""Laws of prices elsewhere: a table says what it holds, and what lies between; a damaged one is one line."""

import copy
import csv
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur import fit, shrink
from secateur.operations import COLUMNS, Priced, PriceTable, operations_of, priced_rows, step_in
from secateur.runtimes import Elsewhere, Timer, parse
from secateur.search import write_probes
from secateur.search.latency import PROBES, SCRIPT, probed
from support.fitting import blocks, inputs
from support.forks import forked
from support.stacks import contents
from support.unchanged import is_unchanged, state_of


def work(operation, shapes):
    """Multiply-adds of a matrix at each place, in microseconds; nothing else takes time."""
    if operation not in ("linear", "conv2d"):
        return 0.0
    places = shapes[0][:-1] if operation == "linear" else shapes[0][2:]
    return 1e-3 * torch.Size(places).numel() * torch.Size(shapes[1]).numel()


def stairs(step):
    """The same, of widths that a kernel fills up to multiples of a step."""

    def cost(operation, shapes):
        return work(operation, (shapes[0], tuple(-(-size // step) * step for size in shapes[1]))) if shapes[1:] else 0.0

    return cost


def net(hidden=256, width=64):
    torch.manual_seed(0)
    return blocks(2, width=width, hidden=hidden)


def table(path, model, example, cost=work, columns=COLUMNS, mark=","):
    """What a machine of such prices writes of the probes of a model."""
    priced = Priced(cost)
    with open(path, "w", newline="") as file:
        rows = csv.writer(file, delimiter=mark)
        rows.writerow(columns)
        for each in sorted(probed(model, example), key=lambda each: each.spelled):
            name, shapes, numbers = each.spelled
            said = " ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)
            text = repr(priced.of(each))
            time = text.replace(".", ",") if mark == ";" else text
            row = dict(zip(COLUMNS, (name, said, " ".join(map(str, numbers)), time), strict=True))
            rows.writerow([row[column] for column in columns])
    return path


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    return table(tmp_path_factory.mktemp("board") / "board.csv", net(), torch.zeros(16, 64))


# ---- A table. ----


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(26, 256), min_size=2, max_size=2))
def test_of_prices_that_are_straight_lines_a_model_of_any_widths_has_its_own(board, hidden):
    model = nn.Sequential(*(each[0] for each in (blocks(1, 64, hidden[0]), blocks(1, 64, hidden[1]))))
    found = PriceTable.read(board).total(model, torch.zeros(16, 64))
    assert found == pytest.approx(Priced(work).total(model, torch.zeros(16, 64)))


@settings(max_examples=8, deadline=None)
@given(st.integers(8, 64), st.integers(8, 64))
def test_what_is_narrower_on_two_sides_takes_the_share_of_each(first, second):
    def convolutions(one, other):
        return nn.Sequential(
            nn.Conv2d(3, one, 3), nn.ReLU(), nn.Conv2d(one, other, 3), nn.ReLU(), nn.Conv2d(other, 2, 1)
        )

    x = torch.zeros(1, 3, 9, 9)
    rows = priced_rows({each: work(each.name, each.spelled[1]) for each in probed(convolutions(64, 64), x)})
    smaller = convolutions(first, second)
    assert PriceTable(None, "", rows).total(smaller, x) == pytest.approx(Priced(work).total(smaller, x))


def test_prices_are_of_names_and_shapes():
    seen = []
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    Priced(lambda operation, shapes: seen.append((operation, shapes)) or 1.0).total(model, torch.zeros(2, 4))
    assert seen == [("linear", ((2, 4), (8, 4), (8,))), ("relu", ((2, 8),))]


@pytest.mark.parametrize("said", [-1.0, float("nan"), float("inf"), 10**400, "1", None, True])
def test_a_price_is_a_number_of_milliseconds(said):
    with pytest.raises(
        ValueError, match=r"says that linear of 2x4 8x4 8 takes .*; it has to be milliseconds, 0 or more"
    ):
        Priced(lambda *_: said).total(nn.Linear(4, 8), torch.zeros(2, 4))


def test_a_word_a_path_and_a_function_are_doors_of_one_kind(board):
    assert isinstance(parse(str(board)), PriceTable)
    assert isinstance(parse(board), Elsewhere)
    assert parse(work) == Priced(work)
    assert str(parse(work)) == "the function work"
    assert re.fullmatch(r"the table board.csv \([0-9a-f]{12}\)", str(parse(board)))


def test_elsewhere_nothing_is_run_and_a_time_is_a_sum(board):
    model, x = net(), torch.zeros(16, 64)
    before, after = Timer(model, x, parse(board))(net(hidden=128))
    assert (before, after) == (
        pytest.approx(Priced(work).total(model, x)), pytest.approx(Priced(work).total(net(hidden=128), x))
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"by the function .* the model takes no time at all"):
        Timer(model, x, parse(lambda *_: 0.0))


# ---- A table that is none. ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column operation; a table of times has operation, shapes, numbers, milliseconds"),
        ("\n\n", "has no column operation"),
        ("operation,shapes,numbers\nlinear,2x4,\n", r"has no column milliseconds; .*Run time_probes.py there"),
        ("operation,shapes,numbers,milliseconds\n", "holds no times"),
        ("operation,shapes,numbers,milliseconds\nlinear,2x4,,nan\n", "line 2: milliseconds is 'nan'; it has to be a"),
        ("operation,shapes,numbers,milliseconds\nlinear,2x4,,-1\n", "line 2: milliseconds is '-1'; it has to be a nu"),
        ("operation,shapes,numbers,milliseconds\nlinear,2x4,,inf\n", "line 2: milliseconds is 'inf'"),
        ("operation,shapes,numbers,milliseconds\nlinear,2x4,,fast\n", "line 2: milliseconds is 'fast'"),
        ("operation,shapes,numbers,milliseconds\nlinear,2x4,\n", "line 2: milliseconds is ''"),
        ("operation,shapes,numbers,milliseconds\nlinear,2y4,,1\n", "line 2: shapes are such as 1x64x384 .*, not '2y4'"),
        (
            "operation,shapes,numbers,milliseconds\nlinear,2x4,a,1\n",
            "line 2: .* and numbers such as -1 2, not '2x4' and",
        ),
        (
            "operation,shapes,numbers,milliseconds\nlinear,2x4,,1\nlinear,2x4,,2\n",
            "line 3: linear of 2x4 has a time already",
        ),
        (b"\xff\xfe\x00l", "is no text in UTF-8"),
        ("operation,shapes,numbers,milliseconds\nlinear,2\rx4,,1\n", "line "),
        (f"operation,shapes,numbers,milliseconds\n{'x' * 200_000},2x4,,1\n", "line 1: is no row of a table"),
        (f"operation,shapes,numbers,milliseconds\nlinear,{'9' * 400},,1\n", "line 2: shapes are such as 1x64x384"),
    ],
)
def test_a_damaged_table_is_one_line_and_nothing_is_changed(tmp_path, text, message):
    path = tmp_path / "board.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    model = net()
    before = state_of(model)
    with pytest.raises(ValueError, match=message) as caught:
        fit(model, inputs(width=64), budget={"latency": 0.6}, runtime=str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert is_unchanged(model, before)


@pytest.mark.parametrize("mark", [",", ";"])
def test_what_a_spreadsheet_wrote_is_read_alike(tmp_path, board, mark):
    path = table(tmp_path / "board.csv", net(), torch.zeros(16, 64), mark=mark, columns=COLUMNS[::-1])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert PriceTable.read(path).rows == PriceTable.read(board).rows


def test_a_table_of_another_model_or_batch_is_one_line_and_nothing_is_changed(board):
    model = net(hidden=300)
    before = state_of(model)
    for example in (torch.zeros(16, 64), torch.zeros(8, 64)):
        with pytest.raises(
            ValueError, match=r"has no time of \w+\(.*float32\), .*x.*, nor of shapes on both sides"
        ) as caught:
            fit(model, [example] * 4, budget={"latency": 0.6}, runtime=board)
        assert "\n" not in str(caught.value)
    assert is_unchanged(model, before)


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        parse(tmp_path / "board.csv")


# ---- Fitted by prices. ----


@pytest.mark.parametrize("budget", [0.5, 0.7])
@pytest.mark.parametrize("by", ["table", "function"])
def test_the_budget_is_kept_by_the_prices(board, by, budget):
    model = net()
    done = fit(
        model, inputs(width=64, rows=16), budget={"latency": budget}, runtime=board if by == "table" else work, finals=2
    )
    dense, got = (Priced(work).total(each, torch.zeros(16, 64)) for each in (net(), model))
    assert got <= 1.03 * budget * dense
    assert got >= (budget - 0.1) * dense
    assert done.dense["latency"] == pytest.approx(dense)
    assert done.got["latency"] == pytest.approx(got)
    lines = str(done).splitlines()
    assert lines[0].startswith(f"Asked: latency {budget:.1%}, by the {by} ")
    assert lines[1] == "No latency was measured here: each is the sum of what operations take there."


def test_shrink_takes_the_same_prices(board):
    model, x = net(), torch.zeros(16, 64)
    done = shrink(model, x, 0.4, target="latency", runtime=board, verify=False)
    left = Priced(work).total(model, x) / Priced(work).total(net(), x)
    assert left <= 0.6 + 1e-9
    assert done.got == pytest.approx(1 - left)


@pytest.mark.parametrize("step", [8, 32])
def test_shrink_takes_the_steps_of_a_table(tmp_path, step):
    def counts(**how):
        model, x = net(), torch.zeros(16, 64)
        shrink(model, x, 0.4, target="latency", runtime=board, verify=False, **how)
        return [each.out_features for each in model.modules() if isinstance(each, nn.Linear)]

    board = table(tmp_path / "board.csv", net(), torch.zeros(16, 64), cost=stairs(step))
    found, asked = counts(), counts(round_to=24)
    assert all(each % step == 0 for each in found)
    assert any(each % (2 * step) for each in found)  # of no larger one
    assert all(each % 24 == 0 or each == 64 for each in asked)


@pytest.mark.parametrize("step", [8, 16, 32])
def test_counts_are_multiples_of_the_steps_that_prices_have(step):
    model = net()
    done = fit(model, inputs(width=64, rows=16), budget={"latency": 0.7}, runtime=stairs(step), finals=1)
    assert done.step == step
    assert all(level.kept % step == 0 for each in done.levels.values() for level in each)
    assert f"Counts of units are multiples of {step}: the times there have such steps." in str(done).splitlines()
    asked = fit(net(), inputs(width=64, rows=16), budget={"latency": 0.7}, runtime=stairs(step), round_to=4, finals=1)
    assert asked.step is None


@pytest.mark.parametrize(("cost", "step"), [(work, None), (stairs(4), None), (stairs(64), 32), (lambda *_: 1.0, 32)])
def test_steps_are_the_largest_that_there_are(cost, step):
    times = {each: Priced(cost).of(each) for each in probed(net(), torch.zeros(16, 64))}
    assert step_in(priced_rows(times)) == step


def test_what_is_slower_than_the_dense_model_says_so_first():
    def narrow_is_slow(operation, shapes):
        return work(operation, shapes) if min(map(min, shapes)) >= 16 else 1e3

    done = fit(net(), inputs(width=64, rows=16), budget={"latency": 0.9}, runtime=narrow_is_slow, finals=1)
    slower = copy.copy(done)
    object.__setattr__(slower, "got", {**done.got, "latency": 2 * done.dense["latency"]})
    assert str(slower).splitlines()[0].startswith("It is slower than the dense model: ")
    assert not str(done).startswith("It is slower")


# ---- Probes. ----


@pytest.fixture(scope="module")
def probes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probes") / "probes"
    return write_probes(blocks(1, width=8, hidden=128), torch.zeros(4, 8), folder)


def test_each_operation_is_a_small_file_once(probes):
    pytest.importorskip("onnxruntime")
    with open(probes.folder / PROBES, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({(row["operation"], row["shapes"], row["numbers"]) for row in rows}) == len(rows) > 10
    assert sum(probes.count.values()) == len(rows)
    assert {path.name for path in probes.folder.iterdir()} == {row["file"] for row in rows} | {
        PROBES,
        SCRIPT,
        "nothing.onnx",
    }
    assert max(path.stat().st_size for path in probes.folder.glob("*.onnx")) < 4096
    spelled = {each.spelled for each in operations_of(blocks(1, width=8, hidden=128), torch.zeros(4, 8))}
    named = {(row["operation"], row["shapes"]) for row in rows}
    assert {(name, " ".join("x".join(map(str, shape)) for shape in shapes)) for name, shapes, _ in spelled} <= named


@pytest.mark.parametrize("runtime", ["onnxruntime", "onnxruntime:int8", "onnxruntime:int4"])
def test_the_script_times_them_without_the_library_and_fit_takes_what_it_wrote(tmp_path, runtime):
    pytest.importorskip(f"onnxruntime{'.quantization.matmul_nbits_quantizer' * runtime.endswith('int4')}")
    model = blocks(1, width=32, hidden=96)
    done = write_probes(model, torch.zeros(16, 32), tmp_path / "probes", runtime=runtime)
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", done.folder / SCRIPT, "--rounds", "1", "--at-least", "0"]
    said = subprocess.run(command, capture_output=True, text=True, env=alone, check=True, cwd=tmp_path)
    assert "wrote " in said.stdout
    assert not re.search(
        r"^(?:from|import) (?:torch|onnx|secateur)\b", (done.folder / SCRIPT).read_text(), re.MULTILINE
    )
    found = PriceTable.read(done.folder / "board.csv")
    assert sum(map(len, found.rows.values())) == sum(done.count.values()) + sum(done.left_out.values())
    assert found.total(blocks(1, width=32, hidden=50), torch.zeros(16, 32)) > 0
    assert not [path for path in done.folder.iterdir() if "unfinished" in path.name]


@pytest.mark.parametrize(
    ("model", "runtime", "message"),
    [
        (nn.Linear(4, 4), "onnxruntime", "nothing of the model can leave, so there is nothing to time"),
        (nn.Linear(4, 4), "torch", 'probes are for "onnxruntime", whose files'),
        (nn.Linear(4, 4).bfloat16(), "onnxruntime", "take no bfloat16: convert it to float32"),
        (
            nn.Linear(4, 4, device="meta"),
            "onnxruntime",
            "weight is on the meta device and has no values; load the weights",
        ),
        (nn.Linear(4, 4), "openvino", 'probes are for "onnxruntime", whose files'),
        (nn.Linear(5, 4), "onnxruntime", r"the model does not run on the example \(shape \(2, 4\), float32\)"),
    ],
)
def test_what_has_no_probes_is_one_line_and_nothing_is_written(tmp_path, model, runtime, message):
    with pytest.raises(ValueError, match=message):
        write_probes(model, torch.zeros(2, 4), tmp_path / "probes", runtime=runtime)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_exists_is_left_alone(tmp_path):
    (tmp_path / "probes").mkdir()
    with pytest.raises(ValueError, match="probes"):
        write_probes(blocks(1), torch.zeros(2, 6), tmp_path / "probes")
    assert not [*(tmp_path / "probes").iterdir()]


@pytest.mark.parametrize("after", [1, 5])
def test_a_write_that_was_killed_is_not_there_and_the_next_one_is_whole(tmp_path, after):
    pytest.importorskip("onnxruntime")
    from secateur.runtimes import OnnxRuntime

    model, x, folder = blocks(1), torch.zeros(2, 6), tmp_path / "probes"
    write, written = OnnxRuntime.write_alone, []

    def killed():
        def dies(self, *args):
            write(self, *args)
            written.append(args)
            if len(written) == after:
                os.kill(os.getpid(), signal.SIGKILL)

        OnnxRuntime.write_alone = dies
        write_probes(model, x, folder)

    assert os.WTERMSIG(forked(killed)) == signal.SIGKILL
    assert not folder.exists()
    assert all(path.name.startswith("probes.unfinished-") for path in tmp_path.iterdir())
    done = write_probes(model, x, folder)
    assert len([*folder.glob("*.onnx")]) == sum(done.count.values()) + 1


def test_no_operation_is_left_out_where_a_disk_was_full_for_a_moment(tmp_path, monkeypatch):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    save, calls = onnx.save, []

    def full(model, path):
        calls.append(path)
        if len(calls) in (2, 4):  # what is written of an operation alone, by both exporters
            raise OSError(28, "No space left on device", str(path))
        save(model, path)

    monkeypatch.setattr(onnx, "save", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_probes(blocks(1), torch.zeros(2, 6), tmp_path / "probes")
    assert not [*tmp_path.iterdir()]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    from secateur.runtimes import OnnxRuntime

    written = []

    def fails(self, model, example_inputs, path):
        path.write_bytes(b"")
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(OnnxRuntime, "write_alone", fails)
    model = blocks(1)
    before = state_of(model)
    with pytest.raises(Exception, match="No space left"):
        write_probes(model, torch.zeros(2, 6), tmp_path / "probes")
    assert not [*tmp_path.iterdir()]
    assert is_unchanged(model, before)
    assert contents(tmp_path) == {}
