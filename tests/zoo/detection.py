"""Convolutions that detect and segment."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.convolutional import ConvBnRelu
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
