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


@hand(image())
class CnnFlattenLiteral(nn.Module):
    """The flattened width stands in forward as a product of literals."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(12, 20, 3)
        self.fc1 = nn.Linear(20 * 2 * 2, 44)
        self.fc2 = nn.Linear(44, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 20 * 2 * 2)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


@hand(image())
def cnn_global_pooling():
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(12, 28, 3, padding=1, bias=False), nn.BatchNorm2d(28), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(28, 10),
    )  # fmt: skip


@hand(vector(14))
def mlp():
    return nn.Sequential(nn.Linear(14, 36), nn.ReLU(), nn.Linear(36, 52), nn.Tanh(), nn.Linear(52, 5))


@hand(image(size=32))
class Vgg(nn.Module):
    config = (12, "M", 20, 20, "M", 28, "M", 36, "M")

    def __init__(self):
        super().__init__()
        layers, channels = [], 3
        for value in self.config:
            if value == "M":
                layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
            else:
                layers += [nn.Conv2d(channels, value, 3, padding=1), nn.BatchNorm2d(value), nn.ReLU(inplace=True)]
                channels = value
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(36 * 2 * 2, 60), nn.ReLU(True), nn.Dropout(), nn.Linear(60, 44), nn.ReLU(True), nn.Linear(44, 10)
        )

    def forward(self, x):
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


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


class PreactivationBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1, dropout=0.0):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Conv2d(in_planes, planes, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(self.dropout(F.relu(self.bn2(out))))
        return out + shortcut


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


@hand(image(), name="resnet_preactivation")
@hand(image(), name="wide_resnet", widths=(12, 28, 44), dropout=0.3)
class ResnetPreactivation(nn.Module):
    def __init__(self, widths=(12, 20, 28), dropout=0.0):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, 1, 1, bias=False)
        planes, blocks = 12, []
        for i, width in enumerate(widths):
            blocks += [PreactivationBlock(planes, width, 1 + (i > 0), dropout), PreactivationBlock(width, width)]
            planes = width
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(planes)
        self.fc = nn.Linear(planes, 10)
        self.n_channels = planes

    def forward(self, x):
        out = F.relu(self.bn(self.blocks(self.conv(x))))
        out = F.adaptive_avg_pool2d(out, 1).view(-1, self.n_channels)
        return self.fc(out)


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
        x = torch.cat(features, 1) if isinstance(features, list) else features
        out = self.conv1(F.relu(self.bn1(x)))
        return self.conv2(F.relu(self.bn2(out)))


@hand(image())
class DenseNet(nn.Module):
    def __init__(self, growth=6):
        super().__init__()
        self.stem = nn.Conv2d(3, 14, 3, padding=1, bias=False)
        self.block1 = nn.ModuleList([DenseLayer(14 + i * growth, growth) for i in range(3)])
        self.transition = nn.Sequential(
            nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 16, 1, bias=False), nn.AvgPool2d(2)
        )
        self.block2 = nn.ModuleList([DenseLayer(16 + i * growth, growth) for i in range(3)])
        self.norm = nn.BatchNorm2d(34)
        self.classifier = nn.Linear(34, 10)

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.block1:
            features.append(layer(features))
        features = [self.transition(torch.cat(features, 1))]
        for layer in self.block2:
            features.append(layer(features))
        out = F.relu(self.norm(torch.cat(features, 1)), inplace=True)
        return self.classifier(out.mean([2, 3]))


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


class InceptionBlock(nn.Module):
    def __init__(self, channels, one, three_reduce, three, five_reduce, five, pool):
        super().__init__()
        self.branch1 = ConvBnRelu(channels, one)
        self.branch2 = nn.Sequential(ConvBnRelu(channels, three_reduce), ConvBnRelu(three_reduce, three, 3))
        self.branch3 = nn.Sequential(ConvBnRelu(channels, five_reduce), ConvBnRelu(five_reduce, five, 5))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvBnRelu(channels, pool))

    def forward(self, x):
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


@hand(image())
class Inception(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvBnRelu(3, 14, 3)
        self.a = InceptionBlock(14, 8, 6, 12, 4, 10, 6)
        self.b = InceptionBlock(36, 10, 8, 14, 6, 12, 8)
        self.dropout = nn.Dropout(0.4)
        self.fc = nn.Linear(44, 10)

    def forward(self, x):
        x = self.b(F.max_pool2d(self.a(self.stem(x)), 2))
        x = F.adaptive_avg_pool2d(x, (1, 1)).squeeze(-1).squeeze(-1)
        return self.fc(self.dropout(x))


class Fire(nn.Module):
    def __init__(self, inplanes, squeeze, expand1, expand3):
        super().__init__()
        self.squeeze = nn.Conv2d(inplanes, squeeze, 1)
        self.activation = nn.ReLU(inplace=True)
        self.expand1x1 = nn.Conv2d(squeeze, expand1, 1)
        self.expand3x3 = nn.Conv2d(squeeze, expand3, 3, padding=1)

    def forward(self, x):
        x = self.activation(self.squeeze(x))
        return torch.cat([self.activation(self.expand1x1(x)), self.activation(self.expand3x3(x))], 1)


@hand(image(size=32))
class SqueezeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 14, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(14, 6, 12, 10), Fire(22, 8, 14, 12), nn.MaxPool2d(3, 2, ceil_mode=True), Fire(26, 10, 16, 18),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(34, 10, 1), nn.ReLU(inplace=True))

    def forward(self, x):
        return self.classifier(self.features(x)).mean((2, 3))


class DoubleConv(nn.Sequential):
    def __init__(self, inp, oup, mid=None):
        mid = mid or oup
        super().__init__(
            nn.Conv2d(inp, mid, 3, padding=1, bias=False), nn.BatchNorm2d(mid), nn.ReLU(inplace=True),
            nn.Conv2d(mid, oup, 3, padding=1, bias=False), nn.BatchNorm2d(oup), nn.ReLU(inplace=True),
        )  # fmt: skip


@hand(image(size=16))
class UnetTransposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1, self.enc2, self.enc3 = DoubleConv(3, 10), DoubleConv(10, 18), DoubleConv(18, 34)
        self.pool = nn.MaxPool2d(2)
        self.up2 = nn.ConvTranspose2d(34, 22, 2, stride=2)
        self.dec2 = DoubleConv(40, 18)
        self.up1 = nn.ConvTranspose2d(18, 14, 2, stride=2)
        self.dec1 = DoubleConv(24, 10)
        self.out = nn.Conv2d(10, 2, 1)

    def forward(self, x):
        e1 = self.enc1(x)
        e2 = self.enc2(self.pool(e1))
        e3 = self.enc3(self.pool(e2))
        d2 = self.dec2(torch.cat((self.up2(e3), e2), dim=1))
        d1 = self.dec1(torch.cat((self.up1(d2), e1), dim=1))
        return torch.sigmoid(self.out(d1))


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
