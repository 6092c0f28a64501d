"""What a type checker and an editor know of the verbs before they run; `make types` has mypy read this file, too."""

import ast
import inspect
from pathlib import Path
from typing import assert_type

import pytest
import torch
from torch import nn

import secateur
from secateur.checkpoints import CheckpointSparsification
from secateur.pipeline import Masks
from secateur.shrinking import CheckpointShrinking, ShrunkDepth, ShrunkExperts
from secateur.shrinking.module import Shrunk


def test_what_a_verb_returns_of_a_module_and_of_a_directory(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert isinstance(assert_type(secateur.sparsify(model, 0.5), Masks), Masks)
    assert isinstance(assert_type(secateur.shrink(model, torch.zeros(1, 4), 0.5), Shrunk), Shrunk)
    with pytest.raises(secateur.checkpoints.CheckpointError):
        assert_type(secateur.sparsify(tmp_path, 0.5, out=tmp_path / "sparse"), CheckpointSparsification)
    with pytest.raises(secateur.checkpoints.CheckpointError):
        assert_type(
            secateur.shrink(str(tmp_path), sparsity=0.5, out=tmp_path / "small"),
            CheckpointShrinking | ShrunkExperts | ShrunkDepth,
        )


def test_names_that_a_verb_does_not_have_are_found_before_it_runs() -> None:
    with pytest.raises(TypeError, match="sparsit"):
        secateur.shrink("model", sparsit=0.5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="batchs"):
        secateur.sparsify("model", 0.5, batchs=[])  # type: ignore[call-overload]


@pytest.mark.parametrize("name", [name for name in dir(secateur) if inspect.isfunction(getattr(secateur, name))])
def test_an_editor_shows_every_argument(name: str) -> None:
    """As `inspect` sees it, and as the source says it, where `help` and what reads no types look."""
    verb = getattr(secateur, name)
    for each in inspect.signature(verb).parameters.values():
        assert each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        assert each.annotation is not each.empty
    tree = ast.parse(Path(inspect.getsourcefile(inspect.unwrap(verb)) or "").read_text(encoding="utf-8"))
    said = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
    assert said
    assert not any(each.args.vararg or each.args.kwarg for each in said)
