"""The drop-in's surface and its document (docs/guides/drop-in.md); what it does with torch's own pruning."""

from __future__ import annotations

import inspect
import pathlib
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from secateur import prune
from support.pruned import PUBLIC, linear, zeros

OURS = ["custom_from_masks", "pruned_names", "remove_all", "revive"]
HELPERS = [
    "_validate_pruning_amount_init", "_validate_pruning_amount", "_validate_structured_pruning",
    "_validate_pruning_dim", "_compute_nparams_toprune", "_compute_norm",
]  # fmt: skip


def shape_of(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", PUBLIC + HELPERS)
def test_names_and_signatures_are_those_of_torch(name):
    theirs, ours = getattr(torch_prune, name), getattr(prune, name)
    assert shape_of(theirs) == shape_of(ours)
    if not inspect.isclass(theirs):
        return
    assert getattr(theirs, "PRUNING_TYPE", None) == getattr(ours, "PRUNING_TYPE", None)
    public = {
        key for key, value in vars(theirs).items() if callable(getattr(theirs, key)) and not key.startswith("_abc")
    }
    for method in public | {"apply", "__call__", "compute_mask", "apply_mask", "prune", "remove", "__init__"}:
        assert shape_of(getattr(theirs, method)) == shape_of(getattr(ours, method)), method


def test_what_pickles_name_is_named_by_the_package():
    for name in ("revive", *PUBLIC[:8]):
        assert getattr(prune, name).__module__ == "secateur.prune"


def test_all_lists_the_public_names():
    assert sorted([*PUBLIC, *OURS]) == prune.__all__


# Working on what torch made, and torch on what we made.


def test_a_module_pruned_by_torch_can_be_worked_on():
    layer = linear()
    weight = layer.weight
    torch_prune.l1_unstructured(layer, "weight", 6)
    layer(torch.randn(2, 6)).sum().backward()
    layer = pickle.loads(pickle.dumps(layer)) if layer.weight.is_leaf else layer
    assert prune.is_pruned(layer)
    prune.l1_unstructured(layer, "weight", 6)
    (container,) = layer._forward_pre_hooks.values()
    assert [type(method) for method in container] == [torch_prune.L1Unstructured, prune.L1Unstructured]
    assert zeros(layer.weight_mask) == 12
    prune.remove(layer, "weight")
    assert layer.weight is weight
    assert type(layer) is nn.Linear


def test_a_model_unpickled_with_torchs_hooks_can_be_worked_on():
    with torch.no_grad():
        made = torch_prune.l1_unstructured(torch_prune.random_unstructured(linear(), "weight", 4), "weight", 4)
    layer = pickle.loads(pickle.dumps(made))
    prune.ln_structured(layer, "weight", 1, 2, 0)
    assert len(next(iter(layer._forward_pre_hooks.values()))) == 3
    assert not prune.remove(layer, "weight").weight.grad_fn
    layer = pickle.loads(pickle.dumps(made))
    assert zeros(prune.remove(layer, "weight").weight) == 8
    assert not prune.is_pruned(layer)


def test_torch_can_prune_and_remove_what_we_pruned():
    for rounds in (0, 1, 2):
        layer = linear()
        weight = layer.weight
        prune.l1_unstructured(layer, "weight", 6)
        for _ in range(rounds):
            torch_prune.l1_unstructured(layer, "weight", 6)
        assert zeros(layer.weight_mask) == zeros(layer.weight) == 6 + 6 * rounds
        layer(torch.randn(2, 6)).sum().backward()
        assert torch_prune.is_pruned(layer)
        torch_prune.remove(layer, "weight")
        assert layer.weight is weight
        assert zeros(weight) == 6 + 6 * rounds
        assert type(layer) is nn.Linear


def test_the_code_in_the_document_runs():
    document = (pathlib.Path(__file__).parents[2] / "docs" / "guides" / "drop-in.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(block, namespace)


def test_every_row_of_the_document_names_tests_that_exist():
    folder = pathlib.Path(__file__).parent
    document = (folder.parents[1] / "docs" / "guides" / "drop-in.md").read_text(encoding="utf-8")
    tests = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("test_*.py")))
    rows = re.findall(r"^\| (\d+) \|.*\| `(test_\w+)\*` \|$", document, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 25))
    for _, prefix in rows:
        assert f"def {prefix}" in tests, prefix
