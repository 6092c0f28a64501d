"""``secateur prune``: what it says, what it passes on, one line for what is wrong."""

import json
import re

import pytest
from safetensors.torch import load_file

from support.commands import fails, run


def test_prune_says_what_it_did(model, tmp_path):
    (model / "pytorch_model.bin").write_bytes(b"dense")
    result = run("prune", model, "--out", tmp_path / "out", "--sparsity", "0.75", "--allocate", "uniform")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert re.search(r"^pruned +11 +2,816 +75\.0%$", result.stdout, re.MULTILINE)
    assert re.search(r"^whole model +13 +3,344 +63\.2%$", result.stdout, re.MULTILINE)
    assert re.search(r"^embeddings +1 +512 +model\.embed_tokens\.weight$", result.stdout, re.MULTILINE)
    assert re.search(r"^vectors and scalars +1 +16 +model\.norm\.weight$", result.stdout, re.MULTILINE)
    assert "not pruned: pytorch_model.bin" in result.stdout
    assert "make the files no smaller" in result.stdout
    record = json.loads((tmp_path / "out/secateur.json").read_text())
    assert record["arguments"]["sparsity"] == 0.75
    assert record["arguments"]["command"].startswith(f"secateur prune {model} --out")
    assert (tmp_path / "out/model.safetensors").stat().st_size == (model / "model.safetensors").stat().st_size


def test_prune_passes_every_option_on(model, tmp_path):
    result = run(
        *("prune", model, "--out", tmp_path / "out", "-s", "0.5", "-p", "4x4", "--allocate", "erk", "--criterion"),
        *("random", "--seed", "3", "--include", "*.1.*", "--include", "*.2.*", "--exclude", "*.2.mlp*"),
    )
    assert result.exit_code == 0, result.output
    # a half or none: torch up to 2.11 draws zeros, too, in half precision
    zeros = {name: int((tensor == 0).sum()) for name, tensor in load_file(tmp_path / "out/model.safetensors").items()}
    assert {name for name, count in zeros.items() if count > 9} == {"model.layers.1.mlp.up_proj.weight"}
    assert zeros["model.layers.1.mlp.up_proj.weight"] in range(128, 138)
    arguments = json.loads((tmp_path / "out/secateur.json").read_text())["arguments"]
    assert (arguments["criterion"], arguments["seed"], arguments["include"]) == ("random", 3, ["*.1.*", "*.2.*"])
    assert run("prune", model, "--out", tmp_path / "b", "-s", "0.5", "--criterion", "lamp").exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sparsity", "nan"], "got nan"),
        (["--sparsity", "90"], r"For 90 percent write 0\.9"),
        (["--sparsity", "1"], "every weight"),
        (["--sparsity", "-0.5"], "got -0.5"),
        ([], "needs a sparsity"),
        (["--pattern", "2:4", "--sparsity", "0.7"], r"2:4 removes 0\.5"),
        (["--pattern", "2:4", "--allocate", "erk"], "leave --allocate out"),
        (["--pattern", "stripes", "-s", "0.5"], "no pattern is called 'stripes'"),
        (["--pattern", "3:2"], "n:m keeps n of every m"),
        (
            ["-s", "0.5", "--include", "*.up_prj.weight"],
            r"the closest names are model\.layers\.\d+\.mlp\.up_proj\.weight",
        ),
        (["-s", "0.5", "--exclude", "*"], "nothing to prune"),
    ],
)
def test_wrong_usage_is_one_line(model, tmp_path, options, message):
    fails(run("prune", model, "--out", tmp_path / "out", *options), message)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_wrong_files_are_one_line(model, tmp_path):
    fails(run("inspect", tmp_path / "gone"), "no such file")
    (tmp_path / "x.safetensors").write_bytes(b"PK\x03\x04 not a tensor file")
    fails(run("inspect", tmp_path / "x.safetensors"), "not a safetensors file")
    fails(run("prune", model, "--out", model, "-s", "0.5"), "replace the input")
    fails(run("prune", tmp_path / "gone", "--out", tmp_path / "out", "-s", "0.5"), "no such directory")
    with open(model / "model.safetensors", "r+b") as file:
        file.truncate(3000)
    fails(run("inspect", model), "truncated")
    fails(run("prune", model, "--out", tmp_path / "out", "-s", "0.5"), "truncated")
    assert not (tmp_path / "out").exists()
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("gone")
    fails(run("inspect", model), "No such file or directory")
