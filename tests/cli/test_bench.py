"""``secateur bench`` prints a row for each pattern and sparsity, and changes nothing of the user's."""

import re
import sys
import textwrap

import pytest
import torch
from typer.testing import CliRunner

from secateur.cli.commands import app


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
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("secateur.cli.measuring.ROUNDS", 1)
    monkeypatch.setattr("secateur.cli.measuring.SECONDS_A_TURN", 0.0)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "my_bench_model:build", "--example", "my_bench_model:inputs", *arguments])


def test_a_row_for_each(here):
    threads = torch.get_num_threads()
    result = run("-s", "0.5", "-s", "0.9", "-p", "columns:16", "-p", "rows", "--threads", "1", "--verbose")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["pattern", "sparsity", "ms", "times", "faster", "size", "packed"]
    assert [line.split()[0] for line in lines[1:6]] == ["dense", "columns:16", "columns:16", "rows", "rows"]
    assert all(word in lines[2] for word in ("50%", "of 2 layers"))
    assert lines[6].startswith("shrink, half the work  ")
    assert lines[7].startswith("int8  ")
    assert lines[8].startswith("shrink, half the work, int8  ")
    sizes = [float(re.search(r"([\d.]+) kB", lines[row])[1]) for row in (1, 6, 7)]
    assert sizes[1] < 0.7 * sizes[0]  # shrunken
    assert sizes[2] < 0.6 * sizes[0]  # int8
    assert "1 thread; kernels: " in result.stdout
    assert "Zeros alone do nothing" in result.stdout
    assert result.stdout.count("ms dense") == 4
    assert torch.get_num_threads() == threads


def test_a_model_with_zeros_has_a_row_as_it_is(here):
    text = (here / "my_bench_model.py").read_text()
    (here / "my_sparse_model.py").write_text(
        f"{text}\nwhole = build()\ndef build():\n    whole[0].weight.data[:, ::2] = 0\n    return whole\n"
    )
    result = CliRunner().invoke(
        app, ["bench", "my_sparse_model:build", "--example", "my_sparse_model:inputs", "-s", "0.5", "-p", "rows"]
    )
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[1:4]] == ["dense", "as", "rows"]


def test_a_directory_needs_no_example(here):
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(**sizes, vocab_size=50, max_position_embeddings=16)).save_pretrained(here / "bert")
    arguments = ["bert", "-s", "0.9", "-p", "columns:16", "--threads", "1"]
    result = CliRunner().invoke(app, ["bench", *arguments, "--batch", "3", "--tokens", "8"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    names = ["dense", "columns:16", "shrink, half the work", "int8", "shrink, half the work, int8"]
    assert [re.split(" {2,}", line)[0] for line in lines[1:6]] == names
    assert "3 × 8 tokens; 1 thread; " in result.stdout
    result = CliRunner().invoke(app, ["bench", *arguments, "--tokens", "64"])
    assert result.exit_code == 2
    assert "--tokens 64 is more than the 16 positions of bert" in result.stderr


def test_what_cannot_be_made_is_said(here):
    (here / "my_odd_model.py").write_text(
        "import torch\nfrom torch import nn\ninputs = torch.ones(1, 4, 3)\n"
        "def build():\n    return nn.Sequential(nn.Conv1d(4, 4, 1))\n"
    )
    result = CliRunner().invoke(
        app, ["bench", "my_odd_model:build", "--example", "my_odd_model:inputs", "-s", "0.5", "-p", "rows"]
    )
    assert result.exit_code == 0, result.output
    assert "No int8: torch has it for linear layers, and there is none." in result.stdout
    assert "No shrink, half the work: " in result.stdout


def test_a_tuple_is_what_the_model_is_called_with(here):
    """As in every command: all of it are arguments, none is a target."""
    (here / "my_pair_model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Pair(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(64, 8)\n"
        "    def forward(self, x, times):\n        return times * self.layer(x)\n"
        "inputs = torch.ones(4, 64), torch.tensor(2.0)\n"
    )
    given = ["my_pair_model:Pair", "--example", "my_pair_model:inputs", "-s", "0.5", "-p", "rows"]
    result = CliRunner().invoke(app, ["bench", *given])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[1:3]] == ["dense", "rows"]


def test_a_factory_needs_an_example(here):
    result = CliRunner().invoke(app, ["bench", "my_bench_model:build"])
    assert result.exit_code == 2
    assert "my_bench_model:build is no directory, so --example has to say" in " ".join(result.stderr.split())


def test_sparsities_are_fractions(here):
    result = run("-s", "90")
    assert result.exit_code == 2
    assert "--sparsity is a fraction in [0, 1), not 90" in result.stderr


def test_patterns_with_a_sparsity_of_their_own_are_refused(here):
    result = run("-p", "2:4")
    assert result.exit_code == 2
    assert "2:4 has a sparsity of its own" in result.stderr
