"""Activations that cut or join widths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.registry import hand, image, vector


@hand(vector(22))
class Highway(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(22, 26)
        self.h, self.t = nn.ModuleList([nn.Linear(26, 26) for _ in range(2)]), nn.ModuleList()
        self.t.extend(nn.Linear(26, 26) for _ in range(2))
        self.out = nn.Linear(26, 3)

    def forward(self, x):
        x = self.inp(x)
        for h, t in zip(self.h, self.t, strict=True):
            gate = torch.sigmoid(t(x))
            x = gate * F.relu(h(x)) + (1 - gate) * x
        return self.out(x)


@hand(vector(14))
class Maxout(nn.Module):
    def __init__(self, pieces=3):
        super().__init__()
        self.pieces = pieces
        self.fc1, self.fc2, self.out = nn.Linear(14, 22 * pieces), nn.Linear(22, 18 * pieces), nn.Linear(18, 4)

    def forward(self, x):
        x = self.fc1(x)
        x = x.view(x.size(0), -1, self.pieces).max(dim=-1)[0]
        x = self.fc2(x).view(-1, self.pieces, 18).amax(dim=1)
        return self.out(x)


@hand(image())
class MaxFeatureMap(nn.Module):
    """LightCNN: the maximum of the two halves."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 28, 3, padding=1), nn.Conv2d(14, 44, 3, padding=1)
        self.out_channels = 22
        self.fc = nn.Linear(22, 6)

    def forward(self, x):
        a, b = torch.split(self.conv1(x), 14, 1)
        x = F.max_pool2d(torch.max(a, b), 2)
        x = self.conv2(x)
        x = torch.maximum(x[:, : self.out_channels], x[:, self.out_channels :])
        return self.fc(x.mean((2, 3)))


@hand(vector(14))
def glu_mlp():
    return nn.Sequential(nn.Linear(14, 44), nn.GLU(), nn.Linear(22, 36), nn.GLU(dim=1), nn.Linear(18, 3))


@hand(image())
class ConcatenatedRelu(nn.Module):
    """CReLU doubles the width by appending the negative."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 14, 3), nn.Conv2d(28, 18, 3), nn.Linear(36, 5)

    def forward(self, x):
        x = self.conv1(x)
        x = torch.cat([F.relu(x), F.relu(-x)], dim=1)
        x = self.conv2(x)
        return self.fc(F.relu(torch.cat((x, -x), 1)).mean((2, 3)))


@hand(lambda: torch.randn(2, 9, 3))
class NerfMlp(nn.Module):
    """Sines of frequencies, a skip connection of the encoding, density and colour from different depths."""

    def __init__(self):
        super().__init__()
        self.register_buffer("freqs", 2.0 ** torch.arange(3))
        self.pts = nn.ModuleList([nn.Linear(21, 26), nn.Linear(26, 26), nn.Linear(26 + 21, 30)])
        self.skips = [1]
        self.sigma, self.feature = nn.Linear(30, 1), nn.Linear(30, 22)
        self.rgb = nn.Sequential(nn.Linear(22 + 3, 14), nn.ReLU(), nn.Linear(14, 3))

    def forward(self, x):
        e = (x[..., None] * self.freqs).flatten(-2)
        e = torch.cat([x, e.sin(), e.cos()], -1)
        h = e
        for i, layer in enumerate(self.pts):
            h = F.relu(layer(h))
            if i in self.skips:
                h = torch.cat([e, h], -1)
        return torch.cat([torch.sigmoid(self.rgb(torch.cat([self.feature(h), x], -1))), F.softplus(self.sigma(h))], -1)


@hand(vector(2))
class Siren(nn.Module):
    def __init__(self, omega=30.0):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 22), nn.Linear(22, 30), nn.Linear(30, 18)])
        self.final, self.omega_0 = nn.Linear(18, 3), omega

    def forward(self, coords):
        for layer in self.layers:
            coords = torch.sin(self.omega_0 / 10 * layer(coords))
        return self.final(coords)
