"""Convolutions, plain and residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.registry import hand, image, vector


@hand(image())
class CnnFlatten(nn.Module):
    """Channels interleave with positions where the image is flattened into the linear layer."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 20, 3, padding=1)
        self.fc1 = nn.Linear(20 * 4 * 4, 36)
        self.fc2 = nn.Linear(36, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


@hand(vector(14))
def mlp():
    return nn.Sequential(nn.Linear(14, 36), nn.ReLU(), nn.Linear(36, 52), nn.Tanh(), nn.Linear(52, 5))


@hand(image(size=32))
class AlexNet(nn.Module):
    """Local response normalization looks across channels; two convolutions are grouped, as in the paper."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 24, 5, stride=2)
        self.norm1 = nn.LocalResponseNorm(5, alpha=0.1, beta=0.75, k=2)
        self.conv2 = nn.Conv2d(24, 36, 3, padding=1, groups=2)
        self.conv3 = nn.Conv2d(36, 28, 3, padding=1)
        self.fc = nn.Linear(28 * 3 * 3, 10)

    def forward(self, x):
        x = F.max_pool2d(self.norm1(F.relu(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.conv3(x))
        return self.fc(x.flatten(1))


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or in_planes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 3

    def __init__(self, inplanes, planes, stride=1, groups=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, planes * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.shortcut = nn.Sequential()
        if stride != 1 or inplanes != planes * self.expansion:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inplanes, planes * self.expansion, 1, stride, bias=False),
                nn.BatchNorm2d(planes * self.expansion),
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + self.shortcut(x))


@hand(image())
class ResnetBasic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(12)
        self.layer1 = nn.Sequential(BasicBlock(12, 12), BasicBlock(12, 12))
        self.layer2 = nn.Sequential(BasicBlock(12, 20, 2), BasicBlock(20, 20))
        self.layer3 = nn.Sequential(BasicBlock(20, 36, 2), BasicBlock(36, 36))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(36, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


@hand(image(), name="resnet_bottleneck")
@hand(image(), name="resnext", widths=(12, 20), groups=4)
class ResnetBottleneck(nn.Module):
    def __init__(self, widths=(10, 14), groups=1):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 18, 3, padding=1, bias=False), nn.BatchNorm2d(18), nn.ReLU())
        first, second = widths
        self.layer1 = nn.Sequential(Bottleneck(18, first, 1, groups), Bottleneck(first * 3, first, 1, groups))
        self.layer2 = nn.Sequential(Bottleneck(first * 3, second, 2, groups), Bottleneck(second * 3, second, 1, groups))
        self.linear = nn.Linear(second * 3, 10)

    def forward(self, x):
        out = self.layer2(self.layer1(self.stem(x)))
        out = F.avg_pool2d(out, 8)
        out = out.view(out.size(0), -1)
        return self.linear(out)


class LambdaLayer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class OptionABlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.extra = planes - in_planes
            self.shortcut = LambdaLayer(self.pad)

    def pad(self, x):
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra // 2, self.extra // 2), "constant", 0)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


@hand(image())
class ResnetOptionA(nn.Module):
    """The CIFAR ResNet: the shortcut takes every second pixel and pads channels with zeros on both sides."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(12)
        self.layer1 = nn.Sequential(OptionABlock(12, 12))
        self.layer2 = nn.Sequential(OptionABlock(12, 20, 2), OptionABlock(20, 20))
        self.layer3 = nn.Sequential(OptionABlock(20, 36, 2))
        self.linear = nn.Linear(36, 10)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        out = F.avg_pool2d(out, out.size()[3])
        out = out.view(out.size(0), -1)
        return self.linear(out)


class DenseLayer(nn.Module):
    def __init__(self, channels, growth, bottleneck=2):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, bottleneck * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(bottleneck * growth)
        self.conv2 = nn.Conv2d(bottleneck * growth, growth, 3, padding=1, bias=False)

    def forward(self, features):
        out = self.conv1(F.relu(self.bn1(features)))
        return self.conv2(F.relu(self.bn2(out)))


@hand(image())
class DenseNetRunning(nn.Module):
    """Each layer concatenates its result with its input."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 3, padding=1)
        self.layers = nn.ModuleList([DenseLayer(10 + 8 * i, 8) for i in range(4)])
        self.head = nn.Conv2d(42, 5, 1)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([layer(x), x], dim=1)
        return self.head(x).mean(dim=(-1, -2))


class ConvBnRelu(nn.Sequential):
    def __init__(self, inp, oup, kernel=1, stride=1, groups=1, act=nn.ReLU):
        super().__init__(
            nn.Conv2d(inp, oup, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(oup), act()
        )


class DoubleConv(nn.Sequential):
    def __init__(self, inp, oup, mid=None):
        mid = mid or oup
        super().__init__(
            nn.Conv2d(inp, mid, 3, padding=1, bias=False), nn.BatchNorm2d(mid), nn.ReLU(inplace=True),
            nn.Conv2d(mid, oup, 3, padding=1, bias=False), nn.BatchNorm2d(oup), nn.ReLU(inplace=True),
        )  # fmt: skip


class Up(nn.Module):
    def __init__(self, inp, oup):
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv = DoubleConv(inp, oup, inp // 2)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        diff_y = x2.size()[2] - x1.size()[2]
        diff_x = x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [diff_x // 2, diff_x - diff_x // 2, diff_y // 2, diff_y - diff_y // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


@hand(image(size=18))
class UnetBilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.inc = DoubleConv(3, 10)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(10, 18))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(18, 26))
        self.up1 = Up(44, 14)
        self.up2 = Up(24, 12)
        self.outc = nn.Conv2d(12, 3, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        return self.outc(self.up2(self.up1(x3, x2), x1))


class AttentionGate(nn.Module):
    def __init__(self, gate, skip, inner):
        super().__init__()
        self.w_g = nn.Sequential(nn.Conv2d(gate, inner, 1), nn.BatchNorm2d(inner))
        self.w_x = nn.Sequential(nn.Conv2d(skip, inner, 1), nn.BatchNorm2d(inner))
        self.psi = nn.Sequential(nn.Conv2d(inner, 1, 1), nn.BatchNorm2d(1), nn.Sigmoid())

    def forward(self, g, x):
        return x * self.psi(F.relu(self.w_g(g) + self.w_x(x)))


@hand(image())
class AttentionUnet(nn.Module):
    """1x1 convolution gates: a map of one channel weighs all channels of the skip."""

    def __init__(self):
        super().__init__()
        self.enc1, self.enc2 = DoubleConv(3, 12), DoubleConv(12, 22)
        self.up = nn.ConvTranspose2d(22, 16, 2, 2)
        self.gate = AttentionGate(16, 12, 6)
        self.dec = DoubleConv(28, 12)
        self.out = nn.Conv2d(12, 2, 1)

    def forward(self, x):
        e1 = self.enc1(x)
        e2 = self.enc2(F.max_pool2d(e1, 2))
        up = self.up(e2)
        return self.out(self.dec(torch.cat([self.gate(up, e1), up], 1)))
