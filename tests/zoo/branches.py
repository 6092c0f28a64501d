"""Convolutions whose pixels, groups and branches are rearranged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from zoo.convolutional import ConvBnRelu
from zoo.registry import hand, image, several, vector


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
        nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 36, 3, padding=1, groups=12), nn.BatchNorm2d(36),
        nn.ReLU(), nn.Conv2d(36, 22, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(22, 6),
    )  # fmt: skip


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
        RepVggBlock(3, 12), RepVggBlock(12, 12), RepVggBlock(12, 26, 2), RepVggBlock(26, 26), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(26, 10),
    )  # fmt: skip


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
        ConvBnRelu(3, 22, 3), Res2Block(22, 6, 4), Res2Block(22, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(22, 10),
    )  # fmt: skip


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
