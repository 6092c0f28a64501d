"""What is gained: parameters, bytes and milliseconds."""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shrinking import peers
from benchmarks.shrinking.sizes import bytes_of, count_of, multiply_adds
from benchmarks.support.models import zoo
from benchmarks.support.timing import alternating, ratios, timed
from secateur import Branches, demo
from secateur.shrinking import shrink
from secateur.support import run_example

Smaller = Callable[[nn.Module, Tensor, float], nn.Module]  # (model, example, share of multiply-adds that leaves)


def by_ours(model: nn.Module, example: Tensor, share: float, **options: Any) -> nn.Module:
    return shrink(model, example[:2], share, target="macs", **{"round_to": 1, **options}).model


def effect(rounds: int = 40, narrow: int = 128, wide: int = 256, **_: Any) -> dict[str, Any]:
    """Parameters, bytes and milliseconds at half of the multiply-adds, beside the dense model."""
    torch.manual_seed(0)
    dense = demo.DigitsNet(narrow, wide).eval()
    example = torch.randn(16, 1, 8, 8)
    models = {"dense": dense}
    for name, options in {"shrink, round_to=1": {"round_to": 1}, "shrink, round_to=16": {"round_to": 16}}.items():
        models[name] = by_ours(copy.deepcopy(dense), example, 0.5, **options)
    if peers.tp is not None:
        for name, options in {"torch-pruning": {}, "torch-pruning, round_to=16": {"round_to": 16}}.items():
            models[name] = peers.by_theirs(dense, example, 0.5, peers.group_norm(), **options).eval()
    for model in models.values():
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    calls = {
        (name, batch): functools.partial(model, example[:batch]) for batch in (1, 16) for name, model in models.items()
    }
    times = alternating(calls, rounds, warm_up=3, repeats=5)
    rows = []
    whole = multiply_adds(dense, example)
    print(f"{'':28} {'channels':24} {'weights':>9} {'bytes':>9} {'of macs':>8} {'ideal':>6}", end="")
    print(f" {'ms at 1':>9} {'faster':>20} {'ms at 16':>9} {'faster':>20}")
    for name, model in models.items():
        macs = multiply_adds(model, example)
        widths = [
            model.stem.out_channels,
            *(block.conv1.out_channels for block in model.blocks),
            model.head.in_features,
        ]
        row: dict[str, Any] = {
            "model": name,
            "channels": widths,
            "weights": count_of(model),
            "bytes": bytes_of(model),
            "multiply-adds": macs,
            "ideal": whole / macs,
        }
        cells = []
        for batch in (1, 16):
            faster = ratios(times[name, batch], times["dense", batch])
            low, middle, high = statistics.quantiles(faster, n=4)
            row[f"ms at {batch}"] = 1e3 * statistics.median(times[name, batch])
            row[f"faster at {batch}"] = [low, middle, high]
            cells += [f"{row[f'ms at {batch}']:9.3f}", f"{middle:7.2f} ({low:.2f} … {high:.2f})"]
        rows.append(row)
        print(f"{name:28} {widths!s:24} {row['weights']:9d} {row['bytes']:9d} {macs / whole:8.3f}", end="")
        print(f" {row['ideal']:6.2f}", *cells, flush=True)
    return {"rows": rows}


def depth(rounds: int = 25, **_: Any) -> dict[str, Any]:
    """The time of a forward pass without a share of the residual branches, over the dense model's, in turn."""
    torch.manual_seed(0)
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=500, **sizes)).eval()
    blocks = (zoo.convolutional.BasicBlock(64, 64) for _ in range(8))
    resnet = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    tokens = {"input_ids": torch.randint(0, 500, (4, 64)), "use_cache": False}
    rows = []
    print(f"{'':28} {'branches':>9} {'weights left':>13} {'time left':>24} {'proof, s':>9}")
    for name, model, example in (
        ("Llama, 4 layers", llama, tokens),
        ("ResNet, 8 blocks", resnet, torch.randn(4, 3, 32, 32)),
    ):
        for share in (0.25, 0.5):
            smaller = copy.deepcopy(model)
            proof, _ = timed(functools.partial(shrink, smaller, example, leave=Branches(share)))
            with torch.no_grad():
                calls = {
                    "smaller": functools.partial(run_example, smaller, example),
                    "whole": functools.partial(run_example, model, example),
                }
                times = alternating(calls, rounds, warm_up=2)
            low, middle, high = statistics.quantiles(ratios(times["whole"], times["smaller"]), n=4)
            left = count_of(smaller) / count_of(model)
            rows.append({"model": name, "share": share, "left": left, "time left": [low, middle, high], "proof": proof})
            print(
                f"{name:28} {share:9.0%} {left:13.2f} {middle:10.2f} ({low:.2f} … {high:.2f}) {proof:9.1f}", flush=True
            )
    return {"rows": rows}
