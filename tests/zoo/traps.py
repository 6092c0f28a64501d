"""Traps: sizes that are equal by accident."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.registry import hand, image, vector


@hand(image(16, 16))
class TrapAllSixteen(nn.Module):
    """Channels, height, width, kernel count and a temperature are 16."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.temperature, self.size, self.channels = 16, 16, 16
        self.rows, self.fc = nn.Linear(16, 16), nn.Linear(16, 16)
        self.position = nn.Parameter(torch.randn(16, 1))

    def forward(self, x):
        x = F.relu(self.conv1(x)) / self.temperature
        x = self.rows(x) + self.position
        x = x.view(-1, self.channels, self.size, self.size)
        x = F.relu(self.conv2(x))
        return self.fc(x.mean((2, 3)))


@hand(lambda: torch.randn(4, 4, 4)[:2])
class TrapHeads(nn.Module):
    """Four heads of width four, four tokens, embedding 16, hidden 16, four classes."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 16)
        self.num_heads = self.head_dim = self.tokens = 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.token_mix = nn.Linear(4, 4)
        self.fc1, self.fc2, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        b, t, _ = x.shape
        x = self.inp(x)
        q, k, v = (f(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = (q @ k.transpose(2, 3) / self.num_heads).softmax(-1)
        y = (self.token_mix(a) @ v).transpose(1, 2).reshape(b, self.tokens, 16)
        x = x + self.o(y)
        x = x + self.fc2(F.relu(self.fc1(x)))
        return self.out(x)


@hand(vector(24))
class TrapAttributes(nn.Module):
    """Attributes of the same value with other meanings: bins, steps, a divisor and a number of classes."""

    def __init__(self):
        super().__init__()
        self.hidden_size = self.num_bins = self.num_classes = self.max_steps = 24
        self.fc1, self.fc2, self.fc3 = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.register_buffer("bins", torch.linspace(-1, 1, 24))

    def forward(self, x):
        h = F.relu(self.fc1(x)).view(-1, self.hidden_size)
        h = F.relu(self.fc2(h)) * (24 / self.max_steps)
        logits = self.fc3(h).view(-1, self.num_classes)
        return (logits.softmax(-1) * self.bins).sum(-1), F.one_hot(logits.argmax(-1), self.num_bins)


@hand(image(8, 8))
class TrapResidualEqual(nn.Module):
    """Two residual streams of one width that never meet, and a batch, groups and factor of two."""

    def __init__(self):
        super().__init__()
        self.a1, self.a2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.b1, self.b2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.factor = self.groups = 2
        self.out_a, self.out_b = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x):
        a = F.relu(self.a1(x))
        a = a + self.a2(a) * self.factor
        b = F.relu(self.b1(x))
        b = b + self.b2(b)
        a = a.view(2, self.groups, 4, 8, 8).transpose(1, 2).reshape(2, 8, 8, 8)
        return self.out_a(F.max_pool2d(a, 8).flatten(1)), self.out_b(b.mean((2, 3)))
