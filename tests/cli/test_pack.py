"""``secateur pack``: what skips zeros is put where it is faster, said, and saved."""

import re

import pytest
import torch
from torch import nn

from secateur.inference import GroupedLinear, load_packed, packing
from support.commands import fails, run

MODULE = """
import torch
from torch import nn


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x, times=1.0):
        return times * self.second(self.first(x).relu())


def build():
    torch.manual_seed(0)
    model = Two()
    model.first.weight.data[:, torch.arange(64) % 4 > 0] = 0
    return model


def dense():
    torch.manual_seed(0)
    return Two()


def inputs():
    return torch.randn(4, 64), torch.tensor(2.0)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A module in the current directory; and on this processor what skips zeros is faster, whatever it is."""
    import sys

    name = f"packed_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("secateur.cli.measuring.ROUNDS", 1)
    monkeypatch.setattr("secateur.cli.measuring.SECONDS_A_TURN", 0.0)
    monkeypatch.setattr(packing, "_timed", lambda calls, x: [1.0 if isinstance(c, nn.Module) else 2.0 for c in calls])
    yield name
    sys.modules.pop(name, None)


def packed(here, *more, factory="build", example="inputs"):
    return run("pack", f"{here}:{factory}", "--example", f"{here}:{example}", *more)


def test_what_is_packed_is_said_and_saved(here, tmp_path):
    threads = torch.get_num_threads()
    result = packed(here, "--out", "packed.safetensors", "--threads", "1")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    heads = ["Layer", "Shape", "Zeros", "ms dense", "packed", "times faster", "Now"]
    assert re.split(" {2,}", lines[0]) == heads
    assert re.fullmatch(r"first +64x64 +75.0% +2 +1 +2.00  GroupedLinear", lines[1])
    assert re.split(" {2,}", lines[2]) == ["second", "8x64", "0%", "dense, no zeros"]
    assert lines[4].startswith("1 of 2 layers packed; their ")
    assert re.fullmatch(r"The model takes [\d.]+ ms, and took [\d.]+; round by round [\d.]+ times as fast\.", lines[5])
    assert "1 thread; kernels: " in lines[6]
    assert "Wrote packed.safetensors; " in lines[-1]
    assert torch.get_num_threads() == threads
    module = __import__(here)
    model, whole = module.dense(), module.build()
    load_packed(model, tmp_path / "packed.safetensors")
    assert isinstance(model.first, GroupedLinear)
    x, times = module.inputs()
    torch.testing.assert_close(model(x, times), whole(x, times))


def test_weights_are_loaded_first(here, tmp_path):
    from safetensors.torch import save_file

    module = __import__(here)
    save_file(module.build().state_dict(), tmp_path / "sparse.safetensors")
    result = packed(here, "--weights", "sparse.safetensors", factory="dense")
    assert result.exit_code == 0, result.output
    assert "1 of 2 layers packed" in result.stdout
    (tmp_path / "folder").mkdir()
    fails(run("pack", "folder", "--weights", "sparse.safetensors"), "folder is a directory, with weights of its own")


def test_where_nothing_pays_nothing_is_written(here, tmp_path):
    result = packed(here, factory="dense")
    assert result.exit_code == 0, result.output
    assert "0 of 2 layers packed" in result.stdout
    assert "times as fast" not in result.stdout
    result = packed(here, "--out", "packed.safetensors", factory="dense")
    assert result.exit_code == 2
    assert "0 of 2 layers packed" in result.stdout  # what was found is said all the same
    assert result.stderr.startswith("secateur: no layer was packed, and nothing was written")
    assert not (tmp_path / "packed.safetensors").exists()


def test_options_are_the_library_s(here):
    assert "1 of 1 layers packed" in packed(here, "--include", "first").stdout
    assert "0 of 1 layers packed" in packed(here, "--exclude", "first").stdout
    assert "0 of 2 layers packed" in packed(here, "--at-least", "3").stdout
    assert "1 of 2 layers packed" in packed(here, "--values", "int8", "--inputs", "int8").stdout
    fails(packed(here, "--values", "int4"), "values is 'int8' or None, not 'int4'")
    fails(packed(here, "--include", "third"), "no layer matches 'third'; the closest names are first, second")
    fails(packed(here, "--at-least", "0"), "at_least says how many times faster")


def test_what_cannot_be_written_is_told_before(here, tmp_path):
    (tmp_path / "old.safetensors").write_text("old")
    fails(packed(here, "--out", "old.safetensors"), "old.safetensors already exists; remove it, or name another file")
    fails(packed(here, "--out", "none/new.safetensors"), "there is no folder none; create it first")
    assert (tmp_path / "old.safetensors").read_text() == "old"


def test_a_directory_needs_none(here, tmp_path):
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(**sizes, vocab_size=50, max_position_embeddings=16))
    nn.init.zeros_(model.encoder.layer[0].intermediate.dense.weight[:, :30])
    model.save_pretrained(tmp_path / "bert")
    result = run("pack", "bert", "--tokens", "8")
    assert result.exit_code == 0, result.output
    assert "1 × 8 tokens; " in result.stdout
    assert "encoder.layer.0.intermediate.dense" in result.stdout
