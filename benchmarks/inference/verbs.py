"""The README's picture: what each verb leaves of MiniLM, by its cosine and by measured milliseconds.

Law: everything that is timed takes turns in one process, in one thread, on one sentence of 32 tokens. A cosine is to
the dense model's embeddings of 1000 sentences that neither calibration nor recovery saw. What is packed was made sure
to give the outputs of the model that was judged.

What was made, and its cosines, stay in ``--cache``: a second run only measures time.
"""

from __future__ import annotations

import copy
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.inference.exported import int8, onnx_file, session
from benchmarks.inference.products import in_milliseconds
from benchmarks.inference.subjects import cached
from benchmarks.inference.whole_models import Accuracies
from benchmarks.recovery.ways import trained
from benchmarks.support.language_models import MiniLM
from benchmarks.support.tables import head, row
from benchmarks.support.timing import ratio
from secateur import oneshot, shrink, sparsify
from secateur.inference import pack
from secateur.search import fit
from secateur.shrinking import load_shrunken, save_shrunken

TOKENS = 32
SHARES = (0.25, 0.4, 0.5, 0.6)  # of the multiply-adds, that leave
FITTED = (0.25, 0.4)  # the same, chosen by `fit`: a quarter of an hour of the processor each
ZEROS = {  # (verb, pattern): shares; all of these are packed
    ("sparsify", "unstructured"): (0.5, 0.7),
    ("oneshot", "unstructured"): (0.5, 0.7, 0.8),
    ("oneshot", "16x1"): (0.7, 0.8),
}
CALIBRATED, RECOVERED = 512, 768  # sentences


class Embeddings(nn.Module):
    """The hidden states of all tokens, from tensors in a fixed order, as an exporter asks for them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return found


class Exported(nn.Module):
    """A model in int8 of ONNX Runtime, judged as a model is; batches are padded to the shape of its export."""

    def __init__(self, subject: MiniLM, model: nn.Module, folder: Path) -> None:
        super().__init__()
        tokens = subject.tokenizer(subject.held_out, truncation=True, max_length=128).input_ids
        self.shape = (100, max(map(len, tokens)))
        shapes = torch.zeros(self.shape, dtype=torch.long), torch.ones(self.shape, dtype=torch.long)
        self.run = session(onnx_file(folder / "judged.onnx", Embeddings(model).eval(), shapes, True), 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        size, length = input_ids.shape
        missing = (0, self.shape[1] - length, 0, self.shape[0] - size)
        found = self.run(*(functional.pad(tensor, missing) for tensor in (input_ids, attention_mask)))
        return BaseModelOutput(last_hidden_state=torch.as_tensor(found)[:size, :length])


def one_sentence(subject: MiniLM) -> tuple[Tensor, Tensor]:
    """Of 32 tokens, none of them padding."""
    text = " ".join(subject.held_out[:4])
    found = subject.tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt")
    return found["input_ids"], found["attention_mask"]


def recovered(subject: MiniLM, model: nn.Module) -> None:
    """By sentences that are not the calibration's, each of which is run once block by block or by the outputs."""
    batches = subject.batches(100, RECOVERED, 16)
    random.Random(0).shuffle(batches)  # they come by length
    trained(model, subject.model, batches, "both", len(batches), seed=0)


def shrunken(subject: MiniLM, share: float, cache: Path, recover: bool) -> nn.Module:
    """Without a share of the multiply-adds; from the cache, where it is there."""
    folder = cache / f"shrink-{share:g}{'-recovered' if recover else ''}"
    model = copy.deepcopy(subject.model)
    if folder.exists():
        load_shrunken(model, folder)
        return model.eval()
    print(f"  making {folder.name}", flush=True)
    if recover:
        model = shrunken(subject, share, cache, False)
        recovered(subject, model)
    else:
        batches = subject.batches(0, CALIBRATED)
        shrink(model, batches[0], share, target="macs", batches=batches)
    save_shrunken(model, folder)
    return model.eval()


def fitted(subject: MiniLM, share: float, cache: Path) -> nn.Module:
    """The same with counts that `fit` chose with a budget of multiply-adds, on the same sentences."""
    folder, model = cache / f"fit-{share:g}", copy.deepcopy(subject.model)
    if folder.exists():
        load_shrunken(model, folder)
        return model.eval()
    print(f"  making {folder.name}", flush=True)
    fit(model, subject.batches(0, CALIBRATED), budget={"macs": 1 - share}, store=cache / "levels")
    save_shrunken(model, folder)
    return model.eval()


def sparse(subject: MiniLM, verb: str, pattern: str, zeros: float, cache: Path) -> nn.Module:
    """With zeros, in dense tensors; from the cache, where it is there."""

    def make(model: nn.Module) -> None:
        if verb == "sparsify":
            sparsify(model, zeros, pattern=pattern)
        else:
            oneshot(model, subject.batches(0, CALIBRATED), zeros, pattern=pattern)

    name = f"{pattern}-{zeros:g}" if verb == "oneshot" else f"{verb}-{pattern}-{zeros:g}"
    return cached(cache / f"{name}.safetensors", copy.deepcopy(subject.model), make).eval()


def variants(subject: MiniLM, cache: Path) -> Iterator[tuple[str, str, nn.Module, bool]]:
    """``(verbs, what was asked, the model, whether it is to be packed)`` of everything that verbs make."""
    for recover in (False, True):
        for share in SHARES:
            verbs = "`shrink`, `recover`" if recover else "`shrink`"
            yield verbs, f"−{share:.0%}", shrunken(subject, share, cache, recover), False
    for share in FITTED:
        yield "`fit`", f"−{share:.0%}", fitted(subject, share, cache), False
    for (verb, pattern), shares in ZEROS.items():
        words = f"`{verb}` 16×1, `pack`" if pattern == "16x1" else f"`{verb}`, `pack`"
        for zeros in shares:
            yield words, f"{zeros:.0%} zeros", sparse(subject, verb, pattern, zeros, cache), True


def packed(model: nn.Module, example: tuple[Tensor, ...]) -> tuple[nn.Module, str]:
    """A packed copy that gives the model's outputs, and how many layers were packed."""
    served = Embeddings(copy.deepcopy(model)).eval()
    with torch.no_grad():
        expected = served(*example)
        packing = pack(served, example)
        torch.testing.assert_close(served(*example), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    return served, f"{len(packing.packed)} of {len(packing.layers)} layers packed"


def bench_verbs(options: Any) -> None:
    if options.minilm is None:
        raise SystemExit("Give --minilm DIR, the folder of all-MiniLM-L6-v2.")
    torch.set_num_threads(1)
    subject, cache = MiniLM(options.minilm), options.cache / "verbs"
    example = one_sentence(subject)
    known = Accuracies(cache / "cosines.json")
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    facts: dict[tuple[str, str], tuple[float, str]] = {}

    def add(
        verbs: str, asked: str, served: Callable[..., Any], judged: Callable[[], nn.Module], note: str = ""
    ) -> None:
        cosine = known.of(f"{verbs} {asked}".strip(), lambda: subject.measure(judged())[0])
        calls[verbs, asked], facts[verbs, asked] = partial(served, *example), (cosine, note)
        print(f"  {verbs} {asked}: {cosine:.4f} {note}", flush=True)

    dense = subject.model
    quantized = int8(dense)
    add("dense", "", Embeddings(dense).eval(), lambda: dense)
    add("int8, torch", "", Embeddings(quantized).eval(), lambda: quantized)
    with tempfile.TemporaryDirectory() as folder:
        for verbs, asked, model, to_pack in variants(subject, cache):
            served, note = packed(model, example) if to_pack else (Embeddings(model).eval(), "")
            add(verbs, asked, served, lambda model=model: model, note)
        exported = {("int8, ONNX Runtime", ""): dense} | {
            ("`shrink`, int8, ONNX Runtime", f"−{share:.0%}"): shrunken(subject, share, cache, False)
            for share in SHARES
        }
        for number, ((verbs, asked), model) in enumerate(exported.items()):
            place = Path(folder) / str(number)
            place.mkdir()
            run = session(onnx_file(place / "timed.onnx", Embeddings(model).eval(), example, True), 1)
            add(verbs, asked, run, partial(Exported, subject, model, place))
        times = in_milliseconds(calls, options.rounds, options.clock)
    print(f"\nall-MiniLM-L6-v2, one sentence of {TOKENS} tokens, one thread, {options.clock} clock\n")
    print(head(["verbs", "asked", "ms", "times faster than dense", "cosine", ""]))
    whole = times["dense", ""]
    for key, (cosine, note) in facts.items():
        faster, spent = ratio(times[key], whole), statistics.median(times[key])
        print(row([*key, f"{spent:.2f}", f"{faster:.2f}", f"{cosine:.4f}", note]), flush=True)
