"""Activations that cut or join widths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.registry import hand, image, vector


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
