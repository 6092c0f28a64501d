"""The papers' own protocols, for who has a GPU and the models of the hub; rows that were published stand beside.

    python benchmarks/papers/run.py zeros --model DIR --data c4.jsonl --test wiki.test.raw --scratch FOLDER
    python benchmarks/papers/run.py units --model DIR --data wiki.train.raw --test wiki.test.raw --scratch FOLDER

`zeros`: half of the weights of the blocks of a Llama, unstructured, 4:8 and 2:4, by 128 sequences of C4, as SparseGPT
(arXiv:2301.00774) and Wanda (arXiv:2306.11695) are compared. `units`: 20, 30 and 50 % of a Llama-2-7B's parameters, by
128 sequences of WikiText-2's training text, as structural methods are (`--levels 0.25` for LLaMA-7B). Published rows
of `units` are in windows of 2048 (`--length 2048`), FLAP's and Wanda-sp's, of LLaMA-7B, in windows of 128.

Law: each row is one command of `secateur`, which is printed, and which goes on where it was stopped; what has a row in
FOLDER is not done again. Perplexity is theirs: WikiText-2's test text joined by two line ends, all of it in windows of
`--length` tokens, each predicted from those before it in its window. Published rows have their sources with them;
those of `units` were read second-hand, in tables that say which are the papers'.
"""

from __future__ import annotations

import argparse
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.support.rows import add_row, read_rows
from benchmarks.support.tables import head, row

SOURCE = "README of github.com/locuslab/wanda at 1317b0ba"
PATTERNS = {"unstructured": ("--sparsity", "0.5"), "4:8": ("--pattern", "4:8"), "2:4": ("--pattern", "2:4")}
SOLVERS = ("magnitude", "wanda", "sparsegpt", "admm")
PUBLISHED: dict[str, dict[str, Sequence[float]]] = {  # WikiText-2 in windows of 4096: in the order of PATTERNS
    "llama2-7b": {
        "dense": (5.12,) * 3, "magnitude": (14.89, 16.48, 54.59), "sparsegpt": (6.51, 8.12, 10.17),
        "wanda": (6.42, 7.97, 11.02),
    },
    "llama2-13b": {
        "dense": (4.57,) * 3, "magnitude": (6.37, 6.76, 8.33), "sparsegpt": (5.63, 6.60, 8.32),
        "wanda": (5.56, 6.55, 8.27),
    },
    "llama2-70b": {
        "dense": (3.12,) * 3, "magnitude": (4.98, 5.58, 6.33), "sparsegpt": (3.98, 4.59, 5.40),
        "wanda": (3.98, 4.47, 5.16),
    },
}  # fmt: skip
SOURCES_OF_UNITS = (
    'columns "Paper" of the READMEs of SliceGPT and FLAP in github.com/Zephyr271828/llm-pruning-collection-fork at '
    "95172b08; without half of the parameters a note on arXiv:2606.01666"
)
PUBLISHED_UNITS: dict[str, dict[float, str]] = {  # by the share that leaves
    "llama2-7b": {
        0.0: "5.47", 0.2: "SliceGPT 6.64", 0.25: "SliceGPT 7.24", 0.3: "SliceGPT 8.12",
        0.5: "DISP-LLM 9.84, MoDeGPT 11.88, LLM Surgeon 15.38, SliceGPT 24.82, LLM-Pruner 31.05",
    },
    "llama-7b": {
        0.0: "12.62", 0.2: "FLAP 14.62, Wanda-sp 22.12", 0.3: "FLAP 17.62, Wanda-sp 38.88",
        0.5: "FLAP 31.80, Wanda-sp 366.43",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A row: its name, the command that makes it ("" of the dense model), and what was published."""

    name: str
    verb: str = ""
    options: tuple[str, ...] = ()
    published: str = ""


def zeros(known: str | None) -> Iterator[Case]:
    told = PUBLISHED.get(known or "", {})
    yield Case("dense", published=f"{told['dense'][0]:.2f}" if told else "")
    for place, (pattern, options) in enumerate(PATTERNS.items()):
        for solver in SOLVERS:
            published = f"{told[solver][place]:.2f}" if solver in told else ""
            yield Case(f"{pattern}, {solver}", "oneshot", ("--solver", solver, *options), published)


def units(levels: Sequence[float], known: str | None = None) -> Iterator[Case]:
    told = PUBLISHED_UNITS.get(known or "", {})
    yield Case("dense", published=told.get(0.0, ""))
    for level in levels:
        for name, more in (("", ()), (", no repair", ("--no-repair",))):
            options = "--sparsity", f"{level:g}", *more
            yield Case(f"−{level:.0%} of the parameters{name}", "shrink", options, "" if more else told.get(level, ""))


def text_of(path: Path) -> str:
    """The lines as datasets has them, an empty one for one of spaces, joined by two line ends."""
    with path.open(encoding="utf-8", newline="\n") as file:
        return "\n\n".join(line if line.strip() else "" for line in file)


@torch.no_grad()
def perplexity(model: nn.Module, ids: torch.Tensor, length: int) -> float:
    """Of ``ids``, int64 of shape (tokens,): whole windows of ``length``, each token but a window's first."""
    device = next(model.parameters()).device
    loss, windows = 0.0, len(ids) // length
    if not windows:
        raise ValueError(
            f"the test text has {len(ids):,} tokens, less than a window of {length:,}; give a smaller --length."
        )
    for part in ids[: windows * length].view(windows, 1, length):
        logits = model(input_ids=part.to(device), use_cache=False).logits[:, :-1].float()
        loss += float(nn.functional.cross_entropy(logits.flatten(0, 1), part[0, 1:].to(device)))
    return math.exp(loss / windows)


def judged(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(text_of(options.test), return_tensors="pt", verbose=False).input_ids[0]
    parameters = sum(each.numel() for each in model.parameters())
    return {"perplexity": perplexity(model, ids, options.length), "parameters": parameters}


def command(case: Case, out: Path, options: argparse.Namespace) -> list[str]:
    given = {"--data": options.data, "--samples": options.samples, "--sequence-length": options.length, "--out": out}
    told = [text for pair in given.items() for text in map(str, pair)]
    on = ["--device", options.device] if options.device != "cpu" else []
    return ["secateur", case.verb, str(options.model), *case.options, *told, *on]


def run(options: argparse.Namespace) -> None:
    options.scratch.mkdir(parents=True, exist_ok=True)
    rows = options.scratch / f"{options.what}.jsonl"
    cases = [*(zeros(options.published) if options.what == "zeros" else units(options.levels, options.published))]
    known = {each["name"]: each for each in read_rows(rows)}
    for case in cases:
        if case.name in known or options.only not in case.name:
            continue
        directory = options.model
        if case.verb:
            directory = options.scratch / case.name.replace(" ", "").replace(",", "-").replace(":", "of")
            words = command(case, directory, options)
            print("$", shlex.join(words), flush=True)
            if not directory.exists():
                subprocess.run([sys.executable, "-m", *words], check=True)
        add_row(rows, {"name": case.name, **judged(directory, options)})
    source = SOURCE if options.what == "zeros" else SOURCES_OF_UNITS
    print("\n".join(table(cases, read_rows(rows), options.published, source)))


def table(cases: Sequence[Case], rows: Sequence[dict[str, Any]], known: str | None, source: str) -> Iterator[str]:
    found = {each["name"]: each for each in rows}
    yield head(["", "parameters", "perplexity", *([f"published for {known}"] if known else [])])
    for case in cases:
        if case.name in found:
            one = found[case.name]
            beside = [case.published] if known else []
            yield row([case.name, f"{one['parameters']:,}", f"{one['perplexity']:.2f}", *beside])
    if known:
        yield f"\nPublished: {source}."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("zeros", "units"))
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", type=Path, required=True, help="text to calibrate on: .jsonl of C4, or .txt")
    parser.add_argument("--test", type=Path, required=True, help="wiki.test.raw")
    parser.add_argument("--scratch", type=Path, required=True, metavar="FOLDER", help="for directories and rows")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=4096, help="of sequences and windows; 2048 for LLaMA and OPT")
    parser.add_argument(
        "--levels", type=lambda text: [float(each) for each in text.split(",")], default=[0.2, 0.3, 0.5]
    )
    parser.add_argument(
        "--published", choices=sorted({*PUBLISHED, *PUBLISHED_UNITS}), help="what the model is, for rows beside"
    )
    parser.add_argument("--only", default="", help="rows with this in their names")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
