"""``secateur cost``: from a model to files that another machine times, and back by ``fit --runtime``; or one line."""

import csv
import json
import math
import subprocess
import sys

import pytest

from support.commands import fails, run
from support.stacks import contents


def proportional(path):
    """What this machine took, which other jobs disturb, becomes the number of what the shapes hold."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["milliseconds"]) >= 0 for row in rows)
    for row in rows:
        shapes = [map(int, shape.split("x")) for shape in row["shapes"].split() if shape != "scalar"]
        row["milliseconds"] = sum(map(math.prod, shapes))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.long
def test_probes_of_a_directory_come_back_as_the_price_of_a_fit(folder):
    before = contents(folder / "dense")
    ended = run("cost", folder / "dense", "--tokens", 16, "--emit", folder / "probes", "--report", folder / "page.html")
    assert ended.exit_code == 0, ended.output
    assert "probes for ONNX Runtime" in ended.stdout
    assert "linear" in (folder / "page.html").read_text()
    script = [sys.executable, folder / "probes" / "time_probes.py", "--rounds", "1", "--at-least", "0"]
    subprocess.run(script, check=True, capture_output=True)
    proportional(folder / "probes" / "board.csv")
    asked = (
        "fit", folder / "dense", "--data", folder / "text.txt", "--out", folder / "out", "--samples", 4, "--finals", 1,
        "--share", 0.5, "--budget", "latency=0.95", "--runtime", folder / "probes" / "board.csv",
    )  # fmt: skip
    fails(run(*asked, "--sequence-length", 8), "has no time of .*nor of shapes on both sides of it")
    assert not (folder / "out").exists()
    ended = run(*asked, "--sequence-length", 16)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.startswith("Asked: latency 95.0%, by the table board.csv (")
    assert contents(folder / "dense") == before


@pytest.mark.long
def test_json_has_the_counts(folder):
    found = json.loads(run("cost", folder / "dense", "--tokens", 4, "--emit", folder / "probes", "--json").stdout)
    assert {each["operation"] for each in found["probes"]} >= {"linear"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--runtime", "torch"), 'probes are for "onnxruntime", whose files'),
        (("--runtime", "tensorrt"), "no runtime is called 'tensorrt'"),
        (("--tokens", 100000), "is more than the"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(folder, words, message):
    fails(run("cost", folder / "dense", "--emit", folder / "probes", *words), message)
    assert sorted(path.name for path in folder.iterdir()) == ["dense", "text.txt"]


def test_something_in_the_way(folder):
    (folder / "probes").mkdir()
    fails(run("cost", folder / "dense", "--emit", folder / "probes"), "probes")
    assert not [*(folder / "probes").iterdir()]
