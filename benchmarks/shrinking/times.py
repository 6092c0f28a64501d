"""Milliseconds of models in directories, eager and in ONNX Runtime: the first token of a prompt, and the next one.

Law: what is compared takes turns in one process, all directories and both runtimes within a round, and a ratio to the
first directory is the median of the rounds' ratios. An encoder has no next token.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.inference.exported import bytes_of, onnx_file, session
from benchmarks.inference.subjects import NextToken
from benchmarks.shrinking.sizes import count_of
from benchmarks.support.tables import head, row
from benchmarks.support.timing import alternating, ratio
from secateur.shrinking import load_shrunken

BATCHES = (1, 16)
PROMPT = 64  # tokens


class FirstToken(nn.Module):
    """The logits of the token after a prompt; of an encoder, what it makes of all tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        if not hasattr(self.model, "lm_head"):
            y: Tensor = self.model(tokens)[0]
            return y
        last: Tensor = self.model(tokens, use_cache=False, logits_to_keep=1)[0]
        return last


def load(directory: Path, dense: Path) -> Any:
    """What `from_pretrained` makes of a directory; where no config is, `load_shrunken` in the dense one's model."""
    import transformers

    transformers.logging.disable_progress_bar()
    if not (directory / "config.json").exists():
        return load_shrunken(load(dense, dense), directory)
    named = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("architectures") or [""]
    causal = named[0].endswith("ForCausalLM")
    loader = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    return loader.from_pretrained(directory, dtype=torch.float32).eval().requires_grad_(False)


def served(model: Any, batch: int) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """``(step, module, its tokens)``."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (batch, PROMPT + 1), generator=draw)
    yield "first token" if hasattr(model, "lm_head") else "all tokens", FirstToken(model), tokens[:, :PROMPT]
    if hasattr(model, "lm_head"):
        yield "next token", NextToken(model, tokens[:, :PROMPT]), tokens[:, PROMPT:]


@torch.no_grad()
def times(directories: Sequence[Path], rounds: int = 9) -> dict[tuple[str, int], dict[tuple[str, str], list[float]]]:
    """Prints the tables; returns seconds of the rounds by step and batch, then by directory and runtime."""
    names = [directory.name or str(directory) for directory in directories]
    if len(set(names)) < len(names):
        names = [str(directory) for directory in directories]
    models = {name: load(directory, directories[0]) for name, directory in zip(names, directories, strict=True)}
    found: dict[tuple[str, int], dict[tuple[str, str], list[float]]] = {}
    for batch in BATCHES:
        parts = {name: list(served(model, batch)) for name, model in models.items()}
        for place, (step, _, _) in enumerate(parts[names[0]]):
            with tempfile.TemporaryDirectory() as folder:
                calls: dict[tuple[str, str], Callable[[], Any]] = {}
                for number, name in enumerate(names):
                    _, module, tokens = parts[name][place]
                    file = onnx_file(Path(folder) / f"{number}.onnx", module.eval(), (tokens,), False)
                    run = session(file, torch.get_num_threads())
                    expected = module(tokens)
                    torch.testing.assert_close(torch.as_tensor(run(tokens)), expected, rtol=1e-2, atol=1e-2)
                    calls[name, "eager"] = functools.partial(module, tokens)
                    calls[name, "ONNX Runtime"] = functools.partial(run, tokens)
                    file.unlink()
                found[step, batch] = alternating(calls, rounds)
            print(f"{step}, batch {batch}: measured", flush=True)
    print(table(models, found))
    return found


def table(models: Mapping[str, Any], found: Mapping[tuple[str, int], Mapping[tuple[str, str], list[float]]]) -> str:
    """Markdown: medians in milliseconds, and how many times faster than the first in the same runtime."""
    runtimes = ("eager", "ONNX Runtime")
    kinds = [(step, batch, runtime) for step, batch in found for runtime in runtimes]
    titles = [f"{step}, batch {batch}, {runtime}" for step, batch, runtime in kinds]
    lines = [head(["ms (times faster)", "parameters", "MB", *titles])]
    dense = next(iter(models))
    for name, model in models.items():
        cells = [name, f"{count_of(model) / 1e6:.2f} M", f"{bytes_of(model) / 1e6:.1f}"]
        for step, batch, runtime in kinds:
            own = found[step, batch]
            faster = ratio(own[name, runtime], own[dense, runtime])
            shown = f"{1e3 * statistics.median(own[name, runtime]):.1f}"
            cells.append(shown if name == dense else f"{shown} ({faster:.2f})")
        lines.append(row(cells))
    return "\n".join(lines)
