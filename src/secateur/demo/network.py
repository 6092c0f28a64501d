"""The small residual network that reads the digits."""

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["DigitsNet"]


class _Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the number of channels changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        changes = inputs != outputs or stride != 1
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class DigitsNet(nn.Module):
    """A residual network of three blocks for images of shape (n, 1, 8, 8); returns logits of shape (n, 10).

    >>> import torch
    >>> DigitsNet()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, narrow: int = 16, wide: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, narrow, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(narrow)
        self.blocks = nn.Sequential(_Block(narrow, narrow, 1), _Block(narrow, wide, 2), _Block(wide, wide, 1))
        self.head = nn.Linear(wide, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(functional.relu(self.norm(self.stem(x))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits
