"""What commands print: names from files are shown as they are, and do nothing to the terminal."""

import pytest
import torch
from safetensors.torch import save_file

from secateur.shrinking import result as tables
from support.commands import run

NAME = "layers.0.[bold]\x1b[2J:smile:.weight"
SHOWN = r"layers.0.[bold]\x1b[2J:smile:.weight"


@pytest.fixture
def hostile(tmp_path):
    folder = tmp_path / "[red]dense"
    folder.mkdir()
    save_file({NAME: torch.randn(16, 16), "norm.weight": torch.ones(4)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_names_are_shown_and_do_nothing(hostile, tmp_path):
    out = tmp_path / "[bold]sparse"
    for words in (
        ("inspect", hostile),
        ("prune", hostile, "--out", out, "-s", "0.5", "--include", "*"),
        ("verify", out, "--source", hostile),
        ("compress", out, "--out", tmp_path / "[b]small"),
    ):
        result = run(*words)
        assert result.exit_code == 0, result.output
        assert all(line.isprintable() for line in result.stdout.splitlines()), words
        assert str(words[3] if "--out" in words else words[1]) in result.stdout, words
    assert SHOWN in run("inspect", hostile).stdout


def test_names_of_the_same_parts_share_one():
    assert tables._merged(["a.0.b.1", "a.1.b.1", "a.2.b.1"]) == "a.*.b.1"
    assert tables._merged(["a.0"]) == "a.0"
