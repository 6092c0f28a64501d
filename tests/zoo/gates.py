"""Attention over channels, scaling, conditioning, normalization."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.convolutional import ConvBnRelu
from zoo.registry import hand, image, several, vector


class SeLayer(nn.Module):
    """Linear layers on the pooled map, with two views."""

    def __init__(self, channel, reduction=4):
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(channel, channel // reduction, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(channel // reduction, channel, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        b, c, _, _ = x.size()
        y = self.avg_pool(x).view(b, c)
        y = self.fc(y).view(b, c, 1, 1)
        return x * y.expand_as(x)


@hand(image())
class SeResnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvBnRelu(3, 20, 3)
        self.conv = ConvBnRelu(20, 28, 3)
        self.conv2 = nn.Conv2d(28, 20, 3, padding=1)
        self.se = SeLayer(20)
        self.fc = nn.Linear(20, 10)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(self.se(self.conv2(self.conv(x))) + x)
        return self.fc(x.mean((2, 3)))


@hand(image())
class Cbam(nn.Module):
    """Channel attention from average and maximum pooling through one MLP, then a map over mean and max of channels."""

    def __init__(self, channels=20):
        super().__init__()
        self.stem = ConvBnRelu(3, channels, 3)
        self.mlp = nn.Sequential(
            nn.Conv2d(channels, 6, 1, bias=False), nn.ReLU(), nn.Conv2d(6, channels, 1, bias=False)
        )
        self.spatial = nn.Conv2d(2, 1, 7, padding=3, bias=False)
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        x = self.stem(x)
        x = x * torch.sigmoid(self.mlp(F.adaptive_avg_pool2d(x, 1)) + self.mlp(F.adaptive_max_pool2d(x, 1)))
        avg = torch.mean(x, dim=1, keepdim=True)
        maximum, _ = torch.max(x, dim=1, keepdim=True)
        x = x * torch.sigmoid(self.spatial(torch.cat([avg, maximum], dim=1)))
        return self.head(x.mean((2, 3)))


@hand(image())
class EfficientChannelAttention(nn.Module):
    """A convolution that runs along the channels."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = ConvBnRelu(3, 14, 3), ConvBnRelu(14, 22, 3)
        self.eca = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.fc = nn.Linear(22, 10)

    def forward(self, x):
        x = self.conv2(self.conv1(x))
        y = F.adaptive_avg_pool2d(x, 1)
        y = self.eca(y.squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1)
        x = x * y.sigmoid().expand_as(x)
        return self.fc(x.mean((2, 3)))


@hand(several(image(), vector(7)))
class Film(nn.Module):
    """The condition gives a scale and a shift for each channel of each block."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 18, 3, padding=1)
        self.conv1, self.conv2 = nn.Conv2d(18, 18, 3, padding=1), nn.Conv2d(18, 26, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(18, affine=False), nn.BatchNorm2d(26, affine=False)
        self.film1 = nn.Linear(7, 36)
        self.gamma2, self.beta2 = nn.Linear(7, 26), nn.Linear(7, 26)
        self.fc = nn.Linear(26, 10)

    def forward(self, x, z):
        x = F.relu(self.stem(x))
        gamma, beta = self.film1(z).chunk(2, dim=-1)
        y = self.bn1(self.conv1(x)) * (1 + gamma[:, :, None, None]) + beta[:, :, None, None]
        x = x + F.relu(y)
        y = self.bn2(self.conv2(x))
        x = F.relu(self.gamma2(z).unsqueeze(-1).unsqueeze(-1) * y + self.beta2(z).unsqueeze(-1).unsqueeze(-1))
        return self.fc(x.mean((2, 3)))


@hand(image())
class ChannelScale(nn.Module):
    """Parameters and buffers of the shapes (1, C, 1, 1), (C, 1, 1) and (C,) multiply and shift."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(3, 14, 3), nn.Conv2d(14, 20, 3), nn.Conv2d(20, 26, 3)
        self.scale = nn.Parameter(torch.rand(1, 14, 1, 1) + 0.5)
        self.shift = nn.Parameter(torch.randn(20, 1, 1))
        self.register_buffer("mean", torch.randn(26))
        self.register_buffer("deviation", torch.rand(26) + 0.5)
        self.fc = nn.Linear(26, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x) * self.scale)
        x = F.relu(self.conv2(x) + self.shift)
        x = (self.conv3(x) - self.mean[None, :, None, None]) / self.deviation.view(1, -1, 1, 1)
        return self.fc(F.relu(x).mean((2, 3)))


@hand(image(), name="group_norm_net", norm=lambda c: nn.GroupNorm(3, c))
@hand(image(), name="instance_norm_net", norm=lambda c: nn.InstanceNorm2d(c, affine=True))
@hand(image(), name="instance_norm_running", norm=lambda c: nn.InstanceNorm2d(c, track_running_stats=True))
@hand(image(), name="group_norm_single", norm=lambda c: nn.GroupNorm(1, c))
@hand(image(), name="group_norm_each", norm=lambda c: nn.GroupNorm(c, c))
@hand(image(), name="prelu_net", norm=nn.BatchNorm2d, act=nn.PReLU)
@hand(image(), name="mish_net", norm=nn.BatchNorm2d, act=lambda _: nn.Mish())
class NormNet(nn.Module):
    def __init__(self, norm, act=lambda _: nn.ReLU()):
        super().__init__()
        self.conv1, self.norm1, self.act1 = nn.Conv2d(3, 12, 3, padding=1), norm(12), act(12)
        self.conv2, self.norm2, self.act2 = nn.Conv2d(12, 21, 3, 2, 1), norm(21), act(21)
        self.conv3, self.norm3, self.act3 = nn.Conv2d(21, 21, 3, 1, 1), norm(21), act(21)
        self.fc = nn.Linear(21, 10)

    def forward(self, x):
        x = self.act1(self.norm1(self.conv1(x)))
        x = self.act2(self.norm2(self.conv2(x)))
        x = x + self.act3(self.norm3(self.conv3(x)))
        return self.fc(x.mean((2, 3)))


@hand(image())
class LayerNormImage(nn.Module):
    """Layer normalization over channels and positions together."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 14, 3, 2, 1), nn.LayerNorm([14, 8, 8])
        self.conv2 = nn.Conv2d(14, 22, 3, 2, 1)
        self.fc = nn.Linear(22 * 16, 10)

    def forward(self, x):
        x = F.gelu(self.norm1(self.conv1(x)))
        x = F.gelu(self.conv2(x))
        x = F.layer_norm(x, x.shape[1:])
        return self.fc(x.reshape(len(x), -1))


@hand(vector(16))
class LayerNormMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(16, 28)
        self.norm = nn.LayerNorm(28)
        self.fc1, self.fc2 = nn.Linear(28, 44), nn.Linear(44, 28)
        self.out = nn.Linear(28, 5)

    def forward(self, x):
        x = self.inp(x)
        x = x + self.fc2(F.gelu(self.fc1(self.norm(x))))
        return self.out(F.normalize(x, dim=-1))
