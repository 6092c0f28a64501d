"""Outputs and inputs of several kinds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.registry import hand, image


@hand(image())
class TupleOutput(nn.Module):
    """The features themselves are an output, so their width is given."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 18, 3), nn.Conv2d(18, 26, 3)
        self.fc = nn.Linear(26, 10)

    def forward(self, x):
        features = F.relu(self.conv2(F.relu(self.conv1(x))))
        logits = self.fc(F.relu(self.conv3(features)).mean((2, 3)))
        return logits, (features, None, logits.argmax(1))


@hand(lambda: {"pixels": torch.randn(2, 3, 16, 16), "words": torch.randint(1, 53, (2, 7)), "mask": None})
class KeywordInputs(nn.Module):
    """Image and text by keyword; one argument is None."""

    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(3, 14, 4, 4), nn.ReLU())
        self.embedding = nn.Embedding(53, 18)
        self.image_proj, self.text_proj = nn.Linear(14, 22), nn.Linear(18, 22, bias=False)
        self.out = nn.Linear(22, 4)

    def forward(self, pixels, words=None, mask=None, scale=1.0):
        x = self.image_proj(self.cnn(pixels).flatten(2).mean(2))
        if words is not None:
            x = x + scale * self.text_proj(self.embedding(words).sum(1))
        if mask is not None:
            x = x * mask
        return self.out(torch.tanh(x))
