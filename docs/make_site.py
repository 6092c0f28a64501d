"""What `make docs` shows beside the files of docs/: the README, the results, the files that pages link to, a reference.

Law: nothing is written but the site, and every relative link of a page leads to a page of it. The reference has the
names that the library itself lists: those of the front door, and what every package that one imports from names.
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/secateur"
WORDS = ["targets", "criteria", "patterns", "allocation", "schedules", "regrowth", "kinds", "runtimes", "operations"]
ROOMS = ["prune", "evidence", "solvers", "models", "coupling", "inference", "storage", "report"]
FRAMEWORKS = ["integrations.transformers", "integrations.lightning"]
ELSEWHERE = ["integrations.ultralytics"]  # of what the environment of the tests has not
BESIDE = ["pipeline", "training", "shrinking", "vocabulary", "checkpoints"]  # of these, what guides name
FROM_THE_ROOT = dict.fromkeys(("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")) | {
    "README.md": "index.md"
}
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\[\]]*\])*\])\(([^()\s]+)\)")
BOOSTS = {
    "start": 4,
    "guides": 2,
    "files": 0.5,
    "benchmarks": 0.5,
}  # who searches looks for an answer, then for a figure
CODE = re.compile(r"`[^`]+`")
FENCED = re.compile(r"(^ *(?:```|~~~).*?^ *(?:```|~~~)[^\n]*$)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\|.*", re.MULTILINE)
FOLLOWS = re.compile(r"<!-- follows (\S+) at (\w+) -->\s*")
CHINESE = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"


# -- the reference ----------------------------------------------------------------------------------------------------


def exported(module: str) -> list[str]:
    """What ``__all__`` names; of a package without one, what it imports; of a module, its classes and functions."""
    path = SOURCE / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    if path.is_dir():
        doors = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        return sorted(alias.asname for node in doors for alias in node.names if alias.asname)
    made = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return sorted(name for name in made if not name.startswith("_"))


def front_door() -> dict[str, str]:
    """``{name: package}`` of the names of ``secateur`` that are no modules."""
    tree = ast.parse((SOURCE / "__init__.pyi").read_text(encoding="utf-8"))
    found = [
        (node.module, alias.name) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    return {name: module for module, name in found if module is not None and name != "__version__"}


def named_by_guides(module: str) -> list[str]:
    """Those of a package's names that a guide imports or names in full."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    imported = re.findall(rf"from secateur\.{module}(?:\.\w+)? import ([^\n(#]+)", pages)
    named = {word.split(" as ")[0].strip() for line in imported for word in line.split(",")}
    named |= set(re.findall(rf"secateur\.{module}\.(?:\w+\.)?(\w+)", pages))
    return sorted(named & set(exported(module)))


def definition(name: str) -> griffe.Object | None:
    """What a dotted name of the library is, wherever it was defined; None of one that is assigned beside others."""
    found = LOADED[name.removeprefix("secateur.")]
    try:
        return found.final_target if found.is_alias else found
    except griffe.AliasResolutionError:
        return None


def first_sentence(name: str) -> str:
    found = definition(name)
    docstring = found.docstring if found else None
    text = " ".join(docstring.value.split("\n\n")[0].split()) if docstring else ""
    return re.split(r"(?<=[.])(?<!al\.)\s+(?=[A-Z`])", text)[0].replace("|", r"\|")


def reference() -> dict[str, str]:
    """``{page: Markdown}``."""
    front = front_door()
    verbs = {
        f"secateur.{name}": f"secateur.{package}.{name}"
        for name, package in sorted(front.items())
        if package != "patterns"
    }
    pages = {"verbs": page_of("secateur: the verbs", None, verbs)}
    taken = {name.rpartition(".")[2] for name in verbs}
    for module in [*WORDS, *ROOMS, *BESIDE, *FRAMEWORKS, *ELSEWHERE]:
        names = named_by_guides(module) if module in BESIDE else exported(module)
        names = [name for name in names if name not in taken]
        if names:
            full = f"secateur.{module}"
            pages[module.replace("integrations.", "")] = page_of(
                full, full, {f"{full}.{name}": f"{full}.{name}" for name in names}
            )
    return {f"reference/{page}.md": text for page, text in {"index": index_of(front, pages), **pages}.items()}


def page_of(title: str, module: str | None, names: dict[str, str]) -> str:
    """A page of ``{as it is imported: where the library itself has it}``."""
    about = LOADED[module.removeprefix("secateur.")].docstring if module else LOADED.docstring
    found = {public: definition(name) for public, name in names.items()}
    body = [f"# {title}", fenced(about.value) if about else ""]
    body += [f"## `{name}`\n\nA constant." for name, thing in found.items() if thing is None]
    things = [(name, thing) for name, thing in found.items() if thing is not None]
    for name, thing in sorted(things, key=lambda each: not each[1].is_attribute):
        body.append(
            f"::: {thing.path}\n    options:\n      heading: {name}\n      toc_label: {name.rpartition('.')[2]}"
        )
    return "\n\n".join(body) + "\n"


def index_of(front: dict[str, str], pages: dict[str, str]) -> str:
    rows = []
    for name, package in sorted(front.items()):
        page, full = "patterns" if package == "patterns" else "verbs", f"secateur.{package}.{name}"
        rows.append(f"| [`{name}`]({page}.md#{definition(full).path}) | {first_sentence(full)} |")
    titles = {page: text.split("\n")[0].removeprefix("# ") for page, text in pages.items() if page != "verbs"}
    more = [f"| [`{title}`]({page}.md) | {first_sentence(title)} |" for page, title in titles.items()]
    return "\n".join(
        [
            "# Reference",
            "",
            "Every public name, from its docstring. The names of `secateur` itself:",
            "",
            "| name | what it does |",
            "|---|---|",
            *rows,
            "",
            "And of the modules in it:",
            "",
            "| module | what is there |",
            "|---|---|",
            *more,
            "",
        ]
    )


class Docstrings(griffe.Extension):
    """What the library's docstrings have and griffe does not read: examples anywhere, parameters that share a line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(one_by_one(obj.docstring.value))


def one_by_one(docstring: str) -> str:
    """Parameters that are described together, each with the description.

    >>> print(one_by_one("Args:\\n    a, b: sizes,\\n        in bytes.\\n    c: a name."))
    Args:
        a: sizes,
            in bytes.
        b: sizes,
            in bytes.
        c: a name.
    """
    together = re.compile(r"^(    )(\w+(?:, \w+)+)(: .*(?:\n {8}.*)*)", re.MULTILINE)
    return together.sub(
        lambda found: "\n".join(f"{found[1]}{name}{found[3]}" for name in found[2].split(", ")), docstring
    )


def fenced(docstring: str) -> str:
    """The same, with each example in a fence.

    >>> fenced("It adds.\\n\\n>>> 1 + 1\\n2")
    'It adds.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    blocks = []
    for block in re.split(r"\n[ \t]*\n", docstring):
        indent = re.match(r" *", block).group()
        blocks.append(f"{indent}```pycon\n{block}\n{indent}```" if block.lstrip().startswith(">>>") else block)
    return "\n\n".join(blocks)


# -- the pages --------------------------------------------------------------------------------------------------------

LOADED = griffe.load("secateur", search_paths=[str(SOURCE.parent)], resolve_aliases=True)
ORIGINS: dict[str, Path] = {}  # {page: the file that it shows}
PLACES: dict[Path, str] = {}  # the other way round


def on_config(config: Any) -> None:
    """The pages that mkdocs.yml does not name are added to their section."""
    sections = {next(iter(section)): next(iter(section.values())) for section in config.nav}
    named = {page for pages in sections.values() for page in pages}
    docs = ROOT / "docs"
    found = {
        "Guides": [f"guides/{page.name}" for page in sorted(docs.glob("guides/*.md"))],
        "Notes": [f"notes/{page.name}" for page in sorted(docs.glob("notes/*.md"))],
        "Coming from": sorted(f"migrate/{page.name}" for page in docs.glob("migrate/*.md")),
        "Figures": [page.relative_to(ROOT).as_posix() for page in sorted((ROOT / "benchmarks").glob("*/RESULTS.md"))],
        "Reference": list(reference()),
    }
    for section, pages in found.items():
        sections[section] += [page for page in pages if page not in named]
    chinese = sorted(docs.glob("zh-TW/*.md"), key=lambda page: (page.name != "README.md", page.name))
    if chinese:
        config.nav.append({"中文": [f"zh-TW/{page.name}" for page in chinese]})


def on_files(files: Any, config: Any) -> Any:
    """Adds what no file of docs/ is; the last are the files that pages link to."""
    ORIGINS.clear()
    PLACES.clear()
    for file in files.documentation_pages():
        note(file.src_uri, ROOT / "docs" / file.src_uri)
    for name, page in FROM_THE_ROOT.items():
        add(files, config, page or name, ROOT / name)
    for path in [ROOT / "benchmarks/README.md", *sorted((ROOT / "benchmarks").rglob("RESULTS.md"))]:
        add(files, config, path.relative_to(ROOT).as_posix(), path)
    for path in sorted({target for page in ORIGINS.values() for target in linked_files(page)}):
        if path not in PLACES and path.is_file() and path.suffix != ".svg":
            name = path.relative_to(ROOT).as_posix()
            add(files, config, f"files/{name}.md", path)
    for page, text in reference().items():
        files.append(File.generated(config, page, content=text))
    for file in files.documentation_pages():
        if file.src_uri.startswith("files/"):
            file.inclusion = type(file.inclusion).NOT_IN_NAV
    return files


def note(page: str, path: Path) -> None:
    ORIGINS[page] = path.resolve()
    PLACES[path.resolve()] = page


def add(files: Any, config: Any, page: str, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = of_notebook(text)
    elif path.suffix != ".md":
        kind = {".py": "python", ".yml": "yaml", ".toml": "toml", "": "text"}.get(path.suffix, "text")
        text = f"# {path.relative_to(ROOT).as_posix()}\n\n````{kind}\n{text}````\n"
    files.append(File.generated(config, page, content=text))
    note(page, path)


def of_notebook(text: str) -> str:
    """A notebook as a page: its prose, and its code in fences.

    >>> of_notebook('{"cells": [{"cell_type": "markdown", "source": ["# A"]}, {"cell_type": "code", "source": ["1"]}]}')
    '# A\\n\\n```python\\n1\\n```\\n'
    """
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(said if kind == "markdown" else f"```python\n{said}\n```" for kind, said in cells) + "\n"


def linked_files(page: Path) -> set[Path]:
    if page.suffix != ".md":
        return set()
    links = (link for _, link in LINK.findall(page.read_text(encoding="utf-8")))
    return {(page.parent / unquote(link.split("#")[0])).resolve() for link in links if is_relative(link)}


def is_relative(link: str) -> bool:
    return not re.match(r"[a-z]+:|#|/", link)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links are of the repository in the files, and of the site here."""
    uri = page.file.src_uri
    if (boost := BOOSTS.get(uri.split("/")[0])) is not None:
        page.meta.setdefault("search", {})["boost"] = boost
    if uri.startswith("zh-TW/"):
        followed, digest = FOLLOWS.match(markdown).groups()  # a test says that there is such a line
        markdown = FOLLOWS.sub("", markdown)  # a title comes first
        markdown += f"\n\n*譯自英文版 `{followed}`，版本 {digest}。*\n"
        markdown = re.sub(rf"(?<={CHINESE})\n(?={CHINESE})", "", markdown)  # a line's end is no space
    origin = ORIGINS.get(uri)
    if origin is None or origin.suffix != ".md":
        return markdown

    def moved(found: re.Match[str]) -> str:
        text, link = found.groups()
        text = LINK.sub(moved, text)  # a picture that is a link
        if not is_relative(link):
            return f"{text}({link})"
        path, _, anchor = link.partition("#")
        target = (origin.parent / unquote(path)).resolve()
        place = PLACES.get(target)
        if place is None and target.is_relative_to(ROOT / "docs"):
            place = target.relative_to(ROOT / "docs").as_posix()
        if place is None:
            return f"{text}({link})"  # mkdocs says that it leads nowhere
        return f"{text}({os.path.relpath(place, os.path.dirname(uri) or '.')}{'#' + anchor if anchor else ''})"

    def shown(prose: str) -> str:
        """Links may be broken over lines; what others want escaped in a row's code, Markdown of Python shows as is."""
        prose = ROW.sub(lambda row: CODE.sub(lambda code: code.group().replace("\\|", "|"), row.group()), prose)
        return LINK.sub(moved, prose)

    return "".join(part if number % 2 else shown(part) for number, part in enumerate(FENCED.split(markdown)))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """A browser chooses the shapes of Chinese characters by the language that a page names."""
    if page.file.src_uri.startswith("zh-TW/"):
        return output.replace('<html lang="en"', '<html lang="zh-Hant-TW"', 1)
    return output


def on_post_build(config: Any, **_: Any) -> None:
    """A page that would load anything from elsewhere fails the build."""
    outside = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*\bhref=["']?(?:https?:)?//"""
    )
    for page in Path(config.site_dir).rglob("*.html"):
        if found := outside.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.name} loads something from outside: {found.group()}")
