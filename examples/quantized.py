"""Finish with int8, after shrink: python examples/quantized.py [--quick]

A network for handwritten digits is shrunken to a quarter of its multiply-adds, trained on, and quantized by torch:
both savings multiply. Times are of 32 images on one thread, in turns. About ten seconds.
"""

import argparse
import copy
import io
import statistics
import time
import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn

from secateur import shrink

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="a smaller network, fewer epochs")
width, epochs = (128, 3) if parser.parse_args().quick else (1024, 8)
torch.set_num_threads(1)

pixels, classes = load_digits(return_X_y=True)
order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
inputs, labels = torch.tensor(pixels / 16, dtype=torch.float32)[order], torch.tensor(classes)[order]


def fit(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(1200).split(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    return model


def int8(model):
    """Weights in a byte each, activations by what they are when it runs: what torch does by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch names a successor, in a package of its own
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def nbytes(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


torch.manual_seed(0)
dense = fit(nn.Sequential(
    nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
))  # fmt: skip
small = copy.deepcopy(dense)
shrink(small, inputs[:1], 0.75, target="macs", batches=list(inputs[:600].split(60)))
fit(small), fit(dense)  # as long as each other
forms = {"dense": dense, "dense, int8": int8(dense), "shrunken": small, "shrunken, int8": int8(small)}

times = {name: [] for name in forms}
with torch.no_grad():
    for _ in range(50):
        for name, model in forms.items():  # in turns: whatever else runs here slows all of them
            begin = time.perf_counter()
            model(inputs[:32])
            times[name].append(1e6 * (time.perf_counter() - begin))
print(f"{'':<16} {'test images':>11} {'file':>10} {'32 images':>10}")
for name, model in forms.items():
    with torch.no_grad():
        right = (model(inputs[1200:]).argmax(1) == labels[1200:]).double().mean().item()
    print(f"{name:<16} {right:>11.1%} {nbytes(model) / 1e3:>7,.0f} kB {statistics.median(times[name]):>7.0f} us")
