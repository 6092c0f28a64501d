"""Laws of slopes: they are the diagonal of the Fisher information, padding does not count, and nothing is changed."""

import importlib
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from secateur.checkpoints import open_checkpoint
from secateur.models import InFiles
from secateur.models.slopes import slopes
from support.families import SMALL, batches, make
from support.unchanged import is_unchanged, state_of


class Coins(nn.Module):
    """Two answers that are equally likely, as all outputs of the first matrix are 0: there v is ±(½, -½), whatever is
    drawn, so that slopes are exact. Tokens differ in how much comes of them."""

    def __init__(self, hidden=5, words=6):
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(torch.zeros(words, 3))
        self.first, self.head = nn.Linear(3, hidden, bias=False), nn.Linear(hidden, 2, bias=False)
        self.register_buffer("scale", torch.linspace(1, 2, words))

    def answers(self, outputs, input_ids):
        return self.head(outputs * self.scale[input_ids][..., None])

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(logits=self.answers(self.first(self.embed(input_ids)), input_ids))

    def exact(self, scale):
        return ((self.head.weight[0] - self.head.weight[1]).double() / 2).square() * scale.double().square().mean()


def close(found, wanted, rtol=1e-5):
    torch.testing.assert_close(found, wanted.expand_as(found), rtol=rtol, atol=0)


def named(found):
    return {piece.name: each for piece, each in found.items()}


def tokens(*shape):
    return torch.randint(0, 6, shape)


def test_slopes_are_exact_where_v_is_known():
    model = Coins()
    batches = [tokens(2, 3), tokens(4, 5)]
    found = named(slopes(model, batches, ["first.weight"]))["first.weight"]
    assert found.dtype == torch.float64
    close(found, model.exact(torch.cat([model.scale[each].flatten() for each in batches])))


def test_a_model_may_ask_for_the_shape_of_a_number():
    class Asking(nn.Sequential):
        def forward(self, x):
            assert x.sum().shape == ()
            return super().forward(x)

    assert [*named(slopes(Asking(nn.Linear(3, 2)), [torch.ones(4, 3)], ["0.weight"]))] == ["0.weight"]


def test_half_of_a_squared_slope_is_what_a_small_move_costs():
    model, ids, step = Coins().double(), tokens(3, 4), 1e-2
    found = named(slopes(model, [{"input_ids": ids}], ["first.weight"]))["first.weight"]
    with torch.no_grad():
        before = model(ids).logits.log_softmax(-1)
        for at, slope in enumerate(found):
            outputs = torch.zeros(*ids.shape, len(found), dtype=torch.float64)
            outputs[..., at] = step
            after = model.answers(outputs, ids).log_softmax(-1)
            cost = (before.exp() * (before - after)).sum(-1).mean()
            close(cost, step**2 / 2 * slope, rtol=1e-3)


def test_many_draws_come_to_the_diagonal_of_the_fisher_information():
    class Answering(nn.Sequential):
        def forward(self, x):
            return SimpleNamespace(logits=super().forward(x))

    model = Answering(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(40, 4)
    wanted = torch.zeros(5, dtype=torch.float64)
    with torch.no_grad():
        for row in x:
            p = model(row).logits.softmax(-1).double()
            J = model[2].weight.double() * (model[0](row) > 0)
            wanted += (J.T @ (p.diag() - p.outer(p)) @ J).diagonal() / len(x)
    found = named(slopes(model, [x.repeat(1000, 1)], ["0.weight"]))["0.weight"]
    torch.testing.assert_close(found, wanted, rtol=0.1, atol=1e-4)


def test_of_numbers_the_slopes_are_in_units_of_how_much_they_vary():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
    x = torch.randn(20_000, 4)
    found = named(slopes(model, [x], ["0.weight"]))["0.weight"]
    w = model[1].weight[0].detach().double()
    one = found / w.square()  # all rows draw the same v for all of them
    close(one, one[:1])
    with torch.no_grad():
        close(one, 1 / model(x).double().var(correction=0), rtol=0.1)
    model[1].weight.data *= 8
    model[1].bias.data *= 8
    close(named(slopes(model, [x], ["0.weight"]))["0.weight"], found, rtol=1e-4)


def test_an_output_of_one_row_says_nothing_beside_others():
    """It has no variance to divide by, as the pooled state of one text."""

    class Pooled(nn.Sequential):
        def forward(self, x):
            states = super().forward(x)
            return {"states": states, "pooled": states[:, 0].tanh()}

    model, x = Pooled(nn.Linear(4, 5), nn.Linear(5, 3)), torch.randn(1, 50, 4)
    found = named(slopes(model, [x], ["0.weight"]))["0.weight"]
    close(found, named(slopes(nn.Sequential(*model), [x], ["0.weight"]))["0.weight"])
    assert named(slopes(nn.Sequential(*model), [x[:, :1]], ["0.weight"]))["0.weight"].isfinite().all()


def test_what_is_behind_a_product_may_change_its_outputs_in_place():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    model, pictures = nn.Sequential(*layers), [torch.randn(5, 3, 6, 6)]
    names = ["0.weight", "3.weight"]
    wanted = slopes(model, pictures, names)
    model[1].inplace = True
    found = slopes(model, pictures, names)
    assert {piece.name for piece in found} == {*names}
    assert all(torch.equal(found[piece], wanted[piece]) for piece in wanted)


def test_padding_does_not_count():
    model = Coins()
    model.scale[0] = 1000.0  # of what pads
    ids = torch.tensor([[3, 1, 2, 0, 0], [5, 4, 0, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": ids.ne(0).long()}
    found = named(slopes(model, [batch], ["first.weight"]))["first.weight"]
    close(found, model.exact(model.scale[ids[ids != 0]]))
    batch["attention_mask"] = torch.ones_like(ids)
    found = named(slopes(model, [batch], ["first.weight"]))["first.weight"]
    close(found, model.exact(model.scale[ids].flatten()))


def test_what_nothing_uses_has_no_slope_and_what_is_not_run_is_not_given():
    model = Coins()
    model.head.weight.data[:, 2] = 0
    model.unused = nn.Linear(3, 3)
    found = named(slopes(model, [tokens(2, 3)], ["first.weight", "unused.weight"]))
    assert found.keys() == {"first.weight"}
    assert (found["first.weight"] > 0).tolist() == [True, True, False, True, True]
    assert slopes(model, [], ["first.weight"]) == {}
    assert slopes(nn.Linear(3, 2), [torch.ones(4, 3)], []) == {}


def test_what_a_model_keeps_from_gradients_has_no_slope():
    class Indexed(nn.Sequential):
        """As DeepSeek-V3.2, whose indexer says which tokens are attended to."""

        def forward(self, x):
            with torch.no_grad():
                away = self[0](x).argmax(-1, keepdim=True) == 0
            return self[1](x.masked_fill(away, 0.0))

    torch.manual_seed(0)
    model, x = Indexed(nn.Linear(4, 2), nn.Linear(4, 3)), torch.randn(50, 4)
    away = model[0](x).argmax(-1, keepdim=True) == 0
    found = named(slopes(model, [x], ["0.weight", "1.weight"]))
    assert found.keys() == {"1.weight"}
    assert away.any() != away.all()
    alone = slopes(nn.Sequential(model[1]), [x.masked_fill(away, 0.0)], ["0.weight"])
    close(found["1.weight"], named(alone)["0.weight"])


def test_models_without_numbers_have_no_slopes():
    class Choosing(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    assert slopes(Choosing(3, 4), [torch.randn(2, 3)], ["weight"]) == {}


class Pictures(nn.Module):
    def __init__(self, convolution, head):
        super().__init__()
        self.first, self.head = convolution, head

    def forward(self, x):
        return SimpleNamespace(logits=self.head(self.first(x).flatten(-len(self.first.kernel_size)).mean(-1)))


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv1d(3, 4, 2, bias=False), (6, 3, 5)),
        (nn.Conv2d(3, 4, 2, bias=False), (6, 3, 5, 5)),
        (nn.Conv2d(3, 4, 2, bias=False), (6, 3, 5, 4)),
        (nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), (1, 3, 8, 8)),  # as many positions as channels, each way
        (nn.Conv3d(1, 4, 2, bias=False), (2, 1, 3, 3, 3)),
    ],
    ids=["1d", "2d", "no square", "as many as channels", "3d"],
)
def test_outputs_of_a_convolution_are_its_channels(convolution, shape):
    model = Pictures(convolution, nn.Linear(4, 2, bias=False))
    x = torch.zeros(shape)
    positions = convolution(x)[0, 0].numel()
    found = named(slopes(model, [x], ["first.weight"]))["first.weight"]
    w = model.head.weight.detach().double()
    close(found, ((w[0] - w[1]) / 2 / positions).square())


class Pooled(nn.Module):
    """A token's outputs, or those of all together."""

    def __init__(self, dim):
        super().__init__()
        self.mix, self.head, self.dim = nn.Linear(4, 5), nn.Linear(5, 3), dim

    def forward(self, x):
        x = self.head(self.mix(x))
        return x if self.dim is None else x.mean(self.dim)


def test_of_all_positions_together_there_are_none_unless_asked():
    x = torch.randn(6, 7, 4)
    for model, given, are in [
        (Pooled(1), x, False),
        (Pooled(None), x, True),
        (Pooled(None), x[:, 0], True),  # no positions
        (Pictures(nn.Conv1d(4, 5, 2), nn.Linear(5, 3)), x.mT, False),
    ]:
        names = ["mix.weight"] if isinstance(model, Pooled) else ["first.weight"]
        assert bool(slopes(model, [given], names, unless_pooled=True)) is are
        assert slopes(model, [given], names)
        assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_is(training):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    model.train(training)
    model[0].train(not training)
    model[3].bias.requires_grad_(False)
    model[0].weight.grad = torch.full((6, 4), 2.0)
    grad = model[0].weight.grad

    def state():
        return (
            [each.training for each in model.modules()],
            [(id(each), each.requires_grad, id(each.grad)) for each in model.parameters()],
            {name: each.tolist() for name, each in model.state_dict().items()},
            grad.tolist(),
            (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),  # noqa: NPY002
            torch.is_grad_enabled(),
        )

    before, x = state(), torch.ones(8, 4)
    found = slopes(model, [x, x], ["0.weight", "3.weight"])
    assert state() == before
    torch.rand(3)
    before = state()
    with torch.no_grad():
        again = slopes(model, [x, x], ["0.weight", "3.weight"])
    assert named(found).keys() == {"0.weight", "3.weight"}
    assert all(torch.equal(again[piece], each) for piece, each in found.items())  # and draws the same each time
    assert state() == before


def test_a_pass_that_fails_leaves_the_model_as_it_is():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).train()
    with pytest.raises(RuntimeError):
        slopes(model, [torch.ones(2, 4), torch.ones(2, 5)], ["0.weight"])
    assert model.training
    assert all(each.requires_grad and each.grad is None for each in model.parameters())
    assert torch.is_grad_enabled()


# ---- block by block -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2", "t5", "mixtral"])
def test_block_by_block_in_a_directory_they_are_those_in_memory(family, tmp_path):
    model = make(family).eval()
    model.save_pretrained(tmp_path / "dense")
    names = [name for name, each in model.named_parameters() if each.dim() > 1]
    given = batches(family)
    wanted = slopes(model, given, names)
    place = InFiles(open_checkpoint(tmp_path / "dense"), tmp_path / "dense", given, activations=tmp_path)
    inside = {
        piece: each for piece, each in wanted.items() if piece.name.startswith(tuple(f"{b}." for b in place.blocks))
    }
    found = place.slopes(names, given)
    assert inside
    assert found.keys() == inside.keys()
    for piece, each in found.items():
        torch.testing.assert_close(
            each, inside[piece], rtol=1e-4, atol=1e-9, msg=lambda m, name=piece.name: f"{name} {m}"
        )
    assert not any("forward" in vars(block) for block in place.blocks.values())
    assert all(each.is_meta for each in place.model.parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    again = place.slopes(names, given)
    assert all(torch.equal(again[piece], each) for piece, each in found.items())


def test_block_by_block_of_all_positions_together_there_are_none(tmp_path):
    config = transformers.BertConfig(**{name: each for name, each in SMALL.items() if "key" not in name}, num_labels=3)
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "dense")
    names = [name for name, each in model.named_parameters() if each.dim() > 1]
    given = batches("bert")
    place = InFiles(open_checkpoint(tmp_path / "dense"), tmp_path / "dense", given, activations=tmp_path)
    assert slopes(model, given, names)
    assert slopes(model, given, names, unless_pooled=True) == place.slopes(names, given) == {}
    assert not any("forward" in vars(block) for block in place.blocks.values())
    assert all(each.is_meta for each in place.model.parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_one_block_is_in_memory_at_a_time(tmp_path, monkeypatch):
    make("llama").save_pretrained(tmp_path)
    given = batches("llama")
    place = InFiles(open_checkpoint(tmp_path), tmp_path, given)
    there, load = [], place.files.load

    def loading(block, *, finished):
        load(block, finished=finished)
        there.append([name for name, each in place.blocks.items() if not any(p.is_meta for p in each.parameters())])

    monkeypatch.setattr(place.files, "load", loading)
    place.slopes([name for name, _ in place.model.named_parameters()], given)
    order = [*place.blocks, *reversed(place.blocks)]
    assert there == [[name] for _ in given for name in order]


def test_what_fails_on_the_way_leaves_no_block_in_memory(tmp_path):
    make("llama").save_pretrained(tmp_path / "dense")
    given = batches("llama")
    place = InFiles(open_checkpoint(tmp_path / "dense"), tmp_path / "dense", given, activations=tmp_path)

    def failing(model, batch):
        model(**batch)
        raise RuntimeError("no more")

    place.forward = failing
    with pytest.raises(RuntimeError, match="no more"):
        place.slopes([], given)
    assert all(each.is_meta for each in place.model.parameters())
    assert not any("forward" in vars(block) for block in place.blocks.values())
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_of_large_blocks_they_are_taken_block_by_block(monkeypatch):
    """And come to the same, with the same draws."""
    model = make("llama")
    names = [name for name, each in model.named_parameters() if each.dim() == 2 and ".layers." in name]
    expected = slopes(model, batches("llama"), names)
    calls = []
    by_blocks = importlib.import_module("secateur.models.slopes")  # the package has a function of that name
    by_block = by_blocks.slopes_by_block
    monkeypatch.setattr(by_blocks, "LARGE", 1)
    monkeypatch.setattr(
        by_blocks, "slopes_by_block", lambda *args, **kwargs: calls.append(1) or by_block(*args, **kwargs)
    )
    state = state_of(model)
    found = slopes(model, batches("llama"), names)
    assert calls == [1]
    assert is_unchanged(model, state)
    assert not any("forward" in vars(module) for module in model.modules())
    assert found.keys() == expected.keys()
    for piece, each in expected.items():
        torch.testing.assert_close(found[piece], each, rtol=1e-4, atol=0)
