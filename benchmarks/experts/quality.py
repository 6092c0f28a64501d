"""What leaving experts out costs a mixture that was trained here, by what chose them.

Law: experts are chosen on text that neither trained the model nor judges it; all methods see the same.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur import shrink

EXPERTS, LAYERS, LENGTH = 8, 2, 128
KINDS = ("code", "prose", "numbers")
METHODS = ("reap", "reap, repaired", "total", "frequency", "activation", "magnitude", "random")
_CALIBRATION, _JUDGE = 8, 24  # sequences of each kind


def texts(seed: int) -> dict[str, bytes]:
    """Three kinds of text: the standard library without its docstrings, its docstrings, and numbers that walk."""
    code, prose = [], []
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    draw = random.Random(seed)
    draw.shuffle(files)
    for file in files:
        parts = file.read_text("utf-8", errors="ignore").split('"""')
        code += parts[::2]
        prose += [part for part in parts[1::2] if len(part) > 200]
    rows = []
    for _ in range(30_000):
        at = draw.uniform(-100, 100)
        rows.append(",".join(f"{at + step * draw.uniform(0, 3):.2f}" for step in range(6)))
    found = {"code": "".join(code), "prose": "\n".join(prose), "numbers": "\n".join(rows)}
    return {kind: text.encode()[:1_500_000] for kind, text in found.items()}


def split(data: dict[str, bytes]) -> tuple[dict[str, Tensor], list[Tensor], dict[str, list[Tensor]]]:
    """Text to train on, batches to choose by, and batches to judge by: the end of each kind."""
    train, choose, judge = {}, [], {}
    rows = _CALIBRATION + _JUDGE
    for kind, text in data.items():
        tokens = torch.tensor(list(text), dtype=torch.long)
        end = rows * LENGTH
        train[kind], held = tokens[:-end], tokens[-end:].view(rows, LENGTH)
        choose += list(held[:_CALIBRATION].split(4))
        judge[kind] = list(held[_CALIBRATION:].split(8))
    return train, choose, judge


def trained(train: dict[str, Tensor], steps: int, seed: int) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=160,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            max_position_embeddings=LENGTH,
            output_router_logits=True,
            router_aux_loss_coef=0.02,
            use_cache=False,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        rows = []
        for kind in KINDS:
            starts = torch.randint(0, len(train[kind]) - LENGTH, (5,), generator=draw)
            rows += [train[kind][start : start + LENGTH] for start in starts.tolist()]
        ids = torch.stack(rows)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.config.output_router_logits = False
    return model.eval()


@torch.no_grad()
def perplexity(model: Any, batches: Sequence[Tensor]) -> float:
    losses = [float(model(input_ids=ids, labels=ids).loss) * len(ids) for ids in batches]
    return math.exp(sum(losses) / sum(map(len, batches)))


class Cut:
    """A model of which experts are left out and put back in no time: the smaller model's weights are written anew."""

    def __init__(self, model: Any, left: int) -> None:
        config = copy.deepcopy(model.config)
        config.num_local_experts = left
        self.dense, self.small = model, type(model)(config).eval()
        self.cut = [name for name, each in model.state_dict().items() if each.shape[:1] == (EXPERTS,)]
        for name, each in model.state_dict().items():
            if name not in self.cut:
                self.small.state_dict()[name].copy_(each)

    def keeping(self, kept: Sequence[Sequence[int]]) -> Any:
        for layer, keep in enumerate(kept):
            for name in self.cut:
                if f"layers.{layer}." in name:
                    self.small.state_dict()[name].copy_(self.dense.state_dict()[name][list(keep)])
        return self.small


def enumerated(model: Any, left: int, choose: Sequence[Tensor]) -> tuple[Any, int]:
    """The choice of the least perplexity on the text that methods choose by: of all pairs of both layers' choices where
    these are a thousand or less, else of each layer's in turn until none is better."""
    cut, subsets = Cut(model, left), list(itertools.combinations(range(EXPERTS), left))
    tried: dict[Any, float] = {}

    def cost(kept: Any) -> float:
        if kept not in tried:
            tried[kept] = perplexity(cut.keeping(kept), choose)
        return tried[kept]

    if len(subsets) ** LAYERS <= 1000:
        best = min(itertools.product(subsets, repeat=LAYERS), key=cost)
    else:
        best = (subsets[0],) * LAYERS
        while True:
            before = best
            for layer in range(LAYERS):
                best = min(((*best[:layer], each, *best[layer + 1 :]) for each in subsets), key=cost)
            if best == before:
                break
    return cut.keeping(best), len(tried)


def smaller(model: Any, method: str, share: float, choose: Sequence[Tensor]) -> Any:
    small = copy.deepcopy(model)
    batches = [{"input_ids": ids} for ids in choose]
    if method == "random":
        how: dict[str, Any] = {"criterion": "random"}
    elif method == "magnitude":
        how = {}
    else:
        how = {"batches": batches, "rank_experts": method.split(",")[0], "repair": "," in method}
    shrink(small, batches[0], experts=share, uniform=True, **how)
    return small.eval()


def quality(steps: int = 600, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Perplexity on held-out text of three kinds, a row a choice."""
    train, choose, judge = split(texts(seed))
    model = trained(train, steps, seed)
    size = sum(each.numel() for each in model.parameters())
    every = [batch for batches in judge.values() for batch in batches]

    def row(method: str, share: float, made: Any, **more: Any) -> dict[str, Any]:
        torch.manual_seed(seed)
        kinds = {kind: perplexity(made, batches) for kind, batches in judge.items()}
        return {"method": method, "gone": share, "all": perplexity(made, every), **kinds, **more}

    yield row("dense", 0.0, model, parameters=size)
    for share in (0.25, 0.5):
        for method in METHODS:
            torch.manual_seed(seed)
            yield row(method, share, smaller(model, method, share, choose))
        best, tried = enumerated(model, round(EXPERTS * (1 - share)), choose)
        yield row("enumerated", share, best, tried=tried)
