"""The public surface: small, sorted, documented, and nothing hides a module."""

import importlib
import pkgutil
from types import ModuleType

import secateur


def test_all_is_sorted_complete_and_small():
    names = secateur.__all__
    assert names == sorted(names)
    assert len(names) <= 34
    public = {name for name in vars(secateur) if not name.startswith("_")}
    modules = {module.name for module in pkgutil.iter_modules(secateur.__path__)}
    assert public - set(names) <= modules, "a public name is missing from __all__"


def test_no_function_hides_a_module():
    for module in pkgutil.iter_modules(secateur.__path__):
        if module.name != "__main__":
            importlib.import_module(f"secateur.{module.name}")
            assert isinstance(getattr(secateur, module.name), ModuleType), module.name


def test_every_public_name_has_a_docstring_with_an_example():
    for name in secateur.__all__:
        thing = getattr(secateur, name)
        if isinstance(thing, ModuleType | str):
            continue
        assert thing.__doc__, name
        assert ">>>" in thing.__doc__, f"{name} has no doctest"


def test_modules_list_what_they_offer():
    for module in pkgutil.iter_modules(secateur.__path__):
        if module.name in {"__main__", "version"}:
            continue
        loaded = importlib.import_module(f"secateur.{module.name}")
        if module.ispkg:
            continue
        assert loaded.__doc__, module.name
        assert list(loaded.__all__) == sorted(loaded.__all__), module.name
        assert all(hasattr(loaded, name) for name in loaded.__all__)
