"""Prune while training with Accelerate: python examples/accelerate_loop.py [checkpoint.pt]

The Pruner takes the prepared model and optimizer; gradients are accumulated, and only real steps count. A run with
--stop-after N ends after N epochs; the next run with the same file goes on, to the same weights.
"""

import argparse
import os

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn

from secateur import Pruner, sparsity_of

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoint", nargs="?", default="checkpoint.pt")
parser.add_argument("--stop-after", type=int, default=12)
options = parser.parse_args()

pixels, classes = load_digits(return_X_y=True)
data = torch.utils.data.TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(classes))
epochs, accumulated = 12, 2

accelerator = Accelerator(gradient_accumulation_steps=accumulated, cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = -(-len(loader) // accumulated)
pruner = Pruner(model, optimizer, 0.9, epochs=epochs, steps_per_epoch=steps, verbose=accelerator.is_main_process)

begin = 0
if os.path.exists(options.checkpoint):
    saved = torch.load(options.checkpoint, weights_only=True)
    accelerator.unwrap_model(model).load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    pruner.load_state_dict(saved["pruner"])
    begin = saved["epoch"]

for epoch in range(begin, min(epochs, options.stop_after)):
    torch.manual_seed(epoch)  # the same batches, whenever the epoch is run
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    plain = accelerator.unwrap_model(model).state_dict()
    state = {"model": plain, "optimizer": optimizer.state_dict(), "pruner": pruner.state_dict()}
    accelerator.save({**state, "epoch": epoch + 1}, options.checkpoint)
    accelerator.print(f"epoch {epoch + 1}: {pruner.metrics()['sparsity']:.1%} removed after {pruner.step} steps")

plain = accelerator.unwrap_model(model)
accuracy = (plain(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
accelerator.print(f"{100 * sparsity_of(plain):.1f} % of the weights are zero; training accuracy {accuracy:.4f}")
