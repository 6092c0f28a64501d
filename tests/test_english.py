"""README, first pages and guides are short to read: sentences of few words, lines that fit, figures that were measured.

Docstrings are held to the same list of odd phrases.

Law: a figure that the README shows stands in benchmarks/RESULTS.md.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FIRST = [ROOT / "README.md", *sorted((ROOT / "docs/start").glob("*.md")), *sorted((ROOT / "docs/migrate").glob("*.md"))]
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
NOTES = sorted((ROOT / "docs/notes").glob("*.md"))
ODD = re.compile(
    r"\b(?:anew|how-manieth|of one's own|in the mean|wished for|to be had|made up for|as many as there are"
    r"|(?:is|are|was) told|lack(?:s|ed|ing)?|what (?:it|they|that) comes? to|meetings?|gone on with)\b"
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sentences(markdown: str) -> list[str]:
    """The sentences of the paragraphs and lists; what is in fences, tables, headings and addresses is none."""
    prose = re.sub(r"^ *(```|~~~).*?^ *\1", "\n\n", markdown, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if not line.lstrip().startswith(("|", "#", "!", "<"))]
    prose = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    blocks = re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", prose)
    found = [sentence for block in blocks for sentence in re.split(r"(?<=[.?!])\s+", " ".join(block.split()))]
    return [sentence for sentence in found if len(re.findall(r"\w+", sentence)) > 2]


def prose_of(docstring: str) -> str:
    """A docstring without examples, ``code``, `names`, and the names that its sections explain."""
    text = re.sub(r"^ *(?:>>>|\.\.\.).*$", "", docstring, flags=re.MULTILINE)
    text = re.sub(r"``.*?``|`[^`]*`", "code", text, flags=re.DOTALL)
    return " ".join(re.sub(r"^ {4,}\w+(?:, \w+)*:(?= )", "name:", text, flags=re.MULTILINE).split())


def odd_in(module: Path) -> list[str]:
    """The odd phrases in a module's docstrings, each with the line at which its docstring begins."""
    nodes = [node for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))) if isinstance(node, DOCUMENTED)]
    texts = [(node.body[0].lineno, ast.get_docstring(node, clean=False)) for node in nodes if node.body]
    return [f"{module.name}:{line}: {odd}" for line, text in texts if text for odd in ODD.findall(prose_of(text))]


def words(sentence: str) -> int:
    return len(re.sub(r"`[^`]*`", "code", sentence).split())


def test_sentences_are_told_apart():
    prose = "# No\n\nOne two three. Four five six!\n\n- Seven eight [nine](ten.md) `a b c`.\n"
    page = f"{prose}\n```python\nx = 1\n```\n| a | b |\n"
    assert sentences(page) == ["One two three.", "Four five six!", "- Seven eight [nine] `a b c`."]
    assert words("Seven `a b c` eight.") == 3


def test_there_are_pages_to_look_at():
    assert len(FIRST) >= 9
    assert len(GUIDES) >= 19
    assert len(NOTES) >= 5


@pytest.mark.parametrize("page", FIRST, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_it_is_plain(page):
    text = page.read_text(encoding="utf-8")
    long = [line for line in text.splitlines() if len(line) > 120]
    assert not long, f"longer than 120 characters: {long}"
    plain(text)


@pytest.mark.parametrize("page", GUIDES + NOTES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_guide_is_plain(page):
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^ *(```|~~~)text.*?^ *\1", "", text, flags=re.MULTILINE | re.DOTALL)  # what was printed is as wide
    printed = re.findall(r"^```console\n.*?^```", prose, re.MULTILINE | re.DOTALL)
    printed = {line for block in printed for line in block.splitlines() if not line.startswith("$ ")}
    rows = [line for line in prose.splitlines() if not line.startswith(("|", "![")) and line not in printed]
    long = [line for line in rows if len(line) > 120]
    assert not long, f"longer than 120 characters: {long}"
    plain(text)


def plain(text):
    counts = [words(sentence) for sentence in sentences(text)]
    assert counts
    mean = sum(counts) / len(counts)
    assert mean < 18, f"{mean:.1f} words a sentence"
    assert max(counts) <= 45, max(sentences(text), key=words)
    assert not ODD.findall(text)


def test_the_prose_of_a_docstring_has_neither_code_nor_names(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        'def f(lack):\n    """It lacks ``lack``.\n\n    >>> lack = 1\n\n    Args:\n        lack: is told.\n    """\n'
    )
    assert odd_in(module) == ["module.py:2: lacks", "module.py:2: is told"]


def test_docstrings_are_plain():
    assert not [odd for module in sorted((ROOT / "src/secateur").rglob("*.py")) for odd in odd_in(module)]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_guide_opens_with_what_most_people_came_for(page):
    """Code or a command, on the first screen."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert any(line.startswith(("```python", "```console")) for line in lines[:10])


def test_the_glossary_is_in_order_and_has_the_words_of_the_house():
    page = (ROOT / "docs/start/glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([^|]+?) \|", page, re.MULTILINE)[1:]
    keys = [word.strip("`").lower() for word in words]
    assert len(words) >= 40
    assert keys == sorted(set(keys))
    law = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("Words have one meaning: ")[1].split("\n\n")[0]
    assert set(re.findall(r"\*([^*]+)\*", law)) <= set(words)


def test_the_readme_is_one_screen_and_a_table():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90


def test_figures_of_the_readme_were_measured():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    results = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    section = readme.split("## Five figures")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 5
    figures = [figure for row in rows for figure in re.findall(r"\d*\.?\d+", row)]
    assert len(figures) >= 7
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", results), f"{figure} is not in RESULTS.md"


def test_figures_of_missed_goals_are_those_of_the_results():
    limits = (ROOT / "docs/start/limits.md").read_text(encoding="utf-8").split("## Goals that were missed")[1]
    results = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    missed = "\n".join(line for line in results.splitlines() if "**missed" in line or "missed**" in line)
    figures = [figure for line in limits.splitlines() if "goal" in line for figure in re.findall(r"\d*\.\d+", line)]
    assert len(figures) >= 12
    for figure in figures:
        assert re.search(rf"(?<![\d.])0?{re.escape(figure.lstrip('0'))}(?!\d)", missed), f"{figure} was missed nowhere"


def test_the_picture_of_the_guide_is_drawn_from_the_results():
    from docs import make_readme_figure as figure

    text = figure.RESULTS.read_text(encoding="utf-8")
    found, times = figure.perplexities(text), figure.milliseconds(text)
    assert all(len(found[method]) == 3 for method in figure.METHODS)
    ours = [found["**`shrink` with data**"][share] for share in sorted(found["**`shrink` with data**"])]
    summary = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    assert ", ".join(f"{value:.2f}" for value in ours) in summary
    assert f"whole: {found['dense'][0.0]:.2f}" in summary
    assert set(times) == {"whole", "−20 %", "−30 %"}


def test_the_picture_is_drawn_of_what_the_results_say_now():
    from docs import make_readme_figure as figure

    drawn = figure.described(figure.RESULTS.read_text(encoding="utf-8"))
    assert drawn in figure.FILE.read_text(encoding="utf-8"), "run python docs/make_readme_figure.py"


def test_the_picture_of_the_readme_shows_every_row_that_was_measured():
    from docs import make_readme_figure as figure

    text = figure.VERBS_RESULTS.read_text(encoding="utf-8")
    found = figure.verbs(text)
    assert set(found) == {*figure.DOTS, *figure.LINES}
    assert all(len(found[dot]) == 1 for dot in figure.DOTS)
    assert all(len(found[line]) >= 2 for line in figure.LINES)
    assert figure.told(text) in figure.VERBS_FILE.read_text(encoding="utf-8"), "run python docs/make_readme_figure.py"
    assert f"docs/{figure.VERBS_FILE.name}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_picture_of_the_cnn_is_drawn_of_what_was_measured():
    from docs import make_readme_figure as figure

    text = figure.VERBS_RESULTS.read_text(encoding="utf-8")
    found = figure.zeros(text)
    assert set(found) == {*figure.ZEROS_DOTS, *figure.ZEROS_LINES}
    assert all(len(found[dot]) == 1 for dot in figure.ZEROS_DOTS)
    assert all(len(found[line]) >= 3 for line in figure.ZEROS_LINES)
    written = figure.ZEROS_FILE.read_text(encoding="utf-8")
    assert figure.told_of_zeros(text) in written, "run python docs/make_readme_figure.py"
    assert f"../{figure.ZEROS_FILE.name}" in (ROOT / "docs/guides/faster.md").read_text(encoding="utf-8")


def test_the_picture_of_the_detector_is_drawn_of_what_was_measured():
    from docs import make_readme_figure as figure

    text = figure.DETECTORS_RESULTS.read_text(encoding="utf-8")
    found = figure.detectors(text)
    assert {("dense", "at once"), ("shrink", "at once"), ("narrower", "after 20")} <= set(found)
    assert len(found["shrink", "at once"]) == 3
    assert figure.told_of_detectors(text) in figure.DETECTORS_FILE.read_text(encoding="utf-8"), (
        "run python docs/make_readme_figure.py"
    )
    assert f"../{figure.DETECTORS_FILE.name}" in (ROOT / "docs/guides/detector.md").read_text(encoding="utf-8")


def test_the_picture_of_deploy_is_drawn_of_what_was_measured():
    from docs import make_readme_figure as figure

    text = figure.DEPLOYED_RESULTS.read_text(encoding="utf-8")
    found = figure.deployed(text)
    assert set(found) == {*figure.DEPLOYED}
    for _, points in found.values():
        assert points[0][0].startswith("dense, float32")
        assert len(points) >= 4
    assert figure.told_of_deployed(text) in figure.DEPLOYED_FILE.read_text(encoding="utf-8"), (
        "run python docs/make_readme_figure.py"
    )
    assert f"../{figure.DEPLOYED_FILE.name}" in (ROOT / "docs/guides/deploy.md").read_text(encoding="utf-8")
