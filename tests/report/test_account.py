"""An account is a page of plain values: shown as they are, sorted by what they are."""

import json
import re
from pathlib import Path

import pytest

from secateur.report import Account, check_page, write_account
from secateur.support import Chart, Column, Table
from support.chromium import chromium, column, framed, in_chromium
from support.reports import HOSTILE, HOSTILE_TOO, Page

NAMES = ["layers.0.up.weight", "layers.1.up.weight", "layers.0.down.weight", HOSTILE, HOSTILE_TOO]
ZEROS = [0.5, 0.9, 0.25, None, 1.0]


COLUMNS = (
    Column.name("tensor"),
    Column.portion("zeros", show="{:.0%}".format),
    Column(HOSTILE_TOO, key="note"),
)


def table(names: list[str] = NAMES, title: str = "Tensor by tensor") -> Table:
    rows = list(zip(names, ZEROS, [HOSTILE, "", "b", "a", "c"], strict=False))
    return Table.of("tensors", rows, *COLUMNS, title=title).drawn("zeros", "Where the zeros are", HOSTILE_TOO)


def made(**changes: object) -> Account:
    sums = Table.of("sums", [("pruned", 5), (HOSTILE, None)], Column("", key="of"), Column.count("Tensors"))
    given: dict[str, object] = {
        "title": f"{HOSTILE}, pruned",
        "command": f"secateur prune {HOSTILE_TOO}",
        "asked": {
            "sparsity": 0.9, "include": ["a", HOSTILE], "exclude": [], "seed": None, "zstd": False, "dry-run": True,
        },
        "got": [sums, "", f"Wrote 0.5 MB to {HOSTILE_TOO}.", table()],
        "seconds": 1.25,
        "versions": {"torch": "2", "processor": HOSTILE},
    }  # fmt: skip
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
    assert [row["zeros"] for row in data["tensors"]] == ZEROS
    assert data["said"] == [f"Wrote 0.5 MB to {HOSTILE_TOO}."]
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


def test_a_map_shows_each_block_and_its_names_are_text(tmp_path: Path) -> None:
    names = [f"layers.{block}.{part}" for block in (0, 1, 2) for part in ("up", HOSTILE, HOSTILE_TOO)]
    values = [0.1 * at for at in range(len(names))]
    chart = Chart("Errors", "Lost; all.", names, values, "error")
    page = page_of(made(got=[Table("all", [Column("name")], [[name] for name in names], "All", [chart])]), tmp_path)
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


def test_a_table_without_a_title_stands_among_the_lines(tmp_path: Path) -> None:
    page = page_of(made(got=[table(title=""), "A line."]), tmp_path)
    assert sum(attributes.get("class") == "wide narrow" for _, attributes in page.tags) == 1
    assert "sortable" not in str(page.tags)
    assert page.text.index("layers.1.up.weight") < page.text.index("A line.")


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
@pytest.mark.long
def test_its_tables_sort_and_it_is_no_wider_than_the_window(tmp_path: Path) -> None:
    lost = Column.portion("lost", show=lambda value: "0.000412345" if value == 0.5 else "0.1")
    rows = [("encoder.layer.0.intermediate.dense", 0.5), ("to 79.1% of all", 0.1)]
    placed = {"places": [10.1, 2.9], "joined": False, "series": ["dense", "small"]}
    told = Table.of("lost", rows, Column.name("group"), lost, title="Lost").drawn("lost", "By size", "Each.", **placed)
    got = [*made().got, "", "Lost", told]
    path = write_account(made(got=got), tmp_path / "page.html")
    page = path.read_text(encoding="utf-8")
    assert "79.<wbr>" not in page  # no line ends in a number
    assert page.count(">Lost<") == 2  # a part and its table's caption, and no line of one word
    dom = chromium(tmp_path / "profile", f"{path.as_uri()}#sort=table-1:zeros:descending", "--dump-dom")
    assert column(dom, "table-1", 1) == ["1.0", "0.9", "0.5", "0.25", ""]  # what was not measured comes last
    driver = """
        const drawnBySize = Array.from(document.querySelectorAll("figure")).at(-1).querySelector("div");
        const named = [drawnBySize, ...document.querySelectorAll("tbody th, .keys li")];
        const cut = named.map(each => each.scrollWidth > each.clientWidth + 1);
        const drawn = document.querySelectorAll("#table-2 .level");
        const bars = Array.from(drawn, each => each.getBoundingClientRect().left);
        const wider = document.documentElement.scrollWidth > innerWidth;
        document.title = [innerWidth, wider, cut.some(Boolean), Math.max(...bars) - Math.min(...bars) > 1];
    """
    for width in (390, 500, 1280):
        dom = chromium(
            tmp_path / "profile", framed(path, width, driver).as_uri(), "--dump-dom", "--window-size=1400,950"
        )
        assert re.findall("<title>(.*?)</title>", dom)[0] == f"{width},false,false,false"
