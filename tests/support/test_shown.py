"""What is shown: tables, lines and texts, fit to be printed."""

import dataclasses
import importlib
import inspect
import io
import json
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import secateur
from secateur.pipeline import Masks
from secateur.support import Chart, Column, Shown, Table, bytes_text, html_of, percent, percents, printable, text_of
from secateur.support.tables import folded

NAMES = Table.of("names", [("a", 1), ("<b>", None)], Column.name("Name"), Column.count("Number"))
PARTS = ("one", NAMES, "", "x < y")


def test_in_a_notebook_they_are_tables_and_nothing_is_markup():
    shown = html_of([*PARTS, Table.of("n", [["a\x1b[2Jb"]], Column("n", side="right"))])
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
    where: Path = Path("here")
    rates: tuple = (0.5, float("nan"))
    model: object = dataclasses.field(default_factory=object)

    @property
    def twice(self):
        return 2 * self.count

    def content(self):
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
    assert pretty(value) == str(value) == text_of(value.summary())
    assert value._repr_html_() == html_of(value.summary())
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


def test_as_json_it_is_its_numbers_its_lines_and_its_tables():
    assert Done().json() == {
        "count": 3,
        "where": "here",
        "rates": [0.5, None],
        "twice": 6,
        "said": ["one", "x < y"],
        "names": [{"name": "a", "number": 1}, {"name": "<b>", "number": None}],
    }
    assert json.loads(json.dumps(Done().json(), allow_nan=False)) == Done().json()


def test_a_column_says_how_a_value_is_shown_sorted_and_drawn():
    change, share = Column.change("Units"), Column.portion("Share", none="?")
    assert [change.text(pair) for pair in ((8, 6), (8, 8), (1000, 1))] == ["8 -> 6", "8", "1,000 -> 1"]
    assert (change.counts_as((8, 6)), change.share_of((8, 6)), change.counts_as((0, 0))) == (0.75, 0.75, None)
    assert (share.text(None), share.text(0.5), share.share_of(None), share.share_of(1.5)) == ("?", "50.0%", None, 1.0)
    assert Column("~ What, in words?").key == "what_in_words"
    assert (Column("n").counts_as("x"), Column("n").share_of(0.5)) == ("x", None)


def test_details_stand_in_json_and_columns_of_nothing_nowhere():
    table = Table.of("t", [("a", 1, None)], Column("Name"), Column.count("Size", detail=True), Column("Why"))
    assert str(table.filled()) == "Name\na"
    assert "Size" not in table._repr_html_()
    assert table.filled().json() == [{"name": "a", "size": 1}]


def test_a_chart_is_of_a_column_and_fits_its_names():
    drawn = NAMES.drawn("number", "Numbers", "Of each.", along="in order")
    assert drawn.charts == [Chart("Numbers", "Of each.", ["a", "<b>"], [1, None], "number", along="in order")]
    for more, message in (
        ({"names": ["a"]}, "the chart 'c' has 1 names and 2 values"),
        ({"series": ["one"]}, "the chart 'c' has 2 values and 1 beside"),
        ({"places": [1, 2, 3]}, "the chart 'c' has 2 values and 3 beside"),
        ({"grid": [("a", 0)]}, "the chart 'c' has 2 values and 1 beside"),
    ):
        with pytest.raises(ValueError, match=message):
            Chart(**{"title": "c", "caption": "", "names": ["a", "b"], "values": [1, 2], "label": "x", **more})


@given(st.lists(st.tuples(st.text(max_size=12), st.integers()), max_size=6))
def test_a_line_is_a_row_and_numbers_end_flush_right(rows):
    head, *lines = str(Table.of("rows", rows, Column("name"), Column("count", side="right"))).splitlines()
    assert len(lines) == len(rows)
    assert all(line.isprintable() for line in lines)
    assert head.startswith("name ")
    for line, (_, count) in zip(lines, rows, strict=True):
        assert line.endswith(f" {count}")


def test_a_cell_is_no_markup_and_none_is_empty():
    cells = [["[bold]x[/bold]"], [None], ["a\x1b[2Jb"]]
    assert str(Table.of("a", cells, Column("a"))) == "a\n[bold]x[/bold]\n\na\\x1b[2Jb"


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="2 columns has a row of 1 cells"):
        Table("a", [Column("a"), Column("b")], [["x"]])


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
    columns = Column.name("Name"), Column.figure("Count", None, "d"), Column.name("because")
    Console(file=text, width=width).print(Table.of("t", rows, *columns).rich())
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
    assert str(NAMES).split() == ["Name", "Number", "a", "1", "<b>"]


@given(st.text(max_size=300), st.integers(10, 200))
def test_what_is_printed_holds_no_control_character(text, limit):
    assert printable(text, limit).isprintable()
    assert printable(printable(text, 10_000), 10**6) == printable(text, 10_000)


@given(st.text("abc", max_size=500), st.integers(10, 200))
def test_a_long_name_keeps_both_ends(name, limit):
    shown = printable(name, limit)
    assert len(shown) <= limit + 4
    if len(name) > limit:
        assert shown.startswith(name[: limit // 2])
        assert shown.endswith(name[-(limit // 2) :])
        assert "..." in shown
    else:
        assert shown == name


@given(st.floats(0, 1))
def test_a_share_reads_nothing_or_all_only_where_it_is(share):
    shown = percent(share)
    assert (shown == "0%") == (share == 0)
    assert (shown == "100%") == (share == 1)
    assert shown.endswith("%")


@given(st.integers(0, 10**16))
def test_bytes_have_three_digits_and_a_unit(count):
    number, unit = bytes_text(count).split()
    assert unit in ("B", "kB", "MB", "GB", "TB")
    assert abs(float(number) * 1000 ** ("B", "kB", "MB", "GB", "TB").index(unit) - count) <= 0.005 * count


def test_shares_are_none_or_all_only_where_they_are():
    assert percent(1e-9) == "<0.1%"
    assert percent(1 - 1e-9) == ">99.9%"
    assert (percent(0), percent(1), percent(None)) == ("0%", "100%", "-")
    assert percents([0.25, None, 0.75], opaque=False) == "25.0% to 75.0%"
    assert percents([0.5, 0.5], opaque=False) == "50.0%"
    assert (percents([None], opaque=False), percents([0.5], opaque=True)) == ("-", "?")
