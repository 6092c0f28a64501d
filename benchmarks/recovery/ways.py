"""What is compared: ways to train a pruned model at equal tokens, each from the same start.

Law: every way sees the same batches equally often, uses the same optimizer, and is judged on text that none of them
trained on. One epoch of the local part counts as one pass over its batches, since each half of a block is run once.
Seconds are of the processor, in all threads.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.support import corpora, tables
from benchmarks.support.language_models import MiniLM
from benchmarks.support.tables import head
from secateur import oneshot, shrink
from secateur.recovery import Sampled, merge_keeping_zeros, recover
from secateur.recovery.outputs import sampled, spread_over

SETTINGS = ("2:4", "half", "0.5", "0.6", "0.7", "0.8")
WAYS = ("plain", "outputs", "local", "both", "mixed", "dense", "corrected")
# of the teacher; "dense" is plain, of the teacher itself, and "corrected" mixed, by a teacher that "dense" left
SHARES = {"plain": 0.0, "outputs": 1.0, "mixed": 0.5, "dense": 0.0, "corrected": 0.5}
LOCAL = 1  # epochs of the local part, or more where batches are fewer
EMBEDDINGS = "*embeddings*"  # MiniLM's stay: half of its parameters, and a quarter of the time for nothing


def trained(
    model: nn.Module, teacher: nn.Module, batches: list[dict[str, Tensor]], way: str, steps: int, **options: Any
) -> Any:
    """The model after so many batches in one of the `WAYS`."""
    if way == "corrected":  # as in Minitron's second report, arXiv:2408.11796: the teacher learns what the text is like
        teacher = copy.deepcopy(teacher)
        plain = {name: value for name, value in options.items() if name != "on_step"}
        recover(teacher, copy.deepcopy(teacher), batches, steps=steps, local=0, share=0.0, **plain)
    if way in SHARES:
        return recover(model, teacher, batches, steps=steps, local=0, share=SHARES[way], **options)
    share = steps if way == "local" else steps // 2  # of the passes, for the local part
    few = max(1, min(len(batches), share // LOCAL))
    local = max(1, share // few)
    left = steps - local * few
    done = recover(model, teacher, spread_over(batches, few), steps=0, local=local, **options)
    return done if way == "local" else recover(model, teacher, batches, steps=left, local=0, **options)


def row(cells: list[Any]) -> str:
    return tables.row([str(each) for each in cells])


def _timed(run: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float, float]:
    processor, wall = time.process_time(), time.monotonic()
    found = run(*arguments, **options)
    return found, time.process_time() - processor, time.monotonic() - wall


def pruned_minilm(subject: MiniLM, setting: str, seed: int) -> nn.Module:
    """MiniLM at 2:4, at half of its multiply-adds, or at a sparsity; of 256 sentences."""
    calibration = subject.batches(seed, 256, 32)
    pruned = copy.deepcopy(subject.model)
    if setting == "half":
        shrink(pruned, calibration[0], 0.5, target="macs", batches=calibration)
    elif setting == "2:4":
        oneshot(pruned, calibration, pattern="2:4")
    else:
        oneshot(pruned, calibration, float(setting))
    return pruned


def minilm(
    directory: Path,
    settings: list[str],
    ways: list[str],
    seeds: list[int],
    sentences: int,
    size: int,
    rate: float,
) -> list[dict[str, Any]]:
    """MiniLM at the `SETTINGS`, by so many sentences, each of which is run once, in batches of one length."""
    subject = MiniLM(directory)
    rows: list[dict[str, Any]] = []
    print(head(["setting", "seed", "way", "sentences", "cosine", "10-NN overlap", "processor s", "zeros kept"]))
    for setting in settings:
        for seed in seeds:
            pruned = pruned_minilm(subject, setting, seed)
            batches = subject.batches(100 + seed, sentences, size)
            random.Random(seed).shuffle(batches)  # they come by length, and the local part takes the first
            cosine, overlap = subject.measure(pruned)
            rows.append({"setting": setting, "seed": seed, "way": "as pruned", "cosine": cosine, "overlap": overlap})
            print(row([setting, seed, "as pruned", "", f"{cosine:.4f}", f"{overlap:.3f}", "", ""]), flush=True)
            for way in ways:
                model = copy.deepcopy(pruned)
                done, seconds, _ = _timed(
                    trained, model, subject.model, batches, way, len(batches), seed=seed, exclude=EMBEDDINGS, rate=rate
                )
                cosine, overlap = subject.measure(model)
                kept = all(before == after for before, after in done.zeros.values())
                rows.append({"setting": setting, "seed": seed, "way": way, "sentences": sentences, "cosine": cosine,
                             "overlap": overlap, "seconds": seconds, "zeros kept": kept})  # fmt: skip
                print(row([setting, seed, way, sentences, f"{cosine:.4f}", f"{overlap:.3f}", f"{seconds:.0f}", kept]),
                      flush=True)  # fmt: skip
    return rows


def measured(directory: Path, others: list[Path]) -> list[dict[str, Any]]:
    """What verbs left of MiniLM in directories."""
    subject = MiniLM(directory)
    rows = []
    print(head(["directory", "cosine", "10-NN overlap"]))
    for each in others:
        cosine, overlap = subject.measure(subject.load(each))
        rows.append({"directory": each.name, "cosine": cosine, "overlap": overlap})
        print(row([each.name, f"{cosine:.4f}", f"{overlap:.3f}"]), flush=True)
    return rows


@dataclass(frozen=True)
class Runs:
    """What is run of a language model: ``at`` tokens a run is judged, the last of which is its end; ``sampled``: the
    text is the teacher's own, and not the first one given; ``compiled``: by torch.compile, both models."""

    ways: list[str]
    seeds: list[int]
    at: list[int]
    length: int
    size: int
    rate: float
    judged: int
    autocast: str | None = None
    sampled: bool = False
    compiled: bool = False


def smollm2(directories: tuple[Path, Path], texts: tuple[Path, ...], runs: Runs) -> list[dict[str, Any]]:
    """A language model that was pruned, by its perplexity on texts that it is not trained on.

    The first text is trained on. What is back, and how far the outputs are, is of the second; others are read, too.
    One run is judged at several lengths: before the last the rate is what the whole run's schedule has there.
    """
    import transformers

    transformers.logging.disable_progress_bar()
    # of so short rows, scaled_dot_product_attention takes a sixth of a step to go back through on a processor
    pruned, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32, attn_implementation="eager")
        for each in directories
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(directories[1])
    train, *judges = (_rows(tokenizer, path, runs.length) for path in texts)
    judges = [each[: runs.judged] for each in judges]
    logits = [_logits(teacher, judges[0]), *([] for _ in judges[1:])]

    def judged(model: Any) -> tuple[list[float], float]:
        found = [_perplexity(model, *each) for each in zip(judges, logits, strict=True)]
        return [each for each, _ in found], found[0][1]

    (dense, _), (before, far) = judged(teacher), judged(pruned)
    each_step = runs.length * runs.size
    stops = sorted({tokens // each_step for tokens in runs.at})
    print(f"dense {_told(dense)}, as pruned {_told(before)}, {far:.4f} from it")
    print(f"{stops[-1]} steps of {runs.size} × {runs.length} tokens; {len(train)} rows of the text")
    columns = ["way", "seed", "tokens", "perplexity", "lost perplexity back", "divergence from dense"]
    print(head([*columns, *(each.stem for each in texts[2:]), "back of these", "processor s", "wall s"]), flush=True)
    rows: list[dict[str, Any]] = []
    for seed in runs.seeds:
        if runs.sampled:
            (train, seconds, _) = _timed(_written_by, teacher, stops[-1] * runs.size, runs.length, seed)
            print(f"seed {seed}: the teacher wrote {train.numel():,} tokens in {seconds:.0f} s of the processor")
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(train), generator=draw)
        batches = [{"input_ids": train[each]} for each in order.split(runs.size) if len(each) == runs.size]
        for way in runs.ways:
            model = copy.deepcopy(teacher if way == "dense" else pruned)
            _compile(model, teacher, also=runs.compiled)
            clock = _Clock()

            def judge(number: int, way: str = way, seed: int = seed, model: Any = model, clock: Any = clock) -> None:
                seconds, wall = clock.stopped()
                after, far = judged(model)
                back = [(was - now) / (was - whole) for was, now, whole in zip(before, after, dense, strict=True)]
                rows.append({"way": way, "seed": seed, "tokens": number * each_step, "dense": dense, "before": before,
                             "after": after, "back": back, "divergence": far, "seconds": seconds,
                             "wall": wall})  # fmt: skip
                print(row([way, seed, f"{number * each_step:,}", f"{after[0]:.3f}", f"{back[0]:.1%}", f"{far:.4f}",
                           *(f"{each:.3f}" for each in after[1:]), ", ".join(f"{each:.1%}" for each in back[1:]),
                           f"{seconds:.0f}", f"{wall:.0f}"]), flush=True)  # fmt: skip
                clock.start()

            def on_step(number: int, _loss: float, judge: Any = judge) -> None:
                if number in stops[:-1]:
                    judge(number)

            options = {"rate": runs.rate, "seed": seed, "autocast": runs.autocast, "on_step": on_step}
            trained(model, teacher, batches, way, stops[-1], **options)
            judge(stops[-1])
    return rows


def _compile(*models: Any, also: bool, backend: str = "inductor") -> None:
    """What is compiled stays so while shapes do; a model that is copied is to be compiled itself."""
    for each in models if also else ():
        if each._compiled_call_impl is None:
            each.compile(dynamic=False, backend=backend)


class _Clock:
    """Seconds of the processor and of the wall that training took, without what judging it did."""

    def __init__(self) -> None:
        self.processor = self.wall = 0.0
        self.start()

    def start(self) -> None:
        self.began = time.process_time(), time.monotonic()

    def stopped(self) -> tuple[float, float]:
        self.processor += time.process_time() - self.began[0]
        self.wall += time.monotonic() - self.began[1]
        return self.processor, self.wall


def _written_by(teacher: Any, rows: int, length: int, seed: int) -> Tensor:
    return sampled(teacher, Sampled(rows, length), seed)


def write_texts(folder: Path) -> None:
    """calib.txt and judge.txt: docstrings of Python's modules a to m, and n to z; manual.txt: its own manual; wide.txt:
    those of a to m and of NumPy, scikit-learn and torch, less what the judge has, in an order of no meaning."""
    folder.mkdir(parents=True, exist_ok=True)
    calibration, judge = corpora.of_modules()
    own = set(judge.split("\n\n"))
    wide = corpora.shuffled([*corpora.of_installed(("numpy", "sklearn", "torch")), *calibration.split("\n\n")])
    texts = {"calib": calibration, "judge": judge, "manual": "\n\n".join(topics.values())}
    texts["wide"] = "\n\n".join(text for text in wide if not own & set(text.split("\n\n")))
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
        print(f"{name}.txt: {len(text):,} characters")


def speeds(
    directories: tuple[Path, Path], data: Path, length: int, size: int, rounds: int, backend: str = "inductor"
) -> list[dict[str, Any]]:
    """Seconds of the processor for a step by the outputs, in float32, in bfloat16, with attention that is written out,
    and compiled, in turns: the second and third step of three, since the first one makes room, and compiles."""
    import transformers

    plain, eager, compiled = (
        [
            transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32, attn_implementation=attention)
            for each in directories
        ]
        for attention in ("sdpa", "eager", "eager")
    )
    _compile(*compiled, also=True, backend=backend)
    train = _rows(transformers.AutoTokenizer.from_pretrained(directories[1]), data, length)
    batches = [{"input_ids": each} for each in train[: 3 * size].split(size)]
    ways = {
        "float32": (plain, None),
        "bfloat16": (plain, "bfloat16"),
        "bfloat16, eager attention": (eager, "bfloat16"),
        "bfloat16, eager attention, compiled": (compiled, "bfloat16"),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, (models, autocast) in ways.items():
            times: list[float] = []
            said = {"autocast": autocast, "on_step": lambda *_, times=times: times.append(time.process_time())}
            recover(*models, batches, steps=3, local=0, rate=1e-6, **said)
            found[way] += [later - sooner for sooner, later in itertools.pairwise(times)]
    print(head(["way", "processor s a step", "tokens a second"]))
    rows = []
    for way, seconds in found.items():
        each = statistics.median(seconds)
        rows.append({"way": way, "seconds": seconds, "tokens": length * size / each})
        print(row([way, f"{each:.2f}", f"{length * size / each:.0f}"]), flush=True)
    return rows


def _told(perplexities: list[float]) -> str:
    return " and ".join(f"{each:.2f}" for each in perplexities)


def _rows(tokenizer: Any, path: Path, length: int) -> Tensor:
    tokens: Tensor = tokenizer(path.read_text(), return_tensors="pt", verbose=False).input_ids[0]
    return tokens[: len(tokens) // length * length].view(-1, length)


@torch.no_grad()
def _logits(model: Any, rows: Tensor) -> list[Tensor]:
    return [model.forward(input_ids=part).logits[0] for part in rows.split(1)]


@torch.no_grad()
def _perplexity(model: Any, rows: Tensor, wanted: list[Tensor]) -> tuple[float, float]:
    """And how far its outputs are from the dense model's, where these are given: a mean over tokens of KL. What plain
    fine-tuning learns of the text is not in the dense model, and counts as far."""
    model.eval()
    losses, far = [], [0.0] if not wanted else []
    for at, part in enumerate(rows.split(1)):
        given = model.forward(input_ids=part, labels=part)  # the text's own rows, for which nothing is compiled
        losses.append(float(given.loss))
        if wanted:
            p, q = (each.float().log_softmax(-1) for each in (wanted[at], given.logits[0]))
            far.append(float((p.exp() * (p - q)).sum(-1).mean()))
    return math.exp(statistics.mean(losses)), statistics.mean(far)


def adapters() -> list[dict[str, Any]]:
    """What a plain merge of peft's adapters leaves of the zeros of a small model, and a merge under the mask."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    from secateur import sparsify

    rows = []
    print(head(["sparsity", "target modules", "zeros before", "plain merge", "merge_keeping_zeros"]))
    for sparsity in (0.4, 0.5, 0.7):
        for modules in (["q_proj", "v_proj"], "all-linear"):
            torch.manual_seed(0)
            size = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 4}
            model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=4, **size))
            sparsify(model, sparsity)
            every = [each for name, each in model.named_parameters() if name.endswith("_proj.weight")]
            names = {id(each) for each in every}
            entries = sum(each.numel() for each in every)
            zeros = sum(int((each == 0).sum()) for each in every)
            config = peft.LoraConfig(r=8, target_modules=modules, init_lora_weights=False)
            done = merge_keeping_zeros(peft.get_peft_model(model, config))
            kept = sum(int((e == 0).sum()) for n, e in done.model.named_parameters() if n.endswith("_proj.weight"))
            plain = kept - sum(done.kept.values()) + sum(done.plain.values())
            assert len(names) == len(every)
            rows.append(
                {"sparsity": zeros / entries, "modules": str(modules), "plain": plain / entries, "kept": kept / entries}
            )
            shown = modules if isinstance(modules, str) else ", ".join(modules)
            print(row([sparsity, shown, f"{zeros:,}", f"{plain / entries:.1%}", f"{kept / entries:.1%}"]), flush=True)
    return rows
