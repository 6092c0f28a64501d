"""The whole story in minutes: train a small residual network on handwritten digits; prune, shrink and pack it; report.

Law: every method gets the same networks, the same budget (those that start from scratch: the same total) and the same
measurement, and the same seeds give the same accuracies on the same machine, whatever its number of cores.
"""

import copy
import math
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.allocation import erk, uniform
from secateur.criteria import grasp, lamp, magnitude, random, ria, snip, synflow, taylor, wanda
from secateur.evidence import needs
from secateur.inference import Packing, pack
from secateur.patterns import NM, GroupedColumns
from secateur.pipeline import apply_, reestimate_batchnorm, sparsify, sparsity_of
from secateur.regrowth import rigl
from secateur.report import (
    Check,
    History,
    Network,
    Results,
    Row,
    Run,
    count_multiply_adds,
    describe,
    missing_baselines,
    print_summary,
    save_results,
    summarize,
    write_report,
)
from secateur.schedules import constant
from secateur.shrinking import shrink
from secateur.storage import save_compressed
from secateur.targets import find_targets
from secateur.training import Pruner

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = [
    "DEFAULT_METHODS",
    "Digits",
    "DigitsNet",
    "METHODS",
    "Method",
    "TRAINED_METHODS",
    "accuracy",
    "choose_methods",
    "load_digits",
    "run_demo",
    "train",
]

SEEDS = (0, 1, 2)
SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98)
LESS_WORK = (0.5, 0.75)  # the fractions of the multiply-adds that leave with whole channels
COLUMNS, COLUMN_SPARSITY = GroupedColumns(16), 0.8  # a pattern that layers can skip in any runtime
EPOCHS = 30  # dense
TUNING_EPOCHS = 10  # the same for every method
RATE = 0.2  # at the top of the cycle, in both
BATCH = 128
ROUNDS = 100  # of timing
WEIGHT_DECAY = 5e-4
# What is added to a seed: masks drawn from the stream that drew the weights would keep the largest of them
WEIGHTS, ORDER, FRESH_WEIGHTS, SCORES, CHECKS = 0, 1000, 2000, 3000, 4000
EVIDENCE_BATCH = 22  # mean squared gradients of large batches hide what single images say


@dataclass(frozen=True)
class Method:
    """A way to prune: its ``name`` on the command line, its ``label`` in tables, a ``line`` of description.

    ``choices`` is what it says to `sparsify` beside the sparsity; None if nothing is pruned before training goes on.
    ``pruner`` makes the `Pruner` of ``(model, optimizer, sparsity, steps, masks)`` that follows that training.
    """

    name: str
    label: str
    line: str
    choices: Mapping[str, Any] | None = field(default_factory=dict)
    from_scratch: bool = False
    pruner: Callable[[nn.Module, torch.optim.Optimizer, float, int, Mapping[str, Tensor]], Pruner] | None = None


def _gradual(
    model: nn.Module, optimizer: torch.optim.Optimizer, sparsity: float, steps: int, _: Mapping[str, Tensor]
) -> Pruner:
    """The library's default recipe."""
    return Pruner(model, optimizer, sparsity, total_steps=steps, verbose=False)


def _rigl(
    model: nn.Module, optimizer: torch.optim.Optimizer, sparsity: float, steps: int, masks: Mapping[str, Tensor]
) -> Pruner:
    return Pruner(
        model,
        optimizer,
        constant(sparsity),
        criterion=magnitude,
        allocate=erk,
        regrow=rigl(),
        every=16,  # two epochs: what has just grown needs some steps before it is compared with the rest
        within=masks,
        total_steps=steps,
        verbose=False,
    )


_ALL = (
    Method("magnitude", "global magnitude", "the smallest |w| of the whole network go; a baseline"),
    Method("erk", "ERK", "each layer has a share by its shape, the smallest |w| within it go", {"allocate": erk}),
    Method("lamp", "LAMP", "|w| relative to the larger ones of its layer, over the whole network", {"criterion": lamp}),
    Method("random", "random", "any weights of the whole network go; a baseline", {"criterion": random}),
    # 2:4 takes four consecutive inputs, and the stem has one input channel only.
    Method(
        "2:4",
        "2:4",
        "2 of every 4 consecutive inputs stay; 50 % and nothing else",
        {"pattern": NM(2, 4), "exclude": "stem.weight"},
    ),
    Method(
        "wanda",
        "Wanda",
        "|w| times the norm of its input; ERK's share of each layer",
        {"criterion": wanda, "allocate": erk},
    ),
    Method(
        "ria",
        "RIA",
        "|w| relative to its row and column, times the input's norm; ERK's shares",
        {"criterion": ria, "allocate": erk},
    ),
    Method("taylor", "Taylor", "w² times the mean squared gradient, over the whole network", {"criterion": taylor}),
    Method("snip", "SNIP", "|w · gradient| before any training, which is then longer", {"criterion": snip}, True),
    Method(
        "grasp", "GraSP", "w · Hessian · gradient before any training, which is then longer", {"criterion": grasp}, True
    ),
    Method(
        "synflow",
        "SynFlow",
        "the flow through each weight before any training, in 100 rounds; no data",
        {"criterion": synflow, "rounds": 100},
        True,
    ),
    Method("gradual", "gradual", "LAMP more and more while fine-tuning: the Pruner's default", None, pruner=_gradual),
    Method(
        "rigl",
        "RigL",
        "sparse from the first step; the smallest go, the largest gradients return",
        {"criterion": random, "allocate": erk},
        True,
        _rigl,
    ),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
DEFAULT_METHODS = ("magnitude", "erk", "lamp", "random", "2:4", "gradual")
TRAINED_METHODS = ("gradual", "rigl")  # what --train adds


def choose_methods(names: Sequence[str] | None = None, *, training: bool = False) -> tuple[Method, ...]:
    """The methods of these names, commas allowed within one, or the default ones; ``training`` adds the trained ones.

    Each once, in the order of `METHODS`. ``ValueError`` for an unknown name lists the known ones.

    >>> [method.label for method in choose_methods(["random,lamp"], training=True)]
    ['LAMP', 'random', 'gradual', 'RigL']
    """
    asked = [part.strip().casefold() for name in names or () for part in name.split(",") if part.strip()]
    if unknown := [name for name in asked if name not in METHODS]:
        raise ValueError(f"there is no method {unknown[0]!r}; there are {', '.join(METHODS)}.")
    chosen = {*(asked or DEFAULT_METHODS), *(TRAINED_METHODS if training else ())}
    return tuple(method for name, method in METHODS.items() if name in chosen)


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
    begin: Callable[[torch.optim.Optimizer, int], object] | None = None,
    after_step: Callable[[], object] = lambda: None,
    after_epoch: Callable[[], object] = lambda: None,
) -> None:
    """Train in place: SGD with Nesterov momentum, one cycle up to ``rate``, images shifted by up to one pixel.

    With ``masks`` ({parameter name: bool, True = kept}) what they removed is zero again after every step. All
    randomness comes from ``seed``; the global generator is not touched. ``begin`` is called with the optimizer and the
    number of steps before the first of them, which is the place for a `Pruner`.
    """
    generator = torch.Generator().manual_seed(seed)
    steps = len(data.train_images) // BATCH  # a last batch of few images would disturb the normalization
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=WEIGHT_DECAY, nesterov=True)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=epochs * steps, pct_start=0.2)
    if begin is not None:
        begin(optimizer, epochs * steps)
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
            after_step()
        after_epoch()


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
    """One network on its way to the table: pruned, or about to be, and then trained for some epochs."""

    label: str
    asked: float | None  # None: the pattern says it
    seed: int
    model: nn.Module
    masks: Mapping[str, Tensor]
    epochs: int
    order: int  # seeds the order of the images
    method: Method | None = None  # None: the dense network, or a sanity check
    originals: Mapping[str, Tensor] = field(default_factory=dict)  # the weights before any was removed
    history: list[tuple[int, float, float]] = field(default_factory=list)
    before: float | None = None
    after: float = math.nan


def run_demo(
    out: Path | None = None,
    *,
    methods: Sequence[str] | None = None,
    training: bool = False,
    seeds: Sequence[int] = SEEDS,
    sparsities: Sequence[float] = SPARSITIES,
    epochs: int = EPOCHS,
    tuning_epochs: int = TUNING_EPOCHS,
) -> Path:
    """Train, prune, fine-tune, measure; print the table; write ``report.html`` and ``results.json``; return the page.

    Args:
        out: the folder for the two files, made if missing; ``secateur-demo`` by default. Files of these names in it are
            replaced once the new ones are complete.
        methods: names among `METHODS`; the default ones if None.
        training: whether to add the methods that prune while training.
        seeds: one dense network is trained for each.
        sparsities: fractions of the weights that each method removes; 2:4 has its own.
        epochs: of dense training.
        tuning_epochs: of fine-tuning, the same for all methods and for the dense network. What starts from scratch is
            trained for ``epochs + tuning_epochs``.

    Raises:
        ValueError: a method is unknown.
        ImportError: scikit-learn, matplotlib or jinja2 is missing; the message says what to install.
        NotADirectoryError: ``out`` is a file.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    chosen = choose_methods(methods, training=training)
    folder = Path("secateur-demo") if out is None else Path(out)
    _check_extras()  # everything that can be missing is asked for before a minute has gone
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; the demo needs a folder for its report: give another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    data = load_digits()
    started = time.perf_counter()
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Pruners in parallel threads fork the global generator, each over the others: it is put back when all are done
    with _one_thread(), torch.random.fork_rng(devices=[]), Progress(*columns, console=console) as progress:
        untrained = _untrained(seeds)
        dense = _train_dense(untrained, data, epochs, progress)
        trials = _prune(untrained, dense, chosen, data, sparsities, (epochs, tuning_epochs), progress)
        checks = _spoil(trials, dense, sparsities)
        shrunken = [*_group(dense, tuning_epochs), *_shrink(dense, data, tuning_epochs, progress)]
        _train_on([*trials, *(trial for check in checks.values() for trial in check), *shrunken], data, progress)
        beside = _beside(trials, shrunken)
        packed = [_pack(trial, data) for trial in beside if trial.masks and trial.seed == seeds[0]]
        first = [trial for trial in (*trials, *shrunken) if trial.seed == seeds[0]]
        times = _latencies([*(trial.model for trial in first), *(each.one for each in packed)], progress)
        latencies = dict(zip([*map(id, first), *map(id, packed)], times, strict=True))
        first = [trial for trial in beside if trial.seed == seeds[0]]
        models = [*(trial.model for trial in first), *(each.many for each in packed)]
        times = _latencies(models, progress, images=BATCH, calls=1)
        batches = dict(zip([*map(id, first), *map(id, packed)], times, strict=True))
    seconds = time.perf_counter() - started
    words = ["secateur demo", *(f"--method {name}" for name in methods or ()), *(["--train"] * training)]
    results = _results(trials, checks, latencies, data, seconds, (epochs, tuning_epochs), chosen)
    results = _with_shrunken(results, beside, packed, latencies, batches)
    results = replace(results, command=" ".join([*words, *(["--out DIR"] * (out is not None))]))
    save_results(results, folder / "results.json")
    page = write_report(results, folder / "report.html")
    print_summary(results)
    for paragraph in results.text:
        console.print(paragraph, highlight=False, markup=False)
    if missing := missing_baselines(summarize(results.runs)):
        console.print(
            f"Left out of this run: the {' and the '.join(missing)} baseline, against which to judge the rest."
        )
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
    bars = os.environ.get("SECATEUR_PROGRESS")
    torch.set_num_threads(1)
    os.environ["SECATEUR_PROGRESS"] = "0"  # the demo has bars of its own
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        del os.environ["SECATEUR_PROGRESS"]
        if bars is not None:
            os.environ["SECATEUR_PROGRESS"] = bars


def _in_parallel(jobs: Sequence[Callable[[], None]]) -> None:
    """Run the jobs on all cores, each on one thread, so that the results are the same however many cores there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))  # the setting is a thread's own
    try:
        for done in [pool.submit(job) for job in jobs]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _untrained(seeds: Sequence[int], offset: int = WEIGHTS) -> dict[int, nn.Module]:
    """``{seed: network}`` with the first weights of each seed, or of others that lie ``offset`` further."""
    models: dict[int, nn.Module] = {}
    for seed in seeds:
        torch.manual_seed(offset + seed)
        models[seed] = DigitsNet()
    return models


def _train_dense(
    untrained: Mapping[int, nn.Module], data: Digits, epochs: int, progress: "Progress"
) -> dict[int, nn.Module]:
    bar = progress.add_task(f"Training {len(untrained)} dense networks, epochs", total=len(untrained) * epochs)
    models = {seed: copy.deepcopy(model) for seed, model in untrained.items()}

    def job(seed: int) -> Callable[[], None]:
        return lambda: train(
            models[seed], data, epochs=epochs, rate=RATE, seed=seed, after_epoch=lambda: progress.advance(bar)
        )

    _in_parallel([job(seed) for seed in models])
    return models


def _prune(
    untrained: Mapping[int, nn.Module],
    dense: Mapping[int, nn.Module],
    methods: Sequence[Method],
    data: Digits,
    sparsities: Sequence[float],
    epochs: tuple[int, int],
    progress: "Progress",
) -> list[_Trial]:
    """All networks of the table, pruned where that comes before training; ``epochs`` are dense and tuning ones."""
    plan: list[tuple[Method | None, float | None]] = [(None, 0.0)]
    for one in methods:
        fixed = "pattern" in (one.choices or {})
        plan += [(one, sparsity) for sparsity in ([None] if fixed else sparsities)]
    bar = progress.add_task("Pruning, networks", total=len(plan) * len(dense))
    pieces = [torch.split(part, EVIDENCE_BATCH) for part in (data.train_images, data.train_labels)]
    batches = list(zip(*pieces, strict=True))
    trials = []
    for method, sparsity in plan:
        from_scratch = method is not None and method.from_scratch
        for seed in dense:
            model = copy.deepcopy(untrained[seed] if from_scratch else dense[seed])
            originals = {name: weight.detach().clone() for name, weight in find_targets(model).items()}
            masks: Mapping[str, Tensor] = {}
            if method is not None and method.choices is not None:
                torch.manual_seed(SCORES + seed)  # random scores come from the global generator
                evidence: dict[str, Any] = {}
                if needs(method.choices.get("criterion", magnitude)):
                    evidence = {"batches": batches, "loss": functional.cross_entropy, "reestimate": False}
                masks = sparsify(model, sparsity, **evidence, **method.choices)
            label = method.label if method else "dense"
            budget, order = (sum(epochs), seed) if from_scratch else (epochs[1], ORDER + seed)
            trial = _Trial(label, sparsity, seed, model, masks, budget, order, method, originals)
            if method is None or (method.choices is not None and not from_scratch):
                trial.before = _measured(model, data)
            trials.append(trial)
            progress.advance(bar)
    return trials


def _spoil(
    trials: Sequence[_Trial], dense: Mapping[int, nn.Module], sparsities: Sequence[float]
) -> dict[str, list[_Trial]]:
    """Networks that share all but one thing with a method's: of LAMP at 95 %, where these are among what was asked."""
    sound = [
        trial
        for trial in trials
        if trial.method and trial.masks and not trial.method.from_scratch and trial.asked is not None
    ]
    if not sound:
        return {}
    label = "LAMP" if any(trial.label == "LAMP" for trial in sound) else sound[0].label
    asked = 0.95 if 0.95 in sparsities else max(sparsities)
    checks: dict[str, list[_Trial]] = {"shuffled": [], "random": [], "re-initialized": []}
    fresh = _untrained(list(dense), offset=FRESH_WEIGHTS)
    for trial in sound:
        if (trial.label, trial.asked) != (label, asked):
            continue
        generator = torch.Generator().manual_seed(CHECKS + trial.seed)
        shuffled = {name: _shuffled(mask.flatten(1), generator) for name, mask in trial.masks.items()}
        drawn = {name: _shuffled(mask.reshape(1, -1), generator) for name, mask in trial.masks.items()}
        for check, masks, source in (
            ("shuffled", shuffled, dense),
            ("random", drawn, dense),
            ("re-initialized", trial.masks, fresh),
        ):
            model = copy.deepcopy(source[trial.seed])
            masks = {name: mask.reshape(trial.masks[name].shape) for name, mask in masks.items()}
            apply_(model, masks)
            checks[check].append(_Trial(label, asked, trial.seed, model, masks, trial.epochs, trial.order))
    return checks


def _shrink(dense: Mapping[int, nn.Module], data: Digits, epochs: int, progress: "Progress") -> list[_Trial]:
    """Networks that lost whole channels, for each fraction of the multiply-adds that leaves."""
    bar = progress.add_task("Shrinking, networks", total=len(LESS_WORK) * len(dense))
    trials = []
    for fraction in LESS_WORK:
        for seed in dense:
            model = copy.deepcopy(dense[seed])
            originals = {name: weight.detach().clone() for name, weight in find_targets(model).items()}
            shrink(model, data.train_images[:2], fraction, target="macs")
            trial = _Trial("channels (shrink)", fraction, seed, model, {}, epochs, ORDER + seed, originals=originals)
            trial.before = _measured(model, data)
            trials.append(trial)
            progress.advance(bar)
    return trials


def _group(dense: Mapping[int, nn.Module], epochs: int) -> list[_Trial]:
    """Networks in which groups of outputs share their zeros; stem and head are too small to give any."""
    trials = []
    for seed, whole in dense.items():
        model = copy.deepcopy(whole)
        originals = {name: weight.detach().clone() for name, weight in find_targets(model).items()}
        masks = sparsify(model, COLUMN_SPARSITY, pattern=COLUMNS, allocate=uniform, exclude=["stem.*", "head.*"])
        label = f"columns:{COLUMNS.outputs}"
        trials.append(_Trial(label, COLUMN_SPARSITY, seed, model, masks, epochs, ORDER + seed, originals=originals))
    return trials


@dataclass(frozen=True)
class _Packed:
    """A masked network whose layers skip zeros where that is faster: with one image, and with a batch."""

    trial: _Trial
    one: nn.Module
    many: nn.Module
    packing: Packing  # for a batch


def _pack(trial: _Trial, data: Digits) -> _Packed:
    one, many = (copy.deepcopy(trial.model).eval() for _ in range(2))
    pack(one, data.train_images[:1])
    return _Packed(trial, one, many, pack(many, data.train_images[:BATCH]))


def _beside(trials: Sequence[_Trial], shrunken: Sequence[_Trial]) -> list[_Trial]:
    """The dense networks, of one method those with about as many multiply-adds left, then the shrunken ones."""
    masked = [trial for trial in trials if trial.method and not trial.method.from_scratch]
    label = next(
        (trial.label for trial in reversed(masked) if trial.label == "gradual"), masked[0].label if masked else ""
    )
    near = set()
    for fraction in LESS_WORK:
        work = [trial for trial in masked if trial.label == label]
        if work:
            near.add(min(work, key=lambda trial: abs(1 - fraction - _work(trial) / _work(trials[0]))).asked)
    chosen = [trial for trial in masked if trial.label == label and trial.asked in near]
    return [*(trial for trial in trials if trial.method is None), *chosen, *shrunken]


def _work(trial: _Trial) -> int:
    return count_multiply_adds(trial.model, torch.zeros(1, 1, 8, 8))


def _shuffled(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Each row in an order of its own."""
    return rows.gather(1, torch.rand(rows.shape, generator=generator).argsort(dim=1))


def _train_on(trials: Sequence[_Trial], data: Digits, progress: "Progress") -> None:
    """Fine-tune, or train, every network, and measure it."""
    bar = progress.add_task(f"Fine-tuning {len(trials)} networks, epochs", total=sum(trial.epochs for trial in trials))

    def job(trial: _Trial) -> Callable[[], None]:
        return lambda: _train_one(trial, data, lambda: progress.advance(bar))

    longest_first = sorted(trials, key=lambda trial: -trial.epochs)  # so that the cores end together
    _in_parallel([job(trial) for trial in longest_first])
    for trial in trials:  # in turn: re-estimation puts back random states, which threads share
        trial.after = _measured(trial.model, data)


def _train_one(trial: _Trial, data: Digits, after_epoch: Callable[[], object]) -> None:
    settings: dict[str, Any] = {"epochs": trial.epochs, "rate": RATE, "seed": trial.order, "after_epoch": after_epoch}
    if trial.method is None or trial.method.pruner is None:
        train(trial.model, data, masks=trial.masks or None, **settings)
        return
    make, sparsity = trial.method.pruner, trial.asked
    assert sparsity is not None
    pruners: list[Pruner] = []

    def begin(optimizer: torch.optim.Optimizer, steps: int) -> None:
        pruner = make(trial.model, optimizer, sparsity, steps, trial.masks)
        pruners.append(pruner)
        trial.masks = pruner.masks
        trial.history.append((0, pruner.metrics()["sparsity"], 0.0))

    def after_step() -> None:
        [pruner] = pruners
        metrics, masks = pruner.metrics(), pruner.masks
        updated = any(not torch.equal(mask, trial.masks[name]) for name, mask in masks.items())
        trial.history.append((int(metrics["step"]), metrics["sparsity"], metrics["churn"] if updated else 0.0))
        trial.masks = masks

    train(trial.model, data, begin=begin, after_step=after_step, **settings)
    trial.masks = pruners[0].finish()


def _measured(model: nn.Module, data: Digits) -> float:
    """The accuracy on the test images, with batch normalization made anew from the training images."""
    reestimate_batchnorm(model, [data.train_images])
    return accuracy(model, data.test_images, data.test_labels)


@torch.inference_mode()
def _latencies(models: Sequence[nn.Module], progress: "Progress", *, images: int = 1, calls: int = 3) -> list[float]:
    """Milliseconds of so many images through each model on one thread: the fastest of many rounds, in each of which
    every model has its turn, so that a slow moment of the machine touches all of them and is then left out."""
    bar = progress.add_task(f"Timing {f'{images} images' if images > 1 else 'one image'}, rounds", total=ROUNDS)
    image = torch.zeros(images, 1, 8, 8)
    times: list[list[float]] = [[] for _ in models]
    for _ in range(ROUNDS):
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
    trials: Sequence[_Trial],
    checks: Mapping[str, Sequence[_Trial]],
    latencies: Mapping[int, float],
    data: Digits,
    seconds: float,
    epochs: tuple[int, int],
    methods: Sequence[Method],
) -> Results:
    seeds = list(dict.fromkeys(trial.seed for trial in trials))
    runs = [_run(trial, latencies.get(id(trial))) for trial in trials]
    sparsities = sorted({trial.asked for trial in trials if trial.asked})
    shown = 0.9 if 0.9 in sparsities or not sparsities else sparsities[len(sparsities) // 2]
    first = [trial for trial in trials if trial.seed == seeds[0] and trial.asked in (shown, None)]
    return Results(
        f"Pruning a network that reads digits ({_size(trials[0].model):,} parameters)",
        tuple(runs),
        tuple(_network(trial) for trial in first),
        text=_story(runs, shown),
        notes=_notes(data, seeds, epochs, methods, seconds, checked=bool(checks)),
        examples=len(data.test_images),
        histories=tuple(History(trial.label, *zip(*trial.history, strict=True)) for trial in first if trial.history),
        checks=_checks(trials, checks, epochs[1]),
    )


def _run(trial: _Trial, latency_ms: float | None = None) -> Run:
    from safetensors.torch import save

    file = save(trial.model.state_dict())
    zeros = sum(weight.numel() - int(weight.count_nonzero()) for weight in find_targets(trial.model).values())
    return Run(
        trial.label,
        sparsity_of(trial.model) if trial.masks else 0.0,
        trial.before,
        trial.after,
        trial.seed,
        bytes=len(file),
        zipped=len(zlib.compress(file, level=9)),
        latency_ms=latency_ms,
        overall=zeros / _size(trial.model) if trial.masks else 0.0,
        multiply_adds=count_multiply_adds(trial.model, torch.zeros(1, 1, 8, 8)),
    )


def _with_shrunken(
    results: Results,
    trials: Sequence[_Trial],
    packed: Sequence[_Packed],
    latencies: Mapping[int, float],
    batches: Mapping[int, float],
) -> Results:
    """The same results with the table of what is smaller and faster, and what it says in words."""
    dense, runs, skipping = trials[0], [], []
    known = {(each.trial.label, each.trial.asked): each for each in packed}
    for trial in trials:
        run = replace(
            _run(trial, latencies.get(id(trial))),
            zipped=None,
            batch_ms=batches.get(id(trial)),
            memory=_held(trial.model),
            compressed=_compressed(trial.model),
        )
        if trial.label.startswith("channels"):
            now, whole = find_targets(trial.model).values(), trial.originals.values()
            removed = 1 - sum(weight.numel() for weight in now) / sum(weight.numel() for weight in whole)
            run = replace(run, sparsity=removed, overall=1 - _size(trial.model) / _size(dense.model))
        elif trial.masks:
            run = replace(run, method=f"{run.method} (zeros)")
            each = known[trial.label, trial.asked]
            measured = (
                each if each.trial is trial else None
            )  # the other seeds' accuracy is that of their masked networks
            skipping.append(
                replace(
                    run,
                    method=f"{trial.label}, packed",
                    bytes=None if measured is None else _file(each.many),
                    memory=None if measured is None else _held(each.many),
                    latency_ms=latencies.get(id(measured)),
                    batch_ms=batches.get(id(measured)),
                )
            )
        runs.append(run)
    channels = [run for run in runs if run.method.startswith("channels")]
    runs = [*(run for run in runs if run not in channels), *skipping, *channels]
    rows = summarize(runs)
    first, last, skips = rows[0], rows[-1], [row for row in rows if row.method.endswith(", packed")][-1]
    assert first.multiply_adds is not None
    assert last.multiply_adds is not None
    assert None not in (first.batch_ms, last.batch_ms, skips.batch_ms)
    left = 100 * last.multiply_adds / first.multiply_adds
    said = (
        f"Channels that leave do. With whole channels taken out until {left:.0f} % of the multiplications were left, "
        f"and after the same fine-tuning, the network reads {last.after:.1f} % right; its file has {_kilo(last.bytes)} "
        f"(dense: {_kilo(first.bytes)}), and {BATCH} images take {last.batch_ms:.2f} ms "
        f"(dense: {first.batch_ms:.2f} ms).",
        f"Zeros can be skipped where a layer allows it. Of the network with {100 * skips.sparsity:.0f} % zeros in "
        f"columns, pack replaced {_count(packed[-1])}: 3×3 convolutions, nearly all of this network, stay dense, "
        f"because nothing that skips their zeros is faster; linear layers are another matter. {BATCH} images then take "
        f"{skips.batch_ms:.2f} ms, and its tensors {_kilo(skips.memory)} of memory (dense: {_kilo(first.memory)}). "
        f"Compressed, its file has {_kilo(skips.compressed)} (dense: {_kilo(first.bytes)}).",
    )
    return replace(results, shrunken=tuple(runs), text=(*results.text, *map(_tight, said)))


def _count(packed: _Packed) -> str:
    layers = packed.packing
    return f"{len(layers.packed)} of {len(layers.layers)} layers"


def _file(model: nn.Module) -> int:
    from safetensors.torch import save

    return len(save(model.state_dict()))


def _held(model: nn.Module) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}.values())


def _compressed(model: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return save_compressed(model, Path(folder, "model.safetensors")).stored


def _tight(paragraph: str) -> str:
    return re.sub(r"(?<=\d) (?=%|kB|ms)", "\N{NO-BREAK SPACE}", paragraph)


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _network(trial: _Trial) -> Network:
    whole = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in trial.originals.items()}
    title = f"{trial.label}, {100 * sparsity_of(trial.model):.1f} % removed, seed {trial.seed}"
    return describe(title, trial.originals, whole | dict(trial.masks), method=trial.label)


def _checks(trials: Sequence[_Trial], spoilt: Mapping[str, Sequence[_Trial]], epochs: int) -> tuple[Check, ...]:
    if not spoilt:
        return ()
    one = next(iter(spoilt.values()))[0]
    sound = [trial for trial in trials if (trial.label, trial.asked) == (one.label, one.asked)]
    told = {
        f"{one.label} as it is": f"Its own mask on the trained weights, fine-tuned for {epochs} epochs like all below.",
        "mask shuffled": "Each output channel keeps as many weights as before, at other places. What this loses is "
        "what knowing which weights is worth, beyond how many each channel needs.",
        "random mask, same layers": "Each layer keeps as many weights as before, any of them. What this loses against "
        "the row above is what the shares of channels are worth; what it keeps, the layers' densities alone explain.",
        "weights re-initialized": "Its own mask on a new, untrained network. What this loses is what the trained "
        f"weights carry; as much as {epochs} epochs allow, the mask alone explains the rest.",
    }
    groups = [sound, *spoilt.values()]
    return tuple(
        Check(name, tells, tuple(_run(trial) for trial in group))
        for (name, tells), group in zip(told.items(), groups, strict=True)
    )


def _story(runs: Sequence[Run], sparsity: float) -> tuple[str, ...]:
    """What the table says, in words; every figure is one of its cells."""
    rows = summarize(runs)
    dense = rows[0]
    there = [row for row in rows if abs(row.sparsity - sparsity) < 0.01] or rows[1:]
    best = max(there, key=lambda row: row.after or 0.0)
    slim = max(rows, key=lambda row: row.sparsity)
    barest = [row for row in rows if abs(row.sparsity - slim.sparsity) < 0.01]
    hardest = max(barest, key=lambda row: row.after or 0.0)
    at_random = [row for row in there if row.method == "random"]
    story = [
        f"Dense, the network reads {dense.before:.1f} % of the test images right. With {100 * best.sparsity:.0f} % of "
        f"its weights removed it still reads {best.after:.1f} % right (the best row: {best.method})"
        + "".join(f"; with as many removed at random, {row.after:.1f} %" for row in at_random)
        + "."
        + f" With {100 * slim.sparsity:.0f} % removed the best row is {hardest.method}, at {hardest.after:.1f} %."
        * (len(barest) > 1 and slim not in there),
        f"Zeros alone make a network neither smaller nor faster. With {100 * slim.sparsity:.0f} % of the weights zero "
        f"the saved file has {_kilo(slim.bytes)} (dense: {_kilo(dense.bytes)}) and one image takes "
        f"{slim.latency_ms:.2f} ms (dense: {dense.latency_ms:.2f} ms), although only 1 in {_fewer(dense, slim)} "
        f"multiplications is left to do. What shrinks is the zipped file, from {_kilo(dense.zipped)} to "
        f"{_kilo(slim.zipped)}.",
    ]
    return tuple(map(_tight, story))


def _fewer(dense: Row, slim: Row) -> str:
    assert dense.multiply_adds
    assert slim.multiply_adds
    return f"{dense.multiply_adds / slim.multiply_adds:.0f}"


def _kilo(size: float | None) -> str:
    return "–" if size is None else f"{size / 1e3:.0f} kB"


def _notes(
    data: Digits,
    seeds: Sequence[int],
    epochs: tuple[int, int],
    methods: Sequence[Method],
    seconds: float,
    *,
    checked: bool,
) -> tuple[str, ...]:
    names = {method.name for method in methods}
    scratch = [method.label for method in methods if method.from_scratch]
    how = {
        "magnitude": "Global magnitude cuts the smallest weights of the whole network.",
        "erk": "ERK gives each layer a share by its shape and cuts the smallest within it (arXiv:1911.11134).",
        "lamp": "LAMP scores a weight relative to the larger ones of its layer and cuts the lowest scores of the whole "
        "network (arXiv:2010.07611).",
        "random": "Random, the baseline, does so with scores that know nothing.",
        "2:4": "2:4 keeps the larger 2 of every 4 consecutive input channels. The first convolution has one input "
        "channel, so 2:4 leaves it dense; that is why it comes out just below 50 %.",
        "wanda": "Wanda multiplies |w| by the norm of its input (arXiv:2306.11695), RIA a weight's share of its row "
        "and column by the root of that norm (ICLR 2024). Published for language models with the same share of every "
        "layer, which would empty this network's smallest layers; here they have ERK's shares.",
        "taylor": f"Taylor scores w² times the mean squared gradient (arXiv:1906.10771), over batches of "
        f"{EVIDENCE_BATCH} training images.",
        "snip": "SNIP (arXiv:1810.02340), GraSP (arXiv:2002.07376) and SynFlow (arXiv:2006.05467) prune the network "
        "with the first weights of the seed, before any training; SynFlow in 100 rounds, without data.",
        "gradual": "Gradual is the Pruner's default recipe: LAMP scores, from 0 to the target along a cubic over the "
        f"first 60 % of the {epochs[1]} epochs of fine-tuning (arXiv:1710.01878). It prunes while it trains, so there "
        "is no accuracy before fine-tuning.",
        "rigl": "RigL starts from a random mask with ERK's shares on the first weights of the seed; every two epochs "
        "the smallest weights go and as many with the largest gradients return (arXiv:1911.11134).",
    }
    for name, kin in (("wanda", {"ria"}), ("snip", {"grasp", "synflow"})):
        names |= {name} if names & kin else set()
    return (
        f"Data: scikit-learn's handwritten digits, 8×8 pixels; {len(data.train_images)} images to train, "
        f"{len(data.test_images)} to test, split by class, always in the same way. The training settings were chosen "
        "while looking at these test images, so take accuracies as a comparison of the rows, which share them.",
        f"Dense training: {epochs[0]} epochs for each of {len(seeds)} seeds; a seed sets the first weights, the order "
        "of images and their shifts of up to one pixel. "
        + ("Every other method prunes" if scratch else "Every method prunes")
        + " the same dense networks.",
        *(text for name, text in how.items() if name in names),
        f"Fine-tuning: {epochs[1]} epochs at the same settings, also for the dense network; removed weights are set to "
        "zero again after every step.",
        *(
            [
                f"Budgets differ: {', '.join(scratch)} never had a dense network to start from and trained for "
                f"{sum(epochs)} epochs in one cycle, as many as dense training and fine-tuning together. The other "
                f"rows had {epochs[0]} of theirs dense."
            ]
            * bool(scratch)
        ),
        "Sparsity: the fraction of zeros after training in the weights of all convolutions and of the linear layer. "
        "“Of all parameters” counts biases and normalizations too, which are never pruned; “times fewer” is what the "
        "literature calls the compression ratio.",
        "± is the sample standard deviation over seeds: what the luck of training does. The 95 % interval is Wilson's, "
        f"of the mean over seeds for {len(data.test_images)} images: what the luck of the test set does. Seeds share "
        "the test images, so more of them do not narrow it.",
        "Batch normalization: before each measurement, also of the dense network, the running statistics are estimated "
        "anew from the training images, without labels. Otherwise the accuracy before fine-tuning would show outdated "
        "statistics rather than missing weights.",
        "Size: the state dict in safetensors format, and the same bytes compressed by zlib at level 9 as zip does.",
        "Multiply-adds: of one image; each weight that is not zero, of the convolutions and the linear layer, times "
        "the positions of the output (padding counts). “Times fewer” is the speed-up in theory, “times faster” the "
        "measured one: dense kernels multiply by zeros too.",
        f"Latency: one image, one thread, the fastest of a hundred rounds of three, in which the networks of seed "
        f"{seeds[0]} take turns; on a busy machine still not to be read to the last digit. A batch is {BATCH} images.",
        "Channels that left: shrink finds which slices of all tensors leave together, ranks the channels of a group by "
        "the sum of |w| over everything that would leave with them, and takes the same share of each group until the "
        f"multiply-adds are down by {' and '.join(f'{100 * fraction:.0f} %' for fraction in LESS_WORK)}. The removed "
        "share is that of the dense network's weights; the masked networks beside have about as many multiply-adds "
        "left in theory.",
        f"Zeros that are skipped: of the masked networks beside, and of one whose groups of {COLUMNS.outputs} outputs "
        f"share which {100 * (1 - COLUMN_SPARSITY):.0f} % of their inputs they read (the mean |w| decides; stem and "
        "head stay whole), pack times each layer that could skip its zeros against the dense ones, for one image and "
        "for a batch, and replaces it where at least 1.1 times faster. Their outputs, and so their accuracy, are the "
        "masked networks'. Memory is all tensors of the network, packed for a batch; the compressed file is "
        "save_compressed's, without zstd, and of the masked network.",
        *(
            [
                "The sanity checks follow arXiv:2009.08576 and 2009.11094, which found that methods that prune before "
                "training hardly lose by them. Both shuffle within layers, as in the third row."
            ]
            * checked
        ),
        "What is shown is what ShrinkBench asks of a comparison (arXiv:2003.03033), but for one: this is one small "
        "network on one small dataset, and says nothing about others.",
        f"Training, pruning, fine-tuning and timing took {seconds:.0f} s, one thread a network.",
    )
