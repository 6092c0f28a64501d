"""Tables of plain text: a line a row, columns aligned, nothing of a cell read as markup or sent to the terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from secateur.support import table, table_of


@given(st.lists(st.tuples(st.text(max_size=12), st.integers()), max_size=6))
def test_a_line_is_a_row_and_numbers_end_flush_right(rows):
    head, *lines = table(["name", ">count"], rows).splitlines()
    assert len(lines) == len(rows)
    assert all(line.isprintable() for line in lines)
    assert head.startswith("name ")
    for line, (_, count) in zip(lines, rows, strict=True):
        assert line.endswith(f" {count}")


def test_columns_stand_below_each_other():
    shown = table([">count", "layer", ">share"], [[1, "a.weight", "100%"], [1024, "b", "3%"]])
    assert shown.splitlines() == ["count  layer     share", "    1  a.weight   100%", " 1024  b            3%"]


def test_a_cell_is_no_markup_and_none_is_empty():
    assert table(["a"], [["[bold]x[/bold]"], [None], ["a\x1b[2Jb"]]) == "a\n[bold]x[/bold]\n\na\\x1b[2Jb"


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="2 columns has a row of 1 cells"):
        table(["a", "b"], [["x"]])


def test_a_table_is_as_wide_as_its_cells():
    assert table(["a"], [["x" * 5000]]).splitlines()[1] == "x" * 5000


def test_on_a_narrow_terminal_only_columns_of_words_fold(capsys):
    shown = table_of(["~words", ">n"], [["one two three", 123456]])
    Console(width=16).print(shown)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3
    assert lines[1].endswith("123456")


def test_what_is_cut_looks_like_it(capsys):
    Console(width=8).print(table_of([">bytes"], [[123456789012]]))
    assert capsys.readouterr().out.splitlines()[1].rstrip().endswith("…")
