"""The demo's tables say what its results hold, and it runs from end to end."""

import pytest

from benchmarks.demo import run as demo_run
from secateur.demo import measuring
from secateur.report import Check, Results, Run, load_results, save_results

RUNS = [
    *(Run("dense", 0.0, 99.0, 99.0 + seed, seed) for seed in (0, 1)),
    *(Run("LAMP", sparsity, 90.0 - 40 * sparsity, 98.0 + seed, seed) for sparsity in (0.5, 0.9) for seed in (0, 1)),
    *(Run("random", sparsity, 20.0, 80.0, seed) for sparsity in (0.5, 0.9) for seed in (0, 1)),
    Run("2:4", 0.498, 95.0, 98.5),
    Run("gradual", 0.9, None, 97.0),
]


def test_a_row_a_method_and_a_column_a_sparsity():
    title, blank, *table = demo_run.lines(Results("Digits", RUNS))
    assert title == "Digits. Dense: 99.5 ± 0.7 (99.0)."
    assert blank == ""
    assert table == [
        "| method | 50 % | 90 % |\n| --- | --- | --- |",
        "| LAMP | 98.5 ± 0.7 (70.0) | 98.5 ± 0.7 (54.0) |",
        "| random | 80.0 ± 0.0 (20.0) | 80.0 ± 0.0 (20.0) |",
        "| 2:4 | 98.5 (95.0) |  |",
        "| gradual |  | 97.0 |",
    ]


def test_a_sparsity_of_its_own_is_said():
    runs = [*RUNS[:-2], Run("2:4", 0.47, 95.0, 98.5)]
    assert "| 2:4 (47.0 %) | 98.5 (95.0) |  |" in [*demo_run.lines(Results("Digits", runs))]


def test_checks_and_costs_follow():
    checks = [
        Check("as it is", "x", [Run("a", 0.95, None, 96.5)]),
        Check("shuffled", "y", [Run("b", 0.95, None, 93.0)]),
    ]
    shrunken = [
        Run("dense", 0.0, 99.0, 99.0, bytes=158_000, latency_ms=1.5),
        Run("channels", 0.5, 9.0, 98.0, bytes=79_000),
    ]
    text = [*demo_run.lines(Results("Digits", RUNS, checks=checks, shrunken=shrunken))]
    assert "Sanity checks at 95.0 %: as it is 96.5; shuffled 93.0" in text
    assert "| dense | 99.0 (99.0) | 0 % | 158 |  | 1.5 |  |" in text
    assert "| channels | 98.0 (9.0) | 50 % | 79 |  |  |  |" in text


def test_earlier_results_are_read_and_drawn(tmp_path, capsys):
    path = tmp_path / "results.json"
    save_results(Results("Digits", RUNS), path)
    demo_run.main(["table", "--results", str(path), "--json", str(tmp_path / "again.json")])
    assert "| LAMP | 98.5 ± 0.7 (70.0) |" in capsys.readouterr().out
    assert load_results(tmp_path / "again.json") == load_results(path)
    demo_run.main(["plot", "--results", str(path), "--out", str(tmp_path / "plot.svg")])
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    with pytest.raises(SystemExit):
        demo_run.main(["plot"])
    assert "give --results FILE" in capsys.readouterr().err


def test_it_runs_from_end_to_end(capsys, monkeypatch):
    monkeypatch.setattr(measuring, "ROUNDS", 5)  # of timing, which otherwise takes most of the time
    demo_run.main(["table", "--smoke", "--methods", "magnitude,random"])
    printed = capsys.readouterr().out
    assert "| method | 90 % |" in printed
    assert "| global magnitude |" in printed
    assert "| random |" in printed
    assert "| network | accuracy |" in printed
