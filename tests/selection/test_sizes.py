"""The sizes of pieces: what a test sets is what every reader sees, and no result depends on it."""

import ast
from pathlib import Path

import pytest
import torch

from secateur import selection
from secateur.selection import keep_largest, keep_largest_overall, sizes


def test_nobody_takes_a_size_by_value():
    """``from sizes import PIECE`` would keep the old value where a test sets another."""
    for path in sorted(Path(selection.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "secateur.selection.sizes", path.name
            if isinstance(node, ast.Name) and path.name != "sizes.py":
                assert node.id not in sizes.__all__, path.name


# DEVICE_SEGMENT is read on accelerators only: test_sources.py asks for it on the meta device
@pytest.mark.parametrize("name", sorted({*sizes.__all__} - {"DEVICE_SEGMENT"}))
def test_no_result_depends_on_a_size(name, monkeypatch):
    tensors = {"a": torch.randn(3000), "b": torch.randint(0, 5, (50, 40)).float()}
    table = torch.randn(300, 8)
    expected = keep_largest_overall(tensors, 1700), keep_largest(table, 3)
    small = {"AT_ONCE": 0, "SAMPLE": 64}  # without these a model so small is ranked in one piece, and reads no other
    small[name] = {"ROUNDS": 1, "STANDARD_DEVIATIONS": 0.01, "AT_ONCE": 0}.get(name, 128)
    for each, size in small.items():
        monkeypatch.setattr(sizes, each, size)
    found = keep_largest_overall(tensors, 1700), keep_largest(table, 3)
    assert all(torch.equal(found[0][name], mask) for name, mask in expected[0].items())
    assert torch.equal(found[1], expected[1])
