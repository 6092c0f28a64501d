"""The benchmark of pruning while training runs from end to end and computes its error bars right.

Law: what a table says of a method was counted in the model that the method left.
"""

import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parent.parent / "benchmarks" / "training.py"


@pytest.fixture(scope="module")
def training():
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("training", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["training"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["training"]
    sys.path[:] = path


@pytest.fixture
def without_peers(training, monkeypatch):
    monkeypatch.setattr(training.peers, "missing", lambda: dict.fromkeys(training.peers.PEERS, "it is not installed"))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def test_accuracy(training, without_peers, tmp_path, capsys):
    file = tmp_path / "results.json"
    training.main(["accuracy", "--smoke", "--processes", "1", "--json", str(file)])
    printed = capsys.readouterr().out
    assert "nncf.prune is left out: it is not installed." in printed
    assert "| Pruner, default recipe |" in printed
    results = json.loads(file.read_text())
    pruned = [run for run in results["runs"] if run["method"] != "dense"]
    assert {run["method"] for run in pruned} == ({*training.TUNING, *training.SCRATCH} - {*training.peers.PEERS})
    for run in pruned:
        assert run["measured"] == pytest.approx(0.9, abs=1e-5), run
        assert 0 <= run["score"] <= 100


def test_overhead(training, without_peers, capsys):
    training.main(["overhead", "--smoke"])
    printed = capsys.readouterr().out
    assert "Pruner between updates" in printed
    assert "Pruner, in one file with model and optimizer: +" in printed
    assert "fasterai" not in printed.split("a checkpoint grows:")[1]


def test_the_text_is_read_in_windows_that_do_not_overlap_the_training(training):
    task = training.task("GPT")
    assert len(task.train) + len(task.test) == len(training.text()) > 300_000
    model = training.GPT(len(set(training.text())), task.length, width=8, layers=1, heads=2)
    recipe = task.recipe(1, seed=0)
    batches = next(recipe.epochs_of_batches())
    assert len(batches) == recipe.total_steps
    x, y = batches[0]
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert model(x[:1]).shape == (1, task.length, len(set(training.text())))
    scores = task.scores(model)
    assert len(scores) == (len(task.test) - 1) // task.length
    assert statistics.fmean(scores) == pytest.approx(math.log2(len(set(training.text()))), rel=0.05)  # it knows nothing


def test_a_seed_fixes_the_batches(training):
    recipe = training.task("MLP").recipe(2, seed=3)
    once, again = ([batch for epoch in recipe.epochs_of_batches() for batch in epoch] for _ in range(2))
    for (x, y), (x_again, y_again) in zip(once, again, strict=True):
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)
    assert not torch.equal(once[0][0], once[recipe.steps_per_epoch][0])


def test_lightning_trains_the_same_batches_at_the_same_rates(training):
    plain, theirs = (training.initial("MLP", 0) for _ in range(2))
    training.task("MLP").recipe(2, seed=0).fit(plain)
    with training.peers.quietly():
        training.peers.lightning_fit(theirs, training.task("MLP").recipe(2, seed=0), [])
    for a, b in zip(plain.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_lightning_removes_what_the_ramp_says(training):
    model = training.peers.PEERS["Lightning ModelPruning"](
        training.initial("MLP", 0), 0.9, training.task("MLP").recipe(3, seed=0)
    )
    assert training.zeros(model) == pytest.approx(0.9, abs=1e-5)


def test_networks_are_of_the_sizes_that_are_claimed(training):
    for network, weights in ((training.MLP, 50_200), (training.ResNet8, 77_072)):
        layers = [module for module in network().modules() if isinstance(module, training.peers.LAYERS)]
        assert sum(layer.weight.numel() for layer in layers) == weights


def test_the_error_bar_is_the_binomial_one(training):
    assert training.error_bar(98, 719) == pytest.approx(100 * math.sqrt(0.98 * 0.02 / 719))
    assert training.error_bar(100, 719) > 0


def test_differences_are_paired_by_image(training):
    def outcome(scores):
        return training.Outcome("MLP", "m", 0.9, 0, False, 0.9, scores)

    difference, error = training.paired([outcome([100.0, 100.0, 0.0])], [outcome([0.0, 100.0, 0.0])])
    assert difference == pytest.approx(100 / 3)
    assert error == pytest.approx(statistics.stdev([100, 0, 0]) / math.sqrt(3))


def test_a_peer_that_fails_is_reported(training, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no such operator\nand more")

    monkeypatch.setitem(training.TUNING, "fasterai", broken)
    outcome = training.work(training.Job("MLP", "fasterai", 0.9, 0, 1, False))
    assert outcome.error == "RuntimeError: no such operator"
    training.table([outcome], "MLP", ["fasterai"], 1)
    assert "fasterai fails: RuntimeError: no such operator" in capsys.readouterr().out


def test_batch_normalization_is_measured_before_and_after(training, capsys):
    training.main(["batchnorm", "--smoke"])
    assert "| 90% |" in capsys.readouterr().out
