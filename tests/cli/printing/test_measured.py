"""What bench and pack say: a row a form, each compared with the dense one, and nothing that was not measured."""

from torch import nn

from secateur.cli.measuring import Bench, Form
from secateur.cli.printing import measured_parts, measured_sheets, packed_parts
from secateur.inference import PackedLayer, Packing, layers_sheet
from secateur.native import describe
from secateur.support import Rows

PACKING = Packing(
    (
        PackedLayer("a.[bold]\x1b[2J", "SparseLinear", (8, 4), 0.9, "", 4.0, 3.0, 1.5, 1000, 250),
        PackedLayer("b", "dense", (8, 8), 0.0, "no zeros", dense_bytes=2000, bytes=2000),
    )
)


def bench(*, threads=1, **missing):
    forms = [
        Form("dense", None, nn.Linear(10, 100, bias=False)),
        Form("rows", 0.5, nn.Linear(10, 50, bias=False), PACKING),
        Form("int8", None, nn.Linear(10, 25, bias=False)),
    ]
    times = [[0.004, 0.008, 0.002], [0.002, 0.004, 0.002], [0.008, 0.008, 0.004]]
    return Bench(forms, times, missing, threads)


def test_a_row_a_form_beside_the_dense_one():
    rows, blank, *lines = measured_parts(bench(), "1 × 64 tokens; ")
    assert isinstance(rows, Rows)
    assert blank == ""
    assert [row[0] for row in rows.rows] == ["dense", "rows", "int8"]
    assert [row[1] for row in rows.rows] == ["", "50%", ""]
    assert [row[2] for row in rows.rows] == ["4", "2", "8"]  # medians, in milliseconds
    assert [row[3] for row in rows.rows] == ["1.00", "2.00", "0.50"]  # medians of the rounds' ratios, not of medians
    assert [row[4] for row in rows.rows] == ["4 kB", "2 kB", "1 kB"]
    assert [row[5] for row in rows.rows] == ["", "1 of 2 layers", ""]
    assert lines[0] == f"1 × 64 tokens; 1 thread; {describe()}."
    assert lines[-1].startswith("Zeros alone do nothing")


def test_every_form_and_every_layer_has_its_row_on_a_page():
    forms, layers = measured_sheets(bench())
    columns = {cells.head: cells for cells in forms.cells}
    assert columns["form"].values == ["dense", "rows 50%", "int8"]
    assert columns["ms"].bars == [0.5, 0.25, 1.0]  # of the slowest
    assert columns["ms, fastest round"].values == [2.0, 2.0, 4.0]
    assert columns["ms, slowest round"].values == [8.0, 4.0, 8.0]
    assert layers.title == "The layers of rows 50%"
    columns = {cells.head: cells for cells in layers_sheet("all", PACKING).cells}
    assert columns["layer"].values == [r"a.[bold]\x1b[2J", "b"]
    assert columns["times faster"].values == [2.0, None]
    assert columns["stays dense, because"].values == ["", "no zeros"]


def test_pack_compares_the_whole_model_only_where_it_was_timed():
    found = bench()
    timed = Bench(found.forms[:2], found.times[:2], {}, 1)
    rows, _, *lines = packed_parts(PACKING, timed, "")
    assert rows == PACKING.parts[0]
    assert lines[0] == "1 of 2 layers packed; their 3 kB are now 2.25 kB."
    assert lines[1] == "The model takes 2 ms, and took 4; round by round 2.00 times as fast."
    dense = Packing(PACKING.layers[1:])
    _, _, *lines = packed_parts(dense, Bench(found.forms[:2], [], {}, 1), "")
    assert lines == ["0 of 1 layers packed; their 2 kB are now 2 kB.", f"1 thread; {describe()}."]
