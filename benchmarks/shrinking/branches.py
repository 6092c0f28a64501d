"""Real trained models that lose depth, without training: which branches leave, and what is patched around them.

Law: a row is a process of its own, as in `real`. What leaves is chosen once, by each way, and told to the rows; those
that are chosen by outputs are the same without a patch and with one. A block leaves as its two branches.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.shrinking.sizes import count_of
from benchmarks.support.language_models import MiniLM, SmolLM2
from benchmarks.support.processes import in_a_process
from benchmarks.support.tables import head, row
from secateur import Branches, shrink
from secateur.coupling import Branch, find_coupling
from secateur.shrinking.kinds.branches import OutputCosts, influences

RUN = str(Path(__file__).with_name("run.py"))
MODELS: dict[str, type[SmolLM2 | MiniLM]] = {"smollm2": SmolLM2, "minilm": MiniLM}
SAMPLES = {"smollm2": 24, "minilm": 512}
COUNTS = {"smollm2": {"branches": (2, 4, 6), "blocks": (2, 4)}, "minilm": {"branches": (1, 2, 3)}}
WAYS = {
    "influence": "by influence on the stream, not patched",
    "outputs": "by the outputs, not patched",
    "patched": "**by the outputs, patched**",
}


def _subject(model: str, directory: Path, judged: int) -> SmolLM2 | MiniLM:
    return SmolLM2(directory, judged) if model == "smollm2" else MiniLM(directory)


def _example(batch: Mapping[str, Any], model: str) -> dict[str, Any]:
    cut = {name: tensor[:1, :64] for name, tensor in batch.items()}
    return cut | ({"use_cache": False} if model == "smollm2" else {})


def _blocks(branches: Sequence[Branch]) -> list[Branch]:
    """Two in a row as one."""
    return [
        replace(one, modules={**one.modules, **other.modules}, parameters=(*one.parameters, *other.parameters))
        for one, other in zip(branches[::2], branches[1::2], strict=True)
    ]


def counts_of(model: str, leave: str | None) -> dict[str, tuple[int, ...]]:
    """``{"branches": (2, 4), ...}`` of what the command was told to leave out, or of all that is shown.

    Raises:
        SystemExit: it was told something else.
    """
    if leave is None:
        return COUNTS[model]
    found: dict[str, tuple[int, ...]] = {}
    for each in leave.split(","):
        count, _, kind = each.strip().partition(" ")
        if not count.isdigit() or kind not in ("branches", "blocks"):
            raise SystemExit(f"--leave: {each!r} is not so many branches or blocks, such as '4 branches'.")
        found[kind] = (*found.get(kind, ()), int(count))
    return found


def chosen(model: str, directory: Path, counts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """``{way: {kind: parameters of what leaves, first to last}}``, and how long each way took."""
    subject = _subject(model, directory, 1)
    batches = subject.batches(0, SAMPLES[model])
    coupling = find_coupling(subject.model, _example(batches[0], model), modes=[False])
    most = {kind: max(several) for kind, several in counts.items()}
    kinds = {"branches": coupling.branches, "blocks": _blocks(coupling.branches) if "blocks" in most else []}
    found: dict[str, Any] = {"branches": len(coupling.branches), "seconds": {}}
    began = time.perf_counter()
    example = dict(batches[0].items()) | ({"use_cache": False} if model == "smollm2" else {})
    watched = find_coupling(subject.model, example, modes=[False])
    turns = dict(zip(coupling.branches, influences(subject.model, watched, [example]).values(), strict=True))
    pairs = zip(kinds["blocks"], zip(coupling.branches[::2], coupling.branches[1::2], strict=True), strict=False)
    turns |= {block: turns[one] + turns[other] for block, (one, other) in pairs}
    found["influence"] = {
        kind: [list(each.parameters) for each in sorted(kinds[kind], key=lambda each: turns[each])[:count]]
        for kind, count in most.items()
    }
    found["seconds"]["influence"] = time.perf_counter() - began
    began = time.perf_counter()
    costs = OutputCosts(subject.model, batches)
    found["outputs"] = {
        kind: [list(each.parameters) for each in costs.least(kinds[kind], kinds[kind], count)]
        for kind, count in most.items()
    }
    found["seconds"]["outputs"] = time.perf_counter() - began
    return found


def measured(told: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of a model without the branches that it was told to lose."""
    subject = _subject(told["model"], Path(told["directory"]), told["judged"])
    model, batches = subject.model, subject.batches(0, SAMPLES[told["model"]])
    began, cpu = time.perf_counter(), time.process_time()
    patched = 0
    if told["names"]:
        done = shrink(
            model,
            _example(batches[0], told["model"]),
            leave=Branches(told["share"]),
            include=told["names"],
            modes=[False],
            batches=batches if told["way"] == "patched" else None,
        )
        patched = len(done.patched)
    seconds = {"wall": time.perf_counter() - began, "cpu": time.process_time() - cpu}
    model.eval().requires_grad_(False)
    with torch.no_grad():
        return {"parameters": count_of(model), "found": subject.measure(model), "patched": patched, **seconds}


def child(told: Mapping[str, Any]) -> None:
    """One row, or what is chosen."""
    with redirect_stdout(sys.stderr):
        found = measured(told) if "names" in told else chosen(told["model"], Path(told["directory"]), told["counts"])
    print(json.dumps(found))


def branches(directories: Mapping[str, Path], judged: int, cache: Path | None, leave: str | None = None) -> None:
    """The tables of all models that are given; what is in the file is not measured again.

    Args:
        leave: what leaves, such as ``"4 branches,2 blocks"``; by default `COUNTS`.
    """
    known: dict[str, Any] = {}
    if cache is not None and cache.exists():
        known = dict(map(json.loads, cache.read_text(encoding="utf-8").splitlines()))

    def found(key: str, **told: Any) -> Any:
        if key not in known:
            known[key] = in_a_process(
                key, RUN, "branches", "--child", json.dumps(told), environment={"SECATEUR_PROGRESS": "0"}
            )
            print(key, known[key] if "names" in told else known[key]["seconds"], flush=True)
            if cache is not None:
                with cache.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([key, known[key]]) + "\n")
        return known[key]

    for model, directory in directories.items():
        about = {"model": model, "directory": str(directory.resolve())}
        counts = counts_of(model, leave)
        key = f"{model}, chosen" if leave is None else f"{model}, {leave} chosen"
        choice = found(key, **about, counts=counts)
        rows = []
        for kind, count, way in [
            ("branches", 0, "dense"),
            *((kind, count, way) for kind, several in counts.items() for count in several for way in WAYS),
        ]:
            its = choice["influence" if way == "influence" else "outputs"][kind][:count]
            names = [name for each in its for name in each]
            share = count * (2 if kind == "blocks" else 1) / choice["branches"]
            said = found(
                f"{model}, {count} {kind}, {way}, {judged}", **about, names=names, share=share, way=way, judged=judged
            )
            rows.append((f"{count} {kind}" if count else "nothing", WAYS.get(way, ""), said))
        print(f"\n{model}\n\n{table(MODELS[model].columns, rows)}", flush=True)
        print("chosen in", ", ".join(f"{way} {seconds:.0f} s" for way, seconds in choice["seconds"].items()))


def table(columns: Sequence[str], rows: Sequence[tuple[str, str, Mapping[str, Any]]]) -> str:
    """Markdown."""
    lines = [head(["leaves", "chosen", "parameters left", *columns, "s of processor"])]
    whole = rows[0][2]["parameters"]
    for leaves, way, said in rows:
        figures = [f"{value:.2f}" if value > 1.5 else f"{value:.4f}" for value in said["found"]]
        left = f"{said['parameters'] / 1e6:.1f} M ({said['parameters'] / whole:.3f})"
        lines.append(row([leaves, way, left, *figures, f"{said['cpu']:.0f}"]))
    return "\n".join(lines)
