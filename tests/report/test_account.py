"""An account is a page of plain values: shown as they are, sorted by what they are."""

import json
import re
from pathlib import Path

import pytest

from secateur.report import Account, Cells, Chart, Sheet, check_page, write_account
from secateur.support import Rows
from support.chromium import chromium, column, framed, in_chromium
from support.reports import HOSTILE, HOSTILE_TOO, Page

NAMES = ["layers.0.up.weight", "layers.1.up.weight", "layers.0.down.weight", HOSTILE, HOSTILE_TOO]
ZEROS = [0.5, 0.9, 0.25, None, 1.0]


def made(**changes: object) -> Account:
    cells = [
        Cells("tensor", NAMES),
        Cells("zeros", ZEROS, ["50%", "90%", "25%", "-", "100%"], ZEROS),
        Cells(HOSTILE_TOO, [HOSTILE, "", "b", "a", "c"]),
    ]
    chart = Chart("Where the zeros are", HOSTILE_TOO, NAMES, ZEROS, "zeros", share=True)
    given: dict[str, object] = {
        "title": f"{HOSTILE}, pruned",
        "command": f"secateur prune {HOSTILE_TOO}",
        "asked": {
            "sparsity": 0.9,
            "include": ["a", HOSTILE],
            "exclude": [],
            "seed": None,
            "zstd": False,
            "dry-run": True,
        },
        "got": [Rows(("", ">Tensors"), [("pruned", "5"), (HOSTILE, None)]), "", f"Wrote 0.5 MB to {HOSTILE_TOO}."],
        "sheets": [Sheet("Tensor by tensor", cells, [chart])],
        "seconds": 1.25,
        "versions": {"torch": "2", "processor": HOSTILE},
    }
    return Account(**{**given, **changes})  # type: ignore[arg-type]


def page_of(account: Account, folder: Path) -> Page:
    return Page(write_account(account, folder / "page.html").read_text(encoding="utf-8"))


def test_all_that_is_in_it_is_on_the_page(tmp_path: Path) -> None:
    page = page_of(made(), tmp_path)
    text = " ".join(page.text.split())
    for said in ("sparsity 0.9", f"include a, {HOSTILE}", "dry-run yes", "pruned 5", "1.2 s", "torch 2"):
        assert said in text, said
    for left_out in ("exclude", "seed", "zstd"):
        assert left_out not in text
    for name in (*NAMES[:3], "layers.*.up.weight", "layers.*.down.weight", f"secateur prune {HOSTILE_TOO}"):
        assert name in text, name
    data = json.loads(page.scripts[0])
    assert data["sheets"]["Tensor by tensor"]["zeros"] == ZEROS
    assert data["command"] == made().command


def test_it_loads_nothing_and_runs_no_name(tmp_path: Path) -> None:
    page = page_of(made(), tmp_path)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 2
    assert not {"img", "iframe", "object", "embed", "base", "form"} & {*tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    [policy] = [a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_same_account_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write_account(made(), tmp_path / name).read_bytes() for name in ("one.html", "two.html"))
    assert first == second


def test_cells_are_sorted_by_values_and_shown_as_texts(tmp_path: Path) -> None:
    page = page_of(made(), tmp_path)
    zeros = [
        a["data-value"]
        for tag, a in page.tags
        if tag == "td" and "number" in (a.get("class") or "").split() and "data-value" in a
    ]
    assert zeros == ["0.5", "0.9", "0.25", "", "1.0"]
    widths = [a["style"] for tag, a in page.tags if tag == "i"]
    assert widths == ["width: 50.0%", "width: 90.0%", "width: 25.0%", "width: 100.0%"]  # none where there is no number
    assert Cells("n", [1, 2.5, None]).column(0).texts == {0: "1", 1: "2.5", 2: ""}
    assert not Cells("n", [1, "a"]).is_numeric


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="the column 'zeros' has 2 values, and 1 beside them"):
        Cells("zeros", [1, 2], ["one"])
    with pytest.raises(ValueError, match="the column 'zeros' has 2 values, and 3 beside them"):
        Cells("zeros", [1, 2], bars=[0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match=r"the columns of 'All' have one length, not \[1, 2\]"):
        Sheet("All", [Cells("a", [1, 2]), Cells("b", [1])])
    with pytest.raises(ValueError, match="the chart 'c' has 1 names and 2 values"):
        Chart("c", "", ["a"], [1, 2], "x")
    with pytest.raises(ValueError, match="the chart 'c' has 2 values and 1 beside"):
        Chart("c", "", ["a", "b"], [1, 2], "x", series=["one"])
    with pytest.raises(ValueError, match="the chart 'c' has 2 values and 3 beside"):
        Chart("c", "", ["a", "b"], [1, 2], "x", places=[1, 2, 3])
    with pytest.raises(ValueError, match="the chart 'c' has 2 values and 1 beside"):
        Chart("c", "", ["a", "b"], [1, 2], "x", grid=[("a", 0)])


def test_a_map_shows_each_block_and_its_names_are_text(tmp_path: Path) -> None:
    names = [f"layers.{block}.{part}" for block in (0, 1, 2) for part in ("up", HOSTILE, HOSTILE_TOO)]
    values = [0.1 * at for at in range(len(names))]
    sheet = Sheet("All", [Cells("name", names)], [Chart("Errors", "Lost; all.", names, values, "error")])
    page = page_of(made(sheets=[sheet]), tmp_path)
    fields = [attributes for tag, attributes in page.tags if tag == "b"]
    assert len(fields) == 9
    assert {attributes["title"] for attributes in fields} == {
        f"{name}: {value:.3g}" for name, value in zip(names, values, strict=True)
    }
    assert [attributes["style"] for attributes in fields][:2] == ["--strong: 0.000", "--strong: 0.375"]
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in page.tags)
    assert "Lost. A row for each kind" in page.text


def test_what_is_nought_was_asked_too_and_what_was_not_measured_is_not_said(tmp_path: Path) -> None:
    text = " ".join(page_of(made(asked={"seed": 0, "local": 0.0, "include": ()}, seconds=None), tmp_path).text.split())
    assert "seed 0" in text
    assert "local 0.0" in text
    assert "include" not in text
    assert "time" not in text


@pytest.mark.parametrize(("rows", "folded"), [(12, 0), (13, 1)])
def test_a_long_table_stands_once_in_the_open(rows: int, folded: int, tmp_path: Path) -> None:
    printed = Rows(("Layer",), [(f"layer {row}",) for row in range(rows)])
    page = page_of(made(got=[printed]), tmp_path)
    assert sum(tag == "details" for tag, _ in page.tags) == folded
    assert sum(tag == "details" for tag, _ in page_of(made(got=[printed], sheets=[]), tmp_path).tags) == 0


def test_a_failure_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_account(made(), path)
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


def test_a_page_that_could_not_be_written_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_page(tmp_path / "page.html")
    (tmp_path / "old.HTM").write_text("old")
    check_page(tmp_path / "old.HTM")
    assert [one.name for one in tmp_path.iterdir()] == ["old.HTM"]  # nothing is left of the trial
    assert (tmp_path / "old.HTM").read_text() == "old"
    with pytest.raises(ValueError, match=r"config\.json: a report is one HTML page; name it so"):
        check_page(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing; create it first"):
        check_page(tmp_path / "missing" / "page.html")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder\.html is a folder; the report is a file"):
        check_page(tmp_path / "folder.html")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: (_ for _ in ()).throw(PermissionError(13, "no", "here")))
    with pytest.raises(PermissionError):
        check_page(tmp_path / "page.html")
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'secateur\[report\]'"):
        check_page(tmp_path / "page.html")


@in_chromium
def test_its_tables_sort_and_it_is_no_wider_than_the_window(tmp_path: Path) -> None:
    lost = Cells("lost", [0.5, 0.1], ["0.000412345", "0.1"], [0.5, 0.1])
    sheets = [*made().sheets, Sheet("Lost", [Cells("group", ["encoder.layer.0.intermediate.dense", "b"]), lost])]
    path = write_account(made(sheets=sheets), tmp_path / "page.html")
    dom = chromium(tmp_path / "profile", f"{path.as_uri()}#sort=sheet-1:column-1:descending", "--dump-dom")
    assert column(dom, "sheet-1", 1) == ["1.0", "0.9", "0.5", "0.25", ""]  # what was not measured comes last
    driver = """
        const named = document.querySelectorAll("tbody th, .keys li");
        const cut = Array.from(named, each => each.scrollWidth > each.clientWidth + 1);
        const drawn = document.querySelectorAll("#sheet-2 .level");
        const bars = Array.from(drawn, each => each.getBoundingClientRect().left);
        const wider = document.documentElement.scrollWidth > innerWidth;
        document.title = [innerWidth, wider, cut.some(Boolean), Math.max(...bars) - Math.min(...bars) > 1];
    """
    for width in (390, 500, 1280):
        dom = chromium(
            tmp_path / "profile", framed(path, width, driver).as_uri(), "--dump-dom", "--window-size=1400,950"
        )
        assert re.findall("<title>(.*?)</title>", dom)[0] == f"{width},false,false,false"
