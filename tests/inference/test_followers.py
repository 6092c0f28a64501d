"""What alone reads a convolution's output is found, and nothing that anybody else reads."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from secateur.inference.blocks import Absorbed, may_be_absorbed, may_follow, run_and_follow


class Parts(nn.Module):
    def __init__(self, forward, **modules):
        super().__init__()
        self.own = forward
        self.conv, self.norm, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        for name, module in modules.items():
            setattr(self, name, module)
        self.eval()

    def forward(self, x):
        return self.own(self, x)


def found(model, x=None):
    convolutions = {name: each for name, each in model.named_modules() if isinstance(each, nn.Conv2d)}
    x = torch.randn(1, 3, 8, 8) if x is None else x
    with torch.no_grad():
        return run_and_follow(convolutions, may_follow(model), lambda: model(x))[0]["conv"]


def twice(self, x):
    y = self.conv(x)
    return self.norm(y) + y


def kept(self, x):
    y = self.conv(x)
    return self.relu(self.norm(y)), y


def looked_at(self, x):
    y = self.conv(x)
    self.mean = float(y.mean())
    return self.norm(y)


def in_a_view(self, x):
    y = self.conv(x)
    return self.norm(y), y.view(-1).sum()


def read_between(self, x):
    y = self.norm(self.conv(x))
    return self.relu(y) + y.detach()


def changed_between(self, x):
    y = self.conv(x)
    y += 1
    return self.norm(y)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda self, x: self.relu(self.norm(self.conv(x))), ["norm", "relu"]),
        (lambda self, x: self.relu(self.conv(x)), ["relu"]),
        (lambda self, x: self.norm(self.conv(x)), ["norm"]),
        (lambda self, x: self.norm(self.relu(self.conv(x))), ["relu"]),
        (lambda self, x: functional.relu(self.norm(self.conv(x))), ["norm"]),
        (lambda self, x: self.relu(self.norm(self.conv(x)) + 1), ["norm"]),
        (lambda self, x: self.conv(x), []),
        (lambda self, x: self.norm(self.conv(x) * 2), []),
        (lambda self, x: self.relu(self.norm(self.conv(x))) + self.relu(x).sum(), ["norm"]),
        (lambda self, x: self.norm(self.conv(x)) + self.conv(x), []),
        (twice, []),
        (kept, []),
        (looked_at, []),
        (in_a_view, []),
        (read_between, ["norm"]),
        (changed_between, []),
    ],
)
def test_what_alone_reads_the_output(forward, expected):
    assert found(Parts(forward)) == expected


def test_a_relu_in_place_is_found_and_its_readers_are_its_own():
    assert found(Parts(lambda self, x: self.relu(self.norm(self.conv(x))) * 2, relu=nn.ReLU(inplace=True))) == [
        "norm",
        "relu",
    ]

    def read_before(self, x):
        y = self.conv(x)
        total = y.sum()
        return self.relu(y) * total

    assert found(Parts(read_before, relu=nn.ReLU(inplace=True))) == []


def test_identities_between_are_no_readers():
    model = Parts(lambda self, x: self.relu(self.drop(self.norm(self.conv(x)))), drop=nn.Identity())
    assert found(model) == ["norm", "relu"]


def test_a_module_of_two_names_is_left():
    norm = nn.BatchNorm2d(4)
    model = Parts(lambda self, x: self.norm(self.conv(x)), norm=norm, again=norm)
    assert found(model) == []


def test_what_may_be_absorbed():
    class Own(nn.BatchNorm2d):
        pass

    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    assert may_be_absorbed(nn.ReLU())
    assert may_be_absorbed(nn.BatchNorm1d(3).eval())
    for module in (hooked, Own(3).eval(), nn.BatchNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False).eval()):
        assert not may_be_absorbed(module)
    assert all(map(may_be_absorbed, (nn.ReLU6(), nn.Hardtanh(0, 6), nn.Hardswish(), nn.SiLU())))
    assert not any(
        map(may_be_absorbed, (nn.GELU(), nn.Hardtanh(), nn.BatchNorm3d(3).eval(), nn.Identity(), Absorbed()))
    )


def test_nothing_is_left_behind():
    model = Parts(lambda self, x: self.norm(self.conv(x)))
    found(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(RuntimeError):
        found(model, torch.randn(1, 5, 8, 8))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
