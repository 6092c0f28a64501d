"""The memory that pruning a directory takes does not grow with the number of its blocks."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

HIDDEN, INNER, SEQUENCES, LENGTH = 128, 352, 4, 256
MODULES = 100_000  # bytes of a block's modules, without weights, and of what is noted of it
PROGRAM = """
import sys
from pathlib import Path
import torch
from transformers import LlamaForCausalLM, conversion_mapping
from secateur.models import oneshot

def said(word):
    (found,) = (int(line.split()[1]) * 1024 for line in Path("/proc/self/status").open() if line.startswith(word + ":"))
    return found

torch.set_num_threads(1)
torch.manual_seed(0)
folder, (count, length, *depths) = Path(sys.argv[1]), map(int, sys.argv[2:])
batches = [torch.randint(0, 64, (1, length)) for _ in range(count)]
print(said("VmRSS"))
for layers in depths:  # in one process, whose peak only grows: what the first leaves counts against the second
    oneshot(folder / f"dense{layers}", batches, 0.5, out=folder / f"out{layers}")
    print(said("VmHWM"))
"""


def write_checkpoint(folder, layers):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": layers,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    torch.manual_seed(0)
    shapes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    tensors = {"model.embed_tokens.weight": torch.randn(64, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for number in range(layers):
        block = f"model.layers.{number}"
        tensors |= {f"{block}.{name}.weight": torch.randn(shape) * 0.02 for name, shape in shapes.items()}
        tensors |= {f"{block}.{name}_layernorm.weight": torch.ones(HIDDEN) for name in ("input", "post_attention")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is what Linux says of a process")
def test_thirty_blocks_are_pruned_in_the_memory_of_three(tmp_path):
    depths = (3, 30)
    for layers in depths:
        write_checkpoint(tmp_path / f"dense{layers}", layers)
    words = [str(each) for each in (tmp_path, SEQUENCES, LENGTH, *depths)]
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    before, *found = map(int, ended.stdout.split())
    whole = dict(zip(depths, found, strict=True))
    peaks = {layers: each - before for layers, each in whole.items()}
    print({layers: f"{peak / 1e6:.1f} MB" for layers, peak in peaks.items()})
    assert whole[30] < 1.1 * whole[3]  # what the system has given the process
    # beside the libraries: 1.06 to 1.44 were measured on one core and on other processors, 1.7 when it grew with depth
    assert peaks[30] < 1.5 * peaks[3] + 27 * MODULES
