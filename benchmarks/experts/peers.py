"""Which experts llm-compressor's REAP keeps: a process of its own, in an environment of its own.

    PYTHON benchmarks/experts/peers.py MODEL TOKENS SEQUENCES SHARE

Law: it is told the directory, the sequences and the share that everybody is told, and all it says is what it keeps.

The environment (quality --peer PYTHON runs it): pip install torch==2.13.0 llmcompressor==0.14.*
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path


def kept(directory: str, tokens: str, sequences: int, share: float) -> list[list[int]]:
    """The numbers of the experts that stay, of each mixture in turn."""
    import torch
    import transformers
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from llmcompressor.modifiers.pruning.reap import REAPPruningModifier
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, models

    unused = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, "?")))
    model = linearize_moe(transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    held = load_file(tokens)
    rows = torch.cat([held[name][:sequences].long() for name in sorted(held) if name.startswith("choose ")])
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in rows.split(8)]
    with tempfile.TemporaryDirectory() as scratch:
        said = Path(scratch) / "kept.json"
        oneshot(
            model=model,
            dataset=torch.utils.data.DataLoader(batches, batch_size=None),
            recipe=REAPPruningModifier(sparsity=share, report_path=str(said)),
            num_calibration_samples=len(rows),
            max_seq_length=rows.shape[1],
            processor=unused,  # it asks for a tokenizer, though the data are tokens already
            moe_calibrate_all_experts=False,
        )
        found = json.loads(said.read_text(encoding="utf-8"))
    return [found[name] for name in sorted(found, key=lambda name: int(name.split(".")[2]))]


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        answer = kept(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    print(json.dumps(answer))
