"""A result is shown as what it says of itself: by print, at a prompt, in a notebook, and the same everywhere."""

import dataclasses
import importlib
import inspect
import pkgutil
import re

import pytest
import torch

import secateur
from secateur.pipeline import Masks
from secateur.support import Rows, Shown, html_of_parts, text_of_parts

PARTS = ("one", Rows(("~Name", ">Number"), [("a", 1), ("<b>", None)]), "", "x < y")


def test_in_a_notebook_they_are_tables_and_nothing_is_markup():
    shown = html_of_parts([*PARTS, Rows((">n",), [["a\x1b[2Jb"]])])
    assert shown.count("<table>") == 2
    assert shown.count("<div>") == 4
    assert "<b>" not in shown
    assert "\x1b" not in shown
    assert '<th style="text-align: right">Number</th>' in shown
    assert '<td style="text-align: left">&lt;b&gt;</td><td style="text-align: right"></td>' in shown
    words = re.findall(r">([^<]+)<", shown)
    assert words == ["one", "Name", "Number", "a", "1", "&lt;b&gt;", "x &lt; y", "n", "a\\x1b[2Jb"]


@dataclasses.dataclass(frozen=True)
class Done(Shown):
    count: int = 3

    def _parts(self):
        return PARTS


class Printer:
    """What IPython hands to ``_repr_pretty_``."""

    def __init__(self):
        self.written = ""

    def text(self, text):
        self.written += text


def pretty(value):
    """As IPython finds it: class by class, a method of this name or else a ``__repr__``, of the class itself."""
    printer = Printer()
    for kind in type(value).__mro__:
        if "_repr_pretty_" in vars(kind):
            kind._repr_pretty_(value, printer, False)
            return printer.written
        if kind is not object and "__repr__" in vars(kind):
            return repr(value)
    return repr(value)


@pytest.mark.parametrize("value", [Done(), Masks(weight=torch.tensor([True, False]))], ids=["a dataclass", "a dict"])
def test_at_a_prompt_it_is_what_print_shows(value):
    assert pretty(value) == str(value) == text_of_parts(value._parts())
    assert value._repr_html_() == html_of_parts(value._parts())
    assert repr(value) != str(value)


def test_every_result_that_prints_as_a_table_is_one():
    for room in pkgutil.iter_modules(secateur.__path__, "secateur."):
        if room.name not in ("secateur.__main__", "secateur.integrations"):
            importlib.import_module(room.name)
    found, left = set(), [Shown]
    while left:
        for kind in left.pop().__subclasses__():
            found.add(kind)
            left.append(kind)
    ours = {kind for kind in found if kind.__module__.startswith("secateur.")}
    assert {"Shrunk", "CheckpointShrinking", "OneShot", "Masks", "Packing"} <= {kind.__name__ for kind in ours}
    ours.remove(secateur.Pruner)  # it prints what it is going to do, and its page and its table say what it has done
    for kind in ours:
        assert "_repr_pretty_" in vars(kind)
        assert not inspect.getsource(kind).count("def __str__"), "it says itself what it is in parts"
