"""The law of rooms: packages have doors, arrows go one way, and heavy packages are imported where they are used.

Law: the arrows are those that docs/architecture.md draws; from another package a module takes only what the package's
``__init__`` names.
"""

import ast
import functools
import importlib
import re
import sys
import tokenize
from pathlib import Path

import pytest

import secateur

HOUSE = Path(secateur.__file__).parent
MAP = Path(__file__).parents[1] / "docs" / "architecture.md"
FILES = sorted(HOUSE.rglob("*.py"))
PACKAGES = sorted(path.parent.name for path in HOUSE.glob("*/__init__.py"))
OPEN = {"__init__", "__main__", "env", "version"}  # the front door; what it says of itself; and a number
EVERYWHERE = {"torch", "numpy", "secateur"}
AT_THE_TOP = {
    "cli": {"typer", "rich", "click"},
    "checkpoints": {"safetensors"},
    "support": {"rich"},
    "native": {"lazy_loader"},
    "integrations": {"lightning", "transformers", "ultralytics"},
}
FRONT = {"lazy_loader"}


def words():
    return {path.stem for path in HOUSE.glob("*.py")} - OPEN


@functools.cache
def arrows():
    """``{room: rooms that it may enter}``, as the map draws them, with what follows."""
    direct = {}
    block = re.search(r"```arrows\n(.*?)```", MAP.read_text(encoding="utf-8"), re.DOTALL)
    assert block, "docs/architecture.md draws no arrows"
    for line in block[1].splitlines():
        for sources, targets in re.findall(r"([a-z_]+(?:, [a-z_]+)*) → ([a-z_]+(?:, [a-z_]+)*)", line):
            for source in sources.split(", "):
                direct.setdefault(source, set()).update(targets.split(", "))

    def reached(room, on_the_way):
        assert room not in on_the_way, f"a circle: {' → '.join([*on_the_way, room])}"
        further = [{target, *reached(target, (*on_the_way, room))} for target in direct.get(room, ())]
        return set().union(*further)

    return {room: reached(room, ()) for room in direct}


def room_of(path):
    """A package, or ``words``, or None for the front door."""
    inside = path.relative_to(HOUSE).parts
    if len(inside) > 1:
        return inside[0]
    return None if path.stem in OPEN else "words"


@functools.cache
def parsed(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tree, list(ast.walk(tree))


def nodes(path, *, top_level=False):
    tree, every = parsed(path)
    return tree.body if top_level else every


@functools.cache
def named_by(place):
    """What the door of a package, or a word, names."""
    path = HOUSE / place / "__init__.py"
    if place == "prune" or not path.exists():
        return set(importlib.import_module(f"secateur.{place}").__all__)
    stub = path.with_suffix(".pyi")  # of a door that imports what it names when it is used
    door = [node for node in nodes(stub if stub.exists() else path) if isinstance(node, ast.ImportFrom)]
    return {alias.asname for node in door for alias in node.names if alias.asname == alias.name}


def entered(path):
    """``(room, place, name)`` of all that a file takes of the house; name None where it takes the place as a whole."""
    aliases = {}
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                own = f"secateur.{room_of(path)}."  # for what importing does
                assert alias.name.split(".")[0] != "secateur" or alias.name.startswith(own), f"{path}: {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            parts = (node.module or "").split(".")
            if parts[0] != "secateur":
                continue
            for alias in node.names:
                place, name = (alias.name, None) if len(parts) == 1 else (parts[1], alias.name)
                if len(parts) == 1:
                    aliases[alias.asname or alias.name] = place
                deep = len(parts) > 2
                yield place, name, deep
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield aliases[node.value.id], node.attr, False


SMALL = 60  # lines of code; under that a file needs a reason, which docs/architecture.md has
REASONS = {"__main__", "version", "env", "sizes"}


def code_of(path):
    """How many lines hold a token that is no comment and no docstring; of large files those that begin something."""
    _, every = parsed(path)
    told = set()
    for node in every:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            told |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    begun = {node.lineno for node in every if hasattr(node, "lineno")} - told
    if len(begun) > SMALL:  # reading all tokens of all files takes seconds
        return len(begun)
    without = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    with open(path, encoding="utf-8") as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in without:
                lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - told)


def test_the_house_is_no_heavier_than_the_map_says():
    assert len(FILES) <= 220
    small = {path for path in FILES if path.stem != "__init__" and code_of(path) < SMALL}
    small -= {path for path in small if room_of(path) in {"words", "cli", "solvers"} or path.stem in REASONS}
    small -= {path for path in small if path.parent.name == "kinds"}
    assert not small, f"{small}: put them where they are used, or the reason into docs/architecture.md"


def test_no_name_stands_in_three_files_with_three_meanings():
    """`parse` means the same in each: what a word says."""
    places = {}
    for path in FILES:
        for node in nodes(path, top_level=True):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(str(path.relative_to(HOUSE)))
    assert {name: where for name, where in places.items() if len(where) > 2 and name != "parse"} == {}


def test_there_are_rooms_and_the_map_has_them_all():
    assert len(PACKAGES) >= 15
    assert set(PACKAGES) - {"integrations"} <= set(arrows()) | {"native", "support"}
    text = MAP.read_text(encoding="utf-8")
    for package in PACKAGES:
        assert f"`{package}/`" in text, f"docs/architecture.md does not say what {package} is for"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_a_file_goes_only_where_arrows_go_and_through_doors(path):
    here = room_of(path)
    if here is None:
        return
    allowed = arrows().get(here, set())
    for place, name, deep in entered(path):
        if place == "version":
            continue
        room = "words" if place in words() else place
        if room == here:
            continue
        assert room in allowed, f"{here} has no arrow to {room}: {place}.{name}"
        if place == "integrations":  # a room of files, of which each asks for a framework that others have not
            continue
        assert not deep, f"{place} has a door; {name} is taken through a wall"
        if name is not None:
            assert name in named_by(place), f"{place} does not name {name} in its __init__"


def test_integrations_are_adapters_only():
    """The arrow to recovery leads on to nearly every room; an adapter takes a pruner, a teacher, or what makes a
    detector smaller, warns, and writes a file."""
    taken = {(place, name) for path in FILES if room_of(path) == "integrations" for place, name, _ in entered(path)}
    detectors = {("shrinking", "Shrunk"), ("shrinking", "shrink"), ("kinds", "Outputs")}
    detectors |= {("recovery", name) for name in ("Recovered", "rate_for", "recover")}
    support = {("support", "write_whole"), ("support", "warn")}
    assert taken == {("training", "Pruner"), ("recovery", "Distillation"), *support, *detectors}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_other_packages_are_imported_where_they_are_used(path):
    here = room_of(path)
    allowed = EVERYWHERE | set(sys.stdlib_module_names) | (FRONT if here is None else AT_THE_TOP.get(here, set()))
    for node in nodes(path, top_level=True):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] in allowed, f"{path.name} imports {name} at the top"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_what_warns_names_the_line_that_called_the_library(path):
    """`support.warn` finds it; a number of frames is right until somebody puts a decorator between."""
    warned = [node for node in nodes(path) if isinstance(node, ast.Attribute) and ast.unparse(node) == "warnings.warn"]
    assert len(warned) == (path == HOUSE / "support" / "text.py")


FACTORIES = {
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
    "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
OF_NUMBERS = FACTORIES - {"arange", "randint", "randperm"}  # the others make int64 of ints
BY_DEFAULTS = {"demo", "env.py", "prune/methods.py"}  # processes of their own; a draw that is torch's own


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_what_is_made_is_where_and_of_what_the_code_says(path):
    """Neither `torch.set_default_dtype` nor `torch.set_default_device` decides: a kernel that writes float32 into what
    is bfloat16 by default writes over other memory."""
    inside = path.relative_to(HOUSE)
    if {str(inside), inside.parts[0]} & BY_DEFAULTS:
        return
    for node in nodes(path):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        named = {each.arg: ast.unparse(each.value) for each in node.keywords}
        assert "device" in named, f"{inside}:{node.lineno} says no device: {ast.unparse(node)}"
        said = "dtype" in named or node.func.attr not in OF_NUMBERS or named["device"] == "'meta'"
        assert said, f"{inside}:{node.lineno} says no dtype: {ast.unparse(node)}"


PRIVATE = HOUSE / "support" / "private.py"
TOUCHED = {  # elsewhere, and why
    "integrations/lightning.py": {"_generate_state_key"},  # what a callback of Lightning's makes its key with
    "support/text.py": {"_getframe"},  # of Python
    "inference/linear.py": {"_buffers"},  # a key of the state that a pickle holds; a getattr takes a microsecond each
}  # fmt: skip


def is_private(name):
    return name.startswith("_") and name.strip("_") != "" and not name.startswith("__") and name.isidentifier()


def made_in(path):
    """Private names that a file defines itself: functions, classes, variables, parameters, attributes of self."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls", "made"}:
                yield node.attr
        elif isinstance(node, ast.Dict):  # what type() is given
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def private_names_used(path):
    """Private attributes that a file reads or writes, and private names that it imports from other libraries."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("secateur"):
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((word, ast.unparse(node)) for word in words if is_private(word))
        elif isinstance(node, ast.Import):
            words = [word for alias in node.names for word in alias.name.split(".")]
            yield from ((word, ast.unparse(node)) for word in words if is_private(word))


def named_in_the_room(path):
    """Private names that the file's package makes: of these, a module may use another one's."""
    return made_below(path if path.parent == HOUSE else path.parent)


@functools.cache
def made_below(place):
    files = place.rglob("*.py") if place.is_dir() else [place]
    return {name for each in files for name in made_in(each)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_private_parts_of_other_libraries_are_touched_in_one_file(path):
    """A new release of torch or transformers breaks support/private.py, and nothing else.

    By a rule of thumb: a private attribute that no file of the room makes is another library's; so is one that
    support/private.py names, also as a string.
    """
    if path == PRIVATE:
        return
    inside = str(path.relative_to(HOUSE))
    theirs = {name for name, _ in private_names_used(PRIVATE)}
    theirs |= {node.value for node in nodes(PRIVATE) if isinstance(node, ast.Constant) and is_private(str(node.value))}
    own = named_in_the_room(path)
    found = {name: where for name, where in private_names_used(path) if name not in own}
    for node in nodes(path):
        if isinstance(node, ast.Constant) and node.value in theirs:
            found[node.value] = repr(node.value)
        elif isinstance(node, ast.Attribute) and node.attr in theirs and not _is_self(node):
            found[node.attr] = ast.unparse(node)
    left = {name: where for name, where in found.items() if name not in TOUCHED.get(inside, ())}
    assert not left, f"{inside} touches {left}: make it a function of support/private.py"


def _is_self(node):
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def test_the_rule_of_thumb_finds_what_it_is_for(tmp_path):
    file = tmp_path / "some.py"
    file.write_text(
        "from torch._C import DisableTorchFunction\nimport torch._dynamo\nfrom torch.utils import _pytree\n"
        "class Own:\n    def __init__(self):\n        self._mine = 1\n"
        "def look(module, own):\n    return module._buffers, own._mine, module.__dict__, own._of_nobody.x\n"
    )
    used = {name for name, _ in private_names_used(file)}
    assert used == {"_C", "_dynamo", "_pytree", "_mine", "_buffers", "_of_nobody"}
    assert used - set(made_in(file)) == {"_C", "_dynamo", "_pytree", "_buffers", "_of_nobody"}


def made_at_the_top(path):
    for node in nodes(path, top_level=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def test_every_private_part_has_a_test():
    """By its name in the test file; what stands there as a bare name, without a function, too."""
    text = (Path(__file__).parent / "support" / "test_private.py").read_text(encoding="utf-8")
    made = {name for name in made_at_the_top(PRIVATE) if not name.startswith("_")}
    untested = [name for name in sorted(made) if f"private.{name}" not in text]
    assert not untested, f"tests/support/test_private.py does not have {untested}"


TESTS = Path(__file__).parent


def test_every_package_has_tests_and_every_folder_of_tests_a_package():
    """A folder of tests is about the package of its name, which a file of it imports."""
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("*/test_*.py")}
    assert folders - {"benchmarks"} == set(PACKAGES)
    for package in PACKAGES:
        files = sorted((TESTS / package).rglob("test_*.py"))
        imported = re.compile(
            rf"^ *(?:from|import) secateur\.{package}\b|^ *from secateur import .*\b{package}\b", re.MULTILINE
        )
        assert any(imported.search(path.read_text(encoding="utf-8")) for path in files), f"no test imports {package}"


def test_every_file_of_tests_tests_something():
    """A file that holds no test, or whose tests pytest does not collect by name, is forgotten."""
    for path in TESTS.rglob("test_*.py"):
        assert re.search(r"^ *def test_", path.read_text(encoding="utf-8"), re.MULTILINE), path
