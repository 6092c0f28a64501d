"""Runs every verb on the models of other libraries, each in a process of its own, and writes a row for each.

python -m tests.wild.run [REGISTRY ...] [--only GLOB] [--quick] [--json OUT] [--limit SECONDS] [--again]

``--json`` is read first: rows of models that do not run now stay. The exit status is 1 where a model is wrong, or
raises what no user is to read.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .models import models_of, registries

QUICK: tuple[tuple[str, str], ...] = ()
MEMORY = 10 << 30  # bytes that a process may ask for
_BAD = ("wrong", "crash", "timeout")


def main() -> int:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("registry", nargs="*", help="of these only")
    read.add_argument("--only", help="a glob of names")
    read.add_argument("--quick", action="store_true", help="the fixed few")
    read.add_argument("--json", type=Path, help="where the rows are, or become")
    read.add_argument("--limit", type=float, default=180.0, help="seconds for one model, with all verbs")
    read.add_argument("--bad", action="store_true", help="only those whose row is not right, or that have none")
    asked = read.parse_args()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if asked.json and asked.json.exists():
        rows = {(each["registry"], each["name"]): each for each in json.loads(asked.json.read_text())}
    mine = []
    for registry, name in _chosen(asked):
        if asked.bad and rows.get((registry, name), {}).get("status") == "right":
            continue
        rows[registry, name] = row = _run(registry, name, asked.limit)
        mine.append(row)
        print(_line(row), flush=True)
        if asked.json:
            asked.json.write_text(
                "[\n" + ",\n".join(json.dumps(rows[key], sort_keys=True) for key in sorted(rows)) + "\n]\n"
            )
    print(_summary(mine))
    return int(any(is_bad(row) for row in mine))


def _chosen(asked: argparse.Namespace) -> list[tuple[str, str]]:
    if asked.quick:
        return [each for each in QUICK if not asked.registry or each[0] in asked.registry]
    every = [each for registry in asked.registry or registries() for each in models_of(registry)]
    return [(each.registry, each.name) for each in every if not asked.only or fnmatch.fnmatch(each.name, asked.only)]


def _run(registry: str, name: str, limit: float) -> dict[str, Any]:
    """The row of a model; a process that dies, or takes too long, leaves what it had written until then."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "row.json"
        command = [sys.executable, "-m", f"{__package__}.one", registry, name, str(path)]
        row: dict[str, Any] = {"registry": registry, "name": name, "status": "crash"}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command, timeout=limit, capture_output=True, text=True, env=environment, preexec_fn=_limited
            )
        except subprocess.TimeoutExpired:
            row |= json.loads(path.read_text()) if path.exists() else {"status": "timeout"}
            return row | {"stopped": f"after {limit:g} s"}
        row |= json.loads(path.read_text()) if path.exists() else {}
        if done.returncode:
            words = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
            row |= {"stopped": words[0][:300]}
            row["status"] = "crash" if row["status"] == "timeout" else row["status"]
        return row


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def is_bad(row: dict[str, Any]) -> bool:
    others = (str(row.get(verb, "")) for verb in ("sparsify", "pruner", "oneshot", "saved"))
    return row["status"] in _BAD or any(each.startswith(("wrong", "crash")) for each in others)


def _line(row: dict[str, Any]) -> str:
    others = {
        verb: row[verb] for verb in ("sparsify", "pruner", "oneshot", "saved") if row.get(verb, "right") != "right"
    }
    return (
        f"{row['registry']:12} {row['name']:34} {row['status']:9} {row.get('got', 0):6.1%} of at most "
        f"{row.get('most', 0):5.1f} % {row.get('seconds', 0):6.1f} s {row.get('peak', 0):5} MB "
        f" {row.get('message', '')} {row.get('stopped', '')} {others or ''}"
    )


def _summary(rows: list[dict[str, Any]]) -> str:
    counts = {
        word: sum(row["status"] == word for row in rows)
        for word in ("right", "refused", "unjudged", "wrong", "crash", "timeout")
    }
    seconds = sorted(row["seconds"] for row in rows if "seconds" in row) or [0.0]
    said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"{len(rows)} models: {said}; seconds: median {statistics.median(seconds):.1f}, most {seconds[-1]:.1f}"


if __name__ == "__main__":
    sys.exit(main())
