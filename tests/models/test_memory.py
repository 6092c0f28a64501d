"""A checkpoint of many blocks is pruned in a quarter of its size beside what the libraries take."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from secateur.checkpoints import open_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 512,
    "intermediate_size": 512,  # a Gram matrix is taken apart in the cube of its width
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
SHARDS = 8
PROGRAM = """
import resource, sys
from pathlib import Path
import torch
from transformers import LlamaForCausalLM, conversion_mapping
from secateur import Unstructured
from secateur.models import oneshot

STATUS = Path("/proc/self/status")

def said(word):
    (found,) = (int(line.split()[1]) * 1024 for line in STATUS.open() if line.startswith(word + ":"))
    return found

def peak():
    if STATUS.exists():  # Linux counts the peak of the process that started this one into ru_maxrss
        return said("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def halves(weight, sparsity, pattern, *, gram):  # what a solver costs is its own matter
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    mask[:, ::2] = True
    return weight * mask, mask

torch.set_num_threads(1)
if STATUS.exists():  # from here on the system refuses more; files that are mapped for reading don't count
    resource.setrlimit(resource.RLIMIT_DATA, (said("VmData") + int(sys.argv[3]),) * 2)
before = peak()
batches = [torch.arange(16)[None]]
done = oneshot(sys.argv[1], batches, 0.5, solver=halves, stages=True, aim=0.5, out=sys.argv[2])
print(peak() - before, before, len(done.layers))
"""


def write_checkpoint(folder):
    """Random blocks that are all alike, in shards; returns the bytes of all tensors."""
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    torch.manual_seed(0)
    block = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    block |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    tensors = {f"{name}.weight": torch.randn(shape).mul_(0.02) for name, shape in block.items()}
    tensors |= {f"{name}_layernorm.weight": torch.ones(hidden) for name in ("input", "post_attention")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    layers = CONFIG["num_hidden_layers"]
    places, total = {}, 0
    for shard in range(SHARDS):
        own = range(shard * layers // SHARDS, (shard + 1) * layers // SHARDS)
        content = {f"model.layers.{n}.{name}": tensor for n in own for name, tensor in tensors.items()}
        if shard == 0:
            content["model.embed_tokens.weight"] = torch.randn(CONFIG["vocab_size"], hidden)
            content["model.norm.weight"] = torch.ones(hidden)
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        save_file({key: value.clone() for key, value in content.items()}, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(content, name)
        total += sum(value.nbytes for value in content.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


@pytest.mark.examples  # test_memory_by_depth.py has the law; here are the figures of docs/notes/one-shot.md
def test_forty_blocks_in_the_memory_of_ten(tmp_path):
    size = write_checkpoint(tmp_path / "dense")
    assert size >= 2.9e8  # a quarter of it is more than what reading and copying take, whatever the model
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "dense"), str(tmp_path / "out"), str(size // 4)],
        capture_output=True,
        text=True,
        check=False,
        # what glibc keeps for later would count as well, though nothing is in it: large blocks go back at once
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)},
    )
    assert ended.returncode == 0, ended.stderr
    more, before, layers = map(int, ended.stdout.split())
    assert layers == 7 * CONFIG["num_hidden_layers"]
    print(f"{size / 1e9:.2f} GB pruned in {more / 1e6:.0f} MB beside {before / 1e6:.0f} MB of libraries")
    assert more < size / 4
    found = open_checkpoint(tmp_path / "out")
    name = "model.layers.39.mlp.down_proj.weight"
    assert math.isclose(found[name].eq(0).float().mean(), 0.5, abs_tol=1e-3)
    assert int(found[name][:, 1::2].count_nonzero()) == 0
