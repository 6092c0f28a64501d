"""What all methods share: batches and their order, optimizer, learning rates, number of steps, and the score."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.support import corpora
from benchmarks.training.networks import GPT, MLP, ResNet8
from secateur.demo import load_digits

State = dict[str, Tensor]


@dataclass
class Recipe:
    """Batches, optimizer, learning rates and loss of one training."""

    epochs: int
    steps_per_epoch: int
    seed: int
    rate: float
    example: Tensor
    draw: Callable[[torch.Generator], Iterator[tuple[Tensor, Tensor]]]  # the batches of an epoch
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def epochs_of_batches(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.epochs):
            yield list(self.draw(generator))

    def rates(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.rate, total_steps=self.total_steps, pct_start=0.2, cycle_momentum=False
        )

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def fit(
        self,
        model: nn.Module,
        *,
        begin: Callable[[torch.optim.Optimizer], object] = lambda _optimizer: None,
        before_epoch: Callable[[int], object] = lambda _epoch: None,
    ) -> None:
        """The plain loop; ``begin`` is handed the optimizer before the first step."""
        optimizer = self.optimizer(model.parameters())
        rates = self.rates(optimizer)
        begin(optimizer)
        model.train()
        for epoch, batches in enumerate(self.epochs_of_batches()):
            before_epoch(epoch)
            for x, y in batches:
                loss = self.loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                rates.step()


class Digits:
    """scikit-learn's digits: 1078 images to train, 719 to test; the score is the percentage read right."""

    dense_epochs, tuning_epochs = 40, 20
    sparsities = (0.8, 0.9, 0.95, 0.98)
    sparsities_from_scratch = (0.95, 0.98)  # each takes three times as long
    batch = 64

    def __init__(self, network: Callable[[], nn.Module]) -> None:
        self.network = network
        self.data = load_digits()

    def recipe(self, epochs: int, seed: int) -> Recipe:
        images, labels = self.data.train_images, self.data.train_labels
        steps = len(images) // self.batch

        def draw(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
            order = torch.randperm(len(images), generator=generator)
            for chosen in order[: steps * self.batch].reshape(steps, self.batch):
                yield images[chosen], labels[chosen]

        sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        return Recipe(epochs, steps, seed, 0.1, images[:2], draw, sgd)

    @torch.no_grad()
    def scores(self, model: nn.Module) -> list[float]:
        """100 for each test image read right, 0 for each read wrong."""
        model.eval()
        right = model(self.data.test_images).argmax(1) == self.data.test_labels
        return (100.0 * right).tolist()


class Text:
    """The next character of Python's language reference; the last tenth is held out; the score is bits a character."""

    dense_epochs, tuning_epochs = 40, 12  # of 25 steps
    sparsities = (0.5, 0.8, 0.9)
    sparsities_from_scratch = ()
    batch, length, steps = 12, 64, 25

    def __init__(self) -> None:
        characters = sorted(set(corpora.language_reference()))
        codes = torch.tensor([characters.index(c) for c in corpora.language_reference()])
        split = len(codes) * 9 // 10
        self.train, self.test = codes[:split], codes[split:]
        self.network = functools.partial(GPT, len(characters), self.length, width=96, layers=3)

    def recipe(self, epochs: int, seed: int) -> Recipe:
        def draw(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range(self.steps):
                starts = torch.randint(len(self.train) - self.length, (self.batch, 1), generator=generator)
                window = self.train[starts + torch.arange(self.length + 1)]
                yield window[:, :-1], window[:, 1:]

        adamw = functools.partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        example = self.train[: self.length].reshape(1, -1)
        return Recipe(epochs, self.steps, seed, 3e-3, example, draw, adamw)

    @torch.no_grad()
    def scores(self, model: nn.Module) -> list[float]:
        """Bits a character in each window of the held-out text."""
        model.eval()
        windows = self.test[: (len(self.test) - 1) // self.length * self.length]
        x, y = windows.reshape(-1, self.length), self.test[1 : len(windows) + 1].reshape(-1, self.length)
        losses = functional.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
        return (losses.mean(1) / math.log(2)).tolist()


@functools.cache
def task(name: str) -> Digits | Text:
    return {"MLP": lambda: Digits(MLP), "ResNet-8": lambda: Digits(ResNet8), "GPT": Text}[name]()


def initial(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return task(name).network()
