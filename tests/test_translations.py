"""What docs/zh-TW says is what the English pages say now: each names the page that it follows, and that page's digest.

Law: an English page that changes fails its translation's test, until someone has read both and writes the new digest.
"""

import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRANSLATIONS = sorted((ROOT / "docs/zh-TW").glob("*.md"))
FIRST_LINE = re.compile(r"<!-- follows (\S+) at ([0-9a-f]{16}) -->\n")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def followed(page: Path) -> tuple[str, str]:
    found = FIRST_LINE.match(page.read_text(encoding="utf-8"))
    assert found, f"{page.name} does not begin with the page that it follows"
    return found[1], found[2]


def test_there_are_three():
    assert {page.name for page in TRANSLATIONS} >= {"README.md", "drop-in.md", "which-method.md"}


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
def test_it_follows_the_english_page_as_it_is(page):
    english, digest = followed(page)
    now = hashlib.sha256((ROOT / english).read_bytes()).hexdigest()[:16]
    stale = f"{english} has changed: bring docs/zh-TW/{page.name} up to date, and write {now} in its first line"
    assert digest == now, stale


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
def test_its_code_is_that_of_the_english_page(page):
    english, _ = followed(page)
    ours, theirs = (FENCE.findall(file.read_text(encoding="utf-8")) for file in (page, ROOT / english))
    assert ours == theirs


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
def test_it_has_the_figures_and_rows_of_the_english_page(page):
    english, _ = followed(page)
    counts = []
    for file in (page, ROOT / english):
        lines = FENCE.sub("", file.read_text(encoding="utf-8")).splitlines()
        counts.append((sum(line.startswith("|") for line in lines), sum(line.startswith("## ") for line in lines)))
    assert counts[0] == counts[1]
