"""The law of floors: a module imports from lower floors only, and heavy packages where they are used."""

import ast
import sys
from pathlib import Path

import pytest

import secateur

FLOORS = """
windows
axes files kernels origins progress shards version words
activations batches blocks checkpoints criteria encodings layouts masked_weight owners patterns products \
schedules selection semi_structured sizes targets
allocation batchnorm block_files calibration compressed_files evidence factories inference inspection least_squares \
prune regrowth replay results resumable terminal tracing
axis_rules branches compressed_tensors_layout masks plots solvers
checkpoint_sparsification coupling mask_search report sparsification storage walk
dense_scores plans storage_commands verification
blockwise proof
configurations depth oneshot_command
choosing
shrinking
checkpoint_shrinking regularization
bench_command pruner shrink_command
demo
cli
__init__ __main__
"""
FLOOR = {module: number for number, floor in enumerate(FLOORS.split("\n")) for module in floor.split()}
EVERYWHERE = {"torch", "numpy"}
AT_THE_TOP = {
    "checkpoints": {"safetensors"},
    "cli": {"typer", "rich", "click"},
    "oneshot_command": {"typer", "rich"},
    "progress": {"rich"},
    "shrink_command": {"typer", "rich"},
    "bench_command": {"typer"},
    "storage_commands": {"typer", "rich"},
    "terminal": {"typer", "rich"},
}
SOURCES = sorted(Path(secateur.__file__).parent.glob("*.py"))


def imports(path, *, top_level):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            if node.module == "secateur":
                yield from (f"secateur.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_imports_go_down(path):
    here = FLOOR[path.stem]
    for name in imports(path, top_level=False):
        if name.split(".")[0] == "secateur":
            module = name.split(".")[1]
            assert FLOOR[module] < here or path.stem in {"__init__", "__main__"}, f"{path.stem} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_other_packages_are_imported_where_they_are_used(path):
    allowed = EVERYWHERE | AT_THE_TOP.get(path.stem, set()) | {"secateur"} | set(sys.stdlib_module_names)
    for name in imports(path, top_level=True):
        assert name.split(".")[0] in allowed, f"{path.stem} imports {name} at the top"


def test_every_module_has_a_floor():
    assert {path.stem for path in SOURCES} == set(FLOOR)


@pytest.mark.parametrize("path", sorted((Path(secateur.__file__).parent / "integrations").glob("*.py")))
def test_integrations_are_adapters_only(path):
    own = {name for name in imports(path, top_level=False) if name.split(".")[0] == "secateur"}
    assert own <= {"secateur.pruner", "secateur.files"}
