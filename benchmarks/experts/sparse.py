"""A directory of the shapes of Qwen3-30B-A3B: how long it takes to plan and to slice it, and in what memory.

Law: each step is the command in a process of its own, whose peak memory the system says. The files have holes for
values, so that they take no room; what is written does, and so only as many layers are sliced as are asked for.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

STEPS = ("plan", "slice", "run", "repair")
EXPERTS, LAYERS, WIDTH, INNER, HEADS, GROUPS, HEAD, WORDS = 128, 48, 2048, 768, 32, 4, 128, 151_936
_PIECE = 1 << 22  # values that are drawn at a time
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": 6144,
    "max_position_embeddings": 40_960,
    "mlp_only_layers": [],
    "moe_intermediate_size": INNER,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "num_key_value_heads": GROUPS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "vocab_size": WORDS,
}


def shapes(layer: int, experts: int) -> dict[str, tuple[int, ...]]:
    start = f"model.layers.{layer}."
    attention = {
        "q_proj": (HEADS * HEAD, WIDTH),
        "k_proj": (GROUPS * HEAD, WIDTH),
        "v_proj": (GROUPS * HEAD, WIDTH),
        "o_proj": (WIDTH, HEADS * HEAD),
        "q_norm": (HEAD,),
        "k_norm": (HEAD,),
    }
    found: dict[str, tuple[int, ...]] = {f"{start}self_attn.{key}.weight": shape for key, shape in attention.items()}
    found |= {f"{start}{key}.weight": (WIDTH,) for key in ("input_layernorm", "post_attention_layernorm")}
    found[f"{start}mlp.gate.weight"] = (experts, WIDTH)
    for each in range(experts):
        for key, shape in (("gate_proj", (INNER, WIDTH)), ("up_proj", (INNER, WIDTH)), ("down_proj", (WIDTH, INNER))):
            found[f"{start}mlp.experts.{each}.{key}.weight"] = shape
    return found


def make(folder: Path, layers: int, experts: int, *, values: bool = False) -> int:
    """A shard a layer, and one of the rest; holes for values, or random ones. Returns the bytes of all tensors."""
    import numpy as np

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_experts": experts, "num_hidden_layers": layers}))
    rest = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (WORDS, WIDTH))
    shards = [shapes(layer, experts) for layer in range(layers)] + [{**rest, "model.norm.weight": (WIDTH,)}]
    places, total = {}, 0
    draw = np.random.default_rng(0)
    for number, tensors in enumerate(shards):
        header, at = {}, 0
        for name, shape in tensors.items():
            size = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        with open(folder / file, "wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            for name, shape in tensors.items() if values else ():
                count = int(np.prod(shape))
                # words differ more than what is in front of them, so that what is repaired on some is on others, too
                scale = np.float32(1.0 if len(shape) == 1 or name == "model.embed_tokens.weight" else 0.02)
                for begin in range(0, count, _PIECE):
                    few = min(_PIECE, count - begin)
                    drawn = np.ones(few, np.float32) if len(shape) == 1 else draw.standard_normal(few, np.float32)
                    opened.write(((drawn * scale).view(np.uint32) >> 16).astype(np.uint16).tobytes())
            opened.truncate(8 + len(text) + at)
        places.update(dict.fromkeys(tensors, file))
        total += at
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def plan_for(path: Path, layers: int, experts: int) -> None:
    """A profile that no text made, since the weights are none."""
    import numpy as np

    draw = np.random.default_rng(0)
    sums = {key: draw.uniform(1, 2, experts).tolist() for key in ("tokens", "weighted")}
    names = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(layers)]
    text = {"data": "none", "sha256": "", "tokens": 1, "held_out": 0}
    head = {"format": "secateur experts profile", "version": 1, "rank": "reap", "text": text}
    path.write_text(json.dumps({**head, "mixtures": dict.fromkeys(names, sums)}))


def measured(command: Sequence[str]) -> tuple[float, float]:
    """Seconds, and the most bytes of memory.

    The system counts with a process what the one that began it had taken at most before, so that this one may not take
    much; it says so if it did.
    """
    started = time.monotonic()
    child = os.posix_spawn(sys.executable, [sys.executable, *command], dict(os.environ))
    _, status, usage = os.wait4(child, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)}: exit status {status}.")
    if usage.ru_maxrss <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss:
        raise RuntimeError(f"{' '.join(command)}: took less memory than the benchmark itself, so that it is not known.")
    return time.monotonic() - started, usage.ru_maxrss * 1024


_REPAIRED = """
import sys, torch
from secateur import Experts, shrink
source, out, activations, samples, length, repair = sys.argv[1:]
draw = torch.Generator().manual_seed(0)
# few words, so that what experts make up for on some batches they make up for on others, and blocks are written
batches = [{"input_ids": torch.randint(0, 64, (1, int(length)), generator=draw)} for _ in range(int(samples))]
done = shrink(source, leave=Experts(0.25), out=out, batches=batches, activations=activations, verify=False,
              repair=repair == "yes")
print(done)
if repair == "yes" and not done.repaired:
    raise SystemExit("nothing was repaired, so that writing it was not measured")
"""


_SLICED = """
import sys, time
from pathlib import Path
source, out, plan, seconds, discard = sys.argv[1:]
from secateur import Experts, shrink
from secateur.shrinking.kinds import experts_directory as expert_directory
right, total = expert_directory.write_file, []
def timed(checkpoint, target, place, *others):
    started = time.monotonic(), time.process_time()
    done = right(checkpoint, target, place, *others)
    total.append((time.monotonic() - started[0], time.process_time() - started[1]))
    if discard:
        sys.path.insert(0, discard)  # where the benchmarks are
        from benchmarks.experts.sparse import make_holes
        make_holes(target / place)
    return done
expert_directory.write_file = timed
shrink(source, leave=Experts(0.25, plan=plan), out=out, verify=False)
Path(seconds).write_text(" ".join(str(sum(each)) for each in zip(*total)))
"""


def sparse(
    layers: int,
    samples: int,
    length: int,
    folder: Path | None = None,
    experts: int = EXPERTS,
    *,
    discard: bool = False,
    steps: Sequence[str] = STEPS,
) -> Iterator[dict[str, Any]]:
    """Planning all 48 layers, slicing some (reading, writing and syncing them is what MB/s are of), and repairing two
    of random values: seconds, MB/s, and peak memory. To ``discard`` is to make holes of each file that was written and
    synced, before the next one is begun and outside of what MB/s are of: more layers than the disk has room for."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        here = Path(name)
        block = 2 * sum(_count(shape) for shape in shapes(0, experts).values())
        nothing = measured(["-c", "import torch, transformers.models.qwen3_moe.modeling_qwen3_moe"])
        yield {
            "step": "nothing but importing",
            "seconds": nothing[0],
            "peak GB": nothing[1] / 1e9,
            "block GB": block / 1e9,
        }
        if "plan" in steps:
            yield _planned(here, experts)
        if "slice" in steps:
            yield _sliced(here, layers, experts, discard=discard)
        wanted = [repair for repair in ("no", "yes") if ("repair" if repair == "yes" else "run") in steps]
        if wanted:
            make(here / "values", 2, experts, values=True)
        for repair in wanted:
            (here / "activations").mkdir()
            where = [str(here / each) for each in ("values", f"small-{repair}", "activations")]
            seconds, peak = measured(["-c", _REPAIRED, *where, str(samples), str(length), repair])
            shutil.rmtree(here / "activations")
            shutil.rmtree(here / f"small-{repair}")
            yield {
                "step": f"two layers, {samples * length} tokens{', repaired' if repair == 'yes' else ''}",
                "seconds": seconds,
                "peak GB": peak / 1e9,
                "blocks": (peak - nothing[1]) / block,
            }


def _planned(here: Path, experts: int) -> dict[str, Any]:
    total = make(here / "whole", LAYERS, experts)
    plan_for(here / "whole.json", LAYERS, experts)
    where = [str(here / each) for each in ("whole", "whole.json")]
    command = ["-m", "secateur", "experts", where[0], "--plan", where[1], "--remove", "0.25", "--dry-run"]
    seconds, peak = measured(command)
    shutil.rmtree(here / "whole")
    return {"step": f"plan {LAYERS} layers", "seconds": seconds, "peak GB": peak / 1e9, "source GB": total / 1e9}


def _sliced(here: Path, layers: int, experts: int, *, discard: bool) -> dict[str, Any]:
    total = make(here / "some", layers, experts)
    plan_for(here / "some.json", layers, experts)
    where = [str(here / each) for each in ("some", "small", "some.json", "seconds")]
    seconds, peak = measured(["-c", _SLICED, *where, str(Path(__file__).parents[2]) if discard else ""])
    written = sum(path.stat().st_size for path in (here / "small").iterdir())
    took = [float(each) for each in (here / "seconds").read_text().split()]
    for each in ("some", "small"):
        shutil.rmtree(here / each)
    return {
        "step": f"plan and slice {layers} layers",
        "seconds": seconds,
        "peak GB": peak / 1e9,
        "source GB": total / 1e9,
        "written GB": written / 1e9,
        "writing": took[0],
        "MB/s": written / 1e6 / took[0],
        "MB a second of the processor": written / 1e6 / took[1],
    }


def make_holes(path: Path) -> None:
    """A file of tensors as large as it was, of which only the header is on the disk."""
    with open(path, "rb") as opened:
        header = 8 + int.from_bytes(opened.read(8), "little")
    size = path.stat().st_size
    os.truncate(path, header)
    os.truncate(path, size)


def _count(shape: Sequence[int]) -> int:
    total = 1
    for each in shape:
        total *= each
    return total
