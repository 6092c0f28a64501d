"""Shrink a detector with a neck and three heads, and train it on: python examples/detector.py [--quick]

It finds handwritten digits of two sizes in pictures: a backbone; a neck that adds its levels as feature pyramids do;
heads for objects, digits and centres, which both levels share. Half of its work leaves. About a minute.
"""

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from secateur import shrink

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="fewer steps")
steps = 150 if parser.parse_args().quick else 500

pixels, classes = load_digits(return_X_y=True)
order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
glyphs = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)[order]
labels = torch.tensor(classes)[order]


def scenes(count, first, last):
    """Pictures of 48 x 48 with digits of these numbers; of each level's cells: is a centre there, of what, where."""
    pictures, levels = torch.zeros(count, 1, 48, 48), []
    for size in (8, 16):  # small digits belong to the fine level, whose cells are as large as they are
        cells = 48 // size
        there, digit, centre = (torch.zeros(count, *more, cells, cells) for more in ((), (), (2,)))
        for at, row, column in (torch.rand(count, cells // 2, cells // 2) < 0.3).nonzero().tolist():
            which = int(torch.randint(first, last, ()))
            top, left = 2 * size * torch.tensor([row, column]) + size // 2 * torch.randint(2, (2,))
            pictures[at, :, top : top + size, left : left + size] += functional.interpolate(glyphs[[which]], size)[0]
            y, x = (top / size + 0.5).item(), (left / size + 0.5).item()
            there[at, int(y), int(x)], digit[at, int(y), int(x)] = 1, labels[which]
            centre[at, :, int(y), int(x)] = torch.tensor([y % 1, x % 1])
        levels.append((there, digit.long(), centre))
    return pictures.clamp(0, 1), levels


def conv(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(conv(1, 12, 2), conv(12, 24, 2), conv(24, 48, 2))
        self.deeper = nn.Sequential(conv(48, 64, 2), conv(64, 64))
        self.fine, self.coarse, self.smooth = nn.Conv2d(48, 32, 1), nn.Conv2d(64, 32, 1), conv(32, 32)
        self.objects = nn.Sequential(conv(32, 32), nn.Conv2d(32, 1, 1))
        self.digits = nn.Sequential(conv(32, 32), nn.Conv2d(32, 10, 1))
        self.centres = nn.Sequential(conv(32, 32), nn.Conv2d(32, 2, 1))

    def forward(self, pictures):
        fine = self.stem(pictures)
        coarse = self.coarse(self.deeper(fine))
        fine = self.smooth(self.fine(fine) + functional.interpolate(coarse, scale_factor=2))
        return [(self.objects(level), self.digits(level), self.centres(level)) for level in (fine, coarse)]


def fit(model, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch, loss = torch.randint(len(pictures), (16,)), torch.zeros(())
        for found, wanted in zip(model.train()(pictures[batch]), levels, strict=True):
            there, digit, centre = (each[batch] for each in wanted)
            at = there > 0
            loss = loss + functional.binary_cross_entropy_with_logits(found[0][:, 0], there)
            loss = loss + functional.cross_entropy(found[1].movedim(1, -1)[at], digit[at])
            loss = loss + functional.l1_loss(found[2].movedim(1, -1)[at], centre.movedim(1, -1)[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def tell(name, model):
    right = called = real = 0
    for found, (there, digit, _) in zip(model.eval()(unseen), expected, strict=True):
        says = found[0][:, 0] > 0
        right += ((there > 0) & says & (found[1].argmax(1) == digit)).sum().item()
        called, real = called + says.sum().item(), real + there.sum().item()
    size = sum(each.numel() for each in model.parameters())
    print(f"{name:<24} {size:>10,} {right / real:>12.1%} {right / max(1, called):>14.1%}")


torch.manual_seed(0)
(pictures, levels), (unseen, expected) = scenes(600, 0, 1200), scenes(100, 1200, 1797)
print(f"{'':<24} {'parameters':>10} {'found, right':>12} {'right of found':>14}")
model = Detector()
fit(model, steps)
tell("dense", model)
small = copy.deepcopy(model)
done = shrink(small, pictures[:2], 0.5, target="macs", batches=[pictures[:256]])
tell("shrunken", small)
fit(small, steps)
tell("  and trained on", small)
fit(model, steps)
tell("dense, trained on", model)
print(f"multiply-adds of two pictures: {done.multiply_adds[0]:,} before, {done.multiply_adds[1]:,} after")
