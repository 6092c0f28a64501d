"""What leaving experts out costs mixtures that were trained here, by what chose them.

Law: experts are chosen on text that neither trained the model nor judges it; all methods see the same.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experts import choosing
from benchmarks.experts.training import CHOOSE, KINDS, Data, data, trained
from benchmarks.support.processes import in_a_process
from benchmarks.support.rows import add_row, read_rows
from benchmarks.support.tables import head, row
from secateur import Experts, shrink

OURS, THEIRS = "reap, repaired", "llm-compressor's REAP"
TRIED = ("by its outputs", "enumerated")
METHODS = (
    OURS,
    "reap",
    "gates",
    "gates, repaired",
    "frequency",
    "magnitude",
    "random",
)


@dataclass(frozen=True)
class Options:
    """What the command was told."""

    scratch: Path
    name: str  # of training.SIZES
    steps: int
    seeds: Sequence[int]
    methods: Sequence[str]
    cache: Path | None
    peer: str | None  # the Python of an environment with llm-compressor
    choose: int = CHOOSE  # sequences of each kind to choose by
    shares: Sequence[float] = (0.25, 0.5)  # of the experts of each mixture, that leave


@torch.no_grad()
def perplexity(model: Any, ids: Tensor) -> float:
    return math.exp(statistics.mean(float(model(input_ids=part, labels=part).loss) for part in ids.split(8)))


def judged(model: Any, texts: Data) -> dict[str, float]:
    """Perplexity of all kinds together, and of each."""
    each = {kind: perplexity(model, texts.judge[kind]) for kind in KINDS}
    return {"all": math.exp(statistics.mean(map(math.log, each.values()))), **each}


def smaller(model: Any, method: str, share: float, texts: Data) -> Any:
    """By `shrink`, without its proof, which changes nothing of what is measured here."""
    small = copy.deepcopy(model)
    batches = [{"input_ids": part} for kind in KINDS for part in texts.choose[kind].split(8)]
    experts = Experts(share)
    if method == "random":
        how: dict[str, Any] = {"criterion": "random"}
    elif method == "magnitude":
        how = {}
    else:
        rank = method.split(",")[0]
        how = {"batches": batches, "repair": "repaired" in method, "choose": "gates" if rank == "gates" else None}
        experts = Experts(share, rank=None if rank == "gates" else rank)
    shrink(small, batches[0], leave=experts, uniform=True, verify=False, **how)
    return small.eval()


def made(options: Options, seed: int, model: Any, method: str, share: float, texts: Data) -> tuple[Any, dict[str, Any]]:
    """A model without this share of each mixture's experts, and what else is to be told of how it was made."""
    torch.manual_seed(seed)
    left = round(choosing.mixtures_of(model)[0].gate.num_experts * (1 - share))
    choose = torch.cat([texts.choose[kind] for kind in KINDS])
    if method == "by its outputs":
        return choosing.without_others(model, choosing.by_outputs(model, left, choose)), {}
    if method == "enumerated":
        kept, best, tried = choosing.enumerated(model, left, choose)
        return choosing.without_others(model, kept), {"tried": tried, "where chosen": best}
    if method == THEIRS:
        tokens = options.scratch / "tokens.safetensors"
        directory = options.scratch / f"{options.name}-{options.steps}-{seed}"
        script = str(Path(__file__).with_name("peers.py"))
        kept = in_a_process(
            method, script, str(directory), str(tokens), str(options.choose), str(share), python=options.peer
        )
        return choosing.without_others(model, kept), {}
    return smaller(model, method, share, texts), {}


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """A row a choice, those that the file has first; the others are measured, and added to it."""
    known = {_key(found): found for found in read_rows(options.cache)}
    texts, _ = data(options.scratch)
    texts = replace(texts, choose={kind: each[: options.choose] for kind, each in texts.choose.items()})
    for seed in options.seeds:
        model = trained(options.scratch, options.name, options.steps, seed)
        about = {"model": options.name, "steps": options.steps, "seed": seed, "choose": options.choose}
        for method, share in [
            ("dense", 0.0),
            *((method, share) for share in options.shares for method in options.methods),
        ]:
            found = {**about, "method": method, "gone": share}
            if _key(found) not in known:
                small, more = (model, {}) if method == "dense" else made(options, seed, model, method, share, texts)
                size = sum(each.numel() for each in small.parameters())
                known[_key(found)] = {**found, **judged(small, texts), "parameters": size, **more}
                add_row(options.cache, known[_key(found)])
            yield known[_key(found)]


def _key(found: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(found[name] for name in ("model", "steps", "seed", "choose", "method", "gone"))


def quality(options: Options) -> list[dict[str, Any]]:
    """Perplexity on held-out text of three kinds without a quarter and half of the experts, a row a choice."""
    found = []
    for each in rows(options):
        found.append(each)
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in each.items()}, flush=True)
    print(f"\n{table(found)}")
    return found


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: means over the seeds; the rise of each seed, and the median of its share of REAP's rise."""
    dense = {each["seed"]: each for each in found if each["method"] == "dense"}
    reap = {(each["seed"], each["gone"]): each["all"] for each in found if each["method"] == "reap"}
    seeds = list(dense)
    titles = ["experts gone", "chosen by", "perplexity", *(f"rise, seed {seed}" for seed in seeds), "of REAP's", *KINDS]
    lines = [head(titles)]
    for share, method in dict.fromkeys((each["gone"], each["method"]) for each in found):
        mine = {each["seed"]: each for each in found if (each["gone"], each["method"]) == (share, method)}
        rises = {seed: mine[seed]["all"] - dense[seed]["all"] for seed in mine}
        parts = [
            rise / (reap[seed, share] - dense[seed]["all"]) for seed, rise in rises.items() if (seed, share) in reap
        ]
        cells = [f"{share:.0%}" if share else "none", "" if method == "dense" else method]
        cells.append(f"{statistics.mean(each['all'] for each in mine.values()):.2f}")
        cells += [f"{rises[seed]:+.2f}" if seed in rises and share else "" for seed in seeds]
        cells.append(f"{statistics.median(parts):.2f}" if parts else "")
        cells += [f"{statistics.mean(each[kind] for each in mine.values()):.2f}" for kind in KINDS]
        lines.append(row(cells))
    return "\n".join(lines)
