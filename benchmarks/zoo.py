"""The zoo: small models, written the way people write them, on which `shrink` is checked.

    from zoo import ZOO, names
    model, inputs = ZOO["resnet_basic"]()

Law: two builds of a name are bitwise equal, and building draws nothing from the generator of the caller.

`ZOO` maps a name to a factory without arguments. It returns the module, in eval mode and float32, and its example
inputs: a tensor, a tuple of positionals or a dict of keywords, of batch 2. `names("hand")` are plain `nn.Module` code,
`names("transformers")` are architectures of transformers from small configs, offline.

Sizes differ on purpose (12, 20, 28, 36, three heads, seven tokens), so that no two dimensions are equal by accident;
the models `trap_*` do the opposite. Parameters that are initialized to a constant, and the running statistics of
normalizations, are drawn at random, so that a channel that is removed in the wrong place changes the output.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

Inputs = Tensor | tuple[Any, ...] | dict[str, Any]

ZOO: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {}
_KINDS: dict[str, str] = {}


def names(kind: str) -> list[str]:
    """The names of one kind, "hand" or "transformers", in the order in which they stand below."""
    if kind not in ("hand", "transformers"):
        raise ValueError(f'kind is "hand" or "transformers", not {kind!r}')
    return [name for name, its_kind in _KINDS.items() if its_kind == kind]


def _build(name: str, make: Callable[[], nn.Module], example: Callable[[], Inputs]) -> tuple[nn.Module, Inputs]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        model = make().eval()
        _randomize(model, _KINDS[name])
        return model, example()


@torch.no_grad()
def _randomize(model: nn.Module, kind: str) -> None:
    """Constant parameters and running statistics become random; the tiny weights of transformers become ordinary."""
    for parameter in model.parameters():
        if not parameter.is_floating_point() or parameter.numel() == 1:
            continue
        if (parameter == parameter.flatten()[0]).all():
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif kind == "transformers" and parameter.dim() > 1 and parameter.std() < 0.1:
            parameter.mul_(0.15 / parameter.std())
    for module in model.modules():
        if isinstance(getattr(module, "running_var", None), Tensor):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)


def _register(kind: str, name: str, make: Callable[[], nn.Module], example: Callable[[], Inputs]) -> None:
    if name in ZOO:
        raise ValueError(f"the zoo has two models named {name!r}")
    _KINDS[name] = kind
    ZOO[name] = functools.partial(_build, name, make, example)


def hand(example: Callable[[], Inputs], name: str | None = None, **arguments: Any) -> Callable[[Any], Any]:
    """Put a class or a function of `arguments` into the zoo, under its name in snake case unless another is given."""

    def decorate(make: Any) -> Any:
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", make.__name__).lower()
        _register("hand", name or snake, functools.partial(make, **arguments), example)
        return make

    return decorate


def image(channels: int = 3, size: int = 16) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, channels, size, size)


def signal(channels: int, length: int = 32) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, channels, length)


def sequence(width: int, length: int = 7) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, length, width)


def vector(width: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, width)


def tokens(vocabulary: int = 53, length: int = 7) -> Callable[[], Tensor]:
    return lambda: torch.randint(1, vocabulary, (2, length))


def several(*examples: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(example() for example in examples)


# --------------------------------------------------------------------------------------------------------------------
# Convolutions: plain and residual
# --------------------------------------------------------------------------------------------------------------------


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
        nn.Conv2d(3, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 28, 3, padding=1, bias=False),
        nn.BatchNorm2d(28),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(28, 10),
    )


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
            nn.Conv2d(3, 14, 3, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(14, 6, 12, 10),
            Fire(22, 8, 14, 12),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(26, 10, 16, 18),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(34, 10, 1), nn.ReLU(inplace=True))

    def forward(self, x):
        return self.classifier(self.features(x)).mean((2, 3))


class DoubleConv(nn.Sequential):
    def __init__(self, inp, oup, mid=None):
        mid = mid or oup
        super().__init__(
            nn.Conv2d(inp, mid, 3, padding=1, bias=False),
            nn.BatchNorm2d(mid),
            nn.ReLU(inplace=True),
            nn.Conv2d(mid, oup, 3, padding=1, bias=False),
            nn.BatchNorm2d(oup),
            nn.ReLU(inplace=True),
        )


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


# --------------------------------------------------------------------------------------------------------------------
# Convolutions: detection and segmentation
# --------------------------------------------------------------------------------------------------------------------


class YoloConv(nn.Module):
    default_act = nn.SiLU()

    def __init__(self, c1, c2, k=1, s=1, g=1, act=True):
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, k // 2, groups=g, bias=False)
        self.bn = nn.BatchNorm2d(c2)
        self.act = self.default_act if act is True else nn.Identity()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class YoloBottleneck(nn.Module):
    def __init__(self, c1, c2, shortcut=True, e=0.5):
        super().__init__()
        c_ = int(c2 * e)
        self.cv1 = YoloConv(c1, c_, 3)
        self.cv2 = YoloConv(c_, c2, 3)
        self.add = shortcut and c1 == c2

    def forward(self, x):
        return x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x))


class C2f(nn.Module):
    def __init__(self, c1, c2, n=1, shortcut=True, e=0.5, how="chunk"):
        super().__init__()
        self.c = int(c2 * e)
        self.cv1 = YoloConv(c1, 2 * self.c)
        self.cv2 = YoloConv((2 + n) * self.c, c2)
        self.m = nn.ModuleList(YoloBottleneck(self.c, self.c, shortcut) for _ in range(n))
        self.how = how

    def forward(self, x):
        y = self.cv1(x)
        if self.how == "chunk":
            y = list(y.chunk(2, 1))
        elif self.how == "split":
            y = list(y.split((self.c, self.c), 1))
        else:
            y = [y[:, : self.c], y[:, self.c :]]
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class C3(nn.Module):
    def __init__(self, c1, c2, n=1):
        super().__init__()
        c_ = c2 // 2
        self.cv1 = YoloConv(c1, c_)
        self.cv2 = YoloConv(c1, c_)
        self.cv3 = YoloConv(2 * c_, c2)
        self.m = nn.Sequential(*(YoloBottleneck(c_, c_, e=1.0) for _ in range(n)))

    def forward(self, x):
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class Sppf(nn.Module):
    def __init__(self, c1, c2, k=5):
        super().__init__()
        c_ = c1 // 2
        self.cv1 = YoloConv(c1, c_)
        self.cv2 = YoloConv(c_ * 4, c2)
        self.m = nn.MaxPool2d(k, 1, k // 2)

    def forward(self, x):
        x = self.cv1(x)
        y1 = self.m(x)
        y2 = self.m(y1)
        return self.cv2(torch.cat((x, y1, y2, self.m(y2)), 1))


class YoloDetect(nn.Module):
    """Boxes as distributions over bins (softmax over a reshaped channel), classes beside them, two scales."""

    def __init__(self, nc=3, bins=4, channels=(20, 28)):
        super().__init__()
        self.nc, self.bins, self.no = nc, bins, nc + 4 * bins
        self.cv2 = nn.ModuleList(
            nn.Sequential(YoloConv(c, 14, 3), YoloConv(14, 14, 3), nn.Conv2d(14, 4 * bins, 1)) for c in channels
        )
        self.cv3 = nn.ModuleList(nn.Sequential(YoloConv(c, 18, 3), nn.Conv2d(18, nc, 1)) for c in channels)
        self.dfl = nn.Conv2d(bins, 1, 1, bias=False).requires_grad_(False)

    def forward(self, xs):
        outs = [torch.cat((self.cv2[i](x), self.cv3[i](x)), 1) for i, x in enumerate(xs)]
        x_cat = torch.cat([out.view(out.shape[0], self.no, -1) for out in outs], 2)
        box, cls = x_cat.split((self.bins * 4, self.nc), 1)
        b, _, a = box.shape
        box = self.dfl(box.view(b, 4, self.bins, a).transpose(2, 1).softmax(1)).view(b, 4, a)
        return torch.cat((box, cls.sigmoid()), 1), outs


@hand(image(size=32), name="yolo_c2f_chunk")
@hand(image(size=32), name="yolo_c2f_split", how="split")
@hand(image(size=32), name="yolo_c2f_slices", how="slices")
class Yolo(nn.Module):
    def __init__(self, how="chunk"):
        super().__init__()
        self.stem = YoloConv(3, 12, 3, 2)
        self.c2f1 = C2f(12, 20, 2, how=how)
        self.down = YoloConv(20, 28, 3, 2)
        self.c2f2 = C2f(28, 28, 1, how=how)
        self.sppf = Sppf(28, 28)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.c2f3 = C2f(48, 20, 1, shortcut=False, how=how)
        self.detect = YoloDetect()

    def forward(self, x):
        p1 = self.c2f1(self.stem(x))
        p2 = self.sppf(self.c2f2(self.down(p1)))
        return self.detect([self.c2f3(torch.cat([self.upsample(p2), p1], 1)), p2])


@hand(image(size=32))
class YoloV5(nn.Module):
    """Focus by slices, C3, and anchors: view(bs, na, no, ny, nx).permute(0, 1, 3, 4, 2)."""

    def __init__(self, na=3, nc=4):
        super().__init__()
        self.na, self.no = na, nc + 5
        self.focus = YoloConv(12, 14, 3)
        self.down = YoloConv(14, 22, 3, 2)
        self.c3 = C3(22, 24, 2)
        self.head = nn.Conv2d(24, na * self.no, 1)
        self.register_buffer("anchors", torch.rand(1, na, 1, 1, 2) + 0.5)

    def forward(self, x):
        x = torch.cat((x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]), 1)
        x = self.head(self.c3(self.down(self.focus(x))))
        bs, _, ny, nx = x.shape
        x = x.view(bs, self.na, self.no, ny, nx).permute(0, 1, 3, 4, 2).contiguous()
        xy, wh, conf = x.sigmoid().split((2, 2, self.no - 4), 4)
        y = torch.cat((xy * 2, (wh * 2) ** 2 * self.anchors, conf), 4)
        return y.view(bs, self.na * nx * ny, self.no)


@hand(image(size=32))
class SsdHeads(nn.Module):
    """Two feature maps, each with its class and box head, joined along boxes."""

    def __init__(self, classes=5):
        super().__init__()
        self.classes = classes
        self.backbone = nn.Sequential(ConvBnRelu(3, 14, 3, 2), ConvBnRelu(14, 26, 3, 2))
        self.extra = ConvBnRelu(26, 34, 3, 2)
        self.loc = nn.ModuleList([nn.Conv2d(26, 4 * 4, 3, padding=1), nn.Conv2d(34, 6 * 4, 3, padding=1)])
        self.conf = nn.ModuleList([nn.Conv2d(26, 4 * classes, 3, padding=1), nn.Conv2d(34, 6 * classes, 3, padding=1)])

    def forward(self, x):
        sources = [self.backbone(x)]
        sources.append(self.extra(sources[-1]))
        loc, conf = [], []
        for x, l, c in zip(sources, self.loc, self.conf, strict=True):  # noqa: E741
            loc.append(l(x).permute(0, 2, 3, 1).contiguous())
            conf.append(c(x).permute(0, 2, 3, 1).contiguous())
        loc = torch.cat([o.view(o.size(0), -1) for o in loc], 1)
        conf = torch.cat([o.view(o.size(0), -1) for o in conf], 1)
        return {"boxes": loc.view(loc.size(0), -1, 4), "scores": conf.view(conf.size(0), -1, self.classes)}


@hand(image(size=32))
class FeaturePyramid(nn.Module):
    """Lateral connections of one width, added from the top down; one head for all levels."""

    def __init__(self):
        super().__init__()
        self.c2, self.c3, self.c4 = ConvBnRelu(3, 12, 3, 2), ConvBnRelu(12, 20, 3, 2), ConvBnRelu(20, 28, 3, 2)
        self.lateral = nn.ModuleList(nn.Conv2d(c, 18, 1) for c in (12, 20, 28))
        self.smooth = nn.ModuleList(nn.Conv2d(18, 18, 3, padding=1) for _ in range(3))
        self.head = nn.Sequential(nn.Conv2d(18, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 6, 1))

    def forward(self, x):
        c2 = self.c2(x)
        c3 = self.c3(c2)
        c4 = self.c4(c3)
        p4 = self.lateral[2](c4)
        p3 = F.interpolate(p4, size=c3.shape[-2:], mode="nearest") + self.lateral[1](c3)
        p2 = F.interpolate(p3, scale_factor=2, mode="nearest") + self.lateral[0](c2)
        return [self.head(smooth(p)) for smooth, p in zip(self.smooth, (p2, p3, p4), strict=True)]


@hand(image(size=32))
class BiFpn(nn.Module):
    """Fast normalized fusion: learned scalars weigh the maps that are added."""

    def __init__(self):
        super().__init__()
        self.c3, self.c4 = ConvBnRelu(3, 18, 3, 2), ConvBnRelu(18, 26, 3, 2)
        self.p3, self.p4 = nn.Conv2d(18, 14, 1), nn.Conv2d(26, 14, 1)
        self.w1 = nn.Parameter(torch.ones(2))
        self.w2 = nn.Parameter(torch.ones(3))
        self.td = ConvBnRelu(14, 14, 3, groups=14)
        self.bu = ConvBnRelu(14, 14, 3, groups=14)
        self.head = nn.Conv2d(14, 4, 1)

    def forward(self, x):
        c3 = self.c3(x)
        p3, p4 = self.p3(c3), self.p4(self.c4(c3))
        w = F.relu(self.w1)
        w = w / (w.sum() + 1e-4)
        td = self.td(w[0] * p3 + w[1] * F.interpolate(p4, scale_factor=2))
        v = F.relu(self.w2)
        v = v / (v.sum() + 1e-4)
        bu = self.bu(v[0] * p4 + v[1] * F.max_pool2d(td, 2) + v[2] * self.p4(self.c4(c3)))
        return self.head(td), self.head(bu)


@hand(image(size=32))
class DeepLab(nn.Module):
    """Atrous spatial pyramid with an image-level branch, and low-level features in the decoder."""

    def __init__(self):
        super().__init__()
        self.low = ConvBnRelu(3, 14, 3, 2)
        self.high = ConvBnRelu(14, 26, 3, 2)
        self.aspp = nn.ModuleList(
            [
                nn.Conv2d(26, 12, 1),
                nn.Conv2d(26, 12, 3, padding=2, dilation=2),
                nn.Conv2d(26, 10, 3, padding=3, dilation=3),
            ]
        )
        self.image_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(26, 8, 1), nn.ReLU())
        self.project = ConvBnRelu(42, 20)
        self.reduce = ConvBnRelu(14, 6)
        self.classifier = nn.Sequential(ConvBnRelu(26, 16, 3), nn.Conv2d(16, 5, 1))

    def forward(self, x):
        size = x.shape[-2:]
        low = self.low(x)
        x = self.high(low)
        res = [conv(x) for conv in self.aspp]
        pooled = F.interpolate(self.image_pool(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
        x = self.project(torch.cat([*res, pooled], dim=1))
        x = F.interpolate(x, size=low.shape[-2:], mode="bilinear", align_corners=False)
        x = self.classifier(torch.cat([x, self.reduce(low)], dim=1))
        return {"out": F.interpolate(x, size=size, mode="bilinear", align_corners=False)}


@hand(image(size=16))
class HrNet(nn.Module):
    """Two resolutions that exchange: each is the sum of itself and the other, resampled."""

    def __init__(self):
        super().__init__()
        self.stem = ConvBnRelu(3, 12, 3)
        self.to_low = ConvBnRelu(12, 22, 3, 2)
        self.high, self.low = BasicBlock(12, 12), BasicBlock(22, 22)
        self.low_to_high = nn.Sequential(nn.Conv2d(22, 12, 1, bias=False), nn.BatchNorm2d(12))
        self.high_to_low = nn.Sequential(nn.Conv2d(12, 22, 3, 2, 1, bias=False), nn.BatchNorm2d(22))
        self.head = nn.Conv2d(34, 7, 1)

    def forward(self, x):
        high = self.stem(x)
        low = self.low(self.to_low(high))
        high = self.high(high)
        height, width = high.shape[2:]
        up = F.interpolate(self.low_to_high(low), size=(height, width), mode="bilinear", align_corners=True)
        high, low = F.relu(high + up), F.relu(low + self.high_to_low(high))
        low = F.interpolate(low, size=(height, width), mode="bilinear", align_corners=True)
        return self.head(torch.cat([high, low], 1))


# --------------------------------------------------------------------------------------------------------------------
# Convolutions: mobile
# --------------------------------------------------------------------------------------------------------------------


@hand(image())
def mobilenet_v1():
    def separable(inp, oup, stride):
        return nn.Sequential(ConvBnRelu(inp, inp, 3, stride, groups=inp), ConvBnRelu(inp, oup))

    return nn.Sequential(
        ConvBnRelu(3, 12, 3),
        separable(12, 20, 1),
        separable(20, 28, 2),
        separable(28, 36, 1),
        nn.AvgPool2d(8),
        nn.Flatten(),
        nn.Linear(36, 10),
    )


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
            ConvBnRelu(3, 10, 3, act=nn.ReLU6),
            InvertedResidual(10, 8, 1, 1),
            InvertedResidual(8, 14, 2, 3),
            InvertedResidual(14, 14, 1, 4),
            InvertedResidual(14, 18, 1, 2.5),
            ConvBnRelu(18, 46, act=nn.ReLU6),
        )
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
            ConvBnRelu(3, 12, 3, act=act),
            MbConv(12, 12, 1, 3, 3, act, gate),
            MbConv(12, 20, 2, 3, 5, act, gate),
            MbConv(20, 20, 1, 2, 5, act, gate),
            ConvBnRelu(20, 52, act=act),
        )
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


# --------------------------------------------------------------------------------------------------------------------
# Convolutions: pixels, groups, branches
# --------------------------------------------------------------------------------------------------------------------


@hand(image(1, 12))
class Espcn(nn.Module):
    """Super-resolution: channels become pixels at the end, and once in the middle."""

    def __init__(self, scale=2):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 22, 5, padding=2)
        self.conv2 = nn.Conv2d(22, 20, 3, padding=1)
        self.shuffle = nn.PixelShuffle(scale)
        self.conv3 = nn.Conv2d(5, 14, 3, padding=1)
        self.conv4 = nn.Conv2d(14, scale**2, 3, padding=1)

    def forward(self, x):
        x = torch.tanh(self.conv1(x))
        x = torch.tanh(self.shuffle(self.conv2(x)))
        return torch.sigmoid(F.pixel_shuffle(self.conv4(F.leaky_relu(self.conv3(x), 0.1)), 2))


@hand(image())
class SpaceToDepth(nn.Module):
    """Pixels become channels: by pixel_unshuffle, and by view and permute."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 10, 3, padding=1)
        self.conv2 = nn.Conv2d(40, 14, 3, padding=1)
        self.conv3 = nn.Conv2d(56, 18, 1)
        self.fc = nn.Linear(18, 10)

    def forward(self, x):
        x = F.pixel_unshuffle(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x))
        b, c, h, w = x.shape
        x = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4).reshape(b, 4 * c, h // 2, w // 2)
        return self.fc(F.relu(self.conv3(x)).amax(dim=(2, 3)))


@hand(image())
def depthwise_multiplier():
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 36, 3, padding=1, groups=12),
        nn.BatchNorm2d(36),
        nn.ReLU(),
        nn.Conv2d(36, 22, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Linear(22, 6),
    )


@hand(image())
class GroupedTransposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 24, 4, 2, 1)
        self.up1 = nn.ConvTranspose2d(24, 18, 4, 2, 1, groups=3)
        self.up2 = nn.ConvTranspose2d(18, 18, 3, 1, 1, groups=18, bias=False)
        self.out = nn.Conv2d(18, 3, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.out(F.elu(self.up2(F.elu(self.up1(F.elu(self.down(x))))))))


class RepVggBlock(nn.Module):
    def __init__(self, inp, oup, stride=1):
        super().__init__()
        self.rbr_dense = nn.Sequential(nn.Conv2d(inp, oup, 3, stride, 1, bias=False), nn.BatchNorm2d(oup))
        self.rbr_1x1 = nn.Sequential(nn.Conv2d(inp, oup, 1, stride, bias=False), nn.BatchNorm2d(oup))
        self.rbr_identity = nn.BatchNorm2d(inp) if inp == oup and stride == 1 else None

    def forward(self, x):
        identity = 0 if self.rbr_identity is None else self.rbr_identity(x)
        return F.relu(self.rbr_dense(x) + self.rbr_1x1(x) + identity)


@hand(image())
def rep_vgg():
    return nn.Sequential(
        RepVggBlock(3, 12),
        RepVggBlock(12, 12),
        RepVggBlock(12, 26, 2),
        RepVggBlock(26, 26),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(26, 10),
    )


class Res2Block(nn.Module):
    def __init__(self, channels, width, scale):
        super().__init__()
        self.width, self.scale = width, scale
        self.conv1 = ConvBnRelu(channels, width * scale)
        self.convs = nn.ModuleList([ConvBnRelu(width, width, 3) for _ in range(scale - 1)])
        self.conv3 = nn.Sequential(nn.Conv2d(width * scale, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        parts = torch.split(self.conv1(x), self.width, 1)
        out = sp = parts[0]
        for i, conv in enumerate(self.convs):
            sp = conv(parts[i + 1] if i == 0 else sp + parts[i + 1])
            out = torch.cat((out, sp), 1)
        return F.relu(self.conv3(out) + x)


@hand(image())
def res2net():
    return nn.Sequential(
        ConvBnRelu(3, 22, 3),
        Res2Block(22, 6, 4),
        Res2Block(22, 8, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(22, 10),
    )


@hand(image())
class OctaveConvolution(nn.Module):
    """Channels at two resolutions, each computed from both."""

    def __init__(self):
        super().__init__()
        self.stem_h, self.stem_l = nn.Conv2d(3, 14, 3, padding=1), nn.Conv2d(3, 10, 3, padding=1)
        self.hh, self.hl = nn.Conv2d(14, 18, 3, padding=1), nn.Conv2d(14, 8, 3, padding=1)
        self.lh, self.ll = nn.Conv2d(10, 18, 3, padding=1), nn.Conv2d(10, 8, 3, padding=1)
        self.bn_h, self.bn_l = nn.BatchNorm2d(18), nn.BatchNorm2d(8)
        self.fc = nn.Linear(26, 10)

    def forward(self, x):
        h, l = self.stem_h(x), self.stem_l(F.avg_pool2d(x, 2))  # noqa: E741
        high = self.bn_h(self.hh(h) + F.interpolate(self.lh(l), scale_factor=2, mode="nearest")).relu()
        low = self.bn_l(self.ll(l) + self.hl(F.avg_pool2d(h, 2))).relu()
        return self.fc(torch.cat([high.mean((2, 3)), low.mean((2, 3))], dim=-1))


@hand(image())
class CspNet(nn.Module):
    """Half of the channels by a literal slice go through the block, the others pass by."""

    def __init__(self):
        super().__init__()
        self.stem = ConvBnRelu(3, 24, 3)
        self.block = nn.Sequential(ConvBnRelu(14, 18, 3), ConvBnRelu(18, 14, 3))
        self.transition = ConvBnRelu(24, 20)
        self.fc = nn.Linear(20, 10)

    def forward(self, x):
        x = self.stem(x)
        a, b = x[:, :10], x[:, 10:]
        x = self.transition(torch.cat([a, self.block(b) + b], 1))
        return self.fc(x.mean(-1).mean(-1))


@hand(image())
class SelectiveKernel(nn.Module):
    """Softmax over branches, stacked in a new dimension."""

    def __init__(self, channels=18, branches=2):
        super().__init__()
        self.stem = ConvBnRelu(3, 16, 3)
        self.branches = branches
        self.channels = channels
        self.convs = nn.ModuleList([ConvBnRelu(16, channels, 3), ConvBnRelu(16, channels, 5)])
        self.fc = nn.Linear(channels, 6)
        self.fcs = nn.ModuleList([nn.Linear(6, channels) for _ in range(branches)])
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        x = self.stem(x)
        feats = torch.stack([conv(x) for conv in self.convs], dim=1)
        z = self.fc(feats.sum(1).mean((2, 3)))
        weights = torch.stack([fc(z) for fc in self.fcs], dim=1).softmax(1)
        out = (feats * weights.view(-1, self.branches, self.channels, 1, 1)).sum(dim=1)
        return self.head(out.mean((-2, -1)))


@hand(image())
class SplitAttention(nn.Module):
    """ResNeSt: grouped convolution to radix times channels, softmax over the radix."""

    def __init__(self, channels=20, radix=2):
        super().__init__()
        self.radix = radix
        self.stem = ConvBnRelu(3, 12, 3)
        self.conv = ConvBnRelu(12, channels * radix, 3, groups=radix)
        self.fc1 = nn.Conv2d(channels, 10, 1)
        self.fc2 = nn.Conv2d(10, channels * radix, 1)
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        x = self.conv(self.stem(x))
        batch, rchannel = x.shape[:2]
        splits = torch.split(x, rchannel // self.radix, dim=1)
        gap = F.adaptive_avg_pool2d(sum(splits), 1)
        atten = self.fc2(F.relu(self.fc1(gap)))
        atten = F.softmax(atten.view(batch, 1, self.radix, -1).transpose(1, 2), dim=1).reshape(batch, -1, 1, 1)
        attens = torch.split(atten, rchannel // self.radix, dim=1)
        out = sum(att * split for att, split in zip(attens, splits, strict=True)).contiguous()
        return self.head(out.mean((2, 3)))


@hand(image())
class CondConv(nn.Module):
    """Kernels mixed from experts by the input: batch and channels are folded into groups."""

    def __init__(self, inp=12, oup=20, experts=3):
        super().__init__()
        self.stem = nn.Conv2d(3, inp, 3, padding=1)
        self.route = nn.Linear(inp, experts)
        self.weight = nn.Parameter(torch.randn(experts, oup, inp, 3, 3) * 0.1)
        self.head = nn.Linear(oup, 10)
        self.inp, self.oup = inp, oup

    def forward(self, x):
        x = F.relu(self.stem(x))
        b, c, h, w = x.shape
        mix = torch.softmax(self.route(x.mean((2, 3))), 1)
        weight = (mix @ self.weight.view(self.weight.size(0), -1)).view(b * self.oup, self.inp, 3, 3)
        out = F.conv2d(x.reshape(1, b * c, h, w), weight, padding=1, groups=b)
        return self.head(F.relu(out.view(b, self.oup, h, w)).mean((2, 3)))


@hand(several(image(14, 8), vector(9)))
class StyleModulatedConv(nn.Module):
    """StyleGAN 2: the weight is scaled per input by the style and normalized."""

    def __init__(self):
        super().__init__()
        self.to_style1, self.to_style2 = nn.Linear(9, 14), nn.Linear(9, 22)
        self.weight1 = nn.Parameter(torch.randn(22, 14, 3, 3) * 0.1)
        self.weight2 = nn.Parameter(torch.randn(3, 22, 3, 3) * 0.1)
        self.noise = nn.Parameter(torch.zeros(1, 22, 1, 1))

    @staticmethod
    def modulate(x, weight, style):
        b, c, h, w = x.shape
        weight = weight[None] * (style[:, None, :, None, None] + 1)
        weight = weight * torch.rsqrt(weight.pow(2).sum(dim=(2, 3, 4), keepdim=True) + 1e-8)
        out = F.conv2d(x.reshape(1, -1, h, w), weight.reshape(-1, c, 3, 3), padding=1, groups=b)
        return out.reshape(b, -1, h, w)

    def forward(self, x, w):
        x = F.leaky_relu(self.modulate(x, self.weight1, self.to_style1(w)) + self.noise, 0.2)
        return self.modulate(x, self.weight2, self.to_style2(w))


@hand(vector(20))
class DcganGenerator(nn.Module):
    def __init__(self, latent=20, width=10):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(latent, width * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(width * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(width * 4, width * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(width * 2, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z[:, :, None, None])


@hand(image())
class DcganDiscriminator(nn.Module):
    """Minibatch standard deviation appends one channel."""

    def __init__(self):
        super().__init__()
        self.conv1 = parametrizations.spectral_norm(nn.Conv2d(3, 14, 4, 2, 1))
        self.conv2 = parametrizations.spectral_norm(nn.Conv2d(14, 26, 4, 2, 1))
        self.conv3 = nn.Conv2d(27, 1, 4)

    def forward(self, x):
        x = F.leaky_relu(self.conv2(F.leaky_relu(self.conv1(x), 0.2)), 0.2)
        std = x.std(dim=0, unbiased=False).mean().expand(x.size(0), 1, x.size(2), x.size(3))
        return self.conv3(torch.cat([x, std], 1)).view(-1)


@hand(image())
class CoordConv(nn.Module):
    """Two channels of coordinates are appended before each convolution."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(5, 18, 3, padding=1), nn.Conv2d(20, 26, 3, padding=1)
        self.fc = nn.Linear(26, 4)

    @staticmethod
    def coordinates(x):
        b, _, h, w = x.shape
        ys = torch.linspace(-1, 1, h, dtype=x.dtype, device=x.device).view(1, 1, h, 1).expand(b, 1, h, w)
        xs = torch.linspace(-1, 1, w, dtype=x.dtype, device=x.device).view(1, 1, 1, w).expand(b, 1, h, w)
        return torch.cat([x, ys, xs], dim=1)

    def forward(self, x):
        x = F.relu(self.conv1(self.coordinates(x)))
        x = F.relu(self.conv2(self.coordinates(x)))
        return self.fc(x.flatten(2).max(-1).values)


@hand(signal(5, 24))
def conv1d_net():
    return nn.Sequential(
        nn.Conv1d(5, 14, 5, padding=2),
        nn.BatchNorm1d(14),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(14, 22, 3, padding=1, dilation=1),
        nn.BatchNorm1d(22),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(22 * 12, 34),
        nn.BatchNorm1d(34),
        nn.ReLU(),
        nn.Linear(34, 4),
    )


@hand(lambda: torch.randn(2, 1, 8, 8, 8))
class Conv3dNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv3d(1, 10, 3, padding=1), nn.BatchNorm3d(10)
        self.conv2, self.bn2 = nn.Conv3d(10, 18, (3, 1, 1), padding=(1, 0, 0)), nn.BatchNorm3d(18)
        self.up = nn.ConvTranspose3d(18, 12, 2, 2)
        self.fc = nn.Linear(12, 6)

    def forward(self, x):
        x = F.max_pool3d(F.relu(self.bn1(self.conv1(x))), 2)
        x = self.up(F.relu(self.bn2(self.conv2(x))))
        return self.fc(F.adaptive_avg_pool3d(x, 1).view(x.shape[0], -1))


# --------------------------------------------------------------------------------------------------------------------
# Attention over channels, scaling, conditioning
# --------------------------------------------------------------------------------------------------------------------


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


@hand(image())
class CoordinateAttention(nn.Module):
    """Rows and columns pooled, joined along space, convolved, split again by sizes."""

    def __init__(self):
        super().__init__()
        self.stem = ConvBnRelu(3, 20, 3, 2)
        self.conv1, self.bn1 = nn.Conv2d(20, 8, 1), nn.BatchNorm2d(8)
        self.conv_h, self.conv_w = nn.Conv2d(8, 20, 1), nn.Conv2d(8, 20, 1)
        self.fc = nn.Linear(20, 10)

    def forward(self, x):
        x = self.stem(x)
        _, _, h, w = x.size()
        x_h = x.mean(3, keepdim=True)
        x_w = x.mean(2, keepdim=True).permute(0, 1, 3, 2)
        y = F.hardswish(self.bn1(self.conv1(torch.cat([x_h, x_w], dim=2))))
        x_h, x_w = torch.split(y, [h, w], dim=2)
        out = x * self.conv_w(x_w.permute(0, 1, 3, 2)).sigmoid() * self.conv_h(x_h).sigmoid()
        return self.fc(out.mean((2, 3)))


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
