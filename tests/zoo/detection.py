"""Convolutions that detect and segment."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.convolutional import BasicBlock, ConvBnRelu
from zoo.registry import hand, image


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
