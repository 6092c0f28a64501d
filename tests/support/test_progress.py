"""The bar: silent unless it is wanted."""

import builtins
import io
import sys
import types

import pytest

from secateur.support import progress, track


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def pretend(monkeypatch):
    """Call it inside the test: pytest puts its own stderr back between a fixture and its test."""

    def terminal():
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("SECATEUR_PROGRESS", raising=False)
        return stream

    return terminal


def test_quick_work_is_silent(pretend):
    terminal = pretend()
    assert list(track(range(5), "quick")) == [0, 1, 2, 3, 4]
    assert terminal.getvalue() == ""


def test_long_work_shows_a_bar(pretend, monkeypatch):
    terminal = pretend()
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    assert list(track(iter("abc"), "counting sheep", total=3)) == ["a", "b", "c"]
    assert "counting sheep" in terminal.getvalue()
    assert "/3" in terminal.getvalue()
    assert not progress._showing.locked()


def test_it_can_be_switched_off(pretend, monkeypatch):
    terminal = pretend()
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setenv("SECATEUR_PROGRESS", "0")
    assert list(track([1, 2], "silent")) == [1, 2]
    assert terminal.getvalue() == ""


def test_an_inner_loop_is_silent_while_the_outer_shows(pretend, monkeypatch):
    terminal = pretend()
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    for _ in track(range(2), "outer"):
        assert list(track(range(2), "inner")) == [0, 1]
    assert "outer" in terminal.getvalue()
    assert "inner" not in terminal.getvalue()


def test_the_bar_goes_when_the_loop_ends_early(pretend, monkeypatch):
    pretend()
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    items = track(range(9), "abandoned")
    next(items)
    items.close()
    assert not progress._showing.locked()

    def failing():
        yield 1
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        list(track(failing(), "failing"))
    assert not progress._showing.locked()


class Notebook:
    """What a kernel and IPython's display are to a bar: outputs of the cell, each of which can be replaced."""

    def __init__(self):
        self.outputs, self.pictures = [], []

    def display(self, picture, *, raw, display_id):
        assert raw
        assert display_id
        self.outputs.append(picture)
        self.pictures.append(picture)
        return types.SimpleNamespace(update=self.update)

    def update(self, picture, *, raw):
        assert raw
        self.outputs[-1] = picture
        self.pictures.append(picture)


@pytest.fixture
def notebook(monkeypatch):
    found = Notebook()
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    display.display = found.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(builtins, "get_ipython", lambda: types.SimpleNamespace(kernel=object()), raising=False)
    monkeypatch.setattr(progress, "FRAME", 0.0)
    monkeypatch.delenv("SECATEUR_PROGRESS", raising=False)
    return found


def test_a_notebook_has_one_bar_below_its_cell_and_then_none(notebook, monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    assert list(track("abc", "counting <sheep>")) == ["a", "b", "c"]
    assert notebook.outputs == [{"text/plain": "", "text/html": ""}]
    *shown, _ = notebook.pictures
    assert [picture["text/plain"].split()[-2] for picture in shown] == ["0/3", "1/3", "2/3"]
    for picture in shown:
        assert picture["text/plain"].startswith("counting <sheep>")
        assert "counting &lt;sheep&gt;" in picture["text/html"]
    assert capsys.readouterr() == ("", "")
    assert not progress._showing.locked()


def test_ipython_on_a_terminal_is_a_terminal(pretend, monkeypatch):
    terminal = pretend()
    monkeypatch.setattr(builtins, "get_ipython", lambda: types.SimpleNamespace(), raising=False)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    assert list(track([1], "counting")) == [1]
    assert "counting" in terminal.getvalue()


def test_a_bar_that_cannot_be_made_keeps_no_other_from_showing(notebook, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_progress", None)
    with pytest.raises(TypeError):
        list(track([1], "broken"))
    assert not progress._showing.locked()
