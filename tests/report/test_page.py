"""A page states what was measured, loads nothing, and survives any name."""

import base64
import hashlib
import json
import re
import sys
from pathlib import Path

import pytest

from secateur.report import Check, Results, Run, missing_baselines, summarize, write_report
from secateur.report.results import environment, wilson
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
    assert page.text.count(HOSTILE) >= 5  # title, note, method, network, layer
    assert HOSTILE_TOO in page.text
    [heading] = [number for number, (tag, _) in enumerate(page.tags) if tag == "h1"]
    assert page.tags[heading + 1][0] == "div"


def test_ids_are_unique_and_every_reference_is_found(page_path: Path, page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    text = page_path.read_text(encoding="utf-8")
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids)


def test_the_page_holds_its_data(page: Page) -> None:
    assert Results(**json.loads(page.scripts[0])) == make_results()


def test_the_page_says_what_it_ran_on_but_not_where(page_path: Path, page: Page) -> None:
    import platform

    for name, value in environment().items():
        assert name in page.text
        assert value in page.text
    host = platform.node()
    assert len(host) < 4 or host not in page_path.read_text(encoding="utf-8")
    assert str(Path.cwd()) not in page_path.read_text(encoding="utf-8")


def test_the_same_results_give_the_same_bytes(page_path: Path, tmp_path: Path) -> None:
    again = write_report(make_results(), tmp_path / "again.html")
    assert again.read_bytes() == page_path.read_bytes()


def test_only_runs_are_needed(tmp_path: Path) -> None:
    """One seed, no fine-tuning, no sizes, no dense network, a metric that is no percentage."""
    runs = [Run("magnitude", sparsity, before=20 + 100 * sparsity) for sparsity in (0.3, 0.6)]
    text = write_report(Results("Mine", runs, metric="perplexity", unit=""), tmp_path / "r.html").read_text("utf-8")
    assert "One seed only" in text
    assert "perplexity" in text
    assert text.count("<svg") == 1
    assert "fine-tuning" not in Page(text).text
    for part in ("Layer by layer", "Sanity checks", "95 %", "while training", "multiply-adds", "of all parameters"):
        assert part not in text
    assert "Channels that left" not in text
    assert "No random baseline" in text


def test_a_page_after_training_alone(tmp_path: Path) -> None:
    """Nothing was measured before fine-tuning: no plot and no column of it, and a check without fine-tuning."""
    runs = [Run("random", 0.5, None, 90.0), Run("magnitude", 0.9, None, 95.0)]
    checks = [Check("none", "nothing", [Run("none", 0.9, 12.5)])]
    text = write_report(Results("Mine", runs, checks=checks), tmp_path / "r.html").read_text("utf-8")
    assert "before fine-tuning" not in text
    assert text.count("<svg") == 1
    assert "12.5" in text
    assert "baseline" not in Page(text).text


@pytest.mark.parametrize(
    ("methods", "missing"),
    [
        (["Random", "global magnitude"], []),
        (["random (ERK)"], ["magnitude"]),
        (["magnitude, 2:4"], ["random"]),
        (["LAMP"], ["random", "magnitude"]),
    ],
)
def test_a_missing_baseline_is_said(methods: list[str], missing: list[str], tmp_path: Path) -> None:
    runs = [Run("random networks, dense", 0.0, 99.0), *(Run(method, 0.5, 90.0) for method in methods)]
    assert missing_baselines(summarize(runs)) == missing
    text = write_report(Results("Mine", runs), tmp_path / "r.html").read_text("utf-8")
    assert ("baseline</strong>" in text) == bool(missing)
    for baseline in missing:
        assert f"o {baseline}" in text


def test_the_checks_and_the_interval_are_in_the_page(page: Page) -> None:
    assert "what positions are worth" in page.text
    assert "98.0 ± 0.0" in page.text
    low, high = wilson(0.91, 719)
    assert f"{100 * low:.1f} – {100 * high:.1f}" in page.text


def test_channels_that_left_stand_beside_the_dense_network(page_path: Path, page: Page) -> None:
    """How many times smaller and faster each is than the first; nothing is said of sizes that are all the same."""
    assert "Channels that left" in page.text
    [table] = re.findall(r'<table[^>]* id="shrunken">.*?</table>', page_path.read_text(encoding="utf-8"), re.DOTALL)
    header, dense, _, channels, packed = re.findall("<tr>(.*?)</tr>", table, re.DOTALL)
    assert "times smaller" in header
    assert Page(dense).text.strip().startswith("dense")
    assert re.findall(r">([0-9.]+)×<", channels) == ["2.0", "2.0", "1.1", "1.6"]
    # the file, compressed, in memory, multiply-adds, one image, a batch
    assert re.findall(r">([0-9.]+)×<", packed) == ["2.6", "5.0", "2.7", "2.0", "1.1", "1.3"]
    assert "in memory" in header
    assert "58.0" in packed
    [table] = re.findall(r'<table[^>]* id="runs">.*?</table>', page_path.read_text(encoding="utf-8"), re.DOTALL)
    assert table.count("times smaller") == 1  # of the zipped file
    assert "batch" not in table


def test_a_failure_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(make_results(networks=()), path)
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_a_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'secateur\[report\]'"):
        write_report(make_results(), tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


@in_chromium
def test_the_address_sorts_a_table_under_the_policy(page_path: Path, tmp_path: Path) -> None:
    dom = chromium(tmp_path, f"{page_path.as_uri()}#sort=layers-1:weights:descending", "--dump-dom")
    assert column(dom, "layers-1", 2) == ["600", "77", "36"]
    assert column(dom, "layers-2", 2) == ["36", "600", "77"]  # the other table keeps its order
    assert len(re.findall("aria-sort", re.sub(r"<(style|script).*?</\1>", "", dom, flags=re.DOTALL))) == 1
    assert re.search(r'data-key="weights"[^>]* aria-sort="descending"', dom)


DRIVER = """
const found = {};
const table = document.getElementById("runs");
const button = table.querySelector('th[data-key="after"] button');
const order = () => Array.from(table.tBodies[0].rows, row => Number(row.querySelector(".after").dataset.value));
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
    assert found["first"] == [pytest.approx(sorted(afters, reverse=True)), "descending", "#sort=runs:after:descending"]
    assert found["second"] == [pytest.approx(sorted(afters)), "ascending", "#sort=runs:after:ascending"]
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
