"""Runs every verb on the models of other libraries, each in a process of its own, and writes a row for each.

python -m tests.wild.run [REGISTRY ...] [--only GLOB] [--quick | --layouts] [--json OUT] [--limit SECONDS]

``--json`` is read first: rows of models that do not run now stay. The exit status is 1 where a model is wrong, or
raises what no user is to read.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import fnmatch
import json
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .models import Wild, models_of, registries
from .one import LAYOUTS, VERBS, tried

QUICK = {  # fifteen of as many kinds, quick to run and of libraries that are quick to install
    "diffusers": "UNet2DConditionModel",
    "timm": "ghostnet_050 test_byobnet test_convnext test_efficientnet test_maxvit test_resnet test_vit",
    "torch_geometric": "GAT GIN",
    "torchvision": "fcos_resnet50_fpn lraspp_mobilenet_v3_large squeezenet1_1",
    "transformers": "bert t5",
}
LAID_OUT = QUICK | {  # some more of other kinds
    "monai": "SegResNet",
    "timm": f"{QUICK['timm']} densenet121 hrnet_w18_small mixer_s32_224",
    "ultralytics": "yolov8n",
}
MEMORY = 10 << 30  # bytes that a process may ask for
_BAD = ("wrong", "crash", "timeout")


def main() -> int:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("registry", nargs="*", help="of these only")
    read.add_argument("--only", help="a glob of names")
    read.add_argument("--quick", action="store_true", help="the fixed few")
    read.add_argument("--layouts", action="store_true", help="only `shrink` in other layouts, of some")
    read.add_argument("--part", default="0/1", help="every nth model from the kth on, K/N; N may run side by side")
    read.add_argument("--json", type=Path, help="where the rows are, or become")
    read.add_argument("--limit", type=float, default=180.0, help="seconds of the processor for one model, all verbs")
    read.add_argument("--without", default="", help="verbs that are left out: oneshot,pruner,...")
    read.add_argument("--missing", action="store_true", help="what a row lacks, and all of one that is not right")
    asked = read.parse_args()
    chosen, mine = _chosen(asked), []
    with _alone(asked.json):
        rows = _rows(asked.json, chosen)
    for wild in chosen:
        key = wild.registry, wild.name
        verbs = _asked_of(rows.get(key, {}), wild, asked)
        if not verbs:
            continue
        row = _kept(rows.get(key, {}), verbs) | _run(wild, asked.limit, verbs)
        mine.append(row)
        print(_line(row), flush=True)
        if asked.json:
            with _alone(asked.json):
                rows = _rows(asked.json, chosen)  # other parts may have written theirs
                rows[key] = row
                lines = ",\n".join(json.dumps(rows[each], sort_keys=True) for each in sorted(rows))
                asked.json.write_text(f"[\n{lines}\n]\n")
    print(_summary(mine))
    return int(any(is_bad(row) for row in mine))


def _asked_of(row: dict[str, Any], wild: Wild, asked: argparse.Namespace) -> list[str]:
    """The verbs that are tried on a model now."""
    verbs = [*LAYOUTS] if asked.layouts else ["shrink", *(each for each in VERBS if wild.images or each != "oneshot")]
    verbs = [each for each in verbs if each not in asked.without.split(",")]
    if asked.missing and row.get("status") == "right" and "most" in row:
        return [each for each in verbs if each != "shrink" and row.get(each, "timeout").startswith("timeout")]
    return verbs


def _kept(row: dict[str, Any], verbs: Sequence[str]) -> dict[str, Any]:
    """What a row says that trying the verbs does not say anew."""
    others = ({*VERBS, *LAYOUTS} if "shrink" in verbs else {*row}) - {"stopped"}
    return {name: each for name, each in row.items() if name in others}


@contextlib.contextmanager
def _alone(path: Path | None) -> Iterator[None]:
    """No other part reads or writes the rows meanwhile."""
    with contextlib.nullcontext() if path is None else path.open("a") as file:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _rows(path: Path | None, listed: Sequence[Wild]) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a file; a model that is listed and has none is "untried"."""
    read = json.loads(path.read_text() or "[]") if path is not None else []
    untried = ({"registry": each.registry, "name": each.name, "status": "untried"} for each in listed)
    return {(each["registry"], each["name"]): each for each in (*untried, *read)}


def _chosen(asked: argparse.Namespace) -> list[Wild]:
    some = QUICK if asked.quick else LAID_OUT if asked.layouts else {}
    names = asked.registry or [*some] or registries()
    every = [each for name in names for each in models_of(name)]
    if some:
        every = [each for each in every if each.name in some.get(each.registry, "").split()]
    first, step = map(int, asked.part.split("/"))
    return [each for each in every if not asked.only or fnmatch.fnmatch(each.name, asked.only)][first::step]


def _run(wild: Wild, limit: float, verbs: Sequence[str]) -> dict[str, Any]:
    """What verbs say of a model; a process that dies, or takes too long, leaves what it had written until then."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "row.json"
        process = multiprocessing.get_context("fork").Process(target=_child, args=(wild, path, limit, verbs))
        process.start()
        process.join()
        row: dict[str, Any] = {"registry": wild.registry, "name": wild.name}
        row |= {"status": "timeout"} if "shrink" in verbs else {}
        row |= json.loads(path.read_text()) if path.exists() else {}
        if process.exitcode == -signal.SIGXCPU:
            row["stopped"] = f"after {limit:g} s"
        elif process.exitcode:
            row["stopped"] = f"the process ended with {process.exitcode}"
            row["status"] = "crash" if row.get("status", "timeout") == "timeout" else row["status"]
        if "stopped" in row and ("most" in row or "shrink" not in verbs):
            running = [each for each in verbs if each != "shrink" and each not in row]
            row |= dict.fromkeys(running[:1], f"timeout: {row['stopped']}")
        return row


def _child(wild: Wild, path: Path, limit: float, verbs: Sequence[str]) -> None:
    used = int(sum(os.times()[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (used + int(limit), used + int(limit) + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    tried(wild, path, verbs)


def is_bad(row: dict[str, Any]) -> bool:
    others = (str(row.get(verb, "")) for verb in (*VERBS, *LAYOUTS))
    return row.get("status") in _BAD or any(each.startswith(_BAD) for each in others)


def _line(row: dict[str, Any]) -> str:
    others = {verb: row[verb] for verb in (*VERBS, *LAYOUTS) if row.get(verb, "right") != "right"}
    return (
        f"{row['registry']:12} {row['name']:34} {row.get('status', ''):9} {row.get('got', 0):6.1%} of at most "
        f"{row.get('most', 0):5.1f} % {row.get('seconds', 0):6.1f} s {row.get('peak', 0):5} MB "
        f" {row.get('message', '')} {row.get('stopped', '')} {others or ''}"
    )


def _summary(rows: list[dict[str, Any]]) -> str:
    counts = {
        word: sum(row.get("status") == word for row in rows)
        for word in ("right", "refused", "unjudged", "wrong", "crash", "timeout")
    }
    seconds = sorted(row["seconds"] for row in rows if "seconds" in row) or [0.0]
    said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"{len(rows)} models: {said}; seconds: median {statistics.median(seconds):.1f}, most {seconds[-1]:.1f}"


if __name__ == "__main__":
    sys.exit(main())
