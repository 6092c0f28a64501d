"""Make a network for handwritten digits three times smaller in three ways: python examples/shrink_and_train.py

At once and then fine-tuned; step by step with fine-tuning between; trained with a growing penalty on what is to leave,
then shrunken. Each has the same number of epochs after the dense training. About five seconds.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

from secateur import Pruner, shrink
from secateur.training import growing

pixels, classes = load_digits(return_X_y=True)
order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
images = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)[order]
labels = torch.tensor(classes)[order]
train, test, example = slice(0, 1200), slice(1200, None), images[:2]
epochs, steps = 6, 20  # of fine-tuning, and in an epoch


def fit(model, optimizer, epochs):
    for epoch in range(epochs):
        for batch in torch.randperm(1200, generator=torch.Generator().manual_seed(epoch)).split(60):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[train][batch]), labels[train][batch])
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model):
    model.eval()
    right = (model(images[test]).argmax(1) == labels[test]).double().mean().item()
    model.train()
    return 100 * right


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def tell(name, model):
    print(f"{name:<28} {sum(each.numel() for each in model.parameters()):>7,} parameters  {accuracy(model):.1f} %")


torch.manual_seed(0)
dense = nn.Sequential(
    nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip
fit(dense, adam(dense), 6)
tell("dense", dense)

model = copy.deepcopy(dense)
shrink(model, example, 2 / 3, round_to=4)
tell("at once", model)
fit(model, adam(model), epochs)
tell("  fine-tuned", model)

model = copy.deepcopy(dense)
optimizer = adam(model)  # it goes on through all rounds: its moments lose the same slices
size = sum(each.numel() for each in model.parameters())
for part in (1, 2, 3):
    now = sum(each.numel() for each in model.parameters())
    shrink(model, example, 1 - size * 3 ** (-part / 3) / now, round_to=4, optimizer=optimizer)
    tell(f"round {part}", model)
    fit(model, optimizer, epochs // 3)
tell("  fine-tuned", model)

model = copy.deepcopy(dense)
optimizer = adam(model)
penalty = growing(2 / 3, example, round_to=4, end=0.5)
pruner = Pruner(model, optimizer, regularize=penalty, total_steps=epochs * steps, verbose=False)
fit(model, optimizer, epochs)
pruner.finish()
shrink(model, example, optimizer=optimizer)
tell("growing penalty", model)
