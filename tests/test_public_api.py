"""The public surface: small, documented, and nothing hides a module."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import secateur

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(secateur.__path__, "secateur.")
    if module.name not in {"secateur.__main__", "secateur.version"}
)
WORDS = {"allocation", "criteria", "patterns", "regrowth", "schedules", "targets"}
ROOMS = {"models", "coupling", "evidence", "inference", "prune", "report", "solvers", "storage"}


def test_there_are_modules_to_look_at():
    assert len(MODULES) >= 80


def test_the_version_is_that_of_the_changelog_and_the_citation():
    root = Path(__file__).parents[1]
    assert f"\n## {secateur.__version__}\n" in (root / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {secateur.__version__}\n" in (root / "CITATION.cff").read_text(encoding="utf-8")


def test_all_is_sorted_complete_and_small():
    names = secateur.__all__
    assert list(names) == sorted(names)
    modules = {name for name in names if isinstance(getattr(secateur, name), ModuleType)}
    assert modules <= WORDS | ROOMS
    assert len(set(names) - modules) <= 32


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


def test_packages_and_words_list_what_they_offer_and_no_other_module_does():
    for name in MODULES:
        loaded = importlib.import_module(name)
        assert loaded.__doc__, name
        if name.startswith("secateur.integrations"):
            continue
        lists = hasattr(loaded, "__path__") or name.removeprefix("secateur.") in {*WORDS, "env", "support.private"}
        assert hasattr(loaded, "__all__") == lists, name
        if lists:
            assert list(loaded.__all__) == sorted(loaded.__all__), name
            assert all(hasattr(loaded, each) for each in loaded.__all__), name


def test_the_front_door_imports_nothing_before_it_is_used():
    script = "import sys, secateur; print(sorted({'torch', 'numpy', 'rich', 'safetensors'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", done.stdout


ANSWERED = """
import sys
from secateur.cli import main
for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit as stop:
        assert not stop.code, stop.code
    found = sorted({"torch", "numpy", "rich"} & set(sys.modules))
    assert not found, f"secateur {words} imports {', '.join(found)}"
"""


def test_the_command_answers_help_without_importing_what_it_does_not_need():
    commands = ["bench", "compress", "demo", "expand", "inspect", "oneshot", "prune", "recover", "shrink", "verify"]
    commands += ["vocabulary"]
    words = ["--help", "--version", *(f"{command} --help" for command in commands)]
    done = subprocess.run([sys.executable, "-c", ANSWERED, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: secateur") == len(words) - 1  # version is none


def test_the_stub_is_in_a_form_that_type_checkers_take_for_public():
    stub = Path(secateur.__file__).with_suffix(".pyi")
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        assert isinstance(node, ast.ImportFrom)
        assert node.level == 1
        assert [alias.asname for alias in node.names] == [alias.name for alias in node.names]
