"""What the demo runs: digits, a small residual network, ways to prune, training, and what is measured of each
network.
"""

import copy
import functools
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.allocation import erk, uniform
from secateur.checkpoints import sparsify
from secateur.criteria import lamp, random
from secateur.inference import Packing, pack
from secateur.patterns import NM, GroupedColumns
from secateur.pipeline import apply_, reestimate_batchnorm, sparsity_of
from secateur.report import Run, count_multiply_adds
from secateur.shrinking import shrink
from secateur.storage import save_compressed
from secateur.support import in_turns, seconds_of
from secateur.targets import find_targets
from secateur.training import Pruner

if TYPE_CHECKING:
    from rich.progress import Progress


# ---- The handwritten digits that the demo reads.
#
# Law: nothing is downloaded, and the split is always the same.


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


# ---- The small residual network that reads the digits.


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

    >>> import torch
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


# ---- The ways to prune that the demo compares, each in the library's own words.


@dataclass(frozen=True)
class Method:
    """A way to prune: its ``name`` on the command line, its ``label`` in tables, a ``line`` of description.

    ``choices`` is what it says to `sparsify` beside the sparsity; None if a `Pruner` prunes while training goes on.
    """

    name: str
    label: str
    line: str
    choices: Mapping[str, Any] | None = field(default_factory=dict)


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
    Method("gradual", "gradual", "LAMP more and more while fine-tuning: the Pruner's default", None),
)

METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}


def choose_methods(names: Sequence[str] | None = None) -> tuple[Method, ...]:
    """The methods of these names, commas allowed within one, or all: each once, in the order of `METHODS`.

    ``ValueError`` for an unknown name lists the known ones.

    >>> [method.label for method in choose_methods(["random,lamp"])]
    ['LAMP', 'random']
    """
    asked = [part.strip().casefold() for name in names or () for part in name.split(",") if part.strip()]
    if unknown := [name for name in asked if name not in METHODS]:
        raise ValueError(f"there is no method {unknown[0]!r}; there are {', '.join(METHODS)}.")
    return tuple(method for name, method in METHODS.items() if name in (asked or METHODS))


# ---- Training the network, and how many images it then reads right.
#
# Law: all randomness comes from the seed; the global generator is not touched.

EPOCHS = 30  # dense
TUNING_EPOCHS = 10  # the same for every method
RATE = 0.2  # at the top of the cycle, in both
BATCH = 128
WEIGHT_DECAY = 5e-4


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


# Networks on their way to the table: methods × sparsities × seeds, sanity checks, and networks without some channels.
#
# Law: every method gets the same networks and the same budget, and the same seeds give the same accuracies on the
# same machine, whatever its number of cores.

SEEDS = (0, 1, 2)
SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98)
LESS_WORK = (0.5, 0.75)  # the fractions of the multiply-adds that leave with whole channels
COLUMNS, COLUMN_SPARSITY = GroupedColumns(16), 0.8  # a pattern that layers can skip in any runtime
# What is added to a seed: masks drawn from the stream that drew the weights would keep the largest of them
WEIGHTS, ORDER, FRESH_WEIGHTS, SCORES, CHECKS = 0, 1000, 2000, 3000, 4000


@dataclass(frozen=True)
class Plan:
    """What is run: each method at each sparsity for each seed, and for how many epochs, dense and of fine-tuning."""

    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    sparsities: tuple[float, ...]
    epochs: int
    tuning_epochs: int


@dataclass
class Trial:
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
    before: float | None = None
    after: float = math.nan


def _in_parallel(jobs: Sequence[Callable[[], None]]) -> None:
    """Run the jobs on all cores, each on one thread, so that the results are the same however many cores there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))  # the setting is a thread's own
    try:
        for done in [pool.submit(job) for job in jobs]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def untrained_networks(seeds: Sequence[int], offset: int = WEIGHTS) -> dict[int, nn.Module]:
    """``{seed: network}`` with the first weights of each seed, or of others that lie ``offset`` further."""
    models: dict[int, nn.Module] = {}
    for seed in seeds:
        torch.manual_seed(offset + seed)
        models[seed] = DigitsNet()
    return models


def train_dense(
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


def pruned_trials(plan: Plan, dense: Mapping[int, nn.Module], data: Digits, progress: "Progress") -> list[Trial]:
    """All networks of the table, pruned where that comes before training."""
    wanted: list[tuple[Method | None, float | None]] = [(None, 0.0)]
    for one in plan.methods:
        fixed = "pattern" in (one.choices or {})
        wanted += [(one, sparsity) for sparsity in ([None] if fixed else plan.sparsities)]
    bar = progress.add_task("Pruning, networks", total=len(wanted) * len(dense))
    trials = []
    for method, sparsity in wanted:
        for seed in dense:
            model = copy.deepcopy(dense[seed])
            originals = {name: weight.detach().clone() for name, weight in find_targets(model).items()}
            masks: Mapping[str, Tensor] = {}
            if method is not None and method.choices is not None:
                torch.manual_seed(SCORES + seed)  # random scores come from the global generator
                masks = sparsify(model, sparsity, **method.choices)
            label = method.label if method else "dense"
            trial = Trial(label, sparsity, seed, model, masks, plan.tuning_epochs, ORDER + seed, method, originals)
            if method is None or method.choices is not None:
                trial.before = _measured(model, data)
            trials.append(trial)
            progress.advance(bar)
    return trials


def spoilt_trials(
    trials: Sequence[Trial], dense: Mapping[int, nn.Module], sparsities: Sequence[float]
) -> dict[str, list[Trial]]:
    """Networks that share all but one thing with a method's: of LAMP at 95 %, where these are among what was asked."""
    sound = [trial for trial in trials if trial.method and trial.masks and trial.asked is not None]
    if not sound:
        return {}
    label = "LAMP" if any(trial.label == "LAMP" for trial in sound) else sound[0].label
    asked = 0.95 if 0.95 in sparsities else max(sparsities)
    checks: dict[str, list[Trial]] = {"shuffled": [], "random": [], "re-initialized": []}
    fresh = untrained_networks(list(dense), offset=FRESH_WEIGHTS)
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
            checks[check].append(Trial(label, asked, trial.seed, model, masks, trial.epochs, trial.order))
    return checks


def shrunken_trials(dense: Mapping[int, nn.Module], data: Digits, epochs: int, progress: "Progress") -> list[Trial]:
    """Networks that lost whole channels, for each fraction of the multiply-adds that leaves."""
    bar = progress.add_task("Shrinking, networks", total=len(LESS_WORK) * len(dense))
    trials = []
    for fraction in LESS_WORK:
        for seed in dense:
            model = copy.deepcopy(dense[seed])
            originals = {name: weight.detach().clone() for name, weight in find_targets(model).items()}
            shrink(model, data.train_images[:2], fraction, target="macs")
            trial = Trial("channels (shrink)", fraction, seed, model, {}, epochs, ORDER + seed, originals=originals)
            trial.before = _measured(model, data)
            trials.append(trial)
            progress.advance(bar)
    return trials


def grouped_trials(dense: Mapping[int, nn.Module], epochs: int) -> list[Trial]:
    """Networks in which groups of outputs share their zeros; stem and head are too small to give any."""
    trials = []
    for seed, whole in dense.items():
        model = copy.deepcopy(whole)
        originals = {name: weight.detach().clone() for name, weight in find_targets(model).items()}
        masks = sparsify(model, COLUMN_SPARSITY, pattern=COLUMNS, allocate=uniform, exclude=["stem.*", "head.*"])
        label = f"columns:{COLUMNS.outputs}"
        trials.append(Trial(label, COLUMN_SPARSITY, seed, model, masks, epochs, ORDER + seed, originals=originals))
    return trials


def those_beside(trials: Sequence[Trial], shrunken: Sequence[Trial]) -> list[Trial]:
    """The dense networks, of one method those with about as many multiply-adds left, then the shrunken ones."""
    masked = [trial for trial in trials if trial.method]
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


def _work(trial: Trial) -> int:
    return count_multiply_adds(trial.model, torch.zeros(1, 1, 8, 8))


def _shuffled(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Each row in an order of its own."""
    return rows.gather(1, torch.rand(rows.shape, generator=generator).argsort(dim=1))


def train_all(trials: Sequence[Trial], data: Digits, progress: "Progress") -> None:
    """Fine-tune, or train, every network, and measure it."""
    bar = progress.add_task(f"Fine-tuning {len(trials)} networks, epochs", total=sum(trial.epochs for trial in trials))

    def job(trial: Trial) -> Callable[[], None]:
        return lambda: _train_one(trial, data, lambda: progress.advance(bar))

    longest_first = sorted(trials, key=lambda trial: -trial.epochs)  # so that the cores end together
    _in_parallel([job(trial) for trial in longest_first])
    for trial in trials:  # in turn: re-estimation puts back random states, which threads share
        trial.after = _measured(trial.model, data)


def _train_one(trial: Trial, data: Digits, after_epoch: Callable[[], object]) -> None:
    settings: dict[str, Any] = {"epochs": trial.epochs, "rate": RATE, "seed": trial.order, "after_epoch": after_epoch}
    if trial.method is None or trial.method.choices is not None:
        train(trial.model, data, masks=trial.masks or None, **settings)
        return
    sparsity = trial.asked
    assert sparsity is not None
    pruners: list[Pruner] = []

    def begin(optimizer: torch.optim.Optimizer, steps: int) -> None:
        pruner = Pruner(trial.model, optimizer, sparsity, total_steps=steps, verbose=False)  # the default recipe
        pruners.append(pruner)
        trial.masks = pruner.masks

    train(trial.model, data, begin=begin, **settings)
    trial.masks = pruners[0].finish()


def _measured(model: nn.Module, data: Digits) -> float:
    """The accuracy on the test images, with batch normalization re-estimated from the training images."""
    reestimate_batchnorm(model, [data.train_images])
    return accuracy(model, data.test_images, data.test_labels)


# ---- What is measured of a trained network: sizes, work, and milliseconds beside the others.

ROUNDS = 100  # of timing


@dataclass(frozen=True)
class Packed:
    """A masked network whose layers skip zeros where that is faster: with one image, and with a batch."""

    trial: Trial
    one: nn.Module
    many: nn.Module
    packings: tuple[Packing, Packing]  # for one image, and for a batch


def packed_of(trial: Trial, data: Digits) -> Packed:
    one, many = (copy.deepcopy(trial.model).eval() for _ in range(2))
    packings = pack(one, data.train_images[:1]), pack(many, data.train_images[:BATCH])
    return Packed(trial, one, many, packings)


@torch.inference_mode()
def milliseconds(models: Sequence[nn.Module], progress: "Progress", *, images: int = 1, calls: int = 3) -> list[float]:
    """Milliseconds of so many images through each model on one thread: the fastest of many rounds, in each of which
    every model has its turn, so that a slow moment of the machine touches all of them and is then left out."""
    bar = progress.add_task(f"Timing {f'{images} images' if images > 1 else 'one image'}, rounds", total=ROUNDS)
    image = torch.zeros(images, 1, 8, 8)

    def turn(model: nn.Module) -> float:
        model.eval()
        model(image)  # what the turn before has left in the caches is not its own
        taken = seconds_of(functools.partial(model, image), repeats=calls)
        if model is models[-1]:
            progress.advance(bar)
        return taken

    turns = {number: functools.partial(turn, model) for number, model in enumerate(models)}
    return [1000 * min(times) for times in in_turns(turns, ROUNDS, warm_up=0).values()]


def run_of(trial: Trial, latency_ms: float | None = None) -> Run:
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
        overall=zeros / parameters_of(trial.model) if trial.masks else 0.0,
        multiply_adds=count_multiply_adds(trial.model, torch.zeros(1, 1, 8, 8)),
    )


def file_size(model: nn.Module) -> int:
    from safetensors.torch import save

    return len(save(model.state_dict()))


def state_bytes(model: nn.Module) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}.values())


def compressed_size(model: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return save_compressed(model, Path(folder, "model.safetensors")).stored


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
