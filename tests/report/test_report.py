"""A report states what was measured, loads nothing, and survives any name."""

import base64
import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur.report import (
    Check,
    History,
    Network,
    Results,
    Run,
    count_multiply_adds,
    describe,
    load_results,
    missing_baselines,
    print_summary,
    save_results,
    summarize,
    write_report,
)
from secateur.report.results import Layer, environment
from secateur.report.summary import interval_of, wilson
from secateur.report.tables import columns_of

HOSTILE = "<script>alert(1)</script>"
HOSTILE_TOO = """"'></td></table><img src=x onerror=alert(1)>$\\frac{1}{0}$ & ]]> --> </script>"""


def make_results(**changes: object) -> Results:
    runs = [Run("dense", 0.0, 99.3 + 0.1 * seed, 99.4, seed, 158_000, 144_000, 1.1, 0.0, 900_000) for seed in range(3)]
    for number, method in enumerate(("magnitude, global", "LAMP", "magnitude, 2:4", HOSTILE, HOSTILE_TOO, "gradual")):
        for place, sparsity in enumerate((0.5, 0.8, 0.9, 0.95, 0.98) if number != 2 else (0.498,)):
            for seed in range(3):
                before = (97 - number, 60.0, 20.0, 12.0, 10.0)[place] + seed if method != "gradual" else None
                after = (99.4, 99.1, 98.5, 97.0, 75.0)[place] - number / 10 - seed / 5
                size = int(144_000 * (1 - sparsity) * 1.1)
                work = int(900_000 * (1 - sparsity) * (1 + number / 5))
                latency = 1.1 if seed == 0 else None
                runs.append(Run(method, sparsity, before, after, seed, 158_000, size, latency, sparsity * 0.98, work))
    torch.manual_seed(0)
    weights = {"stem.weight": torch.randn(4, 1, 3, 3), HOSTILE: torch.randn(30, 20), HOSTILE_TOO: torch.randn(7, 11)}
    networks = [
        describe("magnitude in detail", weights, {n: w.abs() > 1 for n, w in weights.items()}, method="LAMP"),
        describe(HOSTILE, weights, {n: w > 0.3 for n, w in weights.items()}, method=HOSTILE),
    ]
    given: dict[str, object] = {
        "title": f"Pruning {HOSTILE}",
        "runs": runs,
        "networks": networks,
        "text": [HOSTILE_TOO],
        "notes": [HOSTILE],
        "command": f"secateur demo {HOSTILE_TOO}",
        "examples": 719,
        "histories": [
            History("gradual", range(4), (0, 0.5, 0.9, 0.9), (0, 0.5, 0.4, 0)),
            History(HOSTILE, range(3), (0.9, 0.9, 0.9), (0, 0.1, 0.0)),
        ],
        "checks": [
            Check("LAMP as it is", HOSTILE, [Run("a", 0.9, 60.0, 98.0, seed) for seed in range(3)]),
            Check(HOSTILE_TOO, "what positions are worth", [Run("b", 0.9, 60.0, 91.0)]),
        ],
        "shrunken": [
            Run("dense", 0.0, 99.3, 99.4, 0, 158_000, None, 1.1, 0.0, 900_000, 8.0, 157_000, 155_000),
            Run(HOSTILE_TOO, 0.5, 97.0, 99.1, 0, 158_000, None, 1.1, 0.5, 450_000, 8.0),
            Run("channels", 0.52, 90.0, 98.7, 0, 79_000, None, 1.0, 0.5, 440_000, 5.0),
            Run("columns (packed)", 0.8, 90.0, 97.7, 0, 60_000, None, 1.0, 0.5, 440_000, 6.0, 58_000, 31_000),
        ],
    }
    return Results(**{**given, **changes})  # type: ignore[arg-type]


class Page(HTMLParser):
    """The tags of a page, its scripts, and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_results(), tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def page(page_path: Path) -> Page:
    return Page(page_path.read_text(encoding="utf-8"))


# -- the page --------------------------------------------------------------------------------------------------------


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


def test_colours_follow_the_page(page_path: Path) -> None:
    svg = re.findall(r"<svg.*?</svg>", page_path.read_text(encoding="utf-8"), re.DOTALL)
    assert len(svg) == 8  # before, after, size, work, layers, history, two histograms
    for one in svg:
        assert "var(--ink)" in one
        assert "#01000" not in one
        assert "#0200" not in one
        assert "aria-label" in one


def test_the_same_results_give_the_same_bytes(page_path: Path, tmp_path: Path) -> None:
    again = write_report(make_results(), tmp_path / "again.html")
    assert again.read_bytes() == page_path.read_bytes()


def test_the_readers_matplotlib_is_left_alone(tmp_path: Path) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 31.0, "axes.grid": False, "text.usetex": True}):
        before = dict(mpl.rcParams)
        write_report(make_results(networks=()), tmp_path / "report.html")
        assert dict(mpl.rcParams) == before


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


def test_as_many_methods_as_one_likes_have_looks_of_their_own(tmp_path: Path) -> None:
    from secateur.report.plots import _styles

    rows = summarize([Run(f"method {number}", 0.5, 50.0) for number in range(20)])
    assert len(set(_styles(rows).values())) == 20


@pytest.mark.parametrize("runs", [[Run("dense", 0.0, 99.0)], [Run("a", 0.5, 10.0, 10.0, zipped=5)]])
def test_a_single_run_is_enough(runs: list[Run], tmp_path: Path) -> None:
    assert "<svg" in write_report(Results("Mine", runs), tmp_path / "r.html").read_text("utf-8")


def test_a_failure_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(make_results(networks=()), path)
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere; create it"):
        save_results(make_results(), tmp_path / "nowhere" / "results.json")


def test_a_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'secateur\[report\]'"):
        write_report(make_results(), tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


# -- the results -----------------------------------------------------------------------------------------------------


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    results = make_results()
    save_results(results, tmp_path / "results.json")
    assert load_results(tmp_path / "results.json") == results


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"title": "x", "runs": 3}', '{"title": "x", "runs": [{"a": 1}]}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json does not hold the results of a report"):
        load_results(path)


def test_the_summary_by_hand() -> None:
    runs = [Run("a", 0.9, before, after, seed) for seed, (before, after) in enumerate([(1, 10), (2, 20), (6, 60)])]
    [row] = summarize([*runs])
    assert (row.before, row.before_range, row.after, row.after_range) == (3, (1, 6), 30, (10, 60))
    assert row.before_sd == pytest.approx(7**0.5)  # ((−2)² + (−1)² + 3²) / 2
    assert row.after_sd == pytest.approx(10 * 7**0.5)
    assert (row.seeds, row.bytes, row.latency_ms) == (3, None, None)


def test_wilsons_interval_by_hand() -> None:
    """9 of 10: (0.9 + 3.8416/20 ± 1.96·√(0.09/10 + 3.8416/400)) / (1 + 3.8416/10) = (1.09208 ± 0.26734) / 1.38416."""
    low, high = wilson(0.9, 10)
    assert low == pytest.approx((1.09208 - 0.26734) / 1.38416, abs=1e-5)
    assert high == pytest.approx((1.09208 + 0.26734) / 1.38416, abs=1e-5)
    assert wilson(1.0, 719)[1] == 1
    assert wilson(1.0, 719)[0] == pytest.approx(719 / (719 + 1.96**2))  # 1 / (1 + z²/n)


@given(st.floats(0, 1), st.integers(1, 10**6))
def test_laws_of_wilsons_interval(share: float, examples: int) -> None:
    """It holds the share, mirrors, narrows with more examples, and at its bounds the share is z deviations away."""
    low, high = wilson(share, examples)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1
    mirrored = wilson(1 - share, examples)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-9)
    narrower = wilson(share, 4 * examples)
    assert narrower[1] - narrower[0] < high - low
    for bound in (low, high):
        deviation = (bound * (1 - bound) / examples) ** 0.5
        assert abs(share - bound) == pytest.approx(1.96 * deviation, abs=1e-6)


@pytest.mark.parametrize(("share", "examples"), [(1.1, 5), (-0.1, 5), (float("nan"), 5), (0.5, 0)])
def test_no_share_no_interval(share: float, examples: int) -> None:
    with pytest.raises(ValueError, match=r"a share in \[0, 1\] of one example or more has an interval; got"):
        wilson(share, examples)


def test_only_percentages_of_known_examples_have_intervals() -> None:
    runs = [Run("a", 0.5, 50.0)]
    assert interval_of(Results("x", runs), 50.0) is None
    assert interval_of(Results("x", runs, unit="", examples=100), 50.0) is None
    assert interval_of(Results("x", runs, examples=100), None) is None
    assert interval_of(Results("x", runs, examples=100), 130.0) is None
    assert interval_of(Results("x", runs, examples=10), 90.0) == tuple(100 * bound for bound in wilson(0.9, 10))


def test_speed_up_is_against_the_dense_network() -> None:
    runs = [
        Run("dense", 0.0, 99, latency_ms=3.0, multiply_adds=12_000, zipped=800, overall=0.0),
        Run("a", 0.75, 90, latency_ms=1.5, multiply_adds=2_000, zipped=200, overall=0.6),
        Run("b", 0.75, 90),
    ]
    rows = summarize(runs)
    columns = {column.key: column for column in columns_of(Results("x", runs), rows)}
    assert [columns["multiply_adds"].show(row) for row in rows] == ["12", "2", "–"]
    assert columns["multiply_adds"].asides == {rows[0]: "1.0", rows[1]: "6.0"}
    assert columns["zipped"].asides == {rows[0]: "1.0", rows[1]: "4.0"}
    assert columns["overall"].asides == {rows[0]: "1.0", rows[1]: "2.5"}  # 1 / (1 - 0.6)
    assert columns["latency_ms"].asides == {rows[0]: "1.0", rows[1]: "2.0"}
    alone = summarize(runs[1:])
    assert not any(column.asides for column in columns_of(Results("x", runs), alone))


def test_multiply_adds_by_hand() -> None:
    """Weights that are not zero times the positions at which each is used."""
    ones = torch.ones(2, 4, 6, 6)
    plain = nn.Conv2d(4, 8, 3, stride=2, padding=1)  # 3 × 3 positions of 2 images
    assert count_multiply_adds(plain, ones) == 2 * 9 * 8 * 4 * 9
    grouped = nn.Conv2d(4, 8, 3, groups=2)  # 4 × 4 positions
    assert count_multiply_adds(grouped, ones) == 2 * 16 * 8 * 2 * 9
    transposed = nn.ConvTranspose2d(4, 3, 2, stride=2)  # each of 6 × 6 inputs meets every weight
    assert count_multiply_adds(transposed, ones) == 2 * 36 * 4 * 3 * 4
    linear = nn.Linear(6, 5)
    with torch.no_grad():
        linear.weight[:, 2:] = 0
    assert count_multiply_adds(linear, ones) == 2 * 4 * 6 * 5 * 2
    twice = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm2d(4))
    twice.append(twice[0])
    assert count_multiply_adds(twice, ones) == 2 * (2 * 4 * 6) * 36
    assert int(twice[1].num_batches_tracked) == 0
    assert all(module.training for module in twice.modules())


def test_counting_leaves_no_hook_after_a_failure() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    model[1].eval()
    with pytest.raises(RuntimeError):
        count_multiply_adds(model, torch.ones(2, 4))
    assert not model[0]._forward_hooks
    assert [module.training for module in model.modules()] == [True, True, False]


def test_a_mean_over_some_of_the_seeds_is_not_shown() -> None:
    [row] = summarize([Run("a", 0.9, 1, 10, 0), Run("a", 0.9, 2, None, 1)])
    assert (row.before, row.after, row.after_sd) == (1.5, None, None)
    [row] = summarize([Run("a", 0.9, 1, 10, 0), Run("a", 0.9, None, 20, 1)])
    assert (row.before, row.before_range, row.after) == (None, None, 15)


def test_sparsities_that_differ_by_rounding_share_a_row() -> None:
    assert len(summarize([Run("a", 0.90001, 1), Run("a", 0.89999, 2, seed=1), Run("a", 0.8, 3)])) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": 90}, r"run of 'a' with seed 0: sparsity is a fraction in \[0, 1\), not 90; 90 % is written 0.9"),
        ({"sparsity": 1.0}, "sparsity"),
        ({"sparsity": float("nan")}, "sparsity"),
        ({"before": float("nan")}, "before is nan"),
        ({"after": float("inf")}, "after is inf"),
        ({"zipped": 0}, "zipped is 0"),
        ({"latency_ms": -1.0}, "latency_ms is -1"),
        ({"multiply_adds": 0}, "multiply_adds is 0"),
        ({"memory": 0}, "memory is 0"),
        ({"compressed": -1}, "compressed is -1"),
        ({"overall": 1.0}, r"overall is a fraction in \[0, 1\), not 1.0"),
        ({"before": None}, "neither before nor after was measured"),
    ],
)
def test_impossible_runs_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Run(**{"method": "a", "sparsity": 0.5, "before": 1.0, **change})  # type: ignore[arg-type]


def test_impossible_results_are_refused() -> None:
    with pytest.raises(ValueError, match="hold no runs"):
        Results("empty", ())
    with pytest.raises(ValueError, match="examples is 0; leave it out"):
        make_results(examples=0)
    with pytest.raises(ValueError, match="check 'x' holds no runs"):
        Check("x", "", ())
    with pytest.raises(ValueError, match="history of 'x': 2 steps, 1 sparsities and 2 churns"):
        History("x", (0, 1), (0.0,), (0.0, 0.0))
    with pytest.raises(ValueError, match=r"history of 'x': churn is a fraction in \[0, 1\], not 50"):
        History("x", (0,), (0.0,), (50,))
    with pytest.raises(TypeError, match="sequence of paragraphs"):
        make_results(text="one string")
    with pytest.raises(ValueError, match=r"head has 6 weights of shape \(2, 3\); 7 cannot be kept"):
        Layer("head", (2, 3), 7)
    with pytest.raises(ValueError, match=r"n \+ 1 edges"):
        Network("x", (), (0.0, 1.0), (1, 2), (3, 4))


def test_describe_counts_every_weight_once() -> None:
    torch.manual_seed(1)
    weights = {"a": torch.randn(5, 7).half(), "b": torch.randn(3, 2, 3, 3).mT, "no mask": torch.randn(4)}
    masks = {name: weights[name].abs() > 0.7 for name in ("a", "b")}
    network = describe("x", weights, masks, bins=7)
    assert sum(network.kept) == sum(int(mask.sum()) for mask in masks.values())
    assert sum(network.kept) + sum(network.removed) == 35 + 54
    assert [(layer.name, layer.shape, layer.weights) for layer in network.layers] == [
        ("a", (5, 7), 35),
        ("b", (3, 2, 3, 3), 54),
    ]
    assert network.edges[0] == -network.edges[-1] == pytest.approx(-max(float(weights[n].abs().max()) for n in masks))
    assert describe("zeros", {"z": torch.zeros(3)}, {"z": torch.ones(3, dtype=torch.bool)}, bins=2).kept == (0, 3)


def test_describe_names_what_does_not_fit() -> None:
    weight = torch.ones(2, 3)
    with pytest.raises(ValueError, match="a mask for b but no weight; weights has a"):
        describe("x", {"a": weight}, {"b": weight > 0})
    with pytest.raises(ValueError, match=r"mask of a has shape \(3, 2\), its weight \(2, 3\)"):
        describe("x", {"a": weight}, {"a": weight.T > 0})
    with pytest.raises(ValueError, match="a holds inf or NaN"):
        describe("x", {"a": weight / 0}, {"a": weight > 0})


def test_the_terminal_table_fits_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [dataclasses.replace(run, method=run.method[:16]) for run in make_results().runs]
    shrunken = [dataclasses.replace(run, method=run.method[:16]) for run in make_results().shrunken]
    print_summary(make_results(runs=runs, shrunken=shrunken, title="Pruning"))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "99.4 ± 0.0" in out
    assert "Sanity checks, 90.0 % removed" in out
    assert "LAMP as it is" in out
    assert re.search(r"^channels +52\.0 +98\.7 +79\.0 +440 +1\.00 +5\.00$", out, re.MULTILINE)
    assert HOSTILE[:16] in out  # rich markup would be swallowed


# -- in a browser ----------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium")
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")


def chromium(profile: Path, address: str, *options: str) -> str:
    """What headless Chromium prints for a page, without any network."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", *options, address,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    return done.stdout.decode()


def column(dom: str, table: str, index: int) -> list[str]:
    """The sort keys of a column of a table, in the order shown."""
    [body] = re.findall(rf'<table class="sortable[^"]*" id="{table}">.*?<tbody>(.*?)</tbody>', dom, re.DOTALL)
    return [re.findall(r'data-value="([^"]*)"', row)[index] for row in body.split("</tr>")[:-1]]


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
def test_it_is_drawn_in_light_and_dark_and_on_paper(page_path: Path, tmp_path: Path) -> None:
    from matplotlib import image

    for number, (option, light) in enumerate((("preferredColorScheme=1", True), ("preferredColorScheme=0", False))):
        picture = tmp_path / f"{number}.png"
        chromium(
            tmp_path,
            page_path.as_uri(),
            f"--blink-settings={option}",
            f"--screenshot={picture}",
            "--window-size=900,900",
        )
        pixels = image.imread(picture)[..., :3]
        assert (pixels[5, 5].mean() > 0.9) == light
        assert pixels.std() > 0.03
    paper = tmp_path / "page.pdf"
    chromium(tmp_path, page_path.as_uri(), f"--print-to-pdf={paper}")
    assert paper.read_bytes().startswith(b"%PDF")
