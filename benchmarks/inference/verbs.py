"""Every verb on one real model: how near all-MiniLM-L6-v2's embeddings stay, against milliseconds that were measured.

Law: all models take turns in one process, on the example of `subjects.Encoder`, and a ratio is the median of the
rounds' ratios. What was made stays in ``--cache``: a second run only measures time.
"""

from __future__ import annotations

import copy
import json
import random
import statistics
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.inference.exported import int8, slug
from benchmarks.inference.subjects import Encoder
from benchmarks.support.tables import head, row
from benchmarks.support.timing import alternating, ratio
from secateur import oneshot, pack, recover, shrink

SENTENCES = 256  # to calibrate
STEPS = 24  # of `recover`, 32 sentences each
COLUMNS = ["verb", "what leaves", "ms", "than dense", "cosine"]
Make = Callable[[Encoder, Callable[[str], nn.Module]], nn.Module]


def _shrunken(share: float) -> Make:
    def make(encoder: Encoder, _made: Callable[[str], nn.Module]) -> nn.Module:
        model, batches = copy.deepcopy(encoder.model), encoder.subject.batches(0, SENTENCES)
        shrink(model, dict(batches[0]), share, target="macs", batches=batches)
        return model

    return make


def _shallower(count: int) -> Make:
    def make(encoder: Encoder, _made: Callable[[str], nn.Module]) -> nn.Module:
        model, batches = copy.deepcopy(encoder.model), encoder.subject.batches(0, SENTENCES)
        example = {name: tensor[:1, :64] for name, tensor in batches[0].items()}
        shrink(model, example, branches=count / 12, modes=[False], batches=batches)
        return model

    return make


def _zeros(sparsity: float) -> Make:
    def make(encoder: Encoder, _made: Callable[[str], nn.Module]) -> nn.Module:
        model = copy.deepcopy(encoder.model)
        oneshot(model, encoder.subject.batches(0, SENTENCES), sparsity, pattern="16x1")
        return model

    return make


def _recovered(of: str) -> Make:
    def make(encoder: Encoder, made: Callable[[str], nn.Module]) -> nn.Module:
        model, batches = copy.deepcopy(made(of)), encoder.subject.batches(100, 32 * STEPS, 32)
        random.Random(0).shuffle(batches)  # they come by length
        recover(model, encoder.model, batches, steps=STEPS, local=0, exclude="*embeddings*")
        return model.eval()

    return make


def _label(share: float, what: str) -> str:
    return f"{100 * share:.0f} % {what}"


MACS, ZEROS = "of the multiply-adds", "of the weights, 16×1"
SHARES = (0.5, 0.3)
MAKERS: dict[tuple[str, str], Make] = {("`shrink`", _label(share, MACS)): _shrunken(share) for share in SHARES}
MAKERS |= {("`oneshot`, `pack`", _label(share, ZEROS)): _zeros(share) for share in (0.5, 0.8)}
MAKERS |= {("`shrink(branches=)`", f"{count} of 12 branches"): _shallower(count) for count in (1, 3)}
MAKERS |= {
    ("`shrink`, `recover`", _label(share, MACS)): _recovered(f"`shrink`, {_label(share, MACS)}") for share in SHARES
}


def bench_verbs(options: Namespace) -> None:
    """The table; a row that is not made yet is made first."""
    if options.minilm is None:
        raise SystemExit("Give --minilm DIR.")
    torch.set_num_threads(options.threads[0])
    encoder, cache = Encoder(options.minilm, 0), options.cache / "verbs"
    cache.mkdir(parents=True, exist_ok=True)
    known = json.loads((cache / "cosines.json").read_text()) if (cache / "cosines.json").exists() else {}

    def kept(name: str) -> Path:
        return cache / f"{slug(name)}.pt"

    def made(name: str) -> nn.Module:
        found: nn.Module = torch.load(kept(name), weights_only=False)  # this command wrote it
        return found

    def judged(name: str, model: nn.Module) -> None:
        if name not in known:
            known[name] = encoder.subject.measure(model)[0]
            (cache / "cosines.json").write_text(json.dumps(known, indent=1))

    for (verb, what), make in MAKERS.items():
        name = f"{verb}, {what}"
        if not kept(name).exists():
            print(f"  making {name}", flush=True)
            torch.save(make(encoder, made).eval(), kept(name))
        judged(name, made(name))
    models: dict[tuple[str, str], nn.Module] = {("dense", ""): encoder.model, ("int8", ""): int8(encoder.model)}
    judged("int8, ", models["int8", ""])
    for verb, what in MAKERS:
        model = made(f"{verb}, {what}")
        models[verb, what] = model
        if verb == "`shrink`":
            models["`shrink`, int8", what] = int8(model)
            judged(f"`shrink`, int8, {what}", models["`shrink`, int8", what])
    served = {key: encoder.serve(model) for key, model in models.items()}
    with torch.no_grad():
        for key, module in served.items():
            if "pack" in key[0]:
                pack(module, encoder.example)
        calls = {key: (lambda module=module: module(*encoder.example)) for key, module in served.items()}
        times = alternating(calls, options.rounds, told="milliseconds")
    print(head(COLUMNS))
    for verb, what in sorted(models, key=lambda key: (key[0] != "dense", key)):
        seconds = times[verb, what]
        cosine = known[f"{verb}, {what}"] if verb != "dense" else 1.0
        faster = ratio(seconds, times["dense", ""])
        print(row([verb, what, f"{1000 * statistics.median(seconds):.1f}", f"{faster:.2f}", f"{cosine:.4f}"]))
