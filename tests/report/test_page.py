"""A page states what was measured, loads nothing, and survives any name."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from secateur.report import Results, Run, environment, summarize
from secateur.report.results import wilson
from support.chromium import chromium, column, framed, in_chromium
from support.reports import HOSTILE, HOSTILE_TOO, Page, make_results


def test_the_page_refers_to_nothing_outside_itself(page_path: Path, page: Page) -> None:
    text = page_path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//\w+\.\w|@import|@font-face", text)
    for tag, attributes in page.tags:
        assert tag not in {"img", "image", "iframe", "object", "embed", "base", "audio", "video", "source"}
        for name in ("src", "srcset", "href", "xlink:href", "action", "data", "poster", "formaction", "background"):
            if (target := attributes.get(name)) is not None:
                assert target.startswith(("#", "data:,")), (tag, name, target)
        assert not [name for name in attributes if name.startswith("on")]
    assert all(address.startswith("#") for address in re.findall(r"url\(([^)]*)\)", text))


def test_the_policy_forbids_every_load_and_allows_exactly_the_script(page: Page) -> None:
    [policy] = [a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    data, script = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "connect-src" not in policy
    json.loads(data)


def test_hostile_names_are_shown_and_not_run(page: Page) -> None:
    assert [tag for tag, _ in page.tags].count("script") == 2  # the data and the page's own
    assert page.text.count(HOSTILE) >= 4  # title, note, method, check
    assert HOSTILE_TOO in page.text
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in page.tags)


def test_ids_are_unique_and_every_reference_is_found(page_path: Path, page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    text = page_path.read_text(encoding="utf-8")
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids)


def test_the_page_holds_its_data(page: Page) -> None:
    data = json.loads(page.scripts[0])
    assert data["command"] == make_results().command
    rows = summarize(make_results().runs)
    assert [(row["method"], row["after"]) for row in data["runs"]] == [
        (row.method, [row.after, row.after_sd]) for row in rows
    ]


def test_the_page_says_what_it_ran_on_but_not_where(page_path: Path, page: Page) -> None:
    import platform

    for name, value in environment().items():
        assert name in page.text
        assert value in page.text
    host = platform.node()
    assert len(host) < 4 or host not in page_path.read_text(encoding="utf-8")
    assert str(Path.cwd()) not in page_path.read_text(encoding="utf-8")


def test_the_same_results_give_the_same_bytes(page_path: Path, tmp_path: Path) -> None:
    again = make_results().report(tmp_path / "again.html")
    assert again.read_bytes() == page_path.read_bytes()


def test_only_runs_are_needed(tmp_path: Path) -> None:
    """One seed, no fine-tuning, no sizes, no dense network, a metric that is no percentage."""
    runs = [Run("magnitude", sparsity, before=20 + 100 * sparsity) for sparsity in (0.3, 0.6)]
    results = Results("Mine", runs, metric="perplexity", unit="")
    text = Page(results.report(tmp_path / "r.html").read_text("utf-8")).text
    assert "Perplexity against sparsity" in text
    for part in ("tuning", "95 %", "Multiply-adds", "Of all parameters"):
        assert part not in text
        assert part not in str(results)
    assert "No method is named random, a baseline" in text


def test_of_training_alone_there_is_no_column_before_it() -> None:
    runs = [Run("random", 0.5, None, 90.0), Run("magnitude", 0.9, None, 95.0)]
    results = Results("Mine", runs)
    assert [row["after"] for row in results.json()["runs"]] == [[90.0, None], [95.0, None]]
    assert "before" not in results.json()["runs"][0]
    assert "baseline" not in str(results)


@pytest.mark.parametrize(
    ("methods", "missing"),
    [
        (["Random", "global magnitude"], ""),
        (["random (ERK)"], "No method is named magnitude, a baseline"),
        (["magnitude, 2:4"], "No method is named random, a baseline"),
        (["LAMP"], "No method is named random or magnitude, a baseline"),
    ],
)
def test_a_missing_baseline_is_said(methods: list[str], missing: str) -> None:
    runs = [Run("random networks, dense", 0.0, 99.0), *(Run(method, 0.5, 90.0) for method in methods)]
    said = str(Results("Mine", runs))
    assert missing in said
    assert ("baseline" in said) == bool(missing)


def test_every_measured_column_is_shown_and_no_other() -> None:
    results = make_results(notes=["It was measured here."])
    for part in ("98.5 ± 0.2", "158 kB", "98.7", "Multiply-adds"):
        assert part in str(results)
    said = results.json()
    for row in said["runs"]:
        assert row["interval"] == pytest.approx([100 * bound for bound in wilson(row["after"][0] / 100, 719)])
    assert said["runs"][-1]["bytes"] == 79_000
    assert said["runs"][-1]["zipped"] is None
    assert "It was measured here." in said["said"]
    assert "It was measured here." not in str(results)


@in_chromium
def test_the_address_sorts_a_table_under_the_policy(page_path: Path, tmp_path: Path) -> None:
    dom = chromium(tmp_path, f"{page_path.as_uri()}#sort=table-1:bytes:descending", "--dump-dom")
    at = [*make_results().json()["runs"][0]].index("bytes")
    assert column(dom, "table-1", at)[-1] == "79000"
    assert len(re.findall("aria-sort", re.sub(r"<(style|script).*?</\1>", "", dom, flags=re.DOTALL))) == 1
    assert re.search(r'data-key="bytes"[^>]* aria-sort="descending"', dom)


DRIVER = """
const found = {};
const table = document.getElementById("table-1");
const button = table.querySelector('th[data-key="after"] button');
const at = button.closest("th").cellIndex;
const order = () => Array.from(table.tBodies[0].rows, row => Number(row.cells[at].dataset.value));
button.focus();
found.focus = document.activeElement === button;
button.click();
found.first = [order(), button.closest("th").ariaSort, location.hash];
button.click();
found.second = [order(), button.closest("th").ariaSort, location.hash];
table.querySelector('th[data-key="method"] button').click();
found.names = Array.from(table.tBodies[0].rows, row => row.cells[0].textContent);
found.sorted = table.querySelectorAll("[aria-sort]").length;
document.querySelectorAll("details").forEach(one => { one.open = true; });
const cuts = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
found.overlaps = [];
found.outside = [];
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  const texts = Array.from(svg.querySelectorAll("text"));
  const boxes = texts.map(text => text.getBoundingClientRect());
  boxes.forEach((box, i) => {
    if (box.left < frame.left - 1 || box.right > frame.right + 1) found.outside.push(texts[i].textContent);
    for (let j = 0; j < i; j++) if (cuts(box, boxes[j])) {
      found.overlaps.push([texts[i].textContent, texts[j].textContent]);
    }
  });
}
found.wider = document.documentElement.scrollWidth > innerWidth;
found.alerts = window.alerts;
document.title = JSON.stringify(found);
"""


@in_chromium
def test_clicks_sort_and_no_text_overlaps(page_path: Path, tmp_path: Path) -> None:
    text = page_path.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)  # or the driver may not run
    text = text.replace("<head>", "<head><script>window.alerts = 0; window.alert = () => { alerts++; };</script>", 1)
    driven = tmp_path / "driven.html"
    driven.write_text(text.replace("</body>", f"<script>{DRIVER}</script></body>"), encoding="utf-8")
    dom = chromium(tmp_path / "profile", driven.as_uri(), "--dump-dom", "--window-size=1200,2000")
    import html

    found = json.loads(html.unescape(re.findall("<title>(.*?)</title>", dom, re.DOTALL)[0]))
    afters = [row.after for row in summarize(make_results().runs)]
    assert found["focus"]
    assert found["first"] == [pytest.approx(sorted(afters)), "ascending", "#sort=table-1:after:ascending"]
    assert found["second"] == [
        pytest.approx(sorted(afters, reverse=True)),
        "descending",
        "#sort=table-1:after:descending",
    ]
    assert found["names"][0] != "dense"
    assert set(found["names"]) == {run.method for run in make_results().runs}
    assert found["sorted"] == 1
    assert found["overlaps"] == []
    assert found["outside"] == []
    assert not found["wider"]
    assert found["alerts"] == 0


@in_chromium
@pytest.mark.parametrize("width", [390, 1280])
def test_it_is_no_wider_than_the_window(page_path: Path, tmp_path: Path, width: int) -> None:
    copied = tmp_path / "page.html"
    copied.write_bytes(page_path.read_bytes())
    driver = "document.title = [innerWidth, document.documentElement.scrollWidth > innerWidth];"
    dom = chromium(tmp_path / "profile", framed(copied, width, driver).as_uri(), "--dump-dom", "--window-size=1400,950")
    assert re.findall("<title>(.*?)</title>", dom)[0] == f"{width},false"


@in_chromium
def test_it_is_drawn_in_light_and_dark_and_on_paper(page_path: Path, tmp_path: Path) -> None:
    from matplotlib import image

    for number, (option, light) in enumerate((("preferredColorScheme=1", True), ("preferredColorScheme=0", False))):
        picture = tmp_path / f"{number}.png"
        chromium(
            tmp_path, page_path.as_uri(), f"--blink-settings={option}", f"--screenshot={picture}",
            "--window-size=900,900",
        )  # fmt: skip
        pixels = image.imread(picture)[..., :3]
        assert (pixels[5, 5].mean() > 0.9) == light
        assert pixels.std() > 0.03
    paper = tmp_path / "page.pdf"
    chromium(tmp_path, page_path.as_uri(), f"--print-to-pdf={paper}")
    assert paper.read_bytes().startswith(b"%PDF")
