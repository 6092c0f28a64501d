"""Text that is on every machine: the docstrings of installed packages, and Python's own language reference.

Law: what is calibrated or trained on and what is measured on share no text, because each text is there once and the
order, which has no meaning, is the same on every run.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def docstrings(root: str, packages: tuple[str, ...] | None = None) -> Iterator[str]:
    folders = [Path(root)] if packages is None else [Path(root, package) for package in packages]
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        inside = path.relative_to(root).parts
        if "tests" in inside or "test" in inside or (packages is None and "site-packages" in inside):
            continue
        yield from docstrings_of(path, 120)


def docstrings_of(path: Path, longer_than: int) -> Iterator[str]:
    """Those of one file, if it can be read."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > longer_than:
                yield text


@functools.cache
def of_modules() -> tuple[str, str]:
    """Docstrings of the standard library's modules that begin with a–m, to calibrate, and with n–z, to judge.

    0.4 million characters each, in the order of the modules; what stands in both is left out of the second.
    """
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    first = [text for path in paths if path.stem.lower() < "n" for text in docstrings_of(path, 80)]
    second = [text for path in paths if path.stem.lower() >= "n" for text in docstrings_of(path, 80)]
    known = set(first)
    return "\n\n".join(first), "\n\n".join(text for text in second if text not in known)


def shuffled(texts: Iterable[str]) -> list[str]:
    """Each text once, in an order of no meaning."""
    return sorted(set(texts), key=lambda text: hashlib.sha256(text.encode()).digest())


def of_the_standard_library() -> list[str]:
    """Its docstrings."""
    return shuffled(docstrings(sysconfig.get_path("stdlib")))


def of_installed(packages: tuple[str, ...]) -> Iterator[str]:
    """Docstrings of packages that are installed beside this one."""
    return docstrings(sysconfig.get_path("purelib"), packages)


@functools.cache
def of_packages() -> tuple[list[str], list[str]]:
    """Docstrings of the standard library, NumPy, scikit-learn and torch, and a twentieth of them held out."""
    texts = list(docstrings(sysconfig.get_path("stdlib")))
    texts += of_installed(("numpy", "sklearn", "torch"))
    texts = shuffled(texts)
    held_out = len(texts) // 20
    return texts[held_out:], texts[:held_out]


@functools.cache
def sentences() -> list[str]:
    """Sentences of the standard library's docstrings."""
    return shuffled(_sentences(docstrings(sysconfig.get_path("stdlib")), 50, 0.88))


def sentences_of_the_manual() -> list[str]:
    """Sentences of Python's manual that are in none of those docstrings."""
    return shuffled(set(_sentences([language_reference()], 50, 0.88)) - set(sentences()))


def _sentences(texts: Iterable[str], shortest: int, share: float) -> Iterator[str]:
    """Those of at least so many characters and 300 at most, of which a share are letters or spaces."""
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
                letters = sum(c.isalpha() or c == " " for c in sentence)
                if shortest <= len(sentence) <= 300 and letters > share * len(sentence):
                    yield sentence


def sentences_of_everything() -> list[str]:
    """Sentences of the docstrings of all that is installed, the standard library's too; some 200 000, in minutes."""
    roots = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    paths = [path for root in roots for path in sorted(root.rglob("*.py"))]
    texts = (text for path in dict.fromkeys(paths) for text in docstrings_of(path, 40))
    return shuffled(_sentences(texts, 30, 0.85))


@functools.cache
def language_reference() -> str:
    """The language reference that Python carries for ``help()``, 0.4 million characters, each paragraph once."""
    from pydoc_data.topics import topics

    paragraphs = dict.fromkeys(part for name in sorted(topics) for part in topics[name].split("\n\n"))
    return "\n\n".join(paragraphs)


def packed(tokenizer: Any, texts: list[str], length: int) -> Tensor:
    """The texts' tokens, an end after each, in rows of so many; what fills no row is left out."""
    end = tokenizer.token_to_id("<end>")
    tokens = [token for encoded in tokenizer.encode_batch(texts) for token in [*encoded.ids, end]]
    return torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)


def languages() -> dict[str, tuple[str, str]]:
    """Three languages, each to calibrate and to judge: English (docstrings), Python (the standard library without
    docstrings and comments) and C++ (torch's headers without comments).

    The files of each are split by an order of no meaning; 0.4 million characters at most each.
    """
    stdlib, headers = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent / "include/ATen"
    english, others = of_modules()
    python = list(filter(None, map(_code, sorted(stdlib.glob("*.py")))))
    comments = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
    plain = [comments.sub("", path.read_text("utf-8")) for path in sorted(headers.rglob("*.h"))]
    cpp = [re.sub(r"\n\s*\n+", "\n", text).strip() for text in plain if len(text) > 2000]
    found = {"English": (english, others)}
    for name, files in (("Python", shuffled(python)), ("C++", shuffled(cpp))):
        found[name] = "\n\n".join(files[::2]), "\n\n".join(files[1::2])
    return {name: (first[:400_000], second[:400_000]) for name, (first, second) in found.items()}


def _code(path: Path) -> str:
    """A module as Python writes it, without docstrings and comments; nothing of one that can't be read."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body[:1] = [ast.Pass()]
    return ast.unparse(tree)
