"""``secateur verify``: exit code 0, 1 or 2, and what does not hold is named."""

import json

import pytest
from safetensors.torch import load_file, save_file

from support.commands import fails, run


@pytest.fixture
def pruned(model, tmp_path):
    assert run("prune", model, "--out", tmp_path / "sparse", "-s", "0.5").exit_code == 0
    return tmp_path / "sparse"


def test_what_does_not_hold_is_named(pruned):
    tensors = load_file(pruned / "model.safetensors")
    name = next(name for name in tensors if "mlp" in name)
    tensors[name].fill_(1.0)
    save_file(tensors, pruned / "model.safetensors", metadata={"format": "pt"})
    result = run("verify", pruned)
    assert result.exit_code == 1
    assert any(line.startswith("wrong: ") and name in line for line in result.stdout.splitlines())
    assert "does not hold" in result.stdout
    record = json.loads(run("verify", pruned, "--json").stdout)
    assert record["problems"]


def test_where_nothing_is_claimed_there_is_nothing_to_check(model):
    fails(run("verify", model), r"secateur\.json")
