"""The benchmark of pruning while training runs from end to end and computes its error bars right.

Law: what a table says of a method was counted in the model that the method left.
"""

import json
import math
import statistics

import pytest
import torch

from benchmarks.support.corpora import language_reference
from benchmarks.training import accuracy, methods, networks, peers, tasks
from benchmarks.training.run import main


@pytest.fixture
def without_peers(monkeypatch):
    monkeypatch.setattr(peers, "missing", lambda: dict.fromkeys(peers.PEERS, "it is not installed"))


def test_accuracy(without_peers, tmp_path, capsys):
    file = tmp_path / "results.json"
    main(["accuracy", "--smoke", "--processes", "1", "--json", str(file)])
    printed = capsys.readouterr().out
    assert "nncf.prune is left out: it is not installed." in printed
    assert "| Pruner, default recipe |" in printed
    results = json.loads(file.read_text())
    pruned = [run for run in results["runs"] if run["method"] != "dense"]
    assert {run["method"] for run in pruned} == ({*methods.TUNING, *methods.SCRATCH} - {*peers.PEERS})
    for run in pruned:
        assert run["measured"] == pytest.approx(0.9, abs=1e-5), run
        assert 0 <= run["score"] <= 100


def test_overhead(without_peers, capsys):
    main(["overhead", "--smoke"])
    printed = capsys.readouterr().out
    assert "Pruner between updates" in printed
    assert "Pruner, in one file with model and optimizer: +" in printed
    assert "fasterai" not in printed.split("a checkpoint grows:")[1]


def test_the_text_is_read_in_windows_that_do_not_overlap_the_training():
    task = tasks.task("GPT")
    assert len(task.train) + len(task.test) == len(language_reference()) > 300_000
    model = networks.GPT(len(set(language_reference())), task.length, width=8, layers=1, heads=2)
    recipe = task.recipe(1, seed=0)
    batches = next(recipe.epochs_of_batches())
    assert len(batches) == recipe.total_steps
    x, y = batches[0]
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert model(x[:1]).shape == (1, task.length, len(set(language_reference())))
    scores = task.scores(model)
    assert len(scores) == (len(task.test) - 1) // task.length
    nothing_known = math.log2(len(set(language_reference())))
    assert statistics.fmean(scores) == pytest.approx(nothing_known, rel=0.05)


def test_a_seed_fixes_the_batches():
    recipe = tasks.task("MLP").recipe(2, seed=3)
    once, again = ([batch for epoch in recipe.epochs_of_batches() for batch in epoch] for _ in range(2))
    for (x, y), (x_again, y_again) in zip(once, again, strict=True):
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)
    assert not torch.equal(once[0][0], once[recipe.steps_per_epoch][0])


def test_lightning_trains_the_same_batches_at_the_same_rates():
    plain, theirs = (tasks.initial("MLP", 0) for _ in range(2))
    tasks.task("MLP").recipe(2, seed=0).fit(plain)
    with peers.quietly():
        peers.lightning_fit(theirs, tasks.task("MLP").recipe(2, seed=0), [])
    for a, b in zip(plain.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_lightning_removes_what_the_ramp_says():
    model = peers.PEERS["Lightning ModelPruning"](tasks.initial("MLP", 0), 0.9, tasks.task("MLP").recipe(3, seed=0))
    assert accuracy.zeros(model) == pytest.approx(0.9, abs=1e-5)


def test_batch_normalization_is_measured_before_and_after(capsys):
    main(["batchnorm", "--smoke"])
    assert "| 90% |" in capsys.readouterr().out
