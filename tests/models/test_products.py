"""Products of inputs with weights: summed as they are computed, whatever the batches, each input once."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from secateur.models.products import Products, Tokens


def test_weights_with_one_input_share_one_gram_matrix_and_others_do_not():
    q, k, v = (nn.Linear(4, 4) for _ in range(3))
    products = Products({"q": q.weight, "k": k.weight, "v": v.weight}, frozenset(["gram"]))
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(3, 4)
            with products.watching(Tokens()):
                q(x)
                k(x)
                x = x + 1  # may well take the place in memory of what is gone
                v(x)
    met = {piece.name: found for piece, found in products.found().items()}
    assert met["q"] is met["k"]
    assert met["q"] is not met["v"]
    assert met["q"].tokens == met["v"].tokens == 6


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 4), (3, 4)),
        (nn.Conv2d(4, 4, 3), (2, 4, 5, 5)),
        (nn.Conv2d(4, 4, 3, padding=1), (2, 4, 5, 5)),  # what is multiplied is a padded copy
        (nn.Conv1d(4, 4, 3, padding="same", groups=2), (2, 4, 5)),
    ],
    ids=["linear", "convolution", "padded", "groups"],
)
def test_an_input_lives_as_long_as_the_pass_so_that_no_other_takes_its_place(layer, shape):
    weights = {name: each for name, each in layer.named_parameters() if each.dim() > 1}
    products = Products(weights, frozenset(["gram"]), unfolds=True)
    with torch.no_grad(), products.watching(Tokens()):
        x = torch.randn(shape)
        layer(x)
        alive = weakref.ref(x)
        del x
        assert alive() is not None


def test_an_input_that_is_changed_in_place_is_another_one():
    q, k = nn.Linear(4, 4), nn.Linear(4, 4)
    products = Products({"q": q.weight, "k": k.weight}, frozenset(["gram"]))
    x = torch.randn(3, 4)
    with torch.no_grad(), products.watching(Tokens()):
        q(x)
        k(x.mul_(2))
    sums = {piece.name: found.sums for piece, found in products.found().items()}
    sums["q"].finish()
    sums["k"].finish()
    torch.testing.assert_close(sums["k"].gram, 4 * sums["q"].gram)


def test_inputs_shared_in_one_batch_only_are_an_error():
    q, k = nn.Linear(4, 4), nn.Linear(4, 4)
    products = Products({"q": q.weight, "k": k.weight}, frozenset(["gram"]))
    x = torch.randn(3, 4)
    with torch.no_grad():
        with products.watching(Tokens()):
            q(x)
            k(x)
        message = "k and q had the same input in one batch and different ones"
        with pytest.raises(ValueError, match=message), products.watching(Tokens()):
            q(x)
            k(x + 1)


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.conv = nn.MultiheadAttention(4, 2, batch_first=True), nn.Conv1d(4, 6, 2, groups=2)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))
        self.plain, self.both = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x, y):
        x = self.attention(x, y, y)[0]
        rows = x.flatten(0, 1)
        once = torch.addmm(self.bias, rows, self.weight), self.plain(x), self.conv(x.mT)
        return once, self.both(2 * x), functional.linear(x + 1, self.both.weight, self.plain.bias)


def test_what_is_added_to_a_product_alone_is_its_bias():
    """Wherever it lies: of attention's matrices each has a part of one vector, and of a convolution each group."""
    torch.manual_seed(0)
    model = Fused()
    parameters = dict(model.named_parameters())
    weights = {name: each for name, each in parameters.items() if each.dim() > 1}
    products = Products(weights, frozenset(["gram"]), unfolds=True)
    with torch.no_grad(), products.watching(Tokens()):
        model(torch.randn(2, 5, 4), torch.randn(2, 5, 4))
    found = {(piece.name, piece.offset): bias for piece, bias in products.biases_in(parameters).items()}
    assert found == {
        ("attention.in_proj_weight", 0): ("attention.in_proj_bias", 0, 4),
        ("attention.in_proj_weight", 16): ("attention.in_proj_bias", 4, 4),
        ("attention.in_proj_weight", 32): ("attention.in_proj_bias", 8, 4),
        ("attention.out_proj.weight", 0): ("attention.out_proj.bias", 0, 4),
        ("conv.weight", 0): ("conv.bias", 0, 3),
        ("conv.weight", 12): ("conv.bias", 3, 3),
        ("weight", 0): ("bias", 0, 3),
    }  # that of `plain` is also added to another product, which has none another time
    assert all(len(bias.of(parameters[bias.name])) == bias.size for bias in found.values())
