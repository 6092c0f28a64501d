"""The demo on a small plan: same networks for all methods, zeros stay zero, the same seeds give the same figures."""

import copy
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from secateur.demo import BATCH, DigitsNet, accuracy, calibrate, load_digits, run_demo, train
from secateur.masks import sparsity_of
from secateur.results import Results, load_results
from secateur.sparsification import sparsify
from secateur.targets import find_targets

SMALL = {"seeds": (0, 1), "sparsities": (0.9,), "epochs": 3, "tuning_epochs": 1}
WEIGHTS = sum(weight.numel() for weight in find_targets(DigitsNet()).values())


def run_small(out: Path) -> Path:
    return run_demo(out, **SMALL)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, bool]:
    """The page, what was printed, and whether the process was left as it was."""
    import contextlib
    import io
    import os

    out = tmp_path_factory.mktemp("demo") / "a new" / "folder"
    printed = io.StringIO()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "COLUMNS", "80")
        page = run_small(out)
    untouched = torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads()
    return page, printed.getvalue(), untouched


@pytest.fixture(scope="module")
def results(finished: tuple[Path, str, bool]) -> Results:
    return load_results(finished[0].with_name("results.json"))


def test_the_folder_holds_the_page_and_its_numbers(finished: tuple[Path, str, bool]) -> None:
    page, printed, _ = finished
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "results.json"]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "report.html" in re.sub(r"\s", "", printed)


def test_every_method_meets_every_sparsity_and_seed(results: Results) -> None:
    rows = [(run.method, round(run.sparsity, 3), run.seed) for run in results.runs]
    assert len(rows) == len(set(rows))
    wanted = {(m, s, k) for m in ("global magnitude", "ERK", "LAMP", "random") for s in (0.9,) for k in (0, 1)}
    stem = 16 * 9
    two_of_four = round((WEIGHTS - stem) / 2 / WEIGHTS, 3)
    wanted |= {("2:4", two_of_four, k) for k in (0, 1)} | {("dense", 0.0, k) for k in (0, 1)}
    assert set(rows) == wanted


def test_zeros_stay_zero_through_fine_tuning(results: Results) -> None:
    """Sparsity is measured on the fine-tuned networks, and it is what was asked for, to one weight."""
    for run in results.runs:
        if run.method not in {"dense", "2:4"}:
            assert abs(run.sparsity - 0.9) <= 1 / WEIGHTS


def test_sizes_and_times_are_measured_and_tell_the_truth(results: Results) -> None:
    dense = next(run for run in results.runs if run.method == "dense")
    assert dense.zipped is not None
    for run in results.runs:
        assert run.bytes == dense.bytes  # zeros take as much room
        assert run.zipped is not None
        assert run.zipped <= run.bytes
        assert (run.latency_ms is not None) == (run.seed == 0)
        if run.sparsity > 0.8:
            assert run.zipped < dense.zipped / 3


def test_fine_tuning_and_choosing_both_help(results: Results) -> None:
    def after(method: str, sparsity: float) -> float:
        [row] = [row for row in rows if row.method == method and abs(row.sparsity - sparsity) < 0.01]
        assert row.after is not None
        return row.after

    from secateur.results import summarize

    rows = summarize(results.runs)
    for method in ("global magnitude", "ERK", "LAMP"):
        assert after(method, 0.9) > after("random", 0.9) + 10
    before = {(run.method, round(run.sparsity, 2), run.seed): run.before for run in results.runs}
    assert all(
        run.after > before[run.method, 0.9, run.seed]
        for run in results.runs
        if (run.method, run.sparsity > 0.8) == ("LAMP", True)
    )


def test_every_figure_of_the_story_is_measured(results: Results) -> None:
    figures = {f"{run.latency_ms:.2f}" for run in results.runs if run.latency_ms}
    told = re.findall(r"(\d+\.\d\d)\sms", " ".join(results.text))
    assert len(told) == 2
    assert set(told) <= figures


def test_layers_and_histogram_are_those_of_the_masks(results: Results) -> None:
    assert [network.method for network in results.networks] == ["global magnitude", "ERK", "LAMP", "random", "2:4"]
    for network in results.networks:
        assert len(network.layers) == 9
        assert sum(layer.weights for layer in network.layers) == WEIGHTS
        assert sum(network.kept) == sum(layer.kept for layer in network.layers)
    assert results.networks[-1].layers[0].sparsity == 0  # the stem under 2:4
    assert all(layer.sparsity == 0.5 for layer in results.networks[-1].layers[1:])


def test_everything_is_shown_on_the_way(finished: tuple[Path, str, bool]) -> None:
    for stage in ("Training 2 dense networks", "Pruning", "Fine-tuning", "Timing", "global magnitude", "±"):
        assert stage in finished[1]
    assert max(map(len, finished[1].splitlines())) <= 80


def test_the_process_is_left_as_it_was(finished: tuple[Path, str, bool]) -> None:
    assert finished[2]


def test_the_same_seeds_give_the_same_figures_in_the_default_folder(
    results: Results, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the global generator did before, and whichever seeds run beside this one."""
    torch.manual_seed(99)
    monkeypatch.chdir(tmp_path)
    page = run_demo(**{**SMALL, "seeds": (1,)})  # type: ignore[arg-type]
    assert page == Path("secateur-demo/report.html")
    again = load_results("secateur-demo/results.json")
    assert again.command == "secateur demo"
    first = [run for run in results.runs if run.seed == 1]
    for one, two in zip(first, again.runs, strict=True):
        assert (one.method, one.sparsity, one.seed) == (two.method, two.sparsity, two.seed)
        assert (one.before, one.after, one.zipped) == (two.before, two.after, two.zipped)


def test_results_name_no_path(finished: tuple[Path, str, bool], results: Results) -> None:
    assert results.command == "secateur demo --out DIR"
    assert str(finished[0].parent) not in finished[0].read_text(encoding="utf-8")
    assert "new/folder" not in json.dumps(finished[0].with_name("results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("missing", ["sklearn", "matplotlib", "jinja2"])
def test_a_missing_extra_is_named_before_any_work(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"{missing}.*pip install 'secateur\[demo\]'"):
        run_demo(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("mine")
    with pytest.raises(NotADirectoryError, match="is a file; the demo needs a folder"):
        run_demo(path)
    assert path.read_text() == "mine"


# -- the parts -------------------------------------------------------------------------------------------------------


def test_the_split_is_by_class_and_leaks_nothing() -> None:
    data = load_digits()
    assert (len(data.train_images), len(data.test_images)) == (1078, 719)
    for label in range(10):
        share = (data.test_labels == label).sum() / (
            (data.train_labels == label).sum() + (data.test_labels == label).sum()
        )
        assert share == pytest.approx(0.4, abs=0.01)
    assert data.train_images.mean() == pytest.approx(0, abs=1e-5)
    assert data.train_images.std() == pytest.approx(1, abs=1e-5)


def test_it_learns_and_keeps_what_is_pruned_at_zero() -> None:
    data = load_digits()
    torch.manual_seed(0)
    model = DigitsNet()
    train(model, data, epochs=6, rate=0.2, seed=0)
    assert accuracy(model, data.test_images, data.test_labels) > 90
    masks = sparsify(model, 0.8)
    seen: list[float] = []
    train(model, data, epochs=2, rate=0.2, seed=1, masks=masks, after_epoch=lambda: seen.append(sparsity_of(model)))
    assert len(seen) == 2
    assert all(sparsity == pytest.approx(0.8, abs=1e-4) for sparsity in seen)
    for name, mask in masks.items():
        assert not model.get_parameter(name)[~mask].any()


def test_training_draws_nothing_from_the_global_generator() -> None:
    data = load_digits()
    data = data._replace(train_images=data.train_images[:BATCH], train_labels=data.train_labels[:BATCH])
    model = DigitsNet(4, 4)
    twin = copy.deepcopy(model)
    state = torch.get_rng_state()
    train(model, data, epochs=2, rate=0.1, seed=5)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(3)
    train(twin, data, epochs=2, rate=0.1, seed=5)
    for one, two in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_calibrate_takes_the_statistics_of_the_images_and_changes_no_weight() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3)).eval()
    images = torch.randn(50, 1, 8, 8) + 2
    weights = copy.deepcopy(dict(model.named_parameters()))
    with torch.no_grad():
        calibrate(model, images)
        inner = model[0](images)
    assert not model.training
    assert [norm.momentum for norm in (model[1], model[3])] == [0.1, 0.1]
    torch.testing.assert_close(model[1].running_mean, inner.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(model[1].running_var, inner.var(dim=(0, 2, 3)))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
    running = model[1].running_mean.clone()
    calibrate(model, images)  # from anew: twice is once
    assert torch.equal(running, model[1].running_mean)


def test_accuracy_is_a_percentage_and_leaves_the_mode() -> None:
    model = nn.Flatten()  # the logits are the images
    images = torch.eye(4).reshape(4, 1, 2, 2)
    assert accuracy(model, images, torch.tensor([0, 1, 2, 0])) == 75
    assert model.training


def test_the_example_tells_the_same_story(tmp_path: Path) -> None:
    import os
    import subprocess

    script = Path(__file__).parent.parent / "examples" / "digits.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", script, "report.html"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    after = {words[0]: float(words[3]) for line in done.stdout.splitlines() if (words := line.split())[1:2] == ["90.0"]}
    assert set(after) == {"magnitude", "ERK", "LAMP", "random"}
    assert after["LAMP"] > 90
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count("<svg") == 7
