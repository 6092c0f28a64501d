"""What commands are run on: a small checkpoint directory, and a module of the user's with a model."""

import shutil
import sys

import pytest
import torch
from safetensors.torch import save_file

from secateur.report import measured as timed
from support.families import make
from support.shrunk import ZOO
from support.tokenizers_of_words import WORDS, write_tokenizer


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """As few rounds of timing for a page as there may be."""
    monkeypatch.setattr(timed, "SECONDS", 0.0)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "dense"
    folder.mkdir()
    torch.manual_seed(0)
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": torch.randn(16, 16).half() for n in range(11)}
    tensors["model.embed_tokens.weight"] = torch.randn(32, 16)
    tensors["model.norm.weight"] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """The name of a module in the current directory, a new one for each test."""
    name = f"zoo_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    make("llama").save_pretrained(folder / "dense")
    write_tokenizer(folder / "dense")
    (folder / "text.txt").write_text(" ".join(WORDS[(7 * n + n // 5) % len(WORDS)] for n in range(600)))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A small Llama with a tokenizer, and a text."""
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)
