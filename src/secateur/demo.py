"""The whole story in two minutes: train a small residual network on handwritten digits, prune it, fine-tune it, report.

Law: every method gets the same dense networks, the same budget and the same measurement, and the same seeds give the
same accuracies on the same machine, whatever its number of cores.
"""

import copy
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.allocation import erk
from secateur.criteria import lamp, random
from secateur.masks import apply_, sparsity_of
from secateur.patterns import NM
from secateur.report import write_report
from secateur.results import Network, Results, Run, describe, print_summary, save_results, summarize
from secateur.sparsification import sparsify
from secateur.targets import find_targets

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Digits", "DigitsNet", "accuracy", "calibrate", "load_digits", "run_demo", "train"]

SEEDS = (0, 1, 2)
SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98)
EPOCHS = 30  # dense
TUNING_EPOCHS = 10  # the same for every method
RATE = 0.2  # at the top of the cycle, in both
BATCH = 128
WEIGHT_DECAY = 5e-4


@dataclass(frozen=True)
class Method:
    """A name and what it says to `sparsify` beside the sparsity."""

    name: str
    choices: Mapping[str, Any] = field(default_factory=dict)


METHODS = (
    Method("global magnitude"),
    Method("ERK", {"allocate": erk}),
    Method("LAMP", {"criterion": lamp}),
    Method("random", {"criterion": random}),
)
# 2:4 takes four consecutive inputs, and the stem has one input channel only.
TWO_OF_FOUR = Method("2:4", {"pattern": NM(2, 4), "exclude": "stem.weight"})


class Digits(NamedTuple):
    """Images of shape (n, 1, 8, 8), normalized by the training images, and labels 0 … 9 of shape (n,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    """scikit-learn's 1797 handwritten digits, always split into the same 1078 training and 719 test images, by class.

    Nothing is downloaded. ``ImportError`` where scikit-learn is missing.

    >>> [tuple(part.shape) for part in load_digits()]
    [(1078, 1, 8, 8), (1078,), (719, 1, 8, 8), (719,)]
    """
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise ImportError(f"the digits come with scikit-learn ({error}): pip install 'secateur[demo]'") from error
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8)
    classes = torch.tensor(labels, dtype=torch.int64)
    train, test = model_selection.train_test_split(range(len(classes)), test_size=719, stratify=labels, random_state=0)
    images = (images - images[train].mean()) / images[train].std()
    return Digits(images[train], classes[train], images[test], classes[test])


class _Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the number of channels changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        changes = inputs != outputs or stride != 1
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class DigitsNet(nn.Module):
    """A residual network of three blocks for images of shape (n, 1, 8, 8); returns logits of shape (n, 10).

    >>> DigitsNet()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, narrow: int = 16, wide: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, narrow, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(narrow)
        self.blocks = nn.Sequential(_Block(narrow, narrow, 1), _Block(narrow, wide, 2), _Block(wide, wide, 1))
        self.head = nn.Linear(wide, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(functional.relu(self.norm(self.stem(x))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def _shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to one pixel each way."""
    count, side = len(images), images.shape[-1]
    padded = functional.pad(images, (1, 1, 1, 1), value=float(images.min()))  # the background
    corner = torch.randint(0, 3, (count, 2), generator=generator)
    rows = (corner[:, :1] + torch.arange(side))[:, None, :, None]
    columns = (corner[:, 1:] + torch.arange(side))[:, None, None, :]
    return padded[torch.arange(count)[:, None, None, None], 0, rows, columns]


def train(
    model: nn.Module,
    data: Digits,
    *,
    epochs: int,
    rate: float,
    seed: int,
    masks: Mapping[str, Tensor] | None = None,
    after_epoch: Callable[[], object] = lambda: None,
) -> None:
    """Train in place: SGD with Nesterov momentum, one cycle up to ``rate``, images shifted by up to one pixel.

    With ``masks`` ({parameter name: bool, True = kept}) what they removed is zero again after every step. All
    randomness comes from ``seed``; the global generator is not touched. ``after_epoch`` is called after each epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    steps = len(data.train_images) // BATCH  # a last batch of few images would disturb the normalization
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=WEIGHT_DECAY, nesterov=True)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=epochs * steps, pct_start=0.2)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(data.train_images), generator=generator)
        for batch in order[: steps * BATCH].reshape(steps, BATCH):
            logits = model(_shifted(data.train_images[batch], generator))
            loss = functional.cross_entropy(logits, data.train_labels[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if masks is not None:
                apply_(model, masks)
            cycle.step()
        after_epoch()


@torch.no_grad()
def calibrate(model: nn.Module, images: Tensor) -> None:
    """Estimate the running statistics of all batch normalizations anew, from one pass over ``images``, in place.

    Pruning moves the activations, so the statistics of the dense network are wrong for the pruned one. No label is used
    and no weight changes.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    training = model.training
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over all batches
    model.train()
    model(images)
    model.train(training)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The percentage of images that the model, in evaluation mode, puts into the right class."""
    training = model.training
    model.eval()
    correct = (model(images).argmax(dim=1) == labels).double().mean()
    model.train(training)
    return 100 * float(correct)


# --------------------------------------------------------------------------------------------------------------------
# The table: methods × sparsities × seeds
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class _Trial:
    """One row of the table on its way: a dense network's copy, pruned, then fine-tuned."""

    method: str
    asked: float
    seed: int
    model: nn.Module
    masks: dict[str, Tensor]
    before: float
    after: float = math.nan


def run_demo(
    out: Path | None = None,
    *,
    seeds: Sequence[int] = SEEDS,
    sparsities: Sequence[float] = SPARSITIES,
    epochs: int = EPOCHS,
    tuning_epochs: int = TUNING_EPOCHS,
) -> Path:
    """Train, prune, fine-tune, measure; print the table; write ``report.html`` and ``results.json``; return the page.

    Args:
        out: the folder for the two files, made if missing; ``secateur-demo`` by default. Files of these names in it are
            replaced once the new ones are complete.
        seeds: one dense network is trained for each.
        sparsities: fractions of the weights that each method removes; 2:4 has its own.
        epochs: of dense training.
        tuning_epochs: of fine-tuning, the same for all methods and for the dense network.

    Raises:
        ImportError: scikit-learn, matplotlib or jinja2 is missing; the message says what to install.
        NotADirectoryError: ``out`` is a file.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    folder = Path("secateur-demo") if out is None else Path(out)
    _check_extras()  # everything that can be missing is asked for before a minute has gone
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; the demo needs a folder for its report: give another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    data = load_digits()
    started = time.perf_counter()
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _one_thread(), Progress(*columns, console=console) as progress:
        dense = _train_dense(data, seeds, epochs, progress)
        trials = _prune(dense, data, sparsities, progress)
        _fine_tune(trials, data, tuning_epochs, progress)
        latencies = _latencies([trial.model for trial in trials if trial.seed == seeds[0]], progress)
    seconds = time.perf_counter() - started
    results = _results(dense, trials, latencies, data, seconds, epochs, tuning_epochs, out is not None)
    save_results(results, folder / "results.json")
    page = write_report(results, folder / "report.html")
    print_summary(results)
    for paragraph in results.text:
        console.print(paragraph, highlight=False, markup=False)
    console.print(
        f"\nThe report is in {page}, its numbers in {folder / 'results.json'}.", highlight=False, markup=False
    )
    return page


def _check_extras() -> None:
    try:
        import jinja2
        import matplotlib
        import sklearn
    except ImportError as error:
        raise ImportError(f"the demo needs its extra ({error}): pip install 'secateur[demo]'") from error
    del jinja2, matplotlib, sklearn


@contextmanager
def _one_thread() -> Iterator[None]:
    """On tensors this small a second thread gains little, and on busy cores the two wait for each other for minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _in_parallel(jobs: Sequence[Callable[[], None]]) -> None:
    """Run the jobs on all cores, each on one thread, so that the results are the same however many cores there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))  # the setting is a thread's own
    try:
        for done in [pool.submit(job) for job in jobs]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _train_dense(data: Digits, seeds: Sequence[int], epochs: int, progress: "Progress") -> dict[int, nn.Module]:
    bar = progress.add_task(f"Training {len(seeds)} dense networks, epochs", total=len(seeds) * epochs)
    models: dict[int, nn.Module] = {}
    with torch.random.fork_rng(devices=[]):
        for seed in seeds:
            torch.manual_seed(seed)
            models[seed] = DigitsNet()

    def job(seed: int) -> Callable[[], None]:
        return lambda: train(
            models[seed], data, epochs=epochs, rate=RATE, seed=seed, after_epoch=lambda: progress.advance(bar)
        )

    _in_parallel([job(seed) for seed in seeds])
    return models


def _prune(
    dense: Mapping[int, nn.Module], data: Digits, sparsities: Sequence[float], progress: "Progress"
) -> list[_Trial]:
    plan: list[tuple[Method | None, float | None]] = [(None, 0.0), (TWO_OF_FOUR, None)]
    plan += [(method, sparsity) for method in METHODS for sparsity in sparsities]
    bar = progress.add_task("Pruning, networks", total=len(plan) * len(dense))
    trials = []
    for method, sparsity in plan:
        for seed, original in dense.items():
            model = copy.deepcopy(original)
            masks: dict[str, Tensor] = {}
            if method is not None:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)  # random scores come from the global generator
                    masks = dict(sparsify(model, sparsity, **method.choices))
            calibrate(model, data.train_images)
            before = accuracy(model, data.test_images, data.test_labels)
            trials.append(_Trial(method.name if method else "dense", sparsity or 0.0, seed, model, masks, before))
            progress.advance(bar)
    return trials


def _fine_tune(trials: Sequence[_Trial], data: Digits, epochs: int, progress: "Progress") -> None:
    bar = progress.add_task(f"Fine-tuning, networks of {epochs} epochs", total=len(trials))

    def job(trial: _Trial) -> Callable[[], None]:
        def run() -> None:
            train(trial.model, data, epochs=epochs, rate=RATE, seed=1000 + trial.seed, masks=trial.masks or None)
            calibrate(trial.model, data.train_images)
            trial.after = accuracy(trial.model, data.test_images, data.test_labels)
            progress.advance(bar)

        return run

    _in_parallel([job(trial) for trial in trials])


@torch.inference_mode()
def _latencies(models: Sequence[nn.Module], progress: "Progress", rounds: int = 30, calls: int = 10) -> list[float]:
    """Milliseconds of one image through each model on one thread: the fastest of many rounds, in each of which every
    model has its turn, so that a slow moment of the machine touches all of them and is then left out."""
    bar = progress.add_task("Timing one image, rounds", total=rounds)
    image = torch.zeros(1, 1, 8, 8)
    times: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, mine in zip(models, times, strict=True):
            model.eval()
            model(image)
            start = time.perf_counter()
            for _ in range(calls):
                model(image)
            mine.append(1000 * (time.perf_counter() - start) / calls)
        progress.advance(bar)
    return [min(mine) for mine in times]


# --------------------------------------------------------------------------------------------------------------------
# The results
# --------------------------------------------------------------------------------------------------------------------


def _results(
    dense: Mapping[int, nn.Module],
    trials: Sequence[_Trial],
    latencies: Sequence[float],
    data: Digits,
    seconds: float,
    epochs: int,
    tuning_epochs: int,
    named_out: bool,
) -> Results:
    from safetensors.torch import save

    first = next(iter(dense))
    timed = iter(latencies)
    runs = []
    for trial in trials:
        file = save(trial.model.state_dict())
        runs.append(
            Run(
                trial.method,
                sparsity_of(trial.model) if trial.masks else 0.0,
                trial.before,
                trial.after,
                trial.seed,
                bytes=len(file),
                zipped=len(zlib.compress(file, level=9)),
                latency_ms=next(timed) if trial.seed == first else None,
            )
        )
    sparsities = sorted({trial.asked for trial in trials if trial.asked})
    shown = 0.9 if 0.9 in sparsities else sparsities[len(sparsities) // 2]
    networks = _networks(dense[first], [trial for trial in trials if trial.seed == first], shown)
    parameters = sum(parameter.numel() for parameter in dense[first].parameters())
    return Results(
        f"Pruning a network that reads digits ({parameters:,} parameters)",
        tuple(runs),
        networks,
        text=_story(runs, shown),
        notes=_notes(data, len(dense), epochs, tuning_epochs, first, seconds),
        command="secateur demo" + " --out DIR" * named_out,
    )


def _networks(dense: nn.Module, trials: Sequence[_Trial], sparsity: float) -> tuple[Network, ...]:
    weights = {name: weight.detach() for name, weight in find_targets(dense).items()}
    networks = []
    for trial in trials:
        if trial.masks and trial.asked in (sparsity, 0.0):  # 2:4 was asked for none
            whole = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in weights.items()}
            removed = sparsity_of(trial.model)
            title = f"{trial.method}, {100 * removed:.1f} % removed, seed {trial.seed}"
            networks.append(describe(title, weights, whole | trial.masks, method=trial.method))
    return tuple(sorted(networks, key=lambda network: network.title.startswith(TWO_OF_FOUR.name)))


def _story(runs: Sequence[Run], sparsity: float) -> tuple[str, ...]:
    """What the table says, in words; every figure is one of its cells."""
    rows = summarize(runs)
    [dense] = [row for row in rows if row.method == "dense"]
    there = {row.method: row for row in rows if abs(row.sparsity - sparsity) < 0.01}
    best = max(there.values(), key=lambda row: row.after or 0.0)
    slim = max(rows, key=lambda row: row.sparsity)
    story = (
        f"Dense, the network reads {dense.before:.1f} % of the test images right. With {100 * best.sparsity:.0f} % of "
        f"its weights removed it still reads {best.after:.1f} % right (the best row: {best.method}, after "
        f"fine-tuning); with as many removed at random, {there['random'].after:.1f} %.",
        f"Zeros alone make a network neither smaller nor faster. With {100 * slim.sparsity:.0f} % of the weights zero "
        f"the saved file has {_kilo(slim.bytes)} (dense: {_kilo(dense.bytes)}) and one image takes "
        f"{slim.latency_ms:.2f} ms (dense: {dense.latency_ms:.2f} ms). What shrinks is the zipped file, from "
        f"{_kilo(dense.zipped)} to {_kilo(slim.zipped)}.",
    )
    return tuple(re.sub(r"(?<=\d) (?=%|kB|ms)", "\N{NO-BREAK SPACE}", paragraph) for paragraph in story)


def _kilo(size: float | None) -> str:
    return "–" if size is None else f"{size / 1e3:.0f} kB"


def _notes(data: Digits, seeds: int, epochs: int, tuning_epochs: int, first: int, seconds: float) -> tuple[str, ...]:
    return (
        f"Data: scikit-learn's handwritten digits, 8×8 pixels; {len(data.train_images)} images to train, "
        f"{len(data.test_images)} to test, split by class, always in the same way. The training settings were chosen "
        "while looking at these test images, so take accuracies as a comparison of the rows, which share them.",
        f"Dense training: {epochs} epochs for each of {seeds} seeds; a seed sets the first weights, the order of "
        "images and their shifts of up to one pixel. Every method prunes the same dense networks.",
        "Pruned are the weights of all convolutions and of the linear layer; biases and normalizations never. Sparsity "
        "is measured on the fine-tuned network, as the fraction of those weights that is zero.",
        "Global magnitude cuts the smallest weights of the whole network. ERK gives each layer a share by its shape "
        "and cuts the smallest within it. LAMP scores a weight relative to the larger ones of its layer and cuts the "
        "lowest scores of the whole network. Random, the baseline, does so with scores that know nothing.",
        "2:4 keeps the larger 2 of every 4 consecutive input channels. The first convolution has one input channel, so "
        "2:4 leaves it dense; that is why it comes out just below 50 %.",
        f"Fine-tuning: {tuning_epochs} epochs at the same settings for every row, the dense network included; removed "
        "weights are set to zero again after every step.",
        "Batch normalization: before each measurement, also of the dense network, the running statistics are estimated "
        "anew from the training images, without labels. Otherwise the accuracy before fine-tuning would show outdated "
        "statistics rather than missing weights.",
        "Size: the state dict in safetensors format, and the same bytes compressed by zlib at level 9 as zip does.",
        f"Latency: one image, one thread, the fastest of many rounds of ten, in which the networks of seed {first} "
        "take turns.",
        f"Training, pruning, fine-tuning and timing took {seconds:.0f} s, one thread a network.",
    )
