"""Seconds and memory of coupling and removal, against depth."""

from __future__ import annotations

import functools
import gc
import json
import resource
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.shrinking import peers
from benchmarks.support.memory import from_its_peak
from benchmarks.support.models import zoo
from benchmarks.support.processes import in_a_process
from benchmarks.support.timing import timed
from secateur.coupling import find_coupling
from secateur.shrinking import shrink

RUN = str(Path(__file__).with_name("run.py"))


def deep_resnet(blocks: int) -> tuple[nn.Module, zoo.Inputs]:
    """The zoo's basic residual network with so many blocks in each of its three stages."""
    torch.manual_seed(0)
    model = zoo.convolutional.ResnetBasic()
    for stage, width in ((model.layer1, 12), (model.layer2, 20), (model.layer3, 36)):
        for _ in range(blocks - len(stage)):
            stage.append(zoo.convolutional.BasicBlock(width, width))
    return model.eval(), torch.randn(2, 3, 16, 16)


def deep_llama(layers: int, **sizes: int) -> tuple[nn.Module, zoo.Inputs]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = sizes or {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    config = LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval(), {"input_ids": torch.arange(16).reshape(2, 8)}


def llama_8b(layers: int) -> tuple[nn.Module, zoo.Inputs]:
    """Llama-3-8B's shapes on the meta device: no weight is in memory."""
    with torch.device("meta"):
        model, inputs = deep_llama(
            layers,
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
        )
        # transformers looks into a mask that it makes itself, which meta has no values for
        inputs["attention_mask"] = torch.zeros(2, 1, 8, 8)
    return model, inputs


MODELS = {"resnet": (deep_resnet, (2, 4, 8, 16)), "llama": (deep_llama, (6, 12, 24, 48)), "llama-8b": (llama_8b, (32,))}


def couple_ours(model: nn.Module, inputs: zoo.Inputs) -> object:
    return find_coupling(model, inputs)


def couple_ours_once(model: nn.Module, inputs: zoo.Inputs) -> object:
    """In evaluation mode only, as Torch-Pruning does; the default watches training, too."""
    return find_coupling(model, inputs, modes=(False,))


def remove_ours(model: nn.Module, inputs: zoo.Inputs) -> object:
    return shrink(model, inputs, 0.5, target="units", round_to=1, verify=False).model


def remove_ours_proved(model: nn.Module, inputs: zoo.Inputs) -> object:
    return shrink(model, inputs, 0.5, target="units", round_to=1).model


STEPS: dict[str, Callable[[nn.Module, zoo.Inputs], object]] = {
    "couple": couple_ours,
    "couple, one mode": couple_ours_once,
    "couple, torch-pruning": peers.couple_theirs,
    "remove": remove_ours,
    "remove, proved": remove_ours_proved,
    "remove, torch-pruning": peers.remove_theirs,
}


def child(kind: str, step: str, repeats: int = 5) -> None:
    """One step at all depths in a process of its own; imports, first calls and building the model are not in it."""
    warnings.simplefilter("ignore")
    make, depths = MODELS[kind]
    STEPS[step](*(deep_resnet(2) if kind == "resnet" else deep_llama(1)))
    rows = {depth: {"seconds": [], "growth": []} for depth in depths}
    for _ in range(repeats if len(depths) > 1 else 2):
        for depth in depths:
            model, inputs = make(depth)
            gc.collect()
            try:
                with from_its_peak() as memory:
                    seconds, _ = timed(functools.partial(STEPS[step], model, inputs))
            except Exception as error:
                print(json.dumps({"error": f"{type(error).__name__}: {error}"[:200]}))
                return
            rows[depth]["seconds"].append(seconds)
            rows[depth]["growth"].append(memory["peak"])
    print(json.dumps({**rows, "whole": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def speed(**_: Any) -> dict[str, Any]:
    """Seconds and growth of memory of coupling and removal, against depth."""
    rows = []
    print(f"{'model':10} {'step':24} {'depth':>6} {'seconds':>9} {'per layer':>10} {'growth':>9} {'whole':>9}")
    for kind, (_make, depths) in MODELS.items():
        for step in STEPS:
            if (peers.tp is None and "torch-pruning" in step) or (kind == "llama-8b" and not step.startswith("couple")):
                continue
            try:
                found = in_a_process(step, RUN, "speed", "--child", kind, step, timeout=900)
            except RuntimeError as error:
                found = {"error": str(error)[-200:]}
            if "error" in found:
                rows.append({"model": kind, "step": step, **found})
                print(f"{kind:10} {step:24} {found['error'][:90]}", flush=True)
                continue
            for depth in depths:
                runs = found[str(depth)]
                seconds, growth = statistics.median(runs["seconds"]), max(runs["growth"])
                rows.append({"model": kind, "depth": depth, "step": step, "whole": found["whole"], **runs})
                each = f"{1e3 * seconds / depth:7.1f} ms"
                print(f"{kind:10} {step:24} {depth:6d} {seconds:9.3f} {each:>10} {growth / 2**20:5.0f} MiB", end="")
                print(f" {found['whole'] / 2**20:5.0f} MiB", flush=True)
    return {"rows": rows}
