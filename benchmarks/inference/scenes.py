"""A convolutional network that is trained here, large enough for time to be spent in its convolutions.

The task: a handwritten digit of scikit-learn, somewhere in a larger image, turned, of any size, among pieces of other
digits and noise. Training images are drawn anew in each step from the training digits; the test images are
two of each test digit, always the same. The network is as wide as ResNet-18, without its last stage.

Law: every form of the network begins at the same trained weights and has the same fine-tuning (steps, rates, images).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.inference.subjects import cached
from secateur import demo, shrink
from secateur.allocation import uniform
from secateur.criteria import magnitude
from secateur.pipeline import reestimate_batchnorm
from secateur.shrinking import load_shrunken, save_shrunken
from secateur.training import Pruner

SPAN = (0.3, 0.5)  # of the image's side that a digit takes
PIECES = 5  # of other digits in an image, each an eighth as wide as it
NOISE = 0.3
BATCH, RATE = 32, 1e-3
HELD = 0.6  # of the steps keep the full rate, and are on crops: the same digits in less of the world around them
CROP = 0.5  # of the side; such a step takes a quarter of the time
SPARE = ("stem.*", "head.*")  # the first convolution and the last layer stay dense


class Scenes:
    """Images of shape (n, 1, size, size), and labels."""

    def __init__(self, size: int) -> None:
        self.size = size
        data = demo.load_digits()
        darkest = data.train_images.min()
        self.digits, self.labels = data.train_images - darkest, data.train_labels
        self.unseen = (data.test_images - darkest).repeat(2, 1, 1, 1)
        self.test_labels = data.test_labels.repeat(2)

    @functools.cached_property
    def test_images(self) -> Tensor:
        return self.drawn(self.unseen, torch.Generator().manual_seed(1), self.size)

    def batch(self, count: int, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        """Images of any size; digits and pieces have as many pixels as in those of the full one."""
        which = torch.randint(len(self.digits), (count,), generator=generator)
        return self.drawn(self.digits[which], generator, size), self.labels[which]

    def drawn(self, digits: Tensor, generator: torch.Generator, size: int) -> Tensor:
        """Each of the digits in an image of its own."""

        def between(low: float, high: float, count: int) -> Tensor:
            return low + (high - low) * torch.rand(count, generator=generator)

        def placed(which: Tensor) -> Tensor:
            count = len(which)
            share, turn = between(*SPAN, count) * (self.size / size), between(-0.3, 0.3, count)
            at = (1 - share)[:, None] * (2 * torch.rand(count, 2, generator=generator) - 1)
            rotation = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()], 1).view(count, 2, 2)
            rotation = rotation / share[:, None, None]
            theta = torch.cat([rotation, -(rotation @ at[:, :, None])], 2)
            places = functional.affine_grid(theta, [count, 1, size, size], align_corners=False)
            return functional.grid_sample(which, places, align_corners=False)

        images = placed(digits)
        line, piece = torch.arange(size), self.size // 8
        for _ in range(PIECES):
            other = placed(self.digits[torch.randint(len(self.digits), (len(digits),), generator=generator)])
            corner = torch.randint(size - piece, (2, len(digits), 1), generator=generator)
            rows, columns = (line >= corner) & (line < corner + piece)
            images = torch.maximum(images, other * (rows[:, None, :, None] & columns[:, None, None, :]))
        return images + NOISE * torch.randn(images.shape, generator=generator)


class Classifier(nn.Module):
    """Three of the four stages of ResNet-18, from an image of shape (n, 1, h, w) to the logits of shape (n, 10).

    They are as transformers builds them (64, 128 and 256 channels). One convolution, of patches of 8×8 with a stride of
    4, stands where ResNets have theirs of 7×7 and a pooling, which take longer here than the sparse layers.
    """

    def __init__(self) -> None:
        from transformers import ResNetConfig
        from transformers.models.resnet.modeling_resnet import ResNetEncoder

        super().__init__()
        sizes = {"embedding_size": 64, "hidden_sizes": [64, 128, 256], "depths": [2, 2, 2]}
        self.stem = nn.Sequential(nn.Conv2d(1, 64, 8, 4, 2, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.stages = ResNetEncoder(ResNetConfig(layer_type="basic", **sizes))
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.stages(self.stem(x)).last_hidden_state.mean(dim=(2, 3)))
        return made


@torch.enable_grad()
def train(
    model: nn.Module, scenes: Scenes, steps: int, seed: int, begin: Callable[[torch.optim.Optimizer], object]
) -> None:
    """In bfloat16 where that is precise enough (autocast); then the statistics of batch normalizations anew."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-2)
    begin(optimizer)
    model.train()
    for step in range(steps):
        done = (step + 1) / steps
        images, labels = scenes.batch(BATCH, generator, round(CROP * scenes.size) if done <= HELD else scenes.size)
        for group in optimizer.param_groups:  # up for a tenth of the steps, then level, then down to nothing
            group["lr"] = RATE * min(done / 0.1, 1.0, (1 - done) / (1 - HELD))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(images)
        loss = functional.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"  step {step + 1} of {steps}: loss {float(loss.detach()):.3f}", flush=True)
    reestimate_batchnorm(model, [scenes.batch(BATCH, generator, scenes.size)[0] for _ in range(16)])
    model.eval()


class Trained:
    """Every form of the network, trained and fine-tuned for so many steps, made once and kept in the cache."""

    def __init__(self, cache: Path, size: int, steps: int, tuning_steps: int) -> None:
        self.scenes, self.steps = Scenes(size), tuning_steps
        self.cache = cache = cache / f"scenes-{size}-{steps}-{tuning_steps}"
        torch.manual_seed(0)
        self.before = Classifier()
        cached(cache / "trained.safetensors", self.before, lambda m: train(m, self.scenes, steps, 0, lambda _: None))

    def tune(self, model: nn.Module, begin: Callable[[torch.optim.Optimizer], object] = lambda _: None) -> None:
        train(model, self.scenes, self.steps, 1, begin)

    def dense(self) -> nn.Module:
        return cached(self.cache / "dense.safetensors", copy.deepcopy(self.before), self.tune)

    def sparse(self, sparsity: float) -> nn.Module:
        """Zeros by magnitude, every layer alike, that come while it is fine-tuned."""

        def make(model: nn.Module) -> None:
            pruners: list[Pruner] = []

            def begin(optimizer: torch.optim.Optimizer) -> None:
                pruners.append(
                    Pruner(
                        model, optimizer, sparsity, criterion=magnitude, allocate=uniform, exclude=SPARE,
                        total_steps=self.steps, verbose=False,
                    )
                )  # fmt: skip

            self.tune(model, begin)
            pruners[0].finish()

        return cached(self.cache / f"sparse-{sparsity:g}.safetensors", copy.deepcopy(self.before), make)

    def shrunken(self, share: float) -> nn.Module:
        """Without a share of the multiply-adds, by magnitude, then fine-tuned."""
        model, folder = copy.deepcopy(self.before), self.cache / f"shrink-{share:g}"
        if folder.exists():
            load_shrunken(model, folder)
            return model.eval()
        print(f"  making {folder.name}", flush=True)
        shrink(model, torch.randn(1, 1, self.scenes.size, self.scenes.size), share, target="macs")
        self.tune(model)
        save_shrunken(model, folder)
        return model.eval()

    def all(self, zeros: Sequence[float], shares: Sequence[float]) -> None:
        """Makes what is not in the cache."""
        for make in (
            self.dense,
            *(functools.partial(self.sparse, each) for each in zeros),
            *(functools.partial(self.shrunken, each) for each in shares),
        ):
            make()

    def right(self, call: Callable[..., Any], at_once: int) -> float:
        """Percent of the test images; of a call that takes so many at once."""
        parts = zip(self.scenes.test_images.split(at_once), self.scenes.test_labels.split(at_once), strict=True)
        with torch.no_grad():
            found = sum(int((torch.as_tensor(call(part)).argmax(1) == wanted).sum()) for part, wanted in parts)
        return 100 * found / len(self.scenes.test_labels)
