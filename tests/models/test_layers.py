"""Networks without blocks: their layers, in the order in which they run, are the stages."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.support.digits import digits, trained
from secateur import NM, Channels, Rows, sensitivity, shrink, sparsify
from secateur.models import oneshot
from secateur.models.blocks import find_blocks
from secateur.solvers import aimed, sparsegpt
from support.families import make
from support.stacks import WANDA, Block2, data, stack


class CNN(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.enter, self.depthwise = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, groups=width)
        self.mix, self.up = nn.Conv2d(width, 2 * width, 1), nn.ConvTranspose2d(2 * width, width, 2)
        self.head = nn.Linear(width * 49, 10)

    def forward(self, x):
        x = self.enter(x.view(-1, 1, 8, 8)).relu()
        x = self.mix(self.depthwise(x)).relu()
        return self.head(self.up(x).relu().flatten(1))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **settings):
        super().__init__()
        self.recurrent = kind(8, 40, batch_first=True, **settings)
        self.head = nn.Linear(40 * (2 if self.recurrent.bidirectional else 1), 10)

    def forward(self, x):
        return self.head(self.recurrent(x.view(-1, 8, 8))[0][:, -1])


class Plain(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.one, self.two = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(2 * width)
        self.inner, self.head = nn.Linear(32 * width, 48), nn.Linear(48, 10)

    def forward(self, x):
        x = self.norm(self.two(self.one(x.view(-1, 1, 8, 8)).relu())).relu()
        return self.head(self.inner(x.flatten(1)).relu())


def images(count=4, size=16):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, 64, generator=generator) for _ in range(count)]


@pytest.fixture(scope="module")
def images_and_labels():
    x, y = digits()
    return x[:1200], y[:1200], x[1200:], y[1200:]


@pytest.mark.parametrize("make", [Plain, Recurrent], ids=["convolutions", "recurrent"])
def test_a_trained_network_loses_at_most_a_quarter_of_what_the_best_criterion_loses(images_and_labels, make):
    torch.manual_seed(0)
    x, y, held_out, labels = images_and_labels
    model = trained(make(), x, y, steps=350)
    batches = [x[at : at + 64] for at in range(0, 512, 64)]

    @torch.no_grad()
    def right(network):
        return float((network(held_out).argmax(1) == labels).float().mean())

    rivals = []
    for criterion in ("magnitude", "wanda", "ria"):
        other = copy.deepcopy(model)
        sparsify(other, 0.8, criterion=criterion, batches=batches)
        rivals.append(right(other))
    pruned = copy.deepcopy(model)
    done = oneshot(pruned, batches, 0.8)
    assert done.sparsity == pytest.approx(0.8, abs=1e-3)
    assert not done.left_alone
    dense = right(model)
    assert dense - max(rivals) > 0.03, "there is something to lose"
    assert dense - right(pruned) <= (dense - max(rivals)) / 4


def test_each_layer_is_solved_on_what_the_pruned_ones_before_it_give():
    """By hand, with the dense model beside it, and its first convolution as a product with patches."""
    torch.manual_seed(0)
    model = Plain(4).eval()
    dense, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    oneshot(model, images(), 0.5, solver=sparsegpt, pattern=Rows())
    x = torch.cat(images())

    def inputs(network, number):
        steps = [
            lambda x: x.view(-1, 1, 8, 8),
            lambda x: network.one(x).relu(),
            lambda x: network.norm(network.two(x)).relu().flatten(1),
            lambda x: network.inner(x).relu(),
        ]
        found = x
        for step in steps[: number + 1]:
            found = step(found)
        if number > 1:
            return found
        stride = 2 if number else 1
        return nn.functional.unfold(found, 3, padding=1, stride=stride).mT.flatten(0, 1)

    with torch.no_grad():
        for number, layer in enumerate((by_hand.one, by_hand.two, by_hand.inner, by_hand.head)):
            seen, wanted = inputs(by_hand, number), inputs(dense, number)
            gram, weight = seen.T @ seen, layer.weight.flatten(1)
            target = aimed(weight, weight @ ((wanted - seen).T @ seen), gram=gram, aim=0.5) if number else weight
            layer.weight.copy_(sparsegpt(target, 0.5, Rows(), gram=gram)[0].view_as(layer.weight))
    for (name, one), other in zip(model.state_dict().items(), by_hand.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=name)


def test_convolutions_in_groups_and_what_is_left_alone():
    torch.manual_seed(0)
    model = CNN()
    done = oneshot(model, images(), 0.5)
    assert [layer.name for layer in done.layers] == ["enter.weight", "depthwise.weight", "mix.weight", "head.weight"]
    assert done.left_alone == {"not a matrix that inputs are multiplied with": ("up.weight",)}
    per_kernel = model.depthwise.weight.detach().flatten(1).eq(0).sum(1)
    assert set(per_kernel.tolist()) == {4}, "each group competes by itself"
    assert done.layers[0].tokens == 4 * 16 * 64


def test_patterns_see_convolutions_as_sparsify_does():
    torch.manual_seed(0)
    model = Plain(8)
    done = oneshot(model, images(), pattern=NM(2, 4), exclude="one.weight")
    kept = model.two.weight.detach().ne(0).movedim(1, -1).reshape(-1, 4).sum(1)
    assert set(kept.tolist()) == {2}, "of each four channels at one place of the kernel"
    assert len(done.layers) == 3
    model = Plain(8)
    oneshot(model, images(), 0.5, pattern=Channels(0), include="two.weight")
    assert model.two.weight.detach().flatten(1).any(1).sum() == 8
    assert "shape that does not fit" in next(iter(oneshot(Plain(8), images(), pattern=NM(2, 4)).left_alone))


@pytest.mark.parametrize("settings", [{"num_layers": 2}, {"bidirectional": True}], ids=["two layers", "both ways"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_gates_are_pruned_layer_by_layer(kind, settings):
    torch.manual_seed(0)
    model = Recurrent(kind, **settings)
    before = model(images()[0])
    done = oneshot(model, images(), 0.5)
    assert len(done.layers) == 5
    assert all(layer.error is not None and layer.tokens == (4 * 16 * 8 if "recurrent" in layer.name else 64)
               for layer in done.layers)  # fmt: skip
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert float(parameter.eq(0).float().mean()) == pytest.approx(0.5, abs=0.01), name
    assert not torch.equal(model(images()[0]), before), "what it computes with are the new weights"


# Blocks are found by structure.


def test_blocks():
    assert list(find_blocks(stack())) == ["layers.0", "layers.1", "layers.2"]
    assert list(find_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))) == ["0", "2"]
    mixed = nn.ModuleList([Block2(), nn.Sequential(nn.Linear(8, 8))])
    assert list(find_blocks(nn.ModuleDict({"layers": mixed}))) == ["layers.0", "layers.1"]
    plain = nn.Sequential(nn.Embedding(9, 8), Block2(), Block2(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), Block2())
    assert list(find_blocks(plain)) == ["1", "2", "4"]
    assert list(find_blocks(nn.Sequential(plain, nn.Linear(8, 9)))) == ["0.1", "0.2", "0.4"]
    t5 = make("t5")
    assert list(find_blocks(t5)) == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]


class Halves(nn.Module):
    """Blocks as lists of two halves, which the forward pass unpacks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), Block2()]) for _ in range(2)
        )

    def forward(self, x):
        for attend, rest in self.layers:
            x = rest(x + attend(x))
        return x


def test_a_list_of_lists_stacks_what_is_in_them():
    """A list does not run itself."""
    model = Halves()
    assert list(find_blocks(model)) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    done = oneshot(model, [torch.randn(6, 8) for _ in range(3)], 0.5)
    assert not done.left_alone
    assert {name for name, each in model.named_parameters() if each.dim() == 2} == {each.name for each in done.layers}


def test_a_plain_sequential_whose_blocks_stand_between_other_layers():
    model = nn.Sequential(nn.Embedding(9, 8), Block2(), Block2(), nn.Linear(8, 9))
    whole = copy.deepcopy(model)
    done = oneshot(model, [torch.randint(9, (4, 6)) for _ in range(3)], 0.5)
    assert done.left_alone == {"outside the blocks": ("0.weight", "3.weight")}
    assert {layer.name.split(".")[0] for layer in done.layers} == {"1", "2"}
    for layer in done.layers:
        assert (model.get_parameter(layer.name) == 0).double().mean() == 0.5
    for outside in (0, 3):
        assert torch.equal(model[outside].weight, whole[outside].weight)


# Which matrices of blocks are chosen, and why the others are not.


def test_weights_that_are_shared():
    model = stack(width=12)
    model.layers[1].down.weight = model.layers[1].up.weight  # one matrix with the inputs of both
    model.layers[2].up.weight = model.layers[0].up.weight
    done = oneshot(model, data(), 0.5)
    tokens = {layer.name: layer.tokens for layer in done.layers}
    assert tokens == {"layers.0.down.weight": 24, "layers.1.up.weight": 48, "layers.2.down.weight": 24}
    assert done.left_alone["shared with another block"] == ("layers.0.up.weight",)


# The walk: a block is pruned by what the pruned blocks before it pass on.


@pytest.mark.parametrize("solver", [sparsegpt, WANDA], ids=["sparsegpt", "wanda"])
def test_each_block_is_pruned_by_what_the_pruned_blocks_before_it_pass_on(solver):
    model, by_hand = stack(), stack()
    oneshot(model, data(), 0.5, solver=solver, pattern=Rows(), stages=False)
    x = by_hand.enter(torch.cat(data())).detach()
    with torch.no_grad():
        for layer in by_hand.layers:
            hidden = layer.up(x).relu()  # both of a block's weights see its inputs in the dense block
            for module, inputs in ((layer.up, x), (layer.down, hidden)):
                words = {"gram": inputs.T @ inputs} if solver is sparsegpt else {"input_norm": inputs.norm(dim=0)[None]}
                module.weight.copy_(solver(module.weight, 0.5, Rows(), **words)[0])
            x = layer(x)
    for (name, one), other in zip(model.state_dict().items(), by_hand.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


def test_a_pattern_that_no_weight_fits():
    model = nn.Sequential(Block2(), Block2())
    with pytest.raises(ValueError, match=r"no weight fits 2:5, such as 0\.up\.weight of shape \(12, 8\)"):
        oneshot(model, [torch.randn(3, 8)], pattern=NM(2, 5))


def in_format(form, dimensions):
    kind = {2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    torch.manual_seed(0)
    model = nn.Sequential(kind(2, 16, 3, padding=1), nn.ReLU(), kind(16, 8, 3, padding=1), nn.ReLU(), kind(8, 4, 1))
    return model.eval().to(memory_format=form), torch.randn(4, 2, *[6] * dimensions)


@pytest.mark.parametrize(("form", "dimensions"), [(torch.channels_last, 2), (torch.channels_last_3d, 3)], ids=str)
def test_what_is_pruned_of_a_network_does_not_depend_on_its_memory_format(form, dimensions):
    pruned = {}
    for each in (torch.contiguous_format, form):
        model, x = in_format(each, dimensions)
        found = sensitivity(model, [x], over=("shrink", "oneshot"), shares=(0.5,))
        errors = {name: [level.error for level in levels] for name, levels in found.levels.items()}
        assert len(errors) == 5
        smaller = copy.deepcopy(model)
        shrink(smaller, x, 0.3, batches=[x])
        oneshot(model, [x], 0.5)
        for network in (smaller, model):
            assert all(weight.is_contiguous(memory_format=each) for weight in network.parameters() if weight.dim() > 1)
        pruned[each] = errors, smaller.state_dict(), model.state_dict()
    for one, other in zip(*pruned.values(), strict=True):
        torch.testing.assert_close(other, one)


def turned(weight):
    return weight.transpose(0, 1).contiguous().transpose(0, 1)


def columns(weight):
    return torch.cat((weight, weight), 1)[:, : weight.shape[1]]


def with_gaps(weight):
    return torch.stack((weight, weight), -1)[..., 0]


@pytest.mark.parametrize("lies", [turned, columns, with_gaps])
def test_nor_on_where_its_weights_lie_in_memory(lies):
    x, pruned = torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(1)), []
    for place in (torch.clone, lies):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv1d(2, 16, 3), nn.ReLU(), nn.Conv1d(16, 8, 3), nn.Flatten(), nn.Linear(16, 12), nn.ReLU(),
            nn.Linear(12, 4),
        ).eval()  # fmt: skip
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data = place(weight.data)
        strides = [weight.stride() for weight in model.parameters()]
        smaller = copy.deepcopy(model)
        shrink(smaller, x[:1], 0.3, batches=[x])
        oneshot(model, [x], 0.5)
        assert [weight.stride() for weight in model.parameters()] == strides
        pruned.append((smaller.state_dict(), model.state_dict()))
    for one, other in zip(*pruned, strict=True):
        torch.testing.assert_close(other, one)


def test_two_names_of_one_memory_stay_so_where_it_has_gaps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    whole = with_gaps(model[0].weight.data)
    for layer in (model[0], model[2]):
        layer.weight.data = whole
    x = torch.randn(32, 8)
    oneshot(model, [x], 0.5)
    assert model[0].weight.data_ptr() == model[2].weight.data_ptr() == whole.data_ptr()
    assert int((whole == 0).sum()) == 32
