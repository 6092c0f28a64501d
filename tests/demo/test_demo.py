"""The demo on a small plan: same networks for all methods, zeros stay zero, the same seeds give the same figures."""

import copy
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from secateur.criteria import magnitude
from secateur.demo import DEFAULT_METHODS, METHODS, load_digits, measuring, run_demo, trials
from secateur.demo.methods import choose_methods
from secateur.demo.network import DigitsNet
from secateur.demo.training import BATCH, accuracy, train
from secateur.pipeline import sparsify, sparsity_of
from secateur.report import Results, load_results, summarize
from secateur.targets import find_targets
from secateur.training import Pruner

SMALL = {"seeds": (0, 1), "sparsities": (0.9,), "epochs": 3, "tuning_epochs": 1}
WEIGHTS = sum(weight.numel() for weight in find_targets(DigitsNet()).values())
PARAMETERS = sum(parameter.numel() for parameter in DigitsNet().parameters())
ONE_SHOT = ("global magnitude", "ERK", "LAMP", "random")


def run_small(out: Path) -> Path:
    return run_demo(out, **SMALL)  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def _few_rounds() -> Iterator[None]:
    """Of timing, which otherwise takes most of the time of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "ROUNDS", 5)
        yield


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
    wanted = {(m, s, k) for m in (*ONE_SHOT, "gradual") for s in (0.9,) for k in (0, 1)}
    stem = 16 * 9
    two_of_four = round((WEIGHTS - stem) / 2 / WEIGHTS, 3)
    wanted |= {("2:4", two_of_four, k) for k in (0, 1)} | {("dense", 0.0, k) for k in (0, 1)}
    assert set(rows) == wanted


def test_zeros_stay_zero_through_fine_tuning(results: Results) -> None:
    """Sparsity is measured on the fine-tuned networks, and it is what was asked for, to one weight."""
    for run in results.runs:
        if run.method not in {"dense", "2:4"}:
            assert abs(run.sparsity - 0.9) <= 1 / WEIGHTS
            assert run.overall == pytest.approx(run.sparsity * WEIGHTS / PARAMETERS)


def test_what_prunes_while_it_trains_has_no_accuracy_before(results: Results) -> None:
    assert {run.method for run in results.runs if run.before is None} == {"gradual"}


def test_multiply_adds_of_the_dense_network_by_hand(results: Results) -> None:
    stem, narrow, widening, wide, head = 64 * 16 * 9, 64 * 16 * 16 * 9, 16 * 32 * 16 * 9, 16 * 32 * 32 * 9, 32 * 10
    dense = stem + 2 * narrow + widening + 3 * wide + 16 * 32 * 16 + head
    for run in results.runs:
        assert run.multiply_adds is not None
        assert (run.multiply_adds == dense) == (run.method == "dense")
        if run.method == "2:4":
            assert run.multiply_adds == stem + (dense - stem) // 2


def test_the_history_of_gradual_pruning(results: Results) -> None:
    """Masks nest, so that the churn of all updates adds up to the sparsity."""
    [history] = results.histories
    assert history.method == "gradual"
    assert history.steps == tuple(range(len(history.steps)))
    assert list(history.sparsity) == sorted(history.sparsity)
    assert (history.sparsity[0], round(history.sparsity[-1], 3)) == (0, 0.9)
    assert sum(history.churn) == pytest.approx(history.sparsity[-1])
    assert not any(history.churn[6:])  # the ramp ends after 60 % of the steps


def test_the_checks_share_the_budget_and_the_sparsity(results: Results) -> None:
    assert len(results.checks) == 4
    own = [run for run in results.runs if run.method == "LAMP"]
    assert [(run.sparsity, run.after) for run in results.checks[0].runs] == [(run.sparsity, run.after) for run in own]
    for check in results.checks:
        assert [run.seed for run in check.runs] == [0, 1]
        for run in check.runs:
            assert run.sparsity == own[0].sparsity
    spoilt = [summarize(check.runs)[0].after for check in results.checks]
    assert spoilt[0] > max(spoilt[1:]) + 5  # one epoch mends little


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

    rows = summarize(results.runs)
    for method in ("global magnitude", "ERK", "LAMP"):
        assert after(method, 0.9) > after("random", 0.9) + 10
    before = {(run.method, round(run.sparsity, 2), run.seed): run.before for run in results.runs}
    assert all(
        run.after > (before[run.method, 0.9, run.seed] or 0)
        for run in results.runs
        if (run.method, run.sparsity > 0.8) == ("LAMP", True)
    )


def test_every_figure_of_the_story_is_measured(results: Results) -> None:
    figures = {f"{run.latency_ms:.2f}" for run in results.runs if run.latency_ms}
    batches = {f"{run.batch_ms:.2f}" for run in results.shrunken if run.batch_ms}
    told = re.findall(r"(\d+\.\d\d)\sms", " ".join(results.text))
    assert len(told) == 5
    assert set(told[:2]) <= figures
    assert set(told[2:]) <= batches


def test_channels_leave_as_many_as_asked(results: Results) -> None:
    """The network is smaller on disk and in work by what was asked, and fine-tuned and measured like the rest."""
    dense = next(run for run in results.runs if run.method == "dense")
    rows = summarize(results.shrunken)
    assert [(row.method, row.seeds) for row in rows] == [
        ("dense", 2),
        ("gradual (zeros)", 2),
        ("columns:16 (zeros)", 2),
        ("gradual, packed", 2),
        ("columns:16, packed", 2),
        ("channels (shrink)", 2),
        ("channels (shrink)", 2),
    ]
    assert dense.multiply_adds is not None
    assert dense.bytes is not None
    for row, left in zip(rows[-2:], (0.5, 0.25), strict=True):
        assert row.multiply_adds is not None
        assert row.bytes is not None
        assert left - 0.06 < row.multiply_adds / dense.multiply_adds <= left
        assert row.bytes < (left + 0.1) * dense.bytes  # statistics and names beside the weights
        assert row.after is not None
        assert row.before is not None
        assert row.after > row.before
    for run in results.shrunken:
        assert (run.latency_ms is not None) == (run.batch_ms is not None) == (run.seed == 0)
        twin = [each for each in results.runs if f"{each.method} (zeros)" == run.method or each.method == run.method]
        assert all(each.after == run.after for each in twin if (each.seed, each.sparsity) == (run.seed, run.sparsity))
        assert bool(twin) == (run.method in ("dense", "gradual (zeros)"))


def test_packed_networks_are_the_masked_ones_in_other_layers(results: Results) -> None:
    """Accuracy and compressed file are the masked network's; bytes in memory and milliseconds are measured anew."""
    masked = {(run.method.partition(" (")[0], run.seed): run for run in results.shrunken if "(zeros)" in run.method}
    packed = [run for run in results.shrunken if run.method.endswith(", packed")]
    assert len(packed) == len(masked) == 4
    [dense, *_] = results.shrunken
    assert dense.memory is not None
    for run in packed:
        twin = masked[run.method.removesuffix(", packed"), run.seed]
        assert (run.sparsity, run.after, run.compressed) == (twin.sparsity, twin.after, twin.compressed)
        assert (run.memory is not None) == (run.batch_ms is not None) == (run.seed == 0)
        assert run.memory is None or run.memory <= dense.memory
        assert twin.memory == dense.memory  # zeros take as much room
        assert twin.compressed is not None
        assert twin.bytes is not None
        assert twin.compressed < 0.5 * twin.bytes


def test_masked_networks_with_about_as_much_work_stand_beside() -> None:
    dense = DigitsNet()

    def trial(method: str, sparsity: float) -> trials.Trial:
        model = copy.deepcopy(dense)
        masks = sparsify(model, sparsity, criterion=METHODS[method].choices.get("criterion", magnitude))  # type: ignore[union-attr]
        return trials.Trial(METHODS[method].label, sparsity, 0, model, masks, 1, 0, METHODS[method])

    first = trials.Trial("dense", 0.0, 0, dense, {}, 1, 0)
    every = [first, *(trial(method, sparsity) for method in ("random", "lamp") for sparsity in (0.5, 0.8, 0.95))]
    shrunken = trials.Trial("channels (shrink)", 0.5, 0, DigitsNet(8, 8), {}, 1, 0)
    chosen = [(one.label, one.asked) for one in trials.those_beside(every, [shrunken])]
    assert chosen == [("dense", 0.0), ("random", 0.5), ("random", 0.8), ("channels (shrink)", 0.5)]
    assert trials.those_beside([first], [shrunken]) == [first, shrunken]


def test_layers_and_histogram_are_those_of_the_masks(results: Results) -> None:
    assert [network.method for network in results.networks] == [*ONE_SHOT, "2:4", "gradual"]
    for network in results.networks:
        assert len(network.layers) == 9
        assert sum(layer.weights for layer in network.layers) == WEIGHTS
        assert sum(network.kept) == sum(layer.kept for layer in network.layers)
    two_of_four = results.networks[4]
    assert two_of_four.layers[0].sparsity == 0  # the stem
    assert all(layer.sparsity == 0.5 for layer in two_of_four.layers[1:])


def test_everything_is_shown_on_the_way(finished: tuple[Path, str, bool]) -> None:
    for stage in ("Training 2 dense networks", "Pruning", "Shrinking", "Fine-tuning", "Timing", "Channels that left"):
        assert stage in finished[1]
    for stage in ("global magnitude", "±"):
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
    every = [*results.runs, *(run for check in results.checks for run in check.runs), *results.shrunken]
    first = [run for run in every if run.seed == 1]
    anew = [*again.runs, *(run for check in again.checks for run in check.runs), *again.shrunken]
    for one, two in zip(first, anew, strict=True):
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


# -- the methods -----------------------------------------------------------------------------------------------------


def test_every_other_method_runs_and_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [name for name in METHODS if name not in DEFAULT_METHODS]
    assert others == ["wanda", "ria", "taylor", "snip", "grasp", "synflow", "rigl"]
    monkeypatch.setenv("COLUMNS", "200")
    settings = {"seeds": (3,), "sparsities": (0.8,), "epochs": 1, "tuning_epochs": 2}
    page = run_demo(tmp_path, methods=["wanda,ria", *others[2:]], training=True, **settings)  # type: ignore[arg-type]
    results = load_results(page.with_name("results.json"))
    runs = {run.method: run for run in results.runs}
    labels = [METHODS[name].label for name in [*others[:-1], "gradual", "rigl"]]
    assert list(runs) == ["dense", *labels]
    assert all(abs(runs[label].sparsity - 0.8) <= 1 / WEIGHTS for label in labels)
    from_scratch = {"SNIP", "GraSP", "SynFlow", "RigL", "gradual"}
    assert {label for label in labels if runs[label].before is None} == from_scratch
    [gradual, rigl] = results.histories
    assert (gradual.method, gradual.steps[-1]) == ("gradual", 16)
    assert (rigl.method, rigl.steps[-1]) == ("RigL", 24)  # three epochs: of dense training and of fine-tuning
    assert len(set(rigl.sparsity)) == 1
    assert [step for step, churn in zip(rigl.steps, rigl.churn, strict=True) if churn] == [16]
    notes = " ".join(results.notes)
    assert "Budgets differ: SNIP, GraSP, SynFlow, RigL never had a dense network" in notes
    for label in labels:
        assert label.casefold() in notes.casefold()
    assert results.command == "secateur demo " + " ".join(
        [f"--method {name}" for name in ["wanda,ria", *others[2:]]] + ["--train", "--out DIR"]
    )
    said = "Left out of this run: the random and the magnitude baseline"
    assert said in capsys.readouterr().out
    assert "No random and no magnitude baseline" in page.read_text(encoding="utf-8")
    assert results.checks[0].name == "Wanda as it is"


def test_methods_are_chosen_once_in_one_order() -> None:
    assert [method.name for method in choose_methods()] == list(DEFAULT_METHODS)
    assert [method.name for method in choose_methods(training=True)] == [*DEFAULT_METHODS, "rigl"]
    assert [method.name for method in choose_methods([" RigL,lamp", "lamp"])] == ["lamp", "rigl"]
    assert [method.name for method in choose_methods(["2:4"], training=True)] == ["2:4", "gradual", "rigl"]
    for name, method in METHODS.items():
        assert name == method.name
        assert len(method.line) < 80


def test_an_unknown_method_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no method 'lam'; there are magnitude, erk, .*, gradual, rigl\.$"):
        run_demo(tmp_path / "out", methods=["lam"])
    assert not list(tmp_path.iterdir())


def test_a_pattern_alone_has_nothing_to_spoil(tmp_path: Path) -> None:
    page = run_demo(tmp_path, methods=["2:4"], seeds=(0,), sparsities=(0.9,), epochs=1, tuning_epochs=1)
    results = load_results(page.with_name("results.json"))
    assert [run.method for run in results.runs] == ["dense", "2:4"]
    assert (results.checks, results.histories) == ((), ())


def test_spoilt_masks_keep_their_counts() -> None:
    """Shuffled: of each output channel. Random: of each layer. Re-initialized: the mask itself, on other weights."""
    torch.manual_seed(0)
    dense = DigitsNet()
    pruned = copy.deepcopy(dense)
    masks = sparsify(pruned, 0.95)
    trial = trials.Trial("LAMP", 0.95, 7, pruned, masks, 1, 1007, METHODS["lamp"])
    with torch.random.fork_rng(devices=[]):
        checks = trials.spoilt_trials([trial], {7: dense}, (0.5, 0.95))
    [shuffled], [drawn], [fresh] = checks["shuffled"], checks["random"], checks["re-initialized"]
    for name, mask in masks.items():
        assert torch.equal(shuffled.masks[name].flatten(1).sum(1), mask.flatten(1).sum(1))
        assert int(drawn.masks[name].sum()) == int(mask.sum())
        assert torch.equal(fresh.masks[name], mask)
        for one in (shuffled, drawn):
            kept = one.masks[name]
            assert torch.equal(one.model.get_parameter(name), dense.get_parameter(name) * kept)
        assert not torch.equal(fresh.model.get_parameter(name), pruned.get_parameter(name))
    large = "blocks.2.conv1.weight"
    assert not torch.equal(drawn.masks[large].flatten(1).sum(1), masks[large].flatten(1).sum(1))
    assert not torch.equal(shuffled.masks[large], masks[large])
    assert {one.epochs for one in (shuffled, drawn, fresh)} == {1}


def test_random_masks_know_nothing_of_the_weights() -> None:
    """A seed draws weights and masks from streams of their own: one stream for both would keep the largest weights."""
    from rich.progress import Progress

    first = trials.untrained_networks([3])
    plan = trials.Plan(choose_methods(["random,rigl,lamp"]), (3,), (0.5,), 1, 1)
    with Progress(disable=True) as bars, torch.random.fork_rng(devices=[]):
        pruned = trials.pruned_trials(plan, first, first, load_digits(), bars)
        checks = trials.spoilt_trials(pruned, first, (0.5,))
    drawn = [trial for trial in pruned if trial.label in ("random", "RigL")]
    assert len(drawn) == 2
    for trial in [*drawn, *checks["shuffled"], *checks["random"]]:
        for name, mask in trial.masks.items():
            weight = first[3].get_parameter(name)
            if mask.numel() > 1000:
                kept = mask.flatten().float()
                related = torch.corrcoef(torch.stack([weight.detach().flatten(), kept]))[0, 1]
                assert abs(related) < 4 / mask.numel() ** 0.5, (trial.label, name)


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


def test_a_pruner_is_made_with_the_optimizer_and_sees_every_step() -> None:
    data = load_digits()
    data = data._replace(train_images=data.train_images[: 2 * BATCH], train_labels=data.train_labels[: 2 * BATCH])
    torch.manual_seed(0)
    model = DigitsNet(4, 4)
    pruners: list[Pruner] = []

    def begin(optimizer: torch.optim.Optimizer, steps: int) -> None:
        pruners.append(Pruner(model, optimizer, 0.75, total_steps=steps, verbose=False))

    seen: list[float] = []
    train(
        model, data, epochs=3, rate=0.1, seed=0, begin=begin,
        after_step=lambda: seen.append(pruners[0].metrics()["step"]),
    )  # fmt: skip
    assert seen == [1, 2, 3, 4, 5, 6]
    assert sparsity_of(model) == pytest.approx(0.75, abs=1e-3)


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


def test_accuracy_is_a_percentage_and_leaves_the_mode() -> None:
    model = nn.Flatten()  # the logits are the images
    images = torch.eye(4).reshape(4, 1, 2, 2)
    assert accuracy(model, images, torch.tensor([0, 1, 2, 0])) == 75
    assert model.training


def test_the_example_tells_the_same_story(tmp_path: Path) -> None:
    import os
    import subprocess

    script = Path(__file__).parents[2] / "examples" / "digits.py"
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
