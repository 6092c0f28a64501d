"""Trained models: how each is served and judged, and how it is pruned.

- The digits' networks are trained here and pruned while they are fine-tuned, in the demo's budget.
- MiniLM (``--minilm DIR``) and a Llama that is trained here on docstrings are pruned in one shot by `oneshot`'s
  `admm`. Their shrunken forms train for ``--repair-steps`` afterwards, on calibration text alone, because a solver for
  removed channels there is none; one sparse form has the same training, to compare.
- Trained and pruned weights stay in ``--cache``.
"""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.support import corpora
from benchmarks.support.language_models import MiniLM, WideGPT, fit, next_token_loss
from secateur import demo, oneshot, shrink
from secateur.allocation import uniform
from secateur.criteria import magnitude
from secateur.patterns import Pattern
from secateur.pipeline import reestimate_batchnorm
from secateur.training import Pruner


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
        self.subject = MiniLM(directory)
        self.model, self.steps = self.subject.model, repair_steps
        sentences = corpora.sentences()
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
        texts = corpora.sentences()[1000:]
        draw, dense = random.Random(0), self.serve(copy.deepcopy(self.model))

        def loss() -> Tensor:
            batch = self._tokens(draw.sample(texts, 32))
            with torch.no_grad():
                wanted = dense(*batch)
            return 1 - (self.serve(model)(*batch) * wanted).sum(1).mean()

        fit(model, loss, self.steps, 5e-4, masks)


class NextToken(nn.Module):
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
        self.subject = WideGPT(cache, steps)
        self.model, self.steps = self.subject.model, repair_steps
        self.held_out = self.subject.held_out[0][:held_out]
        self.example = (self.held_out[:1, 64:65],)
        self.judged = (self.held_out[:1],)

    def serve(self, model: nn.Module) -> nn.Module:
        return NextToken(model, self.held_out[:1, :64]).eval()

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
        fit(model, next_token_loss(model, self.subject.train, 8, 128, draw), self.steps, 5e-4, masks)


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
