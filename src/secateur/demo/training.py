"""Training the network, and how many images it then reads right.

Law: all randomness comes from the seed; the global generator is not touched.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.demo.data import Digits
from secateur.pipeline import apply_

__all__ = ["BATCH", "EPOCHS", "RATE", "TUNING_EPOCHS", "accuracy", "train"]

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
