"""The language models that benchmarks prune: all-MiniLM-L6-v2, SmolLM2, and small Llamas that are trained here.

Law: a model is measured on text that neither training nor calibration saw, and is the same in every run.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.support import corpora
from secateur.support import track


def fit(
    model: nn.Module,
    loss: Callable[[], Tensor],
    steps: int,
    rate: float,
    masks: Mapping[str, Tensor] | None = None,
) -> None:
    """AdamW, one cycle, without dropout; ``loss`` draws its own batch; what the masks removed stays zero."""
    model.requires_grad_(True).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(steps, 2), pct_start=0.1)
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


def next_token_loss(
    model: nn.Module, data: Tensor, sequences: int, length: int | None = None, draw: torch.Generator | None = None
) -> Callable[[], Tensor]:
    """Of so many of the rows of ``data``, which the generator draws (torch's own without one), up to a length."""

    def loss() -> Tensor:
        batch = data[torch.randint(len(data), (sequences,), generator=draw)][:, :length]
        value: Tensor = model(input_ids=batch, labels=batch).loss
        return value

    return loss


class MiniLM:
    """all-MiniLM-L6-v2; measured by its embeddings of 1000 sentences that no calibration sees."""

    columns = ("cosine", "10-NN overlap")
    higher_is_better = True

    def __init__(self, directory: Path) -> None:
        import transformers

        transformers.logging.disable_progress_bar()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.model = self.load(directory)
        self.held_out = corpora.sentences()[:1000]
        self.dense = self.embeddings(self.model)

    @staticmethod
    def load(directory: Path) -> Any:
        import transformers

        return transformers.AutoModel.from_pretrained(directory).eval()

    def _tokens(self, texts: list[str], size: int) -> list[dict[str, Tensor]]:
        texts = sorted(texts, key=len)
        return [
            dict(
                self.tokenizer(texts[i : i + size], padding=True, truncation=True, max_length=128, return_tensors="pt")
            )
            for i in range(0, len(texts), size)
        ]

    def batches(self, seed: int, samples: int = 512, size: int = 64) -> list[dict[str, Tensor]]:
        return self._tokens(random.Random(seed).sample(corpora.sentences()[1000:], samples), size)

    @torch.no_grad()
    def embeddings(self, model: nn.Module, texts: list[str] | None = None) -> Tensor:
        """Of these texts, by their length; of those held out without any."""
        found = []
        for batch in self._tokens(self.held_out if texts is None else texts, 100):
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


class SmolLM2:
    """SmolLM2-135M-Instruct, or another causal model of transformers with its tokenizer in a directory.

    Measured by its perplexity on docstrings of modules that no calibration sees, and on a third as much of Python's own
    manual. Calibrated on other modules, or on the second half of the manual, which is not judged.
    """

    columns = ("perplexity", "of the manual")
    higher_is_better = False
    length = 512

    def __init__(self, directory: Path, judged: int = 24, text: str = "modules") -> None:
        import transformers

        transformers.logging.disable_progress_bar()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.model = self.load(directory)
        calibration, held_out = corpora.of_modules()
        manual = self._rows(corpora.language_reference())
        self.train = manual[len(manual) // 2 :] if text == "manual" else self._rows(calibration)
        self.held_out = [self._rows(held_out)[:judged], manual[: len(manual) // 2][: -(-judged // 3)]]

    @staticmethod
    def load(directory: Path) -> Any:
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def _rows(self, text: str) -> Tensor:
        tokens = self.tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        return tokens[: len(tokens) // self.length * self.length].view(-1, self.length)

    def batches(self, seed: int, samples: int = 24, size: int = 1) -> list[dict[str, Tensor]]:
        chosen = random.Random(seed).sample(range(len(self.train)), samples)
        return [{"input_ids": self.train[chosen[i : i + size]]} for i in range(0, samples, size)]

    @torch.no_grad()
    def measure(self, model: nn.Module) -> tuple[float, ...]:
        return tuple(
            math.exp(statistics.mean(float(model(input_ids=part, labels=part).loss) for part in rows.split(1)))
            for rows in self.held_out
        )


class GPT:
    """A small Llama, trained here on docstrings; measured by its perplexity on docstrings that it never saw.

    Held out are these, and Python's manual.
    """

    columns = ("perplexity",)
    higher_is_better = False
    length = 256
    name = "gpt"
    sizes: Mapping[str, int] = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6}
    rate = 2e-3
    seen: int | None = None  # tokens of a sequence that a step of training sees; None for all
    own_draw = False  # the batches' order from a generator of its own; else from the one that drew the weights

    def __init__(self, scratch: Path, steps: int) -> None:
        import transformers
        from tokenizers import Tokenizer

        transformers.logging.disable_progress_bar()
        directory = scratch / f"{self.name}-{steps}"
        if not (directory / "config.json").exists():
            self._make(directory, steps)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        texts = *corpora.of_packages(), [corpora.language_reference()]
        self.train, *self.held_out = (corpora.packed(tokenizer, each, self.length) for each in texts)

    def batches(self, seed: int, samples: int = 64) -> list[dict[str, Tensor]]:
        chosen = random.Random(seed).sample(range(len(self.train)), samples)
        return [{"input_ids": self.train[chosen[i : i + 16]]} for i in range(0, samples, 16)]

    @torch.no_grad()
    def measure(self, model: nn.Module) -> tuple[float, ...]:
        losses = [float(model(input_ids=part, labels=part).loss) for part in self.held_out[0][:128].split(16)]
        return (math.exp(statistics.mean(losses)),)

    def _make(self, directory: Path, steps: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        texts = corpora.of_packages()[0]
        tokenizer = byte_pairs(texts, 4096)
        data = corpora.packed(tokenizer, texts, self.length)
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=4096, num_hidden_layers=4, max_position_embeddings=self.length, tie_word_embeddings=True,
                bos_token_id=None, eos_token_id=0, **self.sizes,
            )
        )  # fmt: skip
        count = sum(p.numel() for p in model.parameters())
        print(f"training {count:,} parameters on {data.numel():,} tokens, {steps} steps", flush=True)
        draw = torch.Generator().manual_seed(0) if self.own_draw else None
        fit(model, next_token_loss(model, data, 8, self.seen, draw), steps, self.rate)
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(directory / "tokenizer.json"))
        model.save_pretrained(directory)


class WideGPT(GPT):
    """Of 15 million parameters: reading its weights has to be work, or there is nothing to gain."""

    name = "llama"
    sizes: Mapping[str, int] = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
    rate = 1e-3
    seen = 128
    own_draw = True


def byte_pairs(texts: list[str], vocabulary: int) -> Any:
    """A tokenizer of so many tokens, the first an end, learned from the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
