"""The bar: silent unless it is wanted."""

import io
import sys

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


def test_no_terminal_no_bar(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    assert list(track([1, 2], "silent")) == [1, 2]
    assert capsys.readouterr() == ("", "")


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
