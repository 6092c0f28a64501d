"""``secateur inspect``: a line a tensor, whatever its name holds."""

import json
import re
import subprocess
import sys

import torch
from rich.console import Console
from safetensors.torch import save_file

from secateur.cli import terminal
from support.commands import run


def test_inspect_is_one_line_a_tensor_where_it_is_verbose(model):
    result = run("inspect", model, "--verbose")
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["Tensor", "Shape", "Dtype", "Size", "Zeros", "Patterns"]
    assert lines[1].split() == ["model.embed_tokens.weight", "32x16", "F32", "2.05", "kB", "0%"]
    assert lines[4].split()[0] == "model.layers.2.mlp.up_proj.weight"
    assert lines[12].split()[0] == "model.layers.10.mlp.up_proj.weight"
    assert re.search(r"^all +13 +3,344 +7\.74 kB +0%$", result.stdout, re.MULTILINE)
    assert all(line == line.rstrip() for line in lines)


def test_inspect_groups_layers(model):
    result = run("inspect", model)
    assert re.search(r"model\.layers\.\*\.mlp\.up_proj\.weight \(x11\) +16x16 +F16 +5\.63 kB +0%", result.stdout)


def test_inspect_json(model, tmp_path):
    run("prune", model, "--out", tmp_path / "out", "--pattern", "2:4")
    result = run("inspect", "--json", tmp_path / "out")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert [(total["dtype"], total["tensors"]) for total in found["total"]] == [("F16", 11), ("F32", 2), ("all", 13)]
    assert found["files"] == ["model.safetensors"]
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert by_name["model.layers.3.mlp.up_proj.weight"] == {
        "name": "model.layers.3.mlp.up_proj.weight", "file": "model.safetensors", "dtype": "F16", "shape": [16, 16],
        "parameters": 256, "bytes": 512, "sparsity": 0.5, "pattern": "2:4",
    }  # fmt: skip


def test_inspect_shows_names_and_not_what_they_do(tmp_path):
    save_file({"evil\x1b[2J\n[bold]x": torch.zeros(2, 2)}, tmp_path / "x.safetensors")
    result = run("inspect", tmp_path / "x.safetensors")
    assert "\x1b" not in result.stdout
    assert r"evil\x1b[2J\n[bold]x" in result.stdout
    assert "all zero" in result.stdout


def test_inspect_folds_long_names_on_a_terminal(tmp_path, monkeypatch):
    name = ".".join(["layer"] * 30)
    save_file({name: torch.ones(2)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(
        terminal, "console", lambda: Console(width=80, force_terminal=True, color_system=None, markup=False)
    )
    result = run("inspect", tmp_path / "x.safetensors")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.count("layer") == 30
    assert result.stdout.splitlines()[2].startswith("  layer.")


def test_the_reader_of_a_pipe_may_leave(model):
    command = f"'{sys.executable}' -m secateur inspect '{model}' | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Tensor")
    assert done.stderr == ""
