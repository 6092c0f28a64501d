"""Does it help to aim at the dense model's outputs, instead of what a dense layer makes of the pruned model's inputs?

Law: every method removes as many weights by the same solver, `admm`; only what is aimed at differs, and all are
measured on sentences that no calibration saw.

The layers of a block see inputs X' that pruning has changed; the dense model's were X. The library's walk asks for
``W' X' = W X'``. Tried here:

- **stages**: the same, but a layer's X' is taken after the layers before it in the block were pruned.
- **cross a**: stages, with the target ``W X' + a W (X - X')``; least squares folds it into the weight that is pruned,
  ``W + a W (X - X') X'ᵀ (X' X'ᵀ + λ)⁻¹`` (as GPTAQ does for quantization, arXiv:2504.02692). **At once**: without the
  stages, all layers of a block from one run, as the library.
- **residual a**: cross, and the layers that are added to the residual stream aim at what that stream residuals too.
- **bfloat16 Gram**: as the library, with Gram matrices of products of bfloat16, summed in float32.
- **descent**: after the layers of a half (attention, MLP) are pruned, all that is left of it, biases and norm too, is
  trained by AdamW on the mean squared distance to the dense half's output (arXiv:2510.14444): fed with pruned inputs,
  or with the dense model's (**dense descent**).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.patterns import Pattern
from secateur.solvers import admm, scale_of
from secateur.support import track


@dataclass(frozen=True)
class Method:
    """What is aimed at; see the top of the file."""

    stages: bool = True
    cross: float = 0.0
    residual: bool = False
    epochs: int = 0
    rate: float = 2e-4
    dense_inputs: bool = False
    gram: torch.dtype | None = None  # that inputs are rounded to before they are multiplied; sums are float32's


METHODS = {
    "library": Method(stages=False),
    "bfloat16 Gram": Method(stages=False, gram=torch.bfloat16),
    "cross 0.5 at once": Method(stages=False, cross=0.5),
    "stages": Method(),
    "cross 0.5": Method(cross=0.5),
    "cross 1": Method(cross=1.0),
    "residual 0.5": Method(cross=0.5, residual=True),
    "residual 1": Method(cross=1.0, residual=True),
    "descent": Method(epochs=6),
    "dense descent": Method(epochs=6, dense_inputs=True),
    "residual 0.5 + descent": Method(cross=0.5, residual=True, epochs=6),
}


class _Stop(Exception):
    """The first block has received its inputs."""


Half = Callable[[Tensor, Tensor | None], Tensor]


def _halves(block: Any) -> list[tuple[nn.ModuleList, list[list[nn.Linear]], Half]]:
    """A BERT block's two halves: modules, layers by stage (the last feeds the residual stream), and the function."""
    own, output = block.attention.self, block.attention.output
    return [
        (
            nn.ModuleList([block.attention]),
            [[own.query, own.key, own.value], [output.dense]],
            lambda h, mask: block.attention(h, mask)[0],
        ),
        (
            nn.ModuleList([block.intermediate, block.output]),
            [[block.intermediate.dense], [block.output.dense]],
            lambda h, _: block.output(block.intermediate(h), h),
        ),
    ]


def _whole(block: Any) -> tuple[list[nn.Linear], Half]:
    """All layers of a block, and its function."""
    first, second = (half for _, _, half in _halves(block))
    return [layer for _, stages, _ in _halves(block) for stage in stages for layer in stage], (
        lambda h, mask: second(first(h, mask), mask)
    )


@contextlib.contextmanager
def _watching(layers: list[nn.Linear], see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Calls ``see(number, input)`` for each of the layers, as it is run."""

    def hook(number: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        see(number, args[0])

    handles = [layer.register_forward_pre_hook(functools.partial(hook, n)) for n, layer in enumerate(layers)]
    yield
    for handle in handles:
        handle.remove()


@torch.no_grad()
def _first_inputs(model: nn.Module, block: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    caught: list[tuple[Tensor, Tensor | None]] = []

    def catch(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        found = (*args, keywords.get("hidden_states"), keywords.get("attention_mask"))
        caught.append((found[0], found[1]))
        raise _Stop

    handle = block.register_forward_pre_hook(catch, with_kwargs=True)
    with contextlib.suppress(_Stop):
        model(**batch)
    handle.remove()
    return caught[0]


def prune(model: Any, batches: list[dict[str, Tensor]], sparsity: float | None, pattern: Pattern, way: Method) -> None:
    """Prunes the blocks of a BERT encoder in place."""
    blocks = list(model.encoder.layer)
    inputs = [_first_inputs(model, blocks[0], batch) for batch in batches]
    kept = [batch["attention_mask"].bool() for batch in batches]
    masks = [mask for _, mask in inputs]
    dense, new = [hidden for hidden, _ in inputs], [hidden for hidden, _ in inputs]
    for block in track(blocks, "pruning blocks"):
        original = copy.deepcopy(block)
        if not way.stages:
            (layers, whole), (dense_layers, dense_whole) = _whole(block), _whole(original)
            aim = (dense_layers, dense, dense_whole, way.cross, False) if way.cross else None
            _solve(layers, new, masks, kept, whole, sparsity, pattern, aim, way.gram)
        for (modules, stages, half), (_, dense_stages, dense_half) in zip(
            _halves(block), _halves(original), strict=True
        ):
            if way.stages:
                for number, (stage, dense_stage) in enumerate(zip(stages, dense_stages, strict=True)):
                    aim = (dense_stage, dense, dense_half, way.cross, way.residual and number == 1)
                    _solve(stage, new, masks, kept, half, sparsity, pattern, aim if way.cross else None)
            with torch.no_grad():
                targets = [dense_half(h, mask) for h, mask in zip(dense, masks, strict=True)]
            if way.epochs:
                _descend(modules, half, dense if way.dense_inputs else new, targets, masks, kept, way)
            with torch.no_grad():
                new = [half(h, mask) for h, mask in zip(new, masks, strict=True)]
            dense = targets


@torch.no_grad()
def _solve(
    layers: list[nn.Linear],
    hidden: list[Tensor],
    masks: list[Tensor | None],
    kept: list[Tensor],
    half: Half,
    sparsity: float | None,
    pattern: Pattern,
    aim: tuple[list[nn.Linear], list[Tensor], Half, float, bool] | None = None,
    gram: torch.dtype | None = None,
) -> None:
    grams: dict[int, Tensor] = {}
    missing: dict[int, Tensor] = {}  # (X - X') X'ᵀ
    residual_cross: dict[int, Tensor] = {}  # of the residual stream, (h - h') X'ᵀ
    for index, (h, mask, tokens) in enumerate(zip(hidden, masks, kept, strict=True)):
        seen: dict[int, Tensor] = {}
        with _watching(layers, lambda number, x, seen=seen, tokens=tokens: seen.update({number: x[tokens]})):
            half(h, mask)
        wanted: dict[int, Tensor] = {}
        if aim is not None:
            with _watching(aim[0], lambda number, x, seen=wanted, tokens=tokens: seen.update({number: x[tokens]})):
                aim[2](aim[1][index], mask)
        for number, x in seen.items():
            rounded = x.to(gram).float() if gram else x
            grams[number] = grams.get(number, 0) + rounded.T @ rounded
            if aim is not None:
                missing[number] = missing.get(number, 0) + (wanted[number] - x).T @ x
                if aim[4]:
                    residual_cross[number] = residual_cross.get(number, 0) + (aim[1][index] - h)[tokens].T @ x
    for number, layer in enumerate(layers):
        target, sums = layer.weight, grams[number]
        if aim is not None:
            damped = sums + 0.01 * scale_of(sums) * torch.eye(len(sums))
            more = layer.weight @ missing[number] + (residual_cross[number] if aim[4] else 0)
            target = layer.weight + aim[3] * torch.linalg.solve(damped, more.T).T
        layer.weight.copy_(admm(target, sparsity, pattern, gram=sums)[0])


def _descend(
    modules: nn.ModuleList,
    half: Half,
    hidden: list[Tensor],
    targets: list[Tensor],
    masks: list[Tensor | None],
    kept: list[Tensor],
    way: Method,
) -> None:
    """AdamW over what is left of a half; a tenth of the steps to warm up, then linearly down, as the paper's code."""
    pairs = [(p, p.detach() != 0) for p in modules.parameters()]
    optimizer = torch.optim.AdamW([p for p, _ in pairs], lr=way.rate, weight_decay=0.0)
    steps = way.epochs * len(hidden)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, steps // 10), (steps - step) / (steps - steps // 10))
    )
    for _ in range(way.epochs):
        for index in torch.randperm(len(hidden)).tolist():
            tokens = kept[index]
            loss = nn.functional.mse_loss(half(hidden[index], masks[index])[tokens], targets[index][tokens])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                for parameter, left in pairs:
                    parameter *= left


def halves(
    subject: Any,
    settings: dict[str, tuple[float | None, Pattern]],
    methods: list[str],
    seeds: int,
    sentences: int,
    size: int = 16,
) -> list[dict[str, Any]]:
    """A table: each method at each setting. Methods take turns within a seed, so that a stop leaves whole rows out."""
    print(f"{'setting':8} {'method':23} " + " ".join(f"{name:>17}" for name in subject.columns) + f" {'whole s':>8}")
    rows = []
    for setting, (sparsity, pattern) in settings.items():
        base: list[float] = []
        for method in methods:
            runs = []
            for seed in range(seeds):
                torch.manual_seed(seed)
                model = copy.deepcopy(subject.model)
                started = time.process_time()
                prune(model, subject.batches(seed, sentences, size), sparsity, pattern, METHODS[method])
                runs.append((*subject.measure(model), time.process_time() - started))
            columns = list(zip(*runs, strict=True))
            base = base or list(columns[0])
            better = sum(a > b for a, b in zip(columns[0], base, strict=True))
            means = [statistics.mean(column) for column in columns]
            spreads = [statistics.stdev(column) if seeds > 1 else 0.0 for column in columns]
            shown = " ".join(f"{m:9.4f} ±{s:6.4f}" for m, s in zip(means[:-1], spreads[:-1], strict=True))
            print(f"{setting:8} {method:23} {shown} {means[-1]:8.1f}  better than the first in {better} of {seeds}",
                  flush=True)  # fmt: skip
            rows.append({"setting": setting, "method": method, "runs": runs})
    return rows
