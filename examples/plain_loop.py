"""Prune while training in a plain loop, and go on where it was stopped: python examples/plain_loop.py [checkpoint.pt]

A run with --stop-after N ends after N epochs; the next run with the same file goes on, to the same weights.
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn

from secateur import Pruner, sparsity_of

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoint", nargs="?", default="checkpoint.pt")
parser.add_argument("--stop-after", type=int, default=12)
options = parser.parse_args()

pixels, classes = load_digits(return_X_y=True)
data = torch.utils.data.TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(classes))
epochs = 12

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
pruner = Pruner(model, optimizer, 0.9, epochs=epochs, steps_per_epoch=len(loader))

begin = 0
if os.path.exists(options.checkpoint):
    saved = torch.load(options.checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    pruner.load_state_dict(saved["pruner"])
    begin = saved["epoch"]

for epoch in range(begin, min(epochs, options.stop_after)):
    torch.manual_seed(epoch)  # the same batches, whenever the epoch is run
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pruner": pruner.state_dict()}
    torch.save({**state, "epoch": epoch + 1}, options.checkpoint)
    print(f"epoch {epoch + 1}: {pruner.metrics()['sparsity']:.1%} removed")

accuracy = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
print(f"{100 * sparsity_of(model):.1f} % of the weights are zero; training accuracy {accuracy:.4f}")
