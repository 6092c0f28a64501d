"""The zoo: small models, written the way people write them, on which `shrink` is checked.

    from zoo import ZOO, names
    model, inputs = ZOO["resnet_basic"]()

Law: two builds of a name are bitwise equal, and building draws nothing from the generator of the caller.

`ZOO` maps a name to a factory without arguments. It returns the module, in eval mode and float32, and its example
inputs: a tensor, a tuple of positionals or a dict of keywords, of batch 2. `names("hand")` are plain `nn.Module` code,
`names("transformers")` are architectures of transformers from small configs, offline.

Sizes differ on purpose (12, 20, 28, 36, three heads, seven tokens), so that no two dimensions are equal by accident;
the models `trap_*` do the opposite. Parameters that are initialized to a constant are drawn at random, and batch
normalizations hold the statistics of the example inputs, disturbed, so that a channel removed in the wrong place
changes the output. Parts of Mamba compute in float32 in a float64 model too.
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
        inputs = example()
        _settle(model, inputs)
        return model, inputs


@torch.no_grad()
def _randomize(model: nn.Module, kind: str) -> None:
    """Constant parameters and running statistics become random; the small weights of transformers become ordinary."""
    for parameter in model.parameters():
        if not parameter.is_floating_point() or parameter.numel() == 1:
            continue
        if (parameter == parameter.flatten()[0]).all():
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif kind == "transformers" and parameter.dim() > 1:
            # what keeps the variance through ReLU, so that the first layer is still seen in the output of a deep model
            target = max(0.15, math.sqrt(1.5 * parameter.shape[0] / parameter.numel()))
            if parameter.std() < 0.7 * target:
                parameter.mul_(target / parameter.std())
    for module in model.modules():
        if isinstance(getattr(module, "running_var", None), Tensor):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)


@torch.no_grad()
def _settle(model: nn.Module, inputs: Inputs) -> None:
    """Batch normalizations get the statistics of `inputs`, disturbed; else the signal of a deep model would vanish."""

    def take_statistics(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        var, mean = torch.var_mean(arguments[0].transpose(0, 1).flatten(1), dim=1)
        square = var + mean**2
        var = torch.maximum(var, 0.02 * square + 1e-3 * square.mean())  # two inputs alike are not blown up
        module.running_mean.copy_(mean + 0.3 * var.sqrt() * torch.randn_like(mean))
        module.running_var.copy_(var * (0.5 + 1.5 * torch.rand_like(var)))

    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(take_statistics) for norm in norms]
    if norms:
        run(model, inputs)
    for hook in hooks:
        hook.remove()


def run(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output for inputs in any of the three forms."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


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


# --------------------------------------------------------------------------------------------------------------------
# Recurrence and time
# --------------------------------------------------------------------------------------------------------------------


@hand(tokens(), name="lstm_classifier")
@hand(tokens(), name="lstm_two_layers", layers=2)
@hand(tokens(), name="lstm_bidirectional", layers=2, bidirectional=True)
@hand(tokens(), name="gru_classifier", cell=nn.GRU)
@hand(tokens(), name="gru_bidirectional", cell=nn.GRU, bidirectional=True)
@hand(tokens(), name="rnn_classifier", cell=nn.RNN)
class RecurrentClassifier(nn.Module):
    def __init__(self, cell=nn.LSTM, layers=1, bidirectional=False):
        super().__init__()
        self.embedding = nn.Embedding(53, 18, padding_idx=0)
        self.rnn = cell(18, 22, num_layers=layers, batch_first=True, bidirectional=bidirectional)
        self.fc1 = nn.Linear(22 * (1 + bidirectional), 14)
        self.fc2 = nn.Linear(14, 4)

    def forward(self, x):
        out, _ = self.rnn(self.embedding(x))
        return self.fc2(F.relu(self.fc1(out[:, -1, :])))


@hand(sequence(9))
class LstmLastHidden(nn.Module):
    """Time first, an initial state from zeros, the last hidden states of both directions concatenated."""

    def __init__(self, hidden=20):
        super().__init__()
        self.hidden = hidden
        self.lstm = nn.LSTM(9, hidden, bidirectional=True)
        self.norm = nn.LayerNorm(2 * hidden)
        self.fc = nn.Linear(2 * hidden, 3)

    def forward(self, x):
        x = x.transpose(0, 1)
        h0 = torch.zeros(2, x.size(1), self.hidden, dtype=x.dtype)
        c0 = torch.zeros(2, x.size(1), self.hidden, dtype=x.dtype)
        _, (hn, _) = self.lstm(x, (h0, c0))
        return self.fc(self.norm(torch.cat((hn[-2], hn[-1]), dim=1)))


@hand(sequence(11))
class LstmCellLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(11, 22), nn.LSTMCell(22, 18)
        self.linear = nn.Linear(18, 1)

    def forward(self, x):
        outputs = []
        h1 = c1 = torch.zeros(x.size(0), 22, dtype=x.dtype)
        h2 = c2 = x.new_zeros(x.size(0), self.lstm2.hidden_size)
        for step in x.split(1, dim=1):
            h1, c1 = self.lstm1(step.squeeze(1), (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


@hand(sequence(10))
class GruByHand(nn.Module):
    """One matrix for all gates, chunked in three."""

    def __init__(self, hidden=18):
        super().__init__()
        self.hidden_size = hidden
        self.x2h, self.h2h = nn.Linear(10, 3 * hidden), nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, 4)

    def forward(self, x):
        h = torch.zeros(x.shape[0], self.hidden_size, dtype=x.dtype)
        for t in range(x.shape[1]):
            i_r, i_i, i_n = self.x2h(x[:, t]).chunk(3, 1)
            h_r, h_i, h_n = self.h2h(h).chunk(3, 1)
            reset, update = torch.sigmoid(i_r + h_r), torch.sigmoid(i_i + h_i)
            new = torch.tanh(i_n + reset * h_n)
            h = new + update * (h - new)
        return self.out(h)


@hand(lambda: torch.randn(2, 3, 4, 8, 8))
class ConvLstm(nn.Module):
    def __init__(self, hidden=14):
        super().__init__()
        self.hidden_dim = hidden
        self.conv = nn.Conv2d(4 + hidden, 4 * hidden, 3, padding=1)
        self.head = nn.Conv2d(hidden, 1, 1)

    def forward(self, x):
        b, t, _, height, width = x.size()
        h = torch.zeros(b, self.hidden_dim, height, width, dtype=x.dtype)
        c = torch.zeros(b, self.hidden_dim, height, width, dtype=x.dtype)
        for i in range(t):
            gates = self.conv(torch.cat([x[:, i], h], dim=1))
            cc_i, cc_f, cc_o, cc_g = torch.split(gates, self.hidden_dim, dim=1)
            c = torch.sigmoid(cc_f) * c + torch.sigmoid(cc_i) * torch.tanh(cc_g)
            h = torch.sigmoid(cc_o) * torch.tanh(c)
        return self.head(h)


@hand(several(tokens(53, 7), tokens(47, 5)))
class Seq2seqAttention(nn.Module):
    """Bahdanau attention in a loop over the words of the target."""

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(53, 14), nn.Embedding(47, 16)
        self.encoder = nn.GRU(14, 18, batch_first=True)
        self.wa, self.ua, self.va = nn.Linear(18, 12), nn.Linear(18, 12), nn.Linear(12, 1)
        self.cell = nn.GRUCell(16 + 18, 18)
        self.out = nn.Linear(18, 47)

    def forward(self, source, target):
        keys, hidden = self.encoder(self.source(source))
        hidden = hidden.squeeze(0)
        outputs = []
        for t in range(target.size(1)):
            scores = self.va(torch.tanh(self.wa(hidden.unsqueeze(1)) + self.ua(keys)))
            context = torch.bmm(F.softmax(scores.squeeze(2), dim=-1).unsqueeze(1), keys).squeeze(1)
            hidden = self.cell(torch.cat((self.target(target[:, t]), context), dim=1), hidden)
            outputs.append(self.out(hidden))
        return torch.stack(outputs, 1)


@hand(lambda: torch.randn(2, 1, 16, 24))
class Crnn(nn.Module):
    """Text recognition: channels and height are one feature of each column."""

    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(ConvBnRelu(1, 10, 3), nn.MaxPool2d(2), ConvBnRelu(10, 14, 3), nn.MaxPool2d((4, 1)))
        self.rnn = nn.LSTM(14 * 2, 18, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(36, 11)

    def forward(self, x):
        x = self.cnn(x)
        b, c, h, w = x.shape
        x = x.permute(0, 3, 1, 2).reshape(b, w, c * h)
        return F.log_softmax(self.fc(self.rnn(x)[0]), dim=2)


@hand(tokens(length=9))
class TextCnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(53, 18)
        self.convs = nn.ModuleList([nn.Conv2d(1, 10, (k, 18)) for k in (2, 3, 4)])
        self.dropout = nn.Dropout(0.5)
        self.fc1 = nn.Linear(3 * 10, 5)

    def forward(self, x):
        x = self.embed(x).unsqueeze(1)
        x = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        x = [F.max_pool1d(i, i.size(2)).squeeze(2) for i in x]
        return self.fc1(self.dropout(torch.cat(x, 1)))


class Chomp1d(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return x[:, :, : -self.size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, inp, oup, dilation):
        super().__init__()
        self.net = nn.Sequential(
            parametrizations.weight_norm(nn.Conv1d(inp, oup, 3, padding=2 * dilation, dilation=dilation)),
            Chomp1d(2 * dilation),
            nn.ReLU(),
            nn.Dropout(0.2),
            parametrizations.weight_norm(nn.Conv1d(oup, oup, 3, padding=2 * dilation, dilation=dilation)),
            Chomp1d(2 * dilation),
            nn.ReLU(),
        )
        self.downsample = nn.Conv1d(inp, oup, 1) if inp != oup else None

    def forward(self, x):
        res = x if self.downsample is None else self.downsample(x)
        return F.relu(self.net(x) + res)


@hand(signal(5, 24))
class Tcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(TemporalBlock(5, 14, 1), TemporalBlock(14, 22, 2), TemporalBlock(22, 22, 4))
        self.linear = nn.Linear(22, 3)

    def forward(self, x):
        return self.linear(self.network(x)[:, :, -1])


@hand(signal(1, 40), name="wavenet")
@hand(signal(1, 40), name="wavenet_fused", fused=True)
class WaveNet(nn.Module):
    """Dilated gated convolutions; each layer adds to the residual stream and to the skips."""

    def __init__(self, residual=14, skip=22, fused=False):
        super().__init__()
        self.start = nn.Conv1d(1, residual, 1)
        self.fused = fused
        if fused:
            self.gates = nn.ModuleList([nn.Conv1d(residual, 36, 2, dilation=2**i) for i in range(3)])
        else:
            self.filter_convs = nn.ModuleList([nn.Conv1d(residual, 18, 2, dilation=2**i) for i in range(3)])
            self.gate_convs = nn.ModuleList([nn.Conv1d(residual, 18, 2, dilation=2**i) for i in range(3)])
        self.residuals = nn.ModuleList([nn.Conv1d(18, residual, 1) for _ in range(3)])
        self.skips = nn.ModuleList([nn.Conv1d(18, skip, 1) for _ in range(3)])
        self.end1, self.end2 = nn.Conv1d(skip, 26, 1), nn.Conv1d(26, 8, 1)

    def forward(self, x):
        x = self.start(x)
        skip = None
        for i in range(3):
            if self.fused:
                a, b = self.gates[i](x).chunk(2, dim=1)
                out = torch.tanh(a) * torch.sigmoid(b)
            else:
                out = torch.tanh(self.filter_convs[i](x)) * torch.sigmoid(self.gate_convs[i](x))
            s = self.skips[i](out)
            skip = s if skip is None else s + skip[:, :, -s.size(2) :]
            x = self.residuals[i](out) + x[:, :, -out.size(2) :]
        return self.end2(F.relu(self.end1(F.relu(skip))))


@hand(sequence(20, 11))
class ConformerConvolution(nn.Module):
    """Pointwise convolution into nn.GLU, a depthwise one, BatchNorm, SiLU; half-step feed-forward around."""

    def __init__(self, width=20, inner=26):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 44), nn.SiLU(), nn.Dropout(0.1), nn.Linear(44, width))
        self.pointwise1 = nn.Conv1d(width, 2 * inner, 1)
        self.depthwise = nn.Conv1d(inner, inner, 5, padding=2, groups=inner)
        self.bn = nn.BatchNorm1d(inner)
        self.pointwise2 = nn.Conv1d(inner, width, 1)

    def forward(self, x):
        x = x + 0.5 * self.ff(self.norm1(x))
        y = self.norm2(x).transpose(1, 2)
        y = F.glu(self.pointwise1(y), dim=1)
        y = self.pointwise2(F.silu(self.bn(self.depthwise(y)))).transpose(1, 2)
        return x + y


@hand(lambda: torch.randn(6, 3, 8, 8).view(2, 3, 3, 8, 8))
class TemporalShift(nn.Module):
    """Frames lend slices of channels to their neighbours, by assignment in place."""

    def __init__(self, n_segment=3, fold_div=4):
        super().__init__()
        self.n_segment, self.fold_div = n_segment, fold_div
        self.conv1, self.conv2 = nn.Conv2d(3, 20, 3, padding=1), nn.Conv2d(20, 14, 3, padding=1)
        self.fc = nn.Linear(14, 5)

    def shift(self, x):
        nt, c, h, w = x.size()
        x = x.view(nt // self.n_segment, self.n_segment, c, h, w)
        fold = c // self.fold_div
        out = torch.zeros_like(x)
        out[:, :-1, :fold] = x[:, 1:, :fold]
        out[:, 1:, fold : 2 * fold] = x[:, :-1, fold : 2 * fold]
        out[:, :, 2 * fold :] = x[:, :, 2 * fold :]
        return out.view(nt, c, h, w)

    def forward(self, x):
        b, t = x.shape[:2]
        x = x.flatten(0, 1)
        x = F.relu(self.conv2(self.shift(F.relu(self.conv1(x)))))
        return self.fc(x.mean((2, 3))).view(b, t, -1).mean(1)


# --------------------------------------------------------------------------------------------------------------------
# Attention
# --------------------------------------------------------------------------------------------------------------------


@hand(sequence(21))
class MultiheadSelf(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(21, 24)
        self.attn = nn.MultiheadAttention(24, 3, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.ff = nn.Sequential(nn.Linear(24, 44), nn.ReLU(), nn.Linear(44, 24))
        self.out = nn.Linear(24, 5)

    def forward(self, x):
        x = self.proj(x)
        x = self.norm(x + self.attn(x, x, x, need_weights=False)[0])
        return self.out(x + self.ff(x))


@hand(several(sequence(24), sequence(15, 9)))
class MultiheadCross(nn.Module):
    """Keys and values of other widths; the weights are an output too."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(24, 28)
        self.attn = nn.MultiheadAttention(28, 4, kdim=15, vdim=15, batch_first=True)
        self.out = nn.Linear(28, 6)

    def forward(self, x, memory):
        out, weights = self.attn(self.query(x), memory, memory)
        return self.out(out), weights


@hand(tokens(), name="transformer_encoder")
@hand(tokens(), name="transformer_encoder_prenorm", norm_first=True, activation="gelu")
class TransformerEncoder(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.embedding = nn.Embedding(53, 24)
        self.position = nn.Parameter(torch.randn(1, 32, 24) * 0.1)
        layer = nn.TransformerEncoderLayer(24, 3, 44, batch_first=True, **arguments)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(24, 4)

    def forward(self, x):
        x = self.embedding(x) * math.sqrt(24) + self.position[:, : x.size(1)]
        return self.classifier(self.encoder(x).mean(dim=1))


@hand(several(tokens(53, 7), tokens(47, 5)))
class TransformerSeq2seq(nn.Module):
    """nn.Transformer with a causal mask and positions from a buffer."""

    def __init__(self, width=20):
        super().__init__()
        self.d_model = width
        self.source, self.target = nn.Embedding(53, width), nn.Embedding(47, width)
        position = torch.arange(16).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        pe = torch.zeros(1, 16, width)
        pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        self.register_buffer("pe", pe)
        self.transformer = nn.Transformer(width, 4, 1, 1, dim_feedforward=36, batch_first=True)
        self.generator = nn.Linear(width, 47)

    def forward(self, source, target):
        source = self.source(source) * math.sqrt(self.d_model)
        target = self.target(target) * math.sqrt(self.d_model)
        source, target = source + self.pe[:, : source.size(1)], target + self.pe[:, : target.size(1)]
        mask = torch.triu(torch.full((target.size(1), target.size(1)), float("-inf"), dtype=source.dtype), diagonal=1)
        return self.generator(self.transformer(source, target, tgt_mask=mask))


class Attention(nn.Module):
    """Causal self-attention from one fused matrix, taken apart in one of the ways that people write."""

    def __init__(self, width, heads, head_dim=None, how="split", block=16):
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim or width // heads
        self.inner = self.heads * self.head_dim
        self.c_attn = nn.Linear(width, 3 * self.inner, bias=how != "einsum")
        self.c_proj = nn.Linear(self.inner, width)
        self.attn_dropout, self.scale = nn.Dropout(0.1), self.head_dim**-0.5
        self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))
        self.how = how

    def heads_of(self, x):
        B, T, _ = x.size()
        qkv = self.c_attn(x)
        if self.how == "split":  # minGPT
            q, k, v = qkv.split(self.inner, dim=2)
            return tuple(t.view(B, T, self.heads, t.size(2) // self.heads).transpose(1, 2) for t in (q, k, v))
        if self.how == "chunk":
            q, k, v = qkv.chunk(3, dim=-1)
            return tuple(t.view(B, T, self.heads, self.head_dim).permute(0, 2, 1, 3) for t in (q, k, v))
        if self.how == "permute":  # timm
            return qkv.reshape(B, T, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        if self.how == "interleaved":  # NeoX: each head holds its query, key and value
            qkv = qkv.view(B, T, self.heads, 3 * self.head_dim).transpose(1, 2)
            return qkv.split(self.head_dim, dim=-1)
        if self.how == "slices":
            q, k, v = qkv[..., : self.inner], qkv[..., self.inner : 2 * self.inner], qkv[..., 2 * self.inner :]
            return tuple(t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        if self.how == "minus_one":
            return tuple(t.view(B, T, -1, self.head_dim).transpose(1, 2) for t in torch.tensor_split(qkv, 3, dim=-1))
        raise ValueError(self.how)

    def forward(self, x):
        B, T, _ = x.size()
        if self.how == "einsum":
            w = self.c_attn.weight.view(3, self.heads, self.head_dim, -1)
            q, k, v = torch.einsum("btc,nhdc->nbhtd", x, w)
            att = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")).softmax(-1)
            y = torch.einsum("bhij,bhjd->bihd", att, v).flatten(2)
            return self.c_proj(y)
        q, k, v = self.heads_of(x)
        if self.how in ("chunk", "slices"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * self.scale
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, self.inner)
        return self.c_proj(y)


@hand(tokens(), name="gpt_split")
@hand(tokens(), name="gpt_chunk", how="chunk")
@hand(tokens(), name="gpt_permute", how="permute")
@hand(tokens(), name="gpt_interleaved", how="interleaved")
@hand(tokens(), name="gpt_slices", how="slices")
@hand(tokens(), name="gpt_minus_one", how="minus_one")
@hand(tokens(), name="gpt_einsum", how="einsum")
@hand(tokens(), name="gpt_wide_heads", how="permute", head_dim=10)
@hand(tokens(), name="gpt_tied", tied=True)
class Gpt(nn.Module):
    def __init__(self, how="split", head_dim=None, tied=False, width=24):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(53, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(width),
                    "attn": Attention(width, 3, head_dim, how),
                    "ln_2": nn.LayerNorm(width),
                    "mlp": nn.Sequential(nn.Linear(width, 44), nn.GELU(approximate="tanh"), nn.Linear(44, width)),
                }
            )
            for _ in range(2)
        )
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 53, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = x + block["attn"](block["ln_1"](x))
            x = x + block["mlp"](block["ln_2"](x))
        return self.lm_head(self.ln_f(x))


class RmsNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate_half_chunk(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rotate_half_slices(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class GroupedQueryAttention(nn.Module):
    def __init__(self, width, heads, kv_heads, head_dim, repeat="interleave", rope="chunk", qk_norm=False):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.n_rep = heads // kv_heads
        self.wq = nn.Linear(width, heads * head_dim, bias=False)
        self.wk = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, width, bias=False)
        self.q_norm = RmsNorm(head_dim) if qk_norm else nn.Identity()
        self.k_norm = RmsNorm(head_dim) if qk_norm else nn.Identity()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, head_dim, 2).float() / head_dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.repeat, self.rope = repeat, rope

    def rotate(self, x):
        t = torch.arange(x.shape[-2], device=x.device, dtype=self.inv_freq.dtype)
        freqs = torch.outer(t, self.inv_freq)
        if self.rope == "complex":
            cis = torch.polar(torch.ones_like(freqs), freqs)
            x_ = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(x_ * cis).flatten(3)
        if self.rope == "pairs":
            emb = freqs.repeat_interleave(2, dim=-1)
            return x * emb.cos() + rotate_pairs(x) * emb.sin()
        if self.rope == "partial":
            rot = self.head_dim // 2
            x, rest = x[..., :rot], x[..., rot:]
            emb = torch.cat((freqs[:, : rot // 2], freqs[:, : rot // 2]), dim=-1)
            return torch.cat((x * emb.cos() + rotate_half_slices(x) * emb.sin(), rest), dim=-1)
        emb = torch.cat((freqs, freqs), dim=-1)
        rotate = rotate_half_chunk if self.rope == "chunk" else rotate_half_slices
        return x * emb.cos() + rotate(x) * emb.sin()

    def forward(self, x):
        bsz, seqlen, _ = x.shape
        xq = self.q_norm(self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)).transpose(1, 2)
        xk = self.k_norm(self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)).transpose(1, 2)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim).transpose(1, 2)
        xq, xk = self.rotate(xq), self.rotate(xk)
        if self.repeat == "interleave":
            xk, xv = xk.repeat_interleave(self.n_rep, dim=1), xv.repeat_interleave(self.n_rep, dim=1)
        elif self.repeat == "expand":
            xk, xv = (
                t[:, :, None, :, :]
                .expand(bsz, self.n_kv_heads, self.n_rep, seqlen, self.head_dim)
                .reshape(bsz, self.n_kv_heads * self.n_rep, seqlen, self.head_dim)
                for t in (xk, xv)
            )
        if self.repeat == "grouped":
            q = xq.view(bsz, self.n_kv_heads, self.n_rep, seqlen, self.head_dim)
            scores = torch.einsum("bgrqd,bgkd->bgrqk", q, xk) / math.sqrt(self.head_dim)
            mask = torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
            out = torch.einsum("bgrqk,bgkd->bgrqd", scores.masked_fill(~mask, -1e9).softmax(-1), xv)
            out = out.reshape(bsz, self.n_heads, seqlen, self.head_dim)
        elif self.repeat == "sdpa":
            out = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(bsz, seqlen, -1))


class GatedMlp(nn.Module):
    def __init__(self, width, hidden, fused=False, act=F.silu):
        super().__init__()
        self.fused, self.act = fused, act
        if fused:
            self.w13 = nn.Linear(width, 2 * hidden, bias=False)
        else:
            self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        if self.fused:
            gate, up = self.w13(x).chunk(2, dim=-1)
            return self.w2(self.act(gate) * up)
        return self.w2(self.act(self.w1(x)) * self.w3(x))


@hand(tokens(), name="gqa_interleave")
@hand(tokens(), name="gqa_expand_fused_mlp", repeat="expand", rope="slices", fused=True)
@hand(tokens(), name="gqa_grouped_einsum", repeat="grouped", rope="pairs")
@hand(tokens(), name="gqa_sdpa_complex", repeat="sdpa", rope="complex")
@hand(tokens(), name="gqa_partial_rope", repeat="expand", rope="partial", act=F.gelu)
@hand(tokens(), name="mqa_qk_norm", kv_heads=1, qk_norm=True, fused=True)
class HandLlama(nn.Module):
    def __init__(self, kv_heads=2, fused=False, act=F.silu, **attention):
        super().__init__()
        self.tok_embeddings = nn.Embedding(53, 28)
        self.attention = nn.ModuleList([GroupedQueryAttention(28, 6, kv_heads, 8, **attention) for _ in range(2)])
        self.feed_forward = nn.ModuleList([GatedMlp(28, 46, fused, act) for _ in range(2)])
        self.attention_norm = nn.ModuleList([RmsNorm(28) for _ in range(2)])
        self.ffn_norm = nn.ModuleList([RmsNorm(28) for _ in range(2)])
        self.norm = RmsNorm(28)
        self.output = nn.Linear(28, 53, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        layers = zip(self.attention, self.feed_forward, self.attention_norm, self.ffn_norm, strict=True)
        for attention, feed_forward, attention_norm, ffn_norm in layers:
            h = h + attention(attention_norm(h))
            h = h + feed_forward(ffn_norm(h))
        return self.output(self.norm(h))


class VitBlock(nn.Module):
    def __init__(self, dim, heads, hidden, scale=None):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.num_heads = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, dim))
        self.gamma_1 = nn.Parameter(scale * torch.ones(dim)) if scale else 1.0
        self.gamma_2 = nn.Parameter(scale * torch.ones(dim)) if scale else 1.0

    def attention(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * (C // self.num_heads) ** -0.5
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))

    def forward(self, x):
        x = x + self.gamma_1 * self.attention(self.norm1(x))
        return x + self.gamma_2 * self.mlp(self.norm2(x))


@hand(image(), name="vit_class_token")
@hand(image(), name="vit_mean_layer_scale", pool="mean", scale=0.5)
class HandVit(nn.Module):
    def __init__(self, dim=24, pool="cls", scale=None):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, dim) * 0.2)
        self.blocks = nn.Sequential(VitBlock(dim, 3, 44, scale), VitBlock(dim, 3, 52, scale))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)
        self.pool = pool

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0] if self.pool == "cls" else x[:, 1:].mean(dim=1))


@hand(image())
class VitPatchesByView(nn.Module):
    """lucidrains: patches by rearranging pixels; a linear layer embeds them."""

    def __init__(self, patch=4, dim=20, heads=4, dim_head=6):
        super().__init__()
        self.patch, self.heads = patch, heads
        self.embed = nn.Sequential(
            nn.LayerNorm(3 * patch * patch), nn.Linear(3 * patch * patch, dim), nn.LayerNorm(dim)
        )
        self.to_qkv = nn.Linear(dim, heads * dim_head * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.0))
        self.head = nn.Linear(dim, 10)

    def forward(self, img):
        b, c, h, w = img.shape
        p = self.patch
        x = img.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, p * p * c)
        x = self.embed(x)
        q, k, v = (t.reshape(b, t.shape[1], self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        attn = torch.matmul(q, k.transpose(-1, -2)).div(math.sqrt(q.shape[-1])).softmax(-1)
        out = torch.matmul(attn, v).permute(0, 2, 1, 3).reshape(b, x.shape[1], -1)
        return self.head((x + self.to_out(out)).mean(1))


def window_partition(x, window):
    B, H, W, C = x.shape
    x = x.view(B, H // window, window, W // window, window, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window, window, C)


def window_reverse(windows, window, H, W):
    B = int(windows.shape[0] / (H * W / window / window))
    x = windows.view(B, H // window, W // window, window, window, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class SwinBlock(nn.Module):
    def __init__(self, dim, heads, window, shift):
        super().__init__()
        self.window, self.shift, self.heads = window, shift, heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.3)
        coords = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("relative_position_index", relative[..., 0] * (2 * window - 1) + relative[..., 1])

    def attention(self, x):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * (C // self.heads) ** -0.5) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = (attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))

    def forward(self, x):
        _, H, W, C = x.shape
        shortcut = x
        x = self.norm1(x)
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        windows = window_partition(x, self.window).view(-1, self.window * self.window, C)
        windows = self.attention(windows).view(-1, self.window, self.window, C)
        x = window_reverse(windows, self.window, H, W)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        x = shortcut + x
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, dim, out):
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, out, bias=False)

    def forward(self, x):
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.reduction(self.norm(x))


@hand(image())
class HandSwin(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 18, 2, 2)
        self.layer1 = nn.Sequential(SwinBlock(18, 3, 4, 0), SwinBlock(18, 3, 4, 2))
        self.merge = PatchMerging(18, 28)
        self.layer2 = SwinBlock(28, 4, 4, 0)
        self.norm, self.head = nn.LayerNorm(28), nn.Linear(28, 10)

    def forward(self, x):
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        x = self.norm(self.layer2(self.merge(self.layer1(x))))
        return self.head(x.flatten(1, 2).mean(1))


class ConvNextBlock(nn.Module):
    def __init__(self, dim, scale=1e-1):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim)
        self.gamma = nn.Parameter(scale * torch.ones(dim))

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        return shortcut + (self.gamma * x).permute(0, 3, 1, 2)


class LayerNorm2d(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@hand(image())
class HandConvNext(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 14, 2, 2), LayerNorm2d(14))
        self.stage1 = nn.Sequential(ConvNextBlock(14), ConvNextBlock(14))
        self.down = nn.Sequential(LayerNorm2d(14), nn.Conv2d(14, 22, 2, 2))
        self.stage2 = ConvNextBlock(22)
        self.norm, self.head = nn.LayerNorm(22), nn.Linear(22, 10)

    def forward(self, x):
        x = self.stage2(self.down(self.stage1(self.stem(x))))
        return self.head(self.norm(x.mean([-2, -1])))


class MixerBlock(nn.Module):
    def __init__(self, dim, patches, token_hidden, channel_hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token = nn.Sequential(nn.Linear(patches, token_hidden), nn.GELU(), nn.Linear(token_hidden, patches))
        self.channel = nn.Sequential(nn.Linear(dim, channel_hidden), nn.GELU(), nn.Linear(channel_hidden, dim))

    def forward(self, x):
        x = x + self.token(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.norm2(x))


@hand(image())
class MlpMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 22, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(22, 16, 14, 36), MixerBlock(22, 16, 18, 44))
        self.head = nn.Linear(22, 10)

    def forward(self, x):
        x = self.stem(x)
        b, c, _, _ = x.shape
        x = self.blocks(x.view(b, c, -1).permute(0, 2, 1))
        return self.head(x.mean(dim=1))


@hand(sequence(18, 9))
class GatedMlpMixer(nn.Module):
    """gMLP: half of the channels, mixed over positions, gate the other half."""

    def __init__(self):
        super().__init__()
        self.norm, self.proj_in, self.proj_out = nn.LayerNorm(18), nn.Linear(18, 44), nn.Linear(22, 18)
        self.gate_norm, self.spatial = nn.LayerNorm(22), nn.Conv1d(9, 9, 1)
        self.out = nn.Linear(18, 3)

    def forward(self, x):
        u, v = F.gelu(self.proj_in(self.norm(x))).chunk(2, dim=-1)
        v = self.spatial(self.gate_norm(v))
        return self.out(x + self.proj_out(u * v))


@hand(sequence(18))
class LinearAttention(nn.Module):
    """phi(q) (phi(k)ᵀ v) with phi = elu + 1: the features of a head are contracted twice."""

    def __init__(self, heads=3, head_dim=8):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(18, heads * head_dim) for _ in range(3))
        self.out = nn.Linear(heads * head_dim, 14)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1) for f in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("nshd,nshm->nhmd", k, v)
        z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + 1e-6)
        y = torch.einsum("nlhd,nhmd,nlh->nlhm", q, kv, z)
        return self.out(y.contiguous().view(b, n, -1))


@hand(image())
class NonLocal(nn.Module):
    """Self-attention between pixels with three 1x1 convolutions and a learned scalar (SAGAN)."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 20, 3, 2, 1)
        self.query_conv, self.key_conv = nn.Conv2d(20, 6, 1), nn.Conv2d(20, 6, 1)
        self.value_conv = nn.Conv2d(20, 20, 1)
        self.gamma = nn.Parameter(torch.tensor([0.7]))
        self.fc = nn.Linear(20, 4)

    def forward(self, x):
        x = F.relu(self.stem(x))
        b, c, width, height = x.size()
        proj_query = self.query_conv(x).view(b, -1, width * height).permute(0, 2, 1)
        proj_key = self.key_conv(x).view(b, -1, width * height)
        attention = torch.bmm(proj_query, proj_key).softmax(dim=-1)
        proj_value = self.value_conv(x).view(b, -1, width * height)
        out = torch.bmm(proj_value, attention.permute(0, 2, 1)).view(b, c, width, height)
        return self.fc((self.gamma * out + x).mean((2, 3)))


@hand(image(size=12))
class UnfoldAttention(nn.Module):
    """Local attention over 3x3 neighbourhoods that F.unfold collects: channels times nine in one dimension."""

    def __init__(self, channels=18):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.q, self.k, self.v = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.out = nn.Conv2d(channels, 5, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        b, c, h, w = x.shape
        q = self.q(x).view(b, c, 1, h * w)
        k = F.unfold(self.k(x), 3, padding=1).view(b, c, 9, h * w)
        v = F.unfold(self.v(x), kernel_size=3, padding=1).view(b, c, 9, h * w)
        attn = ((q * k).sum(1, keepdim=True) / c**0.5).softmax(dim=2)
        return self.out((attn * v).sum(2).view(b, c, h, w))


@hand(sequence(13, 11))
class Perceiver(nn.Module):
    """Learned latents read the input by cross-attention."""

    def __init__(self, latents=5, width=18, heads=3, inner=24):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, width))
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.to_q, self.to_kv = nn.Linear(width, inner, bias=False), nn.Linear(13, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, width)
        self.logits = nn.Linear(width, 6)

    def forward(self, data):
        b = data.shape[0]
        x = self.latents.unsqueeze(0).repeat(b, 1, 1)
        q = self.to_q(self.norm(x))
        k, v = self.to_kv(data).chunk(2, dim=-1)
        q, k, v = (t.reshape(b, -1, self.heads, t.shape[-1] // self.heads).transpose(1, 2) for t in (q, k, v))
        x = x + self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.logits(x).mean(1)


@hand(image())
class Detr(nn.Module):
    """The demonstration of the paper, time first: queries as parameters, positions joined from columns and rows."""

    def __init__(self, hidden=20):
        super().__init__()
        self.backbone = nn.Sequential(ConvBnRelu(3, 14, 3, 2), ConvBnRelu(14, 26, 3, 2))
        self.conv = nn.Conv2d(26, hidden, 1)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(hidden, 4, 34), 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(hidden, 4, 38), 1)
        self.linear_class, self.linear_bbox = nn.Linear(hidden, 6), nn.Linear(hidden, 4)
        self.query_pos = nn.Parameter(torch.rand(9, hidden))
        self.row_embed = nn.Parameter(torch.rand(8, hidden // 2))
        self.col_embed = nn.Parameter(torch.rand(8, hidden // 2))

    def forward(self, inputs):
        h = self.conv(self.backbone(inputs))
        H, W = h.shape[-2:]
        col = self.col_embed[:W].unsqueeze(0).repeat(H, 1, 1)
        row = self.row_embed[:H].unsqueeze(1).repeat(1, W, 1)
        pos = torch.cat([col, row], dim=-1).flatten(0, 1).unsqueeze(1)
        source = pos + 0.1 * h.flatten(2).permute(2, 0, 1)
        target = self.query_pos.unsqueeze(1).repeat(1, h.shape[0], 1)
        h = self.decoder(target, self.encoder(source)).transpose(0, 1)
        return {"pred_logits": self.linear_class(h), "pred_boxes": self.linear_bbox(h).sigmoid()}


class StreamHeads(nn.Module):
    """The width of a head is that of the stream over the number of heads, and attention divides by its root."""

    def __init__(self, width=24, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.made, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        count, length, width = x.shape
        parts = self.made(self.norm(x)).split(width, 2)
        q, k, v = (each.view(count, length, self.heads, width // self.heads).transpose(1, 2) for each in parts)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.project(mixed.reshape(count, length, width))


@hand(sequence(9))
def stream_heads():
    return nn.Sequential(nn.Linear(9, 24), StreamHeads(), StreamHeads(), nn.Linear(24, 5))


@hand(sequence(9))
class LayersShareAttention(nn.Module):
    """One block, used three times: what makes up for its width does so once."""

    def __init__(self, width=24):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(9, width), StreamHeads(width), nn.Linear(width, 5)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.block(x)
        return self.last(x)


@hand(sequence(9))
class QueriesAreKeys(nn.Module):
    """Scaling the queries would scale the keys."""

    def __init__(self, heads=4, width=8):
        super().__init__()
        self.heads, self.shared, self.value = heads, nn.Linear(9, heads * width), nn.Linear(9, heads * width)
        self.last = nn.Linear(heads * width, 5)

    def forward(self, x):
        q, v = (each(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for each in (self.shared, self.value))
        return self.last(F.scaled_dot_product_attention(q, q, v).transpose(1, 2).flatten(2))


@hand(sequence(9))
class RotatedQueries(nn.Module):
    """Rotary positions between the weights of queries and attention that divides by the root of their width."""

    def __init__(self, heads=4, width=8):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(9, heads * width) for _ in range(3))
        self.last = nn.Linear(heads * width, 5)
        self.register_buffer("frequencies", 10.0 ** -torch.linspace(0, 1, width // 2))

    def forward(self, x):
        angles = torch.arange(x.shape[1]).to(x.dtype)[:, None] * self.frequencies
        angles = torch.cat([angles, angles], -1)

        def turned(t):
            first, second = t.chunk(2, -1)
            return t * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

        q, k, v = (
            each(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return self.last(mixed.transpose(1, 2).flatten(2))


@hand(image(3, 8))
class WindowsAndGrid(nn.Module):
    """As in MaxViT: attention within windows, then over a grid of the same places."""

    def __init__(self, width=16, window=4):
        super().__init__()
        self.stem, self.window = nn.Conv2d(3, width, 3, padding=1), window
        self.local, self.grid, self.last = StreamHeads(width, 4), StreamHeads(width, 4), nn.Linear(width, 5)

    def forward(self, x):
        x = self.stem(x)
        b, c, h, w = x.shape
        size = self.window
        t = x.view(b, c, h // size, size, w // size, size).permute(0, 2, 4, 3, 5, 1).reshape(-1, size * size, c)
        t = self.local(t).view(b, h // size, w // size, size, size, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)
        t = t.view(b, c, size, h // size, size, w // size).permute(0, 3, 5, 2, 4, 1).reshape(-1, size * size, c)
        return self.last(self.grid(t).reshape(b, -1, c).mean(1))


@hand(tokens())
class RowsReplaced(nn.Module):
    """As images among words: rows that a mask chooses are those of another tensor."""

    def __init__(self, width=12):
        super().__init__()
        self.words, self.places = nn.Embedding(53, width), nn.Parameter(torch.randn(14, 6))
        self.project, self.hidden, self.last = nn.Linear(6, width), nn.Linear(width, 24), nn.Linear(24, 5)

    def forward(self, tokens):
        x = self.words(tokens)
        chosen = (tokens < 20).unsqueeze(-1).expand_as(x)
        return self.last(self.hidden(x.masked_scatter(chosen, self.project(self.places))).relu())


# --------------------------------------------------------------------------------------------------------------------
# Diffusion, autoencoders, flows
# --------------------------------------------------------------------------------------------------------------------


class DiffusionBlock(nn.Module):
    def __init__(self, inp, oup, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inp), nn.Conv2d(inp, oup, 3, padding=1)
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time, oup * 2))
        self.norm2, self.conv2 = nn.GroupNorm(2, oup), nn.Conv2d(oup, oup, 3, padding=1)
        self.res_conv = nn.Conv2d(inp, oup, 1) if inp != oup else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.mlp(t)[:, :, None, None].chunk(2, dim=1)
        h = self.conv2(F.silu(self.norm2(h) * (scale + 1) + shift))
        return h + self.res_conv(x)


class DiffusionAttention(nn.Module):
    def __init__(self, dim, heads=2, dim_head=6):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm = nn.GroupNorm(1, dim)
        self.to_qkv = nn.Conv2d(dim, heads * dim_head * 3, 1, bias=False)
        self.to_out = nn.Conv2d(heads * dim_head, dim, 1)

    def forward(self, x):
        b, _, h, w = x.shape
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=1)
        q, k, v = (t.reshape(b, self.heads, -1, h * w) for t in qkv)
        sim = torch.einsum("bhdi,bhdj->bhij", q * self.scale, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        out = torch.einsum("bhij,bhdj->bhid", sim.softmax(dim=-1), v)
        return self.to_out(out.permute(0, 1, 3, 2).reshape(b, -1, h, w)) + x


@hand(lambda: (torch.randn(2, 3, 8, 8), torch.tensor([3, 40])))
class DiffusionUnet(nn.Module):
    def __init__(self, dim=12, time=28):
        super().__init__()
        self.dim = dim
        self.time_mlp = nn.Sequential(nn.Linear(dim, time), nn.SiLU(), nn.Linear(time, time))
        self.init_conv = nn.Conv2d(3, 12, 3, padding=1)
        self.down1, self.attn1, self.downsample = (
            DiffusionBlock(12, 12, time),
            DiffusionAttention(12),
            nn.Conv2d(12, 20, 4, 2, 1),
        )
        self.mid1, self.mid_attn, self.mid2 = (
            DiffusionBlock(20, 26, time),
            DiffusionAttention(26, 3),
            DiffusionBlock(26, 20, time),
        )
        self.upsample = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(20, 14, 3, padding=1))
        self.up1 = DiffusionBlock(26, 12, time)
        self.final_conv = nn.Conv2d(24, 3, 1)

    def embed(self, t, dtype):
        half_dim = self.dim // 2
        emb = torch.exp(torch.arange(half_dim, device=t.device, dtype=dtype) * -(math.log(10000) / (half_dim - 1)))
        emb = t[:, None].to(dtype) * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)

    def forward(self, x, time):
        t = self.time_mlp(self.embed(time, x.dtype))
        x = self.init_conv(x)
        r = x.clone()
        h = self.attn1(self.down1(x, t))
        x = self.mid2(self.mid_attn(self.mid1(self.downsample(h), t)), t)
        x = self.up1(torch.cat((self.upsample(x), h), dim=1), t)
        return self.final_conv(torch.cat((x, r), dim=1))


@hand(image(1, 12))
class VariationalAutoencoder(nn.Module):
    """The decoder views a vector as channels and positions; mean and variance are two heads."""

    def __init__(self, latent=10):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 20, 3, 2, 1), nn.ReLU())
        self.fc_mu, self.fc_var = nn.Linear(20 * 9, latent), nn.Linear(20 * 9, latent)
        self.decoder_input = nn.Linear(latent, 22 * 9)
        self.dec = nn.Sequential(
            nn.ConvTranspose2d(22, 14, 4, 2, 1), nn.BatchNorm2d(14), nn.LeakyReLU(), nn.ConvTranspose2d(14, 1, 4, 2, 1)
        )

    def reparameterize(self, mu, logvar):
        if self.training:
            return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return mu

    def forward(self, x):
        h = torch.flatten(self.enc(x), start_dim=1)
        mu, logvar = self.fc_mu(h), self.fc_var(h)
        z = self.reparameterize(mu, logvar)
        out = self.decoder_input(z).view(-1, 22, 3, 3)
        return torch.sigmoid(self.dec(out)), mu, logvar


@hand(vector(30))
class TiedAutoencoder(nn.Module):
    """The decoder uses the transposed weights of the encoder."""

    def __init__(self):
        super().__init__()
        self.encoder1, self.encoder2 = nn.Linear(30, 22), nn.Linear(22, 14)
        self.bias1, self.bias2 = nn.Parameter(torch.zeros(22)), nn.Parameter(torch.zeros(30))

    def forward(self, x):
        h = torch.relu(self.encoder2(torch.relu(self.encoder1(x))))
        h = torch.relu(F.linear(h, self.encoder2.weight.t(), self.bias1))
        return F.linear(h, self.encoder1.weight.t(), self.bias2)


@hand(vector(20))
class MaskedAutoregressive(nn.Module):
    """MADE: buffers as large as the weights mask them in forward."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(20, 36), nn.Linear(36, 20)
        self.register_buffer("mask1", (torch.rand(36, 20) > 0.4).float())
        self.register_buffer("mask2", (torch.rand(20, 36) > 0.4).float())

    def forward(self, x):
        h = F.relu(F.linear(x, self.fc1.weight * self.mask1, self.fc1.bias))
        return F.linear(h, self.fc2.weight * self.mask2, self.fc2.bias)


@hand(image(6, 8))
class GlowCoupling(nn.Module):
    """Invertible: half of the channels give scale and shift of the others, then a fixed permutation."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3, 18, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(18, 14, 1),
                nn.ReLU(),
                nn.Conv2d(14, 6, 3, padding=1),
            )
            for _ in range(2)
        )
        self.actnorm = nn.Parameter(torch.rand(1, 6, 1, 1) + 0.5)
        self.register_buffer("order", torch.tensor([3, 5, 0, 2, 4, 1]))

    def forward(self, x):
        logdet = 0
        for net in self.nets:
            x = x * self.actnorm
            a, b = x.chunk(2, 1)
            log_scale, shift = net(a).chunk(2, 1)
            scale = torch.sigmoid(log_scale + 2)
            logdet = logdet + scale.log().flatten(1).sum(-1)
            x = torch.cat([a, (b + shift) * scale], 1)[:, self.order]
        return x, logdet


@hand(image())
class ReversibleBlocks(nn.Module):
    """Two streams that feed each other: y1 = x1 + f(x2), y2 = x2 + g(y1)."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 28, 3, padding=1)
        self.f = nn.Sequential(ConvBnRelu(14, 18, 3), nn.Conv2d(18, 14, 1))
        self.g = nn.Sequential(ConvBnRelu(14, 22, 3), nn.Conv2d(22, 14, 1))
        self.fc = nn.Linear(28, 10)

    def forward(self, x):
        x1, x2 = torch.chunk(self.stem(x), 2, dim=1)
        y1 = x1 + self.f(x2)
        y2 = x2 + self.g(y1)
        return self.fc(torch.cat([y1, y2], 1).mean((2, 3)))


@hand(image())
class VectorQuantized(nn.Module):
    """Distances to a codebook decide: the code's width is summed in a square."""

    def __init__(self, codes=11, width=14):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 18, 4, 2, 1), nn.ReLU(), nn.Conv2d(18, width, 3, padding=1))
        self.codebook = nn.Embedding(codes, width)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(width, 20, 4, 2, 1), nn.ReLU(), nn.Conv2d(20, 3, 1))

    def forward(self, x):
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, self.codebook.embedding_dim)
        distances = (
            flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codebook.weight.t() + self.codebook.weight.pow(2).sum(1)
        )
        index = distances.argmin(dim=1)
        quantized = self.codebook(index).view(z.shape)
        quantized = z + (quantized - z).detach()
        return self.decoder(quantized.permute(0, 3, 1, 2)), index.view(z.shape[0], -1)


# --------------------------------------------------------------------------------------------------------------------
# Tables, graphs, points, experts
# --------------------------------------------------------------------------------------------------------------------


@hand(lambda: (torch.randn(2, 7), torch.randint(0, 19, (2, 3))))
class Dlrm(nn.Module):
    """Dense features and embeddings of one width; the dot products of all pairs go on."""

    def __init__(self, width=14):
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, width, mode="sum") for n in (19, 23, 29)])
        self.bot_l = nn.Sequential(nn.Linear(7, 22), nn.ReLU(), nn.Linear(22, width), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(width + 6, 26), nn.ReLU(), nn.Linear(26, 1), nn.Sigmoid())

    def forward(self, dense, sparse):
        x = self.bot_l(dense)
        ly = [emb(sparse[:, i : i + 1]) for i, emb in enumerate(self.emb_l)]
        batch_size, d = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        R = torch.cat([x, Z[:, li, lj]], dim=1)
        return self.top_l(R)


@hand(lambda: torch.randint(0, 17, (2, 5)))
class DeepFm(nn.Module):
    """Sum of squares against square of sums, a linear part, and an MLP on the flattened embeddings."""

    def __init__(self, fields=5, width=8):
        super().__init__()
        self.register_buffer("offsets", torch.arange(0, 17 * fields, 17))
        self.embedding, self.linear = nn.Embedding(17 * fields, width), nn.Embedding(17 * fields, 1)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.mlp = nn.Sequential(nn.Linear(fields * width, 26), nn.BatchNorm1d(26), nn.ReLU(), nn.Linear(26, 1))
        self.embed_output_dim = fields * width

    def forward(self, x):
        x = x + self.offsets
        e = self.embedding(x)
        fm = 0.5 * (e.sum(dim=1) ** 2 - (e**2).sum(dim=1)).sum(dim=1, keepdim=True)
        x = self.linear(x).sum(dim=1) + fm + self.mlp(e.view(-1, self.embed_output_dim))
        return torch.sigmoid(x.squeeze(1))


@hand(vector(18))
class CrossNetwork(nn.Module):
    """x0 (w·x) + b + x beside a deep part: the inputs are part of the residual stream."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(18, 22)
        self.w = nn.ParameterList([nn.Parameter(torch.randn(22, 1) * 0.2) for _ in range(2)])
        self.b = nn.ParameterList([nn.Parameter(torch.zeros(22)) for _ in range(2)])
        self.deep = nn.Sequential(nn.Linear(22, 34), nn.ReLU(), nn.Linear(34, 14), nn.ReLU())
        self.out = nn.Linear(36, 1)

    def forward(self, x):
        x0 = x = self.inp(x)
        for w, b in zip(self.w, self.b, strict=True):
            x = x0 * (x @ w) + b + x
        return self.out(torch.cat([x, self.deep(x0)], dim=1))


@hand(lambda: (torch.randint(0, 31, (2,)), torch.randint(0, 37, (2,))))
class NeuralCollaborativeFiltering(nn.Module):
    def __init__(self):
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(31, 10), nn.Embedding(37, 10)
        self.user_mlp, self.item_mlp = nn.Embedding(31, 14), nn.Embedding(37, 18)
        self.mlp = nn.Sequential(nn.Linear(32, 22), nn.ReLU(), nn.Linear(22, 12), nn.ReLU())
        self.predict = nn.Linear(22, 1)

    def forward(self, user, item):
        gmf = self.user_gmf(user) * self.item_gmf(item)
        mlp = self.mlp(torch.cat((self.user_mlp(user), self.item_mlp(item)), -1))
        return self.predict(torch.cat((gmf, mlp), -1)).view(-1)


@hand(several(sequence(12, 9), lambda: (torch.rand(2, 9, 9) > 0.5).float()), name="graph_convolution")
@hand(several(sequence(12, 9), lambda: (torch.rand(2, 9, 9) > 0.5).float()), name="graph_attention", attention=True)
class GraphNetwork(nn.Module):
    """Dense adjacency; the attention is a sum of two projections to a scalar, masked where there is no edge."""

    def __init__(self, attention=False):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(12, 22) * 0.3), nn.Parameter(torch.randn(22, 14) * 0.3)
        self.bias = nn.Parameter(torch.zeros(22))
        self.attention = attention
        if attention:
            self.a_src, self.a_dst = nn.Parameter(torch.randn(22, 1) * 0.3), nn.Parameter(torch.randn(22, 1) * 0.3)
        self.readout = nn.Linear(14, 3)

    def forward(self, x, adjacency):
        adjacency = adjacency + torch.eye(x.size(1), dtype=x.dtype)
        h = torch.matmul(x, self.w1) + self.bias
        if self.attention:
            e = F.leaky_relu(h @ self.a_src + (h @ self.a_dst).transpose(1, 2), 0.2)
            a = torch.where(adjacency > 0, e, -9e15 * torch.ones_like(e)).softmax(dim=-1)
        else:
            a = adjacency / adjacency.sum(-1, keepdim=True)
        h = F.elu(torch.bmm(a, h))
        return self.readout(torch.bmm(a, h @ self.w2).mean(1))


class TNet(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k
        self.conv1, self.conv2 = nn.Conv1d(k, 14, 1), nn.Conv1d(14, 22, 1)
        self.fc1, self.fc2 = nn.Linear(22, 18), nn.Linear(18, k * k)
        self.bn1 = nn.BatchNorm1d(14)

    def forward(self, x):
        batch = x.size(0)
        x = F.relu(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        x = torch.max(x, 2, keepdim=True)[0].view(-1, 22)
        x = self.fc2(F.relu(self.fc1(x)))
        return x.view(-1, self.k, self.k) + torch.eye(self.k, dtype=x.dtype).unsqueeze(0).repeat(batch, 1, 1)


@hand(signal(3, 25))
class PointNet(nn.Module):
    """Predicted square matrices turn points, then features of width 10."""

    def __init__(self):
        super().__init__()
        self.input_transform, self.feature_transform = TNet(3), TNet(10)
        self.conv1, self.conv2 = nn.Conv1d(3, 10, 1), nn.Conv1d(10, 34, 1)
        self.fc = nn.Linear(44, 4)

    def forward(self, x):
        n_pts = x.size(2)
        x = torch.bmm(self.input_transform(x).transpose(2, 1), x)
        x = F.relu(self.conv1(x))
        x = torch.bmm(x.transpose(2, 1), self.feature_transform(x)).transpose(2, 1)
        g = self.conv2(x).max(dim=2, keepdim=True).values
        g = g.view(-1, 34, 1).repeat(1, 1, n_pts)
        return self.fc(torch.cat([g, x], 1).transpose(2, 1))


@hand(sequence(16))
class SoftMoe(nn.Module):
    """All experts run in one einsum over stacked weights; softmax gates weigh them."""

    def __init__(self, experts=3, hidden=26):
        super().__init__()
        self.gate = nn.Linear(16, experts)
        self.w1 = nn.Parameter(torch.randn(experts, 16, hidden) * 0.2)
        self.b1 = nn.Parameter(torch.zeros(experts, hidden))
        self.w2 = nn.Parameter(torch.randn(experts, hidden, 16) * 0.2)
        self.out = nn.Linear(16, 5)

    def forward(self, x):
        gates = self.gate(x).softmax(dim=-1)
        h = F.gelu(torch.einsum("bsd,edh->bseh", x, self.w1) + self.b1)
        y = torch.einsum("bseh,ehd->bsed", h, self.w2)
        return self.out(x + (gates.unsqueeze(-1) * y).sum(2))


@hand(sequence(16))
class TopkMoe(nn.Module):
    """Mixtral: each expert takes the tokens that chose it, by index, in a loop."""

    def __init__(self, experts=4, k=2):
        super().__init__()
        self.top_k = k
        self.inp = nn.Linear(16, 20)
        self.gate = nn.Linear(20, experts, bias=False)
        self.experts = nn.ModuleList([GatedMlp(20, 22 + 4 * i) for i in range(experts)])
        self.out = nn.Linear(20, 5)

    def forward(self, x):
        x = self.inp(x)
        b, s, d = x.shape
        flat = x.view(-1, d)
        weights, selected = torch.topk(self.gate(flat).softmax(dim=1), self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        final = torch.zeros((b * s, d), dtype=x.dtype, device=x.device)
        mask = F.one_hot(selected, num_classes=len(self.experts)).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            idx, top_x = torch.where(mask[i])
            current = expert(flat[top_x]) * weights[top_x, idx, None]
            final.index_add_(0, top_x, current)
        return self.out(final.reshape(b, s, d) + x)


@hand(sequence(16))
class DenseTopkMoe(nn.Module):
    """Every expert runs on every token; a scattered gate is zero where it was not chosen."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, h), nn.ReLU(), nn.Linear(h, 16)) for h in (18, 22, 26)]
        )
        self.out = nn.Linear(16, 5)

    def forward(self, x):
        logits = self.gate(x)
        top, index = logits.topk(2, dim=-1)
        gates = torch.zeros_like(logits).scatter(-1, index, top.softmax(-1))
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return self.out((gates.unsqueeze(-1) * outputs).sum(dim=-2))


# --------------------------------------------------------------------------------------------------------------------
# Parameters used by hand, shared, derived
# --------------------------------------------------------------------------------------------------------------------


@hand(vector(14))
class FunctionalParameters(nn.Module):
    """Parameters without modules, through F.linear, matmul, addmm and einsum."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(26, 14) * 0.3), nn.Parameter(torch.zeros(26))
        self.w2 = nn.Parameter(torch.randn(26, 34) * 0.2)
        self.w3, self.b3 = nn.Parameter(torch.randn(34, 18) * 0.2), nn.Parameter(torch.zeros(18))
        self.w4 = nn.Parameter(torch.randn(5, 18) * 0.3)

    def forward(self, x):
        x = F.relu(F.linear(x, self.w1, self.b1))
        x = torch.tanh(x @ self.w2)
        x = torch.addmm(self.b3, x, self.w3).sigmoid()
        return torch.einsum("bi,oi->bo", x, self.w4)


@hand(image())
class FunctionalConvolutions(nn.Module):
    """F.conv2d and F.batch_norm with the tensors of modules and of a ParameterDict."""

    def __init__(self):
        super().__init__()
        self.p = nn.ParameterDict(
            {
                "w1": torch.randn(14, 3, 3, 3) * 0.3,
                "w2": torch.randn(22, 14, 3, 3) * 0.1,
                "g": torch.ones(22),
                "b": torch.zeros(22),
            }
        )
        self.register_buffer("running_mean2", torch.randn(22) * 0.3)
        self.register_buffer("running_var2", torch.rand(22) + 0.5)
        self.fc = nn.Linear(22, 10)

    def forward(self, x):
        x = F.relu(F.conv2d(x, self.p["w1"], padding=1))
        x = F.conv2d(x, self.p["w2"], stride=2)
        x = F.batch_norm(x, self.running_mean2, self.running_var2, self.p["g"], self.p["b"], training=self.training)
        return F.linear(F.relu(x).mean((2, 3)), self.fc.weight, self.fc.bias)


@hand(image())
class WeightNormNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = parametrizations.weight_norm(nn.Conv2d(3, 14, 3, padding=1))
        self.conv2 = parametrizations.weight_norm(nn.Conv2d(14, 22, 3, padding=1))
        self.fc = parametrizations.weight_norm(nn.Linear(22, 34))
        self.out = nn.Linear(34, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x)).mean((2, 3))
        return self.out(F.relu(self.fc(x)))


@hand(vector(14))
def spectral_norm_mlp():
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(14, 26)),
        nn.LeakyReLU(0.2),
        parametrizations.spectral_norm(nn.Linear(26, 18)),
        nn.LeakyReLU(0.2),
        nn.Linear(18, 1),
    )


class LoraLinear(nn.Linear):
    def __init__(self, inp, out, rank):
        super().__init__(inp, out)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(rank, inp) * 0.2), nn.Parameter(torch.zeros(out, rank))
        self.scaling = 2 / rank

    def forward(self, x):
        return super().forward(x) + (x @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * self.scaling


@hand(vector(14))
def lora_mlp():
    return nn.Sequential(LoraLinear(14, 30, 6), nn.ReLU(), LoraLinear(30, 22, 4), nn.ReLU(), nn.Linear(22, 3))


@hand(vector(14))
class WeightStandardized(nn.Module):
    """The weight is centred and scaled over its inputs before use, and mixed with another by a sigmoid."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(14, 26), nn.Linear(26, 22), nn.Linear(22, 4)
        self.mix = nn.Parameter(torch.randn(26, 14) * 0.3)

    def forward(self, x):
        w = self.fc1.weight
        w = (w - w.mean(dim=1, keepdim=True)) / (w.std(dim=1, keepdim=True) + 1e-5)
        x = F.relu(F.linear(x, w + torch.sigmoid(self.mix), self.fc1.bias))
        w = F.normalize(self.fc2.weight, dim=1)
        x = F.relu(F.linear(F.normalize(x), w))
        return self.fc3(x)


@hand(several(vector(9), vector(12)))
class HyperNetwork(nn.Module):
    """The condition writes weight and bias of a layer; batched matmul applies them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(12, 16)
        self.hidden = nn.Linear(9, 22)
        self.to_weight, self.to_bias = nn.Linear(22, 16 * 10), nn.Linear(22, 10)
        self.out = nn.Linear(10, 3)

    def forward(self, z, x):
        h = F.relu(self.hidden(z))
        weight = self.to_weight(h).view(-1, 10, 16)
        x = torch.bmm(weight, F.relu(self.body(x)).unsqueeze(-1)).squeeze(-1) + self.to_bias(h)
        return self.out(F.relu(x))


@hand(image())
class SharedConvolution(nn.Module):
    """One module runs three times in sequence, another at two resolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 18, 3, padding=1)
        self.step = nn.Conv2d(18, 18, 3, padding=1)
        self.mix = nn.Conv2d(18, 14, 1)
        self.fc = nn.Linear(28, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for _ in range(3):
            x = x + F.relu(self.step(x))
        a = self.mix(x)
        b = self.mix(F.avg_pool2d(x, 2))
        return self.fc(torch.cat([a.mean((2, 3)), b.mean((2, 3))], 1))


@hand(several(image(1), image(1)))
class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 18, 3), nn.ReLU())
        self.fc = nn.Sequential(nn.Linear(18 * 25, 34), nn.Sigmoid())
        self.out = nn.Linear(34, 1)

    def forward_once(self, x):
        x = self.cnn(x)
        return self.fc(x.view(x.size()[0], -1))

    def forward(self, a, b):
        return torch.sigmoid(self.out(torch.abs(self.forward_once(a) - self.forward_once(b))))


@hand(several(vector(14), vector(22)))
class TwoTower(nn.Module):
    """Two towers meet in a scaled cosine: the shared width is contracted."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(14, 30), nn.ReLU(), nn.Linear(30, 18))
        self.right = nn.Sequential(nn.Linear(22, 26), nn.ReLU(), nn.Linear(26, 18))
        self.logit_scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, a, b):
        a, b = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        logits = self.logit_scale.exp() * a @ b.t()
        return logits, F.cosine_similarity(a, b)


@hand(several(vector(14), vector(11)))
class BilinearNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(14, 18), nn.Linear(11, 20)
        self.bilinear = nn.Bilinear(18, 20, 13)
        self.out = nn.Linear(13, 2)

    def forward(self, a, b):
        return self.out(F.relu(self.bilinear(F.relu(self.a(a)), F.relu(self.b(b)))))


@hand(several(vector(9), vector(5)))
class Critic(nn.Module):
    """Actor-critic: the action is appended in the second layer; two critics; a tanh-squashed actor."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(9, 22), nn.ReLU(), nn.Linear(22, 10))
        self.l1, self.l2, self.l3 = nn.Linear(9, 26), nn.Linear(26 + 5, 18), nn.Linear(18, 1)
        self.q2 = nn.Sequential(nn.Linear(14, 30), nn.ReLU(), nn.Linear(30, 1))

    def forward(self, state, action):
        mu, log_std = self.actor(state).chunk(2, dim=-1)
        pi = torch.tanh(mu + log_std.clamp(-2, 2).exp() * 0.1)
        q = F.relu(self.l1(state))
        q = F.relu(self.l2(torch.cat([q, action], 1)))
        return pi, self.l3(q), self.q2(torch.cat([state, action], 1))


@hand(image(4))
class DuelingDqn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(4, 14, 4, 2), nn.ReLU(), nn.Conv2d(14, 18, 3), nn.ReLU())
        self.advantage = nn.Sequential(nn.Linear(18 * 25, 34), nn.ReLU(), nn.Linear(34, 6))
        self.value = nn.Sequential(nn.Linear(18 * 25, 26), nn.ReLU(), nn.Linear(26, 1))

    def forward(self, x):
        x = self.conv(x / 255.0)
        x = x.view(-1, x.size(1) * x.size(2) * x.size(3))
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(dim=1, keepdim=True)


# --------------------------------------------------------------------------------------------------------------------
# Activations that cut or join widths
# --------------------------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------------------------
# Outputs of several kinds
# --------------------------------------------------------------------------------------------------------------------


@hand(image())
class DictOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleDict({"low": ConvBnRelu(3, 12, 3), "high": ConvBnRelu(12, 22, 3, 2)})
        self.heads = nn.ModuleDict({"age": nn.Linear(22, 1), "kind": nn.Linear(22, 7)})
        self.aux = nn.Conv2d(12, 4, 1)

    def forward(self, x):
        low = self.backbone["low"](x)
        pooled = self.backbone["high"](low).mean((2, 3))
        out = {name: head(pooled) for name, head in self.heads.items()}
        out["aux"] = self.aux(low)
        return out


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


# --------------------------------------------------------------------------------------------------------------------
# Operations that look across channels, and constants that know them
# --------------------------------------------------------------------------------------------------------------------


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
            nn.Linear(12, 20),
            nn.Linear(20, 18),
            nn.Linear(8, 26),
            nn.Linear(26, 3),
        )
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
            nn.Linear(14, 22),
            nn.Linear(22, 18),
            nn.Linear(18, 26),
            nn.Linear(26, 3),
        )
        self.operation = operation

    def forward(self, x):
        x = self.operation(self.fc2(F.relu(self.fc1(x))))
        return self.fc4(F.relu(self.fc3(x)))


@hand(sequence(18, 8))
class FourierMixing(nn.Module):
    """FNet: a Fourier transform over positions and width in place of attention."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(18), nn.LayerNorm(18)
        self.fc1, self.fc2, self.out = nn.Linear(18, 34), nn.Linear(34, 18), nn.Linear(18, 3)

    def forward(self, x):
        x = self.norm1(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        return self.out(self.norm2(x + self.fc2(F.gelu(self.fc1(x)))))


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


@hand(vector(14))
class SplitList(nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes = [6, 10, 14]
        self.fc = nn.Linear(14, sum(self.sizes))
        self.heads = nn.ModuleList([nn.Linear(n, 8) for n in self.sizes])
        self.out = nn.Linear(24, 3)

    def forward(self, x):
        parts = torch.split(F.relu(self.fc(x)), self.sizes, dim=1)
        return self.out(torch.cat([torch.tanh(head(part)) for head, part in zip(self.heads, parts, strict=True)], -1))


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
class CapsuleNet(nn.Module):
    """Capsules of 6 numbers whose length is squashed; routing by agreement with einsum, three rounds."""

    def __init__(self, capsules=4, dim=6, classes=3, out_dim=5):
        super().__init__()
        self.dim = dim
        self.conv = nn.Conv2d(3, 18, 5, 2)
        self.primary = nn.Conv2d(18, capsules * dim, 3, 2)
        self.W = nn.Parameter(torch.randn(classes, capsules * 4, dim, out_dim) * 0.3)

    @staticmethod
    def squash(x):
        norm = (x**2).sum(-1, keepdim=True)
        return norm / (1 + norm) * x / torch.sqrt(norm + 1e-8)

    def forward(self, x):
        x = self.primary(F.relu(self.conv(x)))
        b = x.size(0)
        u = self.squash(x.view(b, -1, self.dim, x.size(2) * x.size(3)).transpose(2, 3).reshape(b, -1, self.dim))
        u_hat = torch.einsum("bid,cido->bcio", u, self.W)
        logits = torch.zeros(u_hat.shape[:3], dtype=x.dtype)
        for _ in range(3):
            v = self.squash((logits.softmax(1).unsqueeze(-1) * u_hat).sum(2))
            logits = logits + (u_hat * v.unsqueeze(2)).sum(-1)
        return v.norm(dim=-1)


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


@hand(sequence(16, 9))
class StateSpace(nn.Module):
    """S4D-like diagonal recurrence: a state per channel, in a loop, with discretized parameters."""

    def __init__(self, width=22, state=5):
        super().__init__()
        self.inp, self.out = nn.Linear(16, 2 * width), nn.Linear(width, 6)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(width, 1))
        self.x_proj, self.dt_proj = nn.Linear(width, 3 + 2 * state, bias=False), nn.Linear(3, width)
        self.D = nn.Parameter(torch.ones(width))
        self.state = state

    def forward(self, u):
        x, z = self.inp(u).chunk(2, dim=-1)
        dt, B, C = torch.split(self.x_proj(x), [3, self.state, self.state], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        A = -torch.exp(self.A_log)
        h = torch.zeros(x.shape[0], x.shape[2], self.state, dtype=x.dtype)
        ys = []
        for t in range(x.shape[1]):
            h = torch.exp(dt[:, t, :, None] * A) * h + dt[:, t, :, None] * B[:, t, None, :] * x[:, t, :, None]
            ys.append(torch.einsum("bdn,bn->bd", h, C[:, t]))
        y = torch.stack(ys, dim=1) + x * self.D
        return self.out(y * F.silu(z))


# --------------------------------------------------------------------------------------------------------------------
# Traps: sizes that are equal by accident
# --------------------------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------------------------
# transformers, from small configs
# --------------------------------------------------------------------------------------------------------------------


def _from_config(model: str, config: dict[str, Any]) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()  # they speak of kernels that are missing, in forward too
    model_class = getattr(transformers, model)
    return model_class(model_class.config_class(**config))


def transformer(name: str, model: str, example: Callable[[], Inputs], **config: Any) -> None:
    """Put the class `model` of transformers into the zoo, built from its own config class with `config`."""
    _register("transformers", name, functools.partial(_from_config, model, config), example)


def ids(length: int = 7, vocabulary: int = 53, **more: Callable[[], Tensor]) -> Callable[[], dict[str, Tensor]]:
    def example() -> dict[str, Tensor]:
        return {"input_ids": torch.randint(3, vocabulary, (2, length)), **{k: make() for k, make in more.items()}}

    return example


def pixels(size: int = 32, **more: Callable[[], Tensor]) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size), **{key: make() for key, make in more.items()}}


# Decoders. Heads are 8 wide and their number times 8 is not the width wherever the architecture allows it.
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {"vocab_size": 53, "max_position_embeddings": 32, "use_cache": False, **SPECIAL}
LLAMA = {
    **DECODER,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
ODD = {**LLAMA, "hidden_size": 48}  # for those that compute the width of a head from the width of the model
del ODD["head_dim"]
EAGER = {"attn_implementation": "eager"}
SDPA = {"attn_implementation": "sdpa"}
EXPERTS = {"experts_implementation": "eager"}  # the default multiplies in groups, which float64 has not

GPT2 = {"vocab_size": 53, "n_positions": 32, "n_embd": 36, "n_layer": 2, "n_head": 3, "use_cache": False, **SPECIAL}
transformer("gpt2", "GPT2LMHeadModel", ids(), **GPT2, **EAGER)
transformer("gpt2_sdpa", "GPT2LMHeadModel", ids(), **GPT2, n_inner=52, **SDPA)
transformer("gpt_bigcode", "GPTBigCodeForCausalLM", ids(), **GPT2, n_inner=52)
transformer(
    "gpt_neo",
    "GPTNeoForCausalLM",
    ids(),
    **DECODER,
    hidden_size=36,
    num_layers=2,
    num_heads=3,
    intermediate_size=52,
    attention_types=[[["global", "local"], 1]],
    window_size=4,
    **EAGER,
)
transformer("gptj", "GPTJForCausalLM", ids(), **GPT2, rotary_dim=4, n_inner=52)
NEOX = {**DECODER, "hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 52, "num_hidden_layers": 2}
transformer("gpt_neox", "GPTNeoXForCausalLM", ids(), **NEOX, **SDPA)
transformer(
    "opt",
    "OPTForCausalLM",
    ids(),
    **DECODER,
    hidden_size=36,
    ffn_dim=52,
    num_hidden_layers=2,
    num_attention_heads=3,
    word_embed_proj_dim=20,
    **EAGER,
)
transformer(
    "bloom", "BloomForCausalLM", ids(), vocab_size=53, hidden_size=36, n_layer=2, n_head=3, use_cache=False, **SPECIAL
)
transformer("llama", "LlamaForCausalLM", ids(), **LLAMA, **EAGER)
transformer(
    "llama_sdpa_tied", "LlamaForCausalLM", ids(), **LLAMA, tie_word_embeddings=True, attention_bias=True, **SDPA
)
transformer("mistral", "MistralForCausalLM", ids(), **LLAMA, sliding_window=4, **SDPA)
transformer("qwen2", "Qwen2ForSequenceClassification", ids(), **ODD, num_labels=3, **SDPA)
transformer("qwen3", "Qwen3ForCausalLM", ids(), **LLAMA, **EAGER)
transformer("gemma", "GemmaForCausalLM", ids(), **LLAMA, **EAGER)
transformer("gemma2", "Gemma2ForCausalLM", ids(), **LLAMA, query_pre_attn_scalar=8, sliding_window=4, **EAGER)
transformer("phi", "PhiForCausalLM", ids(), **ODD, partial_rotary_factor=0.5, **SDPA)
transformer("phi3", "Phi3ForCausalLM", ids(), **ODD, original_max_position_embeddings=32, **EAGER)
transformer(
    "falcon",
    "FalconForCausalLM",
    ids(),
    vocab_size=53,
    hidden_size=36,
    num_hidden_layers=2,
    num_attention_heads=3,
    multi_query=True,
    parallel_attn=True,
    use_cache=False,
    **SPECIAL,
    **EAGER,
)
transformer(
    "falcon_new_decoder",
    "FalconForCausalLM",
    ids(),
    vocab_size=53,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_kv_heads=2,
    new_decoder_architecture=True,
    use_cache=False,
    **SPECIAL,
    **SDPA,
)
transformer(
    "mpt", "MptForCausalLM", ids(), vocab_size=53, d_model=36, n_layers=2, n_heads=3, max_seq_len=32, use_cache=False
)
transformer("stablelm", "StableLmForCausalLM", ids(), **ODD, partial_rotary_factor=0.5, **EAGER)
transformer("olmo2", "Olmo2ForCausalLM", ids(), **ODD, **EAGER)
transformer("starcoder2", "Starcoder2ForCausalLM", ids(), **ODD, **SDPA)
transformer("cohere", "CohereForCausalLM", ids(), **ODD, **EAGER)
transformer("granite", "GraniteForCausalLM", ids(), **ODD, residual_multiplier=0.7, **SDPA)
transformer("glm", "GlmForCausalLM", ids(), **LLAMA, **EAGER)
transformer("nemotron", "NemotronForCausalLM", ids(), **LLAMA, **EAGER)
transformer("persimmon", "PersimmonForCausalLM", ids(), **NEOX, partial_rotary_factor=0.5, **EAGER)
transformer("codegen", "CodeGenForCausalLM", ids(), **{**GPT2, "n_embd": 48, "n_head": 4}, rotary_dim=4)
transformer("smollm3", "SmolLM3ForCausalLM", ids(), **ODD, no_rope_layers=[1, 0], **SDPA)
transformer(
    "mixtral", "MixtralForCausalLM", ids(), **ODD, num_local_experts=3, num_experts_per_tok=2, **EAGER, **EXPERTS
)
transformer(
    "mixtral_batched",
    "MixtralForCausalLM",
    ids(),
    **ODD,
    num_local_experts=3,
    num_experts_per_tok=2,
    experts_implementation="batched_mm",
)
transformer(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    ids(),
    **ODD,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
    shared_expert_intermediate_size=28,
    **SDPA,
    **EXPERTS,
)
transformer(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    ids(),
    **DECODER,
    hidden_size=36,
    intermediate_size=52,
    moe_intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=22,
    kv_lora_rank=18,
    qk_nope_head_dim=10,
    qk_rope_head_dim=4,
    v_head_dim=14,
    **EAGER,
    **EXPERTS,
)
MAMBA = {"vocab_size": 53, "hidden_size": 28, "num_hidden_layers": 2, "use_cache": False, **SPECIAL}
transformer("mamba", "MambaForCausalLM", ids(), **MAMBA, state_size=5, time_step_rank=3, conv_kernel=4)
transformer(
    "mamba2", "Mamba2ForCausalLM", ids(), **MAMBA, state_size=6, num_heads=8, head_dim=7, n_groups=2, chunk_size=4
)
transformer(
    "rwkv", "RwkvForCausalLM", ids(), **MAMBA, attention_hidden_size=28, intermediate_size=44, context_length=32
)
transformer(
    "recurrent_gemma",
    "RecurrentGemmaForCausalLM",
    ids(),
    **{**LLAMA, "num_key_value_heads": 1},
    lru_width=42,
    conv1d_width=4,
    attention_window_size=8,
    block_types=("recurrent", "attention"),
)

# Encoders.
BERT = {
    "vocab_size": 53,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 52,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def padded() -> Tensor:
    return torch.tensor([[1] * 7, [1] * 5 + [0] * 2])


transformer("bert", "BertForSequenceClassification", ids(attention_mask=padded), **BERT, num_labels=3, **EAGER)
transformer("bert_masked_sdpa", "BertForMaskedLM", ids(attention_mask=padded), **BERT, **SDPA)
transformer("roberta", "RobertaForTokenClassification", ids(), **BERT, num_labels=5, **SDPA)
transformer(
    "distilbert",
    "DistilBertForSequenceClassification",
    ids(),
    vocab_size=53,
    dim=36,
    hidden_dim=52,
    n_layers=2,
    n_heads=3,
    max_position_embeddings=32,
    **EAGER,
)
transformer("albert", "AlbertForMaskedLM", ids(), **BERT, embedding_size=20, **EAGER)
transformer("electra", "ElectraForPreTraining", ids(), **BERT, embedding_size=20, **SDPA)
transformer(
    "deberta_v2",
    "DebertaV2ForSequenceClassification",
    ids(),
    **BERT,
    relative_attention=True,
    position_buckets=4,
    pos_att_type=["p2c", "c2p"],
    share_att_key=True,
)
transformer("mpnet", "MPNetForSequenceClassification", ids(), **BERT, relative_attention_num_buckets=32)
transformer(
    "xlnet", "XLNetForSequenceClassification", ids(), vocab_size=53, d_model=36, n_layer=2, n_head=3, d_inner=52
)
transformer(
    "funnel",
    "FunnelForSequenceClassification",
    ids(8),
    vocab_size=53,
    block_sizes=[1, 1],
    num_decoder_layers=1,
    d_model=36,
    n_head=3,
    d_head=8,
    d_inner=52,
    max_position_embeddings=32,
)
transformer("longformer", "LongformerForTokenClassification", ids(8), **BERT, attention_window=4)
transformer(
    "convbert",
    "ConvBertForSequenceClassification",
    ids(),
    **{**BERT, "num_attention_heads": 4, "hidden_size": 40},
    embedding_size=20,
)
transformer(
    "squeezebert",
    "SqueezeBertForSequenceClassification",
    ids(),
    **{**BERT, "hidden_size": 48, "num_attention_heads": 4},
    embedding_size=48,
)
transformer("fnet", "FNetForMaskedLM", ids(), **{k: v for k, v in BERT.items() if k != "num_attention_heads"})
transformer("roformer", "RoFormerForMaskedLM", ids(), **BERT, embedding_size=20)
transformer(
    "modernbert",
    "ModernBertForMaskedLM",
    ids(),
    **{**BERT, "num_attention_heads": 3},
    local_attention=4,
    global_attn_every_n_layers=2,
    bos_token_id=1,
    eos_token_id=2,
    cls_token_id=1,
    sep_token_id=2,
    **SDPA,
)

# Sequence to sequence.
SEQ2SEQ = {
    "vocab_size": 53,
    "max_position_embeddings": 32,
    "d_model": 36,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 52,
    "decoder_ffn_dim": 44,
    "use_cache": False,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    **SPECIAL,
}
BOTH = ids(decoder_input_ids=tokens(53, 5))
T5 = {
    "vocab_size": 53,
    "d_model": 36,
    "d_kv": 8,
    "d_ff": 52,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "use_cache": False,
    "relative_attention_num_buckets": 8,
    "decoder_start_token_id": 0,
    **SPECIAL,
}
transformer("t5", "T5ForConditionalGeneration", BOTH, **T5)
transformer(
    "t5_gated", "T5ForConditionalGeneration", BOTH, **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
)
transformer("t5_encoder", "T5EncoderModel", ids(), **{**T5, "num_layers": 2})
transformer("bart", "BartForConditionalGeneration", BOTH, **SEQ2SEQ, **EAGER)
transformer("pegasus", "PegasusForConditionalGeneration", BOTH, **SEQ2SEQ, **SDPA)
transformer("marian", "MarianMTModel", BOTH, **SEQ2SEQ, **EAGER)
transformer("m2m_100", "M2M100ForConditionalGeneration", BOTH, **SEQ2SEQ, **SDPA)
transformer(
    "whisper",
    "WhisperForConditionalGeneration",
    lambda: {"input_features": torch.randn(2, 10, 24), "decoder_input_ids": torch.randint(3, 53, (2, 5))},
    **SEQ2SEQ,
    num_mel_bins=10,
    max_source_positions=12,
    max_target_positions=16,
    suppress_tokens=None,
    begin_suppress_tokens=None,
    **SDPA,
)
transformer(
    "speech_to_text",
    "Speech2TextForConditionalGeneration",
    lambda: {"input_features": torch.randn(2, 24, 10), "decoder_input_ids": torch.randint(3, 53, (2, 5))},
    **SEQ2SEQ,
    input_feat_per_channel=10,
    conv_channels=20,
    max_source_positions=24,
    max_target_positions=16,
    **EAGER,
)

# Vision.
VIT = {
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 52,
    "image_size": 32,
    "patch_size": 8,
}
transformer("vit", "ViTForImageClassification", pixels(), **VIT, num_labels=5, **EAGER)
transformer("vit_sdpa", "ViTForImageClassification", pixels(), **VIT, num_labels=5, qkv_bias=False, **SDPA)
transformer("deit", "DeiTForImageClassificationWithTeacher", pixels(), **VIT, num_labels=5, **EAGER)
transformer(
    "beit",
    "BeitForImageClassification",
    pixels(),
    **VIT,
    num_labels=5,
    use_relative_position_bias=True,
    layer_scale_init_value=0.1,
)
transformer(
    "dinov2",
    "Dinov2ForImageClassification",
    pixels(),
    **{**VIT, "mlp_ratio": 2},
    num_labels=5,
    use_swiglu_ffn=True,
    **SDPA,
)
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 18, "depths": [2, 1], "num_heads": [3, 6], "window_size": 4}
transformer("swin", "SwinForImageClassification", pixels(), **SWIN, mlp_ratio=2.0, num_labels=5)
transformer("swinv2", "Swinv2ForImageClassification", pixels(), **SWIN, mlp_ratio=2.0, num_labels=5)
CONVNEXT = {"hidden_sizes": [14, 22, 30], "depths": [1, 2, 1], "num_stages": 3, "patch_size": 2, "num_labels": 5}
transformer("convnext", "ConvNextForImageClassification", pixels(), **CONVNEXT, layer_scale_init_value=0.5)
transformer("convnextv2", "ConvNextV2ForImageClassification", pixels(), **CONVNEXT)
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [14, 24],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 3],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 20,
    "num_labels": 5,
}
transformer("segformer", "SegformerForSemanticSegmentation", pixels(), **SEGFORMER)
RESNET = {"embedding_size": 14, "depths": [1, 2], "num_labels": 5}
transformer(
    "resnet", "ResNetForImageClassification", pixels(), **RESNET, hidden_sizes=[28, 44], layer_type="bottleneck"
)
transformer(
    "resnet_plain", "ResNetForImageClassification", pixels(), **RESNET, hidden_sizes=[18, 26], layer_type="basic"
)
transformer(
    "regnet", "RegNetForImageClassification", pixels(), **RESNET, hidden_sizes=[24, 36], groups_width=6, layer_type="y"
)
transformer(
    "mobilenet_v1_hf", "MobileNetV1ForImageClassification", pixels(64), depth_multiplier=0.25, min_depth=4, num_labels=5
)
transformer("mobilenet_v2_hf", "MobileNetV2ForImageClassification", pixels(64), depth_multiplier=0.25, num_labels=5)
transformer(
    "mobilevit",
    "MobileViTForImageClassification",
    pixels(64),
    image_size=64,
    hidden_sizes=[12, 20, 28],
    neck_hidden_sizes=[8, 10, 12, 14, 18, 22, 26],
    num_attention_heads=4,
    expand_ratio=2.0,
    num_labels=5,
)
transformer(
    "poolformer",
    "PoolFormerForImageClassification",
    pixels(),
    hidden_sizes=[12, 20, 28],
    depths=[1, 1, 1],
    num_encoder_blocks=3,
    patch_sizes=[7, 3, 3],
    strides=[2, 2, 2],
    padding=[3, 1, 1],
    mlp_ratio=2.0,
    layer_scale_init_value=0.5,
    num_labels=5,
)
transformer(
    "cvt",
    "CvtForImageClassification",
    pixels(),
    embed_dim=[12, 20, 24],
    num_heads=[1, 2, 3],
    depth=[1, 2, 3],  # not less: stage i reads the i-th of its rates of stochastic depth
    mlp_ratio=[2.0, 2.0, 2.0],
    num_labels=5,
)
transformer(
    "pvt_v2",
    "PvtV2ForImageClassification",
    pixels(),
    image_size=32,
    num_encoder_blocks=2,
    depths=[1, 1],
    sr_ratios=[2, 1],
    hidden_sizes=[14, 24],
    patch_sizes=[7, 3],
    strides=[4, 2],
    num_attention_heads=[1, 3],
    mlp_ratios=[2, 2],
    num_labels=5,
)
transformer(
    "efficientnet_hf",
    "EfficientNetForImageClassification",
    pixels(),
    image_size=32,
    width_coefficient=0.4,
    depth_coefficient=0.3,
    depth_divisor=2,
    hidden_dim=512,
    kernel_sizes=[3, 5],
    in_channels=[32, 20],
    out_channels=[20, 36],
    depthwise_padding=[],
    strides=[1, 2],
    num_block_repeats=[1, 2],
    expand_ratios=[1, 3],
    num_hidden_layers=12,
    num_labels=5,
)
transformer(
    "yolos",
    "YolosForObjectDetection",
    pixels(),
    **{**VIT, "image_size": [32, 32]},
    num_detection_tokens=4,
    num_labels=5,
    **EAGER,
)
transformer("vit_mae_encoder", "ViTMAEModel", pixels(noise=lambda: torch.rand(2, 16)), **VIT, **SDPA)
transformer(
    "bit",
    "BitForImageClassification",
    pixels(),
    embedding_size=16,
    hidden_sizes=[32, 48],
    depths=[1, 1],
    num_groups=4,
    num_labels=5,
)

# Text beside images, and sound.
TEXT = {**BERT, "hidden_size": 28, "num_attention_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
CLIP = {"text_config": TEXT, "vision_config": VIT}
transformer("clip", "CLIPModel", lambda: {**ids()(), **pixels()()}, **CLIP, projection_dim=22, **EAGER)
transformer(
    "siglip",
    "SiglipModel",
    lambda: {**ids()(), **pixels()()},
    **{**CLIP, "text_config": {**TEXT, "projection_size": 36}},
    **SDPA,
)
transformer(
    "blip",
    "BlipForConditionalGeneration",
    lambda: {**ids()(), **pixels()()},
    text_config={**TEXT, "encoder_hidden_size": 36, "use_cache": False, "sep_token_id": 2},
    vision_config=VIT,
    projection_dim=22,
)
transformer(
    "llava",
    "LlavaForConditionalGeneration",
    lambda: {"input_ids": torch.cat([torch.full((2, 16), 52), torch.randint(3, 52, (2, 5))], 1), **pixels()()},
    text_config={**LLAMA, "model_type": "llama"},
    vision_config={**VIT, "model_type": "clip_vision_model", "projection_dim": 22},
    image_token_id=52,
    vision_feature_layer=-1,
)
AUDIO = {
    "vocab_size": 17,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 52,
    "conv_dim": (14, 18, 22),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 2),
    "conv_bias": False,
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 3,
    "apply_spec_augment": False,
}


def wave() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 400)}


transformer("wav2vec2", "Wav2Vec2ForCTC", wave, **AUDIO, **EAGER)
transformer(
    "wav2vec2_layer_norm",
    "Wav2Vec2Model",
    wave,
    **{**AUDIO, "conv_bias": True},
    feat_extract_norm="layer",
    do_stable_layer_norm=True,
    **SDPA,
)
transformer("hubert", "HubertForSequenceClassification", wave, **AUDIO, num_labels=3, classifier_proj_size=20, **SDPA)
transformer("wavlm", "WavLMModel", wave, **AUDIO, num_buckets=8, max_bucket_distance=16)
transformer("sew", "SEWModel", wave, **AUDIO, squeeze_factor=2)
transformer("wav2vec2_conformer", "Wav2Vec2ConformerModel", wave, **AUDIO, conv_depthwise_kernel_size=5)
transformer(
    "audio_spectrogram_transformer",
    "ASTForAudioClassification",
    lambda: {"input_values": torch.randn(2, 24, 16)},
    hidden_size=36,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=52,
    patch_size=8,
    frequency_stride=4,
    time_stride=4,
    max_length=24,
    num_mel_bins=16,
    num_labels=5,
    **EAGER,
)
