"""Products of inputs with weights: summed as they are computed, whatever the batches, each input once."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from secateur.models import observation, oneshot
from secateur.models.pairs import PairedStats
from secateur.models.products import Products, Tokens
from secateur.solvers import sparsegpt
from support.families import Encoder, batches, make


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


def test_what_is_used_once_more_has_sums_of_its_own():
    q, v = nn.Linear(4, 4), nn.Linear(4, 4)
    products, seen = Products({"q": q.weight, "v": v.weight}, frozenset(["gram"])), []
    with torch.no_grad():
        for _ in range(2):
            x, state = torch.randn(5, 4), torch.randn(1, 4)
            seen += [x, state]
            with products.watching(Tokens()):
                q(x)
                v(x)
                v(state)  # as Zaya's delayed values, of what was before the first token
    sums = {piece.name: found.sums for piece, found in products.found().items()}
    for name, rows in (("q", seen[::2]), ("v", seen)):
        sums[name].finish()
        torch.testing.assert_close(sums[name].gram, torch.cat(rows).T @ torch.cat(rows))
        assert sums[name].tokens == len(torch.cat(rows))


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


def test_experts_that_no_token_was_sent_to_share_no_input():
    experts = nn.Parameter(torch.randn(3, 4, 4))
    products = Products({"experts": experts}, frozenset(["gram"]))
    with torch.no_grad():
        for sizes in ([5, 0, 0], [2, 3, 0]):  # as JetMoE does it, every expert in turn
            with products.watching(Tokens()):
                for weight, x in zip(experts, torch.randn(5, 4).split(sizes), strict=True):
                    functional.linear(x, weight)
            assert products.entries["experts"] == experts.numel()
    assert {piece.offset: found.tokens for piece, found in products.found().items()} == {0: 7, 16: 3}


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


# ---- What ends in a residual stream is found by structure, and its residual is the stream's. ----


ENDS = {
    "llama": {"o_proj": 1, "down_proj": 1},
    "gpt2": {"attn.c_proj": 1, "mlp.c_proj": 1},
    "gpt_neox": {"attention.dense": 2, "dense_4h_to_h": 2},
    "falcon": {"self_attention.dense": 2, "dense_4h_to_h": 2},
    "bloom": {"self_attention.dense": 1, "dense_4h_to_h": 1},
    "bert": {"attention.output.dense": 1, "output.dense": 1},
    "t5": {"SelfAttention.o": 1, "EncDecAttention.o": 1, "DenseReluDense.wo": 1},
    "gemma3": {},  # a normalization lies between
    "mixtral": {"o_proj": 1},  # experts are weighted first
    "mamba": {"out_proj": 1},
}


@pytest.fixture
def ends(monkeypatch):
    """``{name of a product that ends in a sum: how many share that}``, as a walk finds them."""
    found = {}

    class Noting(PairedStats):
        def end_batch(self):
            super().end_batch()
            found.update({piece.name: shared for piece, shared in self.expected.items()})

    monkeypatch.setattr(observation, "PairedStats", Noting)
    return found


@pytest.mark.parametrize("family", ENDS)
def test_what_is_added_to_the_stream(family, ends):
    oneshot(make(family), batches(family, count=2), 0.5, solver=sparsegpt)
    expected, seen = ENDS[family], set()
    for name, shared in ends.items():
        short = max((each for each in expected if name.endswith(f"{each}.weight")), key=len)
        assert shared == expected[short], name
        seen.add(short)
    assert seen == expected.keys()


def test_the_output_of_pytorchs_attention_is_followed_turned(ends):
    torch.manual_seed(0)
    oneshot(Encoder().eval(), [torch.randint(64, (2, 7)) for _ in range(2)], 0.5, solver=sparsegpt)
    assert ends == {"self_attn.out_proj.weight": 1, "linear2.weight": 1}


@torch.no_grad()
def test_an_activation_that_adds_to_its_input_is_no_stream():
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(5, 4)
    pairs = PairedStats({"weight": layer.weight}, frozenset(["gram"]))
    with pairs.beside(Tokens(), None, 5, dense=False), pairs.learning():
        y = layer(x)
        _ = y + 0.04 * y.pow(3)
    pairs.end_batch()
    assert pairs.expected == {}
    pairs = PairedStats({"weight": layer.weight}, frozenset(["gram"]))
    with pairs.beside(Tokens(), None, 5, dense=False), pairs.learning():
        _ = layer(x) + x.pow(3)
    pairs.end_batch()
    assert list(pairs.expected.values()) == [1]


class Halves(nn.Module):
    """Two products added up, as attention and MLP side by side are, and both to the stream."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x):
        return self.one(x) + self.two(x) + x


@torch.no_grad()
def test_products_that_are_added_up_share_what_the_sum_lacks():
    torch.manual_seed(0)
    block, wanted, x = Halves(), torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    pairs = PairedStats({"one": block.one.weight, "two": block.two.weight}, frozenset(["gram"]))
    for given, dense in ((wanted, True), (x, False)):
        with pairs.beside(Tokens(), None, 10, dense=dense), pairs.learning():
            block(given)
    pairs.end_batch()
    rows = x.reshape(-1, 4)
    residual_cross = (block(wanted) - block(x)).reshape(-1, 4).T @ rows / 2
    for met in pairs.found().values():
        torch.testing.assert_close(met.residual_cross, residual_cross)


@torch.no_grad()
def test_padding_lacks_nothing_and_tokens_that_went_elsewhere_are_not_compared():
    torch.manual_seed(0)
    layer, wanted, x = nn.Linear(4, 3), torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    pairs = PairedStats({"weight": layer.weight}, frozenset(["gram"]))
    for given, dense in ((wanted, True), (x, False)):
        with pairs.beside(Tokens(mask), None, 10, dense=dense):
            layer(given)
    pairs.end_batch()
    (met,) = pairs.found().values()
    torch.testing.assert_close(met.residual_cross, layer.weight @ ((wanted - x)[mask].T @ x[mask]))
    pairs = PairedStats({"weight": layer.weight}, frozenset(["gram"]))
    for given, dense in ((wanted, True), (x, False)):
        with pairs.beside(Tokens(), None, 10, dense=dense):
            layer(given[0])  # five of ten
    pairs.end_batch()
    (met,) = pairs.found().values()
    assert met.residual_cross is None
    assert met.tokens == 5
