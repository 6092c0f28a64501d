"""Tables of plain text: a line a row, columns aligned, nothing of a cell read as markup or sent to the terminal."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from secateur.support import table, table_of
from secateur.support.tables import folded


@given(st.lists(st.tuples(st.text(max_size=12), st.integers()), max_size=6))
def test_a_line_is_a_row_and_numbers_end_flush_right(rows):
    head, *lines = table(["name", ">count"], rows).splitlines()
    assert len(lines) == len(rows)
    assert all(line.isprintable() for line in lines)
    assert head.startswith("name ")
    for line, (_, count) in zip(lines, rows, strict=True):
        assert line.endswith(f" {count}")


def test_a_cell_is_no_markup_and_none_is_empty():
    assert table(["a"], [["[bold]x[/bold]"], [None], ["a\x1b[2Jb"]]) == "a\n[bold]x[/bold]\n\na\\x1b[2Jb"


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="2 columns has a row of 1 cells"):
        table(["a", "b"], [["x"]])


def test_on_a_narrow_terminal_only_columns_of_words_fold(capsys):
    shown = table_of(["~words", ">n"], [["one two three", 123456]])
    Console(width=16).print(shown)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3
    assert lines[1].endswith("123456")


def test_a_name_folds_after_dots_and_a_sentence_after_spaces():
    assert folded("a.b", 20) == "a.b"
    lines = folded(".".join(["layer"] * 9), 30).splitlines()
    assert max(map(len, lines)) <= 30
    assert all(line.startswith("  layer.") for line in lines[1:-1])
    assert "".join(line.strip() for line in lines) == ".".join(["layer"] * 9)
    assert folded("one of it is taken by its number", 12).splitlines() == ["one of it is", "taken by its", "number"]
    assert folded("", 5) == ""


@pytest.mark.parametrize("width", [30, 40, 60, 200])
def test_in_a_narrow_terminal_words_fold_and_numbers_do_not(width):
    name = "encoder.layer.0.attention.self.query.weight"
    rows = [(name, 1234567, "an output of the model"), ("b", 2, "cumsum")]
    text = io.StringIO()
    Console(file=text, width=width).print(table_of(["~Name", ">Count", "~because"], rows))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "1234567" in text.getvalue()
    column = lines[0].index("Count")
    cut = lines[1 : next(n for n, line in enumerate(lines) if line.startswith("b"))]
    assert "".join("".join(line[: column - 2].split()) for line in cut).startswith(name[:8])
    if width >= 60:
        assert all(word in text.getvalue() for word in ("attention.", "query."))


def test_in_a_notebook_a_table_is_text_too(monkeypatch):
    """rich shows below the cell what is printed to any file; found with a real kernel."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert table(["Name", ">Count"], [("a", 1)]).split() == ["Name", "Count", "a", "1"]
