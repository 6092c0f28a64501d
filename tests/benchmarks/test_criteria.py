"""The benchmark of criteria runs from end to end, and every criterion is in its tables."""

import json

from benchmarks.criteria import run as benchmark
from secateur import criteria


def test_every_criterion_is_in_a_table(tmp_path, capsys):
    file = tmp_path / "results.json"
    benchmark.main(["--network", "MLP", "--smoke", "--json", str(file)])
    found = json.loads(file.read_text())["MLP"]
    named = {*found["at once"], *found["Pruner"], *found["before training"]}
    assert named == {name for name in criteria.__all__ if hasattr(getattr(criteria, name), "compares")}
    assert all(
        0 <= score <= 100 for rows in found.values() for cells in rows.values() for cell in cells for score in cell
    )
    assert "| wanda | **" in capsys.readouterr().out
