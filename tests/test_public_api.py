"""The public surface: small, documented, and nothing hides a module."""

import importlib
import pkgutil
from types import ModuleType

import secateur

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(secateur.__path__, "secateur.")
    if module.name not in {"secateur.__main__", "secateur.version"}
)
WORDS = {"allocation", "criteria", "patterns", "regrowth", "schedules", "targets"}
ROOMS = {"blockwise", "coupling", "evidence", "inference", "prune", "report", "solvers", "storage"}


def test_there_are_modules_to_look_at():
    assert len(MODULES) >= 80


def test_all_is_sorted_complete_and_small():
    names = secateur.__all__
    assert list(names) == sorted(names)
    modules = {name for name in names if isinstance(getattr(secateur, name), ModuleType)}
    assert modules <= WORDS | ROOMS
    assert len(set(names) - modules) <= 30


def test_import_paths_that_stay_stay():
    for name in [*WORDS, *ROOMS, "integrations.lightning", "integrations.transformers"]:
        importlib.import_module(f"secateur.{name}")


def test_no_name_of_the_house_hides_a_module_of_it():
    for name in {name.split(".")[1] for name in MODULES}:
        assert isinstance(importlib.import_module(f"secateur.{name}"), ModuleType)
        assert isinstance(getattr(secateur, name), ModuleType), name


def test_every_public_name_has_a_docstring_with_an_example():
    for name in secateur.__all__:
        thing = getattr(secateur, name)
        if isinstance(thing, ModuleType | str):
            continue
        assert thing.__doc__, name
        assert ">>>" in thing.__doc__, f"{name} has no doctest"


def test_modules_list_what_they_offer():
    for name in MODULES:
        loaded = importlib.import_module(name)
        assert loaded.__doc__, name
        if name.startswith("secateur.integrations"):
            continue
        assert list(loaded.__all__) == sorted(loaded.__all__), name
        assert all(hasattr(loaded, each) for each in loaded.__all__), name
