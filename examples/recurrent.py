"""Prune an LSTM three ways: python examples/recurrent.py [--quick]

It reads handwritten digits row by row. `oneshot` makes half of its weights zeros without training, and moves the
others; `recover` trains what is left towards the dense network; and `Pruner` takes 80 % while it is trained on. About
fifteen seconds.
"""

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

from secateur import Pruner, oneshot, recover, sparsify, sparsity_of

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="fewer epochs")
epochs = 8 if parser.parse_args().quick else 15

pixels, classes = load_digits(return_X_y=True)
order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
rows = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 8, 8)[order]  # eight steps of eight pixels
labels = torch.tensor(classes)[order]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 64, num_layers=2, batch_first=True), nn.Linear(64, 10)

    def forward(self, rows):
        return self.head(self.lstm(rows)[0][:, -1])


def fit(model, optimizer):
    for epoch in range(epochs):
        for batch in torch.randperm(1200, generator=torch.Generator().manual_seed(epoch)).split(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows[batch]), labels[batch]).backward()
            optimizer.step()


def tell(name, model):
    with torch.no_grad():
        right = (model(rows[1200:]).argmax(1) == labels[1200:]).double().mean().item()
    print(f"{name:<36} {sparsity_of(model):>6.1%} {right:>12.1%}")


torch.manual_seed(0)
print(f"{'':<36} {'zeros':>6} {'test images':>12}")
dense = Reader()
fit(dense, torch.optim.AdamW(dense.parameters(), lr=5e-3))
tell("dense", dense)
calibration = list(rows[:480].split(60))

for sparsity in (0.5, 0.7):
    plain = copy.deepcopy(dense)
    sparsify(plain, sparsity)
    tell("magnitude", plain)

    repaired = copy.deepcopy(dense)
    oneshot(repaired, calibration, sparsity)
    tell("oneshot, without training", repaired)

recover(repaired, dense, calibration, steps=20 * epochs, local=0, loss="kl", rate=1e-2)
tell("  and recover, without labels", repaired)

pruned = copy.deepcopy(dense)
optimizer = torch.optim.AdamW(pruned.parameters(), lr=5e-3)
every = ["lstm.weight*", "head.weight"]  # recurrent weights are left alone unless they are named
pruner = Pruner(pruned, optimizer, 0.8, include=every, total_steps=20 * epochs, verbose=False)
fit(pruned, optimizer)
pruner.finish()
tell("Pruner, trained on with labels", pruned)
