"""Planning an 8-billion-parameter model on the meta device, and slicing a checkpoint shard by shard.

    python benchmarks/shrinking/shards.py [plan] [slice] [--folder DIR] [--gigabytes 1.5]

Law: every row is a process of its own, whose peak memory is what the system says of it, less what it had once all
packages were imported; times are of the wall and of the processor, with one thread.

``plan`` writes the files of the 8B model as holes, which take no disk: its weights are zeros. They are read and ranked
like others, so ``whole plan`` includes reading 16 GB; ``reading`` is the time of that alone. ``slice`` writes real
numbers, and removes them afterwards.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.support.processes import in_a_process
from secateur.checkpoints import meta_model_of, open_checkpoint, write_header
from secateur.coupling import Scope, find_coupling
from secateur.models import Stored
from secateur.shrinking import Configured, shrink

EIGHT_BILLION = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
}
SMALLER = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
LAYER = 2 * (2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 5632)  # bytes


def model_of(config: Mapping[str, Any]) -> nn.Module:
    import transformers

    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(dict(config)))


def write(folder: Path, config: Mapping[str, Any], shard: int, *, holes: bool, scale: float = 1.0) -> int:
    """A directory as transformers writes one, in bfloat16, with shards of so many bytes; returns all bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {name: tuple(tensor.shape) for name, tensor in model_of(config).state_dict().items()}
    files: list[dict[str, tuple[str, tuple[int, ...], int]]] = [{}]
    for name, shape in shapes.items():
        nbytes = 2 * torch.Size(shape).numel()
        if files[-1] and sum(each[2] for each in files[-1].values()) + nbytes > shard:
            files.append({})
        files[-1][name] = ("BF16", shape, nbytes)
    weight_map = {}
    generator = torch.Generator().manual_seed(0)
    for number, tensors in enumerate(files, 1):
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys(tensors, path.name)
        with open(path, "wb") as file:
            write_header(file, tensors, {"format": "pt"})
            for _, shape, nbytes in tensors.values():
                if holes:
                    file.truncate(file.seek(nbytes, 1))
                else:
                    values = torch.randn(shape, generator=generator).mul_(scale).to(torch.bfloat16)
                    file.write(values.reshape(-1).view(torch.uint8).numpy().data)
    total = sum(each[2] for tensors in files for each in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def peak() -> float:
    """Bytes that this process had at most until now."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def warmed() -> float:
    """What a process has once a tiny model was shrunken: all packages are imported, and nothing is large."""
    config = {**EIGHT_BILLION, **SMALLER, "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "tiny", config, 1 << 30, holes=False)
        shrink(Path(folder) / "tiny", sparsity=0.5)
    return peak()


def plan(folder: Path) -> dict[str, Any]:
    base = warmed()
    checkpoint = open_checkpoint(folder / "dense")
    clock = time.perf_counter()
    model = meta_model_of(checkpoint)
    tokens = torch.zeros(1, 7, dtype=torch.long)
    coupling = find_coupling(model, {"input_ids": tokens, "use_cache": False})
    coupled = time.perf_counter() - clock
    Configured(model, Scope.of(coupling))
    learnt = time.perf_counter() - clock - coupled
    first = (peak() - base) / 1e9
    clock, processor = time.perf_counter(), time.process_time()
    reading = [0.0]

    def timed(self: Any, name: str, step: int) -> Any:
        blocks = whole(self, name, step)
        while True:
            begin = time.perf_counter()
            block = next(blocks, None)
            reading[0] += time.perf_counter() - begin
            if block is None:
                return
            yield block

    whole, Stored.rows = Stored.rows, timed
    done = shrink(folder / "dense", sparsity=0.5)
    return {
        "GB": checkpoint.nbytes / 1e9,
        "largest tensor GB": max(entry.nbytes for entry in checkpoint.entries.values()) / 1e9,
        "coupling s": coupled,
        "configuration s": learnt,
        "until then GB": first,
        "whole plan s": time.perf_counter() - clock,
        "of that reading s": reading[0],
        "processor s": time.process_time() - processor,
        "peak GB": (peak() - base) / 1e9,
        "groups cut": float(len(done.counts)),
        "proof": done.proof,
    }


def cut(folder: Path) -> dict[str, float]:
    base = warmed()
    checkpoint = open_checkpoint(folder / "dense")
    clock, processor = time.perf_counter(), time.process_time()
    planned = shrink(folder / "dense", sparsity=0.5)
    between = time.perf_counter()
    done = shrink(folder / "dense", sparsity=0.5, out=folder / "small")
    slicing = time.perf_counter() - between - (between - clock)
    return {
        "GB": checkpoint.nbytes / 1e9,
        "files": float(len(checkpoint.files)),
        "largest tensor GB": max(entry.nbytes for entry in checkpoint.entries.values()) / 1e9,
        "GB left": done.nbytes[1] / 1e9,
        "plan s": planned.seconds,
        "all s": done.seconds,
        "slicing MB/s": checkpoint.nbytes / 1e6 / max(slicing, 1e-3),
        "processor s": time.process_time() - processor,
        "peak GB": (peak() - base) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="plan|slice", default=["plan", "slice"])
    parser.add_argument("--folder", type=Path, help="where to write; removed afterwards")
    parser.add_argument("--gigabytes", type=float, default=1.5, help="of the checkpoint that is sliced")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.child:
        print(json.dumps({"plan": plan, "slice": cut}[given.child](given.folder)))
        return
    for what in given.what:
        with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
            folder = Path(temporary)
            layers = max(1, round((given.gigabytes * 1e9 - 4 * 32000 * 2048) / LAYER))
            config = EIGHT_BILLION if what == "plan" else {**EIGHT_BILLION, **SMALLER, "num_hidden_layers": layers}
            write(folder / "dense", config, 5 << 30 if what == "plan" else 200 << 20, holes=what == "plan")
            # a child in which nothing is written before: what its parent had would count as its own
            row = in_a_process(what, __file__, "--child", what, "--folder", temporary)
            proof = row.pop("proof", None)
            print(what)
            print(*(f"  {key:<20}{value:10.2f}" for key, value in row.items()), sep="\n", flush=True)
            if proof is not None:
                print(f"  proof: {proof}", flush=True)


if __name__ == "__main__":
    main()
