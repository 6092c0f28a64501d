"""A small network and the loop that trains it."""

import functools

import torch
from torch import nn

from secateur import Pruner

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)


quiet = functools.partial(Pruner, verbose=False)


def network(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    ).to(dtype)


def batch(step, dtype=torch.float32):
    inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)
    return inputs, inputs[:, :4].flip(1) * inputs[:, 4:]


def train(model, optimizer, steps, begin=0):
    for step in range(begin, begin + steps):
        inputs, targets = batch(step, next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        yield step


def run(model, optimizer, steps, begin=0):
    for _ in train(model, optimizer, steps, begin):
        pass


def weights_of(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.dim() > 1}


def removed(model):
    return sum(int((weight == 0).sum()) for weight in weights_of(model).values())


def assert_zero_where_removed(model, pruner):
    for name, mask in pruner.masks.items():
        weight = model.get_parameter(name)
        assert (weight[~mask] == 0).all(), name


def made_with(**options):
    model = options.pop("model", None) or network()
    options = {"schedule": 0.5, "total_steps": 10, **options}
    return quiet(model, options.pop("optimizer", None) or SGD(model.parameters()), **options)
