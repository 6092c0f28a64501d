"""``secateur bench`` prints a row for each pattern and sparsity, and changes nothing of the user's."""

import textwrap

import pytest
import torch
import typer
from typer.testing import CliRunner

from secateur.bench_command import bench

app = typer.Typer()
app.command()(bench)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "my_bench_model.py").write_text(
        textwrap.dedent(
            """
            import torch
            def build():
                torch.manual_seed(0)
                return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
            def inputs():
                return torch.randn(4, 64)
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("secateur.bench_command._ROUNDS", 1)
    monkeypatch.setattr("secateur.bench_command._SECONDS_A_ROUND", 0.0)


def run(*arguments):
    return CliRunner().invoke(app, ["my_bench_model:build", "--example", "my_bench_model:inputs", *arguments])


def test_a_row_for_each(here):
    threads = torch.get_num_threads()
    result = run("-s", "0.5", "-s", "0.9", "-p", "columns:16", "-p", "rows", "--threads", "1", "--layers")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["pattern", "sparsity", "ms", "times", "faster", "size", "packed"]
    assert [line.split()[0] for line in lines[1:7]] == ["dense", "as", "columns:16", "columns:16", "rows", "rows"]
    assert all(word in lines[3] for word in ("50%", "of 2 layers"))
    assert "1 thread; kernels: " in result.stdout
    assert "Zeros alone do nothing" in result.stdout
    assert result.stdout.count("ms dense") == 5
    assert torch.get_num_threads() == threads


def test_patterns_with_a_sparsity_of_their_own_are_refused(here):
    result = run("-p", "2:4")
    assert result.exit_code == 2
    assert "2:4 has a sparsity of its own" in result.stderr
