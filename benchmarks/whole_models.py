"""Whole models with trained weights: what pruning does to milliseconds and bytes, with the accuracy beside it.

Run by ``python benchmarks/inference.py models`` (or ``onnx``, for single layers in ONNX Runtime); everything that is
printed is measured there.

Law: no latency without an accuracy; the rows of a table run in one process, alternating, and a ratio is the median of
the rounds' ratios; dense rivals (torch.compile, ONNX Runtime, int8) run in the same rounds as what is pruned.

- The digits' networks are trained here and pruned while they are fine-tuned, in the demo's budget.
- MiniLM (``--minilm DIR``) and a Llama that is trained here on docstrings are pruned in one shot by `oneshot`'s
  `admm`. Their shrunken forms train for ``--repair-steps`` afterwards, on calibration text alone, because a solver for
  removed channels there is none; one sparse form has the same training, to compare.
- Trained and pruned weights, and their accuracies, stay in ``--cache``: a second run only measures time.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import io
import json
import logging
import math
import random
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import oneshot as oneshot_benchmark
from inference import alternating, ratio
from secateur import oneshot, shrink, sparsify
from secateur.allocation import uniform
from secateur.criteria import magnitude
from secateur.demo import story as demo
from secateur.inference import GroupedLinear, pack
from secateur.patterns import GroupedColumns, Pattern, parse
from secateur.pipeline import reestimate_batchnorm
from secateur.shrinking import load_shrunken, save_shrunken
from secateur.support import track
from secateur.training import Pruner

PATTERNS = ("unstructured", "16x1", "columns:64")
SPARSITIES = (0.5, 0.8, 0.9)
TRAINED_ON = ("columns:64", 0.8)  # the sparse form that has the shrunken one's training, too


# ------------------------------------------------------------------------------------------------------ the subjects


class Subject:
    """A trained model, how it is served and judged, and how it is pruned.

    ``example`` is what one call of ``serve(model)`` gets. ``accuracy(call)`` is of a call with ``judged`` as inputs'
    shape; where it is served as it is judged, the two are the same.
    """

    title: str
    metric: str
    form: str  # how the metric is printed
    example: tuple[Tensor, ...]
    judged: tuple[Tensor, ...]
    model: nn.Module

    def serve(self, model: nn.Module) -> nn.Module:
        return model

    def judge(self, model: nn.Module) -> nn.Module:
        return self.serve(model)

    def accuracy(self, call: Callable[..., Any]) -> float:
        raise NotImplementedError

    def prune(self, model: nn.Module, pattern: Pattern, sparsity: float) -> None:
        raise NotImplementedError

    def train(self, model: nn.Module, masks: dict[str, Tensor] | None) -> None:
        """A little training of a model that was shrunken or pruned."""
        raise NotImplementedError

    def shrink(self, model: nn.Module) -> None:
        raise NotImplementedError


class Digits(Subject):
    """A network that reads digits, 64 images at a time."""

    metric, form = "right, %", ".1f"

    def __init__(self, title: str, build: Callable[[], nn.Module], spare: tuple[str, ...], cache: Path) -> None:
        self.title, self.spare = title, spare
        self.data = demo.load_digits()
        self.example = self.judged = (self.data.test_images[:64],)
        torch.manual_seed(0)
        self.model = build()

        def make(model: nn.Module) -> None:
            demo.train(model, self.data, epochs=demo.EPOCHS, rate=demo.RATE, seed=0)

        self.before = cached(cache / "trained.safetensors", self.model, make)
        self.model = copy.deepcopy(self.before)

        def tune(model: nn.Module) -> None:  # as long as everything that is pruned
            demo.train(model, self.data, epochs=demo.TUNING_EPOCHS, rate=demo.RATE, seed=1)
            reestimate_batchnorm(model, [self.data.train_images])

        cached(cache / "dense.safetensors", self.model, tune)
        self.model.eval()

    def accuracy(self, call: Callable[..., Any]) -> float:
        images, labels = self.data.test_images, self.data.test_labels
        right = 0
        for part, wanted in zip(images.split(64), labels.split(64), strict=True):
            padded = functional.pad(part, (0,) * 7 + (64 - len(part),))
            right += int((torch.as_tensor(call(padded))[: len(part)].argmax(1) == wanted).sum())
        return 100 * right / len(images)

    def prune(self, model: nn.Module, pattern: Pattern, sparsity: float) -> None:
        model.load_state_dict(self.before.state_dict())
        pruners: list[Pruner] = []

        def begin(optimizer: torch.optim.Optimizer, steps: int) -> None:
            pruners.append(
                Pruner(
                    model, optimizer, sparsity, pattern=pattern, criterion=magnitude, allocate=uniform,
                    exclude=self.spare, total_steps=steps, verbose=False,
                )
            )  # fmt: skip

        demo.train(model, self.data, epochs=demo.TUNING_EPOCHS, rate=demo.RATE, seed=1, begin=begin)
        pruners[0].finish()
        reestimate_batchnorm(model, [self.data.train_images])

    def shrink(self, model: nn.Module) -> None:
        model.load_state_dict(self.before.state_dict())
        shrink(model, self.example, 0.5, target="macs")

    def train(self, model: nn.Module, masks: dict[str, Tensor] | None) -> None:
        demo.train(model, self.data, epochs=demo.TUNING_EPOCHS, rate=demo.RATE, seed=1, masks=masks)
        reestimate_batchnorm(model, [self.data.train_images])


class _Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut, as in ResNet-50."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        sizes = ((wide, narrow, 1), (narrow, narrow, 3), (narrow, wide, 1))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False) for inputs, outputs, size in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _, outputs, _ in sizes)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = (
                functional.relu(norm(convolution(y)))
                if convolution is not self.convolutions[2]
                else norm(convolution(y))
            )
        return functional.relu(x + y)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def bottlenecks() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 256, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(256), nn.ReLU(),
        _Bottleneck(256, 64), _Bottleneck(256, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


class _Embeddings(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask[..., None].to(hidden.dtype)
        return functional.normalize((hidden * kept).sum(1) / kept.sum(1))


class Encoder(Subject):
    """all-MiniLM-L6-v2 on 8 sentences of up to 64 tokens; held-out sentences say how near the embeddings stay."""

    title, metric, form = "MiniLM, 8 sentences of 64 tokens", "cosine to dense", ".4f"
    held_out = 504

    def __init__(self, directory: Path, repair_steps: int) -> None:
        self.subject = oneshot_benchmark.MiniLM(directory)
        self.model, self.steps = self.subject.model, repair_steps
        sentences = oneshot_benchmark.sentences()
        self.parts = [self._tokens(sentences[i : i + 8]) for i in range(0, self.held_out, 8)]
        self.example = self.judged = self.parts[0]
        with torch.no_grad():
            self.dense = torch.cat([self.serve(self.model)(*part) for part in self.parts])

    def _tokens(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        found = self.subject.tokenizer(texts, padding="max_length", truncation=True, max_length=64, return_tensors="pt")
        return found["input_ids"], found["attention_mask"]

    def serve(self, model: nn.Module) -> nn.Module:
        return _Embeddings(model).eval()

    def accuracy(self, call: Callable[..., Any]) -> float:
        new = torch.cat([torch.as_tensor(call(*part)) for part in self.parts])
        return float((functional.normalize(new.float()) * self.dense).sum(1).mean())

    def prune(self, model: nn.Module, pattern: Pattern, sparsity: float) -> None:
        oneshot(model, self.subject.batches(0), sparsity, pattern=pattern)

    def shrink(self, model: nn.Module) -> None:
        shrink(model, dict(zip(("input_ids", "attention_mask"), self.example, strict=True)), 0.5, target="macs")

    def train(self, model: nn.Module, masks: dict[str, Tensor] | None) -> None:
        """Distillation: the embeddings of calibration sentences are to be the dense model's."""
        texts = oneshot_benchmark.sentences()[1000:]
        draw, dense = random.Random(0), self.serve(copy.deepcopy(self.model))

        def loss() -> Tensor:
            batch = self._tokens(draw.sample(texts, 32))
            with torch.no_grad():
                wanted = dense(*batch)
            return 1 - (self.serve(model)(*batch) * wanted).sum(1).mean()

        _train(model, loss, self.steps, 5e-4, masks)


class _NextToken(nn.Module):
    """The logits of one token after others, whose keys and values are held."""

    def __init__(self, model: nn.Module, before: Tensor) -> None:
        super().__init__()
        self.model = model
        with torch.no_grad():
            layers = model(before, use_cache=True).past_key_values.layers
        for number, layer in enumerate(layers):
            self.register_buffer(f"keys{number}", layer.keys, persistent=False)
            self.register_buffer(f"values{number}", layer.values, persistent=False)
        self.layers = len(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        from transformers import DynamicCache

        past = [(getattr(self, f"keys{n}"), getattr(self, f"values{n}")) for n in range(self.layers)]
        return self.model(tokens, past_key_values=DynamicCache(past), use_cache=True).logits


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


class Decoder(Subject):
    """A Llama trained here on docstrings, one token at a time; judged by its perplexity on texts that it never saw."""

    title, metric, form = "Llama, next token", "perplexity", ".2f"

    def __init__(self, cache: Path, steps: int, repair_steps: int, held_out: int = 64) -> None:
        self.subject = _Llama(cache, steps)
        self.model, self.steps = self.subject.model, repair_steps
        self.held_out = self.subject.held_out[:held_out]
        self.example = (self.held_out[:1, 64:65],)
        self.judged = (self.held_out[:1],)

    def serve(self, model: nn.Module) -> nn.Module:
        return _NextToken(model, self.held_out[:1, :64]).eval()

    def judge(self, model: nn.Module) -> nn.Module:
        return _Logits(model).eval()

    def accuracy(self, call: Callable[..., Any]) -> float:
        losses = [
            float(functional.cross_entropy(torch.as_tensor(call(text))[0, :-1].float(), text[0, 1:]))
            for text in self.held_out.split(1)
        ]
        return math.exp(statistics.mean(losses))

    def prune(self, model: nn.Module, pattern: Pattern, sparsity: float) -> None:
        oneshot(model, self.subject.batches(0), sparsity, pattern=pattern)

    def shrink(self, model: nn.Module) -> None:
        shrink(model, {"input_ids": self.judged[0], "use_cache": False}, 0.5, target="macs")

    def train(self, model: nn.Module, masks: dict[str, Tensor] | None) -> None:
        draw = torch.Generator().manual_seed(1)
        data = self.subject.train

        def loss() -> Tensor:
            batch = data[torch.randint(len(data), (8,), generator=draw)][:, :128]
            return model(input_ids=batch, labels=batch).loss

        _train(model, loss, self.steps, 5e-4, masks)


class _Llama(oneshot_benchmark.GPT):
    """The one-shot benchmark's, wider: reading its weights has to be work, or there is nothing to gain."""

    def __init__(self, cache: Path, steps: int) -> None:
        import transformers
        from tokenizers import Tokenizer

        transformers.logging.disable_progress_bar()
        folder = cache / f"llama-{steps}"
        if not (folder / "config.json").exists():
            _train_llama(folder, steps)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.train, self.held_out = (
            oneshot_benchmark._packed(tokenizer, texts, self.length) for texts in oneshot_benchmark._gpt_texts()
        )


def _train_llama(folder: Path, steps: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=["<end>"], show_progress=False)
    texts = oneshot_benchmark._gpt_texts()[0]
    tokenizer.train_from_iterator(texts, trainer)
    data = oneshot_benchmark._packed(tokenizer, texts, 256)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
            max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0,
        )
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        batch = data[torch.randint(len(data), (8,), generator=draw)][:, :128]
        return model(input_ids=batch, labels=batch).loss

    _train(model, loss, steps, 1e-3, None)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    model.save_pretrained(folder)


def _train(
    model: nn.Module, loss: Callable[[], Tensor], steps: int, rate: float, masks: dict[str, Tensor] | None
) -> None:
    """AdamW, one cycle; what the masks removed stays zero."""
    model.requires_grad_(True).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(steps, 1), pct_start=0.1)
    weights = dict(model.named_parameters())
    for step in track(range(steps), "training"):
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for name, mask in (masks or {}).items():
                weights[name].mul_(mask)
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"  step {step + 1}: loss {value.item():.3f}", flush=True)
    model.eval()


# ----------------------------------------------------------------------------------------------------------- caching


def cached(path: Path, model: nn.Module, make: Callable[[nn.Module], object]) -> nn.Module:
    """The model with the weights in the file, which ``make`` trains or prunes where there is none. In place."""
    if path.exists():
        model.load_state_dict(load_file(path))
    else:
        print(f"  making {path.parent.name}/{path.stem}", flush=True)
        make(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, path)
    return model.eval()


class Accuracies:
    """What was judged before, by row, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, row: str, measure: Callable[[], float]) -> float:
        if row not in self.known:
            with torch.no_grad():
                self.known[row] = measure()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.known, indent=1))
        return self.known[row]


def variants(subject: Subject, cache: Path) -> Iterator[tuple[str, nn.Module]]:
    """Every pruned model, dense tensors with zeros in them, and the shrunken one."""
    for word in PATTERNS:
        for sparsity in SPARSITIES:
            name = label(word, sparsity)
            model = copy.deepcopy(subject.model)
            cached(cache / f"{slug(name)}.safetensors", model, partial(_prune, subject, word, sparsity))
            yield name, model
            if (word, sparsity) == TRAINED_ON and not isinstance(subject, Digits):
                name = f"{name}, trained on"
                cached(cache / f"{slug(name)}.safetensors", model, partial(_train_on, subject))
                yield name, model
    model, folder = copy.deepcopy(subject.model), cache / "shrunken"
    if folder.exists():
        load_shrunken(model, folder)
    else:
        print(f"  making {cache.name}/shrunken", flush=True)
        subject.shrink(model)
        subject.train(model, None)
        save_shrunken(model, folder)
    yield "shrink, half the MACs", model.eval()


def _prune(subject: Subject, word: str, sparsity: float, model: nn.Module) -> None:
    subject.prune(model, parse(word), sparsity)


def _train_on(subject: Subject, model: nn.Module) -> None:
    masks = {
        name: weight != 0 for name, weight in model.named_parameters() if weight.dim() == 2 and (weight == 0).any()
    }
    subject.train(model, masks)


def label(word: str, sparsity: float) -> str:
    return f"{word.replace('x', '×')} {100 * sparsity:.0f} %"


def slug(name: str) -> str:
    return re.sub(r"[^\w]+", "-", name.replace("×", "x")).strip("-")


# -------------------------------------------------------------------------------------------------------------- rows


@dataclass
class Row:
    """One way to run a model: what one call is, the bytes of its weights, what it costs in accuracy."""

    name: str
    call: Callable[[], Any]
    bytes: int
    accuracy: float
    note: str = ""
    kind: str = "pruned"  # or float, or int8: the dense rivals


def rows_of(subject: Subject, cache: Path, folder: Path, threads: int) -> list[Row]:
    """All rows of a subject at this number of threads; models that are exported go to ``folder``, once for all."""
    accuracies = Accuracies(cache / "accuracies.json")
    example = subject.example
    rows: list[Row] = []

    def torch_row(name: str, model: nn.Module, accuracy: str, **more: Any) -> None:
        served = subject.serve(model)
        judge = subject.judge(model)
        rows.append(
            Row(
                name,
                lambda: served(*example),
                bytes_of(model),
                accuracies.of(accuracy, lambda: subject.accuracy(judge)),
                **more,
            )
        )

    def onnx_row(name: str, model: nn.Module, quantized: bool, **more: Any) -> None:
        """As `torch_row`, in ONNX Runtime; what it can't export or run is said."""
        try:
            served = judged = onnx_file(folder / f"{slug(name)}.onnx", subject.serve(model), example, quantized)
            run = judge = session(served, threads)
            if subject.judged is not example:
                judged = onnx_file(
                    folder / f"{slug(name)}-judged.onnx", subject.judge(model), subject.judged, quantized
                )
                judge = session(judged, threads)
            accuracy = accuracies.of(name, lambda: subject.accuracy(judge))
            rows.append(Row(name, lambda: run(*example), judged.stat().st_size, accuracy, **more))
        except Exception as error:  # an exporter's failure is a finding
            said(name, error)

    def said(name: str, error: Exception) -> None:
        print(f"({subject.title}: no {name}: {type(error).__name__}: {str(error)[:200].splitlines()})", flush=True)

    dense = subject.model
    torch_row("eager", dense, "eager", kind="float")
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(subject.serve(dense)), options={"freezing": True})
    name = "torch.compile, frozen"
    try:
        with quiet():
            compiled(*example)
        rows.append(Row(name, lambda: compiled(*example), bytes_of(dense), rows[0].accuracy, kind="float"))
    except Exception as error:  # as above
        said(name, error)
    onnx_row("ONNX Runtime", dense, False, kind="float")
    torch_row("int8, torch", int8(dense), "int8, torch", kind="int8")
    onnx_row("int8, ONNX Runtime", dense, True, kind="int8")
    for name, model in variants(subject, cache):
        if name.startswith("shrink"):
            torch_row(name, model, name)
            onnx_row(f"{name}, ONNX Runtime", model, False)
            torch_row(f"{name}, int8 (torch)", int8(model), f"{name}, int8 (torch)")
            onnx_row(f"{name}, int8 (ONNX Runtime)", model, True)
            continue
        accuracy = accuracies.of(name, lambda model=model: subject.accuracy(subject.judge(model)))
        packed, note = packed_copy(subject, model)
        served = subject.serve(packed)
        rows.append(Row(f"{name}, packed", partial(served, *example), bytes_of(packed), accuracy, note))
        if name.startswith("columns"):
            plain, note = packed_copy(subject, model, kernels_too=False, at_least=1e-9)
            onnx_row(f"{name}, ONNX Runtime", plain, False, note=note)
            onnx_row(f"{name}, int8 (ONNX Runtime)", plain, True, note=note)
    return rows


def packed_copy(subject: Subject, model: nn.Module, **how: Any) -> tuple[nn.Module, str]:
    """A packed copy, made sure to give the masked model's outputs, and how many layers were packed."""
    model = copy.deepcopy(model)
    served = subject.serve(model)
    with torch.no_grad():
        expected = served(*subject.example)
        packing = pack(served, subject.example, forward=lambda module, batch: module(*batch), **how)
        found = served(*subject.example)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    return model, f"{len(packing.packed)} of {len(packing.layers)} layers packed"


def int8(model: nn.Module) -> nn.Module:
    """Linear layers in int8, activations by what they are at run time: torch's own, without calibration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)


def onnx_file(path: Path, model: nn.Module, example: tuple[Tensor, ...], quantized: bool) -> Path:
    """The model exported to one file, and quantized (int8 weights by channel, activations at run time)."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    if path.exists():
        return path
    unfinished = path.with_suffix(".unfinished")
    with quiet():
        torch.onnx.export(model, example, dynamo=True, verbose=False).save(str(unfinished), external_data=False)
        if quantized:
            graph = onnx.load(unfinished)
            del graph.graph.value_info[:]  # the exporter's shapes and those that are inferred anew differ
            onnx.save(graph, unfinished)
            grouped = any(len(tensor.dims) == 3 for tensor in graph.graph.initializer)
            quantize_dynamic(unfinished, unfinished, per_channel=not grouped)  # batched products take one scale only
    return unfinished.rename(path)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the exporter's list of what it skips, the quantizer's advice, and warnings of what will change."""
    loggers = [logging.getLogger(name) for name in (None, "torch.onnx")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def session(path: Path, threads: int) -> Callable[..., Any]:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 3
    ready = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    names, first = [each.name for each in ready.get_inputs()], [ready.get_outputs()[0].name]
    return lambda *tensors: ready.run(
        first, {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    )[0]


def bytes_of(model: nn.Module) -> int:
    """Of its parameters and buffers, tied ones once; of quantized modules what saving them takes."""
    tensors = list(model.state_dict().values())
    if all(isinstance(tensor, Tensor) for tensor in tensors):
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.tell()


# ------------------------------------------------------------------------------------------------------------- tables


def table(subject: Subject, rows: list[Row], times: dict[str, list[float]], threads: int) -> str:
    """Markdown: what each row takes and holds, and how many times faster it is than three dense rivals."""

    def fastest(kind: str) -> Row | None:
        return min(
            (row for row in rows if row.kind == kind), key=lambda row: statistics.median(times[row.name]), default=None
        )

    rivals = [rows[0], fastest("float"), fastest("int8")]
    heads = ["eager"] + [
        f"best {word}: {row.name}" for word, row in zip(("dense", "int8"), rivals[1:], strict=True) if row
    ]
    lines = [
        f"\n{subject.title}, {threads} thread{'s' * (threads > 1)}; times faster than\n",
        "| | ms | " + " | ".join(heads) + f" | weights, MB | {subject.metric} | |",
        "|---" * (5 + len(heads)) + "|",
    ]
    for row in rows:
        faster = [f"{ratio(times[row.name], times[rival.name]):.2f}" for rival in rivals if rival]
        lines.append(
            f"| {row.name} | {statistics.median(times[row.name]):.2f} | {' | '.join(faster)} | {row.bytes / 1e6:.2f} | "
            f"{format(row.accuracy, subject.form)} | {row.note} |"
        )
    return "\n".join(lines)


def subjects(options: Any) -> dict[str, tuple[Callable[[Path], Subject], str]]:
    """What makes each subject, and its place in the cache, by a short name."""

    def digits(title: str, build: Callable[[], nn.Module], spare: tuple[str, ...]) -> Callable[[Path], Subject]:
        return lambda place: Digits(f"digits {title}, 64 images", build, spare, place)

    makers: dict[str, tuple[Callable[[Path], Subject], str]] = {
        "mlp": (digits("MLP", mlp, ("5.*",)), "mlp"),
        "cnn": (digits("CNN (3×3)", lambda: demo.DigitsNet(64, 128), ("stem.*", "head.*")), "cnn"),
        "bottlenecks": (digits("CNN (1×1 and 3×3)", bottlenecks, ("0.*", "7.*")), "bottlenecks"),
    }
    if options.minilm is not None:
        makers["minilm"] = (lambda _: Encoder(options.minilm, options.repair_steps), f"minilm-{options.repair_steps}")
    makers["llama"] = (
        lambda place: Decoder(place.parent, options.gpt_steps, options.repair_steps),
        f"llama-{options.gpt_steps}-{options.repair_steps}",
    )
    return makers


def bench_models(options: Any) -> None:
    makers = subjects(options)
    chosen = [name for name in makers if any(fnmatch.fnmatch(name, word) for word in options.only.split(","))]
    if not chosen:
        raise SystemExit(f"--only {options.only} matches none of {', '.join(makers)}.")
    started = time.monotonic()
    for name in chosen:
        make, place = makers[name]
        torch.set_num_threads(max(options.threads))  # to train and prune with
        cache = options.cache / place
        subject = make(cache)
        for _ in variants(subject, cache):  # all that is missing, before anything is timed
            pass
        with tempfile.TemporaryDirectory() as folder:
            for threads in options.threads:
                torch.set_num_threads(threads)
                with torch.no_grad():
                    rows = rows_of(subject, cache, Path(folder), threads)
                    times = alternating({row.name: row.call for row in rows}, options.rounds, options.clock)
                print(table(subject, rows, times, threads), flush=True)
    print(f"\nAll of it took {(time.monotonic() - started) / 60:.0f} minutes.")


# ------------------------------------------------------------------------------------------- grouped columns in ONNX


class _ColumnsGathered(nn.Module):
    """A `GroupedLinear` as torch computes it best: columns of the inputs are gathered."""

    def __init__(self, layer: GroupedLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        groups, kept, outputs = self.layer.values.shape
        inputs = x.index_select(1, self.layer.indices.reshape(-1)).view(-1, groups, kept).transpose(0, 1)
        return torch.bmm(inputs, self.layer.values).transpose(0, 1).reshape(-1, groups * outputs) + self.layer.bias


class _Separate(_ColumnsGathered):
    """Rows of the transposed inputs gathered, and a product of its own for each group."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        inputs = x.t().index_select(0, layer.indices.reshape(-1)).split(layer.values.shape[1])
        products = [values.t() @ part for part, values in zip(inputs, layer.values, strict=True)]
        return torch.cat(products).t() + layer.bias


def bench_onnx(options: Any) -> None:
    """Grouped columns in ONNX Runtime: three ways to write them, and int8, beside the dense layer there."""
    for threads in options.threads:
        print(f"\n{threads} thread{'s' * (threads > 1)}; milliseconds in ONNX Runtime\n")
        print(
            "| layer | batch | dense | columns gathered | separate products | **rows gathered** | dense int8 | int8 |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for rows, columns, outputs in ((1536, 384, 64), (2048, 2048, 256)):
            for sparsity in SPARSITIES:
                torch.manual_seed(0)
                dense = nn.Linear(columns, rows)
                sparsify(nn.Sequential(dense), sparsity, pattern=GroupedColumns(outputs), allocate=uniform)
                layer = GroupedLinear.from_dense(dense.weight, dense.bias, outputs=outputs).requires_grad_(False)
                forms = {
                    "dense": (dense, False),
                    "columns": (_ColumnsGathered(layer), False),
                    "separate": (_Separate(layer), False),
                    "rows": (layer, False),
                    "dense int8": (dense, True),
                    "int8": (layer, True),
                }
                for batch in options.batches:
                    x = torch.randn(batch, columns)
                    with tempfile.TemporaryDirectory() as folder:
                        calls = {
                            name: partial(
                                session(onnx_file(Path(folder, f"{slug(name)}.onnx"), form, (x,), small), threads), x
                            )
                            for name, (form, small) in forms.items()
                        }
                        times = alternating(calls, options.rounds, options.clock)
                    print(
                        f"| {rows}×{columns}, g = {outputs}, {sparsity:.0%} | {batch} | ".replace("%", " %")
                        + " | ".join(f"{statistics.median(own):.3f}" for own in times.values())
                        + " |",
                        flush=True,
                    )
