"""Mixtures of experts that are trained here, on text of three kinds, and kept in a folder.

Law: no file is in two of the parts: what a model is trained on, what experts are chosen by, what judges.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

KINDS = ("code", "documentation", "numbers")
LENGTH, VOCABULARY = 128, 2048
CHOOSE, JUDGE = 16, 64  # sequences of each kind
_BYTES = 6_000_000  # of each kind, to train on
_ROWS = 6  # sequences of each kind in a step
_BALANCE = 0.05  # of the loss that balances each router

# ``wide`` is of 21 million parameters; the mixtures of ``eight`` are so few that all choices can be tried.
SIZES: dict[str, dict[str, Any]] = {
    "wide": {
        "num_experts": 32,
        "moe_intermediate_size": 272,
        "decoder_sparse_step": 1,
    },
    "eight": {
        "num_experts": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 2,
    },
}


@dataclass(frozen=True)
class Data:
    """Tokens of each kind: a run to train on, sequences to choose by, and sequences to judge by."""

    train: dict[str, Tensor]
    choose: dict[str, Tensor]
    judge: dict[str, Tensor]


def files_of(kind: str) -> list[str]:
    """The texts of the files of one kind, in an order of no meaning."""
    if kind == "numbers":
        return [_table(random.Random(number)) for number in range(2200)]
    stdlib, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    paths = [path for path in stdlib.rglob("*.py") if "site-packages" not in path.parts]
    found: dict[str, str] = {}
    if kind == "documentation":
        from pydoc_data.topics import topics

        paths += [path for name in ("numpy", "sklearn", "scipy") for path in (packages / name).rglob("*.py")]
        found |= {f"topic {name}": text for name, text in topics.items()}
    for path in paths:
        if {"test", "tests", "encodings", "pydoc_data"}.isdisjoint(path.parts):
            parts = path.read_text("utf-8", errors="ignore").split('"""')
            prose = (part for part in parts[1::2] if len(part) > 200)
            name = "/".join(path.parts[-3:])
            found[name] = "".join(parts[::2]) if kind == "code" else "\n\n".join(prose)
    names = sorted((name for name, text in found.items() if len(text) > 400), key=_of_no_meaning)
    return list(dict.fromkeys(found[name] for name in names))


def _of_no_meaning(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _table(draw: random.Random) -> str:
    """Numbers that walk, a column a walk; tables differ in their columns, digits and signs between them."""
    columns, digits, between = draw.randint(2, 7), draw.randint(0, 3), draw.choice((",", "; ", "\t", " "))
    at = [draw.uniform(-200, 200) for _ in range(columns)]
    pace = [draw.choice((0.01, 0.3, 3.0)) for _ in range(columns)]
    lines = []
    for number in range(60):
        at = [value + draw.gauss(0, step) for value, step in zip(at, pace, strict=True)]
        lines.append(between.join([str(number), *(f"{value:.{digits}f}" for value in at)]))
    return "\n".join(lines)


def data(scratch: Path) -> tuple[Data, Path]:
    """The texts' tokens, and where their tokenizer lies; both are made once."""
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer

    from benchmarks.support.language_models import byte_pairs

    tokens, words = scratch / "tokens.safetensors", scratch / "tokenizer.json"
    if not tokens.exists():
        scratch.mkdir(parents=True, exist_ok=True)
        parts = {kind: _parts(files_of(kind)) for kind in KINDS}
        byte_pairs([text for part in parts.values() for text in part[0]], VOCABULARY).save(str(words))
        tokenizer = Tokenizer.from_file(str(words))
        held: dict[str, Tensor] = {}
        for kind, (train, choose, judge) in parts.items():
            held[f"train {kind}"] = _encoded(tokenizer, train)
            held[f"choose {kind}"] = _sequences(_encoded(tokenizer, choose), CHOOSE)
            held[f"judge {kind}"] = _sequences(_encoded(tokenizer, judge), JUDGE)
        writing = scratch / f"writing-{os.getpid()}"
        save_file(held, writing)
        os.replace(writing, tokens)
    held = {name: tensor.long() for name, tensor in load_file(tokens).items()}
    whole = Data(*({kind: held[f"{part} {kind}"] for kind in KINDS} for part in ("train", "choose", "judge")))
    return whole, words


def _parts(files: list[str]) -> tuple[list[str], list[str], list[str]]:
    """To train on, to choose by and to judge by: of twelve files ten, one and one."""
    train: list[str] = []
    size = 0
    for at, text in enumerate(files):
        if at % 12 > 1 and size < _BYTES:
            train.append(text)
            size += len(text)
    return train, files[::12], files[1::12]


def _encoded(tokenizer: Any, texts: Iterable[str]) -> Tensor:
    end = tokenizer.token_to_id("<end>")
    every = [token for found in tokenizer.encode_batch(list(texts)) for token in [*found.ids, end]]
    return torch.tensor(every, dtype=torch.int16)


def _sequences(tokens: Tensor, number: int) -> Tensor:
    """From all over the run, none of them overlapping."""
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    if len(rows) < number:
        raise ValueError(f"The files hold {len(rows)} sequences; {number} are needed.")
    return rows[torch.linspace(0, len(rows) - 1, number).long()].contiguous()


def mixture(name: str) -> Any:
    """A Qwen3-MoE of one of the sizes, untrained."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=48,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            use_cache=False,
            router_aux_loss_coef=0.0,
            bos_token_id=None,
            eos_token_id=0,
            attn_implementation="eager",
            experts_implementation="eager",
            **SIZES[name],
        )
    )


def trained(scratch: Path, name: str, steps: int, seed: int) -> Any:
    """One that the folder has, or else one that is trained and kept there."""
    import transformers

    transformers.logging.disable_progress_bar()
    directory = scratch / f"{name}-{steps}-{seed}"
    if not (directory / "config.json").exists():
        texts, _ = data(scratch)
        torch.manual_seed(seed)
        model = mixture(name)
        fit(model, texts.train, steps, seed)
        model.save_pretrained(directory)
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def fit(model: Any, train: dict[str, Tensor], steps: int, seed: int, rate: float = 2.5e-3) -> None:
    """AdamW, one cycle, as many sequences of each kind in each step; each router is balanced by itself.

    The model's own loss adds the routers up first, and so balances only their sum: experts of a layer get no token.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func as unbalanced

    model.train()
    mixtures = [each for each in model.modules() if hasattr(each, "gate_up_proj")]
    for each in mixtures:
        each.forward = functools.partial(_at_once, each)
    matrices = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(steps, 2), pct_start=0.1)
    draw = torch.Generator().manual_seed(seed)
    began, count = time.process_time(), sum(each.numel() for each in model.parameters())
    print(f"training {count:,} parameters for {steps} steps of {len(KINDS) * _ROWS * LENGTH} tokens", flush=True)
    for step in range(steps):
        rows = []
        for kind in KINDS:
            starts = torch.randint(0, len(train[kind]) - LENGTH, (_ROWS,), generator=draw)
            rows += [train[kind][start : start + LENGTH] for start in starts.tolist()]
        ids = torch.stack(rows)
        given = model(input_ids=ids, labels=ids, output_router_logits=True)
        routers = given.router_logits
        balance = sum(unbalanced((each,), each.shape[-1], model.config.num_experts_per_tok) for each in routers)
        optimizer.zero_grad()
        (given.loss + _BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"  step {step + 1}: loss {given.loss.item():.3f}, {time.process_time() - began:.0f} s", flush=True)
    for each in mixtures:
        del each.forward
    model.eval()


def _at_once(experts: Any, hidden: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The class's own forward, whose gradient fills as large a tensor for each expert as all of them are."""
    order = places.flatten().argsort(stable=True)
    tokens = order // places.shape[-1]
    counts = places.flatten().bincount(minlength=experts.num_experts).tolist()
    given = []
    for rows, up, down in zip(
        hidden[tokens].split(counts), experts.gate_up_proj.unbind(), experts.down_proj.unbind(), strict=True
    ):
        gate, values = linear(rows, up).chunk(2, -1)
        given.append(linear(silu(gate) * values, down))
    return torch.zeros_like(hidden).index_add(0, tokens, torch.cat(given) * weights.flatten()[order, None])
