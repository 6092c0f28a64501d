"""Convolutions for phones: depthwise, inverted, shuffled."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo.convolutional import ConvBnRelu
from zoo.registry import hand, image


class InvertedResidual(nn.Module):
    def __init__(self, inp, oup, stride, expand):
        super().__init__()
        hidden = round(inp * expand)
        self.use_res_connect = stride == 1 and inp == oup
        layers = [ConvBnRelu(inp, hidden, act=nn.ReLU6)] if expand != 1 else []
        layers += [
            ConvBnRelu(hidden, hidden, 3, stride, hidden, nn.ReLU6),
            nn.Conv2d(hidden, oup, 1, bias=False),
            nn.BatchNorm2d(oup),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x):
        if self.use_res_connect:
            return x + self.conv(x)
        return self.conv(x)


@hand(image())
class MobilenetV2(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            ConvBnRelu(3, 10, 3, act=nn.ReLU6), InvertedResidual(10, 8, 1, 1), InvertedResidual(8, 14, 2, 3),
            InvertedResidual(14, 14, 1, 4), InvertedResidual(14, 18, 1, 2.5), ConvBnRelu(18, 46, act=nn.ReLU6),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(46, 10))

    def forward(self, x):
        x = self.features(x)
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1)).reshape(x.shape[0], -1)
        return self.classifier(x)


class SqueezeExcitation(nn.Module):
    """1x1 convolutions on the pooled map, as in torchvision."""

    def __init__(self, channels, squeeze, gate=nn.Sigmoid):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeeze, 1)
        self.fc2 = nn.Conv2d(squeeze, channels, 1)
        self.gate = gate()

    def forward(self, x):
        scale = x.mean((2, 3), keepdim=True)
        return self.gate(self.fc2(F.silu(self.fc1(scale)))) * x


class MbConv(nn.Module):
    def __init__(self, inp, oup, stride, expand, kernel=3, act=nn.SiLU, gate=nn.Sigmoid):
        super().__init__()
        hidden = inp * expand
        self.block = nn.Sequential(
            ConvBnRelu(inp, hidden, act=act),
            ConvBnRelu(hidden, hidden, kernel, stride, hidden, act),
            SqueezeExcitation(hidden, max(1, inp // 4), gate),
            nn.Conv2d(hidden, oup, 1, bias=False),
            nn.BatchNorm2d(oup),
        )
        self.stochastic_depth = nn.Dropout2d(0.1)
        self.residual = stride == 1 and inp == oup

    def forward(self, x):
        out = self.block(x)
        if self.residual:
            out = self.stochastic_depth(out)
            out += x
        return out


@hand(image(), name="efficientnet")
@hand(image(), name="mobilenet_v3", act=nn.Hardswish, gate=nn.Hardsigmoid)
class EfficientNet(nn.Module):
    def __init__(self, act=nn.SiLU, gate=nn.Sigmoid):
        super().__init__()
        self.features = nn.Sequential(
            ConvBnRelu(3, 12, 3, act=act), MbConv(12, 12, 1, 3, 3, act, gate), MbConv(12, 20, 2, 3, 5, act, gate),
            MbConv(20, 20, 1, 2, 5, act, gate), ConvBnRelu(20, 52, act=act),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Linear(52, 30), act(), nn.Linear(30, 10))

    def forward(self, x):
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


def channel_shuffle(x, groups):
    b, c, h, w = x.size()
    x = x.view(b, groups, c // groups, h, w)
    x = torch.transpose(x, 1, 2).contiguous()
    return x.view(b, -1, h, w)


class ShuffleUnitV1(nn.Module):
    def __init__(self, inp, oup, groups, stride):
        super().__init__()
        mid = oup // 4 // groups * groups
        self.groups, self.stride = groups, stride
        outputs = oup - inp if stride == 2 else oup
        self.conv1 = nn.Conv2d(inp, mid, 1, groups=groups, bias=False)
        self.bn1 = nn.BatchNorm2d(mid)
        self.conv2 = nn.Conv2d(mid, mid, 3, stride, 1, groups=mid, bias=False)
        self.bn2 = nn.BatchNorm2d(mid)
        self.conv3 = nn.Conv2d(mid, outputs, 1, groups=groups, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = channel_shuffle(out, self.groups)
        out = self.bn3(self.conv3(self.bn2(self.conv2(out))))
        if self.stride == 2:
            return F.relu(torch.cat([out, F.avg_pool2d(x, 3, stride=2, padding=1)], 1))
        return F.relu(out + x)


@hand(image())
class ShufflenetV1(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvBnRelu(3, 12, 3)
        self.stage = nn.Sequential(ShuffleUnitV1(12, 36, 3, 2), ShuffleUnitV1(36, 36, 3, 1))
        self.fc = nn.Linear(36, 10)

    def forward(self, x):
        return self.fc(self.stage(self.stem(x)).mean(3).mean(2))


class ShuffleUnitV2(nn.Module):
    def __init__(self, inp, oup, stride):
        super().__init__()
        self.stride = stride
        branch = oup // 2
        if stride > 1:
            self.branch1 = nn.Sequential(
                nn.Conv2d(inp, inp, 3, stride, 1, groups=inp, bias=False), nn.BatchNorm2d(inp), ConvBnRelu(inp, branch)
            )
        self.branch2 = nn.Sequential(
            ConvBnRelu(inp if stride > 1 else branch, branch),
            nn.Conv2d(branch, branch, 3, stride, 1, groups=branch, bias=False),
            nn.BatchNorm2d(branch),
            ConvBnRelu(branch, branch),
        )

    def forward(self, x):
        if self.stride == 1:
            x1, x2 = x.chunk(2, dim=1)
            out = torch.cat((x1, self.branch2(x2)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        return channel_shuffle(out, 2)


@hand(image())
class ShufflenetV2(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvBnRelu(3, 12, 3)
        self.stage = nn.Sequential(ShuffleUnitV2(12, 28, 2), ShuffleUnitV2(28, 28, 1), ShuffleUnitV2(28, 28, 1))
        self.conv5 = ConvBnRelu(28, 40)
        self.fc = nn.Linear(40, 10)

    def forward(self, x):
        return self.fc(self.conv5(self.stage(self.stem(x))).mean([2, 3]))


class GhostModule(nn.Module):
    def __init__(self, inp, oup, ratio=2):
        super().__init__()
        self.oup = oup
        init = math.ceil(oup / ratio)
        new = init * (ratio - 1)
        self.primary_conv = ConvBnRelu(inp, init)
        self.cheap_operation = ConvBnRelu(init, new, 3, groups=init)

    def forward(self, x):
        x1 = self.primary_conv(x)
        x2 = self.cheap_operation(x1)
        out = torch.cat([x1, x2], dim=1)
        return out[:, : self.oup, :, :]


@hand(image())
class GhostNet(nn.Module):
    """An odd width: the concatenation is one channel too wide and cut."""

    def __init__(self):
        super().__init__()
        self.stem = ConvBnRelu(3, 14, 3, 2)
        self.ghost1, self.ghost2, self.ghost3 = GhostModule(14, 25), GhostModule(25, 14), GhostModule(14, 30, 3)
        self.head = nn.Linear(30, 10)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.ghost2(self.ghost1(x))
        return self.head(F.adaptive_avg_pool2d(self.ghost3(x), 1)[:, :, 0, 0])
