"""The most memory of a device that a verb takes, of a directory: models of one width and several depths.

Law: with one block and its evidence on the device, the most does not grow with depth.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.support import tables
from secateur import oneshot, shrink
from secateur.support import bytes_text

VERBS = {"oneshot": (oneshot, 0.5), "shrink": (shrink, 0.2)}


def device_memory(
    device: str, width: int, depths: Sequence[int], tokens: int = 512, verbs: Sequence[str] = tuple(VERBS)
) -> list[dict[str, Any]]:
    """A row for each depth: bytes of the model, of one block, and the most that each verb took on the device."""
    of_device = getattr(torch, torch.device(device).type)
    rows = []
    print(tables.head(["blocks", "model", "one block", *(each for name in verbs for each in (f"`{name}`", "seconds"))]))
    with tempfile.TemporaryDirectory() as scratch:
        for depth in depths:
            dense = Path(scratch) / f"{depth}"
            whole, block = _write(dense, width, depth, device)
            row: dict[str, Any] = {"depth": depth, "model": whole, "block": block}
            cells = [str(depth), bytes_text(whole), bytes_text(block)]
            batches = [{"input_ids": torch.randint(1000, (1, tokens))} for _ in range(8)]
            for name in verbs:
                verb, sparsity = VERBS[name]
                start = _begin(of_device)
                started = time.perf_counter()
                out = Path(scratch) / f"{name} {depth}"
                verb(dense, batches=batches, sparsity=sparsity, out=out, device=device)
                row[f"{name} seconds"] = time.perf_counter() - started
                row[name] = int(of_device.max_memory_allocated()) - start
                cells += [bytes_text(row[name]), f"{row[f'{name} seconds']:.1f}"]
            rows.append(row)
            print(tables.row(cells), flush=True)  # each as it comes: the next may take long
    return rows


def _write(folder: Path, width: int, depth: int, device: str) -> tuple[int, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_attention_heads": max(1, width // 64)}
    config = LlamaConfig(vocab_size=1000, num_hidden_layers=depth, max_position_embeddings=2048, **sizes)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    of_block = sum(each.nbytes for each in model.model.layers[0].parameters())
    return sum(each.nbytes for each in model.parameters()), of_block


def _begin(of_device: Any) -> int:
    import gc

    gc.collect()
    of_device.reset_peak_memory_stats()
    return int(of_device.memory_allocated())
