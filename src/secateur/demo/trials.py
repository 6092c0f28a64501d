"""What the demo runs: digits, a small residual network, ways to prune, training, and what is measured of each
network.
"""

import copy
import functools
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.allocation import erk
from secateur.criteria import lamp, random
from secateur.inference import Packing, pack
from secateur.models import sparsify
from secateur.patterns import NM
from secateur.pipeline import apply_, reestimate_batchnorm
from secateur.report import Run, count_multiply_adds
from secateur.shrinking import shrink
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


# Networks on their way to the table: methods × sparsities × seeds, and networks without some channels.
#
# Law: every method gets the same networks and the same budget, and the same seeds give the same accuracies on the
# same machine, whatever its number of cores.

SEEDS = (0, 1, 2)
SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98)
LESS_WORK = (0.5, 0.75)  # the fractions of the multiply-adds that leave with whole channels
# What is added to a seed: masks drawn from the stream that drew the weights would keep the largest of them
ORDER, SCORES = 1000, 3000


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
    method: Method | None = None  # None: the dense network, or one without some channels
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


def untrained_networks(seeds: Sequence[int]) -> dict[int, nn.Module]:
    """``{seed: network}`` with the first weights of each seed."""
    models: dict[int, nn.Module] = {}
    for seed in seeds:
        torch.manual_seed(seed)
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
            masks: Mapping[str, Tensor] = {}
            if method is not None and method.choices is not None:
                torch.manual_seed(SCORES + seed)  # random scores come from the global generator
                masks = sparsify(model, sparsity, **method.choices)
            label = method.label if method else "dense"
            trial = Trial(label, sparsity, seed, model, masks, plan.tuning_epochs, ORDER + seed, method)
            if method is None or method.choices is not None:
                trial.before = _measured(model, data)
            trials.append(trial)
            progress.advance(bar)
    return trials


def shrunken_trials(dense: Mapping[int, nn.Module], data: Digits, epochs: int, progress: "Progress") -> list[Trial]:
    """Networks that lost whole channels, for each fraction of the multiply-adds that leaves."""
    bar = progress.add_task("Shrinking, networks", total=len(LESS_WORK) * len(dense))
    trials = []
    for fraction in LESS_WORK:
        for seed in dense:
            model = copy.deepcopy(dense[seed])
            shrink(model, data.train_images[:2], fraction, target="macs")
            trial = Trial("channels (shrink)", fraction, seed, model, {}, epochs, ORDER + seed)
            trial.before = _measured(model, data)
            trials.append(trial)
            progress.advance(bar)
    return trials


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


@torch.inference_mode()
def milliseconds(models: Sequence[nn.Module], progress: "Progress") -> list[float]:
    """Milliseconds of an image through each model on one thread: the fastest of many rounds, in each of which every
    model has its turn, so that a slow moment of the machine touches all of them and is then left out."""
    bar = progress.add_task("Timing one image, rounds", total=ROUNDS)
    image = torch.zeros(1, 1, 8, 8)

    def turn(model: nn.Module) -> float:
        model.eval()
        model(image)  # what the turn before has left in the caches is not its own
        taken = seconds_of(functools.partial(model, image), repeats=3)
        if model is models[-1]:
            progress.advance(bar)
        return taken

    turns = {number: functools.partial(turn, model) for number, model in enumerate(models)}
    return [1000 * min(times) for times in in_turns(turns, ROUNDS, warm_up=0).values()]


def packings_of(trials: Sequence[Trial], data: Digits) -> tuple[Packing, Packing]:
    """What `pack` measures of copies of the network with the most zeros: for one image, and for a batch."""
    barest = max((trial for trial in trials if trial.masks), key=lambda trial: trial.asked or 0.0)
    one, many = (pack(copy.deepcopy(barest.model).eval(), data.train_images[:count]) for count in (1, BATCH))
    return one, many


def run_of(trial: Trial, dense: nn.Module, latency_ms: float | None = None) -> Run:
    """What was measured of a network, beside the dense one."""
    from safetensors.torch import save

    file = save(trial.model.state_dict())
    whole = sum(weight.numel() for weight in find_targets(dense).values())
    weights = find_targets(trial.model).values()
    left = sum(int(weight.count_nonzero()) for weight in weights)
    zeros = sum(weight.numel() for weight in weights) - left
    is_dense = trial.asked == 0
    return Run(
        trial.label,
        0.0 if is_dense else 1 - left / whole,
        trial.before,
        trial.after,
        trial.seed,
        bytes=len(file),
        zipped=len(zlib.compress(file, level=9)),
        latency_ms=latency_ms,
        overall=0.0 if is_dense else 1 - (parameters_of(trial.model) - zeros) / parameters_of(dense),
        multiply_adds=count_multiply_adds(trial.model, torch.zeros(1, 1, 8, 8)),
    )


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
