"""Train a small network on handwritten digits, remove 90 % of its weights, fine-tune what is left, write a report.

python examples/digits.py [report.html]        (about ten seconds; needs pip install 'secateur[demo]')
"""

import copy
import sys

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from secateur import apply_, sparsify, sparsity_of
from secateur.allocation import erk
from secateur.criteria import lamp, random
from secateur.report import Results, Run

images, labels = load_digits(return_X_y=True)
split = train_test_split(images / 16, labels, test_size=0.4, stratify=labels, random_state=0)
train_x, test_x = (torch.tensor(part, dtype=torch.float32).reshape(-1, 1, 8, 8) for part in split[:2])
train_y, test_y = (torch.tensor(part) for part in split[2:])


def train(model, epochs, masks=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    for _ in range(epochs):
        for batch in torch.randperm(len(train_x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
            optimizer.step()
            if masks is not None:
                apply_(model, masks)  # what was removed stays zero


@torch.no_grad()
def accuracy(model):
    return 100 * (model(test_x).argmax(1) == test_y).double().mean().item()


torch.manual_seed(0)
dense = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10),
)  # fmt: skip
train(dense, epochs=12)

runs = [Run("dense", 0.0, accuracy(dense))]
methods = {"magnitude": {}, "ERK": {"allocate": erk}, "LAMP": {"criterion": lamp}, "random": {"criterion": random}}
for name, choices in methods.items():
    model = copy.deepcopy(dense)
    masks = sparsify(model, 0.9, **choices)
    before = accuracy(model)
    train(model, epochs=4, masks=masks)
    runs.append(Run(name, sparsity_of(model), before, accuracy(model)))

results = Results("Digits, pruned", runs, command="python examples/digits.py")
print(results)
if len(sys.argv) > 1:
    print("The report is in", results.report(sys.argv[1]))
