"""The demo's tables say what its results hold, and it runs from end to end."""

from benchmarks.demo import run as demo_run
from secateur.demo import trials as measuring
from secateur.report import Results, Run

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


def test_it_runs_from_end_to_end(capsys, monkeypatch):
    monkeypatch.setattr(measuring, "ROUNDS", 5)  # of timing, which otherwise takes most of the time
    demo_run.main(["table", "--smoke", "--methods", "magnitude,random"])
    printed = capsys.readouterr().out
    assert "| method | 90 % |" in printed
    assert "| global magnitude |" in printed
    assert "| random |" in printed
    assert "| network | accuracy |" in printed
