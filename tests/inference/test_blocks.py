"""Blocks with a shortcut compute the same with their sums in a convolution's store, or are left alone."""

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional

from secateur import sparsify
from secateur.allocation import uniform
from secateur.inference import Absorbed, SparseConv2d, blocks, load_packed, pack, save_packed
from secateur.inference.blocks import FusedBlock, FusedSequential, chains, fused_block, sequences, twin_of
from secateur.native import available


class Block(nn.Module):
    def __init__(self, own, **modules):
        super().__init__()
        self.own = own
        for name in ("one", "two"):
            convolution = nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False)
            setattr(self, name, SparseConv2d.from_module(convolution))
        self.relu, self.norm = nn.ReLU(), Absorbed()
        for name, module in modules.items():
            setattr(self, name, module)
        self.eval()

    def forward(self, x):
        return self.own(self, x)


def in_place(self, x):
    y = self.two(self.relu(self.one(x)))
    y += x
    return self.relu(y)


def both(self, x):
    return self.one(x) + self.two(x)


def chained(self, x):
    return (self.two(functional.relu(self.norm(self.one(x)))) + x).relu()


def broadcast(self, x):
    return torch.relu(self.one(x) + self.pool(x))


@pytest.mark.parametrize(
    ("forward", "left"),
    [
        (lambda self, x: torch.relu(x + self.two(self.one(x))), 0),
        (lambda self, x: self.relu(self.one(x)) + self.two(x), 0),
        (lambda self, x: torch.add(self.two(self.norm(self.one(x))), x), 0),
        (lambda self, x: self.relu(self.one(x)) + self.relu(self.two(x)), 1),
        (lambda self, x: self.relu(self.two(x) + self.one(x) + x), 2),
        (in_place, 0),
        (both, 0),
        (chained, 0),
        (broadcast, 0),
    ],
)
def test_a_fused_block_is_the_block(forward, left):
    block, x = Block(forward, pool=nn.AdaptiveAvgPool2d(1)), torch.randn(2, 4, 6, 6)
    expected = block(x)
    fused = fused_block(block)
    torch.testing.assert_close(fused(x), expected, rtol=1e-5, atol=1e-5)
    assert len([name for name, _, _ in fused.steps if name not in ("one", "two", "pool")]) == left
    assert torch.equal(fused(x=x), fused(x))
    assert [*fused.state_dict()] == [*block.state_dict()]
    close = torch.compile(fused, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(close, expected, rtol=1e-5, atol=1e-5)
    for again in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert torch.equal(again(x), fused(x))
        assert again.rectified == fused.rectified
    assert fused_block(fused) is None


def projected(self, x):
    """As the first block of a residual network's stage: what is added is made here, and nobody else has it."""
    return torch.relu(self.two(self.relu(self.one(x))) + self.shortcut(x))


class Stage(nn.Module):
    """What transformers has around its blocks."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def stage(**more):
    """A stage of fused blocks inside a model, and the same of blocks that are not fused."""
    shortcut = SparseConv2d.from_module(nn.Conv2d(4, 4, 1).requires_grad_(False))
    plain = [Block(projected, shortcut=shortcut), Block(chained), Block(in_place, **more)]
    fused = [fused_block(copy.deepcopy(each)) for each in plain]
    model = nn.Sequential(Stage(*fused))
    for name, chain in chains(model).items():
        model.set_submodule(name, chain)
    return model, Stage(*plain)


@pytest.mark.parametrize("images", [1, 2, 5])
def test_a_chain_of_blocks_is_the_blocks_and_leaves_its_input_alone(images, monkeypatch):
    monkeypatch.setattr(blocks, "_NEAR_BYTES", 0)
    model, plain = stage()
    assert isinstance(model[0], FusedBlock)
    assert model[0].is_chain
    x = torch.randn(images, 4, 14, 14)
    before = x.clone()
    expected = plain(x)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(model(x), model(x))
    assert torch.equal(x, before)
    torch.testing.assert_close(model[0].layers(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)
    close = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(close, expected, rtol=1e-5, atol=1e-5)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(x), model(x))
    assert [*model[0].state_dict()] == [*plain.state_dict()]


def test_gradients_flow_through_a_chain(monkeypatch):
    monkeypatch.setattr(blocks, "_NEAR_BYTES", 0)
    model, plain = stage()
    x = torch.randn(3, 4, 14, 14, requires_grad=True)
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "where", ["0.layers.0.shortcut", "0.layers.0", "0.layers.1", "0.layers.1.one", "0.layers.2.two"]
)
def test_what_a_hook_keeps_stays_as_it_was(where, monkeypatch):
    monkeypatch.setattr(blocks, "_NEAR_BYTES", 0)
    model, _ = stage()
    x, kept = torch.randn(3, 4, 14, 14), []

    def keep(module, given, made):
        kept.extend((each, each.clone()) for each in (*given, made))

    expected = model(x)
    model.get_submodule(where).register_forward_hook(keep)
    apart = 0 if available() else 1e-4  # torch sums a batch in another order than an image
    torch.testing.assert_close(model(x), expected, rtol=apart, atol=apart)
    assert kept
    assert all(torch.equal(each, copied) for each, copied in kept)


def test_what_is_no_line_of_blocks_is_no_chain():
    one, two = fused_block(Block(chained)), fused_block(Block(projected, shortcut=Block(both).one))
    assert not chains(nn.Sequential(one, two))
    assert not chains(nn.Sequential(Stage(one)))
    assert not chains(nn.Sequential(Stage(one, nn.Tanh(), two)))
    watched = Stage(one, two)
    watched.register_forward_hook(lambda *_: None)
    assert not chains(nn.Sequential(watched))


def looks(self, x):
    if x.sum() > 0:
        return self.one(x) + x
    return self.two(x) + x


def twice(self, x):
    return self.two(self.one(self.one(x)) + x) + x


@pytest.mark.parametrize(
    "forward",
    [
        looks,
        twice,
        lambda self, x: self.two(self.one(x)),
        lambda self, x: self.two(self.one(x)) * 2 + x,
        lambda self, x: torch.add(self.two(self.one(x)), x, alpha=2),
        lambda self, x: self.one(self.two(x)) + 1.0,
        lambda self, x: {"y": self.one(self.two(x)).view(-1)},
    ],
)
def test_what_is_not_simple_is_left(forward):
    block = Block(forward)
    flags = block.one.rectified, block.two.rectified
    assert fused_block(block) is None
    assert (block.one.rectified, block.two.rectified) == flags


def test_blocks_with_hooks_and_containers_are_left():
    block = Block(both)
    block.register_forward_hook(lambda *_: None)
    assert fused_block(block) is None
    assert fused_block(nn.Sequential(Block(both).one)) is None
    assert fused_block(nn.Linear(2, 2)) is None


def test_a_twin_has_other_modules_and_the_same_parameters():
    block = Block(both, inner=nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    twin = twin_of(block, {"inner.1": nn.Tanh()})
    assert isinstance(twin.inner[1], nn.Tanh)
    assert isinstance(block.inner[1], nn.ReLU)
    assert twin.inner[0].weight is block.inner[0].weight
    assert type(twin) is Block


def settled(model):
    model = model.eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 2.0)
            module.running_mean.normal_(0, 0.1)
    return model


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 24], depths=[1, 2], layer_type="basic", num_labels=3)
    return settled(ResNetForImageClassification(config))


@pytest.mark.skipif(not available(), reason="there are no compiled kernels here")
def test_a_residual_network_of_transformers(clock, tmp_path):
    clock(2.0)
    model, x = resnet(), torch.randn(2, 3, 32, 32)
    sparsify(model, 0.8, allocate=uniform)
    expected = model(x).logits
    packing = pack(model, x)
    assert len(packing.blocks) == 3
    assert [each.is_chain for each in model.modules() if isinstance(each, FusedBlock)] == [False, True, False, False]
    assert "Blocks that add and rectify in the store of a convolution: 3." in str(packing)
    torch.testing.assert_close(model(x).logits, expected, rtol=1e-4, atol=1e-5)
    left = [name for name, each in model.named_modules() if isinstance(each, nn.BatchNorm2d)]
    assert not any(".layer." in name for name in left)
    told = save_packed(model, tmp_path / "packed.safetensors")
    again = resnet()
    assert load_packed(again, tmp_path / "packed.safetensors").layers == told.layers
    assert torch.equal(again(x).logits, model(x).logits)
    kinds = [type(each).__name__ for each in model.modules()]
    assert [type(each).__name__ for each in again.modules()] == kinds
    save_packed(copy.deepcopy(again), tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "packed.safetensors").read_bytes()


class Shortcut(nn.Module):
    """The blocks of torchvision's ResNets: one ReLU that is called several times, in place."""

    def __init__(self, channels, outputs, stride=1, narrow=0):
        super().__init__()
        inner = narrow or outputs
        self.conv1 = nn.Conv2d(
            channels, inner, 1 if narrow else 3, 1 if narrow else stride, 0 if narrow else 1, bias=False
        )
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride if narrow else 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False) if narrow else None
        self.bn3 = nn.BatchNorm2d(outputs) if narrow else None
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or channels != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.conv3 is not None:
            out = self.bn3(self.conv3(self.relu(out)))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Torchvision(nn.Module):
    def __init__(self, narrow=0):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Shortcut(8, 16, 1, narrow), Shortcut(16, 16, 1, narrow))
        self.layer2 = nn.Sequential(Shortcut(16, 24, 2, narrow), Shortcut(24, 24, 1, narrow))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(24, 5)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


@pytest.mark.skipif(not available(), reason="there are no compiled kernels here")
@pytest.mark.parametrize("formats", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("narrow", [0, 8])
def test_a_residual_network_as_torchvision_has_it(clock, narrow, formats, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "_NEAR_BYTES", 0)
    clock(2.0)
    model, x = settled(Torchvision(narrow)), torch.randn(3, 3, 56, 56)
    sparsify(model, 0.8, exclude="conv1.weight", allocate=uniform)
    expected = model(x)
    packing = pack(model.to(memory_format=formats), x.contiguous(memory_format=formats))
    assert packing.blocks == ("layer2.1", "layer2.0", "layer1.1", "layer1.0")
    assert isinstance(model.layer1, FusedSequential)
    assert isinstance(model.layer2, FusedSequential)
    assert all(each.steps[-1][0] not in ("+", "relu()") for each in model.modules() if isinstance(each, FusedBlock))
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        model.layer1[1](model.layer1[0](x[:, :1].expand(-1, 8, -1, -1).relu())).shape, (3, 16, 56, 56)
    )
    save_packed(model, tmp_path / "packed.safetensors")
    again = settled(Torchvision(narrow))
    load_packed(again, tmp_path / "packed.safetensors")
    assert torch.equal(again(x), model(x))
    assert torch.equal(model(x.contiguous(memory_format=torch.channels_last)), model(x))
    assert [type(each) for each in again.modules()] == [type(each) for each in model.modules()]


def plain_line(**more):
    torch.manual_seed(0)
    last = nn.Conv2d(8, 8, 3)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU6(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), last,
    ]  # fmt: skip
    return settled(nn.Sequential(*layers, nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.Hardswish(), nn.Flatten()))


@pytest.mark.skipif(not available(), reason="there are no compiled kernels here")
@pytest.mark.parametrize("images", [1, 2, 5])
def test_packed_layers_of_a_sequential_run_as_a_chain(clock, images, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "_NEAR_BYTES", 0)
    clock(2.0)
    model, x = plain_line(), torch.randn(images, 3, 14, 14)
    sparsify(model, 0.8, allocate=uniform)
    before, expected = x.clone(), model(x)
    packing = pack(model, x)
    assert [layer.fused for layer in packing.layers] == [("1",), ("3", "4"), (), ("8",)]
    assert type(model) is FusedSequential
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(x, before)
    assert torch.equal(model(x), nn.Sequential(*model)(x))
    assert torch.equal(model[3:](model[:3](x)), model(x))
    close = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(close, expected, rtol=1e-4, atol=1e-5)
    save_packed(model, tmp_path / "packed.safetensors")
    again = plain_line()
    load_packed(again, tmp_path / "packed.safetensors")
    for each in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(each) is FusedSequential
        assert torch.equal(each(x), model(x))
    kept = []
    model[2].register_forward_hook(
        lambda module, given, made: kept.extend((each, each.clone()) for each in (*given, made))
    )
    assert torch.equal(model(x), again(x))
    assert kept
    assert all(torch.equal(each, copied) for each, copied in kept)
    model.append(nn.Tanh())
    assert torch.equal(model(x), again(x).tanh())
    watched = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(again(watched).square().sum(), watched)
    (wanted,) = torch.autograd.grad(nn.Sequential(*again)(watched).square().sum(), watched)
    torch.testing.assert_close(found, wanted)


def test_a_sequential_without_a_line_stays(clock):
    one = SparseConv2d.from_module(nn.Conv2d(4, 4, 1).requires_grad_(False))
    assert not sequences(nn.Sequential(one, nn.Tanh(), copy.deepcopy(one)))
    assert not sequences(nn.Sequential(nn.Sequential(one)))
    model = nn.Sequential(nn.Sequential(one, Absorbed(), copy.deepcopy(one)), nn.Tanh())
    assert not sequences(model, only=["1"])
    assert sequences(model) == ["0"]
    assert sequences(model) == []


def test_a_relu_after_another_activation_stays():
    block = Block(lambda self, x: torch.relu(self.one(x)) + self.two(x))
    block.one.rectified, block.one.rectifier = True, "hardswish"
    x = torch.randn(2, 4, 6, 6)
    expected = block(x)
    torch.testing.assert_close(fused_block(block)(x), expected, rtol=1e-5, atol=1e-5)
    assert block.one.rectifier == "hardswish"


@pytest.mark.skipif(not available(), reason="there are no compiled kernels here")
@pytest.mark.parametrize("size", [7, 14, 16])
def test_what_a_chain_returns_lies_side_by_side(size):
    model, plain = stage()
    x = torch.randn(2, 4, size, size)
    made = model(x)
    assert made.is_contiguous()
    torch.testing.assert_close(made, plain(x), rtol=1e-5, atol=1e-5)
    assert made.view(2, -1).shape == (2, 4 * size * size)


def changed_in_place(model):
    layer = model[0].layers[1].one
    layer.values.mul_(2)
    return model


def of_other_places(model):
    layer = model[0].layers[1].one
    layer.indices.copy_(layer.indices.int().flip(0).to(layer.indices.dtype))
    return model


def with_another_bias(model):
    model[0].layers[1].one.bias = torch.ones(4)
    return model


def with_another_layer(model):
    torch.manual_seed(9)
    model.set_submodule("0.layers.1.one", SparseConv2d.from_module(nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False)))
    return model


def rectified_no_more(model):
    model[0].layers[0].two.rectified = False
    return model


def with_a_hook(model):
    model[0].layers[1].one.register_forward_hook(lambda module, given, made: made + 1)
    return model


CHANGES = [changed_in_place, of_other_places, with_another_bias, with_another_layer, rectified_no_more, with_a_hook]


@pytest.mark.skipif(not available(), reason="there are no compiled kernels here")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_chain_runs_again_by_its_kernels_alone_until_something_changes(change, threads, monkeypatch):
    before, torch_threads = blocks._made_in_line, torch.get_num_threads()
    model, _ = stage()
    x = torch.randn(2, 4, 14, 14)
    torch.set_num_threads(threads)
    try:
        expected = model(x)
        monkeypatch.setattr(blocks, "_made_in_line", None)
        assert all(torch.equal(model(x), expected) for _ in range(3))
        y = x + 1
        kept = model(y)  # what a call returned is nobody else's
        model(x)
        monkeypatch.setattr(blocks, "_made_in_line", before)
        assert torch.equal(kept, copy.deepcopy(model)(y))
        fresh = change(copy.deepcopy(model))
        changed = change(model)
        assert torch.equal(changed(x), fresh(x))
        assert not torch.equal(changed(x), expected)
    finally:
        torch.set_num_threads(torch_threads)


@pytest.mark.skipif(not available(), reason="there are no compiled kernels here")
def test_a_chain_runs_in_several_threads_at_once():
    model, _ = stage()
    xs = [torch.randn(1, 4, size, size) for size in range(6, 30)]  # more than are remembered
    expected = [copy.deepcopy(model)(x) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for made, wanted in zip(pool.map(model, xs * 5), expected * 5, strict=True):
            assert torch.equal(made, wanted)
    assert len(blocks._CHAINS[model[0]]) < blocks._MOST_CHAINS + 4
    known = len(blocks._CHAINS)
    del model
    gc.collect()
    assert len(blocks._CHAINS) < known


def test_what_a_chain_can_not_run_again_runs_as_before():
    block, x = fused_block(Block(lambda self, x: self.relu(self.two(x) + self.one(x) + x))), torch.randn(2, 4, 6, 6)
    assert torch.equal(block(x), block(x))
    assert block not in blocks._CHAINS
    with torch.inference_mode():  # whose tensors do not count their changes
        model, _ = stage()
        assert torch.equal(model(x), model(x))
        assert [*blocks._CHAINS[model[0]].values()] == [None]
    turned = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(turned), model(x))
