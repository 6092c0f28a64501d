"""The public surface: small, documented, and nothing hides a module."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import secateur

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(secateur.__path__, "secateur.")
    # the last needs what only `make detectors` installs
    if module.name not in {"secateur.__main__", "secateur.version", "secateur.integrations.ultralytics"}
)
WORDS = {
    "allocation",
    "criteria",
    "kinds",
    "llamacpp",
    "operations",
    "patterns",
    "regrowth",
    "runtimes",
    "schedules",
    "targets",
}
ROOMS = {"models", "coupling", "evidence", "inference", "prune", "report", "solvers", "storage"}


VERBS = (
    "sparsify", "shrink", "oneshot", "fit", "sensitivity", "recover", "shrink_vocabulary", "deploy",
    "verify_checkpoint",
)  # fmt: skip
BESIDE = ("sensitivity", "deploy", "verify_checkpoint")  # which change no module


def test_there_is_one_verb_wherever_the_model_is():
    """Eight take a module or a directory, and all of them together 150 parameters at most."""
    assert {name for name in secateur.__all__ if name.endswith("_checkpoint")} == {"verify_checkpoint"}
    signatures = {verb: inspect.signature(getattr(secateur, verb)).parameters for verb in VERBS}
    assert sum(map(len, signatures.values())) <= 150
    for verb, parameters in signatures.items():
        if verb != "verify_checkpoint":
            assert next(iter(parameters)) == "model"
            assert parameters["model"].annotation == "nn.Module | Path | str"
            assert ("out" in parameters) == (verb != "sensitivity")


@pytest.mark.parametrize("verb", ["sparsify", "oneshot", "fit", "recover"])
def test_a_directory_needs_a_place_for_what_is_written(verb, tmp_path):
    between = {"recover": [tmp_path], "sparsify": []}.get(verb, [])
    given = {"sparsify": [0.5], "fit": [[1]], "recover": [[1]], "oneshot": [[1], 0.5]}[verb]
    how = {"budget": {"params": 0.5}} if verb == "fit" else {}
    with pytest.raises(ValueError, match="is a directory, which is not changed; name the one to write with out="):
        getattr(secateur, verb)(tmp_path, *between, *given, **how)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in BESIDE])
def test_a_module_is_changed_in_place_and_has_no_out(verb, tmp_path):
    import torch

    model, batches = torch.nn.Linear(4, 4), [torch.ones(2, 4), torch.zeros(2, 4)]
    given = {"sparsify": [0.5], "shrink": [batches[0], 0.5], "recover": [torch.nn.Linear(4, 4), batches]}
    given |= {"oneshot": [batches, 0.5], "fit": [batches], "shrink_vocabulary": [None, ["a"]]}
    how = {"budget": {"params": 0.5}} if verb == "fit" else {}
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(ValueError, match="out= is for directories; a model in memory is run where it is and changed"):
        getattr(secateur, verb)(model, *given[verb], out=tmp_path / "out", **how)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert not (tmp_path / "out").exists()


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
    assert len(set(names) - modules) <= 33


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


def test_words_list_what_they_offer_and_packages_import_it_in_the_form_that_type_checkers_take_for_public():
    for name in MODULES:
        loaded = importlib.import_module(name)
        assert loaded.__doc__, name
        lists = name.removeprefix("secateur.") in {*WORDS, "env", "native", "prune"}
        assert hasattr(loaded, "__all__") == lists, name
        if hasattr(loaded, "__path__") and not lists:
            tree = ast.parse(Path(loaded.__file__).read_text(encoding="utf-8"))
            taken = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
            assert all(alias.asname == alias.name for alias in taken), name
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
