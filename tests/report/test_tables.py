"""The tables: what is compared with the dense network, and what fits a terminal."""

import dataclasses
import re

import pytest

from secateur.report import Results, Run, print_summary, summarize
from secateur.report.results import columns_of
from support.reports import HOSTILE, make_results


def test_speed_up_is_against_the_dense_network() -> None:
    runs = [
        Run("dense", 0.0, 99, latency_ms=3.0, multiply_adds=12_000, zipped=800, overall=0.0),
        Run("a", 0.75, 90, latency_ms=1.5, multiply_adds=2_000, zipped=200, overall=0.6),
        Run("b", 0.75, 90),
    ]
    rows = summarize(runs)
    columns = {column.key: column for column in columns_of(Results("x", runs), rows)}
    assert [columns["multiply_adds"].show(row) for row in rows] == ["12", "2", "–"]
    assert columns["multiply_adds"].asides == {rows[0]: "1.0", rows[1]: "6.0"}
    assert columns["zipped"].asides == {rows[0]: "1.0", rows[1]: "4.0"}
    assert columns["overall"].asides == {rows[0]: "1.0", rows[1]: "2.5"}  # 1 / (1 - 0.6)
    assert columns["latency_ms"].asides == {rows[0]: "1.0", rows[1]: "2.0"}
    alone = summarize(runs[1:])
    assert not any(column.asides for column in columns_of(Results("x", runs), alone))


def test_the_terminal_table_fits_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [dataclasses.replace(run, method=run.method[:16]) for run in make_results().runs]
    shrunken = [dataclasses.replace(run, method=run.method[:16]) for run in make_results().shrunken]
    print_summary(make_results(runs=runs, shrunken=shrunken, title="Pruning"))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "99.4 ± 0.0" in out
    assert "Sanity checks, 90.0 % removed" in out
    assert "LAMP as it is" in out
    assert re.search(r"^channels +52\.0 +98\.7 +79\.0 +440 +1\.00 +5\.00$", out, re.MULTILINE)
    assert HOSTILE[:16] in out  # rich markup would be swallowed
