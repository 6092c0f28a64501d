"""One-shot pruning beside llm-compressor and NVIDIA ModelOpt, on the same Llama and the same text.

    python benchmarks/oneshot/peers.py SCRATCH [--rounds 3] [--cases sparsegpt,2:4] [--json FILE]

Law: each run is a process of its own, cases take turns within a round, and what a tool left is measured by one and
the same code: zeros counted in the weights, errors and perplexity on text that neither training nor calibration saw.

The Llama (20 million parameters, bytes as tokens) is trained for some minutes by the first run and kept in SCRATCH.
The tools, at their defaults, pruned in memory; imports, loading and measuring are not in the seconds. They fit beside
each other, in an environment of their own (Secateur has no wheel yet: PYTHONPATH=src):

    pip install torch==2.13.0 llmcompressor==0.14.* nvidia-modelopt==0.47.*
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.support import corpora
from benchmarks.support.language_models import fit, next_token_loss
from benchmarks.support.memory import from_its_peak
from benchmarks.support.processes import in_a_process
from benchmarks.support.tables import head, row

LENGTH = 256  # tokens of a sequence
BATCH = 8  # sequences
CALIBRATION = 64  # sequences
HELD_OUT = 32
OURS, LLMCOMPRESSOR, MODELOPT = "Secateur", "llm-compressor", "ModelOpt"
PACKAGES = {LLMCOMPRESSOR: ("llmcompressor", "0.14.*"), MODELOPT: ("modelopt", "0.47.*")}
DISTRIBUTIONS = {OURS: "secateur", LLMCOMPRESSOR: "llmcompressor", MODELOPT: "nvidia-modelopt"}


@dataclass(frozen=True)
class Case:
    """One tool's method at one setting."""

    tool: str
    method: str
    setting: str


CASES = (
    Case(OURS, "sparsegpt", "50%"),
    Case(LLMCOMPRESSOR, "sparsegpt", "50%"),
    Case(OURS, "wanda", "50%"),
    Case(LLMCOMPRESSOR, "wanda", "50%"),
    Case(OURS, "admm", "50%"),
    Case(OURS, "sparsegpt", "2:4"),
    Case(LLMCOMPRESSOR, "sparsegpt", "2:4"),
    Case(MODELOPT, "sparsegpt", "2:4"),
    Case(OURS, "wanda", "2:4"),
    Case(LLMCOMPRESSOR, "wanda", "2:4"),
    Case(OURS, "magnitude", "2:4"),
    Case(MODELOPT, "magnitude", "2:4"),
    Case(OURS, "admm", "2:4"),
)


def missing() -> dict[str, str]:
    """``{tool: why it cannot run here, and what to do}``."""
    return {
        tool: f"{package} is not installed (pip install '{DISTRIBUTIONS[tool]}=={version}')"
        for tool, (package, version) in PACKAGES.items()
        if importlib.util.find_spec(package) is None
    }


def version(tool: str) -> str:
    try:
        return importlib.metadata.version(DISTRIBUTIONS[tool])
    except importlib.metadata.PackageNotFoundError:
        return "from source"


# --------------------------------------------------------------------------------------------------------------------
# What is pruned. Everything that a child process reads lies in the scratch folder.
# --------------------------------------------------------------------------------------------------------------------


def prepare(scratch: Path, *, hidden: int = 512, layers: int = 6, steps: int = 100) -> None:
    """The trained Llama, sequences for calibration and others held out, unless the folder has them."""
    import transformers
    from safetensors.torch import save_file

    if (scratch / "texts.safetensors").exists():
        return
    transformers.logging.disable_progress_bar()
    texts = corpora.of_the_standard_library()
    text = torch.frombuffer(bytearray("\0".join(texts).encode()), dtype=torch.uint8)
    sequences = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()
    held_out, sequences = sequences[:HELD_OUT], sequences[HELD_OUT:]
    calibration, train = sequences[:CALIBRATION], sequences[CALIBRATION:]
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
            num_attention_heads=8, max_position_embeddings=LENGTH, tie_word_embeddings=False, bos_token_id=None,
            eos_token_id=None,
        )
    )  # fmt: skip
    print(f"training {sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps", flush=True)
    fit(model, next_token_loss(model, train, 4), steps, 1e-3)
    model.save_pretrained(scratch / "model")
    save_file({"calibration": calibration, "held_out": held_out.contiguous()}, scratch / "writing")
    os.replace(scratch / "writing", scratch / "texts.safetensors")


def load(scratch: Path) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers
    from safetensors.torch import load_file

    transformers.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM.from_pretrained(scratch / "model", dtype=torch.float32).eval()
    return model, load_file(scratch / "texts.safetensors")


# --------------------------------------------------------------------------------------------------------------------
# The tools: each prunes a model in place.
# --------------------------------------------------------------------------------------------------------------------


def ours(case: Case) -> Callable[[nn.Module, Tensor], None]:
    from secateur import NM, Rows, Unstructured, criteria, sparsify
    from secateur.models import oneshot
    from secateur.solvers import admm, from_criterion, sparsegpt

    unstructured = Rows() if case.method == "wanda" else Unstructured()
    solvers: dict[str, Any] = {
        "wanda": from_criterion(criteria.wanda),
        "sparsegpt": sparsegpt,
        "admm": admm,
    }

    def prune(model: nn.Module, calibration: Tensor) -> None:
        batches = [{"input_ids": part} for part in calibration.split(BATCH)]
        sparsity, pattern = (0.5, unstructured) if case.setting == "50%" else (None, NM(2, 4))
        if case.method == "magnitude":  # needs no data
            sparsify(model, sparsity, pattern=pattern, include="model.layers.*_proj.weight")
        else:
            oneshot(model, batches, sparsity, solver=solvers[case.method], pattern=pattern, stages=False)

    return prune


def llmcompressor(case: Case) -> Callable[[nn.Module, Tensor], None]:
    import transformers
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
    from tokenizers import Tokenizer, models

    # It asks for a tokenizer, though the data are tokens already.
    unused = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, "?")))
    modifier = {"sparsegpt": SparseGPTModifier, "wanda": WandaPruningModifier}[case.method]
    structure = "0:0" if case.setting == "50%" else case.setting

    def prune(model: nn.Module, calibration: Tensor) -> None:
        batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in calibration.split(BATCH)]
        oneshot(
            model=model,
            dataset=torch.utils.data.DataLoader(batches, batch_size=None),
            recipe=modifier(sparsity=0.5, mask_structure=structure, targets=["Linear"], ignore=["re:.*lm_head"]),
            num_calibration_samples=len(calibration),
            max_seq_length=LENGTH,
            processor=unused,
        )

    return prune


def modelopt(case: Case) -> Callable[[nn.Module, Tensor], None]:
    import modelopt.torch.sparsity as sparsity

    if case.setting != "2:4":
        raise ValueError(f"ModelOpt prunes 2:4 only, not {case.setting}")
    mode = {"sparsegpt": "sparsegpt", "magnitude": "sparse_magnitude"}[case.method]

    def prune(model: nn.Module, calibration: Tensor) -> None:
        settings: dict[str, Any] = {}
        if mode == "sparsegpt":
            settings = {"data_loader": calibration.split(BATCH), "collect_func": lambda batch: batch}
        sparsity.export(sparsity.sparsify(model, mode, settings))

    return prune


TOOLS = {OURS: ours, LLMCOMPRESSOR: llmcompressor, MODELOPT: modelopt}


# --------------------------------------------------------------------------------------------------------------------
# One run, in a process of its own.
# --------------------------------------------------------------------------------------------------------------------


def run(case: Case, scratch: Path, *, measure: bool) -> dict[str, float]:
    """Prunes once, and measures what became of the model, which is the same in every round."""
    prune = TOOLS[case.tool](case)
    model, texts = load(scratch)
    dense = {name: weight.detach().clone() for name, weight in prunable(model).items()}
    with from_its_peak() as memory:
        wall, cpu = time.perf_counter(), time.process_time()
        with contextlib.redirect_stdout(sys.stderr):
            prune(model, texts["calibration"])
        seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    return {**seconds, **memory, **(outcome(model, dense, texts["held_out"]) if measure else {})}


def prunable(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the Linear layers in blocks."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in f".{name}"
    }


@torch.no_grad()
def outcome(model: nn.Module, dense: dict[str, Tensor], held_out: Tensor) -> dict[str, float]:
    """Fractions of zeros, the mean over layers of ``‖X(W' - W)'‖² / ‖XW'‖²`` on the inputs X that reach a layer of
    the pruned model, and perplexity; the last two on held-out text."""
    weights = prunable(model)
    lost, whole = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)

    def add(name: str, args: tuple[Tensor, ...]) -> None:
        lost[name] += float(nn.functional.linear(args[0], weights[name] - dense[name]).square().sum())
        whole[name] += float(nn.functional.linear(args[0], dense[name]).square().sum())

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: add(name, args))
        for name in weights
    ]
    losses = [float(model(input_ids=part, labels=part).loss) for part in held_out.split(BATCH)]
    for hook in hooks:
        hook.remove()
    zeros = sum(int((weight == 0).sum()) for weight in weights.values())
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    return {
        "sparsity": zeros / sum(weight.numel() for weight in weights.values()),
        "head": float((head == 0).double().mean()),
        "error": statistics.mean(lost[name] / whole[name] for name in weights),
        "perplexity": math.exp(statistics.mean(losses)),
    }


def apart(case: Case, scratch: Path, *, measure: bool) -> dict[str, float]:
    """`run` in a new process.

    Raises:
        RuntimeError: it failed; the message ends with what it said.
    """
    told = f"{case.tool}, {case.method} at {case.setting},"
    given = json.dumps({**vars(case), "measure": measure})
    environment = {"TOKENIZERS_PARALLELISM": "false", "SECATEUR_PROGRESS": "0"}
    found: dict[str, float] = in_a_process(told, __file__, str(scratch), "--child", given, environment=environment)
    return found


# --------------------------------------------------------------------------------------------------------------------
# The tables.
# --------------------------------------------------------------------------------------------------------------------


def compare(cases: list[Case], scratch: Path, rounds: int) -> dict[Case, list[dict[str, float]]]:
    """Cases in turn; one that fails is said to, and is left out from then on."""
    from secateur.support import track

    found: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    for number, case in track([(number, case) for number in range(rounds) for case in cases], "pruning"):
        if case not in found:
            continue
        try:
            result = apart(case, scratch, measure=number == 0)
        except RuntimeError as error:
            del found[case]
            print(error, flush=True)
            continue
        found[case].append(result)
        shown = ", ".join(f"{key} {value:.6g}" for key, value in result.items())
        print(f"round {number + 1}: {case.tool}, {case.method}, {case.setting}: {shown}", flush=True)
    return found


def table(found: dict[Case, list[dict[str, float]]], dense: dict[str, float]) -> str:
    """Markdown: medians over rounds; ratios of CPU time are medians of the rounds' own."""
    columns = ["", "method", "tool", "CPU s", "wall s", "of another's CPU time", "peak MB", "sparsity", "of the head"]
    columns += ["layer error", "perplexity"]
    lines = [head(columns)]
    lines.append(row(["dense", *[""] * 6, "0", "0", "0", f"{dense['perplexity']:.3f}"]))
    for case, runs in found.items():
        cpu, wall, peak = (statistics.median(run[key] for run in runs) for key in ("cpu", "wall", "peak"))
        cells = [case.setting, case.method, case.tool, f"{cpu:.1f}", f"{wall:.1f}", _ratios(found, case)]
        cells += [f"{peak / 1e6:.0f}", f"{runs[0]['sparsity']:.6f}", f"{runs[0]['head']:.4f}"]
        lines.append(row([*cells, f"{runs[0]['error']:.3g}", f"{runs[0]['perplexity']:.3f}"]))
    return "\n".join(lines)


def _ratios(found: dict[Case, list[dict[str, float]]], case: Case) -> str:
    """Our CPU seconds over those of each other tool with the same method and setting."""
    if case.tool != OURS:
        return ""
    cells = []
    for other, runs in found.items():
        if other.tool != OURS and (other.method, other.setting) == (case.method, case.setting):
            ratios = [own["cpu"] / their["cpu"] for own, their in zip(found[case], runs, strict=False)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f}) of {other.tool}")
    return ", ".join(cells)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scratch", type=Path, help="a folder for the model, which the first run trains")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default="", help="words that a case must have: a tool, a method, a setting")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child is not None:
        measure = given.child.pop("measure")
        print(json.dumps(run(Case(**given.child), given.scratch, measure=measure)))
        return
    absent = missing()
    for tool, why in absent.items():
        print(f"{tool} is left out: {why}.")
    words = {word for word in given.cases.split(",") if word}
    known = {word for case in CASES for word in vars(case).values()}
    if words - known:
        parser.error(f"no case has {', '.join(sorted(words - known))}; there is {', '.join(sorted(known))}")
    cases = [case for case in CASES if case.tool not in absent and words <= set(vars(case).values())]
    if not cases:
        parser.error(f"no case is left that has {given.cases}")
    given.scratch.mkdir(parents=True, exist_ok=True)
    prepare(given.scratch)
    model, texts = load(given.scratch)
    tools = ", ".join(f"{tool} {version(tool)}" for tool in dict.fromkeys(case.tool for case in cases))
    print(f"{tools}; torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}; "
          f"{sum(p.numel() for p in model.parameters()):,} parameters, {texts['calibration'].numel():,} tokens, "
          f"{torch.get_num_threads()} threads", flush=True)  # fmt: skip
    dense = outcome(model, {name: weight.detach() for name, weight in prunable(model).items()}, texts["held_out"])
    found = compare(cases, given.scratch, given.rounds)
    print(f"\n{table(found, dense)}")
    if given.json:
        rows = [{**vars(case), "runs": runs} for case, runs in found.items()]
        given.json.write_text(json.dumps({"dense": dense, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
