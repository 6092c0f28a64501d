"""The reference is made of docstrings: every public name has one, and an example that the doctests run.

Law: a name without an example of its own is in the list below, with the reason.
"""

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

import secateur

ROOT = Path(__file__).parent.parent
WITHOUT = {  # {reason: names that the reference has, and no example}
    "a word for types, which there is nothing to call of": """
        criteria.Scope allocation.Allocation allocation.Counts schedules.Schedule models.Solve coupling.Kept
        coupling.Polynomial""",
    "what is raised or warned": """
        solvers.SolverWarning models.AllMetError models.NoSlopeError""",
    "what a verb returns, with the verb's example": """
        inference.Packing inference.PackedFile models.Descended models.Layer models.ByText models.Reach models.TextReach
        coupling.Branch""",
    "called by pickle, and by nobody else": "prune.revive",
    "made by a verb of a model of the user's": "inference.FusedBlock",
    "needs a training, which docs/guides/training.md runs": """
        integrations.transformers.PruningCallback integrations.transformers.DistillationCallback
        integrations.lightning.Pruning integrations.lightning.Distillation""",
    "needs several processes, or their files": """
        evidence.sum_over_ranks""",
    "needs a directory of transformers, which docs/guides/command.md makes": """
        models.BlockFiles models.InFiles models.build_on_meta models.groups_of models.loaded_model
        models.parameters_on_meta""",
    "needs a network of timm, which tests/wild/detectors.py has": """
        models.read_pictures""",
    "a part of the walk over blocks, which docs/recipes.md explains": """
        models.Host models.InMemory models.Inputs models.Job models.MatrixJob models.ProductCall models.PairedStats
        models.Pruned models.Replay models.Rows models.RunAgain models.Solved models.Weights
        models.held_batches models.in_place models.is_turned models.naming_batch
        models.prepared models.run_through
        models.watched models.with_all_outputs evidence.Patches solvers.Solver
        models.check_finite models.example_for models.example_of models.has_forward
        models.last_products models.mixture_of models.own_share models.reached_by_name models.routed_by models.running
        models.shorter models.without_cache""",
    "met while a model is watched, by a rule such as those of docs/guides/coupling.md": """
        coupling.Call coupling.Look coupling.Operation coupling.SameDraws coupling.Spot coupling.evaluated
        coupling.written_in_others""",
}


def listed():
    """What the site lists, by the names in docs/make_site.py, which the tests cannot import."""
    tree = ast.parse((ROOT / "docs/make_site.py").read_text(encoding="utf-8"))
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("WORDS", "ROOMS", "FRAMEWORKS", "BESIDE")
    }


@functools.cache
def public():
    """``{module.name: what it is}``, each thing once, by the first name that the reference gives it."""
    found, seen = {}, set()
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    sections = listed()
    assert {*sections} == {"WORDS", "ROOMS", "FRAMEWORKS", "BESIDE"}
    for module in ["", *(name for names in sections.values() for name in names)]:
        place = importlib.import_module(f"secateur.{module}") if module else secateur
        own = [name for name, thing in vars(place).items() if hasattr(place, "__path__") or _is_of(place, thing)]
        names = getattr(place, "__all__", [name for name in own if not name.startswith("_")])
        if module in sections["BESIDE"]:
            imported = re.findall(rf"from secateur\.{module}(?:\.\w+)? import ([^\n(#]+)", pages)
            said = {word.split(" as ")[0].strip() for line in imported for word in line.split(",")}
            said |= set(re.findall(rf"secateur\.{module}\.(?:\w+\.)?(\w+)", pages))
            names = [name for name in names if name in said]
        for name in sorted(names):
            thing = getattr(place, name)
            if id(thing) not in seen and callable(thing) and not inspect.ismodule(thing):
                seen.add(id(thing))
                found[f"{module}.{name}".lstrip(".")] = thing
    return found


def _is_of(place, thing):
    return getattr(thing, "__module__", None) == place.__name__


def docstrings(thing):
    """Those of a function, or of a class and its methods."""
    yield thing.__doc__ or ""
    for name, each in vars(thing).items() if inspect.isclass(thing) else ():
        if name == "__init__" or not name.startswith("_"):
            yield getattr(each, "__doc__", None) or ""


def test_there_are_names_to_look_at():
    assert len(public()) >= 270
    assert {"shrink", "criteria.wanda", "report.before_and_after", "integrations.lightning.Pruning"} <= {*public()}


def test_every_public_name_has_an_example_or_a_reason():
    excused = [name for names in WITHOUT.values() for name in names.split()]
    assert len(excused) == len({*excused})
    without = {name for name, thing in public().items() if not any(">>>" in each for each in docstrings(thing))}
    assert without - {*excused} == set(), "give it an example in its docstring, or the list a reason"
    assert {*excused} - without == set(), "it has an example, or it is gone: take it out of the list"


def test_a_function_says_its_types():
    for name, thing in public().items():
        if inspect.isroutine(thing) or inspect.isclass(thing):
            assert (thing.__doc__ or "").strip(), name
        if inspect.isroutine(thing):
            signature = inspect.signature(thing)
            bare = [each.name for each in signature.parameters.values() if each.annotation is each.empty]
            assert not bare, f"{name}: of what type are {bare}?"
            assert signature.return_annotation is not signature.empty, name
