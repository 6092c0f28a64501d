"""Tokens that leave real models: what is smaller, and what unseen text loses.

    python benchmarks/vocabulary/run.py minilm --minilm DIR --scratch FOLDER [--keep 8000,10000] [--rank distance]
    python benchmarks/vocabulary/run.py minilm --minilm DIR --scratch FOLDER --changed
    python benchmarks/vocabulary/run.py smollm2 --smollm2 DIR --scratch FOLDER [--keep 16000,24000,32000]
    python benchmarks/vocabulary/run.py trim --smollm2 DIR --scratch FOLDER [--windows 12]
    python benchmarks/vocabulary/run.py languages --smollm2 DIR --scratch FOLDER [--share 0.2] [--samples 12]
    python benchmarks/vocabulary/run.py combinations [--tools secateur,hf-trim,vocabtrimmer,textpruner]

Law: what is counted and what is measured share no sentence; both are docstrings of what is installed here, each
sentence once, in an order of no meaning. Perplexity is of characters, since tokens differ.

The models are those of benchmarks/README.md. FOLDER keeps the sentences, whose gathering takes minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.support import corpora
from benchmarks.support.tables import head, row
from benchmarks.vocabulary.combinations import combinations
from secateur import shrink, shrink_vocabulary, verify_checkpoint
from secateur.support import track
from secateur.vocabulary import ShrunkVocabulary

NEIGHBOURS = 10
SEEN = 500  # of the strings that are read as before, on which that is checked


def sentences(scratch: Path, held_out: int) -> tuple[list[str], list[str]]:
    """What is counted, and what is measured."""
    file = scratch / "sentences.json"
    if not file.exists():
        scratch.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(corpora.sentences_of_everything()), "utf-8")
    every: list[str] = json.loads(file.read_text("utf-8"))
    if held_out > len(every) // 2:
        raise SystemExit(f"there are {len(every):,} sentences here; hold out at most half of them.")
    return every[held_out:], every[:held_out]


def shrunken(source: Path, scratch: Path, texts: list[str], keep: int | None, **how: Any) -> ShrunkVocabulary:
    """The directory with fewer tokens, verified."""
    out = scratch / f"{source.name}-{keep or 'seen'}"
    if out.exists():
        shutil.rmtree(out)
    done = shrink_vocabulary(source, texts=["\n".join(texts)], out=out, keep=keep, exact=keep is None, **how)
    found = verify_checkpoint(out, source)
    if not found.ok:
        raise SystemExit(f"{out}: {found.problems[0]}")
    return done


# ---- MiniLM ----


@torch.no_grad()
def embeddings(model: nn.Module, tokenizer: Any, texts: list[str], what: str, found: Tensor | None = None) -> Tensor:
    """Means over tokens, of length one. What was ``found`` before is not made again: rows of NaN are filled in."""
    ids = tokenizer(texts, truncation=True, max_length=128)["input_ids"]
    order = sorted(range(len(texts)), key=lambda at: len(ids[at]))  # of characters, a third of a batch is padding
    if found is None:
        found = torch.full((len(texts), model.config.hidden_size), math.nan)  # type: ignore[union-attr]
    for begin in track(range(0, len(texts), 128), what):
        some = order[begin : begin + 128]
        if bool(found[some].isfinite().all()):
            continue
        batch = tokenizer.pad({"input_ids": [ids[at] for at in some]}, return_tensors="pt")
        kept = batch["attention_mask"][..., None].float()
        found[some] = (model(**batch).last_hidden_state * kept).sum(1) / kept.sum(1)
    return nn.functional.normalize(found)


def kept_in(scratch: Path, source: Path, texts: list[str], width: int) -> Tensor:
    """A row for the vector of each text, NaN until it is there, in a file that keeps what is written."""
    told = hashlib.sha256(json.dumps([str(source), texts]).encode()).hexdigest()
    file = scratch / f"vectors-{told[:16]}.npy"
    if not file.exists():
        numpy.save(file, numpy.full((len(texts), width), math.nan, dtype=numpy.float32))
    return torch.from_numpy(numpy.load(file, mmap_mode="r+"))


def overlap(first: Tensor, second: Tensor, size: int = 500) -> float:
    """The share of the nearest neighbours that are the same."""
    same = 0
    for begin in track(range(0, len(first), size), "finding neighbours"):
        nearest = []
        for every in (first, second):
            similar = every[begin : begin + size] @ every.T
            similar[torch.arange(len(similar)), torch.arange(begin, begin + len(similar))] = -2
            nearest.append(
                torch.zeros_like(similar, dtype=torch.bool).scatter_(1, similar.topk(NEIGHBOURS).indices, True)
            )
        same += int((nearest[0] & nearest[1]).sum())
    return same / (NEIGHBOURS * len(first))


def minilm(options: argparse.Namespace) -> None:
    from transformers import AutoModel, AutoTokenizer

    counted, held_out = sentences(options.scratch, options.held_out)
    if options.changed:
        changed_only(options, counted, held_out)
        return
    judged = held_out[: options.embedded]
    tokenizer = AutoTokenizer.from_pretrained(options.minilm)
    whole = AutoModel.from_pretrained(options.minilm).eval()
    kept = kept_in(options.scratch, options.minilm, held_out, whole.config.hidden_size)
    dense = embeddings(whole, tokenizer, judged, "embedding", kept[: len(judged)])
    old = tokenizer(held_out, truncation=True, max_length=128)["input_ids"]
    print(f"counted on {len(counted):,} sentences, read {len(held_out):,} others, embedded {len(judged):,} of these\n")
    columns = [
        "tokens",
        "parameters gone",
        "tokens that stay",
        "strings read as before",
        "cosine: mean, 1st percentile",
    ]
    print(head([*columns, f"{NEIGHBOURS}-NN overlap", "seconds beside counting"]), flush=True)
    for keep in options.keep:
        done = shrunken(options.minilm, options.scratch, counted, keep, script=options.script, rank=options.rank)
        smaller = AutoTokenizer.from_pretrained(done.out)
        new = smaller(held_out, truncation=True, max_length=128)["input_ids"]
        order = done.order.tolist()
        stays = set(order)
        changed = [at for at in range(len(old)) if old[at] != [order[number] for number in new[at]]]
        here = [at for at in changed if at < len(judged)]
        model = AutoModel.from_pretrained(done.out).eval()
        found = dense.clone()
        found[here] = embeddings(model, smaller, [judged[at] for at in here], "embedding what changed")
        _check_same(model, smaller, judged, dense, sorted({*range(SEEN)} - {*here}))
        cosine = (dense * found).sum(1).clamp(max=1)
        cells = [
            f"{done.rows[1]:,}",
            f"{1 - done.parameters[1] / done.parameters[0]:.1%}",
            f"{sum(number in stays for ids in old for number in ids) / sum(map(len, old)):.3%}",
            f"{1 - len(changed) / len(held_out):.2%}",
            f"{cosine.mean():.6f}, {cosine.quantile(0.01):.4f}",
            f"{overlap(dense, found):.4f}",
            f"{done.seconds - done.counting:.1f}",
        ]
        print(row(cells), flush=True)


def changed_only(options: argparse.Namespace, counted: list[str], held_out: list[str]) -> None:
    """Cosines of all held-out strings from vectors of those alone that are read otherwise: the others' are 1, which is
    checked on some. Neighbours need all vectors, and are left out."""
    from transformers import AutoModel, AutoTokenizer

    whole, tokenizer = AutoModel.from_pretrained(options.minilm).eval(), AutoTokenizer.from_pretrained(options.minilm)
    old = tokenizer(held_out, truncation=True, max_length=128)["input_ids"]
    print(f"counted on {len(counted):,} sentences, read {len(held_out):,} others\n")
    print(head(["tokens", "parameters gone", "strings read as before", "cosine: mean", "1st percentile", "least"]))
    for keep in options.keep:
        done = shrunken(options.minilm, options.scratch, counted, keep, script=options.script, rank=options.rank)
        model, smaller = AutoModel.from_pretrained(done.out).eval(), AutoTokenizer.from_pretrained(done.out)
        new = smaller(held_out, truncation=True, max_length=128)["input_ids"]
        order = done.order.tolist()
        changed = [at for at in range(len(old)) if old[at] != [order[number] for number in new[at]]]
        texts = [held_out[at] for at in changed]
        before = embeddings(whole, tokenizer, texts, "embedding what changed")
        after = embeddings(model, smaller, texts, "embedding it again")
        same = sorted({*range(SEEN)} - {*changed})
        seen = embeddings(whole, tokenizer, [held_out[at] for at in same], "embedding some others")
        _check_same(model, smaller, [held_out[at] for at in same], seen, [*range(len(same))])
        cosine = torch.ones(len(held_out))
        cosine[changed] = (before * after).sum(1).clamp(max=1)
        cells = [
            f"{done.rows[1]:,}",
            f"{1 - done.parameters[1] / done.parameters[0]:.1%}",
            f"{1 - len(changed) / len(held_out):.2%}",
            f"{cosine.mean():.6f}",
            f"{cosine.quantile(0.01):.4f}",
            f"{cosine.min():.4f}",
        ]
        print(row(cells), flush=True)


def _check_same(model: nn.Module, tokenizer: Any, texts: list[str], dense: Tensor, same: list[int]) -> None:
    """What is read as before has the same vector, but for how batches are put together."""
    found = embeddings(model, tokenizer, [texts[at] for at in same], "checking what did not change")
    worst = float((found - dense[same]).abs().max())
    if worst > 1e-5:
        raise SystemExit(f"a string that is read as before has another vector, by {worst}")


# ---- SmolLM2 ----


@torch.no_grad()
def bits(model: nn.Module, tokenizer: Any, text: str, length: int, most: int) -> tuple[float, float]:
    """Perplexity of a character, and characters a token: all of the text's tokens in windows of so many."""
    encoded = tokenizer(text, return_tensors="pt", return_offsets_mapping=True, verbose=False)
    tokens, ends = encoded.input_ids[0], encoded.offset_mapping[0, :, 1]
    loss, characters, count = 0.0, 0, 0
    begin_of_text = tokenizer.bos_token_id
    for window in track(range(most), "measuring"):
        begin = window * length
        part = tokens[begin : begin + length]
        if len(part) < length:
            break
        # one token before, so that each of the window's is predicted
        rows = torch.cat([torch.tensor([begin_of_text]), part])[None]
        loss += float(model(input_ids=rows, labels=rows).loss) * length
        characters += int(ends[begin + length - 1] - (ends[begin - 1] if begin else 0))
        count += length
    return math.exp(loss / characters), characters / count


def smollm2(options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    counted, held_out = sentences(options.scratch, options.held_out)
    text = "\n".join(held_out)[: options.windows * 512 * 8]
    print(f"counted on {len(counted):,} sentences, measured on {options.windows} windows of 512 tokens of others\n")
    columns = [
        "tokens",
        "parameters gone",
        "perplexity of a character",
        "characters a token",
        "seconds beside counting",
    ]
    print(head(columns))

    def measured(directory: Path) -> list[str]:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(directory)
        return [f"{value:.{digits}f}" for value, digits in zip(
            bits(model, tokenizer, text, 512, options.windows), (4, 3), strict=True
        )]  # fmt: skip

    print(row(["all", "0%", *measured(options.smollm2), ""]), flush=True)
    for keep in options.keep:
        how = {"script": options.script, "rank": options.rank, "multiple": 64}
        done = shrunken(options.smollm2, options.scratch, counted, keep, **how)
        assert done.out is not None
        gone = f"{1 - done.parameters[1] / done.parameters[0]:.1%}"
        print(row([f"{done.rows[1]:,}", gone, *measured(done.out), f"{done.seconds - done.counting:.1f}"]), flush=True)
        shutil.rmtree(done.out)


@torch.no_grad()
def nats(model: nn.Module, tokenizer: Any, text: str) -> float:
    """Nats a character of the same text, however many tokens it has: windows of 2,000 characters."""
    loss = 0.0
    for begin in track(range(0, len(text), 2000), "measuring"):
        ids = tokenizer(text[begin : begin + 2000], verbose=False)["input_ids"]
        rows = torch.tensor([[tokenizer.bos_token_id, *ids]])
        loss += float(model(input_ids=rows, labels=rows).loss) * len(ids)
    return loss / len(text)


def trim(options: argparse.Namespace) -> None:
    """The default and ``exact`` on samples of three sizes; nats a character of text of the same kind."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first, second = corpora.of_modules()
    reference = corpora.language_reference()
    texts, others = corpora.of_packages()
    samples = {
        "docstrings of modules": (first[:340_000], second),
        "language reference": (reference[:50_000], reference[-100_000:]),
        "docstrings of packages": ("\n\n".join(texts)[:2_000_000], "\n\n".join(others)),
    }
    print(head(["text", "characters", "asked", "tokens", "parameters gone", "unseen tokens stay", "nats", "more"]))
    tokenizer = AutoTokenizer.from_pretrained(options.smollm2)
    for name, (text, unseen) in samples.items():
        unseen = unseen[: options.windows * 2000]
        whole = 0.0
        for asked in (None, False, True):
            directory, cells = options.smollm2, ["whole", "49,152", "0%", "100%"]
            if asked is not None:
                out = options.scratch / f"trimmed-{asked}"
                if out.exists():
                    shutil.rmtree(out)
                done = shrink_vocabulary(options.smollm2, texts=[text], out=out, exact=asked)
                ids = numpy.array(tokenizer(unseen, verbose=False)["input_ids"])
                gone = f"{1 - done.parameters[1] / done.parameters[0]:.1%}"
                stays = f"{numpy.isin(ids, done.order).mean():.2%}"
                directory, cells = out, ["exact" if asked else "default", f"{done.rows[1]:,}", gone, stays]
                print(done, file=sys.stderr)
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            found = nats(model, AutoTokenizer.from_pretrained(directory), unseen)
            whole = whole or found
            print(row([name, f"{len(text):,}", *cells, f"{found:.4f}", f"{found / whole - 1:+.2%}"]), flush=True)


def languages(options: argparse.Namespace) -> None:
    """A share of all parameters leaves SmolLM2: by texts of three languages, by those of one, and with the tokens that
    this one never has leaving first. Nats a character of other texts of each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = corpora.languages()
    options.scratch.mkdir(parents=True, exist_ok=True)
    mine, out = options.language, options.scratch / "of-one-language"
    if out.exists():
        shutil.rmtree(out)
    trimmed = shrink_vocabulary(options.smollm2, texts=[texts[mine][0]], out=out)
    print(trimmed, file=sys.stderr)
    whole = trimmed.parameters[0]
    methods = {"whole": (options.smollm2, ()), "three languages": (options.smollm2, tuple(texts))}
    methods |= {mine: (options.smollm2, (mine,)), f"{mine}, and its tokens": (out, (mine,))}
    print(head(["calibrated on", "tokens", "parameters gone", *texts, "processor, s"]))
    for name, (directory, chosen) in methods.items():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(directory)
        started = time.process_time()
        if chosen:
            batches = _sequences(tokenizer, [texts[each][0] for each in chosen], options.samples)
            example = {"input_ids": batches[0]["input_ids"][:, :64], "use_cache": False}
            share = 1 - (1 - options.share) * whole / _count(model)
            shrink(model, example, share, target="params", uniform=True, batches=batches)
        spent = time.process_time() - started
        gone = f"{1 - _count(model) / whole:.1%}"
        found = [f"{nats(model, tokenizer, text[: options.windows * 2000]):.4f}" for _, text in texts.values()]
        print(row([name, f"{len(tokenizer):,}", gone, *found, f"{spent:.0f}"]), flush=True)


def _count(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def _sequences(tokenizer: Any, texts: list[str], count: int) -> list[dict[str, Tensor]]:
    """So many of 512 tokens, as many of each text."""
    found = []
    for text in texts:
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
        starts = torch.linspace(0, len(ids) - 512, count // len(texts)).long()
        found += [{"input_ids": ids[None, start : start + 512]} for start in starts.tolist()]
    return found


def _numbers(text: str) -> list[int | None]:
    return [int(part) or None for part in text.split(",")]


def _parser() -> Iterator[argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, run, keep in (("minilm", minilm, "8000,10000,12500,0"), ("smollm2", smollm2, "16000,24000,32000,0")):
        one = commands.add_parser(name)
        one.add_argument(f"--{name}", type=Path, required=True, metavar="DIR")
        one.add_argument("--scratch", type=Path, required=True, metavar="FOLDER")
        one.add_argument("--keep", type=_numbers, default=_numbers(keep), help="0 for those that the text has")
        one.add_argument("--held-out", type=int, default=100_000, metavar="N")
        one.add_argument("--embedded", type=int, default=100_000, metavar="N", help="of the held-out ones")
        one.add_argument("--changed", action="store_true", help="cosines alone, embedding only what is read otherwise")
        one.add_argument("--script", metavar="NAME", help="tokens with letters of others leave")
        one.add_argument("--rank", choices=("count", "distance"), help="what leaves next")
        one.add_argument("--windows", type=int, default=48, metavar="N")
        one.set_defaults(run=run)
    one = commands.add_parser("trim")
    one.add_argument("--smollm2", type=Path, required=True, metavar="DIR")
    one.add_argument("--scratch", type=Path, required=True, metavar="FOLDER")
    one.add_argument("--windows", type=int, default=16, metavar="N", help="of 2,000 characters")
    one.set_defaults(run=trim)
    one = commands.add_parser("languages")
    one.add_argument("--smollm2", type=Path, required=True, metavar="DIR")
    one.add_argument("--scratch", type=Path, required=True, metavar="FOLDER")
    one.add_argument("--language", default="Python", choices=("English", "Python", "C++"), help="the one that is used")
    one.add_argument("--share", type=float, default=0.2, help="of all parameters")
    one.add_argument("--samples", type=int, default=12, metavar="N", help="of 512 tokens")
    one.add_argument("--windows", type=int, default=12, metavar="N", help="of 2,000 characters")
    one.set_defaults(run=languages)
    one = commands.add_parser("combinations")
    one.add_argument("--tools", default="secateur,hf-trim,vocabtrimmer,textpruner")
    one.set_defaults(run=lambda options: combinations(options.tools.split(",")))
    yield parser


if __name__ == "__main__":
    (parser,) = _parser()
    options = parser.parse_args()
    started = time.monotonic()
    options.run(options)
    print(f"\n{time.monotonic() - started:.0f} s", file=sys.stderr)
