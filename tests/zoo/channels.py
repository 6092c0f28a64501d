"""Operations that look across channels, and constants that know them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.convolutional import ConvBnRelu
from zoo.registry import hand, image, sequence, several, vector


@hand(image())
class LiteralChannelIndex(nn.Module):
    """Channel 3 and the channels from 5 to 8 are used by number; the first convolution is free behind them."""

    def __init__(self):
        super().__init__()
        self.conv0, self.conv1 = nn.Conv2d(3, 18, 3, padding=1), nn.Conv2d(18, 14, 3, padding=1)
        self.conv2 = nn.Conv2d(14, 22, 3, padding=1)
        self.fc = nn.Linear(22, 4)

    def forward(self, x):
        x = self.conv1(F.relu(self.conv0(x)))
        gate = torch.sigmoid(x[:, 3]).unsqueeze(1)
        offset = x[:, 5:8].mean(dim=1, keepdim=True)
        x = F.relu(self.conv2(x)) * gate + offset
        return self.fc(x.mean((2, 3)))


@hand(vector(12))
class IndexedChannels(nn.Module):
    """index_select by a buffer, a list as an index, gather and flip."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (
            nn.Linear(12, 20), nn.Linear(20, 18), nn.Linear(8, 26), nn.Linear(26, 3),
        )  # fmt: skip
        self.register_buffer("order", torch.randperm(20))

    def forward(self, x):
        x = F.relu(torch.index_select(self.fc1(x), 1, self.order))
        x = torch.flip(F.relu(self.fc2(x)), dims=[1])
        x = x[:, [0, 2, 4, 6, 9, 12, 15, 17]]
        return self.fc4(F.relu(self.fc3(x)))


@hand(vector(14), name="cumulative_sum", operation=lambda x: torch.cumsum(x, dim=1))
@hand(vector(14), name="sorted_channels", operation=lambda x: torch.sort(x, dim=-1).values)
@hand(vector(14), name="softmax_over_channels", operation=lambda x: torch.softmax(x, dim=1))
@hand(vector(14), name="top_channels", operation=lambda x: x * (x >= x.topk(5, dim=1)[0][:, -1:]).to(x.dtype))
@hand(vector(14), name="rolled_channels", operation=lambda x: torch.roll(x, 3, dims=1))
@hand(vector(14), name="fourier_over_channels", operation=lambda x: torch.fft.fft(x, dim=-1).real)
@hand(
    vector(14), name="standardized_by_hand", operation=lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
)
class AcrossChannels(nn.Module):
    """An operation that mixes the width between two layers; the widths around it stay free."""

    def __init__(self, operation):
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (
            nn.Linear(14, 22), nn.Linear(22, 18), nn.Linear(18, 26), nn.Linear(26, 3),
        )  # fmt: skip
        self.operation = operation

    def forward(self, x):
        x = self.operation(self.fc2(F.relu(self.fc1(x))))
        return self.fc4(F.relu(self.fc3(x)))


@hand(image())
class BufferAsWide(nn.Module):
    """Buffers of the channels' width: a mask, an index into a table, constants made in forward."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 22, 3), nn.Conv2d(22, 18, 3)
        self.register_buffer("mask", (torch.rand(16) > 0.3).float())
        self.register_buffer("table", torch.randn(5, 22))
        self.width = 18
        self.fc = nn.Linear(18, 4)

    def forward(self, x):
        x = F.relu(self.conv1(x)) * self.mask.view(-1, 1, 1)
        x = self.conv2(x) + self.table[torch.tensor([1, 3])][:, :, None, None]
        x = self.conv3(F.relu(x))
        x = x * torch.linspace(0.5, 1.5, self.width, dtype=x.dtype)[None, :, None, None]
        x = x + torch.ones(self.width, 1, 1, dtype=x.dtype)
        return self.fc(x.mean((2, 3)))


@hand(vector(14))
class UnusedParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(14, 26), nn.Linear(26, 4)
        self.forgotten = nn.Linear(26, 26)
        self.also_forgotten = nn.Parameter(torch.randn(26))
        self.register_buffer("counter", torch.zeros(26))

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


@hand(image())
class OnlyInTraining(nn.Module):
    """An auxiliary head that runs in training mode only."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = ConvBnRelu(3, 14, 3), ConvBnRelu(14, 22, 3)
        self.aux, self.fc = nn.Linear(14, 5), nn.Linear(22, 5)

    def forward(self, x):
        x = self.conv1(x)
        aux = self.aux(x.mean((2, 3))) if self.training else None
        x = self.fc(F.dropout(self.conv2(x).mean((2, 3)), 0.3, training=self.training))
        return x if aux is None else (x, aux)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


@hand(image())
class CustomFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 14, 3), nn.Conv2d(14, 22, 3), nn.Linear(22, 4)

    def forward(self, x):
        x = Swish.apply(self.conv1(x))
        return self.fc(Swish.apply(self.conv2(x)).mean((2, 3)))


@hand(several(sequence(12, 9), lambda: torch.tensor([9, 5])))
class MaskedPooling(nn.Module):
    """Lengths make a mask; masked_fill before the maximum, where for the mean."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(12, 22), nn.Linear(22, 18), nn.Linear(36, 3)

    def forward(self, x, lengths):
        mask = torch.arange(x.size(1))[None, :] < lengths[:, None]
        h = self.fc2(F.leaky_relu(self.fc1(x)))
        h = torch.where(h > 0, h, 0.3 * h)
        top = h.masked_fill(~mask.unsqueeze(-1), -1e4).max(1)[0]
        mean = torch.where(mask[..., None], h, torch.zeros_like(h)).sum(1) / lengths[:, None].to(h.dtype)
        return self.out(torch.cat((top, mean), -1))


@hand(image())
class StackedBranches(nn.Module):
    """Branches stacked in a new dimension, reduced by maximum, and flattened together with channels."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Conv2d(3, 14, k, padding=k // 2) for k in (1, 3, 5)])
        self.mix = nn.Conv2d(42, 18, 1)
        self.fc = nn.Linear(32, 4)

    def forward(self, x):
        stacked = torch.stack([branch(x) for branch in self.branches], dim=2)
        top = stacked.max(dim=2).values
        b, c, n, h, w = stacked.shape
        mixed = self.mix(stacked.reshape(b, c * n, h, w))
        return self.fc(torch.cat([top.mean((2, 3)), mixed.mean((2, 3))], dim=1))


@hand(image())
class RepeatedChannels(nn.Module):
    """repeat, repeat_interleave, expand and broadcasting make widths from smaller ones."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(3, 10, 3), nn.Conv2d(20, 14, 3), nn.Conv2d(28, 18, 1)
        self.gray = nn.Conv2d(18, 1, 1)
        self.fc = nn.Linear(18, 4)

    def forward(self, x):
        x = F.relu(self.conv1(x)).repeat(1, 2, 1, 1)
        x = F.relu(self.conv2(x)).repeat_interleave(2, dim=1)
        x = self.conv3(x)
        x = x + self.gray(x) * 0.5
        return self.fc(x.flatten(2).mean(-1))


@hand(image())
class GramMatrix(nn.Module):
    """Products of channels with channels, flattened into a linear layer: a quadratic width."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 14, 3), nn.Conv2d(14, 10, 3)
        self.fc = nn.Linear(100, 4)

    def forward(self, x):
        x = self.conv2(F.relu(self.conv1(x)))
        b, c, h, w = x.shape
        f = x.view(b, c, h * w)
        g = torch.bmm(f, f.transpose(1, 2)) / (h * w)
        return self.fc(g.view(b, c * c))


@hand(image())
class Asserting(nn.Module):
    """Checks of the width against an attribute, as libraries write them, and a width kept as a tuple."""

    def __init__(self, channels=18):
        super().__init__()
        self.in_channels, self.shape = channels, (channels, 8, 8)
        self.conv1, self.conv2 = nn.Conv2d(3, channels, 3, 2, 1), nn.Conv2d(channels, 14, 3, padding=1)
        self.fc = nn.Linear(14, 4)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        if x.shape[1] != self.in_channels:
            raise ValueError(f"expected {self.in_channels} channels, got {x.shape[1]}")
        x = x.flatten(1).view(-1, *self.shape)
        return self.fc(self.conv2(x).mean((2, 3)))
